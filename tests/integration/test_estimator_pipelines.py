"""Classifier and regressor in Pipelines and tuning, saved and loaded; runs that go on; mistakes in the data."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import mlflow
import mlflow.pyfunc
import mlflow.spark
import networks
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from driver_script import fit_counting
from other_processes import wait_until
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import OneVsRest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import IndexToString, StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.ml.tuning import (
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
    TrainValidationSplitModel,
)
from pyspark.sql import functions as f
from pyspark.sql.types import DoubleType, StructField, StructType

from spark_elastic.checkpoint.naming import MANIFEST
from spark_elastic.errors import CheckpointError, DamagedError, TrainingFailedError
from spark_elastic.estimator import (
    Store,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
    dataset,
)
from spark_elastic.estimator.dataset import Split, Wanted, identity_of, written
from spark_elastic.testing import inject, raise_error

cloudpickle.register_pickle_by_value(networks)
ROWS = 600


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    kinds = f.array(*(f.lit(kind) for kind in ("low", "mid", "top")))
    base = spark.range(ROWS, numPartitions=1).select("id", f.rand(1).alias("a"), f.rand(2).alias("b"))
    base = base.withColumn("y", 2 * f.col("a") - f.col("b")).withColumn("kind", kinds[(3 * f.col("a")).cast("int")])
    return base.persist()  # in one partition and kept: one executor's Python imports torch to score it


def regressor(**params: Any) -> TorchRegressor:
    given = {
        "modelFn": networks.dense, "modelParams": {"width": 2}, "labelCol": "y", "learningRate": 1e-2, "batchSize": 32,
        "minNp": 1, "maxNp": 1, "verbose": 0, **params,
    }  # fmt: skip
    return TorchRegressor(**{name: value for name, value in given.items() if value is not None})


@pytest.mark.filterwarnings("ignore:loading")
def test_a_classifier_in_a_pipeline_gives_back_the_strings_and_survives_saving(frame: Any, tmp_path: Path) -> None:
    classifier = TorchClassifier(
        modelFn=networks.dense, modelParams={"width": 2, "outputs": 3}, learningRate=2e-2, labelCol="label", batchSize=32,
        numClasses=3, epochs=6, numProc=2, maxNp=2, verbose=0,
    )  # fmt: skip
    stages = [
        StringIndexer(inputCol="kind", outputCol="label", stringOrderType="alphabetAsc"),
        VectorAssembler(inputCols=["a", "b"], outputCol="features"),
        classifier,
        IndexToString(inputCol="prediction", outputCol="predicted"),
    ]
    pipeline = Pipeline(stages=stages)
    pipeline.write().save(str(tmp_path / "pipeline"))
    fitted = Pipeline.load(str(tmp_path / "pipeline")).fit(frame)
    fitted.write().save(str(tmp_path / "fitted"))
    (written,) = (tmp_path / "fitted" / "stages").glob("2_*/metadata/part-*")
    assert json.loads(written.read_text())["sparkElastic"]["versions"]["torch"] == torch.__version__
    scored = PipelineModel.load(str(tmp_path / "fitted")).transform(frame)
    assert scored.where("kind = predicted").count() > 0.8 * ROWS
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.8
    assert [str(scored.schema[name].dataType) for name in ("rawPrediction", "probability", "prediction")] == [
        "VectorUDT()", "VectorUDT()", "DoubleType()",
    ]  # fmt: skip
    row = scored.first()
    assert row["probability"].toArray().sum() == pytest.approx(1.0)
    model = fitted.stages[2]
    assert model.numClasses == 3
    assert model.predict(row["features"]) == row["prediction"]
    assert model.predict(np.zeros((4, 2))).shape == (4,)
    for predicted, name in ((model.predictRaw, "rawPrediction"), (model.predictProbability, "probability")):
        assert predicted(row["features"]).toArray() == pytest.approx(row[name].toArray(), abs=1e-6)
        assert predicted(np.zeros((4, 2))).shape == (4, 3)
        assert predicted(np.zeros((0, 2))).shape == (0, 3)
    assert (model.numFeatures, model.hasSummary, model.summary.totalIterations) == (2, True, 6)
    assert model.summary.objectiveHistory == [entry["loss"] for entry in model.history]
    plain = scored.drop("rawPrediction", "probability", "prediction", "predicted")
    assert set(model.evaluate(plain)) >= {"accuracy", "f1", "logLoss"}
    flags = plain.where("label < 2").withColumn("label", plain["label"] == 1)
    assert model.evaluate(flags)["accuracy"] > 0.8
    odd = flags.withColumnRenamed("label", "la.bel").withColumn("w.t", f.lit(True))
    assert model.copy({model.labelCol: "la.bel", model.weightCol: "w.t"}).evaluate(odd)["accuracy"] > 0.8
    dotted = model.copy({model.predictionCol: "pre.dicted", model.probabilityCol: "prob.ability"})
    assert dotted.evaluate(plain) == model.evaluate(plain)
    for label, told in (
        (f.when(f.col("id") > 2, 1.0), r"labelCol: column 'label' has nulls or NaN in 3 of \d+ rows; drop these rows"),
        (f.lit(float("nan")), "column 'label' has nulls or NaN"),
        (f.lit(3.0), r"labels from 3 to 3; with 3 classes they go from 0 to 2"),
        (f.lit(0.5), r"has the label 0\.5"),
    ):
        with pytest.raises(ValueError, match=told):
            model.evaluate(plain.withColumn("label", label))
    with pytest.raises(ValueError, match="no rows to evaluate"):
        model.evaluate(plain.limit(0))
    with pytest.raises(ValueError, match=r"takes class indexes, and a label is 0\.\d+ \(label columns a "):
        classifier.copy({classifier.labelCol: "a"}).fit(plain)


@pytest.mark.filterwarnings("ignore:loading")
def test_columns_of_indexes_are_the_second_argument_of_the_network(frame: Any, tmp_path: Path) -> None:
    data = frame.withColumn("place", (f.col("id") % 5).cast("string"))
    classifier = TorchClassifier(
        model=networks.WithCategories(), learningRate=5e-2, batchSize=32, epochs=4, categoricalCols=["kind_index", "place_index"],
        labelCol="kind_index", numProc=1, maxNp=1, verbose=0,
    )  # fmt: skip
    stages = [
        StringIndexer(inputCols=["kind", "place"], outputCols=["kind_index", "place_index"]),
        VectorAssembler(inputCols=["a", "b"], outputCol="features"),
        classifier,
    ]
    fitted = Pipeline(stages=stages).fit(data)
    fitted.write().save(str(tmp_path / "fitted"))
    scored = PipelineModel.load(str(tmp_path / "fitted")).transform(data).collect()
    assert all(row["prediction"] == row["kind_index"] for row in scored), "the label is one of the categories"
    row, model = scored[0], fitted.stages[2]
    assert model.predict(row["features"], [row["kind_index"], row["place_index"]]) == row["prediction"]
    indexed = fitted.stages[1].transform(fitted.stages[0].transform(data))
    with pytest.raises(ValueError, match=r"'place_index' up to [56] \(index out of range in self\)"):
        classifier.fit(indexed.withColumn("place_index", f.col("id") % 7))


def test_balanced_classes_weigh_the_same_on_all_workers_together(spark: Any) -> None:
    x, label = np.linspace(-1, 1, 90), np.repeat([0, 1, 2], [60, 25, 5])
    values = [(Vectors.dense(one), float(each)) for one, each in zip(x, label, strict=True)]
    rows = spark.createDataFrame(
        values, StructType([StructField("features", VectorUDT()), StructField("label", DoubleType())])
    )
    classifier = TorchClassifier(
        modelFn=networks.dense, modelParams={"width": 1, "outputs": 3}, learningRate=1e-9, batchSize=7, classWeights="balanced",
        minNp=2, numProc=2, maxNp=2, verbose=0,
    )  # fmt: skip
    model = classifier.fit(rows)
    weight = torch.tensor(90 / (3 * np.array([60, 25, 5])), dtype=torch.float32)
    output = model.model(torch.tensor(x, dtype=torch.float32).unsqueeze(1))
    expected = torch.nn.functional.cross_entropy(output, torch.tensor(label), weight=weight)
    assert model.history[0]["sizes"] == [2]
    assert model.history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(ValueError, match="there is no class 3; the network has the 3 classes"):
        classifier.copy({classifier.classWeights: {3: 1.0}}).fit(rows)


def test_sparks_one_vs_rest_takes_the_classifier(frame: Any) -> None:
    classifier = TorchClassifier(
        modelFn=networks.dense, modelParams={"width": 2, "outputs": 2}, learningRate=2e-2, batchSize=32, epochs=3,
        numProc=1, maxNp=1, verbose=0,
    )  # fmt: skip
    labelled = StringIndexer(inputCol="kind", outputCol="label", stringOrderType="alphabetAsc").fit(frame)
    rows = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(labelled.transform(frame))
    model = OneVsRest(classifier=classifier).fit(rows)
    assert [type(each) for each in model.models] == [TorchClassificationModel] * 3
    assert model.transform(rows).where("prediction = label").count() > 0.6 * ROWS


@pytest.mark.filterwarnings("ignore:loading")
@pytest.mark.parametrize(
    ("tuner", "tuned", "workers"),
    [
        (lambda **given: CrossValidator(numFolds=2, **given), CrossValidatorModel, 1),
        # Two fits of three workers never fit into four slots at once.
        (lambda **given: TrainValidationSplit(trainRatio=0.6, **given), TrainValidationSplitModel, 3),
    ],
    ids=["cross validation", "train validation split"],
)
def test_concurrent_fits_of_a_grid_share_the_slots(
    spark: Any, frame: Any, tmp_path: Path, tuner: Any, tuned: Any, workers: int
) -> None:
    estimator = regressor(minNp=workers, maxNp=workers, epochs=2)
    stages = [VectorAssembler(inputCols=["a", "b"], outputCol="features"), estimator]
    sizes = [{"width": 2, "hidden": hidden} for hidden in (1, 16)]
    grid = ParamGridBuilder().addGrid(estimator.modelParams, sizes).build()
    evaluator = RegressionEvaluator(labelCol="y")
    tuning = tuner(estimator=Pipeline(stages=stages), estimatorParamMaps=grid, evaluator=evaluator, parallelism=2)
    tuning.save(str(tmp_path / "tuning"))
    tuning = type(tuning).load(str(tmp_path / "tuning"))
    assert [list(entry.values()) for entry in tuning.getEstimatorParamMaps()] == [[size] for size in sizes]
    found = tuning.fit(frame)
    found.save(str(tmp_path / "tuned"))
    found = tuned.load(str(tmp_path / "tuned"))
    metrics = found.avgMetrics if tuned is CrossValidatorModel else found.validationMetrics
    best = found.bestModel
    assert best.stages[1].model[0].out_features == sizes[metrics.index(min(metrics))]["hidden"]
    assert evaluator.evaluate(best.transform(frame)) < max(metrics)
    assert best.stages[1].uid == estimator.uid
    assert (
        best.stages[1].getModelParams()
        == best.stages[1].getOrDefault("modelParams")
        == sizes[metrics.index(min(metrics))]
    )
    assert (best.stages[1].getLearningRate(), best.stages[1].getEpochs(), best.stages[1].getBatchSize()) == (
        1e-2,
        2,
        32,
    )


def test_a_grid_leaves_one_copy_of_the_data_and_only_what_the_store_is_to_keep(frame: Any, tmp_path: Path) -> None:
    data = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    store = Store.create(tmp_path, keep="data")
    estimator = regressor(store=store)
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [1e-4, 1e-3, 1e-2, 1e-1]).build()
    settings = dict(frame.sparkSession.conf.getAll)
    models = estimator.fit(data, grid)
    assert len({model.history[-1]["loss"] for model in models}) == 4
    assert len(list((tmp_path / "data").glob("*/*/_complete.json"))) == 1
    assert not list(tmp_path.glob("runs/*")), "neither checkpoints nor logs"
    assert not list(tmp_path.glob("probe*"))
    assert dict(frame.sparkSession.conf.getAll) == settings


def test_mlflow_logs_a_pipeline_and_gives_back_what_scores_alike(
    frame: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    (tmp_path / "downloads").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "downloads"))  # MLflow leaves what it has downloaded
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    model = TorchRegressionModel(networks.dense(2), featuresCol="features")
    expected = model.transform(assembler.transform(frame)).toPandas()["prediction"].tolist()
    with mlflow.start_run():
        logged = mlflow.spark.log_model(
            PipelineModel([assembler, model]), "model", pip_requirements=["spark-elastic[ml]"]
        )
    with pytest.warns(UserWarning, match="runs the code"):
        loaded = mlflow.spark.load_model(logged.model_uri, dfs_tmpdir=str(tmp_path / "loading"))
    assert loaded.transform(frame).toPandas()["prediction"].tolist() == pytest.approx(expected)
    with pytest.warns(UserWarning, match="runs the code"):
        function = mlflow.pyfunc.load_model(logged.model_uri)
    assert function.predict(frame.select("a", "b").toPandas()) == pytest.approx(expected)


def test_a_run_of_the_same_name_goes_on_where_the_last_one_stopped(frame: Any, tmp_path: Path) -> None:
    data = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    store = Store.create(tmp_path)
    run = {"store": store, "runId": "nightly", "callbacks": networks.Recorder(), "checkpointSteps": 5}
    # 600 rows in batches of 32 are 19 steps and the end of the epoch: it fails in the third epoch.
    with inject(raise_error(step=48, times=9)), pytest.raises(TrainingFailedError):
        regressor(epochs=3, **run).fit(data)
    finished = regressor(epochs=3, **run).fit(data)
    whole = regressor(epochs=3, store=store, callbacks=networks.Recorder()).fit(data)
    assert [entry["rows"] for entry in finished.history] == [ROWS] * 3
    assert [entry["seen_by_callback"] for entry in finished.history] == [1, 2, 3]
    for ours, theirs in zip(finished.history, whole.history, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    longer = regressor(epochs=4, **run).fit(data)
    assert longer.history[:3] == finished.history
    assert len(longer.history) == 4
    with pytest.raises(ValueError, match=r"runId='nightly' is another run.*batchSize \(was 32, is 16\)"):
        regressor(epochs=3, batchSize=16, **run).fit(data)
    with pytest.raises(ValueError, match=r"differs in the data"):
        regressor(epochs=3, **run).fit(data.where("id > 5"))


def test_a_fit_goes_on_after_the_drivers_death_and_counts_every_row_once(
    spark: Any, script: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "fitting"
    first = script("local[2]", "fitting")
    wait_until(
        lambda: (folder / "epochs").exists() and any((folder / "store").rglob(MANIFEST)),
        "the end of the first epoch, and a checkpoint",
        first,
    )
    first.kill()
    model = fit_counting(spark, folder, numProc=3, maxNp=3)
    assert model.model.seen.tolist() == pytest.approx([2.0] * 600)
    assert [entry["rows"] for entry in model.history] == [600] * 2
    assert model.history[0]["sizes"][0] == 2, "the first driver's workers began"
    assert 3 in model.history[1]["sizes"]


def named(frame: Any, split: Split = Split()) -> str:  # noqa: B008
    return identity_of(Wanted(frame, ["a", "b"], split, 4))


@contextlib.contextmanager
def no_spark_job(spark: Any) -> Iterator[None]:
    """Assert that no Spark job is run meanwhile. The session is left in no job group, as other tests share it."""
    group = f"group {secrets.token_hex(4)}"
    spark.sparkContext.setJobGroup(group, "")
    try:
        yield
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            spark.sparkContext.setLocalProperty(name, None)
    assert not spark.sparkContext.statusTracker().getJobIdsForGroup(group)


@pytest.fixture
def without_jobs(spark: Any) -> Any:
    """Asserts that plan and files tell the identities of some DataFrames, without a Spark job, and returns them."""

    def name(*frames: Any) -> list[str]:
        with no_spark_job(spark):
            return [named(frame) for frame in frames]

    return name


def test_files_are_known_again_by_their_plan_sizes_and_times(
    spark: Any, frame: Any, tmp_path: Path, without_jobs: Any
) -> None:
    frame.coalesce(1).write.parquet(str(tmp_path / "some rows"))

    def read(**options: str) -> Any:
        files = spark.read.options(**options).parquet(str(tmp_path / "some rows"))
        return files.where("a > 0.5").withColumn("b", f.col("b") * 2)

    first, again, filtered, merged = without_jobs(read(), read(), read().where("a > 0.6"), read(mergeSchema="true"))
    assert again == first
    assert first not in (filtered, merged, named(read(), Split(0.1)))
    VectorAssembler(inputCols=["a"], outputCol="vector").transform(frame).write.parquet(str(tmp_path / "vectors"))
    vectors = spark.read.parquet(str(tmp_path / "vectors"))
    assert identity_of(Wanted(vectors, ["vector"], Split(), 4)).startswith("plan-")
    frame.select(f.encode(f.col("a").cast("string"), "utf-8").alias("bytes")).write.parquet(str(tmp_path / "bytes"))
    by_bytes = [
        identity_of(Wanted(spark.read.parquet(str(tmp_path / "bytes")), ["bytes"], Split(), 4)) for _ in range(2)
    ]
    assert by_bytes[0].startswith("plan-")
    assert by_bytes[0] == by_bytes[1]

    settings = {"spark.sql.session.timeZone": "Asia/Tokyo", "spark.sql.ansi.enabled": "false", "spark.sql.caseSensitive": "true",
                "spark.sql.parquet.int96RebaseModeInRead": "LEGACY", "spark.sql.shuffle.partitions": "3"}  # fmt: skip
    made_before, found = read(), {}
    for name, value in settings.items():
        before = spark.conf.get(name) if name in spark.conf.getAll else None
        spark.conf.set(name, value)
        found[name] = without_jobs(read())[0]
        if name == "spark.sql.ansi.enabled":
            assert named(made_before) != found[name], "its casts are of another mode"
        spark.conf.set(name, before) if before else spark.conf.unset(name)
    assert found.pop("spark.sql.shuffle.partitions") == first
    assert len({first, *found.values()}) == 1 + len(found)

    (part,) = (tmp_path / "some rows").glob("*.parquet")
    times = part.stat().st_mtime
    known = read()
    os.utime(part, (times + 1, times + 1))
    assert named(known) not in (first, named(read())), "Spark knows another file"
    os.utime(part, (times, times))
    assert named(read()) == first
    frame.write.mode("append").parquet(str(tmp_path / "some rows"))
    assert named(read()) != first
    part.unlink()
    with pytest.raises(Exception, match=r"FILE_NOT_EXIST|FileNotFound"):
        named(known)


def test_instants_that_local_time_shows_alike_are_told_apart(
    spark: Any, frame: Any, tmp_path: Path, without_jobs: Any
) -> None:
    """A fit trained on the rows of another one, whose filter had the same hour before daylight saving time ended."""
    frame.withColumn("at", f.timestamp_seconds(1604208600 + 600 * f.col("id"))).write.parquet(str(tmp_path / "files"))
    files = spark.read.parquet(str(tmp_path / "files"))
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        times = [f"2020-11-01 01:30:00-0{hours}:00" for hours in (4, 5, 4)]
        first, other, again = without_jobs(*(files.where(f"at < timestamp'{time}'").select("a", "b") for time in times))
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    assert again == first != other
    assert first.startswith("plan-")


def test_a_run_knows_its_rows_again_if_plan_or_settings_have_changed(spark: Any, frame: Any, tmp_path: Path) -> None:
    """It was refused, as one on other data, where the DataFrame was cached or the session had another setting."""
    frame.write.parquet(str(tmp_path / "files"))
    run = {"store": Store.create(tmp_path / "store"), "runId": "nightly", "featureCols": ["a", "b"]}

    def read() -> Any:
        return spark.read.parquet(str(tmp_path / "files"))

    first = regressor(epochs=1, **run).fit(read())
    spark.conf.set("spark.sql.debug.maxToStringFields", "100")
    cached = read().persist()
    try:
        assert named(cached).startswith("rows-")
        second = regressor(epochs=2, **run).fit(cached)
    finally:
        spark.conf.unset("spark.sql.debug.maxToStringFields")
        cached.unpersist()
    assert second.history[:1] == first.history
    assert len(second.history) == 2
    with pytest.raises(ValueError, match="differs in the data"):
        regressor(epochs=2, **run).fit(read().where("id > 0"))
    with pytest.raises(ValueError, match="differs in the data, featureCols"):
        regressor(epochs=2, **{**run, "featureCols": ["a", "id"]}).fit(read())


@pytest.mark.parametrize("harm", ["gone", "cut off", "all gone"])
def test_written_data_of_which_something_is_missing_are_written_again(
    frame: Any, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A fit trained on what was left of them, without a word."""
    store = Store.create(tmp_path)

    def write(known: str | None = None) -> Any:
        return written(Wanted(frame, ["a"], Split(0.2), 4), store, "same", known=known)

    with write() as first:
        pass
    folder = Path(first.url.removeprefix("file:"))
    with write() as again:
        assert again.url == first.url
    parts = sorted((folder / "_split=0").glob("*.parquet"))
    for part in parts if harm == "all gone" else parts[:1]:
        if harm == "cut off":
            part.write_bytes(b"")
        else:
            part.unlink()
    with pytest.raises(ValueError, match="files are missing; choose another runId"), write(first.url):
        pass
    with write() as fresh:
        assert fresh.url != first.url
        assert fresh.rows == ROWS
    assert caplog.text.count("files are missing; they are written again") == 1
    with write() as again:
        assert again.url == fresh.url
    assert caplog.text.count("files are missing") == 1


