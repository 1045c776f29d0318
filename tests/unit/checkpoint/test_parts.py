"""Checkpoints that all ranks write: the parts make the whole again, and what does not fit together is no checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from spark_elastic.checkpoint import writer as writer_module
from spark_elastic.checkpoint.digest import digest
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.newest import load_checkpoint
from spark_elastic.checkpoint.parts import Part, Written, encode_part
from spark_elastic.checkpoint.skeleton import PartOfDict, TensorSpec
from spark_elastic.checkpoint.writer import CheckpointWriter
from spark_elastic.errors import CheckpointError, DamagedError, WorkerLostError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.reports import CheckpointFailed, CheckpointWritten
from spark_elastic.protocol.ticket import CheckpointPlan
from spark_elastic.worker.state.snapshot import Found, TensorBuffer, flatten

SIZE = 3
COMMIT = CommitId(2, 7)


def objects(step: int = 7) -> dict[str, Any]:
    return {
        "weights": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.float64), "c": torch.zeros(0)},
        "own": {1, 2},
        "step": step,
    }


def states() -> dict[int, dict[str, Any]]:
    return {number: {"exp_avg": torch.full((2,), float(number)), "step": number} for number in range(5)}


def part_of(rank: int, step: int = 7, lost: int | None = None, twice: bool = False) -> Part:
    """The part of a rank: each has every third tensor, and every third entry of the optimizer's state."""
    found = Found()
    skeleton: Any = flatten({"steps": step, "size": SIZE, "objects": objects(step)}, found)
    skeleton["objects"]["code"] = complex  # which only code brings back
    mine = [n for n in range(len(found.tensors)) if (n % SIZE == rank and n != lost) or (twice and n == 0)]
    views = [tensor.clone() if n in mine else tensor.to("meta") for n, tensor in enumerate(found.tensors)]
    specs = tuple(TensorSpec(t.dtype, "cpu", tuple(t.shape)) for t in found.tensors)
    mine_of_dict = PartOfDict({number: state for number, state in states().items() if number % SIZE == rank})
    skeleton["objects"]["optimizer"] = {"state": mine_of_dict, "rate": 0.1}
    return Part(rank, SIZE, skeleton, TensorBuffer(specs=specs, views=views))


class Meeting:
    """Ranks of one process; the generation may end, for whoever waits."""

    def __init__(self, size: int = SIZE) -> None:
        self.brought: dict[int, bytes] = {}
        self.changed = threading.Condition()
        self.is_over = False
        self.wanted = True
        self.told: list[int] = []
        self.most = 2**20
        self.size = size

    def of(self, rank: int) -> Any:
        meeting = self

        class Mine:
            def is_wanted(self) -> bool:
                return meeting.wanted

            def tell(self) -> None:
                meeting.told.append(rank)

            def bring(self, content: bytes) -> None:
                with meeting.changed:
                    if meeting.is_over:
                        raise WorkerLostError("the generation is over")
                    if len(content) > meeting.most:
                        raise ValueError("the store is full")
                    meeting.brought[rank] = content
                    meeting.changed.notify_all()

            def collect(self, progress: Any) -> list[bytes]:
                with meeting.changed:
                    assert meeting.changed.wait_for(
                        lambda: meeting.is_over or len(meeting.brought) == meeting.size - 1, 60
                    )
                    if meeting.is_over:
                        raise WorkerLostError("the generation is over")
                    return [meeting.brought[rank] for rank in range(1, meeting.size)]

        return Mine()

    def end(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()


class Ranks:
    """The writers of three ranks."""

    def __init__(self, url: str, best: Any = None) -> None:
        self.url, self.reports = url, list[Any]()
        plan = CheckpointPlan(url, CheckpointDirectory(url).claim(), 60.0, 2, best=best)
        self.writers = [CheckpointWriter(plan, self.reports.append, int) for _ in range(SIZE)]

    def write(self, parts: dict[int, Part], meeting: Meeting | None = None, commit: CommitId = COMMIT) -> None:
        meeting = meeting or Meeting()
        for rank, part in parts.items():
            self.writers[rank].begin_part(commit, part, meeting.of(rank))
        for writer in self.writers:
            writer.wait(lambda: False)

    def of(self, kind: type[Any]) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    @property
    def names(self) -> list[str]:
        return list(map(str, CheckpointDirectory(self.url).list().newest_first))

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in Path(self.url).glob("*-*-*/*"))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(str(tmp_path / "saved"))
    yield made
    for writer in made.writers:
        writer._pool.shutdown()


