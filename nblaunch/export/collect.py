"""What cells take from the notebook, as a script has it: imports, definitions, literals, files."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nblaunch._errors import NblaunchError
from nblaunch.capture.capture import notebook_names
from nblaunch.capture.names import CellNames
from nblaunch.capture.parts import fact_of
from nblaunch.export.drift import Drift, NotRemadeError, Patch
from nblaunch.export.effects import bound_globally, run_by, set_again, used_at_once
from nblaunch.export.files import Load, how_to_load
from nblaunch.export.imports import Import, import_of, submodules
from nblaunch.export.literals import LiteralWriter, NoLiteralError
from nblaunch.export.source import BindingStatement, NotebookSource


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
    completes: str = ""
    """The definition that it changes: whatever needs that one needs this, too."""


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
        self.found = Collected()
        self._namespace = namespace
        self._source = source
        self._device = device
        self._directory = ""
        self._available = notebook_names(namespace)
        self._owned: set[str] = set()
        self._items: dict[str, CollectedItem] = {}
        self._values: dict[str, Any] = {}
        self._literals: dict[str, LiteralWriter] = {}
        self._aliases: dict[str, str] = {}
        self._patches: dict[str, Patch] = {}
        """By the variable that has the value where that is in a file."""
        self._runs: dict[str, dict[str, int]] = {}
        """What runs when the script makes a definition."""
        self._seen: set[str] = set()

    def collect(self, names: CellNames, directory: str) -> Collected:
        """Return what a cell with these names needs; `directory` is the variable of its data directory."""
        self._directory = directory
        self._follow(names, certain=True)
        while True:
            before = (len(self._seen), sorted(self._values))
            self._save_shared([])
            files = self._load(names.needed)
            self._save_shared(files)
            for load in files:
                self._want_all(load.later)
                self._save_with(load)
            if before == (len(self._seen), sorted(self._values)):
                break
        for load in files:
            place = max(map(self._place, load.names))
            self._items[load.names[0]] = CollectedItem(load.names, load.text, place, load.uses, load.later)
            self.found.imports.update(load.imports)
            self.found.files.append(load)
        for name, first in self._aliases.items():
            place = max(self._place(name), self._place(first))
            self._items[name] = CollectedItem((name,), f"{name} = {first}", place, frozenset({first}))
        self._restore_changed()
        self.found.imports.update(*(writer.imports for writer in self._literals.values()))
        self.found.items = list(_in_order(self._items))
        if any(item.definition for item in self.found.items):
            # In a notebook it holds for all cells that follow.
            self.found.imports.update(each for each in self._source.imports if each.module == "__future__")
        return self.found

    def _load(self, needed: frozenset[str]) -> list[Load]:
        """Return how to load what is in files; leaves out what cannot be saved and may never be used."""
        try:
            return self._how_to_load(self._values)
        except NblaunchError:
            for name in [name for name in self._values if self._root(name) not in needed]:
                if not self._can_save(name, self._values[name]):
                    del self._values[name]
                    self._items.pop(self._target(name), None)
                    self.found.left_out.append(self._target(name))
            return self._how_to_load(self._values)

    def _how_to_load(self, values: dict[str, Any]) -> list[Load]:
        return how_to_load(dict(values), self._own, self._directory, device=self._device, called=self._target)

    def _can_save(self, name: str, value: Any) -> bool:
        try:
            self._how_to_load({name: value})
        except NblaunchError:
            return False
        return True

    def _target(self, name: str) -> str:
        return self._patches[name].target if name in self._patches else name

    def _value(self, name: str) -> Any:
        return self._patches[name].value if name in self._patches else self._namespace[name]

    def _root(self, name: str) -> str:
        return self._target(name).partition(".")[0]

    def _place(self, name: str) -> tuple[int, int]:
        return self._source.place(self._root(name))

    def _follow(self, names: CellNames, *, certain: bool) -> None:
        used = names.needed | names.maybe
        self.found.imports.update(submodules(names.dotted, self._namespace, self._source.imports))
        self._want_all(used)
        if certain and "display" in used - self._available:
            self.found.imports.add(Import("IPython.display", "display"))

    def _want_all(self, names: frozenset[str]) -> None:
        self.found.names |= names
        for name in sorted(names & self._available):
            self._want(name)

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
        qualname = fact_of(value, "__name__")
        if isinstance(qualname, str) and qualname != name and self._namespace.get(qualname) is value:
            self._want(qualname)
        known = [each for each in (*self._items, *self._values) if each in self._available]
        return next((each for each in known if self._namespace[each] is value), None)

    def _import_or_source(self, name: str, value: Any) -> None:
        known = import_of(name, value, self._source.imports)
        if known is not None:
            self.found.imports.add(known)
            return
        source = self._source.definition(name, value)
        definition = source is not None
        source = source or self._source.statement(name, value, self._namespace)
        patches = self._compared(name, value, source) if source is not None else None
        if source is None or patches is None:
            self._literal_or_file(name, value)
            return
        if definition or (isinstance(value, type) and value.__qualname__ == name):
            self._owned.add(name)
        needs, later = source.names.needed, source.names.maybe
        self._items[name] = CollectedItem((name,), source.text, source.place, needs, later, definition)
        if runs := run_by(source.node, value):
            self._runs[name] = runs
        self._follow(source.names, certain=False)
        for patch in patches:
            self._add_patch(patch)

    def _compared(self, name: str, value: Any, made: BindingStatement) -> list[Patch] | None:
        """Return what makes a definition what it is now; None if it must be saved as it is."""
        try:
            return Drift(made, self._source, self._namespace).patches(name, value)
        except NotRemadeError as error:
            # Made again is better than not made at all.
            return None if error.certain or self._can_save(name, value) else []

    def _add_patch(self, patch: Patch) -> None:
        name = re.sub(r"\W+", "_", patch.target.replace("__", "")).strip("_")
        while name in self._namespace or name in self._patches:
            name += "_"
        self._patches[name] = patch
        self._literal_or_file(name, patch.value)
        if name in self._values and not patch.certain and not self._can_save(name, patch.value):
            del self._values[name], self._items[patch.target]

    def _literal_or_file(self, name: str, value: Any) -> None:
        writer = LiteralWriter(self._own)
        try:
            text = writer.assignment(self._target(name), value)
        except (NoLiteralError, RecursionError):
            self._save(name, value)
            return
        taken = [each for each in writer.imports if each.bound in self._namespace]
        if not all(each.finds(self._namespace[each.bound]) for each in taken):
            self._save(name, value)  # the notebook calls something else by that name
            return
        self._literals[name] = writer
        self._set(name, text, writer.names)

    def _set(self, name: str, text: str, needs: set[str]) -> None:
        """Have the script bind a variable, or change a definition."""
        root = self._root(name) if name in self._patches else ""
        needed = frozenset(needs | {root} - {""})
        self._items[self._target(name)] = CollectedItem(
            (self._target(name),), text, self._place(name), needed, completes=root
        )

    def _save(self, name: str, value: Any) -> None:
        self._values[name] = value
        if name in self._patches:
            self._set(name, f"{self._target(name)} = {name}", {name})

    def _save_shared(self, files: list[Load]) -> None:
        """Save variables whose literals would be copies of what is one object in the notebook."""
        owners: dict[int, set[str]] = {}
        for name, writer in self._literals.items():
            for each in writer.memory:
                owners.setdefault(each, set()).add(name)
        for each, names in owners.items():
            if len(names) > 1 or any(load.holds(each) for load in files):
                for name in sorted(names & self._literals.keys()):
                    del self._literals[name]
                    self._items.pop(self._target(name))
                    self._save(name, self._value(name))

    def _used_by(self, definition: str) -> frozenset[str]:
        """Return what runs when the script makes a definition, and what that uses at once."""
        runs = self._runs[definition]
        used: set[str] = set()
        more = set(runs)
        while more:
            used |= more
            code = {
                name: self._items[name].text for name in more & self._items.keys() - self._literals.keys()
            }
            found = [used_at_once(text, runs.get(name, 1)) for name, text in code.items()]
            more = set().union(*found) - used
        return frozenset(used)

    def _save_with(self, load: Load) -> None:
        """Save a definition that would change what is in the file when it is made again."""
        for name in [name for name in self._runs if self._used_by(name) & {*load.names}]:
            del self._runs[name], self._items[name]
            self._owned.discard(name)
            self._values[name] = self._namespace[name]
            for patch in [each for each in self._patches if self._root(each) == name]:
                self._items.pop(self._target(patch), None)
                self._literals.pop(patch, None)
                self._values.pop(patch, None)

    def _changed_by(self, definition: str) -> set[str]:
        """Return what has a literal, and may be changed when the script makes a definition."""
        used = self._used_by(definition)
        texts = [self._items[name].text for name in used & self._items.keys() - self._literals.keys()]
        bound = frozenset[str]().union(*map(bound_globally, texts))
        found = set()
        for name in self._literals:
            if name in self._patches:
                attribute = self._target(name).rpartition(".")[2]
                changes = f".{attribute}" in used and self._root(name) != definition
            else:
                changes = name in (used if type(self._value(name)) in (list, dict, set) else bound)
            found |= {name} if changes else set()
        return found

    def _restore_changed(self) -> None:
        """Have what definitions change when they are made again be what it is, below them."""
        changing: dict[str, set[str]] = {}
        for definition in self._runs:
            for name in sorted(self._changed_by(definition)):
                changing.setdefault(name, set()).add(definition)
        for name, definitions in changing.items():
            target, value = self._target(name), self._value(name)
            item = self._items[target]
            again = set_again(target, value, item.text.partition(" = ")[2])
            key = f"{target} again"
            needs = item.needs | definitions | {self._root(name)}
            self._items[key] = CollectedItem((key,), again, item.place, needs)
            if definitions & _needed_for(item, self._items):
                empty = "{}" if type(value) is dict else f"{type(value).__name__}()"
                owner = frozenset({self._root(name)} if name in self._patches else ())
                self._items[target] = replace(item, text=f"{target} = {empty}", needs=owner)

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


def _needed_for(item: CollectedItem, items: dict[str, CollectedItem]) -> set[str]:
    """Return what must be there when an item runs, and what that needs in turn."""
    found: set[str] = set()
    more = set(item.needs)
    while more:
        found |= more
        more = set().union(*(items[name].needs for name in more & items.keys())) - found
    return found


def _in_order(items: dict[str, CollectedItem]) -> Iterator[CollectedItem]:
    """Yield items in the notebook's order, each below what it needs."""
    owner = {name: item for item in items.values() for name in item.names}
    changes: dict[str, list[CollectedItem]] = {}
    for item in items.values():
        changes.setdefault(item.completes, []).append(item)
    done: set[str] = set()
    begun: set[tuple[str, bool]] = set()

    def place_of(name: str) -> tuple[tuple[int, int], str]:
        return owner[name].place, name

    def put(item: CollectedItem, *, whole: bool) -> Iterator[CollectedItem]:
        if (item.names[0], whole) in begun:
            return
        begun.add((item.names[0], whole))
        for name in sorted(item.needs & owner.keys(), key=place_of):
            yield from put(owner[name], whole=True)
            for change in changes.get(name, ()):
                if _needed_for(change, owner).isdisjoint(item.names):
                    yield from put(change, whole=True)
        if item.names[0] not in done:
            done.add(item.names[0])
            yield item
        if whole:
            for name in sorted(item.later & owner.keys(), key=place_of):
                yield from put(owner[name], whole=True)

    ordered = sorted(
        items.values(), key=lambda item: (bool(item.definition or item.needs), item.place, item.names)
    )
    for item in ordered:
        yield from put(item, whole=False)
