"""Training as ordinary users write it, with the mistakes that are to be told of."""

from __future__ import annotations

import multiprocessing
import multiprocessing.shared_memory
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import spark_elastic as se


def train_with_values_of_each_rank(steps: int) -> tuple[int, list[list[object]]]:
    """Keep the loss of this rank's own rows in the State, where it is meant to be that of all ranks.

    Return the number of steps, and what all ranks had in their States when the function was entered again.
    """
    entered: list[list[object]] = []
    torch.manual_seed(0)
    model = se.DistributedDataParallel(torch.nn.Linear(2, 1))
    state = se.TorchState(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        step=0,
        best=float("inf"),
        losses=[],
        reduced=0.0,
        local={"mine": 0.0},
    )

    @se.elastic
    def train(state: se.TorchState) -> None:
        if state.step > 0:
            entered.append(se.allgather_object((state.best, state.losses, vars(state).get("only_on_one"))))
        while state.step < steps:
            state.optimizer.zero_grad()
            loss = state.model(torch.randn(4, 2)).square().mean() + se.rank()
            loss.backward()
            state.optimizer.step()
            state.best = min(state.best, loss.item())
            state.losses.append(loss.item())
            state.reduced, state.mine = se.allreduce(loss).item(), loss.item()
            if se.size() == 3 and se.rank() == 2:
                state.only_on_one = torch.ones(2).tolist()
            state.step += 1
            state.commit()

    train(state)
    return state.step, entered


def train_and_swallow_errors_of_a_step(steps: int) -> int:
    """Go on whatever a step raises. Return how many were made."""
    torch.manual_seed(0)
    model = se.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while state.step < steps:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 2)).square().mean()
            try:
                loss.backward()
                optimizer.step()
                state.step += 1
            except Exception:
                print("this step has failed")
            state.commit()

    train(state)
    return state.step


def train_an_epoch_and_swallow_errors_of_a_batch(commit: str) -> int:
    """Go on with the next batch whatever a batch and its commit raise. Return the optimizer's steps."""
    torch.manual_seed(0)
    model = se.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = se.data.ElasticDataLoader(torch.utils.data.TensorDataset(torch.randn(240, 2)), global_batch_size=8)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, commit=commit)

    @se.elastic
    def train(state: se.TorchState) -> int:
        for (x,) in state.loader:
            try:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                state.commit()
            except Exception:
                print("this batch has failed")
        return int(optimizer.state[model.module.weight]["step"])

    return train(state)


def train_and_go_on_after_runtime_errors(steps: int, way: str) -> tuple[int, list[str]]:
    """Go on after what may be too little memory, in a loop of torch collectives. Return the steps and the errors."""
    models = {way: se.DistributedDataParallel(torch.nn.Linear(64, 64)) for way in ("backward", "hook")}
    deep = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    models["several"] = se.DistributedDataParallel(deep, bucket_cap_mb=0.01)
    models["hook"].register_comm_hook(None, fp16_compress_hook)
    models["several"].register_comm_hook(lambda: PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    state, errors = se.ObjectState(step=0, models=models), []

    def meet() -> None:
        if way == "all_reduce":
            dist.all_reduce(torch.ones(1))
        elif way == "async_op":
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert work is not None
            work.wait()
        elif way in models:
            models[way](torch.ones(3, 64)).sum().backward()
        elif way == "scattered":
            dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2 * se.size()))
        elif way == "objects":
            dist.all_gather_object([None] * se.size(), se.rank())
        elif way == "transfer":
            mine, theirs = torch.ones(1), torch.zeros(1)
            sent = dist.isend(mine, (se.rank() + 1) % se.size())
            dist.recv(theirs, (se.rank() - 1) % se.size())
            assert sent is not None
            sent.wait()
        else:
            dist.barrier()

    @se.elastic
    def train(state: se.ObjectState) -> None:
        while state.step < steps:
            try:
                meet()
            except RuntimeError as error:
                errors.append(str(error))
                continue
            state.step += 1
            state.commit()

    train(state)
    return state.step, errors


