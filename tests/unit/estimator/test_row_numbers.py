"""Rows are named in errors by their place in a Spark task, or in their batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark import TaskContext

from spark_elastic.estimator.row_numbers import RowCount


@pytest.fixture
def task() -> Iterator[TaskContext]:
    context = TaskContext._getOrCreate()
    yield context
    TaskContext._setTaskContext(None)


def enter(task: TaskContext, attempt: int, partition: int) -> None:
    task._taskAttemptId, task._partitionId = attempt, partition


def test_outside_a_task_rows_are_those_of_their_batch() -> None:
    count = RowCount()
    count.next(10)
    assert count.next(10)(3) == "row 3"


def test_in_a_task_rows_are_counted_over_its_batches(task: TaskContext) -> None:
    enter(task, attempt=7, partition=2)
    count = RowCount()
    first, second = count.next(10), count.next(5)
    assert (first(3), second(3)) == ("row 3 of partition 2", "row 13 of partition 2")


def test_the_next_task_of_the_same_process_begins_again(task: TaskContext) -> None:
    count = RowCount()
    enter(task, attempt=7, partition=2)
    count.next(10)
    enter(task, attempt=8, partition=3)
    assert count.next(10)(0) == "row 0 of partition 3"
