"""What a session's ranks know of the notebook: which objects they have, and under which names.

An object is known by its key (`nblaunch.capture.identity`), with its frame as it was sent
(`nblaunch.capture.walk`), and a variable by the object that was sent under its name. Ranks that took part in
the same jobs know the same and share one record; a cell on a subset of ranks splits it.

A record changes at the moment at which the ranks do: when the payload has arrived on all of them.
"""

from __future__ import annotations

import itertools
import threading
import types
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nblaunch.capture.capture import IPYTHONS_CONTAINERS, IPYTHONS_NAMES, RANK_NAMES, Captured, notebook_names
from nblaunch.capture.identity import ObjectTable, has_identity
from nblaunch.capture.walk import CHANGED, Inspection, ObjectFrame, SentFrames
from nblaunch.protocol.messages import Names, Objects, Revived
from nblaunch.protocol.reports import format_ranks

_NOTHING = -1
"""The key of no object."""
_NO_NAMES = Names(rank=-1, names=())
_IMPORTED = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)


@dataclass(slots=True)
class _Binding:
    """A name that ranks have from the notebook: the key of its object, None until a job compares it."""

    key: int | None
    frame: ObjectFrame | None = None
    """Of a value without identity (a tuple, a bound method): what it led to when it was sent."""
    again: bool = False
    """A cell of the notebook has bound the name again, perhaps to this very object: `step = 0`."""


class _Record:
    """The objects and names that some ranks have, all of them the same."""

    def __init__(self, ranks: frozenset[int], table: ObjectTable) -> None:
        self.ranks = ranks
        self.table = table
        self.frames = SentFrames(table)
        """Of every object that the ranks have."""
        self.bound: dict[str, _Binding] = {}
        self.gone: set[int] = set()
        """Keys that the next payload lets the ranks forget."""

    def split(self, ranks: frozenset[int]) -> _Record:
        """Move these ranks to a record of their own, and return it."""
        other = _Record(ranks, self.table)
        other.frames, other.bound, other.gone = self.frames.copy(), dict(self.bound), set(self.gone)
        self.ranks -= ranks
        return other


