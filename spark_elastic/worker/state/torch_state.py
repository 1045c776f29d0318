"""TorchState: the state of a training job."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from spark_elastic.data.loader import Accountable, Countable, RowSource, TakesWorld, has_part, shards_of_loader
from spark_elastic.data.randomness import seed_all
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.checks.fingerprint import BUFFER, Named
from spark_elastic.worker.checks.outside_a_job import checked_outside
from spark_elastic.worker.checks.plain_loaders import PlainLoaders
from spark_elastic.worker.checks.reachable import find_optimizers
from spark_elastic.worker.checks.training_code import TrainingChecks
from spark_elastic.worker.checks.unsupported import why_unsupported
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.job import Job, current_job
from spark_elastic.worker.module_registers import non_persistent_buffers, stepped
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer, find_divisible
from spark_elastic.worker.shards.sharding import Sharding
from spark_elastic.worker.state.keepers import Keeper, keeper_maker
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.snapshot import find_objects, find_trained_tensors, has_state_dict
from spark_elastic.worker.state.structure import names_of_parameters

# What may be left out, and is None then.
_OPTIONAL = frozenset({"model", "optimizer", "scheduler", "loader"})
# A loader in a State has a state dict, or one of these parts.
_PARTS_OF_LOADERS = (TakesWorld, RowSource, Accountable, Countable)


class TorchState(ObjectState):
    """The state of a training job: models, optimizers, schedulers, a loader, random numbers, and any objects.

    Args:
        model, optimizer, scheduler: ordinary objects with a state dict; more of them may be given under other names.
        loader: continues from the last commit after a reset, with this rank's new share of the rows, and tells the wrapped
            models how many rows each rank has. For another library's loader, such as torchdata's ``StatefulDataLoader``, the
            position is kept, also under another name; a warning says what the loader itself has to take care of.
        commit: where commits are kept: "copy" on the device, "host" in pinned memory of the host, "in_place" without copies of
            weights and optimizer state, "sharded" in slices on all ranks.
        local: the name or names of objects that belong to each rank and are never sent, or a dict of such objects.
        redundancy: with slices, how many neighbours in the ring of ranks may be lost at once, 1 or 2.
        objects: everything else in the state, by names that become attributes, such as ``epoch=0``.

    Random numbers are kept as ``ObjectState`` says.

    ``commit="copy"`` keeps two copies of the state on the device where it is; ``commit="host"`` keeps them in pinned host
    memory instead, for states that leave a GPU too little room. On a GPU a copy is waited for only at the next commit (see
    ``pending_copy.py``). ``commit="in_place"`` keeps no copy of weights and optimizer state, for loops with exactly one
    optimizer step per commit; ``keepers/in_place.py`` explains the rule that makes this safe. There must be no collective, and
    no other change of weights, between the optimizer's step and the commit: if all ranks are lost or interrupted between the
    two, the state is lost.

    ``commit="sharded"`` keeps weights and optimizer state in slices: each of N ranks copies slice r and the ``redundancy`` next
    ones (1 by default, or 2), and after a loss the survivors gather what they lack. Up to ``redundancy`` neighbours in the ring
    of ranks may be lost at once. If more are, the state is lost, or comes back from the durable checkpoint (see
    ``keepers/sharded.py``).

    A ``ZeroRedundancyOptimizer`` works with all of these. A commit keeps this rank's parts of its state, so again up to
    ``redundancy`` neighbours may be lost at once. ``"copy"`` and ``"host"`` copy everything else; ``"in_place"`` then keeps
    slices, as ``"sharded"`` does (see ``keepers/divided.py``).
    """

    # Torch's DataLoaders that existed when the elastic function was called.
    _plain_loaders: PlainLoaders | None = None
    # What checks the training function.
    _training_checks: type[TrainingChecks] = TrainingChecks
    _looks_at_training = True

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: object = None,
        loader: object = None,
        commit: str = "copy",
        local: str | Iterable[str] | Mapping[str, object] | None = None,
        redundancy: int = 1,
        **objects: object,
    ) -> None:
        """Choose how commits are kept, then set the objects as ``ObjectState`` does.

        Raises ``TypeError`` for a ``model`` that is not a module, for an ``optimizer`` or ``scheduler`` without a state dict,
        for several of them in one argument and for a ``loader`` without a position, ``ValueError`` for an unknown ``commit`` or
        ``redundancy``, and whatever ``ObjectState`` raises.
        """
        self._keeper_class, self._redundancy = self._keeper_maker(commit, redundancy), redundancy
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        for name, value in given.items():
            if isinstance(value, type):
                raise TypeError(f"{name} must be an object, not the class {value.__name__}: write {value.__name__}(…)")
            if isinstance(value, (list, tuple, dict)) and name != "loader" and not has_state_dict(value):
                raise TypeError(
                    f"{name} must be one object, not a {type(value).__name__}: give each of several a name of its own, as in "
                    f"TorchState({name}=…, {name}_2=…)"
                )
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        for name, value in (("optimizer", optimizer), ("scheduler", scheduler)):
            if value is not None and not has_state_dict(value):
                raise TypeError(
                    f"{name} must have state_dict and load_state_dict, which {type(value).__name__} does not have"
                )
        if not (loader is None or has_state_dict(loader) or any(has_part(loader, part) for part in _PARTS_OF_LOADERS)):
            raise TypeError(
                f"loader must have a position, as those of spark_elastic.data do; {type(loader).__name__} has none. Give a "
                "dataset to ElasticDataLoader instead of torch's DataLoader; for streams, torchdata's StatefulDataLoader has one"
            )
        super().__init__(local=local, **{name: value for name, value in given.items() if value is not None}, **objects)
        if redundancy != 1 and not self._keeper.is_joint and not find_divisible(self._values(shared=True)):
            raise ValueError(
                f'redundancy={redundancy} is for commit="sharded" and for a ZeroRedundancyOptimizer; with commit="{commit}" each '
                "rank holds the whole state"
            )
        for place, each in find_objects(self._values(shared=True)).items():
            if (place == "loader" or _is_loader(each)) and not has_part(each, TakesWorld):
                warnings.warn(_what_is_kept_of(place, each), stacklevel=2)

    def __getattr__(self, name: str) -> Any:
        """Return None for a model, optimizer, scheduler or loader that was not given. Raises AttributeError for others."""
        if name in _OPTIONAL:
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _keeper_maker(self, commit: str, redundancy: int) -> Callable[[], Keeper]:
        """Return a factory of keepers for this state's commits."""
        return keeper_maker(commit, redundancy)

    def _prepare(self) -> None:
        super()._prepare()
        self._plain_loaders = PlainLoaders()

    def commit(self, durable: bool = False) -> None:
        """Make a commit, as ``State.commit`` does. With ``shards=``, all ranks draw the same random numbers afterwards."""
        super().commit(durable)
        self._seed_by_place()

    def check_host_updates(self) -> None:
        """Check whether the world changes, as ``State.check_host_updates`` does, and draw random numbers as after a commit."""
        super().check_host_updates()
        self._seed_by_place()

    def _begin(self, job: Job | None) -> None:
        super()._begin(job)
        if job is not None and job.world is not None:
            if self._checks is None:
                # In a fixed world, code knows its rank from the first line on, and may divide its data accordingly.
                self._checks = self._training_checks(self, job, None if job.is_fixed else self._plain_loaders)
            self._checks.begin()

    def _compared(self) -> Named:
        shared = self._values(shared=True)
        optimizers = find_optimizers(shared)
        names = self._trained_names(optimizers)
        compared = list(names.values())
        for optimizer in optimizers:
            if isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer.division is not None:
                continue  # each rank holds the state of different parameters
            for number, parameter in enumerate(stepped(optimizer)):
                of = names[id(parameter)][0] if id(parameter) in names else _number_in(optimizer, number)
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        compared.append((f"{key} of {of}", value))
                    elif key == "step":
                        compared.append((f"{key} of {of}", torch.tensor(float(value))))
        if shards_of_loader(self._loader_in_use()) is not None:
            compared += self._kept_buffers()
        return sorted(compared, key=lambda named: named[0])

    def _trained_names(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, tuple[str, torch.Tensor]]:
        """Return the parameters of the State's modules, and other tensors that train, with names, by id."""
        shared, own = self._values(shared=True), self._values(shared=False)
        names = self._parameter_names()
        found: dict[int, tuple[str, torch.Tensor]] = {
            id(parameter): (names[id(parameter)], parameter) for parameter in _parameters_in(shared)
        }
        beside = [(f"state.{place}", tensor) for place, tensor in find_trained_tensors(shared).items()]
        for optimizer in optimizers:
            beside += [(_number_in(optimizer, number), each) for number, each in enumerate(stepped(optimizer))]
        of_this_rank = set(map(id, (*_parameters_in(own), *find_trained_tensors(own).values())))
        for name, tensor in beside:
            if id(tensor) not in of_this_rank:
                found.setdefault(id(tensor), (name, tensor))
        return found

    def _kept_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that commits keep, with names. With shards, they are equal on all ranks."""
        for place, value in find_objects(self._values(shared=True)).items():
            if isinstance(value, torch.nn.Module):
                left_out = non_persistent_buffers(value)
                for name, buffer in value.named_buffers():
                    if name not in left_out and why_unsupported(buffer) is None:
                        yield f"{BUFFER} state.{place}.{name}", buffer

    def _parameter_names(self) -> dict[int, str]:
        """Return the names of the parameters of the State's modules, by the parameters' ids."""
        names = names_of_parameters(find_objects(self._values(shared=True)))
        return {number: f"state.{found[0]}" for number, found in names.items()}

    def _enter_world(self, rank: int, size: int) -> None:
        super()._enter_world(rank, size)
        objects = find_objects(self._values(shared=True) | self._values(shared=False))
        # The models, wherever they are in the State, work on the batches of its one loader.
        loader = self._loader_in_use()
        job = current_job()
        wrapped = [value for value in objects.values() if isinstance(value, DistributedDataParallel)]
        models = wrapped if job is None else job.models
        shards = shards_of_loader(loader)
        if shards is not None:
            self._refuse_with_shards(shards, size if job is None else job.max_np)
        sharding = None if shards is None else Sharding(models, shards, None if job is None else job.world)
        for model in models:
            model.follow_rows(loader if has_part(loader, RowSource) else None)
            model.shard(sharding)
        self._seed_by_place()

    def _seed_by_place(self) -> None:
        """With ``shards=``, seed all generators by the loader's position, so that all ranks draw alike until the next loop.

        This holds in an undisturbed world, after a loss, and after a durable checkpoint, which holds no generator states.
        """
        loader = self._loader_in_use()
        if shards_of_loader(loader) is not None:
            seed_all(loader.place)  # type: ignore[attr-defined]  # only our own loaders have shards

    def _checked_outside(self) -> AbstractContextManager[None]:
        return checked_outside(self)

    def _refuse_with_shards(self, shards: int, max_np: int) -> None:
        """Refuse worlds that may have more workers than shards, and callbacks that make training depend on the world's size."""
        if shards < max_np:
            raise SparkElasticError(
                f"shards={shards} are too few for max_np={max_np} workers, each of which computes whole shards; give shards= at "
                "least max_np"
            )
        if any(getattr(callback, "looks_at_size", False) for callback in self._reset_callbacks):
            raise SparkElasticError(
                f"scale_learning_rate has the learning rate follow the size of the world, on which nothing depends with "
                f"shards={shards}; leave the callback out"
            )

    def _tell_of_reset(self, previous_size: int, size: int) -> None:
        """Run the callbacks. With ``shards=``, refuse what they change of how optimizers train: a quiet run would not."""
        shards = shards_of_loader(self._loader_in_use())
        optimizers = [] if shards is None else find_optimizers(self._values(shared=True))
        before = [_settings(optimizer) for optimizer in optimizers]
        super()._tell_of_reset(previous_size, size)
        if shards is not None and {*map(id, optimizers)} != {*map(id, find_optimizers(self._values(shared=True)))}:
            raise SparkElasticError(
                f"a reset callback or on_reset has replaced an optimizer, and with shards={shards} nothing may depend on the "
                "size of the world or on its resets; leave that out"
            )
        for optimizer, settings in zip(optimizers, before, strict=True):
            if changed := _first_difference(settings, _settings(optimizer)):
                raise SparkElasticError(
                    f"a reset from {previous_size} to {size} workers has changed {changed} of the optimizer "
                    f"{type(optimizer).__name__}, by a reset callback or on_reset, and with shards={shards} nothing may depend "
                    "on the size of the world or on its resets; leave that out"
                )

    def _check_models(self, job: Job) -> None:
        kept = set(map(id, _parameters_in(self._values(shared=True) | self._values(shared=False))))
        for model in job.models:
            parameters = list(model.parameters())
            if parameters and not any(id(parameter) in kept for parameter in parameters):
                raise SparkElasticError(
                    f"a DistributedDataParallel around {type(model.module).__name__} is not in the State, so its weights would "
                    "not be kept equal on all ranks, nor given to newcomers; put it there"
                )


