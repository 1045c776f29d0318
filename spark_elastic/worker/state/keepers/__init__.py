"""The ways in which a commit can be kept, by the names that ``TorchState(commit=…)`` takes.

A new way is a file beside these with a class that implements ``Keeper``, and a line in the table.
"""

from collections.abc import Callable
from functools import partial

from spark_elastic.worker.state.keepers.copies import OnDevice, OnHost
from spark_elastic.worker.state.keepers.in_place import InPlace
from spark_elastic.worker.state.keepers.keeper import Keeper
from spark_elastic.worker.state.keepers.sharded import Sharded

__all__ = ["KEEPERS", "Keeper", "OnDevice", "keeper_maker", "keeper_named"]

KEEPERS: dict[str, type[Keeper]] = {"copy": OnDevice, "host": OnHost, "in_place": InPlace, "sharded": Sharded}


def keeper_named(commit: str) -> type[Keeper]:
    """Look up what a user has given as ``commit``. Raises ``ValueError`` for a name that is not in the table."""
    if commit not in tuple(KEEPERS):  # a user's value need not be hashable
        raise ValueError(f"commit must be one of {', '.join(KEEPERS)}, not {commit!r}")
    return KEEPERS[commit]


def keeper_maker(commit: str, redundancy: int) -> Callable[[], Keeper]:
    """Return what makes the keeper of a ``TorchState``. Raises ``ValueError`` for what does not go together."""
    keeper = keeper_named(commit)
    if redundancy not in (1, 2):
        raise ValueError(f"redundancy must be 1 or 2, not {redundancy!r}")
    if issubclass(keeper, Sharded):
        return partial(keeper, redundancy)
    if redundancy != 1:
        raise ValueError(
            f'redundancy={redundancy} is for commit="sharded"; with "{commit}" each rank holds the whole state'
        )
    return keeper
