"""What the stand-in's image does with processes."""

from __future__ import annotations

import os
import signal
import subprocess

from kube.image import POD, kill_all


def test_the_exit_code_of_a_killed_container_is_left_to_who_has_started_it() -> None:
    process = subprocess.Popen(["sleep", "100"], env={**os.environ, POD: "a pod"})
    kill_all({"metadata": {"uid": "a pod"}})
    assert process.wait() == -signal.SIGKILL
