"""``spark_elastic.shutdown``: ends the processes that runs have left for the next run."""

from __future__ import annotations

import concurrent.futures
import logging
import secrets
from typing import TYPE_CHECKING

from spark_elastic.launchers.kept import KEPT
from spark_elastic.launchers.queries import Queries
from spark_elastic.launchers.session import is_connect, parallelism, used_sessions
from spark_elastic.launchers.session_watch import find_end
from spark_elastic.launchers.spark import is_gone
from spark_elastic.task.importer import end_idle_importers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

logger = logging.getLogger("spark_elastic")

# How long executors may take. While all cores are busy, the tasks that look for the processes do not start, and on a busy
# machine the first SQL query of a session alone takes ten seconds.
EXECUTORS_SECONDS = 30.0


def shutdown() -> None:
    """End the processes that runs have left for the next run, on this machine and on executors, and wait for their end.

    Such a process has imported torch, so that the next run need not. It ends by itself when it has not been used for ten
    minutes. After ``run(local=True)`` it also ends with this process, and on an executor with the executor. Executors of Spark
    Connect outlive the session: call this before ``stop()``, because a session that is stopped runs no job any more.

    Running jobs are not disturbed, and a run after this call starts as the first one did. On executors, a short Spark job with
    as many tasks as the cluster has cores looks for the processes. If no core becomes free within 30 seconds, the call returns
    without having ended them.
    """
    KEPT.end()
    for session in used_sessions():
        if not (find_end(session) if is_connect(session) else is_gone(session.sparkContext)):
            _end_on_executors(session)


def _end_on_executors(session: SparkSession | ConnectSession) -> None:
    with Queries(session, secrets.token_hex(4)) as queries:
        try:
            ended = queries.submit(end_idle_importers, "spark_elastic.shutdown()", tasks=parallelism(session))
            ended.result(EXECUTORS_SECONDS)
        except concurrent.futures.TimeoutError:
            logger.info("processes that wait for a job on executors end by themselves: no core was free")
        except Exception as error:
            logger.info("processes that wait for a job on executors end by themselves: %s", error)
