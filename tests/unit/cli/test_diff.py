"""diff, and inspect on checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from spark_elastic.checkpoint.best import Score
from spark_elastic.checkpoint.content import encode
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.checkpoint.newest import load_checkpoint, open_checkpoints
from spark_elastic.cli import main
from spark_elastic.errors import CheckpointError
from spark_elastic.worker.state.snapshot import Snapshot

KEPT = Path(__file__).parents[2] / "kept"


def test_commands_read_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (str(KEPT / name / "checkpoint") for name in ("format-1", "format-2"))
    assert main(["diff", other, other]) == 0
    sha256 = capsys.readouterr().out.split()[2]
    assert main(["inspect", other]) == 0
    shown = capsys.readouterr().out
    assert sha256 in shown
    assert "model: 9 tensors, 156 B" in shown
    assert main(["inspect", other, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sha256"] == sha256
    assert facts["newest"] == facts["checkpoints"][0]["name"] in shown
    assert main(["diff", other, other, "--json"]) == 0
    equal_facts = json.loads(capsys.readouterr().out)
    assert equal_facts == {"equal": True, "sha256": facts["sha256"], "uncompared": facts["uncompared"]}
    assert main(["diff", one, other]) == 1
    told = capsys.readouterr().out
    assert "the one" in told
    assert main(["diff", one, other, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"]
    assert f"{found['path']}: {found['how']}\n" == told


def test_inspect_names_the_checkpoints_with_their_scores_and_shows_plain_values_of_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, older = CheckpointName(1, 1, 5), CheckpointName(1, 1, 4)
    directory = CheckpointDirectory(str(tmp_path))
    objects = {"weights": torch.zeros(2), "epoch": 3, "notes": "x" * 100, "losses": [0.5]}
    for name in (older, newest):
        snapshot = Snapshot()
        snapshot.take({"steps": 6, "size": 1, "objects": objects}, None)
        directory.write(name, encode(snapshot))
    directory.write_score(older, Score("val_loss", "min", 0.25))
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "2 checkpoints\n  000001-000001-000000005\n  000001-000001-000000004, val_loss 0.25\n" in shown
    assert "000001-000001-000000005, 6 steps, 1 worker: sha256 " in shown
    assert "  weights: 1 tensor, 8 B\n  epoch: 3\n  notes\n  losses\n" in shown


def test_names_with_control_codes_leave_the_terminal_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, epoch in (("one", 1), ("other", 2)):
        snapshot = Snapshot()
        objects = {"epoch\x1b[31m": epoch, "dice\x1b[31m": random.Random(1)}
        snapshot.take({"steps": 6, "size": 1, "objects": objects}, None)
        directory = CheckpointDirectory(str(tmp_path / folder))
        directory.write(CheckpointName(1, 1, 5), encode(snapshot))
        directory.write_score(CheckpointName(1, 1, 5), Score("loss\x1b[31m", "min", 0.25))
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert [main(command) for command in (["inspect", one], ["diff", one, other], ["diff", one, one])] == [0, 1, 0]
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "000001-000001-000000005, loss 0.25\n" in text
    assert "  epoch: 1\n" in text
    assert "run code: dice (random.Random)\nepoch: " in text


def test_objects_that_only_code_could_bring_back_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, seed in (("one", 1), ("other", 2)):
        snapshot = Snapshot()
        objects = {"epoch": 3, "parts": {"dice": random.Random(seed)}}
        snapshot.take({"steps": 6, "size": 1, "objects": objects}, None)
        CheckpointDirectory(str(tmp_path / folder)).write(CheckpointName(1, 1, 5), encode(snapshot))
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert main(["diff", one, other]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1:] == ["! not compared, because reading it would run code: parts.dice (random.Random)"]
    assert main(["diff", one, other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["uncompared"] == ["parts.dice (random.Random)"]
    assert main(["inspect", one]) == 0
    assert "! not in the hash, because reading it would run code: parts.dice" in capsys.readouterr().out


def test_the_folder_of_one_checkpoint_is_that_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = CheckpointDirectory(str(tmp_path))
    for index, epoch in ((4, 2), (5, 3)):
        snapshot = Snapshot()
        snapshot.take({"steps": index, "size": 1, "objects": {"epoch": epoch}}, None)
        directory.write(CheckpointName(1, 1, index), encode(snapshot))
    older, newest = (str(tmp_path / f"000001-000001-00000000{index}") for index in (4, 5))
    assert load_checkpoint(older) == {"epoch": 2}
    assert load_checkpoint(newest + "/") == load_checkpoint(tmp_path) == {"epoch": 3}
    assert main(["diff", older, str(tmp_path)]) == 1
    assert "epoch" in capsys.readouterr().out
    assert main(["diff", newest, str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["inspect", older]) == 0
    shown = capsys.readouterr().out
    assert "1 checkpoint\n" in shown
    assert "epoch: 2" in shown
    assert "000000005" not in shown
    with pytest.raises(ValueError, match="chooses among the checkpoints of a folder"):
        load_checkpoint(older, best=True)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_checkpoint(tmp_path / "000001-000001-000000006")
    found = [open_checkpoints(f"{root}000001-000001-000000006")[0].url for root in ("/", "file:///", "")]
    assert found == ["/", "file:///", "."]


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err


class RefusedError(Exception):
    """What the library of a store raises without credentials."""


class Closed(LocalFileSystem):
    protocol = "closed"

    def ls(self, *_: object, **__: object) -> Any:
        raise RefusedError("no credentials")

    info = open = find = ls


def test_what_the_library_of_a_store_raises_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    fsspec.register_implementation("closed", Closed, clobber=True)
    for command in (["inspect", "closed://a/b"], ["diff", "closed://a/b", "closed://a/b"]):
        assert main(command) == 2
        assert capsys.readouterr().err.rstrip().endswith("RefusedError: no credentials")
