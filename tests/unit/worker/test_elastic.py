"""The retry loop: which exceptions enter the user's function again, and which are the user's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from spark_elastic.errors import HostsUpdatedInterrupt, TrainingCodeError, WorkerLostError
from spark_elastic.worker.control import GenerationOverError
from spark_elastic.worker.elastic import _run, elastic
from spark_elastic.worker.job import enter_job
from spark_elastic.worker.state.objects import ObjectState


class OneJob:
    """A job whose worlds are formed at once; remembers with which reason each was asked for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.finished = False
        self.is_fixed = False
        self.max_np = 2
        self.broken = False
        self.failing: list[BaseException] = []
        self.control = SimpleNamespace(vote=lambda: None)
        self.reporter = SimpleNamespace(left_early=lambda: None)
        self.world: Any = None

    def enter_elastic(self) -> None: ...

    def finish(self) -> None:
        self.finished = True

    def next_world(self, reason: str) -> Any:
        self.reasons.append(reason)
        if self.failing:
            raise self.failing.pop(0)
        self.broken = False
        self.world = SimpleNamespace(
            rank=0,
            generation=len(self.reasons),
            is_broken=lambda: self.broken,
            lost=lambda error: WorkerLostError(str(error)),
            rest=lambda: setattr(self, "rested", True),
        )
        self.rested = False
        return self.world


class OneState:
    restored = 0
    _job: Any = None

    def _enter(self, function: Any) -> Any:
        return function()

    def _begin(self, job: Any) -> None:
        self._job = job

    def _leave(self, world: Any) -> None: ...

    def restore(self) -> None:
        assert self._job is None or self._job.rested
        self.restored += 1


def play(*errors: BaseException, before: Callable[[OneJob], None] = lambda job: None) -> tuple[OneJob, OneState]:
    """Run a function that raises these errors, one an entry, and then returns."""
    job, state, left = OneJob(), OneState(), list(errors)

    def function() -> str:
        if left:
            before(job)
            raise left.pop(0)
        return "done"

    assert _run(job, state, function) == "done"  # type: ignore[arg-type]
    assert job.finished
    return job, state


def test_a_lost_worker_enters_the_function_again_from_the_last_commit() -> None:
    job, state = play(WorkerLostError("rank 1 died"))
    assert job.reasons == ["", "rank 1 died"]
    assert state.restored == 1


def test_an_interrupt_enters_the_function_again_with_what_was_committed_and_nothing_else() -> None:
    job, state = play(HostsUpdatedInterrupt("workers arrive"))
    assert job.reasons == ["", ""]
    assert state.restored == 1


def test_a_lost_worker_without_a_message_is_still_told_as_a_loss() -> None:
    assert play(WorkerLostError())[0].reasons[1]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3), RuntimeError("mine")])
def test_errors_of_the_user_are_the_users(error: BaseException) -> None:
    with pytest.raises(type(error)):
        play(error)


def test_a_runtime_error_in_a_broken_world_is_a_lost_worker() -> None:
    job, _ = play(RuntimeError("Connection reset by peer"), before=lambda job: setattr(job, "broken", True))
    assert job.reasons == ["", "Connection reset by peer"]


def test_an_exception_of_a_torch_checkpoint_in_a_broken_world_is_a_lost_worker() -> None:
    error = CheckpointException("write", {})
    job, _ = play(error, before=lambda job: setattr(job, "broken", True))
    assert job.reasons == ["", str(error)]
    with pytest.raises(CheckpointException):
        play(error)


def test_a_change_that_the_user_wrapped_is_found() -> None:
    wrapped = ValueError("batch failed")
    wrapped.__cause__ = WorkerLostError("rank 1 died")
    assert play(wrapped)[0].reasons == ["", "rank 1 died"]


def test_a_change_in_whose_handling_another_error_arose_is_found() -> None:
    wrapped = ValueError("clean-up failed")
    wrapped.__context__ = HostsUpdatedInterrupt()
    assert play(wrapped)[0].reasons == ["", ""]


def test_a_cycle_of_causes_is_followed_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    with pytest.raises(ValueError, match="one"):
        play(one)


