"""What Gloo does for a generation, as far as recovery is concerned.

After the death of a rank, only its neighbours in the ring get an error; the others hang until they are aborted. An abort on one
rank fails what is pending there, and nothing else. Every rank that checks sees that a connection has ended. A collective may
complete on one rank and fail on another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from simulation.world.threads import Condition, current
from simulation.world.universe import Universe
from spark_elastic.protocol.messages import Activity
from spark_elastic.worker.backends import find_backend


class Work:
    """A pending operation of one rank."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.result: Any = None
        self.is_done = False

    def wait(self) -> Any:
        group = self._group
        group.condition.wait_for(lambda: self.is_done or bool(group.error))
        if not self.is_done:
            raise RuntimeError(group.error)
        return self.result

    def complete(self, result: Any) -> None:
        if not self._group.error:
            self.result, self.is_done = result, True
            self._group.moved += 1
            self._group.condition.notify_all()


class Mesh:
    """The connections among the ranks of one generation."""

    def __init__(self, simulation: Universe, generation: int, size: int) -> None:
        self.simulation = simulation
        self.generation = generation
        self.size = size
        self.groups: dict[int, Group] = {}
        # The value that each rank has contributed to each collective.
        self.brought: defaultdict[int, dict[int, tuple[Work, Any, int | None]]] = defaultdict(dict)
        self.mail: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.takers: defaultdict[tuple[int, int], deque[Work]] = defaultdict(deque)
        self.blocked: list[Any] = []
        self.departed: set[int] = set()
        # Ranks whose packets vanish silently, for as long as these connections last.
        self.swallowed: set[int] = set()

    def arrived(self) -> None:
        """Note that a rank has arrived. Once all have, and can reach each other, they are connected."""
        groups = list(self.groups.values())
        if len(groups) < self.size:
            return
        executors = {group.process.task.executor for group in groups}
        is_blocked = len(executors) > 1 and any(executor.is_blocked for executor in executors)
        if is_blocked or self._is_split(group.process.machine for group in groups):
            self.simulation.meshes.add(self)
            return
        for group in groups:
            self.simulation.clock.after(self.simulation.random.uniform(0.002, 0.03), group.connected)

    def enter(self, number: int, group: Group, work: Work, value: Any, source: int | None) -> None:
        brought = self.brought[number]
        brought[group.rank] = (work, value, source)
        if source is not None and source != group.rank:
            if source in brought:
                self._deliver(work, group, {source: brought[source][1]})
        elif source is not None:
            for rank, (other, _, _) in list(brought.items()):
                self._deliver(other, self.groups[rank], {source: value})
        elif len(brought) == self.size:
            values = {rank: brought[rank][1] for rank in sorted(brought)}
            for rank, (other, _, _) in brought.items():
                self._deliver(other, self.groups[rank], values)

    def _deliver(self, work: Work, group: Group, values: dict[int, Any]) -> None:
        """Complete a rank's part once all machines concerned can reach each other."""
        concerned = {*values, group.rank}
        if len(concerned) > 1 and concerned & self.swallowed:
            return
        if self._is_split(self.groups[rank].process.machine for rank in (*values, group.rank)):
            self.blocked.append((work, group, values))
            self.simulation.meshes.add(self)
        else:
            delay = self.simulation.random.uniform(0.0005, 0.01) * group.process.machine.slowness
            self.simulation.clock.after(delay, work.complete, values)

    def unblock(self) -> None:
        """Check again what a partition has held up."""
        blocked, self.blocked = self.blocked, []
        for entry in blocked:
            self._deliver(*entry)
        for rank in list(self.departed):
            self.left(rank)
        if not all(group.is_connected for group in self.groups.values()):
            self.arrived()

    def left(self, rank: int) -> None:
        """Note that a rank's sockets are closed, by the rank itself or by the end of its process."""
        self.departed.add(rank)
        gone = self.groups[rank].process.machine
        for other, group in self.groups.items():
            if {other, rank} & self.swallowed:
                continue
            if other != rank and rank not in group.lost and not self._is_split((gone, group.process.machine)):
                near = abs(other - rank) in (1, self.size - 1)
                self.simulation.clock.after(self.simulation.random.uniform(0.001, 0.04), group.peer_left, rank, near)

    def cut_off(self, group: Group) -> int:
        """Return how many other ranks do not answer this one."""
        here = group.process.machine
        return sum(
            self._is_split((here, other.process.machine)) or bool({group.rank, other.rank} & self.swallowed)
            for other in self.groups.values()
            if other is not group
        )

    def _is_split(self, machines: Iterable[Any]) -> bool:
        different = set(machines)
        return len(different) > 1 and any(machine.is_isolated for machine in different)


