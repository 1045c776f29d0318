"""Names the content of a DataFrame, so that the same data are not written twice and a run recognizes its data.

Two DataFrames have the same identity only if they certainly hold the same rows. That is certain for DataFrames made of Parquet
or ORC files, ranges, and the steps and expressions that are listed here, which the plan describes completely. Their identity
consists of the plan, the session's settings, and the files' sizes and times; no data are read. Anything else may hide something:
a reader's parsing, a function, a view, a cache, a connector, random numbers. The rows of such DataFrames are hashed in one
pass, independently of their order. A dataset that is trained on in place is identified by its files' footers and times.

An identity is a string that begins with what it was made from: ``plan-``, ``rows-``, ``files-``, or ``new-`` where it is random.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, StructField, StructType

from spark_elastic._json import Json
from spark_elastic.data import read_manifest
from spark_elastic.data.filesystem import list_files, locate
from spark_elastic.estimator.frame import column
from spark_elastic.estimator.sessions import shows_plans

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

_STEPS = frozenset({"Filter", "LogicalRelation", "OneRowRelation", "Project", "Range", "SubqueryAlias", "Union"})
# Expressions whose last argument is a mode for errors or decimals, which the plan's JSON omits.
_WITH_MODE = frozenset({"Add", "Cast", "Divide", "Multiply", "Remainder", "Subtract"})
_EXPRESSIONS = _WITH_MODE | {
    "Alias", "And", "AttributeReference", "CaseWhen", "Coalesce", "CreateArray", "EqualNullSafe", "EqualTo", "GetStructField",
    "GreaterThan", "GreaterThanOrEqual", "If", "In", "IsNaN", "IsNotNull", "IsNull", "LessThan", "LessThanOrEqual", "Literal",
    "Not", "Or", "UnaryMinus",
}  # fmt: skip
_CATALYST = "org.apache.spark.sql.catalyst."
_DATASOURCES = "org.apache.spark.sql.execution.datasources."
_FILES = f"{_DATASOURCES}HadoopFsRelation"
_FORMATS = frozenset({f"{_DATASOURCES}parquet.ParquetFileFormat", f"{_DATASOURCES}orc.OrcFileFormat"})
_LISTED = f"{_DATASOURCES}InMemoryFileIndex"
# Fields that the JSON of plans omits. Their content is found by other means, or does not affect the rows.
_TOLD_APART = frozenset({"catalogTable", "evalContext", "evalMode", "relation", "session", "stream"})
_LITERALS = ("boolean", "byte", "date", "decimal", "double", "float", "integer", "long", "short", "string", "timestamp")
# Where an object of Java is, which is in the text of a function's column, and differs each time.
_ADDRESS = re.compile(r"@[0-9a-f]+")
# Settings that change how rows are computed, but not the rows themselves.
_OF_SPEED = (
    "spark.sql.adaptive.", "spark.sql.autoBroadcastJoinThreshold", "spark.sql.catalogImplementation", "spark.sql.codegen.",
    "spark.sql.execution.arrow.", "spark.sql.files.max", "spark.sql.files.min", "spark.sql.files.openCostInBytes",
    "spark.sql.inMemoryColumnarStorage.", "spark.sql.shuffle.", "spark.sql.statistics.", "spark.sql.streaming.",
    "spark.sql.ui.", "spark.sql.warehouse.dir",
)  # fmt: skip


def identity_by_plan(frame: DataFrame, columns: Sequence[Column]) -> str | None:
    """Identify the content by the plan; None if the plan may hide something. ``columns``: columns, or casts and the like."""
    if not shows_plans():
        return None
    from py4j.protocol import Py4JError

    try:
        selected = frame.select(*columns)
        # A cache holds the rows from when it was filled, and a DataFrame's own plan may be older than the cache.
        cached = [_name(leaf) for leaf in _each(selected._jdf.queryExecution().withCachedData().collectLeaves())]
        analysed = frame._jdf.queryExecution().analyzed()
        plan = _told(analysed)
        if plan is None or "InMemoryRelation" in cached:
            return None
        relations = [_relation(frame, leaf.relation()) for leaf in _each(analysed.collectLeaves()) if _reads(leaf)]
    except Py4JError:  # a file is gone, or this version of Spark lacks a method
        return None
    if None in relations:
        return None
    shown = [_ADDRESS.sub("", str(each)) for each in columns]
    return "plan-" + _digest(plan, relations, shown, selected.schema.json(), _settings(frame))


def identity_by_rows(selected: DataFrame) -> str:
    """Identify the content by its rows."""
    row = selected.agg(*content_of(selected)).first()
    return identity_of_content(selected.schema, row.asDict() if row else {})


def content_of(selected: DataFrame) -> list[Column]:
    """Return aggregates for the number of rows and the sums of two hashes, independent of the order of rows."""
    # Spark hashes a null to the seed.
    parts = [part for field in selected.schema for part in (column(field.name).isNull(), *marked(field))]
    first = f.xxhash64(*parts).cast("decimal(38,0)")
    second = f.xxhash64(f.lit(1), *parts).cast("decimal(38,0)")
    return [f.count(f.lit(1)).alias("hashed"), f.sum(first).alias("hashes"), f.sum(second).alias("more_hashes")]


def marked(field: StructField) -> list[Column]:
    """Return what to hash of a column. Spark does not mark the end of an array."""
    value = column(field.name)
    return [f.size(value), value] if isinstance(field.dataType, ArrayType) else [value]


def identity_of_content(schema: StructType, seen: Mapping[str, object]) -> str:
    """Return the identity of rows from the values of ``content_of``."""
    fields = [(field.name, field.dataType.json()) for field in schema]
    return "rows-" + _digest(fields, [str(seen.get(name)) for name in ("hashed", "hashes", "more_hashes")])


def identity_of_files(url: str, storage_options: Mapping[str, object] | None) -> str:
    """Identify a dataset by its files' footers, and by their modification times if the file system knows them.

    Footers alone stay equal if rows have only changed places.
    """
    footers = read_manifest(url, storage_options=storage_options).fingerprint
    return "files-" + _digest(footers, list_files(locate(url, storage_options)))


def _told(analysed: JavaObject) -> Json:
    """Return the analysed plan as JSON, its expressions numbered in order; None if it may hide something."""
    text: str = analysed.toJSON()
    numbers: dict[str, int] = {}

    def known(value: object) -> bool:
        if isinstance(value, list):
            return all(map(known, value))
        if not isinstance(value, dict):
            return True
        if not _is_known(value):
            return False
        if "jvmId" in value:
            value["id"], value["jvmId"] = numbers.setdefault(f"{value['id']}/{value['jvmId']}", len(numbers)), ""
        value.pop("numSlices", None)  # of a range
        return all(known(entry) for name, entry in value.items() if name not in ("metadata", "dataType"))

    plan = json.loads(text)
    return [plan, list(_modes(analysed))] if known(plan) else None


def _is_known(node: Mapping[str, object]) -> bool:
    """Whether everything relevant about a node of the plan is in its JSON or is found by other means."""
    name = node.get("class")
    if not isinstance(name, str) or not name:
        return True
    place, _, short = name.rpartition(".")
    if short == "Literal":
        kind = str(node.get("dataType"))
        return place == f"{_CATALYST}expressions" and (node.get("value") is None or kind.startswith(_LITERALS))
    hidden = any(value is None and field not in _TOLD_APART for field, value in node.items())
    if place == f"{_CATALYST}expressions":
        return short in _EXPRESSIONS and not hidden
    return place in (f"{_CATALYST}plans.logical", _DATASOURCES.rstrip(".")) and short in _STEPS and not hidden


def _modes(node: JavaObject) -> Iterator[str]:
    """Yield what the JSON of a plan's expressions lacks, in the plan's order: their modes, and the instants of timestamps."""
    for expression in _each(node.expressions()):
        yield from _modes_within(expression)
    for child in _each(node.children()):
        yield from _modes(child)


def _modes_within(expression: JavaObject) -> Iterator[str]:
    name = _name(expression)
    if name == "Literal" and _name(expression.dataType()) == "TimestampType$":
        # The JSON has local time, in which an hour comes twice where daylight saving time ends.
        yield str(expression.value())
    if name in ("AttributeReference", "Literal"):
        return
    if name in _WITH_MODE:
        yield str(expression.productElement(expression.productArity() - 1).toString())
    for child in _each(expression.children()):
        yield from _modes_within(child)


def _reads(leaf: JavaObject) -> bool:
    return _name(leaf) == "LogicalRelation"


def _relation(frame: DataFrame, relation: JavaObject) -> Json:
    """Describe what a plan reads: format, options, schema, and the files with their sizes and times.

    Returns None if it does not read listed files of a known format, or if they have changed since Spark listed them.
    """
    if (
        _class(relation) != _FILES
        or _class(relation.fileFormat()) not in _FORMATS
        or _class(relation.location()) != _LISTED
    ):
        return None
    hadoop = frame.sparkSession._jsparkSession.sessionState().newHadoopConfWithOptions(relation.options())
    files = []
    for listed in _each(relation.location().allFiles()):
        path = listed.getPath()
        now = path.getFileSystem(hadoop).getFileStatus(path)
        state = [now.getLen(), now.getModificationTime()]
        if state != [listed.getLen(), listed.getModificationTime()]:
            return None
        files.append([path.toString(), *state])
    options = sorted([option._1(), option._2()] for option in _each(relation.options()))
    schemas = [relation.dataSchema().json(), relation.partitionSchema().json()]
    return [_class(relation.fileFormat()), options, schemas, sorted(files)]


def _settings(frame: DataFrame) -> list[Json]:
    """Return the settings that may affect what is read and computed."""
    session = frame.sparkSession
    entries = _each(session._jsparkSession.conf().getAll())
    given = {entry._1(): entry._2() for entry in entries}
    ours = {
        name: value for name, value in given.items() if name.startswith("spark.sql.") or not name.startswith("spark.")
    }
    told = sorted((name, value) for name, value in ours.items() if not name.startswith(_OF_SPEED))
    return [session.version, session.conf.get("spark.sql.session.timeZone"), told]


def _each(values: JavaObject) -> Iterator[JavaObject]:
    """Yield the elements of a Scala collection."""
    iterator = values.iterator()
    while iterator.hasNext():
        yield iterator.next()


def _class(value: JavaObject) -> str:
    return str(value.getClass().getName())


def _name(value: JavaObject) -> str:
    return str(value.getClass().getSimpleName())


def _digest(*parts: Json) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
