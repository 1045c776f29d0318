"""A script with Keras' fit, elastic in the same process: after each change of the world training goes on where the last commit
left off, with the same model, optimizer and callbacks.

    python examples/keras_fit.py --local          # on this machine, without Spark
    spark-submit --master … examples/keras_fit.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

import spark_elastic as se
from spark_elastic.keras import KerasState

import keras  # isort: skip  # after spark_elastic.keras, which chooses its backend

# ---------------------------------------------------------------- as it was


class Digits(torch.utils.data.Dataset):
    """Stripes of ten widths, with noise."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(64, generator=torch.Generator().manual_seed(self.first + index))
        label = index % 10
        return torch.sin(torch.arange(64) * (label + 1) / 8) + 2.0 * noise, label


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
    return model


def validation_data() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*[Digits(200, first=10**6)[index] for index in range(200)], strict=True)
    return torch.stack(images), torch.tensor(labels)


# ---------------------------------------------------------------- what makes it elastic


def train_fn(items: int, epochs: int) -> dict[str, Any]:
    model = network()
    loader = se.data.ElasticDataLoader(Digits(items), global_batch_size=64)
    state = KerasState(model, loader=loader)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
    ]

    @se.elastic
    def train(state: Any) -> keras.callbacks.History:
        return state.fit(epochs=epochs, callbacks=callbacks, validation_data=validation_data())

    history = train(state).history
    return {
        "epochs": len(history["loss"]),
        "accuracy": history["accuracy"][-1],
        "val_accuracy": history["val_accuracy"][-1],
        "rate": float(model.optimizer.learning_rate),
        "weights": float(sum(abs(weight).sum() for weight in model.get_weights())),
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that there are")
    parser.add_argument("--local", action="store_true", help="train in processes of this machine")
    parser.add_argument("--event-log", help="a file that `spark-elastic summary` tells the cost of resets from")
    options = parser.parse_args(argv)
    workers = options.workers
    settings = {"min_np": 1, "num_proc": workers, "max_np": workers, "local": options.local}
    results = se.run(train_fn, args=(options.items, options.epochs), event_log=options.event_log, **settings)
    print("{epochs} epochs, accuracy {accuracy:.3f}, in validation {val_accuracy:.3f}".format(**results[0]))
    return results


if __name__ == "__main__":
    main()
