"""What has to hold after every event, at every commit, and at the end of a job."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable
from typing import Any

from simulation.faults.schedule import Kind
from simulation.product.hosts import WorkerProcess
from simulation.world.gpu import NONSENSE
from simulation.world.universe import Universe
from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.admission import FREE_FAILURES, SHORTEST_PAUSE
from spark_elastic.driver.forming import is_sealed
from spark_elastic.driver.generation import Generation
from spark_elastic.driver.holders import newest_held
from spark_elastic.driver.hosts import Place
from spark_elastic.driver.machine import DriverMachine
from spark_elastic.driver.phases import WorkerPhase, WorldPhase
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.validation import validate
from spark_elastic.driver.workers import Worker
from spark_elastic.errors import (
    JobCancelledError,
    NotEnoughHostsError,
    ResetLimitExceededError,
    SparkElasticError,
    StateLostError,
    TrainingFailedError,
)
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.records import StateLost, WorkerLost, WorldBroken
from spark_elastic.worker.job import current_job

# How many commits a rank may be ahead of another: the one that it has just made, and one before it without a step.
MOST_APART = 2
# The phases of workers that the machine counts on.
_COUNTED = (WorkerPhase.READY, WorkerPhase.MEMBER, WorkerPhase.VOTED)


def _held_by(worker: WorkerProcess) -> CommitId | None:
    """Return the commit that a worker really holds, whatever it has reported."""
    return worker.holds if worker.state is None or worker.state._commits.can_restore() else None


def _newest_of(workers: Iterable[WorkerProcess]) -> CommitId | None:
    """Return the newest commit that these workers really hold, one alone or, in slices, several together."""
    kept = [
        Worker(worker.number, 0, "", Place("", 0), started_at=0.0, heard=0.0, slices=worker.state._keeper.slices)
        for worker in workers
        if worker.state is not None
    ]
    return newest_held(kept)


def _is_about_to_commit(worker: WorkerProcess) -> bool:
    """Whether a worker that keeps no copies has made a step whose reductions all succeeded, and has not committed it yet."""
    return worker.state is not None and not worker.state._commits.can_restore()


class WatchedMachine(DriverMachine):
    """The driver's machine, checked after every event."""

    def __init__(self, settings: JobSettings, now: float) -> None:
        super().__init__(settings, now)
        self.watch: Invariants

    def note(self, event: ev.Event, now: float) -> list[do.Command]:
        was_over = self._has_ended
        commands = super().note(event, now)
        self._validate()
        self.watch.told(event, commands, was_over)
        return commands

    def decide(self) -> list[do.Command]:
        was_over = self._has_ended
        commands = super().decide()
        self._validate()
        self.watch.told(None, commands, was_over)
        return commands

    @property
    def _has_ended(self) -> bool:
        """Whether the job is over, and its error does not wait for exit codes."""
        return self.job.over and self.job.ending is None

    def _validate(self) -> None:
        try:
            validate(self.job)
        except AssertionError as error:
            self.watch.simulation.fail(f"the machine is in no state that it may be in: {error}", error)

    def deadline(self) -> float | None:
        due = super().deadline()
        now = self.watch.simulation.clock.now
        if due is not None and due <= now:
            self.watch.simulation.fail(f"the machine wants to be asked again at {due}, it is {now}")
        return due


