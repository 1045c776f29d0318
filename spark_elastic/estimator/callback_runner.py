"""Runs the callbacks of a fit on rank 0, which holds the objects. The state has their pickles, for a successor."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import cloudpickle
import torch

import spark_elastic as se
from spark_elastic import _saved_names
from spark_elastic.errors import NotInWorldError, WorldChanged, final
from spark_elastic.estimator.callbacks import BatchContext, Callback, EpochContext, FitContext, Metrics
from spark_elastic.estimator.fit_state import FitState, history_of
from spark_elastic.estimator.plan import TrainingPlan

_log = logging.getLogger(__name__)
T = TypeVar("T")


class CallbackRunner:
    """The callbacks of a fit. Their decisions and errors at the ends of epochs reach all ranks.

    A callback has any of the methods of ``Callback``.
    """

    def __init__(self, plan: TrainingPlan, model: torch.nn.Module) -> None:
        self._plan, self._model = plan, model
        # The objects of this process, with the bytes that they were unpickled from or last pickled to.
        self._live: tuple[bytes, list[Callback]] = (b"", [])

    def begin(self, state: FitState) -> None:
        """Call ``on_fit_begin``: once in a fit, unless the world changes before the first commit."""
        if state.begun == self._plan.fit_id:
            return
        packed: bytes | Exception | None = None
        if se.rank() == 0:
            try:
                for callback in self._having(state, "on_fit_begin"):
                    callback.on_fit_begin(FitContext(**self._place(state)))
                packed = self._packed()
            except Exception as error:
                packed = _travelling(error)
        state.callbacks, state.begun = _agreed(packed), self._plan.fit_id

    def end_batch(self, state: FitState, sums: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Call ``on_batch_end`` after a step. sums: the sum of the losses first, the sum of the rows' weights last."""
        if se.rank() != 0 or not (callbacks := self._having(state, "on_batch_end")):
            return
        loss, weight = float(sums[0]), float(sums[-1])
        context = BatchContext(
            **self._place(state),
            global_step=state.global_step,
            loss=loss / weight if weight else math.nan,
            learning_rate=optimizer.param_groups[0]["lr"],
        )
        with _ending_the_fit():
            for callback in callbacks:
                callback.on_batch_end(context)

    def end_epoch(self, state: FitState, metrics: Metrics) -> tuple[Metrics, bytes, bool, bool]:
        """Call ``on_epoch_end``. Return on all ranks: metrics, pickled callbacks, whether to stop, whether to keep the model."""
        outcome: tuple[Metrics, bytes, bool, bool] | Exception | None = None
        if se.rank() == 0:
            try:
                plan = self._plan
                context = EpochContext(state.epoch, metrics, history_of(state), self._model, plan.run_id, plan.log_url)
                for callback in self._having(state, "on_epoch_end"):
                    callback.on_epoch_end(context)
                outcome = (context.metrics, self._packed(), context.stopped, context.kept)
            except Exception as error:
                outcome = _travelling(error)
        return _agreed(outcome)

    def end(self, state: FitState) -> None:
        """Call ``on_fit_end``, on rank 0, after the other ranks have finished."""
        try:
            with _ending_the_fit():
                for callback in self._having(state, "on_fit_end"):
                    callback.on_fit_end(FitContext(**self._place(state)))
        except Exception as error:
            self.fail(state, error)
            raise

    def fail(self, state: FitState, error: Exception) -> None:
        """Call ``on_exception``. Errors in it and in unpickling are logged, so that they do not hide ``error``."""
        try:
            callbacks = self._having(state, "on_exception") if se.rank() == 0 else []
        except NotInWorldError:  # training has failed before its first world, so no rank is 0
            return
        except Exception:
            _log.exception("the callbacks cannot be told of the exception that ends training")
            return
        for callback in callbacks:
            try:
                callback.on_exception(FitContext(**self._place(state)), error)
            except Exception:
                _log.exception("on_exception of %s has failed", type(callback).__name__)

    def _place(self, state: FitState) -> dict[str, Any]:
        return {
            "epoch": state.epoch,
            "step": state.step,
            "model": self._model,
            "run_id": self._plan.run_id,
            "log_url": self._plan.log_url,
        }

    def _having(self, state: FitState, method: str) -> list[Callback]:
        """Return the callbacks that have a method: the objects of this process, if they were the last ones to run."""
        if self._live[0] != state.callbacks:
            self._live = (state.callbacks, _saved_names.loads(state.callbacks))
        return [callback for callback in self._live[1] if _does(callback, method)]

    def _packed(self) -> bytes:
        packed: bytes = cloudpickle.dumps(self._live[1])
        self._live = (packed, self._live[1])
        return packed


@contextmanager
def _ending_the_fit() -> Iterator[None]:
    """Have an error of a callback that only rank 0 runs end the fit. By itself, it would be the loss of this worker."""
    try:
        yield
    except WorldChanged:
        raise
    except Exception as error:
        final(error)
        raise


def _does(callback: object, method: str) -> bool:
    """Whether a callback overrides a method, so that nothing is prepared for one that does nothing."""
    found = getattr(callback, method, None)
    return found is not None and getattr(found, "__func__", None) is not getattr(Callback, method)


def _agreed(outcome: T | Exception | None) -> T:
    """Return rank 0's outcome on all ranks, or raise it."""
    outcome = se.broadcast_object(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome is not None, "rank 0 has sent its outcome"
    return outcome


def _travelling(error: Exception) -> Exception:
    """Return the error, or if it cannot be pickled a RuntimeError with its text, to be sent to the other ranks."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), Exception):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
