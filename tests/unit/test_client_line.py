"""A client and the runtime: real sockets, a real hub, signals at every point, and clients that misbehave."""

from __future__ import annotations

import contextlib
import io
import math
import os
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from nblaunch._errors import LaunchError, OptionError
from nblaunch.client import line as line_module
from nblaunch.client.line import ClientLine, connect, deferring_interrupts, noting_interrupts
from nblaunch.host.hub import Hub
from nblaunch.protocol import client as wire
from nblaunch.protocol.framing import LIMIT_BEFORE_WELCOME, FrameKind, header
from nblaunch.protocol.messages import Noticed, encode
from nblaunch.runtime import connections as connections_module
from nblaunch.runtime.connections import Connections

TOKEN = "5" * 31 + "e"


class EndedError(Exception):
    """The runtime has ended, as this test's client puts it."""


class Runtime:
    """A runtime that does little: it serves clients, and keeps what it was asked."""

    def __init__(self, root: Path) -> None:
        directory: Any = types.SimpleNamespace(root=lambda: root)
        self.hub = Hub(directory)
        self.path, self.notes = root / "client", root / "notes"
        self.asked, self.welcomed, self.lost, self.caught_up, self.removed = [], [], [], [], []
        self.handlers = {}
        owner = types.SimpleNamespace(
            handle=self.handle,
            welcome=self.welcome,
            lost=self.lost.append,
            caught_up=self.caught_up.append,
            note=self.removed.append,
        )
        self.connections = Connections(self.hub, TOKEN, owner)
        self.on_hub(lambda: self.connections.listen(self.path))
        self.on_hub(lambda: self.connections.listen_for_notes(self.notes))

    def on_hub(self, action):
        self.hub.run(action, 10)

    def welcome(self, connection, introduce):
        self.welcomed.append(introduce)
        return wire.RuntimeWelcome(client=connection.number, pid=os.getpid())

    def handle(self, connection, number, request):
        self.asked.append(request)
        self.handlers.get(type(request), self.done)(connection, number, request)

    @staticmethod
    def done(connection, number, _request):
        connection.answer(number, wire.Done())

    def client(self):
        """Return the connection of the one client."""
        (only,) = self.connections
        return only

    def close(self):
        with contextlib.suppress(LaunchError):
            self.on_hub(self.connections.close)
        self.hub.close()


@pytest.fixture
def runtime(tmp_path):
    running = Runtime(tmp_path)
    yield running
    running.close()


def introduction(**changes):
    said = {"token": TOKEN, "version": "0.4.0", "pid": os.getpid(), "node": "here", "name": "test"}
    return wire.Introduce(**{**said, **changes})


@pytest.fixture
def new_line(runtime):
    """Give `new_line(**changes of the introduction)`."""
    made = []

    def make(**changes):
        made.append(ClientLine(connect(runtime.path), introduction(**changes), EndedError))
        return made[-1]

    yield make
    for line in made:
        line.close()


@pytest.fixture
def line(new_line):
    made = new_line()
    assert made.welcome.pid == os.getpid()
    return made


def linked(**changes):
    """Return a line over a socket whose other end nobody serves yet, and that end."""
    ours, theirs = socket.socketpair()
    return ClientLine(ours, introduction(**changes), EndedError), theirs


def framed(request, number=0, kind=FrameKind.STRUCT):
    body = encode(request)
    return header(kind, number, len(body)) + body


def rest_of(client):
    """Return what a plain socket receives until the other side closes it."""
    client.settimeout(10)
    found = io.BytesIO()
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65536):
            found.write(data)
    return found.getvalue()


class Wrapped:
    """A socket; tests change its reads and writes."""

    def __init__(self, real):
        self.real, self.calls = real, 0

    def __getattr__(self, name):
        return getattr(self.real, name)


@pytest.fixture
def plain(runtime):
    """Give a client's socket, on which a test writes what it likes."""
    with connect(runtime.path) as made:
        yield made


# --- questions and answers


def test_a_request_is_answered_also_where_it_is_sent_before_the_welcome_is_read(runtime, new_line):
    line = new_line()
    assert line.ask(wire.InterruptSession(session="a"), 10) == wire.Done()
    assert runtime.asked == [wire.InterruptSession(session="a")]
    assert (runtime.client().introduced.name, runtime.client().number) == ("test", line.welcome.client)
    assert line.welcome.pid == os.getpid()


