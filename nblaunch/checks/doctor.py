"""The list of checks, and what runs them: all at the same time, each with a time limit of its own."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nblaunch import _notebook
from nblaunch._errors import OptionError
from nblaunch.checks import detached, gpu, notebook, own_runtime, processes, resources
from nblaunch.checks import nccl as nccl_check
from nblaunch.checks.nodes import check_nodes
from nblaunch.checks.own_runtime import DoctorRuntime
from nblaunch.checks.report import DoctorReport, Finding, warning
from nblaunch.options.launch import LaunchOptions

_SECONDS = 4.4
_RESOLVER_SECONDS = 2.0
_LOADING_SECONDS = 10.0
_SLOW_TORCH = "Importing torch takes long here. Is the machine busy, or the environment on a slow disk?"


@dataclass(frozen=True, slots=True)
class Check:
    """A function that yields findings, the time it has, and what to do if it takes longer."""

    name: str
    find: Callable[[], Iterable[Finding]]
    seconds: float = _SECONDS
    if_stuck: str = ""


_THIS_PROCESS = Check("this process", processes.this_process)


def checks(own: DoctorRuntime) -> tuple[Check, ...]:
    """Return all checks; those that need a runtime or a private directory use `own`."""
    return (
        Check("versions", notebook.versions),
        Check("torch", processes.build, if_stuck=_SLOW_TORCH),
        Check("NCCL", processes.nccl, if_stuck=_SLOW_TORCH),
        Check("GPU", gpu.gpus, if_stuck=_SLOW_TORCH),
        Check("GPU health", own.of(gpu.health), if_stuck=_SLOW_TORCH),
        Check(
            "fork server",
            own.of(processes.fork_server),
            if_stuck="The first run waits for it. %load_ext nblaunch at the top of a notebook starts it "
            "early.",
        ),
        Check("runtime", own_runtime.of_this_process, if_stuck="It starts, or is stopped."),
        Check("processes", processes.process_control),
        Check("hand-over", processes.hand_over),
        Check("loopback", processes.loopback),
        Check(
            "hostname",
            processes.hostname,
            seconds=_RESOLVER_SECONDS,
            if_stuck="The resolver hangs, and so does torch code that looks this machine up. Add a line "
            "`127.0.1.1 <hostname>` to /etc/hosts.",
        ),
        Check("/dev/shm", resources.shared_memory),  # noqa: S108 - a name
        Check(
            "temp dir",
            own.of(resources.temporary_directory),
            if_stuck="The disk does not answer. Set TMPDIR to a directory on a local disk.",
        ),
        Check("leftovers", own.of(resources.leftovers)),
        Check("detached", own.of(detached.detached_sessions)),
        Check("open files", resources.open_files),
        Check("process limit", resources.processes),
        Check("memory", resources.memory),
        Check("CPU threads", resources.threads),
        Check("notebook", notebook.front_end),
        _THIS_PROCESS,
    )


def doctor(*, nccl: bool = False, on: str | None = None, **options: Any) -> DoctorReport:
    """Look for what would make runs fail, hang or crawl here; return the findings.

    Looked at are torch and its backends, GPUs, their state and the memory this kernel holds on them, NCCL,
    peer-to-peer, the fork server, the loopback interface and the hostname, shared memory, the temporary
    directory, limits on files, processes and memory, what the notebook can show, and versions that do not
    fit together.

    It takes less than 5 seconds, never raises, and does not initialise CUDA in this process. A runtime is
    started for it, as a run would start one, and ended with it; nothing changes.

    With `nccl` every GPU takes part in an NCCL all_reduce, in processes of its own. That takes seconds, and
    up to a minute and a half where it does not work.

    With `on="slurm"` or another engine, and a run's options for it, the doctor checks nodes instead: it asks
    the engine for them, compares them with this machine and each other, has them connect in pairs, runs an
    all_reduce, and gives the nodes back. That takes as long as the engine needs to grant them. Raises
    `OptionError` if options contradict each other, or if an option for nodes is given without `on`.

    `.ok` is False if there is a problem; `.findings` has a level (ok, warning, problem), one line and what
    to do for each. `print` shows them as text, a notebook as a table.

    >>> report = nblaunch.doctor()                                         # doctest: +SKIP
    >>> [finding.advice for finding in report.problems]                    # doctest: +SKIP
    []
    >>> nblaunch.doctor(on="slurm", nnodes=2, slurm="-p gpu").ok           # doctest: +SKIP
    True
    """
    if on is not None:
        return check_nodes(LaunchOptions.from_keywords(on=on, **options))
    if options:
        msg = f"{next(iter(options))}= was given, but no engine places nodes. Add on=, or leave it out."
        raise OptionError(msg)
    if _notebook.inside_rank() is not None:
        # A rank has no business with a runtime or a private directory of its own.
        return examine([_THIS_PROCESS])
    with contextlib.closing(DoctorRuntime()) as own:
        report = examine(checks(own))
        if not nccl:
            return report
        started = time.monotonic()
        found = _found_by(Check(nccl_check.NAME, own.of(nccl_check.all_reduce)))
        return DoctorReport((*report.findings, *found), report.seconds + time.monotonic() - started)


def examine(checks: Sequence[Check]) -> DoctorReport:
    """Run the checks and return what they found, in their order."""
    started = time.monotonic()
    running = [_Running(check) for check in checks]
    findings = tuple(finding for each in running for finding in each.findings(started))
    return DoctorReport(findings, time.monotonic() - started)


@dataclass(slots=True)
class _Running:
    """One check on its thread; the thread of one that never answers ends with the process at the latest."""

    check: Check
    found: list[Finding] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        thread = threading.Thread(target=self._run, name=f"nblaunch-doctor {self.check.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No more threads: a finding of one of the checks, which are needed more than ever.
            self._run()

    def _run(self) -> None:
        self.found = _found_by(self.check, BaseException)  # a thread has nobody to raise it to
        self.done.set()

    def findings(self, started: float) -> list[Finding]:
        """Wait for the check's end, or the end of its time."""
        if self.done.wait(max(started + self.check.seconds - time.monotonic(), 0)):
            return self.found
        summary = f"no answer within {self.check.seconds:g} s; a thread goes on waiting for it"
        return [warning(self.check.name, summary, self.check.if_stuck)]


def _found_by(check: Check, catch: type[BaseException] = Exception) -> list[Finding]:
    try:
        return list(check.find())
    except catch as error:
        try:
            described = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - an exception's __str__ may do anything
            described = type(error).__name__
        summary = f"could not be checked: {described}"
        return [warning(check.name, summary, "Please report this, with the text above.")]


def _let_torch_load() -> None:
    """Wait for a check that imports torch: an import that goes on while Python ends crashes the process."""
    deadline = time.monotonic() + _LOADING_SECONDS
    while time.monotonic() < deadline and any(
        getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)
        for name in ("torch", "torch.distributed")
    ):
        time.sleep(0.02)


atexit.register(_let_torch_load)
