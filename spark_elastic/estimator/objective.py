"""What training minimizes and reports: losses (one per label, or one for all) and metrics."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import torch

import spark_elastic as se
from spark_elastic.errors import DataError
from spark_elastic.estimator.layout import Layout, outputs_of, plain
from spark_elastic.estimator.shapes import ClassificationLoss, meet, name_of, takes_classes

# Replaces a weight of zero, to avoid dividing by zero.
TINY = 1e-37
# The numbers in an epoch of the history besides the user's metrics.
OWN_NUMBERS = frozenset({"epoch", "learning_rate", "loss", "rows", "seconds", "sizes", "val_loss", "weight"})
# The label that torch's cross entropy ignores by default.
_IGNORED = -100

Loss = Callable[..., torch.Tensor]
# A function of output and label, or an object with ``update``, ``compute`` and ``reset``.
Metric = Any
# A loss with the output and the label that it is called with.
Pair = tuple[Loss, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Objective:
    """Losses with their weights, and metrics by name.

    losses: functions of (output, label), or ``torch.nn`` losses. metrics: functions of (output, label) that return a number for
    each row, or one for the batch, or objects with ``update``, ``compute`` and ``reset``, like those of torchmetrics. count: the
    number of pairs of output and label.
    """

    losses: tuple[Loss, ...]
    weights: tuple[float, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    count: int = 1

    def to(self, device: torch.device) -> Objective:
        """Return an objective whose losses and metrics have their tensors, such as class weights, on ``device``."""
        if device.type == "cpu":
            return self
        metrics = {name: moved(metric, device) for name, metric in self.metrics.items()}
        return replace(self, losses=tuple(moved(loss, device) for loss in self.losses), metrics=metrics)

    def for_outputs(self, layout: Layout, outputs: int) -> Objective:
        """Return the objective of a network with so many outputs."""
        return replace(self, count=1 if outputs == 1 and len(self.losses) == 1 else len(layout.labels))

    def pairs(self, layout: Layout, outputs: object, batch: Mapping[str, torch.Tensor]) -> list[Pair]:
        """Return (loss, output, label), in matching shapes, for each loss.

        If there is one loss and one output but several labels of one number each, the labels are put side by side.
        """
        found = outputs_of(outputs, layout)
        labels = [plain(batch[name]) for name in layout.labels]
        losses = self.losses
        if len(found) == 1 and len(labels) > 1 and len(losses) == 1:
            labels = [torch.stack([label.float() for label in labels], 1)]
        elif len(losses) == 1:
            losses = losses * len(labels)
        if len(found) < len(labels):
            raise ValueError(
                f"the model returns {len(found)} outputs for {len(labels)} labels: {', '.join(layout.labels)}"
            )
        return [(loss, *meet(output, label, loss)) for loss, output, label in zip(losses, found, labels, strict=False)]

    def class_labels(self, layout: Layout, outputs: int) -> tuple[str, ...]:
        """Return the labels that losses take as class indexes; several labels of one output are not indexes."""
        if outputs < len(layout.labels):
            return ()
        losses = self.losses if len(self.losses) > 1 else self.losses * len(layout.labels)
        pairs = zip(layout.labels, losses, strict=True)
        return tuple(name for name, loss in pairs if isinstance(loss, ClassificationLoss) or takes_classes(loss))

    def loss(self, pairs: Sequence[Pair], weight: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum of the losses, each a mean over rows, weighted by ``weight`` [rows] if it is given."""
        if self.weights and len(self.weights) != len(pairs):
            raise ValueError(
                f"lossWeights={list(self.weights)} are for {len(self.weights)} losses, and the network has one output, whose one "
                "loss takes all labels side by side: return an output for each label, or weigh within a loss of your own"
            )
        factors = self.weights or (1.0,) * len(pairs)
        total: torch.Tensor | float = 0.0
        for factor, (loss, output, label) in zip(factors, pairs, strict=True):
            value = loss(output, label) if weight is None else _weighted_mean(loss, output, label, weight)
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"a loss must return a tensor, and {name_of(loss)} returned {value!r}")
            total = total + factor * (value if value.dim() == 0 else value.mean())
        assert isinstance(total, torch.Tensor), "a network has at least one loss"
        return total

    def measure(
        self, layout: Layout, pairs: Sequence[Pair], weight: torch.Tensor | None = None, but: Collection[str] = ()
    ) -> dict[str, float]:
        """Return the value of each metric for one batch, except those in ``but``.

        For a metric that returns one number for each row, the value is the mean, weighted by ``weight`` [rows] if given.
        """
        if not self.metrics or not pairs:
            return {}
        if len(pairs) != self.count:
            raise TypeError(
                f"metrics are measured on outputs like those of the network, of which labels take {self.count}, and trainStep "
                f"returned {len(pairs)}"
            )
        values = {}
        for name, (metric, place) in self.metrics_of(layout).items():
            if name in but:
                continue
            _, output, label = pairs[place]
            if keeps_state(metric):
                metric.to(output.device).reset()
            values[name] = _number(name, metric(output.detach(), label), weight, len(output))
        return values

    def check_metrics(self, layout: Layout, pairs: Sequence[Pair]) -> None:
        """Raise TypeError for a metric that returns no number. Errors that a metric raises for so few rows are ignored."""
        for name, (metric, place) in self.metrics_of(layout).items():
            _, output, label = pairs[place]
            try:
                value = metric(output.detach(), label)
            except Exception:  # for example a metric that needs rows of each class
                continue
            _number(name, value, None, len(output))

    def metrics_of(self, layout: Layout) -> dict[str, tuple[Metric, int]]:
        """Return each metric with the position of its label. If there are several labels, names begin with the label."""
        if self.count == 1:
            return {name: (metric, 0) for name, metric in self.metrics.items()}
        places = [(place, label) for place, label in enumerate(layout.labels) if place < self.count]
        return {f"{label}_{name}": (metric, place) for place, label in places for name, metric in self.metrics.items()}

    def check_names(self, layout: Layout) -> None:
        """Raise ValueError for metrics whose names in the history mean something else, or another metric."""
        found = self.metrics_of(layout)
        for name in {**found, **self.metrics}:
            if name in OWN_NUMBERS or name.startswith("val_"):
                raise ValueError(
                    f"metrics: {name!r} is a name of the history's own; give the metric, or the label that the name begins with, "
                    "another name"
                )
        if len(found) < len(self.metrics) * self.count:
            raise ValueError(
                f"metrics: labels {list(layout.labels)} and metrics {list(self.metrics)} give the same name in the history "
                "twice, as a label's name is followed by a metric's; rename one"
            )

    def accumulators(self, layout: Layout, device: torch.device) -> dict[str, tuple[Metric, int]]:
        """Return fresh copies of the stateful metrics, by name, each with the position of its label.

        None of them combines its state over ranks by itself; see ``united``.
        """
        kept = {name: entry for name, entry in self.metrics_of(layout).items() if keeps_state(entry[0])}
        copies = {name: (copy.deepcopy(metric).to(device), place) for name, (metric, place) in kept.items()}
        for metric, _ in copies.values():
            metric.reset()
            for part in _torchmetrics_in(metric):
                part.sync_on_compute = part._to_sync = False  # the one is for later calls, the other for the next
        return copies


