"""Who may speak to a job, what strangers and confused members can do to it, and where its key must never appear."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import training
from descendants import descendants
from driver_script import fragments_of
from fuzzer import BURST, Bomb, Fuzzer
from jobs import SUPPORT
from processes import command_of, ports_of
from strangers import CALLERS, call

from spark_elastic.driver.service import SparkDriverService
from spark_elastic.driver.settings import JobSettings
from spark_elastic.protocol.credentials import create_credentials
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task import packets

# FUZZ_FRAMES=… and FUZZ_SEED=… for more and others: `make fuzz`.
FRAMES = os.environ.get("FUZZ_FRAMES", "100000")
SEED = os.environ.get("FUZZ_SEED", "1")
WORKERS = 4
GROWTH_LIMIT = 32 * 2**20


class Unpickled:
    """Notes what this process unpickles that names a class or function, by Python's own audit events."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.active = False
        sys.addaudithook(self._hear)  # for the life of this process

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.active and event == "pickle.find_class":
            self.names.append(".".join(arguments))


@pytest.fixture(scope="module")
def unpickled() -> Unpickled:
    return Unpickled()


@pytest.fixture
def watched(unpickled: Unpickled) -> Iterator[list[str]]:
    unpickled.names.clear()
    unpickled.active = True
    yield unpickled.names
    unpickled.active = False


def test_a_hundred_thousand_frames_of_a_fuzzer_do_not_disturb_the_job_beside_it(tmp_path: Path) -> None:
    job = subprocess.run(
        [sys.executable, str(SUPPORT / "fuzzed_job.py"), FRAMES, SEED, str(tmp_path)],
        capture_output=True, text=True, timeout=1200, cwd=tmp_path,
    )  # fmt: skip
    print(job.stderr)
    assert job.returncode == 0
    found = json.loads(job.stdout)
    assert found["sizes"] == [WORKERS]
    assert len({steps for steps, _ in found["results"]}) == 1
    assert {generation for _, generation in found["results"]} == {1}
    assert found["losses"] == []
    assert found["supervisors"] >= 3 * WORKERS
    assert found["listeners"] == [], "tasks have no port of their own"
    before, after = found["bytes held"]
    print(f"the driver grew by {(after - before) / 2**20:.1f} MiB over the last three quarters")
    assert after - before < GROWTH_LIMIT
    assert found["unpickled"] == []
    assert not (tmp_path / "unpickled").exists()


def test_two_thousand_strangers_at_each_port_of_a_job_cost_it_nothing(
    run_on_spark: Any,
    tmp_path: Path,
) -> None:
    formed = threading.Event()
    found: dict[str, Any] = {}

    def visit() -> None:
        try:
            assert formed.wait(250)
            forked = [process for process in descendants() if "importer" in command_of(process)]
            # Workers listen, for Gloo, and nothing else that is forked from an importer.
            workers = {process: ports for process in forked if (ports := ports_of(process))}
            found["ports"] = [len(places) for places in workers.values()]
            before = {process: process.num_fds() for process in workers}
            found["answers"] = sum(
                call(place) for places in workers.values() for place in places for _ in range(CALLERS)
            )
            found["grown"] = [process.num_fds() - before[process] for process in workers]
        finally:
            (tmp_path / "stop").touch()

    visitor = threading.Thread(target=visit)
    visitor.start()
    result = run_on_spark(
        training.train_until, str(tmp_path / "stop"), min_np=2, max_np=2,
        on_event=lambda event: formed.set() if event["event"] == "entered" else None,
    )  # fmt: skip
    visitor.join()
    assert (found["ports"], found["answers"]) == ([1, 1], 0)
    assert max(found["grown"]) < CALLERS / 100  # one a caller, if they cost any
    assert result.sizes == [2]
    assert not result.of("world_broken")
    assert result.results[0] == result.results[1]


def test_nothing_that_strangers_send_is_unpickled(watched: list[str], tmp_path: Path) -> None:
    made, trap = create_credentials("test"), tmp_path / "unpickled"

    async def attack(port: int) -> None:
        fuzzer = Fuzzer("127.0.0.1", port, 1, made, pickle.dumps(Bomb(str(trap))), seed=1)
        while fuzzer.sent.total() < 2000:
            try:
                await fuzzer.be_a_stranger(BURST)
            except (OSError, asyncio.TimeoutError):
                pass

    settings = JobSettings(min_np=1, max_np=1, num_proc=1)
    with SparkDriverService(settings, made, bind_address="127.0.0.1") as service:
        asyncio.run(attack(service.port))
        assert not service.outcome.done()
    assert watched == []
    assert not trap.exists()


def test_the_watch_over_unpickling_sees_it(watched: list[str]) -> None:
    pickle.loads(pickle.dumps(Path("x")))
    assert watched


@pytest.mark.parametrize(("driver", "executors"), [("client", 2), ("cluster", 4)])
def test_the_key_is_nowhere_to_be_read_and_jobs_run_with_all_of_sparks_own_encryption(
    driver: str, executors: int, script: Any, tmp_path: Path
) -> None:
    """The script looks at every process of the machine while its job runs, and at all logs after it."""
    process = script(f"local-cluster[{executors},1,1024]", f"secured {driver}")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-3000:]
    assert "equal 1 of 2" in out
    found = {name: int(count) for name, _, count in (line.partition("=") for line in out.splitlines()) if count}
    assert found.pop("processes") > 5
    assert found.pop("logs") >= 2 + 2 * executors  # event logs, Spark's and ours; stdout and stderr of each executor
    assert found == {"cmdline": 0, "environ": 0, "logs with the key": 0}
    fragments = [bytes.fromhex(line) for line in (tmp_path / f"secured {driver}" / "fragments").read_text().split()]
    assert len(fragments) > 10
    assert not [fragment for fragment in fragments if fragment in out.encode() or fragment in err.encode()]


def test_the_search_for_the_key_finds_it() -> None:
    made = create_credentials("x")
    packet = msgspec.json.encode(packets.Begin(Ticket("x", (), made)))
    for text in (made.private_key, packet):
        assert any(fragment in text for fragment in fragments_of(made.private_key))
