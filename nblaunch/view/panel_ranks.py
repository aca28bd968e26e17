"""What a live panel shows, as plain data: stragglers, why the run failed, a row for each rank, the output."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import NotRequired, TypedDict

from nblaunch._results import nodes_line, time_is_short
from nblaunch.diagnose.failures import blame
from nblaunch.insight.curves import Curves
from nblaunch.insight.markup import ICONS
from nblaunch.protocol.messages import FailureRecord
from nblaunch.protocol.reports import HangReport, by_host, plural, ranks_on
from nblaunch.protocol.state import AttemptState, RankState, RunState, State, hosts_of
from nblaunch.view import summary
from nblaunch.view.budget import clipped, cost_of_text, shortened
from nblaunch.view.output import last_line
from nblaunch.view.panel_curves import CurveFeed, CurveNews
from nblaunch.view.panel_output import Feed, News, PanelPiece, piece_of
from nblaunch.view.screen import colored, plain

SILENT_SECONDS = 10.0
FINISHED_SECONDS = 2.0
SILENT = "silent while the others print"
BEHIND_SECONDS = 2.0
BEHIND = "behind the others"
UNFINISHED = "most others have finished"


# Which ranks stay behind the others: by their output, their collectives, and how many have finished.


class Stragglers:
    """Looks at each state of a run, and remembers since when each rank is silent or in one collective."""

    def __init__(self) -> None:
        self._attempt = -1
        self._written: dict[int, tuple[int, float]] = {}
        self._begun: dict[int, tuple[int | None, float]] = {}
        self._most_finished: float | None = None

    def marks(self, state: RunState, now: float) -> dict[int, str]:
        """Return why ranks count as stragglers; `now` is in seconds."""
        if state.attempt.number != self._attempt:
            self._attempt, self._written, self._begun = state.attempt.number, {}, {}
            self._most_finished = None
        for rank, known in state.ranks.items():
            written, begun = known.transcript.written, known.collectives
            if rank not in self._written or self._written[rank][0] != written:
                self._written[rank] = written, now
            if rank not in self._begun or self._begun[rank][0] != begun:
                self._begun[rank] = begun, now
        return {**self._silent(state, now), **self._behind(state, now), **self._unfinished(state, now)}

    def _behind(self, state: RunState, now: float) -> dict[int, str]:
        """Find ranks that others wait for: these have begun a collective that those have not."""
        begun = {rank: count for rank in _running(state) if (count := self._begun[rank][0]) is not None}
        most = max(begun.values(), default=0)
        return {
            rank: f"{plural(most - count, 'collective')} {BEHIND}"
            for rank, count in begun.items()
            if count < most and now - self._begun[rank][1] >= BEHIND_SECONDS
        }

    def _unfinished(self, state: RunState, now: float) -> dict[int, str]:
        finished = sum(known.state is State.SUCCEEDED for known in state.ranks.values())
        if finished * 2 <= len(state.ranks):
            self._most_finished = None
            return {}
        if self._most_finished is None:
            self._most_finished = now
        if now - self._most_finished < FINISHED_SECONDS:
            return {}
        return dict.fromkeys(_running(state), UNFINISHED)

    def _silent(self, state: RunState, now: float) -> dict[int, str]:
        """Find running ranks that have been silent for long, while more than half of the running are not.

        Where only one rank prints, as in many programs, no rank is behind.
        """
        running = {rank: self._written[rank] for rank in _running(state)}
        fresh = [count for count, since in running.values() if count and now - since < SILENT_SECONDS / 2]
        pair = len(running) == 2  # noqa: PLR2004 - neither of two is more than half
        if len(fresh) * 2 <= len(running) and not (pair and fresh):
            return {}
        # Of a pair, a rank that has never printed may be one that does not print.
        return {
            rank: SILENT
            for rank, (count, since) in running.items()
            if now - since >= SILENT_SECONDS and (count or not pair)
        }


def _running(state: RunState) -> list[int]:
    return [rank for rank, known in state.ranks.items() if known.state is State.RUNNING]


# What the panel shows beside the ranks: why the run failed, what attempts came before, where ranks hang.


_LINES = 200
_LINE_COST = 400


class CauseNote(TypedDict):
    """Why ranks failed; the traceback as lines."""

    ranks: str
    why: str
    traceback: list[PanelPiece]


class PastAttempt(TypedDict):
    """An attempt before this one."""

    number: int
    title: str
    lines: list[str]


class PanelReport(TypedDict):
    """All that the panel shows beside the ranks; parts may be empty."""

    causes: list[CauseNote]
    consequences: list[str]
    consequence_count: int
    attempts: list[PastAttempt]
    attempts_left_out: str
    hang: str
    warnings: list[str]


class Reporter:
    """Makes the report of a run, again when something in it has changed."""

    def __init__(self) -> None:
        self.report: PanelReport | None = None
        self._seen: tuple[object, ...] = ((), None, (), "")

    def news(self, state: RunState) -> PanelReport | None:
        """Return the whole report if anything in it has changed."""
        troubled = tuple(
            (rank, known.failure, known.warning + known.value_not_sent)
            for rank, known in state.ranks.items()
            if known.failure is not None or known.warning or known.value_not_sent
        )
        seen = (state.earlier, state.hang, troubled, state.preempted)
        if seen == self._seen:
            return None
        self._seen, self.report = seen, _report(state)
        return self.report


def _report(state: RunState) -> PanelReport:
    found = blame(state.ranks)
    limit = summary.reason_limit(found)
    shown, left_out = summary.earlier_attempts(state)
    return PanelReport(
        causes=[
            CauseNote(
                ranks=each.who,
                why=summary.why(each, limit),
                traceback=_traceback(each.failure) if number < summary.TRACEBACKS else [],
            )
            for number, each in enumerate(found.causes)
        ],
        consequences=summary.consequence_lines(found, limit),
        consequence_count=sum(len(each.ranks) for each in found.consequences),
        attempts=[_attempt(each) for each in shown],
        attempts_left_out=left_out,
        hang=_hang(state.hang),
        warnings=summary.warning_lines(state),
    )


def _traceback(failure: FailureRecord) -> list[PanelPiece]:
    text = (failure.colored or failure.traceback).rstrip("\n")
    held = summary.held_text(failure)
    text = f"{shortened(text, summary.TRACEBACK_COST)}\n\n{held}" if held else text
    return [piece_of(line) for line in colored(shortened(text, 2 * summary.TRACEBACK_COST))]


def _attempt(attempt: AttemptState) -> PastAttempt:
    found = blame(attempt.ranks)
    each, hosts = sorted(summary.why_each(found).items()), hosts_of(attempt.ranks)
    lines = [f"{ranks_on([rank], hosts)}: {clipped(text, _LINE_COST)}" for rank, text in each]
    for rank, known in sorted(attempt.ranks.items()):
        last = last_line(known.transcript)
        lines += [f"rank {rank}, last output: {clipped(last, _LINE_COST)}"] if last else []
    seconds = f" after {attempt.ended - attempt.started:.1f} s" if attempt.ended is not None else ""
    title = f"{summary.attempt_line(attempt, found)}{seconds}"
    return PastAttempt(number=attempt.number, title=title, lines=_at_most(lines, "lines"))


def _hang(hang: HangReport | None) -> str:
    if hang is None:
        return ""
    lines = [*hang.findings]
    for place in summary.places(hang):
        lines += [place.line, *(f"    {line}" for line in place.stack.split("\n") if line)]
    return plain("\n".join(_at_most(lines, "lines, see result.hang_report")))


def _at_most(lines: list[str], what: str) -> list[str]:
    left_out = len(lines) - _LINES
    return [*lines[:_LINES], f"… {left_out} more {what} …"] if left_out > 0 else lines


# What the panel shows of each rank: only what has changed is computed and sent.


_FAILURE_COST = 600
_VALUE_COST = 4_000
_RICH_VALUE_COST = 40_000
_VALUES_COST = 400_000
_READ_CHARACTERS = 20_000
_CARDS = 8
"""So many ranks have a card each in the panel."""


class Row(TypedDict):
    """One rank; what is not known is left out. `value` is the number of a value.

    `host` is where it runs, if ranks are on several hosts. `memory` and `gpu_memory` are what it uses now,
    `memory_peak` what it has used at most, `gpu_peak` what torch had allocated at most, in bytes.
    """

    rank: int
    state: str
    icon: str
    phase: NotRequired[str]
    host: NotRequired[str]
    device: NotRequired[str]
    pid: NotRequired[int]
    cpu: NotRequired[float]
    memory: NotRequired[int]
    memory_peak: NotRequired[int]
    gpu_memory: NotRequired[int]
    gpu: NotRequired[int]
    gpu_peak: NotRequired[int]
    value: NotRequired[int]
    failure: NotRequired[str]
    mark: NotRequired[str]


class Value(TypedDict):
    """A value that ranks have returned, as their own shell shows it."""

    text: str
    html: str


class RankNews(TypedDict):
    """The header, the rows that changed, the ranks that are gone and the values that are new."""

    header: dict[str, str]
    rows: dict[str, Row]
    removed: list[str]
    values: dict[str, Value]


class Rows:
    """Remembers the rows that were sent, and finds those that changed."""

    def __init__(self, header: summary.Header) -> None:
        self.rows: dict[str, Row] = {}
        self.values: dict[str, Value] = {}
        self.header: dict[str, str] = {}
        self._about = header
        self._states: Mapping[int, RankState] = {}
        self._explained: tuple[object, ...] = ()
        self._why: dict[int, str] = {}
        self._marks: dict[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._stragglers = Stragglers()
        self._numbers: dict[tuple[str, str], int] = {}
        self._room = _VALUES_COST
        self._by_host = ""

    def news(self, state: RunState, now: float) -> RankNews | None:
        """Return what differs from the state seen last, or None; `now` is in seconds."""
        why, marks, hosts = self._failures(state), self._stragglers.marks(state, now), hosts_of(state.ranks)
        waits = summary.waits(state).items()
        marks |= summary.finishing(state)
        marks |= {rank: what if state.doing else f"{what}; {summary.AGAIN}" for rank, what in waits}
        rows: dict[str, Row] = {}
        values: dict[str, Value] = {}
        for rank, known in sorted(state.ranks.items()):
            # The fold keeps the objects of ranks that have not changed.
            same = self._why.get(rank) == why.get(rank) and self._marks.get(rank) == marks.get(rank)
            if self._states.get(rank) is known and same and self._hosts.get(rank) == hosts.get(rank):
                continue
            row = self._row(known, why.get(rank, ""), marks.get(rank, ""), values)
            if rank in hosts:
                row["host"] = plain(hosts[rank])
            # More output alone is not sent here: the feed sends it.
            if self.rows.get(str(rank)) != row:
                rows[str(rank)] = row
        removed = [rank for rank in self.rows if int(rank) not in state.ranks]
        if rows or removed:
            self._by_host = "\n".join(_host_lines(state, hosts))
        header = {**_header(state, self._about), "hosts": self._by_host}
        self._states, self._why, self._marks, self._hosts = state.ranks, why, marks, hosts
        if not rows and not removed and header == self.header:
            return None
        kept = {rank: row for rank, row in self.rows.items() if rank not in removed}
        self.header, self.rows, self.values = header, {**kept, **rows}, {**self.values, **values}
        return RankNews(header=header, rows=rows, removed=removed, values=values)

    def _failures(self, state: RunState) -> dict[int, str]:
        """Return each failed rank's failure in one line, computed again only when one is new."""
        failed = tuple((rank, known.failure) for rank, known in state.ranks.items() if known.failure)
        if failed == self._explained:
            return self._why
        self._explained = failed
        found = blame(state.ranks)
        limit = min(_FAILURE_COST, summary.reason_limit(found))
        return {rank: clipped(text, limit) for rank, text in summary.why_each(found).items()}

    def _row(self, known: RankState, why: str, mark: str, values: dict[str, Value]) -> Row:
        row = Row(rank=known.rank, state=str(known.state), icon=ICONS[known.state])
        if not known.state.final:
            row["phase"] = str(known.phase)
        if known.device:
            row["device"] = plain(known.device)
        if known.pid is not None:
            row["pid"] = known.pid
        _add_usage(row, known)
        if known.value_text or known.value_html:
            row["value"] = self._value(known, values)
        if why:
            row["failure"] = why
        if mark:
            row["mark"] = mark
        return row

    def _value(self, known: RankState, values: dict[str, Value]) -> int:
        """Return the number of a rank's value; equal values have one number, and are sent once."""
        key = (known.value_text, known.value_html)
        if key not in self._numbers:
            number = self._numbers[key] = len(self._numbers)
            html_cost = cost_of_text(known.value_html)
            html = known.value_html if html_cost <= min(_RICH_VALUE_COST, self._room) else ""
            self._room -= html_cost if html else 0
            text = plain(known.value_text[:_READ_CHARACTERS]).strip("\n")
            text = shortened(text, min(_VALUE_COST, max(self._room, 200)))
            self._room -= len(text)
            values[str(number)] = Value(text=text, html=html)
        return self._numbers[key]


