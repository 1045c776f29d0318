"""What ``run`` takes from the Spark session: ``min_np`` and ``max_np`` where they are not given, and what it refuses."""

from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from spark_elastic.driver.run import run
from spark_elastic.errors import SparkElasticError
from spark_elastic.launchers.defaults import cores as own_cores
from spark_elastic.launchers.resources import TaskResources
from spark_elastic.launchers.session import (
    addresses_of,
    check_gpus,
    check_session_settings,
    default_sizes,
    find_session,
    known_slots,
    remove_logs,
    use_own_python,
    warn_of_too_few_cores,
)


def session(parallelism: int = 4, master: str = "yarn", **settings: str) -> Any:
    conf = {key.replace("_", "."): value for key, value in settings.items()}
    context = SimpleNamespace(getConf=lambda: conf, defaultParallelism=parallelism, master=master)
    return SimpleNamespace(sparkContext=context, conf=conf)


DYNAMIC = {"spark_dynamicAllocation_enabled": "true", "spark_executor_cores": "4", "spark_task_cpus": "2"}


def test_without_dynamic_allocation_they_are_the_clusters_cores() -> None:
    assert default_sizes(session(6), None, None, None) == (6, 6, 6)


@pytest.mark.parametrize(
    ("master", "cores", "slots"),
    [
        ("yarn", 8, 2),
        ("yarn", 2, 1),
        ("local[9]", 9, 2),
        ("local[9]", 1, 2),
        ("local[*]", 8, 2),
        ("local[9 ,2]", 9, 2),
        ("local-cluster[2,6,1024]", 12, 2),
    ],
)
def test_where_a_task_takes_several_cores_there_are_as_many_workers_as_tasks(
    master: str, cores: int, slots: int
) -> None:
    """As many as cores were waited for, which never came."""
    assert default_sizes(session(cores, master, spark_task_cpus="4"), None, None, None) == (slots, slots, slots)


@pytest.mark.parametrize(
    ("present", "settings", "slots"),
    [
        (12, {"executor_cores": "3", "task_cpus": "2"}, 4),
        (40, {"executor_cores": "5", "task_cpus": "3"}, 8),
        (2, {"executor_cores": "8", "task_cpus": "2"}, 1),
        (16, {"executor_cores": "8", "executor_resource_gpu_amount": "2", "task_resource_gpu_amount": "1"}, 4),
        (16, {"executor_cores": "8", "executor_resource_gpu_amount": "1", "task_resource_gpu_amount": "0.25"}, 8),
        (16, {"executor_cores": "8", "executor_resource_gpu_amount": "2", "task_resource_gpu_amount": "0.4"}, 8),
    ],
)
def test_cores_that_an_executor_has_left_over_and_those_without_a_gpu_are_no_workers(
    present: int, settings: dict[str, str], slots: int
) -> None:
    spark = session(present, **{f"spark_{key}": value for key, value in settings.items()})
    assert default_sizes(spark, None, None, None) == (slots, slots, slots)


def test_with_dynamic_allocation_the_sessions_gpus_count_too() -> None:
    gpus = {"spark_executor_resource_gpu_amount": "1", "spark_task_resource_gpu_amount": "1"}
    limits = {"spark_dynamicAllocation_minExecutors": "1", "spark_dynamicAllocation_maxExecutors": "5"}
    assert default_sizes(session(**DYNAMIC, **limits, **gpus), None, None, None) == (1, 1, 5)


@pytest.mark.parametrize(
    ("master", "cores", "slots"),
    [
        ("local[3]", 5, 3),
        ("local-cluster[2,3,1024]", 5, 6),
        ("local[*]", 5, own_cores()),
        ("yarn", 5, 5),
        ("yarn", 0, 2),
    ],
)
def test_a_default_parallelism_that_somebody_has_set_is_no_number_of_cores(master: str, cores: int, slots: int) -> None:
    """cores: what the executors that have registered have."""
    spark = session(200, master, spark_default_parallelism="200")
    backend = SimpleNamespace(totalCoreCount=lambda: cores)
    spark.sparkContext._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(schedulerBackend=lambda: backend))
    assert default_sizes(spark, None, None, None) == (slots, slots, slots)


@pytest.mark.parametrize(("kills", "seconds"), [("false", "60"), ("true", "0"), ("TRUE", "0s")])
def test_an_idle_timeout_that_kills_no_workers_is_left_alone(kills: str, seconds: str) -> None:
    check_session_settings(
        session(spark_python_worker_killOnIdleTimeout=kills, spark_python_worker_idleTimeoutSeconds=seconds)
    )