def test_events_that_come_before_an_answer_are_kept(runtime, line):
    def events_first(connection, number, _request):
        connection.event(Noticed(text="first"))
        connection.folded(7, b"raw")
        connection.answer(number + 1000, wire.Done())
        connection.answer(number, wire.Done())
        connection.event(Noticed(text="last"))

    runtime.handlers[wire.InterruptSession] = events_first
    assert line.ask(wire.InterruptSession(session=""), 10) == wire.Done()
    assert line.next(10) == (FrameKind.EVENT, 0, Noticed(text="first"))
    assert line.next(10) == (FrameKind.FOLDED, 7, b"raw")
    assert line.next(10) == (FrameKind.EVENT, 0, Noticed(text="last"))
    assert line.next(0) is None


def test_folded_messages_wait_for_an_event_and_come_with_it(runtime, line, monkeypatch):
    monkeypatch.setattr(connections_module, "_COMPANY_SECONDS", 1000.0)
    line.ask(wire.InterruptSession(session=""), 10)
    client = runtime.client()
    runtime.on_hub(lambda: [client.folded(7, b"one"), client.folded(7, b"two")])
    runtime.on_hub(lambda: None)  # a turn of the hub later
    assert not line.pending()
    runtime.on_hub(lambda: client.event(Noticed(text="end")))
    assert [line.next(10) for _ in range(3)] == [
        (FrameKind.FOLDED, 7, b"one"),
        (FrameKind.FOLDED, 7, b"two"),
        (FrameKind.EVENT, 0, Noticed(text="end")),
    ]


def test_folded_messages_come_also_where_nothing_follows(runtime, line):
    client = runtime.client()
    runtime.on_hub(lambda: client.folded(7, b"alone"))
    assert line.next(10) == (FrameKind.FOLDED, 7, b"alone")


def test_many_folded_messages_wait_for_nothing(runtime, line, monkeypatch):
    monkeypatch.setattr(connections_module, "_COMPANY_SECONDS", 1000.0)
    client = runtime.client()
    runtime.on_hub(lambda: [client.folded(7, bytes(1000)) for _ in range(100)])
    assert line.next(10) is not None


def test_what_is_pending_is_known_without_reading(runtime, line, eventually):
    assert not line.pending()
    runtime.on_hub(lambda: runtime.client().event(Noticed(text="news")))
    eventually(line.pending, "the message is there")
    assert line.next(0) == (FrameKind.EVENT, 0, Noticed(text="news"))
    assert not line.pending()
    runtime.handlers[wire.InterruptSession] = lambda client, number, _: (
        client.event(Noticed(text="before the answer")),
        client.answer(number, wire.Done()),
    )
    line.ask(wire.InterruptSession(session=""), 10)  # reads the event, and keeps it
    assert line.pending()
    assert line.next(0) is not None
    runtime.on_hub(runtime.client().close)
    eventually(line.pending, "the message is there")


def test_nothing_comes_within_the_time_given(line):
    began = time.monotonic()
    assert line.next(0.05) is None
    assert not line.poll(0.05)
    assert time.monotonic() - began >= 0.1


def test_a_request_without_an_answer_ends_after_its_time_and_the_line_goes_on(runtime, line):
    late = []
    runtime.handlers[wire.InterruptSession] = lambda _connection, number, _request: late.append(number)
    with pytest.raises(TimeoutError, match=r"InterruptSession within 0\.05 s"):
        line.ask(wire.InterruptSession(session=""), 0.05)
    runtime.on_hub(lambda: runtime.client().answer(late[0], wire.Done()))
    assert line.next(0.1) is None
    assert line.ask(wire.Stop(), 10) == wire.Done()


def test_a_time_is_kept_while_other_messages_never_pause():
    """The answer does not come, and as soon as one message is read there is another one."""
    ours, theirs = socket.socketpair()
    more = framed(Noticed(text="more"), kind=FrameKind.EVENT)

    class Unending(Wrapped):
        def recv(self, size):
            data = self.real.recv(size)
            if self.calls < 20_000:
                theirs.sendall(more)
            self.calls += 1
            return data

    line = ClientLine(ours, introduction(), EndedError)
    wrapped: Any = Unending(ours)
    line._socket = wrapped
    theirs.sendall(more)
    with theirs, pytest.raises(TimeoutError):
        line.ask(wire.Stop(), 0.1)
    assert wrapped.calls < 20_000
    line.close()


