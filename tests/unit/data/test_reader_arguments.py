from __future__ import annotations

import logging
import re
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_worlds import write_dataset

from spark_elastic.data import NGram, ParquetLoader
from spark_elastic.data.predicates import in_set
from spark_elastic.data.reader_arguments import loader_arguments

Field = namedtuple("Field", ["name", "shape"])
DEFAULTS = {"shuffle": True, "shuffle_rows": 0, "seed": 0}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, DEFAULTS),
        ({"seed": None, "num_epochs": 1, "cur_shard": None, "shard_count": None, "cache_type": None}, DEFAULTS),
        (
            {"seed": 7, "global_batch_size": 32, "shards": 4},
            {**DEFAULTS, "seed": 7, "global_batch_size": 32, "shards": 4},
        ),
        ({"schema_fields": None}, DEFAULTS),
        ({"inmemory_cache_all": False, "convert_early_to_numpy": True, "transform_fn": None}, DEFAULTS),
        (
            {"schema_fields": ["x.*", Field("y", ())]},
            {**DEFAULTS, "columns": [re.compile("x.*"), "y"]},
        ),
        ({"shuffle_row_groups": False}, {"shuffle": False, "seed": 0}),
        ({"shuffle_rows": True}, {"shuffle": True, "seed": 0}),
        ({"shuffle_row_drop_partitions": 3}, {"shuffle": True, "seed": 0}),
        ({"shuffling_queue_capacity": 5000}, {**DEFAULTS, "shuffle_rows": 5000}),
        ({"cur_shard": 1, "shard_count": 3, "batch_size": 4}, {**DEFAULTS, "shard": (1, 3), "batch_size": 4}),
        (
            {"filters": [("id", "<", 9)], "storage_options": {}},
            {**DEFAULTS, "filters": [("id", "<", 9)], "storage_options": {}},
        ),
        (
            {"cache_type": "local-disk", "cache_location": "/c", "workers_count": 3},
            {
                **DEFAULTS,
                "engine": "petastorm",
                "engine_options": {"cache_type": "local-disk", "cache_location": "/c", "workers_count": 3},
            },
        ),
        (
            {"engine": "petastorm", "reader_pool_type": "process"},
            {**DEFAULTS, "engine": "petastorm", "engine_options": {"reader_pool_type": "process"}},
        ),
        ({"transform_spec": "spec"}, {**DEFAULTS, "engine": "petastorm", "engine_options": {}, "transform": "spec"}),
    ],
)
def test_arguments_of_a_reader_are_those_of_a_loader(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    assert loader_arguments(arguments) == expected


def test_an_ngram_of_petastorms_is_one_of_ours() -> None:
    fields = {0: [Field("x", ()), "y.*"], -1: [Field("x", ())]}
    theirs = SimpleNamespace(fields=fields, delta_threshold=5, timestamp_overlap=False, _timestamp_field=Field("t", ()))
    ngram = loader_arguments({"schema_fields": theirs})["ngram"]
    assert ngram.fields == {-1: ["x"], 0: ["x", re.compile("y.*")]}
    assert (ngram.delta_threshold, ngram.timestamp_field, ngram.timestamp_overlap) == (5, "t", False)
    ours = NGram({0: ["x"]}, 1, "t")
    assert loader_arguments({"schema_fields": ours})["ngram"] is ours


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_epochs": None},
            "num_epochs=None has no counterpart: iterating a loader gives one epoch, and set_epoch(n)",
        ),
        ({"num_epochs": 3}, "num_epochs=3 has no counterpart"),
        ({"filesystem": object()}, "filesystem= has no counterpart: give a URL"),
        ({"reader": object()}, "reader= has no counterpart: from_reader_arguments is called in place of both"),
        ({"collate_fn": list}, "collate_fn= has no counterpart: a batch is a dict of tensors"),
        ({"transform_fn": list}, "transform_fn= has no counterpart: a batch is a dict of tensors"),
        ({"inmemory_cache_all": True}, "inmemory_cache_all= has no counterpart: each epoch reads the dataset"),
        ({"rows_capacity": 9}, "rows_capacity= has no counterpart: the dataset need not fit in memory"),
        ({"schema_fields": "id"}, "schema_fields must be a list of fields and patterns, or an NGram, not 'id'"),
        ({"schema_fields": ["id"], "columns": ["id"]}, "columns= is given twice"),
        ({"cur_shard": 1}, "give cur_shard= and shard_count= together, or neither, not 1 and None"),
        (
            {"shuffle_row_groups": False, "shuffle_rows": True},
            "shuffle_row_groups=False does not go together with shuffled rows",
        ),
        ({"shuffle_row_groups": False, "shuffling_queue_capacity": 9}, "shuffle_row_groups=False does not go together"),
        ({"transform_spec": "spec", "engine": "arrow"}, "transform_spec= and cache_type= need engine='petastorm'"),
    ],
)
def test_what_a_loader_does_not_do_is_refused_with_what_it_does(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        loader_arguments(arguments)


def test_a_call_of_a_reader_makes_a_loader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_dataset(tmp_path, [30, 20])
    caplog.set_level(logging.INFO, "spark_elastic")
    loader = ParquetLoader.from_reader_arguments(
        root, schema_fields=["i.|x"], predicate=in_set(range(5, 25), "id"), workers_count=3, shuffle_row_groups=False,
        batch_size=8,
    )  # fmt: skip
    assert [int(row) for batch in loader for row in batch["id"]] == list(range(5, 25))
    assert "a ParquetLoader ignores workers_count" in caplog.text
    assert ParquetLoader.from_reader_arguments(dataset_url_or_urls=[root], batch_size=8).rows_total == 50
    for urls in ({}, {"dataset_url": root, "dataset_url_or_urls": [root]}):
        with pytest.raises(ValueError, match="give the dataset's URL once, as dataset_url= or dataset_url_or_urls="):
            ParquetLoader.from_reader_arguments(**urls, batch_size=8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        ParquetLoader.from_reader_arguments(root, batch_size=8, nope=1)
    with pytest.raises(ValueError, match="give exactly one of batch_size and global_batch_size"):
        ParquetLoader.from_reader_arguments(root)
