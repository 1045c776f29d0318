"""What a Trainer is told that an ElasticTrainer cannot take, and what it is told to give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from huggingface_training import Tagger, Words, trainer_of
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from spark_elastic.huggingface import ElasticTrainer, checks

pytestmark = pytest.mark.filterwarnings("ignore")


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


def test_a_function_that_makes_the_model_is_refused_as_it_would_start_over() -> None:
    args = TrainingArguments(output_dir="unused", save_strategy="no", use_cpu=True)
    with pytest.raises(ValueError, match=r"model_init .*start over.* give model="):
        ElasticTrainer(model_init=Tagger, args=args, train_dataset=Words(8), global_batch_size=4)


def test_several_processes_of_the_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match=r"a worker is one process .*leave out deepspeed=, fsdp= and torchrun"):
        trainer_of({})


def test_another_device_than_the_workers_is_refused_with_the_argument_that_chooses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "device", lambda: torch.device("cuda", 0))
    with pytest.raises(ValueError, match="has chosen cpu and this worker has cuda:0: leave out use_cpu"):
        trainer_of({})


def test_of_the_gpus_that_the_trainer_sees_it_uses_one() -> None:
    trainer = trainer_of({})
    trainer.args._n_gpu = 4
    checks.refuse(trainer)
    assert trainer.args.n_gpu == 1
