"""Libraries for collectives, each in a file of its own.

Every world has a Gloo group of all ranks, for tensors on the CPU and for the world's own messages. If ``backend`` names another
library, its group exists beside Gloo's, for tensors on the devices that the library serves.
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
