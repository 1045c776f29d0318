"""FailureBook: what is told of failures, and when it is pointless to go on."""

from __future__ import annotations

import pytest

from spark_elastic.driver.failures import CRASH_LIMIT, KEPT, FailureBook, FirstSign, describe_exit
from spark_elastic.errors import TrainingCodeError, TrainingFailedError, WorkerFailure


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (0, "exited with code 0 before its result"),
        (3, "exited with code 3"),
        (137, "memoryOverhead"),
        (-9, "killed by SIGKILL; if the kernel ran out of memory, raise spark.executor.memoryOverhead"),
        (-11, "killed by SIGSEGV"),
        (-250, "killed by signal 250"),
    ],
)
def test_an_exit_code_is_put_into_words(code: int, meaning: str) -> None:
    assert meaning in describe_exit(code, "spark.executor.memoryOverhead")


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (137, "exited with code 137 before its result had arrived"),
        (-9, "killed by SIGKILL; the kernel may have run out of memory"),
    ],
)
def test_an_exit_code_names_no_setting_if_the_launcher_has_none(code: int, meaning: str) -> None:
    assert describe_exit(code, None) == meaning


@pytest.mark.parametrize(("code", "meaning"), [(-9, "killed by SIGKILL"), (137, "exited with code 137")])
def test_an_injected_fault_is_named_and_no_memory_is_suspected(code: int, meaning: str) -> None:
    told = describe_exit(code, "spark.executor.memoryOverhead", injected="kill(rank=1, step=5)")
    assert told == f"{meaning}, by the injected fault kill(rank=1, step=5)"


def test_ranks_in_different_collectives_are_told_what_to_look_for() -> None:
    lines = ("[enforce fail at pair.cc:456]", "Is there a distributed collective mismatch in your code?")
    assert "some ranks only make" in describe_exit(-6, None, lines)
    assert describe_exit(-6, None, ("out of range",)) == "killed by SIGABRT"


def test_the_same_exception_counts_up_to_three() -> None:
    book = FailureBook()
    for number in range(3):
        assert book.verdict() is None
        book.count_exception(1, "train.py:7", f"ValueError: row {number}")
    assert "ValueError at train.py:7" in book.verdict()


def test_exceptions_of_another_kind_or_place_are_counted_apart() -> None:
    book = FailureBook()
    book.count_exception(1, "train.py:7", "ValueError: x")
    book.count_exception(1, "train.py:8", "ValueError: x")
    book.count_exception(1, "train.py:7", "KeyError: x")
    assert book.verdict() is None


def test_progress_in_a_later_generation_forgets_what_was_before() -> None:
    book = FailureBook()
    for generation in (1, 1, 2):
        book.count_exception(generation, "train.py:7", "ValueError: x")
    book.progressed(2)
    assert book.verdict() is None
    book.count_exception(2, "train.py:7", "ValueError: x")
    assert book.verdict() is None
    book.count_exception(3, "train.py:7", "ValueError: x")
    assert book.verdict() is not None


def test_crashes_count_and_kills_do_not() -> None:
    book = FailureBook()
    for _ in range(100):
        book.count_exit(1, -9)
        book.count_exit(1, -15)
    assert book.verdict() is None
    for _ in range(CRASH_LIMIT):
        book.count_exit(1, -11)
    assert f"crashed {CRASH_LIMIT} times" in book.verdict()


def test_an_exit_explains_a_broken_connection() -> None:
    book = FailureBook()
    book.add(WorkerFailure(4, 1, "a", FirstSign.CONNECTION_BROKE.value), is_explained=False)
    assert book.explain(4, "killed by SIGSEGV", ("boom",))
    assert book.story() == (WorkerFailure(4, 1, "a", "killed by SIGSEGV", "", ("boom",)),)


@pytest.mark.parametrize("cause", ["hung: its process was silent for 20 s", "raised ValueError: x"])
def test_an_exit_does_not_replace_what_is_known_better(cause: str) -> None:
    book = FailureBook()
    book.add(WorkerFailure(4, 1, "a", cause, "Traceback" if cause.startswith("raised") else ""))
    assert not book.explain(4, "killed by SIGKILL", ())
    assert book.story()[0].cause == cause


def test_an_exit_of_a_worker_that_did_not_fail_is_no_failure() -> None:
    book = FailureBook()
    assert not book.explain(4, "exited with code 0", ())
    assert book.story() == ()


def test_only_the_latest_failures_are_kept() -> None:
    book = FailureBook()
    for worker in range(KEPT + 5):
        book.add(WorkerFailure(worker, None, "a", "x"))
    assert [failure.worker for failure in book.story()] == list(range(5, KEPT + 5))


def test_a_mistake_in_the_training_function_is_caught_by_its_class_and_as_a_failure() -> None:
    book = FailureBook()
    book.kinds[4] = "TrainingCodeError"
    failure = WorkerFailure(4, 1, "a", "raised TrainingCodeError: model is not wrapped", "Traceback …")
    error = book.as_raised(TrainingFailedError("model is not wrapped", (failure,)))
    assert isinstance(error, TrainingCodeError)
    assert isinstance(error, TrainingFailedError)
    assert error.is_final
    assert str(error).startswith("model is not wrapped")
