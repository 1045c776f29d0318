"""Gradients on a GPU that DDP may read before Gloo has brought them back, with a torch before 2.11."""

from __future__ import annotations

import warnings

import torch

# The first release in which Gloo's futures wait for the copies to the device that Gloo makes on streams of its own.
MENDED = (2, 11)


def warn_of_early_gradients(version: str = torch.__version__) -> None:
    """Warn if this version of torch may do so. Call this if Gloo reduces gradients on a GPU.

    Source: https://github.com/pytorch/pytorch/issues/155714.
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < MENDED:
        warnings.warn(
            f"Gloo reduces gradients on a GPU here, as workers share one or backend='gloo' is set, and with torch {version} the "
            "wrapper of a model may silently read them before they are back (pytorch issue 155714). Use torch 2.11 or "
            "later, or give each worker a GPU of its own",
            stacklevel=2,
        )
