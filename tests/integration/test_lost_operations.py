"""A peer that dies while an operation is being written: Gloo loses it, and the survivor goes on all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lost_operations import train_through_a_lost_operation

import spark_elastic
from spark_elastic.testing import inject, kill, local_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with local_cluster(slots=2) as cluster:
        yield cluster


def let_the_survivor_go_on(path: Path) -> None:
    """Wait until both processes are known and the second has died, and continue the first."""
    while not path.exists():
        time.sleep(0.01)
    survivor, dying = map(int, path.read_text().split())
    while psutil.pid_exists(dying):
        time.sleep(0.01)
    psutil.Process(survivor).resume()


@pytest.mark.parametrize("kind", ["backward", "collective", "sending", "receiving"])
def test_a_survivor_whose_operation_gloo_has_lost_goes_on_in_its_process(
    cluster: Any, tmp_path: Path, kind: str
) -> None:
    threading.Thread(target=let_the_survivor_go_on, args=(tmp_path / "processes",), daemon=True).start()
    with inject(kill(rank=1, step=6), kill(rank=1, step=7)):  # the group that has lost an operation is freed meanwhile
        results = spark_elastic.run(
            train_through_a_lost_operation,
            (kind, str(tmp_path)),
            local=cluster,
            num_proc=2,
            min_np=2,
            hang_timeout=20.0,
            elastic_timeout=20.0,
        )
    (survivor, dead), _ = results[0]
    processes = [process for _, process in results]
    assert survivor in processes
    assert dead not in processes
