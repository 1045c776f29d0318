"""The public names and signatures, as docs and users have them."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

import spark_elastic

NAMES = spark_elastic.__all__
REQUIRED = inspect.Parameter.empty


def defaults(function: object) -> dict[str, object]:
    """The named parameters and their defaults."""
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in plain
    }


def test_every_error_that_a_user_may_catch_is_exported() -> None:
    assert set(importlib.import_module("spark_elastic.errors").__all__) <= set(NAMES)


@pytest.mark.parametrize("name", ["estimator", "huggingface", "keras", "lightning"])
def test_rooms_that_need_other_libraries_are_attributes_that_a_star_leaves_out(name: str) -> None:
    code = f"import spark_elastic; from spark_elastic import *; print(spark_elastic.{name}.__name__, '{name}' in dir())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"spark_elastic.{name}", "False"]


@pytest.mark.parametrize("package", ["spark_elastic", "spark_elastic.data", "spark_elastic.estimator"])
def test_type_checkers_see_the_names_that_are_exported(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(inspect.getsource(module))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert sorted(map(str, seen)) == list(module.__all__)
    for name, (home, original) in seen.items():
        assert name == original, "or it is not exported"
        found = getattr(module, name)
        assert found is getattr(importlib.import_module(str(home)), name, None) or inspect.ismodule(found)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_can_be_had_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(spark_elastic, name))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        spark_elastic.nothing  # noqa: B018


def test_dir_lists_the_public_names() -> None:
    assert set(NAMES) <= set(dir(spark_elastic))


def test_run_takes_what_the_contract_says() -> None:
    assert defaults(spark_elastic.run) == {
        "fn": REQUIRED,
        "args": (),
        "kwargs": None,
        "num_proc": None,
        "min_np": None,
        "max_np": None,
        "elastic": True,
        "start_timeout": 600.0,
        "elastic_timeout": 600.0,
        "hang_timeout": 300.0,
        "reset_limit": None,
        "replace_slow": None,
        "backend": None,
        "env": None,
        "spark": None,
        "local": False,
        "resources": None,
        "driver": "client",
        "network_interface": None,
        "driver_port": None,
        "checkpoint": None,
        "checkpoint_interval": 60.0,
        "checkpoint_keep": 2,
        "checkpoint_best": None,
        "storage_options": None,
        "host_discovery_script": None,
        "event_log": None,
        "progress": None,
        "on_event": None,
        "loggers": (),
    }


def test_the_arguments_of_run_after_kwargs_are_keywords_only() -> None:
    parameters = list(inspect.signature(spark_elastic.run).parameters.values())[3:]
    assert {parameter.kind for parameter in parameters} <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("allreduce", {"tensor": REQUIRED, "op": "mean"}),
        ("allgather_object", {"obj": REQUIRED}),
        ("broadcast_object", {"obj": REQUIRED, "src": 0}),
        ("barrier", {}),
        ("rank", {}),
        ("size", {}),
        ("local_rank", {}),
        ("local_size", {}),
        ("cross_rank", {}),
        ("cross_size", {}),
        ("generation", {}),
        ("device", {}),
        ("process_group", {}),
        ("elastic", {"function": REQUIRED}),
        ("DistributedDataParallel", {"module": REQUIRED}),
        ("scale_learning_rate", {"optimizer": REQUIRED, "scheduler": None, "rule": "linear", "warmup_steps": 0}),
        ("micro_batches", {"model": REQUIRED, "batch": REQUIRED, "rows": REQUIRED}),
        (
            "ShardedState",
            {
                "build": REQUIRED,
                "shard": REQUIRED,
                "optimizer": REQUIRED,
                "scheduler": None,
                "loader": None,
                "local": None,
                "redundancy": 1,
            },
        ),
        (
            "TorchState",
            {
                "model": None,
                "optimizer": None,
                "scheduler": None,
                "loader": None,
                "commit": "copy",
                "local": None,
                "redundancy": 1,
            },
        ),
    ],
)
def test_the_other_names_take_what_the_contract_says(name: str, expected: dict[str, object]) -> None:
    assert defaults(getattr(spark_elastic, name)) == expected


@pytest.mark.parametrize(
    "method",
    [
        "commit",
        "check_host_updates",
        "save",
        "restore",
        "sync",
        "on_reset",
        "register_reset_callbacks",
        "heartbeat",
        "report",
    ],
)
def test_a_state_has_the_methods_of_the_contract(method: str) -> None:
    assert callable(getattr(spark_elastic.TorchState, method))


def test_outside_a_job_everything_answers_as_for_a_world_of_one() -> None:
    import torch

    assert (spark_elastic.rank(), spark_elastic.size(), spark_elastic.generation()) == (0, 1, 0)
    assert (spark_elastic.local_rank(), spark_elastic.local_size()) == (0, 1)
    assert (spark_elastic.cross_rank(), spark_elastic.cross_size()) == (0, 1)
    assert spark_elastic.process_group() is None
    assert spark_elastic.device().type in ("cpu", "cuda")
    assert spark_elastic.allgather_object("x") == ["x"]
    assert spark_elastic.broadcast_object("x") == "x"
    spark_elastic.barrier()
    tensor = torch.ones(2)
    assert torch.equal(spark_elastic.allreduce(tensor, "sum"), tensor)
    assert spark_elastic.allreduce(tensor) is not tensor


@pytest.mark.parametrize(("op", "words"), [("median", "mean, sum, min, max"), ("mean", "convert the tensor")])
def test_a_reduction_that_makes_no_sense_is_refused(op: str, words: str) -> None:
    import torch

    with pytest.raises(ValueError, match=words):
        spark_elastic.allreduce(torch.ones(2, dtype=torch.int64), op)


def test_what_is_no_tensor_is_not_reduced() -> None:
    with pytest.raises(TypeError, match=r"tensor must be a torch.Tensor, not int"):
        spark_elastic.allreduce(3)


def test_a_source_that_is_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 0"):
        spark_elastic.broadcast_object("x", src=1)
    with pytest.raises(ValueError, match="src must be a whole number, not None"):
        spark_elastic.broadcast_object("x", src=None)  # type: ignore[arg-type]


def test_importing_the_package_and_its_driver_side_needs_neither_torch_nor_a_jvm() -> None:
    code = (
        "import sys, spark_elastic, spark_elastic.driver.service, spark_elastic.driver.run, spark_elastic.testing; "
        "print([name for name in ('torch', 'pyspark', 'py4j', 'pyarrow') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_driver_and_task_never_import_each_other() -> None:
    code = (
        "import sys, spark_elastic.{one}, spark_elastic.{one}.service; "
        "print([name for name in sys.modules if name.startswith('spark_elastic.{other}')])"
    )
    for one, other in (("driver", "task"), ("task", "driver")):
        program = code.format(one=one, other=other)
        shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert shown.strip() == "[]"
