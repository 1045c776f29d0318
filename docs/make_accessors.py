"""Writes the types of estimators' getters and setters: make_accessors.py > spark_elastic/estimator/accessors.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.ml.param import Param

from spark_elastic.estimator import classifier, estimator, model, params, prediction
from spark_elastic.estimator.params import converter_of

# What a getter returns and what a setter takes, by the converter.
TYPES = {
    "boolean": ("bool", "bool"),
    "callback_list": ("list[object]", "object"),
    "logger_list": ("list[Logger]", "Logger | Sequence[Logger]"),
    "class_weights": (
        "str | list[float] | dict[int, float]",
        "str | Sequence[float] | Mapping[int, float]",
    ),
    "class_thresholds": ("list[float]", "Sequence[float]"),
    "folder": ("str", "str | os.PathLike[str]"),
    "function": ("Function", "Function"),
    "functions": ("Function | list[Function]", "Function | Sequence[Function]"),
    "inputs": ("dict[str, object]", "Mapping[str, object]"),
    "json_dict": ("dict[str, object]", "Mapping[str, object]"),
    "keywords": ("dict[str, object]", "Mapping[str, object]"),
    "metrics": ("dict[str, Function]", "Function | Sequence[Function] | Mapping[str, Function]"),
    "module": ("Module", "Module"),
    "names": ("list[str]", "str | Sequence[str]"),
    "number": ("float", "float"),
    "numbers": ("list[float]", "Sequence[float]"),
    "one_of": ("str", "str"),
    "optimizer": ("Optimizer | Callable[..., Optimizer]", "Optimizer | Callable[..., Optimizer]"),
    "store": ("Store", "Store | str"),
    "task_resources": ("dict[str, float] | ResourceProfile", "Mapping[str, float] | ResourceProfile"),
    "text": ("str", "str"),
    "toString": ("str", "str"),
    "whole": ("int", "int"),
}
CLASSES = (
    params.FitParams,
    params.TrainingParams,
    estimator.TorchEstimator,
    model.ElasticModel,
    model.TorchModel,
    prediction.HasPredictorCols,
    prediction.Predictor,
    classifier.HasClassifierCols,
    classifier.TorchClassifier,
)
HEAD = '''"""The getters and setters that estimators and models have for their Params, as type checkers and editors see them.

They are made when the classes are. Made by ``python docs/make_accessors.py > spark_elastic/estimator/accessors.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from pyspark.resource import ResourceProfile
    from torch.nn import Module
    from torch.optim import Optimizer
    from typing_extensions import Self

    from spark_elastic.estimator.store import Store
    from spark_elastic.loggers import Logger

    Function = Callable[..., Any]
'''


def document() -> str:
    """Return the module."""
    parts = [HEAD]
    for cls in CLASSES:
        parts.append(f'\n\nclass {cls.__name__}Accessors:\n    """For ``{cls.__name__}``."""\n\n    if TYPE_CHECKING:')
        parts += [f"\n\n        {line}" for line in accessors(cls)]
        parts.append("\n")
    return "".join(parts)


def accessors(cls: type) -> Iterator[str]:
    """Yield the signatures of what a class adds to its bases, in the order of names."""
    own = {name for name in dir(cls) if isinstance(getattr(cls, name), Param)}
    for base in cls.__bases__:
        if issubclass(base, CLASSES):
            own -= {name for name in dir(base) if isinstance(getattr(base, name), Param)}
    for name in sorted(own):
        param: Param[Any] = getattr(cls, name)
        got, taken = TYPES[converter_of(param)]
        title = name[0].upper() + name[1:]
        if not any(hasattr(base, f"get{title}") for base in cls.__bases__):
            yield f"def get{title}(self) -> {got} | None: ..."
        yield f"def set{title}(self, value: {taken}) -> Self: ..."


if __name__ == "__main__":
    print(document(), end="")
