"""Which of the notebook's variables the ranks of a session have already, and which must be sent (again)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Variable:
    """A variable that ranks have from the notebook: this object, these ranks."""

    value: object
    ranks: frozenset[int]
    uses: frozenset[str] = frozenset()
    """Variables that functions sent together with it use."""


class Sent:
    """The variables that the ranks of one attempt have been sent.

    A variable is known by its object: one that is bound to another object since is sent again, one whose
    object was changed in place is not, since what ranks did to theirs would be lost.
    """

    def __init__(self) -> None:
        """Nothing has been sent."""
        self._variables: dict[str, _Variable] = {}
        self._attempt = 0

    def of(self, attempt: int) -> Sent:
        """Forget all of it if there are other processes than those that it was sent to."""
        if attempt != self._attempt:
            self._variables, self._attempt = {}, attempt
        return self

    def known(
        self, namespace: Mapping[str, Any], names: Mapping[int, tuple[str, ...]], chosen: tuple[int, ...]
    ) -> frozenset[str]:
        """Return what need not be sent to `chosen`: what is the ranks' own, and what they have as it is now.

        `names` are the variables that each rank has.
        """
        everywhere = frozenset.intersection(*(frozenset(names.get(rank, ())) for rank in chosen))
        return frozenset(
            name for name in everywhere if name not in self._variables or self._same(name, namespace, chosen)
        )

    def outdated(
        self, names: frozenset[str], namespace: Mapping[str, Any], chosen: tuple[int, ...]
    ) -> frozenset[str]:
        """Return what functions that ranks have under `names` use, and is something else by now."""
        reached: set[str] = set()
        waiting = set(names & self._variables.keys())
        while waiting:
            name = waiting.pop()
            reached.add(name)
            waiting |= (self._variables[name].uses & self._variables.keys()) - reached
        used = reached - names
        return frozenset(
            name for name in used if name in namespace and not self._same(name, namespace, chosen)
        )

    def _same(self, name: str, namespace: Mapping[str, Any], chosen: tuple[int, ...]) -> bool:
        sent = self._variables[name]
        return sent.value is namespace.get(name) and sent.ranks.issuperset(chosen)

    def remember(self, sent: Mapping[str, Any], carried: Mapping[str, Any], chosen: tuple[int, ...]) -> None:
        """Take note of what these ranks have now; functions have `carried` along what they use."""
        uses = frozenset(carried)
        for name, value in {**carried, **sent}.items():
            before = self._variables.get(name)
            ranks = frozenset(chosen)
            if before is not None and before.value is value:
                ranks |= before.ranks
            self._variables[name] = _Variable(value, ranks, uses)

    def forget(self, names: Mapping[str, Any]) -> None:
        """Variables that are the ranks' own from here on."""
        for name in names:
            self._variables.pop(name, None)
