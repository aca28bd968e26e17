"""All that a live panel shows, kept up to date; pure data, no widget."""

from __future__ import annotations

import threading
from typing import TypedDict

from nblaunch.protocol.state import RunState
from nblaunch.view.panel_output import Feed, News
from nblaunch.view.panel_ranks import RankNews, Report, Reporter, Row, Rows, Value
from nblaunch.view.summary import Header


class Delta(TypedDict):
    """One tick; None where nothing has changed. `stop` says whether the page can stop the run."""

    sequence: int
    stop: bool
    ranks: RankNews | None
    report: Report | None
    output: News | None


class Whole(TypedDict):
    """Everything, for a page that begins anew; `age` is the run's, in seconds."""

    sequence: int
    stop: bool
    age: float
    header: dict[str, str]
    rows: dict[str, Row]
    values: dict[str, Value]
    report: Report | None
    output: News


class Drawing:
    """Folds the states of a run into deltas, and can tell the whole at any time, from any thread."""

    def __init__(self, header: Header, opened: float) -> None:
        """Begin a run that was opened at `opened`, on the clock that `now` is of later."""
        self._opened = opened
        self._now = opened
        self._rows = Rows(header)
        self._feed = Feed()
        self._reporter = Reporter()
        self._report: Report | None = None
        self._sequence = 0
        self._stop = False
        # A page that is loaded again asks for the whole while the run's own thread draws.
        self._lock = threading.Lock()

    def changes(self, state: RunState, now: float, *, stop: bool = False) -> Delta | None:
        """Return what has changed since this was asked last, or None."""
        with self._lock:
            self._now = now
            ranks = self._rows.news(state, now)
            report = self._reporter.news(state)
            output = self._feed.news(state, now)
            if ranks is None and report is None and output is None and stop == self._stop:
                return None
            self._sequence += 1
            self._stop = stop
            self._report = self._report if report is None else report
            return Delta(sequence=self._sequence, stop=stop, ranks=ranks, report=report, output=output)

    def whole(self, now: float | None = None) -> Whole:
        """Return everything."""
        with self._lock:
            return Whole(
                sequence=self._sequence,
                stop=self._stop,
                age=(self._now if now is None else now) - self._opened,
                header=self._rows.header,
                rows=self._rows.rows,
                values=self._rows.values,
                report=self._report,
                output=self._feed.whole(),
            )
