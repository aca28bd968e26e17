"""The doctor's look at GPUs, through `nvidia-smi`.

A process of its own, for two reasons: nothing of the driver is loaded into the kernel, so that its CUDA
state stays as it is; and a driver that hangs can be left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nblaunch.diagnose._checks_torch import why_no_torch
from nblaunch.diagnose.report import Finding, ok, problem, size, warning

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


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver sees it; bytes, None where it does not say."""

    index: str
    uuid: str
    name: str
    total: int | None
    free: int | None


def gpus() -> Iterator[Finding]:
    """Say which GPUs there are, how much of them is free, and whether torch can use them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield _without_driver()
        return
    try:
        said = _ask(program)
    except subprocess.TimeoutExpired:
        yield warning(
            "GPU",
            f"nvidia-smi gave no answer within {_SECONDS:g} s",
            "The driver is stuck, or slow to wake: try nvidia-smi in a terminal. Persistence mode "
            "(nvidia-smi -pm 1) keeps it awake.",
        )
        return
    listed = said["gpus"]
    if listed.returncode:
        words = f"{listed.stdout} {listed.stderr}".strip()
        if "no devices" in words.lower():
            yield ok("GPU", _NONE)
        else:
            yield problem("GPU", f"nvidia-smi fails: {words}", "Load the driver; after an update, restart.")
        return
    found = [_gpu(line) for line in listed.stdout.splitlines() if line.strip()]
    if not found:
        yield ok("GPU", _NONE)
        return
    if not why_no_torch():
        yield from _fit(found, said["header"].stdout)
    held = _held_here(said["processes"].stdout)
    for gpu in found:
        yield _memory(gpu, held.get(gpu.uuid, 0))
    if len(found) > 1:
        yield _peers(said["peers"].stdout)


def _without_driver() -> Finding:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return warning(
            "GPU",
            "there are GPUs, but no nvidia-smi to look at them with",
            "In a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
        )
    return ok("GPU", _NONE)


def _ask(program: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """Ask all at once: where the driver sleeps, waking it takes seconds. Raises `TimeoutExpired`."""
    deadline = time.monotonic() + _SECONDS
    with contextlib.ExitStack() as stack:
        asked = {question: stack.enter_context(asking([program, *how])) for question, how in _QUERIES.items()}
        said = {}
        for question, process in asked.items():
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.01))
            said[question] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    return said


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


def _gpu(line: str) -> Gpu:
    index, uuid, *name, total, free = (part.strip() for part in line.split(","))
    return Gpu(index, uuid, ", ".join(name), _bytes(total), _bytes(free))


def _bytes(mebibytes: str) -> int | None:
    """Return bytes; the driver writes `[N/A]` for what it does not tell."""
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else None


def _fit(found: list[Gpu], header: str) -> Iterator[Finding]:
    """Say what keeps torch from using the GPUs that are there."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None and torch.version.hip is None:
        yield warning(
            "GPU",
            f"{len(found)} here, but this torch was made for the CPU and cannot use them",
            "Install torch's CUDA build: https://pytorch.org/get-started.",
        )
    elif visible is not None and visible.strip() in ("", "-1"):
        yield warning(
            "GPU",
            f"{len(found)} here, hidden by CUDA_VISIBLE_DEVICES={visible!r}: ranks run on the CPU",
            "Unset it, and restart the kernel.",
        )
    driver, wanted = _DRIVER_CUDA.search(header), torch.version.cuda
    if driver is not None and wanted is not None and int(wanted.split(".")[0]) > int(driver[1]):
        yield problem(
            "GPU",
            f"the driver knows CUDA up to {driver[1]}.{driver[2]}; torch was made for CUDA {wanted}",
            f"Update the driver, or install a torch made for CUDA {driver[1]}.",
        )


def _held_here(processes: str) -> dict[str, int]:
    """Return the bytes this very process holds, by GPU."""
    held: dict[str, int] = {}
    for line in processes.splitlines():
        uuid, _, rest = line.partition(",")
        pid, _, used = rest.partition(",")
        if pid.strip() == str(os.getpid()):
            held[uuid.strip()] = held.get(uuid.strip(), 0) + (_bytes(used.strip()) or 0)
    # In a container the driver counts other process ids, or names none: torch's own count is a lower bound.
    for uuid, reserved in _reserved_by_torch().items():
        held[uuid] = max(held.get(uuid, 0), reserved)
    return held


def _reserved_by_torch() -> dict[str, int]:
    """Return what torch's allocator holds, by GPU; asks only a CUDA that is initialised already."""
    if why_no_torch():
        return {}
    import torch

    if not torch.cuda.is_initialized():
        return {}
    return {
        f"GPU-{torch.cuda.get_device_properties(index).uuid}": torch.cuda.memory_reserved(index)
        for index in range(torch.cuda.device_count())
    }


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
    """Say whether the GPUs can read each other's memory."""
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
    pairs = [(one, other) for one in range(len(states)) for other in range(one + 1, len(states))]
    known = [(one, other) for one, other in pairs if other < len(states[one])]
    return [f"{one}-{other}" for one, other in known if states[one][other] in _REFUSED], len(known)
