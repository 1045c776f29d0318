"""Many workers: what a job of N workers on one machine takes to start, form, commit and recover, and what its processes hold.

    python benchmarks/scale.py [--workers 8,16,32,48] [--kills 5] [--spark]

A tiny model, so that all that is seen is ours. Workers are local processes, or with ``--spark`` those of one executor of as many
cores. ``ready`` is from the call to the first step of all, in a session that has kept nothing; ``form`` from the driver's word to
the complete world; ``next step`` and ``full size`` from the death of a worker, ``join`` the pause of those who train on when its
successor comes. ``driver`` is the share of a core that the driver's process takes while steps go on. Sizes are in
MiB of PSS, in which a page counts in parts for the processes that share it: the median of a kind of process, and what all that a
worker takes comes to, its part of the importer included. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from report import Table, emit, summarize

import spark_elastic
from spark_elastic.protocol.event_format import read_event
from spark_elastic.testing import inject, kill
from spark_elastic.timeline.resets import Kind, find_resets

# Steps before the first report, between the two that the driver's share is taken over, and between two kills.
WARM, WATCHED, BETWEEN = 20, 40, 40
PACE = 0.05
MIB = 2**20


def train(steps: int) -> tuple[float, float]:
    """Return when the first step ended, and the CPU seconds of a commit."""
    import statistics
    import time

    import torch

    import spark_elastic as se

    torch.set_num_threads(1)
    model = se.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = se.TorchState(model, optimizer, step=0, local={"first": 0.0})
    commits: list[float] = []

    @se.elastic
    def loop(state: Any) -> None:
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            state.first = state.first or time.time()
            state.step += 1
            start = time.thread_time()
            state.commit()
            commits.append(time.thread_time() - start)
            if state.step in (WARM, WARM + WATCHED):
                state.report(watched=state.step)
            time.sleep(PACE)

    loop(state)
    return state.first, statistics.median(commits)


class Look:
    """Looks at the job's processes when the first report comes, and at the driver's clock at both."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.sizes: dict[str, float] = {}
        self.descriptors: dict[str, int] = {}
        self._clocks: list[tuple[float, float]] = []

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["event"] != "metrics" or event["rank"] != 0:
            return
        if not self._clocks:
            self._look()
        used = psutil.Process().cpu_times()
        self._clocks.append((time.monotonic(), used.user + used.system))

    @property
    def driver_share(self) -> float:
        (begin, before), (end, after) = self._clocks
        return (after - before) / (end - begin)

    def _look(self) -> None:
        workers = [psutil.Process(e["pid"]) for e in self.events if e["event"] == "worker_started"]
        parents = [parent for worker in workers if (parent := worker.parent())]
        tasks = [psutil.Process(e["facts"]["pid"]) for e in self.events if e["event"] == "host_facts"]
        # On this machine these are the tasks, and what forks them is above.
        forking = {above for parent in parents if (above := parent.parent())}
        if forking == set(tasks):
            forking = {above for task in tasks if (above := task.parent())}
        kinds = {"worker": workers, "warm parent": parents, "task": tasks, "importer": [*forking]}
        sizes = {kind: [each.memory_full_info().pss / MIB for each in processes] for kind, processes in kinds.items()}
        self.sizes = {kind: statistics.median(found) for kind, found in sizes.items()}
        self.sizes["all of a worker"] = sum(map(sum, sizes.values())) / len(workers)
        self.descriptors = {"driver": psutil.Process().num_fds(), "worker": workers[0].num_fds()}


def plain_size() -> float:
    """MiB of PSS of a process that has imported torch."""
    code = "import torch; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        size = psutil.Process(process.pid).memory_full_info().pss / MIB
        process.communicate(b"\n")
    return float(size)


@contextmanager
def slots(workers: int, on_spark: bool) -> Iterator[dict[str, Any]]:
    """What ``run`` takes its slots from, for the time of the ``with``."""
    if not on_spark:
        yield {"local": True}
        spark_elastic.shutdown()
        return
    from pyspark.sql import SparkSession

    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master(f"local-cluster[1,{workers},2048]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    yield {"spark": spark}
    spark.stop()


def measure(workers: int, kills: int, on_spark: bool) -> tuple[dict[str, Any], list[Any]]:
    """Run a job; return the figures by name, and the table's row."""
    look, first_kill = Look(), WARM + WATCHED + BETWEEN
    faults = [kill(rank=1 + turn, step=first_kill + turn * BETWEEN) for turn in range(kills)]
    with slots(workers, on_spark) as where, inject(*faults):
        called = time.time()
        results = spark_elastic.run(
            train, args=(first_kill + kills * BETWEEN,), min_np=1, num_proc=workers, max_np=workers, on_event=look,
            progress=False, **where,
        )  # fmt: skip
    events = [read_event(event) for event in look.events]
    resets = [reset for reset in find_resets(events) if reset.parts]
    losses = [sum(reset.parts.values()) for reset in resets if reset.kind is Kind.LOSS]
    joins = [reset.lost for reset in resets if reset.kind is Kind.JOIN and reset.lost is not None]
    forming = next(e["time"] for e in look.events if e["event"] == "world_forming" and e["size"] == workers)
    formed = [e["time"] for e in look.events if e["event"] == "world_formed" and e["size"] == workers]
    broken = [e["time"] for e in look.events if e["event"] == "world_broken"]
    full = [min(t for t in formed if t > lost) - lost for lost in broken if formed[-1] > lost]
    found = {
        "ready": results[0][0] - called,
        "form": formed[0] - forming,
        "next_step": summarize(losses).asdict(),
        "full_size": summarize(full).asdict() if full else None,
        "join": summarize(joins).asdict() if joins else None,
        "commit_cpu_ms": 1000 * statistics.median(commit for _, commit in results),
        "driver_share": look.driver_share,
        "descriptors": look.descriptors,
        "pss_mib": {kind: round(size) for kind, size in look.sizes.items()},
    }
    middle = [statistics.median(values) if values else "" for values in (losses, full, joins)]
    sizes = " / ".join(f"{look.sizes[kind]:.0f}" for kind in ("worker", "warm parent", "task", "importer"))
    sizes += f"; {look.sizes['all of a worker']:.0f}"
    open_files = f"{look.descriptors['driver']} / {look.descriptors['worker']}"
    row = [found["ready"], found["form"], *middle, found["commit_cpu_ms"], found["driver_share"], sizes, open_files]
    return found, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,16,32,48")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument(
        "--spark", action="store_true", help="one executor with so many cores, instead of local processes"
    )
    options = parser.parse_args()
    plain = plain_size()
    table = Table(
        "workers", "ready", "form", "next step", "full size", "join", "commit, CPU ms", "driver",
        "PSS worker / parent / task / importer; all", "descriptors driver / worker", unit="seconds, medians; MiB",
    )  # fmt: skip
    results: dict[str, Any] = {"import_torch_mib": round(plain)}
    for workers in map(int, options.workers.split(",")):
        results[str(workers)], row = measure(workers, options.kills, options.spark)
        table.add(workers, *row)
    table.print(f"a process that has only imported torch, alone: {plain:.0f} MiB")
    emit("scale", **results)


if __name__ == "__main__":
    main()
