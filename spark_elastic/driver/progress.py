"""JobView: turns the events of a running job into one line for people, without I/O or a clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from spark_elastic._plain import plain
from spark_elastic.protocol import records, reports
from spark_elastic.protocol.gathering import Gathering
from spark_elastic.protocol.records import Entry, WorkerReported

# From how many of the last reports the shown speed is computed.
SPEED_REPORTS = 20
METRICS_SHOWN = 3
# How many characters of a metric's name, and of its value, are shown.
TEXT_SHOWN = 40
# Metrics that are not shown where a loader's rows are, because the line then begins with the epoch and the rows.
_OF_LOADERS = {"epoch", "rows"}


@dataclass(slots=True)
class JobView:
    """Follows one job. ``doing`` says what the job does while it does not train, and is empty while it trains."""

    doing: str = "starting"
    max_np: int = 0
    num_proc: int = 0
    gathering: Gathering = field(default_factory=Gathering)
    size: int = 0
    generation: int = 0
    resets: int = 0
    step: int = 0
    epoch: int | None = None
    rows: int | None = None
    rows_total: int = 0
    metrics: dict[str, float | int | str] = field(default_factory=dict)
    _reports: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SPEED_REPORTS))

    def see(self, entry: Entry) -> None:
        """Take an entry of the event log into account. Entries that mean nothing to people are ignored."""
        self.gathering.see(entry.record)
        match entry.record:
            case records.JobStarted():
                self.max_np, self.num_proc = entry.record.max_np, entry.record.num_proc
            case records.WorkerReady() if not self.generation:
                self.doing = f"{len(self.gathering.ready)} of {self.num_proc} workers ready"
            case records.WorldForming(generation, size):
                self.generation, self.size = generation, size
                self.doing = "1 worker connects" if size == 1 else f"{size} workers connect"
            case records.WorldBroken(reason=reason):
                self.resets += 1
                self.doing = f"recovering: {reason}"
            case records.WorldInterrupted(reason=reason):
                self.doing = reason
            case WorkerReported(report=reports.Entered()):
                self.doing = ""
                self._reports.clear()
            case WorkerReported(report=reports.Progress() as progress):
                self._advance(entry.time, progress)
            case WorkerReported(rank=0, report=reports.Metrics(values)):
                self.metrics.update({name: value for name, value in values.items() if name != "step"})
            case records.WorldFinished():
                self.doing = "fetching results"
            case records.JobFinished():
                self.doing = "finished"
            case records.JobFailed():
                self.doing = "failed"

    def _advance(self, time: float, progress: reports.Progress) -> None:
        self.step = progress.step
        match progress:
            case reports.Progress(epoch=int(epoch), rows=int(rows), rows_total=int(rows_total)):
                # The beginning of an epoch is shown as the end of the one before, which is what people expect, above all after
                # the last epoch.
                is_end = rows == 0 and epoch > 0
                self.epoch, self.rows = (epoch - 1, rows_total) if is_end else (epoch, rows)
                self.rows_total = rows_total
        if self._reports and progress.done < self._reports[-1][1]:
            self._reports.clear()  # a loader was set back to an earlier epoch
        if self.rows is None or progress.rows is not None:  # speed counts either rows or steps
            self._reports.append((time, progress.done))

    @property
    def speed(self) -> float | None:
        """Rows per second, or steps per second if nobody counts rows; None until there are two reports."""
        if len(self._reports) < 2 or self._reports[-1][0] <= self._reports[0][0]:
            return None
        (first, before), (last, now) = self._reports[0], self._reports[-1]
        return (now - before) / (last - first)

    @property
    def share(self) -> float | None:
        """The fraction of the epoch's rows that is done, from 0 to 1."""
        return self.rows / self.rows_total if self.rows is not None and self.rows_total else None

    @property
    def has_begun(self) -> bool:
        """Whether the job has begun, and not only a Spark session that is starting."""
        return self.num_proc > 0

    @property
    def awaited(self) -> str:
        """What the first world waits for; an empty string once it forms."""
        if self.generation or not self.has_begun or self.doing in ("finished", "failed"):
            return ""
        return self.gathering.awaited(self.num_proc)

    @property
    def head(self) -> str:
        """Where the job is; an empty string until it has taken a step."""
        if self.share is not None:
            return f"epoch {self.epoch} {self.share:4.0%}"
        return f"step {self.step:,}" if self.step else ""

    @property
    def tail(self) -> str:
        """How the job is doing, most important facts first, because narrow terminals cut off the end."""
        parts = [": ".join(filter(None, (self.doing, self.awaited)))] if self.doing else []
        if self.rows is not None:
            parts.append(f"{self.rows:,}/{self.rows_total:,} rows")
        unit = "steps" if self.rows is None else "rows"
        if not self.doing and self.speed is not None:
            parts.append(f"{self.speed:,.{0 if self.speed >= 10 else 1}f} {unit}/s")
        if self.generation:
            parts.append(f"{self.size}/{self.max_np} workers")
            parts.append(f"generation {self.generation}, {self.resets} reset{'' if self.resets == 1 else 's'}")
        shown = [each for each in self.metrics.items() if self.rows is None or each[0] not in _OF_LOADERS]
        parts += [f"{_short(name)} {_short(value)}" for name, value in shown[:METRICS_SHOWN]]
        if not self.doing and self.speed and self.rows is not None:
            parts.append(f"{_clock((self.rows_total - self.rows) / self.speed)} left in epoch")
        return ", ".join(parts)


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(plain(str(value)).split())
    return text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN - 1]}…"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
