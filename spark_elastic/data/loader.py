"""The interface between a training state and a loader, and the rules of iteration that all loaders here share."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeGuard, TypeVar, runtime_checkable

from spark_elastic._integers import whole_number
from spark_elastic.data.balance import LEAST, Balancer, Timing, even
from spark_elastic.data.deliveries import deliveries
from spark_elastic.data.iteration import Current
from spark_elastic.data.kernels import difference, kernels_here, pin_compiler, pin_threads
from spark_elastic.data.order import as_described, describe
from spark_elastic.data.plan import Step
from spark_elastic.data.randomness import seed_all
from spark_elastic.data.shards import Cut
from spark_elastic.data.stopwatch import Stopwatch
from spark_elastic.data.tracker import Report, RowGroupTracker
from spark_elastic.errors import DataError, TrainingCodeError

T = TypeVar("T")
Part = TypeVar("Part")

_VERSION = 1
_NOT_STRICT = "give the loader, or all loaders of the mix, shards_strict=False"
_SAME_ROWS = (
    "All workers, and later runs, have to make it with the same rows in the same order: give random splits a seed, and train "
    "with rows that arrive later in a run with a checkpoint of its own"
)
_OTHER_ROWS = (
    f"the dataset has other rows than where this position was saved (another worker, or an earlier run). {_SAME_ROWS}"
)
# Loaders that are being iterated outside a State, usually for validation. A loader that is iterated while an optimizer steps
# feeds the training, and belongs in the State.
iterated_alone: weakref.WeakSet[PositionedLoader[Any]] = weakref.WeakSet()


class TakesWorld(Protocol):
    """Takes its share of the data. A state informs all such objects in it of a new world, wherever in the state they are."""

    def set_world(self, rank: int, size: int) -> None:
        """Take a rank in a new world, after the position was restored or synced. Ends the current iteration."""
        ...


class StartsOver(Protocol):
    """Forgets what was looked at above the elastic function, which was not trained."""

    def start_over(self) -> None:
        """Go to where training is to begin. A state calls this once, before it looks at the position."""
        ...


class RowSource(Protocol):
    """Knows how many rows of the current global batch each rank has. Wrapped models weight gradients by these numbers."""

    @property
    def batch_rows(self) -> Sequence[int]:
        """The rows of the last batch on each rank."""
        ...


class Accountable(Protocol):
    """Lets all ranks check at commits that together they have received every row once."""

    def report(self) -> Report:
        """Return four int64 values to gather from all ranks at this commit."""
        ...

    def confirm(self, reports: Sequence[Report]) -> None:
        """Check all ranks' reports of one commit, in rank order. Raises DataError if they do not add up."""
        ...


class Balanced(Protocol):
    """Times the ranks' shares of a step, which ranks exchange at commits, and adapts shares to speeds."""

    def measured(self) -> int:
        """Return the microseconds that this rank needs for its share of a full step; 0 until that is known."""
        ...

    def balance(self, everybody: Sequence[int]) -> Timing | None:
        """Take all ranks' measurements of one commit, in rank order. Return them with the shares from the next step on.

        Returns None until all ranks have measured.
        """
        ...


class Countable(Protocol):
    """Reports the loader's progress, for display."""

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        ...

    @property
    def rows_processed(self) -> int:
        """Rows of the current epoch that all ranks together have been given."""
        ...

    @property
    def rows_total(self) -> int:
        """Rows of an epoch on all ranks, after filters."""
        ...


def has_part(value: object, part: type[Part]) -> TypeGuard[Part]:
    """Whether an object has the attributes of one of the Protocols above, also through ``__getattr__``.

    From Python 3.12 on, ``isinstance`` ignores ``__getattr__``, by which a wrapper around a loader forwards its attributes.
    """
    return all(hasattr(value, name) for name in vars(part) if not name.startswith("_"))


def shards_of_loader(loader: object) -> int | None:
    """Return the number of shards into which one of our loaders, or its wrapper, cuts batches; None if it does not."""
    shards = getattr(loader, "shards", None)
    return shards if isinstance(shards, int) and has_part(loader, RowSource) else None


