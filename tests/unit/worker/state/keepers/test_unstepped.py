"""How weights are watched that no optimizer steps."""

from __future__ import annotations

import torch

from spark_elastic.worker.state.keepers.unstepped import UnsteppedWeights


def committed(unstepped: UnsteppedWeights, module: torch.nn.Module) -> set[int]:
    """Make a commit, and return the numbers of the weights that it copied."""
    copied = unstepped.to_copy(module, list(module.parameters()))
    unstepped.settle()
    return set(copied)


def changed(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(1)
    return module


def test_weights_are_copied_once_they_have_changed_and_until_then_a_change_is_known_by_name() -> None:
    unstepped, module = UnsteppedWeights(), torch.nn.Linear(2, 1)
    assert committed(unstepped, module) == committed(unstepped, module) == set()
    assert not unstepped.changed()
    changed(module)
    assert unstepped.changed() == "a weight of a Linear, such as weight"
    assert committed(unstepped, module) == committed(unstepped, module) == {0, 1}
    assert not unstepped.changed()


def test_weights_that_an_optimizer_steps_are_not_watched() -> None:
    unstepped, module = UnsteppedWeights(), torch.nn.Linear(2, 1)
    unstepped.watch([module.weight])
    committed(unstepped, module)
    changed(module)
    assert unstepped.changed() == "a weight of a Linear, such as bias"
    assert committed(unstepped, module) == {1}


def test_weights_that_were_replaced_by_those_of_another_commit_have_not_changed_by_themselves() -> None:
    unstepped, module = UnsteppedWeights(), torch.nn.Linear(2, 1)
    committed(unstepped, module)
    changed(module)
    unstepped.forget()
    assert not unstepped.changed()
    assert committed(unstepped, module) == set()
    changed(module)
    assert committed(unstepped, module) == {0, 1}