class Invariants:
    def __init__(self, simulation: Universe, machine: DriverMachine) -> None:
        self.simulation = simulation
        self.machine = machine
        self.transitions: Counter[tuple[str, str, str]] = Counter()
        # The weights of each commit, and the members of each generation.
        self._commits: dict[CommitId, Any] = {}
        self._workers: dict[int, list[int]] = {}
        self._phase = "-"
        self._world_is_over = True
        # The generations in a row that newcomers have broken without a commit in between, and when the last one broke.
        self._broken_by_newcomers: set[int] = set()
        self._broken_at = 0.0
        # Workers that have made a commit of their own, and the generation of their first.
        self._established: dict[int, int] = {}
        # The generations that failures have broken, those of them that had no newcomer, and those that began without a commit.
        self._broken: set[int] = set()
        self._broken_without_newcomers: set[int] = set()
        self._first_worlds: set[int] = set()
        # How many workers were lost before any had reached the elastic function.
        self._lost_starts = 0
        # Workers that have been in a world that formed.
        self._connected: set[int] = set()

    # ------------------------------------------------------------------ the driver

    def told(self, event: ev.Event | None, commands: list[do.Command], was_over: bool) -> None:
        """Check how the machine has handled an event, or with None what it has decided."""
        job, simulation = self.machine.job, self.simulation
        before = self._phase
        if event is not None or commands:
            for command in commands:
                self._check_command(command, was_over)
            phase = "over" if job.over else job.world.phase.name if job.world is not None else "-"
            if phase != before or event is not None:
                self.transitions[before, type(event).__name__ if event is not None else "decide", phase] += 1
            self._phase = phase
            if simulation.history is not None:
                if type(event) not in (ev.WorkerHeard, ev.TaskHeard, ev.Tick):
                    simulation.note("event", "driver", str(event))
                for command in commands:
                    simulation.note("command", "driver", str(command))
        world = job.world
        if job.over or world is None:
            return
        if event is None:
            self._check_decided(world)
        if before == "FORMING" and world.phase is WorldPhase.RUNNING:
            self._check_is_connected(world)
            self._connected.update(world.workers)

    def _check_decided(self, world: Generation) -> None:
        """A world without a loss continues, and workers left out of it do not stay for the next with the commits they hold."""
        seen = self.machine.job.situation
        if world.phase in (WorldPhase.RUNNING, WorldPhase.FORMING):
            for number in world.workers:
                if number not in seen.workers:
                    self.simulation.fail(f"worker {number} is lost, but its world is {world.phase.name}")
        if is_sealed(seen):
            for worker in self._living(WorkerPhase.READY):
                if worker.number not in world.ranks and _held_by(worker) is not None:
                    self.simulation.fail(f"{worker} waits, and holds {_held_by(worker)}")

    def _check_command(self, command: do.Command, was_over: bool) -> None:
        simulation = self.simulation
        if was_over and not isinstance(command, (do.Record, do.ReleaseTask)):
            simulation.fail(f"{command} after the end of the job")
        match command:
            case do.Record(WorkerLost() as lost):
                self._check_loss(lost)
            case do.Record(WorldBroken() as broken):
                self._check_break(broken)
            case do.Record(StateLost()):
                self._check_state_is_lost()
                if not simulation.schedule.job.durable:
                    simulation.fail("training starts over, and there is no durable checkpoint")
            case do.FailJob(StateLostError()):
                self._check_state_is_lost()
            case do.FormWorld():
                self._check_world(command)
            case do.AbortWorld(generation) | do.InterruptWorld(generation) | do.FinishWorld(generation):
                if generation != self.machine.job.generation:
                    simulation.fail(f"{command} is for a stale generation")
                if not isinstance(command, do.FinishWorld):
                    self._world_is_over = True

    def _check_loss(self, record: WorkerLost) -> None:
        """No worker is taken out except for a fault, or because it has no state to begin with.

        Nobody can know which member of a world is unreachable, so one member's fault explains that another is blamed, newcomers
        first.
        """
        worker, cause = record.worker, record.cause
        is_explained = self._is_explained(worker) or StateLostError.__name__ in cause
        world = self.machine.job.world
        if cause.startswith("could not connect"):
            assert world is not None
            is_explained |= any(map(self._is_explained, world.workers))
            missing = set(world.workers) & set(self.machine.job.workers) - world.acknowledged
            if worker in self._connected and missing - self._connected:
                self.simulation.fail(f"a newcomer is blamed after one that has been in a world: {record}")
        if not is_explained:
            self.simulation.fail(f"a healthy worker was taken out: {record}")
        self._check_is_not_the_last_holder(worker, cause)
        self._lost_starts += self.machine.job.elastic_since is None

    def _check_is_not_the_last_holder(self, number: int, cause: str) -> None:
        """A worker that lives, continues and alone holds the newest commit is not taken out as late, silent or unreachable."""
        process = self.simulation.workers.get(number)
        if process is None or not process.is_alive or self.simulation.strikes.is_gone_for_good(process):
            return
        held = _held_by(process)
        if self.machine.job.world is not None and self.machine.job.world.phase is WorldPhase.FINISHING:
            return  # training has ended, and the state is no longer needed
        if held is None or not any(words in cause for words in ("hung", "could not connect", "did not answer pings")):
            return
        job = self.simulation.schedule.job
        if job.redundancy:
            return  # a rank that does not come back is given up after hang_timeout: others may hold its slices, too
        if job.in_place and job.reduces_metrics:
            return  # the others may wait for it between step and commit, with no way back: docs/howto/commits.md warns of that
        counted = [
            self.simulation.workers.get(other) for other, w in self.machine.job.workers.items() if w.phase in _COUNTED
        ]
        if any(other is not None and not other.is_alive for other in counted):
            return  # the driver relied on these workers, and does not know yet that they are gone
        if held.index == 0 and self.machine.job.newest_commit is None:
            return  # the seal of a job's first world, before anything was trained: the other members begin with the same state
        if job.in_place and any(map(_is_about_to_commit, self._living(*_COUNTED))):
            return  # another worker has a newer commit; it stepped after the driver last heard from it, and commits by itself
        others = [commit for other in self._living(*_COUNTED) if (commit := _held_by(other)) is not None]
        # The driver does not know what a silent worker has committed since its last message; a late worker has reported it.
        if not others or ("did not return" in cause and max(others) < held):
            self.simulation.fail(f"the last holder of {held} was taken out: {process}: {cause}")

    def _check_break(self, record: WorldBroken) -> None:
        """No world breaks unless a fault has touched one of its ranks."""
        generation, workers = record.generation, self._workers[record.generation]
        self._broken.add(generation)
        are_established = all(self._established.get(worker, generation) < generation for worker in workers)
        if are_established or generation in self._first_worlds:
            self._broken_without_newcomers.add(generation)
        is_explained = any(map(self._is_explained, workers)) or StateLostError.__name__ in record.reason
        # Ranks find each other through the driver's store.
        if not is_explained and not self._has_struck(Kind.PAUSE_DRIVER):
            self.simulation.fail(f"a healthy world was broken: {record}")

    def _has_struck(self, kind: Kind) -> bool:
        return any(fault.kind is kind for fault in self.simulation.strikes.struck)

    def _check_world(self, order: do.FormWorld) -> None:
        fail, machine = self.simulation.fail, self.machine
        settings, members = machine.job.settings, order.members
        workers = [member.worker for member in members]
        if settings.reset_limit is not None and len(self._broken_without_newcomers) > settings.reset_limit:
            fail(f"training goes on after {self._broken_without_newcomers} broke; reset_limit={settings.reset_limit}")
        if order.generation <= max(self._workers, default=0):
            fail(f"generation {order.generation} is formed twice")
        self._workers[order.generation] = workers
        if [member.rank for member in members] != list(range(len(members))) or len(set(workers)) < len(workers):
            fail(f"ranks are not dense and unique: {members}")
        if workers[0] != min(workers):
            fail(f"rank 0 is not the oldest of {workers}")
        # Ranks that hold commits only together stay until fewer ranks hold them.
        most = settings.max_np if self.simulation.schedule.job.redundancy else machine.job.situation.most
        if not settings.min_np <= len(members) <= most:
            fail(f"{len(members)} members; min_np={settings.min_np}, at most {most}")
        self._check_nobody_trains(order.generation)
        newest: CommitId | None = max((member.commit for member in members if member.commit is not None), default=None)
        if self.simulation.schedule.job.redundancy:
            self._check_slices(order, newest)
        else:
            self._check_copies(order, newest)
        if newest is None:
            self._first_worlds.add(order.generation)
        previous_size = 0 if newest is None else len(self._workers[newest.generation])
        if order.previous_size != previous_size:
            fail(
                f"{order} names {order.previous_size} as the size of the world that made {newest}, it was {previous_size}"
            )
        self._world_is_over = False
        # A worker that received the state in the last world is no longer a newcomer.
        others = [number for number in workers if number in self._established or self.simulation.workers[number].holds]
        if (
            len(self._broken_by_newcomers) >= FREE_FAILURES
            and settings.min_np <= len(others) < len(workers)
            and self.simulation.clock.now < self._broken_at + SHORTEST_PAUSE
        ):
            fail(f"newcomers are let in at once after they have broken the generations {self._broken_by_newcomers}")

    def _check_copies(self, order: do.FormWorld, newest: CommitId | None) -> None:
        """No worker holds a newer commit, and the members hold the commits that the driver ascribes to them."""
        fail, machine = self.simulation.fail, self.machine
        for worker in self._living(*WorkerPhase):
            commit = _held_by(worker)
            if machine.job.workers[worker.number].phase is WorkerPhase.LEAVING and commit != max(
                self._commits, default=None
            ):
                continue  # the worker was dismissed when others had a newer commit, and those have been lost since
            if commit is not None and (newest is None or commit > newest):
                fail(f"generation {order.generation} goes on from {newest}, but {worker} holds {commit}")
        for member in order.members:
            process = self.simulation.workers[member.worker]
            if process.is_alive and process.job is not None and _held_by(process) != member.commit:
                fail(f"{process} is said to hold {member.commit}, it holds {_held_by(process)}")

    def _check_slices(self, order: do.FormWorld, newest: CommitId | None) -> None:
        """The members hold all slices of the commit from which they continue, and no remaining worker holds more."""
        fail = self.simulation.fail
        processes = [self.simulation.workers[member.worker] for member in order.members]
        held = _newest_of(processes)
        if all(process.is_alive for process in processes) and held != newest:
            fail(f"{order} goes on from {newest}, its members hold {held}")
        best = _newest_of(self._living(*_COUNTED))
        if best is not None and (newest is None or best > newest):
            fail(f"generation {order.generation} goes on from {newest}, but {best} is there")

    def _check_nobody_trains(self, generation: int) -> None:
        """There is at most one formed world at a time: all workers that the machine counts on wait at the elastic function."""
        for worker in self._living(*_COUNTED):
            if not worker.stands_ready:
                self.simulation.fail(f"generation {generation} is formed while {worker} is not ready for it")

    def _check_is_connected(self, world: Generation) -> None:
        for number in world.workers:
            process = self.simulation.workers[number]
            group = process.group
            if process.is_alive and (group is None or group.generation != world.generation or not group.is_connected):
                self.simulation.fail(
                    f"generation {world.generation} is said to have formed, {process} is not connected"
                )

    def _living(self, *phases: WorkerPhase) -> list[WorkerProcess]:
        """Return the living processes that the machine believes to be in one of these phases."""
        processes = self.simulation.workers
        found = []
        for number, worker in self.machine.job.workers.items():
            process = processes.get(number)
            if worker.phase in phases and process is not None and process.is_alive and process.job is not None:
                found.append(process)
        return found

    def _check_state_is_lost(self) -> None:
        """Check that the machine is right in finding that no worker holds the state any more."""
        redundancy, world = self.simulation.schedule.job.redundancy, self.machine.job.world
        if redundancy:
            newest = _newest_of(self._living(*_COUNTED))
            if newest is not None:
                self.simulation.fail(f"the state is given up while {newest} is there")
            if world is None:
                return
            members = [self.simulation.workers[number] for number in world.workers]
            gone = [w for w in members if not w.is_alive or w.number not in self.machine.job.workers]
            is_sealed = all(w.holds is not None and w.holds.generation == world.generation for w in members)
            if is_sealed and len(gone) <= redundancy < len(members):
                self.simulation.fail(f"the state is lost with no more than {gone}")
            return
        for worker in self._living(*_COUNTED):
            if _held_by(worker) is not None:
                self.simulation.fail(f"the state is given up while {worker} holds {_held_by(worker)}")

    # ------------------------------------------------------------------ workers

    def newcomer_fails(self, process: WorkerProcess) -> None:
        """A newcomer is about to raise, which breaks the world unless it is already broken."""
        world = self.machine.job.world
        if world is not None and process.number in self.machine.job.workers and world.phase is WorldPhase.RUNNING:
            self._broken_by_newcomers.add(world.generation)
            self._broken_at = self.simulation.clock.now

    def synced(self, process: WorkerProcess) -> None:
        """A rank has the newest commit, its own or a received one."""
        job: Any = current_job()
        process.holds = job.world.newest_commit

    def committed(self, process: WorkerProcess, weights: int, loader: Any) -> None:
        """A rank has recorded a commit."""
        job: Any = current_job()
        commit: CommitId = job.control.commit
        process.holds = commit
        fail = self.simulation.fail
        content = (weights, loader["epoch"], loader["position"])
        if weights == NONSENSE and process.number not in self.machine.job.workers:
            return  # the others have aborted without waiting for a lost rank, and receive nothing from it
        known = self._commits.setdefault(commit, content)
        self.simulation.commits += 1
        if commit.index and process.number not in self._established:
            self._established[process.number] = commit.generation
            self._broken_by_newcomers.clear()
        if known != content:
            fail(f"{process} commits {content} as {commit}, others {known}")
        if commit.index == 0 and job.world.newest_commit is not None:
            expected = self._commits.get(job.world.newest_commit)
            if expected != content:
                fail(f"{process} begins {commit} with {content}, {job.world.newest_commit} was {expected}")
        if process.number in self.machine.job.workers and commit.generation != self.machine.job.generation:
            fail(f"{process} commits {commit} while generation {self.machine.job.generation} goes on")
        for other in self._living(WorkerPhase.MEMBER):
            is_there = (
                other.group is not None and other.group.generation == commit.generation and other.state is not None
            )
            apart = 1 if self.simulation.schedule.job.redundancy else MOST_APART
            if is_there and commit.index - other.state._commits.index > apart:
                fail(f"{process} has made {commit}, {other} only {other.state._commits.index} of that generation")
        self.simulation.note("commits", process, f"{commit}: {content}")

    # ------------------------------------------------------------------ the end

    def finished(self, results: list[bytes]) -> None:
        """Every row of every epoch was trained on once, and all ranks return the same result."""
        job = self.simulation.schedule.job
        weights = [pickle.loads(result) for result in results]
        if len(set(weights)) != 1:
            self.simulation.fail(f"ranks return different weights: {weights}")
        if not job.min_np <= len(results) <= job.max_np:
            self.simulation.fail(f"{len(results)} results")
        counted = self.simulation.ledger.rows_of(weights[0])
        once = Counter(range(job.data.total))
        for epoch in range(job.epochs):
            if counted.get(epoch) != once:
                self.simulation.fail(f"rows of epoch {epoch} were counted {counted.get(epoch)}")

    def failed(self, error: SparkElasticError) -> None:
        """A job may fail only because of the faults that have struck it."""
        struck = {fault.kind for fault in self.simulation.strikes.struck}
        text = str(error)
        if isinstance(error, StateLostError) and struck:
            return
        if isinstance(error, ResetLimitExceededError):
            limit = self.machine.job.settings.reset_limit
            if limit is not None and len(self._broken) + self._lost_starts > limit:
                return
        if isinstance(error, NotEnoughHostsError) and self.simulation.spark.is_starved:
            return
        if isinstance(error, JobCancelledError) and Kind.CANCEL in struck:
            return
        if isinstance(error, TrainingFailedError):
            if "after training had finished" in text and self._is_hit(text):
                return
            if ("the same exception" in text or "of the world raised" in text) and StateLostError.__name__ in text:
                return
            if ("the same exception" in text or "of the world raised" in text) and Kind.RAISE in struck:
                return
            if "the same exception" in text and Kind.FAIL_NEWCOMERS in struck and self._needs_newcomers():
                return
            if "reached a commit within" in text and self._all_are_hit():
                return
        self.simulation.fail(f"the job failed without need: {type(error).__name__}: {text}", error)

    def _needs_newcomers(self) -> bool:
        seen = self.machine.job.situation
        others = [
            process
            for process in self._living(*_COUNTED)
            if process.number in self._established and not seen.is_draining(seen.workers[process.number])
        ]
        return len(others) < seen.settings.min_np

    def _is_hit(self, text: str) -> bool:
        rank = int(text.removeprefix("rank ").split()[0])
        world = self.machine.job.world
        assert world is not None
        return self._is_explained(world.workers[rank])

    def _all_are_hit(self) -> bool:
        world = self.machine.job.world
        return world is not None and all(map(self._is_explained, world.workers))

    def _is_explained(self, number: int) -> bool:
        process = self.simulation.workers.get(number)
        return process is None or self.simulation.strikes.is_hit(process)

    def ended(self) -> None:
        """Nothing of the job is left."""
        left = [str(process) for process in self.simulation.spark.living() if not process.machine.is_lost]
        if left:
            self.simulation.fail(f"left after the end: {', '.join(left)}")
