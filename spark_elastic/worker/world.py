"""World: this worker's view of one generation, from forming to its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch

from spark_elastic.errors import WorkerLostError
from spark_elastic.protocol.fault_points import Point
from spark_elastic.protocol.messages import COMMIT, Activity, CommitId, FormWorld, Member
from spark_elastic.worker import faults
from spark_elastic.worker.control import ControlClient
from spark_elastic.worker.group import build_on_thread
from spark_elastic.worker.runtime import REAL_RUNTIME, Runtime
from spark_elastic.worker.state.pending_copy import PendingCopy
from spark_elastic.worker.torch_store import WorldStore


class World:
    """One generation, connected by ``form``. The control thread calls ``ControlledWorld``'s methods, the user's all others.

    ``members`` are in rank order, with the commit that each held when the generation was formed.
    """

    def __init__(
        self,
        control: ControlClient,
        order: FormWorld,
        worker: int,
        address: str,
        form_timeout: float,
        runtime: Runtime = REAL_RUNTIME,
    ) -> None:
        self._control = control
        # The one of this process, in which alone its connections work: a process that is forked from it has only copies.
        self.process = os.getpid()
        self.generation = order.generation
        self.members = order.members
        self.previous_size = order.previous_size
        self.backend = order.backend
        self.me: Member = next(member for member in order.members if member.worker == worker)
        self.store = WorldStore(control, order.generation)
        self.group = runtime.group(
            self.store, self.rank, self.size, address, order.backend, timedelta(seconds=form_timeout)
        )
        self._form_timeout = form_timeout
        self._threads = runtime.threads
        self._pending: tuple[torch.distributed.Work | None, torch.Tensor] | None = None
        self._copy: PendingCopy | None = None
        self._is_waiting = False
        self._can_restore: Callable[[], bool] = lambda: True

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self.me.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.members)

    @property
    def newest_commit(self) -> CommitId | None:
        """The newest commit that a member holds; None in a job's first generation."""
        return max((member.commit for member in self.members if member.commit is not None), default=None)

    def form(self) -> None:
        """Connect to the other ranks and become torch's default group. Raises ``WorkerLostError`` if that fails."""
        faults.reached(Point.FORM, rank=self.rank, generation=self.generation)
        self._control.enter(self)
        build_on_thread(self.group, self._control.notify, self._wait_while_alive, self._threads)
        self.group.register(self._translate)
        self._control.formed()
        faults.reached(Point.FORMED, rank=self.rank, generation=self.generation)

    def is_broken(self) -> bool:
        """Whether a rank of this generation is known to be gone."""
        return self._control.is_aborted(self.generation) or self.group.is_broken()

    def has_met(self) -> bool:
        """Whether this rank has taken part in a reduction over all ranks since the last call; waits until that is complete.

        All ranks get the same answer. Where the host runs ahead of its device it is False, because nothing there shows how far
        other ranks are. Raises ``WorkerLostError``.
        """
        work = self.group.take_reduction()
        if work is None or self.group.runs_ahead:
            return False
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error
        return True

    def start_exchange(self, values: Sequence[int]) -> None:
        """Start the control collective of a commit with this rank's ``values``; it is read at the next commit.

        So nobody waits for the collective, and all ranks read its result at the same commit. Raises ``WorkerLostError``.
        """
        mine = torch.tensor(values, dtype=torch.int64)
        if self.size == 1:
            self._pending = (None, mine)
            return
        everybody = torch.empty(self.size, len(values), dtype=torch.int64)
        try:
            work = self.group.allgather(list(everybody.unbind()), mine, COMMIT)
        except RuntimeError as error:
            raise self.lost(error) from error
        self._pending = (work, everybody)

    def finish_exchange(self) -> list[list[int]] | None:
        """Wait for the pending control collective and return all ranks' values, in rank order; None if there is none."""
        if self._pending is None:
            return None
        work, everybody = self._pending
        self._pending = None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.lost(error) from error
        return [list(map(int, row)) for row in everybody.view(self.size, -1).tolist()]

    def meet(self) -> None:
        """Wait until all ranks have called this. Raises ``WorkerLostError``."""
        self.gather(0)

    def gather(self, number: int) -> list[int]:
        """Return the numbers of all ranks, in rank order; waits until all have called this. Raises ``WorkerLostError``."""
        if self.size == 1:
            return [number]
        mine, everybody = torch.tensor([number]), torch.empty(self.size, 1, dtype=torch.int64)
        try:
            self.group.allgather(list(everybody.unbind()), mine, COMMIT).wait()
        except RuntimeError as error:
            raise self.lost(error) from error
        return [int(number) for number in everybody.view(-1).tolist()]

    def watch(self, copy: PendingCopy) -> None:
        """Let the control thread check, before any rank aborts, whether this copy of the newest commit is complete."""
        self._copy = copy

    def wait_for(self, copy: PendingCopy) -> bool:
        """Block until this copy is made. Return whether it is whole: complete before the generation ended, if that has ended."""
        with self._waiting():
            copy.wait()
        if not self.group.runs_ahead:
            return True  # the host waits for reductions, so those before the copy have succeeded
        if copy.was_made is not None:
            return copy.was_made
        # If the generation ended before ``watch``, the copy has not been checked.
        return not self._control.is_aborted(self.generation)

    def rest(self) -> None:
        """Block until the GPU has finished all its work, so that nothing of a failed step runs after the restore."""
        if torch.cuda.is_initialized():
            with self._waiting():
                torch.cuda.synchronize()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def is_stuck(self) -> bool:
        """Whether the user's thread may wait for a reduction on the GPU with a lost rank, which only an abort ends."""
        return self._is_waiting and self.group.is_broken()

    @property
    def collectives(self) -> int:
        """How many collectives this rank has entered."""
        return self.group.collectives

    def activity(self) -> Activity:
        """What this rank has entered and waits for."""
        return self.group.activity()

    def compares(self, change: str) -> None:
        """Tell the driver about a change of what a model trains, before the collective in which ranks compare that change."""
        self.group.compares(change)

    def froze(self, model: str) -> None:
        """Tell the driver that no parameter of this model, the last one called, requires a gradient; empty if one does."""
        self.group.froze(model)

    def can_restore(self) -> bool:
        """Whether this rank can go back to the commit that it holds."""
        return self._can_restore()

    def ask_before_restoring(self, condition: Callable[[], bool]) -> None:
        """Let the control thread call ``condition`` to find out whether the state can go back to its last commit."""
        self._can_restore = condition

    def _translate(self, error: RuntimeError) -> None:
        """Raise that a rank was lost, if one was, in place of a collective's error."""
        if self.is_broken():
            raise self.lost(error) from error

    def lost(self, error: BaseException) -> WorkerLostError:
        """Turn the error of a failed collective into a ``WorkerLostError`` that tells why the generation is broken."""
        reason = self._control.abort_reason if self._control.is_aborted(self.generation) else str(error)
        return WorkerLostError(f"generation {self.generation} is broken: {reason}")

    def close(self) -> None:
        """Leave the generation for good."""
        self._control.leave()
        self._pending = None
        self.group.close()

    def drop(self) -> None:
        """Free the resources of a closed world. Does not block."""
        self.group.drop()

    def abort(self, generation: int) -> None:
        """Check whether the newest commit is complete, then end what is pending, if ``generation`` is this one or a later one."""
        if generation >= self.generation:
            if self._copy is not None:
                self._copy.look()
            self.group.abort()

    def abort_device(self, generation: int) -> None:
        """End what is pending in the group of the device, if ``generation`` is this one or a later one."""
        if generation >= self.generation:
            self.group.abort_device()

    def _wait_while_alive(self, is_done: Callable[[], bool]) -> bool:
        alive = self._control.wait(
            lambda: is_done() or self._control.is_aborted(self.generation), self._form_timeout + 10
        )
        return alive and not self._control.is_aborted(self.generation)


@contextmanager
def translated_errors(world: World | None) -> Iterator[None]:
    """Raise ``WorkerLostError`` for errors of collectives and transfers if the world is broken."""
    try:
        yield
    except RuntimeError as error:
        if world is None or not world.is_broken():
            raise
        raise world.lost(error) from error
