"""The payload of a cell or a call: values in one pickle, submodules by name, the source of functions."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nblaunch._errors import CaptureError
from nblaunch.capture import pickling
from nblaunch.capture.names import CellNames
from nblaunch.capture.parts import attributes_of, fact_of
from nblaunch.capture.pickling import Known, Packed

if TYPE_CHECKING:
    from nblaunch.capture.unpicklable import Culprit

RANK_NAMES = frozenset({"rank", "local_rank", "world_size", "device"})
"""These are the rank's own."""
_MODULE_NAMES = frozenset({"__name__", "__builtins__", "__builtin__", "get_ipython"})
_SHELL_NAMES = frozenset({"exit", "quit", "open"})
IPYTHONS_CONTAINERS = frozenset({"In", "Out", "_ih", "_oh", "_dh"})
"""IPython appends to these with each cell: they are sent as they are now."""
IPYTHONS_NAMES = IPYTHONS_CONTAINERS | {"_", "__", "___", "_i", "_ii", "_iii"}
"""IPython binds these anew with each cell of the notebook; nobody has assigned them."""


def notebook_names(namespace: Mapping[str, Any]) -> AbstractSet[str]:
    """Return the names of the notebook's own variables, not of those that each rank or its shell has.

    IPython puts `open`, `exit` and `quit` into the namespace; where the notebook has bound such a name
    itself, that is what its code means.
    """
    shells = {name for name in _SHELL_NAMES & namespace.keys() if _is_shells_own(namespace[name])}
    return namespace.keys() - RANK_NAMES - _MODULE_NAMES - shells


def _is_shells_own(value: object) -> bool:
    function = value.__func__ if type(value) is types.MethodType else value
    if type(function) is types.FunctionType:
        module = function.__globals__.get("__name__")  # `__module__` of its `open` is io's
    else:
        module = fact_of(type(function), "__module__")
    return isinstance(module, str) and module.partition(".")[0] in {"IPython", "ipykernel"}


@dataclass(frozen=True, slots=True)
class Captured:
    """A job's payload, ready to be sent."""

    packed: Packed
    imports: tuple[str, ...]
    sources: Mapping[str, str]
    """File name -> source of the notebook cells in which captured functions were defined."""
    names: frozenset[str] = frozenset()
    """The variables in the payload."""
    used: frozenset[str] = frozenset()
    """All names that the cell may use."""
    notices: tuple[str, ...] = ()
    """What the user should know of the variables in it."""


def capture_cell(names: CellNames, namespace: dict[str, Any], *, known: Known | None = None) -> Captured:
    """Capture the variables of `namespace` that a cell needs.

    `known` is what the ranks have already, None for fresh ones. Fresh ranks get only the part of a tensor's
    storage that is shown. Raises `CaptureError` for the first value that cannot be sent.
    """
    used = names.needed | names.maybe
    available = notebook_names(namespace)
    lacking = (used if known is None else known.needs(used)) & available

    def pack(lacking: frozenset[str]) -> tuple[Packed, dict[str, Any]]:
        surely = {name: namespace[name] for name in sorted(lacking & names.needed)}
        maybe = {name: namespace[name] for name in sorted(lacking - names.needed)}
        try:
            packed = pickling.dumps({**surely, **maybe}, namespace, known, trim=known is None)
        except Exception:  # noqa: BLE001 - whatever the objects raise
            # A name that the cell may never load must not fail the run.
            maybe = {name: value for name, value in maybe.items() if _can_be_sent(value, namespace)}
            with _explaining(surely, namespace, "the cell uses"):
                packed = pickling.dumps({**surely, **maybe}, namespace, known, trim=known is None)
        return packed, {**surely, **maybe}

    packed, sent = _pack_all(pack, lacking, available, known)
    notices = _notices(packed, sent, namespace, known)
    imports = _submodules_in(names.dotted, namespace)
    return Captured(packed, imports, _sources(packed), frozenset(sent), used, notices)


def _pack_all(
    pack: Callable[[frozenset[str]], tuple[Packed, dict[str, Any]]],
    lacking: frozenset[str],
    available: AbstractSet[str],
    known: Known | None,
) -> tuple[Packed, dict[str, Any]]:
    """Pickle what the ranks lack, and again with the variables of functions to which it leads by key.

    The pickle takes along what the functions read that are in it. `pack` returns a pickle and its variables.
    """
    while True:
        packed, sent = pack(lacking)
        more = frozenset[str]() if known is None else known.needs((), packed.keys) & available
        if not more - lacking - packed.carried.keys():
            return packed, sent
        lacking |= more - packed.carried.keys()


def capture_values(
    values: dict[str, Any], namespace: dict[str, Any] | None = None, known: Known | None = None
) -> Captured:
    with _explaining(values, namespace, "the push holds"):
        packed = pickling.dumps(values, namespace, known, push=True)
    notices = _notices(packed, values, namespace, known)
    return Captured(packed, (), _sources(packed), frozenset(values), notices=notices)


