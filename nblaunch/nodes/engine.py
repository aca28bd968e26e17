"""Engines place nodes: the protocol of all engines, a request to one, and options that contradict each other.

An engine starts one node program, `python -m nblaunch join`, on each host that it grants. A `NodeRequest`
carries the caller's environment and directory, because the runtime has its own. An engine's module is loaded
only when `--on` names it, so its programs and packages are needed only then.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch.options.launch import OPTIONS, LaunchOptions
from nblaunch.protocol.messages import EngineStatus

ENGINES: Mapping[str, str] = {
    "process": "nblaunch.nodes.process:ProcessEngine",
    "join": "nblaunch.nodes.byhand:JoinEngine",
    "ssh": "nblaunch.nodes.ssh:SshEngine",
    "slurm": "nblaunch.nodes.slurm:SlurmEngine",
    "ray": "nblaunch.nodes.ray:RayEngine",
}
"""By the name in `--on`: the module, and the class."""

_JOB, _JOB_NODES, _JOB_HOST = "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURMD_NODENAME"
# Addresses reserved for documentation: the default route leads to them.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_NEW_JOB = 'give options of salloc for the nodes of a new job, for example --slurm "-t 30"'
_WILDCARDS = ("0.0.0.0", "::", "::ffff:0.0.0.0", "*")  # noqa: S104 - what is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """A request to an engine. The node of this machine (`--here`) is not part of it."""

    least: int
    most: int
    nproc: int | str
    """Ranks on each node, as `join -n` takes them: a number or a word."""
    name: str
    """The unique name of the engine's job, by which `at_end` finds it."""
    argument: str = ""
    """The part of `--on` after the equals sign."""
    words: tuple[str, ...] = ()
    """The words of `--slurm`."""
    spared: str = ""
    """The host of the surrounding allocation that is the node of this machine (`--here`)."""
    environ: Mapping[str, str]
    """The caller's, not the runtime's; so is `cwd`."""
    cwd: str
    python: str
    """The nodes' Python."""
    longest_wait: float | None = None
    """For how many seconds the engine may leave the request in its queue."""
    python_named: bool = False
    """Whether `--node-python` named it; else it is the notebook's."""


@dataclass(frozen=True, slots=True)
class NodeProgram:
    """What a node runs: the arguments of its Python, which hold no secret, and its standard input.

    The node reads nothing after the key. The end of its standard input does not end the node.
    """

    arguments: tuple[str, ...]
    stdin: bytes


@dataclass(frozen=True, slots=True)
class ProgramStatus:
    """The state of a node program.

    `words` are the last lines that it printed; while it runs, what it does before it joins.
    """

    host: str
    place: int
    running: bool
    exitcode: int | None = None
    words: str = ""


class Allocation(Protocol):
    """A request to an engine, and the nodes that it grants."""

    def status(self) -> EngineStatus:
        """Return the engine's report, in its own words; from any thread, one at a time.

        The engine may take seconds for it: `cancel` ends that wait.
        """

    def start(self, program: NodeProgram) -> str:
        """Start the program on each granted host on which none runs.

        Returns what the user has to do, empty if nothing. Raises `LaunchError` with phase `engine`.
        """

    def statuses(self) -> tuple[ProgramStatus, ...]:
        """Return the state of each program."""

    @property
    def released(self) -> bool:
        """Whether nothing is left of it, once it has been cancelled, for which `at_end` would be needed."""

    def cancel(self) -> None:
        """Withdraw the request, or give the hosts back and end what was started; within 0.5 s.

        From any thread, at any time; the second time it does nothing.
        """


class Engine:
    """Places nodes."""

    name: ClassVar[str]
    reports: ClassVar[bool] = False
    """Whether the engine reports changes by itself, so that polling its status costs nothing."""

    @staticmethod
    def check(request: NodeRequest) -> None:
        """Raise `OptionError` for a request that cannot be met; start nothing, and take less than 50 ms.

        The error for a missing program or package names the command that installs it.
        """

    @staticmethod
    def address(request: NodeRequest) -> str:
        """Return the address of this machine that the nodes reach."""
        raise NotImplementedError

    @staticmethod
    def at_end(request: NodeRequest) -> tuple[str, ...]:  # noqa: ARG004 - for engines that need one
        """Return the command that gives everything back if this process is killed; () if none is needed.

        It may begin with variables, NAME=VALUE each. The caller registers it before `ask`. The keeper ends
        what is below it, a node ends with its connection, and Ray takes back the nodes of a lost driver.
        """
        return ()

    @staticmethod
    def ask(request: NodeRequest) -> Allocation:
        """Ask for the hosts, and return at once; `cancel` ends what this starts."""
        raise NotImplementedError


def own_address(hosts: Iterable[str]) -> str:
    """Return this machine's address on the route to the first of `hosts` that is another machine.

    If none of them has a known address, return the one on the default route.
    """
    found = "127.0.0.1"
    for host in (*hosts, *_ANYWHERE):
        with contextlib.suppress(OSError, UnicodeError):
            family, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.connect(address)  # sends nothing
                found = str(trial.getsockname()[0])
            if not (found.startswith("127.") or found == "::1"):
                return found
    return found


def address_of(host: str, flags: int = socket.AI_ADDRCONFIG) -> str:
    """Return the address that `--local-addr` names; what cannot be resolved, as it is.

    Raises `OptionError` for a wildcard: the ranks' store would be open to every network.

    >>> address_of("127.1")
    '127.0.0.1'
    """
    found = host
    with contextlib.suppress(OSError, UnicodeError):
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)[0][4][0])
    if found in _WILDCARDS:
        msg = f"--local-addr {host} is every address of this machine. Give one, as the nodes reach it."
        raise OptionError(msg, kind=FailureKind.PORT)
    return found


