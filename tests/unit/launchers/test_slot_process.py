"""The driver's side of the processes on this machine: what they have written, how they ended, and who takes an order back."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_processes import wait_until

from spark_elastic.launchers import slot_parent
from spark_elastic.launchers.slot_process import TAIL_BYTES, TAIL_LINES, SlotParent, SlotProcess
from spark_elastic.protocol.credentials import Credentials
from spark_elastic.protocol.ticket import Ticket
from spark_elastic.task.service import TaskPlace

TICKET = Ticket("1", (("127.0.0.1", 1),), Credentials(b"", b""), None)

Start = Callable[[str], SlotParent]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a parent that is a shell script instead."""
    python, made = tmp_path / "python", list[SlotParent]()
    monkeypatch.setattr(sys, "executable", str(python))

    def start(script: str) -> SlotParent:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        made.append(SlotParent(1))
        return made[-1]

    yield start
    for each in made:
        each.end()


def test_how_a_parent_has_ended_is_told_with_its_last_lines(start: Start) -> None:
    told = start("for n in $(seq 100); do echo line $n; done; echo no torch >&2; exit 3").story().splitlines()
    assert told[0] == "the process that slots are forked from ended with exit code 3"
    assert told[-2:] == ["line 100", "no torch"]
    assert len(told) == 1 + TAIL_LINES


def test_a_parent_that_was_killed_says_by_which_signal_and_every_time_the_same(start: Start) -> None:
    parent = start("exec sleep 1000")
    assert not parent.has_ended
    parent.kill()
    assert parent.story() == parent.story() == "the process that slots are forked from ended with signal 9"
    assert parent.has_ended
    assert not parent.fits(1)


def test_a_parent_that_still_imports_cannot_have_forked_and_one_that_was_retired_may_have(start: Start) -> None:
    parent = start("exec sleep 1000")
    assert not parent.may_have_forked
    parent.retire()
    assert parent.may_have_forked


def test_a_parent_that_says_that_it_is_ready_may_have_forked_from_then_on(start: Start) -> None:
    says = f"import os, sys, time; os.write(int(sys.argv[3]), {slot_parent.READY!r}); time.sleep(1000)"
    parent = start(f"""exec {os.path.realpath("/proc/self/exe")} -c "{says}" "$@" """)
    wait_until(lambda: parent.may_have_forked, "the parent was to say that it is ready")
    assert parent.may_have_forked, "it says so once"


def slot_of(parent: SlotParent) -> tuple[SlotProcess, socket.socket, int]:
    """Return a slot's process, and what the parent's side of it holds: its connection and the end that it writes to."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    return SlotProcess(parent, ours, reading), theirs, writing


@pytest.mark.parametrize(
    ("code", "story"), [(b"7", "its process ended with exit code 7"), (b"-11", "its process ended with signal 11")]
)
def test_a_slot_ends_with_its_own_code_and_its_last_lines(start: Start, code: bytes, story: str) -> None:
    slot, theirs, writing = slot_of(start("exec sleep 1000"))
    assert slot.read(), "nothing has been written yet"
    os.write(writing, b"x" * 100 + b"\nhello\n")
    os.close(writing)
    theirs.send(code)
    theirs.close()
    assert slot.read()
    assert not slot.read(), "its output has ended"
    told = slot.close().splitlines()
    assert (told[0], told[-1]) == (story, "hello")


def test_of_much_output_the_end_is_kept(start: Start) -> None:
    slot, theirs, writing = slot_of(start("exec sleep 1000"))
    for number in range(3 * TAIL_BYTES // 16):
        os.write(writing, b"line %010d\n" % number)
        slot.read()
    os.close(writing)
    theirs.send(b"1")
    told = slot.close().splitlines()
    assert told[-1] == f"line {3 * TAIL_BYTES // 16 - 1:010d}"
    assert len(told) == 1 + TAIL_LINES
    theirs.close()


def test_a_slot_whose_parent_has_ended_without_a_word_ends_as_its_parent_did(start: Start) -> None:
    parent = start("echo out of memory; exit 1")
    slot, theirs, writing = slot_of(parent)
    os.close(writing)
    theirs.close()
    assert slot.close() == "the process that slots are forked from ended with exit code 1\nout of memory"


def test_to_kill_a_slot_is_to_end_the_connection_of_its_order_and_harmless_when_it_has_ended(start: Start) -> None:
    slot, theirs, writing = slot_of(start("exec sleep 1000"))
    slot.kill()
    theirs.settimeout(30)
    assert theirs.recv(10) == b"", "its parent sees this and kills it"
    theirs.close()
    slot.kill()
    os.close(writing)
    slot.withdraw()


def test_an_order_for_a_parent_that_has_just_ended_is_one_for_a_process_that_ends_at_once(start: Start) -> None:
    parent = start("exit 5")
    parent.story()
    slot = parent.fork(TICKET, TaskPlace(0))
    assert slot.connection.recv(10) == b""
    assert "ended with exit code 5" in slot.close()


def test_killing_the_parent_of_a_slot_ends_it(start: Start) -> None:
    parent = start("exec sleep 1000")
    slot, theirs, writing = slot_of(parent)
    slot.kill_parent()
    assert f"signal {signal.SIGKILL.value}" in parent.story()
    os.close(writing)
    theirs.close()
    slot.withdraw()
