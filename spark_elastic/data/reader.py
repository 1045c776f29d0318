"""Reads ahead of the consumer on one thread, and hands over blocks of ready batches."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from spark_elastic.data.columns import Column, Ragged, as_ragged, join
from spark_elastic.data.convert import to_tensors
from spark_elastic.data.order import EpochOrder
from spark_elastic.data.plan import Draw, Step, draw
from spark_elastic.data.tracker import RowGroupTracker
from spark_elastic.data.window import WindowStore
from spark_elastic.errors import DataError

Batch = dict[str, torch.Tensor]

_JOIN_DEADLINE = 10.0
_BLOCK_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """This rank's batch of one step. ticket_sum: the sum of the tickets of those rows that count."""

    step: Step
    ticket_sum: int
    batch: Batch


class BlockBuilder:
    """Gathers a rank's rows of a few steps at a time into tensors. Blocks on reading; raises DataError.

    jagged: the list columns that always become jagged tensors. Other lists become dense tensors in a batch where all have one
    length. With ``in_shards`` they must have one length, because batches hold different rows in another world. dense_stays:
    a transform has made the columns, so that a dense one under such a name is meant to be dense.
    """

    def __init__(
        self,
        store: WindowStore,
        *,
        jagged: frozenset[str],
        pinned: bool,
        in_shards: bool = False,
        dense_stays: bool = False,
    ) -> None:
        self._store = store
        self._jagged = jagged
        self._pinned = pinned
        self._in_shards = in_shards
        self._dense_stays = dense_stays

    def build(self, steps: list[Step], rank: int) -> list[ReadyBatch]:
        """Return the batches of consecutive steps, which share memory."""
        drawn = draw(self._store.order, steps, rank)
        columns = self._gather(drawn)
        for name, column in columns.items():
            if self._in_shards and isinstance(column, Ragged) and name not in self._jagged and not column.is_even:
                raise DataError(
                    f"column {name!r} has lists of several lengths, which the footers do not tell: whether a batch is dense "
                    "would depend on the world. With shards= give a transform= that pads them"
                )
        sizes = [int(size) for size in np.diff(drawn.offsets)]
        cut = {
            name: to_tensors(column, sizes, jagged=self._is_jagged(name, column), pinned=self._pinned)
            for name, column in columns.items()
        }
        names = list(cut)
        return [
            ReadyBatch(step, ticket_sum, dict(zip(names, tensors, strict=True)))
            for step, ticket_sum, *tensors in zip(steps, drawn.ticket_sums, *cut.values(), strict=True)
        ]

    def _is_jagged(self, name: str, column: torch.Tensor | Ragged) -> bool:
        return name in self._jagged and not (self._dense_stays and isinstance(column, torch.Tensor))

    def _gather(self, drawn: Draw) -> dict[str, torch.Tensor | Ragged]:
        store, order = self._store, self._store.order
        windows = order.window_of(drawn.lanes, drawn.positions)
        rows, done = len(windows), 0
        tensors: dict[str, torch.Tensor] = {}
        dense: dict[str, np.ndarray] = {}  # NumPy views of the same memory
        ragged: dict[str, list[Column]] = {}
        tickets = np.empty(rows, np.int64)
        while done < rows:
            store.load(int(drawn.lanes[done]), int(windows[done]))
            missing = store.resident[drawn.lanes[done:]] != windows[done:]
            stop = done + int(np.argmax(missing)) if missing.any() else rows
            for name in dense.keys() - store.layout.keys():
                ragged[name] = [as_ragged(dense.pop(name)[:done].copy())] if done else []
                del tensors[name]
            for name, (shape, dtype) in store.layout.items():
                if name not in dense:
                    kind = torch.from_numpy(np.empty(0, dtype)).dtype
                    tensors[name] = torch.empty((rows, *shape), dtype=kind, pin_memory=self._pinned)
                    dense[name] = tensors[name].numpy()
            found = store.gather(drawn.lanes[done:stop], drawn.positions[done:stop], dense, tickets, done)
            for name, part in found.items():
                ragged.setdefault(name, []).append(part)
            done = stop
        if not np.array_equal(tickets, drawn.tickets):
            wrong = int(np.flatnonzero(tickets != drawn.tickets)[0])
            raise DataError(
                f"rows delivered are not the rows assigned: {tickets[wrong]} in the place of {drawn.tickets[wrong]}"
            )
        return {**tensors, **{name: as_ragged(join(parts)) for name, parts in ragged.items()}}


def lanes_ahead(order: EpochOrder, tracker: RowGroupTracker) -> set[int]:
    """Return the lanes from which the rank draws in its next round through all lanes."""
    batch = max(1, tracker.plan.batch(tracker.size))
    steps = tracker.upcoming(tracker.position, 2 + 2 * order.spec.lanes // batch)
    return set(np.unique(draw(order, steps, tracker.rank).lanes).tolist()) if steps else set()


class Builder(Protocol):
    """Makes the batches of a rank."""

    def build(self, steps: list[Step], rank: int) -> list[ReadyBatch]:
        """Return the batches of consecutive steps. May block; raises DataError."""


class ReadAhead:
    """Deliveries from the tracker's position to the end of the epoch, read ahead by a thread.

    It works in blocks of half of ``prefetch`` steps (or ``_BLOCK_ROWS`` rows): one is being built and one is ready while the
    consumer uses up another. This is a context manager and an iterator. The thread starts on entry and is joined on exit, with
    a deadline, after which it is left to die with the process. The thread's errors are raised in the consumer, in their turn.
    """

    def __init__(self, builder: Builder, tracker: RowGroupTracker, prefetch: int) -> None:
        self._builder = builder
        self._tracker = tracker
        self._position, self._rank = tracker.position, tracker.rank
        per_step = max(1, tracker.plan.batch(tracker.size) // tracker.size)
        self._block = max(1, min(-(-prefetch // 2), -(-_BLOCK_ROWS // per_step)))
        self._ready: list[ReadyBatch] = []
        self._failure: DataError | None = None
        self._ended = False
        self._stopped = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def abandoned(self) -> bool:
        """Whether the thread was still running after the deadline. Its objects must then not be used again."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> ReadAhead:
        self._thread = threading.Thread(target=self._run, name="spark-elastic-reader", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process != os.getpid():
            return  # a forked child has this object without its thread, and the lock may be held forever
        with self._changed:
            self._stopped = True
            self._ready = []
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_DEADLINE)

    def __iter__(self) -> Iterator[ReadyBatch]:
        while block := self._take():
            yield from block

    def _take(self) -> list[ReadyBatch]:
        """Wait for a block, which is empty at the end. Raises the thread's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
            if not self._ready and self._failure is not None and not self._stopped:
                raise self._failure
            block, self._ready = self._ready, []
            self._changed.notify_all()
            return block

    def _run(self) -> None:
        failure: DataError | None = None
        try:
            self._produce()
        except DataError as error:
            failure = error
        except BaseException as error:  # a transform may raise SystemExit, or a Rust library panic
            failure = DataError(f"reading ahead failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with contextlib.suppress(RuntimeError), self._changed:
            self._failure = failure
            self._ended = True
            self._changed.notify_all()

    def _produce(self) -> None:
        position = self._position
        block = 1  # the first batch must not wait for a whole block
        while steps := self._tracker.upcoming(position, block):
            batches = self._builder.build(steps, self._rank)
            position += sum(step.rows for step in steps)
            block = min(2 * block, self._block)
            with self._changed:
                self._changed.wait_for(lambda: not self._ready or self._stopped)
                if self._stopped:
                    return
                self._ready = batches
                self._changed.notify_all()