def test_what_hides_something_is_known_again_by_its_rows_alone(spark: Any, frame: Any, tmp_path: Path) -> None:
    rows = [(float(i), float(i % 3)) for i in range(20)]
    local = named(spark.createDataFrame(rows, ["a", "b"]))
    assert local.startswith("rows-")
    assert named(spark.createDataFrame(rows[::-1], ["a", "b"])) == local
    assert named(spark.createDataFrame(rows[1:], ["a", "b"])) != local
    assert named(spark.createDataFrame([*rows, rows[0]], ["a", "b"])) != local
    lists = [([[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]]), ([None, 1.0], [1.0, None]), ([[], [1.0]], [[1.0], []])]
    for one, other in lists:
        kind = "a array<double>, b array<double>" if isinstance(one[0] or one[1], list) else "a double, b double"
        assert named(spark.createDataFrame([one], kind)) != named(spark.createDataFrame([other], kind))

    # Readers that parse: the same files are other rows.
    (tmp_path / "text.csv").write_text("1,2\n3,4\n")
    (tmp_path / "days.csv").write_text("03/04/2020,1\n05/06/2021,2\n")
    (tmp_path / "lines.json").write_text('{"a": 1, "b": 2}\n{"a": 007, "b": 4}\n')

    def csv(name: str, columns: list[str], schema: str = "a double, b double", **options: Any) -> Any:
        read = spark.read.csv(str(tmp_path / name), schema=schema, **options)
        return read.selectExpr(
            *(f"cast({column} as double) as {name}" for column, name in zip(columns, "ab", strict=True))
        )

    plain = csv("text.csv", ["a", "b"])
    assert named(plain) == named(csv("text.csv", ["a", "b"]))
    others = [csv("text.csv", ["a", "b"], **given) for given in ({"header": True}, {"sep": ";"})]
    others.append(csv("text.csv", ["b", "a"]))
    assert len({named(plain), *map(named, others)}) == 1 + len(others)
    day = ["unix_date(a)", "b"]
    one, other = (
        csv("days.csv", day, "a date, b double", dateFormat=pattern) for pattern in ("dd/MM/yyyy", "MM/dd/yyyy")
    )
    assert named(one) != named(other)
    zoned = csv("days.csv", ["unix_seconds(a)", "b"], "a timestamp, b double", timestampFormat="dd/MM/yyyy")
    here = named(zoned)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    zoned = csv("days.csv", ["unix_seconds(a)", "b"], "a timestamp, b double", timestampFormat="dd/MM/yyyy")
    assert named(zoned) != here
    spark.conf.unset("spark.sql.session.timeZone")
    as_json = [
        spark.read.schema("a double, b double").options(**options).json(str(tmp_path / "lines.json"))
        for options in ({}, {"allowNumericLeadingZeros": True}, {"mode": "DROPMALFORMED"})
    ]
    assert len(set(map(named, as_json))) == 3

    # Functions, views, caches, random numbers.
    frame.write.parquet(str(tmp_path / "files"))
    files = spark.read.parquet(str(tmp_path / "files")).select("a", "b")
    by_plan = named(files)
    assert by_plan.startswith("plan-")
    doubled, tripled = (files.select("a", f.udf(lambda b, n=n: b * n, "double")("b").alias("b")) for n in (2, 3))
    assert named(doubled) != named(tripled)
    files.createOrReplaceTempView("some_rows")
    view = named(spark.table("some_rows"))
    files.where("a > 0.5").createOrReplaceTempView("some_rows")
    assert named(spark.table("some_rows")) != view
    spark.catalog.dropTempView("some_rows")
    random = [files.withColumn("b", f.rand()), files.withColumn("b", f.current_timestamp().cast("double")),
              files.withColumn("b", f.monotonically_increasing_id()), files.orderBy("a").limit(3)]  # fmt: skip
    assert all(named(one).startswith("rows-") for one in random)
    cached = files.persist()
    cached.count()
    before = named(cached)
    assert before.startswith("rows-")
    part = next((tmp_path / "files").glob("*.parquet"))
    shutil.copy(part, part.with_name(f"more-{part.name}"))

    def read() -> Any:
        return spark.read.parquet(str(tmp_path / "files")).select("a", "b")

    assert named(read()) == before, "Spark takes the rows of before from its cache"
    cached.unpersist()
    assert named(read()) not in (before, by_plan)


