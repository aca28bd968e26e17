"""Nodes that users start themselves: prints the command to type on each host, and waits."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch.host.key import KEY_FILE
from nblaunch.nodes.engine import Allocation, Engine, NodeProgram, NodeRequest, ProgramStatus, own_address
from nblaunch.protocol.messages import EngineState, EngineStatus

_KEY_BY_STDIN = "--key-stdin"


class JoinAllocation:
    """Nodes that join when a user types the command; the key is in a file until the end."""

    released = True

    def __init__(self, request: NodeRequest) -> None:
        self._request = request
        self._directory = _directory(request)
        self._state = EngineState.GRANTED

    def status(self) -> EngineStatus:
        """Return the same report at all times: these nodes are awaited."""
        return EngineStatus(engine=JoinEngine.name, state=self._state)

    def start(self, program: NodeProgram) -> str:
        """Write the key to a file; return the command that the user has to type."""
        key = self._directory / "join-key"
        try:
            self._directory.mkdir(mode=0o700)
            with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                opened.write(program.stdin)
        except OSError as error:
            msg = f"the nodes' key cannot be written: {error.filename}: {error.strerror}."
            raise LaunchError(msg, phase="engine", kind=FailureKind.NOT_WRITABLE) from error
        self._state = EngineState.WAITING
        words = [each for each in program.arguments if each != _KEY_BY_STDIN]
        least, most = self._request.least, self._request.most
        count = str(most) if least == most else f"{least} to {most}"
        each = "the node" if most == 1 else f"each of the {count} nodes"
        return (
            f"Type this in a terminal of {each}, with a copy of the key file (mode 600) on other machines:\n"
            f"{KEY_FILE}={shlex.quote(str(key))} {shlex.join(['python', *words])}"
        )

    def statuses(self) -> tuple[ProgramStatus, ...]:
        """Return (): users watch these programs themselves."""
        return ()

    def cancel(self) -> None:
        self._state = EngineState.ENDED
        shutil.rmtree(self._directory, ignore_errors=True)


class JoinEngine(Engine):
    """`--on join`."""

    name: ClassVar[str] = "join"

    @staticmethod
    def address(request: NodeRequest) -> str:  # noqa: ARG004 - as for every engine
        return own_address(())

    @staticmethod
    def at_end(request: NodeRequest) -> tuple[str, ...]:
        return ("rm", "-rf", "--", os.fspath(_directory(request)))

    @staticmethod
    def ask(request: NodeRequest) -> Allocation:
        return JoinAllocation(request)


def _directory(request: NodeRequest) -> Path:
    return Path(tempfile.gettempdir(), request.name)
