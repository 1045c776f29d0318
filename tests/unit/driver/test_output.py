"""OutputPrinter: prints in order, and never holds anybody up."""

from __future__ import annotations

import io
import logging
import re
import threading
import time

import pytest
from threads import find_thread

from spark_elastic.driver import output
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.protocol.messages import Stream


class Stuck(io.StringIO):
    """Takes nothing until ``gate`` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.asked = threading.Event()

    def write(self, text: str) -> int:
        self.asked.set()
        assert self.gate.wait(10)
        return super().write(text)


def test_lines_carry_their_prefix_and_go_to_their_stream(capsys: pytest.CaptureFixture[str]) -> None:
    with OutputPrinter() as printer:
        printer.show(Stream.OUT, "[0]", ("a", "b"))
        printer.show(Stream.ERR, "[1]", ("c",), dropped=1200)
    assert capsys.readouterr() == ("[0] a\n[0] b\n", "[1] … 1,200 lines dropped\n[1] c\n")


def test_a_stream_that_takes_nothing_delays_nobody_and_every_line_is_shown_or_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = Stuck()
    monkeypatch.setattr("sys.stdout", stuck)
    pages = 3 * output.BACKLOG
    with OutputPrinter() as printer:
        for number in range(pages):
            printer.show(Stream.OUT, "[0]", (f"{number} first", f"{number} second"))
        assert stuck.asked.wait(10)
        stuck.gate.set()
    text = stuck.getvalue()
    dropped = sum(int(count.replace(",", "")) for count in re.findall(r"… ([\d,]+) lines dropped", text))
    assert dropped > 0
    assert text.count("first") + text.count("second") + dropped == 2 * pages


def test_log_lines_wait_for_nobody_either() -> None:
    stuck = Stuck()
    handler = logging.StreamHandler(stuck)
    logging.getLogger("spark_elastic").addHandler(handler)
    try:
        with OutputPrinter() as printer:
            for number in range(3 * output.BACKLOG):
                printer.log(logging.WARNING, f"{number} % lost")
            assert stuck.asked.wait(10)
            stuck.gate.set()
    finally:
        logging.getLogger("spark_elastic").removeHandler(handler)
    lines = stuck.getvalue().splitlines()
    assert lines[0] == "0 % lost"
    assert output.BACKLOG <= len(lines) < 3 * output.BACKLOG


class OnePageAtATime:
    """Stands for the printer's thread: each wait for its end is over when one more page has been printed."""

    def __init__(self, printer: OutputPrinter, turn: threading.Semaphore, pages: int) -> None:
        self._printer = printer
        self._thread = printer._thread
        self._turn = turn
        self._pages = pages

    def is_alive(self) -> bool:
        return self._printer._printed < self._pages

    def join(self, timeout: float) -> None:
        wanted = self._printer._printed + 1
        self._turn.release()
        end = time.monotonic() + 10
        while self._printer._printed < wanted:
            assert time.monotonic() < end
            time.sleep(0.001)
        if not self.is_alive():
            self._thread.join(10)


class Slow(io.StringIO):
    """Takes one page at each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = threading.Semaphore(0)

    def write(self, text: str) -> int:
        assert self.turn.acquire(timeout=10)
        return super().write(text)


def test_a_slow_stream_gets_everything_as_long_as_it_takes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = 5
    slow = Slow()
    monkeypatch.setattr("sys.stdout", slow)
    with OutputPrinter() as printer:
        printer._thread = OnePageAtATime(printer, slow.turn, pages)  # type: ignore[assignment]
        for number in range(pages):
            printer.show(Stream.OUT, "[0]", (f"{number}",))
    assert slow.getvalue().splitlines() == [f"[0] {number}" for number in range(pages)]


def test_a_stream_that_stays_stuck_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    monkeypatch.setattr("sys.stdout", stuck)
    monkeypatch.setattr(output, "END_SECONDS", 0.01)
    with OutputPrinter() as printer:
        thread = find_thread("spark_elastic-output")
        for _ in range(3 * output.BACKLOG):
            printer.show(Stream.OUT, "[0]", ("line",))
    assert thread.is_alive(), "nobody has waited for it"
    stuck.gate.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO(), "ascii")], ids=["none", "ascii"])
def test_whatever_is_wrong_with_a_stream_is_no_trouble_of_the_jobs(
    stream: io.TextIOBase | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", stream)
    with OutputPrinter() as printer:
        printer.show(Stream.OUT, "[0]", ("größer",))
    if stream is not None:
        stream.seek(0)
        assert stream.read() == "[0] gr??er\n"
