"""DistributedDataParallel: torch's own, built anew for every generation around the same module and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from spark_elastic import context
from spark_elastic.errors import WorkerLostError
from spark_elastic.snapshot import WRAPPER_MARK
from spark_elastic.world import World

# Torch 2.6 always broadcasts the parameters, which are equal already; that costs a reset some milliseconds a megabyte.
_ARGUMENTS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_NO_SYNC: dict[str, Any] = {"init_sync": False} if "init_sync" in _ARGUMENTS else {}


class _Weigh(torch.autograd.Function):
    """Passes an output on, and weights its gradient once, also where one output was computed from another."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, model: DistributedDataParallel) -> torch.Tensor:
        ctx.model = model
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight = ctx.model.weight()
        return gradients[0] if weight == 1.0 else gradients[0] * weight, None


class RowSource(Protocol):
    """A loader that knows how many rows of the present global batch each rank has."""

    @property
    def batch_rows(self) -> Sequence[int]: ...


class DistributedDataParallel(nn.Module):
    """Wraps ``module`` so that backward leaves the gradient of the global batch on every rank.

    Takes torch's keyword arguments. The wrapped parameters stay the same objects in every generation, so optimizers outlive
    resets; buckets and hooks are torch's and overlap with backward. Outside a job, before the first generation and in a
    world of one it calls the module as it is. ``state_dict`` keys begin with ``module.``, as torch's do.

    The gradient is the mean over the rows of the global batch, also where ranks have different numbers of them: each
    rank's share is weighted on its way from the outputs into the module, which costs no pass over the gradients. Rows come
    from the loader of the State that holds the model; ``set_rows`` overrides them. Tensors are found in outputs that are
    tensors, or tuples, lists and dicts (registered pytrees) of them; a loss on anything else gets plain means over ranks.
    """

    def __init__(self, module: nn.Module, **ddp_kwargs: Any) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        for name in ("process_group", "init_sync", "device_ids", "output_device"):
            if name in ddp_kwargs:
                raise ValueError(f"{name} is spark_elastic's to choose: it changes with the generation")
        for name in ddp_kwargs:
            if name not in _ARGUMENTS:
                raise TypeError(f"DistributedDataParallel() got an unexpected keyword argument {name!r}")
        self.module = module
        # Not attributes of the Module protocol: torch's wrapper must not show up among our submodules.
        object.__setattr__(self, "_ddp_kwargs", ddp_kwargs)
        object.__setattr__(self, "_ddp", None)
        object.__setattr__(self, "_world", None)
        object.__setattr__(self, "_rows", None)
        object.__setattr__(self, "_row_source", None)
        job = context.current_job()
        if job is not None:
            job.add_model(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            # Who opens a checkpoint gets the weights without ``module.``.
            destination._metadata[prefix[:-1]][WRAPPER_MARK] = True

    def attach(self, world: World) -> None:
        """Build torch's wrapper for a world. All ranks hold the same parameters already, so nothing is sent."""
        object.__setattr__(self, "_world", world)
        object.__setattr__(self, "_rows", None)
        if world.size > 1 and any(parameter.requires_grad for parameter in self.parameters()):
            device = next(self.parameters()).device
            ids = [device] if device.type == "cuda" else None
            ddp = nn.parallel.DistributedDataParallel(self.module, device_ids=ids, **_NO_SYNC, **self._ddp_kwargs)
            object.__setattr__(self, "_ddp", ddp)

    def detach(self) -> None:
        """Drop torch's wrapper: after a failed backward it is of no use, and it holds the old process group."""
        object.__setattr__(self, "_ddp", None)
        object.__setattr__(self, "_world", None)

    def follow_rows(self, source: RowSource | None) -> None:
        """Weight this rank by the rows that ``source`` says it has; called by the State that holds both."""
        object.__setattr__(self, "_row_source", source)

    def set_rows(self, rows: float) -> None:
        """Say what this rank's part of the present global batch weighs: unmasked rows, tokens of a token mean, …

        A small collective: all ranks call it, before ``backward``. Holds until the next call or the next commit. Zero is
        allowed where not all ranks say so.
        """
        if rows < 0:
            raise ValueError(f"rows must be a number from 0 on, not {rows!r}")
        world: World | None = self._world
        if world is None or world.size == 1:
            return
        total = torch.tensor([float(rows)], dtype=torch.float64)
        try:
            work = dist.all_reduce(total, async_op=True)
        except RuntimeError as error:
            raise world.lost(error) from error
        object.__setattr__(self, "_rows", (float(rows), total, work))

    def forget_rows(self) -> None:
        object.__setattr__(self, "_rows", None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the next backward outside reduces them, as with torch's wrapper."""
        with nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Raises ``WorkerLostError`` when the world is known to be broken."""
        if self._ddp is None:
            return self.module(*args, **kwargs)
        world: World = self._world
        if world.is_broken():
            raise WorkerLostError(f"generation {world.generation} is broken")
        try:
            outputs = self._ddp(*args, **kwargs)
        except RuntimeError as error:
            if world.is_broken():
                raise world.lost(error) from error
            raise
        if not torch.is_grad_enabled():
            return outputs
        return self._weigh(outputs) if isinstance(outputs, torch.Tensor) else pytree.tree_map(self._weigh, outputs)

    def _weigh(self, output: Any) -> Any:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            return _Weigh.apply(output, self)
        return output

    def weight(self) -> float:
        """This rank's factor: with it torch's mean over ranks becomes the mean over rows."""
        world: World = self._world
        if self._rows is not None:
            rows, total, work = self._rows
            work.wait()
            everybody = float(total)
        elif self._row_source is not None and len(self._row_source.batch_rows) == world.size:
            shares = self._row_source.batch_rows
            rows, everybody = shares[world.rank], sum(shares)
        else:
            return 1.0
        if everybody == 0:
            raise ValueError("no rank has a row of this global batch")
        return float(rows * world.size / everybody)
