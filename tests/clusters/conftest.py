"""Stand-ins of cluster managers, driven by real Spark; see README.md here.

Tests marked ``long`` are not part of ``make test``, but of ``make test-clusters``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from descendants import descendants
from settling import assert_settles
from submitted import Submitted
from yarn_cluster import Yarn, compile_stand_in

# What a stand-in or an application has started ends within this after both have been ended.
SETTLE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test no process may be there that was not there before."""
    before = set(descendants())
    yield
    assert_settles(lambda: set(descendants()) - before, SETTLE_SECONDS)


@pytest.fixture
def submit(nothing_left: None, tmp_path: Path) -> Iterator[Callable[..., Submitted]]:
    """``submit(…)`` returns what ``Submitted(tmp_path, …)`` makes. What is left of it is killed after the test."""
    with ExitStack() as stack:

        def submit(**how: Any) -> Submitted:
            submitted = Submitted(tmp_path, **how)
            stack.callback(submitted.kill)
            return submitted

        yield submit


@pytest.fixture(scope="session")
def yarn_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("javac") is None:
        pytest.skip("the stand-in of YARN is compiled by javac, which is part of a JDK but not of a JRE")
    return compile_stand_in(tmp_path_factory.mktemp("yarn"))


@pytest.fixture
def yarn(nothing_left: None, yarn_classes: Path, tmp_path: Path) -> Iterator[Yarn]:
    """Two nodes with room for five executors each."""
    with Yarn(yarn_classes, tmp_path) as made:
        yield made
