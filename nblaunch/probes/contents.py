"""Any object as a list of entries that two ranks can compare: path, type and digest of each part.

What counts is the value, never an address or an identity:
  * numbers, texts and bytes by their bytes; functions and classes by name, functions also by code
  * tensors, arrays and long lists of numbers by hashes of blocks (`probes.blocks`)
  * modules by parameters, buffers and `training`; what has a `state_dict`, by that
  * containers part by part: mappings sorted by key, sets by their elements' digests
  * anything else as pickle takes it apart (`__reduce_ex__`), part by part; so no pickle of the whole is made
  * what cannot be taken apart is named in a note, and only its type is compared

Order and paths depend on the content alone. A part that leads back to one that it is in ends there. The list
is bounded: further parts are one entry together, which says whether they are equal, and not where.
"""

from __future__ import annotations

import copyreg
import enum
import struct
import sys
import types
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nblaunch._budget import shortened
from nblaunch.capture.parts import TORCH_CHILDREN, Part, closure_of, named_parts, states_of, type_name
from nblaunch.insight.comparing import ALL, EntryShown, Outline
from nblaunch.probes.blocks import CODES, DIGEST, HashedTensor, digest, hashed, ranges

MOST_ENTRIES = 200_000
_LONG = 64
"""Numbers; longer lists of them are one entry, whose elements are named."""
_SHOWN, _PATH = 80, 400
_LONGEST_PATH = 2000
_LOCAL = " (local shard)"
_MOST_NOTES = 5
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, type(...), type(NotImplemented))


@dataclass(slots=True)
class TakenApart:
    """An object taken apart: what it is in words, its own content, and its parts."""

    head: str
    content: bytes = b""
    shown: str = ""
    tensor: HashedTensor | None = None
    children: Iterator[Part] = field(default_factory=lambda: iter(()))
    domain: tuple[int, ...] = ALL
    """The ranks that hold the same shard of it."""


@dataclass(slots=True)
class ListedPart:
    """A part of the listed object."""

    path: str
    part: TakenApart
    digest: bytes


