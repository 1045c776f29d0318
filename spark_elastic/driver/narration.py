"""Narrator: what the driver's log tells a person of a job: who was lost, where and why, and what the job did about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spark_elastic.errors import name_worker


class Narrator:
    """Turns the machine's records into lines of a log; pure. Losses and how they end are warnings, what was planned is not."""

    def __init__(self, elastic: bool = True) -> None:
        self._elastic = elastic
        self._is_broken = False
        self._commit = "None"
        # Who was lost and where, until its exit is known.
        self._lost: dict[int, str] = {}

    def tell(self, kind: str, fields: Mapping[str, Any]) -> tuple[int, str] | None:
        """Return the level and text of a line, or None for what is of no interest here."""
        match kind:
            case "worker_lost":
                rank, worker, cause = fields["rank"], fields["worker"], fields["cause"]
                who = name_worker(worker, rank)
                self._lost[worker] = f"{who} on {fields['host']}"
                return logging.WARNING, f"{self._lost[worker]} was lost: {cause}"
            case "worker_exited":
                lost = self._lost.pop(fields["worker"], None)
                is_told = lost is not None and fields["explains"]
                return (logging.WARNING, f"{lost} {fields['meaning']}") if is_told else None
            case "world_broken":
                self._is_broken = True
                # What comes of it in a fixed world is told once that is decided: "run_again", or the job's error.
                then = "; its survivors go back to their last commit" if self._elastic else ""
                return logging.WARNING, f"generation {fields['generation']} ends: {fields['reason']}{then}"
            case "run_again":
                return logging.WARNING, f"all of generation {fields['generation']} runs again, in new processes"
            case "world_interrupted":
                return logging.INFO, f"generation {fields['generation']} ends at its next commit: {fields['reason']}"
            case "world_forming":
                self._commit = fields["newest_commit"]
            case "world_formed":
                level = logging.WARNING if self._is_broken else logging.INFO
                self._is_broken = False
                begins = "begins" if self._commit == "None" else f"goes on from commit {self._commit}"
                return level, f"generation {fields['generation']} of size {fields['size']} {begins}"
            case "state_lost":
                return logging.WARNING, f"{fields['reason']}; the next world begins from the newest durable checkpoint"
            case "newcomers_paused":
                return logging.WARNING, _describe_pause(fields)
            case "driver_paused":
                return logging.WARNING, f"the driver stood still for {fields['seconds']:g} s"
            case "host_draining":
                return (
                    logging.INFO,
                    f"host {fields['host']} on {fields['name']} drains; its worker leaves at the next commit",
                )
        return None


def _describe_pause(fields: Mapping[str, Any]) -> str:
    again = f"it is tried again in {fields['seconds']:g} s"
    if fields["host"] is not None:
        return f"newcomers on {fields['host']} are left out: {fields['reason']}; training goes on without them, {again}"
    return (
        f"newcomers have broken {fields['failures']} worlds in a row, the last time because {fields['reason']}; "
        f"training goes on without newcomers, {again}"
    )
