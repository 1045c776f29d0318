from __future__ import annotations

import collections
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import World, make_table

from spark_elastic.data import ElasticDataLoader, NGram, ParquetLoader, WeightedSamplingLoader
from spark_elastic.errors import DataError

BASE = 10_000  # the numbers of a dataset's rows begin at this times its place in the list


@pytest.fixture
def urls(tmp_path: Path) -> list[Path]:
    """Three datasets of 60, 250 and 40 rows."""
    for place, rows in enumerate((60, 250, 40)):
        (tmp_path / str(place)).mkdir()
        ids = np.arange(rows) + BASE * place
        pq.write_table(make_table(ids), tmp_path / str(place) / "part-0.parquet", row_group_size=16)
    return [tmp_path / str(place) for place in range(3)]


def mix(
    urls: list[Path], weights: Any = (1, 3), *, seed: int = 0, shard: Any = None, **options: Any
) -> WeightedSamplingLoader:
    options = {"global_batch_size": 24, **options}
    return WeightedSamplingLoader([ParquetLoader(url, **options) for url in urls], weights, seed=seed, shard=shard)


def ids(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch["id"]]


def test_an_epoch_has_the_proportions_and_no_row_twice(urls: list[Path]) -> None:
    loader = mix(urls[:2])
    assert (loader.rows_total, len(loader)) == (240, 10)
    rows = ids(loader)
    assert sorted(rows)[:60] == list(range(60))
    assert len(set(rows)) == 240
    assert len({row for row in rows if row >= BASE}) == 180
    changes = np.count_nonzero(np.diff([row >= BASE for row in rows]))
    assert 60 < changes < 120, "they take turns at random"
    assert ids(mix(urls[:2])) == rows
    assert ids(mix(urls[:2], seed=1)) != rows


def test_rows_of_a_loader_come_once_before_any_comes_again(urls: list[Path]) -> None:
    loader = mix(urls, [0.2, 0.5, 0.3])
    seen: collections.Counter[int] = collections.Counter()
    for epoch in range(6):
        loader.set_epoch(epoch)
        rows = ids(loader)
        assert len(rows) == loader.rows_total == 133
        seen.update(rows)
    by_loader = [[seen[row + BASE * place] for row in range(count)] for place, count in enumerate((60, 250, 40))]
    assert [sum(counts) for counts in by_loader] == [6 * 27, 6 * 66, 6 * 40]
    assert all(max(counts) - min(counts) <= 1 for counts in by_loader), by_loader


@pytest.mark.parametrize(
    "sizes",
    [
        {"global_batch_size": 24},
        {"global_batch_size": 24, "shards": 4},
        {"global_batch_size": 24, "balance": "auto"},
        {"global_batch_size": None, "batch_size": 5},
        {"global_batch_size": 7, "drop_last": False, "shuffle": False},
    ],
)
def test_rows_count_once_through_resets(urls: list[Path], sizes: dict[str, Any]) -> None:
    def make() -> WeightedSamplingLoader:
        return mix(urls[:2], **sizes)

    expected = collections.Counter((0, row) for row in ids(make()))
    world = World(make, 3)
    world.same_steps = sizes.get("global_batch_size") is not None
    world.step()
    world.commit()
    if "balance" in sizes:
        assert all(loader.balance([1000, 1000, 3000]) for loader in world.loaders)
    world.step()
    world.form(2, keep=1)
    for _ in range(2):
        world.step()
        world.commit()
    world.form(5, keep=2)
    while world.step():
        world.commit()
    world.close()
    assert world.counted == expected


def test_a_second_epoch_counts_once_through_a_reset_where_a_pass_ends_within_a_step(urls: list[Path]) -> None:
    def make() -> WeightedSamplingLoader:
        loader = mix(urls[:2])
        loader.set_epoch(1)
        return loader

    rows = ids(make())
    assert len(rows) == 240
    assert sorted(row for row in rows if row < BASE) == list(range(60))
    world = World(make, 2)
    for _ in range(4):
        world.step()
        world.commit()
    world.form(3, keep=1)
    while world.step():
        world.commit()
    world.close()
    assert world.counted == collections.Counter((1, row) for row in rows)


def test_ranks_without_rows_get_some_of_weight_zero(urls: list[Path]) -> None:
    world = World(lambda: mix(urls[:2], batch_size=50, global_batch_size=None), 8)
    assert sum(world.step() or []) == 240
    few = World(lambda: mix(urls[:2], [1, 1], global_batch_size=17), 8)
    while step := few.step():
        few.commit()
        assert sum(step) in (17, 17 + 120 % 17)
    few.close()
    world.close()
    assert sum(few.counted.values()) == 120


