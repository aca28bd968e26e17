"""What ranks use while somebody watches, and what a session is doing; both measured from outside.

CPU, memory and GPU are measured once a second, on a thread of its own: to read what memory a process has to
itself takes a lock of that process, and a driver may be stuck, so neither the hub nor whoever draws must
wait for it. The thread rests nineteen times as long as it works, so that 64 ranks cost what 16 do; each of
them is measured less often instead.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

from nblaunch import _devices
from nblaunch.protocol.messages import Measured, Prepare, Usage
from nblaunch.protocol.state import RankState, RunState

_SECONDS = 1.0
# A run that is over by then is not measured at all; ranks that have no process yet are looked for as often.
_FIRST_SECONDS = 0.15
_REST = 19
_YOUNG_SECONDS = 5.0


@contextlib.contextmanager
def measuring(
    state: Callable[[], RunState],
    tell: Callable[[Measured], None],
    *,
    wanted: bool,
    seen: Seen | None = None,
) -> Iterator[None]:
    """Measure the ranks that `state()` names while the block lasts, and `tell` what they use.

    `tell` is called on another thread. `seen` says which GPUs the ranks see.
    """
    if not wanted:
        yield
        return
    ended = threading.Event()
    arguments = (state, tell, ended, seen or Seen())
    threading.Thread(target=_measure, args=arguments, name="nblaunch-usage", daemon=True).start()
    try:
        yield
    finally:
        # Not joined: it ends at once, unless a driver holds it, and then nobody must wait for it.
        ended.set()


def _measure(
    state: Callable[[], RunState], tell: Callable[[Measured], None], ended: threading.Event, seen: Seen
) -> None:
    meter: Meter | None = None
    pause = _FIRST_SECONDS
    while not ended.wait(pause):
        began = time.monotonic()
        meter = meter or Meter(seen)
        usages = {}
        for rank in _measurable(state()):
            usage, cost = _timed(meter, rank)
            if usage is not None:
                usages[rank.rank] = usage
            if ended.wait(_REST * cost):
                break
        meter.gpus.forget()
        if usages and not ended.is_set():
            tell(Measured(usages=usages))
        pause = max(_SECONDS - (time.monotonic() - began), 0) if usages else _FIRST_SECONDS
    if meter is not None:
        meter.gpus.close()


def _measurable(state: RunState) -> list[RankState]:
    """Return the ranks with a process on this machine."""
    here = ("", platform.node())
    return [
        rank
        for rank in state.ranks.values()
        if rank.pid is not None and rank.node in here and not rank.state.final
    ]


def _timed(meter: Meter, rank: RankState) -> tuple[Usage | None, float]:
    began = time.monotonic()
    usage = meter.measure(rank.pid or 0, rank.device, rank.local_rank)
    return usage, time.monotonic() - began


@dataclass(slots=True)
class _Process:
    """A process, and how long it had computed at the last look."""

    process: psutil.Process
    seconds: float
    at: float


class Meter:
    """Measures processes; CPU is what they computed since the last look.

    Of a process that has just begun, that is since its beginning. One that is older (a session's rank has
    a life before this job) is measured from the second look on.
    """

    def __init__(self, seen: Seen | None = None) -> None:
        """Begin with no process; `seen` says which GPUs the processes see."""
        self.gpus = Gpus(seen=seen)
        self._known: dict[int, _Process] = {}

    def measure(self, pid: int, device: str = "", local_rank: int = 0) -> Usage | None:
        """Return what a process uses, None if it cannot be told; `device` is the one it has been given."""
        try:
            known = self._known.get(pid)
            if known is None:
                known = self._known[pid] = _begin(pid)
                if known.at - known.process.create_time() > _YOUNG_SECONDS:
                    return None
                known.seconds, known.at = 0.0, known.process.create_time()
            seconds = _computed(known.process)
            memory = known.process.memory_full_info().uss
        except (psutil.Error, OSError):
            self._known.pop(pid, None)
            return None
        now = time.time()
        percent = 100 * (seconds - known.seconds) / max(now - known.at, 0.01)
        known.seconds, known.at = seconds, now
        gpu = self.gpus.of(pid, device, local_rank)
        # In whole percents: a rank that waits looks the same from one second to the next, and is not redrawn.
        return Usage(
            cpu_percent=float(round(max(percent, 0))),
            memory=memory,
            gpu_memory=gpu.memory,
            gpu_percent=gpu.percent,
        )


def _begin(pid: int) -> _Process:
    process = psutil.Process(pid)
    return _Process(process, _computed(process), time.time())


def _computed(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Seen:
    """Which GPUs ranks see: their environment, and whether each sees only one of these, of `gpus` in all."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    alone: bool = False
    gpus: int = 0

    @classmethod
    def by(cls, prepare: Prepare, *, alone: bool) -> Self:
        """Return what ranks see that are told `prepare`, whose environment may not be this process's."""
        told = (os.fsdecode(each).partition("=") for each in prepare.environ)
        environ = {name: value for name, _, value in told if name in _devices.VARIABLES}
        return cls(environ, alone, prepare.accelerators)

    def place(self, index: int, local_rank: int) -> int:
        """Return where what a rank calls `index` is among those of its environment."""
        if not self.alone:
            return index
        return local_rank % self.gpus if self.gpus else local_rank


