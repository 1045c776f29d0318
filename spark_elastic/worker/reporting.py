"""Reporter: a worker's reports to the job's event log and progress line, in so few messages that no step is delayed."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from spark_elastic._text import as_utf8
from spark_elastic.data.balance import Timing
from spark_elastic.protocol import sampling
from spark_elastic.protocol.reports import Entered, GpuUsed, Metrics, Progress, Report, SharesChanged, Stepped

# Rank 0 reports the progress of the job at most this often.
PROGRESS_SECONDS = 0.5
# A worker reports its use of the GPU at most this often.
GPU_SECONDS = 5.0
# How many reports of metrics a rank may send at once, and per second in the long run. Further reports are merged, and the
# newest value of each name is kept.
BURST = 20
REPORTS_PER_SECOND = 4.0
# The kinds of numpy's dtypes whose numbers are times and spans of time, in units of their own.
_TIMES = "mM"


class Reporter:
    """Sends reports by ``send``, which does not block. Used only by the user's thread."""

    def __init__(
        self,
        send: Callable[[Report], None],
        clock: Callable[[], float] = time.monotonic,
        gpu: Callable[[], GpuUsed | None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._gpu = gpu
        self._began = clock()
        self._workers = 1
        self._gpu_at = 0.0
        self._send = send
        self._active_at: float | None = None
        self._has_stepped = True
        self._progress_at = 0.0
        # The step of the last commit, if rank 0 has not sent it.
        self._unsent: int | None = None
        self._allowed = float(BURST)
        self._counted_at = 0.0
        # The newest value of each name that waits, with the step at which it was given.
        self._waiting: dict[str, tuple[int, object]] = {}

    def entered(self, step: int, progress: Callable[[int], Progress] | None, workers: int = 1) -> None:
        """Note that this rank is about to enter the user's function in a new generation of so many workers.

        ``progress(step)`` returns the position in the data. Here and below, only rank 0, which reports for all, is given one.
        """
        now = self._clock()
        self._send(Entered(step, None if self._active_at is None else round(now - self._active_at, 4)))
        if progress is not None:
            self._progress_at = now + PROGRESS_SECONDS
            self._send(progress(step))
        self._active_at, self._has_stepped, self._workers = now, False, workers

    def committed(self, step: int, progress: Callable[[int], Progress] | None) -> None:
        """Note a commit that user code has made."""
        now = self._active_at = self._clock()
        if not self._has_stepped:
            self._has_stepped = True
            self._send(Stepped(step))
        if progress is not None:
            self._unsent = step
            if now >= self._progress_at:
                self._progress_at, self._unsent = now + PROGRESS_SECONDS, None
                self._send(progress(step))
        if self._waiting:
            self.metrics(step, {})
        if now >= self._gpu_at:
            self._gpu_at = now + max(GPU_SECONDS, sampling.pause(self._workers, now - self._began))
            used = self._gpu()
            if used is not None:
                self._send(used)

    def balanced(self, step: int, change: Timing) -> None:
        """Report a change of shares. It is the same on all ranks, so only one rank calls this."""
        seconds = [microseconds / 1e6 for microseconds in change.microseconds]
        self._send(SharesChanged(step, list(change.before), list(change.after), seconds, change.unit))

    def finished(self, step: int, progress: Callable[[int], Progress] | None) -> None:
        """Send the last reports, because this rank has left the user's function."""
        if progress is not None:
            self._send(progress(step))
        self.flush()

    def worked(self) -> None:
        """Note that this rank has worked until now, although nothing has told of it: a script makes no commits."""
        self._active_at = self._clock()

    def left_early(self) -> None:
        """Report this rank's progress, because an error has ended the user's function, and maybe the job."""
        if self._unsent is not None:
            self._send(Progress(self._unsent))  # without the loader's position, which may be past the last commit
            self._unsent = None
        with suppress(Exception):  # the user's error matters more, and a failed GPU cannot be read
            self.flush()

    def metrics(self, step: int, values: Mapping[str, object]) -> None:
        """Send metrics, at once or with the next ones. Raises ``TypeError`` for values that ``State.report`` does not take."""
        now = self._clock()
        self._allowed = min(BURST, self._allowed + (now - self._counted_at) * REPORTS_PER_SECOND)
        self._counted_at = now
        self._waiting.update({as_utf8(name): (step, _kept(name, value)) for name, value in values.items()})
        if self._allowed >= 1:
            self._allowed -= 1
            if self._waiting:
                self.flush()
            else:
                self._send(Metrics({"step": step}))

    def flush(self) -> None:
        """Send the metrics that wait."""
        waiting, self._waiting = self._waiting, {}
        for step in sorted({given_at for given_at, _ in waiting.values()}):
            # A tensor becomes a number only here, because a GPU has to finish computing it first.
            values = {name: _plain(value) for name, (given_at, value) in waiting.items() if given_at == step}
            self._send(Metrics({"step": step, **values}))


def check_metrics(values: Mapping[str, object]) -> None:
    """Outside a job, raise ``TypeError`` for values that a job would refuse."""
    for name, value in values.items():
        _kept(name, value)


def _kept(name: str, value: Any) -> object:
    """Check a metric and copy it. The copy keeps no graph alive, and later changes in place do not affect it."""
    if hasattr(value, "detach") and value.numel() == 1 and _holds_number(value):
        return value.detach().clone()
    is_array = hasattr(value, "item") and not hasattr(value, "detach") and getattr(value, "size", None) == 1
    is_time = is_array and getattr(getattr(value, "dtype", None), "kind", "") in _TIMES
    number = value.item() if is_array and not is_time else value
    if isinstance(number, (str, int, float)) or (is_array and not is_time and isinstance(number, numbers.Real)):
        try:
            return _plain(number)
        except OverflowError:
            raise TypeError(f"report({name}=…) takes no whole number that is too large for a float") from None
    facts = [str(getattr(value, fact)) for fact in ("dtype", "layout", "device") if hasattr(value, fact)]
    if not getattr(value, "is_nested", False) and getattr(value, "shape", None):
        facts.append(f"shape {list(value.shape)}")
    what = f"{type(value).__name__}{'' if not facts else ' of '}{', '.join(facts)}"
    raise TypeError(f"report({name}=…) takes numbers, one-element tensors and strings, not {what}")


def _holds_number(tensor: Any) -> bool:
    """Whether a tensor of one element will give a number, which is read only later, when it has been computed."""
    is_plain = str(tensor.layout) in ("torch.strided", "torch.sparse_coo")
    return is_plain and not (tensor.is_complex() or tensor.is_meta or tensor.is_nested)


def _plain(value: Any) -> float | int | str:
    if isinstance(value, str):
        return as_utf8(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else float(value)
    return float(value) if isinstance(value, numbers.Real) else _plain(value.item())