def keeps_state(metric: object) -> bool:
    """Whether a metric is an object that accumulates over batches, as those of torchmetrics do."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def united(metric: Metric) -> Metric:
    """Return the metric over the rows of all ranks, all of which call this.

    The metrics of torchmetrics would exchange their states themselves, but each list by itself, so that ranks that have updated
    a list another number of times, or never, wait for each other or send what does not fit.
    """
    if se.size() == 1:
        return metric
    if _is_of_torchmetrics(metric):
        _merge_states(metric, se.allgather_object(_states(metric)))
        return metric
    # The metric's class may be from a script or a notebook, which plain pickle cannot import.
    gathered = se.allgather_object(cloudpickle.dumps(metric.to(torch.device("cpu"))))
    first, *others = map(cloudpickle.loads, gathered)
    first.merge_state(others)
    return first


def _torchmetrics_in(metric: Metric) -> list[Metric]:
    """Return the metrics of torchmetrics that a metric consists of: itself and, for a wrapper, those within it."""
    parts = metric.modules() if isinstance(metric, torch.nn.Module) else ()
    return [part for part in parts if _is_of_torchmetrics(part)]


def _is_of_torchmetrics(metric: object) -> bool:
    return hasattr(metric, "_reductions") and hasattr(metric, "sync_on_compute")


def _states(metric: Metric) -> list[tuple[int, dict[str, object]]]:
    """Return how often each part was updated, and its states by name, on the CPU: tensors, and lists."""
    cpu = torch.device("cpu")
    return [
        (part._update_count, {name: moved(getattr(part, name), cpu) for name in part._reductions})
        for part in _torchmetrics_in(metric)
    ]


def _merge_states(metric: Metric, gathered: Sequence[list[tuple[int, dict[str, object]]]]) -> None:
    """Give a metric of torchmetrics the states of all ranks. Ranks that have not updated a part have nothing to add to it."""
    for part, *found in zip(_torchmetrics_in(metric), *gathered, strict=True):
        states = [state for count, state in found if count] or [state for _, state in found]
        for name, reduce in part._reductions.items():
            values = [state[name] for state in states]
            if isinstance(values[0], list):
                whole: object = [entry for value in values for entry in value]
            else:
                stacked = torch.stack(values)
                whole = stacked if reduce is None else reduce(stacked)
            setattr(part, name, moved(whole, part.device))
        part._update_count = sum(count for count, _ in found)


def check_united(name: str, metric: object) -> None:
    """Raise TypeError for a stateful metric whose state cannot be combined over ranks."""
    if keeps_state(metric) and not (_is_of_torchmetrics(metric) or hasattr(metric, "merge_state")):
        raise TypeError(
            f"metrics: {name} keeps a state, so that each worker would compute it over its own rows of validation only: take a "
            "metric of torchmetrics, or give it merge_state(others), which adds the state of others of its kind to its own"
        )


def moved(value: Any, device: torch.device) -> Any:
    """Return a copy of a function or an object with its tensors (attributes, defaults, closure values) on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(moved(entry, device) for entry in value)
    if type(value) is dict:
        return {key: moved(entry, device) for key, entry in value.items()}
    if isinstance(value, torch.nn.Module):
        copied = copy.deepcopy(value).to(device)
        for part in copied.modules():
            loose = {name: entry for name, entry in vars(part).items() if isinstance(entry, torch.Tensor)}
            vars(part).update(moved(loose, device))
        return copied
    if isinstance(value, functools.partial):
        return functools.partial(moved(value.func, device), *moved(value.args, device), **moved(value.keywords, device))
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, moved(value.__self__, device))
    if isinstance(value, types.FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        cells = tuple(types.CellType(entry if entry is value else moved(entry, device)) for entry in closed)
        defaults = moved(value.__defaults__, device)
        function = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        function.__kwdefaults__ = moved(value.__kwdefaults__, device)
        function.__dict__.update(value.__dict__)
        return function
    if hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)) and callable(value):
        copied = copy.copy(value)
        vars(copied).update(moved(dict(vars(value)), device))
        return copied
    return value