def test_what_the_runtime_raises_is_raised_here(runtime, line, caplog):
    def refuse(*_):
        raise OptionError("there is no session 'b'")

    runtime.handlers[wire.InterruptSession] = refuse
    with pytest.raises(OptionError, match="no session 'b'"):
        line.ask(wire.InterruptSession(session="b"), 10)
    assert "InterruptSession of client 1" in caplog.text
    assert line.ask(wire.Stop(), 10) == wire.Done()


def test_large_requests_and_answers_arrive_whole(runtime, line):
    text = "x" * (20 << 20)
    runtime.handlers[wire.InterruptSession] = lambda connection, _, request: connection.event(
        Noticed(text=request.session)
    )
    line.send(wire.InterruptSession(session=text))
    _, _, notify = line.next(30)
    assert notify.text == text
    assert not runtime.client().behind


def test_the_owners_link_needs_no_token_and_its_requests_wait_for_a_runtime_that_starts(runtime):
    """The link is there before the process that serves it."""
    line, theirs = linked(token="")
    line.send(wire.Stop())
    assert line.next(0.05) is None
    runtime.on_hub(lambda: runtime.connections.adopt(theirs))
    assert line.welcome.pid == os.getpid()
    assert runtime.asked == [wire.Stop()]
    line.close()


# --- who is not served


def refusal_of(make):
    line = make()
    with pytest.raises(LaunchError) as refused:
        _ = line.welcome
    assert refused.value.phase == "runtime"
    with pytest.raises(LaunchError, match="was refused by a runtime"):
        line.ask(wire.Stop(), 10)
    assert line.closed
    return str(refused.value)


@pytest.mark.parametrize("token", [TOKEN[::-1], "\udc80"], ids=["another", "no text"])
def test_a_client_with_another_token_is_refused(runtime, new_line, caplog, token):
    text = refusal_of(lambda: new_line(token=token))
    assert "its token is not that of this runtime" in text
    assert token not in text + caplog.text
    assert TOKEN not in text + caplog.text
    assert (runtime.welcomed, runtime.asked, runtime.lost, list(runtime.connections)) == ([], [], [], [])


def test_a_refusal_is_read_also_when_the_next_request_cannot_be_sent(new_line, eventually):
    line = new_line(token=TOKEN[::-1])
    poll = select.poll()
    poll.register(line, select.POLLIN)
    eventually(
        lambda: any(events & select.POLLHUP for _, events in poll.poll(0)), "the runtime has closed it"
    )
    with pytest.raises(LaunchError, match="its token is not that"):
        line.send(wire.Stop())


def test_a_client_of_another_version_is_refused_and_both_are_named(runtime, new_line):
    text = refusal_of(lambda: new_line(protocol=99, version="7.8.9"))
    assert "nblaunch 7.8.9 was refused by a runtime with nblaunch 0." in text
    assert "protocol 99" in text
    assert runtime.asked == []


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (framed(wire.Stop()), "its first request is Stop"),
        (framed(introduction(name="x" * LIMIT_BEFORE_WELCOME)), f"{LIMIT_BEFORE_WELCOME} are allowed"),
        (struct.pack("<IBQ", 2**32 - 1, 0, 0), "4294967295 bytes"),
        (struct.pack("<IBQ", 4, 0, 0) + b"junk", "no message of nblaunch's protocol"),
        (framed(introduction(), kind=FrameKind.EVENT), "EVENT frame"),
    ],
    ids=["no introduction", "too long", "4 GiB announced", "no message", "no request"],
)
def test_what_begins_otherwise_is_refused(runtime, plain, caplog, data, why):
    plain.sendall(data)
    assert why in rest_of(plain).decode(errors="replace")
    assert why in caplog.text
    assert (runtime.welcomed, runtime.asked, runtime.lost) == ([], [], [])


def test_a_notebook_at_the_longest_path_is_welcome(runtime, new_line):
    notebook = "/" + "Ördner/" * 585 + "a.ipynb"
    assert new_line(notebook=notebook).welcome.client
    assert runtime.client().record.notebook == notebook


def test_a_client_waits_until_a_descriptor_is_free_and_keeps_nobody_busy(runtime):
    turns = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def due() -> float:
        turns.append(0)
        return math.inf

    runtime.on_hub(lambda: runtime.hub.after_turn.append(due))
    client = socket.socket(socket.AF_UNIX)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        client.connect(str(runtime.path))
        before = len(turns)
        time.sleep(0.5)
        assert len(turns) - before < 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    line = ClientLine(client, introduction(), EndedError)
    assert line.welcome.client
    line.close()


