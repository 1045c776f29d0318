"""What code may change on the model of a ShardedState: attributes of torch's own parts, and parts without tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank_sharded import held_again, made, train
from torch import nn
from worker_stage import Stage

from spark_elastic import ShardedState
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.state.fully_sharded.as_built import AsBuilt


class Net(nn.Module):
    """A module with parts of torch's, and with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.act = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, scaled."""
        result: torch.Tensor = self.act(self.norm(self.first(x))) * self.temperature
        return result


@pytest.fixture
def net_state(stage: Stage) -> ShardedState:
    state = made(build=Net, step=0)
    stage.begin(state)
    return state


def test_attributes_of_torchs_parts_go_back_to_the_commit_after_each_loss(
    stage: Stage, net_state: ShardedState
) -> None:
    for rate in (0.1, 0.2):
        net: Any = net_state.model
        net.act[1].p, net.norm.momentum, net.temperature = rate, None, 2.0
        net_state.commit()
        net.act[1].p = 0.9
        held_again(stage, net_state)
        net = net_state.model
        assert (net.act[1].p, net.norm.momentum) == (rate, None)
        assert net.temperature == 1.0, "an attribute of the user's class is what build= makes, like all of its others"
    net_state.commit()
    held_again(stage, net_state)
    assert net_state.model.act[1].p == 0.2  # type: ignore[index, union-attr]


class Counted(nn.ReLU):
    """An activation with extra state."""

    def get_extra_state(self) -> int:
        """Return a count."""
        return 1


def another_head(net: Any) -> None:
    net.first = nn.Linear(3, 5)


def one_with_a_parameter(net: Any) -> None:
    net.act[0] = nn.PReLU()


def one_with_a_buffer(net: Any) -> None:
    net.act[0] = nn.BatchNorm1d(3, affine=False)


def one_with_extra_state(net: Any) -> None:
    net.act[0] = Counted()


def another_name(net: Any) -> None:
    act = net.act
    del net.act
    net.output = act


def one_part_more(net: Any) -> None:
    net.extra = nn.Identity()


def one_part_less(net: Any) -> None:
    del net.act[1]


def another_parameter(net: Any) -> None:
    net.first.bias = nn.Parameter(torch.zeros(3), requires_grad=False)


def one_parameter_less(net: Any) -> None:
    net.first.bias = None


def another_dtype(net: Any) -> None:
    net.double()


def parametrized(net: Any) -> None:
    nn.utils.parametrizations.weight_norm(net.first)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (another_head, r"state\.model\.first was replaced after the model was made"),
        (one_with_a_parameter, r"state\.model\.act\.0 was replaced"),
        (one_with_a_buffer, r"state\.model\.act\.0 was replaced"),
        (one_with_extra_state, r"state\.model\.act\.0 was replaced"),
        (another_name, r"state\.model\.act was removed"),
        (one_part_more, r"state\.model\.extra was added"),
        (one_part_less, r"state\.model\.act\.1 was removed"),
        (another_parameter, r"state\.model\.first\.bias was replaced"),
        (one_parameter_less, r"state\.model\.first\.bias was removed"),
        (another_dtype, r"state\.model\.first\.weight has become torch\.float64 after"),
        (parametrized, r"state\.model\.first\.parametrizations was added"),
    ],
)
def test_a_part_or_parameter_that_the_next_generation_would_not_have_is_refused_at_the_commit(
    net_state: ShardedState, change: Callable[[Any], None], words: str
) -> None:
    net_state.commit()
    change(net_state.model)
    with pytest.raises(TrainingCodeError, match=words):
        net_state.commit()


def test_parts_without_tensors_that_the_function_sets_at_its_top_are_taken_without_a_word(
    stage: Stage, net_state: ShardedState
) -> None:
    for _ in range(2):
        net: Any = net_state.model
        net.act[0], net.act[1] = nn.ReLU(), nn.AlphaDropout(0.3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net_state.commit()
            net.act[1].p = 0.4
            net_state.commit()
        held_again(stage, net_state)
        net = net_state.model
        assert isinstance(net.act[0], nn.Tanh)
        assert net.act[1].p == 0.5, "it begins as build= makes it"


def test_a_part_without_tensors_that_is_replaced_in_mid_training_is_warned_of_once(
    stage: Stage, net_state: ShardedState
) -> None:
    net: Any = net_state.model
    net_state.commit()
    net.act[0] = nn.ReLU()
    with pytest.warns(UserWarning, match=r"state\.model\.act\.0 was replaced in mid-training") as told:
        net_state.commit()
    assert [warning.filename for warning in told] == [__file__]
    net.act[0] = nn.GELU()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net_state.commit()


def test_a_part_of_the_same_class_of_torchs_in_the_place_of_another_hands_its_attributes_on(
    stage: Stage, net_state: ShardedState
) -> None:
    net: Any = net_state.model
    net_state.commit()
    net.act[1] = nn.Dropout(0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net_state.commit()
    held_again(stage, net_state)
    assert net_state.model.act[1].p == 0.3  # type: ignore[index, union-attr]


def test_a_check_of_an_unchanged_module_does_not_walk_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    as_built = AsBuilt(net)
    for walk in ("named_modules", "named_parameters", "named_buffers"):
        monkeypatch.setattr(nn.Module, walk, None)
    as_built.check()
    assert as_built.changed_attributes() == {}


def test_a_commit_may_follow_an_evaluation_which_leaves_parameters_whole(stage: Stage) -> None:
    state = made(steps=0)
    stage.begin(state)
    train(state)
    with torch.no_grad():
        state.model(torch.ones(1, 3))
    state.commit()
    assert not next(iter(state.model.parameters())).isnan().any()
    train(state)
    state.commit()
