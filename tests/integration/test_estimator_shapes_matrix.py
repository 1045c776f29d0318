"""Every shape of columns with every form of outputs, through fit and transform on executors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import networks
import pytest
import torch
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Matrices
from pyspark.sql import functions as f

from spark_elastic.estimator import TorchClassificationModel, TorchEstimator, TorchModel, TorchRegressionModel
from spark_elastic.estimator.layout import Input, Layout
from spark_elastic.estimator.planning import plan_recipe

cloudpickle.register_pickle_by_value(networks)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

INPUTS: dict[str, Any] = {
    "one number": {"featureCols": ["a"]},
    "one whole number": {"featureCols": ["i"]},
    "numbers": {"featureCols": ["a", "i", "flag"]},
    "one array": {"featureCols": ["list"]},
    "one vector": {"featureCols": ["vector"]},
    "arrays and vectors": {"featureCols": ["list", "vector", "single"]},
    "all": {"featureCols": ["a", "list", "vector", "i"]},
    "keywords": {"inputs": {"x": ["a", "i"], "more": ["vector"]}},
}
FORMS = {"number": "u", "matrix": "u", "dict of one": "u", "vector": "uv", "tuple": "uv", "dict": "uv"}
FITTED = [
    ("one number", "number"),
    ("numbers", "tuple"),
    ("one vector", "vector"),
    ("all", "dict"),
    ("keywords", "matrix"),
]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """``total`` is the sum of all numbers of ``a``, ``i``, …; one partition, so that one Python process scores."""
    base = spark.range(0, 60, 1, 1).select(
        (f.col("id") / 8).alias("a"), (f.col("id") % 7).alias("i"), (f.col("id") % 2 == 0).alias("flag")
    )
    base = base.withColumn("list", f.array(f.col("a"), f.lit(1.0), f.col("a"))).withColumn("single", f.array("i"))
    return VectorAssembler(inputCols=["a", "i"], outputCol="vector").transform(base).persist()


def features_of(columns: dict[str, Any]) -> list[str]:
    return columns.get("featureCols") or [name for names in columns["inputs"].values() for name in names]


def total(frame: Any, columns: dict[str, Any]) -> Any:
    """The sum that the network is to make of a row."""
    sums = {
        "a": f.col("a"), "i": f.col("i"), "flag": f.col("flag").cast("int"), "list": 2 * f.col("a") + 1,
        "vector": f.col("a") + f.col("i"), "single": f.col("i"),
    }  # fmt: skip
    return sum((sums[name] for name in features_of(columns)), f.lit(0.0))


def make(columns: dict[str, Any], form: str) -> TorchEstimator:
    labels = list(FORMS[form])
    outputs = ["both"] if form == "vector" else [f"{label}_found" for label in labels]
    return TorchEstimator(
        model=networks.AnyShapes(form), optimizer=torch.optim.SGD, learningRate=1e-12, loss=torch.nn.MSELoss(),
        labelCols=labels, outputCols=outputs, batchSize=16, maxNp=1, verbose=0, **columns,
    )  # fmt: skip


def labelled(frame: Any, columns: dict[str, Any]) -> Any:
    return frame.withColumn("u", total(frame, columns)).withColumn("v", 10 * f.col("u"))


def check(scored: Any, form: str) -> None:
    found = scored.toPandas()
    if form == "vector":
        found["u_found"], found["v_found"] = zip(*(row.toArray() for row in found["both"]), strict=True)
    for label in FORMS[form]:
        assert found[f"{label}_found"].tolist() == pytest.approx(found[label].tolist(), abs=1e-3)


@pytest.mark.parametrize(("columns", "form"), FITTED)
def test_every_shape_of_columns_and_outputs_is_trained_and_scored(frame: Any, columns: str, form: str) -> None:
    data = labelled(frame, INPUTS[columns])
    model = make(INPUTS[columns], form).fit(data)
    assert model.history[0]["loss"] == pytest.approx(0.0, abs=1e-5), "each output meets its own label"
    check(model.transform(data), form)


@pytest.mark.parametrize("columns", INPUTS)
def test_every_form_of_outputs_is_scored_for_every_shape_of_columns(frame: Any, columns: str) -> None:
    data = labelled(frame, INPUTS[columns])
    shapes = {"list": (3,), "vector": (2,), "single": (1,)}
    for form in FORMS:
        estimator = make(INPUTS[columns], form)
        layout = estimator._layout(data.schema)
        recipe = plan_recipe(estimator, layout, None)
        sample = {
            name: torch.zeros(7, *shapes.get(name, ()), dtype=torch.int64 if name in ("i", "flag") else torch.float32)
            for name in layout.columns
        }
        recipe = recipe.checked_on(sample)
        model = estimator._untrained(recipe, sample).describe(model=recipe.network)
        check(model.transform(data), form)


@pytest.mark.parametrize(("columns", "form"), [("one number", "matrix"), ("one array", "vector"), ("all", "dict")])
def test_a_network_that_was_trained_elsewhere_is_scored(frame: Any, columns: str, form: str) -> None:
    outputs = ["both"] if form == "vector" else [f"{label}_found" for label in FORMS[form]]
    labels = {"labelCols": list(FORMS[form])} if form == "dict" else {}
    model = TorchModel(networks.AnyShapes(form), outputCols=outputs, **INPUTS[columns], **labels)
    check(model.transform(labelled(frame, INPUTS[columns])), form)


def test_columns_that_nobody_uses_may_share_a_name(frame: Any) -> None:
    twice = frame.select("*", f.lit(1).alias("same"), f.lit(2).alias("same"))
    model = TorchModel(torch.nn.Linear(3, 1), featureCols=["list"], outputCols=["u"])
    assert model.transform(twice).columns == [*twice.columns, "u"]
    assert list(model.transform(twice).first())[-3:-1] == [1, 2]


def test_a_network_that_nobody_has_fitted_names_what_is_missing(frame: Any) -> None:
    network = networks.AnyShapes("tuple")
    for model, error in (
        (TorchModel(featureCols=["a"], outputCols=["u"]), "TorchModel has no network: give model="),
        (TorchModel(network, outputCols=["u"]), "give featureCols, a column for each positional argument"),
        (TorchModel(network, featureCols=["a"]), "and outputCols, one for each output"),
        (TorchModel(network, featureCols=["z"], outputCols=["u"]), "there is no column 'z'"),
        (
            TorchModel(torch.nn.Linear(5, 1), featureCols=["list"], outputCols=["u"]),
            r"cannot be called.*list \[rows, 3\]",
        ),
        (TorchRegressionModel(network, featuresCol="vector"), "a regressor's model returns one number per row"),
    ):
        with pytest.raises(ValueError, match=error):
            model.transform(frame)
    with pytest.raises(ValueError, match="column 'list' has no list in the first 0 rows"):
        TorchModel(network, featureCols=["list"], outputCols=["u", "v"]).transform(frame.limit(0))
    model = TorchModel(network, featureCols=["a"], outputCols=["found"])
    for _ in range(2):  # what the first call has found out is no reason for another error
        with pytest.raises(ValueError, match="outputCols must name the model's 2 outputs"):
            model.transform(frame)
    with pytest.raises(ValueError, match="call transform first"):
        TorchRegressionModel(network, featuresCol="vector").predict([1.0, 2.0])


@pytest.mark.parametrize(
    ("features", "value", "error"),
    [
        (["a"], "null", "column 'a' has NaN or a null in row 5 of partition 0"),
        (["a", "i"], "null", r"column 'i' has NaN or a null in row 5 of partition 0 .*a=0.625, i=nan"),
        (["a", "i"], "cast('-inf' as double)", "column 'a' has an infinite value in row 5 of partition 0"),
        (
            ["list"],
            "array(1.0d, cast('nan' as double), 2.0d)",
            "column 'list' has NaN or a null in row 5 of partition 0",
        ),
        (["list"], "null", r'column \'list\' is null in the row ."?a.?":0.625,.?"i'),
        (["vector"], "null", r'column \'vector\' is null in the row ."?a.?":0.625,.?"i'),
        (
            ["list"],
            "array(1.0d, 2.0d)",
            r'column \'list\' has 2 values, where the model takes 3, in the row ."?a.?":0.625,.?"i',
        ),
        (["list"], "array()", r"column \'list\' has 0 values, where the model takes 3, in the row"),
    ],
)
def test_scoring_names_the_column_and_row_of_what_is_no_number(
    frame: Any, features: list[str], value: str, error: str
) -> None:
    wrong = features[-1] if value == "null" else features[0]
    kind = frame.schema[wrong].dataType
    data = frame.withColumn(wrong, f.when(f.col("a") == 0.625, f.expr(value).cast(kind)).otherwise(f.col(wrong)))
    shapes = {"list": (3,), "vector": (2,)}
    layout = Layout(tuple(Input(None, (name,)) for name in features), (), None, ("u",))
    model = TorchModel(networks.AnyShapes("number"), outputCols=["u"]).describe(
        layout=layout, shapes={name: shapes.get(name, ()) for name in features}, widths=[0]
    )
    with pytest.raises(Exception, match=error):
        model.transform(data).select("u").collect()


def test_sql_calls_a_model_by_its_name(frame: Any) -> None:
    model = TorchModel(torch.nn.Linear(3, 2), featureCols=["list"], outputCols=["found"])
    with pytest.raises(ValueError, match="does not know the shapes of its features yet"):
        model.udf("score")
    expected = [row["found"].toArray().tolist() for row in model.transform(frame).collect()]
    score = model.udf("score", frame.sparkSession)
    frame.createOrReplaceTempView("to_score")
    assert [
        row["found"] for row in frame.sparkSession.sql("SELECT score(list) AS found FROM to_score").collect()
    ] == expected
    assert [row["found"] for row in frame.select(score("list").alias("found")).collect()] == expected

    classifier = TorchClassificationModel(torch.nn.Linear(3, 2), featuresCol="list")
    classes = [row["prediction"] for row in classifier.transform(frame).collect()]
    classifier.udf("classify")
    found = frame.sparkSession.sql("SELECT found.* FROM (SELECT classify(list) AS found FROM to_score)").collect()
    assert [row["prediction"] for row in found] == classes
    assert all(sum(row["probability"]) == pytest.approx(1.0) for row in found)


def test_vectors_from_parquet_pass_a_transform_and_sql_and_the_session_keeps_its_settings(
    frame: Any, tmp_path: Path
) -> None:
    session = frame.sparkSession
    frame.write.parquet(str(tmp_path / "rows"))
    rows = session.read.parquet(str(tmp_path / "rows"))
    before = session.sql("SET").collect()
    model = TorchModel(torch.nn.Linear(2, 1), featureCols=["vector"], outputCols=["found"])
    other = TorchModel(torch.nn.Linear(1, 1), featureCols=["a"], outputCols=["found"])
    scored = {row["a"]: row["found"] for row in model.transform(rows).collect()}
    assert len(scored) == other.transform(rows).where("a < 100").count() == 60
    model.udf("score_vectors")
    rows.where("a >= 0").createOrReplaceTempView("vectors_to_score")
    found = session.sql("SELECT a, score_vectors(vector) AS found FROM vectors_to_score").collect()
    assert {row["a"]: row["found"] for row in found} == pytest.approx(scored)
    with pytest.raises(Exception, match=r"score_vectors\(vector\) takes these 1 features in this order, not 2"):
        session.sql("SELECT score_vectors(vector, vector) FROM vectors_to_score").collect()
    assert session.sql("SET").collect() == before


class BytesAndVector(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, content: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([content.float(), vector], 1))


def test_beside_what_spark_passes_on_in_rows_only_a_transform_scores_and_a_fit_trains(
    frame: Any, tmp_path: Path
) -> None:
    """Vectors beside bytes, matrices and strings with a collation, of which none takes part."""
    session = frame.sparkSession
    matrix = session.createDataFrame([(Matrices.dense(1, 1, [7.0]),)], ["matrix"])
    columns = ["a", "vector", f.unhex(f.lit("0102")).alias("content"), f.expr("'x' COLLATE UTF8_LCASE AS word")]
    frame.select(*columns, f.lit(1.0).alias("y")).crossJoin(matrix).write.parquet(str(tmp_path / "rows"))
    rows = session.read.parquet(str(tmp_path / "rows"))
    scored = TorchModel(torch.nn.Linear(1, 1), featureCols=["a"], outputCols=["found"]).transform(rows)
    assert {(row["word"], row["matrix"].toArray().item()) for row in scored.collect()} == {("x", 7.0)}
    given = {"loss": torch.nn.MSELoss(), "labelCols": ["y"], "batchSize": 16, "maxNp": 1, "verbose": 0}
    model = TorchEstimator(model=BytesAndVector(), featureCols=["content", "vector"], **given).fit(rows)
    assert model.history[-1]["rows"] == 60


def test_a_sessions_limit_of_rows_in_a_file_changes_no_bit(frame: Any) -> None:
    session, name = frame.sparkSession, "spark.sql.files.maxRecordsPerFile"
    estimator = TorchEstimator(
        model=torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), featureCols=["a"], labelCols=["i"], globalBatchSize=8,
        deterministic=True, seed=3, maxNp=1, verbose=0,
    )  # fmt: skip
    losses = [entry["loss"] for entry in estimator.fit(frame.select("a", "i")).history]
    session.conf.set(name, "1")
    try:
        assert [entry["loss"] for entry in estimator.fit(frame.select("a", "i")).history] == losses
    finally:
        session.conf.unset(name)
