"""The gradient in a world of several ranks is that of one process with the global batch, whatever the shares and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_world import on_ranks, world
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from spark_elastic import DistributedDataParallel, micro_batches
from spark_elastic.data import ElasticDataLoader
from spark_elastic.data.deliveries import deliveries

Rows = tuple[torch.Tensor, torch.Tensor]
Gradients = list[torch.Tensor | None]


class Net(nn.Module):
    """Calls itself, so that it can be called on its own output; keeps a loss beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)
        self.penalty: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        self.penalty = hidden.square().mean()
        return self.second(hidden)


class Hidden(nn.Module):
    """Keeps a loss that all of its parameters are in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.penalty: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        self.penalty = hidden.square().mean()
        return hidden


class Idle(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(2))


class Two(Net):
    """Has an output from which another one is computed."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.first(x))
        return {"hidden": hidden, "out": self.second(hidden)}


class SyncBatchNorm(nn.SyncBatchNorm):
    """Torch's arithmetic with the batches of all ranks, on a CPU, which torch's own does not run on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])])
        if torch.distributed.is_initialized():
            sums = torch.distributed.nn.functional.all_reduce(sums)
        mean, squares = sums[:-1].view(2, -1) / sums[-1].detach()
        return (x - mean) / (squares - mean.square() + self.eps).sqrt() * self.weight + self.bias


class Normalized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(SyncBatchNorm(5), nn.Linear(5, 3))


@dataclass
class Output:
    out: torch.Tensor
    name: str = "a dataclass"


class Plain(Net):
    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x))


class Checkpointed(Net):
    """Has a backward pass of its own within that of the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = torch.tanh(self.first(x))
        found: torch.Tensor = checkpoint(self.second, hidden, use_reentrant=True)
        return found


class Likely(Net):
    def forward(self, x: torch.Tensor) -> torch.distributions.Independent:  # type: ignore[override]
        mean = super().forward(x)
        return torch.distributions.Independent(torch.distributions.Normal(mean, mean.square() + 0.5), 1)


class Drawn(Net):
    def forward(self, likely: torch.distributions.Independent) -> torch.Tensor:  # type: ignore[override]
        return super().forward(likely.mean + likely.variance)


