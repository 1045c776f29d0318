"""Templates: a commit that fetches tensors only holds what one that writes every state dict down would hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spark_elastic.worker.module_registers import registers
from spark_elastic.worker.state.keepers import OnDevice
from spark_elastic.worker.state.keepers.in_place import InPlace, SmallModule, SmallPart
from spark_elastic.worker.state.keepers.keeper import Content
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import Snapshot, StateDict, as_state_dict
from spark_elastic.worker.state.templates import Templates, has_usual_state_dict, template_of
from tests.unit.worker.state.test_snapshot import same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2, bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.norm(self.first(rows)))
        return out * self.scale


class Job:
    """What a state holds: a network, an optimizer that has stepped, and a scheduler."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = optimizer(self.net.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 3)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def values(self) -> dict[str, Any]:
        return dict(vars(self))


def replace_layer(job: Job) -> None:
    job.net.second = nn.Linear(4, 2, bias=False)


def grow_in_place(job: Job) -> None:
    job.net.second.weight.data = torch.ones(3, 4)


def add_group(job: Job) -> None:
    job.net.third = nn.Linear(2, 2)
    job.optimizer.add_param_group({"params": job.net.third.parameters(), "lr": 0.5})


def tie(job: Job) -> None:
    job.net.third = nn.Linear(4, 2, bias=False)
    job.net.third.weight = job.net.second.weight


def rename(job: Job) -> None:
    job.net._modules["last"] = job.net._modules.pop("second")


def hook(job: Job) -> None:
    job.net.norm.register_state_dict_post_hook(
        lambda module, content, prefix, _: content.update({"more": torch.ones(2)})
    )


def hook_optimizer(job: Job) -> None:
    job.optimizer.register_state_dict_post_hook(lambda _, content: {**content, "more": 1})


def keep_number(job: Job) -> None:
    for number, entry in enumerate(job.optimizer.state.values()):
        entry["count"] = number


def new_moments(job: Job) -> None:
    for entry in job.optimizer.state.values():
        entry.update({name: value.clone() + 1 for name, value in entry.items()})


CHANGES: dict[str, Callable[[Job], Any]] = {
    "a step": Job.step,
    "a rate": lambda job: job.optimizer.param_groups[0].update(lr=0.3),
    "a rate as a tensor": lambda job: job.optimizer.param_groups[0].update(lr=torch.tensor(0.3)),
    "a new setting": lambda job: job.optimizer.param_groups[0].update(note="mine"),
    "evaluation": lambda job: job.net.eval(),
    "a frozen layer": lambda job: job.net.first.requires_grad_(False),
    "another layer": replace_layer,
    "a layer of another shape": grow_in_place,
    "another dtype": lambda job: job.net.double(),
    "a parameter group": add_group,
    "a parameter of two modules": tie,
    "a parameter that is gone": lambda job: job.net.first.register_parameter("bias", None),
    "another name": rename,
    "another buffer": lambda job: setattr(job.net, "scale", torch.full((1,), 3.0)),
    "one more buffer": lambda job: job.net.norm.register_buffer("more", torch.ones(2)),
    "a buffer that is kept from now on": lambda job: job.net._non_persistent_buffers_set.clear(),
    "a hook": hook,
    "a hook of the optimizer": hook_optimizer,
    "another entry": keep_number,
    "other moments": new_moments,
    "no moments": lambda job: job.optimizer.state.clear(),
    "another order": lambda job: job.optimizer.param_groups[0]["params"].reverse(),
    "a loaded state": lambda job: job.optimizer.load_state_dict(Job().optimizer.state_dict()),
    "another optimizer": lambda job: setattr(job, "optimizer", torch.optim.SGD(job.net.parameters(), momentum=0.9)),
    "an object less": lambda job: delattr(job, "scheduler"),
    "an object ahead of the others": lambda job: vars(job).update(
        {"more": nn.Linear(1, 1)} | {name: vars(job).pop(name) for name in list(vars(job))}
    ),
}


