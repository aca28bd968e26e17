"""Nodes of a Slurm allocation: the one that the caller runs in, else a new one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from nblaunch._errors import LaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch.host.join import AT_END, PLACE
from nblaunch.nodes.engine import (
    Allocation,
    Engine,
    NodeProgram,
    NodeRequest,
    ProgramStatus,
    own_address,
    surrounding_job,
)
from nblaunch.nodes.process import StartedProgram, doing, end_all, last_lines
from nblaunch.protocol.messages import EngineState, EngineStatus

_PROGRAMS = ("salloc", "srun", "squeue", "scancel", "scontrol", "sinfo")
_JOB = "SLURM_JOB_ID"
# A busy controller, a limit on requests, or a site's own squeue take seconds.
_ANSWER_SECONDS = 30.0
_WITHDRAW_SECONDS, _CANCEL_SECONDS = 0.25, 0.2
_SCANCEL_SECONDS, _SCANCEL_AGAIN_SECONDS = 30.0, 1.0
_WORDS_SECONDS = 0.3
_COMPLETING_SECONDS = 1.0
_MISSING_SECONDS = 2.0
# While it is awaited nothing can be stopped, and it only says how to reach the nodes.
_SINFO_SECONDS = 3.0
_HET_SIZE = "SLURM_HET_SIZE"
_TRIED_HOSTS = 4

_CLIENT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables with which Slurm's programs find their cluster; the others describe a job, or a step of one."""
_OF_A_JOB = re.compile(
    rf"SLURM_(?!(?:{'|'.join(each.removeprefix('SLURM_') for each in _CLIENT)})\Z).*"
    rf"|SALLOC_CLUSTERS|PMI.*|{PLACE}"
)
"""And what only salloc heeds: the others would look for its job elsewhere."""
_FOR_AT_END = (*_CLIENT, "PATH", "LD_LIBRARY_PATH")

_REFUSED = {
    **dict.fromkeys(("N", "nodes", "n", "ntasks"), "Give nnodes and -n"),
    **dict.fromkeys(("ntasks-per-node", "ntasks-per-core", "ntasks-per-socket"), "Give -n"),
    **dict.fromkeys(("J", "job-name"), "The request is found by its name"),
    **dict.fromkeys(("o", "output", "e", "error"), "Give --log-dir"),
    **dict.fromkeys(("no-shell", "wrap"), "It is nblaunch that starts programs"),
    **dict.fromkeys(("M", "clusters"), "Set SLURM_CLUSTERS, which all of Slurm's programs heed"),
    **dict.fromkeys(("Q", "quiet"), "The job's number is read from what salloc prints"),
}
"""Options of salloc and sbatch that nblaunch sets itself, and what to do instead."""
_SHORT_FLAGS = "HIkKOsvXu"
"""Short options without a value, which may be combined with others in one word."""
_LEAST_PREFIX = 3

_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SUSPENDED")
_GRANTED = ("RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING")
# %A: each task of an array, and each component of a heterogeneous job, has a number of its own.
_FIELDS = "%A|%T|%r|%Q|%S|%e|%N"
_TAKEN_BACK = {"TIMEOUT": "time limit", "DEADLINE": "deadline", "PREEMPTED": "preempted"}
"""States in which Slurm has ended a job that would have gone on, in words."""
_REASONS = {"TimeLimit": "TIMEOUT", "Preempted": "PREEMPTED"}
"""What squeue gives as the reason while it ends the processes of such a job."""
_STEP_CANCELLED = re.compile(
    r"^(?: *\d+: )?slurmstepd-\S+: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT \S+"
    r"( DUE TO (?P<why>[A-Z ]+))? \*\*\*",
    re.MULTILINE,
)
_WORDS_OF_STEPS = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED"}
_ALLOCATED = re.compile(r"^salloc: (?:Pending|Granted) job allocation (\d+)", re.MULTILINE)
_TASKS_ENDED = re.compile(
    r"^srun: error: \S+: tasks? (?P<tasks>[\d,-]+): (?:Exited with exit code (?P<code>\d+)|(?P<how>.+))$",
    re.MULTILINE,
)
_NODE_FAILED = re.compile(r"^srun: error: Node failure on (?P<hosts>\S+)$", re.MULTILINE)
_LABELLED = re.compile(r"^ *(?P<task>\d+): (?P<text>.*)$")
_LABELLED_LINES = re.compile(_LABELLED.pattern, re.MULTILINE)
_SIGNALS = {"Killed": -9, "Terminated": -15, "Segmentation fault": -11, "Aborted": -6}


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A line of squeue."""

    id: str
    state: str
    reason: str = ""
    priority: str = ""
    starts: float | None = None
    ends: float | None = None
    nodes: str = ""

    @property
    def engine_state(self) -> EngineState:
        """The engine's state for this job."""
        if self.state in _PENDING:
            return EngineState.WAITING
        if self.state in _GRANTED:
            return EngineState.GRANTED
        return EngineState.ENDING if self.state == "COMPLETING" else EngineState.ENDED


