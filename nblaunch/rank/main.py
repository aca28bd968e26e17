"""The life of a rank: hello, prepare, ready, job, outcome, leave.

torchelastic calls `run_rank` in a fresh fork of the server. A rank ends only when the hub tells it to:
one that has failed or finished stays until the others have said what happened to them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from nblaunch._protocol import (
    CellJob,
    DeadVariable,
    Dispatch,
    Entered,
    FailureRecord,
    FunctionJob,
    Heal,
    Healed,
    Hello,
    Leave,
    Names,
    Phase,
    Prepare,
    PullJob,
    PushJob,
    Raised,
    Returned,
    ScriptJob,
    Shown,
    Started,
)
from nblaunch._state import describe_exit
from nblaunch.job import payload, shared
from nblaunch.rank import (
    environment,
    failure,
    fresh,
    inspection,
    introspection,
    process_group,
    script,
    shell,
    streams,
)
from nblaunch.rank.casualties import Casualties
from nblaunch.rank.display import outlet
from nblaunch.rank.isolate import isolate, keep_sockets_in
from nblaunch.rank.link import Link
from nblaunch.rank.questions import Questions
from nblaunch.rank.variables import Variables

_ERROR_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Orders:
    """What a rank is born with: where the hub is, and how it will know this rank."""

    address: str
    group: str
    token: str
    attempt: int
    spill: str
    keep: bool = False
    """Whether the rank has one job after the other."""
    fresh: bool = False
    """Whether the rank is to be a new Python."""
    virtual_local_rank: bool = False
    """Whether it is to see one GPU only, as local rank 0."""


class ValueNotSentError(TypeError):
    """The job succeeded, but its value cannot be pickled; says which part."""


class Rank:
    """One rank: the process that this object lives in."""

    def __init__(self, orders: Orders) -> None:
        """Connect to the hub."""
        self.orders = orders
        self.rank = int(os.environ["RANK"])
        self.device = torch.device("cpu")
        self.device_name = "cpu"
        self.phase = Phase.CONNECT
        self.titles: dict[str, str] = {}
        self.outgoing: shared.Outgoing | None = None
        self.variables = Variables(kept=orders.keep)
        self.casualties = Casualties(shell.namespace, frozenset(shell.namespace()))
        self.raised: BaseException | None = None
        """What the last job raised here."""
        self.names_told: tuple[str, ...] = ()
        identity = f"{orders.group}/{orders.attempt}/{self.rank}".encode()
        inspection.dump_on_signal(orders.spill, self.rank)
        self.link = Link(orders.address, identity, inspection.RankInspector(self.rank, self.titles))
        streams.capture_descriptors()
        streams.install(self.link.switched)
        outlet.send, outlet.rank = self.link.send, self.rank
        questions = Questions(self.rank, self.link.send)
        self.link.on_answer = questions.answers.put
        questions.install()
        self.link.start(
            Hello(
                rank=self.rank,
                token=orders.token,
                attempt=orders.attempt,
                local_rank=int(os.environ["LOCAL_RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                node=platform.node(),
                pid=os.getpid(),
            )
        )

    def live(self) -> int:
        """Follow the hub's orders until it says leave; return the exit code."""
        exitcode = 1
        try:
            while True:
                try:
                    match self.link.inbox.get():
                        case Prepare() as prepare:
                            self._guarded(functools.partial(self._prepare, prepare))
                        case Dispatch() as dispatch:
                            self._guarded(functools.partial(self._work, dispatch))
                        case Heal(number=number, reform=reform):
                            self._heal(number, reform=reform)
                        case Leave(exitcode=exitcode):
                            return exitcode
                except KeyboardInterrupt:
                    # It was sent while the job was still at work, and comes when that has ended.
                    if not self.orders.keep:
                        raise
        finally:
            self._leave(exitcode)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do one step; whatever it raises becomes this rank's failure."""
        try:
            try:
                step()
            finally:
                self.link.end_job()
                if self.orders.keep:
                    self._tell_names()
        except SystemExit as error:
            self._exited(error)
        except script.ProgramEndedError as error:
            self._program_ended(error.exitcode)
        except BaseException as error:  # noqa: BLE001 - a job may raise anything
            self._failed(error, 1)

    def _prepare(self, prepare: Prepare) -> None:
        self._enter(Phase.PROCESS_GROUP)
        environment.apply(prepare)
        if self.orders.virtual_local_rank:
            environment.see_one_device_only()
        process_group.prefer_loopback()
        inspection.record_collectives()
        self.device = environment.choose_device(prepare)
        self.device_name = str(self.device) if prepare.device_type else ""
        self._enter(Phase.PROCESS_GROUP)
        if prepare.backend is not None:
            process_group.form(prepare.backend, self.device, prepare.timeout)
        process_group.accept_user_calls()
        self._enter(Phase.READY)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.link.send(Entered(rank=self.rank, phase=phase, device=self.device_name))

    def _work(self, dispatch: Dispatch) -> None:
        self.phase, self.raised = Phase.JOB, None
        if self.outgoing is not None:
            # The value of the job before: the notebook has it, or this job would not be here.
            self.outgoing.close()
            self.outgoing = None
        self.link.send(Started(rank=self.rank, time=time.time(), offsets=streams.offsets()), urgent=False)
        self.link.begin_job()
        job = dispatch.job
        self.titles.update({filename: title for filename, (title, _) in dispatch.sources.items()})
        shell.remember_sources(dispatch.sources)
        for module in dispatch.imports:
            __import__(module)
        with self.variables.protected():
            stream, *buffers = shared.get(dispatch.payload, private=True)
            loaded = payload.loads(stream, buffers, str(self.device))
        payload.remember_received_classes()
        value = self._do(job, loaded)
        self.link.finish_job()
        # That a script has come to its end is all that its exit status says.
        self._returned(value, seen=not isinstance(job, ScriptJob) or bool(job.pull))

    def _do(self, job: CellJob | FunctionJob | ScriptJob | PushJob | PullJob, loaded: Any) -> object:
        match job:
            case CellJob():
                return self._run_cell(job, loaded)
            case PushJob():
                self.variables.push(loaded)
                return None
            case PullJob(names=names):
                return self.variables.pull(names)
            case FunctionJob():
                return self._call(*loaded)
            case ScriptJob():
                return self._run_script(job)

    def _run_cell(self, job: CellJob, captured: dict[str, Any]) -> object:
        self.variables.bring(captured)
        shell.namespace().update(
            rank=self.rank,
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            device=self.device,
        )
        self.titles[job.filename] = job.title
        result = shell.prepare().run(job)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            raise error
        if self.orders.keep:
            self.variables.bound_by(shell.prepare().transform_cell(job.source))
        return result.result

    def _run_script(self, job: ScriptJob) -> object:
        if job.file:
            self.titles[job.file] = job.title
        script.run(job)
        pulled = dict(zip(job.pull, self.variables.pull(job.pull), strict=True))
        script.end()
        return pulled if job.pull else 0

    @staticmethod
    def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        value = function(*args, **kwargs)
        return asyncio.run(_awaited(value)) if inspect.iscoroutine(value) else value

    def _returned(self, value: object, *, seen: bool = True) -> None:
        self.phase = Phase.VALUE
        if self.orders.keep:
            # Before the value, with which the job ends: the next one is made of what is known then.
            self._tell_names()
        text, html = shell.prepare().describe(value) if seen else ("", "")
        try:
            packed = payload.dumps_home(value)
            self.outgoing = shared.put(packed, lambda: Path(self.orders.spill))
        except Exception as error:
            msg = (
                f"the job returned a {_unsendable(value)}, which cannot be sent to the notebook: {error}. "
                "Return plain data (numbers, tensors, a state_dict) instead."
            )
            raise ValueNotSentError(msg) from error
        self.link.send(
            Returned(
                rank=self.rank,
                value=self.outgoing.payload,
                time=time.time(),
                text=failure.encodable(text),
                html=failure.encodable(html),
                offsets=streams.offsets(),
            )
        )

    def _exited(self, error: SystemExit) -> None:
        """`sys.exit()` ends the job with value None; with a code, it is a failure of that code."""
        if error.code is None or error.code == 0:
            self._guarded(lambda: self._returned(None))
            return
        if not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
        # What a process can end with: `sys.exit(-1)` is 255, `True` is 1, and 256 must be no success.
        self._failed(error, (error.code & 0xFF or 1) if isinstance(error.code, int) else 1)

    def _failed(self, error: BaseException, exitcode: int) -> None:
        record = failure.record(error, self.titles, phase=self.phase, exitcode=exitcode)
        if self.orders.keep:
            introspection.last_error = self.raised = error
        else:
            failure.write_error_file(error)
        self.link.send(Raised(rank=self.rank, failure=record, offsets=streams.offsets()))
        self.link.send(Shown(rank=self.rank, text=failure.shown(error)))

    def _program_ended(self, exitcode: int) -> None:
        """Say of a program what is said of a rank that ends without a word."""
        record = FailureRecord(
            type="ProcessExited", message=describe_exit(exitcode), exitcode=exitcode, time=time.time()
        )
        self.link.send(Raised(rank=self.rank, failure=record, offsets=streams.offsets()))

    def _tell_names(self) -> None:
        names = self.variables.names()
        if names != self.names_told:
            self.names_told = names
            self.link.send(Names(rank=self.rank, names=names))

    def _heal(self, number: int, *, reform: bool) -> None:
        """Be ready for another job."""
        error = ""
        dead: tuple[DeadVariable, ...] = ()
        try:
            if reform:
                found = self.casualties.find()
                process_group.form_again(number, self.device)
                dead = self.casualties.bury(found)
            else:
                dead = self.casualties.stumbled_over(self.raised)
        except Exception as caught:  # noqa: BLE001 - whatever torch raises: the group is started again then
            error = f"{type(caught).__name__}: {caught}"[:_ERROR_CHARACTERS]
        self.link.send(Healed(rank=self.rank, number=number, error=error, dead=dead))

    def _leave(self, exitcode: int) -> None:
        self.phase = Phase.LEAVE
        try:
            atexit._run_exitfuncs()  # noqa: SLF001 - a fork ends by os._exit; programs expect atexit to run
            if exitcode == 0:
                # A rank that failed closes its connections by dying: leaving in order could wait for peers.
                process_group.leave()
        finally:
            for stream in (sys.stdout, sys.stderr):
                # The job may have closed them, or put anything in their place.
                with contextlib.suppress(Exception):
                    stream.flush()
            self.link.close()
            if self.outgoing is not None:
                self.outgoing.close()


