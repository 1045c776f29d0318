"""The order in which an epoch visits rows: a pure function of row counts, seed and epoch, never of the world size.

The row groups are permuted; the resulting sequence of N rows is cut into V *lanes* of N/V rows (±1); rows are shuffled
inside consecutive *windows* of a lane. All lanes advance together: *ticket* t is row t // V of lane t % V, and tickets
are consumed in their order. So C, the number of rows consumed, is the whole position of an epoch: lane v has given
(C + V - 1 - v) // V rows. The first windows of the lanes have staggered lengths, so that lanes are refilled one after
the other rather than all at once.

More lanes mix row groups better and let more workers read disjoint ones, but because of each cut between lanes one row group is
read twice. Unshuffled, there is one lane in the order of the files, at the price that each worker reads all of them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import numpy as np

from spark_elastic._integers import whole_number

MAX_LANES = 32
_ROWS_PER_LANE = 64


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """The parameters of an order besides the row counts.

    lanes: V above. window: rows of a lane's window. mix: whether windows are shuffled inside.
    shuffle: whether row groups are permuted. seed: any int from 0.
    """

    seed: int
    shuffle: bool
    lanes: int
    window: int
    mix: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0))
        assert self.lanes >= 1, self.lanes
        assert self.window >= 1, self.window


def describe(spec: OrderSpec) -> str:
    """Describe the lanes and windows of a spec, for a loader's saved position."""
    return f"{spec.lanes} lanes, windows of {spec.window} rows{', mixed' if spec.mix else ''}"


def as_described(spec: OrderSpec, text: object) -> OrderSpec | None:
    """Return the spec with the lanes and windows of a description; None if the text is not a description."""
    found = re.fullmatch(r"([1-9]\d*) lanes, windows of ([1-9]\d*) rows(, mixed)?", str(text))
    if found is None:
        return None
    return replace(spec, lanes=int(found[1]), window=int(found[2]), mix=found[3] is not None)


