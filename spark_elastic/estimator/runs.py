"""What a store remembers of a run, so that a fit with its ``runId`` goes on only where data and training are the same.

A run is (runId, identity of the data, description of the Params that training depends on). The weights of the network are no
part of it: a network that a script makes anew has other ones, and the checkpoint's replace them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import msgspec
from pyspark.ml.param import Params

from spark_elastic._json import Json
from spark_elastic.errors import DamagedError
from spark_elastic.estimator.description import describe
from spark_elastic.estimator.store import Store

# Params that may differ when a run goes on: those that say for how long and with how many workers, and what happens around it.
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
        "terminateOnNaN",
        "store",
        "thresholds",
        "transformBatchSize",
        "useGpu",
        "valBatchSize",
        "verbose",
    }
)
_NETWORKS = ("model", "modelFn")
_RECORD = "run.json"
VERSION = 2


@dataclass(frozen=True)
class RunRecord:
    """What a run is: ``data``, the identity of its data, and ``params``, each Param that counts, described.

    data_url: where the data were written, if they were. version: of the way in which data and Params are described; records
        that name none are of the first.
    """

    run_id: str
    data: str
    params: Mapping[str, object] = field(default_factory=dict)
    data_url: str | None = None
    version: int = 1

    def differences(self, other: RunRecord) -> list[str]:
        """Say what another fit has that this run has not."""
        if self.version != other.version:
            return [f"its record (of version {self.version}, this release writes {other.version})"]
        found = [] if self.data == other.data else ["the data"]
        for name in sorted(self.params.keys() | other.params.keys()):
            found += _changes(name, self.params.get(name), other.params.get(name))
        return found


def describe_params(estimator: Params) -> dict[str, Json]:
    """Describe the Params that training depends on, so that the same script describes them equally in every process.

    Which output belongs to which of several labels may hang on the names of the output columns; they count then.
    """
    names = {entry.name for entry in estimator.params if estimator.isDefined(entry)} - FREE
    if len(estimator.getOrDefault("labelCols") if "labelCols" in names else ()) > 1:
        names |= {"outputCols"} if estimator.isDefined("outputCols") else set()
    described = {name: describe(estimator.getOrDefault(name), weights=name not in _NETWORKS) for name in sorted(names)}
    return {name: value for name, value in described.items() if value is not None}


def describe_callbacks(callbacks: Sequence[object]) -> str:
    """Describe callbacks by their classes and attributes, as they are before a fit."""
    return json.dumps([describe(each) for each in callbacks])


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
    return read_record(store.files.read(url), url) if store.files.exists(url) else None


def read_record(content: bytes, url: str) -> RunRecord:
    """Read the record of this or another release, which may have fields that this one does not know.

    Raises ``DamagedError``, which names ``url``, for what is no record.
    """
    try:
        return msgspec.convert(json.loads(content), RunRecord)
    except (ValueError, msgspec.ValidationError) as error:
        raise DamagedError(f"{url} is damaged, it is not the record of a run: {error}. Store.delete the run") from error


def forget_run(store: Store, run_id: str) -> None:
    """Delete what the store is not to keep of a run that has ended well."""
    if "checkpoints" not in store.keep and "logs" not in store.keep:
        store.files.delete(store.spark_url(store.run_url(run_id)))
        return
    for kind, url in (("checkpoints", store.checkpoint_url(run_id)), ("logs", store.log_url(run_id))):
        if kind not in store.keep:
            store.files.delete(store.spark_url(url))


def _changes(name: str, ours: object, theirs: object) -> list[str]:
    """Say where two descriptions differ, as deep inside as their shapes are the same."""
    if json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True):
        return []
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(ours.keys() | theirs.keys())
        return [change for key in keys for change in _changes(f"{name}.{key}", ours.get(key), theirs.get(key))]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [change for pair in zip(ours, theirs, strict=True) for change in _changes(name, *pair)]
    return [f"{name} (was {_short(ours)}, is {_short(theirs)})"]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
