"""Corrects the position of a torchdata loader that re-reads the batches before it, and so counts them twice."""

from __future__ import annotations

import sys

# The counters in the position of a loader without worker processes.
_COUNTS = ("_num_yielded", "_sampler_iter_yielded")


def read_forward(loader: object) -> None:
    """Make a ``StatefulDataLoader`` go to its given position now, and count the batches before it once.

    If neither the dataset nor its iterator has a state, torchdata (0.11) restores the counters and then reads as many batches,
    which are counted, too: the position that it reports afterwards is twice as far.
    """
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    position = getattr(loader, "next_iter_state", None)
    if torchdata is None or not isinstance(loader, torchdata.StatefulDataLoader) or position is None:
        return
    loader.state_dict()  # makes the iterator, which reads forward
    for name in _COUNTS:
        if name in position:
            setattr(loader._iterator, name, position[name])
