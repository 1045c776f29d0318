"""Stragglers: steps a second of four workers of which one has a third of the others' speed, with and without ``balance="auto"``.

    python benchmarks/stragglers.py [--repeats 5] [--seconds 60] [--rows 2048] [--sleep]

Each worker has a CPU quota: 30 % of a core, the slow one 10 %, so that four fit on two cores. Where no quota can be set (that
takes root and the cpu controller of cgroups), a worker sleeps for each of its rows instead. Jobs of all kinds take turns. Speeds
are those of the second half of a job, when shares have settled. Prints each job's steps relative to what the sum of the workers'
speeds allows, which follows from the job of equal workers with even shares, a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import Table, emit, summarize

import spark_elastic

WORKERS = 4
SPEEDS = {"equal": (3, 3, 3, 3), "one slow": (3, 3, 3, 1)}
# Of a core, for each unit of speed; and how often a quota is renewed.
CORE, PERIOD_US = 0.1, 10_000
HOME = -1  # the group of processes without a quota
SLEEP = 0.003
# After so many steps the quota begins; after every so many somebody looks at a clock.
WARM_UP, LOOK = 10, 5


@contextmanager
def quotas(wanted: bool) -> Iterator[dict[int, str]]:
    """Make a group of processes for each speed; yield the files to which a process of that speed writes its id, or nothing."""
    root = Path("/sys/fs/cgroup")
    root = root / "cpu" if (root / "cpu").is_dir() else root
    made: dict[int, Path] = {}
    try:
        for speed in {speed for speeds in SPEEDS.values() for speed in speeds}:
            for rank in range(WORKERS if wanted else 0):  # a quota is that of all processes in a group
                group = root / f"stragglers-{os.getpid()}-{speed}-{rank}"
                group.mkdir()
                made[10 * speed + rank] = group
                quota = round(speed * CORE * PERIOD_US)
                if (group / "cpu.max").exists():
                    (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
                else:
                    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (group / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError:
        _remove(made)
        made = {}
    try:
        yield {key: str(group / "cgroup.procs") for key, group in [*made.items(), (HOME, root)]} if made else {}
    finally:
        _remove(made)


def _remove(groups: dict[int, Path]) -> None:
    for group in groups.values():
        group.rmdir()


def enter(group: str | None) -> None:
    """Enter a group of processes, if it is one."""
    if group is not None:
        Path(group).write_text(str(os.getpid()))


def train(
    speeds: tuple[int, ...], balance: str | None, seconds: float, rows: int, groups: dict[int, str]
) -> dict[str, Any]:
    """Train for so many seconds; return the steps a second of the second half, and the shares at the end."""
    import torch

    import spark_elastic as se

    torch.set_num_threads(1)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = se.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(100 * rows, 256, generator=torch.Generator().manual_seed(0)))
    loader = se.data.ElasticDataLoader(data, global_batch_size=rows, balance=balance)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0)

    @se.elastic
    def steps(state: Any) -> dict[str, Any]:
        speed = speeds[se.rank()]
        # When the quota began, and the second half, and the steps since; all count alike, so that they look at a clock together.
        begin = half = 0.0
        step = since = 0
        while True:
            for (x,) in state.loader:
                optimizer.zero_grad()
                loss = state.model(x).square().mean()
                if not groups:
                    time.sleep(SLEEP * len(x) / speed)
                loss.backward()
                optimizer.step()
                state.commit()
                step, since = step + 1, since + 1
                if step == WARM_UP:  # what the first steps import is not to be slow
                    enter(groups.get(10 * speed + se.rank()))
                    begin = time.perf_counter()
                if step < WARM_UP or step % LOOK:
                    continue
                now = time.perf_counter()
                elapsed = se.broadcast_object(now - begin)
                if elapsed > seconds:
                    enter(groups.get(HOME))
                    return {"per_second": since / (now - half), "shares": list(state.loader.batch_rows)}
                if not half and elapsed > seconds / 2:
                    half, since = now, 0
            state.epoch += 1
            state.loader.set_epoch(state.epoch)

    return steps(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each job")
    parser.add_argument("--rows", type=int, default=2048, help="of a global batch")
    parser.add_argument("--sleep", action="store_true", help="sleep for each row instead of setting quotas")
    options = parser.parse_args()
    kinds = [(name, balance) for name in SPEEDS for balance in (None, "auto")]
    found: dict[tuple[str, str | None], list[float]] = {kind: [] for kind in kinds}
    shares: dict[str, list[int]] = {}
    with quotas(not options.sleep) as groups:
        for repeat in range(options.repeats):
            seen = {}
            for name, balance in kinds if repeat % 2 else kinds[::-1]:
                seen[name, balance] = measure(SPEEDS[name], balance, options, groups)
                print(f"{name}, {balance or 'even'}: {seen[name, balance]}", flush=True)
            even = seen["equal", None]["per_second"]
            for (name, balance), result in seen.items():
                allowed = even * sum(SPEEDS[name]) / sum(SPEEDS["equal"])
                found[name, balance].append(result["per_second"] / allowed)
                shares[f"{name}, {balance or 'even'}"] = result["shares"]
    table = Table("workers", "shares", "steps, of those that the sum of speeds allows", unit="ratios")
    for (name, balance), ratios in found.items():
        table.add(name, balance or "even", summarize(ratios))
    table.print()
    emit(
        "stragglers",
        limited_by="CPU quota" if groups else "sleep",
        ratios={
            f"{name}, {balance or 'even'}": summarize(ratios).asdict() for (name, balance), ratios in found.items()
        },
        shares=shares,
    )


def measure(
    speeds: tuple[int, ...], balance: str | None, options: argparse.Namespace, groups: dict[int, str]
) -> dict[str, Any]:
    arguments = (speeds, balance, options.seconds, options.rows, groups)
    results = spark_elastic.run(
        train, arguments, local=True, num_proc=WORKERS, min_np=WORKERS, max_np=WORKERS, progress=False
    )
    return dict(results[0])


if __name__ == "__main__":
    main()
