"""The training function of chaos jobs; pickled by value. Each worker keeps a record of its own, a file of JSON lines."""

from __future__ import annotations

from typing import Any


def train_rows(url: str, rows: int, folder: str) -> dict[str, Any]:
    """Count every row of every epoch in a weight of its own, until the file ``stop`` is there at the end of an epoch."""
    import hashlib
    import json
    import os
    import time

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
    loader = se.data.ParquetLoader(url, global_batch_size=24, shuffle=True, seed=0)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0, step=0, done=False)
    record = open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a", buffering=1)  # noqa: SIM115

    def note(kind: str, **fields: Any) -> None:
        digest = hashlib.sha1(model.module.seen.detach().numpy().tobytes()).hexdigest()[:12]
        place = {"generation": se.generation(), "rank": se.rank(), "size": se.size(), "digest": digest}
        record.write(json.dumps({"kind": kind, **place, **fields}) + "\n")

    @se.elastic
    def train(state: Any) -> None:
        note("entered", step=state.step)
        while not state.done:
            for batch in state.loader:
                mine = batch["id"].tolist() if state.loader.batch_rows[se.rank()] else []
                note("tried", step=state.step + 1, rows=mine)
                # The gradient of a row is -1 over the rows of the global batch; the learning rate takes that back.
                optimizer.param_groups[0]["lr"] = float(sum(state.loader.batch_rows))
                optimizer.zero_grad()
                (-state.model(batch["id"]).mean()).backward()
                optimizer.step()
                time.sleep(0.02)
                state.step += 1
                state.commit()
                note("committed", step=state.step)
            stopping = torch.tensor(float(os.path.exists(os.path.join(folder, "stop"))))
            state.done = bool(se.allreduce(stopping, op="max"))
            state.epoch += 1
            if not state.done:
                state.loader.set_epoch(state.epoch)
            state.commit()

    train(state)
    return {
        "rank": se.rank(),
        "generation": se.generation(),
        "epochs": state.epoch,
        "step": state.step,
        "seen": model.module.seen.detach().tolist(),
    }
