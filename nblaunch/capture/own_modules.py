"""Finds the notebook's own files that a job may import: modules that belong to no installed package.

Only import statements show what a module will load while a job runs. So packages are taken whole, and the
import statements of every file are followed, those inside functions too.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import operator
import os
import re
import site
import stat
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

MOST_BYTES = 64 * 1024 * 1024
"""The limit for all files together; more raises an error that names the largest."""

_OURS = __name__.partition(".")[0]
_DIGEST_BYTES = 16
# Larger files are generated: parsing them takes long and finds no imports.
_PARSED_BYTES = 1024 * 1024
# Some file systems keep times in seconds: a file younger than this may change and keep its time.
_SETTLED_SECONDS = 2.0
_MARKS_OF_A_PROJECT = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg")
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_MAGIC = re.compile(r"^(\s*)[%!?].*$", re.MULTILINE)


class ImportedName(NamedTuple):
    """A name in an import statement; `level` is the number of leading dots."""

    level: int
    parts: tuple[str, ...]


class FilePrint(NamedTuple):
    """The digest of a file's content, and its size."""

    digest: bytes
    size: int


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


class FilePrints:
    """Prints of files; reads a file again only if it has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int, int], FilePrint]] = {}
        """By path, with the file's inode, size and modification time."""

    def of(
        self, path: str, read: Callable[[bytes, bytes], None] = lambda _digest, _content: None
    ) -> FilePrint:
        """Return the print of a regular file; call `read` with digest and content if it had to be read.

        Raises `OSError`.
        """
        found = os.stat(path)  # noqa: PTH116 - strings: there may be thousands
        if not stat.S_ISREG(found.st_mode):
            msg = f"{path} is not a regular file"
            raise OSError(msg)
        seen = found.st_ino, found.st_size, found.st_mtime_ns
        if path in self._known and self._known[path][0] == seen:
            return self._known[path][1]
        content = Path(path).read_bytes()
        known = FilePrint(digest_of(content), len(content))
        if time.time() - found.st_mtime > _SETTLED_SECONDS:
            self._known[path] = seen, known
        read(known.digest, content)
        return known


