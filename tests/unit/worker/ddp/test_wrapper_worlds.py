"""Wrapped models from one real world to the next, with a newcomer: views of buckets, kept losses, compiled models."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averaged_steps import STEPS, net, steps
from forked_world import on_ranks, world
from torch import nn

from spark_elastic import DistributedDataParallel
from spark_elastic.data.deliveries import deliveries
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.same_inputs import same_inputs


def use_views_of_buckets(folder: Path, rank: int) -> bool:
    """Two ranks, then three, then the last two; compare with a wrapper whose gradients have memory of their own."""
    models = [DistributedDataParallel(net(), gradient_as_bucket_view=views) for views in (True, False)]
    weights = [list(model.parameters()) for model in models]
    for generation, ranks in enumerate([(0, 1), (0, 1, 2), (1, 2)]):
        if rank not in ranks:
            continue
        with world(folder, ranks.index(rank), len(ranks), models, generation):
            for model in models:  # torch puts gradients into other buckets in the first step than later
                assert max(steps(model, ranks.index(rank), len(ranks))) < 1e-6
                model.zero_grad(set_to_none=True)
            for number in range(STEPS):
                for model in models:
                    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
                    with model.no_sync():
                        model(rows[:1]).square().mean().backward()
                    model(rows[1:]).square().mean().backward()
                viewed, own = ([p.grad for p in each] for each in weights)
                assert all(map(torch.equal, viewed, own)), "the second pass adds to the first one"
                assert all(grad.untyped_storage().nbytes() > grad.nbytes for grad in viewed)
                for model in models:
                    model.zero_grad(set_to_none=True)
    return True


def test_gradients_may_be_views_of_torchs_buckets_in_every_generation() -> None:
    assert on_ranks(3, use_views_of_buckets) == [True] * 3


def keep_a_loss(folder: Path, rank: int) -> bool:
    model = DistributedDataParallel(net())
    with world(folder, rank, 2, [model], 0):
        loss = model(torch.ones(4, 8)).sum()
        torchs = weakref.ref(model._here.ddp)
    return torchs() is None and loss.requires_grad


def test_a_loss_that_is_kept_does_not_keep_torchs_wrapper_of_a_world_that_is_over() -> None:
    """It would reduce the gradients of later passes, too, in a group that is gone."""
    assert on_ranks(2, keep_a_loss) == [True] * 2


def note_and_reduce(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    seen.append(bucket.index())
    reduced = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def keep_the_wrapper(folder: Path, rank: int) -> list[int]:
    model, seen, kept = DistributedDataParallel(nn.Linear(1, 1)), list[int](), []
    model.register_comm_hook(seen, note_and_reduce)
    for number in range(2):
        with world(folder, rank, 2, [model], number):
            kept.append(model._here.ddp)
            loss = model(torch.ones(1, 1)).sum()
            if number:
                loss.backward()
    return seen


def test_torchs_wrapper_of_a_world_that_is_over_reduces_nothing_though_something_keeps_it() -> None:
    """As torch.compile does for a while. Its world ended between a forward and the backward pass."""
    assert on_ranks(2, keep_the_wrapper) == [[0]] * 2


def set_rows_late_and_in_time(folder: Path, rank: int) -> list[list[str]]:
    model, told = DistributedDataParallel(net()), []
    with world(folder, rank, 2, [model]):
        for is_late in (False, True):
            if not is_late:
                model.set_rows(3)
            loss = model(torch.ones(4, 8)).sum()
            loss.backward()
            if is_late:
                model.set_rows(3)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                model.forget_rows()
            told.append([str(warning.message) for warning in found])
    return told


def test_rows_that_are_set_behind_the_backward_pass_are_warned_of() -> None:
    for in_time, late in on_ranks(2, set_rows_late_and_in_time):
        assert in_time == []
        assert ["set_rows(3) had no effect" in text for text in late] == [True]


class Compiler:
    """Counts what it is given to compile."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        assert any("tanh" in str(node.target) for node in graph.graph.nodes), "this is not the module's"
        self.graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)


