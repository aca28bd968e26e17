"""The base of the pure machines of groups: a step, messages to ranks, and surveys of ranks."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from nblaunch.protocol.messages import ReportWhere, ToRank, Where

_State = TypeVar("_State", bound=msgspec.Struct)
_Action = TypeVar("_Action")


class Machine(Generic[_State, _Action]):
    """One step of a machine: the state as it changes, and the actions that follow; `now` is monotonic."""

    def __init__(self, state: _State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[_Action] = []

    def act(self, *actions: _Action) -> None:
        self.actions += actions

    def set(self, actions: Iterable[_Action] = (), /, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self.act(*actions)


class Order(enum.Enum):
    """An action without fields."""

    STOP_AGENT = "end the ranks, and the agent with them"
    RESTART_AGENT = "end the ranks, and start others"
    REJOIN_NODES = "have the nodes repeat the rendezvous"
    REGROUP_NODES = "form the group again from the remaining ranks and those of new nodes"
    SKIP_GRACE = "kill ranks that are being ended"
    KEEP_PAYLOAD = "remember that the whole payload is on every rank"
    CLOSE_GROUP = "release all that the group holds; precedes the end of its job, at which the caller goes on"
    FINISH_JOB = "end the job: its result can be made"
    FORGET_VALUES = "release the values of this attempt: the next one begins the job again"


class Send(msgspec.Struct, frozen=True):
    """Send a message to one rank."""

    rank: int
    message: ToRank


Sends = tuple[Send, ...]


class LocateRanks(msgspec.Struct, frozen=True):
    """Find out where all ranks are, or these ones; they have `seconds` for an answer."""

    number: int
    seconds: float
    ranks: Collection[int] | None = None


class RestartAsked(msgspec.Struct, frozen=True):
    """The ranks of a persistent group are to be replaced."""

    reason: str


class Survey(msgspec.Struct, frozen=True):
    """Ranks that were asked where they are: the missing ones, and the answers of the others."""

    missing: frozenset[int]
    until: float = float("inf")
    answers: Mapping[int, Where] = {}

    @classmethod
    def begin(cls, ranks: Iterable[int], until: float = float("inf")) -> tuple[Survey, Sends]:
        survey = cls(frozenset(ranks), until)
        return survey, tuple(Send(rank, ReportWhere()) for rank in sorted(survey.missing))

    def with_answer(self, answer: Where) -> Survey:
        return Survey(self.missing - {answer.rank}, self.until, {**self.answers, answer.rank: answer})

    def over(self, now: float) -> bool:
        """Whether all ranks have answered, or have had the time to."""
        return not self.missing or now >= self.until