def _parameters_in(tree: Mapping[str, object]) -> list[torch.nn.Parameter]:
    modules = [value for value in find_objects(tree).values() if isinstance(value, torch.nn.Module)]
    return [parameter for module in modules for parameter in module.parameters()]


def _number_in(optimizer: torch.optim.Optimizer, number: int) -> str:
    return f"parameter {number} of a {type(optimizer).__name__}"


def _is_loader(value: object) -> bool:
    """Whether an object with a state dict is what a loop reads batches or rows from."""
    return isinstance(value, Iterable) and not isinstance(value, (torch.nn.Module, torch.utils.data.Sampler, Container))


def _what_is_kept_of(place: str, loader: object) -> str:
    is_shuffled = type(getattr(loader, "sampler", None)).__name__ == "RandomSampler"  # torch's or torchdata's own
    order = (
        " It shuffles, and ranks may come to shuffle differently, even without a loss: with generator= and without worker "
        "processes from the second epoch on, with torch's RandomSampler from the first epoch or the first loss on. Rows then "
        "come twice or not at all: take se.data.ElasticDataLoader(dataset, global_batch_size=…), which shuffles for all ranks."
    )
    return (
        f"state.{place} ({type(loader).__name__}) knows nothing of ranks. Commits keep its position: after a reset survivors go "
        "on from it, and newcomers from that of a survivor. Its rows are neither shared out nor counted: its dataset has to look "
        "at rank() and size() when its first row is asked for, and when the world changes its size, rows of the epoch are left "
        f"out or come twice.{order if is_shuffled else ''} The loaders of spark_elastic.data count each row once. docs/data.md, "
        "Streaming datasets, says more"
    )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Return the settings in an optimizer's groups that it trains by, as plain values."""
    return [
        {name: _copied(group[name]) for name in optimizer.defaults if name in group} for group in optimizer.param_groups
    ]


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(_copied, value)) if isinstance(value, (list, tuple)) else value


def _first_difference(before: list[dict[str, object]], after: list[dict[str, object]]) -> str:
    """Say what has changed in an optimizer's groups; an empty string if nothing has."""
    if len(before) != len(after):
        return "the number of groups"
    for was, now in zip(before, after, strict=True):
        for name in was.keys() & now.keys():
            if was[name] != now[name]:
                return f"{name} ({was[name]} → {now[name]})"
    return ""
