"""The environment that torchrun gives its workers, for scripts and for functions in a fixed world."""

from __future__ import annotations

import os

from spark_elastic.protocol.ticket import DEVICE_VARIABLE
from spark_elastic.worker.world import World


def is_one_of_several() -> bool:
    """Whether torchrun, or ``spark-elastic run --restart-on-change``, has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def rank_variables(world: World) -> dict[str, str]:
    """Return the variables for this worker's rank. A worker that has a GPU sees no other GPU, so its local rank is 0."""
    me = world.me
    local_rank, local_size = (0, 1) if DEVICE_VARIABLE in os.environ else (me.local_rank, me.local_size)
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(me.cross_rank),
        "GROUP_WORLD_SIZE": str(me.cross_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.size),
    }
