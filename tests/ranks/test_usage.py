"""What each rank uses is measured from outside, once a second, only while somebody watches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest
import torch

from nblaunch.client.preparation import prepare_call
from nblaunch.client.run import SilentView, run_fresh
from nblaunch.host import usage
from nblaunch.host.usage import GpuMeter, Meter, SeenGpus
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import Measured
from nblaunch.protocol.state import AttemptState, RankState, RunState, State

MEGABYTE = 1 << 20
HELD = 200 * MEGABYTE


class Watching(SilentView):
    """Keeps every state that it is drawn."""

    def __init__(self, *, shows_usage=True):
        self.shows_usage = shows_usage
        self.states = []

    def draw(self, state):
        self.states.append(state)

    def usages(self, rank):
        """Return what was measured of a rank, each once."""
        found = [state.ranks[rank].usage for state in self.states if state.ranks[rank].usage is not None]
        return list(dict.fromkeys(found))


def watched(view, job, *args, nproc=2, **options):
    chosen = LaunchOptions(nproc_per_node=nproc, **options)
    return run_fresh(prepare_call(job, args, None, chosen), view).unwrap()


def wait_for(path):
    while not os.path.exists(path):  # noqa: PTH110 - runs in a rank, which has no need of pathlib
        time.sleep(0.01)


def burn(path):
    if torch.distributed.get_rank() == 0:
        while not os.path.exists(path):  # noqa: PTH110 - as above
            pass
    else:
        held = bytearray(HELD)
        wait_for(path)
        del held


def test_a_rank_that_computes_and_one_that_holds_memory_can_be_told_apart(tmp_path):
    end = tmp_path / "end"

    class UntilMeasured(Watching):
        def draw(self, state):
            super().draw(state)
            busy, holds = self.usages(0), self.usages(1)
            apart = busy and holds and busy[-1].cpu_percent > 2 * holds[-1].cpu_percent
            if (apart and holds[-1].memory > HELD) or time.monotonic() > deadline:
                end.touch()

    deadline = time.monotonic() + 60
    view = UntilMeasured()
    watched(view, burn, str(end))
    busy, holds = view.usages(0)[-1], view.usages(1)[-1]
    assert 2 * holds.cpu_percent < busy.cpu_percent < 150
    # What ranks share with the fork server (torch itself) is not counted.
    assert HELD < holds.memory < HELD + 100 * MEGABYTE
    assert busy.memory < 100 * MEGABYTE
    if not torch.cuda.is_available():
        assert busy.gpu_memory is busy.gpu_percent is None


@pytest.mark.quick
def test_nobody_measures_for_a_run_that_nobody_watches(tmp_path):
    end = tmp_path / "end"
    seen = []

    class Unseen(Watching):
        def draw(self, state):
            super().draw(state)
            seen.extend(each.name for each in threading.enumerate())
            if len(self.states) > 5:
                end.touch()

    view = Unseen(shows_usage=False)
    watched(view, wait_for, str(end))
    assert "nblaunch-usage" not in seen
    assert view.usages(0) == []


def test_who_measures_ends_with_the_run(eventually, tmp_path):
    end = tmp_path / "end"

    class UntilMeasured(Watching):
        def draw(self, state):
            super().draw(state)
            if self.usages(0) or len(self.states) > 100:
                end.touch()

    view = UntilMeasured()
    watched(view, wait_for, str(end), nproc=1)
    assert view.usages(0)
    eventually(lambda: "nblaunch-usage" not in [each.name for each in threading.enumerate()], "it ends")


def late(path):
    """Be found hanging: rank 1 computes, and does not come to the collective before that is told."""
    torch.distributed.barrier()
    while torch.distributed.get_rank() == 1 and not os.path.exists(path):  # noqa: PTH110 - as above
        pass
    torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_although_others_are_measured_all_the_time(tmp_path):
    end = tmp_path / "end"

    class UntilFound(Watching):
        def draw(self, state):
            super().draw(state)
            if state.notices or len(self.states) > 300:
                end.touch()

    view = UntilFound()
    watched(view, late, str(end), hang_after=3.0)
    assert "nothing heard for 3 s" in view.states[-1].notices[0]
    assert len(view.usages(1)) > 1


def test_ranks_of_a_session_are_measured_in_each_job(place):
    """What is said of a job is not what the session did before it."""
    view = Watching()
    with place(2) as session:
        session.run(time.sleep, (0.1,))
        session._live.watch = lambda *_: view
        session.run(time.sleep, (2.5,))
    assert view.usages(0)
    assert view.usages(1)[-1].cpu_percent < 50, "it has slept"


@pytest.fixture
def process():
    """Give a process that has computed for about half a second of its life, and sleeps now."""
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as made:
        made.stdout.readline()
        yield made
        made.kill()


def test_the_first_look_tells_the_average_of_a_process_and_the_next_what_came_since(process):
    meter = Meter()
    first = meter.measure(process.pid)
    assert 0 < first.cpu_percent < 110
    assert first.memory > MEGABYTE
    again = meter.measure(process.pid)
    assert again.cpu_percent == 0
    later = meter.measure(process.pid)
    assert later.cpu_percent == 0  # its memory may differ by a page


def test_the_past_of_a_process_that_is_older_than_the_job_does_not_count(monkeypatch, process):
    """A session's rank may have waited for an hour, or computed for one."""
    monkeypatch.setattr(usage, "_YOUNG_SECONDS", 0)
    meter = Meter()
    assert meter.measure(process.pid) is None
    assert meter.measure(process.pid).cpu_percent == 0


