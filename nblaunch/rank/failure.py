"""A rank's exception as a record: the user's own frames, with source. Recording never fails.

An exception's own code may raise anything, also `KeyboardInterrupt`. No interrupt reaches the main thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import reprlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nblaunch._errors import shorten
from nblaunch.capture import pickling, tensors
from nblaunch.protocol.messages import FailureRecord, FrameRecord, Phase
from nblaunch.protocol.reports import is_ours
from nblaunch.rank import memory, shell

_EXCEPTION_LIMIT = 4 * 1024 * 1024
_VARIABLES = 40
_FRAMES = 100
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_PROBES = f"{_OURS}probes{os.sep}"


class _ShortRepr(reprlib.Repr):
    def repr_Tensor(self, value: Any, level: int) -> str:  # noqa: N802 - reprlib looks for the type's name
        if value.device.type == "cpu":
            return self.repr_instance(value, level)
        return by_shape(value)

    repr_Parameter = repr_Tensor  # noqa: N815 - see above


_short_repr = _ShortRepr()
_short_repr.maxother = _short_repr.maxstring = 200


def record(
    error: BaseException, titles: Mapping[str, str], *, phase: Phase = Phase.JOB, exitcode: int = 1
) -> FailureRecord:
    """Return the record of `error`; `titles` has the names of cells' files for the reader: `Cell In[3]`."""
    # First of all: the clock decides who failed first, and a large exception takes time to pickle and print.
    now = time.time()
    _end_in_users_code(error)
    with unwaited():
        return FailureRecord(
            type=_qualified_name(type(error)),
            message=encodable(shorten(_text(error))),
            traceback=encodable(shorten(_format(error, titles))),
            frames=tuple(_frames(error, titles)),
            exception=_pickled(error),
            exitcode=exitcode,
            time=now,
            phase=phase,
            memory=memory.shortage(error),
            held=memory.held(error, titles),
        )


def clear_own_frames(error: BaseException) -> None:
    """Clear the variables of the frames between the process and the user's code.

    They hold all that the job brought, also what the job itself has dropped.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not is_ours(frame.f_code.co_filename):
            return
        memory.clear(frame)


def _end_in_users_code(error: BaseException) -> None:
    """Have the traceback of what a probe has raised end where the user's code called torch."""
    steps: list[TracebackType] = []
    while (step := steps[-1].tb_next if steps else error.__traceback__) is not None:
        steps.append(step)
    if not steps or not steps[-1].tb_frame.f_code.co_filename.startswith(_PROBES):
        return
    while steps and steps[-1].tb_frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        steps.pop()
    if steps:
        below = None
        for step in reversed(steps):
            below = TracebackType(below, step.tb_frame, step.tb_lasti, step.tb_lineno)
        error.__traceback__ = below


