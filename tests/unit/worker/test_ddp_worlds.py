"""Wrapped models from one real world to the next, with a newcomer: comm hooks, compiled models, layers that begin to train."""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_world import on_ranks, world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from spark_elastic import DistributedDataParallel, RanksDifferError, SparkElasticError
from spark_elastic.data.deliveries import deliveries
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.same_inputs import same_inputs

STEPS = 4


class Net(nn.Sequential):
    """Of a class of its own: what torch's containers do is not compiled where a wrapper calls them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](torch.tanh(self[0](x)))  # type: ignore[no-any-return]


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def steps(model: Any, rank: int, size: int) -> Iterator[float]:
    """Take steps with other rows on each rank; yield how far the gradient is from the mean of all ranks'."""
    parameters = list(model.parameters())
    for number in range(STEPS):
        inputs = [
            torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + other)) for other in range(size)
        ]
        expected = [
            sum(torch.autograd.grad(model.module(x).square().mean(), parameters)[place] for x in inputs) / size
            for place in range(len(parameters))
        ]
        for parameter in parameters:
            parameter.grad = None
        model(inputs[rank]).square().mean().backward()
        mine = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        everybody = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(everybody, mine)
        assert all(torch.equal(everybody[0], other) for other in everybody), "ranks have other gradients"
        whole = torch.cat([gradient.reshape(-1) for gradient in expected])
        yield float((mine - whole).norm() / whole.norm())


def own_hook(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(bucket.index())
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def power(**options: Any) -> PowerSGDState:
    return PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1, **options)


HOOKS: dict[str, tuple[Callable[[], Any], Any, float]] = {
    "half precision": (lambda: None, fp16_compress_hook, 1e-3),
    "a state of PowerSGD's": (power, powerSGD_hook, 2.0),
    "a function that makes one": (lambda: functools.partial(power, warm_start=False), powerSGD_hook, 2.0),
    "one of the user's own": (list, own_hook, 1e-6),
}


def use_hook(folder: Path, rank: int, name: str) -> list[str]:
    """Two ranks, then three, then the last two of them."""
    made, hook, tolerance = HOOKS[name]
    model, state, wrong = DistributedDataParallel(net()), made(), []
    model.register_comm_hook(state, hook)
    for generation, ranks in enumerate([(0, 1), (0, 1, 2), (1, 2)]):
        if rank in ranks:
            with world(folder, ranks.index(rank), len(ranks), [model], generation):
                errors = list(steps(model, ranks.index(rank), len(ranks)))
                assert len(model._ddp._comm_hooks) == 1
            if max(errors) > tolerance or (tolerance > 1 and max(errors) < 1e-6):
                wrong.append(f"{name}, generation {generation}: {errors}")
            if isinstance(state, list):
                assert len(state) >= STEPS
                state.clear()
    return wrong


@pytest.mark.parametrize("name", HOOKS)
def test_a_comm_hook_is_registered_in_every_generation_and_newcomers_have_it(name: str) -> None:
    assert on_ranks(3, use_hook, name) == [[]] * 3


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


def reduce_in_two_parts(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send a bucket's second half once the first has arrived, as PowerSGD does; ranks come to that in another order."""
    seen.append(bucket.index())
    gradient, late = bucket.buffer().div_(dist.get_world_size()), bucket.index() % 2 == dist.get_rank()
    first, second = gradient[: bucket.index() + 1], gradient[bucket.index() + 1 :]

    def rest(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.wait()
        time.sleep(0.2 * late)
        dist.all_reduce(second)
        return gradient

    return dist.all_reduce(first, async_op=True).get_future().then(rest)  # type: ignore[no-any-return]


def use_hooks_of_two_models(folder: Path, rank: int) -> list[int]:
    torch.manual_seed(0)
    seen: list[int] = []
    both = [DistributedDataParallel(nn.Sequential(nn.Linear(8, 600), *layers(2))) for _ in range(2)]
    for model in both:
        model.register_comm_hook(seen, reduce_in_two_parts)
    with world(folder, rank, 2, list(both)):
        for number in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * number + rank))
            (both[0](x) - both[1](x)).square().mean().backward()
            for parameter in (parameter for model in both for parameter in model.parameters()):
                everybody = [torch.zeros_like(parameter) for _ in range(2)]
                dist.all_gather(everybody, parameter.grad)
                assert torch.equal(*everybody), "ranks have other gradients"
    return seen


def layers(count: int) -> list[nn.Module]:
    """Return layers of more than one bucket each."""
    return [nn.Linear(600, 600) for _ in range(count)]


def test_hooks_that_send_several_times_send_in_one_order_on_all_ranks() -> None:
    """Else Gloo adds up what does not belong together, or ends the process."""
    one, other = on_ranks(2, use_hooks_of_two_models)
    assert one == other
    assert {0, 1} <= set(one), "the models have one bucket"


