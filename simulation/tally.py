"""The sum of what a number of simulations have seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulation.job import Simulation


@dataclass(slots=True)
class Tally:
    schedules: int = 0
    events: int = 0
    commits: int = 0
    generations: int = 0
    resets: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    transitions: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)

    def count(self, played: Simulation) -> None:
        machine = played.machine
        self.schedules += 1
        self.events += played.clock.events
        self.commits += played.commits
        self.generations += machine.job.generation
        self.resets += machine.job.setbacks.resets
        self.faults.update(fault.kind.name for fault in played.strikes.struck)
        self.points.update(fault.point for fault in played.strikes.struck if fault.point is not None)
        self.transitions.update(played.invariants.transitions)
        if played.violation:
            self.violations[played.schedule.seed] = played.violation
        else:
            error = played.service.outcome.exception()
            self.outcomes["finished" if error is None else type(error).__name__] += 1

    def add(self, other: Tally) -> None:
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, int):
                setattr(self, name, mine + theirs)
            else:
                mine.update(theirs)

    def __str__(self) -> str:
        phases = Counter((before, after) for before, _, after in self.transitions.elements() if before != after)
        lines = [
            f"{self.schedules:,} schedules, {self.events:,} events, {self.generations:,} generations, {self.resets:,} resets "
            f"after failures, {self.commits:,} commits of a rank, {sum(self.faults.values()):,} faults",
            "outcomes: " + _listed(self.outcomes),
            "faults: " + _listed(self.faults),
            "points struck: " + _listed(self.points),
            f"the machine was seen in {len(self.transitions)} combinations of phase, event and next phase; changes of phase: "
            + ", ".join(f"{before}→{after} {count:,}" for (before, after), count in sorted(phases.items())),
        ]
        return "\n".join(lines)


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"
