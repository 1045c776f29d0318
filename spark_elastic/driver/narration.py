"""Narrator: tells people in the driver's log who was lost, where and why, and what the job did about it."""

from __future__ import annotations

import logging

from spark_elastic.errors import name_worker
from spark_elastic.protocol import records
from spark_elastic.protocol.records import Record


class Narrator:
    """Turns the machine's records into log lines; pure. Losses, and how they end, are warnings; what was planned is not."""

    def __init__(self, elastic: bool = True) -> None:
        self._elastic = elastic
        self._is_broken = False
        self._commit = "None"
        # Who was lost and where, until its exit is known.
        self._lost: dict[int, str] = {}

    def tell(self, record: Record) -> tuple[int, str] | None:
        """Return the level and text of a line, or None for what is of no interest here."""
        match record:
            case records.WorkerLost(worker, rank, host, cause):
                self._lost[worker] = f"{name_worker(worker, rank)} on {host}"
                return logging.WARNING, f"{self._lost[worker]} was lost: {cause}"
            case records.WorkerExited(worker=worker, meaning=meaning, explains=explains):
                lost = self._lost.pop(worker, None)
                return (logging.WARNING, f"{lost} {meaning}") if lost is not None and explains else None
            case records.WorldBroken(generation, reason):
                self._is_broken = True
                # In a fixed world the next line tells what follows: RunAgain, or the job's error.
                then = "; its survivors go back to their last commit" if self._elastic else ""
                return logging.WARNING, f"generation {generation} ends: {reason}{then}"
            case records.RunAgain(generation):
                return logging.WARNING, f"all of generation {generation} runs again, in new processes"
            case records.WorldInterrupted(generation, reason):
                return logging.INFO, f"generation {generation} ends at its next commit: {reason}"
            case records.WorldForming(newest_commit=commit):
                self._commit = commit
            case records.WorldFormed(generation, size):
                level = logging.WARNING if self._is_broken else logging.INFO
                self._is_broken = False
                begins = "begins" if self._commit == "None" else f"goes on from commit {self._commit}"
                return level, f"generation {generation} of size {size} {begins}"
            case records.StateLost(reason=reason):
                return logging.WARNING, f"{reason}; the next world begins from the newest durable checkpoint"
            case records.NewcomersPaused():
                return logging.WARNING, _describe_pause(record)
            case records.DriverPaused(seconds):
                return logging.WARNING, f"the driver stood still for {seconds:g} s"
            case records.HostDraining(host, name):
                return logging.INFO, f"host {host} on {name} drains; its worker leaves at the next commit"
        return None


def _describe_pause(pause: records.NewcomersPaused) -> str:
    again = f"it is tried again in {pause.seconds:g} s"
    if pause.host is not None:
        return f"newcomers on {pause.host} are left out: {pause.reason}; training goes on without them, {again}"
    return (
        f"newcomers have broken {pause.failures} worlds in a row, the last time because {pause.reason}; "
        f"training goes on without newcomers, {again}"
    )
