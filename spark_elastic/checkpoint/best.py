"""Which checkpoint is the best: metrics, scores, and their order. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
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


# What people write for a mode, and must not pass for a part of the name.
_NO_MODES = frozenset(
    {"best", "most", "least", "less", "more", "lower", "higher", "minimum", "maximum", "minimize", "maximize"}
)


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


class BestKept:
    """The ``keep`` best checkpoints so far, including earlier runs'. ``read`` returns all scores; it is called at first use.

    ``in`` and ``takes`` raise what ``read`` raises.
    """

    def __init__(self, metric: Metric, keep: int, read: Callable[[], Mapping[CheckpointName, Score]]) -> None:
        self.metric = metric
        self._keep = keep
        self._read = read
        # Best first; None before they have been read.
        self._scores: dict[CheckpointName, Score] | None = None

    def __contains__(self, name: CheckpointName) -> bool:
        return name in self._known()

    @property
    def are_none(self) -> bool:
        """Whether no checkpoint is kept. Raises what ``read`` raises."""
        return not self._known()

    def takes(self, name: CheckpointName, value: float) -> bool:
        """Whether a checkpoint with this value is one of the best, or better than its own previously reported value."""
        best = self._known()
        rival = best.get(name) or (list(best.values())[-1] if len(best) == self._keep else None)
        return self.metric.is_better(value, None if rival is None else rival.value)

    def add(self, name: CheckpointName, value: float) -> Score:
        """Count a checkpoint among the best, and return its score. Reads nothing."""
        score = Score(self.metric.name, self.metric.mode, value)
        if self._scores is not None:
            self._scores = self._best_of({**self._scores, name: score})
        return score

    def forget(self) -> None:
        """Have the scores read again at the next use."""
        self._scores = None

    def _known(self) -> dict[CheckpointName, Score]:
        if self._scores is None:
            self._scores = self._best_of(self._read())
        return self._scores

    def _best_of(self, scores: Mapping[CheckpointName, Score]) -> dict[CheckpointName, Score]:
        return {name: scores[name] for name in best_first(scores, self.metric)[: self._keep]}


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
    words = set() if colon and mode.lower() in _NO_MODES else _words_of(text)
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
