"""Plays hosts and workers against a ``DriverMachine``, and checks after every event what must always hold.

A script is told what happens (``register``, ``boot``, ``kill``, ``pass_time`` …); it sends the events that real tasks
and workers would send and keeps what the machine commanded. Time is a number that only ``pass_time`` moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spark_elastic.driver import commands as do
from spark_elastic.driver import events as ev
from spark_elastic.driver.failures import FirstSign
from spark_elastic.driver.hosts import Place
from spark_elastic.driver.machine import DriverMachine
from spark_elastic.driver.settings import JobSettings
from spark_elastic.driver.validation import validate
from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.messages import Activity, CommitId, Slices
from spark_elastic.protocol.records import Record, WorldBroken

R = TypeVar("R")


@dataclass
class Process:
    """A worker's process as the script plays it."""

    worker: int
    host: int
    phase: str = "starting"
    generation: int = 0
    commit: CommitId | None = None
    slices: tuple[Slices, ...] | None = None
    collectives: int = 0
    waiting: bool = False
    moved: int = 0
    silent: int = 0
    recent: tuple[str, ...] = ()
    frozen: str = ""
    beats: int = 0
    told_to_end: bool = False
    # Still alive, but the machine was told that it is gone, or has fenced it itself.
    fenced: bool = False


@dataclass
class Told:
    """The commands that answered a stretch of the script, log entries left out."""

    commands: list[do.Command] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    def names(self) -> list[str]:
        return [type(command).__name__ for command in self.commands]


