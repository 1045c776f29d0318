"""What the stand-in's image does with processes."""

from __future__ import annotations

import os
import signal
import subprocess

from kube.image import POD, kill_all


def test_the_exit_code_of_a_killed_container_is_left_to_who_has_started_it() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, POD: "a pod"})
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    assert process.stdout.read(1) == b"x", "its environment can be read once it runs"
    kill_all({"metadata": {"uid": "a pod"}})
    assert process.wait() == -signal.SIGKILL
    process.stdin.close()
    process.stdout.close()
