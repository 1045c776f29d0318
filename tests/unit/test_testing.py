"""Faults as tests describe and inject them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from spark_elastic.driver.fault_plan import active_plan
from spark_elastic.testing import LocalCluster, exit_with, fault, hang, inject, kill, local_cluster, take_away


def test_a_with_inside_another_one_adds_to_its_faults() -> None:
    with inject(kill(rank=1, step=3)):
        with inject(hang(rank=0)):
            assert [(fault.number, str(fault)) for fault in active_plan()] == [
                (1, "kill(rank=1, step=3)"),
                (2, "hang(rank=0)"),
            ]
        assert [str(fault) for fault in active_plan()] == ["kill(rank=1, step=3)"]
    assert active_plan() == ()


@pytest.mark.parametrize("grace", [-1, float("nan"), "x", None, True])
def test_a_grace_that_is_no_number_of_seconds_is_refused(grace: object) -> None:
    with pytest.raises(ValueError, match=r"^grace must be a number of seconds from 0 on, not "):
        take_away(grace=grace)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": -1}, "rank must be a whole number from 0 on, not -1"),
        ({"step": 1.5}, "step must be a whole number from 0 on, not 1.5"),
        ({"generation": 0}, "generation must be a whole number from 1 on, not 0"),
        ({"times": 0}, "times must be a whole number from 1 on, not 0"),
        ({"code": 256}, "code must be at most 255, as exit codes are, not 256"),
        ({"at": "nowhere"}, "'nowhere' is not a valid Point"),
    ],
)
def test_a_fault_that_could_never_strike_is_refused_where_it_is_written(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        exit_with(**given)


def test_actions_and_points_may_be_given_by_their_names() -> None:
    assert fault("kill", rank=1, at="commit", step=np.int64(3)) == kill(rank=1, step=3)
    with pytest.raises(ValueError, match="'explode' is not a valid Action"):
        fault("explode")


def test_only_faults_are_injected_and_an_error_leaves_none_behind() -> None:
    with pytest.raises(TypeError, match=r"inject takes faults, such as kill\(rank=1, step=3\), not "), inject(kill):  # type: ignore[arg-type]
        pass
    with pytest.raises(ZeroDivisionError), inject(kill(rank=0)):
        raise ZeroDivisionError
    assert active_plan() == ()


def test_other_threads_do_not_have_the_faults_of_this_one() -> None:
    found: list[object] = []
    with inject(kill(rank=0)):
        thread = threading.Thread(target=lambda: found.append(active_plan()))
        thread.start()
        thread.join()
    assert found == [()]


def test_a_cluster_ends_with_its_block_also_after_an_error() -> None:
    made: list[LocalCluster] = []

    def use(slots: int) -> None:
        with local_cluster(slots=slots) as cluster:
            made.append(cluster)
            assert not cluster.is_closed
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use(slots=2)
    assert [(cluster.slots, cluster.is_closed) for cluster in made] == [(2, True)]
    with local_cluster(slots=1) as cluster:
        pass
    assert cluster.is_closed
