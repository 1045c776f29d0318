"""Checks of a training function while it trains, for mistakes that would silently make the training wrong.

Torch's global hooks see the steps of all optimizers inside the elastic function. The first step of each optimizer in a generation
is examined closely; later ones cost one look into a set. A mistake raises ``TrainingCodeError``, with the line to write, and ends
the job; code that may be intended is reported once, as a warning on rank 0. Objects in ``local=`` are left alone.
"""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from spark_elastic.data.deliveries import deliveries
from spark_elastic.data.loader import PositionedLoader, TakesWorld, has_part, iterated_alone
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks.carried_gradients import CarriedGradients, is_any_set, numbers_of
from spark_elastic.worker.checks.manual_averaging import reductions
from spark_elastic.worker.checks.plain_loaders import PlainLoaders
from spark_elastic.worker.checks.reachable import find_optimizers, reachable
from spark_elastic.worker.checks.same_inputs import ENOUGH, same_inputs
from spark_elastic.worker.checks.unkept_attributes import UnkeptAttributes
from spark_elastic.worker.checks.unkept_buffers import UnkeptBuffers
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.job import Job, current_job
from spark_elastic.worker.module_registers import living, stepped
from spark_elastic.worker.optimizers.steps import is_of_base_class
from spark_elastic.worker.optimizers.zero import is_part
from spark_elastic.worker.shards.loops import HOW, loops
from spark_elastic.worker.shards.sharding import shards_in_use

if TYPE_CHECKING:
    from spark_elastic.worker.state.torch_state import TorchState

# After this many steps without a commit there is a warning, because the loss of a worker would undo all of them.
STEPS_WITHOUT_COMMIT = 1000
# How many stack frames above an optimizer's step are searched for the GradScaler that calls it.
FRAMES = 10

_hooks: list[RemovableHandle] = []


