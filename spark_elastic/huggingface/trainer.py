"""ElasticTrainer: the Trainer of transformers, with training that continues in each world from the last commit."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import NotInWorldError
from spark_elastic.huggingface.callbacks import Exported, GoOn, Last
from spark_elastic.huggingface.checks import refuse
from spark_elastic.huggingface.label_means import IGNORED, Inputs, averages_labels
from spark_elastic.worker.collectives import allgather_object, allreduce, broadcast_object
from spark_elastic.worker.context import device, rank
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.elastic import elastic
from spark_elastic.worker.optimizers.scaling import micro_batches
from spark_elastic.worker.shards.sharding import refuse_loader
from spark_elastic.worker.state.attributes import Attributes, by_name
from spark_elastic.worker.state.torch_state import TorchState

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
        refuse(self)
        # The log, one line of JSON per entry. Each commit holds a copy.
        self._history = ""
        # Whether a model that is not given the number of labels returns a mean over them; None if that is not known yet.
        self._averages_labels: bool | None = None
        if (loader is None) == (self.train_dataset is None) or (loader is None) == (global_batch_size is None):
            raise ValueError("give train_dataset= and global_batch_size=, or a loader=")
        if loader is None:
            loader = self._loader_of_dataset(global_batch_size)
        refuse_loader(loader)
        # This is done once, for the steps of the whole training: the Trainer would create them anew in each world.
        self.create_optimizer_and_scheduler(self.set_initial_training_values(self.args, loader)[-1])
        self._created_lr_scheduler = False
        self._created_lr_scheduler = False
        created: Any = self
        created.create_optimizer = lambda *_, **__: self.optimizer
        created.create_scheduler = lambda *_, **__: self.lr_scheduler
        kept: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "progress": None}
        if self.accelerator.scaler is not None:
            kept["scaler"] = self.accelerator.scaler
        model: Any = self.model
        self.elastic = TorchState(
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
        self._remembering: dict[str, Exported | Attributes] = {}
        # ``GoOn`` comes first, because it sets the epoch that the other callbacks see; ``Last`` follows all of them.
        self.callback_handler.callbacks.insert(0, GoOn(self))
        self._last = Last(self)

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
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as an elastic function: in each world, continue from the last commit, until all ranks have trained all steps.

        May be called once in a job. Raises ``ValueError`` for a checkpoint or a trial, and whatever an elastic function raises.
        """
        if resume_from_checkpoint or trial is not None:
            raise ValueError(
                "resume_from_checkpoint= and trial= would start over after each change of the world: give run(checkpoint=), "
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

    def training_step(self, model: torch.nn.Module, inputs: Inputs, num_items_in_batch: object = None) -> torch.Tensor:
        """Compute the gradients of this rank's rows, part by part, and return the mean loss of the global batch."""
        if self._averages_labels is None:
            self._averages_labels = self._find_mean(inputs)
        wrapped, items = self.elastic.model, self._count(inputs)
        wrapped.train()
        rows = self.elastic.loader.batch_rows[rank()]  # 0 if the rank repeats a batch, which has no weight
        if items is not None:
            wrapped.set_rows(items if rows else 0)
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        for part, share, counted in self._parts(inputs, items):
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(wrapped, self._prepare_inputs(part), num_items_in_batch=counted)
            self.accelerator.backward(share * loss)
            total += share * loss.detach() if share else 0.0  # a mean over no labels is NaN
        weight = rows if items is None or not rows else items
        own = [total * weight, total.new_tensor(weight), total.new_tensor(super().floating_point_ops(dict(inputs)))]
        loss_sum, weights, self._operations = allreduce(torch.stack(own), "sum")
        mean: torch.Tensor = (loss_sum / weights).float()
        return mean

    def floating_point_ops(self, inputs: Inputs) -> Any:
        """Return the number of floating-point operations of the last step, on all ranks together."""
        return self._operations

    def _parts(self, inputs: Inputs, items: int | None) -> Iterator[tuple[Inputs, float, torch.Tensor | None]]:
        """Yield the parts of a batch, each with its share of the labels or rows, and its number of labels (None for rows)."""
        rows = {len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()}
        parts: Iterable[tuple[Inputs, float]] = [(dict(inputs), 1.0)]
        if max(rows, default=0) > self.args.per_device_train_batch_size:
            parts = micro_batches(self.elastic.model, dict(inputs), self.args.per_device_train_batch_size)
        for part, share in parts:
            counted = self._count(part)
            if items is None or counted is None:
                yield part, share, None
            else:  # at least 1, because a mean over no labels is undefined
                yield part, counted / max(items, 1), torch.tensor(max(counted, 1), device=self.args.device)

    def _count(self, inputs: Inputs) -> int | None:
        """Count the labels that the loss is a mean over; None if the model's loss is a mean over rows."""
        items = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        if items is None and self._averages_labels:
            return self._count_labels(inputs["labels"])
        return None if items is None else int(items)

    def _count_labels(self, labels: torch.Tensor) -> int:
        return int((labels[..., 1:] if self._loss_shifts_labels else labels).ne(IGNORED).sum())

    def _find_mean(self, inputs: Inputs) -> bool | None:
        """Return whether a model that is not given the number of labels returns a mean over them.

        It is tried by the first rank whose batch has an ignored label, as another model may not know of them; None if none has.
        """
        labels = inputs.get("labels")
        if self.model_accepts_loss_kwargs or self.compute_loss_func is not None:
            return False
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return False
        ignoring = allgather_object(bool((labels == IGNORED).any()))
        if not any(ignoring):
            return None
        root = ignoring.index(True)
        found = broadcast_object(self._try_mean(inputs) if rank() == root else None, root)
        if found is None and rank() == root:
            warnings.warn(
                f"whether the loss of {type(self.model).__name__} is a mean over labels or over rows cannot be told, so ranks "
                "count by the labels that are not -100. If that is wrong, give compute_loss_func=, which is told their number",
                stacklevel=2,
            )
        return found is not False

    def _try_mean(self, inputs: Inputs) -> bool | None:
        """Try the model with a row and the same row with fewer labels; see ``averages_labels``."""
        model: Any = self.model

        def loss(part: Inputs) -> float:
            with self.compute_loss_context_manager():
                computed: Any = self.compute_loss(model, self._prepare_inputs(part))
                return float(computed)

        model.eval()
        used = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(used):
            try:
                return averages_labels(loss, inputs, self._count_labels)
            except Exception:  # a row may be more than the tensors, or the model may take no two of them
                return None

    # ------------------------------------------------------------------ commits

    def _init_training_state(self, max_steps: int, steps_of_an_epoch: int, *others: object) -> tuple[int, int]:
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
        self.current_flos = 0 if progress is None else progress["operations"]
        if progress is not None:
            self._tr_loss, self._initial_global_step = progress["loss"].to(self.args.device, copy=True), 0
            self._total_loss_scalar, self._globalstep_last_logged = progress["total_loss"], progress["last_logged"]
            self._averages_labels = progress["averages_labels"]

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
            "operations": self.current_flos,
            "averages_labels": self._averages_labels,
        }
        self.elastic.commit()

    def _forget(self) -> None:
        """Reset callbacks to their state before training, before their ``on_train_begin``."""
        remembering = [
            each
            for each in self.callback_handler.callbacks
            if isinstance(each, ExportableState) or type(each).__module__.partition(".")[0] not in _LIBRARIES
        ]
        for name, callback in by_name(remembering).items():
            if name not in self._remembering:
                self._remembering[name] = (
                    Exported(callback) if isinstance(callback, ExportableState) else Attributes(callback)
                )
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

    def _evaluate(self, *arguments: Any, **settings: Any) -> dict[str, float]:
        """Evaluate after steps and epochs, and at the start of training, but not at the start of a later world."""
        if not self._is_deciding and self.elastic.progress is not None:
            return {}
        return super()._evaluate(*arguments, **settings)

    def _run_epoch(self, *arguments: object, **named: object) -> None:
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

    def log(self, logs: dict[str, float], *arguments: float | None) -> None:
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
