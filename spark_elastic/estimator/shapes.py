"""Makes outputs and labels fit: drops trailing ones, makes classes int64, and gives other labels the output's dtype."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

_CLASS_INDEX = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_ELEMENTWISE = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.MultiLabelSoftMarginLoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)
_CLASS_INDEX_NAMES = frozenset({"cross_entropy", "nll_loss", "multi_margin_loss"})
_ELEMENTWISE_NAMES = frozenset(
    {"binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"}
)


# A label that never occurs.
_NEVER = -(2**31)


class ClassificationLoss:
    """Cross entropy of class indexes and logits [rows, classes], or one logit per row for two classes."""

    reduction = "mean"

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Return the loss, reduced according to ``reduction``."""
        if output.dim() == 1:
            return functional.binary_cross_entropy_with_logits(output, label.to(output.dtype), reduction=self.reduction)
        # A label below 0 must be an error rather than left out of the mean.
        return functional.cross_entropy(output, label.long(), reduction=self.reduction, ignore_index=_NEVER)


def unwrapped(loss: object) -> object:
    """Return the function of a ``functools.partial``, and anything else as it is."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def takes_classes(loss: object) -> bool:
    """Whether a loss takes class indexes as labels."""
    loss = unwrapped(loss)
    return isinstance(loss, _CLASS_INDEX) or getattr(loss, "__name__", "") in _CLASS_INDEX_NAMES


def meet(output: torch.Tensor, label: torch.Tensor, loss: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and label in the shapes and dtypes that ``loss`` takes.

    output: [rows, …]; label: [rows] or [rows, …]. Half precision becomes float32. For losses other than torch's, only trailing
    ones are dropped. Raises ValueError for shapes that do not fit, some of which torch would broadcast.
    """
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    if takes_classes(loss):
        if label.is_floating_point() and label.shape == output.shape:
            return output, label  # probabilities of classes
        if label.dim() == output.dim() and label.shape[-1] == 1:
            label = label.squeeze(-1)
        if label.shape != output.shape[:1] + output.shape[2:]:
            raise ValueError(_misfit(output, label, loss, "one class index per row for an output of [rows, classes]"))
        return output, _as_classes(label, loss)
    while output.dim() > label.dim() and output.shape[-1] == 1:
        output = output.squeeze(-1)
    while label.dim() > output.dim() and label.shape[-1] == 1:
        label = label.squeeze(-1)
    known = unwrapped(loss)
    if isinstance(known, ClassificationLoss):
        # A transform may make fractions of the labels of two classes, as label smoothing does.
        return output, _as_classes(label, loss, may_be_soft=output.dim() == 1)
    if isinstance(known, _ELEMENTWISE) or getattr(known, "__name__", "") in _ELEMENTWISE_NAMES:
        if output.shape != label.shape:
            raise ValueError(_misfit(output, label, loss, "output and label of one shape"))
        label = label.to(output.dtype)
    return output, label


def _as_classes(label: torch.Tensor, loss: object, may_be_soft: bool = False) -> torch.Tensor:
    # A GPU would be waited for in each step. The first rows are tried on the CPU, and columns are checked there.
    if (may_be_soft or label.dim() > 1 or label.device.type == "cpu") and _has_fractions(label):
        if may_be_soft:
            return label
        raise ValueError(f"{name_of(loss)} takes class indexes, and a label is {float(label[label % 1 != 0][0]):g}")
    return label.long()


def _has_fractions(label: torch.Tensor) -> bool:
    return label.is_floating_point() and bool((label % 1 != 0).any())


def name_of(named: object) -> str:
    """Return the usual name of a loss, a metric or a scheduler, for messages."""
    named = unwrapped(named)
    return str(getattr(named, "__name__", type(named).__name__))


def _misfit(output: torch.Tensor, label: torch.Tensor, loss: object, wanted: str) -> str:
    shapes = f"the label has shape {shown_shape(label)} and the output {shown_shape(output)}"
    return f"the label's shape does not fit the loss: {shapes}; {name_of(loss)} takes {wanted}"


def shown_shape(tensor: torch.Tensor) -> str:
    """Return the shape of a batch, for messages."""
    return f"[{', '.join(['rows', *map(str, tensor.shape[1:])])}]" if not tensor.is_nested else "[rows, lists]"
