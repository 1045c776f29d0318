"""Jobs under random faults on real executors: ``chaos.py [--seed 1] [--jobs 8] [--faults 25]``.

Each job trains on three hosts until its faults have struck, then on to the end of the epoch; all that it, its workers and the
driver have recorded is checked against ``chaos_model``. The same seed throws the same dice; what they hit depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import chaos_training
import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
from chaos_cluster import Cluster
from chaos_faults import HEARTBEAT_TIMEOUT, Chaos, Kind, View
from chaos_model import History, Line, violations

import spark_elastic

HOSTS = 3
ROWS = 500


def write_rows(folder: Path) -> str:
    folder.mkdir()
    for number, (first, last, group) in enumerate([(0, 199, 37), (199, 200, 1), (200, ROWS, 90)]):
        table = pa.table({"id": pa.array(range(first, last), pa.int64())})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=group)
    return folder.as_uri()


def read_lines(folder: Path) -> list[Line]:
    """The records of all workers; a last line that its worker could not finish is left out."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                fields = json.loads(text)
                found.append(Line(path.stem, **{**fields, "rows": tuple(fields.get("rows", ()))}))
    return found


def run_job(cluster: Cluster, folder: Path, seed: str, faults: int) -> tuple[History, list[Kind], list[str]]:
    """Run one job; return its history, the faults that struck, and what was wrong."""
    folder.mkdir()
    view = View()
    chaos = Chaos(cluster, view, (folder / "stop").touch, seed, faults, HOSTS)
    thread = threading.Thread(target=chaos.run)
    thread.start()
    wrong, results = [], []
    try:
        results = spark_elastic.run(
            chaos_training.train_rows, args=(write_rows(folder / "rows"), ROWS, str(folder)), spark=cluster.spark,
            min_np=1, num_proc=2, max_np=HOSTS, on_event=view.note, event_log=folder / "events",
            checkpoint=cluster.disk / seed.replace("/", "-"), checkpoint_interval=1,
            heartbeat_timeout=HEARTBEAT_TIMEOUT, hang_timeout=10, ready_timeout=10, form_timeout=10, elastic_timeout=90,
        )  # fmt: skip
    except spark_elastic.SparkElasticError as error:
        wrong.append(f"the job failed: {type(error).__name__}: {error}")
    thread.join()
    history = History(view.events, read_lines(folder), results, ROWS, 1, HOSTS)
    if chaos.problem:
        wrong.append(chaos.problem)
    return history, chaos.struck, wrong or violations(history)


def describe(history: History, struck: list[Kind], seconds: float) -> str:
    events: Counter[str] = Counter(event["event"] for event in history.events)
    result: Any = history.results[0] if history.results else {"step": 0, "epochs": 0}
    return (
        f"{len(struck)} faults, {events['world_formed']} worlds, {events['world_broken']} broken, {events['state_lost']} "
        f"states restored, {events['checkpoint_failed']} checkpoints failed, {result['step']} steps, "
        f"{result['epochs']} epochs, {seconds:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--faults", type=int, default=25, help="faults a job")
    parser.add_argument("--only", type=int, help="run the job of this number alone")
    given = parser.parse_args()
    cloudpickle.register_pickle_by_value(chaos_training)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and leave nothing behind
    total: Counter[str] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as name, Cluster(Path(name), HOSTS) as cluster:
        for what, reason in cluster.missing.items():
            print(f"left out: {what} ({reason})", flush=True)
        for number in range(given.jobs) if given.only is None else [given.only]:
            begun = time.monotonic()
            seed = f"{given.seed}/{number}"
            folder = Path(name, f"job{number}")
            history, struck, wrong = run_job(cluster, folder, seed, given.faults)
            total.update(kind.name for kind in struck)
            print(f"--only {number}: {describe(history, struck, time.monotonic() - begun)}", flush=True)
            if wrong:
                failed += 1
                print(*wrong[:10], *history.events[-40:], sep="\n    ", flush=True)
    print(f"{total.total()} faults ({', '.join(f'{name} {count}' for name, count in total.most_common())})")
    print(f"{failed} jobs violate the model" if failed else "nothing lost")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
