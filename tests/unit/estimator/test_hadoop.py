"""Files by way of the JVM: what is told where there is none, and where it raises; integration tests have its file systems."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext

from spark_elastic.errors import SparkElasticError
from spark_elastic.estimator.hadoop import HadoopFiles, _as_os_errors

URL = "s3a://AK:hidden@bucket/x"


def test_without_a_session_it_says_to_create_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(
        SparkElasticError, match=r"^s3a://…@bucket/x: there is no SparkSession, or it was stopped; create"
    ):
        HadoopFiles(URL)


def test_what_the_jvm_raises_is_an_os_error_that_names_the_url_without_its_secrets() -> None:
    raised: Any = SimpleNamespace(_target_id="o1", toString=lambda: f"java.io.IOException: no access to {URL}/part")
    with (
        pytest.raises(OSError, match=r"^s3a://…@bucket/x: java.io.IOException: no access to ") as caught,
        _as_os_errors(URL),
    ):
        raise Py4JJavaError("calling o1.exists", raised)
    assert "hidden" not in str(caught.value)


def test_an_error_of_this_process_stays_what_it_is() -> None:
    with pytest.raises(KeyError), _as_os_errors(URL):
        raise KeyError("x")
