"""What is in a State twice would become two objects in silence."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic import TorchState


@pytest.mark.parametrize("shared", [[], {}, set(), deque(), np.zeros(2), torch.zeros(2)])
def test_what_is_given_under_two_names_is_warned_of_at_the_users_line(shared: Any) -> None:
    with pytest.warns(UserWarning, match=r"state\.first and state\.others\['same'\]\[0\] are the same") as told:
        TorchState(first=shared, others={"same": (shared,)})
    assert [warning.filename for warning in told] == [__file__]


def test_equal_values_and_objects_that_restore_themselves_may_be_in_two_places() -> None:
    model, constant, text = torch.nn.Linear(1, 1), (1, 2), "text"
    optimizer = torch.optim.SGD(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchState(model=model, same=[model], optimizer=optimizer, all=[optimizer], a=[], b=[], c=constant, d=constant)
        TorchState(e=text, f=[text, text, None, None, len, len])


def test_a_container_that_contains_itself_is_refused() -> None:
    cyclic: dict[str, Any] = {"inner": []}
    cyclic["inner"].append(cyclic)
    with pytest.raises(ValueError, match=r"state\.tree\['inner'\]\[0\] is a dict that contains itself"):
        TorchState(tree=cyclic)
