"""State: the values that have to survive the loss of workers. Users may subclass it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from spark_elastic._callables import takes
from spark_elastic._text import brief
from spark_elastic.protocol.fault_points import Point
from spark_elastic.worker import faults
from spark_elastic.worker.checks.fingerprint import Named
from spark_elastic.worker.job import Job, current_job, present_world
from spark_elastic.worker.reporting import check_metrics
from spark_elastic.worker.state.commits import Commits
from spark_elastic.worker.state.repair import plan_repair
from spark_elastic.worker.world import World

if TYPE_CHECKING:
    from spark_elastic.checkpoint.skeleton import Lender
    from spark_elastic.worker.checks.training_code import TrainingChecks

ResetCallback = Callable[[int, int], None]
T = TypeVar("T")


class State(ABC):
    """What ``@elastic`` requires of a state. Subclasses define how it is saved, restored and synced.

    A subclass with an ``__init__`` of its own calls ``super().__init__()``. Commits are named by (generation, index). Each rank
    makes a commit alone, after a reduction of the step over all ranks; without such a reduction, all ranks confirm the commit
    one commit later. A rank that lacks the newest commit after a loss receives it in ``sync``.

    ``ObjectState`` and its subclasses divide the rows of their loader among ranks and continue after a commit; elsewhere every
    rank gets all rows. Mistakes in training are found by ``TorchState`` and its subclasses only.
    """

    # The checks of the training function; None if this kind of state has none.
    _checks: TrainingChecks | None = None
    # Whether such checks are made in a job.
    _looks_at_training = False

    def __init__(self) -> None:
        """Begin without a commit and without reset callbacks. Reads nothing, does not block, and raises nothing."""
        self._commits = Commits(None)
        self._reset_callbacks: list[ResetCallback] = []

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def save(self) -> None:
        """Copy the present values within this process. The previous copy must stay intact until the new one is complete.

        On a GPU, wait for the copy: it counts as soon as this method returns.
        """

    @abstractmethod
    def restore(self) -> None:
        """Reset the values to those of the last ``save``."""

    @abstractmethod
    def sync(self) -> None:
        """Make all ranks equal to rank ``self.donor``, which holds the newest commit. This is a collective."""

    def on_reset(self) -> None:
        """React to a reset, on every rank, between ``sync`` and the reset callbacks. This default does nothing."""

    # ------------------------------------------------------------------ for users

    @property
    def donor(self) -> int:
        """A rank that holds the newest commit; 0 in the first generation and outside a job."""
        world = present_world()
        if world is None:
            return 0
        commits = [member.commit for member in world.members]
        newest = plan_repair(commits).newest
        return 0 if newest is None else commits.index(newest)

    def commit(self, durable: bool = False) -> None:
        """Save the state, then check whether the world is about to change.

        A commit costs a copy of the state and one small collective that is waited for only at the next commit. If gradients are
        reduced in each step, commits in quick succession share one collective. All ranks have to commit equally often. On a
        GPU, the copy of an ``ObjectState`` is also waited for only at the next commit: if a worker is lost during a copy, the
        copy is discarded, and the previous commit holds.

        With ``durable``, this commit is written to the job's ``checkpoint`` in the background, whatever ``checkpoint_interval``
        says. If an older commit is still being written, the first commit after that is written instead. If all ranks write
        together (``commit="sharded"``, a divided ``ZeroRedundancyOptimizer``), one of the next eight commits is written.

        Raises ``WorkerLostError`` when a rank is lost (this step is not saved if one of its reductions may have failed), and
        ``HostsUpdatedInterrupt``, on all ranks at the same commit, when workers arrive or leave.
        """
        self._commits.commit(self, durable)

    def check_host_updates(self) -> None:
        """Check whether the world is about to change, and save only if it is. All ranks have to call it equally often.

        Raises the same errors as ``commit``.
        """
        self._commits.check_host_updates(self)

    def register_reset_callbacks(self, callbacks: Iterable[ResetCallback]) -> None:
        """Call ``callback(old_size, new_size)`` on every rank, including newcomers, after the sync of each reset.

        ``old_size`` is the size of the world that made the commit from which training continues; in a job that resumes from a
        durable checkpoint, it is the size of the world that wrote it. Callbacks are not called when a job starts from scratch.
        """
        if callable(callbacks):
            raise TypeError(
                f"callbacks must be a list of functions, not one: write [{getattr(callbacks, '__name__', 'callback')}]"
            )
        given = list(callbacks)
        for callback in given:
            if not callable(callback):
                raise TypeError(f"callbacks must be callable, not {callback!r}")
            if not takes(callback, 2):
                raise TypeError(
                    f"callbacks are called as callback(old_size, new_size), which {brief(callback)} does not take"
                )
        self._reset_callbacks.extend(given)

    def heartbeat(self) -> None:
        """Report progress from code that runs for a long time without collectives. Restarts ``hang_timeout``. Costs nothing.

        docs/howto/training.md says how long such code may run without a heartbeat ("Time limits").
        """
        job = current_job()
        if job is not None:
            job.control.beat()

    def report(self, /, **metrics: object) -> None:
        """Send metrics (numbers, one-element tensors, strings) to the job's event log and progress line. Never blocks.

        The number of commits is sent along as ``step``. A metric of that name is left out, with a warning.

        Call it as often as you like: at most a few reports a second are sent, each with the newest value of every name.

        With ``run(checkpoint_best=)``, rank 0's value of that metric belongs to the last commit if no optimizer has stepped
        since, else to the next one; with an ``ObjectState``, which watches no optimizers, always to the last one. If the value
        is the best so far while an older commit is being written, rank 0 waits for that write. If rank 0 is lost before it has
        written the best commit, the next rank 0 writes it, provided that it has reported the value, too. Report before the
        commit that ends the epoch: that commit may interrupt, and the code after it is then not run.

        Raises ``TypeError`` for other values, such as complex numbers, times, and whole numbers too large for a float.
        """
        job, world = current_job(), present_world()
        if metrics.pop("step", None) is not None and (world is None or world.rank == 0):
            warnings.warn(
                "report(step=…) is left out: the number of commits is reported as step; give yours another name",
                stacklevel=2,
            )
        if job is None:
            check_metrics(metrics)
        else:
            job.reporter.metrics(self._commits.steps, metrics)
            self._commits.reported(metrics)

    # ------------------------------------------------------------------ for @elastic
    # The attributes of a State are the user's, so the names of ours begin with an underscore. The methods from here on are an
    # interface nevertheless: ``@elastic``, Commits, the checks, shards and frameworks of this package call them.

    def _enter(self, function: Callable[[], T]) -> T:
        """Run the user's function."""
        self._commits.is_entered = True
        try:
            return function()
        finally:
            self._commits.is_entered = False

    def _prepare(self) -> None:
        """Do work in advance that would delay the first commits, while no other worker waits for this one."""

    def _begin(self, job: Job | None) -> None:
        """Enter a new generation: sync, run the callbacks, take this rank's share of the data, and make the sealing commit."""
        if job is None or job.world is None:
            self.sync()
            self._enter_world(0, 1)
            return
        world = job.world
        self._commits.enter(self, job, world)
        if not job.is_fixed:
            self._check_models(job)
        self.sync()
        job.attach_models()
        faults.reached(Point.SYNCED, rank=world.rank, generation=world.generation)
        previous_size = self._commits.restored_size if world.newest_commit is None else world.previous_size
        if previous_size:
            self._tell_of_reset(previous_size, world.size)
        self._enter_world(world.rank, world.size)
        self._commits.seal(self, job, world)

    def _tell_of_reset(self, previous_size: int, size: int) -> None:
        self.on_reset()
        for callback in self._reset_callbacks:
            callback(previous_size, size)

    def _begin_if_fixed(self) -> bool:
        """Begin the job if this is its first ``sync`` or ``restore`` in a fixed world. Return whether it was."""
        job = current_job()
        if job is None or not job.is_fixed or job.state is self:
            return False
        self._begin(job)
        return True

    def _leave(self, world: World) -> None:
        """Finish the generation after the user's function has returned, before the vote."""
        self._commits.leave(self, world)

    # ------------------------------------------------------------------ what ObjectState and TorchState add

    def _lend(self) -> Lender:
        """Return the lender from which a durable checkpoint of the last commit is written."""
        raise NotImplementedError

    def _optimizer_steps(self) -> int | None:
        """How often optimizers have stepped in this generation; None for a state that does not watch them."""
        return None if self._checks is None else self._checks.steps

    def _shared_values(self) -> dict[str, object]:
        """The objects that all ranks share, by name."""
        return {}

    def _enter_world(self, rank: int, size: int) -> None:
        """Take this rank's share of the data."""

    def _checked_outside(self) -> AbstractContextManager[None]:
        """While the elastic function runs outside a job, refuse what a job would refuse."""
        return nullcontext()

    def _check_models(self, job: Job) -> None:
        """Refuse wrapped models that are not in the state, whose weights would not be kept equal."""

    def _compared(self) -> Named:
        """The tensors that have to be equal on all ranks at a commit, by name."""
        return ()

    def _compared_values(self) -> dict[str, object]:
        """The attributes whose plain values are meant to be equal on all ranks."""
        return {}

    def _loader_in_use(self) -> object:
        """The loader that the user's function iterates over, if any; the Protocols of ``data.loader`` describe what it can do."""
        return None
