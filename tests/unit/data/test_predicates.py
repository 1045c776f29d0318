from __future__ import annotations

import collections
import itertools
import pickle
import re
import warnings
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import World, write_dataset
from loaded_rows import ids

from spark_elastic.data import NGram, ParquetLoader
from spark_elastic.data.predicates import (
    PredicateBase,
    in_intersection,
    in_lambda,
    in_negate,
    in_pseudorandom_split,
    in_reduce,
    in_set,
)

SPLIT = [0.5, 0.2, 0.25]


class Odd(PredicateBase):
    """A predicate that a user has written."""

    def get_fields(self) -> set[str]:
        return {"id"}

    def do_include(self, values: Any) -> bool:
        assert set(values) == {"id"}
        return bool(values["id"] % 2)


class Named(PredicateBase):
    """A predicate with fields of any kind."""

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    def __repr__(self) -> str:
        return "Named"

    def get_fields(self) -> set[str]:
        return self.fields  # type: ignore[no-any-return]

    def do_include(self, values: Any) -> bool:
        return True


@pytest.mark.filterwarnings("ignore:.*left none of its 203 rows")
@pytest.mark.parametrize(
    ("predicate", "passes"),
    [
        (in_set([3, 150, 999], "id"), lambda row: row in (3, 150)),
        (in_lambda(["id"], lambda row: 10 <= row < 20), lambda row: 10 <= row < 20),
        (in_lambda(["x", "id"], lambda x, row, less: x[0] == row < less, 30), lambda row: row < 30),
        (in_intersection([7.5, 100], "x"), lambda row: row in (7, 100)),
        (Odd(), lambda row: row % 2),
        (in_negate(Odd()), lambda row: not row % 2),
        (in_reduce([Odd(), in_lambda(["id"], lambda row: row > 90)], all), lambda row: row % 2 and row > 90),
        (in_reduce([Odd(), in_lambda(["id"], lambda row: row > 90)], any), lambda row: row % 2 or row > 90),
        (in_lambda(["id"], lambda row: None), lambda row: False),
    ],
)
def test_rows_that_pass_are_read_once(dataset: Path, predicate: Any, passes: Any) -> None:
    expected = [row for row in range(203) if passes(row)]
    loader = ParquetLoader(dataset, 16, predicate=predicate, with_row_ids=True)
    assert (loader.rows_total, len(loader)) == (len(expected), loader.tracker.plan.steps(len(expected), 1))
    starts = np.cumsum([0, *[group.rows for group in loader.manifest]])
    batches = list(loader)
    assert sorted(ids(batches)) == expected
    assert all((starts[b["_row_group"]] + b["_row"].numpy()).tolist() == b["id"].tolist() for b in batches)
    assert ids(ParquetLoader(dataset, 16, predicate=predicate, shuffle=False, columns=["id"])) == expected


def test_a_predicate_is_asked_of_what_the_filters_pass_and_its_columns_need_not_be_read(dataset: Path) -> None:
    asked = []
    predicate = in_lambda(["id"], lambda row: asked.append(int(row)) or row % 2 == 0)
    loader = ParquetLoader(dataset, 16, predicate=predicate, filters=[("id", "<", 50)], columns=["x"], shuffle=False)
    rows = [x.tolist() for batch in loader for x in batch["x"]]
    assert rows == [[row, row + 0.5] for row in range(0, 50, 2)]
    assert set(asked) == set(range(50))


def test_the_parts_of_a_split_are_disjoint_and_of_their_sizes(tmp_path: Path) -> None:
    root = write_dataset(tmp_path, [1000, 1000])
    parts = [ids(ParquetLoader(root, 64, predicate=in_pseudorandom_split(SPLIT, part, "id"))) for part in range(3)]
    assert all(abs(len(part) - 2000 * share) < 100 for part, share in zip(parts, SPLIT, strict=True))
    assert len(set(itertools.chain(*parts))) == sum(map(len, parts)) < 2000