class ModuleFiles:
    """Reads the files of the loaded modules: there are thousands, and each cell asks for them."""

    def __init__(self) -> None:
        self._modules: tuple[object, ...] = ()
        self._names: tuple[str, ...] = ()
        self._files: tuple[str, ...] = ()

    def of(self, loaded: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of modules, and the file of each, "" for one without.

        `loaded` is `sys.modules`, in whose order a module that is loaded again becomes the last.
        """
        there = dict(loaded)  # other threads import
        names, modules = tuple(there), tuple(there.values())
        if names != self._names or not all(map(operator.is_, modules, self._modules)):
            self._names, self._modules, self._files = names, modules, tuple(map(file_of, modules))
        elif modules and (last := file_of(modules[-1])) != self._files[-1]:
            self._files = (*self._files[:-1], last)
        return self._names, self._files


def roots_of(path: Sequence[str], directory: str) -> tuple[Path, ...]:
    """Return the directories of `path` that hold the notebook's own modules.

    These exclude the standard library and installed packages. The source of an editable install counts as
    the notebook's own if it is in the notebook's project. `directory` is the working directory, to which
    relative entries refer.
    """
    project = _project_of(directory)
    found: dict[Path, None] = {}
    for entry in path:
        root = os.path.normpath(os.path.join(directory, entry))  # noqa: PTH118 - "" is the directory itself
        if not Path(root).is_dir() or is_installed(root) or is_installed(os.path.realpath(root)):
            continue
        if root in _linked() and not is_below(root, (project,)):
            continue
        found[Path(root)] = None
    return tuple(found)


def is_installed(path: str) -> bool:
    return is_below(path, _installed()) or not _PACKAGES.isdisjoint(path.split("/"))


@functools.lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    with contextlib.suppress(AttributeError):  # an embedded Python may have none
        found += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({*found, *map(os.path.realpath, found)})


@functools.lru_cache(maxsize=1)
def _linked() -> frozenset[str]:
    """Return the directories that `.pth` files add to the path: the sources of editable installs."""
    found = set()
    for directory in map(Path, _installed()):
        for path in directory.glob("*.pth"):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").splitlines()
                found |= {os.path.normpath(directory / line.strip()) for line in lines if line.strip()}
    return frozenset(found)


def _project_of(directory: str) -> str:
    """Return the root of the project that contains a directory; the directory itself if there is none."""
    here = Path(directory)
    marked = (
        each for each in (here, *here.parents) if any((each / mark).exists() for mark in _MARKS_OF_A_PROJECT)
    )
    return str(next(marked, here))


def is_below(path: str, directories: Iterable[str]) -> bool:
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in directories)


def imports_in(source: str | bytes) -> frozenset[ImportedName]:
    """Return the names in the import statements of a module or a cell; none if it is not Python.

    >>> sorted(imports_in("import a.b; from .c import d"))
    [ImportedName(level=0, parts=('a', 'b')), ImportedName(level=1, parts=('c', 'd'))]
    """
    if len(source) > _PARSED_BYTES:
        return frozenset()
    tree = _parsed(source)
    if tree is None and isinstance(source, str):
        # A cell with magics. If a magic is inside a statement, the lines are parsed one by one.
        plain = _MAGIC.sub(r"\1pass", source)
        lines = (_parsed(line.strip()) for line in plain.splitlines() if "import" in line)
        tree = _parsed(plain) or ast.Module([each for line in lines if line for each in line.body], [])
    return frozenset(_imported_names(tree)) if tree is not None else frozenset()


def _parsed(source: str | bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imported_names(tree: ast.Module) -> Iterator[ImportedName]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (ImportedName(0, tuple(each.name.split("."))) for each in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = tuple(module.split(".")) if module else ()
                yield from (ImportedName(level, (*base, each.name)) for each in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module"), args=[ast.Constant(str(name)), *_]
            ):
                yield ImportedName(0, tuple(name.split(".")))
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(str(name)), *_]):
                yield ImportedName(0, tuple(name.split(".")))


def files_of(
    roots: Sequence[Path],
    loaded: tuple[tuple[str, ...], tuple[str, ...]],
    imports: Iterable[ImportedName],
    imports_of: Callable[[str], Iterable[ImportedName]],
    begin: Iterable[str] = (),
) -> tuple[str, ...]:
    """Return, sorted, the files below the roots that a job may import.

    The search begins with the modules that are `loaded` (`ModuleFiles.of`), the `imports` of the job's source
    and the files `begin`. It adds the packages of all files found, and follows their imports, which
    `imports_of(path)` returns.
    """
    return _FileSearch(roots, loaded, imports_of).files(imports, begin)


class _FileSearch:
    def __init__(
        self,
        roots: Sequence[Path],
        loaded: tuple[tuple[str, ...], tuple[str, ...]],
        imports_of: Callable[[str], Iterable[ImportedName]],
    ) -> None:
        self._roots = tuple(map(str, roots))
        self._imports_of = imports_of
        self._found: set[str] = set()
        self._new: list[str] = []
        self._seen: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()
        self._packages: set[str] = set()
        self._loaded, self._elsewhere = _sort_modules(self._roots, *loaded)

    def files(self, imports: Iterable[ImportedName], begin: Iterable[str]) -> tuple[str, ...]:
        for path in (*begin, *self._loaded):
            self._add(path)
        for each in imports:
            self._add_module(self._roots, each.parts)
        while self._new:
            path = self._new.pop()
            for each in self._imports_of(path):
                if not each.level:
                    self._add_module(self._roots, each.parts)
                    continue
                directory = path
                for _ in range(each.level):
                    directory = os.path.dirname(directory)  # noqa: PTH120 - strings: there may be thousands
                if is_below(directory, self._roots):
                    self._add_module((directory,), each.parts)
        return tuple(sorted(self._found))

    def _add(self, path: str) -> None:
        if path in self._found:
            return
        self._found.add(path)
        self._new.append(path)
        package, directory = "", os.path.dirname(path)  # noqa: PTH120
        while directory not in self._roots and os.path.isfile(f"{directory}/__init__.py"):  # noqa: PTH113
            package, directory = directory, os.path.dirname(directory)  # noqa: PTH120
        if package and package not in self._packages:
            self._packages.add(package)
            self._add_all(package)

    def _add_all(self, package: str) -> None:
        """Add the files of a package; skip directories that are not packages, which may hold anything."""
        for directory, below, names in os.walk(package):
            if "__init__.py" not in names:
                below.clear()
                continue
            for name in names:
                path = f"{directory}/{name}"
                if name.endswith(".py") and path not in self._found:
                    self._found.add(path)
                    self._new.append(path)

    def _add_module(self, directories: tuple[str, ...], parts: tuple[str, ...]) -> None:
        """Add this module and its parent packages, as far as they exist."""
        if (directories, parts) in self._seen or (directories == self._roots and parts[0] in self._elsewhere):
            return
        self._seen.add((directories, parts))
        for part in parts:
            portions = []
            for directory in directories:
                path = f"{directory}/{part}"
                if os.path.isfile(f"{path}/__init__.py"):  # noqa: PTH113
                    self._add(f"{path}/__init__.py")
                    portions = [path]
                    break
                if os.path.isfile(f"{path}.py"):  # noqa: PTH113
                    self._add(f"{path}.py")
                    return
                if os.path.isdir(path):  # noqa: PTH112
                    portions.append(path)
            directories = tuple(portions)


@functools.lru_cache(maxsize=1)
def _sort_modules(
    roots: tuple[str, ...], names: tuple[str, ...], files: tuple[str, ...]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the files of the loaded modules below a root, and the names that Python has found elsewhere."""
    known = [(name, file) for name, file in zip(names, files, strict=True) if file]
    begins = tuple(root.rstrip("/") + "/" for root in roots)
    own = {
        name: file
        for name, file in known
        if file.startswith(begins)
        and file.endswith(".py")
        and name.partition(".")[0] not in ("__main__", "__mp_main__", _OURS)
        and not is_installed(file)
    }
    # A file of the same name below a root is not meant.
    elsewhere = {name for name, _ in known if "." not in name}
    tops = {name.partition(".")[0] for name in own}
    return tuple(own.values()), frozenset((elsewhere | sys.stdlib_module_names | {_OURS}) - tops)


def file_of(module: object) -> str:
    """Return the file of a loaded module, "" for one without."""
    # Not by attribute: a lazy module would load itself.
    file = module.__dict__.get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else ""
