"""Records of runs in a store, so that a fit with a known ``runId`` continues the run only with the same data and training.

A run consists of its runId, the identity of its data, and a description of the Params that affect training. The network's
weights are not part of it: when a script creates the network again, its weights differ, and the checkpoint replaces them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import msgspec
from pyspark.ml.param import Params

from spark_elastic._json import Json
from spark_elastic._text import shown
from spark_elastic.errors import DamagedError
from spark_elastic.estimator.description import describe
from spark_elastic.estimator.store import Store

# Params that may differ when a run continues: its length, its numbers of workers, and what happens around the training.
FREE = frozenset(
    {
        "adaptiveNp",
        "balance",
        "callbacks",
        "checkpointSteps",
        "commitSteps",
        "driver",
        "elasticTimeout",
        "epochs",
        "eventLogDir",
        "findUnusedParameters",
        "hangTimeout",
        "loggers",
        "maxNp",
        "minNp",
        "numProc",
        "outputCols",
        "outputsAreProbabilities",
        "predictionCol",
        "probabilityCol",
        "rawPredictionCol",
        "readers",
        "replaceSlow",
        "resetLimit",
        "resourceProfile",
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
        "zeroRedundancy",
    }
)
_BATCH = ("batchSize", "globalBatchSize")
_NETWORKS = ("model", "modelFn")
_RECORD = "run.json"
_DATA = "the data"
# The entry for the estimator's class among the descriptions of Params: another class has another loss for the same Params.
_KIND = "estimator"
VERSION = 2


@dataclass(frozen=True)
class RunRecord:
    """A run: the identity of its data, and a description of each relevant Param.

    params: includes the batch size that ``fit`` has picked. data_url: the URL of the data, if they were written. version: that
    of the descriptions of data and Params; records without a version are of the first.
    """

    run_id: str
    data: str
    params: Mapping[str, object] = field(default_factory=dict)
    data_url: str | None = None
    version: int = 1

    @property
    def batch(self) -> dict[str, int]:
        """The Param that gives the batch size, by name; empty if there is none."""
        return {name: rows for name in _BATCH if isinstance(rows := self.params.get(name), int)}

    def with_batch(self, batch: Mapping[str, int]) -> RunRecord:
        """Return the record with the batch size ``batch``, unless it already has one."""
        return self if self.batch else replace(self, params={**self.params, **batch})

    def differences(self, other: RunRecord) -> list[str]:
        """List the differences between this run and another fit."""
        if self.version != other.version:
            return [f"its record (of version {self.version}, this release writes {other.version})"]
        found = [] if self.data == other.data else [_DATA]
        # Records of earlier releases have neither the estimator's class nor the epochs of a scheduler that spans them.
        names = (self.params.keys() | other.params.keys()) - ({_KIND, "epochs"} - self.params.keys())
        for name in sorted(names):
            found += _changes(name, self.params.get(name), other.params.get(name))
        return found


def describe_params(estimator: Params, spans_fit: bool = False) -> dict[str, Json]:
    """Describe the Params that affect training, so that the same script describes them equally in every process.

    ``spans_fit``: the scheduler is told the length of the fit, so that ``epochs`` affects every step. With several labels, the
    names of the output columns may decide which output belongs to which label, so they are included.
    """
    names = {entry.name for entry in estimator.params if estimator.isDefined(entry)} - FREE
    if len(estimator.getOrDefault("labelCols") if "labelCols" in names else ()) > 1:
        names |= {"outputCols"} if estimator.isDefined("outputCols") else set()
    names |= {"epochs"} if spans_fit else set()
    # Records that are older than this Param do not have it.
    names -= {"deterministic"} if not estimator.getOrDefault("deterministic") else set()
    # An estimator saved by an earlier release may also have a batchSize, which is then irrelevant.
    names -= {"batchSize"} if estimator.isSet("globalBatchSize") else set()
    described: dict[str, Json] = {_KIND: type(estimator).__name__}
    described |= {name: describe(estimator.getOrDefault(name), weights=name not in _NETWORKS) for name in sorted(names)}
    return {name: value for name, value in described.items() if value is not None}


def describe_callbacks(callbacks: Sequence[object]) -> str:
    """Describe callbacks by their classes and by their attributes before a fit."""
    return json.dumps([describe(each) for each in callbacks])


def check_run(store: Store, record: RunRecord, is_same: Callable[[str], bool] = lambda url: False) -> RunRecord | None:
    """Return the store's record of a run. Raises ValueError, naming the differences, if it is a different run.

    A fit whose Params leave the batch size open uses the run's. ``is_same`` tells, if only the identities of the data differ,
    whether those that were written to a URL have the same rows.
    """
    known = find_run(store, record.run_id)
    differences = known.differences(record.with_batch(known.batch)) if known else []
    if known and known.data_url and differences == [_DATA] and is_same(known.data_url):
        return known
    if differences:
        raise ValueError(
            f"runId={record.run_id!r} is another run in {shown(store.url)}, which differs in {', '.join(differences)}. "
            "Choose another runId, or Store.delete the run"
        )
    return known


def record_run(store: Store, record: RunRecord) -> None:
    """Write the record of a run, once. Raises ValueError if another fit has meanwhile begun a different run of this name."""
    url = store.spark_url(f"{store.run_url(record.run_id)}/{_RECORD}")
    if store.files.exists(url):
        check_run(store, record)
    else:
        store.files.write(url, json.dumps(asdict(record), indent=1).encode())


def find_run(store: Store, run_id: str) -> RunRecord | None:
    """Return the record of a run; None if there is none."""
    url = store.spark_url(f"{store.run_url(run_id)}/{_RECORD}")
    return read_record(store.files.read(url), url) if store.files.exists(url) else None


def read_record(content: bytes, url: str) -> RunRecord:
    """Read a record of this or another release, which may have fields that this release does not know.

    Raises ``DamagedError``, naming ``url``, if the content is not a record.
    """
    try:
        record = msgspec.convert(json.loads(content), RunRecord)
    except (ValueError, msgspec.ValidationError) as error:
        raise DamagedError(
            f"{shown(url)} is damaged, it is not the record of a run: {error}. Store.delete the run"
        ) from error
    if "globalBatchSize" in record.params:  # earlier releases also wrote batchSize, with its default
        record = replace(record, params={name: value for name, value in record.params.items() if name != "batchSize"})
    return record


def forget_run(store: Store, run_id: str) -> None:
    """Delete the parts of a run that the store is not to keep."""
    if "checkpoints" not in store.keep and "logs" not in store.keep:
        store.files.delete(store.spark_url(store.run_url(run_id)))
        return
    for kind, url in (("checkpoints", store.checkpoint_url(run_id)), ("logs", store.log_url(run_id))):
        if kind not in store.keep:
            store.files.delete(store.spark_url(url))


def _changes(name: str, ours: object, theirs: object) -> list[str]:
    """List the differences between two descriptions, as deep as their structures agree."""
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
