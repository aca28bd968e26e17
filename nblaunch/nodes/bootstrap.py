"""Makes the notebook's Python environment on a node, once for each host, and starts the node program in it.

Any Python from 3.8 on runs this source. It is sent to the node, so it imports only the standard library;
`environment` describes what follows it. It prints its progress in lines that begin with `DOING`.

    <cache>/nblaunch/env/<hash>          a complete environment, which never changes
    <cache>/nblaunch/env/<hash>.lock     locked while a process makes the environment
    <cache>/nblaunch/env/<hash>.half-*   an incomplete one; the next process that makes it removes these
    <cache>/nblaunch/env/uv-<hash>       the notebook's uv, for a host without one
    <cache>/nblaunch/env/uv-*.half-*     an incomplete one; removed after an hour, by who makes an environment
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

DOING = "nblaunch is "
MAIN, FAILED, LACKING = "main", 4, 5
"""The function that the loader calls, and the exit status if there is no environment.

`LACKING` is that of a host which reaches no index: with the packages' wheels it would have one.
"""
ABANDONED = "nobody waits for it any more"
"""What is reported where the input or the connection ends early."""

_POLL_SECONDS = 0.1
_LAST_LINES = 6
_ABANDONED_SECONDS = 3600.0
"""After so long nobody writes an incomplete copy of uv any more."""
_PR_SET_PDEATHSIG = 1
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_UV_PLACES = ("~/.local/bin/uv", "~/.cargo/bin/uv")
# Options of a requirements file that say where packages come from.
_SOURCE = re.compile(r"(--(?:index-url|extra-index-url|find-links))[ =](.+)")
# Have uv trust this host's certificates: the variables of older and newer versions of uv.
_AS_PIP = {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
# What uv says without a network; and git, of a package from a repository.
_UNREACHED = re.compile(r"error sending request|network timeout|[Cc]ould not resolve host")
_NO_VERSION = re.compile(r"there is no version of\s+(\S+?)\s+and")
_NOT_FOUND = re.compile(r"Because\s+(\S+)\s+was not found in the")


class SetupError(Exception):
    """The environment cannot be made; the text says why."""

    status = FAILED


class UnreachedError(SetupError):
    """No index answers this host."""

    status = LACKING


def main(key: bytes, sent: BinaryIO, arguments: list[str]) -> None:
    """Make the environment that `sent` describes, unless it exists; run its Python with these arguments.

    The program gets only the key on its standard input.
    """
    for number in _ENDS:
        signal.signal(number, _end)
    try:
        python = _environment(_order(sent), sent)
        reading, writing = os.pipe()
        os.write(writing, key)  # fits into the pipe's buffer
        os.dup2(reading, 0)
        os.close(reading)
        os.close(writing)
        os.execv(str(python), [str(python), *arguments])  # noqa: S606 - what this is for
    except (SetupError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.status if isinstance(error, SetupError) else FAILED)


def _end(number: int, _: object) -> None:
    # SystemExit runs the `finally` blocks: they kill uv and remove incomplete environments.
    sys.exit(128 + number)


def _report(text: str) -> None:
    sys.stderr.write(f"{DOING}{text}\n")
    sys.stderr.flush()


def _order(sent: BinaryIO) -> dict[str, Any]:
    try:
        order: dict[str, Any] = json.loads(sent.readline())
    except ValueError:
        raise SetupError(ABANDONED) from None
    return order


def _environment(order: dict[str, Any], sent: BinaryIO) -> Path:
    files = [(name, _read(sent, size)) for name, size in order["files"]]
    here = f"{sys.platform}-{platform.machine()}"
    if here != order["platform"]:
        msg = (
            f"the notebook's packages are for {order['platform']}, and this is {here}. Install them here, "
            "and leave --sync-env out"
        )
        raise SetupError(msg)
    root = _root()
    name: str = order["name"]
    made = root / name
    python = made / "bin" / "python"
    if made.exists():
        return _checked(python)
    # Read the input to its end, or close it, before waiting for anything: srun sends to all hosts at the
    # speed of the slowest one, which may wait for another.
    uv = _uv(root, order, sent)
    _remove_cut(root)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with (root / f"{name}.lock").open("ab") as lock:
        _await(lock)
        if not made.exists():
            _make(made, order, files, uv)
    _report("starting")
    return _checked(python)


def _checked(python: Path) -> Path:
    if not python.exists():
        msg = (
            f"{python} links to a Python that does not exist here: another host made the environment. Remove "
            f"{python.parents[1]}, or set XDG_CACHE_HOME to a directory of this host"
        )
        raise SetupError(msg)
    return python


def _read(sent: BinaryIO, size: int) -> bytes:
    content = sent.read(size)
    if len(content) < size:
        raise SetupError(ABANDONED)
    return content


def _root() -> Path:
    """Return the directory of environments, which only this user can access."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - never raises
    root = Path(cache, "nblaunch", "env")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        msg = f"{root} cannot be made: {error.strerror}. Set XDG_CACHE_HOME to a directory of this host"
        raise SetupError(msg) from None
    if root.stat().st_uid != os.geteuid():
        msg = f"{root} belongs to another user. Remove it, or set XDG_CACHE_HOME"
        raise SetupError(msg)
    root.chmod(0o700)
    return root


def _remove_cut(root: Path) -> None:
    """Remove copies of uv that processes were writing when they were killed."""
    for left in root.glob("uv-*.half-*"):
        with contextlib.suppress(OSError):  # another process removes it, or has just completed it
            if time.time() > left.stat().st_mtime + _ABANDONED_SECONDS:
                shutil.rmtree(str(left), ignore_errors=True)


def _await(lock: Any) -> None:
    """Lock the environment, which another process may be making."""
    waits = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                _report("waiting until the packages are installed")
            waits = True
            _refuse_abandoned()
            time.sleep(_POLL_SECONDS)
        else:
            return


