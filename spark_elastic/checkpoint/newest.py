"""Loads the newest undamaged checkpoint of a directory, or the best."""

from __future__ import annotations

import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from spark_elastic._text import shown
from spark_elastic.checkpoint.best import Metric, best_first
from spark_elastic.checkpoint.content import SavedState, decode
from spark_elastic.checkpoint.directory import CheckpointDirectory
from spark_elastic.checkpoint.naming import CheckpointName, read_name
from spark_elastic.checkpoint.skeleton import COMPILED, WRAPPER_MARK, StateDict, Tree, map_tree
from spark_elastic.checkpoint.tree import OpaqueObject
from spark_elastic.errors import CheckpointError, DamagedError

logger = logging.getLogger("spark_elastic")

# Reading ends after this many checkpoints that a running job has removed meanwhile.
_MOST_REMOVED = 10

Module = TypeVar("Module", bound=torch.nn.Module)


def load_checkpoint(
    url: str | os.PathLike[str], *, best: bool = False, storage_options: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return the objects in the newest undamaged checkpoint of ``url``, by the names that the State gave them.

    Args:
        url: the folder that was passed to ``run(checkpoint=)``, or the folder of one checkpoint in it.
        best: load the best checkpoint instead, which a run with ``checkpoint_best=`` has kept. Raises ``CheckpointError`` if
            there is none.
        storage_options: options with which fsspec opens the folder, such as credentials and endpoints.

    Objects with a state dict are returned as their state dict, with tensors on the CPU. A model's weights have the names of the
    plain module, even if it was wrapped or compiled: ``Net().load_state_dict(load_checkpoint(url)["model"])``. No code from the
    checkpoint is run: an object that would need code is returned as an ``OpaqueObject`` that names its type. Checkpoints of
    earlier releases can be read. Damaged ones are skipped with a warning. Raises ``DamagedError`` if all are damaged,
    ``CheckpointError`` if there is none or a later release has written the newest, ``TypeError`` if ``url`` is not a path, and
    ``ValueError`` for ``best`` with the folder of one checkpoint.
    """
    if not isinstance(url, (str, os.PathLike)):
        raise TypeError(f"url must be the folder that run(checkpoint=) was given, not {url!r}")
    directory, only = open_checkpoints(os.fspath(url), storage_options)
    if best and only is not None:
        raise ValueError(f"best=True chooses among the checkpoints of a folder, and {shown(url)} is one checkpoint")
    load = load_best if best else functools.partial(load_newest, only=only)
    saved = load(directory, lambda name: decode(directory, name, unpickle=False))
    if saved is None:
        how = " with a score; run(checkpoint_best=) keeps one" if best else ""
        raise CheckpointError(f"{directory.name} holds no complete checkpoint{how}")
    return plain_objects(saved)


def open_checkpoints(
    url: str, storage_options: Mapping[str, object] | None = None
) -> tuple[CheckpointDirectory, CheckpointName | None]:
    """Open a folder of checkpoints, or of a single one, which is then named, and its directory is the folder around it."""
    directory = CheckpointDirectory(url, storage_options)
    path = url.rstrip("/")
    folder = path.rpartition("/")[2]
    name = read_name(folder)
    if name is None or directory.list().complete:
        return directory, None
    return CheckpointDirectory(path.removesuffix(folder) or ".", storage_options), name


def plain_objects(saved: SavedState) -> dict[str, object]:
    """Return the objects of a state as ``load_checkpoint`` does: state dicts with the names of plain modules."""
    return {name: _state_dicts(value) for name, value in saved.objects.items()}


def load_model(
    url: str | os.PathLike[str],
    module: Module,
    name: str = "model",
    *,
    best: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> Module:
    """Load the weights of the newest undamaged checkpoint of ``url`` into a module, and return the module.

    Args:
        url: the folder that was passed to ``run(checkpoint=)``, or the folder of one checkpoint in it.
        module: the module that takes the weights, also within ``DistributedDataParallel`` or ``torch.compile``.
        name: the model's name in the State, such as ``model``; ``nets['critic']`` and ``nets[0]`` name one in a container.
        best: load the best checkpoint instead, as ``load_checkpoint`` does.
        storage_options: options with which fsspec opens the folder, such as credentials and endpoints.

    Weights are converted to the module's dtypes without a warning, also to half or double precision. Neither a job nor Spark is
    needed, and no code from the checkpoint is run. Raises the errors of ``load_checkpoint``,
    ``CheckpointError`` if the checkpoint has no model of this name, if code would be needed for something that its
    ``get_extra_state`` returned, or if the weights do not fit the module, which may then have received some of them, and
    ``ValueError`` for a module on the meta device.
    """
    if isinstance(module, type) or not (hasattr(module, "load_state_dict") and hasattr(module, "parameters")):
        raise TypeError(f"module must be a torch.nn.Module, not {module!r}")
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(
            "module is on the meta device, without memory for weights: call its to_empty(device='cpu') first"
        )
    objects = load_checkpoint(url, best=best, storage_options=storage_options)
    models = dict(_models_in(objects))
    if name not in models:
        found = f"only {', '.join(map(repr, models))}" if models else "none"
        raise CheckpointError(f"{shown(url)} has no model named {name!r}, {found}")
    plain = getattr(module, COMPILED, module)  # the module inside torch.compile's wrapper
    if type(plain).__name__ == "DistributedDataParallel":
        plain = plain.module
    _check_is_plain(models[name], f"the model {name!r} of {shown(url)}")
    try:
        plain.load_state_dict(_named_as_in(plain, models[name]))
    except RuntimeError as error:
        raise CheckpointError(f"the model {name!r} of {shown(url)} does not fit the module: {error}") from error
    return module


def load_newest(
    directory: CheckpointDirectory,
    load: Callable[[CheckpointName], SavedState],
    skipped: Callable[[CheckpointName], None] = lambda name: None,
    only: CheckpointName | None = None,
) -> SavedState | None:
    """Load the newest undamaged checkpoint, or ``only`` this one; None if it has never been completed.

    Raises ``DamagedError`` if all are damaged, so that a job starts over only if its user decides so.
    """
    return _load_first(directory, lambda: directory.list().restricted(only).newest_first, load, skipped)


def load_best(directory: CheckpointDirectory, load: Callable[[CheckpointName], SavedState]) -> SavedState | None:
    """Load the best undamaged checkpoint by the metric of the newest one that has a score; None if none has.

    Raises ``DamagedError`` if all that have a score are damaged.
    """

    def choose() -> Sequence[CheckpointName]:
        scores = directory.scores(directory.list().scored)
        if not scores:
            return ()
        newest = scores[max(scores)]
        return best_first(scores, Metric(newest.metric, newest.mode))

    return _load_first(directory, choose, load)


def _load_first(
    directory: CheckpointDirectory,
    choose: Callable[[], Sequence[CheckpointName]],
    load: Callable[[CheckpointName], SavedState],
    skipped: Callable[[CheckpointName], None] = lambda name: None,
) -> SavedState | None:
    """Load the first undamaged checkpoint of those that ``choose`` lists; None if it lists none.

    One that fails and is not listed any more is not damaged: a job has removed it, after it wrote others. Raises
    ``DamagedError`` if all that are listed are damaged, and ``CheckpointError`` if each is removed while it is read.
    """
    names, failed = choose(), set[CheckpointName]()
    removed = 0
    while removed < _MOST_REMOVED and (name := next((each for each in names if each not in failed), None)) is not None:
        try:
            return load(name)
        except DamagedError as error:
            names, reason = choose(), error
            failed.add(name)
        if name in names:
            logger.warning("%s; it is skipped", reason)
            skipped(name)
        else:
            removed += 1
    if not failed:
        return None
    if removed == _MOST_REMOVED:
        raise CheckpointError(
            f"{removed} checkpoints of {directory.name} were removed while they were read: a job writes there faster than this "
            "process reads. Try again once it has ended, or have it keep more by checkpoint_keep="
        )
    if not names:
        raise CheckpointError(f"what {directory.name} held was removed while it was read: {reason}")
    raise DamagedError(
        f"all {len(names)} checkpoints of {directory.name} are damaged; remove them to start over. The last tried: {reason}"
    )


def _state_dicts(value: Tree) -> object:
    """Replace the ``StateDict``s in a value by their contents; those of modules get the names of the plain module."""
    if type(value) is StateDict:
        return plain_names(_state_dicts(value.content))
    if type(value) in (list, tuple):
        return type(value)(_state_dicts(entry) for entry in value)
    if type(value) in (dict, OrderedDict):
        copied = type(value)((key, _state_dicts(entry)) for key, entry in value.items())
        if hasattr(value, "_metadata"):
            copied._metadata = value._metadata
        return copied
    return value.detach() if isinstance(value, torch.Tensor) else value


def plain_names(weights: Any) -> object:
    """Rename a module's weights as if it had been neither wrapped by ``DistributedDataParallel`` nor compiled."""
    if not hasattr(weights, "_metadata"):
        return weights
    wrappers = _wrappers(weights)
    return _renamed(weights, lambda name: _plain_name(name, wrappers), lambda path: _plain_name(path, wrappers))


def _renamed(weights: Any, name_of: Callable[[str], str], path_of: Callable[[str], str]) -> Mapping[str, Any]:
    """Give a module's weights, and its parts in the metadata, other names."""
    renamed: Any = OrderedDict((name_of(name), value) for name, value in weights.items())
    renamed._metadata = OrderedDict((path_of(path), facts) for path, facts in weights._metadata.items())
    named: Mapping[str, Any] = renamed
    return named


def _models_in(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the state dicts of modules, with the names of their places in the State."""
    for name, value in objects.items():
        if hasattr(value, "_metadata"):
            yield name, value
        elif type(value) in (dict, OrderedDict, list, tuple):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            yield from _models_in({f"{name}[{key!r}]": entry for key, entry in entries})


def _check_is_plain(weights: object, what: str) -> None:
    """Raise ``CheckpointError`` if a module's state needs code for something in it."""

    def check(value: object) -> None:
        if isinstance(value, OpaqueObject):
            raise CheckpointError(
                f"{what} has a {value.kind}, which needs code from the checkpoint, and none is run: have get_extra_state return "
                "plain values and tensors"
            )

    map_tree(check, weights)


def _named_as_in(module: torch.nn.Module, weights: Any) -> Mapping[str, Any]:
    """Give weights with the names of a plain module the names that the module has, parts of which may be compiled."""
    here: Any = module.state_dict()
    wrappers = _wrappers(here)
    names = {_plain_name(name, wrappers): name for name in here}
    paths = {_plain_name(path, wrappers): path for path in getattr(here, "_metadata", ())}
    return _renamed(weights, lambda name: names.get(name, name), lambda path: paths.get(path, path))


def _wrappers(weights: Any) -> set[str]:
    return {path for path, facts in getattr(weights, "_metadata", {}).items() if facts.get(WRAPPER_MARK)}


def _plain_name(name: str, wrappers: Collection[str]) -> str:
    parts = name.split(".")
    kept = []
    for place, part in enumerate(parts):
        is_wrapped = part == "module" and ".".join(parts[:place]) in wrappers
        if not is_wrapped and part != COMPILED:
            kept.append(part)
    return ".".join(kept)
