"""The doctor's all_reduce: one rank on each GPU, each a Python process of its own, with a time limit.

It uses torch and NCCL alone, so a failure here is not nblaunch's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nblaunch import _devices
from nblaunch._runtime_dir import remove_tree
from nblaunch.checks.own_runtime import DoctorRuntime
from nblaunch.checks.processes import why_no_torch
from nblaunch.checks.report import Finding, count_of, ok, on_one_line, problem
from nblaunch.host import placement

NAME = "NCCL all_reduce"
_SECONDS = 60.0
_AGAIN_SECONDS = 30.0
_OTHERS_SECONDS = 3.0
_POLL_SECONDS = 0.05
_KILLED_SECONDS = 1.0
_RANK = Path(__file__).with_name("nccl_rank.py")
_WORDS = 160
_SHOWN = 4
_WARNING = re.compile(r"NCCL WARN (.+)")
_WITHOUT_PEERS = "NCCL_P2P_DISABLE=1"
_PEERS_ADVICE = (
    f"With {_WITHOUT_PEERS} it works: give the ranks --env {_WITHOUT_PEERS} until the GPUs can read each "
    "other's memory again. An IOMMU, ACS or virtualisation in the way is the usual cause."
)
_ADVICE = (
    "Try it again with NCCL_DEBUG=INFO in the environment, and look at what NCCL prints last. Check NCCL_* "
    "variables, the GPUs above, and that no other process hangs on them (nvidia-smi)."
)

RankReport = dict[str, Any]
"""What one rank has reported, by name; `at` is the step that it has reached."""


def all_reduce(own: DoctorRuntime) -> Iterator[Finding]:
    """Have the GPUs that ranks would get reduce 64 MiB together; report the bandwidth, or what failed."""
    if why_no_torch():
        return
    import torch.distributed as dist

    count = placement.visible_gpus(os.environ) if dist.is_available() and dist.is_nccl_available() else 0
    if count == 0:
        yield ok(NAME, "left out: ranks use NCCL on GPUs only, and there is none here for this torch")
        return
    reports, failed = _try(own, count, {}, _SECONDS)
    if not failed:
        yield _success(reports)
    elif count > 1 and "NCCL_P2P_DISABLE" not in os.environ:
        _, still = _try(own, count, {"NCCL_P2P_DISABLE": "1"}, _AGAIN_SECONDS)
        yield problem(NAME, failed, _ADVICE if still else _PEERS_ADVICE)
    else:
        yield problem(NAME, failed, _ADVICE)


def _try(
    own: DoctorRuntime, count: int, environ: Mapping[str, str], seconds: float
) -> tuple[list[RankReport], str]:
    scratch = own.directory.make("doctor-")
    outputs = [scratch / f"rank{rank}" for rank in range(count)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, output in enumerate(outputs):
            arguments = map(str, (rank, count, scratch / "meeting", seconds))
            ranks += [_start(arguments, output, environ)]
        in_time = _wait(ranks, time.monotonic() + seconds)
    finally:
        for each in ranks:
            each.kill()
        for each in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(_KILLED_SECONDS)  # one that the driver holds is left alone
        reports = [_reported(output) for output in outputs[: len(ranks)]]
        remove_tree(scratch)
    return reports, _failure(reports, f"no answer within {seconds:g} s" if not in_time else "")


def _start(arguments: Iterable[str], output: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # As in a run: one machine needs no network, and NCCL reports what it stumbles over.
    usual = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
    with output.open("wb") as file:
        return subprocess.Popen(  # noqa: S603 - this Python, and a file of ours
            [sys.executable, "-P", str(_RANK), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**usual, **os.environ, **environ},
            start_new_session=True,  # the stop button is not meant for it
        )


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended; once one has failed, only as long as the others need to fail, too."""
    failed = False
    while time.monotonic() < deadline:
        codes = [each.poll() for each in ranks]
        if None not in codes:
            return True
        if any(codes) and not failed:
            failed, deadline = True, min(deadline, time.monotonic() + _OTHERS_SECONDS)
        time.sleep(_POLL_SECONDS)
    return failed


def _reported(output: Path) -> RankReport:
    """Return what a rank has printed: its own reports, and the first warning of NCCL among them."""
    report: RankReport = {}
    for line in output.read_text("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            step = json.loads(line)
            if isinstance(step, dict):
                report |= step
        warned = _WARNING.search(line)
        if warned is not None:
            report.setdefault("warning", warned[1])
    return report


def _failure(reports: list[RankReport], late: str) -> str:
    """Return in one line what went wrong; nothing if all is well."""
    gpus = count_of(len(reports), "GPU")
    warned = [on_one_line(each["warning"], _WORDS) for each in reports if "warning" in each]
    warning = f" (NCCL: {warned[0]})" if warned else ""
    places = [f"rank {number} in {each.get('at', 'starting')}" for number, each in enumerate(reports)]
    for place, each in zip(places, reports, strict=True):
        if "error" in each:
            return f"{gpus}: {place}: {on_one_line(each['error'], _WORDS)}{warning}"
    unfinished = [place for place, each in zip(places, reports, strict=True) if "bandwidth" not in each]
    if unfinished:
        return f"{gpus}: {late or 'ended without a word'}: {', '.join(unfinished[:_SHOWN])}{warning}"
    wrong = sum(each["wrong"] for each in reports)
    return f"{gpus}: the sum is wrong in {wrong} places{warning}" if wrong else ""


def _success(reports: list[RankReport]) -> Finding:
    version, first = ".".join(map(str, _devices.nccl_version())), max(each["first"] for each in reports)
    if len(reports) == 1:
        return ok(NAME, f"1 GPU: NCCL {version} works; there is no other GPU to talk to")
    slowest = min(each["bandwidth"] for each in reports) / 1e9
    return ok(
        NAME,
        f"{len(reports)} GPUs: {slowest:.3g} GB/s (bus bandwidth, 64 MiB) with NCCL {version}; the first "
        f"one, which connects them, took {first:.1f} s",
    )