@pytest.mark.parametrize("seconds", ["60", "600s", "10min"])
def test_an_idle_timeout_that_would_kill_workers_is_refused(seconds: str) -> None:
    spark = session(spark_python_worker_killOnIdleTimeout="True", spark_python_worker_idleTimeoutSeconds=seconds)
    with pytest.raises(ValueError, match=f"killOnIdleTimeout=true and idleTimeoutSeconds={seconds}, Spark kills"):
        check_session_settings(spark)


def test_what_the_sessions_builder_has_set_since_the_application_started_does_not_count() -> None:
    """Spark keeps to the application's settings, whatever the session shows."""
    setting = "spark.python.worker.killOnIdleTimeout"
    spark = session(spark_python_worker_idleTimeoutSeconds="60")
    spark.conf = {**spark.conf, setting: "true", "spark.task.resource.gpu.amount": "2"}
    check_session_settings(spark)
    spark = session(spark_python_worker_idleTimeoutSeconds="60", spark_python_worker_killOnIdleTimeout="true")
    spark.conf = {**spark.conf, setting: "false"}
    with pytest.raises(ValueError, match=setting):
        check_session_settings(spark)


def test_the_cores_that_a_local_cluster_is_allowed_are_its_size() -> None:
    spark = session(3, "local-cluster[3,2,1024]", spark_cores_max="4")
    assert default_sizes(spark, None, None, None) == (4, 4, 4)


def test_what_is_given_stays() -> None:
    assert default_sizes(session(6), None, 2, 3) == (2, 2, 3)
    assert default_sizes(session(6), 4, None, 8) == (4, 4, 8)


def test_with_dynamic_allocation_they_are_executors_times_task_slots() -> None:
    spark = session(spark_dynamicAllocation_minExecutors="1", spark_dynamicAllocation_maxExecutors="5", **DYNAMIC)
    assert default_sizes(spark, None, None, None) == (2, 2, 10)


def test_with_no_minimum_of_executors_one_worker_is_enough() -> None:
    assert default_sizes(session(spark_dynamicAllocation_maxExecutors="5", **DYNAMIC), None, None, None) == (1, 1, 10)


def test_dynamic_allocation_without_a_maximum_asks_for_max_np() -> None:
    with pytest.raises(ValueError, match=r"give max_np: spark.dynamicAllocation.maxExecutors is not set"):
        default_sizes(session(**DYNAMIC), None, None, None)


class ConnectSession:
    """One whose plan of a range shows a number, or none."""

    def __init__(self, plan: str = "Range (0, 1, step=1, splits=Some(8))", **settings: str) -> None:
        self.conf = {key.replace("_", "."): value for key, value in settings.items()}
        self._plan = plan

    def range(self, rows: int) -> Any:
        return SimpleNamespace(_explain_string=lambda: self._plan)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The class of Spark Connect's sessions."""
    module = SimpleNamespace(SparkSession=ConnectSession)
    monkeypatch.setitem(sys.modules, "pyspark.sql.connect.session", module)  # type: ignore[arg-type]
    return ConnectSession


def test_a_session_of_spark_connect_that_does_not_tell_its_cores_asks_for_max_np(connect: type[Any]) -> None:
    spark = connect("a plan of another version of Spark")
    with pytest.raises(ValueError, match=r"give max_np: this session of Spark Connect does not tell"):
        default_sizes(spark, None, None, None)
    assert default_sizes(spark, None, 2, 3) == (2, 2, 3)


@pytest.mark.parametrize("setting", ["spark.sql.leafNodeDefaultParallelism", "spark.default.parallelism"])
def test_a_session_of_spark_connect_whose_settings_hide_its_cores_asks_for_max_np(
    setting: str, connect: type[Any]
) -> None:
    assert default_sizes(connect(), None, None, None) == (8, 8, 8)
    spark = connect(**{setting.replace(".", "_"): "20"})
    with pytest.raises(ValueError, match=f"give max_np: .* while {re.escape(setting)} is set"):
        default_sizes(spark, None, None, None)
    assert known_slots(spark) is None
    assert default_sizes(spark, 3, None, None) == (3, 3, 3), "as many as are asked for are the most"
    assert default_sizes(spark, None, 2, 3) == (2, 2, 3)


