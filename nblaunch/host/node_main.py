"""The node program, a fork of its fork server: a node's connection, and a relay for each group; main thread.

The command (`join`) has started the fork server, passes signals on, and exits with this program's status.
An engine has placed it, or it joins one run at an endpoint, where torch's rendezvous decides who takes part.
It connects once. When the connection ends, the node ends with all that it has started; the runtime starts a
new node program if it needs a replacement.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import math
import os
import platform
import shlex
import signal
import socket as sockets
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import zmq
from zmq.utils import monitor

from nblaunch import _devices
from nblaunch._errors import LaunchError, NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch._inherited import check_start_method, encoded, working_directory
from nblaunch._locks import boot_id
from nblaunch._runtime_dir import remove_tree
from nblaunch._version import __version__
from nblaunch.host import descriptors, rendezvous, wire
from nblaunch.host.code import NodeCode
from nblaunch.host.forkserver import server_of_fork
from nblaunch.host.join import CUT_OFF, NOTICES, READY, ProgramOrder, failed, take_place
from nblaunch.host.key import KEY_FILE
from nblaunch.host.link import LONGEST_SILENCE_SECONDS, REFUSALS, DataSocket, encrypted
from nblaunch.host.local_host import LocalHost
from nblaunch.host.placement import own_gpus, place_ranks
from nblaunch.host.process_options import (
    check_process_options,
    needs_new_python,
    process_settings,
    unheeded,
)
from nblaunch.host.reach import Probe, interfaces, try_all
from nblaunch.host.relay import NodeRelay, of_this_machine, orders_of, send_to_notebook
from nblaunch.host.settings import AgentSettings, ProcessSettings, RendezvousConfig
from nblaunch.host.wire import Inventory
from nblaunch.options.command_line import parse_line
from nblaunch.options.kinds import port_range
from nblaunch.options.launch import OPTIONS, LaunchOptions
from nblaunch.protocol.client import Placement
from nblaunch.protocol.messages import ProtocolError

_ANSWER_SECONDS = 30.0
_POLL_MS = 50
_OUTPUT_SECONDS = 0.05
_LEAVE_SECONDS = 5.0
_TRIAL_SECONDS = 2.0
_LINGER_MS = 2000
_UNLIMITED = 2**31 - 1
# After this time the engine probably knows, and names, what ended the node.
_NAMED_SECONDS = 1.0
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
        status = _serve(LocalHost(server), order, link)
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


def _serve(runtime: LocalHost, order: ProgramOrder, link: sockets.socket) -> int:
    options = parse_line(shlex.join(order.words)).options
    key = order.key.encode()
    signals: list[int] = []
    stopped = threading.Event()
    try:
        if order.endpoint:
            _take_signals(link, signals, stopped)
            return NodeHost(runtime, order.endpoint, key, options).serve(signals)
        check_start_method(options.start_method)
        here = place_ranks(options.nproc_per_node, "gloo", os.environ)
        check_process_options(options, here, os.environ)
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
    """Have the command pass on its signals; the first sets `stopped`. If it ends, so does this process."""

    def take() -> None:
        while number := link.recv(1):
            signals.append(number[0])
            stopped.set()

    link.send(READY)
    threading.Thread(target=take, name="nblaunch-signals", daemon=True).start()


def _join_run(
    runtime: LocalHost, options: LaunchOptions, key: bytes, signals: list[int], stopped: threading.Event
) -> int:
    """Be a node of the run at an endpoint, whose store or etcd server has the address of the listener."""
    rdzv = rendezvous.config_of(options, joining=True)
    assert rdzv is not None  # noqa: S101 - without an endpoint there is an error
    rdzv = replace(rdzv, key=key)
    listener = rendezvous.read_listener(rdzv, options.rdzv_id or "", stopped).removeprefix("tcp://")
    return NodeHost(runtime, listener, key, options, rdzv).serve(signals)


def this_machine(placement: Placement) -> Inventory:
    driver, gpus = _gpus()
    ranks = placement.nproc if placement.device_type == "cuda" else 0
    return Inventory(
        python=platform.python_version(),
        torch=str(torch.__version__),
        nblaunch=__version__,
        boot=f"{boot_id() or psutil.boot_time()} {platform.node()}",
        backend=placement.backend,
        device_type=placement.device_type,
        nccl=".".join(map(str, _devices.nccl_version())) if torch.version.cuda else "",
        cuda=torch.version.cuda or "",
        driver=driver,
        glibc=platform.libc_ver()[1],
        gpus=gpus,
        own_gpus=own_gpus(ranks, os.environ),
    )


def _gpus() -> tuple[str, tuple[str, ...]]:
    """Return the driver's version and the models of the GPUs, from NVML, which does not initialize CUDA."""
    with contextlib.suppress(Exception):  # the module, a driver or permission is missing
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(each) for each in range(nvml.nvmlDeviceGetCount())]
            return nvml.nvmlSystemGetDriverVersion(), tuple(map(nvml.nvmlDeviceGetName, handles))
        finally:
            nvml.nvmlShutdown()
    return "", ()


