"""`python -m nblaunch join`: this machine's ranks for what a notebook elsewhere runs.

    the command, without torch         keeper ──> fork server ──> rank, rank, ...
      options, key, signals  <─ link ─> └──────> node program, a fork of the fork server

The command reads its options and the key, has the node program (`host`) forked, passes on its own signals,
and exits with the program's status, once the keeper and all that it kept are gone. If the command is killed,
the keeper ends the rest. So a node imports torch once.

What goes over the link: a `ProgramOrder` with the command's standard output and error, `READY` from the
program; then the number of each signal in a byte, and in the end the exit status.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass

from nblaunch._errors import NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch._inherited import JOIN_KEY
from nblaunch._keeper import Boot, environment, starting
from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.host.key import KEY_FILE, key_from_stdin, read_key
from nblaunch.options.command_line import parse_line
from nblaunch.options.launch import OPTIONS, LaunchOptions
from nblaunch.options.table import Option, plain_help

PLACE = "NBLAUNCH_NODE_PLACE"
"""The variable that tells a node program its place among the engine's nodes."""
HERE, HERE_PLACE = "NBLAUNCH_NODE_HERE", -2
"""The variable that marks the node of the notebook's machine (`--here`), and that node's place."""
AT_END = "NBLAUNCH_NODE_AT_END"
"""The variable with the command by which a node gives the allocation back once its runtime is gone."""
_PLACES = (PLACE, "SLURM_NODEID")

LIVE = "nblaunch.host.node_main:live"
"""The entry point of the node program, by name: the command does not import it."""
READY = b"\xff"
CUT_OFF = 4
"""The exit status of a node whose connection has ended."""
NOTICES = {signal.SIGTERM: 30.0, signal.SIGUSR1: 120.0}
"""Signals by which engines announce the end of a node, and the usual seconds until then.

At SIGTERM the node leaves once its ranks have saved; SIGUSR1 alone ends nothing.
"""

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
_OF_A_PLACED_NODE = [option for option in OPTIONS if option.of_placed_nodes]
# How long a keeper may take that has nothing more to keep.
_END_SECONDS = 5.0
# Until the notebook's machine answers again; and how much later each further node gives the nodes back.
_TRIAL_SECONDS, _TRY_AGAIN_SECONDS = 2.0, 10.0
_LATER_SECONDS, _MOST_LATER_SECONDS = 2.0, 60.0
# The most of a line of JSON that is read at once.
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOrder:
    """The order to a node program."""

    endpoint: str
    """The notebook's HOST:PORT; empty: the rendezvous that the options name."""
    words: tuple[str, ...]
    """The options, as they were given."""
    key: str = ""
    environ: dict[str, str | None]
    """Variables in which the command's environment differs from the fork server's; None: not set."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def receive(link: socket.socket) -> tuple[ProgramOrder, list[int]]:
        """Receive it, with descriptors. Raises `EOFError` if the command has ended."""
        line, fds, _, _ = socket.recv_fds(link, _BLOCK, 2)
        while not line.endswith(b"\n"):
            more = link.recv(_BLOCK)
            if not more:
                raise EOFError
            line += more
        sent = json.loads(line)
        return ProgramOrder(**{**sent, "words": tuple(sent["words"])}), fds


def join(arguments: Sequence[str]) -> int:
    """Join, and return the exit status: 0 if the run succeeded, 1 if not, 2 for a wrong option.

    3 if the machines of other nodes are out of reach.
    """
    try:
        words = [word for word in arguments if word != _KEY_STDIN]
        endpoint = words.pop(0) if words and not words[0].startswith("-") else ""
        parsed = parse_line(shlex.join(words))
        if parsed.help_wanted:
            print(USAGE + plain_help(_OF_A_NODE))  # noqa: T201 - a command line
            return 0
        _check(endpoint, parsed.options)
        key = _key(from_stdin=_KEY_STDIN in arguments).decode()
        order = ProgramOrder(endpoint=endpoint, words=tuple(words), key=key, environ=_own_environment())
        handled = {signal.Signals[name] for name in parsed.options.signals_to_handle.split(",")}
        status = _run(order, handled.union(NOTICES if endpoint else ()))
        if status == CUT_OFF:
            if endpoint:
                _release(endpoint)
            status = 1
    except OptionError as error:
        return failed(str(error), 2)
    except NblaunchError as error:
        return failed(str(error), 1)
    except KeyboardInterrupt:
        return failed("interrupted before it had joined", 1)
    else:
        return status


def failed(why: str, status: int) -> int:
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


def _check(endpoint: str, options: LaunchOptions) -> None:
    if endpoint:
        _refuse_foreign(options, _OF_A_PLACED_NODE)
        host, _, port = endpoint.rpartition(":")
        if not (host and port.isdecimal()):
            msg = (
                f"{endpoint!r} is not the address of a notebook. Write HOST:PORT, as the notebook prints it."
            )
            raise OptionError(msg)
        return
    _refuse_foreign(options, _OF_A_NODE)
    if options.rdzv_id is None:
        msg = "No --rdzv-id was given. Give the name that the notebook's run has."
        raise OptionError(msg)


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
        raise OptionError(msg, kind=FailureKind.NODE_REFUSED)
    return key


def _own_environment() -> dict[str, str | None]:
    servers = environment()
    names = {*os.environ, *servers}
    return {name: os.environ.get(name) for name in names if os.environ.get(name) != servers.get(name)}


def _run(order: ProgramOrder, handled: set[signal.Signals]) -> int:
    with starting():
        ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            boot = _start(theirs)
        with contextlib.closing(boot):
            with contextlib.suppress(BrokenPipeError):
                socket.send_fds(ours, [order.encode()], [1, 2])
            # Until the program is ready, signals end this process, as they would have ended the program.
            status = _next(ours)
            if status == READY:
                with _passing_signals(handled, ours):
                    status = _next(ours)
                    _await_end(boot.keeper)
            else:
                _await_end(boot.keeper)
            return status[0] if status else failed(f"the node's process was lost. {boot.last_words()}", 1)


def _start(link: socket.socket) -> Boot:
    directory = RuntimeDirectory()
    try:
        return Boot(directory.root(), link, LIVE, owner=os.getpid())
    except BaseException:
        directory.remove()
        raise


def _next(link: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return link.recv(1)
    return b""


@contextlib.contextmanager
def _passing_signals(numbers: set[signal.Signals], link: socket.socket) -> Iterator[None]:
    """Pass signals on to the node program instead of dying of them."""

    def handle(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # the program has just ended
            link.send(bytes([number]))

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await_end(keeper: subprocess.Popen[bytes]) -> None:
    """Wait until the keeper has ended its processes, but not for processes that cannot be killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(_END_SECONDS)
    if keeper.poll() is None:
        keeper.kill()
        keeper.wait()


