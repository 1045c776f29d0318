"""What a Spark session offers to estimators. All differences between the two kinds of sessions are in this module.

A classic session has Spark's JVM beside this process, with its file systems, their credentials, and the plans of DataFrames. A
Spark Connect session has a server, which may be anywhere: this process opens files itself, and sees only the rows of
DataFrames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.utils import is_remote

from spark_elastic.errors import SparkElasticError
from spark_elastic.estimator.files import ArrowFiles, Files
from spark_elastic.estimator.hadoop import HadoopFiles
from spark_elastic.launchers.session import is_connect, use_own_python
from spark_elastic.launchers.spark import is_gone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def prepare_python(session: SparkSession) -> None:
    """Make executors on this machine use this process's Python for the next requests; see ``use_own_python``.

    Raises ``SparkElasticError`` if the session of the DataFrame has been stopped, or pyspark cannot serve it in this process.
    """
    if is_connect(session) and not is_remote():
        raise SparkElasticError(
            "this DataFrame belongs to a Spark Connect session, but pyspark's functions and Spark ML serve classic sessions in "
            "this process: connect in a process without a classic session, by SparkSession.builder.remote(…) or SPARK_REMOTE"
        )
    if not is_remote():
        if is_gone(session.sparkContext):
            raise SparkElasticError(
                "the Spark session of this DataFrame has been stopped: read it again in the present session"
            )
        use_own_python(session)


def open_files(url: str, storage_options: Mapping[str, object] | None = None) -> Files:
    """Open the file system of a URL as Spark does; without a JVM, as workers do, with ``storage_options``."""
    return ArrowFiles(url, storage_options) if is_remote() else HadoopFiles(url)


def shows_plans() -> bool:
    """Whether a DataFrame's plan and the files that it reads are accessible."""
    return not is_remote()


def is_local(session: SparkSession) -> bool:
    """Whether it is certain that all executors are on this machine."""
    return not is_remote() and master_of(session).startswith("local")


def master_of(session: SparkSession) -> str:
    """Return the master of the cluster, for messages."""
    return str(session.conf.get("spark.master"))
