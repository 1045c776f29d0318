"""TorchClassifier: raw predictions, probabilities and a class for each row, with Spark ML's shared columns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import torch
from pyspark.ml.classification import ProbabilisticClassificationModel, ProbabilisticClassifier
from pyspark.ml.evaluation import BinaryClassificationEvaluator, Evaluator, MulticlassClassificationEvaluator
from pyspark.ml.linalg import DenseVector
from pyspark.ml.param.shared import HasProbabilityCol, HasRawPredictionCol, HasThresholds

from spark_elastic._json import Json
from spark_elastic._saved_names import saved_as
from spark_elastic.estimator.accessors import HasClassifierColsAccessors, TorchClassifierAccessors
from spark_elastic.estimator.class_weights import count_classes, weights_of_classes
from spark_elastic.estimator.converters import boolean, class_thresholds, class_weights, whole
from spark_elastic.estimator.expectations import are_probabilities, with_graph
from spark_elastic.estimator.frame import Facts
from spark_elastic.estimator.layout import Layout, outputs_of
from spark_elastic.estimator.model import ElasticModel, named_once
from spark_elastic.estimator.objective import Loss
from spark_elastic.estimator.params import param
from spark_elastic.estimator.plan import DataPlan
from spark_elastic.estimator.prediction import PredictionModel, Predictor
from spark_elastic.estimator.recipe import own_randomness
from spark_elastic.estimator.row_checks import not_a_class, not_in_classes
from spark_elastic.estimator.shapes import ClassificationLoss
from spark_elastic.estimator.transform import Finish, as_rows
from spark_elastic.worker.checks.user_frames import depth_of_user

if TYPE_CHECKING:
    from typing_extensions import Self

Metric = Literal["accuracy", "f1", "weightedPrecision", "weightedRecall"]
METRICS: tuple[Metric, ...] = get_args(Metric)


class HasClassifierCols(HasProbabilityCol, HasThresholds, HasRawPredictionCol, HasClassifierColsAccessors):
    """Spark ML's columns of classifiers, and its thresholds."""

    # The type of Spark's own Param does not allow None, which leaves it unset.
    thresholds = param("thresholds", HasThresholds.thresholds.doc, class_thresholds)  # type: ignore[assignment]

    outputsAreProbabilities = param(
        "outputsAreProbabilities",
        "whether the network returns probabilities and not logits; by default the loss or the network's last step tells",
        boolean,
    )


@saved_as("spark_elastic.estimator")
class TorchClassifier(Predictor, HasClassifierCols, TorchClassifierAccessors, ProbabilisticClassifier):  # type: ignore[misc]
    """Trains a network that returns a logit for each class, or a single logit for two classes, on labels 0, 1, ….

    The default loss is cross entropy.
    """

    numClasses = param("numClasses", "number of classes; default as many as the model has outputs", whole(2))

    classWeights = param(
        "classWeights", "a factor for the weight of each class's rows: list, dict or balanced", class_weights
    )

    def _default_loss(self) -> Loss:
        return ClassificationLoss()

    def _class_weights(self, model: ElasticModel, data: DataPlan) -> tuple[float, ...]:
        wanted = self.value("classWeights")
        if wanted is None:
            return ()
        classes = cast("TorchClassificationModel", model).numClasses
        return weights_of_classes(wanted, classes, lambda: count_classes(self.value("labelCol"), data, classes))

    def _make_model(self, layout: Layout) -> TorchClassificationModel:
        return TorchClassificationModel().describe(expected=self.value("numClasses"))

    def _look_at_outputs(self, model: ElasticModel, sample: Mapping[str, torch.Tensor]) -> None:
        assert model.model is not None
        with own_randomness(0):
            outputs = outputs_of(model.layout.call(with_graph(model.model), sample), model.layout)
        # A user's own step computes the loss, and may have nothing to do with the default loss.
        computed = self.value("trainStep") is not None
        loss = self.value("loss") or (None if computed else self._default_loss())
        cast("TorchClassificationModel", model)._take_for_probabilities(outputs, loss)


