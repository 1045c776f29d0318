"""The figures of a run, as a table for people and as plain data for programs."""

from __future__ import annotations

from spark_elastic._json import Json
from spark_elastic._plain import plain
from spark_elastic.protocol.records import WorkerTooSlow, WorldSized
from spark_elastic.timeline.follower import ALL_READ, Unread
from spark_elastic.timeline.history import History, RelievedWorker, SlowWorker
from spark_elastic.timeline.resets import Kind, Part, Reset


def summarize(history: History) -> dict[str, Json]:
    """Return the figures as plain data. Times are in seconds; ``at`` counts from the beginning of the run."""
    return {
        "run_id": history.run_id,
        "outcome": history.outcome,
        "seconds": round(history.seconds, 3),
        "seconds_to_first_step": None if history.trained_from is None else round(history.trained_from, 3),
        "availability": None if history.availability is None else round(history.availability, 5),
        "seconds_lost": round(history.seconds_lost, 3),
        "steps": history.steps,
        "steps_lost": sum(reset.steps_lost for reset in history.resets),
        f"{history.unit}_done": history.work,
        f"{history.unit}_per_second": round(history.per_second, 3),
        "generations": len(history.generations),
        "workers": len(history.workers),
        "workers_lost": sum(bool(line.cause) for line in history.workers),
        "slow_workers": [_slow_facts(slow) for slow in history.slow],
        "too_slow_workers": [_too_slow_facts(slow) for slow in history.too_slow],
        "sizes": [_size_facts(sized) for sized in history.sized],
        "resets": [reset_facts(reset) for reset in history.resets],
    }


def _slow_facts(slow: SlowWorker) -> dict[str, Json]:
    return {
        "worker": slow.worker,
        "rank": slow.rank,
        "host": slow.host,
        "at": round(slow.at, 3),
        "times_as_long": round(slow.times, 2),
        **({f"{slow.unit}_a_step": slow.part, "of": slow.of} if isinstance(slow, RelievedWorker) else {}),
    }


def _too_slow_facts(slow: WorkerTooSlow) -> dict[str, Json]:
    replaced = slow.seconds is not None
    return {
        "worker": slow.worker,
        "rank": slow.rank,
        "host": slow.host,
        "times_as_long": slow.times,
        "replaced": replaced,
    }


def _size_facts(sized: WorldSized) -> dict[str, Json]:
    return {
        "size": sized.size,
        "tried": sized.tried,
        "rows_per_second": dict(zip(map(str, sized.sizes), sized.rows_per_second, strict=True)),
    }


def reset_facts(reset: Reset) -> dict[str, Json]:
    """Return one reset as plain data."""
    return {
        "kind": reset.kind.value,
        "at": round(reset.begin, 3),
        "reason": reset.reason,
        "generation": reset.generation,
        "old_size": reset.old_size,
        "new_size": reset.new_size,
        "seconds_lost": None if reset.lost is None else round(reset.lost, 4),
        "steps_lost": reset.steps_lost,
        "parts": {part.value: reset.parts[part] for part in Part if part in reset.parts},
    }


def summary_text(history: History, unread: Unread = ALL_READ) -> str:
    """Return the figures as lines of text. Nothing from the log can act as a command to the terminal."""
    unit = history.unit
    available = "no step was made" if history.availability is None else f"availability {history.availability:.2%}"
    lines = [
        f"run {history.run_id}: {history.outcome}",
        f"  {clock(history.seconds)} in all, {to_first_step(history)} to the first step, "
        f"{_many(len(history.generations), 'generation')}, {_many(len(history.workers), 'worker')}, "
        f"{sum(bool(line.cause) for line in history.workers)} of them lost",
        f"  {available}: {history.seconds_lost:.2f} s lost in "
        f"{_many(len(history.resets), 'reset')}, {sum(reset.steps_lost for reset in history.resets)} committed steps lost",
        f"  {history.work:,} {unit}, {history.per_second:,.{0 if history.per_second >= 10 else 1}f} {unit}/s",
    ]
    lines += [f"  {slow}" for slow in history.slow]
    lines += [f"  {slow.describe()}" for slow in history.too_slow]
    lines += [f"  {sized.describe()}" for sized in history.sized[-1:]]
    if history.resets:
        rows = [("at", "what", "workers", "seconds lost", "of which")]
        rows += [_reset_row(reset) for reset in history.resets]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines.append("")
        lines += ["  " + "  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in rows]
    if unread.count:
        lines += ["", f"  {unread}"]
    return "\n".join(map(plain, lines))


def headline(history: History, present: str = "is not over in this log") -> str:
    """Return a sentence or two on how the run went. ``present`` says what a run does that is not over."""
    kinds = [reset.kind for reset in history.resets]
    counts = [
        _count(kinds.count(Kind.LOSS), "failure"),
        _count(kinds.count(Kind.JOIN), "arrival"),
        _count(kinds.count(Kind.DRAIN), "planned departure"),
        _count(kinds.count(Kind.SHRINK), "change to fewer workers", "changes to fewer workers"),
    ]
    through = " and ".join(count for count in counts if count)
    trained = ""
    if history.generations and history.availability is not None:
        trained = f" It trained {history.availability:.1%} of the time from its first step on" + (
            f", through {through}." if through else "."
        )
    told = [*map(str, history.slow), *(slow.describe() for slow in history.too_slow)]
    told += [sized.describe() for sized in history.sized[-1:]]
    sentences = "".join(f" {text[0].upper()}{text[1:]}." for text in told)
    outcome = history.outcome if history.is_over else present
    return f"The run {outcome.rstrip('.')}.{trained}{sentences}"


def to_first_step(history: History) -> str:
    """Say how long it took until the first step."""
    return "–" if history.trained_from is None else f"{history.trained_from:.1f} s"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else noun + 's'}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}" if number else ""


def _reset_row(reset: Reset) -> tuple[str, str, str, str, str]:
    parts = [f"{part.value} {seconds:.3f}" for part, seconds in reset.parts.items() if seconds >= 0.0005]
    reason = reset.reason.partition("\n")[0]
    lost = "did not go on" if reset.new_generation is None else "nobody survived" if reset.lost is None else ""
    return (
        clock(reset.begin),
        reason if reset.kind is Kind.LOSS else f"{reset.kind.value}: {reason}",
        f"{reset.old_size} → {reset.new_size}",
        lost or f"{reset.lost:.3f}",
        ", ".join(parts),
    )


def clock(seconds: float) -> str:
    """Format a time as minutes and seconds, such as 1:02.5."""
    minutes, rest = divmod(round(seconds, 1), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}" if hours else f"{minutes}:{rest:04.1f}"
