"""Timeline: the page of a run where people work, in a notebook."""

from __future__ import annotations

import html as escaping
from pathlib import Path

from spark_elastic.timeline.follower import read_run
from spark_elastic.timeline.history import read_history
from spark_elastic.timeline.page import html
from spark_elastic.timeline.summary import summary_text


class Timeline:
    """The history of a run, from its event log: as the last value of a notebook's cell it is shown there as a page.

    The log is read each time that it is shown, also while the job runs, so the same cell shows later how far it is then. The page
    stays in the saved notebook; it needs neither a server nor the log any more. Where it is shown or saved, ``ValueError`` is
    raised if the log holds no such run, and ``OSError`` if it cannot be read.

    Args:
        log: the file that was given as ``event_log=``
        run: the id of a run, if the file holds several; None is the last one
        height: of what a notebook shows, in pixels; the rest is reached by scrolling
    """

    def __init__(self, log: str | Path, run: str | None = None, *, height: int = 720) -> None:
        """Keep the path; the log is read when the page is shown or saved, and need not exist yet.

        Raises ``TypeError`` for a log that is no path, and ``TypeError`` or ``ValueError`` for a height that is no number.
        """
        self._log = Path(log)
        self._run = run
        self._height = int(height)

    def save(self, path: str | Path) -> None:
        """Write the page as a file for the browser, which needs nothing else."""
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        entries, unread = read_run(self._log, self._run)
        return html(read_history(entries), unread)

    def _repr_html_(self) -> str:
        """Return the page in a frame that shares nothing with the notebook, neither style nor rights."""
        style = f"width: 100%; height: {self._height}px; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escaping.escape(self._page())}"></iframe>'

    def __repr__(self) -> str:
        """Return the figures of the run, for where no page can be shown; or what is wrong with the log."""
        try:
            entries, unread = read_run(self._log, self._run)
        except (OSError, ValueError) as error:
            return f"Timeline: {error}"
        return summary_text(read_history(entries), unread)
