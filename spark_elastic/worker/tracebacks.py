"""Tracebacks of user code, without the frames of this package and of torch that only led there."""

from __future__ import annotations

import os
import traceback

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# The functions by which torch calls the ``forward`` of each module. They are the same in every traceback.
_OF_TORCH = (("torch/nn/modules/module.py", "call_impl"), ("torch/nn/parallel/distributed.py", "forward"))

# Advice for torch errors that give none, by a part of their messages.
_ADVICE = {
    "Default process group has not been initialized": (
        "There is no process group above the elastic function, because no world has been formed yet: wrap models in "
        "spark_elastic.DistributedDataParallel instead of torch's, and call torch.distributed inside the elastic function."
    )
}


def format_for_user(error: BaseException) -> str:
    """Format an exception and its causes. The innermost frames are kept, because the error arose there.

    What some torch errors leave unsaid follows in a last line.
    """
    report = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = report
    while part is not None:
        part.stack = _without_callers(part.stack)
        part = part.__cause__ or part.__context__
    told = "".join(report.format())
    return told + "".join(f"{advice}\n" for words, advice in _ADVICE.items() if words in told)


def text_of(error: BaseException) -> str:
    """Return the text of an exception; the name of its class if it has none, or none that can be read."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return text or type(error).__name__


def find_line(error: BaseException) -> str:
    """Return the file name and line where an exception was raised; an empty string if it was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _without_callers(stack: traceback.StackSummary) -> traceback.StackSummary:
    users = [number for number, frame in enumerate(stack) if not _only_calls(frame)]
    last = max(users, default=-1)
    return traceback.StackSummary.from_list(
        [frame for number, frame in enumerate(stack) if number > last or number in users]
    )


def _only_calls(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(PACKAGE) or any(
        frame.filename.endswith(file) and frame.name.endswith(function) for file, function in _OF_TORCH
    )
