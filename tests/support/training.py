"""Training functions for the tests; pickled by value, as executors do not have the tests.

``count_steps`` has a parameter that goes up by exactly one a step, and keeps the steps it committed in its state: what is
lost or counted twice shows in both.
"""

from __future__ import annotations

from typing import Any

# Nobody waits for so many: such a job ends when what its test awaits has happened, and with these if that never happens.
MANY_STEPS = 2_000


def count_steps(
    steps: int,
    seconds: float = 0.0,
    loader_workers: int = 0,
    hidden: int = 64,
    commit: str = "copy",
    until: str | None = None,
    held: tuple[int, str, str] | None = None,
) -> dict[str, Any]:
    """Make so many steps; fewer if there is the file ``until`` before: all ranks leave at the same step.

    held: a step, a folder and a pattern; the step is not begun before a file in the folder matches.
    """
    import hashlib
    import os
    import time
    from pathlib import Path

    import torch

    import spark_elastic as se

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter = torch.nn.Parameter(torch.zeros(1))
            self.body = torch.nn.Sequential(torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) - self.counter

    torch.manual_seed(1000 + os.getpid())  # every worker starts with other weights; rank 0's count
    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(
        [
            {"params": [model.module.counter], "lr": 1.0},
            {"params": model.module.body.parameters(), "lr": 1e-3, "momentum": 0.9},
        ]
    )
    state = se.TorchState(model=model, optimizer=optimizer, step=0, history=[], commit=commit)
    resets: list[tuple[int, int]] = []
    entries: list[tuple[int, int]] = []
    state.register_reset_callbacks([lambda old, new: resets.append((old, new))])
    feed = torch.utils.data.DataLoader(range(10**9), num_workers=loader_workers) if loader_workers else None

    def is_enough() -> bool:
        if until is None or state.step >= steps:
            return bool(state.step >= steps)
        return bool(se.allreduce(torch.tensor([float(os.path.exists(until))]), op="max"))

    @se.elastic
    def train(state: Any) -> str:
        entries.append((se.generation(), se.size()))
        rows = iter(feed) if feed is not None else None
        while not is_enough():
            while held is not None and state.step + 1 == held[0] and not any(Path(held[1]).glob(held[2])):
                time.sleep(0.01)
            if rows is not None:
                next(rows)
            generator = torch.Generator().manual_seed(state.step * 64 + se.rank())
            x = torch.randn(16, 8, generator=generator)
            optimizer.zero_grad()
            # d(loss)/d(counter) is exactly -1 on every rank; the body gets a gradient of its own.
            loss = state.model(x).mean() + model.module.body(x).square().mean() * 0
            loss.backward()
            optimizer.step()
            state.step += 1
            state.history.append(state.step)
            if seconds:
                time.sleep(seconds)
            state.commit()
        return "done"

    value = train(state)
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return {
        "rank": se.rank(),
        "size": se.size(),
        "generation": se.generation(),
        "pid": os.getpid(),
        "value": value,
        "history": state.history,
        "counter": model.module.counter.item(),
        "digest": digest.hexdigest(),
        "resets": resets,
        "entries": entries,
    }


def growing_weight() -> Any:
    """Return a State with a model of one weight, which begins at 0 and grows by 1 in each step."""
    import torch

    import spark_elastic as se

    model = se.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    return se.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), epoch=0)


def make_epoch(state: Any, losses: list[float]) -> float:
    """Make one step, which is an epoch, and report its loss of these; return that."""
    import torch

    state.optimizer.zero_grad()
    (-state.model(torch.ones(1, 1))).mean().backward()
    state.optimizer.step()
    state.epoch += 1
    loss = losses[state.epoch - 1]
    state.report(val_loss=loss)
    return loss


def keep_best(losses: list[float], saved: str) -> dict[str, float]:
    """Make one step an epoch, and report these losses of the epochs before the commits that end them.

    Rank 0 leaves an epoch whose loss is the lowest so far only when its score is in the folder ``saved``.
    """
    import json
    import time
    from contextlib import suppress
    from pathlib import Path

    import spark_elastic as se

    state = growing_weight()

    def is_scored(loss: float) -> bool:
        for path in Path(saved).glob("*/score.json"):
            with suppress(FileNotFoundError):  # another was better, and this one has just been removed
                if json.loads(path.read_text() or "{}").get("value") == loss:
                    return True
        return False

    @se.elastic
    def train(state: Any) -> None:
        while state.epoch < len(losses):
            loss = make_epoch(state, losses)
            state.commit()
            while se.rank() == 0 and loss == min(losses[: state.epoch]) and not is_scored(loss):
                time.sleep(0.01)

    train(state)
    return {"weight": state.model.module.weight.item(), "epoch": state.epoch}


