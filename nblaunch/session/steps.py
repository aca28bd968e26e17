"""Whether interrupted ranks are in a long step on their GPUs, or wait for a rank that does not come.

A rank on a GPU waits in any call that needs a result, `.item()` for one, and a step may take seconds. It
takes more than one look to tell a long step from a stuck one, and an abort costs all groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nblaunch._protocol import Collective, Where
from nblaunch._state import RunState
from nblaunch.diagnose.hang import difference_of

# How long all GPUs may do nothing but one collective, in which all of its ranks are.
_STEP_SECONDS = 30.0
# A collective ends within milliseconds of the last of its ranks, and NCCL's watchdog notes it within 0.1 s.
_LOOK_AGAIN_SECONDS = 0.2


class Steps:
    """Looks at the same ranks, one time after the other."""

    def __init__(self) -> None:
        """Begin without a look."""
        self._done: Mapping[int, tuple[int, ...]] | None = None
        self._since = 0.0

    def stuck(self, answers: Mapping[int, Where], state: RunState, now: float, grace: float) -> bool:
        """Return whether the ranks wait for something that will not come; `state` is that of the job."""
        done = {rank: answer.done for rank, answer in answers.items()}
        if done != self._done:
            self._done, self._since = done, now
        unmoved = now - self._since
        under_way, absent = _looked_at(answers)
        if under_way:
            return unmoved >= max(_STEP_SECONDS, grace)
        if any(rank not in state.ranks or state.ranks[rank].state.final for rank in absent):
            return True
        idle = [
            rank
            for rank, known in state.ranks.items()
            if not known.state.final
            and rank in answers
            and not (answers[rank].inside or answers[rank].pending)
        ]
        # A rank that computes has not seen the interrupt yet: that is soon, or it is not what is waited for.
        return unmoved >= (grace / 2 if idle or not absent else _LOOK_AGAIN_SECONDS)


def _looked_at(answers: Mapping[int, Where]) -> tuple[bool, set[int]]:
    """Return whether a collective is under way that all of its ranks are in, and who is missing in others."""
    under_way, absent = False, set[int]()
    for first in _open(answers):
        members = first.ranks or tuple(answers)
        begun = {rank: each for rank in members if (each := _same(answers.get(rank), first)) is not None}
        missing = set(members) - begun.keys()
        if missing or difference_of(begun) is not None:
            absent |= missing
        else:
            under_way = True
    return under_way, absent


def _open(answers: Mapping[int, Where]) -> Iterator[Collective]:
    for answer in answers.values():
        yield from (each for each in answer.recent or answer.collectives if not each.completed)


def _same(answer: Where | None, wanted: Collective) -> Collective | None:
    """Return what a rank has begun as the collective of this number."""
    known = () if answer is None else answer.recent or answer.collectives
    return next((each for each in known if each.key == wanted.key and each.sequence == wanted.sequence), None)
