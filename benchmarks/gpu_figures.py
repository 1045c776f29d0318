"""The figures of ``gpu.py``, one at a time: ``gpu_figures.py commit|steps|loss|join|loader|fit --device cuda --out FILE``.

``commit``: 1 GB of weights, committed on the device, into pinned host memory and in place, against the same copy by CUDA.
``steps``: models as large as ResNet-50 and GPT-2 small in a world of one, with and without commits, against plain DDP.
``loss``: four workers on one device, from a kill to the survivors' next step. ``join``: how long two workers pause for one that
gets 1 GB. ``loader``: rows a second into the device, against the same rows from memory. ``fit``: the training of an estimator.
Data are made up. On the CPU everything is small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
from report import summarize
from torch import nn

import spark_elastic
from spark_elastic.launchers.gpus import find_gpus
from spark_elastic.launchers.local_cluster import LocalCluster
from spark_elastic.protocol.event_format import read_event
from spark_elastic.testing import inject, kill
from spark_elastic.timeline.resets import Kind, Part, find_resets

Figures = dict[str, dict[str, Any]]
MILLION = 1_000_000


@dataclass(frozen=True)
class Sizes:
    """How much of everything: for a GPU, or for a CPU that plays one."""

    parameters: int  # of the state in ``commit`` and ``join``; four bytes each
    repeats: int
    steps: int  # of a block in ``steps``
    image: int  # height and width
    images: int  # of a batch
    width: int  # of the first layers of the network for images; 64 is ResNet-50's
    layers: int  # of the network for text; 12 is GPT-2 small's
    embedding: int  # 768 is GPT-2 small's
    words: int  # 50257 are GPT-2's
    tokens: int  # of a sequence
    sequences: int  # of a batch
    between: int  # steps between two losses
    rows: int


SIZES = {
    "cuda": Sizes(250 * MILLION, 15, 10, 224, 64, 64, 12, 768, 50257, 1024, 8, 60, 1 * MILLION),
    "cpu": Sizes(4 * MILLION, 5, 3, 32, 2, 8, 2, 32, 500, 16, 2, 50, 20_000),
}


def figure(values: list[float], unit: str, wanted: str = "", note: str = "") -> dict[str, Any]:
    """What ``gpu.py`` prints and keeps of repeated measurements."""
    summary = summarize(values)
    text = f"{summary.median:.4g} {unit} [{summary.low:.4g}, {summary.high:.4g}] n={summary.repeats}"
    return {"text": f"{text} {note}".rstrip(), "unit": unit, "wanted": wanted, **summary.asdict()}


@contextlib.contextmanager
def cluster(device: str, seats: int) -> Iterator[LocalCluster]:
    """So many seats, which share the first GPU if there are several."""
    gpus = find_gpus() if device == "cuda" else ()
    if device == "cuda" and not gpus:
        raise RuntimeError("local slots find GPUs by nvidia-smi, and it is missing or names none")
    with contextlib.closing(LocalCluster(seats, gpus[:1] * seats)) as made:
        yield made


def run_alone(device: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a world of one, over NCCL if there is a GPU."""
    with cluster(device, 1) as made:
        (result,) = spark_elastic.run(fn, args, local=made)
    return result


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------- commit


def time_commits(parameters: int, repeats: int, commit: str) -> dict[str, list[float]]:
    """Return the milliseconds until ``commit`` returns, and until it is complete."""
    import spark_elastic as se

    device = se.device()
    width = int((parameters / 10) ** 0.5)
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(10)]).to(device)
    model = se.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = se.TorchState(model=model, optimizer=optimizer, commit=commit)
    found: dict[str, list[float]] = {"returned": [], "complete": []}

    @se.elastic
    def train(state: Any) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(repeats + 4):  # the first ones make room, and are waited for
            optimizer.step()
            settle(device)
            start = time.perf_counter()
            state.commit()
            found["returned"].append(1000 * (time.perf_counter() - start))
            settle(device)
            found["complete"].append(1000 * (time.perf_counter() - start))

    train(state)
    return {name: times[4:] for name, times in found.items()}