def test_who_does_not_introduce_itself_in_time_is_refused(runtime, monkeypatch):
    """Also if no byte ever comes, and nothing else happens in the runtime."""
    monkeypatch.setattr(connections_module, "_INTRODUCE_SECONDS", 0.2)
    with connect(runtime.path) as silent:
        assert b"has not introduced itself within 0.2 s" in rest_of(silent)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IBQ", 2**32 - 1, 0, 1),
        struct.pack("<IBQ", 4, 0, 1) + b"junk",
        struct.pack("<IBQ", 0, 9, 1),
        framed(wire.Stop(), kind=FrameKind.FOLDED),
        framed(introduction()),
    ],
    ids=["4 GiB announced", "no message", "unknown kind", "no request", "introduced twice"],
)
def test_a_client_that_breaks_the_protocol_is_ended(runtime, plain, caplog, eventually, data):
    plain.sendall(framed(introduction()) + data + framed(wire.Stop(), 2))
    assert rest_of(plain).endswith(b"\xa5token\xa0")  # the welcome is all
    assert "refused: client 1" in caplog.text
    assert runtime.asked == []
    eventually(lambda: [client.number for client in runtime.lost] == [1], "its end is reported")


def test_half_a_request_did_not_happen(runtime, plain, eventually):
    plain.sendall(
        framed(introduction()) + framed(wire.InterruptSession(session=""), 1) + framed(wire.Stop(), 2)[:-1]
    )
    plain.close()
    eventually(lambda: runtime.lost, "its end is noticed")
    assert runtime.asked == [wire.InterruptSession(session="")]


def test_tokens_are_shown_nowhere(runtime, line):
    shown = [line, runtime.connections, runtime.client(), runtime.client().introduced, *runtime.welcomed]
    assert TOKEN not in repr(shown) + repr([vars(line), vars(runtime.client())["introduced"]])


def test_sockets_are_for_this_user_alone_and_their_files_go(runtime):
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (runtime.path, runtime.notes)]
    assert modes == [0o600, 0o600]
    runtime.on_hub(lambda: runtime.connections.listen(runtime.path))
    connect(runtime.path).close()
    runtime.on_hub(runtime.connections.close)
    assert not runtime.path.exists()
    assert not runtime.notes.exists()
    runtime.connections._hub.after_turn.append(runtime.connections._finish_turn)


NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def another_user(directory, act):
    """Fork a process of another user; it runs `act` in `directory`, and what that returns can be read."""
    directory.chmod(0o777)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # it has threads; the child touches nothing of them
        pid = os.fork()
    if pid == 0:
        try:
            # From here a path needs no right to the directories above.
            os.chdir(directory)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(write, act())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        yield said
    os.waitpid(pid, 0)


@needs_root
def test_another_user_is_refused_whatever_it_knows(runtime, caplog):
    runtime.path.chmod(0o666)

    def try_it():
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(runtime.path.name)
            with contextlib.suppress(BrokenPipeError):
                client.sendall(framed(introduction()))
            return b"received: " + rest_of(client)

    with another_user(runtime.path.parent, try_it) as said:
        assert said.read() == b"received: "
    assert f"another user (uid {NOBODY})" in caplog.text
    assert runtime.welcomed == []


@needs_root
def test_another_users_socket_is_sent_nothing(tmp_path):
    path = tmp_path / "client"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))

        def listen():
            listener.listen()
            path = Path("listening")
            path.touch()
            client, _ = listener.accept()
            return b"received: " + rest_of(client)

        with another_user(tmp_path, listen) as said:
            deadline = time.monotonic() + 10
            while not (tmp_path / "listening").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(LaunchError, match=f"another user .uid {NOBODY}."):
                connect(path)
            assert said.read() == b"received: "


def test_notes_are_taken_with_the_token_only(runtime, line):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes:
        for data in [
            b"",
            TOKEN.encode(),
            TOKEN[::-1].encode() + encode(wire.ReleaseJob(job=1, pid=1)),
            TOKEN.encode() + encode(wire.Stop()),
            TOKEN.encode() + b"junk",
            TOKEN.encode() + encode(wire.ReleaseJob(job=2, pid=1)),
        ]:
            notes.sendto(data, str(runtime.notes))
    line.ask(wire.Stop(), 10)
    runtime.on_hub(lambda: None)
    assert runtime.removed == [wire.ReleaseJob(job=2, pid=1)]