def test_the_server_of_spark_connect_may_have_a_local_master_whose_cores_are_known(connect: type[Any]) -> None:
    spark = connect(spark_master="local-cluster[3, 2, 1024]", spark_default_parallelism="20")
    assert default_sizes(spark, None, None, None) == (6, 6, 6)


def test_an_idle_timeout_of_sql_counts_in_spark_connect_and_else_that_of_workers(connect: type[Any]) -> None:
    workers = {"spark_python_worker_killOnIdleTimeout": "true", "spark_python_worker_idleTimeoutSeconds": "60"}
    with pytest.raises(ValueError, match=r"udf\.killOnIdleTimeout=true and idleTimeoutSeconds=60, Spark kills"):
        check_session_settings(connect(**workers))
    check_session_settings(connect(**workers, spark_sql_execution_pyspark_udf_killOnIdleTimeout="false"))


def test_the_initial_executors_are_waited_for() -> None:
    limits = {"spark_dynamicAllocation_initialExecutors": "3", "spark_dynamicAllocation_maxExecutors": "5"}
    assert default_sizes(session(**limits, **DYNAMIC), None, None, None) == (1, 6, 10)


def test_several_gpus_for_each_task_are_refused() -> None:
    for amount in (None, "1", "0.5"):
        check_gpus({} if amount is None else {"spark.task.resource.gpu.amount": amount})
    with pytest.raises(ValueError, match=r"spark\.task\.resource\.gpu\.amount=2, but a worker uses one GPU"):
        check_gpus({"spark.task.resource.gpu.amount": "2"})


GPU_ON_EXECUTORS = {"spark_executor_resource_gpu_amount": "2"}


