"""The Params of estimators and models: documentation, getters and setters. ``converters`` defines what each accepts."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pyspark.ml.param import Param, Params

from spark_elastic._json import Json
from spark_elastic.data.engine import ENGINES
from spark_elastic.driver.run import DRIVERS
from spark_elastic.estimator.accessors import FitParamsAccessors, TrainingParamsAccessors
from spark_elastic.estimator.converters import (
    Converter,
    boolean,
    callback_list,
    folder,
    function,
    functions,
    json_dict,
    keywords,
    logger_list,
    metrics,
    module,
    number,
    numbers,
    one_of,
    optimizer,
    store,
    task_resources,
    text,
    whole,
)

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class Parameterized(Params):
    """Params given by keyword, each with ``getX`` and ``setX``. ``defaults`` holds defaults that JSON can represent."""

    defaults: ClassVar[dict[str, Json]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        names = [name for name in dir(cls) if isinstance(inspect.getattr_static(cls, name), Param)]
        for name in names:
            title = name[0].upper() + name[1:]
            for prefix, make in (("get", _getter), ("set", _setter)):
                if not hasattr(cls, prefix + title):
                    setattr(cls, prefix + title, make(name, prefix + title, getattr(cls, name).doc))
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in sorted(names)]
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def __init__(self, **params: object) -> None:
        super().__init__()
        for name, value in self.defaults.items():
            self._setDefault(**{name: value})
        self.setParams(**params)

    def __setattr__(self, name: str, value: object) -> None:
        """Raise AttributeError for ``estimator.epochs = 5``, which would replace the Param by a number."""
        if not isinstance(value, Param) and isinstance(inspect.getattr_static(type(self), name, None), Param):
            raise AttributeError(f"{name} is a Param: write set{name[0].upper()}{name[1:]}({value!r})")
        super().__setattr__(name, value)

    def setParams(self, **params: object) -> Self:
        """Set Params by keyword. Raises TypeError for unknown names and values of wrong types, ValueError for wrong values."""
        for name in params:
            if not self.hasParam(name):
                close = difflib.get_close_matches(name, [param.name for param in self.params], 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}{hint}")
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def set(self, param: Param[Any], value: object) -> None:
        """Set a Param as its setter does, whose checks Spark's own method goes round."""
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def _set(self, **params: object) -> Self:
        """Set Params; None clears them, which leaves the default."""
        for name, value in params.items():
            if value is None:
                self.clear(self.getParam(name))
        return super()._set(**{name: value for name, value in params.items() if value is not None})

    def value(self, name: str) -> Any:
        """Return the value of a Param, or its default, or None."""
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else None


def _getter(name: str, title: str, doc: str) -> Callable[[Parameterized], object]:
    def get(self: Parameterized) -> object:
        return self.value(name)

    get.__name__, get.__doc__ = title, f"Get {name}: {doc}"
    return get


def _setter(name: str, title: str, doc: str) -> Callable[[Parameterized, object], Parameterized]:
    def set(self: Parameterized, value: object) -> Parameterized:
        return self._set(**{name: value})

    set.__name__, set.__doc__ = title, f"Set {name}: {doc}"
    return set


def param(name: str, doc: str, convert: Converter[T]) -> Param[T | None]:
    """Make a Param whose conversion errors name it."""
    return Param(Params._dummy(), name, doc, typeConverter=_Named(name, convert))