def job_of(line: str) -> QueuedJob | None:
    """Read a line of squeue; None where it has none.

    >>> job_of("3|PENDING|Resources|4294901757|N/A|N/A|").reason
    'Resources'
    """
    fields = line.strip().split("|")
    if len(fields) != _FIELDS.count("|") + 1:
        return None
    number, state, reason, priority, starts, ends, nodes = fields
    return QueuedJob(
        number, state, "" if reason == "None" else reason, priority, _time(starts), _time(ends), nodes
    )


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() else None


def refused_word(words: Iterable[str]) -> str:
    """Return why the words of `--slurm` cannot be handed to salloc; empty if they can.

    >>> refused_word(["-p", "gpu", "--nodes=3"])
    '--nodes=3: Give nnodes and -n'
    """
    for word in words:
        name = ""
        if word.startswith("--"):
            long = word[2:].partition("=")[0]
            names = [each for each in _REFUSED if each.startswith(long) and len(long) >= _LEAST_PREFIX]
            name = names[0] if names else ""
        elif word.startswith("-"):
            name = word[1:].lstrip(_SHORT_FLAGS)[:1]
        if name in _REFUSED:
            return f"{word}: {_REFUSED[name]}"
    return ""


class SlurmAllocation:
    """A job of Slurm's, and the steps in it that run the node programs."""

    def __init__(self, request: NodeRequest) -> None:
        self._request = request
        self._environ = _environ(request)
        self._id = surrounding_job(request.environ, request.words)
        self._status = EngineStatus(engine=SlurmEngine.name, state=EngineState.ASKED, id=self._id)
        self._hosts: tuple[str, ...] = ()
        self._steps: list[SlurmStep] = []
        self._query: StartedProgram | None = None
        self._completing: float | None = None
        self._missing: float | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._salloc = None if self._id else StartedProgram(_salloc(request), self._environ, request.cwd)
        own = self._salloc is not None
        self._component = () if own or _HET_SIZE not in request.environ else ("--het-group=0",)
        """Of a heterogeneous job: the first, whose number is the job's."""
        self.released = not own
        """Whether Slurm has confirmed it; a job that is the caller's is left to them."""

    def status(self) -> EngineStatus:
        if self._salloc is not None and not self._id:
            code = self._salloc.exitcode  # first: what has ended has printed all
            printed = self._salloc.printed()
            found = _ALLOCATED.search(printed)
            if found is not None:
                self._id = found[1]
                self._status = replace(self._status, id=self._id)
            elif code is not None and not self._cancelled:
                words = re.sub(r"^salloc: (?:error: )?", "", last_lines(printed), flags=re.MULTILINE)
                self._status = replace(self._status, state=EngineState.ENDED, words=words)
        if self._cancelled:
            self._status = replace(self._status, state=EngineState.ENDED, words="given back", reason="")
        elif self._id and self._status.state is not EngineState.ENDED:
            self._status = self._job_status()
        return self._status

    def _job_status(self) -> EngineStatus:
        """Ask squeue. Slurm forgets ended jobs after a while."""
        gone = replace(self._status, state=EngineState.ENDED, words="it is gone", reason="")
        try:
            code, answer = self._squeue()
            jobs = [job for line in answer.splitlines() if (job := job_of(line))]
            # Asked about a task of an array, it may answer about all of them.
            job = next((job for job in jobs if job.id == self._id), None)
            if job is not None and job.engine_state is EngineState.GRANTED and not self._hosts:
                there = _host_names(self._request, job.nodes)
                self._hosts = tuple(each for each in there if each != self._request.spared)[
                    : self._request.most
                ]
        except (OSError, subprocess.SubprocessError, LaunchError) as error:
            return _without_answer(self._status, str(error))
        if job is None:
            unlisted = code == 0 and (bool(jobs) or not answer.strip())
            if "Invalid job id" in answer or self._is_missing(unlisted=unlisted):
                return gone
            return _without_answer(self._status, answer.strip() or "squeue does not list it")
        self._missing = None
        state, words = job.engine_state, job.state
        if state is EngineState.ENDING:
            # squeue shows the final state only once the job's processes are gone, which may take long.
            self._completing = self._completing or time.monotonic()
            with self._lock:
                printed = "\n".join(step.srun.printed() for step in self._steps)
            words = _REASONS.get(job.reason) or words_of_end(printed) or words
            if words != job.state or time.monotonic() > self._completing + _COMPLETING_SECONDS:
                state = EngineState.ENDED
        waiting, held = state is EngineState.WAITING, state is EngineState.GRANTED
        return EngineStatus(
            engine=SlurmEngine.name,
            state=state,
            id=self._id,
            words=_TAKEN_BACK.get(words, words),
            reason=job.reason if waiting else "",
            place=f"priority {job.priority}" if waiting and job.priority else "",
            starts=job.starts if waiting else None,
            ends=job.ends if held else None,
            hosts=self._hosts,
            preempted=words in _TAKEN_BACK,
        )

    def _is_missing(self, *, unlisted: bool) -> bool:
        """Return whether squeue has not listed the job for a while: a site's own may answer from a cache."""
        self._missing = (self._missing or time.monotonic()) if unlisted else None
        return self._missing is not None and time.monotonic() > self._missing + _MISSING_SECONDS

    def _squeue(self) -> tuple[int | None, str]:
        """Return squeue's exit status, and what it prints; `cancel` ends the wait for it."""
        command = ("squeue", "-h", "-t", "all", "-j", self._id, "-o", _FIELDS)
        query = StartedProgram(command, _for_answers(self._request), os.sep)
        with self._lock:
            self._query, cancelled = query, self._cancelled
        query.end_by(time.monotonic() + (0 if cancelled else _ANSWER_SECONDS))
        code, printed = query.exitcode, query.printed()
        return code, printed if printed.strip() or code == 0 else f"squeue took {_ANSWER_SECONDS:g} s"

    @property
    def _of_steps(self) -> dict[str, str]:
        """The environment of srun: a node of our own job can give it back where nobody else is left."""
        if self._salloc is None:
            return self._environ
        return {**self._environ, AT_END: shlex.join(("scancel", "-Q", self._id))}

    def start(self, program: NodeProgram) -> str:
        if not self._steps:
            self._add_step(program, range(len(self._hosts)))
            return ""
        running = {each.place for each in self.statuses() if each.running}
        for place in range(len(self._hosts)):
            if place not in running:
                self._add_step(program, [place])
        return ""

    def _add_step(self, program: NodeProgram, places: Sequence[int]) -> None:
        count = str(len(places))
        hosts = [self._hosts[place] for place in places]
        words = (
            *(f"--jobid={self._id}", "--overlap", "-N", count, "-n", count, "--ntasks-per-node=1"),
            *("-w", ",".join(hosts), "--cpu-bind=none", "--mpi=none", "--unbuffered", "--label"),
            # The end of a task, or of a host, ends no other: by default slurm.conf's WaitTime decides.
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--input=all", *self._component),
        )
        # In a step of one node each node is the first.
        environ = self._of_steps if len(places) > 1 else {**self._of_steps, PLACE: str(places[0])}
        command = ("srun", *words, self._request.python, *program.arguments)
        step = SlurmStep(places, hosts, StartedProgram(command, environ, self._request.cwd, program.stdin))
        with self._lock:
            self._steps.append(step)
            cancelled = self._cancelled
        if cancelled:  # meanwhile, by another thread
            end_all([step.srun])

    def statuses(self) -> tuple[ProgramStatus, ...]:
        with self._lock:
            steps = tuple(self._steps)
        latest = {program.place: program for step in steps for program in step.statuses()}
        return tuple(latest[place] for place in sorted(latest))

    def cancel(self) -> None:
        """End the steps, and withdraw the request or give the nodes back."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            sruns, query = [step.srun for step in self._steps], self._query
        for each in (*sruns, *([] if query is None else [query])):
            each.terminate()
        if self._salloc is not None:
            self._salloc.terminate()  # it withdraws what it has not got yet
            self._salloc.end_by(time.monotonic() + _WITHDRAW_SECONDS)
            # Not awaited: a slow controller may take as long as this process lives.
            scancel = threading.Thread(target=self._scancel, name="nblaunch-scancel", daemon=True)
            scancel.start()
            scancel.join(_CANCEL_SECONDS)
        end_all(sruns)

    def _scancel(self) -> None:
        """Cancel the job, again where Slurm refuses, as it does while its controller restarts."""
        deadline = time.monotonic() + _SCANCEL_SECONDS
        while not self.released and (left := deadline - time.monotonic()) > 0:
            try:
                _run(self._request, *_scancel(self._request), seconds=left)
                self.released = True
            except (OSError, subprocess.SubprocessError):
                time.sleep(_SCANCEL_AGAIN_SECONDS)


class SlurmStep:
    """A call of srun: a program on each of its hosts. Task n of it is the node of the n-th place."""

    def __init__(self, places: Sequence[int], hosts: Sequence[str], srun: StartedProgram) -> None:
        self.places, self.hosts, self.srun = places, hosts, srun
        self._wordless: dict[int, float] = {}
        """Tasks that have ended and of which nothing is printed: since when (monotonic)."""

    def statuses(self) -> Iterator[ProgramStatus]:
        code = self.srun.exitcode
        printed = self.srun.printed()
        ended = ends_of_tasks(printed, self.hosts)
        lines = {int(found["task"]): found["text"] for found in _LABELLED_LINES.finditer(printed)}
        for task, (place, host) in enumerate(zip(self.places, self.hosts, strict=True)):
            if code is None and task not in ended:
                yield ProgramStatus(host, place, running=True, words=doing(lines.get(task, "")))
                continue
            words = words_of_task(printed, task, host)
            if not words and code is None and self._awaits_words(task):
                yield ProgramStatus(host, place, running=True)
            else:
                yield ProgramStatus(host, place, running=False, exitcode=ended.get(task, code), words=words)

    def _awaits_words(self, task: int) -> bool:
        """Whether an ended task's words may still come: srun may print its end first."""
        now = time.monotonic()
        return now < self._wordless.setdefault(task, now) + _WORDS_SECONDS


