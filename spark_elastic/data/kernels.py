"""The kernels on which a shard's bits depend: torch and its libraries, their instruction set, threads, device, switches.

They travel with the position of a loader that was made with ``shards=``: in commits, to newcomers, and in durable checkpoints.
A process that continues with different kernels computes different bits.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import warnings
from collections.abc import Mapping

import torch

from spark_elastic.protocol.ticket import THREADS_VARIABLE

# Environment variables that influence which kernels the libraries choose.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)

# The processor's extensions by which libraries choose kernels, beyond torch's own classes, on x86 and on ARM. Not known of states
# that were made before they were compared, and under torch that does not tell.
_EXTENSIONS = "extensions"
_CHOSEN_BY = ("avx", "amx", "fma", "sve", "sme", "bf16", "fp16", "i8mm", "dot")
# Variables with which users choose instead, for each library that chooses: then extensions make no difference.
_CHOICES = (
    ("ATEN_CPU_CAPABILITY",),
    ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
)

# For how many shapes of its inputs torch.compile makes kernels of a function.
MOST_SHAPES = 64

# How many threads torch uses by default.
_BY_ITSELF = torch.get_num_threads()


def pin_threads(stacklevel: int | None = None) -> None:
    """Make this process compute with one thread, so that bits do not depend on how many workers share a machine's cores.

    A number of threads that was set explicitly stays: by ``OMP_NUM_THREADS``, as Spark does, or by ``torch.set_num_threads``.
    With a stacklevel, that of the user's line as ``warnings.warn`` counts from here, this warns of a model that was made with
    several threads, whose first weights may depend on their number.
    """
    is_chosen = "OMP_NUM_THREADS" in os.environ and THREADS_VARIABLE not in os.environ
    threads = torch.get_num_threads()
    if is_chosen or threads != _BY_ITSELF or threads == 1:
        return
    torch.set_num_threads(1)
    if stacklevel is not None and any(map(_has_weights, gc.get_objects())):
        warnings.warn(
            f"a model was made with {threads} threads, before the loader with shards= has set one: weights that are made by "
            "factorizing matrices, as by orthogonal_, have other bits with another number of threads. Make the loader before "
            "the model, or set OMP_NUM_THREADS",
            stacklevel=stacklevel,
        )


def _has_weights(value: object) -> bool:
    is_module = issubclass(type(value), torch.nn.Module) and "_parameters" in vars(value)
    return is_module and any(parameter is not None for parameter in vars(value)["_parameters"].values())


def pin_compiler() -> None:
    """Have ``torch.compile`` make a kernel for each shape of a shard.

    By itself it makes one for all shapes when the second shape comes, and keeps the first. Both fit the first shape, so the
    kernel that a shard gets would depend on the shards that this rank has had before. So would the end of compiling, after
    which torch runs new shapes as they are: there, it raises. ``dynamic=True`` still makes one kernel for all.
    """
    import torch._dynamo

    config = torch._dynamo.config
    config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit = False, True
    config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * MOST_SHAPES)


def kernels_here() -> dict[str, str]:
    """Describe the kernels of this process."""
    cudnn = torch.backends.cudnn
    switches = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "float32 products": torch.get_float32_matmul_precision(),
        "flushes denormals": not torch.tensor(1e-40).mul(1.0),
    }
    return {
        **_build(),
        **({} if _is_chosen() else _extensions()),
        "threads": str(torch.get_num_threads()),
        "switches": ", ".join(f"{name}={value}" for name, value in switches.items()),
    }


@functools.cache
def _build() -> dict[str, str]:
    built = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", built)
    libraries = re.findall(r"(?:Math Kernel Library|MKL-DNN|OpenBLAS)[^\n(]*", built)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "torch": str(torch.__version__),  # a class of torch's own, which a checkpoint could only hold as an object
        "libraries": ", ".join([blas[1] if blas else "no BLAS", *(" ".join(name.split()) for name in libraries)]),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": device,
        "variables": ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
    }


def _is_chosen() -> bool:
    """Whether extensions do not matter: a GPU computes, or the user has chosen for all libraries."""
    return torch.cuda.is_available() or all(any(name in os.environ for name in names) for names in _CHOICES)


@functools.cache
def _extensions() -> dict[str, str]:
    if not hasattr(torch.cpu, "get_capabilities"):  # older torch
        return {}
    capabilities = torch.cpu.get_capabilities()
    found = sorted(name for name, has in capabilities.items() if has is True and name.startswith(_CHOSEN_BY))
    return {_EXTENSIONS: ", ".join(found)}


def difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Name the differences between two kernels, with both values; None if there are none."""
    names = [name for name in {**saved, **here} if saved.get(name) != here.get(name)]
    if _EXTENSIONS in names and not (_EXTENSIONS in saved and _EXTENSIONS in here):
        names.remove(_EXTENSIONS)
    if not names:
        return None
    return "; ".join(_told(name, saved.get(name) or "none", here.get(name) or "none") for name in names)


def _told(name: str, before: str, now: str) -> str:
    if name == _EXTENSIONS:
        sides = ((_only(before, now), "missing here"), (_only(now, before), "only here"))
        return "extensions of the processor: " + ", ".join(f"{parts} {where}" for parts, where in sides if parts)
    if name == "switches":
        before, now = _only(before, now), _only(now, before)
    return f"{name} was {before} and is {now} here"


def _only(one: str, other: str) -> str:
    """Return those parts of a list that the other one lacks."""
    return ", ".join(part for part in one.split(", ") if part not in other.split(", "))
