"""WatchedGroup: what a rank has entered, and whether it waits, with real Gloo between threads of this process."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pair import gloo_pair

from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.backends.works import Works
from spark_elastic.worker.shards.loops import loops
from spark_elastic.worker.watched_group import Watch, WatchedGroup


@pytest.fixture
def pair() -> Iterator[list[tuple[WatchedGroup, Watch]]]:
    """Two ranks of one group."""
    store = dist.HashStore()

    def watched(rank: int, gloo: Any) -> tuple[WatchedGroup, Watch]:
        backend = (dist.ProcessGroup.BackendType.GLOO, gloo, Works().guard)
        watch = Watch(in_order=False)
        devices = {"cpu": backend, "cuda": backend}
        return WatchedGroup(dist.PrefixStore("mine", store), rank, 2, devices, watch, lambda error: error), watch

    with gloo_pair(store) as made:
        yield [watched(rank, gloo) for rank, gloo in enumerate(made)]


def test_who_is_alone_in_a_collective_waits_until_the_other_has_come(pair: Any) -> None:
    (one, of_one), (other, of_other) = pair
    first, second = torch.ones(2), torch.ones(2)
    work = one.allreduce([first])
    assert (of_one.collectives, of_one.is_waiting()) == (1, True)
    assert (of_other.collectives, of_other.is_waiting()) == (0, False)
    other.allreduce([second]).wait()
    work.wait()
    assert not of_one.is_waiting()
    assert not of_other.is_waiting()
    assert first.tolist() == second.tolist() == [2.0, 2.0]


def test_ranks_in_different_collectives_both_wait_though_both_have_entered_as_many(pair: Any) -> None:
    (one, of_one), (other, of_other) = pair
    works = [one.allreduce([torch.ones(2)]), other.barrier()]
    assert (of_one.count(), of_other.count()) == ((1, ("allreduce",)), (1, ("barrier",)))
    assert of_one.is_waiting()
    assert of_other.is_waiting()
    assert not any(work.is_completed() for work in works)


def test_transfers_are_waited_for_and_not_counted(pair: Any) -> None:
    (one, of_one), (other, of_other) = pair
    got = torch.zeros(2)
    work = one.recv([got], 1, 0)
    assert (of_one.collectives, of_one.is_waiting()) == (0, True)
    other.send([torch.ones(2)], 0, 0).wait()
    work.wait()
    assert not of_one.is_waiting()
    assert (of_other.collectives, got.tolist()) == (0, [1.0, 1.0])


def test_inside_a_loop_over_parts_torchs_collectives_are_refused_but_those_that_add_up_its_parts(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have unequal numbers of parts, and waited for each other until the job was lost."""
    (one, of_one), (other, of_other) = pair
    monkeypatch.setattr(loops, "open", SimpleNamespace())
    monkeypatch.setattr(loops, "_thread", threading.get_ident())
    with pytest.raises(
        TrainingCodeError, match=r"torch.distributed's allreduce was called inside a loop over model.parts"
    ):
        one.allreduce([torch.ones(2)])
    assert (of_one.collectives, of_one.is_waiting()) == (0, False)
    other.send([torch.ones(2)], 0, 0)
    monkeypatch.setattr(loops, "_is_adding", True)
    works = [one.allreduce([torch.ones(2)]), other.allreduce([torch.ones(2)])]
    for work in works:
        work.wait()
    assert of_other.collectives == 1