class Knowledge:
    """The objects and names that were sent to the ranks of one attempt."""

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        """`numbers` become keys of objects; no client has used them for other objects of these ranks."""
        self._lock = threading.RLock()
        self._attempt = -1
        self._table = ObjectTable()
        self._numbers = numbers or itertools.count(1)
        self._records: list[_Record] = []
        self._namespace = 0

    @property
    def namespace(self) -> dict[str, Any] | None:
        """The namespace of the last job, for a push outside a notebook."""
        found: dict[str, Any] | None = self._table.get(self._namespace)
        return found

    def begin(self, attempt: int, world_size: int) -> None:
        """Start over if `attempt` is a new one: its processes have been sent nothing."""
        with self._lock:
            if attempt > self._attempt:  # an older one is that of a caller which events have overtaken
                self.close()
                self._attempt, self._table = attempt, ObjectTable()
                self._records = [_Record(frozenset(range(world_size)), self._table)]

    def renumber(self, before: int, attempt: int, kept: Mapping[int, int], world_size: int) -> None:
        """Renumber the ranks after a regroup; `kept` maps new numbers to those in attempt `before`."""
        with self._lock:
            if before != self._attempt:
                return  # the records are of another attempt
            self._attempt = attempt
            for record in self._records:
                record.ranks = frozenset(rank for rank, old in kept.items() if old in record.ranks)
            new = frozenset(range(world_size)).difference(kept)
            self._records = [record for record in self._records if record.ranks]
            if new:
                self._records.append(_Record(new, self._table))

    def revived(self, ranks: Iterable[int], found: Revived) -> None:
        """Note what ranks that were started again have got from another one, as that one knows it."""
        with self._lock:
            known = {rank: record for record in self._records for rank in record.ranks}
            source = known.get(found.source)
            for record in {id(each): each for rank, each in known.items() if rank in ranks}.values():
                if source is not None and source is not record:
                    frames = {key: source.frames.get(key) for key in found.keys}
                    record.frames.update({key: each for key, each in frames.items() if each is not None})
                    record.bound |= {name: source.bound[name] for name in found.names if name in source.bound}

    def close(self) -> None:
        with self._lock:
            self._table.close()
            self._records = []

    def bound_again(self, names: Iterable[str]) -> None:
        """Note which variables a cell of the notebook has bound, each perhaps to the object that it had.

        Imported objects do not count: they mean the same on the ranks.
        """
        with self._lock:
            for record in self._records:
                for name in record.bound.keys() & names:
                    binding = record.bound[name]
                    known = None if binding.key is None else self._table.get(binding.key)
                    if not isinstance(known, _IMPORTED):
                        record.bound[name] = replace(binding, again=True)

    def restored(self, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """Note variables that ranks have from a save: what the notebook has bound by now is no news to them.

        What it binds later is: code of the notebook replaces theirs, and all else is named in a notice.
        """
        with self._lock:
            keys = {name: self.key_for(namespace[name]) if name in namespace else _NOTHING for name in names}
            for record in self._records:
                record.bound |= {name: _Binding(key) for name, key in keys.items()}

    def sweep(self) -> None:
        self._table.sweep()

    def lost(self, keys: Mapping[int, tuple[int, ...]]) -> None:
        with self._lock:
            for rank, each in keys.items():
                record = next((known for known in self._records if rank in known.ranks), None)
                if record is None or not any(key in record.frames for key in each):
                    continue
                others = {other for other in record.ranks if set(keys.get(other, ())) != set(each)}
                if others:
                    record = self._apart(record, frozenset(record.ranks - others))
                record.frames.discard(each)

    def views(
        self, chosen: Sequence[int], names: Mapping[int, Names], namespace: dict[str, Any] | None
    ) -> list[KnowledgeView]:
        """Return what the chosen ranks know, one view for all that know the same."""
        with self._lock:
            if namespace is not None:
                self._namespace = self.key_for(namespace)
            dead = self._table.lost()
            for record in self._records:
                record.gone |= record.frames.discard(dead)
            parts = [(record, record.ranks.intersection(chosen)) for record in self._records]
            return [KnowledgeView(self, record, ranks, names, namespace) for record, ranks in parts if ranks]

    def key_for(self, obj: Any) -> int:
        """Return the key of an object, a new one if it has none."""
        key = self._table.key_of(obj)
        if key is None:
            key = next(self._numbers)
            self._table.add(obj, key)
        return key

    def remember(self, view: KnowledgeView, delivery: Delivery) -> None:
        with self._lock:
            if view.record not in self._records:
                return  # of an attempt that is over
            if not (delivery.bound or delivery.frames or delivery.gone):
                return  # ranks that were sent nothing still know what the others know
            record = view.record if view.ranks == view.record.ranks else self._apart(view.record, view.ranks)
            record.gone -= set(delivery.gone)
            record.frames.update(delivery.frames)
            record.bound |= delivery.bound

    def _apart(self, record: _Record, ranks: frozenset[int]) -> _Record:
        other = record.split(ranks)
        self._records.append(other)
        return other


@dataclass(slots=True)
class Delivery:
    """The record of the ranks once a payload has arrived; holds no object."""

    bound: dict[str, _Binding]
    frames: dict[int, ObjectFrame]
    gone: tuple[int, ...]
    objects: Objects | None
    """None for a payload that binds nothing, and neither gives, refers to nor drops a key."""


class KnowledgeView:
    """The knowledge of the ranks that get the same payload: a `Known` of capture."""

    def __init__(
        self,
        knowledge: Knowledge,
        record: _Record,
        ranks: frozenset[int],
        names: Mapping[int, Names],
        namespace: dict[str, Any] | None,
    ) -> None:
        """`names` are the variables that each rank has."""
        self.record = record
        self.ranks = ranks
        self.kept: dict[str, frozenset[int]] = {}
        """Variables that were assigned again in the notebook, and the ranks that keep their own."""
        self.changed: set[str] = set()
        """Variables whose objects were changed in place in the notebook."""
        self.ranks_own: set[str] = set()
        """Variables of the notebook whose name means something else on each rank, such as `rank`."""
        self._knowledge = knowledge
        self._globals = namespace
        self._namespace = {} if namespace is None else namespace
        self._names = {rank: frozenset(names.get(rank, _NO_NAMES).names) for rank in ranks}
        self._rebound = {rank: frozenset(names.get(rank, _NO_NAMES).rebound) for rank in ranks}
        self._declined: dict[str, _Binding] = {}
        self._arriving: Mapping[str, _Binding] = {}
        self._arriving_frames: Mapping[int, ObjectFrame] = {}
        self._reached: set[str] = set()
        self._shared = notebook_names(self._namespace)
        containers = (self._namespace.get(name) for name in IPYTHONS_CONTAINERS)
        self._anew = {self.record.table.key_of(each) for each in containers if each is not None}

    def key_of(self, obj: Any) -> int | None:
        """Return the key of an object that these ranks have."""
        key = self.record.table.key_of(obj)
        return key if key is not None and key in self.record.frames and key not in self._anew else None

    def memories(self) -> Iterable[Any]:
        """Return the arrays, memories of arrays and storages that these ranks have."""
        return [obj for key, obj in self.record.table.memories() if key in self.record.frames]

    def lacks(self, name: str, value: Any) -> bool:
        """Return whether these ranks need the notebook's variable: one has none, or it was assigned again."""
        if name not in self._shared:
            return False
        everywhere = all(name in names for names in self._names.values())
        binding = self._bound(name)
        if binding is None:
            return not everywhere
        is_same = self.record.table.key_of(value) == binding.key
        if is_same and not binding.again and name not in IPYTHONS_CONTAINERS:
            return not everywhere
        own = [rank for rank, names in self._rebound.items() if name in names]
        if is_same:
            self._declined[name] = replace(binding, again=False)
        elif own:
            self._declined[name] = self._binding(value)
        if own and name not in IPYTHONS_NAMES:
            self.kept[name] = frozenset(own)
        return len(own) < len(self.ranks) and not (is_same and everywhere)

    def _bound(self, name: str) -> _Binding | None:
        """Return what the ranks have under the name of a variable of the notebook."""
        binding = self.record.bound.get(name)
        if binding is not None and binding.key is None:
            # Pushed under a name that the notebook did not have, or that no job has compared.
            binding.key = self._knowledge.key_for(self._namespace[name])
        return binding

    def _binding(self, value: Any, inspection: Inspection | None = None) -> _Binding:
        frame = None
        if not has_identity(value):
            frame = (inspection or self._inspect()).frame(value)
        return _Binding(self._knowledge.key_for(value), frame)

    def needs(self, names: Iterable[str], keys: Iterable[int] = ()) -> frozenset[str]:
        """Return the variables that these ranks lack, of `names` and of those that functions read.

        The functions are those to which the variables, and the objects with these keys, led when they were
        sent: a change in place does not travel.
        """
        waiting, reached = set(names) | self.record.frames.names(keys), set[str]()
        while waiting:
            reached |= waiting
            read: set[str] = set()
            for name in waiting & self._namespace.keys():
                binding = self._bound(name)
                if binding is not None and self.record.table.key_of(self._namespace[name]) == binding.key:
                    read |= binding.frame.names if binding.frame is not None else set()
                    led_to = binding.frame.children if binding.frame is not None else (binding.key,)
                    read |= self.record.frames.names(key for key in led_to if key is not None)
            waiting = read - reached
        reached &= self._namespace.keys()
        self._reached |= reached
        return frozenset(name for name in reached if self.lacks(name, self._namespace[name]))

    def _inspect(self) -> Inspection:
        return Inspection(self.record.table, self.record.frames, self._globals)

    def delivery(self, captured: Captured, pushed: Mapping[str, Any] | None = None) -> Delivery:
        """Return what these ranks will know once `captured` has arrived."""
        key_for, packed, inspection = self._knowledge.key_for, captured.packed, self._inspect()
        keys = [key_for(obj) for _, obj in packed.places]
        new = {key: obj for key, (_, obj) in zip(keys, packed.places, strict=True)}
        frames = inspection.arriving(new, () if pushed is None else packed.keys)
        variables = {name: self._namespace[name] for name in captured.names} if pushed is None else {}
        bound = {
            name: self._binding(value, inspection) for name, value in {**packed.carried, **variables}.items()
        }
        for name in pushed or ():
            # The next cells compare with the notebook's variable of that name, if there is one.
            known = name in self._namespace
            bound[name] = self._binding(self._namespace[name], inspection) if known else _Binding(None)
        self._arriving, self._arriving_frames = bound, frames
        self._note_stale()
        gone = tuple(self.record.gone)
        objects = Objects(
            wait=bool(bound or frames),
            names=tuple(bound),
            places=array("I", (place for place, _ in packed.places)).tobytes(),
            keys=array("Q", keys).tobytes(),
            gone=array("Q", gone).tobytes(),
        )
        self._reached |= packed.reads & self._namespace.keys()
        plain = not (packed.keys or keys or gone or objects.wait)
        return Delivery({**self._declined, **bound}, frames, gone, None if plain else objects)

    def _frames_then(self) -> SentFrames:
        """Return the frames of what these ranks have once the payload has arrived."""
        if not self._arriving_frames:
            return self.record.frames
        frames = self.record.frames.copy()
        frames.update(self._arriving_frames)
        return frames

    def _note_stale(self) -> None:
        """Note variables that arrive, and lead to memory that was changed since the ranks got it."""
        stale = {key for key, frame in self._arriving_frames.items() if frame is CHANGED}
        if not stale:
            return
        known = self._frames_then()
        for name, binding in self._arriving.items():
            led_to = binding.frame.children if binding.frame is not None else (binding.key,)
            if any(stale & known.reached_from(key) for key in led_to if key is not None):
                self.changed.add(name)

    def find_changes(self) -> None:
        """Note objects in use that were changed in place since the ranks got them."""
        inspection = self._inspect()
        for name in sorted(self._reached):
            if name in RANK_NAMES:
                self.ranks_own.add(name)
            elif name not in IPYTHONS_NAMES and not all(self._is_own(name, rank) for rank in self.ranks):
                value, binding = self._namespace[name], self._bound(name)
                same = binding is not None and binding.key == self.record.table.key_of(value)
                if inspection.changed(value, binding.frame if binding is not None and same else None):
                    self.changed.add(name)

    def users_of(self, name: str) -> frozenset[int]:
        """Return the ranks for which a variable is the notebook's and in use."""
        return frozenset(r for r in self.ranks if name in self._reached and not self._is_own(name, r))

    def sent_version(self, name: str) -> object:
        """Return what these ranks have then of a variable's objects, to be compared with what others have."""
        binding = self._arriving.get(name, self.record.bound.get(name))
        if binding is None:
            return None
        frames = self._frames_then()
        led_to = binding.frame.children if binding.frame is not None else (binding.key,)
        reached: set[int] = set().union(*(frames.reached_from(key) for key in led_to if key is not None))
        return binding.frame, {key: frames.get(key) for key in reached}

    def _is_own(self, name: str, rank: int) -> bool:
        return name in self._names[rank] and (name in self._rebound[rank] or name not in self.record.bound)


def notices(views: Iterable[KnowledgeView]) -> tuple[str, ...]:
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
        *(_changed_notice(name, views) for name in sorted(changed)),
        *(own_name_notice(name) for name in sorted(ranks_own)),
    )


