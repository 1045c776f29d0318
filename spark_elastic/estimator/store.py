"""The place for data, checkpoints and logs of estimators: a folder that the driver, Spark and all workers can reach."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_elastic._saved_names import saved_as
from spark_elastic._text import shown, without_secrets
from spark_elastic.estimator.files import Files, as_mounted
from spark_elastic.estimator.sessions import is_local, open_files
from spark_elastic.launchers.session import parallelism

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

KINDS = ("data", "checkpoints", "logs")
_RUN_ID = re.compile(r"[\w.-]+", re.ASCII)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@saved_as("spark_elastic.estimator")
@dataclass(frozen=True)
class Store:
    """A folder, named by its URL. Create one with ``Store.create``; copies are equal and travel by pickle.

    ``url``, ``storage_options`` and ``keep`` are as in ``create``. A ``temporary`` store is that of a single fit.

    ::

        <url>/data/<identity>/<token>/_split=0/*.parquet    what fit(df) has written
        <url>/runs/<runId>/run.json, checkpoints/, logs/
    """

    url: str
    storage_options: Mapping[str, object] = field(default_factory=dict)
    keep: frozenset[str] = frozenset(KINDS)
    temporary: bool = False

    def __repr__(self) -> str:
        return f"Store(url={shown(self.url)!r}, keep={self.keep}, temporary={self.temporary})"

    @classmethod
    def create(
        cls,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, object] | None = None,
        keep: bool | str | Collection[str] = True,
    ) -> Store:
        """Describe a store, without opening or writing anything yet.

        url: a local path, or a URL that both Hadoop (in Spark) and pyarrow or fsspec (on the workers) can open: ``hdfs://``,
            ``s3://`` or ``s3a://`` (equivalent), ``abfss://``, ``gs://``, ``dbfs:/``, ``file://``.
        storage_options: options for fsspec on the workers; Spark takes its credentials from the Spark configuration.
        keep: what to keep after a successful fit: everything (True), nothing (False), or some of "data", "checkpoints", "logs".
        """
        listed: Any = keep if isinstance(keep, Collection) and not isinstance(keep, str) else [keep]
        kinds = KINDS if keep is True else () if keep is False else tuple(listed)
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"keep must be True, False or some of {', '.join(KINDS)}, not {kind!r}")
        return cls(full_url(url), dict(storage_options or {}), frozenset(kinds))

    # ------------------------------------------------------------------ places

    @property
    def data_url(self) -> str:
        """The folder of the data that ``fit`` has written."""
        return f"{self.url}/data"

    def run_url(self, run_id: str) -> str:
        """Return the folder of one run. Raises ValueError for an id that is not a plain file name."""
        if not _RUN_ID.fullmatch(run_id) or not run_id.strip("."):
            raise ValueError(f"runId must consist of letters, digits, '_', '-' and '.', not {run_id!r}")
        return f"{self.url}/runs/{run_id}"

    def checkpoint_url(self, run_id: str) -> str:
        """Return the folder of a run's checkpoints."""
        return f"{self.run_url(run_id)}/checkpoints"

    def log_url(self, run_id: str) -> str:
        """Return the folder of a run's logs."""
        return f"{self.run_url(run_id)}/logs"

    def spark_url(self, url: str | None = None) -> str:
        """Return a URL of this store for Spark: ``s3://`` becomes ``s3a://``, for which Hadoop has a driver."""
        text = url or self.url
        return "s3a" + text[2:] if text.startswith("s3:") else text

    def worker_url(self, url: str | None = None) -> str:
        """Return a URL of this store for pyarrow and fsspec: ``dbfs:/x`` is mounted as ``/dbfs/x``."""
        return as_mounted(url or self.url)

    # ------------------------------------------------------------------ use, on the driver with a SparkSession

    @property
    def files(self) -> Files:
        """The store's file system as Spark opens it, or with Spark Connect as this process opens it."""
        return open_files(self.spark_url(), self.storage_options)

    def runs(self) -> list[str]:
        """List the ids of the runs that are recorded in this store."""
        return self.files.names(self.spark_url(f"{self.url}/runs"))

    def delete(self, run_id: str) -> None:
        """Delete a run's record, checkpoints and logs, but not its data, which other runs may use.

        Raises KeyError if there is no such run.
        """
        files, url = self.files, self.spark_url(self.run_url(run_id))
        if not files.exists(url):
            raise KeyError(
                f"there is no run {run_id!r} in {shown(self.url)}; there are: {', '.join(self.runs()) or 'none'}"
            )
        files.delete(url)

    def delete_data(self) -> None:
        """Delete all data that fits have written here. No fit may be using them."""
        self.files.delete(self.spark_url(self.data_url))

    def check(self, session: SparkSession) -> None:
        """Raise ValueError unless the store is writable and executors see what this process writes.

        The second check runs a small Spark job, but only if the URL is ``file://`` and executors may be on other machines.
        """
        probe = f"{self.url}/.probe-{secrets.token_hex(8)}"
        try:
            self.files.write(self.spark_url(probe), b"")
        except OSError as error:
            raise ValueError(
                f"the store {shown(self.url)} cannot be written: {without_secrets(error, self.url)}"
            ) from error
        try:
            if self.url.startswith("file:") and not is_local(session):
                self._check_shared(session, probe.removeprefix("file://"))
        finally:
            self.files.delete(self.spark_url(probe))

    def _check_shared(self, session: SparkSession, path: str) -> None:
        def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import socket

            import pyarrow as pa

            for _ in batches:
                pass
            if not os.path.exists(path):
                yield pa.RecordBatch.from_pydict({"host": [socket.gethostname()]})

        tasks = 2 * parallelism(session)
        blind = sorted(
            {row.host for row in session.range(0, tasks, 1, tasks).mapInArrow(look, "host string").collect()}
        )
        if blind:
            raise ValueError(
                f"the store {shown(self.url)} is not shared: executors on {', '.join(blind)} do not see what is written "
                f"there from {socket.gethostname()}; use a path on a shared mount, or a URL of a distributed file system"
            )


Store.__init__.__doc__ = (
    "Keep the arguments as they are; nothing is opened or checked. ``Store.create`` completes and checks them."
)


def full_url(url: str | os.PathLike[str]) -> str:
    """Return a URL that means the same in every process: local paths become absolute, and each scheme gets one name."""
    text = os.fspath(url)
    if not text:
        raise ValueError("a URL must not be empty")
    if not _SCHEME.match(text):
        return f"file://{os.path.abspath(os.path.expanduser(text))}"
    scheme, _, rest = text.partition(":")
    scheme = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}.get(scheme.lower(), scheme.lower())
    if scheme == "file":
        return f"file://{os.path.abspath('/' + rest.lstrip('/'))}"
    return f"{scheme}:{rest}".rstrip("/")
