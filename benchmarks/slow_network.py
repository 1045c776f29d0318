"""Slow networks: bytes on the wire and steps a second over links of 100 Mbit/s, by how gradients or weights are reduced.

    PYTHONPATH=tests/support python benchmarks/slow_network.py [--mbit 100] [--seconds 10] [--repeats 3]

Two workers, each on a host with a network of its own (network namespaces; takes root, ``ip`` and ``tc``) whose link has this
rate in both directions. Four layers of 512 by 512, a million parameters, 64 rows a step, a commit every step; with ``local SGD``
weights are averaged and committed every 16 steps. The methods take turns, each in a job of its own. Prints a table and a line of
JSON: what each host's interface has sent a step, whatever it was for, and steps a second.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from hosts import INTERFACE, Hosts, as_root
from report import Table, emit, summarize
from standalone import Standalone

METHODS = ("plain", "fp16", "PowerSGD rank 4", "local SGD")
BLOCK = 16


def train(method: str, seconds: float) -> tuple[float, float]:
    """Runs in every worker; returns bytes that this host has sent a step, and steps a second."""
    import contextlib
    import time

    import psutil
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    import spark_elastic as se

    model = se.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    is_local = method == "local SGD"
    if method == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    elif method.startswith("PowerSGD"):
        compression = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=4)
        model.register_comm_hook(compression, powerSGD_hook)
    state = se.TorchState(
        model=model, steps=0, **({"local": {"optimizer": optimizer}} if is_local else {"optimizer": optimizer})
    )

    def sent() -> int:
        return psutil.net_io_counters(pernic=True)[INTERFACE].bytes_sent

    def block() -> None:
        for step in range(BLOCK):
            optimizer.zero_grad()
            with model.no_sync() if is_local else contextlib.nullcontext():
                model(torch.randn(64, 512)).square().mean().backward()
            optimizer.step()
            state.steps += 1
            if is_local and step == BLOCK - 1:
                mean = se.allreduce(parameters_to_vector(model.parameters()))
                with torch.no_grad():
                    vector_to_parameters(mean, model.parameters())
            if not is_local or step == BLOCK - 1:
                state.commit()

    @se.elastic
    def loop(state: Any) -> tuple[float, float]:
        block()
        began, first, bytes_before = time.monotonic(), state.steps, sent()
        while se.broadcast_object(time.monotonic() - began < seconds):
            block()
        steps = state.steps - first
        return (sent() - bytes_before) / steps, steps / (time.monotonic() - began)

    return loop(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of each host's link")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each job")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    options = parser.parse_args()
    found = measure(options.mbit, options.seconds, options.repeats)
    table = Table("", "kB sent a step", "steps/s", "of plain", unit=f"two workers, links of {options.mbit:g} Mbit/s")
    results = {}
    plain = [steps for _, steps in found["plain"]]
    for method, turns in found.items():
        kilobytes = summarize([sent / 1000 for sent, _ in turns])
        steps = summarize([steps for _, steps in turns])
        ratio = summarize([steps / alone for (_, steps), alone in zip(turns, plain, strict=True)])
        table.add(method, kilobytes.median, steps, ratio)
        results[method] = {"kilobytes": kilobytes.asdict(), "steps": steps.asdict(), "of_plain": ratio.asdict()}
    table.print()
    emit("slow_network", mbit=options.mbit, **results)


def measure(mbit: float, seconds: float, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each method what rank 0 saw in each turn."""
    import spark_elastic

    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        for address in hosts.addresses:
            shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"]
            as_root("tc", "qdisc", "add", "dev", hosts.cables[address], *shape)
            as_root(*hosts.prefix(address), "tc", "qdisc", "add", "dev", INTERFACE, *shape)
        cluster = Standalone(Path(folder), hosts.driver)
        try:
            for address in hosts.addresses:
                cluster.add_worker(address, prefix=hosts.prefix(address))
            spark = session(cluster.url, hosts.driver)
            for _ in range(repeats):
                for method in METHODS:
                    ranks = spark_elastic.run(
                        train, args=(method, seconds), spark=spark, num_proc=2, min_np=2, max_np=2
                    )
                    found[method].append(ranks[0])
            spark.stop()
        finally:
            cluster.end()
    return found


def session(master: str, driver: str) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = driver
    settings = {
        "spark.executor.memory": "512m",
        "spark.driver.bindAddress": driver,
        "spark.driver.host": driver,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    spark = SparkSession.builder.master(master).config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


if __name__ == "__main__":
    main()
