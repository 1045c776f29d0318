"""Measures the loaders: rows per CPU-second, peak memory, the cost of tracking and of a repartition.

    python benchmarks/loader.py [--rows 1000000] [--petastorm-python PATH/TO/python] [--json FILE]

Each measurement runs in a process of its own, which counts the CPU seconds of all its threads from the first to the
last batch, imports and start left out. Petastorm's are taken with the interpreter of an environment that has the extra
`spark-elastic[petastorm]`. Data: 20 float32 columns and one list of 32 float32 in row groups of 20,000, batches of 256.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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


def make(root: Path, rows: int, group: int = GROUP) -> None:
    """Write the dataset, a few row groups at a time, spread over files of 200,000 rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    for start in range(0, rows, 200_000):
        count = min(200_000, rows - start)
        columns = {f"f{i}": random.random(count, "f4") for i in range(COLUMNS)}
        offsets = pa.array(np.arange(count + 1, dtype="i4") * LENGTH)
        vector = pa.ListArray.from_arrays(offsets, pa.array(random.random(count * LENGTH, "f4")))
        pq.write_table(pa.table({**columns, "x": vector}), root / f"part-{start:09}.parquet", row_group_size=group)


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
        yield len(batch["f0"])


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
    """Run one measurement here; return rows, CPU and wall seconds, and the growth of the peak of memory."""
    import torch

    torch.set_num_threads(1)
    source = MEASURES[name][1](url)
    rows = next(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, wall = time.process_time(), time.perf_counter()
    counted = 0
    for count in source:
        counted += count
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rows": rows + counted, "cpu": cpu, "wall": wall, "rate": counted / cpu, "peak_mib": peak / 1024,
            "grown_mib": (peak - before) / 1024}  # fmt: skip


def tracking(url: str) -> dict[str, float]:
    """Return the microseconds a step that position, ticket sums, reports and their check cost, for 8 ranks."""
    from spark_elastic.data import ParquetLoader
    from spark_elastic.data.plan import draw

    loader = ParquetLoader(url, BATCH)
    loader.set_world(0, 8)
    tracker = loader.tracker
    steps = tracker.upcoming(0, 200)
    start = time.process_time()
    sums = [draw(tracker.order, steps[i : i + 16], 0).ticket_sums for i in range(0, len(steps), 16)]
    planned = time.process_time() - start
    flat = [value for block in sums for value in block]
    start = time.process_time()
    for step, value in zip(steps, flat, strict=True):
        tracker.delivered(step, value)
        loader.state_dict()
        epoch, position, _, _ = tracker.report()
        share = (2 * step.start + step.rows - 1) * step.rows // 2
        tracker.confirm([(epoch, position, step.rows, share % (1 << 61)), *[(epoch, position, 0, 0)] * 7])
    tracked = time.process_time() - start
    return {"plan_us": planned / len(steps) * 1e6, "track_us": tracked / len(steps) * 1e6}


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


def main() -> None:
    """Measure everything and print a table, ratios last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--petastorm-python", default="")
    parser.add_argument("--json", default="")
    parser.add_argument("--one", nargs=2, metavar=("MEASURE", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, url = given.one
        special = {"tracking": lambda: tracking(url), "repartition": repartition}
        print(json.dumps(special[name]() if name in special else measure(name, url)))
        return
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root, large = Path(folder) / "data", Path(folder) / "huge"
        root.mkdir()
        large.mkdir()
        make(root, given.rows)
        print(f"{'':38}{'rows/CPU-s':>12}{'CPU s':>8}{'wall s':>8}{'peak MiB':>10}{'growth':>8}")
        for name, (title, _) in MEASURES.items():
            python = given.petastorm_python if name.startswith("petastorm") else sys.executable
            if not python:
                continue
            found = results[name] = child(python, "--one", name, str(root))
            print(
                f"{title:38}{found['rate']:12,.0f}{found['cpu']:8.2f}{found['wall']:8.2f}"
                f"{found['peak_mib']:10.0f}{found['grown_mib']:8.0f}",
                flush=True,
            )
        make(large, 200_000, group=200_000)
        huge = results["huge"] = child(sys.executable, "--one", "default", str(large))
        print(f"{'ParquetLoader, one row group of 200000':38}{huge['rate']:12,.0f}{'':16}{huge['peak_mib']:10.0f}"
              f"{huge['grown_mib']:8.0f}")  # fmt: skip
        results["tracking"] = child(sys.executable, "--one", "tracking", str(root))
        results["repartition"] = child(sys.executable, "--one", "repartition", str(root))
    print(f"defaults / decoding alone: {results['default']['rate'] / results['decode']['rate']:.2f} (wanted 0.33)")
    if "petastorm" in results:
        for name in ("default", "groups", "unshuffled"):
            ratio = results[name]["rate"] / results["petastorm"]["rate"]
            print(f"{MEASURES[name][0]} / petastorm without a buffer: {ratio:.2f} (wanted 2.00)")
    if "petastorm-window" in results:
        ratio = results["window"]["rate"] / results["petastorm-window"]["rate"]
        print(f"shuffle_rows=80000 / petastorm with a buffer of 80000: {ratio:.2f} (wanted 4.00)")
    cost = results["tracking"]
    print(f"planning {cost['plan_us']:.0f} us and tracking {cost['track_us']:.0f} us a step (8 ranks)")
    print("repartition of 100,000 row groups: order and share {new_epoch_ms:.1f} ms, list of its {pieces} pieces "
          "{assignment_ms:.1f} ms".format(**results["repartition"]))  # fmt: skip
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
