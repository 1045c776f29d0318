"""A job whose third host reaches the driver, but not the ports of the other hosts: ``blocked_ports.py FOLDER``.

The third host is listed once the other two train. Its routes to them lead nowhere, so it can never become a part of their world.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
from chaos_cluster import Cluster

import spark_elastic


def train(folder: Path) -> tuple[int, int]:
    """Train until there is a file ``stop``, which all ranks see at the same commit; return the steps and the weight."""
    import torch

    import spark_elastic as se

    model = se.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = se.TorchState(model=model, optimizer=optimizer, step=0)

    @se.elastic
    def steps(state: Any) -> tuple[int, int]:
        while not float(se.allreduce(torch.tensor(float((folder / "stop").exists())), op="sum")):
            optimizer.zero_grad()
            (-model(torch.ones(1, 1))).sum().backward()
            optimizer.step()
            state.step += 1
            time.sleep(0.02)
            state.commit()
        return state.step, round(model.module.weight.item())

    return steps(state)


def main(folder: Path) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    listed, script = folder / "listed", folder / "discover"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    events: list[dict[str, Any]] = []
    with Cluster(folder, 3) as cluster:
        if "network" in cluster.missing:
            print(json.dumps({"missing": cluster.missing["network"]}))
            return
        good, blocked = cluster.addresses[:2], cluster.addresses[2]
        for address in good:
            cluster.block(blocked, address)
        listed.write_text("\n".join([*good, f"{blocked}:0"]))

        def note(event: dict[str, Any]) -> None:
            events.append(event)
            if event["event"] == "world_formed":
                listed.write_text("\n".join([*good, blocked]))
            if event["event"] == "newcomers_paused":
                (folder / "stop").touch()

        results = spark_elastic.run(
            train, args=(folder,), spark=cluster.spark, min_np=2, max_np=3, host_discovery_script=str(script),
            on_event=note, elastic_timeout=60,
        )  # fmt: skip
    lost = [event["worker"] for event in events if event["event"] == "worker_lost"]
    first = next(event["workers"] for event in events if event["event"] == "world_forming")
    print(json.dumps({"results": results, "first": first, "lost": lost, "kinds": [event["event"] for event in events]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