def commit_after_rank_1(losses: list[float]) -> float:
    """Report losses as ``keep_best`` does; rank 0 makes the commit of each epoch only after rank 1 has made its own."""
    import torch
    import torch.distributed as dist

    import spark_elastic as se

    state = growing_weight()

    @se.elastic
    def train(state: Any) -> None:
        word = torch.zeros(1)
        while state.epoch < len(losses):
            make_epoch(state, losses)
            if se.size() > 1 and se.rank() == 0:
                dist.recv(word, 1)
            state.commit()
            if se.rank() == 1:
                dist.send(word, 0)

    train(state)
    return state.model.module.weight.item()


def with_optimizer(name: str, settings: dict[str, float]) -> float:
    """Make a step with a torch optimizer, and return its learning rate."""
    import torch

    import spark_elastic as se

    model = se.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
    state = se.TorchState(model=model, optimizer=optimizer)

    @se.elastic
    def train(state: Any) -> None:
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 1)).mean().backward()
        state.optimizer.step()
        state.commit()

    train(state)
    return optimizer.param_groups[0]["lr"]


def plain(value: Any) -> Any:
    return value


def look_around() -> tuple[list[int], int]:
    """Return the processes above the worker, and how many traces of a worker before it are in its process; leave some."""
    import builtins
    import os
    import sys

    import psutil
    import torch

    places: list[Any] = [builtins, torch, torch.nn.Linear]
    traces = sum(hasattr(place, "left_by_a_worker") for place in places)
    traces += ("LEFT_BY_A_WORKER" in os.environ) + ("left_by_a_worker" in sys.modules)
    for place in places:
        place.left_by_a_worker = True
    os.environ["LEFT_BY_A_WORKER"] = "1"
    sys.modules["left_by_a_worker"] = os
    return [parent.pid for parent in psutil.Process().parents()], traces


def find_reader() -> bool:
    """Return whether the loader for Parquet files had been imported already; import it."""
    import sys

    found = "spark_elastic.data.parquet_loader" in sys.modules
    import spark_elastic.data.parquet_loader  # noqa: F401

    return found


def arguments() -> list[str]:
    """Return the arguments of this process's command, as they seem."""
    import sys

    return sys.argv


def tell_place() -> tuple[int, str]:
    """Return the process above the worker, and the folder that it runs in."""
    import os

    return os.getppid(), os.getcwd()


def look_around_when_there_is(path: str) -> tuple[list[int], int]:
    """Look around as soon as there is a file."""
    import os
    import time

    while not os.path.exists(path):
        time.sleep(0.05)
    return look_around()


def raise_everywhere(message: str) -> None:
    import spark_elastic as se

    @se.elastic
    def train(state: Any) -> None:
        raise KeyError(message)

    train(se.ObjectState(step=0))


def name_gpu() -> str:
    import os

    import spark_elastic as se

    return f"sees GPU {os.environ['CUDA_VISIBLE_DEVICES']} as {se.device()}"


def crash(code: int) -> None:
    """Never come as far as the elastic function."""
    import os

    os._exit(code)


def raise_on_rank(rank: int, step: int) -> None:
    """One rank raises at a step that never gets committed: a poison row."""
    import torch

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        while state.step < 100:
            if state.step == step and se.rank() == rank:
                raise ValueError(f"row {step} is poisoned")
            se.allreduce(torch.ones(1))
            state.step += 1
            state.commit()

    train(state)


def never_commit() -> None:
    import threading

    import spark_elastic as se

    @se.elastic
    def train(state: Any) -> None:
        threading.Event().wait()

    train(se.ObjectState(step=0))


def ask_rank_too_early() -> int:
    import spark_elastic as se

    se.device()
    return se.rank()


def return_a_lock() -> Any:
    import threading

    return threading.Lock()


def long_evaluation(seconds: float) -> list[int]:
    """Rank 0 evaluates for longer than hang_timeout while the others wait for it, and says that it is alive."""
    import time

    import torch

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        while state.step < 1:
            if se.rank() == 0:
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    time.sleep(0.1)
                    state.heartbeat()
            se.allreduce(torch.ones(1))
            state.step += 1
            state.commit()

    train(state)
    return [se.rank(), se.size(), se.generation()]


def hold_the_lock_of_python(seconds: float) -> list[int]:
    """At two steps one long call keeps all Python of this process from running, the control thread's, too."""
    import ctypes

    import torch

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        while state.step < 3:
            if state.step:
                ctypes.PyDLL(None).sleep(int(seconds))
            se.allreduce(torch.ones(1))
            state.step += 1
            state.commit()

    train(state)
    return [se.rank(), se.size(), state.step]


