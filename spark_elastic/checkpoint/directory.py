"""CheckpointDirectory: claims attempts; writes, reads and removes checkpoints in one directory of any file system.

The store has to guarantee two things, as local and network file systems, HDFS, S3, GCS and Azure do: a listing shows every file
whose writing has ended, and a written file stays until it is removed. Renames, exclusive creation and locks are not needed.
Local and network file systems also list files that are still being written, so there a manifest gets its name by a rename.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from spark_elastic._text import shown, without_secrets
from spark_elastic.checkpoint.best import Metric, Score, best_first
from spark_elastic.checkpoint.naming import (
    KEPT,
    MANIFEST,
    SCORE,
    CheckpointName,
    Claim,
    Listing,
    choose_removals,
    read_listing,
)
from spark_elastic.checkpoint.strict_json import load_json
from spark_elastic.errors import CheckpointError, DamagedError, DataError

if TYPE_CHECKING:
    import pyarrow
    from typing_extensions import Buffer

logger = logging.getLogger("spark_elastic")

# The formats that this release writes: for checkpoints written by rank 0 alone, and for those written by all ranks. Every
# format from the first to the last can be read.
VERSION = 2
VERSION_OF_PARTS = 3
# The largest size of a manifest, far more than any checkpoint needs.
MOST_MANIFEST_BYTES = 2**20
# The errors of opening a file that is missing, or that something else has replaced.
_NO_FILE = {errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.ENOTDIR}
# Files are read and written in pieces of this size; progress is reported after each.
PIECE_BYTES = 4 * 2**20
# Runs that claim an attempt at the same time yield to each other. If this many tries fail, the store's listings are wrong.
CLAIM_TRIES = 20

Progress = Callable[[], None]


def _no_progress() -> None:
    pass


class RemovedError(CheckpointError):
    """The directory is gone, with whatever this run has written there."""


class SupersededError(CheckpointError):
    """A later run has claimed the directory."""


class FileEntry(msgspec.Struct, frozen=True):
    """The length and checksum of a file, as recorded in the manifest."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True):
    """The file that completes a checkpoint: it is written after all others."""

    version: int
    files: dict[str, FileEntry]


class _AnyManifest(msgspec.Struct, frozen=True):
    """The part of a manifest that every format has."""

    version: int