@dataclass(slots=True)
class _Gpu:
    """One GPU, or a process's part in GPUs."""

    memory: int | None = None
    percent: int | None = None


class Gpus:
    """The GPUs of this machine, as NVML knows them: it leaves CUDA alone. None where it is not installed."""

    def __init__(self, environ: Mapping[str, str] | None = None, *, seen: Seen | None = None) -> None:
        """Begin to talk to the driver, if there is one; `environ` is that of the ranks."""
        self._nvml: Any = None
        self._seen = seen or Seen(os.environ if environ is None else environ)
        self._by_pid: dict[int, _Gpu] | None = None
        with contextlib.suppress(Exception):  # no module, no driver, no permission
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml

    def of(self, pid: int, device: str, local_rank: int = 0) -> _Gpu:
        """Return what a process uses of its GPUs."""
        if self._nvml is None:
            return _Gpu()
        if self._by_pid is None:
            self._by_pid = self._now()
        if pid in self._by_pid:
            return self._by_pid[pid]
        # In a container the driver names processes by other numbers: then it is the whole device.
        kind, _, index = device.partition(":")
        if kind != "cuda" or not index.isdecimal():
            return _Gpu()
        return self._device(self._seen.place(int(index), local_rank))

    def forget(self) -> None:
        """Look anew the next time."""
        self._by_pid = None

    def close(self) -> None:
        """Leave the driver alone."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):  # a driver that went away needs no goodbye
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _now(self) -> dict[int, _Gpu]:
        by_pid: dict[int, _Gpu] = {}
        with contextlib.suppress(Exception):  # what the driver does not say is not shown
            for index in range(self._nvml.nvmlDeviceGetCount()):
                self._look_at(self._nvml.nvmlDeviceGetHandleByIndex(index), by_pid)
        return by_pid

    def _look_at(self, handle: Any, by_pid: dict[int, _Gpu]) -> None:
        percent = self._percent(handle)
        with contextlib.suppress(Exception):  # what the driver does not say is not shown
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                known = by_pid.setdefault(process.pid, _Gpu())
                if process.usedGpuMemory is not None:
                    known.memory = (known.memory or 0) + process.usedGpuMemory
                if percent is not None:
                    known.percent = max(known.percent or 0, percent)

    def _device(self, index: int) -> _Gpu:
        """Return the GPU that is number `index` of those that the ranks may see."""
        found = _Gpu()
        with contextlib.suppress(Exception):  # what the driver does not say is not shown
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
        with contextlib.suppress(Exception):  # a part of a GPU (MIG) does not say
            return int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return None


# What a session is doing, as data and as text.


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank of a session: its state is `idle`, `running`, `starting` or `gone`; `memory` in bytes.

    `waiting` says since when a rank has been interrupted, and what it is in; empty unless a job waits for it.
    """

    rank: int
    state: str
    pid: int | None
    device: str
    memory: int | None
    waiting: str = ""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """What a session is doing; `attempt` counts how often its ranks were started anew."""

    name: str
    world_size: int
    backend: str
    attempt: int
    ranks: tuple[RankStatus, ...]

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001 - IPython's own protocol
        """Show the lines in a notebook."""
        printer.text(str(self))

    def __str__(self) -> str:
        """Return a line for the session, and one for each rank."""
        lines = [f"session {self.name!r}: {self.world_size} ranks, {self.backend}"]
        for each in self.ranks:
            memory = f", {each.memory / 1e6:.0f} MB" if each.memory is not None else ""
            waiting = f", {each.waiting}" if each.waiting else ""
            lines.append(f"  rank {each.rank}: {each.state}, {each.device}{memory}{waiting}")
        return "\n".join(lines)


def alive(pid: int | None) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return pid is not None and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def own_memory(pid: int | None) -> int | None:
    """Return the bytes that belong to a process alone, None if that cannot be told."""
    if pid is None:
        return None
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return None
