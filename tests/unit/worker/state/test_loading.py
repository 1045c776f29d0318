"""Loading a kept state: in place, and never so that later steps change what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spark_elastic.checkpoint.skeleton import map_tree
from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.state.loading import Loading, load_state_dict
from spark_elastic.worker.state.snapshot import cloned


def trained(kind: type[torch.optim.Optimizer], steps: int, **settings: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(steps)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


def tensors(state: Any) -> list[torch.Tensor]:
    return [
        tensor for entry in state["state"].values() for tensor in entry.values() if isinstance(tensor, torch.Tensor)
    ]


@pytest.mark.parametrize(
    ("saved", "here", "told"),
    [
        (
            torch.optim.SGD,
            torch.optim.Adam,
            "not that of the Adam here: it has momentum, dampening, nesterov and no betas, eps",
        ),
        (torch.optim.Adam, torch.optim.RMSprop, "not that of the RMSprop here: it has betas"),
        (torch.optim.Adam, torch.optim.AdamW, "with decoupled_weight_decay=False, AdamW here has True"),
    ],
)
def test_the_state_of_an_optimizer_of_another_class_is_refused(saved: Any, here: Any, told: str) -> None:
    kept = trained(saved, 3)[1].state_dict()
    _, optimizer = trained(here, 0)
    with pytest.raises(SparkElasticError, match=told):
        load_state_dict(optimizer, kept)
    load_state_dict(trained(saved, 0)[1], kept)


def test_the_state_of_a_scheduler_of_another_class_is_refused() -> None:
    schedules = torch.optim.lr_scheduler
    _, optimizer = trained(torch.optim.SGD, 0)
    kept = schedules.StepLR(optimizer, 10).state_dict()
    with pytest.raises(
        SparkElasticError, match="CosineAnnealingLR here: it has step_size, gamma and no T_max, eta_min"
    ):
        load_state_dict(schedules.CosineAnnealingLR(optimizer, 10), kept)
    load_state_dict(schedules.StepLR(optimizer, 5), kept)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("steps_of_target", [0, 1, 5])
def test_an_optimizer_gets_what_was_kept_and_leaves_it_as_it_is(
    kind: type[torch.optim.Optimizer], steps_of_target: int
) -> None:
    kept = cloned(trained(kind, 3)[1].state_dict())
    untouched = cloned(kept)
    model, optimizer = trained(kind, steps_of_target)
    optimizer.param_groups[0]["lr"] = 7.0
    load_state_dict(optimizer, kept)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(map(torch.equal, tensors(optimizer.state_dict()), tensors(kept)))
    step(model, optimizer)
    assert all(map(torch.equal, tensors(kept), tensors(untouched)))
    assert not all(map(torch.equal, tensors(optimizer.state_dict()), tensors(kept)))


def test_an_optimizer_with_the_same_tensors_keeps_them() -> None:
    _, optimizer = trained(torch.optim.Adam, 2)
    before = [tensor.data_ptr() for tensor in tensors(optimizer.state_dict())]
    load_state_dict(optimizer, cloned(trained(torch.optim.Adam, 5)[1].state_dict()))
    assert [tensor.data_ptr() for tensor in tensors(optimizer.state_dict())] == before


class CountingInSettings(torch.optim.SGD):
    """Keeps an attribute among the settings of its state dict, whose keys are the usual ones."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        content = super().state_dict()
        content["param_groups"][0]["steps"] = self.steps
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["param_groups"][0].pop("steps")
        super().load_state_dict(state_dict)


def test_an_optimizer_with_a_load_state_dict_of_its_own_is_asked_although_its_tensors_match() -> None:
    _, optimizer = trained(CountingInSettings, 1, momentum=0.9)
    optimizer.steps = 1
    kept = cloned(optimizer.state_dict())
    optimizer.steps = 2
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    for momentum in momenta:
        momentum.mul_(2)
    load_state_dict(optimizer, kept)
    assert optimizer.steps == 1
    for number, (momentum, state) in enumerate(zip(momenta, optimizer.state.values(), strict=True)):
        assert state["momentum_buffer"] is momentum, "it would be a second copy of a large state"
        assert torch.equal(momentum, kept["state"][number]["momentum_buffer"])
    assert "steps" not in optimizer.param_groups[0]


