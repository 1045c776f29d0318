"""An elastic Hugging Face Trainer: after each change of the world it continues from the last commit, in the same process.

::

    def train_fn():
        trainer = ElasticTrainer(
            model=model, args=TrainingArguments(save_strategy="no"), train_dataset=dataset, global_batch_size=64
        )
        trainer.train()

    spark_elastic.run(train_fn, min_np=1, max_np=8)

Each worker is one process with one device, so the Trainer sees a single process. This package provides the batches, averages
the gradients and makes the commits. Requires ``pip install "transformers[torch]"``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.training_args import OptimizerNames

from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import NotInWorldError
from spark_elastic.worker.collectives import allreduce, broadcast_object
from spark_elastic.worker.context import device, rank
from spark_elastic.worker.ddp import DistributedDataParallel
from spark_elastic.worker.elastic import elastic
from spark_elastic.worker.scaling import micro_batches
from spark_elastic.worker.state.attributes import Attributes, by_name
from spark_elastic.worker.state.torch_state import TorchState

__all__ = ["ElasticTrainer"]

# The fields of TrainerState that record progress. The others are settings.
_PROGRESS = (
    "epoch",
    "global_step",
    "total_flos",
    "best_metric",
    "best_global_step",
)
# The fields of TrainerControl by which callbacks make requests.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_evaluate", "should_log")
# The packages whose callbacks hold no state of a training run, unless they are an ``ExportableState``.
_LIBRARIES = ("spark_elastic", "transformers")


class ElasticTrainer(Trainer):
    """A ``Trainer`` whose ``train`` survives losses and arrivals of workers.

    It takes the arguments of ``Trainer``, and these:

    Args:
        global_batch_size: the rows of a step, on all ranks together. A rank computes at most
            ``args.per_device_train_batch_size`` rows of its share at a time, and accumulates their gradients.
        loader: one of this package's loaders with ``global_batch_size=``, instead of ``train_dataset`` and ``global_batch_size``.
        commit, local: as in ``TorchState``.
        objects: further objects to keep in the State, by name.

    If batches have ``labels``, gradients are means over the labels of the global batch that are not -100, else over its rows.
    Each step is committed after its logging and evaluation; the last step of an epoch, after those of the epoch. The commit
    holds what was logged, ``best_metric``, and the state of callbacks: what an ``ExportableState`` such as
    ``EarlyStoppingCallback`` names, and attributes that are numbers, strings, arrays or containers of these. If a callback
    stops training on one rank, all ranks stop. The logged loss is that of global batches, and everything logged is also
    reported to the job. Each rank evaluates all rows of ``eval_dataset`` and takes rank 0's metrics.

    ``elastic`` is the ``TorchState``. Raises ``ValueError`` for arguments that would be ignored or applied wrongly.
    """

    def __init__(
        self,
        *positional: Any,
        global_batch_size: int | None = None,
        loader: Any = None,
        commit: str = "copy",
        local: str | Iterable[str] | Mapping[str, object] | None = None,
        objects: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """Set up ``Trainer``, create the optimizer, the scheduler and the loader, and wrap the model.

        Reads no rows. Raises ``ValueError`` for arguments that do not fit, and whatever ``Trainer``, ``ElasticDataLoader`` and
        ``TorchState`` raise.
        """
        super().__init__(*positional, **arguments)
        _refuse(self)
        # The log, one line of JSON per entry. Each commit holds a copy.
        self._history = ""
        if (loader is None) == (self.train_dataset is None) or (loader is None) == (global_batch_size is None):
            raise ValueError("give train_dataset= and global_batch_size=, or a loader=")
        if loader is None:
            loader = self._loader_of_dataset(global_batch_size)
        # This is done once, for the steps of the whole training: the Trainer would create a new scheduler in each world.
        self.create_optimizer_and_scheduler(self.set_initial_training_values(self.args, loader)[-1])
        self._created_lr_scheduler = False
        kept: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "progress": None}
        if self.accelerator.scaler is not None:
            kept["scaler"] = self.accelerator.scaler
        model: Any = self.model
        self.elastic: Any = TorchState(
            model=DistributedDataParallel(model, find_unused_parameters=bool(self.args.ddp_find_unused_parameters)),
            loader=loader,
            commit=commit,
            local=local,
            **kept,
            **(objects or {}),
        )
        # Whether the Trainer is in the logging and evaluation that follows steps and epochs, which all ranks do together.
        self._is_deciding = False
        # The state of callbacks, by callback name.
        self._remembering: dict[str, _Exported | Attributes] = {}
        # ``_GoOn`` comes first, because it sets the epoch that the other callbacks see; ``_Last`` follows all of them.
        self.callback_handler.callbacks.insert(0, _GoOn(self))
        self._last = _Last(self)

    def _loader_of_dataset(self, global_batch_size: int | None) -> ElasticDataLoader:
        args, dataset, collate = self.args, self.train_dataset, self.data_collator
        if type(dataset).__module__.partition(".")[0] == "datasets":
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        sampling = str(getattr(args, "train_sampling_strategy", "random"))
        if sampling not in ("random", "sequential"):
            raise ValueError(f"train_sampling_strategy={sampling!r}: rows are read in a random or a sequential order")
        return ElasticDataLoader(
            dataset,
            global_batch_size=global_batch_size,
            shuffle=sampling == "random",
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory and device().type == "cuda",
        )

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as an elastic function: in each world, continue from the last commit, until all ranks have trained all steps.

        May be called once in a job. Raises ``ValueError`` for a checkpoint or a trial, and whatever an elastic function raises.
        """
        if resume_from_checkpoint or trial is not None:
            raise ValueError(
                "resume_from_checkpoint= and trial= would begin anew after each change of the world: give run(checkpoint=), "
                "from which a job goes on, and search over jobs"
            )
        callbacks = self.callback_handler.callbacks
        callbacks[:] = [each for each in callbacks if each is not self._last] + [self._last]
        train = super().train
        train_in_world = elastic(lambda _: train(ignore_keys_for_eval=ignore_keys_for_eval))
        output: TrainOutput = train_in_world(self.elastic)
        return output

    # ------------------------------------------------------------------ a step

    def get_train_dataloader(self) -> Any:
        """Return the State's loader."""
        return self.elastic.loader

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the gradients of this rank's rows, part by part, and return the mean loss of the global batch."""
        model, items = self.elastic.model, self._count(inputs)
        model.train()
        rows = self.elastic.loader.batch_rows[rank()]  # 0 if the rank repeats a batch, which has no weight
        if items is not None:
            model.set_rows(items if rows else 0)
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        for part, share, counted in self._parts(inputs, items):
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, self._prepare_inputs(part), num_items_in_batch=counted)
            self.accelerator.backward(share * loss)
            total += share * loss.detach()
        weight = rows if items is None or not rows else items
        own = [total * weight, total.new_tensor(weight), total.new_tensor(super().floating_point_ops(dict(inputs)))]
        loss_sum, weights, self._operations = allreduce(torch.stack(own), "sum")
        mean: torch.Tensor = (loss_sum / weights).float()
        return mean

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Return the number of floating-point operations of the last step, on all ranks together."""
        return self._operations

    def _parts(
        self, inputs: Mapping[str, Any], items: int | None
    ) -> Iterator[tuple[dict[str, Any], float, torch.Tensor | None]]:
        """Yield the parts of a batch, each with its share of the labels or rows, and its number of labels (None for rows)."""
        rows = {len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()}
        parts: Iterable[tuple[dict[str, Any], float]] = [(dict(inputs), 1.0)]
        if max(rows, default=0) > self.args.per_device_train_batch_size:
            parts = micro_batches(self.elastic.model, dict(inputs), self.args.per_device_train_batch_size)
        for part, share in parts:
            counted = self._count(part)
            if items is None or counted is None:
                yield part, share, None
            else:  # at least 1, because a mean over no labels is undefined
                yield part, counted / max(items, 1), torch.tensor(max(counted, 1), device=self.args.device)

    def _count(self, inputs: Mapping[str, Any]) -> int | None:
        """Count the labels that the loss is a mean over; None if the model's loss is a mean over rows."""
        items = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        return None if items is None else int(items)

    # ------------------------------------------------------------------ commits

    def _init_training_state(self, max_steps: int, steps_of_an_epoch: int, *others: Any) -> tuple[int, int]:
        """Begin at the last commit. Return how many epochs to skip, and 0, because the loader itself skips the batches."""
        begin: tuple[int, int] = super()._init_training_state(max_steps, steps_of_an_epoch, *others)
        progress = self.elastic.progress
        if progress is None:
            self._history = ""
            return begin
        self._history = progress["history"]
        vars(self.state).update(
            progress["state"], log_history=[json.loads(line) for line in self._history.splitlines()]
        )
        is_over = progress["is_stopped"] or self.state.global_step >= max_steps
        return sys.maxsize if is_over else progress["epoch"], 0

    def _begin(self) -> None:
        """Restore the sums of losses, which the Trainer has set to zero."""
        progress = self.elastic.progress
        if progress is not None:
            self._tr_loss, self._initial_global_step = progress["loss"].to(self.args.device, copy=True), 0
            self._total_loss_scalar, self._globalstep_last_logged = progress["total_loss"], progress["last_logged"]

    def _commit(self) -> None:
        loader = self.elastic.loader
        is_over = self.state.global_step >= self.state.max_steps
        self.elastic.progress = {
            "state": {name: getattr(self.state, name) for name in _PROGRESS},
            "history": self._history,
            "callbacks": {name: values for name, known in self._remembering.items() if (values := known.values())},
            "epoch": loader.epoch + (self._is_at_end() and not (is_over and loader.steps_left)),
            "is_stopped": self.control.should_training_stop and not is_over,
            "loss": self._tr_loss.clone(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
        }
        self.elastic.commit()

    def _forget(self) -> None:
        """Reset callbacks to their state before training, ahead of their ``on_train_begin``."""
        remembering = [
            each
            for each in self.callback_handler.callbacks
            if isinstance(each, ExportableState) or type(each).__module__.partition(".")[0] not in _LIBRARIES
        ]
        for name, callback in by_name(remembering).items():
            if name not in self._remembering:
                is_exported = isinstance(callback, ExportableState)
                self._remembering[name] = _Exported(callback) if is_exported else Attributes(callback)
        for known in self._remembering.values():
            known.reset()

    def _remember(self) -> None:
        """Give callbacks the state that they had at the last commit."""
        for known in self._remembering.values():
            known.begin()
        self._load()

    def _load(self) -> None:
        remembered = {} if self.elastic.progress is None else self.elastic.progress["callbacks"]
        for name, known in self._remembering.items():
            known.load(remembered.get(name))

    def _agree(self) -> None:
        """Make all ranks stop, log or evaluate if a callback of any rank requests it."""
        wanted = allreduce(torch.tensor([int(getattr(self.control, name)) for name in _FLAGS]), "max")
        for name, flag in zip(_FLAGS, wanted.tolist(), strict=True):
            setattr(self.control, name, bool(flag))

    def _is_at_end(self) -> bool:
        """Whether no more batches of the epoch will be trained."""
        control = self.control
        return not self.elastic.loader.steps_left or control.should_epoch_stop or control.should_training_stop

    def _maybe_log_save_evaluate(self, *others: Any, **arguments: Any) -> None:
        self._is_deciding = True
        try:
            super()._maybe_log_save_evaluate(*others, **arguments)
        finally:
            self._is_deciding = False
        if not self._is_at_end():
            self._commit()

    def _run_epoch(self, *arguments: Any, **named: Any) -> None:
        super()._run_epoch(*arguments, **named)  # type: ignore[no-untyped-call]
        self._commit()

    # ------------------------------------------------------------------ one rank of several

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0, whose callbacks report to MLflow, TensorBoard and the like."""
        try:
            return rank() == 0
        except NotInWorldError:
            return True

    def is_local_process_zero(self) -> bool:
        """Return whether this is rank 0, the only rank that prints: the output of all workers reaches the driver."""
        return self.is_world_process_zero()

    def evaluation_loop(self, *arguments: Any, **settings: Any) -> EvalLoopOutput:
        """Evaluate all rows on each rank. During training, all ranks return rank 0's metrics, so that they decide alike."""
        output: EvalLoopOutput = super().evaluation_loop(*arguments, **settings)
        return output._replace(metrics=broadcast_object(output.metrics)) if self.is_in_train else output

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Log as ``Trainer`` does, and report the numbers to the job before the commit that they belong to."""
        super().log(logs, *arguments)
        entry = self.state.log_history[-1]
        for name in [name for name in entry if name.endswith(("runtime", "per_second"))]:
            del entry[name]  # these differ between ranks
        self._history += json.dumps(entry, default=float) + "\n"
        self.elastic.report(**{name: value for name, value in logs.items() if isinstance(value, (int, float))})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as ``Trainer`` does, on rank 0 only."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)


class _GoOn(TrainerCallback):
    """Runs first: restores progress when training begins, and sets the epoch after each step."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._begin()
        self._trainer._forget()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loader = self._trainer.elastic.loader
        state.epoch = loader.epoch + 1 - loader.steps_left / len(loader)  # the Trainer counts from this world's start


class _Last(TrainerCallback):
    """Runs after all other callbacks: restores their state, and has all ranks agree on their requests."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        # Whether training continues in the middle of an epoch.
        self._is_within = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._remember()
        loader = self._trainer.elastic.loader
        self._is_within = 0 < loader.steps_left < len(loader)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._agree()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._trainer._agree()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        if self._is_within:  # callbacks that count epochs had already counted this one
            self._trainer._load()
        self._is_within = False

    def on_log(self, *_: Any, **__: Any) -> None:
        if self._trainer._is_deciding:
            self._trainer._agree()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self._trainer._is_deciding:
            self._trainer._agree()


class _Exported:
    """The state that an ``ExportableState`` names, with the methods of ``Attributes``, which keeps what a subclass adds."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._others = Attributes(callback)
        self._before = self._exported()

    def _exported(self) -> dict[str, Any]:
        return dict(self._callback.state()["attributes"])

    def values(self) -> dict[str, Any]:
        return {**self._others.values(), **self._exported()}

    def reset(self) -> None:
        self._others.reset()
        vars(self._callback).update(self._before)

    def begin(self) -> None:
        self._others.begin()

    def load(self, values: Mapping[str, Any] | None) -> None:
        self._others.load({name: value for name, value in (values or {}).items() if name not in self._before})
        vars(self._callback).update({name: value for name, value in (values or {}).items() if name in self._before})


def _refuse(trainer: Trainer) -> None:
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
            "it would begin anew after each change of the world: give model=",
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
