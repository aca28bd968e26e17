"""What a session's ranks know of the notebook: which objects they have, and under which names.

An object is known by its key (`nblaunch.capture.identity`), a variable by the object that was sent under its
name. Ranks that took part in the same jobs know the same and share one record; a cell on a subset of ranks
splits it.

What is remembered here becomes true on the ranks at the same moment: when the payload has arrived on all of
them.
"""

from __future__ import annotations

import itertools
import threading
import types
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nblaunch.capture.capture import RANK_NAMES, SHELL_NAMES, Captured
from nblaunch.capture.changes import Prints
from nblaunch.capture.identity import ObjectTable
from nblaunch.capture.unpicklable import global_names
from nblaunch.protocol.messages import Names, Objects
from nblaunch.protocol.reports import format_ranks

_NO_NAMES = Names(rank=-1, names=())


@dataclass(slots=True)
class _Binding:
    """A name that ranks have from the notebook: the key of its object; None until one is looked at."""

    key: int | None


class _Record:
    """What some ranks have, all of them the same."""

    def __init__(self, ranks: frozenset[int], table: ObjectTable) -> None:
        self.ranks = ranks
        self.table = table
        self.keys: set[int] = set()
        self.bound: dict[str, _Binding] = {}
        self.prints = Prints(table)
        self.gone: set[int] = set()
        """Keys that the ranks may forget, once they hear of it."""

    def split(self, ranks: frozenset[int]) -> _Record:
        """Return a record of these ranks alone, which leave this one."""
        other = _Record(ranks, self.table)
        other.keys, other.bound, other.gone = set(self.keys), dict(self.bound), set(self.gone)
        other.prints = self.prints.copy()
        self.ranks -= ranks
        return other

    def forget(self, keys: Iterable[int]) -> set[int]:
        """Refer to these objects no longer; return those that were known."""
        found = self.keys.intersection(keys)
        self.keys -= found
        self.prints.discard(found)
        return found


class Knowledge:
    """What the ranks of one attempt have been sent."""

    def __init__(self) -> None:
        """Nothing has been sent."""
        self._lock = threading.RLock()
        self._attempt = -1
        self._table = ObjectTable()
        self._numbers = itertools.count(1)
        self._records: list[_Record] = []
        self._namespace = 0

    @property
    def namespace(self) -> dict[str, Any] | None:
        """Return the variables that the last job was given, for a push that brings none."""
        found: dict[str, Any] | None = self._table.get(self._namespace)
        return found

    def begin(self, attempt: int, world_size: int) -> None:
        """Forget all of it if there are other processes than those that it was sent to."""
        with self._lock:
            if attempt != self._attempt:
                self.close()
                self._attempt, self._table = attempt, ObjectTable()
                self._records = [_Record(frozenset(range(world_size)), self._table)]

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._table.close()
            self._records = []

    def sweep(self) -> None:
        """Let go of objects that the notebook has let go of."""
        self._table.sweep()

    def lost(self, keys: Mapping[int, tuple[int, ...]]) -> None:
        """Take into account what each rank no longer has."""
        with self._lock:
            for rank, each in keys.items():
                record = next((known for known in self._records if rank in known.ranks), None)
                if record is None or not record.keys.intersection(each):
                    continue
                others = {other for other in record.ranks if set(keys.get(other, ())) != set(each)}
                if others:
                    record = self._apart(record, frozenset(record.ranks - others))
                record.forget(each)

    def views(
        self, chosen: Sequence[int], names: Mapping[int, Names], namespace: dict[str, Any] | None
    ) -> list[View]:
        """Return what the chosen ranks know, each group of ranks that know the same by itself."""
        with self._lock:
            if namespace is not None:
                self._namespace = self.key_for(namespace)
            dead = self._table.lost()
            for record in self._records:
                record.gone |= record.forget(dead)
            parts = [(record, record.ranks.intersection(chosen)) for record in self._records]
            return [View(self, record, ranks, names, namespace) for record, ranks in parts if ranks]

    def key_for(self, obj: Any) -> int:
        """Return the key of an object; one that has none gets one."""
        key = self._table.key_of(obj)
        if key is None:
            key = next(self._numbers)
            self._table.add(obj, key)
        return key

    def remember(self, view: View, sent: Sent) -> None:
        """Take into account that a payload has arrived on the ranks of `view`."""
        with self._lock:
            if view.record not in self._records:
                return  # of an attempt that is over
            if not (sent.bound or sent.prints or sent.gone):
                return  # ranks that were sent nothing still know what the others know
            record = view.record if view.ranks == view.record.ranks else self._apart(view.record, view.ranks)
            record.gone -= set(sent.gone)
            record.keys.update(sent.prints)
            record.prints.update(sent.prints)
            record.bound |= sent.bound

    def _apart(self, record: _Record, ranks: frozenset[int]) -> _Record:
        other = record.split(ranks)
        self._records.append(other)
        return other


