"""Row filters: which row groups can hold rows that pass, and how many do, counted once for the whole job.

Steps, tail and lengths follow from the number of rows, so those that pass must be known before the first step. Row
groups that the footers' statistics exclude are not read; of the others only the columns that the filter names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from spark_elastic.data.filesystem import Location
from spark_elastic.data.manifest import Manifest, RowGroup
from spark_elastic.data.source import Source

Filters = object  # pc.Expression, or tuples (column, op, value), ANDed, or lists of such, ORed


class RowFilter:
    """A filter as pyarrow takes it: an expression, or tuples (column, op, value), ANDed, or lists of such, ORed."""

    def __init__(self, filters: Filters, manifest: Manifest) -> None:
        try:
            self.expression = filters if isinstance(filters, pc.Expression) else pq.filters_to_expression(filters)
        except (TypeError, ValueError, pa.ArrowException) as failure:
            raise ValueError(f"filters={filters!r} is not what pyarrow takes: {failure}") from failure
        self.schema = pa.schema([*manifest.schema, *manifest.partition_types.items()])
        self.text = str(self.expression)
        # A pyarrow expression does not list its fields, so they are found in its text. A name that only seems to be used costs
        # no more than reading its column.
        self.columns = [name for name in self.schema.names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", self.text)]
        try:
            self.apply(self.schema.empty_table())
        except (pa.ArrowException, ValueError) as failure:
            raise ValueError(f"filters={filters!r} does not fit the dataset's columns: {failure}") from failure

    def apply(self, table: pa.Table) -> pa.Table:
        """Return the rows that pass, in their order."""
        return table.filter(self.expression)

    def count(self, manifest: Manifest, locations: Sequence[Location], threads: int = 4) -> np.ndarray:
        """Count the rows of each row group that pass: int64 [row groups]. Reads the dataset; raises DataError."""
        by_path: dict[tuple[int, str], list[int]] = {}
        for index, group in enumerate(manifest.row_groups):
            if group.rows:
                by_path.setdefault((group.root, group.path), []).append(index)
        counts = np.zeros(len(manifest), np.int64)

        def count_file(indices: list[int]) -> None:
            with Source(manifest, locations) as source:
                kept = self._may_pass(source, manifest, indices)
                for index in kept:
                    total = 0
                    for batch in source.batches(index, self.columns, 65_536):
                        total += self.apply(pa.Table.from_batches([batch])).num_rows
                    counts[index] = total

        with ThreadPoolExecutor(threads, "spark-elastic-filter") as pool:
            for _ in pool.map(count_file, by_path.values()):
                pass
        return counts

    def _may_pass(self, source: Source, manifest: Manifest, indices: list[int]) -> list[int]:
        first = manifest.row_groups[indices[0]]
        fragment = pads.ParquetFileFormat().make_fragment(
            source.locations[first.root].join(first.path),
            source.locations[first.root].filesystem,
            partition_expression=_partition(first, manifest),
        )
        with source.naming(indices[0]):
            kept = {group.id for group in fragment.subset(self.expression, schema=self.schema).row_groups}
        return [index for index in indices if manifest.row_groups[index].ordinal in kept]


def _partition(group: RowGroup, manifest: Manifest) -> pc.Expression:
    expression = pc.scalar(True)
    for name, value in group.partition:
        kind = manifest.partition_types.get(name)
        if kind is None:
            continue
        scalar = pa.scalar(value, pa.string()).cast(kind)
        expression = expression & (pc.field(name).is_null() if value is None else pc.field(name) == scalar)
    return expression
