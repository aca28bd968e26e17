"""The notebook's Python environment for nodes (`--sync-env`): the standard input of a node program.

Any Python on the node runs `bootstrap`. Its source and all that it needs follow the key on the standard
input, so no command line holds the key or the password of an index.

    key, a line
    the size of bootstrap's source, a line; the source
    the environment, a line of JSON; the files that it names
    the program uv, which only a host without uv reads
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import time
from pathlib import Path

import msgspec

from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch._runtime_dir import remove_tree
from nblaunch.nodes import bootstrap
from nblaunch.nodes.engine import NodeProgram, NodeRequest
from nblaunch.nodes.process import StartedProgram, last_lines
from nblaunch.protocol.client import NodeEnvironment

_DIGEST_BYTES = 16
_LOADER = (
    "import sys; sys.version_info < (3, 8) and sys.exit('--sync-env needs Python 3.8 or newer on the node: "
    "name one with --node-python'); s = sys.stdin.buffer; k = s.readline(); "
    "i = int(s.readline() or 0); c = s.read(i); "
    f"len(c) == i > 0 or sys.stderr.write('{bootstrap.ABANDONED}\\n') and sys.exit({bootstrap.FAILED}); "
    f"n = {{'__name__': 'bootstrap'}}; exec(c, n); n['{bootstrap.MAIN}'](k, s, sys.argv[1:])"
)

_PIP = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check")
_REQUIREMENTS, _WHEELS = "exact.txt", "wheels"


def name_of(environment: NodeEnvironment) -> str:
    """Return an environment's name, a hash of its content; where packages come from does not matter."""
    digests = tuple((name, _digest(content)) for name, content in environment.files)
    packages = (environment.platform, environment.python, environment.requirements, digests)
    return _digest(msgspec.msgpack.encode(packages))


def made_before(
    program: NodeProgram, environment: NodeEnvironment, wheels: tuple[tuple[str, bytes], ...] = ()
) -> NodeProgram:
    """Return a program that makes an environment and then runs a node program in it.

    With the `wheels` of all its requirements, it asks no index.
    """
    source = Path(bootstrap.__file__).read_bytes()
    uv = Path(os.fsdecode(environment.uv)).read_bytes() if environment.uv else b""
    files = (*environment.files, *wheels)
    order = {
        "name": name_of(environment),
        "platform": environment.platform,
        "python": environment.python,
        "requirements": () if wheels else environment.requirements,
        "sources": () if wheels else environment.sources,
        "files": [(name, len(content)) for name, content in files],
        "uv": {"name": _digest(uv), "size": len(uv)} if uv else None,
    }
    parts = [program.stdin, f"{len(source)}\n".encode(), source, msgspec.json.encode(order), b"\n"]
    stdin = b"".join([*parts, *(content for _, content in files), uv])
    return NodeProgram(("-c", _LOADER, *program.arguments), stdin)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


class Wheels:
    """Fetches the wheels of an environment on this machine, for hosts that reach no index.

    By the environment's own pip, or one that uv fetches: uv itself downloads no wheels. On the engine's
    thread, but for `end`.
    """

    def __init__(self, environment: NodeEnvironment, request: NodeRequest, directory: Path) -> None:
        """Do nothing yet; `directory` is private, and exists."""
        self._environment, self._request, self._directory = environment, request, directory / _WHEELS
        self._pip: StartedProgram | None = None
        self.here = False
        """Whether all are fetched."""

    def fetch(self) -> bool:
        """Begin, or go on; return whether all are fetched. Raises `LaunchError` if they cannot be fetched."""
        if self._pip is None:
            self._pip = self._start()
        code = self._pip.exitcode
        if code:
            text = last_lines(self._pip.printed())
            msg = (
                f"a host of the nodes reaches no package index, and this machine cannot fetch for it:\n{text}"
            )
            raise LaunchError(msg, phase="engine", kind=FailureKind.PACKAGES)
        self.here = code == 0
        return self.here

    def files(self) -> tuple[tuple[str, bytes], ...]:
        """Return the name and content of each wheel that is fetched; none before that."""
        found = sorted((self._directory / _WHEELS).glob("*.whl")) if self.here else ()
        return tuple((path.name, path.read_bytes()) for path in found)

    def end(self) -> None:
        """End pip, and remove what it has fetched."""
        if self._pip is not None:
            self._pip.end_by(time.monotonic())
            remove_tree(self._directory)

    def _start(self) -> StartedProgram:
        self._directory.mkdir(mode=0o700)
        # Passwords of indexes may be in it.
        lines = [*self._environment.sources, *self._environment.requirements]
        (self._directory / _REQUIREMENTS).write_text("\n".join(lines) + "\n")
        words = (*_PIP, "--wheel-dir", _WHEELS, "--requirement", _REQUIREMENTS)
        environ = {**self._request.environ, "TMPDIR": str(self._directory)}
        return StartedProgram((*self._python(), *words), environ, str(self._directory))

    def _python(self) -> tuple[str, ...]:
        """Return the command of a Python like the notebook's that has pip."""
        if importlib.util.find_spec("pip") is not None:
            return (sys.executable,)
        if not self._environment.uv:
            msg = (
                "a host of the nodes reaches no package index, and this machine has neither pip nor uv to "
                "fetch for it. Install pip in the notebook's environment."
            )
            raise LaunchError(msg, phase="engine", kind=FailureKind.PACKAGES)
        uv = os.fsdecode(self._environment.uv)
        return (uv, "run", "--quiet", "--no-project", "--python", sys.executable, "--with", "pip", "python")
