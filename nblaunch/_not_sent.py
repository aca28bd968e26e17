"""What stands in the notebook for a value that stayed on its rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from nblaunch._errors import NblaunchError


class NotSentError(NblaunchError, TypeError, AttributeError):
    """A value that was not sent is used; the message says why it was not, and how to get it.

    An `AttributeError` too: `hasattr` and variable explorers ask any object for any attribute.
    """


class NotSent:
    """Stands for a value that was shown and not sent.

    Its text is the value's. `reason` says why the value is not here and how to get it; whatever else is
    done with it raises `NotSentError` with that reason. It is equal to itself alone, and can be pickled.
    """

    __slots__ = ("_text", "reason", "type_name")

    _text: str
    reason: str
    type_name: str

    def __init__(self, text: str, type_name: str, reason: str) -> None:
        """Keep the value's repr, its type's name, and why it is not here."""
        for name, given in (("_text", text), ("type_name", type_name), ("reason", reason)):
            object.__setattr__(self, name, given)

    def __repr__(self) -> str:
        """Return the value's own repr."""
        return self._text or f"<{self.type_name}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001 - IPython's protocol
        """Write the value's own repr as it is (an IPython protocol)."""
        for number, line in enumerate(repr(self).split("\n")):
            if number:
                printer.break_()
            printer.text(line)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what is here: the text and the reason."""
        return NotSent, (self._text, self.type_name, self.reason)

    def __getattr__(self, name: str) -> Any:
        """Raise; protocols ask for underscored names, and must only learn that there are none."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotSentError(self.reason)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: NotSent, *_: object, **__: object) -> NoReturn:
        raise NotSentError(self.reason)

    refuse.__name__ = name
    refuse.__qualname__ = f"NotSent.{name}"
    refuse.__doc__ = "Raise `NotSentError`."
    return refuse


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OTHERS = (
    "call getitem setitem delitem iter next len contains reversed bool int float complex index round neg pos "
    "abs invert lt le gt ge enter exit await aiter anext setattr delattr"
)

_WORDS = re.compile(r"\w+")
_sided = (f"{side}{each}" for each in _WORDS.findall(_BINARY) for side in ("", "r", "i"))
for _name in (*_sided, *_WORDS.findall(_OTHERS)):
    setattr(NotSent, f"__{_name}__", _refusing(f"__{_name}__"))
