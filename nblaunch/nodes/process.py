"""The simplest engine: nodes are processes of this machine, as is the node of `--here`."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch

from nblaunch._devices import some_alone
from nblaunch._errors import LaunchError, OptionError
from nblaunch.host.join import PLACE
from nblaunch.host.placement import visible_gpus
from nblaunch.nodes.bootstrap import DOING
from nblaunch.nodes.engine import Allocation, Engine, NodeProgram, NodeRequest, ProgramStatus
from nblaunch.protocol.messages import EngineState, EngineStatus

_PER_CPU = 4
_PIPE_BYTES = 4096
"""The least capacity of a pipe."""
# Of what a program has printed.
_LAST_LINES, _LAST_BYTES = 10, 256 * 1024
_TERM_SECONDS, _KILL_SECONDS = 0.3, 0.1


class StartedProgram:
    """A program that runs on this machine, with its output.

    It is a descendant of the keeper, which ends it if this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        cwd: str,
        stdin: bytes = b"",
        *,
        fds: Sequence[int] = (),
    ) -> None:
        """Start it; it inherits the descriptors `fds`. Raises `LaunchError` if the system refuses."""
        # A file: a full pipe would block the program.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the program has ended
        self._words, self._size, self._lock = "", 0, threading.Lock()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - what the user has asked for
                command,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                env=environ,
                cwd=cwd,
                pass_fds=fds,
                # The stop button's SIGINT goes to the kernel's process group.
                start_new_session=True,
            )
        except OSError as error:
            self._printed.close()
            msg = f"{command[0]} could not be started in {cwd}: {error.strerror}: {error.filename}."
            raise LaunchError(msg, phase="engine") from error
        if len(stdin) <= _PIPE_BYTES:
            self._feed(stdin)
        else:  # a program may read the rest late, or never
            threading.Thread(target=self._feed, args=[stdin], name="nblaunch-stdin", daemon=True).start()

    def _feed(self, stdin: bytes) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
                pipe.write(stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def printed(self) -> str:
        """Return the end of what it has printed."""
        with self._lock:
            if not self._printed.closed:
                fd = self._printed.fileno()
                if (size := os.fstat(fd).st_size) != self._size:
                    start = max(size - _LAST_BYTES, 0)
                    self._words = os.pread(fd, _LAST_BYTES, start).decode(errors="replace")
                    self._size = size
            return self._words

    def terminate(self) -> None:
        """Send it SIGTERM, if it runs."""
        self._process.terminate()

    def end_by(self, deadline: float) -> None:
        """Wait until it has ended, and kill it at the deadline (of the monotonic clock)."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                # A process with much memory, or on a busy machine, ends a moment later.
                threading.Thread(target=self._process.wait, name="nblaunch-reap", daemon=True).start()
        self.printed()
        with self._lock:
            self._printed.close()


def end_all(programs: Iterable[StartedProgram]) -> None:
    """End programs together within 0.4 s: SIGTERM first, then SIGKILL."""
    programs = tuple(programs)
    for each in programs:
        each.terminate()
    deadline = time.monotonic() + _TERM_SECONDS
    for each in programs:
        each.end_by(deadline)


def last_lines(text: str) -> str:
    """Return the last lines that a program printed, without empty lines and progress."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(DOING)]
    return "\n".join(lines[-_LAST_LINES:])


def doing(printed: str) -> str:
    """Return what a program that makes its environment does, from its last line; empty for others.

    >>> doing("nblaunch is installing 143 packages")
    'installing 143 packages'
    """
    line = printed.rstrip().rpartition("\n")[2]
    return line[len(DOING) :] if line.startswith(DOING) else ""


class ProgramPerNode:
    """Nodes with one local program each: the node itself, or ssh."""

    engine: ClassVar[str]
    released = True

    def __init__(self, request: NodeRequest, hosts: Sequence[str]) -> None:
        self.request, self.hosts = request, tuple(hosts)
        self._running: dict[int, StartedProgram] = {}
        self._cancelled = False

    def command(self, place: int, program: NodeProgram) -> Sequence[str]:
        raise NotImplementedError

    def devices(self, place: int) -> Mapping[str, str]:  # noqa: ARG002 - for engines that divide a machine
        """Return the variables that choose the GPUs of the node at this place."""
        return {}

    def hint(self, place: int, exitcode: int, words: str) -> str:  # noqa: ARG002 - for engines that know more
        """Return what to do about this end of a program; empty if its own last lines suffice."""
        return ""

    def status(self) -> EngineStatus:
        state = EngineState.ENDED if self._cancelled else EngineState.GRANTED
        return EngineStatus(engine=self.engine, state=state, hosts=self.hosts)

    def start(self, program: NodeProgram) -> str:
        for place in range(len(self.hosts)):
            before = self._running.get(place)
            if before is not None and before.exitcode is None:
                continue
            if before is not None:
                before.end_by(time.monotonic())
            environ = {**self.request.environ, PLACE: str(place), **self.devices(place)}
            command = self.command(place, program)
            self._running[place] = StartedProgram(command, environ, self.request.cwd, program.stdin)
            if self._cancelled:  # by another thread, meanwhile
                end_all([self._running[place]])
                break
        return ""

    def statuses(self) -> tuple[ProgramStatus, ...]:
        return tuple(self._program_status(place, program) for place, program in sorted(self._running.items()))

    def _program_status(self, place: int, program: StartedProgram) -> ProgramStatus:
        code = program.exitcode
        if code is None:
            return ProgramStatus(self.hosts[place], place, running=True, words=doing(program.printed()))
        printed = last_lines(program.printed())
        words = "\n".join(filter(None, (printed, self.hint(place, code, printed))))
        return ProgramStatus(self.hosts[place], place, running=False, exitcode=code, words=words)

    def cancel(self) -> None:
        self._cancelled = True
        end_all(self._running.copy().values())


class ProcessAllocation(ProgramPerNode):
    """Nodes that are processes of this machine."""

    engine = "process"

    def command(self, place: int, program: NodeProgram) -> Sequence[str]:  # noqa: ARG002 - all are alike
        return (self.request.python, *program.arguments)

    def devices(self, place: int) -> Mapping[str, str]:
        """Return an equal part of the GPUs, as if each node were a machine.

        If there are too few for that, all nodes see all of them.
        """
        nodes, environ, nproc = self.request.most, self.request.environ, self.request.nproc
        part = visible_gpus(environ, each_alone=True) // nodes if nodes > 1 else 0
        if part < (nproc if isinstance(nproc, int) else 1):
            return {}
        places = range(place * part, (place + 1) * part)
        return some_alone(environ, places, hip=torch.version.hip is not None)


class ProcessEngine(Engine):
    """`--on process`."""

    name: ClassVar[str] = "process"

    @staticmethod
    def check(request: NodeRequest) -> None:
        """Raise `OptionError` for more nodes than a machine can have, and for a missing Python."""
        cpus = os.cpu_count() or 1
        if request.most > _PER_CPU * cpus:
            msg = (
                f"{request.most} nodes were asked for on this machine, which has {cpus} CPUs and takes at "
                f"most {_PER_CPU} nodes for each. Ask for fewer, or place them on other machines."
            )
            raise OptionError(msg)
        if shutil.which(request.python, path=request.environ.get("PATH")) is None:
            msg = f"--node-python names {request.python!r}, which is not a program. Correct the path."
            raise OptionError(msg)

    @staticmethod
    def address(request: NodeRequest) -> str:  # noqa: ARG004 - as for every engine
        return "127.0.0.1"

    @staticmethod
    def ask(request: NodeRequest) -> Allocation:
        host = platform.node()
        names = [f"{host}-{number}" for number in range(1, request.most + 1)]
        return ProcessAllocation(request, names if request.most > 1 else [host])
