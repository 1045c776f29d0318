"""Writes the settings reference from the code: python docs/make_reference.py > docs/reference.md."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import spark_elastic as se
from spark_elastic.cli import COMMANDS
from spark_elastic.driver.settings import RARE_SETTINGS, JobSettings
from spark_elastic.estimator import (
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from spark_elastic.estimator.params import FitParams
from spark_elastic.task.facts import worker_environment
from spark_elastic.worker.scripts import Meeting, environment

# What each environment variable is for. One that the code uses and that is missing here is a KeyError.
OURS = {
    "PYSPARK_PYTHON": "the executors' Python; unset, executors of a local master run the driver's",
    "SPARK_REMOTE": "read by `run` where there is no session: the Spark Connect server to train on, as for Spark's own sessions",
    "JAVA_HOME": "read by `doctor`, as by Spark",
    "KERAS_BACKEND": "set to `torch` by `spark_elastic.keras`, unless it is set",
    "SPARK_REUSE_WORKER": "read in tasks; Spark sets it where it uses Python processes again, and importers are kept there, too",
    "SPARK_ELASTIC_EXECUTOR_PID": "set in workers to the process of their executor, which injected faults strike",
    "SPARK_ELASTIC_PRELOAD": "modules, separated by commas, that the process imports from which workers are forked "
    "([more](howto/training.md#the-second-run))",
    "SPARK_ELASTIC_TASK_PID": "set in workers to the process of their task, which injected faults strike, too",
    "SPARK_HOME": "read by `doctor`: where `conf/spark-defaults.conf` is",
    "SPARK_CONF_DIR": "read by `doctor`: where `spark-defaults.conf` is",
    "SPARK_LOCAL_HOSTNAME": "read by `doctor`: how Spark names this machine to executors, if `spark.driver.host` is not set",
    "SPARK_LOCAL_IP": "the same",
    "NCCL_SOCKET_IFNAME": "set in workers with NCCL, and in scripts of `--restart-on-change`, to the interface that workers use "
    "among themselves, unless it is set",
    "GLOO_SOCKET_IFNAME": "set in scripts of `--restart-on-change` to the interface that workers use among themselves, "
    "unless it is set",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "set to 0 in workers with NCCL: the driver aborts a world, torch's watchdog does not",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "set to 0 in workers with NCCL, unless it is set: torch's monitor would end the process",
    "TORCH_NCCL_ENABLE_MONITORING": "the same",
    "MALLOC_MMAP_THRESHOLD_": "read in workers with a `ShardedState`: unless it is set, glibc maps each tensor of 64 KiB or more "
    "separately, so that its memory goes back to the machine at once",
    "PYTHONPATH": "set in workers to the Spark task's import path",
    "OMP_NUM_THREADS": "set in workers to `spark.task.cpus`, unless it is set",
    "MKL_NUM_THREADS": "set in workers to the number of `OMP_NUM_THREADS`, unless it is set",
    "OPENBLAS_NUM_THREADS": "the same",
    "CUDA_VISIBLE_DEVICES": "set in workers to the GPU that Spark has assigned to the task",
    "SPARK_ELASTIC_DEFAULT_THREADS": "set in workers if nobody has chosen a number of threads, so that `shards=` takes one",
    "SPARK_ELASTIC_DEVICE": "set in workers that have a GPU to what `device()` returns; `cuda:0`, the only one that they see",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "set in workers that have a GPU, so that asking for GPUs starts no CUDA before a fork",
}

MODELS = (TorchModel, TorchClassificationModel, TorchRegressionModel)
# Whose arguments are listed, beside those of run.
SIGNATURES = (
    se.data.ParquetLoader,
    se.data.ElasticDataLoader,
    se.data.WeightedSamplingLoader,
    se.TorchState,
    se.ObjectState,
    se.DistributedDataParallel,
    se.ZeroRedundancyOptimizer,
    se.loggers.MLflowLogger,
    se.loggers.TensorBoardLogger,
    se.load_model,
    se.load_checkpoint,
)


def document() -> str:
    """The reference as Markdown."""
    sections = [
        "# Settings reference\n\nMade from the code by `docs/make_reference.py`. A dash is None.\n",
        "## run\n\n" + _table(("Argument", "Default", "Meaning"), _arguments(se.run)),
        "Raises:\n\n" + "".join(f"- `{names}`: {text}\n" for names, text in _entries(se.run, "Raises")),
        "## Timeouts that few need to change\n\nKeyword arguments of `run`, in seconds.\n\n"
        + _table(("Argument", "Default", "Meaning"), _timeouts())
        + "\n`adaptive_np=True` is one of these arguments, too: fewer workers train if [that is measured to be "
        "faster](estimator.md#number-of-workers).\n",
        "## Environment variables\n\n" + _table(("Variable", "Use"), sorted(_variables())),
        "Scripts that are started by `spark-elastic run --restart-on-change` find, as under torchrun: "
        + ", ".join(f"`{name}`" for name in _script_variables())
        + ".\n",
        "## Params of the estimators\n\n[Estimators](estimator.md) explains what they mean in practice.\n\n"
        + _table(("Param", "Default", "Meaning"), _params(TorchEstimator)),
        "The other estimators have no `inputs`, `labelCols` and `outputCols`. They have these Params besides, and all\n"
        "others with the same defaults:\n",
        *(_params_beside(kind, TorchEstimator) for kind in (TorchClassifier, TorchRegressor)),
        "## Params of the models\n\nA model has Params of the fit that made it, which tell how it was trained and have no\n"
        "defaults here. It has these besides:\n",
        *(_params_beside(kind, FitParams) for kind in MODELS),
        "## Loaders, states, wrappers, loggers, checkpoints\n\nThe API pages have the rest of what they do.\n",
        *(_signature(value) for value in SIGNATURES),
        "## The command line\n\n`spark-elastic COMMAND --help` says the same.\n",
        *(_command(name, parser) for name, parser in _commands().items()),
    ]
    return "\n".join(sections)


def _arguments(value: Any) -> Iterable[tuple[str, ...]]:
    """The arguments, those in one line that the docstring tells together. One that it does not tell is a KeyError."""
    told = {name: (names, text) for names, text in _entries(value, "Args") for name in names.split(", ")}
    parameters = inspect.signature(value).parameters
    for name, parameter in parameters.items():
        names, text = told[name]
        together = [parameters[each] for each in names.split(", ")]
        if parameter is together[0] and (value, parameter.kind) != (se.run, inspect.Parameter.VAR_KEYWORD):
            defaults = dict.fromkeys(_shown(each.default) for each in together)
            yield ", ".join(f"`{_called(each)}`" for each in together), ", ".join(defaults), text


def _called(parameter: inspect.Parameter) -> str:
    return "**" * (parameter.kind is inspect.Parameter.VAR_KEYWORD) + parameter.name


def _signature(value: Any) -> str:
    return f"### {value.__name__}\n\n" + _table(("Argument", "Default", "Meaning"), _arguments(value))


def _entries(value: Any, section: str) -> list[tuple[str, str]]:
    """The names and texts in one section of a docstring."""
    lines = inspect.getdoc(value).split(f"\n{section}:\n")[1].split("\n\n")[0]
    entries = re.split(r"^ {4}(?=\S)", lines, flags=re.MULTILINE)[1:]
    return [(name, _prose(text)) for name, _, text in (entry.partition(":") for entry in entries)]


def _timeouts() -> Iterable[tuple[str, ...]]:
    """The fields of JobSettings that ``run`` takes by their names alone, with the comments above them."""
    source = inspect.getsource(JobSettings)
    text = ""
    for field in fields(JobSettings):
        comment = re.search(rf"((?:    # .*\n)+)    {field.name}: ", source)
        text = _prose(comment[1].replace("#", "")) if comment else text
        if field.name in RARE_SETTINGS and field.name != "adaptive_np":
            yield f"`{field.name}`", _shown(field.default), text


def _variables() -> Iterable[tuple[str, ...]]:
    package = Path(se.__file__).parent
    found = set(worker_environment({}, {}, ("0",), 1, []))
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= set(re.findall(r'environ(?:\.get\(|\.setdefault\(|\[)"(\w+)"', text))
        found |= set(re.findall(r'^\w+_VARIABLE = "(\w+)"', text, re.MULTILINE))
        found |= set(re.findall(r'"((?:GLOO|MALLOC|NCCL|TORCH_NCCL)_[A-Z_]+)"', text))
    return ((f"`{name}`", OURS[name]) for name in found if name in OURS or name not in _script_variables())


def _script_variables() -> list[str]:
    place = SimpleNamespace(local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    world = SimpleNamespace(rank=0, size=1, generation=1, me=place)
    return [*environment(world, Meeting("", 0, ""), "", 0), "TORCHELASTIC_ERROR_FILE"]  # type: ignore[arg-type]


def _params(kind: Any) -> Iterable[tuple[str, ...]]:
    estimator = kind()
    for param in estimator.params:
        default = estimator.getOrDefault(param) if estimator.hasDefault(param) else None
        yield f"`{param.name}`", _shown(default), _prose(param.doc.removesuffix("."))


def _params_beside(kind: Any, other: Any) -> str:
    """The Params that another kind lacks, or that have another meaning there, or a default here that is not the same there."""
    known = {name: (default, text) for name, default, text in _params(other)}
    own = []
    for name, default, text in _params(kind):
        same_default, same_text = known.get(name, ("", ""))
        if text != same_text or default not in (same_default, _shown(None)):
            own.append((name, default, text))
    return f"### {kind.__name__}\n\n" + _table(("Param", "Default", "Meaning"), own)


def _commands() -> dict[str, argparse.ArgumentParser]:
    commands = argparse.ArgumentParser(prog="spark-elastic").add_subparsers()
    for module in COMMANDS:
        module.add_to(commands)
    return dict(commands.choices)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            shown = ", ".join(action.option_strings) or (action.metavar or action.dest)
            rows.append((f"`{shown}`", _prose(action.help)))
    return f"### spark-elastic {name}\n\n{_prose(parser.description or '')}\n\n" + _table(("Option", "Meaning"), rows)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join(f"| {' | '.join(_escaped(cell) for cell in line)} |\n" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


def _shown(default: Any) -> str:
    if default in (inspect.Parameter.empty, MISSING):
        return ""
    if default is None:
        return "–"
    if isinstance(default, str):
        return f'`"{default}"`'
    if callable(default):
        return f"`{default.__qualname__}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _prose(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("docs/events.md", "[the event log](events.md)").split())


if __name__ == "__main__":
    print(document(), end="")
