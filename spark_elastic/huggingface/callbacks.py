"""An ElasticTrainer's own callbacks, which run before and after all others, and the state of exportable callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from spark_elastic.worker.state.attributes import Attributes

if TYPE_CHECKING:
    from spark_elastic.huggingface.trainer import ElasticTrainer


# The package of the library's callbacks that report to trackers.
_REPORTERS = "transformers.integrations"


class GoOn(TrainerCallback):
    """Runs first: restores progress when training begins, and sets the epoch after each step.

    Where this process has become rank 0, the library's callbacks that report to trackers are set up once more: they set
    themselves up once, and begin, name and end a tracker's run on rank 0 alone.
    """

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        self._was_first = False

    def on_train_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        self._trainer._begin()
        self._trainer._forget()
        if state.is_world_process_zero and not self._was_first:
            for callback in self._trainer.callback_handler.callbacks:
                if type(callback).__module__.startswith(_REPORTERS) and hasattr(callback, "_initialized"):
                    callback._initialized = False
        self._was_first = state.is_world_process_zero

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        loader = self._trainer.elastic.loader
        state.epoch = loader.epoch + 1 - loader.steps_left / len(loader)  # the Trainer counts from this world's start


class Last(TrainerCallback):
    """Runs after all other callbacks: restores their state, and has all ranks agree on their requests."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        # Whether training continues in the middle of an epoch.
        self._is_within = False

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._trainer._remember()
        loader, progress = self._trainer.elastic.loader, self._trainer.elastic.progress
        # After an epoch that a callback has ended early, the loader stands in it, and the Trainer in the next one.
        is_same_epoch = progress is None or progress["epoch"] == loader.epoch
        self._is_within = is_same_epoch and 0 < loader.steps_left < len(loader)

    def on_step_end(self, *_: object, **__: object) -> None:
        self._trainer._agree()

    def on_epoch_end(self, *_: object, **__: object) -> None:
        self._trainer._agree()

    def on_epoch_begin(self, *_: object, **__: object) -> None:
        if self._is_within:  # callbacks that count epochs had already counted this one
            self._trainer._load()
        self._is_within = False

    def on_log(self, *_: object, **__: object) -> None:
        if self._trainer._is_deciding:
            self._trainer._agree()

    def on_evaluate(self, *_: object, **__: object) -> None:
        if self._trainer._is_deciding:
            self._trainer._agree()


class Exported:
    """The state that an ``ExportableState`` names, with the methods of ``Attributes``, which keeps what a subclass adds."""

    def __init__(self, callback: ExportableState) -> None:
        self._callback = callback
        self._others = Attributes(callback)
        self._before = self._exported()

    def _exported(self) -> dict[str, object]:
        return dict(self._callback.state()["attributes"])

    def values(self) -> dict[str, object]:
        return {**self._others.values(), **self._exported()}

    def reset(self) -> None:
        self._others.reset()
        vars(self._callback).update(self._before)

    def begin(self) -> None:
        self._others.begin()

    def load(self, values: Mapping[str, object] | None) -> None:
        self._others.load({name: value for name, value in (values or {}).items() if name not in self._before})
        vars(self._callback).update({name: value for name, value in (values or {}).items() if name in self._before})
