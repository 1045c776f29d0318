"""spark-elastic: runs scripts, shows what happened, finds faults, empties machines."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
from collections.abc import Sequence

from spark_elastic import __version__
from spark_elastic._plain import printable
from spark_elastic._text import as_utf8, without_secrets
from spark_elastic.cli import diff, doctor, inspect, leave, run, summary, timeline
from spark_elastic.errors import SparkElasticError

COMMANDS = (run, timeline, summary, inspect, diff, doctor, leave)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return its exit status: 0 for success, 1 if it found faults, 2 if it could not run."""
    parser = argparse.ArgumentParser(prog="spark-elastic", description=__doc__)
    parser.add_argument("--version", action="version", version=f"spark-elastic {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in COMMANDS:
        module.add_to(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Arguments after "--" are the script's, and argparse must not interpret them.
    split = given.index("--") if "--" in given else len(given)
    options, unknown = parser.parse_known_args(given[:split])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{getattr(options, 'advice', '')}")
    options.arguments = given[split + 1 :]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error, where it cannot show what names contain
    try:
        status = int(options.call(options))
        if sys.stdout is not None:  # as with >&-
            sys.stdout.flush()
        return status
    except (SparkElasticError, ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            # Python writes the rest of the buffer at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"spark-elastic: {_said(error, given)}", file=sys.stderr)
        return 2
    except Exception as error:
        kind = type(error)
        if kind.__module__ == "builtins":  # a bug in this package
            raise
        # Object store libraries and Spark raise exceptions of their own.
        print(f"spark-elastic: {kind.__module__}.{kind.__qualname__}: {_said(error, given)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("spark-elastic: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _said(error: Exception, given: Sequence[str]) -> str:
    """Return an error's text without control codes, and without the secrets of URLs among the arguments."""
    said = str(error)
    for argument in given:
        said = without_secrets(said, argument)
    return printable(as_utf8(said))


def _nobody_reads() -> bool:
    """Whether the reader of the output, such as ``head``, has seen enough and ended."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