def test_a_loop_over_parts_keeps_no_other_thread_from_collectives(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that saves a checkpoint has a group of its own."""
    monkeypatch.setattr(loops, "open", SimpleNamespace())
    monkeypatch.setattr(loops, "_thread", threading.get_ident())
    with ThreadPoolExecutor(1) as another:
        works = [another.submit(group.barrier).result() for group, _ in pair]
    for work in works:
        work.wait()


def test_every_call_of_torch_that_returns_a_work_is_watched() -> None:
    """A rank that waits in another one would not be seen to wait, nor be told what it waits for in vain."""
    torchs = {name for name, call in vars(dist.ProcessGroup).items() if "-> c10d::Work" in (call.__doc__ or "")}
    assert {"allreduce", "broadcast", "allgather", "reduce_scatter", "send"} <= torchs
    missing = torchs - vars(WatchedGroup).keys()
    assert missing <= {"_end_coalescing"}  # which Gloo lacks, and for NCCL's groups torch asks the backend itself


class Kernel:
    """What is asked of a pending piece of work on a GPU, and how often."""

    def __init__(self) -> None:
        self.is_done = False
        self.asked = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.is_done


def test_a_gpu_is_asked_only_about_its_newest_work_and_only_once_that_is_no_news() -> None:
    watch = Watch(in_order=True)
    old, new = Kernel(), Kernel()
    watch.entered(old, "allreduce")
    watch.entered(new, "allreduce")
    assert not watch.is_waiting()
    assert (old.asked, new.asked) == (0, 0)
    assert watch.is_waiting()
    new.is_done = True
    assert not watch.is_waiting()
    assert (watch.collectives, old.asked) == (2, 0)


def test_a_change_that_ranks_compare_is_known_by_the_collective_in_which_they_do() -> None:
    watch = Watch(in_order=False)
    assert watch.compared == (0, 0, "")
    watch.entered(None, "allreduce")
    watch.compares("a.bias began to require a gradient")
    watch.entered(None, "allreduce")
    assert (watch.collectives, watch.compared) == (2, (1, 2, "a.bias began to require a gradient"))


def test_what_is_complete_is_not_kept() -> None:
    watch = Watch(in_order=False)
    for _ in range(5):
        work = SimpleNamespace(is_completed=lambda: True)
        watch.entered(work, "allreduce")
    watch.entered(None, "allreduce")
    assert watch._pending == []


def test_reductions_outside_a_backward_pass_are_not_kept_for_one_that_has_failed() -> None:
    watch = Watch(in_order=False)
    assert watch.begin_pass(3)
    watch.reduces(SimpleNamespace())
    assert watch.end_pass() == []


def test_the_first_reduction_since_the_last_look_is_told_unless_it_is_empty(pair: Any) -> None:
    (one, of_one), (other, of_other) = pair
    works = [[group.allreduce([torch.ones(size)]) for size in (0, 1, 1)] for group in (one, other)]
    for rank, watch in enumerate((of_one, of_other)):
        assert watch.take_reduction() is works[rank][1]
        assert watch.take_reduction() is None
    for group in (one, other):
        group.broadcast([torch.ones(1)])
    assert of_one.take_reduction() is None


def test_a_work_is_guarded_by_the_library_of_its_device_unless_it_has_a_timeout_of_its_own() -> None:
    group: Any = SimpleNamespace(_guards={"cpu": lambda work: ("gloo", work), "cuda": lambda work: ("nccl", work)})

    def guard(*arguments: object) -> Any:
        return WatchedGroup._guard(group, arguments, "work")  # type: ignore[arg-type]

    gpu = SimpleNamespace(device=torch.device("cuda", 0), timeout=timedelta(seconds=-1))
    host = SimpleNamespace(device=None, timeout=timedelta(seconds=-1))
    assert guard([[torch.ones(1)]], [torch.ones(1)]) == ("gloo", "work")
    assert guard(gpu) == ("nccl", "work")
    assert guard(host) == ("gloo", "work")
    assert guard([torch.ones(1)], SimpleNamespace(timeout=timedelta(seconds=1))) == "work"


ODD_DTYPES = (
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.complex32,
)


@pytest.mark.parametrize("dtype", ODD_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3, 4)])
def test_what_libraries_lack_a_dtype_for_is_broadcast(pair: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    (one, of_one), (other, _) = pair
    wanted = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    sent, got = torch.stack([wanted, wanted])[1], torch.ones(2, *shape).to(dtype)[1]
    works = [one.broadcast([sent]), other.broadcast(got, 0)]
    for work in works:
        work.wait()
    assert (got.shape, got.dtype, got.tolist()) == (wanted.shape, dtype, wanted.tolist())
    assert of_one.count() == (1, ("broadcast",))


def test_a_tensor_in_another_memory_order_is_broadcast(pair: Any) -> None:
    (one, _), (other, _) = pair
    sent = torch.arange(6, dtype=torch.int16).reshape(2, 3).t()
    got = torch.zeros(2, 3, dtype=torch.int16).t()
    works = [one.broadcast([sent]), other.broadcast(got, 0)]
    for work in works:
        work.wait()
    assert got.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_tensor_with_gaps_of_a_dtype_that_libraries_lack_is_refused(pair: Any) -> None:
    (one, _), _ = pair
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        one.broadcast([torch.zeros(6, dtype=torch.int16)[::2]]).wait()
