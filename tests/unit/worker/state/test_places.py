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
    assert places.same == {"b[0]": "a['x']"}


def test_places_with_other_objects_than_at_first_are_named_and_those_with_a_state_dict_are_not() -> None:
    log: list[int] = []
    values: dict[str, Any] = {"log": log, "config": {"stage": [1]}, "model": torch.nn.Linear(1, 1), "new": None}
    first = Places(values)
    log.append(1)
    assert Places(values).rebound(first) == []
    values.update(config={"stage": [1]}, model=torch.nn.Linear(1, 1), new=[2])
    assert Places(values).rebound(first) == ["config", "config['stage']"]


def test_dicts_that_are_kept_as_a_whole_are_no_places_of_their_entries() -> None:
    one = [1]
    places = Places({"of": {Key(): one, Key(): [2]}, "last": one})
    assert (places.at("of[a key]"), places.at("last"), places.same) == (None, one, {})


def test_what_is_in_two_places_belongs_to_the_one_that_it_has_been_in_from_the_first() -> None:
    table: list[Any] = [[0], [1]]
    first = Places({"current": table[0], "table": table})
    assert Places({"current": table[1], "table": table}, first).same == {"current": "table[1]"}
    assert Places({"current": table[1], "table": table}).same == {"table[1]": "current"}


def test_a_container_that_contains_itself_is_not_followed_for_ever() -> None:
    cyclic: list[Any] = [[]]
    cyclic[0].append(cyclic)
    assert Places({"a": cyclic}).same == {"a[0][0]": "a"}
