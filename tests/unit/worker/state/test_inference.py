"""Tensors that were made in torch's inference mode, and States that are used in it."""

from __future__ import annotations

import pytest
import torch
from trained_state import step

from spark_elastic import TorchState

every_commit = pytest.mark.parametrize("commit", ["copy", "host", "in_place", "sharded"])


def made(commit: str) -> TorchState:
    """A state that trains a model on what a frozen one returns, which was made in inference mode, as a prediction was."""
    torch.manual_seed(0)
    with torch.inference_mode():
        frozen = torch.nn.BatchNorm1d(2).eval()
        prediction = torch.ones(2)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return TorchState(model=model, optimizer=optimizer, commit=commit, frozen=frozen, found={"prediction": prediction})


def change(state: TorchState) -> None:
    with torch.inference_mode():
        state.found["prediction"].zero_()
        state.frozen.weight.zero_()
        state.frozen.running_mean.fill_(7.0)


def what_was_made(state: TorchState) -> list[list[float]]:
    return [each.tolist() for each in (state.found["prediction"], state.frozen.weight, state.frozen.running_mean)]


@every_commit
def test_they_go_back_in_place(commit: str) -> None:
    state = made(commit)
    prediction = state.found["prediction"]
    if commit == "in_place":  # it copies frozen weights once they have been seen to change
        for value in (5.0, 1.0):
            with torch.inference_mode():
                state.frozen.weight.fill_(value)
            state.commit()
    state.commit()
    before = what_was_made(state)
    for _ in range(2):
        change(state)
        state.restore()
        assert what_was_made(state) == before == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert state.found["prediction"] is prediction


@every_commit
def test_they_go_to_newcomers_and_checkpoints(commit: str) -> None:
    state, newcomer = made(commit), made(commit)
    state.commit()
    change(newcomer)
    whole = state._lend().lend()
    whole.wait()
    newcomer._load(whole.content()["objects"])
    assert what_was_made(newcomer) == what_was_made(state)
    newcomer.commit()


@every_commit
@pytest.mark.parametrize("is_made_there", [True, False])
def test_a_commit_in_inference_mode_is_followed_by_others_outside(commit: str, is_made_there: bool) -> None:
    with torch.inference_mode(is_made_there):
        state = made(commit)
    with torch.inference_mode():
        for number in range(2):
            state.number = torch.tensor(number)
            state.commit()
        assert torch.is_inference_mode_enabled()
    for number in range(2, 5):
        state.number = torch.tensor(number)
        state.commit()
    state.number = None
    state.restore()
    assert state.number.item() == 4


@every_commit
def test_training_goes_on_after_a_restore_in_inference_mode(commit: str) -> None:
    state = made(commit)
    state.commit()
    step(state)
    state.commit()
    weights = state.model.weight.detach().clone()
    with torch.inference_mode():
        state.restore()
    assert torch.equal(state.model.weight, weights)
    step(state)
    assert not torch.equal(state.model.weight, weights)
