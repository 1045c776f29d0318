"""Torch calls the hooks of a step once for each class that defines it; which call is the outermost is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spark_elastic.worker.optimizers.steps import is_of_base_class


class Logged(torch.optim.SGD):
    """Calls the step of its base class, as subclasses do."""

    inner: Any = None

    def step(self, closure: Any = None) -> Any:
        if self.inner is not None:
            self.inner.step()
        return super().step(closure)


def calls(optimizer: torch.optim.Optimizer, watched: torch.optim.Optimizer | None = None) -> list[bool]:
    """Step, and return what is said at each call of the hook of ``watched``, by default the same optimizer."""
    said: list[bool] = []
    hook = (watched or optimizer).register_step_pre_hook(lambda given, *_: said.append(is_of_base_class(given)))
    optimizer.step()
    hook.remove()
    return said


def made(kind: Any) -> Any:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return kind([parameter], lr=0.1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_a_step_of_torchs_own_is_seen_once(kind: Any) -> None:
    optimizer = made(kind)
    said: list[bool] = []
    optimizer.register_step_pre_hook(lambda given, *_: said.append(is_of_base_class(given)))
    optimizer.step(lambda: torch.zeros(()))
    assert said == [False]


def test_the_step_within_the_step_of_a_subclass_is_that_of_the_base_class() -> None:
    made(torch.optim.SGD)  # torch has to know of both classes
    assert calls(made(Logged)) == [False, True]


def test_the_step_of_another_optimizer_within_a_step_is_one_of_its_own() -> None:
    outer = made(Logged)
    outer.inner = made(torch.optim.SGD)
    assert calls(outer, watched=outer.inner) == [False]


def test_a_compiler_that_traces_the_hook_is_not_asked_for_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    made(torch.optim.SGD)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert calls(made(Logged)) == [False, False]
