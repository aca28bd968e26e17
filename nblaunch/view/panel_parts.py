"""What a live panel shows, as HTML in parts: what has changed is sent, within a budget.

A part has a key, and the element with it in `data-key` shows the part; a part may contain elements of others,
which stay empty in its own HTML. The page puts what has changed in its place, and keeps for itself only
what its reader does: what is chosen, unfolded, focused.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NotRequired, TypedDict

from nblaunch._budget import clipped, cost_of_text, shortened
from nblaunch._results import nodes_line, time_is_short
from nblaunch.diagnose.failures import blame
from nblaunch.insight import charts
from nblaunch.insight.curves import Curve, Curves, curve_lines
from nblaunch.insight.markup import ICONS, escaped, pre
from nblaunch.protocol.reports import by_host, format_ranks, plural, size
from nblaunch.protocol.state import RankState, RunState, State, hosts_of
from nblaunch.view import html, summary
from nblaunch.view.alike import label, sizes
from nblaunch.view.mime import frame
from nblaunch.view.panel_log import LogNews, PanelLog
from nblaunch.view.panel_output import Feed
from nblaunch.view.screen import plain

BYTES_PER_SECOND = 30_000
"""What parts and lines take when they change without a pause; lines come first, up to their own limit."""
_ROW_COST = 30
_BURST = 256_000
_CARDS = 8
"""So many ranks have a card each in the panel."""
_NUMBERED = 64
_DENSE = 256
_LONGEST_HOST = 18
_MOST_COLUMNS = 16
_RICH_VALUE_COST = 40_000
_VALUE_COST = 4_000
_READ_CHARACTERS = 20_000
_FAILURE_COST = 600
STRAGGLER = "⚠"

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


# What a rank is, in a line.


def state_word(state: State, phase: str = "") -> str:
    word = f"{state} ({phase})" if state is State.STARTING and phase else f"{state}"
    return (
        f'<span class="nblaunch-state nblaunch-{state}">'
        f'<span class="nblaunch-icon" aria-hidden="true">{ICONS[state]}</span>{escaped(word)}</span>'
    )


def short_host(host: str) -> str:
    """Return a short name of a host: without its domain, only the end of a long one.

    >>> short_host("gpu-node-001.cluster.example.org"), short_host("a-very-long-name-of-a-host-17")
    ('gpu-node-001', '…name-of-a-host-17')
    """
    name = host.partition(".")[0]
    return name if len(name) <= _LONGEST_HOST else f"…{name[1 - _LONGEST_HOST :]}"


class RankNotes:
    """What is known of each rank now, beside its state: why it failed, a remark, its host."""

    def __init__(self) -> None:
        self.why: dict[int, str] = {}
        self.marks: dict[int, str] = {}
        self.hosts: dict[int, str] = {}
        self.states: Mapping[int, RankState] = {}
        self._explained: tuple[object, ...] = ()
        self._stragglers = Stragglers()

    def update(self, state: RunState, now: float) -> set[int]:
        """Take a state; return the ranks of which something has changed."""
        why, marks, hosts = self._failures(state), self._stragglers.marks(state, now), hosts_of(state.ranks)
        marks |= summary.finishing(state)
        marks |= {
            rank: what if state.doing else f"{what}; {summary.AGAIN}"
            for rank, what in summary.waits(state).items()
        }
        # The fold keeps the objects of ranks that have not changed; more output alone is the log's.
        changed = {
            rank
            for rank, known in state.ranks.items()
            if (before := self.states.get(rank)) is not known
            and (before is None or _appearance(before) != _appearance(known))
        }
        for old, new in ((self.why, why), (self.marks, marks), (self.hosts, hosts)):
            if old != new:
                changed |= {rank for rank in state.ranks if old.get(rank) != new.get(rank)}
        self.why, self.marks, self.hosts, self.states = why, marks, hosts, state.ranks
        return changed

    def _failures(self, state: RunState) -> dict[int, str]:
        failed = tuple((rank, known.failure) for rank, known in state.ranks.items() if known.failure)
        if failed == self._explained:
            return self.why
        self._explained = failed
        found = blame(state.ranks)
        limit = min(_FAILURE_COST, summary.reason_limit(found))
        return {rank: clipped(text, limit) for rank, text in summary.why_each(found).items()}

    def name(self, known: RankState) -> str:
        """Return a rank as it is read aloud: `Rank 3 on gpu-node-001, RUNNING`."""
        host = plain(self.hosts.get(known.rank, ""))
        mark = self.marks.get(known.rank, "")
        return (
            f"Rank {known.rank}{f' on {host}' if host else ''}, {known.state}"
            f"{f', {STRAGGLER} {mark}' if mark else ''}"
        )


def _appearance(known: RankState) -> tuple[object, ...]:
    used = (known.usage, known.used, known.peak_gpu_memory)
    value = (known.value_text, known.value_html)
    return known.state, known.phase, known.device, known.pid, *value, *used


def _card(known: RankState, ranks: RankNotes) -> str:
    """Return a rank's card without its usage and its output."""
    full = plain(ranks.hosts.get(known.rank, ""))
    host, device = short_host(full), plain(known.device or "")
    pid = "" if known.pid is None else f"pid {known.pid}"
    where = " · ".join(filter(None, (host, device, pid)))
    title = f' title="{escaped(" · ".join(filter(None, (full, device, pid))))}"' if full != host else ""
    named = f' data-host="{escaped(host)}"' if host else ""
    parts = [state_word(known.state, "" if known.state.final else str(known.phase))]
    parts += [f'<div class="nblaunch-where"{title}{named}>{escaped(where)}</div>'] if where else []
    if mark := ranks.marks.get(known.rank):
        parts.append(f'<div class="nblaunch-mark">{STRAGGLER} {escaped(mark)}</div>')
    if why := ranks.why.get(known.rank):
        parts.append(f'<div class="nblaunch-result nblaunch-wrong">{escaped(why)}</div>')
    elif value := _first_line(known):
        parts.append(f'<div class="nblaunch-result">{escaped(value)}</div>')
    return "".join(parts)


