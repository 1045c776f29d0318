"""Streams: the position of a loader of torchdata, which counts the batches before it twice where it reads them again."""

from __future__ import annotations

import sys

# What the position of a loader without worker processes counts.
_COUNTS = ("_num_yielded", "_sampler_iter_yielded")


def read_forward(loader: object) -> None:
    """Have a ``StatefulDataLoader`` that has been given a position go there now, and count the batches before it once.

    Where neither the dataset nor its iterator has a state, torchdata (0.11) restores the counts and then reads as many batches,
    which are counted, too: the position that it tells afterwards is twice as far.
    """
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    position = getattr(loader, "next_iter_state", None)
    if torchdata is None or not isinstance(loader, torchdata.StatefulDataLoader) or position is None:
        return
    loader.state_dict()  # makes the iterator, which reads forward
    for name in _COUNTS:
        if name in position:
            setattr(loader._iterator, name, position[name])
