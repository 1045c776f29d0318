"""ObjectState: any named objects as a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from spark_elastic.checkpoint.skeleton import Lender, map_tree
from spark_elastic.errors import CheckpointError, StateLostError
from spark_elastic.worker.checks.unsupported import check_supported
from spark_elastic.worker.context import device
from spark_elastic.worker.job import Job, current_job, present_world
from spark_elastic.worker.state.base import State
from spark_elastic.worker.state.commits import Commits
from spark_elastic.worker.state.keepers import Keeper, OnDevice
from spark_elastic.worker.state.loading import load_tree
from spark_elastic.worker.state.repair import plan_repair, repair
from spark_elastic.worker.state.snapshot import Snapshot, SnapshotPair, Stateful, find_objects
from spark_elastic.worker.state.structure import follow, structure_of, tell
from spark_elastic.worker.world import World


class ObjectState(State):
    """Holds named objects as attributes: ``ObjectState(epoch=0, best=inf, ema=ema)``, then ``state.epoch += 1``.

    Objects with ``state_dict`` and ``load_state_dict``, by themselves or in lists, tuples and dicts, are saved and restored
    through these, in place; so are tensors that still fit; all else is copied by value, and containers and
    objects of plain classes are restored in place, too. Public attributes that are set
    later belong to the state, too. Those named in ``local`` stay on their rank: they are saved and restored there and never
    sent. After a sync all others are the same on every rank.

    A ``save`` that fails leaves the one before intact. On the loss of this worker its copy is lost with it; the others hold
    their own.
    """

    _keeper_class: type[Keeper] = OnDevice

    def __init__(self, *, local: str | Iterable[str] | Mapping[str, Any] | None = None, **objects: Any) -> None:
        super().__init__()
        self._keeper = self._keeper_class()
        self._commits = Commits(self._keeper)
        # What the objects are made of when the job begins, and newcomers have; None outside a job.
        self._first_structure: dict[str, Any] | None = None
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
        self._commits.record(self._take_next)

    def restore(self) -> None:
        """Set all objects back to the last commit, in place where they can; gradients are cleared.

        Before the first commit of a script outside a job, back to what they were when the state was made; in a fixed world the
        first call is a ``sync``.
        """
        if self._begins_here():
            return
        self._commits.go_back()
        if not self._keeper.is_empty:
            self._load_shared(self._keeper.current)
            self._load_own(self._keeper.current.own)

    def sync(self) -> None:
        """Bring every rank to the newest commit: who lacks it receives it, who holds it is not touched. A collective.

        In a fixed world (``run(elastic=False)``) without an elastic function, call it once above the training loop: all ranks
        go on from the newest durable checkpoint, or from the values of rank 0 where there is none.
        """
        if self._begins_here():
            return
        self._commits.settle()
        world = present_world()
        if world is None:
            self._take(self._commits.steps, 1)
            self._keeper.settle()
            return
        is_first = world.newest_commit is None
        if is_first and world.rank == 0:
            # The first state of a job is rank 0's.
            self._commits.restored_size = self._restore_durable(world)
            self._take(self._commits.steps, self._commits.restored_size)
            self._keeper.settle()
        is_sender = world.rank in plan_repair([member.commit for member in world.members]).source.values()
        copies = self._keeper.for_repair(self._values(shared=True), is_sender)
        if is_sender:
            copies.current.told = self._tell()
        own = None if self._keeper.is_empty else self._keeper.current.own
        if repair(world, copies):
            job = current_job()
            if job is not None:
                # From here on this rank is a holder, also if the next loss comes before the seal.
                job.control.commit = world.newest_commit
            # What is this rank's own is never received; a newcomer has none yet.
            copies.current.own = own
            self._receive(copies, world)
            if is_first:
                self._commits.restored_size = copies.current.skeleton["size"]

    def _keep_first(self) -> None:
        """Outside a job nothing seals a generation: keep what the state begins with, if it can be kept already."""
        with suppress(Exception):
            self._take(self._commits.steps, 1)
            self._keeper.settle()

    def _prepare(self) -> None:
        self._keeper.prepare(self._values(shared=True))
        self._first_structure = structure_of(find_objects(self._values(shared=True)))

    def _begin(self, job: Job | None) -> None:
        self._keeper.begin(self._values(shared=True))
        super()._begin(job)

    def _lend(self) -> Lender:
        return self._keeper.lend(self._values(shared=True))

    def _receive(self, copies: SnapshotPair, world: World) -> None:
        """Take over what has arrived."""
        arrived = copies.current
        if arrived.told is not None:
            follow(find_objects(self._values(shared=True)), arrived.told)
        self._load_shared(arrived)
        if world.me.commit is None:
            self._own_as_newcomer(world)
        if not self._keeper.holds(copies):
            self._take(self._commits.steps, world.previous_size)
            self._keeper.settle()

    def _restore_durable(self, world: World) -> int:
        """Go on from the newest durable checkpoint, if there is one; return the size of the world that wrote it, else 0.

        What it does not know of stays as it is here.
        """
        job = current_job()
        saved = None if job is None or job.checkpoints is None else job.checkpoints.restore(device())
        if saved is None:
            if not self._keeper.can_restore:
                raise StateLostError(
                    f'commit="{self._keeper.name}": all ranks were caught between optimizer step and commit, and there is no '
                    'durable checkpoint (see checkpoint=, or use commit="copy")'
                )
            return 0
        try:
            self._load(saved.objects)
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {saved.name} is not one of this state: {error}; give another checkpoint= to begin anew"
            ) from error
        self._commits.steps = saved.steps
        self._own_as_newcomer(world)
        return saved.size

    def _take(self, steps: int, size: int) -> None:
        """Begin a commit of the present values; ``size`` is that of the world that makes it."""
        if self._keeper.take(steps, size, self._values(shared=True), self._own_part()):
            self._tell()  # what cannot be told to a newcomer is an error now, and on every rank

    def _take_next(self) -> None:
        world = present_world()
        self._take(self._commits.steps + 1, 1 if world is None else world.size)

    def _tell(self) -> bytes | None:
        """What a newcomer has to know of the structure before it loads."""
        first = self._first_structure
        return None if first is None else tell(find_objects(self._values(shared=True)), first)

    def _values(self, shared: bool) -> dict[str, object]:
        """The objects themselves: those that all ranks share, or this rank's own."""
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and (name not in self._local) == shared
        }

    def _own_part(self) -> Any:
        """A copy of what is this rank's alone."""
        if not self._local:
            return None
        own = Snapshot()
        own.take(self._values(shared=False), None)
        own.pending = None  # the copy of what is shared comes after it, and is waited for
        return own

    def _load_shared(self, kept: Snapshot) -> None:
        content = kept.view()
        if kept.put_back is not None:
            kept.put_back()
        self._commits.steps = content["steps"]
        self._forget_newer(content["objects"])
        self._load(content["objects"], kept.objects)

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

    def _load(self, values: Mapping[str, object], objects: Sequence[Stateful] | None = None) -> None:
        live = None if objects is None else iter(objects)
        refilled: dict[int, object] = {}
        for name, value in values.items():
            setattr(self, name, load_tree(getattr(self, name, None), value, live, f"state.{name}", refilled))
