"""What launchers share: sizes, cores, pauses, and what is kept out of logs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from limited_cores import cores_of

from spark_elastic.launchers import defaults
from spark_elastic.launchers.defaults import fill_sizes, pause_after, unlogged


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "6400000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_a_quota_of_the_container_limits_the_cores(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores_of(monkeypatch, tmp_path, range(8))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert defaults.cores() == expected


def test_pauses_grow_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "RESUBMIT_SECONDS", 0.5)
    assert [pause_after(failures) for failures in (1, 2, 3, 50, 5000)] == [0.5, 1.0, 2.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((None, None, None), (4, 4, 4)),
        ((2, None, None), (2, 2, 4)),
        ((None, 2, None), (2, 2, 4)),
        ((3, 2, None), (2, 3, 4)),
        ((None, None, 3), (3, 3, 3)),
        ((8, None, None), (8, 8, 8)),
        ((None, 6, None), (6, 6, 6)),
    ],
)
def test_sizes_that_are_left_out_follow_from_those_that_are_given_and_from_what_is_there(
    given: tuple[int | None, ...], sizes: tuple[int, int, int]
) -> None:
    assert fill_sizes(4, *given) == sizes


def test_messages_of_the_calling_thread_are_dropped_for_a_while_and_those_of_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quiet, other = logging.getLogger("a client"), logging.getLogger("another")
    with unlogged("a client", "py4j"):
        quiet.warning("the key")
        other.warning("of another logger")
        thread = threading.Thread(target=quiet.warning, args=("of another thread",))
        thread.start()
        thread.join()
    quiet.warning("afterwards")
    assert caplog.messages == ["of another logger", "of another thread", "afterwards"]
    with pytest.raises(ValueError, match="x"), unlogged("a client"):
        raise ValueError("x")
    assert quiet.filters == []
