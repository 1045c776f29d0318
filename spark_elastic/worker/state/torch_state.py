"""TorchState: the state of a training job."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from spark_elastic.errors import SparkElasticError, StateLostError, WorkerLostError
from spark_elastic.worker.checks.fingerprint import Named
from spark_elastic.worker.checks.training_code import TrainingChecks, find_optimizers
from spark_elastic.worker.job import Job, current_job
from spark_elastic.worker.reporting import Values
from spark_elastic.worker.state.base import ObjectState, State
from spark_elastic.worker.state.in_place import StepGuard, WholeCopies, is_kept_in_place, small_part
from spark_elastic.worker.state.repair import plan_repair
from spark_elastic.worker.state.snapshot import Lender, Snapshot, SnapshotPair, find_objects, has_state_dict
from spark_elastic.worker.world import World

# What is asked of a loader, where it has it.
_LOADER = ("state_dict", "set_world", "batch_rows", "report", "confirm", "epoch")


class TorchState(ObjectState):
    """The state of a training job: models, optimizers, schedulers, a loader, random number generators, and any objects.

    ``model``, ``optimizer`` and ``scheduler`` are ordinary objects with a state dict; more of them may be given under other
    names. The ``loader`` goes on from the last commit after a reset, with this rank's new share of the rows, and tells the
    wrapped models how many rows each rank has. Random number generators (Python, NumPy, torch, CUDA) are each rank's own:
    saved with commits, never sent; a newcomer's, and those of a job that
    goes on from a durable checkpoint, are derived from (``torch.initial_seed()``, attempt, generation, rank).

    ``commit="copy"`` keeps two copies of the state on the device that it is on; ``commit="host"`` keeps them in pinned host
    memory instead, for states that leave a GPU too little room. On a GPU neither is waited for before the next commit, see
    ``pending_copy.py``. ``commit="in_place"`` keeps none of weights and optimizer
    state, for loops with exactly one optimizer step per commit; see ``in_place.py`` for the rule that it rests on. There must
    be no collective, and no other change of weights, between the optimizer's step and the commit: if all ranks are lost or
    caught between these two, so is the state.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        loader: Any = None,
        commit: str = "copy",
        local: str | Iterable[str] | Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        if commit not in ("copy", "host", "in_place"):
            raise ValueError(f"commit must be one of copy, host, in_place, not {commit!r}")
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        for name, value in (("optimizer", optimizer), ("scheduler", scheduler)):
            if value is not None and not has_state_dict(value):
                raise TypeError(
                    f"{name} must have state_dict and load_state_dict, which {type(value).__name__} has not"
                )
        if loader is not None and not any(hasattr(loader, name) for name in _LOADER):
            raise TypeError(
                f"loader must have a position, as those of spark_elastic.data do; {type(loader).__name__} has none"
            )
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        super().__init__(local=local, **{name: value for name, value in given.items() if value is not None}, **objects)
        self._snapshots = SnapshotPair(on_host=commit == "host")
        self._guard = StepGuard(self._check_world) if commit == "in_place" else None
        self._checks: TrainingChecks | None = None
        if current_job() is None:
            self._keep_first()

    def commit(self, durable: bool = False) -> None:
        """Save, then check for changes of the world."""
        if self._checks is not None:
            self._checks.before_commit()
        super().commit(durable)
        for model in [] if self._job is None else self._job.models:
            model.forget_rows()

    commit.__doc__ = State.commit.__doc__

    def save(self) -> None:
        """Copy the objects."""
        super().save()
        if self._guard is not None:
            # The weights have changed: there is no commit before this one to go back to.
            self._settle()
            self._guard.dirty = False

    def restore(self) -> None:
        """Put the objects back to the last commit, or on to the next one that others have made."""
        if self._guard is not None and self._guard.dirty:
            if self._job is None:
                raise SparkElasticError(
                    'commit="in_place" keeps no copy to restore once the optimizer has made its step; use commit="copy"'
                )
            # The weights are of no commit; a holder of the newest one sends it.
            self._job.control.commit = None
        super().restore()

    save.__doc__, restore.__doc__ = ObjectState.save.__doc__, ObjectState.restore.__doc__

    def _begin(self, job: Job | None) -> None:
        if self._guard is not None:
            objects = find_objects(self._values(shared=True))
            self._guard.watch(value for value in objects.values() if isinstance(value, torch.optim.Optimizer))
        super()._begin(job)
        if job is not None and job.world is not None:
            if self._checks is None:
                self._checks = TrainingChecks(self, job)
            self._checks.begin()

    def _compared(self) -> Named:
        names = self._parameter_names()
        objects = find_objects(self._values(shared=True)).values()
        compared: list[tuple[str, torch.Tensor]] = [
            (names[id(parameter)], parameter)
            for value in objects
            if isinstance(value, torch.nn.Module)
            for parameter in value.parameters()
        ]
        for optimizer in find_optimizers(self._values(shared=True)):
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                of = names.get(id(parameter), f"parameter {number} of a {type(optimizer).__name__}")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        compared.append((f"{key} of {of}", value))
                    elif key == "step":
                        compared.append((f"{key} of {of}", torch.tensor(float(value))))
        return sorted(compared, key=lambda named: named[0])

    def _parameter_names(self) -> dict[int, str]:
        """What the parameters of the State's modules are called, by their ids."""
        names: dict[int, str] = {}
        for place, value in find_objects(self._values(shared=True)).items():
            if isinstance(value, torch.nn.Module):
                for name, parameter in value.named_parameters():
                    names.setdefault(id(parameter), f"state.{place}.{name}")
        return names

    def _check_world(self) -> None:
        """Ahead of an optimizer's step in place: a reduction of this step may have failed, and the user not have noticed."""
        world = self._world
        if world is not None:
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()
            if world.is_broken():
                raise WorkerLostError(f"generation {world.generation} is broken")

    def _durable_copies(self) -> Lender:
        return self._snapshots if self._guard is None else WholeCopies(self._snapshots, self._copy_whole)

    def _leave(self, world: World) -> None:
        if self._has_stepped_in_place():
            raise SparkElasticError(
                'commit="in_place": the function returned after an optimizer step without a commit(); commit after each'
            )
        super()._leave(world)
        if self._checks is not None:
            self._checks.before_return()
            self._checks.end()

    def _copy_whole(self) -> Snapshot:
        """Copy everything, weights and optimizer state included, as of the last commit."""
        whole = Snapshot()
        light: Any = {} if self._snapshots.is_empty else self._snapshots.current.skeleton
        size = light.get("size", self._restored_size)
        whole.take({"steps": self._steps, "size": size, "objects": self._values(shared=True)}, None)
        return whole

    def _has_stepped_in_place(self) -> bool:
        return self._guard is not None and self._guard.dirty

    def _keep(self, value: Any) -> Any:
        return small_part(value) if self._guard is not None and is_kept_in_place(value) else super()._keep(value)

    def _restore_durable(self, world: World) -> int:
        size = super()._restore_durable(world)
        if not size and self._has_stepped_in_place():
            raise StateLostError(
                'commit="in_place": all ranks were caught between optimizer step and commit, and there is no durable '
                'checkpoint (see checkpoint=, or use commit="copy")'
            )
        return size

    def _copies_for_repair(self, world: World) -> SnapshotPair:
        if self._guard is None:
            return super()._copies_for_repair(world)
        copies = SnapshotPair()
        plan = plan_repair([member.commit for member in world.members])
        if world.rank in plan.source.values():
            copies = SnapshotPair(self._copy_whole())
        return copies

    def _receive(self, copies: SnapshotPair, world: World) -> None:
        super()._receive(copies, world)
        if self._guard is not None:
            # What is small is kept from here on, as if this rank had committed it.
            self._take(self._steps, world.previous_size)
            self._snapshots.switch()
            self._guard.dirty = False

    def _enter_world(self, rank: int, size: int) -> None:
        objects = find_objects(self._values(shared=True) | self._values(shared=False))
        for value in {id(value): value for value in (*vars(self).values(), *objects.values())}.values():
            if hasattr(value, "set_world"):
                value.set_world(rank, size)
        # Wherever in the State they are: what a model is given says which batch it works on.
        loader: Any = vars(self).get("loader")
        for model in [] if self._job is None else self._job.models:
            model.follow_rows(loader if hasattr(loader, "batch_rows") else None)

    def _check_models(self, job: Job) -> None:
        kept = {
            id(parameter)
            for value in find_objects(self._values(shared=True) | self._values(shared=False)).values()
            if isinstance(value, torch.nn.Module)
            for parameter in value.parameters()
        }
        for model in job.models:
            parameters = list(model.parameters())
            if parameters and not any(id(parameter) in kept for parameter in parameters):
                raise SparkElasticError(
                    f"a DistributedDataParallel around {type(model.module).__name__} is not in the State; put it there, or "
                    "nobody keeps its weights equal and gives them to newcomers"
                )

    def _progress(self) -> Values:
        loader: Any = vars(self).get("loader")
        if not all(hasattr(loader, name) for name in ("epoch", "rows_processed", "rows_total")):
            return {}
        return {"epoch": loader.epoch, "rows": loader.rows_processed, "rows_total": loader.rows_total}

    def _loader_report(self) -> Sequence[int]:
        loader: Any = vars(self).get("loader")
        return loader.report() if hasattr(loader, "report") else super()._loader_report()

    def _confirm_loader(self, reports: list[tuple[int, ...]]) -> None:
        loader: Any = vars(self).get("loader")
        if hasattr(loader, "confirm"):
            loader.confirm(reports)

    def _own_part(self) -> Any:
        return super()._own_part(), _random_states()

    def _load_own(self, own: Any) -> None:
        if own is None:  # received, and not sealed yet
            return
        values, random_states = own
        super()._load_own(values)
        _set_random_states(random_states)

    def _own_as_newcomer(self, world: World) -> None:
        attempt = self._job.checkpoints.attempt if self._job is not None and self._job.checkpoints is not None else 0
        seeds = numpy.random.SeedSequence([torch.initial_seed() % 2**64, attempt, world.generation, world.rank])
        first, second, third = (int(word) for word in seeds.generate_state(3, numpy.uint32))
        random.seed(first)
        numpy.random.seed(second)
        torch.manual_seed(third)


def _random_states() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def _set_random_states(states: tuple[Any, ...]) -> None:
    python, numeric, cpu, cuda = states
    random.setstate(python)
    numpy.random.set_state(numeric)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
