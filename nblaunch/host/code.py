"""The notebook's own modules on a node: files by digest, and trees of links to them, reused by later jobs.

    runtime                                    node
      JobCode ─────── HaveCode ────────────────> NodeCode   which files are neither kept nor at their path?
              <────── CodeLacking ─────────────
              ─────── CodeFiles, pieces ───────>            files/<digest>, trees/<tree>/<root>/<path>
              ─────── Dispatch(code) ──────────>            waits for the tree; views/<group> links to it

A group's ranks import through the group's view, a link that each job points to its tree. So a module keeps
its path when its content changes, like a file that is edited, and packages find new modules.

If all files are the same at the notebook's own paths, as on a shared file system, ranks use those.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from nblaunch.capture.own_modules import FilePrints, digest_of
from nblaunch.host.wire import CodeFiles, CodeLacking, HaveCode, Piece
from nblaunch.protocol.messages import CodeFile, CodeManifest, CodeTree

_SMALL = 64 * 1024
_MOST_MANIFESTS = 64
# Files and trees that no group uses are kept up to these limits.
_KEPT_TREES = 8
_KEPT_BYTES = 256 * 1024 * 1024

_content = msgspec.msgpack.Decoder(dict[bytes, bytes])


class JobCode:
    """The runtime's side: asks each node which files of a job it lacks, and sends them; hub's thread."""

    def __init__(
        self,
        send: Callable[[bytes, HaveCode | CodeFiles, memoryview | None], None],
        send_payload: Callable[[bytes, bytes], int] | None = None,
        read: Callable[[Callable[[], bytes], Callable[[bytes], None]], None] = lambda work, then: then(
            work()
        ),
    ) -> None:
        """`send` sends a message to a node, with the bytes that follow it.

        `send_payload` sends content to a node as a payload of group "", and returns the payload's number.
        `read` runs its first function on another thread, and the second one with the result on the hub's
        thread.
        """
        self._send, self._send_payload, self._read = send, send_payload, read
        self._manifests: dict[str, CodeManifest] = {}
        self._asked: dict[bytes, str] = {}
        """The tree that each node was asked for last."""
        self._answered: set[tuple[bytes, str]] = set()
        """Nodes and trees whose files were sent."""
        self._payloads: dict[tuple[bytes, str], int] = {}
        """The number of the payload in which a node was sent the files of a tree."""

    def learn(self, manifest: CodeManifest) -> None:
        """Register the manifest of a job before it is dispatched; from any thread."""
        self._manifests[manifest.tree] = manifest
        for tree in list(self._manifests)[:-_MOST_MANIFESTS]:
            self._manifests.pop(tree, None)

    def ask(self, node: bytes, code: CodeTree) -> None:
        """Have a node make a job's tree, unless it has it; call this before sending the job."""
        manifest = self._manifests.get(code.tree)
        if manifest is not None and self._asked.get(node) != code.tree:
            self._asked[node] = code.tree
            self._answered.discard((node, code.tree))
            self._send(node, HaveCode(manifest=manifest), None)

    def answer(self, node: bytes, lacking: CodeLacking) -> None:
        """Send a node the files that it lacks; it answers again if it still lacks some."""
        manifest, sent = self._manifests.get(lacking.tree), (node, lacking.tree)
        if not lacking.digests or manifest is None:
            return
        if sent in self._answered:
            self._asked.pop(node, None)
            return
        self._answered.add(sent)
        self._read(
            lambda: msgspec.msgpack.encode(_read(manifest, frozenset(lacking.digests))),
            lambda content: self._send_files(node, lacking.tree, content),
        )

    def _send_files(self, node: bytes, tree: str, content: bytes) -> None:
        if (node, tree) not in self._answered:
            return  # the node is gone, or has been asked again
        if len(content) <= _SMALL or self._send_payload is None:
            self._send(node, CodeFiles(tree=tree, number=0), memoryview(content))
        else:
            number = self._payloads[node, tree] = self._send_payload(node, content)
            self._send(node, CodeFiles(tree=tree, number=number), None)

    def lost(self, number: int) -> bytes | None:
        """Ask the node again that was sent this payload, which was lost on its way; return the node."""
        for node, tree in [key for key, payload in self._payloads.items() if payload == number]:
            del self._payloads[node, tree]
            self._answered.discard((node, tree))
            if tree in self._manifests:
                self._send(node, HaveCode(manifest=self._manifests[tree]), None)
            return node
        return None

    def forget(self, node: bytes) -> None:
        self._asked.pop(node, None)
        self._answered = {each for each in self._answered if each[0] != node}
        self._payloads = {each: number for each, number in self._payloads.items() if each[0] != node}


def _read(manifest: CodeManifest, digests: frozenset[bytes]) -> dict[bytes, bytes]:
    """Return the content of these files; leave out files that changed since, which the node will report."""
    found: dict[bytes, bytes] = {}
    for each in manifest.files:
        if each.digest in digests and each.digest not in found:
            with contextlib.suppress(OSError):
                content = Path(_at(manifest.roots, each)).read_bytes()
                if digest_of(content) == each.digest:
                    found[each.digest] = content
    return found


