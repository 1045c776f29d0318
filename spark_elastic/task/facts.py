"""What a task finds out about the place where it runs, before it registers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Mapping

import psutil

from spark_elastic.protocol.messages import HostFacts, uses_gpus
from spark_elastic.protocol.ticket import DEVICE_VARIABLE, THREADS_VARIABLE

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def gather_facts(
    address: str, gpus: tuple[str, ...], cpus: int, attempt: int, *, executor_pid: int | None = None
) -> HostFacts:
    """Describe this host. ``address`` is the local end of the connection to the driver, because name lookups often lie.

    executor_pid: the process whose end takes its tasks with it; None looks for it among the ancestors of this process.
    """
    unusable = [] if not gpus or torch_uses_gpus() else [_unusable(gpus[0])]
    return HostFacts(
        name=socket.gethostname(),
        address=address,
        pid=os.getpid(),
        executor_pid=executor_pid or find_executor_pid(),
        python=platform.python_version(),
        torch=_torch_version(),
        gpus=gpus,
        cpus=cpus,
        attempt=attempt,
        warnings=tuple(_warnings() + unusable),
    )


def torch_uses_gpus() -> bool:
    """Whether the torch that is installed here is one for GPUs."""
    return uses_gpus(_torch_version())


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _unusable(gpu: str) -> str:
    return f"Spark has assigned GPU {gpu}, which torch {_torch_version()} cannot use: install a torch for CUDA, or use the CPU"


def interface_address(interface: str) -> str:
    """Return an address of a network interface, IPv4 if it has one. Raises ``ValueError`` if none, naming usable interfaces.

    Link-local IPv6 addresses are left out, because they are useless without the number of the reader's own interface.
    """
    interfaces = psutil.net_if_addrs()
    addresses = {
        name: [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and "%" not in entry.address
        ]
        for name, entries in interfaces.items()
    }
    if addresses.get(interface):
        return str(addresses[interface][0])
    problem = "has no address" if interface in interfaces else "does not exist"
    usable = ", ".join(sorted(name for name, found in addresses.items() if found))
    raise ValueError(f"network_interface={interface!r} {problem} here; the interfaces with an address are {usable}")


def worker_environment(
    inherited: Mapping[str, str], settings: Mapping[str, str], gpus: tuple[str, ...], cpus: int, import_path: list[str]
) -> dict[str, str]:
    """Return the worker's environment: the task's, our defaults for unset variables, and the user's ``env``."""
    environment = dict(inherited)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in import_path)
    if _THREADS[0] in settings and environment.pop(THREADS_VARIABLE, ""):
        for name in _THREADS:  # a process above this one has set these defaults
            environment.pop(name, None)
    threads = settings.get(_THREADS[0], environment.get(_THREADS[0]))
    if threads is None:
        # In some setups pyspark's daemon does not set OMP_NUM_THREADS to spark.task.cpus, and torch would use every core.
        environment[THREADS_VARIABLE] = threads = str(cpus)
    for name in _THREADS:  # torch takes MKL's number if the two differ
        environment.setdefault(name, threads)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[0]
        environment[DEVICE_VARIABLE] = "cuda:0"
        # torch.cuda.is_available() in the warm parent must not initialize CUDA, or its forks could not use it.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environment.update(settings)
    return environment


def find_executor_pid() -> int:
    """Return the pid of the executor's JVM: the nearest ancestor that is Java, or the task's parent if none is."""
    for ancestor in psutil.Process().parents():
        if ancestor.name().startswith("java"):
            return int(ancestor.pid)
    return os.getppid()


def _warnings() -> list[str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        return [
            f"address space is limited to {soft / 2**20:,.0f} MiB (spark.executor.pyspark.memory); the limit holds for "
            "the training worker, too, and torch reserves far more than it uses. Unset it, or expect failing allocations"
        ]
    return []
