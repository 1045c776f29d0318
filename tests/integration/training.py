"""Training functions for the tests; pickled by value, as executors do not have the tests.

``count_steps`` has a parameter that goes up by exactly one a step, and keeps the steps it committed in its state: what is
lost or counted twice shows in both.
"""

from __future__ import annotations

from typing import Any


def count_steps(steps: int, seconds: float = 0.0, loader_workers: int = 0, hidden: int = 64) -> dict[str, Any]:
    import hashlib
    import os
    import time

    import torch

    import spark_elastic as se

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter = torch.nn.Parameter(torch.zeros(1))
            self.body = torch.nn.Sequential(torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) - self.counter

    torch.manual_seed(1000 + os.getpid())  # every worker starts with other weights; rank 0's count
    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(
        [
            {"params": [model.module.counter], "lr": 1.0},
            {"params": model.module.body.parameters(), "lr": 1e-3, "momentum": 0.9},
        ]
    )
    state = se.TorchState(model=model, optimizer=optimizer, step=0, history=[])
    resets: list[tuple[int, int]] = []
    entries: list[tuple[int, int]] = []
    state.register_reset_callbacks([lambda old, new: resets.append((old, new))])
    feed = torch.utils.data.DataLoader(range(10**9), num_workers=loader_workers) if loader_workers else None

    @se.elastic
    def train(state: Any) -> str:
        entries.append((se.generation(), se.size()))
        rows = iter(feed) if feed is not None else None
        while state.step < steps:
            if rows is not None:
                next(rows)
            generator = torch.Generator().manual_seed(state.step * 64 + se.rank())
            x = torch.randn(16, 8, generator=generator)
            optimizer.zero_grad()
            # d(loss)/d(counter) is exactly -1 on every rank; the body gets a gradient of its own.
            loss = state.model(x).mean() + model.module.body(x).square().mean() * 0
            loss.backward()
            optimizer.step()
            state.step += 1
            state.history.append(state.step)
            if seconds:
                time.sleep(seconds)
            state.commit()
        return "done"

    value = train(state)
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return {
        "rank": se.rank(),
        "size": se.size(),
        "generation": se.generation(),
        "pid": os.getpid(),
        "value": value,
        "history": state.history,
        "counter": float(model.module.counter),
        "digest": digest.hexdigest(),
        "resets": resets,
        "entries": entries,
    }


def plain(value: Any) -> Any:
    return value