def test_a_process_that_is_gone_or_never_was_is_not_measured(process):
    meter = Meter()
    assert meter.measure(process.pid) is not None
    process.kill()
    process.wait()
    assert meter.measure(process.pid) is None
    assert meter.measure(1 << 22) is None


@pytest.mark.slow
def test_64_ranks_cost_about_a_twentieth_of_one_core_at_most(process):
    state = RunState(
        world_size=64,
        ranks={rank: RankState(rank, pid=process.pid, state=State.RUNNING) for rank in range(64)},
        attempt=AttemptState(number=0, world_size=64, reason="started", started=0.0),
    )
    told: list[Measured] = []
    with usage.measuring(lambda: state, told.append):
        began = time.monotonic()
        thread = next(each for each in threading.enumerate() if each.name == "nblaunch-usage")
        while len(told) < 3 and time.monotonic() < began + 20:
            time.sleep(0.05)
        spent = next(each for each in psutil.Process().threads() if each.id == thread.native_id)
        seconds = time.monotonic() - began
    assert [len(measured.usages) for measured in told] == [64, 64, 64]
    assert spent.user_time + spent.system_time < 0.1 * seconds


# --- GPUs ------------------------------------------------------------------------------------------


class Driver(types.ModuleType):
    """NVML of a machine with two GPUs and one process, 77; here only since most machines have none."""

    def __init__(self, processes):
        super().__init__("pynvml")
        self.processes = processes
        self.open = 0

    def nvmlInit(self):  # noqa: N802 - as NVML calls them
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return ("GPU-a", "GPU-b")[index]

    def nvmlDeviceGetHandleByUUID(self, name):  # noqa: N802
        return name

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return types.SimpleNamespace(gpu={"GPU-a": 10, "GPU-b": 90}[handle])

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return types.SimpleNamespace(used={"GPU-a": 1000, "GPU-b": 9000}[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        used = {"GPU-a": 100, "GPU-b": 900}[handle]
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid in self.processes]


@pytest.fixture
def driver(monkeypatch):
    """Give `driver(*pids)`: a machine with GPUs on which these processes compute."""

    def make(*pids):
        made = Driver(pids)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return make


def asked(pid, device, visible=None):
    gpus = GpuMeter(SeenGpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    try:
        found = gpus.usage(pid, device)
    finally:
        gpus.close()
    return found.memory, found.percent


def test_a_process_that_the_driver_knows_has_its_own_memory(driver):
    known = driver(77)
    assert asked(77, "cuda:0") == (1000, 90)
    assert known.open == 0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda:0", None, (1000, 10)),
        ("cuda:1", None, (9000, 90)),
        ("cuda:0", "1", (9000, 90)),
        ("cuda:1", "1, 0", (1000, 10)),
        ("cuda:0", "GPU-b", (9000, 90)),
        ("cuda:7", None, (None, None)),
        ("cpu", None, (None, None)),
        ("", None, (None, None)),
    ],
)
def test_a_process_that_the_driver_calls_by_another_number_has_its_devices(driver, device, visible, expected):
    driver(4_000_077)
    assert asked(77, device, visible) == expected


@pytest.mark.parametrize(
    ("visible", "gpus", "local_rank", "expected"),
    [
        (None, 2, 1, (9000, 90)),
        ("1,0", 2, 0, (9000, 90)),
        ("1,0", 2, 1, (1000, 10)),
        ("GPU-b", 1, 1, (9000, 90)),  # shared
    ],
)
def test_a_virtual_local_rank_is_measured_on_the_gpu_that_it_sees(
    driver, visible, gpus, local_rank, expected
):
    driver(4_000_077)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    measured = GpuMeter(SeenGpus(environ, alone=True, gpus=gpus))
    found = measured.usage(77, "cuda:0", local_rank)
    assert (found.memory, found.percent) == expected
    measured.close()


def test_without_a_driver_there_is_nothing_to_say(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert asked(77, "cuda:0") == (None, None)
    broken = types.ModuleType("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert asked(77, "cuda:0") == (None, None)
