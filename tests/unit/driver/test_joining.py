"""When a running world is interrupted."""

from __future__ import annotations

from machine_script import running


def test_a_drained_worker_that_nobody_can_replace_is_not_interrupted_at_every_commit() -> None:
    script = running("a", min_np=1)
    script.drain(0)
    for _ in range(5):
        if script.job.world.phase.name == "INTERRUPTING":
            script.obey_interrupt()
            if script.generation > 1:
                script.acknowledge()
        else:
            script.commit()
    assert len(script.worlds) <= 2