def wait_for_each_other() -> list[int]:
    """In the first world the ranks are in different collectives at the third step; after the end rank 1 sends no result."""
    import threading

    import torch
    import torch.distributed as dist

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        while state.step < 4:
            if state.step == 2 and se.generation() == 1:
                dist.all_reduce(torch.ones(4)) if se.rank() == 0 else dist.broadcast(torch.ones(4), 0)
            se.allreduce(torch.ones(1))
            state.step += 1
            state.commit()

    train(state)
    if se.rank() == 1:
        threading.Event().wait()
    return [se.rank(), se.size(), state.step]


def leave_one_alone_in_a_group() -> list[int]:
    """In the first world rank 0 alone enters a collective of a group that the user has made, and the other goes on."""
    import torch
    import torch.distributed as dist

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        group, both = dist.new_group(), torch.ones(1)
        while state.step < 4:
            dist.all_reduce(both, group=group)
            if state.step == 2 and se.generation() == 1 and se.rank() == 0:
                dist.all_reduce(torch.ones(4), group=group)
            se.allreduce(torch.ones(1))
            state.step += 1
            state.commit()
        dist.destroy_process_group(group)

    train(state)
    return [se.rank(), se.size(), state.step]


def evaluate_everywhere(seconds: float) -> list[int]:
    """All ranks evaluate after their second step, without a collective and without a heartbeat."""
    import os
    import time

    import torch

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        while state.step < 4:
            if state.step == 2:
                time.sleep(seconds)
            se.allreduce(torch.ones(1))
            state.step += 1
            state.commit()

    train(state)
    return [se.rank(), os.getpid()]


def train_with_what_newcomers_cannot_load(steps: int, path: str) -> int:
    """Train until the file exists, and so many steps more. Every newcomer raises when it is given the state."""
    import os
    import time

    import torch

    import spark_elastic as se

    class Grown:
        """Has grown while it was trained, and what it was at first cannot load that."""

        size = 1

        def state_dict(self) -> dict[str, int]:
            return {"size": self.size}

        def load_state_dict(self, kept: dict[str, int]) -> None:
            if kept["size"] != self.size:
                raise ValueError(f"a size of {kept['size']} does not fit into {self.size}")

    grown = Grown()
    state = se.ObjectState(step=0, left=steps, grown=grown)

    @se.elastic
    def train(state: Any) -> None:
        if grown.size == 1:
            grown.size = 2
            state.commit()
        while state.left:
            state.left -= int(se.allreduce(torch.tensor([float(os.path.exists(path))]), op="max").item())
            time.sleep(0.05)
            state.step += 1
            state.commit()

    train(state)
    return int(state.step)


def collectives() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import spark_elastic as se

    state = se.ObjectState(value=None, mine=-1, local=["mine"])

    @se.elastic
    def train(state: Any) -> None:
        rank, size = se.rank(), se.size()
        state.mine = rank
        plain = torch.full((2,), float(rank))
        dist.all_reduce(plain)
        state.value = {
            "mean": se.allreduce(torch.tensor([float(rank)])).item(),
            "sum": se.allreduce(torch.tensor([rank]), op="sum").item(),
            "max": se.allreduce(torch.tensor([rank]), op="max").item(),
            "gathered": se.allgather_object({"rank": rank}),
            "broadcast": se.broadcast_object(f"from {rank}", src=size - 1),
            "plain": plain.tolist(),
            "group": dist.get_world_size(se.process_group()),
            "places": (se.local_rank(), se.local_size(), se.cross_rank(), se.cross_size()),
        }
        se.barrier()
        state.commit()

    train(state)
    return {"rank": se.rank(), "mine": state.mine, **state.value}


def die_quietly(folder: str) -> int:
    """Start processes of every kind below a worker, write their pids, and train until killed, or until the file ``stop``."""
    import os
    import subprocess
    import time

    import torch

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        feed = iter(torch.utils.data.DataLoader(range(10**9), num_workers=2, persistent_workers=True))
        sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        pids = [os.getpid(), os.getppid(), sleeper.pid, *(worker.pid for worker in feed._workers)]
        path = os.path.join(folder, f"{se.rank()}")
        with open(path + ".tmp", "w") as file:
            file.write(" ".join(map(str, pids)))
        os.rename(path + ".tmp", path)
        stopping = torch.zeros(1)
        while not stopping:
            next(feed)
            stopping = se.allreduce(torch.tensor([float(os.path.exists(os.path.join(folder, "stop")))]), op="max")
            state.step += 1
            state.commit()
            time.sleep(0.05)

    train(state)
    return se.generation()


def train_until(path: str) -> tuple[int, int]:
    """Take small steps until the file exists; return how many, and the generation."""
    import os
    import time

    import torch

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        stopping = torch.zeros(1)
        while not stopping:
            stopping = se.allreduce(torch.tensor([float(os.path.exists(path))]), op="max")
            state.step += 1
            state.commit()
            time.sleep(0.05)

    train(state)
    return state.step, se.generation()


