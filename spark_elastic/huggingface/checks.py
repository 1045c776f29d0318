"""Refuses settings of a Trainer that an ElasticTrainer cannot take, saying what to write instead."""

from __future__ import annotations

from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.training_args import OptimizerNames

from spark_elastic.worker.context import device


def refuse(trainer: Trainer) -> None:
    """Raise ``ValueError`` for settings that would train wrongly or be ignored. See docs/coming-from/huggingface.md."""
    args = trainer.args
    if args.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            "a worker is one process that its Trainer trains alone: leave out deepspeed=, fsdp= and torchrun"
        )
    if args.device.type != device().type:
        raise ValueError(
            f"TrainingArguments has chosen {args.device} and this worker has {device()}: "
            + ("use_cpu=True" if device().type == "cpu" else "leave out use_cpu")
        )
    args._n_gpu = min(args.n_gpu, 1)  # otherwise the Trainer uses all GPUs that it sees
    refused = {
        "gradient_accumulation_steps": (
            args.gradient_accumulation_steps > 1,
            "global_batch_size= has the rows of a step, and per_device_train_batch_size how many are computed at a time",
        ),
        "save_strategy": (
            args.save_strategy != "no",
            'give save_strategy="no", and run(checkpoint=, checkpoint_best=)',
        ),
        "model_init": (
            trainer.model_init is not None,
            "it would start over after each change of the world: give model=",
        ),
        "auto_find_batch_size": (args.auto_find_batch_size, "give per_device_train_batch_size"),
        "torch_compile": (args.torch_compile, "call model.compile() ahead of the ElasticTrainer"),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha,
            "its hook would be added again after each change of the world",
        ),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen not in ("no", False),
            "it would count the tokens of one rank",
        ),
        "optim": (
            "lomo" in args.optim or "layerwise" in args.optim,
            f"{OptimizerNames(args.optim).value} steps within backward, before gradients are averaged",
        ),
        "label_smoothing_factor": (
            args.label_smoothing_factor and type(trainer.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
            "the Trainer would not shift labels, as it does not know the model in its wrapper: give compute_loss_func=",
        ),
    }
    for name, (is_given, reason) in refused.items():
        if is_given:
            raise ValueError(f"{name} does not go with an ElasticTrainer: {reason}")
