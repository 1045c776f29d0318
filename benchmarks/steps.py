"""Steps: the elastic loop with a commit every step against the same loop under torchrun with plain DDP.

    python benchmarks/steps.py [--repeats 30] [--cases short,short_in_place,short_no_commit,small,in_place,copy] [--local]
    python benchmarks/steps.py --parts small

Two workers each. Both jobs are up all the time and take turns, a block of steps each, so that whatever else the machine does
hits both. ``short`` is a step of a few milliseconds: four layers of 256 by 256, 16 rows; with copies, in place, and without any
commit. ``small`` is a model of 1 MB, ``in_place`` and ``copy`` one of 100 MB with Adam (300 MB of state). Prints the ratio of the
steps' times and that of the CPU time of both workers, a table and a line of JSON; and, where commits copy the state, the ratio to
a plain step plus one memcpy of the state, as both workers make it at once. ``--parts`` puts clocks around what this package
does in a step instead, and prints what each part takes. ``--local`` starts the workers in local processes, without Spark.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster import local_cluster
from report import Table, emit, summarize

WORKERS = 2
LIMIT = 600.0
COPIES = 15


@dataclass(frozen=True)
class Case:
    """``width`` and number of the square layers, rows a step, steps a block, and how commits are kept; no commits if empty."""

    width: int
    batch: int
    block: int
    commit: str
    layers: int = 2


CASES = {
    "short": Case(256, 16, 200, "copy", 4),
    "short_in_place": Case(256, 16, 200, "in_place", 4),
    "short_no_commit": Case(256, 16, 200, "", 4),
    "small": Case(360, 512, 100, "copy"),
    "in_place": Case(3600, 64, 3, "in_place"),
    "copy": Case(3600, 64, 3, "copy"),
}


def build(case: Case) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    layers = [(torch.nn.Linear(case.width, case.width), torch.nn.ReLU()) for _ in range(case.layers)]
    model = torch.nn.Sequential(*[part for pair in layers for part in pair][:-1])
    return model, torch.randn(case.batch, case.width)


def take_turns(folder: Path, name: str, rank: int, blocks: int, steps: int, step: Callable[[], None]) -> None:
    """Run a block of steps each time that it is this job's turn, and write how long a step took, and how much CPU time."""
    for number in range(blocks):
        wait_for(folder / f"{number}-{name}.go")
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps
        write(folder / f"{number}-{name}-{rank}", *seconds)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def write(path: Path, *seconds: float) -> None:
    path.with_suffix(".tmp").write_text(" ".join(map(repr, seconds)))
    path.with_suffix(".tmp").rename(path)


