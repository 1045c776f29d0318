"""load_network reads what any release has saved, in a process that cannot import Spark."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spark_elastic.errors import CheckpointError, DamagedError
from spark_elastic.estimator import load_network

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "tests" / "kept"


@pytest.mark.parametrize("kept", ["format-1", "format-2"])
def test_without_spark_a_saved_network_scores_as_it_did(kept: str) -> None:
    program = f"""
import sys
sys.modules["pyspark"] = sys.modules["py4j"] = None
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
import json, torch, warnings
warnings.simplefilter("ignore")
from spark_elastic.estimator import load_network
rows = json.load(open({str(KEPT / kept / "scores.json")!r}))
network = load_network({str(KEPT / kept / "model")!r})
assert not network.training
print(json.dumps(network(torch.tensor([[row["a"], row["b"]] for row in rows])).squeeze(1).tolist()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    scores = [row["score"] for row in json.loads((KEPT / kept / "scores.json").read_text())]
    assert json.loads(done.stdout) == pytest.approx(scores, abs=1e-6)


def test_it_warns_that_code_is_run_and_takes_urls() -> None:
    with pytest.warns(UserWarning, match="runs the code that is saved in it"):
        network = load_network((KEPT / "format-2" / "model").as_uri() + "/")
    assert isinstance(network, torch.nn.Module)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("pipeline", "not a model of spark_elastic.estimator; those of a saved pipeline are in its folder stages"),
        ("estimator", "holds a .*TorchEstimator, not a model"),
        ("runs", "holds no saved model: it has no metadata"),
    ],
)
def test_a_folder_without_a_model_is_named(folder: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_network(KEPT / "format-2" / folder)


def test_a_later_format_and_damage_are_errors(tmp_path: Path) -> None:
    copied = tmp_path / "model"
    shutil.copytree(KEPT / "format-2" / "model", copied)
    weights = copied / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.warns(match="runs the code"), pytest.raises(DamagedError, match="are not those that were written"):
        load_network(copied)
    (part,) = (copied / "metadata").glob("part-*")
    metadata = json.loads(part.read_text())
    metadata["sparkElastic"]["format"] = 99
    part.write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match="has format 99"):
        load_network(copied)
    part.write_text("{")
    with pytest.raises(DamagedError, match="its metadata"):
        load_network(copied)
