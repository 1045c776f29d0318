"""Commits: how a commit is made, numbered, held, and compared with those of the other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from spark_elastic.data.deliveries import deliveries
from spark_elastic.data.loader import Countable, PositionedLoader, has_part
from spark_elastic.errors import (
    CheckpointError,
    HostsUpdatedInterrupt,
    SparkElasticError,
    TrainingCodeError,
    WorkerLostError,
)
from spark_elastic.protocol.fault_points import Point
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.reports import Progress
from spark_elastic.worker import faults
from spark_elastic.worker.checks.plain_values import PlainValues
from spark_elastic.worker.checks.unsupported import check_shards, warn_of_training
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.job import Job, current_job, present_world
from spark_elastic.worker.shards.loops import loops
from spark_elastic.worker.state.durable import Durable
from spark_elastic.worker.state.entered import ONE_STATE, check_is_entered
from spark_elastic.worker.state.exchange import Exchange
from spark_elastic.worker.state.pace import Pace
from spark_elastic.worker.state.trained_rows import TrainedRows
from spark_elastic.worker.world import World

if TYPE_CHECKING:
    from spark_elastic.worker.state.base import State
    from spark_elastic.worker.state.keepers.keeper import Keeper

# The commits of a generation up to this index are waited for immediately, because they show the driver that the world makes
# progress.
FIRST_COMMIT = 1
_SWALLOWED = (
    "the elastic function returned after it had caught HostsUpdatedInterrupt, as an `except Exception` around commit() does: "
    "what it has done since that commit is discarded, and it is entered again; let that error pass"
)


class Commits:
    """The commits of one state. Used by the user's thread.

    A commit is named by (generation, index). Each rank makes a commit alone, after a reduction of the step over all ranks;
    without such a reduction, all ranks confirm the commit at the next one. So ranks never get far apart. The keeper decides
    what is copied, and where to; a state that copies in its own ``save`` has no keeper.
    """

    # Decides by a clock at which commits of a generation ranks exchange values.
    pace: Callable[[Callable[[], float]], Pace] = Pace

    def __init__(self, keeper: Keeper | None) -> None:
        self.keeper = keeper
        # How many commits of the whole job have led to this state, and the index of the last one in its generation.
        self.steps = 0
        self.index = 0
        # The size of the world that wrote the durable checkpoint from which this job resumed; 0 without one.
        self.restored_size = 0
        # Whether the user's function is running. No sync follows a restore that it requests.
        self.is_entered = False
        # How often this generation has been synced: once as it begins, and again if user code asks for it.
        self.syncs = 0
        self._is_recording = False
        self._is_settled = True
        self._plain = PlainValues()
        self._trained = TrainedRows()
        # What this generation's ranks tell each other; None until the commit that begins the generation has been made.
        self._exchange: Exchange | None = None
        # This generation's durable checkpoints; None in a job without any.
        self._durable: Durable | None = None

    # ------------------------------------------------------------------ a commit, from its beginning to its end

    def commit(self, state: State, durable: bool) -> None:
        """Make a commit, as ``State.commit`` says."""
        loops.refuse("a commit came")
        job, world = current_job(), present_world()
        if job is None or world is None:
            _check_step(state)
            check_is_entered(state)
            self.record(state.save)
            return
        _check_is_the_jobs(state, job)
        exchange = self._exchange_for("commit()")
        where = {"rank": world.rank, "step": self.steps + 1, "generation": world.generation}
        faults.reached(Point.COMMIT, **where)
        if world.is_broken() and not self._has_stepped():
            raise WorkerLostError(f"generation {world.generation} is broken")
        self._interrupt_again(exchange)
        _check_step(state)  # code that swallowed the loss of a worker has not made this step
        has_met = self._has_met(world)
        self.record(state.save, has_met)
        faults.reached(Point.RECORDED, **where)
        self._count_rows(state)
        job.reporter.committed(self.steps, self._progress_of(state, world))
        if self._durable is not None:
            self._durable.committed(durable)
        if exchange.go_on(self.last_of(world), self.steps, has_met):
            self._interrupt()
        faults.reached(Point.COMMITTED, **where)
        deliveries.committed()
        for model in job.models:
            model.forget_rows()

    def last_of(self, world: World) -> CommitId:
        """The name of the last commit."""
        return CommitId(world.generation, self.index)

    def reported(self, metrics: Mapping[str, object]) -> None:
        """Look among the user's reported metrics for the one by which checkpoints are kept."""
        if self._durable is not None and present_world() is not None:
            self._durable.reported(metrics)

    def record(self, save: Callable[[], None], has_met: bool = False) -> None:
        """Make the next commit by calling ``save``. ``has_met``: a reduction over all ranks has preceded it.

        Within a commit that is already being made this only calls ``save``: ``commit`` records the state's own ``save``, which
        calls this method again, as it also does if users call ``save`` themselves.
        """
        if self._is_recording:
            save()
            return
        self.settle()
        if self.keeper is not None and self.keeper.is_joint:
            self._meet(has_met)
        self._is_recording = True
        try:
            save()
        finally:
            self._is_recording = False
        self.index += 1
        self.steps += 1
        self._is_settled = False
        world = present_world()
        copy = None if self.keeper is None else self.keeper.pending
        if world is None or copy is None:
            self.settle()
            return
        world.watch(copy)
        if self.index <= FIRST_COMMIT or (self.keeper is not None and self.keeper.is_waited_for):
            self.settle()

    def _meet(self, has_met: bool) -> None:
        """Wait until all ranks hold the last commit: the next one overwrites the one before it, which a rank may still need.

        A rank that has taken part in a reduction of the step has met all others. The commit that seals a generation overwrites
        none that a rank could still go back to.
        """
        world = present_world()
        if world is not None and not has_met and self.index >= 0:
            world.meet()

    def settle(self) -> None:
        """Wait until the last commit is complete, and tell the driver that this rank holds it.

        Raises ``WorkerLostError`` if it will never be complete; the commit before it then holds.
        """
        if self._is_settled:
            return
        self._is_settled = True
        job, world = current_job(), present_world()
        if self.keeper is not None:
            copy = self.keeper.pending
            if world is not None and copy is not None and not world.wait_for(copy):
                raise WorkerLostError(f"generation {world.generation} was aborted ahead of its last commit's copy")
            self.keeper.settle()
        if job is not None and world is not None:
            job.control.commit = self.last_of(world)
            if self.keeper is not None:
                self.keeper.committed(job.control.commit)

    def _interrupt(self) -> NoReturn:
        if self.keeper is not None:
            self.keeper.keep_live()
        raise HostsUpdatedInterrupt

    def _interrupt_again(self, exchange: Exchange) -> None:
        """Raise an interrupt again that user code has swallowed. Whatever that code has done since belongs to no commit."""
        if exchange.is_interrupted and not self._has_stepped():
            raise HostsUpdatedInterrupt

    def _exchange_for(self, what: str) -> Exchange:
        """Return the generation's exchange. Refuses a commit ahead of the one that seals the generation."""
        if self._exchange is None:
            raise TrainingCodeError(
                f"{what} was called in on_reset or in a reset callback: leave it out there. Newcomers have no commit yet, and "
                "the state is committed when all callbacks have returned"
            )
        return self._exchange

    def _has_met(self, world: World) -> bool:
        """Whether a reduction over all ranks has preceded this commit. Waits for its end, which the step usually has done."""
        try:
            return world.has_met()
        except WorkerLostError:
            if not self._has_stepped():
                raise
            return True  # the optimizer has stepped, so the reductions of this step had succeeded

    # ------------------------------------------------------------------ between commits

    def check_host_updates(self, state: State) -> None:
        """Check whether the world changes, and make a commit if it does, as ``State.check_host_updates`` says."""
        loops.refuse("check_host_updates() came")
        job, world = current_job(), present_world()
        if job is None or world is None:
            check_is_entered(state)
            return
        _check_is_the_jobs(state, job)
        exchange = self._exchange_for("check_host_updates()")
        if world.is_broken():
            raise WorkerLostError(f"generation {world.generation} is broken")
        self._interrupt_again(exchange)
        has_met = world.has_met()
        if exchange.go_on(self.last_of(world), self.steps, has_met, is_commit=False):
            self.record(state.save, has_met)
            self._count_rows(state)
            self._interrupt()

    def _has_stepped(self) -> bool:
        return self.keeper is not None and self.keeper.has_stepped

    def can_restore(self) -> bool:
        """Whether the last commit can still be restored. May be asked from any thread."""
        return self.keeper is None or self.keeper.can_restore

    def go_back(self) -> None:
        """Decide which commit a restore goes back to: the last one if it is complete, else the one before.

        If neither can be restored here, this rank reports that it holds no commit, and a holder of the newest one sends it.
        """
        loops.abandon()
        with suppress(WorkerLostError):
            self.settle()
        if self.keeper is None or self.keeper.can_go_back():
            return
        job = current_job()
        if job is None or self.is_entered:
            raise SparkElasticError(
                f'commit="{self.keeper.name}" keeps no copy to restore once the optimizer has stepped, or other code has changed '
                'weights; use commit="copy"'
            )
        job.control.commit = None

    # ------------------------------------------------------------------ a generation

    def enter(self, state: State, job: Job, world: World) -> None:
        """Begin a generation, whose commits are made by this state."""
        self._exchange, self.syncs = None, 0
        if job.checkpoints is None:
            self._durable = None
        elif self.keeper is None:
            raise CheckpointError(f"checkpoint= needs an ObjectState or a TorchState, not {type(state).__name__}")
        else:
            self._durable = Durable(state, self, job.checkpoints, world, self._durable)
        if job.models and not state._looks_at_training:
            check_shards(state, state._loader_in_use())
        if job.state is None and world.rank == 0 and not state._looks_at_training:
            warn_of_training(state, trains=bool(job.models), divides_rows=self.keeper is not None)
        job.state = state
        world.ask_before_restoring(self.can_restore)

    def seal(self, state: State, job: Job, world: World) -> None:
        """Make the implicit commit of index 0, with which the user's function is entered."""
        self._plain.begin(world)
        exchange = Exchange(state, job, world, self._plain, self._durable, self.pace(job.clock))
        self.index = -1
        self.steps -= 1  # the sealing commit is not a step that user code has made
        self.record(state.save)
        if self.keeper is not None and self.keeper.is_joint:
            # If a rank is lost before all have sealed the generation, others still have the whole state.
            self.keeper.keep_live()
            world.meet()
            self.keeper.release_live()
        self._exchange = exchange
        if self._durable is not None:
            self._durable.score_again()
        if isinstance(loader := state._loader_in_use(), PositionedLoader):
            self._trained.enter(loader)
        job.reporter.entered(self.steps, self._progress_of(state, world), world.size)

    def leave(self, state: State, world: World) -> None:
        """End a generation whose function has returned: read the last control collective, make the last commit durable.

        This precedes the vote, so that another rank can still do it if this one is lost. Raises ``HostsUpdatedInterrupt`` again
        if the function has swallowed it: it has trained nothing since that commit, and may have left its loop for that reason.
        """
        assert self._exchange is not None
        if self._exchange.is_interrupted:
            if world.rank == 0:
                warnings.warn(_SWALLOWED, stacklevel=depth_of_user())
            raise HostsUpdatedInterrupt
        if self.keeper is not None and self._has_stepped():
            raise SparkElasticError(
                f'commit="{self.keeper.name}": the function returned after an optimizer step without a commit(); commit after '
                "each"
            )
        self._exchange.read(self.steps)
        self.settle()
        job = current_job()
        assert job is not None
        job.reporter.finished(self.steps, self._progress_of(state, world))
        if self._durable is not None:
            self._durable.finish()
        if state._checks is not None:
            state._checks.before_return()
            state._checks.end()

    def _count_rows(self, state: State) -> None:
        if isinstance(loader := state._loader_in_use(), PositionedLoader):
            self._trained.commit(loader)

    def _progress_of(self, state: State, world: World) -> Callable[[int], Progress] | None:
        """Return the function that reports the position in the data, on rank 0, which reports for all ranks; None elsewhere."""

        def progress(step: int) -> Progress:
            loader = state._loader_in_use()
            if not has_part(loader, Countable):
                return Progress(step)
            trained = self._trained.total if isinstance(loader, PositionedLoader) else None
            return Progress(step, loader.epoch, loader.rows_processed, loader.rows_total, trained)

        return progress if world.rank == 0 else None


def _check_step(state: State) -> None:
    if state._checks is not None:
        state._checks.before_commit()


def _check_is_the_jobs(state: State, job: Job) -> None:
    if job.state is None and job.is_fixed:
        raise SparkElasticError(
            "call state.sync() before the first commit(): it brings all ranks to the newest checkpoint, or to the values "
            "of rank 0 where there is none"
        )
    if job.state is not state:
        raise SparkElasticError(ONE_STATE)
