"""CPU, memory and GPUs of ranks, measured from outside while a view shows them.

A thread of its own measures once a second: reading the memory that is a process's own takes a lock of that
process, and a driver may be stuck, so neither the hub's thread nor the drawing one may wait for it. The
thread rests nineteen times as long as it works, so 64 ranks cost what 16 do; each is measured less often
instead.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

from nblaunch import _devices
from nblaunch._inherited import decoded
from nblaunch._resident import resident_of
from nblaunch.protocol.messages import Measured, Prepare, Usage
from nblaunch.protocol.state import RunState

_SECONDS = 1.0
# A run that is over by then is not measured at all; ranks that have no process yet are looked for as often.
_FIRST_SECONDS = 0.15
_REST = 19
_YOUNG_SECONDS = 5.0


@contextlib.contextmanager
def measuring(
    state: Callable[[], RunState],
    report: Callable[[Measured], None],
    seen: SeenGpus | None = None,
) -> Iterator[None]:
    """Measure the ranks of `state()` that have a process here; calls `report` on another thread."""
    ended = threading.Event()
    arguments = (state, report, ended, seen)
    threading.Thread(target=_measure, args=arguments, name="nblaunch-usage", daemon=True).start()
    try:
        yield
    finally:
        # Not joined: it ends at once, unless a driver holds it, and then this thread must not wait for it.
        ended.set()


def _measure(
    state: Callable[[], RunState],
    report: Callable[[Measured], None],
    ended: threading.Event,
    seen: SeenGpus | None,
) -> None:
    meter: Meter | None = None
    pause = _FIRST_SECONDS
    while not ended.wait(pause):
        began = time.monotonic()
        meter = meter or Meter(seen)
        usages = {}
        for rank in state().ranks.values():
            if rank.pid is None or rank.state.final:
                continue
            rank_began = time.monotonic()
            usage = meter.measure(rank.pid, rank.device, rank.local_rank)
            if usage is not None:
                usages[rank.rank] = usage
            if ended.wait(_REST * (time.monotonic() - rank_began)):
                break
        meter.gpus.forget()
        if usages and not ended.is_set():
            report(Measured(usages=usages))
        pause = max(_SECONDS - (time.monotonic() - began), 0) if usages else _FIRST_SECONDS
    if meter is not None:
        meter.gpus.close()


class Meter:
    """Measures processes; CPU is the time that they computed since the last measurement.

    For a process that has just begun, that is since its start. One that is older (a session's rank has lived
    before this job) is measured from the second measurement on.
    """

    def __init__(self, seen: SeenGpus | None = None) -> None:
        self.gpus = GpuMeter(seen)
        self._known: dict[int, psutil.Process] = {}

    def measure(self, pid: int, device: str = "", local_rank: int = 0) -> Usage | None:
        """Return what a process uses, None if that is unknown; `device` is the one that it was given."""
        try:
            process = self._known.get(pid)
            if process is None:
                process = self._known[pid] = psutil.Process(pid)
                percent = _first_percent(process)
                if percent is None:
                    return None
            else:
                percent = process.cpu_percent(None)
            memory = process.memory_full_info().uss
            peak = _peak(pid, memory)
        except (psutil.Error, OSError):
            self._known.pop(pid, None)
            return None
        gpu = self.gpus.usage(pid, device, local_rank)
        # In whole percents: a rank that waits looks the same from one second to the next, and is not redrawn.
        return Usage(
            cpu_percent=float(round(percent)),
            memory=memory,
            gpu_memory=gpu.memory,
            gpu_percent=gpu.percent,
            memory_peak=peak,
        )


def _peak(pid: int, memory: int) -> int | None:
    """Return the most memory of its own that a process has had since its job began, when it set this back."""
    known = resident_of(pid)
    return None if known is None else memory + max(known.peak - known.now, 0)


def _first_percent(process: psutil.Process) -> float | None:
    """Begin to count, and return the average since the process began, None if that is long ago."""
    process.cpu_percent(None)
    age = time.time() - process.create_time()
    times = process.cpu_times()
    return None if age > _YOUNG_SECONDS else 100 * (times.user + times.system) / max(age, 0.01)


@dataclass(frozen=True, slots=True)
class SeenGpus:
    """Which GPUs ranks see: their environment, and whether each sees `alone` one of the `gpus` in it."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    alone: bool = False
    gpus: int = 0

    @classmethod
    def by(cls, prepare: Prepare, *, alone: bool) -> Self:
        """Return what ranks see under `prepare`, whose environment may differ from this process's."""
        known = decoded(prepare.environ)
        environ = {name: value for name, value in known.items() if name in _devices.VARIABLES}
        return cls(environ, alone, prepare.accelerators)

    def place(self, index: int, local_rank: int) -> int:
        """Return the index in the environment's list of the GPU that a rank calls `index`."""
        if not self.alone:
            return index
        return local_rank % self.gpus if self.gpus else local_rank


