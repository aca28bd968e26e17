"""The fork server: one per runtime, torch imported, CUDA never touched; ranks are forked from it.

It does what the standard library's `multiprocessing.forkserver` does, with these differences: it is ours
alone (the user's own `forkserver` context is left as it is), it is started under the keeper, requests reach
it through a socket without a name, which nobody can remove, and a fork that the system refuses does not end
it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, context, forkserver, popen_forkserver, process, reduction, util
from pathlib import Path
from typing import Any

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch._keeper import FORK_SERVER_LOG, absolute_path, directory_or_root
from nblaunch._process_tree import die_with_parent
from nblaunch._runtime_dir import RuntimeDirectory, remove_tree
from nblaunch.host import descriptors, keeper

START_METHOD = "nblaunch"
"""The name under which `multiprocessing.get_context` finds our context; the default is not changed."""

# Only a machine that hardly moves takes so long; a keeper that does not answer is replaced.
_ANSWER_TIMEOUT = 30.0
_STOP_TIMEOUT = 5.0
# Importing torch from a cold network disk takes minutes; longer than that nothing will come.
_BOOT_SECONDS = 300.0
# The stubs leave these out.
_private_util: Any = util
_read_signed: Callable[[int], int] = forkserver.read_signed

LOST = "was lost with the fork server, which all ranks are forks of (killed, or out of memory)"
"""The reason for the end of a rank whose exit code is lost."""

_ADOPTION_SECONDS = 5.0
_BOOT_STEP = 0.05
_on_this_thread = threading.local()
"""What `Server.forking` has set; `multiprocessing` leaves no other way to what starts a process."""


class AbandonedError(Exception):
    """The rank is not wanted any more, and has not been forked yet."""


class Server:
    """The fork server beside a runtime or a node program; all are the keeper's children, and end with it.

    It is started again if it died. Its requests go to the fork server, its orders to the keeper.
    """

    def __init__(
        self,
        requests: socket.socket,
        orders: socket.socket,
        directory: RuntimeDirectory,
        environ: dict[str, str],
    ) -> None:
        """`environ` is that under which it has loaded Python, torch and what they need."""
        self.directory = directory
        self._environ = environ
        self.has_forked = False
        self._lock = threading.RLock()
        self._orders = orders
        self._requests: socket.socket | None = requests
        self._log = directory.root() / FORK_SERVER_LOG
        self._count = 0

    def ensure_running(self) -> None:
        """Start the fork server if it is not running; does not wait until it is ready."""
        with self._lock:
            if not self._answers(keeper.PING):
                self.stop()
                try:
                    self._start()
                except OSError as error:
                    if number := descriptors.scarcity(error):
                        raise _refused(number) from error
                    raise

    def _answers(self, kind: bytes) -> bool:
        """Give the keeper an order; return whether it and the fork server are there, and can be reached."""
        try:
            return not self._order(kind)
        except OSError:
            return False

    def _order(self, kind: bytes, rest: bytes = b"", fds: Sequence[int] = ()) -> int:
        """Give the keeper an order; return its error number. Raises `OSError` where it cannot be reached.

        Without a keeper this process ends, as the system is about to have it.
        """
        self._orders.settimeout(_ANSWER_TIMEOUT)
        self._count = self._count % 255 + 1
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._orders, [keeper.ORDER.pack(kind, self._count, len(rest)), rest], fds)
            while len(answer := self._orders.recv(keeper.ANSWER.size)) == keeper.ANSWER.size:
                number, error = keeper.ANSWER.unpack(answer)
                if number == self._count:  # others answer orders that were interrupted
                    return int(error)
        os._exit(1)

    def loaded_under(self) -> dict[str, str]:
        return self._environ

    @contextlib.contextmanager
    def forking(self, *, abandon: threading.Event | None = None) -> Iterator[None]:
        """Have this thread fork processes from this server; if the block fails, they are ended.

        A server that is still starting is waited for only until `abandon` is set.
        """
        this = _on_this_thread
        this.server, this.abandon, this.forked = self, abandon, []
        try:
            yield
        except BaseException:
            for each in this.forked:
                kill_group(each.pid or 0)
            wait_for([each.sentinel for each in this.forked], _STOP_TIMEOUT)
            raise
        finally:
            del this.server, this.abandon, this.forked

    def ask_for_fork(self) -> tuple[int, int]:
        """Ask for one more process; return (its number and its end arrive here, its orders are written here).

        Raises `OSError` where no descriptor is left here, that or `EOFError` where the fork server is gone.
        """
        self.ensure_running()
        requests = self._requests
        if requests is None:
            raise EOFError  # another thread has just stopped it
        parent_read, child_write = os.pipe()
        try:
            child_read, parent_write = os.pipe()
        except OSError:
            _private_util.close_fds(parent_read, child_write)
            raise
        try:
            socket.send_fds(requests, [b"f"], [child_read, child_write])
        except OSError:
            _private_util.close_fds(parent_read, parent_write)
            raise
        finally:
            _private_util.close_fds(child_read, child_write)
        return parent_read, parent_write

    def sweep(self) -> None:
        with self._lock:
            self._answers(keeper.SWEEP)

    def last_words(self) -> str:
        """Return the output of the fork server, which explains a failed start."""
        text = ""
        with contextlib.suppress(OSError):
            text = self._log.read_text(errors="replace")[-4000:]
        return f"Its last words:\n{text}" if text else "It printed nothing."

    def adopted(self) -> None:
        """Have the keeper watch this process, its child, as the runtime."""
        with self._lock:
            self._order(keeper.ADOPTED, str(os.getpid()).encode())

    def named(self, entry: Path) -> None:
        """Have the keeper remove the runtime's entry in the registry in the end."""
        with self._lock:
            self._order(keeper.NAMED, os.fsencode(entry))

    def at_end(self, command: Sequence[str]) -> Callable[[], None]:
        """Have the keeper run a command at its end; return a function that revokes this.

        It may begin with variables: see `keeper.split_command`. Commands must be distinct. If the keeper is
        killed, the kernel kills this process, too: a shell then runs the command once the pipe is closed.
        """
        rest = json.dumps(list(command)).encode()
        with self._lock:
            self._order(keeper.AT_END, rest)
        variables, words = keeper.split_command(command)
        shell = subprocess.Popen(  # noqa: S603 - the engine's own command
            ["/bin/sh", "-c", 'read -r _ || exec "$0" "$@"', *words],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=os.sep,
            start_new_session=True,
        )

        def forget() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.communicate(b"\n", _STOP_TIMEOUT)
            with self._lock:
                self._order(keeper.FORGET, rest)

        return forget

    def detach(self) -> None:
        with self._lock:
            self._order(keeper.DETACH)

    def _start(self) -> None:
        self.has_forked = False
        with contextlib.ExitStack() as stack:
            asking, asked = (stack.enter_context(each) for each in socket.socketpair())
            if number := self._order(keeper.START, fds=[asked.fileno()]):
                raise OSError(number, os.strerror(number))
            self._requests = asking.dup()

    def stop(self) -> None:
        """End the fork server and whatever it has forked but this process, and wait until they are gone."""
        with self._lock:
            if self._requests is not None:
                self._requests.close()
                self._requests = None
            with contextlib.suppress(OSError):
                self._order(keeper.END)