@dataclass(slots=True)
class Sent:
    """What becomes known once a payload has arrived; holds no object."""

    bound: dict[str, _Binding]
    prints: dict[int, object]
    gone: tuple[int, ...]
    objects: Objects = field(default_factory=Objects)

    plain: bool = False
    """Whether the payload neither refers to objects by key nor gives keys to any."""


class View:
    """What some ranks know, as one payload for them sees it: a `Known` of capture."""

    def __init__(
        self,
        knowledge: Knowledge,
        record: _Record,
        ranks: frozenset[int],
        names: Mapping[int, Names],
        namespace: dict[str, Any] | None,
    ) -> None:
        """Look at the ranks through `record`; `names` are the variables that each of them has."""
        self.record = record
        self.ranks = ranks
        self.kept: dict[str, frozenset[int]] = {}
        """Variables that were bound again in the notebook, and the ranks that keep their own."""
        self.changed: set[str] = set()
        """Variables whose objects were changed in place in the notebook."""
        self.ranks_own: set[str] = set()
        """Variables of the notebook that have the name of something that each rank has."""
        self._knowledge = knowledge
        self._namespace = {} if namespace is None else namespace
        self._names = {rank: frozenset(names.get(rank, _NO_NAMES).names) for rank in ranks}
        self._rebound = {rank: frozenset(names.get(rank, _NO_NAMES).rebound) for rank in ranks}
        self._declined: dict[str, _Binding] = {}
        self._reached: set[str] = set()

    def key_of(self, obj: Any) -> int | None:
        """Return the key of an object that these ranks have."""
        key = self.record.table.key_of(obj)
        return key if key is not None and key in self.record.keys else None

    def lacks(self, name: str, value: Any) -> bool:
        """Return whether these ranks need the notebook's variable: they have none, or it was bound anew."""
        if name in RANK_NAMES or name in SHELL_NAMES:
            return False
        everywhere = all(name in names for names in self._names.values())
        binding = self.record.bound.get(name)
        if binding is None:
            return not everywhere
        if binding.key is None:
            # Pushed under a name that the notebook did not have, or that was not looked at.
            binding.key = self._knowledge.key_for(value)
        if self.record.table.get(binding.key) is value:
            return not everywhere
        own = [rank for rank, names in self._rebound.items() if name in names]
        if own:
            self._decline(name, value, own)
        return len(own) < len(self.ranks)

    def _decline(self, name: str, value: Any, own: list[int]) -> None:
        self._declined[name] = _Binding(self._knowledge.key_for(value))
        self.kept[name] = frozenset(own)

    def needs(self, names: frozenset[str], *roots: Any) -> frozenset[str]:
        """Return the variables that these ranks lack, of `names` and of those that functions use."""
        self._reached = self._reach(names, roots)
        return frozenset(name for name in self._reached if self.lacks(name, self._namespace[name]))

    def _reach(self, names: Iterable[str], roots: Iterable[Any]) -> set[str]:
        """Follow variables and objects to functions, and these to the variables that they use."""
        reached: set[str] = set()
        waiting, objects = set(names), list(roots)
        functions: set[int] = set()
        while waiting or objects:
            fresh = {name for name in waiting - reached if name in self._namespace}
            reached |= fresh
            objects += [self._namespace[name] for name in fresh]
            waiting = set()
            for obj in self.record.prints.walk(*objects):
                if type(obj) is types.FunctionType and id(obj) not in functions:
                    functions.add(id(obj))
                    if obj.__globals__ is self._namespace:
                        waiting.update(global_names(obj))
            objects = []
        return reached

    def sent(self, captured: Captured, pushed: Mapping[str, Any] | None = None) -> Sent:
        """Return what these ranks will know when `captured` has arrived, and let go of its objects."""
        key_for, packed = self._knowledge.key_for, captured.packed
        keys = [key_for(obj) for _, obj in packed.places]
        prints = {key: self.record.prints.of(obj) for key, (_, obj) in zip(keys, packed.places, strict=True)}
        if pushed is not None:
            prints |= {key: self.record.prints.of(self.record.table.get(key)) for key in packed.keys}
        variables = {name: self._namespace[name] for name in captured.names} if pushed is None else {}
        bound = {name: _Binding(key_for(value)) for name, value in {**packed.carried, **variables}.items()}
        for name in pushed or ():
            bound[name] = self._binding_of_pushed(name)
        gone = tuple(self.record.gone)
        return Sent(
            bound={**self._declined, **bound},
            prints=prints,
            gone=gone,
            plain=not (packed.keys or keys),
            objects=Objects(
                wait=bool(bound or prints),
                places=array("I", (place for place, _ in packed.places)).tobytes(),
                keys=array("Q", keys).tobytes(),
                gone=array("Q", gone).tobytes(),
            ),
        )

    def _binding_of_pushed(self, name: str) -> _Binding:
        """Return what the next cells compare with: the notebook's own variable, if there is one."""
        known = name in self._namespace
        return _Binding(self._knowledge.key_for(self._namespace[name]) if known else None)

    def look_for_changes(self) -> None:
        """Note objects in use that were changed in place since the ranks got them."""
        for name in sorted(self._reached):
            if name in RANK_NAMES:
                self.ranks_own.add(name)
            elif not all(self._is_own(name, rank) for rank in self.ranks) and (
                self.record.prints.changed(self._namespace[name])
            ):
                self.changed.add(name)

    def _is_own(self, name: str, rank: int) -> bool:
        """Return whether a rank has bound this variable itself."""
        return name in self._names[rank] and (name in self._rebound[rank] or name not in self.record.bound)


def notices(views: Iterable[View]) -> tuple[str, ...]:
    """Return what is to be said of the notebook's variables, of all ranks together."""
    views = tuple(views)
    kept: dict[str, frozenset[int]] = {}
    for view in views:
        for name, ranks in view.kept.items():
            kept[name] = kept.get(name, frozenset()) | ranks
    changed = {name for view in views for name in view.changed}
    ranks_own = {name for view in views for name in view.ranks_own}
    return (
        *(
            f"{name} was assigned again in the notebook, but {format_ranks(ranks)} assigned it too and keep "
            f"their own. To replace it: %distributed push {name}"
            for name, ranks in sorted(kept.items())
        ),
        *(
            f"{name} was changed in the notebook after it was sent; the ranks use what they have. "
            f"To send it: %distributed push {name}"
            for name in sorted(changed)
        ),
        *(own_name_notice(name) for name in sorted(ranks_own)),
    )


def own_name_notice(name: str) -> str:
    """Return what is said where the notebook has a variable of the name of something that each rank has."""
    return (
        f"{name}: on the ranks this is the rank's own {name}, not the notebook's variable. "
        "Rename the variable to use it there."
    )
