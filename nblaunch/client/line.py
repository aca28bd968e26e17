"""A line: one connection of this process to a runtime. It has no thread: the one that uses it waits."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import functools
import itertools
import math
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic

from nblaunch._errors import LaunchError
from nblaunch._peer import peer_of
from nblaunch.protocol import client as wire
from nblaunch.protocol.framing import LIMIT, Frame, FrameKind, Frames, header
from nblaunch.protocol.messages import encode

_SIGINT = int(signal.SIGINT)
_CHUNK = 1 << 18
_WRITE_SECONDS = 10.0
_DAY = 86400.0
_RUNTIME = "the runtime"
# A script may have SIGPIPE end it, as other programs do; macOS has no such flag.
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)


def connect(path: Path) -> socket.socket:
    """Connect to the runtime that listens at `path`.

    Raises `LaunchError` unless it is this user's: nothing is sent to another's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
        peer = peer_of(connection)
    except OSError as error:
        connection.close()
        msg = f"The runtime at {path} could not be reached: {error.strerror or error}."
        raise LaunchError(msg, phase="runtime") from error
    if not peer.is_ours:
        connection.close()
        msg = f"The runtime at {path} belongs to another user (uid {peer.uid}), and was sent nothing."
        raise LaunchError(msg, phase="runtime")
    return connection


def _handler() -> Callable[..., object] | None:
    """Return SIGINT's handler, if it is a Python function; None on other threads than the main one."""
    # `signal`'s own functions look for an enum member first, which takes ten times as long.
    handler = _signal.getsignal(_SIGINT)
    here = threading.current_thread() is threading.main_thread()
    return handler if callable(handler) and here else None


@contextlib.contextmanager
def deferring_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, where its handler is called: KeyboardInterrupt, mostly.

    Of several, one is kept. For blocks that do not wait. Where the handler is not a Python function, and on
    other threads than the main one, which no handler interrupts, it does nothing.
    """
    handler = _handler()
    if handler is None:
        yield
        return
    noted: list[FrameType | None] = []

    def note(_number: int, frame: FrameType | None) -> None:
        noted[:] = [frame]

    try:
        _signal.signal(_SIGINT, note)
        yield
    finally:
        try:  # not a function's: a signal may be handled as one is entered
            _signal.signal(_SIGINT, handler)
        except BaseException:  # `signal` first runs handlers that are due: that of another signal has raised
            _signal.signal(_SIGINT, handler)
            raise
        if noted:
            handler(signal.SIGINT, noted[0])


@contextlib.contextmanager
def noting_interrupts(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` whenever the handler of SIGINT raises KeyboardInterrupt, also where nobody sees that.

    Python drops what is raised within `__del__`, and within callbacks of gc and of weak references. On other
    threads than the main one, which no handler interrupts, this does nothing.
    """
    handler = _handler()
    if handler is None:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            note()
            raise

    try:
        _signal.signal(_SIGINT, handle)
        yield
    finally:
        try:  # not a function's: a signal may be handled as one is entered
            _signal.signal(_SIGINT, handler)
        except BaseException:  # `signal` first runs handlers that are due: that of another signal has raised
            _signal.signal(_SIGINT, handler)
            raise


@dataclass(frozen=True)
class SentRequest(Generic[wire.AnswerT]):
    """A request that was sent, by its number on its line."""

    number: int
    request: type[wire.Request[wire.AnswerT]]