# --- one side is gone


def test_a_runtime_that_ends_in_the_middle_of_an_answer_is_gone():
    line, theirs = linked()
    answer = framed(wire.Done(), 1)
    theirs.sendall(framed(Noticed(text="before"), kind=FrameKind.EVENT) + answer[:-1])
    ending = threading.Timer(0.2, theirs.close)
    ending.start()
    began = time.monotonic()
    with pytest.raises(EndedError):
        line.ask(wire.Stop())
    assert time.monotonic() - began < 1.2
    ending.join()
    assert line.closed
    assert line.next() == (FrameKind.EVENT, 0, Noticed(text="before"))
    for use in (line.next, lambda: line.send(wire.Stop()), lambda: line.welcome):
        with pytest.raises(EndedError):
            use()
    assert not line.broken


def test_a_closed_line_is_no_runtime_that_is_gone(line):
    line.close()
    with pytest.raises(LaunchError, match="closed in this process"):
        line.ask(wire.Stop())


def test_a_client_that_closes_is_lost(runtime, line, eventually):
    line.close()
    eventually(lambda: runtime.lost, "its end is noticed")
    assert list(runtime.connections) == []
    runtime.lost[0].event(Noticed(text="nobody gets it"))


def test_a_client_that_the_runtime_closes_gets_what_was_sent_before(runtime, line):
    def end(connection, number, _request):
        connection.answer(number, wire.Done())
        connection.event(Noticed(text="stopped"))
        connection.close()

    runtime.handlers[wire.Stop] = end
    assert line.ask(wire.Stop(), 10) == wire.Done()
    assert line.next(10) == (FrameKind.EVENT, 0, Noticed(text="stopped"))
    with pytest.raises(EndedError):
        line.next(10)
    assert runtime.lost == []


