"""Recipe: what a fit trains, tried on the driver before anything is trained."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from spark_elastic.estimator.expectations import check_labels, check_mean, check_output
from spark_elastic.estimator.frame import Facts
from spark_elastic.estimator.layout import Layout, outputs_of
from spark_elastic.estimator.objective import Objective, ignores, is_cross_entropy, refuse_ignored, weighs_labels
from spark_elastic.estimator.plan import StepPlan
from spark_elastic.estimator.preflight import described, try_layouts
from spark_elastic.estimator.shapes import name_of, shown_shape
from spark_elastic.worker.module_registers import same_values


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how: copies of the network and of an optimizer instance over it, with their settings.

    is_weighted: whether rows have different weights in the loss. is_sharded: whether steps have the same bits in any world.
    has_unused: whether the loss does not depend on some trained parameters.
    """

    network: torch.nn.Module
    layout: Layout
    steps: StepPlan
    objective: Objective | None
    on_cpu: bool
    transform: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    is_weighted: bool = False
    is_sharded: bool = False
    has_unused: bool = False

    def checked_on(self, batch: dict[str, torch.Tensor], *, labels_known: bool = True) -> Recipe:
        """Try one step on the driver's CPU, if it can run there, and return the recipe with what the step has shown.

        Of a network whose steps run elsewhere, this only tries how it takes columns, as scoring does, once rows are known.
        labels_known: whether the labels are real, not made up. Raises ValueError if network, columns, labels and losses do not
        fit each other.
        """
        if not self.on_cpu:
            return self._called_on(batch) if labels_known else self
        with own_randomness(0):
            return self._stepped_on(self.transform(batch) if self.transform else batch, labels_known)

    def _called_on(self, batch: dict[str, torch.Tensor]) -> Recipe:
        """Call the network in evaluation mode, and return the recipe with the layout that it takes."""
        with own_randomness(0):
            outputs, layout, _ = try_layouts(copy.deepcopy(self.network).eval(), self.layout, batch)
        objective = self.objective and self.objective.for_outputs(layout, len(outputs_of(outputs, layout)))
        return replace(self, layout=layout, objective=objective)

    def _stepped_on(self, batch: dict[str, torch.Tensor], labels_known: bool) -> Recipe:
        """Call a copy of the network and its losses, compute gradients, and return the recipe with what that has shown."""
        outputs, layout, tried = try_layouts(self.network, self.layout, batch)
        found = outputs_of(outputs, layout)
        if self.objective is None:
            return replace(self, layout=layout, has_unused=False)
        trial = copy.deepcopy(self.objective)
        try:
            pairs = trial.pairs(layout, outputs, batch)
            if labels_known:
                for place, (loss, output, label) in enumerate(pairs):
                    named = layout.labels if len(pairs) == 1 else layout.labels[place : place + 1]
                    check_labels(loss, output, label, _listed(named))
                if len(pairs) > 1:
                    refuse_ignored(pairs, layout.labels)
            rows = len(next(iter(batch.values())))
            weight = batch[layout.weight].float() if layout.weight else torch.ones(rows) if self.is_weighted else None
            total = trial.loss(pairs, weight)
        except Exception as error:
            raise ValueError(
                f"labels do not fit the loss: {error} (label columns {', '.join(described(batch, layout.labels))}; "
                f"outputs {', '.join(map(shown_shape, found))})"
            ) from error
        for loss, output, _ in pairs:
            check_output(loss, output)
        if not total.requires_grad:
            raise ValueError(
                "nothing can be learnt, because the loss has no gradient: frozen parameters, detach(), argmax and "
                "torch.no_grad() leave none"
            )
        total.backward()
        if self.is_sharded:
            _refuse_changed_buffers(self.objective.losses, trial.losses)
        for loss, output, label in pairs:  # these call a loss again, which may change what its gradient is made of
            check_mean(loss, output.detach(), label)
        replace(trial, count=len(pairs)).check_metrics(layout, pairs)
        unused = any(parameter.requires_grad and parameter.grad is None for parameter in tried.parameters())
        return replace(self, layout=layout, objective=replace(self.objective, count=len(pairs)), has_unused=unused)

    def check_evaluation(self, batch: dict[str, torch.Tensor]) -> None:
        """Raise ValueError if losses would misinterpret the network's outputs in evaluation mode."""
        if not self.on_cpu or self.objective is None:
            return
        with own_randomness(0):
            batch = self.transform(batch) if self.transform else batch
            outputs = self.layout.call(copy.deepcopy(self.network).eval(), batch)
            for loss, output, _ in self.objective.pairs(self.layout, outputs, batch):
                check_output(loss, output, "in evaluation ")

    def check_categories(self, batch: Mapping[str, torch.Tensor], facts: Facts) -> None:
        """Try the largest index of each column of categories. Raises ValueError, naming it, if the network cannot take it."""
        for name in self.layout.categories:
            if (most := facts.get(name, {}).get("max")) is not None:
                self.checked_on({**batch, name: torch.full_like(batch[name], most)})

    def weighs_labels(self, facts: Facts, shards: int | None, sample: Mapping[str, torch.Tensor]) -> bool:
        """Whether the only loss may divide by the weights of its labels. Raises ValueError if, with shards, it ignores some.

        facts: those of the whole data; for lists they only have the lengths. sample: a few rows.
        """
        if self.objective is None or len(self.layout.labels) != 1 or self.steps.train_step is not None:
            return False
        (loss,), (label,) = self.objective.losses, self.layout.labels
        least = self._least(label, facts, sample)
        has_ignored = ignores(loss, least)
        if has_ignored and shards is not None:
            raise ValueError(
                f"deterministic=True weights the shards of a batch by their rows, and {name_of(loss)} ignores some labels of "
                f"column {label!r}: drop these rows, or weight them by 0 in a trainStep"
            )
        may_ignore = least is None and shards is None and is_cross_entropy(loss)
        return has_ignored or may_ignore or weighs_labels(loss)

    def may_ignore(self, facts: Facts, shards: int | None, sample: Mapping[str, torch.Tensor]) -> bool:
        """Whether steps have to look for labels that a loss ignores, because rows cannot be weighted by their counted labels."""
        if (
            self.objective is None
            or self.steps.train_step is not None
            or (shards is None and len(self.layout.labels) < 2)
        ):
            return False
        least = [self._least(label, facts, sample) for label in self.layout.labels]
        losses = [loss for loss in self.objective.losses if is_cross_entropy(loss)]
        return any(each is None or ignores(loss, each) for loss in losses for each in least)

    def _least(self, label: str, facts: Facts, sample: Mapping[str, torch.Tensor]) -> float | None:
        """Return the least label; None if facts lack it: for lists they have lengths, and a transform may change labels."""
        known = label in facts and sample[label].dim() == 1 and self.transform is None
        return facts[label]["min"] if known else None

    def class_labels(self, outputs: int) -> tuple[str, ...]:
        """Return the columns that losses take as class indexes, provided that losses receive the columns unchanged."""
        if self.objective is None or self.transform is not None or self.steps.train_step is not None:
            return ()
        return self.objective.class_labels(self.layout, outputs)


def _refuse_changed_buffers(losses: Sequence[object], tried: Sequence[object]) -> None:
    for loss, called in zip(losses, tried, strict=True):
        if isinstance(loss, torch.nn.Module) and isinstance(called, torch.nn.Module):
            present = dict(called.named_buffers())
            for name, buffer in loss.named_buffers():
                if name not in present or not same_values(present[name], buffer):
                    raise ValueError(
                        f"deterministic=True has each worker compute some shards of a batch, and {name_of(loss)} changes its "
                        f"buffer {name} from shard to shard: make it a part of the network, whose buffers are kept, and call "
                        "it in a trainStep"
                    )


def _listed(columns: Sequence[str]) -> str:
    return f"column {columns[0]!r}" if len(columns) == 1 else f"columns {', '.join(map(repr, columns))}"


_one_generator = threading.Lock()


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Draw random numbers from ``seed``, and leave torch's generator unchanged.

    All threads share the generator, so concurrent fits take turns. Otherwise their networks would use each other's numbers.
    """
    with _one_generator, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