class InFormatOfItsOwn(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state_dict["rate"]


def test_an_optimizers_state_dict_may_have_a_format_of_its_own() -> None:
    _, optimizer = trained(InFormatOfItsOwn, 1)
    load_state_dict(optimizer, {"rate": 0.25})
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_optimizer_of_other_parameters_is_refused_by_itself() -> None:
    _, optimizer = trained(torch.optim.Adam, 1)
    other = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="parameter"):
        load_state_dict(optimizer, other.state_dict())


def test_a_module_copies_and_clears_its_gradients() -> None:
    model, _ = trained(torch.optim.SGD, 1)
    kept = cloned(model.state_dict())
    untouched = cloned(kept)
    load_state_dict(model, kept)
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(kept["weight"], untouched["weight"])


class Counting(torch.nn.Module):
    """Keeps a tensor as extra state, by reference."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def get_extra_state(self) -> torch.Tensor:
        return self.count

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = state


def test_extra_state_of_a_module_does_not_share_the_kept_tensor() -> None:
    model = torch.nn.Sequential(Counting())
    kept = cloned(model.state_dict())
    load_state_dict(model, kept)
    model[0].count += 1
    assert kept["0._extra_state"] == 0


def test_other_objects_get_tensors_of_their_own() -> None:
    class Average:
        def __init__(self) -> None:
            self.mean = torch.zeros(2)

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mean = state["mean"]

    kept = {"mean": torch.ones(2)}
    average = Average()
    load_state_dict(average, kept)
    average.mean += 1
    assert torch.equal(kept["mean"], torch.ones(2))


def test_a_scaler_may_step_again_after_a_reset_between_step_and_update() -> None:
    model, optimizer = trained(torch.optim.SGD, 0)
    scaler = torch.amp.GradScaler("cpu")
    kept = cloned(scaler.state_dict())
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).square().sum()).backward()
        scaler.step(optimizer)
        load_state_dict(scaler, kept)  # a worker was lost before scaler.update()


def test_a_scaler_that_is_not_enabled_has_nothing_to_load() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    load_state_dict(scaler, cloned(scaler.state_dict()))
    assert scaler.get_scale() == 1.0


def with_dtype(model: torch.nn.Module, kind: type[torch.optim.Optimizer], dtype: torch.dtype, **settings: Any) -> Any:
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(parameter, 1 / 3 + number, dtype=dtype),
            "exp_avg_sq": torch.full_like(parameter, 1 / 7, dtype=dtype),
        }
    return optimizer


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_float32_moments_of_bfloat16_weights_stay_float32_in_an_optimizer_that_has_made_no_step(settings: Any) -> None:
    donor = with_dtype(torch.nn.Linear(3, 2).bfloat16(), torch.optim.AdamW, torch.float32)
    kept = cloned(donor.state_dict())
    newcomer = torch.optim.AdamW(torch.nn.Linear(3, 2).bfloat16().parameters(), **settings)
    load_state_dict(newcomer, kept)
    got = tensors(newcomer.state_dict())
    assert [tensor.dtype for tensor in got] == [torch.float32] * 6
    assert all(map(torch.equal, got, tensors(kept)))
    newcomer.param_groups[0]["params"][0].grad = torch.ones(2, 3).bfloat16()
    got[1].zero_()
    assert not torch.equal(got[1], tensors(kept)[1]), "the kept tensors stay the keeper's"


class Remembering(torch.optim.SGD):
    """Keeps nested state, of a dtype that is not its parameters'."""

    def remember(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"past": [torch.ones(2, dtype=torch.float64) / 3, {"n": torch.tensor(2**53 + 1)}]}


