"""TorchEstimator, and the base of all estimators: from a DataFrame through an elastic training run to a model."""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

import spark_elastic
from spark_elastic._pickling import dumps
from spark_elastic._saved_names import saved_as
from spark_elastic.driver.run import DRIVERS
from spark_elastic.estimator import slots
from spark_elastic.estimator.accessors import TorchEstimatorAccessors
from spark_elastic.estimator.batch_size import pick_batch_size, width_of
from spark_elastic.estimator.converters import inputs, names, text
from spark_elastic.estimator.dataset import FILES_A_WORKER, Wanted, check_names, identity_of, is_written, written
from spark_elastic.estimator.fitted import trained_network
from spark_elastic.estimator.frame import (
    Facts,
    check_case,
    check_columns,
    check_free,
    check_scalars,
    is_fractional,
    is_index,
    is_vector,
    labels_of,
    with_fields,
)
from spark_elastic.estimator.identity import identity_of_files
from spark_elastic.estimator.layout import Input, Layout, outputs_of, positional_inputs
from spark_elastic.estimator.learning_rate import LearningRates, find_learning_rate
from spark_elastic.estimator.model import ElasticModel, TorchModel
from spark_elastic.estimator.objective import Loss, Objective, check_united
from spark_elastic.estimator.params import CATEGORICAL_COLS, FEATURE_COLS, TrainingParams, param
from spark_elastic.estimator.persistence import EstimatorReader, EstimatorWriter
from spark_elastic.estimator.plan import DataPlan, Trained, TrainingPlan
from spark_elastic.estimator.planning import (
    Sizes,
    adapts_np,
    added_columns,
    first_rows,
    given_batch,
    made_up_batch,
    plan_data,
    plan_recipe,
    plan_resources,
    plan_shards,
    plan_sizes,
    plan_split,
    settle_batch,
)
from spark_elastic.estimator.preflight import widths_of, with_extremes
from spark_elastic.estimator.recipe import Recipe, own_randomness
from spark_elastic.estimator.row_checks import (
    FLOAT_INDEXES,
    merged_index,
    not_a_class,
    not_an_index,
    not_whole,
    refused_weights,
)
from spark_elastic.estimator.runs import (
    VERSION,
    RunRecord,
    check_run,
    describe_callbacks,
    describe_params,
    forget_run,
    record_run,
)
from spark_elastic.estimator.schedules import wants_epochs
from spark_elastic.estimator.sessions import is_local, master_of, prepare_python
from spark_elastic.estimator.store import Store
from spark_elastic.estimator.temporary_store import temporary_store
from spark_elastic.estimator.training import train
from spark_elastic.launchers.session import check_session_settings, known_slots, parallelism
from spark_elastic.protocol.event_format import read_event
from spark_elastic.protocol.records import WorldSized

logger = logging.getLogger("spark_elastic")


