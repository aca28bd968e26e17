"""The part of a notebook value that cannot be sent, and the way to it: `model.trainer._lock`."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nblaunch.job._parts import is_a, is_atom, parts_of, static_attribute, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DEPTH_LIMIT = 50
_REASON_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Culprit:
    """What cannot be sent: `path` leads to it from the notebook variable `name`.

    `type_name` is qualified (`_thread.lock`), bare for builtins. `size` is in bytes: the data of an
    array or tensor, else what the object itself takes. `reason` is one line of the exception's text.
    """

    name: str
    path: str
    type_name: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Failed:
    """A part that cannot be sent, and where it was found."""

    name: str
    path: str
    value: object
    error: Exception
    depth: int = 0


def find_culprit(
    roots: Mapping[str, object],
    can_send: Callable[[object], Exception | None],
    *,
    seconds: float = 5.0,
) -> Culprit | None:
    """Return the deepest part of `roots` that makes them fail `can_send`, or None where all pass.

    `can_send` returns the exception that pickling its argument raises, or None. The first root that
    fails is followed, depth first, into the first part of it that fails as well, until a part fails
    of which no part does. After `seconds` the deepest part found by then is returned. Nothing is
    raised whatever the objects do, none of them is changed and no property of theirs is called.
    """
    search = _Search(can_send, time.monotonic() + seconds)
    for name, value in roots.items():
        failed = search.try_part(_Failed(name, name, value, TypeError()))
        if failed is not None:
            return _culprit(search.follow(failed) or search.deepest or failed)
    return None


class _Search:
    """One search for the part to blame; remembers each object that it has tried."""

    def __init__(self, can_send: Callable[[object], Exception | None], deadline: float) -> None:
        self.deepest: _Failed | None = None
        self._can_send = can_send
        self._deadline = deadline
        # The objects themselves too: the id of one that is gone may be given to another.
        self._errors: dict[int, tuple[object, Exception | None]] = {}
        self._followed: set[int] = set()

    def follow(self, failed: _Failed) -> _Failed | None:
        """Return the deepest part to blame inside `failed`, or None in a circle that leads nowhere."""
        if self.deepest is None or failed.depth > self.deepest.depth:
            self.deepest = failed
        self._followed.add(id(failed.value))
        is_innermost = True
        for part in self._failed_parts(failed):
            is_innermost = False
            if id(part.value) not in self._followed and (found := self.follow(part)):
                return found
        return failed if is_innermost else None

    def try_part(self, part: _Failed) -> _Failed | None:
        """Return `part` with its error, or None if it can be sent."""
        value = part.value
        if id(value) not in self._errors:
            try:
                error = self._can_send(value)
            except Exception as unexpected:  # noqa: BLE001  # user code, which may raise anything
                error = unexpected
            self._errors[id(value)] = (value, error)
        _, error = self._errors[id(value)]
        return None if error is None else _Failed(part.name, part.path, value, error, part.depth)

    def _failed_parts(self, whole: _Failed) -> Iterator[_Failed]:
        if whole.depth >= _DEPTH_LIMIT:
            return
        # Whatever an odd object raises while it is taken apart ends the list of its parts, no more.
        with suppress(Exception):
            for step, value in parts_of(whole.value):
                if time.monotonic() > self._deadline:
                    return
                part = _Failed(whole.name, whole.path + step, value, whole.error, whole.depth + 1)
                if not is_atom(value) and (failed := self.try_part(part)):
                    yield failed


def _culprit(failed: _Failed) -> Culprit:
    return Culprit(
        name=failed.name,
        path=failed.path,
        type_name=type_name(failed.value),
        size=_size(failed.value),
        reason=_reason(failed.error),
    )


def _reason(error: Exception) -> str:
    text = ""
    with suppress(Exception):
        text = " ".join(str(error).split())
    text = text or type_name(error)
    return text if len(text) <= _REASON_LIMIT else text[: _REASON_LIMIT - 1] + "…"


def _size(value: object) -> int:
    """Return the size of `value` in bytes, 0 where it does not tell."""
    with suppress(Exception):
        for text_type in (str, bytes, bytearray):
            if is_a(value, text_type):
                return text_type.__len__(value)  # type: ignore[arg-type]  # is_a has looked
        if isinstance(nbytes := static_attribute(value, "nbytes"), int):
            return nbytes
        return sys.getsizeof(value)
    return 0
