"""Numbers that this rank logs, step by step: `nblaunch.log`, and what the logs of other libraries call.

`log` notes a number and returns. The control thread sends what has been noted about four times a second, and
the main thread sends the rest before it reports the job's outcome. What a rank has logged within the last
quarter of a second is lost when it is killed.

A tensor on a GPU is not waited for: its number is copied to pinned memory behind the work that computes it,
on the present stream, and read once the copy is done. A tensor on another kind of device is read at once.
"""

from __future__ import annotations

import math
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import torch

from nblaunch._errors import NblaunchError
from nblaunch._help import FailureKind
from nblaunch.probes import steps
from nblaunch.protocol.metrics import MOST_NAMES, NAME_CHARACTERS, packed

_BATCH_SECONDS = 0.25
_POLL_SECONDS = 0.02
_BATCH_POINTS = 10_000
_LAST_STEP = 2**63 - 1


class NotLoggedError(NblaunchError, TypeError):
    """The value is not a number, or the step is not a whole number; nothing of the call was logged."""


class SendPoints(Protocol):
    """Sends points, in columns: `which` are indexes into `names`."""

    def __call__(
        self, *, names: tuple[str, ...], which: bytes, steps: bytes, times: bytes, values: bytes
    ) -> None:
        """Send them, in order."""


class _OnDevice:
    """A number that a GPU may still be computing."""

    __slots__ = ("_copy", "_done")

    def __init__(self, value: torch.Tensor) -> None:
        with torch.cuda.device(value.device):
            if torch.cuda.is_current_stream_capturing():
                msg = (
                    "nblaunch.log got a tensor while a CUDA graph is captured: there is no number yet. Log "
                    "it after the graph has been replayed."
                )
                raise NotLoggedError(msg)
            # Converted there: a copy that also converts goes through memory that is not pinned, and waits.
            number = value.detach().reshape(()).to(torch.float64)
            self._copy = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def number(self) -> float | None:
        """Return the number, None if it is not there yet."""
        return float(self._copy) if self._done.query() else None


@dataclass(slots=True)
class _Point:
    name: str
    step: int
    time: float
    value: float | _OnDevice


class Recorder:
    """The points of a rank that have not been sent; any thread may log."""

    def __init__(self, send: SendPoints, wake: Callable[[], None]) -> None:
        """`wake` has another thread ask for `patience` again."""
        self._send, self._wake = send, wake
        # Reentrant: a signal handler may log while the main thread does.
        self._lock = threading.RLock()
        self._points: deque[_Point] = deque()
        self._names: set[str] = set()
        self._calls = 0
        self._due: float | None = None
        self._in_job = False
        self._pid = os.getpid()

    def begin_job(self) -> None:
        """Send what is logged from now on as this job's; names and calls are counted anew."""
        with self._lock:
            self._names, self._calls, self._in_job = set(), 0, True
            if self._points:
                self._due = time.monotonic()

    def end_job(self) -> None:
        """Send nothing more; what threads still log is the next job's."""
        with self._lock:
            self._in_job, self._due = False, None

    @property
    def names(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._names)

    def log(self, step: SupportsIndex | None, values: Mapping[str, object]) -> None:
        """Note these numbers; see `log` of this module."""
        if os.getpid() != self._pid:
            msg = (
                "nblaunch.log was called in a child process of a rank, which cannot send it. Log it in the "
                "rank itself."
            )
            raise NblaunchError(msg)
        now = time.time()
        read = {_checked(name): _number(name, value) for name, value in values.items()}
        number = _whole(step)
        with self._lock:
            self._count_names(read)
            if number is None:
                current = steps.current()
                number = self._calls if current is None else current
            self._calls += 1
            self._points.extend(_Point(name, number, now, value) for name, value in read.items())
            first = self._due is None and self._in_job and bool(self._points)
            if first:
                self._due = time.monotonic() + _BATCH_SECONDS
        if first:
            self._wake()

    def _count_names(self, read: Mapping[str, object]) -> None:
        new = read.keys() - self._names
        if len(self._names) + len(new) > MOST_NAMES:
            msg = (
                f"nblaunch.log got {min(new)!r}, but this rank has logged {len(self._names)} other names in "
                f"this run, and {MOST_NAMES} is the most. Put what changes into the step, not into the name."
            )
            raise NotLoggedError(msg)
        self._names |= new

    def patience(self) -> int | None:
        """Return in how many milliseconds there is something to send, None if there is nothing."""
        due = self._due
        return None if due is None else max(math.ceil((due - time.monotonic()) * 1000), 0)

    def send_due(self) -> None:
        """Send what has been logged, if it is time; called by the control thread."""
        due = self._due
        if due is not None and time.monotonic() >= due:
            with self._lock:
                if self._in_job:
                    self._send_ready()
                    self._due = time.monotonic() + _POLL_SECONDS if self._points else None

    def settle(self, seconds: float | None = None) -> None:
        """Wait for the numbers that GPUs still compute, so long at most, and send all that there are.

        Numbers that do not come are dropped: their stream may be stuck.
        """
        if not self._in_job:
            return
        until = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            with self._lock:
                self._send_ready()
                if not self._points:
                    return
            if time.monotonic() >= until:
                break
            time.sleep(0.001)
        with self._lock:
            self._points = deque(each for each in self._points if isinstance(each.value, float))
            self._send_ready()

    def _send_ready(self) -> None:
        """Send the points up to the first one whose number is not there; under the lock."""
        while self._points:
            names: dict[str, int] = {}
            rows: list[tuple[int, int, float, float]] = []
            while self._points and len(rows) < _BATCH_POINTS:
                point = self._points[0]
                try:
                    value = point.value if isinstance(point.value, float) else point.value.number()
                except RuntimeError:
                    # CUDA has failed, and the job will say so: there is no number.
                    self._points.popleft()
                    continue
                if value is None:
                    break
                self._points.popleft()
                index = names.setdefault(point.name, len(names))
                rows.append((index, point.step, point.time, value))
            if not rows:
                return
            which, numbers, times, values = zip(*rows, strict=True)
            self._send(
                names=tuple(names),
                which=packed("H", which),
                steps=packed("q", numbers),
                times=packed("d", times),
                values=packed("d", values),
            )


