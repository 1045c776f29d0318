"""Writes a network as a program that runs without the network's Python code, by torch.export or as ONNX."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping

import torch

from spark_elastic.estimator.layout import Layout, outputs_of
from spark_elastic.estimator.preflight import ROWS

FORMATS = (".pt2", ".onnx")


def export_network(
    network: torch.nn.Module,
    layout: Layout,
    shapes: Mapping[str, tuple[int, ...] | None],
    path: str,
    rows: Mapping[str, torch.Tensor] | None,
) -> None:
    """Write the network, for batches of any number of rows; see ``ElasticModel.export``."""
    ending = os.path.splitext(path)[1]
    if ending not in FORMATS:
        raise ValueError(f"path must end in {' or '.join(FORMATS)}, which says what is written, not {path!r}")
    network = copy.deepcopy(network).cpu().eval()
    args, kwargs = layout.arguments(rows or _zeros(layout, shapes))
    try:
        with torch.no_grad():
            outputs = network(*args, **kwargs)  # some releases of torch export what cannot be called
        program = _exported(network, tuple(args), kwargs)
        if ending == ".pt2":
            torch.export.save(program, path)
            return
    except Exception as error:
        raise ValueError(
            f"{type(network).__name__} cannot be exported with these columns: {error}. If the network takes "
            "whole numbers, or other rows than zeros, give some as rows="
        ) from error
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("to write ONNX, install what torch uses for it: pip install onnx onnxscript") from error
    names = list(outputs) if isinstance(outputs, Mapping) else list(layout.outputs)
    known = names if len(names) == len(outputs_of(outputs, layout)) else None
    torch.onnx.export(program, (), path, dynamo=True, external_data=False, verbose=False, output_names=known)


def _exported(
    network: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
) -> torch.export.ExportedProgram:
    """Trace a network in evaluation mode, with the arguments that ``transform`` gives it."""
    rows = torch.export.Dim("rows")
    shapes = {name: {0: rows} for name in kwargs} or tuple({0: rows} for _ in args)
    with torch.no_grad():
        return torch.export.export(network, args, kwargs, dynamic_shapes=shapes)


def _zeros(layout: Layout, shapes: Mapping[str, tuple[int, ...] | None]) -> dict[str, torch.Tensor]:
    """Make a batch of fractional zeros in the shapes of the features. Raises ValueError for lists of different lengths."""
    found = {}
    for name in layout.features:
        shape = shapes.get(name)
        if shape is None:
            raise ValueError(f"column {name!r} has lists of different lengths, with which a network cannot be exported")
        found[name] = torch.zeros((ROWS, *shape))
    return found
