"""A user's application: it trains until a file says that it is enough. ``training_job.py FOLDER [SETTING=VALUE…]``.

Each worker notes its steps in the folder, the driver what happened; the test that submitted it reads along.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import spark_elastic

# A step's time, and how often the end is looked for.
STEP_SECONDS = 0.05
LOOK_SECONDS = 0.05


def train_fn(folder: str) -> dict[str, Any]:
    import hashlib
    import json
    import os
    import time
    from pathlib import Path

    import torch

    import spark_elastic as se

    torch.manual_seed(os.getpid())
    model = se.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)
    notes = open(Path(folder, f"steps-{os.getpid()}"), "a")  # noqa: SIM115

    def is_enough() -> bool:
        return bool(se.allreduce(torch.tensor(float(Path(folder, "enough").exists())), op="max"))

    @se.elastic
    def train(state: Any) -> None:
        while not is_enough():
            optimizer.zero_grad()
            state.model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            time.sleep(STEP_SECONDS)
            state.step += 1
            place = {"step": state.step, "generation": se.generation(), "rank": se.rank(), "size": se.size()}
            print(json.dumps({**place, "time": time.time(), "pid": os.getpid()}), file=notes, flush=True)
            state.commit()

    train(state)
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
    return {"rank": se.rank(), "step": state.step, "digest": digest.hexdigest()}


def main(folder: str, *settings: str) -> None:
    given = {name: json.loads(value) for name, value in (setting.split("=", 1) for setting in settings)}
    spark = SparkSession.builder.appName("training").getOrCreate()
    results = spark_elastic.run(train_fn, args=(folder,), spark=spark, event_log=Path(folder, "events"), **given)
    Path(folder, "results.new").write_text(json.dumps({"results": results, "time": time.time()}))
    Path(folder, "results.new").rename(Path(folder, "results"))
    while not Path(folder, "leave").exists():
        time.sleep(LOOK_SECONDS)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
