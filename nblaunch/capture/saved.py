"""A session's variables in a directory: what is where, whether it may be loaded, and what it can become.

    NAME/manifest.json   for people, and for who loads: format, number of ranks, each variable and its kind
    NAME/equal.pkl       the variables that are equal on all ranks, once; sharded ones with their shape alone
    NAME/rank-2.pkl      the variables that are rank 2's own
    NAME/rank-2.data     arrays and tensors of both that rank 2 has written; the two name the place of each
    NAME/sharded/        shards, by torch.distributed.checkpoint, which reads them for any number of ranks

It is written as `NAME.partial-TOKEN` and renamed once it is whole and on the disk. While a save takes the
place of an older one, that is `NAME.before-TOKEN`: a save that is killed leaves one of the two.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nblaunch._errors import NblaunchError

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL, BEFORE = ".partial", ".before"
VariableKind = Literal["equal", "sharded", "own"]
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class SavedVariable:
    """A variable in a save.

    `name`, `kind` ("equal" on all ranks, "sharded" over them, a rank's "own"), `type`, `bytes` (all ranks
    together), and `ranks`: those that have it.
    """

    name: str
    kind: VariableKind
    type: str
    bytes: int
    ranks: tuple[int, ...]
    meshes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the device meshes that it is sharded over."""
    from_rank_0: bool = False
    """Whether another number of ranks gets that of rank 0: a DDP model whose buffers alone differ."""


