"""A training function that reads a mix of datasets; pickled by value, as workers do not have the tests."""

from __future__ import annotations

from typing import Any


def make_mix(urls: list[str]) -> Any:
    """Return a mix of two datasets, of which the rows of the first are a fourth."""
    import spark_elastic as se

    parts = [se.data.ParquetLoader(url, global_batch_size=32, columns=["id"]) for url in urls]
    return se.data.WeightedSamplingLoader(parts, [1, 3], seed=5)


def count_rows_of_a_mix(urls: list[str], rows: int, epochs: int) -> list[float]:
    """Train a weight per row that goes up by one when the row counts; return the weights."""
    import torch

    import spark_elastic as se

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.seen[ids]

    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = se.TorchState(model=model, optimizer=optimizer, loader=make_mix(urls), epoch=0)

    @se.elastic
    def train(state: Any) -> None:
        while state.epoch < epochs:
            for batch in state.loader:
                optimizer.param_groups[0]["lr"] = float(sum(state.loader.batch_rows))
                optimizer.zero_grad()
                (-model(batch["id"]).mean()).backward()
                optimizer.step()
                state.commit()
            state.epoch += 1
            state.loader.set_epoch(state.epoch)
            state.commit()

    train(state)
    seen: list[float] = model.module.seen.detach().tolist()
    return seen
