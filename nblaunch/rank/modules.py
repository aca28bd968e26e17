"""The notebook's own modules on another machine: where a rank imports them from, and what is not there."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from nblaunch._inherited import is_standard_library
from nblaunch.capture.own_modules import ModuleFiles, file_of, is_installed
from nblaunch.protocol.messages import CodeTree
from nblaunch.rank import environment

_NAMED = 10


class OwnModules:
    """The notebook's own modules, as a rank on another machine imports them."""

    def __init__(self) -> None:
        self._tree = ""
        self._roots: tuple[str, ...] = ()
        """The notebook's directories, and where they are here."""
        self._entries: tuple[str, ...] = ()
        self._loaded: dict[str, tuple[ModuleSpec | None, tuple[int, int]]] = {}
        """The modules that this process has loaded from there, each with the time and size of its file."""
        self._outdated: set[str] = set()
        self._files = ModuleFiles()
        self._seen: tuple[tuple[str, ...], ...] = ()
        """All modules after the last job, their files, and where the own ones are."""
        self._own: tuple[str, ...] = ()

    def take(self, code: CodeTree) -> None:
        if code.tree == self._tree:
            return
        roots = tuple(map(os.fsdecode, code.roots))
        directory = os.fsdecode(code.directory)
        entries = tuple(f"{directory}/{number}" for number in range(len(roots))) if directory else roots
        if entries != self._entries:
            # Before installed packages, and before this machine's own files; after the standard library, as
            # in IPython.
            others = [each for each in sys.path if each not in (*self._entries, *entries)]
            standard = [each for each in others if is_standard_library(each)]
            sys.path[:] = [*standard, *entries, *(each for each in others if each not in standard)]
            environment.search_path.extend(entries)
        self._tree, self._roots, self._entries = code.tree, roots, entries
        importlib.invalidate_caches()
        self._outdated |= set(self._changed())

    def _changed(self) -> Iterator[str]:
        for name, (spec, before) in tuple(self._loaded.items()):
            module = sys.modules.get(name)
            now = _time_and_size(module)
            if module is None or getattr(module, "__spec__", None) is not spec:
                del self._loaded[name]  # it is loaded again, or will be
            elif now is not None and now != before:
                self._loaded[name] = spec, now
                yield name

    def notice(self) -> str:
        """Return a line about modules that stay as they were, but whose files have changed; "" for none."""
        names, self._outdated = sorted(self._outdated), set()
        if not names:
            return ""
        few = ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")
        return (
            f"nblaunch: changed since these ranks imported it: {few}. Load it again with "
            f"importlib.reload({names[0]}) in a cell of the session, or %distributed restart.\n"
        )

    def note_loaded(self) -> None:
        if not self._entries:
            return
        begins = tuple(f"{each}/" for each in self._entries)
        seen = (*self._files.of(sys.modules), begins)
        if seen != self._seen:
            names, files, _ = seen
            there = {name: file for name, file in zip(names, files, strict=True) if file.startswith(begins)}
            # An environment may be below a directory of the notebook's.
            own = (name for name, file in there.items() if name != "__main__" and not is_installed(file))
            self._seen, self._own = seen, tuple(own)
        for name in self._own:
            module = sys.modules.get(name)
            spec, known = getattr(module, "__spec__", None), self._loaded.get(name)
            if (known is None or known[0] is not spec) and (found := _time_and_size(module)) is not None:
                self._loaded[name] = spec, found

    def explain(self, error: BaseException) -> None:
        """Add a note to the error of a file that is missing here, if the notebook's machine may have it."""
        if not isinstance(error, FileNotFoundError) or not self._entries or self._entries == self._roots:
            return
        path = error.filename
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.fsdecode(path)
        for entry, root in zip(self._entries, self._roots, strict=True):
            if name.startswith(f"{entry}/"):
                name = root + name.removeprefix(entry)
        if os.path.isabs(name) and not name.startswith(tuple(f"{each}/" for each in self._roots)):  # noqa: PTH117
            return
        error.add_note(
            f"{name} is not on this machine. Of the notebook's own files only modules (.py) are sent to "
            "others: use a directory that all machines have, or push what is in the file."
        )

    def titles(self) -> dict[str, str]:
        """Return where the loaded modules are on the notebook's machine, by their files on this one."""
        here = tuple(zip(self._entries, self._roots, strict=True))
        return {
            file: root + file.removeprefix(entry)
            for file in map(file_of, tuple(sys.modules.values()))
            for entry, root in here
            if entry != root and file.startswith(f"{entry}/")
        }

    def path_here(self, path: str) -> str:
        """Return where a file of the notebook's is on this machine."""
        for entry, root in zip(self._entries, self._roots, strict=True):
            if f"{path}/".startswith(f"{root}/"):
                return entry + path.removeprefix(root)
        return path


def _time_and_size(module: object) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = Path(file_of(module)).stat()
        return found.st_mtime_ns, found.st_size
    return None
