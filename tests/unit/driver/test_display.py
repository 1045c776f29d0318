"""The progress line as it is shown: nobody has to wait for it, and it tears no other output."""

from __future__ import annotations

import fcntl
import gc
import io
import logging
import os
import pty
import struct
import sys
import termios
import threading
from types import SimpleNamespace

import pytest
from shown_entries import START, entry, rows
from threads import find_thread

from spark_elastic.driver import display
from spark_elastic.driver.display import ProgressDisplay
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.protocol.messages import Stream
from spark_elastic.protocol.records import JobFailed, WorldBroken


@pytest.fixture(autouse=True)
def last_line_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "END_SECONDS", 60.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_plain_line_tells_each_change_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wrote = threading.Event()

    class Watched(io.StringIO):
        def flush(self) -> None:
            wrote.set()

    monkeypatch.setattr(sys, "stderr", Watched())
    with ProgressDisplay(True) as shown:
        assert wrote.wait(10)
        shown.see(START[0])
        shown.see(entry(JobFailed("ValueError", "bad row")))
    assert sys.stderr.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "spark_elastic: starting",
        "spark_elastic: failed",
    ]


def test_a_plain_line_says_where_the_job_is_and_then_how_it_is_doing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ProgressDisplay(True)
    for each in (*START, rows(10, 2, 200), rows(12, 2, 400), entry(WorldBroken(1, "rank 1 was lost"))):
        shown.see(each)
    with shown:
        pass
    assert capsys.readouterr().err.splitlines() == [
        "spark_elastic: epoch 2 40%, recovering: rank 1 was lost, 400/1,000 rows, 2/4 workers, generation 1, 1 reset"
    ]


def test_before_the_first_step_the_live_line_begins_with_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []

    class Bar(SimpleNamespace):
        def refresh(self) -> None:
            lines.append(self.bar_format.format(head=self.head, tail=self.tail).rstrip())

        def clear(self, nolock: bool) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(display, "make_bar", Bar)
    with ProgressDisplay(None) as shown:
        shown.see(START[0])
    assert lines[-1:] == ["spark_elastic: starting: 2 wait for slots"]


@pytest.mark.parametrize("progress", [None, False])
def test_nothing_is_shown_where_nobody_asked_and_there_is_no_terminal(
    progress: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay(progress) as shown:
        shown.see(START[0])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("size", [(24, 120), (0, 0), (0, 120)])
def test_a_terminal_gets_a_live_line_and_output_of_workers_stays_whole(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
    monkeypatch.setattr(display, "LIVE_SECONDS", 0.001)
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.extend(iter(lambda: _read(master), b"")))
    reader.start()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        with ProgressDisplay(None) as shown, OutputPrinter(shown.aside) as printer:
            for number in range(50):
                shown.see(rows(number, 0, 10 * number))
                printer.show(Stream.OUT, "[0]", (f"line {number}",))
    reader.join(10)
    os.close(master)
    text = b"".join(seen).decode()
    # A line of output begins where the live line has been wiped, after a carriage return, or on a line of its own.
    assert [line for line in text.replace("\r", "\n").splitlines() if "[0]" in line] == [
        f"[0] line {number}" for number in range(50)
    ]
    assert "epoch 0" in text


def test_while_a_session_starts_its_lines_replace_the_live_line_and_none_is_left_where_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = threading.Semaphore(0)

    class Watched(Terminal):
        def write(self, text: str) -> int:
            written = super().write(text)
            if "starting" in text:
                drawn.release()
            return written

    terminal = Watched()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(display, "AGAIN_SECONDS", 0.001)
    with ProgressDisplay(None):
        assert drawn.acquire(timeout=10)
        assert drawn.acquire(timeout=10), "it is drawn again, because what is written meanwhile takes its place"
    text = terminal.getvalue()
    assert "starting\r" in text
    assert text.endswith("\r")
    assert not text.rstrip("\r").rpartition("\r")[2].strip(), "the line is wiped"


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 10**5)
    except OSError:  # the other end is closed
        return b""


def test_a_terminal_that_takes_nothing_holds_up_neither_events_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Stuck(Terminal):
        def write(self, text: str) -> int:
            gate.wait(10)
            return len(text)

    monkeypatch.setattr(display, "END_SECONDS", 0.01)
    made = display.make_bar
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal())
        bar = made()
    bar.fp = Stuck()
    bar.sp = bar.status_printer(bar.fp)
    monkeypatch.setattr(display, "make_bar", lambda: bar)
    with ProgressDisplay(None) as shown:
        thread = find_thread("spark_elastic-progress")
        for number in range(1000):
            shown.see(rows(number, 0, number))
    assert thread.is_alive(), "nobody has waited for it"
    gate.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_log_message_does_not_begin_at_the_end_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = threading.Event()

    class Watched(Terminal):
        def write(self, text: str) -> int:
            written = super().write(text)
            if "epoch 0" in text:
                drawn.set()
            return written

    terminal = Watched()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressDisplay(None) as shown:
        shown.see(rows(1, 0, 10))
        assert drawn.wait(10)
        logging.getLogger("spark_elastic").warning("a rank was lost")
        before = terminal.getvalue()
    assert before.endswith("\r"), "the line is wiped; where the message goes is up to logging"
    assert not logging.getLogger("spark_elastic").filters


def test_progress_is_true_false_or_none() -> None:
    with pytest.raises(TypeError, match="progress must be"):
        ProgressDisplay("yes")  # type: ignore[arg-type]


def test_a_notebook_without_widgets_has_no_bar_and_prints_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_in_notebook", lambda: True)
    monkeypatch.setattr("tqdm.notebook.IProgress", None)
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    assert display.make_bar() is None
    gc.collect()
    assert failed == []
