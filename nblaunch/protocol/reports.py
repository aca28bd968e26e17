"""Text that errors, results and views share: ranks, sizes, frames and their places, and where ranks hang."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from nblaunch.protocol.messages import Collective, EngineStatus, FrameRecord, HeldMemory

_Answer = TypeVar("_Answer", bound=Hashable)
_GIB = 1 << 30
_MIB = 1 << 20
_HOSTS_NAMED = 4
_HOST_LINES = 12
# Frames between the user's code and the process: ours, torchelastic's, IPython's, multiprocessing's.
_OURS = re.compile(
    r"(/nblaunch/((rank|probes|capture|host|group|protocol|testing)/|_\w+\.py)|/torch/distributed/elastic/"
    r"|/torch/multiprocessing/|/IPython/core/(interactiveshell|async_helpers)\.py"
    r"|/multiprocessing/(process|spawn|forkserver)\.py|/lib/python[\d.]+/contextlib\.py"
    r"|<frozen (runpy|importlib\._bootstrap(_external)?)>|/asyncio/(runners|base_events|events)\.py)"
)
_FATAL_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose main threads have one and the same Python stack.

    `ranks` are their numbers, `headline` says in one line what they do, `frames` are the stack, the innermost
    frame last.
    """

    ranks: tuple[int, ...]
    headline: str
    frames: tuple[FrameRecord, ...]

    importing: bool = False
    """Whether they are inside an import."""


@dataclass(frozen=True, slots=True)
class HangReport:
    """Where the ranks were.

    `groups` are ranks by identical Python stack; `collectives` each rank's last collective of each process
    group, from torch's flight recorder; `findings` what follows from comparing them: who waits for whom in a
    circle, who has not started what, which operations, shapes or dtypes differ. `deadlocks` are the ranks of
    each circle. `silent` maps ranks that gave no answer to the stack that faulthandler wrote; `finished` are
    ranks that had returned already. `hosts` maps ranks to their hosts; it is empty if there is only one host.
    """

    groups: tuple[StackGroup, ...]
    collectives: Mapping[int, tuple[Collective, ...]]
    findings: tuple[str, ...] = ()
    silent: Mapping[int, str] = field(default_factory=dict)
    finished: tuple[int, ...] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)
    deadlocks: tuple[tuple[int, ...], ...] = ()

    def named(self, ranks: Iterable[int]) -> str:
        """Return `[ranks 0-1 on hA]`, without the host where there is only one."""
        return f"[{ranks_on(ranks, self.hosts)}]"

    @property
    def summary(self) -> str:
        """The report in one line."""
        parts = [f"{self.named(group.ranks)} {group.headline}" for group in self.groups]
        if self.silent:
            parts.append(f"{self.named(self.silent)} gave no answer")
        if self.finished:
            parts.append(f"{self.named(self.finished)} had finished")
        return "; ".join(parts)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001 - IPython's own protocol
        """Show the whole report in a notebook."""
        printer.text(str(self))

    def __str__(self) -> str:
        """Return the whole report as text."""
        lines = list(self.findings)
        for group in self.groups:
            lines.append(f"{self.named(group.ranks)} {group.headline}")
            for frame in group.frames:
                lines.append(f"    {frame.filename}, line {frame.line}, in {frame.function}")
                if frame.source:
                    lines.append(f"        {frame.source}")
        for stacks, ranks in ranks_by_answer(self.silent).items():
            held = "its interpreter, or it is" if len(ranks) == 1 else "their interpreters, or they are"
            lines.append(f"{self.named(ranks)} gave no answer (C code holds {held} stopped)")
            lines.extend(f"    {line}" for line in stacks.splitlines())
        if self.finished:
            lines.append(f"{self.named(self.finished)} had finished")
        return "\n".join(lines)


