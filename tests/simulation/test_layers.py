"""The simulation reads in one direction, from the world to the verdict."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import simulation

ROOT = Path(simulation.__file__).parent
# From the lowest on. What plays schedules lies above, in the package itself.
LAYERS = ("world", "product", "faults", "checks")


def arrows() -> dict[str, set[str]]:
    """Which modules of the simulation each one names, those for type checkers included."""
    files = {
        "simulation." + ".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in ROOT.rglob("*.py")
    }
    found = {}
    for module, file in files.items():
        found[module] = named = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & files.keys()
    return found


def height(module: str) -> int:
    layer = module.split(".")[1]
    return LAYERS.index(layer) if layer in LAYERS else len(LAYERS)


def test_no_module_names_one_of_a_layer_above() -> None:
    upwards = {
        (module, named)
        for module, all_named in arrows().items()
        for named in all_named
        if height(named) > height(module)
    }
    assert not upwards


def test_no_modules_name_each_other_in_a_circle() -> None:
    found = arrows()
    assert len(list(TopologicalSorter(found).static_order())) == len(found) > len(LAYERS)