class _Named(Generic[T]):
    """A converter whose errors name the Param. It is pickled with each estimator and model, by name."""

    def __init__(self, name: str, convert: Converter[T]) -> None:
        self.name = name
        self.convert = convert

    def __call__(self, value: object) -> T | None:
        if value is None:
            return None
        try:
            return self.convert(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None


def converter_of(param: Param[object]) -> str:
    """Return the name of a Param's converter, or of the function that made it."""
    convert: Any = param.typeConverter.convert if isinstance(param.typeConverter, _Named) else param.typeConverter
    convert = convert.func if isinstance(convert, functools.partial) else convert
    return str(convert.__name__).lstrip("_")


FEATURE_COLS = "columns, one for each positional argument of forward, or side by side where it takes one argument"
CATEGORICAL_COLS = (
    "columns of indexes of categories, as StringIndexer makes them; int64 [rows, columns], the last argument of forward"
)


class FitParams(Parameterized, FitParamsAccessors):
    """How estimators train. Their models have these Params, too, as Spark's own models do."""

    modelFn = param("modelFn", "makes the network, called with modelParams; instead of model", function)
    modelParams = param("modelParams", "keyword arguments of modelFn that JSON can represent, for grids", json_dict)
    optimizer = param(
        "optimizer", "a class, a function of the parameters, or an instance over the model's own", optimizer
    )
    optimizerParams = param("optimizerParams", "keyword arguments of the optimizer's class or function", keywords)
    learningRate = param("learningRate", "lr of the optimizer; overrides optimizerParams", number(0, low_open=True))
    loss = param("loss", "a function of (output, label), or one for each label", functions)
    lossWeights = param("lossWeights", "a factor for each loss", numbers)
    metrics = param("metrics", "functions of (output, label) or torchmetrics; a list, or a dict by name", metrics)
    batchSize = param(
        "batchSize",
        "rows of a batch on each worker; with neither this nor globalBatchSize, fit picks globalBatchSize by the data",
        whole(1),
    )
    globalBatchSize = param(
        "globalBatchSize", "rows of a batch on all workers together; instead of batchSize", whole(1)
    )
    deterministic = param(
        "deterministic",
        "whether weights, losses and metrics have the same bits with any number of workers; not with batchSize",
        boolean,
    )
    shards = param(
        "shards",
        "with deterministic, into how many parts a batch is cut, at least maxNp; None: 24, or globalBatchSize if that is less",
        whole(1),
    )
    balance = param(
        "balance",
        "auto: workers' rows of a batch follow how fast they compute them; not with batchSize. None: all have equally many",
        one_of("auto"),
    )
    valBatchSize = param(
        "valBatchSize",
        "rows of a validation batch on each worker; default as many as a training batch has there",
        whole(1),
    )
    transformBatchSize = param("transformBatchSize", "rows of a batch in transform", whole(1))
    epochs = param("epochs", "passes over the data", whole(1))
    stepsPerEpoch = param("stepsPerEpoch", "optimizer steps after which an epoch ends, at most a pass", whole(1))
    validationFraction = param(
        "validationFraction", "fraction of the rows, chosen at random, that is used for validation", number(0, 1)
    )
    stratifyCol = param(
        "stratifyCol",
        "column of classes, of each of which validationFraction takes that share; not for fit_on_parquet",
        text,
    )
    numProc = param("numProc", "workers to wait for at the start", whole(1))
    minNp = param("minNp", "the number of workers below which training waits", whole(1))
    maxNp = param("maxNp", "the largest number of workers to request from Spark", whole(1))
    adaptiveNp = param(
        "adaptiveNp",
        "whether fewer workers train, down to minNp, if that is measured to be faster; CPUs and global batches only",
        boolean,
    )
    resetLimit = param("resetLimit", "resets caused by failures after which fit fails", whole(0))
    startTimeout = param("startTimeout", "seconds to get workers", number(0, low_open=True))
    elasticTimeout = param("elasticTimeout", "seconds to get back to minNp workers", number(0, low_open=True))
    hangTimeout = param("hangTimeout", "seconds that the others may wait for one worker", number(0, low_open=True))
    replaceSlow = param(
        "replaceSlow",
        "fraction of the others' speed below which a worker is replaced, such as 0.1; None replaces none for being slow",
        number(0, 1, low_open=True),
    )
    driver = param(
        "driver",
        "where the driver of the fit runs: client, or cluster, for sessions whose executors cannot reach this process",
        one_of(*DRIVERS),
    )
    runId = param(
        "runId", "name of the run; fit resumes where the last run of this name stopped. None: a new run", text
    )
    reuseData = param("reuseData", "whether an unchanged DataFrame is not written again", boolean)
    commitSteps = param(
        "commitSteps",
        "steps after which a commit is made, besides the one at the end of each epoch; a loss repeats the steps since then",
        whole(1),
    )
    zeroRedundancy = param(
        "zeroRedundancy",
        "whether each of three workers or more keeps the optimizer's state of some parameters only, and slices of commits",
        boolean,
    )
    checkpointSteps = param(
        "checkpointSteps", "steps after which a checkpoint is due, besides the one at the end of each epoch", whole(1)
    )
    backwardPassesPerStep = param("backwardPassesPerStep", "batches whose gradients make one step", whole(1))
    findUnusedParameters = param(
        "findUnusedParameters",
        "whether some parameters get a gradient in some steps only, as where the data decide what forward uses, which costs time "
        "in each step; not needed for parameters that get no gradient on the first rows, which a trial step finds",
        boolean,
    )
    gradientClipNorm = param("gradientClipNorm", "largest norm of all gradients together", number(0, low_open=True))
    gradientClipValue = param("gradientClipValue", "largest absolute value of a gradient", number(0, low_open=True))
    mixedPrecision = param("mixedPrecision", "bf16 or fp16 (with gradient scaling)", one_of("bf16", "fp16"))
    scheduler = param("scheduler", "a class or function of the optimizer", function)
    schedulerParams = param("schedulerParams", "keyword arguments of the scheduler", keywords)
    schedulerInterval = param("schedulerInterval", "when the scheduler steps: epoch or step", one_of("epoch", "step"))
    trainStep = param(
        "trainStep", "function of (model, batch, ctx) that returns the loss, or (loss, outputs)", function
    )
    shuffle = param("shuffle", "whether rows are shuffled, in another order each epoch", boolean)
    seed = param("seed", "seed of shuffling, splitting and initial random numbers", whole(0))
    engine = param("engine", "the library that reads Parquet: arrow or petastorm", one_of(*ENGINES))
    readers = param(
        "readers", "number of reader workers of the petastorm engine; arrow reads ahead on one thread", whole(1)
    )
    terminateOnNaN = param(
        "terminateOnNaN", "whether a loss that is NaN or infinite ends the fit; otherwise it is only logged", boolean
    )
    verbose = param("verbose", "0: no lines, except of a loss that is not finite, 1: a line for each epoch", whole(0))


class TrainingParams(FitParams, TrainingParamsAccessors):
    """The Params that all estimators have in common."""

    model = param("model", "the network, a torch.nn.Module; fit trains a copy", module)
    store = param("store", "a Store or its URL; in local modes a temporary folder if none is given", store)
    callbacks = param(
        "callbacks", "objects with on_epoch_end(ctx) or other methods of Callback, called on rank 0", callback_list
    )
    loggers = param(
        "loggers", "where numbers are logged, from the driver: MLflowLogger, TensorBoardLogger", logger_list
    )
    eventLogDir = param(
        "eventLogDir",
        "folder of this machine where each fit writes its event log, as <run id>.jsonl, for spark-elastic timeline and summary",
        folder,
    )
    transform = param(
        "transform",
        "function from a batch (dict of column tensors) to a batch, before training and validation steps",
        function,
    )
    resourceProfile = param(
        "resourceProfile",
        "what each task is given while it trains: a dict with cpus and gpus, or a Spark ResourceProfile",
        task_resources,
    )
    useGpu = param("useGpu", "True: GPUs only, False: CPUs only, None: what Spark has assigned", boolean)

    defaults: ClassVar[dict[str, Json]] = {
        "transformBatchSize": 1024,
        "epochs": 1,
        "adaptiveNp": True,
        "driver": "client",
        "validationFraction": 0.0,
        "deterministic": False,
        "reuseData": True,
        "commitSteps": 1,
        "zeroRedundancy": False,
        "backwardPassesPerStep": 1,
        "findUnusedParameters": False,
        "schedulerInterval": "epoch",
        "shuffle": True,
        "seed": 0,
        "engine": "arrow",
        "terminateOnNaN": True,
        "verbose": 1,
    }