def time_copies(parameters: int, repeats: int, device: torch.device, to_host: bool) -> list[float]:
    """Return the milliseconds of a copy of so many parameters, on the device or into pinned memory of the host."""
    source = torch.ones(parameters, device=device)
    target = torch.zeros(parameters, device="cpu" if to_host else device, pin_memory=to_host and device.type == "cuda")
    times = []
    for _ in range(repeats + 2):
        settle(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        settle(device)
        times.append(1000 * (time.perf_counter() - start))
    return times[2:]


def commit(device: str, sizes: Sizes) -> Figures:
    size = f"{4 * sizes.parameters / 1e9:.3g} GB"
    copies = {
        "copy": time_copies(sizes.parameters, sizes.repeats, torch.device(device), to_host=False),
        "host": time_copies(sizes.parameters, sizes.repeats, torch.device(device), to_host=True),
    }
    found: Figures = {
        f"a copy of {size} on the device": figure(copies["copy"], "ms"),
        f"a copy of {size} into pinned memory": figure(copies["host"], "ms"),
    }
    for kind in ("copy", "host", "in_place"):
        times = run_alone(device, time_commits, sizes.parameters, sizes.repeats, kind)
        wanted, note = "", ""
        if kind in copies:
            ratio = summarize(times["complete"]).median / summarize(copies[kind]).median
            wanted, note = "at most 1.2 times the copy" if kind == "copy" else "", f"= {ratio:.3g} times the copy"
        found[f"commit={kind}, complete"] = figure(times["complete"], "ms", wanted, note)
        found[f"commit={kind}, returned"] = figure(times["returned"], "ms")
    return found


# ---------------------------------------------------------------- steps


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        straight = stride == 1 and inputs == outputs
        self.aside: nn.Module = nn.Identity()
        if not straight:
            self.aside = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.aside(x))


def residual_network(width: int) -> nn.Module:
    """ResNet-50, if the width is 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            inner = width * 2**stage
            layers.append(Bottleneck(inputs, inner, 2 if stage and not block else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Transformer(nn.Module):
    """GPT-2 small, if there are 12 layers of 768."""

    def __init__(self, layers: int, embedding: int, words: int, tokens: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, embedding)
        self.places = nn.Parameter(torch.zeros(tokens, embedding))
        heads = max(embedding // 64, 1)
        layer = nn.TransformerEncoderLayer(
            embedding, heads, 4 * embedding, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(embedding), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(tokens))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.words(x) + self.places, mask=self.mask, is_causal=True)
        return hidden @ self.words.weight.T


def make_training(
    kind: str, sizes: Sizes, device: torch.device
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a network, and a function that returns the loss of the network or of a wrapper of it."""
    torch.manual_seed(0)
    if kind == "ResNet-50":
        net = residual_network(sizes.width)
        x = torch.randn(sizes.images, 3, sizes.image, sizes.image, device=device)
        y = torch.randint(1000, (sizes.images,), device=device)
    else:
        net = Transformer(sizes.layers, sizes.embedding, sizes.words, sizes.tokens)
        x = torch.randint(sizes.words, (sizes.sequences, sizes.tokens), device=device)
        y = torch.randint(sizes.words, (sizes.sequences * sizes.tokens,), device=device)

    def loss_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            output = model(x)
        return nn.functional.cross_entropy(output.float().reshape(len(y), -1), y)

    return net.to(device), loss_of


