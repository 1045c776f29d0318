"""Measures the loaders: rows per CPU-second, peak memory, the cost of tracking and of a repartition.

    python benchmarks/loader.py [--rows 1000000] [--repeats 5] [--petastorm-python PATH/TO/python] [--json FILE]

Each measurement runs in a process of its own, which counts the CPU seconds of all its threads from the first to the
last batch, imports and start left out; rivals take turns, and medians are compared. Petastorm's are taken with the
interpreter of an environment that has the extra ``spark-elastic[petastorm]``. Data: 20 float32 columns and one list of 32
float32 in row groups of 20,000, batches of 256; a tenth as many rows of 500 float32 columns; and a fiftieth as many images
of 3 x 64 x 64 bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH = 256
WINDOW = 80_000
COLUMNS = 20
LENGTH = 32
GROUP = 20_000
EPOCHS = 3
WIDE_COLUMNS, WIDE_GROUP = 500, 5_000
IMAGE, IMAGE_GROUP = (3, 64, 64), 1_000


def make(root: Path, rows: int, group: int = GROUP) -> None:
    """Write the dataset, a few row groups at a time, spread over files of 200,000 rows or one row group."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    step = max(200_000, group)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        columns = {f"f{i}": random.random(count, "f4") for i in range(COLUMNS)}
        offsets = pa.array(np.arange(count + 1, dtype="i4") * LENGTH)
        vector = pa.ListArray.from_arrays(offsets, pa.array(random.random(count * LENGTH, "f4")))
        pq.write_table(pa.table({**columns, "x": vector}), root / f"part-{start:09}.parquet", row_group_size=group)


def make_wide(root: Path, rows: int) -> None:
    """Write a table of many float32 columns."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    table = pa.table({f"f{i}": random.random(rows, "f4") for i in range(WIDE_COLUMNS)})
    pq.write_table(table, root / "part.parquet", row_group_size=WIDE_GROUP)


def make_images(root: Path, rows: int) -> None:
    """Write images as tensors of bytes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    images = random.integers(0, 256, (rows, *IMAGE), np.uint8)
    table = pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(images), "label": np.arange(rows) % 10})
    pq.write_table(table, root / "part.parquet", row_group_size=IMAGE_GROUP)


def decode(url: str) -> Iterator[int]:
    """Bare pyarrow: every row group decoded into an Arrow table."""
    import pyarrow.parquet as pq

    for path in sorted(Path(url).glob("*.parquet")):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            yield len(file.read_row_group(group, use_threads=False))


def ours(url: str, **options: Any) -> Iterator[int]:
    """ParquetLoader in a world of one."""
    from spark_elastic.data import ParquetLoader

    loader = ParquetLoader(url, BATCH, **options)
    loader.set_world(0, 1)
    for batch in loader:
        yield len(next(iter(batch.values())))


def petastorm(url: str, window: int) -> Iterator[int]:
    """Petastorm's reader for plain Parquet under its batching loader."""
    import warnings

    warnings.simplefilter("ignore")
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    reader = make_batch_reader(f"file://{url}", reader_pool_type="thread", workers_count=2, num_epochs=1)
    options = {"shuffling_queue_capacity": window} if window else {}
    with BatchedDataLoader(reader, batch_size=BATCH, **options) as loader:
        for batch in loader:
            yield len(batch["f0"])


MEASURES: dict[str, tuple[str, Callable[[str], Iterator[int]]]] = {
    "decode": ("pyarrow, decoding alone", decode),
    "default": ("ParquetLoader, defaults", lambda url: ours(url)),
    "unshuffled": ("ParquetLoader, shuffle=False", lambda url: ours(url, shuffle=False)),
    "groups": ("ParquetLoader, shuffle_rows=0", lambda url: ours(url, shuffle_rows=0)),
    "window": ("ParquetLoader, shuffle_rows=80000", lambda url: ours(url, shuffle_rows=WINDOW)),
    "petastorm-engine": ("ParquetLoader, engine='petastorm'", lambda url: ours(url, engine="petastorm")),
    "petastorm": ("petastorm, no shuffle buffer", lambda url: petastorm(url, 0)),
    "petastorm-window": ("petastorm, shuffle buffer of 80000", lambda url: petastorm(url, WINDOW)),
}