def capture_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    namespace: dict[str, Any] | None = None,
    known: Known | None = None,
) -> Captured:
    """Capture a call with all it refers to; for `known` see `capture_cell`.

    Raises `CaptureError` naming the part that cannot be sent.
    """
    roots: dict[str, object] = {called_name(function).rpartition(".")[2]: function}
    roots |= {f"args[{position}]": value for position, value in enumerate(args)}
    roots |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
    available = namespace or {}

    def pack(lacking: frozenset[str]) -> tuple[Packed, dict[str, Any]]:
        variables = {name: available[name] for name in sorted(lacking)}
        call = (function, tuple(args), tuple(kwargs.items()), tuple(variables.items()))
        return pickling.dumps(call, namespace, known, trim=known is None), variables

    with _explaining(roots, namespace, "the call uses"):
        packed, sent = _pack_all(pack, frozenset(), notebook_names(available), known)
        notices = _notices(packed, {**roots, **sent}, namespace, known)
        return Captured(packed, (), _sources(packed), frozenset(sent), notices=notices)


def called_name(function: object) -> str:
    """Return the qualified name of what is called; runs no code of the user's."""
    kind = type(function)
    if issubclass(kind, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type):
        return str(function.__qualname__)  # type: ignore[attr-defined] # each of these has it
    name = (attributes_of(function) or {}).get("__qualname__")
    return name if type(name) is str else kind.__qualname__


def _notices(
    packed: Packed, variables: Mapping[str, object], namespace: dict[str, Any] | None, known: Known | None
) -> tuple[str, ...]:
    """Return a notice for each variable that leads to tensors whose graph stays behind."""
    if not packed.detached:
        return ()
    waiting = {id(tensor): tensor for tensor in packed.detached}
    variables = {**packed.carried, **variables}
    notices = []
    for name, value in variables.items():
        if waiting.pop(id(value), None) is not None:
            notices.append(
                f"{name} has lost its graph: on the ranks it is a leaf, and backward() ends there. "
                f"Compute it in the cell, or send {name}.detach()"
            )
    for name, value in variables.items():
        if not waiting:
            break
        held = set(map(id, pickling.dumps(value, namespace, known).detached)) & waiting.keys()
        if held:
            notices.append(
                f"{name} holds a tensor that has lost its graph: on the ranks it is a leaf, and backward() "
                "ends there. Compute it in the cell, or detach it"
            )
        for address in held:
            del waiting[address]
    return tuple(notices)


@contextmanager
def _explaining(roots: Mapping[str, object], namespace: dict[str, Any] | None, user: str) -> Iterator[None]:
    """Turn an error in this block into a `CaptureError`, which names the part of `roots` that causes it."""
    try:
        yield
    except Exception as error:
        from nblaunch.capture.unpicklable import find_culprit

        culprit = find_culprit(roots, error, pickling.Guarded, namespace=namespace, known=None)
        raise _capture_error(culprit, error, user) from error


def _can_be_sent(value: object, namespace: dict[str, Any]) -> bool:
    try:
        pickling.dumps(value, namespace)
    except Exception:  # noqa: BLE001 - whatever the objects raise
        return False
    return True


def _capture_error(culprit: Culprit | None, error: Exception, user: str) -> CaptureError:
    if culprit is None:
        return CaptureError(
            f"What {user} cannot be sent to the ranks all together: {type(error).__name__}: {error}."
        )
    advice = _ADVICE.get(culprit.type_name)
    if advice is None:
        advice = f"Make {culprit.path} on the ranks instead"
        if culprit.path != culprit.name:
            advice += f", or leave it out of {culprit.name}'s state (__getstate__)"
    msg = (
        f"{culprit.path}: {culprit.reason} ({culprit.type_name}, {culprit.size} bytes). "
        f"{user.capitalize()} {culprit.name}, and what it holds is sent to every rank. {advice}."
    )
    return CaptureError(msg, name=culprit.name, path=culprit.path, size=culprit.size)


_SCRIPTED = "Give torch.jit.save a file for it here, and torch.jit.load that file in the cell"
_ADVICE = {
    "numpy.ufunc": "Call np.frompyfunc in the cell: the function that it is given can be sent",
    "torch.ScriptModule": _SCRIPTED,
    "torch.jit.torch.jit.ScriptFunction": _SCRIPTED,
    "torch.jit._script.RecursiveScriptModule": _SCRIPTED,
    "torch.jit._trace.TopLevelTracedModule": _SCRIPTED,
}
"""What to do instead of sending an object of a class, where that is not to make it anew."""


def _submodules_in(dotted: frozenset[str], namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return modules that attribute chains reach: `import xml` on a rank does not load `xml.etree`."""
    found = set()
    for chain in dotted:
        root, *attributes = chain.split(".")
        module = namespace.get(root)
        # No attribute of anything else is looked up: that may run the user's code.
        name = vars(module).get("__name__") if issubclass(type(module), types.ModuleType) else None
        if not isinstance(name, str) or sys.modules.get(name) is not module:
            continue
        for attribute in attributes:
            name = f"{name}.{attribute}"
            if name not in sys.modules:
                break
            found.add(name)
    return tuple(sorted(found))


def _sources(packed: Packed) -> dict[str, str]:
    return {name: source for name in packed.filenames if (source := cell_source(name)) is not None}


def cell_source(filename: str) -> str | None:
    """Return the source of the notebook cell that was compiled under this name, None if there is none."""
    entry = linecache.cache.get(filename)
    # Entries without a modification time are not files but IPython's cells.
    return "".join(entry[2]) if entry is not None and len(entry) == 4 and entry[1] is None else None  # noqa: PLR2004
