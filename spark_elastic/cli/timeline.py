"""spark-elastic timeline: draws the history of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from spark_elastic.timeline.event_log import choose_run, read_events
from spark_elastic.timeline.history import History, read_history
from spark_elastic.timeline.summary import summarize


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("timeline", help="draw an event log as a page or a picture", description=__doc__)
    add_log(parser)
    parser.add_argument("-o", "--output", default="timeline.html", help=".html (default: timeline.html), or .png")
    parser.set_defaults(call=draw)


def add_log(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all commands that read an event log."""
    parser.add_argument("log", help="the file that was given as event_log=")
    parser.add_argument("--run", help="the id of a run, if the file holds several; default the last one")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def history_of(options: argparse.Namespace) -> History:
    """Read the run that the arguments of ``add_log`` select."""
    return read_history(choose_run(read_events(options.log), options.run))


def draw(options: argparse.Namespace) -> int:
    """Write the page or picture."""
    output = Path(options.output)
    history = history_of(options)
    if output.suffix in (".html", ".htm"):
        from spark_elastic.timeline.page import html

        output.write_text(html(history), encoding="utf-8")
    elif output.suffix == ".png":
        from spark_elastic.timeline.picture import save

        save(history, output)
    else:
        raise ValueError(f"--output must end in .html or .png, not {str(output)!r}")
    print(json.dumps({"output": str(output), **summarize(history)}) if options.json else f"{output} written")
    return 0
