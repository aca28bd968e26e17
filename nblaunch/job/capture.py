"""What a cell or a call takes along: values in one pickle, submodules by name, the source of functions."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nblaunch._errors import CaptureError
from nblaunch.job import payload
from nblaunch.job.names import cell_names
from nblaunch.job.payload import Packed

if TYPE_CHECKING:
    from nblaunch.job.culprit import Culprit

# These are the rank's own; `open`, `exit` and `quit` are put into the namespace by IPython.
RANK_NAMES = frozenset({"rank", "local_rank", "world_size", "device"})
SHELL_NAMES = frozenset({"get_ipython", "exit", "quit", "open", "__name__", "__builtins__", "__builtin__"})


@dataclass(frozen=True, slots=True)
class Captured:
    """A job's payload, ready to be sent."""

    packed: Packed
    imports: tuple[str, ...]
    sources: Mapping[str, str]
    """File name -> source of the notebook cells that captured functions were defined in."""
    names: frozenset[str] = frozenset()
    """The variables that go along."""


def capture_cell(  # noqa: PLR0913 - what the ranks have, and what they lack
    source: str,
    namespace: dict[str, Any],
    transform: Callable[[str], str] = str,
    *,
    without: frozenset[str] = frozenset(),
    outdated: Callable[[frozenset[str]], frozenset[str]] = lambda _: frozenset(),
    trim: bool = False,
) -> Captured:
    """Capture what a cell needs of `namespace`; `source` is plain Python, magics transformed.

    `transform` does that for cells within the cell (below a `%%time` of its own). `without` are names that
    the ranks have already, `outdated(names)` says what functions among these use that has changed since.
    With `trim` a view of a tensor takes along no more of its storage than what it shows.

    Raises `CaptureError` for the first value that cannot be sent, `SyntaxError` for a broken cell.
    """
    names = cell_names(source, transform=transform)
    available = namespace.keys() - RANK_NAMES - SHELL_NAMES - without
    needed = {name: namespace[name] for name in sorted(names.needed & available)}
    wanted = names.maybe | outdated(names.needed | names.maybe)
    maybe = {name: namespace[name] for name in sorted((wanted & available) - names.needed)}
    try:
        packed = payload.dumps({**needed, **maybe}, namespace, trim=trim)
    except Exception:  # noqa: BLE001 - whatever the objects raise
        # A name that the cell may never load must not fail the run.
        sendable = {name: value for name, value in maybe.items() if _refusal(value, namespace) is None}
        packed = _pack({**needed, **sendable}, needed, namespace, "the cell uses", trim=trim)
        maybe = sendable
    sent = frozenset(needed) | frozenset(maybe)
    return Captured(packed, _submodules(names.dotted, namespace), _sources(packed), sent)


def capture_values(values: dict[str, Any], namespace: dict[str, Any] | None = None) -> Captured:
    """Capture variables that are to be pushed. Raises `CaptureError` for one that cannot be sent."""
    packed = _pack(dict(values), values, namespace, "the push holds")
    return Captured(packed, (), _sources(packed), frozenset(values))


def capture_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    namespace: dict[str, Any] | None = None,
    *,
    trim: bool = False,
) -> Captured:
    """Capture a call with all it refers to; for `trim` see `capture_cell`.

    Raises `CaptureError` naming the part that cannot be sent.
    """
    name = getattr(function, "__name__", type(function).__name__)
    roots = {name: function}
    roots.update({f"args[{position}]": value for position, value in enumerate(args)})
    roots.update({f"kwargs[{key!r}]": value for key, value in kwargs.items()})
    packed = _pack((function, tuple(args), dict(kwargs)), roots, namespace, "the call uses", trim=trim)
    return Captured(packed, (), _sources(packed))


def _pack(
    value: object,
    roots: Mapping[str, object],
    namespace: dict[str, Any] | None,
    user: str,
    *,
    trim: bool = False,
) -> Packed:
    try:
        return payload.dumps(value, namespace, trim=trim)
    except Exception as error:
        from nblaunch.job.culprit import find_culprit

        culprit = find_culprit(roots, lambda part: _refusal(part, namespace))
        raise _capture_error(culprit, error, user) from error


def _refusal(value: object, namespace: dict[str, Any] | None) -> Exception | None:
    try:
        payload.dumps(value, namespace)
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


def _submodules(dotted: frozenset[str], namespace: Mapping[str, Any]) -> tuple[str, ...]:
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
        # Entries without a modification time are no files: IPython puts cells there.
        if entry is not None and len(entry) == 4 and entry[1] is None:  # noqa: PLR2004
            found[filename] = "".join(entry[2])
    return found