def flood(lines: int) -> str:
    """Print more than anybody wants to read."""
    for line in range(lines):
        print(f"line {line:08d} {'x' * 100}", flush=False)
    return "dry"


def train_wrongly(mistake: str) -> None:
    """Make one of the mistakes that train without a word; ranks have other rows, as ever."""
    import torch

    import spark_elastic as se

    torch.manual_seed(0)
    inner = torch.nn.Linear(4, 1)
    model = se.DistributedDataParallel(inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    held = {"optimizers": [optimizer]} if mistake != "optimizer" else {}
    loader = torch.utils.data.DataLoader(torch.randn(600, 4), batch_size=8)
    state = se.TorchState(model=model, step=0, **held)

    @se.elastic
    def train(state: Any) -> None:
        rows = iter(loader)
        while state.step < 64:
            if mistake == "freeze" and state.step == 7 and se.rank() == 0:
                inner.bias.requires_grad_(False)
            optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(64 * state.step + se.rank()))
            if mistake == "loader":
                x = next(rows)
            called = inner if mistake == "inner" and state.step >= 2 else state.model
            called(x).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)


def grow_in_mid_training(steps: int) -> dict[str, Any]:
    """Replace the head, grow the embedding and add a parameter group after the fourth step; all ranks see the same rows."""
    import torch

    import spark_elastic as se

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(4, 2)
            self.head = torch.nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(x))

    model = se.DistributedDataParallel(Net())
    state = se.TorchState(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1), step=0, grown=False)

    @se.elastic
    def train(state: Any) -> None:
        while state.step < steps:
            if state.step == 4 and not state.grown:
                torch.manual_seed(4)
                net, words = model.module, torch.nn.Embedding(6, 2)
                words.weight.data[:4] = net.words.weight.detach()
                net.words, net.head = words, torch.nn.Sequential(net.head, torch.nn.Linear(3, 5))
                state.optimizer = torch.optim.Adam([words.weight], lr=0.1)
                state.optimizer.add_param_group({"params": list(net.head.parameters()), "lr": 0.05})
                state.grown = True
                state.commit()
            state.optimizer.zero_grad()
            model.module(torch.arange(4)).square().mean().backward()
            state.optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    weights = {name: tensor.tolist() for name, tensor in model.module.state_dict().items()}
    return {"weights": weights, "moments": len(state.optimizer.state), "generation": se.generation(), "size": se.size()}


def cut_off_last_rank() -> None:
    """Have the kernel drop all packets between the last rank's group and the others', at both ends; connections stay open."""
    import ctypes
    import socket
    import struct

    import torch.distributed as dist

    from spark_elastic.worker.job import current_job

    job = current_job()
    assert job is not None
    assert job.world is not None
    mine = {c.getsockname(): c for c in job.world.group._host.sockets._kept}
    of_last: list[Any] = [list(mine)]
    dist.broadcast_object_list(of_last, job.world.size - 1)
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
    for connection in mine.values():
        if connection.getsockname() in of_last[0] or connection.getpeername() in of_last[0]:
            connection.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(drop_all)))


