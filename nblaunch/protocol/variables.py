"""What is known of the variables of a session's ranks: numbers that are the same for values that are.

A rank reports them with the names of its variables (`nblaunch.rank.sketches` makes them). When it dies, they
tell which of its variables all ranks had alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nblaunch.protocol.messages import LastKnown, Names

UNKNOWN = 0
"""The number of a variable of which nothing is known."""


def number_of(checksum: int, *, whole: bool) -> int:
    """Return the number of a checksum of 32 bits; it tells whether that is one of the `whole` value."""
    return (1 << 40) | checksum << 1 | (not whole)


def is_whole(number: int) -> bool:
    """Return whether two values of this number are equal, and not only alike as far as was seen.

    >>> is_whole(number_of(7, whole=True)), is_whole(number_of(7, whole=False)), is_whole(UNKNOWN)
    (True, False, False)
    """
    return number != UNKNOWN and number % 2 == 0


def mark_outdated(digest: int) -> int:
    """Return the number of a digest that was taken before the last job: it no longer tells of equality."""
    return digest | 1


def last_known(
    rank: int,
    names: Mapping[int, Names],
    now: Mapping[int, Names] | None = None,
    brought: Collection[str] = (),
) -> LastKnown:
    """Return what is known of the variables of a rank that has died, by the `names` that all ranks have told.

    If it has died in a job, these are from before that; `now` is what the others have told since, and
    `brought` are variables that the job had brought to it.

    >>> names = {each: Names(rank=each, names=("x", "y"), sketches=(4, 6 + 2 * each)) for each in range(2)}
    >>> last_known(1, names)
    LastKnown(equal=('x',), alike=(), others=('y',), lacked=(), changed=(), joins=False)
    """
    own = names.get(rank)
    if own is None or len(own.sketches) != len(own.names):
        return LastKnown(others=() if own is None else own.names)
    of = {each: _numbers(known) for each, known in names.items()}
    found: dict[str, list[str]] = {"equal": [], "alike": [], "others": []}
    for name in own.names:
        found[_kind([each.get(name, (UNKNOWN, UNKNOWN)) for each in of.values()])].append(name)
    since = {each: _numbers(known) for each, known in (now or {}).items() if each != rank and each in of}
    changed = [
        name
        for name in own.names
        if any(
            name in known and known[name][0] != of[each].get(name, (UNKNOWN,))[0]
            for each, known in since.items()
        )
    ]
    lacked = sorted(set().union(*of.values()).difference(own.names, brought))
    equal, alike, others = map(tuple, found.values())
    return LastKnown(equal, alike, others, lacked=tuple(lacked), changed=tuple(changed))


def known_to_all(
    names: Mapping[int, Names], unlike: Mapping[str, int], cut_off: Collection[str] = ()
) -> LastKnown:
    """Return what a new rank may get from the others: what they have alike, as far as was seen.

    Not what lost ranks had otherwise (see `unlike`), unless it has changed since. What the others had alike
    before the job that was `cut_off` with these may differ in gradients alone: it is compared without them.

    >>> names = {each: Names(rank=each, names=("x", "y"), sketches=(4, 6 + 2 * each)) for each in range(2)}
    >>> known_to_all(names, {})
    LastKnown(equal=(), alike=('x',), others=('y',), lacked=(), changed=(), joins=True)
    >>> of = {each: Names(rank=each, names=("x",), sketches=(5,), digests=(8 + 2 * each,)) for each in (0, 1)}
    >>> known_to_all(of, {}).alike, known_to_all(of, {}, {"x"}).alike
    ((), ('x',))
    """
    of = [_numbers(known) for known in names.values()]
    alike, others = list[str](), list[str]()
    for name in sorted(set[str]().union(*(each.names for each in names.values()))):
        known = [each.get(name, (UNKNOWN, UNKNOWN)) for each in of]
        if name in cut_off:
            known = [(number, UNKNOWN) for number, _ in known]
        differs = _kind(known) == "others" or unlike.get(name) == known[0][0]
        (others if differs else alike).append(name)
    return LastKnown(alike=tuple(alike), others=tuple(others), joins=True)


def alike(names: Mapping[int, Names], ranks: Collection[int]) -> Collection[str]:
    """Return the variables that these ranks had alike, as far as was seen."""
    of = [_numbers(known) for rank, known in names.items() if rank in ranks]
    shared = set[str]().union(*of)
    return {name for name in shared if _kind([each.get(name, (UNKNOWN, UNKNOWN)) for each in of]) != "others"}


def unlike(names: Mapping[int, Names], lost: Collection[int]) -> dict[str, int]:
    """Return the variables that not all ranks had alike, with their numbers on one that is not lost."""
    of = {rank: _numbers(known) for rank, known in names.items()}
    left = next((known for rank, known in of.items() if rank not in lost), {})
    return {
        name: number
        for name, (number, _) in left.items()
        if _kind([each.get(name, (UNKNOWN, UNKNOWN)) for each in of.values()]) == "others"
    }


def _kind(known: list[tuple[int, int]]) -> str:
    (number, *others), digests = {each for each, _ in known}, {each for _, each in known}
    fresh = {each for each in digests if is_whole(each)}
    old = digests - fresh - {UNKNOWN}
    if others or number == UNKNOWN or len(fresh) > 1 or len(old) > 1:
        return "others"
    return "equal" if is_whole(number) or digests == fresh else "alike"


def _numbers(known: Names) -> dict[str, tuple[int, int]]:
    digests = known.digests or (UNKNOWN,) * len(known.names)
    return dict(zip(known.names, zip(known.sketches, digests, strict=False), strict=False))
