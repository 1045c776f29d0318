"""Parameters and buffers that a shard's forward and backward may change, and what they refuse."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from one_rank_shards import first, run, training
from torch import nn

from spark_elastic.errors import TrainingCodeError


def test_a_buffer_of_whole_numbers_that_changes_is_refused() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen[0] += len(x)
            return super().forward(x)

    state = training(Counting())
    with pytest.raises(TrainingCodeError, match="the buffer seen holds whole numbers"):
        run(state, first(state))


class Initializing(nn.Linear):
    """Sets buffers in its first forward, as ActNorm does."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 2)
        self.how = how
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("center", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ready.fill_(True)
        if self.how == "None" and self.center is None:
            self.center = x.detach().mean(0)
        if self.how == "register" and not hasattr(self, "scale"):
            self.register_buffer("scale", x.detach().std(0))
        return super().forward(x)


def test_a_buffer_that_repeats_one_row_and_does_not_change_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    net.register_buffer("places", torch.arange(4).expand(3, 4))
    state = training(net)
    run(state, first(state))
    next(iter(state.model.parts(first(state))))
    assert torch.equal(net.places, torch.arange(4).expand(3, 4))


def test_a_flag_that_all_shards_set_alike_is_set() -> None:
    state = training(Initializing("neither"))
    run(state, first(state))
    assert state.model.module.ready.item() is True
    assert state.model.module.ready.dtype is torch.bool


@pytest.mark.parametrize(("how", "name"), [("None", "center"), ("register", "scale")])
def test_a_buffer_that_a_shard_is_the_first_to_set_is_refused(how: str, name: str) -> None:
    state = training(Initializing(how))
    with pytest.raises(TrainingCodeError, match=f"{name} was registered while a shard was computed"):
        run(state, first(state))


class Replacing(nn.Linear):
    """Has a buffer in common with its child, and puts another tensor in its place."""

    def __init__(self, by_child: bool) -> None:
        super().__init__(4, 2)
        self.child = nn.Module()
        self.register_buffer("mean", torch.zeros(()))
        self.child.register_buffer("mean", self.mean)
        self.by_child = by_child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owner = self.child if self.by_child else self
        owner.mean = 0.5 * owner.mean + x.detach().mean()
        return super().forward(x)


@pytest.mark.parametrize("by_child", [False, True])
def test_a_buffer_that_two_modules_have_in_common_is_set_whichever_replaces_it(by_child: bool) -> None:
    state = training(Replacing(by_child))
    batch = first(state)
    expected = torch.stack([x.mean() for x, _ in batch]).mean()
    run(state, batch)
    torch.testing.assert_close(state.model.module.mean, expected)


@pytest.mark.parametrize("generator", [torch.Generator(), np.random.default_rng(0), random.Random(0)])
def test_generators_of_the_models_own_are_refused(generator: object) -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    for held in (generator, [generator], Holder(generator)):
        net[0].generator = held
        with pytest.raises(TrainingCodeError, match=r"0\.generator has a .* of the model's own"):
            training(net)


class Holder:
    def __init__(self, generator: object) -> None:
        self.generators = {"noise": generator}


GENERATOR = torch.Generator()


class Borrowing(nn.Linear):
    """Draws from the generators that are seeded for each shard, under names of its own."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.random, self.numbers, self.draws = (
            random,
            [np.random, torch.default_generator],
            (random.random, np.random.rand),
        )
        self.generator = nn.Identity()  # a global of this name is another thing
        gone = Holder(None)
        self.proxies = [weakref.proxy(gone)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.generator(x) + self.random.random())


generator = torch.Generator()


def test_generators_that_are_seeded_for_each_shard_are_not_the_models_own() -> None:
    state = training(Borrowing())
    run(state, first(state))


@pytest.mark.parametrize("compiled", [torch.fx.symbolic_trace, torch.jit.script])
def test_compiled_modules_train_on_shards(compiled: Any) -> None:
    state = training(compiled(nn.Sequential(nn.Linear(4, 2), nn.ReLU())))
    run(state, first(state))
    assert all(parameter.grad is not None for parameter in state.model.parameters())


def test_a_global_generator_that_a_forward_draws_from_is_refused() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn(x.shape, generator=GENERATOR))

    with pytest.raises(TrainingCodeError, match=r"forward has a Generator of the model's own"):
        training(Noisy(4, 2))
