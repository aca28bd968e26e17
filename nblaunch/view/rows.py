"""A rank's row in the live panel: what has changed since the last time is all that is computed and sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from nblaunch._state import RankState, RunState
from nblaunch.view.cost import clipped
from nblaunch.view.header import Header
from nblaunch.view.markup import ICONS
from nblaunch.view.outcome import failure_of_each, failures, headline
from nblaunch.view.output import last_line
from nblaunch.view.terminal import plain

_RESULT_COST = 600
_LAST_LINE_COST = 400
_READ_CHARACTERS = 2_000


class Row(TypedDict):
    """What the panel shows of a rank."""

    rank: int
    state: str
    icon: str
    phase: str
    device: str
    last: str
    result: str


class Delta(TypedDict):
    """One tick: the new header, the rows that changed and the ranks that are no more."""

    header: dict[str, str]
    rows: dict[str, Row]
    removed: list[str]


class Rows:
    """Remembers what was shown, and tells what is to be shown differently."""

    def __init__(self, header: Header) -> None:
        """Begin with nothing shown."""
        self._header = header
        self._states: Mapping[int, RankState] = {}
        self._why: dict[int, str] = {}
        self._shown_header: dict[str, str] = {}

    def changes(self, state: RunState) -> Delta | None:
        """Return what differs from the state seen last, or None."""
        why = failure_of_each(failures(state.ranks.values()))
        rows: dict[str, Row] = {}
        for rank, known in sorted(state.ranks.items()):
            # The fold keeps what has not changed, so looking at which object it is suffices.
            if self._states.get(rank) is not known or self._why.get(rank) != why.get(rank):
                rows[str(rank)] = _row(known, why.get(rank, ""))
        removed = [str(rank) for rank in self._states if rank not in state.ranks]
        header = describe(state, self._header)
        if not rows and not removed and header == self._shown_header:
            return None
        self._states, self._why, self._shown_header = state.ranks, why, header
        return Delta(header=header, rows=rows, removed=removed)


def _row(known: RankState, why: str) -> Row:
    result = why or plain(known.value_text[:_READ_CHARACTERS]).strip()
    return Row(
        rank=known.rank,
        state=str(known.state),
        icon=ICONS[known.state],
        phase="" if known.state.final else str(known.phase),
        device=plain(known.device),
        last=clipped(last_line(known.transcript), _LAST_LINE_COST),
        result=clipped(result, _RESULT_COST),
    )


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
    }
