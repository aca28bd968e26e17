"""The doctor's checks of torch, and of what ranks are made of: fork server, process control, network.

Nothing here asks CUDA for anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from nblaunch import _devices, _notebook
from nblaunch._errors import LaunchError
from nblaunch.checks.own_runtime import DoctorRuntime
from nblaunch.checks.report import Finding, ok, problem, warning

_BACKENDS = ("gloo", "nccl", "ucc", "mpi", "xccl")
_REINSTALL = "Install it again, as https://pytorch.org/get-started says for this machine."
_OF_A_RANK = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR")
_SLOWED = ("NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1")
_SLOW_SECONDS = 3.0
_JOIN_SECONDS = 2.0
_CHILD_SECONDS = 3.0
_LOOPBACK = "127.0.0.1"
_TOKEN = b"nblaunch"
# Runs in a process of its own: what is tried here would change the process it is tried in.
_CHILD = """
import ctypes, json, sys
found = {}
try:
    with open(sys.argv[1], "rb") as file:
        found["read"] = file.read().decode()
except OSError as error:
    found["refused"] = str(error)
libc = ctypes.CDLL(None, use_errno=True)
for name, option, value in ("subreaper", 36, 1), ("death signal", 1, 9):
    found[name] = libc.prctl(option, value, 0, 0, 0) == 0
print(json.dumps(found), flush=True)
sys.stdin.read()
"""


def build() -> Iterator[Finding]:
    why = why_no_torch()
    if why:
        yield problem("torch", f"cannot be imported: {why}", _REINSTALL)
        return
    import torch
    import torch.distributed as dist

    made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    if torch.version.hip:
        made_for = f"ROCm {torch.version.hip}"
    summary = f"{torch.__version__}, made for {made_for}"
    if not dist.is_available():
        yield problem("torch", f"{summary}, without torch.distributed", _REINSTALL)
        return
    backends = [name for name in _BACKENDS if getattr(dist, f"is_{name}_available", bool)()]
    summary += f"; backends: {', '.join(backends) or 'none'}"
    if torch.cuda.is_initialized():
        summary += "; CUDA is initialised in this process, which ranks do not mind"
    if "gloo" in backends:
        yield ok("torch", summary)
    else:
        yield problem("torch", f"{summary}. Ranks on the CPU need gloo", _REINSTALL)


def nccl() -> Iterator[Finding]:
    if why_no_torch():
        return
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        yield ok("NCCL", "not in this torch; only ranks on GPUs need it")
        return
    version = ".".join(map(str, _devices.nccl_version()))
    chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    slowed = [each for each in chosen if each in _SLOWED]
    summary = ", ".join([version, *chosen])
    advice = f"{' and '.join(slowed)}: GPUs of one machine talk by slower ways."
    yield warning("NCCL", summary, advice) if slowed else ok("NCCL", summary)


def why_no_torch() -> str:
    try:
        import torch.distributed  # noqa: F401 - whether it can be is the question
    except Exception as error:  # noqa: BLE001 - missing, of the wrong version, a library that is not there ...
        return f"{type(error).__name__}: {error}"
    return ""


def fork_server(own: DoctorRuntime) -> Iterator[Finding]:
    """Start a runtime and have it fork a process, as a rank is forked; measure how long that takes."""
    name = "fork server"
    started = time.monotonic()
    try:
        own.fork(_JOIN_SECONDS)
        ready = time.monotonic()
        own.fork(_JOIN_SECONDS)
    except (LaunchError, OSError) as error:
        # Of a traceback the last line.
        words = str(error).splitlines()[-1]
        yield problem(name, f"no rank can be forked: {words}", "Mend that first.")
        return
    took, forked = ready - started, time.monotonic() - ready
    summary = f"started after {took:.2f} s; a rank is forked in {forked * 1000:.0f} ms"
    advice = (
        "The first run waits for it. %load_ext nblaunch at the top of a notebook starts it early; with "
        "torch on a local disk it starts faster."
    )
    yield warning(name, summary, advice) if took > _SLOW_SECONDS else ok(name, summary)


def process_control() -> Iterator[Finding]:
    """Try the calls by which nothing is left behind: pidfd, subreaper, death signal."""
    name, how = "processes", "pidfd"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        how = "looking twenty times a second (no pidfd_open)"
    found = _in_child(os.devnull)
    missing = [call for call in ("subreaper", "death signal") if not found.get(call)]
    if not missing:
        yield ok(name, f"{how}, subreaper and death signal work: nothing outlives the kernel")
        return
    advice = (
        "Processes that ranks start may outlive them. Allow prctl in the sandbox (seccomp) of this container."
    )
    yield warning(name, f"prctl refuses: {', '.join(missing)}", advice)


def hand_over() -> Iterator[Finding]:
    """Pass a memory file to another process and back, through `/proc/<pid>/fd`, as payloads are passed."""
    name = "hand-over"
    with contextlib.ExitStack() as stack:
        try:
            fd = os.memfd_create("nblaunch-doctor")
            stack.callback(os.close, fd)
        except (AttributeError, OSError) as error:
            advice = "Large payloads go through files below TMPDIR: slower, and they need room there."
            yield warning(name, f"no memory files (memfd_create): {error}", advice)
            return
        os.pwrite(fd, _TOKEN, 0)
        found = _in_child(f"/proc/{os.getpid()}/fd/{fd}", fd)
    refused = found.get("refused", "")
    if refused or found.get("read") != _TOKEN.decode():
        yield problem(
            name,
            f"processes cannot open each other's memory through /proc: {refused}",
            "Payloads above 256 KiB cannot be sent. Mount /proc without hidepid, and allow the container to "
            "read its own processes (--cap-add SYS_PTRACE, or a sandbox other than the present one).",
        )
    else:
        yield ok(name, "kernel and ranks can open each other's memory: large payloads cross once")


def _in_child(path: str, fd: int | None = None) -> dict[str, Any]:
    """Return what a child reports that reads `path`; `refused` also where its `fd` cannot be opened here."""
    child = subprocess.Popen(  # noqa: S603 - our own interpreter, our own text
        [sys.executable, "-I", "-S", "-c", _CHILD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=() if fd is None else (fd,),
        start_new_session=True,
    )
    refused = {}
    try:
        if fd is not None:
            try:
                os.close(os.open(f"/proc/{child.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                refused = {"refused": str(error)}
        printed, errors = child.communicate(timeout=_CHILD_SECONDS)
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    if child.returncode:
        msg = f"a child process ended with {child.returncode}: {errors.decode(errors='replace')}"
        raise RuntimeError(msg)
    found: dict[str, Any] = json.loads(printed)
    return found | refused


def loopback() -> Iterator[Finding]:
    name = "loopback"
    try:
        # Not `create_connection`, which asks the resolver: that one has a check of its own.
        with socket.create_server((_LOOPBACK, 0)) as listener, socket.socket() as client:
            listener.settimeout(1)
            client.settimeout(1)
            client.connect(listener.getsockname())
            listener.accept()[0].close()
    except OSError as error:
        advice = "Ranks meet there. Bring the interface up: ip link set lo up; look at the firewall."
        yield problem(name, f"{_LOOPBACK} cannot be connected to: {error}", advice)
    else:
        yield ok(name, f"{_LOOPBACK} can be listened on and connected to")


def hostname() -> Iterator[Finding]:
    """Resolve this machine's own name; a run on one machine needs it only where the user's code does."""
    name = "hostname"
    own = socket.gethostname()
    try:
        addresses = sorted({str(each[4][0]) for each in socket.getaddrinfo(own, None)})
    except OSError as error:
        yield warning(
            name,
            f"{own} does not resolve: {error}",
            f"Code that looks it up waits, or fails. Add a line `127.0.1.1 {own}` to /etc/hosts.",
        )
        return
    summary = f"{own} is {', '.join(addresses[:3])}"
    if all(each.startswith("127.") or each == "::1" for each in addresses):
        summary += " (this machine only: enough for ranks here, not for ranks elsewhere)"
    yield ok(name, summary)


def this_process() -> Iterator[Finding]:
    name = "this process"
    rank = _notebook.inside_rank()
    variables = [each for each in _OF_A_RANK if each in os.environ]
    if rank is not None:
        yield problem(
            name,
            f"it is rank {rank} of a run, and a rank cannot start ranks of its own",
            "Call this in the notebook, outside the distributed cell.",
        )
    elif variables:
        yield warning(
            name,
            f"it has the environment of a rank ({', '.join(variables)})",
            "It was started by torchrun or the like, perhaps once for each rank; then each of them starts "
            "ranks of its own.",
        )
    else:
        yield ok(name, "it is no rank, so it can start runs")
