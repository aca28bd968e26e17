"""A rank's part in saving the variables of a session, and in loading them. Imported when it is asked for.

A variable is one of three kinds, found by itself:

    equal     its pickle has the same bytes on all ranks: one copy, which the ranks write together
    sharded   equal but for the shards of its DTensors, which torch.distributed.checkpoint writes (`sharded`)
    own       all others: each rank writes its own

What would be saved is what is compared, so no two values are taken for equal that would not come back equal.
Equal variables are pickled first, one after the other by one pickler, so that objects in several of them stay
one object: an optimizer has the model's parameters. The own ones follow, and refer to objects of the equal
ones by their place in that pickle. What cannot be saved on one rank is left out on all, by name; so is what
cannot be loaded.

A save that goes on beside cells writes copies on a thread. Ranks compare over the agent's store, which needs
no process group, in JSON: others could write there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import platform
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nblaunch._errors import NblaunchError
from nblaunch._version import __version__
from nblaunch.capture import arrays, pickling, saved, tensors
from nblaunch.capture.identity import has_identity
from nblaunch.capture.parts import LEAVES, is_by_value, type_name
from nblaunch.capture.unpicklable import find_culprit, reason_of
from nblaunch.probes import surroundings
from nblaunch.rank import environment, namespace, process_group, sharded, shell

_ALIGNED = 64
_PIECE = 64 << 20
_SAMPLE = 1 << 16
_POLL_SECONDS, _MOST_SECONDS = 0.001, 0.05
_SEARCH_SECONDS = 1.0
SETTINGS, ENVIRONMENT = "settings of torch", "environment variables"
SOURCES, NOTEBOOKS = "sources of functions", "code of the notebook"
"""What is saved beside the variables. No variable has such a name, nor "random state of Python"."""


class _Meeting:
    """The ranks of a save or a load, which compare what they have."""

    def __init__(self, token: str) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = process_group.own_store(f"save {token}")
        self._step = 0

    def tell(self, own: Any) -> list[Any]:
        """Return what all ranks tell here, in their order. Raises `NblaunchError` if one has failed."""
        self._step += 1
        self._store.set(f"{self._step}/{self.rank}", json.dumps(own))
        told = []
        for rank in range(self.world_size):
            seconds = _POLL_SECONDS
            while not self._store.check([f"{self._step}/{rank}"]):
                if self._store.check([f"failed/{rank}"]):
                    msg = f"rank {rank}: {self._store.get(f'failed/{rank}').decode()}"
                    raise NblaunchError(msg)
                time.sleep(seconds)
                seconds = min(2 * seconds, _MOST_SECONDS)
            told.append(json.loads(self._store.get(f"{self._step}/{rank}")))
        # All have told this, so all have read the last.
        self._store.delete_key(f"{self._step - 1}/{self.rank}")
        return told

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Have the others not wait for a rank that leaves this block by an exception."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # they then wait for an interrupt
                self._store.set(f"failed/{self.rank}", reason_of(error))
            raise


class _ClassNames:
    """Names of the classes that are saved by value, the same on all ranks."""

    def __init__(self) -> None:
        self._names: dict[type, str] = {}

    def of(self, kind: type, dump: Callable[[type], bytes]) -> str:
        if kind not in self._names:
            self._names[kind] = "?"  # within its own definition
            name = pickling.received_classes.get(kind) or f"saved-{hashlib.sha256(dump(kind)).hexdigest()}"
            taken = sum(each.partition(" ")[0] == name for each in self._names.values())
            self._names[kind] = f"{name} {taken + 1}" if taken else name
        return self._names[kind]


class _Pickler(pickling.Outbound):
    """Functions read their globals in the rank's namespace, and bring none: variables are saved by name."""

    def __init__(
        self,
        *arguments: Any,
        met: sharded.GroupObjects,
        classes: _ClassNames,
        places: Mapping[int, tuple[int, Any]],
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, namespace=None, known=None, **keywords)
        self.met, self._classes, self._equal = met, classes, places
        self.lines: dict[str, set[int]] = {}
        """The lines of its functions, by file."""

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) in LEAVES:
            return None
        known = self._equal.get(id(obj))
        if known is not None:
            return known[0] + 1
        return 0 if id(obj) in self._notebook else None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.CodeType:
            self.lines.setdefault(obj.co_filename, set()).update(_lines_of(obj))
        if obj is os.environ:
            return _environ, ()  # with what it has there, and not here
        reduced = self.met.reduce(obj)
        if reduced is NotImplemented:
            reduced = tensors.reduce_device(obj)
            if isinstance(reduced, tuple):  # arrives as the rank's own, whichever it is here
                make, (kind, index) = reduced
                return make, (kind, None if index is None else 0)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced

    def needed_by(self, obj: Any) -> dict[str, Any]:  # noqa: ARG002 - see the class
        return {}

    def reduce_tensor(self, tensor: Any) -> Any:
        if not sharded.is_dtensor(tensor):
            return super().reduce_tensor(tensor)
        if tensor.grad_fn is not None:
            self.detached.append(tensor)
        parts, reduced = tensors.parts_of(tensor), self.met.tensor(tensor)
        return reduced if parts is None else tensors.with_parts(tensor, reduced, parts)

    def _name_of(self, obj: type) -> str:
        def dump(kind: type) -> bytes:
            stream = io.BytesIO()
            keywords: Any = {"protocol": 5, "met": self.met, "classes": self._classes, "places": {}}
            type(self)(stream, **keywords).dump(kind)
            return stream.getvalue()

        return self._classes.of(obj, dump)