def _first_line(known: RankState) -> str:
    if known.value_html:
        return "→ a value, see below"
    return f"→ {html.short_value(known.value_text)}" if known.value_text else ""


_USAGE: tuple[tuple[str, Callable[[RankState], float | None]], ...] = (
    ("CPU", lambda known: None if known.usage is None else round(known.usage.cpu_percent)),
    ("", lambda known: None if known.usage is None else known.usage.memory),
    ("GPU", lambda known: None if known.usage is None else known.usage.gpu_percent),
    ("GPU memory", lambda known: None if known.usage is None else known.usage.gpu_memory),
    # Behind the rest: on a narrow card it is what is cut off.
    ("peak", lambda known: None if known.used is None else known.used.host_peak),
    ("GPU peak", lambda known: known.peak_gpu_memory or None),
)


def usage_of(ranks: Sequence[RankState]) -> str:
    """Return the usage of some ranks, as ranges where they differ: `CPU 88-96 % · 231-240 MiB`."""
    parts: list[str] = []
    for name, figure in _USAGE:
        running = (known for known in ranks if "peak" in name or not known.state.final)
        found = [each for each in map(figure, running) if each is not None]
        if not found:
            continue
        if name in ("CPU", "GPU"):
            low, high = int(min(found)), int(max(found))
            shown = f"{low} %" if low == high else f"{low}-{high} %"
        else:
            shown = sizes(map(int, found)) or size(0)
        if name == "peak" and parts and parts[-1] == shown:
            continue
        parts.append(f"{name} {shown}".strip())
    return " · ".join(parts).replace(" · GPU memory ", ", ").replace("GPU memory", "GPU")


# Many ranks: a row for those that are alike, and a map with a cell for each.

_ORDER = (
    *(State.FAILED, State.LOST, State.STOPPED, State.PREEMPTED),
    *(State.RUNNING, State.STARTING, State.INIT, State.SUCCEEDED),
)
_SPOKEN = 40