def label_weights(loss: object, label: torch.Tensor) -> torch.Tensor | None:
    """Return the weights [rows] by whose sum the mean of torch's cross entropy divides, added up over each row's labels.

    A label has the weight of its class, or 0 if it is ignored. Returns None for other losses, and for labels that are
    probabilities.
    """
    options = _cross_entropy_options(loss)
    if options is None or label.is_nested or (label.is_floating_point() and label.dim() > 1 and label.shape[-1] > 1):
        return None
    weight, ignored = options
    classes = label.long().reshape(len(label), -1)
    counted = classes != ignored
    if weight is None:
        return counted.float().sum(1)
    return torch.where(counted, weight[torch.where(counted, classes, 0)], 0.0).sum(1)


def weighs_labels(loss: object) -> bool:
    """Whether this is torch's cross entropy with class weights, or with a label to ignore."""
    weight, ignored = _cross_entropy_options(loss) or (None, _IGNORED)
    return weight is not None or ignored != _IGNORED


def ignores(loss: object, label: float | None) -> bool:
    """Whether this is torch's cross entropy and ignores this label."""
    options = _cross_entropy_options(loss)
    return options is not None and options[1] == label


def is_cross_entropy(loss: object) -> bool:
    """Whether this is torch's cross entropy, which ignores labels."""
    return _cross_entropy_options(loss) is not None


def refuse_ignored(pairs: Sequence[Pair], labels: Sequence[str]) -> None:
    """Raise ``DataError`` if a loss ignores labels, and rows cannot be weighted by their counted labels."""
    for place, (loss, _, label) in enumerate(pairs):
        _, ignored = _cross_entropy_options(loss) or (None, None)
        if ignored is not None and not label.is_nested and bool((label == ignored).any()):
            name = labels[place] if len(pairs) > 1 else labels[0]
            raise DataError(
                f"{name_of(loss)} ignores labels of column {name!r} that are {ignored}, so that its mean is over other rows than "
                "that of the other losses, or of the other shards: drop these rows, or weight them by 0 in a trainStep"
            )


def _cross_entropy_options(loss: object) -> tuple[torch.Tensor | None, int] | None:
    """Return the class weights and the ignored label of torch's cross entropy; None for other losses."""
    if isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)):
        return loss.weight, loss.ignore_index
    given = loss.keywords if isinstance(loss, functools.partial) else {}
    if getattr(loss, "func", loss) in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
        return given.get("weight"), given.get("ignore_index", _IGNORED)
    return None


def _weighted_mean(loss: Loss, output: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor
    if hasattr(loss, "reduction"):
        each = copy.copy(loss)
        each.reduction = "none"
        values = each(output, label)
    elif _takes_reduction(loss):
        values = loss(output, label, reduction="none")
    else:
        values = loss(output, label)
    if values.shape[:1] != weight.shape:
        raise ValueError(f"weights need a loss for each row: {name_of(loss)} has neither reduction= nor returns [rows]")
    values = values.reshape(len(weight), -1)
    within = label_weights(loss, label)
    if within is not None:
        values = values.sum(1) / within.clamp(min=TINY)
    else:
        values = values.sum(1) if _reduction_of(loss) == "batchmean" else values.mean(1)
    return (values * weight).sum() / weight.sum().clamp(min=TINY)


def _number(name: str, value: Any, weight: torch.Tensor | None, rows: int) -> float:
    if isinstance(value, torch.Tensor) and value.shape == (rows,):
        value = value.float().mean() if weight is None else (value * weight).sum() / weight.sum().clamp(min=TINY)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(
            f"metrics: {name!r} must return one number for each row, or one for a batch, such as a mean, not {shown}"
        ) from error


def _reduction_of(loss: Loss) -> object:
    """Return the reduction that a loss was made with; None if it was made with none."""
    keywords: Mapping[str, object] = getattr(loss, "keywords", {})  # of a functools.partial
    return getattr(loss, "reduction", keywords.get("reduction"))


def _takes_reduction(loss: Callable[..., object]) -> bool:
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False
