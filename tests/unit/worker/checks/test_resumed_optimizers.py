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
from spark_elastic.worker.checks.resumed_optimizers import check_steppers, describe_steppers
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.optimizers.zero import ZeroRedundancyOptimizer
from spark_elastic.worker.state.snapshot import find_objects


class Net(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.children()]).sum(0)


def made(*names: str, make: Callable[..., Any] = torch.optim.Adam, **settings: Any) -> dict[str, Any]:
    model = Net(*(names or ("a", "b")))
    return {"model": model, "all": [make(model.parameters(), **settings)]}


def check(live: dict[str, Any], saved: dict[str, Any], knows: bool = True) -> None:
    kept = {
        "model": StateDict(saved["model"].state_dict()),
        "all": [StateDict(each.state_dict()) for each in saved["all"]],
    }
    check_steppers(live, kept, describe_steppers(find_objects(saved)) if knows else {})


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


def in_turn(*kinds: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.ChainedScheduler([kind(optimizer) for kind in kinds])


def constant(optimizer: Any) -> Any:
    return lr_scheduler.ConstantLR(optimizer, 0.5)


def decaying(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (
            (decaying, constant),
            r"state\.all\[1\]\._schedulers\[0\] is that of ConstantLR, and it is ExponentialLR here",
        ),
        ((decaying,), r"state\.all\[1\] was saved with ConstantLR, ExponentialLR in it, and has ExponentialLR here"),
        ((constant, decaying, decaying), r"was saved with ConstantLR, ExponentialLR in it"),
    ],
    ids=["in another order", "one less", "one more"],
)
def test_a_scheduler_that_consists_of_others_here_is_refused(kinds: Any, told: str) -> None:
    """Each took over the settings of the one in its place: a rate rose to twice the highest that was wanted."""
    live, saved, alike = made(), made(), made()
    live["all"].append(in_turn(*kinds)(live["all"][0]))
    for each in (saved, alike):
        each["all"].append(in_turn(constant, decaying)(each["all"][0]))
    check(alike, saved)
    with pytest.raises(SparkElasticError, match=told):
        check(live, saved)
    of_earlier = describe_steppers(find_objects(saved))
    del of_earlier["all[1]"]["parts"]
    check_steppers(live, {}, of_earlier)


def train(*objects: dict[str, Any]) -> None:
    for each in objects:
        each["model"](torch.ones(1, 2)).sum().backward()
        for optimizer in each["all"]:
            optimizer.step()


def in_groups(*names: str) -> Callable[..., Any]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        each = list(parameters)
        found = {"first": each[:2], "second": each[2:]}
        return torch.optim.Adam([{"params": found[name]} for name in names])

    return make


@pytest.mark.parametrize("wraps", [False, True])
def test_parameters_in_another_order_are_refused(wraps: bool) -> None:
    """Each parameter went on with the moments of another one."""
    live, saved = made("b", "a"), made("a", "b")
    train(saved)
    if wraps:
        for each in (live, saved):
            each["model"] = DistributedDataParallel(each["model"])
    words = r"the state of state\.all\[0\] goes by the order .* saved with .*a\.weight in the place of .*b\.weight"
    with pytest.raises(SparkElasticError, match=words):
        check(live, saved)
    check(live, saved, knows=False)
    with pytest.raises(SparkElasticError, match="goes by the order"):  # the groups have settings
        check(made("a", "b", make=in_groups("second", "first")), made("a", "b", make=in_groups("first", "second")))


def test_an_optimizer_that_stepped_another_model_is_refused() -> None:
    """Two models had been swapped, and their optimizers had not."""
    live, saved = ({"one": Net("a"), "two": Net("a")} for _ in range(2))
    for each in (live, saved):
        each["all"] = [torch.optim.Adam(each["one"].parameters())]
    saved["one"](torch.ones(1, 2)).sum().backward()
    saved["all"][0].step()
    saved["one"], saved["two"] = saved["two"], saved["one"]
    described = describe_steppers(find_objects(saved))
    kept = {"all": [StateDict(saved["all"][0].state_dict())]}
    with pytest.raises(SparkElasticError, match=r"saved with two\.a\.weight in the place of one\.a\.weight"):
        check_steppers(live, kept, described)


def test_a_parameter_that_has_several_names_may_have_been_saved_under_another() -> None:
    live, saved = made("a", "b"), made("a", "b")
    train(saved)
    live = {"part": live["model"].a, **live}
    check(live, saved)
    check(saved, live)


def test_an_order_of_its_own_is_none_of_the_models() -> None:
    """The model registered its parts in another order, and the optimizer had them in the same."""
    live, saved = made("b", "a", make=in_groups("second", "first")), made("a", "b", make=in_groups("first", "second"))
    train(saved)
    check(live, saved)
    live, saved = made("b", "a", make=torch.optim.SGD, lr=0.1), made("a", "b", make=torch.optim.SGD, lr=0.1)
    train(saved)
    check(live, saved)  # without momentum there is no state that goes by an order
    check(made("a", "b"), made("a", "c"))  # another model, which says so when it is loaded
    check({"model": torch.nn.Linear(1, 1)}, made())
