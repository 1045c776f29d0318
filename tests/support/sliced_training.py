"""Training with commits in slices; pickled by value for executors.

All ranks have the same rows, so that the weights do not depend on the order in which Gloo adds gradients up: DDP cuts them into
other buckets in the first step of a generation than in later ones.
"""

from __future__ import annotations

from typing import Any


def train_in_slices(
    steps: int,
    spoil: bool = False,
    zero: bool = False,
    struck: int | None = None,
    written: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Train; return a digest of weights and moments, and how many commits were received here. All ranks have equal ones.

    ``spoil``: overwrite the weights whenever the world changes, as code may on its way out. ``zero``: divide the state of the
    optimizer. ``struck``: in this step of the first generation rank 1 dies when it has updated its weights and shared none.
    Gradients are views of torch's buckets then.
    ``written``: a folder in which a checkpoint has to be before the tenth step.
    """
    import hashlib
    import os
    import signal
    import time
    from pathlib import Path

    import torch

    import spark_elastic as se
    from spark_elastic.worker.state import gathering

    received = []
    receive = gathering._receive

    def counted(*arguments: Any) -> Any:
        received.append(se.generation())
        return receive(*arguments)

    gathering._receive = counted
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 1))
    model = se.DistributedDataParallel(network, gradient_as_bucket_view=struck is not None)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if zero:

        class Struck(torch.optim.Adam):
            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                if (se.generation(), se.rank(), state.step + 1) == (1, 1, struck):
                    os.kill(os.getpid(), signal.SIGKILL)

        optimizer = se.ZeroRedundancyOptimizer(model.parameters(), Struck, lr=0.01)
    moments, kept = [], []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    state = se.TorchState(model, optimizer, scheduler, step=0, history=[], commit="sharded", **settings)

    @se.elastic
    def train(state: Any) -> None:
        try:
            while state.step < steps:
                rows = torch.Generator().manual_seed(state.step)
                optimizer.zero_grad()
                state.model(torch.randn(8, 6, generator=rows)).square().mean().backward()
                optimizer.step()
                scheduler.step()
                state.step += 1
                state.history.append(state.step)
                state.commit()
                while written and state.step == 9 and not list(Path(written).rglob("manifest.json")):
                    time.sleep(0.01)
            kept.append(sum(value.numel() for entry in optimizer.state.values() for value in entry.values()))
            whole = optimizer.state_dict()["state"]
            moments.extend(value for number in sorted(whole) for value in whole[number].values())
        except BaseException:
            if spoil:
                for parameter in model.parameters():
                    parameter.data.fill_(float("nan"))
            raise

    train(state)
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *moments):
        digest.update(tensor.detach().numpy().tobytes())
    return {
        "history": state.history,
        "digest": digest.hexdigest(),
        "received": received,
        "kept": kept[0] / sum(value.numel() for value in moments),
        "rate": optimizer.param_groups[0]["lr"],
        "size": se.size(),
    }
