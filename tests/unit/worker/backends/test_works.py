"""Works: nobody is left waiting for an operation that Gloo has lost."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pair import gloo_pair

from spark_elastic.errors import WorkerLostError
from spark_elastic.worker.backends.works import Works

SECONDS = 30


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    """Gloo's groups of two ranks."""
    with gloo_pair(dist.HashStore()) as made:
        yield made


@pytest.fixture
def waiting() -> Iterator[Callable[[dist.Work], Any]]:
    """Waits for a work on a thread, and returns a function that returns the error."""
    threads = []

    def wait(work: dist.Work, timeout: timedelta = timedelta(0)) -> Callable[[], BaseException | None]:
        errors: list[BaseException] = []

        def call() -> None:
            try:
                work.wait(timeout)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        threads.append(thread)

        def ended() -> BaseException | None:
            thread.join(SECONDS)
            assert not thread.is_alive()
            return errors[0] if errors else None

        return ended

    yield wait
    for thread in threads:
        thread.join(SECONDS)


def test_collectives_and_transfers_end_as_they_do_without_a_guard(pair: list[Any]) -> None:
    works, tensors = Works(), [torch.ones(2), torch.full((2,), 2.0)]
    pending = [works.guard(group.allreduce([tensor])) for group, tensor in zip(pair, tensors, strict=True)]
    assert all(work.wait() for work in pending)
    assert all(work.is_completed() and work.is_success() for work in pending)
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 3.0]] * 2
    got = torch.zeros(2)
    received, sent = works.guard(pair[1].recv([got], 0, 0)), works.guard(pair[0].send([tensors[0]], 1, 0))
    assert sent.wait()
    assert received.wait()
    assert received.wait()  # torch's own would wait for another one
    assert got.tolist() == [3.0, 3.0]
    assert works.are_complete()


def never() -> dist.Work:
    """A collective that never ends."""
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(torch.futures.Future())  # type: ignore[attr-defined]
    return work


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("has_lost_a_rank", [False, True])
def test_a_failed_work_is_freed_with_its_error(has_lost_a_rank: bool) -> None:
    """Found in the suite: the error's own frame held the error, and so the work, its group and the group's port."""

    def translate(error: RuntimeError) -> None:
        if has_lost_a_rank:
            raise WorkerLostError("lost") from error

    with without_collector():
        works = Works()
        work: Any = works.guard(never())
        work.translate = translate
        works.lose()
        freed = weakref.ref(work)
        with pytest.raises(WorkerLostError if has_lost_a_rank else RuntimeError):
            work.wait()
        del work
        assert freed() is None


def test_who_waits_for_a_lost_collective_gets_an_error(waiting: Any) -> None:
    works = Works()
    work = works.guard(never())
    assert not works.are_complete()
    ended, in_time = waiting(work), waiting(work, timedelta(seconds=SECONDS))
    assert works.lose() == 1
    assert "was lost" in str(ended())
    assert "was lost" in str(in_time())
    assert work.is_completed()
    assert not work.is_success()
    assert "was lost" in str(work.exception())
    with pytest.raises(RuntimeError, match="was lost"):
        work.result()
    assert works.are_complete()


def test_a_thread_that_runs_callbacks_may_have_works_behind_it(pair: list[Any]) -> None:
    works, called, go_on = Works(), threading.Event(), threading.Event()
    works.guard(never())
    work = works.guard(pair[0].allreduce([torch.ones(2)]))
    assert not works.are_in_callbacks()

    def callback(future: Any) -> None:
        called.set()
        go_on.wait(SECONDS)

    work.get_future().add_done_callback(callback)
    pair[1].allreduce([torch.ones(2)]).wait()
    assert called.wait(SECONDS)
    assert work.is_completed()
    assert works.are_in_callbacks()
    go_on.set()
    work.wait()
    assert not works.are_in_callbacks()


def test_a_work_that_completes_in_the_moment_in_which_it_is_given_up_succeeds() -> None:
    future: Any = torch.futures.Future()
    work: Any = Works().guard(torch._C._distributed_c10d._create_work_from_future(future))  # type: ignore[attr-defined]
    future.set_result([torch.ones(1)])
    work.lose()
    assert work.wait()


def test_a_hook_that_computes_with_the_result_of_a_lost_collective_gets_an_error() -> None:
    works = Works()
    work = works.guard(never())
    first: Any = work.get_future().then(lambda future: future.value()[0])
    works.lose()
    with pytest.raises(RuntimeError, match="was lost"):
        first.wait()
    for look in (list, len, lambda value: value[0], pickle.dumps):
        with pytest.raises(RuntimeError, match="was lost"):
            look(work.get_future().wait())


def test_who_waits_for_a_lost_transfer_gets_an_error(pair: list[Any], waiting: Any) -> None:
    works = Works()
    work = works.guard(pair[0].recv([torch.ones(2)], 1, 0))
    ended = [waiting(work), waiting(work)]
    assert works.lose() == 1
    assert all("was lost" in str(error()) for error in ended)
    assert not work.is_success()
    assert works.are_complete()
    with pytest.raises(RuntimeError, match="was lost"):
        work.wait()


def test_a_transfer_that_nobody_has_kept_is_forgotten(pair: list[Any]) -> None:
    works = Works()
    works.guard(pair[0].send([torch.ones(2)], 1, 0))
    assert works.are_complete()


def test_a_timeout_of_the_callers_and_an_error_of_gloo_reach_it(pair: list[Any]) -> None:
    works, short = Works(), timedelta(seconds=0.1)
    for work in (pair[0].allreduce([torch.ones(2)]), pair[0].recv([torch.ones(2)], 1, 0)):
        with pytest.raises(RuntimeError, match=r"(?i)timed out|closure"):
            works.guard(work).wait(short)
