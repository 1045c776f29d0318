"""``run(local=True)``: slots are processes of this machine, which need neither Spark nor Java, and of which nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import training
from environments import environment_without
from other_processes import GONE_SECONDS, assert_gone, finish, wait_for, wait_until

import spark_elastic
from spark_elastic.testing import inject, kill, kill_executor, kill_task

SUPPORT = Path(__file__).parents[1] / "support"


def start(folder: Path, act: str, python: str = sys.executable, **settings: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, str(SUPPORT / "local_script.py"), str(folder), act],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, **settings,
    )  # fmt: skip


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver whose two workers train, and have children of every kind, until somebody ends it."""
    process = start(tmp_path, "ended", start_new_session=True)
    yield process
    process.kill()
    process.communicate()


NOTE_WHO_ASKS = """
import sys

class Noting:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            with open({asked!r}, "a") as file:
                print(sys.argv, name, file=file)

sys.meta_path.insert(0, Noting())
"""


@dataclass
class Environment:
    """A Python of its own, and the variables to run it with."""

    python: str
    variables: dict[str, str]
    asked: Path

    def who_asked(self) -> str:
        """Return which processes have looked for Spark since the last time, and for what."""
        told = self.asked.read_text() if self.asked.exists() else ""
        self.asked.unlink(missing_ok=True)
        return told


@pytest.fixture
def without_spark(tmp_path: Path) -> Iterator[Environment]:
    """An environment with the packages of this one but for those of Spark, and without Java. In the end nobody may have asked."""
    asked = tmp_path / "asked"
    python, packages = environment_without(tmp_path / "environment", "pyspark", "py4j")
    (packages / "sitecustomize.py").write_text(NOTE_WHO_ASKS.format(asked=str(asked)))
    hidden = ("JAVA_HOME", "SPARK_HOME", "PYTHONPATH")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    made = Environment(python, {**variables, "PATH": str(Path(python).parent)}, asked)
    yield made
    assert made.who_asked() == ""