def test_a_position_belongs_to_the_mix(urls: list[Path]) -> None:
    loader = mix(urls[:2])
    iterator = iter(loader)
    first = [int(row) for _ in range(3) for row in next(iterator)["id"]]
    state = loader.state_dict()
    loader.close()
    again = mix(urls[:2])
    again.load_state_dict(state)
    assert first + ids(again) == ids(mix(urls[:2]))
    for other, error, message in (
        (mix(urls[1::-1], [3, 1]), DataError, "the dataset has changed since the state was saved: dataset"),
        (mix(urls[:2], [1, 4]), ValueError, "the loader's state was saved with probabilities='0.25 0.75'"),
        (mix(urls[:2], seed=1), ValueError, "the loader's state was saved with seed=0"),
        (
            mix(urls[:2], shuffle_rows=0),
            ValueError,
            "the mix was saved with loaders of other settings: give each the seed",
        ),
        (ParquetLoader(urls[0], 8), DataError, "the dataset has changed since the state was saved: kind"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            other.load_state_dict(state)


def test_a_position_of_an_earlier_release_has_no_content_and_is_read(urls: list[Path]) -> None:
    loader = mix(urls[:2])
    state = loader.state_dict()
    parts = [{name: part.identity[name] for name in part.identity if name != "content"} for part in loader._loaders]
    assert state["loaders"] == hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    del state["content"]
    mix(urls[:2]).load_state_dict(state)
    with pytest.raises(DataError, match="the dataset has changed since the state was saved: content"):
        mix(urls[:2]).load_state_dict({**state, "content": "another"})


@pytest.mark.parametrize("strict", [(True, True), (True, False), (False, False)])
def test_a_mix_is_as_strict_about_kernels_as_its_loaders(urls: list[Path], strict: tuple[bool, bool]) -> None:
    parts = [
        ParquetLoader(url, global_batch_size=24, shards=4, shards_strict=each)
        for url, each in zip(urls[:2], strict, strict=True)
    ]
    loader = WeightedSamplingLoader(parts, [1, 3])
    state = {**loader.state_dict(), "kernels": {"torch": "another"}}
    if any(strict):
        with pytest.raises(DataError, match=re.escape("or all loaders of the mix, shards_strict=False")):
            loader.load_state_dict(state)
    else:
        with pytest.warns(UserWarning, match="bits may differ from now on"):
            loader.load_state_dict(state)


def test_row_ids_name_the_loader_too(urls: list[Path]) -> None:
    for batch in mix(urls[:2], with_row_ids=True):
        assert set(batch) == {"id", "x", "_dataset", "_row_group", "_row"}
        assert (batch["_dataset"] * BASE + 16 * batch["_row_group"] + batch["_row"]).tolist() == batch["id"].tolist()


def test_a_shard_gives_one_ranks_rows(urls: list[Path]) -> None:
    parts = [ids(mix(urls[:2], shard=(rank, 3))) for rank in range(3)]
    assert sorted(row for part in parts for row in part) == sorted(ids(mix(urls[:2])))


def test_lists_of_several_lengths_and_windows_can_be_mixed(urls: list[Path], tmp_path: Path) -> None:
    for place, lengths in enumerate(([1, 2, 3, 0], [2, 2, 2, 2])):
        (tmp_path / f"v{place}").mkdir()
        lists = [[BASE * place + row] * length for row, length in enumerate(lengths)]
        table = pa.table({"id": [BASE * place + row for row in range(4)], "v": pa.array(lists, pa.list_(pa.int64()))})
        pq.write_table(table, tmp_path / f"v{place}" / "p.parquet")
    lengths = {}
    for batch in mix([tmp_path / "v0", tmp_path / "v1"], [1, 1], global_batch_size=4):
        for row, values in zip(batch["id"].tolist(), batch["v"].unbind(), strict=True):
            assert set(values.tolist()) <= {row}
            lengths[row] = len(values)
    assert lengths == dict(zip([0, 1, 2, 3, BASE, BASE + 1, BASE + 2, BASE + 3], [1, 2, 3, 0, 2, 2, 2, 2], strict=True))
    window = NGram({0: ["id"], 1: ["id"]}, 1, "id")
    pairs = [tuple(pair) for batch in mix(urls[:2], ngram=window) for pair in batch["id"].tolist()]
    assert all(after - before == 1 for before, after in pairs)
    assert len(set(pairs)) == len(pairs) == mix(urls[:2], ngram=window).rows_total


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (
            pa.list_(pa.float64()),
            [1.5, 2.5],
            r"torch.float64 of shape \(2,\) and torch.int64 in lists of several lengths",
        ),
        (pa.int64(), 1, r"torch.int64 in lists of several lengths and torch.int64 of shape \(\)"),
    ],
)
def test_lists_that_are_not_alike_are_an_error(tmp_path: Path, kind: pa.DataType, value: Any, message: str) -> None:
    lists = pa.array([[row] * (row % 3 + 1) for row in range(12)], pa.list_(pa.int64()))
    pq.write_table(pa.table({"v": lists}), tmp_path / "a")
    pq.write_table(pa.table({"v": pa.array([value] * 12, kind)}), tmp_path / "b")
    with pytest.raises(
        DataError, match=f"column 'v' is not alike in the loaders of a mix: {message}; give a transform"
    ):
        list(mix([tmp_path / "a", tmp_path / "b"], [1, 1], global_batch_size=6))