class Contents:
    """The entries of one object, in order."""

    def __init__(self, name: str, obj: object, hashes: dict[int, tuple[Any, HashedTensor]]) -> None:
        """List `obj`; `hashes` are those of tensors that have been read already, by identity."""
        self.entries: list[ListedPart] = []
        self.notes: list[str] = []
        self._hashes = hashes
        self._beyond = b""
        self._members: dict[tuple[int, ...], list[int]] = {}
        self._walked: dict[int, Any] = {}
        """Containers that have been listed: beyond the bound none is listed again."""
        self._walk(name, obj)
        if self._beyond:
            words = f"{name} (all parts after the first {MOST_ENTRIES})"
            self.entries.append(ListedPart(words, TakenApart("further parts"), self._beyond))
        self._paths: frozenset[str] | None = None
        self._digests = {ALL: b"".join(each.digest for each in self.entries)}
        for domain, places in self._members.items():
            self._digests[domain] = b"".join(self._own(self.entries[place]) for place in places)

    def outline(self) -> Outline:
        domains = {
            domain: (len(digests) // DIGEST, digest(digests)) for domain, digests in self._digests.items()
        }
        return Outline(domains, notes=tuple(self.notes[:_MOST_NOTES]))

    def ranges(self, domain: tuple[int, ...], start: int, stop: int, step: int) -> tuple[bytes, ...]:
        """Return the digests of entries of a domain, so many together."""
        return ranges(self._digests.get(domain, b""), start, stop, step)

    def entry(self, domain: tuple[int, ...], index: int) -> ListedPart | None:
        """Return an entry of a domain; None if there are fewer."""
        places: Sequence[int] = range(len(self.entries)) if domain == ALL else self._members.get(domain, [])
        return self.entries[places[index]] if index < len(places) else None

    def shown(self, domain: tuple[int, ...], entry: ListedPart) -> EntryShown:
        """Return the notes on an entry."""
        part, tensor = entry.part, entry.part.tensor
        known = digest(part.content) if domain == ALL else self._own(entry)
        path, head = shortened(entry.path, _PATH, len), shortened(part.head, 2 * _SHOWN, len)
        # A shard is looked into by those that hold the same one.
        if tensor is None or part.domain != domain:
            return EntryShown(path, head, part.shown, known)
        path += _LOCAL if domain != ALL else ""
        return EntryShown(
            path, head, part.shown, _content_of(part), tensor.blocks, tensor.shape, tensor.code, tensor.size
        )

    def has(self, path: str) -> bool:
        """Whether there is an entry of this path."""
        if self._paths is None:
            self._paths = frozenset(shortened(each.path, _PATH, len) for each in self.entries)
        return path in self._paths

    def _own(self, entry: ListedPart) -> bytes:
        return digest(entry.path.encode("utf-8", "replace"), _content_of(entry.part))

    def _walk(self, name: str, obj: object) -> None:
        above: dict[int, int] = {}
        stack: list[tuple[str, Any, Iterator[Part]]] = []
        path = name
        while True:
            if id(obj) in above:
                up = len(above) - above[id(obj)]
                part = TakenApart(f"the object that it is part of, {up} above", up.to_bytes(8, "little"))
            elif self._beyond and id(obj) in self._walked:
                part = TakenApart("listed before")
            else:
                part = self._taken_apart(path, obj)
            self._add(path, part)
            above[id(obj)] = above.get(id(obj), len(above))
            stack.append((path, obj, part.children))
            while stack:
                inside, parent, children = stack[-1]
                try:
                    child = next(children, None)
                except Exception as error:  # noqa: BLE001 - of the user's objects
                    self._note(inside, error)
                    child = None
                if child is not None:
                    path, obj = _joined(inside, child[0]), child[1]
                    break
                stack.pop()
                if above.get(id(parent)) == len(stack):
                    del above[id(parent)]
                    if type(parent) not in _PLAIN:
                        self._walked[id(parent)] = parent
            if not stack:
                return

    def _add(self, path: str, part: TakenApart) -> None:
        texts = (path.encode("utf-8", "replace"), part.head.encode("utf-8", "replace"))
        content = part.content if part.domain != ALL or part.tensor is None else _content_of(part)
        known = digest(*texts, content)
        if len(self.entries) < MOST_ENTRIES:
            if part.domain != ALL:
                self._members.setdefault(part.domain, []).append(len(self.entries))
            self.entries.append(ListedPart(path, part, known))
        else:
            own = _content_of(part) if part.tensor is not None and part.domain == ALL else b""
            self._beyond = digest(self._beyond, known, own)

    def _taken_apart(self, path: str, obj: Any) -> TakenApart:
        try:
            found = take_apart(obj, self.tensor)
        except Exception as error:  # noqa: BLE001 - whatever the user's objects raise
            self._note(path, error)
            return TakenApart(f"{type_of(obj)}, not compared")
        if found.head.endswith(_SHARD_OF_FSDP1):
            self.notes.append(
                f"{shortened(path, _SHOWN, len)} is a shard of FSDP1: only type and shape were compared"
            )
        return found

    def _note(self, path: str, error: Exception) -> None:
        # The message of an error may hold addresses.
        self.notes.append(f"{shortened(path, _SHOWN, len)} was not compared ({type(error).__name__})")

    def tensor(self, key: object, tensor: torch.Tensor, **as_what: Any) -> HashedTensor:
        """Return the hashes of a tensor, of which `key` is the object: each is read once."""
        known = self._hashes.get(id(key))
        if known is None:
            # With the object, so that no other one gets its identity meanwhile.
            known = self._hashes[id(key)] = (key, hashed(tensor, **as_what))
        return known[1]


def _content_of(part: TakenApart) -> bytes:
    return digest(part.content) if part.tensor is None else digest(part.content, part.tensor.digests)


def _joined(path: str, suffix: str) -> str:
    """Return the path of a part, in bounds also at the end of a long chain."""
    whole = path + suffix
    return whole if len(whole) <= _LONGEST_PATH else shortened(whole, _LONGEST_PATH // 2, len)


def type_of(obj: object) -> str:
    """Return the name of an object's type, with its module if it is no built-in one."""
    return type_name(obj).removeprefix("__main__.")


# --- one object ----------------------------------------------------------------------------------------


def take_apart(obj: Any, tensor: Any) -> TakenApart:  # noqa: C901 - one table of kinds
    """Take an object apart; `tensor(key, tensor, ...)` reads what is hashed in blocks. Raises anything."""
    kind = type(obj)
    if kind in _PLAIN:
        return _plain_part(obj)
    if kind in {list, tuple}:
        return _sequence(obj, tensor)
    if kind is dict or isinstance(obj, types.MappingProxyType):
        return TakenApart(type_of(obj), children=_items(obj))
    if kind in {set, frozenset}:
        return TakenApart(kind.__name__, children=_elements(obj))
    if isinstance(obj, enum.Enum):
        return TakenApart(type_of(obj), obj.name.encode(), f"{kind.__name__}.{obj.name}")
    if isinstance(obj, torch.Tensor):
        return _tensor_part(obj, tensor)
    if isinstance(obj, torch.nn.Module):
        return _module_part(obj)
    if isinstance(obj, torch.device):
        # Each rank has a device of its own; that of others has another number.
        return TakenApart("torch.device", obj.type.encode(), obj.type)
    if isinstance(obj, torch.dtype | torch.layout | torch.memory_format):
        return TakenApart(type_of(obj), str(obj).encode(), str(obj))
    if isinstance(obj, torch.Generator):
        return TakenApart("torch.Generator", children=iter([(".get_state()", obj.get_state())]))
    if isinstance(obj, type | types.ModuleType | types.BuiltinFunctionType):
        return _named(obj)
    if isinstance(obj, types.FunctionType):
        return _function(obj)
    found = _of_other_packages(obj, tensor)
    if found is not None:
        return found
    state_of = getattr(kind, "state_dict", None)
    if callable(state_of):
        return TakenApart(type_of(obj), children=iter([(".state_dict()", obj.state_dict())]))
    return _reduced(obj)


def _plain_part(obj: Any) -> TakenApart:
    content = obj
    match obj:
        case float():
            content = struct.pack("=d", obj)
        case complex():
            content = struct.pack("=dd", obj.real, obj.imag)
        case str():
            content = obj.encode("utf-8", "surrogatepass")
        case bytes() | bytearray():
            pass
        case _:
            content = repr(obj).encode()
    if isinstance(obj, str | bytes | bytearray) and len(obj) > 2 * _SHOWN:
        return TakenApart(f"{type_of(obj)} of length {len(obj)}", digest(content))
    return TakenApart(type_of(obj), bytes(content), shortened(repr(obj), _SHOWN, len))


def _sequence(obj: Sequence[Any], tensor: Any) -> TakenApart:
    kinds = set(map(type, obj)) if len(obj) > _LONG else set()
    if kinds in ({int}, {float}):
        code = "q" if kinds == {int} else "d"
        try:
            numbers = array(code, obj)
        except OverflowError:
            numbers = None
        if numbers is not None:
            data = torch.frombuffer(numbers, dtype=torch.int64 if code == "q" else torch.float64)
            named = f"{type_of(obj)} of {len(obj)} {next(iter(kinds)).__name__}"
            return TakenApart(named, tensor=tensor(obj, data))
    return TakenApart(type_of(obj), children=((f"[{place}]", each) for place, each in enumerate(obj)))


def _items(obj: Mapping[Any, Any]) -> Iterator[Part]:
    keyed = [(_key_of(key), key) for key in obj]
    for (_, _, label), key in sorted(keyed, key=lambda each: each[0]):
        yield f"[{label}]", obj[key]


def _key_of(key: Any) -> tuple[str, Any, str]:
    """Return the sort key of a dict key, and its text in paths."""
    kind = type(key).__name__
    if type(key) in {int, str}:
        return kind, key, repr(key)
    if type(key) in _PLAIN or (type(key) is tuple and all(type(each) in _PLAIN for each in key)):
        return kind, repr(key), repr(key)
    known = Contents("", key, {})
    words = f"<{type_of(key)} {digest(*(each.digest for each in known.entries)).hex()[:8]}>"
    return kind, words, words


def _elements(obj: frozenset[Any]) -> Iterator[Part]:
    for _, _, label in sorted(map(_key_of, obj)):
        yield f"{{{label}}}", None


def _named(obj: Any) -> TakenApart:
    name = getattr(obj, "__qualname__", "") or obj.__name__
    module = getattr(obj, "__module__", None) or ""
    words = f"{module}.{name}".lstrip(".")
    return TakenApart(type_of(obj), words.encode(), words)


def _function(obj: types.FunctionType) -> TakenApart:
    named = _named(obj)
    defaults = [(".__defaults__", obj.__defaults__), (".__kwdefaults__", obj.__kwdefaults__)]
    closure = [(f".<{name}>", value) for name, value in closure_of(obj).items()]
    content = digest(named.content, _code_bytes(obj.__code__))
    return TakenApart("function", content, named.shown, children=iter([*defaults, *closure]))


def _code_bytes(code: types.CodeType) -> bytes:
    """Return the digest of a code object, without line numbers."""
    constants = [
        _code_bytes(each)
        if isinstance(each, types.CodeType)
        # In any order, from process to process.
        else repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each).encode()
        for each in code.co_consts
    ]
    names = "\0".join((*code.co_names, *code.co_varnames)).encode()
    return digest(code.co_code, names, *constants)


def _reduced(obj: Any) -> TakenApart:
    """Take an object apart as pickle does. Raises `TypeError` if pickle cannot."""
    reducer = copyreg.dispatch_table.get(type(obj))
    reduced: Any = obj.__reduce_ex__(4) if reducer is None else reducer(obj)
    if isinstance(reduced, str):
        return TakenApart(type_of(obj), reduced.encode(), reduced)
    function, arguments, state, listed, mapped = (*reduced, *[None] * 5)[:5]
    made_of_class = getattr(function, "__name__", "") == "__newobj__"
    name = "" if made_of_class else _named(function).shown
    parts = _parts(obj, arguments[made_of_class:], state, listed, mapped)
    return TakenApart(type_of(obj), name.encode(), children=parts)


def _parts(obj: Any, arguments: tuple[Any, ...], state: Any, listed: Any, mapped: Any) -> Iterator[Part]:
    for place, each in enumerate(arguments):
        yield f".__reduce__()[1][{place}]", each
    states = states_of(state)
    if all(each is None or isinstance(each, dict) for each in states):
        for each in states:
            yield from named_parts(obj, sorted((each or {}).items(), key=lambda item: str(item[0])))
    else:
        yield ".__getstate__()", state
    for place, each in enumerate(listed or ()):
        yield f"[{place}]", each
    if mapped is not None:
        yield from _items(dict(mapped))


# --- torch ---------------------------------------------------------------------------------------------

_SHARD_OF_FSDP1 = " (shard of FSDP1)"


def _module_part(module: torch.nn.Module) -> TakenApart:
    named = [each for kind in TORCH_CHILDREN for each in getattr(module, kind).items()]
    children = [(f".{name}", each) for name, each in named if each is not None]
    return TakenApart(type_of(module), children=iter([*children, (".training", module.training)]))


def _tensor_part(obj: torch.Tensor, tensor: Any) -> TakenApart:
    head = _tensor_head(obj)
    mesh, placements = getattr(obj, "device_mesh", None), getattr(obj, "placements", None)
    if mesh is not None and placements is not None:
        return _sharded(obj, tensor, head)
    if obj.is_meta:
        return TakenApart(f"{head} on meta")
    if type(obj).__name__ == "FlatParameter":
        return TakenApart(head + _SHARD_OF_FSDP1)
    inner = getattr(obj, "__tensor_flatten__", None)
    if inner is not None:
        names, context = inner()
        parts = [*((f".{name}", getattr(obj, name)) for name in names), (".__tensor_flatten__()[1]", context)]
        return TakenApart(head, children=iter(parts))
    plain = obj.detach()
    if plain.is_quantized:
        return TakenApart(f"{head} {_quantizer(plain)}", tensor=tensor(obj, plain.int_repr()))
    if plain.layout is torch.sparse_coo:
        plain = plain.coalesce()
        return TakenApart(
            head, children=iter([(".indices()", plain.indices()), (".values()", plain.values())])
        )
    if plain.layout is not torch.strided:
        names = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
        found = [(f".{name}()", _of_layout(plain, name)) for name in names]
        return TakenApart(head, children=iter([each for each in found if each[1] is not None]))
    return TakenApart(head, tensor=tensor(obj, plain))


def _of_layout(tensor: torch.Tensor, name: str) -> torch.Tensor | None:
    try:
        found: torch.Tensor = getattr(tensor, name)()
    except RuntimeError:  # a tensor of another layout
        return None
    return found


def _tensor_head(obj: torch.Tensor) -> str:
    kind = type_of(obj).removeprefix("torch.nn.parameter.").removeprefix("torch.")
    layout = "" if obj.layout is torch.strided else f" {obj.layout}".replace("torch.", "")
    frozen = "" if obj.requires_grad or not isinstance(obj, torch.nn.Parameter) else ", no gradient"
    shape = ", ".join(map(str, obj.shape))
    return f"{kind}({shape}) {str(obj.dtype).removeprefix('torch.')}{layout} on {obj.device.type}{frozen}"


def _quantizer(obj: torch.Tensor) -> str:
    if obj.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
        return f"scale {obj.q_scale()!r} zero {obj.q_zero_point()}"
    scales, zeros = obj.q_per_channel_scales(), obj.q_per_channel_zero_points()
    known = digest(*(bytes(str(each.tolist()), "ascii") for each in (scales, zeros)))
    return f"axis {obj.q_per_channel_axis()} scales {known.hex()[:8]}"


def _sharded(obj: Any, tensor: Any, head: str) -> TakenApart:
    """Take a DTensor apart: a shard is compared by the ranks that hold the same one. Nothing is gathered."""
    mesh, placements = obj.device_mesh, obj.placements
    grid: torch.Tensor = mesh.mesh
    words = f"{head} {tuple(placements)} on mesh {tuple(grid.shape)}"
    here = mesh.get_coordinate()
    local = obj.to_local()
    if here is None or any(each.is_partial() for each in placements):
        # Partial sums differ from rank to rank by design; a rank outside of the mesh has nothing.
        return TakenApart(words)
    chosen = tuple(
        slice(None) if each.is_replicate() else at for each, at in zip(placements, here, strict=True)
    )
    holders = tuple(sorted(grid[chosen].reshape(-1).tolist()))
    return TakenApart(words, tensor=tensor(obj, local.detach()), domain=holders)


# --- other packages, none of which is imported here -----------------------------------------------------


def _of_other_packages(obj: Any, tensor: Any) -> TakenApart | None:
    """Take an array, a data frame or a series apart; None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(obj) in {numpy.ndarray, numpy.memmap}:
        return _array(obj, tensor, numpy)
    if numpy is not None and isinstance(obj, numpy.generic):
        return TakenApart(f"numpy.{obj.dtype}", obj.tobytes(), shortened(str(obj), _SHOWN, len))
    if type(obj).__module__.partition(".")[0] != "pandas":
        return None
    if hasattr(obj, "columns") and hasattr(obj, "index"):
        columns = [(f"[{name!r}]", obj.iloc[:, place].to_numpy()) for place, name in enumerate(obj.columns)]
        return TakenApart(
            type_of(obj), children=iter([(".columns", list(obj.columns)), (".index", obj.index), *columns])
        )
    if hasattr(obj, "to_numpy"):
        index = [(".index", obj.index)] if hasattr(obj, "index") else []
        return TakenApart(
            f"{type_of(obj)} {obj.dtype}", children=iter([*index, (".to_numpy()", obj.to_numpy())])
        )
    return None


def _array(obj: Any, tensor: Any, numpy: Any) -> TakenApart:
    shape = ", ".join(map(str, obj.shape))
    head = f"{type_of(obj)}({shape}) {obj.dtype}"
    if obj.dtype.hasobject:
        flat = obj.reshape(-1).tolist()
        return TakenApart(head, children=((f".flat[{place}]", each) for place, each in enumerate(flat)))
    if not obj.size or not obj.dtype.itemsize:
        return TakenApart(head)
    data = numpy.ascontiguousarray(obj)
    data = data if data.flags.writeable else data.copy()  # torch warns of what it must not write to
    known = obj.dtype.isnative and obj.dtype.kind in "biufc"
    code = CODES.get(getattr(torch, obj.dtype.name, obj.dtype), "") if known else ""
    raw = torch.frombuffer(data.reshape(-1).view(numpy.uint8), dtype=torch.uint8)
    return TakenApart(
        head, tensor=tensor(obj, raw, shape=tuple(obj.shape), size=obj.dtype.itemsize, code=code)
    )