class Script:
    """One job, played by hand. Hosts and workers are told by the numbers that the machine knows.

    As in ``run``, ``num_proc`` workers are started before the function has reached its elastic part, by default ``min_np``.
    """

    def __init__(self, *, min_np: int = 1, max_np: int = 4, num_proc: int | None = None, **others: Any) -> None:
        self.settings = JobSettings(min_np=min_np, max_np=max_np, num_proc=num_proc or min_np, **others)
        self.now = 100.0
        self.machine = DriverMachine(self.settings, self.now)
        self.job = self.machine.job
        self.hosts: dict[int, str] = {}
        # Where the tasks run; those that the machine has told to end, which they do without another word.
        self._places: dict[int, tuple[str, int, Place]] = {}
        self._restarting: list[int] = []
        self.processes: dict[int, Process] = {}
        self.worlds: list[do.FormWorld] = []
        self.told: list[do.Command] = []
        self.records: list[Record] = []
        self.outcome: do.FinishJob | do.FailJob | None = None
        self._next_host = 0
        self._world_is_over = True

    # ------------------------------------------------------------------ what is asked

    @property
    def ranks(self) -> list[int]:
        """The workers of the newest world, in rank order."""
        return [member.worker for member in self.worlds[-1].members]

    @property
    def generation(self) -> int:
        return self.worlds[-1].generation if self.worlds else 0

    @property
    def living(self) -> list[int]:
        """Workers of the newest world whose processes live and are not fenced."""
        return [worker for worker in self.ranks if worker in self.processes and not self.processes[worker].fenced]

    @property
    def error(self) -> SparkElasticError | None:
        return self.outcome.error if isinstance(self.outcome, do.FailJob) else None

    @property
    def finished(self) -> bool:
        return isinstance(self.outcome, do.FinishJob)

    def host_of(self, worker: int) -> int:
        return self.processes[worker].host

    def worker_on(self, host: int) -> int | None:
        return next((process.worker for process in self.processes.values() if process.host == host), None)

    @property
    def newest(self) -> int:
        """The worker on the host that registered last."""
        worker = self.worker_on(self._next_host - 1)
        assert worker is not None, "it has none"
        return worker

    def since(self, play: Callable[[], Any]) -> Told:
        """Play a stretch and return what was commanded meanwhile."""
        start = len(self.told)
        play()
        return Told(self.told[start:])

    def recorded(self, kind: type[R]) -> list[R]:
        """The records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]

    # ------------------------------------------------------------------ events

    def send(self, event: ev.Event) -> Told:
        """Tell the machine of an event, check what must always hold, and note what it commands."""
        was_over = self.outcome is not None
        commands = self.machine.handle(event, self.now)
        validate(self.job)
        self._check(commands, was_over)
        self.records += [command.record for command in commands if isinstance(command, do.Record)]
        spoken = [command for command in commands if not isinstance(command, do.Record)]
        self.told += spoken
        return Told(spoken)

    def register(self, name: str = "a", *, slot: int | None = None, place: Place | None = None) -> int:
        """A task offers a host; ``place`` (machine and executor) is by default its own."""
        host = self._next_host
        self._next_host += 1
        slot = host if slot is None else slot
        self.hosts[host] = name
        self._places[host] = (name, slot, Place(name, host) if place is None else place)
        self.send(ev.TaskRegistered(host, slot, name, self._places[host][2]))
        return host

    def boot(self, *workers: int) -> None:
        """Newcomers connect and reach the elastic function."""
        for worker in workers:
            self.send(ev.WorkerConnected(worker))
            self.processes[worker].phase = "booting"
        for worker in workers:
            self.ready(worker)

    def ready(self, worker: int, reason: str = "") -> None:
        process = self.processes[worker]
        process.phase = "ready"
        self.send(ev.WorkerReady(worker, process.generation, process.commit, reason, process.slices))

    def join(self, name: str = "a", *, wait: bool = True, **place: Any) -> int:
        """A host registers and its worker boots; with ``wait`` the join window passes, too. Return the worker."""
        host = self.register(name, **place)
        worker = self.worker_on(host)
        assert worker is not None, f"host {host} was given no worker"
        self.boot(worker)
        if wait:
            self.pass_time(1.0)
        return worker

    def acknowledge(self, *workers: int) -> None:
        """Ranks report their groups complete, all members unless told otherwise, and seal the generation."""
        for worker in workers or self.living:
            self.send(ev.GroupFormed(worker, self.generation))
        if not workers or set(workers) == set(self.ranks):
            for worker in self.living:
                self.processes[worker].commit = CommitId(self.generation, 0)
                self.processes[worker].phase = "training"
                self.heartbeat(worker)

    def commit(self, *workers: int) -> None:
        """Ranks commit once; all members unless told otherwise."""
        for worker in workers or self.living:
            process = self.processes[worker]
            index = (
                process.commit.index + 1 if process.commit and process.commit.generation == process.generation else 1
            )
            process.commit = CommitId(process.generation, index)
            process.collectives += 1
            self.heartbeat(worker)

    def heartbeat(self, worker: int) -> None:
        process = self.processes[worker]
        # Who has entered more collectives than another waits for it in the last one.
        members = self.living if self.worlds else []
        others = [self.processes[other] for other in members if self.processes[other].phase == "training"]
        waiting = process.waiting or process.collectives > min((other.collectives for other in others), default=10**9)
        activity = Activity(
            process.collectives,
            waiting,
            process.moved,
            process.silent,
            recent=process.recent,
            frozen=process.frozen,
        )
        self.send(ev.WorkerHeard(worker, process.generation, activity, process.beats, process.commit))

    def come_back(self, *workers: int, reason: str = "a peer was lost") -> None:
        """Survivors answer the abort and stand at the elastic function again; all living members by default."""
        if self.job.world is not None and self.job.world.to_abort:
            self.now += max(0.0, self.job.world.abort_at - self.job.now)
            self.send(ev.Tick())
        for worker in workers or self.living:
            process = self.processes.get(worker)
            if process is not None and process.phase != "ready" and not process.fenced:
                self.send(ev.WorkerAborted(worker, process.generation, process.commit))
                self.ready(worker, reason)

    def obey_interrupt(self, *workers: int) -> None:
        """Members raise the interrupt at the same commit."""
        members = list(workers or self.living)
        self.commit(*members)
        for worker in members:
            self.ready(worker)

    def vote(self, *workers: int) -> None:
        for worker in workers or self.living:
            process = self.processes[worker]
            process.phase = "voted"
            self.send(ev.WorkerReturned(worker, process.generation, process.commit))

    def deliver(self, *workers: int, elastic: bool = True) -> None:
        """Results arrive and their workers exit."""
        for worker in workers or self.living:
            self.send(ev.ResultArrived(worker, elastic))
            self.processes[worker].phase = "done"
        for worker in workers or self.living:
            self.exits(worker, 0)

    def exits(self, worker: int, code: int) -> None:
        process = self.processes.pop(worker)
        if process.host in self.hosts:
            self.send(ev.WorkerExited(process.host, worker, code, ("last words",)))

    def kill(self, *workers: int, code: int = -9) -> None:
        """Workers' processes die; all are seen dying before the first exit code is known."""
        for worker in workers:
            self.send(ev.WorkerGone(worker, FirstSign.PROCESS_DIED))
        for worker in workers:
            self.exits(worker, code)

    def raises(self, *workers: int, error: str = "ValueError: bad row", where: str = "train.py:7") -> None:
        for worker in workers:
            self.send(ev.WorkerRaised(worker, error, where, f"Traceback …\n{error}"))
        for worker in workers:
            self.exits(worker, 1)

    def lose_host(self, *hosts: int, reason: str = "its connection to the driver broke") -> None:
        for host in hosts:
            self.hosts.pop(host, None)
            self.send(ev.TaskLost(host, reason))
            for worker in [process.worker for process in self.processes.values() if process.host == host]:
                del self.processes[worker]

    def drain(self, host: int, deadline: float | None = None) -> Told:
        return self.send(ev.HostDraining(host, deadline))

    def end_those_told(self) -> None:
        """Workers that were killed by command, or sent away, exit."""
        for process in [process for process in self.processes.values() if process.told_to_end]:
            self.exits(process.worker, -9)

    def pass_time(
        self,
        seconds: float,
        *,
        step: float = 1.0,
        silent: Iterable[int] = (),
        busy: bool = False,
        seen: Iterable[int] = (),
    ) -> None:
        """Let time pass; hosts answer pings and workers send heartbeats, but those in ``silent``.

        The tasks of workers in ``seen`` see their processes. ``busy`` workers call ``state.heartbeat()``. Spark starts
        tasks that were told to end again, where they were.
        """
        for host in self._restarting:
            name, slot, place = self._places[host]
            self.send(ev.TaskLost(host, "its connection to the driver broke"))
            self.register(name, slot=slot, place=place)
        self._restarting.clear()
        quiet = set(silent)
        left = seconds
        while left > 1e-9:
            self.now += min(step, left)
            left -= step
            for host in list(self.hosts):
                self.send(ev.TaskHeard(host))
            for process in list(self.processes.values()):
                if process.worker in seen:
                    self.send(ev.WorkerSeen(process.worker))
                if process.worker not in quiet and process.phase != "starting":
                    process.beats += busy
                    self.heartbeat(process.worker)
            self.send(ev.Tick())

    # ------------------------------------------------------------------ what must always hold

    def _check(self, commands: list[do.Command], was_over: bool) -> None:
        for place, command in enumerate(commands):
            if was_over or self.outcome is not None:
                allowed = isinstance(command, (do.ReleaseTask, do.Record))
                assert allowed, f"{command} after the job's end; all of {commands}"
            match command:
                case do.StartWorker(host, worker):
                    assert host in self.hosts, f"{command}: there is no such host"
                    assert self.worker_on(host) is None, f"{command}: the host has a worker"
                    assert worker not in self.processes
                    self.processes[worker] = Process(worker, host)
                case do.KillWorker(_, worker) | do.LeaveJob(worker):
                    if worker in self.processes:
                        self.processes[worker].told_to_end = True
                        self.processes[worker].fenced = True
                case do.RestartTask(host):
                    if self.hosts.pop(host, None) is not None:
                        self._restarting.append(host)
                    self.processes = {n: process for n, process in self.processes.items() if process.host != host}
                case do.FormWorld():
                    self._check_world(command)
                    self.worlds.append(command)
                    self._world_is_over = False
                    for member in command.members:
                        process = self.processes[member.worker]
                        process.generation, process.phase, process.collectives = command.generation, "forming", 0
                        process.waiting, process.moved = False, 0
                case do.AbortDevice(generation, workers):
                    assert generation == self.generation
                    answered = self.job.world.answered  # type: ignore[union-attr]
                    assert all(w in answered or self.processes[w].phase == "ready" for w in workers)
                case do.AbortWorld(generation, _, _) | do.InterruptWorld(generation, _):
                    assert generation == self.generation, f"{command} is for a stale generation"
                    self._world_is_over = True
                case do.Record(WorldBroken()):
                    self._world_is_over = True
                case do.FinishWorld(generation, workers):
                    assert generation == self.generation
                    assert list(workers) == self.ranks
                case do.FinishJob() | do.FailJob():
                    assert self.outcome is None, "the job ended twice"
                    self.outcome = command
            assert commands[place] is command

    def _check_world(self, order: do.FormWorld) -> None:
        members = order.members
        workers = [member.worker for member in members]
        assert order.generation > self.generation
        assert [member.rank for member in members] == list(range(len(members)))
        assert len(set(workers)) == len(workers)
        assert workers[0] == min(workers), "rank 0 is not the oldest"
        most = self.settings.max_np if self.job.sizing.limit is None else self.job.sizing.limit
        is_whole = all(member.slices is None for member in members)
        assert self.settings.min_np <= len(members) <= (most if is_whole else self.settings.max_np)
        assert self._world_is_over or not self._living_ranks(), "a second world beside one that is not over"
        for worker in workers:
            assert self.processes[worker].phase == "ready", f"worker {worker} is not ready"
        for worker in self._living_ranks():
            assert self.processes[worker].phase == "ready", f"survivor {worker} was not waited for"
        held = [self.processes[worker].commit for worker in {*workers, *self._living_ranks()}]
        newest = max((commit for commit in held if commit is not None), default=None)
        is_whole = all(self.processes[worker].slices is None for worker in workers)
        if newest is not None and is_whole:
            assert any(member.commit == newest for member in members), f"nobody holds {newest}"

    def _living_ranks(self) -> list[int]:
        if not self.worlds:
            return []
        return [
            worker
            for worker in self.ranks
            if worker in self.processes and not self.processes[worker].fenced and worker in self.job.workers
        ]


def running(*names: str, **settings: Any) -> Script:
    """A job whose first world, of one worker a name, has formed and sealed its generation."""
    settings.setdefault("max_np", max(len(names), 4))
    settings.setdefault("min_np", 1)
    settings.setdefault("num_proc", len(names))
    script = Script(**settings)
    hosts = [script.register(name) for name in names]
    script.boot(*(worker for host in hosts if (worker := script.worker_on(host)) is not None))
    script.acknowledge()
    return script


def reform(script: Script) -> None:
    """Survivors come back, and whatever world forms is acknowledged and commits."""
    before = script.generation
    script.come_back()
    assert script.generation == before + 1, "no world formed"
    script.acknowledge()
    script.commit()


def wait_in_collectives(script: Script, *counts: int) -> None:
    """All members are in collectives that do not complete; each has entered so many more."""
    for worker, count in zip(script.living, counts, strict=True):
        script.processes[worker].waiting = True
        script.processes[worker].collectives += count
