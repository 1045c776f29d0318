"""What the user's functions may make: each rank has its rows of it, whatever the shapes, and anything else is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_world import on_ranks, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from spark_elastic import DistributedDataParallel
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.state.fully_sharded.model import Factories, ShardedModel

SIZE = 4


class Net(nn.Module):
    """Rows that four ranks share unevenly, or that some get none of; tied, frozen and of three dimensions; with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 7)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.out = nn.Linear(7, 10, bias=False)
        self.out.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1, 7, 1))
        self.register_buffer("places", torch.arange(7.0), persistent=False)

    def reset_parameters(self) -> None:
        """Give what is this module's own its values."""
        nn.init.ones_(self.scale)
        self.places.copy_(torch.arange(7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.frozen(self.norm(self.embedding(x))) * self.scale[0, :, 0] + self.places
        result: torch.Tensor = self.out(x.to(self.out.weight.dtype))
        return result


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def shard(module: nn.Module, mesh: Any) -> None:
    fully_shard(module.frozen, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(module, mesh=mesh)


def in_half_precision(module: nn.Module, mesh: Any) -> None:
    # BatchNorm's running means and variances stay in full precision, and on CPUs its weights have to, too.
    full = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    fully_shard(module.norm, mesh=mesh, mp_policy=full)  # type: ignore[arg-type]
    fully_shard(module, mesh=mesh, mp_policy=half)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def made(build: Callable[[], Any] = on_meta, is_first: bool = True, generation: int = 1, **other: Any) -> ShardedModel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(f"generation_{generation}",))
    return ShardedModel(Factories(**{"build": build, "shard": shard, "optimizer": adam, **other}), mesh, is_first)


def step(model: ShardedModel) -> None:
    model.optimizer.zero_grad()
    nn.functional.cross_entropy(model.module(torch.arange(10)), torch.arange(10)).backward()
    model.optimizer.step()
    if model.scheduler is not None:
        model.scheduler.step()


def _carried_over(folder: Path, rank: int, is_on_meta: bool, shard: Callable[..., None]) -> tuple[Any, ...]:
    """Train, hand all that a commit keeps to a new model, train both on, and return what has become of them."""
    torch.manual_seed(rank)
    with world(folder, rank, SIZE, []):
        first = made(on_meta if is_on_meta else Net, shard=shard, scheduler=step_lr)
        before = [value.full_tensor().tolist() for value in first.module.parameters()]  # type: ignore[attr-defined]
        drawn = float(torch.rand(()))
        step(first)
        torch.manual_seed(rank + SIZE)
        second = made(on_meta, is_first=False, generation=2, shard=shard, scheduler=step_lr)
        kept = first.divided()
        second.prepare(first.small(), list(kept))
        for name, room in second.divided().items():
            room.copy_(kept[name])
        for _ in range(3):
            step(first)
            step(second)
        same = [torch.equal(a, b) for a, b in zip(first.divided().values(), second.divided().values(), strict=True)]
        buffers = [torch.equal(a, b) for a, b in zip(first.module.buffers(), second.module.buffers(), strict=True)]
        rates = [model.optimizer.param_groups[0]["lr"] for model in (first, second)]
        names = [(part.parameter, part.key) for part in second.divided()]
        is_tied = second.module.out.weight is second.module.embedding.weight  # type: ignore[union-attr]
        return before, drawn, all(same) and all(buffers), rates, names, is_tied


@pytest.mark.parametrize(("is_on_meta", "shard"), [(True, shard), (False, shard), (True, in_half_precision)])
def test_a_model_that_is_made_again_trains_on_with_the_same_bits(is_on_meta: bool, shard: Callable[..., None]) -> None:
    results = on_ranks(SIZE, _carried_over, is_on_meta, shard)
    for before, _, is_same, rates, names, is_tied in results:
        assert is_same
        assert is_tied
        assert rates == [pytest.approx(0.0001)] * 2
        assert ("embedding.weight", "exp_avg") in names
        assert ("frozen.weight", "exp_avg") not in names, "it has no gradient"
        assert before == results[0][0], "all begin with the values of rank 0"
    torch.manual_seed(0)
    assert results[0][1] == float(torch.rand(())), "making a model draws nothing from the generator that training uses"
    torch.manual_seed(0)
    if not is_on_meta:
        assert results[0][0] == [value.tolist() for value in Net().parameters()], "those that it was built with"


class Noisy(nn.Module):
    """Its buffer is another tensor once ``reset_parameters`` has drawn its values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("noise", torch.zeros(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.noise = torch.rand(4)


def _drawn(folder: Path, rank: int) -> list[float]:
    torch.manual_seed(rank)
    with world(folder, rank, 2, []):
        noise: torch.Tensor = made(lambda: Noisy().to("meta"), shard=whole).module.noise  # type: ignore[assignment]
        return noise.tolist()  # type: ignore[no-any-return]


def test_a_buffer_that_is_made_anew_when_it_gets_its_values_has_those_of_rank_0() -> None:
    first, second = on_ranks(2, _drawn)
    assert first == second


def test_what_was_frozen_or_in_evaluation_mode_at_the_commit_still_is(alone: None) -> None:
    first, second = made(), made(is_first=False, generation=2)
    first.module.frozen.requires_grad_(True)  # type: ignore[operator]
    first.module.embedding.requires_grad_(False)  # type: ignore[operator]
    first.module.norm.eval()  # type: ignore[operator]
    second.prepare(first.small(), list(first.divided()))
    trained = {name: parameter.requires_grad for name, parameter in second.module.named_parameters()}
    assert trained == {name: name != "embedding.weight" for name in trained}
    assert [part.training for part in (second.module, second.module.norm)] == [True, False]


class Counting(Net):
    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_extra_state_of_the_module_is_that_of_the_commit(alone: None) -> None:
    first, second = made(Counting), made(Counting, is_first=False, generation=2)
    first.module.calls = 3  # type: ignore[assignment]
    second.prepare(first.small(), list(first.divided()))
    assert second.module.calls == 3


# ---------------------------------------------------------------- refusals


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(module: nn.Module, mesh: Any) -> None:
    fully_shard(module, mesh=mesh)


def by_columns(module: nn.Module, mesh: Any) -> None:
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))


def over_another_mesh(module: nn.Module, mesh: Any) -> None:
    fully_shard(module, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("mine",)))


def parted(module: nn.Module, mesh: Any) -> None:
    fully_shard(module.embedding, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(module, mesh=mesh)


class Unset(nn.Module):
    """A module without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


class Forgetful(Unset):
    """A module whose reset_parameters forgets a buffer."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class MoreForgetful(Unset):
    """A module whose reset_parameters forgets a parameter."""

    def reset_parameters(self) -> None:
        self.mask.fill_(True)  # type: ignore[operator]


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"build": lambda: 3}, TypeError, r"build= has to return a torch\.nn\.Module, not int"),
        ({"build": lambda: DistributedDataParallel(Net())}, SparkElasticError, "leave DistributedDataParallel out"),
        ({"build": half_on_meta}, SparkElasticError, r"has made 0\.weight with values and other tensors on the meta"),
        (
            {"build": lambda: Unset().to("meta"), "shard": whole},
            SparkElasticError,
            "has made the module on the meta device, and it has no method reset_parameters",
        ),
        (
            {"build": lambda: Forgetful().to("meta"), "shard": whole},
            SparkElasticError,
            "reset_parameters of the module has given no values to mask, which build= has made on the meta device",
        ),
        (
            {"build": lambda: MoreForgetful().to("meta"), "shard": whole},
            SparkElasticError,
            "reset_parameters of the module has given no values to weight",
        ),
        (
            {"shard": parted},
            SparkElasticError,
            r"has parted what was one parameter \(embedding\.weight and out\.weight\)",
        ),
        ({"shard": lambda module, mesh: None}, SparkElasticError, "has left scale whole; call fully_shard"),
        ({"shard": by_columns}, SparkElasticError, r"has divided scale as \(Shard\(dim=2\),\).*shard_placement_fn"),
        ({"shard": over_another_mesh}, SparkElasticError, "give fully_shard the mesh that shard= gets"),
        ({"optimizer": lambda parameters: 3}, TypeError, "optimizer= has to return a torch.optim.Optimizer, not int"),
        (
            {"optimizer": lambda parameters: adam(list(Net().parameters()))},
            SparkElasticError,
            "an optimizer of the parameters that it gets, and no others",
        ),
        ({"scheduler": lambda optimizer: 3}, TypeError, "scheduler= has to return a scheduler of torch.optim, not int"),
    ],
)
def test_what_cannot_be_divided_by_rows_is_refused_with_what_to_write(
    alone: None, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        made(**given)


def test_a_model_of_other_parameters_than_the_last_commits_is_refused(alone: None) -> None:
    first, second = made(), made(lambda: nn.Linear(2, 2), shard=whole)
    with pytest.raises(SparkElasticError, match="has to make the same model in each generation"):
        second.prepare(first.small(), list(first.divided()))


@pytest.mark.parametrize("key", ["table", "history"])
def test_an_optimizer_whose_state_is_not_divided_as_the_parameters_are_is_refused(alone: None, key: str) -> None:
    model = made()
    step(model)
    state = next(iter(model.optimizer.state.values()))
    state[key] = {"table": torch.ones(3), "history": [1]}[key]
    with pytest.raises(SparkElasticError, match=f"Adam keeps {key} of scale, which is not divided by rows"):
        model.small()


def test_parameter_groups_that_the_next_optimizer_would_lack_are_refused(alone: None) -> None:
    model = made()
    model.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(SparkElasticError, match="has 2 parameter groups, and optimizer= has made 1; make all of them"):
        model.small()
