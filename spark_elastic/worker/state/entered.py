"""Which state may commit while an elastic function runs outside a job: only the one that the function was given, as in a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from spark_elastic.errors import SparkElasticError

ONE_STATE = "only the state that was given to the elastic function can commit; put everything into that one"
# The state of the elastic function that is running outside a job.
_entered: ContextVar[object] = ContextVar("spark_elastic_entered", default=None)


@contextmanager
def entered_without_job(state: object) -> Iterator[None]:
    """Keep other states from committing while an elastic function runs outside a job, as a job does."""
    token = _entered.set(state)
    try:
        yield
    finally:
        _entered.reset(token)


def check_is_entered(state: object) -> None:
    """Raise ``SparkElasticError`` for a state that commits while the elastic function of another one runs."""
    entered = _entered.get()
    if entered is not None and entered is not state:
        raise SparkElasticError(ONE_STATE)
