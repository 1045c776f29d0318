"""Commits while a GPU is still at work, step by step in this process, and groups that are formed and aborted again and again."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from worker_stage import Stage, on_stage

from spark_elastic.protocol.messages import CommitId, FormWorld, Member
from spark_elastic.worker.group import Group
from spark_elastic.worker.runtime import Runtime
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.optimizer_moves import KeptParts
from spark_elastic.worker.state.snapshot import TensorBuffer
from spark_elastic.worker.state.torch_state import TorchState
from spark_elastic.worker.world import World

# A second or so.
CYCLES = 2_000_000_000
WORLDS = 50


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as staged:
        yield staged


def begun(stage: Stage, commit: str = "copy") -> TorchState:
    """A state that has made a commit, (1, 1), with ones in it, since the first one of a generation is waited for."""
    state = TorchState(weights=torch.zeros(1_000_000, device="cuda"), commit=commit)
    stage.begin(state)
    state.weights += 1
    state.commit()
    return state


def behind_a_busy_stream(stage: Stage, commit: str) -> TorchState:
    """The same state after another commit, (1, 2), with twos in it, to whose copy the stream comes in a second."""
    state = begun(stage, commit)
    torch.cuda._sleep(CYCLES)
    state.weights += 1
    state.commit()
    return state


@pytest.mark.gpu
@pytest.mark.parametrize("commit", ["copy", "host"])
def test_a_copy_is_pending_until_its_stream_has_come_to_it(stage: Stage, commit: str) -> None:
    state = behind_a_busy_stream(stage, commit)
    pending = state._keeper.pending
    assert pending is not None
    assert not pending.is_made()
    state.weights += 1
    state.restore()
    assert state.weights.eq(2).all()
    assert pending.is_made()
    assert stage.control.commit == CommitId(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("commit", ["copy", "host"])
def test_an_abort_in_mid_copy_leaves_the_commit_before(stage: Stage, commit: str) -> None:
    """What the stream makes of the copy later is not looked at, whatever it is."""
    state = behind_a_busy_stream(stage, commit)
    stage.abort()
    torch.cuda.synchronize()
    state.weights.fill_(-1)
    state.restore()
    assert state.weights.eq(1).all()
    assert stage.control.commit == CommitId(1, 1)


@pytest.mark.gpu
def test_copies_in_host_memory_are_pinned(stage: Stage) -> None:
    state = begun(stage, "host")
    assert all(flat.is_pinned() for flat in state._keeper.current.buffer.flats if flat.dtype is torch.float32)


@pytest.mark.gpu
def test_parts_of_an_optimizer_that_are_kept_in_host_memory_go_back_to_where_training_has_them() -> None:
    parts = KeptParts(TensorBuffer(on_host=True))
    parts.take({0: {3: {"step": torch.tensor(4.0), "exp_avg": torch.ones(5, device="cuda")}}})
    torch.cuda.synchronize()
    assert all(value.is_cpu for value in parts.view()[0][3].values())
    back = parts.for_training()[0][3]
    assert back["step"].is_cpu
    assert back["exp_avg"].is_cuda
    assert back["exp_avg"].eq(1).all()


@pytest.mark.gpu
def test_outside_a_job_a_commit_waits_for_the_gpu() -> None:
    state = ObjectState(weights=torch.zeros(1000, device="cuda"))
    torch.cuda._sleep(CYCLES // 10)
    state.weights += 1
    state.commit()
    state.weights.fill_(-1)
    state.restore()
    assert state.weights.eq(1).all()


@pytest.mark.gpu
def test_kernels_of_a_failed_step_are_at_rest_before_a_rank_is_ready() -> None:
    """One that runs on another stream would else write into what has been restored."""
    control: Any = SimpleNamespace(is_aborted=lambda generation: False)
    order = FormWorld(3, (Member(7, 0, 0, 1, 0, 1, None),), 0, "nccl")
    group: Any = SimpleNamespace(is_broken=lambda: True, runs_ahead=True)
    world = World(control, order, 7, "127.0.0.1", 1.0, Runtime(group=lambda *args: group))  # type: ignore[arg-type]
    weights, stream = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES // 4)
        weights.fill_(-1)
    assert not stream.query()
    world.rest()
    assert stream.query()


class Store(dist.HashStore):
    """What a group asks of a world's store, without a driver."""

    generation = 1

    def gather(self, key: str, value: bytes, size: int) -> tuple[bytes, ...]:
        assert size == 1
        return (value,)


@pytest.mark.timeout(150)  # an abort of NCCL takes a second where other tests share the GPU
def test_a_world_of_one_is_formed_and_aborted_fifty_times_and_leaks_nothing(device: torch.device) -> None:
    """Neither descriptors nor threads, nor memory of the GPU. The first worlds load libraries, which stay."""
    library = "nccl" if device.type == "cuda" else "gloo"
    found = []
    for number in range(WORLDS):
        group = Group(Store(), 0, 1, "127.0.0.1", library, timedelta(seconds=30))  # type: ignore[arg-type]
        group.build()
        group.register(lambda error: error)
        value = torch.full((1000,), 3.0, device=device)
        dist.all_reduce(value)
        assert value.eq(3.0).all()
        group.abort()
        for thread in group.abort_device():
            thread.join()
        group.close()
        group.drop().join(30)
        del group
        gc.collect()
        if number in (WORLDS // 5, WORLDS - 1):
            used = memory_of_this_process() if device.type == "cuda" else 0
            found.append((psutil.Process().num_fds(), psutil.Process().num_threads(), used))
    (files, threads, used), (files_now, threads_now, used_now) = found
    assert files_now <= files
    assert threads_now <= threads
    assert used_now - used < 64, "memory of the GPU was lost with the worlds"


def memory_of_this_process() -> int:
    """MiB of the GPU, as ``nvidia-smi`` tells it; other tests may run beside this one."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return {int(pid): int(used) for pid, used in (line.split(",") for line in told.splitlines())}[os.getpid()]
