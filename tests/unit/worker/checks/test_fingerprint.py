"""Fingerprints: ranks that differ are found at the first commits, and ranks that are equal, or nearly, never are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from worker_stage import on_stage

from spark_elastic.errors import RanksDifferError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.checks import fingerprint
from spark_elastic.worker.checks.fingerprint import PIECE, Comparison, find_difference, take_figures
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.state.torch_state import TorchState

KIND = "torch 2 on a processor"


def figures(kind: str = KIND, index: int = 1, **tensors: torch.Tensor) -> Any:
    found = take_figures(list(tensors.items()), CommitId(1, index))
    return fingerprint.Figures(found.commit, kind, found.names, found.bits, found.sums, found.norms)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.uint8, torch.int64]
)
def test_tensors_of_any_dtype_have_figures(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    other = torch.tensor([0, 0, 1]).to(dtype)
    assert figures(x=tensor).digest == figures(x=tensor.clone()).digest
    assert figures(x=tensor).digest != figures(x=other).digest


def test_a_conjugated_tensor_has_the_figures_of_its_values() -> None:
    values = torch.tensor([1 + 2j])
    assert figures(x=values.conj()).digest == figures(x=values.conj().resolve_conj()).digest != figures(x=values).digest


def test_the_last_bit_counts_on_machines_of_one_kind() -> None:
    tensor = torch.ones(5)
    other = torch.nextafter(tensor, torch.tensor(2.0))
    assert find_difference([figures(a=tensor, b=tensor), figures(a=tensor, b=other)]) == ("b", 1)


@pytest.mark.parametrize("kinds", [(KIND, "another processor"), ("", "")], ids=["other processors", "GPUs"])
def test_last_bits_do_not_count_elsewhere_but_what_training_makes_of_other_rows_does(kinds: tuple[str, str]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(3, PIECE)
    rounded = tensor * (1 + 1e-6 * torch.randn_like(tensor))
    trained = tensor + 0.01 * torch.randn_like(tensor)
    assert find_difference([figures(kinds[0], a=tensor), figures(kinds[1], a=rounded)]) is None
    assert find_difference([figures(kinds[0], a=tensor), figures(kinds[1], a=trained)]) == ("a", 1)
    steps = [figures(kind, step=torch.tensor(number)) for kind, number in zip(kinds, (600.0, 553.0), strict=True)]
    assert find_difference(steps) == ("step", 1)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]


def test_numbers_of_several_devices_are_never_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam keeps its moments on a GPU, and counts its steps on the CPU."""
    stack = torch.stack

    def of_one_device(tensors: Any) -> torch.Tensor:
        assert len({tensor.device for tensor in tensors}) == 1
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", of_one_device)
    moment, step = torch.randn(7), torch.tensor(3.0)
    found = figures(first=moment.as_subclass(Elsewhere), step=step, second=moment.as_subclass(Elsewhere))
    monkeypatch.undo()
    assert found == figures(first=moment, step=step, second=moment)


def test_equal_weights_that_are_no_numbers_are_equal() -> None:
    tensor = torch.tensor([float("nan"), 1.0])
    assert find_difference([figures("", a=tensor), figures("", a=tensor.clone())]) is None
    assert find_difference([figures("", a=tensor), figures("", a=torch.ones(2))]) == ("a", 1)


def test_a_tensor_that_only_some_ranks_have_is_named() -> None:
    tensor = torch.ones(2)
    assert find_difference([figures(a=tensor), figures(a=tensor, b=tensor)]) == ("b", 1)


def test_another_piece_of_a_large_tensor_is_looked_at_each_time() -> None:
    tensor = torch.zeros(4 * PIECE)
    other = tensor.clone()
    other[-1] = 1
    differs = [figures(index=index, a=tensor).digest != figures(index=index, a=other).digest for index in range(8)]
    assert differs == [False, False, False, True] * 2


def bits_of_all(tensor: torch.Tensor) -> Any:
    return take_figures([("a", tensor)], CommitId(1, 1), of_all=True).bits


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8, torch.bool]
)
def test_one_element_of_a_large_tensor_counts_wherever_it_is(dtype: torch.dtype) -> None:
    square = torch.ones(4, PIECE).to(dtype)
    for tensor in (square, square.t(), torch.ones(4 * PIECE + 3).to(dtype)):
        for place in ([0] * tensor.ndim, [-1] * tensor.ndim, [2] * tensor.ndim):
            other = tensor.clone()
            other[tuple(place)] = 0
            assert bits_of_all(other) != bits_of_all(tensor)


def test_the_place_at_which_a_rank_holds_a_tensor_does_not_count() -> None:
    tensor = torch.randn(4 * PIECE)
    assert bits_of_all(torch.cat([torch.ones(1), tensor])[1:]) == bits_of_all(tensor)


# ---------------------------------------------------------------- several ranks in one process