class ClientLine:
    """One connection to a runtime, for one thread at a time.

    An interrupt leaves it whole: bytes are read and kept, or written and forgotten, or neither. What an
    interrupt has left of a request goes out at the next use.
    """

    def __init__(
        self, connection: socket.socket, introduce: wire.Introduce, gone: Callable[[], Exception]
    ) -> None:
        """Send `introduce`, without waiting for the answer; `gone` makes the error for its end."""
        self.broken = False
        """Whether an error came in the middle of a read or a write: then the line is closed."""
        self._gone = gone
        self._socket = connection
        self._socket.settimeout(0)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._frames = Frames(LIMIT)
        self._unsent = bytearray()
        self._kept: deque[Frame] = deque()
        self._numbers = itertools.count()
        self._introduction = SentRequest(next(self._numbers), wire.Introduce)
        self._awaited = {self._introduction.number}
        self._answers: dict[int, bytes] = {}
        self._ended = False
        self._send(self._introduction.number, introduce)

    def fileno(self) -> int:
        """Return the descriptor; before waiting for it elsewhere, call `next(0)` until it returns None."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()

    @functools.cached_property
    def welcome(self) -> wire.RuntimeWelcome:
        """The runtime's answer to the introduction, for which this waits; raises its error if it refuses."""
        return self.answer_to(self._introduction)

    def is_welcome(self, seconds: float) -> bool:
        """Wait until the introduction is answered; return False if it is not within `seconds`."""
        return self._wait(lambda: self._introduction.number in self._answers, _deadline(seconds))

    def ask(self, request: wire.Request[wire.AnswerT], seconds: float | None = None) -> wire.AnswerT:
        """Send `request` and return its answer; raise the error that the runtime answers.

        Raises `TimeoutError` after `seconds`. Events and folded messages that come first are kept for `next`.
        """
        sent, until = self.begin(request), _deadline(seconds)
        try:
            return self._answer_to(sent, until)
        except _Late:
            msg = f"The runtime has not answered {type(request).__name__} within {seconds:g} s."
            raise TimeoutError(msg) from None
        finally:
            self._forget(sent.number)

    def _forget(self, number: int) -> None:
        self._awaited.discard(number)
        self._answers.pop(number, None)

    def begin(self, request: wire.Request[wire.AnswerT]) -> SentRequest[wire.AnswerT]:
        """Send `request`; `answer_to` waits for the answer, which is kept."""
        for each in self._answers.keys() - {self._introduction.number}:
            self._forget(each)
        number = next(self._numbers)
        self._awaited.add(number)
        self._send(number, request)
        return SentRequest(number, type(request))

    def answer_to(self, sent: SentRequest[wire.AnswerT]) -> wire.AnswerT:
        """Return the answer to a request that `begin` has sent; raise the error that the runtime answers.

        After an interrupt this can be called again, until something else begins.
        """
        return self._answer_to(sent, math.inf)

    def send(self, request: wire.Request[Any]) -> None:
        """Send `request`; an answer is not kept."""
        self._send(next(self._numbers), request)

    def next(self, seconds: float | None = None) -> tuple[FrameKind, int, wire.RuntimeEvent | bytes] | None:
        """Return the next event or folded message, which is still encoded, and its job; None after `seconds`.

        A caller that must not lose one to an interrupt waits with `poll`, and takes it and uses it within
        `deferring_interrupts`, by `next(0)`.
        """
        if not self._wait(lambda: bool(self._kept), _deadline(seconds)):
            return None
        frame = self._kept[0]
        event = frame.kind is FrameKind.EVENT
        content = wire.decode_event(frame.body, _RUNTIME) if event else frame.body
        self._kept.popleft()
        return frame.kind, frame.number, content

    @property
    def kept(self) -> int:
        """How many events and folded messages `next` returns without reading."""
        return len(self._kept)

    def pending(self) -> bool:
        """Return whether `poll` would find something; from any thread, while another one reads too."""
        if not (self._kept or self._ended):
            try:
                self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
            except OSError:
                pass  # the next read raises it
        return True

    def poll(self, seconds: float | None = None) -> bool:
        """Wait until `next` has something to return, or would raise; return False after `seconds`."""
        return self._wait(lambda: bool(self._kept) or self._ended, _deadline(seconds))

    def _answer_to(self, sent: SentRequest[wire.AnswerT], until: float) -> wire.AnswerT:
        if not self._wait(lambda: sent.number in self._answers, until):
            raise _Late
        answer = wire.decode_answer(self._answers[sent.number], sent.request, _RUNTIME)
        if isinstance(answer, wire.RequestFailed):
            raise answer.error.error()
        return answer

    def _send(self, number: int, request: wire.Request[Any]) -> None:
        body = encode(request)
        frame = header(FrameKind.STRUCT, number, len(body)) + body
        self._raise_if_ended()
        with self._whole():
            self._unsent += frame
            self._write()
        until = time.monotonic() + _WRITE_SECONDS
        while left := len(self._unsent):
            in_time = self._turn(until)
            if len(self._unsent) < left:
                until = time.monotonic() + _WRITE_SECONDS
            elif not in_time:
                self.broken = True
                self.close()
                msg = (
                    "A request was to be sent to the runtime, which has read nothing for "
                    f"{_WRITE_SECONDS:g} s. Stop it, and try again: the next use starts another one."
                )
                raise LaunchError(msg, phase="runtime")

    def _wait(self, done: Callable[[], bool], until: float) -> bool:
        """Read and write until something is done; return False if it is not by `until`."""
        while not done():
            if not self._turn(until):
                return done()
        return True

    def _turn(self, until: float) -> bool:
        """Wait, read what has arrived and write what is left, once; return whether there is time for more."""
        self._raise_if_ended()
        self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        seconds = until - time.monotonic()
        # Outside of `_whole`: here an interrupt raises at once.
        ready = self._poll.poll(None if seconds == math.inf else min(max(seconds, 0.0), _DAY) * 1000)
        for _, events in ready:
            with self._whole():
                if events & select.POLLOUT:
                    self._write()
                if events & ~select.POLLOUT:
                    self._read()
        return time.monotonic() < until

    def _write(self) -> None:
        sent = self._socket.send(self._unsent, _NO_SIGPIPE)
        del self._unsent[:sent]

    def _read(self) -> bool:
        data = self._socket.recv(_CHUNK)
        if not data:
            self._ended = True
        self._frames.feed(data)
        for frame in self._frames:
            if frame.kind is not FrameKind.STRUCT:
                self._kept.append(frame)
            elif frame.number in self._awaited:
                self._answers[frame.number] = frame.body
        return bool(data)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Do one read or write: all of it, with what is kept of it, or nothing."""
        with deferring_interrupts():
            try:
                yield
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                self._ended = True
            except BaseException:
                self.broken = True
                self.close()
                raise

    def _raise_if_ended(self) -> None:
        """Raise the error for a runtime that has closed: what it answered if it has refused this client."""
        if self.closed and not self._ended:
            msg = "The connection to the runtime is closed in this process, and nothing can be sent on it."
            raise LaunchError(msg, phase="runtime")
        if not self._ended:
            return
        with self._whole():
            # A write fails as soon as the other side has closed; its last words may not have been read yet.
            while not self.closed and self._read():
                pass
        self.close()
        if self._introduction.number in self._answers:
            self._answer_to(self._introduction, 0.0)
        raise self._gone()


class _Late(Exception):  # noqa: N818 - it never leaves this module
    """No answer has come in time."""


def _deadline(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds
