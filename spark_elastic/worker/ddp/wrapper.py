"""DistributedDataParallel: torch's own wrapper, rebuilt for every generation around the same module and parameters."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spark_elastic.checkpoint.skeleton import WRAPPER_MARK
from spark_elastic.data.deliveries import Delivery, deliveries, weight_of_rank
from spark_elastic.data.loader import RowSource
from spark_elastic.errors import SparkElasticError, TrainingCodeError, WorkerLostError
from spark_elastic.worker.checks.early_gradients import warn_of_early_gradients
from spark_elastic.worker.checks.kept_losses import warn_of_kept_losses
from spark_elastic.worker.checks.same_inputs import same_inputs
from spark_elastic.worker.checks.user_frames import depth_of_user
from spark_elastic.worker.ddp.backward import wait_in_backward
from spark_elastic.worker.ddp.boundaries import (
    mark_outputs,
    marked_inputs,
    refuse_changed_inputs,
    refuse_transforms,
    tensors_given,
)
from spark_elastic.worker.ddp.comm_hook import CommHook
from spark_elastic.worker.ddp.rows_by_hand import RowsByHand
from spark_elastic.worker.ddp.trained import Content, check_agreement, describe_change
from spark_elastic.worker.ddp.weighting import weighting
from spark_elastic.worker.job import current_job
from spark_elastic.worker.shards.loops import loops
from spark_elastic.worker.shards.parts import Parts
from spark_elastic.worker.shards.sharding import Sharding, shards_in_use
from spark_elastic.worker.world import World

# What to do about parameters without gradients.
_FIND_UNUSED = (
    "Write se.DistributedDataParallel(model, find_unused_parameters=True), for a LightningState find_unused_parameters=True, "
    "for an ElasticTrainer ddp_find_unused_parameters=True in its arguments, for an estimator findUnusedParameters=True, or have "
    "such parameters require no gradients"
)
_ONE_BACKWARD = (
    "With find_unused_parameters=True, this comes from several backward passes in a step, of which one does not reach all of "
    "them, as that of a gradient penalty: add the losses up, and call backward() once"
)
_Torchs = nn.parallel.DistributedDataParallel
_ARGUMENTS = inspect.signature(_Torchs.__init__).parameters
# Attributes of torch's wrapper that this one lacks, and why.
_MISSING = {
    "join": "the loaders of a State give all ranks equally many batches, some of weight 0 where rows are short",
    "_register_builtin_comm_hook": "call register_comm_hook with fp16_compress_hook of torch.distributed.algorithms",
    "_set_static_graph": "give static_graph=True where the model is wrapped",
}


class _Inner(nn.parallel.DistributedDataParallel):
    """Torch's wrapper of one generation."""

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        raise SparkElasticError(
            "this torch wrapper ends with the generation, and a hook that is registered with it ends, too; call "
            "register_comm_hook of the spark_elastic.DistributedDataParallel around it"
        )


@dataclass(slots=True)
class _Here:
    """What a wrapped model has in one world. It also keeps torch's wrapper from becoming a submodule of ours."""

    world: World | None = None
    ddp: _Inner | None = None
    # Set if the State's loader was made with shards=. Torch's wrapper is not used then.
    sharding: Sharding | None = None
    by_hand: RowsByHand | None = None
    # What is trained now, and what torch's wrapper was made for.
    content: Content | None = None
    reduced: Content | None = None
    # The last backward pass in which torch's wrapper was made ready to reduce; -1 after a forward.
    backward_pass: int = -1
    was_reduced: bool = False
    rows_given: set[int] = field(default_factory=set)


