"""The doctor's all_reduce: one rank on each GPU, each a Python process of its own, with a time limit.

It uses torch and NCCL alone, so a failure here is not nblaunch's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nblaunch.checks.processes import why_no_torch
from nblaunch.checks.report import Finding, ok, one_line, problem
from nblaunch.elastic import placement
from nblaunch.elastic.runtime_dir import remove_tree
from nblaunch.group.runtime import local

NAME = "NCCL all_reduce"
_SECONDS = 60.0
_AGAIN_SECONDS = 30.0
_OTHERS_SECONDS = 3.0
_LOOK_SECONDS = 0.05
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


@dataclass(slots=True)
class _Rank:
    """One process, and what it has said."""

    process: subprocess.Popen[bytes]
    output: Path
    words: dict[str, Any] = field(default_factory=dict)
    complaint: str = ""

    def listen(self) -> None:
        """Read what it has said so far: its own words, and what NCCL warns of among them."""
        for line in self.output.read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    self.words |= said
            found = _WARNING.search(line)
            if found is not None and not self.complaint:
                self.complaint = found[1]


def all_reduce() -> Iterator[Finding]:
    """Have the GPUs that ranks would get reduce 64 MiB together; report the bandwidth, or what failed."""
    if why_no_torch():
        return
    import torch.distributed as dist

    count = placement.visible_gpus(os.environ) if dist.is_available() and dist.is_nccl_available() else 0
    if count == 0:
        yield ok(NAME, "left out: ranks use NCCL on GPUs only, and there is none here for this torch")
        return
    ranks, failed = _try(count, {}, _SECONDS)
    if not failed:
        yield _success(ranks)
    elif count > 1 and "NCCL_P2P_DISABLE" not in os.environ:
        _, still = _try(count, {"NCCL_P2P_DISABLE": "1"}, _AGAIN_SECONDS)
        yield problem(NAME, failed, _ADVICE if still else _PEERS_ADVICE)
    else:
        yield problem(NAME, failed, _ADVICE)


def _try(count: int, environ: Mapping[str, str], seconds: float) -> tuple[list[_Rank], str]:
    """Run it once; return the ranks, which have ended, and what failed, nothing if all is well."""
    scratch = local().directory.make("doctor-")
    ranks: list[_Rank] = []
    try:
        for rank in range(count):
            ranks += [_start(rank, count, scratch, environ, seconds)]
        in_time = _wait(ranks, time.monotonic() + seconds)
    finally:
        for each in ranks:
            each.process.kill()
        for each in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(_KILLED_SECONDS)  # one that the driver holds is left alone
            each.listen()
        remove_tree(scratch)
    return ranks, _failure(ranks, seconds, in_time=in_time)


def _start(rank: int, count: int, scratch: Path, environ: Mapping[str, str], seconds: float) -> _Rank:
    output = scratch / f"rank{rank}"
    # As in a run: one machine needs no network, and NCCL says what it stumbles over.
    usual = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
    command = [sys.executable, "-P", str(_RANK), *map(str, (rank, count, scratch / "meeting", seconds))]
    with output.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - this Python, and a file of ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**usual, **os.environ, **environ},
            start_new_session=True,  # the stop button is not meant for it
        )
    return _Rank(process, output)


def _wait(ranks: list[_Rank], deadline: float) -> bool:
    """Wait until all have ended; once one has failed, no longer than the others need to say so, too."""
    failed = False
    while time.monotonic() < deadline:
        codes = [each.process.poll() for each in ranks]
        if None not in codes:
            return True
        if any(codes) and not failed:
            failed, deadline = True, min(deadline, time.monotonic() + _OTHERS_SECONDS)
        time.sleep(_LOOK_SECONDS)
    return failed


def _failure(ranks: list[_Rank], seconds: float, *, in_time: bool) -> str:
    """Say in one line what went wrong; nothing if all is well."""
    name = _gpus(len(ranks))
    complaint = next((f" (NCCL: {_short(each.complaint)})" for each in ranks if each.complaint), "")
    errors = {number: each.words["error"] for number, each in enumerate(ranks) if "error" in each.words}
    if errors:
        number, error = next(iter(errors.items()))
        return f"{name}: {_where(number, ranks[number])}: {_short(error)}{complaint}"
    unfinished = {number: each for number, each in enumerate(ranks) if "bandwidth" not in each.words}
    if unfinished:
        where = ", ".join(itertools.islice((_where(*each) for each in unfinished.items()), _SHOWN))
        how = "ended without a word" if in_time else f"no answer within {seconds:g} s"
        return f"{name}: {how}: {where}{complaint}"
    wrong = sum(each.words["wrong"] for each in ranks)
    return f"{name}: the sum is wrong in {wrong} places{complaint}" if wrong else ""


def _where(number: int, rank: _Rank) -> str:
    return f"rank {number} in {rank.words.get('at', 'starting')}"


def _success(ranks: list[_Rank]) -> Finding:
    words = ranks[0].words
    version, first = words["version"], max(each.words["first"] for each in ranks)
    if len(ranks) == 1:
        return ok(NAME, f"1 GPU: NCCL {version} works; there is no other GPU to talk to")
    slowest = min(each.words["bandwidth"] for each in ranks) / 1e9
    return ok(
        NAME,
        f"{_gpus(len(ranks))}: {slowest:.3g} GB/s (bus bandwidth, 64 MiB) with NCCL {version}; the first "
        f"one, which connects them, took {first:.1f} s",
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _short(text: str) -> str:
    return one_line(text, _WORDS)