class OutOfReachError(LaunchError):
    """There is no answer at the notebook's address."""


class CutOffError(LaunchError):
    """The connection to the runtime has ended, and no signal had this node leave before."""


class NodeHost:
    """Connects, and serves groups until the runtime has finished with this node, or is gone."""

    def __init__(
        self,
        runtime: LocalHost,
        listener: str,
        key: bytes,
        options: LaunchOptions,
        rdzv: RendezvousConfig | None = None,
    ) -> None:
        """Prepare; `listener` is the runtime's HOST:PORT, `options` are those of `join`.

        `rdzv` is torch's rendezvous, for a node that joins one run there.
        """
        self._runtime, self._endpoint, self._key, self._options = runtime, listener, key, options
        self._rdzv = rdzv
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._name, self._address, self._clock, self._nproc = platform.node(), "", 0.0, 0
        self._place, self._ports = -1, port_range(options.ports)
        self._connected, self._silence = -1, LONGEST_SILENCE_SECONDS
        """The connection's descriptor, which ZMQ owns, and the limit of its silence in seconds."""
        self._data: DataSocket | None = None
        self._relays: dict[str, NodeRelay] = {}
        self._code = NodeCode(
            runtime.directory.make("code-"),
            self._send,
            lambda work, then: runtime.hub.run_aside("nblaunch-code", work, then),
        )
        self._next_poll = 0.0
        self._finished = self._cut_off = False
        self._why = ""
        """Why this node ends before the runtime has finished with it."""
        self._signals: Sequence[int] = ()
        self._noticed = 0
        """How many of the signals have been handled."""
        self._leaves_since, self._save_seconds = math.inf, 0.0
        """When a signal had this node leave (monotonic), and for how many seconds its ranks may save."""
        self._at_once = False

    def serve(self, signals: Sequence[int]) -> int:
        """Return 0 once the runtime has finished with this node; at an endpoint, if the run has succeeded.

        The caller appends the signals that this process gets to `signals`. Raises `OutOfReachError` if there
        is no answer, and `LaunchError` if the notebook refuses the node, or it ends for another reason.
        """
        self._signals = signals
        # Before any process starts, which would have it.
        self._place = take_place(os.environ)
        self._runtime.server.ensure_running()
        events = self._connect()
        try:
            self._arrive(events, signals)
            self._tell_joined()
            hub = self._runtime.hub
            hub.call(lambda: hub.watch(self._socket, self._receive))
            hub.after_turn.append(self._flush)
            self._wait(events)
            self._end_groups()
        finally:
            with contextlib.suppress(LaunchError):
                self._runtime.hub.run(self._stop_listening, _LEAVE_SECONDS)
            # Last: when the connection ends, the engine may kill what is left here, the keeper included.
            self._runtime.close()
            self._socket.disable_monitor()
            events.close(0)
            self._context.destroy(linger=0 if self._cut_off else _LINGER_MS)
        if self._why:
            kind = CutOffError if self._cut_off and not signals else LaunchError
            raise kind(self._why, phase="job")
        return 0

    # --- on the main thread: in, and out -----------------------------------------------------------

    def _connect(self) -> zmq.Socket[bytes]:
        """Connect once; return the socket that reports when the connection begins and ends."""
        encrypted(self._socket, self._key, "node", LONGEST_SILENCE_SECONDS)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.IPV6, 1)
        watched = REFUSALS | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
        events: zmq.Socket[bytes] = self._socket.get_monitor_socket(watched)
        self._socket.connect(f"tcp://{self._endpoint}")
        return events

    def _arrive(self, events: zmq.Socket[bytes], signals: Sequence[int]) -> None:
        """Ask for admission, and wait for the answer. Raises `LaunchError` with the reason of a refusal."""
        poller = zmq.Poller()
        for each in (self._socket, events):
            poller.register(each, zmq.POLLIN)
        asked, deadline = 0.0, time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not signals:
            ready = dict(poller.poll(_POLL_MS))
            if self._socket in ready:
                self._take_answer(self._socket.recv_multipart()[0], asked)
                _limit_silence(self._connected, self._silence)
                return
            if events not in ready:
                continue
            event = monitor.recv_monitor_message(events)
            if event["event"] == zmq.EVENT_CONNECTED:
                self._connected = event["value"]
                try:
                    self._address = _own_end(self._connected)
                except OSError as error:  # it has ended already
                    raise _refused() from error
                self._data = self._data_socket() if self._rdzv is None else None
                asked = time.time()
                send_to_notebook(self._socket, self._arriving())
            elif self._address:
                raise _refused()
            else:
                break
        if signals:
            msg = f"ended by {signal.Signals(signals[0]).name} before it was let in"
            raise LaunchError(msg, phase="connect")
        raise OutOfReachError(_unanswered(self._endpoint), phase="connect")

    def _tell_joined(self) -> None:
        text = f"nblaunch join: {self._nproc} ranks of this machine take part"
        if self._rdzv is not None:
            print(f"{text} in {self._options.rdzv_id}", flush=True)  # noqa: T201 - a command line
        else:
            # Not to stdout, which may be the user's own if an engine starts this program.
            print(f"{text}, as {self._name}", file=sys.stderr, flush=True)  # noqa: T201 - as above

    def _data_socket(self) -> DataSocket:
        return DataSocket(
            self._runtime.hub,
            self._key,
            host=self._address,
            ports=self._ports,
            received=self._obey,
            lost=lambda group, number: self._send(wire.PieceLost(group=group, number=number)),
        )

    def _arriving(self) -> wire.Arriving:
        placement = place_ranks(self._options.nproc_per_node, "auto", os.environ)
        self._nproc = placement.nproc
        return wire.Arriving(
            name=self._name,
            nproc=placement.nproc,
            address=self._address,
            data=self._data.address if self._data is not None else "",
            inventory=this_machine(placement),
            place=self._place,
        )

    def _take_answer(self, data: bytes, asked: float) -> None:
        try:
            answer = wire.decode_to_node(data)
        except ProtocolError as error:
            msg = f"the notebook has another version of nblaunch ({error}). Install the notebook's here."
            raise LaunchError(msg, phase="connect", kind=FailureKind.OTHER_VERSION) from error
        if isinstance(answer, wire.Admitted):
            self._name, self._silence = answer.name, answer.silence
            if self._data is not None:
                self._data.silence = answer.silence
            now = time.time()
            ahead = answer.now - (asked + now) / 2
            # A difference below the round-trip time is noise.
            self._clock = ahead if abs(ahead) > now - asked else 0.0
            return
        why = answer.why if isinstance(answer, wire.Refused) else "its answer is invalid"
        msg = f"the notebook does not let this node in: {why}"
        raise LaunchError(msg, phase="connect", kind=FailureKind.NODE_REFUSED)

    def _wait(self, events: zmq.Socket[bytes]) -> None:
        end_by, hub = math.inf, self._runtime.hub
        while not self._finished:
            if not hub.usable:
                self._why = f"the ranks' socket broke: {hub.error}"
                return
            if events.poll(_POLL_MS):
                monitor.recv_monitor_message(events)
                # Its last orders may not have been read yet. One that fails now changes nothing: the node
                # ends as one that was cut off, which gives the allocation back.
                with contextlib.suppress(Exception):
                    hub.run(self._receive, _LEAVE_SECONDS)
                if not self._finished:
                    self._cut_off = True
                    self._end_with("the notebook is gone, or out of reach")
                return
            for relay in [each for each in self._relays.values() if each.ended.is_set()]:
                if self._rdzv is not None:
                    self._end_with(relay.left or "the run did not succeed")
                self._close(relay)
            if len(self._signals) > self._noticed:
                hub.call(self._check_signals)
            if end_by == math.inf and self._leaves(time.monotonic()):
                end_by = time.monotonic() + _LEAVE_SECONDS
                hub.call(lambda: self._send(wire.Leaving()))
            if self._at_once or time.monotonic() > end_by:
                return

    def _end_with(self, why: str) -> None:
        """End for this reason, unless a run at an endpoint has all that it wanted of this node."""
        done = any(each.succeeded and not each.left for each in self._relays.values())
        self._finished = True
        if not (self._why or (done and self._rdzv is not None)):
            self._why = why

    def _leaves(self, now: float) -> bool:
        """Whether a signal has it leave now: its ranks have saved, or their time is over."""
        since, longest = now - self._leaves_since, self._save_seconds
        saved = all(relay.saved for relay in list(self._relays.values()))
        return since >= longest or (saved and since >= min(_NAMED_SECONDS, longest))

    def _end_groups(self) -> None:
        """End the remaining groups; ranks that were released as succeeded end by themselves."""
        with contextlib.suppress(LaunchError):
            self._runtime.hub.run(self._stop_obeying, _LEAVE_SECONDS)
        for relay in self._relays.values():
            if not relay.succeeded:
                relay.stop(self._why or "the run is over")
        for relay in list(self._relays.values()):
            relay.ended.wait(relay.longest_end)
            self._close(relay)

    def _close(self, relay: NodeRelay) -> None:
        relay.join()
        del self._relays[relay.name]
        self._runtime.hub.call(functools.partial(self._code.release, relay.name))
        if self._data is not None:
            self._runtime.hub.call(functools.partial(self._data.drop, relay.name))

    # --- on the hub's thread -----------------------------------------------------------------------

    def _send(self, message: wire.FromNode, data: memoryview | bytes | None = None) -> None:
        if isinstance(message, wire.Gone):
            self._check_signals()  # a rank's exit may be due to the same signal
        send_to_notebook(self._socket, message, data)

    def _check_signals(self) -> None:
        """Report new signals: the ranks are to save, or this node is to leave."""
        for number in self._signals[self._noticed :]:
            self._noticed += 1
            name, warns = signal.Signals(number).name, number == signal.SIGUSR1 and self._rdzv is None
            # The nodes of an endpoint leave at once: no engine has announced anything.
            seconds = NOTICES.get(signal.Signals(number), 0.0) if self._rdzv is None else 0.0
            if not warns and self._why:
                # Slurm sends SIGTERM twice.
                twice = number == signal.SIGTERM and time.monotonic() < self._leaves_since + _NAMED_SECONDS
                self._at_once = self._at_once or not twice
                continue
            if not warns:
                self._why, self._save_seconds = f"left after {name}", seconds
                self._leaves_since = time.monotonic()
            if seconds:
                send_to_notebook(
                    self._socket, wire.NodeEnding(seconds=seconds, words=f"got {name}", leaves=not warns)
                )

    def _stop_obeying(self) -> None:
        self._runtime.hub.watch(self._socket, None)

    def _stop_listening(self) -> None:
        self._stop_obeying()
        if self._data is not None:
            self._data.close()

    def _flush(self) -> float:
        """Send what ranks have sent, and what they have printed; return in how many seconds to look again."""
        now, relays = time.monotonic(), list(self._relays.values())
        if now >= self._next_poll:
            self._next_poll = now + _OUTPUT_SECONDS
            for relay in relays:
                relay.send_output()
        for relay in relays:
            relay.flush()
        return self._next_poll - now if relays else math.inf

    def _receive(self) -> None:
        for message, data in orders_of(self._socket):
            self._obey(message, data)

    def _obey(self, message: wire.ToNode, data: memoryview) -> None:
        match message:
            case wire.OpenGroup():
                self._open(message)
            case wire.HaveCode() | wire.CodeFiles() | wire.Piece(group=""):
                self._code.receive(message, data)
            case wire.Finish(succeeded=succeeded):
                if self._rdzv is not None and not succeeded:
                    self._why = self._why or "the run is over, and did not succeed"
                self._finished = True
            case wire.OpenProbe():
                # It closes by itself.
                probe = Probe(self._address, self._key, self._ports)
                self._send(wire.ProbeOpen(port=probe.port, interfaces=interfaces()))
            case wire.Try(targets=targets):
                self._runtime.hub.run_aside(
                    "nblaunch-reach",
                    lambda: try_all(targets, self._address, self._key),
                    lambda results: self._send(wire.Reachable(results=results)),
                )
            case wire.Refused(why=why):
                self._finished, self._why = True, why
            case _:
                relay = self._relays.get(getattr(message, "group", ""))
                if relay is not None:
                    relay.obey(message, data)

    def _open(self, opened: wire.OpenGroup) -> None:
        try:
            relay = self._relay(opened)
        except Exception as error:  # noqa: BLE001 - the notebook gets it
            self._send(wire.NodeEnded(group=opened.group, error=f"{type(error).__name__}: {error}"))
            if self._rdzv is not None:
                # It came for this run alone.
                self._end_with(str(error))
            return
        self._relays[opened.group] = relay
        relay.start()

    def _relay(self, opened: wire.OpenGroup) -> NodeRelay:
        rdzv, (least, most) = self._rdzv, opened.nodes
        if rdzv is not None:
            rdzv = replace(rdzv, least=least, most=most, local_addr=rdzv.local_addr or self._address)
        env = dict(opened.env)
        env |= rendezvous.network_variables(
            self._address if rdzv is None else rdzv.local_addr, {**os.environ, **env}
        )
        environ = {**os.environ, **env}
        options, loaded_under = self._options, self._runtime.server.loaded_under()
        if self._rdzv is None:
            processes = _processes(opened.processes, environ, loaded_under)
            run_id, told = opened.group, opened.options
        else:
            processes = process_settings(options, environ, loaded_under)
            own = {each.name: getattr(options, each.name) for each in OPTIONS if each.scope == "node"}
            run_id, told = options.rdzv_id or "", replace(opened.options, **own)
        alone = told.virtual_local_rank
        placement = place_ranks(options.nproc_per_node, opened.backend, environ, virtual_local_rank=alone)
        descriptors.make_room(placement.nproc)
        forked = self._rdzv is None and processes.start_method == "forkserver"
        logs = Path(options.log_dir).absolute() if options.log_dir else self._runtime.directory.make("logs-")
        logs.mkdir(parents=True, exist_ok=True)
        settings = AgentSettings(
            nproc=placement.nproc,
            # The notebook decides when to give up.
            options=replace(told, max_restarts=_UNLIMITED),
            run_id=run_id,
            log_dir=logs,
            private_logs=not options.log_dir,
            processes=processes,
            rdzv=rdzv,
            directed_at=self._address if rdzv is None else "",
            replaces=rdzv is None and opened.keep,
        )
        try:
            return NodeRelay(
                self._runtime,
                self._send,
                settings,
                lambda prepare: of_this_machine(prepare, env, placement, _directory(opened)),
                code=self._code,
                opened=opened,
                node=self._name,
                clock=self._clock,
                note=unheeded(environ, loaded_under) if forked else "",
            )
        except BaseException:
            if settings.private_logs:
                remove_tree(logs)
            raise