def test_rows_that_change_while_they_are_written_are_not_used_again(spark: Any, frame: Any, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    frame.write.parquet(str(tmp_path / "files"))
    random = frame.select("a").withColumn("b", f.unix_micros(f.current_timestamp()) % 1_000_000)
    files = spark.read.parquet(str(tmp_path / "files")).select("a", "b")
    for data in (random, files):
        identity = named(data)
        if data is files:
            frame.write.mode("append").parquet(str(tmp_path / "files"))
            for part in (tmp_path / "files").glob("*.parquet"):
                os.utime(part, (1, 1))
        urls = []
        for _ in range(2):
            with written(Wanted(data, ["a", "b"], Split(), 4), store, identity) as found:
                urls.append(found.url)
                assert found.identity.startswith("new-")
        assert len(set(urls)) == 2
    identity = named(frame)
    for _ in range(2):
        with written(Wanted(frame, ["a", "b"], Split(), 4), store, identity) as found:
            assert found.identity == identity
    assert len(store.files.names(f"{store.data_url}/{identity}-{found.url.rpartition('/')[0].rpartition('-')[2]}")) == 1


def test_validation_takes_its_share_of_each_class_however_rare(frame: Any, tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    kinds = (
        f.when(f.col("id") < 3, "rare")
        .when(f.col("id") == 3, "single")
        .when(f.col("id") < 104, "some")
        .otherwise("most")
    )
    data = frame.withColumn("kind", kinds)
    found = []
    for seed in (7, 7, 8):
        split = Split(0.2, seed=seed, stratify="kind")
        with written(Wanted(data, ["id", "a"], split, 4), store, f"seed-{seed}", reuse=False) as rows:
            held_back = data.sparkSession.read.parquet(store.spark_url(rows.validation_url))
            assert held_back.columns == ["id", "a"]
            assert (rows.rows, rows.validation_rows) == (ROWS, 1 + 20 + 99)
            found.append({row["id"] for row in held_back.select("id").collect()})
    first, again, other = found
    counts = [sum(low <= row < high for row in first) for low, high in ((0, 3), (3, 4), (4, 104), (104, ROWS))]
    assert counts == [1, 0, 20, 99]
    assert first == again != other
    assert len({named(data, Split(0.2)), named(data, Split(0.2, stratify="kind"))}) == 2


def rows_of_files(url: str) -> list[list[dict[str, Any]]]:
    """Return the rows of each file in a folder, in their order, the files in the order of their first rows."""
    files = Path(url.removeprefix("file:").replace("//", "")).glob("*.parquet")
    return sorted((pq.read_table(file).to_pylist() for file in files), key=str)


def test_neither_files_by_content_nor_a_split_depend_on_how_spark_divides_the_rows(frame: Any, tmp_path: Path) -> None:
    """Half of the rows have an equal one, which draws a number of its own."""
    store = Store.create(tmp_path)
    data = frame.select((f.col("id") / 2).cast("int").alias("half"), (f.col("id") % 4 < 2).cast("int").alias("odd"))
    data = data.union(data)

    def write(divided: Any, parts: int, split: Split, name: str) -> Any:
        with written(Wanted(divided, ["half", "odd"], split, parts, by_content=True), store, name) as found:
            kept = found
        return kept

    one, other = (write(data.coalesce(1), 4, Split(), "one"), write(data.repartition(7), 4, Split(), "other"))
    assert rows_of_files(one.training_url) == rows_of_files(other.training_url)
    held_back = []
    for number, (divided, parts, seed) in enumerate(
        ((data.coalesce(1), 4, 1), (data.repartition(3), 9, 1), (data.coalesce(1), 4, 2))
    ):
        found = write(divided, parts, Split(0.2, seed=seed), f"split-{number}")
        assert found.rows == 2 * ROWS
        assert 0.15 < found.validation_rows / found.rows < 0.25
        rows = [tuple(row.values()) for file in rows_of_files(found.validation_url) for row in file]
        held_back.append(sorted(rows))
    first, again, another_seed = held_back
    assert first == again != another_seed
    counts = set(Counter(first).values())
    assert {1, 2} <= counts, "equal rows do not all validate"


def test_rows_whose_lists_hold_the_same_numbers_side_by_side_are_told_apart(spark: Any, tmp_path: Path) -> None:
    """Spark's hash does not mark the end of a list: such rows kept the order in which Spark delivered them."""
    store = Store.create(tmp_path)
    rows = [([1.0], [2.0, 3.0]), ([1.0, 2.0], [3.0])] * 20
    found = []
    for name, given in (("one", rows), ("other", rows[::-1])):
        data = spark.createDataFrame(given, "a array<double>, b array<double>").coalesce(1)
        with written(Wanted(data, ["a", "b"], Split(), 1, by_content=True), store, name) as kept:
            found.append(rows_of_files(kept.training_url))
    assert found[0] == found[1]


def test_a_deterministic_fit_has_the_same_bits_whatever_max_np_is(frame: Any) -> None:
    data = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    torch.manual_seed(0)
    model = networks.dense(width=2)
    given = {
        "modelFn": None,
        "modelParams": None,
        "model": model,
        "batchSize": None,
        "globalBatchSize": 48,
        "shards": 4,
    }
    fitted = []
    for most, divided in ((1, data), (2, data.repartition(5))):
        estimator = regressor(**given, deterministic=True, validationFraction=0.2, seed=1, maxNp=most)
        found = estimator.fit(divided)
        weights = [value for weight in found.model.parameters() for value in weight.flatten().tolist()]
        fitted.append((weights, [(epoch["loss"], epoch["val_loss"]) for epoch in found.history]))
    assert fitted[0] == fitted[1]


def test_writers_of_the_same_data_share_them_and_remove_what_a_dead_one_has_left(
    frame: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path, keep=False)
    folder = tmp_path / "data" / "same-4"
    for name, age in (("dead", 2 * dataset.ABANDONED_SECONDS), ("alive", 0.0)):
        (folder / name).mkdir(parents=True)
        (folder / name / "part").touch()
        for path in (folder / name / "part", folder / name):
            os.utime(path, (time.time() - age,) * 2)

    def write(reuse: bool = True) -> Any:
        return written(Wanted(frame, ["a"], Split(), 4), store, "same", reuse=reuse)

    with write() as first:
        with write() as second:
            assert second == first
        with write(reuse=False) as fresh:
            assert fresh.url != first.url
        assert {path.name for path in folder.iterdir()} == {"alive", first.url.rpartition("/")[2]}
        with monkeypatch.context() as another_process:
            another_process.setattr(dataset, "_users", Counter())  # it does not know how long these are used
            with write() as other:
                assert other.url != first.url
        assert Path(first.url.removeprefix("file:")).exists()
    assert {path.name for path in folder.iterdir()} == {"alive"}


VECTORS = StructType([StructField("features", VectorUDT()), StructField("y", DoubleType())])


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], "the DataFrame has no rows"),
        ([(None, 1.0)], "column 'features' has nulls in 1 of 1 rows"),
        ([(Vectors.dense(1, float("nan")), 1.0)], "column 'features' has NaN in 1 of 1 rows"),
        (
            [(Vectors.dense(1, 2), 1.0), (Vectors.dense(1, float("-inf")), 7.0)],
            r"column 'features' has infinite values \(as 32-bit floats\) in 1 of 2 rows, first in the row "
            r"features=\[1.0,-inf\], y=7.0; fill them",
        ),
        ([(Vectors.dense(1, 2), 1e300)], r"column 'y' has infinite values .* in the row y=1e\+300"),
        ([(Vectors.dense(1, 2), None), (Vectors.sparse(2, [0], [1.0]), 1.0)], "column 'y' has nulls in 1 of 2 rows"),
        ([(Vectors.dense(1, 2), 1.0), (Vectors.dense(1), 1.0)], "column 'features' has vectors of different sizes"),
        ([(Vectors.dense(1, 2, 3), 1.0)], "the model cannot be called with these columns"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(spark: Any, tmp_path: Path, rows: list[Any], error: str) -> None:
    data = spark.createDataFrame(rows, VECTORS)
    with pytest.raises(ValueError, match=error):
        regressor(store=str(tmp_path)).fit(data)
    assert not list((tmp_path / "data").glob("*")) or "model" in error or "sizes" in error, (
        "nothing half-written is left"
    )


@pytest.mark.parametrize(
    ("bad", "column", "error"),
    [
        (float("nan"), "c`77", "column 'c`77' has NaN in 2 of 6 rows"),
        (float("-inf"), "c`3", r"column 'c`3' has infinite values \(as 32-bit floats\) in 2 of 6 rows"),
        (1e39, "c`0", r"column 'c`0' has infinite values \(as 32-bit floats\) in 2 of 6 rows"),
        (None, "c`119", "column 'c`119' has nulls in 2 of 6 rows"),
        (None, "n", "column 'n' has nulls in 2 of 6 rows"),
        (float("nan"), "${c}", r"column '\$\{c\}' has NaN in 2 of 6 rows"),
    ],
)
def test_of_many_columns_the_one_that_is_not_finite_is_named(
    spark: Any, tmp_path: Path, bad: float | None, column: str, error: str
) -> None:
    features = [f"c`{number}" for number in range(118)] + ["${c}", "c`119"]
    numbers = [f.col("id").cast("double").alias(name) for name in features]
    data = spark.range(6, numPartitions=2).select(*numbers, f.col("id").alias("n"))
    quoted = f.col("`" + column.replace("`", "``") + "`")
    data = data.withColumn(
        column, f.when(f.col("n") < 2, f.lit(bad)).otherwise(quoted).cast(data.schema[column].dataType)
    )
    wanted = Wanted(data, [*features, "n"], Split(), 2, described=["c`5"])
    writing = written(wanted, Store.create(tmp_path), "wide")
    with pytest.raises(ValueError, match=error):
        writing.__enter__()
    assert not list((tmp_path / "data").glob("*"))


def test_data_are_written_again_where_other_columns_have_to_be_described(frame: Any, tmp_path: Path) -> None:
    store, urls = Store.create(tmp_path), []
    for described in (["a"], ["a"], [], ["a", "b"], ["b"]):
        with written(Wanted(frame, ["a", "b"], Split(), 1, described=described), store, "same") as found:
            urls.append(found.url)
            assert found.facts.keys() >= set(described)
    assert urls[0] == urls[1] == urls[2] != urls[3] == urls[4]


def test_other_columns_whose_names_differ_only_in_case_do_not_matter(spark: Any) -> None:
    """What an error would have shown of the row was raw AMBIGUOUS_REFERENCE, also where there was no error."""
    rows = [([1.0, 2.0], 0.5, "one", "two")]
    data = spark.createDataFrame(rows, "x array<double>, y double, k string, K string")
    scored = TorchModel(model=torch.nn.Linear(2, 1), featureCols=["x"], outputCols=["p"]).transform(data)
    assert scored.columns[:4] == data.columns
    assert len(scored.toPandas()) == 1
    bad = spark.createDataFrame([(None, *rows[0][1:])], data.schema)
    with pytest.raises(ValueError, match=r"column 'x' has nulls in 1 of 1 rows, first in the row x=None, y=0\.5; fill"):
        regressor(featureCols=["x"]).fit(bad)


def test_a_network_that_only_validation_takes_for_something_else_is_an_error(spark: Any) -> None:
    data = spark.range(100, numPartitions=1).select(f.array(f.rand(1)).alias("features"), (f.col("id") % 2).alias("y"))
    model = networks.OtherwiseInEvaluation(torch.nn.Softmax(1))
    classifier = TorchClassifier(model=model, labelCol="y", validationFraction=0.2)
    with pytest.raises(ValueError, match=r"in evaluation the network ends in a softmax"):
        classifier.fit(data)


def test_nothing_for_validation_an_unwritable_store_and_a_blind_executor_are_errors(spark: Any, frame: Any) -> None:
    data = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame).withColumn("held", f.lit(False))
    with pytest.raises(ValueError, match="validationIndicatorCol='held' leaves no row of 600 for validation"):
        regressor(validationIndicatorCol="held").fit(data)
    with no_spark_job(spark):
        with pytest.raises(ValueError, match="the store file:///proc/nowhere cannot be written"):
            regressor(store="/proc/nowhere").fit(data)
        with pytest.raises(ValueError, match="featuresCol: there is no column 'features'"):
            regressor().fit(frame)
        with pytest.raises(ValueError, match=r"runId='x' needs a store"):
            regressor(runId="x").fit(data)
    with pytest.raises(ValueError, match="is not shared: executors on"):
        Store.create("/nowhere")._check_shared(spark, "/nowhere/probe")


