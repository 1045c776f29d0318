"""Opens the file system behind a dataset's URL: local paths directly, everything else through fsspec or pyarrow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs

from spark_elastic._text import shown, without_secrets
from spark_elastic._urls import without_file_scheme
from spark_elastic.errors import DataError

if TYPE_CHECKING:
    import fsspec

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]  # of one dataset

# File systems that pyarrow opens without fsspec: pyarrow's names for the scheme and for the class.
_S3, _GCS = ("s3", "S3FileSystem"), ("gs", "GcsFileSystem")
_NATIVE = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS}
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"}
_KINDS = {"file": pafs.FileType.File, "directory": pafs.FileType.Directory}
_HINTS = {
    **dict.fromkeys(("s3", "s3a"), "; pip install s3fs, or give storage_options that pyarrow.fs.S3FileSystem takes"),
    **dict.fromkeys(("gs", "gcs"), "; pip install gcsfs, or give storage_options that pyarrow.fs.GcsFileSystem takes"),
    "hdfs": "; it needs libhdfs of a Hadoop client: set JAVA_HOME, HADOOP_HOME (or ARROW_LIBHDFS_DIR) and CLASSPATH, on every "
    "executor",
}


@dataclass(frozen=True)
class Location:
    """A dataset's root in its file system. ``local`` files are read in small buffered pieces, remote ones in large pieces.

    url: the URL that led there, whose secrets errors of its driver may repeat; empty for local files.
    """

    filesystem: pafs.FileSystem
    root: str
    local: bool
    url: str = ""

    def name(self, relative: str = "") -> str:
        """Return the root, or a file of the dataset, for messages: some drivers keep the secrets of a URL in their paths."""
        return shown(self._with_scheme(self.join(relative))).removeprefix("://")

    def say(self, failure: Exception) -> str:
        """Return an error of the file system for messages, without secrets."""
        told = without_secrets(failure, self._with_scheme(self.root))
        return f"{type(failure).__name__}: {without_secrets(told, self.url)}"

    def _with_scheme(self, path: str) -> str:
        return path if self.local or "://" in path else f"://{path}"

    def join(self, relative: str) -> str:
        """Return the full path of a file of the dataset; an empty relative path is the root itself."""
        return f"{self.root.rstrip('/')}/{relative}" if relative else self.root

    def make_folder_of(self, path: str) -> None:
        """Make the folder of a file that is about to be written.

        Object stores have no folders, and their drivers would make a bucket of whatever name the URL has.
        """
        handler = getattr(self.filesystem, "handler", None)
        is_store = self.filesystem.type_name in _OBJECT_STORES if handler is None else _is_object_store(handler.fs)
        if not is_store:
            self.filesystem.create_dir(os.path.dirname(path), recursive=True)


def as_urls(url: Urls) -> tuple[str, ...]:
    """Return the URLs of a dataset, given as one URL, a list or a tuple. Raises ValueError for anything else."""
    # Rows come in the order of the URLs, and a set's order differs between processes.
    given: Sequence[Any] = url if isinstance(url, (list, tuple)) else [url]
    if not all(isinstance(each, (str, os.PathLike)) for each in given):
        raise ValueError(f"url must be a URL or path, or a list or tuple of these, not {shown(repr(url))}")
    if not given:
        raise ValueError("url must be a URL or a list of URLs, not an empty list")
    return tuple(os.fspath(each) for each in given)


def locate(url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None) -> Location:
    """Resolve a local path, ``file://``, or a URL that fsspec or pyarrow opens.

    fsspec comes first. pyarrow's own file systems are used if fsspec's driver for the URL is not installed, with
    ``storage_options`` as their arguments. They also open URLs with a query (``s3://…?endpoint_override=…``), which is their
    syntax. Raises DataError if no installed library can open the URL, saying what to install, and ValueError for wrong
    arguments.
    """
    text = os.fspath(url)
    if not text:
        raise ValueError("the URL of a dataset must not be empty")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ValueError(f"storage_options must be a dict of options, not {storage_options!r}")
    text = without_file_scheme(text)
    if "://" not in text and "::" not in text:
        return Location(pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(text)), True)
    options = dict(storage_options or {})
    scheme = text.split("://")[0]
    if scheme in _NATIVE and "?" in text:
        return _native(text, scheme, options)
    try:
        import fsspec
        import fsspec.implementations.local

        filesystem, root = fsspec.core.url_to_fs(text, **options)
    except ImportError as missing:
        if scheme in _NATIVE:
            return _native(text, scheme, options)
        raise DataError(f"{shown(text)} cannot be opened: {without_secrets(missing, text)}") from missing
    except Exception as failure:  # a chained URL is read to open it, by drivers with errors of their own
        raise DataError(f"{shown(text)} cannot be opened: {_reason(failure, text)}") from failure
    if type(filesystem) is fsspec.implementations.local.LocalFileSystem:  # local://
        return Location(pafs.LocalFileSystem(), root, True)
    # libhdfs reports every failure as a file that does not exist.
    if scheme == "hdfs" and not filesystem.exists("/"):
        raise DataError(f"{shown(text)} cannot be opened: no name node answers there")
    return Location(pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), root, False, text)


def _native(text: str, scheme: str, options: dict[str, object]) -> Location:
    """Open a URL with pyarrow's own file system. options: its arguments; if empty, they are in the URL's query."""
    name, kind = _NATIVE[scheme]
    rest = text.removeprefix(f"{scheme}://")
    if options and "?" in rest:
        raise ValueError(f"{shown(text)}: give a query or storage_options, not both")
    try:
        if options:
            return Location(getattr(pafs, kind)(**options), rest, False, text)
        filesystem, root = pafs.FileSystem.from_uri(f"{name}://{rest}")
        return Location(filesystem, root, False, text)
    except (pa.ArrowException, OSError, ValueError, TypeError, ImportError) as failure:
        raise DataError(f"{shown(text)} cannot be opened by pyarrow: {_reason(failure, text)}") from failure


def _reason(failure: Exception, url: str) -> str:
    """Return the first line of an error (libhdfs lists a hundred paths that it has searched), and what to do about it."""
    lines = str(failure).splitlines() or [type(failure).__name__]
    return without_secrets(lines[0], url) + _HINTS.get(url.split("://")[0], "")


def forget_listings(filesystem: pafs.FileSystem) -> None:
    """Drop the listings that fsspec has cached, because other processes may have written since."""
    handler = getattr(filesystem, "handler", None)
    if handler is not None:
        handler.fs.invalidate_cache()


def list_below(filesystem: pafs.FileSystem, folder: str, *, recursive: bool = False) -> list[pafs.FileInfo]:
    """List the content of a folder, which need not exist. Raises what the store raises, and ``NotADirectoryError`` for a file.

    pyarrow asks fsspec whether a folder exists, and fsspec says no whatever the error; then fsspec leaves out each folder within
    it that cannot be listed. So a store that refuses access, or does not answer, would look empty, or hold less than it does.
    The drivers of object stores list everything below a folder at once, and raise their errors.
    """
    forget_listings(filesystem)
    handler = getattr(filesystem, "handler", None)
    if handler is not None and not _is_object_store(handler.fs):
        return _walk(handler.fs, folder, recursive)
    selector = pafs.FileSelector(folder, allow_not_found=True, recursive=recursive)
    try:
        found: list[pafs.FileInfo] = filesystem.get_file_info(selector)
        if found or handler is None or not _is_listed(handler.fs, folder):
            return found
    except FileNotFoundError:
        pass  # another process created the folder between pyarrow's two looks
    found = filesystem.get_file_info(selector)
    return found


def _walk(filesystem: fsspec.AbstractFileSystem, folder: str, recursive: bool) -> list[pafs.FileInfo]:
    """List a folder of fsspec's, and those below it. One that does not exist, any more or at all, is empty."""
    found: list[pafs.FileInfo] = []
    folders = [folder]
    while folders:
        path = folders.pop()
        try:
            entries = filesystem.ls(path, detail=True)
        except FileNotFoundError:
            continue
        for entry in entries:
            kind = _KINDS.get(entry["type"], pafs.FileType.Unknown)
            is_folder = kind == pafs.FileType.Directory
            if entry["name"].strip("/") == path.strip("/"):
                # Some drivers list a file as its own content; others a folder, or the empty object that stands for one.
                if kind == pafs.FileType.File and len(entries) == 1 and not entry["name"].endswith("/"):
                    raise NotADirectoryError(f"{path} is a file")
                continue
            size = None if is_folder else entry["size"]
            found.append(pafs.FileInfo(entry["name"], kind, size=size, mtime=entry.get("mtime")))
            if is_folder and recursive:
                folders.append(entry["name"])
    return found


def _is_object_store(filesystem: fsspec.AbstractFileSystem) -> bool:
    """Whether this is a driver of an object store, or a cache in front of one."""
    names = filesystem.protocol
    inner = getattr(filesystem, "fs", None)
    is_one = bool(_OBJECT_STORES.intersection([names] if isinstance(names, str) else names))
    return is_one or (hasattr(inner, "protocol") and _is_object_store(inner))


def _is_listed(filesystem: fsspec.AbstractFileSystem, folder: str) -> bool:
    """Whether fsspec lists anything in a folder: some stores list files whose details they refuse to give."""
    try:
        return bool(filesystem.ls(folder, detail=False))
    except FileNotFoundError:
        return False


def list_files(location: Location) -> list[tuple[str, int | None]]:
    """List the dataset's data files, sorted by path: the path relative to the root, and when the file was written.

    The time is in nanoseconds since 1970, or None if the file system does not record it.

    Skips empty files, and paths with a component that starts with "_" or "." (but not Hive's "_" followed by "="). If the root
    is a file, it is the only one, with the relative path "".
    """
    try:
        info = location.filesystem.get_file_info(location.root)
        if info.type == pafs.FileType.NotFound:
            raise DataError(f"{location.name()} does not exist")
        if info.type == pafs.FileType.File:
            return [("", info.mtime_ns)]
        found = list_below(location.filesystem, location.root, recursive=True)
    except DataError:
        raise
    # Drivers of object stores raise their own errors for credentials, options and time-outs.
    except Exception as failure:
        raise DataError(f"{location.name()} cannot be listed: {location.say(failure)}") from failure
    prefix = location.root.rstrip("/") + "/"
    files = []
    for entry in found:
        relative = entry.path.removeprefix(prefix).lstrip("/")
        if entry.type == pafs.FileType.File and entry.size and not is_hidden(relative):
            files.append((relative, entry.mtime_ns))
    return sorted(files)


def is_hidden(relative: str) -> bool:
    """Whether a path below a dataset's folder is none of its data: it, or a folder that it is in, begins with "." or "_"."""
    return any(
        component.startswith(".") or (component.startswith("_") and "=" not in component)
        for component in relative.split("/")
    )
