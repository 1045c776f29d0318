"""Scripts that are started again: whose fault an end was, how long to wait, and where scripts meet."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from processes import ports_of

from spark_elastic.cli.run import torchrun_sizes
from spark_elastic.cli.script import find_target
from spark_elastic.errors import ScriptFailedError, WorkerLostError
from spark_elastic.protocol.messages import Member
from spark_elastic.worker import scripts


class OneControl:
    """A control connection to a store of its own; time passes only while something is waited for."""

    def __init__(self) -> None:
        self.values: dict[tuple[int | None, str], bytes] = {}
        self.now = 0.0
        self.beats = 0
        self.over_at: float | None = None

    def store(
        self, operation: str, keys: tuple[str, ...], values: tuple[bytes, ...] = (), amount: int = 0,
        generation: int | None = None,
    ) -> Any:  # fmt: skip
        key = (generation, keys[0])
        if operation == "set" or (operation == "set_default" and key not in self.values):
            self.values[key] = values[0]
        if operation == "add":
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return SimpleNamespace(amount=int(self.values[key]))
        return SimpleNamespace(values=(self.values.get(key),), amount=int(key in self.values))

    def wait(self, condition: Any, seconds: float) -> bool:
        if not condition():
            self.now += seconds
        return bool(condition())

    def beat(self) -> None:
        self.beats += 1

    def is_over(self) -> bool:
        return self.over_at is not None and self.now >= self.over_at


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> OneControl:
    control = OneControl()
    monkeypatch.setattr(scripts, "_wait", lambda *args: _WAIT(*args, now=lambda: control.now))
    return control


_WAIT = scripts._wait


def test_waiting_beats_and_ends_at_its_time_or_with_the_condition(control: OneControl) -> None:
    assert not scripts._wait(control, control.is_over, 4.5)  # type: ignore[arg-type]
    assert (control.now, control.beats) == (4.5, 4)
    control.over_at = 6.0
    assert scripts._wait(control, control.is_over)  # type: ignore[arg-type]
    assert control.now == 6.5


def test_what_fails_again_and_again_is_started_later_and_later() -> None:
    assert [scripts.backoff_seconds(failures) for failures in (0, 1, 2, 3, 5, 6, 100)] == [0, 1, 2, 4, 16, 30, 30]


def fails(control: OneControl, generation: int, rank: int = 1, allowed: int = 2, error: bytes = b"") -> None:
    """The script fails on a rank; the error file holds ``error``."""
    descriptor = os.memfd_create("error")
    os.write(descriptor, error)
    world: Any = SimpleNamespace(rank=rank, generation=generation, size=2)
    record = scripts._Record(control)  # type: ignore[arg-type]
    plan = scripts.RestartOnChange(b"", max_restarts=allowed)
    try:
        scripts._find_fault(world, plan, record, 3, descriptor, control.is_over)
    finally:
        os.close(descriptor)


def test_a_script_is_started_again_as_often_as_it_may_fail(control: OneControl) -> None:
    for generation, restarts in ((1, 1), (2, 2)):
        with pytest.raises(WorkerLostError, match=f"exit code 3 on rank 1; restart {restarts} of 2"):
            fails(control, generation)
    with pytest.raises(ScriptFailedError, match=r"That was failure 3 of max_restarts=2 \+ 1; its output says more"):
        fails(control, 3)


def test_what_record_has_written_reaches_the_user(control: OneControl) -> None:
    told = {"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback …\nValueError: bad\n"}}}
    with pytest.raises(
        ScriptFailedError, match=r"the script failed on rank 1: ValueError: bad\. That was failure 1[^\n]*$"
    ) as error:
        fails(control, 1, allowed=0, error=json.dumps(told).encode())
    assert error.value.script_traceback == "Traceback …\nValueError: bad\n"


@pytest.mark.parametrize("written", [b"", b"{", b"[]", b'{"message": 7}', b'{"message": {"extraInfo": null}}', b"\xff"])
def test_an_error_file_that_says_nothing_is_no_error(written: bytes, control: OneControl) -> None:
    with pytest.raises(ScriptFailedError, match="the script ended with exit code 3 on rank 1"):
        fails(control, 1, allowed=0, error=written)


def test_a_failure_that_a_lost_worker_explains_is_nobodys(control: OneControl) -> None:
    control.over_at = 2.0
    fails(control, 1)
    assert scripts._Record(control).failures_before(2) == 0  # type: ignore[arg-type]


def test_only_the_first_to_fail_is_to_blame(control: OneControl) -> None:
    with pytest.raises(WorkerLostError):
        fails(control, 1, rank=0)
    control.over_at = control.now + 100.0
    fails(control, 1, rank=1)
    assert scripts._Record(control).failures_before(2) == 1  # type: ignore[arg-type]


def test_the_rank_whose_error_came_first_is_to_blame_even_where_its_process_ended_last(
    control: OneControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = scripts.Failure(time.time_ns(), "the script failed on rank 0: ValueError: bad", "Traceback …")

    def wait_while_the_other_ends(*args: Any) -> bool:
        scripts._Record(control).tell(SimpleNamespace(rank=0, generation=1), cause)  # type: ignore[arg-type]
        return _WAIT(*args, now=lambda: control.now)

    monkeypatch.setattr(scripts, "_wait", wait_while_the_other_ends)
    with pytest.raises(WorkerLostError, match="the script failed on rank 0: ValueError: bad; restart 1 of 2"):
        fails(control, 1, rank=1)


def test_a_rank_that_was_killed_is_to_blame_although_its_peers_errors_were_seen_first() -> None:
    descriptor = os.memfd_create("error")
    broken = scripts.Failure(1, "the script failed on rank 0: RuntimeError: Connection reset by peer", "")
    killed, aborted = (scripts.read_failure(1, code, descriptor) for code in (-signal.SIGKILL, -signal.SIGABRT))
    os.close(descriptor)
    assert broken.at < killed.at
    assert scripts.first_of([broken, killed]) == killed
    assert killed.story == "the script was killed by SIGKILL on rank 1"
    assert scripts.first_of([broken, aborted]) == broken, "NCCL aborts where a peer has failed"


def test_an_error_is_told_from_what_its_process_does_as_it_ends() -> None:
    descriptor = os.memfd_create("error")
    os.write(descriptor, json.dumps({"message": {"message": "ValueError: bad"}}).encode())
    os.utime(descriptor, ns=(7, 7))
    assert scripts.read_failure(1, -6, descriptor) == scripts.Failure(
        7, "the script failed on rank 1: ValueError: bad", ""
    )
    os.close(descriptor)


def test_only_a_failure_just_before_holds_a_start_up(control: OneControl) -> None:
    with pytest.raises(WorkerLostError):
        fails(control, 4)
    record = scripts._Record(control)  # type: ignore[arg-type]
    assert [record.failures_before(generation) for generation in (5, 6)] == [1, 0]


def test_the_store_of_scripts_reaches_no_further_than_they_do() -> None:
    assert scripts.choose_host("192.0.2.7", is_one_machine=True) == "127.0.0.1"
    assert scripts.choose_host("2001:db8::7", is_one_machine=True) == "::1"
    assert scripts.choose_host("192.0.2.7", is_one_machine=False) == "192.0.2.7"


class OneStore(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def gather(self, key: str, value: bytes, size: int) -> list[bytes]:
        return [value] * size


def test_rank_0_serves_the_store_on_loopback_for_one_machine_and_closes_it() -> None:
    this = psutil.Process()
    before = ports_of(this)
    store: Any = OneStore()
    store.get = store.__getitem__
    world: Any = SimpleNamespace(rank=0, size=2, store=store, me=SimpleNamespace(local_size=2))
    with scripts._meeting_point(world, "192.0.2.7") as meeting:
        assert ports_of(this) - before == {("127.0.0.1", meeting.port)}
        socket.create_connection((meeting.host, meeting.port)).close()
    assert ports_of(this) == before


def test_a_script_is_told_of_its_agents_store_and_of_restarts() -> None:
    world: Any = SimpleNamespace(rank=3, size=4, generation=2, me=Member(9, 3, 1, 2, 1, 2, None))
    told = scripts.environment(world, scripts.Meeting("127.0.0.1", 2345, "127.0.0.1"), "abc", 5)
    assert {name: value for name, value in told.items() if name.startswith("TORCHELASTIC")} == {
        "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    assert scripts.interfaces(scripts.Meeting("127.0.0.1", 1, "127.0.0.1"))["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_error_of_the_script_comes_through_the_error_file(tmp_path: Path) -> None:
    text = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('bad batch')\nmain()\n"
    )
    (tmp_path / "script.py").write_text(text)
    call = pickle.dumps(find_target(str(tmp_path / "script.py"), []))
    with scripts._running(call, {**os.environ, "PYTHONPATH": ":".join(sys.path)}) as (process, error_file):
        assert process.wait() != 0  # torch may abort what ends with an error
        message, traceback = scripts.read_error(error_file)
    assert message == "ValueError: bad batch"
    assert "in main" in traceback


# ---------------------------------------------------------------- torchrun's options


@pytest.mark.parametrize(
    ("each", "nodes", "sizes"),
    [(None, None, ()), ("4", None, (4, 4)), ("2", "1:3", (2, 6)), (None, "2", (2, 2))],
)
def test_torchruns_sizes_are_those_of_the_job(each: str | None, nodes: str | None, sizes: tuple[int, ...]) -> None:
    assert tuple(torchrun_sizes(each, nodes).values()) == sizes


@pytest.mark.parametrize(
    ("each", "nodes", "complaint"),
    [("gpu", None, "is Spark's to say"), ("0", None, "not '0'"), ("2", "3:1", "MIN:MAX"), ("2", "x", "MIN:MAX")],
)
def test_sizes_that_torchrun_would_count_itself_are_refused(each: str, nodes: str | None, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        torchrun_sizes(each, nodes)