@dataclass(frozen=True, slots=True)
class SavedSession:
    """What a save has of a session's ranks; its text names each variable with its kind.

    `path`, `token` (random, to tell it from others there), `world_size`, `created` (seconds since the epoch),
    `versions` of what has made it, `variables`, `left_out` (name -> why it could not be saved),
    `without_graph` (those with tensors that come back as leaves), `environment` (the names of the variables
    that cells have set), and `jobs`: the titles, states and times of the session's jobs.
    """

    path: str
    token: str
    world_size: int
    created: float
    versions: dict[str, str]
    variables: tuple[SavedVariable, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    without_graph: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    jobs: tuple[dict[str, Any], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is on the disk: a save in the background may still be written, or have failed."""
        try:
            return _manifest(Path(self.path)).token == self.token
        except (NblaunchError, OSError):
            return False

    def to_json(self) -> str:
        """Return the manifest."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in {"path", "variables"}}
        found = [{name: getattr(each, name) for name in each.__slots__} for each in self.variables]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.created))
        whole = {"format": FORMAT, "saved": when, **fields, "variables": found}
        return json.dumps(whole, indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        """Return what was saved in a few lines."""
        size = sum(each.bytes for each in self.variables) / 1e6
        lines = [f"{self.path}: {size:.0f} MB of {self.world_size} ranks"]
        for kind, words in (("equal", "equal"), ("sharded", "sharded"), ("own", "each rank's own")):
            # What comes along beside variables has names of several words.
            names = [each.name for each in self.variables if each.kind == kind and each.name.isidentifier()]
            if names:
                lines.append(f"  {words}: {listed(names)}")
        lines += [f"  without the graph: {listed(self.without_graph)}"] if self.without_graph else []
        lines += [f"  not saved: {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)


def listed(names: Collection[str]) -> str:
    """Return names in a line, the first of many."""
    shown = ", ".join(sorted(names)[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def exists(path: str) -> bool:
    """Return whether there is something under this name, which a save may be in the middle of replacing."""
    return _real(path).exists() or bool(_before(path))


def open_saved(path: str) -> SavedSession:
    """Return what a directory has. Raises `NblaunchError` if it is no save, or not safely the user's own.

    Loading unpickles, which runs code: whoever can write to the directory can run code as this user.
    """
    directory = _real(path)
    if not directory.exists():
        directory = next(iter(_before(path)), directory)
    found = _manifest(directory)
    for each in (directory, *_files(directory)):
        _refuse_others(each)
    refuse_open_parent(path)
    return found


def refuse_open_parent(path: str) -> None:
    """Raise `NblaunchError` where others could put another directory in the place of a save."""
    above = _real(path).parent
    known = above.stat()
    if known.st_mode & _OTHERS_WRITE and not known.st_mode & stat.S_ISVTX:
        msg = (
            f"{path}: other users can write to {above}, and could replace what is loaded from there, which "
            f"runs code. Name a directory elsewhere, or: chmod go-w {above}"
        )
        raise NblaunchError(msg)


def _real(path: str) -> Path:
    """Return the directory itself, where a link leads to it."""
    return Path(path).resolve()


def _before(path: str) -> list[Path]:
    """Return older saves whose place others were taking: one of these was killed, or is at it."""
    directory = _real(path)
    found = directory.parent.glob(f"{glob.escape(directory.name)}{BEFORE}-*")
    return [each for each in found if _is_save(each)]


def _is_save(directory: Path) -> bool:
    try:
        return _manifest(directory).world_size > 0
    except NblaunchError:
        return False


def _files(directory: Path) -> Iterator[Path]:
    for each in directory.rglob("*"):
        if each.is_symlink():
            msg = f"{each} is a link, and a save has none"
            raise NblaunchError(msg)
        yield each


def _refuse_others(path: Path) -> None:
    known = path.stat()
    if known.st_uid != os.getuid():
        msg = (
            f"{path} belongs to user {known.st_uid}. To load it would run that user's code: only your own "
            "saves are loaded."
        )
        raise NblaunchError(msg)
    if known.st_mode & _OTHERS_WRITE:
        msg = (
            f"other users can write to {path}, and to load it would run what they have put there. If you "
            f"trust it: chmod -R go-w {path}"
        )
        raise NblaunchError(msg)


def _manifest(directory: Path) -> SavedSession:
    try:
        known = json.loads((directory / MANIFEST).read_text())
        number, variables = known.pop("format"), known.pop("variables")
        if number != FORMAT:
            msg = f"{directory} was saved in format {number}, and this nblaunch reads format {FORMAT}."
            raise NblaunchError(msg)
        known.pop("saved")
        for each in variables:
            each["ranks"], each["meshes"] = tuple(each["ranks"]), tuple(map(tuple, each["meshes"]))
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
        found = tuple(SavedVariable(**each) for each in variables)
        return SavedSession(str(directory), variables=found, **known)
    except FileNotFoundError:
        begun = next(_begun(directory), None)
        why = f" ({begun} was begun, and is not whole)" if begun is not None else ""
        msg = f"{directory} is no saved session: it has no {MANIFEST}{why}."
        raise NblaunchError(msg) from None
    except OSError as error:
        msg = f"{directory / MANIFEST} cannot be read: {error.strerror}"
        raise NblaunchError(msg) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{directory / MANIFEST} cannot be read: {type(error).__name__}: {error}"
        raise NblaunchError(msg) from None


# Another number of ranks.


def scaled(shape: Sequence[int], world_size: int) -> tuple[int, ...] | None:
    """Return the shape that a mesh of all ranks has with another number of ranks, None if there is none.

    The first dimension grows and shrinks: that of the data, or the only one.

    >>> scaled((4,), 2), scaled((2, 2), 8), scaled((2, 4), 6)
    ((2,), (4, 2), None)
    """
    _, *inner = shape
    others = 1
    for each in inner:
        others *= each
    return (world_size // others, *inner) if world_size >= others and not world_size % others else None


def fit(saved: SavedSession, world_size: int, drop: Collection[str]) -> frozenset[str]:
    """Return the variables that do not come back. Raises `NblaunchError` for some that cannot.

    `drop` are those that the user can do without, "all" for all that cannot come back.
    """
    if saved.world_size == world_size:
        return frozenset(each.name for each in saved.variables if each.name in drop)
    own = [each.name for each in saved.variables if each.kind == "own" and not each.from_rank_0]
    formless = {
        each.name: shape
        for each in saved.variables
        for shape in each.meshes
        if each.kind != "own" and scaled(shape, world_size) is None
    }
    lost = {*own, *formless}
    wanted = {name for name in lost if name.isidentifier()}.difference(drop)
    if wanted and "all" not in drop:
        why = [f"{name} is each rank's own" for name in own if name in wanted]
        why += [f"{name} needs a mesh like {shape}" for name, shape in formless.items() if name in wanted]
        msg = (
            f"{Path(saved.path).name} was saved by {saved.world_size} ranks, and {world_size} cannot have "
            f"all of it: {listed(why)}. Start {saved.world_size} ranks, or leave these out: "
            f"--drop {','.join(sorted(wanted))}, or --drop all."
        )
        raise NblaunchError(msg)
    return frozenset(lost | {each.name for each in saved.variables if each.name in drop})


# Writing.


def partial(path: str, token: str) -> Path:
    """Return the directory in which a save is written."""
    return Path(f"{_real(path)}{PARTIAL}-{token}")


def _begun(directory: Path) -> Iterator[Path]:
    yield from directory.parent.glob(f"{glob.escape(directory.name)}{PARTIAL}-*")


def begin(path: str, token: str, replaces: Collection[str] | None = None) -> Path:
    """Make the directory that is renamed at the end. Raises `NblaunchError` or `OSError`.

    Another save of that name that is being written fails: its directory is gone at once. `replaces` are the
    tokens of the saves in whose place this one may come; None: of any.
    """
    directory, made, before = _real(path), partial(path, token), _before(path)
    directory.parent.mkdir(parents=True, exist_ok=True)
    refuse_open_parent(path)
    if before and not directory.exists():
        before[0].rename(directory)  # a save was killed while it took the place of this one
    if directory.exists() and not _is_save(directory):
        msg = f"{path} is there already, and is no saved session. Give another name."
        raise NblaunchError(msg)
    if replaces is not None and directory.exists() and _manifest(directory).token not in replaces:
        msg = f"{path} is another session's save by now. %distributed save NAME writes to a place of its own."
        raise NblaunchError(msg)
    for each in _begun(directory):
        removed = partial(path, secrets.token_hex(4))
        with contextlib.suppress(FileNotFoundError):
            each.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    made.mkdir(mode=0o700)
    return made


def commit(saved: SavedSession) -> None:
    """Have the directory take its name: it is whole."""
    directory, made = _real(saved.path), partial(saved.path, saved.token)
    before = Path(f"{directory}{BEFORE}-{saved.token}")
    fd = create(made / MANIFEST)
    with os.fdopen(fd, "w") as file:
        file.write(saved.to_json())
        file.flush()
        os.fsync(fd)
    for each in made.rglob("*"):
        each.chmod(0o700 if each.is_dir() else 0o600)
        if each.is_dir():
            _sync(each)
    _sync(made)
    if directory.exists():
        directory.rename(before)
    made.rename(directory)
    _sync(directory.parent)
    for older in _before(saved.path):
        shutil.rmtree(older, ignore_errors=True)


def create(path: Path) -> int:
    """Return a descriptor of a new file that only this user can read."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
