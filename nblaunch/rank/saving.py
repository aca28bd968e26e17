"""A rank's part in saving the variables of a session, and in loading them. Imported when it is asked for.

A variable is one of three kinds, found by itself:

    equal     its pickle has the same bytes on all ranks: one copy, which the ranks write together
    sharded   equal but for the shards of its DTensors, which torch.distributed.checkpoint writes (`sharded`)
    own       all others: each rank writes its own

What would be saved is what is compared, so no two values are taken for equal that would not come back equal.
Each variable has a pickle of its own, in which objects of those before it are keys, as in what a session's
cells bring: an object of several variables stays one, and an optimizer has the model's parameters. The equal
ones come first, and their keys are the same on all ranks. What cannot be saved on one rank is left out on
all, by name; so is what cannot be loaded, with what has objects of it.

Ranks of a DDP model differ in the buffers that it takes from rank 0 before each forward pass: it is each
rank's own, and another number of ranks has that of rank 0.

A save that goes on beside cells writes copies on a thread. Ranks compare over the agent's store, which needs
no process group, in JSON: others could write there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import pickle
import platform
import random
import shutil
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from nblaunch.rank import environment, in_place, namespace, preempt, process_group, sharded, shell

_PIECE = 64 << 20
_SAMPLE = 1 << 16
_POLL_SECONDS, _MOST_SECONDS = 0.001, 0.05
_SEARCH_SECONDS = 1.0
_LONG_TUPLE, _CONSTANTS = 16, LEAVES - {complex}
SETTINGS, ENVIRONMENT = "settings of torch", "environment variables"
DIRECTORY, SEARCH_PATH = "working directory", "sys.path"
SOURCES, NOTEBOOKS = "sources of functions", "code of the notebook"
"""What is saved beside the variables. No variable has such a name, nor "random state of Python"."""
RANDOM_STATES = ("random state of Python", "random state of torch", "random state of CUDA")
OF_A_RANK = (*RANDOM_STATES, ENVIRONMENT, DIRECTORY, SEARCH_PATH)
"""Of these, what each rank may have for itself; NumPy's random state always is."""


class Meeting:
    """Ranks that save or load, and compare what they have."""

    def __init__(
        self, token: str, seconds: float = float("inf"), *, ranks: Sequence[int] | None = None
    ) -> None:
        """Compare with these ranks, by default with all."""
        self.rank, self.world_size = numbers()
        self.ranks = range(self.world_size) if ranks is None else ranks
        self._attempt = process_group.attempt()
        self._store = process_group.own_store(f"save {token}")
        self._step = 0
        self._deadline = time.monotonic() + seconds

    def tell(self, own: Any) -> list[Any]:
        """Return what all ranks tell here, in their order. Raises `NblaunchError` if one has failed."""
        self._step += 1
        self._store.set(f"{self._step}/{self.rank}", json.dumps(own))
        told = []
        for rank in self.ranks:
            seconds = _POLL_SECONDS
            while not self._store.check([f"{self._step}/{rank}"]):
                if self._store.check([f"failed/{rank}"]):
                    msg = f"rank {rank}: {self._store.get(f'failed/{rank}').decode()}"
                    raise NblaunchError(msg)
                if process_group.attempt() != self._attempt or time.monotonic() > self._deadline:
                    msg = f"rank {rank} has left, or is late"
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
            name = pickling.received_classes.get(kind, "")
            if not name:
                # cloudpickle tracks it from now on, as it does those that the notebook sends.
                pickling.made_classes.add(kind)
                name = f"saved-{hashlib.sha256(dump(kind)).hexdigest()}"
            taken = sum(each.partition(" ")[0] == name for each in self._names.values())
            self._names[kind] = f"{name} {taken + 1}" if taken else name
        return self._names[kind]


