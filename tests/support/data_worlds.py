"""Plays a world of loaders in one process: W ranks in lockstep, commits, and resets to other sizes."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import settings

from spark_elastic.data.loader import PositionedLoader

BRIEF = settings(max_examples=40, derandomize=True, deadline=None)
THOROUGH = settings(max_examples=400, derandomize=True, deadline=None)


def write_dataset(
    root: Path, row_groups: list[int], files: int = 2, **columns: Callable[[np.ndarray], pa.Array]
) -> Path:
    """Write row groups of the given sizes, spread over files; ``id`` counts rows, ``x`` is [id, id + 0.5]."""
    root.mkdir(parents=True, exist_ok=True)
    edges = np.cumsum([0, *row_groups])
    per_file = -(-len(row_groups) // files)
    for number in range(files):
        part = range(number * per_file, min(len(row_groups), (number + 1) * per_file))
        if not part:
            continue
        tables = [make_table(np.arange(edges[i], edges[i + 1]), **columns) for i in part]
        with pq.ParquetWriter(root / f"part-{number}.parquet", tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=max(1, len(table)))
    return root


def make_table(ids: np.ndarray, **columns: Callable[[np.ndarray], pa.Array]) -> pa.Table:
    """Return the rows with the given ids."""
    pairs = np.stack([ids, ids + 0.5], 1).astype("f4")
    x = pa.ListArray.from_arrays(pa.array(np.arange(len(ids) + 1, dtype="i4") * 2), pa.array(pairs.ravel()))
    return pa.table({"id": pa.array(ids, pa.int64()), "x": x, **{name: make(ids) for name, make in columns.items()}})


class World:
    """``make()`` builds one rank's loader; ``size`` of them are stepped together.

    ``counted`` is how often each row has been processed, as of the last commit; ``steps`` maps (epoch, position) to the
    sorted rows of the step there.
    """

    def __init__(self, make: Callable[[], PositionedLoader[Any]], size: int) -> None:
        self.make = make
        self.steps: dict[tuple[int, int], list[int]] = {}
        self.counted: collections.Counter[tuple[int, int]] = collections.Counter()
        self.committed: dict[str, Any] | None = None
        self._since: list[tuple[int, int]] = []
        self.loaders: list[PositionedLoader[Any]] = []
        self.form(size)

    def form(self, size: int, keep: int = 0) -> None:
        """Lose what was not committed and form a world of ``size``, of which ``keep`` ranks are survivors."""
        kept, gone = self.loaders[: min(keep, size)], self.loaders[min(keep, size) :]
        for loader in gone:
            loader.close()
        self.loaders = kept + [self.make() for _ in range(size - len(kept))]
        self._since = []
        for rank, loader in enumerate(self.loaders):
            if self.committed is not None:
                loader.load_state_dict(self.committed)
            loader.set_world(rank, size)
        self.committed = self.loaders[0].state_dict()
        self.iterators = [iter(loader) for loader in self.loaders]

    @property
    def size(self) -> int:
        return len(self.loaders)

    def step(self) -> list[int] | None:
        """Take one batch on every rank; return the rows of each that count, or None at the end of the epoch."""
        epoch, start = self.loaders[0].epoch, self.loaders[0].rows_processed
        batches = [next(iterator, None) for iterator in self.iterators]
        if any(batch is None for batch in batches):
            assert all(batch is None for batch in batches), "ranks make different numbers of steps"
            return None
        shapes = {loader.batch_rows for loader in self.loaders}
        assert len(shapes) == 1, shapes
        (rank_rows,) = shapes
        step: list[int] = []
        for rank, batch in enumerate(batches):
            ids = [int(value) for value in (batch["id"] if isinstance(batch, dict) else batch)]
            assert ids, "an empty batch"
            if isinstance(batch, dict) and "x" in batch:
                assert np.array_equal(batch["x"].numpy(), np.stack([ids, np.array(ids) + 0.5], 1).astype("f4"))
            assert not rank_rows[rank] or len(ids) == rank_rows[rank]
            step += ids if rank_rows[rank] else []
        self.steps.setdefault((epoch, start), sorted(step))
        assert self.steps[epoch, start] == sorted(step) or not self.same_steps, "another world had other rows here"
        self._since += [(epoch, row) for row in step]
        return list(rank_rows)

    def train_through_a_loss(self) -> None:
        """Commit a step and lose the next one with all ranks but one; train to the end of the epoch in a world of two."""
        self.step()
        self.commit()
        self.step()
        self.form(2, keep=1)
        while self.step():
            self.commit()
        self.close()

    same_steps = False
    # Changes the shares of a global batch after each commit, where there is one.
    chance: random.Random | None = None

    def _change_shares(self, chance: random.Random) -> None:
        batch = self.loaders[0]._tracker.plan.overall or 0
        if batch < self.size:
            return
        cuts = sorted(chance.sample(range(1, batch), self.size - 1))
        shares = tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, batch]))
        for loader in self.loaders:
            loader._tracker.divide(shares)

    def commit(self) -> None:
        """Commit on every rank, and check the reports as a state does."""
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states), states
        self.committed = states[0]
        self.counted.update(self._since)
        self._since = []
        reports = [loader.report() for loader in self.loaders]
        for loader in self.loaders:
            loader.confirm(reports)
        if self.chance is not None:
            self._change_shares(self.chance)

    def close(self) -> None:
        """End all iterations."""
        for loader in self.loaders:
            loader.close()