def _changed_notice(name: str, views: Iterable[KnowledgeView]) -> str:
    """Return the notice about a variable that was changed in place; it names ranks that got different values.

    A rank gets a variable late if it joined late, or took part in no cell that used it. What the others have
    is not replaced: they may have trained it in place.
    """
    current: frozenset[int] = frozenset()
    older: list[tuple[object, frozenset[int]]] = []
    for view in views:
        users = view.users_of(name)
        if name not in view.changed:
            current |= users
            continue
        sent = view.sent_version(name)
        same = next((each for each in older if each[0] == sent), (sent, frozenset[int]()))
        older = [*(each for each in older if each is not same), (sent, same[1] | users)]
    if len(older) + bool(current) == 1:
        return (
            f"{name} was changed in the notebook after it was sent; the ranks use what they have. "
            f"To replace it: %distributed push {name}"
        )
    groups = sorted((ranks for _, ranks in older), key=min)
    words = [
        f"{format_ranks(each)} {'another' if at else 'an'} older value" for at, each in enumerate(groups)
    ]
    if current:
        words.append(f"{format_ranks(current)} the notebook's")
    return (
        f"{name} differs between ranks, as it was changed in the notebook after some got it: "
        f"{', '.join(words)}. To give all ranks the notebook's: %distributed push {name}"
    )


def own_name_notice(name: str) -> str:
    """Return the notice about a notebook variable whose name means something else on each rank."""
    return (
        f"{name}: on the ranks this is the rank's own {name}, not the notebook's variable. "
        "Rename the variable to use it there."
    )
