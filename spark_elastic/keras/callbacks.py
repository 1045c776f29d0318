"""Callbacks for loops that call ``fit`` for each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import keras

from spark_elastic._integers import whole_number

if TYPE_CHECKING:
    from spark_elastic.keras.state import KerasState


class _StateCallback(keras.callbacks.Callback):
    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits after every ``batches_per_commit`` batches, and at the end of ``fit``.

    The last batch is committed only at the end of ``fit``, together with the completed epoch: a worker that joined in between
    would have no batch to begin ``fit`` with. The callback may come before or after the others of this module. It also reports
    the running metrics of ``fit``.
    """

    def __init__(self, state: KerasState, batches_per_commit: int = 1) -> None:
        """Store the state. Raises ``ValueError`` unless ``batches_per_commit`` is a whole number from 1 on."""
        super().__init__(state)
        self._every = whole_number("batches_per_commit", batches_per_commit, 1)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        self.state.report(**(logs or {}))
        if (batch + 1) % self._every == 0 and batch + 1 != self.params["steps"]:
            self.state.commit()

    def on_train_end(self, logs: Mapping[str, object] | None = None) -> None:
        self.state.commit()


class UpdateEpochStateCallback(_StateCallback):
    """Sets ``state.epoch`` to the number of finished epochs, and the state's loader to the next epoch."""

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
    """Counts the batches of the epoch in ``state.batch``, for data that do not track their own position.

    A batch is counted when it begins, so that a commit at its end includes it, whichever callback comes first.
    """

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        self.state.batch += 1

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        self.state.batch = 0