class Pickler(pickling.Outbound):
    """Functions read their globals in the rank's namespace, and bring none: variables are saved by name."""

    def __init__(self, *arguments: Any, stream: SaveStream, **keywords: Any) -> None:
        super().__init__(*arguments, namespace=None, known=None, **keywords)
        self._stream = stream
        self._known_keys = stream.keys
        self._constants: dict[Any, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        # One string that is used twice is in a pickle once, so two that are equal have to be, too, and tuples
        # of such: a rank that got variables from another one has more strings than that, or fewer.
        if type(obj) is str:
            return self._constants.setdefault(obj, obj)
        if type(obj) is tuple and 0 < len(obj) <= _LONG_TUPLE and _CONSTANTS.issuperset(map(type, obj)):
            if any(each == 0 and type(each) is float for each in obj):
                return None  # 0.0 and -0.0 are equal
            # And so are 1, 1.0 and True.
            return self._constants.setdefault((obj, *map(type, obj)), obj)
        if type(obj) in LEAVES:
            return None
        known = self._known_keys.get(id(obj))
        if known is not None:
            return known[0]
        return 0 if id(obj) in self._notebook else None

    def places(self, root: object) -> Sequence[tuple[int, Any]]:  # noqa: ARG002 - `root` is a variable, and stays
        return [(place, obj) for place, obj in self.memo.copy().values() if has_identity(obj)]

    def reducer_override(self, obj: Any) -> Any:
        self._stream.check()
        if type(obj) is types.CodeType:
            self._stream.lines.setdefault(obj.co_filename, set()).update(_lines_of(obj))
        if obj is os.environ:
            return _environ, ()  # with what it has there, and not here
        reduced = self._stream.met.reduce(obj)
        if reduced is NotImplemented:
            reduced = tensors.reduce_device(obj)
            if isinstance(reduced, tuple):  # arrives as the rank's own, whichever it is here
                make, (kind, index) = reduced
                return make, (kind, None if index is None else 0)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced

    def needed_by(self, obj: Any) -> dict[str, Any]:  # noqa: ARG002 - see the class
        return {}

    def parts_of(self, tensor: Any) -> tuple[Any, Any, Any] | None:
        parts = super().parts_of(tensor)
        if parts is None or parts[0] is None:
            return parts
        self._stream.graded.add(id(tensor))
        if id(tensor) not in self._stream.bare:
            return parts
        _, *hooks = parts
        return None if hooks == [None, None] else (None, *hooks)

    def reduce_tensor(self, tensor: Any) -> Any:
        if not sharded.is_dtensor(tensor):
            return super().reduce_tensor(tensor)
        if tensor.grad_fn is not None:
            self.detached.append(tensor)
        parts, reduced = self.parts_of(tensor), self._stream.met.tensor(tensor)
        return reduced if parts is None else tensors.with_parts(tensor, reduced, parts)

    def _name_of(self, obj: type) -> str:
        def dump(kind: type) -> bytes:
            file = io.BytesIO()
            Pickler(file, protocol=5, stream=self._stream.alone()).dump(kind)
            return file.getvalue()

        return self._stream.classes.of(obj, dump)


def _lines_of(code: types.CodeType) -> range:
    lines = [line for *_, line in code.co_lines() if line]
    return range(code.co_firstlineno, max(lines, default=code.co_firstlineno) + 1)


def _environ() -> Any:
    return os.environ


Data = memoryview | tensors.Far
PackedVariable = tuple[str, int, bytes, int]
"""A variable's name, the key of its first object, its pickle, and the number of its buffers."""


@dataclass(frozen=True, slots=True)
class _VariablePickle:
    """The pickle of one variable."""

    stream: bytes
    buffers: Sequence[Data]
    first_key: int
    digest: str
    """Of the stream, and of how long its buffers are."""
    shards: Sequence[str]
    """The numbers of its shards; those that several variables share are the first one's."""
    detached: bool

    @property
    def size(self) -> int:
        return len(self.stream) + sum(each.nbytes for each in self.buffers)

    def packed(self, name: str) -> PackedVariable:
        return name, self.first_key, self.stream, len(self.buffers)


class SaveStream:
    """Variables, one after the other, with the keys of their objects."""

    def __init__(  # noqa: PLR0913 - what one stream shares with others, and what it takes of tensors
        self,
        met: sharded.GroupObjects,
        classes: _ClassNames | None = None,
        lines: dict[str, set[int]] | None = None,
        first: Sequence[Any] = (),
        *,
        bare: Collection[int] = (),
        apart: Collection[tuple[int, int]] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.bare, self._apart, self.check = bare, apart, check
        self.graded: set[int] = set()
        """The ids of tensors that have gradients; those that are `bare` are pickled without."""
        self.met, self.classes = met, classes or _ClassNames()
        self.lines = {} if lines is None else lines
        """Of the process groups; names of classes; the lines of functions, by file."""
        self.keys: dict[int, tuple[int, Any]] = {}
        """Keys and objects by address: 0 is the namespace."""
        self._next_key = 1
        self._memories: list[Any] = []
        self._first = first
        self.found: dict[str, _VariablePickle] = {}

    def alone(self) -> SaveStream:
        """Return one for a part that is pickled by itself."""
        return SaveStream(self.met, self.classes, self.lines, bare=self.bare, check=self.check)

    def add(self, name: str, value: Any) -> None:
        """Add a variable. Raises whatever its objects raise, and `arrays.OverlapError`."""
        shards = len(self.met.shards)
        there = (lambda: self._memories) if self._memories else tuple
        storages = arrays.WholeMemories(self._key_of, there, self._first)
        packed = pickling.pack_once(value, functools.partial(Pickler, stream=self), storages, self._apart)
        lengths = [each.nbytes for each in packed.buffers]
        self.found[name] = _VariablePickle(
            bytes(packed.stream),
            packed.buffers,
            self._next_key,
            hashlib.sha256(repr(lengths).encode() + bytes(packed.stream)).hexdigest(),
            list(self.met.shards)[shards:],
            bool(packed.detached),
        )
        kinds = arrays.Memory, torch.UntypedStorage
        for place, obj in packed.places:
            self.keys[id(obj)] = self._next_key + place, obj
            if arrays.is_array(obj) or isinstance(obj, kinds):
                self._memories.append(obj)
        self._next_key += 1 + max((place for place, _ in packed.places), default=0)

    def _key_of(self, obj: Any) -> int | None:
        known = self.keys.get(id(obj))
        return None if known is None else known[0]


def _filled(make: Callable[[Sequence[Any]], SaveStream], fill: Callable[[SaveStream], None]) -> SaveStream:
    """Return a filled stream; made once more where a part of an array's memory came before the whole."""
    first: list[Any] = []
    while True:
        stream = make(first)
        try:
            fill(stream)
        except arrays.OverlapError as error:
            first.append(error.root)
        else:
            return stream


# --- what is saved ----------------------------------------------------------------------------------------


def _surroundings(variables: namespace.Variables) -> dict[str, Any]:
    """Return what comes along beside the variables."""
    found = {name: get() for name, get, _ in _random_states()}
    found[SETTINGS] = _settings()
    found[ENVIRONMENT] = {
        name: value
        for name, value in sorted(os.environ.items())
        if environment.given.get(name) != value and surroundings.may_be_kept(name, value)
    }
    found[NOTEBOOKS] = variables.notebooks_code()
    return found


def _settings() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.benchmark, cudnn.deterministic),
    }


