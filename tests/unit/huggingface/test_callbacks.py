"""An ElasticTrainer's own callbacks, as a new world begins; test_frameworks.py has jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.integrations import MLflowCallback

from spark_elastic.huggingface.callbacks import GoOn, Last


class Loader(SimpleNamespace):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("epoch", "steps_left", "is_within"),
    [(2, 4, True), (2, 10, False), (2, 0, False), (3, 4, False)],
    ids=["within an epoch", "at its beginning", "at its end", "after one that a callback has ended early"],
)
def test_what_callbacks_counted_is_loaded_over_the_beginning_of_an_epoch_that_had_begun(
    epoch: int, steps_left: int, is_within: bool
) -> None:
    """After an epoch that was ended early, the next one began with its count, and was ended after a step."""
    calls: list[str] = []
    trainer: Any = SimpleNamespace(
        elastic=SimpleNamespace(loader=Loader(epoch=2, steps_left=steps_left), progress={"epoch": epoch}),
        _remember=lambda: calls.append("remember"),
        _load=lambda: calls.append("load"),
    )
    last = Last(trainer)
    last.on_train_begin()
    for _ in range(2):
        last.on_epoch_begin()
    assert calls == ["remember", *["load"] * is_within]


def test_where_a_process_becomes_rank_0_trackers_are_set_up_once_more() -> None:
    """MLflow's had been set up without a run, began a nameless one with the first value, and did not end it."""
    reporter, own = MLflowCallback(), SimpleNamespace(_initialized=True)
    trainer: Any = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[own, reporter]), _begin=lambda: None, _forget=lambda: None
    )
    callback, seen = GoOn(trainer), []
    for is_first in (False, True, True):
        reporter._initialized = True
        callback.on_train_begin(None, SimpleNamespace(is_world_process_zero=is_first))
        seen.append(reporter._initialized)
    assert seen == [True, False, True]
    assert own._initialized