def _at(roots: tuple[bytes, ...], file: CodeFile) -> str:
    return f"{os.fsdecode(roots[file.root])}/{file.path}"


class NodeCode:
    """The node's side: its files and trees; on the hub's thread."""

    def __init__(
        self,
        root: Path,
        send: Callable[[CodeLacking], None],
        run_aside: Callable[
            [Callable[[], frozenset[bytes]], Callable[[frozenset[bytes]], None]], None
        ] = lambda work, then: then(work()),
    ) -> None:
        """Keep them below `root`, which is private; `send` answers the runtime.

        `run_aside` has a thread of its own read the notebook's own paths, where a file system may not answer,
        and gives what that returns to the other, on the hub's thread.
        """
        self._files, self._trees, self._views = (root / name for name in ("files", "trees", "views"))
        self._send, self._run_aside = send, run_aside
        self._prints = FilePrints()
        self._manifests: dict[str, CodeManifest] = {}
        self._shared: set[str] = set()
        """Trees whose files are the same at the notebook's own paths."""
        self._whole: dict[str, None] = {}
        """Trees that exist, the most recently used last."""
        self._used: dict[str, str] = {}
        """The tree that each group's view links to."""
        self._errors: dict[str, OSError] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._pieces: dict[int, bytearray] = {}
        self._missing: dict[int, int] = {}
        """How many bytes of each payload are missing."""
        self._announced: dict[int, str] = {}
        """The tree that a payload is for."""

    # --- from the runtime --------------------------------------------------------------------------

    def have(self, manifest: CodeManifest) -> None:
        tree = manifest.tree
        self._shared.discard(tree)
        self._errors.pop(tree, None)
        try:
            for each in manifest.files:
                _refuse_elsewhere(manifest, each)
        except OSError as error:
            self._fail(tree, error)
            return
        self._remember(manifest)

        def find() -> frozenset[bytes]:
            return frozenset(each.digest for each in manifest.files if not self._is_there(manifest, each))

        self._run_aside(find, lambda elsewhere: self._found_lacking(tree, elsewhere))

    def _found_lacking(self, tree: str, elsewhere: frozenset[bytes]) -> None:
        lacking = tuple(sorted(digest for digest in elsewhere if not self._kept(digest).exists()))
        try:
            if not elsewhere:
                self._shared.add(tree)
            elif not lacking:
                self._make(tree)
        except OSError as error:
            self._fail(tree, error)
            return
        self._errors.pop(tree, None)
        self._send(CodeLacking(tree=tree, digests=lacking))
        if not lacking:
            self._settle(tree)

    def _remember(self, manifest: CodeManifest) -> None:
        self._manifests[manifest.tree] = manifest
        for tree in [each for each in self._manifests if each not in self._whole][:-_MOST_MANIFESTS]:
            del self._manifests[tree]
            self._shared.discard(tree)
            self._errors.pop(tree, None)

    def receive(self, message: HaveCode | CodeFiles | Piece, data: memoryview) -> None:
        match message:
            case HaveCode(manifest=manifest):
                self.have(manifest)
            case CodeFiles(tree=tree, number=number) if not number:
                self._take(tree, data)
            case CodeFiles(tree=tree, number=number):
                self._announced[number] = tree
                self._take_whole(number)
            case Piece(number=number, offset=offset, total=total):
                whole = self._pieces.setdefault(number, bytearray(total))
                whole[offset : offset + data.nbytes] = data
                self._missing[number] = self._missing.get(number, total) - data.nbytes
                self._take_whole(number)

    def _take_whole(self, number: int) -> None:
        if number in self._announced and self._missing.get(number) == 0:
            del self._missing[number]
            self._take(self._announced.pop(number), memoryview(self._pieces.pop(number)))

    def _take(self, tree: str, data: memoryview) -> None:
        try:
            self.add(tree, _content.decode(data))
        except (OSError, msgspec.MsgspecError) as error:
            self._fail(tree, error if isinstance(error, OSError) else OSError(str(error)))
        else:
            self._errors.pop(tree, None)
            self._settle(tree)

    def add(self, tree: str, files: Mapping[bytes, bytes]) -> None:
        """Add the files that were lacking, and make the tree. Raises `OSError`."""
        for digest, content in files.items():
            if digest_of(content) == digest:
                self._keep(digest, content)
        self._make(tree)

    def _fail(self, tree: str, error: OSError) -> None:
        """Record the error, which waiting jobs get; the runtime asks again with the next job."""
        self._errors[tree] = error
        manifest = self._manifests.get(tree)
        digests = {each.digest for each in manifest.files} if manifest is not None else {b""}
        self._send(CodeLacking(tree=tree, digests=tuple(sorted(digests))))
        self._settle(tree)

    def _settle(self, tree: str) -> None:
        for act in self._waiting.pop(tree, []):
            act()

    # --- for jobs ----------------------------------------------------------------------------------

    def is_settled(self, tree: str) -> bool:
        """Whether jobs need not wait for this tree: it exists, or could not be made."""
        known = tree in self._manifests
        return not known or tree in self._whole or tree in self._shared or tree in self._errors

    def when_settled(self, tree: str, act: Callable[[], None]) -> None:
        if self.is_settled(tree):
            act()
        else:
            self._waiting.setdefault(tree, []).append(act)

    def point_view(self, code: CodeTree, group: str) -> CodeTree:
        """Point the group's view to a job's modules; return where they are. Raises `OSError`."""
        if code.tree in self._errors:
            raise self._errors[code.tree]
        if code.tree in self._shared and group not in self._used:
            return code
        if code.tree not in self._whole:
            self._make(code.tree)
        view = self._views / group
        if self._used.get(group) != code.tree:
            self._views.mkdir(parents=True, exist_ok=True)
            link = self._views / f".{group}"
            link.unlink(missing_ok=True)
            link.symlink_to(self._trees / code.tree)
            link.replace(view)
            self._used[group] = code.tree
            self._whole[code.tree] = self._whole.pop(code.tree)
            self._make_room()
        return msgspec.structs.replace(code, directory=os.fsencode(view))

    def release(self, group: str) -> None:
        if self._used.pop(group, None) is not None:
            (self._views / group).unlink(missing_ok=True)
            self._make_room()

    # --- files and trees ---------------------------------------------------------------------------

    def _is_there(self, manifest: CodeManifest, file: CodeFile) -> bool:
        with contextlib.suppress(OSError):
            return self._prints.of(_at(manifest.roots, file)).digest == file.digest
        return False

    def _kept(self, digest: bytes) -> Path:
        return self._files / digest.hex()

    def _keep(self, digest: bytes, content: bytes) -> None:
        self._files.mkdir(parents=True, exist_ok=True)
        new = self._files / ".new"
        new.write_bytes(content)
        new.replace(self._kept(digest))

    def _make(self, tree: str) -> None:
        """Make a tree atomically. Raises `OSError`, and `FileNotFoundError` if a file is missing."""
        if tree in self._whole:
            return
        manifest = self._manifests.get(tree)
        if manifest is None:
            msg = "this node did not receive the notebook's modules for this job. Run the cell again."
            raise FileNotFoundError(msg)
        new = self._trees / ".new"
        shutil.rmtree(new, ignore_errors=True)
        for each in manifest.files:
            kept, path = self._kept(each.digest), new / str(each.root) / each.path
            if not kept.exists():
                self._take_over(manifest, each)
            path.parent.mkdir(parents=True, exist_ok=True)
            _link(kept, path)
        new.replace(self._trees / tree)
        self._whole[tree] = None

    def _take_over(self, manifest: CodeManifest, file: CodeFile) -> None:
        """Copy a file from the notebook's own path. Raises `FileNotFoundError` if it is not the same."""
        path = _at(manifest.roots, file)
        with contextlib.suppress(OSError):
            content = Path(path).read_bytes()
            if digest_of(content) == file.digest:
                self._keep(file.digest, content)
                return
        msg = f"{path} changed, or was removed, while it was being sent to this node. Run the cell again."
        raise FileNotFoundError(msg)

    def _make_room(self) -> None:
        """Remove files and trees that no group uses, the oldest first, down to the limits."""
        unused = [tree for tree in self._whole if tree not in self._used.values()]
        total = self._size(self._whole)
        # Not the last one: a job is about to use it.
        while len(unused) > 1 and (len(unused) > _KEPT_TREES or total > _KEPT_BYTES):
            tree = unused.pop(0)
            del self._whole[tree]
            shutil.rmtree(self._trees / tree, ignore_errors=True)
            total = self._size(self._whole)
            self._forget_files(self._manifests.pop(tree))

    def _size(self, trees: Iterable[str]) -> int:
        files = {each.digest: each.size for tree in trees for each in self._manifests[tree].files}
        return sum(files.values())

    def _forget_files(self, manifest: CodeManifest) -> None:
        needed = {each.digest for tree in self._whole for each in self._manifests[tree].files}
        for digest in {each.digest for each in manifest.files} - needed:
            self._kept(digest).unlink(missing_ok=True)


def _refuse_elsewhere(manifest: CodeManifest, file: CodeFile) -> None:
    """Raise `OSError` for a file outside the manifest's roots, or a tree whose name is not a plain one."""
    path = PurePosixPath(file.path)
    inside = not path.is_absolute() and ".." not in path.parts and 0 <= file.root < len(manifest.roots)
    if not inside or not manifest.tree.isalnum():
        msg = f"the notebook's manifest names a file outside its directories: {file.path}"
        raise OSError(msg)


def _link(kept: Path, path: Path) -> None:
    try:
        path.hardlink_to(kept)
    except OSError:  # the file system has no hard links, or no more for this file
        shutil.copy2(kept, path)