def compile_the_wrapper(backend: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(net())
    return model, torch.compile(model, backend=backend)


def compile_the_module(backend: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(torch.compile(net(), backend=backend))  # type: ignore[arg-type]
    return model, model


def compile_a_wrapper_with_buffers(backend: Any) -> tuple[Any, Any]:
    """Torch sends the buffers at each forward, through our code."""
    model, compiled = compile_the_wrapper(backend)
    model.module.register_buffer("counted", torch.zeros(1))
    return model, compiled


def compile_in_place(backend: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(net())
    model.compile(backend=backend)
    return model, model


COMPILED = {
    made.__name__: made
    for made in (compile_the_wrapper, compile_a_wrapper_with_buffers, compile_the_module, compile_in_place)
}


def use_compiled(folder: Path, rank: int, name: str) -> list[int]:
    compiler = Compiler()
    model, compiled = COMPILED[name](compiler)
    plain, graphs = net(), []
    for generation in range(3):
        with world(folder, rank, 2, [model], generation):
            model.follow_rows(type("Source", (), {"batch_rows": (2 + generation, 2)}))
            weights = [(2 + generation) * 2 / (4 + generation), 4 / (4 + generation)]
            parameters = list(model.parameters())
            for number in range(3):
                inputs = [torch.full((4, 8), 0.1 * (number + 1) * (other + 1)) for other in range(2)]
                losses = [weight * plain(x).square().mean() / 2 for weight, x in zip(weights, inputs, strict=True)]
                expected = torch.autograd.grad(sum(losses), list(plain.parameters()))
                for parameter in parameters:
                    parameter.grad = None
                compiled(inputs[rank]).square().mean().backward()
                for parameter, gradient in zip(parameters, expected, strict=True):
                    assert torch.allclose(parameter.grad, gradient, atol=1e-7), (name, generation, number)
        graphs.append(compiler.graphs)
    return graphs


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_models_are_weighted_and_not_compiled_again_in_another_generation(name: str) -> None:
    for graphs in on_ranks(2, use_compiled, name):
        assert graphs[0] >= 1
        assert graphs == [graphs[0]] * 3


def tell_rows(folder: Path, rank: int) -> set[int]:
    model = DistributedDataParallel(nn.Linear(8, 1))
    with world(folder, rank, 2, [model]):
        model(torch.ones(3, 8))
        model(torch.ones(4, 8))
        with torch.no_grad():
            model(torch.ones(5, 8))
        return model.rows_given  # type: ignore[no-any-return]


def test_a_model_tells_how_many_rows_its_last_forward_for_gradients_was_given() -> None:
    assert on_ranks(2, tell_rows) == [{4}] * 2


def freeze_and_unfreeze(folder: Path, rank: int) -> list[str]:
    model = DistributedDataParallel(nn.Linear(2, 1))
    noted: list[str] = []
    with world(folder, rank, 2, [model]) as formed:
        formed.froze = noted.append
        for is_trained in (True, False, True):
            model.module.requires_grad_(is_trained)
            model(torch.ones(1, 2))
    return noted


def test_the_driver_is_told_of_a_model_of_which_nothing_requires_a_gradient_as_long_as_that_is_so() -> None:
    assert on_ranks(2, freeze_and_unfreeze) == [["", "Linear", ""]] * 2


def say_what_models_were_given(folder: Path, rank: int) -> list[int]:
    model = DistributedDataParallel(nn.Linear(2, 1))
    given: list[int] = []
    with world(folder, rank, 2, [model]):
        for rows in (torch.ones(2, 2), torch.full((2, 2), float(rank))):
            model(rows)
            given.append(same_inputs.report())
        with torch.no_grad():
            model(torch.ones(2, 2))
        deliveries.note(object(), [rows], (2, 2), rank)
        model(rows)
        return [*given, same_inputs.report()]


def test_what_models_are_given_for_gradients_without_a_loader_of_the_state_is_compared() -> None:
    one, other = on_ranks(2, say_what_models_were_given)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, True]
    assert (one[0] != 0, one[-1]) == (True, 0)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def punish_the_gradient(folder: Path, rank: int) -> None:
    critic = DistributedDataParallel(nn.Linear(2, 1), find_unused_parameters=True)
    with world(folder, rank, 2, [critic]):
        for _ in range(2):
            critic(torch.ones(1, 2)).mean().backward()
            x = torch.ones(1, 2, requires_grad=True)
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            slope.square().sum().backward()  # the bias has no gradient in this pass


def test_a_second_backward_that_does_not_reach_all_parameters_ends_the_job_with_what_helps() -> None:
    """The advice was the setting that had been made."""
    with pytest.raises(
        TrainingCodeError, match=r"Linear has parameters .* add the losses up, and call backward\(\) once"
    ):
        on_ranks(2, punish_the_gradient)


def leave_parameters_unused(folder: Path, rank: int) -> None:
    model = DistributedDataParallel(WithUnused())
    with world(folder, rank, 2, [model]):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()


def test_parameters_that_a_step_does_not_use_end_the_job_with_the_line_to_write() -> None:
    with pytest.raises(TrainingCodeError, match=r"WithUnused has parameters .* find_unused_parameters=True"):
        on_ranks(2, leave_parameters_unused)
