"""Opens the file system behind a dataset's URL: local paths directly, everything else through fsspec or pyarrow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from spark_elastic.errors import DataError


@dataclass(frozen=True)
class Location:
    """A dataset's root in its file system. `local` files are read in small buffered pieces, remote ones in large."""

    filesystem: pafs.FileSystem
    root: str
    local: bool

    def join(self, relative: str) -> str:
        """Return the full path of a file of the dataset; an empty relative path is the root itself."""
        return f"{self.root.rstrip('/')}/{relative}" if relative else self.root


def locate(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Location:
    """Resolve a local path, `file://` or any fsspec URL.

    Raises DataError where no installed library can open the URL.
    """
    text = os.fspath(url)
    if not text:
        raise ValueError("the URL of a dataset must not be empty")
    if "://" not in text and "::" not in text:
        return Location(pafs.LocalFileSystem(), os.path.abspath(text), True)
    if text.startswith("file://") and "::" not in text:
        return Location(pafs.LocalFileSystem(), os.path.abspath(text.removeprefix("file://")), True)
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(text, **dict(storage_options or {}))
        return Location(pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), root, False)
    except (ImportError, ValueError, OSError) as failure:
        try:
            native, root = pafs.FileSystem.from_uri(text)
            if storage_options:
                raise DataError(f"{text}: storage_options need the fsspec driver of this URL: {failure}") from failure
            return Location(native, root, False)
        except (pa.ArrowException, OSError, ValueError):
            raise DataError(f"{text} cannot be opened: {failure}") from failure


def list_files(location: Location) -> list[tuple[str, int]]:
    """List (path relative to the root, bytes) of the dataset's data files, sorted by path.

    Empty files and those with a component that starts with "_" or "." are skipped (Hive's "_" followed by "=" is not).
    A root that is a file is the only one, its relative path is "".
    """
    try:
        info = location.filesystem.get_file_info(location.root)
        if info.type == pafs.FileType.NotFound:
            raise DataError(f"{location.root} does not exist")
        if info.type == pafs.FileType.File:
            return [("", info.size)]
        found = location.filesystem.get_file_info(pafs.FileSelector(location.root, recursive=True))
    except (pa.ArrowException, OSError) as failure:
        raise DataError(f"{location.root} cannot be listed: {failure}") from failure
    prefix = location.root.rstrip("/") + "/"
    files = []
    for entry in found:
        relative = entry.path.removeprefix(prefix).lstrip("/")
        if entry.type == pafs.FileType.File and entry.size and not any(map(_hidden, relative.split("/"))):
            files.append((relative, entry.size))
    return sorted(files)


def _hidden(component: str) -> bool:
    return component.startswith(".") or (component.startswith("_") and "=" not in component)
