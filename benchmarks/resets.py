"""Resets: what a loss or an arrival costs those who train on.

    python benchmarks/resets.py [--repeats 8] [--cases worker,loader,hang,executor,drain,big,heavy] [--picture recovery.png]

Jobs of four workers on a local-cluster commit every step; faults strike them again and again, rank 0 and another in turn, and
Spark or the warm parent brings a replacement each time, so each loss is followed by a join. All times are those of the
event log. ``next step``: from the loss (its declaration, for a hang) to the survivors' next completed step.
``full size``: to the world that is complete again. ``detect``: until the driver knows. ``join`` and ``drain``: how long the
running workers pause for a newcomer, or for one that leaves as planned: from the end of one step's commit to the beginning
of the next step. ``big`` has a state of
400 MB and two workers, in ``heavy`` the victim holds 4 GiB of memory. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from cluster import local_cluster
from report import Summary, Table, emit, summarize

import spark_elastic
from spark_elastic.protocol.event_format import read_event
from spark_elastic.testing import Fault, drain, inject, kill, kill_executor, stop
from spark_elastic.timeline.resets import Kind, Part, Reset, find_resets

WORKERS = 4
PACE = 0.02


@dataclass(frozen=True)
class Case:
    """A job: what strikes it, how many steps lie between two strikes, and what is trained."""

    strike: Any
    victims: tuple[int, ...] = (0, 1)
    steps_between: int = 60
    loader_workers: int = 0
    parameters: int = 250_000
    workers: int = WORKERS
    repeats: int | None = None
    ballast_gib: int = 0


CASES = {
    "worker": Case(kill),
    "loader": Case(kill, loader_workers=2, steps_between=120),
    "hang": Case(stop, steps_between=60),
    "executor": Case(kill_executor, steps_between=450),
    "drain": Case(drain, steps_between=120),
    "big": Case(kill, victims=(1,), parameters=100_000_000, workers=2, steps_between=12, repeats=7),
    "heavy": Case(kill, victims=(1,), workers=2, steps_between=300, repeats=7, ballast_gib=4),
}


def train(steps: int, pace: float, parameters: int, loader_workers: int, ballast_gib: int) -> None:
    """Train at an even pace."""
    import time

    import torch

    import spark_elastic as se

    width = int((parameters / 2) ** 0.5)
    net = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, width, bias=False))
    model = se.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)
    feed = torch.utils.data.DataLoader(range(10**9), num_workers=loader_workers) if loader_workers else None
    ballast = torch.ones(ballast_gib * 2**30, dtype=torch.uint8)

    @se.elastic
    def loop(state: Any) -> None:
        rows = iter(feed) if feed is not None else None
        while state.step < steps:
            if rows is not None:
                next(rows)
            optimizer.zero_grad()
            model(torch.randn(2, width)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            time.sleep(pace)

    loop(state)
    del ballast


def measure(spark: Any, case: Case, repeats: int) -> tuple[list[Reset], list[float]]:
    """Run a case; return its resets and the seconds that it took each time to be back to full size."""
    turns = case.repeats or repeats
    faults: list[Fault] = [
        case.strike(rank=case.victims[turn % len(case.victims)], step=case.steps_between * (turn + 1))
        for turn in range(turns)
    ]
    events: list[dict[str, Any]] = []
    with inject(*faults):
        spark_elastic.run(
            train,
            args=(case.steps_between * (turns + 1), PACE, case.parameters, case.loader_workers, case.ballast_gib),
            spark=spark,
            min_np=1,
            num_proc=case.workers,
            max_np=case.workers,
            heartbeat_timeout=3.0,
            on_event=events.append,
        )
    resets = [reset for reset in find_resets([read_event(event) for event in events]) if reset.parts]
    return resets, back_to_full_size(events, case.workers)


def parts(reset: Reset) -> dict[Part, float]:
    """Where the time of a recovery goes; that of a hang begins when it is declared."""
    return {**reset.parts, Part.DETECT: 0.0} if "hung" in reset.reason else reset.parts


def back_to_full_size(events: list[dict[str, Any]], size: int) -> list[float]:
    """The seconds from each loss to the next complete world."""
    found = []
    for lost in (event for event in events if event["event"] == "world_broken"):
        full = [e for e in events if e["event"] == "world_formed" and e["size"] == size and e["time"] > lost["time"]]
        if full:
            found.append(full[0]["time"] - lost["time"])
    return found


def memcpy_seconds(size: int) -> float:
    """One copy of so many bytes between two tensors that have been touched."""
    import time

    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def draw(path: str, resets: dict[str, list[Reset]]) -> None:
    """Draw where the time of a recovery goes, the median of each part, one bar a case."""
    import matplotlib

    matplotlib.use("svg" if path.endswith("svg") else "agg")
    from matplotlib import pyplot

    losses = {name: [parts(reset) for reset in found if reset.kind is Kind.LOSS] for name, found in resets.items()}
    cases = [name for name, found in losses.items() if found]
    figure, axes = pyplot.subplots(figsize=(8, 0.7 * len(cases) + 1.4), layout="constrained")
    starts = [0.0] * len(cases)
    for part in Part:
        widths = [1000 * summarize([each[part] for each in losses[name]]).median for name in cases]
        axes.barh(cases, widths, left=starts, label=part.value)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_xlabel("milliseconds after the loss (a hang: after it was declared), median of each part")
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--picture", help="draw where the time goes into this file")
    options = parser.parse_args()
    with local_cluster(WORKERS) as spark:
        table = Table("case", "detect", "next step", "full size", "join", "drain", unit="seconds")
        resets: dict[str, list[Reset]] = {}
        results: dict[str, Any] = {}
        for name in options.cases.split(","):
            case = CASES[name]
            resets[name], full = measure(spark, case, options.repeats)
            losses = [reset for reset in resets[name] if reset.kind is Kind.LOSS]
            columns = {
                "detect": [parts(reset)[Part.DETECT] for reset in losses],
                "next_step": [sum(parts(reset).values()) for reset in losses],
                "full_size": full,
                "join": [reset.lost for reset in resets[name] if reset.kind is Kind.JOIN and reset.lost is not None],
                "drain": [reset.lost for reset in resets[name] if reset.kind is Kind.DRAIN and reset.lost is not None],
            }
            summaries: dict[str, Summary | None] = {key: summarize(v) if v else None for key, v in columns.items()}
            table.add(name, *(summary or "" for summary in summaries.values()))
            results[name] = {key: summary.asdict() if summary else None for key, summary in summaries.items()}
            results[name]["victims"] = [reset.victim for reset in losses]
    table.print()
    if "big" in results:
        results["big"]["memcpy"] = memcpy_seconds(4 * CASES["big"].parameters)
        print(f"memcpy of the big state: {results['big']['memcpy']:.3f} s")
    if options.picture:
        draw(options.picture, resets)
    emit("resets", **results)


if __name__ == "__main__":
    main()
