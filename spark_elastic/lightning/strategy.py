"""Lightning's strategy in the process group that the job has formed."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from spark_elastic.worker.context import rank, size


class Processes(LightningEnvironment):
    """Presents each worker to Lightning as a node with one process, which already exists."""

    creates_processes_externally = True

    def node_rank(self) -> int:
        return rank()

    def local_rank(self) -> int:
        return 0


class Strategy(DDPStrategy):
    """Lightning's DDP strategy in the existing process group, with a model wrapper that outlives the group."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(cluster_environment=Processes())
        self._wrapped = model

    def _setup_model(self, model: torch.nn.Module) -> Any:
        return self._wrapped

    def _register_ddp_hooks(self) -> None:
        """Register none. On a GPU, Lightning would register hooks that need torch's own wrapper."""

    def teardown(self) -> None:
        """End the Trainer, and leave the module and its optimizers on their device for the next world."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        # Hide the module and the optimizers from Lightning, which would move them to the CPU.
        optimizers, self.optimizers = self.optimizers, []
        module, self._lightning_module = self._lightning_module, None
        super().teardown()
        self.optimizers, self._lightning_module = optimizers, module

    def reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        """Reduce as Lightning does, but for two cases.

        Whole numbers are averaged here, since Lightning's way for Gloo depends on the backend's name. Where each rank has
        evaluated all rows, a sum is that of one rank.
        """
        module = self._lightning_module
        if module is not None and not module.trainer.training and str(reduce_op).lower().endswith("sum"):
            reduce_op = "mean"
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if not is_mean or not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / torch.distributed.get_world_size(group))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Count the ranks that say yes. Lightning would ask ``reduce``, which takes an evaluation's sum for that of a metric."""
        count = int(super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum"))
        return count == size() if all else count > 0
