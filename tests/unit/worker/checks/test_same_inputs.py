"""What tells that all ranks give their models the same inputs."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.worker.checks.same_inputs import ENOUGH, LOOKS, SameInputs


def noted(inputs: SameInputs, *values: float) -> int:
    for value in values:
        inputs.note([torch.full((4, 2), value), torch.ones(3, dtype=torch.bool)])
    return inputs.report()


def test_the_same_inputs_have_the_same_digest_and_others_another_one() -> None:
    one, other = SameInputs(), SameInputs()
    assert noted(one, 1.0, 2.0) == noted(other, 1.0, 2.0) != 0
    assert noted(one, 2.0, 1.0) != noted(one, 1.0, 2.0)
    assert noted(one) == 0
    assert -(2**63) <= noted(one, 5.0) < 2**63


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), torch.ones(0), torch.tensor(1)]
)
def test_inputs_of_any_kind_are_noted(tensor: torch.Tensor) -> None:
    inputs = SameInputs()
    inputs.note([tensor])
    inputs.report()


def test_enough_commits_at_which_all_ranks_say_the_same_settle_it_once() -> None:
    inputs = SameInputs()
    found = []
    for value in range(ENOUGH + 2):
        mine = noted(inputs, float(value))
        found.append(inputs.read([mine, mine, mine]))
        assert not inputs.read([0, 0, 0])  # a commit without a forward
    assert found == [False] * (ENOUGH - 1) + [True] + [False] * 2


def test_one_difference_settles_that_rows_are_divided_and_nothing_is_looked_at_any_more() -> None:
    inputs = SameInputs()
    assert not inputs.read([noted(inputs, 1.0), 7])
    assert noted(inputs, 1.0) == 0
    assert not any(inputs.read([value, value]) for value in range(1, 10))


def test_the_same_constant_on_all_ranks_at_every_commit_proves_nothing() -> None:
    inputs = SameInputs()
    assert not any(inputs.read([noted(inputs, 1.0)] * 2) for _ in range(LOOKS))
    assert noted(inputs, 2.0) == 0, "it would be looked at for ever"


def test_only_the_first_inputs_after_a_commit_are_looked_at() -> None:
    one, other = SameInputs(), SameInputs()
    first = [float(number) for number in range(LOOKS)]
    for _ in range(2):
        assert noted(one, *first, 1.0) == noted(other, *first, 2.0) != noted(other, *first[1:], 2.0)


def test_what_was_given_before_a_loss_does_not_count() -> None:
    inputs = SameInputs()
    inputs.read([noted(inputs, 1.0)] * 2)
    inputs.note([torch.ones(1)])
    inputs.begin()
    assert inputs.report() == 0
    assert [inputs.read([value, value]) for value in (1, 2)] == [False] * 2