def server_of_fork(requests_fd: int, orders_fd: int, root: str, keeper_pid: int) -> Server:
    """Return the fork server that this process is the first fork of, once the keeper watches this process.

    The arguments are what `preload.serve` calls a runtime with. From here on this process ends with the
    keeper.
    """
    # The process between the fork server and this one has to end first.
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != keeper_pid and time.monotonic() < deadline:
        time.sleep(0.0005)
    die_with_parent(keeper_pid)
    requests, orders = (socket.socket(fileno=fd) for fd in (requests_fd, orders_fd))
    server = Server(requests, orders, RuntimeDirectory(Path(root)), dict(os.environ))
    server.adopted()
    return server


class RankPopen(popen_forkserver.Popen):
    """Starts a process from our fork server; otherwise the standard library's."""

    method = START_METHOD
    lost = False

    def _launch(self, process_obj: Any) -> None:
        self._server: Server = _on_this_thread.server
        buffer = io.BytesIO()
        # Neither the main module (a script without a `__main__` guard would run again in every rank)
        # nor the start method (a rank's own processes start as under torchrun) goes along.
        preparation = {
            "name": process_obj.name,
            "authkey": bytes(process.current_process().authkey),
            "log_to_stderr": False,
            "sys_path": absolute_path(),
            "orig_dir": directory_or_root(),
        }
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        try:
            try:
                self._fork(buffer)
            except (EOFError, OSError) as error:
                if descriptors.scarcity(error):
                    raise  # of this process: the server, and all ranks of other runs, go on
                # Killed since the last request, for memory for example: another one is as good.
                self._server.stop()
                self._fork(buffer)
        except (EOFError, OSError) as error:
            if number := descriptors.scarcity(error):
                raise _refused(number) from error
            self._server.stop()
            msg = f"A rank was to be forked, and the fork server ended instead. {self._server.last_words()}"
            raise LaunchError(msg, phase="fork server") from error

    def _fork(self, order_of_rank: io.BytesIO) -> None:
        self.sentinel, order_fd = self._server.ask_for_fork()
        # The orders' pipe stays open: by it the rank's `multiprocessing.parent_process()` knows of this one.
        self.finalizer = util.Finalize(self, _private_util.close_fds, (order_fd, self.sentinel))
        # No orders before the fork: a rank that is no longer wanted finds none, and ends.
        self._await_fork()
        pid = _read_signed(self.sentinel)
        if pid < 0:
            self.finalizer()
            raise _refused(-pid)  # the server goes on
        self.pid = pid
        self._server.has_forked = True
        # A rank that is gone already is seen by its end, not by this.
        with contextlib.suppress(BrokenPipeError), open(order_fd, "wb", closefd=False) as order:
            order.write(order_of_rank.getbuffer())

    def _await_fork(self) -> None:
        server, abandon = self._server, _on_this_thread.abandon
        deadline = time.monotonic() + _BOOT_SECONDS
        while not connection.wait([self.sentinel], timeout=_BOOT_STEP):
            # A group of which some are forked already is ended by its agent.
            if abandon is not None and abandon.is_set() and not server.has_forked:
                self.finalizer()
                raise AbandonedError
            if time.monotonic() > deadline:
                server.stop()
                msg = (
                    f"phase 'fork server' did not finish in {_BOOT_SECONDS:.0f} s: it has not forked a rank. "
                )
                msg += server.last_words()
                raise LaunchError(msg, phase="fork server")

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, or None while the process lives.

        If the server is gone, the rank was killed with it, and its exit code is lost.
        """
        if self.returncode is None and connection.wait(
            [self.sentinel], timeout=0 if flag == os.WNOHANG else None
        ):
            try:
                self.returncode = _read_signed(self.sentinel)
            except (OSError, EOFError):
                self.lost, self.returncode = True, -signal.SIGKILL
        code: int | None = self.returncode
        return code


def _refused(number: int) -> LaunchError:
    why = f"{errno.errorcode.get(number, number)}, {os.strerror(number).lower()}"
    msg = (
        f"A rank was to be forked, and the system refused: {why}. Use fewer ranks, "
        "or raise the limits on processes (ulimit -u, pids.max of the container), open files (ulimit -n) or "
        "memory."
    )
    return LaunchError(msg, phase="fork", kind=FailureKind.PROCESS_LIMIT)


class RankProcess(process.BaseProcess):
    """A process of our context; its own default start method stays the platform's."""

    _start_method = None
    _popen: RankPopen
    _args: tuple[object, ...]

    def start(self) -> None:
        # A rank that fails too early to report it would write an error file, which nobody reads or removes.
        self._args = tuple(
            os.devnull
            if isinstance(each, str) and os.path.basename(each).startswith("pytorch-errorfile-")
            else each
            for each in self._args
        )
        super().start()
        _on_this_thread.forked.append(self)
        # It is the agent's to wait for, and the keeper's to end: `multiprocessing` would wait for it at the
        # end of this process, and of any that the user forks from it.
        children: set[process.BaseProcess] = process._children  # type: ignore[attr-defined]  # noqa: SLF001
        children.discard(self)

    @property
    def lost(self) -> bool:
        """Whether it has gone with the fork server, without an exit code that anybody could read."""
        return self._popen.lost

    @staticmethod
    def _Popen(process_obj: Any) -> RankPopen:  # noqa: N802 - as the standard library has it
        return RankPopen(process_obj)


