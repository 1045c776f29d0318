"""Keras 3 on the torch backend: a state whose ``fit`` continues from the last commit after each change of the world.

::

    model.compile(optimizer="adam", loss="mse")
    state = KerasState(model, loader=se.data.ParquetLoader(url, global_batch_size=1024))

    @se.elastic
    def train(state):
        state.fit(lambda batch: (batch["x"], batch["y"]), epochs=10, callbacks=[keras.callbacks.EarlyStopping(patience=2)])

Custom loops call ``model.fit`` for each epoch, with ``Batches`` and the callbacks of this module. Importing the module chooses
the torch backend if KERAS_BACKEND is not set. The extra ``keras`` installs Keras.
"""

from spark_elastic.keras import _backend  # noqa: F401
from spark_elastic.keras.batches import Batches
from spark_elastic.keras.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from spark_elastic.keras.state import KerasState

__all__ = ["Batches", "CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]
