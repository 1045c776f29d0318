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
# Modules for other libraries, which need them.
FRAMEWORKS = ("huggingface", "keras", "lightning")
# Whose public names have a place in docs/api.
PACKAGES = (
    "spark_elastic",
    "spark_elastic.data",
    "spark_elastic.data.predicates",
    "spark_elastic.data.selectors",
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


def tree_of(module: str) -> ast.Module:
    """The source of a module or a package that costs seconds to import."""
    place = DOCS.parent / "spark_elastic" / module
    files = sorted(place.glob("*.py")) or [place.with_suffix(".py")]
    parts = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return ast.Module([node for part in parts for node in part.body], [])


def names_in(module: str) -> set[str]:
    """The public names of a module that costs seconds to import."""
    values = [
        node.value
        for node in tree_of(module).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {f"spark_elastic.{module}.{name}" for name in ast.literal_eval(values[0])}


# Methods without an underscore, by the class that has them, that other modules of ours call and no user does, or that
# Spark describes.
OURS = {
    "DistributedDataParallel": {
        *("attach", "compare", "detach", "follow_content", "follow_rows", "forget_rows", "forward", "has_rows_set"),
        *("require_backward_grad_sync", "rows_given", "shard", "was_reduced"),
    },
    "ElasticModel": {"describe"},
    "EngineLoader": {"builder", "identity", "open_store", "prefetch_in"},
    "LocalCluster": {"acquire", "is_closed", "pids", "release", "start", "unwatch", "vacate", "watch"},
    "Manifest": {"decode", "encode", "name"},
    "NGram": {"columns", "columns_at", "describe", "starts"},
    "Parameterized": {"set", "value"},
    "PositionedLoader": {
        *("balance", "confirm", "measured", "report", "set_world", "shards", "start_over", "tracker"),
    },
    "Store": {"check", "checkpoint_url", "data_url", "files", "log_url", "run_url", "spark_url", "worker_url"},
    "ZeroRedundancyOptimizer": {
        *("divide", "division", "held_state", "inner", "parameters", "plain_class", "sizes", "undivide"),
        "whole_state_dict",
    },
    "_Monitor": {"improved"},
}


def places() -> dict[str, dict[str, list[str]]]:
    """The names in docs/api, each with the lists among its options."""
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    found = re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", pages, re.MULTILINE)
    return {
        name: {key: names.split(", ") for key, names in re.findall(r"(\w+): \[(.*)\]", options)}
        for name, options in found
    }


def methods_of(kind: type) -> dict[str, bool]:
    """The methods and properties of a class that are for users, each with whether it has a docstring of its own."""
    found = {}
    for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("spark_elastic")]):
        for name, value in vars(base).items():
            is_method = inspect.isfunction(value) or isinstance(value, (classmethod, property, staticmethod))
            if is_method and not re.match("_|(get|set)[A-Z]", name) and name not in OURS.get(base.__name__, ()):
                found[name] = bool(value.__doc__)
    return found


def shown_of(kind: type, options: dict[str, list[str]]) -> set[str]:
    """The methods that a page shows of a class with such options: its own or some of them, and inherited ones that it names."""
    methods = methods_of(kind)
    own = {name for name in methods if name in vars(kind)}
    listed = own & set(options.get("members", own))
    return {name for name in listed if methods[name]} | set(options.get("inherited_members", ()))


@pytest.mark.parametrize(("name", "value"), [each for each in public_objects() if inspect.isclass(each.values[1])])
def test_every_method_for_users_is_shown_with_its_class_or_with_a_public_base(name: str, value: type) -> None:
    pages = places()
    public = {each.values[1]: each.values[0] for each in public_objects()}
    shown = {
        method for base in value.__mro__ if base in public for method in shown_of(base, pages.get(public[base], {}))
    }
    missing = set(methods_of(value)) - shown
    assert missing == set(), f"docs/api does not show these methods of {name}"


def test_every_public_name_has_one_place_in_the_api_reference_and_no_other_has() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    places = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert sorted(places) == sorted({param.values[0] for param in public_objects()}.union(*map(names_in, FRAMEWORKS)))


@pytest.mark.parametrize(
    ("example", "count", "said"),
    [
        ("lightning_trainer", 10, "ten lines are added or changed"),
        ("huggingface_trainer", 4, "four lines change"),
        ("keras_fit", 9, "nine lines are added or changed"),
    ],
)
def test_a_script_with_a_librarys_trainer_is_ported_in_few_lines(example: str, count: int, said: str) -> None:
    page = (DOCS / "coming-from" / f"{example.partition('_')[0]}.md").read_text(encoding="utf-8")
    script = (DOCS.parent / "examples" / f"{example}.py").read_text(encoding="utf-8")
    (difference, *_) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    added = [line[1:].strip() for line in difference.splitlines() if line.startswith("+") and line != "+"]
    assert len(added) == count
    assert said in page
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


ERRORS = importlib.import_module("spark_elastic.errors")
CLASSES = [
    *public_objects(),
    *(pytest.param(f"spark_elastic.errors.{name}", getattr(ERRORS, name), id=name) for name in ERRORS.__all__),
]


@pytest.mark.parametrize(("name", "value"), CLASSES)
def test_every_public_class_says_what_constructing_it_does(name: str, value: Any) -> None:
    init = vars(value).get("__init__") if inspect.isclass(value) else None
    assert init is None or init.__doc__, f"the __init__ of {name} has no docstring"


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_every_public_class_of_a_framework_says_what_constructing_it_and_its_properties_do(module: str) -> None:
    public = {name.rpartition(".")[2] for name in names_in(module)}
    classes = [node for node in tree_of(module).body if isinstance(node, ast.ClassDef) and node.name in public]
    assert {node.name for node in classes} == public
    silent = [
        f"{node.name}.{each.name}"
        for node in classes
        for each in node.body
        if isinstance(each, ast.FunctionDef)
        if each.name == "__init__" or any(ast.unparse(mark) == "property" for mark in each.decorator_list)
        if ast.get_docstring(each) is None
    ]
    assert silent == []
