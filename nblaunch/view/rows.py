"""What the panel shows of each rank: only what has changed is computed and sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

from nblaunch._state import RankState, RunState
from nblaunch.view.cost import clipped, cost_of_text, shortened
from nblaunch.view.header import Header
from nblaunch.view.markup import ICONS
from nblaunch.view.outcome import AGAIN, failure_of_each, failures, headline, reason_limit, waits
from nblaunch.view.stragglers import Stragglers
from nblaunch.view.terminal import plain

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
        explained = failures(state.ranks.values())
        limit = min(_FAILURE_COST, reason_limit(explained))
        return {rank: clipped(text, limit) for rank, text in failure_of_each(explained).items()}

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
