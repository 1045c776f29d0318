"""spark-elastic timeline: draws the history of a run, as a file or, with --serve, as a page that follows a running job."""

from __future__ import annotations

import argparse
import json
import os
import webbrowser
from pathlib import Path

from spark_elastic._plain import plain
from spark_elastic.timeline.follower import Unread, read_run
from spark_elastic.timeline.history import History, read_history
from spark_elastic.timeline.summary import summarize


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("timeline", help="draw an event log as a page or a picture", description=__doc__)
    add_log(parser)
    parser.add_argument("-o", "--output", type=os.path.expanduser, help=".html (default: timeline.html), or .png")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="show the page at an address of this machine and follow the log, which need not exist yet, until Ctrl-C",
    )
    parser.add_argument("--port", type=int, metavar="INT", help="the port of --serve; default a free one")
    parser.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        help="whether --serve opens the page in this machine's browser; default it only prints the address",
    )
    parser.set_defaults(call=draw)


def add_log(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all commands that read an event log."""
    parser.add_argument("log", type=os.path.expanduser, help="the file that was given as event_log=")
    parser.add_argument("--run", help="the id of a run, if the file holds several; default the last one")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def history_of(options: argparse.Namespace) -> tuple[History, Unread]:
    """Return the run that the arguments of ``add_log`` select, and which lines of the log could not be read."""
    entries, unread = read_run(options.log, options.run)
    return read_history(entries), unread


def draw(options: argparse.Namespace) -> int:
    """Write the page or picture, or serve the page."""
    if options.serve:
        return serve(options)
    if options.port is not None or options.open is not None:
        raise ValueError("--port and --open are for --serve")
    output = Path(options.output or "timeline.html")
    if output.suffix not in (".html", ".htm", ".png"):
        raise ValueError(f"--output must end in .html or .png, not {str(output)!r}")
    history, unread = history_of(options)
    if output.suffix == ".png":
        from spark_elastic.timeline.picture import save

        save(history, output)
    else:
        from spark_elastic.timeline.page import html

        output.write_text(html(history, unread), encoding="utf-8")
    if options.json:
        print(json.dumps({"output": str(output), **summarize(history)}))
        return 0
    print(f"{output} written")
    if unread.count:
        print(plain(str(unread)))
    return 0


def serve(options: argparse.Namespace) -> int:
    """Serve the page until the command is told to end."""
    from spark_elastic.timeline.server import LiveRun, PageServer

    if options.output is not None:
        raise ValueError("--serve writes no file, leave out --output: the page has a link by which it is saved")
    log = Path(options.log)
    if log.exists() and not log.is_file():
        raise ValueError(f"{log} is not a regular file: --serve follows one, or waits until there is one")

    def tell(address: str) -> None:
        line = json.dumps({"address": address}) if options.json else f"{address}\nCtrl-C ends this command."
        print(line, flush=True)
        if options.open:
            webbrowser.open(address)

    with PageServer(LiveRun(log, options.run), options.port or 0) as server:
        server.serve(tell)
    return 0
