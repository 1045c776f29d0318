"""Networks and functions for estimators; pickled by value, as executors do not have the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spark_elastic.loggers import Logger


def dense(width: int = 3, hidden: int = 8, outputs: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs)]
    return torch.nn.Sequential(*layers)


class Weighted(torch.nn.Module):
    """The sum of its columns, given side by side or apart, each times a factor."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = torch.nn.Parameter(torch.tensor(factors))

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        x = columns[0] if len(columns) == 1 else torch.stack(columns, 1)
        return x.float() @ self.factors


class RowCounter(torch.nn.Module):
    """A weight per row of the dataset that goes up by the learning rate over the global batch when the row counts."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.seen[ids]


def count_row(model: Any, batch: Any, ctx: Any) -> Any:
    """A trainStep; the learning rate takes back the mean over the global batch."""
    import spark_elastic as se

    rows = torch.tensor([float(ctx.rows)])
    ctx.optimizer.param_groups[0]["lr"] = float(se.allreduce(rows, op="sum"))
    return -model(batch["id"]).mean()


def mean_of_rows(model: Any, batch: Any, ctx: Any) -> Any:
    """A trainStep without a collective of its own, which counts rows where all steps have as many as the learning rate says."""
    return -model(batch["id"]).mean()


def count_row_beside_a_slow_rank(model: Any, batch: Any, ctx: Any) -> Any:
    """The same, where rank 1 takes three times as long for a row as the others."""
    import time

    import spark_elastic as se

    loss = count_row(model, batch, ctx)
    time.sleep(len(batch["id"]) * (0.003 if se.rank() == 1 else 0.001))
    return loss


def row_counter(rows: int, **params: Any) -> Any:
    """An estimator whose model tells, for each row, how often it has counted; ``id`` is the rows' column."""
    from spark_elastic.estimator import TorchEstimator

    return TorchEstimator(
        model=RowCounter(rows), featureCols=["id"], learningRate=1.0, optimizer=torch.optim.SGD, trainStep=count_row,
        globalBatchSize=50, verbose=0, **{"adaptiveNp": False, **params},
    )  # fmt: skip


class TwoHeads(torch.nn.Module):
    """Keyword inputs with an embedding, and two outputs: one number, and logits of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 2)
        self.body = torch.nn.Linear(4, 8)
        self.number, self.kind = torch.nn.Linear(8, 1), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.body(torch.cat([x, self.table(code[:, 0])], 1)))
        return self.number(hidden), self.kind(hidden)


class WithCategories(torch.nn.Module):
    """Takes a vector, and the indexes of two columns of categories side by side."""

    def __init__(self, sizes: tuple[int, int] = (3, 5), width: int = 2, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(size, 4) for size in sizes)
        self.head = torch.nn.Linear(width + 4 * len(sizes), outputs)

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        looked_up = [table(codes[:, place]) for place, table in enumerate(self.tables)]
        return self.head(torch.cat([x, *looked_up], 1))


class Brightness(torch.nn.Module):
    """Takes six bytes, and has one weight for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        assert pixels.dtype == torch.int64
        assert pixels.shape[1] == 6
        return self.weight * pixels.float().mean(1) / 255


class SumOfList(torch.nn.Module):
    """Takes lists of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(1, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        sums = torch.stack([row.sum() for row in values.unbind()])
        return self.scale(sums.unsqueeze(1))


class Marker:
    """A callback that notes each epoch's end in a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_epoch_end(self, ctx: Any) -> None:
        with open(self.path, "a") as file:
            file.write(f"{ctx.epoch}\n")


class Recorder:
    """A callback that keeps what it saw, and stops."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.epochs: list[int] = []
        self.begun: list[int] = []
        self.steps: list[int] = []

    def on_fit_begin(self, ctx: Any) -> None:
        self.begun.append(ctx.epoch)

    def on_batch_end(self, ctx: Any) -> None:
        self.steps.append(ctx.step)

    def on_epoch_end(self, ctx: Any) -> None:
        self.epochs.append(ctx.epoch)
        ctx.metrics["begun"], ctx.metrics["last_step"] = self.begun, self.steps[-1]
        ctx.metrics["seen_by_callback"] = len(self.epochs)
        if ctx.epoch == self.last:
            ctx.stop()


class SlowAtTheEnd:
    """A callback that takes its time when a fit ends, and appends the place of the end to a file."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds

    def on_fit_end(self, ctx: Any) -> None:
        import time

        time.sleep(self.seconds)
        with open(self.path, "a") as file:
            file.write(f"{ctx.epoch}/{ctx.step}\n")


class Endings(Logger):
    """A logger that writes to a file how a job has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, resumes: str | None) -> None: ...

    def named(self, run_id: str) -> None: ...

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None: ...

    def finish(self, error: str | None) -> None:
        self.path.write_text(str(error))


class SlowExchange:
    """A callback that makes ranks wait for each other after each step, the longer the more there are, until one trains alone.

    It stops after three more epochs: one worker may be tried near the end of an epoch, and is timed for some 25 steps.
    """

    alone = 0

    def on_batch_end(self, ctx: Any) -> None:
        import time

        import spark_elastic as se
        from spark_elastic.data import stopwatch

        stopwatch.LEAST_SECONDS = 0.2
        time.sleep(0.08 * se.size())

    def on_epoch_end(self, ctx: Any) -> None:
        import spark_elastic as se

        self.alone += se.size() == 1
        if self.alone > 3:
            ctx.stop()


def absolute_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean()


class AnyShapes(torch.nn.Module):
    """Takes columns of any shapes. ``u`` is the sum of a row's numbers and ``v`` ten times that; form: how they are returned."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.factors = torch.nn.Parameter(torch.tensor([1.0, 10.0]))

    def forward(self, *columns: torch.Tensor, **named: torch.Tensor) -> Any:
        given = [*columns, *named.values()]
        total = torch.stack([column.float().reshape(len(column), -1).sum(1) for column in given]).sum(0)
        u, v = total * self.factors[0], total * self.factors[1]
        forms = {"number": u, "matrix": u[:, None], "vector": torch.stack([u, v], 1), "dict of one": {"any": u}}
        return {**forms, "tuple": (u, v), "dict": {"v": v, "u": u}}[self.form]


class HalfUsed(torch.nn.Module):
    """One layer makes the output, and nothing depends on another."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(inputs, 1), torch.nn.Linear(inputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class OtherwiseInEvaluation(torch.nn.Module):
    """A network that ends in another step while it is evaluated."""

    def __init__(self, last: torch.nn.Module, in_training: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.last, self.in_training = torch.nn.Linear(1, 2), last, in_training or torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after = self.in_training if self.training else self.last
        return after(self.body(x))


class Logarithm(torch.nn.Module):
    """Return the logarithm of a number, so many times; NaN below 0."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 1).log().repeat(1, self.times)


class SigmoidByHand(torch.nn.Module):
    """Return the probability of class 1, by arithmetic that does not show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / (1 + (-x).exp())
