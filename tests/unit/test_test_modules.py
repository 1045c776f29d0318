"""Each module of the package has its unit tests in a module of its name, in the folder of the same name."""

from __future__ import annotations

from pathlib import Path

import spark_elastic

PACKAGE = Path(spark_elastic.__file__).parent
TESTS = Path(__file__).parent

# Interfaces, messages and values without a line that could go wrong, and what is tested elsewhere.
WITHOUT = {
    "_exhaustive.py": "for type checkers",
    "_json.py": "an alias of a type",
    "cli/__main__.py": "calls main, which test_cli.py calls",
    "driver/commands.py": "messages without methods",
    "driver/events.py": "messages without methods",
    "driver/runtime.py": "a value with defaults",
    "launchers/base.py": "interfaces",
    "worker/backends/backend.py": "an interface",
    "worker/state/keepers/keeper.py": "an interface",
}


def test_each_module_has_its_tests_under_its_name() -> None:
    modules = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    without = {
        module.as_posix()
        for module in modules
        if not any(
            (TESTS / module.parent / f"test_{name}.py").is_file() for name in (module.stem, module.stem.lstrip("_"))
        )
    }
    assert without == WITHOUT.keys()