class Ranks:
    """Comparisons of ranks that commit in lockstep; each has a tensor of its own."""

    def __init__(self, tensors: list[torch.Tensor], clock: Callable[[], float] = time.monotonic) -> None:
        self.tensors = tensors
        self.figures: dict[str, list[bytes]] = {}
        self.made: list[int] = []
        self._barrier = threading.Barrier(len(tensors))
        self.ranks = [Comparison(rank, len(tensors), self._gather, clock) for rank in range(len(tensors))]
        self.said: list[tuple[int, int]] = []

    def _gather(self, key: str, mine: bytes) -> list[bytes]:
        self.figures.setdefault(key, []).append(mine)
        self._barrier.wait(60)
        return self.figures[key]

    def commit(self, index: int, is_commit: bool = True) -> list[BaseException | None]:
        """All ranks read what was said at the last commit, and speak at this one."""
        found: list[BaseException | None] = [None] * len(self.ranks)

        def read(rank: int, comparison: Comparison) -> None:
            try:
                comparison.read([digest for digest, _ in self.said], bool(self.said[0][1]))
            except RanksDifferError as error:
                found[rank] = error

        if self.said:
            threads = [threading.Thread(target=read, args=entry) for entry in enumerate(self.ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.said = [
            comparison.report(CommitId(1, index), lambda rank=rank: [("state.model.w", self.tensors[rank])], is_commit)
            for rank, comparison in enumerate(self.ranks)
        ]
        if self.said[0][0]:
            self.made.append(index)
        return found


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_fingerprints_are_made_at_powers_of_two_and_then_when_rank_0_asks(clock: Any) -> None:
    ranks = Ranks([torch.ones(2), torch.ones(2)], clock)
    for index in range(1, 41):
        clock.now += 0.5
        assert ranks.commit(index) == [None, None]
    assert ranks.made == [1, 2, 4, 8, 11, 16, 22, 32, 33]


def test_what_rank_0_asks_for_sees_one_element_of_many(clock: Any) -> None:
    ranks = Ranks([torch.ones(100 * PIECE) for _ in range(2)], clock)
    ranks.tensors[1][77 * PIECE] = 7.0
    found = []
    for index in range(1, 6):
        clock.now += 2.0
        found.append(any(ranks.commit(index)))
    assert found == [False] * 4 + [True], "asked for at commit 3, made at commit 4, read at the next"


def test_a_mere_look_whether_the_world_changes_carries_none(clock: Any) -> None:
    ranks = Ranks([torch.ones(2), torch.zeros(2)], clock)
    for _ in range(3):
        assert ranks.commit(1, is_commit=False) == [None, None]
    assert ranks.made == []


def test_a_difference_is_raised_on_all_ranks_with_its_name_and_the_commits_around_it(clock: Any) -> None:
    ranks = Ranks([torch.ones(2) for _ in range(3)], clock)
    for index in (1, 2, 3):
        ranks.commit(index)
    ranks.tensors[2][0] = 7.0
    ranks.commit(4)
    errors = ranks.commit(5)
    assert {type(error) for error in errors} == {RanksDifferError}
    since = "has not been the same on rank 2 as on rank 0 since commit 1.4 at the latest"
    text = f"state.model.w {since}; it was still equal at commit 1.2"
    assert all(str(error).startswith(text) for error in errors)
    assert all(ranks.commit(6)), "who swallows it gets it again"


def test_a_world_of_one_compares_nothing(clock: Any) -> None:
    ranks = Ranks([torch.ones(2)], clock)
    ranks.commit(1)
    assert ranks.said == [(0, 0)]


# ---------------------------------------------------------------- what a state compares


def make() -> TorchState:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return TorchState(nets=[model], optimizers={"a": optimizer}, local={"mine": torch.nn.Linear(1, 1)})


def test_parameters_and_optimizer_state_are_compared_and_neither_buffers_nor_what_is_local() -> None:
    state = make()
    state.nets[0](torch.ones(2, 3)).sum().backward()
    state.optimizers["a"].step()
    names = [name for name, _ in state._compared()]
    assert "state.nets[0].module.0.weight" in names
    assert "exp_avg of state.nets[0].module.1.bias" in names
    assert "step of state.nets[0].module.0.bias" in names
    assert not any("running" in name or "mine" in name for name in names)


def test_tensors_that_train_outside_of_modules_are_compared_unless_each_rank_has_its_own() -> None:
    by_hand, in_no_state, mine, loss = (torch.ones(2, requires_grad=True) for _ in range(4))
    state = TorchState(
        weights=[by_hand], loss=loss * 2, optimizer=torch.optim.SGD([in_no_state, mine]), local={"mine": mine}
    )
    compared = dict(state._compared())
    assert compared == {"state.weights[0]": by_hand, "parameter 0 of a SGD": in_no_state}


def test_a_rank_that_differs_ends_the_commit_with_its_name() -> None:
    def others(change: Callable[[list[int]], list[int]]) -> BaseException | None:
        with on_stage() as stage:
            state = make()
            stage.begin(state, others=[None])
            stage.peers = lambda mine: [mine, change(mine)]
            shown: list[bytes] = []

            def gather(key: str, mine: bytes, size: int) -> list[bytes]:
                rank, figures = fingerprint.msgspec.msgpack.decode(mine)
                figures["bits"][0] += 1
                shown[:] = [mine, fingerprint.msgspec.msgpack.encode((1 - rank, figures))]
                return shown

            stage.world.store.gather = gather
            state.commit()
            try:
                state.commit()
            except RanksDifferError as error:
                return error
            return None

    assert others(lambda mine: mine) is None
    error = others(lambda mine: [*mine[:2], mine[2] + 1, *mine[3:]])
    assert "state.nets[0].module.0.bias has not been the same on rank 1" in str(error)