def keep_a_loss(folder: Path, rank: int) -> bool:
    model = DistributedDataParallel(net())
    with world(folder, rank, 2, [model], 0):
        loss = model(torch.ones(4, 8)).sum()
        torchs = weakref.ref(model._ddp)
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
            kept.append(model._ddp)
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


def register_late_and_within(folder: Path, rank: int) -> None:
    model, calls = DistributedDataParallel(net()), list[int]()
    with world(folder, rank, 2, [model]):
        assert max(steps(model, rank, 2)) < 1e-6
        model.register_comm_hook(None, fp16_compress_hook)
        model.register_comm_hook(calls, own_hook)
        assert max(steps(model, rank, 2)) < 1e-6
        assert len(calls) >= STEPS
        with pytest.raises(SparkElasticError, match="register_comm_hook of the spark_elastic"):
            model._ddp.register_comm_hook(None, fp16_compress_hook)


def test_a_comm_hook_may_be_registered_within_a_world_and_replaces_the_one_before() -> None:
    on_ranks(2, register_late_and_within)


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


def differ_in_what_trains(folder: Path, rank: int, frozen: tuple[str, ...], is_corrected: bool) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    if rank == 1:
        for name in frozen:
            model.module.get_parameter(name).requires_grad_(False)
    with world(folder, rank, 2, [model]):
        if is_corrected:
            model.module.requires_grad_(True)
        model(torch.zeros(4, 8))


ALL = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")


@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("frozen", [("2.bias",), ALL])
def test_ranks_that_differ_in_what_requires_gradients_are_told_a_name_ahead_of_any_other_collective(
    frozen: tuple[str, ...], is_corrected: bool
) -> None:
    """Torch's wrapper sends buffers ahead of a forward, which a rank without one would not take part in."""
    first = frozen[0].replace(".", r"\.")
    with pytest.raises(RanksDifferError, match=rf"Sequential\.{first} requires a gradient on ranks \[0\] only, of 2"):
        on_ranks(2, differ_in_what_trains, frozen, is_corrected)


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


def change_what_trains(folder: Path, rank: int) -> list[str]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    one, other = model.module[0], model.module[1]
    one.requires_grad_(False)
    told: list[str] = []
    with world(folder, rank, 2, [model]) as formed:
        formed.compares = told.append
        for change in (
            lambda: None,
            lambda: one.bias.requires_grad_(True),
            lambda: other.bias.requires_grad_(False),
            lambda: setattr(one, "bias", nn.Parameter(torch.ones(8))),
            lambda: setattr(one, "bias", None),
            lambda: model.module.requires_grad_(False),  # nothing is reduced then, and nothing compared
        ):
            change()
            model(torch.ones(4, 8))
    return told


def test_the_driver_is_told_what_has_changed_ahead_of_the_collective_that_compares_it() -> None:
    told = [
        "Sequential.0.bias began to require a gradient, or was replaced,",
        "Sequential.1.bias ceased to require a gradient",
        "Sequential.0.bias began to require a gradient, or was replaced,",
        "parameters of Sequential were removed",
    ]
    assert on_ranks(2, change_what_trains) == [told] * 2


def become_double(folder: Path, rank: int) -> tuple[list[str], list[float]]:
    model = DistributedDataParallel(nn.Linear(2, 1))
    told: list[str] = []
    with world(folder, rank, 2, [model]) as formed:
        formed.compares = told.append
        model(torch.ones(1, 2)).sum().backward()
        model.double()
        model.zero_grad()
        model(torch.full((1, 2), float(rank), dtype=torch.float64)).sum().backward()
        return told, model.module.weight.grad.flatten().tolist()


def test_parameters_that_stay_the_same_objects_and_get_another_dtype_are_reduced() -> None:
    assert on_ranks(2, become_double) == [(["Linear.weight became torch.float64"], [0.5, 0.5])] * 2


class OnDevice(nn.Parameter):
    """Says which device it is on, as there is only one; tests/gpu/test_jobs.py moves to a GPU."""

    device = torch.device("cpu")


def move_on_one_rank(folder: Path, rank: int) -> tuple[bool, list[str], list[float]]:
    net = nn.Linear(2, 1, bias=False)
    net.weight = weight = OnDevice(torch.ones(1, 2))
    model = DistributedDataParallel(net)
    told: list[str] = []
    with world(folder, rank, 2, [model]) as formed:
        formed.compares = told.append
        before = model._ddp
        if rank == 1:
            weight.device = torch.device("cpu", 0)  # which is another name
        for _ in range(3):
            model(torch.full((1, 2), float(rank))).sum().backward()
        return model._ddp is before, told, weight.grad.flatten().tolist()


def test_a_model_that_moves_to_another_device_on_one_rank_is_reduced_there_and_needs_no_collective() -> None:
    """Found on a GPU: torch's wrapper went on to reduce memory of the device before, and ranks trained apart."""
    assert on_ranks(2, move_on_one_rank) == [(True, [], [1.5, 1.5]), (False, [], [1.5, 1.5])]


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