class CheckpointDirectory:
    """The checkpoints of one job. Every method may block as long as the store does, and may raise the store library's errors.

    storage_options: options for the library that opens the URL. Raises ``CheckpointError`` if the URL cannot be opened.
    """

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        self.url = url
        self.name = shown(url)  # for messages
        try:
            from spark_elastic.data.filesystem import locate

            self._location = locate(url, storage_options)
        except ImportError as error:
            raise CheckpointError(f"checkpoints need pyarrow (pip install 'spark-elastic[data]'): {error}") from error
        except DataError as error:
            raise CheckpointError(f"checkpoint={self.name!r} cannot be opened: {error}") from error
        self._files = self._location.filesystem
        # Whether this object has seen the claim of its run there.
        self._has_shown_claim = False

    def list(self) -> Listing:
        """List the checkpoints and claims in the directory. A directory that does not exist counts as empty.

        Raises ``CheckpointError`` for a file.
        """
        from pyarrow.fs import FileType

        from spark_elastic.data.filesystem import list_below

        root = self._location.root.strip("/")
        try:
            entries = list_below(self._files, self._location.root, recursive=True)
        except NotADirectoryError as error:
            raise CheckpointError(f"{self.name} is a file, and checkpoints are in a folder") from error
        paths = ((_path_of(entry).strip("/").removeprefix(root).strip("/"), entry.type) for entry in entries)
        # A folder that a writer has made and left empty is a part of a checkpoint, too.
        return read_listing(path if kind == FileType.File else f"{path}/" for path, kind in paths)

    def try_to_write(self) -> None:
        """Write a file and remove it.

        Raises ``CheckpointError`` for the path of a file and for the folder of one checkpoint, else the error of the store.
        """
        self.list()
        self._refuse_one_checkpoint()
        trial = f"trial-{secrets.token_hex(8)}"
        try:
            self._write(trial, [b"trial\n"])
        finally:
            _try_to_remove(partial(self._delete, trial), trial)

    def _refuse_one_checkpoint(self) -> None:
        """Raise ``CheckpointError`` if the directory is a checkpoint itself: its job would remove what others write there."""
        try:
            with self._open(MANIFEST) as stream:
                msgspec.convert(load_json(stream.read(MOST_MANIFEST_BYTES)), CheckpointManifest)
        except (_NotAFile, msgspec.MsgspecError, ValueError, RecursionError):
            return
        raise CheckpointError(
            f"{self.name} is one checkpoint, and checkpoint= is the folder in which a job keeps its checkpoints: give the folder "
            "around it, and the job goes on from the newest one there. To begin from this one, give a new folder, and load it in "
            "your function by load_checkpoint or load_model"
        )

    # ------------------------------------------------------------------ attempts

    def claim(self) -> int:
        """Claim the next attempt, which no other run has or will get, and remove the claims of earlier attempts.

        Runs that claim at the same time all write first and list afterwards, so of two runs with the same number, at least one
        sees the other. A run that sees another claim as high as its own gives up its claim and tries a higher number.
        """
        self._refuse_one_checkpoint()
        token = secrets.token_hex(8)
        for tries in range(CLAIM_TRIES):
            mine = Claim(self.list().highest_attempt + 1 + secrets.randbelow(2**tries), token)
            with _undone(partial(self._delete, str(mine)), f"claim {mine}"):
                self._write(str(mine), [b"claimed\n"])
                claims = self.list().claims
            if [claim for claim in claims if claim.attempt >= mine.attempt] == [mine]:
                for claim in claims - {mine}:
                    self._delete(str(claim))
                return mine.attempt
            self._delete(str(mine))
        raise CheckpointError(
            f"{self.name} does not list files that were just written there; checkpoint= needs a store that does"
        )

    def check_claim(self, attempt: int) -> Listing:
        """Return the listing. Raises ``SupersededError`` if a later run has claimed the directory.

        Raises ``CheckpointError`` if the claim is not listed: on this machine, the URL names another place, or the directory is
        gone; ``RemovedError`` if this object has seen the claim there before, so that it is gone.
        """
        listing = self.list()
        newest = max((claim.attempt for claim in listing.claims), default=0)
        if newest > attempt:
            raise SupersededError(
                f"a later run (attempt {newest}) has claimed {self.name}; this one (attempt {attempt}) writes no more "
                "checkpoints there"
            )
        if newest < attempt and self._has_shown_claim:
            raise RemovedError(
                f"{self.name} has lost this run's claim: the directory was removed while the job ran, or something else took its "
                "place"
            )
        if newest < attempt:
            raise CheckpointError(
                f"on this machine {self.name} does not show the claim that the driver has written there: the directory was "
                "removed while the job ran, or checkpoint= names another place here, and has to name one that all machines share"
            )
        self._has_shown_claim = True
        return listing

    # ------------------------------------------------------------------ checkpoints

    def write(
        self, name: CheckpointName, files: Mapping[str, Iterable[Buffer]], progress: Progress = _no_progress
    ) -> int:
        """Write the pieces of each file, then the manifest that completes the checkpoint. Return the bytes written.

        After an error, written files are removed if the store allows it. Without a manifest they do not count anyway.
        """
        with self.removing(name):
            entries = {file: self.write_file(name, file, pieces, progress) for file, pieces in files.items()}
            return self.complete(name, entries, VERSION)

    def write_file(
        self, name: CheckpointName, file: str, pieces: Iterable[Buffer], progress: Progress = _no_progress
    ) -> FileEntry:
        """Write a file of a checkpoint, and return its entry for the manifest."""
        entry = self._write(f"{name}/{file}", pieces, progress)
        self._sync(f"{name}/{file}")
        return entry

    def complete(self, name: CheckpointName, entries: dict[str, FileEntry], version: int) -> int:
        """Write the manifest of a checkpoint whose files have been written. Return how many bytes these have."""
        self._write_whole(f"{name}/{MANIFEST}", msgspec.json.encode(CheckpointManifest(version, entries)))
        return sum(entry.bytes for entry in entries.values())

    def removing(self, name: CheckpointName) -> AbstractContextManager[None]:
        """Remove the written files of a checkpoint if an error is raised inside."""
        return _undone(partial(self.remove, name), f"checkpoint {name}")

    def prune(
        self,
        attempt: int,
        damaged: Collection[CheckpointName] = (),
        keep: int = KEPT,
        metric: Metric | None = None,
    ) -> None:
        """Remove the checkpoints that ``choose_removals`` chooses. Raises the same errors as ``check_claim``.

        metric: if given, the best ``keep`` undamaged checkpoints by this metric are kept, too.
        """
        listing = self.check_claim(attempt)
        scored = () if metric is None else best_first(self.scores(listing.scored - set(damaged)), metric)
        for name in choose_removals(listing, damaged, keep, scored[:keep]):
            self.remove(name)

    def write_score(self, name: CheckpointName, score: Score) -> None:
        """Write the score of a complete checkpoint."""
        self._write_whole(f"{name}/{SCORE}", msgspec.json.encode(score))

    def scores(self, names: Iterable[CheckpointName]) -> dict[CheckpointName, Score]:
        """Read the scores of these checkpoints. A damaged score counts as none, with a warning."""
        found = {}
        for name in names:
            try:
                self._check_file(name, SCORE)
                with self._open(f"{name}/{SCORE}") as stream:
                    found[name] = msgspec.convert(load_json(stream.read(MOST_MANIFEST_BYTES)), Score)
            except (_NotAFile, msgspec.MsgspecError, ValueError, RecursionError) as error:
                logger.warning(
                    "%s of checkpoint %s of %s is damaged and does not count: %s", SCORE, name, self.name, error
                )
        return found

    def remove(self, name: CheckpointName) -> None:
        """Remove a checkpoint, its manifest first, so that a partly removed checkpoint never counts as complete."""
        self._delete(f"{name}/{MANIFEST}")
        try:
            self._files.delete_dir(self._location.join(str(name)))
        except FileNotFoundError:
            pass

    def manifest(self, name: CheckpointName) -> CheckpointManifest:
        """Read a manifest. Raises ``DamagedError``, or ``CheckpointError`` if a later release has written it."""
        try:
            self._check_file(name, MANIFEST)
            with self._open(f"{name}/{MANIFEST}") as stream:
                text = stream.read(MOST_MANIFEST_BYTES)
            content = load_json(text)
            version = msgspec.convert(content, _AnyManifest).version
            if version > VERSION_OF_PARTS:
                raise CheckpointError(
                    f"checkpoint {name} of {self.name} has format {version}, and this release of spark_elastic reads formats 1 "
                    f"to {VERSION_OF_PARTS}: a later release wrote it. Use that release, or give another checkpoint= to start "
                    "over"
                )
            if version < 1:
                raise msgspec.ValidationError(f"there is no format {version}")
            return msgspec.convert(content, CheckpointManifest)
        except (_NotAFile, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._damaged(name, f"its manifest: {error}") from error

    def read(
        self,
        name: CheckpointName,
        file: str,
        entry: FileEntry | None,
        room: Iterable[memoryview],
        progress: Progress = _no_progress,
    ) -> None:
        """Fill the pieces of ``room`` with a file. Raises ``DamagedError`` unless the file agrees with its manifest entry.

        The first piece is requested once the file is known to have the right length, each further piece when the last is full.
        """
        if entry is None:
            raise self._damaged(name, f"its manifest does not list {file}")
        digest, length = hashlib.sha256(), 0
        try:
            self._check_file(name, file, entry.bytes)
            with self._open(f"{name}/{file}") as stream:
                for piece in _cut(room):
                    while len(piece) and (count := stream.readinto(piece)):
                        digest.update(piece[:count])
                        length += count
                        piece = piece[count:]
                    if len(piece):
                        break
                    progress()
        except _NotAFile as error:
            raise self._damaged(name, str(error)) from error
        if (length, digest.hexdigest()) != (entry.bytes, entry.sha256):
            raise self._damaged(name, f"{length:,} bytes of {file} are not the {entry.bytes:,} that were written")

    def read_bytes(self, name: CheckpointName, file: str, entry: FileEntry | None) -> bytes:
        """Read a whole file into memory. Raises the same errors as ``read``."""
        content = bytearray()

        def room() -> Iterator[memoryview]:
            content.extend(bytes(entry.bytes if entry is not None else 0))
            yield memoryview(content)

        self.read(name, file, entry, room())
        return bytes(content)

    def _damaged(self, name: CheckpointName, how: str) -> DamagedError:
        return DamagedError(f"checkpoint {name} of {self.name} is damaged: {without_secrets(how, self.url)}")

    def _check_file(self, name: CheckpointName, file: str, size: int | None = None) -> None:
        """Raise ``_NotAFile`` unless this is a regular file (a pipe would never end) of the length that was written."""
        from pyarrow.fs import FileType

        with _missing(file):
            info = self._files.get_file_info(self._location.join(f"{name}/{file}"))
        if info.type == FileType.NotFound:
            raise _NotAFile(f"{file} is missing")
        if info.type != FileType.File:
            raise _NotAFile(f"{file} is not a file")
        if size is not None and info.size is not None and info.size != size:
            raise _NotAFile(f"{file} has {info.size:,} bytes, and {size:,} were written")

    @contextmanager
    def _open(self, path: str) -> Iterator[pyarrow.NativeFile]:
        with (
            _missing(os.path.basename(path)),
            self._files.open_input_stream(self._location.join(path), compression=None) as stream,
        ):
            yield stream

    # ------------------------------------------------------------------ files

    def _write(self, path: str, pieces: Iterable[Buffer], progress: Progress = _no_progress) -> FileEntry:
        full = self._location.join(path)
        self._location.make_folder_of(full)
        digest, length = hashlib.sha256(), 0
        with self._files.open_output_stream(full, compression=None) as stream:
            for piece in _cut(pieces):
                digest.update(piece)
                stream.write(piece)
                length += len(piece)
                progress()
        return FileEntry(length, digest.hexdigest())

    def _write_whole(self, path: str, content: bytes) -> None:
        """Write a small file that appears only as a whole: a writer that is killed meanwhile leaves no file of this name."""
        if not self._location.local:
            self._write(path, [content])
            return
        part = f"{path}.part"
        self._write(part, [content])
        self._sync(part)
        os.replace(self._location.join(part), self._location.join(path))

    def _sync(self, path: str) -> None:
        """Flush a file to a local disk, so that no manifest survives a power cut in which the file is lost."""
        if self._location.local:
            with open(self._location.join(path), "rb") as written:
                os.fsync(written.fileno())

    def _delete(self, path: str) -> None:
        try:
            self._files.delete_file(self._location.join(path))
        except FileNotFoundError:
            pass


class _NotAFile(Exception):
    """A written file is missing, or something else has replaced it."""


@contextmanager
def _undone(undo: Callable[[], None], what: str) -> Iterator[None]:
    """Call ``undo`` if an error is raised inside."""
    try:
        yield
    except BaseException:
        _try_to_remove(undo, f"the rest of {what}")
        raise


def _try_to_remove(remove: Callable[[], None], what: str) -> None:
    try:
        remove()
    except Exception as error:
        logger.debug("%s could not be removed: %s", what, error)


@contextmanager
def _missing(file: str) -> Iterator[None]:
    """Distinguish a missing file, which is damage, from a failing store, which is tried again."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in _NO_FILE:
            raise _NotAFile(f"{file} is missing: {error}") from error
        raise


def _path_of(entry: pyarrow.fs.FileInfo) -> str:
    """Return the path of a listed entry; an empty string if it is not UTF-8, and so not ours."""
    try:
        return str(entry.path)
    except UnicodeDecodeError:
        return ""


def _cut(pieces: Iterable[Buffer]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]