def places(job: Job) -> list[object]:
    """What a restore has to put back into its place."""
    registered = [
        (name, id(value))
        for part in job.net.modules()
        for register in registers(part)
        for name, value in register.items()
    ]
    stepped = [[id(parameter) for parameter in group["params"]] for group in job.optimizer.param_groups]
    return [[id(value) for value in vars(job).values()], registered, stepped]


def content_of(snapshot: Snapshot) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, StateDict):
            return [plain(value.content), list(getattr(value.content, "_metadata", {}).items())]
        if isinstance(value, SmallPart):
            return plain(value.content)
        if isinstance(value, SmallModule):
            return plain([value.switches, value.buffers, value.weights, value.extra, value.others])
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return value

    return plain(snapshot.content())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_a_commit_after_any_change_holds_what_a_first_one_would(change: str, optimizer: Any) -> None:
    job, templates = Job(optimizer), Templates(template_of)
    snapshot = Snapshot()
    for _ in range(2):
        snapshot.take(job.values(), None, remembered=templates)
    CHANGES[change](job)
    for _ in range(2):  # written first, then by the template of that
        snapshot.take(job.values(), None, remembered=templates)
        first = Snapshot()
        first.take(job.values(), None)
        assert same(content_of(snapshot), content_of(first))
        assert same(snapshot.objects, first.objects)


@pytest.mark.parametrize("change", CHANGES)
def test_a_small_part_after_any_change_is_what_a_first_one_would_be(change: str) -> None:
    job, keeper = Job(), InPlace()
    templates, snapshot = Templates(keeper.template_of), Snapshot()
    for _ in range(2):
        snapshot.take(job.values(), None, keeper.part_of, templates)
    version, before = templates.version, places(job)
    CHANGES[change](job)
    for _ in range(2):
        snapshot.take(job.values(), None, keeper.part_of, templates)
        first = Snapshot()
        first.take(job.values(), None, keeper.part_of)
        job.net.norm.running_mean.add_(1)  # type: ignore[operator]
        assert same(content_of(snapshot), content_of(first))
    assert templates.version > version or places(job) == before


def test_small_parts_that_stay_are_not_written_down_again() -> None:
    job, keeper = Job(), InPlace()
    templates, snapshot, asked = Templates(keeper.template_of), Snapshot(), []
    job.scheduler.step = lambda: None  # type: ignore[method-assign, assignment]  # which changes a setting

    def keep(value: Any) -> Any:
        asked.append(value)
        return keeper.part_of(value)

    values = {"net": job.net, "optimizer": job.optimizer}
    for _ in range(2):
        snapshot.take(values, None, keep, templates)
    version = templates.version
    asked.clear()
    for _ in range(3):
        snapshot.take(values, None, keep, templates)
        job.step()
    assert not asked
    assert templates.version == version


def test_what_stays_is_not_written_down_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job, templates = Job(), Templates(template_of)
    asked: list[object] = []

    def keep(value: Any) -> StateDict:
        asked.append(value)
        return as_state_dict(value)

    snapshot = Snapshot()
    for _ in range(2):
        snapshot.take(job.values(), None, keep, templates)
        job.step()
    version = templates.version
    asked.clear()
    for _ in range(3):
        snapshot.take(job.values(), None, keep, templates)
        job.step()
    assert asked == [job.scheduler] * 3
    assert templates.version == version


class WithExtra(nn.Linear):
    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Scaled(nn.Linear):
    count = 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.count:
            destination[prefix + "weight"] = destination[prefix + "weight"] * 2


class Counting(torch.optim.SGD):
    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count} if self.count else super().state_dict()


class Late(nn.Linear):
    count = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        content = super().state_dict(*args, **kwargs)
        return {**content, "count": self.count} if self.count else content


class Numbered(torch.optim.SGD):
    """Keeps a number of each parameter."""

    count = 0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "count":
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["seen"] = value