class ElasticEstimator(Estimator[ElasticModel], TrainingParams, MLReadable["ElasticEstimator"], MLWritable):
    """Trains a torch network on a DataFrame, elastically. Subclasses define the roles of the columns."""

    # ------------------------------------------------------------------ for subclasses

    def _layout(self, schema: StructType) -> Layout:
        """Return the roles of the columns. Raises ValueError for missing columns and TypeError for columns of a wrong type."""
        raise NotImplementedError

    def _layout_of_names(self) -> Layout:
        """Return the roles of the columns for a dataset whose schema this process does not know."""
        raise NotImplementedError

    def _default_loss(self) -> Loss | None:
        return None

    def _make_model(self, layout: Layout) -> ElasticModel:
        """Make a model without a network."""
        raise NotImplementedError

    def _class_weights(self, model: ElasticModel, data: DataPlan) -> tuple[float, ...]:
        """Return the weights of the classes; empty if all weights are equal."""
        return ()

    # ------------------------------------------------------------------ fit

    def _fit(self, dataset: DataFrame) -> ElasticModel:
        if not isinstance(dataset, DataFrame):
            raise TypeError(f"fit takes a Spark DataFrame, not {type(dataset)}")
        session = dataset.sparkSession
        prepare_python(session)
        if dataset.isStreaming:
            raise ValueError("fit takes a batch DataFrame, not a streaming one")
        splits = (self.value("validationIndicatorCol"), self.value("stratifyCol"))
        dataset = with_fields(dataset, [*self._layout_of_names().columns, *splits])
        schema = dataset.schema
        layout = self._layout(schema)
        check_names(layout.columns)
        check_case(dataset, layout.columns)
        check_free(dataset, added_columns(self, layout))
        recipe = plan_recipe(self, layout, self._default_loss())
        check_session_settings(session, bool(self.value("useGpu")), plan_resources(self))
        sizes, shards = plan_sizes(self, session), plan_shards(self)
        split = plan_split(self, self.value("validationIndicatorCol") or None, schema)
        parts = shards or max(FILES_A_WORKER * sizes.most, parallelism(session))
        wanted = Wanted(dataset, layout.columns, split, parts, shards is not None, layout.described)
        made_up = made_up_batch(layout, schema)
        if made_up is not None:
            recipe = recipe.checked_on(made_up, labels_known=False)
        with self._opened_store(session) as store:
            resumable = self.value("runId") is not None
            # Data in a temporary store are never looked up again, so rows need not be hashed.
            known_again = resumable or (self.value("reuseData") and not store.temporary)
            identity = identity_of(wanted) if known_again else f"new-{secrets.token_hex(8)}"
            record = self._record(recipe, identity)
            # The same rows by another plan, with other settings, or in another release of Spark are the run's data, too.
            known = check_run(store, record, partial(is_written, wanted, store)) if resumable else None
            with written(
                wanted,
                store,
                identity,
                reuse=self.value("reuseData"),
                known=known.data_url if known else None,
                keep_on_failure=resumable,
            ) as data:
                _check_facts(schema, layout, data.facts)
                record = replace(record, data=data.identity, data_url=data.url).with_batch(known.batch if known else {})
                validation = store.worker_url(data.validation_url) if data.validation_url else None
                urls = store.worker_url(data.training_url), validation
                plan = plan_data(self, urls, store.storage_options, False)
                model = self._train(session, store, record, plan, recipe, sizes, data.facts)
        return model.describe(label_metadata=labels_of(schema[layout.labels[0]]) if layout.labels else {})

    def fit_on_parquet(
        self,
        url: str,
        validation_url: str | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
        spark: SparkSession | None = None,
    ) -> ElasticModel:
        """Train on an existing Parquet or Petastorm dataset, and return the model.

        url, validation_url: URLs in any file system that pyarrow or fsspec can open on the driver and the workers, with
        ``storage_options`` (by default those of the store). The Params name the columns. Raises ``DataError`` if a dataset
        cannot be read, or has nulls or NaN.
        """
        session = spark or SparkSession.getActiveSession()
        if session is None:
            raise ValueError("there is no active SparkSession; give spark=")
        for name in ("validationFraction", "validationIndicatorCol", "stratifyCol"):
            if self.value(name):
                raise ValueError(f"fit_on_parquet validates on validation_url, not by {name}={self.value(name)!r}")
        recipe = plan_recipe(self, self._layout_of_names(), self._default_loss())
        check_session_settings(session, bool(self.value("useGpu")), plan_resources(self))
        sizes = plan_sizes(self, session)
        with self._opened_store(session) as store:
            options = dict(storage_options or store.storage_options)
            plan = plan_data(self, (url, validation_url), options, True)
            urls = [each for each in (plan.training_url, plan.validation_url) if each]
            identity = "/".join(identity_of_files(each, options or None) for each in urls)
            record = self._record(recipe, identity)
            known = check_run(store, record)
            record = record.with_batch(known.batch if known else {})
            return self._train(session, store, record, plan, recipe, sizes, {})

    def find_learning_rate(
        self, dataset: DataFrame, low: float = 1e-6, high: float = 1.0, steps: int = 100
    ) -> LearningRates:
        """Train a copy for some steps with a learning rate that grows from ``low`` to ``high``, and return rates and losses.

        ``suggestion`` of the result is the rate to begin with. The estimator is not changed, and its own scheduler and
        callbacks are not used. It refuses what ``fit`` refuses. Nothing of the fit stays in the store except the data, which the
        next ``fit`` reuses. Blocks like ``fit``. If a worker is lost, steps may be missing from the result; see
        ``Callback.on_batch_end``. Raises ``ValueError`` for an optimizer instance, which has a rate of its own.
        """
        return find_learning_rate(self, dataset, low, high, steps)

    def _train(
        self,
        session: SparkSession,
        store: Store,
        record: RunRecord,
        data: DataPlan,
        recipe: Recipe,
        sizes: Sizes,
        facts: Facts,
    ) -> ElasticModel:
        """Check the recipe on the first rows, train, and return the model."""
        sample, rows, data = first_rows(recipe.layout, data)
        recipe = recipe.checked_on(with_extremes(sample, recipe.layout.labels, facts))
        recipe.check_categories(sample, facts)
        run_id = record.run_id
        model = self._untrained(recipe, sample)
        if not given_batch(self):
            width = width_of(sample)
            record = record.with_batch({"globalBatchSize": pick_batch_size(rows, width, data.shards)})
            data, sizes = settle_batch(self, data, sizes, record.batch)
            model._set(**record.batch)
            _tell_batch(record, rows, width, sizes)
        model._check(facts)
        if data.validation_url is not None:
            recipe.check_evaluation(sample)
        if data.validation_url is not None and data.shards is None and sizes.most != 1:
            for name, metric in (self.value("metrics") or {}).items():
                check_united(name, metric)
        _check_classes(recipe.class_labels(len(model.widths)), facts)
        if not store.temporary:
            record_run(store, record)
        try:
            plan = self._plan(run_id, store, model, data, recipe, facts, sample)
            trained = self._run(session, plan, sizes, store)
        except BaseException:
            if self.value("runId") is None and "checkpoints" not in store.keep:
                with suppress(Exception):  # the fit's own error matters more
                    forget_run(store, run_id)  # nobody can continue it
            raise
        if len(trained.history) > self.value("epochs"):
            raise ValueError(
                f"runId={run_id!r} has trained {len(trained.history)} epochs already, more than epochs={self.value('epochs')}: "
                "give at least as many, or choose another runId"
            )
        if not store.temporary:
            forget_run(store, run_id)
        model.describe(model=trained_network(recipe.network, trained).eval(), history=trained.history, run_id=run_id)
        self._look_at_outputs(model, sample)
        return model

    def _plan(
        self,
        run_id: str,
        store: Store,
        model: ElasticModel,
        data: DataPlan,
        recipe: Recipe,
        facts: Facts,
        sample: Mapping[str, torch.Tensor],
    ) -> TrainingPlan:
        """Return all that the workers need to know."""
        callbacks = self.value("callbacks") or []
        return TrainingPlan(
            run_id=run_id,
            model=recipe.network,
            layout=recipe.layout,
            objective=recipe.objective or Objective(()),
            data=data,
            steps=recipe.steps,
            epochs=self.value("epochs"),
            steps_per_epoch=self.value("stepsPerEpoch"),
            checkpoint_steps=self.value("checkpointSteps"),
            seed=self.value("seed"),
            callbacks=dumps(callbacks),
            callbacks_given=describe_callbacks(callbacks),
            log_url=store.worker_url(store.log_url(run_id)) if "logs" in store.keep else None,
            use_gpu=self.value("useGpu"),
            class_labels=recipe.class_labels(len(model.widths)),
            terminate_on_nan=self.value("terminateOnNaN"),
            commit_steps=self.value("commitSteps"),
            class_weights=self._class_weights(model, data),
            weighs_labels=recipe.weighs_labels(facts, data.shards, sample),
            may_ignore=recipe.may_ignore(facts, data.shards, sample),
            has_unused=recipe.has_unused or self.value("findUnusedParameters"),
            classes=model._label_classes,
            fit_id=secrets.token_hex(6),
        )

    def _untrained(self, recipe: Recipe, sample: Mapping[str, torch.Tensor]) -> ElasticModel:
        """Return the model with its Params and shapes, but without a network."""
        layout = recipe.layout.settled(sample)
        with own_randomness(0):
            outputs = outputs_of(layout.call(copy.deepcopy(recipe.network).eval(), sample), layout)
        shapes = {name: None if sample[name].is_nested else tuple(sample[name].shape[1:]) for name in layout.features}
        widths = widths_of(outputs)
        if len(widths) == 1 < len(layout.outputs) and not self.value("outputCols"):
            layout = replace(layout, outputs=("prediction",))  # the one output answers to all labels
        model = self._make_model(layout)
        self._copyValues(model).describe(layout=layout, shapes=shapes, widths=widths)
        # The estimator's useGpu says where to train; the model's own says where to score.
        model.clear(model.useGpu)
        model._resetUid(self.uid)  # Spark's own models have the uid of their estimator, too
        return model

    def _look_at_outputs(self, model: ElasticModel, sample: Mapping[str, torch.Tensor]) -> None:
        """Find out from the trained network's outputs for a few rows what the model has to know of them."""

    def _run(self, session: SparkSession, plan: TrainingPlan, sizes: Sizes, store: Store) -> Trained:
        """Train on the executors and return rank 0's result."""
        limits = {"start_timeout": "startTimeout", "elastic_timeout": "elasticTimeout", "hang_timeout": "hangTimeout"}
        settings = {key: self.value(name) for key, name in limits.items() if self.value(name) is not None}
        driver, logs = self.value("driver"), self.value("eventLogDir")
        own = DRIVERS[driver].own_slots
        total = known_slots(session, plan_resources(self)) or sizes.most + own
        with slots.ledger.slots(sizes.least + own, sizes.most + own, total) as granted:
            results = spark_elastic.run(
                train,
                args=(plan,),
                spark=session,
                min_np=sizes.least,
                num_proc=min(sizes.start, granted - own),
                max_np=granted - own,
                resources=self.value("resourceProfile"),
                driver=driver,
                reset_limit=self.value("resetLimit"),
                replace_slow=self.value("replaceSlow"),
                adaptive_np=adapts_np(self, plan.data),
                on_event=_printer(plan.run_id) if self.value("verbose") else None,
                loggers=[copy.copy(each) for each in self.value("loggers") or ()],  # fits may run side by side
                event_log=str(Path(logs).expanduser() / f"{plan.run_id}.jsonl") if logs is not None else None,
                checkpoint=store.worker_url(store.checkpoint_url(plan.run_id)),
                storage_options=store.storage_options,
                **settings,
            )
        trained: Trained = next(result for result in results if result is not None)
        return trained

    def _record(self, recipe: Recipe, identity: str) -> RunRecord:
        run_id = self.value("runId") or f"{type(self).__name__}-{secrets.token_hex(6)}"
        return RunRecord(run_id, identity, describe_params(self, wants_epochs(recipe.steps)), version=VERSION)

    @contextmanager
    def _opened_store(self, session: SparkSession) -> Iterator[Store]:
        """Yield the checked store; in local modes, a temporary one if none is given. Creates the folder of event logs."""
        store = self.value("store")
        if store is None:
            if not is_local(session):
                raise ValueError(
                    f"a store that this process and the executors share is needed on {master_of(session)}: "
                    "store=Store.create(url)"
                )
            if self.value("runId"):
                raise ValueError(f"runId={self.value('runId')!r} needs a store, or there is nothing to resume from")
        with temporary_store() if store is None else nullcontext(store) as opened:
            opened.check(session)
            if self.value("eventLogDir") is not None:
                Path(self.value("eventLogDir")).expanduser().mkdir(parents=True, exist_ok=True)
            yield opened

    # ------------------------------------------------------------------ persistence

    def write(self) -> MLWriter:
        """Return a writer; ``save(path)`` is short for ``write().save(path)``."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[ElasticEstimator]:
        """Return a reader; ``load(path)`` is short for ``read().load(path)``. Loading runs the saved code, and warns."""
        return EstimatorReader(cls)


@saved_as("spark_elastic.estimator")
class TorchEstimator(ElasticEstimator, TorchEstimatorAccessors):
    """Trains any network. ``featureCols`` become positional arguments of ``forward``, ``inputs`` keyword arguments."""

    featureCols = param("featureCols", FEATURE_COLS, names)
    inputs = param("inputs", 'keyword arguments of forward: {"x": [columns]} or {"x": ([columns], "int64")}', inputs)
    categoricalCols = param("categoricalCols", CATEGORICAL_COLS, names)
    labelCols = param("labelCols", "columns of the labels, one for each output", names)
    outputCols = param("outputCols", "columns that transform adds; default prediction, or <label>_prediction", names)
    weightCol = param("weightCol", "column by which rows are weighted in losses and metrics", text)
    validationIndicatorCol = param("validationIndicatorCol", "column that is true for rows that validate", text)

    def _layout(self, schema: StructType) -> Layout:
        layout = self._layout_of_names()
        check_scalars(schema, layout.categories, "categoricalCols")
        check_columns(schema, layout.features, "inputs" if self.value("inputs") else "featureCols")
        check_columns(schema, layout.labels, "labelCols")
        if layout.weight:
            check_scalars(schema, [layout.weight], "weightCol")
        return replace(layout, inputs=tuple(_with_dtype(entry, schema) for entry in layout.inputs))

    def _layout_of_names(self) -> Layout:
        positional, categories, keyword = (self.value(name) for name in ("featureCols", "categoricalCols", "inputs"))
        if (keyword is None) == (positional is None) and (keyword or categories is None):
            raise ValueError("give exactly one of featureCols and inputs")
        if keyword and categories:
            raise ValueError(
                f"categoricalCols={categories} follow featureCols; with inputs, give them a keyword there: "
                f'{{"codes": ({categories}, "int64")}}'
            )
        if keyword:
            entries = [_keyword_input(name, columns) for name, columns in keyword.items()]
        else:
            entries = positional_inputs(positional or (), categories)
        labels = tuple(self.value("labelCols") or ())
        default = [f"{label}_prediction" for label in labels] if len(labels) > 1 else ["prediction"]
        return Layout(tuple(entries), labels, self.value("weightCol"), tuple(self.value("outputCols") or default))

    def _make_model(self, layout: Layout) -> ElasticModel:
        return TorchModel(outputCols=list(layout.outputs))


def _keyword_input(name: str, columns: list[Any]) -> Input:  # [column, …] or [[column, …], dtype]
    with_dtype = isinstance(columns[0], list)
    return Input(name, tuple(columns[0]), columns[1]) if with_dtype else Input(name, tuple(columns))


def _with_dtype(entry: Input, schema: StructType) -> Input:
    """Pass indexes that StringIndexer wrote as doubles as int64, for embeddings."""
    if entry.name is None or entry.dtype is not None or not all(is_index(schema[name]) for name in entry.columns):
        return entry
    return replace(entry, dtype="int64")


def _check_facts(schema: StructType, layout: Layout, facts: Facts) -> None:
    if layout.weight and (refused := refused_weights(layout.weight, facts[layout.weight])):
        raise ValueError(refused)
    for name in layout.categories:
        least, fraction = facts[name]["min"], facts[name]["fraction"]
        if least < 0 or fraction is not None:
            raise ValueError(not_an_index(name, least if least < 0 else fraction))
        if is_fractional(schema[name].dataType) and facts[name]["max"] >= FLOAT_INDEXES:
            raise ValueError(merged_index(name, facts[name]["max"]))
    for name in layout.whole:
        if facts[name].get("fraction") is not None:
            raise ValueError(not_whole(name, facts[name]["fraction"]))
        if is_fractional(schema[name].dataType) and facts[name]["max"] >= FLOAT_INDEXES:
            raise ValueError(merged_index(name, facts[name]["max"], "inputs"))
    for name, found in facts.items():
        if is_vector(schema[name].dataType) and found["min"] != found["max"]:
            raise ValueError(f"column {name!r} has vectors of different sizes, from {found['min']} to {found['max']}")


def _check_classes(names: tuple[str, ...], facts: Facts) -> None:
    for name in names:
        fraction = facts.get(name, {}).get("fraction")  # data written by an earlier release lack this fact
        if fraction is not None:
            raise ValueError(not_a_class(name, fraction))


def _tell_batch(record: RunRecord, rows: int, width: int, sizes: Sizes) -> None:
    ((name, size),) = record.batch.items()
    logger.info(
        f"{record.run_id}: {name}={size} for {rows:,} rows of {width:,} numbers, with at most {sizes.most} workers; set "
        "globalBatchSize or batchSize, and maxNp, to choose otherwise"
    )


def _printer(run_id: str) -> Callable[[dict[str, Any]], None]:
    def show(event: dict[str, Any]) -> None:
        if event["event"] == "metrics":
            values = event["values"]
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, float))
            # A NaN loss is reported before the epoch's end, without rows.
            rows = f", {values['rows']:,} rows" if "rows" in values else ""
            print(f"{run_id} epoch {values.get('epoch')}: {numbers}{rows}", flush=True)
        elif event["event"] == "world_sized" and isinstance(record := read_event(event).record, WorldSized):
            print(f"{run_id}: {record.describe()}", flush=True)

    return show