class _Call:
    """One forward of a wrapped model: its share of a global batch, and the reduction to which its backward belongs."""

    def __init__(self, model: DistributedDataParallel, inputs: list[torch.Tensor], world: World) -> None:
        here, by_hand = model._here, model._here.by_hand
        self._model = model
        # A weak reference: a loss that user code keeps must not keep the reducer alive, which would reduce later passes, too.
        self._ddp = None if here.ddp is None else weakref.ref(here.ddp)
        self._syncs = model._syncs
        self._by_hand = None if by_hand is None or by_hand.was_used else by_hand
        self._share = 1.0
        self._has_changed_inputs = False
        self.delivery: Delivery | None = None
        if by_hand is None:
            self.delivery = deliveries.find(inputs)
            rows = () if model._row_source is None else tuple(model._row_source.batch_rows)
            if self.delivery is not None:
                self._share = self.delivery.weight
                self.delivery.give(inputs)
            elif len(rows) == world.size and any(rows):
                self._share = weight_of_rank(rows, world.rank)

    @property
    def weight(self) -> float:
        by_hand = self._by_hand or self._model._here.by_hand
        if by_hand is None:
            return self._share
        by_hand.was_used = True
        return by_hand.weight()

    def differs(self) -> None:
        if self._has_changed_inputs:
            refuse_changed_inputs(self._model.module)
        warn_of_kept_losses(self._model.module)

    def changes_inputs(self) -> None:
        self._has_changed_inputs = True

    def enter_backward(self) -> None:
        """Make torch reduce gradients in this pass. By itself, torch does so only in the first pass after a forward."""
        here, task = self._model._here, torch._C._current_graph_task_id()
        ddp = None if self._ddp is None else self._ddp()
        if not self._syncs or here.backward_pass == task or ddp is None or ddp is not here.ddp:
            return
        if -1 < here.backward_pass <= weighting.accumulated and not ddp.static_graph:
            if ddp.find_unused_parameters:
                raise SparkElasticError(
                    "with find_unused_parameters=True gradients are reduced in one backward pass after each forward: sum the "
                    "losses, or call backward before the next forward"
                )
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([])
        here.backward_pass, here.was_reduced = task, False

        def note_end() -> None:
            here.was_reduced = weighting.accumulated >= task

        torch.autograd.Variable._execution_engine.queue_callback(note_end)
        if here.world is not None:
            wait_in_backward(here.world)


