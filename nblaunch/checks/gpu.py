"""The doctor's checks of GPUs: what there is and what is free, and whether it is fit to compute.

The answers come from `nvidia-smi` and from `nvml.py`, in processes of their own, for two reasons: no driver
library is loaded into the kernel, so that its CUDA state stays as it is; and a driver that hangs can be
abandoned.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nblaunch import _devices
from nblaunch._errors import LaunchError
from nblaunch.checks.own_runtime import DoctorRuntime
from nblaunch.checks.processes import why_no_torch
from nblaunch.checks.report import Finding, count_of, ok, problem, warning
from nblaunch.diagnose.failures import reserved_here
from nblaunch.protocol.reports import size

_SECONDS = 3.5
_KILLED_SECONDS = 0.2
_MIB = 1 << 20
_LITTLE = 0.1
_MUCH = 0.05
_SHOWN_PAIRS = 4
_NONE = "none: ranks run on the CPU, with gloo"
_CSV = "--format=csv,noheader,nounits"
_QUERIES = {
    "gpus": ["--query-gpu=index,uuid,name,memory.total,memory.free", _CSV],
    "processes": ["--query-compute-apps=gpu_uuid,pid,used_memory", _CSV],
    "peers": ["topo", "-p2p", "r"],
    "header": [],
}
_DRIVER_CUDA = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)")
_REFUSED = {"CNS", "GNS", "TNS", "NS", "DR"}
"""What `nvidia-smi topo -p2p r` writes where two GPUs cannot read each other's memory."""
_ASK_NVML = Path(__file__).with_name("nvml.py")
_PROHIBITED, _EXCLUSIVE = 2, (1, 3)
_RESET = "Reset it when nothing runs on it (nvidia-smi --gpu-reset), or restart the machine."
_REPLACE = "Have it replaced; until then leave it out with CUDA_VISIBLE_DEVICES."
_SHARE = "nvidia-smi -c DEFAULT lets processes share a GPU."
_RECOVERY = {
    1: (_RESET, "must be reset"),
    2: ("Restart the machine.", "needs the machine to be restarted"),
    3: (_RESET, "must be drained and reset"),
    4: (_RESET, "must be drained and reset"),
}
_HARDWARE_XIDS = {
    48: "uncorrectable memory error",
    63: "memory row to be remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fell off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its own processor (GSP) does not answer",
    120: "its own processor (GSP) failed",
}
"""Those that no program causes; NVIDIA's list of Xid errors has them all."""
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)([af]?)")

Gpus = Mapping[str, Mapping[str, Any]]
"""What NVML reports of each GPU, by its number."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver sees it; sizes in bytes, None where the driver gives none."""

    index: str
    uuid: str
    name: str
    total: int | None
    free: int | None

    @classmethod
    def read(cls, line: str) -> Gpu:
        """Take it from a line of `nvidia-smi --query-gpu`."""
        index, uuid, *name, total, free = (part.strip() for part in line.split(","))
        return cls(index, uuid, ", ".join(name), _bytes(total), _bytes(free))


def gpus() -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        if any(Path("/dev").glob("nvidia[0-9]*")):
            advice = "In a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility."
            yield warning("GPU", "there are GPUs, but no nvidia-smi to look at them with", advice)
        else:
            yield ok("GPU", _NONE)
        return
    try:
        answers = _ask(program)
    except subprocess.TimeoutExpired:
        yield warning(
            "GPU",
            f"nvidia-smi gave no answer within {_SECONDS:g} s",
            "The driver is stuck, or slow to wake: try nvidia-smi in a terminal. Persistence mode "
            "(nvidia-smi -pm 1) keeps it awake.",
        )
        return
    listed = answers["gpus"]
    words = f"{listed.stdout} {listed.stderr}".strip()
    if listed.returncode and "no devices" not in words.lower():
        yield problem("GPU", f"nvidia-smi fails: {words}", "Load the driver; after an update, restart.")
        return
    if listed.returncode or not listed.stdout.strip():
        yield ok("GPU", _NONE)
        return
    found = [Gpu.read(line) for line in listed.stdout.splitlines() if line.strip()]
    if not why_no_torch():
        yield from _fit(found, answers["header"].stdout)
    held = _held_here(answers["processes"].stdout)
    for gpu in found:
        # In a container the driver counts other process ids, or names none: torch's count is a lower bound.
        yield _memory(gpu, max(held[gpu.uuid], reserved_here(gpu.uuid.removeprefix("GPU-"))))
    if len(found) > 1:
        yield _peers(answers["peers"].stdout)