@pytest.mark.parametrize(
    "make",
    [
        lambda: WithExtra(2, 2),
        lambda: Scaled(2, 2),
        lambda: nn.Sequential(nn.Linear(2, 2), WithExtra(2, 2)),
        lambda: Late(2, 2),
        lambda: Counting(nn.Linear(2, 2).parameters()),
        lambda: Numbered(nn.Linear(2, 2).parameters()),
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    ],
)
def test_what_torch_does_not_make_by_itself_is_written_down_at_every_commit(make: Callable[[], Any]) -> None:
    value, templates = make(), Templates(template_of)
    snapshot = Snapshot()
    for count in (0, 0, 1, 2):
        for part in value.modules() if isinstance(value, nn.Module) else [value]:
            part.count = count
        with torch.no_grad():
            for tensor in value.parameters() if isinstance(value, nn.Module) else ():
                tensor.add_(1)
        snapshot.take({"value": value}, None, remembered=templates)
        first = Snapshot()
        first.take({"value": value}, None)
        assert same(content_of(snapshot), content_of(first))


class Labelled(torch.Tensor):
    """Has no memory that could be compared, as wrappers around other tensors have none."""

    def data_ptr(self) -> int:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")


def test_tensors_of_other_classes_are_copied_without_a_template() -> None:
    net, templates, snapshot = Net(), Templates(template_of), Snapshot()
    net.scale = torch.ones(1).as_subclass(Labelled)
    for value in (1.0, 2.0):
        net.scale.fill_(value)
        snapshot.take({"net": net}, None, remembered=templates)
        content: Any = snapshot.content()
        assert float(content["net"].content["scale"]) == value


def test_a_template_serves_a_compiled_model() -> None:
    net = torch.compile(Net())
    templates, snapshot, asked = Templates(template_of), Snapshot(), []

    def keep(value: Any) -> StateDict:
        asked.append(value)
        return as_state_dict(value)

    for _ in range(3):
        snapshot.take({"net": net}, None, keep, templates)
    assert len(asked) == 1


@pytest.mark.parametrize("keeper_class", [OnDevice, InPlace])
def test_what_a_restore_puts_back_is_that_of_its_own_commit(keeper_class: type[OnDevice]) -> None:
    job, keeper = Job(), keeper_class()

    def commit() -> None:
        content: Content = {"steps": 1, "size": 1, "objects": job.values()}
        keeper.take(content, Places(job.values()), None)
        keeper.settle()

    commit()
    commit()
    before = job.net.second
    replace_layer(job)
    assert keeper.current.put_back is not None
    keeper.current.put_back()
    assert job.net.second is before
    replace_layer(job)
    after = job.net.second
    commit()
    job.net.second = before
    keeper.current.put_back()
    assert job.net.second is after


class _Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


class _Other(nn.Linear):
    def state_dict(self, *given: Any, **named: Any) -> Any:
        return super().state_dict(*given, **named)


def _hooked(register: str) -> nn.Module:
    module = nn.Linear(1, 1)
    getattr(module, register)(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "is_usual"),
    [
        (nn.Linear(1, 1), True),
        (nn.BatchNorm1d(1), True),
        (_Other(1, 1), False),
        (_hooked("register_state_dict_post_hook"), False),
        (_hooked("register_state_dict_pre_hook"), False),
    ],
)
@pytest.mark.parametrize("with_extra", [False, True])
def test_a_state_dict_is_usual_if_torch_makes_all_of_it(module: nn.Module, is_usual: bool, with_extra: bool) -> None:
    assert has_usual_state_dict(nn.Sequential(module), with_extra) == is_usual


def test_extra_state_is_usual_on_demand() -> None:
    assert has_usual_state_dict(nn.Sequential(_Extra(1, 1)), with_extra=True)
    assert not has_usual_state_dict(nn.Sequential(_Extra(1, 1)))
