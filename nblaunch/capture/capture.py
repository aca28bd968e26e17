"""The payload of a cell or a call: values in one pickle, submodules by name, the source of functions."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nblaunch._errors import CaptureError
from nblaunch.capture import pickling
from nblaunch.capture.names import cell_names
from nblaunch.capture.pickling import Known, Packed

if TYPE_CHECKING:
    from nblaunch.capture.unpicklable import Culprit

# These are the rank's own; IPython puts `open`, `exit` and `quit` into the namespace.
RANK_NAMES = frozenset({"rank", "local_rank", "world_size", "device"})
SHELL_NAMES = frozenset({"get_ipython", "exit", "quit", "open", "__name__", "__builtins__", "__builtin__"})


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


def capture_cell(
    source: str,
    namespace: dict[str, Any],
    transform: Callable[[str], str] = str,
    *,
    known: Known | None = None,
) -> Captured:
    """Capture the variables of `namespace` that a cell needs; `source` is plain Python, magics transformed.

    `transform` does that for cells within the cell (below a `%%time` of its own). `known` is what the ranks
    have already, None for fresh ones. Fresh ranks get only the part of a tensor's storage that is shown.

    Raises `CaptureError` for the first value that cannot be sent, `SyntaxError` for a broken cell.
    """
    names = cell_names(source, transform=transform)
    used = names.needed | names.maybe
    available = namespace.keys() - RANK_NAMES - SHELL_NAMES
    lacking = (used if known is None else known.needs(used)) & available
    packed, sent = _packed_cell(lacking, names.needed, namespace, known)
    return Captured(packed, _submodules_in(names.dotted, namespace), _sources(packed), sent, used)


def _packed_cell(
    names: frozenset[str], needed: frozenset[str], namespace: dict[str, Any], known: Known | None
) -> tuple[Packed, frozenset[str]]:
    """Return the pickle of variables, and which are in it; one that only may be needed can be left out."""
    surely = {name: namespace[name] for name in sorted(names & needed)}
    maybe = {name: namespace[name] for name in sorted(names - needed)}
    try:
        packed = pickling.dumps({**surely, **maybe}, namespace, known, trim=known is None)
    except Exception:  # noqa: BLE001 - whatever the objects raise
        # A name that the cell may never load must not fail the run.
        maybe = {name: value for name, value in maybe.items() if _refusal(value, namespace) is None}
        with _explained(surely, namespace, "the cell uses"):
            packed = pickling.dumps({**surely, **maybe}, namespace, known, trim=known is None)
    return packed, frozenset(surely) | frozenset(maybe)


def capture_values(
    values: dict[str, Any], namespace: dict[str, Any] | None = None, known: Known | None = None
) -> Captured:
    """Capture variables for a push. Raises `CaptureError` for one that cannot be sent."""
    with _explained(values, namespace, "the push holds"):
        packed = pickling.dumps(values, namespace, known, push=True)
    return Captured(packed, (), _sources(packed), frozenset(values))


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
    roots = {getattr(function, "__name__", type(function).__name__): function}
    roots |= {f"args[{position}]": value for position, value in enumerate(args)}
    roots |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
    available, lacking = namespace or {}, frozenset[str]()
    if known is not None:
        # Variables that only functions use which the ranks have already: nothing else would bring them.
        lacking = known.needs(frozenset(), function, args, kwargs) & available.keys()
    variables = tuple((name, available[name]) for name in sorted(lacking))
    call = (function, tuple(args), tuple(kwargs.items()), variables)
    with _explained(roots, namespace, "the call uses"):
        packed = pickling.dumps(call, namespace, known, trim=known is None)
    return Captured(packed, (), _sources(packed), lacking)


@contextmanager
def _explained(roots: Mapping[str, object], namespace: dict[str, Any] | None, user: str) -> Iterator[None]:
    """Turn an error in this block into a `CaptureError`, which names the part of `roots` that causes it."""
    try:
        yield
    except Exception as error:
        from nblaunch.capture.unpicklable import find_culprit

        culprit = find_culprit(roots, lambda part: _refusal(part, namespace))
        raise _capture_error(culprit, error, user) from error


def _refusal(value: object, namespace: dict[str, Any] | None) -> Exception | None:
    try:
        pickling.dumps(value, namespace)
    except Exception as error:  # noqa: BLE001 - whatever the objects raise
        return error
    return None


def _capture_error(culprit: Culprit | None, error: Exception, user: str) -> CaptureError:
    if culprit is None:
        return CaptureError(
            f"What {user} cannot be sent to the ranks all together: {type(error).__name__}: {error}."
        )
    msg = (
        f"{culprit.path}: {culprit.reason} ({culprit.type_name}, {culprit.size} bytes). "
        f"{user.capitalize()} {culprit.name}, and what it holds is sent to every rank. Make "
        f"{culprit.path} on the ranks instead, or leave it out of {culprit.name}'s state (__getstate__)."
    )
    return CaptureError(msg, name=culprit.name, path=culprit.path, size=culprit.size)


def _submodules_in(dotted: frozenset[str], namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return modules that attribute chains reach: `import xml` on a rank does not load `xml.etree`."""
    found = set()
    for chain in dotted:
        root, *attributes = chain.split(".")
        name = getattr(namespace.get(root), "__name__", None)
        if not isinstance(name, str) or sys.modules.get(name) is not namespace.get(root):
            continue
        for attribute in attributes:
            name = f"{name}.{attribute}"
            if name not in sys.modules:
                break
            found.add(name)
    return tuple(sorted(found))


def _sources(packed: Packed) -> dict[str, str]:
    """Return the source of every notebook cell that the pickle holds code of."""
    found = {}
    for filename in packed.filenames:
        entry = linecache.cache.get(filename)
        # Entries without a modification time are not files but IPython's cells.
        if entry is not None and len(entry) == 4 and entry[1] is None:  # noqa: PLR2004
            found[filename] = "".join(entry[2])
    return found
