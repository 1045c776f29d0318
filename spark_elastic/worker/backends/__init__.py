"""Libraries for collectives, each in a file of its own.

Every world has Gloo's group of all ranks, for the tensors of hosts and for the world's own messages. Where ``backend`` names
another library, its group stands beside Gloo's, for the tensors of the devices that it takes.
"""

from __future__ import annotations

from spark_elastic.worker.backends.backend import Backend
from spark_elastic.worker.backends.gloo import Gloo
from spark_elastic.worker.backends.nccl import Nccl

BACKENDS: dict[str, type[Backend]] = {"gloo": Gloo, "nccl": Nccl}
# The one that every world has.
HOST_BACKEND = "gloo"
