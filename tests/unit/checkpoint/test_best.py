"""Which of several checkpoints is the best, and what a metric's name says about it."""

from __future__ import annotations

import pytest

from spark_elastic.checkpoint.best import BestKept, Metric, Score, best_first, metric_of
from spark_elastic.checkpoint.naming import CheckpointName

FIRST, SECOND, THIRD = (CheckpointName(1, 1, index) for index in (1, 2, 3))


@pytest.mark.parametrize("name", ["loss", "val_loss", "val/loss", "Error", "valid.mae"])
def test_losses_and_errors_are_better_when_small(name: str) -> None:
    assert metric_of(name) == Metric(name, "min")


@pytest.mark.parametrize("name", ["acc", "val_acc", "accuracy", "AUC", "val_f1"])
def test_accuracies_are_better_when_large(name: str) -> None:
    assert metric_of(name) == Metric(name, "max")


def test_other_metrics_say_which() -> None:
    assert metric_of("neg_log_loss") == Metric("neg_log_loss", "max")
    assert metric_of("validation:loss") == Metric("validation:loss", "min")
    assert metric_of("accuracy:top1") == Metric("accuracy:top1", "max")
    assert metric_of("ndcg:max") == Metric("ndcg", "max")
    assert metric_of("val_acc:min") == Metric("val_acc", "min")


@pytest.mark.parametrize("name", ["ndcg", "glossary", "loss_acc", ":max", "x:most", "acc:best", "val_loss:minimum"])
def test_a_name_that_says_nothing_is_an_error_with_what_to_write(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"checkpoint_best='{name}' does not tell .*; write '{name}:min' or '{name}:max'"
    ):
        metric_of(name)


def test_better_is_strictly_better_and_finite() -> None:
    loss, accuracy = Metric("loss", "min"), Metric("acc", "max")
    assert loss.is_better(1.0, None)
    assert loss.is_better(1.0, 2.0)
    assert not loss.is_better(2.0, 2.0)
    assert accuracy.is_better(3.0, 2.0)
    assert not accuracy.is_better(float("inf"), None)
    assert not loss.is_better(float("nan"), None)


def test_the_best_come_first_and_of_equal_ones_the_older() -> None:
    scores = {
        SECOND: Score("loss", "min", 1.0), FIRST: Score("loss", "min", 1.0), THIRD: Score("loss", "min", 0.5),
        CheckpointName(1, 1, 4): Score("acc", "max", 0.0),
    }  # fmt: skip
    assert best_first(scores, Metric("loss", "min")) == [THIRD, FIRST, SECOND]
    assert best_first(scores, Metric("loss", "max")) == [FIRST, SECOND, THIRD]


def test_the_best_kept_are_read_once_and_take_what_is_better_than_the_worst_of_them() -> None:
    reads: list[None] = []

    def read() -> dict[CheckpointName, Score]:
        reads.append(None)
        return {FIRST: Score("loss", "min", 2.0), SECOND: Score("loss", "min", 3.0)}

    best = BestKept(Metric("loss", "min"), 2, read)
    assert not best.are_none, "those of earlier runs count"
    assert not best.takes(THIRD, 3.0)
    assert best.takes(THIRD, 2.5)
    assert best.add(THIRD, 2.5) == Score("loss", "min", 2.5)
    assert [name in best for name in (FIRST, SECOND, THIRD)] == [True, False, True]
    assert len(reads) == 1


def test_forgotten_scores_are_not_read_while_one_is_added() -> None:
    """The store that failed a write, which is why they were forgotten, would fail the user's step as well."""
    best = BestKept(Metric("loss", "min"), 2, dict)
    assert best.takes(FIRST, 1.0)
    best.forget()
    best._read = lambda: pytest.fail("was read")
    assert best.add(SECOND, 2.0) == Score("loss", "min", 2.0)
    best._read = dict
    assert best.are_none