def measure(name: str, url: str) -> dict[str, float]:
    """Run some epochs of one measurement here; return the rows, CPU and wall seconds of one, and rows per CPU-second.

    The epoch before them is not measured: it imports what is needed and touches memory for the first time.
    """
    import torch

    torch.set_num_threads(1)
    sum(MEASURES[name][1](url))
    # What was imported is not to be looked through in the middle of a measurement: one full collection costs 0.1 s.
    gc.collect()
    gc.freeze()
    rows = counted = 0
    cpu = wall = 0.0
    for _ in range(EPOCHS):
        source = MEASURES[name][1](url)
        first = next(source)
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        rest = sum(source)
        cpu += time.process_time() - cpu_start
        wall += time.perf_counter() - wall_start
        rows, counted = first + rest, counted + rest
    return {"rows": rows, "cpu": cpu / EPOCHS, "wall": wall / EPOCHS, "rate": counted / cpu}


def memory(url: str, world: int) -> dict[str, float]:
    """Return by how many MiB the memory of rank 0 of a world grows at most in an epoch."""
    import torch

    from spark_elastic.data import ParquetLoader

    def resident(field: str) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 1024

    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before = resident("VmRSS")
    loader = ParquetLoader(url, BATCH)
    loader.set_world(0, world)
    for _ in loader:
        pass
    return {"grown_mib": resident("VmHWM") - before}


def tracking(url: str) -> dict[str, float]:
    """Return the microseconds a step of a real job of two ranks, and those of them that tracking takes.

    Counted: what a delivery notes, the report and the position at a commit, and the check of all ranks' reports. They
    travel in the collective that a commit makes anyway.
    """
    import cloudpickle
    from pyspark.sql import SparkSession

    import spark_elastic

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    try:
        steps = spark_elastic.run(train, args=(url, 400), spark=spark, min_np=2, max_np=2)
    finally:
        spark.stop()
    return {name: statistics.mean(step[name] for step in steps) for name in steps[0]}


def train(url: str, steps: int) -> dict[str, float]:
    """Train a small network on the benchmark's data, with clocks around all that tracking does; microseconds a step."""
    import torch

    import spark_elastic as se

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(COLUMNS + LENGTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)]
    model = se.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    loader = se.data.ParquetLoader(url, BATCH)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader)
    spent = 0.0

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent += time.perf_counter() - start

        return call

    for owner, names in ((loader, ("state_dict", "report", "confirm")), (loader.tracker, ("delivered",))):
        for name in names:
            setattr(owner, name, clocked(getattr(owner, name)))

    @se.elastic
    def loop(state: Any) -> dict[str, float]:
        nonlocal spent
        start = 0.0
        for taken, batch in enumerate(state.loader):
            if taken == 50:
                start, spent = time.perf_counter(), 0.0
            if taken == 50 + steps:
                break
            x = torch.cat([torch.stack([batch[f"f{i}"] for i in range(COLUMNS)], 1), batch["x"]], 1)
            optimizer.zero_grad()
            state.model(x).square().mean().backward()
            optimizer.step()
            state.commit()
        return {"step_us": (time.perf_counter() - start) / steps * 1e6, "track_us": spent / steps * 1e6}

    return loop(state)


