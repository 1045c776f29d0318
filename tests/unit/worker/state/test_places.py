"""Which objects are where in a State, by the names of their places."""

from __future__ import annotations

from typing import Any

import torch

from spark_elastic.worker.state.places import Places


class Key:
    """Looks like every other one."""

    def __repr__(self) -> str:
        return "a key"


def test_objects_are_found_by_their_places_and_plain_values_are_not() -> None:
    inner: list[Any] = [1, {2}]
    places = Places({"a": {"x": inner, 1: 2.0}, "b": (inner,), "c": 3})
    assert places.at("a['x']") is inner
    assert places.at("a['x'][1]") == {2}
    assert [places.at(name) for name in ("a[1]", "b", "c", "d")] == [None] * 4
    assert places.same == {"b[0]": "a['x']", "b[0][1]": "a['x'][1]"}


def test_places_with_other_objects_than_at_first_are_named_and_those_with_a_state_dict_are_not() -> None:
    log: list[int] = []
    values: dict[str, Any] = {"log": log, "config": {"stage": [1]}, "model": torch.nn.Linear(1, 1), "new": None}
    first = Places(values)
    log.append(1)
    assert Places(values).rebound(first) == []
    values.update(config={"stage": [1]}, model=torch.nn.Linear(1, 1), new=[2])
    assert Places(values).rebound(first) == ["config", "config['stage']"]


def test_a_name_that_two_places_have_says_nothing() -> None:
    one, other = [1], [2]
    places = Places({"first": one, "of": {Key(): one, Key(): other}, "last": other})
    assert places.at("of[a key]") is None
    assert places.same == {}
    assert (places.at("first"), places.at("last")) == (one, other)
