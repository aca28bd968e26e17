"""`python -m nblaunch join`: this machine's ranks for what a notebook elsewhere runs.

A node joins the rendezvous of a run only after it has proved to the notebook that it has the key, so a node
with another key disturbs no run. With the notebook's own address it joins no rendezvous (`host`).
"""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import platform
import shlex
import signal
import sys
import threading
import time
import uuid
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import zmq
from zmq.utils import monitor

from nblaunch._errors import LaunchError, NblaunchError, OptionError
from nblaunch._inherited import JOIN_KEY, check_start_method
from nblaunch.elastic import rendezvous
from nblaunch.elastic.placement import place_ranks
from nblaunch.elastic.process_options import check_process_options, process_settings
from nblaunch.elastic.settings import AgentSettings, RendezvousConfig
from nblaunch.group.runtime import LocalRuntime, local
from nblaunch.nodes import messages as wire
from nblaunch.nodes.host import NOTICES, NodeHost, OutOfReachError
from nblaunch.nodes.key import KEY_FILE, key_from_stdin, read_key, versions
from nblaunch.nodes.listener import REFUSALS, encrypted
from nblaunch.nodes.node import JoinedRelay, of_this_machine
from nblaunch.options.launch import OPTIONS, LaunchOptions
from nblaunch.options.line import parse_line
from nblaunch.options.table import Option, plain_help

USAGE = """\
usage: python -m nblaunch join HOST:PORT [-n N] [--key-stdin]
       python -m nblaunch join --rdzv-endpoint HOST:PORT --rdzv-id NAME [-n N] [options]

Start N ranks here. With HOST:PORT, as the notebook prints it (--on join), this machine is a node of that
session or run. With --rdzv-endpoint it is a node of the run that a notebook has started with --nnodes and the
same endpoint and name.

The notebook's key is taken from the first line of the standard input (--key-stdin), else from
NBLAUNCH_JOIN_KEY_FILE (a file of mode 0600) or NBLAUNCH_JOIN_KEY, else from a prompt at the terminal.

"""
_KEY_STDIN = "--key-stdin"
_OF_A_NODE = [option for option in OPTIONS if option.scope in ("node", "rendezvous")]
_OF_A_PLACED_NODE = [option for option in OPTIONS if option.name in ("nproc_per_node", "signals_to_handle")]
_ANSWER_SECONDS = 30.0
_UNLIMITED = 2**31 - 1


def join(arguments: Sequence[str]) -> int:
    """Join, and return the exit status: 0 if the run succeeded, 1 if not, 2 for a wrong option."""
    try:
        words = [word for word in arguments if word != _KEY_STDIN]
        endpoint = words.pop(0) if words and not words[0].startswith("-") else ""
        parsed = parse_line(shlex.join(words))
        if parsed.help_wanted:
            print(USAGE + plain_help(_OF_A_NODE))  # noqa: T201 - a command line
            return 0
        from_stdin = _KEY_STDIN in arguments
        if endpoint:
            return _serve_groups(endpoint, parsed.options, from_stdin=from_stdin)
        return _join_run(_checked(parsed.options), from_stdin=from_stdin)
    except OptionError as error:
        return _failed(str(error), 2)
    except OutOfReachError as error:
        return _failed(str(error), 3)
    except NblaunchError as error:
        return _failed(str(error), 1)
    except KeyboardInterrupt:
        return _failed("interrupted before it had joined", 1)


def _failed(why: str, status: int) -> int:
    print(f"nblaunch join: {why}", file=sys.stderr, flush=True)  # noqa: T201 - a command line
    return status


def _refuse_foreign(options: LaunchOptions, own: Container[Option]) -> None:
    foreign = [
        option.flags[0]
        for option in OPTIONS
        if option not in own and getattr(options, option.name) != option.default
    ]
    if foreign:
        msg = (
            f"{foreign[0]} was given, but that is for the notebook to say. Give it there, and leave it "
            "out here."
        )
        raise OptionError(msg)


def _checked(options: LaunchOptions) -> LaunchOptions:
    _refuse_foreign(options, _OF_A_NODE)
    if options.rdzv_id is None:
        msg = "No --rdzv-id was given. Give the name that the notebook's run has."
        raise OptionError(msg)
    check_start_method(options.start_method)
    check_process_options(options, place_ranks(options.nproc_per_node, "gloo", os.environ), os.environ)
    return options


def _serve_groups(endpoint: str, options: LaunchOptions, *, from_stdin: bool) -> int:
    _refuse_foreign(options, _OF_A_PLACED_NODE)
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isdecimal()):
        msg = f"{endpoint!r} is not the address of a notebook. Write HOST:PORT, as the notebook prints it."
        raise OptionError(msg)
    key = _key(from_stdin=from_stdin)
    with _signals(options.signals_to_handle, threading.Event(), NOTICES) as signals:
        return NodeHost(local(), endpoint, key, options).serve(signals, _joined)


def _joined(name: str, nproc: int) -> None:
    # Not to stdout, which may be the user's own if an engine starts this program.
    text = f"nblaunch join: {nproc} ranks of this machine take part, as {name}"
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command line


def _key(*, from_stdin: bool) -> bytes:
    """Return the notebook's key: from the standard input, the environment, or a prompt at the terminal."""
    key = key_from_stdin(sys.stdin.buffer) if from_stdin else read_key(os.environ)
    if key is None and sys.stdin.isatty():
        key = key_from_stdin(io.BytesIO(getpass.getpass("Key of the notebook: ").encode()))
    if key is None:
        msg = (
            f"the notebook's key is needed, and neither {KEY_FILE} nor {JOIN_KEY} is set. "
            "Copy the file that the notebook names, and set the first to its path."
        )
        raise OptionError(msg)
    return key


def _join_run(options: LaunchOptions, *, from_stdin: bool) -> int:
    key = _key(from_stdin=from_stdin)
    rdzv = rendezvous.config_of(options, joining=True)
    assert rdzv is not None  # noqa: S101 - without an endpoint there is an error
    rdzv = replace(rdzv, key=key)
    run_id = options.rdzv_id or ""
    stopped = threading.Event()
    with _signals(options.signals_to_handle, stopped) as signals:
        listener = rendezvous.read_listener(rdzv, run_id, stopped)
        runtime = local()
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
                raise LaunchError(msg, phase="connect")
        elif events in ready:
            monitor.recv_monitor_message(events)
            msg = (
                "the notebook does not let this node in: its key is wrong. Copy the notebook's key file, "
                f"and set {KEY_FILE} to its path."
            )
            raise LaunchError(msg, phase="connect")
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
    return 0 if relay.succeeded and not relay.left else _failed(relay.left or "the run did not succeed", 1)


@contextlib.contextmanager
def _signals(
    names: str, stopped: threading.Event, others: Iterable[signal.Signals] = ()
) -> Iterator[list[int]]:
    """Collect signals instead of dying of them; the first sets `stopped`."""
    received: list[int] = []

    def handle(number: int, _: object) -> None:
        received.append(number)
        stopped.set()

    numbers = {*(signal.Signals[name] for name in names.split(",")), *others}
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
