"""Who waits for whom, over all process groups: which ranks wait for each other in a circle."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nblaunch.protocol.messages import DEFAULT_GROUP, STORE, Collective, Where
from nblaunch.protocol.reports import own_frame, place, ranks_on

GroupKey = tuple[str, str, tuple[int, ...]]
# In these each rank needs all others. A broadcast, a reduce or a gather may lack only one of the absent ones.
_NEEDS_ALL = re.compile("all|reduce_scatter|barrier|new_group|send|recv")
# Each operation of gloo runs by itself. A GPU runs them in the order in which they were queued.
_AT_ONCE = "gloo"
_PARTS_SHOWN = 4
_NUMBERS = {2: "Two", 3: "Three", 4: "Four"}


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that cannot go on without ranks that are not in it.

    `absent` are those that have not begun it, as far as that is known. It needs all of them, or perhaps only
    one of them if `any_will_do`. Sends and receives have no number; theirs is 0.
    """

    group: GroupKey
    operation: str
    sequence: int
    absent: frozenset[int]
    any_will_do: bool = False

    def hopeless(self, stuck: Mapping[int, object]) -> bool:
        """Return whether it lacks a rank that waits without end; `stuck` are all that do."""
        wanted = all if self.any_will_do else any
        return bool(self.absent) and wanted(rank in stuck for rank in self.absent)

    def __str__(self) -> str:
        """Return the operation in words: `all_reduce #2 of group 1`."""
        number = f" #{self.sequence}" if self.sequence else ""
        return f"{self.operation}{number}{of_group(self.group)}"


@dataclass(frozen=True, slots=True)
class CirclePart:
    """The ranks of a circle that are in the same operation, and those of the circle that they wait for."""

    operation: str
    ranks: frozenset[int]
    waits_for: frozenset[int]