def ends_of_tasks(printed: str, hosts: Sequence[str]) -> dict[int, int | None]:
    """Return the exit codes of the tasks that srun says have ended; None where it has no code.

    >>> ends_of_tasks("srun: error: hB: tasks 0-1: Exited with exit code 2", ["hA", "hB"])
    {0: 2, 1: 2}
    """
    found: dict[int, int | None] = {}
    for line in _TASKS_ENDED.finditer(printed):
        code = int(line["code"]) if line["code"] else _SIGNALS.get(line["how"].partition(" (")[0])
        for part in line["tasks"].split(","):
            first, _, last = part.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), code)
    for line in _NODE_FAILED.finditer(printed):
        found |= dict.fromkeys((n for n, host in enumerate(hosts) if host in line["hosts"].split(",")), None)
    return found


def words_of_end(printed: str) -> str:
    """Return the state in which Slurm ends a job, from its steps' output; empty if that does not say it.

    >>> words_of_end("slurmstepd-hA: error: *** STEP 1.0 ON hA CANCELLED AT 12:25:48 DUE TO TIME LIMIT ***")
    'TIMEOUT'
    """
    found = _STEP_CANCELLED.search(printed)
    return "" if found is None else _WORDS_OF_STEPS.get(found["why"], "CANCELLED")


