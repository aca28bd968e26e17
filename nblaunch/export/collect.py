"""What cells take from the notebook, as a script has it: imports, definitions, literals, files."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nblaunch._errors import NblaunchError
from nblaunch.capture.capture import RANK_NAMES, SHELL_NAMES
from nblaunch.capture.names import CellNames
from nblaunch.export.files import Load, how_to_load
from nblaunch.export.imports import Import, import_of, submodules
from nblaunch.export.literals import LiteralWriter, NoLiteralError
from nblaunch.export.source import NotebookSource


@dataclass(frozen=True, slots=True)
class CollectedItem:
    """Statements of a script that bind variables."""

    names: tuple[str, ...]
    text: str
    place: tuple[int, int]
    needs: frozenset[str] = frozenset()
    """What must be there when it runs."""
    later: frozenset[str] = frozenset()
    """What must be there when its functions run."""
    definition: bool = False


@dataclass(slots=True)
class Collected:
    """Everything that a script takes from the notebook."""

    items: list[CollectedItem] = field(default_factory=list)
    imports: set[Import] = field(default_factory=set)
    files: list[Load] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Every name that the cells or what they use refer to."""
    left_out: list[str] = field(default_factory=list)


class Collector:
    """Follows names from the cells to what they need."""

    def __init__(self, namespace: dict[str, Any], source: NotebookSource, *, device: bool) -> None:
        """Nothing is collected yet; with `device` what was on a GPU arrives on the rank's."""
        self.found = Collected()
        self._namespace = namespace
        self._source = source
        self._device = device
        self._owned: dict[str, Any] = {}
        self._items: dict[str, CollectedItem] = {}
        self._values: dict[str, Any] = {}
        self._literals: dict[str, LiteralWriter] = {}
        self._aliases: dict[str, str] = {}
        self._seen: set[str] = set()

    def collect(self, names: CellNames, directory: str) -> Collected:
        """Return what a cell with these names needs; `directory` is the variable of its data directory."""
        self._follow(names, certain=True)
        for name in self._in_common():
            self._items.pop(name, None)
            self._values[name] = self._namespace[name]
        load_all = partial(how_to_load, own=self._own, directory=directory, device=self._device)
        try:
            files = load_all(self._values)
        except NblaunchError:
            # Leave out what cannot be saved and may never be used.
            for name in [name for name in self._values if name not in names.needed]:
                try:
                    load_all({name: self._values[name]})
                except NblaunchError:
                    del self._values[name]
                    self.found.left_out.append(name)
            files = load_all(self._values)
        for load in files:
            place = max(self._source.place(name) for name in load.names)
            self._items[load.names[0]] = CollectedItem(load.names, load.text, place, load.uses)
            self.found.imports.update(load.imports)
            self.found.files.append(load)
        for name, first in self._aliases.items():
            place = max(self._source.place(name), self._source.place(first))
            self._items[name] = CollectedItem((name,), f"{name} = {first}", place, frozenset({first}))
        self.found.items = list(_in_order(self._items))
        if any(item.definition for item in self.found.items):
            # In a notebook it holds for all cells that follow.
            self.found.imports.update(each for each in self._source.imports if each.module == "__future__")
        return self.found

    def _follow(self, names: CellNames, *, certain: bool) -> None:
        self.found.names |= names.needed | names.maybe
        self.found.imports.update(submodules(names.dotted, self._namespace, self._source.imports))
        for name in sorted(names.needed | names.maybe):
            if name not in RANK_NAMES and name not in SHELL_NAMES and name in self._namespace:
                self._want(name)
            elif name == "display" and certain:
                self.found.imports.add(Import("IPython.display", "display"))

    def _want(self, name: str) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        value = self._namespace[name]
        first = self._same_object(name, value)
        if first is not None:
            self._aliases[name] = first
        else:
            self._import_or_source(name, value)

    def _same_object(self, name: str, value: object) -> str | None:
        """Return another variable that is this very object, and has been taken along."""
        if isinstance(value, types.ModuleType | int | float | str | bytes | tuple | None):
            return None
        qualname = getattr(value, "__name__", None)
        if isinstance(qualname, str) and qualname != name and self._namespace.get(qualname) is value:
            self._want(qualname)
        known = [*self._items, *self._values]
        return next((each for each in known if self._namespace[each] is value), None)

    def _import_or_source(self, name: str, value: Any) -> None:
        known = import_of(name, value, self._source.imports)
        if known is not None:
            self.found.imports.add(known)
            return
        source = self._source.definition(name, value)
        definition = source is not None
        source = source or self._source.statement(name, value, self._namespace)
        if source is not None:
            if definition or (isinstance(value, type) and value.__qualname__ == name):
                self._owned[name] = value
            needs, later = source.names.needed, source.names.maybe
            self._items[name] = CollectedItem((name,), source.text, source.place, needs, later, definition)
            self._follow(source.names, certain=False)
        else:
            self._literal_or_file(name, value)

    def _literal_or_file(self, name: str, value: Any) -> None:
        for owned in _classes_within(value):
            self._own(owned)
        writer = LiteralWriter(self._owned)
        try:
            text = writer.assignment(name, value)
        except (NoLiteralError, RecursionError):
            self._values[name] = value
            return
        taken = [each for each in writer.imports if each.bound in self._namespace]
        if not all(each.finds(self._namespace[each.bound]) for each in taken):
            self._values[name] = value  # the notebook calls something else by that name
            return
        self._literals[name] = writer
        self._items[name] = CollectedItem((name,), text, self._source.place(name), frozenset(writer.names))
        self.found.imports |= writer.imports

    def _in_common(self) -> set[str]:
        """Return variables whose literals would be copies of what is one object in the notebook."""
        owners: dict[int, set[str]] = {}
        for name, writer in self._literals.items():
            for each in writer.mutable:
                owners.setdefault(each, set()).add(name)
        return {name for names in owners.values() if len(names) > 1 for name in names}

    def _own(self, obj: Any) -> str | None:
        """Return the name under which the script defines a function or class; it is taken along then."""
        qualname = str(obj.__qualname__)
        root, *inner = qualname.split(".")
        found = self._namespace.get(root)
        if root in self._namespace:
            self._want(root)
        for name in inner:
            found = getattr(found, name, None)
        return qualname if found is obj and root in self._owned else None


