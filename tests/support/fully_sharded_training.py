"""Training a model that is divided among ranks; pickled by value for workers.

The loss is a mean over the rows of a global batch, which sizes 1 to 4 divide evenly, so it depends on the size of the world only
by the order in which gradients are added up.
"""

from __future__ import annotations

from typing import Any

ROWS = 12


def train_fully_sharded(
    steps: int,
    on_meta: bool = True,
    optimizer: str = "AdamW",
    whole: int | None = None,
    last: int = 1,
    pair: int | None = None,
    struck: int | None = None,
    saved: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Train; return the losses of all steps, and whether each generation began with the weights and moments of its commit.

    ``whole``: ahead of this step ranks wait until there are four of them. ``last``: ahead of the last step they wait for this
    generation. ``pair``: ahead of the commit of this step of the first generation ranks 1 and 2 die at once, by the hand of rank
    1. ``saved``: a folder with the checkpoint of an earlier job, which
    ``torch.distributed.checkpoint`` has written, from which this one goes on; if there is none, this job writes one at its end.
    ``struck``: at this step of the first generation rank 1 dies while the others write another one.
    """
    import os
    import signal

    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    import spark_elastic as se

    device = se.device()

    def build() -> nn.Module:
        with torch.device("meta" if on_meta else device):
            # 33 rows divide evenly among no more than 3 ranks, and of 3 rows a fourth rank gets none.
            blocks = [nn.Sequential(nn.Linear(33, 33, dtype=torch.double), nn.Tanh()) for _ in range(3)]
            return nn.Sequential(*blocks, nn.BatchNorm1d(33, dtype=torch.double), nn.Linear(33, 3, dtype=torch.double))

    def shard(model: Any, mesh: Any) -> None:
        for block in model[:3]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, optimizer)
        matrices, vectors = ([p for p in parameters if (p.dim() > 1) is flat] for flat in (True, False))
        return kind([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=0.01)  # type: ignore[no-any-return]

    def digest() -> str:
        """Name the bits of all weights and moments by their sum, each times its place, whoever has them."""
        total, steps = torch.zeros((), dtype=torch.int64, device=device), set()
        for number, parameter in enumerate(state.model.parameters()):
            kept = state.optimizer.state.get(parameter, {})
            steps.add(float(kept.get("step", 0)))
            for value in (parameter, *(value for value in kept.values() if isinstance(value, DTensor))):
                mine = value.to_local().detach().flatten().view(torch.int64)
                first = se.rank() * -(-len(value) // se.size()) * value[0].numel()
                total += (mine * (torch.arange(first, first + len(mine), device=device) + 10_000 * number + 1)).sum()
        torch.distributed.all_reduce(total)
        return f"{int(total)} after {steps}"

    def save(folder: str) -> None:
        model, moments = get_state_dict(state.model, state.optimizer)
        dcp.save({"model": model, "optimizer": moments, "step": state.step}, checkpoint_id=folder)

    torch.manual_seed(0)
    state = se.ShardedState(
        build=build,
        shard=shard,
        optimizer=make,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
        scaler=torch.amp.GradScaler(device.type),
        step=0,
        losses=[],
        digest="",
        equal=[],
        sizes=[],
        **settings,
    )

    @se.elastic
    def train(state: Any) -> None:
        if state.digest:
            state.equal.append(digest() == state.digest)
        state.sizes.append(se.size())
        processes = se.allgather_object(os.getpid())
        if saved and state.step == 0 and os.path.exists(saved):
            model, moments = get_state_dict(state.model, state.optimizer)
            kept = {"model": model, "optimizer": moments, "step": 0}
            dcp.load(kept, checkpoint_id=saved)
            set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=moments)
            state.step = state.scheduler.last_epoch = kept["step"]
        while state.step < steps:
            while state.step == whole and se.size() < 4:
                state.check_host_updates()
            while state.step == steps - 1 and se.generation() < last:
                state.check_host_updates()
            rows = torch.randn(ROWS, 33, generator=torch.Generator().manual_seed(state.step), dtype=torch.double)
            mine = rows[se.rank() :: se.size()].to(device)
            state.optimizer.zero_grad()
            loss = (state.model.eval()(mine) - mine[:, :3]).square().mean()
            state.scaler.scale(loss).backward()
            state.scaler.unscale_(state.optimizer)
            nn.utils.clip_grad_norm_(state.model.parameters(), 0.5)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.scheduler.step()
            state.losses.append(float(se.allreduce(loss)))
            state.step += 1
            state.digest = digest()
            now = se.generation(), se.rank(), state.step
            if now == (1, 1, pair):
                os.kill(processes[2], signal.SIGKILL)
            if now in ((1, 1, pair), (1, 1, struck)):
                os.kill(os.getpid(), signal.SIGKILL)
            if now == (1, se.rank(), struck):
                save(f"{saved}-broken")
            state.commit()
        if saved and not os.path.exists(saved):
            se.barrier()
            save(saved)

    train(state)
    return {
        "losses": state.losses,
        "equal": state.equal,
        "sizes": state.sizes,
        "digest": state.digest,
        "rate": state.optimizer.param_groups[0]["lr"],
    }
