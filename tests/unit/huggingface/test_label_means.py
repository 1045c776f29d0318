"""Whether a loss is a mean over labels or over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from spark_elastic.huggingface.label_means import averages_labels

LABELS = torch.tensor([[-100, -100, 2, 0], [1, 0, 2, 1], [0, -100, -100, -100]])


def inputs(labels: torch.Tensor = LABELS) -> dict[str, Any]:
    logits = torch.randn((*labels.shape, 3), generator=torch.Generator().manual_seed(0))
    return {"logits": logits, "labels": labels.clone(), "name": "not a tensor", "scale": torch.tensor(2.0)}


def losses(part: dict[str, Any]) -> list[torch.Tensor]:
    """Return a loss for each label of each row that has some."""
    rows = zip(part["logits"], part["labels"], strict=True)
    return [
        part["scale"]
        * cross_entropy(logits.reshape(-1, 3), labels.reshape(-1), reduction="none")[labels.reshape(-1) != -100]
        for logits, labels in rows
    ]


def over_labels(part: dict[str, Any]) -> float:
    return float(torch.cat(losses(part)).mean())


def over_rows(part: dict[str, Any]) -> float:
    return float(torch.stack([each.mean() for each in losses(part) if len(each)]).mean())


def summed(part: dict[str, Any]) -> float:
    return float(torch.cat(losses(part)).sum())


def of_last(part: dict[str, Any]) -> float:
    """A mean over rows that looks at the last label only."""
    return float(part["labels"].reshape(len(part["labels"]), -1)[:, -1].float().mean())


def count(labels: torch.Tensor) -> int:
    return int((labels != -100).sum())


@pytest.mark.parametrize(
    ("loss", "found"),
    [(over_labels, True), (over_rows, False), (of_last, False), (summed, None), (lambda part: 1.0, None)],
)
def test_the_loss_of_two_rows_tells_what_it_is_a_mean_over(loss: Any, found: bool | None) -> None:
    given = inputs()
    assert averages_labels(loss, given, count) is found
    assert torch.equal(given["labels"], LABELS), "they are trained with next"


def test_rows_may_have_one_label_or_none() -> None:
    assert averages_labels(over_labels, inputs(torch.tensor([-100, 1])), count) is True
    assert averages_labels(over_labels, inputs(torch.tensor([[-100], [1]])), count) is True
    assert averages_labels(over_labels, inputs(torch.tensor([-100, -100])), count) is None


def test_labels_may_be_shifted() -> None:
    def shifted(part: dict[str, Any]) -> float:
        return over_labels({**part, "labels": part["labels"][:, 1:], "logits": part["logits"][:, :-1]})

    assert averages_labels(shifted, inputs(), lambda labels: count(labels[:, 1:])) is True


def test_tensors_of_other_lengths_are_told_of() -> None:
    with pytest.raises(ValueError, match="a tensor of 5 among those of 3 rows"):
        averages_labels(over_labels, {**inputs(), "patches": torch.zeros(5, 2)}, count)