def words_of_task(printed: str, task: int, host: str) -> str:
    """Return the last lines that a task printed, else Slurm's errors, those about its host first."""
    lines = [(_LABELLED.fullmatch(line), line) for line in printed.splitlines()]
    own = [found["text"] for found, _ in lines if found is not None and int(found["task"]) == task]
    others = [line for found, line in lines if found is None and not _TASKS_ENDED.fullmatch(line)]
    errors = [line for line in others if re.search("error:|fatal:", line)]
    of_host = [line for line in errors if re.search(rf"\b{re.escape(host)}\b", line)]
    return last_lines("\n".join(own or of_host or errors))


class SlurmEngine(Engine):
    """`--on slurm`."""

    name: ClassVar[str] = "slurm"

    @staticmethod
    def check(request: NodeRequest) -> None:
        if refused := refused_word(request.words):
            msg = f"--slurm has an option that nblaunch sets itself: {refused}."
            raise OptionError(msg)
        for each in _PROGRAMS:
            if shutil.which(each, path=request.environ.get("PATH")) is None:
                msg = (
                    f"--on slurm needs {each}, which is not on the PATH. Load the cluster's module, or "
                    "apt-get install slurm-client."
                )
                raise OptionError(msg, kind=FailureKind.NOT_INSTALLED)

    @staticmethod
    def address(request: NodeRequest) -> str:
        job = request.environ.get("SLURM_JOB_NODELIST")
        of_job = ("-n", job) if surrounding_job(request.environ, request.words) and job else ()
        try:
            answer = _run(request, "sinfo", "-h", "-N", *of_job, "-o", "%o", seconds=_SINFO_SECONDS)
        except (OSError, subprocess.SubprocessError):
            answer = ""
        return own_address(list(dict.fromkeys(answer.split()))[:_TRIED_HOSTS])

    @staticmethod
    def at_end(request: NodeRequest) -> tuple[str, ...]:
        """Return the command that cancels the job by its name, since there is no job id yet."""
        if surrounding_job(request.environ, request.words):
            return ()
        kept = (f"{name}={request.environ[name]}" for name in _FOR_AT_END if name in request.environ)
        return (*kept, *_scancel(request))

    @staticmethod
    def ask(request: NodeRequest) -> Allocation:
        return SlurmAllocation(request)


