"""A script with Hugging Face's Trainer, elastic in the same process: after each change of the world `trainer.train` is called
again and goes on where the last commit left off, with the same model and optimizer.

    python examples/huggingface_trainer.py --local          # on this machine, without Spark
    spark-submit --master … examples/huggingface_trainer.py

One worker is one process with one device of its own, so the Trainer sees a single process, and averages nothing by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import spark_elastic as se

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
    """Return a new model. A pretrained one comes from a disk that all executors reach: `from_pretrained(path)`."""
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


class ElasticTrainer(Trainer):
    """Hugging Face's Trainer, with batches, averaged gradients, weights and steps from a State."""

    def __init__(self, elastic: se.TorchState, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.args.gradient_accumulation_steps > 1:
            raise ValueError(
                "after a reset the Trainer counts the batches of an epoch anew, and would accumulate others: leave out "
                "gradient_accumulation_steps, and give global_batch_size the rows of a step"
            )
        self.elastic = elastic

    def get_train_dataloader(self) -> Any:
        return self.elastic.loader

    def training_step(self, model: Any, *arguments: Any) -> torch.Tensor:
        return super().training_step(self.elastic.model, *arguments)

    def _init_training_state(self, max_steps: int, steps_of_an_epoch: int, *others: Any) -> tuple[int, int]:
        """Begin where the last commit left off: so many epochs are over, and the loader skips no batch of the next."""
        begin = super()._init_training_state(max_steps, steps_of_an_epoch, *others)
        if self.elastic.progress is None:
            return begin
        # Perhaps for more than before.
        asked = {name: getattr(self.state, name) for name in ("max_steps", "num_train_epochs")}
        vars(self.state).update({**vars(self.elastic.progress), **asked})
        return self.state.global_step // steps_of_an_epoch, 0


class Commit(TrainerCallback):
    """Commits after each step how far the Trainer is."""

    def __init__(self, elastic: se.TorchState) -> None:
        self.elastic = elastic

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.elastic.items += sum(self.elastic.loader.batch_rows)
        state.epoch = state.global_step / len(self.elastic.loader)  # the Trainer counts from where it was entered again
        self.elastic.progress = state
        self.elastic.commit()


def train_fn(items: int, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    bert = small_bert()
    loader = se.data.ElasticDataLoader(Sentences(items), global_batch_size=64)
    optimizer = torch.optim.AdamW(bert.parameters(), lr=5e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, epochs * len(loader))
    model = se.DistributedDataParallel(bert)
    state = se.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, progress=None, items=0)
    arguments = TrainingArguments(
        num_train_epochs=epochs,
        logging_steps=10,
        save_strategy="no",  # run(checkpoint=) does it
        report_to="none",
        disable_tqdm=True,
    )
    trainer = ElasticTrainer(
        state, model=bert, args=arguments, optimizers=(optimizer, scheduler), callbacks=[Commit(state)]
    )

    @se.elastic
    def train(state: se.TorchState) -> None:
        trainer.train()

    train(state)
    weights = torch.cat([parameter.detach().flatten() for parameter in bert.parameters()])
    loss = next(entry["loss"] for entry in reversed(state.progress.log_history) if "loss" in entry)
    return {
        "items": state.items,
        "steps": state.progress.global_step,
        "loss": float(loss),
        "weights": weights.double().abs().sum().item(),
        "rate": optimizer.param_groups[0]["lr"],
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