def parts(step: int = 7, **changes: Any) -> dict[int, Part]:
    return {rank: part_of(rank, step, **changes) for rank in range(SIZE)}


def test_all_parts_are_one_checkpoint_with_the_bits_of_the_whole(ranks: Ranks) -> None:
    ranks.write(parts())
    found = load_checkpoint(ranks.url)
    assert str(found.pop("code").kind) == "builtins.type"
    assert digest(found) == digest({**objects(), "optimizer": {"state": states(), "rate": 0.1}})
    assert list(found["optimizer"]["state"]) == list(range(5)), "in the order of the plain optimizer"
    assert ranks.files == [
        "manifest.json", "objects.pickle", *(f"tensors-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), "tree.json",
    ]  # fmt: skip
    (written,) = ranks.of(CheckpointWritten)
    assert (written.step, written.bytes > 0) == (7, True)


def test_each_file_has_the_tensors_of_its_rank_under_their_plain_names(ranks: Ranks) -> None:
    ranks.write(parts())
    names = [set(load_file(path)) for path in sorted(Path(ranks.url).glob("*-*-*/tensors-*"))]
    assert names[0] == {"weights.a", "optimizer.state.0.exp_avg", "optimizer.state.3.exp_avg"}
    assert names[1] == {"weights.b", "optimizer.state.1.exp_avg", "optimizer.state.4.exp_avg"}
    assert names[2] == {"weights.c", "optimizer.state.2.exp_avg"}


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_part_that_cannot_be_written_costs_the_checkpoint_and_not_the_training(
    ranks: Ranks, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = CheckpointDirectory.write_file

    def fail(self: Any, name: Any, file: str, *others: Any) -> Any:
        if file == part_of(rank).file:
            raise OSError("the disk is full")
        return write(self, name, file, *others)

    with monkeypatch.context() as context, caplog.at_level(logging.WARNING):
        context.setattr(CheckpointDirectory, "write_file", fail)
        ranks.write(parts())
    assert ranks.names == ranks.files == []
    (failed,) = ranks.of(CheckpointFailed)
    assert "the disk is full" in failed.error
    assert rank == 0 or part_of(rank).file in failed.error
    assert len(caplog.records) == 1, "rank 0 tells of it"
    ranks.write(parts(8), commit=CommitId(2, 8))
    assert load_checkpoint(ranks.url)["step"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"lost": 1}, "'weights.b' is in no rank's part"), ({"twice": True}, "'weights.a' is in the parts of several")],
)
def test_parts_that_do_not_have_each_tensor_once_are_no_checkpoint(
    ranks: Ranks, changes: dict[str, Any], message: str
) -> None:
    ranks.write(parts(**changes))
    assert ranks.names == ranks.files == []
    assert message in ranks.of(CheckpointFailed)[0].error


