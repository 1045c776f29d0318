"""Which checkpoint is the best: metrics, scores, and their order. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from spark_elastic.checkpoint.naming import CheckpointName

Mode = Literal["min", "max"]

# The words in a metric's name that show whether smaller or larger values are better.
WORDS: Mapping[Mode, frozenset[str]] = {
    "min": frozenset({"loss", "error", "err", "nll", "mse", "mae", "rmse", "perplexity"}),
    "max": frozenset({"acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "r2", "iou", "bleu"}),
}


class Score(msgspec.Struct, frozen=True):
    """How good a checkpoint is: the content of its ``score.json``."""

    metric: str
    mode: Mode
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """How checkpoints are compared: a name in ``state.report``, and whether smaller or larger values are better."""

    name: str
    mode: Mode

    def is_better(self, value: float, than: float | None) -> bool:
        """Compare two values. Any finite number is better than None; NaN and infinity are never better."""
        if not math.isfinite(value):
            return False
        return than is None or (value < than if self.mode == "min" else value > than)


def is_negated(name: str) -> bool:
    """Whether this is a scikit-learn score such as neg_log_loss, which is larger the smaller the loss is."""
    return "neg" in _words_of(name)


def _words_of(name: str) -> set[str]:
    return set(re.split(r"[\W_]+", name.lower()))


def metric_of(text: str) -> Metric:
    """Parse ``"val_loss"``, ``"ndcg:max"`` or ``"regret:min"``. Raises ``ValueError`` for an unknown mode."""
    name, colon, mode = text.rpartition(":")
    if colon and name and mode in ("min", "max"):
        return Metric(name, "min" if mode == "min" else "max")
    words = _words_of(text)
    found: list[Mode] = ["max"] if is_negated(text) else [mode for mode, known in WORDS.items() if words & known]
    if len(found) != 1:
        raise ValueError(
            f"checkpoint_best={text!r} does not tell whether less or more is better; write '{text}:min' or '{text}:max'"
        )
    return Metric(text, found[0])


def best_first(scores: Mapping[CheckpointName, Score], metric: Metric) -> list[CheckpointName]:
    """Sort the checkpoints that have a score by this metric, best first. Among equals, the older comes first."""
    sign = 1 if metric.mode == "min" else -1
    mine = {name: sign * score.value for name, score in scores.items() if score.metric == metric.name}
    return sorted(mine, key=lambda name: (mine[name], name))