_recorder: Recorder | None = None


def start(recorder: Recorder) -> None:
    global _recorder
    _recorder = recorder


def log(step: SupportsIndex | None, values: Mapping[str, object]) -> None:
    """Note the numbers of a step, by name.

    `step` None stands for the step that `nblaunch.step()` has begun, or, where it is not used, for the number
    of calls before this one in the job. Numbers are ints, floats, bools, numpy scalars, and tensors and
    arrays with one element; NaN and infinities are kept. Raises `NotLoggedError`, a `TypeError`, for anything
    else, and for more than 500 names or a name of more than 200 characters; then nothing of the call is
    logged. Raises `NblaunchError` outside of a rank.
    """
    if _recorder is None:
        msg = "nblaunch.log was called in a process that is not a rank. Call it on the ranks."
        raise NblaunchError(msg, kind=FailureKind.NOT_ON_A_RANK)
    _recorder.log(step, values)


def _checked(name: object) -> str:
    if not isinstance(name, str) or not name or len(name) > NAME_CHARACTERS:
        msg = (
            f"nblaunch.log got the name {name!r:.100}. A name is a text of 1 to {NAME_CHARACTERS} characters."
        )
        raise NotLoggedError(msg)
    return name


def _whole(step: object) -> int | None:
    if step is None:
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # that is what is asked
    except (TypeError, RuntimeError):
        number = None
    if number is None or abs(number) > _LAST_STEP:
        msg = f"nblaunch.log got step={step!r:.100}. A step is a whole number of 64 bits, or None."
        raise NotLoggedError(msg)
    return number


def _number(name: str, value: Any) -> float | _OnDevice:
    """Return a number, or what will be one."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        return _of_tensor(name, value)
    if isinstance(value, str | bytes | bytearray | complex):
        raise _no_number(name, value)
    try:
        if hasattr(value, "item") and getattr(value, "size", None) == 1:
            value = value.item()  # of numpy: an array may have one element and a shape
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _no_number(name, value) from None


def _of_tensor(name: str, value: torch.Tensor) -> float | _OnDevice:
    local = getattr(value, "to_local", None)
    if local is not None:
        # A DTensor: its own number is known without the other ranks only where each of them has all of it.
        if not all(each.is_replicate() for each in value.placements):  # type: ignore[attr-defined]
            msg = (
                f"nblaunch.log got {name}= a DTensor of which this rank has a part. Log "
                f"{name}.full_tensor(), which all ranks call."
            )
            raise NotLoggedError(msg)
        value = local()
    if value.numel() != 1 or value.is_complex() or value.is_meta:
        raise _no_number(name, value)
    return _OnDevice(value) if value.is_cuda else float(value.detach().item())


def _no_number(name: str, value: object) -> NotLoggedError:
    if isinstance(value, torch.Tensor):
        got = f"a {'meta ' * value.is_meta}tensor of shape {tuple(value.shape)} and {value.dtype}"
    else:
        got = f"{value!r:.100} ({type(value).__name__})"
    msg = (
        f"nblaunch.log got {name}={got}, which is no number. It takes ints, floats, bools, numpy scalars, "
        "and tensors and arrays with one element: log its mean, or leave it out."
    )
    return NotLoggedError(msg)