def engine_of(options: LaunchOptions) -> type[Engine]:
    module, _, name = ENGINES[_name(options)].partition(":")
    found: type[Engine] = getattr(importlib.import_module(module), name)
    return found


def requested_nodes(options: LaunchOptions, environ: Mapping[str, str], cwd: str) -> NodeRequest:
    """Return the request to the engine; `environ` and `cwd` are the caller's."""
    least, most = nodes_of(options, environ)
    return NodeRequest(
        least=max(least - options.here, 1),
        most=most - options.here,
        nproc=options.nproc_per_node,
        name=f"nblaunch-{secrets.token_hex(4)}",
        argument=_argument(options),
        words=tuple(shlex.split(options.slurm)),
        spared=_spared(options, environ),
        longest_wait=options.queue_timeout,
        environ=environ,
        cwd=cwd,
        # With --sync-env this Python only makes the nodes' environment.
        python=options.node_python or ("python3" if options.sync_env else sys.executable),
        python_named=options.node_python is not None,
    )


def nodes_of(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the least and the most nodes of a run, with the node of this machine (`--here`).

    Without `--nnodes` they are the hosts of ssh, the nodes of the surrounding allocation, or one; with
    `--here`, one more.
    """
    if options.nodes != (1, 1):
        return options.nodes
    if _name(options) == "ssh":
        count = len(_argument(options).split(","))
    elif _inside(options, environ):
        count = _granted(options, environ)
    else:
        count = 1
    return count + options.here, count + options.here


def refuse_contradictions(options: LaunchOptions, environ: Mapping[str, str]) -> None:
    """Raise `OptionError` if options contradict each other; `environ` is the caller's.

    >>> refuse_contradictions(LaunchOptions(here=True), {})
    Traceback (most recent call last):
        ...
    nblaunch._errors.OptionError: --here was given, but no engine places nodes. Add --on, or leave it out.
    """
    if options.on is None:
        _refuse_without_engine(options)
        return
    _refuse_rendezvous(options)
    name, most, count = _name(options), nodes_of(options, environ)[1], _job_nodes(environ)
    if options.slurm and name != "slurm":
        msg = f"--slurm was given, but --on {name} places the nodes. Leave it out."
    elif _inside(options, environ) and most - options.here > _granted(options, environ):
        msg = (
            f"nnodes={options.nnodes!r} was asked for inside Slurm's job {environ[_JOB]}, which has "
            f"{count} node{'' if count == 1 else 's'}. Ask for fewer, or {_NEW_JOB}."
        )
    elif _inside(options, environ) and most == options.here:
        msg = (
            f"--here was given inside Slurm's job {environ[_JOB]}, whose only node is this machine. Leave it "
            f"out, or {_NEW_JOB}."
        )
    elif name == "ssh" and most != (hosts := len(_argument(options).split(","))) + options.here:
        here = " and this machine" if options.here else ""
        msg = (
            f"nnodes={options.nnodes!r} was asked for, but --on names {hosts} hosts{here}. Leave nnodes out, "
            "or name as many hosts."
        )
    elif options.here and name == "process":
        msg = "--here was given, but all nodes of --on process are on this machine. Leave it out."
    elif options.node_python is not None and name == "join":
        msg = "--node-python was given, but nodes join by a command that you type. Leave it out."
    elif options.sync_env and name == "join":
        msg = (
            "--sync-env was given, but nodes join by a command that you type, in an environment that exists "
            "there. Leave it out."
        )
    else:
        return
    raise OptionError(msg)


def _refuse_without_engine(options: LaunchOptions) -> None:
    for each in OPTIONS:
        if each.scope == "engine" and getattr(options, each.name) != each.default:
            msg = f"{each.flags[0]} was given, but no engine places nodes. Add --on, or leave it out."
            raise OptionError(msg)


def _refuse_rendezvous(options: LaunchOptions) -> None:
    """Refuse options of torch's rendezvous: the runtime is the rendezvous of these nodes."""
    for each in OPTIONS:
        elsewhere = each.name.startswith(("rdzv_", "master_", "node_rank")) and each.name != "rdzv_conf"
        if elsewhere and getattr(options, each.name) != each.default:
            msg = (
                f"{each.flags[0]} and --on {options.on} were given, but nodes that an engine places need no "
                "rendezvous. Leave one of them out."
            )
            raise OptionError(msg)
    if options.local_addr is not None:
        address_of(options.local_addr, socket.AI_NUMERICHOST)  # a name is resolved where it is used


def surrounding_job(environ: Mapping[str, str], words: object) -> str:
    """Return the number of the caller's Slurm job; "" outside of one, and where `--slurm` asks for a new one.

    >>> surrounding_job({"SLURM_JOB_ID": "12"}, ()), surrounding_job({"SLURM_JOB_ID": "12"}, ("-t", "30"))
    ('12', '')
    """
    return "" if words else environ.get(_JOB, "")


def _name(options: LaunchOptions) -> str:
    return (options.on or "").partition("=")[0]


def _argument(options: LaunchOptions) -> str:
    return (options.on or "").partition("=")[2]


def _inside(options: LaunchOptions, environ: Mapping[str, str]) -> bool:
    return _name(options) == "slurm" and bool(surrounding_job(environ, options.slurm))


def _spared(options: LaunchOptions, environ: Mapping[str, str]) -> str:
    return environ.get(_JOB_HOST, "") if options.here and _inside(options, environ) else ""


def _granted(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Return how many nodes the surrounding allocation has, without the one of `--here`."""
    return _job_nodes(environ) - bool(_spared(options, environ))


def _job_nodes(environ: Mapping[str, str]) -> int:
    count = environ.get(_JOB_NODES, "")
    return int(count) if count.isdecimal() else 1
