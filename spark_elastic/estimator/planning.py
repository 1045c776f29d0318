"""Turns an estimator's Params into the plan of a fit, and refuses Params that contradict each other. Starts no Spark job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import cloudpickle
import torch
from pyspark.sql.types import IntegralType, StructType
from torch.nn.parameter import is_lazy

from spark_elastic._pickling import dumps, hooks_of
from spark_elastic.data.manifest import Manifest, read_manifest
from spark_elastic.data.randomness import own_generators
from spark_elastic.data.window import ROW_IDS
from spark_elastic.driver.cluster_driver import room_for_workers
from spark_elastic.driver.run import DRIVERS
from spark_elastic.driver.settings import check_sizes
from spark_elastic.estimator.batch_size import enough_workers
from spark_elastic.estimator.dataset import Split
from spark_elastic.estimator.frame import check_orderable, check_scalars, row_shape
from spark_elastic.estimator.layout import Layout
from spark_elastic.estimator.objective import Objective, weighs_labels
from spark_elastic.estimator.params import Parameterized
from spark_elastic.estimator.plan import DataPlan, StepPlan
from spark_elastic.estimator.preflight import ROWS, check_steps, made_up
from spark_elastic.estimator.recipe import Recipe, own_randomness
from spark_elastic.estimator.row_checks import check_rows
from spark_elastic.estimator.schedules import wants_course
from spark_elastic.estimator.shapes import name_of
from spark_elastic.estimator.store import full_url
from spark_elastic.launchers.resources import TaskResources
from spark_elastic.launchers.session import default_sizes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


# 24 shards divide evenly among 1, 2, 3, 4, 6, 8, 12 and 24 workers.
DEFAULT_SHARDS = 24
# The Params of predictors that name columns of ``transform``.
_SCORED = ("predictionCol", "probabilityCol", "rawPredictionCol")


@dataclass(frozen=True)
class Sizes:
    """Numbers of workers: training waits below ``least`` and starts with ``start``; ``most`` are requested from Spark."""

    least: int
    start: int
    most: int


def plan_recipe(params: Parameterized, layout: Layout, default_loss: object) -> Recipe:
    """Copy network and optimizer. Raises ValueError for Params that contradict each other."""
    size, everywhere = params.value("batchSize"), params.value("globalBatchSize")
    if everywhere is not None and size is not None and params.isSet("batchSize"):
        raise ValueError(f"give batchSize={size} or globalBatchSize={everywhere}, not both")
    _check_balance(params, given_batch(params))
    plan_shards(params)
    weighting = _weighting(params, layout)
    if params.value("deterministic") and weighting:
        raise ValueError(
            f"deterministic=True weights the shards of a batch by their rows, and {weighting} by something else; multiply the "
            "loss of each row in a trainStep"
        )
    if params.value("deterministic"):
        _refuse_own_generators(params)
    if _has_class_weights(params):
        if params.value("trainStep") is not None:
            raise ValueError("classWeights are for the loss, and a trainStep computes its own: weight the rows there")
        if params.value("transform") is not None and params.value("classWeights") == "balanced":
            raise ValueError(
                "classWeights='balanced' counts the labels of the data, which the transform may change; give a list or a dict"
            )
    network, optimizer = _copied(_network(params), params.value("optimizer"))
    steps = _steps(params, optimizer)
    _check_course(params, steps)
    objective = _objective(params, layout, params.value("loss") or default_loss)
    if objective is None and steps.train_step is None:
        raise ValueError("give a loss, or a trainStep that computes it")
    with own_randomness(0):
        check_steps(network, steps)
    on_cpu = not params.value("useGpu") and steps.train_step is None
    transform, is_sharded = params.value("transform"), params.value("deterministic")
    return Recipe(
        network, layout, steps, objective, on_cpu, transform, is_weighted=bool(weighting), is_sharded=is_sharded
    )


def added_columns(params: Parameterized, layout: Layout) -> tuple[str, ...]:
    """Return the columns that ``transform`` of the model will add, as far as that is known before the network is called.

    The default for several labels depends on whether it has several outputs.
    """
    if len(layout.labels) > 1 and not params.value("outputCols"):
        return ()
    scored = [params.value(name) for name in _SCORED if params.hasParam(name)]
    return tuple(filter(None, scored)) or layout.outputs


def plan_split(params: Parameterized, indicator: str | None, schema: StructType) -> Split:
    """Return how rows are split for validation. Raises ValueError if the Params contradict each other.

    Raises TypeError for columns of types that do not fit.
    """
    stratify = params.value("stratifyCol") or None
    split = Split(params.value("validationFraction"), indicator, params.value("seed"), stratify)
    if split.fraction and split.indicator:
        raise ValueError(f"give validationFraction={split.fraction} or validationIndicatorCol={indicator!r}, not both")
    if stratify is not None and not split.fraction:
        raise ValueError(f"stratifyCol={stratify!r} is for validationFraction, which takes that share of each class")
    if stratify is not None:
        check_orderable(schema, stratify, "stratifyCol")
    if split.indicator:
        check_scalars(schema, [split.indicator], "validationIndicatorCol")
    return split


def plan_sizes(params: Parameterized, session: SparkSession) -> Sizes:
    """Return minNp, numProc and maxNp. By default, minNp is one worker, and numProc and maxNp are all slots.

    A driver in the cluster leaves fewer slots for workers.
    """
    least, start, most = params.value("minNp"), params.value("numProc"), params.value("maxNp")
    sizes_of = partial(default_sizes, session, resources=plan_resources(params))
    _, default_start, default_most = sizes_of(start, least, most)
    if most is None and DRIVERS[params.value("driver")].own_slots:
        most = room_for_workers(sizes_of, start, least, "maxNp")
    most = most or default_most
    shards = plan_shards(params)
    if shards is not None and params.value("maxNp") is None:
        most = max(min(most, shards), start or 1, least or 1)  # further workers would have nothing to compute
    sizes = Sizes(least or 1, start or least or min(default_start, most), most)
    check_sizes(sizes.least, sizes.start, sizes.most)
    return sizes


def plan_resources(params: Parameterized) -> TaskResources | None:
    """Return the resources of each task; None leaves them to the session."""
    wanted = params.value("resourceProfile")
    return None if wanted is None else TaskResources.of(wanted, "resourceProfile")


def plan_shards(params: Parameterized) -> int | None:
    """Return the number of shards of a batch; None without ``deterministic``. Raises ValueError for Params that do not fit.

    A batch size that ``fit`` picks is at least as large.
    """
    shards, batch = params.value("shards"), given_batch(params)
    if not params.value("deterministic"):
        if shards is not None:
            raise ValueError(f"shards={shards} are for deterministic=True")
        return None
    if "batchSize" in batch:
        raise ValueError(
            f"deterministic=True needs globalBatchSize: with batchSize={batch['batchSize']} on each worker, steps hold other "
            "rows where there are other workers"
        )
    everywhere = batch.get("globalBatchSize")
    shards = shards or min(DEFAULT_SHARDS, everywhere or DEFAULT_SHARDS)
    most = max(params.value(name) or 1 for name in ("minNp", "numProc", "maxNp"))
    if shards < most or (everywhere is not None and shards > everywhere):
        bound = "" if everywhere is None else f" and at most globalBatchSize={everywhere}"
        raise ValueError(f"shards={shards} must be at least maxNp={most}{bound}: a worker computes whole shards")
    return int(shards)


def plan_data(
    params: Parameterized, urls: tuple[str, str | None], storage_options: Mapping[str, object], check: bool
) -> DataPlan:
    """Plan how workers read the data for training and validation at ``urls``. check: whether values have yet to be checked.

    The batch size comes from the Params; if they have none, ``settle_batch`` adds it.
    """
    plan = DataPlan(
        training_url=full_url(urls[0]),
        validation_url=full_url(urls[1]) if urls[1] else None,
        shuffle=params.value("shuffle"),
        seed=params.value("seed"),
        shards=plan_shards(params),
        balance=params.value("balance"),
        engine=params.value("engine"),
        readers=params.value("readers"),
        storage_options=storage_options,
        check=check,
        transform=params.value("transform"),
    )
    return _with_batch(params, plan, given_batch(params))


def given_batch(params: Parameterized) -> dict[str, int]:
    """Return the Param that gives the batch size, by name; empty if ``fit`` is to pick one."""
    for name in ("globalBatchSize", "batchSize"):
        if (rows := params.value(name)) is not None:
            return {name: rows}
    return {}


def settle_batch(
    params: Parameterized, data: DataPlan, sizes: Sizes, batch: Mapping[str, int]
) -> tuple[DataPlan, Sizes]:
    """Return the plans of a fit whose Params leave the batch size open: it is the run's ``batch``, a Param by name.

    There are at most as many workers as have a fair share of a global batch, unless Params request more. Raises ValueError if a
    continuing run has a ``batchSize``, and the Params want a ``balance``.
    """
    _check_balance(params, batch)
    data, everywhere = _with_batch(params, data, batch), batch.get("globalBatchSize")
    if everywhere is not None and params.value("maxNp") is None:
        wanted = max(params.value(name) or 1 for name in ("minNp", "numProc"))
        most = min(sizes.most, max(enough_workers(everywhere), wanted))
        sizes = replace(sizes, start=min(sizes.start, most), most=most)
    return data, sizes


def adapts_np(params: Parameterized, data: DataPlan) -> bool:
    """Whether the fit may train with fewer workers if that is faster.

    With a ``batchSize`` per worker, the rows of a step would depend on the number of workers. With ``zeroRedundancy``, fewer
    workers would have to hold larger parts of the optimizer's state.
    """
    return bool(params.value("adaptiveNp") and data.global_batch_size and not params.value("zeroRedundancy"))


def _with_batch(params: Parameterized, data: DataPlan, batch: Mapping[str, int]) -> DataPlan:
    size = batch.get("batchSize")
    return replace(
        data,
        batch_size=size,
        global_batch_size=batch.get("globalBatchSize"),
        validation_batch_size=params.value("valBatchSize") or size,
    )


def made_up_batch(layout: Layout, schema: StructType) -> dict[str, torch.Tensor] | None:
    """Make a batch of zeros in the shapes of the schema; None if the schema lacks some shapes."""
    shapes = {name: row_shape(schema[name]) for name in layout.columns}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    whole = {name for name in known if isinstance(schema[name].dataType, IntegralType)}
    return made_up(known, whole) if len(known) == len(shapes) else None


def first_rows(layout: Layout, data: DataPlan) -> tuple[dict[str, torch.Tensor], int, DataPlan]:
    """Read a few training rows; return them, the total number of rows, and the plan with the columns that are jagged.

    Raises ``DataError`` like the loader, and for NaN; and ``ValueError`` for columns of names that the loader adds itself.
    """
    taken = [name for name in layout.columns if data.check and name in ROW_IDS]
    if taken:
        raise ValueError(
            f"column {taken[0]!r} cannot be trained on by fit_on_parquet, which counts rows in a column of this name: rename it "
            "in the files, or use fit"
        )
    arguments = {"batch_size": ROWS, "shuffle": False, "prefetch": 1, "pin_memory": False}
    loader = data.open(data.training_url, columns=layout.columns, **arguments)
    try:
        if data.validation_url is not None:
            held_back = read_manifest(data.validation_url, storage_options=dict(data.storage_options) or None)
            data = replace(data, jagged=_jagged_in(loader.manifest, held_back))
            loader.jagged |= data.jagged
        total = loader.rows_total
        batch = next(iter(loader), None)
    finally:
        loader.close()
    if batch is None:
        raise ValueError(f"{data.training_url} has no rows")
    if data.check:
        check_rows(batch, layout.columns, loader)
    return {name: values if values.is_nested else values[:ROWS] for name, values in batch.items()}, total, data


def _jagged_in(*manifests: Manifest) -> frozenset[str]:
    """Return the list columns of which the rows of several datasets together do not all have one length."""
    lengths: dict[str, set[int | None]] = {}
    for manifest in manifests:
        for name, length in manifest.list_lengths:
            lengths.setdefault(name, set()).add(length)
    return frozenset(name for name, found in lengths.items() if None in found or len(found) > 1)


def _copied(network: torch.nn.Module, optimizer: T) -> tuple[torch.nn.Module, T]:
    """Copy a network, and an optimizer that may have its parameters, as workers get them."""
    if any(map(is_lazy, (*network.parameters(), *network.buffers()))):
        raise ValueError(
            "the network has lazy layers, which learn their sizes from the first batch: call it on a batch before the fit"
        )
    try:
        packed = dumps((network, optimizer))
    except Exception as error:
        if any(hasattr(part, "parametrizations") for part in network.modules()):
            raise ValueError(
                "torch cannot pickle a network with torch.nn.utils.parametrizations, and workers get it pickled: compute the "
                "weight in forward, or use torch.nn.utils.weight_norm or spectral_norm"
            ) from error
        hooked = [name for name, parameter in network.named_parameters() if hooks_of(parameter)]
        hint = f" (the network has hooks on parameters: {', '.join(hooked[:3])})" if hooked else ""
        raise ValueError(f"workers get the network pickled, which fails: {error}{hint}") from error
    copied: tuple[torch.nn.Module, T] = cloudpickle.loads(packed)
    return copied


def _network(params: Parameterized) -> torch.nn.Module:
    model: torch.nn.Module | None
    model, make = params.value("model"), params.value("modelFn")
    if (model is None) == (make is None):
        raise ValueError("give exactly one of model and modelFn")
    if make is None:
        if params.value("modelParams"):
            raise ValueError(f"modelParams={params.value('modelParams')} are for modelFn, and model is given; give one")
        return model
    if isinstance(params.value("optimizer"), torch.optim.Optimizer):
        raise ValueError("an optimizer instance has the parameters of another model; with modelFn give its class")
    with own_randomness(params.value("seed")):
        made = make(**(params.value("modelParams") or {}))
    if not isinstance(made, torch.nn.Module):
        raise TypeError(f"modelFn must return a torch.nn.Module, and returned a {type(made).__name__}")
    return made


def _steps(
    params: Parameterized, optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None
) -> StepPlan:
    arguments = dict(params.value("optimizerParams") or {})
    if params.value("learningRate") is not None:
        arguments["lr"] = params.value("learningRate")
    if isinstance(optimizer, torch.optim.Optimizer) and arguments:
        raise ValueError("optimizerParams and learningRate are for an optimizer's class; the instance has its own")
    if isinstance(optimizer, torch.optim.Optimizer) and params.value("zeroRedundancy"):
        raise ValueError(
            "zeroRedundancy=True makes an optimizer for some parameters on each worker: give its class, not an instance"
        )
    if params.value("schedulerParams") and params.value("scheduler") is None:
        raise ValueError(f"schedulerParams={params.value('schedulerParams')} need a scheduler, and none is given")
    return StepPlan(
        optimizer=optimizer or torch.optim.Adam,
        optimizer_arguments=arguments,
        zero_redundancy=params.value("zeroRedundancy"),
        scheduler=params.value("scheduler"),
        scheduler_arguments=params.value("schedulerParams") or {},
        scheduler_interval=params.value("schedulerInterval"),
        passes=params.value("backwardPassesPerStep"),
        clip_norm=params.value("gradientClipNorm"),
        clip_value=params.value("gradientClipValue"),
        precision=params.value("mixedPrecision"),
        train_step=params.value("trainStep"),
    )


def _objective(params: Parameterized, layout: Layout, loss: object) -> Objective | None:
    metrics = params.value("metrics") or {}
    if loss is None:
        if metrics:
            raise ValueError(
                f"metrics {list(metrics)} are measured where a loss meets outputs and labels: give loss, too, with the trainStep"
            )
        return None
    if not layout.labels:
        raise ValueError("give labelCols: the loss needs labels")
    losses = tuple(loss) if isinstance(loss, (list, tuple)) else (loss,)
    weights = tuple(params.value("lossWeights") or ())
    labels = len(layout.labels)
    if len(losses) not in (1, labels):
        raise ValueError(f"give one loss, or one for each label: {len(losses)} losses, labels {list(layout.labels)}")
    if weights and len(weights) != labels:
        raise ValueError(
            f"lossWeights must have one number for each label of {list(layout.labels)}, not {list(weights)}"
        )
    _check_losses(losses, labels, custom=params.value("trainStep") is not None)
    objective = Objective(losses, weights, metrics, labels)
    objective.check_names(layout)
    return objective


def _check_losses(losses: Sequence[object], labels: int, *, custom: bool) -> None:
    """Refuse losses with trainable parameters, and losses of several labels that divide by weights of their own."""
    for one in losses:
        if isinstance(one, torch.nn.Module) and any(parameter.requires_grad for parameter in one.parameters()):
            raise ValueError(
                f"{name_of(one)} has parameters of its own, which no fit trains: make them parameters of the network and compute "
                "the loss from them in a trainStep, or call requires_grad_(False) on them"
            )
    if labels > 1 and not custom and any(map(weighs_labels, losses)):
        raise ValueError(
            "weight= and ignore_index= of a cross entropy divide by the weights of its own labels, and rows have one weight for "
            "all losses: with several labels, weigh within a trainStep"
        )


def _refuse_own_generators(params: Parameterized) -> None:
    """Refuse random generators that no shard seeds, and that continue from shard to shard on each worker."""
    for name in ("loss", "transform", "trainStep"):
        for generator in own_generators(params.value(name)):
            raise ValueError(
                f"deterministic=True computes each shard of a batch with random numbers of its own, and {name} draws from a "
                f"{type(generator).__name__} that goes on from shard to shard: draw from the generators of torch, numpy or "
                "random themselves, which are seeded for each shard"
            )


def _check_course(params: Parameterized, steps: StepPlan) -> None:
    """Refuse a per-step scheduler whose number of steps is unknown, or that would be stepped once per epoch."""
    if not wants_course(steps):
        return
    name = name_of(steps.scheduler)
    if steps.scheduler_interval != "step":
        raise ValueError(f"{name} counts steps: give schedulerInterval='step'")
    if "batchSize" in given_batch(params) and params.value("stepsPerEpoch") is None:
        raise ValueError(
            f"{name} has to know the steps of an epoch, which with batchSize depend on the number of workers: give "
            "globalBatchSize, or stepsPerEpoch, or total_steps in schedulerParams"
        )


def _check_balance(params: Parameterized, batch: Mapping[str, int]) -> None:
    if params.value("balance") is not None and "batchSize" in batch:
        raise ValueError(
            f'balance="{params.value("balance")}" needs globalBatchSize, of which workers take unequal shares: with '
            f"batchSize={batch['batchSize']} each takes as many rows as the others"
        )


def _has_class_weights(params: Parameterized) -> bool:
    return params.hasParam("classWeights") and params.value("classWeights") is not None


def _weighting(params: Parameterized, layout: Layout) -> str:
    """Return the Param that gives rows different weights in the loss; empty if there is none."""
    if layout.weight is not None:
        return f"weightCol={layout.weight!r}"
    if _has_class_weights(params):
        return f"classWeights={params.value('classWeights')!r}"
    loss = params.value("loss")
    by_labels = [one for one in (loss if isinstance(loss, (list, tuple)) else (loss,)) if weighs_labels(one)]
    return f"{name_of(by_labels[0])}(weight=, ignore_index=)" if by_labels and params.value("trainStep") is None else ""
