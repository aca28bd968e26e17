"""The doctor's all_reduce ends in time, whatever its ranks do, and says what they did."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from nblaunch import _devices
from nblaunch._errors import OptionError
from nblaunch.checks import doctor, nccl
from nblaunch.checks.nccl import all_reduce
from nblaunch.checks.report import DoctorReport, Level, ok
from nblaunch.host import placement
from nblaunch.magic import commands

FAST = """
print(json.dumps({"at": "timing"}))
print(json.dumps({"first": 0.5 + rank, "wrong": 0, "bandwidth": 2e9 * (rank + 1)}))
"""
STUCK = "print(json.dumps({'at': 'its first all_reduce'}), flush=True)\ntime.sleep(60)"


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Give `ranks(source, gpus=2)`: processes in the place of those that compute on GPUs."""

    def install(source, gpus=2):
        script = tmp_path / "rank.py"
        script.write_text(f"import json, os, sys, time\nrank = int(sys.argv[1])\n{source}\n")
        monkeypatch.setattr(nccl, "_RANK", script)
        monkeypatch.setattr(placement, "visible_gpus", lambda _environ, **_: gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(_devices, "nccl_version", lambda: (2, 27, 3))
        monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)

    return install


@pytest.fixture
def found(own):
    """Give `found()`: the one finding; no file and no process of it is left."""

    def find():
        (finding,) = all_reduce(own)
        assert left_in(own) == []
        return finding

    return find


def left_in(own):
    return [] if own.directory.made is None else list(own.directory.made.iterdir())


def test_the_slowest_rank_is_what_counts(ranks, found):
    ranks(FAST)
    finding = found()
    assert finding.level is Level.OK
    assert finding.summary == (
        "2 GPUs: 2 GB/s (bus bandwidth, 64 MiB) with NCCL 2.27.3; the first one, which connects them, took "
        "1.5 s"
    )


def test_one_gpu_has_nobody_to_talk_to(ranks, found):
    ranks(FAST, gpus=1)
    assert found().summary == "1 GPU: NCCL 2.27.3 works; there is no other GPU to talk to"


def test_without_gpus_it_is_left_out(ranks, found):
    ranks("1 / 0", gpus=0)
    assert (found().level, found().summary.partition(":")[0]) == (Level.OK, "left out")


def test_ranks_that_are_stuck_are_ended_in_time_and_say_where_they_were(ranks, monkeypatch, own, tmp_path):
    pids = tmp_path / "pids"
    ranks(f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\n{STUCK}")
    monkeypatch.setattr(nccl, "_SECONDS", 1.0)
    monkeypatch.setattr(nccl, "_AGAIN_SECONDS", 1.0)
    started = time.monotonic()
    (finding,) = all_reduce(own)
    assert time.monotonic() - started < 10
    assert finding.level is Level.PROBLEM
    assert finding.summary == (
        "2 GPUs: no answer within 1 s: rank 0 in its first all_reduce, rank 1 in its first all_reduce"
    )
    assert "NCCL_DEBUG=INFO" in finding.advice
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_what_works_without_peer_to_peer_is_said(ranks, found, monkeypatch):
    monkeypatch.setattr(nccl, "_SECONDS", 1.0)
    ranks(f"if 'NCCL_P2P_DISABLE' not in os.environ:\n    {STUCK.replace(chr(10), chr(10) + '    ')}\n{FAST}")
    finding = found()
    assert finding.level is Level.PROBLEM
    assert "give the ranks --env NCCL_P2P_DISABLE=1" in finding.advice


def test_an_error_is_told_with_what_nccl_says_of_it(ranks, found, monkeypatch):
    monkeypatch.setattr(nccl, "_OTHERS_SECONDS", 0.5)
    ranks(
        "print('vm:1:2 [0] transport.cc:1 NCCL WARN Cuda failure 217')\n"
        "if rank == 0:\n    time.sleep(60)\n"
        "print(json.dumps({'at': 'forming', 'error': 'DistBackendError: NCCL error\\nlast'}))\nsys.exit(1)"
    )
    assert found().summary == (
        "2 GPUs: rank 1 in forming: DistBackendError: NCCL error last (NCCL: Cuda failure 217)"
    )


def test_a_rank_that_dies_without_a_word_is_named(ranks, found):
    ranks(f"if rank == 1:\n    os.kill(os.getpid(), 11)\n{FAST}")
    assert found().summary == "2 GPUs: ended without a word: rank 1 in starting"


def test_a_sum_that_is_wrong_is_a_problem(ranks, found):
    ranks(FAST.replace('"wrong": 0', '"wrong": rank'))
    assert found().summary == "2 GPUs: the sum is wrong in 1 places"


def test_an_interrupt_ends_the_ranks(ranks, monkeypatch, own):
    ranks(STUCK)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(nccl, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(all_reduce(own))
    assert left_in(own) == []


# --- the three doors --------------------------------------------------------------------------------------


def test_each_door_asks_for_it_only_when_told_to(monkeypatch, capsys):
    from nblaunch.__main__ import main

    asked = []

    def all_reduce(_):
        asked.append(1)
        yield ok("NCCL all_reduce", "so")

    monkeypatch.setattr(doctor, "examine", lambda _: DoctorReport((ok("fine", "so"),)))
    monkeypatch.setattr(nccl, "all_reduce", all_reduce)
    for without in (doctor.doctor, lambda: commands.command("doctor", {}), lambda: main(["doctor"])):
        without()
    assert asked == []
    shown = [str(doctor.doctor(nccl=True)), str(commands.command("doctor --nccl", {}))]
    capsys.readouterr()
    assert main(["doctor", "--nccl"]) == 0
    shown.append(capsys.readouterr().out.rstrip())
    assert len(asked) == 3
    assert len({*shown}) == 1
    assert "NCCL all_reduce" in shown[0]


def test_an_all_reduce_that_cannot_be_tried_is_a_warning(monkeypatch):
    def fail(_):
        raise IndexError

    monkeypatch.setattr(doctor, "examine", lambda _: DoctorReport(()))
    monkeypatch.setattr(nccl, "all_reduce", fail)
    (finding,) = doctor.doctor(nccl=True).findings
    assert finding.level is Level.WARNING
    assert finding.summary.startswith("could not be checked: IndexError")


def test_the_option_is_completed_and_others_are_refused():
    assert commands.command_completions("%distributed doctor --") == ["--nccl", "--on"]
    with pytest.raises(
        OptionError,
        match=r"takes only --nccl, or --on with a run's options for nodes. Write %distributed doctor\.",
    ):
        commands.command("doctor --ncll", {})
