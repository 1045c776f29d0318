"""Finds the names of attributes that the code of an object carries on from one call to the next."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator

import torch

# Packages whose classes set attributes for purposes of their own. What they carry on, they also keep.
LIBRARIES = {
    "abc",
    "accelerate",
    "builtins",
    "collections",
    "keras",
    "lightning",
    "lightning_fabric",
    "peft",
    "pyspark",
    "pytorch_lightning",
    "spark_elastic",
    "torch",
    "torchao",
    "torchdata",
    "torchmetrics",
    "torchvision",
    "transformers",
    "typing",
}


def own_classes(value: object) -> list[type]:
    """Return the classes of an object that are the user's, or of a library that is not known here."""
    return [kind for kind in type(value).__mro__ if _is_own(kind)]


def _is_own(part: type | types.FunctionType) -> bool:
    return str(part.__module__).partition(".")[0] not in LIBRARIES


def carried_names(value: object) -> frozenset[str]:
    """Return the attributes that some function of an object's own classes, or a hook of a module, reads before it sets them.

    ``self.calls += 1`` does, ``self.last_loss = loss.item()`` does not: nobody can tell this from the values.
    """
    return frozenset().union(*(_carried_by(code, code.co_varnames[0]) for code in _codes(value) if code.co_argcount))


def _codes(value: object) -> Iterator[types.CodeType]:
    entries = [entry for kind in own_classes(value) for entry in vars(kind).values()]
    entries += vars(value).values()
    if isinstance(value, torch.nn.Module):
        entries += [*value._forward_pre_hooks.values(), *value._forward_hooks.values(), *value._backward_hooks.values()]
    for entry in entries:
        for part in (entry.fget, entry.fset) if isinstance(entry, property) else (entry,):
            if isinstance(part, types.MethodType) and part.__self__ is value:
                part = part.__func__
            # Torch and decorators such as no_grad() put functions of their own around it.
            function = inspect.unwrap(part) if isinstance(part, types.FunctionType) else None
            if isinstance(function, types.FunctionType) and _is_own(function):
                yield function.__code__


@functools.lru_cache
def _carried_by(code: types.CodeType, owner: str) -> frozenset[str]:
    """Return the attributes of the variable ``owner`` that code reads before it sets them, in the order of its lines."""
    read, was_set, carried = set[str](), set[str](), set[str]()
    last: object = None
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if last == owner and each.argval not in was_set:
                read.add(each.argval)
        elif each.opname == "STORE_ATTR":
            was_set.add(each.argval)
            carried.update(read & {each.argval})
        if each.opname not in ("DUP_TOP", "COPY"):  # as in ``owner.name += 1``
            is_variable = each.opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF"))
            last = each.argval[-1] if is_variable and isinstance(each.argval, tuple) else is_variable and each.argval
    nested = (_carried_by(each, owner) for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(carried.union(*nested))
