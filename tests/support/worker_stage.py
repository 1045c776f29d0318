"""A job as a state sees it: one rank, a world without a network, and a control client that only remembers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from spark_elastic.errors import WorkerLostError
from spark_elastic.protocol.messages import CommitId, Member, Slices
from spark_elastic.worker.checks import training_code
from spark_elastic.worker.job import current_job, enter_job
from spark_elastic.worker.reporting import Reporter
from spark_elastic.worker.state.keepers import copies
from spark_elastic.worker.world import World


class Stage:
    """Begins generations for one worker; ``peers`` are what the other ranks say at each commit, by default the same."""

    def __init__(self) -> None:
        self.control = SimpleNamespace(commit=None, beats=0, is_interrupted=False, reported=[], timed=[], generation=0)
        self.control.report = self.control.reported.append
        self.control.steps_timed = self.control.timed.append
        self.control.vote = lambda: None
        self.reporter = Reporter(self.control.report)
        self.clock = time.monotonic
        self.world: Any = None
        self.state: Any = None
        self.models: list[Any] = []
        self.checkpoints: Any = None
        self.finished = False
        self.is_fixed = False
        self.max_np = 1
        self.broken = self.aborted = False
        # Whether gradients are reduced ahead of each commit.
        self.has_met = False
        self.peers: Callable[[list[int]], list[list[int]]] = lambda mine: [list(mine)]
        # What a donor sends when the next generation begins.
        self.arriving: Any = None
        self.told: bytes | None = None
        # What other ranks give to the store as a generation begins.
        self.gathered: list[bytes] = []
        self._pending: list[int] | None = None
        # What this rank has said at the commits that had an exchange.
        self.exchanged: list[list[int]] = []

    def attach_models(self) -> None:
        pass

    def add_model(self, model: Any) -> None:
        self.models.append(model)

    def begin(
        self,
        state: Any,
        *,
        rank: int = 0,
        others: Sequence[CommitId | None] = (),
        previous_size: int = 1,
        slices: Slices | None = None,
    ) -> None:
        """Form the next generation of this worker, which holds these slices, and as many others; have the state take part."""
        held = [*others[:rank], self.control.commit, *others[rank:]]
        members = tuple(
            Member(number, number, 0, 1, 0, 1, commit, slices if number == rank else None)
            for number, commit in enumerate(held)
        )
        self.control.generation += 1
        self._pending, self.broken, self.aborted = None, False, False
        self.world = SimpleNamespace(
            generation=self.control.generation,
            process=os.getpid(),
            members=members,
            me=members[rank],
            rank=rank,
            size=len(members),
            previous_size=previous_size,
            backend="nccl",
            newest_commit=max((commit for commit in held if commit is not None), default=None),
            is_broken=lambda: self.broken,
            has_met=lambda: self.has_met,
            meet=lambda: None,
            gather=lambda number: [number] * len(members),
            start_exchange=self._start_exchange,
            finish_exchange=self._finish_exchange,
            lost=lambda error: WorkerLostError(str(error)),
            ask_before_restoring=lambda condition: None,
            watch=lambda copy: World.watch(self.world, copy),
            wait_for=lambda copy: World.wait_for(self.world, copy),
            store=SimpleNamespace(gather=lambda key, value, size: (value, *self.gathered)),
            group=SimpleNamespace(
                runs_ahead=True, is_broken=lambda: self.broken, abort=lambda: setattr(self, "broken", True)
            ),
            _control=SimpleNamespace(is_aborted=lambda generation: self.aborted),
            _copy=None,
            _waiting=nullcontext,
        )
        state._begin(self)

    def abort(self) -> None:
        """What the control thread does when the driver says that a rank is lost."""
        self.aborted = True
        World.abort(self.world, self.world.generation)

    def _start_exchange(self, values: list[int]) -> None:
        self._pending = values
        self.exchanged.append(values)

    def _finish_exchange(self) -> list[list[int]] | None:
        mine, self._pending = self._pending, None
        return None if mine is None else self.peers(mine)

    def repair(self, world: Any, snapshots: Any) -> bool:
        """Stands for ``repair``: what arrives is in the spare snapshot, which is current then."""
        if self.arriving is None:
            return False
        snapshots.spare.buffer.copy_from([])
        snapshots.spare.skeleton, snapshots.spare.objects, snapshots.spare.put_back = self.arriving, None, None
        snapshots.spare.told = self.told
        snapshots.switch()
        return True


@contextmanager
def on_stage() -> Iterator[Stage]:
    """Make this process a worker of a staged job."""
    stage = Stage()
    job, repair = current_job(), copies.repair
    enter_job(stage)  # type: ignore[arg-type]
    copies.repair = stage.repair  # type: ignore[assignment]
    try:
        yield stage
    finally:
        enter_job(job)
        copies.repair = repair
        for hook in training_code._hooks:
            hook.remove()
        training_code._hooks.clear()


@contextmanager
def on_writing_stage() -> Iterator[Stage]:
    """The same, for tests that give the job a writer of durable checkpoints, whose thread ends here."""
    with on_stage() as stage:
        yield stage
        if stage.checkpoints is not None:
            stage.checkpoints._pool.shutdown()
