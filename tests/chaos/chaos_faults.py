"""Faults that strike a job's processes, machines and disk from outside, where and when the dice say."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import psutil
from chaos_cluster import Cluster

# How long something may stay stopped, cut, slow or full: on both sides of heartbeat_timeout.
SECONDS = (0.3, 1.5, 7.0)
HEARTBEAT_TIMEOUT = 4.0
# The job has to be training again so many seconds after a fault.
PATIENCE = 60.0


class Kind(Enum):
    KILL_WORKER = "SIGKILL of a worker"
    KILL_TASK = "SIGKILL of a task"
    KILL_WARM_PARENT = "SIGKILL of a warm parent"
    KILL_EXECUTOR = "SIGKILL of an executor"
    STOP_WORKER = "SIGSTOP of a worker"
    PAUSE_WORKER = "SIGSTOP of a worker for a while"
    PAUSE_TASK = "SIGSTOP of a task for a while"
    DECOMMISSION = "decommission of an executor"
    CUT = "a host's cable is unplugged for a while"
    SLOW = "a host's cable is slow for a while"
    FILL_DISK = "the checkpoints' disk is full for a while"
    PAUSE_DRIVER = "SIGSTOP of the driver for a while"


WEIGHTS = {Kind.KILL_WORKER: 5, Kind.KILL_EXECUTOR: 2, Kind.DECOMMISSION: 2, Kind.CUT: 2, Kind.KILL_TASK: 2}


class Stuck(AssertionError):
    """The job does not train any more."""


class View:
    """What is known of a job from its events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.size = 0
        self.is_over = False
        self._pids: dict[int, int] = {}
        self._hosts: dict[int, int] = {}
        self._facts: dict[int, dict[str, Any]] = {}
        self._workers: list[int] = []
        self._changed = threading.Condition()

    def note(self, event: dict[str, Any]) -> None:
        """To be called with each event."""
        with self._changed:
            self.events.append(event)
            match event["event"]:
                case "host_facts":
                    self._facts[event["host"]] = event["facts"]
                case "worker_started":
                    self._pids[event["worker"]], self._hosts[event["worker"]] = event["pid"], event["host"]
                case "world_forming":
                    self._workers, self.size = event["workers"], 0
                case "world_formed":
                    self.size = event["size"]
                case "world_broken":
                    self.size = 0
                case "job_finished" | "job_failed":
                    self.is_over = True
            self._changed.notify_all()

    def wait_for_world(self, size: int, seconds: float) -> bool:
        """Wait until a world of at least this size trains; False where none did in time, or the job is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self.size >= size, seconds)
            return self.size >= size and not self.is_over

    def wait(self, seconds: float) -> None:
        """Let time pass, as long as the job goes on."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over, seconds)

    def pick(self, dice: random.Random) -> tuple[int, dict[str, Any]]:
        """A member of the newest world: the pid of its worker, and what its task has told of its place."""
        with self._changed:
            worker = dice.choice(self._workers)
            return self._pids[worker], self._facts[self._hosts[worker]]


class Chaos:
    """Strikes ``count`` times, then lets the job end by ``stop``. ``problem`` says what was wrong with it meanwhile."""

    def __init__(
        self, cluster: Cluster, view: View, stop: Callable[[], None], seed: str, count: int, size: int
    ) -> None:
        self.struck: list[Kind] = []
        self.problem = ""
        self._cluster = cluster
        self._view = view
        self._stop = stop
        self._dice = random.Random(seed)
        self._count = count
        self._size = size
        self._healing: list[subprocess.Popen[bytes]] = []
        self._kinds = [kind for kind in Kind if self._can(kind)]

    def _can(self, kind: Kind) -> bool:
        needs = {Kind.CUT: "network", Kind.SLOW: "network", Kind.FILL_DISK: "full disk"}
        return needs.get(kind) not in self._cluster.missing

    def run(self) -> None:
        """Strike; on a thread of its own, beside the job."""
        try:
            while len(self.struck) < self._count and not self._view.is_over:
                self._await_a_world()
                self._view.wait(self._dice.choice((0.05, 0.5, 2.0)) * self._dice.random())
                kind = self._dice.choices(self._kinds, [WEIGHTS.get(kind, 1) for kind in self._kinds])[0]
                try:
                    self._strike(kind)
                except (psutil.Error, OSError, KeyError, IndexError):
                    continue  # whom it would have hit has just gone
                self.struck.append(kind)
            self._await_a_world()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            for healing in self._healing:
                healing.wait()
            self._stop()

    def _await_a_world(self) -> None:
        """Most faults strike a world in which somebody is left to go on; the others where they come."""
        if self._dice.random() < 0.15 and self.struck:
            return
        if self._dice.random() < 0.5:
            self._view.wait_for_world(self._size, 5.0)
        if not self._view.wait_for_world(min(2, self._size), PATIENCE) and not self._view.is_over:
            raise Stuck(f"no world trains {PATIENCE:.0f} s after {self.struck[-1:]}; {self._view.events[-12:]}")

    def _strike(self, kind: Kind) -> None:
        pid, facts = self._view.pick(self._dice)
        self._view.note({"event": "chaos", "kind": kind.name, "worker": pid, "host": facts["address"]})
        seconds = self._dice.choice(SECONDS) * self._dice.uniform(0.8, 1.2)
        cable = self._cluster.cables.get(facts["address"], "")
        match kind:
            case Kind.KILL_WORKER:
                os.kill(pid, signal.SIGKILL)
            case Kind.KILL_TASK:
                os.kill(facts["pid"], signal.SIGKILL)
            case Kind.KILL_WARM_PARENT:
                psutil.Process(pid).parent().kill()
            case Kind.KILL_EXECUTOR:
                os.kill(facts["executor_pid"], signal.SIGKILL)
            case Kind.STOP_WORKER:
                os.kill(pid, signal.SIGSTOP)
            case Kind.PAUSE_WORKER:
                self._for_a_while(f"kill -STOP {pid}", seconds, f"kill -CONT {pid}")
            case Kind.PAUSE_TASK:
                self._for_a_while(f"kill -STOP {facts['pid']}", seconds, f"kill -CONT {facts['pid']}")
            case Kind.DECOMMISSION:
                os.kill(facts["executor_pid"], signal.SIGPWR)
            case Kind.CUT:
                self._for_a_while(f"ip link set {cable} down", seconds, f"ip link set {cable} up")
            case Kind.SLOW:
                # A full queue of a slow line delays by half a second; netem is not in every kernel.
                slow = f"tc qdisc replace dev {cable} root tbf rate 1mbit burst 4kb latency 500ms"
                self._for_a_while(slow, seconds, f"tc qdisc del dev {cable} root")
            case Kind.FILL_DISK:
                filler = self._cluster.disk / "filler"
                self._for_a_while(f"cat /dev/zero > {filler}", 1.0 + seconds, f"rm {filler}")
            case Kind.PAUSE_DRIVER:
                self._for_a_while(f"kill -STOP {os.getpid()}", seconds, f"kill -CONT {os.getpid()}")

    def _for_a_while(self, begin: str, seconds: float, end: str) -> None:
        """By a process of its own: this one may be what is stopped."""
        command = f"{begin} 2>/dev/null; sleep {seconds:.2f}; {end} 2>/dev/null"
        self._healing.append(subprocess.Popen(["sh", "-c", command]))
