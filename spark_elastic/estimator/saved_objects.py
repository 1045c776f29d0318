"""The files of a saved estimator or model besides its metadata: tensors, and the pickle of everything else. Needs no Spark.

docs/formats.md describes them; ``persistence`` writes and reads the metadata by way of Spark.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypedDict

import cloudpickle
import torch

from spark_elastic import __version__, _saved_names
from spark_elastic._json import Json
from spark_elastic._pickling import beside
from spark_elastic._text import shown
from spark_elastic.checkpoint.tensors import file_pieces, load_file
from spark_elastic.errors import CheckpointError, DamagedError
from spark_elastic.estimator.files import Files

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The format that this release writes. It reads this and all earlier formats.
FORMAT = 2
WEIGHTS, CODE = "weights.safetensors", "code.pkl"
# The key of our own facts in the metadata.
FACTS = "sparkElastic"
# The metadata of a saved estimator or model, or our facts in them, as read from JSON.
Metadata: TypeAlias = dict[str, Any]


class SavedObjects(TypedDict, total=False):
    """The content of ``code.pkl``: Params that JSON cannot represent, and the network of a model."""

    params: dict[str, object]
    model: torch.nn.Module | None


def versions() -> dict[str, Json]:
    """Return the versions that are relevant for loading the files."""
    return {"spark_elastic": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def take_files(path: str, facts: Metadata) -> Mapping[str, object]:
    """Remove format, versions and files from the facts, and return each file's length and checksum (none in the first format).

    Raises ``CheckpointError`` for a format of a later release.
    """
    version = facts.pop("format", 1)
    if version not in range(1, FORMAT + 1):
        raise CheckpointError(
            f"{shown(path)} has format {version}, and this release of spark_elastic reads formats 1 to {FORMAT}: a later release "
            "wrote it; load it with that one"
        )
    facts.pop("versions", None)
    files: Mapping[str, object] = facts.pop("files", {})
    return files


def write_objects(folder: str, objects: SavedObjects) -> dict[str, Json]:
    """Write weights and code into a local folder. Return each file's length and SHA-256."""
    tensors: dict[str, torch.Tensor] = {}
    code = io.BytesIO()
    pickler = Pickler(code, tensors, names_of_tensors(objects))
    pickler.dump(objects)
    if pickler.bare:
        shown = f"{', '.join(pickler.bare[:3])}{' …' * (len(pickler.bare) > 3)}"
        warnings.warn(
            f"of the parameters {shown} only the numbers are saved, not the hooks and attributes that code has given them: "
            "whoever loads them has to do that again",
            stacklevel=2,
        )
    files: dict[str, Iterable[Buffer]] = {WEIGHTS: file_pieces(tensors), CODE: [code.getvalue()]}
    written: dict[str, Json] = {}
    for name, pieces in files.items():
        digest = hashlib.sha256()
        with open(os.path.join(folder, name), "wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            written[name] = {"bytes": file.tell(), "sha256": digest.hexdigest()}
    return written


def load_objects(files: Files, path: str, written: Mapping[str, object]) -> SavedObjects:
    """Read weights and code from a folder, and run the code. Raises ``DamagedError`` unless the files are as written."""
    with tempfile.TemporaryDirectory(prefix="spark_elastic-") as folder:
        weights, pickled = (_fetch(files, f"{path}/{name}", folder, written.get(name)) for name in (WEIGHTS, CODE))
        try:
            tensors = load_file(weights)
        except ValueError as error:
            raise DamagedError(f"{shown(path)} is damaged: the header of {WEIGHTS}: {error}") from error
        with open(pickled, "rb") as file:
            try:
                objects: SavedObjects = Unpickler(file, tensors).load()
            except (AttributeError, ImportError):
                raise  # the files are intact, but the network's code cannot be imported here
            except Exception as error:
                raise DamagedError(f"{shown(path)} is damaged: {CODE}: {type(error).__name__}: {error}") from error
        return objects


def _fetch(files: Files, url: str, folder: str, entry: object) -> str:
    """Download a file. Raises ``DamagedError`` unless it is as written."""
    path, _, name = url.rpartition("/")
    local = os.path.join(folder, name)
    if not files.exists(url):
        raise DamagedError(f"{shown(path)} is damaged: {name} is missing")
    files.download(url, local)
    if entry is not None:
        digest = hashlib.sha256()
        with open(local, "rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
            found = {"bytes": file.tell(), "sha256": digest.hexdigest()}
        if found != entry:
            raise DamagedError(
                f"{shown(path)} is damaged: {found['bytes']:,} bytes of {name} are not those that were written"
            )
    return local


def names_of_tensors(objects: SavedObjects) -> dict[int, str]:
    """Return the names of a network's tensors by their ids; tied tensors have one name."""
    network = objects.get("model") or objects["params"].get("model")
    found: dict[int, str] = {}
    state = network.state_dict(keep_vars=True) if isinstance(network, torch.nn.Module) else {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            found.setdefault(id(tensor), name)
    return found


class Pickler(cloudpickle.Pickler):
    """Leaves tensors out of the pickle and puts them into ``tensors`` by name."""

    def __init__(self, file: BinaryIO, tensors: dict[str, torch.Tensor], names: dict[int, str]) -> None:
        super().__init__(file)
        self._tensors, self._names = tensors, names
        # The names of parameters whose hooks or attributes are left out.
        self.bare: list[str] = []
        self._seen: list[torch.Tensor] = []  # keeps tensors alive, so that their ids are not reused

    def persistent_id(self, value: object) -> tuple[str, bool, bool] | None:
        """Take a tensor out and return its name; None for everything else."""
        if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if value.layout != torch.strided or not value.is_leaf:
            return None
        self._seen.append(value)
        name = self._names.setdefault(id(value), f"tensor-{len(self._names)}")
        if name not in self._tensors:
            if isinstance(value, torch.nn.Parameter) and beside(value):
                self.bare.append(name)
            self._tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name, isinstance(value, torch.nn.Parameter), value.requires_grad


class Unpickler(_saved_names.Unpickler):
    """Puts the tensors back. Tied tensors are one object again."""

    def __init__(self, file: BinaryIO, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, key: tuple[str, bool, bool]) -> torch.Tensor:
        """Return the tensor of this name."""
        name, is_parameter, requires_grad = key
        if name not in self._made:
            tensor = self._tensors[name]
            self._made[name] = (
                torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
            )
        return self._made[name]