def _lines_of(code: types.CodeType) -> range:
    lines = [line for *_, line in code.co_lines() if line]
    return range(code.co_firstlineno, max(lines, default=code.co_firstlineno) + 1)


def _environ() -> Any:
    return os.environ


Data = memoryview | tensors.Far


class _Segments:
    """Variables in one pickle, one after the other."""

    def __init__(
        self,
        met: sharded.GroupObjects,
        classes: _ClassNames,
        equal: _Segments | None = None,
        first: Sequence[Any] = (),
    ) -> None:
        self.places: dict[int, tuple[int, Any]] = {} if equal is None else equal.objects()
        self._file = io.BytesIO()
        self._waiting: list[memoryview | tensors.Deferred] = []
        memories = (arrays.Memory, torch.UntypedStorage)
        known = [obj for _, obj in self.places.values() if arrays.is_array(obj) or isinstance(obj, memories)]
        self._storages = arrays.WholeMemories(self._key_of, (lambda: known) if known else tuple, first=first)
        self.pickler = _Pickler(
            self._file,
            protocol=5,
            buffer_callback=self._keep_inside,
            storages=self._storages,
            met=met,
            classes=classes,
            places=self.places,
        )
        self.segments: list[tuple[str, int, int]] = []
        """(name, end in the stream, buffers until then) of each variable."""
        self.digests: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.shards: dict[str, list[str]] = {}
        """The numbers of each variable's shards; those that several share are the first one's."""

    def _key_of(self, obj: Any) -> int | None:
        known = self.places.get(id(obj))
        return None if known is None else known[0]

    def _keep_inside(self, buffer: pickle.PickleBuffer) -> bool:
        if (deferred := self._storages.deferred(buffer)) is not None:
            self._waiting.append(deferred)
            return False
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: pickle copies it into the stream
            return True
        if raw.nbytes < pickling.OUT_OF_BAND:
            return True
        self._waiting.append(raw)
        return False

    def add(self, name: str, value: Any) -> None:
        """Add a variable. Raises whatever its objects raise; then nothing can be added any more."""
        begin, buffers, shards = self._file.tell(), len(self._waiting), len(self.pickler.met.shards)
        self.pickler.dump(value)
        sizes = [_size_of(each) for each in self._waiting[buffers:]]
        with self._file.getbuffer() as whole:
            self.digests[name] = hashlib.sha256(repr(sizes).encode() + bytes(whole[begin:])).hexdigest()
        self.sizes[name] = self._file.tell() - begin + sum(sizes)
        self.shards[name] = list(self.pickler.met.shards)[shards:]
        self.segments.append((name, self._file.tell(), len(self._waiting)))

    @property
    def stream(self) -> bytes:
        return self._file.getvalue()

    def buffers(self) -> list[Data]:
        """Return the buffers, once all variables are there."""
        return [each if isinstance(each, memoryview) else each() for each in self._waiting]

    def objects(self) -> dict[int, tuple[int, Any]]:
        """Return the objects with an identity that are in it by address, with their places."""
        found = self.pickler.memo.copy().items()
        return {address: (place, obj) for address, (place, obj) in found if has_identity(obj)}


