"""One rank of the doctor's all_reduce; a program: rank, number of ranks, rendezvous file, seconds.

It prints a JSON object for each step, so the last line of a rank that is stuck names the step.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta

_BYTES = 64 << 20
_TIMES = 10
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def _report(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _end_with_parent(seconds: float) -> None:
    """End with the parent process, at the latest after `seconds`: NCCL itself waits without a limit."""
    signal.alarm(int(seconds) + 1)
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os._exit(1)


def _measure(rank: int, ranks: int, rdzv: str, seconds: float) -> None:
    _report(at="importing torch")
    import torch
    import torch.distributed as dist

    _report(at="initialising CUDA")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    given = torch.empty(_BYTES // 4, device=device)
    _report(at="forming a process group")
    dist.init_process_group(
        "nccl",
        init_method=f"file://{rdzv}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    _report(at="its first all_reduce")
    began = time.perf_counter()
    given.fill_(float(rank + 1))
    dist.all_reduce(given)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    wrong = int((given != ranks * (ranks + 1) / 2).sum().item())
    _report(at="timing all_reduce")
    given.zero_()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_TIMES):
        dist.all_reduce(given)
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / _TIMES
    # What goes through the slowest link: the figure that NCCL's own tests call bus bandwidth.
    bandwidth = 2 * (ranks - 1) / ranks * _BYTES / took
    _report(first=first, wrong=wrong, bandwidth=bandwidth)


def main() -> None:
    """Take part, then exit at once: destroying the group may wait for a peer."""
    rank, ranks, rdzv, seconds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    _end_with_parent(seconds)
    try:
        _measure(rank, ranks, rdzv, seconds)
    except Exception as error:  # noqa: BLE001 - whatever torch raises is what is looked for
        _report(error=f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