def _add_usage(row: Row, known: RankState) -> None:
    if known.peak_gpu_memory:
        row["gpu_peak"] = known.peak_gpu_memory
    used, usage = known.used, known.usage
    if used is not None and used.host_peak is not None:
        row["memory_peak"] = used.host_peak
    if usage is None or known.state.final:
        return
    row["cpu"], row["memory"] = round(usage.cpu_percent), usage.memory
    if usage.gpu_memory is not None:
        row["gpu_memory"] = usage.gpu_memory
    if usage.gpu_percent is not None:
        row["gpu"] = usage.gpu_percent


def _host_lines(state: RunState, hosts: Mapping[int, str]) -> list[str]:
    """Return how the ranks of several hosts are, where a cell of the map is all that is shown of each."""
    if not hosts or len(state.ranks) <= _CARDS:
        return []
    return [
        plain(line)
        for line in by_host({rank: str(known.state) for rank, known in state.ranks.items()}, hosts)
    ]


def _header(state: RunState, header: summary.Header) -> dict[str, str]:
    """Return the panel's header; unlike what is saved, it names the machines and the log directory."""
    restarts, engine, now = len(state.earlier), state.engine, time.time()
    awaits = state.awaits_nodes
    return {
        "state": "WAITING" if awaits else str(state.summary),
        "icon": ICONS[State.STARTING if awaits else state.summary],
        # Ranks that may be others, and more, are not shown.
        "waits": "The ranks are shown here once their nodes have come." if awaits else "",
        "what": summary.headline(state, header.title, header.backend),
        # Where an engine places the nodes, the notebook's machine need not be one of them.
        "node": "" if engine is not None else plain(header.node),
        "nodes": "" if engine is None else plain(nodes_line(engine, now)),
        "soon": "soon" if engine is not None and time_is_short(engine, now) else "",
        "magic": plain(header.magic),
        "restarts": plural(restarts, "restart") if restarts else "",
        "logs": f"logs: {plain(header.log_dir)}" if header.log_dir else "",
        "note": plain(header.note),
        "stop": "Stop watching" if header.watched else "Stop",
    }


