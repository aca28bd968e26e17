"""The hang report: who is where, in which collective, and who has not come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nblaunch._protocol import Collective, FrameRecord, Where
from nblaunch._results import HangReport, StackGroup, format_ranks, in_notebook, not_installed, place

_LIBRARY_WRAPPERS = frozenset({"wrapper", "inner", "__call__", "_call_impl", "_wrapped_call_impl"})


def report(
    answers: Mapping[int, Where],
    *,
    silent: Mapping[int, str] | None = None,
    finished: Iterable[int] = (),
) -> HangReport:
    """Put the answers of the ranks together.

    `silent` maps ranks that did not answer in time to what faulthandler could say of them; `finished` are
    ranks that have returned already.
    """
    by_stack: dict[tuple[tuple[str, int, str], ...], list[int]] = {}
    frames: dict[tuple[tuple[str, int, str], ...], tuple[FrameRecord, ...]] = {}
    for rank, answer in sorted(answers.items()):
        key = tuple((frame.filename, frame.line, frame.function) for frame in answer.frames)
        by_stack.setdefault(key, []).append(rank)
        frames[key] = answer.frames
    groups = tuple(
        StackGroup(ranks=tuple(ranks), headline=headline(frames[key]), frames=frames[key])
        for key, ranks in by_stack.items()
    )
    collectives = {rank: answer.collectives for rank, answer in sorted(answers.items())}
    return HangReport(
        groups=groups,
        collectives=collectives,
        findings=tuple(_findings(collectives)),
        silent=dict(silent or {}),
        finished=tuple(sorted(finished)),
    )


def headline(frames: tuple[FrameRecord, ...]) -> str:
    """Say in one line where a stack is: the call, and the user's own line.

    >>> headline((FrameRecord("Cell In[3]", 9, "<module>", "dist.all_reduce(t)"),))
    'at cell line 9: dist.all_reduce(t)'
    """
    own = next(
        (frame for wanted in (in_notebook, not_installed) for frame in reversed(frames) if wanted(frame)),
        None,
    )
    if own is None:
        return f"in {frames[-1].function}" if frames else "not in Python code"
    here = place(own) + (f": {own.source}" if own.source else "")
    below = frames[frames.index(own) + 1 :]
    call = next((frame.function for frame in below if frame.function not in _LIBRARY_WRAPPERS), None)
    return f"in {call}, {here}" if call is not None else f"at {here}"


def _findings(collectives: Mapping[int, tuple[Collective, ...]]) -> Iterable[str]:
    """Compare the ranks' last collectives, group by group."""
    by_group: dict[str, dict[int, Collective]] = {}
    for rank, known in collectives.items():
        for collective in known:
            by_group.setdefault(collective.group, {})[rank] = collective
    default = by_group.get("default_pg")
    if default is not None:
        # A rank that has begun none at all is behind as well.
        for rank in collectives:
            default.setdefault(rank, Collective(group="default_pg", sequence=0, operation=""))
    for last in by_group.values():
        yield from _compare(last)


def _compare(last: Mapping[int, Collective]) -> Iterable[str]:
    newest = max(collective.sequence for collective in last.values())
    ahead = {rank: each for rank, each in last.items() if each.sequence == newest}
    behind = {rank: each for rank, each in last.items() if each.sequence < newest}
    first = next(iter(ahead.values()))
    if behind:
        waiting = [rank for rank, each in ahead.items() if not each.completed]
        if waiting:
            yield (
                f"{format_ranks(waiting)} {_in(waiting)} in {first.operation} #{newest}, which "
                f"{format_ranks(behind)} {'has' if len(behind) == 1 else 'have'} not started"
            )
    for what, values in (
        ("operation", {rank: each.operation for rank, each in ahead.items()}),
        ("shape", {rank: _sizes(each) for rank, each in ahead.items()}),
        ("dtype", {rank: ", ".join(each.dtypes) for rank, each in ahead.items()}),
    ):
        if len(set(values.values())) > 1 and (what != "shape" or _same_shapes_needed(ahead)):
            yield f"collective #{newest} differs in {what}: {_by_value(values)}"
            break


def _same_shapes_needed(ahead: Mapping[int, Collective]) -> bool:
    """Whether ranks must agree on shapes: a scatter or gather has tensors on one rank only."""
    uneven = ("scatter", "gather", "all_to_all", "send", "recv", "coalesced")
    return not any(word in each.operation for each in ahead.values() for word in uneven)


def _in(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _sizes(collective: Collective) -> str:
    return ", ".join(str(list(size)) for size in collective.sizes)


def _by_value(values: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {value}" for value, ranks in groups.items())