@saved_as("spark_elastic.estimator")
class TorchClassificationModel(PredictionModel, HasClassifierCols, ProbabilisticClassificationModel):  # type: ignore[misc]
    """Adds the vectors ``rawPredictionCol`` and ``probabilityCol`` and the double ``predictionCol``; "" omits a column."""

    expected: int | None = None
    _scored = ("predictionCol", "probabilityCol", "rawPredictionCol")

    def _take_for_probabilities(self, outputs: Sequence[torch.Tensor], loss: object = None) -> None:
        """Find out whether the network's outputs are probabilities, from a few of them; warn if that is not clear."""
        found = are_probabilities(outputs, loss)
        self.is_probability = bool(found)
        if found is None and self.value("outputsAreProbabilities") is None:
            warnings.warn(
                f"all outputs of {type(self.model).__name__} for {len(outputs[0])} rows are from 0 to 1, and they are taken for "
                "logits, because it does not end in a sigmoid or softmax: set outputsAreProbabilities=True if they are "
                "probabilities, else False",
                stacklevel=depth_of_user(),
            )

    @property
    def _gives_probabilities(self) -> bool:
        given: bool | None = self.value("outputsAreProbabilities")
        return self.is_probability if given is None else given

    @property
    def numClasses(self) -> int:
        """The number of classes; 0 without a network, because Spark reads it even then."""
        return (self.widths[0] or 2) if self.widths else 0

    # Spark's own methods take one row each.
    def predictRaw(self, value: object, categories: object = None) -> DenseVector | np.ndarray:  # type: ignore[override]
        """Compute raw predictions on the driver: a vector for the features of one row, [rows, classes] for [rows, features].

        categories: see ``predict``.
        """
        return self._predict_vector(value, categories, "rawPrediction")

    def predictProbability(self, value: object, categories: object = None) -> DenseVector | np.ndarray:  # type: ignore[override]
        """Compute probabilities on the driver: a vector for the features of one row, [rows, classes] for [rows, features].

        categories: see ``predict``.
        """
        return self._predict_vector(value, categories, "probability")

    def _predict_vector(self, value: object, categories: object, role: str) -> DenseVector | np.ndarray:
        found, is_row = self._score(value, categories, Classes({role: role}, None, self._gives_probabilities))
        return DenseVector(found[0]) if is_row else found

    def _set(self, **params: Any) -> Self:
        if params.get("thresholds") is not None:
            self._check_length(self.thresholds.typeConverter(params["thresholds"]))
        return super()._set(**params)

    def _check_length(self, thresholds: Sequence[float] | None) -> None:
        if thresholds is not None and self.widths and len(thresholds) != self.numClasses:
            raise ValueError(f"thresholds must have one number for each of {self.numClasses} classes, not {thresholds}")

    @property
    def _label_classes(self) -> int:
        """The number of classes that labels may have."""
        return self.numClasses

    def _check(self, facts: Facts) -> None:
        if len(self.widths) != 1:
            raise ValueError(f"a classifier's model has one output, this one has {len(self.widths)}")
        if self.expected not in (None, self.numClasses):
            raise ValueError(f"numClasses={self.expected}, but the model has {self.widths[0] or 1} outputs a row")
        self._check_length(self.value("thresholds"))
        found = facts.get(self.layout.labels[0], {})
        if found and not 0 <= found["min"] <= found["max"] < self.numClasses:
            raise ValueError(not_in_classes(self.layout.labels[0], found["min"], found["max"], self.numClasses))

    def _outputs(self) -> dict[str, int]:
        columns = {"rawPredictionCol": self.numClasses, "probabilityCol": self.numClasses, "predictionCol": 0}
        return named_once((self.value(name), width) for name, width in columns.items() if self.value(name))

    def _finish(self, outputs: Mapping[str, int]) -> Finish:
        roles = {self.value(f"{role}Col"): role for role in ("rawPrediction", "probability", "prediction")}
        thresholds = self.value("thresholds")
        self._check_length(thresholds)
        return Classes({name: roles.get(name, "prediction") for name in outputs}, thresholds, self._gives_probabilities)

    def _metadata(self, name: str) -> dict[str, Json]:
        return self.label_metadata if name == self.value("predictionCol") else {}

    def _evaluators(self, columns: Mapping[str, Any]) -> dict[str, Evaluator]:
        given = {key: value for key, value in columns.items() if key not in self._scored}
        classes = {**given, "predictionCol": columns["predictionCol"]}
        found: dict[str, Evaluator] = {
            name: MulticlassClassificationEvaluator(metricName=name, **classes) for name in METRICS
        }
        if "probabilityCol" in columns:
            found["logLoss"] = MulticlassClassificationEvaluator(
                metricName="logLoss",  # type: ignore[arg-type]  # Spark has it, its annotation does not
                probabilityCol=columns["probabilityCol"],
                **classes,
            )
        if self.numClasses == 2 and "rawPredictionCol" in columns:
            for name in ("areaUnderROC", "areaUnderPR"):
                found[name] = BinaryClassificationEvaluator(
                    metricName=name, rawPredictionCol=columns["rawPredictionCol"], **given
                )
        return found

    def _check_labels(self, name: str, least: float, most: float, fraction: float) -> None:
        if fraction:
            raise ValueError(not_a_class(name, fraction))
        if least < 0 or most >= self.numClasses:
            raise ValueError(not_in_classes(name, least, most, self.numClasses))


class Classes:
    """Makes raw predictions, probabilities and classes from logits [rows, classes], or [rows] for two classes."""

    def __init__(self, roles: Mapping[str, str], thresholds: Sequence[float] | None, is_probability: bool) -> None:
        self.roles, self.thresholds, self.is_probability = dict(roles), thresholds, is_probability

    def __call__(self, values: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the output columns, by name."""
        raw = as_rows(values[0])
        if self.is_probability:
            raw = probability = np.hstack([1 - raw, raw]) if raw.shape[1] == 1 else raw
        else:
            raw = np.hstack([-raw, raw]) if raw.shape[1] == 1 else raw
            # The softmax of two logits -z and z is sigmoid(2 z), but a single logit z means sigmoid(z).
            probability = _softmax(raw / 2 if values[0].size == len(values[0]) else raw)
        score = probability if self.thresholds is None else _over(probability, np.asarray(self.thresholds, np.float64))
        found = {"rawPrediction": raw, "probability": probability, "prediction": score.argmax(1).astype(np.float64)}
        return {name: found[role] for name, role in self.roles.items()}


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    result: np.ndarray = powers / powers.sum(1, keepdims=True)
    return result


def _over(probability: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Divide probabilities by thresholds, as Spark ML does; a class with a threshold of 0 then has the largest quotient."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result: np.ndarray = np.nan_to_num(probability / thresholds, nan=0.0, posinf=np.inf)
    return result
