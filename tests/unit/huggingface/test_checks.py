"""What a Trainer is told that an ElasticTrainer cannot take, and what it is told to give instead."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_training import trainer_of
from transformers import AutoConfig, AutoModelForCausalLM

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
