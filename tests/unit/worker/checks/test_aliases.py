"""What is in a State twice would become two objects in silence."""

from __future__ import annotations

import collections
import copy
import gc
import warnings
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic import TorchState, elastic
from spark_elastic.errors import TrainingCodeError


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize("shared", [[], {}, torch.zeros(2)])
def test_what_an_object_of_the_state_holds_besides_is_warned_of(shared: Any) -> None:
    for given in ({"first": shared, "holder": Holder(shared)}, {"holder": Holder(shared), "first": shared}):
        with pytest.warns(UserWarning, match=r"state\.first and state\.holder\.held are the same") as told:
            TorchState(**given)
        assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("shared", [[], {}, torch.zeros(2), set(), deque(), np.zeros(2), Holder([])])
def test_what_is_in_two_places_stays_one(shared: Any) -> None:
    pair = collections.namedtuple("pair", "one")
    is_taken_apart = type(shared) in (list, dict, torch.Tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchState(first=pair([]), second=pair([]))
        TorchState(first=pair(shared), second=pair(shared))
        state = TorchState(first=shared, second=[shared], holder=Holder(None if is_taken_apart else shared))
    state.commit()
    state.restore()
    assert state.first is shared is state.second[0]
    assert state.holder.held is (None if is_taken_apart else shared)


def test_equal_values_and_objects_that_restore_themselves_may_be_in_two_places() -> None:
    model, constant, text = torch.nn.Linear(1, 1), (1, 2), "text"
    optimizer = torch.optim.SGD(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchState(model=model, same=[model], optimizer=optimizer, all=[optimizer], a=[], b=[], c=constant, d=constant)
        TorchState(e=text, f=[text, text, None, None, len, len])


def test_a_container_that_contains_itself_is_refused() -> None:
    cyclic: dict[str, Any] = {"inner": []}
    cyclic["inner"].append(cyclic)
    with pytest.raises(ValueError, match=r"state\.tree\['inner'\]\[0\] is a dict that contains itself"):
        TorchState(tree=cyclic)


def trained() -> TorchState:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    return TorchState(model=model, optimizer=optimizer, best=None)


@pytest.mark.parametrize(
    ("live", "told"),
    [
        (
            lambda state: state.model.state_dict(),
            r"state\.best\['0\.weight'\] shares its memory with 0\.weight of state\.model",
        ),
        (
            lambda state: {"epoch": 1, "of": [state.model.state_dict()]},
            r"state\.best\['of'\]\[0\]\['0\.weight'\] shares",
        ),
        (lambda state: list(state.model.parameters()), r"state\.best\[0\] shares its memory with 0\.weight"),
        (lambda state: state.model[1].running_mean, r"state\.best shares its memory with 1\.running_mean"),
        (lambda state: state.model[0].weight.detach().numpy(), r"state\.best shares its memory with 0\.weight"),
        (lambda state: state.model[0].weight.detach()[0, 1:], r"state\.best shares its memory with 0\.weight"),
        (
            lambda state: state.optimizer.state_dict(),
            r"state\.best\['state'\].* shares its memory with .* of state\.optimizer",
        ),
    ],
)
def test_what_shares_its_memory_with_a_module_is_refused_where_it_is_set(live: Any, told: str) -> None:
    state = trained()
    with pytest.raises(TrainingCodeError, match=told + r".*copy\.deepcopy"):
        state.best = live(state)
    state.best = copy.deepcopy(live(state)) if not isinstance(live(state), list) else None
    with pytest.raises(TrainingCodeError, match=told.replace("best", "other")):
        TorchState(model=state.model, optimizer=state.optimizer, other=live(state))


class Stopper:
    """Keeps what it is given, as classes for early stopping do."""

    def __init__(self) -> None:
        self.best: Any = None


@pytest.mark.parametrize("commit", ["copy", "in_place"])
@pytest.mark.parametrize(
    "live",
    [
        lambda state: state.model.state_dict(),
        lambda state: {0: [state.model[0].weight.detach()[0, 1:]]},
        lambda state: state.model[0].weight.detach().numpy(),
        lambda state: state.optimizer.state_dict(),
    ],
)
def test_what_an_object_keeps_of_live_memory_is_refused_by_the_next_commit(live: Any, commit: str) -> None:
    whole = trained()
    state = TorchState(model=whole.model, optimizer=whole.optimizer, stopper=Stopper(), commit=commit)
    state._begin(None)
    state.stopper.best = copy.deepcopy(live(state))
    state.commit()
    state.stopper.best = live(state)
    with pytest.raises(TrainingCodeError, match=r"a Stopper in the State holds a tensor .* of a .*: copy\.deepcopy"):
        state.commit()


def test_an_object_may_hold_the_constants_that_modules_were_made_of_and_an_optimizer_plain_values() -> None:
    vectors, schedule = torch.rand(5, 2), torch.linspace(0, 1, 4)
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding.from_pretrained(vectors), "out": torch.nn.Linear(2, 1)})
    model["out"].register_buffer("schedule", schedule)
    optimizer = torch.optim.SGD(model["out"].parameters(), lr=0.1)
    optimizer.state["calls"] = 3  # type: ignore[index]
    stopper = Stopper()
    stopper.best = {"vectors": vectors, "numbers": vectors.numpy(), "schedule": schedule}
    generator = np.random.RandomState(1)
    state = TorchState(model=model, optimizer=optimizer, vocabulary=stopper, generator=generator, commit="in_place")
    state._begin(None)
    state.commit()