def test_nested_state_of_a_users_own_optimizer_keeps_its_dtypes_and_values() -> None:
    donor = Remembering(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    donor.remember()
    newcomer = Remembering(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    load_state_dict(newcomer, cloned(donor.state_dict()))
    past = newcomer.state[newcomer.param_groups[0]["params"][0]]["past"]
    assert past[0].tolist() == [1 / 3, 1 / 3]
    assert past[1]["n"].item() == 2**53 + 1


def test_parameters_without_state_stay_without() -> None:
    model = torch.nn.Linear(3, 2)
    donor = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    donor.step()
    newcomer = trained(torch.optim.Adam, 2)[1]
    load_state_dict(newcomer, cloned(donor.state_dict()))
    assert len(newcomer.state_dict()["state"]) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_module_of_another_dtype_is_refused_instead_of_converted(dtype: torch.dtype) -> None:
    kept = cloned(torch.nn.Linear(3, 2).state_dict())
    with pytest.raises(
        SparkElasticError, match=r"weight is torch\.float32 in what was saved and torch\.\w+64|bfloat16"
    ):
        load_state_dict(torch.nn.Linear(3, 2).to(dtype), kept)


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("kept_compiled", [False, True])
@pytest.mark.parametrize("here_compiled", [False, True])
def test_compiled_modules_and_plain_ones_load_each_other(kept_compiled: bool, here_compiled: bool) -> None:
    def make(is_compiled: bool) -> Any:
        inner = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        return torch.nn.ModuleDict({"net": compiled(inner) if is_compiled else inner})

    donor, here = make(kept_compiled), make(here_compiled)
    torch.nn.init.constant_(next(donor.parameters()), 7.0)
    load_state_dict(here, cloned(donor.state_dict()))
    assert next(here.parameters()).eq(7.0).all()


def test_a_learned_tensor_for_which_there_is_none_here_goes_on_learning() -> None:
    kept = torch.ones(2, requires_grad=True)
    loaded = dict(Loading().load({}, {"x": kept}))["x"]
    assert isinstance(loaded, torch.Tensor)
    assert loaded.is_leaf
    assert loaded.requires_grad
    assert loaded.data_ptr() != kept.data_ptr()


def test_a_tensor_whose_elements_share_memory_is_replaced_instead_of_written_to() -> None:
    present = torch.zeros(1).expand(3)
    loaded = dict(Loading().load({"x": present}, {"x": torch.arange(3.0)}))["x"]
    assert isinstance(loaded, torch.Tensor)
    assert loaded.tolist() == [0.0, 1.0, 2.0]


def test_an_object_of_a_class_that_pickle_calls_by_a_shorter_name_is_loaded_in_place() -> None:
    def made(value: int) -> Any:
        class Counted:
            def __init__(self) -> None:
                self.value = value

        return Counted()

    present, kept = made(1), made(2)
    type(kept).__qualname__ = "Counted"
    loaded = dict(Loading().load({"counted": present}, {"counted": kept}))
    assert loaded["counted"] is present
    assert (present.value, kept.value) == (2, 2)


def test_moments_of_a_channels_last_weight_have_its_layout_in_an_optimizer_that_has_made_no_step() -> None:
    """A fused step reads both in the order of memory."""

    def made() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        return weight, torch.optim.Adam([weight], lr=0.1, fused=True)

    def step(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, seed: int) -> None:
        weight.grad = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(seed)).contiguous(
            memory_format=torch.channels_last
        )
        optimizer.step()

    weight, optimizer = made()
    step(weight, optimizer, 1)
    kept = map_tree(
        lambda value: value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value,
        optimizer.state_dict(),
    )
    other, fresh = made()
    with torch.no_grad():
        other.copy_(weight)
    load_state_dict(fresh, kept)
    for each, stepping in ((weight, optimizer), (other, fresh)):
        step(each, stepping, 2)
    assert torch.equal(weight, other)


def test_what_a_scaler_has_left_on_an_optimizer_in_mid_step_goes() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer: Any = torch.optim.SGD([weight], lr=0.1)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    load_state_dict(optimizer, optimizer.state_dict())
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
