"""The ways in which a commit can be kept, by the names that ``TorchState(commit=…)`` takes.

A new way is a file beside these with a class that implements ``Keeper``, and a line in the table.
"""

from spark_elastic.worker.state.keepers.copies import OnDevice, OnHost
from spark_elastic.worker.state.keepers.in_place import InPlace
from spark_elastic.worker.state.keepers.keeper import Keeper

__all__ = ["KEEPERS", "Keeper", "OnDevice", "keeper_named"]

KEEPERS: dict[str, type[Keeper]] = {"copy": OnDevice, "host": OnHost, "in_place": InPlace}


def keeper_named(commit: str) -> type[Keeper]:
    """Look up what a user has given as ``commit``. Raises ``ValueError`` for a name that is not in the table."""
    if commit not in tuple(KEEPERS):  # a user's value need not be hashable
        raise ValueError(f"commit must be one of {', '.join(KEEPERS)}, not {commit!r}")
    return KEEPERS[commit]
