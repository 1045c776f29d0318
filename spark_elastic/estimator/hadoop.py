"""Accesses files as Spark does, through Hadoop's file systems in the driver's JVM, so that every Spark URL works."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from spark_elastic._text import shown, without_secrets
from spark_elastic.errors import SparkElasticError

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject


class HadoopFiles:
    """Small files and folders below any URL. Its methods raise OSError; without a SparkContext, it raises SparkElasticError."""

    def __init__(self, url: str) -> None:
        from pyspark import SparkContext

        context = SparkContext._active_spark_context
        if context is None or context._jvm is None or context._jsc is None:
            raise SparkElasticError(f"{shown(url)}: there is no SparkSession, or it was stopped; create one first")
        self._jvm = context._jvm
        with _as_os_errors(url):
            self._fs = self._path(url).getFileSystem(context._jsc.hadoopConfiguration())

    def exists(self, url: str) -> bool:
        """Whether there is a file or folder at the URL."""
        with _as_os_errors(url):
            return bool(self._fs.exists(self._path(url)))

    def read(self, url: str) -> bytes:
        """Return the content of a file."""
        with _as_os_errors(url):
            stream = self._fs.open(self._path(url))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def write(self, url: str, data: bytes) -> None:
        """Write a small new file, completely or not at all."""
        partial = f"{url}.{secrets.token_hex(4)}.tmp"
        with _as_os_errors(url):
            stream = self._fs.create(self._path(partial), True)
            try:
                stream.write(bytearray(data))
            finally:
                stream.close()
            if not self._fs.rename(self._path(partial), self._path(url)):
                raise OSError(f"{shown(partial)} could not be renamed to {shown(url)}")

    def names(self, url: str) -> list[str]:
        """List the names in a folder; an empty list if there is no such folder."""
        if not self.exists(url):
            return []
        with _as_os_errors(url):
            return sorted(status.getPath().getName() for status in self._fs.listStatus(self._path(url)))

    def newest(self, url: str) -> float:
        """Return when a folder or a file in it was last modified, in seconds since 1970."""
        with _as_os_errors(url):
            newest = self._fs.getFileStatus(self._path(url)).getModificationTime()
            files = self._fs.listFiles(self._path(url), True)
            while files.hasNext():
                newest = max(newest, files.next().getModificationTime())
            return float(newest) / 1000

    def delete(self, url: str) -> None:
        """Delete a file, or a folder with its content. A missing one is not an error."""
        with _as_os_errors(url):
            self._fs.delete(self._path(url), True)

    def upload(self, local: str, url: str) -> None:
        """Copy a file of this machine, of any size."""
        with _as_os_errors(url):
            self._fs.copyFromLocalFile(False, True, self._path(f"file://{local}"), self._path(url))

    def download(self, url: str, local: str) -> None:
        """Copy a file to this machine."""
        with _as_os_errors(url):
            self._fs.copyToLocalFile(False, self._path(url), self._path(f"file://{local}"), True)

    def _path(self, url: str) -> JavaObject:
        return self._jvm.org.apache.hadoop.fs.Path(url)


class _as_os_errors:
    """Turns the JVM's exceptions into OSErrors that name the URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        from py4j.protocol import Py4JJavaError

        if isinstance(error, Py4JJavaError):
            raise OSError(
                f"{shown(self._url)}: {without_secrets(error.java_exception.toString(), self._url)}"
            ) from error
