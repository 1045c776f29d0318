"""How a rank's gradients come to weigh as much as its rows: a parameter's gradient is multiplied on its way into ``.grad``.

The mean over ranks is the mean over rows if each rank's loss is multiplied by its share of the rows, times the number of
ranks. So all gradients of a backward pass are, by hooks at the parameters, with the weight of the forward that the pass came to
first. Chains of models, parameters that several models have, losses on anything that a module keeps, and gradients with
respect to inputs come out right by themselves.

Where a pass goes back through forwards of different weights (a labelled and an unlabelled batch in one loss), what flows into
a forward is multiplied besides by its weight relative to the pass's, and what flows out of it, into a model that came
before, is divided by that again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from spark_elastic.data.deliveries import deliveries

# Stands for a weight of zero, which could not be divided by: the gradient of a repeated batch vanishes beside the others'.
TINY = 2.0**-60


class Forward(Protocol):
    """One call of a wrapped model, whose batch has a share."""

    @property
    def weight(self) -> float:
        """What this rank's gradient weighs in the mean over ranks."""
        ...

    def enter_backward(self) -> None:
        """Called when a backward pass comes to this forward; several times where it has several outputs."""
        ...


class Weighting:
    """The present backward pass of this process, and the hooks at the parameters."""

    def __init__(self) -> None:
        self._hooks: dict[int, Any] = {}
        self._latest: Forward | None = None
        self._pass = -1
        self._weight: float | None = None
        # The last pass that has added to gradients.
        self.accumulated = -1

    def hook(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Weight the gradients of these parameters from now on, once each."""
        for parameter in parameters:
            if id(parameter) not in self._hooks:
                # The parameter is kept beside its hook, so that its id stays its own.
                self._hooks[id(parameter)] = parameter, parameter.register_hook(self._weigh)

    def clear(self) -> None:
        """Leave gradients as they are."""
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.forget()

    def forget(self) -> None:
        """A step is over: what comes without a forward of its own is not weighted as this step's."""
        self._latest = self._weight = None
        self._pass = -1

    def begin(self, forward: Forward) -> None:
        """A wrapped model is called."""
        self._latest, self._weight, self._pass = forward, None, -1

    def relative(self, forward: Forward) -> float:
        """Return the weight of a forward, to which the present backward pass has come, relative to the pass's."""
        weight = forward.weight or TINY
        task = torch._C._current_graph_task_id()
        if self._weight is None or task != self._pass:
            self._pass, self._weight = task, weight
        return weight / self._weight

    def _weigh(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._weight is None:  # no output of a wrapped model is on the way to the loss
            latest = self._latest or deliveries.newest()
            self._weight = (1.0 if latest is None else latest.weight) or TINY
        self.accumulated = torch._C._current_graph_task_id()
        return None if self._weight == 1.0 else gradient * self._weight


class Boundary(torch.autograd.Function):
    """Passes a tensor across the border of a forward; weights what flows back, in gradients of gradients, too.

    ``factor`` is what the value itself is multiplied by. It is 1 in a forward. A gradient, which is a value to those who take
    gradients of gradients, carries the relative weight that it was given on its way in until it leaves.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, owner: Any, is_leaving: bool, factor: float) -> torch.Tensor:
        ctx.owner, ctx.is_leaving, ctx.factor = owner, is_leaving, factor
        return value.detach() if factor == 1.0 else value * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        forward, weighting = ctx.owner
        forward.enter_backward()
        relative = weighting.relative(forward)
        factor = ctx.factor * (relative if ctx.is_leaving else 1.0 / relative)
        if factor == 1.0 and not torch.is_grad_enabled():
            return gradients[0], None, None, None
        weighted = Boundary.apply(gradients[0], ctx.owner, not ctx.is_leaving, factor)  # type: ignore[no-untyped-call]
        return weighted, None, None, None


# The one of this process, as torch's default group is.
weighting = Weighting()
