"""Attributes that training carries on and commits leave out are named; what is only set anew, or kept, is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import swa_utils

from spark_elastic.worker.checks.unkept_attributes import OPTIMIZERS, STEPS, UnkeptAttributes
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer


def told(
    *models: nn.Module,
    optimizer: Any = None,
    local: dict[str, Any] | None = None,
    after_step: Callable[[], object] = lambda: None,
    steps: int = STEPS[-1] + 2,
    **others: Any,
) -> list[str]:
    """Train a model for a few steps, and return what is told of the objects of its State."""
    used = optimizer or torch.optim.SGD(models[0].parameters(), lr=0.1)
    shared, attributes, texts = {"model": list(models), "optimizer": used, **others}, UnkeptAttributes(), []
    inner = used if isinstance(used, torch.optim.Optimizer) else used.optimizer
    for _ in range(steps):
        used.zero_grad(set_to_none=False)
        sum(model(torch.randn(3, 2)).square().sum() for model in models).backward()
        texts += attributes.look(inner, lambda: shared, lambda: local or {})
        used.step(*[lambda: models[0](torch.ones(3, 2)).sum()] if isinstance(used, torch.optim.LBFGS) else [])
        after_step()
    return texts


def named(texts: list[str]) -> list[str]:
    return [text.removeprefix("the attribute").removeprefix("s").partition(" change")[0].strip() for text in texts]


class Module(nn.Module):
    """A layer with an attribute, and what each forward does to it."""

    def __init__(self, value: Any, change: Callable[[Any], object] = lambda value: None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.value, self.change = value, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.value)
        return self.layer(x)  # type: ignore[no-any-return]


class Counter(Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value += 1
        return super().forward(x)


class LastOnes(Module):
    """Stores what each forward computes, and reads it only afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.attention, self.value = y.softmax(1).detach(), float(y.detach().sum())
        self.losses = {"loss": self.value, "map": self.attention, "counts": [len(x)]}
        self.change(self.value)
        return y * self.attention.mean() + 0 * self.value  # type: ignore[no-any-return]