def groups_of(ranks: RankNotes) -> dict[tuple[object, ...], list[RankState]]:
    """Return the ranks that are alike now: the same state, failure and remark; what differs comes first."""
    groups: dict[tuple[object, ...], list[RankState]] = {}
    for rank, known in sorted(ranks.states.items()):
        # How far a rank is behind changes all the time, and is no reason to leave a group.
        mark = re.sub(r"\d+", "0", ranks.marks.get(rank, ""))
        groups.setdefault((known.state, ranks.why.get(rank, ""), mark), []).append(known)

    def place(group: tuple[tuple[object, ...], list[RankState]]) -> tuple[int, bool, int]:
        (_, why, _), (first, *_) = group
        return _ORDER.index(first.state), str(why).startswith("consequence"), first.rank

    return dict(sorted(groups.items(), key=place))


def _group(known: Sequence[RankState], ranks: RankNotes) -> str:
    """Return the row of ranks that are alike, and the row that it unfolds to, a line for each of them."""
    first = known[0]
    numbers = [each.rank for each in known]
    spoken = format_ranks(numbers)
    if len(spoken) > _SPOKEN:
        spoken = plural(len(numbers), "rank")
    spoken = spoken.replace("-", " to ").replace(",", ", ")
    values = {each.value_text or each.value_html for each in known} - {""}
    value = f"→ {len(values)} values, see below" if len(values) > 1 else _first_line(first)
    mark = ranks.marks.get(first.rank, "")
    now = (ranks.why.get(first.rank, ""), f"{STRAGGLER} {mark}" if mark else "", usage_of(known), value)
    shown = format_ranks(numbers).partition(" ")[2]
    return (
        f'<tr aria-label="{escaped(f"{spoken}: {first.state.lower()}")}"><th scope="row">'
        f'<button class="nblaunch-unfold" data-act="unfold" data-ranks="{shown}">{escaped(label(numbers))}'
        f"</button></th><td>{state_word(first.state)}</td>"
        f"<td>{escaped(' · '.join(filter(None, now)))}</td></tr>"
        f'<tr class="nblaunch-below"><td colspan="3"><ul class="nblaunch-each" data-own tabindex="0" '
        f'aria-label="{escaped(f"Each of {spoken}")}"></ul></td></tr>'
    )


def _alike(keys: Iterable[str]) -> str:
    bodies = "".join(f'<tbody data-key="{key}"></tbody>' for key in keys)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("rank", "state", "now"))
    return (
        '<table class="nblaunch-table" aria-label="Ranks that are alike">'
        f"<thead><tr>{head}</tr></thead>{bodies}</table>"
        '<button class="nblaunch-button" data-act="more" aria-expanded="false" data-own></button>'
    )


def _map(hosts: Mapping[str, Sequence[int]], count: int) -> str:
    """Return the map, a row for each host; a dense one says once what the hosts' names begin with."""
    names = [short_host(name) for name in hosts if name]
    skipped = ""
    if count > _DENSE and len(names) > 1:
        # A number stays whole.
        skipped = os.path.commonprefix(names).rstrip("0123456789")  # noqa: RUF071 - no paths
    kinds = [
        "nblaunch-map",
        "nblaunch-numbered" if count <= _NUMBERED else "",
        "nblaunch-dense" if count > _DENSE else "",
        "nblaunch-one" if len(hosts) == 1 else "",
    ]
    rows, longest = [], 0
    for number, host in enumerate(hosts):
        shown = short_host(host)[len(skipped) :] if host else "no host yet"
        longest = max(longest, len(shown))
        rows.append(
            f'<div class="nblaunch-host" role="row"><div class="nblaunch-hostname" role="rowheader" '
            f'title="{escaped(host)}">{escaped(shown)}</div>'
            f'<div class="nblaunch-cells" role="presentation" data-key="h{number}"></div></div>'
        )
    columns = min(max(map(len, hosts.values()), default=1), _MOST_COLUMNS)
    caption = f'<div class="nblaunch-hint">hosts {escaped(skipped)}…</div>' if skipped else ""
    return (
        f'{caption}<div class="{" ".join(filter(None, kinds))}" role="grid" aria-label="Ranks by host" '
        f'style="--nblaunch-columns:{columns};--nblaunch-name:{longest}ch">{"".join(rows)}</div>'
        '<div class="nblaunch-about" data-own aria-hidden="true"></div>'
    )


