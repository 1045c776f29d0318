"""Training functions of the tests on a GPU, which the CPU can play; pickled by value."""

from __future__ import annotations

from typing import Any


def count_steps(
    steps: int,
    commit: str = "copy",
    seconds: float = 0.0,
    busy: int = 0,
    scaled: bool = False,
    compiler: str = "",
    moves_late: bool = False,
) -> dict[str, Any]:
    """Train a parameter that goes up by exactly one a step beside a small network, and return what has come of both.

    busy: cycles that a GPU spends ahead of each commit's copy, which is therefore pending for as long. scaled: train in mixed
    precision, with a scale of the gradients. compiler: the compiler of ``torch.compile`` to use; none if empty. moves_late: move
    the network to the device only in the elastic function, when it has been wrapped and committed.
    """
    import hashlib
    import os
    import time

    import torch

    import spark_elastic as se

    device = se.device()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter = torch.nn.Parameter(torch.zeros(1))
            self.body = torch.nn.Sequential(
                torch.nn.Linear(8, 64), torch.nn.LayerNorm(64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).mean() * 0.001 - self.counter

    torch.manual_seed(1000 + os.getpid())  # every worker starts with other weights; rank 0's count
    net = Net() if moves_late else Net().to(device)
    model = se.DistributedDataParallel(net)
    called: Any = torch.compile(model, backend=compiler) if compiler else model
    optimizer = torch.optim.SGD(
        [{"params": [net.counter], "lr": 1.0}, {"params": net.body.parameters(), "lr": 1e-3, "momentum": 0.9}]
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=7, enabled=scaled)
    state = se.TorchState(model=model, optimizer=optimizer, scaler=scaler, step=0, history=[], commit=commit)
    entries: list[tuple[int, int]] = []

    @se.elastic
    def train(state: Any) -> None:
        entries.append((se.generation(), se.size()))
        net.to(device)
        while state.step < steps:
            generator = torch.Generator().manual_seed(state.step * 64 + se.rank())
            x = torch.randn(16, 8, generator=generator).to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=scaled):
                loss = called(x).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            state.step += 1
            state.history.append(state.step)
            if busy and device.type == "cuda":
                torch.cuda._sleep(busy)
            if seconds:
                time.sleep(seconds)
            state.commit()

    train(state)
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return {
        "rank": se.rank(),
        "size": se.size(),
        "device": str(net.counter.device),
        "backend": torch.distributed.get_backend(),
        "history": state.history,
        "counter": net.counter.item(),
        "scale": scaler.get_scale() if scaled else 1.0,
        "digest": digest.hexdigest(),
        "entries": entries,
        "pid": os.getpid(),
    }


def look_at_the_device() -> dict[str, Any]:
    """Return what a worker sees of the GPUs of its machine."""
    import os

    import torch

    import spark_elastic as se

    outside = str(se.device())
    return {
        "device": outside,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "count": torch.cuda.device_count(),
        "sum": torch.ones(3, device=se.device()).sum().item(),
    }


def draw(steps: int, fatal: int) -> list[tuple[int, float]]:
    """Draw a random number on the device in each step; return all that have been drawn, also in steps that came to nothing.

    In the first world, rank 1 ends at the step ``fatal``, when rank 0 has drawn its number and waits for the reduction.
    """
    import os
    import signal

    import torch

    import spark_elastic as se

    device = se.device()
    drawn: list[tuple[int, float]] = []
    state = se.TorchState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        while state.step < steps:
            number = torch.rand(1, device=device)
            drawn.append((state.step, number.item()))
            if state.step == fatal and se.generation() == 1 and se.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            se.allreduce(number)
            state.step += 1
            state.commit()

    train(state)
    return drawn


