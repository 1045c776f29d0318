"""Keras models in real jobs, through kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import keras_training
import pytest

from spark_elastic import load_checkpoint
from spark_elastic.testing import kill

cloudpickle.register_pickle_by_value(keras_training)
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
ROWS, BATCH, EPOCHS = 1000, 63, 2


def test_a_keras_model_counts_every_row_once_and_ends_with_equal_weights_through_kills(run: Any, dataset: str) -> None:
    # 63 rows are 32 and 31 on two ranks. The last of an epoch's 15 steps is committed at its end.
    faults = [kill(rank=1, step=5), kill(rank=0, step=20)]
    result = run(keras_training.count_rows, dataset, ROWS, EPOCHS, BATCH, faults=faults, min_np=2, max_np=2)
    assert (result.faults, result.sizes) == (2, [2, 2, 2])
    assert len({one["digest"] for one in result.results}) == 1
    for one in result.results:
        assert sum(one["seen"]) == pytest.approx(EPOCHS * (ROWS - ROWS % BATCH))
        assert one["seen"] == pytest.approx([float(round(count)) for count in one["seen"]], abs=1e-4)


def test_on_shards_three_workers_with_kills_leave_the_bits_of_one(run: Any, dataset: str) -> None:
    arguments = (keras_training.train_on_shards, dataset, EPOCHS, 100, 6)
    alone = run(*arguments, min_np=1, max_np=1)
    faults = [kill(rank=1, step=3), kill(rank=0, step=14)]
    result = run(*arguments, faults=faults, num_proc=3, min_np=2, max_np=3)
    assert result.faults == len(faults)
    assert {each["digest"] for each in result.results} == {alone.results[0]["digest"]}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return keras_training.write_rows(tmp_path)


def test_fit_stops_early_and_logs_through_kills_as_keras_alone_does(run: Any, rows: str) -> None:
    """Each loss is followed by a newcomer, which has seen nothing of the epochs before; step 40 is the last of the fourth."""
    faults = [kill(rank=1, step=5), kill(rank=0, step=27), kill(rank=1, step=40), kill(rank=0, step=50, at="committed")]
    result = run(keras_training.fit, rows, faults=faults, num_proc=2, min_np=2, max_np=2)
    assert result.faults == len(faults)
    expected = keras_training.fit_plainly(rows)
    assert 6 < len(expected["epochs"]) < keras_training.EPOCHS
    one, other = result.results
    assert one == other
    assert (one.pop("names"), one.pop("epochs")) == (expected.pop("names"), expected.pop("epochs"))
    for name, value in one.items():
        assert value == pytest.approx(expected[name], rel=2e-3, abs=1e-4), name


def test_fit_on_shards_leaves_the_bits_and_the_metrics_of_one_worker_in_a_world_of_three_with_kills(
    run: Any, rows: str
) -> None:
    alone = run(keras_training.fit, rows, 6, False, 3, min_np=1, max_np=1)
    faults = [kill(rank=1, step=3), kill(rank=0, step=14)]
    result = run(keras_training.fit, rows, 6, False, 3, faults=faults, num_proc=3, min_np=2, max_np=3)
    assert result.faults == len(faults)
    assert result.results == alone.results * len(result.results)


def test_a_callback_that_stops_training_on_one_rank_stops_it_on_all(run: Any, rows: str) -> None:
    assert run(keras_training.stop_on_one_rank, rows, num_proc=2, min_np=2, max_np=2).results == [(1, 2)] * 2


def test_what_rank_0_writes_goes_on_where_another_rank_takes_its_place(
    run: Any, rows: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [kill(rank=0, step=25), kill(rank=1, step=44)]
    result = run(keras_training.fit_and_write, rows, str(tmp_path), 6, faults=faults, num_proc=2, min_np=2, max_np=2)
    assert result.faults == len(faults)
    (first, best, least), (_, unknown, _) = result.results
    assert (first, unknown) == (0, None)
    assert best == least
    written = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in written] == ["epoch", *map(str, range(6))]
    assert (tmp_path / "best.keras").exists()
    assert "equal on all ranks" not in capfd.readouterr().err


def test_the_best_checkpoint_has_the_weights_that_were_validated(
    run: Any, rows: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The weights of an epoch's end are validated and reported before they are committed."""
    import spark_elastic.keras  # noqa: F401  # chooses Keras' backend

    folder = tmp_path_factory.mktemp("kept")
    wanted = {"checkpoint": folder, "checkpoint_keep": 1, "checkpoint_best": "val_loss"}
    found = run(keras_training.fit, rows, None, False, 6, num_proc=2, min_np=2, max_np=2, **wanted).results[0]
    epochs, place = len(found["epochs"]), found["names"].index("val_loss")
    losses = found["history"][place * epochs : (place + 1) * epochs]
    best = min(losses)
    kept = load_checkpoint(folder, best=True)
    assert (kept["epoch"], kept["batch"]) == (losses.index(best) + 1, 0)
    model = keras_training.classifier()
    for variable, value in zip(model.weights, kept["weights"]["values"], strict=True):
        variable.assign(value)
    assert model.evaluate(*keras_training.validation_data(), verbose=0)[0] == pytest.approx(best, rel=1e-5)
