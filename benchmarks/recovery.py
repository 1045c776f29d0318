"""Recovery: from the kill of one of four workers to the survivors' next completed step.

    python benchmarks/recovery.py [--repeats 7] [--loader-workers 0]

One job of four workers on a local-cluster trains a model of 1 MB and commits every step; faults kill a worker again and again,
rank 0 and others in turn. A kill is timed by the event that announces it, the next step by the survivors' own clocks, which are
the same machine's. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from typing import Any

import spark_elastic
from spark_elastic.testing import inject, kill

WORKERS = 4
STEPS_BETWEEN = 60


def train(steps: int, loader_workers: int) -> None:
    """Report when the first step of each generation was committed."""
    import time

    import torch

    import spark_elastic as se

    model = se.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)
    feed = torch.utils.data.DataLoader(range(10**9), num_workers=loader_workers) if loader_workers else None

    @se.elastic
    def loop(state: Any) -> None:
        rows = iter(feed) if feed is not None else None
        is_first = True
        while state.step < steps:
            if rows is not None:
                next(rows)
            optimizer.zero_grad()
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
            state.step += 1
            time.sleep(0.02)
            state.commit()
            if is_first:
                state.report(first_step=time.time())
                is_first = False

    loop(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--event-log", help="append the job's events to this file")
    options = parser.parse_args()
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local-cluster[{WORKERS},1,1024]")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    faults = [kill(rank=turn % 2, step=STEPS_BETWEEN * (turn + 1)) for turn in range(options.repeats)]
    events: list[dict[str, Any]] = []
    with inject(*faults):
        spark_elastic.run(
            train,
            args=(STEPS_BETWEEN * (options.repeats + 1), options.loader_workers),
            spark=spark,
            min_np=2,
            num_proc=WORKERS,
            max_np=WORKERS,
            on_event=events.append,
            event_log=options.event_log,
        )
    spark.stop()
    rows = []
    for killed in (event for event in events if event["event"] == "fault_injected"):
        formed = next(e for e in events if e["event"] == "world_formed" and e["time"] > killed["time"])
        first_steps = [
            e["values"]["first_step"]
            for e in events
            if e["event"] == "metrics" and e["generation"] == formed["generation"]
        ]
        if first_steps:
            rows.append((killed["rank"], formed["time"] - killed["time"], max(first_steps) - killed["time"]))
    print(f"{'victim':>8} {'world formed':>14} {'next step':>12}   (seconds after the kill)")
    for rank, formed_after, step_after in rows:
        print(f"{'rank ' + str(rank):>8} {formed_after:14.3f} {step_after:12.3f}")
    seconds = [step_after for _, _, step_after in rows]
    summary = {
        "benchmark": "recovery",
        "loader_workers": options.loader_workers,
        "repeats": len(seconds),
        "median": round(statistics.median(seconds), 4),
        "minimum": round(min(seconds), 4),
        "maximum": round(max(seconds), 4),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