def _size_of(buffer: Any) -> int:
    if isinstance(buffer, memoryview):
        return buffer.nbytes
    found = buffer()
    return int(found.nbytes)


# --- what is saved ----------------------------------------------------------------------------------------


def _surroundings(variables: namespace.Variables) -> dict[str, Any]:
    """Return what comes along beside the variables."""
    cudnn = torch.backends.cudnn
    found = {name: get() for name, get, _ in _random_states()}
    found[SETTINGS] = {
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.benchmark, cudnn.deterministic),
    }
    found[ENVIRONMENT] = {
        name: value
        for name, value in sorted(os.environ.items())
        if environment.given.get(name) != value and surroundings.may_be_kept(name, value)
    }
    found[NOTEBOOKS] = variables.notebooks_code()
    return found


def _restore_surroundings(values: Mapping[str, Any]) -> None:
    os.environ.update(values.get(ENVIRONMENT, {}))
    shell.remember_sources(values.get(SOURCES, {}))
    if settings := values.get(SETTINGS):
        torch.set_grad_enabled(settings["grad"])
        torch.set_default_dtype(settings["dtype"])
        torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn only"])
        torch.set_float32_matmul_precision(settings["matmul"])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = settings["cudnn"]
    for name, _, set_state in _random_states():
        if name in values:
            set_state(values[name])


def _random_states() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    yield "random state of Python", random.getstate, random.setstate
    if numpy := sys.modules.get("numpy"):
        yield "random state of NumPy", numpy.random.get_state, numpy.random.set_state
    yield "random state of torch", torch.get_rng_state, torch.set_rng_state
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield (
            "random state of CUDA",
            torch.cuda.get_rng_state,
            lambda state: torch.cuda.set_rng_state(state.cpu()),
        )


@dataclass(slots=True)
class _Examined:
    """What is known of a variable on this rank."""

    type: str
    why_not: str = ""
    partial: bool = False
    shards: int = 0
    meshes: list[list[int]] = field(default_factory=list)
    first: str = ""
    """A digest of the pickle, and of samples of its buffers."""
    buffers: list[Data] = field(default_factory=list)
    detached: bool = False