# All that a live panel shows.

_POLL_SECONDS = 0.5
"""Between two looks at a state that has not changed: there is what time alone changes."""


class Delta(TypedDict):
    """One tick; None where nothing has changed."""

    sequence: int
    ranks: RankNews | None
    report: PanelReport | None
    output: News | None
    curves: CurveNews | None


class Snapshot(TypedDict):
    """Everything, for a page that starts now; `age` is the run's, in seconds."""

    sequence: int
    age: float
    header: dict[str, str]
    rows: dict[str, Row]
    values: dict[str, Value]
    report: PanelReport | None
    output: News
    curves: CurveNews | None


class Drawing:
    """Turns the states of a run into deltas; any thread may ask for everything at any time."""

    def __init__(self, header: summary.Header, opened: float) -> None:
        """Draw a run that was opened at `opened`, on the same clock as `now` below."""
        self._opened = opened
        self._rows = Rows(header)
        self._feed = Feed()
        self._reporter = Reporter()
        self._curves = CurveFeed()
        self._sequence = 0
        self._seen: RunState | None = None
        self._due = 0.0
        # A page that is loaded again asks for everything while the run's own thread draws.
        self._lock = threading.Lock()

    def changes(self, state: RunState, now: float) -> Delta | None:
        """Return what has changed since the last call, or None."""
        with self._lock:
            if state is self._seen and now < self._due and not self._feed.busy:
                return None
            self._seen, self._due = state, now + _POLL_SECONDS
            ranks = self._rows.news(state, now)
            report = self._reporter.news(state)
            output = self._feed.news(state, now)
            curves = self._curves.news(state.metrics, now)
            if ranks is None and report is None and output is None and curves is None:
                return None
            self._sequence += 1
            return Delta(sequence=self._sequence, ranks=ranks, report=report, output=output, curves=curves)

    def whole(self, now: float) -> Snapshot:
        """Return everything."""
        with self._lock:
            return Snapshot(
                sequence=self._sequence,
                age=now - self._opened,
                header=self._rows.header,
                rows=self._rows.rows,
                values=self._rows.values,
                report=self._reporter.report,
                output=self._feed.whole(),
                curves=self._curves.whole(),
            )

    def curves(self, state: RunState) -> Curves:
        """Return what ranks have logged up to this state."""
        with self._lock:
            self._curves.curves.update(state.metrics)
            return self._curves.curves

    def draw_each_rank(self, *, wanted: bool) -> None:
        """Send a line for each rank, or only for those that are apart; for any thread."""
        self._curves.by_rank = wanted
