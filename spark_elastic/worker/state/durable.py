"""Durable: which commits of a state are written to durable checkpoints, by which ranks, and with which score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from spark_elastic.checkpoint.parts import file_of
from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.state.part_meeting import StoreMeeting
from spark_elastic.worker.state.scores import Scores
from spark_elastic.worker.world import World

if TYPE_CHECKING:
    from spark_elastic.checkpoint.writer import CheckpointWriter
    from spark_elastic.worker.state.base import State
    from spark_elastic.worker.state.commits import Commits


# A value that was reported, and the commits under one of which it was written, if it was: they have the same weights.
_Scored: TypeAlias = tuple[tuple[CommitId, ...], float]
# A rank, and what it knows of the score of the commit from which a generation continues.
_Told: TypeAlias = tuple[int, _Scored | None]


class Durable:
    """The durable checkpoints of one state in one generation. Used by the user's thread.

    Rank 0 writes them, from what the keeper lends, or all ranks do, if the keeper has each rank's part alone. Then rank 0 asks
    for the parts in the exchange of a commit, and all ranks write those of the commit after it.
    """

    def __init__(
        self, state: State, commits: Commits, checkpoints: CheckpointWriter, world: World, previous: Durable | None
    ) -> None:
        """``previous`` is that of the generation before, which remembers what was reported for the commit that may be kept."""
        self._state = state
        self._commits = commits
        self._checkpoints = checkpoints
        self._world = world
        # What was reported last, and the last commit of the same weights.
        self._scored: _Scored | None = None if previous is None else previous._scored
        self._still_scored: CommitId | None = None if previous is None else previous._still_scored
        # Whether all ranks are to write their parts of the next commit, whether rank 0 has asked for that, and how many such
        # checkpoints they have begun.
        self._writes_part = self._has_asked = False
        self._parts = 0
        self._scores = Scores()
        # How often optimizers had stepped when a commit got its score; None if that is not known.
        self._scored_at: int | None = None

    @property
    def _is_in_parts(self) -> bool:
        """Whether all ranks write durable checkpoints together."""
        keeper = self._commits.keeper
        return keeper is not None and keeper.is_in_parts

    def committed(self, durable: bool) -> None:
        """Begin to write the last commit to a durable checkpoint, if one is due. ``durable``: the user's code asks for it."""
        world, checkpoints = self._world, self._checkpoints
        if durable and world.rank == 0:
            checkpoints.ask()
        if self._writes_part:
            self._writes_part = self._has_asked = False
            self._parts += 1
            meeting = StoreMeeting(world.store, f"part {self._parts}", world.rank, world.size)
            self._write_part(meeting)
        steps = self._state._optimizer_steps()
        value = self._scores.committed(steps or 0)
        if value is not None:
            self._score(value)
        elif steps is not None and self._scored_at == steps:
            self._still_scored = self._commits.last_of(world)  # no step has changed the weights
        if world.rank == 0 and not self._is_in_parts and checkpoints.is_due():
            self._commits.settle()
            checkpoints.begin(self._commits.last_of(world), self._state._lend())

    def ask_for_parts(self) -> bool:
        """Ask all ranks for their parts of the next commit, if a durable checkpoint in parts is due. Only rank 0 asks, once.

        Return whether it does.
        """
        if self._has_asked or not self._is_in_parts or self._world.rank != 0:
            return False
        self._has_asked = self._checkpoints.is_due()
        return self._has_asked

    def was_asked(self) -> None:
        """Note that rank 0 has asked all ranks for their parts of the next commit."""
        self._writes_part = True

    def reported(self, metrics: Mapping[str, Any]) -> None:
        """Look for the metric of ``run(checkpoint_best=)`` among the user's reported metrics."""
        metric = self._checkpoints.metric
        if metric is None or metric.name not in metrics:
            return
        value = metrics[metric.name]
        if isinstance(value, str):
            raise TypeError(f"report({metric.name}=…) has to be a number, because of checkpoint_best={metric.name!r}")
        number = float(value.item() if hasattr(value, "item") else value)
        if self._scores.reported(number, self._state._optimizer_steps() or 0):
            self._score(number)

    def score_again(self) -> None:
        """Score the commit from which this generation continues, in case the previous rank 0 has not.

        That may be lost, or may not have come to its report, if others were ahead and the commit is theirs. All ranks call this.
        """
        world = self._world
        if self._checkpoints.metric is None or world.newest_commit is None:
            return
        mine = self._scored if self._still_scored == world.newest_commit else None
        told = msgspec.msgpack.encode((world.rank, mine))
        everybody = [msgspec.msgpack.decode(each, type=_Told) for each in world.store.gather("score", told, world.size)]
        found = next((scored for _, scored in sorted(everybody) if scored is not None), None)
        if found is None:
            return
        (commits, value), last = found, self._commits.last_of(world)
        if world.rank == 0 and not any(map(self._checkpoints.has_score, commits)):
            self._score(value)
        # This rank 0, too, may be lost before it has written the score. What is counted here are steps of the last generation.
        self._scored, self._still_scored, self._scored_at = ((*commits, last), value), last, 0

    def finish(self) -> None:
        """Make the last commit of the job durable.

        If all ranks write, only rank 0 knows whether the commit is durable already. The other ranks ask on the writing thread and
        vote meanwhile, so the driver knows that they have returned. Rank 0 votes once all parts have arrived, or none has for a
        long time: see ``CheckpointWriter.complete``.
        """
        world, checkpoints = self._world, self._checkpoints
        if not self._is_in_parts:
            if world.rank == 0:
                checkpoints.finish(self._commits.last_of(world), self._state._lend(), world.is_broken)
            return
        checkpoints.wait(world.is_broken)
        checkpoints.expect_last_part(world.rank, self._commits.steps)
        meeting = StoreMeeting(world.store, "the last part", world.rank, world.size, asks=True)
        if world.rank != 0:
            try:
                self._write_part(meeting)
            except SparkElasticError as error:
                checkpoints.leave_out(file_of(world.rank, world.size), error, meeting)
            return
        is_wanted = checkpoints.lacks(self._commits.steps)
        meeting.wish(is_wanted)
        if is_wanted:
            self._write_part(meeting)
            checkpoints.wait(world.is_broken)

    def _write_part(self, meeting: StoreMeeting) -> None:
        """Begin to write this rank's part of the last commit. All other ranks write theirs."""
        keeper = self._commits.keeper
        assert keeper is not None
        self._commits.settle()
        part = keeper.part(self._world, self._state._shared_values())
        self._checkpoints.begin_part(self._commits.last_of(self._world), part, meeting)

    def _score(self, value: float) -> None:
        """Give the last commit its score, on rank 0. The others remember it, in case rank 0 is lost before it has done so."""
        commit = self._commits.last_of(self._world)
        self._scored, self._still_scored, self._scored_at = ((commit,), value), commit, self._state._optimizer_steps()
        if self._world.rank == 0:
            self._commits.settle()
            self._checkpoints.score(commit, value, self._state._lend(), self._world.is_broken)
