"""Checks what losses expect of labels and outputs. If it does not hold, torch computes silently, and training goes wrong.

Only torch's own losses and the classifier's default loss are known here. A user's loss may take anything.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spark_elastic.estimator.shapes import ClassificationLoss, name_of, shown_shape, unwrapped

# Steps of a graph that move values without changing them, or only clamp them.
_MOVING = re.compile(
    r"(Alias|Clamp|ClampMax|ClampMin|Clone|Permute|Select|Slice|Split|Squeeze|T|ToCopy|Transpose|Unbind|UnsafeView|Unsqueeze|View)Backward\d"
)
_ENDS = {"SigmoidBackward0": "sigmoid", "SoftmaxBackward0": "softmax"}
# How far the sum of a row's probabilities may be from 1: if the loss takes their logarithms, and if nothing else shows that
# they are probabilities.
_TOLERANCE = 0.1
_NARROW = 1e-4


@dataclass(frozen=True)
class _Labels:
    """The labels that a loss accepts: all numbers from 0 to 1, or only -1 and 1."""

    text: str
    hold: Callable[[torch.Tensor], torch.Tensor]


_UNIT = _Labels("from 0 to 1", lambda label: (label >= 0) & (label <= 1))
_SIGNS = _Labels("-1 and 1", lambda label: label.abs() == 1)
_LABELS = {
    "BCELoss": _UNIT,
    "BCEWithLogitsLoss": _UNIT,
    "HingeEmbeddingLoss": _SIGNS,
    "MultiLabelSoftMarginLoss": _UNIT,
    "SoftMarginLoss": _SIGNS,
    "binary_cross_entropy": _UNIT,
    "binary_cross_entropy_with_logits": _UNIT,
    "hinge_embedding_loss": _SIGNS,
    "multilabel_soft_margin_loss": _UNIT,
    "soft_margin_loss": _SIGNS,
}
_TAKE_CLASSES = frozenset({"CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"})
_TAKE_LOGITS = frozenset(
    {
        "BCEWithLogitsLoss",
        "CrossEntropyLoss",
        "MultiLabelSoftMarginLoss",
        "SoftMarginLoss",
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "multilabel_soft_margin_loss",
        "soft_margin_loss",
    }
)
_TAKE_LOGARITHMS = frozenset({"NLLLoss", "nll_loss"})


def with_graph(network: torch.nn.Module) -> torch.nn.Module:
    """Return a copy on the CPU, in evaluation mode, whose outputs have a graph even if the network is frozen."""
    network = copy.deepcopy(network).cpu().eval()
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return network


def probabilities_by(output: torch.Tensor) -> str | None:
    """Return the last step of the network, "sigmoid" or "softmax"; None if it is neither.

    The output must have been computed with gradients.
    """
    node = output.grad_fn
    while node is not None and _MOVING.fullmatch(node.name()):
        node = node.next_functions[0][0]
    return None if node is None else _ENDS.get(node.name())


def are_probabilities(outputs: Sequence[torch.Tensor], loss: object = None) -> bool | None:
    """Whether a classifier's only output consists of probabilities, of each class or of class 1; None if that is not clear.

    The loss tells if it is a torch loss, else the network's last step. If that does not tell, several numbers that are from 0
    to 1 and add up to 1 in different rows are probabilities; other numbers that are all from 0 to 1 may be.
    """
    if len(outputs) != 1:
        return False
    (output,) = outputs
    if loss is not None and _name(loss, output) in _TAKE_LOGITS | _TAKE_LOGARITHMS:
        return False
    if takes_probabilities(loss) or probabilities_by(output) is not None:
        return True
    values = output.detach().float().flatten(1)
    if not bool(((values >= 0) & (values <= 1)).all()):
        return False
    # Logits of a network whose last layer knows only a bias may add up to 1, but they are the same in all rows.
    differ = bool((values != values[0]).any())
    return True if differ and bool(((values.sum(1) - 1).abs() < _NARROW).all()) else None


def takes_probabilities(loss: object) -> bool:
    """Whether this is torch's loss for a network that returns the probability of class 1."""
    return isinstance(loss, torch.nn.BCELoss) or unwrapped(loss) is torch.nn.functional.binary_cross_entropy


def check_labels(loss: object, output: torch.Tensor, label: torch.Tensor, columns: str) -> None:
    """Raise ValueError for labels that ``loss`` does not accept, naming their ``columns``."""
    name = _name(loss, output)
    least, most = (f"{float(value):g}" for value in torch.aminmax(label)) if label.numel() else ("", "")
    found = f"{columns} has labels from {least} to {most}"
    are_classes = isinstance(loss, ClassificationLoss) or not label.is_floating_point()
    if name in _TAKE_CLASSES and output.dim() > 1 and are_classes:
        classes = output.shape[1]
        options = getattr(loss, "keywords", {})  # those of a partial
        counted = label[label != options.get("ignore_index", getattr(loss, "ignore_index", -100))]
        if bool(((counted < 0) | (counted >= classes)).any()):
            raise ValueError(f"{found}; with {classes} outputs a row, {name} takes the classes 0 to {classes - 1}")
    elif (wanted := _LABELS.get(name)) is not None and not bool(wanted.hold(label).all()):
        raise ValueError(f"{found}; {name} takes labels {wanted.text}, and makes no sense of others")


def check_output(loss: object, output: torch.Tensor, when: str = "") -> None:
    """Raise ValueError for an output that ``loss`` would misinterpret. It must have been computed with gradients.

    ``when``: the network's mode, if it is not the training mode.
    """
    name, made = _name(loss, output), probabilities_by(output)
    if name in _TAKE_LOGITS and made is not None:
        binary = name == "BCEWithLogitsLoss"
        instead = " (or give the loss torch.nn.BCELoss())" if binary and made == "sigmoid" else ""
        raise ValueError(
            f"{when}the network ends in a {made}, and {name} applies one itself, so that probabilities would be squashed twice: "
            f"leave it out of the network{instead}"
        )
    if name in _TAKE_LOGARITHMS and output.dim() > 1:
        sums = output.detach().exp().sum(1)
        if bool(((sums - 1).abs() > _TOLERANCE).any()):
            raise ValueError(
                f"{when}{name} takes logarithms of probabilities, and those of a row of the output {shown_shape(output)} do not "
                "add up to 1: end the network in torch.nn.LogSoftmax(1), or give the loss torch.nn.CrossEntropyLoss()"
            )


def check_mean(loss: Callable[..., torch.Tensor], output: torch.Tensor, label: torch.Tensor) -> None:
    """Raise ValueError for a loss that grows with the number of rows: steps would depend on the number of workers."""
    if output.is_nested or label.is_nested:
        return
    try:
        with torch.no_grad():
            once = float(loss(output, label).mean())
            twice = float(loss(torch.cat([output, output]), torch.cat([label, label])).mean())
    except Exception:  # it requires a certain number of rows, so it is not a sum over any number of them
        return
    if once and abs(twice - 2 * once) < 1e-3 * abs(once):
        raise ValueError(
            f"the loss {name_of(loss)} is a sum over rows, so that steps would depend on how many rows each worker has: give a "
            "mean over rows, such as reduction='mean'"
        )


def _name(loss: object, output: torch.Tensor) -> str:
    """Return torch's name of a loss; empty if it is not torch's."""
    if isinstance(loss, ClassificationLoss):
        return "BCEWithLogitsLoss" if output.dim() == 1 else "CrossEntropyLoss"
    loss = unwrapped(loss)
    named = loss if hasattr(loss, "__name__") else type(loss)
    return str(named.__name__) if (named.__module__ or "").startswith("torch.") else ""
