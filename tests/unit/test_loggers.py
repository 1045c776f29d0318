"""Loggers with the real MLflow and TensorBoard, on files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_elastic.loggers import MLflowLogger, TensorBoardLogger, mlflow_name


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient(tmp_path.as_uri())


def mlflow(client: Any, **settings: Any) -> MLflowLogger:
    return MLflowLogger(client.tracking_uri, "flights", **settings)


def runs(client: Any) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name("flights").experiment_id]))


def test_mlflow_logs_to_a_run_and_ends_it(client: Any) -> None:
    logger = mlflow(client, run_name="first", params={"lr": 0.1})
    logger.start(None)
    logger.named("abc")
    logger.log(3, {"loss": 0.5, "job/world_size": 2.0}, 1000.0)
    logger.log(4, {"loss": 0.25, "top@5 (val)": 0.5}, 1001.0)
    logger.finish(None)
    (run,) = runs(client)
    assert (run.info.run_name, run.info.status, run.data.params) == ("first", "FINISHED", {"lr": "0.1"})
    assert run.data.tags["spark_elastic.run_id"] == "abc"
    assert [entry.value for entry in client.get_metric_history(run.info.run_id, "top_5 _val_")] == [0.5]
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(entry.step, entry.value, entry.timestamp) for entry in history] == [(3, 0.5, 1000000), (4, 0.25, 1001000)]


def test_any_name_is_one_that_mlflow_takes_and_differs_from_the_others(client: Any) -> None:
    from mlflow.utils.validation import _validate_metric

    odd = ["", ".", "..", "..up", "up", *(f"{part}/up" for part in ("", ".", "..", "/"))]
    odd += [f"up/{part}" for part in ("", ".", "..", "/up", "./up", "../up")]
    fit = [mlflow_name(name) for name in [*odd, 260 * "a", 259 * "a" + "b", "../" + 250 * "a", "top@5 (val)", "loss\n"]]
    for name in fit:
        _validate_metric(name, 0.5, 0, 0)
    assert len(set(fit)) == len(fit)
    logger = mlflow(client)
    logger.start(None)
    logger.log(1, {"train/": 0.5}, 1000.0)
    logger.finish(None)
    assert [(run.info.status, run.data.metrics) for run in runs(client)] == [("FINISHED", {"train/_": 0.5})]


@pytest.mark.parametrize("name", ["loss", "val/loss", "top_5 _val_", "a.b:c-d", 250 * "a"])
def test_a_name_that_mlflow_takes_stays_as_it_is(name: str) -> None:
    assert mlflow_name(name) == name


@pytest.mark.parametrize("url", ["s3://bucket/run", "/data/it's"])
def test_a_job_that_resumes_goes_on_in_the_mlflow_run_of_its_checkpoint(client: Any, url: str) -> None:
    first, other, second = mlflow(client), mlflow(client), mlflow(client)
    first.start(url)
    first.finish("TrainingFailedError: the power went")
    other.start("/data/other")
    other.finish(None)
    failed = next(run for run in runs(client) if run.info.status == "FAILED")
    assert failed.data.tags["spark_elastic.error"] == "TrainingFailedError: the power went"
    second.start(url)
    second.log(9, {"loss": 0.5}, 1000.0)
    assert client.get_run(failed.info.run_id).info.status == "RUNNING"
    second.finish(None)
    assert len(runs(client)) == 2
    continued = client.get_run(failed.info.run_id)
    assert continued.data.metrics == {"loss": 0.5}
    assert "spark_elastic.error" not in continued.data.tags


def history(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(entry.step, entry.value) for entry in client.get_metric_history(run_id, name)]


def test_steps_that_a_resumed_job_does_again_are_in_mlflow_once_and_its_size_is_there(client: Any) -> None:
    for steps, size in ((range(3, 7), 4), (range(5, 9), 3)):
        logger = mlflow(client)
        logger.start("/data/run")
        for step in steps:
            logger.log(step, {"top@5": 100 * size + step}, 1000.0 + step)
            logger.log(step, {"job/world_size": size}, 1000.0 + step)
        logger.finish(None)
    run = runs(client)[0].info.run_id
    assert history(client, run, "top_5") == [(3, 403), (4, 404), (5, 405), (6, 406), (7, 307), (8, 308)]
    assert history(client, run, "job/world_size")[3:] == [(6, 4), (6, 3), (6, 3), (7, 3), (8, 3)]


def test_a_job_that_begins_anew_in_the_run_of_its_checkpoint_logs_all_its_steps(client: Any) -> None:
    for value in (1.0, 2.0):
        logger = mlflow(client)
        logger.start("/data/run")
        logger.log(0, {"job/world_size": 2}, 1000.0)
        logger.log(1, {"loss": value}, 1001.0)
        logger.finish(None)
    assert history(client, runs(client)[0].info.run_id, "loss") == [(1, 1.0), (1, 2.0)]


def test_what_others_have_logged_to_a_named_run_keeps_nothing_out_of_it(client: Any) -> None:
    named = client.create_run(client.create_experiment("flights")).info.run_id
    client.log_metric(named, "loss", 7.0, step=2)
    for settings in ({"run_id": named}, {}):
        logger = mlflow(client, **settings)
        logger.start("/data/run")
        logger.log(1, {"loss": 0.5}, 1000.0)
        logger.finish(None)
    assert history(client, named, "loss") == [(2, 7.0), (1, 0.5)]


def test_jobs_without_a_checkpoint_have_runs_of_their_own_unless_one_is_named(client: Any) -> None:
    for _ in range(2):
        logger = mlflow(client)
        logger.start(None)
        logger.finish(None)
    named = runs(client)[0].info.run_id
    logger = mlflow(client, run_id=named)
    logger.start(None)
    logger.log(1, {"loss": 1.0}, 1000.0)
    logger.finish(None)
    assert len(runs(client)) == 2
    assert client.get_run(named).data.metrics == {"loss": 1.0}


def test_params_are_logged_to_a_run_that_goes_on_and_those_that_it_has_stay(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    named = client.create_run(client.create_experiment("flights")).info.run_id
    client.log_param(named, "by", "hand")
    long = {"prompt": "very " * 2000}  # MLflow keeps its beginning
    before = {"lr": 0.1, "epochs": 5, "grown": "x" * 300, **long}
    for params in (before, {**before, "epochs": 9, "seed": 3, "grown": "x" * 400}):
        logger = mlflow(client, run_id=named, params=params)
        logger.start(None)
        logger.finish(None)
    found = client.get_run(named).data.params
    assert long["prompt"].startswith(found.pop("prompt"))
    assert found == {"by": "hand", "lr": "0.1", "epochs": "5", "seed": "3", "grown": "x" * 300}
    assert [record.getMessage() for record in caplog.records if record.name == "spark_elastic"] == [
        f"MLflow run {named} keeps the values of params that it has, which differ: epochs, grown"
    ]


def test_a_run_whose_params_mlflow_refuses_is_deleted_and_no_later_job_goes_on_in_it(client: Any) -> None:
    with pytest.raises(Exception, match=r"layers\[0\]"):
        mlflow(client, params={"lr": 0.1, "layers[0]": 64}).start("/data/run")
    assert runs(client) == []
    logger = mlflow(client, params={"lr": 0.3, "layers": 64})
    logger.start("/data/run")
    logger.finish(None)
    assert [run.data.params for run in runs(client)] == [{"lr": "0.3", "layers": "64"}]


def test_a_run_of_mlflow_that_does_not_exist_is_an_error(client: Any) -> None:
    with pytest.raises(Exception, match="not found"):
        mlflow(client, run_id="0" * 32).start(None)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(entry.step, entry.value) for entry in EventAccumulator(str(folder)).Reload().Scalars(name)]


@pytest.mark.parametrize("order", ["before the commit", "after the commit"])
def test_tensorboard_goes_on_in_its_folder_and_hides_what_is_done_again(tmp_path: Path, order: str) -> None:
    for resumes_from, steps in ((0, 6), (4, 4)):
        begin = resumes_from + (order == "after the commit")
        logger = TensorBoardLogger(tmp_path / "logs")
        logger.start(None)
        logger.named("abc")
        logger.log(resumes_from, {"job/world_size": 2.0}, 1000.0)
        for step in range(begin, begin + steps):
            logger.log(step, {"loss": 100 * resumes_from + step}, 1000.0 + step)
        logger.finish(None)
    assert scalars(tmp_path / "logs", "loss") == [
        *((step, step) for step in range(begin - 4, begin)),
        *((step, 400 + step) for step in range(begin, begin + 4)),
    ], "the step from which a job resumes is done again only by those who report before the commit"


def test_a_job_that_resumes_and_reports_nothing_hides_nothing_in_tensorboard(tmp_path: Path) -> None:
    for size, reported in ((2.0, {"loss": 0.5}), (3.0, {})):
        logger = TensorBoardLogger(tmp_path)
        logger.start(None)
        logger.log(6, {"job/world_size": size, **reported}, 1000.0)
        logger.finish(None)
    assert scalars(tmp_path, "loss") == [(6, 0.5)]
    assert scalars(tmp_path, "job/world_size") == [(6, 2.0), (6, 3.0)]


def test_where_loggers_log_to_is_checked_when_they_are_made() -> None:
    with pytest.raises(TypeError, match="tracking_uri must be MLflow's address of a server or folder, not 5"):
        MLflowLogger(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log_dir must be a folder, not empty"):
        TensorBoardLogger("")
    with pytest.raises(TypeError):
        TensorBoardLogger(5)  # type: ignore[arg-type]


def test_tensorboards_folder_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = TensorBoardLogger("~/logs")
    logger.start(None)
    logger.log(1, {"loss": 0.5}, 1000.0)
    logger.finish(None)
    assert scalars(tmp_path / "logs", "loss") == [(1, 0.5)]


def test_a_folder_that_cannot_be_made_is_named_with_the_logger(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"TensorBoardLogger: the folder log_dir='.*/file' cannot be made: File exists"
    ):
        TensorBoardLogger(tmp_path / "file").start(None)