def test_a_world_that_changes_while_parts_are_written_costs_the_checkpoint_and_the_next_is_due_at_once(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for generation in (2, 3):
            assert not caplog.records, "the first time"
            meeting = Meeting()
            for rank in (0, 1):
                ranks.writers[rank].begin_part(CommitId(generation, 7), part_of(rank), meeting.of(rank))
            ranks.writers[1].wait(lambda: False)
            meeting.end()
            ranks.writers[0].wait(lambda: False)
            ranks.write({2: part_of(2)}, meeting)  # a rank that is late
            assert all(writer.is_due() for writer in ranks.writers), "whoever is rank 0 next"
    assert "2 times in a row" in caplog.text
    assert [failed.error for failed in ranks.of(CheckpointFailed)] == [
        "the world changed before all ranks had written their parts"
    ] * 2
    assert ranks.names == []
    ranks.write(parts(8), commit=CommitId(4, 1))
    assert len(ranks.names) == 1
    assert len(ranks.files) == 6, "what had been left of the other is removed"


def test_a_rank_that_still_writes_an_older_part_leaves_one_out(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), CheckpointDirectory.write_file

    def wait(self: Any, name: Any, file: str, *others: Any) -> Any:
        assert file != part_of(1).file or go.wait(60)
        return write(self, name, file, *others)

    monkeypatch.setattr(CheckpointDirectory, "write_file", wait)
    older, newer = Meeting(), Meeting()
    ranks.writers[1].begin_part(COMMIT, part_of(1), older.of(1))
    for rank in range(SIZE):
        ranks.writers[rank].begin_part(CommitId(2, 8), part_of(rank, 8), newer.of(rank))
    ranks.writers[0].wait(lambda: False)
    assert "has not ended an older write" in ranks.of(CheckpointFailed)[0].error
    go.set()
    ranks.writers[1].wait(lambda: False)
    assert msgspec.json.decode(older.brought[1], type=Written).entry is not None


@pytest.mark.parametrize("error", ["no text: \udcff", "x" * 2000])
def test_rank_0_hears_of_every_failure_also_of_one_that_cannot_be_told(
    ranks: Ranks, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointDirectory.write_file

    def fail(self: Any, name: Any, file: str, *others: Any) -> Any:
        if file == part_of(1).file:
            raise OSError(error)
        return write(self, name, file, *others)

    monkeypatch.setattr(CheckpointDirectory, "write_file", fail)
    meeting = Meeting()
    meeting.most = 1000
    ranks.write(parts(), meeting)
    (failed,) = ranks.of(CheckpointFailed)
    assert part_of(1).file in failed.error
    assert ranks.names == []


def test_parts_of_different_commits_are_no_checkpoint(ranks: Ranks) -> None:
    meeting = Meeting()
    for rank in range(SIZE):
        commit = CommitId(2, 8) if rank == 2 else COMMIT
        ranks.writers[rank].begin_part(commit, part_of(rank), meeting.of(rank))
    ranks.writers[0].wait(lambda: False)
    assert (
        "was written for 000001-000002-000000008: ranks have made other commits" in ranks.of(CheckpointFailed)[0].error
    )
    assert ranks.names == []


def test_a_rank_that_has_left_something_out_costs_the_checkpoint(ranks: Ranks) -> None:
    meeting = Meeting()
    ranks.writers[2].leave_out(part_of(2).file, CheckpointError("weights have changed"), meeting.of(2))
    ranks.write({rank: part_of(rank) for rank in (0, 1)}, meeting)
    assert "weights have changed" in ranks.of(CheckpointFailed)[0].error


def test_a_last_part_that_comes_late_is_waited_for_once_all_ranks_have_returned(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "STALL_SECONDS", 0.0)
    meeting = Meeting()
    for rank in (0, 1):
        ranks.writers[rank].begin_part(COMMIT, part_of(rank), meeting.of(rank))
    for rank, writer in enumerate(ranks.writers):
        writer.expect_last_part(rank, 7)
    ranks.writers[0].wait(lambda: False)  # in vain: a rank has not returned yet
    assert ranks.names == []
    monkeypatch.undo()
    ranks.writers[2].begin_part(COMMIT, part_of(2), meeting.of(2))
    with caplog.at_level(logging.WARNING):
        for writer in ranks.writers:
            writer.complete()
    assert len(ranks.names) == 1
    assert not caplog.records


def test_parts_that_rank_0_does_not_want_are_not_written(ranks: Ranks) -> None:
    meeting = Meeting()
    meeting.wanted = False
    ranks.write({rank: part_of(rank) for rank in (1, 2)}, meeting)
    assert ranks.files == []
    assert not meeting.brought


def test_a_rank_that_writes_for_long_tells_of_progress(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "TELL_SECONDS", -1.0)
    meeting = Meeting()
    ranks.write(parts(), meeting)
    assert set(meeting.told) == {1, 2}
    assert len(ranks.names) == 1


def test_the_best_commit_that_all_ranks_write_is_written_once_and_gets_its_score(tmp_path: Path) -> None:
    ranks = Ranks(str(tmp_path / "saved"), best=("val_loss", "min"))
    meeting = Meeting()
    for rank in range(SIZE):
        ranks.writers[rank].begin_part(COMMIT, part_of(rank), meeting.of(rank))
    ranks.writers[0].score(COMMIT, 0.5, None, lambda: False)  # type: ignore[arg-type]  # nothing is lent
    for writer in ranks.writers:
        writer.wait(lambda: False)
        writer._pool.shutdown()
    assert "score.json" in ranks.files
    assert "tensors.safetensors" not in ranks.files
    assert load_checkpoint(ranks.url, best=True)["step"] == 7


def test_a_checkpoint_that_lacks_a_part_is_damaged(ranks: Ranks) -> None:
    ranks.write(parts())
    next(Path(ranks.url).glob("*-*-*/tensors-00002-*")).unlink()
    with pytest.raises(DamagedError, match=r"tensors-00002-of-00003\.safetensors is missing"):
        load_checkpoint(ranks.url)


def test_objects_in_the_state_of_an_optimizer_cannot_come_from_another_rank() -> None:
    part = part_of(1)
    part.skeleton["objects"]["optimizer"]["state"].entries[1]["step"] = complex
    with pytest.raises(CheckpointError, match="holds objects that cannot be written: type"):
        encode_part(part)
    encode_part(part_of(0))
