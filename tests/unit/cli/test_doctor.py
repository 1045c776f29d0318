"""doctor: a broken set-up is named with its remedy, a good one passes."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from spark_elastic.cli import doctor, main
from spark_elastic.cli.doctor import (
    Diagnosis,
    Level,
    check_descriptors,
    check_gpus,
    check_local,
    check_settings,
    compare,
    compare_speeds,
    measure_speed,
)


def executable(folder: Path, name: str, *lines: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(["#!/bin/sh", *lines]))
    (folder / name).chmod(0o755)
    return folder / name


def java(folder: Path, version: str) -> None:
    executable(folder, "java", f"echo 'openjdk version \"{version}\" 2020-01-01' >&2")


@pytest.fixture
def fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set-up in which there is nothing to find; its folder of programs is first on PATH."""
    java(tmp_path / "bin", "17.0.9")
    for name in ("JAVA_HOME", "SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    versions = {"pyspark": (4, 3, 0), "torch": (2, 13, 0), "pyarrow": (26, 0, 1), "numpy": (2, 4, 0)}
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    return tmp_path


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status of doctor, and its findings that are not fine, by topic."""
    status = main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    return status, {each["topic"]: each for each in found if each["level"] != "fine"}


def test_a_good_set_up_passes(fine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examined(capsys, "--conf", "spark.master=local[2]") == (0, {})


@pytest.mark.parametrize(
    ("version", "said"), [("1.8.0_392", "Java 8"), ("11.0.20", "Java 11")], ids=["eight", "eleven"]
)
def test_an_old_java_is_named_with_what_this_spark_needs(
    version: str, said: str, fine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    java(fine / "bin", version)
    status, found = examined(capsys)
    assert status == 1
    assert f"{fine}/bin/java is {said}, Spark 4.3.0 needs 17 or 21" in found["Java"]["what"]
    assert "JAVA_HOME" in found["Java"]["fix"]


def test_local_training_wants_no_java_and_no_spark(
    fine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (fine / "bin" / "java").unlink()
    monkeypatch.setenv("JAVA_HOME", str(fine / "nowhere"))
    monkeypatch.setattr(doctor, "installed", {"torch": (2, 13, 0)}.get)
    assert examined(capsys)[0] == 1
    assert examined(capsys, "--local") == (0, {})
    monkeypatch.setattr(doctor, "installed", {}.get)
    assert set(examined(capsys, "--local")[1]) == {"torch"}


def test_findings_with_control_codes_leave_the_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Diagnosis(Level.WARNING, "topic", "what\x1b[31m", "fix\x1b[31m")]
    monkeypatch.setattr(doctor, "examine_local", lambda: found)
    assert main(["doctor", "--local"]) == 0
    assert capsys.readouterr().out == "? warning topic: what\n            → fix\n"


def test_it_says_what_local_training_would_use() -> None:
    assert "trains on the 2 GPUs of this machine" in check_local(("0", "1"), 8).what
    assert "trains on the 8 cores of this machine" in check_local((), 8).what


def test_java_home_goes_before_the_path_as_it_does_for_spark(
    fine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fine / "nowhere"))
    assert f"{fine}/nowhere/bin/java" in examined(capsys)[1]["Java"]["what"]


def test_petastorm_0_13_is_a_fault_with_the_versions_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "petastorm-0.13.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: petastorm\nVersion: 0.13.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, found = examined(capsys)
    assert status == 1
    assert "loses rows" in found["petastorm"]["what"]
    assert "petastorm==0.12.1" in found["petastorm"]["fix"]


def test_a_petastorm_that_works_wants_an_old_pyarrow_and_numpy(
    fine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {
        "pyspark": (3, 5, 9),
        "torch": (2, 13, 0),
        "pyarrow": (26, 0, 1),
        "petastorm": (0, 12, 1),
        "numpy": (2, 4),
    }
    monkeypatch.setattr(doctor, "installed", versions.get)
    found = examined(capsys)[1]
    assert "pyarrow>=14.0.1,<15" in found["pyarrow"]["fix"]
    assert "numpy 2.4" in found["petastorm"]["what"]


def test_another_python_for_executors_is_a_fault(
    fine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", str(executable(fine / "old", "python3", "echo 3.9.2")))
    status, found = examined(capsys)
    assert status == 1
    assert f"{fine}/old/python3, Python 3.9.2; the driver runs" in found["Python"]["what"]
    assert sys.executable in found["Python"]["fix"]


def test_executors_on_this_machine_run_the_drivers_python(
    fine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON")
    assert "Python" not in examined(capsys)[1], "the Python on the path is not the one that runs there"
    found = examined(capsys, "--conf", "spark.master=spark://node7:7077")[1]["Python"]["what"]
    assert "python3 (PYSPARK_PYTHON is not set)" in found


def test_a_python_without_our_packages_is_a_fault(
    fine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    monkeypatch.setenv("PYSPARK_PYTHON", str(executable(fine / "bare", "python3", f"echo {version} torch msgspec")))
    assert "lacks torch, msgspec" in examined(capsys)[1]["Python"]["what"]


def test_a_port_that_is_taken_is_a_fault(fine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        _, found = examined(capsys, "--driver-port", str(taken.getsockname()[1]))
    assert "driver_port" in found["port"]["fix"]


@pytest.mark.parametrize("port", ["-5", "65536", "22222222"])
def test_a_port_that_is_none_is_refused(fine: Path, capsys: pytest.CaptureFixture[str], port: str) -> None:
    assert main(["doctor", "--driver-port", port]) == 2
    assert f"--driver-port must be a port from 0 (any) to 65535, not {port}" in capsys.readouterr().err


def test_a_host_name_that_is_a_loopback_address_misleads_other_machines(
    fine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless nobody has set it: Spark then takes another address of the machine, if there is one."""

    def host_name() -> Any:
        return examined(capsys, "--conf", "spark.master=spark://elsewhere:7077")[1].get("host name")

    addresses = [
        SimpleNamespace(family=socket.AF_INET, address=each) for each in ("127.0.0.1", "169.254.1.1", "10.0.0.7")
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"all": addresses})
    assert host_name() is None
    for setting in ("SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME"):
        monkeypatch.setenv(setting, "127.0.0.1")
        assert host_name()["level"] == "warning"
        monkeypatch.delenv(setting)
    addresses.pop()
    assert host_name()["level"] == "warning"
    assert "spark.driver.host" in host_name()["fix"]