def plain(folder: Path, case: Case, blocks: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net, rows = build(case)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    take_turns(folder, "plain", dist.get_rank(), blocks, case.block, step)
    if case.commit == "copy":
        state = [*model.parameters(), *(value for entry in optimizer.state.values() for value in entry.values())]
        wait_for(folder / "memcpy.go")
        write(folder / f"memcpy-{dist.get_rank()}", time_memcpy([value.detach() for value in state], dist.barrier))
    dist.destroy_process_group()


def time_memcpy(tensors: list[Any], barrier: Callable[[], Any]) -> float:
    """Return the median seconds of one copy of these tensors into kept memory, made by all workers at once."""
    import torch

    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    kept = flat.clone()
    seconds = []
    for _ in range(COPIES):
        barrier()
        start = time.perf_counter()
        kept.copy_(flat)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def elastic(folder: Path, case: Case, blocks: int) -> None:
    import spark_elastic as se

    state, step = prepare(case)

    @se.elastic
    def train(state: Any) -> None:
        take_turns(folder, "elastic", se.rank(), blocks, case.block, step)

    train(state)


def prepare(case: Case) -> tuple[Any, Callable[[], None]]:
    """Return a state, and a step with its commit."""
    import torch

    import spark_elastic as se

    torch.set_num_threads(1)
    net, rows = build(case)
    model = se.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    state = se.TorchState(model=model, optimizer=optimizer, commit=case.commit or "copy")

    def step() -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        if case.commit:
            state.commit()

    return state, step


def time_parts(case: Case, steps: int) -> dict[str, float]:
    """Train with clocks around what this package does in a step; return the microseconds that each part takes."""
    import torch.distributed as dist

    import spark_elastic as se
    from spark_elastic.worker import watched_group
    from spark_elastic.worker.checks import training_code
    from spark_elastic.worker.context import current_world
    from spark_elastic.worker.ddp import wrapper as ddp
    from spark_elastic.worker.state import generators, snapshot

    state, step = prepare(case)
    spent: Counter[str] = Counter()

    def clock(part: str, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[part] += time.perf_counter() - start

        setattr(owner, name, call)

    @se.elastic
    def train(state: Any) -> dict[str, float]:
        world = current_world()
        clock("forward", ddp.DistributedDataParallel, "forward")
        clock("torch's forward", ddp._Inner, "forward")
        clock("reduction", watched_group.WatchedGroup, "allreduce")
        clock("Gloo's reduction", dist.ProcessGroup, "allreduce")
        clock("checks before an optimizer's step", training_code.TrainingChecks, "before_step")
        clock("the whole commit", type(state), "commit")
        clock("state dicts, copy and random numbers", state, "_take")
        clock("copy of the tensors", snapshot.TensorBuffer, "copy_from")
        clock("state of random number generators", generators.Generators, "states")
        clock("start of the control collective", world, "start_exchange")
        clock("answer of the last one", world, "finish_exchange")
        clock("look at the connections", world, "is_broken")
        for number in range(2 * steps):
            if number == steps:
                spent.clear()
            step()
        spent["forward beyond torch's"] = spent.pop("forward") - spent.pop("torch's forward")
        spent["reduction beyond Gloo's"] = spent.pop("reduction") - spent.pop("Gloo's reduction")
        return {part: 1e6 * seconds / steps for part, seconds in spent.items()}

    return train(state)


Seconds = list[tuple[float, float]]


def compare(where: dict[str, Any], case: Case, repeats: int) -> tuple[Seconds, Seconds, float]:
    """Return the seconds of a step of both jobs, plain and elastic, and its CPU time, one pair each repeat; those of a memcpy.

    The first block warms up. The copy is 0 where commits make none.
    """
    import spark_elastic

    blocks = repeats + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--plain", name, "--case", json.dumps(asdict(case)), "--repeats", str(blocks)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen([*torchrun, __file__, *arguments], env=environment):
            job = threading.Thread(
                target=spark_elastic.run,
                args=(elastic, (folder, case, blocks)),
                kwargs={**where, "min_np": WORKERS, "max_np": WORKERS},
            )
            job.start()
            seconds: dict[str, Seconds] = {"plain": [], "elastic": []}
            for number in range(blocks):
                order = ["plain", "elastic"] if number % 2 else ["elastic", "plain"]
                for rival in order:
                    (folder / f"{number}-{rival}.go").touch()
                    seconds[rival].append(_collect(folder, f"{number}-{rival}"))
            job.join()
            (folder / "memcpy.go").touch()
            memcpy = _collect(folder, "memcpy")[0] if case.commit == "copy" else 0.0
    return seconds["plain"][1:], seconds["elastic"][1:], memcpy


def print_parts(where: dict[str, Any], case: Case, repeats: int) -> None:
    import spark_elastic

    steps = repeats * case.block
    ranks = spark_elastic.run(time_parts, (case, steps), **where, min_np=WORKERS, max_np=WORKERS)
    table = Table("part of a step", *(f"rank {rank}" for rank in range(WORKERS)), unit="microseconds")
    for part in ranks[0]:
        table.add(part, *(rank[part] for rank in ranks))
    table.print(f"means of {steps} steps")
    emit("step parts", ranks=ranks)


def _collect(folder: Path, name: str) -> tuple[float, float]:
    """Wait for all ranks' seconds; return the slowest's, and the CPU time of all together."""
    end = time.monotonic() + LIMIT
    found = [folder / f"{name}-{rank}" for rank in range(WORKERS)]
    while not all(path.exists() for path in found):
        if time.monotonic() > end:
            raise TimeoutError(f"no answer from {name}")
        time.sleep(0.005)
    ranks = [list(map(float, path.read_text().split())) for path in found]
    return max(rank[0] for rank in ranks), sum(rank[-1] for rank in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--local", action="store_true", help="start the workers in local processes, without Spark")
    parser.add_argument(
        "--parts", choices=CASES, metavar="CASE", help="print what this package's parts of a step of this case take"
    )
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain(Path(options.plain), Case(**json.loads(options.case)), options.repeats)
        return
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    with nullcontext() if options.local else local_cluster(WORKERS) as spark:
        where = {"local": True} if options.local else {"spark": spark}
        if options.parts:
            print_parts(where, CASES[options.parts], options.repeats)
            return
        columns = ("plain step", "elastic step", "ratio", "ratio of CPU", "memcpy", "to plain + memcpy")
        table = Table("case", *columns, unit="milliseconds")
        results = {}
        for name in options.cases.split(","):
            plain_seconds, elastic_seconds, memcpy = compare(where, CASES[name], options.repeats)
            pairs = list(zip(plain_seconds, elastic_seconds, strict=True))
            ratio, cpu = (summarize([mine[of] / theirs[of] for theirs, mine in pairs]) for of in (0, 1))
            with_copy = summarize([mine[0] / (theirs[0] + memcpy) for theirs, mine in pairs])
            steps = [summarize([1000 * step for step, _ in values]) for values in (plain_seconds, elastic_seconds)]
            table.add(name, *steps, ratio, cpu, f"{1000 * memcpy:.2f}", with_copy)
            results[name] = {
                "plain_ms": steps[0].asdict(),
                "elastic_ms": steps[1].asdict(),
                "ratio": ratio.asdict(),
                "ratio_of_cpu": cpu.asdict(),
                "memcpy_ms": 1000 * memcpy,
                "ratio_to_plain_and_memcpy": with_copy.asdict(),
            }
    table.print()
    emit("steps", **results)


if __name__ == "__main__":
    main()
