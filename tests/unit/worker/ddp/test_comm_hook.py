"""Communication hooks from one real world to the next, with a newcomer, and those that are refused."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averaged_steps import STEPS, net, steps, wrapped
from forked_world import on_ranks, world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from spark_elastic import DistributedDataParallel, SparkElasticError
from spark_elastic.data.stopwatch import LEAST_STEPS, Stopwatch, note_gradients
from spark_elastic.worker.ddp.comm_hook import CommHook


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
                assert len(model._here.ddp._comm_hooks) == 1
            if max(errors) > tolerance or (tolerance > 1 and max(errors) < 1e-6):
                wrong.append(f"{name}, generation {generation}: {errors}")
            if isinstance(state, list):
                assert len(state) >= STEPS
                state.clear()
    return wrong


@pytest.mark.parametrize("name", HOOKS)
def test_a_comm_hook_is_registered_in_every_generation_and_newcomers_have_it(name: str) -> None:
    assert on_ranks(3, use_hook, name) == [[]] * 3


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


def register_late_and_within(folder: Path, rank: int) -> None:
    model, calls = DistributedDataParallel(net()), list[int]()
    with world(folder, rank, 2, [model]):
        assert max(steps(model, rank, 2)) < 1e-6
        model.register_comm_hook(None, fp16_compress_hook)
        model.register_comm_hook(calls, own_hook)
        assert max(steps(model, rank, 2)) < 1e-6
        assert len(calls) >= STEPS
        with pytest.raises(SparkElasticError, match="register_comm_hook of the spark_elastic"):
            model._here.ddp.register_comm_hook(None, fp16_compress_hook)


def test_a_comm_hook_may_be_registered_within_a_world_and_replaces_the_one_before() -> None:
    on_ranks(2, register_late_and_within)


def test_a_hook_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="callable, not 3"):
        wrapped().register_comm_hook(None, 3)  # type: ignore[arg-type]


def test_a_torch_hook_state_that_holds_a_process_group_is_refused_with_the_line_to_write() -> None:
    state = PowerSGDState(process_group=object())
    with pytest.raises(ValueError, match=r"register_comm_hook\(lambda: PowerSGDState"):
        wrapped().register_comm_hook(state, powerSGD_hook)


def test_waiting_for_a_hooks_collectives_is_no_part_of_a_ranks_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def wait() -> None:
        now[0] += 5.0

    stopwatch = Stopwatch(lambda: now[0])
    monkeypatch.setattr(CommHook, "_last", SimpleNamespace(wait=wait))
    for _ in range(LEAST_STEPS + 1):
        stopwatch.start()
        now[0] += 1.0
        note_gradients()
        CommHook.wait_for_last()
    stopwatch.drop()
    assert stopwatch.microseconds() == 1_000_000
