"""Why Spark gave up a slot: the one line of what it says that tells a person most."""

from __future__ import annotations

import sys

import pytest

from spark_elastic.launchers.slot_reason import find_hopeless, find_reason

JOB = "java.util.concurrent.ExecutionException: Exception thrown by job"
STAGE = "Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task 0.3"
PYTHON = f"""{STAGE} (TID 3) (host executor 0): org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "task.py", line 1, in <module>
    import msgspec
%s

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Unknown Source)

Driver stacktrace:"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (PYTHON % "ModuleNotFoundError: No module named 'msgspec'", "ModuleNotFoundError: No module named 'msgspec'"),
        (PYTHON % "a.b.SlotConfigurationError: 2 GPUs: one", "a.b.SlotConfigurationError: 2 GPUs: one"),
        (f"{STAGE}: java.io.IOException: no python\nDriver stacktrace:", f"{STAGE}: java.io.IOException: no python"),
        (f"{STAGE}: ExecutorLostFailure (executor 0 exited)", f"{STAGE}: ExecutorLostFailure (executor 0 exited)"),
        ("Job 0 cancelled", "Job 0 cancelled"),
        (
            f"An error occurred while calling o9.collectToPython.\n: org.apache.spark.SparkException: {STAGE}\n\tat a.B.c(B)",
            f"org.apache.spark.SparkException: {STAGE}",
        ),
        (
            "An error occurred while calling o9.addJobTag. Trace:\npy4j.Py4JException: Method addJobTag does not exist",
            "py4j.Py4JException: Method addJobTag does not exist",
        ),
        (
            '<_MultiThreadedRendezvous of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n\tdetails = "gone: 9"\n>',
            "gone: 9",
        ),
    ],
)  # fmt: skip
def test_it_is_the_last_exception_of_python_else_what_the_innermost_cause_says(said: str, reason: str) -> None:
    assert find_reason([JOB, "Exception thrown by job", said]) == reason


def test_missing_packages_and_several_gpus_are_hopeless_and_all_else_is_tried_again() -> None:
    missing = find_hopeless("ModuleNotFoundError: No module named 'torch'", "python3")
    assert missing.startswith(
        "executors cannot run spark_elastic: python3 there says ModuleNotFoundError: No module named 'torch'. Before the"
    )
    assert sys.executable in missing
    assert missing.endswith("ship it (--py-files, --archives; in Spark Connect spark.addArtifacts)")
    assert find_hopeless("spark_elastic.launchers.spark_task.SlotConfigurationError: this task was given 2 GPUs")
    assert not find_hopeless("ModuleNotFoundError: No module named 'users'")
    assert not find_hopeless(f"{STAGE}: ExecutorLostFailure (executor 0 exited)")


def test_a_task_that_spark_refuses_for_its_size_is_hopeless_and_both_sizes_are_named() -> None:
    """Four drivers were tried, and the error named only the call of py4j that had failed."""
    told = find_hopeless(
        "org.apache.spark.SparkException: Job aborted due to stage failure: Serialized task 2:0 was 150016552 bytes, which "
        "exceeds max allowed: spark.rpc.message.maxSize (134217728 bytes). Consider increasing spark.rpc.message.maxSize"
    )
    assert "has 143 MiB, and spark.rpc.message.maxSize allows 128 MiB. Write large data to storage and give its" in told


@pytest.mark.parametrize(
    "said",
    [
        "Python in worker has different version: 3.12 than that in driver: 3.11, PySpark cannot run with different",
        "Python in worker has different version 3.12 than that in driver 3.11, PySpark cannot run with different",
    ],
    ids=["Spark 4", "Spark 3.5"],
)
def test_another_python_is_hopeless_and_both_versions_are_named(said: str) -> None:
    error = f"pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] {said} minor versions."
    told = find_hopeless(find_reason([JOB, PYTHON % error]))
    assert told.startswith(
        "executors run Python 3.12, the driver 3.11: functions cannot travel between them. Set PYSPARK_"
    )