# All wrappers of this process that are still alive.
wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class DistributedDataParallel(nn.Module):
    """Wraps ``module`` so that backward leaves the gradient of the global batch on every rank.

    Args:
        module: the module to train.
        ddp_kwargs: arguments of torch's wrapper, such as ``find_unused_parameters=True``.

    The wrapped parameters stay the same objects in every generation, so optimizers survive resets. Buckets and hooks are torch's
    and overlap with backward. Outside a job, before the first generation and in a world of one, it just calls the module.
    ``state_dict`` keys begin with ``module.``, as torch's do. The wrapper and the module can both be given to ``torch.compile``,
    and are compiled once for all generations.

    The gradient is the mean over the rows of the global batch, even if ranks have different numbers of rows: what a backward
    pass adds to a parameter is weighted by this rank's share of the batch that the *forward* was given. A forward recognizes
    its batch by the tensors that loaders of the State delivered, or views of them; a tensor that comes with one batch after
    another says nothing. A forward of other tensors (converted ones, noise) belongs to the fetched batch that has not been
    through a model yet; of several, to the one with the same number of rows. If the share is still ambiguous, the forward
    raises ``DataError``. Batches may therefore be fetched ahead, gradients accumulate under ``no_sync()`` exactly as in one
    process that calls ``backward`` for each global batch, and several models and loaders can take part in one loss.
    ``set_rows`` overrides all this.

    Parameters that begin or cease to require gradients, or are replaced, are reduced accordingly from the next forward on. All
    ranks have to make the same change at the same step, or the job ends with ``RanksDifferError``.
    """

    def __init__(self, module: nn.Module, **ddp_kwargs: object) -> None:
        """Wrap the module itself, not a copy, and register it with the job, if there is one.

        Under ``run(elastic=False)`` this is a collective, which gives all ranks the parameters of rank 0 and blocks until they
        have them. Raises ``TypeError`` for anything but a module and for an unknown argument, ``ValueError`` for an argument of
        torch's that users cannot choose, and ``SparkElasticError`` inside the elastic function.
        """
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        for name in ("process_group", "init_sync", "device_ids", "output_device"):
            if name in ddp_kwargs:
                raise ValueError(f"{name} is spark_elastic's to choose: it changes with the generation")
        for name in ddp_kwargs:
            if name not in _ARGUMENTS:
                raise TypeError(f"DistributedDataParallel() got an unexpected keyword argument {name!r}")
        self.module = module
        self._ddp_kwargs: dict[str, Any] = ddp_kwargs
        self._row_source: RowSource | None = None
        self._comm_hook: CommHook | None = None
        self._syncs = True
        self._here = _Here()
        loops.abandon()  # one that an error has ended, as in a notebook in which the cell is now run again
        wrappers.add(self)
        job = current_job()
        if job is not None:
            _leave_out_of_graphs()  # this import takes time once per process, and at this point no rank waits for another
            job.add_model(self)

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            # ``load_checkpoint`` looks for this mark in order to return the weights without the prefix ``module.``.
            destination._metadata[prefix[:-1]][WRAPPER_MARK] = True

    def attach(self, world: World) -> None:
        """Build torch's wrapper for a world. All ranks hold the same parameters already, so nothing is sent."""
        self._leave()
        self._here.world = world
        if world.size > 1:
            self._build()
            _leave_out_of_graphs()

    def compare(self, models: Sequence[DistributedDataParallel]) -> None:
        """Compare among all ranks what requires gradients in ``models``, including this one. This is a collective.

        Raises ``RanksDifferError`` on all ranks if they differ, and ``WorkerLostError``.
        """
        world = self._here.world
        if world is not None and world.size > 1:
            check_agreement(models, world)

    def detach(self) -> None:
        """Drop torch's wrapper, which holds the old process group and is useless after a failed backward."""
        self._leave()
        weighting.clear()

    def follow_rows(self, source: RowSource | None) -> None:
        """Weight forwards by the rows that ``source`` reports for each rank, unless one of our loaders delivered the batch."""
        self._row_source = source

    def shard(self, sharding: Sharding | None) -> None:
        """Train in loops over ``parts`` from now on; with None, no longer."""
        if sharding is not None and self._here.ddp is not None:
            weighting.clear()
            self._here.ddp = None
        self._here.sharding = sharding

    def parts(self, batch: object) -> Parts:
        """Return an iterable of the shards of a batch that this rank computes. Requires a loader made with ``shards=``.

            optimizer.zero_grad()
            for part in state.model.parts(batch):
                loss_fn(state.model(part["x"]), part["y"]).backward()      # a mean over the part's rows
            optimizer.step()

        Each part is the batch of one shard: the same rows in every world, with random numbers of its own. After the loop, the
        gradients and buffers of all wrapped models have the same bits in every world, as if the shards had been computed one
        after the other. They are added to gradients that were there before. If the loop calls ``parts.note(loss=loss)``,
        ``parts.means["loss"]`` is afterwards the mean over all rows of the global batch. Ranks have different numbers of parts,
        so there must be no collective, no optimizer step and no commit inside the loop, and it must not be left early.
        """
        if self._here.sharding is None:
            raise SparkElasticError(
                "model.parts(batch) belongs in an elastic function whose State has the model and, as its loader, one that was "
                "made with shards=: se.data.ParquetLoader(url, global_batch_size=…, shards=…)"
            )
        return self._here.sharding.parts(self, batch)

    def set_rows(self, rows: float) -> None:
        """Set the weight of this rank's part of a global batch: its number of unmasked rows, say, or of tokens for a token mean.

        This is a small collective, so all ranks have to call it. It applies to the following forwards, until the next call or
        commit, and to a preceding forward that has had neither a call of its own nor a ``backward`` yet. Zero is allowed unless
        all ranks give it.
        """
        try:
            weight = float(rows)
        except (TypeError, ValueError):
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise ValueError(f"rows must be a number from 0 on, not {rows!r}")
        if self._here.sharding is not None:
            raise SparkElasticError(
                "set_rows is a collective, and ranks compute different numbers of shards: with shards= a part weighs its rows"
            )
        world = self._here.world
        if world is not None and world.size > 1:
            self._here.by_hand = RowsByHand(weight, world)

    @property
    def has_rows_set(self) -> bool:
        """Whether ``set_rows`` weights this step."""
        return self._here.by_hand is not None

    @property
    def rows_given(self) -> set[int]:
        """The numbers of rows of the tensors that the last forward with gradients was given; empty if there was none."""
        return self._here.rows_given

    @property
    def was_reduced(self) -> bool:
        """Whether a pass has reduced gradients since the last forward; see ``weighting.Model``."""
        return self._here.was_reduced

    def forget_rows(self) -> None:
        """Forget the weight from ``set_rows``, because a step is over. The State calls this at each commit.

        Warns if no backward pass has used the weight.
        """
        here = self._here
        if here.by_hand is not None and not here.by_hand.was_used:
            warnings.warn(
                f"set_rows({here.by_hand.rows:g}) had no effect, as no backward() came between it and the commit: call it "
                "before the backward() of the batch that it is about",
                stacklevel=depth_of_user(),
            )
        here.by_hand, here.was_reduced = None, False
        weighting.forget()

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Let ``hook(state, bucket)`` reduce gradients, as with torch's method, in this and in every later generation.

        All ranks have to call it, above the elastic function or in it; another call replaces the hook. ``state`` may be a
        function (or a class, or a ``functools.partial``), which is then called in each world and returns the state. A state of
        torch's own hooks, such as ``PowerSGDState``, is reset in each generation to what it was when given. Any other object is
        passed on unchanged; give a function instead if ranks that hold different objects, such as newcomers, would send
        different things. Gradients arrive at the hook weighted by rows, so that their mean over ranks is the mean over rows.
        """
        self._comm_hook = CommHook(state, hook)
        if self._here.sharding is not None:
            raise SparkElasticError("a communication hook is not called with shards=; leave register_comm_hook out")
        if self._here.ddp is not None:
            self._build()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally. As with torch's wrapper, the next backward outside this context reduces them."""
        before = self._syncs
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward passes of later forwards reduce gradients."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._syncs = bool(value)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the module. Raises ``WorkerLostError`` if the world is known to be broken."""
        world, sharding = self._here.world, self._here.sharding
        if sharding is not None:
            return sharding.forward(self, args, kwargs)
        if world is None or world.size == 1:
            return self.module(*args, **kwargs)
        if world.is_broken():
            raise WorkerLostError(f"generation {world.generation} is broken")
        inputs = tensors_given(args, kwargs)
        call = self._begin(inputs, world)
        if call is not None and any(value.requires_grad for value in inputs):
            with marked_inputs((args, kwargs), call) as (args, kwargs):
                return self._call_module(args, kwargs, call, world)
        return self._call_module(args, kwargs, call, world)

    def _call_module(self, args: Any, kwargs: Any, call: _Call | None, world: World) -> object:
        ddp = self._here.ddp
        if ddp is None or (call is None and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        ddp.require_backward_grad_sync = self._syncs
        try:
            outputs = ddp(*args, **kwargs)
        except RuntimeError as error:
            if world.is_broken():
                raise world.lost(error) from error
            if "finished reduction in the prior iteration" in str(error):
                # This mistake ends the job. Otherwise the error would recur in every world until a single rank is left.
                advice = _ONE_BACKWARD if self._ddp_kwargs.get("find_unused_parameters") else _FIND_UNUSED
                raise TrainingCodeError(
                    f"{type(self.module).__name__} has parameters that the last step did not use, so ranks did not reduce their "
                    f"gradients. {advice}"
                ) from error
            raise
        if call is None:
            return outputs
        if self._syncs:
            self._here.backward_pass = -1
        return mark_outputs(outputs, call, call.delivery)

    def _begin(self, inputs: list[torch.Tensor], world: World) -> _Call | None:
        """Begin a forward through which gradients may flow back. Return None if no gradient can."""
        if not torch.is_grad_enabled():
            deliveries.see(inputs)
            return None
        content = self.follow_content()
        world.froze("" if content.trainable else type(self.module).__name__)
        if not content.trainable:
            return None
        refuse_transforms(self.module, inputs)
        self._here.rows_given, self._here.was_reduced = {len(value) for value in inputs if value.dim()}, False
        call = _Call(self, inputs, world)
        if call.delivery is None:
            same_inputs.note(inputs)
        weighting.begin(call)
        return call

    def follow_content(self) -> Content:
        """Return which parameters are trained now. If they have changed, all ranks compare the change in a collective."""
        here, content = self._here, self._here.content
        if content is None or not content.is_current():
            here.content = content = Content(self.module)
            if content.trainable and not content.is_trained_as(here.reduced):
                if here.world is not None:
                    # The driver is told before the collective, which a rank without this change would not enter.
                    here.world.compares(describe_change(self.module, here.reduced))
                self._build()
                self.compare([self])
            elif content.trainable and not content.is_where(here.reduced):
                self._build()  # without other ranks: a newcomer's model moves to its GPU, where those of survivors already are
        return content

    def _build(self) -> None:
        """Make torch's wrapper for the parameters that require gradients now."""
        here, content = self._here, Content(self.module)
        trainable = content.trainable
        self._drop_wrapper()
        here.content = here.reduced = content
        if not trainable or here.sharding is not None or shards_in_use() is not None:
            return
        device = trainable[0].device
        ids = [device] if device.type == "cuda" else None
        if ids is not None and here.world is not None and not here.world.group.runs_ahead:
            warn_of_early_gradients()
        ddp = _Inner(self.module, device_ids=ids, init_sync=False, **self._ddp_kwargs)
        if self._comm_hook is not None:
            self._comm_hook.register(ddp)
        here.ddp = ddp
        if any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules()):
            weighting.weigh_at_outputs()
        own = set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        named = self.module.named_parameters()
        weighting.hook((each for name, each in named if each.requires_grad and name not in own), self)

    def _leave(self) -> None:
        loops.abandon()
        self._drop_wrapper()
        self._here = _Here()

    def _drop_wrapper(self) -> None:
        """Let go of torch's wrapper. torch.compile may hold it for a while, and its reducer would go on to reduce gradients."""
        if self._here.ddp is not None:
            for part in ("reducer", "logger"):
                vars(self._here.ddp).pop(part, None)
        self._here.ddp = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _MISSING or (hasattr(_Torchs, name) and not name.startswith("__")):
                reason = _MISSING.get(
                    name, "it belongs to torch's wrapper of one generation, which ends with the next loss"
                )
                raise AttributeError(f"spark_elastic.DistributedDataParallel has no {name}: {reason}") from None
            raise

    def __getstate__(self) -> dict[str, object]:
        """Return the state for copies and pickles, which contain the module and nothing of the world."""
        return {**self.__dict__, "_here": _Here(), "_row_source": None}


@functools.cache
def _leave_out_of_graphs() -> None:
    """Keep ``torch.compile`` from tracing this package, whose weights and groups change. User code is still compiled."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "spark_elastic":
            continue
        classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
        for value in (member for owner in (module, *classes) for member in vars(owner).values()):
            function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
            if inspect.isfunction(function) and function.__module__ == name:
                _skip(function.__code__)


def _skip(code: types.CodeType) -> None:
    torch._dynamo.eval_frame.skip_code(code)
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType):
            _skip(nested)