def _text(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return traceback.format_exception_only(error)[-1].strip().partition(": ")[2]
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - an exception's __str__ may do anything
        return f"<its text raised {type(broken).__name__}>"


def encodable(text: str) -> str:
    """Return `text` without lone surrogates, which no message can carry."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickling.dumps_plain(error)
        # Some exceptions pickle and do not unpickle (required arguments): find out here, not in the kernel.
        pickling.loads(data)
    except BaseException:  # noqa: BLE001 - then the record has its text only
        return None
    return data if len(data) <= _EXCEPTION_LIMIT else None


def _format(error: BaseException, titles: Mapping[str, str]) -> str:
    try:
        report = traceback.TracebackException.from_exception(error)
        for part in memory.chain(report):
            _trim(part, titles)
        text = "".join(report.format())
    except BaseException as broken:  # noqa: BLE001 - a broken exception must still be reported
        return (
            f"{_qualified_name(type(error))}: {_text(error)} (its traceback raised {type(broken).__name__})\n"
        )
    return re.sub(r'File "(Cell In\[[^"]*)", line', r"\1, line", text)


def shown(error: BaseException) -> str:
    """Return the traceback as IPython shows it: colours, and the lines around."""
    try:
        first = error.__traceback__
        while first is not None and is_ours(first.tb_frame.f_code.co_filename):
            first = first.tb_next
        with unwaited():
            return encodable(shorten(shell.prepare().colored_traceback(error, first)))
    except BaseException:  # noqa: BLE001 - the plain text is there
        return ""


def _trim(report: traceback.TracebackException, titles: Mapping[str, str]) -> None:
    kept = [frame for frame in report.stack if not is_ours(frame.filename)]
    for frame in kept:
        frame.filename = titles.get(frame.filename, frame.filename)
        frame.name = re.sub(r"^<(cell line: \d+|module)>.*", "<module>", frame.name)
    report.stack = traceback.StackSummary.from_list(kept)
    if isinstance(getattr(report, "filename", None), str):
        report.filename = titles.get(str(report.filename), str(report.filename))


def _frames(error: BaseException, titles: Mapping[str, str]) -> Iterator[FrameRecord]:
    title = titles.get(error.filename or "") if isinstance(error, SyntaxError) else None
    if isinstance(error, SyntaxError) and title is not None:
        yield FrameRecord(
            filename=title,
            line=error.lineno or 1,
            function="<module>",
            source=encodable((error.text or "").strip()),
        )
        return
    stack = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not is_ours(frame.f_code.co_filename)
    ]
    if len(stack) > _FRAMES:
        # An endless recursion: its beginning, and its end.
        stack = [*stack[: _FRAMES // 5], *stack[-(_FRAMES - _FRAMES // 5) :]]
    for frame, line in stack:
        filename = frame.f_code.co_filename
        summary = traceback.FrameSummary(filename, line, frame.f_code.co_name)
        yield FrameRecord(
            filename=titles.get(filename, filename),
            line=line,
            function=frame.f_code.co_name,
            source=encodable(summary.line or ""),
            variables=_variables(dict(frame.f_locals)) if frame.f_code.co_name != "<module>" else {},
        )


def _variables(values: Mapping[str, object]) -> dict[str, str]:
    shown = {}
    for name, value in list(values.items())[:_VARIABLES]:
        with contextlib.suppress(BaseException):  # a repr that raises costs that variable, not the failure
            shown[name] = encodable(_short_repr.repr(value))
    return shown


def write_error_file(error: BaseException) -> None:
    handlers = sys.modules.get("torch.distributed.elastic.multiprocessing.errors")
    if handlers is not None and isinstance(error, Exception):
        # For torch's own tools; the notebook gets the record.
        with contextlib.suppress(BaseException), unwaited():
            handlers.get_error_handler().record_exception(error)


# Recording a failure without waiting for a device.
#
# Printing or copying a tensor on a GPU waits for all work in its stream. If that is a collective whose peers
# never come, it waits without a bound, and the failure is never reported. So while a failure is recorded, the
# repr of a tensor whose device is busy is its shape, and reading it in another way raises.
#
# A name of torch's that is not public (`tests/unit/test_torch_names.py`): `_tensor_str._str`, where every
# repr of a tensor ends.


# A healthy GPU finishes its work within a moment after the exception; a stuck one never does.
_SECONDS = 0.5
_POLL_SECONDS = 0.002
_KINDS = ("cuda", "xpu")
_READING = frozenset(
    {
        *("__array__", "__bool__", "__complex__", "__float__", "__format__", "__index__", "__int__"),
        *("allclose", "cpu", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "to"),
        *("tolist", "type", "unique"),
    }
)
"""Functions and methods that wait for the device."""

# By its full name: `torch._tensor_str` is what `Tensor.__repr__` looks the function up in.
_printing: Any = torch._tensor_str  # noqa: SLF001 - see above


class DeviceBusyError(RuntimeError):
    """A tensor cannot be read, because its device has not computed it yet."""


@contextlib.contextmanager
def unwaited() -> Iterator[None]:
    if not any(getattr(getattr(torch, kind, None), "is_initialized", bool)() for kind in _KINDS):
        yield
        return
    refusing = _Refusing()
    printed: Callable[..., str] = _printing._str  # noqa: SLF001 - see above

    def _str(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        if refusing.idle(self.device):
            return printed(self, tensor_contents=tensor_contents)
        return by_shape(self)

    _printing._str = _str  # noqa: SLF001 - see above
    try:
        with refusing, tensors.only_from(refusing.idle):
            yield
    finally:
        _printing._str = printed  # noqa: SLF001 - see above


def by_shape(tensor: torch.Tensor) -> str:
    return f"tensor(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r})"


class _Refusing(TorchFunctionMode):
    """Raises if a tensor of a busy device is read: by `.item()` in a user's `__repr__`, for example.

    Not a `TorchDispatchMode`, which would see every operator: the first one under it imports TorchDynamo.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = _SECONDS

    def idle(self, device: torch.device) -> bool:
        """Whether a tensor on `device` can be read at once; all calls together wait for `_SECONDS`."""
        if device.type in ("cpu", "meta"):
            return True
        try:
            stream = torch.get_device_module(device).current_stream(device)
            while not stream.query():
                if self._left <= 0:
                    return False
                time.sleep(_POLL_SECONDS)
                self._left -= _POLL_SECONDS
        except Exception:  # noqa: BLE001 - a device that is unusable, or that cannot be asked
            return False
        return True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _READING:
            for each in args:
                if isinstance(each, torch.Tensor) and not self.idle(each.device):
                    msg = f"{by_shape(each)} cannot be read: its device is busy, or of no use any more"
                    raise DeviceBusyError(msg)
        return func(*args, **(kwargs or {}))
