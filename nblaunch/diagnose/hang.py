"""The hang report: where each rank is, in which collective, and which ranks have not started it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nblaunch.diagnose import deadlock
from nblaunch.diagnose.deadlock import Circle, GroupKey, Wait, of_group
from nblaunch.protocol.messages import DEFAULT_GROUP, Collective, Connection, FrameRecord, Where
from nblaunch.protocol.reports import (
    HangReport,
    StackGroup,
    own_frame,
    place,
    ranks_by_answer,
    ranks_do,
    ranks_on,
)

_TRANSFERS_SHOWN = 4
_LIBRARY_WRAPPERS = frozenset({"wrapper", "inner", "__call__", "_call_impl", "_wrapped_call_impl"})


def report(  # noqa: PLR0913 - all that is known of the ranks
    answers: Mapping[int, Where],
    *,
    silent: Mapping[int, str] | None = None,
    finished: Iterable[int] = (),
    finishing: Mapping[int, str] | None = None,
    elsewhere: Mapping[int, str] | None = None,
    hosts: Mapping[int, str] | None = None,
) -> HangReport:
    """Combine the answers of the ranks.

    `silent` maps ranks that did not answer in time to the stack that faulthandler wrote; `finished` are ranks
    that have returned already; `finishing` says what ranks do whose job is done, `elsewhere` where ranks
    without a stack of their own are. `hosts` maps ranks to their hosts; it is empty if there is only one.
    """
    answers, words, hosts = dict(sorted(answers.items())), elsewhere or {}, hosts or {}
    ends = finishing or {}
    stacks = {
        rank: (ends.get(rank), *((frame.filename, frame.line, frame.function) for frame in answer.frames))
        for rank, answer in answers.items()
        if rank not in words
    }
    groups = [
        StackGroup(
            ranks=ranks,
            headline=_finishing(ends[ranks[-1]], one) if ranks[-1] in ends else _where(one),
            frames=one.frames,
            importing=one.importing,
        )
        for ranks in ranks_by_answer(stacks).values()
        for one in (answers[ranks[-1]],)
    ]
    groups += [
        StackGroup(ranks=ranks, headline=word, frames=()) for word, ranks in ranks_by_answer(words).items()
    ]
    finished = tuple(sorted(finished))
    collectives = {rank: answer.collectives for rank, answer in answers.items()}
    recent = {rank: answer.recent or answer.collectives for rank, answer in answers.items()}
    missing = dict.fromkeys(finished, "had finished") | dict.fromkeys(silent or (), "gave no answer")
    waiting = deadlock.waits(answers, finished)
    circles = deadlock.circles(waiting)
    return HangReport(
        groups=tuple(sorted(groups, key=lambda group: group.ranks)),
        collectives=collectives,
        findings=(
            *(deadlock.described(circle, answers, hosts) for circle in circles),
            *_differences(recent, hosts),
            *_absences(collectives, circles, missing, hosts),
            *_transfers(waiting, circles, missing, hosts),
        ),
        silent=dict(silent or {}),
        finished=finished,
        hosts=hosts,
        deadlocks=tuple(tuple(sorted(circle.ranks)) for circle in circles),
    )


def _where(answer: Where) -> str:
    """Return in one line where a rank is: the call, and the user's own line.

    >>> _where(Where(rank=0, frames=(FrameRecord("Cell In[3]", 9, "<module>", "dist.all_reduce(t)"),)))
    'at cell line 9: dist.all_reduce(t)'
    """
    return f"importing {_place(answer.frames)}" if answer.importing else _place(answer.frames)


def _finishing(what: str, answer: Where) -> str:
    return f"finishing: {what}{f', {_place(answer.frames)}' if own_frame(answer.frames) else ''}"


def _place(frames: tuple[FrameRecord, ...]) -> str:
    own = own_frame(frames)
    if own is None:
        return f"in {frames[-1].function}" if frames else "outside the job"
    here = place(own) + (f": {own.source}" if own.source else "")
    below = frames[frames.index(own) + 1 :]
    call = next((frame.function for frame in below if frame.function not in _LIBRARY_WRAPPERS), None)
    return f"in {call}, {here}" if call is not None else f"at {here}"


def _differences(recent: Mapping[int, tuple[Collective, ...]], hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield for each group the first collective in which its ranks disagree."""
    together: dict[tuple[GroupKey, int], dict[int, Collective]] = {}
    for rank, known in recent.items():
        for collective in known:
            together.setdefault((collective.key, collective.sequence), {})[rank] = collective
    differing = set()
    for (key, sequence), ranks in sorted(together.items()):
        difference = difference_of(ranks, hosts) if key not in differing else None
        if difference is not None:
            differing.add(key)
            yield f"collective #{sequence}{of_group(key)} differs in {difference}"


