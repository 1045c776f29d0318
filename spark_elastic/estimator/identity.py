"""Names the content of a DataFrame, so that the same data are not written twice and a run knows its data again.

Where the analysed plan shows all there is to know (files, ranges, built-in expressions), its text and the state of its
input files are the name, and nothing is read. Where it hides something (a UDF, an RDD, local rows, a table behind a connector)
the rows themselves are hashed, in one pass, whatever their order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from spark_elastic.estimator.hadoop import HadoopFiles

_FILES = "org.apache.spark.sql.execution.datasources.HadoopFsRelation"
_LEAVES = ("LogicalRelation", "Range", "OneRowRelation")
# Fields of plan nodes whose values are not told but follow from the rest.
_HARMLESS = frozenset(
    {"relation", "evalContext", "evalMode", "value", "session", "stream", "catalogTable", "timeZoneId"}
)
_TIMES = re.compile(r'"class":"[\w.]*\.(Current\w+|Now|LocalTimestamp|Uuid)"')
_IDS = re.compile(r'"id":(\d+),"jvmId":"[0-9a-f-]+"')


def identify(frame: DataFrame, columns: Sequence[Column]) -> str:
    """Return a hash of what ``frame.select(*columns)`` holds. Runs a Spark job only where the plan does not tell."""
    plan = _transparent_plan(frame)
    names = [str(column) for column in columns]
    if plan is not None:
        return _digest("plan", plan, names, _file_states(frame))
    selected = frame.select(*columns)
    return _digest("rows", selected.schema.json(), _content(selected))


def _transparent_plan(frame: DataFrame) -> str | None:
    """The analysed plan as JSON with its expressions numbered as they come, or None where it hides something."""
    analysed = frame._jdf.queryExecution().analyzed()
    leaves = analysed.collectLeaves()
    for place in range(leaves.size()):
        leaf = leaves.apply(place)
        name = leaf.getClass().getSimpleName()
        if name not in _LEAVES or (name == "LogicalRelation" and leaf.relation().getClass().getName() != _FILES):
            return None
    text: str = analysed.toJSON()
    if _TIMES.search(text) or any(name not in _HARMLESS for name in re.findall(r'"(\w+)":null', text)):
        return None
    numbers: dict[str, int] = {}
    return _IDS.sub(lambda found: f'"id":{numbers.setdefault(found[1], len(numbers))}', text)


def _file_states(frame: DataFrame) -> list[Any]:
    files = sorted(frame.inputFiles())
    if not files:
        return []
    hadoop = HadoopFiles(files[0])
    return [(url, *hadoop.state(url)) for url in files]


def _content(selected: DataFrame) -> list[str]:
    """Count and sums of two hashes of all rows: independent of their order, and repeated rows count."""
    columns = [selected["`" + name.replace("`", "``") + "`"] for name in selected.columns]
    first = f.xxhash64(*columns).cast("decimal(38,0)")
    second = f.xxhash64(f.lit(1), *columns).cast("decimal(38,0)")
    row = selected.agg(f.count(f.lit(1)), f.sum(first), f.sum(second)).first()
    return [str(value) for value in row or ()]


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
