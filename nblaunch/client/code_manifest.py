"""The manifest of the notebook's own modules, for ranks on other machines; only changed files are hashed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from nblaunch._errors import CaptureError
from nblaunch._help import FailureKind
from nblaunch.capture.own_modules import (
    MOST_BYTES,
    FilePrints,
    ImportedName,
    ModuleFiles,
    files_of,
    imports_in,
    roots_of,
)
from nblaunch.protocol.messages import CodeFile, CodeManifest

_TREE_BYTES = 16
_NAMED = 3


class KnownFiles:
    """A cache of the files read so far: their digests, and what they import."""

    def __init__(self) -> None:
        self._prints, self._modules = FilePrints(), ModuleFiles()
        self._imports: dict[bytes, frozenset[ImportedName]] = {}
        """By digest."""
        self._roots: tuple[tuple[tuple[str, ...], str], tuple[Path, ...]] | None = None
        """The roots, and the path and directory for which they were found."""

    def manifest(  # noqa: PLR0913 - what this process has, and what the job brings
        self,
        path: Sequence[str],
        directory: str,
        loaded: Mapping[str, ModuleType],
        sources: Iterable[str],
        *,
        compiled: Iterable[str] = (),
        scripts: Iterable[str] = (),
    ) -> CodeManifest | None:
        """Return the manifest of the notebook's own files that a job may import, None if there are none.

        `path` is this process's `sys.path`, `directory` its working directory, `loaded` its `sys.modules`.
        `sources` are texts of cells, `compiled` the files of functions that the job carries by value, and
        `scripts` files that the ranks will run. Raises `CaptureError` if the files are too large together.
        """
        scripts = tuple(os.path.abspath(each) for each in scripts)  # noqa: PTH100 - links are not followed
        roots = (*dict.fromkeys(Path(each).parent for each in scripts), *self._roots_of(path, directory))
        imports = frozenset[ImportedName]().union(*map(imports_in, sources), *map(self._imports_of, compiled))
        found = files_of(roots, self._modules.of(loaded), imports, self._imports_of, scripts)
        files = sorted(self._files(tuple(map(str, roots)), found), key=lambda each: (each.root, each.path))
        if not files:
            return None
        _refuse_too_large(roots, files)
        used = sorted({each.root for each in files})
        names = tuple(os.fsencode(roots[number]) for number in used)
        listed = tuple(msgspec.structs.replace(each, root=used.index(each.root)) for each in files)
        content = msgspec.msgpack.encode((names, listed))
        return CodeManifest(hashlib.blake2b(content, digest_size=_TREE_BYTES).hexdigest(), names, listed)

    def _roots_of(self, path: Sequence[str], directory: str) -> tuple[Path, ...]:
        given = tuple(path), directory
        if self._roots is None or self._roots[0] != given:
            self._roots = given, roots_of(path, directory)
        return self._roots[1]

    def _files(self, roots: tuple[str, ...], paths: Iterable[str]) -> Iterable[CodeFile]:
        """Yield each file once for every root above it: a rank may import it from any of them."""
        begins = [(number, root.rstrip("/") + "/") for number, root in enumerate(roots)]
        for path in paths:
            try:
                known = self._prints.of(path, self._read)
                path.encode()
            except (OSError, UnicodeEncodeError):
                continue  # unreadable, or removed meanwhile: the import on the rank reports it
            for number, begin in begins:
                if path.startswith(begin):
                    yield CodeFile(number, path.removeprefix(begin), known.digest, known.size)

    def _imports_of(self, path: str) -> frozenset[ImportedName]:
        try:
            return self._imports.get(self._prints.of(path, self._read).digest, frozenset())
        except OSError:
            return frozenset()

    def _read(self, digest: bytes, content: bytes) -> None:
        if digest not in self._imports:
            self._imports[digest] = imports_in(content)


def _refuse_too_large(roots: Sequence[Path], files: Sequence[CodeFile]) -> None:
    sizes = {each.digest: each for each in files}
    total = sum(each.size for each in sizes.values())
    if total <= MOST_BYTES:
        return
    largest = sorted(sizes.values(), key=lambda each: each.size, reverse=True)[:_NAMED]
    named = ", ".join(f"{roots[each.root] / each.path} ({each.size / 1e6:.1f} MB)" for each in largest)
    msg = (
        f"the notebook's own modules have {total / 1e6:.0f} MB, and nblaunch sends at most "
        f"{MOST_BYTES / 1e6:.0f} MB to other machines. Install what does not change on the nodes; the "
        f"largest files are {named}."
    )
    raise CaptureError(
        msg, path=str(roots[largest[0].root] / largest[0].path), size=total, kind=FailureKind.PACKAGES
    )
