"""Start and end: from the call of ``run()`` to the first step, and from the last step to its return.

    python benchmarks/startup.py [--repeats 7]

Four workers on a local-cluster whose executors are up; Spark's own TorchDistributor trains the same loop in the same session,
in turn, and so do four interpreters that only import what a worker needs: no first start can be faster than these. Before that
four workers in local processes, without Spark, whose floor is one such interpreter; also with a loop that reads Parquet files. Of
ours each turn has a first run, for which nothing has been kept, and a later one. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cluster import local_cluster
from report import Table, emit, summarize

import spark_elastic

WORKERS = 4
STEPS = 10


def elastic_loop(url: str = "") -> tuple[float, float]:
    """Return when the first and the last step ended. ``url``: of Parquet files with the rows of ``STEPS`` batches, if any."""
    import time

    import torch

    import spark_elastic as se

    model = se.DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.Adam(model.parameters())
    data = {"loader": se.data.ParquetLoader(url, 64)} if url else {}
    state = se.TorchState(model=model, optimizer=optimizer, local={"times": []}, **data)

    @se.elastic
    def train(state: Any) -> None:
        batches = (batch["x"] for batch in state.loader) if url else (torch.randn(64, 512) for _ in range(STEPS))
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            state.times.append(time.time())
            state.commit()

    train(state)
    return state.times[0], state.times[-1]


def write_rows(folder: str) -> str:
    """Write a batch for each step of each worker; return the folder's URL."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [[0.5] * 512] * (64 * WORKERS * STEPS)
    pq.write_table(
        pa.table({"x": pa.array(rows, pa.list_(pa.float32(), 512))}), f"{folder}/rows.parquet", row_group_size=640
    )
    return f"file://{folder}"


def distributor_loop() -> tuple[float, float]:
    """The same, as TorchDistributor wants it."""
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.Adam(model.parameters())
    times = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()
        times.append(time.time())
    dist.destroy_process_group()
    return times[0], times[-1]


def run_on(spark: Any, env: dict[str, str]) -> tuple[float, float]:
    return spark_elastic.run(elastic_loop, spark=spark, min_np=WORKERS, max_np=WORKERS, env=env)[0]


def measure(call: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Return the seconds to the first step, and from the last step to the return."""
    called = time.time()
    first, last = call()
    return first - called, time.time() - last


def imports(interpreters: int) -> float:
    """The seconds that so many interpreters take to import torch and ourselves, all at once."""
    code = (
        "import os; from spark_elastic.worker.process import warm_parent; warm_parent.import_everything(); os._exit(0)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.time()
    for process in [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(interpreters)]:
        assert process.wait() == 0
    return time.time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    from pyspark.ml.torch.distributor import TorchDistributor

    seconds: dict[str, list[tuple[float, float]]] = {}
    floors: dict[str, list[float]] = {"one import": [], f"{WORKERS} imports": []}
    with tempfile.TemporaryDirectory() as folder:
        urls = {"spark_elastic, local=True": "", "spark_elastic, local=True, Parquet files": write_rows(folder)}
        for _ in range(options.repeats):
            floors["one import"].append(imports(1))
            for name, url in urls.items():
                spark_elastic.shutdown()
                run_here = partial(spark_elastic.run, elastic_loop, args=(url,), local=True, num_proc=WORKERS)
                for which in (name, f"{name}, a later run"):
                    seconds.setdefault(which, []).append(measure(lambda run_here=run_here: run_here()[0]))
    with local_cluster(WORKERS) as spark:
        for turn in range(options.repeats):
            # No warm parent that is kept has this turn's environment, until the first run of the turn has left one.
            ours = partial(run_on, spark, {"TURN": str(turn)})
            rivals: dict[str, Callable[[], tuple[float, float]]] = {
                "spark_elastic": ours,
                "spark_elastic, a later run": ours,
                "TorchDistributor": partial(
                    TorchDistributor(WORKERS, local_mode=False, use_gpu=False).run, distributor_loop
                ),
            }
            floors[f"{WORKERS} imports"].append(imports(WORKERS))
            for name, call in rivals.items():
                try:
                    seconds.setdefault(name, []).append(measure(call))
                except RuntimeError as error:
                    # Torch aborts some interpreters that end well, and torchrun then fails the job.
                    assert name == "TorchDistributor", name
                    print(f"turn {turn}: {name} failed: {error}")
    table = Table("", "call to first step", "last step to return", unit="seconds")
    results = {}
    for name, pairs in seconds.items():
        start, end = (summarize(values) for values in zip(*pairs, strict=True))
        table.add(name, start, end)
        results[name] = {"first_step": start.asdict(), "return": end.asdict()}
    alone = {name: summarize(values) for name, values in floors.items()}
    for name, summary in alone.items():
        table.add(f"{name}, at once, nothing else", summary, "")
    table.print()
    emit("startup", **results, **{name: summary.asdict() for name, summary in alone.items()})


if __name__ == "__main__":
    main()
