"""One outcome of all ranks: what is raised in pytest's process, and what its report shows."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

from nblaunch._errors import CaptureError, RunFailedError, RunTimeoutError
from nblaunch._results import Outcome, RankFailure
from nblaunch.diagnose.failures import blame
from nblaunch.protocol.reports import format_ranks
from nblaunch.testing.inside import TOLD, Target, TestEndedError, Told

_MOST_OTHERS = 8
"""Failures beside the first one that a report shows."""
_NO_FAILURES = ("exit", "xfail", "skip")
"""What ends a test without a failure; the first of these counts."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(slots=True)
class Drawn(TerminalRepr):
    """A failure that pytest shows as it stands; `reprcrash` is its line in the short summary."""

    text: str
    reprcrash: ReprFileLocation

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the text."""
        tw.line(self.text)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a test on ranks raises, and what its report shows in place of a traceback of ours."""

    error: BaseException
    longrepr: Any


def conclude(outcome: Outcome, target: Target) -> Conclusion | None:
    """Return how a test ended; None if all ranks returned.

    A failure of one rank is the test's, and then a skip; what follows from another rank's end is neither.
    """
    error = outcome.error
    if error is None:
        return None
    followed = blame(outcome.result.state.ranks).ended if outcome.result.ranks else ()
    causes = [each for each in outcome.result.failures if each.rank not in followed]
    if not isinstance(error, RunFailedError) or isinstance(error, RunTimeoutError) or not causes:
        return concluded(error, target)
    failed = [each for each in causes if _kind(each) not in _NO_FAILURES]
    if not failed:
        return _ended_early(causes, target)
    alike = _alike(failed)
    first, ranks = alike[0]
    told = told_of(first)
    raised = _raised(first, error)
    if told is None:
        return Conclusion(raised, _plain(str(error), first, ranks, target))
    drawn = told.drawn
    crash = getattr(drawn, "reprcrash", None)
    if crash is not None:
        crash.message = f"[{format_ranks(ranks)}] {crash.message}"
    drawn.addsection("ranks", f"This is {format_ranks(ranks)} of {outcome.result.world_size}.", "-")
    for other, theirs in alike[1 : 1 + _MOST_OTHERS]:
        its = told_of(other)
        drawn.addsection(
            format_ranks(theirs), _drawn_text(its.drawn) if its is not None else other.traceback, "-"
        )
    return Conclusion(raised, drawn)


def concluded(error: BaseException, target: Target) -> Conclusion:
    """Return the end of a test that no rank's own failure explains: a time limit, a fixture, a start."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CaptureError):
        text = _of_fixture(error)
    elif isinstance(error, RunTimeoutError) and error.hang_report is not None:
        text = f"{error.hang_report}\n\n{text}"
    where = ReprFileLocation(target.path, 0, text.strip().rpartition("\n")[2] or type(error).__name__)
    if isinstance(error, RunTimeoutError):
        where.message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    elif isinstance(error, CaptureError):
        where.message = text.partition("\n")[0]
    return Conclusion(error, Drawn(text, where))


def told_of(failure: RankFailure) -> Told | None:
    told = getattr(failure.exception, TOLD, None)
    return told if isinstance(told, Told) else None


def _of_fixture(error: CaptureError) -> str:
    """Return the message of a fixture, or a parameter, that cannot be sent."""
    name = error.name.removeprefix("kwargs['").removesuffix("']")
    if name == error.name:
        return f"CaptureError: {error}"
    text = str(error).replace(error.name, name)
    return f"CaptureError: the fixture or parameter {name!r} cannot be sent to ranks. {text}"


def _kind(failure: RankFailure) -> str:
    return failure.exception.kind if isinstance(failure.exception, TestEndedError) else ""


def _raised(failure: RankFailure, error: BaseException) -> BaseException:
    sent = failure.exception
    if isinstance(sent, TestEndedError):
        return SystemExit(sent.reason) if sent.kind == "SystemExit" else pytest.fail.Exception(sent.reason)
    return error if sent is None else sent


def _ended_early(causes: Sequence[RankFailure], target: Target) -> Conclusion:
    """Return the end of a test that ranks have skipped, or called an expected failure, or pytest's end."""
    first = min(causes, key=lambda each: (_NO_FAILURES.index(_kind(each)), each.rank))
    sent = first.exception
    assert isinstance(sent, TestEndedError)  # noqa: S101 - it has a kind
    ranks = sorted(each.rank for each in causes if str(each.exception) == sent.reason)
    reason = f"[{format_ranks(ranks)}] {sent.reason}"
    if sent.kind == "exit":
        return Conclusion(pytest.exit.Exception(reason), None)
    if sent.kind == "xfail":
        return Conclusion(pytest.xfail.Exception(reason), None)
    told = told_of(first)
    place = (target.path, 0) if told is None else (told.path, told.line)
    return Conclusion(pytest.skip.Exception(reason), (*place, f"Skipped: {reason}"))


def _drawn_text(drawn: Any) -> str:
    file = io.StringIO()
    drawn.toterminal(TerminalWriter(file))
    return file.getvalue().rstrip()


def _alike(failures: Iterable[RankFailure]) -> list[tuple[RankFailure, list[int]]]:
    """Return the failures that differ, each with all ranks that it is of; the first is the root cause."""
    groups: dict[tuple[str, str], tuple[RankFailure, list[int]]] = {}
    for each in failures:
        # Objects are at other addresses in each process.
        message = _ADDRESS.sub("0x", each.message)
        groups.setdefault((each.type, message), (each, []))[1].append(each.rank)
    return [(failure, sorted(ranks)) for failure, ranks in groups.values()]


def _plain(text: str, failure: RankFailure, ranks: Sequence[int], target: Target) -> Drawn:
    """Return a failure as its message: of a rank that died, or whose exception cannot be sent."""
    line = failure.frame.line if failure.frame is not None else 0
    whole = f"{text}\n\n{failure.traceback.rstrip()}" if failure.traceback else text
    return Drawn(whole, ReprFileLocation(target.path, line, f"[{format_ranks(ranks)}] {failure.reason}"))
