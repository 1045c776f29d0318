"""A training on shards in jobs; pickled by value, as workers do not have the tests."""

from __future__ import annotations

from typing import Any


def small_state() -> Any:
    """Return a State with a linear model and one batch of eight rows, in two shards."""
    import torch

    import spark_elastic as se

    model = se.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = se.data.ElasticDataLoader(torch.ones(8, 2), global_batch_size=8, shards=2)
    return se.TorchState(model=model, optimizer=optimizer, loader=loader)


def train_on_shards(
    steps: int,
    url: str | None = None,
    full: dict[int, int] | None = None,
    kills: dict[int, int] | None = None,
    folder: str = "",
    zero: bool = False,
) -> dict[str, Any]:
    """Train a network with convolution, BatchNorm, dropout, Adam and a schedule; return the digest of everything.

    ``full``: after these steps, the size of the world that is waited for. ``kills``: before these steps, in the middle of the
    loop over parts, the rank that dies, once; ``folder`` remembers that. ``zero``: divide the state of the optimizer.
    """
    import hashlib
    import os
    import random
    import signal

    import torch
    from torch import nn

    import spark_elastic as se

    torch.manual_seed(os.getpid())  # the weights are those of the first rank 0, so every layer is set by hand
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(24, 3),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    device = se.device()
    model = se.DistributedDataParallel(net.to(device))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    if zero:
        optimizer = se.ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=1e-2)
    if url is None:
        rows = torch.randn(234, 16, generator=generator), torch.randint(0, 3, (234,), generator=generator)
        dataset = torch.utils.data.TensorDataset(*rows)
        loader: Any = se.data.ElasticDataLoader(dataset, global_batch_size=40, shards=8, seed=3)
    else:
        loader = se.data.ParquetLoader(url, global_batch_size=40, shards=8, seed=3)
    state = se.TorchState(
        model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9), loader=loader,
        step=0, losses=[], commit="sharded" if zero else "copy",
    )  # fmt: skip
    sizes: list[int] = []
    trained: list[Any] = []

    @se.elastic
    def train(state: Any) -> None:
        sizes.append(se.size())
        while state.step < steps:
            for batch in state.loader:
                optimizer.zero_grad()
                scale = 0.5 + random.random()  # drawn between two loops
                parts = state.model.parts(batch)
                for part in parts:
                    x, y = (part["x"], part["y"]) if isinstance(part, dict) else part
                    x, y = x.to(device), y.to(device)
                    loss = nn.functional.cross_entropy(state.model(x * scale), y)
                    loss.backward()
                    parts.note(loss=loss)
                    if (kills or {}).get(state.step) == se.rank() and not os.path.exists(f"{folder}/{state.step}"):
                        open(f"{folder}/{state.step}", "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                state.scheduler.step()
                state.losses.append(parts.means["loss"])
                state.step += 1
                state.commit()
                while se.size() < (full or {}).get(state.step, 0):
                    state.check_host_updates()
                if state.step >= steps:
                    break
            else:
                state.loader.set_epoch(state.loader.epoch + 1)
        trained[:] = [model.state_dict(), optimizer.state_dict()]

    train(state)
    found = hashlib.sha256(repr(state.losses).encode())
    for part in trained:
        for leaf in torch.utils._pytree.tree_leaves(part):
            found.update(leaf.cpu().numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return {"digest": found.hexdigest(), "sizes": sizes, "losses": state.losses}