def test_a_split_goes_by_the_string_of_a_value_alone() -> None:
    predicate = in_pseudorandom_split([0.3, 0.7], 0, "key")
    known = {"a": True, "b": False, "c": False, "7": False, "1": False, "3": False, "None": False, "0.1": False}
    found = {key: predicate.do_include({"key": key}) for key in known}
    assert found == {key: predicate.do_include({"key": key}) for key in known}
    assert predicate.do_include({"key": np.float32(0.1)}) == found["0.1"]
    assert predicate.do_include({"key": np.int64(7)}) == found["7"]
    assert predicate.do_include({"key": None}) == found["None"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_times_without_a_zone_are_found_in_timestamps(tmp_path: Path, unit: str, zone: str | None) -> None:
    times = [datetime(2020, 1, 2), datetime(2020, 1, 2, 3, 4, 5), datetime(1830, 11, 23, 0, 50, 52), None]
    column = pa.array(times, pa.timestamp(unit, zone))
    lists = pa.array([[time, time] if time else [] for time in times], pa.list_(pa.timestamp(unit)))
    days = pa.array([date(2020, 1, 2), date(2020, 1, 3), None, date(1830, 11, 23)])
    pq.write_table(pa.table({"id": range(4), "t": column, "ts": lists, "day": days}), tmp_path / "p.parquet")

    def passing(predicate: Any) -> list[int]:
        return ids(ParquetLoader(tmp_path, 2, columns=["id"], predicate=predicate, shuffle=False))

    for values, expected in (
        ([datetime(2020, 1, 2)], [0]),
        ([date(2020, 1, 2)], [0]),
        ([np.datetime64("2020-01-02T03:04:05"), times[2]], [1, 2]),
        ([times[1], datetime(3000, 1, 1)], [1]),
    ):
        assert passing(in_set(values, "t")) == expected
        if datetime(3000, 1, 1) not in values:
            assert passing(in_intersection(values, "ts")) == expected
    for day in (date(2020, 1, 3), datetime(2020, 1, 3), np.datetime64("2020-01-03"), np.datetime64("2020-01-03", "ns")):
        assert passing(in_set([day], "day")) == [1]
        assert passing(in_negate(in_set([day], "day"))) == [0, 2, 3]
    assert passing(in_set([None], "day")) == [2]


def test_nanoseconds_do_not_reach_the_year_3000() -> None:
    time = datetime(3000, 1, 1)
    for far in (time, date(3000, 1, 1), np.datetime64("3000-01-01")):
        assert not in_set([far], "t").do_include({"t": np.datetime64(time, "ns")})  # which has wrapped around
        assert in_set([far], "t").do_include({"t": np.datetime64(time, "us")})


@pytest.mark.parametrize("make", [in_set, in_intersection])
def test_a_time_zone_is_refused(make: Any) -> None:
    with pytest.raises(
        ValueError, match=r"inclusion_values: datetime.datetime\(.*\) has a time zone; give it without one"
    ):
        make([datetime(2020, 1, 2, tzinfo=timezone.utc)], "t")


@pytest.mark.parametrize(
    ("arguments", "causes"),
    [
        ({"filters": [("id", ">", 999)]}, "filters="),
        ({"predicate": in_set([999], "id")}, "predicate="),
        ({"filters": [("id", "<", 9)], "predicate": in_set([999], "id")}, "filters= and predicate="),
        ({"ngram": NGram({0: ["id"], 500: ["id"]}, 1, "id")}, "ngram="),
    ],
)
def test_a_loader_without_rows_of_a_dataset_with_rows_warns(dataset: Path, arguments: Any, causes: str) -> None:
    with pytest.warns(
        UserWarning, match=f"data: {causes} left none of its 203 rows: the loader has no batches"
    ) as caught:
        assert list(ParquetLoader(dataset, 16, **arguments)) == []
    assert [Path(warning.filename).name for warning in caught] == ["test_predicates.py"]
    empty = write_dataset(dataset.parent / "empty", [0], files=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ParquetLoader(empty, 16, **arguments)
        ParquetLoader(dataset, 16, filters=[("id", "=", 202)])


@pytest.mark.parametrize(
    "sizes", [{"global_batch_size": 24}, {"global_batch_size": 24, "shards": 4}, {"batch_size": 8}]
)
def test_rows_that_pass_count_once_through_resets(dataset: Path, sizes: dict[str, int]) -> None:
    world = World(lambda: ParquetLoader(dataset, predicate=in_pseudorandom_split(SPLIT, 0, "id"), **sizes), 3)
    expected = ids(ParquetLoader(dataset, 16, predicate=in_pseudorandom_split(SPLIT, 0, "id")))
    world.train_through_a_loss()
    assert world.counted == collections.Counter((0, row) for row in expected)


def test_a_position_belongs_to_the_rows_that_pass_and_not_to_the_code_that_chose_them(dataset: Path) -> None:
    loader = ParquetLoader(dataset, 16, predicate=in_lambda(["id"], lambda row: row >= 100))
    next(iter(loader))
    loader.close()
    state = loader.state_dict()
    ParquetLoader(dataset, 16, predicate=in_negate(in_set(range(100), "id"))).load_state_dict(state)
    with pytest.raises(ValueError, match="the loader's state was saved with filters='a predicate that passes the rows"):
        ParquetLoader(dataset, 16, predicate=in_lambda(["id"], lambda row: row < 103)).load_state_dict(state)


@pytest.mark.parametrize("kind", [in_set, in_intersection])
def test_equal_sets_have_one_name_in_all_processes_whatever_order_they_have_there(kind: Any) -> None:
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)  # as sets of strings are in two processes
    pickled = pickle.dumps(kind(one, "id"))
    assert pickled == pickle.dumps(kind(other, "id"))
    values: Any = {in_set: 8, in_intersection: np.array([8, 9])}
    assert pickle.loads(pickled).do_include({"id": values[kind]})
    assert not pickle.loads(pickled).do_include({"id": values[kind] + 2})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: in_set("abc", "id"), "inclusion_values must be several values, not the string 'abc'"),
        (lambda: in_set([1], ["id"]), "predicate_field must be the name of a column, not ['id']"),
        (lambda: in_intersection("abc", "id"), "inclusion_values must be several values"),
        (lambda: in_lambda("id", bool), "predicate_fields must be a list of names, not 'id'"),
        (lambda: in_lambda([], bool), "predicate_fields must be a list of names, not []"),
        (lambda: in_lambda(["id"], 3), "predicate_func must be callable, not 3"),
        (lambda: in_negate(bool), "predicate must have get_fields() and do_include(values)"),
        (lambda: in_reduce([], all), "predicate_list must have at least one predicate"),
        (lambda: in_reduce([Odd], all), "predicate must have get_fields() and do_include(values)"),
        (lambda: in_reduce([Odd()], "all"), "reduce_func must be callable, not 'all'"),
        (lambda: in_pseudorandom_split([0.5, 0.6], 0, "id"), "fraction_list must be parts of 1"),
        (lambda: in_pseudorandom_split([0.5, -0.1], 0, "id"), "fraction_list must be parts of 1"),
        (lambda: in_pseudorandom_split([], 0, "id"), "fraction_list must be parts of 1"),
        (lambda: in_pseudorandom_split([0.5, float("nan")], 0, "id"), "fraction_list must be parts of 1"),
        (lambda: in_pseudorandom_split([0.5], 1, "id"), "subset_index must be from 0 to 0, not 1"),
        (lambda: in_pseudorandom_split([0.5], -1, "id"), "subset_index must be a whole number from 0 on, not -1"),
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("predicate", "message"),
    [
        (in_set([1], "nope"), "predicate: 'nope' is not in the dataset, which has id, x"),
        (lambda values: True, "predicate must have get_fields() and do_include(values)"),
        *(
            (make(Named(fields)), f"Named must return the names of columns, at least one, not {fields!r}")
            for fields in (None, "id", [], ["id", 7])
            for make in (lambda one: one, in_negate, lambda one: in_reduce([Odd(), one], all))
        ),
    ],
)
def test_a_predicate_that_does_not_fit_is_refused(dataset: Path, predicate: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ParquetLoader(dataset, 16, predicate=predicate)
