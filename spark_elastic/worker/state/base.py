"""State: what has to survive the loss of workers. ``ObjectState`` for any objects, ``TorchState`` for training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from spark_elastic.errors import (
    CheckpointError,
    HostsUpdatedInterrupt,
    SparkElasticError,
    WorkerLostError,
)
from spark_elastic.protocol.fault_points import Point
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker import faults
from spark_elastic.worker.checks.fingerprint import Comparison, Named
from spark_elastic.worker.checks.unsupported import check_supported
from spark_elastic.worker.context import device
from spark_elastic.worker.job import Job, current_job
from spark_elastic.worker.reporting import Values
from spark_elastic.worker.state.loading import load_tree
from spark_elastic.worker.state.repair import plan_repair, repair
from spark_elastic.worker.state.snapshot import Lender, Snapshot, SnapshotPair, as_state_dict, find_objects, map_tree
from spark_elastic.worker.state.structure import follow, outline, remember, structure_of, tell
from spark_elastic.worker.world import LOADER_FIELDS, OWN_FIELDS, World

ResetCallback = Callable[[int, int], None]
_NO_LOADER = (0,) * LOADER_FIELDS
# Up to this index commits of a generation are waited for: the driver takes them as signs that it has begun, and gets on.
FIRST_COMMIT = 1


class State(ABC):
    """What ``@elastic`` needs of a state. Subclasses say how to save, restore and sync it; call ``super().__init__()``.

    Commits are named by (generation, index). A commit is made on each rank alone and confirmed by all ranks one commit
    later, so ranks are never more than one commit apart; what one of them lacks after a loss is repaired by ``sync``.
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[ResetCallback] = []
        self._steps = 0
        self._index = 0
        self._interrupted = False
        self._comparison: Comparison | None = None
        # What durable checkpoints are made of, and the size of the world that made the one this job goes on from.
        self._snapshots: SnapshotPair | None = None
        self._restored_size = 0

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the present values, in this process. The copy before it must stay intact until it is whole.

        On a GPU, wait for it: when this returns, it counts.
        """

    @abstractmethod
    def restore(self) -> None:
        """Set the values back to those of the last ``save``."""

    @abstractmethod
    def sync(self) -> None:
        """Make all ranks equal to rank ``self.donor``, which holds the newest commit. A collective: all ranks call it."""

    def on_reset(self) -> None:
        """Called on every rank after a reset, between ``sync`` and the reset callbacks. Does nothing by itself."""

    # ------------------------------------------------------------------ for users

    @property
    def donor(self) -> int:
        """A rank that holds the newest commit; 0 in the first generation and outside a job."""
        world = self._world
        if world is None:
            return 0
        commits = [member.commit for member in world.members]
        newest = plan_repair(commits).newest
        return 0 if newest is None else commits.index(newest)

    def commit(self, durable: bool = False) -> None:
        """Save, then see whether the world changes.

        Costs a copy of the state and one small collective that is waited for only at the next commit; all ranks have to
        commit equally often. On a GPU the copy of an ``ObjectState``, too, is waited for only then: one that is under way when
        a worker is lost comes to nothing, and the commit before it holds. ``durable`` has this commit written to the job's
        ``checkpoint``, in the background, without regard to ``checkpoint_interval``; where an older one is just being
        written, the first commit after that.

        Raises ``WorkerLostError`` when a rank is gone (this step is then not saved if a reduction may have failed in it) and
        ``HostsUpdatedInterrupt``, on all ranks at the same commit, when workers come or leave.
        """
        job, world = self._job, self._world
        if job is None or world is None:
            self._save_and_count()
            return
        self._check_is_the_jobs(job)
        where = {"rank": world.rank, "step": self._steps + 1, "generation": world.generation}
        faults.reached(Point.COMMIT, **where)
        if world.is_broken() and not self._has_stepped_in_place():
            raise WorkerLostError(f"generation {world.generation} is broken")
        self._save_and_count()
        faults.reached(Point.RECORDED, **where)
        job.reporter.committed(self._steps, self._progress if world.rank == 0 else None)
        if job.checkpoints is not None and world.rank == 0:
            if durable:
                job.checkpoints.ask()
            if job.checkpoints.is_due():
                self._settle()
                job.checkpoints.begin(CommitId(world.generation, self._index), self._durable_copies())
        if self._exchange(job, world):
            raise HostsUpdatedInterrupt("workers arrive or leave")
        faults.reached(Point.COMMITTED, **where)

    def check_host_updates(self) -> None:
        """See whether the world changes, without saving unless it does. All ranks have to call it equally often.

        Raises like ``commit``.
        """
        job, world = self._job, self._world
        if job is None or world is None:
            return
        self._check_is_the_jobs(job)
        if world.is_broken():
            raise WorkerLostError(f"generation {world.generation} is broken")
        if self._exchange(job, world, is_commit=False):
            self._save_and_count()
            raise HostsUpdatedInterrupt("workers arrive or leave")

    def register_reset_callbacks(self, callbacks: Iterable[ResetCallback]) -> None:
        """Have ``callback(old_size, new_size)`` called on every rank, newcomers included, after each reset's sync.

        ``old_size`` is the size of the world that made the commit from which training goes on; in a job that goes on from
        a durable checkpoint, of the world that wrote it. Not called where a job begins from nothing.
        """
        given = list(callbacks)
        for callback in given:
            if not callable(callback):
                raise TypeError(f"callbacks must be callable, not {callback!r}")
        self._reset_callbacks.extend(given)

    def heartbeat(self) -> None:
        """Say that this worker makes progress in long code between collectives; restarts ``hang_timeout``. Costs nothing.

        docs/howto/training.md says how long such code may take without it ("Time limits").
        """
        if self._job is not None:
            self._job.control.beat()

    def report(self, **metrics: Any) -> None:
        """Send metrics (numbers, one-element tensors, strings) to the job's event log and progress line; never blocks.

        Call it as often as you like: a few reports a second are sent, the newest value of each name.
        """
        if self._job is not None:
            self._job.reporter.metrics(self._steps, metrics)

    # ------------------------------------------------------------------ for @elastic

    @property
    def _job(self) -> Job | None:
        return current_job()

    @property
    def _world(self) -> World | None:
        job = current_job()
        return None if job is None or job.finished else job.world

    def _prepare(self) -> None:
        """Do what can be done before this worker is ready, as long as nobody waits for it."""

    def _begin(self, job: Job | None) -> None:
        """Take part in a new generation: sync, callbacks, data, and the implicit commit that seals it."""
        self._interrupted = False
        if job is None or job.world is None:
            self.sync()
            self._enter_world(0, 1)
            return
        world = job.world
        job.state = self
        world.can_restore_if(lambda: not self._has_stepped_in_place())
        if not job.is_fixed:
            self._check_models(job)
        if job.checkpoints is not None and self._snapshots is None:
            raise CheckpointError(f"checkpoint= needs an ObjectState or a TorchState, not {type(self).__name__}")
        self.sync()
        job.attach_models()
        faults.reached(Point.SYNCED, rank=world.rank, generation=world.generation)
        previous_size = self._restored_size if world.newest_commit is None else world.previous_size
        if previous_size:
            self.on_reset()
            for callback in self._reset_callbacks:
                callback(previous_size, world.size)
        self._enter_world(world.rank, world.size)
        self._comparison = Comparison(
            world.rank, world.size, lambda key, mine: world.store.gather(key, mine, world.size)
        )
        self._index = -1
        self._steps -= 1  # the seal is no step of the user's
        self._save_and_count()
        job.reporter.entered(self._steps, self._progress if world.rank == 0 else None)

    def _durable_copies(self) -> Lender:
        """Where a durable checkpoint is made from."""
        assert self._snapshots is not None
        return self._snapshots

    def _has_stepped_in_place(self) -> bool:
        """Whether there is no way back to the last commit, so that this one has to be recorded whatever has happened."""
        return False

    def _enter_world(self, rank: int, size: int) -> None:
        """Take this rank's share of the data."""

    def _check_models(self, job: Job) -> None:
        """Refuse models whose weights nobody would keep equal."""

    def _check_is_the_jobs(self, job: Job) -> None:
        if job.state is None and job.is_fixed:
            raise SparkElasticError(
                "call state.sync() before the first commit(): it brings all ranks to the newest checkpoint, or to the values "
                "of rank 0 where there is none"
            )
        if job.state is not self:
            raise SparkElasticError(
                "only the state that was given to the elastic function commits; put all into that one"
            )

    def _begins_here(self) -> bool:
        """Begin, and say so, where nothing else does: in a fixed world the first ``sync`` or ``restore`` is the beginning."""
        job = self._job
        if job is None or not job.is_fixed or job.state is self:
            return False
        self._begin(job)
        return True

    def _save_and_count(self) -> None:
        before = self._index
        self.save()
        if self._index == before:  # a subclass of the user's, which knows nothing of commits
            self._count()
            self._hold()

    def _count(self) -> None:
        self._index += 1
        self._steps += 1

    def _settle(self) -> None:
        """Wait until the last save is whole. Raises ``WorkerLostError`` if it never will be; the one before then holds."""

    def _hold(self) -> None:
        """Tell the driver that the last commit is whole on this rank."""
        job, world = self._job, self._world
        if job is not None and world is not None:
            job.control.commit = CommitId(world.generation, self._index)

    def _exchange(self, job: Job, world: World, is_commit: bool = True) -> bool:
        """Read the last commit's control collective and start this one's. Return whether the world changes."""
        assert self._comparison is not None
        self._read(world.finish_exchange(), world)
        if not self._interrupted:  # which stays so if user code swallows the interrupt
            commit = CommitId(world.generation, self._index)
            fingerprint = self._comparison.report(commit, self._compared, is_commit)
            world.start_exchange([job.control.is_interrupted, self._index, *fingerprint, *self._loader_report()])
        return self._interrupted

    def _leave(self, world: World) -> None:
        """The user's function has returned: read the control collective of the last commit, and have that made durable.

        That is done before the vote, so that another rank can do it if this one is lost.
        """
        self._read(world.finish_exchange(), world)
        self._settle()
        job = self._job
        assert job is not None
        job.reporter.finished(self._steps, self._progress if world.rank == 0 else None)
        if job.checkpoints is not None and world.rank == 0:
            job.checkpoints.finish(CommitId(world.generation, self._index), self._durable_copies(), world.is_broken)

    def _read(self, everybody: list[list[int]] | None, world: World) -> None:
        """Look at what all ranks said at a commit."""
        if everybody is None:
            return
        indexes = [values[1] for values in everybody]
        if len(set(indexes)) > 1:
            raise SparkElasticError(
                f"ranks have committed {indexes} times in generation {world.generation}; all have to call commit() and "
                "check_host_updates() equally often"
            )
        self._confirm_loader([tuple(values[OWN_FIELDS:]) for values in everybody])
        self._interrupted = any(values[0] for values in everybody)
        assert self._comparison is not None
        self._comparison.read([values[2] for values in everybody], asked=bool(everybody[0][3]))

    def _compared(self) -> Named:
        """What has to be equal on all ranks at a commit, named."""
        return ()

    def _progress(self) -> Values:
        """How far the data is, for people to see."""
        return {}

    def _loader_report(self) -> Sequence[int]:
        return _NO_LOADER

    def _confirm_loader(self, reports: list[tuple[int, ...]]) -> None:
        pass