def restore_surroundings(values: Mapping[str, Any], env: Collection[str]) -> None:
    saved_ones: Mapping[str, str] = values.get(ENVIRONMENT, {})
    os.environ.update({name: value for name, value in saved_ones.items() if name not in env})
    shell.remember_sources(values.get(SOURCES, {}))
    settings, here = values.get(SETTINGS), _settings()
    if settings:
        torch.set_grad_enabled(settings["grad"])
        torch.set_default_dtype(settings["dtype"])
        torch.set_float32_matmul_precision(settings["matmul"])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = settings["cudnn"]
        deterministic = "deterministic", "warn only"
        if [settings[each] for each in deterministic] != [here[each] for each in deterministic]:
            # torch imports its compiler for that.
            torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn only"])
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
    """What is known of a variable on this rank, pickled alone."""

    type: str
    why_not: str = ""
    partial: bool = False
    shards: int = 0
    meshes: list[list[int]] = field(default_factory=list)
    first: str = ""
    """A digest of the pickle, and of samples of its buffers."""
    bare: str = ""
    """The same without the buffers of DDP models."""
    buffers: Sequence[Data] = ()
    detached: bool = False
    graded: Collection[int] = ()
    """The ids of its tensors that have gradients."""


class Save:
    """One save on this rank: what is there, of which kind, and the pickles."""

    def __init__(
        self,
        meeting: Meeting,
        variables: namespace.Variables,
        only: Collection[str] | None = None,
        *,
        bare: Collection[int] = (),
        ddp_buffers: bool = True,
    ) -> None:
        """Find and pickle all; with `only`, of these what is equal.

        Tensors whose ids are in `bare` are pickled without gradients. Without `ddp_buffers` models are equal
        that differ in these alone.
        """
        self._meeting, self._bare, self._ddp_buffers = meeting, bare, ddp_buffers
        self._in_memory = only is not None
        self._broadcast = ranges_of(in_place.broadcast_buffers())
        self.from_rank_0: set[str] = set()
        """The variables of each rank's own of which another number of ranks may have that of rank 0."""
        self._classes = _ClassNames()
        self._hashes: dict[tuple[int, int], bytes] = {}
        self._lines: dict[str, set[int]] = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what cells have queued, on whichever stream
        sharded.reshard()
        there = variables.to_save()
        kept = there if only is None else {name: there[name] for name in there.keys() & set(only)}
        self.values = {**kept, **_surroundings(variables)}
        if only is not None:
            # A save may be loaded on another machine, which has other directories.
            self.values |= {DIRECTORY: environment.new_directory(), SEARCH_PATH: environment.added_to_path()}
        self.examined = {name: self._examine(name) for name in sorted(self.values)}
        self.values[SOURCES] = shell.sources_of(self._lines)
        self.examined[SOURCES] = self._examine(SOURCES)
        self.left_out: dict[str, str] = {}
        self.leaves: set[str] = set()
        self.keys: list[sharded.Key] = []
        self.kinds = self._kinds()
        if only is not None:
            self.kinds = {name: kind for name, kind in self.kinds.items() if kind != "own"}
        while not self._pickle():
            pass

    def _new_stream(self, first: Sequence[Any] = ()) -> SaveStream:
        met = sharded.GroupObjects(self._meeting.rank, self._meeting.world_size, own_device())
        met.in_memory = self._in_memory
        return SaveStream(met, self._classes, self._lines, first, bare=self._bare, apart=self._broadcast)

    def _examine(self, name: str) -> _Examined:
        value = self.values[name]
        examined = _Examined(type_name(value))
        try:
            stream = _filled(self._new_stream, lambda stream: stream.add(name, value))
        except Exception as error:  # noqa: BLE001 - whatever the objects raise
            examined.why_not = self._why(name, value, error)
            return examined
        met, pickled = stream.met, stream.found[name]
        examined.partial, examined.shards = met.partial, len(met.shards)
        examined.meshes = [list(key[2]) for key in met.made if key[0] == "mesh"]
        examined.buffers, examined.detached = pickled.buffers, pickled.detached
        examined.graded = stream.graded
        samples = [(self._is_broadcast(each), self._hash(each, sample=True)) for each in pickled.buffers]
        examined.first, examined.bare = (
            hashlib.sha256(f"{pickled.digest}{each}".encode()).hexdigest()
            for each in (samples, [sample for is_broadcast, sample in samples if not is_broadcast])
        )
        return examined

    def _is_broadcast(self, buffer: Data) -> bool:
        return bool(self._broadcast) and pickling.memory_range(buffer) in self._broadcast

    def _why(self, name: str, value: Any, error: Exception) -> str:
        culprit = None
        with contextlib.suppress(Exception):
            stream = self._new_stream()
            culprit = find_culprit({name: value}, error, Pickler, seconds=_SEARCH_SECONDS, stream=stream)
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
        for piece in tensors.pieces(buffer, _PIECE):
            found.update(piece)
        if where is not None:
            self._hashes[where] = found.digest()
        return found.digest()

    def _whole(self, buffers: Sequence[Data], *, bare: bool = False) -> str:
        compared = [each for each in buffers if not (bare and self._is_broadcast(each))]
        return hashlib.sha256(b"".join(map(self._hash, compared))).hexdigest()

    def _kinds(self) -> dict[str, saved.VariableKind]:
        """Return the kind of each variable that is saved, the same on all ranks."""
        told = self._meeting.tell(
            {
                name: [each.why_not, each.partial, each.first, each.bare, each.detached]
                for name, each in self.examined.items()
            }
        )
        everywhere = set.intersection(*map(set, told))
        for rank, each in zip(self._meeting.ranks, told, strict=True):
            self.leaves |= {name for name, (*_, detached) in each.items() if detached}
            for name, (why_not, *_) in each.items():
                if why_not:
                    self.left_out.setdefault(name, f"rank {rank}: {why_not}")
        candidates = [
            name
            for name in sorted(everywhere - self.left_out.keys())
            if len({each[name][3] for each in told}) == 1 and not any(each[name][1] for each in told)
        ]
        found = {name: self.examined[name] for name in candidates}
        full = self._meeting.tell(
            {
                name: [each.first, self._whole(each.buffers), self._whole(each.buffers, bare=True)]
                for name, each in found.items()
            }
        )
        equal = {name for name in found if all(each[name][:2] == full[0][name][:2] for each in full)}
        but_for_buffers = {name for name in found if all(each[name][2] == full[0][name][2] for each in full)}
        if self._ddp_buffers:
            self.from_rank_0 = but_for_buffers - equal
        else:
            equal = but_for_buffers
        for each in self.examined.values():
            each.buffers = ()
        names = sorted(set().union(*told) - self.left_out.keys())
        return {name: self._kind(name) if name in equal else "own" for name in names}

    def _kind(self, name: str) -> saved.VariableKind:
        return "sharded" if self.examined[name].shards else "equal"

    def _pickle(self) -> bool:
        """Pickle all variables; return whether all ranks agree on it. If not, fewer are saved, or equal."""
        failed: dict[str, str] = {}
        self.equal: dict[str, _VariablePickle] = {}

        def fill(stream: SaveStream) -> None:
            failed.clear()
            for name in self._names(own=False):
                self._add(stream, name, failed)
            for number, each in enumerate(sharded.wrapped(stream.keys)):
                stream.add(f"{sharded.FSDP2} {number}", each)
            self.equal = dict(stream.found)
            stream.met.own_shards = True
            for name in self._names(own=True):
                self._add(stream, name, failed)

        stream = _filled(self._new_stream, fill)
        self.stream = stream
        self.own = {name: each for name, each in stream.found.items() if name not in self.equal}
        self.shards = stream.met.shards
        # Together, a variable may bring more than alone: the whole of a memory of which others show a part.
        bare = not self._ddp_buffers
        digests = {
            name: f"{each.digest} {self._whole(each.buffers, bare=bare)}" for name, each in self.equal.items()
        }
        told = self._meeting.tell([failed, digests, list(stream.met.made)])
        for rank, (why_not, *_) in zip(self._meeting.ranks, told, strict=True):
            for name, why in why_not.items():
                self.left_out.setdefault(name, f"rank {rank}: {why}")
                self.kinds.pop(name, None)
        # Equal alone, but it shares objects with others in other ways: it is a rank's own.
        differs = [name for name in digests if len({each.get(name) for _, each, _ in told}) > 1]
        if differs and differs[0].startswith(sharded.FSDP2):
            msg = "the ranks have wrapped their models by FSDP2 in different ways"
            raise NblaunchError(msg)
        if differs and differs[0] in self.kinds:
            self.kinds[differs[0]] = "own"
        self.keys = sharded.in_order(sharded.key_from(key) for *_, keys in told for key in keys)
        return not differs and not any(why_not for why_not, *_ in told)

    def _names(self, *, own: bool) -> list[str]:
        return [name for name, kind in self.kinds.items() if (kind == "own") == own and name in self.values]

    def _add(self, stream: SaveStream, name: str, failed: dict[str, str]) -> None:
        try:
            stream.add(name, self.values[name])
        except arrays.OverlapError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the objects raise
            failed[name] = reason_of(error)

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
                name in self.from_rank_0,
            )
            for name, kind in sorted(self.kinds.items())
        ]
        # torch's own kind of text would have the notebook import torch.
        versions = {"nblaunch": __version__, "torch": str(torch.__version__)}
        versions["python"] = platform.python_version()
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


