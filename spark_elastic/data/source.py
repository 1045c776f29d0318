"""Opens a manifest's files, verifies that they are unchanged, and reads Arrow batches from them."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from spark_elastic.data.filesystem import Location
from spark_elastic.data.manifest import Manifest, read_footer
from spark_elastic.errors import DataError

_OPEN_FILES = 32
_BUFFER = 64 * 1024

# Which file is at a path, and what changes when it is written to.
_Stamp = tuple[object, ...]


@dataclass(slots=True)
class _OpenFile:
    """A file, the handle through which it is read, and the stamp of its path when it was opened."""

    file: pq.ParquetFile
    handle: pa.NativeFile
    stamp: _Stamp | None


def _stamp(location: Location, path: str) -> _Stamp | None:
    """Return the stamp of a path; None if it is not known, as in stores that do not tell with one request."""
    try:
        if not location.local:
            return _stamp_of_object(location.filesystem, path)
        status = os.stat(path)
    except Exception:  # a store that does not answer now may still be read
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _stamp_of_object(filesystem: pafs.FileSystem, path: str) -> _Stamp | None:
    """Ask pyarrow's driver or a web server. s3fs refuses by itself to read a changed object; others tell what they listed."""
    handler = getattr(filesystem, "handler", None)
    if handler is None:
        with filesystem.open_input_file(path) as handle:
            facts = handle.metadata()
    elif "http" in handler.fs.protocol:
        facts = handler.fs.info(path)
    else:
        return None
    version = facts.get("ETag") or facts.get("Last-Modified")
    return (version,) if version else None


class Source:
    """The files of a manifest, the last few kept open. For one thread at a time; a context manager."""

    def __init__(self, manifest: Manifest, locations: Sequence[Location]) -> None:
        self.manifest = manifest
        self.locations = locations
        self._open: OrderedDict[tuple[int, str], _OpenFile] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_open": OrderedDict()}

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. Open iterators must not be used any more."""
        while self._open:
            _, opened = self._open.popitem()
            with contextlib.suppress(pa.ArrowException, OSError):
                opened.file.close()
                opened.handle.close()

    @contextlib.contextmanager
    def naming(self, group: int) -> Iterator[None]:
        """Turn read failures into a DataError that names the file and row group."""
        try:
            yield
        except FileNotFoundError as failure:
            raise DataError(f"{self._where(group)}: the file is gone since the dataset was listed") from failure
        except DataError:
            raise
        except Exception as failure:  # drivers of object stores raise their own errors
            raise DataError(f"{self._where(group)} cannot be read: {self._location(group).say(failure)}") from failure

    def batches(self, group: int, columns: list[str], chunk: int) -> Iterator[pa.RecordBatch]:
        """Yield a row group's batches of ``chunk`` rows, partition columns included, decoded page by page.

        columns: names among the files' and the partitions' columns. Raises DataError if the file is gone, changed or broken.
        """
        entry = self.manifest.row_groups[group]
        types = self.manifest.partition_types
        partition = {name: value for name, value in entry.partition if name in columns and name in types}
        stored = [name for name in columns if name not in partition]
        location, read = self._location(group), 0
        with self.naming(group):
            opened = self._opened(group)
            for batch in opened.file.iter_batches(chunk, row_groups=[entry.ordinal], columns=stored, use_threads=False):
                # Before each batch, as the end is often not waited for. pre_buffer reads a remote row group whole.
                if location.local or not read:
                    self._check_unchanged(group, opened)
                read += batch.num_rows
                yield self._with_partition(batch, partition) if partition else batch
        if read != entry.rows:
            raise DataError(f"{self._where(group)} has {read} rows, {entry.rows} were listed")

    def check(self, group: int) -> None:
        """Verify that a row group's path leads to the listed file, for readers that open it by themselves. Raises DataError."""
        with self.naming(group):
            opened = self._opened(group)
            now = self._check_unchanged(group, opened)
            if now is not None and now != opened.stamp:  # another file has taken its place
                self._open_anew(group)

    def _with_partition(self, batch: pa.RecordBatch, partition: dict[str, str | None]) -> pa.RecordBatch:
        names, arrays = list(batch.schema.names), list(batch.columns)
        for name, value in partition.items():
            scalar = pa.scalar(value, pa.string()).cast(self.manifest.partition_types[name])
            names.append(name)
            arrays.append(pa.repeat(scalar, batch.num_rows))
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def _opened(self, group: int) -> _OpenFile:
        entry = self.manifest.row_groups[group]
        key = (entry.root, entry.path)
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        listed = self.manifest.file_of[key]
        location = self.locations[entry.root]
        full = location.join(entry.path)
        stamp = _stamp(location, full)
        # Never memory-mapped: a file that is truncated while it is read must raise, not kill the process (SIGBUS).
        handle = location.filesystem.open_input_file(full)
        footer = read_footer(handle)
        if (footer.size, footer.digest) != (listed.size, listed.footer) or listed.tail not in (b"", footer.tail):
            raise DataError(
                f"{location.name(entry.path)} has changed since the dataset was listed "
                f"({footer.size} bytes, then {listed.size}); datasets must not change while they are read"
            )
        local = location.local
        file = pq.ParquetFile(
            handle, metadata=footer.metadata, buffer_size=_BUFFER if local else 0, pre_buffer=not local
        )
        opened = self._open[key] = _OpenFile(file, handle, stamp)
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return opened

    def _open_anew(self, group: int) -> None:
        """Open a row group's file again, which compares it with the listed one."""
        entry = self.manifest.row_groups[group]
        self._open.pop((entry.root, entry.path), None)
        self._opened(group)

    def _check_unchanged(self, group: int, opened: _OpenFile) -> _Stamp | None:
        """Raise DataError if the opened file has been written to since it was opened: what was read may be of both.

        Return the stamp of its path, if it is known.
        """
        location, path = self._location(group), self.manifest.row_groups[group].path
        now = None if opened.stamp is None else _stamp(location, location.join(path))
        if now is None or now == opened.stamp:
            return now
        if not location.local:  # several servers may have stamps of their own for one content
            self._open_anew(group)
        elif opened.stamp is not None and now[0] == opened.stamp[0]:  # else what is open is still the listed file
            raise DataError(
                f"{location.name(path)} has been written to since it was opened; datasets must not change while they are read"
            )
        return now

    def _where(self, group: int) -> str:
        entry = self.manifest.row_groups[group]
        return f"{self._location(group).name(entry.path)}, row group {entry.ordinal}"

    def _location(self, group: int) -> Location:
        return self.locations[self.manifest.row_groups[group].root]


def each_file(
    manifest: Manifest, locations: Sequence[Location], visit: Callable[[Source, list[int]], None], threads: int = 4
) -> None:
    """Call ``visit(source, row groups)`` once for each file, on several threads, with its row groups that have rows."""
    by_file: dict[tuple[int, str], list[int]] = {}
    for index, group in enumerate(manifest.row_groups):
        if group.rows:
            by_file.setdefault((group.root, group.path), []).append(index)

    def visit_file(groups: list[int]) -> None:
        with Source(manifest, locations) as source:
            visit(source, groups)

    with ThreadPoolExecutor(threads, "spark-elastic-counter") as pool:
        for _ in pool.map(visit_file, by_file.values()):
            pass
