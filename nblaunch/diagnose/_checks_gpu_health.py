"""The doctor's look at whether GPUs are fit to compute: compute mode, memory errors, architecture, links.

NVML is asked by a process of its own (see `_nvml`), torch's architectures by a fork of the fork server:
neither changes anything of this process. What is not told is not judged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nblaunch._errors import LaunchError
from nblaunch.agent import forkserver, runtime
from nblaunch.diagnose._checks_gpu import asking
from nblaunch.diagnose._checks_torch import why_no_torch
from nblaunch.diagnose.report import Finding, ok, problem, warning

_SECONDS = 3.5
_ASK_NVML = Path(__file__).with_name("_nvml.py")
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
"""What NVML says of each GPU, by its number."""


def health() -> Iterator[Finding]:
    """Say what of the GPUs themselves keeps ranks from computing."""
    if why_no_torch():
        return
    import torch

    if torch.version.cuda is None:
        return
    deadline = time.monotonic() + _SECONDS
    try:
        said = ask_nvml()
    except subprocess.TimeoutExpired:
        yield warning(
            "GPU health",
            f"the driver gave no answer within {_SECONDS:g} s",
            "The driver is stuck, or slow to wake. Persistence mode (nvidia-smi -pm 1) keeps it awake.",
        )
        return
    gpus = {str(index): gpu for index, gpu in enumerate(said.get("gpus", ()))}
    used = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield from compute_mode(used, cuda_here=torch.cuda.is_initialized())
    yield from memory_errors(used)
    yield from driver_errors(used, said.get("xids", ()))
    if any("capability" in gpu for gpu in used.values()):
        yield from architecture(used, torchs_architectures(deadline))
    yield from persistence(used)
    yield from nvlink(used, said)


def ask_nvml() -> dict[str, Any]:
    """Return what NVML says, nothing where there is none. Raises `TimeoutExpired`."""
    with asking([sys.executable, "-I", "-S", str(_ASK_NVML)]) as process:
        out, _ = process.communicate(timeout=_SECONDS)
    try:
        return dict(json.loads(out))
    except ValueError:  # no NVML, or it has taken the process with it
        return {}


def visible(gpus: Gpus, chosen: str | None) -> Gpus:
    """Return the GPUs that ranks will see; all, where `CUDA_VISIBLE_DEVICES` is not understood.

    >>> sorted(visible({"0": {"uuid": "GPU-a1"}, "1": {"uuid": "GPU-b2"}}, "GPU-b"))
    ['1']
    """
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",")]
    found = {
        index: gpu
        for index, gpu in gpus.items()
        if any(name == index or (name and gpu.get("uuid", "").startswith(name)) for name in names)
    }
    return found if found or chosen.strip() in ("", "-1") else gpus


def compute_mode(gpus: Gpus, *, cuda_here: bool) -> Iterator[Finding]:
    """Say whether more than one process may use a GPU; `cuda_here` whether this one does."""
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
    """Say which GPUs have faulty memory, as far as they count errors (ECC)."""
    name = "GPU memory errors"
    found = 0
    for index, gpu in gpus.items():
        _, _, pending, failed = gpu.get("rows") or (0, 0, 0, 0)
        count = gpu.get("uncorrected", 0)
        found += bool(failed or count or pending or gpu.get("pages_pending"))
        if failed:
            yield problem(name, f"GPU {index}: faulty memory could not be replaced by spare rows", _REPLACE)
        elif count:
            errors = f"{count} uncorrected ECC error{'' if count == 1 else 's'}"
            yield warning(
                name,
                f"GPU {index}: {errors} since the driver was loaded",
                f"What ran on it then has failed. {_RESET} If it comes again, have it replaced.",
            )
        elif pending or gpu.get("pages_pending"):
            yield warning(name, f"GPU {index}: faulty memory waits to be taken out of use", _RESET)
    counted = sum("uncorrected" in gpu for gpu in gpus.values())
    if counted and not found:
        yield ok(name, f"no uncorrected ECC errors on {_count(counted)} since the driver was loaded")


def driver_errors(gpus: Gpus, xids: Sequence[Sequence[Any]]) -> Iterator[Finding]:
    """Say which GPUs the driver has given up, and which errors of the hardware it has logged."""
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
    """Say whether this torch has code for the GPUs; `built_for` is torch's own list, empty if not known."""
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


def torchs_architectures(deadline: float) -> list[str]:
    """Return what torch was built for, nothing where that is not known in time (monotonic).

    Asked in a fork: torch may initialise CUDA to tell.
    """
    answer = runtime.root() / f"architectures-{os.getpid()}-{time.monotonic_ns()}"
    process = forkserver.RankProcess(target=write_architectures, args=(str(answer),), name="nblaunch-doctor")
    try:
        forkserver.server.ensure_running()
        process.start()
        process.join(max(deadline - time.monotonic(), 0.1))
        if process.exitcode is None:
            process.kill()
        else:
            process.close()
        return list(json.loads(answer.read_text()))
    except (LaunchError, OSError, ValueError):
        return []  # another check says why nothing can be forked
    finally:
        with contextlib.suppress(OSError):
            answer.unlink()


def write_architectures(path: str) -> None:
    """Write what this process's torch was built for; runs in a fork."""
    import torch

    # The driver is asked how many GPUs there are, which is quicker than to initialise them.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    Path(path).write_text(json.dumps(torch.cuda.get_arch_list()))


def persistence(gpus: Gpus) -> Iterator[Finding]:
    """Say whether the driver stays awake while nobody uses it."""
    modes = [gpu["persistence"] for gpu in gpus.values() if "persistence" in gpu]
    if not modes:
        return
    if all(modes):
        yield ok("persistence mode", "on")
    else:
        yield ok(
            "persistence mode",
            "off: the first run after a pause may wait seconds for the driver",
            "nvidia-smi -pm 1 keeps the driver awake.",
        )


def nvlink(gpus: Gpus, said: Mapping[str, Any]) -> Iterator[Finding]:
    """Say which GPUs NVLink joins."""
    name = "NVLink"
    joined, pairs = said.get("joined", 0), said.get("pairs", 0)
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


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"
