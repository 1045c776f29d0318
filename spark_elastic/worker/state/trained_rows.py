"""How many rows of all epochs have trained, as far as commits have counted them."""

from __future__ import annotations

from spark_elastic.data.loader import PositionedLoader
from spark_elastic.data.tracker import RowGroupTracker


class TrainedRows:
    """Adds up what a loader delivers from commit to commit. So epochs that are left early count as far as they went.

    A process that has not made the last commit, or begins at another one, takes the epochs before to have been whole.
    """

    def __init__(self) -> None:
        self.total = 0
        # The loader's place and tracker at the last commit, and what it had delivered.
        self._place: tuple[int, int] | None = None
        self._tracker: RowGroupTracker | None = None
        self._delivered = 0

    def enter(self, loader: PositionedLoader[object]) -> None:
        """Begin at the commit from which training continues. What was delivered after it is delivered again."""
        if self._place != (loader.epoch, loader.rows_processed):
            self.total = loader.epoch * loader.rows_total + loader.rows_processed
        self._note(loader)

    def commit(self, loader: PositionedLoader[object]) -> None:
        """Add the rows since the last commit."""
        before = self._delivered if loader.tracker is self._tracker else 0
        self.total += loader.tracker.rows_delivered - before
        self._note(loader)

    def _note(self, loader: PositionedLoader[object]) -> None:
        self._place = loader.epoch, loader.rows_processed
        self._tracker, self._delivered = loader.tracker, loader.tracker.rows_delivered
