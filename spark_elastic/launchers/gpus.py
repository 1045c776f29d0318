"""Finds the GPUs of this machine without initialising CUDA, because this process may have to fork, or to use CUDA later."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from spark_elastic.task.facts import torch_uses_gpus

ASK_SECONDS = 30.0


def find_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return each GPU that CUDA_VISIBLE_DEVICES allows, as a value for this variable; nothing if torch cannot use any."""
    command = shutil.which("nvidia-smi")
    if command is None or not torch_uses_gpus():
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible_gpus(visible)
    try:
        done = subprocess.run(
            [command, "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, timeout=ASK_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    # If the GPU's driver does not answer, the output says so.
    return visible_gpus(",".join(done.stdout.split())) if done.returncode == 0 else ()


def visible_gpus(listed: str) -> tuple[str, ...]:
    """Parse a value of CUDA_VISIBLE_DEVICES as CUDA does: an entry that names no GPU ends the list."""
    found: list[str] = []
    for entry in map(str.strip, listed.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", entry):
            break
        found.append(entry)
    return tuple(found)


def gpu_at(address: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a worker to which Spark has assigned the GPU with this address.

    A number counts within the GPUs that the cluster has left visible, as in CUDA and Spark's own TorchDistributor; if that is
    only one, it is the one. The id of a GPU or of a MIG slice stands for itself.

    Raises ``ValueError`` for a GPU that the cluster has hidden.
    """
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return address
    visible = visible_gpus(variable)
    if address.isdigit():
        if int(address) < len(visible):
            return visible[int(address)]
        if len(visible) == 1:
            return visible[0]
    elif address in visible or any(entry.isdigit() for entry in visible):
        return address
    raise ValueError(
        f"Spark has assigned GPU {address}, but CUDA_VISIBLE_DEVICES={variable} of this executor has no such GPU: have the "
        "discovery script print the numbers from 0 on of what is visible, or the ids"
    )
