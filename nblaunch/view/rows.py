"""A rank's row in the live panel: what has changed since the last time is all that is computed and sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from nblaunch._reports import HangReport
from nblaunch._state import AttemptState, RankState, RunState
from nblaunch.view.cost import clipped
from nblaunch.view.header import Header
from nblaunch.view.markup import ICONS
from nblaunch.view.outcome import (
    attempt_line,
    earlier_attempts,
    failure_of_each,
    failures,
    headline,
    places,
)
from nblaunch.view.output import last_line
from nblaunch.view.terminal import plain

_RESULT_COST = 600
_LAST_LINE_COST = 400
_READ_CHARACTERS = 2_000
_NOTE_LINES = 200


class Row(TypedDict):
    """What the panel shows of a rank."""

    rank: int
    state: str
    icon: str
    phase: str
    device: str
    last: str
    result: str


class Note(TypedDict):
    """What is to be read beside the rows: an attempt that failed, where the ranks hang."""

    title: str
    text: str
    open: bool


class Delta(TypedDict):
    """One tick: the new header, the rows that changed and the ranks that are no more.

    `notes` is None where they are what they were.
    """

    header: dict[str, str]
    notes: list[Note] | None
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
        self._looked: tuple[tuple[AttemptState, ...], HangReport | None] = ((), None)

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
        looked = (state.earlier, state.hang)
        new = notes(state) if looked != self._looked else None
        if not rows and not removed and header == self._shown_header and new is None:
            return None
        self._states, self._why, self._shown_header, self._looked = state.ranks, why, header, looked
        return Delta(header=header, notes=new, rows=rows, removed=removed)


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


def notes(state: RunState) -> list[Note]:
    """Return the attempts before this one, and where the ranks are if they were asked."""
    shown, left_out = earlier_attempts(state)
    found = [Note(title=left_out, text="", open=False)] if left_out else []
    for attempt in shown:
        lines = [f"{rank}: {why}" for rank, why in _failures_of(attempt)]
        lines += [
            f"rank {known.rank}, last output: {clipped(last_line(known.transcript), _LAST_LINE_COST)}"
            for _, known in sorted(attempt.ranks.items())
            if last_line(known.transcript)
        ]
        seconds = f" after {attempt.ended - attempt.started:.1f} s" if attempt.ended is not None else ""
        found.append(
            Note(title=f"{attempt_line(attempt)}{seconds}", text="\n".join(lines[:_NOTE_LINES]), open=False)
        )
    if state.hang is not None:
        lines = [*state.hang.findings]
        for place in places(state.hang):
            lines += [place.line, *(f"    {line}" for line in place.stack.split("\n") if line)]
        text = plain("\n".join(lines[:_NOTE_LINES]))
        found.append(Note(title="Where the ranks are", text=text, open=True))
    return found


def _failures_of(attempt: AttemptState) -> list[tuple[str, str]]:
    why = failure_of_each(failures(attempt.ranks.values()))
    return [(f"rank {rank}", clipped(text, _RESULT_COST)) for rank, text in sorted(why.items())]


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
