"""Metrics of a job for Prometheus, served by the process that calls ``run``: steps, world size, resets, goodput.

    python examples/prometheus.py --local --port 9000          # on this machine, without Spark
    spark-submit --master … examples/prometheus.py --port 9000

Steps a second are ``rate(spark_elastic_steps_total[1m])``. Goodput is the share of the job's time in which a world trained.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

import spark_elastic as se

RESETS = {"world_broken": "loss", "world_interrupted": "planned"}


class Exporter:
    """Keeps metrics of one job up to date. Give it to ``run`` as ``on_event``, which calls it from one thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.steps = Counter("spark_elastic_steps", "Commits since the job began", registry=registry)
        self.size = Gauge("spark_elastic_world_size", "Workers that train, 0 while none do", registry=registry)
        self.resets = Counter("spark_elastic_resets", "Changes of the world", ["kind"], registry=registry)
        goodput = Gauge("spark_elastic_goodput", "Share of the job's time in which a world trained", registry=registry)
        goodput.set_function(self.goodput)
        for kind in RESETS.values():
            self.resets.labels(kind)  # from the beginning on, as 0
        self.began = self.ended = self.trains_since = None
        self.trained = self.newest = self.seen = 0.0
        self.step: int | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        self.newest, self.seen = event["time"], time.monotonic()
        match event:
            case {"event": "job_started", "time": now}:
                self.began = now
            case {"event": "entered", "rank": 0, "time": now, "values": {"step": step}}:
                self.trains_since = now
                self.count(step)
            case {"event": "progress", "values": {"step": step}}:
                self.count(step)
            case {"event": "world_formed", "size": size}:
                self.size.set(size)
            case {"event": "world_broken" | "world_interrupted" as kind}:
                self.resets.labels(RESETS[kind]).inc()
        match event:
            case {
                "event": "world_broken" | "world_forming" | "world_finished" | "job_finished" | "job_failed",
                "time": now,
            }:
                self.size.set(0)
                if self.trains_since is not None:
                    self.trained += now - self.trains_since
                    self.trains_since = None
        if event["event"] in ("job_finished", "job_failed"):
            self.ended = event["time"]

    def count(self, step: int) -> None:
        """Count the commits up to a step; those of a checkpoint that the job resumes from are not its own."""
        before = step if self.step is None else self.step
        self.steps.inc(max(step - before, 0))
        self.step = max(step, before)

    def goodput(self) -> float:
        if self.began is None:
            return 0.0
        # Events have the time of the driver's clock, which need not be this machine's.
        now = self.ended or self.newest + time.monotonic() - self.seen
        trains = 0.0 if self.trains_since is None else now - self.trains_since
        return (self.trained + trains) / max(now - self.began, 1e-9)


@contextmanager
def serve(port: int, address: str) -> Iterator[tuple[Exporter, int]]:
    """Serve the metrics of a job at a port, 0 for any that is free; yield what ``on_event`` takes, and the port."""
    registry = CollectorRegistry()
    exporter = Exporter(registry)
    server, thread = start_http_server(port, address, registry)
    try:
        yield exporter, server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def train_fn(steps: int) -> int:
    model = se.DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while state.step < steps:
            x = torch.randn(256, 20)
            optimizer.zero_grad()
            (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    return int(state.step)


def main(argv: Sequence[str] | None = None) -> list[int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--address", default="127.0.0.1", help="0.0.0.0 for a Prometheus on another machine")
    parser.add_argument("--local", action="store_true", help="train in processes of this machine")
    options = parser.parse_args(argv)
    with serve(options.port, options.address) as (exporter, port):
        print(f"metrics at http://{options.address}:{port}/metrics", flush=True)
        return se.run(train_fn, args=(options.steps,), local=options.local, on_event=exporter)


if __name__ == "__main__":
    main()
