"""How benchmarks say what they have seen: summaries with a confidence interval, tables, and a line of JSON."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import psutil

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Summary:
    """Of repeated measurements: the median with a bootstrapped 95 % interval, and the extremes."""

    median: float
    low: float
    high: float
    minimum: float
    maximum: float
    repeats: int

    def asdict(self) -> dict[str, float]:
        return {name: float(f"{value:.4g}") for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}] "
            f"({self.minimum:.4g} to {self.maximum:.4g}, n={self.repeats})"
        )


def summarize(values: Sequence[float]) -> Summary:
    """Summarize measurements; the interval is that of the median, by resampling."""
    samples = numpy.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    edge = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(numpy.median(samples, axis=1), [edge, 1 - edge])
    return Summary(statistics.median(values), float(low), float(high), min(values), max(values), len(values))


class Table:
    """Rows under headings, printed in columns as wide as they need."""

    def __init__(self, *headings: str, unit: str) -> None:
        self._rows = [list(headings)]
        self._unit = unit

    def add(self, *cells: Any) -> None:
        self._rows.append([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells])

    def print(self, cells: str = "median [95 % interval] (minimum to maximum, repeats)") -> None:
        widths = [max(len(row[column]) for row in self._rows) for column in range(len(self._rows[0]))]
        for row in self._rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        print(f"({self._unit}; {cells})")


def emit(benchmark: str, **results: Any) -> None:
    """Print the results as one line of JSON, with the machine that they come from."""
    machine = {
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }
    print(json.dumps({"benchmark": benchmark, "machine": machine, **results}))
