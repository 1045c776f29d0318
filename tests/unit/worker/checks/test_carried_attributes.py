"""What code reads before it sets it is carried on from one call to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from spark_elastic.worker.checks.carried_attributes import carried_names


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        return function(*args)

    return inside


class Code:
    own = 0

    def changes(self, x: Any) -> None:
        self.counter += 1
        self.average = 0.9 * self.average + x
        number = self.in_two_lines + 1
        self.in_two_lines = number
        if self.previous is not None:
            x = x + self.previous
        self.previous = x
        x.move(x, self.last_of_several)
        self.last_of_several = x

    @wrapped
    def is_wrapped(self) -> None:
        self.under_a_decorator += 1

    @property
    def value(self) -> int:
        self.in_a_property += 1
        return self.in_a_property

    def has_function(self) -> Callable[[], None]:
        def inside() -> None:
            self.in_a_function += 1

        return inside

    def only_reads(self) -> Any:
        return self.read, self.set_first

    def sets(self, x: Any) -> None:
        self.attentions = x.attentions
        self.set_first = x
        if self.set_first > 1:
            self.set_first = 1
        x.of_another += 1


def test_the_names_are_those_that_some_function_reads_before_it_sets_them() -> None:
    assert carried_names(Code()) == {
        "counter",
        "average",
        "in_two_lines",
        "previous",
        "last_of_several",
        "under_a_decorator",
        "in_a_property",
        "in_a_function",
    }


def test_functions_of_an_object_itself_count_and_those_of_libraries_do_not() -> None:
    model = nn.LSTM(2, 2)
    assert carried_names(model) == frozenset()
    model.forward = Code.changes.__get__(model)
    model.setup = Code().is_wrapped
    assert "counter" in carried_names(model)
    assert "under_a_decorator" not in carried_names(model)
