"""Whether a persistent group is fit for the next job: decided from what its ranks have read, nothing else.

A group that is not fit is formed again, which costs the groups that the program made itself. One that only
seems fit pairs a left-over collective with the next job's, and computes wrong numbers. So without evidence
there is no health: what the collectives did must have been read, from the recorder of the very backend that
the group uses, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nblaunch.protocol.messages import DEFAULT_GROUP, Tally, Where
from nblaunch.protocol.reports import format_ranks, ranks_by_answer

Tallies = Mapping[int, tuple[Tally, ...]]


def uneven(called: Tallies, members: Iterable[int]) -> bool:
    """Return whether ranks of a group have called a different number of operations within a job.

    A rank without a tally has called nothing. gloo counts sends and receives as well, so ranks of a pipeline
    differ there, and only their recorders can tell.

    >>> of = Tally(group="0", title="default_pg", backend="nccl", ranks=(0, 1), called=3)
    >>> uneven({0: (of,)}, [0, 1]), uneven({0: (of,), 1: (of,)}, [0, 1])
    (True, False)
    """
    return any(
        len({by_rank[rank].called if rank in by_rank else 0 for rank in set(members) & set(ranks)}) > 1
        for (_, _, ranks), by_rank in _by_group(called).items()
    )


def unfit(answers: Mapping[int, Where], members: Iterable[int], called: Tallies, *, succeeded: bool) -> str:
    """Return why a group is not fit for the next job, "" if it is.

    `answers` are those of the ranks after a job, in which they have `called` so much. Where the job has
    `succeeded`, what all ranks have called may be under way, and ends by itself; otherwise nothing may.
    """
    members = frozenset(members)
    if missing := members - answers.keys():
        return f"{format_ranks(missing)} did not say what was called"
    if not succeeded and uneven(called, members):
        return "the ranks have called a different number of operations"
    if not succeeded and any(answer.in_backward for answer in answers.values()):
        return "a model was left within its backward pass, which the ranks forget together"
    for key, by_rank in _by_group({rank: answer.tallies for rank, answer in answers.items()}).items():
        one = next(iter(by_rank.values()))
        absent = members & set(key[2]) - by_rank.keys()
        if absent and not succeeded:
            return f"{format_ranks(absent)} no longer has {_words(one)}"
        if why := _unread(by_rank):
            return why
        recorded = {rank: tally.recorded for rank, tally in by_rank.items()}
        if len(set(recorded.values())) > 1:
            return _different(one, recorded)
    for rank, answer in answers.items():
        if answer.pending is None:
            return f"the flight recorder of rank {rank} does not answer"
        if answer.pending and not succeeded:
            return f"rank {rank} has {answer.pending} operations open"
    return ""


def _unread(by_rank: Mapping[int, Tally]) -> str:
    """Return on which rank the collectives of a group were not recorded, "" if on none."""
    for rank, tally in by_rank.items():
        if tally.recorded is None or tally.called is None:
            return f"nothing records what the collectives of {_words(tally)} did on rank {rank}"
        if tally.called and not tally.recorded:
            return (
                f"the flight recorder of rank {rank} is empty after {tally.called} calls in {_words(tally)}"
            )
    return ""


def _by_group(tallies: Tallies) -> dict[tuple[str, str, tuple[int, ...]], dict[int, Tally]]:
    found: dict[tuple[str, str, tuple[int, ...]], dict[int, Tally]] = {}
    for rank, known in sorted(tallies.items()):
        for tally in known:
            found.setdefault(tally.key, {})[rank] = tally
    return found


def _words(tally: Tally) -> str:
    title = "the default group" if tally.title == DEFAULT_GROUP else f"group {tally.title}"
    return f"{title} ({tally.backend})"


def _different(tally: Tally, recorded: Mapping[int, int | None]) -> str:
    found = ranks_by_answer(recorded).items()
    who = ", ".join(f"{format_ranks(ranks)} at #{number}" for number, ranks in found)
    return f"collectives do not match: in {_words(tally)} {who}"
