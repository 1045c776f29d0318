"""Who sends the newest commit to whom, and what a repair does when the generation ends under it."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import cloudpickle
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.errors import WorkerLostError
from spark_elastic.protocol.messages import CommitId, Member
from spark_elastic.worker.control import GenerationOverError
from spark_elastic.worker.state.repair import _Header, plan_repair, repair
from spark_elastic.worker.state.snapshot import SnapshotPair

OLD, NEW = CommitId(1, 9), CommitId(2, 0)
commits = st.lists(st.none() | st.builds(CommitId, st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=9)


@given(commits)
def test_everybody_who_lacks_the_newest_commit_gets_it_from_one_that_holds_it(held: list[CommitId | None]) -> None:
    plan = plan_repair(held)
    newest = max((commit for commit in held if commit is not None), default=None)
    assert plan.newest == newest
    holders = {rank for rank, commit in enumerate(held) if commit == newest} if newest is not None else {0}
    assert set(plan.source) == set(range(len(held))) - holders
    assert set(plan.source.values()) <= holders


@given(commits)
def test_receivers_are_spread_evenly_over_the_holders(held: list[CommitId | None]) -> None:
    plan = plan_repair(held)
    served = [list(plan.source.values()).count(holder) for holder in set(range(len(held))) - set(plan.source)]
    assert max(served) - min(served) <= 1


@given(commits)
def test_a_broadcast_has_one_sender_and_reaches_all_others(held: list[CommitId | None]) -> None:
    plan = plan_repair(held)
    if plan.is_broadcast:
        assert len(set(plan.source.values())) == 1
        assert len(plan.source) == len(held) - 1


def test_survivors_that_hold_it_neither_send_nor_receive() -> None:
    assert plan_repair([NEW, NEW, NEW]).source == {}


def test_a_survivor_one_behind_is_repaired() -> None:
    assert plan_repair([NEW, OLD, NEW]).source == {1: 0}


def test_a_newer_generation_beats_a_higher_index() -> None:
    assert plan_repair([OLD, NEW]).source == {0: 1}


def test_the_first_state_of_a_job_is_that_of_rank_0() -> None:
    assert plan_repair([None, None, None]).source == {1: 0, 2: 0}
    assert plan_repair([None]).source == {}


class EndingStore:
    """A store whose generation ends while a rank waits in it."""

    def get(self, *_: object) -> bytes:
        raise GenerationOverError("generation 2 is over")

    set = get


def world_of(rank: int, held: list[CommitId | None]) -> Any:
    members = tuple(Member(number, number, 0, 1, 0, 1, commit) for number, commit in enumerate(held))
    return SimpleNamespace(
        backend="gloo",
        rank=rank,
        generation=2,
        members=members,
        store=EndingStore(),
        group=None,
        is_broken=lambda: False,
        lost=lambda error: WorkerLostError(str(error)),
    )


def test_a_donor_that_dies_before_it_has_announced_itself_is_a_lost_worker() -> None:
    """Found in review: the driver closes the generation's store, and that error passes for an error of the user."""
    snapshots = SnapshotPair()
    with pytest.raises(WorkerLostError):
        repair(world_of(1, [NEW, OLD]), snapshots)
    assert snapshots.is_empty


def test_a_generation_that_ends_before_the_donor_has_announced_itself_is_a_lost_worker() -> None:
    snapshots = SnapshotPair()
    snapshots.spare.take({"steps": 1}, None)
    snapshots.switch()
    with pytest.raises(WorkerLostError):
        repair(world_of(0, [NEW, OLD]), snapshots)
    assert snapshots.current.content() == {"steps": 1}


class Tattler:
    """Says when it is unpickled."""

    unpickled = False

    def __setstate__(self, state: object) -> None:
        Tattler.unpickled = True


def test_what_does_not_have_the_announced_digest_is_not_unpickled() -> None:
    """Gloo's connections are not authenticated: whoever sits on one could send any pickle."""
    tattler = Tattler()
    tattler.name = "set, so that there is a state to unpickle"  # type: ignore[attr-defined]
    sent = cloudpickle.dumps((tattler, ()))
    header = _Header(NEW, len(sent), hashlib.sha256(b"what the donor has announced").digest())
    world = world_of(1, [NEW, OLD])
    world.store = SimpleNamespace(get=lambda key: msgspec.msgpack.encode(header))
    world.group = SimpleNamespace(
        receive=lambda tensor, source: tensor.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
    )
    with pytest.raises(WorkerLostError, match="is not what it announced"):
        repair(world, SnapshotPair())
    assert not Tattler.unpickled
