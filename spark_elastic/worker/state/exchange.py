"""Exchange: what ranks tell each other at commits, a row of whole numbers each, which travel in one control collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from spark_elastic.data.loader import Accountable, Balanced, has_part
from spark_elastic.data.tracker import Report
from spark_elastic.errors import TrainingCodeError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.checks.fingerprint import Comparison
from spark_elastic.worker.checks.plain_values import PlainValues
from spark_elastic.worker.checks.same_inputs import same_inputs
from spark_elastic.worker.job import Job
from spark_elastic.worker.state.durable import Durable
from spark_elastic.worker.state.pace import Pace
from spark_elastic.worker.world import World

if TYPE_CHECKING:
    from spark_elastic.worker.state.base import State


class Exchanged(NamedTuple):
    """What one rank tells at a commit. Of some values only rank 0's counts, so that all ranks decide alike."""

    # Whether the driver has told this rank that the world changes.
    is_interrupted: int
    # The index of the commit in its generation.
    commit: int
    # The digest of the tensors that have to be equal on all ranks; 0 if this commit does not compare them.
    digest: int
    # Whether the next commit is to compare tensors. Rank 0's value counts.
    asks_for_digest: int
    # What this rank's models were given, to find ranks that train on the same rows.
    inputs: int
    # How many commits later ranks exchange values again. Rank 0's value counts.
    next_after: int
    # The microseconds that this rank computes in a step; 0 if they were not measured.
    measured: int
    # Whether all ranks are to write their parts of a later commit to a durable checkpoint. Rank 0's value counts.
    writes_part: int
    # The digest of the plain values that have to be equal on all ranks; 0 if this commit does not compare them.
    plain_values: int
    # What the loader has delivered on this rank since the last exchange.
    loader: Report

    def packed(self) -> list[int]:
        """Return the row that travels."""
        return [*map(int, self[:-1]), *self.loader]

    @classmethod
    def unpacked(cls, row: Sequence[int]) -> Exchanged:
        """Return what a row says."""
        own = len(cls._fields) - 1
        return cls._make([*row[:own], Report(*row[own:])])


class Exchange:
    """The exchanges of one state in one generation. Used by the user's thread.

    Each begins at a commit and is waited for at the next one, so it costs no time of its own. What ranks have told is passed on:
    to the loader, the comparisons of tensors and of plain values, and the durable checkpoints.
    """

    def __init__(
        self, state: State, job: Job, world: World, plain: PlainValues, durable: Durable | None, pace: Pace
    ) -> None:
        self._state = state
        self._job = job
        self._world = world
        self._plain = plain
        self._durable = durable
        self._pace = pace
        self._comparison = Comparison(
            world.rank, world.size, lambda key, mine: world.store.gather(key, mine, world.size), job.clock
        )
        self._known_loader: tuple[object, Accountable | None, Balanced | None] = (None, None, None)
        # Whether ranks have told each other that the world changes. It stays so if user code swallows the interrupt.
        self.is_interrupted = False

    def go_on(self, commit: CommitId, steps: int, has_met: bool, is_commit: bool = True) -> bool:
        """Read what ranks told last, and tell what is due at this commit. Return whether the world changes.

        ``steps`` counts the commits of the whole job, and ``has_met`` says whether a reduction over all ranks has preceded this
        one. ``is_commit`` is false if the ranks only check whether the world changes. Raises ``WorkerLostError``.
        """
        self.read(steps)
        self._pace.count()
        if self.is_interrupted:
            return True
        compares = is_commit and self._comparison.wants(commit)
        if not has_met or self._pace.is_due() or compares:
            self._world.start_exchange(self._told(commit, compares, is_commit).packed())
        return False

    def _told(self, commit: CommitId, compares: bool, is_commit: bool) -> Exchanged:
        loader, balancing = self._parts_of_loader()
        digest, asks_for_digest = self._comparison.report(commit, self._state._compared, is_commit)
        return Exchanged(
            is_interrupted=self._job.control.is_interrupted,
            commit=commit.index,
            digest=digest,
            asks_for_digest=asks_for_digest,
            inputs=same_inputs.report(),
            next_after=self._pace.begin(getattr(loader, "steps_left", 0)),
            # A host that runs ahead of its device cannot measure the device's step time.
            measured=0 if balancing is None or self._world.group.runs_ahead else balancing.measured(),
            writes_part=self._durable is not None and self._durable.ask_for_parts(),
            plain_values=self._plain.report(commit.index, self._state._compared_values()) if compares else 0,
            loader=Report() if loader is None else loader.report(),
        )

    def read(self, steps: int) -> None:
        """Wait for the pending control collective, if there is one, and evaluate what all ranks have told in it.

        Raises ``WorkerLostError``, and ``TrainingCodeError`` if ranks have not committed equally often.
        """
        rows = self._world.finish_exchange()
        if rows is None:
            return
        everybody = [Exchanged.unpacked(row) for row in rows]
        indexes = [each.commit for each in everybody]
        if len(set(indexes)) > 1:
            raise TrainingCodeError(
                f"ranks have committed {indexes} times in generation {self._world.generation}; all have to call commit() and "
                "check_host_updates() equally often"
            )
        loader, balancing = self._parts_of_loader()
        if loader is not None:
            loader.confirm([each.loader for each in everybody])
        if balancing is not None:
            self._balance(balancing, [each.measured for each in everybody], steps)
        self.is_interrupted = any(each.is_interrupted for each in everybody)
        if everybody[0].writes_part and self._durable is not None:
            self._durable.was_asked()
        self._pace.agree(everybody[0].next_after)
        self._comparison.read([each.digest for each in everybody], asked=bool(everybody[0].asks_for_digest))
        self._plain.read([each.plain_values for each in everybody])
        if self._state._checks is not None:
            self._state._checks.inputs_compared([each.inputs for each in everybody])

    def _balance(self, loader: Balanced, measured: list[int], steps: int) -> None:
        timing = loader.balance(measured)
        if timing is None or self._world.rank != 0:
            return
        if timing.after != timing.before:
            self._job.reporter.balanced(steps, timing)
        self._job.control.steps_timed(timing)

    def _parts_of_loader(self) -> tuple[Accountable | None, Balanced | None]:
        """The state's loader, if it reports rows, and again, if its steps can be timed. Cached, because the check is slow."""
        loader = self._state._loader_in_use()
        if loader is not self._known_loader[0]:
            accountable = loader if has_part(loader, Accountable) else None
            balanced = loader if has_part(loader, Balanced) else None
            self._known_loader = loader, accountable, balanced
        return self._known_loader[1:]
