"""What the simulated users run: a model that is its own history, over real trackers, orders and plans.

The weights name a node in the simulation's ledger, which says which weights came before and which rows were trained on since.
So equal weights mean equal histories, and the rows of a job can be counted at its end.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from simulation.world import threads
from simulation.world.gpu import GpuCopy
from spark_elastic.data.loader import PositionedLoader
from spark_elastic.data.order import EpochOrder, OrderSpec
from spark_elastic.data.plan import BatchPlan, Step, draw
from spark_elastic.data.stopwatch import Stopwatch
from spark_elastic.data.tracker import RowGroupTracker
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.elastic import elastic
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer
from spark_elastic.worker.state.commits import Commits
from spark_elastic.worker.state.keepers.in_place import InPlace
from spark_elastic.worker.state.keepers.sharded import Sharded
from spark_elastic.worker.state.pace import Pace
from spark_elastic.worker.state.torch_state import TorchState

Tickets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dataset:
    """The rows of each row group, and the order and batches in which they are trained on."""

    rows: tuple[int, ...]
    lanes: int
    per_worker: int | None
    overall: int | None

    @property
    def total(self) -> int:
        return sum(self.rows)

    def tracker(self) -> Tracker:
        spec = OrderSpec(seed=1, shuffle=self.lanes > 1, lanes=self.lanes, window=8, mix=self.lanes > 1)
        return Tracker(
            self,
            np.array(self.rows, np.int64),
            spec,
            BatchPlan(self.per_worker, self.overall, balance="auto" if self.overall else None),
        )


@functools.lru_cache(maxsize=100_000)
def deliveries(
    data: Dataset, epoch: int, position: int, size: int, rank: int, shares: tuple[int, ...]
) -> tuple[tuple[Step, int, Tickets], ...]:
    """Return what a rank gets from a position to the epoch's end: steps, sums of tickets, and the tickets that count."""
    tracker = data.tracker()
    tracker.set_world(rank, size)
    if shares:
        tracker.divide(shares)
    steps = tracker.upcoming(position, data.total)
    drawn = draw(_order(data, epoch), steps, rank)
    tickets = (drawn.positions * data.lanes + drawn.lanes).tolist()
    found = []
    for number, step in enumerate(steps):
        own = tickets[drawn.offsets[number] : drawn.offsets[number + 1]] if step.rank_rows[rank] else ()
        found.append((step, drawn.ticket_sums[number], tuple(own)))
    return tuple(found)


@functools.lru_cache(maxsize=1000)
def _order(data: Dataset, epoch: int) -> EpochOrder:
    tracker = data.tracker()
    return EpochOrder(tracker.rows, epoch, tracker.spec)


class Tracker(RowGroupTracker):
    """The tracker, with the order of epochs from a cache: all workers and many simulations have the same orders."""

    def __init__(self, data: Dataset, rows: np.ndarray, spec: OrderSpec, plan: BatchPlan) -> None:
        super().__init__(rows, spec, plan)
        self._data = data

    @property
    def order(self) -> EpochOrder:
        return _order(self._data, self.epoch)


