"""Functions whose call runs none of their code are told apart from all others."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from spark_elastic._callables import is_deferred, takes


async def coroutine(number: int = 0) -> int:
    return number


def generator(number: int = 0) -> Iterator[int]:
    yield number


async def both(number: int = 0) -> AsyncIterator[int]:
    yield number


def plain(number: int = 0) -> Any:
    return coroutine(number)


class Object:
    """Does what a function does when it is called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self) -> Any:
        return self.function()

    async def wait(self) -> None: ...


class Deferred:
    async def __call__(self) -> None: ...


DEFERRED = [coroutine, generator, both, Deferred(), Object(plain).wait, functools.partial(generator, 1)]


@pytest.mark.parametrize(
    "function", [*DEFERRED, functools.partial(functools.partial(both, 1), number=2), functools.partial(Deferred())]
)
def test_what_makes_a_coroutine_or_a_generator_is_deferred_however_it_is_wrapped(function: object) -> None:
    assert is_deferred(function)


@pytest.mark.parametrize("function", [plain, Object(plain), functools.partial(plain, 1), print, dict, Deferred, 3])
def test_all_others_run_when_they_are_called(function: object) -> None:
    assert not is_deferred(function)


@pytest.mark.parametrize(
    ("function", "does"),
    [
        (lambda: 0, False), (lambda old: 0, False), (lambda old, new: 0, True), (lambda *sizes: 0, True),
        (lambda old, new, more: 0, False), (lambda old, new, more=1: 0, True), (lambda old, *, new: 0, False),
        (functools.partial(lambda more, old, new: 0, 1), True), (print, True), (dict.fromkeys, True), (dict, True),
    ],
)  # fmt: skip
def test_what_can_be_called_with_two_arguments(function: Callable[..., object], does: bool) -> None:
    assert takes(function, 2) is does