@dataclass(slots=True)
class GpuUsage:
    """What is used of a GPU: bytes, and percent of the time; None where the driver does not tell."""

    memory: int | None = None
    percent: int | None = None


class GpuMeter:
    """Measures GPUs through NVML, which leaves CUDA alone; without NVML, nothing is known of them."""

    def __init__(self, seen: SeenGpus | None = None) -> None:
        self._nvml: Any = None
        self._seen = seen or SeenGpus()
        self._by_pid: dict[int, GpuUsage] | None = None
        with contextlib.suppress(Exception):  # no module, no driver, no permission
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml

    def usage(self, pid: int, device: str, local_rank: int = 0) -> GpuUsage:
        if self._nvml is None:
            return GpuUsage()
        if self._by_pid is None:
            self._by_pid = self._now()
        if pid in self._by_pid:
            return self._by_pid[pid]
        # In a container the driver names processes by other numbers: then it is the whole device.
        kind, _, index = device.partition(":")
        if kind != "cuda" or not index.isdecimal():
            return GpuUsage()
        return self._device(self._seen.place(int(index), local_rank))

    def forget(self) -> None:
        self._by_pid = None

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):  # a driver that went away needs no goodbye
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _now(self) -> dict[int, GpuUsage]:
        by_pid: dict[int, GpuUsage] = {}
        with contextlib.suppress(Exception):  # what the driver does not tell is not shown
            for index in range(self._nvml.nvmlDeviceGetCount()):
                self._read_gpu(self._nvml.nvmlDeviceGetHandleByIndex(index), by_pid)
        return by_pid

    def _read_gpu(self, handle: Any, by_pid: dict[int, GpuUsage]) -> None:
        percent = self._percent(handle)
        with contextlib.suppress(Exception):  # what the driver does not tell is not shown
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                known = by_pid.setdefault(process.pid, GpuUsage())
                if process.usedGpuMemory is not None:
                    known.memory = (known.memory or 0) + process.usedGpuMemory
                if percent is not None:
                    known.percent = max(known.percent or 0, percent)

    def _device(self, index: int) -> GpuUsage:
        """Return the GPU that is number `index` of those that the ranks may see."""
        found = GpuUsage()
        with contextlib.suppress(Exception):  # what the driver does not tell is not shown
            handle = self._handle(index)
            found.percent = self._percent(handle)
            found.memory = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return found

    def _handle(self, index: int) -> Any:
        visible = _devices.choice_of(self._seen.environ, hip=False)
        name = str(index) if visible is None else _devices.named_gpus(visible)[index]
        if name.isdecimal():
            # CUDA's own order is by speed; where the GPUs are equal, it is NVML's.
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _percent(self, handle: Any) -> int | None:
        with contextlib.suppress(Exception):  # a part of a GPU (MIG) has no figure
            return int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return None


def alive(pid: int | None) -> bool:
    try:
        return pid is not None and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def own_memory(pid: int | None) -> int | None:
    """Return the bytes that belong to a process alone, None if they are unknown."""
    try:
        return None if pid is None else int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return None
