"""ObjectState: any named objects as a state."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial

import torch

from spark_elastic.checkpoint.skeleton import PLAIN, Lender, map_tree
from spark_elastic.data.loader import StartsOver, TakesWorld, has_part
from spark_elastic.data.randomness import RandomStates, set_random_states
from spark_elastic.errors import CheckpointError, SparkElasticError, StateLostError, TrainingCodeError, final
from spark_elastic.worker.checks.aliases import check_aliases, check_live, watch_loads
from spark_elastic.worker.checks.plain_values import find_unequal
from spark_elastic.worker.checks.resumed_optimizers import check_steppers, describe_steppers
from spark_elastic.worker.checks.resumed_settings import PreparedGroups, dropped_objects, replaced_settings
from spark_elastic.worker.checks.unsupported import check_is_shared, check_supported, warn_of_metrics
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.context import device
from spark_elastic.worker.job import Job, current_job, present_world
from spark_elastic.worker.optimizers.zero import check_saved_once, divides, find_divisible
from spark_elastic.worker.state.base import State
from spark_elastic.worker.state.commits import Commits
from spark_elastic.worker.state.generators import Generators, seed_newcomer
from spark_elastic.worker.state.inference import outside_inference_mode
from spark_elastic.worker.state.keepers import Keeper, OnDevice, dividing_keeper
from spark_elastic.worker.state.keepers.keeper import Content
from spark_elastic.worker.state.loading import Loading
from spark_elastic.worker.state.places import Places
from spark_elastic.worker.state.repair import hand_out
from spark_elastic.worker.state.snapshot import CannotCopyError, Snapshot, find_objects
from spark_elastic.worker.state.structure import Structure, check_loaders, follow, outline, remember, structure_of, tell
from spark_elastic.worker.world import World

# How often an attribute's new value is checked for memory shared with a module: users usually set it in one place.
LOOKS = 3


# What users call, and an object in its place would hide.
_METHODS = frozenset(name for name, value in vars(State).items() if callable(value) and not name.startswith("_"))


class ObjectState(State):
    """Holds named objects as attributes: ``ObjectState(epoch=0, best=inf, ema=ema)``, then ``state.epoch += 1``.

    Objects with ``state_dict`` and ``load_state_dict``, by themselves or in lists, tuples and dicts, are saved and restored
    through these methods, in place. Everything else is copied by value. Tensors that still fit, containers, and objects of
    plain classes are restored in place, too. Public attributes that are set later also belong to the state. Names that begin
    with an underscore are refused; those that your subclass sets are not kept. After a sync, all objects that are not ``local``
    are the same on every rank.

    Args:
        local: the name or names of objects that stay on their rank, or a dict of such objects. They are saved and restored
            there, and never sent.
        objects: the objects, by the names that become attributes.

    A loader of ``spark_elastic.data`` that is given as ``loader`` continues from the last commit, and each rank gets its share
    of the rows.

    Each rank has its own random number generators (Python, NumPy, torch, CUDA). They are saved with commits and never sent.
    Those of a newcomer, and of a job that resumes from a durable checkpoint, are derived from (the generator's seed, attempt,
    generation, rank); so are those of all ranks but 0 when a job begins.

    Raises ``TrainingCodeError`` for tensors, and for containers of tensors, that share their memory with a module or an
    optimizer of the state, as those of ``module.state_dict()`` do: these would keep changing here, but be copies on other
    ranks.

    A ``save`` that fails leaves the previous copy intact. If this worker is lost, its copy is lost with it; the other workers
    hold copies of their own.
    """

    _keeper_class: Callable[[], Keeper] = OnDevice
    # How many neighbours in the ring of ranks may be lost at once if ranks hold commits only together.
    _redundancy = 1

    def __init__(self, *, local: str | Iterable[str] | Mapping[str, object] | None = None, **objects: object) -> None:
        """Set the objects as attributes. Outside a job, copy them as well, so that ``restore`` has something to go back to.

        Raises ``ValueError`` for a name that is taken or begins with an underscore, and for a container that contains itself,
        ``TypeError`` for tensors and models that no State can hold, such as sparse ones, and ``TrainingCodeError`` for tensors
        that share memory with a module or an optimizer of the state.
        """
        super().__init__()
        # By the name of an attribute, how often it has been set to something that holds tensors.
        self._looked_at: Counter[str] = Counter()
        self._keeper = self._keeper_class()
        self._commits = Commits(self._keeper)
        self._generators = Generators()
        # The structure of the objects when the job begins, which is also that of newcomers; None outside a job.
        self._first_structure: Structure | None = None
        # Which objects are where then.
        self._first_places: Places | None = None
        # The optimizers and schedulers of the last durable commit, and what was said about them.
        self._described: tuple[list[int], str] | None = None
        self._local: set[str] = {local} if isinstance(local, str) else set(local or ())
        if isinstance(local, Mapping):
            objects = {**objects, **local}
        check_aliases(objects)
        for name, value in objects.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"{name!r} cannot be the name of an object of a {type(self).__name__}; choose another")
            map_tree(partial(check_supported, name=name), value)
            if name not in self._local:
                map_tree(partial(check_is_shared, name=name), value)
                map_tree(partial(warn_of_metrics, name=name), value)
            setattr(self, name, value)
        if current_job() is None:
            self._keep_first()

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            self._check_private(name)
        elif name in _METHODS and not callable(value):
            raise ValueError(
                f"{name!r} cannot be the name of an object of a {type(self).__name__}, which has it as a method"
            )
        elif type(value) not in PLAIN and self._looked_at[name] < LOOKS:
            self._looked_at[name] += check_live(name, value, vars(self))
        super().__setattr__(name, value)

    def _check_private(self, name: str) -> None:
        """Refuse a name that commits leave out, unless a user's subclass sets it."""
        is_complete = "_local" in vars(self)
        is_known = name in vars(self) or hasattr(type(self), name)
        if is_complete and not is_known and type(self).__module__.partition(".")[0] == "spark_elastic":
            raise ValueError(
                f"{name!r} cannot be the name of an object of a {type(self).__name__}, because commits leave out names that "
                "begin with an underscore; choose another"
            )

    def save(self) -> None:
        """Copy all objects into the spare one of two buffers, then make it the current one.

        In a job, copies on a GPU are only enqueued, and the next ``save`` or ``restore`` waits for them. Raises
        ``WorkerLostError`` if the copies of the last ``save`` were discarded: whatever a subclass keeps besides then belongs to
        a commit that does not count.
        """
        self._commits.record(self._take_next)

    @outside_inference_mode
    def restore(self) -> None:
        """Reset all objects to the last commit, in place where possible, and clear gradients.

        Raises ``SparkElasticError`` inside the elastic function if this rank does not have the whole of the last commit: with
        commits in slices, and with commits in place once an optimizer has stepped.

        In a script outside a job, before the first commit, objects go back to their values when the state was made. In a fixed
        world, the first call is a ``sync``.
        """
        if self._begin_if_fixed():
            return
        self._commits.go_back()
        kept = self._keeper.to_restore()
        if kept is None and self._commits.is_entered:
            raise SparkElasticError(
                f'commit="{self._keeper.name}": each rank has kept slices of the last commit, so that none can restore it alone; '
                'use commit="copy"'
            )
        if kept is not None:
            self._load_shared(kept)
            self._load_own(kept.own)
            self._keeper.loaded(self._values(shared=True))
        job = current_job()
        if job is not None:
            job.control.slices = self._keeper.slices

    @outside_inference_mode
    def sync(self) -> None:
        """Bring every rank to the newest commit: ranks that lack it receive it, the others keep theirs. This is a collective.

        Plain values and other tensors that ranks have set differently become those of rank ``donor`` on all of them. A further
        call in the elastic function does just that. In a fixed world (``run(elastic=False)``), call it once above the training
        loop: all ranks then continue from the newest durable checkpoint, or from the values of rank 0 if there is none.
        """
        if self._begin_if_fixed():
            return
        self._commits.settle()
        world = present_world()
        if world is None:
            self._take(self._commits.steps, 1)
            self._keeper.settle()
            return
        self._commits.syncs += 1
        if self._commits.syncs > 1:
            return self._agree(world)
        is_first = world.newest_commit is None
        if is_first and world.rank == 0:
            # A job without commits begins with the state of rank 0.
            self._commits.restored_size = self._restore_durable(world)
            self._take(self._commits.steps, self._commits.restored_size)
            self._keeper.settle()
        arrived = self._keeper.catch_up(world, self._values(shared=True), self._tell)
        job = current_job()
        if arrived is not None:
            if job is not None and not self._keeper.is_joint:
                # From here on this rank holds the commit, even if the next loss comes before the generation is sealed.
                job.control.commit = world.newest_commit
            self._receive(arrived, world)
            if is_first:
                self._commits.restored_size = arrived.skeleton["size"]
        if not is_first:
            self._agree(world)
        if job is not None and not job.is_fixed:
            self._keeper.divide(world, self._values(shared=True))

    def _agree(self, world: World) -> None:
        """Give all ranks the donor's values of the attributes that ranks have set differently before the last commit."""
        values, copy, number = self._values(shared=True), Snapshot(), self._commits.syncs
        unequal = find_unequal(world, values, number)
        if not unequal:
            return
        if world.rank == self.donor:
            chosen = {name: values[name] for name in unequal if name in values}
            copy.take({"objects": chosen, "same": Places(chosen, self._first_places).same}, None)
            copy.wait()
        if hand_out(world, self.donor, copy, f"sync {number}"):
            received = copy.view()
            for name in unequal:
                if name not in received["objects"] and name in values:
                    delattr(self, name)
            self._load(received["objects"], self._rebound(Places(values)), received["same"])

    def _keep_first(self) -> None:
        """Outside a job, where no generation is sealed, keep the initial values, if they can be copied already."""
        with suppress(Exception):
            self._take(self._commits.steps, 1)
            self._keeper.settle()

    @outside_inference_mode
    def _prepare(self) -> None:
        self._prepare_to_divide()
        shared = self._values(shared=True)
        try:
            self._keeper.prepare(shared)
        except CannotCopyError as error:
            raise error.named(shared) from error.reason
        self._first_structure = structure_of(find_objects(shared))

    def _prepare_to_divide(self) -> None:
        """Switch to another keeper if an optimizer of the State may be divided among the ranks of this job."""
        job = current_job()
        if job is None or job.is_fixed or not divides(job.max_np, self._redundancy):
            return
        shared = self._values(shared=True)
        if not find_divisible(shared):
            return
        check_saved_once(shared)
        if job.checkpoints is not None and job.checkpoints.metric is not None:
            raise CheckpointError(
                "checkpoint_best= cannot be given with a ZeroRedundancyOptimizer: rank 0 alone learns that a commit is the best, "
                "and has only its parts of the optimizer's state. Leave one of the two out"
            )
        self._keeper = self._commits.keeper = dividing_keeper(self._keeper.name, self._redundancy)

    def _begin(self, job: Job | None) -> None:
        shared = self._values(shared=True)
        for name, value in shared.items():
            map_tree(partial(check_is_shared, name=name), value)
        self._keeper.begin(shared)
        if self._first_places is None:
            self._first_places = Places(shared)
            for value in find_objects(shared | self._values(shared=False)).values():
                if has_part(value, StartsOver):
                    value.start_over()
        super()._begin(job)

    def _lend(self) -> Lender:
        return self._keeper.lend(self._values(shared=True))

    def _shared_values(self) -> dict[str, object]:
        return self._values(shared=True)

    def _compared_values(self) -> dict[str, object]:
        return self._values(shared=True)

    def _receive(self, arrived: Snapshot, world: World) -> None:
        """Load the commit that has arrived."""
        if arrived.told is not None:
            follow(find_objects(self._values(shared=True)), arrived.told)
        self._load_shared(arrived)
        if world.me.commit is None:
            self._own_as_newcomer(world)
        else:
            self._load_own(arrived.own)
        if self._keeper.holds(arrived):
            self._keeper.loaded(self._values(shared=True))
        else:
            self._take(self._commits.steps, world.previous_size)
            self._keeper.settle()

    def _restore_durable(self, world: World) -> int:
        """Load the newest durable checkpoint, if there is one. Return the size of the world that wrote it, else 0.

        Objects that the checkpoint does not hold keep their present values.
        """
        job = current_job()
        try:
            saved = None if job is None or job.checkpoints is None else job.checkpoints.restore(device())
        except CheckpointError as error:
            final(error)  # the next rank 0 would read the same
            raise
        if saved is None:
            why = self._keeper.why_lost()
            if why:
                raise StateLostError(f'commit="{self._keeper.name}": {why}, and {self._keeper.remedy}')
            return 0
        present = self._values(shared=True)
        objects = {name: value for name, value in saved.objects.items() if name not in self._local}
        replaced, dropped = replaced_settings(present, objects), dropped_objects(present, objects)
        prepared = PreparedGroups(present, objects)
        try:
            check_steppers(present, objects, saved.steppers)
            self._load(objects, saved.rebound, saved.same)
            prepared.put_back()
        except Exception as error:
            advice = "make the State as it was at that commit, or give another checkpoint= to start over"
            misfit = f"checkpoint {saved.name} does not fit this state: {error}; {advice}"
            raise final(CheckpointError(misfit)) from error
        if replaced and world.rank == 0:
            warnings.warn(
                f"the job goes on from checkpoint {saved.name}, and {'; '.join(replaced)}. If the new values are meant, set "
                "them in the elastic function, before its loop",
                stacklevel=depth_of_user(),
            )
        if dropped and world.rank == 0:
            warnings.warn(
                f"the job goes on from checkpoint {saved.name}, which has no object at the place of {', '.join(dropped)}: the "
                "State goes on without it. To begin with a new object, give it to the State under a name of its own",
                stacklevel=depth_of_user(),
            )
        self._commits.steps = saved.steps
        self._own_as_newcomer(world)
        return saved.size

    @outside_inference_mode
    def _take(self, steps: int, size: int) -> None:
        """Begin a commit of the present values, made by a world of this size."""
        values = self._values(shared=True)
        places = Places(values, self._first_places)
        try:
            has_changed = self._keeper.take(self._content(steps, size, values, places), places, self._own_part())
        except CannotCopyError as error:
            raise error.named({**values, **self._values(shared=False)}) from error.reason
        if has_changed:
            for name, value in values.items():
                if isinstance(value, (dict, list)):  # something may have been put into it
                    check_live(name, value, vars(self))
            if self._first_places is not None:
                check_loaders(places.stateful(), self._first_places)
            self._tell()  # a change that cannot be described to a newcomer raises now, on every rank

    def _content(self, steps: int, size: int, values: dict[str, object], places: Places) -> Content:
        content: Content = {"steps": steps, "size": size, "objects": values}
        if rebound := self._rebound(places):
            content["rebound"] = rebound
        if places.same:
            content["same"] = places.same
        job = current_job()
        if job is not None and job.checkpoints is not None:
            content["steppers"] = self._steppers(values)
        return content

    def _steppers(self, values: Mapping[str, object]) -> str:
        """Describe optimizers and schedulers, again only if there are others, or they step more parameters."""
        objects = find_objects(values)
        known = outline([*objects.values()])
        if self._described is None or self._described[0] != known:
            self._described = known, json.dumps(describe_steppers(objects))
        return self._described[1]

    def _take_next(self) -> None:
        world = present_world()
        self._take(self._commits.steps + 1, 1 if world is None else world.size)

    def _tell(self, places: Places | None = None) -> bytes | None:
        """Describe the changes of structure that a newcomer has to follow before it loads; None if there are none.

        places: the objects of the commit that it will load, if they are others than the present ones.
        """
        if self._first_structure is None:
            return None
        first = self._first_places or Places({})
        places = places or Places(self._values(shared=True), self._first_places)
        # In the order in which the first structure was found: where modules share a parameter, it has the name of the first.
        order = {name: place for place, name in enumerate(self._first_structure)}
        found = sorted(places.stateful().items(), key=lambda entry: order.get(entry[0], len(order)))
        objects = {name: value for name, value in found if name not in places.same}
        known: dict[int, str] = {}
        for name in objects:
            earlier = known.setdefault(id(first.at(name)), name)
            if earlier != name and first.at(name) is not None:
                raise TrainingCodeError(
                    f"state.{earlier} and state.{name} were one object when the job began, and are two now, of which a newcomer "
                    "could not make one: give both to the State above the elastic function"
                )
        return tell(objects, self._first_structure)

    def _rebound(self, places: Places) -> list[str]:
        return [] if self._first_places is None else places.rebound(self._first_places)

    def _values(self, shared: bool) -> dict[str, object]:
        """Return the objects themselves: those that all ranks share, or this rank's own."""
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and (name not in self._local) == shared
        }

    def _enter_world(self, rank: int, size: int) -> None:
        objects = find_objects(self._values(shared=True) | self._values(shared=False))
        for value in {id(value): value for value in (*vars(self).values(), *objects.values())}.values():
            if has_part(value, TakesWorld):
                value.set_world(rank, size)
        for value in objects.values():
            if isinstance(value, torch.optim.Optimizer):
                watch_loads(value, self)

    def _loader_in_use(self) -> object:
        return vars(self).get("loader")

    def _own_part(self) -> tuple[Snapshot | None, RandomStates]:
        """Copy what belongs to this rank alone: its local objects and its random numbers. ``_load_own`` loads the copy."""
        return self._copy_local(), self._generators.states()

    def _copy_local(self) -> Snapshot | None:
        if not self._local:
            return None
        if self._commits.index == 1:  # by the second commit in a generation, the loop has set its attributes
            self._check_local_names()
        own, values = Snapshot(), self._values(shared=False)
        own.take(values, None)
        own.places = Places(values)
        optimizers = [value for value in own.objects or () if isinstance(value, torch.optim.Optimizer)]
        own.put_back = remember(optimizers) if optimizers else None
        own.pending = None  # the copy of the shared part follows on the stream, and is waited for
        return own

    def _check_local_names(self) -> None:
        """Warn of names in ``local`` that are no object's: what they were meant for is sent to all ranks."""
        world = present_world()
        unknown = sorted(self._local - vars(self).keys())
        if unknown and (world is None or world.rank == 0):
            warnings.warn(
                f"local={unknown} names nothing that is in this {type(self).__name__}, which holds "
                f"{', '.join(self._values(shared=True))}",
                stacklevel=depth_of_user(),
            )

    def _load_shared(self, kept: Snapshot) -> None:
        content = kept.view(copies=False)
        if kept.put_back is not None:
            kept.put_back()
        self._commits.steps = content["steps"]
        self._forget_newer(content["objects"])
        if kept.places is None:
            self._load(content["objects"], content.get("rebound", ()), content.get("same", {}))
        else:
            self._load_back(content["objects"], kept.places)
        # Commits in slices go by the order of attributes, in which some may have been deleted and set again.
        for name in content["objects"]:
            vars(self)[name] = vars(self).pop(name)

    def _load_own(self, own: object) -> None:
        if own is None:  # the commit was received, and the generation is not sealed yet
            return
        assert isinstance(own, tuple), "_own_part made it"
        values, generators = own
        if values is not None:
            assert values.places is not None, "it was taken here"
            if values.put_back is not None:
                values.put_back()
            self._load_back(values.view(copies=False), values.places)
        set_random_states(generators)

    def _own_as_newcomer(self, world: World) -> None:
        """Set up what belongs to this rank alone, which a newcomer never receives."""
        seed_newcomer(world)

    def _forget_newer(self, names: Iterable[str]) -> None:
        """Drop objects that have been added since the last commit."""
        for name in [name for name in vars(self) if not name.startswith("_") and name not in self._local]:
            if name not in names:
                delattr(self, name)

    def _load(
        self, values: Mapping[str, object], rebound: Collection[str] = (), same: Mapping[str, str] | None = None
    ) -> None:
        """Set the attributes to values that were not copied here, in the objects with which the job began; see ``Loading``."""
        for name, value in Loading(self._first_places, rebound=rebound, same=same).load(vars(self), values):
            setattr(self, name, value)

    def _load_back(self, values: Mapping[str, object], places: Places) -> None:
        """Set the attributes to values that were copied here, in the objects of which they are copies."""
        for name, value in Loading(places, is_own=True, same=places.same).load(vars(self), values):
            setattr(self, name, value)
