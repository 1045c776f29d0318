"""Proof that the simulation can fail: the product with one mistake at a time, and how many schedules it takes to notice.

``python -m simulation.mutants`` plays all that ``mistakes.py`` lists, ``python -m simulation.mutants NAME`` one.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simulation.mistakes import MUTANTS, Mutant
from simulation.product.training import deliveries
from simulation.running import play_each

LIMIT = 3000


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Have the product make the mistake."""
    module_name, _, path = mutant.where.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    place = module
    for owner in owners:
        place = getattr(place, owner)
    function = _function(inspect.getattr_static(place, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert mutant.old in source, f"{mutant.name}: {mutant.where} has changed"
    names: dict[str, object] = {}
    body = textwrap.indent(source.replace(mutant.old, mutant.new), "    ")
    # The source is wrapped in a function, so that ``super()`` finds its class.
    text = f"from __future__ import annotations\ndef make(__class__):\n{body}\n    return {name}\n"
    exec(compile(text, f"<{mutant.name}>", "exec"), module.__dict__, names)
    made: Any = names["make"]
    # The function object stays the same, so code that refers to it by another name or through a table makes the mistake, too.
    original, function.__code__ = function.__code__, _function(made(place)).__code__
    try:
        yield
    finally:
        function.__code__ = original


def _function(defined: Any) -> Any:
    return defined.fget if isinstance(defined, property) else defined


def schedules_until_caught(mutant: Mutant, limit: int = LIMIT) -> tuple[int, str]:
    """Play until a violation is noticed. Return how many schedules that took, 0 if none was noticed, and the violation."""
    deliveries.cache_clear()
    try:
        with applied(mutant):
            for count, played in enumerate(play_each(range(limit)), 1):
                if played.violation:
                    return count, played.violation
        return 0, ""
    finally:
        deliveries.cache_clear()


def is_noticed_by_its_test(mutant: Mutant) -> bool:
    """Run the unit test of a mutant; it has to pass without the mistake and to fail with it."""
    support = str(Path(__file__).parents[1] / "tests" / "support")
    if support not in sys.path:
        sys.path.append(support)
    module_name, _, name = mutant.test.partition(":")
    test = getattr(importlib.import_module(module_name), name)
    test()
    with applied(mutant):
        try:
            test()
        except Exception:
            return True
    return False


def main(names: list[str]) -> int:
    missed = 0
    for mutant in MUTANTS:
        if mutant.test and (not names or mutant.name in names):
            is_noticed = is_noticed_by_its_test(mutant)
            missed += not is_noticed
            print(f"{'test' if is_noticed else 'never':>6}  {mutant.name}: {mutant.test}", flush=True)
        elif not names or mutant.name in names:
            count, violation = schedules_until_caught(mutant)
            missed += not count
            print(
                f"{count or 'never':>6}  {mutant.name}: {violation.splitlines()[0][:100] if violation else ''}",
                flush=True,
            )
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
