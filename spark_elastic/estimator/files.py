"""Accesses small files and folders below a URL from this process, through fsspec or pyarrow, as workers do."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Mapping
from typing import Protocol

from pyarrow.fs import FileInfo, FileType

from spark_elastic._text import shown
from spark_elastic.data.filesystem import forget_listings, list_below, locate

PIECE_BYTES = 4 * 2**20


class Files(Protocol):
    """Small files and folders below a URL. All methods take full URLs, and raise OSError."""

    def exists(self, url: str) -> bool:
        """Whether there is a file or folder at the URL."""

    def read(self, url: str) -> bytes:
        """Return the content of a file."""

    def write(self, url: str, data: bytes) -> None:
        """Write a small new file, completely or not at all."""

    def names(self, url: str) -> list[str]:
        """List the names in a folder; an empty list if there is no such folder."""

    def newest(self, url: str) -> float:
        """Return when a folder or a file in it was last modified, in seconds since 1970."""

    def delete(self, url: str) -> None:
        """Delete a file, or a folder with its content. A missing one is not an error."""

    def upload(self, local: str, url: str) -> None:
        """Copy a file of this machine, of any size."""

    def download(self, url: str, local: str) -> None:
        """Copy a file to this machine."""


class ArrowFiles:
    """Files below any URL that fsspec or pyarrow opens. Raises ``DataError``, saying what to install, if neither does."""

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        self._url = url
        self._location = locate(as_mounted(url), storage_options)
        self._files = self._location.filesystem

    def exists(self, url: str) -> bool:
        """Whether there is a file or folder at the URL."""
        return bool(self._info(url).type != FileType.NotFound)

    def read(self, url: str) -> bytes:
        """Return the content of a file."""
        with self._files.open_input_stream(self._path(url), compression=None) as stream:
            return bytes(stream.read())

    def write(self, url: str, data: bytes) -> None:
        """Write a small new file, completely or not at all."""
        partial = self._path(f"{url}.{secrets.token_hex(4)}.tmp")
        self._location.make_folder_of(partial)
        with self._files.open_output_stream(partial, compression=None) as stream:
            stream.write(data)
        self._files.move(partial, self._path(url))

    def names(self, url: str) -> list[str]:
        """List the names in a folder; an empty list if there is no such folder."""
        return sorted(entry.base_name for entry in self._below(url))

    def newest(self, url: str) -> float:
        """Return when a folder or a file in it was last modified, in seconds since 1970; now if the store does not know."""
        entries = [self._info(url), *self._below(url, recursive=True)]
        # Object stores have no folders, and so no times for them.
        times = [entry.mtime_ns for entry in entries if entry.type == FileType.File or entry.mtime_ns is not None]
        return max(times) / 1e9 if times and None not in times else time.time()

    def delete(self, url: str) -> None:
        """Delete a file, or a folder with its content. A missing one is not an error."""
        kind = self._info(url).type
        if kind == FileType.Directory:
            self._files.delete_dir(self._path(url))
        elif kind != FileType.NotFound:
            self._files.delete_file(self._path(url))

    def upload(self, local: str, url: str) -> None:
        """Copy a file of this machine, of any size."""
        path = self._path(url)
        self._location.make_folder_of(path)
        with open(local, "rb") as source, self._files.open_output_stream(path, compression=None) as target:
            shutil.copyfileobj(source, target, PIECE_BYTES)

    def download(self, url: str, local: str) -> None:
        """Copy a file to this machine."""
        with self._files.open_input_stream(self._path(url), compression=None) as source, open(local, "wb") as target:
            shutil.copyfileobj(source, target, PIECE_BYTES)

    def _below(self, url: str, recursive: bool = False) -> list[FileInfo]:
        return list_below(self._files, self._path(url), recursive=recursive)

    def _info(self, url: str) -> FileInfo:
        forget_listings(self._files)
        return self._files.get_file_info(self._path(url))

    def _path(self, url: str) -> str:
        assert url.startswith(self._url), f"{shown(url)} is not below {shown(self._url)}"
        return self._location.join(url.removeprefix(self._url).strip("/"))


def as_mounted(url: str) -> str:
    """Return a URL as Python's libraries open it: ``dbfs:/x`` is mounted as ``/dbfs/x``."""
    return "file:///dbfs/" + url.removeprefix("dbfs:").lstrip("/") if url.startswith("dbfs:") else url
