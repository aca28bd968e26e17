"""The hub: one thread, one ZMQ socket, all ranks of all worker groups of a process.

A group changes on this thread only, by one event after the other: messages of its ranks, reports of its
agent's thread (`call`), and the clock (`tick`). So it needs no locks.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import math
import queue
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import zmq

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch._waker import Waker
from nblaunch.protocol.messages import FromRank, Hello, Phase, ProtocolError, ToRank, decode_from_rank, encode

_log = logging.getLogger("nblaunch")
_TICK_SECONDS = 0.05
_DRAIN_SECONDS = 0.02
_BIND_SECONDS = 5.0
_ALIVE_SECONDS = 1.0
# pyzmq's flags are enums: to combine two takes as long as to send a message.
_READABLE, _WRITABLE, _MORE, _AT_ONCE = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.SNDMORE), int(zmq.NOBLOCK)

T = TypeVar("T")


class Member(Protocol):
    """A host or a worker group; each rank's socket is named after its `group`, the attempt and the rank."""

    group: str
    attempt: int
    token: str

    @property
    def quiet(self) -> bool:
        """Whether nothing is due before the next message or call."""

    def receive(self, message: FromRank, data: bytes) -> None:
        """Take a message from an authenticated rank of the present attempt, and the bytes that hold it."""

    def tick(self, now: float) -> None:
        """Do what is due; `now` is monotonic."""

    def lost(self, error: Exception) -> None:
        """End the group: no message arrives any more."""


