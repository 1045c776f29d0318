"""The ways of keeping a commit, by the names that ``TorchState(commit=…)`` takes.

To add a way, write a class that implements ``Keeper`` in a file here, and add a line to the table.
"""

from collections.abc import Callable
from functools import partial

from spark_elastic._integers import whole_number
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.state.keepers.copies import OnDevice, OnHost
from spark_elastic.worker.state.keepers.divided import DividedInPlace, DividedOnDevice, DividedOnHost
from spark_elastic.worker.state.keepers.in_place import InPlace
from spark_elastic.worker.state.keepers.keeper import Keeper
from spark_elastic.worker.state.keepers.sharded import Sharded

__all__ = ["KEEPERS", "Keeper", "OnDevice", "dividing_keeper", "keeper_maker", "keeper_named"]

KEEPERS: dict[str, type[Keeper]] = {"copy": OnDevice, "host": OnHost, "in_place": InPlace, "sharded": Sharded}
# The keepers that replace these if the State has an optimizer that is divided among ranks.
_DIVIDING: dict[str, type[Sharded]] = {
    "copy": DividedOnDevice,
    "host": DividedOnHost,
    "in_place": DividedInPlace,
    "sharded": Sharded,
}


def keeper_named(commit: str) -> type[Keeper]:
    """Look up the keeper for a user's ``commit``. Raises ``ValueError`` for a name that is not in the table."""
    if commit not in tuple(KEEPERS):  # a user's value need not be hashable
        raise ValueError(f"commit must be one of {', '.join(KEEPERS)}, not {commit!r}")
    return KEEPERS[commit]


def keeper_maker(commit: str, redundancy: int) -> Callable[[], Keeper]:
    """Return a factory of keepers for a ``TorchState``. Raises ``ValueError`` for an unknown value."""
    keeper = keeper_named(commit)
    redundancy = whole_number("redundancy", redundancy, 1)
    if redundancy > 2:
        raise ValueError(f"redundancy must be 1 or 2, not {redundancy!r}")
    return partial(keeper, redundancy) if issubclass(keeper, Sharded) else keeper


def dividing_keeper(commit: str, redundancy: int) -> Keeper:
    """Make the keeper of a State whose optimizer is divided among ranks. Raises ``SparkElasticError`` if there is none."""
    if commit not in _DIVIDING:
        raise SparkElasticError(
            f'commit="{commit}" keeps no optimizer whose state is divided among ranks; with a ZeroRedundancyOptimizer write '
            f"commit= one of {', '.join(_DIVIDING)}"
        )
    return _DIVIDING[commit](redundancy)
