"""The facts in the report of a finished job, from its result, state, options and environment."""

from __future__ import annotations

import importlib.util
import math
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from nblaunch._errors import LaunchError, NblaunchError
from nblaunch._help import FailureKind
from nblaunch._inherited import JOIN_KEY
from nblaunch._results import RankFailure, RankResult, RunResult
from nblaunch._version import __version__
from nblaunch.client.result import final_lines
from nblaunch.diagnose.failures import Alike, Blame, blame
from nblaunch.insight.run_report import OUTPUT_LINES, Redactor, Report, Tails, make
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import JobEnd
from nblaunch.protocol.messages import FrameRecord, MemoryUse, Phase, Stream
from nblaunch.protocol.metrics import in_json
from nblaunch.protocol.reports import HangReport, format_ranks, nearest_frame, ranks_by_answer
from nblaunch.protocol.state import RankState
from nblaunch.protocol.transcript import Text

_MASK = "…"
_START = (Phase.FORK, Phase.CONNECT, Phase.PROCESS_GROUP)
_FEW = 8
"""Of so many ranks, each has its own row."""
_TAIL_CHARACTERS = 40_000
_PACKAGES = ("torch", "numpy", "ipython", "ipykernel")
_CUDA = re.compile(r"^(cuda|hip)\b[^=]*=\s*'([^']+)'", re.MULTILINE)
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")


@dataclass(frozen=True, slots=True)
class JobReporter:
    """Makes the report of a result; knows what the result does not: the options, and what ended the run."""

    options: LaunchOptions
    key: str = field(repr=False)
    end: JobEnd

    def __call__(self, result: RunResult) -> Report:
        """Return the report as of now; late warnings may have come since the end of the run."""
        redactor = Redactor({**self.options.env, JOIN_KEY: self.key})
        found = blame(result.state.ranks)
        first = frozenset(rank for each in found.causes[:1] for rank in each.ranks)
        tails = Tails(dict(_tails(result, self.options, redactor)), first)
        return make(self._facts(result, found), tails, redactor)

    def _facts(self, result: RunResult, found: Blame) -> dict[str, Any]:
        state = result.state
        root, causes = result.root_cause, found.causes
        states = {each.rank: str(each.state) for each in result.ranks}
        if root is not None and causes and root.rank not in causes[0].ranks:
            causes = tuple(sorted(causes, key=lambda each: root.rank not in each.ranks))
        return {
            "outcome": self._outcome(result, root),
            "ended_by": (self._broke[0] if self.end.early is None else self.end.early.message)
            or result.preempted,
            "ran": result.title,
            "world_size": result.world_size,
            "backend": state.backend or result.backend,
            "seconds": _seconds(result),
            "states": {word: format_ranks(ranks) for word, ranks in ranks_by_answer(states).items()},
            "root_cause": {} if root is None else _cause(root, causes[0] if causes else None, result),
            "help": self._kind(result, root),
            "also_failed": [{"ranks": each.who, "reason": str(each.reason)} for each in causes[1:]],
            "consequences": [{"ranks": each.who, "reason": str(each.reason)} for each in found.consequences],
            "ended_because_of_it": format_ranks(found.ended) if found.ended else "",
            "hang": _hang(result.hang_report),
            "attempts": list(_attempts(result)) if len(result.attempts) > 1 else [],
            "warnings": list(dict.fromkeys(text for text in result.warnings if "\n" not in text)),
            "options": {"line": replace(self.options, env=dict.fromkeys(self.options.env, _MASK)).to_line()},
            "versions": _versions(),
            "hosts": list(_hosts(result)),
            "memory": _memory(result),
            **_seen(result),
        }

    def _kind(self, result: RunResult, root: RankFailure | None) -> str:
        """Return the address of the page about what has happened; empty where there is none."""
        if result.ok or self.end.interrupted:
            return ""
        if self._timed_out:
            return FailureKind.HANG.address
        if result.preempted:
            return FailureKind.PREEMPTED.address
        kind = self._broke[1] if root is None or root.kind is None else root.kind
        if kind is None and root is not None and root.phase in _START:
            kind = LaunchError("", phase=root.phase.value).kind
        return "" if kind is None else kind.address

    @property
    def _timed_out(self) -> bool:
        return self.end.early is not None and self.end.early.timeout

    @property
    def _broke(self) -> tuple[str, FailureKind | None]:
        """The error that ended the group, as text, and its kind."""
        if self.end.launch_failure is not None:
            phase, message = self.end.launch_failure
            return f"phase '{phase}': {message}", LaunchError("", phase=phase).kind
        error = None if self.end.error is None else self.end.error.error()
        words = "" if error is None else f"{type(error).__name__}: {error}"
        return words, error.kind if isinstance(error, NblaunchError) else None

    def _outcome(self, result: RunResult, root: RankFailure | None) -> str:
        if result.ok:
            return "succeeded"
        if self._timed_out:
            return "timeout"
        if result.preempted:
            return "preempted"
        if self.end.interrupted:
            return "interrupted"
        return (
            "not started"
            if self.end.launch_failure is not None or (root and root.phase in _START)
            else "failed"
        )


