"""Spark Connect where executors do not have the package: the session brings it along."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import training
from connect_server import ConnectServer
from environments import environment_without

import spark_elastic
from spark_elastic import SparkElasticError
from spark_elastic.testing import inject, kill, kill_executor

cloudpickle.register_pickle_by_value(training)
pytestmark = pytest.mark.long

PACKAGE = Path(spark_elastic.__file__).parent


@pytest.fixture
def session(nothing_left: None, tmp_path: Path) -> Iterator[Any]:
    """One whose executors run a Python that has all packages but ours."""
    from pyspark.sql.connect.session import SparkSession

    python, _ = environment_without(tmp_path / "environment", "spark_elastic", "__editable__")
    server = ConnectServer(tmp_path, 2, python)
    session = SparkSession.builder.remote(server.url).create()
    yield session
    session.stop()
    server.end()


def test_the_package_travels_as_an_artifact_of_the_session(session: Any, tmp_path: Path) -> None:
    job: dict[str, Any] = {"spark": session, "min_np": 2, "max_np": 2}
    with pytest.raises(SparkElasticError, match="No module named 'spark_elastic'"):
        spark_elastic.run(training.plain, (1,), **job)
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as zipped:
        for file in PACKAGE.rglob("*.py"):
            zipped.write(file, file.relative_to(PACKAGE.parent))
    session.addArtifacts(str(tmp_path / "package.zip"), pyfile=True)
    with inject(kill(rank=1, step=10), kill_executor(rank=1, step=20)):
        results = spark_elastic.run(training.count_steps, (30, 0.02), **job)
    assert [result["history"] for result in results] == [list(range(1, 31))] * 2
    assert len({result["digest"] for result in results}) == 1
