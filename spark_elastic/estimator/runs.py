"""What a store remembers of a run, so that a fit with its ``runId`` goes on only where data and training are the same.

A run is (runId, fingerprint of data and of the Params that training depends on). Weights are no part of it: a network that a
script makes anew has other ones, and the checkpoint's replace them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from spark_elastic.estimator.store import Store

# What may differ when a run goes on: how long, with how many workers, and what happens around training.
FREE = frozenset(
    {
        "callbacks",
        "checkpointSteps",
        "elasticTimeout",
        "epochs",
        "hangTimeout",
        "maxNp",
        "minNp",
        "numProc",
        "outputCols",
        "predictionCol",
        "probabilityCol",
        "rawPredictionCol",
        "readers",
        "resetLimit",
        "reuseData",
        "runId",
        "startTimeout",
        "store",
        "thresholds",
        "transformBatchSize",
        "useGpu",
        "valBatchSize",
        "verbose",
    }
)
_RECORD = "run.json"


@dataclass(frozen=True)
class RunRecord:
    """What a run is: ``data``, the identity of its data, and ``params``, each Param that counts, described.

    data_url: where the data were written, if they were.
    """

    run_id: str
    data: str
    params: dict[str, Any] = field(default_factory=dict)
    data_url: str | None = None

    def differences(self, other: RunRecord) -> list[str]:
        """Say what another fit has that this run has not."""
        found = [] if self.data == other.data else ["the data"]
        for name in sorted(self.params.keys() | other.params.keys()):
            ours, theirs = self.params.get(name), other.params.get(name)
            if ours != theirs:
                found.append(f"{name} (was {_short(ours)}, is {_short(theirs)})")
        return found


def describe_params(estimator: Any) -> dict[str, Any]:
    """Describe the Params that training depends on, so that the same script describes them equally in every process."""
    described = {
        entry.name: describe(estimator.getOrDefault(entry)) for entry in estimator.params if estimator.isDefined(entry)
    }
    return {name: value for name, value in described.items() if name not in FREE and value is not None}


def describe_callbacks(callbacks: Sequence[Any]) -> str:
    """Describe callbacks by their classes and attributes, as they are before a fit."""
    return json.dumps([[_name(type(each)), describe(getattr(each, "__dict__", {}))] for each in callbacks])


def describe(value: Any) -> Any:
    """Say what a value is, as JSON without addresses and weights."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(entry) for entry in value]
    if isinstance(value, torch.nn.Module):
        shapes = {
            name: list(entry.shape) for name, entry in value.state_dict().items() if isinstance(entry, torch.Tensor)
        }
        return [_name(type(value)), str(value), shapes]
    if isinstance(value, torch.optim.Optimizer):
        groups = [
            {key: describe(entry) for key, entry in group.items() if key != "params"} for group in value.param_groups
        ]
        return [_name(type(value)), groups]
    if isinstance(value, functools.partial):
        return ["partial", describe(value.func), describe(value.args), describe(value.keywords)]
    if hasattr(value, "__code__"):
        constants = [entry for entry in value.__code__.co_consts if isinstance(entry, (int, float, str))]
        return [_name(value), hashlib.blake2b(value.__code__.co_code, digest_size=8).hexdigest(), constants]
    return _name(value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value))


def check_run(store: Store, record: RunRecord) -> RunRecord | None:
    """Return what the store knows of a run. Raises ValueError where that is another one, naming the differences."""
    known = find_run(store, record.run_id)
    differences = known.differences(record) if known else []
    if differences:
        raise ValueError(
            f"runId={record.run_id!r} is another run in {store.url}: different are {', '.join(differences)}. "
            "Take another runId, or Store.delete the run"
        )
    return known


def record_run(store: Store, record: RunRecord) -> None:
    """Write the record of a run, once."""
    url = store.spark_url(f"{store.run_url(record.run_id)}/{_RECORD}")
    if not store.files.exists(url):
        store.files.write(url, json.dumps(asdict(record), indent=1).encode())


def find_run(store: Store, run_id: str) -> RunRecord | None:
    """The record of a run, None where there is none."""
    url = store.spark_url(f"{store.run_url(run_id)}/{_RECORD}")
    return RunRecord(**json.loads(store.files.read(url))) if store.files.exists(url) else None


def forget_run(store: Store, run_id: str) -> None:
    """Delete what the store is not to keep of a run that has ended well."""
    if "checkpoints" not in store.keep and "logs" not in store.keep:
        store.files.delete(store.spark_url(store.run_url(run_id)))
        return
    for kind, url in (("checkpoints", store.checkpoint_url(run_id)), ("logs", store.log_url(run_id))):
        if kind not in store.keep:
            store.files.delete(store.spark_url(url))


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
