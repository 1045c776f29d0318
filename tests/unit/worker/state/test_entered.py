"""Outside a job, too, only the state of the elastic function commits."""

from __future__ import annotations

import pytest

from spark_elastic.errors import SparkElasticError
from spark_elastic.worker.state.entered import check_is_entered, entered_without_job


def test_another_state_is_refused_while_the_function_of_one_runs() -> None:
    one, other = object(), object()
    check_is_entered(other)
    with entered_without_job(one):
        check_is_entered(one)
        with pytest.raises(SparkElasticError, match="only the state that was given to the elastic function can commit"):
            check_is_entered(other)
    check_is_entered(other)