def choose_spec(
    *,
    groups: int,
    batch: int,
    seed: int,
    shuffle: bool,
    shuffle_rows: int | None,
    row_bytes: float,
    budget: int = 2**28,
) -> OrderSpec:
    """Choose lanes and windows for a dataset; nothing here may depend on the world.

    groups: the number of row groups with rows. batch: the rows of the smallest global batch. shuffle_rows: the rows of the
    windows of all lanes together; None for 65,536, or fewer if those would take more than ``budget`` bytes at ``row_bytes`` per
    row.
    """
    if shuffle_rows is not None:
        shuffle_rows = whole_number("shuffle_rows", shuffle_rows, 0)
    mix = shuffle and shuffle_rows not in (0, 1)
    affordable = max(1, int(min(65_536, budget / max(row_bytes, 1.0))))
    rows = shuffle_rows if mix and shuffle_rows is not None else affordable
    if not shuffle:
        return OrderSpec(seed, False, 1, min(rows, 8192), False)
    lanes = max(1, min(groups, batch, rows // _ROWS_PER_LANE, MAX_LANES, max(8, groups // 8)))
    # Row groups tend to have the same size. If the number of lanes divides the number of row groups, few of them are cut and
    # read twice.
    even = [count for count in range(lanes, min(lanes + lanes // 2, MAX_LANES, batch) + 1) if groups % count == 0]
    lanes = even[0] if even and even[0] <= rows // _ROWS_PER_LANE else lanes
    return OrderSpec(seed, True, lanes, max(1, rows // lanes), mix)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of row group ``group`` (its index in the manifest), in the order of the file."""

    group: int
    start: int
    stop: int


class EpochOrder:
    """The order of one epoch over row groups with ``rows`` rows each (int64; empty ones are allowed).

    Immutable. Building it costs a permutation of the row groups; windows are computed on request.
    """

    def __init__(self, rows: np.ndarray, epoch: int, spec: OrderSpec) -> None:
        epoch = whole_number("epoch", epoch, 0)
        self.spec = spec
        self.epoch = epoch
        self.groups = np.flatnonzero(rows)
        if spec.shuffle:
            self.groups = self._random(0).permutation(self.groups)
        counts = rows[self.groups]
        self.ends = np.cumsum(counts, dtype=np.int64)
        self.starts = self.ends - counts
        self.total = int(self.ends[-1]) if len(self.ends) else 0
        lanes = spec.lanes
        self._numbers = np.arange(lanes, dtype=np.int64)
        self.lane_rows = self.given(self.total)
        self.cuts = np.cumsum(self.lane_rows) - self.lane_rows
        self.first_windows = spec.window - self._numbers * spec.window // lanes

    def given(self, consumed: int | np.ndarray) -> np.ndarray:
        """Return how many rows each lane has given once ``consumed`` rows are consumed.

        consumed: an int, giving int64 [lanes], or an int64 column [n, 1], giving [n, lanes].
        """
        lanes = self.spec.lanes
        result: np.ndarray = (consumed + (lanes - 1) - self._numbers) // lanes
        return result

    def window_of(self, lanes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the window that contains each (lane, position in the lane)."""
        result: np.ndarray = (positions - self.first_windows[lanes] + self.spec.window) // self.spec.window
        return result

    def window_bounds(self, lane: int, window: int) -> tuple[int, int]:
        """Return the first position of a window in its lane, and the one after its last."""
        end = int(self.first_windows[lane]) + window * self.spec.window
        start = end - self.spec.window if window else 0
        return start, min(end, int(self.lane_rows[lane]))

    def window_order(self, lane: int, window: int) -> np.ndarray:
        """Return the order in which a window's rows are given: int64 offsets from its first row in the sequence."""
        start, stop = self.window_bounds(lane, window)
        if self.spec.mix:
            return self._random(1, lane, window).permutation(stop - start)
        return np.arange(stop - start, dtype=np.int64)

    def window_pieces(self, lane: int, window: int) -> list[Piece]:
        """Return the parts of row groups that a window is cut from, in the order of the sequence."""
        start, stop = self.window_bounds(lane, window)
        cut = int(self.cuts[lane])
        return self.pieces(cut + start, cut + stop)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the parts of row groups that make up rows [start, stop) of the sequence."""
        found = []
        index = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            base, end = int(self.starts[index]), min(int(self.ends[index]), stop)
            found.append(Piece(int(self.groups[index]), start - base, end - base))
            start, index = end, index + 1
        return found

    def processed(self, consumed: int, groups: int) -> np.ndarray:
        """Return how many rows of each of the manifest's ``groups`` row groups are among the first ``consumed`` rows."""
        marks = np.zeros(len(self.ends), np.int64)
        given = self.given(consumed)
        for lane in range(self.spec.lanes):
            position = int(given[lane])
            if not position:
                continue
            window = int(self.window_of(np.array([lane]), np.array([position - 1]))[0])
            start, stop = self.window_bounds(lane, window)
            cut = int(self.cuts[lane])
            whole = start if position < stop else stop
            lo = int(np.searchsorted(self.ends, cut, side="right"))
            hi = int(np.searchsorted(self.starts, cut + whole, side="left"))
            if whole:
                overlap = np.minimum(self.ends[lo:hi], cut + whole) - np.maximum(self.starts[lo:hi], cut)
                marks[lo:hi] += overlap
            if position < stop:
                taken = cut + start + self.window_order(lane, window)[: position - start]
                np.add.at(marks, np.searchsorted(self.ends, taken, side="right"), 1)
        result = np.zeros(groups, np.int64)
        result[self.groups] = marks
        return result

    def _random(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence([self.spec.seed, self.epoch, *purpose]))

    @functools.cached_property
    def place(self) -> np.ndarray:
        """The position in the sequence at which each row group of the manifest starts, int64; -1 for empty ones."""
        size = int(self.groups.max()) + 1 if len(self.groups) else 0
        result = np.full(size, -1, np.int64)
        result[self.groups] = self.starts
        return result
