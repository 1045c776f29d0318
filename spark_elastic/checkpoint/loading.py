"""Loads the newest whole checkpoint of a directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from spark_elastic.checkpoint.content import SavedState, decode
from spark_elastic.checkpoint.directory import CheckpointDirectory, DamagedError
from spark_elastic.checkpoint.naming import CheckpointName
from spark_elastic.errors import CheckpointError
from spark_elastic.snapshot import StateDict

logger = logging.getLogger("spark_elastic")


def load_checkpoint(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the newest whole checkpoint of ``url`` holds, by the names that the State gave it.

    Objects with a state dict come as that (a model's keys begin with ``module.`` where it was wrapped), tensors on the CPU. No
    code out of the checkpoint is run: for objects that would need it there is an ``OpaqueObject`` that names their type.
    Damaged checkpoints are skipped with a warning. Raises ``CheckpointError`` when there is none that is whole.
    """
    directory = CheckpointDirectory(os.fspath(url), storage_options)
    saved = load_newest(directory, lambda name: decode(directory, name, unpickle=False))
    if saved is None:
        raise CheckpointError(f"{directory.url} holds no complete checkpoint")
    return {name: value.content if isinstance(value, StateDict) else value for name, value in saved.objects.items()}


def load_newest(
    directory: CheckpointDirectory,
    load: Callable[[CheckpointName], SavedState],
    skipped: Callable[[CheckpointName], None] = lambda name: None,
) -> SavedState | None:
    """Load the newest checkpoint that is whole; None where none has ever been completed.

    Raises ``CheckpointError`` where all are damaged: whoever wants to begin anew after that should say so.
    """
    names = directory.list().newest_first
    for name in names:
        try:
            return load(name)
        except DamagedError as error:
            logger.warning("%s; it is skipped", error)
            skipped(name)
    if names:
        raise CheckpointError(f"all {len(names)} checkpoints of {directory.url} are damaged; remove them to begin anew")
    return None