class _Chance(Stopwatch):
    """Draws the times of steps at random, so that shares and sizes change often."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._own, self._all = random.Random(number), random.Random(f"period {number}")

    def microseconds(self) -> int:
        return self._own.choice([0, 1000, 1000, 1000, 5000, 5000])

    def period(self) -> int:
        return self._all.choice([6000, 9000])


class Loader(PositionedLoader[Tickets]):
    def __init__(self, data: Dataset) -> None:
        super().__init__(data.tracker(), {"kind": "simulated"}, None)
        self._data = data
        self._stopwatch = _Chance(threads.current().process.number)

    @contextmanager
    def _open(self) -> Iterator[Iterator[tuple[Step, int, Tickets]]]:
        tracker = self._tracker
        yield iter(deliveries(self._data, tracker.epoch, tracker.position, tracker.size, tracker.rank, tracker.shares))


class Model(torch.nn.Module):
    """Holds the weights. Torch's own machinery is left out for speed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = 0

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {"weights": self.weights}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        self.weights = state_dict["weights"]

    def parameters(self, recurse: bool = True) -> Any:
        return iter(())

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(())

    def named_buffers(self, *_: Any, **__: Any) -> Any:
        return iter(())

    def modules(self, remove_duplicate: bool = True) -> Any:
        return iter(())

    def named_modules(self, *_: Any, **__: Any) -> Any:
        return iter(())

    def buffers(self, recurse: bool = True) -> Any:
        return iter(())

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class SlicedModel(Model):
    """Has the weights in every element of a parameter, so that a missing or outdated slice shows."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.tensor = torch.zeros(7, dtype=torch.int64)

    @property
    def weights(self) -> int:
        found = set(self.tensor.tolist())
        if len(found) > 1:
            raise SparkElasticError(f"the weights are put together from {found}")
        return int(self.tensor[0])

    @weights.setter
    def weights(self, weights: int) -> None:
        self.tensor.fill_(weights)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {"weights": self.tensor}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        self.tensor.copy_(state_dict["weights"])

    def parameters(self, recurse: bool = True) -> Any:
        return iter((self.tensor,))

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter((("weights", self.tensor),))


class Optimizer(torch.optim.Optimizer):
    def __init__(self, model: Model) -> None:
        self.param_groups: list[Any] = []
        self.state: Any = {}
        self._model = model
        self._hooks: OrderedDict[int, Any] = OrderedDict()

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def step(self, weights: int) -> None:  # type: ignore[override]
        for hook in self._hooks.values():
            hook(self, (), {})
        self._model.weights = weights

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class DividedOptimizer(ZeroRedundancyOptimizer):
    """Has the weights in the state of each of its parameters, so that a missing or outdated state shows."""

    def __init__(self, model: Model) -> None:
        sizes = (3, 2, 2, 1, 1, 1)
        parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.int64), False) for size in sizes]
        super().__init__(parameters, torch.optim.SGD, lr=1.0)
        self._model = model

    def step(self, weights: int) -> None:  # type: ignore[override]
        mine = [parameter for number, parameter in enumerate(self.parameters) if self._is_mine(number)]
        known = {
            int(value) for parameter in mine if parameter in self.state for value in self.state[parameter]["known"]
        }
        has_all = len(self.state) == len(mine) if self._model.weights else not self.state
        if not has_all or known - {self._model.weights}:
            raise SparkElasticError(f"the optimizer knows {known} of {len(self.state)} parameters, not {len(mine)}")
        self.state.update({parameter: {"known": torch.full_like(parameter, weights)} for parameter in mine})
        self._model.weights = weights


class _Pace(Pace):
    """Counts less, because the generations of simulated jobs are short."""

    first, seconds = 1, 1000.0

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        super().__init__(clock)
        self.most = most


class _Commits(Commits):
    """Tells the invariants of each commit that a rank holds."""

    def __init__(self, state: State) -> None:
        super().__init__(state._keeper)
        self._state = state
        process = state._process
        # Ranks would choose differently if they did not agree.
        most = process.simulation.schedule.job.commits_per_exchange + process.number % 3
        self.pace = functools.partial(_Pace, most=most)

    def settle(self) -> None:
        is_settled = self._is_settled
        super().settle()
        if is_settled:
            return
        state: Any = self._state
        kept = state._keeper.current.skeleton["objects"]
        is_whole = not isinstance(state._keeper, (InPlace, Sharded))
        weights = kept["model"].content["weights"] if is_whole else state.model.weights
        state._process.simulation.invariants.committed(state._process, weights, kept["loader"].content)


class State(TorchState):
    """A ``TorchState`` that tells the invariants of its commits, and has no random numbers to keep."""

    def __init__(self, **objects: Any) -> None:
        super().__init__(**objects)
        self._process = threads.current().process

        self._commits = _Commits(self)

    def sync(self) -> None:
        self._process.is_new = False
        super().sync()

    def _receive(self, arrived: Any, world: Any) -> None:
        super()._receive(arrived, world)
        self._process.is_new = self._process.holds is None
        if not self._keeper.is_joint:
            self._process.simulation.invariants.synced(self._process)

    def save(self) -> None:
        super().save()
        # Only commits are copied behind reductions; rank 0's initial state is not.
        job = self._process.simulation.schedule.job
        if job.on_gpu:
            keeper: Any = self._keeper
            spare = keeper.snapshots.spare
            spare.pending = GpuCopy(self._process, spare, job.step_seconds)

    def _own_part(self) -> Any:
        return None

    def _own_as_newcomer(self, world: Any) -> None: ...


def train() -> int:
    """The user's function; returns the weights."""
    process = threads.current().process
    simulation = process.simulation
    config = simulation.schedule.job
    process.pause(0.0, 0.2)
    model = SlicedModel() if config.redundancy else Model()
    state = State(
        model=model,
        optimizer=DividedOptimizer(model) if config.is_divided else Optimizer(model),
        loader=Loader(config.data),
        epoch=0,
        commit="in_place" if config.in_place else "sharded" if config.in_slices else "copy",
        redundancy=config.redundancy or 1,
    )
    state.register_reset_callbacks([lambda old, new: process.reached("CALLBACK")])
    process.state = state

    @elastic
    def run(state: Any) -> None:
        while state.epoch < config.epochs:
            for tickets in state.loader:
                process.reached("STEP")
                process.pause(config.step_seconds * 0.5, config.step_seconds)
                weights = _reduce(process, state, tickets)
                process.reached("REDUCED")
                state.optimizer.step(weights)
                process.reached("STEPPED")
                if config.reduces_metrics or config.is_divided:  # which waits for the weights of all others
                    process.group.reduce(state.model.weights).wait()
                state.commit()
            state.epoch += 1
            state.loader.set_epoch(state.epoch)
            for _ in range(config.commits_of_epoch):
                state.commit()

    run(state)
    return model.weights


def _reduce(process: Any, state: Any, tickets: Tickets) -> int:
    """All-reduce a step, and return the weights after it, the same on every rank."""
    loader = state.loader
    where = (loader.epoch, loader.rows_processed, state.model.weights)
    try:
        gathered: dict[int, Any] = process.group.reduce((where, tickets)).wait()
    except RuntimeError:
        if not process.simulation.schedule.job.swallows_errors:
            raise
        gathered = {loader.rows_total: (where, tickets)}  # gradients of this rank alone
    if any(value[0] != where for value in gathered.values()):
        raise SparkElasticError(f"ranks take different steps: {gathered}")
    rows = tuple(ticket for value in gathered.values() for ticket in value[1])
    weights: int = process.simulation.ledger.weights_after(state.model.weights, loader.epoch, rows)
    return weights
