"""ElasticTrainer in one process, beside the Trainer that it extends; test_frameworks.py has jobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from huggingface_training import BATCH, Plain, Untold, Words, train, trainer_of
from transformers import TrainingArguments

from spark_elastic.data import ElasticDataLoader
from spark_elastic.huggingface import ElasticTrainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("model", ["tagger", "untold", "regression"])
@pytest.mark.parametrize("settings", [{}, {"max_steps": 10, "max_grad_norm": 0.01}])
def test_alone_it_trains_evaluates_and_logs_as_the_trainer_does(model: str, settings: dict[str, Any]) -> None:
    expected, got = train(Plain, model, **settings), train(model=model, **settings)
    assert got.pop("names") == expected.pop("names")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("model", ["tagger", "untold", "regression"])
def test_a_batch_that_is_computed_in_parts_trains_alike(model: str) -> None:
    whole, parts = (
        train(model=model, num_train_epochs=2),
        train(model=model, num_train_epochs=2, per_device_train_batch_size=3),
    )
    assert parts["history"] == pytest.approx(whole["history"], rel=1e-3)
    assert parts["weights"] == pytest.approx(whole["weights"], rel=1e-3, abs=1e-5)


class Strict(Untold):
    """Knows nothing of labels that are to be ignored."""

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        assert bool((labels >= 0).all())
        return super().forward(words, labels)


def test_a_model_is_not_tried_with_ignored_labels_unless_the_data_have_some() -> None:
    rows = [{"words": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    trainer = trainer_of({"num_train_epochs": 1, "report_to": []}, model=Strict(), train_dataset=rows)
    trainer.train()
    assert (trainer.state.global_step, trainer._averages_labels) == (2, None)


class Own(ElasticTrainer):
    """Creates an optimizer and a scheduler of its own, as the Trainer's documentation suggests."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 - step / num_training_steps
        )
        return self.lr_scheduler


def test_an_optimizer_and_a_scheduler_of_a_subclass_are_created_once_for_all_worlds() -> None:
    rows = [{"words": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    trainer = Own(
        model=Untold(),
        args=TrainingArguments(num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no"),
        train_dataset=rows,
        global_batch_size=4,
    )
    created = trainer.optimizer, trainer.lr_scheduler
    trainer.train()
    assert (trainer.elastic.optimizer, trainer.elastic.scheduler) == created
    assert trainer.optimizer.optimizer is created[0]
    assert created[1].last_epoch == 2


def test_sampling_that_the_loader_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="train_sampling_strategy='group_by_length'"):
        trainer_of({"train_sampling_strategy": "group_by_length"})


def test_a_loader_with_shards_is_refused_as_a_trainer_computes_a_batch_whole() -> None:
    loader = ElasticDataLoader(Words(8), global_batch_size=4, shards=2)
    with pytest.raises(ValueError, match=r"shards=2, for a loop over model.parts\(batch\), and a Trainer computes"):
        trainer_of({}, train_dataset=None, global_batch_size=None, loader=loader)


def test_data_come_from_a_dataset_or_from_a_loader() -> None:
    loader = ElasticDataLoader(Words(8), global_batch_size=4)
    given = {"train_dataset": None, "global_batch_size": None, "loader": loader}
    assert trainer_of({}, **given).get_train_dataloader() is loader
    for wrong in ({"loader": loader}, {"global_batch_size": None}, {"train_dataset": None}):
        with pytest.raises(ValueError, match=r"give train_dataset= and global_batch_size=, or a loader="):
            trainer_of({}, **wrong)


def test_arguments_of_the_dataloader_are_those_of_the_training_arguments() -> None:
    given = {"dataloader_drop_last": True, "data_seed": 7, "train_sampling_strategy": "sequential"}
    loader = trainer_of(given, train_dataset=Words(10)).get_train_dataloader()
    assert len(loader) == 2
    assert loader.place[0] == 7
    loader.set_world(0, 1)
    assert torch.equal(next(iter(loader))["words"], torch.stack([Words(10)[row]["words"] for row in range(4)]))


def test_a_checkpoint_of_the_library_is_no_place_to_go_on_from() -> None:
    with pytest.raises(ValueError, match=r"resume_from_checkpoint= .*run\(checkpoint=\)"):
        trainer_of({}).train(resume_from_checkpoint="checkpoint-1")


def test_more_objects_are_kept_in_the_state() -> None:
    trainer = trainer_of({}, objects={"seen": 3}, commit="in_place")
    assert trainer.elastic.seen == 3
    assert len(trainer.elastic.loader) == 8 // 4 < BATCH
    with pytest.raises(TypeError, match="optimizer"):
        trainer_of({}, objects={"optimizer": None})
