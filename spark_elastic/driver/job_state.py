"""JobState: everything that changes in the course of a job, and the steps by which it changes."""

from __future__ import annotations

from collections.abc import Mapping

from spark_elastic.driver import commands as do
from spark_elastic.driver.admission import Admission
from spark_elastic.driver.clock import MachineClock
from spark_elastic.driver.failures import FailureBook
from spark_elastic.driver.generation import Generation
from spark_elastic.driver.history import RecentHistory
from spark_elastic.driver.phases import WorkerPhase, WorldChange
from spark_elastic.driver.roster import Roster
from spark_elastic.driver.setbacks import Setbacks
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.shortage import Shortage
from spark_elastic.driver.situation import Situation
from spark_elastic.driver.sizing import Sizing
from spark_elastic.driver.slowness import TOLD_BELOW, Replacements, Slowness
from spark_elastic.driver.workers import Worker
from spark_elastic.errors import SparkElasticError, TrainingFailedError
from spark_elastic.protocol.messages import CommitId, Member
from spark_elastic.protocol.records import DriverRecord, JobFailed, JobFinished

# How many driver seconds the end of a job waits for the exit codes of the workers whose loss has caused it: the kernel first
# frees the memory of a process.
EXIT_SECONDS = 10.0


class JobState:
    """What the driver knows of its job, and the commands that ``take_commands`` has not taken yet.

    The ``DriverMachine`` has one, and hands it to the functions that note events and decide. Nothing else changes it.
    """

    def __init__(self, settings: JobSettings, now: float) -> None:
        self.settings = settings
        self.clock = MachineClock(now)
        self.started = now
        self.roster = Roster()
        self.hosts = self.roster.hosts
        self.workers = self.roster.workers
        # The newest world, unless it has been dropped; the number of the last world; and how many members each world had.
        self.world: Generation | None = None
        self.generation = 0
        self.sizes: dict[int, int] = {}
        # The newest commit that any worker has reported; None while nothing has been trained, and after the state was lost.
        self.newest_commit: CommitId | None = None
        # Whether the newest commit was made by training, and not only at the beginning of a world.
        self.has_trained = False
        self.admission = Admission()
        self.book = FailureBook(settings.memory_setting)
        self.setbacks = Setbacks(settings)
        self.shortage = Shortage(settings)
        self.slow = Slowness(TOLD_BELOW)
        self.too_slow = Slowness(settings.replace_slow)
        self.replacements = Replacements()
        # The workers that were found slow; each is reported once.
        self.told_slow: set[int] = set()
        self.sizing = Sizing(settings.adaptive_np, settings.min_np)
        self.history = RecentHistory()
        # Lost workers whose exit code, once it is known, counts against the user's code.
        self.exits_to_count: set[int] = set()
        # When a worker first showed that the user's function has an elastic function.
        self.elastic_since: float | None = None
        # For a function without an elastic part: how many results end the job, once that is fewer than ``num_proc``.
        self.plain_target: int | None = None
        # Whether the job has ended.
        self.over = False
        # The error with which the job ends as soon as exit codes explain it, and until when they are waited for.
        self.ending: tuple[TrainingFailedError, float] | None = None
        self._commands: list[do.Command] = []

    # ------------------------------------------------------------------ queries

    def has_begun(self, hosts: int) -> bool:
        """Whether user code runs, and as many hosts have come as the job begins on. ``hosts``: how many have come."""
        is_called = any(worker.phase is not WorkerPhase.STARTING for worker in self.workers.values())
        return self.generation > 0 or (is_called and hosts >= self.settings.num_proc)

    @property
    def now(self) -> float:
        """The time by which the job is judged; it stands still while the driver is paused."""
        return self.clock.now

    @property
    def situation(self) -> Situation:
        """What is known at this moment, for the functions that judge it."""
        return Situation(
            self.now,
            self.started,
            self.settings,
            self.hosts,
            self.workers,
            self.world,
            self.generation,
            self.has_trained,
            self.sizing.limit or self.settings.max_np,
        )

    @property
    def ranks(self) -> Mapping[int, int]:
        """The rank of each worker of the newest world, including lost ones."""
        return self.world.ranks if self.world is not None else {}

    @property
    def members(self) -> list[Worker]:
        """The workers that are left of the newest world, in rank order."""
        return self.situation.members

    def is_member(self, number: int) -> bool:
        """Whether a worker belongs to the newest world."""
        return number in self.ranks

    # ------------------------------------------------------------------ commands

    def order(self, *commands: do.Command) -> None:
        """Order commands, to be executed after all earlier ones."""
        self._commands += commands

    def record(self, record: DriverRecord) -> None:
        """Have a record written to the job's event log."""
        self.order(do.Record(record))

    def take_commands(self) -> list[do.Command]:
        """Hand over the commands to execute, in order."""
        taken, self._commands = self._commands, []
        return taken

    # ------------------------------------------------------------------ worlds

    def begin_world(self, members: tuple[Member, ...]) -> Generation:
        """Begin the next generation. This ends the newest world, if there is one."""
        if self.world is not None:
            self.change_world(WorldChange.FOLLOWED)
        self.generation += 1
        self.sizes[self.generation] = len(members)
        self.world = Generation(self.generation, members, since=self.now)
        return self.world

    def change_world(self, change: WorldChange) -> Generation:
        """Move the newest world to the phase that follows a change."""
        world = self.world
        assert world is not None, change
        before = world.phase
        world.enter(change)
        what = f"generation {world.generation}: {before.name} → {world.phase.name}"
        self.history.changed(what, self.clock.driver_time)
        return world

    def drop_world(self, change: WorldChange) -> None:
        """End the newest world and forget its state; the next world begins as the first one did."""
        if self.world is not None:
            self.change_world(change)
        self.world = None
        # Some workers may hold slices of a commit that cannot be put together any more.
        for worker in self.workers.values():
            worker.commit, worker.slices = None, None
        self.newest_commit = None
        self.has_trained = False

    def note_commit(self, worker: Worker, commit: CommitId | None) -> None:
        """Note what a worker holds. The first commit of all ranks clears what earlier failures had made suspect."""
        if commit is None or (worker.commit is not None and commit < worker.commit):
            return
        worker.commit = commit
        if self.newest_commit is None or commit > self.newest_commit:
            self.newest_commit = commit
        world = self.world
        if world is None or commit.generation != world.generation or commit.index == 0:
            return
        self.has_trained = True
        if not worker.has_progressed:
            worker.has_progressed = True
            self.admission.progressed(worker.place)
        world.committed.add(worker.worker)
        # A rank makes its first commit by itself, though another fails in that step, and its second one only after all others.
        if not world.progressed and (commit.index > 1 or len(world.committed) == len(world.ranks)):
            world.progressed = True
            self.setbacks.progressed()
            self.book.progressed(world.generation)
            self.roster.progressed(world.workers)

    # ------------------------------------------------------------------ the end

    def finish(self, workers: tuple[int, ...]) -> None:
        """End the job with the results of these workers."""
        self.over = True
        self.record(JobFinished(list(workers), self.setbacks.resets))
        self.order(do.FinishJob(workers), *self.roster.release_all())

    def fail(self, error: SparkElasticError) -> None:
        """End the job with an error, unless it has ended.

        An error that a worker causes waits for the worker's exit: its code says more than that a connection broke, and its last
        lines come with it.
        """
        if self.over:
            return
        self.over = True
        if isinstance(error, TrainingFailedError):
            error = self.book.as_raised(error)
        if isinstance(error, TrainingFailedError) and self.book.lacks_exit_of(error):
            self.ending = error, self.clock.driver_time + EXIT_SECONDS
        else:
            self._end(error)

    def end_if_explained(self, at_once: bool = False) -> None:
        """Deliver the error that waits for exits once they are known, or the time is up."""
        if self.ending is None:
            return
        error, until = self.ending
        if at_once or not self.book.lacks_exit_of(error) or self.clock.driver_time >= until:
            self.ending = None
            self._end(self.book.retold(error))

    def _end(self, error: SparkElasticError) -> None:
        self.record(JobFailed(type(error).__name__, str(error)))
        self.order(do.FailJob(error), *self.roster.release_all())

    def fail_if(self, error: SparkElasticError | None) -> bool:
        """Fail the job with ``error``, if there is one. Return whether there is."""
        if error is not None:
            self.fail(error)
        return error is not None

    def give_up_if_pointless(self) -> bool:
        """Fail the job if the same failures keep coming back. Return whether the job is over."""
        verdict = self.book.verdict()
        if verdict is not None:
            self.fail(TrainingFailedError(verdict, self.book.story()))
        return self.over
