"""What a job may ask for its tasks."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.resource import ResourceProfileBuilder

import spark_elastic
from spark_elastic.launchers.resources import TaskResources, connect_profile


def profile(task: dict[str, float], executor: dict[str, int]) -> Any:
    """A ``ResourceProfile`` as pyspark has it, without a JVM."""
    return SimpleNamespace(
        taskResources={name: SimpleNamespace(amount=amount) for name, amount in task.items()},
        executorResources={name: SimpleNamespace(amount=amount) for name, amount in executor.items()},
    )


def test_cores_and_gpus_of_a_task_are_a_dict_or_a_profile() -> None:
    assert TaskResources.of({"cpus": 2, "gpus": 1}) == TaskResources(2, 1)
    assert TaskResources.of({"gpus": 0.5}) == TaskResources(None, 0.5)
    given = profile({"cpus": 2.0, "gpu": 1.0}, {"cores": 8, "gpu": 4})
    assert TaskResources.of(given) == TaskResources(2, 1.0, 8, 4, given)
    assert TaskResources.of(given).of_tasks() == {"cpus": 2.0, "gpu": 1.0}


@pytest.mark.parametrize(
    ("wanted", "error", "said"),
    [
        (
            {"gpus": 2},
            ValueError,
            r"resources asks for 2 GPUs a task, but a worker uses one GPU: set it to 1 and run more",
        ),
        (profile({"gpu": 2.0}, {}), ValueError, r"resources asks for 2 GPUs a task, but a worker uses one GPU"),
        ({"gpu": 1}, ValueError, r"takes cpus and gpus, as in \{'cpus': 2, 'gpus': 1\}, not \{'gpu': 1\}"),
        ({}, ValueError, "takes cpus and gpus"),
        ({"cpus": 0}, ValueError, "cpus must be a whole number from 1 on, not 0"),
        ({"cpus": 1.5}, ValueError, "cpus must be a whole number"),
        ({"gpus": 0}, ValueError, "gpus must be 1, or a fraction that workers share, not 0"),
        ({"gpus": True}, ValueError, "gpus must be 1"),
        (3, TypeError, r"resources must be a dict such as .*, or a ResourceProfile, not 3"),
        (ResourceProfileBuilder(), TypeError, r"not a ResourceProfileBuilder: append \.build"),
        ({"gpus": math.nan}, ValueError, "gpus must be 1, or a fraction that workers share, not nan"),
    ],
)
def test_what_no_worker_can_use_is_refused(wanted: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        spark_elastic.run(print, resources=wanted)


def test_errors_call_it_by_the_name_that_the_user_has_given_it_by() -> None:
    for name in ("resources", "resourceProfile"):
        with pytest.raises(ValueError, match=f"^{name} asks for a GPU a task, but executors have none"):
            TaskResources.of({"gpus": 1}, name).check_executors({}.get)
        with pytest.raises(ValueError, match=f"^{name} asks for 4 cores a task, but an executor has 2"):
            TaskResources.of(profile({"cpus": 4.0}, {"cores": 2}), name).check_executors({}.get)


def test_slots_of_this_machine_have_no_resources_of_sparks() -> None:
    with pytest.raises(ValueError, match="resources= is what Spark gives to tasks: with local"):
        spark_elastic.run(print, resources={"gpus": 1}, local=True)


def test_executors_that_dynamic_allocation_starts_for_a_job_have_the_gpus_of_the_others() -> None:
    conf = {"spark.executor.resource.gpu.amount": "2", "spark.executor.resource.gpu.discoveryScript": "/find"}
    assert TaskResources(gpus=1).of_executors(conf.get) == {}
    conf["spark.dynamicAllocation.enabled"] = "true"
    assert TaskResources(gpus=1).of_executors(conf.get) == {"gpu": (2, "/find", "")}
    assert TaskResources(cpus=1).of_executors(conf.get) == {}


def test_tasks_that_would_wait_for_ever_are_refused() -> None:
    conf = {"spark.executor.cores": "4"}
    get: Any = conf.get
    TaskResources(cpus=4).check_executors(get)
    with pytest.raises(ValueError, match="5 cores a task, but an executor has 4"):
        TaskResources(cpus=5).check_executors(get)
    with pytest.raises(ValueError, match=r"executors have none: set spark\.executor\.resource\.gpu\.amount"):
        TaskResources(gpus=1).check_executors(get)
    TaskResources(gpus=1, executor_gpus=1).check_executors(get)


class OfConnect:
    """A session of Spark Connect, whose server numbers each profile that it is asked to make."""

    def __init__(self) -> None:
        made = itertools.count(1)
        self.client = SimpleNamespace(_create_profile=lambda profile: next(made))
        self.conf = SimpleNamespace(get=lambda name, default=None: default)


def test_a_spark_connect_server_makes_equal_profiles_once_so_that_the_next_job_gets_the_same_executors() -> None:
    session, other = OfConnect(), OfConnect()
    wanted: list[Any] = [TaskResources(cpus=1), TaskResources(cpus=2), TaskResources(cpus=1)]
    assert [connect_profile(session, each).id for each in wanted] == [1, 2, 1]  # type: ignore[arg-type]
    assert connect_profile(other, wanted[0]).id == 1  # type: ignore[arg-type]