def _cells(numbers: Iterable[int], ranks: RankNotes, *, numbered: bool) -> str:
    cells = []
    for rank in numbers:
        known = ranks.states[rank]
        late = rank in ranks.marks
        why = f' data-why="{escaped(ranks.why[rank])}"' if rank in ranks.why else ""
        cells.append(
            f'<div class="nblaunch-cell nblaunch-{known.state}{" nblaunch-late" if late else ""}" '
            f'role="gridcell" data-rank="{rank}" aria-label="{escaped(ranks.name(known))}"{why}>'
            f"{STRAGGLER if late else ICONS[known.state]}{f' {rank}' if numbered else ''}</div>"
        )
    return "".join(cells)


# The head, and what failed.


def _head(state: RunState, header: summary.Header) -> str:
    """Return the panel's head; unlike what is saved, it names the machines and the log directory."""
    restarts, engine, now = len(state.earlier), state.engine, time.time()
    awaits = state.awaits_nodes
    what = (
        summary.headline(state, header.title, header.backend),
        # Where an engine places the nodes, the notebook's machine need not be one of them.
        "" if engine is not None else plain(header.node),
        plural(restarts, "restart") if restarts else "",
        f"logs: {plain(header.log_dir)}" if header.log_dir else "",
        plain(header.note),
    )
    stop = "Stop watching" if header.watched else "Stop"
    word = state_word(State.STARTING if awaits else state.summary)
    word = word.replace(">STARTING<", ">WAITING<") if awaits else word
    line = (
        f'<div class="nblaunch-line"><strong>{word}</strong>'
        f'<span title="{escaped(plain(header.magic))}">{escaped(" · ".join(filter(None, what)))}</span>'
        '<span class="nblaunch-elapsed" data-own title="time since the run began"></span>'
        '<span class="nblaunch-hint nblaunch-stopped" role="status" data-own></span>'
        f'<span class="nblaunch-hint nblaunch-interrupt">interrupt the kernel to {stop.lower()}</span>'
        f'<button type="button" class="nblaunch-button nblaunch-stop" data-act="stop" aria-label="{stop}">'
        f"■ {stop}</button></div>"
    )
    parts = [line]
    if engine is not None:
        soon = time_is_short(engine, now)
        line = f"{f'{STRAGGLER} ' if soon else ''}{plain(nodes_line(engine, now))}"
        parts.append(f'<div class="nblaunch-nodes{" nblaunch-soon" if soon else ""}">{escaped(line)}</div>')
    if awaits:
        # Ranks that may be others, and more, are not shown.
        hint = "The ranks are shown here once their nodes have come."
        return "".join([*parts, f'<div class="nblaunch-hint nblaunch-waits">{hint}</div>'])
    return "".join([*parts, _counts(state)])


def _counts(state: RunState) -> str:
    states = [known.state for known in state.ranks.values()]
    counts = [(word, states.count(word)) for word in _ORDER if word in states]
    told = ", ".join(f"{count} {word}" for word, count in counts)
    bar = "".join(
        f'<span class="nblaunch-part nblaunch-{word}" style="flex-grow:{count}"></span>'
        for word, count in counts
    )
    words = "".join(
        f'<span class="nblaunch-count">{count} {state_word(word)}</span>' for word, count in counts
    )
    hosts, lines = hosts_of(state.ranks), []
    if hosts and len(state.ranks) > _CARDS:
        lines = by_host({rank: str(known.state) for rank, known in state.ranks.items()}, hosts)
    below = "".join(f"<div>{escaped(plain(line))}</div>" for line in lines)
    return (
        f'<div class="nblaunch-line"><div class="nblaunch-bar" role="img" '
        f'aria-label="Ranks by state: {told}">{bar}</div><span class="nblaunch-counts">{words}</span></div>'
        + (f'<div class="nblaunch-hosts">{below}</div>' if below else "")
    )


# The parts, and what of them is sent.


class Parts:
    """The parts of the page, and changed parts that are drawn once there is room to send them.

    What matters first is sent first, of the rest what has waited longest.
    """

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self._waiting: dict[str, Callable[[], str]] = {}
        self._urgent: dict[str, Callable[[], str]] = {}
        self._gone: list[str] = []
        self._room = float(_BURST)
        self._filled: float | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def change(self, key: str, draw: Callable[[], str], *, urgent: bool = False) -> None:
        """Mark a part as changed; an urgent one is sent at once."""
        (self._urgent if urgent else self._waiting)[key] = draw

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._waiting.pop(key, None)
            if self.shown.pop(key, None) is not None:
                self._gone.append(key)

    def charge(self, size: int) -> None:
        """Take room for what is sent beside the parts."""
        self._room -= size

    def send(self, now: float) -> dict[str, str | None]:
        """Return the changed parts by key, as far as there is room; None for a part that is gone."""
        if self._filled is not None:
            self._room = min(self._room + BYTES_PER_SECOND * (now - self._filled), _BURST)
        self._filled = now
        sent: dict[str, str | None] = dict.fromkeys(self._gone)
        urgent, self._urgent, self._gone = self._urgent, {}, []
        for key, draw in urgent.items():
            self._draw(key, draw, sent)
        while self._waiting and self._room > 0:
            key = next(iter(self._waiting))
            self._draw(key, self._waiting.pop(key), sent)
        return sent

    def _draw(self, key: str, draw: Callable[[], str], sent: dict[str, str | None]) -> None:
        content = draw()
        if self.shown.get(key, "") != content:
            self.shown[key] = sent[key] = content
            self._room -= len(content) + len(key)


_POLL_SECONDS = 0.5
"""Between two looks at a state that has not changed: there is what time alone changes."""
_CURVE_SECONDS = 0.4
_FEW_RANKS = 8
"""Of so many ranks the page always has a line each."""
CURVE_WAYS = ("", ".log", ".each", ".each.log")


class Delta(TypedDict):
    """One tick: parts by key, and the log's rows; `log` is None where nothing was printed."""

    sequence: int
    parts: dict[str, str | None]
    log: LogNews | None


class Snapshot(TypedDict):
    """Everything, for a page that starts now; `age` is the run's, in seconds."""

    sequence: int
    age: float
    parts: dict[str, str]
    log: LogNews
    heard: NotRequired[list[str]]