def test_columns_that_are_not_alike_are_an_error(urls: list[Path], tmp_path: Path) -> None:
    odd = tmp_path / "odd.parquet"
    pq.write_table(pa.table({"id": pa.array(np.arange(99), pa.int32())}), odd)
    with pytest.raises(DataError, match="the loaders of a mix have different columns: id, x, and id"):
        list(mix([urls[0], odd]))
    with pytest.raises(
        DataError, match=r"column 'id' is not alike in the loaders of a mix: torch.int32 of shape \(\) and"
    ):
        list(mix([urls[0], odd], columns=["id"]))


@pytest.mark.filterwarnings("ignore:.*left none of its 250 rows")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda urls: mix(urls[:1], [1]), "loaders must be two or more, not 1"),
        (lambda urls: mix(urls, [1, 2]), "probabilities must have one number for each of the 3 loaders, not 2"),
        (lambda urls: mix(urls[:2], [1, 0]), "probabilities must be above 0, not [1, 0]"),
        (lambda urls: mix(urls[:2], [1, float("nan")]), "probabilities must be above 0"),
        (lambda urls: mix(urls[:2], None), "probabilities must be a list of numbers, not None"),
        (lambda urls: mix(urls[:2], [1, "much"]), "probabilities must be a list of numbers, not [1, 'much']"),
        (
            lambda urls: mix(urls[:2], [1e308, 1e308]),
            "probabilities must have a sum and quotients that floats can hold",
        ),
        (
            lambda urls: mix(urls[:2], [1e-320, 1e300]),
            "probabilities must have a sum and quotients that floats can hold",
        ),
        (
            lambda urls: mix(urls[:2], [0.999, 0.001]),
            "loaders[1] would never have a row: an epoch has 60, so that none of the others has a row twice, and 0.001 of these "
            "rounds to 0; give it a greater probability, or the others more rows",
        ),
        (lambda urls: mix(urls[:2], seed=-1), "seed must be a whole number from 0 on, not -1"),
        (lambda urls: mix(urls[:2], filters=[("id", "<", 50)]), "loaders[1] has no rows"),
        (
            lambda urls: WeightedSamplingLoader([ParquetLoader(urls[0], 8), ParquetLoader(urls[1], 9)], [1, 1]),
            "loaders[1] has another batch size, shards=, balance= or drop_last= than loaders[0]",
        ),
        (
            lambda urls: WeightedSamplingLoader([ParquetLoader(url, 8, shard=(0, 2)) for url in urls], [1, 1, 1]),
            "loaders[0] has a shard= of its own",
        ),
        (
            lambda urls: WeightedSamplingLoader([ParquetLoader(urls[0], 8)] * 2, [1, 1]),
            "loaders must be different objects",
        ),
        (
            lambda urls: WeightedSamplingLoader([ParquetLoader(urls[0], 8), ElasticDataLoader(range(9), 8)], [1, 1]),
            "loaders[1] must be an EngineLoader, such as a ParquetLoader, not ElasticDataLoader",
        ),
        (
            lambda urls: WeightedSamplingLoader([ParquetLoader(url, 8) for url in urls], [1, 1, 1], prefetch=0),
            "prefetch must be a whole number from 1 on, not 0",
        ),
    ],
)
def test_wrong_arguments_are_named(urls: list[Path], make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(urls)
