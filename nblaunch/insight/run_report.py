"""A run as one document that a program can read: `result.report()`, as JSON and as Markdown.

It holds 16,000 characters at most, about 4,000 tokens, however many ranks there were and whatever they
printed. What matters most has its room first: the root cause with rank, line and reason, then what followed
from it, where ranks hang, and what the run was; the last lines of output get what is left, the ranks of the
root cause before all others. `left_out` says what was cut.

No value of `--env` is in it, wherever it came from: a line of output, a traceback, a file's name.
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from nblaunch._budget import clipped, shortened
from nblaunch.insight.folding import merged
from nblaunch.protocol.reports import format_ranks, size

SCHEMA = 1
"""Raised when a key gets another meaning; new keys leave it as it is."""
CHARACTERS = 16_000
"""Of the document, in either form: 4,000 tokens of four characters."""
OUTPUT_LINES = 50
"""Last lines of each rank."""
_SHORTEST_SECRET = 4
_KEPT_WORDS = frozenset({"schema", "outcome", "phase", "signal", "help"})
"""Keys whose values are nblaunch's own words, never the user's."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run was and how it ended, in one document of at most 16,000 characters.

    `str()` and `to_json()` give JSON, `to_dict()` the same as a dict, `to_markdown()` the same for a reader;
    a notebook shows that. Keys without content are left out. `schema` is raised when a key gets another
    meaning:

    * `outcome`: succeeded, failed, timeout, interrupted, preempted, not started; `ended_by` says in words
      what ended a run early; `ran`, `world_size`, `backend`, `seconds`, `states` (ranks by state)
    * `root_cause`: `rank`, `ranks` (all that failed alike, with hosts if there are several), `type`,
      `message`, `reason`, `where`, `file`, `line`, `function`, `source`, `frames` (innermost last),
      `exitcode`, `signal`, `phase`, `traceback` (of chained exceptions, or what the system knows of a process
      that died), `memory` (bytes), `held` (the largest parts of it, where it ran out)
    * `also_failed`, `consequences`: `ranks` and `reason`; `ended_because_of_it`: ranks
    * `help`: the address of the page about what has happened; none for an exception of the user's own code
    * `hang`: `findings`, `places` (`ranks`, `doing`, `frames`), `finished`
    * `attempts`, `warnings`, `options` (`line` as a magic takes it), `versions`, `hosts`
    * `memory`: bytes, of each of few ranks, else of those with the least and the most
    * `metrics`: last values, texts (`NaN`, `Infinity`) where they are not finite
    * `slowest_step`: `step`, `seconds`, `rank`
    * `output`: the last lines of the ranks, equal ones of several ranks once; `left_out`: what was cut

    >>> print(result.report())                                             # doctest: +SKIP
    {"schema": 1, "outcome": "failed", ..., "root_cause": {"rank": 2, "line": 14, ...
    """

    _document: Mapping[str, Any] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the document: dicts, lists, strings, numbers, None."""
        return copy.deepcopy(dict(self._document))

    def to_json(self) -> str:
        """Return the document as JSON, in one line for each of its keys."""
        return as_json(self._document)

    def to_markdown(self) -> str:
        """Return the document as Markdown; what ranks have reported is in code, never markup."""
        return as_markdown(self._document)

    def _repr_markdown_(self) -> str:
        """Show the document in a notebook (an IPython protocol)."""
        return self.to_markdown()

    def __str__(self) -> str:
        """Return the document as JSON."""
        return self.to_json()

    def __repr__(self) -> str:
        """Return one line."""
        root = self._document.get("root_cause")
        why = f": {root['ranks']}: {root['reason']}" if root else ""
        return f"<Report of {self._document['world_size']} ranks, {self._document['outcome']}{why}>"


class Redactor:
    """Takes secrets out of texts: each value of `--env`, by the variable's name."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        """`secrets` maps names to values; those of fewer than four characters would be found everywhere."""
        found: dict[str, str] = {}
        for name, value in secrets.items():
            for text in (value, value.strip(), *value.splitlines()):
                for written in (text, repr(text)[1:-1], json.dumps(text)[1:-1], quote(text), quote(text, "")):
                    if len(written) >= _SHORTEST_SECRET:
                        found.setdefault(written, name)
        self._names = found
        # The longest first: one value may be a part of another.
        parts = sorted(map(re.escape, found), key=len, reverse=True)
        self._pattern = re.compile("|".join(parts)) if parts else None

    def text(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: f"[value of {self._names[match[0]]}]", text)

    def all(self, value: Any) -> Any:
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {
                    # The document's own keys are words of this module.
                    key if key in _OWN_KEYS else self.text(key): each
                    if key in _KEPT_WORDS
                    else self.all(each)
                    for key, each in value.items()
                }
            case list() | tuple():
                return [self.all(each) for each in value]
            case _:
                return value


_OWN_KEYS = frozenset(
    {
        *("also_failed", "attempts", "backend", "cause", "consequences", "count", "cuda"),
        *("device_now", "device_peak", "devices", "doing", "ended_because_of_it", "ended_by", "exitcode"),
        *("file", "findings", "finished", "frames", "function", "hang", "held"),
        *("help", "hip", "host", "host_now", "host_peak", "hosts", "ipykernel", "ipython"),
        *("left_out", "line", "lines", "made", "memory", "message", "metrics"),
        *("name", "nblaunch", "number", "numpy", "options", "outcome", "output"),
        *("phase", "places", "python", "ran", "rank", "ranks", "reason"),
        *("root_cause", "schema", "seconds", "signal", "size", "slowest_step", "source"),
        *("states", "step", "system", "torch", "traceback", "type", "versions"),
        *("warnings", "what", "where", "world_size"),
    }
)


@dataclass(frozen=True, slots=True)
class Tails:
    """The last lines of output of ranks; those of `first`, the root cause's, count most.

    Both are without secrets.
    """

    lines: Mapping[int, Sequence[str]]
    first: frozenset[int] = frozenset()


def make(facts: Mapping[str, Any], tails: Tails, redactor: Redactor) -> Report:
    """Return the report of a run whose document, without limits and without output, is `facts`.

    Empty values are left out.
    """
    whole = redactor.all({"schema": SCHEMA, **facts})
    document: dict[str, Any] = {}
    # One form may be longer than the other, for which the document was cut.
    for room in range(CHARACTERS, 0, -_STEP):
        document = _document(whole, tails, room)
        if max(len(as_json(document)), len(as_markdown(document))) <= CHARACTERS:
            break
    return Report(document)


_STEP = 500


# The document, cut to its room.


@dataclass(frozen=True, slots=True)
class Limits:
    """How long parts may be: texts in characters, and lists in entries."""

    text: int
    line: int
    entries: int


_LIMITS = (
    Limits(2000, 300, 20),
    Limits(1200, 240, 12),
    Limits(700, 160, 8),
    Limits(400, 120, 5),
    Limits(200, 80, 3),
    Limits(120, 60, 1),
)
_OUTPUT_SHARE = 0.3
"""Of the room, for output, if there is as much."""


def _document(whole: Mapping[str, Any], tails: Tails, room: int) -> dict[str, Any]:
    document: dict[str, Any] = {}
    wanted = _OUTPUT_SHARE * room if tails.lines else 0
    root, root_left_out = _root(whole.get("root_cause"), room)
    for limits in _LIMITS:
        left_out = list(root_left_out)
        document = {
            key: root if key == "root_cause" else _cut(key, value, limits, left_out)
            for key, value in whole.items()
        }
        document = {key: value for key, value in document.items() if value not in (None, "", [], {})}
        if left_out:
            document["left_out"] = left_out
        if len(as_json(document)) + wanted <= room:
            break
    lines, note = _output(tails, room - len(as_json(document)) - _NOTE)
    if lines:
        document["output"] = lines
    if note:
        document["left_out"] = [*document.get("left_out", ()), note]
    if "left_out" in document:
        document["left_out"] = document.pop("left_out")  # the last key
    return document


def _root(cause: Any, room: int) -> tuple[Any, list[str]]:
    """Return the root cause, which is cut for its own length only, and what is told of that."""
    kept: Any = None
    left_out: list[str] = []
    for limits in _LIMITS:
        left_out = []
        kept = _cut("root_cause", cause, limits, left_out)
        if len(_dumped(kept)) <= _ROOT_SHARE * room:
            break
    return kept, left_out


_ROOT_SHARE = 0.35
"""Of the room, for the root cause at most."""
_NOTE = 200
_FRAMES = 12
_CODE_KEYS = frozenset({"file", "function", "source", "where", "name", "what", "made", "host"})


def _cut(key: str, value: Any, limits: Limits, left_out: list[str]) -> Any:
    """Return a value of the document with its texts and lists cut; `left_out` gets what is told of it."""
    match value:
        case str():
            return shortened(value, limits.line if key in _CODE_KEYS else limits.text, len)
        case Mapping():
            kept = {
                clipped(name, 80, len): _cut(name, each, limits, left_out) for name, each in value.items()
            }
            kept = {name: each for name, each in kept.items() if each not in (None, "", [], {})}
            return _first_of(kept, key, limits, left_out)
        case list():
            most = min(limits.entries, _FRAMES) if key == "frames" else limits.entries
            shown = value
            if len(value) > most and key == "frames":
                # The innermost frames say what went wrong, the first one where it began.
                shown = [*value[:1], *value[len(value) - most + 1 :]] if most > 1 else value[-1:]
            elif len(value) > most:
                shown = value[-most:] if key == "attempts" else value[:most]
            if len(shown) < len(value):
                left_out.append(f"{key}: {len(value) - len(shown)} of {len(value)}")
            return [_cut(key, each, limits, left_out) for each in shown]
        case _:
            return value


_SHORT_LISTS = frozenset({"metrics", "states", "devices"})


def _first_of(value: dict[str, Any], key: str, limits: Limits, left_out: list[str]) -> dict[str, Any]:
    """Return a mapping with names of the user's, cut to as many entries as a list may have."""
    if key not in _SHORT_LISTS or len(value) <= limits.entries:
        return value
    left_out.append(f"{key}: {len(value) - limits.entries} of {len(value)}")
    return dict(list(value.items())[: limits.entries])


# Output: the last lines of each rank, merged.

_COUNTS = (OUTPUT_LINES, 30, 20, 12, 8, 5, 3, 2, 1)
_LINE_CHARACTERS = (400, 200, 100)
_COLUMNS_MERGED = 128


def _output(tails: Tails, room: int) -> tuple[list[dict[str, Any]], str]:
    """Return the last lines, as many as there is room for, and a note on omitted ones."""
    columns = {rank: lines for rank, lines in sorted(tails.lines.items()) if lines}
    if not columns or room <= 0:
        return [], "output: all of it; result.ranks[rank].stdout has it" if columns else ""
    chosen, members = _chosen(columns, tails.first)
    full = max(map(len, columns.values()))
    counts = [count for count in _COUNTS if count <= full or count == _COUNTS[0]]
    trials = [(count, limit) for count in counts for limit in _LINE_CHARACTERS]

    def blocks_of(trial: tuple[int, int]) -> list[dict[str, Any]]:
        count, limit = trial
        many = min(4 * count, OUTPUT_LINES)
        texts = {
            rank: [clipped(line, limit, len) for line in lines[-(many if rank in tails.first else count) :]]
            for rank, lines in chosen.items()
        }
        return _blocks(texts, members, tails.first)

    # Each trial is shorter than the one before it, but for a few characters: half of them need no merge.
    place = bisect_left(trials, 1, key=lambda trial: int(_cost(blocks_of(trial)) <= room))
    blocks = blocks_of(trials[min(place, len(trials) - 1)])
    if _cost(blocks) <= room:
        return blocks, _cut_note(columns, chosen, trials[place][0])
    kept: list[dict[str, Any]] = []
    for block in blocks:
        if _cost([*kept, block]) > room:
            break
        kept.append(block)
    return kept, f"output: of {len(columns)} ranks, all but the last line of some; see result.ranks"


def _chosen(
    columns: Mapping[int, Sequence[str]], first: frozenset[int]
) -> tuple[dict[int, Sequence[str]], dict[int, list[int]]]:
    """Return one rank for each different output, and the ranks that it stands for.

    Those of `first` are always among them; there are no more than can be merged.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(columns, key=lambda each: (each not in first, each)):
        alike.setdefault(tuple(columns[rank]), []).append(rank)
    kept = sorted(list(alike.values())[:_COLUMNS_MERGED])
    return {ranks[0]: columns[ranks[0]] for ranks in kept}, {ranks[0]: ranks for ranks in kept}


def _cut_note(columns: Mapping[int, Sequence[str]], chosen: Mapping[int, Sequence[str]], count: int) -> str:
    cut = any(len(lines) > count for lines in columns.values())
    different = {tuple(lines) for lines in columns.values()}
    parts = [f"all but the last {count} lines of some ranks"] if cut and count < OUTPUT_LINES else []
    if len(different) > len(chosen):
        parts.append(f"what {len(different) - len(chosen)} ranks printed otherwise")
    return f"output: {' and '.join(parts)}; result.ranks[rank].stdout has it" if parts else ""


def _blocks(
    texts: Mapping[int, Sequence[str]], members: Mapping[int, Sequence[int]], first: frozenset[int]
) -> list[dict[str, Any]]:
    """Return the lines, merged: a block for ranks that share some, those of `first` before the others.

    A line that not all ranks of its block have printed begins with those that have.
    """
    having_ranks = [members[rank] for rank in texts]
    blocks: list[tuple[list[int], list[str]]] = []
    for rows in merged(list(texts.values()), weak=("",)):
        every = sorted({column for _, having in rows for column in having})
        ranks = sorted(rank for column in every for rank in having_ranks[column])
        lines = []
        for text, having in rows:
            if len(having) == len(every):
                lines.append(str(text))
            else:
                lines.append(f"[{_ranks(rank for column in having for rank in having_ranks[column])}] {text}")
        blocks.append((ranks, lines))
    blocks.sort(key=lambda block: (first.isdisjoint(block[0]), block[0]))
    return [{"ranks": _ranks(ranks), "lines": lines} for ranks, lines in blocks]


def _ranks(ranks: Iterable[int]) -> str:
    return clipped(format_ranks(ranks), 80, len)


def _cost(blocks: Sequence[Mapping[str, Any]]) -> int:
    """Return the length of blocks in the longer of the two forms."""
    return max(len(_dumped(blocks)), sum(len(line) + 1 for line in _output_lines(blocks)))


# The two forms.


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def as_json(document: Mapping[str, Any]) -> str:
    return "{" + ",\n ".join(f"{_dumped(key)}: {_dumped(value)}" for key, value in document.items()) + "}"


def as_markdown(document: Mapping[str, Any]) -> str:
    lines = [f"# {document['outcome']}: {code(str(document.get('ran') or 'run'))}", ""]
    lines += _plain_lines(document)
    root = document.get("root_cause")
    if root:
        lines += ["", "## Root cause", "", f"**{root['ranks']}**: {code(root['reason'])}", *_root_lines(root)]
    for key, title in (("also_failed", "Also failed"), ("consequences", "Because of that")):
        if document.get(key):
            lines += ["", f"## {title}", ""]
            lines += [f"- {each['ranks']}: {code(each['reason'])}" for each in document[key]]
    if document.get("ended_because_of_it"):
        lines += ["", f"Ended because of that: {document['ended_because_of_it']}."]
    for key, (title, drawn) in _SECTIONS.items():
        if document.get(key):
            lines += ["", f"## {title}", "", *drawn(document[key])]
    if document.get("output"):
        lines += ["", "## Last output", "", *_output_lines(document["output"])]
    if document.get("left_out"):
        lines += ["", f"Left out: {'; '.join(map(code, document['left_out']))}"]
    return "\n".join(lines).rstrip() + "\n"


def _plain_lines(document: Mapping[str, Any]) -> Iterator[str]:
    states = document.get("states") or {}
    backend = f" on {code(document['backend'])}" if document.get("backend") else ""
    yield f"- {document['world_size']} ranks{backend}: " + ", ".join(
        f"{ranks} {word}" for word, ranks in states.items()
    )
    if document.get("ended_by"):
        yield f"- ended by: {code(document['ended_by'])}"
    if document.get("help"):
        yield f"- more: <{document['help']}>"
    if document.get("seconds") is not None:
        yield f"- seconds: {document['seconds']}"
    options = document.get("options") or {}
    if options.get("line"):
        yield f"- options: {code(options['line'])}"
    versions = document.get("versions") or {}
    if versions:
        yield "- versions: " + ", ".join(f"{name} {code(str(each))}" for name, each in versions.items())
    for host in document.get("hosts") or ():
        devices = ", ".join(
            f"{ranks} {code(device)}" for device, ranks in (host.get("devices") or {}).items()
        )
        yield f"- {code(host['host'])}: {devices or host['ranks']}"


def _root_lines(root: Mapping[str, Any]) -> Iterator[str]:
    known = [(name, root[name]) for name in ("exitcode", "signal", "phase", "host") if name in root]
    yield ""
    yield ", ".join(f"{name} {code(str(value))}" for name, value in known)
    stack = [line for frame in root.get("frames") or () for line in _frame_lines(frame)]
    if stack:
        yield from ("", *fenced(stack))
    if root.get("message") and "\n" in root["message"]:
        yield from ("", *fenced(root["message"].splitlines()))
    if root.get("traceback"):
        yield from ("", *fenced(str(root["traceback"]).splitlines()))
    if root.get("held"):
        yield from ("", "What it held:", "")
        for each in root["held"]:
            words = (each.get("name"), each.get("where"), each.get("made"))
            count = f"{each['count']} x " if each.get("count", 1) > 1 else ""
            what = f"{count}{each.get('what', '')}: {', '.join(filter(None, words))}".rstrip(": ")
            yield f"- {size(each['size'])}, {code(what)}"


def _frame_lines(frame: Mapping[str, Any]) -> list[str]:
    line = f"{frame.get('file', '')}, line {frame.get('line', '')}, in {frame.get('function', '')}"
    return [line, f"    {frame['source']}"] if frame.get("source") else [line]


def _hang_lines(hang: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"- {code(each)}" for each in hang.get("findings") or ())
    for each in hang.get("places") or ():
        yield f"- {each['ranks']}: {code(each['doing'])}"
        stack = [line for frame in each.get("frames") or () for line in _frame_lines(frame)]
        if stack:
            yield from fenced(stack)
    if hang.get("finished"):
        yield f"- {hang['finished']} had finished"


def _attempt_lines(attempts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in attempts:
        cause = f": {code(each['cause'])}" if each.get("cause") else ""
        yield f"- {each['number']}, {each['world_size']} ranks, {code(each['reason'])}{cause}"


def _memory_lines(memory: Mapping[str, Any]) -> Iterator[str]:
    for name, figures in memory.items():
        # Of few ranks the figures of each, of many the ranks with the least and the most.
        known = figures.items() if isinstance(figures, Mapping) else ()
        text = ", ".join(f"{each.replace('_', ' ')} {size(value)}" for each, value in known)
        yield f"- {name}: {text or figures}"


def _named_lines(values: Mapping[str, Any] | Sequence[Any]) -> Iterator[str]:
    pairs = values.items() if isinstance(values, Mapping) else (("", each) for each in values)
    for name, value in pairs:
        text = value if isinstance(value, str) else _dumped(value)
        yield f"- {code(name)}: {code(text)}" if name else f"- {code(text)}"


_SECTIONS: Mapping[str, tuple[str, Callable[[Any], Iterable[str]]]] = {
    "hang": ("Where the ranks were", _hang_lines),
    "attempts": ("Attempts", _attempt_lines),
    "warnings": ("Warnings", _named_lines),
    "memory": ("Memory", _memory_lines),
    "metrics": ("Last metrics", _named_lines),
    "slowest_step": ("Slowest step", _named_lines),
}


def _output_lines(blocks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for block in blocks:
        yield f"{block['ranks']}:"
        yield ""
        yield from fenced(block["lines"])
        yield ""


def code(text: str) -> str:
    """Return a text as code within a line, whatever it contains.

    >>> code("a `b`"), code("<b>")
    ('`` a `b` ``', '`<b>`')
    """
    line = " ".join(text.split()) or " "
    if "`" not in line:
        return f"`{line}`"
    ticks = "`" * (max(map(len, re.findall("`+", line))) + 1)
    return f"{ticks} {line} {ticks}"


def fenced(lines: Sequence[str]) -> list[str]:
    """Return lines as a block of code, whatever they contain."""
    longest = max((len(each) for line in lines for each in re.findall("`+", line)), default=0)
    fence = "`" * max(longest + 1, 3)
    return [f"{fence}text", *lines, fence]