def repartition() -> dict[str, float]:
    """Return the milliseconds that a new share of 100,000 row groups takes: an epoch's order, and the assignment."""
    import numpy as np

    from spark_elastic.data.order import OrderSpec
    from spark_elastic.data.plan import BatchPlan
    from spark_elastic.data.tracker import RowGroupTracker

    rows = np.random.default_rng(0).integers(1, 50_000, 100_000)
    tracker = RowGroupTracker(rows, OrderSpec(0, True, 32, 1024, True), BatchPlan(BATCH, None))
    tracker.seek(1, tracker.total // 3)
    start = time.perf_counter()
    tracker.set_world(3, 7)
    first = tracker.upcoming(tracker.position, 16)
    order = tracker.order
    whole = time.perf_counter() - start
    start = time.perf_counter()
    tracker.seek(1, tracker.total // 2)
    tracker.set_world(2, 6)
    pieces = tracker.assignment()
    again = time.perf_counter() - start
    return {"steps": len(first), "lanes": order.spec.lanes, "pieces": len(pieces), "new_epoch_ms": whole * 1e3,
            "assignment_ms": again * 1e3}  # fmt: skip


def child(python: str, *arguments: str) -> dict[str, float]:
    """Run this file in another process and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent), "OMP_NUM_THREADS": "1"}
    command = [python, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(root: Path, petastorm_python: str, repeats: int) -> dict[str, dict[str, float]]:
    """Measure all loaders in turn, several times; return the medians, and print them as a table."""
    pythons = {name: petastorm_python if name.startswith("petastorm") else sys.executable for name in MEASURES}
    names = [name for name, python in pythons.items() if python]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            runs[name].append(child(pythons[name], "--one", name, str(root)))
    print(f"| median of {repeats} | rows per CPU-s | CPU s | wall s |\n|---|---:|---:|---:|")
    medians = {}
    for name in names:
        found = medians[name] = {key: statistics.median(run[key] for run in runs[name]) for key in runs[name][0]}
        print(f"| {MEASURES[name][0]} | {found['rate']:,.0f} | {found['cpu']:.2f} | {found['wall']:.2f} |", flush=True)
    print(f"\ndefaults / decoding alone: {medians['default']['rate'] / medians['decode']['rate']:.2f} (goal 0.7)")
    for name, rival, wanted in (
        ("default", "petastorm", 2),
        ("groups", "petastorm", 2),
        ("window", "petastorm-window", 4),
    ):
        if rival in medians:
            ratio = medians[name]["rate"] / medians[rival]["rate"]
            print(f"{MEASURES[name][0]} / {MEASURES[rival][0]}: {ratio:.2f} (goal {wanted})")
    return medians


def compare_shapes(folder: Path, rows: int, repeats: int) -> dict[str, dict[str, float]]:
    """Measure the loader and decoding alone, in turn, on wide rows and on images; print rows per CPU-second and ratios."""
    shapes = {
        f"{WIDE_COLUMNS} float32 columns": (make_wide, rows // 10),
        f"images of {' x '.join(map(str, IMAGE))} bytes": (make_images, rows // 50),
    }
    print(
        "\n| rows | decoding alone, rows per CPU-s | ParquetLoader, defaults | ratio (goal 0.7) |\n|---|---:|---:|---:|"
    )
    found = {}
    for title, (write, count) in shapes.items():
        root = folder / title.replace(" ", "-")
        root.mkdir()
        write(root, count)
        runs = [{name: child(sys.executable, "--one", name, str(root))["rate"] for name in ("decode", "default")}
                for _ in range(repeats)]  # fmt: skip
        medians = found[title] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        ratio = statistics.median(run["default"] / run["decode"] for run in runs)
        print(f"| {title} | {medians['decode']:,.0f} | {medians['default']:,.0f} | {ratio:.2f} |", flush=True)
    return found


def compare_memory(folder: Path, rows: int) -> dict[str, dict[str, float]]:
    """Measure the growth of memory over datasets, row groups and worlds of different sizes, and print it as a table."""
    print(
        "\n| rows | row group | decoded MiB: dataset, row group | world | growth of a rank, MiB |\n|---:|---:|---:|---:|---:|"
    )
    found = {}
    row = (COLUMNS + LENGTH) * 4 / 2**20
    for total, group in ((rows // 5, GROUP), (rows, GROUP), (rows, rows // 5), (rows, rows)):
        root = folder / f"{total}-{group}"
        root.mkdir()
        make(root, total, group)
        for world in (1, 8):
            grown = child(sys.executable, "--one", f"memory-{world}", str(root))
            found[f"{total}/{group}/{world}"] = grown
            sizes = f"{total * row:.0f}, {group * row:.0f}"
            print(f"| {total:,} | {group:,} | {sizes} | {world} | {grown['grown_mib']:.0f} |", flush=True)
    return found


def main() -> None:
    """Measure everything and print tables and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--petastorm-python", default="")
    parser.add_argument("--json", default="")
    parser.add_argument("--one", nargs=2, metavar=("MEASURE", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, url = given.one
        special = {
            "tracking": lambda: tracking(url),
            "repartition": repartition,
            "memory-1": lambda: memory(url, 1),
            "memory-8": lambda: memory(url, 8),
        }
        print(json.dumps(special[name]() if name in special else measure(name, url)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "data"
        root.mkdir()
        make(root, given.rows)
        results = compare(root, given.petastorm_python, given.repeats)
        results |= compare_shapes(Path(folder), given.rows, given.repeats)
        results |= compare_memory(Path(folder), given.rows)
        cost = results["tracking"] = child(sys.executable, "--one", "tracking", str(root))
        results["repartition"] = child(sys.executable, "--one", "repartition", str(root))
    share = cost["track_us"] / cost["step_us"]
    print(f"\ntracking: {cost['track_us']:.0f} of {cost['step_us']:.0f} us a step of two ranks, {share:.2%} (goal 2 %)")
    print("repartition of 100,000 row groups: order and share {new_epoch_ms:.1f} ms, list of its {pieces} pieces "
          "{assignment_ms:.1f} ms (goal 50 ms)".format(**results["repartition"]))  # fmt: skip
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