class Longest(Module):
    """Keeps a table that grows with its longest input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.value + 1 + self.value // 3
        if rows > self.value:
            self.value = rows
            self.table = torch.arange(rows)
        return super().forward(x)


class ExtraState(Counter):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls so far": self.value}


def draw(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        torch.rand(1, generator=generator)
    else:
        generator.random()


def count_first(counts: Any) -> None:
    counts[0] += 1


def add(tensors: Any) -> None:
    for tensor in tensors:
        tensor.add_(1)


CARRIED: dict[str, Callable[[], nn.Module]] = {
    "a counter": lambda: Counter(0),
    "numpy's counter": lambda: Counter(numpy.int64(0)),
    "a tensor that changes in place": lambda: Module(torch.zeros(2), lambda value: value.add_(1)),
    "tensors in a list": lambda: Module([torch.zeros(2)], add),
    "a view of a tensor's data": lambda: Module([torch.zeros(2)], lambda value: value[0].data.add_(1)),
    "tensors in a dict of lists": lambda: Module({"of": [torch.zeros(2)]}, lambda value: add(value["of"])),
    "numbers in a list": lambda: Module([0], count_first),
    "a frozen parameter in a list": lambda: Module([nn.Parameter(torch.zeros(2), requires_grad=False)], add),
    "torch's generator": lambda: Module(torch.Generator(), draw),
    "numpy's generator": lambda: Module(numpy.random.default_rng(0), draw),
    "Python's generator": lambda: Module(random.Random(0), draw),
    "generators in a list": lambda: Module([torch.Generator()], lambda value: draw(value[0])),
}


@pytest.mark.parametrize("what", CARRIED)
def test_an_attribute_that_a_module_carries_on_is_named_once(what: str) -> None:
    model = nn.Sequential(CARRIED[what]())
    (text,) = told(DistributedDataParallel(model))
    assert named([text]) == ["state.model[0].module.0.value"]
    assert "register_buffer" in text


def count_calls(module: nn.Module, *args: object) -> None:
    module.calls += 1  # type: ignore[operator]


def test_an_attribute_that_a_hook_carries_on_is_named() -> None:
    model = Module(None)
    model.calls = 0
    model.register_forward_hook(count_calls)
    assert named(told(model)) == ["state.model[0].calls"]


class Own(torch.optim.SGD):
    """An optimizer with a counter, an average and a generator of its own, as chosen."""

    def __init__(self, parameters: Any, **own: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.own = own
        self.last_norm = 0.0
        if "calls" in own:
            self.calls = 0
        if "ema" in own:
            self.ema: dict[Any, torch.Tensor] = {}
        if "counts" in own:
            self.counts: dict[Any, int] = {}
        if "generator" in own:
            self.generator = torch.Generator()

    def step(self, closure: Any = None) -> None:
        if "calls" in self.own:
            self.calls += 1
        for parameter in self.param_groups[0]["params"]:
            self.last_norm = float(parameter.grad.norm())
            if "ema" in self.own:
                self.ema.setdefault(parameter, torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            if "counts" in self.own:
                self.counts[parameter] = self.counts.get(parameter, 0) + 1
            if "generator" in self.own:
                torch.rand(1, generator=self.generator)
        super().step(closure)


class Saving(Own):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "n": self.calls, "averages": [each.clone() for each in self.ema.values()]}


@pytest.mark.parametrize("own", ["calls", "ema", "counts", "generator"])
def test_an_attribute_that_an_optimizer_carries_on_is_named(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # That of a divided optimizer is a collective.
    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", lambda self: pytest.fail("was asked for its state dict"))
    model = nn.Linear(2, 2)
    (text,) = told(model, optimizer=Own(model.parameters(), **{own: True}))
    assert named([text]) == [f"state.optimizer.{own}"]
    assert "the optimizer's state or param_groups" in text


def test_modules_and_optimizers_are_told_of_once_each_in_all_generations() -> None:
    model = Counter(0)
    optimizer = Own(model.parameters(), calls=True)
    attributes = UnkeptAttributes()
    found: list[list[str]] = []
    for _ in range(2):
        attributes.begin()
        texts: list[str] = []
        for _ in range(8):
            model(torch.ones(1, 2)).sum().backward()
            texts += attributes.look(optimizer, lambda: {"model": model, "optimizer": optimizer}, dict)
            optimizer.step()
        found.append(named(texts))
    assert found == [["state.model.value", "state.optimizer.calls"], []]


def test_an_optimizer_that_steps_at_every_third_step_is_looked_at_at_its_own_steps() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    often, seldom = torch.optim.SGD(other.parameters()), Own(model.parameters(), calls=True)
    attributes, texts = UnkeptAttributes(), list[str]()
    for step in range(3 * STEPS[-1]):
        optimizer = often if step % 3 else seldom
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        texts += attributes.look(optimizer, lambda: {"seldom": seldom, "often": often}, dict)
        optimizer.step()
    assert named(texts) == ["state.seldom.calls"]


def test_the_state_is_looked_at_only_at_the_first_steps_of_a_few_optimizers() -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters()) for _ in range(OPTIMIZERS + 3)]
    looks = 0

    def shared() -> dict[str, object]:
        nonlocal looks
        looks += 1
        return {"model": Counter(0)}

    attributes = UnkeptAttributes()
    for optimizer in optimizers * 20:
        attributes.look(optimizer, shared, dict)
    assert looks == OPTIMIZERS * 2  # nothing has changed at the second


# ---------------------------------------------------------------- what is harmless


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]  # type: ignore[no-any-return]


class Weightless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def averaged() -> nn.Module:
    model = nn.Linear(2, 2)
    average = swa_utils.AveragedModel(model)
    model.register_forward_hook(lambda *_: average.update_parameters(model))
    model.average = [average]
    return model


def set_from_outside() -> nn.Module:
    model = Module(0)
    model.register_forward_pre_hook(lambda module, _: setattr(module, "value", random.randrange(10**9)))
    return model


def of_a_library() -> nn.Module:
    model = nn.Linear(2, 2)
    model.calls = torch.zeros(())
    model.register_forward_hook(lambda module, *_: add([module.calls]))
    return model


def with_flat_parameters() -> nn.Module:
    model = Module(None)
    model.value = [parameter.detach() for parameter in model.parameters()]
    model(torch.ones(1, 2)).sum().backward()
    model.gradients = [parameter.grad for parameter in model.parameters()]
    return model


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "the last attention map and loss": lambda: LastOnes(0.0),
    "a history": lambda: Module([], lambda value: value.append(float(len(value)))),
    "the newest figures in a dict": lambda: Module(
        {}, lambda value: value.update(loss=random.random(), map=torch.rand(2))
    ),
    "a table for the longest input": lambda: Longest(0),
    "a number that is set from outside": set_from_outside,
    "a tensor beside a library's module": of_a_library,
    "extra state": lambda: ExtraState(0),
    "views of parameters": with_flat_parameters,
    "a generator without a state": lambda: Module(random.SystemRandom(), draw),
    "an LSTM": lambda: Recurrent(2, 2),
    "a GRU in a module": lambda: nn.Sequential(nn.GRU(2, 2), LastOfTwo()),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "spectral_norm of an own module": lambda: nn.utils.spectral_norm(Weightless()),
    "weight_norm of an own module": lambda: nn.utils.weight_norm(Weightless()),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    "a parametrized module of one's own": lambda: parametrizations.orthogonal(Weightless()),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "a lazy module": lambda: nn.LazyLinear(2),
    "AveragedModel": averaged,
    "torch.compile": lambda: torch.compile(LastOnes(0.0), backend="eager"),  # type: ignore[dict-item, return-value]
    "quantization's observer": lambda: torch.ao.quantization.FakeQuantize(),
}


class LastOfTwo(nn.Module):
    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return both[0]


@pytest.mark.parametrize("what", HARMLESS)
def test_what_is_set_anew_or_kept_is_not_told_of(what: str) -> None:
    model = HARMLESS[what]()
    if what == "quantization's observer":
        model = nn.Sequential(nn.Linear(2, 2), model)
    model(torch.ones(3, 2))
    assert told(model, optimizer=torch.optim.Adam(model.parameters())) == []


OPTIMIZER_CLASSES = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", OPTIMIZER_CLASSES, ids=lambda kind: kind.__name__)
def test_torchs_optimizers_and_subclasses_of_them_are_not_told_of(kind: Any) -> None:
    if kind is torch.optim.SparseAdam:
        pytest.skip("it needs sparse gradients")
    for own in (kind, type("Mine", (kind,), {})):
        model = nn.Linear(2, 2, bias=False)
        assert told(model, optimizer=own(model.parameters(), lr=0.01)) == []


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": partial(torch.optim.lr_scheduler.StepLR, step_size=1),
    "LambdaLR": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "OneCycleLR": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=100),
    "CyclicLR": partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
    "SWALR": partial(swa_utils.SWALR, swa_lr=0.1),
    "one's own": lambda optimizer: OwnScheduler(optimizer),
}


class OwnScheduler(torch.optim.lr_scheduler.LRScheduler):
    calls = 0

    def get_lr(self) -> list[float]:
        self.calls += 1
        return [0.1 / self.calls for _ in self.base_lrs]


@pytest.mark.parametrize("what", SCHEDULERS)
def test_schedulers_keep_their_attributes(what: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[what](optimizer)
    assert told(model, optimizer=optimizer, scheduler=scheduler, after_step=scheduler.step) == []


def test_a_scaler_is_not_told_of() -> None:
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def scale() -> None:
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.update()

    assert told(model, optimizer=optimizer, scaler=scaler, after_step=scale) == []


def test_what_a_state_dict_of_ones_own_has_is_not_told_of_whatever_its_name() -> None:
    model = nn.Linear(2, 2)
    assert told(model, optimizer=Saving(model.parameters(), calls=True, ema=True)) == []


class Divided(ZeroRedundancyOptimizer):
    """Its state dict would be a collective; and it counts its steps for itself."""


def test_a_divided_optimizer_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = Divided(model.parameters(), torch.optim.SGD, lr=0.1)
    assert told(model, optimizer=optimizer) == []


def test_an_attribute_that_the_optimizer_inside_a_divided_one_carries_on_is_named() -> None:
    model = nn.Linear(2, 2)
    (text,) = told(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), Own, calls=True))
    assert named([text]) == ["state.optimizer.calls"]
    assert "Keep it in the state of each parameter" in text


class Odd(dict[str, int]):
    def values(self) -> Any:
        raise RuntimeError("it is read in another way")


def test_containers_of_other_classes_are_not_looked_into() -> None:
    assert told(Module(Odd(a=1))) == []


def test_what_is_in_the_state_too_is_not_told_of() -> None:
    model, counts, mean = (
        nn.Sequential(Module([0], count_first), Module(torch.zeros(2), lambda x: x.add_(1))),
        None,
        None,
    )
    counts, mean = model[0].value, model[1].value
    assert told(model, counts=counts, local={"means": [mean]}) == []


def test_metrics_have_a_check_of_their_own() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Seen(torchmetrics.Metric):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, x: torch.Tensor) -> None:
            self.total += x.sum()

        def compute(self) -> torch.Tensor:
            return self.total

    model = Module(Seen(), lambda value: value.update(torch.ones(2)))
    assert told(model) == []
