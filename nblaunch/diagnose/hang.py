"""The hang report: who is where, in which collective, and who has not come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nblaunch.protocol.messages import DEFAULT_GROUP, Collective, FrameRecord, Where
from nblaunch.protocol.reports import HangReport, StackGroup, format_ranks, own_frame, place

_Key = tuple[str, str, tuple[int, ...]]
_LIBRARY_WRAPPERS = frozenset({"wrapper", "inner", "__call__", "_call_impl", "_wrapped_call_impl"})


def report(
    answers: Mapping[int, Where],
    *,
    silent: Mapping[int, str] | None = None,
    finished: Iterable[int] = (),
    elsewhere: Mapping[int, str] | None = None,
) -> HangReport:
    """Put the answers of the ranks together.

    `silent` maps ranks that did not answer in time to what faulthandler could say of them; `finished` are
    ranks that have returned already; `elsewhere` says of ranks without a stack of their own where they are.
    """
    by_stack: dict[tuple[tuple[str, int, str], ...], list[int]] = {}
    frames: dict[tuple[tuple[str, int, str], ...], tuple[FrameRecord, ...]] = {}
    by_word: dict[str, list[int]] = {}
    for rank, word in sorted((elsewhere or {}).items()):
        by_word.setdefault(word, []).append(rank)
    for rank, answer in sorted(answers.items()):
        if rank in (elsewhere or {}):
            continue
        key = tuple((frame.filename, frame.line, frame.function) for frame in answer.frames)
        by_stack.setdefault(key, []).append(rank)
        frames[key] = answer.frames
    groups = [
        StackGroup(ranks=tuple(ranks), headline=headline(frames[key]), frames=frames[key])
        for key, ranks in by_stack.items()
    ]
    groups += [StackGroup(ranks=tuple(ranks), headline=word, frames=()) for word, ranks in by_word.items()]
    collectives = {rank: answer.collectives for rank, answer in sorted(answers.items())}
    recent = {rank: answer.recent or answer.collectives for rank, answer in sorted(answers.items())}
    return HangReport(
        groups=tuple(sorted(groups, key=lambda group: group.ranks)),
        collectives=collectives,
        findings=(*_differences(recent), *_absences(collectives)),
        silent=dict(silent or {}),
        finished=tuple(sorted(finished)),
    )


def headline(frames: tuple[FrameRecord, ...]) -> str:
    """Say in one line where a stack is: the call, and the user's own line.

    >>> headline((FrameRecord("Cell In[3]", 9, "<module>", "dist.all_reduce(t)"),))
    'at cell line 9: dist.all_reduce(t)'
    """
    own = own_frame(frames)
    if own is None:
        return f"in {frames[-1].function}" if frames else "outside the job"
    here = place(own) + (f": {own.source}" if own.source else "")
    below = frames[frames.index(own) + 1 :]
    call = next((frame.function for frame in below if frame.function not in _LIBRARY_WRAPPERS), None)
    return f"in {call}, {here}" if call is not None else f"at {here}"


def _differences(recent: Mapping[int, tuple[Collective, ...]]) -> Iterator[str]:
    """Say of each group in which collective its ranks first disagreed."""
    together: dict[tuple[_Key, int], dict[int, Collective]] = {}
    for rank, known in recent.items():
        for collective in known:
            together.setdefault((collective.key, collective.sequence), {})[rank] = collective
    told = set()
    for (key, sequence), ranks in sorted(together.items()):
        difference = difference_of(ranks) if key not in told else None
        if difference is not None:
            told.add(key)
            yield f"collective #{sequence}{_of(key)} differs in {difference}"


def difference_of(ranks: Mapping[int, Collective]) -> str | None:
    """Say in what one collective differs from rank to rank; None if it does not."""
    for what, values in (
        ("operation", {rank: each.operation for rank, each in ranks.items()}),
        ("shape", {rank: _sizes(each) for rank, each in ranks.items() if _same_on_all_ranks(each)}),
        ("dtype", {rank: ", ".join(each.dtypes) for rank, each in ranks.items() if _same_on_all_ranks(each)}),
    ):
        if len(set(values.values())) > 1:
            return f"{what}: {_by_value(values)}"
    return None


def _absences(collectives: Mapping[int, tuple[Collective, ...]]) -> Iterator[str]:
    """Say of each group who waits in a collective that others have not started."""
    for key, last in sorted(by_group(collectives).items()):
        newest = max(collective.sequence for collective in last.values())
        ahead = {rank: each for rank, each in last.items() if each.sequence == newest}
        behind = [rank for rank, each in last.items() if each.sequence < newest]
        waiting = [rank for rank, each in ahead.items() if not each.completed]
        if behind and waiting:
            yield (
                f"{format_ranks(waiting)} {_in(waiting)} in {ahead[waiting[0]].operation} #{newest}"
                f"{_of(key)}, which {format_ranks(behind)} {'has' if len(behind) == 1 else 'have'} "
                "not started"
            )


def by_group(collectives: Mapping[int, tuple[Collective, ...]]) -> dict[_Key, dict[int, Collective]]:
    """Return the last collective of each rank, group by group; a member that has begun none is at 0."""
    found: dict[_Key, dict[int, Collective]] = {}
    for rank, known in collectives.items():
        for collective in known:
            found.setdefault(collective.key, {})[rank] = collective
    for (backend, group, ranks), last in found.items():
        for rank in collectives:
            if group == DEFAULT_GROUP or rank in ranks:
                none = Collective(group=group, sequence=0, operation="", backend=backend, ranks=ranks)
                last.setdefault(rank, none)
    return found


def _same_on_all_ranks(collective: Collective) -> bool:
    """Whether ranks must agree on the tensors: a scatter or gather takes those of one rank only."""
    uneven = ("scatter", "gather", "all_to_all", "send", "recv", "coalesced")
    return not any(word in collective.operation for word in uneven)


def _of(key: _Key) -> str:
    return "" if key[1] == DEFAULT_GROUP else f" of group {key[1]}"


def _in(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _sizes(collective: Collective) -> str:
    return ", ".join(str(list(size)) for size in collective.sizes)


def _by_value(values: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {value}" for value, ranks in groups.items())
