"""Jobs over rows that are chosen: by a predicate, as windows, from several URLs, in a mix. Each counts as often as it should."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import cloudpickle
import mixed_training
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import training

from spark_elastic.data import NGram
from spark_elastic.data.predicates import in_pseudorandom_split
from spark_elastic.testing import kill

cloudpickle.register_pickle_by_value(mixed_training)


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Two datasets, with the rows 0 to 199 and 200 to 799."""
    for name, ids in (("few", range(200)), ("many", range(200, 800))):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"id": ids}), tmp_path / name / "part-0.parquet", row_group_size=47)
    return [str(tmp_path / "few"), str(tmp_path / "many")]


def test_each_window_of_the_rows_that_pass_counts_once_an_epoch_through_losses(run: Any, urls: list[str]) -> None:
    predicate = in_pseudorandom_split([0.6, 0.4], 0, "id")
    window = NGram({0: ["id"], 1: []}, delta_threshold=2, timestamp_field="id")
    chosen = {"global_batch_size": 32, "predicate": predicate, "ngram": window}
    faults = [kill(rank=1, step=3), kill(rank=0, step=8)]
    result = run(training.count_rows, urls, 800, 2, chosen, faults=faults, min_np=1, max_np=3, num_proc=3)
    assert result.faults == 2
    groups = [
        range(first, min(first + 47, end)) for begin, end in ((0, 200), (200, 800)) for first in range(begin, end, 47)
    ]
    passing = [[row for row in group if predicate.do_include({"id": row})] for group in groups]
    begin = {row for rows in passing for row, after in itertools.pairwise(rows) if after - row <= 2}
    assert 200 < len(begin) < 480
    for of_rank in result.results:
        assert of_rank["seen"] == pytest.approx([2.0 * (row in begin) for row in range(800)])


def test_the_rows_of_a_mix_count_as_often_as_without_losses(run: Any, urls: list[str]) -> None:
    faults = [kill(rank=1, step=5), kill(rank=0, step=30)]
    result = run(mixed_training.count_rows_of_a_mix, urls, 800, 2, faults=faults, min_np=1, max_np=3, num_proc=3)
    assert result.faults == 2
    expected: collections.Counter[int] = collections.Counter()
    mix = mixed_training.make_mix(urls)
    for epoch in range(2):
        mix.set_epoch(epoch)
        expected.update(int(row) for batch in mix for row in batch["id"])
    assert sum(expected.values()) == 1600
    for seen in result.results:
        assert seen == pytest.approx([float(expected[row]) for row in range(800)])
