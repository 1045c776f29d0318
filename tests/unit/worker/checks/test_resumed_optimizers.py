"""A checkpoint whose optimizers or schedulers are not those here is refused, and torch would take it over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.checks.resumed_optimizers import check_optimizers, kinds_of
from spark_elastic.worker.ddp import DistributedDataParallel
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.zero import ZeroRedundancyOptimizer


class Net(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(2, 2))


def made(*names: str, make: Callable[..., Any] = torch.optim.Adam, **settings: Any) -> dict[str, Any]:
    model = Net(*(names or ("a", "b")))
    return {"model": model, "all": [make(model.parameters(), **settings)]}


def check(live: dict[str, Any], saved: dict[str, Any], knows: bool = True) -> None:
    kept = {
        "model": StateDict(saved["model"].state_dict()),
        "all": [StateDict(each.state_dict()) for each in saved["all"]],
    }
    check_optimizers(live, kept, kinds_of(Places(saved)) if knows else {})


@pytest.mark.parametrize(
    ("one", "other"), itertools.permutations([torch.optim.Adam, torch.optim.RAdam, torch.optim.Adamax], 2)
)
def test_another_class_of_torchs_is_refused(one: Any, other: Any) -> None:
    """RAdam went on with the moments of Adam, and Adamax died in its first step."""
    with pytest.raises(
        SparkElasticError, match=rf"state\.all\[0\] is that of {other.__name__}, and it is {one.__name__} here"
    ):
        check(made(make=one), made(make=other))
    check(made(make=one), made(make=other), knows=False)


def test_classes_of_ones_own_and_divided_optimizers_may_take_the_place_of_others() -> None:
    class Mine(torch.optim.Adam):
        pass

    def divided(parameters: Any) -> Any:
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam)

    for one, other in itertools.permutations((Mine, divided, torch.optim.Adam), 2):
        check(made(make=one), made(make=other))
    with pytest.raises(SparkElasticError, match="is that of AdamW, and it is Adam here"):
        check(made(make=divided), made(make=torch.optim.AdamW))


def test_another_scheduler_of_torchs_is_refused() -> None:
    live, saved = made(), made()
    live["all"].append(lr_scheduler.ExponentialLR(live["all"][0], 0.9))
    saved["all"].append(lr_scheduler.StepLR(saved["all"][0], 1))
    with pytest.raises(SparkElasticError, match=r"state\.all\[1\] is that of StepLR, and it is ExponentialLR here"):
        check(live, saved)


def test_parameters_in_another_order_are_refused() -> None:
    """Each parameter went on with the moments of another one."""
    words = r"state\.model had a\.weight before b\.weight when it was saved, .* the state of state\.all\[0\] goes by the order"
    with pytest.raises(SparkElasticError, match=words):
        check(made("b", "a"), made("a", "b"))
    live, saved = made("b", "a"), made("a", "b")
    for each in (live, saved):
        each["model"] = DistributedDataParallel(each["model"])
    with pytest.raises(SparkElasticError, match="let the model register its parts"):
        check(live, saved, knows=False)


@pytest.mark.parametrize("wraps", [False, True])
def test_the_same_order_is_no_other_one_and_neither_is_one_of_ones_own(wraps: bool) -> None:
    def own(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": rest}, {"params": [first]}], lr=0.1)

    for make in (torch.optim.Adam, own):
        live, saved = made(make=make), made(make=make)
        if wraps:
            live["model"] = DistributedDataParallel(live["model"])
            saved["model"] = DistributedDataParallel(saved["model"])
        check(live, saved)
    check(made("a", "b"), made("a", "c"))  # another model, which says so when it is loaded
    check({"model": torch.nn.Linear(1, 1)}, made())
