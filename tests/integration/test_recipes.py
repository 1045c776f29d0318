"""The whole scripts of the documentation, each run as a user would, in a folder of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LIMIT_SECONDS = 300
# What each script prints, by its page and its place there.
PRINTED = {
    "coming-from/lightning.md:0": r"loss: 0\.0|loss: \d\.\d+e-",
    "coming-from/petastorm.md:0": "6000 rows in 3 epochs",
    "coming-from/petastorm.md:1": "^[89]\\d\\d rows of id, x1, x2$",
    "coming-from/ray.md:0": r"largest error of a weight: 0\.0",
    "coming-from/torchdistributor.md:0": r"loss: 0\.0|loss: \d\.\d+e-",
    "coming-from/torchrun.md:0": r"loss: 0\.0|loss: \d\.\d+e-",
    "howto/fully-sharded.md:0": r"^4 workers: epochs 2, loss \d\.\d+\n2 workers: epochs 3, loss 0\.",
    "recipes/accumulation.md:0": r"loss of the last batch: (0\.0|\d\.\d+e-)",
    "recipes/columns.md:0": r"right: (0\.9|1\.0)",
    "recipes/early-stopping.md:0": r"\d+ epochs; best (\d+\.\d+), and the kept network has \1$",
    "recipes/evaluation.md:0": r"^(\d\.\d{5} over 1001 rows\s*){3}$",
    "recipes/hyperparameters.md:0": r"(\{.*\} rmse 0\.\d+\n){4}best: 0\.01 \{'width': \d+\}",
    "recipes/images.md:0": r"loss: 0\.[0-3]",
    "recipes/imbalance.md:0": r"found of each class: \[0\.[6-9]\d*, 0\.[6-9]\d*\]",
    "recipes/logging.md:0": r"MLflow: FINISHED, \{'lr': '0\.1'\}, loss (0\.0\d+)\nTensorBoard: loss \1 at step 99$",
    "recipes/mixed-precision.md:0": r"torch.bfloat16: loss 0\.0\d+\ntorch.float16: loss 0\.0\d+",
    "recipes/optuna.md:0": r"best: \{'rate': 0\.\d+\}",
    "recipes/resuming.md:0": (
        "2 epochs: entered with 0 steps, left with 40\n3 epochs: entered with 40 steps, left with 60\n"
        "3 epochs: entered with 60 steps, left with 60\n3 epochs are in the checkpoint"
    ),
    "recipes/schedules.md:0": r"96 steps: 0\.0005 … 0\.0500 … 0\.0000\d+",
    "recipes/serving.md:0": r"predicted (\d+\.\d+), and the module itself \1$",
    "recipes/transformers.md:0": r"loss: 0\.[0-6]",
}


def scripts() -> dict[str, str]:
    """Return the complete scripts of the pages, by page and place."""
    found = {}
    pages = [*(DOCS / "coming-from").glob("*.md"), *(DOCS / "recipes").glob("*.md"), DOCS / "howto/fully-sharded.md"]
    for page in pages:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        found |= {f"{page.relative_to(DOCS)}:{place}": block for place, block in enumerate(blocks)}
    return found


def test_every_script_of_a_page_is_run() -> None:
    assert scripts().keys() == PRINTED.keys()


@pytest.mark.parametrize("place", PRINTED)
def test_a_recipe_does_what_its_page_says(place: str, tmp_path: Path) -> None:
    script = scripts()[place]
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[place], done.stdout.strip()), done.stdout
    if "pyspark" not in script:  # which has warnings of its own
        assert "Warning" not in done.stderr
