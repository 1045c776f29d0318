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

import spark_elastic
from spark_elastic.cli import COMMANDS
from spark_elastic.driver.settings import JobSettings
from spark_elastic.estimator import TorchClassifier, TorchEstimator, TorchRegressor
from spark_elastic.task.facts import worker_environment
from spark_elastic.worker.scripts import Meeting, environment

# What each environment variable is for. One that the code uses and that is missing here is a KeyError.
OURS = {
    "PYSPARK_PYTHON": "the executors' Python; unset, executors of a local master run the driver's",
    "JAVA_HOME": "read by `doctor`, as by Spark",
    "KERAS_BACKEND": "set to `torch` by `spark_elastic.keras`, unless it is set",
    "SPARK_REUSE_WORKER": "read in tasks; Spark sets it where it uses its Python processes again, and so warm parents are",
    "SPARK_HOME": "read by `doctor`: where `conf/spark-defaults.conf` is",
    "SPARK_CONF_DIR": "read by `doctor`: where `spark-defaults.conf` is",
    "NCCL_SOCKET_IFNAME": "set in workers with NCCL to the interface that reaches the driver, unless it is set",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "set to 0 in workers with NCCL: the driver aborts a world, torch's watchdog does not",
    "PYTHONPATH": "set in workers to the Spark task's import path",
    "OMP_NUM_THREADS": "set in workers to `spark.task.cpus`, unless it is set",
    "MKL_NUM_THREADS": "the same",
    "OPENBLAS_NUM_THREADS": "the same",
    "CUDA_VISIBLE_DEVICES": "set in workers to the GPU that Spark has assigned to the task",
    "SPARK_ELASTIC_DEVICE": "set in workers that have a GPU to what `device()` returns; `cuda:0`, the only one that they see",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "set in workers that have a GPU, so that asking for GPUs starts no CUDA before a fork",
}


def document() -> str:
    """The reference as Markdown."""
    sections = [
        "# Settings reference\n\nMade from the code by `docs/make_reference.py`. A dash is None.\n",
        "## run\n\n" + _table(("Argument", "Default", "Meaning"), _run_arguments()),
        "Raises:\n\n" + "".join(f"- `{names}`: {text}\n" for names, text in _entries("Raises")),
        "## Timeouts that few need to change\n\nKeyword arguments of `run`, in seconds.\n\n"
        + _table(("Argument", "Default", "Meaning"), _timeouts()),
        "## Environment variables\n\n" + _table(("Variable", "Use"), sorted(_variables())),
        "Scripts that are started by `spark-elastic run --restart-on-change` find, as under torchrun: "
        + ", ".join(f"`{name}`" for name in _script_variables())
        + ".\n",
        "## Params of the estimators\n\nWhat they mean in practice is told in [Estimators](estimator.md).\n\n"
        + _table(("Param", "Default", "Meaning"), _params(TorchEstimator)),
        "In place of `featureCols`, `inputs`, `labelCols` and `outputCols` the others have Spark ML's shared columns:\n\n"
        + "".join(f"- `{kind.__name__}`: {_further_params(kind)}\n" for kind in (TorchClassifier, TorchRegressor)),
        "## The command line\n\n`spark-elastic COMMAND --help` says the same.\n",
        *(_command(name, parser) for name, parser in _commands().items()),
    ]
    return "\n".join(sections)


def _run_arguments() -> Iterable[tuple[str, ...]]:
    parameters = inspect.signature(spark_elastic.run).parameters
    for name, text in _entries("Args"):
        if parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
            yield f"`{name}`", _shown(parameters[name].default), text


def _entries(section: str) -> list[tuple[str, str]]:
    """The names and texts in one section of the docstring of ``run``."""
    lines = inspect.getdoc(spark_elastic.run).split(f"\n{section}:\n")[1].split("\n\n")[0]
    entries = re.split(r"^ {4}(?=\S)", lines, flags=re.MULTILINE)[1:]
    return [(name, _prose(text)) for name, _, text in (entry.partition(":") for entry in entries)]


def _timeouts() -> Iterable[tuple[str, ...]]:
    """The fields of JobSettings that ``run`` takes by their names alone, with the comments above them."""
    source = inspect.getsource(JobSettings)
    known = inspect.signature(spark_elastic.run).parameters
    text = ""
    for field in fields(JobSettings):
        comment = re.search(rf"((?:    # .*\n)+)    {field.name}: ", source)
        text = _prose(comment[1].replace("#", "")) if comment else text
        if field.name not in known and field.name not in ("durable", "memory_setting", "adaptive_np"):
            yield f"`{field.name}`", _shown(field.default), text


def _variables() -> Iterable[tuple[str, ...]]:
    package = Path(spark_elastic.__file__).parent
    found = set(worker_environment({}, {}, ("0",), 1, []))
    for file in package.rglob("*.py"):
        found |= set(re.findall(r'environ(?:\.get\(|\.setdefault\(|\[)"(\w+)"', file.read_text(encoding="utf-8")))
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


def _further_params(kind: Any) -> str:
    """The Params that TorchEstimator has not. What the shared ones mean is told by Spark."""
    known = {param.name for param in TorchEstimator().params}
    return ", ".join(f"`{param.name}`" for param in kind().params if param.name not in known)


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
            rows.append((f"`{shown}`", _prose(action.help or f"as `{action.dest}` of `run`")))
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
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _prose(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("docs/events.md", "[the event log](events.md)").split())


if __name__ == "__main__":
    print(document(), end="")
