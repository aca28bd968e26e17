"""What a rank reports to the doctor about its node: versions, GPUs, and whether the group works."""

from __future__ import annotations

import platform
import time
from typing import TypedDict


class NodeReport(TypedDict):
    """What one rank found."""

    python: str
    torch: str
    glibc: str
    gpus: list[str]
    backend: str
    seconds: float
    """Of the second all_reduce: the first one includes the time to connect."""


def report_node() -> NodeReport:
    """Return this rank's report; runs on each rank."""
    import torch
    import torch.distributed as dist

    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    ones = torch.ones(1, device=device)
    started = 0.0
    for _ in range(2):
        started = time.monotonic()
        dist.all_reduce(ones)
        float(ones)  # on a GPU it has only been enqueued before
    seconds = time.monotonic() - started
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return NodeReport(
        python=platform.python_version(),
        torch=torch.__version__,
        glibc=platform.libc_ver()[1],
        gpus=[torch.cuda.get_device_name(number) for number in range(count)],
        backend=dist.get_backend(),
        seconds=seconds,
    )
