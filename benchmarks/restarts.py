"""Restarts: what a lost worker costs a script that has to be started again, beside an elastic function and beside torchrun.

    python benchmarks/restarts.py [--repeats 5]

Two local workers train a tiny model with plain DDP and write a checkpoint each step. One of them is killed, and timed is how long
it takes until one has made a step again, and both: of ``spark-elastic run --restart-on-change`` when a worker is lost, of
``torchrun`` when one of its scripts is, and of an elastic function, which is entered again in the same processes. One job after
the other. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from report import Summary, Table, emit, summarize

WORKERS = 2
# Steps before a kill, and the pause after each: a kill does not meet a start.
STEPS, PACE = 20, 0.05

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

folder, pace = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
net = torch.nn.Linear(100, 100)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
saved = os.path.join(folder, "checkpoint")
step = 0
if os.path.exists(saved):
    found = torch.load(saved)
    step = found["step"]
    net.load_state_dict(found["model"])
steps = open(os.path.join(folder, f"steps-{os.getpid()}"), "a", buffering=1)
while not os.path.exists(os.path.join(folder, "end")):
    optimizer.zero_grad()
    model(torch.ones(8, 100)).sum().backward()
    optimizer.step()
    step += 1
    if dist.get_rank() == 0:
        torch.save({"step": step, "model": net.state_dict()}, saved + ".new")
        os.replace(saved + ".new", saved)
    print(time.time(), dist.get_rank(), file=steps)
    time.sleep(pace)
    dist.barrier()
os._exit(0)  # the other rank may see the file one step later
"""

ELASTIC = """
import os, sys, time
import torch
import spark_elastic as se

def train_fn(folder, pace):
    model = se.DistributedDataParallel(torch.nn.Linear(100, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = se.TorchState(model=model, optimizer=optimizer, is_over=False)
    steps = open(os.path.join(folder, f"steps-{os.getpid()}"), "a", buffering=1)

    @se.elastic
    def train(state):
        while not state.is_over:
            optimizer.zero_grad()
            state.model(torch.ones(8, 100)).sum().backward()
            optimizer.step()
            print(time.time(), se.rank(), file=steps)
            time.sleep(pace)
            state.is_over = bool(se.allreduce(torch.tensor(float(os.path.exists(os.path.join(folder, "end"))))))
            state.commit()

    train(state)

se.run(train_fn, (sys.argv[1], float(sys.argv[2])), local=True, num_proc=2, min_np=1, max_np=2)
"""


def steps_of(folder: Path) -> dict[int, list[float]]:
    """When each process has stepped, by its pid."""
    return {
        int(path.name.split("-")[1]): [float(line.split()[0]) for line in path.read_text().splitlines() if " " in line]
        for path in folder.glob("steps-*")
    }


def wait_for_steps(folder: Path, since: float, count: int, job: subprocess.Popen[bytes]) -> dict[int, float]:
    """Wait until as many processes as there are workers have made ``count`` steps since then. Return when each made its first."""
    while True:
        found = {pid: [at for at in times if at > since] for pid, times in steps_of(folder).items()}
        ready = {pid: times[0] for pid, times in found.items() if len(times) >= count and psutil.pid_exists(pid)}
        if len(ready) >= WORKERS:
            return ready
        assert job.poll() is None, "the job has ended"
        time.sleep(0.05)


def kill_script(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_worker_of(pid: int) -> None:
    """Kill the worker whose child the script is."""
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)


def measure(command: list[str], folder: Path, repeats: int, kill: Callable[[int], None]) -> tuple[Summary, Summary]:
    """Run the job, kill a worker again and again, and return how long it took until one worker had stepped, and both."""
    one, both = [], []
    with open(folder / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as job:
        since = 0.0
        for _ in range(repeats):
            workers = wait_for_steps(folder, since, STEPS, job)
            since = time.time()
            kill(max(workers))
            # Of those that live on, or are started again: a step that was under way at the kill is no step after it.
            since += PACE
            stepped = wait_for_steps(folder, since, 1, job).values()
            one.append(min(stepped) - since + PACE)
            both.append(max(stepped) - since + PACE)
        (folder / "end").touch()
        assert job.wait(60) == 0, (folder / "log").read_text()[-2000:]
    return summarize(one), summarize(both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, tuple[Summary, Summary]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, text in (("script", SCRIPT), ("elastic", ELASTIC)):
            (folder / f"{name}.py").write_text(text)
        script, elastic = str(folder / "script.py"), str(folder / "elastic.py")
        workers = ["--num-proc", str(WORKERS), "--min-np", str(WORKERS), "--max-np", str(WORKERS)]
        ours = [sys.executable, "-m", "spark_elastic.cli", "run", script, "--restart-on-change", "--local", *workers]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        jobs: dict[str, tuple[list[str], Callable[[int], None]]] = {
            "elastic function": ([sys.executable, elastic], kill_script),
            "spark-elastic run --restart-on-change": ([*ours, "--"], kill_worker_of),
            "torchrun": ([*torchrun, "--max-restarts", "100", script], kill_script),
        }
        for name, (command, kill) in jobs.items():
            place = folder / name.replace(" ", "-")
            place.mkdir()
            found[name] = measure([*command, str(place), str(PACE)], place, given.repeats, kill)
    table = Table("a worker is killed", "until one steps", "until both have stepped", unit="seconds")
    for name, (one, both) in found.items():
        table.add(name, one, both)
    table.print()
    emit("restarts", **{name: {"one": one.asdict(), "both": both.asdict()} for name, (one, both) in found.items()})


if __name__ == "__main__":
    main()
