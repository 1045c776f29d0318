"""A script with Hugging Face's Trainer, elastic in the same process: after each change of the world training goes on where
the last commit left off, with the same model and optimizer.

    python examples/huggingface_trainer.py --local          # on this machine, without Spark
    spark-submit --master … examples/huggingface_trainer.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

import spark_elastic as se
from spark_elastic.huggingface import ElasticTrainer

# ---------------------------------------------------------------- as it was


class Sentences(torch.utils.data.Dataset):
    """Twelve words each, most of them from the first or from the second half of the vocabulary."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 100, (12,), generator=torch.Generator().manual_seed(index))
        label = index % 2
        words[:9] += 100 * label
        words[9:] += 100 * (1 - label)
        return {"input_ids": words, "labels": torch.tensor(label)}


def small_bert() -> BertForSequenceClassification:
    """Return a new model. A pretrained one comes from a disk that all executors reach: ``from_pretrained(path)``."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=200,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


# ---------------------------------------------------------------- what makes it elastic


class Count(TrainerCallback):
    """Counts in the State, for what the script prints at its end."""

    def __init__(self, state: se.TorchState) -> None:
        self.elastic = state

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.elastic.items += sum(self.elastic.loader.batch_rows)


def train_fn(items: int, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    bert = small_bert()
    arguments = TrainingArguments(
        num_train_epochs=epochs,
        learning_rate=5e-3,
        warmup_steps=10,
        logging_steps=10,
        save_strategy="no",  # run(checkpoint=) does it
    )
    trainer = ElasticTrainer(  # a Trainer, which is given the rows of a step on all workers together
        model=bert, args=arguments, train_dataset=Sentences(items), global_batch_size=64, objects={"items": 0}
    )
    trainer.add_callback(Count(trainer.elastic))
    trainer.train()
    weights = torch.cat([parameter.detach().flatten() for parameter in bert.parameters()])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "items": trainer.elastic.items,
        "steps": trainer.state.global_step,
        "loss": losses[-1] if losses else float("nan"),
        "logged": len(losses),
        "weights": weights.double().abs().sum().item(),
        "rate": trainer.optimizer.param_groups[0]["lr"],
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that there are")
    parser.add_argument("--local", action="store_true", help="train in processes of this machine")
    parser.add_argument("--event-log", help="a file that `spark-elastic summary` tells the cost of resets from")
    options = parser.parse_args(argv)
    workers = options.workers
    arguments = (options.items, options.epochs)
    settings = {"min_np": 1, "num_proc": workers, "max_np": workers, "local": options.local}
    results = se.run(train_fn, args=arguments, event_log=options.event_log, **settings)
    print(f"{results[0]['items']:,} items trained in {results[0]['steps']} steps, loss {results[0]['loss']:.3f}")
    return results


if __name__ == "__main__":
    main()
