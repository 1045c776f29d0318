"""The plan of a fit: the arguments that it has for loaders."""

from __future__ import annotations

from unstarted_fits import make

from spark_elastic.estimator.planning import plan_data


def test_the_training_loader_is_balanced_and_no_other() -> None:
    data = plan_data(make(globalBatchSize=16, balance="auto"), ("train", None), {}, True)
    assert data.training["balance"] == "auto"
    assert "balance" not in data.reading
    assert plan_data(make(), ("train", None), {}, True).training["balance"] is None


def test_petastorms_readers_are_an_option_of_its_engine_alone() -> None:
    petastorm = plan_data(make(engine="petastorm", readers=3), ("train", None), {"key": "k"}, False)
    assert petastorm.reading == {
        "engine": "petastorm",
        "engine_options": {"workers_count": 3},
        "storage_options": {"key": "k"},
        "with_row_ids": False,
    }
    assert plan_data(make(readers=3), ("train", None), {}, True).reading["engine_options"] is None


def test_rows_have_names_for_errors_only_where_they_are_still_to_be_checked() -> None:
    assert plan_data(make(), ("train", None), {}, True).training["with_row_ids"]
    assert not plan_data(make(), ("train", None), {}, False).training["with_row_ids"]