class NoNumber:
    """What pickles, and cannot be unpickled."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def end_before_training() -> None:
    """End the process of a worker that has no elastic function."""
    os._exit(7)


def end_while_training() -> None:
    """End the process of a worker within the elastic function."""

    @se.elastic
    def train(state: se.ObjectState) -> None:
        state.commit()
        os._exit(7)

    train(se.ObjectState(step=0))


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of a dataset for a loader with workers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2,), float(row)), torch.tensor([float(row**2)])


def train_with_workers_of_a_loader(epochs: int) -> int:
    """Fork the workers of a loader right after each entry of the elastic function. Return the number of steps."""
    model = se.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = se.data.ElasticDataLoader(Squares(), global_batch_size=10, num_workers=2)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0, steps=0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while state.epoch < epochs:
            for features, label in state.loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(features), label).backward()
                optimizer.step()
                state.steps += 1
                state.commit()
            state.epoch += 1
            state.loader.set_epoch(state.epoch)
            state.commit()

    train(state)
    return state.steps


def fork_a_child_that_exits() -> list[int]:
    """Fork a child above the elastic function and one in it, each of which leaves by ``sys.exit``. Return their codes."""
    codes = [_code_of_a_child()]

    @se.elastic
    def train(state: se.ObjectState) -> None:
        codes.append(_code_of_a_child())
        state.commit()

    train(se.ObjectState())
    return codes


def _code_of_a_child() -> int:
    child = os.fork()
    if child == 0:
        sys.exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Unreadable(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        return str({}["message"])


def raise_what_cannot_be_read() -> None:
    """Raise it while training."""

    @se.elastic
    def train(state: se.ObjectState) -> None:
        state.commit()
        raise Unreadable

    train(se.ObjectState())


def leave_a_semaphore_and_shared_memory() -> list[str]:
    """Leave both open, and return the names of their files in /dev/shm."""
    semaphore: Any = multiprocessing.get_context("spawn").Semaphore()
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
    kept.extend([semaphore, memory])
    names = [f"sem.{semaphore._semlock.name.removeprefix('/')}", memory.name]
    assert set(names) <= set(os.listdir("/dev/shm"))
    return names


kept: list[object] = []


# Dtypes that Gloo and NCCL have no collectives for.
ODD_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)


def train_with_odd_tensors(steps: int, commit: str) -> tuple[int, list[list[float]], list[list[float]]]:
    """Keep tensors of unusual dtypes in the State and in models, and predictions that were made in inference mode.

    Return the number of steps, the tensors of unusual dtypes, and predictions, weights and buffers made in inference mode.
    """
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 1)
    with torch.inference_mode():
        frozen = torch.nn.BatchNorm1d(2).eval()
    for each in (network, frozen):
        each.register_buffer("table", torch.ones(3, dtype=torch.int16))
    model = se.DistributedDataParallel(network)
    state = se.TorchState(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        commit=commit,
        step=0,
        frozen=frozen,
        odd=[torch.zeros(2, 2).to(dtype) for dtype in ODD_DTYPES] + [torch.tensor(0, dtype=torch.int16)],
        found=None,
    )

    @torch.inference_mode()
    def evaluate(state: se.TorchState) -> None:
        state.found = state.frozen(torch.full((1, 2), float(state.step)))
        state.step += 1
        state.commit()

    @se.elastic
    def train(state: se.TorchState) -> None:
        while state.step < steps:
            state.optimizer.zero_grad()
            with torch.no_grad():
                inputs = state.frozen(torch.randn(4, 2))
            state.model(inputs).square().mean().backward()
            state.optimizer.step()
            state.odd = [torch.full_like(each, state.step) for each in state.odd]
            if state.step % 3 == 2:
                evaluate(state)
            else:
                state.step += 1
                state.commit()

    train(state)
    odd = [*state.odd, network.table, frozen.table]
    made = [state.found, frozen.weight, frozen.running_mean]
    return state.step, [each.double().flatten().tolist() for each in odd], [each.flatten().tolist() for each in made]


def fail_on_one_rank_ahead_of_each_commit() -> None:
    """Write a file that rank 1 cannot write, after the optimizer's step of the fifth step and of all later ones."""
    model = se.DistributedDataParallel(torch.nn.Linear(1, 1))
    state = se.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), step=0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while True:
            state.optimizer.zero_grad()
            state.model(torch.ones(1, 1)).sum().backward()
            state.optimizer.step()
            state.step += 1
            if state.step >= 5 and se.rank() == 1:
                open("/nowhere/metrics.json", "w")  # noqa: SIM115
            state.commit()

    train(state)
