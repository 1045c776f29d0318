"""The documentation agrees with the code where it is made from it."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# Whose public names have a place in docs/api.
PACKAGES = (
    "spark_elastic",
    "spark_elastic.data",
    "spark_elastic.data.predicates",
    "spark_elastic.estimator",
    "spark_elastic.loggers",
    "spark_elastic.testing",
    "spark_elastic.timeline",
)


def test_the_settings_reference_is_that_of_the_code() -> None:
    made = runpy.run_path(str(DOCS / "make_reference.py"))["document"]()
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == made, (
        "run: python docs/make_reference.py > docs/reference.md"
    )


@pytest.mark.parametrize("name", ["rooms.svg", "phases.svg"])
def test_the_pictures_are_those_of_the_code(name: str) -> None:
    """That of the rooms cannot be drawn where two of them import each other."""
    made = runpy.run_path(str(DOCS / "make_pictures.py"))["PICTURES"][name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, "run: python docs/make_pictures.py"


def public_objects() -> list[Any]:
    """What users import, each with its full name."""
    found = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        objects = {f"{package}.{name}": getattr(module, name) for name in module.__all__}
        found += [pytest.param(name, value, id=name) for name, value in objects.items() if not inspect.ismodule(value)]
    return found


def names_in(module: str) -> set[str]:
    """The public names of a module that costs seconds to import."""
    tree = ast.parse((DOCS.parent / "spark_elastic" / f"{module}.py").read_text(encoding="utf-8"))
    values = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {f"spark_elastic.{module}.{name}" for name in ast.literal_eval(values[0])}


def test_every_public_name_has_one_place_in_the_api_reference_and_no_other_has() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    places = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert sorted(places) == sorted(
        {param.values[0] for param in public_objects()} | names_in("keras") | names_in("lightning")
    )


def test_a_script_with_lightnings_trainer_is_ported_in_ten_lines() -> None:
    page = (DOCS / "coming-from" / "lightning.md").read_text(encoding="utf-8")
    script = (DOCS.parent / "examples" / "lightning_trainer.py").read_text(encoding="utf-8")
    (difference, *_) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    added = [line[1:].strip() for line in difference.splitlines() if line.startswith("+") and line != "+"]
    assert len(added) == 10
    assert "ten lines are added or changed" in page
    # The script, which the suite runs through kills, has each of them, with numbers of its own and what it prints beside.
    assert [line for line in added if line.partition("(")[0] not in script] == []


@pytest.mark.parametrize(("name", "value"), public_objects())
def test_every_public_name_is_documented_with_all_its_arguments(name: str, value: Any) -> None:
    told = inspect.getdoc(value) or ""
    assert told
    untold = [each for each in arguments_of(value) if not re.search(rf"\b{each}\b", told)]
    assert untold == [], f"the docstring of {name} does not say what they are"


def arguments_of(value: Any) -> list[str]:
    """The arguments that a name's own docstring has to tell: not those of errors, enumerations, and classes like their base."""
    if not inspect.isclass(value):
        return list(inspect.signature(value).parameters) if inspect.isfunction(value) else []
    init: Callable[..., None] | None = vars(value).get("__init__")
    if init is None or issubclass(value, (Exception, enum.Enum)):
        return []
    return list(inspect.signature(init).parameters)[1:]
