"""Training with commits in slices; pickled by value for executors.

All ranks have the same rows, so that the weights do not depend on the order in which Gloo adds gradients up: DDP cuts them into
other buckets in the first step of a generation than in later ones.
"""

from __future__ import annotations

from typing import Any


def train_in_slices(steps: int, spoil: bool = False, **settings: Any) -> dict[str, Any]:
    """Train; return a digest of weights and moments, and how many commits were received here. All ranks have equal ones.

    ``spoil``: overwrite the weights whenever the world changes, as code may on its way out.
    """
    import hashlib

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
    model = se.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
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
        except BaseException:
            if spoil:
                for parameter in model.parameters():
                    parameter.data.fill_(float("nan"))
            raise

    train(state)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            digest.update(tensor.detach().numpy().tobytes())
    return {
        "history": state.history,
        "digest": digest.hexdigest(),
        "received": received,
        "rate": optimizer.param_groups[0]["lr"],
        "size": se.size(),
    }