class TrainingChecks:
    """Checks the steps, the commits and the return of one elastic function. Used by the user's thread."""

    def __init__(self, state: TorchState, job: Job, plain_loaders: PlainLoaders | None = None) -> None:
        self._state = state
        # The loaders that may turn out to feed the training; None once that is settled, so that steps cost nothing more.
        self._plain_loaders = plain_loaders
        self._job = job
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._steps = 0
        # Whether a backward pass has reached a probe since the last step, and since the last commit.
        self._is_pending = self._is_reached = False
        self._probes: list[RemovableHandle] = []
        self._carried = CarriedGradients()
        self._warned: set[str] = set()
        self._buffers = UnkeptBuffers()
        self._attributes = UnkeptAttributes()
        # Whether the warning that every rank gets all rows has been issued.
        self._is_told_of_rows = False
        same_inputs.start()
        # By loader outside the State, its position at the last step of an optimizer, and how often that had advanced.
        self._alone: weakref.WeakKeyDictionary[PositionedLoader[object], tuple[tuple[int, int], int]] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self) -> None:
        """Begin a generation, in which gradients are cleared and no optimizer has stepped yet."""
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))
        self._checked.clear()
        reductions.begin()
        self._steps = 0
        self._buffers = UnkeptBuffers()
        self._attributes.begin()
        self._is_pending = self._is_reached = False
        same_inputs.begin()
        if self._plain_loaders is not None:
            self._plain_loaders.begin()
        for probe in self._probes:
            probe.remove()
        self._probes = []
        self._carried.end()
        self._carried = CarriedGradients()
        for optimizer in self._optimizers():
            self._probe(optimizer)

    def end(self) -> None:
        """Stop checking: the elastic function has ended on all ranks."""
        for hook in (*_hooks, *self._probes):
            hook.remove()
        _hooks.clear()
        self._probes = []
        self._carried.end()

    # ------------------------------------------------------------------ steps

    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool = False) -> None:
        """Examine an optimizer's first step in a generation. A closure computes the gradients itself."""
        # An open loop detects changed parameters itself, and other optimizers may step within a part.
        if loops.open is None:
            loops.refuse("an optimizer's step came")
        if optimizer not in self._checked and self._check(optimizer):
            self._checked.add(optimizer)
        if not has_closure:
            self._carried.before_step(optimizer)
        self._steps += 1
        if unkept := self._buffers.look(self._steps, self._shared()):
            self._warn(
                f"the buffer {unkept[0]} changes while it trains, and commits leave it out (persistent=False), so after a loss "
                "it no longer matches the commit: register it with persistent=True, unless forward sets it each time"
            )
        for text in self._attributes.look(optimizer, self._shared, self._local):
            self._warn(text)
        if self._steps == STEPS_WITHOUT_COMMIT and not self._state._commits.index:
            self._warn(
                f"{STEPS_WITHOUT_COMMIT} optimizer steps and no commit: if a worker is lost, all of them are lost. Write "
                "state.commit() after optimizer.step()"
            )
        if deliveries.take_late_batch():
            self._warn(
                "a batch was fetched before a commit and trains after it: at that commit its rows counted as processed, so a "
                "reset would skip them. Call state.commit() after the step and before the next batch is fetched"
            )
        if deliveries.take_batch_again():
            self._warn(
                "a batch that a commit has counted as processed trains again: a reset would skip the rest of the steps on it. "
                "Call state.commit() once per batch, after the last of them"
            )
        world = self._job.world
        are_set = any(model.has_rows_set for model in self._job.models)
        if world is not None and world.size > 1 and deliveries.note_step(are_set):
            self._warn(
                "models are given only some of the rows that the loader delivers, and not the same part of each batch, so that "
                "each rank's mean is weighted by rows that do not count: call model.set_rows(…) with the number of rows that do"
            )
        for loader in iterated_alone:
            self._look_at(loader)
        if self._plain_loaders is not None and world is not None and world.size > 1:
            self._look_at_plain(self._plain_loaders, optimizer)

    @property
    def steps(self) -> int:
        """How often optimizers have stepped in this generation."""
        return self._steps

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the gradients have been used; any that have not belong to another optimizer, which may never use them."""
        self._is_pending = False
        self._carried.after_step(optimizer)

    def _check(self, optimizer: torch.optim.Optimizer) -> bool:
        """Check an optimizer that is about to step. Return whether it needs no further check."""
        parameters = [p for p in stepped(optimizer) if isinstance(p, torch.nn.Parameter)]
        own = list(reachable(self._local()))
        own_parameters = {id(p) for module in own if isinstance(module, torch.nn.Module) for p in module.parameters()}
        if any(value is optimizer for value in own) or all(id(p) in own_parameters for p in parameters):
            return True
        shared = list(reachable(self._shared()))
        is_shared = any(value is optimizer for value in shared)
        wrapped = {id(p) for model in self._job.models for p in model.parameters()}
        if not is_shared and any(id(p) in wrapped for p in parameters):
            around = [
                value for value in shared if isinstance(value, torch.optim.Optimizer) and _holds(value, optimizer)
            ]
            within = f", which is the one within the State's {type(around[0]).__name__}," if around else ""
            raise TrainingCodeError(
                f"an optimizer ({type(optimizer).__name__}){within} steps the parameters of a DistributedDataParallel and is not "
                "in the State itself: after a reset its state would differ from rank to rank. Write state = se.TorchState(…, "
                f"{self._free_name('optimizer')}=optimizer), with the optimizer itself, in a list or dict, or with an "
                "object that holds it and has state_dict"
            )
        trained = [p for p in parameters if p.requires_grad and p.grad is not None]
        bare = [p for p in trained if id(p) not in wrapped and id(p) not in own_parameters]
        # Code in a fixed world may average gradients by hand; fingerprints reveal it if it does not.
        if bare and not self._job.is_fixed:
            self._check_bare(bare, is_shared, bool(wrapped))
        if is_shared:
            self._check_beside(optimizer, shared)
        return bool(trained)

    def _check_bare(self, bare: Sequence[torch.Tensor], is_shared: bool, is_any_wrapped: bool) -> None:
        """Refuse parameters that train although no wrapper averages their gradients, unless that may be intended."""
        names = self._state._parameter_names()
        name = next((names[id(p)] for p in bare if id(p) in names), None)
        if name is None and not is_shared and is_any_wrapped:
            return  # for example a copy of a model that learns in an inner loop
        if _averaged_by_torch(bare) or (not is_any_wrapped and reductions.may_average(bare)):
            return
        what = name or f"a parameter of shape {list(bare[0].shape)}"
        module = "model" if name is None else module_of(name)
        raise not_wrapped(what, module)

    def _check_beside(self, optimizer: torch.optim.Optimizer, shared: Sequence[object]) -> None:
        """Check for a scaler or a scheduler that steps along with an optimizer of the State and is not in the State."""
        scaler = _calling_scaler()
        if scaler is not None and not any(value is scaler for value in (*shared, *reachable(self._local()))):
            raise TrainingCodeError(
                "a GradScaler steps an optimizer of the State and is not in the State itself: after a reset ranks would "
                f"average gradients of different scales. Write state = se.{type(self._state).__name__}(…, "
                f"{self._free_name('scaler')}=scaler)"
            )
        if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
            schedulers = [value for value in (*shared, *reachable(self._local())) if isinstance(value, LRScheduler)]
            # One of a user's own class may not say which optimizer it has.
            if not any(getattr(scheduler, "optimizer", optimizer) is optimizer for scheduler in schedulers):
                self._warn(
                    "a learning rate scheduler of an optimizer in the State is not in the State itself: after a reset it "
                    "does not go back with the weights, and a newcomer's starts over. Write state = "
                    f"se.{type(self._state).__name__}(…, {self._free_name('scheduler')}=scheduler)"
                )

    def _look_at(self, loader: PositionedLoader[object]) -> None:
        """Warn of a loader outside the State that is iterated, and has advanced, while an optimizer steps."""
        place = (loader.epoch, loader.rows_processed)
        last, times = self._alone.get(loader, (None, 0))
        if place != last:
            self._alone[loader] = (place, times + 1)
            if times == 1:
                self._warn(
                    f"a loader ({type(loader).__name__}) that is not in the State trains a model: every rank gets all of "
                    "its rows, so each row counts once per rank, and after a reset it starts over. Write state = "
                    f"se.TorchState(…, {self._free_name('loader')}=loader)"
                )

    def _look_at_plain(self, loaders: PlainLoaders, optimizer: torch.optim.Optimizer) -> None:
        """Warn of a plain loader whose rows, the same on all ranks, feed a wrapped model."""
        if not loaders.may_feed:
            self._plain_loaders = None
            return
        if not loaders.feeds_training(self._job.models):
            return
        wrapped = {id(p) for model in self._job.models for p in model.parameters()}
        if not any(id(p) in wrapped for p in stepped(optimizer)):
            return
        self._plain_loaders = None
        if not self._is_told_of_rows and not any(has_part(value, TakesWorld) for value in reachable(self._shared())):
            self._is_told_of_rows = True
            self._warn(
                "a torch DataLoader that was made above the elastic function may train a model: every rank gets all of "
                "its rows, so each row would count once per rank, and after a reset it starts over. Write loader = "
                "se.data.ElasticDataLoader(dataset, global_batch_size=…) and state = se.TorchState(…, "
                f"{self._free_name('loader')}=loader), or make the DataLoader inside the elastic function, with a "
                "DistributedSampler. Code that takes its rank's rows out of each batch can stay as it is"
            )

    # ------------------------------------------------------------------ commits and the end

    def before_commit(self) -> None:
        """Refuse a commit of rows whose gradients no step has used yet."""
        if self._is_pending:
            self._refuse_pending()
        if self._is_reached:
            self._carried.committed()
        self._is_pending = self._is_reached = False

    def _refuse_pending(self) -> None:
        gradients = [
            p.grad
            for optimizer in self._optimizers()
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        # Gradients that a GradScaler would skip, or that were set to zero, need no step, so they do not count.
        if any(map(is_any_set, gradients)) and all(bool(torch.isfinite(numbers_of(g)).all()) for g in gradients):
            raise TrainingCodeError(
                "a commit came after backward() and before optimizer.step(): gradients are not part of a commit, so the "
                "rows that have been accumulated would be lost after a reset. Write state.commit() after "
                "optimizer.step(); drop unwanted gradients with optimizer.zero_grad() before the commit"
            )

    def inputs_compared(self, everybody: Sequence[int]) -> None:
        """Warn if all ranks train with the same inputs, unless there has been such a warning already."""
        if not same_inputs.read(everybody) or self._job.is_fixed or self._is_told_of_rows:
            return
        self._is_told_of_rows = True
        self._warn(
            f"all ranks gave their models the same inputs at {ENOUGH} commits, so each row counts once per rank, and more "
            "workers make nothing faster. Write loader = se.data.ElasticDataLoader(dataset, global_batch_size=…) and state = "
            f"se.TorchState(…, {self._free_name('loader')}=loader), or divide the rows by se.rank() and se.size()"
        )

    def before_return(self) -> None:
        """Warn of mistakes that show only when the elastic function returns."""
        if self._steps and not self._state._commits.index:
            self._warn(
                f"the elastic function returned after {self._steps} optimizer steps without a commit: a lost worker would "
                "have taken all of them back. Write state.commit() after optimizer.step()"
            )

    # ------------------------------------------------------------------ inside

    def _shared(self) -> dict[str, object]:
        return self._state._values(shared=True)

    def _local(self) -> dict[str, object]:
        return self._state._values(shared=False)

    def _free_name(self, wanted: str) -> str:
        return wanted if wanted not in vars(self._state) else f"{wanted}_2"

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose steps the State keeps."""
        return find_optimizers(self._shared())

    def _probe(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook into a few of an optimizer's parameters, to notice when a backward pass reaches them."""
        probed: dict[int, torch.Tensor] = {}
        for group in optimizer.param_groups:
            trained = [p for p in group["params"] if p.requires_grad and p.is_leaf]
            probed.update((id(p), p) for p in (*trained[:1], *trained[-1:]))
        self._probes += [p.register_post_accumulate_grad_hook(self._noticed) for p in probed.values()]
        self._carried.watch(optimizer, list(probed.values()))

    def _noticed(self, parameter: torch.Tensor) -> None:
        if loops.open is None and shards_in_use() is not None and self._is_wrapped(parameter):
            raise TrainingCodeError(f"backward() was called outside a loop over model.parts(batch). {HOW}")
        self._is_pending = self._is_reached = True

    def _is_wrapped(self, parameter: torch.Tensor) -> bool:
        return any(parameter is each for model in self._job.models for each in model.parameters())

    def _warn(self, text: str) -> None:
        """Warn once, on rank 0, with the user's line as the place."""
        if text not in self._warned and self._job.world is not None and self._job.world.rank == 0:
            self._warned.add(text)
            warnings.warn(text, stacklevel=depth_of_user())


def _checks() -> TrainingChecks | None:
    job = current_job()
    return None if job is None or job.finished else getattr(job.state, "_checks", None)


def _before_step(optimizer: torch.optim.Optimizer, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    if not _is_inner(optimizer) and (checks := _checks()) is not None:
        checks.before_step(optimizer, has_closure=any(map(callable, (*args[1:], *kwargs.values()))))


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if not _is_inner(optimizer) and (checks := _checks()) is not None:
        checks.after_step(optimizer)


def _is_inner(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is a part of one that the hooks see, too."""
    return is_part(optimizer) or is_of_base_class(optimizer)


def _holds(wrapper: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> bool:
    return any(value is optimizer for value in vars(wrapper).values())


def _averaged_by_torch(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether torch wrappers that the user has made in this generation average the gradients of all these."""
    wanted = {id(parameter) for parameter in parameters}
    wrappers = living(torch.nn.parallel.DistributedDataParallel)
    return wanted <= {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}


def _calling_scaler() -> torch.amp.GradScaler | None:
    """Return the GradScaler whose ``step`` is calling this; None if there is none."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return caller
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def module_of(name: str) -> str:
    """Return the place in the State of the module whose parameter has this name, such as ``models['a']``."""
    found = re.match(r"state\.([^.[]+(\[[^]]*\])*)", name)
    assert found is not None, name
    return found[1]


def not_wrapped(what: str, module: str) -> TrainingCodeError:
    """Return the error of a parameter that trains although nothing averages its gradients."""
    attribute = module.partition("[")[0]
    return TrainingCodeError(
        f"{what} trains and its gradients are not averaged: its module is not wrapped, so each rank would train on its "
        f"own rows alone. Write {module} = se.DistributedDataParallel({module}) above the elastic function and give "
        "that to the State. Code that averages gradients by hand calls backward under no_sync() of the wrapped model; a "
        f'module that is each rank\'s own goes into se.TorchState(local={{"{attribute}": {attribute}}})'
    )
