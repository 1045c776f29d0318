"""The examples, each in a small form, and those of README.md as they stand."""

from __future__ import annotations

import base64
import io
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples_here import example, run_main
from PIL import Image

import spark_elastic
from spark_elastic.data.manifest import UNISCHEMA_KEY
from spark_elastic.testing import kill

ROOT = Path(__file__).parents[2]
# What petastorm 0.12.1 writes for the schema of images_petastorm.py; it needs an environment of its own.
STRIPES = base64.b64decode(
    "gASVegEAAAAAAACME3BldGFzdG9ybS51bmlzY2hlbWGUjAlVbmlzY2hlbWGUk5QpgZR9lCiMBV9uYW1llIwHU3RyaXBlc5SMB19maWVsZHOUjAtjb2xs"
    "ZWN0aW9uc5SMC09yZGVyZWREaWN0lJOUKVKUKIwFaW1hZ2WUaACMDlVuaXNjaGVtYUZpZWxklJOUKGgMjAVudW1weZSMBXVpbnQ4lJOUSxBLEEsDh5SM"
    "EHBldGFzdG9ybS5jb2RlY3OUjBRDb21wcmVzc2VkSW1hZ2VDb2RlY5STlCmBlH2UKIwMX2ltYWdlX2NvZGVjlIwELnBuZ5SMCF9xdWFsaXR5lEtQdWKJ"
    "dJSBlIwIdmVydGljYWyUaA4oaB1oD4wFaW50MzKUk5QpaBOMC1NjYWxhckNvZGVjlJOUKYGUfZSMC19zcGFya190eXBllIwRcHlzcGFyay5zcWwudHlw"
    "ZXOUjAtJbnRlZ2VyVHlwZZSTlCmBlHNiiXSUgZR1aAxoHGgdaCp1Yi4="
)


@pytest.fixture
def run_example(spark: Any) -> Callable[..., Any]:
    return run_main


def test_quick_start_fits_a_line_though_a_worker_is_killed(run_example: Any) -> None:
    losses = run_example("quick_start", "--steps", "200", "--workers", "2", faults=[kill(rank=0, step=50)])
    assert max(losses) < 0.1


def test_map_style_dataset_counts_every_item(run_example: Any) -> None:
    results = run_example("map_style_dataset", "--items", "2000", "--epochs", "2", "--workers", "2")
    assert [result["items"] for result in results] == [4000, 4000]
    assert all(result["right"] > 0.7 for result in results)


def test_evaluation_keeps_the_best_weights_and_counts_every_validation_row(run_example: Any, tmp_path: Path) -> None:
    arguments = ["--data", tmp_path.as_uri(), "--rows", "2000", "--epochs", "2", "--workers", "2"]
    result = run_example("evaluation", *arguments, faults=[kill(rank=1, step=30)])
    assert [metrics["rows"] for metrics in result["history"]] == [400] * 2
    module = example("evaluation")
    best = spark_elastic.DistributedDataParallel(module.network())
    best.module.load_state_dict(result["best"])
    found = module.evaluate(best, f"{tmp_path.as_uri()}/validation")["mse"]
    assert found == pytest.approx(min(metrics["mse"] for metrics in result["history"]), rel=1e-4)


def test_mixed_precision_ends_with_equal_weights_after_the_whole_course(run_example: Any) -> None:
    results = run_example("mixed_precision", "--epochs", "2", "--workers", "2", faults=[kill(rank=1, step=9)])
    assert len({result["weights"] for result in results}) == 1
    rates = results[0]["rates"]
    assert len(rates) == 32
    assert rates[-1] < rates[0] < max(rates)


def test_images_in_petastorm_format_are_decoded_and_told_apart(run_example: Any, tmp_path: Path) -> None:
    pairs = [example("images_petastorm").stripes(index) for index in range(600)]
    files = [io.BytesIO() for _ in pairs]
    for (pixels, _), file in zip(pairs, files, strict=True):
        Image.fromarray(pixels).save(file, "png")
    labels = pa.array(np.array([vertical for _, vertical in pairs], np.int32))
    table = pa.table({"image": [file.getvalue() for file in files], "vertical": labels})
    pq.write_table(table, tmp_path / "part-0.parquet", row_group_size=100)
    pq.write_metadata(table.schema.with_metadata({UNISCHEMA_KEY: STRIPES}), tmp_path / "_common_metadata")
    results = run_example("images_petastorm", "--data", tmp_path.as_uri(), "--epochs", "3", "--workers", "2")
    assert [result["images"] for result in results] == [1800, 1800]
    assert all(result["right"] > 0.8 for result in results)


