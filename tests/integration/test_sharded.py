"""Commits in slices: survivors gather what none of them holds alone, and nothing is lost or counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sliced_training import replace_optimizer, train_in_slices, train_only_the_head_in_the_end

import spark_elastic
from spark_elastic.errors import StateLostError
from spark_elastic.testing import Point, drain, inject, kill, local_cluster

STEPS = 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with local_cluster(slots=4) as cluster:
        yield cluster


def train(
    cluster: Any,
    *faults: Any,
    spoil: bool = False,
    steps: int = STEPS,
    redundancy: int = 1,
    zero: bool = False,
    struck: int | None = None,
    written: str = "",
    commit: str = "sharded",
    whole: int | None = None,
    pair: int | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    with inject(*faults):
        results: list[dict[str, Any]] = spark_elastic.run(
            train_in_slices,
            (steps, spoil, zero, struck, written),
            {"redundancy": redundancy, "commit": commit, "whole": whole, "pair": pair},
            local=cluster,
            **{"num_proc": 4, **settings},
        )
    for result in results:
        assert result["history"] == list(range(1, steps + 1))
        assert result["digest"] == results[0]["digest"]
    return results


@pytest.fixture(scope="module")
def undisturbed(cluster: Any) -> str:
    digest: str = train(cluster)[0]["digest"]
    return digest


def test_after_losses_survivors_gather_and_the_weights_are_those_of_an_undisturbed_run(
    cluster: Any, undisturbed: str
) -> None:
    faults = [
        kill(rank=1, step=5),
        kill(rank=2, step=10, at=Point.RECORDED),
        kill(rank=0, step=15, at=Point.COMMITTED),
        kill(rank=3, step=20, at=Point.COMMITTED),
        kill(rank=0, step=25, at=Point.RECORDED),
    ]
    results = train(cluster, *faults, spoil=True, min_np=4)
    assert {result["digest"] for result in results} == {undisturbed}
    assert max(len(result["received"]) for result in results) >= 2, "nobody holds all slices"


def test_losses_while_a_world_forms_gathers_and_is_sealed_cost_nothing(cluster: Any, undisturbed: str) -> None:
    faults = [
        kill(rank=1, step=5),
        kill(rank=3, generation=2, at=Point.REPAIR),  # a newcomer
        kill(rank=2, step=15),
        kill(rank=3, generation=4, at=Point.SYNCED),
        kill(rank=3, step=25),
        kill(rank=3, generation=6, at=Point.FORM),
    ]
    results = train(cluster, *faults, spoil=True, min_np=4)
    assert {result["digest"] for result in results} == {undisturbed}


def test_a_planned_change_has_nobody_gather_and_newcomers_get_the_state(cluster: Any, undisturbed: str) -> None:
    results = train(cluster, drain(rank=1, step=5), drain(rank=0, step=15), min_np=4)
    assert sorted(len(result["received"]) for result in results) == [0, 0, 1, 1], "only those that came later"
    assert {result["digest"] for result in results} == {undisturbed}


def test_weights_that_code_has_changed_on_its_way_out_are_gathered_after_a_planned_change_too(
    cluster: Any, undisturbed: str
) -> None:
    results = train(cluster, drain(rank=1, step=5), spoil=True, min_np=4)
    assert {result["digest"] for result in results} == {undisturbed}


def test_two_workers_and_one_hold_everything_and_need_nobody(cluster: Any) -> None:
    faults = [kill(rank=2, step=10), kill(rank=0, step=20)]
    results = train(cluster, *faults, spoil=True, num_proc=3, max_np=3, min_np=1)
    assert results[0]["history"] == list(range(1, STEPS + 1))


def test_two_neighbours_may_be_lost_with_a_redundancy_of_two(cluster: Any, undisturbed: str) -> None:
    results = train(cluster, pair=10, spoil=True, redundancy=2, min_np=4)
    assert {result["digest"] for result in results} == {undisturbed}


def test_more_losses_than_the_redundancy_lose_the_state_and_say_who_holds_what(cluster: Any) -> None:
    with pytest.raises(
        StateLostError,
        match=r"rank 0 \(worker \d\) holds slices 0, 1 of 4 of commit 1\.\d.*rank 3 \(worker \d\) holds slices 0, 3 of 4",
    ):
        train(cluster, pair=10, min_np=4)


def test_more_losses_than_the_redundancy_have_the_job_go_on_from_its_durable_checkpoint(
    cluster: Any, undisturbed: str, tmp_path: Path
) -> None:
    results = train(cluster, pair=10, spoil=True, min_np=4, checkpoint=str(tmp_path))
    assert {result["digest"] for result in results} == {undisturbed}
    assert spark_elastic.load_checkpoint(str(tmp_path))["step"] == STEPS


@pytest.mark.parametrize("commit", ["sharded", "copy", "host", "in_place"])
def test_a_divided_optimizer_leaves_the_bits_of_the_plain_one_through_losses(
    cluster: Any, undisturbed: str, commit: str
) -> None:
    faults = [
        kill(rank=2, step=10, at=Point.RECORDED),
        kill(rank=0, step=15, at=Point.COMMITTED),
        kill(rank=3, generation=4, at=Point.REPAIR),
        kill(rank=3, step=20),
    ]
    results = train(cluster, *faults, spoil=True, zero=True, struck=5, min_np=4, commit=commit)
    assert {result["digest"] for result in results} == {undisturbed}
    assert all(0 < result["kept"] < 1 for result in results)


@pytest.mark.parametrize("commit", ["sharded", "copy"])
def test_a_divided_optimizer_leaves_the_same_bits_where_the_world_shrinks_and_grows(
    cluster: Any, undisturbed: str, commit: str
) -> None:
    faults = [kill(rank=0, step=5), kill(rank=1, step=8, at=Point.RECORDED), kill(rank=2, step=22)]
    results = train(cluster, *faults, spoil=True, zero=True, whole=20, min_np=1, max_np=4, commit=commit)
    assert {result["digest"] for result in results} == {undisturbed}


@pytest.mark.parametrize("commit", ["copy", "sharded"])
@pytest.mark.parametrize("fault", [drain(rank=1, step=8), kill(rank=1, step=8)], ids=["drain", "kill"])
def test_an_optimizer_that_was_made_anew_beside_a_divided_one_keeps_its_state(
    cluster: Any, commit: str, fault: Any
) -> None:
    with inject(fault):
        struck = spark_elastic.run(replace_optimizer, (True, commit), local=cluster, num_proc=4)
    quiet = spark_elastic.run(replace_optimizer, (False, commit), local=cluster, num_proc=4)
    assert struck == pytest.approx([quiet[0]] * len(struck), rel=1e-9)


@pytest.mark.parametrize("commit", ["copy", "host", "in_place", "sharded"])
def test_survivors_meet_across_a_new_optimizer_with_fewer_parameters_in_one_reset(cluster: Any, commit: str) -> None:
    quiet = spark_elastic.run(train_only_the_head_in_the_end, (commit, None), local=cluster, num_proc=4)
    with inject(kill(rank=2, step=5, at=Point.RECORDED)):
        struck = spark_elastic.run(train_only_the_head_in_the_end, (commit, 2), local=cluster, num_proc=4)
    assert [total for total, _ in struck] == pytest.approx([quiet[0][0]] * 4, rel=1e-9)
    assert sorted(entries for _, entries in struck) == [1, 2, 2, 2]


@pytest.mark.parametrize("commit", ["sharded", "copy"])
def test_a_divided_optimizer_goes_on_after_planned_changes_and_nobody_gathers_weights(
    cluster: Any, undisturbed: str, commit: str
) -> None:
    results = train(cluster, drain(rank=1, step=5), drain(rank=0, step=15), zero=True, min_np=4, commit=commit)
    assert {result["digest"] for result in results} == {undisturbed}
    assert sorted(len(result["received"]) for result in results) == [0, 0, 1, 1], "only those that came later"


@pytest.mark.parametrize("commit", ["sharded", "copy"])
def test_a_divided_optimizer_is_lost_with_two_neighbours_and_not_with_a_redundancy_of_two(
    cluster: Any, undisturbed: str, commit: str
) -> None:
    with pytest.raises(StateLostError, match=r"rank 3 \(worker \d\) holds slices 0, 3 of 4"):
        train(cluster, pair=10, zero=True, min_np=4, commit=commit)
    results = train(cluster, pair=10, spoil=True, zero=True, redundancy=2, min_np=4, commit=commit)
    assert {result["digest"] for result in results} == {undisturbed}


@pytest.mark.parametrize("commit", ["sharded", "copy"])
def test_a_divided_optimizer_goes_on_from_the_durable_checkpoint_when_the_state_is_lost(
    cluster: Any, undisturbed: str, tmp_path: Path, commit: str
) -> None:
    written = {"checkpoint": str(tmp_path), "written": str(tmp_path)}
    results = train(cluster, pair=10, zero=True, spoil=True, min_np=4, commit=commit, **written)
    assert {result["digest"] for result in results} == {undisturbed}
    saved = spark_elastic.load_checkpoint(str(tmp_path))
    assert saved["step"] == STEPS
    assert sorted(saved["optimizer"]["state"]) == list(range(6)), "as the plain optimizer's"


def test_a_checkpoint_goes_on_with_a_divided_optimizer_or_without_at_any_size(
    cluster: Any, undisturbed: str, tmp_path: Path
) -> None:
    settings = {"checkpoint": str(tmp_path), "checkpoint_interval": 0}
    train(cluster, zero=True, steps=9, **settings)
    train(cluster, steps=16, num_proc=2, commit="copy", **settings)
    train(cluster, zero=True, steps=20, num_proc=2, commit="in_place", **settings)
    train(cluster, zero=True, steps=25, commit="copy", **settings)
    results = train(cluster, zero=True, num_proc=3, max_np=3, commit="host", **settings)
    assert {result["digest"] for result in results} == {undisturbed}
    newest = max(path.parent for path in tmp_path.glob("*-*-*/manifest.json"))
    assert [path.name for path in sorted(newest.glob("tensors*"))] == [
        f"tensors-{rank:05d}-of-00003.safetensors" for rank in (1, 2, 3)
    ]


@pytest.mark.parametrize("zero", [False, True])
def test_losses_while_all_ranks_write_a_durable_checkpoint_cost_no_commit_and_the_last_one_is_written(
    cluster: Any, undisturbed: str, tmp_path: Path, zero: bool
) -> None:
    faults = [kill(rank=rank, step=step, at=Point.COMMITTED) for rank, step in ((1, 6), (0, 12), (3, 18), (2, 24))]
    results = train(cluster, *faults, zero=zero, min_np=4, checkpoint=str(tmp_path), checkpoint_interval=0)
    assert {result["digest"] for result in results} == {undisturbed}
    assert spark_elastic.load_checkpoint(str(tmp_path))["step"] == STEPS
