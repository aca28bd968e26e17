"""The node program: a fork of this node's fork server, which the command (`join`) has started.

A node joins the rendezvous of a run only after it has proved to the notebook that it has the key, so a node
with another key disturbs no run. With the notebook's own address it joins no rendezvous (`host`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import shlex
import signal
import socket as sockets
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import zmq
from zmq.utils import monitor

from nblaunch._errors import LaunchError, NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch._inherited import check_start_method
from nblaunch.elastic import rendezvous
from nblaunch.elastic.forkserver import server_of_fork
from nblaunch.elastic.placement import place_ranks
from nblaunch.elastic.process_options import check_process_options, process_settings
from nblaunch.elastic.settings import AgentSettings, RendezvousConfig
from nblaunch.group.runtime import LocalRuntime
from nblaunch.nodes import messages as wire
from nblaunch.nodes.host import CutOffError, NodeHost, OutOfReachError
from nblaunch.nodes.join import CUT_OFF, HEEDED, READY, ProgramOrder, failed
from nblaunch.nodes.key import KEY_FILE, versions
from nblaunch.nodes.listener import REFUSALS, encrypted
from nblaunch.nodes.node import JoinedRelay, of_this_machine
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
    rdzv = rendezvous.config_of(options, joining=True)
    assert rdzv is not None  # noqa: S101 - without an endpoint there is an error
    rdzv = replace(rdzv, key=key)
    run_id = options.rdzv_id or ""
    listener = rendezvous.read_listener(rdzv, run_id, stopped)
    runtime.server.ensure_running()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    events = _connect(socket, listener, key)
    try:
        welcome = _request(socket, events, options, stopped)
        relay = _relay(runtime, options, rdzv, welcome, socket)
        relay.start()
        return _wait(relay, events, signals)
    finally:
        socket.disable_monitor()
        events.close(0)
        context.destroy(linger=2000)
        runtime.close()


def _connect(socket: zmq.Socket[bytes], listener: str, key: bytes) -> zmq.Socket[bytes]:
    """Connect, once; return the socket that reports the end of the connection."""
    encrypted(socket, key, "node")
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.IPV6, 1)
    events: zmq.Socket[bytes] = socket.get_monitor_socket(REFUSALS | zmq.EVENT_DISCONNECTED)
    socket.connect(listener)
    return events


def _request(
    socket: zmq.Socket[bytes],
    events: zmq.Socket[bytes],
    options: LaunchOptions,
    stopped: threading.Event,
) -> wire.Welcome:
    """Ask to join, and wait for the answer. Raises `LaunchError` with the reason if it is no."""
    nproc = place_ranks(options.nproc_per_node, "gloo", os.environ).nproc
    python, torch = versions()
    hello = wire.Joining(name=platform.node(), nproc=nproc, python=python, torch=torch)
    socket.send(wire.encode(hello))
    poller = zmq.Poller()
    for each in (socket, events):
        poller.register(each, zmq.POLLIN)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline and not stopped.is_set():
        ready = dict(poller.poll(100))
        if socket in ready:
            answer = wire.decode_to_node(socket.recv_multipart()[0])
            if isinstance(answer, wire.Welcome):
                return answer
            if isinstance(answer, wire.Refused):
                msg = f"the notebook does not let this node in: {answer.why}"
                raise LaunchError(msg, phase="connect", kind=FailureKind.NODE_REFUSED)
        elif events in ready:
            monitor.recv_monitor_message(events)
            msg = (
                "the notebook does not let this node in: its key is wrong. Copy the notebook's key file, "
                f"and set {KEY_FILE} to its path."
            )
            raise LaunchError(msg, phase="connect", kind=FailureKind.NODE_REFUSED)
    msg = (
        "it was told to stop"
        if stopped.is_set()
        else "the notebook, which has told its address, does not answer"
    )
    raise LaunchError(msg, phase="connect")


def _relay(
    runtime: LocalRuntime,
    options: LaunchOptions,
    rdzv: RendezvousConfig,
    welcome: wire.Welcome,
    socket: zmq.Socket[bytes],
) -> JoinedRelay:
    env = dict(welcome.env)
    env |= rendezvous.network_variables(rdzv, {**os.environ, **env})
    environ = {**os.environ, **env}
    placement = place_ranks(options.nproc_per_node, welcome.backend, environ)
    directory = Path(options.log_dir).absolute() if options.log_dir else runtime.directory.make("logs-")
    directory.mkdir(parents=True, exist_ok=True)
    settings = AgentSettings(
        nproc=placement.nproc,
        role=options.role,
        # The notebook's agent decides when to give up.
        max_restarts=_UNLIMITED,
        monitor_interval=welcome.monitor_interval,
        grace=welcome.grace,
        shutdown_timeout=welcome.shutdown_timeout,
        run_id=options.rdzv_id or "",
        log_dir=directory,
        private_logs=not options.log_dir,
        processes=process_settings(options, environ, runtime.server.loaded_under()),
        rdzv=replace(rdzv, least=welcome.least, most=welcome.most),
    )
    relay = JoinedRelay(runtime, socket, settings, lambda prepare: of_this_machine(prepare, env, placement))
    print(  # noqa: T201 - a command line
        f"nblaunch join: {placement.nproc} ranks of this machine take part in {options.rdzv_id}", flush=True
    )
    return relay


def _wait(relay: JoinedRelay, events: zmq.Socket[bytes], signals: list[int]) -> int:
    """Wait for the end of the run, of the connection, or for signals; return the exit status."""
    leaving = False
    while not relay.ended.wait(0.05):
        if signals and not leaving:
            leaving = True
            relay.left = f"left after {signal.Signals(signals[0]).name}"
            relay.leave()
        elif len(signals) > 1:
            relay.stop(relay.left)
        if events.poll(0):
            monitor.recv_monitor_message(events)
            if not relay.succeeded:
                relay.stop("the notebook is gone, or out of reach")
    relay.join()
    return 0 if relay.succeeded and not relay.left else failed(relay.left or "the run did not succeed", 1)
