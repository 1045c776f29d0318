"""How many rows of all epochs have trained, as far as commits have counted them."""

from __future__ import annotations

from spark_elastic.data.loader import Countable


class TrainedRows:
    """Adds up what a loader has delivered from commit to commit. So epochs that are left early count as far as they went."""

    def __init__(self) -> None:
        self.total = 0
        # The epoch and the rows of it at the last commit.
        self._place: tuple[int, int] | None = None

    def enter(self, loader: Countable) -> None:
        """Begin at the place of the commit from which training continues.

        Where that is another place than at this process's last commit, nothing is known of the epochs before it, and they count
        as whole.
        """
        place = loader.epoch, loader.rows_processed
        if place != self._place:
            self.total, self._place = loader.epoch * loader.rows_total + loader.rows_processed, place

    def commit(self, loader: Countable) -> None:
        """Add the rows since the last commit. A loader that was set back, or to another epoch, began that at its first row."""
        epoch, rows = loader.epoch, loader.rows_processed
        before = self._place[1] if self._place is not None and self._place[0] == epoch else 0
        self.total += rows - (before if before <= rows else 0)
        self._place = epoch, rows
