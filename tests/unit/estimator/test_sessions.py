"""What estimators find out about the session of a DataFrame."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.errors import SparkElasticError
from spark_elastic.estimator.sessions import prepare_python


def test_a_dataframe_of_a_stopped_session_is_refused_in_a_sentence() -> None:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None))
    with pytest.raises(SparkElasticError, match="the Spark session of this DataFrame has been stopped: read it again"):
        prepare_python(session)


def test_a_dataframe_over_connect_beside_classic_sessions_is_refused_in_a_sentence() -> None:
    """Spark ML looks at the process, not at the DataFrame, and failed on an attribute that Connect does not have."""
    connect = pytest.importorskip("pyspark.sql.connect.session")
    with pytest.raises(SparkElasticError, match="connect in a process without a classic session"):
        prepare_python(object.__new__(connect.SparkSession))
