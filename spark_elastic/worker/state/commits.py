"""Commits: how a commit is made, numbered, held, and compared with those of the other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from spark_elastic.data.deliveries import deliveries
from spark_elastic.data.loader import Accountable, Balanced, Countable, PositionedLoader, has_part
from spark_elastic.data.tracker import Report
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
from spark_elastic.worker.checks.fingerprint import Comparison
from spark_elastic.worker.checks.plain_values import PlainValues
from spark_elastic.worker.checks.same_inputs import same_inputs
from spark_elastic.worker.checks.unsupported import check_shards, warn_of_training
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.job import Job, current_job, present_world
from spark_elastic.worker.shards.loops import loops
from spark_elastic.worker.state.durable import Durable
from spark_elastic.worker.state.entered import ONE_STATE, check_is_entered
from spark_elastic.worker.state.exchanged import Exchanged
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
        self._is_recording = False
        self._is_settled = True
        # Whether the last control collective has said that the world changes. It stays so if user code swallows the interrupt.
        self._is_interrupted = False
        # Whether the commit that begins the generation has been made.
        self._is_sealed = False
        self._comparison: Comparison | None = None
        self._plain = PlainValues()
        self._pace: Pace | None = None
        self._durable = Durable(self)
        self._known_loader: tuple[object, Accountable | None, Balanced | None] = (None, None, None)
        self._trained = TrainedRows()

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
        self._check_is_sealed("commit()")
        where = {"rank": world.rank, "step": self.steps + 1, "generation": world.generation}
        faults.reached(Point.COMMIT, **where)
        if world.is_broken() and not self._has_stepped():
            raise WorkerLostError(f"generation {world.generation} is broken")
        self._interrupt_again()
        _check_step(state)  # code that swallowed the loss of a worker has not made this step
        has_met = self._has_met(world)
        self.record(state.save, has_met)
        faults.reached(Point.RECORDED, **where)
        self._count_rows(state)
        job.reporter.committed(self.steps, self._progress_of(state, world))
        if job.checkpoints is not None:
            self._durable.committed(state, job.checkpoints, world, durable)
        if self._exchange(state, job, world, has_met):
            self._interrupt()
        faults.reached(Point.COMMITTED, **where)
        deliveries.committed()
        for model in job.models:
            model.forget_rows()

    def last_of(self, world: World) -> CommitId:
        """The name of the last commit."""
        return CommitId(world.generation, self.index)

    def reported(self, state: State, metrics: Mapping[str, object]) -> None:
        """Look among the user's reported metrics for the one by which checkpoints are kept."""
        job, world = current_job(), present_world()
        if job is not None and world is not None and job.state is state:
            self._durable.reported(state, job, world, metrics)

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

    def _interrupt_again(self) -> None:
        """Raise an interrupt again that user code has swallowed. Whatever that code has done since belongs to no commit."""
        if self._is_interrupted and not self._has_stepped():
            raise HostsUpdatedInterrupt

    def _check_is_sealed(self, what: str) -> None:
        """Refuse a commit ahead of the one that seals the generation."""
        if not self._is_sealed:
            raise TrainingCodeError(
                f"{what} was called in on_reset or in a reset callback: leave it out there. Newcomers have no commit yet, and "
                "the state is committed when all callbacks have returned"
            )

    def _has_met(self, world: World) -> bool:
        """Whether a reduction over all ranks has preceded this commit. Waits for its end, which the step usually has done."""
        try:
            return world.has_met()
        except WorkerLostError:
            if not self._has_stepped():
                raise
            return True  # the optimizer has stepped, so the reductions of this step had succeeded

    def _exchange(self, state: State, job: Job, world: World, has_met: bool, is_commit: bool = True) -> bool:
        """Read the pending control collective, and start this commit's if it is due. Return whether the world changes."""
        assert self._comparison is not None
        assert self._pace is not None
        self._read(state, world)
        self._pace.count()
        if self._is_interrupted:
            return True
        commit = self.last_of(world)
        compares = is_commit and self._comparison.wants(commit)
        if not has_met or self._pace.is_due() or compares:
            loader, balancing = self._parts_of_loader(state)
            digest, asks_for_digest = self._comparison.report(commit, state._compared, is_commit)
            mine = Exchanged(
                is_interrupted=job.control.is_interrupted,
                commit=self.index,
                digest=digest,
                asks_for_digest=asks_for_digest,
                inputs=same_inputs.report(),
                next_after=self._pace.begin(getattr(loader, "steps_left", 0)),
                # A host that runs ahead of its device cannot measure the device's step time.
                measured=0 if balancing is None or world.group.runs_ahead else balancing.measured(),
                writes_part=self._durable.ask_for_parts(job, world),
                plain_values=self._plain.report(self.index, state._compared_values()) if compares else 0,
                loader=Report() if loader is None else loader.report(),
            )
            world.start_exchange(mine.packed())
        return False

    def _read(self, state: State, world: World) -> None:
        """Wait for the pending control collective, if there is one, and evaluate what all ranks have told in it."""
        rows = world.finish_exchange()
        if rows is None:
            return
        everybody = [Exchanged.unpacked(row) for row in rows]
        indexes = [each.commit for each in everybody]
        if len(set(indexes)) > 1:
            raise TrainingCodeError(
                f"ranks have committed {indexes} times in generation {world.generation}; all have to call commit() and "
                "check_host_updates() equally often"
            )
        loader, balancing = self._parts_of_loader(state)
        if loader is not None:
            loader.confirm([each.loader for each in everybody])
        if balancing is not None:
            self._balance(balancing, [each.measured for each in everybody], world)
        self._is_interrupted = any(each.is_interrupted for each in everybody)
        if everybody[0].writes_part:
            self._durable.was_asked()
        assert self._comparison is not None
        assert self._pace is not None
        self._pace.agree(everybody[0].next_after)
        self._comparison.read([each.digest for each in everybody], asked=bool(everybody[0].asks_for_digest))
        self._plain.read([each.plain_values for each in everybody])
        if state._checks is not None:
            state._checks.inputs_compared([each.inputs for each in everybody])

    def _balance(self, loader: Balanced, measured: list[int], world: World) -> None:
        timing, job = loader.balance(measured), current_job()
        if timing is None or job is None or world.rank != 0:
            return
        if timing.after != timing.before:
            job.reporter.balanced(self.steps, timing)
        job.control.steps_timed(timing.before, timing.microseconds, timing.period, timing.rows)

    def _parts_of_loader(self, state: State) -> tuple[Accountable | None, Balanced | None]:
        """The state's loader, if it reports rows, and again, if its steps can be timed. Cached, because the check is slow."""
        loader = state._loader_in_use()
        if loader is not self._known_loader[0]:
            accountable = loader if has_part(loader, Accountable) else None
            balanced = loader if has_part(loader, Balanced) else None
            self._known_loader = loader, accountable, balanced
        return self._known_loader[1:]

    # ------------------------------------------------------------------ between commits

    def check_host_updates(self, state: State) -> None:
        """Check whether the world changes, and make a commit if it does, as ``State.check_host_updates`` says."""
        loops.refuse("check_host_updates() came")
        job, world = current_job(), present_world()
        if job is None or world is None:
            check_is_entered(state)
            return
        _check_is_the_jobs(state, job)
        self._check_is_sealed("check_host_updates()")
        if world.is_broken():
            raise WorkerLostError(f"generation {world.generation} is broken")
        self._interrupt_again()
        has_met = world.has_met()
        if self._exchange(state, job, world, has_met, is_commit=False):
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
        self._is_interrupted = self._is_sealed = False
        self._durable.enter()
        if job.models and not state._looks_at_training:
            check_shards(state, state._loader_in_use())
        if job.state is None and world.rank == 0 and not state._looks_at_training:
            warn_of_training(state, trains=bool(job.models), divides_rows=self.keeper is not None)
        job.state = state
        world.ask_before_restoring(self.can_restore)
        if job.checkpoints is not None and self.keeper is None:
            raise CheckpointError(f"checkpoint= needs an ObjectState or a TorchState, not {type(state).__name__}")

    def seal(self, state: State, job: Job, world: World) -> None:
        """Make the implicit commit of index 0, with which the user's function is entered."""
        self._comparison = Comparison(
            world.rank, world.size, lambda key, mine: world.store.gather(key, mine, world.size), job.clock
        )
        self._plain.begin(world)
        self._pace = self.pace(job.clock)
        self.index = -1
        self.steps -= 1  # the sealing commit is not a step that user code has made
        self.record(state.save)
        if self.keeper is not None and self.keeper.is_joint:
            # If a rank is lost before all have sealed the generation, others still have the whole state.
            self.keeper.keep_live()
            world.meet()
            self.keeper.release_live()
        self._is_sealed = True
        if job.checkpoints is not None:
            self._durable.score_again(state, job.checkpoints, world)
        if isinstance(loader := state._loader_in_use(), PositionedLoader):
            self._trained.enter(loader)
        job.reporter.entered(self.steps, self._progress_of(state, world), world.size)

    def leave(self, state: State, world: World) -> None:
        """End a generation whose function has returned: read the last control collective, make the last commit durable.

        This precedes the vote, so that another rank can still do it if this one is lost. Raises ``HostsUpdatedInterrupt`` again
        if the function has swallowed it: it has trained nothing since that commit, and may have left its loop for that reason.
        """
        if self._is_interrupted:
            if world.rank == 0:
                warnings.warn(_SWALLOWED, stacklevel=depth_of_user())
            raise HostsUpdatedInterrupt
        if self.keeper is not None and self._has_stepped():
            raise SparkElasticError(
                f'commit="{self.keeper.name}": the function returned after an optimizer step without a commit(); commit after '
                "each"
            )
        self._read(state, world)
        self.settle()
        job = current_job()
        assert job is not None
        job.reporter.finished(self.steps, self._progress_of(state, world))
        if job.checkpoints is not None:
            self._durable.finish(state, job.checkpoints, world)
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