def _classes_within(value: object, depth: int = 0) -> Iterator[type]:
    """Yield the notebook's classes whose instances are in a value, as far as a literal could show them."""
    if type(value).__module__ == "__main__":
        yield type(value)
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
        inner = vars(value).values()
    if depth < 10:  # noqa: PLR2004 - deeper is no literal anyway
        for each in inner:
            yield from _classes_within(each, depth + 1)


def _in_order(items: dict[str, CollectedItem]) -> Iterator[CollectedItem]:
    """Yield items in the notebook's order, each below what it needs."""
    owner = {name: item for item in items.values() for name in item.names}
    done: set[str] = set()
    begun: set[tuple[str, bool]] = set()

    def put(item: CollectedItem, *, whole: bool) -> Iterator[CollectedItem]:
        if (item.names[0], whole) in begun:
            return
        begun.add((item.names[0], whole))
        for name in sorted(item.needs & owner.keys(), key=lambda name: owner[name].place):
            yield from put(owner[name], whole=True)
        if item.names[0] not in done:
            done.add(item.names[0])
            yield item
        if whole:
            for name in sorted(item.later & owner.keys(), key=lambda name: owner[name].place):
                yield from put(owner[name], whole=True)

    ordered = sorted(
        items.values(), key=lambda item: (bool(item.definition or item.needs), item.place, item.names)
    )
    for item in ordered:
        yield from put(item, whole=False)
