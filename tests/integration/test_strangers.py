"""Strangers who reach the ports of a group: they are turned away when it has formed, and none takes a rank's place before."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from store_control import GENERATION, Control
from strangers import CALLERS, call

from spark_elastic.errors import WorkerLostError
from spark_elastic.worker import sockets
from spark_elastic.worker.group import Group, build_on_thread
from spark_elastic.worker.torch_store import MeshStore, WorldStore

SIZE = 3


class Ranks:
    """The ranks of a generation, each on a thread of this process."""

    def __init__(self, address: str = "127.0.0.1", seconds: float = 30.0) -> None:
        control: Any = Control()
        self.groups = [
            Group(WorldStore(control, GENERATION), rank, SIZE, address, "gloo", timedelta(seconds=seconds))
            for rank in range(SIZE)
        ]

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """What the function returns or raises, called for all ranks at once."""
        found: list[Any] = [None] * SIZE

        def call(rank: int) -> None:
            try:
                found[rank] = function(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def build(self) -> list[Any]:
        return self.each(lambda rank: self.groups[rank].build())

    def form(self, seconds: float) -> list[Any]:
        """As ``World`` does it: who is not ready in time is given up."""

        def build(rank: int) -> None:
            ended = threading.Event()
            build_on_thread(self.groups[rank], ended.set, lambda is_done: ended.wait(seconds) and is_done())

        return self.each(build)

    def sum(self, of: Callable[[int], Any] | None = None) -> list[Any]:
        def reduce(rank: int) -> float:
            tensor = torch.ones(1)
            (of(rank) if of else self.groups[rank]._host.group).allreduce([tensor]).wait()
            return tensor.item()

        return self.each(reduce)

    def subgroup(self, rank: int, name: str) -> Any:
        """As ``new_group`` in user code makes one."""
        store = dist.PrefixStore(name, self.groups[rank]._store)
        return self.groups[rank].subgroup(SimpleNamespace(store=store, group_rank=rank, group_size=SIZE))

    @property
    def addresses(self) -> set[tuple[str, int]]:
        return self.groups[0]._host.sockets.addresses


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(**getattr(request, "param", {}))
    yield made
    for group in made.groups:
        group.close()
        group.drop().join()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


ADDRESSES = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="there is no IPv6 here")),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_nobody_connects_to_a_group_that_has_formed_and_new_groups_can_still_be_made(address: str) -> None:
    ranks = Ranks(address)
    assert ranks.build() == [None] * SIZE
    assert len(ranks.addresses) == SIZE
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as of_user:
        of_user.bind((address, 0))
        of_user.listen()
        before = descriptors()
        for round in range(2):
            answers = [call(place) for _ in range(CALLERS // SIZE) for place in ranks.addresses]
            assert sum(answers) == 0
            assert descriptors() <= before
            assert call(of_user.getsockname()[:2])
            assert ranks.sum() == [SIZE] * SIZE
            made = ranks.each(lambda rank, name=f"round {round}": ranks.subgroup(rank, name))
            assert ranks.sum(of=made.__getitem__) == [SIZE] * SIZE
            assert not any(group.activity().waiting for group in ranks.groups)
            before = descriptors()
    alone = made[0].barrier()
    assert [group.activity().waiting for group in ranks.groups] == [True] + [False] * (SIZE - 1)
    ranks.groups[0].abort()
    del alone
    made.clear()
    for group in ranks.groups:
        group.close()
        group.drop().join()


def test_where_the_kernel_allows_no_filter_training_goes_on_and_says_so_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sockets, "_SO_ATTACH_FILTER", 9999)
    monkeypatch.setattr(sockets, "_has_warned", False)
    with caplog.at_level(logging.WARNING):
        assert ranks.build() == [None] * SIZE
    assert caplog.text.count("does not let this process refuse connections to Gloo's port") == 1
    assert call(next(iter(ranks.addresses)))
    assert ranks.sum() == [SIZE] * SIZE


def test_a_world_with_somebody_who_does_not_know_its_secret_does_not_form(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MeshStore.set

    def without_secret(self: MeshStore, key: str, value: bytes) -> None:
        real(self, key, value)
        if key.endswith("1"):
            self.secret = b"a guess"

    monkeypatch.setattr(MeshStore, "set", without_secret)
    found = ranks.form(30.0)
    assert all(isinstance(error, WorkerLostError) for error in found)
    # The first to notice gives up, and may so break the connections over which the others were just being shown it.
    noticed = [rank for rank in range(SIZE) if "does not know the secret of generation 7" in str(found[rank])]
    assert noticed
    for rank in noticed:
        assert f"connected to rank {rank} as rank {0 if rank == 1 else 1} does not know" in str(found[rank])
    assert all("could not prove" in str(found[rank]) for rank in range(SIZE) if rank not in noticed)


def besieged() -> None:
    """Form a world whose ports strangers reach first: they say the number of the pair that Gloo expects, and then nothing."""
    real, strangers = MeshStore.set, []

    def set_besieged(self: MeshStore, key: str, value: bytes) -> None:
        for number in range(2 * SIZE):
            stranger = socket.create_connection(self.address)
            stranger.sendall(struct.pack("q", number))
            strangers.append(stranger)
        real(self, key, value)

    MeshStore.set = set_besieged  # type: ignore[method-assign]
    ranks = Ranks()
    if ranks.form(2.0) == [None] * SIZE:  # all members were faster
        print("formed", ranks.sum(), flush=True)
    else:
        print("not formed", flush=True)
    os._exit(0)  # Gloo may end a process whose peers are not what it thinks; that would be no formed world either


def test_strangers_who_come_first_hold_a_world_up_and_are_never_taken_for_a_rank() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parents[1], here, here.parent / "support")))
    done = subprocess.run(
        [sys.executable, "-c", "import test_strangers; test_strangers.besieged()"],
        capture_output=True, text=True, cwd=here, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    said = done.stdout.strip().splitlines()
    assert said in ([f"formed {[float(SIZE)] * SIZE}"], ["not formed"]) or done.returncode == -signal.SIGABRT, (
        done.stderr
    )