def _unsendable(value: object) -> str:
    """Name the type of a value that cannot be pickled; of a dict, the first such entry and its key."""
    for key, each in value.items() if type(value) is dict else ():
        try:
            payload.dumps_home(each)
        except Exception:  # noqa: BLE001 - whatever the objects raise
            return f"{type(each).__module__}.{type(each).__qualname__} under {key!r:.100}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


async def _awaited(value: Any) -> object:
    return await value


def run_rank(orders: Orders) -> None:
    """Be a rank; torchelastic's entry point."""
    isolate()
    if orders.fresh:
        fresh.begin_anew(asdict(orders), orders.spill)
    exitcode = _live(orders)
    if exitcode:
        raise SystemExit(exitcode)


def resume(orders: dict[str, Any]) -> NoReturn:
    """Be a rank in a new Python; `orders` are the fields of `Orders`."""
    fresh.load_what_torchelastic_brings()
    exitcode = _live(Orders(**orders))
    # As a fork ends: what runs at exit has run.
    os._exit(exitcode)


def _live(orders: Orders) -> int:
    keep_sockets_in(orders.spill)
    process_group.remember_agent_address(orders.attempt)
    try:
        return Rank(orders).live()
    except Exception:  # noqa: BLE001 - a rank that cannot even say so to the hub
        # torch would write it to a file in the temporary directory, which nobody reads or removes.
        traceback.print_exc()
        return 1