def count_rows(
    url: str, rows: int, epochs: int, batch: dict[str, int], report: bool = False, cut_off: int = 0
) -> dict[str, Any]:
    """The training function of API.md, with a weight per row of the dataset that goes up by one when the row counts."""
    import torch

    import spark_elastic as se

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.seen[ids]

    model = se.DistributedDataParallel(Net().to(se.device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = se.data.ParquetLoader(url, **batch, shuffle=True, seed=0)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0, best=float("inf"), val=None)
    sizes: list[tuple[int, int]] = []
    state.register_reset_callbacks([lambda old_size, new_size: sizes.append((old_size, new_size))])

    @se.elastic
    def train(state: Any) -> None:
        while state.epoch < epochs:
            for step, rows_of_rank in enumerate(state.loader):
                if step == 0 and se.generation() <= cut_off:
                    cut_off_last_rank()
                # The gradient of a row is -1 over the rows of the global batch; the learning rate takes that back.
                optimizer.param_groups[0]["lr"] = float(sum(state.loader.batch_rows))
                optimizer.zero_grad()
                loss = -state.model(rows_of_rank["id"]).mean()
                loss.backward()
                optimizer.step()
                state.commit()
            state.val = se.allreduce(state.model.module.seen.detach().sum(), op="max").item()
            state.best = min(state.best, state.val)
            state.epoch += 1
            state.loader.set_epoch(state.epoch)
            state.commit()
            state.report(epoch=state.epoch, val_loss=state.val)

    train(state)
    return {"rank": se.rank(), "seen": model.module.seen.detach().tolist(), "val": state.val, "resets": sizes}


def see_rows(url: str) -> list[int]:
    """Return the rows of an epoch that all ranks have seen together, with a State that holds no model."""
    import spark_elastic as se

    loader = se.data.ParquetLoader(url, global_batch_size=50, seed=1)
    state = se.ObjectState(loader=loader, seen=[])

    @se.elastic
    def read(state: Any) -> None:
        for batch in state.loader:
            state.seen += [row for rows in se.allgather_object(batch["id"].tolist()) for row in rows]
            state.commit()

    read(state)
    return sorted(state.seen)


def count_rows_beside_a_slow_rank(url: str, rows: int, epochs: int) -> dict[str, Any]:
    """Count rows as ``count_rows`` does, while what was rank 1 first takes three times as long for each row as others do.

    Generations of three workers go on until the slow rank has less than two thirds of the rows of others. In the first one the
    last rank then dies; a later one ends with the epoch in which that has come about.
    """
    import os
    import signal
    import time

    import torch

    import spark_elastic as se

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))
            self.seconds_a_row = 0.001

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            time.sleep(len(ids) * self.seconds_a_row)
            return self.seen[ids]

    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = se.data.ParquetLoader(url, global_batch_size=30, balance="auto")
    state = se.TorchState(
        model=model, optimizer=optimizer, loader=loader, epoch=0, shares=[], local="is_slow", is_slow=None
    )

    @se.elastic
    def train(state: Any) -> None:
        if state.is_slow is None:
            state.is_slow = se.generation() == 1 and se.rank() == 1
        model.module.seconds_a_row = 0.003 if state.is_slow else 0.001
        slow = se.allgather_object(state.is_slow).index(True)
        has_seen = False
        while state.epoch < epochs or all(generation == 1 for generation, *_ in state.shares):
            for batch in state.loader:
                shares = state.loader.batch_rows
                optimizer.param_groups[0]["lr"] = float(sum(shares))
                optimizer.zero_grad()
                (-state.model(batch["id"]).mean()).backward()
                optimizer.step()
                if (
                    not has_seen
                    and se.size() == 3
                    and sum(shares) == 30
                    and 3 * shares[slow] < 2 * min(shares[:slow] + shares[slow + 1 :])
                ):
                    has_seen = True
                    state.shares.append((se.generation(), shares, slow))
                state.commit()
                if has_seen and se.generation() == 1 and se.rank() == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            state.epoch += 1
            state.loader.set_epoch(state.epoch)
            state.commit()

    train(state)
    return {"seen": model.module.seen.detach().tolist(), "epochs": state.epoch, "shares": state.shares}


def count_rows_beside_a_hopeless_rank(rows: int, least_steps: int, until_replaced: bool) -> dict[str, Any]:
    """Count rows while what was rank 1 first takes thirty times as long for each row as others do.

    With ``until_replaced`` epochs go on until a world of three has no slow rank, else until there were ``least_steps`` steps.
    """
    import time

    import torch

    import spark_elastic as se

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))
            self.seconds_a_row = 0.001

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            time.sleep(len(ids) * self.seconds_a_row)
            return self.seen[ids]

    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = se.data.ElasticDataLoader(range(rows), global_batch_size=12)
    state = se.TorchState(
        model=model, optimizer=optimizer, loader=loader, epoch=0, steps=0, local="is_slow", is_slow=None
    )

    @se.elastic
    def train(state: Any) -> None:
        if state.is_slow is None:
            state.is_slow = se.generation() == 1 and se.rank() == 1
        model.module.seconds_a_row = 0.03 if state.is_slow else 0.001
        is_replaced = se.size() == 3 and not any(se.allgather_object(state.is_slow))
        while True:
            for batch in state.loader:
                optimizer.param_groups[0]["lr"] = float(sum(state.loader.batch_rows))
                optimizer.zero_grad()
                (-state.model(batch).mean()).backward()
                optimizer.step()
                state.steps += 1
                state.commit()
            state.epoch += 1
            state.loader.set_epoch(state.epoch)
            state.commit()
            if is_replaced if until_replaced else state.steps >= least_steps:
                return

    train(state)
    return {"seen": model.module.seen.detach().tolist(), "epochs": state.epoch, "steps": state.steps}


