"""A profile as HTML without scripts: the steps with the latest stragglers, and a strip of time for each rank.

Nothing in it depends on the page's theme: text has the page's own colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from nblaunch.insight import markup, svg
from nblaunch.insight.intervals import Interval, clipped
from nblaunch.insight.profile import Profile, short_time
from nblaunch.protocol.reports import plural

MOST_STEPS = 10
"""In the table; the others are in `result.profile.summary`."""
MOST_STRIPS = 16
_DRAWN_STEPS = 3
_KINDS = ("compute", "communication", "waiting")
_COLOURS = {
    "compute": svg.COLOURS[0],
    "communication": svg.COLOURS[2],
    "waiting": svg.COLOURS[1],
    "idle": "#9aa0a666",
}
_WIDTH, _LABEL, _STRIP, _GAP, _TOP, _BOTTOM = 760.0, 64.0, 16.0, 5.0, 38.0, 36.0
_COLUMNS = 450
_LINES = 6
_CELL = "text-align:right;padding:1px 10px 1px 0;white-space:nowrap"
_TEXT_CELL = "text-align:left;padding:1px 10px 1px 0;min-width:14em"
_NOTE = (
    "Milliseconds, the mean of the ranks. Idle is time outside of operators and collectives: Python, data "
    "loading, sleep."
)
_STRAGGLER = 2


def render(profile: Profile) -> str:
    """Return the table, the drawing, and what may be wrong, as HTML; empty for a profile of nothing."""
    parts = [_table(profile), _drawing(profile), _clocks(profile)]
    parts += [f"<div>{markup.escaped(line)}</div>" for line in profile.warnings[:_LINES]]
    return "".join(parts)


# The table: mean times of the ranks, and the straggler.


def _table(profile: Profile) -> str:
    late = {step: each.seconds for step, each in profile.straggler.items()}
    shown = sorted(sorted(profile.steps, key=lambda step: (-late.get(step, 0.0), step))[:MOST_STEPS])
    if not shown:
        return ""
    # The straggler before the details: on a narrow page it is in sight.
    head = ("step", "time", "straggler", "compute", "communication", "overlap", "waiting", "idle")
    rows = [_row("th", head)]
    rows += [_row("td", _cells(profile, step)) for step in shown]
    left = len(profile.steps) - len(shown)
    below = f"<div>… {plural(left, 'step')} more in result.profile.summary …</div>" if left else ""
    note = f"<div>{_NOTE}</div>"
    return f'<table style="{markup.TABLE}">{"".join(rows)}</table>{below}{note}'


def _cells(profile: Profile, step: int) -> tuple[str, ...]:
    rows = [row for row in profile.summary if row.step == step]
    names = ("seconds", "compute", "communication", "overlap", "waiting", "idle")
    means = (sum(getattr(row, name) for row in rows) / max(len(rows), 1) * 1e3 for name in names)
    seconds, *parts = (f"{mean:.2f}" for mean in means)
    late = profile.straggler.get(step)
    straggler = ""
    if late is not None:
        text = f"{late.seconds * 1e3:.2f} ms late at {late.operation}, after {late.before}"
        straggler = f"<strong>rank {late.rank}</strong> {markup.escaped(text)}"
    return (str(step), seconds, straggler, *parts)


def _row(tag: str, cells: Sequence[str]) -> str:
    styles = (_TEXT_CELL if number == _STRAGGLER else _CELL for number in range(len(cells)))
    return markup.row(tag, zip(styles, cells, strict=True))


# The drawing: the step with the latest straggler, and those beside it.


def _drawing(profile: Profile) -> str:
    steps = _drawn_steps(profile)
    marks = {rank: [each for each in profile.steps_of(rank) if each[0] in steps] for rank in profile.ranks}
    marks = {rank: own for rank, own in marks.items() if own}
    if not marks:
        return ""
    begin = min(own[0][1] for own in marks.values())
    end = max(own[-1][2] for own in marks.values())
    late = {profile.straggler[step].rank for step in steps if step in profile.straggler}
    ranks = sorted(sorted(marks, key=lambda rank: (rank not in late, rank))[:MOST_STRIPS])
    if end <= begin:
        return ""
    height = _TOP + len(ranks) * (_STRIP + _GAP) + _BOTTOM
    parts = [*_legend(), *_axis(begin, end, height)]
    for number, rank in enumerate(ranks):
        y = _TOP + number * (_STRIP + _GAP)
        bold = 'font-weight="bold"' if rank in late else ""
        parts.append(svg.text(_LABEL - 6, y + _STRIP - 4, f"rank {rank}", anchor="end", more=bold))
        parts += _strip(profile.intervals(rank), begin, end, y)
        parts += _borders(marks[rank], begin, end, y)
    title = f"Timeline of {'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}"
    left = len(marks) - len(ranks)
    note = f"{left} more ranks are not drawn." if left else ""
    drawn = svg.document(_WIDTH, height, parts, label=f"{title}: a strip for each rank")
    return f"<div>{title}. {note}</div>{drawn}"


def _drawn_steps(profile: Profile) -> list[int]:
    """Return the step with the latest straggler, and the ones around it."""
    known = list(profile.steps)
    if not known:
        return []
    late = {step: each.seconds for step, each in profile.straggler.items()}
    worst = max(known, key=lambda step: late.get(step, 0.0))
    first = max(min(known.index(worst) - 1, len(known) - _DRAWN_STEPS), 0)
    return known[first : first + _DRAWN_STEPS]


def _legend() -> Iterator[str]:
    x = _LABEL
    for kind, colour in _COLOURS.items():
        yield svg.rectangle(x, 4, 11, 11, colour)
        yield svg.text(x + 16, 14, kind)
        x += 34 + 6.5 * len(kind)


def _axis(begin: int, end: int, height: float) -> Iterator[str]:
    bottom = height - _BOTTOM
    for tick in svg.ticks(0, (end - begin) / 1e6, 7):
        x = _place(begin + round(tick * 1e6), begin, end)
        yield svg.line(x, _TOP - 4, x, bottom, faint=True)
        yield svg.text(x, bottom + 14, svg.number(tick), anchor="middle")
    yield svg.text(_WIDTH - 4, bottom + 28, "ms", anchor="end")


def _place(moment: int, begin: int, end: int) -> float:
    return _LABEL + (_WIDTH - _LABEL - 8) * (moment - begin) / (end - begin)


def _strip(found: dict[str, list[Interval]], begin: int, end: int, y: float) -> list[str]:
    """Return one path for each kind: of what fills most of a column, that kind has the column."""
    width = (end - begin) / _COLUMNS
    shares: dict[str, list[float]] = {
        kind: _shares(clipped(found[kind], begin, end), begin, width) for kind in _KINDS
    }
    columns = [
        max((*_KINDS, "idle"), key=lambda kind: shares[kind][number] if kind in shares else 0.5)
        for number in range(_COLUMNS)
    ]
    drawn = dict.fromkeys(_COLOURS, "")
    first = 0
    for kind, group in groupby(columns):
        last = first + len(list(group))
        left, right = (svg.coordinate(_place(begin + round(n * width), begin, end)) for n in (first, last))
        drawn[kind] += f"M{left} {svg.coordinate(y)}H{right}v{_STRIP:.0f}H{left}Z"
        first = last
    return [f'<path d="{path}" fill="{_COLOURS[kind]}"/>' for kind, path in drawn.items() if path]


def _shares(intervals: Sequence[Interval], begin: int, width: float) -> list[float]:
    """Return which share of each column the intervals fill."""
    shares = [0.0] * _COLUMNS
    for first, last in intervals:
        column = int((first - begin) / width)
        while column < _COLUMNS and begin + column * width < last:
            left, right = begin + column * width, begin + (column + 1) * width
            shares[column] += max(min(last, right) - max(first, left), 0.0) / width
            column += 1
    return shares


def _borders(marks: Sequence[tuple[int, int, int]], begin: int, end: int, y: float) -> Iterator[str]:
    for number, first, _ in marks:
        x = _place(first, begin, end)
        yield svg.line(x, y - 2, x, y + _STRIP + 2)
        if y == _TOP:
            yield svg.text(x + 2, y - 5, f"step {number}", size=10)


def _clocks(profile: Profile) -> str:
    known = [each for each in profile.clock_error.values() if each is not None]
    if not known:
        return ""
    check = profile.clock_check
    ends = ""
    if check.collectives:
        count = plural(check.collectives, "collective")
        ends = f"; {count} ended {short_time(check.spread)} apart on the ranks (median)"
    return f"<div>The clocks of the ranks agree within {short_time(max(known))}{ends}.</div>"
