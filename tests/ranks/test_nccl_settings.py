"""What ranks are told of NCCL, and what its watchdog leaves behind: the same with and without GPUs."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch.distributed

import nblaunch

NAMES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_FR_DUMP_TEMP_FILE",
)


def settings() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.quick
def test_what_the_user_has_set_for_nccl_is_left_alone():
    chosen = dict(zip(NAMES[1:], ("7", "3", "1", "1", "/tmp/mine_"), strict=True))  # noqa: S108 - not written
    assert nblaunch.run(settings, nproc=1, env=chosen).values == [[None, *chosen.values()]]
    with nblaunch.Session(1, env=chosen) as session:
        assert session.run(settings).values == [[None, *chosen.values()]]


def test_a_sessions_ranks_are_ended_by_no_watchdog_and_a_runs_are():
    (fresh,) = nblaunch.run(settings, nproc=1).values
    assert fresh[:5] == ["256", None, "1", None, None]
    assert fresh[5].endswith("nccl_trace_rank_")
    with nblaunch.Session(1) as session:
        (kept,) = session.run(settings).values
    assert kept[:5] == ["256", None, "0", "0", "0"]


NOTE = "exception_dump"


def note_a_timeout_once() -> tuple[int, bool]:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, is_master=False)
    noted = store.check([NOTE])
    torch.distributed.barrier()
    if attempt == 0:
        # As NCCL's watchdog does: the next attempt's monitors would end their ranks for it.
        store.set(NOTE, "0")
        raise RuntimeError("timed out")
    return attempt, noted


@pytest.mark.parametrize("static", [False, True], ids=["c10d", "static"])
def test_what_a_watchdog_notes_in_one_attempt_is_not_met_by_the_next(static):
    where: dict[str, Any] = {"rdzv_backend": "static", "master_addr": "127.0.0.1", "master_port": free_port()}
    result = nblaunch.run(
        note_a_timeout_once, nproc=2, max_restarts=1, timeout=60, **(where if static else {})
    )
    assert result.values == [(1, False)] * 2


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
