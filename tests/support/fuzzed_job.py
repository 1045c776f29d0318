"""A job that a fuzzer attacks, in a driver of its own: ``fuzzed_job.py FRAMES SEED FOLDER``, prints what became of it as JSON.

Of its own, as what a driver holds is one of the questions: a process that has run hundreds of tests grows and shrinks by itself.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import training
from processes import command_of, ports_of
from standalone import free_port

import spark_elastic
from spark_elastic.driver import client_driver
from spark_elastic.protocol.credentials import Credentials, create_credentials

SLOTS = 5


def main(frames: int, seed: str, folder: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    cloudpickle.register_pickle_by_value(training)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master(f"local-cluster[{SLOTS - 1},1,1024]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    print(json.dumps(attacked(spark, frames, seed, folder)))
    spark.stop()


def attacked(spark: Any, frames: int, seed: str, folder: Path) -> dict[str, Any]:
    """Train until the fuzzer has sent its frames; return what came of both."""
    formed = threading.Event()
    port, made = free_port(), create_credentials("fuzzed")
    events: list[dict[str, Any]] = []
    unpickled: list[str] = []
    found: dict[str, Any] = {"bytes held": [], "unpickled": unpickled}

    def strike() -> None:
        try:
            assert formed.wait(250)
            supervisors = _supervisors()
            found["supervisors"] = len(supervisors)
            found["listeners"] = [process.pid for process in supervisors if ports_of(process)]
            # The first part lets buffers and free lists grow to what they take.
            for count in (frames // 4, frames - frames // 4):
                print(_fuzz(made, port, count, seed, folder), file=sys.stderr)
                gc.collect()
                found["bytes held"].append(psutil.Process().memory_info().rss)
        finally:
            (folder / "stop").touch()

    def watch(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "world_formed" and event["size"] == SLOTS - 1:
            formed.set()

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            unpickled.append(".".join(arguments))

    def credentials(run_id: str) -> Credentials:
        return made

    client_driver.create_credentials = credentials
    thread = threading.Thread(target=strike)
    thread.start()
    sys.addaudithook(hear)
    found["results"] = spark_elastic.run(
        training.train_until, args=(str(folder / "stop"),), spark=spark, on_event=watch, driver_port=port,
        min_np=2, num_proc=SLOTS - 1, max_np=SLOTS,
    )  # fmt: skip
    thread.join()
    found["sizes"] = [event["size"] for event in events if event["event"] == "world_formed"]
    found["losses"] = [event for event in events if event["event"] == "world_broken"]
    return found


def _fuzz(credentials: Credentials, port: int, frames: int, seed: str, folder: Path) -> str:
    script, trap = Path(__file__).with_name("fuzzer.py"), folder / "unpickled"
    done = subprocess.run(
        [sys.executable, str(script), "127.0.0.1", str(port), str(SLOTS), str(frames), seed, str(trap)],
        input=pickle.dumps(credentials), stdout=subprocess.PIPE, timeout=600, check=True,
    )  # fmt: skip
    return done.stdout.decode()


def _supervisors() -> list[psutil.Process]:
    """Importers, warm parents and the tasks that started the importers, but not the workers below, where Gloo listens."""
    below = psutil.Process().children(recursive=True)
    forked = [process for process in below if "importer" in command_of(process)]
    importers = [process for process in forked if process.parent() not in forked]
    parents = [parent for importer in importers for parent in importer.children()]
    return [*importers, *parents, *(task for importer in importers if (task := importer.parent()) is not None)]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