def _salloc(request: NodeRequest) -> tuple[str, ...]:
    count = str(request.most) if request.least == request.most else f"{request.least}-{request.most}"
    # A CPU for each rank: a single task would get one. The user's options come last, and win.
    own = isinstance(request.nproc, int) and not any("cpus-per-" in each for each in request.words)
    cpus = ("-c", str(request.nproc)) if own else ()
    # Without a word on tasks a node has one, and of a range as many nodes as there are are granted.
    # Where the others go on without a node, its failure does not end the job.
    nodes = ("-N", count, *cpus, *(("--no-kill",) if request.least < request.most else ()))
    return ("salloc", "--no-shell", "-J", request.name, *nodes, *request.words)


def _scancel(request: NodeRequest) -> tuple[str, ...]:
    return ("scancel", "-Q", "--name", request.name, "-u", str(os.getuid()))


def _environ(request: NodeRequest) -> dict[str, str]:
    """Return the environment of Slurm's programs, which names the caller's job by its id alone.

    Slurm would take other variables of a job or a step for options.
    """
    around = surrounding_job(request.environ, request.words)
    job = {_JOB: around} if around else {}
    return {name: value for name, value in request.environ.items() if not _OF_A_JOB.fullmatch(name)} | job


def _for_answers(request: NodeRequest) -> dict[str, str]:
    # Times as numbers: the caller's time zone may differ.
    return {**_environ(request), "SLURM_TIME_FORMAT": "%s"}


def _host_names(request: NodeRequest, nodes: str) -> tuple[str, ...]:
    """Return the names of hosts that Slurm has in short: h[1-3]."""
    if not re.search(r"[\[,]", nodes):
        return (nodes,)
    return tuple(_answer(request, "scontrol", "show", "hostnames", nodes).split())


def _answer(request: NodeRequest, *command: str) -> str:
    return _run(request, *command, seconds=_ANSWER_SECONDS)


def _run(request: NodeRequest, *command: str, seconds: float) -> str:
    return subprocess.run(  # noqa: S603 - Slurm's programs, as the caller finds them
        command,
        env=_for_answers(request),
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=True,
    ).stdout


def _without_answer(status: EngineStatus, why: str) -> EngineStatus:
    return replace(status, reason=f"Slurm does not answer: {last_lines(why).partition(chr(10))[0]}")
