"""``spark_elastic.shutdown``: ends what runs have left for the next one."""

from __future__ import annotations

from spark_elastic.launchers.kept import KEPT


def shutdown() -> None:
    """End the process that the last ``run(local=True)`` has left for the next one, and wait for that.

    Such a process has imported torch, so that the next run need not. It ends by itself with this process, or when it has not
    been used for ten minutes. Jobs that run are not disturbed; a run after this call starts as the first one did. What runs leave
    on Spark's executors ends with the session, or after a minute, together with Spark's own Python processes.
    """
    KEPT.end()
