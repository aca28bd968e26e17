"""How ranks' processes are started and bound: each of torchrun's options works, or says why it cannot."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import poked
import psutil
import pytest
import torch
from older_torch import needs_binding

import nblaunch
from nblaunch import _devices
from nblaunch._inherited import check_start_method
from nblaunch.host import placement


def local():
    return os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES"), int(os.environ["RANK"])


# --- virtual local ranks ---------------------------------------------------------------------------


@pytest.mark.quick
def test_with_virtual_local_ranks_each_is_local_rank_0_with_one_gpu_to_see(monkeypatch):
    """As torchrun sets them (`LocalElasticAgent._set_local_rank_env`), also where there is no GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = nblaunch.run(local, nproc=2, virtual_local_rank=True)
    assert result.values == [("0", "0", 0), ("0", "1", 1)]
    assert [each.local_rank for each in result.ranks] == [0, 1]
    assert nblaunch.run(local, nproc=2).values == [("0", None, 0), ("1", None, 1)]


def test_the_gpus_that_virtual_local_ranks_see_are_those_of_the_run(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    result = nblaunch.run(
        local, nproc=2, backend="gloo", virtual_local_rank=True, env={"CUDA_VISIBLE_DEVICES": "5, 3,1"}
    )
    assert result.values == [("0", "5", 0), ("0", "3", 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert nblaunch.run(local, nproc=2, virtual_local_rank=True).values == [("0", "", 0), ("0", "", 1)]


@pytest.mark.quick
def test_more_virtual_local_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(nblaunch.OptionError, match=r"with 2 ranks.*CUDA_VISIBLE_DEVICES='5' names 1"):
        nblaunch.run(local, nproc=2, backend="gloo", virtual_local_rank=True)


def test_a_cell_with_virtual_local_ranks_sees_what_its_environment_says(kernel):
    kernel.ok(
        "%%distributed -n 2 --virtual-local-rank --out res\nimport os\nlocal_rank, os.environ['LOCAL_RANK']"
    )
    assert kernel.value("res.values") == [[0, "0"], [0, "0"]]
    assert kernel.value("[each.local_rank for each in res.ranks]") == [0, 1]


# --- spawn and fork --------------------------------------------------------------------------------


def about_itself():
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    print("said")
    print("complained", file=sys.stderr)
    return total.item(), os.getpid(), os.getsid(0)


def test_a_spawned_rank_is_a_new_python_and_still_the_process_that_the_agent_knows():
    result = nblaunch.run(about_itself, nproc=2, start_method="spawn")
    for each in result.ranks:
        assert each.value == (2.0, each.pid, each.pid)
        assert (each.stdout, each.stderr, each.exitcode) == ("said\n", "complained\n", 0)

    # Its command line is its own; a fork's is the server's.
    def command():
        return psutil.Process().cmdline()

    spawned = nblaunch.run(command, nproc=1, start_method="spawn")[0]
    forked = nblaunch.run(command, nproc=1)[0]
    assert "nblaunch.rank.main" in " ".join(spawned)
    assert "nblaunch.host.keeper" in " ".join(forked)


def test_no_secret_is_on_a_spawned_ranks_command_line_and_no_file_of_orders_stays():
    def orders():
        named = [word for word in psutil.Process().cmdline() if "orders-" in word]
        return [(name, Path(name).exists()) for name in named]

    result = nblaunch.run(orders, nproc=2, start_method="spawn")
    assert [[exists for _, exists in each] for each in result] == [[False], [False]]


@pytest.mark.slow_at("is gone", "exits", "raises")
@pytest.mark.parametrize(
    ("how", "exitcode", "reason"),
    [
        (lambda: 1 / 0, 1, "ZeroDivisionError: division by zero"),
        (lambda: sys.exit(7), 7, "SystemExit: 7"),
        (lambda: os._exit(3), 3, "ended with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "was killed by SIGKILL"),
    ],
    ids=["raises", "exits", "is gone", "is killed"],
)
def test_a_spawned_rank_that_fails_is_reported_as_any_other(how, exitcode, reason):
    result = nblaunch.run(how, nproc=2, start_method="spawn", check=False)
    assert result.root_cause is not None
    assert result.root_cause.exitcode == exitcode
    assert result.root_cause.reason.startswith(reason)
    written = sorted(path.parent.name for path in result.log_dir.rglob("error.json"))
    assert written == (["0", "1"] if exitcode == 1 else written)


@pytest.mark.slow
def test_spawned_ranks_are_interrupted_keep_their_variables_and_are_gone_with_the_kernel(
    start_kernel, eventually, tmp_path
):
    kernel = start_kernel()
    kernel.ok("%distributed start -n 2 --start-method spawn")
    kernel.ok("%%distributed\nx = rank")
    begun = tmp_path / "begun"
    running = kernel.submit(
        f"%%distributed\nimport pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)"
    )
    eventually(begun.exists, "the cell runs", 30)
    kernel.interrupt()
    ran = running.finish()
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    kernel.ok("%%distributed --out res\nx + 1")
    assert kernel.value("res.values") == [1, 2]
    kernel.kill()
    kernel.all_gone("the kernel was killed")


@pytest.mark.quick
def test_fork_is_refused_with_what_would_go_wrong():
    with pytest.raises(nblaunch.OptionError) as caught:
        nblaunch.run(local, nproc=2, start_method="fork")
    message = str(caught.value)
    assert f"this process has {threading.active_count()} threads" in message
    assert "Use forkserver" in message


def test_fork_once_cuda_is_initialised_says_so(monkeypatch):
    # There is no GPU here to initialise; what torch then says is all that counts.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(nblaunch.OptionError, match="CUDA is initialised in this process"):
        check_start_method("fork")


# --- NUMA, signals, shutdown -----------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("binding", ["node", "socket", "exclusive", "core-complex"])
def test_numa_binding_needs_a_gpu_for_each_rank(binding, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(nblaunch.OptionError, match=f"numa_binding='{binding}'.*none is visible"):
        nblaunch.run(local, nproc=2, numa_binding=binding)
    with pytest.raises(nblaunch.OptionError, match="1 is visible here for 2 ranks"):
        placement.check_numa_binding(binding, gpus=1, nproc=2)


@pytest.mark.quick
@needs_binding
@pytest.mark.parametrize("binding", ["node", "socket", "exclusive", "core-complex"])
def test_what_is_asked_of_numa_is_what_torch_is_told(binding):
    from torch.numa.binding import NumaOptions

    placement.check_numa_binding(binding, gpus=2, nproc=2)
    told = _devices.numa_options(binding)
    assert isinstance(told, NumaOptions)
    assert told.affinity_mode.value == binding


@pytest.mark.quick
@needs_binding
@pytest.mark.parametrize("binding", ["exclusive", "core-complex"])
def test_cpus_are_not_divided_among_gpus_that_a_rank_cannot_see(binding):
    with pytest.raises(nblaunch.OptionError, match=r"virtual_local_rank each rank sees one GPU only\. Use"):
        placement.check_numa_binding(binding, gpus=2, nproc=2, virtual_local_rank=True)
    placement.check_numa_binding("node", gpus=2, nproc=2, virtual_local_rank=True)


def test_no_handler_of_the_signals_to_handle_is_installed_in_the_notebook(kernel):
    kernel.ok(
        """
        import os, signal
        names = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"]
        before = [signal.getsignal(getattr(signal, name)) for name in names]
        """
    )
    kernel.ok(
        "%%distributed -n 2 --signals-to-handle SIGUSR1,SIGTERM --out res\n"
        "import os, signal\n"
        "os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'], str(signal.getsignal(signal.SIGUSR1))"
    )
    assert kernel.value("res.values") == [["SIGUSR1,SIGTERM", "0"]] * 2
    assert kernel.value("before == [signal.getsignal(getattr(signal, name)) for name in names]")
    assert kernel.value("'TORCHELASTIC_SIGNALS_TO_HANDLE' in os.environ") is False


# --- a group that is ready before it is asked for --------------------------------------------------


@pytest.mark.slow
def test_a_group_that_was_made_ready_is_taken_only_where_its_processes_are_as_asked(start_kernel, eventually):
    kernel = start_kernel(NBLAUNCH_STANDBY="1")
    poke = poked.of_kernel(kernel)
    seat = "local.standby._standby_group"

    def run(options):
        """Return the values of a cell, and whether a group that waited for it has run it."""
        waiting = f"(lambda seat: seat is not None and seat.group.waiting)({seat})"
        eventually(lambda: poke(waiting), "a group is ready", 30)
        ready = poke(f"[each.pid for each in {seat}.group.state.ranks.values()]")
        kernel.ok(
            f"%%distributed -n 2 --out res {options}\nimport os\nos.environ.get('TORCHELASTIC_TIMER_FILE')"
        )
        return kernel.value("res.values"), kernel.value("[each.pid for each in res.ranks]") == ready

    kernel.ok("%%distributed -n 2\nrank")
    assert run("") == ([None, None], True)
    timers, taken = run("--env TORCHELASTIC_ENABLE_FILE_TIMER=1")
    assert not taken
    assert None not in timers
    timers, taken = run("--env TORCHELASTIC_ENABLE_FILE_TIMER=1")
    assert taken
    assert None not in timers
    names = [name.rpartition(".")[2] for name in kernel.value("[each.name for each in res.events]")]
    assert names.count("START") == names.count("SUCCEEDED") - 1 == 2
    assert run("--start-method spawn")[1] is False
    assert run("--start-method spawn -r 3 --local-ranks-filter 1") == ([None, None], True)
