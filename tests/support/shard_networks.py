"""Trainings on shards whose every bit is compared between worlds; pickled by value, as workers do not have the tests.

The classes live in a function, because one that torch and cloudpickle find by its module's name would not be pickled by value.
"""

from __future__ import annotations

from typing import Any

ROWS, BATCH, SHARDS = 107, 30, 8


def cases() -> dict[str, Any]:
    """The trainings by name. Each has models, optimizers, other parts of the state, and a step for a batch."""
    import torch
    from torch import nn

    import spark_elastic as se

    class Training:
        """One network and one optimizer, with the cross entropy of three classes."""

        def __init__(self) -> None:
            torch.manual_seed(1)
            self.models = {"model": se.DistributedDataParallel(self.network())}
            self.optimizers = {"optimizer": self.optimizer()}
            self.others: dict[str, Any] = {}

        @property
        def model(self) -> Any:
            return self.models["model"]

        def optimizer(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

        def network(self) -> nn.Module:
            raise NotImplementedError

        def loss(self, part: Any) -> Any:
            x, _, y = part
            return nn.functional.cross_entropy(self.model(x).float(), y)

        def step(self, batch: Any) -> list[float]:
            (optimizer,) = self.optimizers.values()
            optimizer.zero_grad()
            losses = self.loop(self.model, batch, self.loss)
            self.before_step()
            optimizer.step()
            return losses

        def before_step(self) -> None:
            pass

        def loop(self, model: Any, batch: Any, loss_of: Any) -> list[float]:
            parts = model.parts(batch)
            for part in parts:
                loss = loss_of(part)
                loss.backward()
                parts.note(loss=loss)
            return [parts.means["loss"]]

    class Dense(Training):
        def network(self) -> nn.Module:
            return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Dropout(0.3), nn.Linear(33, 3))

        def optimizer(self) -> Any:
            optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return optimizer

        def before_step(self) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
            self.scheduler.step()

    class Convolutions(Training):
        def network(self) -> nn.Module:
            return nn.Sequential(
                nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.2),
                nn.Flatten(), nn.Linear(24, 3),
            ).to(memory_format=torch.channels_last)  # fmt: skip

        def optimizer(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)

        def before_step(self) -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    class Attention(Training):
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(11, 16)
                self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)
                self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

            def forward(self, tokens: Any) -> Any:
                q, k, v = self.qkv(self.table(tokens)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
                attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
                return self.out(self.layer(attended.transpose(1, 2).flatten(2)).mean(1))

        def network(self) -> nn.Module:
            return self.Block()

        def loss(self, part: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return nn.functional.cross_entropy(self.model(part[1]), part[2])

    class Recurrent(Training):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(4, 10, num_layers=2, dropout=0.3, batch_first=True)
                self.out = nn.Linear(10, 3)

            def forward(self, x: Any) -> Any:
                return self.out(self.lstm(x.view(-1, 4, 4))[0][:, -1])

        def network(self) -> nn.Module:
            return self.Net()

    class Sparse(Training):
        def network(self) -> nn.Module:
            return nn.Sequential(nn.EmbeddingBag(11, 5, sparse=True, mode="sum"), nn.ReLU(), nn.Linear(5, 3))

        def optimizer(self) -> Any:
            table, *dense = self.model.parameters()
            self.dense = torch.optim.Adagrad(dense, lr=0.1)
            return torch.optim.SparseAdam([table], lr=0.1)

        def step(self, batch: Any) -> list[float]:
            self.dense.zero_grad()
            losses = super().step(batch)
            assert next(self.model.parameters()).grad.is_sparse
            self.dense.step()
            return losses

        def loss(self, part: Any) -> Any:
            return nn.functional.cross_entropy(self.model(part[1]), part[2])

    class Adversaries(Training):
        def __init__(self) -> None:
            torch.manual_seed(1)
            makes = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 16))
            judges = nn.Sequential(nn.Linear(16, 12), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(12, 1))
            self.models = {
                "generator": se.DistributedDataParallel(makes), "judge": se.DistributedDataParallel(judges),
            }  # fmt: skip
            self.optimizers = {
                name: torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9))
                for name, model in self.models.items()
            }
            self.others = {}

        def judged(self, part: Any) -> Any:
            generator, judge = self.models.values()
            made = generator(torch.randn(len(part[0]), 4)).detach()
            real = part[0].clone().requires_grad_()
            score = judge(real)
            # A penalty on the gradient, which is differentiated twice.
            (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            return (
                nn.functional.softplus(judge(made)).mean()
                + nn.functional.softplus(-score).mean()
                + 0.1 * slope.square().sum(1).mean()
            )

        def generated(self, part: Any) -> Any:
            generator, judge = self.models.values()
            return nn.functional.softplus(-judge(generator(torch.randn(len(part[0]), 4)))).mean()

        def step(self, batch: Any) -> list[float]:
            losses = []
            for name, loss_of in (("judge", self.judged), ("generator", self.generated)):
                self.optimizers[name].zero_grad()
                losses += self.loop(self.models[name], batch, loss_of)
                self.optimizers[name].step()
            return losses

    class Tied(Training):
        """The table is also the last layer. Gradients of two batches are accumulated for one step."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(11, 8)
                self.body = nn.GRU(8, 8, batch_first=True)
                self.out = nn.Linear(8, 11, bias=False)
                self.out.weight = self.table.weight

            def forward(self, tokens: Any) -> Any:
                return self.out(self.body(self.table(tokens))[0])

        def network(self) -> nn.Module:
            return self.Net()

        def loss(self, part: Any) -> Any:
            return nn.functional.cross_entropy(self.model(part[1][:, :-1]).flatten(0, 1), part[1][:, 1:].flatten())

        def step(self, batch: Any) -> list[float]:
            self.optimizers["optimizer"].zero_grad()
            losses = self.loop(self.model, batch, self.loss) + self.loop(self.model, batch, self.loss)
            self.optimizers["optimizer"].step()
            return losses

    class Unused(Training):
        """Only some shards use the second head, at some steps none; the third is never used."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Linear(16, 8)
                self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

            def forward(self, x: Any) -> Any:
                return self.heads[int(x[0, 0] > 0.9)](torch.relu(self.body(x)))

        def network(self) -> nn.Module:
            return self.Net()

    class Scaled(Training):
        """Half precision with a scaler, whose scale is too large at first; one parameter is of another dtype."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))
                self.temperature = nn.Parameter(torch.ones(3, dtype=torch.float64))

            def forward(self, x: Any) -> Any:
                return self.body(x) * self.temperature.float()

        def network(self) -> nn.Module:
            return self.Net()

        def __init__(self) -> None:
            super().__init__()
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2, backoff_factor=2.0**-90)
            self.others = {"scaler": self.scaler}

        def step(self, batch: Any) -> list[float]:
            optimizer = self.optimizers["optimizer"]
            optimizer.zero_grad()
            parts = self.model.parts(batch)
            for x, _, y in parts:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(self.model(x), y)
                self.scaler.scale(loss).backward()
                parts.note(loss=loss)
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(optimizer)
            self.scaler.update()
            return [parts.means["loss"]]

    class OwnBuffers(Training):
        """A module that puts new tensors in the place of its buffer, and two backward passes in a part."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Linear(16, 3)
                self.register_buffer("center", torch.zeros(3))
                self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

            def forward(self, x: Any) -> Any:
                out = self.body(x)
                self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
                return out - self.center

        def network(self) -> nn.Module:
            return self.Net()

        def loss(self, part: Any) -> Any:
            self.model(part[0]).square().mean().backward()
            return super().loss(part)

    return {kind.__name__: kind for kind in (
        Dense, Convolutions, Attention, Recurrent, Sparse, Adversaries, Tied, Unused, Scaled, OwnBuffers,
    )}  # fmt: skip


def dataset() -> Any:
    import torch

    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(ROWS, 16, generator=generator), torch.randint(0, 11, (ROWS, 6), generator=generator)
    return torch.utils.data.TensorDataset(*rows, torch.randint(0, 3, (ROWS,), generator=generator))


def digest(training: Any, losses: list[float]) -> str:
    """The SHA-256 of weights, buffers, the state of optimizers and of the rest, and the losses."""
    import hashlib

    import torch
    from torch.utils import _pytree as pytree

    found = hashlib.sha256(repr(losses).encode())
    for part in (*training.models.values(), *training.optimizers.values(), *training.others.values()):
        for path, leaf in pytree.tree_flatten_with_path(part.state_dict())[0]:
            data = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if isinstance(
                leaf, torch.Tensor
            ) else repr(leaf).encode()  # fmt: skip
            found.update(repr(path).encode() + data)
    return found.hexdigest()
