"""Children that user code forks in a worker: how they end, whatever leaves the block."""

from __future__ import annotations

import os
import sys

import pytest

from spark_elastic.worker.process.children import ending_children


def leave_with(error: BaseException | None) -> int:
    """Fork within the block, leave it in the child, and return the child's exit code."""
    with ending_children():
        child = os.fork()
        if child == 0:
            if error is not None:
                raise error
        else:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    raise AssertionError("the child has left the block")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("no"), 1),
        (ValueError("bad row"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_a_child_ends_with_the_code_that_python_would_give_it(error: BaseException | None, code: int) -> None:
    assert leave_with(error) == code


def test_the_process_itself_goes_on() -> None:
    with ending_children():
        pass
    with pytest.raises(SystemExit, match="3"), ending_children():
        sys.exit(3)
