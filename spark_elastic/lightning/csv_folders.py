"""The folders of CSV loggers that outlive a world: each world has one of its own, as a CSV logger deletes what it finds."""

from __future__ import annotations

import weakref

import lightning.pytorch as pl

# The CSV loggers that were given without version=, for which Lightning chooses the next free number at first use.
_NUMBERED: weakref.WeakSet[pl.loggers.CSVLogger] = weakref.WeakSet()


def note_loggers(logger: object) -> None:
    """Note the CSV loggers in what a Trainer gets as its logger. Raises ``ValueError`` for one with a version of the user's."""
    for each in logger if isinstance(logger, (list, tuple)) else [logger]:
        if isinstance(each, pl.loggers.CSVLogger) and each not in _NUMBERED:
            if each._version is not None:
                raise ValueError(
                    "CSVLogger(version=…) deletes its earlier file with each Trainer, and each world has its own: leave out "
                    "version=, and read version and log_dir only after state.trainer(…), or have run(loggers=) write what "
                    "state.report is given"
                )
            _NUMBERED.add(each)


def begin_folders() -> None:
    """Have CSV loggers choose a folder again. In the one that a rank has chosen, another one may have written its file."""
    for logger in tuple(_NUMBERED):
        logger.finalize("failed")  # which writes what was logged outside of a fit
        logger._experiment = logger._version = None
