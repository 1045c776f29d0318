"""Memory and commits: the peak of a worker in multiples of its parameters, and a commit against one memcpy of the state.

    python benchmarks/memory.py [--workers 4,8] [--millions 16] [--steps 20] [--durable]

Jobs of local processes with Adam, one for each way to commit, and torch's plain DDP in a fixed world. The peak is what a worker
had at most beyond what it had before it made its model. Commits and copies are CPU time of the training thread, in turns in the
same process. With --durable, durable checkpoints are written all the time, one after another. Prints a table a world size and a
line of JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

from report import Table, emit

import spark_elastic
from spark_elastic.testing import local_cluster

COMMITS = ("plain", "copy", "in_place", "sharded")


def train(commit: str, millions: int, steps: int) -> tuple[float, float]:
    """Train in one worker. Return its peak in multiples of the parameters, and a commit in multiples of a memcpy."""
    import re
    import statistics
    import time
    from pathlib import Path

    import torch

    import spark_elastic as se

    def status(name: str) -> int:
        return 1024 * int(re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status("VmRSS")
    width = int((millions * 1e6 / 4) ** 0.5)
    network = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))
    weight = 4 * sum(parameter.numel() for parameter in network.parameters())
    wrapped = torch.nn.parallel.DistributedDataParallel if commit == "plain" else se.DistributedDataParallel
    model = wrapped(network)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    commits: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()

    def commit_steps(state: se.TorchState) -> None:
        while state.step < steps:
            step()
            state.step += 1
            start = time.thread_time()
            state.commit()
            commits.append(time.thread_time() - start)

    if commit == "plain":
        for _ in range(steps):
            step()
    else:
        se.elastic(commit_steps)(se.TorchState(model, optimizer, step=0, commit=commit))
    peak = (status("VmHWM") - before) / weight
    source, target = torch.ones(3 * weight // 4), torch.zeros(3 * weight // 4)
    copies = []
    for _ in range(5):
        start = time.thread_time()
        target.copy_(source)
        copies.append(time.thread_time() - start)
    return peak, statistics.median(commits[3:] or [0.0]) / statistics.median(copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,8")
    parser.add_argument("--millions", type=int, default=16, help="parameters")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--durable", action="store_true", help="write durable checkpoints, one after another")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for workers in map(int, options.workers.split(",")):
        table = Table("commit", "peak", "beyond plain DDP", "commit / memcpy", unit="multiples of the parameters")
        with local_cluster(slots=workers) as cluster:
            plain = 0.0
            for commit in COMMITS:
                with tempfile.TemporaryDirectory() as folder:
                    durable = {"checkpoint": folder, "checkpoint_interval": 0, "checkpoint_keep": 1}
                    seen = spark_elastic.run(
                        train, (commit, options.millions, options.steps), local=cluster, num_proc=workers, min_np=workers,
                        elastic=commit != "plain", progress=False,
                        **(durable if options.durable and commit != "plain" else {}),
                    )  # fmt: skip
                peak = max(peak for peak, _ in seen)
                cost = statistics.median(cost for _, cost in seen)
                plain = plain or peak
                table.add(commit, peak, peak - plain, cost)
                results[f"{workers} {commit}"] = {"peak": round(peak, 2), "commit": round(cost, 3)}
        table.print(f"{workers} workers: the greatest of all workers; commits: median of workers")
    emit("memory", **results)


if __name__ == "__main__":
    main()