def _seconds(result: RunResult) -> float | None:
    starts = [each.started for each in result.attempts]
    ends = [each.ended for each in result.ranks if each.ended is not None]
    return round(max(ends) - min(starts), 3) if starts and ends else None


# Why it failed.


def _cause(root: RankFailure, alike: Alike | None, result: RunResult) -> dict[str, Any]:
    frame = nearest_frame(root.frames)
    dead = root.type == "ProcessExited"
    chained = any(word in root.traceback for word in _CHAINED)
    used = result.ranks[root.rank].memory if root.rank in result.ranks else None
    return {
        "rank": root.rank,
        "ranks": format_ranks([root.rank]) if alike is None else alike.who,
        "host": root.node,
        "type": root.type,
        "message": root.message,
        "reason": root.reason,
        "where": root.where,
        **(_frame(frame) if frame is not None else {}),
        "frames": [_frame(each) for each in root.frames],
        "exitcode": root.exitcode,
        "signal": root.signal,
        "phase": str(root.phase),
        "traceback": root.traceback if dead or chained else "",
        "held": [asdict(each) for each in root.memory],
        "memory": {} if used is None else _bytes(used),
    }


def _frame(frame: FrameRecord) -> dict[str, Any]:
    return {"file": frame.filename, "line": frame.line, "function": frame.function, "source": frame.source}


def _hang(report: HangReport | None) -> dict[str, Any]:
    if report is None:
        return {}
    places = [
        {
            "ranks": report.named(group.ranks).strip("[]"),
            "doing": group.headline,
            "frames": [_frame(each) for each in group.frames],
        }
        for group in report.groups
    ]
    for stack, ranks in ranks_by_answer(report.silent).items():
        places.append({"ranks": report.named(ranks).strip("[]"), "doing": f"gave no answer\n{stack}".strip()})
    return {
        "findings": list(report.findings),
        "places": places,
        "finished": format_ranks(report.finished) if report.finished else "",
    }


def _attempts(result: RunResult) -> Iterator[dict[str, Any]]:
    for attempt, state in zip(result.attempts, result.state.attempts, strict=True):
        causes = blame(state.ranks).causes
        seconds = None if attempt.ended is None else round(attempt.ended - attempt.started, 3)
        yield {
            "number": attempt.number,
            "world_size": attempt.world_size,
            "reason": attempt.reason,
            "seconds": seconds,
            "cause": f"{causes[0].who}: {causes[0].reason}" if causes else "",
        }


# What it was.