@dataclass(frozen=True, slots=True)
class Circle:
    """Ranks that wait for each other. `groups` are the process groups of its collectives."""

    parts: tuple[CirclePart, ...]
    groups: frozenset[str]
    keys: frozenset[GroupKey]

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks in it."""
        return frozenset[int]().union(*(part.ranks for part in self.parts))


def of_group(key: GroupKey) -> str:
    """Return ` of mesh_shard`; a group without a description has torch's number as its name.

    >>> of_group(("gloo", "2", (0, 1)))
    ' of group 2'
    """
    name = key[1]
    if name in (DEFAULT_GROUP, ""):
        return ""
    return f" of group {name}" if name.isdigit() else f" of {name}"


def waits(answers: Mapping[int, Where], finished: Iterable[int] = ()) -> dict[int, tuple[Wait, ...]]:
    """Return the waits of each rank that waits; one where it is known which of several it is.

    `finished` have returned, and come to nothing more. All other ranks that have not answered may.
    """
    newest = {rank: _newest(answer) for rank, answer in answers.items()}
    left = frozenset(finished)
    # Ranks that are in one collective lack the same ranks.
    known: dict[tuple[object, ...], Wait] = {}
    found: dict[int, list[Wait]] = {}
    for rank, answer in sorted(answers.items()):
        for each in answer.waits:
            key = (each.key, each.operation, rank if each.peers else None, _number(each))
            if key not in known:
                known[key] = _wait(rank, each, answers, newest, left)
            found.setdefault(rank, []).append(known[key])
    return {rank: tuple(each) for rank, each in found.items()}


def _wait(
    rank: int,
    operation: Collective,
    answers: Mapping[int, Where],
    newest: Mapping[int, Mapping[GroupKey, int]],
    left: frozenset[int],
) -> Wait:
    peers = operation.peers
    members = peers or frozenset(operation.ranks or answers) - {rank}
    absent = {
        other
        for other in members & answers.keys()
        if not (
            any(_pair(rank, operation, other, each) for each in answers[other].waits)
            if peers
            else _begun(operation, answers[other], newest[other])
        )
    }
    any_will_do = operation.from_any or not _NEEDS_ALL.search(operation.operation)
    if any_will_do or not _number(operation):
        absent |= members - answers.keys() - (left if operation.from_any else frozenset())
    return Wait(operation.key, operation.operation, _number(operation), frozenset(absent), any_will_do)


def _number(operation: Collective) -> int:
    """Return the number by which ranks know an operation as the same one; 0 if it has none."""
    return 0 if operation.peers or operation.backend == STORE else operation.sequence


def _newest(answer: Where) -> dict[GroupKey, int]:
    """Return the number of the last collective that a rank has begun in each group."""
    found: dict[GroupKey, int] = {}
    for each in (*answer.recent, *answer.collectives):
        found[each.key] = max(found.get(each.key, 0), each.sequence)
    return found


def _begun(operation: Collective, answer: Where, newest: Mapping[GroupKey, int]) -> bool:
    """Return whether a rank has begun a collective, and does not wait in an earlier one on its GPU."""
    if operation.backend == STORE:
        return any(each.key == operation.key for each in answer.waits)
    if newest.get(operation.key, 0) < operation.sequence:
        return False
    number = operation.key, operation.sequence
    first = [each for each in answer.waits if each.backend == operation.backend != _AT_ONCE]
    # Sends and receives are numbered for themselves.
    if not first or any(number == (each.key, each.sequence) for each in first if not each.peers):
        return True
    return all(each.completed for each in answer.recent if (each.key, each.sequence) == number)


def _pair(rank: int, one: Collective, other: int, another: Collective) -> bool:
    """Return whether the operations of two ranks are the two ends of one transfer."""
    return (
        (one.key, one.tag) == (another.key, another.tag)
        and (rank in another.sends or rank in another.receives)
        and (other not in one.sends or rank in another.receives)
        and (other not in one.receives or rank in another.sends)
    )


def circles(waiting: Mapping[int, tuple[Wait, ...]]) -> list[Circle]:
    """Return the circles, that of the lowest rank first.

    A rank of which several waits are possible is in one only if none of them can end.
    """
    stuck = _stuck(waiting)
    ranks: dict[Wait, set[int]] = {}
    for rank, each in stuck.items():
        for wait in each:
            ranks.setdefault(wait, set()).add(rank)
    after = {wait: {each for rank in wait.absent if rank in stuck for each in stuck[rank]} for wait in ranks}
    reached = {wait: _reached(wait, after) for wait in after}
    found: list[Circle] = []
    done: set[Wait] = set()
    for wait in ranks:
        if wait in reached[wait] and wait not in done:
            circle = [each for each in ranks if each in reached[wait] and wait in reached[each]]
            done.update(circle)
            found.append(_circle(circle, ranks))
    return found


def _stuck(waiting: Mapping[int, tuple[Wait, ...]]) -> dict[int, tuple[Wait, ...]]:
    """Return the ranks that wait without end: in each wait that is possible they lack another such rank."""
    stuck = dict(sorted(waiting.items()))
    while True:
        freed = [rank for rank, each in stuck.items() if not all(wait.hopeless(stuck) for wait in each)]
        if not freed:
            return stuck
        for rank in freed:
            del stuck[rank]


def _reached(first: Wait, after: Mapping[Wait, set[Wait]]) -> set[Wait]:
    found: set[Wait] = set()
    ahead = [first]
    while ahead:
        new = after[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def _circle(waits_in_it: Sequence[Wait], ranks: Mapping[Wait, set[int]]) -> Circle:
    """Return the circle, one part after the other as they wait for each other."""
    inside = frozenset[int]().union(*(ranks[wait] for wait in waits_in_it))
    named: dict[str, CirclePart] = {}
    for wait in waits_in_it:
        # The parts of a mesh have one name, and their ranks do the same.
        before = named.get(str(wait), CirclePart(str(wait), frozenset(), frozenset()))
        absent = wait.absent & inside
        named[str(wait)] = CirclePart(before.operation, before.ranks | ranks[wait], before.waits_for | absent)
    left = list(named.values())
    parts = [left.pop(0)]
    while left:
        following = next((part for part in left if part.ranks & parts[-1].waits_for), left[0])
        left.remove(following)
        parts.append(following)
    return Circle(
        parts=tuple(parts),
        groups=frozenset(of_group(wait.group) for wait in waits_in_it if wait.sequence),
        keys=frozenset(wait.group for wait in waits_in_it),
    )


def described(circle: Circle, answers: Mapping[int, Where], hosts: Mapping[int, str]) -> str:
    shown = circle.parts[:_PARTS_SHOWN]
    parts = [_part(part, before, hosts) for before, part in zip((None, *shown), shown, strict=False)]
    left_out = len(circle.parts) - len(shown)
    parts += [f"… {left_out} more …"] if left_out else []
    places = list(_places(shown, answers, hosts))
    if not places:
        return f"deadlock: {'; '.join(parts)}"
    count = len(circle.groups)
    why = f"{_NUMBERS.get(count, count)} groups are used in another order" if count > 1 else "Their calls"
    return f"deadlock: {'; '.join(parts)}. {why}: {'; '.join(places)}."


def _part(part: CirclePart, before: CirclePart | None, hosts: Mapping[int, str]) -> str:
    """Return who is in what and waits for whom; `before` is the part that was told before."""
    one = len(part.ranks) == 1
    again = before is not None and before.waits_for == part.ranks and not one
    who = "these" if again else ranks_on(part.ranks, hosts)
    others = "each other" if part.waits_for == part.ranks else ranks_on(part.waits_for, hosts)
    return f"{who} {'is' if one else 'are'} in {part.operation} and wait{'s' if one else ''} for {others}"


def _places(
    parts: Iterable[CirclePart], answers: Mapping[int, Where], hosts: Mapping[int, str]
) -> Iterator[str]:
    """Yield where the first rank of each part is; of ranks in the same operation, at each line one."""
    for part in parts:
        seen: set[str] = set()
        for rank in sorted(part.ranks):
            frame = own_frame(answers[rank].frames)
            here = None if frame is None else place(frame)
            if here is not None and here not in seen and len(seen) < _PARTS_SHOWN // 2:
                seen.add(here)
                yield f"{ranks_on([rank], hosts)} at {here}"
