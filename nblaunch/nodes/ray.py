"""Nodes of a Ray cluster; a process of its own (`raydriver`) loads ray, never the runtime."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch.nodes.bootstrap import DOING
from nblaunch.nodes.engine import Allocation, Engine, NodeProgram, NodeRequest, ProgramStatus, own_address
from nblaunch.nodes.process import StartedProgram, doing, last_lines
from nblaunch.nodes.raydriver import HINT
from nblaunch.protocol.messages import EngineState, EngineStatus

_DRIVER = Path(__file__).with_name("raydriver.py")
_ADDRESS, _AUTO, _CLIENT = "RAY_ADDRESS", "auto", "ray://"
_CANCEL_SECONDS = 0.3
_CHUNK = 64 * 1024
_C_FRAME = re.compile(r"^\S+\(\S*\+0x[0-9a-f]+\) \[0x[0-9a-f]+\].*\n|^\*\*\* StackTrace .*\n", re.MULTILINE)
"""What ray's C++ core prints when it aborts, after the reason."""


class RayReport(msgspec.Struct, frozen=True):
    """The driver's report; `statuses` are the programs' states after so many `starts`."""

    state: EngineState
    id: str = ""
    words: str = ""
    reason: str = ""
    warning: str = ""
    hosts: tuple[str, ...] = ()
    statuses: tuple[ProgramStatus, ...] = ()
    starts: int = 0


_decode = msgspec.json.Decoder(RayReport).decode


class RayAllocation:
    """A placement group of Ray, and the driver that owns it."""

    released = True

    def __init__(self, request: NodeRequest) -> None:
        self._request = request
        self._report = RayReport(state=EngineState.WAITING, words="starting a driver")
        self._statuses: dict[int, ProgramStatus] = {}
        self._starts = 0
        self._rest = b""
        self._cancelled = False
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-P", os.fspath(_DRIVER), str(theirs.fileno()))
            # Ray would prefer this variable to the address that it is given.
            environ = {name: value for name, value in request.environ.items() if name != _ADDRESS}
            self._driver = StartedProgram(command, environ, os.sep, fds=[theirs.fileno()])
        self._send(
            address=_address(request),
            name=request.name,
            least=request.least,
            most=request.most,
            nproc=request.nproc,
            doing=DOING,
        )

    def status(self) -> EngineStatus:
        self._read()
        report, cancelled = self._report, self._cancelled
        return EngineStatus(
            engine=RayEngine.name,
            state=EngineState.ENDED if cancelled else report.state,
            id=report.id,
            words="given back" if cancelled else last_lines(report.words),
            reason="" if cancelled else report.reason,
            hosts=report.hosts,
            warning=report.warning,
        )

    def start(self, program: NodeProgram) -> str:
        self._read()
        with self._lock:
            self._starts += 1
            for place, host in enumerate(self._report.hosts):
                self._statuses[place] = ProgramStatus(host, place, running=True)
        key, _, rest = program.stdin.partition(b"\n")
        self._send(
            # Ray's workers have the cluster's Python, whose path may differ from the notebook's.
            python=self._request.python if self._request.python_named else "",
            arguments=program.arguments,
            key=key.decode(),
            stdin=base64.b64encode(rest).decode(),
            cwd=self._request.cwd,
        )
        return ""

    def statuses(self) -> tuple[ProgramStatus, ...]:
        self._read()
        return tuple(self._statuses[place] for place in sorted(self._statuses))

    def cancel(self) -> None:
        """End the driver: Ray then takes back its nodes."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
        with contextlib.suppress(OSError):  # it has ended
            self._link.shutdown(socket.SHUT_RDWR)
        self._driver.end_by(time.monotonic() + _CANCEL_SECONDS)
        self._link.close()

    def _send(self, **fields: object) -> None:
        with contextlib.suppress(OSError):  # the driver has ended, as the reader will notice
            self._link.sendall(json.dumps(fields).encode() + b"\n")

    def _read(self) -> None:
        with self._lock:
            while not self._cancelled and self._report.state is not EngineState.ENDED:
                try:
                    data = self._link.recv(_CHUNK, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError:
                    data = b""
                if not data:
                    self._lose()
                    return
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(_decode(line))

    def _take(self, report: RayReport) -> None:
        self._report = report
        if report.starts == self._starts:  # else it has not received the last program yet
            self._statuses = {each.place: _in_words(each) for each in report.statuses}

    def _lose(self) -> None:
        """Treat the driver's end as the end of the allocation: Ray ends what the driver started."""
        words = last_lines(_C_FRAME.sub("", self._driver.printed()))
        if not self._report.id:  # it was still connecting
            words = f"{words}\n{HINT}"
        self._report = replace(
            self._report, state=EngineState.ENDED, words=f"its driver has ended\n{words}".strip(), reason=""
        )


class RayEngine(Engine):
    """`--on ray`."""

    name: ClassVar[str] = "ray"
    reports: ClassVar[bool] = True

    @staticmethod
    def check(request: NodeRequest) -> None:
        needed = {"ray": "ray"} | ({"grpc": "grpcio"} if _address(request).startswith(_CLIENT) else {})
        for module, package in needed.items():
            if importlib.util.find_spec(module) is None:
                msg = f"--on ray needs {package}, which is not installed here. pip install 'nblaunch[ray]'."
                raise OptionError(msg, kind=FailureKind.NOT_INSTALLED)

    @staticmethod
    def address(request: NodeRequest) -> str:
        address = _address(request).removeprefix(_CLIENT)
        if address == _AUTO:
            # As Ray finds it: `ray start` records the cluster that it joined last.
            temporary = (
                request.environ.get("RAY_TMPDIR") or request.environ.get("TMPDIR") or tempfile.gettempdir()
            )
            address = ""
            with contextlib.suppress(OSError):
                address = Path(temporary, "ray", "ray_current_cluster").read_text().strip()
        host = address.rpartition(":")[0].strip("[]")
        return own_address([host] if host else [])

    @staticmethod
    def ask(request: NodeRequest) -> Allocation:
        return RayAllocation(request)


def _in_words(program: ProgramStatus) -> ProgramStatus:
    """Return a status whose words are what the program does, or its last lines."""
    return dataclasses.replace(
        program, words=doing(program.words) if program.running else last_lines(program.words)
    )


def _address(request: NodeRequest) -> str:
    """Return that of the cluster. `local` would start one."""
    address = request.argument or request.environ.get(_ADDRESS, "")
    return address if address not in ("", "local") else _AUTO
