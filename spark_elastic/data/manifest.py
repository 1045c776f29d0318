"""The row groups of a Parquet dataset, read from its footers once and then shared as bytes.

Row order, tracking and repartition depend on the manifest alone. It has the size of each file and a hash of its footer, so that
a file that was replaced during training is detected when it is opened, whatever its modification time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import overload

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from spark_elastic._saved_names import saved_as
from spark_elastic._text import shown
from spark_elastic.data.filesystem import Location, Urls, as_urls, is_hidden, list_files, locate
from spark_elastic.errors import DataError

UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
_COMMON_METADATA = "_common_metadata"
_TAIL = 64 * 1024
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@saved_as("spark_elastic.data")
@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group of a file.

    ``path`` is relative to the URL that the file was found under. ``ordinal`` is the group's position in its file, ``rows`` its
    number of rows. ``compressed_bytes`` and ``uncompressed_bytes`` are its sizes in the file and after reading. ``partition``
    holds the (name, value) pairs of a Hive path, and ``root`` is the URL's index among the dataset's URLs, 0 if there is
    only one.
    """

    path: str
    ordinal: int
    rows: int
    compressed_bytes: int
    uncompressed_bytes: int
    partition: tuple[tuple[str, str | None], ...] = ()
    root: int = 0


RowGroup.__init__.__doc__ = "Keep the given facts; nothing is read or checked. ``read_manifest`` makes these objects."


@dataclass(frozen=True, slots=True)
class DataFile:
    """Identifies a file's content by its size in bytes and hashes, which are checked when it is opened.

    footer: the hash of the footer, which rows in another order may leave as it is. tail: that of the file's last 64 KiB; empty in
    manifests of earlier releases.
    """

    path: str
    size: int
    footer: bytes
    root: int = 0
    tail: bytes = b""


