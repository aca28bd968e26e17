"""What a live panel shows: stragglers, why the run failed, a row for each rank, the output. Pure data."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NotRequired, TypedDict

from nblaunch.diagnose.failures import blame
from nblaunch.protocol.messages import FailureRecord
from nblaunch.protocol.reports import HangReport, format_ranks
from nblaunch.protocol.state import AttemptState, RankState, RunState, State
from nblaunch.view.markup import ICONS, clipped, cost_of_text, shortened
from nblaunch.view.output import last_line
from nblaunch.view.panel_output import Feed, News, Piece, piece_of
from nblaunch.view.screen import colored, plain
from nblaunch.view.summary import (
    AGAIN,
    TRACEBACK_COST,
    TRACEBACKS,
    Header,
    attempt_line,
    consequence_lines,
    earlier_attempts,
    headline,
    places,
    reason_limit,
    waits,
    warning_lines,
    why,
    why_each,
)

SILENT_SECONDS = 10.0
FINISHED_SECONDS = 2.0
SILENT = "silent while the others print"
BEHIND_SECONDS = 2.0
BEHIND = "behind the others"
UNFINISHED = "most others have finished"


# Which ranks stay behind the others: by what they print, what they have begun, and who has finished.


class Stragglers:
    """Looks at a run again and again, and remembers since when each rank is silent."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._attempt = -1
        self._written: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._begun: dict[int, int | None] = {}
        self._moved: dict[int, float] = {}
        self._most_finished: float | None = None

    def marks(self, state: RunState, now: float) -> dict[int, str]:
        """Return why ranks are taken for stragglers; `now` is in seconds."""
        if state.attempt.number != self._attempt:
            self._attempt, self._written, self._heard = state.attempt.number, {}, {}
            self._begun, self._moved = {}, {}
            self._most_finished = None
        for rank, known in state.ranks.items():
            written = known.transcript.written
            if self._written.get(rank) != written:
                self._written[rank], self._heard[rank] = written, now
            if known.collectives != self._begun.get(rank, -1):
                self._begun[rank], self._moved[rank] = known.collectives, now
        return {**self._silent(state, now), **self._behind(state, now), **self._unfinished(state, now)}

    def _behind(self, state: RunState, now: float) -> dict[int, str]:
        """Find ranks that others wait for: these have begun a collective that those have not."""
        begun = {rank: count for rank in _running(state) if (count := self._begun[rank]) is not None}
        most = max(begun.values(), default=0)
        return {
            rank: f"{_counted(most - count)} {BEHIND}"
            for rank, count in begun.items()
            if count < most and now - self._moved[rank] >= BEHIND_SECONDS
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

        Where only one rank prints, as many programs have it, nobody is behind.
        """
        running = _running(state)
        fresh = [
            rank for rank in running if self._written[rank] and now - self._heard[rank] < SILENT_SECONDS / 2
        ]
        if len(fresh) * 2 <= len(running) and not (len(running) == 2 and fresh):  # noqa: PLR2004 - a pair
            return {}
        # Of two, one that has never printed may just be the one that does not.
        return {
            rank: SILENT
            for rank in running
            if now - self._heard[rank] >= SILENT_SECONDS and (len(running) > 2 or self._written[rank])  # noqa: PLR2004
        }


def _running(state: RunState) -> list[int]:
    return [rank for rank, known in state.ranks.items() if known.state is State.RUNNING]


def _counted(collectives: int) -> str:
    return "1 collective" if collectives == 1 else f"{collectives} collectives"


# What the panel says beside the ranks: why the run failed, what attempts came before, where ranks hang.


_LINES = 200
_LINE_COST = 400


class CauseNote(TypedDict):
    """Why ranks failed; the traceback as lines."""

    ranks: str
    why: str
    traceback: list[Piece]


class Attempt(TypedDict):
    """An attempt before this one."""

    number: int
    title: str
    lines: list[str]


class Report(TypedDict):
    """All of it; empty where there is nothing to say."""

    causes: list[CauseNote]
    consequences: list[str]
    consequence_count: int
    attempts: list[Attempt]
    attempts_left_out: str
    hang: str
    warnings: list[str]


_Seen = tuple[tuple[AttemptState, ...], HangReport | None, tuple[tuple[int, FailureRecord | None, str], ...]]


class Reporter:
    """Tells what is to be said when it differs from what was said last."""

    def __init__(self) -> None:
        """Begin with nothing said."""
        self._seen: _Seen = ((), None, ())

    def news(self, state: RunState) -> Report | None:
        """Return the whole report if anything in it has changed."""
        troubled = tuple(
            (rank, known.failure, known.warning + known.value_not_sent)
            for rank, known in state.ranks.items()
            if known.failure is not None or known.warning or known.value_not_sent
        )
        seen = (state.earlier, state.hang, troubled)
        if seen == self._seen:
            return None
        self._seen = seen
        return report(state)


def report(state: RunState) -> Report:
    """Return what there is to say of a run beside its ranks."""
    found = blame(state.ranks)
    limit = reason_limit(found)
    shown, left_out = earlier_attempts(state)
    return Report(
        causes=[
            CauseNote(
                ranks=format_ranks(each.ranks),
                why=why(each, limit),
                traceback=_traceback(each.failure) if number < TRACEBACKS else [],
            )
            for number, each in enumerate(found.causes)
        ],
        consequences=consequence_lines(found, limit),
        consequence_count=sum(len(each.ranks) for each in found.consequences),
        attempts=[_attempt(each) for each in shown],
        attempts_left_out=left_out,
        hang=_hang(state.hang),
        warnings=warning_lines(state),
    )


def _traceback(failure: FailureRecord) -> list[Piece]:
    text = (failure.colored or failure.traceback).rstrip("\n")
    return [piece_of(line) for line in colored(shortened(text, TRACEBACK_COST))]


def _attempt(attempt: AttemptState) -> Attempt:
    found = blame(attempt.ranks)
    lines = [f"rank {rank}: {clipped(text, _LINE_COST)}" for rank, text in sorted(why_each(found).items())]
    for rank, known in sorted(attempt.ranks.items()):
        last = last_line(known.transcript)
        if last:
            lines.append(f"rank {rank}, last output: {clipped(last, _LINE_COST)}")
    seconds = f" after {attempt.ended - attempt.started:.1f} s" if attempt.ended is not None else ""
    return Attempt(
        number=attempt.number, title=f"{attempt_line(attempt, found)}{seconds}", lines=_first(lines, "lines")
    )


def _hang(hang: HangReport | None) -> str:
    if hang is None:
        return ""
    lines = [*hang.findings]
    for place in places(hang):
        lines += [place.line, *(f"    {line}" for line in place.stack.split("\n") if line)]
    return plain("\n".join(_first(lines, "lines, see result.hang_report")))


def _first(lines: list[str], what: str) -> list[str]:
    left_out = len(lines) - _LINES
    return [*lines[:_LINES], f"… {left_out} more {what} …"] if left_out > 0 else lines


# What the panel shows of each rank: only what has changed is computed and sent.


_FAILURE_COST = 600
_VALUE_COST = 4_000
_RICH_VALUE_COST = 40_000
_VALUES_COST = 400_000
_READ_CHARACTERS = 20_000


class Row(TypedDict):
    """One rank; what is not known is not there. `value` is the number of a value.

    `memory` and `gpu_memory` are what it uses now, `gpu_peak` what torch had allocated at most, in bytes.
    """

    rank: int
    state: str
    icon: str
    phase: NotRequired[str]
    device: NotRequired[str]
    pid: NotRequired[int]
    cpu: NotRequired[float]
    memory: NotRequired[int]
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
    """The header, the rows that changed, the ranks that are no more and the values that are new."""

    header: dict[str, str]
    rows: dict[str, Row]
    removed: list[str]
    values: dict[str, Value]


class Rows:
    """Remembers what was shown, and tells what is to be shown differently."""

    def __init__(self, header: Header) -> None:
        """Begin with nothing shown."""
        self.rows: dict[str, Row] = {}
        self.values: dict[str, Value] = {}
        self.header: dict[str, str] = {}
        self._about = header
        self._states: Mapping[int, RankState] = {}
        self._explained: tuple[object, ...] = ()
        self._why: dict[int, str] = {}
        self._marks: dict[int, str] = {}
        self._stragglers = Stragglers()
        self._numbers: dict[tuple[str, str], int] = {}
        self._room = _VALUES_COST

    def news(self, state: RunState, now: float) -> RankNews | None:
        """Return what differs from the state seen last, or None; `now` is in seconds."""
        why, marks = self._failures(state), self._stragglers.marks(state, now)
        marks |= {rank: said if state.doing else f"{said}; {AGAIN}" for rank, said in waits(state).items()}
        rows: dict[str, Row] = {}
        values: dict[str, Value] = {}
        for rank, known in sorted(state.ranks.items()):
            # The fold keeps what has not changed, so looking at which object it is suffices.
            same = self._why.get(rank) == why.get(rank) and self._marks.get(rank) == marks.get(rank)
            if self._states.get(rank) is known and same:
                continue
            row = self._row(known, why.get(rank, ""), marks.get(rank, ""), values)
            # More output alone is no news here: it comes by itself.
            if self.rows.get(str(rank)) != row:
                rows[str(rank)] = row
        removed = [rank for rank in self.rows if int(rank) not in state.ranks]
        header = describe(state, self._about)
        self._states, self._why, self._marks = state.ranks, why, marks
        if not rows and not removed and header == self.header:
            return None
        kept = {rank: row for rank, row in self.rows.items() if rank not in removed}
        self.header, self.rows, self.values = header, {**kept, **rows}, {**self.values, **values}
        return RankNews(header=header, rows=rows, removed=removed, values=values)

    def _failures(self, state: RunState) -> dict[int, str]:
        """Return each failed rank's failure in one line, worked out again only when one is new."""
        failed = tuple((rank, known.failure) for rank, known in state.ranks.items() if known.failure)
        if failed == self._explained:
            return self._why
        self._explained = failed
        found = blame(state.ranks)
        limit = min(_FAILURE_COST, reason_limit(found))
        return {rank: clipped(text, limit) for rank, text in why_each(found).items()}

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
            values[str(number)] = Value(
                text=shortened(text, min(_VALUE_COST, max(self._room, 200))), html=html
            )
            self._room -= len(values[str(number)]["text"])
        return self._numbers[key]


def _add_usage(row: Row, known: RankState) -> None:
    if known.peak_gpu_memory:
        row["gpu_peak"] = known.peak_gpu_memory
    usage = known.usage
    if usage is None or known.state.final:
        return
    row["cpu"], row["memory"] = round(usage.cpu_percent), usage.memory
    if usage.gpu_memory is not None:
        row["gpu_memory"] = usage.gpu_memory
    if usage.gpu_percent is not None:
        row["gpu"] = usage.gpu_percent


def describe(state: RunState, header: Header) -> dict[str, str]:
    """Return the panel's header; unlike what is saved, it names the machine and the log directory."""
    restarts = len(state.earlier)
    return {
        "state": str(state.summary),
        "icon": ICONS[state.summary],
        "what": headline(state, header.title, header.backend),
        "node": plain(header.node),
        "magic": plain(header.magic),
        "restarts": f"{restarts} restart{'' if restarts == 1 else 's'}" if restarts else "",
        "logs": f"logs: {plain(header.log_dir)}" if header.log_dir else "",
        "note": plain(header.note),
    }


# All that a live panel shows, kept up to date.


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
