"""What the histories of a job must have in common: the driver's events, the records of all workers, and the results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a worker's record. ``step`` is the one that it stands at (entered, committed) or begins (tried)."""

    worker: str
    kind: str
    generation: int
    rank: int
    size: int
    step: int
    digest: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    events: Sequence[Mapping[str, Any]]
    # By worker, each in the order of writing.
    lines: Sequence[Line]
    results: Sequence[Mapping[str, Any]]
    rows: int
    min_np: int
    max_np: int

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.kind == kind]


def violations(history: History) -> list[str]:
    """Everything that is wrong with a history; nothing if it could be that of a job without faults and a few rollbacks."""
    checks = (_worlds, _ranks, _weights, _survivors, _rows, _results)
    return [f"{check.__name__[1:]}: {problem}" for check in checks for problem in check(history)]


def _worlds(history: History) -> Iterator[str]:
    """One world after the other, each of an allowed size."""
    newest = 0
    for event in history.events:
        if event["event"] != "world_formed":
            continue
        if event["generation"] <= newest:
            yield f"generation {event['generation']} formed after {newest}"
        newest = event["generation"]
        if not history.min_np <= event["size"] <= history.max_np:
            yield f"generation {newest} has {event['size']} workers"


def _ranks(history: History) -> Iterator[str]:
    """Ranks are below the size that the driver formed, and each is one worker's."""
    formed = {event["generation"]: event["size"] for event in history.events if event["event"] == "world_formed"}
    owners: dict[tuple[int, int], str] = {}
    for line in history.lines:
        if line.size != formed.get(line.generation, line.size) or not 0 <= line.rank < line.size:
            yield f"{line} in a world of {formed.get(line.generation)}"
        if owners.setdefault((line.generation, line.rank), line.worker) != line.worker:
            yield f"rank {line.rank} of generation {line.generation} is {line.worker} and another worker"


def _weights(history: History) -> Iterator[str]:
    """Ranks of a generation that stand at the same step have the same weights, and enter at the same step."""
    entered: dict[int, Line] = {}
    known: dict[tuple[int, int], Line] = {}
    for line in history.of("entered"):
        first = entered.setdefault(line.generation, line)
        if first.step != line.step:
            yield f"{line} entered elsewhere than {first}"
    for line in history.of("entered") + history.of("committed"):
        first = known.setdefault((line.generation, line.step), line)
        if first.digest != line.digest:
            yield f"{line} differs from {first}"


def _survivors(history: History) -> Iterator[str]:
    """What a worker has committed is not taken back while it lives, unless the state was lost with all who held it."""
    losses = [event["generation"] for event in history.events if event["event"] == "state_lost"]
    last: dict[str, Line] = {}
    for line in history.lines:
        before = last.get(line.worker, line)
        is_behind = line.kind == "entered" and line.step < before.step
        if is_behind and not any(before.generation <= lost < line.generation for lost in losses):
            yield f"{line} entered behind its own commit {before}"
        if line.kind != "tried":
            last[line.worker] = line


def _rows(history: History) -> Iterator[str]:
    """Going back from the last step, each step's rows as its ranks recorded them: every row once an epoch."""
    tried: dict[int, dict[int, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    for line in history.of("tried"):
        tried[line.step][line.generation][line.rank] = line
    generation = max((line.generation for line in history.lines), default=0)
    counted: Counter[int] = Counter()
    for step in range(max((result["step"] for result in history.results), default=0), 0, -1):
        # A step that was tried again was taken back before: who has committed it is the last to have tried it.
        generation = max((number for number in tried[step] if number <= generation), default=0)
        ranks = tried[step].get(generation, {})
        if not ranks or sorted(ranks) != list(range(next(iter(ranks.values())).size)):
            yield f"step {step} of generation {generation} was recorded by ranks {sorted(ranks)}"
            return
        for line in ranks.values():
            counted.update(line.rows)
    epochs = {result["epochs"] for result in history.results}
    wrong = {row: counted[row] for row in range(history.rows) if {counted[row]} != epochs}
    if wrong:
        yield f"in {epochs} epochs these rows were read so often: {dict(list(wrong.items())[:10])}"


def _results(history: History) -> Iterator[str]:
    """All ranks of the last world return the same, and every row counts in the weights once an epoch."""
    if [result["rank"] for result in history.results] != list(range(len(history.results))) or not history.results:
        yield f"results of ranks {[result['rank'] for result in history.results]}"
        return
    first = history.results[0]
    for result in history.results:
        if any(result[name] != first[name] for name in ("generation", "epochs", "step", "seen")):
            yield f"ranks {first['rank']} and {result['rank']} return different things"
    wrong = {row: count for row, count in enumerate(first["seen"]) if abs(count - first["epochs"]) > 1e-6}
    if wrong:
        yield f"after {first['epochs']} epochs rows count {dict(list(wrong.items())[:10])}"
