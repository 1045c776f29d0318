"""An ElasticTrainer's own callbacks, which run before and after all others, and the state of exportable callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from spark_elastic.worker.state.attributes import Attributes

if TYPE_CHECKING:
    from spark_elastic.huggingface.trainer import ElasticTrainer


class GoOn(TrainerCallback):
    """Runs first: restores progress when training begins, and sets the epoch after each step."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._begin()
        self._trainer._forget()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loader = self._trainer.elastic.loader
        state.epoch = loader.epoch + 1 - loader.steps_left / len(loader)  # the Trainer counts from this world's start


class Last(TrainerCallback):
    """Runs after all other callbacks: restores their state, and has all ranks agree on their requests."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        # Whether training continues in the middle of an epoch.
        self._is_within = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._remember()
        loader = self._trainer.elastic.loader
        self._is_within = 0 < loader.steps_left < len(loader)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._agree()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._trainer._agree()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        if self._is_within:  # callbacks that count epochs had already counted this one
            self._trainer._load()
        self._is_within = False

    def on_log(self, *_: Any, **__: Any) -> None:
        if self._trainer._is_deciding:
            self._trainer._agree()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self._trainer._is_deciding:
            self._trainer._agree()


class Exported:
    """The state that an ``ExportableState`` names, with the methods of ``Attributes``, which keeps what a subclass adds."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._others = Attributes(callback)
        self._before = self._exported()

    def _exported(self) -> dict[str, Any]:
        return dict(self._callback.state()["attributes"])

    def values(self) -> dict[str, Any]:
        return {**self._others.values(), **self._exported()}

    def reset(self) -> None:
        self._others.reset()
        vars(self._callback).update(self._before)

    def begin(self) -> None:
        self._others.begin()

    def load(self, values: Mapping[str, Any] | None) -> None:
        self._others.load({name: value for name, value in (values or {}).items() if name not in self._before})
        vars(self._callback).update({name: value for name, value in (values or {}).items() if name in self._before})
