"""Training with commits in slices, on the worker's device; pickled by value for executors.

All ranks have the same rows, and each steps with its own gradients in place of their mean, so that the weights depend neither on
the order in which Gloo adds gradients up (DDP cuts them into other buckets in the first step of a generation than in later ones)
nor on the size of the world.
"""

from __future__ import annotations

from typing import Any


def train_in_slices(
    steps: int,
    spoil: bool = False,
    zero: bool = False,
    struck: int | None = None,
    written: str = "",
    commit: str = "sharded",
    whole: int | None = None,
    pair: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train; return a digest of weights and moments, and how many commits were received here. All ranks have equal ones.

    ``spoil``: overwrite the weights whenever the world changes, as code may on its way out. ``zero``: divide the state of the
    optimizer. ``struck``: in this step of the first generation rank 1 dies when it has updated its weights and shared none.
    Gradients are views of torch's buckets then.
    ``pair``: ahead of the commit of this step of the first generation ranks 1 and 2 die at once, by the hand of rank 1.
    ``whole``: ahead of this step ranks wait until there are four of them.
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
    device = se.device()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 1))
    model = se.DistributedDataParallel(network.to(device), gradient_as_bucket_view=struck is not None)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is flat] for flat in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    optimizer: torch.optim.Optimizer = torch.optim.Adam(groups, lr=0.01)
    if zero:

        class Struck(torch.optim.Adam):
            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                if (se.generation(), se.rank(), state.step + 1) == (1, 1, struck):
                    os.kill(os.getpid(), signal.SIGKILL)

        optimizer = se.ZeroRedundancyOptimizer(groups, Struck, lr=0.01)
    moments, kept = [], []
    own: dict[torch.Tensor, torch.Tensor] = {}
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient, of=parameter: own.__setitem__(of, gradient.clone()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    scaler = torch.amp.GradScaler(device.type, init_scale=16.0, growth_interval=5)
    state = se.TorchState(model, optimizer, scheduler, scaler=scaler, step=0, history=[], commit=commit, **settings)

    @se.elastic
    def train(state: Any) -> None:
        try:
            processes = se.allgather_object(os.getpid())
            while state.step < steps:
                while state.step == whole and se.size() < 4:
                    state.check_host_updates()
                rows = torch.Generator().manual_seed(state.step)
                optimizer.zero_grad()
                loss = state.model(torch.randn(8, 6, generator=rows).to(device)).square().mean()
                # One step is skipped, because its gradients are infinite.
                scaler.scale(loss * (float("inf") if state.step == 12 else 1.0)).backward()
                for parameter, gradient in own.items():
                    parameter.grad.copy_(gradient)
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                state.step += 1
                state.history.append(state.step)
                if (se.generation(), se.rank(), state.step) == (1, 1, pair):
                    os.kill(processes[2], signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                state.commit()
                while written and state.step == 9 and not list(Path(written).rglob("manifest.json")):
                    time.sleep(0.01)
            kept.append(sum(value.numel() for entry in optimizer.state.values() for value in entry.values()))
            gathered = optimizer.state_dict()["state"]
            moments.extend(value for number in sorted(gathered) for value in gathered[number].values())
        except BaseException:
            if spoil:
                for parameter in model.parameters():
                    parameter.data.fill_(float("nan"))
            raise

    train(state)
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *moments):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return {
        "history": state.history,
        "digest": digest.hexdigest(),
        "received": received,
        "kept": kept[0] / sum(value.numel() for value in moments),
        "rate": optimizer.param_groups[0]["lr"],
        "size": se.size(),
    }


def replace_optimizer(zero: bool, commit: str) -> float:
    """Train two models with an optimizer each, one of which is made again after four steps; return the sum of its weights."""
    import torch

    import spark_elastic as se

    def optimizer_of(model: Any) -> torch.optim.Optimizer:
        if zero:
            return se.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
        return torch.optim.Adam(model.parameters(), lr=0.05)

    torch.manual_seed(0)
    first, second = (se.DistributedDataParallel(torch.nn.Linear(4, 4).double()) for _ in range(2))
    rows = torch.randn(12, 20, 4, dtype=torch.float64)
    state = se.TorchState(
        first=first, second=second, one=optimizer_of(first), other=optimizer_of(second), step=0, commit=commit
    )

    @se.elastic
    def train(state: Any) -> None:
        while state.step < len(rows):
            if state.step == 4:
                state.other = optimizer_of(second)
            batch = rows[state.step]
            state.one.zero_grad()
            state.other.zero_grad()
            (second(torch.tanh(first(batch))) - batch).square().mean().backward()
            state.one.step()
            state.other.step()
            state.step += 1
            state.commit()

    train(state)
    return float(second.module.weight.sum())


def train_only_the_head_in_the_end(commit: str, lost: int | None) -> tuple[float, int]:
    """Train a network, and from the fifth step on its head alone, with an optimizer of its own; return its sum and the entries.

    lost: an even rank that dies in the commit of the fifth step, for which odd ones wait ahead of their step.
    """
    import os
    import time

    import torch

    import spark_elastic as se

    torch.manual_seed(0)
    body, head = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 1).double()
    model = se.DistributedDataParallel(torch.nn.Sequential(body, head))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = se.TorchState(model=model, optimizer=optimizer, step=0, is_late=False, commit=commit)
    rows = torch.randn(10, 20, 4, dtype=torch.float64)
    entries = 0

    @se.elastic
    def train(state: Any) -> None:
        nonlocal entries
        entries += 1
        processes = se.allgather_object(os.getpid())
        while state.step < len(rows):
            if state.step == 4 and not state.is_late:
                body.requires_grad_(False)
                state.optimizer, state.is_late = torch.optim.Adam(head.parameters(), lr=0.05), True
            batch = rows[state.step]
            state.optimizer.zero_grad()
            (model(batch).squeeze(1) - batch.sum(1)).square().mean().backward()
            if (se.generation(), state.step) == (1, 4) and lost is not None and se.rank() % 2:
                while os.path.exists(f"/proc/{processes[lost]}"):
                    time.sleep(0.01)
            state.optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    return sum(float(parameter.detach().sum()) for parameter in model.parameters()), entries
