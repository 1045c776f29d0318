"""A user's traceback shows the user's code, and ours only where the error arose in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spark_elastic as se
from spark_elastic.worker.tracebacks import format_for_user, text_of


def shown(act: Callable[[Any], None]) -> str:
    """The traceback of what ``act`` raises inside an elastic function."""
    with pytest.raises(Exception, match=r"\S") as caught:
        se.elastic(act)(se.ObjectState(step=0))
    return format_for_user(caught.value)


def test_frames_that_led_to_the_users_code_are_left_out() -> None:
    def look(state: Any) -> None:
        raise ValueError("row 30 is poisoned")

    text = shown(look)
    assert text.startswith("Traceback (most recent call last):")
    assert "in look" in text
    assert "worker/elastic.py" not in text
    assert text.endswith("ValueError: row 30 is poisoned\n")


def test_frames_in_which_the_error_arose_stay() -> None:
    def look(state: Any) -> None:
        se.DistributedDataParallel("no module")

    text = shown(look)
    assert "in look" in text
    assert "worker/ddp/wrapper.py" in text
    assert "worker/elastic.py" not in text


def test_the_cause_of_an_error_is_shown_the_same_way() -> None:
    def look(state: Any) -> None:
        try:
            se.elastic(lambda state: 1 / 0)(state)
        except ZeroDivisionError as error:
            raise ValueError("outer") from error

    text = shown(look)
    assert "ZeroDivisionError" in text
    assert "direct cause" in text
    assert "worker/elastic.py" not in text


def test_how_torch_calls_a_forward_is_left_out() -> None:
    def look(state: Any) -> None:
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 3))(torch.ones(1, 2))

    text = shown(look)
    assert "call_impl" not in text
    assert text.count("container.py") == 1
    assert "in look" in text
    assert "linear.py" in text, "the error arose there"


def test_torchs_wrapper_above_the_elastic_function_is_told_what_takes_its_place() -> None:
    with pytest.raises(ValueError, match="process group") as caught:
        torch.distributed.get_rank()  # as torch's wrapper does, whose import takes seconds
    text = format_for_user(caught.value)
    assert "wrap models in spark_elastic.DistributedDataParallel instead of torch's" in text.splitlines()[-1]


class Unreadable(Exception):
    """As exceptions of clients are whose ``__str__`` looks into an answer that has another form."""

    def __str__(self) -> str:
        return str({}["message"])


def test_an_exception_whose_text_cannot_be_read_is_formatted_all_the_same() -> None:
    assert "Unreadable: <exception str() failed>" in format_for_user(Unreadable())
    assert text_of(Unreadable()) == "Unreadable"
    assert text_of(ValueError("bad row")) == "bad row"
    assert text_of(ValueError()) == "ValueError"