def test_it_trains_where_there_is_neither_spark_nor_java(tmp_path: Path, without_spark: Environment) -> None:
    python, variables = without_spark.python, without_spark.variables
    command = [python, "-c", "import spark_elastic; spark_elastic.run(print)"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert "ModuleNotFoundError: pyspark is not installed: give local=True to train in processes" in done.stderr
    assert "pyspark" in without_spark.who_asked()

    out = finish(start(tmp_path, "trained", python=python, env=variables))
    assert out.splitlines()[-1] == "[30.0, 30.0] 1 [2, 2, 2]", "a worker and a slot's process were killed on the way"


def command(*arguments: str, python: str = sys.executable, **settings: Any) -> str:
    process = subprocess.Popen(
        [python, "-m", "spark_elastic.cli", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings,
    )  # fmt: skip
    return finish(process)


def test_the_command_runs_scripts_without_spark(tmp_path: Path, without_spark: Environment) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('arguments', sys.argv[1:])\n")
    out = command(
        "run", "--local", "--num-proc", "2", "--no-progress", str(script), "a", "--", "--b",
        python=without_spark.python, env=without_spark.variables,
    )  # fmt: skip
    assert sorted(out.splitlines()) == [f"[worker {worker}] arguments ['a', '--b']" for worker in (0, 1)]


def listeners(port: int) -> list[int | None]:
    """Return the pids of the processes that listen at a port; None for one that the kernel does not tell."""
    return [entry.pid for entry in psutil.net_connections() if entry.status == "LISTEN" and entry.laddr.port == port]


def of_this_test(pids: list[int | None], folder: Path) -> list[int | None]:
    """Return those of the processes that name the test's folder, and those unknown: another program may be given a port anew."""

    def names_it(pid: int | None) -> bool:
        if pid is None:
            return True
        try:
            process = psutil.Process(pid)
            return any(str(folder) in word for word in (*process.cmdline(), process.cwd()))
        except psutil.Error:  # it has ended, or is another user's
            return False

    return [pid for pid in pids if names_it(pid)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_nothing_is_left_of_a_driver_that_is_ended_by_a_signal(
    how: signal.Signals, driver: subprocess.Popen[str], tmp_path: Path
) -> None:
    pids = wait_for(tmp_path / "0") + wait_for(tmp_path / "1")
    pids += [child.pid for child in psutil.Process(driver.pid).children(recursive=True)]
    (port,) = {entry.laddr.port for entry in psutil.Process(driver.pid).net_connections() if entry.status == "LISTEN"}
    driver.send_signal(how)
    assert_gone(list(set(pids)))
    code = driver.wait(timeout=60)
    assert code == -how
    print(f"{pids} are gone, and {listeners(port)} listen at the driver's port")
    wait_until(
        lambda: not of_this_test(listeners(port), tmp_path), f"port {port} was to be closed", seconds=GONE_SECONDS
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, None], ids=["SIGKILL", "exit"])
def test_nothing_that_was_kept_for_another_run_is_left_of_a_driver_that_has_ended(
    how: signal.Signals | None, tmp_path: Path
) -> None:
    process = start(tmp_path, "kept", stdin=subprocess.PIPE)
    wait_until((tmp_path / "kept").exists, "a job was to run", process)
    (kept,) = wait_for(tmp_path / "kept")
    assert psutil.pid_exists(kept)
    if how is None:
        finish(process)  # closes its stdin
    else:
        process.send_signal(how)
        process.communicate()
    assert_gone([kept])


def test_a_driver_in_which_the_user_catches_ctrl_c_goes_on_with_nothing_of_the_job_left() -> None:
    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            signal.raise_signal(signal.SIGINT)

    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        spark_elastic.run(training.count_steps, (10**6, 0.02), local=True, num_proc=2, on_event=interrupt)
    spark_elastic.shutdown()
    assert set(psutil.Process().children()) <= set(before)


def test_ctrl_c_before_there_is_any_worker_does_not_wait_for_torch_to_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that imports it is kept for the next run."""
    spark_elastic.shutdown()  # a job before this one may have left a process that has imported torch
    (tmp_path / "sitecustomize.py").write_text(IMPORTS_FOR_A_MINUTE)
    monkeypatch.syspath_prepend(tmp_path)  # processes of a job get the same
    before = set(psutil.Process().children())

    def interrupt() -> None:
        wait_until(lambda: (tmp_path / "imports").exists(), "torch was to be imported")
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        spark_elastic.run(print, local=True, num_proc=2)
    thread.join()
    (importing,) = set(psutil.Process().children()) - before
    assert importing.is_running()
    spark_elastic.shutdown()
    assert set(psutil.Process().children()) <= before


# For sitecustomize, in the process that imports torch for the others.
IMPORTS_FOR_A_MINUTE = """
import pathlib, sys, time
if any("slot_parent" in argument for argument in sys.orig_argv):
    pathlib.Path(__file__).with_name("imports").touch()
    time.sleep(60)
"""


def test_a_job_leaves_the_process_that_slots_are_forked_from_to_the_next_one_and_shutdown_ends_it() -> None:
    before = set(psutil.Process().children())
    with pytest.raises(spark_elastic.TrainingFailedError, match="KeyError: 'gone'"):
        spark_elastic.run(training.raise_everywhere, ("gone",), local=True, num_proc=2)
    (kept,) = set(psutil.Process().children()) - before
    assert not kept.children()
    first, second = (spark_elastic.run(training.look_around, local=True, num_proc=2) for _ in range(2))
    for parents, traces in first + second:
        assert kept.pid in parents
        assert traces == 0, "of the workers of the job before"
    spark_elastic.shutdown()
    assert set(psutil.Process().children()) <= before


def test_what_takes_long_to_import_and_a_job_needed_is_imported_for_later_jobs_and_for_none_before() -> None:
    spark_elastic.shutdown()
    spark_elastic.run(training.look_around, local=True, num_proc=2)
    found = [spark_elastic.run(training.find_reader, local=True, num_proc=2) for _ in range(3)]
    assert found == [[False, False], [True, True], [True, True]]


def test_a_module_whose_import_starts_threads_cannot_be_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are forked from processes that have no threads any more, where none is seen."""
    (tmp_path / "lively.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SPARK_ELASTIC_PRELOAD", "lively")
    with pytest.raises(spark_elastic.TrainingFailedError, match="names lively, whose import starts threads"):
        spark_elastic.run(training.look_around, local=True, num_proc=1, max_np=1)
    spark_elastic.shutdown()


def test_killed_workers_and_killed_processes_of_slots_are_replaced() -> None:
    events: list[dict[str, Any]] = []
    faults = [kill(rank=1, step=5), kill_task(rank=1, step=10), kill_executor(rank=0, step=20)]
    with inject(*faults):
        results = spark_elastic.run(training.count_steps, (30,), local=True, num_proc=2, on_event=events.append)
    assert [result["history"] for result in results] == [list(range(1, 31))] * 2
    assert len({result["digest"] for result in results}) == 1
    assert [event["size"] for event in events if event["event"] == "world_formed"] == [2] * 4
    meanings = [event["meaning"] for event in events if event["event"] == "worker_exited" and event["code"] == -9]
    assert meanings[0] == "killed by SIGKILL, by the injected fault kill(rank=1, step=5)"
    facts = [event["facts"] for event in events if event["event"] == "host_facts"]
    assert len({fact["pid"] for fact in facts}) == 4
    assert {fact["address"] for fact in facts} == {"127.0.0.1"}


def test_a_job_that_fails_at_once_tells_how_far_it_has_come() -> None:
    events: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"local": True, "num_proc": 2, "elastic": False, "on_event": events.append}
    with pytest.raises(spark_elastic.TrainingFailedError, match="row 7 is poisoned"):
        spark_elastic.run(training.raise_on_rank, (0, 7), **settings)
    assert max(event["values"]["step"] for event in events if event["event"] == "progress") == 7


def test_modules_beside_the_script_are_found_in_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from beside import answer  # type: ignore[import-not-found]

    assert spark_elastic.run(answer, local=True, num_proc=1) == [42]


FINDS = """
import queue, helpers, spark_elastic

def find():
    import helpers
    return helpers.WHERE

if __name__ == "__main__":
    environments = [None, {"OTHER": "1"}]  # workers are forked, or have an interpreter of their own
    found = [spark_elastic.run(find, num_proc=1, max_np=1, local=True, env=env) for env in environments]
    assert found == 2 * [[helpers.WHERE]] == 2 * [["beside the script"]], found
"""


def test_the_working_directory_hides_no_module_that_the_driver_imports(tmp_path: Path) -> None:
    """It came first in workers, though the driver does not look there: other modules, or none that works."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not the one of the standard library')")
    (tmp_path / "helpers.py").write_text("WHERE = 'in the working directory'")
    beside = tmp_path / "scripts"
    beside.mkdir()
    (beside / "helpers.py").write_text("WHERE = 'beside the script'")
    (beside / "train.py").write_text(FINDS)
    subprocess.run([sys.executable, str(beside / "train.py")], cwd=tmp_path, check=True, timeout=200)


def raise_much() -> None:
    raise ValueError("begins " + 40_000_000 * "y" + " ends")


def test_workers_read_the_arguments_of_the_drivers_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else argparse in the function would read those of a process that users do not know."""
    given = ["train.py", "--lr", "0.5"]
    monkeypatch.setattr("sys.argv", given)
    assert spark_elastic.run(training.arguments, local=True, num_proc=1, max_np=1) == [given]


def test_an_error_of_any_length_ends_the_job() -> None:
    """In a message of more than 64 MiB, it was never sent, and the worker waited for ever."""
    with pytest.raises(spark_elastic.TrainingFailedError) as raised:
        spark_elastic.run(raise_much, local=True, num_proc=1, max_np=1)
    said = str(raised.value)
    assert "begins yy" in said
    assert "characters are left out" in said
    assert "yy ends" in said
    assert len(said) < 10_000_000
