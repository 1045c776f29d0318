"""What Spark runs for a slot: it reads its input, takes its GPU, and returns its slot if it has reached the driver."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pyspark = pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")

from spark_elastic.launchers.spark_task import ArrowTask, RowsTask, SlotConfigurationError  # noqa: E402
from spark_elastic.protocol.credentials import Credentials  # noqa: E402
from spark_elastic.protocol.ticket import Ticket  # noqa: E402
from spark_elastic.task import importer, service  # noqa: E402
from spark_elastic.task.service import TaskPlace  # noqa: E402

TICKET = Ticket("1", (("127.0.0.1", 1),), Credentials(b"", b""), None)


class Task:
    """The task's context, and the places where its slot was asked to serve."""

    def __init__(self) -> None:
        self.gpus: tuple[str, ...] = ()
        self.reached = True
        self.places: list[TaskPlace] = []
        self.starts: list[Any] = []

    def resources(self) -> dict[str, Any]:
        return {"gpu": SimpleNamespace(addresses=self.gpus)} if self.gpus else {}

    def attemptNumber(self) -> int:  # noqa: N802
        return 2

    def cpus(self) -> int:
        return 3

    def run_task(self, ticket: Ticket, place: TaskPlace, runtime: Any) -> bool:
        assert ticket is TICKET
        self.places.append(place)
        self.starts.append(getattr(runtime.supervisor, "keywords", {}).get("start"))
        return self.reached


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    made = Task()
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: made)
    monkeypatch.setattr(service, "run_task", made.run_task)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    return made


def rows(read: list[int]) -> Iterator[int]:
    for number in range(3):
        read.append(number)
        yield number


def test_a_task_reads_all_its_input_first_or_spark_would_not_use_its_process_again(task: Task) -> None:
    read: list[int] = []
    assert RowsTask(TICKET, 5)(rows(read)) == [5]
    assert read == [0, 1, 2]
    assert task.places == [TaskPlace(5, 2, (), 3)]


def test_a_slot_that_has_not_reached_the_driver_returns_nothing(task: Task) -> None:
    task.reached = False
    assert RowsTask(TICKET, 5)([]) == []
    assert list(ArrowTask(TICKET, 5)(iter(()))) == []


def test_in_spark_connect_a_task_returns_the_same_as_a_batch(task: Task) -> None:
    (batch,) = ArrowTask(TICKET, 5)(iter(()))
    assert batch.to_pydict() == {"slot": [5]}
    assert batch.schema.field("slot").type == pa.int64()


def test_a_task_with_a_gpu_takes_the_one_that_spark_means(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    task.gpus = ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    RowsTask(TICKET, 0)([])
    assert task.places[0].gpus == ("GPU-b",)


@pytest.mark.parametrize(
    ("gpus", "visible", "complaint"),
    [(("0", "1"), "0,1", r"this task was given 2 GPUs \(0, 1\).*gpu\.amount=1"), (("3",), "0", "has assigned GPU 3")],
)
def test_gpus_that_a_worker_cannot_use_are_no_matter_of_another_try(
    task: Task, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], visible: str, complaint: str
) -> None:
    task.gpus = gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible if len(gpus) > 1 else "0,1")
    with pytest.raises(SlotConfigurationError, match=complaint):
        RowsTask(TICKET, 0)([])
    assert task.places == []


def test_an_importer_is_asked_for_only_where_spark_keeps_its_processes(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    RowsTask(TICKET, 0)([])
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    RowsTask(TICKET, 0)([])
    assert task.starts == [None, importer.ask_importer]
