"""The error tree: its shape, its words, and that it survives pickling."""

from __future__ import annotations

import pickle

import pytest

from spark_elastic import errors
from spark_elastic.errors import (
    HostsUpdatedInterrupt,
    RanksDifferError,
    ResetLimitExceededError,
    SparkElasticError,
    StateLostError,
    TrainingFailedError,
    WorkerFailure,
    WorkerLostError,
    WorldChanged,
)

FAILURE = WorkerFailure(3, 1, "node7", "raised ValueError: x", "Traceback …\nValueError: x\n")


def test_what_workers_raise_about_checkpoints_and_data_ends_a_job_with_an_error_of_both_kinds() -> None:
    for name, kind in errors.FAILED_BY.items():
        assert issubclass(kind, getattr(errors, name))
        assert issubclass(kind, TrainingFailedError)
        again = pickle.loads(pickle.dumps(kind("it broke", (FAILURE,))))
        assert type(again) is kind
        assert str(again) == str(kind("it broke", (FAILURE,)))


class OwnError(errors.CheckpointError):
    """Not of that module."""


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (OwnError("x"), "CheckpointError"),
        (errors.DamagedError("x"), "DamagedError"),
        (ValueError("x"), ""),
        (WorkerLostError("x"), ""),
    ],
    ids=repr,
)
def test_a_job_fails_with_the_public_class_of_what_a_worker_raised(error: Exception, name: str) -> None:
    assert errors.public_name(error) == name


def test_a_state_that_is_lost_ends_the_job_as_such() -> None:
    assert errors.FAILED_BY[StateLostError.__name__] is StateLostError


@pytest.mark.parametrize(
    "name", [name for name in errors.__all__ if name.endswith("Error") and name != "WorkerLostError"]
)
def test_every_error_of_a_job_is_a_spark_elastic_error(name: str) -> None:
    assert issubclass(getattr(errors, name), SparkElasticError)


@pytest.mark.parametrize("kind", [WorkerLostError, HostsUpdatedInterrupt])
def test_changes_of_the_world_are_no_runtime_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, WorldChanged)
    assert not issubclass(kind, (RuntimeError, SparkElasticError))


@pytest.mark.parametrize("kind", [TrainingFailedError, ResetLimitExceededError, StateLostError, RanksDifferError])
def test_failures_survive_pickling(kind: type[TrainingFailedError]) -> None:
    error = pickle.loads(pickle.dumps(kind("it failed", (FAILURE,))))
    assert type(error) is kind
    assert error.failures == (FAILURE,)
    assert str(error) == f"it failed\n\n{FAILURE}"


@pytest.mark.parametrize("kind", [errors.NotEnoughHostsError, errors.DataError, WorkerLostError, HostsUpdatedInterrupt])
def test_other_errors_survive_pickling(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("why")))
    assert (type(error), str(error)) == (kind, "why")


def test_a_failure_says_who_where_and_why() -> None:
    assert str(FAILURE) == "rank 1 (worker 3) on node7: raised ValueError: x\nTraceback …\nValueError: x"


def test_a_failure_without_a_traceback_shows_the_last_lines() -> None:
    failure = WorkerFailure(3, None, "node7", "killed by SIGSEGV", last_lines=("loading", "Segfault"))
    assert str(failure) == (
        "worker 3 (no rank yet) on node7: killed by SIGSEGV\n"
        "    the last lines of its output:\n    | loading\n    | Segfault"
    )


def test_a_failure_shows_its_traceback_and_its_last_lines() -> None:
    text = str(WorkerFailure(3, 0, "node7", "raised ValueError: x", "Traceback …\nValueError: x\n", ("loading",)))
    assert text.splitlines()[1:] == [
        "Traceback …",
        "ValueError: x",
        "    the last lines of its output:",
        "    | loading",
    ]


def test_a_traceback_that_many_workers_share_is_shown_once() -> None:
    failures = tuple(
        WorkerFailure(n, n, "node7", "raised ValueError: x", "Traceback …\nValueError: x") for n in range(3)
    )
    text = str(TrainingFailedError("it failed", failures))
    assert text.count("Traceback …") == 1
    assert text.count("(the same traceback)") == 2
    quiet = TrainingFailedError("it failed", (WorkerFailure(0, 0, "a", "killed"), WorkerFailure(1, 1, "a", "killed")))
    assert "the same" not in str(quiet)


def test_the_drawn_tree_names_every_class() -> None:
    for name in errors.__all__:
        if name != "WorkerFailure":
            assert name in errors.__doc__
