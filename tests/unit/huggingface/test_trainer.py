"""ElasticTrainer in one process, beside the Trainer that it extends; test_frameworks.py has jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_training import BATCH, Plain, Tagger, Untold, Words, train
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from spark_elastic.data import ElasticDataLoader
from spark_elastic.huggingface import ElasticTrainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Trainer makes its output_dir here, though it saves nothing."""
    monkeypatch.chdir(tmp_path)


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


def trainer_of(args: dict[str, Any], **settings: Any) -> ElasticTrainer:
    given = {"save_strategy": "no", "use_cpu": True, "output_dir": "unused", **args}
    model = settings.pop("model", None) or Tagger()
    settings = {"train_dataset": Words(8), "global_batch_size": 4, **settings}
    return ElasticTrainer(model=model, args=TrainingArguments(**given), **settings)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps does not go with an ElasticTrainer: global_batch",
        ),
        ({"save_strategy": "steps"}, r"save_strategy .* run\(checkpoint="),
        ({"auto_find_batch_size": True}, "auto_find_batch_size .*per_device_train_batch_size"),
        ({"torch_compile": True}, r"torch_compile .*model\.compile\(\)"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha .*again"),
        ({"optim": "lomo"}, "optim .*lomo steps within backward"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen .*tokens of one rank"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
    ],
)
def test_settings_that_would_be_left_out_or_train_wrongly_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer_of(args)


def test_smoothed_labels_of_a_language_model_are_refused_as_the_trainer_would_not_shift_them() -> None:
    sizes = {"vocab_size": 11, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    with pytest.raises(ValueError, match=r"label_smoothing_factor .*shift"):
        trainer_of({"label_smoothing_factor": 0.1}, model=model)
    assert trainer_of({}, model=model).elastic.progress is None


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
