"""The part of a value that cannot be sent, and the path to it: `model.trainer._lock`.

Where pickling has failed, it is done once more by Python's own pickler, which keeps the stack of the objects
that it is in. The innermost one is to blame. The path to it is written with the parts of each object in the
stack; what only pickling makes (the arguments of `__reduce__`, a state) is named as such.
"""

from __future__ import annotations

import io
import pickle
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from nblaunch.capture import tensors
from nblaunch.capture.parts import LEAVES, Part, is_leaf, named_parts, parts_of, size_of, states_of, type_name

_DEPTH_LIMIT = 50
_REASON_LIMIT = 500
_PASSED_OVER = LEAVES | {bytearray, pickle.PickleBuffer}
_CONTAINERS = frozenset({list, tuple, set, frozenset, dict})


@dataclass(frozen=True, slots=True)
class Culprit:
    """The part that cannot be sent: `path` leads to it from the notebook variable `name`.

    `type_name` is qualified (`_thread.lock`), bare for builtins. `size` is in bytes: the data of an
    array or tensor, otherwise the object itself. `reason` is one line of the exception's text.
    """

    name: str
    path: str
    type_name: str
    size: int
    reason: str


def find_culprit(
    roots: Mapping[str, object],
    error: BaseException,
    pickler: type[Any],
    *,
    seconds: float = 5.0,
    **keywords: Any,
) -> Culprit | None:
    """Return the part of `roots` where a `pickler` raises, or None if it takes all of them.

    It has raised `error` for all of them together; `keywords` are its own. After `seconds` the root is named
    that the search has come to. Raises nothing whatever the objects do.
    """
    # The first class is Python's pickler, whose methods call each other; the second knows how to reduce, and
    # what goes by key. In some versions the C pickler has a descriptor in place of that method.
    known = pickler.persistent_id
    methods = {"persistent_id": known} if isinstance(known, types.FunctionType) else {}
    tracing = type("Tracing", (_Tracing, pickler), methods)(pickler, time.monotonic() + seconds, keywords)
    for name, value in roots.items():
        try:
            tracing.save(value)
        except (Exception, SystemExit) as found:  # noqa: BLE001 - whatever the objects raise
            stack = tracing.stack[:1] if isinstance(found, _LateError) else tracing.stack
            told = error if isinstance(found, _LateError | RecursionError) else found
            step, part = _way(stack)
            size = 0
            with suppress(Exception):
                size = size_of(part)
            return Culprit(name, name + step, type_name(part), size, reason_of(told))
    return None


class _LateError(Exception):
    """The time is up."""


@dataclass(slots=True)
class _StackEntry:
    """An object that the pickler is in, and what pickling has made of it."""

    value: object
    arguments: tuple[Any, ...] = ()
    state: Any = None


class _Tracing(pickle._Pickler):  # noqa: SLF001 - the C pickler does not tell what it is in
    """Keeps the stack of what it is in; the bytes of arrays, tensors and texts are passed over."""

    # These hide the descriptors of the C pickler, from which the other base is derived.
    memo: Any = None
    bin: Any = None
    fast: Any = None

    def __init__(self, pickler: type[Any], deadline: float, keywords: Mapping[str, Any]) -> None:
        self.stack: list[_StackEntry] = []
        self._deadline = deadline
        given: dict[str, Any] = {"protocol": 5, "buffer_callback": lambda _: False}
        pickler.__init__(self, io.BytesIO(), **given, **keywords)
        pickle._Pickler.__init__(self, io.BytesIO(), **given)  # noqa: SLF001 - see above

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:  # noqa: FBT001, FBT002 - pickle's
        if type(obj) in _PASSED_OVER or (type(obj) in _CONTAINERS and is_leaf(obj)):
            return
        self.stack.append(_StackEntry(obj))
        if time.monotonic() > self._deadline:
            raise _LateError
        if not tensors.is_readable_storage(obj):
            super().save(obj, save_persistent_id)  # type: ignore[misc] # not in the stubs
        self.stack.pop()

    def save_reduce(
        self, func: Any, args: Any, state: Any = None, *others: Any, obj: Any = None, **keywords: Any
    ) -> None:
        if obj is not None:
            self.stack[-1].arguments, self.stack[-1].state = args, state
        super().save_reduce(func, args, state, *others, obj=obj, **keywords)  # type: ignore[misc] # see above


def _way(stack: Sequence[_StackEntry]) -> tuple[str, object]:
    """Return how the way to the innermost object of a stack is written, and the object where it ends."""
    whole, made, depth = ("", stack[0]), ("", stack[0]), 0
    for entry in stack[1:]:
        if depth == _DEPTH_LIMIT:
            break
        if (step := _step(parts_of(whole[1].value), entry.value)) is not None:
            whole = made = whole[0] + step, entry
            depth += 1
            continue
        # Something that only pickling makes, or a part of that.
        for path, owner in (made, whole):
            step = _step(chain(parts_of(owner.value), _made_parts(owner)), entry.value)
            if step is not None:
                made = path + step, entry
                depth += 1
                break
    return made[0], made[1].value


def _step(parts: Iterable[Part], wanted: object) -> str | None:
    # An exception of an odd object that is taken apart ends the list of its parts, and nothing else.
    with suppress(Exception):
        return next((step for step, part in parts if part is wanted), None)
    return None


def _made_parts(entry: _StackEntry) -> Iterator[Part]:
    """Yield what pickling makes of an object: the arguments of what rebuilds it, and its state."""
    for index, argument in enumerate(entry.arguments):
        if argument is not type(entry.value):
            yield f" (argument {index} of its __reduce__)", argument
    for state in states_of(entry.state):
        if type(state) is dict:
            yield from named_parts(entry.value, list(state.items()))
        else:
            yield " (its state)", state


def reason_of(error: BaseException) -> str:
    """Return an exception's text in one line, or its type if it has none."""
    text = ""
    with suppress(Exception):
        text = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        text = f"SystemExit({text})"
    text = text or type_name(error)
    return text if len(text) <= _REASON_LIMIT else text[: _REASON_LIMIT - 1] + "…"