@cache
def _versions() -> dict[str, str]:
    """Return the versions of this process's packages; torch is not loaded for it."""
    found = {"nblaunch": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        # torch writes what it was built for beside its `__init__`.
        try:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        except OSError:
            text = ""
        found.update(_CUDA.findall(text))
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return found


def _hosts(result: RunResult) -> Iterator[dict[str, Any]]:
    by_host: dict[str, list[RankResult]] = {}
    for each in result.ranks:
        by_host.setdefault(each.node, []).append(each)
    for host, ranks in by_host.items():
        devices = ranks_by_answer({each.rank: each.device for each in ranks if each.device})
        yield {
            "host": host,
            "ranks": format_ranks(each.rank for each in ranks),
            "devices": {device: format_ranks(having) for device, having in devices.items()},
        }


def _bytes(used: MemoryUse) -> dict[str, int]:
    return {name: value for name, value in asdict(used).items() if value is not None}


def _memory(result: RunResult) -> dict[str, Any]:
    """Return each rank's memory, of many ranks only the least and the most of each figure."""
    known = {each.rank: _bytes(each.memory) for each in result.ranks if each.memory is not None}
    if len(known) <= _FEW:
        return {format_ranks([rank]): figures for rank, figures in known.items() if figures}
    found: dict[str, Any] = {}
    for name in MemoryUse.__struct_fields__:
        having = {rank: figures[name] for rank, figures in known.items() if name in figures}
        if having:
            least, most = _extremes(having)
            found[name] = {f"least, rank {least}": having[least], f"most, rank {most}": having[most]}
    return found


def _seen(result: RunResult) -> dict[str, Any]:
    metrics = {name: _values(by_rank) for name, by_rank in sorted(result.metrics.last.items())}
    found: dict[str, Any] = {"metrics": metrics}
    slowest = None if result.profile is None else result.profile.slowest_step
    if slowest is not None:
        step, seconds, rank = slowest
        found["slowest_step"] = {"step": step, "seconds": round(seconds, 6), "rank": rank}
    return found


def _values(by_rank: Mapping[int, float]) -> Any:
    """Return each of few ranks' values; of many the least and the most.

    >>> _values({rank: math.nan if rank == 9 else rank / 2 for rank in range(20)})
    '0.0 (rank 0) to 9.5 (rank 19); not finite on rank 9'
    """
    if len(by_rank) <= _FEW:
        return {format_ranks([rank]): in_json(value) for rank, value in sorted(by_rank.items())}
    finite = {rank: value for rank, value in by_rank.items() if math.isfinite(value)} or by_rank
    least, most = _extremes(finite)
    others = by_rank.keys() - finite.keys()
    more = f"; not finite on {format_ranks(others)}" if others else ""
    return f"{by_rank[least]} (rank {least}) to {by_rank[most]} (rank {most}){more}"


def _extremes(by_rank: Mapping[int, float]) -> tuple[int, int]:
    """Return the ranks that have the least and the most."""
    return min(by_rank, key=lambda rank: by_rank[rank]), max(by_rank, key=lambda rank: by_rank[rank])


# The last lines of output.


def _tails(
    result: RunResult, options: LaunchOptions, redactor: Redactor
) -> Iterator[tuple[int, tuple[str, ...]]]:
    for each in result.ranks:
        text = redactor.text(_text(result.state.ranks[each.rank], each, options))
        lines = [line.rstrip() for line in final_lines(text)]
        kept = list(_without_blanks(lines))[-OUTPUT_LINES:]
        if kept:
            yield each.rank, tuple(kept)


def _text(state: RankState, rank: RankResult, options: LaunchOptions) -> str:
    """Return the end of what a rank printed, in order; streams that were not shown come last."""
    text = "".join(entry.text for entry in state.transcript.entries if isinstance(entry, Text))
    for stream in Stream:
        if not options.shows(rank.local_rank, stream):
            text = f"{text.rstrip()}\n{getattr(rank, stream.value)}"
    if len(text) <= _TAIL_CHARACTERS:
        return text
    # Cut at a line's end: half a secret would not be found.
    return text[-_TAIL_CHARACTERS:].partition("\n")[2] or text[-_TAIL_CHARACTERS:]


def _without_blanks(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines; of blank ones in a row only one, and none at either end."""
    blank, begun = False, False
    for line in lines:
        if not line:
            blank = begun
            continue
        if blank:
            yield ""
        blank, begun = False, True
        yield line
