"""WorkerSamples: decides which samples of workers are logged, so that the event log stays small in large and long jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_elastic.protocol import messages as m
from spark_elastic.protocol import records, sampling


@dataclass(slots=True)
class WorkerSamples:
    """Takes the samples that one task sends of its successive workers. Lines that are not recorded yet wait."""

    _worker: int | None = None
    _first: float = 0.0
    _last: float = -math.inf
    _lines: tuple[str, ...] = ()

    def take(self, sample: m.WorkerSampled, workers: int, now: float) -> records.WorkerSampled | None:
        """Return what to record of a sample that arrives ``now`` in a job of so many ``workers``; None for nothing."""
        if sample.worker != self._worker:
            self._worker, self._first, self._last, self._lines = sample.worker, now, -math.inf, ()
        self._lines = sample.last_lines or self._lines
        if now - self._last < sampling.pause(workers, now - self._first):
            return None
        lines, self._last, self._lines = list(self._lines) or None, now, ()
        return records.WorkerSampled(sample.worker, sample.cpu_seconds, sample.memory, lines)