def _release(endpoint: str) -> None:
    """Give the allocation back if the runtime is gone, where the engine has a command for it.

    The runtime's keeper does it, unless all of the user's processes there are killed at once. A port on which
    nothing listens is certain. Silence is not: other nodes may go on with the notebook.
    """
    command = shlex.split(os.environ.get(AT_END, ""))
    if not command:
        return
    while (listens := _listens(endpoint)) is None:
        time.sleep(_TRY_AGAIN_SECONDS)
    if listens:
        return
    # The first node does it, unless it is lost too; then the others have no job any more.
    time.sleep(min(max(place_of(os.environ), 0) * _LATER_SECONDS, _MOST_LATER_SECONDS))
    # The engine may be starting again, as the machine of its notebook is.
    while not _listens(endpoint) and _fails(command):
        time.sleep(_TRY_AGAIN_SECONDS)


def _fails(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, check=False).returncode != 0  # noqa: S603 - the engine's own
    except OSError as error:
        failed(f"the allocation could not be given back: {error}", 1)
        return False


def _listens(endpoint: str) -> bool | None:
    """Whether the port is open; None without an answer."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _TRIAL_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def place_of(environ: Mapping[str, str]) -> int:
    """Return the place that the engine gave this node; -1 if it has none.

    >>> place_of({"SLURM_NODEID": "3"}), place_of({HERE: "1", PLACE: "0"})
    (3, -2)
    """
    if environ.get(HERE):
        return HERE_PLACE
    for name in _PLACES:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return -1


def take_place(environ: MutableMapping[str, str]) -> int:
    """Return this node's place, and remove it: the nodes that a rank starts with `--on` have others."""
    place = place_of(environ)
    for name in (HERE, PLACE, AT_END):
        environ.pop(name, None)
    return place
