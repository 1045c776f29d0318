"""What requires gradients, and what evaluates, is part of a commit."""

from __future__ import annotations

import pytest
import torch

from spark_elastic import TorchState


@pytest.mark.parametrize("commit", ["copy", "in_place"])
def test_what_requires_gradients_is_part_of_a_commit_and_goes_to_newcomers(commit: str) -> None:
    def made() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model[0].requires_grad_(False)
        return model

    state, newcomer = (TorchState(model=torch.compile(made(), backend="eager"), commit=commit) for _ in range(2))
    first, second = state.model._orig_mod
    first.requires_grad_(True)
    second.bias.requires_grad_(False)
    state.commit()
    state.model.requires_grad_(True)
    state.restore()
    whole = state._lend().lend()
    newcomer._load(whole.content()["objects"])
    for holder in (state, newcomer):
        names = [name for name, parameter in holder.model.named_parameters() if not parameter.requires_grad]
        assert names == ["_orig_mod.1.bias"]


@pytest.mark.parametrize("commit", ["copy", "in_place"])
def test_what_evaluates_is_part_of_a_commit_and_goes_to_newcomers(commit: str) -> None:
    def made() -> torch.nn.Module:
        return torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()), backend="eager")

    state, newcomer = (TorchState(model=made(), commit=commit) for _ in range(2))
    state.model._orig_mod[1].eval()
    state.commit()
    state.model.eval()  # a worker is lost ahead of the train() after an evaluation
    state.restore()
    newcomer._load(state._lend().lend().content()["objects"])
    for holder in (state, newcomer):
        assert [part.training for part in holder.model._orig_mod.modules()] == [True, True, False]


def test_a_checkpoint_that_does_not_say_what_evaluates_leaves_that_as_it_is() -> None:
    state = TorchState(model=torch.nn.Linear(2, 2))
    kept = state._lend().lend().content()["objects"]
    del kept["model"].content._metadata[""]["evaluating"]
    state.model.eval()
    state._load(kept)
    assert not state.model.training
