"""The variables of torchrun that a rank gets, and by which a process of torchrun's is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.protocol.ticket import DEVICE_VARIABLE
from spark_elastic.worker.torchrun import is_one_of_several, rank_variables

WORLD: Any = SimpleNamespace(rank=3, size=6, me=SimpleNamespace(local_rank=1, local_size=2, cross_rank=1, cross_size=3))


def test_a_rank_gets_the_names_that_torchrun_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert rank_variables(WORLD) == {
        "RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3", "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "6",
    }  # fmt: skip


def test_a_rank_that_sees_its_own_gpu_only_finds_it_by_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts write torch.device("cuda", LOCAL_RANK)."""
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda:0")
    variables = rank_variables(WORLD)
    assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("3", "6")


@pytest.mark.parametrize(
    ("variables", "is_one"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, True),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, False),
        ({"WORLD_SIZE": "2"}, False),
    ],
)
def test_one_of_several_is_a_process_of_torchruns_in_a_world_of_more_than_one(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_one: bool
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_one_of_several() == is_one
