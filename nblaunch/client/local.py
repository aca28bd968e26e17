"""A process as a client: its own runtime, and the runtimes that it is attached to.

No other module keeps a connection, or registers anything for the end of the process or for its forks.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import itertools
import os
import platform
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nblaunch import _keeper, _notebook
from nblaunch._errors import LaunchError, NblaunchError
from nblaunch._help import FailureKind
from nblaunch._keeper import RUNTIME_LOG, Boot, last_words, starting
from nblaunch._registry import RuntimeEntry, release_of_torch
from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch._version import __version__
from nblaunch.client.code_manifest import KnownFiles
from nblaunch.client.line import ClientLine, connect, deferring_interrupts
from nblaunch.protocol import client as wire
from nblaunch.protocol.messages import encode

if TYPE_CHECKING:
    from nblaunch._results import EventLog

LIVE = "nblaunch.runtime.runtime_main:live"
"""The entry point of the runtime's process, by name: a client does not import it."""
_ENDING_SECONDS = 15.0
_DESCRIBE_SECONDS = 5.0
_END_SECONDS = 40.0
_WELCOME_SECONDS = 15.0
_FIRST_NUMBER = 1 << 32


class Client:
    """The client of one process; its methods may be called on any thread."""

    def __init__(self, parents: Client | None = None) -> None:
        """In a fork, `parents` is the client of the parent process."""
        self.directory = RuntimeDirectory()
        self.last_events: EventLog | None = None
        """torchelastic's events of the user's last run."""
        self.files = KnownFiles()
        self._lock = threading.RLock()
        self._runtime: OwnRuntime | None = None
        self._others: weakref.WeakSet[Runtime] = weakref.WeakSet()
        self._exiting = threading.Event()
        # Never collected: that would close the parent's sockets.
        self._parents = parents

    @property
    def runtime(self) -> OwnRuntime:
        """The runtime that belongs to this process; it is started if it is not there.

        Waits for nothing but the rest of one that has ended.
        """
        with self._lock:
            if self._runtime is not None and not self._runtime.alive:
                # What its ranks held (devices, ports) is free then; its directory is the keeper's to remove.
                self._runtime.finish()
                self.directory.remove()
                self._runtime = None
            if self._runtime is None:
                # An interrupt between start and assignment would leave a runtime that holds the sockets.
                with deferring_interrupts():
                    self._runtime = OwnRuntime(self.directory.root())
            return self._runtime

    def ask(self, request: wire.Request[wire.AnswerT]) -> tuple[Runtime, wire.AnswerT]:
        """Return what has answered a request that begins nothing: another runtime where this one is gone."""
        runtime = self.runtime
        try:
            return runtime, runtime.ask_on_a_line(request)
        except LaunchError:
            if runtime.alive or not runtime.answered:
                raise
        runtime = self.runtime
        return runtime, runtime.ask_on_a_line(request)

    @property
    def started(self) -> OwnRuntime | None:
        return self._runtime

    def detached(self) -> OwnRuntime:
        """Return a runtime that will outlive this process: the one that nothing has used yet, or another."""
        with self._lock:
            runtime = self._runtime
            if runtime is not None and runtime.alive and not runtime.used:
                # Its private directory goes with it.
                self._runtime, self.directory = None, RuntimeDirectory()
            else:
                with deferring_interrupts():
                    runtime = OwnRuntime(RuntimeDirectory().root())
        self._others.add(runtime)
        return runtime

    def attached(self, entry: RuntimeEntry) -> Runtime:
        runtime = FoundRuntimeClient(entry)
        self._others.add(runtime)
        return runtime

    def close(self) -> None:
        """End the runtime with all that it has started; the next run starts another."""
        with self._lock:
            runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.stop()
        for other in list(self._others):
            other.close()
        self.directory.remove()

    def end(self) -> None:
        self._exiting.set()
        self.close()

    def wait_if_ending(self) -> None:
        """Block a daemon thread whose run was ended by the program's end.

        No thread waits for it, and Python would print what it raises after the program's own last output.
        """
        if self._exiting.is_set() and threading.current_thread() is not threading.main_thread():
            threading.Event().wait()

    def abandon(self) -> None:
        """Leave everything to the parent: this process is a fork, and must neither use nor end it."""
        for runtime in (self._runtime, *self._others):
            if runtime is not None:
                runtime.abandon()