def test_a_world_that_ends_before_it_has_formed_is_asked_for_again() -> None:
    job, state = OneJob(), OneState()
    job.failing = [WorkerLostError("could not connect"), WorkerLostError("again")]
    _run(job, state, lambda: None)  # type: ignore[arg-type]
    assert job.reasons == ["", "could not connect", "again"]


def test_a_loss_during_the_vote_enters_the_function_again() -> None:
    job, state, votes = OneJob(), OneState(), [WorkerLostError("rank 1 died")]

    def vote() -> None:
        if votes:
            raise votes.pop()

    job.control.vote = vote
    entered: list[int] = []
    _run(job, state, lambda: entered.append(1))  # type: ignore[arg-type]
    assert len(entered) == 2
    assert state.restored == 1


def test_a_generation_that_ends_while_its_store_is_in_use_is_a_lost_worker() -> None:
    """Found in review: the driver closes the store before its abort arrives; nobody translates that error."""
    job, _ = play(GenerationOverError("generation 1 is over"))
    assert job.reasons[1]


def test_a_generation_that_ends_while_its_group_is_registered_is_a_lost_worker() -> None:
    job, state = OneJob(), OneState()
    job.failing = [GenerationOverError("generation 1 is over")]
    _run(job, state, lambda: None)  # type: ignore[arg-type]
    assert len(job.reasons) == 2


def test_memory_for_commits_is_made_ready_before_anybody_waits_for_this_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    job, state = OneJob(), ObjectState(weights=torch.ones(3))
    had_room = []

    def next_world(reason: str) -> Any:
        had_room.append(bool(state._keeper.snapshots.spare.buffer.flats))
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "next_world", next_world)
    enter_job(job)  # type: ignore[arg-type]
    try:
        with pytest.raises(KeyboardInterrupt):
            elastic(lambda state: None)(state)
    finally:
        enter_job(None)
    assert had_room == [True]


class Model: ...


def keep_the_exception(model: Model) -> None:
    try:
        raise WorkerLostError(f"rank 1 died in {model}")
    except WorkerLostError as error:
        kept = error  # a cycle: the frame holds the exception, and that the frame
        raise kept from None


def fail_in_a_nested_function(model: Model) -> None:
    def step() -> None:  # a frame that is cleared still has its function, and that its closure
        raise WorkerLostError(f"rank 1 died in {model}")

    step()


@pytest.mark.parametrize("fail", [keep_the_exception, fail_in_a_nested_function])
def test_what_a_failed_step_had_in_its_hands_is_gone_before_the_next_world_is_asked_for(
    fail: Callable[[Model], None],
) -> None:
    """Its frames hold the old model's wrapper, whose process group has to go, and user code may have kept the exception."""
    models: list[weakref.ref[Model]] = []
    gone: list[bool] = []

    def function() -> None:
        gone.extend(reference() is None for reference in models)
        if not models:
            model = Model()
            models.append(weakref.ref(model))
            fail(model)

    gc.disable()
    try:
        _run(OneJob(), OneState(), function)  # type: ignore[arg-type]
    finally:
        gc.enable()
    assert gone == [True]


def test_a_function_of_which_nothing_runs_in_the_call_is_refused() -> None:
    def generator(state: ObjectState) -> Any:
        yield 1

    async def coroutine(state: ObjectState) -> None: ...

    for function in (generator, coroutine):
        with pytest.raises(
            TypeError, match=r"elastic takes a plain function, and .* is a generator or coroutine function"
        ):
            elastic(function)
    with pytest.raises(TypeError, match=r"the elastic function returned <generator .* of which nothing has run yet"):
        elastic(lambda state: generator(state))(ObjectState())


def test_one_of_several_processes_of_torchrun_is_not_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trained a model of its own on all rows."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert elastic(lambda state: 3)(ObjectState()) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingCodeError, match=r"one of 2 .* would train by itself: .* without --restart-on-change"):
        elastic(lambda state: 3)(ObjectState())
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert elastic(lambda state: 3)(ObjectState()) == 3, "somebody else may set WORLD_SIZE"