@saved_as("spark_elastic.data")
@dataclass(frozen=True)
class Manifest(Sequence[RowGroup]):
    """The row groups of a dataset, URL by URL and in path order, with everything needed to read them without listing again.

    ``list_lengths`` gives, for each list column, the one length that its values can have according to the footers, or None if
    lengths differ. ``schema`` holds the columns in files, without partition columns; ``schema_bytes`` is its serialized form, and
    ``unischema`` is Petastorm's pickle, if the dataset has one. ``urls`` are the dataset's roots, usually one; ``files``
    identifies the files, which must be unchanged when they are opened; and ``row_groups`` holds what ``manifest[i]`` returns.
    If they are a selection, ``dataset`` is the manifest of all row groups.
    """

    urls: tuple[str, ...]
    files: tuple[DataFile, ...]
    row_groups: tuple[RowGroup, ...]
    schema_bytes: bytes
    list_lengths: tuple[tuple[str, int | None], ...] = ()
    unischema: bytes = b""
    dataset: Manifest | None = None

    @overload
    def __getitem__(self, index: int) -> RowGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RowGroup]: ...
    def __getitem__(self, index: int | slice) -> RowGroup | Sequence[RowGroup]:
        return self.row_groups[index]

    def __len__(self) -> int:
        return len(self.row_groups)

    def __iter__(self) -> Iterator[RowGroup]:
        return iter(self.row_groups)

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the files."""
        return pa.ipc.read_schema(pa.py_buffer(self.schema_bytes))

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The number of rows of each row group, int64."""
        return np.fromiter((group.rows for group in self.row_groups), np.int64, len(self.row_groups))

    @functools.cached_property
    def file_of(self) -> dict[tuple[int, str], DataFile]:
        """The files, by their URL's index and their relative path."""
        return {(file.root, file.path): file for file in self.files}

    @property
    def name(self) -> str:
        """The dataset's URL for messages, or the first of several and the number of others."""
        others = len(self.urls) - 1
        return shown(self.urls[0]) + (f" and {others} more" if others else "")

    @functools.cached_property
    def partition_types(self) -> dict[str, pa.DataType]:
        """The types of Hive partition columns: int64 if all values are whole numbers, else float64 if possible, else string.

        Numbers are those in decimal digits: 0x10 is a string. A float64 must not change a whole number, nor make two different
        numbers one, because ids of two partitions could become one. Columns that are also in the files are read from there. A
        selection has the columns of the whole dataset. Texts and numbers of Petastorm's schema have the types that it gives;
        DataError is raised for values that do not fit.
        """
        if self.dataset is not None:
            return self.dataset.partition_types
        values: dict[str, set[str]] = {}
        for name, value in {pair for group in self.row_groups for pair in group.partition}:
            if name not in self.schema.names:
                values.setdefault(name, set()).update(() if value is None else (value,))
        types = {name: _narrowest(found) for name, found in values.items()}
        if types and self.unischema:
            from spark_elastic.data.unischema import scalar_types

            types |= {name: kind for name, kind in scalar_types(self.unischema).items() if name in types}
        for name, kind in types.items():
            try:
                pa.array(sorted(values[name]), pa.string()).cast(kind)
            except pa.ArrowInvalid as failure:
                raise DataError(
                    f"{self.name}: the Hive partition {name!r} is {kind} in Petastorm's schema: {failure}"
                ) from failure
        return types

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of every file's path, size and footer, the order of the URLs, and the selection of row groups, if any.

        It does not depend on the dataset's location.
        """
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            place = f"{file.root}\0" if file.root else ""
            digest.update(f"{place}{file.path}\0{file.size}\0".encode() + file.footer)
        if self.dataset is not None:
            digest.update(repr([(group.root, group.path, group.ordinal) for group in self.row_groups]).encode())
        return digest.hexdigest()

    @functools.cached_property
    def content(self) -> str:
        """A hash of the last bytes of every file; empty if they are not known."""
        tails = [file.tail for file in self.files]
        return hashlib.blake2b(b"".join(tails), digest_size=16).hexdigest() if all(tails) else ""

    def where(self, index: int) -> str:
        """Return a row group's name for messages: its file and its position there."""
        group = self.row_groups[index]
        url = shown(self.urls[group.root])
        file = group.path or url if len(self.urls) == 1 else "/".join(filter(None, (url.rstrip("/"), group.path)))
        return f"{file}, row group {group.ordinal}"

    def encode(self) -> bytes:
        """Return the manifest as MessagePack, about 20 bytes per row group. Raises ValueError for a selection."""
        if self.dataset is not None:
            raise ValueError("encode the manifest of the whole dataset; a selection is made of that")
        place = {(file.root, file.path): number for number, file in enumerate(self.files)}
        partitions = {(group.root, group.path): group.partition for group in self.row_groups if group.partition}
        return msgspec.msgpack.encode(
            {
                "urls": self.urls,
                "files": [
                    (f.path, f.size, f.footer, f.root, partitions.get((f.root, f.path), ()), f.tail) for f in self.files
                ],
                "groups": [
                    (place[g.root, g.path], g.ordinal, g.rows, g.compressed_bytes, g.uncompressed_bytes)
                    for g in self.row_groups
                ],
                "schema": self.schema_bytes,
                "lists": self.list_lengths,
                "unischema": self.unischema,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Rebuild a manifest from ``encode``'s bytes."""
        raw = msgspec.msgpack.decode(data)
        files = tuple(DataFile(path, size, footer, root, *tail) for path, size, footer, root, _, *tail in raw["files"])
        partitions = [tuple((name, value) for name, value in entry[4]) for entry in raw["files"]]
        groups = tuple(
            RowGroup(files[file].path, ordinal, rows, packed, plain, partitions[file], files[file].root)
            for file, ordinal, rows, packed, plain in raw["groups"]
        )
        lists = tuple((name, length) for name, length in raw["lists"])
        return cls(tuple(raw["urls"]), files, groups, raw["schema"], lists, raw["unischema"])


Manifest.__init__.__doc__ = (
    "Keep the given parts; nothing is read or checked. ``read_manifest`` makes a manifest of the footers of a dataset."
)


@dataclass(frozen=True)
class Footer:
    """A file's parsed footer, its hash, the file's size in bytes, and the hash of the file's last bytes."""

    metadata: pq.FileMetaData
    digest: bytes
    size: int
    tail: bytes


def read_manifest(url: Urls, *, storage_options: Mapping[str, object] | None = None, threads: int = 16) -> Manifest:
    """Read all footers of a Parquet dataset in parallel and return its manifest.

    Args:
        url: a directory or one file, as a local path, ``file://``, or any URL that fsspec or pyarrow opens; or a list of these,
            which together form one dataset.
        storage_options: options for fsspec.
        threads: how many footers are read concurrently.

    Raises DataError if nothing is found, or if a file, which the error names, is not Parquet, is found under two of the URLs,
    or has other columns than the first file.
    """
    urls = as_urls(url)
    locations = [locate(each, storage_options) for each in urls]
    listed = [(root, path) for root, location in enumerate(locations) for path, _ in _listed(urls[root], location)]
    names = [locations[root].name(path) for root, path in listed]
    _no_file_twice([(locations[root], path) for root, path in listed])
    with ThreadPoolExecutor(min(threads, len(listed)), "spark-elastic-footers") as pool:
        footers = list(pool.map(lambda entry: _footer_at(locations[entry[0]], entry[1]), listed))
    schema = footers[0].metadata.schema.to_arrow_schema().remove_metadata()
    lengths = _ListLengths()
    files, groups = [], []
    for (root, path), name, footer in zip(listed, names, footers, strict=True):
        own_schema = footer.metadata.schema.to_arrow_schema()
        _same_columns(schema, own_schema, names[0], name)
        lengths.enter(footer.metadata, own_schema)
        files.append(DataFile(path, footer.size, footer.digest, root, footer.tail))
        partition = _partition(path)
        if path != listed[0][1]:
            _same_partitions(schema, _partition(listed[0][1]), partition, names[0], name)
        for ordinal in range(footer.metadata.num_row_groups):
            group = footer.metadata.row_group(ordinal)
            chunks = [group.column(column) for column in range(group.num_columns)]
            packed = sum(chunk.total_compressed_size for chunk in chunks)
            groups.append(RowGroup(path, ordinal, group.num_rows, packed, group.total_byte_size, partition, root))
            lengths.add(group)
    return Manifest(
        urls,
        tuple(files),
        tuple(groups),
        schema.serialize().to_pybytes(),
        lengths.found(),
        _common_unischema(urls, locations),
    )


def read_footer(handle: pa.NativeFile) -> Footer:
    """Read and hash the footer and the last 64 KiB of an open Parquet file, with a single read if the footer is no longer.

    Raises pyarrow.ArrowInvalid if there is no footer, or it is cut off.
    """
    size = handle.size()
    tail = _read_tail(handle, size, min(size, _TAIL))
    if len(tail) < 12 or tail[-4:] != b"PAR1":
        raise pa.ArrowInvalid("not a Parquet file, or cut off: its last bytes are not PAR1")
    length = struct.unpack("<I", tail[-8:-4])[0] + 8
    if length > size:
        raise pa.ArrowInvalid(f"its footer says {length} bytes, the file has {size}")
    if length > len(tail):
        tail = _read_tail(handle, size, length)
    footer = tail[-length:]
    metadata = pq.read_metadata(pa.BufferReader(footer))
    return Footer(metadata, _hash(footer), size, _hash(tail[-_TAIL:]))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=12).digest()


def _read_tail(handle: pa.NativeFile, size: int, length: int) -> bytes:
    handle.seek(size - length)
    return bytes(handle.read(length))


def _footer_at(location: Location, path: str) -> Footer:
    try:
        with location.filesystem.open_input_file(location.join(path)) as handle:
            return read_footer(handle)
    except Exception as failure:  # drivers of object stores and web servers raise their own errors
        raise DataError(f"{location.name(path)} cannot be read as Parquet: {location.say(failure)}") from failure


def _same_columns(schema: pa.Schema, other: pa.Schema, first: str, path: str) -> None:
    if schema.equals(other):
        return
    ours = {field.name: field.type for field in schema}
    theirs = {field.name: field.type for field in other}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise DataError(
                f"{path} has another schema than {first}: column {name!r} is {theirs.get(name, 'missing')}, "
                f"not {ours.get(name, 'missing')}"
            )


def _listed(url: str, location: Location) -> list[tuple[str, int | None]]:
    if location.local:
        _check_links(location.root)
    listed = list_files(location)
    if not listed:
        raise DataError(f"{shown(url)}: no Parquet files (hidden and empty ones are skipped)")
    return listed


def _no_file_twice(listed: list[tuple[Location, str]]) -> None:
    seen: dict[tuple[bool, str], Location] = {}
    for location, path in listed:
        full = location.join(path)
        file = location.local, os.path.realpath(full) if location.local else full
        # Links within one folder are its owner's choice.
        known = seen.get(file, location)
        if known is not location and known.filesystem == location.filesystem:
            raise DataError(f"{location.name(path)} is found under two of the URLs: its rows would count twice")
        seen[file] = location


def _check_links(root: str) -> None:
    """Raise DataError if a link below a folder of this machine leads to nothing, or to a folder that it is in.

    A listing would leave the one out, and not end because of the other.
    """
    waiting = [(root, real := os.path.realpath(root), frozenset({real}))]
    while waiting:
        folder, place, above = waiting.pop()
        with suppress(OSError), os.scandir(folder) as entries:  # whoever lists the files says what cannot be read
            for entry in entries:
                is_lost = entry.is_symlink() and not os.path.exists(entry.path)
                if is_lost and not is_hidden(os.path.relpath(entry.path, root)):
                    raise DataError(
                        f"{entry.path} is a link to {os.readlink(entry.path)}, which does not exist: remove it"
                    )
                if not entry.is_dir():
                    continue
                real = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(place, entry.name)
                if real in above:
                    raise DataError(f"{entry.path} is a link that leads to a folder that it is in: remove it")
                waiting.append((entry.path, real, above | {real}))


def _same_partitions(
    schema: pa.Schema,
    expected: tuple[tuple[str, str | None], ...],
    found: tuple[tuple[str, str | None], ...],
    first: str,
    path: str,
) -> None:
    ours, theirs = ({name for name, _ in pairs} - set(schema.names) for pairs in (expected, found))
    if ours != theirs:
        raise DataError(f"{path} has the Hive partitions {sorted(theirs)}, {first} has {sorted(ours)}")


def _partition(path: str) -> tuple[tuple[str, str | None], ...]:
    pairs = []
    for component in path.split("/")[:-1]:
        name, equals, value = component.partition("=")
        if equals and name:
            value = urllib.parse.unquote(value)
            pairs.append((urllib.parse.unquote(name), None if value == _NULL_PARTITION else value))
    return tuple(pairs)


def _narrowest(values: set[str]) -> pa.DataType:
    texts = sorted(values)
    for kind in (pa.int64(), pa.float64()):
        with suppress(pa.ArrowInvalid):
            if _are_kept(texts, pa.array(texts, pa.string()).cast(kind).to_pylist()):
                return kind
    return pa.string()


def _are_kept(texts: list[str], numbers: list[float]) -> bool:
    """Whether texts state these numbers in decimal, no whole one was changed, and different ones are still different."""
    try:
        stated = [Decimal(text) for text in texts]
    except InvalidOperation:  # such as 0x10, of which Arrow makes 16
        return False
    whole = [text.removeprefix("-").isdecimal() for text in texts]
    return len(set(stated)) == len(set(numbers)) and all(
        number == value for number, value, is_whole in zip(numbers, stated, whole, strict=True) if is_whole
    )


def _common_unischema(urls: Sequence[str], locations: Sequence[Location]) -> bytes:
    """Return the pickled Unischema of all URLs, or nothing. Raises DataError if they do not have the same fields."""
    found = [read_common_metadata(location).get(UNISCHEMA_KEY, b"") for location in locations]
    for url, other in zip(urls, found, strict=True):
        if other == found[0]:
            continue
        from spark_elastic.data.unischema import read_fields

        if not (other and found[0]) or read_fields(other) != read_fields(found[0]):
            raise DataError(
                f"{shown(url)} has another Petastorm schema than {shown(urls[0])}, or only one of them has one"
            )
    return found[0]


def read_common_metadata(location: Location) -> dict[bytes, bytes]:
    """Return the key-value pairs in ``_common_metadata``, where Petastorm stores its pickles. Unpickles nothing."""
    path = location.join(_COMMON_METADATA)
    try:
        if location.filesystem.get_file_info(path).type != pafs.FileType.File:
            return {}
        with location.filesystem.open_input_file(path) as handle:
            metadata = read_footer(handle).metadata.metadata
    except NotADirectoryError:  # the URL is that of a file
        return {}
    except Exception as failure:  # as in _footer_at
        raise DataError(
            f"{location.name(_COMMON_METADATA)} cannot be read as Parquet: {location.say(failure)}"
        ) from failure
    return dict(metadata or {})


class _ListLengths:
    """Finds the list columns that can have one common length n: every row group has n values per row."""

    def __init__(self) -> None:
        # The places of these columns in the row groups of the present file, whose schema this is.
        self._leaf: dict[str, int] = {}
        self._schema: pa.Schema | None = None
        self._length: dict[str, int | None] = {}

    def enter(self, metadata: pq.FileMetaData, schema: pa.Schema) -> None:
        """Turn to another file, whose columns may come in another order."""
        if self._schema is not None and schema.equals(self._schema):
            return
        self._schema, self._leaf = schema, {}
        index = 0
        for field in schema:
            leaves = _leaves(field.type)
            is_list = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
            if is_list and leaves == 1 and metadata.schema.column(index).max_repetition_level == 1:
                self._leaf[field.name] = index
            index += leaves

    def add(self, group: pq.RowGroupMetaData) -> None:
        """Take the counts of one of the file's row groups into account."""
        if not group.num_rows:
            return
        for name, index in self._leaf.items():
            length, rest = divmod(group.column(index).num_values, group.num_rows)
            seen = self._length.setdefault(name, length)
            if rest or seen != length:
                self._length[name] = None

    def found(self) -> tuple[tuple[str, int | None], ...]:
        return tuple(sorted(self._length.items()))


def _leaves(kind: pa.DataType) -> int:
    """Count the Parquet columns that hold a column of this type. Paths do not reveal this, because names may have dots."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    return sum(_leaves(kind.field(place).type) for place in range(kind.num_fields)) if kind.num_fields else 1
