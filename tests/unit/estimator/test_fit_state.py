"""What survives of a fit: when it is committed, what a commit copies, and states of earlier releases."""

from __future__ import annotations

import pytest
import torch
from fit_plans import plan

import spark_elastic as se
from spark_elastic.errors import WorkerLostError
from spark_elastic.estimator.fit_state import FitState, history_of, kept_weights
from spark_elastic.estimator.learning_rate import Sweep
from spark_elastic.estimator.training import Trainer, train


@pytest.mark.parametrize(("every", "commits"), [(1, 11), (4, 3), (5, 3), (100, 1)])
def test_a_commit_is_made_every_few_steps_when_a_checkpoint_is_due_and_at_the_end_of_an_epoch(
    dataset: str, every: int, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, bool]] = []
    commit = FitState.commit

    def note(state: FitState, durable: bool = False) -> None:
        made.append((state.step, durable))
        commit(state, durable)

    monkeypatch.setattr(FitState, "commit", note)
    train(plan(dataset, epochs=2, commit_steps=every))  # ten steps an epoch
    assert len(made) == 2 * commits
    assert made[:commits] == [*((step, False) for step in range(every, 11, every)), (0, True)]
    made.clear()
    train(plan(dataset, epochs=1, commit_steps=every, checkpoint_steps=3))
    assert [step for step, durable in made if durable] == [3, 6, 9, 0]


def test_commits_copy_no_constants_that_they_hold_and_restores_set_them(dataset: str) -> None:
    state = Trainer(plan(dataset)).make_state()
    state.best = kept_weights({"weight": torch.ones(1000)})
    for _ in range(2):  # into each of the two buffers
        state.commit()
    spare = state._keeper.snapshots.spare.buffer
    (place,) = spare.held
    spare.views[place].fill_(7.0)  # tells whether it is copied again
    state.commit()
    assert state._keeper.current.buffer.views[place].unique().tolist() == [7.0]
    state.restore()
    assert state.best["weight"].unique().tolist() == [7.0]
    for value in (8.0, 9.0):
        state.best = kept_weights({"weight": torch.full((1000,), value)})
        for _ in range(2):
            state.commit()
            assert state._keeper.current.buffer.views[place].unique().tolist() == [value]
        state.best["weight"].add_(1.0)
        state.commit()
        assert state._keeper.current.buffer.views[place].unique().tolist() == [value + 1]


def test_no_time_counts_in_which_the_fit_was_not_running(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("spark_elastic.estimator.fit_state.time.monotonic", lambda: now)
    state = Trainer(plan(dataset)).make_state()
    state.count_seconds()
    now += 2.0
    state.commit()
    now += 3.0
    state.commit()
    kept = state.seconds
    now += 86_400.0  # another process goes on from the checkpoint
    again = Trainer(plan(dataset)).make_state()
    again.seconds = kept
    again.count_seconds()
    now += 1.0
    again.commit()
    assert again.seconds == 6.0


def test_a_state_of_an_earlier_release_goes_on(dataset: str) -> None:
    state = Trainer(plan(dataset, epochs=3)).make_state()
    state.history, state.best = [{"epoch": 0, "left": 1}], None
    trainer = Trainer(plan(dataset, epochs=1))
    trainer.model, trainer.optimizer, trainer.loader = state.model, state.optimizer, state.loader
    se.elastic(trainer.run)(state)
    assert [entry["epoch"] for entry in history_of(state)] == [0, 0]


def test_the_losses_of_a_search_keep_their_steps_where_a_worker_is_lost_as_an_epoch_ends(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(plan(dataset, epochs=9, callbacks=[Sweep(20)], commit_steps=1))  # ten steps an epoch
    state, commit, lost = trainer.make_state(), FitState.commit, [WorkerLostError("at the end of an epoch")]

    def lose(state: FitState, durable: bool = False) -> None:
        if durable and lost:
            raise lost.pop()
        commit(state, durable)

    monkeypatch.setattr(FitState, "commit", lose)
    with pytest.raises(WorkerLostError):
        se.elastic(trainer.run)(state)
    state.restore()
    se.elastic(trainer.run)(state)
    found = [[step for step, _ in entry["losses_of_steps"]] for entry in history_of(state)]
    assert found == [[], [*range(10, 20)]], "the notes of the first epoch are lost, and no other loss takes their place"
