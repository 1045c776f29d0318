"""Setbacks: counts worlds in a row that came to nothing, and says when that is a reason to give up the job."""

from __future__ import annotations

import math

from spark_elastic.driver.settings import JobSettings
from spark_elastic.errors import (
    ResetLimitExceededError,
    SparkElasticError,
    StateLostError,
    TrainingFailedError,
    WorkerFailure,
)

# How many worlds in a row newcomers may break, without a commit in between, before that counts against reset_limit.
NEWCOMERS_LIMIT = 3
# The job ends after this many worlds in a row that broke before all ranks were connected: its network does not work.
UNFORMED_LIMIT = 10
# A job that could start from its checkpoint again ends after this many worlds in a row that were lost as a whole, without a
# commit.
LOST_WORLDS_LIMIT = 3
# If no connection was silent, the job ends after this many worlds in a row whose ranks waited for each other without a commit,
# or whose ranks waited in different collectives, with or without commits.
STUCK_WORLDS_LIMIT = 3
# If no worker has reached an elastic function for start_timeout seconds, the job ends after this many losses in a row, each of
# a worker started after the previous loss. One incident that ends many workers is one loss.
LOST_STARTS_LIMIT = 10

Story = tuple[WorkerFailure, ...]


class Setbacks:
    """Counts for one job. A method that notes a setback returns the error with which the job ends, or None if it continues.

    ``story`` is what is known about the failed workers, for that error.
    """

    def __init__(self, settings: JobSettings) -> None:
        self.resets = 0
        self._settings = settings
        self._unformed = self._lost = self._stuck = self._in_disagreement = 0
        self._counted = self._by_newcomers = 0
        self._lost_starts = 0
        self._first_lost_at = self._last_lost_at = -math.inf

    @property
    def is_stuck_again(self) -> bool:
        """Whether more than one world in a row has got stuck without a commit."""
        return self._stuck > 1

    def lost_start(
        self, now: float, started_at: float, others_since: float, reason: str, story: Story, runs_again: bool
    ) -> SparkElasticError | None:
        """Note the loss of a worker before any worker has reached an elastic function.

        started_at: when the worker was started. others_since: when the oldest remaining worker was started. A worker that has
        lived for ``start_timeout`` shows that the function can be run. runs_again: the worker had called the function, which
        another one now calls again; this counts against ``reset_limit``.
        """
        limit = self._settings.start_timeout
        lives = now - min(started_at, others_since) >= limit
        is_same_incident = started_at < self._last_lost_at
        if not is_same_incident:
            self._last_lost_at = now
        if runs_again and not is_same_incident:
            self.counts()
            if error := self.over_limit(reason, story):
                return error
        if lives:
            self._lost_starts = 0
            return None
        if is_same_incident:
            return None
        if self._lost_starts == 0:
            self._first_lost_at = now
        self._lost_starts += 1
        if self._lost_starts < LOST_STARTS_LIMIT or now - self._first_lost_at < limit:
            return None
        return TrainingFailedError(
            f"workers were lost {self._lost_starts} times in a row before one reached an elastic function, for more than "
            f"{limit:g} s (start_timeout)",
            story,
        )

    def forming(self, story: Story) -> SparkElasticError | None:
        """Note that another world is about to form."""
        self._unformed += 1
        if self._unformed <= UNFORMED_LIMIT:
            return None
        return TrainingFailedError(
            f"{UNFORMED_LIMIT} worlds in a row broke before all ranks were connected. Can the workers reach each "
            "other on the interface that they use (network_interface)?",
            story,
        )

    def formed(self) -> None:
        """Note that all ranks of a world have connected."""
        self._unformed = 0

    def progressed(self) -> None:
        """Note that all ranks of a world have made a commit."""
        self._lost = self._stuck = self._by_newcomers = 0

    def broke(self, by_newcomers: bool = False) -> None:
        """Note that a failure has broken a world. ``by_newcomers``: only newcomers were lost.

        Newcomers cost the others no commit, and do not count against ``reset_limit`` while the others keep committing.
        """
        self.resets += 1
        if by_newcomers:
            self._by_newcomers += 1
            if self._by_newcomers <= NEWCOMERS_LIMIT:
                return
        self.counts()

    def counts(self) -> None:
        """Note a reset that counts against ``reset_limit``, as soon as it is known that newcomers were not its only cause."""
        self._counted += 1

    def over_limit(self, reason: str, story: Story) -> SparkElasticError | None:
        """Return the error of a job with more resets than ``reset_limit`` allows. ``reason``: what caused the last one."""
        limit = self._settings.reset_limit
        if limit is None or self._counted <= limit:
            return None
        resets = "1 reset" if self._counted == 1 else f"{self._counted} resets"
        return ResetLimitExceededError(
            f"failures have caused {resets}, more than reset_limit={limit} allows; the last one: {reason}",
            story,
        )

    def got_stuck(
        self, reason: str, has_silent: bool, all_wait: bool, story: Story, collectives_differ: bool = False
    ) -> SparkElasticError | None:
        """Note that a world made no progress. ``has_silent``: some connections do not answer.

        ``all_wait``: all ranks wait for each other. Otherwise some compute, and ``reason`` says what helps.
        ``collectives_differ``: ranks wait in different collectives. Such code may commit a little in each world, and the job
        would crawl forever.
        """
        self._stuck += 1
        self._in_disagreement = self._in_disagreement + 1 if collectives_differ else 0
        if self._in_disagreement < STUCK_WORLDS_LIMIT and self._stuck < (
            UNFORMED_LIMIT if has_silent else STUCK_WORLDS_LIMIT
        ):
            return None
        question = (
            ". Do all ranks call the same collectives in the same order, with the same shapes?" if all_wait else ""
        )
        worlds = f"{max(self._stuck, self._in_disagreement)} worlds in a row got stuck"
        without = "" if self._in_disagreement > self._stuck else " without a commit"
        return TrainingFailedError(f"{worlds}{without}; in the last one {reason}{question}", story)

    def lost_state(self, what: str, story: Story) -> SparkElasticError | None:
        """Note that nobody holds the state any more: the next world begins from the newest durable checkpoint, if any."""
        if not self._settings.durable:
            remedy = (
                "run has no checkpoint to go on from (see checkpoint=; with a ShardedState run the job again, which goes on from "
                "what the function has last written by torch.distributed.checkpoint, as docs/howto/fully-sharded.md shows)"
            )
        elif self._lost == LOST_WORLDS_LIMIT:
            remedy = f"so were {self._lost} worlds before it, with no commit since the checkpoint"
        else:
            self._lost += 1
            return None
        return StateLostError(f"{what}, and the state with them; {remedy}", story)
