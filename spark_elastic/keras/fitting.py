"""A training run of several epochs whose callbacks continue from the last commit after each change of the world."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import keras
import numpy as np
import torch
from keras.callbacks import CallbackList, CSVLogger, History, ModelCheckpoint, ProgbarLogger, RemoteMonitor, TensorBoard

from spark_elastic.errors import TrainingCodeError
from spark_elastic.keras.batches import Batches, Convert
from spark_elastic.keras.metrics import NOT_BUILT, variables_of
from spark_elastic.worker.collectives import allreduce, broadcast_object
from spark_elastic.worker.context import rank
from spark_elastic.worker.state.attributes import Attributes, by_name

if TYPE_CHECKING:
    from spark_elastic.keras.state import KerasState

# Callbacks whose output one rank can write for all. They are called on rank 0.
WRITERS = (CSVLogger, ModelCheckpoint, ProgbarLogger, RemoteMonitor, TensorBoard)
_SET_BY_KERAS = ("model", "_model", "params")


class Progress(TypedDict):
    """What a commit holds of a training run, besides the model."""

    epochs: int
    # By ``epochs=``, the state of the callbacks of runs that have ended.
    finished: dict[int, dict[str, object]]
    is_stopped: bool
    callbacks: dict[str, object]
    # The values of the metrics' variables in the middle of an epoch.
    metrics: list[torch.Tensor]


class Training(CallbackList):
    """The callbacks of training in one world. They see the ``Model.fit`` calls, one for each epoch, as a single call.

    Commits after each batch, and after each epoch, with the state of the callbacks.
    """

    def __init__(
        self,
        state: KerasState,
        callbacks: Sequence[keras.callbacks.Callback],
        epochs: int,
        verbose: int,
    ) -> None:
        self._state = state
        self._epochs = epochs
        self._verbose = verbose
        # The progress in this training run's last commit. If an earlier run of fewer epochs came before, only its history.
        last: Progress = vars(state)["progress"] or Progress(
            epochs=0, finished={}, is_stopped=False, callbacks={}, metrics=[]
        )
        self._is_new = last["epochs"] == 0 or last["epochs"] in last["finished"]
        self._progress = last.copy()
        if self._is_new:
            history = {name: each for name, each in last["callbacks"].items() if name == History.__name__}
            self._progress |= {"is_stopped": False, "callbacks": history}
        own = [*callbacks, History(), *([ProgbarLogger()] if verbose else [])]
        self._named: dict[str, keras.callbacks.Callback] = {
            name: callback
            for name, callback in by_name(own).items()
            if rank() == 0 or not isinstance(callback, WRITERS)
        }
        super().__init__(list(self._named.values()), model=state.model)
        # Keras would call some callbacks on another thread while a commit reads their state.
        self._async_train = self._async_test = self._async_predict = False
        self._attributes: dict[str, Attributes] = {}
        # Their state when it was last read.
        self._values: dict[str, object] = {}
        self._logs: dict[str, object] = {}

    def run(self, convert: Convert, settings: Mapping[str, object]) -> History:
        """Train the remaining epochs. Return the history of all epochs."""
        state = self._state
        if self._epochs in self._progress["finished"]:
            remembered = self._progress["finished"][self._epochs]
            for name, callback in self._named.items():
                Attributes(callback, _SET_BY_KERAS).load(remembered.get(name))
            return state.model.history
        if state.epoch > self._epochs:
            warnings.warn(f"{state.epoch} epochs have been trained, so epochs={self._epochs} trains none", stacklevel=4)
        self._begin()
        while state.epoch < self._epochs and not self._progress["is_stopped"]:
            # The batches finished before this call of fit, which counts from 0 again.
            self._batches_before = state.batch
            self._set_steps()
            before = state.epoch
            state.model.fit(
                Batches(state.loader, convert),
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                verbose=0,
                callbacks=self,
                **settings,
            )
            if state.epoch == before:
                raise TrainingCodeError("Model.fit has trained nothing: is there a limit, such as KERAS_MAX_EPOCHS?")
        type(state.optimizer).finalize_variable_values(state.optimizer, state.model.trainable_weights)
        super().on_train_end(self._logs)
        remembered = {**self._progress["callbacks"], **self._remembered(by_writers=False)}
        self._progress["finished"] = {**self._progress["finished"], self._epochs: remembered}
        self._commit()
        return state.model.history

    def _set_steps(self) -> None:
        steps = self._state.batch + self._state.loader.steps_left
        self.set_params({"verbose": self._verbose, "epochs": self._epochs, "steps": steps})

    def _begin(self) -> None:
        """Tell callbacks that training begins, then restore their state from the last commit."""
        followed = self._state._attributes
        for name, callback in self._named.items():
            if not isinstance(callback, ProgbarLogger):
                key = self._epochs, id(callback)
                known = self._attributes[name] = followed.get(key) or Attributes(callback, _SET_BY_KERAS)
                followed[key] = known
                known.reset()
        self._set_steps()
        variables = [*self.model.variables, *self._state.optimizer.variables]
        values = [] if self._is_new else [variable.value.clone() for variable in variables]
        super().on_train_begin()
        for variable, value in zip(variables, values, strict=False):
            variable.assign(value)  # undo what callbacks set when training begins: that was done before the last commit
        for name, known in self._attributes.items():
            known.begin()
            known.load(self._progress["callbacks"].get(name))

    # ------------------------------------------------------------------ what Keras calls

    def on_train_begin(self, logs: Mapping[str, object] | None = None) -> None:
        """Do nothing: ``fit`` begins once per epoch, but training begins only once."""

    def on_train_end(self, logs: Mapping[str, object] | None = None) -> None:
        """Do nothing: ``fit`` ends once per epoch, but training ends only once."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        if self._state.batch == 0:
            super().on_epoch_begin(epoch, logs)
            return
        for callback in self.callbacks:
            if isinstance(callback, ProgbarLogger):
                callback.on_epoch_begin(epoch, logs)
        variables = variables_of(self.model.metrics)
        if len(variables) != len(self._progress["metrics"]):
            raise TrainingCodeError(NOT_BUILT)
        for variable, value in zip(variables, self._progress["metrics"], strict=True):
            variable.assign(value)  # fit has just reset it

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        super().on_train_batch_begin(self._batches_before + batch, logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        super().on_train_batch_end(self._batches_before + batch, logs)
        self.model.stop_training = _any(self.model.stop_training)
        self._state.batch += 1
        self._report(_as_python(logs))
        # The last batch is committed with its epoch: a worker that joined in between would have no batch to start with.
        if self._state.batch < self.params["steps"] and not self.model.stop_training:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        self._logs = broadcast_object(_as_python(logs))
        super().on_epoch_end(epoch, self._logs)
        self._progress["is_stopped"] = self.model.stop_training = _any(self.model.stop_training)
        self._state.epoch, self._state.batch = epoch + 1, 0
        self._note(broadcast_object(self._remembered(by_writers=True)))
        self._state.loader.set_epoch(epoch + 1)
        self._report(self._logs)
        self._commit()

    def _report(self, logs: Mapping[str, object]) -> None:
        self._state.report(**{name: value for name, value in logs.items() if isinstance(value, (int, float))})

    def _remembered(self, by_writers: bool) -> dict[str, object]:
        """Return the state of callbacks: of those that only rank 0 has, or of those on each rank."""
        asked = [name for name in self._attributes if isinstance(self._named[name], WRITERS) == by_writers]
        for name in asked:
            # The state of callbacks without batch hooks cannot change once the epoch has begun.
            if name not in self._values or self._state.batch <= 1 or _hears_of_batches(self._named[name]):
                self._values[name] = self._attributes[name].values()
        return {name: self._values[name] for name in asked}

    def _note(self, remembered: Mapping[str, object]) -> None:
        self._progress["callbacks"] = {**self._progress["callbacks"], **remembered}

    def _commit(self) -> None:
        self._progress["epochs"] = self._epochs
        self._note(self._remembered(by_writers=False))
        metrics = variables_of(self.model.metrics) if self._state.batch else []
        self._progress["metrics"] = [variable.value.clone() for variable in metrics]
        self._state.progress = self._progress.copy()
        self._state.commit()


def _hears_of_batches(callback: keras.callbacks.Callback) -> bool:
    hooks = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    plain = keras.callbacks.Callback
    return any(hook in vars(callback) or getattr(type(callback), hook) is not getattr(plain, hook) for hook in hooks)


def _any(flag: bool) -> bool:
    """Return whether the flag is set on any rank, so that all ranks leave the epoch together."""
    return bool(allreduce(torch.tensor([int(flag)]), "max"))


def _as_python(logs: Mapping[str, object] | None) -> dict[str, object]:
    return {name: np.asarray(keras.ops.convert_to_numpy(value)).tolist() for name, value in (logs or {}).items()}
