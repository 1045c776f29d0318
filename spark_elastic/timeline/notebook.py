"""Timeline: the page of a run in a notebook."""

from __future__ import annotations

import html as escaping
import os
from pathlib import Path

from spark_elastic.timeline.follower import read_run
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.page import html
from spark_elastic.timeline.summary import summary_text


class Timeline:
    """The history of a run, from its event log. As the last value of a notebook cell, it is shown there as a page.

    The log is read whenever the page is shown, also while the job runs: run the cell again to see how far the job is. The page
    stays in the saved notebook, and then needs neither a server nor the log. Showing or saving it raises ``ValueError`` if the
    log holds no such run, and ``OSError`` if the log cannot be read.

    Args:
        log: the file that was given as ``event_log=``
        run: the id of a run, if the file holds several; None is the last one
        height: the visible height in a notebook, in pixels; the rest is reached by scrolling
    """

    def __init__(self, log: str | Path, run: str | None = None, *, height: int = 720) -> None:
        """Keep the path; the log is read when the page is shown or saved, and need not exist yet.

        Raises ``TypeError`` if the log is not a path, and ``TypeError`` or ``ValueError`` if the height is not a number.
        """
        self._log = Path(os.path.expanduser(log))
        self._run = run
        self._height = int(height)

    def save(self, path: str | Path) -> None:
        """Write the page as a self-contained file for the browser."""
        Path(os.path.expanduser(path)).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        entries, unread = read_run(self._log, self._run)
        return html(read_history(entries), unread)

    def _repr_html_(self) -> str:
        """Return the page in a frame that shares neither style nor rights with the notebook."""
        style = f"width: 100%; height: {self._height}px; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escaping.escape(self._page())}"></iframe>'

    def __repr__(self) -> str:
        """Return the figures of the run, for places that cannot show a page, or what is wrong with the log."""
        try:
            entries, unread = read_run(self._log, self._run)
        except (OSError, ValueError) as error:
            return f"Timeline: {error}"
        return summary_text(read_history(entries), unread)
