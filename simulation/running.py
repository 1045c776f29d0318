"""Runs many schedules on all cores, and makes the schedule of a violation as small as possible."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from simulation.faults.schedule import Schedule, make_schedule
from simulation.job import Simulation
from simulation.product.seams import undisturbed
from simulation.tally import Tally

CHUNK = 100


def play(schedule: Schedule, *, keep_history: bool = False) -> Simulation:
    """Play one schedule. An exception of the simulation itself is a violation, too."""
    simulation = Simulation(schedule, keep_history=keep_history)
    with undisturbed(), uncollected():
        return simulation.run()


def play_each(seeds: Iterable[int]) -> Iterator[Simulation]:
    """Play some schedules in this process, one after the other."""
    with undisturbed(), uncollected():
        for seed in seeds:
            yield Simulation(make_schedule(seed)).run()
            gc.collect()


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for cycles: a simulation is one large cycle, and searching it while it grows finds nothing."""
    gc.disable()
    gc.freeze()  # objects that existed before are not scanned between schedules, either
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def play_chunk(seeds: range) -> Tally:
    """Play some schedules in this process."""
    tally = Tally()
    for played in play_each(seeds):
        tally.count(played)
    return tally


def play_many(first: int, count: int, jobs: int | None = None) -> Iterator[Tally]:
    """Play ``count`` schedules from seed ``first`` on, in ``jobs`` processes (default: one per core); yield what was seen."""
    last = first + count
    chunks = [range(start, min(start + CHUNK, last)) for start in range(first, last, CHUNK)]
    jobs = jobs or len(os.sched_getaffinity(0))
    if jobs == 1:
        yield from map(play_chunk, chunks)
        return
    # The processes are not forked from this one, which may be a test run with threads of Spark and gRPC.
    with multiprocessing.get_context("forkserver").Pool(jobs) as pool:
        yield from pool.imap_unordered(play_chunk, chunks)


def minimize(schedule: Schedule, plays: Callable[[Schedule], Simulation] = play) -> Schedule:
    """Leave out faults one by one, as long as the others still end in a violation."""
    for fault in schedule.faults:
        smaller = replace(schedule, faults=tuple(other for other in schedule.faults if other is not fault))
        if plays(smaller).violation:
            schedule = smaller
    return schedule


def replay_command(schedule: Schedule) -> str:
    """Return the command that plays this schedule again and prints its history."""
    whole = make_schedule(schedule.seed)
    kept = ",".join(str(fault.number) for fault in schedule.faults)
    only = "" if whole.faults == schedule.faults else f" --faults {kept or 'none'}"
    return f"python -m simulation --seed {schedule.seed}{only}"
