"""Losses that ignore labels, and metrics over the rows of all ranks."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from forked_world import on_ranks, world
from torch import nn

from spark_elastic.errors import DataError
from spark_elastic.estimator import objective as module
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.objective import Objective, check_united, refuse_ignored, united


def test_ignored_labels_are_refused_where_rows_cannot_be_weighted_by_what_a_loss_counts() -> None:
    output, label, ignored = torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([0, -100])
    entropy = nn.CrossEntropyLoss()
    refuse_ignored([(entropy, output, label), (nn.MSELoss(), output, output - 100)], ["a", "b"])
    with pytest.raises(DataError, match="CrossEntropyLoss ignores labels of column 'b' that are -100"):
        refuse_ignored([(entropy, output, label), (entropy, output, ignored)], ["a", "b"])
    with pytest.raises(DataError, match="of column 'a' that are 7"):
        refuse_ignored([(nn.CrossEntropyLoss(ignore_index=7), output, torch.tensor([0, 7]))], ["a"])


def test_weights_of_one_change_nothing_however_a_loss_takes_its_reduction() -> None:
    output, label = torch.randn(4, 3).log_softmax(1), torch.rand(4, 3)
    for loss in (nn.KLDivLoss(reduction="batchmean"), partial(nn.functional.kl_div, reduction="batchmean")):
        assert module._weighted_mean(loss, output, label, torch.ones(4)) == pytest.approx(loss(output, label).item())


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


ROWS = torch.Generator().manual_seed(1)
SCORES, CLASSES = torch.rand((12, 3), generator=ROWS), torch.arange(12) % 3


@pytest.mark.parametrize(
    ("metric", "columns"),
    [
        (torchmetrics.AUROC(task="multiclass", num_classes=3), (SCORES, CLASSES)),
        (torchmetrics.MeanSquaredError(), (SCORES[:, 0], SCORES[:, 1])),
        (
            torchmetrics.ExplainedVariance(),
            (SCORES[:, :2], SCORES[:, 1:]),
        ),  # its states get their shapes from the first rows
        (torchmetrics.PearsonCorrCoef(), (SCORES[:, 0], SCORES[:, 1])),
        (torchmetrics.SpearmanCorrCoef(), (SCORES[:, 0], SCORES[:, 1])),
        (torchmetrics.SpearmanCorrCoef() + torchmetrics.MeanSquaredError(), (SCORES[:, 0], SCORES[:, 1])),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("parts", [[slice(0, 12), slice(0, 0)], [slice(0, 5), slice(5, 12)]], ids=["none", "some"])
def test_a_metric_of_torchmetrics_is_that_of_all_rows_however_few_a_rank_has(
    metric: Any, columns: tuple[torch.Tensor, ...], parts: list[slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, it would wait for ranks that have updated its lists another number of times, or die of what they send."""
    layout = Layout((Input(None, ("x",)),), ("y",))
    ranks = []
    for part in parts:
        ((found, _),) = Objective((), (), {"m": metric}).accumulators(layout, torch.device("cpu")).values()
        for start in range(part.start, part.stop, 2):  # in batches, of which the ranks have unequal numbers
            found.update(*(column[start : min(start + 2, part.stop)] for column in columns))
        ranks.append(found)
    monkeypatch.setattr(module.se, "size", lambda: 2)
    states = [module._states(rank) for rank in ranks]
    monkeypatch.setattr(module.se, "allgather_object", lambda mine: copy.deepcopy(states))
    whole = copy.deepcopy(metric)
    whole.update(*columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that nothing has been updated, for example
        for rank in ranks:
            assert torch.allclose(united(rank).compute(), whole.compute())


def combine(folder: Path, rank: int) -> list[float]:
    def gather(mine: Any) -> list[Any]:
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, mine)
        return gathered

    module.se = SimpleNamespace(size=lambda: 2, allgather_object=gather)  # type: ignore[attr-defined]
    layout = Layout((Input(None, ("x",)),), ("y",))
    metrics = {"sum": torchmetrics.SumMetric(), "r": torchmetrics.PearsonCorrCoef()}
    found = []
    with world(folder, rank, 2, []):
        for name, (metric, _) in Objective((), (), metrics).accumulators(layout, torch.device("cpu")).items():
            part = slice(0, 5) if rank else slice(5, 12)
            columns = [SCORES[part, 0], SCORES[part, 1]][: 1 if name == "sum" else 2]
            metric.update(*columns)
            found.append(float(united(metric).compute()))
    return found


def test_ranks_combine_a_metric_of_torchmetrics_once() -> None:
    correlation = torchmetrics.PearsonCorrCoef()
    correlation.update(SCORES[:, 0], SCORES[:, 1])
    expected = [SCORES[:, 0].sum().item(), correlation.compute().item()]
    for found in on_ranks(2, combine):
        assert found == pytest.approx(expected, rel=1e-5)


def test_outputs_of_a_step_that_metrics_do_not_know_are_named() -> None:
    layout, metrics = Layout((Input(None, ("x",)),), ("a", "b")), {"gap": lambda output, label: 0.0}
    one = Objective((nn.MSELoss(),), (), metrics, count=2).for_outputs(layout, 1)
    pair = (nn.MSELoss(), SCORES[:, :1], SCORES[:, 1:2])
    assert one.measure(layout, [pair]) == {"gap": 0.0}
    with pytest.raises(TypeError, match="of which labels take 1, and trainStep returned 2"):
        one.measure(layout, [pair, pair])
