"""``EngineLoader``: the base of loaders whose files an ``Engine`` reads from front to back, a row group at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from spark_elastic.data.engine import Engine
from spark_elastic.data.loader import PositionedLoader
from spark_elastic.data.order import EpochOrder
from spark_elastic.data.plan import Step
from spark_elastic.data.reader import Batch, BlockBuilder, ReadAhead, lanes_ahead
from spark_elastic.data.tracker import RowGroupTracker
from spark_elastic.data.window import WindowStore

# How much is decoded at a time for one lane, and for all lanes.
_CHUNK_ROWS, _CHUNK_BYTES, _CHUNKS_BYTES = 32_768, 4 * 2**20, 48 * 2**20
# Row groups up to this size are decoded whole. Readers hold pages and dictionaries for each column of an open row group, which
# for hundreds of narrow columns take more memory than the values.
_GROUP_BYTES, _GROUPS_BYTES = 12 * 2**20, 160 * 2**20
_AHEAD_ROWS, _AHEAD_BYTES = 32_768, 64 * 2**20  # of ready batches, unless prefetch= says otherwise


class EngineLoader(PositionedLoader[Batch]):
    """Reads rows in windows, ahead of training, and compares the rows that were read with those that were assigned.

    A subclass implements ``__init__``: it counts the rows of each row group, opens an engine that reads them, and passes both on.

    tracker, identity, shard, shards_strict: see ``PositionedLoader``. engine: reads the tracker's row groups, by the same
    numbers. name: describes a row group in errors, by its number. row_bytes: the approximate size of a decoded row, which
    limits how many rows are held. jagged, dense_stays: see ``BlockBuilder``. row_ids: add ``_row_group`` and ``_row`` to each
    batch. prefetch: batches read ahead. pin_memory: by default, if CUDA is available.
    """

    def __init__(
        self,
        tracker: RowGroupTracker,
        identity: Mapping[str, object],
        engine: Engine,
        name: Callable[[int], str],
        *,
        row_bytes: float,
        jagged: frozenset[str] = frozenset(),
        dense_stays: bool = False,
        row_ids: bool = False,
        prefetch: int | None = None,
        pin_memory: bool | None = None,
        shard: tuple[int, int] | None = None,
        shards_strict: bool = True,
    ) -> None:
        super().__init__(tracker, identity, shard, shards_strict)
        self._engine = engine
        self._name = name
        self.jagged = jagged
        self._dense_stays = dense_stays
        self._row_ids = row_ids
        row_bytes = max(1.0, row_bytes)
        lanes = tracker.spec.lanes
        largest = int(tracker.rows.max(initial=0))
        is_small = largest <= _CHUNK_ROWS and largest * row_bytes <= min(_GROUP_BYTES, _GROUPS_BYTES / lanes)
        affordable = int(min(_CHUNK_BYTES, _CHUNKS_BYTES / lanes) / row_bytes)
        self._chunk = max(16, largest if is_small else min(_CHUNK_ROWS, affordable))
        self._ahead_rows = max(1, int(min(_AHEAD_ROWS, _AHEAD_BYTES / row_bytes)))
        self._prefetch = prefetch
        self.pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._store: WindowStore | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_store": None}

    def close(self) -> None:
        """End the current iteration, close files, and drop the rows held."""
        super().close()
        self._store = None
        self._engine.close()

    @property
    def identity(self) -> Mapping[str, object]:
        """Identifies the dataset and order that this loader's saved positions refer to."""
        return self._identity

    def open_store(self, order: EpochOrder) -> WindowStore:
        """Return an empty store that reads this loader's rows in the given order."""
        return WindowStore(order, self._engine, self._name, chunk=self._chunk, row_ids=self._row_ids)

    def builder(self, store: WindowStore, jagged: frozenset[str], *, pinned: bool, in_shards: bool) -> BlockBuilder:
        """Return a builder of batches of this loader's rows, in which these columns are jagged."""
        return BlockBuilder(store, jagged=jagged, pinned=pinned, in_shards=in_shards, dense_stays=self._dense_stays)

    def prefetch_in(self, tracker: RowGroupTracker) -> int:
        """Return how many batches are read ahead, given the ranks' present shares."""
        own_rows = max(1, tracker.plan.batch(tracker.size) // tracker.size)
        return self._prefetch or max(2, self._ahead_rows // own_rows)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Iterator[tuple[Step, int, Batch]]]:
        tracker = self._tracker
        order = tracker.order
        if self._store is None or self._store.order is not order:
            self._store = self.open_store(order)
        store = self._store
        store.keep(lanes_ahead(order, tracker))
        builder = self.builder(store, self.jagged, pinned=self.pinned, in_shards=self.shards is not None)
        ahead = ReadAhead(builder, tracker, self.prefetch_in(tracker))
        try:
            with ahead:
                yield ((delivery.step, delivery.ticket_sum, delivery.batch) for delivery in ahead)
        except Exception:
            self._store = None
            raise
        finally:
            if ahead.abandoned:
                self._store = None
            else:
                store.close()
                self._engine.close()
