from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from application import Application
from kube import Kubernetes


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Callable[..., Kubernetes]]:
    """``kubernetes(node=room…)``: a cluster of these nodes, with room for so many pods each, for the test."""
    with ExitStack() as stack:
        yield lambda **nodes: stack.enter_context(Kubernetes(tmp_path / "kubernetes", nodes))


@pytest.fixture
def submitted() -> Iterator[Callable[[Application], Application]]:
    """``submitted(application)`` returns it; what is left of its submitter is killed after the test."""
    with ExitStack() as stack:

        def note(application: Application) -> Application:
            stack.callback(application.end)
            return application

        yield note
