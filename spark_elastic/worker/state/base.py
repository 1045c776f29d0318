"""State: what has to survive the loss of workers, as users subclass it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from spark_elastic.protocol.fault_points import Point
from spark_elastic.worker import faults
from spark_elastic.worker.checks.fingerprint import Named
from spark_elastic.worker.job import Job, current_job, present_world
from spark_elastic.worker.state.commits import Commits
from spark_elastic.worker.state.repair import plan_repair
from spark_elastic.worker.world import World

if TYPE_CHECKING:
    from spark_elastic.checkpoint.skeleton import Lender
    from spark_elastic.worker.checks.training_code import TrainingChecks

ResetCallback = Callable[[int, int], None]


class State(ABC):
    """What ``@elastic`` needs of a state. Subclasses say how to save, restore and sync it; call ``super().__init__()``.

    Commits are named by (generation, index). A commit is made on each rank alone and confirmed by all ranks one commit
    later, so ranks are never more than one commit apart; what one of them lacks after a loss is repaired by ``sync``.
    """

    # Finds mistakes of the training function, where the state knows what to look at.
    _checks: TrainingChecks | None = None

    def __init__(self) -> None:
        self._commits = Commits(None)
        self._reset_callbacks: list[ResetCallback] = []

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the present values, in this process. The copy before it must stay intact until it is whole.

        On a GPU, wait for it: when this returns, it counts.
        """

    @abstractmethod
    def restore(self) -> None:
        """Set the values back to those of the last ``save``."""

    @abstractmethod
    def sync(self) -> None:
        """Make all ranks equal to rank ``self.donor``, which holds the newest commit. A collective: all ranks call it."""

    def on_reset(self) -> None:
        """Called on every rank after a reset, between ``sync`` and the reset callbacks. Does nothing by itself."""

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
        """Save, then see whether the world changes.

        Costs a copy of the state and one small collective that is waited for only at the next commit; all ranks have to
        commit equally often. On a GPU the copy of an ``ObjectState``, too, is waited for only then: one that is under way when
        a worker is lost comes to nothing, and the commit before it holds. ``durable`` has this commit written to the job's
        ``checkpoint``, in the background, without regard to ``checkpoint_interval``; where an older one is just being
        written, the first commit after that.

        Raises ``WorkerLostError`` when a rank is gone (this step is then not saved if a reduction may have failed in it) and
        ``HostsUpdatedInterrupt``, on all ranks at the same commit, when workers come or leave.
        """
        self._commits.commit(self, durable)

    def check_host_updates(self) -> None:
        """See whether the world changes, without saving unless it does. All ranks have to call it equally often.

        Raises like ``commit``.
        """
        self._commits.check_host_updates(self)

    def register_reset_callbacks(self, callbacks: Iterable[ResetCallback]) -> None:
        """Have ``callback(old_size, new_size)`` called on every rank, newcomers included, after each reset's sync.

        ``old_size`` is the size of the world that made the commit from which training goes on; in a job that goes on from
        a durable checkpoint, of the world that wrote it. Not called where a job begins from nothing.
        """
        given = list(callbacks)
        for callback in given:
            if not callable(callback):
                raise TypeError(f"callbacks must be callable, not {callback!r}")
        self._reset_callbacks.extend(given)

    def heartbeat(self) -> None:
        """Say that this worker makes progress in long code between collectives; restarts ``hang_timeout``. Costs nothing.

        docs/howto/training.md says how long such code may take without it ("Time limits").
        """
        job = current_job()
        if job is not None:
            job.control.beat()

    def report(self, **metrics: object) -> None:
        """Send metrics (numbers, one-element tensors, strings) to the job's event log and progress line; never blocks.

        Call it as often as you like: a few reports a second are sent, the newest value of each name.
        """
        job = current_job()
        if job is not None:
            job.reporter.metrics(self._commits.steps, metrics)

    # ------------------------------------------------------------------ for @elastic

    def _prepare(self) -> None:
        """Do what can be done before this worker is ready, as long as nobody waits for it."""

    def _begin(self, job: Job | None) -> None:
        """Take part in a new generation: sync, callbacks, data, and the implicit commit that seals it."""
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
            self.on_reset()
            for callback in self._reset_callbacks:
                callback(previous_size, world.size)
        self._enter_world(world.rank, world.size)
        self._commits.seal(self, job, world)

    def _begins_here(self) -> bool:
        """Begin, and say so, where nothing else does: in a fixed world the first ``sync`` or ``restore`` is the beginning."""
        job = current_job()
        if job is None or not job.is_fixed or job.state is self:
            return False
        self._begin(job)
        return True

    def _leave(self, world: World) -> None:
        """The user's function has returned, and the vote comes next."""
        self._commits.leave(self, world)

    # ------------------------------------------------------------------ what subclasses of ours add

    def _lend(self) -> Lender:
        """Return what a durable checkpoint of the last commit is made from."""
        raise NotImplementedError

    def _enter_world(self, rank: int, size: int) -> None:
        """Take this rank's share of the data."""

    def _check_models(self, job: Job) -> None:
        """Refuse models whose weights nobody would keep equal."""

    def _compared(self) -> Named:
        """What has to be equal on all ranks at a commit, named."""
        return ()

    def _loader_in_use(self) -> object:
        """The loader that the user's function goes through, if there is one; what it can do, its Protocols tell."""
        return None