@runtime_checkable
class ElasticLoader(TakesWorld, RowSource, Accountable, Protocol):
    """The interface between a loader and the state that contains it.

    A batch counts as processed once it has been yielded, even if nobody used it; a restore or a reset takes back what was
    yielded after the last commit. A ``state_dict()`` taken at a commit includes every batch yielded so far. Each method takes
    microseconds. A loader of another library may have only some of these methods.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain ints and strings."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position, possibly from a world of another size. Raises DataError if it belongs to another dataset."""
        ...


class PositionedLoader(Generic[T]):
    """Iteration by position. A subclass implements ``_open``.

    In a state (once ``set_world`` has been called), iteration continues after the last delivered batch. Outside a state, each
    ``iter`` starts at row 0, except the first one after ``load_state_dict``.

    tracker: knows the number of rows, their order, and which ones are this rank's. identity: identifies what saved positions
    refer to; "kind", "dataset", "content" and "rows" say which rows, and "order", if given, is ``describe(spec)``. shard: a
    (rank, size) for use outside a state: yield that rank's part of each batch, without repeated batches.

    With shards, a batch consists of this rank's rows, which ``model.parts`` cuts. A subclass that sets ``_delivers_parts``
    instead yields a list with one item for each part, in the order of ``Cut.parts``.
    """

    _delivers_parts = False

    def __init__(
        self,
        tracker: RowGroupTracker,
        identity: Mapping[str, object],
        shard: tuple[int, int] | None,
        shards_strict: bool = True,
    ) -> None:
        self._tracker = tracker
        self._identity = dict(identity)
        # The order of this loader's own epochs. An epoch that was begun with another batch size keeps its original order.
        self._own_spec = tracker.spec
        self._shard = shard
        self.shards_strict, self._has_warned = shards_strict, False
        # The kernels of this process when it entered the elastic function.
        self._kernels: dict[str, str] = {}
        self._in_state = False
        # The length that ``len`` returned before there was a world.
        self._told_length: int | None = None
        self._restored = False
        # The epoch at which the training function was entered, until training moves to a later one.
        self._entered_at = 0
        self._empty_iterations = 0
        # Whether the epoch was at its end when the training function was entered: a re-entry may then iterate it once in vain.
        self._entered_at_end = False
        self._stopwatch, self._balancer = Stopwatch(), Balancer()
        self._iteration: Current[T] = Current()
        if shard is not None:
            if tracker.plan.shards is not None:
                raise ValueError(f"give shards={tracker.plan.shards} or shard={shard}, not both")
            if not isinstance(shard, (tuple, list)) or len(shard) != 2:
                raise ValueError(f"shard must be a pair (rank, size), not {shard!r}")
            tracker.set_world(
                whole_number("the rank of shard", shard[0], 0), whole_number("the size of shard", shard[1], 1)
            )
        if tracker.plan.shards is not None:
            self._identity["shards"] = tracker.plan.shards
            pin_threads(3 + type(self).__mro__.index(PositionedLoader))  # subclasses have constructors of their own
            pin_compiler()
        self.batch_rows: tuple[int, ...] = (0,) * tracker.size

    def _open(self) -> contextlib.AbstractContextManager[Iterator[tuple[Step, int, T]]]:
        """Return a context manager over (step, ticket sum, batch), from the tracker's position to the end of the epoch.

        The steps are those of ``tracker.upcoming``, in order. A row's ticket is its place in the epoch's order: from the sums
        of the tickets in their batches, all ranks see at a commit that every row was delivered once. Batches are passed to the
        user unchanged.
        """
        raise NotImplementedError

    @property
    def tracker(self) -> RowGroupTracker:
        """Tracks which rows have been processed, and which rank reads the rest."""
        return self._tracker

    @property
    def shards(self) -> int | None:
        """The number of shards into which every global batch is cut, in a State; None if ranks get shares of its rows."""
        return self._tracker.plan.shards

    @property
    def place(self) -> tuple[int, int, int]:
        """The loader's position in a world of any size: seed, epoch, and row of the epoch."""
        return self._own_spec.seed, self.epoch, self._tracker.position

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._tracker.epoch

    @property
    def rows_total(self) -> int:
        """Rows of an epoch on all ranks, after filters."""
        return self._tracker.total

    @property
    def rows_processed(self) -> int:
        """Rows of the current epoch that all ranks together have been given."""
        return self._tracker.position

    @property
    def steps_left(self) -> int:
        """Global steps that remain of the epoch, in the current world."""
        return self._tracker.plan.steps(self._tracker.left, self._tracker.size)

    def __bool__(self) -> bool:
        """Return True, because ``if loader`` asks whether there is a loader, and not how long it is."""
        return True

    def __len__(self) -> int:
        """Return the global steps of a full epoch; with a batch size per worker, those of the current world.

        Outside a state, that is a world of one. The state warns if the world turns out to have another size.
        """
        steps = self._tracker.plan.steps(self._tracker.total, self._tracker.size)
        if not self._in_state and self._shard is None:
            self._told_length = steps
        return steps

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch at row 0. For the current epoch this does nothing, whatever the position.

        In the middle of an iteration it ends that: asking the iteration for another batch is a DataError. Leave the loop first.
        Warns on rank 0 if this goes back from the epoch at which the training function was entered.
        """
        epoch = whole_number("epoch", epoch, 0)
        if epoch < self._entered_at and self._tracker.rank == 0:
            warnings.warn(
                f"set_epoch({epoch}) goes back from epoch {self._entered_at}, which the State had reached when the elastic "
                "function was entered, after a loss or from a checkpoint: epochs are trained again. Count them in the State: "
                "write while state.epoch < epochs, or for epoch in range(state.loader.epoch, epochs)",
                stacklevel=2,
            )
        if epoch != self._tracker.epoch:
            self._entered_at = 0
            self._iteration.end("" if self._tracker.exhausted else f"set_epoch({epoch}) was called")
            self._tracker.follow(self._own_spec)
            self._tracker.seek(epoch, 0)
            self._empty_iterations = 0
            self._entered_at_end = self._restored = False

    def start_over(self) -> None:
        """Go back to the first row of the epoch, unless the position was loaded; see ``StartsOver``."""
        if not (self._in_state or self._restored):
            self._iteration.end("the elastic function was entered")
            self._tracker.follow(self._own_spec)
            self._tracker.seek(self._tracker.epoch, 0)

    def set_world(self, rank: int, size: int) -> None:
        """Take a rank in a new world and a new entry into the training function; see ``ElasticLoader``."""
        self._iteration.end("the elastic function was entered")
        self._in_state = True
        self._kernels = {} if self.shards is None else kernels_here()
        self._empty_iterations = 0
        self._tracker.set_world(rank, size)
        self._entered_at, self._entered_at_end = self._tracker.epoch, self._tracker.exhausted
        self._stopwatch.clear()
        self._balancer = Balancer()
        self.batch_rows = (0,) * size
        deliveries.forget(self)
        self._check_told_length()

    def _check_told_length(self) -> None:
        told, self._told_length = self._told_length, None
        if told is not None and told != len(self) and self._tracker.rank == 0:
            warnings.warn(
                f"len(loader) was {told} above the elastic function, where there was no world yet, and is {len(self)} with "
                f"{self._tracker.size} workers: with batch_size= the steps of an epoch depend on their number. Ask for it in the "
                "elastic function, or give global_batch_size=",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of the dataset: a few plain values, whatever the size of the dataset."""
        order = {"order": describe(self._tracker.spec)} if "order" in self._identity else {}
        kernels = {} if self.shards is None else {"kernels": self._compared_kernels()}
        where = {"version": _VERSION, "epoch": self.epoch, "position": self._tracker.position}
        return {**where, **self._identity, **order, **kernels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises DataError if it was saved for another dataset, ValueError if this loader has another seed or filter. An epoch
        that was begun with another batch size, other columns or other windows continues in its original order.
        """
        if state.get("version") != _VERSION:
            raise DataError(
                f"the loader's state has version {state.get('version')}, not {_VERSION}: another version of spark_elastic "
                "saved it. Use that one, or start over"
            )
        for key, ours in {"shards": self.shards, **self._identity}.items():
            if state.get(key) == ours:
                continue
            if key in ("content", "sample") and key not in state:
                continue  # an earlier release saved it
            if key == "sample":  # of numbers that machines may round differently
                warnings.warn(_OTHER_ROWS, stacklevel=2)
                continue
            if key == "order" and as_described(self._own_spec, state.get(key)) is not None:
                continue  # the epoch continues in the order in which it was begun
            if key in ("kind", "dataset", "content", "rows"):
                raise DataError(
                    f"the dataset has changed since the state was saved: {key} was {state.get(key)!r}, is {ours!r}. "
                    f"{_SAME_ROWS}"
                )
            raise ValueError(
                f"the loader's state was saved with {key}={state.get(key)!r}, this loader has {key}={ours!r}; give it "
                f"the same {key}"
            )
        self._compare_kernels(state)
        self._iteration.end("the loader went to a saved position")
        begun = as_described(self._own_spec, state.get("order")) if state["position"] else None
        self._tracker.follow(begun or self._own_spec)
        self._tracker.seek(state["epoch"], state["position"])
        self._empty_iterations = 0
        self._restored = True

    def _compare_kernels(self, state: Mapping[str, Any]) -> None:
        """Refuse kernels that differ from those of the saved state, or with ``shards_strict=False`` only warn of them."""
        if self.shards is None or "kernels" not in state:
            return
        found = difference(state["kernels"], kernels_here())
        if found is not None and self.shards_strict:
            raise DataError(
                f"with shards={self.shards} training would not leave the same bits here as where its state was made: {found}. "
                f"Make them equal, or {_NOT_STRICT}"
            )
        self._warn_of_bits(found)

    def _compared_kernels(self) -> dict[str, str]:
        """Describe the kernels here, which are those with which this process has entered the elastic function.

        Newcomers and later runs enter it with those, too, and would be refused if a commit had others.
        """
        here = kernels_here()
        found = difference(self._kernels or here, here)
        if found is not None and self.shards_strict:
            raise TrainingCodeError(
                f"with shards={self.shards} the elastic function has changed what bits depend on, and newcomers enter it without "
                f"that change: {found}. Make the change above the elastic function, or {_NOT_STRICT}"
            )
        self._warn_of_bits(found)
        return here

    def _warn_of_bits(self, found: str | None) -> None:
        if found is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"with shards={self.shards} bits may differ from now on: {found}", stacklevel=2)

    def report(self) -> Report:
        """Return what this rank has received since its last report; see ``Accountable``."""
        return self._tracker.report()

    def confirm(self, reports: Sequence[Report]) -> None:
        """Check that all ranks' reports of one commit add up to the rows assigned; see ``Accountable``."""
        self._tracker.confirm(reports)

    def measured(self) -> int:
        """Return how long this rank needs for a full step; see ``Balanced``."""
        if not self._in_state:
            return 0
        alone = self._tracker.size == 1  # a world of one waits for nobody
        return self._stopwatch.period() if alone else self._stopwatch.microseconds()

    def balance(self, everybody: Sequence[int]) -> Timing | None:
        """Change the shares from the next step on if that makes steps faster; see ``Balanced``."""
        if not (self._in_state and all(everybody)):
            return None
        tracker = self._tracker
        plan = tracker.plan
        before = after = tracker.shares or even(plan.shards or plan.batch(tracker.size), tracker.size)
        if plan.balance is not None:
            after = self._balancer.decide(before, everybody, least=LEAST if plan.shards is None else 1)
        period, fixed = self._stopwatch.period(), self._stopwatch.fixed()
        self._stopwatch.clear()
        if after != before:
            tracker.divide(after)
        unit = "rows" if plan.shards is None else "shards"
        return Timing(before, after, tuple(everybody), unit, period, plan.batch(tracker.size), fixed)

    def __iter__(self) -> Iterator[T]:
        self._iteration.end("another iteration over this loader was begun")
        if not self._in_state:
            if not self._restored:
                self._tracker.follow(self._own_spec)
                self._tracker.seek(self._tracker.epoch, 0)
            self._restored = False
        elif self._tracker.exhausted and self._tracker.total:
            self._empty_iterations += 1
            ended = f"epoch {self.epoch} has been iterated to its end already"
            if self._empty_iterations > 1:
                raise DataError(f"{ended}; was set_epoch({self.epoch + 1}) forgotten?")
            if self._tracker.position and not self._entered_at_end and self._tracker.rank == 0:
                warnings.warn(
                    f"{ended}, so there are no batches now. A loader in a State needs set_epoch({self.epoch + 1}) first; one "
                    "that validates does not belong in the State",
                    stacklevel=2,
                )
        if self._tracker.exhausted and self._tracker.total and not self._tracker.position:
            self._explain_no_batch()
        return self._iteration.begin(self._iterate())

    def _explain_no_batch(self) -> None:
        """Refuse a batch that no world could fill, and warn of one that this world cannot fill: nothing would train."""
        tracker, plan = self._tracker, self._tracker.plan
        name = "batch_size" if plan.overall is None else "global_batch_size"
        text = f"with drop_last=True, {tracker.total} rows do not make a single batch of {name}={plan.smallest}"
        if plan.smallest > tracker.total:
            raise ValueError(f"{text}: nothing would train. Make it smaller, or leave drop_last out")
        if tracker.rank == 0:
            text += f" a worker with {tracker.size} workers: epoch {self.epoch} trains nothing"
            warnings.warn(f"{text}. global_batch_size= does not grow with the number of workers", stacklevel=3)

    def close(self) -> None:
        """End the current iteration, stop reading ahead and close files. A new iteration opens them again."""
        self._iteration.end()

    def _iterate(self) -> Generator[T, None, None]:
        tracker = self._tracker
        if tracker.exhausted:
            return
        expected = tracker.plan.steps(tracker.left, tracker.size)
        if not self._in_state:
            iterated_alone.add(self)
        try:
            shares = None
            # Shares may change at a commit; then some rows that were read ahead belong to other ranks.
            while shares != tracker.shares and not tracker.exhausted:
                shares = tracker.shares
                with self._open() as opened:
                    for step, ticket_sum, batch in opened:
                        expected -= 1
                        tracker.delivered(step, ticket_sum)
                        self.batch_rows = step.rank_rows
                        cut = self._cut(step)
                        if cut is not None and deliveries.may_seed():  # whatever this rank has drawn by itself
                            seed_all((*cut.place, 0))
                        if self._in_state and (tracker.size > 1 or cut is not None or deliveries.are_cut()):
                            deliveries.note(self, batch, step.rank_rows, tracker.rank, cut)
                        if self._in_state and step.rows != tracker.plan.batch(tracker.size):
                            self._stopwatch.drop()
                        if self._shard is None or self._in_state or step.rank_rows[tracker.rank]:
                            yield batch
                        if shares != tracker.shares:
                            break
                        if self._in_state:
                            self._stopwatch.start()
        finally:
            self._stopwatch.drop()
            iterated_alone.discard(self)
            deliveries.end(self)
        if expected or not tracker.exhausted:
            raise DataError(
                f"epoch {self.epoch} ended {expected} steps early, at row {tracker.position} of {tracker.total}"
            )

    def _cut(self, step: Step) -> Cut | None:
        """How a step's batch is cut into shards. Outside a State, batches are not cut."""
        if self.shards is None or not self._in_state:
            return None
        place = (self._own_spec.seed, self.epoch, step.start)
        return Cut(self.shards, step.rows, place, self._delivers_parts, self._tracker.shares)
