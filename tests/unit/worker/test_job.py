"""What becomes of a generation's process group once the next one begins, and what wrapping a model does in a world."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_world import on_ranks, world

from spark_elastic.errors import SparkElasticError
from spark_elastic.worker import job as job_module
from spark_elastic.worker.job import Job, broadcast_from_first


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


def give_tensors_with_gaps(folder: Path, rank: int) -> list[list[float]]:
    """Return a buffer that is every other element of a tensor, which has to keep the others, and one in another order."""
    memory = torch.arange(6.0) + 10 * rank
    module = torch.nn.Module()
    module.register_buffer("every_other", memory[::2])
    module.register_buffer("turned", (torch.arange(6.0) + 10 * rank).reshape(2, 3).t())
    with world(folder, rank, 2, []):
        broadcast_from_first(module)
    return [memory.tolist(), module.turned.flatten().tolist()]


def test_tensors_with_gaps_get_the_values_of_the_first_rank() -> None:
    first, second = on_ranks(2, give_tensors_with_gaps)
    assert first == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]]
    assert second == [[0.0, 11.0, 2.0, 13.0, 4.0, 15.0], first[1]]
