"""Commits as copies: when one counts, what is lent of it, and who sends and gets a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.state.keepers import copies
from spark_elastic.worker.state.keepers.copies import OnDevice, PartlyCopied, send_whole
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.snapshot import Snapshot, SnapshotPair

NEW, OLD = CommitId(2, 5), CommitId(2, 4)


def take(keeper: OnDevice, step: int, own: object = None, **objects: Any) -> bool:
    return keeper.take({"steps": step, "size": 1, "objects": objects}, Places(objects), own)


def content(kept: Any) -> Any:
    return kept.content()["objects"]


def test_a_commit_counts_once_it_is_settled_and_the_one_before_until_then() -> None:
    keeper, weight = OnDevice(), torch.zeros(2)
    keeper.prepare({"weight": weight})
    take(keeper, 1, weight=weight)
    assert keeper.is_empty
    keeper.settle()
    weight.fill_(1.0)
    take(keeper, 2, weight=weight)
    assert content(keeper.current)["weight"].tolist() == [0.0, 0.0]
    keeper.settle()
    keeper.settle()  # nothing was taken since
    weight.fill_(2.0)
    assert content(keeper.current)["weight"].tolist() == [1.0, 1.0]


def test_a_commit_that_cannot_be_taken_leaves_the_one_before_and_counts_for_nothing() -> None:
    keeper = OnDevice()
    take(keeper, 1, weight=torch.ones(2))
    keeper.settle()
    with pytest.raises(TypeError):
        take(keeper, 2, weight=torch.zeros(2), lock=(_ for _ in ()))
    keeper.settle()
    assert content(keeper.current)["weight"].tolist() == [1.0, 1.0]


def test_another_shape_or_structure_than_at_the_commit_before_is_told() -> None:
    keeper = OnDevice()
    keeper.prepare({"weight": torch.zeros(2)})
    changes = []
    for weight, others in ((2, {}), (2, {}), (2, {}), (3, {}), (3, {"more": torch.zeros(1)})):
        changes.append(take(keeper, 1, weight=torch.zeros(weight), **others))
        keeper.settle()
    assert changes[2] is False, "room has been made, and the commit before was of the same structure"
    assert changes[3:] == [True, True]


def test_a_commit_that_is_lent_stays_as_it_is_while_further_ones_are_made() -> None:
    keeper, weight = OnDevice(), torch.zeros(1)
    take(keeper, 0, weight=weight)
    keeper.settle()
    lender = keeper.lend({})
    lent = lender.lend()
    for step in range(1, 4):
        weight.fill_(float(step))
        take(keeper, step, weight=weight)
        keeper.settle()
    assert content(lent)["weight"].tolist() == [0.0]
    lender.take_back()
    assert content(keeper.current)["weight"].tolist() == [3.0]


class Halved(PartlyCopied):
    """Makes whole copies of the live objects."""

    name = "halved"
    copied = 0

    def copy_whole(self, values: Mapping[str, object]) -> Snapshot:
        self.copied += 1
        whole = Snapshot()
        whole.take({"steps": 1, "size": 1, "objects": dict(values)}, None)
        return whole


def test_what_leaves_something_out_makes_a_whole_copy_when_one_is_asked_for_and_not_before() -> None:
    keeper, values = Halved(), {"weight": torch.ones(1)}
    take(keeper, 1)
    keeper.settle()
    lender = keeper.lend(values)
    assert keeper.copied == 0
    assert content(lender.lend())["weight"].tolist() == [1.0]
    lender.take_back()
    assert lender.current is keeper.current
    assert keeper.for_repair(values, is_sender=False).is_empty
    assert keeper.copied == 1
    assert not keeper.for_repair(values, is_sender=True).is_empty


@pytest.mark.parametrize(("rank", "is_sender", "arrives"), [(0, True, False), (1, False, True)])
def test_who_holds_the_newest_commit_sends_it_with_what_is_to_be_told_and_who_lacks_it_keeps_its_own_part(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_sender: bool, arrives: bool
) -> None:
    asked: list[bool] = []
    pair = SnapshotPair(Snapshot())
    monkeypatch.setattr(copies, "repair", lambda world, snapshots: rank == 1)
    world: Any = SimpleNamespace(rank=rank, members=[SimpleNamespace(commit=NEW), SimpleNamespace(commit=OLD)])

    def for_repair(is_sender: bool) -> SnapshotPair:
        asked.append(is_sender)
        return pair

    own = object()
    arrived = send_whole(world, for_repair, lambda: b"what has changed", own)
    assert asked == [is_sender]
    assert (arrived is pair.current) == arrives
    assert pair.current.told == (b"what has changed" if is_sender else None)
    assert (pair.current.own is own) == arrives