def _directory(opened: wire.OpenGroup) -> bytes:
    """Return the ranks' directory: the notebook's, if it exists here; at an endpoint, this process's."""
    if not opened.cwd:
        return working_directory()
    # Slurm gives nodes the notebook's HOME, which may not be there either.
    home = os.path.expanduser(b"~")
    return next(filter(os.path.isdir, (opened.cwd, home)), os.fsencode(tempfile.gettempdir()))


def _processes(
    processes: ProcessSettings, environ: Mapping[str, str], loaded_under: Mapping[str, str]
) -> ProcessSettings:
    if torch.backends.cuda.is_built() and needs_new_python(environ, loaded_under):
        processes = replace(processes, start_method="spawn")
    return replace(processes, environ=encoded(environ) if processes.start_method == "spawn" else ())


def _refused() -> LaunchError:
    msg = (
        "the notebook does not let this node in: its key is wrong. Copy the notebook's key file, and set "
        f"{KEY_FILE} to its path."
    )
    return LaunchError(msg, phase="connect", kind=FailureKind.NODE_REFUSED)


def _own_end(fd: int) -> str:
    with sockets.socket(fileno=os.dup(fd)) as connection:
        return str(connection.getsockname()[0]).removeprefix("::ffff:")


def _limit_silence(fd: int, seconds: float) -> None:
    """Have the system end a connection if the other side does not acknowledge data for `seconds`.

    ZMQ's heartbeats alone do not suffice: a message that follows a heartbeat cancels its timeout until the
    next heartbeat, which may never come.
    """
    option = getattr(sockets, "TCP_USER_TIMEOUT", None)
    if option is not None:
        with sockets.socket(fileno=os.dup(fd)) as connection:
            connection.setsockopt(sockets.IPPROTO_TCP, option, int(1000 * seconds))


def _unanswered(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    why = "no answer"
    try:
        sockets.create_connection((host.strip("[]"), int(port)), _TRIAL_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error)
    return (
        f"nobody answers at {endpoint}, where the notebook listens: {why}. Let TCP from this machine through "
        "a firewall, or choose an address on a common network with the notebook's --local-addr."
    )
