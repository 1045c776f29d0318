"""``python -m simulation --count 20000`` plays schedules, ``--seed S`` plays one and prints its history."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from simulation.faults.schedule import make_schedule
from simulation.running import minimize, play, play_many, replay_command
from simulation.tally import Tally

SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="schedules to play")
    parser.add_argument("--first", type=int, default=0, help="the first of their seeds")
    parser.add_argument("--jobs", type=int, help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, help="play this one, and print its history")
    parser.add_argument("--faults", help="with --seed: only these of its faults, by number, or 'none'")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed, arguments.faults)
    return run(arguments.first, arguments.count, arguments.jobs)


def replay(seed: int, faults: str | None) -> int:
    schedule = make_schedule(seed)
    if faults is not None:
        kept = set() if faults == "none" else set(map(int, faults.split(",")))
        schedule = replace(schedule, faults=tuple(fault for fault in schedule.faults if fault.number in kept))
    print(schedule.job)
    print(*schedule.faults, sep="\n")
    played = play(schedule, keep_history=True)
    assert played.history is not None
    print(*played.history, sep="\n")
    return int(bool(played.violation))


def run(first: int, count: int, jobs: int | None) -> int:
    started = shown = time.monotonic()
    tally = Tally()
    for part in play_many(first, count, jobs):
        tally.add(part)
        now = time.monotonic()
        for seed, violation in part.violations.items():
            print(f"seed {seed}: {violation.splitlines()[0]}", flush=True)
        if now - shown >= SHOWN:
            shown = now
            print(f"{tally.schedules:,} of {count:,} schedules, {now - started:.0f} s", file=sys.stderr, flush=True)
    print(f"{tally}\n{time.monotonic() - started:.1f} s")
    for seed in sorted(tally.violations)[:SHOWN]:
        smallest = minimize(make_schedule(seed))
        print(f"\nVIOLATION with seed {seed}: {tally.violations[seed]}\nreplay: {replay_command(smallest)}")
    return int(bool(tally.violations))


if __name__ == "__main__":
    sys.exit(main())