def count_rows_at_any_size(
    rows: int, seconds_a_row: float, seconds_a_rank: float, seconds: float, last: int
) -> dict[str, Any]:
    """Count rows where a step takes so long for each row of a rank, and then so long for each rank, and in any case.

    Epochs go on until worlds of other sizes have trained, and the present one has ``last`` ranks.
    """
    import time

    import torch

    import spark_elastic as se
    from spark_elastic.data import stopwatch

    stopwatch.LEAST_SECONDS = 0.2

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            time.sleep(len(ids) * seconds_a_row)
            return self.seen[ids]

    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = se.data.ElasticDataLoader(range(rows), global_batch_size=12)
    state = se.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0, sizes=[])

    @se.elastic
    def train(state: Any) -> None:
        state.sizes = [*state.sizes, se.size()]
        while True:
            for batch in state.loader:
                optimizer.param_groups[0]["lr"] = float(sum(state.loader.batch_rows))
                optimizer.zero_grad()
                (-state.model(batch).mean()).backward()
                time.sleep(seconds + se.size() * seconds_a_rank)
                optimizer.step()
                state.commit()
            state.epoch += 1
            state.loader.set_epoch(state.epoch)
            state.commit()
            if len(state.sizes) >= 3 and se.size() == last:
                return

    train(state)
    return {"seen": model.module.seen.detach().tolist(), "epochs": state.epoch, "sizes": state.sizes}


