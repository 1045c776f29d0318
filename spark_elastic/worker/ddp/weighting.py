"""Weights a rank's gradients by its rows: each parameter's gradient is multiplied on its way into ``.grad``.

The mean over ranks is the mean over rows if each rank's loss is multiplied by its share of the rows, times the number of
ranks. So hooks at the nodes that add to ``.grad`` multiply all gradients of a backward pass by the weight of the forward that
the pass reached first. Chains of models, parameters that several models share, losses on anything that a module keeps, and
gradients with respect to inputs come out right by themselves, as does what a function makes of ``torch.autograd.grad``, which
does not reach those nodes.

A pass may go back through forwards of different weights (a labelled and an unlabelled batch in one loss). Then what flows into a
forward is also multiplied by the weight of this forward relative to that of the pass, and what flows out of the forward, into a
model that came before, is divided by the same number.

SyncBatchNorm adds up gradients of all ranks in the middle of a pass, so they have to be weighted before. With it, the pass has
the weight 1, and each gradient gets the whole weight of its forward where it flows into that forward. A loss on something that
the module keeps beside its outputs is then not weighted, which a warning tells.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from spark_elastic.data.deliveries import deliveries
from spark_elastic.data.stopwatch import note_gradients

# Replaces a weight of zero, because some gradients are divided by weights.
TINY = 2.0**-60


class Forward(Protocol):
    """One call of a wrapped model, with a batch of a certain weight."""

    @property
    def weight(self) -> float:
        """The weight of this rank's gradient in the mean over ranks."""
        ...

    def differs(self) -> None:
        """Note that a backward pass has reached this forward whose weight is another one."""

    def changes_inputs(self) -> None:
        """Note that the model has written to a tensor that it was given, of which gradients then flow out unmarked."""
        ...

    def enter_backward(self) -> None:
        """Note that a backward pass has reached this forward. Called several times if the forward has several outputs."""
        ...


class Model(Protocol):
    """A wrapped model."""

    @property
    def was_reduced(self) -> bool:
        """Whether a backward pass that is over has reduced its gradients since its last forward.

        Nothing reduces what a further pass adds that reaches no forward, such as that of a penalty on weights: it is the same on
        all ranks, and has the weight 1.
        """
        ...


class Weighting:
    """The present backward pass of this process, and the hooks at the parameters."""

    def __init__(self) -> None:
        # By the id of a parameter: the node that adds to its gradient, and its hook. The node keeps the parameter, so that no
        # other object gets its id; torch drops the node with its hooks unless it is kept here.
        self._hooks: dict[int, tuple[Node, RemovableHandle]] = {}
        self._latest: Forward | None = None
        self._pass = -1
        self._weight: float | None = None
        # The number of the last pass that has added to gradients.
        self.accumulated = -1
        # Whether gradients are weighted where they flow into forwards, and not at the parameters.
        self._at_outputs = False

    def hook(self, parameters: Iterable[torch.nn.Parameter], model: Model) -> None:
        """Weight the gradients of this model's parameters from now on. A parameter that has a hook gets no second one."""
        weigh = partial(self._weigh, weakref.ref(model))
        for parameter in parameters:
            node = get_gradient_edge(parameter).node  # another one, once the parameter has another dtype or device
            known = self._hooks.get(id(parameter))
            if known is None or known[0] is not node:
                self._hooks[id(parameter)] = node, node.register_prehook(weigh)

    def weigh_at_outputs(self) -> None:
        """Weight gradients before they flow through a model, because it adds up those of all ranks on the way."""
        self._at_outputs = True

    def clear(self) -> None:
        """Remove the hooks, so that gradients are left as they are."""
        self._at_outputs = False
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.forget()

    def forget(self) -> None:
        """Note the end of a step: a later pass that reaches no forward is no longer weighted as part of this step."""
        self._latest = self._weight = None
        self._pass = -1

    def begin(self, forward: Forward) -> None:
        """Note that a wrapped model is called."""
        self._latest, self._weight, self._pass = forward, None, -1

    def relative(self, forward: Forward) -> float:
        """Return the weight of a forward that the present backward pass has reached, relative to the weight of the pass."""
        weight = forward.weight or TINY
        task = torch._C._current_graph_task_id()
        if self._weight is None or task != self._pass:
            self._pass, self._weight = task, 1.0 if self._at_outputs else weight
        if weight != self._weight:
            forward.differs()
        return weight / self._weight

    def _weigh(
        self, owner: weakref.ref[Model], gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        if self._weight is None:  # the loss does not depend on the output of a wrapped model
            latest = self._latest or deliveries.newest()
            self._weight = (1.0 if latest is None else latest.weight) or TINY
        self.accumulated = torch._C._current_graph_task_id()
        note_gradients()
        model = owner()
        weight = 1.0 if model is not None and model.was_reduced else self._weight
        # A Function may return None for a parameter.
        return None if weight == 1.0 or gradients[0] is None else (gradients[0] * weight,)


class Boundary(torch.autograd.Function):
    """Passes a tensor across the border of a forward, and weights what flows back, in gradients of gradients, too.

    ``factor`` multiplies the value itself: 1 in a forward. For gradients of gradients, a gradient is a value, too. It carries
    the relative weight from where it flows into the forward to where it flows out.
    """

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, owner: tuple[Forward, Weighting], is_leaving: bool, factor: float
    ) -> torch.Tensor:
        ctx.owner, ctx.is_leaving, ctx.factor = owner, is_leaving, factor
        return value.detach() if factor == 1.0 else value * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _weighted(gradients[0], ctx.owner, ctx.is_leaving, ctx.factor), None, None, None


def _weighted(
    gradient: torch.Tensor, owner: tuple[Forward, Weighting], is_leaving: bool, factor: float
) -> torch.Tensor:
    """Return what becomes of a gradient that flows back across the border of a forward."""
    forward, weighting = owner
    forward.enter_backward()
    relative = weighting.relative(forward)
    if is_leaving and forward.weight == 0.0:
        # The gradient of a mean over no rows is NaN, which no factor would remove.
        gradient = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
    factor *= relative if is_leaving else 1.0 / relative
    if factor == 1.0 and not torch.is_grad_enabled():
        return gradient
    weighted: torch.Tensor = Boundary.apply(gradient, owner, not is_leaving, factor)  # type: ignore[no-untyped-call]
    return weighted


def mark_view(tensor: torch.Tensor, forward: Forward, is_leaving: bool = False) -> torch.Tensor:
    """Return a view that weights what flows back, as ``Boundary`` does, and passes on what is written to it.

    Where torch has no such views, of sparse tensors for example, it is a ``Boundary``, and must not be written to.
    """
    owner = forward, weighting
    if tensor.layout is not torch.strided or tensor.is_nested:
        marked: torch.Tensor = Boundary.apply(tensor, owner, is_leaving, 1.0)  # type: ignore[no-untyped-call]
        return marked
    view = tensor.view_as(tensor)

    def weigh(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...] | None:
        return None if gradients[0] is None else (_weighted(gradients[0], owner, is_leaving, 1.0),)

    assert view.grad_fn is not None
    view.grad_fn.register_prehook(weigh)
    return view


# There is one for each process, just as torch has one default group.
weighting = Weighting()