def numbers() -> tuple[int, int]:
    """Return the number of this rank, and of all ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def own_device() -> torch.device:
    """Return the device of this rank."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def ranges_of(held: Iterable[torch.Tensor]) -> frozenset[tuple[int, int]]:
    """Return where the memory of tensors is, as `pickling.memory_range` does of what is pickled."""
    found = set[tuple[int, int]]()
    for each in held:
        with contextlib.suppress(RuntimeError):  # a subclass has no memory of its own
            storage = each.untyped_storage()
            # Not one that is a part of something else.
            if storage.nbytes() == each.nbytes:
                found.add((storage.data_ptr(), each.nbytes))
    return frozenset(found)


# --- writing ----------------------------------------------------------------------------------------------

_writing: threading.Thread | None = None
_told = False
"""Whether a save that a session has made by itself has failed, and none has succeeded since."""
_own_tokens: set[str] = set()
"""Of the saves that these ranks have made, and of the one that they began with."""


def save(  # noqa: PLR0913 - what a save is, and who waits for it
    path: str,
    token: str,
    jobs: Any,
    *,
    background: bool = False,
    strict: bool = False,
    by_itself: bool = False,
    seconds: float = float("inf"),
) -> saved.SavedSession | None:
    """Save the variables of all ranks, each of which calls this; the first returns the manifest.

    In the background copies are written, on a thread, which says on standard error if it fails. A save that
    the session makes `by_itself` is left out while the last one is being written.
    """
    global _writing, _told
    _told = _told and by_itself
    meeting = Meeting(token, seconds)
    with meeting.together():
        if any(meeting.tell(_writing is not None and _writing.is_alive())):
            if by_itself:
                return None
            msg = "the last save is still being written"
            raise NblaunchError(msg)
        assert namespace.here is not None  # noqa: S101 - a session's rank
        made = Save(meeting, namespace.here)
        if made.left_out and strict:
            msg = "\n".join(f"{name} cannot be saved: {why}" for name, why in made.left_out.items())
            raise NblaunchError(msg)
        if meeting.rank == 0:
            saved.begin(path, token, _own_tokens if by_itself else None)
            _own_tokens.add(token)
        meeting.tell("begun")
        writing = _Writing(meeting, made, saved.partial(path, token), copied=background)
        manifest = made.described(path, token, meeting.tell(writing.sizes(made)), jobs)
        if not background:
            writing.write(manifest)
            return manifest if meeting.rank == 0 else None
    _writing = threading.Thread(target=writing.write_alone, args=[manifest], name="nblaunch-save")
    _writing.start()
    return manifest if meeting.rank == 0 else None


