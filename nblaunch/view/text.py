"""A run as text: the same for the same run, in rank order, equal lines of several ranks folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nblaunch._budget import cost_of_text, fair_limit, shortened
from nblaunch.diagnose.failures import blame
from nblaunch.insight.curves import Curves, curve_lines
from nblaunch.protocol.reports import format_ranks
from nblaunch.protocol.state import RunState
from nblaunch.view import summary
from nblaunch.view.alike import beside, in_columns, named
from nblaunch.view.output import (
    Folded,
    Omission,
    by_rank,
    fit,
    folded,
    omission_text,
    only_errors,
    only_text,
)
from nblaunch.view.screen import Line, plain

TEXT_BUDGET = 130_000
"""Bytes of output in the text form; it is saved beside the HTML, and both together stay below 1 MB."""
_LONGEST_LABEL = 24
_SHORT_VALUE = 40
_VALUE_LINES = 40
"""Of values side by side: those of 160 ranks and more."""


def render_text(
    state: RunState,
    header: summary.Header,
    *,
    outputs: Sequence[Folded] | None = None,
    curves: Curves | None = None,
) -> str:
    """Return the run as text: output, what ranks have logged, values, failures.

    It holds no times and no pids, so that a notebook's saved output can be compared. With several hosts, it
    names those of ranks that failed or hang. `outputs` is `folded(state)`, and `curves` are those of
    `state.metrics`, if the caller has them already.
    """
    shown = folded(state) if outputs is None else outputs
    lines = [*summary.attempt_lines(state), *_output_lines(shown), *_ending_lines(state, curves)]
    lines += summary.hang_lines(state)
    return "\n".join(lines or [_title(state, header)])


def render_output(state: RunState) -> str:
    """Return the output of the ranks, as `render_text` has it above the ending; empty without output."""
    return "\n".join(_output_lines(folded(state)))


def render_ending(state: RunState, header: summary.Header) -> str:
    """Return the part of `render_text` below the output: logged numbers, values and failures."""
    return "\n".join(list(_ending_lines(state)) or [_title(state, header)])


def prefixed(ranks: tuple[int, ...], text: str) -> str:
    """Return `[ranks 0-7] text`, with the prefix on every line.

    >>> prefixed((0,), "loss 3.0")
    '[rank 0] loss 3.0'
    """
    prefix = f"[{format_ranks(ranks)}]"
    return "\n".join(f"{prefix} {line}".rstrip() for line in text.split("\n"))


def labelled(label: str, text: str) -> str:
    r"""Return `label` and `text`, its further lines below its first one, so that columns stay columns.

    >>> print(labelled("rank 0: ", "a\nb"))
    rank 0: a
            b
    """
    if "\n" in text and len(label) > _LONGEST_LABEL:
        return "\n    ".join([label.rstrip(), *text.split("\n")])
    return label + text.replace("\n", "\n" + " " * len(label))


def _output_lines(outputs: Sequence[Folded]) -> Iterator[str]:
    for output in fit(only_text(outputs), TEXT_BUDGET, prefix=lambda _, ranks: len(format_ranks(ranks))):
        errors = only_errors(output)
        for ranks, item in ((row.ranks, row.item) for row in output.rows):
            if isinstance(item, Line):
                yield prefixed(ranks, item.text)
            elif isinstance(item, Omission):
                yield prefixed(ranks, omission_text(item, ranks[0], errors=ranks in errors))


def _ending_lines(state: RunState, curves: Curves | None = None) -> Iterator[str]:
    yield from map(plain, curve_lines(Curves.of(state.metrics) if curves is None else curves))
    yield from _value_lines(state)
    found = blame(state.ranks)
    limit = summary.reason_limit(found)
    for number, cause in enumerate(found.causes):
        label = "also failed" if number else "root cause"
        yield f"{label}: {cause.who}: {summary.why(cause, limit)}"
    yield from summary.consequence_lines(found, limit)
    yield from summary.host_lines(state)
    yield from summary.others_lines(state, found)
    yield from summary.warning_lines(state)
    if state.profile.text:
        yield f"{state.profile.text} (result.profile)"


def _value_lines(state: RunState) -> Iterator[str]:
    """Yield the values, equal ones once; of very many, the first ones, short ones side by side."""
    values = by_rank(state, lambda rank: plain(rank.value_text).rstrip("\n"))
    limit = fair_limit((cost_of_text(value) for _, value in values), summary.PART_BUDGET)
    found = [(f"{named(ranks)}: ", shortened(value, limit)) for ranks, value in values]
    if len(found) <= summary.RANKS_LISTED:
        yield from (labelled(name, value) for name, value in found)
        return
    shown = summary.RANKS_LISTED
    if all("\n" not in value and len(value) <= _SHORT_VALUE for _, value in found):
        entries = [f"{name}{value}" for name, value in found]
        shown = _VALUE_LINES * beside(entries)
        yield from in_columns(entries[:shown], beside(entries))
    else:
        yield from (labelled(name, value) for name, value in found[:shown])
    if shown < len(found):
        yield f"… {len(found) - shown} more values, see result.values …"


def _title(state: RunState, header: summary.Header) -> str:
    return f"{summary.headline(state, header.title, header.backend)}: {state.summary}"
