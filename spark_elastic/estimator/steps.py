"""How losses become steps: the optimizer and its parameters, the weights of a step's passes, the reading of losses."""

from __future__ import annotations

from collections.abc import Collection

import torch

import spark_elastic as se
from spark_elastic.errors import TrainingCodeError
from spark_elastic.estimator.plan import StepPlan
from spark_elastic.worker.module_registers import stepped


def make_optimizer(steps: StepPlan, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer over the model's parameters, or take the instance that came with the model.

    Raises ValueError if its parameters are not the model's, and if the model has none that are trained.
    """
    optimizer = steps.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError("the model has nothing to train: it has no parameter whose requires_grad is True")
        if steps.zero_redundancy:
            optimizer = se.ZeroRedundancyOptimizer(trained, optimizer, **steps.optimizer_arguments)
        else:
            optimizer = optimizer(trained, **steps.optimizer_arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must make a torch.optim.Optimizer, and made a {type(optimizer).__name__}")
    check_parameters(optimizer, model)
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # moves its state to the parameters' device
    return optimizer


def check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Raise ValueError if the optimizer has other parameters, and so would not train the model."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in own for parameter in stepped(optimizer))
    if foreign:
        raise ValueError(
            f"the optimizer has {foreign} parameters that are not the model's; make it from model.parameters(), or give its class"
        )


def check_frozen(optimizer: torch.optim.Optimizer, network: torch.nn.Module, frozen: Collection[str]) -> None:
    """Raise ``TrainingCodeError``, which ends the job, if a parameter that the optimizer lacks now requires gradients.

    frozen: the names of the parameters that required no gradients when the fit began. Callbacks run only on rank 0, so any
    other error would just make another rank take its place.
    """
    optimized = set(map(id, stepped(optimizer)))
    thawed = [
        name
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and name in frozen and id(parameter) not in optimized
    ]
    if thawed:
        named = f"{', '.join(thawed[:3])}{' …' * (len(thawed) > 3)}"
        raise TrainingCodeError(
            f"{named} came to require gradients during the fit, whose optimizer has the parameters that did so when it "
            "began: fit again with the fitted network (model=fitted.model)"
        )


class Passes:
    """The backward passes of one step, each weighted by its batch's weight, so that the step is that of one batch of all rows.

    planned: the number of passes. usual: the typical weight of a batch, the same number on all ranks. Losses of batches of that
    weight are only divided by the number of passes, so that numbers have their usual magnitude in half precision.
    """

    def __init__(self, planned: int, usual: float) -> None:
        self.planned = planned
        self.total = 0.0
        self._usual = usual

    def part(self, weight: float) -> float:
        """Return the factor for the next batch's loss, given the batch's weight on all ranks together."""
        if self.planned == 1:
            return 1.0
        self.total += weight
        return weight / self._usual / self.planned

    def rest(self) -> float:
        """Return the factor for the gradients after the last pass."""
        return self._usual * self.planned / self.total if self.total else 1.0


class LossWatch:
    """Copies the loss of each step to the CPU; from a GPU one step late, so that no step waits for it."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def see(self, value: torch.Tensor) -> float:
        """Take a loss and return it; on a GPU, return the previous loss."""
        if value.device.type != "cuda":
            return float(value)
        before, copied = self._last, torch.cuda.Event()
        self._last = value.to("cpu", non_blocking=True), copied
        copied.record()
        if before is None:
            return 0.0
        before[1].synchronize()
        return float(before[0])
