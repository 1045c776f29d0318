"""The training function of a fit. It runs in every worker, and is elastic only through the public interface of spark_elastic."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import spark_elastic as se
from spark_elastic.data import ParquetLoader
from spark_elastic.data.kernels import pin_threads
from spark_elastic.errors import DataError, NotFiniteLossError
from spark_elastic.estimator.callback_runner import CallbackRunner
from spark_elastic.estimator.callbacks import Metrics
from spark_elastic.estimator.class_weights import class_of_rows
from spark_elastic.estimator.fit_state import FitState, history_of, kept_weights
from spark_elastic.estimator.fitted import PlainAttributes, parted_weights, weights_of
from spark_elastic.estimator.layout import plain
from spark_elastic.estimator.objective import TINY, Pair, label_weights, refuse_ignored, united
from spark_elastic.estimator.plan import Trained, TrainingPlan
from spark_elastic.estimator.row_checks import check_classes, check_indexes, check_rows, check_weights, check_whole
from spark_elastic.estimator.schedules import Course, make_scheduler
from spark_elastic.estimator.steps import LossWatch, Passes, check_frozen, make_optimizer
from spark_elastic.estimator.training_device import training_device
from spark_elastic.worker.from_first import broadcast_from_first

_log = logging.getLogger(__name__)
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepContext:
    """What a custom ``trainStep`` sees.

    epoch, step: the current ones, from 0. rows: the rows of this batch on this rank; 0 for a repeated batch.
    """

    epoch: int
    step: int
    rows: int
    device: torch.device
    optimizer: torch.optim.Optimizer


def train(plan: TrainingPlan) -> Trained | None:
    """Train, in a job or as a world of one. Return the result on rank 0, and None on the other ranks.

    Rank 0 raises ``NotFiniteLossError`` when a loss has ended training: if the others raised it, too, they would end the job
    before rank 0 has told the callbacks.
    """
    torch.manual_seed(plan.seed)
    trainer = Trainer(plan)
    state = trainer.make_state()
    try:
        se.elastic(trainer.run)(state)
    except Exception as error:
        trainer.callbacks.fail(state, error)
        raise
    if se.rank() != 0:
        return None
    if trainer.not_finite is not None:
        diverged = NotFiniteLossError(
            f"{plan.run_id} ended in {trainer.not_finite}; look at learningRate, gradientClipNorm and the labels, or set "
            "terminateOnNaN=False to continue anyway"
        )
        trainer.callbacks.fail(state, diverged)
        raise diverged
    trainer.callbacks.end(state)
    network = trainer.model.module
    weights, buffers = parted_weights(network, weights_of(network) if state.best is None else state.best)
    return Trained(weights, buffers, history_of(state), trainer.attributes.changed())


class Trainer:
    """A fit in one worker. It holds what stays the same in all generations; everything that changes is in the state."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan
        if plan.data.shards is not None:
            pin_threads()  # the loader's warning is not for this model, whose weights the driver has made
        self.device = training_device(plan.use_gpu)
        # Looking for parameters without a gradient takes time in each step, but without it such parameters fail with several
        # workers.
        has_unused = plan.has_unused and plan.data.shards is None
        self.model = se.DistributedDataParallel(plan.model.to(self.device), find_unused_parameters=has_unused)
        self.attributes = PlainAttributes(self.model.module)
        self.optimizer = make_optimizer(plan.steps, self.model)
        self._frozen = {name for name, parameter in plan.model.named_parameters() if not parameter.requires_grad}
        half = plan.steps.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type) if half else None
        self.objective = plan.objective.to(self.device)
        self._class_weights = torch.tensor(plan.class_weights, device=self.device) if plan.class_weights else None
        self.loader = plan.data.open(plan.data.training_url, columns=plan.layout.columns, **plan.data.training)
        self.scheduler = make_scheduler(plan.steps, self.optimizer, self._course)
        self.callbacks = CallbackRunner(plan, self.model.module)
        # Where a loss was not finite, which ends the fit; and the last epoch for which that was logged.
        self.not_finite: str | None = None
        self._complained: int | None = None
        # The weight of a batch in the last step, if rows have weights; the same number on all ranks.
        self._last_weight = 0.0
        self._is_weighted = bool(plan.layout.weight or plan.class_weights or plan.weighs_labels)
        self._losses = LossWatch()
        self._classes = set(plan.class_labels) - set(plan.layout.features)

    def _course(self) -> Course:
        """The length of the fit, if it does not depend on the size of the world."""
        limit = self.plan.steps_per_epoch
        steps = limit
        if self.plan.data.global_batch_size is not None:
            steps = -(-len(self.loader) // self.plan.steps.passes)
            steps = steps if limit is None else min(steps, limit)
        assert steps is not None, "the driver has refused a fit whose steps are not known"
        return Course(self.plan.epochs, steps)

    def make_state(self) -> FitState:
        """Make the state of everything that has to survive, as of before the first step."""
        optional: dict[str, Any] = {"scheduler": self.scheduler, "scaler": self.scaler}
        return FitState(
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            commit="sharded" if self.plan.steps.zero_redundancy else "copy",
            **{name: value for name, value in optional.items() if value is not None},
            epoch=0,
            step=0,
            global_step=0,
            sums=None,
            names=[],
            sizes=[],
            history=b"",
            stopped=0,
            best=None,
            seconds=0.0,
            callbacks=self.plan.callbacks,
            callbacks_given=self.plan.callbacks_given,
            begun="",
        )

    def run(self, state: FitState) -> None:
        """Train from the state's position to the end."""
        self.not_finite, self._losses, self._last_weight = None, LossWatch(), 0.0
        if not isinstance(state.history, bytes):  # it comes from a checkpoint of an earlier release
            earlier: list[Metrics] = state.history
            state.history = b"".join(json.dumps(entry, default=_as_plain).encode() + b"\n" for entry in earlier)
        if state.best is not None:
            state.best = kept_weights(state.best)
        if state.callbacks_given != self.plan.callbacks_given:  # the run continues with other callbacks
            state.callbacks, state.callbacks_given = self.plan.callbacks, self.plan.callbacks_given
            state.best = None  # what the others have kept
        if state.epoch == 0 and state.step == 0:
            torch.manual_seed((self.plan.seed * 1009 + se.rank()) % 2**63)  # dropout masks differ between ranks
        self.callbacks.begin(state)
        # A callback stops training only for the number of epochs requested at the time: a fit that requests more continues.
        while max(state.epoch, state.stopped) < self.plan.epochs:
            state.count_seconds()
            if state.sizes[-1:] != [se.size()]:
                state.sizes = [*state.sizes, se.size()]
            self._train_epoch(state)
            if self.not_finite is None:
                self._end_epoch(state)
            if self.not_finite is not None:
                if self.plan.steps.zero_redundancy:
                    # The last durable checkpoint is assembled from the live weights, which have to be those of a commit.
                    state.commit()
                return

    # ------------------------------------------------------------------ steps

    def _train_epoch(self, state: FitState) -> None:
        limit = self.plan.steps_per_epoch or float("inf")
        if state.step >= limit:
            return
        check_frozen(self.optimizer, self.model.module, self._frozen)
        self.model.train()
        taken = planned = 0
        passes = Passes(0, 1.0)
        position = self.loader.rows_processed
        sums: torch.Tensor | float = 0.0
        for columns in self.loader:
            if not taken:
                self.optimizer.zero_grad(set_to_none=True)
                planned = min(self.plan.steps.passes, self.loader.steps_left + 1)
                passes = Passes(planned, self._last_weight or self._rows_of_a_batch())
            taken += 1
            with nullcontext() if taken == planned else self.model.no_sync():
                sums = sums + (self._backward if self.plan.data.shards is None else self._backward_parts)(
                    state, columns, passes
                )
            if self.not_finite is not None:  # the step is skipped, and a continued fit begins with its rows
                self.optimizer.zero_grad(set_to_none=True)
                self.loader.load_state_dict({**self.loader.state_dict(), "position": position})
                return
            if taken < planned:
                continue
            self._step(passes.rest())
            if self._is_weighted and passes.total:
                self._last_weight = passes.total / planned
            assert isinstance(sums, torch.Tensor), "at least one batch was taken"
            state.sums = sums if state.sums is None else state.sums + sums
            self.callbacks.end_batch(state, sums, self.optimizer)
            taken, sums, position = 0, 0.0, self.loader.rows_processed
            state.step, state.global_step = state.step + 1, state.global_step + 1
            every = self.plan.checkpoint_steps
            durable = every is not None and state.step % every == 0
            if durable or state.step % self.plan.commit_steps == 0:
                state.commit(durable=durable)
            if state.step >= limit:
                break

    def _backward(self, state: FitState, columns: dict[str, torch.Tensor], passes: Passes) -> torch.Tensor:
        """Run forward and backward on one batch. Return loss, metrics and weight, each summed over all ranks."""
        batch = self._prepare(columns)
        count = self._count(batch, columns)
        if not count:
            raise DataError(
                f"the transform has left none of the {length(columns)} rows of a batch: drop rows before fit, or give them a "
                "weight of 0 (weightCol)"
            )
        rows = count if self.loader.batch_rows[se.rank()] else 0
        weight = self._weights(batch)
        if weight is not None and not rows:
            # A repeated batch must add nothing, even if the rows of all other ranks have no weight.
            weight = torch.zeros_like(weight)
        amount = float(rows if weight is None else weight.sum())
        if weight is not None or self.plan.data.transform is not None:  # a transform may leave out or add rows
            self.model.set_rows(max(amount, TINY))
        with self._precision():
            loss, pairs = self._forward(self.model, state, batch, rows, weight)
        values = {"loss": loss.detach(), **self.objective.measure(self.plan.layout, pairs, weight)}
        state.names = [*values, "weight"]
        sums = torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values.values()]
        )
        sums = torch.cat([sums * amount if amount else torch.zeros_like(sums), sums.new_tensor([amount])])
        # The sums are reduced while backward computes, and waited for before the commit that counts the batch.
        work = dist.all_reduce(sums, async_op=True) if se.size() > 1 else None
        scaled = loss * (passes.part(self._batch_weight(sums, work)) if passes.planned > 1 else 1.0)
        (self.scaler.scale(scaled) if self.scaler else scaled).backward()
        if work is not None:
            work.wait()
        self._end_if_not_finite(state, "loss", self._losses.see(sums[0]))
        return sums

    def _count(self, batch: Mapping[str, torch.Tensor], columns: Mapping[str, torch.Tensor]) -> int:
        """Return the number of rows after the transform: that of a label, or else of a feature."""
        layout = self.plan.layout
        named = (batch.get(name) for name in (*layout.labels, *layout.features))
        found = next((each for each in named if isinstance(each, torch.Tensor) and each.dim()), None)
        return length(columns) if found is None else len(found)

    def _rows_of_a_batch(self) -> int:
        data = self.plan.data
        return data.global_batch_size or (data.batch_size or 1) * se.size()

    def _batch_weight(self, sums: torch.Tensor, work: dist.Work | None) -> float:
        """Return the weight of a batch on all ranks: the last of its ``sums``, for which this waits if it is not known."""
        if not self._is_weighted and self.plan.data.transform is None:
            return sum(self.loader.batch_rows)
        if work is not None:
            work.wait()
        return float(sums[-1])

    def _weights(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the weight of each row [rows]; None if all weights are equal."""
        layout, factors = self.plan.layout, self._class_weights
        weights = [batch[layout.weight].float()] if layout.weight else []
        if factors is not None:
            weights.append(factors[class_of_rows(batch[layout.labels[0]], layout.labels[0], len(factors))])
        if self.plan.weighs_labels:
            within = label_weights(self.objective.losses[0], batch[layout.labels[0]])
            weights += [] if within is None else [within]
        return math.prod(weights[1:], start=weights[0]) if weights else None

    def _backward_parts(self, state: FitState, columns: dict[str, torch.Tensor], passes: Passes) -> torch.Tensor:
        """Do the same as ``_backward``, shard by shard, so that all bits are the same in any world."""
        rows = sum(self.loader.batch_rows)
        factor = passes.part(rows)
        parts = self.model.parts(columns)
        for part in parts:
            batch = self._prepare(part)
            if (count := self._count(batch, part)) != length(part):
                raise DataError(
                    f"deterministic=True weights shards by their rows, and the transform has made {count} rows of "
                    f"{length(part)}: drop or repeat rows before fit, or weight them in a trainStep"
                )
            with self._precision():
                loss, pairs = self._forward(self.model, state, batch, length(part), None)
            parts.note(loss=loss, **self.objective.measure(self.plan.layout, pairs))
            scaled = loss * factor
            (self.scaler.scale(scaled) if self.scaler else scaled).backward()
        state.names = [*parts.means, "weight"]
        self._end_if_not_finite(state, "loss", parts.means["loss"])
        return torch.tensor([*(mean * rows for mean in parts.means.values()), rows], dtype=torch.float64)

    def _end_if_not_finite(self, state: FitState, name: str, total: float) -> None:
        """End the fit if a loss is not finite. All ranks see the same sum over ranks, and so decide alike."""
        if math.isfinite(total):
            return
        where = f"epoch {state.epoch}, step {state.step}: {name} is {total:g}"
        if se.rank() == 0 and self._complained != state.epoch:
            self._complained = state.epoch
            _log.warning("%s", where)
            state.report(epoch=state.epoch, **{name: total})
        if self.plan.terminate_on_nan:
            self.not_finite = where

    def _check_weight(self, purpose: str, total: float) -> None:
        """Raise ``DataError`` if the weights of an epoch's rows add up to 0, so that there is no mean.

        All ranks see the same sum over ranks. A fit that continues despite a NaN loss only logs a warning.
        """
        if total:
            return
        column = self.plan.layout.weight
        sources = {
            f"weightCol: column {column!r}": column,
            "classWeights": self.plan.class_weights,
            "loss: the weights of labels, of which some are ignored": self.plan.weighs_labels,
        }
        what = f"all weights of rows ({', '.join(source for source, is_given in sources.items() if is_given)})"
        sentence = f"{what} are 0 in the rows of this epoch's {purpose}"
        if self.plan.terminate_on_nan:
            raise DataError(f"{sentence}, so its loss is NaN; give some of these rows a weight above 0")
        if se.rank() == 0:
            _log.warning("%s; its loss is NaN", sentence)

    def _forward(
        self,
        model: torch.nn.Module,
        state: FitState,
        batch: dict[str, torch.Tensor],
        rows: int,
        weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Sequence[Pair]]:
        """Return the loss, and each (loss, output, label) to measure; empty if a custom step does not return outputs."""
        layout, objective, custom = self.plan.layout, self.objective, self.plan.steps.train_step
        if custom is None:
            pairs = objective.pairs(layout, layout.call(model, batch), batch)
            if self.plan.may_ignore:
                refuse_ignored(pairs, layout.labels)
            return objective.loss(pairs, weight), pairs
        result = custom(model, batch, StepContext(state.epoch, state.step, rows, self.device, self.optimizer))
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise TypeError(f"trainStep must return the loss as a tensor of one number, not {loss!r}")
        if outputs is None and objective.metrics:
            raise TypeError("metrics are measured on outputs: trainStep must return (loss, outputs)")
        return loss, [] if outputs is None else objective.pairs(layout, outputs, batch)

    def _step(self, rest: float) -> None:
        """Make a step. rest: the remaining factor of the gradients, which may be accumulated over several batches."""
        steps = self.plan.steps
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        for parameter in self.model.parameters() if rest != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(rest)
        if steps.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), steps.clip_norm)
        if steps.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.model.parameters(), steps.clip_value)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None and steps.scheduler_interval == "step":
            self.scheduler.step()

    def _prepare(
        self, columns: Mapping[str, torch.Tensor], loader: ParquetLoader | None = None
    ) -> dict[str, torch.Tensor]:
        batch = dict(columns)
        if self.plan.data.check:
            check_rows(batch, self.plan.layout.columns, self.loader if loader is None else loader)
            check_weights(batch, self.plan.layout.weight)
            check_classes(batch, self.plan.class_labels, self.plan.classes)
            check_indexes(batch, self.plan.layout.categories)
        check_whole(batch, self.plan.layout.whole)  # for lists, fit only knows their lengths
        for name in self._classes:
            if batch[name].dim() == 1:  # a list may hold probabilities of classes
                batch[name] = batch[name].long()
        if self.device.type != "cpu":
            batch = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        batch = {name: plain(value) for name, value in batch.items()}
        if self.plan.data.transform is not None:
            batch = self.plan.data.transform(batch)
        # A custom step gets the grouped inputs, too.
        for entry in self.plan.layout.inputs if self.plan.steps.train_step else ():
            if entry.name is not None:
                batch[entry.name] = entry.tensor(batch)
        return batch

    def _precision(self) -> AbstractContextManager[object]:
        dtype = _PRECISIONS.get(self.plan.steps.precision or "")
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    # ------------------------------------------------------------------ the end of an epoch

    def _end_epoch(self, state: FitState) -> None:
        check_frozen(self.optimizer, self.model.module, self._frozen)
        self.model.eval()
        if se.size() > 1 and self.plan.data.shards is None:
            # Each rank has the buffers of its own last batch, but the validated network has to be the result.
            broadcast_from_first(self.model.module.buffers())
        if state.sums is not None:
            self._check_weight("training", float(state.sums[-1]))
        metrics: Metrics = {"epoch": state.epoch, **_means(state.names, state.sums)}
        if self.plan.data.validation_url is not None:
            metrics |= {f"val_{name}": value for name, value in self._validate(state).items()}
            if self.not_finite is not None:
                return
        metrics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None and self.plan.steps.scheduler_interval == "epoch":
            watched = metrics.get("val_loss", metrics["loss"])
            plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([watched] if plateau else []))
        state.count_seconds()
        metrics |= {"rows": self.loader.rows_processed, "seconds": state.seconds, "sizes": list(state.sizes)}
        metrics, state.callbacks, stop, keep = self.callbacks.end_epoch(state, metrics)
        if keep:
            state.best = kept_weights(weights_of(self.model.module))
        # The history is kept as bytes, which commits do not copy, however many epochs it covers.
        state.history += json.dumps(metrics, default=_as_plain).encode() + b"\n"
        state.epoch, state.step, state.sums, state.sizes, state.seconds = state.epoch + 1, 0, None, [], 0.0
        state.stopped = self.plan.epochs if stop else 0
        self.loader.set_epoch(state.epoch)
        state.commit(durable=True)
        if se.rank() == 0:
            state.report(**{name: value for name, value in metrics.items() if isinstance(value, (int, float, str))})

    def _validate(self, state: FitState) -> dict[str, float]:
        """Return means over all rows of the validation data. A stateful metric is computed over all rows."""
        layout, objective, data = self.plan.layout, self.objective, self.plan.data
        assert data.validation_url is not None
        # With shards, every rank validates all rows, because the bits of sums over ranks depend on the ranks.
        shard = (se.rank(), se.size()) if data.shards is None else (0, 1)
        # By default a validation batch has as many rows as a training batch has on this rank, or in a shard.
        size = data.validation_batch_size or -(-(data.global_batch_size or 1) // (data.shards or se.size()))
        loader = data.open(data.validation_url, batch_size=size, columns=layout.columns, shuffle=False, shard=shard)
        whole = objective.accumulators(layout, self.device)
        names = ["loss", *(name for name in objective.metrics_of(layout) if name not in whole), "weight"]
        sums = torch.zeros(len(names), dtype=torch.float64)
        with torch.no_grad():
            for columns in loader:
                batch = self._prepare(columns, loader)
                rows = self._count(batch, columns)
                if not rows:  # the transform has left no rows
                    continue
                weight = self._weights(batch)
                with self._precision():
                    loss, pairs = self._forward(self.model.module, state, batch, rows, weight)
                for metric, place in whole.values():
                    metric.update(*pairs[place][1:])
                values = {"loss": float(loss), **objective.measure(layout, pairs, weight, but=whole)}
                amount = float(rows if weight is None else weight.sum())
                if amount:
                    sums += torch.tensor([*(values[name] for name in names[:-1]), 1.0], dtype=torch.float64) * amount
                state.heartbeat()
        if data.shards is None:
            sums = se.allreduce(sums.to(self.device), op="sum")
        self._check_weight("validation", float(sums[-1]))
        self._end_if_not_finite(state, "val_loss", float(sums[0]))
        means = _means(names, sums)
        computed = {name: metric if data.shards else united(metric) for name, (metric, _) in whole.items()}
        return {**means, **{name: float(metric.compute()) for name, metric in computed.items()}}


def _as_plain(value: object) -> object:
    """Convert a value that JSON cannot represent. Callbacks may add such values to an epoch's metrics."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) in (1, ()) else str(value)


def length(columns: Mapping[str, torch.Tensor]) -> int:
    """Return the number of rows in the loader's columns."""
    return len(next(iter(columns.values())))


def _means(names: list[str], sums: torch.Tensor | None) -> dict[str, float]:
    """Divide sums by the last one, which is the weight."""
    if sums is None:
        return {"loss": float("nan")}
    *values, weight = sums.tolist()
    return {name: value / weight if weight else float("nan") for name, value in zip(names[:-1], values, strict=True)}
