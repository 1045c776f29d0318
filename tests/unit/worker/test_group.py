"""Group: what becomes of the device's part, with stand-ins for what needs GPUs."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_groups import group_of_gpus, of_device

from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import SparkElasticError, WorkerLostError
from spark_elastic.protocol.messages import COMMIT
from spark_elastic.worker.backends import BACKENDS, find_backend
from spark_elastic.worker.backends.gloo import Gloo
from spark_elastic.worker.backends.nccl import Nccl
from spark_elastic.worker.group import SHORTAGE_SECONDS, Group, build_on_thread


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return group_of_gpus(monkeypatch)


def test_the_abort_of_the_device_reaches_the_groups_of_user_code_and_does_not_wait(group: Group) -> None:
    groups = [of_device(group).group, of_device(group).subgroup(None, 0, 1)]
    for each in groups:
        each.kernels.clear()
    threads = group.abort_device()
    assert not any(each.is_aborted for each in groups)
    for each in groups:
        each.kernels.set()
    for thread in threads:
        thread.join()
    assert all(each.is_aborted for each in groups)


def test_the_abort_of_the_host_leaves_the_device_alone(group: Group) -> None:
    group.abort()
    assert group.is_broken()
    assert not of_device(group).group.is_aborted


def test_a_group_that_user_code_makes_after_the_abort_is_refused(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gloo, "subgroup", lambda *args: None)
    group.abort()
    with pytest.raises(WorkerLostError, match="while a group was being built"):
        group.subgroup(SimpleNamespace(store=dist.HashStore(), group_rank=0, group_size=1))


@pytest.mark.parametrize("call", ["a collective", "new_group"])
def test_an_error_in_a_group_of_user_code_waits_for_the_sign_that_a_rank_was_lost(
    group: Group, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The connections of such a group may end ahead of those of the host's. The error was taken for the user's."""

    def fails(*args: object) -> Any:
        sign.start()
        raise RuntimeError("Connection reset by peer")

    def translate(error: RuntimeError) -> None:
        if group.is_broken():
            raise WorkerLostError(str(error))

    sign = threading.Timer(0.2, group.abort)
    group._translate = translate
    monkeypatch.setattr(Gloo, "subgroup", fails if call == "new_group" else lambda *args: dist.HashStore())
    monkeypatch.setattr(Group, "_watched", lambda self, store, rank, size, groups, watch, translate: translate)

    def use() -> None:
        late: Any = group.subgroup(SimpleNamespace(store=dist.HashStore(), group_rank=0, group_size=1))
        try:
            fails()
        except RuntimeError as error:
            late(error)

    with pytest.raises(WorkerLostError, match="Connection reset"):
        use()
    sign.join()


def test_an_error_in_a_group_of_user_code_stays_the_users_where_no_rank_was_lost(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_elastic.worker.group.SIGN_SECONDS", 0.01)
    group._translate_late(RuntimeError("of other sizes"))


def test_a_group_is_closed_without_waiting_until_the_devices_has_been_freed(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes a second for that, in which the next world is formed."""
    device, seen = of_device(group).group, []
    device.kernels.clear()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append(device.is_aborted))
    group.close()
    assert seen == [False]
    device.kernels.set()
    for thread in list(Nccl._aborting):
        thread.join(10)
    assert device.is_aborted
    assert group.abort_device() == []


def test_a_closed_group_forgets_what_its_groups_of_user_code_wait_for(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch and the user may hold such a group for longer, and a work holds tensors."""
    monkeypatch.setattr(Gloo, "subgroup", lambda *args: None)
    monkeypatch.setattr(Group, "_watched", lambda self, store, rank, size, groups, watch, translate: watch)
    watch: Any = group.subgroup(SimpleNamespace(store=dist.HashStore(), group_rank=0, group_size=1))
    watch.entered(SimpleNamespace(is_completed=lambda: False), "allreduce")
    group.close()
    watch.is_waiting()  # what it sees for the first time is news
    assert not watch.is_waiting()


def test_over_gloo_alone_there_is_nothing_of_a_device_to_abort() -> None:
    group = Group(None, 0, 1, "127.0.0.1", "gloo", timedelta(seconds=1))  # type: ignore[arg-type]
    assert group.abort_device() == []
    assert not group.runs_ahead


@pytest.mark.parametrize("name", BACKENDS)
def test_a_job_may_name_every_library_in_the_table(name: str) -> None:
    assert JobSettings(min_np=1, max_np=1, num_proc=1, backend=name).backend == name
    assert find_backend(name).devices


def test_torch_tells_libraries_apart_by_their_kinds() -> None:
    kinds = [find_backend(name).kind for name in BACKENDS]
    assert len(set(kinds)) == len(kinds)


def test_the_driver_is_told_what_was_entered_last_and_that_a_model_is_frozen(group: Group) -> None:
    for name in ("allreduce", COMMIT):
        group._watch.entered(None, name)
    group.froze("Net")
    activity = group.activity()
    assert (activity.collectives, activity.recent, activity.frozen) == (2, ("allreduce", COMMIT), "Net")


@pytest.mark.parametrize(
    ("error", "pauses"), [(OSError(24, "Too many open files"), [SHORTAGE_SECONDS]), (RuntimeError("refused"), [])]
)
def test_a_machine_without_descriptors_gets_a_moment_before_the_next_world_is_tried(
    error: Exception, pauses: list[float]
) -> None:
    paused: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                paused.append(timeout)
                return False
            return super().wait()

    class Failing:
        def build(self) -> None:
            raise error

        def give_up(self) -> None:
            pass

    done = threading.Event()
    threads = SimpleNamespace(Event=Event, Thread=threading.Thread)
    with pytest.raises(WorkerLostError, match=str(error.args[-1])):
        build_on_thread(Failing(), done.set, lambda _: done.wait(), threads)  # type: ignore[arg-type]
    assert paused == pauses


def test_a_library_that_this_process_cannot_use_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(SparkElasticError, match=r"backend='nccl': the torch of this worker, .* has no NCCL"):
        Group(None, 0, 1, "127.0.0.1", "nccl", timedelta(seconds=1))  # type: ignore[arg-type]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SparkElasticError, match="no GPU that torch can use; leave backend= out"):
        Group(None, 0, 1, "127.0.0.1", "nccl", timedelta(seconds=1))  # type: ignore[arg-type]
