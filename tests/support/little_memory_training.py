"""Training a transformer whose parameters, gradients and moments exceed what a worker may take.

Worlds of one size compute losses of the same bits, whichever workers they are of; others differ by the order of additions.
"""

from __future__ import annotations

from typing import Any

TOKENS, CONTEXT = 64, 4
ROWS = 20  # which four workers divide evenly, and five


def train_in_little_memory(
    way: str,
    steps: int,
    width: int,
    blocks: int,
    limit: float | None = None,
    folder: str = "",
    victim: int | None = None,
    last: int = 0,
) -> dict[str, Any]:
    """Train with Adam: parameters, gradients and moments are four times the parameters' bytes, P.

    ``way``: the model is "divided" by a ShardedState, "whole" in a TorchState, or trained "alone", without any State. ``limit``:
    how many P of memory the process may take beyond what it has once all is imported. The kernel counts all that is private
    and can be written to, stacks of threads included (``RLIMIT_DATA``). ``folder``: where a divided training is written after
    every other step, and goes on from what an earlier job has written. ``victim``: a process that rank 0 kills in step ``last``.

    Returns the losses, and how many P of resident memory this rank has taken at most.
    """
    import os
    import resource
    import signal
    from pathlib import Path

    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    import spark_elastic as se

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(TOKENS, width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(blocks)
            )
            self.out = nn.Linear(width, TOKENS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            result: torch.Tensor = self.out(x.flatten(0, 1))
            return result

    def build() -> nn.Module:
        with torch.device("meta"):
            return Transformer()

    def shard(model: Any, mesh: Any) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    def bytes_of(name: str) -> int:
        """Return what the kernel says of this process's memory under a name."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int = 0, size: int = 1
    ) -> torch.Tensor:
        start = torch.randint(TOKENS, (ROWS, 1), generator=torch.Generator().manual_seed(number))
        rows = (start + 3 * torch.arange(CONTEXT + 1)) % TOKENS
        mine = rows[rank::size]
        loss: torch.Tensor = nn.functional.cross_entropy(model(mine[:, :-1]), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = nn.Linear(1, 1)  # the first step of a process imports what later ones need
    first(torch.ones(1, 1)).sum().backward()
    adam(first.parameters()).step()
    unit = sum(parameter.nbytes for parameter in build().parameters())
    before = bytes_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak of VmRSS, starts over
    if limit is not None:
        most = bytes_of("VmData") + int(limit * unit)
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    torch.manual_seed(0)
    if way == "alone":
        model = Transformer()
        optimizer = adam(model.parameters())
        return {"losses": [float(step(model, optimizer, number)) for number in range(steps)]}
    if way == "whole":
        model = Transformer()
        wrapped = se.DistributedDataParallel(model)
        state: Any = se.TorchState(model=wrapped, optimizer=adam(model.parameters()), step=0, losses=[])
    else:
        state = se.ShardedState(build=build, shard=shard, optimizer=adam, step=0, losses=[])

    def content() -> dict[str, Any]:
        model, moments = get_state_dict(state.model, state.optimizer)
        return {"model": model, "optimizer": moments, "step": state.step}

    @se.elastic
    def train(state: Any) -> None:
        written = sorted(Path(folder).glob("step-*/.metadata")) if folder else []
        if state.step == 0 and written:
            kept = content()
            dcp.load(kept, checkpoint_id=str(written[-1].parent))
            set_state_dict(
                state.model, state.optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"]
            )
            state.step = kept["step"]
        while state.step < steps:
            loss = step(state.model, state.optimizer, state.step, se.rank(), se.size())
            state.losses.append(float(se.allreduce(loss)))
            state.step += 1
            if victim is not None and state.step == last:
                if se.rank() == 0:
                    os.kill(victim, signal.SIGKILL)
                signal.pause()  # until this worker ends with its driver
            if folder and state.step % 2 == 0:
                dcp.save(content(), checkpoint_id=f"{folder}/step-{state.step:03}")
            state.commit()

    train(state)
    return {"losses": state.losses, "peak": (bytes_of("VmHWM") - before) / unit}


if __name__ == "__main__":  # a driver of four workers, which kill it in step LAST: STEPS WIDTH BLOCKS LIMIT FOLDER LAST
    import json
    import os
    import sys

    import spark_elastic

    *given, last = map(json.loads, sys.argv[1:])
    arguments = ("divided", *given, os.getpid(), last)
    spark_elastic.run(train_in_little_memory, arguments, local=True, num_proc=4, min_np=4)
