"""Commits: what ``commit()`` itself costs for large states, against one memcpy of the state.

    python benchmarks/commit.py [--repeats 9] [--sizes 25,100]

One process, millions of parameters with Adam, outside a job: the collective of a commit is not in these figures (see steps.py).
Then networks of many small layers, of which a commit has more to find than to copy. Prints two tables and a line of JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from report import Summary, Table, emit, summarize

from spark_elastic import TorchState

MILLION = 1_000_000
# Square layers with a bias: how many, how wide.
DEEP = {"2 layers, 1 MB": (2, 360), "150 layers": (150, 4)}


def make(layers: int, width: int, bias: bool, commit: str) -> tuple[TorchState, Callable[[], None]]:
    """Build a state of square layers and an Adam, and the step that changes it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=bias) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    state = TorchState(model=model, optimizer=optimizer, commit=commit)
    state._begin(None)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return state, optimizer.step


def measure(millions: int, commit: str, repeats: int) -> Summary:
    state, step = make(10, int((millions * MILLION / 10) ** 0.5), False, commit)
    times = []
    for _ in range(repeats + 2):  # both buffers are made by the first two
        step()
        start = time.perf_counter()
        state.commit()
        times.append(time.perf_counter() - start)
    return summarize([1000 * seconds for seconds in times[2:]])


def memcpy(millions: int, repeats: int) -> Summary:
    """One copy of parameters and both moments between tensors that have been touched."""
    source, target = torch.ones(3 * millions * MILLION), torch.zeros(3 * millions * MILLION)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return summarize([1000 * seconds for seconds in times])


def measure_deep(layers: int, width: int, repeats: int) -> tuple[Summary, Summary]:
    """The CPU time of a commit with copies, and of the copy alone, in microseconds; of means of a hundred each."""
    state, step = make(layers, width, True, "copy")
    step()
    live = [value.detach() for value in state.model.parameters()]
    live += [value for entry in state.optimizer.state.values() for value in entry.values()]
    kept = [value.clone() for value in live]
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for times, call in zip(found, (state.commit, lambda: torch._foreach_copy_(kept, live)), strict=True):
            start = time.process_time()
            for _ in range(100):
                call()
            times.append(1e4 * (time.process_time() - start))
    commit, copy = (summarize(times[1:]) for times in found)
    return commit, copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sizes", default="25,100", help="millions of parameters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("parameters", "memcpy", "copy", "in place", "copy / memcpy", unit="milliseconds")
    results: dict[str, Any] = {}
    for millions in map(int, options.sizes.split(",")):
        plain = memcpy(millions, options.repeats)
        copy, in_place = (measure(millions, commit, options.repeats) for commit in ("copy", "in_place"))
        table.add(f"{millions} M", plain, copy, in_place, copy.median / plain.median)
        results[str(millions)] = {"memcpy": plain.asdict(), "copy": copy.asdict(), "in_place": in_place.asdict()}
    table.print()
    table = Table("network with Adam", "commit", "its copy alone", unit="microseconds of CPU")
    for name, (layers, width) in DEEP.items():
        commit, copied = measure_deep(layers, width, options.repeats)
        table.add(name, commit, copied)
        results[name] = {"commit": commit.asdict(), "copy": copied.asdict()}
    table.print()
    emit("commit", **results)


if __name__ == "__main__":
    main()