CLIENT_WITH_A_CHILD = """
import os, sys, pathlib
from nblaunch.client.line import ClientLine, connect
from nblaunch.protocol.client import Introduce, Stop
path, token = sys.argv[1:]
introduce = Introduce(token=token, version="", pid=1, node="", name="")
line = ClientLine(connect(pathlib.Path(path)), introduce, OSError)
line.welcome
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="without pidfd only the end of the socket is seen")
def test_a_killed_client_is_lost_while_its_child_holds_the_socket(runtime, eventually):
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT_WITH_A_CHILD, runtime.path, TOKEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as client:
        child = int(client.stdout.readline())
        assert runtime.lost == []
        client.kill()
        eventually(lambda: runtime.lost, "its end is noticed", 2)
        os.kill(child, 0)  # it has not ended
        client.stdin.close()


# --- a client that does not read


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def next_texts(line, last):
    """Return the numbers and texts of what comes until the text `last`."""
    found = []
    while last not in found[-1:]:
        kind, _, message = line.next(10)
        found.append(int(message[:7]) if kind is FrameKind.FOLDED else message.text)
    return found


def test_a_client_that_stops_reading_misses_folded_messages_and_catches_up_once(
    runtime, line, eventually, monkeypatch
):
    # Here the bytes decide: this thread may get no turn for seconds.
    monkeypatch.setattr(connections_module, "_BEHIND_SECONDS", 60)
    client, count, batch = runtime.client(), 1_000_000, 20_000

    def send(first):
        for number in range(first, first + batch):
            client.folded(1, b"%07d" % number + bytes(193))

    before = resident()
    for first in range(0, count, batch):
        runtime.on_hub(lambda first=first: send(first))
    assert client.behind
    runtime.on_hub(lambda: client.event(Noticed(text="while it is behind")))
    assert resident() - before < 40 << 20
    assert len(client._outbox) < 10
    line.send(wire.Stop())  # it writes, and does not read
    eventually(lambda: runtime.asked, "the request is here")
    assert runtime.caught_up == []
    before_the_gap = next_texts(line, "while it is behind")[:-1]
    assert before_the_gap == list(range(len(before_the_gap)))
    assert 0 < len(before_the_gap) < count
    eventually(lambda: runtime.caught_up, "it has caught up")
    assert not client.behind
    runtime.on_hub(lambda: send(count))
    runtime.on_hub(lambda: client.event(Noticed(text="end")))
    assert next_texts(line, "end") == [*range(count, count + batch), "end"]
    assert runtime.caught_up == [client]


def test_a_client_that_accepts_nothing_for_a_while_is_behind(runtime, line, monkeypatch, eventually):
    monkeypatch.setattr(connections_module, "_BEHIND_SECONDS", 0.2)
    client = runtime.client()
    raw = b"%07d" % 1 + bytes(1 << 20)
    runtime.on_hub(lambda: [client.folded(1, raw) for _ in range(5)])
    assert not client.behind
    eventually(lambda: client.behind, "it is behind")
    assert len(client._outbox) == 1
    runtime.on_hub(lambda: client.event(Noticed(text="end")))
    assert next_texts(line, "end") == [1, "end"]
    eventually(lambda: runtime.caught_up == [client], "it has caught up")


def test_a_client_that_asks_and_does_not_read_has_not_caught_up(runtime, line, monkeypatch, eventually):
    """Although nothing is left to send it: its socket is full, up to the last whole message."""
    monkeypatch.setattr(connections_module, "_BEHIND_SECONDS", 0.2)
    monkeypatch.setattr(connections_module, "_COMPANY_SECONDS", 0.0)
    client = runtime.client()
    while not client._awaits_room:
        runtime.on_hub(lambda: client.folded(1, b"%07d" % 1 + bytes(1000)))
    eventually(lambda: client.behind, "it is behind")
    assert len(client._outbox) == 0
    line.send(wire.Stop())
    eventually(lambda: runtime.asked, "the request is here")
    assert (client.behind, runtime.caught_up) == (True, [])
    runtime.on_hub(lambda: client.event(Noticed(text="end")))
    next_texts(line, "end")
    eventually(lambda: runtime.caught_up == [client], "it has caught up")


def test_one_client_that_does_not_read_holds_up_no_other(runtime, line, new_line):
    stuck = runtime.client()
    other = new_line()
    runtime.on_hub(lambda: [stuck.event(Noticed(text="x" * (1 << 20))) for _ in range(20)])
    assert other.ask(wire.Stop(), 5) == wire.Done()
    assert line.ask(wire.Stop(), 10) == wire.Done()  # an answer comes behind all events


def test_a_runtime_that_does_not_read_is_an_error(monkeypatch):
    monkeypatch.setattr(line_module, "_WRITE_SECONDS", 0.2)
    line, theirs = linked()
    with theirs:
        with pytest.raises(LaunchError, match="has read nothing for") as stuck:
            line.ask(wire.InterruptSession(session="x" * (4 << 20)))
        assert (stuck.value.phase, line.broken, line.closed) == ("runtime", True, True)


# --- SIGINT


class Interrupted(Wrapped):
    """A socket that sends this process SIGINT in one of its reads and writes: before it, or after it."""

    def __init__(self, real, at):
        super().__init__(real)
        self.at = at

    def _do(self, action):
        self.point()
        try:
            return action()
        finally:
            self.point()

    def point(self):
        if self.calls == self.at:
            signal.raise_signal(signal.SIGINT)
        self.calls += 1

    def send(self, data, flags):
        return self._do(lambda: self.real.send(data, flags))

    def recv(self, size):
        return self._do(lambda: self.real.recv(size))


def interrupted_conversation(runtime, at):
    """Ask five times, with an interrupt at that read or write; return what came, and how often it came."""
    runtime.asked.clear()
    questions = [wire.InterruptSession(session=f"{number}" * 400_000) for number in range(5)]
    wrapped: Any = Interrupted(connect(runtime.path), at)
    found, interrupts = [], 0
    line = ClientLine(wrapped.real, introduction(), EndedError)
    line._socket = wrapped
    for question in questions:
        try:
            line.ask(question, 10)
        except KeyboardInterrupt:
            interrupts += 1
    while len(found) < 4 * len(questions):
        try:
            assert line.poll(10)
        except KeyboardInterrupt:
            interrupts += 1
            continue
        with deferring_interrupts():
            found.append(line.next(0))
    assert runtime.asked == questions
    line.close()
    return found, interrupts, wrapped.calls > at


def test_an_interrupt_at_any_read_or_write_loses_nothing(runtime):
    def answer(connection, number, request):
        for part in range(3):
            connection.folded(int(request.session[0]), b"%d" % part)
        connection.answer(number, wire.Done())
        connection.event(Noticed(text=request.session[0]))

    runtime.handlers[wire.InterruptSession] = answer
    handler = signal.getsignal(signal.SIGINT)
    expected, none, _ = interrupted_conversation(runtime, -1)
    assert (none, len(expected)) == (0, 20)
    at, reached = 0, True
    while reached:
        found, interrupts, reached = interrupted_conversation(runtime, at)
        assert found == expected
        assert interrupts == reached
        assert signal.getsignal(signal.SIGINT) is handler
        at += 1
    assert at > 20


def test_waiting_is_interrupted_at_once(line):
    main = threading.get_ident()
    threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        line.next(30)
    assert time.monotonic() - began < 5
    assert line.ask(wire.Stop(), 10) == wire.Done()


@pytest.fixture
def handled():
    """Give what a handler of SIGINT, which does not raise, was called with."""
    calls = []

    def handler(number, frame):
        calls.append((number, frame is not None))

    before = signal.signal(signal.SIGINT, handler)
    yield calls
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)


def test_deferred_interrupts_come_once_at_the_end_also_after_an_error(handled):
    with contextlib.suppress(ZeroDivisionError), deferring_interrupts():
        with deferring_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert handled == []
        raise ZeroDivisionError
    assert handled == [(signal.SIGINT, True)]


@pytest.mark.parametrize("holding", [deferring_interrupts, lambda: noting_interrupts(print)])
def test_an_error_of_another_signals_handler_leaves_the_handler(handled, holding):
    def fail(*_):
        raise ZeroDivisionError

    main, before = threading.get_ident(), signal.signal(signal.SIGUSR2, fail)
    try:
        for _ in range(100):
            timer = threading.Timer(0.0005, signal.pthread_kill, (main, signal.SIGUSR2))
            with contextlib.suppress(ZeroDivisionError):
                timer.start()
                while True:
                    with holding():
                        pass
            timer.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert handled == []


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_interrupt_is_noted_also_where_python_drops_its_exception(interrupted, monkeypatch):
    class Dropped:
        def __del__(self):
            if interrupted:
                signal.raise_signal(signal.SIGINT)

    before, noted, dropped = signal.getsignal(signal.SIGINT), [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: dropped.append(each.exc_type))
    with noting_interrupts(lambda: noted.append(1)):
        del_me = Dropped()
        del del_me
        assert len(noted) == len(dropped) == interrupted
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_raises_nothing_has_decided_that_nobody_is_interrupted(handled):
    noted = []
    with noting_interrupts(lambda: noted.append(1)):
        signal.raise_signal(signal.SIGINT)
    assert (len(handled), noted) == (1, [])


@pytest.mark.parametrize("holding", [deferring_interrupts, lambda: noting_interrupts(print)])
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_no_python_function_is_left_alone(handler, holding):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with holding():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_the_handler_alone():
    handler, seen = signal.getsignal(signal.SIGINT), []

    def run():
        with deferring_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_an_error_in_the_middle_of_a_read_breaks_the_line(monkeypatch, line):
    def fail(_data):
        raise MemoryError

    monkeypatch.setattr(line._frames, "feed", fail)
    with pytest.raises(MemoryError):
        line.ask(wire.Stop(), 10)
    assert (line.broken, line.closed) == (True, True)


@pytest.mark.slow
def test_deferring_interrupts_takes_less_than_3_microseconds():
    def each(count=1000):
        began = time.perf_counter()
        for _ in range(count):
            with deferring_interrupts():
                pass
        return (time.perf_counter() - began) / count

    assert min(each() for _ in range(100)) < 3e-6


# --- the hub


def test_a_descriptor_that_was_closed_in_the_same_turn_is_not_served(runtime):
    """Another one may have its number already."""
    pairs, served = [socket.socketpair() for _ in range(2)], []

    def serve(number):
        served.append(number)
        for ours, _ in pairs:
            runtime.hub.watch_fd(ours.fileno(), None)

    def watch():
        for number, (ours, theirs) in enumerate(pairs):
            theirs.send(b"x")
            runtime.hub.watch_fd(ours.fileno(), lambda _, number=number: serve(number))

    runtime.on_hub(watch)
    runtime.on_hub(lambda: None)
    runtime.on_hub(lambda: None)
    assert served == [0]
    for ends in pairs:
        for end in ends:
            end.close()