def test_code_without_a_session_of_spark_connect_is_told_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own error asks for a URL, which the user has given where the session was made."""
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with pytest.raises(SparkElasticError, match=r"no Spark Connect session is active in this thread, .*: give yours"):
        run(print)


def test_resources_of_a_job_take_the_place_of_what_the_session_gives_to_tasks() -> None:
    check_gpus(session(**GPU_ON_EXECUTORS).conf, wanted=True, resources=TaskResources(gpus=1))
    several = session(spark_task_resource_gpu_amount="2", **GPU_ON_EXECUTORS).conf
    check_gpus(several, resources=TaskResources(gpus=1))
    check_gpus(several, resources=TaskResources(cpus=1))  # a profile without GPUs gives none
    with pytest.raises(ValueError, match=r"useGpu=True, but Spark gives a task 0 GPUs.*resourceProfile=\{'gpus': 1\}"):
        check_gpus(several, wanted=True, resources=TaskResources(cpus=1))


def test_with_dynamic_allocation_the_scarcest_resource_says_how_many_tasks_an_executor_has_room_for() -> None:
    spark = session(spark_dynamicAllocation_maxExecutors="5", **DYNAMIC, **GPU_ON_EXECUTORS)
    sizes = [
        default_sizes(spark, None, None, None, TaskResources(**wanted))[2]
        for wanted in (
            {"cpus": 1},
            {"gpus": 1},
            {"cpus": 4},
            {"cpus": 4, "gpus": 1},
            {"gpus": 0.25},
            {"cpus": 1, "gpus": 0.5},
        )
    ]
    assert sizes == [20, 10, 5, 5, 10, 20]
    of_its_own = TaskResources(cpus=1, gpus=1, executor_cpus=8, executor_gpus=4)
    assert default_sizes(spark, None, None, None, of_its_own)[2] == 20


def test_tasks_may_share_a_core() -> None:
    limits = {"spark_dynamicAllocation_enabled": "true", "spark_dynamicAllocation_maxExecutors": "5"}
    spark = session(spark_executor_cores="4", spark_task_cpus="0.5", **limits)
    assert default_sizes(spark, None, None, None)[2] == 40


def test_without_dynamic_allocation_nobody_knows_how_many_tasks_with_resources_there_is_room_for() -> None:
    with pytest.raises(ValueError, match="give max_np or num_proc"):
        default_sizes(session(6), None, None, None, TaskResources(gpus=1))
    assert default_sizes(session(6), None, 1, 3, TaskResources(gpus=1)) == (1, 1, 3)
    assert default_sizes(session(6), 2, None, None, TaskResources(gpus=1)) == (2, 2, 2)


def test_what_is_no_session_is_refused() -> None:
    with pytest.raises(TypeError, match=r"spark must be a SparkSession.*not 3"):
        run(print, spark=3)


def test_executors_reach_the_driver_where_spark_tells_them_and_a_name_that_does_not_resolve_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert addresses_of(session(spark_driver_host="[::1]"), 7) == (("::1", 7),)
    assert not caplog.messages

    def fail(host: str, port: int) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert addresses_of(session(spark_driver_host="nowhere.invalid"), 7) == (("nowhere.invalid", 7),)
    assert caplog.messages[0].startswith("spark.driver.host=nowhere.invalid does not resolve here ([Errno -2] Name or")


@pytest.mark.parametrize(
    ("master", "variable", "setting", "runs"),
    [
        ("local[2]", None, None, sys.executable),
        ("local-cluster[2,1,1024]", None, None, sys.executable),
        ("spark://node7:7077", None, None, "python3"),
        ("local[2]", "python3", None, "python3"),
        ("local[2]", None, "python3", "python3"),
    ],
)
def test_executors_on_this_machine_run_this_python_unless_another_was_chosen(
    master: str, variable: str | None, setting: str | None, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYSPARK_PYTHON", variable)
    conf = {} if setting is None else {"spark.pyspark.python": setting}
    made = SimpleNamespace(sparkContext=SimpleNamespace(master=master, getConf=lambda: conf, pythonExec="python3"))
    use_own_python(made)
    assert made.sparkContext.pythonExec == runs


@pytest.mark.parametrize(
    ("master", "cpus", "slots"),
    [
        ("local", "1", 1),
        ("local[3]", "1", 3),
        ("local[4,2]", "1", 4),
        ("local[4]", "2", 2),
        ("local-cluster[2,3,1024]", "1", 6),
        ("local-cluster[2,3,1024]", "2", 2),
        ("local-cluster[2,1,1024]", "2", 0),
    ],
)
def test_a_wait_that_a_local_master_can_never_end_is_told_at_once(
    master: str, cpus: str, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    spark = session(master=master, spark_task_cpus=cpus)
    warn_of_too_few_cores(spark, slots)
    assert not caplog.records
    warn_of_too_few_cores(spark, slots + 1)
    assert f"num_proc={slots + 1} workers are waited for, but {master} runs {slots} task" in caplog.text


@pytest.mark.parametrize("master", ["local[*]", "spark://there:7077", "yarn", "k8s://https://there:443"])
def test_nothing_is_said_of_the_cores_of_other_masters(master: str, caplog: pytest.LogCaptureFixture) -> None:
    spark = session(master=master)
    warn_of_too_few_cores(spark, 1000)
    assert not caplog.records


class NoSession:
    """Notes for which master Spark is to be started, and starts none."""

    def __init__(self) -> None:
        self.masters: list[str] = []

    def master(self, url: str) -> NoSession:
        self.masters.append(url)
        return self

    def appName(self, name: str) -> NoSession:  # noqa: N802
        return self

    def config(self, name: str, value: object) -> NoSession:
        return self

    def getOrCreate(self) -> NoReturn:  # noqa: N802
        raise RuntimeError("no Spark here")


@pytest.mark.parametrize("has_place", [True, False])
def test_a_session_is_made_whose_executors_have_a_place_to_write_to(
    has_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark's own folder is root's, where an administrator has installed pyspark."""
    made = NoSession()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", made)
    monkeypatch.setattr("spark_elastic.launchers.session.active_session", lambda: None)
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    access = os.access
    monkeypatch.setattr("os.access", lambda path, *how: has_place if path == tmp_path else access(path, *how))
    with ExitStack() as stack, pytest.raises(RuntimeError, match="no Spark here"):
        find_session(stack)
    assert [master.partition("[")[0] for master in made.masters] == ["local-cluster" if has_place else "local"]
    assert caplog.messages == [] if has_place else "would write to" in caplog.text


def test_files_that_workers_have_written_beside_the_logs_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (
        *("app-1/0/stderr", "app-1/1/stdout", "app-1/1/model.pt", "app-2/0/stderr"),
        *("app-1/0/helpers.py", "app-1/0/__pycache__/helpers.pyc", "app-1/0/env/bin/python"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    remove_logs(tmp_path, "app-1", ["helpers.py", "env.tgz", "env"])
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "app-1/1/model.pt",
        "app-2/0/stderr",
    ]
    assert not (tmp_path / "app-1" / "0").exists()
    assert "app-1/1" in caplog.text
    remove_logs(tmp_path, "app-2")
    remove_logs(tmp_path, "app-3")
    (tmp_path / "app-1/1/model.pt").unlink()
    remove_logs(tmp_path, "app-1")
    assert not tmp_path.exists()
