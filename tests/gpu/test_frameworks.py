"""The examples for other frameworks, whose trainers choose the device themselves; skipped where those are not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from examples_here import example

from spark_elastic.testing import kill

EXAMPLES = {
    "lightning_trainer": ("lightning", ()),
    "fabric": ("lightning", ("bf16-mixed",)),
    "accelerate_loop": ("accelerate", ("fp16",)),
    "huggingface_trainer": ("transformers", ()),
}


@pytest.mark.parametrize("name", tuple(EXAMPLES))
def test_a_framework_trains_on_the_device_and_counts_each_item_once(run: Callable[..., Any], name: str) -> None:
    package, arguments = EXAMPLES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    items, epochs = 640, 2
    train = example(name).train_fn
    done = run(train, items, epochs, *arguments, num_proc=2, min_np=2, max_np=2, faults=[kill(rank=1, step=5)])
    assert done.faults == 1
    assert [result["items"] for result in done.results] == [items * epochs] * 2
    assert len({result["weights"] for result in done.results}) == 1
    assert done.of("world_formed")