class ReturnSlot:
    """Stands in for the queue by which torchelastic receives a value: ours go through the hub.

    It is full once the hub has released the rank. A rank that ends before that has ended without a result
    (`os._exit(0)`), for which torchelastic would wait without a bound.
    """

    released = False

    def put(self, value: object) -> None:
        """Do nothing: runs in the rank, whose value has been sent."""

    def empty(self) -> bool:
        return not self.released

    def get(self) -> None:
        """Return the value torchelastic is to see."""


class _Released:
    """Stands in for the `Event` by which torchelastic lets finished ranks end: the hub does that."""

    def set(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002 - the signature of Event
        return True


class RankContext(context.BaseContext):
    """The `multiprocessing` context whose processes are forks of our server."""

    _name = START_METHOD
    Process = RankProcess

    def get_start_method(self, allow_none: bool = False) -> str:  # noqa: ARG002, FBT001, FBT002 - as inherited
        return self._name

    def SimpleQueue(self) -> ReturnSlot:  # type: ignore[override]  # noqa: N802 - as inherited
        """Return a slot that needs no descriptor: 128 ranks would pass the limit of 256."""
        return ReturnSlot()

    def Event(self) -> _Released:  # type: ignore[override]  # noqa: N802 - as inherited
        """Return an event that needs no semaphore in /dev/shm."""
        return _Released()


def register() -> str:
    """Make `multiprocessing.get_context(START_METHOD)` ours; return the name."""
    contexts: dict[str, context.BaseContext] = context._concrete_contexts  # type: ignore[attr-defined]  # noqa: SLF001
    contexts.setdefault(START_METHOD, RankContext())
    return START_METHOD


def try_fork(server: Server, seconds: float, *, architectures: bool) -> tuple[str, ...]:
    """Fork a process, as a rank is forked; return the `architectures` that its torch has code for.

    Asked there: torch may initialise CUDA to answer. Raises `LaunchError` if it does not end in time.
    """
    from nblaunch.host.placement import write_architectures  # not where ranks import this module

    answer = server.directory.make("forked-") / "architectures"
    call, args = (write_architectures, (str(answer),)) if architectures else (os.getpid, ())
    process = RankProcess(target=call, args=args, name="nblaunch-tried")
    try:
        with server.forking():
            process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            msg = f"a process was forked, and did not end within {seconds:g} s"
            raise LaunchError(msg, phase="fork")
        process.close()
        return tuple(json.loads(answer.read_text())) if answer.exists() else ()
    finally:
        remove_tree(answer.parent)


def kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def wait_for(sentinels: list[int], seconds: float) -> None:
    """Wait until all processes behind `sentinels` have ended, at most `seconds`."""
    deadline = time.monotonic() + seconds
    pending = set(sentinels)
    while pending and (left := deadline - time.monotonic()) > 0:
        pending -= {fd for fd in connection.wait(list(pending), timeout=left) if isinstance(fd, int)}
