"""Estimators on real executors: training through losses, the data path, what comes out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import networks
import numpy as np
import pytest
import torch
import torchmetrics
from estimators import make
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as f
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spark_elastic import NotFiniteLossError
from spark_elastic.estimator import (
    EarlyStopping,
    Store,
    TensorBoard,
    TorchClassificationModel,
    TorchEstimator,
    TorchModel,
    TorchRegressor,
)
from spark_elastic.loggers import TensorBoardLogger
from spark_elastic.testing import inject, kill, kill_executor

cloudpickle.register_pickle_by_value(networks)
ROWS = 1200


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """Features a, b, c, a vector of them, y = 2a - b + c, and a kind of three strings."""
    kinds = f.array(*(f.lit(kind) for kind in ("low", "mid", "top")))
    base = spark.range(ROWS, numPartitions=2).select(
        "id", f.rand(1).alias("a"), f.rand(2).alias("b"), (f.col("id") % 5).alias("c")
    )
    base = base.withColumn("y", 2 * f.col("a") - f.col("b") + f.col("c")).withColumn(
        "kind", kinds[(3 * f.col("a")).cast("int")]
    )
    # Kept, so that Spark scores the same rows on the same executors, whose Python has imported torch already.
    return VectorAssembler(inputCols=["a", "b", "c"], outputCol="features").transform(base).persist()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.create(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def estimator(store: Store) -> TorchEstimator:
    """One that validates, with a metric of each kind."""
    metrics = [networks.absolute_error, torchmetrics.MeanAbsoluteError()]
    return make(epochs=2, validationFraction=0.2, store=store, seed=3, metrics=metrics)


@pytest.fixture(scope="module")
def trained(estimator: TorchEstimator, frame: Any) -> TorchModel:
    return estimator.fit(frame)


def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in history]


def test_every_row_counts_once_an_epoch_through_the_loss_of_a_worker_and_of_an_executor(
    spark: Any, events: list[dict[str, Any]]
) -> None:
    estimator = make(
        model=networks.RowCounter(600), featureCols=["id"], loss=None, labelCols=None, learningRate=1.0,
        optimizer=torch.optim.SGD, trainStep=networks.count_row, epochs=2, callbacks=networks.Recorder(), globalBatchSize=50,
        numProc=3, maxNp=3,
    )  # fmt: skip
    with inject(kill(rank=0, step=6), kill_executor(rank=1, step=20)):
        model = estimator.fit(spark.range(600))
    assert sum(event["event"] == "fault_injected" for event in events) == 2
    assert model.model.seen.tolist() == pytest.approx([2.0] * 600)
    assert [entry["rows"] for entry in model.history] == [600] * 2
    assert [entry["seen_by_callback"] for entry in model.history] == [1, 2]
    assert [entry["begun"] for entry in model.history] == [[0], [0]], "a fit begins once, whatever is lost"
    assert [entry["last_step"] for entry in model.history] == [11, 11]


def test_fields_of_structs_are_columns_by_their_paths(spark: Any, frame: Any, tmp_path: Path) -> None:
    flat = frame.select("a", "b", "y")
    held = (f.col("id") % 4 == 0).alias("held")
    nested = frame.select(f.struct("a", f.struct("b").alias("more")).alias("in"), f.struct("y", held).alias("out"))
    nested.write.parquet(str(tmp_path / "nested"))
    nested = spark.read.parquet(str(tmp_path / "nested"))
    store = Store.create(tmp_path / "store")
    settings = {"epochs": 1, "store": store, "numProc": 1, "maxNp": 1, "shuffle": False, "optimizer": torch.optim.Adam}
    paths = {"featuresCol": None, "featureCols": ["in.a", "in.more.b"], "labelCol": "out.y"}
    regressor = TorchRegressor(model=torch.nn.Linear(2, 1), validationIndicatorCol="out.held", **paths, **settings)
    torch.manual_seed(0)
    model = regressor.fit(nested)
    assert [entry["rows"] for entry in model.history] == [ROWS * 3 // 4]
    scored = model.transform(nested)
    assert scored.columns == ["in", "out", "prediction"]
    weight, bias = model.model.weight.detach().numpy()[0], model.model.bias.item()
    for row in scored.limit(20).collect():
        assert row.prediction == pytest.approx(weight @ [row["in"].a, row["in"].more.b] + bias, abs=1e-5)
    renamed = {"featureCols": ["a", "b"], "labelCol": "y"}
    assert model.evaluate(nested) == pytest.approx(
        model.copy({getattr(model, n): v for n, v in renamed.items()}).evaluate(flat)
    )
    with pytest.raises(ValueError, match=r"the output column 'in\.a' exists already"):
        model.copy({model.predictionCol: "in.a"}).transform(nested)
    with pytest.raises(ValueError, match=r"the column 'IN\.A' and the field 'in\.a' have one name to Spark"):
        model.transform(nested.withColumn("IN.A", f.lit(1.0)))
    with pytest.raises(ValueError, match=r"there is no column 'in\.c'.*, and 'in' has a, more"):
        regressor.copy({regressor.featureCols: ["in.c"]}).fit(nested)


@pytest.mark.parametrize("has_store", [False, True])
def test_a_fit_that_keeps_no_checkpoints_outlives_the_only_worker_that_trains(
    spark: Any, tmp_path: Path, has_store: bool
) -> None:
    """As one does, where small steps are fastest alone. Its event log tells it."""
    store = {"store": Store.create(tmp_path / "store", keep=False)} if has_store else {}
    settings = {"numProc": 1, "maxNp": 1, "eventLogDir": tmp_path / "made" / "logs", **store}
    with inject(kill(rank=0, step=8)):
        model = networks.row_counter(600, epochs=2, **settings).fit(spark.range(600))
    events = map(json.loads, (tmp_path / "made" / "logs" / f"{model.run_id}.jsonl").read_text().splitlines())
    assert sum(event["event"] == "fault_injected" for event in events) == 1
    assert not has_store or not list((tmp_path / "store" / "runs").iterdir())
    assert model.model.seen.tolist() == pytest.approx([2.0] * 600)
    assert [entry["rows"] for entry in model.history] == [600] * 2


def test_rows_between_two_commits_are_read_again_after_a_loss_and_count_once(
    spark: Any, events: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"resourceProfile": {"cpus": 1}, "loggers": TensorBoardLogger(tmp_path / "logs")}
    with inject(kill(rank=1, step=2)):  # of twelve steps an epoch, those from the sixth to the tenth are repeated
        model = networks.row_counter(600, epochs=2, numProc=2, maxNp=2, commitSteps=5, **settings).fit(spark.range(600))
    assert sum(event["event"] == "fault_injected" for event in events) == 1
    assert model.model.seen.tolist() == pytest.approx([2.0] * 600)
    assert [entry["rows"] for entry in model.history] == [600] * 2
    logged = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert logged.Scalars("rows")[-1].value == 600
    assert logged.Scalars("job/resets")[-1].value == 1


def test_a_fit_whose_loss_is_nan_has_failed_for_its_loggers_and_event_log_and_leaves_no_run_that_nobody_can_continue(
    frame: Any, events: list[dict[str, Any]], tmp_path: Path
) -> None:
    estimator = make(
        epochs=3,
        numProc=2,
        maxNp=2,
        optimizer=torch.optim.SGD,
        learningRate=1e30,
        loggers=networks.Endings(tmp_path / "end"),
        store=Store.create(tmp_path / "store", keep=False),
    )
    with pytest.raises(NotFiniteLossError, match=r"^TorchEstimator-\w+ ended in epoch 0, step \d+: loss is "):
        estimator.fit(frame)
    assert (tmp_path / "end").read_text().startswith("NotFiniteLossError: ")
    assert [event["event"] for event in events][-1] == "job_failed"
    assert [path.name for path in (tmp_path / "store" / "runs").iterdir()] == []


def test_callbacks_hear_of_the_end_of_a_fit_once_however_long_they_take(frame: Any, tmp_path: Path) -> None:
    callback = networks.SlowAtTheEnd(tmp_path / "ends", seconds=6)
    with inject(kill(rank=0, step=8)):
        make(epochs=2, numProc=2, maxNp=2, hangTimeout=3.0, callbacks=callback).fit(frame)
    assert (tmp_path / "ends").read_text() == "2/0\n"


def test_a_small_table_is_learnt_without_a_batch_size_and_the_run_goes_on_with_other_workers_and_the_same_steps(
    frame: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = {"globalBatchSize": None, "balance": "auto", "store": Store.create(tmp_path), "runId": "open"}
    with caplog.at_level("INFO", "spark_elastic"):
        model = make(epochs=5, **run, callbacks=networks.Recorder()).fit(frame)
    assert f"open: globalBatchSize=32 for {ROWS:,} rows of 4 numbers, with at most 2 workers" in caplog.text
    assert model.getGlobalBatchSize() == 32
    assert model.history[-1]["loss"] < model.history[0]["loss"] / 10
    longer = make(epochs=6, **run, callbacks=networks.Recorder(), numProc=1, maxNp=1).fit(frame)
    assert longer.history[:5] == model.history
    assert longer.history[5]["sizes"] == [1]
    assert [entry["last_step"] for entry in longer.history] == [37] * 6  # 1,200 rows are 37 batches and half a one


def test_a_killed_fit_is_as_good_as_an_undisturbed_one_and_equal_fits_are_equal(
    frame: Any,
    estimator: TorchEstimator,
    trained: TorchModel,
    store: Store,
    events: list[dict[str, Any]],
) -> None:
    again = estimator.fit(frame)
    with inject(kill(rank=1, step=4), kill_executor(rank=0, step=20)):
        killed = estimator.fit(frame)
    assert sum(event["event"] == "fault_injected" for event in events) == 2
    assert plain(trained.history) == plain(again.history)
    assert [entry["rows"] for entry in killed.history] == [entry["rows"] for entry in trained.history]
    for entry, other in zip(trained.history, killed.history, strict=True):
        # The same steps hold the same rows; sums of other sizes of the world differ in their last digits.
        for name in ("loss", "val_loss", "absolute_error", "val_absolute_error"):
            assert entry[name] == pytest.approx(other[name], rel=1e-3)
        # torchmetrics collect the states of all ranks.
        assert entry["val_MeanAbsoluteError"] == pytest.approx(entry["val_absolute_error"])
    assert trained.history[-1]["val_loss"] < trained.history[0]["val_loss"]
    assert len(store.files.names(store.data_url)) == 1, "the data were written once"
    assert sorted(store.runs()) == sorted(model.run_id for model in (trained, again, killed))
    untouched = networks.dense().state_dict()
    assert all(torch.equal(value, untouched[name]) for name, value in estimator.getModel().state_dict().items())
    store.delete(again.run_id)
    assert again.run_id not in store.runs()


def test_transform_keeps_rows_in_order_and_other_columns_and_agrees_with_the_network(
    spark: Any, frame: Any, trained: TorchModel, tmp_path: Path
) -> None:
    model = trained
    scored = model.transform(frame)
    assert scored.columns == [*frame.columns, "prediction"]
    before, after = frame.toPandas(), scored.toPandas()
    assert before["id"].tolist() == after["id"].tolist()
    assert before["kind"].tolist() == after["kind"].tolist()
    features = torch.tensor(np.stack([row.toArray() for row in before["features"]]), dtype=torch.float32)
    expected = model.model(features).squeeze(1).tolist()
    assert after["prediction"].tolist() == pytest.approx(expected, abs=1e-5)

    model.save(tmp_path / "model")
    model.write().overwrite().save(tmp_path / "model")
    with pytest.warns(UserWarning, match="runs the code"):
        loaded = TorchModel.load(tmp_path / "model")
    assert loaded.history == model.history
    assert (
        loaded.transform(frame).select("prediction").toPandas()["prediction"].tolist() == after["prediction"].tolist()
    )

    frame.select("id", "features").coalesce(1).write.parquet(str(tmp_path / "stream"))
    stream = spark.readStream.schema(frame.select("id", "features").schema).parquet(str(tmp_path / "stream"))
    query = model.transform(stream).writeStream.format("memory").queryName("scored").start()
    query.processAllAvailable()
    query.stop()
    found = {row["id"]: row["prediction"] for row in spark.table("scored").collect()}
    assert found == pytest.approx(dict(zip(after["id"], after["prediction"], strict=True)))


def test_keyword_inputs_several_losses_weights_and_every_way_to_make_a_step(frame: Any, tmp_path: Path) -> None:
    indexed = StringIndexer(inputCol="kind", outputCol="code").fit(frame).transform(frame)
    indexed = indexed.withColumn("weight", f.col("c") + 1.0).withColumn("held_out", f.col("a") < 0.1)
    network = networks.TwoHeads()
    estimator = make(
        model=network, optimizer=torch.optim.AdamW(network.parameters(), lr=1e-2), learningRate=None,
        featureCols=None, inputs={"x": ["a", "b"], "code": ["code"]}, labelCols=["y", "code"], outputCols=["number", "kind_of"],
        loss=[torch.nn.MSELoss(), torch.nn.CrossEntropyLoss()], lossWeights=[1.0, 0.5], weightCol="weight",
        validationIndicatorCol="held_out", epochs=9, mixedPrecision="bf16", backwardPassesPerStep=2, gradientClipNorm=1.0,
        gradientClipValue=0.5, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
        store=Store.create(tmp_path, keep="logs"), runId="both",
        callbacks=[networks.Recorder(last=1), EarlyStopping(patience=5, restore_best=True), TensorBoard()],
    )  # fmt: skip
    model = estimator.fit(indexed)
    assert len(model.history) == 2, "stopped by a callback"
    held_out = indexed.where("held_out").count()
    assert [entry["rows"] for entry in model.history] == [ROWS - held_out] * 2
    row = model.transform(indexed.drop("kind_of")).select("number", "kind_of").first()
    assert isinstance(row["number"], float)
    assert row["kind_of"].size == 3
    assert list((tmp_path / "runs" / "both" / "logs").glob("events.*"))
    assert not (tmp_path / "runs" / "both" / "checkpoints").exists()
    assert not list((tmp_path / "data").iterdir())


def test_two_workers_train_a_network_of_which_a_part_gets_no_gradient(frame: Any) -> None:
    model = make(model=networks.HalfUsed(3), epochs=2).fit(frame)
    assert [entry["sizes"] for entry in model.history] == [[2], [2]]


def test_a_learning_rate_is_found_and_leaves_only_the_data(frame: Any, tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    found = make(store=store, numProc=1, maxNp=1, learningRate=None).find_learning_rate(frame, low=1e-5, high=1e2)
    assert len(found.rates) == len(found.losses) == 100, "of several epochs"
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 1
    assert store.runs() == []
    assert len(store.files.names(store.data_url)) == 1


def test_nan_that_a_network_returns_stays_nan_as_with_sparks_own_models(spark: Any) -> None:
    frame = spark.createDataFrame([(1.0,), (-1.0,)], ["x"])
    numbers = TorchModel(model=networks.Logarithm(), featureCols=["x"], outputCols=["y"]).transform(frame).collect()
    assert (numbers[0].y, np.isnan(numbers[1].y)) == (0.0, True)
    vectors = TorchModel(model=networks.Logarithm(2), featureCols=["x"], outputCols=["y"]).transform(frame).collect()
    np.testing.assert_array_equal([row.y.toArray() for row in vectors], [[0, 0], [np.nan, np.nan]])


def test_probabilities_that_no_sigmoid_shows_are_taken_for_what_the_param_says(spark: Any) -> None:
    rows = [(Vectors.dense(-2.0), 0.0), (Vectors.dense(-1.0), 0.0), (Vectors.dense(3.0), 1.0)]
    frame = spark.createDataFrame(rows, ["features", "label"])
    model = TorchClassificationModel(model=networks.SigmoidByHand())
    with pytest.warns(UserWarning, match="set outputsAreProbabilities=True") as told:
        model.transform(frame)
    assert told[0].filename == __file__
    assert model.setOutputsAreProbabilities(True).evaluate(frame)["accuracy"] == 1.0
    probability = model.transform(frame).first().probability.toArray()
    np.testing.assert_allclose(probability, [0.8807971, 0.1192029], rtol=1e-5)


def test_columns_that_are_one_expression_to_spark_are_features_of_their_own(frame: Any) -> None:
    """Spark passes such a column once, for all of them."""
    tens = TorchModel(networks.Weighted(1.0, 10.0), featureCols=["a", "b"], outputCols=["x"])
    side_by_side = TorchModel(networks.Weighted(1.0, 10.0, 100.0), featureCols=["a", "b", "c"], outputCols=["x"])
    alike = frame.withColumn("b", f.col("a")).withColumn("c", f.lit(1.0))
    for model, factors in ((tens, (11.0, 0.0)), (side_by_side, (11.0, 100.0))):
        for row in model.transform(alike).limit(5).collect():
            assert row.x == pytest.approx(factors[0] * row.a + factors[1])
    side_by_side.udf("weighted", frame.sparkSession)
    assert frame.sparkSession.sql("SELECT weighted(2.0, 2.0, 2.0)").first()[0] == 222.0


def test_each_byte_of_a_binary_column_is_a_number(spark: Any) -> None:
    rows = [(bytes([i, 255, 0, i, 128, 7]), (2 * i + 390) / 6 / 255) for i in range(200)]
    frame = spark.createDataFrame(rows, ["pixels", "bright"]).coalesce(1)
    model = make(
        model=networks.Brightness(), featureCols=["pixels"], labelCols=["bright"], learningRate=0.05, epochs=20, numProc=1,
        maxNp=1,
    ).fit(frame)  # fmt: skip
    assert model.model.weight.item() == pytest.approx(1.0, abs=0.02)
    assert model.shapes == {"pixels": (6,)}
    from_elsewhere = TorchModel(model.model, featureCols=["pixels"], outputCols=["prediction"])
    for each in (model, from_elsewhere):
        found = each.transform(frame).toPandas()
        assert found["prediction"].tolist() == pytest.approx(found["bright"].tolist(), rel=0.03)


def test_lists_of_different_lengths_are_predicted(spark: Any) -> None:
    rows = [([float(i % 3)] * (i % 4 + 1), float(i % 3) * (i % 4 + 1)) for i in range(200)]
    frame = spark.createDataFrame(rows, ["values", "total"]).coalesce(1)
    network = networks.SumOfList()
    torch.nn.init.ones_(network.scale.weight)
    torch.nn.init.zeros_(network.scale.bias)
    model = TorchModel(network, featureCols=["values"], outputCols=["sum"])
    found = model.transform(frame).toPandas()
    assert found["sum"].tolist() == pytest.approx(found["total"].tolist())


def test_existing_parquet_is_trained_on_where_it_lies_vectors_included(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)  # executors have other working directories
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    vectors = [Vectors.dense(float(i), 1.0) if i % 2 else Vectors.sparse(2, [1], [1.0]) for i in range(100)]
    frame = spark.createDataFrame([(vector, float(vector[0] != 0)) for vector in vectors], ["features", "y"]).coalesce(
        1
    )
    frame.write.parquet(str(tmp_path / "data"))
    model = make(model=networks.dense(2), numProc=1).fit_on_parquet("data", "data")
    assert model.history[0]["rows"] == 100
    assert model.history[0]["val_loss"] > 0
    assert not list((tmp_path / "temporary").glob("spark_elastic-*")), "the store of a fit without one is removed"
    scored = model.transform(frame).toPandas()
    inputs = torch.tensor(np.stack([vector.toArray() for vector in vectors]), dtype=torch.float32)
    assert scored["prediction"].tolist() == pytest.approx(model.model(inputs).squeeze(1).tolist(), abs=1e-5)
