"""Checks that the site's search finds what people look for: ``python docs/check_search.py site``, after mkdocs has built it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

# What people type, and the page that answers it.
NEEDS = {
    "evaluation": "recipes/evaluation/",
    "validation loss": "recipes/evaluation/",
    "checkpoint": "howto/commits/",
    "resume": "recipes/resuming/",
    "early stopping": "recipes/early-stopping/",
    "text": "recipes/columns/",
    "categorical features": "recipes/columns/",
    "embedding": "recipes/columns/",
    "images": "recipes/images/",
    "gradient accumulation": "recipes/accumulation/",
    "mixed precision": "recipes/mixed-precision/",
    "AMP": "recipes/mixed-precision/",
    "learning rate schedule": "recipes/schedules/",
    "scheduler": "recipes/schedules/",
    "warmup": "recipes/schedules/",
    "logging": "recipes/logging/",
    "TensorBoard": "recipes/logging/",
    "MLflow": "recipes/logging/",
    "hyperparameter search": "recipes/hyperparameters/",
    "Optuna": "recipes/optuna/",
    "serving": "recipes/serving/",
    "inference": "recipes/serving/",
    "class weights": "recipes/imbalance/",
    "imbalanced": "recipes/imbalance/",
    "multiple GPUs": "howto/training/",
    "multi-gpu": "howto/training/",
    "streaming": "data/",
    "IterableDataset": "data/",
    "fine-tuning": "recipes/transformers/",
    "spot instances": "howto/kubernetes/",
    "slow": "howto/debugging/",
    "S3": "howto/stores/",
    "TorchState": "api/training/",
    "lightning": "coming-from/lightning/",
    "GAN": "howto/training/",
    "SQL function": "estimator/",
    "SQL UDF": "estimator/",
    "ONNX": "estimator/",
    "save model": "recipes/serving/",
    "loss nan": "howto/debugging/",
    "Jupyter": "howto/sessions/",
    "Docker": "howto/kubernetes/",
    "time series": "data/",
    "oversampling": "recipes/imbalance/",
    "nested columns": "estimator/",
    "breakpoint": "howto/debugging/",
    "normalization": "recipes/columns/",
    "StandardScaler": "recipes/columns/",
    "argparse": "howto/training/",
}
# The same, where no other page may be shown before it.
FIRST_NEEDS = {
    "stratified": "estimator/",
    "train test split": "estimator/",
    "sample weights": "estimator/",
    "custom loss": "estimator/",
    "cross validation": "recipes/hyperparameters/",
    "load model": "recipes/serving/",
    "profiling": "howto/debugging/",
    "W&B": "howto/logging/",
    "reproducible": "howto/reproducible/",
    "resume?": "recipes/resuming/",
    "missing values": "data/",
}
# The page of the other needs has to be among so many that are shown first.
FIRST = 3


def main() -> None:
    """Print the needs whose page is not found, and exit with 1 if there are any."""
    node = shutil.which("node")
    if node is None:
        print("node is not installed: the site's search was not tried", file=sys.stderr)
        return
    script = Path(__file__).with_name("search.js")
    needs = {query: (page, FIRST) for query, page in NEEDS.items()}
    needs |= {query: (page, 1) for query, page in FIRST_NEEDS.items()}
    command = [node, str(script), sys.argv[1]]
    answers = json.loads(
        subprocess.run(command, input=json.dumps(list(needs)), capture_output=True, text=True, check=True).stdout
    )
    missed = [
        f"{query!r} finds {', '.join(pages[:FIRST]) or 'nothing'}, not {page}"
        for (query, (page, first)), pages in zip(needs.items(), answers, strict=True)
        if page not in pages[:first]
    ]
    sys.exit("\n".join(missed) or None)


if __name__ == "__main__":
    main()
