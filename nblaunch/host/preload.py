"""The fork server's own process: import what every rank needs, then fork one per request.

Nothing here may start a thread, open a CUDA context or read the user's files: ranks are forks of this.

The standard library's loop (`multiprocessing.forkserver.main`) ends with the first call that fails, and with
it all ranks that it has forked, those of other runs too. Here a fork that the system refuses is a refusal of
that one request. Descriptors are kept in reserve, so that a request can always be received and answered.

The first fork is the runtime's, once what both need is loaded: it loads the rest beside the server.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import select
import signal
import socket
import sys
from collections.abc import Iterable
from multiprocessing import forkserver, spawn
from typing import Any, NoReturn

from nblaunch.protocol.messages import Orders

# What a request brings along is two pipes; the rest is room to spare.
_RESERVE = 8
_MOST_DESCRIPTORS = 4
_private_spawn: Any = spawn  # the stubs leave its `_main` out


def run_rank(orders: Orders) -> None:
    """Be a rank: torchelastic's entry point, called in a fork of the server."""
    from nblaunch.rank import main

    main.run_rank(orders)


def serve(
    requests_fd: int, alive_fd: int, root: str, runtime: tuple[str, tuple[int, ...]] | None = None
) -> NoReturn:
    """Import torch and IPython once, then fork a rank per request until killed.

    Between the two, the `runtime` is forked if there is to be one: the name of what it calls, and its
    descriptors.
    """
    # The keeper set the environment; OMP_NUM_THREADS must be there before torch is first imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Kineto reads it as torch is loaded. Below this it writes a line to stderr for each profile that begins.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    gc.disable()  # while modules are loaded there is nothing to collect: a tenth of the time
    # torch, and what else both the runtime and ranks need: loaded once, in pages that they share.
    from nblaunch import _results  # noqa: F401
    from nblaunch.capture import pickling  # noqa: F401
    from nblaunch.rank import environment, isolate  # noqa: F401

    if runtime is not None:
        live, its_fds = runtime
        _fork_runtime(live, (*its_fds, root, os.getppid()), not_its=(requests_fd, alive_fd))
        _close(its_fds)
    from nblaunch.rank import main, script, shell  # noqa: F401 - loaded for all ranks

    isolate.server_pid = os.getpid()
    shell.prepare(root)
    script.leave_out_finalizers()
    # A rank's collector never visits frozen objects, so their pages stay shared. The garbage among them is
    # small (8,000 objects), and collecting it would take as long as making the shell.
    gc.freeze()
    gc.enable()
    _ForkServer(socket.socket(fileno=requests_fd), alive_fd).run()
    os._exit(0)


def _fork_runtime(live: str, its_own: tuple[object, ...], not_its: tuple[int, ...]) -> None:
    """Fork the runtime as a child of the keeper: the process between it and the server ends at once.

    Where the system refuses a fork, the log has the error, and no process has the runtime's descriptors any
    more: by that the keeper knows that there is nothing to keep.
    """
    from nblaunch.rank.isolate import reseed

    between = os.fork()
    if between == 0:
        code = 1
        try:
            if os.fork() == 0:
                _close(not_its)
                reseed()
                pkgutil.resolve_name(live)(*its_own)
            code = 0
        except BaseException:  # noqa: BLE001 - what follows in this process is the server's
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    os.waitpid(between, 0)


class _ForkServer:
    """Forks on request, and reports the exit code of each fork."""

    def __init__(self, requests: socket.socket, alive_fd: int) -> None:
        self._requests = requests
        self._alive = alive_fd
        self._children: dict[int, int] = {}
        """Process id -> the pipe that its exit code is written to."""
        self._reserve = _take_reserve()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        # A handler that does nothing: with it the system wakes `poll` through the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write)

    def run(self) -> None:
        poller = select.poll()
        for fd in (self._requests.fileno(), self._alive, self._wake_read):
            poller.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._alive in ready:
                return
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 65536)
                self._report_exits()
            if self._requests.fileno() in ready and not self._answer():
                # The runtime is gone, and the keeper is about to end this process.
                poller.unregister(self._requests.fileno())

    def _report_exits(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there is none
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                if (answer := self._children.pop(pid, None)) is not None:
                    _write(answer, os.waitstatus_to_exitcode(status))
                    os.close(answer)

    def _answer(self) -> bool:
        """Fork for the next request, or answer with the error; return whether there was a request."""
        _close(self._reserve)
        self._reserve = []
        message, fds, _, _ = socket.recv_fds(self._requests, 1, _MOST_DESCRIPTORS)
        error = 0
        try:
            self._reserve = _take_reserve()
        except OSError as refused:
            error = refused.errno or 1
        if len(fds) < 2:  # noqa: PLR2004 - a pipe with the orders, and one for the answer
            _close(fds)
            return bool(message)
        orders, answer = fds[:2]
        if not error:
            error = self._fork(orders, answer)
        os.close(orders)
        if error:
            _write(answer, -error)
            os.close(answer)
            if not self._reserve:
                with contextlib.suppress(OSError):  # tried again with the next request
                    self._reserve = _take_reserve()
        return True

    def _fork(self, orders: int, answer: int) -> int:
        """Fork, and answer with the child's process id; return the error number if the system refuses."""
        try:
            pid = os.fork()
        except OSError as refused:
            return refused.errno or 1
        if pid == 0:
            self._be_child(orders, answer)
        _write(answer, pid)
        self._children[pid] = answer
        return 0

    def _be_child(self, orders: int, answer: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._requests.close()
            _close([self._alive, self._wake_read, self._wake_write, answer, *self._reserve])
            _close(self._children.values())
            code = _private_spawn._main(orders, os.dup(orders))  # noqa: SLF001 - as the standard library's server does
        except Exception:  # noqa: BLE001 - nothing else would report it
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(code)


def _take_reserve() -> list[int]:
    taken: list[int] = []
    try:
        while len(taken) < _RESERVE:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        _close(taken)
        raise
    return taken


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _write(fd: int, number: int) -> None:
    write: Any = vars(forkserver)["write_signed"]  # as its counterpart in the runtime reads
    with contextlib.suppress(OSError):  # the runtime is gone
        write(fd, number)