class _Save:
    """One save on this rank: what is there, of which kind, and the pickles."""

    def __init__(self, meeting: _Meeting, variables: namespace.Variables) -> None:
        self._meeting = meeting
        self._classes = _ClassNames()
        self._hashes: dict[tuple[int, int], bytes] = {}
        self._lines: dict[str, set[int]] = {}
        sharded.reshard()
        self.values = {**variables.to_save(), **_surroundings(variables)}
        self.examined = {name: self._examine(name) for name in sorted(self.values)}
        self.values[SOURCES] = shell.sources_of(self._lines)
        self.examined[SOURCES] = self._examine(SOURCES)
        self.left_out: dict[str, str] = {}
        self.leaves: set[str] = set()
        self.keys: list[sharded.Key] = []
        self.kinds = self._kinds()
        self._pickle()

    def _known(self, *, own_shards: bool = False) -> sharded.GroupObjects:
        met = sharded.GroupObjects(self._meeting.rank, self._meeting.world_size, own_device())
        met.own_shards = own_shards
        return met

    def _examine(self, name: str) -> _Examined:
        """Pickle one variable alone."""
        value = self.values[name]
        examined = _Examined(type_name(value))
        try:
            stream = _whole(self._new_stream, {name: value})
            examined.buffers = stream.buffers()
        except Exception as error:  # noqa: BLE001 - whatever the objects raise
            examined.why_not = self._why(name, value, error)
            return examined
        for file, lines in stream.pickler.lines.items():
            self._lines.setdefault(file, set()).update(lines)
        met = stream.pickler.met
        examined.partial, examined.shards = met.partial, len(met.shards)
        examined.meshes = [list(key[2]) for key in met.made if key[0] == "mesh"]
        examined.detached = bool(stream.pickler.detached)
        samples = [self._hash(each, sample=True).hex() for each in examined.buffers]
        examined.first = hashlib.sha256(f"{stream.digests[name]}{samples}".encode()).hexdigest()
        return examined

    def _new_stream(self, first: Sequence[Any]) -> _Segments:
        return _Segments(self._known(), self._classes, first=first)

    def _why(self, name: str, value: Any, error: Exception) -> str:
        culprit = None
        with contextlib.suppress(Exception):
            keywords: Any = {"met": self._known(), "classes": _ClassNames(), "places": {}}
            culprit = find_culprit({name: value}, error, _Pickler, seconds=_SEARCH_SECONDS, **keywords)
        if culprit is None or culprit.path == name:
            return f"{type_name(value)}: {reason_of(error)}"
        return f"{culprit.path}, {culprit.type_name}: {culprit.reason}"

    def _hash(self, buffer: Data, *, sample: bool = False) -> bytes:
        if sample and isinstance(buffer, memoryview):
            flat = buffer.cast("B")
            return hashlib.sha256(bytes(flat[:_SAMPLE]) + bytes(flat[-_SAMPLE:])).digest()
        # Several variables lead to the same memory.
        where = pickling.memory_range(buffer)
        if where is not None and where in self._hashes:
            return self._hashes[where]
        found = hashlib.sha256()
        for piece in _pieces(buffer):
            found.update(piece)
        if where is not None:
            self._hashes[where] = found.digest()
        return found.digest()

    def _kinds(self) -> dict[str, saved.VariableKind]:
        """Return the kind of each variable that is saved, the same on all ranks."""
        told = self._meeting.tell(
            {
                name: [each.why_not, each.partial, each.first, each.detached]
                for name, each in self.examined.items()
            }
        )
        everywhere = set.intersection(*map(set, told))
        for rank, each in enumerate(told):
            self.leaves |= {name for name, (*_, detached) in each.items() if detached}
            for name, (why_not, *_) in each.items():
                if why_not:
                    self.left_out.setdefault(name, f"rank {rank}: {why_not}")
        candidates = [
            name
            for name in sorted(everywhere - self.left_out.keys())
            if len({each[name][2] for each in told}) == 1 and not any(each[name][1] for each in told)
        ]
        whole = {
            name: hashlib.sha256(b"".join(map(self._hash, self.examined[name].buffers))).hexdigest()
            for name in candidates
        }
        full = self._meeting.tell(whole)
        equal = {name for name in candidates if len({each[name] for each in full}) == 1}
        for each in self.examined.values():
            each.buffers = []
        names = sorted(set().union(*told) - self.left_out.keys())
        return {name: self._kind(name) if name in equal else "own" for name in names}

    def _kind(self, name: str) -> saved.VariableKind:
        return "sharded" if self.examined[name].shards else "equal"

    def _pickle(self) -> None:
        """Pickle the equal variables, then the own ones, until all ranks agree on what is in the first."""
        while True:
            equal = {name: self.values[name] for name, kind in self.kinds.items() if kind != "own"}
            found = self._streamed(equal, self._new_stream)
            if found is not None:
                self.equal = found
                self._add_wrappings()
                if self._agree():
                    break
        own_stream: Callable[[Sequence[Any]], _Segments] = lambda first: _Segments(  # noqa: E731
            self._known(own_shards=True), self._classes, self.equal, first
        )
        found = None
        while found is None:
            own = [name for name, kind in self.kinds.items() if kind == "own" and name in self.values]
            found = self._streamed({name: self.values[name] for name in own}, own_stream)
        self.own = found
        keys = self._meeting.tell([*self.equal.pickler.met.made, *self.own.pickler.met.made])
        self.keys = sharded.in_order(sharded.key_from(key) for each in keys for key in each)

    def _streamed(
        self, values: Mapping[str, Any], make: Callable[[Sequence[Any]], _Segments]
    ) -> _Segments | None:
        """Return the pickle of these; None if a variable cannot be saved with the others, on any rank."""
        adding: list[str] = []
        failed: dict[str, str] = {}
        stream = None
        try:
            stream = _whole(make, values, adding)
        except Exception as error:  # noqa: BLE001 - whatever the objects raise
            failed[adding[-1]] = f"rank {self._meeting.rank}: {reason_of(error)}"
        for each in self._meeting.tell(failed):
            for name, why in each.items():
                self.left_out.setdefault(name, why)
                self.kinds.pop(name, None)
                stream = None
        return stream

    def _add_wrappings(self) -> None:
        """Add how models of FSDP2 are wrapped."""
        wrappings = sharded.wrapped()
        there = self.equal.objects() if wrappings else {}
        if saved_ones := [each for each in wrappings if id(each["modules"][0]) in there]:
            self.equal.add(sharded.FSDP2, saved_ones)

    def _agree(self) -> bool:
        """Make a variable a rank's own that is equal alone, but shares objects with others in other ways."""
        told, digests = self._meeting.tell(self.equal.digests), self.equal.digests
        first = next((name for name in digests if len({each.get(name) for each in told}) > 1), None)
        if first == sharded.FSDP2:
            msg = "the ranks have wrapped their models by FSDP2 in different ways"
            raise NblaunchError(msg)
        if first is not None:
            self.kinds[first] = "own"
        return first is None

    def described(
        self, path: str, token: str, sizes: Sequence[Mapping[str, int]], jobs: Any
    ) -> saved.SavedSession:
        """Return the manifest."""
        variables = [
            saved.SavedVariable(
                name,
                kind,
                self.examined[name].type if name in self.examined else "",
                sum(each.get(name, 0) for each in sizes),
                tuple(rank for rank, each in enumerate(sizes) if name in each),
                tuple(map(tuple, self.examined[name].meshes)) if name in self.examined else (),
            )
            for name, kind in sorted(self.kinds.items())
        ]
        versions = {"nblaunch": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return saved.SavedSession(
            path,
            token,
            self._meeting.world_size,
            time.time(),
            versions,
            tuple(variables),
            self.left_out,
            tuple(sorted(self.leaves - self.left_out.keys())),
            tuple(self.values[ENVIRONMENT]),
            tuple(jobs),
        )


def _whole(
    make: Callable[[Sequence[Any]], _Segments], values: Mapping[str, Any], adding: list[str] | None = None
) -> _Segments:
    """Return the pickle of these; once more where a part of an array's memory came before the whole."""
    first: list[Any] = []
    while True:
        stream = make(first)
        try:
            for name, value in values.items():
                if adding is not None:
                    adding.append(name)
                stream.add(name, value)
        except arrays.OverlapError as error:
            first.append(error.root)
        else:
            return stream


def own_device() -> torch.device:
    """Return the device of this rank."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _pieces(buffer: Data) -> Iterator[memoryview]:
    if isinstance(buffer, tensors.Far):
        yield from buffer.pieces(_PIECE)
        return
    flat = buffer.cast("B")
    for start in range(0, flat.nbytes, _PIECE):
        yield flat[start : start + _PIECE]


# --- writing ----------------------------------------------------------------------------------------------

_writing: threading.Thread | None = None


def save(path: str, token: str, jobs: Any, *, background: bool, strict: bool) -> saved.SavedSession | None:
    """Save the variables of all ranks, each of which calls this; the first returns the manifest.

    In the background copies are written, on a thread, which says on standard error if it fails.
    """
    global _writing
    if _writing is not None and _writing.is_alive():
        msg = "the last save is still being written"
        raise NblaunchError(msg)
    meeting = _Meeting(token)
    with meeting.together():
        assert namespace.here is not None  # noqa: S101 - a session's rank
        made = _Save(meeting, namespace.here)
        if made.left_out and strict:
            msg = "\n".join(f"{name} cannot be saved: {why}" for name, why in made.left_out.items())
            raise NblaunchError(msg)
        if meeting.rank == 0:
            saved.begin(path)
        meeting.tell("begun")
        writing = _Writing(meeting, made, path, copied=background)
        manifest = made.described(path, token, meeting.tell(writing.sizes(made)), jobs)
        if not background:
            writing.write(manifest)
            return manifest if meeting.rank == 0 else None
    _writing = threading.Thread(target=writing.write_alone, args=[manifest], name="nblaunch-save")
    _writing.start()
    return manifest if meeting.rank == 0 else None


class _Writing:
    """What a rank writes: its own variables, and its part of the equal ones and of the shards."""

    def __init__(self, meeting: _Meeting, made: _Save, path: str, *, copied: bool) -> None:
        self._meeting = meeting
        self._directory = Path(path + saved.PARTIAL)
        rank = meeting.rank
        equal = made.equal.buffers()
        parts = {
            at: equal[at] for at, writer in enumerate(_writers(equal, meeting.world_size)) if writer == rank
        }
        own = made.own.buffers()
        copy: Callable[[Data], Any] = _copy if copied else _same
        self._equal_parts = {at: copy(each) for at, each in parts.items()}
        self._own_parts = [copy(each) for each in own]
        shards = made.equal.pickler.met.shards
        self._shards = sharded.Shards(rank, shards, _cloned if copied else _same) if shards else None
        self._streams = {
            name: {"stream": each.stream, "segments": each.segments, "keys": made.keys}
            for name, each in (("equal", made.equal), (f"rank-{rank}", made.own))
        }

    def sizes(self, made: _Save) -> dict[str, int]:
        """Return the bytes of each variable that this rank writes; 0 for those that others write."""
        first = self._meeting.rank == 0
        found = made.own.sizes | {name: size * first for name, size in made.equal.sizes.items()}
        for name, numbers in made.equal.shards.items():
            if self._shards is not None:
                found[name] += sum(self._shards.bytes.get(number, 0) for number in numbers)
        return found

    def write(self, manifest: saved.SavedSession) -> None:
        """Write, and wait for the others; the first rank gives the directory its name."""
        rank, first = self._meeting.rank, self._meeting.rank == 0
        self._write_data()
        for name in ["equal"] * first + [f"rank-{rank}"]:
            _write_file(self._directory / f"{name}.pkl", [memoryview(pickle.dumps(self._streams[name]))])
        shards = self._directory / "sharded"
        if self._shards is not None:
            self._shards.write(shards)
        self._meeting.tell("written")
        if first:
            lacking = [
                each
                for each in range(self._meeting.world_size)
                if not (self._directory / f"rank-{each}.pkl").is_file()
            ]
            if lacking:
                msg = (
                    f"{self._directory} is on no disk that all machines share: rank {lacking[0]} has another"
                )
                raise NblaunchError(msg)
            if shards.exists():
                sharded.finish(shards, self._meeting.world_size)
            saved.commit(manifest)
        self._meeting.tell("committed")

    def write_alone(self, manifest: saved.SavedSession) -> None:
        """Write beside cells."""
        try:
            with self._meeting.together():
                self.write(manifest)
        except Exception as error:  # noqa: BLE001 - a full disk, a rank that is gone
            sys.stderr.write(
                f"the save to {manifest.path} failed, and the one before it is kept: {reason_of(error)}\n"
            )

    def _write_data(self) -> None:
        offset = 0
        index: dict[str, Any] = {"equal": {}, "own": []}
        fd = saved.create(self._directory / f"rank-{self._meeting.rank}.data")
        try:
            for at, data in [*self._equal_parts.items(), *((None, each) for each in self._own_parts)]:
                if at is None:
                    index["own"].append([offset, data.nbytes])
                else:
                    index["equal"][at] = [offset, data.nbytes]
                begin = offset
                for piece in _pieces(data):
                    _write_all(fd, piece, begin)
                    begin += piece.nbytes
                offset = -(-(offset + data.nbytes) // _ALIGNED) * _ALIGNED
            os.fsync(fd)
        finally:
            os.close(fd)
        _write_file(
            self._directory / f"rank-{self._meeting.rank}.index", [memoryview(json.dumps(index).encode())]
        )


def _writers(buffers: Sequence[Data], world_size: int) -> list[int]:
    """Return which rank writes each buffer, so that all write about as much."""
    loads = [0] * world_size
    found = [0] * len(buffers)
    for at in sorted(range(len(buffers)), key=lambda each: -buffers[each].nbytes):
        found[at] = min(range(world_size), key=loads.__getitem__)
        loads[found[at]] += buffers[at].nbytes
    return found


def _same(data: Any) -> Any:
    return data


def _copy(data: Data) -> memoryview:
    whole, offset = tensors.memory(data.nbytes), 0
    for piece in _pieces(data):
        whole[offset : offset + piece.nbytes] = piece
        offset += piece.nbytes
    return whole


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()


def _write_file(path: Path, parts: Sequence[memoryview]) -> None:
    fd, offset = saved.create(path), 0
    try:
        for part in parts:
            _write_all(fd, part, offset)
            offset += part.nbytes
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


# --- loading ----------------------------------------------------------------------------------------------


def restore(
    path: str, token: str, drop: Collection[str], classes: frozenset[str], *, strict: bool
) -> tuple[list[str], dict[str, str]]:
    """Load what was saved; return the variables that the notebook may know, and which are lost, with why.

    `classes` are names of classes that the notebook has.
    """
    meeting = _Meeting(token)
    with meeting.together():
        load = _Loading(meeting, saved.open_saved(path))
        lost: dict[str, str] = {}
        for rank, each in enumerate(meeting.tell(load.lost)):
            for name in each.keys() - set(drop):
                lost.setdefault(name, f"rank {rank}: {each[name]}")
        if lost and strict:
            msg = "\n".join(f"{name} cannot be loaded: {why}" for name, why in lost.items())
            raise NblaunchError(msg)
        load.finish()
        beside = {name: value for name, value in load.values.items() if is_beside(name)}
        gone = {*lost, *drop, *beside}
        kept = {name: value for name, value in load.values.items() if name not in gone}
        assert namespace.here is not None  # noqa: S101 - a session's rank
        namespace.here.restored(kept, frozenset(beside.get(NOTEBOOKS, ())))
        pickling.keep_as_own(classes)
        _restore_surroundings(beside)
        told = meeting.tell([name for name, value in kept.items() if not _is_imported(value)])
    return sorted(set().union(*told)), lost


def is_beside(name: str) -> bool:
    """Return whether this is no variable, but what comes along with them."""
    return not name.isidentifier()


def _is_imported(value: object) -> bool:
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return True
    return isinstance(value, type | types.FunctionType) and not is_by_value(value)


class _Loading:
    """What a rank loads; its variables are whole once it is finished."""

    def __init__(self, meeting: _Meeting, manifest: saved.SavedSession) -> None:
        self._directory, self._meeting = Path(manifest.path), meeting
        self.values: dict[str, Any] = {}
        self.lost: dict[str, str] = {}
        device = own_device()
        self._met = sharded.loading = sharded.GroupObjects(meeting.rank, meeting.world_size, device)
        try:
            equal = _read(self._directory / "equal.pkl")
            if dist.is_initialized():
                self._met.make(equal["keys"], manifest.world_size)
            places = self._take(equal, self._equal_buffers(manifest.world_size), str(device), {})
            if manifest.world_size == meeting.world_size:
                own = _read(self._directory / f"rank-{meeting.rank}.pkl")
                self._take(own, self._own_buffers(), str(device), places)
        finally:
            sharded.loading = None

    def finish(self) -> None:
        """Fill shards and wrap models."""
        if self._met.shards:
            sharded.read(self._directory / "sharded", self._met.shards)
        sharded.wrap_again(self.values.get(sharded.FSDP2, ()))

    def _take(
        self, saved_stream: Mapping[str, Any], buffers: Sequence[Any], device: str, equal: Mapping[int, Any]
    ) -> Mapping[int, Any]:
        """Unpickle variables, each by itself; return the objects by their places."""
        begin, first = 0, 0
        reader = pickling.SegmentReader(saved_stream["stream"], device, lambda key: _found(equal, key))
        for name, end, last in saved_stream["segments"]:
            try:
                self.values[name] = reader.read(begin, end, buffers[first:last])
            except Exception as error:  # noqa: BLE001 - whatever the objects raise
                self.lost[name] = reason_of(error)
                reader.skip(begin, buffers[first:last])
            begin, first = end, last
        return reader.memo()

    def _equal_buffers(self, saved_by: int) -> list[Any]:
        found: dict[int, Any] = {}
        for rank in range(saved_by):
            index = json.loads((self._directory / f"rank-{rank}.index").read_text())["equal"]
            with (self._directory / f"rank-{rank}.data").open("rb") as file:
                found |= {int(at): _buffer(file, *where) for at, where in index.items()}
        return [found[at] for at in range(len(found))]

    def _own_buffers(self) -> list[Any]:
        name = f"rank-{self._meeting.rank}"
        index = json.loads((self._directory / f"{name}.index").read_text())["own"]
        with (self._directory / f"{name}.data").open("rb") as file:
            return [_buffer(file, *where) for where in index]


def _found(equal: Mapping[int, Any], key: int) -> Any:
    if key - 1 not in equal:
        msg = "it has an object of a variable that could not be loaded"
        raise pickle.UnpicklingError(msg)
    return equal[key - 1]


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # noqa: S301 - the user's own file, see `saved.open_saved`


def _buffer(file: Any, offset: int, size: int) -> memoryview:
    """Return a part of a file in memory that can be written to."""
    whole = tensors.memory(size)
    file.seek(offset)
    if file.readinto(whole) != size:
        msg = f"{file.name} is shorter than it was saved"
        raise NblaunchError(msg)
    return whole
