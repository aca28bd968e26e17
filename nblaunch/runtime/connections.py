"""The runtime's connections to its clients. The hub's thread serves all of them, and waits for none."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import math
import os
import platform
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch._peer import peer_of
from nblaunch._registry import release_of_torch
from nblaunch._version import __version__
from nblaunch.host.hub import Hub
from nblaunch.protocol import client as wire
from nblaunch.protocol.framing import LIMIT, LIMIT_BEFORE_WELCOME, Frame, FrameKind, Frames, header
from nblaunch.protocol.messages import ProtocolError, encode

_log = logging.getLogger("nblaunch")
_CHUNK = 1 << 18
_NOTE_BYTES = 1 << 16
_INTRODUCE_SECONDS = 5.0
_BEHIND_SECONDS = 2.0
_BEHIND_BYTES = 8 << 20
_REST_SECONDS = 0.1
# A client draws ten times a second: it need not wake up for each message, beside its ranks.
_COMPANY_SECONDS = 0.01
_COMPANY_BYTES = 1 << 16
# A frame is two buffers, and one call takes so many.
_GATHERED = min(os.sysconf("SC_IOV_MAX"), 1024) // 2
# macOS has no such flag.
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)


class _Queued(NamedTuple):
    head: bytes
    body: bytes
    folded: bool

    @property
    def size(self) -> int:
        return len(self.head) + len(self.body)


class _Outbox:
    """Frames that a client's socket has not accepted yet."""

    def __init__(self, client: socket.socket) -> None:
        self._socket = client
        self._queue: deque[_Queued] = deque()
        self._begun = 0
        self._folded = 0
        self.accepted = time.monotonic()
        """When the socket last accepted something, or had nothing left to accept."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def folded(self) -> int:
        """The bytes of folded messages that `drop_folded` would drop."""
        first = self._queue[0] if self._queue and self._begun else None
        return self._folded - (first.size if first is not None and first.folded else 0)

    def put(self, kind: FrameKind, number: int, body: bytes) -> _Queued:
        if not self._queue:
            self.accepted = time.monotonic()
        frame = _Queued(header(kind, number, len(body)), body, kind is FrameKind.FOLDED)
        self._queue.append(frame)
        self._folded += frame.size if frame.folded else 0
        return frame

    def withdraw(self, frame: _Queued) -> bool:
        for place, each in enumerate(self._queue):
            if each is frame and (place or not self._begun):
                del self._queue[place]
                return True
        return False

    def keep_folded(self) -> None:
        """Have `drop_folded` drop none of the messages that are queued now."""
        if self._folded:
            self._queue = deque(frame._replace(folded=False) for frame in self._queue)
            self._folded = 0

    def drop_folded(self) -> None:
        """Drop the folded messages, but for one of which the socket has a part already."""
        first = [self._queue.popleft()] if self._begun else []
        rest = [frame for frame in self._queue if not frame.folded]
        self._queue = deque([*first, *rest])
        self._folded = sum(frame.size for frame in first if frame.folded)

    def flush(self) -> None:
        """Write as much as the socket accepts; raises `OSError` if the client is gone."""
        while self._queue:
            buffers = self._gathered()
            try:
                sent = self._socket.sendmsg(buffers, [], _NO_SIGPIPE)
            except BlockingIOError:
                return
            self.accepted = time.monotonic()
            self._begun += sent
            while self._queue and self._begun >= self._queue[0].size:
                frame = self._queue.popleft()
                self._begun -= frame.size
                self._folded -= frame.size if frame.folded else 0
            if sent < sum(map(len, buffers)):
                return

    def _gathered(self) -> list[bytes | memoryview]:
        frames = itertools.islice(self._queue, _GATHERED)
        buffers: list[bytes | memoryview] = [part for frame in frames for part in (frame.head, frame.body)]
        if self._begun:
            head, body = self._queue[0].head, self._queue[0].body
            buffers[0] = head[self._begun :]
            buffers[1] = memoryview(body)[max(self._begun - len(head), 0) :]
        return buffers


class ConnectionOwner(Protocol):
    """The owner of the connections, called on the hub's thread.

    `handle` gets a request and its number; what it raises is the answer. `lost` gets a client that was
    welcome and is gone. `caught_up` gets one that has missed folded messages and reads again.
    """

    def handle(self, connection: ClientConnection, number: int, request: wire.ClientRequest, /) -> None: ...
    def welcome(self, connection: ClientConnection, introduce: wire.Introduce, /) -> wire.RuntimeWelcome: ...
    def note(self, note: wire.ClientNote, /) -> None: ...
    def lost(self, connection: ClientConnection, /) -> None: ...
    def caught_up(self, connection: ClientConnection, /) -> None: ...


class ClientConnection:
    """One client; only for the hub's thread. What it is sent after its end is dropped."""

    def __init__(
        self, hub: Hub, number: int, client: socket.socket, owner: ConnectionOwner, token: str | None
    ) -> None:
        """Serve `client`, which need not have a token if that is None."""
        self.number = number
        self.introduced: wire.Introduce | None = None
        """Its introduction, without the token; None until it is authenticated."""
        self.since = time.time()
        self.behind = False
        """Whether it does not read: it is sent no folded messages until it has caught up."""
        self._hub, self._owner, self._token = hub, owner, token
        self._socket = client
        self._socket.settimeout(0)
        self._frames = Frames(LIMIT_BEFORE_WELCOME)
        self._outbox = _Outbox(client)
        self._failed = self._awaits_room = False
        self._write_at = 0.0
        """Until then (monotonic) the frames that are queued wait for others."""
        self._names: dict[tuple[str, int], tuple[_Queued | None, wire.NamesChanged]] = {}
        """By session and rank, what was sent last of its variables, if no other event has followed."""
        self._introduce_until = time.monotonic() + _INTRODUCE_SECONDS
        self._pid = peer_of(client).pid
        self._process = _process_end(self._pid)
        hub.watch_fd(client.fileno(), self._ready)
        if self._process is not None:
            hub.watch_fd(self._process, self._process_ended)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def record(self) -> wire.ClientRecord:
        """The client's identity. Only once it is authenticated."""
        known = self.introduced
        assert known is not None  # noqa: S101 - all who ask have one that was welcome
        return wire.ClientRecord(
            pid=known.pid,
            node=known.node,
            name=known.name,
            notebook=known.notebook,
            since=self.since,
        )

    def same_process_as(self, other: ClientConnection) -> bool:
        """Whether one process has both connections. Only once both are authenticated."""
        one, another = self.record, other.record
        return (one.pid, one.node) == (another.pid, another.node)

    def why_it_only_watches(self, session: str) -> str:
        """Return why this client may submit no job; empty if it may. Only once it is authenticated.

        Functions travel as bytecode, and tensors as torch pickles them.
        """
        known = self.introduced
        assert known is not None  # noqa: S101 - all who ask have one that was welcome
        ours, theirs = sys.version_info[:2], known.python.split(".")[:2]
        torch = release_of_torch()
        if theirs == [*map(str, ours)] and known.torch in ("", torch):
            return ""
        return (
            f"session {session!r} has ranks with Python {platform.python_version()} and torch {torch}, and "
            f"this client has Python {known.python or '?'} and torch {known.torch or '?'}: it may watch and "
            "stop the session. Give it jobs from the Python that has started it."
        )

    def answer(self, number: int, answer: wire.AnswerToClient) -> None:
        self._put(FrameKind.STRUCT, number, encode(answer))

    def event(self, event: wire.RuntimeEvent) -> None:
        self._names.clear()  # none after it stands for one before it: ranks may have other numbers
        self._put(FrameKind.EVENT, 0, encode(event))

    def names(self, event: wire.NamesChanged) -> None:
        """Send which variables a rank has; in the place of what a client that does not read has of it."""
        rank = event.session, event.names.rank
        frame, waiting = self._names.get(rank, (None, None))
        if frame is not None and waiting is not None and self._outbox.withdraw(frame):
            names = msgspec.structs.replace(event.names, lost=(*waiting.names.lost, *event.names.lost))
            event = msgspec.structs.replace(event, names=names)
        self._names[rank] = self._put(FrameKind.EVENT, 0, encode(event), waits=True), event

    def last_event(self, event: wire.RuntimeEvent) -> None:
        """Send the event that ends a job, at once: the user waits for it.

        No state will follow that stands for what was folded before.
        """
        self._outbox.keep_folded()
        self.event(event)
        self._flush()

    def folded(self, job: int, raw: bytes) -> None:
        """Send a folded message of `job` as it was encoded, unless the client is behind."""
        if self.behind:
            return
        self._put(FrameKind.FOLDED, job, raw, waits=True)
        if self._outbox.folded > _BEHIND_BYTES:
            self._flush()
            if self._outbox.folded > _BEHIND_BYTES:
                self._fall_behind()

    def close(self) -> None:
        """Write what the client accepts at once, and end the connection; `lost` is not called."""
        if self.closed:
            return
        self._flush()
        self._hub.watch_fd(self._socket.fileno(), None)
        self._socket.close()
        if self._process is not None:
            self._hub.watch_fd(self._process, None)
            os.close(self._process)

    def finish_turn(self, now: float) -> float:
        """Write what was queued; return in how many seconds something is due."""
        if self.introduced is None and now >= self._introduce_until:
            self._refuse(0, f"it has not introduced itself within {_INTRODUCE_SECONDS:g} s")
        return math.inf if self.closed else self._write(now)

    def _write(self, now: float) -> float:
        if now < self._write_at and self._outbox and self._outbox.folded <= _COMPANY_BYTES:
            return self._write_at - now
        if not self._awaits_room:
            self._flush()
        due = self._introduce_until - now if self.introduced is None else math.inf
        if self._outbox and not self.behind:
            if now >= self._outbox.accepted + _BEHIND_SECONDS:
                # It may have read less than what makes its socket writable.
                self._flush()
            stalled = self._outbox.accepted + _BEHIND_SECONDS
            if now >= stalled:
                self._fall_behind()
            else:
                due = min(due, stalled - now)
        if self._failed:
            self._end()
            return math.inf
        awaits = bool(self._outbox) or self.behind
        if awaits != self._awaits_room:
            self._awaits_room = awaits
            self._hub.watch_fd(self._socket.fileno(), self._ready, writable=awaits)
        return due

    def _put(self, kind: FrameKind, number: int, body: bytes, *, waits: bool = False) -> _Queued | None:
        if self.closed or self._failed:
            return None
        if not waits:
            self._write_at = 0.0
        elif not self._outbox:
            self._write_at = time.monotonic() + _COMPANY_SECONDS
        return self._outbox.put(kind, number, body)

    def _flush(self) -> None:
        # The owner may be in the middle of a loop over its clients: an end is for the end of this turn.
        try:
            self._outbox.flush()
        except OSError:
            self._failed = True

    def _fall_behind(self) -> None:
        self.behind = True
        self._outbox.drop_folded()

    def _ready(self, writable: bool) -> None:  # noqa: FBT001 - the hub's
        if writable:
            self._flush()
            # Writable: it has read most of what its socket held, also if nothing was left here.
            if self.behind and not self._outbox:
                self.behind = False
                self._owner.caught_up(self)
        self._read()

    def _process_ended(self, _writable: bool) -> None:  # noqa: FBT001 - the hub's
        # A child that it forked may hold the socket open. What it sent before its end counts.
        while self._read() == _CHUNK:
            pass
        self._end()

    def _read(self) -> int:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._end()
            return 0
        number = 0
        self._frames.feed(data)
        try:
            for frame in self._frames:
                number = frame.number
                self._take(frame)
                if self.closed:
                    break
        except ProtocolError as error:
            self._refuse(number, str(error))
        return len(data)

    def _take(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.STRUCT:
            msg = f"A {frame.kind.name} frame from client {self.number} is no request"
            raise ProtocolError(msg)
        request = wire.decode_request(frame.body, f"client {self.number}")
        if self.introduced is None:
            self._admit(frame.number, request)
            return
        if isinstance(request, wire.Introduce):
            msg = f"client {self.number} has introduced itself twice"
            raise ProtocolError(msg)
        try:
            self._owner.handle(self, frame.number, request)
        except Exception as error:  # noqa: BLE001 - the client gets it
            _log.exception("the runtime could not carry out %s of client %d", _kind(request), self.number)
            self.answer(frame.number, wire.RequestFailed(error=wire.ErrorRecord.of(error)))

    def _admit(self, number: int, request: wire.ClientRequest) -> None:
        if not isinstance(request, wire.Introduce):
            self._refuse(number, f"its first request is {_kind(request)}, and not an introduction")
        elif request.protocol != wire.PROTOCOL:
            why = (
                f"it uses protocol {request.protocol}, and the runtime protocol {wire.PROTOCOL}; "
                "use the runtime's version, or stop the runtime with it"
            )
            self._refuse(number, why, request.version)
        elif self._token is not None and not hmac.compare_digest(
            request.token.encode(errors="surrogatepass"), self._token.encode()
        ):
            self._refuse(number, "its token is not that of this runtime", request.version)
        else:
            self.introduced = msgspec.structs.replace(request, token="")
            self._frames.limit = LIMIT
            try:
                self.answer(number, self._owner.welcome(self, self.introduced))
            except Exception as error:  # noqa: BLE001 - the client gets it
                _log.exception("the runtime could not welcome client %d", self.number)
                self.introduced = None
                self.answer(number, wire.RequestFailed(error=wire.ErrorRecord.of(error)))
                self._end()

    def _refuse(self, number: int, why: str, version: str = "of an unknown version") -> None:
        """End the connection; a client that is not authenticated yet gets the reason."""
        _log.warning("refused: client %d (process %d): %s", self.number, self._pid, why)
        if self.introduced is None:
            ours = __version__
            text = f"A client with nblaunch {version} was refused by a runtime with nblaunch {ours}: {why}."
            error = LaunchError(text, phase="runtime", kind=FailureKind.OTHER_VERSION)
            self.answer(number, wire.RequestFailed(error=wire.ErrorRecord.of(error)))
        self._end()

    def _end(self) -> None:
        if not self.closed:
            self.close()
            if self.introduced is not None:
                self._owner.lost(self)


class Connections:
    """All clients of this runtime, and the sockets where they come in.

    All methods are for the hub's thread.
    """

    def __init__(self, hub: Hub, token: str, owner: ConnectionOwner) -> None:
        """Serve clients that know `token`."""
        self._hub, self._token, self._owner = hub, token, owner
        self._numbers = itertools.count(1)
        self._clients: list[ClientConnection] = []
        self._listening: dict[Path, socket.socket] = {}
        self._resting: dict[socket.socket, float] = {}
        """Listening sockets where a client waits and no descriptor is left, and when to look again."""
        hub.after_turn.append(self._finish_turn)

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter([each for each in self._clients if each.introduced is not None and not each.closed])

    def listen(self, path: Path) -> None:
        """Accept clients at `path`; again, once the file of an earlier call is gone."""
        listener = self._bind(path, socket.SOCK_STREAM)
        # Nobody can connect before this: the file's mode is set already.
        listener.listen()
        self._listen(listener)

    def listen_for_notes(self, path: Path) -> None:
        """Take notes at `path`: datagrams of the token and a note. Others are dropped."""
        notes = self._bind(path, socket.SOCK_DGRAM)
        self._hub.watch_fd(notes.fileno(), lambda _: self._take_note(notes))

    def adopt(self, client: socket.socket) -> ClientConnection:
        """Serve a client that need not have the token: only this runtime's owner has the other end."""
        return self._serve(client, token=None)

    def close(self) -> None:
        """End all connections, without `lost`, and remove the sockets' files."""
        self._hub.after_turn.remove(self._finish_turn)
        for client in self._clients:
            client.close()
        for path in list(self._listening):
            self._stop_listening(path)

    def _bind(self, path: Path, kind: socket.SocketKind) -> socket.socket:
        if path in self._listening:
            self._stop_listening(path)
        bound = socket.socket(socket.AF_UNIX, kind)
        try:
            bound.settimeout(0)
            bound.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            bound.close()
            why = error.strerror or error
            msg = f"The clients' socket {path} could not be bound: {why}. Set TMPDIR elsewhere."
            raise LaunchError(msg, phase="runtime", kind=FailureKind.NOT_WRITABLE) from error
        self._listening[path] = bound
        return bound

    def _stop_listening(self, path: Path) -> None:
        bound = self._listening.pop(path)
        self._resting.pop(bound, None)
        self._hub.watch_fd(bound.fileno(), None)
        bound.close()
        path.unlink(missing_ok=True)

    def _listen(self, listener: socket.socket) -> None:
        self._hub.watch_fd(listener.fileno(), lambda _: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptor is left, mostly. The client goes on waiting, and the socket is readable meanwhile.
            _log.warning("a client could not be accepted: %s", error)
            self._hub.watch_fd(listener.fileno(), None)
            self._resting[listener] = time.monotonic() + _REST_SECONDS
            return
        peer = peer_of(client)
        if peer.is_ours:
            self._serve(client, token=self._token)
        else:
            _log.warning("refused: a client of another user (uid %d)", peer.uid)
            client.close()

    def _serve(self, client: socket.socket, *, token: str | None) -> ClientConnection:
        connection = ClientConnection(self._hub, next(self._numbers), client, self._owner, token)
        self._clients.append(connection)
        return connection

    def _take_note(self, notes: socket.socket) -> None:
        token = self._token.encode()
        with contextlib.suppress(BlockingIOError):
            # Few wait at a time, and who sends one does not wait.
            while data := notes.recv(_NOTE_BYTES):
                if hmac.compare_digest(data[: len(token)], token):
                    with contextlib.suppress(ProtocolError):
                        self._owner.note(wire.decode_note(data[len(token) :], "a client"))

    def _finish_turn(self) -> float:
        now = time.monotonic()
        due = [client.finish_turn(now) for client in self._clients]
        self._clients = [client for client in self._clients if not client.closed]
        for listener in [each for each, until in self._resting.items() if until <= now]:
            del self._resting[listener]
            self._listen(listener)
        due += [until - now for until in self._resting.values()]
        return min(due, default=math.inf)


def _kind(request: wire.ClientRequest) -> str:
    return type(request).__name__


def _process_end(pid: int) -> int | None:
    """Return a descriptor that is readable once the process has ended, where the system has that."""
    if pid > 0 and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None