def _ask(program: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """Ask all at once: where the driver sleeps, waking it takes seconds. Raises `TimeoutExpired`."""
    deadline = time.monotonic() + _SECONDS
    with contextlib.ExitStack() as stack:
        asked = {question: stack.enter_context(asking([program, *how])) for question, how in _QUERIES.items()}
        answers = {}
        for question, process in asked.items():
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.01))
            answers[question] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    return answers


@contextlib.contextmanager
def asking(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process; at the block's end it is killed, and left alone if even that does not end it."""
    process = subprocess.Popen(  # noqa: S603 - the program that the PATH names
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # the stop button is not meant for it
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_SECONDS)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _bytes(mebibytes: str) -> int | None:
    """Return bytes; the driver writes `[N/A]` for what it does not report."""
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else None


def _fit(found: list[Gpu], header: str) -> Iterator[Finding]:
    """Report what keeps torch from using the GPUs that are there."""
    import torch

    choice = os.environ.get(_devices.CUDA)
    if torch.version.cuda is None and torch.version.hip is None:
        yield warning(
            "GPU",
            f"{len(found)} here, but this torch was made for the CPU and cannot use them",
            "Install torch's CUDA build: https://pytorch.org/get-started.",
        )
    elif choice is not None and not _devices.named_gpus(choice):
        yield warning(
            "GPU",
            f"{len(found)} here, hidden by CUDA_VISIBLE_DEVICES={choice!r}: ranks run on the CPU",
            "Unset it, and restart the kernel.",
        )
    driver, wanted = _DRIVER_CUDA.search(header), torch.version.cuda
    if driver is not None and wanted is not None and int(wanted.split(".")[0]) > int(driver[1]):
        yield problem(
            "GPU",
            f"the driver knows CUDA up to {driver[1]}.{driver[2]}; torch was made for CUDA {wanted}",
            f"Update the driver, or install a torch made for CUDA {driver[1]}.",
        )


def _held_here(processes: str) -> Counter[str]:
    """Return the bytes this very process holds, by GPU."""
    held = Counter[str]()
    for line in processes.splitlines():
        uuid, pid, used, *_ = (part.strip() for part in f"{line},,".split(","))
        if pid == str(os.getpid()):
            held[uuid] += _bytes(used) or 0
    return held


def _memory(gpu: Gpu, held: int) -> Finding:
    name = f"GPU {gpu.index}"
    if gpu.total is None or gpu.free is None:
        return ok(name, f"{gpu.name}; the driver does not tell its memory, as with MIG")
    summary = f"{gpu.name}, {size(gpu.free)} free of {size(gpu.total)}"
    summary += f", {size(held) if held else 'nothing'} held by this kernel"
    if held > gpu.total * _MUCH:
        return warning(
            name,
            summary,
            "Ranks cannot use what the kernel holds. Delete what you no longer need, then call "
            "torch.cuda.empty_cache(); or restart the kernel.",
        )
    if gpu.free < gpu.total * _LITTLE:
        advice = "Other processes use it; nvidia-smi shows which. Wait for them, or end them."
        return warning(name, summary, advice)
    return ok(name, summary)


def _peers(matrix: str) -> Finding:
    refused, pairs = refused_pairs(matrix)
    if not pairs:
        return ok("peer-to-peer", "this driver does not tell")
    if refused:
        shown = ", ".join(refused[:_SHOWN_PAIRS]) + (", ..." if len(refused) > _SHOWN_PAIRS else "")
        return warning(
            "peer-to-peer",
            f"{len(refused)} of {pairs} pairs of GPUs cannot read each other's memory: {shown}",
            "NCCL goes through shared memory there, which is slower and needs room in /dev/shm. If a "
            "collective hangs, give --env NCCL_P2P_DISABLE=1.",
        )
    return ok("peer-to-peer", f"{pairs} of {pairs} pairs of GPUs can read each other's memory")


def refused_pairs(matrix: str) -> tuple[list[str], int]:
    r"""Return the pairs that cannot, from the driver's matrix, and how many pairs there are.

    >>> refused_pairs("\tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n")
    (['0-1'], 1)
    """
    rows = [line.split() for line in matrix.splitlines()]
    states = [row[1:] for row in rows if len(row) > 1 and row[0].startswith("GPU") and "X" in row]
    pairs = itertools.combinations(range(len(states)), 2)
    known = [(one, other) for one, other in pairs if other < len(states[one])]
    return [f"{one}-{other}" for one, other in known if states[one][other] in _REFUSED], len(known)


# Whether GPUs are fit to compute: compute mode, memory errors, architecture, links. NVML is asked by a
# process of its own, torch's architectures by a fork of the fork server: neither changes anything in this
# process. What the driver does not report is not judged.


def health(own: DoctorRuntime) -> Iterator[Finding]:
    if why_no_torch():
        return
    import torch

    if torch.version.cuda is None:
        return
    deadline = time.monotonic() + _SECONDS
    try:
        answers = ask_nvml()
    except subprocess.TimeoutExpired:
        yield warning(
            "GPU health",
            f"the driver gave no answer within {_SECONDS:g} s",
            "The driver is stuck, or slow to wake. Persistence mode (nvidia-smi -pm 1) keeps it awake.",
        )
        return
    gpus = {str(index): gpu for index, gpu in enumerate(answers.get("gpus", ()))}
    used = visible(gpus, os.environ.get(_devices.CUDA))
    yield from compute_mode(used, cuda_here=torch.cuda.is_initialized())
    yield from memory_errors(used)
    yield from driver_errors(used, answers.get("xids", ()))
    if any("capability" in gpu for gpu in used.values()):
        yield from architecture(used, torchs_architectures(own, deadline))
    yield from persistence(used)
    yield from nvlink(used, answers)


def ask_nvml() -> dict[str, Any]:
    with asking([sys.executable, "-I", "-S", str(_ASK_NVML)]) as process:
        out, _ = process.communicate(timeout=_SECONDS)
    try:
        return dict(json.loads(out))
    except ValueError:  # no NVML, or it has taken the process with it
        return {}


def visible(gpus: Gpus, choice: str | None) -> Gpus:
    """Return the GPUs that ranks will see; all, where `CUDA_VISIBLE_DEVICES` names instances of MIG.

    >>> sorted(visible({"0": {"uuid": "GPU-a1"}, "1": {"uuid": "GPU-b2"}}, "GPU-b"))
    ['1']
    """
    if choice is None or _devices.is_mig(choice):
        return gpus
    uuids = [gpu.get("uuid", "") for gpu in gpus.values()]
    return {str(each): gpus[str(each)] for each in _devices.ordinals(choice, len(gpus), lambda: uuids)}


def compute_mode(gpus: Gpus, *, cuda_here: bool) -> Iterator[Finding]:
    """Report whether several processes may use a GPU; `cuda_here`: this process has initialised CUDA."""
    name = "compute mode"
    modes = {index: gpu["compute_mode"] for index, gpu in gpus.items() if "compute_mode" in gpu}
    prohibited = [index for index, mode in modes.items() if mode == _PROHIBITED]
    exclusive = [index for index, mode in modes.items() if mode in _EXCLUSIVE]
    if prohibited:
        yield problem(name, f"{_listed(prohibited)} may run no CUDA at all (PROHIBITED)", _SHARE)
    if exclusive and cuda_here:
        yield problem(
            name,
            f"{_listed(exclusive)} may be used by one process (EXCLUSIVE_PROCESS), and this kernel has "
            "initialised CUDA: ranks fail with 'devices are busy or unavailable'",
            f"Restart the kernel and use CUDA in ranks only. Or share: {_SHARE}",
        )
    elif exclusive:
        yield warning(
            name,
            f"{_listed(exclusive)} may be used by one process at a time (EXCLUSIVE_PROCESS)",
            "Use CUDA in ranks only, not in the notebook, and one run or session at a time. Or share: "
            f"{_SHARE}",
        )
    if modes and not prohibited and not exclusive:
        yield ok(name, "processes may share a GPU")


def memory_errors(gpus: Gpus) -> Iterator[Finding]:
    name = "GPU memory errors"
    fine = True
    for index, gpu in gpus.items():
        _, _, pending, failed = gpu.get("rows") or (0, 0, 0, 0)
        count = gpu.get("uncorrected", 0)
        if failed:
            yield problem(name, f"GPU {index}: faulty memory could not be replaced by spare rows", _REPLACE)
        elif count:
            yield warning(
                name,
                f"GPU {index}: {count_of(count, 'uncorrected ECC error')} since the driver was loaded",
                f"What ran on it then has failed. {_RESET} If it comes again, have it replaced.",
            )
        elif pending or gpu.get("pages_pending"):
            yield warning(name, f"GPU {index}: faulty memory waits to be taken out of use", _RESET)
        else:
            continue
        fine = False
    counted = sum("uncorrected" in gpu for gpu in gpus.values())
    if counted and fine:
        gpus_counted = count_of(counted, "GPU")
        yield ok(name, f"no uncorrected ECC errors on {gpus_counted} since the driver was loaded")


def driver_errors(gpus: Gpus, xids: Sequence[Sequence[Any]]) -> Iterator[Finding]:
    """Report GPUs that the driver has given up, and hardware errors that it has logged (Xid)."""
    for index, gpu in gpus.items():
        if gpu.get("recovery") in _RECOVERY:
            advice, what = _RECOVERY[gpu["recovery"]]
            yield problem("GPU state", f"GPU {index} has failed and {what} before it is used again", advice)
    logged = Counter((number, address) for address, number in xids if number in _HARDWARE_XIDS)
    if logged:
        lines = [
            f"Xid {number} ({_HARDWARE_XIDS[number]}) of {address}{f' {times} times' if times > 1 else ''}"
            for (number, address), times in sorted(logged.items())
        ]
        yield warning(
            "Xid",
            f"in the kernel's log since the machine was started: {', '.join(lines)}",
            "No program causes these. nvidia-smi -q tells the GPU's state; reset it, or have it looked at.",
        )


def architecture(gpus: Gpus, built_for: Sequence[str]) -> Iterator[Finding]:
    if not built_for:
        return
    known = {index: tuple(gpu["capability"]) for index, gpu in gpus.items() if "capability" in gpu}
    lacking = [index for index, capability in known.items() if not runs_on(capability, built_for)]
    words = ", ".join(sorted({f"sm_{major}{minor}" for major, minor in known.values()}))
    for index in lacking:
        major, minor = known[index]
        yield problem(
            "architecture",
            f"GPU {index} ({gpus[index].get('name', 'NVIDIA')}) is sm_{major}{minor}; this torch has code "
            f"for {', '.join(built_for)}: kernels fail with 'no kernel image is available'",
            "Install a torch whose CUDA knows it: https://pytorch.org/get-started. A new GPU needs a newer "
            "CUDA, an old one an older.",
        )
    if known and not lacking:
        yield ok("architecture", f"{words}, which this torch has code for")


def runs_on(capability: tuple[int, ...], built_for: Sequence[str]) -> bool:
    """Return whether code for one of these architectures runs on a GPU of this compute capability.

    Machine code runs on later minor versions of its major one, portable code (compute_) on all later GPUs.

    >>> runs_on((8, 9), ["sm_80", "sm_90"]), runs_on((10, 0), ["sm_80", "sm_90"])
    (True, False)
    """
    major, minor = capability
    for each in built_for:
        found = _ARCHITECTURE.fullmatch(each)
        if found is None:
            return True  # a kind that is not known here
        of, only = (int(found[2]) // 10, int(found[2]) % 10), found[3] == "a"
        if of == (major, minor) or (
            not only and of <= (major, minor) and (found[1] == "compute" or of[0] == major)
        ):
            return True
    return False


def torchs_architectures(own: DoctorRuntime, deadline: float) -> list[str]:
    """Return what torch was built for, nothing where that is not known in time (monotonic)."""
    try:
        return list(own.fork(max(deadline - time.monotonic(), 0.1), architectures=True))
    except (LaunchError, OSError):
        return []  # another check reports why nothing can be forked


def persistence(gpus: Gpus) -> Iterator[Finding]:
    name = "persistence mode"
    modes = [gpu["persistence"] for gpu in gpus.values() if "persistence" in gpu]
    if modes and all(modes):
        yield ok(name, "on")
    elif modes:
        summary = "off: the first run after a pause may wait seconds for the driver"
        yield ok(name, summary, "nvidia-smi -pm 1 keeps the driver awake.")


def nvlink(gpus: Gpus, answers: Mapping[str, Any]) -> Iterator[Finding]:
    name = "NVLink"
    joined, pairs = answers.get("joined", 0), answers.get("pairs", 0)
    down = {index: gpu["links"].count(0) for index, gpu in gpus.items() if any(gpu.get("links", ()))}
    broken = [f"GPU {index}: {count}" for index, count in down.items() if count > min(down.values())]
    if broken:
        yield warning(
            name,
            f"more links are down than on other GPUs: {', '.join(broken)}",
            "Collectives are as slow as the slowest GPU. nvidia-smi nvlink --status tells which; reset the "
            "GPU, or have the machine looked at.",
        )
    elif pairs and joined:
        yield ok(name, f"joins {joined} of {pairs} pairs of GPUs")
    elif pairs:
        yield ok(name, "none: GPUs talk over PCIe")


def _listed(indices: Sequence[str]) -> str:
    return f"GPU{'' if len(indices) == 1 else 's'} {', '.join(indices)}"