class Hub:
    """Routes between ranks and their groups."""

    def __init__(self, directory: RuntimeDirectory) -> None:
        """Bind the socket, in `directory`, and start the thread."""
        self._directory = directory
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A rank whose process is gone must not make a send fail; a full queue must not drop one.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._bind()
        except LaunchError:
            self._context.destroy(linger=0)
            raise
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker = Waker()
        self._members: dict[str, Member] = {}
        self._known: set[bytes] = set()
        self._refused: set[bytes] = set()
        self._watched: dict[zmq.Socket[bytes] | int, Callable[[bool], None]] = {}
        self.after_turn: list[Callable[[], float]] = []
        """Called after each turn of the thread, on it: each returns in how many seconds it is due again."""
        self._poller = zmq.Poller()
        self._closing = False
        self.error: Exception | None = None
        """The error that ended the thread."""
        self.when_broken: Callable[[], None] = lambda: None
        """Called, on the thread, where an error ends it."""
        self._thread = threading.Thread(target=self._serve, name="nblaunch-hub", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where ranks connect: a unix socket in the private runtime directory."""
        return self._address

    @property
    def usable(self) -> bool:
        return self._thread.is_alive() and self.error is None and not self._socket.closed

    def be_reachable(self) -> None:
        """Bind the socket's file again if a cleaner has removed it from the temporary directory.

        Ranks that are connected are not affected. Raises `LaunchError` if it cannot be bound.
        """
        if self._directory.root() != self._file.parent or not self._file.exists():
            self.run(self._bind, _BIND_SECONDS)

    def _bind(self) -> None:
        self._file = self._directory.root() / "hub"
        self._address = f"ipc://{self._file}"
        try:
            self._socket.bind(self._address)
        except zmq.ZMQError as error:
            msg = f"The ranks' socket {self._address} could not be bound: {error}. Set TMPDIR elsewhere."
            raise LaunchError(msg, phase="connect", kind=FailureKind.NOT_WRITABLE) from error

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the hub's thread, after all earlier calls.

        Once the hub is closed, nothing runs it: the process ends, while daemon threads still wait for ranks.
        """
        self._calls.put(action)
        self._waker.wake()

    def run(self, action: Callable[[], None], seconds: float | None = None) -> None:
        """Run `action` on the hub's thread and wait for its end, at most `seconds`; raise what it raises.

        Raises `LaunchError` if the hub ends instead. On the hub's thread it is an ordinary call.
        """
        if threading.current_thread() is self._thread:
            action()
            return
        raised: list[Exception] = []
        done = threading.Event()

        def act() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                raised.append(error)
            finally:
                done.set()

        self.call(act)
        deadline = time.monotonic() + (math.inf if seconds is None else seconds)
        while not done.wait(max(min(_ALIVE_SECONDS, deadline - time.monotonic()), 0.0)):
            if time.monotonic() >= deadline:
                return
            if not self.usable:
                msg = "the hub, which carries the ranks' messages, has ended"
                raise LaunchError(msg, phase=Phase.CONNECT.value, kind=FailureKind.CONNECTION_LOST)
        if raised:
            raise raised.pop()

    def run_aside(self, name: str, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do `work` on a thread of its own, and `then`, with its result, on the hub's thread."""

        def do() -> None:
            found = work()
            self.call(lambda: then(found))

        threading.Thread(target=do, name=name, daemon=True).start()

    def add(self, member: Member) -> None:
        self.call(lambda: self._members.__setitem__(member.group, member))

    def remove(self, member: Member) -> None:
        def forget() -> None:
            self._members.pop(member.group, None)
            prefix = f"{member.group}/".encode()
            self._known = {identity for identity in self._known if not identity.startswith(prefix)}

        self.call(forget)

    def members(self) -> tuple[Member, ...]:
        """Return the groups whose messages are routed; only on the hub's thread."""
        return tuple(self._members.values())

    def send(self, member: Member, rank: int, message: ToRank) -> None:
        """Send to one rank of the group's present attempt; only on the hub's thread."""
        identity = f"{member.group}/{member.attempt}/{rank}".encode()
        with contextlib.suppress(zmq.ZMQError):
            data = encode(message)
            self._socket.send(identity, _MORE)
            self._socket.send(data)

    def watch(self, socket: zmq.Socket[bytes], action: Callable[[], None] | None) -> None:
        """Call `action` whenever another socket is readable, or None to stop; only on the hub's thread."""
        self._watch(socket, None if action is None else lambda _writable: action(), _READABLE)

    def watch_fd(self, fd: int, action: Callable[[bool], None] | None, *, writable: bool = False) -> None:
        """Call `action` whenever a descriptor is readable, or None to stop; only on the hub's thread.

        With `writable`, also whenever it can be written to; `action` gets whether it can.
        """
        self._watch(fd, action, _READABLE | (_WRITABLE if writable else 0))

    def _watch(
        self, watched: zmq.Socket[bytes] | int, action: Callable[[bool], None] | None, events: int
    ) -> None:
        if action is not None:
            self._watched[watched] = action
            self._poller.register(watched, events)
        elif self._watched.pop(watched, None) is not None:
            self._poller.unregister(watched)

    def drain(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Handle the messages that have arrived already, until none is left; only on the hub's thread.

        Not for longer than `seconds`: a rank that never pauses must not hold up others, or an interrupt.
        """
        until = time.monotonic() + seconds
        with contextlib.suppress(zmq.ZMQError):
            while time.monotonic() < until:
                self._receive()

    def close(self) -> None:
        self._closing = True
        self._waker.wake()
        self._thread.join(5)

    def _serve(self) -> None:
        try:
            self._route()
        except Exception as error:  # noqa: BLE001 - nothing else would end the runs
            self.error = error
            self.when_broken()
            self._end_members(error)
        finally:
            self._closing = True
            self._context.destroy(linger=0)
            self._waker.close()

    def _end_members(self, error: Exception) -> None:
        """Go on without the socket until every group has been ended by its agent."""
        for member in list(self._members.values()):
            self._guard(functools.partial(member.lost, error))
        while self._members:
            select.select([self._waker], [], [], _TICK_SECONDS)
            self._waker.clear()
            self._run_calls()
            self._tick(time.monotonic())

    def _route(self) -> None:
        poller = self._poller
        poller.register(self._socket, _READABLE)
        poller.register(self._waker.fileno(), _READABLE)
        next_tick = 0.0
        while not self._closing:
            seconds = self._finish_turn()
            quiet = all(member.quiet for member in self._members.values())
            if not quiet:
                seconds = min(seconds, next_tick - time.monotonic())
            wait = None if seconds == math.inf else max(0, math.ceil(seconds * 1000))
            if self._socket.closed:
                # A poller would take it for descriptor 0.
                raise zmq.ZMQError(zmq.ENOTSOCK)
            ready = dict(poller.poll(wait))
            if quiet:
                # What ends the quiet is not due at once: a cell does not begin with a tick.
                next_tick = time.monotonic() + _TICK_SECONDS
            if self._socket in ready:
                self.drain()
            self._call_watchers(ready)
            if self._waker.fileno() in ready:
                self._waker.clear()
            self._run_calls()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                self._tick(now)

    def _finish_turn(self) -> float:
        due = [math.inf]
        for each in self.after_turn:
            self._guard(functools.partial(_note, due, each))
        return min(due)

    # Both not in the loop above: a variable of theirs would keep the last group alive, values and all.

    def _call_watchers(self, ready: Mapping[zmq.Socket[bytes] | int, int]) -> None:
        for watched, action in list(self._watched.items()):
            # An action before this one may have closed a descriptor, and another file may have its number.
            if watched in ready and self._watched.get(watched) is action:
                self._guard(functools.partial(action, bool(ready[watched] & _WRITABLE)))

    def _tick(self, now: float) -> None:
        for member in list(self._members.values()):
            self._guard(functools.partial(member.tick, now))

    def _run_calls(self) -> None:
        while True:
            try:
                action = self._calls.get_nowait()
            except queue.Empty:
                return
            self._guard(action)

    def _receive(self) -> None:
        # `recv_multipart` does the same in three times the time.
        frame = self._socket.recv(_AT_ONCE, copy=False)
        identity = frame.bytes
        while frame.more:
            frame = self._socket.recv(_AT_ONCE, copy=False)
        data = frame.bytes
        try:
            message = decode_from_rank(data, _name(identity))
        except ProtocolError as error:
            self._refuse(identity, str(error))
            return
        group, attempt, rank = _parse(identity)
        if group not in self._members:
            # Its ranks were forked after `add`, whose call may still be in the queue.
            self._run_calls()
        member = self._members.get(group)
        if member is None or attempt != member.attempt:
            return  # of a group that has ended, or an earlier attempt
        if identity not in self._known:
            if not self._authentic(member, message, rank):
                self._refuse(identity, f"{_name(identity)} did not say hello with this run's token")
                return
            self._known.add(identity)
        if message.rank != rank:
            self._refuse(identity, f"{_name(identity)} spoke for rank {message.rank}")
            return
        self._guard(lambda: member.receive(message, data))

    @staticmethod
    def _authentic(member: Member, message: FromRank, rank: int) -> bool:
        return (
            isinstance(message, Hello)
            and message.rank == rank
            and message.attempt == member.attempt
            and hmac.compare_digest(message.token.encode(), member.token.encode())
        )

    def _refuse(self, identity: bytes, why: str) -> None:
        if identity not in self._refused:
            self._refused.add(identity)
            _log.warning("refused: %s", why)

    @staticmethod
    def _guard(action: Callable[[], None]) -> None:
        """Run `action`; a defect of one group must not end the thread that serves all of them."""
        try:
            action()
        except Exception:  # noqa: BLE001 - the other groups go on
            _log.exception("nblaunch's hub could not do a step; please report this")


def _note(due: list[float], hook: Callable[[], float]) -> None:
    due.append(hook())


def _name(identity: bytes) -> str:
    return f"sender {identity[:64]!r}"


def _parse(identity: bytes) -> tuple[str, int, int]:
    try:
        group, attempt, rank = identity.decode().split("/")
        return group, int(attempt), int(rank)
    except ValueError:
        return "", -1, -1