def _make(made: Path, order: dict[str, Any], files: list[tuple[str, bytes]], uv: list[str]) -> None:
    for left in made.parent.glob(f"{made.name}.half-*"):
        shutil.rmtree(str(left), ignore_errors=True)
    half = Path(tempfile.mkdtemp(prefix=f"{made.name}.half-", dir=str(made.parent)))
    try:
        for name, content in files:
            (half / name).write_bytes(content)
        lines, missing = _sources(order["sources"])
        packages = [*order["requirements"], *(str(half / name) for name, _ in files)]
        # The file may hold passwords. The directory is private, and is removed.
        (half / "exact.txt").write_text("\n".join([*lines, *packages]) + "\n")
        _report(f"installing {len(packages)} packages")
        environment = half / "made"
        _venv(uv, order["python"], environment, half)
        install = [*uv, "pip", "install", "--python", str(environment / "bin" / "python"), "--no-deps"]
        # Search all indexes: the first one that has a package need not have this version.
        words = ["--index-strategy", "unsafe-best-match", "-r", "exact.txt"]
        _run([*install, *words], half, "the notebook's packages cannot be installed", missing)
        environment.rename(made)
    finally:
        shutil.rmtree(str(half), ignore_errors=True)


def _venv(uv: list[str], python: str, environment: Path, directory: Path) -> None:
    """Make an empty environment: of this very Python, else of another patch version.

    A package may need a later patch version than this host has, so uv finds or downloads the very one first.
    """
    minor = ".".join(python.split(".")[:2])
    command = [*uv, "venv", "--quiet", "--no-project", "--relocatable"]
    failed = f"there is no environment of Python {minor}"
    try:
        _run([*command, "--python", _python(python, 3), str(environment)], directory, failed)
    except SetupError:
        _run([*command, "--python", _python(minor, 2), str(environment)], directory, failed)


def _python(wanted: str, parts: int) -> str:
    """Return the Python to ask uv for: this one, if the first parts of its version are the wanted ones."""
    here = ".".join(platform.python_version_tuple()[:parts])
    return sys.executable if sys.executable and here == wanted else wanted


def _sources(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the lines that apply here, and the directories that only the notebook's machine has."""
    kept, missing = [], []
    for line in lines:
        found = _SOURCE.fullmatch(line)
        parts = urlsplit(found.group(2)) if found else None
        local = parts is not None and parts.scheme in ("", "file")
        if parts is not None and local and not Path(unquote(parts.path)).exists():
            missing.append(unquote(parts.path))
        else:
            kept.append(line)
    return kept, missing


def _uv(root: Path, order: dict[str, Any], sent: BinaryIO) -> list[str]:
    """Return the command of uv: this host's, else the one that the notebook's machine sends."""
    found = shutil.which("uv") or next(filter(os.path.exists, map(os.path.expanduser, _UV_PLACES)), None)
    if found:
        return [found]
    module = importlib.util.find_spec("uv")
    if module is not None and module.origin:  # a mere directory of that name has none
        return [sys.executable, "-m", "uv"]
    if not order["uv"]:
        msg = (
            f"there is no uv here. Run pip install uv with {sys.executable}, or on the notebook's machine, "
            "which then sends its own"
        )
        raise SetupError(msg)
    kept = root / f"uv-{order['uv']['name']}"
    if not kept.exists():
        content = _read(sent, order["uv"]["size"])
        half = Path(tempfile.mkdtemp(prefix=f"{kept.name}.half-", dir=str(root)))
        try:
            (half / "uv").write_bytes(content)
            (half / "uv").chmod(0o700)
            (half / "uv").rename(kept)
        finally:
            shutil.rmtree(str(half), ignore_errors=True)
    return [str(kept)]


def _run(command: list[str], directory: Path, failed: str, missing: list[str] | None = None) -> None:
    """Run uv; kill it with all its children if the connection to this host ends."""
    with tempfile.TemporaryFile() as printed:
        # A signal that raised within `Popen` would leave a process that this one does not know.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        process = subprocess.Popen(  # noqa: S603 - uv, with words of ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            cwd=str(directory),
            # uv leaves locks in TMPDIR, which this directory is removed with.
            env={**_AS_PIP, **os.environ, "TMPDIR": str(directory)},
            start_new_session=True,
            preexec_fn=_begin_child,  # noqa: PLW1509 - there is no other thread
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                _refuse_abandoned()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            printed.seek(0)
            text = printed.read().decode(errors="replace")
            # uv may ask an index for a Python, which no wheel is.
            kind = UnreachedError if missing is not None and _UNREACHED.search(text) else SetupError
            raise kind(_why(failed, text, missing or []))


def _begin_child() -> None:
    """Have the kernel kill this child when its parent ends, in whatever way; signals reach it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _refuse_abandoned() -> None:
    """Raise `SetupError` if nobody reads this process's output: the connection that started it has ended."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        raise SetupError(ABANDONED)


def _why(failed: str, printed: str, missing: list[str]) -> str:
    """Return why uv failed: its last lines, the package that no index has, and what to do."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()][-_LAST_LINES:]
    words = " ".join(printed.split())
    absent = _NO_VERSION.search(words) or _NOT_FOUND.search(words)
    if absent:
        lines.append(
            f"No index has {absent.group(1)}. Add the index that it came from to the notebook's pip or uv "
            "settings (extra-index-url), or uninstall it."
        )
        if missing:
            lines.append(f"Only the notebook's machine has {', '.join(missing)}.")
    elif "No interpreter found" in words or "No download found" in words:
        lines.append("Install this Python here, or let uv download it.")
    return "\n".join([f"{failed}:", *lines])
