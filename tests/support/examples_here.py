"""The scripts in examples/, as tests call them."""

from __future__ import annotations

import runpy
import types
from pathlib import Path
from typing import Any

from spark_elastic.testing import Fault, inject

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> types.SimpleNamespace:
    """Return an example's names. No module of this name can be imported: like a script, it travels to executors whole."""
    return types.SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def run_main(name: str, *arguments: str, faults: list[Fault] | None = None) -> Any:
    """Run an example with its arguments, while the faults strike, and return what its ``main`` returns."""
    with inject(*(faults or [])):
        return example(name).main(arguments)
