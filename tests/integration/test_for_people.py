"""What people see of real jobs: Spark's names for them, the log and its page, scripts run from the command line."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import training
from serving import serving

from spark_elastic.cli import main
from spark_elastic.errors import TrainingFailedError
from spark_elastic.protocol.records import WorldBroken
from spark_elastic.testing import kill
from spark_elastic.timeline.event_log import choose_run, read_events
from spark_elastic.timeline.history import Doing, read_history
from spark_elastic.timeline.resets import Kind, Part

SUPPORT = Path(__file__).parents[1] / "support"


def test_a_job_is_readable_in_spark_and_in_its_log(spark: Any, run_on_spark: Any, tmp_path: Path, capfd: Any) -> None:
    names: set[tuple[str, str]] = set()
    pools: set[str] = set()

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "world_formed":
            store = spark.sparkContext._jsc.sc().statusStore()
            for job in spark.sparkContext.statusTracker().getActiveJobsIds():
                names.add((store.job(job).jobGroup().get(), store.job(job).description().get()))
                for stage in spark.sparkContext.statusTracker().getJobInfo(job).stageIds:
                    pools.add(store.lastStageAttempt(stage).schedulingPool())
        elif event["event"] == "worker_exited":
            (tmp_path / "exited").touch()  # before the job ends, as the log is closed then

    log = tmp_path / "events.jsonl"
    faults = [kill(rank=1, step=40)]
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", "training")
    run_on_spark(
        training.count_steps,
        80,
        0.02,
        kwargs={"held": (80, str(tmp_path), "exited")},
        min_np=1,
        max_np=2,
        num_proc=2,
        faults=faults,
        event_log=log,
        on_event=look,
        progress=True,
    )
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", None)
    assert pools == {"training"}, "our Spark jobs have threads of their own, which know nothing of the caller's pool"
    history = read_history(choose_run(read_events(log)))
    run_id = history.run_id
    assert names == {(f"spark_elastic-{run_id}", f"spark_elastic run {run_id}, slot {slot}") for slot in (0, 1)}
    loss = next(reset for reset in history.resets if reset.kind is Kind.LOSS)
    assert (loss.old_size, loss.victim, loss.steps_lost) == (2, 1, 0)
    assert set(loss.parts) == set(Part)
    assert loss.lost is not None
    assert 0 < loss.lost <= sum(loss.parts.values()) + 1
    assert 0 < history.availability < 1
    assert (history.outcome, history.unit, history.steps) == ("finished", "steps", 80)
    (cause,) = (line.cause for line in history.workers if line.cause)
    assert cause.startswith("killed by SIGKILL")
    assert all(Doing.TRAINING in {span.doing for span in line.spans} for line in history.workers[:2])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("spark_elastic: ")]
    assert lines[-1].startswith("spark_elastic: step 80, finished")


def test_a_script_for_torchrun_runs_as_it_is_and_starts_anew_at_every_change(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "events.jsonl"
    sizes = ["--nnodes", "1:2", "--nproc-per-node", "1", "--num-proc", "1", "--max-restarts", "5"]
    options = ["--restart-on-change", *sizes, "--no-progress", "--json", "--event-log", str(log)]
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)  # relative paths are of this folder, in the scripts, too
    status = main(["run", "--local", str(SUPPORT / "torchrun_script.py"), *options, "--", "own", "6"])
    output = capfd.readouterr()
    assert status == 0, output.err
    assert json.loads(output.out.splitlines()[-1])["workers"] == 2
    assert sorted(line for line in output.out.splitlines() if "through" in line) == ["[0] through", "[1] through"]
    epochs = [json.loads(line) for line in (tmp_path / "own" / "epochs").read_text().splitlines()]
    assert sorted({each["epoch"] for each in epochs}) == list(range(6))
    assert len({each["TORCHELASTIC_RESTART_COUNT"] for each in epochs}) == 3
    assert {each["LOCAL_RANK"] + each["LOCAL_WORLD_SIZE"] for each in epochs} == {"02"}
    assert {(each["TORCHELASTIC_MAX_RESTARTS"], each["MASTER_ADDR"]) for each in epochs} == {("5", "127.0.0.1")}
    history = read_history(choose_run(read_events(log)))
    worlds = [generation.size for generation in history.generations]
    assert worlds[0] == 1
    assert worlds.count(2) == 3
    (cause,) = (line.cause for line in history.workers if line.cause)
    assert cause.startswith("killed by SIGKILL")
    reasons = [entry.record.reason for entry in read_events(log) if isinstance(entry.record, WorldBroken)]
    assert "the script failed on rank 1: ValueError: a bad batch; restart 1 of 5" in reasons[-1]
    assert "in fail" in output.err, "the traceback of the script"


def test_a_script_that_fails_fails_the_command(spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('arguments', sys.argv[1:])\nsys.exit(len(sys.argv) - 1)\n")
    run = ["run", str(script), "--min-np", "1", "--max-np", "1", "--no-progress"]
    assert main(run) == 0
    assert main([*run, "--", "--one", "two"]) == 2
    output = capfd.readouterr()
    assert "[worker 0] arguments ['--one', 'two']" in output.out
    assert "SystemExit: 2" in output.err
    assert main([*run, "--restart-on-change", "--max-restarts", "1", "--", "one"]) == 2
    problem = capfd.readouterr().err.rpartition("spark-elastic: ")[2]
    assert "the script ended with exit code 1 on rank 0. That was failure 2 of max_restarts=1 + 1" in problem


def test_a_running_job_is_followed_on_its_page(run: Any, tmp_path: Path) -> None:
    log, enough = tmp_path / "events.jsonl", tmp_path / "enough"
    seen: dict[str, dict[str, Any]] = {}

    def say_train_and_raise() -> None:
        print("a line of output", flush=True)
        training.train_until(str(enough))
        raise ValueError("after training")

    def look(event: dict[str, Any]) -> None:
        """Ask for the page when the log has been written up to an event. The job trains until it shows all that it is to show."""
        if event["event"] not in ("job_started", "world_formed", "progress", "job_failed"):
            return
        with urllib.request.urlopen(f"{server.address}facts.json", timeout=60) as answer:
            facts = json.load(answer)
        doing = [worker["spans"][-1][0] for worker in facts["workers"]]
        said = [title for title, text in facts.get("words", []) if text == "a line of output"]
        if event["event"] != "progress":
            seen[event["event"]] = facts
        elif doing == ["trains", "trains"] and len(said) == 2:
            seen.setdefault("training", facts)
            enough.touch()

    with serving(log) as server, pytest.raises(TrainingFailedError, match="after training"):
        run(say_train_and_raise, min_np=2, max_np=2, event_log=log, on_event=look)
    assert list(seen) == ["job_started", "world_formed", "training", "job_failed"]
    assert [facts["isOver"] for facts in seen.values()] == [False, False, False, True]
    # The job may have gone on meanwhile.
    assert "sync state" in [stage for stage, *_ in seen["world_formed"]["start"]]
    assert [stage for stage, *_ in seen["training"]["start"]][-2:] == ["sync state", "first step"]
    for worker in seen["training"]["workers"]:
        (_, seconds, memory), *_ = worker["samples"]
        assert 0 < seconds < 600
        assert 2**20 < memory < 2**36
    (raised,) = (
        text for title, text in seen["job_failed"]["words"] if title.endswith("raised") and "the same" not in text
    )
    assert 'raise ValueError("after training")' in raised
