"""Job: a worker's side of a job, with one control connection and a succession of worlds."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.fault_points import Point
from spark_elastic.worker import faults
from spark_elastic.worker.control import ControlClient
from spark_elastic.worker.from_first import broadcast_from_first
from spark_elastic.worker.reporting import Reporter
from spark_elastic.worker.runtime import REAL_RUNTIME, Runtime
from spark_elastic.worker.world import World

if TYPE_CHECKING:
    from spark_elastic.checkpoint.writer import CheckpointWriter
    from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
    from spark_elastic.worker.state.base import State


class Job:
    """The worker's side of a job: one control connection and a succession of worlds. Used by the user's thread."""

    def __init__(
        self,
        control: ControlClient,
        worker: int,
        address: str,
        form_timeout: float,
        max_np: int,
        checkpoints: CheckpointWriter | None = None,
        is_fixed: bool = False,
        runtime: Runtime = REAL_RUNTIME,
    ) -> None:
        self.control = control
        # Whether one world spans the whole of the user's function, as under run(elastic=False).
        self.is_fixed = is_fixed
        # The largest number of ranks that a world of this job may have.
        self.max_np = max_np
        self.reporter = Reporter(control.report, runtime.clock, runtime.gpu)
        self.checkpoints = checkpoints
        self.world: World | None = None
        self._last_world: World | None = None
        # The state with which the elastic function was called.
        self.state: State | None = None
        self.finished = False
        self._worker = worker
        self._address = address
        self._form_timeout = form_timeout
        self._runtime = runtime
        self._entered = False
        # The wrapped models in the order in which they were made, which is the same on all ranks.
        self._models: list[weakref.ref[DistributedDataParallel]] = []

    @property
    def worker(self) -> int:
        """The number of this worker in the job."""
        return self._worker

    @property
    def clock(self) -> Callable[[], float]:
        """A clock in seconds that never goes back."""
        return self._runtime.clock

    @property
    def address(self) -> str:
        """The address at which other workers reach this one."""
        return self._address

    def enter_elastic(self) -> None:
        """Note that the one elastic function of the job has been called."""
        if self._entered:
            raise SparkElasticError(
                "a job has one elastic function, and it has been called already; put everything that should be elastic into it"
            )
        self._entered = True
        faults.reached(Point.READY)

    def next_world(self, reason: str) -> World:
        """Wait for the next generation and connect. Raises ``WorkerLostError`` if that generation ends before it has begun.

        ``reason`` says why the last generation ended; it is empty after a planned interrupt and at the beginning.
        """
        order = self.control.ready(reason)
        self.leave_world()
        self.world = World(self.control, order, self._worker, self._address, self._form_timeout, self._runtime)
        self.world.form()
        return self.world

    def leave_world(self) -> None:
        """End the use of the last generation's process group, and free the group of the generation before that."""
        if self.world is None:
            return
        for model in self.models:
            model.detach()
        self.world.close()
        if self._last_world is not None:
            self._last_world.drop()
        self._last_world = self.world

    @property
    def models(self) -> list[DistributedDataParallel]:
        """The wrapped models of this process."""
        return [model for model in (ref() for ref in self._models) if model is not None]

    def finish(self) -> None:
        """Note that all ranks have left the elastic function. From now on each rank calls its models alone, without a world.

        Blocks while a last durable checkpoint is still being written by all ranks.
        """
        self.finished = True
        if self.checkpoints is not None:
            self.checkpoints.complete()
        for model in self.models:
            model.detach()

    def attach_models(self) -> None:
        """Connect every wrapped model to the present world."""
        assert self.world is not None
        models = self.models
        for model in models:
            model.attach(self.world)
        if models:
            models[0].compare(models)

    def add_model(self, model: DistributedDataParallel) -> None:
        """Add a wrapped model, to be attached to each world of this job."""
        if self.world is not None and self.is_fixed:
            # As torch's DistributedDataParallel does when it is created.
            broadcast_from_first(itertools.chain(model.parameters(), model.buffers()))
            model.attach(self.world)
        elif self.finished:
            raise SparkElasticError(
                "a model is wrapped for training, and the elastic function has ended, of which a job has one, called once: loop "
                "over folds or stages within it, or call run() for each"
            )
        elif self.world is not None:
            raise SparkElasticError(
                "wrap the model above the elastic function and give it to the State: ranks that enter a world together have "
                "to start from the same weights"
            )
        self._models.append(weakref.ref(model))


_job: Job | None = None


def current_job() -> Job | None:
    """Return the job of this process; None outside a job."""
    return _job


def present_world() -> World | None:
    """Return the world of this process's job; None outside a job, before its first generation, and once it has finished."""
    return None if _job is None or _job.finished else _job.world


def enter_job(job: Job | None) -> None:
    """Make ``job`` the job of this process, or remove it with None. A worker process keeps one job to its end."""
    global _job
    _job = job
