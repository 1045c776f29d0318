"""Losses that ignore labels, where nothing stands for them."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
from torch import nn

from spark_elastic.errors import DataError
from spark_elastic.estimator.objective import check_united, refuse_ignored


def test_ignored_labels_are_refused_where_rows_cannot_be_weighted_by_what_a_loss_counts() -> None:
    output, label, ignored = torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([0, -100])
    entropy = nn.CrossEntropyLoss()
    refuse_ignored([(entropy, output, label), (nn.MSELoss(), output, output - 100)], ["a", "b"])
    with pytest.raises(DataError, match="CrossEntropyLoss ignores labels of column 'b' that are -100"):
        refuse_ignored([(entropy, output, label), (entropy, output, ignored)], ["a", "b"])
    with pytest.raises(DataError, match="of column 'a' that are 7"):
        refuse_ignored([(nn.CrossEntropyLoss(ignore_index=7), output, torch.tensor([0, 7]))], ["a"])


class OfItsOwnRows:
    """A metric that keeps a state which nobody else's can be added to."""

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> float:
        return 0.0

    def reset(self) -> None: ...

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0


def test_a_state_that_nobody_elses_can_be_added_to_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"metrics: own keeps a state, .* over its own rows .* merge_state\(others\)"):
        check_united("own", OfItsOwnRows())
    for metric in (torchmetrics.MeanMetric(), nn.L1Loss(), lambda output, label: 0.0):
        check_united("fine", metric)