class Runtime(abc.ABC):
    """A runtime process, and this process's connections to it; the first one is for short requests."""

    used = False
    """Whether anything was asked of it."""

    def __init__(self, root: Path, token: str, control: socket.socket) -> None:
        """Introduce this process at the other end of `control`."""
        self.root = root
        self._token = token
        self._ended = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free: list[ClientLine] = []
        self._lines: weakref.WeakSet[ClientLine] = weakref.WeakSet()
        """All connections but the first, those in use too."""
        self._numbers = itertools.count(1)
        self._notes: deque[bytes] = deque()
        self._control = ClientLine(control, self._introduction(), self._gone)

    def _introduction(self) -> wire.Introduce:
        shell = _notebook.shell()
        return wire.Introduce(
            token=self._token,
            version=__version__,
            pid=os.getpid(),
            node=platform.node(),
            name="the calling process" if shell is None else "the notebook's kernel",
            notebook=_notebook.path(),
            python=platform.python_version(),
            torch=release_of_torch(),
        )

    @property
    def alive(self) -> bool:
        self._ended = self._ended or self._control.closed
        if not self._ended and self._lock.acquire(blocking=False):  # else another thread uses it
            try:
                self._control.poll(0.0)
            except LaunchError:
                self._ended = True
            finally:
                self._lock.release()
        return not self._ended

    @property
    def answered(self) -> bool:
        return bool(self._token)

    @property
    def welcome(self) -> wire.RuntimeWelcome:
        """Its first answer; waits until it is there."""
        with self._lock:
            welcome = self._control.welcome
            self._token = self._token or welcome.token
            return welcome

    def ask(self, request: wire.Request[wire.AnswerT], seconds: float | None = None) -> wire.AnswerT:
        """Return the answer to a short request. Raises `TimeoutError` after `seconds`."""
        self.refuse_in_fork()
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            msg = f"The runtime has not answered another request within {seconds:g} s."
            raise TimeoutError(msg)
        try:
            return self._control.ask(request, seconds)
        finally:
            self._lock.release()

    def _stop_seconds(self) -> float:
        """Return how long it may take to stop: a job that runs has its grace period."""
        grace = 0.0
        with contextlib.suppress(NblaunchError, TimeoutError):
            answer = self.ask(wire.DescribeSessions(), _DESCRIBE_SECONDS)
            grace = max((each.grace for each in answer.sessions), default=0.0)
        return grace + _END_SECONDS

    @contextlib.contextmanager
    def line(self) -> Iterator[ClientLine]:
        """Use a connection of its own, for one job."""
        line = self.take_line()
        try:
            yield line
        except BaseException:
            # What it was waiting for may still arrive.
            line.close()
            raise
        self._return_line(line)

    def ask_on_a_line(self, request: wire.Request[wire.AnswerT]) -> wire.AnswerT:
        with self.line() as line:
            return line.ask(request)

    def take_line(self) -> ClientLine:
        self.refuse_in_fork()
        self.used = True
        self.send_notes()
        with self._lock:
            if self._free:
                return self._free.pop()
        _ = self.welcome
        if not all((self.root / name).exists() for name in ("client", "notes")):
            self.ask(wire.ListenAgain())
        try:
            connection = connect(self.root / "client")
        except LaunchError:
            self._raise_if_ending()
            raise
        line = ClientLine(connection, self._introduction(), self._gone)
        self._lines.add(line)
        return line

    def _raise_if_ending(self) -> None:
        # A process that ends closes its files one by one: where nobody listens, the rest follows.
        deadline = time.monotonic() + _ENDING_SECONDS
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self.alive:
            raise self._gone()

    def _return_line(self, line: ClientLine) -> None:
        """Keep one connection for the next job; of runs side by side the others close theirs."""
        with self._lock:
            if not self._free:
                self._free.append(line)
                return
        line.close()

    def number(self) -> int:
        return self.welcome.client * _FIRST_NUMBER + next(self._numbers)

    def note(self, note: wire.ClientNote, most_waiting: int = 0) -> None:
        """Send what a finalizer releases, with the notes that wait; never raises, and never waits.

        Up to `most_waiting` notes wait for the next one: each would wake the runtime, beside the next cell.

        A finalizer may run on any thread, at any point of the user's own code: no lock is taken. A fork of
        the process has a copy of every object: it sends nothing.
        """
        if self.is_of(os.getpid()):
            self._notes.append(self._token.encode() + encode(note))
            if len(self._notes) > most_waiting:
                self.send_notes()

    def send_notes(self) -> None:
        """Send notes; where the system holds no more, or the file is gone, the rest goes with the next."""
        if not self._notes or not self.is_of(os.getpid()):
            return
        with (
            contextlib.suppress(OSError, IndexError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            known = self.root.lstat()
            if known.st_uid != os.geteuid() or known.st_mode & 0o077:
                return  # a cleaner has removed it, and somebody else has made another: it gets no token
            sender.setblocking(False)  # noqa: FBT003 - the standard library's
            while self._notes:
                data = self._notes.popleft()
                try:
                    sender.sendto(data, os.fspath(self.root / "notes"))
                except (BlockingIOError, FileNotFoundError):
                    self._notes.appendleft(data)
                    return

    def is_of(self, pid: int) -> bool:
        """Whether it belongs to this process: a fork of the process has a copy of this object."""
        return self._pid == pid

    def refuse_in_fork(self) -> None:
        """Raise `LaunchError` in a fork of this process: two of them on one connection would break it."""
        if not self.is_of(os.getpid()):
            msg = (
                f"The runtime was to be used in process {os.getpid()}, a fork of process {self._pid}, which "
                "has the connections to it. Use it there, or start another session here."
            )
            raise LaunchError(msg, phase="runtime")

    def abandon(self) -> None:
        """Close the connections in a fork of this process, those of its threads too."""
        for line in self._lines:
            line.close()
        self.close()

    def _gone(self) -> Exception:
        self._ended = True
        return LaunchError(self._ending(), phase="runtime")

    @abc.abstractmethod
    def _ending(self) -> str:
        """Return that it has ended, and its last words."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End it, and wait until it is gone with all that it has started."""

    def close(self) -> None:
        for line in (*self._free, self._control):
            line.close()


class OwnRuntime(Runtime):
    """A runtime that this process has started: it ends with it, unless it has a detached session by then."""

    def __init__(self, root: Path) -> None:
        with starting():
            ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._boot = Boot(root, theirs, LIVE, owner=os.getpid())
            except BaseException:
                ours.close()
                raise
        super().__init__(root, "", ours)

    @property
    def alive(self) -> bool:
        # A keeper that was killed may be gone before the runtime is.
        self._ended = self._ended or self._boot.keeper.poll() is not None
        return super().alive

    @property
    def keeper(self) -> subprocess.Popen[bytes]:
        """The process at the top of all that it has started."""
        return self._boot.keeper

    def _ending(self) -> str:
        return f"nblaunch's runtime has ended, and all ranks with it. {self._boot.last_words()}"

    def stop(self) -> None:
        try:
            self.ask(wire.Stop(), self._stop_seconds())
        except TimeoutError:
            self._boot.keeper.send_signal(signal.SIGUSR1)
        except NblaunchError:
            pass  # it has ended already
        self.finish()

    def finish(self) -> None:
        """Wait until all that it has started is gone, now that it ends, and close the connections."""
        try:
            self._boot.keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._boot.keeper.send_signal(signal.SIGUSR1)
            self._boot.keeper.wait()
        self.close()

    def close(self) -> None:
        """Close the connections; a keeper that lives on is not ours to wait for."""
        super().close()
        self._boot.close()
        if self._boot.keeper.poll() is None:
            self._boot.keeper.returncode = 0


class FoundRuntimeClient(Runtime):
    """A runtime that another process has started, found by its entry in the registry."""

    def __init__(self, entry: RuntimeEntry) -> None:
        self.entry = entry
        control = connect(Path(entry.socket))
        self._logs: list[BinaryIO] = []
        with contextlib.suppress(OSError):
            # Opened now: the keeper removes it with the private directory.
            self._logs.append((Path(entry.root) / RUNTIME_LOG).open("rb"))
        super().__init__(Path(entry.root), entry.token, control)

    @property
    def welcome(self) -> wire.RuntimeWelcome:
        """Its first answer. Raises `LaunchError` if it does not come in time: the process may be stopped."""
        with self._lock:
            answered = self._control.is_welcome(_WELCOME_SECONDS)
        if not answered:
            name, pid = self.entry.name, self.entry.runtime.pid
            msg = (
                f"The runtime of session {name!r} (process {pid}) was asked for the session, and has not "
                f"answered within {_WELCOME_SECONDS:g} s. If it is stopped: kill -CONT {pid}. Else end it: "
                f"python -m nblaunch stop {name}."
            )
            raise LaunchError(msg, phase="runtime", kind=FailureKind.NO_ANSWER)
        return super().welcome

    def _ending(self) -> str:
        return (
            f"The runtime of session {self.entry.name!r} (process {self.entry.runtime.pid}) has ended, and "
            f"all ranks with it. Start another session (%distributed start). {last_words(self._logs)}"
        )

    def stop(self) -> None:
        try:
            self.ask(wire.Stop(), self._stop_seconds())
        except (NblaunchError, TimeoutError):
            # The runtime refuses us, does not answer, or is ending: its keeper ends everything.
            _keeper.stop(self.entry.keeper.pid, self.entry.keeper.start)
        self.entry.wait_until_gone(_END_SECONDS)
        self.close()

    def close(self) -> None:
        super().close()
        for log in self._logs:
            log.close()


_client = Client()


def local() -> Client:
    return _client


def _begin_in_child() -> None:
    # With locks of its own: a thread of the parent may have held one, and does not exist here to release it.
    global _client
    _client.abandon()
    _client = Client(_client)


os.register_at_fork(after_in_child=_begin_in_child)
atexit.register(lambda: local().end())
