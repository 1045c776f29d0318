"""spark-elastic summary: prints how much of the time a run trained, how fast, who was slow, and what each reset cost."""

from __future__ import annotations

import argparse
import json

from spark_elastic.cli.timeline import add_log, history_of
from spark_elastic.timeline.summary import summarize, summary_text


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "summary", help="print availability, speed, and what each reset cost", description=__doc__
    )
    add_log(parser)
    parser.set_defaults(call=show)


def show(options: argparse.Namespace) -> int:
    """Print the figures of a run."""
    history, unread = history_of(options)
    print(json.dumps(summarize(history)) if options.json else summary_text(history, unread))
    return 0