@pytest.mark.filterwarnings("ignore:loading")
@pytest.mark.parametrize("folder", ["format-1", "format-2"])
def test_what_earlier_releases_saved_is_loaded_and_scores_as_it_did(spark: Any, folder: str) -> None:
    kept = Path(__file__).parents[1] / "kept" / folder
    rows = json.loads((kept / "scores.json").read_text())
    frame = spark.createDataFrame([(row["a"], row["b"]) for row in rows], "a double, b double").coalesce(1)
    frame = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    model = TorchModel.load(f"file://{kept}/model")
    assert [row["score"] for row in model.transform(frame).collect()] == pytest.approx([row["score"] for row in rows])
    assert [entry["epoch"] for entry in model.history] == [0, 1]
    estimator = TorchEstimator.load(f"file://{kept}/estimator")
    assert estimator.value("store") == Store.create("file:///data/store")
    assert [type(each).__name__ for each in estimator.value("callbacks")] == ["EarlyStopping", "BestModel"]
    assert [stage.value("seed") for stage in Pipeline.load(f"file://{kept}/pipeline").getStages()] == [3]
    assert PipelineModel.load(f"file://{kept}/fitted").stages[0].numClasses == 2


@pytest.mark.filterwarnings("ignore:loading")
def test_a_saved_model_that_is_damaged_or_of_a_later_release_is_named(spark: Any, tmp_path: Path) -> None:
    kept = Path(__file__).parents[1] / "kept" / "format-2" / "model"

    def load_after(change: Callable[[Path], Any]) -> None:
        place = tmp_path / secrets.token_hex(4)
        shutil.copytree(kept, place, ignore=shutil.ignore_patterns(".*.crc"))
        change(place)
        TorchModel.load(f"file://{place}")

    def rewrite(place: Path, old: str, new: str) -> None:
        (part,) = (place / "metadata").glob("part-*")
        text = part.read_text()
        assert old in text
        part.write_text(text.replace(old, new))

    with pytest.raises(CheckpointError, match="has format 9, and this release of spark_elastic reads formats 1 to 2"):
        load_after(lambda place: rewrite(place, '"format":2', '"format":9'))
    changes: list[Callable[[Path], Any]] = [
        lambda place: rewrite(place, '"layout"', '"lay"'),
        lambda place: rewrite(place, '{"class"', "{"),
        lambda place: (place / "weights.safetensors").unlink(),
        lambda place: (place / "weights.safetensors").write_bytes(b"\xff" * 100),
        lambda place: (place / "code.pkl").write_bytes((place / "code.pkl").read_bytes()[:-1]),
    ]
    for change in changes:
        with pytest.raises(DamagedError):
            load_after(change)
