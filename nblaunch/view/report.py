"""What the panel says beside the ranks: why the run failed, what attempts came before, where ranks hang."""

from __future__ import annotations

from typing import TypedDict

from nblaunch._protocol import FailureRecord
from nblaunch._reports import HangReport, format_ranks
from nblaunch._state import AttemptState, RunState
from nblaunch.view.cost import clipped, shortened
from nblaunch.view.outcome import (
    attempt_line,
    causes,
    consequence_lines,
    earlier_attempts,
    failure_of_each,
    failures,
    places,
    reason_limit,
    warning_lines,
)
from nblaunch.view.output import last_line
from nblaunch.view.tail import Piece, piece_of
from nblaunch.view.terminal import colored, plain

_TRACEBACK_COST = 20_000
_TRACEBACKS = 4
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
    explained = failures(state.ranks.values())
    limit = reason_limit(explained)
    shown, left_out = earlier_attempts(state)
    return Report(
        causes=[
            CauseNote(
                ranks=format_ranks(each.ranks),
                why=shortened(each.why, limit),
                traceback=_traceback(each.failure) if number < _TRACEBACKS else [],
            )
            for number, each in enumerate(causes(explained))
        ],
        consequences=consequence_lines(explained, limit),
        consequence_count=sum(each.consequence_of is not None for each in explained),
        attempts=[_attempt(each) for each in shown],
        attempts_left_out=left_out,
        hang=_hang(state.hang),
        warnings=warning_lines(state),
    )


def _traceback(failure: FailureRecord) -> list[Piece]:
    text = (failure.shown or failure.traceback).rstrip("\n")
    return [piece_of(line) for line in colored(shortened(text, _TRACEBACK_COST))]


def _attempt(attempt: AttemptState) -> Attempt:
    why = failure_of_each(failures(attempt.ranks.values()))
    lines = [f"rank {rank}: {clipped(text, _LINE_COST)}" for rank, text in sorted(why.items())]
    for rank, known in sorted(attempt.ranks.items()):
        last = last_line(known.transcript)
        if last:
            lines.append(f"rank {rank}, last output: {clipped(last, _LINE_COST)}")
    seconds = f" after {attempt.ended - attempt.started:.1f} s" if attempt.ended is not None else ""
    return Attempt(
        number=attempt.number, title=f"{attempt_line(attempt)}{seconds}", lines=_first(lines, "lines")
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
