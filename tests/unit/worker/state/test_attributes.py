"""What a commit keeps of an object's attributes."""

from __future__ import annotations

import copy
import enum
import threading
import warnings
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.worker.state.attributes import Attributes, by_name


class Remembers:
    def __init__(self, rank: int = 0) -> None:
        self.rank, self.count, self.best = rank, 0, None
        self.sums = np.zeros((2, 3), np.float32)
        self.seen: dict[str, Any] = {"epochs": [], "pairs": (1, [2.0])}
        self.tensor = torch.zeros(2)
        self.words = defaultdict(lambda: 0)
        self.last: Any = deque(maxlen=2)
        self.file = object()

    def train(self) -> None:
        self.count += 1
        self.best = np.float64(0.5)
        self.sums += 1
        self.seen["epochs"].append(np.arange(3))
        self.tensor += 1
        self.words["a"] += 1
        self.last.append("x")


def now(callback: Remembers) -> dict[str, Any]:
    values = {name: value for name, value in vars(callback).items() if name not in ("rank", "file", "last")}
    return {**values, "words": dict(callback.words)}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_same(value, other[name])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other)
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    else:
        np.testing.assert_array_equal(one, other)


def begun(owner: Any) -> Attributes:
    known = Attributes(owner)
    known.reset()
    known.begin()
    return known


def test_a_newcomer_remembers_what_training_has_changed_and_keeps_what_is_its_own() -> None:
    survivor, newcomer = Remembers(rank=0), Remembers(rank=1)
    known = begun(survivor)
    assert known.values() == {}
    survivor.train()
    begun(newcomer).load(copy.deepcopy(known.values()))
    assert_same(now(newcomer), now(survivor))
    assert (newcomer.rank, newcomer.file) != (survivor.rank, survivor.file)


def test_a_survivor_goes_back_to_what_it_remembered_at_the_commit_or_at_the_beginning() -> None:
    owner = Remembers()
    known = begun(owner)
    owner.train()
    kept, then = copy.deepcopy(known.values()), copy.deepcopy(now(owner))
    owner.train()
    owner.rank = 7  # for the first time, and never committed
    known.reset()
    known.begin()
    known.load(kept)
    assert_same(now(owner), then)
    assert owner.rank == 0
    known.reset()
    known.begin()
    known.load(None)
    assert_same(now(owner), now(Remembers()))


def test_containers_that_others_hold_stay_the_same() -> None:
    owner = Remembers()
    held = (owner.seen, owner.sums, owner.tensor)
    known = begun(owner)
    assert all(one is other for one, other in zip((owner.seen, owner.sums, owner.tensor), held, strict=True))
    owner.train()
    kept = copy.deepcopy(known.values())
    owner.train()
    known.reset()
    known.begin()
    known.load(kept)
    assert all(one is other for one, other in zip((owner.seen, owner.sums, owner.tensor), held, strict=True))
    assert float(held[1].sum()) == 6


def test_what_an_object_does_as_training_begins_again_is_no_change_and_stays() -> None:
    owner = Remembers()
    known = begun(owner)
    owner.count = 2
    known.values()
    known.reset()
    owner.count = 9
    known.begin()
    known.load({})
    assert (owner.count, known.values()) == (9, {})


def test_what_has_changed_once_is_kept_also_when_it_is_again_what_it_was() -> None:
    owner, newcomer = Remembers(), Remembers()
    known = begun(owner)
    owner.count = 1
    known.values()
    owner.count = 0
    newcomer.count = 5
    begun(newcomer).load(known.values())
    assert newcomer.count == 0


def test_an_object_with_a_state_dict_says_what_it_remembers() -> None:
    class Named:
        count = 0
        hidden: Any = None

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    owner, newcomer = Named(), Named()
    known = begun(owner)
    owner.count, owner.hidden = 3, 4
    begun(newcomer).load(known.values())
    assert (newcomer.count, newcomer.hidden) == (3, None)
    known.load(None)
    assert owner.count == 3
    known.reset()
    assert owner.count == 0


def test_attributes_that_others_set_are_left_out() -> None:
    owner = Remembers()
    known = Attributes(owner, without=("count",))
    known.begin()
    owner.train()
    assert "count" not in known.values()


def test_a_list_that_grows_and_is_not_kept_is_told_of_once() -> None:
    owner = Remembers()
    owner.seen["times"] = [object()]
    known = begun(owner)
    known.values()
    owner.seen["pairs"] = ()
    owner.seen["more"] = 1
    with pytest.warns(UserWarning, match=r"Remembers\.seen has changed and holds more than numbers"):
        assert "seen" not in known.values()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known.values()


class Compares:
    """Chooses how it compares when training has begun, as callbacks of Keras do."""

    def __init__(self, better: Any = None) -> None:
        self.better, self.given, self.margin = None, better or np.less, 0.5

    def train(self) -> None:
        if self.better is None:
            self.better, self.margin = self.given, -self.margin


@pytest.mark.parametrize("better", [np.less, max, torch.lt, Remembers.train])
def test_a_function_of_a_module_is_remembered_with_what_was_set_beside_it(better: Any) -> None:
    survivor, newcomer = Compares(better), Compares(better)
    known = begun(survivor)
    survivor.train()
    kept = known.values()
    assert not any(callable(value) for value in kept.values()), "checkpoints name functions"
    for owner, attributes in ((survivor, known), (newcomer, Attributes(newcomer))):
        attributes.reset()
        attributes.begin()
        attributes.load(kept)
        owner.train()
        assert (owner.better, owner.margin) == (better, -0.5)


def test_an_attribute_that_becomes_something_else_than_a_commit_keeps_is_told_of_once() -> None:
    owner = Compares(lambda a, b: a < b)
    known = begun(owner)
    owner.train()
    with pytest.warns(UserWarning, match=r"Compares\.better has become a function, which no commit keeps"):
        known.values()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known.values()


def test_objects_are_named_by_their_classes_and_numbered_from_the_second_on() -> None:
    first, second = Remembers(), Remembers()
    assert by_name([first, 0, second]) == {"Remembers": first, "int": 0, "Remembers 2": second}


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


def test_members_of_enums_are_kept() -> None:
    """They were left out without a word: a newcomer was back in the first phase."""

    class Phases:
        def __init__(self) -> None:
            self.phase, self.seen = Phase.WARM, {Phase.WARM: 0}

    callback = Phases()
    known = begun(callback)
    callback.phase = Phase.MAIN
    callback.seen[Phase.MAIN] = 3
    kept = copy.deepcopy(known.values())
    other = Phases()
    begun(other).load(kept)
    assert (other.phase, other.seen) == (Phase.MAIN, {Phase.WARM: 0, Phase.MAIN: 3})


def test_an_enum_whose_class_cannot_travel_is_left_alone() -> None:
    lock = threading.Lock()

    class Guarded(enum.Enum):
        ONE = 1

        def hold(self) -> Any:
            return lock

    owner = SimpleNamespace(mode=Guarded.ONE, count=0)
    known = begun(owner)
    owner.count = 1
    assert known.values() == {"count": 1}