def time_steps(device: torch.device, steps: int, step: Callable[[], None]) -> list[float]:
    """Return the mean milliseconds of a step in each of several blocks, after one that warms up."""
    found = []
    for _ in range(6):
        settle(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        settle(device)
        found.append(1000 * (time.perf_counter() - start) / steps)
    return found[1:]


def plain_steps(kind: str, sizes: Sizes, name: str) -> list[float]:
    """Step with torch's own DDP in a group of one, in this process."""
    import torch.distributed as dist

    device = torch.device(name)
    library = "nccl" if name == "cuda" else "gloo"
    dist.init_process_group(library, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    net, loss_of = make_training(kind, sizes, device)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    found = time_steps(device, sizes.steps, step)
    dist.destroy_process_group()
    return found


def elastic_steps(kind: str, sizes: Sizes, commit: str) -> dict[str, list[float]]:
    """Step in a world of one, with a commit after each step, and without commits where copies are kept."""
    import spark_elastic as se

    device = se.device()
    net, loss_of = make_training(kind, sizes, device)
    model = se.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)
    state = se.TorchState(model=model, optimizer=optimizer, commit=commit)
    found: dict[str, list[float]] = {}

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    def step_and_commit() -> None:
        step()
        state.commit()

    @se.elastic
    def train(state: Any) -> None:
        found["with"] = time_steps(device, sizes.steps, step_and_commit)
        if commit != "in_place":
            found["without"] = time_steps(device, sizes.steps, step)
            state.commit()

    train(state)
    return found


def steps(device: str, sizes: Sizes) -> Figures:
    found: Figures = {}
    for kind in ("ResNet-50", "GPT-2 small"):
        plain = plain_steps(kind, sizes, device)
        copy = run_alone(device, elastic_steps, kind, sizes, "copy")
        in_place = run_alone(device, elastic_steps, kind, sizes, "in_place")
        plain += plain_steps(kind, sizes, device)  # on both sides of what it is compared with
        median = summarize(plain).median
        kind = kind if device == "cuda" else f"a very small {kind}"
        found[f"{kind}, a step with plain DDP"] = figure(plain, "ms")
        for name, times, wanted in (
            ("without commits", copy["without"], "at most 1.01 times plain"),
            ("commit=copy", copy["with"], "at most 1.02 times the step without"),
            ("commit=in_place", in_place["with"], "at most 1.01 times plain"),
        ):
            note = f"= {summarize(times).median / median:.4g} times plain"
            found[f"{kind}, {name}"] = figure(times, "ms", wanted, note)
    return found


# ---------------------------------------------------------------- losses and joins


def train_at_a_pace(steps: int, pace: float, parameters: int) -> None:
    """Train a small network beside a large tensor of the state."""
    import spark_elastic as se

    device = se.device()
    model = se.DistributedDataParallel(nn.Sequential(nn.Linear(360, 360), nn.ReLU(), nn.Linear(360, 360)).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    large = torch.ones(parameters, device=device)
    state = se.TorchState(model=model, optimizer=optimizer, step=0, large=large)

    @se.elastic
    def loop(state: Any) -> None:
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.randn(16, 360, device=device)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            time.sleep(pace)

    loop(state)


def resets_of(device: str, sizes: Sizes, workers: int, victims: Sequence[int], parameters: int) -> list[Any]:
    """Kill these ranks one after the other, each of them replaced; return what each reset has cost those who trained on."""
    events: list[dict[str, Any]] = []
    faults = [kill(rank=victim, step=sizes.between * turn) for turn, victim in enumerate(victims, 1)]
    arguments = (sizes.between * (len(victims) + 1), 0.02, parameters)
    with cluster(device, workers) as made, inject(*faults):
        spark_elastic.run(train_at_a_pace, arguments, local=made, min_np=1, num_proc=workers, on_event=events.append)
    return [reset for reset in find_resets([read_event(event) for event in events]) if reset.parts]


def loss(device: str, sizes: Sizes) -> Figures:
    resets = resets_of(device, sizes, workers=4, victims=(0, 1, 0, 1, 0), parameters=1)
    times = [sum(reset.parts.values()) for reset in resets if reset.kind is Kind.LOSS]
    return {"a kill to the survivors' next step, four workers": figure(times, "s", "at most 0.15 s")}


def join(device: str, sizes: Sizes) -> Figures:
    resets = resets_of(device, sizes, workers=2, victims=(1, 1, 1, 1), parameters=sizes.parameters)
    size = f"{4 * sizes.parameters / 1e9:.3g} GB"
    joins = [reset for reset in resets if reset.kind is Kind.JOIN and reset.lost is not None]
    parts = ((part.value, summarize([reset.parts.get(part, 0.0) for reset in joins]).median) for part in Part)
    note = "of which " + ", ".join(f"{name} {median:.3g}" for name, median in parts if median >= 0.01)
    return {f"pause for a newcomer that gets {size}": figure([reset.lost or 0.0 for reset in joins], "s", "", note)}


# ---------------------------------------------------------------- rows


def write_rows(folder: Path, rows: int) -> str:
    """Write rows of 64 floats and a label, in 32 row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = numpy.random.default_rng(0)
    values = pa.FixedSizeListArray.from_arrays(pa.array(random.random(64 * rows, dtype=numpy.float32)), 64)
    table = pa.table({"x": values, "y": random.random(rows, dtype=numpy.float32)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=max(rows // 32, 1))
    return folder.as_uri()


def loader(device: str, sizes: Sizes) -> Figures:
    batch = 4096
    target = torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        url = write_rows(Path(folder), sizes.rows)
        from_files = []
        source = spark_elastic.data.ParquetLoader(url, batch)
        for epoch in range(4):
            source.set_epoch(epoch)
            start = time.perf_counter()
            for rows in source:
                total = rows["x"].to(target, non_blocking=True).sum()
            settle(target)
            from_files.append(sizes.rows / (time.perf_counter() - start) / MILLION)
        source.close()
    x = torch.rand(sizes.rows, 64)
    from_memory = []
    for _ in range(4):
        order = torch.randperm(sizes.rows)
        start = time.perf_counter()
        for begin in range(0, sizes.rows, batch):
            chosen = x[order[begin : begin + batch]]
            chosen = chosen.pin_memory() if device == "cuda" else chosen
            total = chosen.to(target, non_blocking=True).sum()
        settle(target)
        from_memory.append(sizes.rows / (time.perf_counter() - start) / MILLION)
    assert float(total) > 0
    return {
        "rows of 64 floats from Parquet into the device": figure(from_files[1:], "M rows/s"),
        "the same from memory, shuffled": figure(from_memory[1:], "M rows/s"),
    }


def fit_rows(plan: Any) -> Any:
    from spark_elastic.estimator.training import train

    return train(plan)


def fit(device: str, sizes: Sizes) -> Figures:
    """Train as a fit does, without Spark: the plan that a worker gets, from rows that lie in Parquet already."""
    import cloudpickle

    from spark_elastic.estimator.layout import Input, Layout
    from spark_elastic.estimator.objective import Objective
    from spark_elastic.estimator.plan import DataPlan, StepPlan, TrainingPlan

    with tempfile.TemporaryDirectory() as folder:
        url = write_rows(Path(folder), sizes.rows)
        plan = TrainingPlan(
            run_id="gpu", model=nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)),
            layout=Layout((Input(None, ("x",)),), ("y",), None), objective=Objective((nn.MSELoss(),)),
            data=DataPlan(
                training_url=url, validation_url=None, batch_size=None, global_batch_size=4096, validation_batch_size=None,
                shuffle=True, seed=0,
            ),
            steps=StepPlan(optimizer=torch.optim.Adam, optimizer_arguments={"lr": 1e-3}), epochs=4, steps_per_epoch=None,
            checkpoint_steps=None, seed=0, callbacks=cloudpickle.dumps([]), callbacks_given="[]", log_url=None,
            use_gpu=device == "cuda" or None,
        )  # fmt: skip
        trained = run_alone(device, fit_rows, plan)
    rates = [entry["rows"] / entry["seconds"] / MILLION for entry in trained.history]
    return {"training of an estimator, one worker, batches of 4096": figure(rates[1:], "M rows/s")}


FIGURES: dict[str, Callable[[str, Sizes], Figures]] = {
    "commit": commit,
    "steps": steps,
    "loss": loss,
    "join": join,
    "loader": loader,
    "fit": fit,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=tuple(FIGURES))
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--out", help="write the JSON into this file, too")
    options = parser.parse_args()
    found = FIGURES[options.figure](options.device, SIZES[options.device])
    text = json.dumps(found)
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
