"""A driver of its own that trains in local processes, for tests that end it: ``local_script.py FOLDER ACT``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import training

import spark_elastic
from spark_elastic.testing import inject, kill, kill_task


def main(folder: str, act: str) -> None:
    cloudpickle.register_pickle_by_value(training)
    if act == "trained":
        sizes: list[int] = []

        def note(event: dict[str, Any]) -> None:
            if event["event"] == "world_formed":
                sizes.append(event["size"])

        with inject(kill(rank=1, step=5), kill_task(rank=0, step=10)):
            results = spark_elastic.run(training.count_steps, args=(30,), local=True, num_proc=2, on_event=note)
        print([result["counter"] for result in results], len({result["digest"] for result in results}), sizes)
    elif act == "kept":
        spark_elastic.run(training.plain, args=(1,), local=True, num_proc=1)
        (kept,) = psutil.Process().children()
        note_pids = Path(folder) / "kept"
        note_pids.with_suffix(".part").write_text(str(kept.pid))
        note_pids.with_suffix(".part").rename(note_pids)
        sys.stdin.read()
    else:
        assert act == "ended"
        spark_elastic.run(training.die_quietly, args=(folder,), local=True, num_proc=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
