"""What run() finds out of its arguments before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spark_elastic


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"min_np": np.int64(2), "max_np": np.int32(1)}, "min_np <= max_np must hold, but min_np=2, max_np=1"),
        ({"num_proc": np.int64(0)}, "num_proc must be a whole number from 1 on, not 0"),
        ({"num_proc": True}, "num_proc must be a whole number from 1 on, not True"),
        ({"num_proc": 1.0}, "num_proc must be a whole number from 1 on, not 1.0"),
        ({"checkpoint": 5}, "checkpoint must be a directory or a URL, not 5"),
        ({"checkpoint": b"/tmp"}, "checkpoint must be a directory or a URL, not b'/tmp'"),
        ({"checkpoint_keep": 5}, "checkpoint_keep=5 needs checkpoint=, the place where checkpoints are written"),
        ({"checkpoint_interval": 5}, "checkpoint_interval=5 needs checkpoint="),
        ({"checkpoint_interval": -1}, "checkpoint_interval must be a number of seconds from 0 on, not -1"),
        ({"checkpoint_best": "loss"}, "checkpoint_best='loss' needs checkpoint="),
        ({"storage_options": {"anon": True}}, "storage_options needs checkpoint="),
        ({"checkpoint": "/tmp", "storage_options": 5}, "storage_options must be a dict of options, not 5"),
        ({"event_log": 5}, "event_log must be the path of a file, not 5"),
        ({"event_log": ""}, "event_log must be the path of a file, not ''"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_whole_numbers_may_be_numpys(
    arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        spark_elastic.run(int, local=True, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"hang_timeout": -1},
        {"backend": "mpi"},
        {"env": {"A": 1}},
        {"driver_port": 65536},
        {"loggers": [5]},
        {"durable": True},
    ],
)
def test_nothing_is_written_to_the_checkpoint_directory_if_an_argument_is_wrong(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        spark_elastic.run(int, local=True, checkpoint=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []
