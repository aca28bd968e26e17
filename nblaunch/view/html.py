"""A run as static HTML: no script, no style sheet, the same for the same run.

A saved notebook holds it, so it must be readable without a kernel and in a renderer that drops styles,
and stay below 1 MB together with its text form, whatever 64 ranks print.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from nblaunch._budget import clipped, cost_of_html, cost_of_text, fair_limit, shortened
from nblaunch._help import FailureKind
from nblaunch.diagnose.failures import Blame, blame
from nblaunch.insight import markup
from nblaunch.insight.charts import charts
from nblaunch.insight.curves import Curves, curve_lines, lines_by_rank
from nblaunch.protocol.messages import FailureRecord, Stream
from nblaunch.protocol.reports import format_ranks, plural, ranks_by_answer
from nblaunch.protocol.state import AttemptState, RankState, RunState, State, hosts_of
from nblaunch.protocol.transcript import Display
from nblaunch.view import summary
from nblaunch.view.alike import MOST_ROWS, devices, finest, is_whole, label, levels_of, sizes
from nblaunch.view.mime import balanced, embedded, kinds
from nblaunch.view.output import (
    Folded,
    Omission,
    Written,
    cost_of_line,
    display_rows,
    fit,
    folded,
    last_line,
    omission_text,
    only_errors,
    only_text,
)
from nblaunch.view.screen import BOLD, COLOR, ITALIC, PLAIN, UNDERLINE, Line, colored, plain

HTML_BUDGET = 680_000
"""Bytes of the whole HTML in a saved notebook, as near as can be estimated."""
OUTPUT_BUDGET = 450_000
"""Bytes of printed lines and displays; a display beyond that is left out, and named."""
LINES_BUDGET = 250_000
CURVES_BUDGET = 120_000
"""Bytes of drawings of what ranks have logged."""
_STACK_COST = 4_000
_CELL_COST = 300
_NUMBERS_COST = 40_000
_SHORT_CELL_COST = 120
_ELEMENT_COST = 300
_FRAME_COST = 500
_VALUE_OPEN = 4_000
_COLUMNS = ("rank", "device", "state", "GPU peak", "last output", "value", "failure")
_ALWAYS = (0, 2)
# A number on its own, and before it quoted text, which keeps its digits to its end.
_LONG_NUMBERS = re.compile(
    r"""(['"])(?:\\.?|(?!\1)[^\\])*(?:\1|$)|(?<![\w.:])(-?\d+\.\d{7,}(?:e[+-]?\d+)?)(?=j?(?!\w|\.\d))""",
    re.DOTALL,
)
_DIGITS = 7
_NARROW_COLUMNS = 3
_NARROW_LABEL = 20
_PLACES = 16
_ROWS = 64
"""Of more ranks, none has a row of its own unless it differs."""
_ROWS_BY_LINE = 4
_LINES_OF_VALUES = 12
_CHARACTERS_BESIDE = 110
"""How many are side by side in a window 1,000 pixels wide."""
_MOST_OPEN = 8
"""Outputs, values and tracebacks of consequences that are shown in full; the others are folded away."""
_LINES_OPEN = 40
_MIXED_OPEN = 3 * _LINES_OPEN
"""Lines of several ranks in one part: each of them alone would have as much room as one output has."""

ROOT_STYLE = (
    "font-family:var(--jp-ui-font-family,system-ui,sans-serif);"
    "font-size:var(--jp-ui-font-size1,13px);line-height:1.4;text-align:left"
)
_TAGS = {BOLD: "b", ITALIC: "i", UNDERLINE: "ins"}
_COLORS = ("", markup.RED, markup.GREEN, markup.YELLOW, markup.BLUE, markup.MAGENTA, markup.CYAN)
# Not red: progress bars and logs are written to stderr too.
STDERR = "font-style:normal;border-left:3px solid rgba(127,127,127,.6);padding-left:4px"
_CELL = "text-align:left;vertical-align:top;padding:1px 12px 1px 0"
_NARROW_CELL = f"{_CELL};white-space:nowrap"
_LEAST_WIDTH = "min-width:16em"
"""Of a failure: on a narrow page its column would be one character wide."""
_SMALL_CELL = "text-align:left;padding:1px 8px"
_FAILURE = f"border-left:3px solid {markup.RED};padding-left:8px;margin:6px 0"


def render_html(
    state: RunState,
    header: summary.Header,
    *,
    outputs: Sequence[Folded] | None = None,
    curves: Curves | None = None,
    took: float | None = None,
) -> str:
    """Return the run as HTML: how it ended, curves, a row per rank, then output and values.

    It holds no times and no pids, so that a notebook's saved output can be compared, except for those of a
    profile, which was asked for, and how many seconds the run `took`, where that is given. With several
    hosts, it names those of ranks that failed or hang.
    `outputs` is `folded(state)`, and `curves` are those of `state.metrics`, if the caller has them already.
    """
    found = blame(state.ranks)
    shown = _shown(state, found)
    rows = _rows(shown)
    what = markup.escaped(summary.headline(state, header.title, header.backend))
    what += "" if took is None else f" · {summary.duration(took)}"
    parts = (
        f"<div><strong>{markup.state(state.summary)}</strong> · {what}</div>",
        *failures(found),
        *attempts(state),
        *map(note, summary.host_lines(state)),
        *map(note, (*summary.others_lines(state, found), *summary.warning_lines(state))),
        *hang(state),
        *_curves(Curves.of(state.metrics) if curves is None else curves),
        _table(shown, rows),
        *_values(shown, rows),
        markup.details(markup.escaped(f"P{state.profile.text[1:]}"), state.profile.html, opened=True)
        if state.profile.html
        else "",
    )
    above = "".join(parts)
    written = folded(state) if outputs is None else outputs
    budget = min(HTML_BUDGET - cost_of_html(above) - _FRAME_COST * len(written), OUTPUT_BUDGET)
    return f'<div style="{ROOT_STYLE}">{above}{_outputs(written, budget)}</div>'


def failures(found: Blame, *, live: bool = False) -> Iterator[str]:
    """Yield the causes, and folded beneath them the consequences; `live` opens the first traceback."""
    parts = _causes(found, summary.TRACEBACK_COST, opened=live)
    # Of equal ones one stands for all: its line names their ranks, and it has the traceback of the lowest.
    consequences = []
    lines = summary.consequence_lines(found, summary.reason_limit(found))
    for number, (each, line) in enumerate(zip(found.consequences, lines, strict=True)):
        traceback = _traceback(each.failure, summary.TRACEBACK_COST // 4) if number < _MOST_OPEN else ""
        consequences.append(_expandable(line, traceback))
    if consequences:
        title = plural(sum(len(each.ranks) for each in found.consequences), "consequence")
        parts.append(markup.details(f"{title} of it", "".join(consequences), opened=False))
    if parts:
        yield f'<div style="{_FAILURE}">{"".join(parts)}</div>'


def _causes(found: Blame, traceback_cost: int, *, opened: bool = False) -> list[str]:
    parts = []
    for number, cause in enumerate(found.causes):
        label = markup.escaped(f"{'Also failed' if number else 'Root cause'}: {cause.who}:")
        why = markup.code(summary.why(cause, summary.reason_limit(found)))
        traceback = ""
        if number < summary.TRACEBACKS:
            traceback = _traceback(cause.failure, traceback_cost, colored_too=opened)
        name = "Details" if cause.failure.type == "ProcessExited" else "Traceback"
        parts.append(f"<div><strong>{label}</strong> {why}{_help(cause.kind)}</div>")
        # Of a run that is over it is folded away: the error that the cell raises shows it below.
        parts += [markup.details(name, traceback, opened=opened and not number)] if traceback else []
        held = summary.held_text(cause.failure) if number < summary.TRACEBACKS else ""
        table = markup.pre(markup.escaped(held))
        parts += [markup.details("What it held", table, opened=not number)] if held else []
    return parts


def _help(kind: FailureKind | None) -> str:
    """Return a link to the page about a failure; nothing for an exception of the user's own code."""
    return "" if kind is None else f" · {_link(kind, 'what to do')}"


def _link(kind: FailureKind, text: str) -> str:
    # The text is no address: the error below the run shows that, and once is enough. JupyterLab tells a link
    # apart by its colour alone.
    return f'<a href="{markup.escaped(kind.address)}" style="text-decoration:underline">{text}</a>'


def _traceback(failure: FailureRecord, limit: int, *, colored_too: bool = False) -> str:
    text = failure.colored.rstrip("\n") if colored_too else ""
    text = shortened(text or summary.traceback_text(failure), limit)
    shown = colored(text)
    # Colours only where they fit too: a span around each character is possible.
    cost = sum(cost_of_line(line) for line in shown)
    content = _lines_of(("", line) for line in shown) if cost <= 2 * limit else markup.escaped(plain(text))
    return markup.pre(content) if text.strip() else ""


def _expandable(line: str, content: str) -> str:
    return markup.details(markup.code(line), content, opened=False) if content else note(line)


def note(line: str) -> str:
    """Return a line about the run that may quote a rank."""
    return f"<div>{markup.code(line)}</div>"


def attempts(state: RunState) -> Iterator[str]:
    """Yield a part for each attempt before this one, with its own failures and output."""
    shown, left_out = summary.earlier_attempts(state)
    yield from [note(left_out)] if left_out else []
    yield from (attempt_before(each, len(shown)) for each in shown)


def attempt_before(attempt: AttemptState, among: int, *, live: bool = False) -> str:
    """Return the part for one of `among` attempts before this one.

    A `live` page has what it displayed as text: it may be HTML of a rank's. And it has how long it took.
    """
    before = RunState(world_size=attempt.world_size, ranks=attempt.ranks, attempt=attempt)
    found = blame(before.ranks)
    content = "".join(_causes(found, summary.TRACEBACK_COST // max(4, among)))
    # Which of the others failed too, and which were stopped before they did, differs from run to run.
    others = set(before.ranks) - {rank for each in found.causes for rank in each.ranks}
    content += note(f"{format_ranks(others)}: ended because of that") if others else ""
    written = only_text(folded(before)) if live else folded(before)
    content += _outputs(written, summary.PART_BUDGET // among)
    took = attempt.ended - attempt.started if live and attempt.ended else None
    after = "" if took is None else f" after {summary.duration(took)}"
    return _expandable(f"{summary.attempt_line(attempt, found)}{after}", content)


def hang(state: RunState) -> Iterator[str]:
    """Yield where the ranks were, if known: a line for all with the same stack, and that stack."""
    if state.hang is None:
        return
    limit = summary.REASON_COST
    content = "".join(note(shortened(plain(each), limit)) for each in state.hang.findings[:_PLACES])
    found = summary.places(state.hang)
    for each in found[:_PLACES]:
        stack = shortened(each.stack, _STACK_COST)
        content += _expandable(
            shortened(each.line, limit), markup.pre(markup.escaped(stack)) if stack else ""
        )
    if len(found) > _PLACES:
        content += f"<div>… {len(found) - _PLACES} more in result.hang_report …</div>"
    content += f"<div>{_link(FailureKind.HANG, 'how to read this')}</div>"
    yield markup.details("Where the ranks were", content, opened=True)


def _curves(curves: Curves) -> Iterator[str]:
    """Yield the logged numbers: a drawing for each name, the same in words, a line for each rank."""
    lines = curve_lines(curves)
    if not lines:
        return
    drawn, by_rank = charts(curves, CURVES_BUDGET)
    content = _side_by_side(drawn) + markup.pre(markup.escaped(plain("\n".join(lines))))
    if by_rank:
        words = markup.pre(markup.escaped(plain("\n".join(lines_by_rank(curves)))))
        content += markup.details("One line for each rank", _side_by_side(by_rank) + words, opened=False)
    yield markup.details(f"Curves of {plural(len(curves.curves), 'name')}", content, opened=True)


def _side_by_side(drawn: Sequence[str]) -> str:
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 12px">{"".join(drawn)}</div>'


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the table has of a rank; only one that has failed names its host."""

    known: RankState
    why: str
    failure: str
    """`why`, or what the lines above the table call it, where they tell it."""
    host: str
    last: str
    after_failures: int
    """0 for what failed, 1 for what failed because of it, 2 for all else."""

    @property
    def value(self) -> tuple[str, str]:
        return plain(self.known.value_text).rstrip("\n"), self.known.value_html


def _shown(state: RunState, found: Blame) -> dict[int, _Shown]:
    failures, hosts = summary.why_each(found), hosts_of(state.ranks)
    # Of very many ranks the last lines stand in the output alone: drawing each takes a moment.
    many = len(state.ranks) > _ROWS
    caused = {rank for each in found.consequences for rank in each.ranks}
    told = {rank: "also failed" for each in found.causes for rank in each.ranks}
    told |= dict.fromkeys(found.causes[0].ranks if found.causes else (), "root cause")
    return {
        rank: _Shown(
            known,
            why := failures.get(rank, ""),
            told.get(rank, why),
            plain(hosts.get(rank, "")) if why else "",
            "" if many else clipped(last_line(known.transcript), _SHORT_CELL_COST),
            2 if not why else 1 if rank in caused else 0,
        )
        for rank, known in sorted(state.ranks.items())
    }


def _rows(shown: Mapping[int, _Shown]) -> list[tuple[int, ...]]:
    """Return the ranks of each row: ranks that are alike share one, as finely as there is room for.

    Last lines keep ranks apart only if that takes very few rows: they stand in the output, too.
    """

    def ends(each: _Shown) -> tuple[Hashable, ...]:
        return each.known.state, each.why

    peaks = levels_of({rank: each.known.peak_gpu_memory for rank, each in shown.items()})

    def differs(each: _Shown) -> tuple[Hashable, ...]:
        return (*ends(each), each.host, peaks[each.known.rank])

    levels: tuple[tuple[Callable[[_Shown], Hashable], int], ...] = (
        (lambda each: (*differs(each), each.value, each.last), _ROWS_BY_LINE),
        (lambda each: (*differs(each), each.value), MOST_ROWS),
        (differs, MOST_ROWS),
        (ends, MOST_ROWS),
    )
    rows = finest(({rank: key(each) for rank, each in shown.items()}, most) for key, most in levels)
    # Where each rank has its row, they keep their order; else what failed comes first.
    return rows if len(rows) == len(shown) else sorted(rows, key=lambda row: shown[row[0]].after_failures)


def _table(shown: Mapping[int, _Shown], rows: Sequence[tuple[int, ...]]) -> str:
    """Return a row for ranks that are alike; below, where they differ in what it shows, one for each rank."""
    content = _rows_of_cells([_cells([shown[rank] for rank in row]) for row in rows[:MOST_ROWS]])
    more = rows[MOST_ROWS:]
    if more:
        cells = [_cells([shown[rank] for rank in row], few=False) for row in more[:_ROWS]]
        left_out = sum(map(len, more[_ROWS:]))
        note = f"<div>… {left_out} more, see result.ranks …</div>" if left_out else ""
        title = f"{sum(map(len, more))} more ranks"
        content += markup.details(title, _rows_of_cells(cells, few=False) + note, opened=False)
    each_rank = _each_rank(shown, rows)
    if each_rank:
        counts = Counter(each.known.state for each in shown.values())
        words = ", ".join(f"{counts[word]} {markup.state(word)}" for word in State if counts[word])
        content += markup.details(f"{len(shown)} ranks: {words}", each_rank, opened=False)
    return content


def _each_rank(shown: Mapping[int, _Shown], rows: Sequence[tuple[int, ...]]) -> str:
    """Return a row for each rank where the shared rows hide something; of many ranks only their numbers."""
    if len(shown) <= _ROWS:
        differ = any(_differs([shown[rank] for rank in row]) for row in rows)
        every = [_cells([each], few=False) for each in shown.values()]
        return _rows_of_cells(every, few=False) if differ else ""
    scattered = [row for row in rows[:MOST_ROWS] if not is_whole(row)]
    limit = _NUMBERS_COST // max(len(scattered), 1)
    return "".join(
        note(f"{shown[row[0]].known.state}: {clipped(format_ranks(row), limit)}") for row in scattered
    )


def _rows_of_cells(rows: Sequence[tuple[str, ...]], *, few: bool = True) -> str:
    columns = [index for index in range(len(_COLUMNS)) if index in _ALWAYS or any(row[index] for row in rows)]
    head = _row("th", (_COLUMNS[index] for index in columns), few=few)
    body = "".join(_row("td", (row[index] for index in columns), few=few) for row in rows)
    return f'<table style="{markup.TABLE}"><thead>{head}</thead><tbody>{body}</tbody></table>'


def _row(tag: str, cells: Iterable[str], *, few: bool) -> str:

    def style(number: int, cell: str) -> str:
        narrow = tag == "th" or (number < _NARROW_COLUMNS and "<wbr>" not in cell)
        return (_NARROW_CELL if narrow else _CELL) if few else _SMALL_CELL

    return markup.row(tag, ((style(number, cell), cell) for number, cell in enumerate(cells)))


def _cells(ranks: Sequence[_Shown], *, few: bool = True) -> tuple[str, ...]:
    """Return the cells of a row in the order of `_COLUMNS`: what its ranks have in common, else a range."""
    known, why = [each.known for each in ranks], ranks[0].failure
    hosts = {each.host for each in ranks}
    where = f"{len(hosts)} hosts" if len(hosts) > 1 else ranks[0].host
    # A column of its own would be empty for all others.
    failure = f"on {where}: {why}" if where and why else why
    text = markup.code(clipped(failure, _CELL_COST), styled=few)
    values = {each.value for each in ranks}
    if len(values) > 1:
        value = f"<em>{len(values)} values, below</em>"
    elif known[0].value_html:
        value = "(below)"
    else:
        value = markup.code(short_value(known[0].value_text), styled=few)
    lines = {each.last for each in ranks}
    last = f"<em>{len(lines)} different</em>" if len(lines) > 1 else markup.code(ranks[0].last, styled=few)
    name = label([each.rank for each in known])
    return (
        name if len(name) <= _NARROW_LABEL else name.replace(",", ",<wbr>"),
        markup.escaped(clipped(devices(plain(each.device) for each in known), _CELL_COST)),
        markup.state(known[0].state),
        sizes(each.peak_gpu_memory for each in known).replace(" ", "\u00a0"),
        last,
        value,
        f'<div style="{_LEAST_WIDTH}">{text}</div>' if few and failure else text,
    )


def _differs(ranks: Sequence[_Shown]) -> bool:
    """Return whether a row's ranks are not all that it says of them."""
    first = _cells([ranks[0]], few=False)[1:]
    return not is_whole([each.known.rank for each in ranks]) or any(
        _cells([each], few=False)[1:] != first for each in ranks[1:]
    )


def short_value(text: str) -> str:
    """Return a value in one line, numbers with the digits that a reader compares: `result` has all."""
    first, newline, _ = text.strip().partition("\n")
    first = _fewer_digits(plain(first))
    return clipped(f"{first.rstrip()} …" if newline else first, _SHORT_CELL_COST)


def _fewer_digits(text: str) -> str:
    """Return text with seven significant digits of each number in it, also within a container.

    >>> _fewer_digits("{'loss': -0.30000000000000004, 'of': '0.30000000000000004', 'z': (1.0000000298+2j)}")
    "{'loss': -0.3, 'of': '0.30000000000000004', 'z': (1+2j)}"
    """
    return _LONG_NUMBERS.sub(lambda found: f"{float(found[2]):.{_DIGITS}g}" if found[2] else found[0], text)


def _values(shown: Mapping[int, _Shown], rows: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Yield the values that the table does not show, and peaks that differ within a row of many ranks."""
    values = {rank: each.value for rank, each in shown.items() if any(each.value)}
    differ = any(len({shown[rank].value for rank in row}) > 1 for row in rows)
    yield values_of(values, short=differ)
    peaks = {rank: sizes([each.known.peak_gpu_memory]) for rank, each in shown.items()}
    if len(shown) > _ROWS and any(len({peaks[rank] for rank in row}) > 1 for row in rows):
        found = [(ranks, peak) for peak, ranks in ranks_by_answer(peaks).items() if peak]
        yield markup.details("GPU peak of each rank", _side_by_side_values("", found), opened=False)


def values_of(
    values: Mapping[int, tuple[str, str]], embed: Callable[[str], str] = balanced, *, short: bool = True
) -> str:
    """Return values (text and HTML) by rank, equal ones once: `short` ones side by side, the others in full.

    `embed` returns HTML of a rank as it stands in the page.
    """
    groups = ranks_by_answer(values)
    content = ""
    if short:
        found = [(ranks, short_value(text)) for (text, rich), ranks in groups.items() if not rich]
        content = _side_by_side_values("Values", found)
    long = {
        (text, rich): ranks
        for (text, rich), ranks in groups.items()
        if rich or "\n" in text or cost_of_text(_fewer_digits(text)) > _SHORT_CELL_COST
    }
    full = "".join(_long_values(long, embed))
    if len(long) > _MOST_OPEN:
        title = f"{len(long)} values of {sum(map(len, long.values()))} ranks in full"
        full = markup.details(title, full, opened=False)
    return content + full


def _side_by_side_values(title: str, values: Sequence[tuple[tuple[int, ...], str]]) -> str:
    """Return short texts in columns, each with its ranks; what exceeds a few lines is folded away."""
    if not values:
        return ""
    named = [(label(ranks), text) for ranks, text in values]
    width = max(len(ranks) + len(text) for ranks, text in named) + 3
    room = _LINES_OF_VALUES * max(_CHARACTERS_BESIDE // width, 1)
    drawn, budget = [], summary.PART_BUDGET
    for ranks, text in named:
        drawn.append(f"<span><strong>{ranks}</strong>: {markup.code(text, styled=False)}</span> ")
        budget -= len(drawn[-1].encode("utf-8", "replace"))
        if budget < 0:
            break
    style = f"display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,{width}ch),1fr))"
    opened, rest = (f'<div style="{style}">{"".join(part)}</div>' for part in (drawn[:room], drawn[room:]))
    content = f"<div>{title}:</div>{opened}" if title else opened
    if len(drawn) > room:
        left_out = len(named) - len(drawn)
        note = f"<div>… {left_out} more, see result.ranks …</div>" if left_out else ""
        content += markup.details(f"{len(named) - room} more", rest + note, opened=False)
    return f'<div style="margin:4px 0">{content}</div>'


def _long_values(
    groups: Mapping[tuple[str, str], tuple[int, ...]], embed: Callable[[str], str]
) -> Iterator[str]:
    costs = (cost_of_text(rich) or cost_of_text(text) for text, rich in groups)
    limit = fair_limit(costs, summary.PART_BUDGET)
    for (text, rich), ranks in groups.items():
        if rich and cost_of_text(rich) <= limit:
            content = f'<div style="overflow-x:auto">{embed(rich)}</div>'
        else:
            content = markup.pre(markup.escaped(shortened(text, limit)))
        opened = len(groups) <= _MOST_OPEN and cost_of_text(text) <= _VALUE_OPEN
        yield markup.details(f"Value of {format_ranks(ranks)}", content, opened=opened)


def _outputs(outputs: Sequence[Folded], budget: int) -> str:
    lines = sum(cost_of_line(item) for each in outputs for item in each.items if isinstance(item, Line))
    outputs, taken = _with_displays(outputs, budget - min(max(lines, summary.PART_BUDGET), LINES_BUDGET))

    def prefix(output: Folded, ranks: tuple[int, ...]) -> int:
        return len(markup.prefix(format_ranks(ranks))) if output.mixed else 0

    shown = fit(outputs, min(budget - taken, LINES_BUDGET), prefix=prefix)
    drawn = [_output(each) for each in shown]
    if len(shown) <= _MOST_OPEN:
        return "".join(drawn)
    # Of many ranks what they printed is folded away; a figure was made to be seen.
    seen = [index for index, each in enumerate(shown) if each.displays][:_MOST_OPEN]
    others = [index for index in range(len(shown)) if index not in seen]
    count = sum(len(shown[index].ranks) for index in others)
    folded_away = "".join(drawn[index] for index in others)
    figures = "".join(drawn[index] for index in seen)
    return figures + markup.details(f"Output of {count} ranks", folded_away, opened=False)


def _output(output: Folded) -> str:
    passages = _passages(output)
    if output.mixed:
        room, shown = _MIXED_OPEN, sum(len(each.rows) if each.mixed else 1 for each in passages)
    else:
        room, shown = _LINES_OPEN, output.lines
    content = ""
    for each in passages:
        blocks = "".join(_blocks(each))
        if not each.mixed and output.mixed:
            blocks = markup.details(_summary(each), blocks, opened=bool(each.displays))
        content += blocks
    return markup.details(_summary(output), content, opened=shown <= room or bool(output.displays))


def _passages(output: Folded) -> list[Folded]:
    """Split a mixed output where many lines in a row are of the same ranks: those can be folded away."""
    if not output.mixed:
        return [output]
    runs = [Folded(ranks, tuple(rows)) for ranks, rows in groupby(output.rows, key=lambda row: row.ranks)]
    passages: list[Folded] = []
    for is_long, group in groupby(runs, key=lambda run: len(run.rows) > _LINES_OPEN):
        if is_long:
            passages += group
        else:
            passages.append(replace(output, rows=tuple(row for run in group for row in run.rows)))
    return passages


def _summary(output: Folded) -> str:
    counts = ((output.lines, "line"), (len(output.displays), "display"))
    parts = ", ".join(plural(count, noun) for count, noun in counts if count)
    return f"Output of {format_ranks(output.ranks)} ({parts})"


def _with_displays(outputs: Sequence[Folded], budget: int) -> tuple[list[Folded], int]:
    """Replace displays that are text, or exceed the budget, with lines; return what the rest takes.

    Every rank's first display comes before any rank's second one, so that no rank is without.
    """
    rows: list[list[list[Written]]] = [[[row] for row in output.rows] for output in outputs]
    taken = 0
    for order, number, index in sorted(_displays(outputs)):
        row = outputs[number].rows[index]
        assert isinstance(row.item, Display)  # noqa: S101 - chosen above
        cost = _cost_of_display(row.item, budget - taken)
        if cost is not None and taken + cost <= budget:
            taken += cost
            continue
        note = f"… {kinds(row.item)} left out, see result.ranks[{row.ranks[0]}].displays[{order}] …"
        rows[number][index] = display_rows(row.item, row.ranks, note if cost is not None else "")
    return [
        replace(output, rows=tuple(row for group in groups for row in group))
        for output, groups in zip(outputs, rows, strict=True)
    ], taken


def _displays(outputs: Sequence[Folded]) -> Iterator[tuple[int, int, int]]:
    """Yield of each display its number among those of its lowest rank, its output and its place there."""
    for number, output in enumerate(outputs):
        seen: Counter[int] = Counter()
        for index, row in enumerate(output.rows):
            if isinstance(row.item, Display):
                yield seen[row.ranks[0]], number, index
                seen.update(row.ranks)


def _cost_of_display(display: Display, budget: int) -> int | None:
    """Return the bytes of a display as HTML, None if it is only text; large ones are only estimated."""
    raw = sum(
        len(data) for kind, data in display.data.items() if isinstance(data, str) and kind != "text/plain"
    )
    if raw > 4 * max(budget, 0) + _ELEMENT_COST:
        return raw
    content = embedded(display)
    return None if content is None else cost_of_html(content) + _ELEMENT_COST


def _blocks(output: Folded) -> Iterator[str]:
    """Yield the output in order: a block for lines that follow each other, an element for a display."""
    errors = only_errors(output)
    every = {row.ranks for row in output.rows}
    named = {ranks: markup.prefix(format_ranks(ranks)) if output.mixed else "" for ranks in every}
    for is_line, group in groupby(output.rows, key=lambda row: isinstance(row.item, Line)):
        rows = list(group)
        if is_line:
            lines = ((named[row.ranks], row.item) for row in rows if isinstance(row.item, Line))
            yield markup.pre(_lines_of(lines))
            continue
        for ranks, item in ((row.ranks, row.item) for row in rows):
            match item:
                case Omission():
                    note = omission_text(item, ranks[0], errors=ranks in errors)
                    yield f"<div>{named[ranks]}<em>{markup.escaped(note)}</em></div>"
                case Display():
                    label = f"<div>{named[ranks]}</div>" if named[ranks] else ""
                    yield f'<div style="margin:4px 0">{label}{embedded(item) or ""}</div>'


def _lines_of(shown: Iterable[tuple[str, Line]]) -> str:
    """Return lines with their colours, each after a prefix that is HTML, for use in a `pre`."""
    return "\n".join(before + line_html(line) for before, line in shown)


def line_html(line: Line) -> str:
    """Return a line with its colours; what was written to stderr is marked."""
    content = "".join(_run(style, text) for style, text in line.runs)
    if line.stream is Stream.STDERR and content:
        # Where styles are dropped it is slanted.
        return f'<em title="stderr" style="{STDERR}">{content}</em>'
    return content


def _run(style: int, text: str) -> str:
    if style == PLAIN:
        return markup.escaped(text)
    content = markup.escaped(text)
    for flag, tag in _TAGS.items():
        content = f"<{tag}>{content}</{tag}>" if style & flag else content
    return (
        f'<span style="{markup.color(_COLORS[style & COLOR])}">{content}</span>' if style & COLOR else content
    )