def count_cases(cases: list[dict[str, Any]], epochs: int) -> dict[str, Any]:
    """Go through several datasets in one job, with a weight per row of them all that goes up by one when the row counts."""
    import collections
    import random
    import time

    import numpy as np
    import torch

    import spark_elastic as se

    class Cases:
        """One loader after the other behind the seam between a loader and a state."""

        def __init__(self) -> None:
            self.case = 0
            self.inner = self._make(0)
            self.world = (0, 1)
            self.reporters: Any = collections.deque()

        def _make(self, case: int) -> Any:
            given = cases[case]
            if "url" in given:
                return se.data.ParquetLoader(given["url"], **given["options"])
            items = torch.utils.data.TensorDataset(torch.arange(given["rows"]))
            return se.data.ElasticDataLoader(items, collate_fn=lambda found: {"id": torch.stack([i for i, in found])},
                                             **given["options"])  # fmt: skip

        @property
        def batch_rows(self) -> tuple[int, ...]:
            return self.inner.batch_rows

        @property
        def at_start(self) -> bool:
            return self.inner.epoch == 0 and not self.inner.rows_processed

        @property
        def done(self) -> bool:
            return self.case == len(cases) - 1 and self.inner.epoch == epochs - 1 and not self.inner.steps_left

        def go_on(self) -> None:
            """Start the next epoch, or the first one of the next dataset."""
            if self.inner.epoch < epochs - 1:
                self.inner.set_epoch(self.inner.epoch + 1)
            else:
                self._switch(self.case + 1)
                self.inner.set_world(*self.world)

        def _switch(self, case: int) -> None:
            if case != self.case:
                self.inner.close()
                self.case, self.inner = case, self._make(case)

        def set_world(self, rank: int, size: int) -> None:
            self.world = (rank, size)
            self.reporters.clear()
            self.inner.set_world(rank, size)

        def state_dict(self) -> dict[str, Any]:
            return {"case": self.case, "inner": self.inner.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self._switch(state["case"])
            self.inner.load_state_dict(state["inner"])

        def report(self) -> Any:
            self.reporters.append(self.inner)
            return self.inner.report()

        def confirm(self, reports: Any) -> None:
            if self.reporters:
                self.reporters.popleft().confirm(reports)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(sum(case["rows"] for case in cases), dtype=torch.float64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.seen[ids]

    first = [sum(case["rows"] for case in cases[:number]) for number in range(len(cases))]
    model = se.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = se.TorchState(model=model, optimizer=optimizer, loader=Cases(), resets=[])
    state.register_reset_callbacks([lambda old, new: state.resets.append((state.loader.case, old, new))])

    def change_shares(loader: Any) -> None:
        """Change shares as at the commit of a job, but at random, the same on all ranks."""
        tracker = loader.inner.tracker
        if tracker.plan.balance is None or tracker.plan.overall < se.size():
            return
        chance = random.Random(f"{loader.case} {tracker.epoch} {tracker.position}")
        cuts = sorted(chance.sample(range(1, tracker.plan.overall), se.size() - 1))
        tracker.divide(tuple(np.diff([0, *cuts, tracker.plan.overall]).tolist()))

    @se.elastic
    def train(state: Any) -> None:
        while True:
            loader = state.loader
            while loader.at_start and se.size() < cases[loader.case]["gather"]:
                state.check_host_updates()
                time.sleep(0.02)
            for batch in loader.inner:
                optimizer.param_groups[0]["lr"] = float(sum(loader.batch_rows))
                optimizer.zero_grad()
                (-state.model(batch["id"] + first[loader.case]).mean()).backward()
                optimizer.step()
                state.commit()
                change_shares(loader)
            if loader.done:
                return
            loader.go_on()
            state.commit()

    train(state)
    return {"seen": model.module.seen.detach().tolist(), "resets": state.resets}


def train_on_files_that_change(folder: str, change: str) -> None:
    """After its second step rank 0 truncates, replaces, deletes or rewrites the files that all ranks read from."""
    import os
    from pathlib import Path

    import pyarrow as pa
    import pyarrow.parquet as pq

    import spark_elastic as se

    def strike(path: Path) -> None:
        rows = pq.read_metadata(path).num_rows
        if change == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        elif change == "deleted":
            path.unlink()
        else:
            name = "id" if change == "replaced" else "other"
            pq.write_table(pa.table({name: pa.array(range(7000, 7000 + rows), pa.int64())}), path)

    loader = se.data.ParquetLoader(folder, global_batch_size=16, prefetch=1, shuffle_rows=64)
    state = se.TorchState(loader=loader, step=0)

    @se.elastic
    def train(state: Any) -> None:
        for batch in state.loader:
            se.allreduce(batch["id"].sum(), op="sum")
            state.step += 1
            state.commit()
            if state.step == 2 and se.rank() == 0:
                for path in Path(folder).iterdir():
                    strike(path)

    train(state)


def fixed_of_torchs_own(folder: str) -> dict[str, Any]:
    """A function as for TorchDistributor. In the first attempt rank 1 is killed, and rank 2 does not heed the loss."""
    import fcntl
    import os
    import signal
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import spark_elastic as se

    dist.init_process_group("gloo")
    rank, attempt = int(os.environ["RANK"]), se.generation()
    assert rank == dist.get_rank() == se.rank()
    # Held as long as this process lives: who cannot get it runs beside the same rank of another attempt.
    alive = open(Path(folder, f"rank-{rank}"), "w")  # noqa: SIM115
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        Path(folder, f"beside-{rank}").touch()
    Path(folder, f"attempt-{attempt}-{rank}").touch()
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    ours = se.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD([*model.parameters(), *ours.parameters()], lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 3)
        (model(x) + ours(x)).square().mean().backward()
        optimizer.step()
        if attempt == 1 and step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while attempt == 1 and step == 3 and rank == 2:
            try:
                se.barrier()
                time.sleep(1)
            except BaseException:
                time.sleep(0.01)
    total = torch.ones(1)
    dist.all_reduce(total)
    weights = [parameter.tolist() for parameter in (*model.parameters(), *ours.parameters())]
    dist.destroy_process_group()
    return {"rank": rank, "generation": attempt, "weights": str(weights), "sum": total.item()}


def fixed_with_state(more: int, durable: int, lose: str, plain: bool) -> dict[str, int]:
    """Train in a fixed world with a State, which is brought up to date by ``sync`` or by an elastic function.

    The first world loses rank 0, or its executor, as soon as there is the file ``lose``; the next one makes some steps more.
    """
    import os
    import signal
    import time

    import torch

    import spark_elastic as se
    from spark_elastic.protocol.fault_points import EXECUTOR_VARIABLE

    model = se.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    state = se.TorchState(model=model, optimizer=optimizer, step=0)

    def train(state: Any) -> dict[str, int]:
        start = state.step
        while se.generation() == 1 or state.step < start + more:
            optimizer.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
            state.step += 1
            if se.generation() == 1 and se.rank() == 0 and os.path.exists(lose):
                os.kill(int(os.environ[EXECUTOR_VARIABLE]) if plain else os.getpid(), signal.SIGKILL)
                signal.pause()  # until what ends with the executor has ended
            state.commit(durable=state.step == durable)
            time.sleep(0.01)
        return {"start": start, "end": state.step, "generation": se.generation()}

    if plain:
        state.sync()
        return train(state)
    return se.elastic(train)(state)


def fixed_raises() -> None:
    import spark_elastic as se

    if se.rank() == 1:
        raise ValueError("bad row")
    se.barrier()


def many_models(steps: int) -> dict[str, Any]:
    """Train two models, compiled and in containers, on two loaders in one loss; return how far that is from one process."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import mse_loss

    import spark_elastic as se

    def networks() -> list[nn.Sequential]:
        torch.manual_seed(0)
        made = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(2)]
        made[1][2].requires_grad_(False)
        return made

    def loader(rows: int, batch: int) -> Any:
        generator = torch.Generator().manual_seed(rows)
        tensors = [torch.randn(rows, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
        return se.data.ElasticDataLoader(torch.utils.data.TensorDataset(*tensors), global_batch_size=batch)

    def loss_of(one: Any, two: Any, pair: Any) -> torch.Tensor:
        (x, y), (u, _) = pair
        return mse_loss(two(one(one(x))), y) + two(u).square().mean()

    def hook(calls: list[int], bucket: Any) -> Any:
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    modules, plain, calls = networks(), networks(), list[int]()
    one = se.DistributedDataParallel(torch.compile(modules[0], backend="aot_eager"))  # type: ignore[arg-type]
    two = se.DistributedDataParallel(modules[1])
    two.register_comm_hook(lambda: calls, hook)
    compiled = torch.compile(two, backend="aot_eager")
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.05, momentum=0.5)
    state = se.TorchState(
        models=[one, {"compiled": compiled}],
        optimizers={"both": optimizer},
        loader=loader(97, 7),
        other=loader(89, 5),
        step=0,
    )
    seen: list[tuple[int, int]] = []
    hooked: list[tuple[int, bool]] = []

    @se.elastic
    def train(state: Any) -> None:
        while state.step < steps:
            for pair in zip(state.loader, state.other, strict=False):
                if state.step == 8:
                    modules[1][2].requires_grad_(True)
                optimizer.zero_grad()
                calls.clear()
                loss_of(one, compiled, pair).backward()
                hooked.append((se.size(), bool(calls)))
                optimizer.step()
                state.step += 1
                seen.append((state.step, se.size()))
                state.commit()
                # The lost worker's successor is on its way.
                while se.size() == 1 and state.step in (steps // 3, steps - 8):
                    state.check_host_updates()
                    time.sleep(0.05)
                if state.step == steps:
                    return
            for each in (state.loader, state.other):
                each.set_epoch(each.epoch + 1)
            state.commit()

    train(state)
    alone = torch.optim.SGD([p for module in plain for p in module.parameters()], lr=0.05, momentum=0.5)
    first, second = loader(97, 7), loader(89, 5)
    step = 0
    while step < steps:
        for pair in zip(first, second, strict=False):
            if step < steps:
                if step == 8:
                    plain[1][2].requires_grad_(True)
                alone.zero_grad()
                loss_of(*plain, pair).backward()
                alone.step()
                step += 1
        for each in (first, second):
            each.set_epoch(each.epoch + 1)
    pairs = zip((p for m in modules for p in m.parameters()), (p for m in plain for p in m.parameters()), strict=True)
    return {
        "seen": seen,
        "hooked": hooked,
        "difference": max(float((p - q).detach().abs().max()) for p, q in pairs),
        "trains": all(p.requires_grad for p in modules[1].parameters()),
    }


def compress_by_power_sgd(steps: int) -> dict[str, Any]:
    """Train a model of several buckets; in the last third all wait for a third worker."""
    import hashlib

    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    import spark_elastic as se

    torch.manual_seed(0)
    model = se.DistributedDataParallel(nn.Sequential(*(nn.Linear(400, 400) for _ in range(4))))
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)
    sizes: list[int] = []

    @se.elastic
    def train(state: Any) -> None:
        while state.step < steps:
            while se.size() < 3 and state.step == 2 * steps // 3:
                state.check_host_updates()
            sizes.append(se.size())
            optimizer.zero_grad()
            model(torch.randn(8, 400)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    found = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.module.state_dict().values()))
    return {"weights": found.hexdigest(), "sizes": sizes, "step": state.step}


def wait_for_a_file(path: str) -> str:
    """Train until a file is there."""
    import os
    import time

    import torch

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> None:
        while True:
            there = se.allreduce(torch.tensor([float(os.path.exists(path))]), op="min")
            state.step += 1
            state.commit()
            if there.item():
                return
            time.sleep(0.05)

    print("a worker begins", flush=True)
    train(state)
    return f"rank {se.rank()} of {se.size()}"


def touch_and_grow(path: str, size: int) -> int:
    """Touch a file, and train until the world has so many workers."""
    import time
    from pathlib import Path

    import spark_elastic as se

    state = se.ObjectState(step=0)

    @se.elastic
    def train(state: Any) -> int:
        Path(path).touch()
        while se.size() < size:
            state.step += 1
            state.commit()
            time.sleep(0.05)
        return se.size()

    return train(state)


def sync_by_hand(commit: str, steps: int) -> dict[str, Any]:
    """Call ``sync`` after each commit, and twice more after ranks have set an attribute differently."""
    import torch

    import spark_elastic as se

    model = se.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = se.TorchState(model=model, optimizer=optimizer, commit=commit, steps=0, best=0)
    found: list[tuple[int, int]] = []

    @se.elastic
    def train(state: Any) -> None:
        while state.steps < steps:
            optimizer.zero_grad()
            state.model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state.steps += 1
            state.commit()
            state.sync()
            found.append((se.generation(), state.steps))
            for _ in range(2):
                state.best = 100 * state.steps + se.rank()
                state.sync()
                assert state.best == 100 * state.steps + state.donor

    train(state)
    return {"found": found, "weights": model.module.weight.tolist()}