def save_if_preempted(path: str) -> None:
    """From now on, save before the node is taken back: all but what a cell has done that was cut off.

    In the middle of a step parts of the variables may be of the next one. The functions of the user's that
    are called then have half of the time, whatever the other ranks do.
    """
    attempt, numbers = process_group.attempt(), itertools.count(1)

    def save_by_itself(seconds: float) -> None:
        token = f"preempted {next(numbers)}"
        if process_group.attempt() != attempt:
            return
        if _writing is not None:  # what cells had done before, which would end with this rank
            _writing.join(seconds / 4)
        if not any(Meeting(f"{token} cut off", seconds / 4).tell(preempt.cut_off)):
            save(path, token, (), by_itself=True, seconds=seconds / 4)

    preempt.add(save_by_itself)


class _Writing:
    """What a rank writes: its own variables, and its part of the equal ones and of the shards."""

    def __init__(self, meeting: Meeting, made: Save, directory: Path, *, copied: bool) -> None:
        self._meeting, self._directory = meeting, directory
        rank, ends = meeting.rank, [0] * meeting.world_size
        copy: Callable[[Data], Any] = _copy if copied else _same
        self._data: list[tuple[int, Any]] = []
        self._files: dict[str, bytes] = {}
        for name, pickled, writers in (
            ("equal", made.equal, range(meeting.world_size)),
            (f"rank-{rank}", made.own, [rank]),
        ):
            buffers = [buffer for each in pickled.values() for buffer in each.buffers]
            where = _places(buffers, ends, writers)
            self._data += [
                (place[1], copy(each)) for each, place in zip(buffers, where, strict=True) if place[0] == rank
            ]
            self._files[name] = pickle.dumps(
                {
                    "variables": [found.packed(each) for each, found in pickled.items()],
                    "places": where,
                    "groups": made.keys,
                }
            )
        if rank:
            del self._files["equal"]
        self._shards = (
            sharded.Shards(rank, made.shards, _cloned if copied else _same) if made.shards else None
        )

    def sizes(self, made: Save) -> dict[str, int]:
        """Return the bytes of each variable that this rank writes; equal ones are the first rank's."""
        first = self._meeting.rank == 0
        found = {name: each.size for name, each in made.own.items()}
        for name, each in made.equal.items():
            sizes = self._shards.bytes if self._shards is not None else {}
            found[name] = each.size * first + sum(sizes.get(number, 0) for number in each.shards)
        return found

    def write(self, manifest: saved.SavedSession) -> None:
        """Write, and wait for the others; the first rank gives the directory its name, or removes it."""
        try:
            self._write(manifest)
        except BaseException:
            if self._meeting.rank == 0:
                shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def _write(self, manifest: saved.SavedSession) -> None:
        rank, first = self._meeting.rank, self._meeting.rank == 0
        _write_file(self._directory / f"rank-{rank}.data", self._data)
        for name, content in self._files.items():
            _write_file(self._directory / f"{name}.pkl", [(0, memoryview(content))])
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
        global _told
        try:
            with self._meeting.together():
                self.write(manifest)
            _told = False
        except Exception as error:  # noqa: BLE001 - a full disk, a rank that is gone
            told, _told = _told, True
            if not told:
                sys.stderr.write(
                    f"the save to {manifest.path} failed, and the one before it is kept: {reason_of(error)}\n"
                )


