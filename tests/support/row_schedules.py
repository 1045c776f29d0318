"""Randomized schedules in local processes: ``row_schedules.py [--seed 0] [--jobs 4] [--cases 8]``.

Each job trains through several cases (a dataset with row groups of random sizes, or a map-style one, and a batch size of either
kind) while workers are killed, drained and join at random steps. A model that counts rows must end with each row counted once
an epoch. The same seed gives the same jobs, and each line printed names what replays that job alone.
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import training

import spark_elastic
from spark_elastic.testing import Action, Fault, LocalCluster, Point, drain, inject, kill, local_cluster

EPOCHS = 2
WORLDS = (8, 5, 2, 3, 7, 4, 6, 1)
KILL_POINTS = (Point.COMMIT, Point.RECORDED, Point.COMMITTED)


@dataclass(frozen=True)
class Job:
    """What one run trains on and what strikes it; workers: ``start`` at first, then up to ``world``."""

    seed: str
    world: int
    start: int
    cases: list[dict[str, Any]]
    faults: list[Fault]


def draw_job(seed: str, world: int, cases: int, folder: Path) -> Job:
    """Draw a job from its seed, and write its datasets.

    Faults strike at different steps, so that somebody always holds the state: where there may be three workers or more, two
    at least train, and elsewhere only rank 1 is killed.
    """
    chance = random.Random(seed)
    drawn = [draw_case(chance, folder / str(number), world) for number in range(cases)]
    steps = sum(EPOCHS * (steps_of(case, world) + 1) for case in drawn)
    faults = []
    for step in sorted(chance.sample(range(2, steps), min(steps - 2, 2 * cases))):
        rank = chance.randrange(1, world) if world == 2 else chance.randrange(world)
        if world > 1 and chance.random() < 0.8:
            faults.append(kill(rank=rank, step=step, at=chance.choice(KILL_POINTS)))
        elif sum(fault.action is Action.DRAIN for fault in faults) < 2:
            faults.append(drain(rank=rank, step=step))
    return Job(seed, world, chance.randint(min(world, 2), world), drawn, faults)


def draw_case(chance: random.Random, folder: Path, world: int) -> dict[str, Any]:
    """Draw row groups, a batch size and an order; write the dataset."""
    shape = chance.choice(["mixed", "mixed", "huge", "few groups", "few rows", "single rows", "map-style"])
    sizes = {
        "mixed": [chance.choice([0, 1, 1, 2, 17, 40, chance.randint(1, 120)]) for _ in range(chance.randint(2, 12))],
        "huge": [1, 700, 0, 3],
        "few groups": [chance.randint(1, 90) for _ in range(chance.randint(1, max(1, world - 1)))],
        "few rows": [1] * chance.randint(1, max(1, world - 1)),
        "single rows": [1] * chance.randint(9, 40),
        "map-style": [chance.randint(1, 150)],
    }[shape]
    rows = sum(sizes)
    batch = chance.choice([1, 3, 8, 16]) if rows < 300 else chance.choice([12, 16])
    options: dict[str, Any] = (
        {"batch_size": batch} if chance.random() < 0.5 else {"global_batch_size": batch * min(world, 4)}
    )
    if "global_batch_size" in options and chance.random() < 0.5:
        options["balance"] = "auto"
    options = {**options, "shuffle": chance.random() < 0.8, "seed": chance.randrange(1000)}
    # Half of the cases wait at their first row until all have come back, the others begin with whoever is there.
    case = {"shape": shape, "rows": rows, "options": options, "gather": chance.choice([1, world])}
    if shape == "map-style":
        return case
    write(folder, sizes, chance.randint(1, 3))
    window = chance.choice([None, 0, 70, 300])
    return {**case, "url": folder.as_uri(), "options": {**options, "shuffle_rows": window}}


def write(folder: Path, sizes: list[int], files: int) -> None:
    """Write row groups of these sizes over some files; ``id`` counts the rows."""
    folder.mkdir(parents=True)
    schema, row = pa.schema([("id", pa.int64())]), 0
    for number in range(files):
        with pq.ParquetWriter(folder / f"part-{number}.parquet", schema) as writer:
            for size in sizes[number::files]:
                table = pa.table({"id": pa.array(range(row, row + size), pa.int64())})
                writer.write_table(table, row_group_size=max(1, size))
                row += size


def steps_of(case: dict[str, Any], world: int) -> int:
    """Estimate the steps of an epoch."""
    options = case["options"]
    return max(1, case["rows"] // (options.get("global_batch_size") or options["batch_size"] * world))


def train(cluster: LocalCluster, job: Job) -> tuple[int, list[int], float]:
    """Run a job and check its rows; return its faults that struck, the sizes of its worlds, and its seconds."""
    events: list[dict[str, Any]] = []
    begun = time.monotonic()
    with inject(*job.faults):
        results = spark_elastic.run(
            training.count_cases, args=(job.cases, EPOCHS), local=cluster, on_event=events.append,
            min_np=2 if job.world > 2 else 1, num_proc=job.start, max_np=job.world,
        )  # fmt: skip
    for result in results:
        first = 0
        for number, case in enumerate(job.cases):
            seen = result["seen"][first : first + case["rows"]]
            first += case["rows"]
            wrong = {row: count for row, count in enumerate(seen) if abs(count - EPOCHS) > 1e-6}
            assert not wrong, f"case {number} of job {job.seed}, {case}: rows were counted {wrong}"
        assert result["seen"] == results[0]["seen"]
    struck = sum(event["event"] == "fault_injected" for event in events)
    sizes = [event["size"] for event in events if event["event"] == "world_formed"]
    return struck, sizes, time.monotonic() - begun


def main() -> None:
    """Run the jobs and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--cases", type=int, default=8, help="datasets a job")
    parser.add_argument("--only", type=int, help="run the job of this number alone")
    given = parser.parse_args()
    cloudpickle.register_pickle_by_value(training)
    with local_cluster(max(WORLDS)) as cluster:
        play(given, cluster)


def play(given: argparse.Namespace, cluster: LocalCluster) -> None:
    faults, sizes = 0, collections.Counter[int]()
    numbers = range(given.jobs) if given.only is None else [given.only]
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            job = draw_job(f"{given.seed}/{number}", WORLDS[number % len(WORLDS)], given.cases, Path(folder))
            print(
                f"--seed {given.seed} --cases {given.cases} --only {number}: up to {job.world} workers",
                end="",
                flush=True,
            )
            struck, formed, seconds = train(cluster, job)
        print(f", {struck} of {len(job.faults)} faults struck, worlds of {formed}, {seconds:.1f} s", flush=True)
        faults += struck
        sizes.update(formed)
    print(
        f"{len(numbers) * given.cases} schedules, {faults} faults, sizes {dict(sorted(sizes.items()))}: every row once"
    )


if __name__ == "__main__":
    main()
