"""How many rows of all epochs have trained, as far as commits have counted them."""

from __future__ import annotations

from spark_elastic.data.loader import PositionedLoader


class TrainedRows:
    """Adds up what a loader delivers from commit to commit. So epochs that are left early count as far as they went.

    A process that has not seen the epochs before takes them to have been whole.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        # What the loader had delivered at the last commit.
        self._delivered = 0

    def enter(self, loader: PositionedLoader[object]) -> None:
        """Begin at the commit from which training continues. What was delivered after it is delivered again."""
        if self.total is None:
            self.total = loader.epoch * loader.rows_total + loader.rows_processed
        self._delivered = loader.tracker.rows_delivered

    def commit(self, loader: PositionedLoader[object]) -> None:
        """Add the rows since the last commit."""
        delivered = loader.tracker.rows_delivered
        self.total = (self.total or 0) + delivered - self._delivered
        self._delivered = delivered
