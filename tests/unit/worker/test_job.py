"""What becomes of a generation's process group once the next one begins, and what wrapping a model does in a world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.errors import SparkElasticError
from spark_elastic.worker import job as job_module
from spark_elastic.worker.job import Job


def test_a_closed_group_is_kept_for_one_more_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks of a communication hook may hold it on a Gloo thread, on which it must not end."""
    calls: list[tuple[str, int]] = []

    def make_world(control: Any, order: int, *args: Any) -> Any:
        return SimpleNamespace(
            form=lambda: calls.append(("form", order)),
            close=lambda: calls.append(("close", order)),
            drop=lambda: calls.append(("drop", order)),
        )

    monkeypatch.setattr(job_module, "World", make_world)
    orders = iter(range(1, 4))
    control: Any = SimpleNamespace(ready=lambda reason: next(orders), report=None)
    job = Job(control, worker=0, address="127.0.0.1", form_timeout=1.0, max_np=1)
    for _ in range(3):
        job.next_world("")
    assert calls == [("form", 1), ("close", 1), ("form", 2), ("close", 2), ("drop", 1), ("form", 3)]


@pytest.mark.parametrize(("finished", "complaint"), [(False, "above the elastic function"), (True, "a job has one")])
def test_a_model_that_is_wrapped_too_late_is_refused_with_what_to_do(finished: bool, complaint: str) -> None:
    control: Any = SimpleNamespace(report=None)
    job = Job(control, worker=0, address="127.0.0.1", form_timeout=1.0, max_np=1)
    world: Any = SimpleNamespace()
    job.world, job.finished = world, finished
    model: Any = SimpleNamespace()
    with pytest.raises(SparkElasticError, match=complaint):
        job.add_model(model)
