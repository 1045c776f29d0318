"""Trainings with Hugging Face's Trainer, elastic and plain, whose results are to be equal."""

from __future__ import annotations

from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from spark_elastic.data import ElasticDataLoader
from spark_elastic.huggingface import ElasticTrainer

BATCH = 16


class Words(torch.utils.data.Dataset):
    """Eight words each, and the word after each; of some rows most are masked, so that a mean over rows is another one."""

    def __init__(self, count: int, shift: int = 1) -> None:
        self.count, self.shift = count, shift

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(8) * 3 + index) % 11
        labels = (words + self.shift) % 11
        labels[: index % 8] = -100
        return {"words": words, "labels": labels}


class Tagger(torch.nn.Module):
    """A loss over labels as the library's models have it: the sum over all labels by their number, if that is given."""

    main_input_name = "words"  # from which, and from the number of parameters, the Trainer counts operations

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11)

    def num_parameters(self, exclude_embeddings: bool) -> int:
        return 2

    def forward(self, words: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(words))
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / kwargs.get("num_items_in_batch", (labels != -100).sum()), "logits": logits}


class Untold(Tagger):
    """A mean over its own labels, as models have it that take no number of them."""

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(words, labels)


class Regression(torch.nn.Module):
    """A loss that is a mean over rows and asks for no number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(words.float() / 11).squeeze(1)
        return {"loss": torch.nn.functional.mse_loss(out, labels[:, 7].float() / 11), "logits": out}


class Patience(TrainerCallback):
    """What EarlyStoppingCallback does, in attributes of its own."""

    def __init__(self, patience: int) -> None:
        self.patience, self.waited, self.losses = patience, 0, []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        loss = metrics["eval_loss"]
        self.waited = self.waited + 1 if self.losses and loss >= min(self.losses) else 0
        self.losses.append(loss)
        if self.waited >= self.patience:
            control.should_training_stop = True


class Counting(EarlyStoppingCallback):
    """Counts beside what its base class says that it remembers."""

    def __init__(self, patience: int) -> None:
        super().__init__(patience)
        self.counts = [0, 0]

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.counts[0] += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.counts[1] += 1


class Plain(Trainer):
    """The library's own, with the batches that the elastic one gets in a world of one."""

    def get_train_dataloader(self) -> Any:
        return ElasticDataLoader(self.train_dataset, global_batch_size=BATCH, seed=42)


def train(
    kind: type[Trainer] = ElasticTrainer, model: str = "tagger", stopping: Any = EarlyStoppingCallback, **settings: Any
) -> dict[str, Any]:
    """Train until the evaluation, whose labels are others, has become worse twice; return what there is to compare."""
    torch.manual_seed(0)
    args = TrainingArguments(
        **{
            "output_dir": "unused",
            "num_train_epochs": 8,
            "learning_rate": 0.02,
            "warmup_steps": 4,
            "logging_steps": 3,
            "eval_strategy": "epoch",
            "metric_for_best_model": "eval_loss",
            "save_strategy": "no",
            "per_device_train_batch_size": BATCH,
            "disable_tqdm": True,
            "use_cpu": True,
            **settings,
        }
    )
    callback = stopping(2)
    trainer = kind(
        model={"tagger": Tagger, "untold": Untold, "regression": Regression}[model](),
        args=args,
        train_dataset=Words(100),
        eval_dataset=Words(20, shift=5),
        callbacks=[callback],
        **({"global_batch_size": BATCH} if kind is ElasticTrainer else {}),
    )
    output = trainer.train()
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
    history = [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]
    return {
        "weights": torch.cat([each.detach().flatten() for each in trainer.model.parameters()]).tolist(),
        "history": [value for entry in history for value in entry.values()],
        "names": [name for entry in history for name in entry],
        "best": trainer.state.best_metric,
        "steps": trainer.state.global_step,
        "operations": trainer.state.total_flos,
        "train_loss": output.training_loss,
        "counts": getattr(callback, "counts", []),
    }


def trainer_of(args: dict[str, Any], **settings: Any) -> ElasticTrainer:
    """A small one, with these arguments of ``TrainingArguments`` and these of its own."""
    given = {"save_strategy": "no", "use_cpu": True, "output_dir": "unused", **args}
    model = settings.pop("model", None) or Tagger()
    settings = {"train_dataset": Words(8), "global_batch_size": 4, **settings}
    return ElasticTrainer(model=model, args=TrainingArguments(**given), **settings)


def stop_on_one_rank(output_dir: str, hook: str) -> int:
    """Have a callback stop training on rank 1 after three steps. Return how many steps there were."""
    import spark_elastic as se

    def stop(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if se.rank() == 1 and state.global_step == 3:
            control.should_training_stop = control.should_evaluate = True

    Stop = type("Stop", (TrainerCallback,), {hook: stop})
    args = TrainingArguments(
        output_dir=output_dir, save_strategy="no", disable_tqdm=True, use_cpu=True, report_to=[], logging_steps=1
    )
    trainer = ElasticTrainer(
        model=Tagger(), args=args, train_dataset=Words(100), eval_dataset=Words(20), callbacks=[Stop()],
        global_batch_size=BATCH,
    )  # fmt: skip
    trainer.train()
    return int(trainer.state.global_step)
