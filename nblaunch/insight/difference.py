"""`Difference`: what a comparison of ranks has found, as a report to read.

A difference is a finding, and no error. Whatever ranks say of their objects (paths, types, values) is text
of theirs: bounded where it is made, escaped where it becomes HTML.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nblaunch.insight import markup
from nblaunch.protocol.reports import format_ranks, plural

_GROUPS_SHOWN = 8
_LACKING = "only on "
_CELL = "text-align:left;vertical-align:top;padding:1px 12px 1px 0"
_LEAST_WIDTHS = (";min-width:4em", "", "")
"""A name may break anywhere: on a narrow page it would be one character wide."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What was found of one object, or of one part of the surroundings.

    `name` is what was asked for. `path` is the first part that differs, `""` if all ranks are equal:
    `model.layers.3.weight[17, 4]`. `what` says in words how ranks differ there. `groups` are the ranks that
    agree with one another at this path, of a tensor or an array in all of its elements; that of the lowest
    rank is first. `shown` is for each group what it has there.

    Of a tensor or an array: `elements` is how many it has, `differing` how many of these differ, and
    `largest` the largest absolute difference between any two ranks, at `largest_at`. With `exact` false only
    a part was looked at: `differing` and `largest` are then lower bounds. `largest` is NaN where one rank has
    NaN and another has not, and None where a difference has no size.

    `notes` say what was left out.
    """

    name: str
    path: str = ""
    what: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    shown: tuple[str, ...] = ()
    elements: int | None = None
    differing: int | None = None
    largest: float | None = None
    largest_at: str = ""
    exact: bool = True
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all ranks have the same."""
        return not self.what

    @property
    def headline(self) -> str:
        """What was found, in one line."""
        if self.equal:
            return "equal on all ranks"
        return ". ".join(filter(None, (f"{self.path}: {self.what}", self.partition)))

    @property
    def partition(self) -> str:
        """Which ranks agree with which.

        >>> Compared("x", "x[3]", "values differ", ((0, 1, 2, 4), (3,))).partition
        'ranks 0-2,4 agree; rank 3 differs'
        """
        if self.what.startswith(_LACKING):
            return ""
        if all(len(group) == 1 for group in self.groups):
            ranks = [rank for group in self.groups for rank in group]
            alone = f"{format_ranks(ranks)} differ"
            return "" if len(ranks) < 2 else alone if len(ranks) == 2 else f"{alone}, all from one another"  # noqa: PLR2004
        largest = max(self.groups, key=len)
        others = [group for group in self.groups if group is not largest]
        parts = [f"{format_ranks(largest)} agree"]
        for group in others[:_GROUPS_SHOWN]:
            words = "differs" if len(group) == 1 else "agree with one another"
            parts.append(f"{format_ranks(group)} {words}")
        if len(others) > _GROUPS_SHOWN:
            parts.append(f"{plural(len(others) - _GROUPS_SHOWN, 'more group')}")
        return "; ".join(parts)

    @property
    def details(self) -> tuple[str, ...]:
        """What each group has, how large the difference is, and what was left out: a line each."""
        lines = []
        if self.largest is not None:
            bound = "" if self.exact else "at least "
            lines.append(f"largest difference: {bound}{self.largest:.6g} at {self.largest_at}")
        if self.differing is not None and self.elements is not None:
            bound = "" if self.exact else "at least "
            lines.append(f"elements that differ: {bound}{self.differing} of {self.elements}")
        for group, text in list(zip(self.groups, self.shown, strict=False))[:_GROUPS_SHOWN]:
            if text:
                lines.append(f"{format_ranks(group)}: {text}")
        if len(self.groups) > _GROUPS_SHOWN:
            lines.append(f"… {plural(len(self.groups) - _GROUPS_SHOWN, 'more group')} …")
        return (*lines, *(f"note: {note}" for note in self.notes))


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """How the ranks of a run differ in some objects; the same report on every rank. True if they differ.

    `rows` has a `Compared` for each name that was asked for, and of the surroundings (`env=True`) one for
    each part that differs. `ranks` are those that were compared, and `moved` is how many bytes they sent.

    >>> found = Difference((0, 1), (Compared("x"),))
    >>> bool(found), found.equal
    (False, True)
    >>> print(found)
    x: equal on ranks 0-1
    """

    ranks: tuple[int, ...]
    rows: tuple[Compared, ...]
    moved: int = 0

    @property
    def equal(self) -> bool:
        """Whether all ranks have the same."""
        return all(row.equal for row in self.rows)

    def __bool__(self) -> bool:
        """Whether there is a difference."""
        return not self.equal

    def __getitem__(self, name: str) -> Compared:
        """Return what was found of one name. Raises `KeyError` for one that was not asked for."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Compared]:
        """Return the rows in the order in which they were asked for."""
        return iter(self.rows)

    @property
    def first(self) -> Compared | None:
        """The first row that differs; None if all are equal."""
        return next((row for row in self.rows if not row.equal), None)

    def __str__(self) -> str:
        """Return the whole report as text; the same for the same objects."""
        lines = []
        for row in self.rows:
            lines.append(f"{row.name}: {self._words(row)}")
            lines += [f"    {line}" for line in row.details]
        return "\n".join(lines)

    def _words(self, row: Compared) -> str:
        if row.equal:
            return f"equal on {format_ranks(self.ranks)}"
        # A path that says no more than the name is not repeated.
        return row.headline if row.path != row.name else row.headline.removeprefix(f"{row.path}: ")

    def __repr__(self) -> str:
        """Return the same text: a prompt shows it."""
        return str(self)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001 - IPython's own protocol
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show a table in a notebook (an IPython protocol); no script, no style sheet."""
        rows = "".join(self._html_row(row) for row in self.rows)
        ranks = markup.escaped(format_ranks(self.ranks))
        table = f'<table style="border-collapse:collapse;font-size:inherit">{rows}</table>'
        return f"<div>compared: {ranks}</div>{table}"

    def _html_row(self, row: Compared) -> str:
        colour, sign, word = (markup.GREEN, "✓", "equal") if row.equal else (markup.RED, "✗", "differs")
        style = f"{markup.color(colour)};white-space:nowrap"
        cells = [
            markup.code(row.name),
            f'<span style="{style}">{sign} {word}</span>',
            "".join(f"<div>{part}</div>" for part in self._html_parts(row)),
        ]
        parts = zip(_LEAST_WIDTHS, cells, strict=True)
        return markup.row("td", ((f"{_CELL}{least}", cell) for least, cell in parts))

    def _html_parts(self, row: Compared) -> Iterator[str]:
        if not row.equal:
            where = f"<strong>{markup.code(row.path)}</strong>: " if row.path != row.name else ""
            if row.what != "differs":  # the cell beside it says so
                yield f"{where}{markup.escaped(row.what)}"
            if row.partition:
                yield markup.escaped(row.partition)
        for line in row.details:
            yield f'<span style="opacity:.85">{markup.code(line)}</span>'
