"""The node program: a fork of this node's fork server, which the command (`join`) has started.

A node joins the rendezvous of a run only after it has proved to the notebook that it has the key, so a node
with another key disturbs no run. With the notebook's own address it joins no rendezvous (`host`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shlex
import signal
import socket as sockets
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from nblaunch._errors import NblaunchError, OptionError
from nblaunch._inherited import check_start_method
from nblaunch.elastic import rendezvous
from nblaunch.elastic.forkserver import server_of_fork
from nblaunch.elastic.placement import place_ranks
from nblaunch.elastic.process_options import check_process_options
from nblaunch.group.runtime import LocalRuntime
from nblaunch.nodes.host import CutOffError, NodeHost, OutOfReachError
from nblaunch.nodes.join import CUT_OFF, HEEDED, READY, ProgramOrder, failed
from nblaunch.options.launch import LaunchOptions
from nblaunch.options.line import parse_line

_ANSWER_SECONDS = 30.0
_UNLIMITED = 2**31 - 1
# torch's, and what it is called in its library.
_LOG_LEVEL, _LEVEL_NAME, _ERRORS = "TORCH_CPP_LOG_LEVEL", "FLAGS_caffe2_log_level", 2


def live(link_fd: int, requests_fd: int, orders_fd: int, root: str, keeper: int) -> NoReturn:
    """Be the node program: called in a fork of the fork server, which has torch, and no thread.

    SIGINT, SIGTERM and SIGHUP are ignored here, as the keeper ignores them: signals come over the link.
    """
    status = 1
    link = sockets.socket(fileno=link_fd)
    try:
        server = server_of_fork(requests_fd, orders_fd, root, keeper)
        order, outputs = ProgramOrder.receive(link)
        for fd, number in zip(outputs, (1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        # An engine may send it to all processes of a node.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        for name, value in order.environ.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _log_errors_only()
        gc.freeze()
        gc.enable()
        status = _serve(LocalRuntime(server), order, link)
    except BaseException:  # noqa: BLE001 - nothing else would report it
        sys.excepthook(*sys.exc_info())
    finally:
        for each in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                each.flush()
        with contextlib.suppress(OSError):
            link.send(bytes([status]))
        os._exit(status)


def _log_errors_only() -> None:
    """Have torch's libraries say nothing below an error in this process, unless the environment says more.

    Its stores log each connection that ends, and the notebook, which hosts them, goes first. The variable is
    read when torch is imported, for the ranks too.
    """
    if _LOG_LEVEL not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # another build of torch says more
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(library, _LEVEL_NAME).value = _ERRORS


def _serve(runtime: LocalRuntime, order: ProgramOrder, link: sockets.socket) -> int:
    options = parse_line(shlex.join(order.words)).options
    key = order.key.encode()
    signals: list[int] = []
    stopped = threading.Event()
    try:
        if order.endpoint:
            _take_signals(link, signals, stopped)
            return NodeHost(runtime, order.endpoint, key, options).serve(signals, _joined)
        _check_here(options)
        _take_signals(link, signals, stopped)
        return _join_run(runtime, options, key, signals, stopped)
    except OptionError as error:
        return failed(str(error), 2)
    except OutOfReachError as error:
        return failed(str(error), 3)
    except CutOffError as error:
        return failed(str(error), CUT_OFF)
    except NblaunchError as error:
        return failed(str(error), 1)


def _take_signals(link: sockets.socket, signals: list[int], stopped: threading.Event) -> None:
    """Have the command collect its signals, which then arrive here; the first sets `stopped`.

    Where the command has ended, the keeper is about to end this process.
    """

    def take() -> None:
        while number := link.recv(1):
            signals.append(number[0])
            stopped.set()

    link.send(READY)
    if link.recv(1) == HEEDED:
        threading.Thread(target=take, name="nblaunch-signals", daemon=True).start()


def _check_here(options: LaunchOptions) -> None:
    check_start_method(options.start_method)
    check_process_options(options, place_ranks(options.nproc_per_node, "gloo", os.environ), os.environ)


def _joined(name: str, nproc: int) -> None:
    # Not to stdout, which may be the user's own if an engine starts this program.
    text = f"nblaunch join: {nproc} ranks of this machine take part, as {name}"
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command line


def _join_run(
    runtime: LocalRuntime, options: LaunchOptions, key: bytes, signals: list[int], stopped: threading.Event
) -> int:
    """Be a node of the run at an endpoint, whose store or etcd server has the address of the listener."""
    rdzv = rendezvous.config_of(options, joining=True)
    assert rdzv is not None  # noqa: S101 - without an endpoint there is an error
    rdzv = replace(rdzv, key=key)
    listener = rendezvous.read_listener(rdzv, options.rdzv_id or "", stopped).removeprefix("tcp://")

    def joined(_: str, nproc: int) -> None:
        text = f"nblaunch join: {nproc} ranks of this machine take part in {options.rdzv_id}"
        print(text, flush=True)  # noqa: T201 - a command line

    return NodeHost(runtime, listener, key, options, rdzv).serve(signals, joined)
