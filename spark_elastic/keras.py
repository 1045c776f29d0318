"""Keras 3 on the torch backend: a state, gradients averaged over ranks, and callbacks that commit.

::

    model.compile(optimizer="adam", loss="mse")
    state = KerasState(model, loader=se.data.ParquetLoader(url, global_batch_size=1024))

    @se.elastic
    def train(state):
        while state.epoch < epochs:
            model.fit(
                Batches(state.loader, lambda batch: (batch["x"], batch["y"])),
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                verbose=0,
                callbacks=[UpdateEpochStateCallback(state), CommitStateCallback(state)],
            )

Each rank runs its own callbacks. Keras begins EarlyStopping and ReduceLROnPlateau anew with each ``fit``, so that in this loop,
with a ``fit`` for each epoch, they never act: count in the state instead, by values that are equal on all ranks, such as averages
over them. Importing this module chooses the torch backend where KERAS_BACKEND is not set. The extra ``keras`` installs Keras.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

from spark_elastic._integers import whole_number
from spark_elastic.data.loader import PositionedLoader, RowSource, has_part, shards_of_loader
from spark_elastic.data.stopwatch import note_gradients
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.fingerprint import Named
from spark_elastic.worker.collectives import allreduce
from spark_elastic.worker.job import current_job, present_world
from spark_elastic.worker.shards.loops import loops
from spark_elastic.worker.shards.parts import Parts
from spark_elastic.worker.shards.sources import Buffer, Sources
from spark_elastic.worker.shards.workspace import Workspace
from spark_elastic.worker.state.keepers import keeper_named
from spark_elastic.worker.state.torch_state import TorchState
from spark_elastic.worker.world import World

__all__ = ["Batches", "CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]

T = TypeVar("T")
# A batch as Keras takes it: (x, y) or (x, y, sample_weight), each of them anything that Keras can nest.
Converted = tuple[Any, ...]

if keras.backend.backend() != "torch":
    raise ImportError(f"spark_elastic.keras needs KERAS_BACKEND=torch, not {keras.backend.backend()}")


class KerasState(TorchState):
    """The state of a Keras model in training: its weights, its optimizer's variables, a loader, and any objects.

    ``model`` has to be built (an Input layer, or ``model.build``), because a newcomer receives the weights before its first
    batch; ``optimizer`` is by default the one that the model was compiled with.

    From then on the optimizer's ``apply`` averages gradients over all ranks, and with them what layers such as
    BatchNormalization remember of their batches. A rank counts by the rows that ``loader`` gave it; without a loader of this
    package all ranks count equally. Inside the elastic function ``apply`` is a collective, so all ranks have to take equally
    many steps. Layers draw random numbers from seeds of each rank's own. The metrics of ``fit`` are not part of the state: they
    cover what this rank has computed since it last entered ``fit``.

    With a ``loader`` that was made with ``shards=``, a step of ``fit`` calls the model's ``train_step`` for each shard that
    this rank computes, and the optimizer once: weights, optimizer and the loss in the logs of ``fit`` have the same bits in a
    world of any size. Other metrics in the logs cover the shards of this rank.

    ``epoch`` and ``batch`` are advanced by the callbacks below. ``commit`` is "copy" or "host"; it and ``local`` are as in
    ``TorchState``.
    """

    epoch: int
    batch: int

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        loader: object = None,
        commit: str = "copy",
        local: str | Iterable[str] | Mapping[str, object] | None = None,
        *,
        epoch: int = 0,
        batch: int = 0,
        **objects: Any,
    ) -> None:
        """Make the optimizer's variables, and take the place of its ``apply`` and of the model's ``train_step``.

        Raises ``ValueError`` for a model that is not built or has no optimizer and for a ``commit`` other than "copy" and
        "host", and what ``TorchState`` raises.
        """
        optimizer = optimizer or getattr(model, "optimizer", None)
        if not model.built or optimizer is None:
            raise ValueError(
                "a KerasState takes a model that is built and has an optimizer: call model.compile and build"
            )
        if keeper_named(commit).watches_optimizers:
            raise ValueError(f'commit="{commit}" watches torch optimizers; a KerasState commits by "copy" or "host"')
        if keeper_named(commit).is_joint:
            raise ValueError(
                f'commit="{commit}" slices torch modules and optimizers; a KerasState commits by "copy" or "host"'
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._model = model
        self._optimizer = optimizer
        self._moving = _moving(model)
        self._sharded: _ShardedSteps | None = None
        weights = {id(variable) for variable in model.weights}
        super().__init__(
            loader=loader,
            commit=commit,
            local=local,
            weights=_Variables(model.weights),
            optimizer_variables=_Variables(optimizer.variables),
            seeds=_Variables([variable for variable in model.variables if id(variable) not in weights]),
            epoch=epoch,
            batch=batch,
            **objects,
        )
        self._local.add("seeds")
        optimizer.apply = self._apply
        model.train_step = self._train_step

    @property
    def model(self) -> keras.Model:
        """The model that the state was made with, whose weights a commit copies."""
        return self._model

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer whose variables a commit copies: the one that was given, or else the model's own."""
        return self._optimizer

    def _apply(
        self, grads: Sequence[torch.Tensor | None], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        if self._sharded is not None:
            self._sharded.gradients_are_there(trainable_variables)
            return
        world = present_world()
        note_gradients()
        if world is not None and world.size > 1:
            averaged = _averaged([*grads, *(variable.value for variable in self._moving)], self._weight(world))
            grads, moving = averaged[: len(grads)], averaged[len(grads) :]
            for variable, value in zip(self._moving, moving, strict=True):
                variable.assign(value)
        type(self._optimizer).apply(self._optimizer, grads, trainable_variables)

    def _train_step(self, data: Converted) -> Any:
        if self._sharded is None:
            return type(self._model).train_step(self._model, data)
        newest = _newest.get(self._loader_in_use(), lambda: None)()
        batch, convert = (newest and newest.take()) or (data, _as_it_is)
        return self._sharded.step(batch, convert)

    def _enter_world(self, rank: int, size: int) -> None:
        super()._enter_world(rank, size)
        job = current_job()
        is_sharded = shards_of_loader(self._loader_in_use()) is not None
        self._sharded = _ShardedSteps(self, None if job is None else job.world) if is_sharded else None

    def _weight(self, world: World) -> float:
        """Return by what this rank's values are multiplied, so that the mean over ranks becomes the mean over rows."""
        loader = self._loader_in_use()
        rows: Sequence[int] = loader.batch_rows if has_part(loader, RowSource) else ()
        total = sum(rows)
        return rows[world.rank] * world.size / total if len(rows) == world.size and total else 1.0

    def _compared(self) -> Named:
        kept = {"weights": self._model.weights, "optimizer": self._optimizer.variables}
        return [(f"{kind}[{place}] {v.path}", v.value) for kind, some in kept.items() for place, v in enumerate(some)]

    def _own_as_newcomer(self, world: World) -> None:
        super()._own_as_newcomer(world)
        self._draw_seeds()

    def _draw_seeds(self) -> None:
        """Draw the seeds of layers from torch's random numbers."""
        for seed in vars(self)["seeds"].variables:
            seed.assign(torch.randint(2**31 - 1, tuple(seed.shape)))


class _ShardedSteps:
    """Steps of ``fit`` over the shards of the loader's batches, in one generation; see ``worker/shards``."""

    def __init__(self, state: KerasState, world: World | None) -> None:
        self._state = state
        self._world = world
        self._workspace = Workspace()
        self._sources = self._find_sources()
        # The variables that the optimizer is to change, by the last part.
        self._applied: Sequence[keras.Variable] | None = None

    def step(self, batch: object, convert: Callable[[Any], Converted]) -> Mapping[str, Any]:
        """Compute this rank's shards of a batch, add up with the other ranks, and change the weights. Return the logs."""
        state, model = self._state, self._state.model
        sources = self._find_sources()
        if sources.structure != self._sources.structure:
            self._workspace = Workspace()
        self._sources, self._applied = sources, None
        losses = [metric for metric in model.metrics if metric.name == "loss"]
        before = [(variable, variable.value.clone()) for loss in losses for variable in loss.variables]
        for weight in sources.parameters:
            weight.grad = None  # Keras leaves those of the last step, to which the loop would add
        parts = Parts(batch, sources, self._workspace, self._world)
        for part in parts:
            state._draw_seeds()
            for loss in losses:
                loss.reset_state()
            logs = type(model).train_step(model, keras.tree.map_structure(_as_tensor, convert(part)))
            parts.note(**{loss.name: loss.result() for loss in losses})
        state._draw_seeds()
        if self._applied is not None:
            with torch.no_grad():
                gradients = [variable.value.grad for variable in self._applied]
                type(state.optimizer).apply(state.optimizer, gradients, self._applied)
        for variable, value in before:
            variable.assign(value)
        for loss in losses:
            loss.update_state(parts.means[loss.name], sample_weight=parts.rows)
        return {**logs, **{loss.name: loss.result() for loss in losses if loss.name in logs}}

    def gradients_are_there(self, variables: Sequence[keras.Variable] | None) -> None:
        """Note what the optimizer is to change once the gradients are those of the batch, instead of those of a part."""
        if loops.open is None:
            raise TrainingCodeError(
                "the loader was made with shards=, and the optimizer was given gradients outside of the model's train_step, "
                "which is what is called for each shard; train by model.fit, with Batches(state.loader, …)"
            )
        self._applied = variables or self._state.model.trainable_variables

    def _find_sources(self) -> Sources:
        weights = [variable.value for variable in self._state.model.trainable_variables]
        moving = _moving(self._state.model)
        return Sources(weights, (Buffer(variable.path, variable.value) for variable in moving))


def _as_it_is(part: Any) -> Any:
    return part


def _as_tensor(value: Any) -> Any:
    return None if value is None else keras.ops.convert_to_tensor(value)


def _moving(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that layers change in a forward, such as BatchNormalization's averages. Frozen layers change none."""
    frozen = {id(weight) for layer in model._flatten_layers() if not layer.trainable for weight in layer.weights}
    weights = [weight for weight in model.non_trainable_weights if id(weight) not in frozen]
    return [weight for weight in weights if weight.value.is_floating_point()]


def _averaged(tensors: Sequence[torch.Tensor | None], weight: float) -> list[torch.Tensor | None]:
    """Average over ranks, all tensors of a dtype at once. None stands for the gradient of a variable that the loss ignores."""
    averaged = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if tensor is not None):
        parts = {place: tensor for place, tensor in enumerate(tensors) if tensor is not None and tensor.dtype == dtype}
        flat = allreduce(torch.cat([part.reshape(-1) for part in parts.values()]) * weight)
        reduced = flat.split([part.numel() for part in parts.values()])
        for (place, part), values in zip(parts.items(), reduced, strict=True):
            averaged[place] = values.view_as(part)
    return averaged


class _Variables:
    """Gives Keras variables a ``state_dict``, by which a ``TorchState`` keeps them."""

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self.variables = list(variables)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"values": [variable.value for variable in self.variables]}

    def load_state_dict(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for variable, value in zip(self.variables, state["values"], strict=True):
            variable.assign(value)


class Batches(keras.utils.PyDataset):
    """The rest of a loader's epoch, for ``model.fit``. Each call of ``fit``, which trains one epoch, takes a new one.

    ``convert`` turns a batch of the loader into ``(x, y)`` or ``(x, y, sample_weight)``. A batch is taken from the loader when
    Keras begins its step, never ahead, so that a commit counts exactly those that were trained on. (From a Python generator
    Keras would take two before the first step.)

    Of a loader that was made with ``shards=``, ``convert`` is given the shards one by one, and each whole batch as well,
    unless the loader delivers it as a list of shards.
    """

    def __init__(self, loader: PositionedLoader[T], convert: Callable[[T], Converted]) -> None:
        """Begin to iterate over the rest of the loader's epoch, which ends an iteration that is under way.

        Raises ``DataError`` where the epoch has been iterated to its end already, as the loader does.
        """
        super().__init__()
        _newest[loader] = weakref.ref(self)
        self._convert = convert
        self._is_in_shards = shards_of_loader(loader) is not None
        # The batch that was given last, before it was converted, for the steps that convert its shards.
        self._untaken: Any = None
        self._iterator = iter(loader)
        self._steps: int = loader.steps_left
        self._given = 0
        self._shown: Converted | None = None

    @property
    def num_batches(self) -> int:
        """How many batches ``fit`` takes: the steps that are left of the epoch in the present world."""
        return self._steps

    def __getitem__(self, index: int) -> Converted:
        """Return the next batch, whatever the index: the loader has shuffled them already."""
        if self._shown is None:
            if self._given == self._steps:
                raise ValueError("the loader's epoch is over; call fit for one epoch, with new Batches each time")
            self._given += 1
            batch: Any = next(self._iterator)
            self._untaken = batch
            self._batch = self._convert(batch[0] if self._is_in_shards and isinstance(batch, list) else batch)
        shown, self._shown = self._shown or self._batch, None
        return shown

    def take(self) -> tuple[Any, Callable[[Any], Converted]] | None:
        """Return the batch that Keras was given last, and what converts its shards; None if that was taken before."""
        batch, self._untaken = self._untaken, None
        return None if batch is None else (batch, self._convert)

    def on_epoch_end(self) -> None:
        # Keras takes one batch to build losses and metrics, and then begins the epoch, in which that batch has to come again.
        if self._given == 1:
            self._shown = self._batch


# By loader, the Batches that were made of it last.
_newest: weakref.WeakKeyDictionary[object, weakref.ref[Batches]] = weakref.WeakKeyDictionary()


class _StateCallback(keras.callbacks.Callback):
    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits after every ``batches_per_commit`` batches, and at the end of ``fit``.

    The last batch of ``fit`` is committed at its end, with the epoch counted: a worker that joined in between would have no
    batch to begin ``fit`` with. The callback may come before or after the others of this module. It also reports the running
    metrics of ``fit``.
    """

    def __init__(self, state: KerasState, batches_per_commit: int = 1) -> None:
        """Keep the state. Raises ``ValueError`` unless ``batches_per_commit`` is a whole number from 1 on."""
        super().__init__(state)
        self._every = whole_number("batches_per_commit", batches_per_commit, 1)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        self.state.report(**(logs or {}))
        if (batch + 1) % self._every == 0 and batch + 1 != self.params["steps"]:
            self.state.commit()

    def on_train_end(self, logs: Mapping[str, object] | None = None) -> None:
        self.state.commit()


class UpdateEpochStateCallback(_StateCallback):
    """Sets ``state.epoch`` to the number of epochs that are done, and the state's loader to the next epoch."""

    def on_train_begin(self, logs: Mapping[str, object] | None = None) -> None:
        if self.params["epochs"] != self.state.epoch + 1:
            raise ValueError(
                f"fit was called with epochs={self.params['epochs']} at state.epoch={self.state.epoch}; call it for one epoch: "
                "while state.epoch < epochs: model.fit(…, initial_epoch=state.epoch, epochs=state.epoch + 1)"
            )

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        self.state.epoch = epoch + 1
        loader = vars(self.state).get("loader")
        if loader is not None:
            loader.set_epoch(epoch + 1)


class UpdateBatchStateCallback(_StateCallback):
    """Counts the batches of the epoch in ``state.batch``, for data that do not know their own position.

    A batch is counted when it begins, so that a commit at its end includes it, whichever callback comes first.
    """

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        self.state.batch += 1

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        self.state.batch = 0