class ObjectState(State):
    """Holds named objects as attributes: ``ObjectState(epoch=0, best=inf, ema=ema)``, then ``state.epoch += 1``.

    Objects with ``state_dict`` and ``load_state_dict``, by themselves or in lists, tuples and dicts, are saved and restored
    through these, in place; so are tensors that still fit, and all else is copied by value. Public attributes that are set
    later belong to the state, too. Those named in ``local`` stay on their rank: they are saved and restored there and never
    sent. After a sync all others are the same on every rank.

    A ``save`` that fails leaves the one before intact. On the loss of this worker its copy is lost with it; the others hold
    their own.
    """

    def __init__(self, *, local: str | Iterable[str] | Mapping[str, Any] | None = None, **objects: Any) -> None:
        super().__init__()
        self._snapshots: SnapshotPair = SnapshotPair()
        # What the objects are made of when the job begins, and newcomers have; None outside a job.
        self._first_structure: dict[str, Any] | None = None
        # Whether the spare snapshot is the last save, on its way to become the current one.
        self._is_settling = False
        self._local: set[str] = {local} if isinstance(local, str) else set(local or ())
        if isinstance(local, Mapping):
            objects = {**objects, **local}
        for name, value in objects.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"{name!r} cannot be the name of an object of a {type(self).__name__}; choose another")
            map_tree(partial(check_supported, name=name), value)
            setattr(self, name, value)
        if current_job() is None:
            self._keep_first()

    def save(self) -> None:
        """Copy all objects into the spare one of two kept buffers, then make it the current one.

        In a job, copies on a GPU are enqueued only, and the next ``save`` or ``restore`` waits for them. Raises
        ``WorkerLostError`` if those of the last ``save`` have come to nothing: what a subclass keeps beside them is then of a
        commit that never was.
        """
        self._settle()
        world = self._world
        self._take(self._steps + 1, 1 if world is None else world.size)
        self._count()
        self._is_settling = True
        copy = self._snapshots.spare.pending
        if world is not None and copy is not None:
            world.watch(copy)
        if world is None or copy is None or self._index <= FIRST_COMMIT:
            self._settle()

    def restore(self) -> None:
        """Set all objects back to the last commit, in place where they can; gradients are cleared.

        Before the first commit of a script outside a job, back to what they were when the state was made; in a fixed world the
        first call is a ``sync``.
        """
        if self._begins_here():
            return
        with suppress(WorkerLostError):
            self._settle()
        if not self._snapshots.is_empty:
            self._load_shared(self._snapshots)
            self._load_own(self._snapshots.current.own)

    def sync(self) -> None:
        """Bring every rank to the newest commit: who lacks it receives it, who holds it is not touched. A collective.

        In a fixed world (``run(elastic=False)``) without an elastic function, call it once above the training loop: all ranks
        go on from the newest durable checkpoint, or from the values of rank 0 where there is none.
        """
        if self._begins_here():
            return
        self._settle()
        world = self._world
        if world is None:
            self._take(self._steps, 1)
            self._snapshots.switch()
            return
        is_first = world.newest_commit is None
        if is_first and world.rank == 0:
            self._restored_size = self._restore_durable(world)
        copies = self._copies_for_repair(world)
        if world.rank in plan_repair([member.commit for member in world.members]).source.values():
            copies.current.told = self._tell()
        own = None if self._snapshots.is_empty else self._snapshots.current.own
        if repair(world, copies):
            if self._job is not None:
                # From here on this rank is a holder, also if the next loss comes before the seal.
                self._job.control.commit = world.newest_commit
            # What is this rank's own is never received; a newcomer has none yet.
            copies.current.own = own
            self._receive(copies, world)
            if is_first:
                self._restored_size = copies.current.skeleton["size"]

    def _keep_first(self) -> None:
        """Outside a job nothing seals a generation: keep what the state begins with, if it can be kept already."""
        with suppress(Exception):
            self._take(self._steps, 1)
            self._snapshots.switch()

    def _settle(self) -> None:
        if self._is_settling:
            self._is_settling = False
            world, copy = self._world, self._snapshots.spare.pending
            if world is not None and copy is not None and not self._has_stepped_in_place() and not world.wait_for(copy):
                raise WorkerLostError(f"generation {world.generation} was aborted ahead of its last commit's copy")
            self._snapshots.switch()
            self._hold()

    def _prepare(self) -> None:
        self._snapshots.make_room(self._values(shared=True), self._keep)
        self._first_structure = structure_of(find_objects(self._values(shared=True)))

    def _copies_for_repair(self, world: World) -> SnapshotPair:
        """Where the others' copy of the newest commit comes from, or where this rank's own is to arrive."""
        if world.newest_commit is None and world.rank == 0:
            # The first state of a job is rank 0's.
            self._take(self._steps, self._restored_size)
            self._snapshots.switch()
        return self._snapshots

    def _receive(self, copies: SnapshotPair, world: World) -> None:
        """Take over what has arrived."""
        if copies.current.told is not None:
            follow(find_objects(self._values(shared=True)), copies.current.told)
        self._load_shared(copies)
        if world.me.commit is None:
            self._own_as_newcomer(world)

    def _restore_durable(self, world: World) -> int:
        """Go on from the newest durable checkpoint, if there is one; return the size of the world that wrote it, else 0.

        What it does not know of stays as it is here.
        """
        job = self._job
        saved = None if job is None or job.checkpoints is None else job.checkpoints.restore(device())
        if saved is None:
            return 0
        try:
            self._load(saved.objects)
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {saved.name} is not one of this state: {error}; give another checkpoint= to begin anew"
            ) from error
        self._steps = saved.steps
        self._own_as_newcomer(world)
        return saved.size

    def _take(self, steps: int, size: int) -> None:
        """Copy the present values into the spare snapshot; ``size`` is that of the world that commits them."""
        shared = {"steps": steps, "size": size, "objects": self._values(shared=True)}
        snapshot = self._snapshots.spare
        specs, before = snapshot.buffer.specs, snapshot.outline
        snapshot.take(shared, self._own_part(), self._keep)
        assert snapshot.objects is not None
        snapshot.put_back = remember(snapshot.objects)
        snapshot.outline = outline(snapshot.objects)
        if snapshot.buffer.specs is not specs or snapshot.outline != before:
            self._tell()  # what cannot be told to a newcomer is an error now, and on every rank

    def _tell(self) -> bytes | None:
        """What a newcomer has to know of the structure before it loads."""
        first = self._first_structure
        return None if first is None else tell(find_objects(self._values(shared=True)), first)

    def _values(self, shared: bool) -> dict[str, Any]:
        """The objects themselves: those that all ranks share, or this rank's own."""
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and (name not in self._local) == shared
        }

    def _keep(self, value: Any) -> Any:
        """What a commit copies of an object with a state dict, wherever among the objects it is."""
        return as_state_dict(value)

    def _own_part(self) -> Any:
        """A copy of what is this rank's alone."""
        if not self._local:
            return None
        own = Snapshot()
        own.take(self._values(shared=False), None)
        own.pending = None  # the copy of what is shared comes after it, and is waited for
        return own

    def _load_shared(self, copies: SnapshotPair) -> None:
        content = copies.current.view()
        if copies.current.put_back is not None:
            copies.current.put_back()
        self._steps = content["steps"]
        self._forget_newer(content["objects"])
        self._load(content["objects"], copies.current.objects)

    def _load_own(self, own: Any) -> None:
        if own is not None:
            self._load(own.view(), own.objects)

    def _own_as_newcomer(self, world: World) -> None:
        """Set what is never received."""

    def _forget_newer(self, names: Iterable[str]) -> None:
        """Drop objects that have been added since the last commit."""
        for name in [name for name in vars(self) if not name.startswith("_") and name not in self._local]:
            if name not in names:
                delattr(self, name)

    def _load(self, values: dict[str, Any], objects: list[Any] | None = None) -> None:
        live = None if objects is None else iter(objects)
        for name, value in values.items():
            setattr(self, name, load_tree(getattr(self, name, None), value, live, f"state.{name}"))
