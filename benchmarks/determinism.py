"""Determinism: the CPU time of a step on shards against a step of plain DDP on the same rows.

    python benchmarks/determinism.py [--workers 1,2,4] [--cases small,large] [--steps 30] [--shards 8]

All workers take the same batches in turns: by torch's own DistributedDataParallel at once (``plain``), by the same wrapper
shard by shard, with gradients reduced once (``micro``), and by ``model.parts`` (``parts``). ``small`` is a model of 1 MB,
``large`` one of 100 MB; a shard has 64 rows. Workers are local processes with one thread each. Prints the ratios of the CPU time
of all workers together, in one run: of ``micro`` and ``parts`` to ``plain``, and of ``parts`` to ``micro``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import cloudpickle
from report import Table, emit, summarize

import spark_elastic

ROWS = 64
CASES = {"small": (512, 1), "large": (2500, 4)}


def measure(side: int, layers: int, shards: int, steps: int) -> dict[str, list[float]]:
    """Take steps in turns, and return the CPU time of each step on this rank, by mode."""
    import time
    from contextlib import nullcontext

    import torch
    from torch import nn

    import spark_elastic as se

    torch.set_num_threads(1)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(side, side), nn.ReLU())))

    model = se.DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(2 * shards * ROWS, side)
    loader = se.data.ElasticDataLoader(data, global_batch_size=shards * ROWS, shards=shards)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0)
    spent: dict[str, list[float]] = {"plain": [], "micro": [], "parts": []}

    @se.elastic
    def train(state: Any) -> None:
        wrapped = {}
        for mode in ("plain", "micro"):
            module = build()
            wrapped[mode] = nn.parallel.DistributedDataParallel(module) if se.size() > 1 else module
        optimizers = {mode: torch.optim.SGD(each.parameters(), lr=1e-3) for mode, each in wrapped.items()}

        def plain(batch: Any) -> None:
            optimizers["plain"].zero_grad()
            wrapped["plain"](whole).square().mean().backward()
            optimizers["plain"].step()

        def micro(batch: Any) -> None:
            optimizers["micro"].zero_grad()
            for number, part in enumerate(batch):
                waits = se.size() > 1 and number < len(batch) - 1
                with wrapped["micro"].no_sync() if waits else nullcontext():
                    (wrapped["micro"](part).square().mean() / len(batch)).backward()
            optimizers["micro"].step()

        def parts(batch: Any) -> None:
            optimizer.zero_grad()
            for part in model.parts(batch):
                model(part).square().mean().backward()
            optimizer.step()

        while len(spent["parts"]) <= steps:
            for batch in state.loader:
                whole = torch.cat(batch)
                for mode, step in (("plain", plain), ("micro", micro), ("parts", parts)):
                    se.barrier()
                    start = time.process_time()
                    step(batch)
                    spent[mode].append(time.process_time() - start)
                state.commit()
            state.epoch += 1
            state.loader.set_epoch(state.epoch)

    train(state)
    return spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--cases", default="small,large")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--shards", type=int, default=8)
    options = parser.parse_args()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    table = Table(
        "model", "workers", "plain, ms of CPU", "micro / plain", "parts / plain", "parts / micro", unit="ratio"
    )
    found = []
    for case in options.cases.split(","):
        for workers in map(int, options.workers.split(",")):
            results = spark_elastic.run(
                measure, args=(*CASES[case], options.shards, options.steps), num_proc=workers, min_np=workers,
                max_np=workers, local=True, progress=False,
            )  # fmt: skip
            # The first step makes buckets and buffers.
            cpu = {
                mode: [sum(step) for step in zip(*(each[mode] for each in results), strict=True)][1:]
                for mode in results[0]
            }
            ratios = {
                f"{one} / {other}": summarize([a / b for a, b in zip(cpu[one], cpu[other], strict=True)])
                for one, other in (("micro", "plain"), ("parts", "plain"), ("parts", "micro"))
            }
            table.add(case, workers, 1000 * statistics.median(cpu["plain"]), *map(str, ratios.values()))
            found.append({"case": case, "workers": workers, **{name: of.asdict() for name, of in ratios.items()}})
    table.print()
    emit(Path(__file__).stem, cases=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