def test_the_example_for_gpus_runs_on_cpus_and_ends_with_equal_weights(run_example: Any, tmp_path: Path) -> None:
    arguments = ["--rows", "5000", "--epochs", "2", "--commit", "host", "--workers", "2"]
    results = run_example("gpu_cluster", *arguments, "--data", tmp_path.as_uri())
    assert [result["device"] for result in results] == ["cpu", "cpu"]
    assert results[0]["weights"] == results[1]["weights"]


def test_custom_state_finds_the_places_though_a_worker_is_killed(run_example: Any) -> None:
    results = run_example("custom_state", "--points", "3000", "--workers", "2", faults=[kill(rank=0, step=5)])
    expected = [pytest.approx(place, abs=0.1) for place in ([0.0, 0.0], [4.0, 0.0], [0.0, 4.0])]
    assert all(centres == expected for centres in results)


@pytest.mark.filterwarnings("ignore")
def test_the_flights_pipeline_learns_from_a_share_of_the_flights(run_example: Any, capsys: Any) -> None:
    arguments = ["--share", "0.05", "--models", "network", "--split", "random", "--epochs", "2"]
    assert run_example("flights_pipeline", *arguments) == 0
    auc = re.search(r"random fifth: network +AUC (\S+)", capsys.readouterr().out)
    assert auc is not None
    assert float(auc[1]) > 0.6


def test_the_port_of_the_horovod_script_learns_and_the_script_compiles(run_example: Any) -> None:
    path = ROOT / "examples" / "horovod_before.py"
    compile(path.read_text(), str(path), "exec")
    losses = run_example("horovod_after", "--epochs", "2")
    assert len(set(losses)) == 1
    assert losses[0] < 1


def test_the_readme_has_three_examples_that_run_as_they_stand(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    spaces: list[dict[str, Any]] = []
    printed: list[str] = []
    for block in blocks:
        spaces.append({"__name__": "readme"})
        exec(compile(block, "README.md", "exec"), spaces[-1])
        printed.append(capsys.readouterr().out)
    line, loader, estimator = spaces
    assert max(line["losses"]) < 0.1
    assert printed[0] == f"losses of the workers: {line['losses']}\n"
    assert printed[1] == "".join(f"40000 rows counted, weight {weight:.2f}\n" for _, weight in loader["results"])
    for rows, weight in loader["results"]:
        assert rows == 40_000
        assert weight == pytest.approx(3, abs=0.2)
    assert estimator["model"].history[-1]["loss"] < 0.02


@pytest.mark.parametrize(
    ("name", "course", "rounds"),
    [("local_sgd", ["--rows", "8000", "--every", "8"], 8), ("diloco", ["--windows", "8000", "--every", "16"], 8)],
)
def test_rounds_of_local_steps_end_with_equal_weights_and_every_row_counted(
    run_example: Any, name: str, course: list[str], rounds: int
) -> None:
    results = run_example(name, *course, "--epochs", "3", "--workers", "2", faults=[kill(rank=0, step=rounds)])
    assert len({result["weights"] for result in results}) == 1
    assert {result["rows"] for result in results} == {3 * 8000}
    assert all(result["right"] > 0.9 for result in results)


def test_the_exporter_for_prometheus_serves_what_has_happened_to_the_job(run: Any) -> None:
    script = example("prometheus")
    with script.serve(0, "127.0.0.1") as (exporter, port):
        run(script.train_fn, 30, num_proc=2, min_np=2, max_np=2, faults=[kill(rank=1, step=10)], on_event=exporter)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert values["spark_elastic_steps_total"] == 30
    assert values['spark_elastic_resets_total{kind="loss"}'] == 1
    assert values['spark_elastic_resets_total{kind="planned"}'] == 0
    assert values["spark_elastic_world_size"] == 0, "the job is over"
    assert 0 < values["spark_elastic_goodput"] < 1
