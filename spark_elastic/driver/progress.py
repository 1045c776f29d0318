"""JobView: what a person wants to know of a running job, and nothing else. Events in, one line out; no I/O, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

# The speed shown is that of the last so many reports.
SPEED_REPORTS = 20
METRICS_SHOWN = 3
# Reported along with metrics; the line has them anyway.
_KNOWN = {"step", "epoch", "rows"}


@dataclass(slots=True)
class JobView:
    """Follows one job. ``doing`` is what it does when it does not train; empty while it trains."""

    doing: str = "starting"
    max_np: int = 0
    num_proc: int = 0
    ready: set[int] = field(default_factory=set)
    size: int = 0
    generation: int = 0
    resets: int = 0
    step: int = 0
    epoch: int | None = None
    rows: int | None = None
    rows_total: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    _reports: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SPEED_REPORTS))

    def see(self, event: dict[str, Any]) -> None:
        """Take an event of the event log into account; those that say nothing to people are passed over."""
        match event["event"]:
            case "job_started":
                self.max_np, self.num_proc = event["max_np"], event["num_proc"]
            case "worker_ready" if not self.generation:
                self.ready.add(event["worker"])
                self.doing = f"{len(self.ready)} of {self.num_proc} workers ready"
            case "world_forming":
                self.generation, self.size = event["generation"], event["size"]
                self.doing = f"{self.size} workers connect"
            case "world_broken":
                self.resets += 1
                self.doing = f"recovering: {event['reason']}"
            case "world_interrupted":
                self.doing = event["reason"]
            case "entered":
                self.doing = ""
                self._reports.clear()
            case "progress":
                self._advance(event["time"], event["values"])
            case "metrics" if event["rank"] == 0:
                self.metrics.update({name: v for name, v in event["values"].items() if name not in _KNOWN})
            case "world_finished":
                self.doing = "fetching results"
            case "job_finished":
                self.doing = "finished"
            case "job_failed":
                self.doing = "failed"

    def _advance(self, time: float, values: dict[str, Any]) -> None:
        self.step = values["step"]
        done = self.step
        if "rows" in values:
            self.epoch, self.rows, self.rows_total = values["epoch"], values["rows"], values["rows_total"]
            done = self.epoch * self.rows_total + self.rows
            if self.rows == 0 and self.epoch > 0:  # to people the end of an epoch, above all that of the last one
                self.epoch, self.rows = self.epoch - 1, self.rows_total
        self._reports.append((time, done))

    @property
    def speed(self) -> float | None:
        """Rows a second, steps a second where the data has no rows to count; None until there are two reports."""
        if len(self._reports) < 2 or self._reports[-1][0] <= self._reports[0][0]:
            return None
        (first, before), (last, now) = self._reports[0], self._reports[-1]
        return (now - before) / (last - first)

    @property
    def share(self) -> float | None:
        """The part of the epoch's rows that is done, from 0 to 1."""
        return self.rows / self.rows_total if self.rows is not None and self.rows_total else None

    @property
    def head(self) -> str:
        """Where the job is."""
        if self.share is not None:
            return f"epoch {self.epoch} {self.share:4.0%}"
        return f"step {self.step:,}" if self.step else "spark_elastic"

    @property
    def tail(self) -> str:
        """How it is doing, the more important first: narrow terminals cut the end off."""
        parts = [self.doing] if self.doing else []
        if self.rows is not None:
            parts.append(f"{self.rows:,}/{self.rows_total:,} rows")
        unit = "steps" if self.rows is None else "rows"
        if not self.doing and self.speed is not None:
            parts.append(f"{self.speed:,.{0 if self.speed >= 10 else 1}f} {unit}/s")
        if self.generation:
            parts.append(f"{self.size}/{self.max_np} workers")
            parts.append(f"generation {self.generation}, {self.resets} reset{'' if self.resets == 1 else 's'}")
        parts += [f"{name} {_short(value)}" for name, value in list(self.metrics.items())[:METRICS_SHOWN]]
        if not self.doing and self.speed and self.rows is not None:
            parts.append(f"{_clock((self.rows_total - self.rows) / self.speed)} left in epoch")
        return ", ".join(parts)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