def difference_of(ranks: Mapping[int, Collective], hosts: Mapping[int, str] | None = None) -> str | None:
    """Return in what one collective differs from rank to rank; None if it does not."""
    hosts = hosts or {}
    even = {rank: each for rank, each in ranks.items() if _same_on_all_ranks(each)}
    for what, values in (
        ("operation", {rank: each.operation for rank, each in ranks.items()}),
        ("shape", {rank: ", ".join(str(list(size)) for size in each.sizes) for rank, each in even.items()}),
        ("dtype", {rank: ", ".join(each.dtypes) for rank, each in even.items()}),
    ):
        found = ranks_by_answer(values)
        if len(found) > 1:
            return f"{what}: {'; '.join(f'{ranks_on(who, hosts)}: {value}' for value, who in found.items())}"
    return None


def _absences(
    collectives: Mapping[int, tuple[Collective, ...]],
    circles: Iterable[Circle],
    missing: Mapping[int, str],
    hosts: Mapping[int, str],
) -> Iterator[str]:
    """Yield for each group which ranks wait in a collective that others have not started.

    `missing` says of ranks without an answer what they are: one is named if no other rank can be the reason.
    """
    for key, last in sorted(by_group(collectives).items()):
        newest = max(collective.sequence for collective in last.values())
        ahead = {rank: each for rank, each in last.items() if each.sequence == newest}
        behind = [rank for rank, each in last.items() if each.sequence < newest]
        waiting = [rank for rank, each in ahead.items() if not each.completed]
        members = ahead[waiting[0]].ranks if waiting else ()
        away = {rank: missing[rank] for rank in missing if rank in members}
        if waiting and (behind or away) and not _is_reported(key, (*waiting, *behind), circles):
            where = f"{ahead[waiting[0]].operation} #{newest}{of_group(key)}"
            late = f"{ranks_do(behind, hosts, 'has', 'have')} not started"
            who = ranks_do(waiting, hosts, "is", "are")
            yield f"{who} in {where}, which {late}" if behind else f"{who} in {where}; {_each(away, hosts)}"


def _transfers(
    waiting: Mapping[int, tuple[Wait, ...]],
    circles: Iterable[Circle],
    missing: Mapping[int, str],
    hosts: Mapping[int, str],
) -> Iterator[str]:
    """Yield which ranks wait for the other end of a send or a receive, or for a group to be formed."""
    found = [
        (wait, ranks)
        for (wait, *others), ranks in ranks_by_answer(waiting).items()
        if not (wait.sequence or others or not wait.absent or _is_reported(wait.group, ranks, circles))
    ]
    # A stage of a pipeline waits for the one before it: the first wait for a rank that does not wait itself.
    found.sort(key=lambda each: each[0].absent <= waiting.keys())
    for wait, ranks in found[:_TRANSFERS_SHOWN]:
        away = {rank: missing[rank] for rank in sorted(wait.absent) if rank in missing}
        why = f"; {_each(away, hosts)}" if away else ""
        who = ranks_do(ranks, hosts, "is", "are")
        wait_for = f"wait{'s' if len(ranks) == 1 else ''} for {ranks_on(wait.absent, hosts)}"
        yield f"{who} in {wait} and {wait_for}{why}"
    if behind := [rank for _, ranks in found[_TRANSFERS_SHOWN:] for rank in ranks]:
        yield f"{ranks_do(behind, hosts, 'waits', 'wait')} in other sends and receives"


def _is_reported(key: GroupKey, ranks: Iterable[int], circles: Iterable[Circle]) -> bool:
    """Return whether a circle says of these ranks that they wait for each other in this group."""
    return any(key in circle.keys and circle.ranks.issuperset(ranks) for circle in circles)


def _each(words: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    return ", ".join(f"{ranks_on(ranks, hosts)} {word}" for word, ranks in ranks_by_answer(words).items())


def connections_between(answers: Mapping[int, Where]) -> dict[int, tuple[Connection, ...]]:
    """Return each rank's connections whose other end is another rank's.

    A connection that two ranks both list is theirs; the store's, the hub's and the user's own are not.
    """
    ends = {
        (connection.local, connection.remote): (rank, connection)
        for rank, where in answers.items()
        for connection in where.connections
    }
    found: dict[int, list[Connection]] = {}
    for (local, remote), (rank, connection) in ends.items():
        other = ends.get((remote, local))
        if other is not None and other[0] != rank:
            found.setdefault(rank, []).append(connection)
    return {rank: tuple(each) for rank, each in found.items()}


def by_group(collectives: Mapping[int, tuple[Collective, ...]]) -> dict[GroupKey, dict[int, Collective]]:
    """Return each rank's last collective, group by group; a member without one is at sequence number 0."""
    found: dict[GroupKey, dict[int, Collective]] = {}
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
    """Return whether ranks must agree on the tensors: a scatter or gather takes those of one rank only."""
    uneven = ("scatter", "gather", "all_to_all", "send", "recv", "coalesced")
    return not any(word in collective.operation for word in uneven)