class LocatedAll(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Where the ranks of a job were at the last survey."""

    report: HangReport


def own_frame(frames: Sequence[FrameRecord]) -> FrameRecord | None:
    """Return the innermost frame of the notebook, else of a file outside installed libraries."""
    for wanted in (_in_notebook, _not_installed):
        for frame in reversed(frames):
            if wanted(frame):
                return frame
    return None


def nearest_frame(frames: Sequence[FrameRecord]) -> FrameRecord | None:
    """Return the user's own frame, else the innermost of all."""
    return own_frame(frames) or (frames[-1] if frames else None)


def place(frame: FrameRecord) -> str:
    """Describe where a frame is, in words that are the same in each run of the notebook.

    A cell has no number here: that counts executions, and is 0 in kernels that keep no history.

    >>> place(FrameRecord("Cell In[3]", 4, "helper", "return x[7]"))
    'cell line 4 in helper'
    """
    if _in_notebook(frame):
        inside = "" if frame.function.startswith("<") else f" in {frame.function}"
        return f"cell line {frame.line}{inside}"
    return f"{frame.filename}, line {frame.line}"


def _in_notebook(frame: FrameRecord) -> bool:
    return frame.filename.startswith("Cell In[")


def _not_installed(frame: FrameRecord) -> bool:
    installed = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")
    return not any(part in frame.filename for part in installed)


def is_ours(filename: str) -> bool:
    """Return whether a frame belongs to the machinery between the user's code and the process."""
    # "<string>" is the fork server's own command line.
    return filename == "<string>" or _OURS.search(filename.replace("\\", "/")) is not None


def is_import(filename: str) -> bool:
    """Return whether a frame is the import system's: it is on the stack until a module is whole.

    Modules that are loaded already, and functions that a module's import has defined, have no such frame.
    """
    return filename.startswith("<frozen importlib.")


def readable_stacks(dump: str, titles: Mapping[str, str]) -> str:
    """Turn what faulthandler wrote into a traceback of the user's own frames, innermost last.

    `titles` maps file names of cells to what the reader calls them.

    >>> dump = '''Fatal Python error: Segmentation fault
    ...
    ... Current thread 0x00007f (most recent call first):
    ...   File "/x/cell.py", line 3 in <module>'''
    >>> print(readable_stacks(dump, {"/x/cell.py": "Cell In[2]"}))
    Fatal Python error: Segmentation fault
      Cell In[2], line 3, in <module>
    """
    error = next((line for line in dump.splitlines() if line.startswith("Fatal Python error")), "")
    _, _, current = dump.partition("Current thread")
    frames = _readable(current.partition("\n\n")[0], titles)
    return "\n".join([*([error] if error else []), *frames])


def readable_main_stack(dump: str, titles: Mapping[str, str]) -> str:
    """Return the frames that faulthandler wrote last on request, innermost last.

    >>> dump = '''Stack (most recent call first):
    ...   File "/x/cell.py", line 3 in <module>'''
    >>> print(readable_main_stack(dump, {"/x/cell.py": "Cell In[2]"}))
      Cell In[2], line 3, in <module>
    """
    return "\n".join(_readable(dump.rpartition("Stack (most recent call first)")[2], titles))


def _readable(stack: str, titles: Mapping[str, str]) -> list[str]:
    frames = []
    for line in stack.splitlines():
        frame = _FATAL_FRAME.match(line)
        if frame is not None and not is_ours(frame["file"]):
            name = titles.get(frame["file"])
            place = name if name is not None else f'File "{frame["file"]}"'
            frames.append(f"  {place}, line {frame['line']}, in {frame['function']}")
    return frames[::-1]


def size(count: float) -> str:
    """Format a number of bytes, counted as `df -h` and `--shm-size` do.

    >>> size(64 << 20), size(80 << 30)
    ('64 MiB', '80.0 GiB')
    """
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


def held_lines(held: Sequence[HeldMemory]) -> list[str]:
    """Describe what a rank held when it ran out of memory, a line for each part, in columns.

    >>> held_lines([HeldMemory(size=64 << 20, what="bytearray", count=4, name="rows", where="cell line 3")])
    ['64 MiB  4 x bytearray  rows (cell line 3)']
    """
    rows = []
    for each in held:
        name = f"{each.name} ({each.where})" if each.name and each.where else each.name
        made = f"made at {each.made}" if each.made else ""
        what = f"{each.count} x {each.what}" if each.count > 1 else each.what
        rows.append((size(each.size), what, ", ".join(filter(None, (name, made))) or "in no variable"))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    return [f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]


def plural(count: int, noun: str) -> str:
    """Return a number of things: `1 rank`, `2 ranks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ranks_by_answer(answers: Mapping[int, _Answer]) -> dict[_Answer, tuple[int, ...]]:
    """Return which ranks gave each answer; ranks rise, and answers come in the order of their lowest rank.

    >>> ranks_by_answer({1: "odd", 0: "even", 2: "even"})
    {'even': (0, 2), 'odd': (1,)}
    """
    found: dict[_Answer, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        found.setdefault(answer, []).append(rank)
    return {answer: tuple(ranks) for answer, ranks in found.items()}


def awaited_nodes(status: EngineStatus, starts: str = "") -> str:
    """Describe the wait for nodes in one line; `starts` is the expected start in words, in local time.

    >>> from nblaunch.protocol.messages import EngineState
    >>> awaited_nodes(EngineStatus(engine="join", state=EngineState.WAITING, joined=1, wanted=2))
    'waiting for join: 1 of 2 nodes here'
    """
    words = " ".join(filter(None, (status.words, f"({status.reason})" if status.reason else "")))
    request = " ".join(filter(None, (f"job {status.id}" if status.id else "", words)))
    here = f"{status.joined} of {status.wanted} nodes here"
    return f"waiting for {status.engine}: {', '.join(filter(None, (request, status.place, starts, here)))}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as the panel and the errors show them.

    >>> format_ranks([0, 2, 3, 4])
    'ranks 0,2-4'
    """
    numbers = sorted(set(ranks))
    parts: list[str] = []
    start = 0
    for index, number in enumerate(numbers):
        if index + 1 < len(numbers) and numbers[index + 1] == number + 1:
            continue
        first = numbers[start]
        parts.append(str(first) if first == number else f"{first}-{number}")
        start = index + 1
    return f"rank{'' if len(numbers) == 1 else 's'} {','.join(parts)}"


def ranks_do(ranks: Collection[int], hosts: Mapping[int, str], one: str, many: str) -> str:
    """Format ranks as the subject of a verb, in its form for one rank or for many.

    >>> ranks_do([1], {}, "is", "are"), ranks_do([0, 1], {}, "is", "are")
    ('rank 1 is', 'ranks 0-1 are')
    """
    return f"{ranks_on(ranks, hosts)} {one if len(ranks) == 1 else many}"


def ranks_on(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Format ranks with their hosts; `hosts` is empty where all ranks are on one.

    >>> ranks_on([0, 1, 3], {0: "hA", 1: "hA", 2: "hB", 3: "hB"})
    'ranks 0-1 on hA, rank 3 on hB'
    """
    found = ranks_by_answer({rank: hosts.get(rank, "") for rank in ranks})
    if len(found) > _HOSTS_NAMED:
        return f"{format_ranks(rank for each in found.values() for rank in each)} on {len(found)} hosts"
    parts = (format_ranks(each) + (f" on {host}" if host else "") for host, each in found.items())
    return ", ".join(parts) or format_ranks(())


def by_host(words: Mapping[int, str], hosts: Mapping[int, str], *, named: bool = True) -> list[str]:
    """Describe ranks in a few lines, hosts that are alike together: those that differ from most are named.

    `words` says how each rank is, `hosts` where; without several of these it is by rank alone. Unless
    `named`, hosts are only counted.

    >>> hosts = {rank: f"h{rank // 2}" for rank in range(8)}
    >>> by_host({rank: "FAILED" if rank == 5 else "RUNNING" for rank in range(8)}, hosts)
    ['3 hosts x 2 ranks: RUNNING', 'h2: rank 5 FAILED, rank 4 RUNNING']
    """
    members: dict[str, list[int]] = {}
    for rank in sorted(words):
        members.setdefault(hosts.get(rank, ""), []).append(rank)
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for host, ranks in members.items():
        counts = Counter(words[rank] for rank in ranks)
        alike.setdefault(tuple(sorted(counts.items())), []).append(host)
    lines = []
    for place, found in enumerate(sorted(alike.values(), key=len, reverse=True)):
        # The first are as most are, unless all differ.
        known = named and (len(found) == 1 or place > 0)
        lines.append(_hosts_line(found, members, words, named=known))
    left_out = len(lines) - _HOST_LINES
    return lines if left_out <= 0 else [*lines[:_HOST_LINES], f"… {left_out} more kinds of hosts …"]


def _hosts_line(
    hosts: list[str], members: Mapping[str, list[int]], words: Mapping[int, str], *, named: bool
) -> str:
    """Return a line for hosts whose ranks are alike; of what these are, the rarest comes first."""
    if "" in hosts or (named and len(hosts) <= _HOSTS_NAMED):
        ranks = ranks_by_answer({rank: words[rank] for host in hosts for rank in members[host]})
        parts = [f"{format_ranks(who)} {word}" for word, who in sorted(ranks.items(), key=_how_many)]
        return f"{', '.join(filter(None, hosts))}: {', '.join(parts)}".removeprefix(": ")
    alike = members[hosts[0]]
    ranks = ranks_by_answer({rank: words[rank] for rank in alike})
    counts = [f"{len(who)} {word}" for word, who in sorted(ranks.items(), key=_how_many)]
    here = words[alike[0]] if len(ranks) == 1 else ", ".join(counts)
    return f"{plural(len(hosts), 'host')} x {plural(len(alike), 'rank')}: {here}"


def _how_many(ranks: tuple[str, tuple[int, ...]]) -> int:
    return len(ranks[1])


def session_ended(name: str, why: str = "") -> str:
    because = f": {why.rstrip('.')}" if why else ""
    return f"session {name!r} has ended{because}. Start another one (%distributed start)."


def session_busy(name: str, *, queried_by: str = "") -> str:
    """Return the text of the error for a session that runs a job, or whose ranks a client queries."""
    if queried_by:
        return (
            f"session {name!r} takes one job at a time. {queried_by} looks into its ranks (inspect, diff, "
            "completion), and that look goes on although it was interrupted. Wait for its end, or use fresh "
            "ranks (--fresh)."
        )
    return (
        f"session {name!r} takes one job at a time, and is at work on another one. Wait for it "
        "(handle.result()), stop it (handle.cancel()), or use fresh ranks (--fresh)."
    )
