"""Libraries for collectives, each in a file of its own.

Every world has Gloo's group of all ranks, for the tensors of hosts and for the world's own messages. Where ``backend`` names
another library, its group stands beside Gloo's, for the tensors of the devices that it takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_elastic.worker.backends.backend import Backend

# The classes of the libraries, by the names that ``run(backend=…)`` takes. A class is imported only when it is looked up,
# because the driver checks names without importing torch.
BACKENDS: Mapping[str, str] = {
    "gloo": "spark_elastic.worker.backends.gloo.Gloo",
    "nccl": "spark_elastic.worker.backends.nccl.Nccl",
}
# The library whose group every world has.
HOST_BACKEND = "gloo"


def find_backend(name: str) -> type[Backend]:
    """Return the class of the library with this name."""
    module, _, kind = BACKENDS[name].rpartition(".")
    found: type[Backend] = getattr(importlib.import_module(module), kind)
    return found