def _places(buffers: Sequence[Data], ends: list[int], writers: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return the writer of each buffer, its offset there, and its size; all write about as much.

    `ends` are the ends of the ranks' files, which grow.
    """
    found = {}
    for at in sorted(range(len(buffers)), key=lambda each: -buffers[each].nbytes):
        writer, size = min(writers, key=ends.__getitem__), buffers[at].nbytes
        found[at] = writer, ends[writer], size
        ends[writer] += size
    return [found[at] for at in range(len(buffers))]


def _same(data: Any) -> Any:
    return data


def _copy(data: Data) -> memoryview:
    whole, offset = tensors.memory(data.nbytes), 0
    for piece in tensors.pieces(data, _PIECE):
        whole[offset : offset + piece.nbytes] = piece
        offset += piece.nbytes
    return whole


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()


def _write_file(path: Path, parts: Iterable[tuple[int, Data]]) -> None:
    fd = saved.create(path)
    try:
        for begin, part in parts:
            offset = begin
            for piece in tensors.pieces(part, _PIECE):
                _write_all(fd, piece, offset)
                offset += piece.nbytes
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


# --- loading ----------------------------------------------------------------------------------------------


def restore(
    path: str, token: str, drop: Collection[str], classes: frozenset[str], env: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Load what was saved; return the variables that the notebook may know, and which are lost, with why.

    `classes` are names of classes that the notebook has, `env` of environment variables that it has given.
    """
    meeting = Meeting(token)
    with meeting.together():
        manifest = saved.open_saved(path)
        load = _Loading(meeting, manifest)
        _own_tokens.add(manifest.token)
        lost: dict[str, str] = {}
        for rank, each in enumerate(meeting.tell(load.lost)):
            for name in each.keys() - set(drop):
                lost.setdefault(name, f"rank {rank}: {each[name]}")
        load.read_shards(lost)
        beside = {name: value for name, value in load.values.items() if is_beside(name)}
        gone = {*lost, *drop, *beside}
        kept = {name: value for name, value in load.values.items() if name not in gone}
        assert namespace.here is not None  # noqa: S101 - a session's rank
        namespace.here.restored(kept, frozenset(beside.get(NOTEBOOKS, ())))
        pickling.keep_as_own(classes)
        restore_surroundings(beside, env)
        told = meeting.tell([name for name, value in kept.items() if not is_imported(value)])
    return sorted(set().union(*told)), lost


def is_beside(name: str) -> bool:
    """Return whether this is no variable, but what comes along with them."""
    return not name.isidentifier()


def is_imported(value: object) -> bool:
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return True
    return isinstance(value, type | types.FunctionType) and not is_by_value(value)


class Unpickled:
    """Variables that have been unpickled, by name, and those that were lost, with the reason."""

    def __init__(self, meeting: Meeting, *, not_there: str = "of other ranks than there are") -> None:
        """`not_there` says why a mesh or a group that was not made is not there."""
        self.values: dict[str, Any] = {}
        self.lost: dict[str, str] = {}
        self.objects: dict[int, Any] = {}
        """By their keys in the save."""
        self._met = sharded.GroupObjects(meeting.rank, meeting.world_size, own_device())
        self._met.not_there = not_there

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Have objects of process groups find these within the block."""
        sharded.loading = self._met
        try:
            yield
        finally:
            sharded.loading = None

    def take(self, variables: Iterable[PackedVariable], buffers: Iterator[memoryview]) -> None:
        """Unpickle variables, each by itself."""
        for name, first_key, stream, count in variables:
            parts = [memoryview(stream), *itertools.islice(buffers, count)]
            try:
                loaded = pickling.loads_known(
                    parts, str(self._met.device), self._found, lambda _: None, pushed=False
                )
            except Exception as error:  # noqa: BLE001 - whatever the objects raise
                self.lost[name] = reason_of(error)
            else:
                self.values[name] = loaded.value
                places = loaded.places()
                self.objects |= {first_key + place: obj for place, obj in places.items()}

    def finish(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Fill DTensors with this rank's shards, which come as bytes, and wrap models of FSDP2 again."""
        for number, tensor in self._met.shards.items():
            local = tensor.to_local().detach()
            if local.numel():
                local.copy_(shards[number].view(local.dtype).view(local.shape))
        self._wrap_again(())

    def _wrap_again(self, lost: Collection[str]) -> None:
        of_fsdp2 = (name for name in self.values if name.startswith(sharded.FSDP2) and name not in lost)
        sharded.wrap_again([self.values[name] for name in of_fsdp2])

    def _found(self, key: int) -> Any:
        if key not in self.objects:
            msg = "it has an object of a variable that could not be loaded"
            raise pickle.UnpicklingError(msg)
        return self.objects[key]


class _Loading(Unpickled):
    """What a rank loads; its variables are whole once it is finished."""

    def __init__(self, meeting: Meeting, manifest: saved.SavedSession) -> None:
        super().__init__(meeting)
        self._directory, self._meeting = Path(manifest.path), meeting
        with self.loading():
            equal = self._read("equal")
            if dist.is_initialized():
                self._met.make(equal["groups"], manifest.world_size)
            self._take(equal)
            if manifest.world_size == meeting.world_size:
                self._take(self._read(f"rank-{meeting.rank}"))
            elif from_rank_0 := {each.name for each in manifest.variables if each.from_rank_0}:
                self._take(self._read("rank-0"), from_rank_0)

    def read_shards(self, lost: Collection[str]) -> None:
        """Fill shards and wrap models, but for what another rank has lost."""
        if self._met.shards:
            sharded.read(self._directory / "sharded", self._met.shards)
        self._wrap_again(lost)

    def _read(self, name: str) -> Any:
        content = (self._directory / f"{name}.pkl").read_bytes()
        return pickle.loads(content)  # noqa: S301 - the user's own, see `saved.open_saved`

    def _take(self, content: Mapping[str, Any], only: Collection[str] | None = None) -> None:
        places = iter(content["places"])
        for variable in content["variables"]:
            name, *_, count = variable
            its = list(itertools.islice(places, count))
            if only is None or name in only:
                self.take([variable], (self._buffer(*each) for each in its))

    def _buffer(self, rank: int, offset: int, size: int) -> memoryview:
        """Return a part of a file in memory that can be written to."""
        whole = tensors.memory(size)
        with (self._directory / f"rank-{rank}.data").open("rb") as file:
            file.seek(offset)
            if file.readinto(whole) != size:
                msg = f"{file.name} is shorter than it was saved"
                raise NblaunchError(msg)
        return whole
