"""A standalone cluster whose machines are taken away with a notice, as ``sbin/decommission-worker.sh`` does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from reports import events, kinds, wait_for_world
from standalone import Standalone
from submitted import Submitted

pytestmark = pytest.mark.long


@pytest.fixture
def cluster(nothing_left: None, tmp_path: Path) -> Iterator[Standalone]:
    cluster = Standalone(tmp_path)
    yield cluster
    cluster.end()


def test_workers_leave_a_machine_that_is_decommissioned_without_a_lost_step(
    submit: Callable[..., Submitted], cluster: Standalone, tmp_path: Path
) -> None:
    machines = {machine.pid: machine for machine in (cluster.add_worker(), cluster.add_worker())}
    job = submit(master=cluster.url, settings={"spark.decommission.enabled": "true", "spark.executor.memory": "512m"})
    world = job.world()
    before = len(events(tmp_path))
    (machine,) = (
        machines[parent.pid] for parent in psutil.Process(world[1].executor()).parents() if parent.pid in machines
    )
    machine.send_signal(signal.SIGPWR)
    (alone,) = wait_for_world(tmp_path, 1, after=world[0].generation)
    assert alone.pid == world[0].pid
    cluster.add_worker()
    job.world(after=alone.generation)
    since = kinds(events(tmp_path)[before:])
    assert since.count("host_draining") == 1
    assert "world_broken" not in since
    job.end()