class Group:
    """Stands in for ``group.Group``."""

    def __init__(self, store: Any, rank: int, size: int, address: str, backend: str, timeout: timedelta) -> None:
        self.process = current().process
        self.simulation: Universe = self.process.simulation
        self.generation: int = store.generation
        self.rank = rank
        self.size = size
        self.condition = Condition()
        self.runs_ahead = find_backend(backend).runs_ahead
        self.error = ""
        # What the abort of the device's group releases.
        self.stuck: list[Callable[[], None]] = []
        self.is_device_aborted = False
        self._store = store
        self._timeout = timeout.total_seconds()
        self._entered = 0
        self._pending: list[Work] = []
        self._reduction: Work | None = None
        self.moved = 0
        self.lost: set[int] = set()
        self._is_aborted = False
        self._is_left = False
        self.is_connected = False
        self._mesh: Mesh | None = None
        self.process.group = self

    # ------------------------------------------------------------------ for our code

    def build(self) -> None:
        self._store.gather("gloo/", str(self.process.number).encode(), self.size)
        simulation = self.simulation
        self._mesh = mesh = simulation.mesh(self.generation, self.size)
        mesh.groups[self.rank] = self
        if self._is_left:
            mesh.left(self.rank)
        for rank in mesh.departed:
            self.peer_left(rank, near=simulation.random.random() < 0.5)
        mesh.arrived()
        done = self.condition.wait_for(lambda: self.is_connected or bool(self.error), self._timeout)
        if not done or self.error:
            raise RuntimeError(self.error or "a peer did not connect")
        if self._is_aborted:
            self.abort()

    def register(self, translate: object) -> None: ...

    @property
    def collectives(self) -> int:
        return self._entered

    def activity(self) -> Activity:
        self._pending = [] if self.error else [work for work in self._pending if not work.is_done]
        cut_off = self._mesh.cut_off(self) if self._mesh is not None and self._pending else 0
        return Activity(self._entered, bool(self._pending), self.moved, cut_off)

    def is_broken(self) -> bool:
        return self._is_aborted or bool(self.lost)

    def abort(self) -> None:
        self._is_aborted = True
        self._fail("connection closed by an abort")

    def abort_device(self) -> None:
        self.is_device_aborted = True
        stuck, self.stuck = self.stuck, []
        for go_on in stuck:
            go_on()

    def give_up(self) -> None:
        self.abort()
        self.abort_device()

    def close(self) -> None:
        self.give_up()
        self.leave()

    def drop(self) -> None: ...

    def take_reduction(self) -> Any:
        work, self._reduction = self._reduction, None
        return work

    # ------------------------------------------------------------------ operations

    def reduce(self, value: Any) -> Work:
        """Enter a collective of user code, which gathers all ranks' values."""
        work = self.collective(value)
        self._reduction = self._reduction or work
        return work

    def collective(self, value: Any, source: int | None = None) -> Work:
        """Enter the next collective, which gathers all ranks' values or broadcasts that of ``source``."""
        number, self._entered = self._entered, self._entered + 1
        work = Work(self)
        self._pending.append(work)
        if not self.error:
            assert self._mesh is not None
            if self.size == 1:
                work.complete({0: value})
            else:
                self._mesh.enter(number, self, work, value, source)
        return work

    def allgather(self, tensors: list[Any], mine: Any, name: str) -> Any:
        if self.error:
            raise RuntimeError(self.error)
        work = self.collective(mine.clone())

        def wait() -> None:
            for rank, value in work.wait().items():
                tensors[rank].copy_(value)

        return SimpleNamespace(wait=wait)

    def broadcast(self, tensor: Any, source: int) -> None:
        self.process.reached("TRANSFER")
        value = self.collective(tensor.clone() if self.rank == source else None, source).wait()[source]
        if self.rank != source:
            tensor.copy_(value)

    def send(self, tensor: Any, receiver: int) -> Work:
        self.process.reached("TRANSFER")
        value = tensor.clone()
        work = Work(self)
        self._pending.append(work)
        mesh = self._mesh
        assert mesh is not None
        if not self.error:
            work.complete(None)
            key = (self.rank, receiver)
            if mesh.takers[key]:
                mesh._deliver(mesh.takers[key].popleft(), mesh.groups[receiver], {self.rank: value})
            else:
                mesh.mail[key].append(value)
        return work

    def receive(self, tensor: Any, source: int) -> None:
        self.begin_receive(tensor, source).wait()

    def begin_receive(self, tensor: Any, source: int) -> Any:
        self.process.reached("TRANSFER")
        work = Work(self)
        self._pending.append(work)
        mesh = self._mesh
        assert mesh is not None
        key = (source, self.rank)
        if mesh.mail[key]:
            mesh._deliver(work, self, {source: mesh.mail[key].popleft()})
        else:
            mesh.takers[key].append(work)
            if source in self.lost:
                self._fail("connection closed by peer")
        return SimpleNamespace(wait=lambda: tensor.copy_(work.wait()[source]))

    # ------------------------------------------------------------------ for the simulation

    def leave(self) -> None:
        if not self._is_left:
            self._is_left = True
            if self._mesh is not None:
                self._mesh.left(self.rank)

    def peer_left(self, rank: int, near: bool) -> None:
        self.lost.add(rank)
        waits_for_it = self._mesh is not None and bool(self._mesh.takers[(rank, self.rank)])
        if near or waits_for_it:
            self._fail("connection closed by peer")

    def has_nonsense(self) -> bool:
        """Whether reductions that are not complete yet give garbage: a rank that takes part has aborted NCCL.

        A rank that has given up connecting takes part in no reduction.
        """
        groups = [] if self._mesh is None else self._mesh.groups.values()
        return any(group.is_device_aborted and group._entered for group in groups)

    def connected(self) -> None:
        self.is_connected = True
        self.condition.notify_all()

    def _fail(self, error: str) -> None:
        self.error = self.error or error
        self.condition.notify_all()