class Drawing:
    """Turns the states of a run into deltas; any thread may ask for everything at any time."""

    def __init__(self, header: summary.Header, opened: float) -> None:
        """Draw a run that was opened at `opened`, on the same clock as `now` below."""
        self._header, self._opened = header, opened
        self._parts, self._ranks, self._feed, self._log = Parts(), RankNotes(), Feed(), PanelLog()
        self._curves = Curves()
        self._by_rank = self._ways_changed = False
        self._curves_due = self._due = 0.0
        self._curve_numbers: dict[str, int] = {}
        self._troubled: tuple[object, ...] = ()
        self._earlier: dict[int, str] = {}
        """Attempts before this one, by number: they do not change any more, and may hold a megabyte."""
        self._values: dict[str, int] = {}
        self._groups: dict[tuple[object, ...], int] = {}
        self._hosts: dict[str, list[int]] = {}
        self._sequence = 0
        self._seen: RunState | None = None
        # A page that is loaded again asks for everything while the run's own thread draws.
        self._lock = threading.Lock()

    def changes(self, state: RunState, now: float) -> Delta | None:
        """Return the changes since the last call, or None."""
        with self._lock:
            busy = self._feed.busy or self._parts.busy
            if state is self._seen and now < self._due and not busy:
                return None
            if state is not self._seen or now >= self._due:
                self._note_changes(state, now)
                self._seen, self._due = state, now + _POLL_SECONDS
            news = self._feed.news(state, now)
            log = self._log.take(state.attempt.number, news) if news else None
            if log is not None:
                self._parts.charge(sum(len(str(row[2] or "")) + _ROW_COST for row in log["rows"]))
            parts = self._parts.send(now)
            if not parts and log is None:
                return None
            self._sequence += 1
            return Delta(sequence=self._sequence, parts=parts, log=log)

    def whole(self, now: float) -> Snapshot:
        with self._lock:
            return Snapshot(
                sequence=self._sequence,
                age=now - self._opened,
                parts={**self._parts.shown},
                log=self._log.whole(),
            )

    def curves(self, state: RunState) -> Curves:
        """Return the logged numbers up to this state."""
        with self._lock:
            self._curves.update(state.metrics)
            return self._curves

    def draw_each_rank(self, *, wanted: bool) -> None:
        """Draw a line for each rank, or only for those that are apart; for any thread."""
        self._by_rank, self._curves_due, self._ways_changed = wanted, 0.0, True

    def _note_changes(self, state: RunState, now: float) -> None:
        parts = self._parts
        changed = self._ranks.update(state, now)
        if changed or state.engine is not None or self._seen is None or len(state.ranks) <= _CARDS:
            parts.change("head", lambda: _head(state, self._header), urgent=True)
        troubled = (
            state.hang,
            state.preempted,
            state.notices,
            tuple(
                (rank, known.failure, known.warning + known.value_not_sent)
                for rank, known in state.ranks.items()
                if known.failure is not None or known.warning or known.value_not_sent
            ),
        )
        if troubled != self._troubled:
            self._troubled = troubled
            shown = (
                *html.failures(blame(state.ranks), live=True),
                *map(html.note, summary.warning_lines(state)),
            )
            parts.change("failure", lambda: "".join(shown), urgent=True)
            parts.change("hang", lambda: "".join(html.hang(state)), urgent=True)
        if state.earlier and state.earlier[-1].number not in self._earlier:
            self._note_attempts(state)
        if not state.awaits_nodes:
            self._note_ranks(state, changed)
            self._note_values(state, changed)
        self._note_curves(state, now)

    def _note_attempts(self, state: RunState) -> None:
        shown, left_out = summary.earlier_attempts(state)
        for each in shown:
            if each.number not in self._earlier:
                self._earlier[each.number] = html.attempt_before(each, summary.ATTEMPTS_SHOWN, live=True)
        drawn = "".join(self._earlier[each.number] for each in shown)
        self._parts.change("attempts", lambda: (html.note(left_out) if left_out else "") + drawn, urgent=True)

    def _note_ranks(self, state: RunState, changed: set[int]) -> None:
        parts, ranks = self._parts, self._ranks
        gone = [key for key in parts.shown if key[0] in "ru" and key[1:].isdigit()]
        parts.remove(key for key in gone if int(key[1:]) not in state.ranks)
        for rank in changed:
            known = state.ranks[rank]
            parts.change(f"r{rank}", partial(_card, known, ranks))
            parts.change(f"u{rank}", partial(usage_of, [known]))
        if len(state.ranks) <= _CARDS:
            cards = ",".join(map(str, sorted(state.ranks)))
            parts.change("ranks", lambda: f'<div class="nblaunch-cards" data-own data-ranks="{cards}"></div>')
            return
        self._note_groups(changed)
        if not changed and self._hosts:
            return
        hosts: dict[str, list[int]] = {}
        for rank in sorted(state.ranks):
            hosts.setdefault(plain(ranks.hosts.get(rank, "")), []).append(rank)
        if hosts != self._hosts:
            parts.remove(f"h{number}" for number in range(len(hosts), len(self._hosts)))
            self._hosts, changed = hosts, set(state.ranks)
        failed = [rank for rank, why in ranks.why.items() if not why.startswith("consequence")]
        focus = min(failed, default=min(state.ranks))
        parts.change("focus", lambda: f'<i data-rank-of="{focus}"></i>', urgent=True)
        is_one = len(hosts) == 1 and len(state.ranks) <= _NUMBERED
        grid = '<div class="nblaunch-mapped" data-key="map"></div>'
        aside = '<div class="nblaunch-cards nblaunch-aside" data-own></div>'
        kind = ' class="nblaunch-many"' if is_one else ""
        shell = f'<div class="nblaunch-alike" data-key="alike"></div><div{kind}>{grid}{aside}</div>'
        parts.change("ranks", lambda: shell, urgent=True)
        parts.change("map", lambda: _map(hosts, len(state.ranks)), urgent=True)
        numbered = len(state.ranks) <= _NUMBERED
        for number, members in enumerate(hosts.values()):
            if changed.intersection(members):
                parts.change(f"h{number}", partial(_cells, members, ranks, numbered=numbered))

    def _note_groups(self, changed: set[int]) -> None:
        if not changed:
            return
        groups = {
            f"g{self._groups.setdefault(key, len(self._groups))}": known
            for key, known in groups_of(self._ranks).items()
        }
        parts = self._parts
        parts.remove([key for key in parts.shown if re.fullmatch(r"g\d+", key) and key not in groups])
        parts.change("alike", lambda: _alike(groups), urgent=True)
        for key, known in groups.items():
            parts.change(key, partial(_group, known, self._ranks), urgent=True)

    def _note_values(self, state: RunState, changed: set[int]) -> None:
        """Draw the values when one is new."""
        if not any(state.ranks[rank].value_text or state.ranks[rank].value_html for rank in changed):
            return
        values = {
            rank: (
                shortened(plain(known.value_text[:_READ_CHARACTERS]).strip("\n"), _VALUE_COST),
                known.value_html,
            )
            for rank, known in state.ranks.items()
            if known.value_text or known.value_html
        }

        def framed(rich: str) -> str:
            if cost_of_text(rich) > _RICH_VALUE_COST:
                return "<em>is shown at the end of the run</em>"
            number = self._values.setdefault(rich, len(self._values))
            self._parts.change(f"v{number}", lambda: frame(rich))
            return f'<div data-key="v{number}"></div>'

        self._parts.change("values", lambda: html.values_of(values, framed, short=len(state.ranks) > _CARDS))

    def _note_curves(self, state: RunState, now: float) -> None:
        if not state.metrics or now < self._curves_due:
            return
        self._curves_due = now + _CURVE_SECONDS
        if not self._curves.update(state.metrics) and not self._ways_changed:
            return
        self._ways_changed = False
        shown = self._curves.shown()
        if not shown:
            return
        steps = charts.steps_of(shown)
        ranks = max(len(curve.lines) for curve in shown)
        numbers = {
            curve.name: self._curve_numbers.setdefault(curve.name, len(self._curve_numbers))
            for curve in shown
        }
        each = self._by_rank or ranks <= _FEW_RANKS
        for curve in shown:
            for way in CURVE_WAYS if each else CURVE_WAYS[:2]:
                draw = partial(charts.live_chart, curve, steps, log=".log" in way, each=".each" in way)
                self._parts.change(f"c{numbers[curve.name]}{way}", draw)
        words = plain("\n".join(curve_lines(self._curves)))
        self._parts.change("words", lambda: pre(escaped(words)))
        self._parts.change("curves", lambda: _curves_shell(shown, numbers, ranks), urgent=True)


def _curves_shell(shown: Sequence[Curve], numbers: Mapping[str, int], ranks: int) -> str:
    figures = "".join(
        f'<figure class="nblaunch-chart" data-key="c{numbers[curve.name]}"></figure>' for curve in shown
    )
    # Lines of many ranks come when they are asked for, and a busy kernel may not hear that.
    asked = " data-asked" if ranks > _FEW_RANKS else ""
    each = (
        '<button type="button" class="nblaunch-button" data-act="each" aria-pressed="false"'
        f"{asked}>One line per rank</button>"
        if ranks > 1
        else ""
    )
    return (
        f'<details open><summary data-lm-suppress-shortcuts="true">Curves of {plural(len(shown), "name")}'
        '</summary><div class="nblaunch-tools"><button type="button" class="nblaunch-button" data-act="log" '
        f'aria-pressed="false">Log scale</button>{each}</div>'
        f'<div class="nblaunch-charts">{figures}</div><div data-key="words"></div></details>'
    )
