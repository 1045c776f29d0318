"""Getters and setters are there for type checkers and editors, too."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from spark_elastic.estimator import TorchClassifier, TorchEstimator, TorchModel

ROOT = Path(__file__).parents[3]

SNIPPET = """
from spark_elastic.estimator import TorchClassifier, TorchEstimator, TorchModel

reveal_type(TorchEstimator().setBatchSize(32).setFeatureCols(["x"]).getBatchSize())
reveal_type(TorchClassifier().setFeaturesCol("x").setNumClasses(3))
reveal_type(TorchModel().setUseGpu(True).getOutputCols())
TorchEstimator().setEpochs("two")
TorchEstimator().setEpoch(2)
"""


def test_the_signatures_are_those_of_the_params() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_accessors.py"))["document"]()
    assert made == (ROOT / "spark_elastic" / "estimator" / "accessors.py").read_text(), (
        "run: python docs/make_accessors.py > spark_elastic/estimator/accessors.py"
    )


def test_a_type_checker_knows_them_and_what_they_take(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    # Mypy has a process of its own: millions of objects stay behind, at which each garbage collection would look from then on.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(tmp_path / "snippet.py")],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert not run.stderr
    lines = [line.partition(": ")[2] for line in run.stdout.splitlines() if "snippet.py" in line]
    assert lines == [
        'note: Revealed type is "int | None"',
        'note: Revealed type is "spark_elastic.estimator.classifier.TorchClassifier"',
        'note: Revealed type is "list[str] | None"',
        'error: Argument 1 to "setEpochs" of "FitParamsAccessors" has incompatible type "str"; expected "int"  [arg-type]',
        'error: "TorchEstimator" has no attribute "setEpoch"  [attr-defined]',
    ]


def test_what_is_declared_is_there() -> None:
    for cls in (TorchEstimator, TorchClassifier, TorchModel):
        for name in (param.name for param in cls().params):
            title = name[0].upper() + name[1:]
            assert callable(getattr(cls, f"get{title}"))
            assert callable(getattr(cls, f"set{title}"))