def replay_a_graph(steps: int) -> dict[str, Any]:
    """Train, and run a CUDA graph of the network's forward after each step; it was captured once, before the first world."""
    import torch

    import spark_elastic as se

    device = se.device()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    rows = torch.randn(4, 8, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        net(rows)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        replayed = net(rows)
    model = se.DistributedDataParallel(net)
    state = se.TorchState(model=model, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), step=0, differences=[])

    @se.elastic
    def train(state: Any) -> None:
        while state.step < steps:
            state.optimizer.zero_grad()
            model(torch.randn(4, 8, device=device)).square().mean().backward()
            state.optimizer.step()
            graph.replay()
            with torch.no_grad():
                state.differences.append((replayed - net(rows)).abs().max().item())
            state.step += 1
            state.commit()

    train(state)
    return {"step": state.step, "worst": max(state.differences), "generation": se.generation()}


def run_out_of_memory(rank: int | None, step: int) -> None:
    """Ask for more memory than any device has, on one rank, or on all if it is None."""
    import torch

    import spark_elastic as se

    state = se.TorchState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        while state.step < 100:
            if state.step == step and rank in (None, se.rank()):
                torch.empty(2**55, dtype=torch.uint8, device=se.device())
            se.allreduce(torch.ones(1, device=se.device()))
            state.step += 1
            state.commit()

    train(state)


def train_as_an_estimator(plan: Any) -> Any:
    """Train as the workers of a fit do."""
    from spark_elastic.estimator.training import train

    return train(plan)


def meet() -> dict[str, Any]:
    """Return what collectives make of a number on the device, which is the rank."""
    import torch
    import torch.distributed as dist

    import spark_elastic as se

    found: dict[str, Any] = {}

    @se.elastic
    def train(state: Any) -> None:
        device, rank, size = se.device(), se.rank(), se.size()
        mine = torch.full((4,), float(rank), device=device)
        results = {
            "mean": se.allreduce(mine),
            "sum": se.allreduce(mine, op="sum"),
        }
        sent = mine.clone()
        dist.broadcast(sent, size - 1)
        results["broadcast"] = sent
        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine)
        reduced = mine.clone()
        work = dist.all_reduce(reduced, async_op=True)
        work.wait()
        norm = torch.nn.BatchNorm1d(4).to(device)
        if size > 1 and device.type == "cuda":
            norm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(norm)
        normalized = norm(torch.full((3, 4), float(rank), device=device))
        found.update({name: float(value[0]) for name, value in results.items()})
        found["devices"] = {value.device.type for value in (*results.values(), *gathered, reduced, normalized)}
        found["gathered"] = [float(value[0]) for value in gathered]
        found["objects"] = se.allgather_object(rank)
        found["reduced"] = float(reduced[0])
        found["normalized"] = float(se.allreduce(normalized.detach(), op="sum")[0, 0])
        found["rank"] = rank
        dist.barrier()
        se.barrier()

    train(se.TorchState())
    return found


def reduce_large_gradients(steps: int, aside: bool) -> dict[str, int]:
    """Return in how many steps a gradient was not the mean of the ranks' when ``backward`` had returned.

    aside: on a stream of one's own, and not the default one.
    """
    import contextlib

    import torch

    import spark_elastic as se

    device = se.device()
    weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4_000_000, device=device)) for _ in range(6))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            total = factor.new_zeros(())
            for weight in self.weights:
                total = total + (weight * factor).sum()
            return total

    model = se.DistributedDataParallel(Net())
    state = se.TorchState(model=model, step=0, wrong=0)
    stream: Any = (
        torch.cuda.stream(torch.cuda.Stream()) if aside and device.type == "cuda" else contextlib.nullcontext()
    )

    @se.elastic
    def train(state: Any) -> None:
        while state.step < steps:
            with stream:
                model.zero_grad(set_to_none=True)
                model(torch.full((1,), float((se.rank() + 1) * (state.step + 1)), device=device)).backward()
                mean = (state.step + 1) * sum(range(1, se.size() + 1)) / se.size()
                wrong = torch.stack([weight.grad.ne(mean).any() for weight in weights]).any()
            state.wrong += int(wrong)
            state.step += 1
            state.commit()

    train(state)
    return {"wrong": state.wrong}