def test_what_is_put_into_a_list_of_the_state_is_looked_at_by_the_next_commit() -> None:
    state = trained()
    state.history = []
    state._begin(None)
    for _ in range(5):
        state.history.append(copy.deepcopy(state.model.state_dict()))
        state.commit()
    state.history.append(state.model.state_dict())
    with pytest.raises(TrainingCodeError, match=r"state\.history\[5\]\['0\.weight'\] shares its memory"):
        state.commit()


def test_copies_and_tensors_of_other_modules_may_be_set() -> None:
    state = trained()
    state.best = {name: value.clone() for name, value in state.model.state_dict().items()}
    state.best = torch.nn.Linear(2, 1).state_dict()
    state.total = torch.zeros(())
    state.total = state.total + 1
    state.teacher = torch.nn.Linear(2, 1)
    state.sparse = torch.ones(2).to_sparse().to_dense()
    state.parts = [state.model, state.optimizer, torch.empty(0), "text"]


def test_an_optimizer_that_trains_on_in_an_attributes_tensors_is_refused_where_it_loads_them() -> None:
    @elastic
    def train(state: TorchState) -> None:
        state.optimizers = [state.optimizer]
        state.best = copy.deepcopy(state.optimizer.state_dict())
        state.optimizer.load_state_dict(copy.deepcopy(state.best))
        with pytest.raises(
            TrainingCodeError, match=r"state\.best\['state'\].* of state\.optimizer.*load_state_dict\(copy\.deepcopy"
        ):
            state.optimizer.load_state_dict(state.best)

    train(trained())


def test_an_optimizer_may_load_what_no_attribute_holds_also_when_its_state_is_gone() -> None:
    optimizer = trained().optimizer
    elastic(lambda state: optimizer.load_state_dict(optimizer.state_dict()))(TorchState(optimizer=optimizer))
    gc.collect()
    optimizer.load_state_dict(optimizer.state_dict())


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, such as a lookahead, which is one of torch's by name alone."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.defaults, self.param_groups = (
            inner,
            inner.state,
            inner.defaults,
            inner.param_groups,
        )

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def test_an_optimizer_that_only_wraps_another_one_may_be_in_a_state() -> None:
    state = trained()
    wrapped = TorchState(model=state.model, optimizer=Wrapping(state.optimizer))
    assert elastic(lambda state: "entered")(wrapped) == "entered"
