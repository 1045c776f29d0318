"""diff, and inspect on checkpoints: hashes and first differences, bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from spark_elastic.checkpoint.digest import digest, first_difference
from spark_elastic.cli import main

KEPT = Path(__file__).parents[2] / "kept"


def test_equal_bits_have_one_hash_however_they_lie_in_memory() -> None:
    one = {"model": {"weight": torch.arange(6.0).view(2, 3)}, "losses": [0.5, 1.5]}
    other = {"model": {"weight": torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]).t()}, "losses": [0.5, 1.5]}
    assert digest(one) == digest(other)
    assert first_difference(one, other) is None


@pytest.mark.parametrize(
    ("one", "other", "where", "how"),
    [
        (
            {"a": torch.tensor([1.0, 2.0, 3.0])}, {"a": torch.tensor([1.0, 2.5, 3.0])},
            "a", "1 of 3 elements, first number 1: 2.0 in the one, 2.5 in the other",
        ),
        ({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}, "a", "1 of 1 elements.*0.0 in the one, -0.0 in"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2).double()}, "a", "torch.float32 .* torch.float64"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, r"a.b\[1\]", "2 in the one, 3 in the other"),
        ({"a": [1, 2]}, {"a": [1]}, "a", "2 entries in the one, 1 in the other"),
        ({"a": 1}, {"a": 1, "b": 2}, "b", "nothing here, the other b"),
        ({"a": 1}, {"c": 1}, "a", "the one has a here, the other c"),
        ({"a": 1}, {"a": 1.0}, "a", "int in the one, float in the other"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(one: dict[str, object], other: dict[str, object], where: str, how: str) -> None:
    found = first_difference(one, other)
    assert found is not None
    assert re.fullmatch(where, found[0])
    assert re.search(how, found[1])
    assert digest(one) != digest(other)


def test_nan_equals_itself() -> None:
    assert (
        first_difference(
            {"a": torch.tensor([torch.nan]), "b": torch.nan}, {"a": torch.tensor([torch.nan]), "b": torch.nan}
        )
        is None
    )


def test_commands_read_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (str(KEPT / name / "checkpoint") for name in ("format-1", "format-2"))
    assert main(["diff", other, other]) == 0
    equal = capsys.readouterr().out
    assert main(["inspect", other]) == 0
    shown = capsys.readouterr().out
    assert equal.split()[-1] in shown
    assert "model: 9 tensors, 156 B" in shown
    assert main(["inspect", other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] == equal.split()[-1]
    assert main(["diff", one, other]) == 1
    assert "the one" in capsys.readouterr().out


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
