"""The state of a Keras model in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import torch

from spark_elastic.data.loader import RowSource, has_part, shards_of_loader
from spark_elastic.data.stopwatch import note_gradients
from spark_elastic.errors import TrainingCodeError
from spark_elastic.keras.batches import Converted, as_it_is, newest
from spark_elastic.keras.checks import check_built, check_callbacks, check_settings, watch_fit
from spark_elastic.keras.fitting import Training
from spark_elastic.keras.metrics import (
    NOT_BUILT,
    Totals,
    check_logs,
    check_metrics,
    reduced,
    results_of,
    sum_over_ranks,
    variables_of,
)
from spark_elastic.keras.shards import ShardedSteps, moving_of
from spark_elastic.worker.checks.fingerprint import Named
from spark_elastic.worker.job import current_job, present_world
from spark_elastic.worker.state.attributes import Attributes
from spark_elastic.worker.state.keepers import keeper_named
from spark_elastic.worker.state.torch_state import TorchState
from spark_elastic.worker.world import World


class KerasState(TorchState):
    """The state of a Keras model in training: its weights, its optimizer's variables, a loader, and any objects.

    ``model`` has to be built (by an Input layer or ``model.build``), because a newcomer receives the weights before its first
    batch. By default, ``optimizer`` is the one that the model was compiled with.

    From then on, the optimizer's ``apply`` averages gradients over all ranks, together with the running statistics of layers
    such as BatchNormalization. Each rank is weighted by the rows that ``loader`` gave it; without a loader of this package, all
    ranks count equally. Inside the elastic function ``apply`` is a collective, so all ranks have to take equally many steps.
    Layers draw random numbers from seeds that are each rank's own.

    With a ``loader`` made with ``shards=``, a step calls the model's ``train_step`` for each shard that this rank computes, and
    the optimizer once. Weights, optimizer, and the logs of this class's ``fit`` then have the same bits in a world of any size.

    Custom loops call ``model.fit`` for each epoch, with ``Batches`` and the callbacks of this module, which advance ``epoch``
    and ``batch``. Metrics then cover what this rank has computed since it last entered ``model.fit``, and callbacks start over
    with each epoch: those that would never act raise ``TrainingCodeError``. ``commit`` is "copy" or "host"; it and ``local``
    are as in ``TorchState``.
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
        """Create the optimizer's variables, and replace its ``apply`` and the model's ``train_step``.

        Raises ``ValueError`` for a model that is not built or has no optimizer and for a ``commit`` other than "copy" and
        "host", and whatever ``TorchState`` raises.
        """
        optimizer = optimizer or getattr(model, "optimizer", None)
        check_built(model)
        if optimizer is None:
            raise ValueError("a KerasState takes a model that has an optimizer: call model.compile")
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
        self._sharded: ShardedSteps | None = None
        self._is_fitting = False
        # How often the optimizer's ``apply`` was called in this world.
        self._applied = 0
        self._logged: set[str] = set()
        # The values of ``epochs=`` with which ``fit`` has been called in this world.
        self._fitted: set[int] = set()
        # The state of callbacks, by ``epochs=`` and by their ids.
        self._attributes: dict[tuple[int, int], Attributes] = {}
        weights = {id(variable) for variable in model.weights}
        super().__init__(
            loader=loader,
            commit=commit,
            local=local,
            weights=_Weights(model),
            optimizer_variables=_Variables(optimizer.variables),
            seeds=_Variables([variable for variable in model.variables if id(variable) not in weights]),
            epoch=epoch,
            batch=batch,
            progress=None,
            **objects,
        )
        self._local.add("seeds")
        optimizer.apply = self._apply
        optimizer.finalize_variable_values = self._finalize
        model.train_step = self._train_step
        watch_fit(model)

    @property
    def model(self) -> keras.Model:
        """The model that the state was made with. Commits copy its weights."""
        return self._model

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer whose variables commits copy: the given one, or else the model's own."""
        return self._optimizer

    def fit(
        self,
        convert: Callable[[Any], Converted] | None = None,
        *,
        epochs: int,
        callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None = None,
        verbose: int | str = "auto",
        **settings: object,
    ) -> keras.callbacks.History:
        """Train as ``Model.fit`` does, from the last commit on, and block until the end. Call this inside the elastic function.

        A step is committed after callbacks have seen its batch; the last step of an epoch, after validation and the callbacks'
        work at the end of the epoch. Metrics cover all rows of all ranks, each counted once, and validation results are rank
        0's, so that all ranks decide alike. If a callback on one rank stops training, it ends on all ranks.

        Args:
            convert: turns a batch of the loader into ``(x, y)`` or ``(x, y, sample_weight)``; by default, batches have this form.
            epochs: the total number of epochs since the beginning, not of this call.
            callbacks: Keras callbacks. Their attributes that are numbers, strings, arrays or containers of these, or else their
                ``state_dict``, are committed, and a newcomer's callbacks continue from there. ``on_train_begin`` is called in
                each world. ``CSVLogger``, ``ModelCheckpoint``, ``RemoteMonitor`` and ``TensorBoard`` are called on rank 0.
            verbose: 0 is silent, 1 shows a bar, and 2, the default, a line for each epoch, on rank 0.
            settings: ``class_weight``, ``validation_data``, ``validation_steps``, ``validation_batch_size``,
                ``validation_freq``, as in ``Model.fit``. Each rank validates all of the data.

        Returns the history of all epochs, including those before a loss of workers. After a loss, the uncommitted batch is
        trained again, and callbacks see it again. Raises ``ValueError`` for incompatible callbacks and without a loader,
        ``TypeError`` for other settings, and ``TrainingCodeError`` if training is already over.
        """
        own = keras.tree.flatten(callbacks or [])
        check_settings(settings)
        check_callbacks(own)
        loader = self._loader_in_use()
        if loader is None:
            raise ValueError("fit takes its batches from the state's loader: KerasState(model, loader=…)")
        if shards_of_loader(loader) is not None and settings.get("class_weight"):
            raise ValueError(
                "class_weight= does not reach shards: have convert return weights as (x, y, sample_weight)"
            )
        if self._model.optimizer is not self._optimizer:
            raise TrainingCodeError(
                "the model has another optimizer than its KerasState, which is in no commit: compile the model before the "
                "KerasState is made, and not again"
            )
        if epochs in self._fitted:
            raise TrainingCodeError(
                f"fit has trained {epochs} epochs already: epochs= counts from the beginning, so give it more to go on"
            )
        self._is_fitting = True
        try:
            history = Training(self, own, epochs, 2 if verbose == "auto" else int(verbose)).run(
                convert or as_it_is, settings
            )
        finally:
            self._is_fitting = False
        self._fitted.add(epochs)
        return history

    def _finalize(self, variables: Sequence[keras.Variable]) -> None:
        """Leave the weights unchanged at the end of an epoch, which ``Model.fit`` takes for the end of training."""
        if not self._is_fitting:
            type(self._optimizer).finalize_variable_values(self._optimizer, variables)

    def _apply(
        self, grads: Sequence[torch.Tensor | None], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        self._applied += 1
        if self._sharded is not None:
            self._sharded.gradients_are_there(trainable_variables)
            return
        world = present_world()
        note_gradients()
        if world is not None and world.size > 1:
            moving = moving_of(self._model)  # again in each step, because layers may have been frozen or thawed
            averaged = reduced([*grads, *(variable.value for variable in moving)], "mean", self._weight(world))
            for variable, value in zip(moving, averaged[len(grads) :], strict=True):
                variable.assign(value)
            grads = averaged[: len(grads)]
        type(self._optimizer).apply(self._optimizer, grads, trainable_variables)

    def _train_step(self, data: Converted) -> object:
        if not self._is_fitting and self._sharded is None:
            return type(self._model).train_step(self._model, data)
        if self._sharded is None:
            metrics, world = self._model.metrics, present_world()
            # A single rank already has the totals of all.
            totals = None if world is None or world.size == 1 else Totals(metrics)
            count = len(variables_of(metrics))
            logs = self._noted(type(self._model).train_step(self._model, data))
            if len(variables_of(self._model.metrics)) != count:
                raise TrainingCodeError(NOT_BUILT)
            if totals is None:
                return logs
            totals.add(sum_over_ranks(totals.part()))
            return results_of(self._model, logs)
        latest = newest.get(self._loader_in_use(), lambda: None)()
        batch, convert = (latest and latest.take()) or (data, as_it_is)
        return self._sharded.step(batch, convert)

    def _noted(self, logs: Mapping[str, object]) -> Mapping[str, object]:
        """Check a step's logs in ``fit`` if their names have changed."""
        if self._is_fitting and logs.keys() != self._logged:
            check_logs(self._model, logs)
            check_metrics(self._model.metrics)
            self._logged = set(logs)
        return logs

    def _enter_world(self, rank: int, size: int) -> None:
        super()._enter_world(rank, size)
        self._fitted.clear()
        self._applied = 0
        job = current_job()
        is_sharded = shards_of_loader(self._loader_in_use()) is not None
        self._sharded = ShardedSteps(self, None if job is None else job.world) if is_sharded else None

    def _optimizer_steps(self) -> int:
        return self._applied

    def _weight(self, world: World) -> float:
        """Return the factor for this rank's values that turns the mean over ranks into the mean over rows."""
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


class _Variables:
    """Gives Keras variables a ``state_dict``, through which a ``TorchState`` keeps them."""

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self.variables = list(variables)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"values": [variable.value for variable in self.variables]}

    def load_state_dict(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for variable, value in zip(self.variables, state["values"], strict=True):
            variable.assign(value)


class _Weights(_Variables):
    """The weights of a model, and which of its layers are frozen: callbacks may freeze and thaw layers during training."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model.weights)
        self._layers = model._flatten_layers

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "trainable": [layer.trainable for layer in self._layers()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        # Setting a layer also sets the layers inside it, which come later.
        for layer, is_trainable in zip(self._layers(), state.get("trainable", ()), strict=False):
            if layer.trainable != is_trainable:
                layer.trainable = is_trainable