def test_settings_are_also_read_where_spark_reads_them(
    fine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (fine / "spark-defaults.conf").write_text("# ours\nspark.excludeOnFailure.enabled  true\nspark.speculation=true\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(fine))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "! FAULT   settings: spark.excludeOnFailure.enabled is on" in text
    assert "? warning settings: spark.speculation is on" in text


@pytest.mark.parametrize(
    ("conf", "master", "level", "named"),
    [
        ({"spark.excludeOnFailure.enabled": "true"}, "", Level.FAULT, "excludeOnFailure"),
        ({"spark.executor.pyspark.memory": "2g"}, "", Level.WARNING, "pyspark.memory"),
        ({"spark.dynamicAllocation.enabled": "true"}, "", Level.WARNING, "maxExecutors"),
        ({"spark.executor.cores": "1", "spark.task.cpus": "2"}, "", Level.FAULT, "task.cpus"),
        ({}, "yarn", Level.WARNING, "memoryOverhead"),
        ({}, "", Level.FINE, "none"),
    ],
)
def test_settings_that_hurt_are_found(conf: dict[str, str], master: str, level: Level, named: str) -> None:
    (finding,) = check_settings(conf, master)
    assert finding.level is level
    assert named in finding.what + finding.fix
    assert bool(finding.fix) == (level is not Level.FINE)


@pytest.mark.parametrize(
    ("amount", "present", "levels"),
    [
        (None, False, []),
        (None, True, [Level.WARNING]),
        ("1", True, [Level.FINE]),
        ("2", True, [Level.FAULT]),
        ("0.5", True, [Level.WARNING]),
    ],
)
def test_each_worker_gets_one_gpu(amount: str | None, present: bool, levels: list[Level]) -> None:
    conf = {} if amount is None else {"spark.task.resource.gpu.amount": amount}
    assert [finding.level for finding in check_gpus(conf, present)] == levels


@pytest.mark.parametrize(
    ("limit", "level", "said"),
    [
        (1024, Level.WARNING, "enough for 131 workers"),
        (20_000, Level.FINE, "enough for 4,875 workers"),
        (sys.maxsize, Level.FINE, "no limit"),
    ],
)
def test_too_few_open_files_for_a_large_job_are_found(limit: int, level: Level, said: str) -> None:
    finding = check_descriptors("executors", limit)
    assert (finding.level, finding.topic) == (level, "open files")
    assert finding.what.startswith("executors: ")
    assert said in finding.what


# As py4j and pyspark tell them, with fewer frames.
FRAMES = """
\tat org.apache.spark.SparkContext.<init>(SparkContext.scala:603)
\tat py4j.ClientServerConnection.run(ClientServerConnection.java:108)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""
NOT_PARSED = (
    "An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.\n"
    f": org.apache.spark.SparkException: Could not parse Master URL: 'local[x]'{FRAMES}"
)
UNREACHABLE = (
    "An error occurred while calling None.org.apache.spark.sql.classic.SparkSession.\n"
    ": java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.\n"
    "This stopped SparkContext was created at:\n\n"
    "org.apache.spark.api.java.JavaSparkContext.<init>(JavaSparkContext.scala:59)\n"
    "java.base/java.lang.Thread.run(Thread.java:840)\n\nAnd it was stopped at:\n\n"
    "org.apache.spark.SparkContext$$anon$3.run(SparkContext.scala:2298)\n\n"
    f"The currently active SparkContext was created at:\n\n(No active SparkContext.)\n         {FRAMES}"
)
TRACEBACK = (
    "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
    '  File "pyspark/worker.py", line 1225, in main\n'
    "ModuleNotFoundError: No module named 'spark_elastic'\n"
)
NO_PACKAGE = (
    "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
    f": org.apache.spark.SparkException: Job aborted due to stage failure: {TRACEBACK}{FRAMES}\nDriver stacktrace:{FRAMES}"
    f"Caused by: {TRACEBACK}{FRAMES}\t... 1 more\n"
)
CAUSED = f": java.lang.Outer$SomeException: outer{FRAMES}Caused by: java.net.UnknownHostException: nowhere{FRAMES}\t... 3 more\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (NOT_PARSED, "org.apache.spark.SparkException: Could not parse Master URL: 'local[x]'"),
        (UNREACHABLE, "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext."),
        (NO_PACKAGE, "ModuleNotFoundError: No module named 'spark_elastic'"),
        (CAUSED, "java.net.UnknownHostException: nowhere"),
        (
            "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
            '  File "job.py", line 3, in f\nValueError: bad: one\nsecond',
            "ValueError: bad: one",
        ),
        (
            "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number.\nmore",
            "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number.",
        ),
        ("", "RuntimeError"),
    ],
)
def test_the_line_that_stands_for_an_error_is_its_reason_and_no_frame(text: str, line: str) -> None:
    assert doctor._line(RuntimeError(text)) == line


def test_executors_are_compared_with_the_driver() -> None:
    mine = {"host": "driver", "Python": "3.11.7", "torch": "2.13.0", "spark-elastic": "0.1.0"}
    other = {**mine, "host": "east", "torch": "2.12.0"}
    bare = {**mine, "host": "west", "torch": ""}
    assert [(f.level, f.what.split()[0]) for f in compare([mine, other, bare, bare], mine)] == [
        (Level.WARNING, "east"),
        (Level.FAULT, "west"),
    ]
    assert compare([mine], mine) == [Diagnosis(Level.FINE, "executors", "they have the same packages as the driver")]


def test_a_host_that_computes_less_than_half_as_fast_as_the_others_is_named() -> None:
    measured = [("east", 100.0), ("west", 30.0), ("east", 98.0), ("north", 110.0), ("south", 90.0), ("west", 31.0)]
    (finding,) = compare_speeds(measured)
    assert (finding.level, finding.topic) == (Level.WARNING, "speed")
    assert finding.what.startswith("west takes 3.2 times as long as the median of the other hosts")


def test_of_two_hosts_the_slow_one_is_named_and_one_slow_slot_does_not_make_a_host_slow() -> None:
    assert [f.what.split()[0] for f in compare_speeds([("east", 100.0), ("west", 49.0)])] == ["west"]
    assert [f.level for f in compare_speeds([("east", 100.0), ("west", 51.0)])] == [Level.FINE]
    assert [f.level for f in compare_speeds([("east", 9.0), ("east", 9.0), ("east", 2.0), ("west", 9.0)])] == [
        Level.FINE
    ]


def test_on_one_host_there_is_nothing_to_compare() -> None:
    (finding,) = compare_speeds([("east", 100.0), ("east", 10.0)])
    assert (finding.level, finding.what) == (Level.FINE, "all executors are on east, so there is nothing to compare")


def test_the_speed_of_this_machine_is_measured_for_as_long_as_it_is_told() -> None:
    begun = time.perf_counter()
    host, speed = measure_speed(seconds=0.05)
    assert time.perf_counter() - begun >= 0.05
    assert (host, speed > 0) == (socket.gethostname(), True)


def test_a_timeout_that_kills_workers_is_a_fault_and_one_of_no_time_is_none() -> None:
    kills = {"spark.python.worker.killOnIdleTimeout": "true"}
    assert [finding.level for finding in check_settings(kills, "yarn")].count(Level.FAULT) == 0
    found = check_settings({**kills, "spark.python.worker.idleTimeoutSeconds": "600"}, "yarn")
    assert [finding.level for finding in found].count(Level.FAULT) == 1


def test_executors_of_spark_connect_are_not_looked_at_and_not_said_to_be_broken() -> None:
    (finding,) = doctor.check_executors("sc://somewhere:15002", {})
    assert finding.level is Level.WARNING
    assert "Spark Connect" in finding.what
    assert "the server's own master" in finding.fix