class Setting:
    """What a loop is played with: fresh models, loaders of uneven batches, and the gradients of each step."""

    def __init__(self, *modules: nn.Module, **ddp: Any) -> None:
        torch.manual_seed(0)
        for module in modules:
            module.double()
            for parameter in module.parameters():
                nn.init.normal_(parameter)
        self.models = [DistributedDataParallel(module, **ddp) for module in modules]
        self.a, self.b = self.loader(23, 7), self.loader(17, 5)
        self.gradients: Gradients = []
        self.place = (0, 1)

    def loader(self, rows: int, batch: int) -> ElasticDataLoader:
        generator = torch.Generator().manual_seed(rows)
        x, y = (torch.randn(rows, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        return ElasticDataLoader(torch.utils.data.TensorDataset(x, y), global_batch_size=batch)

    def step(self) -> None:
        for model in self.models:
            self.gradients += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            model.forget_rows()


Loop = Callable[[Setting], None]


def a_plain_loop(s: Setting) -> None:
    for x, y in s.a:
        mse_loss(s.models[0](x), y).backward()
        s.step()


def shares_that_change(s: Setting) -> None:
    size = s.place[1]
    for number, (x, y) in enumerate(s.a):
        mse_loss(s.models[0](x), y).backward()
        s.step()
        shares = [7 - (size - 1)] + [1] * (size - 1)
        s.a._tracker.divide(tuple(shares[-number % size :] + shares[: -number % size]))


def a_rank_without_rows(s: Setting) -> None:
    s.a = s.loader(7, 2)
    s.a.set_world(*s.place)
    a_plain_loop(s)


def a_model_on_its_own_output(s: Setting) -> None:
    for x, y in s.a:
        mse_loss(s.models[0](s.models[0](x)), y).backward()
        s.step()


def a_generator_and_a_discriminator(s: Setting) -> None:
    generator, discriminator = s.models
    for x, _ in s.a:
        noise = (x * 2).sin()
        fake = generator(noise)
        (discriminator(x).sigmoid().mean() + discriminator(fake.detach()).square().mean()).backward()
        s.step()
        discriminator.requires_grad_(False)
        discriminator(fake).square().mean().backward()
        discriminator.requires_grad_(True)
        s.step()


def two_batches_in_one_loss(s: Setting) -> None:
    for (x, y), (u, _) in zip(s.a, s.b, strict=False):
        (mse_loss(s.models[0](x), y) + 0.3 * s.models[0](u).square().mean()).backward()
        s.step()


def two_batches_in_one_loss_through_two_models(s: Setting) -> None:
    one, two = s.models
    for (x, y), (u, _) in zip(s.a, s.b, strict=False):
        features = one(x)
        (mse_loss(two(features), y) + two(one(u)).square().mean() + features.abs().mean()).backward()
        s.step()


def two_batches_with_a_backward_each_after_both_forwards(s: Setting) -> None:
    for (x, y), (u, _) in zip(s.a, s.b, strict=False):
        losses = [mse_loss(s.models[0](x), y), s.models[0](u).square().mean()]
        for loss in losses:
            loss.backward()
        s.step()


def rows_fetched_ahead(s: Setting) -> None:
    batches = iter(s.a)
    batch = next(batches)
    while batch is not None:
        after = next(batches, None)
        mse_loss(s.models[0](batch[0]), batch[1]).backward()
        s.step()
        batch = after


def rows_fetched_ahead_and_converted(s: Setting) -> None:
    s.a = s.loader(20, 7)
    s.a.set_world(*s.place)
    batches = ((x.float().double(), y) for x, y in s.a)
    batch = next(batches)
    while batch is not None:
        after = next(batches, None)
        mse_loss(s.models[0](batch[0] * 1), batch[1]).backward()
        mse_loss(s.models[0](batch[0].sin()), batch[1]).backward()
        s.step()
        batch = after


def rows_fetched_between_forward_and_backward(s: Setting) -> None:
    batches = iter(s.a)
    batch = next(batches)
    while batch is not None:
        loss = mse_loss(s.models[0](batch[0].float().double()), batch[1])
        batch = next(batches, None)
        loss.backward()
        s.step()


def accumulated_batches(s: Setting) -> None:
    batches = list(s.a)
    for number, (x, y) in enumerate(batches):
        s.models[0].require_backward_grad_sync = number == len(batches) - 1
        mse_loss(s.models[0](x), y).backward()
    s.step()


def accumulated_parts(s: Setting) -> None:
    for batch in s.a:
        for (x, y), part in micro_batches(s.models[0], tuple(batch), 2):
            (part * mse_loss(s.models[0](x), y)).backward()
        s.step()


def a_loss_that_the_module_keeps(s: Setting) -> None:
    for x, y in s.a:
        (mse_loss(s.models[0](x), y) + s.models[0].module.penalty).backward()
        s.step()


def weights_of(s: Setting) -> torch.Tensor:
    return torch.stack([p.square().sum() for p in s.models[0].parameters()]).sum()


def a_penalty_on_weights_after_the_loss(s: Setting) -> None:
    for x, y in s.a:
        mse_loss(s.models[0](x), y).backward()
        weights_of(s).backward()
        s.step()


def a_penalty_on_weights_before_the_forward(s: Setting) -> None:
    for x, y in s.a:
        weights_of(s).backward()
        mse_loss(s.models[0](x), y).backward()
        s.step()


def a_penalty_on_weights_after_each_of_accumulated_batches(s: Setting) -> None:
    batches = list(s.a)
    for number, (x, y) in enumerate(batches):
        s.models[0].require_backward_grad_sync = number == len(batches) - 1
        mse_loss(s.models[0](x), y).backward()
        weights_of(s).backward()
    s.step()


def a_penalty_on_weights_between_two_losses(s: Setting) -> None:
    for (x, y), (u, _) in zip(s.a, s.b, strict=False):
        mse_loss(s.models[0](x), y).backward()
        weights_of(s).backward()
        s.models[0](u).square().mean().backward()
        weights_of(s).backward()
        s.step()


def a_kept_loss_after_gradients_that_nothing_adds_up(s: Setting) -> None:
    for x, _ in s.a:
        out = s.models[0](x)
        torch.autograd.grad(out.square().mean(), [s.models[0].module.first.weight], retain_graph=True)
        s.models[0].module.penalty.backward()
        s.step()


def a_kept_loss_of_a_model_that_was_called_before_another_one(s: Setting) -> None:
    one, two = s.models
    for x, y in s.a:
        two(x)
        mse_loss(one(x), y).backward()
        two.module.penalty.backward()
        s.step()


def a_penalty_on_gradients(s: Setting) -> None:
    for (x, _), (u, _) in zip(s.a, s.b, strict=False):
        given = x.detach().requires_grad_()
        out = s.models[0](given)
        (gradient,) = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        (penalty + s.models[0](u).square().mean() + out.mean()).backward()
        s.step()


def gradients_of_inputs(s: Setting) -> None:
    for x, y in s.a:
        given = (x * 2).requires_grad_()
        mse_loss(s.models[0](given), y, reduction="sum").backward()
        # Each row's own: on whatever rank it is, and whatever its share.
        moved = given.detach() + given.grad.sign()
        s.models[0].zero_grad()
        mse_loss(s.models[0](moved), y).backward()
        s.step()


def inputs_moved_along_their_gradients_on_a_rank_without_rows(s: Setting) -> None:
    s.a = s.loader(7, 2)
    s.a.set_world(*s.place)
    for x, y in s.a:
        given = (x * 2).requires_grad_()
        (gradient,) = torch.autograd.grad(mse_loss(s.models[0](given), y, reduction="sum"), given)
        moved = given.detach() + gradient / gradient.norm(dim=1, keepdim=True)
        mse_loss(s.models[0](moved), y).backward()
        s.step()


def outputs_that_depend_on_each_other(s: Setting) -> None:
    for (x, y), (u, _) in zip(s.a, s.b, strict=False):
        first, second = s.models[0](x), s.models[0](u)
        (mse_loss(first["out"], y) + first["hidden"].square().mean() + second["out"].mean()
         + second["hidden"].abs().mean()).backward()  # fmt: skip
        s.step()


def outputs_in_an_object(s: Setting) -> None:
    for (x, y), (u, _) in zip(s.a, s.b, strict=False):
        likely = s.models[0](x).log_prob(y).mean()
        (s.models[0](u).base_dist.entropy().mean() - likely).backward()
        s.step()


def an_object_that_goes_into_another_model(s: Setting) -> None:
    encode, decode = s.models
    for (x, y), (u, _) in zip(s.a, s.b, strict=False):
        (mse_loss(decode(encode(x)), y) + decode(encode(u)).square().mean()).backward()
        s.step()


def outputs_in_a_dataclass(s: Setting) -> None:
    for (x, y), (u, _) in zip(s.a, s.b, strict=False):
        (mse_loss(s.models[0](x).out, y) + s.models[0](u).out.square().mean()).backward()
        s.step()


def an_output_changed_in_place(s: Setting) -> None:
    for x, y in s.a:
        mse_loss(s.models[0](x).mul_(2).sigmoid_(), y).backward()
        s.step()


def a_model_in_a_checkpoint(s: Setting, use_reentrant: bool = False) -> None:
    one, two = s.models
    for x, y in s.a:
        mse_loss(two(checkpoint(one, x.requires_grad_(use_reentrant), use_reentrant=use_reentrant)), y).backward()
        s.step()


def a_model_in_a_reentrant_checkpoint(s: Setting) -> None:
    a_model_in_a_checkpoint(s, True)


def a_reentrant_checkpoint_in_the_model(s: Setting) -> None:
    a_plain_loop(s)


def a_reentrant_checkpoint_in_the_model_and_a_penalty_on_weights(s: Setting) -> None:
    a_penalty_on_weights_after_the_loss(s)


def rows_set_by_hand_around_a_reentrant_checkpoint(s: Setting) -> None:
    rows_set_by_hand(s)


def layers_that_begin_and_cease_to_train(s: Setting) -> None:
    model = s.models[0].module
    model.second.requires_grad_(False)
    for number, (x, y) in enumerate(s.a):
        if number == 1:
            model.second.requires_grad_(True)
        elif number == 2:
            model.first.requires_grad_(False)
        mse_loss(s.models[0](x), y).backward()
        s.step()
    model.first = nn.Linear(3, 5).double()
    s.a.set_epoch(1)
    for parameter in model.first.parameters():
        nn.init.ones_(parameter)
    a_plain_loop(s)


def average_by_hand(s: Setting) -> None:
    for parameter in s.models[0].parameters():
        if s.place[1] > 1 and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= s.place[1]


def the_module_called_by_itself(s: Setting) -> None:
    for x, y in s.a:
        mse_loss(s.models[0].module(x), y).backward()
        average_by_hand(s)
        s.step()


class WithoutGradient(torch.autograd.Function):
    """Says of its second argument that it has none."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * 2, None


def a_parameter_that_a_function_gives_no_gradient(s: Setting) -> None:
    module = s.models[0].module
    for x, y in s.a:
        mse_loss(WithoutGradient.apply(module(x), module.unused), y).backward()  # type: ignore[no-untyped-call]
        average_by_hand(s)
        s.step()


def a_step_of_its_own_for_each_row(s: Setting) -> None:
    """Meta-learning: the loss is that of weights moved along a gradient."""
    module = s.models[0].module
    for x, y in s.a:
        losses = []
        for row, wanted in zip(x.split(1), y.split(1), strict=True):
            weights = dict(module.named_parameters())
            inner = torch.autograd.grad(mse_loss(module(row), wanted), [*weights.values()], create_graph=True)
            moved = {name: old - 0.1 * by for (name, old), by in zip(weights.items(), inner, strict=True)}
            losses.append(mse_loss(torch.func.functional_call(module, moved, (row,)), wanted))
        torch.stack(losses).mean().backward()
        average_by_hand(s)
        s.step()


def gradients_of_the_same_rows_on_all_ranks_between_steps(s: Setting) -> None:
    fixed = torch.ones(4, 3, dtype=torch.float64)
    for x, y in s.a:
        mse_loss(s.models[0](x), y).backward()
        s.step()
        deliveries.committed()
        s.models[0].module(fixed).square().mean().backward()
        s.step()


def rows_that_are_normalized_over_all_ranks(s: Setting) -> None:
    shares_that_change(s)


def rows_set_by_hand(s: Setting) -> None:
    model = s.models[0]
    for number, (x, y) in enumerate(s.a):
        mask = x[:, 0] > 0
        if number % 2:
            model.set_rows(int(mask.sum()))
        losses = (model(x) - y).square().mean(1)
        if not number % 2:
            model.set_rows(int(mask.sum()))
        ((losses * mask).sum() / mask.sum().clamp(min=1)).backward()
        s.step()


def rows_set_by_hand_of_which_some_ranks_have_none(s: Setting) -> None:
    for x, y in s.a:
        kept = x[:, 0] > 0.5
        s.models[0].set_rows(int(kept.sum()))
        mse_loss(s.models[0](x)[kept], y[kept]).backward()
        s.step()


LOOPS: dict[str, tuple[Loop, Callable[[], Setting]]] = {
    loop.__name__: (loop, made)
    for made, loops in {
        lambda: Setting(Net()): [
            a_plain_loop,
            shares_that_change,
            a_rank_without_rows,
            a_model_on_its_own_output,
            two_batches_in_one_loss,
            two_batches_with_a_backward_each_after_both_forwards,
            rows_fetched_ahead,
            rows_fetched_ahead_and_converted,
            rows_fetched_between_forward_and_backward,
            accumulated_batches,
            accumulated_parts,
            a_loss_that_the_module_keeps,
            a_penalty_on_gradients,
            a_penalty_on_weights_after_the_loss,
            a_penalty_on_weights_before_the_forward,
            a_penalty_on_weights_after_each_of_accumulated_batches,
            a_penalty_on_weights_between_two_losses,
            gradients_of_inputs,
            inputs_moved_along_their_gradients_on_a_rank_without_rows,
            an_output_changed_in_place,
            layers_that_begin_and_cease_to_train,
            the_module_called_by_itself,
            a_step_of_its_own_for_each_row,
            gradients_of_the_same_rows_on_all_ranks_between_steps,
            rows_set_by_hand,
            rows_set_by_hand_of_which_some_ranks_have_none,
        ],
        lambda: Setting(Net(), Net()): [
            a_generator_and_a_discriminator,
            two_batches_in_one_loss_through_two_models,
            a_model_in_a_checkpoint,
            a_model_in_a_reentrant_checkpoint,
        ],
        lambda: Setting(Checkpointed()): [
            a_reentrant_checkpoint_in_the_model,
            a_reentrant_checkpoint_in_the_model_and_a_penalty_on_weights,
            rows_set_by_hand_around_a_reentrant_checkpoint,
        ],
        lambda: Setting(Hidden()): [a_kept_loss_after_gradients_that_nothing_adds_up],
        lambda: Setting(Net(), Hidden()): [a_kept_loss_of_a_model_that_was_called_before_another_one],
        lambda: Setting(Idle()): [a_parameter_that_a_function_gives_no_gradient],
        lambda: Setting(Two()): [outputs_that_depend_on_each_other],
        lambda: Setting(Plain()): [outputs_in_a_dataclass],
        lambda: Setting(Likely()): [outputs_in_an_object],
        lambda: Setting(Likely(), Drawn()): [an_object_that_goes_into_another_model],
        lambda: Setting(Normalized()): [rows_that_are_normalized_over_all_ranks],
    }.items()
    for loop in loops
}


def play(name: str, place: tuple[int, int]) -> Gradients:
    loop, made = LOOPS[name]
    setting: Any = made()
    setting.place = place
    setting.a.set_world(*place)
    setting.b.set_world(*place)
    loop(setting)
    return setting.gradients


def play_in_a_world(folder: Path, rank: int, size: int, names: list[str]) -> list[str]:
    """Return what differs, for each loop. Runs in a process of its own."""
    refuse_cpus = "_passing_sync_batchnorm_handle"
    assert hasattr(nn.parallel.DistributedDataParallel, refuse_cpus)
    setattr(nn.parallel.DistributedDataParallel, refuse_cpus, lambda self, module: None)
    wrong = []
    for number, name in enumerate(names):
        expected = play(name, (0, 1))
        loop, made = LOOPS[name]
        setting: Any = made()
        setting.place = (rank, size)
        setting.a.set_world(rank, size)
        setting.b.set_world(rank, size)
        with world(folder, rank, size, setting.models, number):
            loop(setting)
        wrong += [f"{name}: {line}" for line in differences(expected, setting.gradients)]
    return wrong


def differences(expected: Gradients, seen: Gradients) -> Iterator[str]:
    for number, (one, other) in enumerate(zip(expected, seen, strict=True)):
        if (one is None) != (other is None) or (
            one is not None and not torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        ):
            yield f"gradient {number} is {other}, in one process {one}"


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_one_process(size: int) -> None:
    assert on_ranks(size, play_in_a_world, size, list(LOOPS)) == [[]] * size
