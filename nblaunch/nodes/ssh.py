"""Nodes on hosts that ssh reaches, with the user's own configuration of ssh."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch.host.join import PLACE
from nblaunch.nodes.engine import Allocation, Engine, NodeProgram, NodeRequest, own_address
from nblaunch.nodes.process import ProgramPerNode

_PROGRAM = "NBLAUNCH_SSH"
_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ServerAliveInterval=5"),
    # Start no shared connection, which nblaunch would have to end; an existing one is used.
    *("-o", "ControlMaster=no"),
)
_HOST = re.compile(r"(?:(?P<user>[^@]+)@)?(?:\[(?P<six>[^]]+)\]|(?P<name>[^:]+))(?::(?P<port>\d+))?")
_SSH_FAILED, _NO_PROGRAM = 255, (126, 127)
_CONFIG_SECONDS = 1.0


class SshAllocation(ProgramPerNode):
    """Hosts that ssh reaches: there is nothing to wait for."""

    engine = "ssh"

    def command(self, place: int, program: NodeProgram) -> Sequence[str]:
        remote = ["env", f"{PLACE}={place}", self.request.python, *program.arguments]
        return (*_ssh(self.request), *_OPTIONS, *_to(self.hosts[place]), f"exec {shlex.join(remote)}")

    def hint(self, place: int, exitcode: int, words: str) -> str:
        if exitcode == _SSH_FAILED and not words:
            return "It was killed there, or the connection was lost."
        if exitcode == _SSH_FAILED:
            trial = shlex.join([*_ssh(self.request), *_to(self.hosts[place]), "true"])
            # Not with BatchMode, in which ssh asks neither for a password nor whether a host's key is right.
            return f"Run this in a terminal until it succeeds without asking anything: {trial}"
        if exitcode in _NO_PROGRAM:
            return f"The host cannot run {self.request.python}. Give its Python with --node-python."
        return ""


class SshEngine(Engine):
    """`--on ssh=HOST,...`."""

    name: ClassVar[str] = "ssh"

    @staticmethod
    def check(request: NodeRequest) -> None:
        """Raise `OptionError` where there is no ssh."""
        program = _ssh(request)[0]
        if shutil.which(program, path=request.environ.get("PATH")) is None:
            msg = f"--on ssh needs {program}, which is not on the PATH. Run apt-get install openssh-client."
            raise OptionError(msg, kind=FailureKind.NOT_INSTALLED)

    @staticmethod
    def address(request: NodeRequest) -> str:
        return own_address(_addresses(request))

    @staticmethod
    def ask(request: NodeRequest) -> Allocation:
        return SshAllocation(request, request.argument.split(","))


def _ssh(request: NodeRequest) -> list[str]:
    return shlex.split(request.environ.get(_PROGRAM, "")) or ["ssh"]


def _to(host: str) -> list[str]:
    """Return ssh's arguments for a host in `--on`.

    >>> _to("ann@[fe80::1]:2222")
    ['-p', '2222', 'ann@fe80::1']
    """
    parts = _parts(host)
    place = parts["six"] or parts["name"]
    return [
        *(["-p", parts["port"]] if parts["port"] else []),
        f"{parts['user']}@{place}" if parts["user"] else place,
    ]


def _parts(host: str) -> Mapping[str, str]:
    found = _HOST.fullmatch(host)
    return {"user": "", "six": "", "name": host, "port": ""} if found is None else found.groupdict("")


def _addresses(request: NodeRequest) -> Iterator[str]:
    """Yield what the first hosts are called on the network: the user's configuration may have other names."""
    for host in request.argument.split(",")[:2]:
        parts = _parts(host)
        try:
            asked = subprocess.run(  # noqa: S603 - the user's own ssh, which connects to nobody here
                [*_ssh(request), "-G", *_to(host)],
                env=request.environ,
                cwd=request.cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_CONFIG_SECONDS,
                check=False,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            asked = ""
        named = re.search(r"^hostname (\S+)$", asked, flags=re.MULTILINE)
        yield named[1] if named else parts["six"] or parts["name"]
