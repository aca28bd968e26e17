"""The life of a rank: hello, prepare, ready, job, outcome, leave.

    run_rank            in a fork of the server, called by torchelastic
      exec_new_python     --start-method spawn: the same process goes on as a new Python, in `resume`
      _live
        Rank(orders)        the control thread connects and sends Hello
        Rank.live           the main thread takes one order after the other from the inbox
          Prepare             environment, device, process group: Entered(READY)
          Dispatch            a job: Started, Finishing if it takes a while, then Returned or Raised
          Recover             another process group, or the same one: Recovered
          Adopt               takes a new rank number; the control thread has already sent Hello
          Leave               exit functions, the process group, the exit code

A rank ends only when the hub sends Leave: one that has failed or finished stays until the others have
reported their outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import os
import platform
import queue
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch.utils import hooks

from nblaunch._errors import NblaunchError
from nblaunch._process_tree import this_python
from nblaunch.capture import pickling, shared_memory
from nblaunch.probes import diff, loggers, rank_metrics, steps
from nblaunch.protocol import messages
from nblaunch.protocol.state import describe_exit
from nblaunch.rank import (
    environment,
    failure,
    flight_recorder,
    in_place,
    memory,
    optimizer_steps,
    preempt,
    process_group,
    script,
    shell,
    stacks,
    stdio,
    values,
)
from nblaunch.rank.control import Link
from nblaunch.rank.isolate import isolate, keep_files_in, note_own_children
from nblaunch.rank.modules import OwnModules
from nblaunch.rank.namespace import Arrival, DeadVariables, Found, Variables
from nblaunch.rank.sketches import Sketches

_ERROR_CHARACTERS = 2000
_NOT_RENEWED = "models and meshes cannot go on with the new process group: "
# How long a failed job waits for numbers that a GPU still computes: its stream may be stuck.
_SETTLE_SECONDS = 1.0
# Most ends are over by then: shown at once, they would only flicker.
_MOMENT_SECONDS = 0.2
# How long a rank has been without orders when it rehearses, or looks at its variables, one after the other.
_IDLE_SECONDS = 0.25
# They have just formed their group together.
_AGREE_SECONDS = 30.0
_RESUME = (
    "import json, os, sys; given = json.load(open(sys.argv[1])); os.unlink(sys.argv[1]); "
    "sys.path[:] = given['path']; from nblaunch.rank.main import resume; resume(given['orders'])"
)


def run_rank(orders: messages.Orders) -> None:
    isolate()
    if orders.fresh is not None:
        environ = environment.for_rank(orders.fresh, keep=orders.keep)
        exec_new_python(asdict(replace(orders, fresh=None)), orders.spill, environ)
    if exitcode := _live(orders):
        raise SystemExit(exitcode)


def resume(orders: dict[str, Any]) -> NoReturn:
    """Be a rank in a new Python; `orders` are the fields of `Orders`."""
    # What a fork finds loaded when torchelastic calls it: its error files.
    importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    script.leave_out_finalizers()
    # As a fork ends: what runs at exit has run.
    os._exit(_live(messages.Orders(**orders)))


def _live(orders: messages.Orders) -> int:
    keep_files_in(orders.spill)
    note_own_children()
    shell.prepare(orders.spill)
    process_group.remember_agent_address(orders.attempt)
    try:
        return Rank(orders).live()
    except Exception:  # noqa: BLE001 - a rank that cannot even report it to the hub
        # torch would write it to a file in the temporary directory, which nobody reads or removes.
        traceback.print_exc()
        return 1


def exec_new_python(orders: dict[str, Any], directory: str, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process's program by a new Python that calls `resume(orders)`.

    The process keeps its id, its log files, its session and "die with your parent"; it loses all modules that
    the server had loaded, which is what `--start-method spawn` is for. It starts under `environ`: some
    variables are read when a program or a library is loaded, and never again.
    """
    # In a file, since they hold the rank's token. The new Python removes it; if it does not get that far, the
    # file goes with the group's directory.
    file = Path(directory, f"orders-{os.getpid()}")
    file.touch(mode=0o600)
    file.write_text(json.dumps({"path": sys.path, "orders": orders}))
    command = this_python()
    os.execve(command[0], [*command, "-c", _RESUME, str(file)], environ)  # noqa: S606 - our own interpreter


def _pickler(*arguments: Any, **keywords: Any) -> Any:
    # Not before: what a rank never has the time for costs nothing.
    from nblaunch.rank import revival

    return revival.pickler(*arguments, **keywords)


class Rank:
    """One rank: the process that this object lives in."""

    def __init__(self, orders: messages.Orders) -> None:
        self.orders = orders
        self.rank = int(os.environ["RANK"])
        self._spill = functools.partial(Path, orders.spill)
        # Hooks have numbers, and come with a module from the notebook: a new one must not replace them. The
        # numbers are the same on all ranks, whose modules can be compared.
        hooks.RemovableHandle.next_id = zlib.crc32(os.environ["TORCHELASTIC_RUN_ID"].encode()) << 32
        self.device = torch.device("cpu")
        self.device_name = "cpu"
        self.phase = messages.Phase.CONNECT
        self.titles: dict[str, str] = {}
        self._outgoing = contextlib.ExitStack()
        """The last job's value and profile: the notebook has them once the next job is dispatched."""
        self.variables = Variables(kept=orders.keep, directory=self._spill())
        self._last_names = messages.Names(rank=-1, names=())
        self._rebound: tuple[str, ...] = ()
        self._joins = False
        """Whether it was started again and has got no variables yet: they come before the next job."""
        self._renumbered = False
        self._unusable = ""
        """CUDA's error, of a session's rank whose GPU is of no more use to it."""
        self.sketches = Sketches(_pickler, lambda: not self.link.inbox.empty())
        self._began = 0.0
        """When the job began (monotonic)."""
        self._names_reported = False
        """Whether the job that runs has reported the rank's variables."""
        self.dead_variables = DeadVariables()
        self.modules = OwnModules()
        self.raised: BaseException | None = None
        """What the last job raised here."""
        self._internal = False
        """Whether the user sees nothing of the job."""
        self._unsaved = False
        """Whether a job has run since this rank last saved."""
        self._rehearsed = False
        """Whether it has had the time to."""
        self._waited = False
        """Whether it has waited for the threads of its job."""
        stacks.dump_on_signal(orders.spill, self.rank)
        inspector = stacks.RankInspector(self.rank, self.titles)
        self.link = Link(orders.address, orders.group, inspector, keep=orders.keep)
        stdio.capture_descriptors()
        stdio.install(
            self.link.switched, lambda size: self.link.send(messages.Unwritten(rank=self.rank, size=size))
        )
        shell.publisher.send, shell.publisher.rank = self.link.send, self.rank
        self.questions = stdio.Questions(self.rank, self.link.send)
        self.link.on_answer = self.questions.install()
        rank_metrics.start(self.link.metrics)
        self.link.start(
            messages.Hello(
                rank=self.rank,
                token=orders.token,
                attempt=orders.attempt,
                local_rank=int(os.environ["LOCAL_RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                node=platform.node(),
                pid=os.getpid(),
            )
        )

    @property
    def _several(self) -> bool:
        """Whether other ranks may have the same variables."""
        return int(os.environ["WORLD_SIZE"]) > 1

    def live(self) -> int:
        exitcode, abort = 1, False
        try:
            while True:
                try:
                    match self._next_order():
                        case messages.Prepare() as prepare:
                            self._guarded(functools.partial(self._prepare, prepare))
                        case messages.Dispatch() as dispatch:
                            self._guarded(functools.partial(self._work, dispatch))
                        case messages.Recover() as order:
                            self._recover(order)
                        case messages.Adopt() as other:
                            self._adopt(other)
                        case messages.Preempt():
                            self._save(in_job=False)
                        case messages.Leave(exitcode=exitcode, abort=abort):
                            return exitcode
                except KeyboardInterrupt:
                    # The signal was sent while the job was still at work, and arrives after its end.
                    if not self.orders.keep:
                        raise
        finally:
            self._leave(exitcode, abort=abort)

    def _next_order(self) -> object:
        """Wait for the next order; until it comes, rehearse before the first one, later sketch variables."""
        if not self._rehearsed:
            self._rehearsed = True
            with contextlib.suppress(queue.Empty):
                return self.link.inbox.get(timeout=_IDLE_SECONDS)
            self._rehearse()
        idle, last_told = False, time.monotonic()
        while self.sketches.waits:
            at_once = (idle or self.sketches.hurries) and not process_group.is_busy(self.device)
            with contextlib.suppress(queue.Empty):
                return self.link.inbox.get(timeout=0.0 if at_once else _IDLE_SECONDS)
            idle = idle or not at_once
            if not at_once:
                continue  # whether the device is busy now is not known
            if self.sketches.go_on(self.variables.to_save()) or time.monotonic() >= last_told + _IDLE_SECONDS:
                self._send_names((), urgent=True)
                last_told = time.monotonic()
        return self.link.inbox.get()

    def _rehearse(self) -> None:
        """Do what every job does, while a rank of a standby group waits.

        A fork copies a page when it first writes to it. A job writes to a thousand of them, for 5 us each,
        and the first look at the rank's memory takes as long. Nothing here reads the environment, which comes
        with `Prepare`: of torch much would keep what it has read.
        """
        shell.rehearse()
        with values.send(None, self._spill) as outgoing:
            parts = shared_memory.get(outgoing.payload, private=True)
            pickling.loads(parts[0], parts[1:], self.device_name)
        script.leave_out_finalizers()
        memory.used()
        process_group.connect()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do one step; what it raises becomes this rank's failure."""
        try:
            try:
                step()
            except BaseException as error:
                # From here on no interrupt reaches the main thread, also none that is on its way.
                with contextlib.suppress(KeyboardInterrupt):
                    self.link.end_job()
                self.link.end_job()
                failure.clear_own_frames(error)
                if self.orders.keep:
                    in_place.note_backward()
                self._save(in_job=True)
                self.link.metrics.settle(_SETTLE_SECONDS)
                self._unusable = process_group.broken() if self.orders.keep else ""
                raise
            finally:
                self.link.end_job()
                self.link.metrics.end_job()
                steps.end_job()
                if self.orders.keep and not self._unusable:  # else what it had before the job is known
                    self._report_names()
        except SystemExit as error:
            self._exited(error)
        except script.ProgramEndedError as error:
            # As a rank that exits without a result or an error.
            words, now = describe_exit(error.exitcode), time.time()
            self._report_failure(
                messages.FailureRecord(type="ProcessExited", message=words, exitcode=error.exitcode, time=now)
            )
        except BaseException as error:  # noqa: BLE001 - a job may raise anything
            self._failed(error, 1)

    def _save(self, *, in_job: bool) -> None:
        """Call what `on_preempt` has registered, if that was ordered, and a job has run since the last time.

        What this prints is that of the job: of the one that ends now, or of a session's next one.
        """
        until = self.link.preemption()
        if until is None:
            return
        self.link.send(messages.Preempting(rank=self.rank))
        stdio.output.main_saves = not in_job
        failed = preempt.call_all(until, in_job=in_job) if self._unsaved else ()
        stdio.output.main_saves = self._unsaved = False
        preempt.saved()
        offsets = None if in_job or self.orders.keep else stdio.output.offsets()
        self.link.send(
            messages.Preempted(rank=self.rank, failed=tuple(map(failure.encodable, failed)), offsets=offsets)
        )

    def _prepare(self, prepare: messages.Prepare) -> None:
        self._enter(messages.Phase.PROCESS_GROUP)
        environment.apply(prepare, keep=self.orders.keep)
        if self.orders.virtual_local_rank:
            environment.see_one_device_only(prepare.accelerators)
        if self.orders.numa_binding is not None:
            # After the environment is set: this asks CUDA, which reads it once.
            environment.bind_to_cpus(self.orders.numa_binding, int(os.environ["LOCAL_RANK"]))
        flight_recorder.record_collectives()
        self.device = environment.choose_device(prepare)
        self.device_name = str(self.device) if prepare.device_type else ""
        self._enter(messages.Phase.PROCESS_GROUP)
        if self.orders.keep:
            in_place.accept_groups()
            optimizer_steps.follow()
        if prepare.backend is not None:
            process_group.form(prepare.backend, self.device, prepare.timeout, joins=prepare.joins)
            if process_group.rethrows_errors() and (warning := environment.unheard_timeouts()):
                self._notify(warning)
        process_group.accept_user_calls()
        environment.note_given()
        if self.orders.keep:
            self._set_rank_names()
        self._joins = prepare.joins
        if not self._joins:
            self._enter(messages.Phase.READY)

    def _adopt(self, other: messages.Adopt) -> None:
        """Be another rank, with all variables; the next `Recover` forms the process group."""
        before = os.environ["RANK"], os.environ["WORLD_SIZE"]
        self.rank = shell.publisher.rank = self.questions.rank = other.rank
        os.environ.update(other.environ)
        process_group.go_on_in(other.attempt)
        self._renumbered = before != (os.environ["RANK"], os.environ["WORLD_SIZE"])
        self._set_rank_names()
        self._enter(messages.Phase.PROCESS_GROUP)

    def _enter(self, phase: messages.Phase) -> None:
        self.phase = phase
        self.link.send(messages.Entered(rank=self.rank, phase=phase, device=self.device_name))

    def _work(self, dispatch: messages.Dispatch) -> None:
        self._joins = self._joins and dispatch.internal
        self._begin(dispatch)
        job = dispatch.job
        self.titles.update(dispatch.titles)
        if dispatch.code is not None:
            self.modules.take(dispatch.code)
        if not dispatch.internal and (notice := self.modules.notice()):
            sys.stderr.write(notice)
        shell.remember_sources(dispatch.sources)
        for module in dispatch.imports:
            __import__(module)
        parts = shared_memory.get(dispatch.payload, private=True)
        self.variables.begin_tenure(dispatch.tenure)
        if dispatch.objects is None:
            if not dispatch.query:
                self.variables.release()
            loaded = pickling.loads(parts[0], parts[1:], str(self.device))
        else:
            loaded = self._arrived(parts, dispatch.objects, job)
        del parts
        pickling.remember_received_classes()
        with self._probed(dispatch):
            value = self._do(job, loaded) if self.orders.keep else self._do_to_the_end(job, loaded)
        # While an interrupt still ends the wait for a GPU.
        self.link.metrics.settle()
        self.link.finish_job()
        # The exit status of a script, always 0 here, is not worth showing.
        seen = not isinstance(job, messages.ScriptJob) or bool(job.pull)
        self._returned(value, seen=seen, cell=job if isinstance(job, messages.CellJob) else None)

    def _profiled(self, dispatch: messages.Dispatch) -> AbstractContextManager[None]:
        if not dispatch.insight.profile:
            return contextlib.nullcontext()
        # Not before: what is not asked for costs nothing.
        from nblaunch.probes.profiling import Profiling

        return Profiling(
            self.rank, dispatch.insight, self.link.sample_clock, self._spill(), self._send_profile
        )

    def _send_profile(self, reduced: bytes, trace: bytes) -> None:
        packed = pickling.Packed(memoryview(reduced), (memoryview(trace),))
        profile = self._outgoing.enter_context(shared_memory.put(packed, self._spill))
        self.link.send(messages.Profiled(rank=self.rank, data=profile.payload))

    def _begin(self, dispatch: messages.Dispatch) -> None:
        """Report `Started`; from the end of this on an interrupt reaches the job."""
        self.phase, self.raised, self._began = messages.Phase.JOB, None, time.monotonic()
        self._unsaved = self._unsaved or not dispatch.query
        in_place.left_in_backward = False
        # A query reports nothing: objects that the notebook refers to at this moment stay.
        self._names_reported, self._internal = dispatch.query, dispatch.internal
        if not dispatch.query:
            diff.end_job()
        if not dispatch.internal or isinstance(dispatch.job, messages.PushJob):
            shell.free_gpu_memory()
        if not dispatch.internal:
            memory.reset_peak()
        self._outgoing.close()
        optimizer_steps.begin_job()
        late = not dispatch.internal and bool(stdio.output.kept)
        started = messages.Started(
            rank=self.rank, time=time.time(), offsets=stdio.output.offsets(), late=late
        )
        self.link.send(started, urgent=False)
        if not dispatch.internal:
            self.link.metrics.begin_job()
            stdio.output.begin_job()
        self.link.begin_job()

    def _arrived(self, parts: Sequence[memoryview], objects: messages.Objects, job: object) -> Any:
        """Unpickle the payload of a session's job; keep it once it has arrived on every rank."""
        arrival, pushed = Arrival(), isinstance(job, messages.PushJob)
        try:
            loaded = pickling.loads_known(
                parts, str(self.device), self.variables.found, arrival.offer, pushed=pushed
            )
        except BaseException:
            arrival.undo()
            raise
        try:
            if objects.wait:
                self.link.send(messages.Arrived(rank=self.rank))
                self.link.proceed.wait()
            self._keep(job, loaded, objects, arrival)
        except BaseException:
            # The hub sends `Proceed` to every rank before an interrupt, or to none at all.
            if self.link.proceed.is_set() or not objects.wait:
                self._keep(job, loaded, objects, arrival)
            else:
                arrival.undo()
            raise
        return loaded.value

    def _keep(
        self, job: object, loaded: pickling.Loaded, objects: messages.Objects, arrival: Arrival
    ) -> None:
        arrival.undo()
        self.variables.keep(loaded, objects)
        self.variables.bring(arrival.offered)
        match job:
            case messages.CellJob():
                self.variables.bring(loaded.value)
            case messages.FunctionJob():
                self.variables.bring(dict(loaded.value[-1]))
            case messages.PushJob():
                self.variables.push(loaded.value)

    @contextlib.contextmanager
    def _probed(self, dispatch: messages.Dispatch) -> Iterator[None]:
        with contextlib.ExitStack() as probes:
            if not dispatch.internal:
                recorder = self.link.metrics
                probes.enter_context(loggers.reading(recorder.log, lambda: recorder.names))
            if dispatch.insight.watch:
                from nblaunch.probes.watch import watching

                several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
                probes.enter_context(
                    watching(
                        dispatch.insight.watch,
                        job=dispatch.insight.job,
                        directory=self._spill(),
                        attempt=self.orders.attempt,
                        titles=self.titles,
                        tell=self._notify,
                        elsewhere=(process_group.own_store, self.link.free) if several else None,
                    )
                )
            # The innermost: what the others do as they begin and end is not the job's.
            probes.enter_context(self._profiled(dispatch))
            yield

    def _notify(self, text: str) -> None:
        self.link.send(messages.RankNotice(rank=self.rank, text=failure.encodable(text)))

    def _do(self, job: messages.AnyJob, loaded: Any) -> object:
        match job:
            case messages.CellJob():
                return self._run_cell(job, loaded)
            case messages.PushJob():
                return None  # `_keep` has stored them
            case messages.PullJob(names=names):
                return self.variables.pull(names)
            case messages.FunctionJob():
                function, args, kwargs, _ = loaded  # the function's globals have the variables already
                value = function(*args, **dict(kwargs))
                return asyncio.run(value) if inspect.iscoroutine(value) else value
            case messages.ScriptJob(file=file, pull=names):
                if file:
                    self.titles[self.modules.path_here(file)] = job.title
                script.run(msgspec.structs.replace(job, path=self.modules.path_here(job.path)))
                return dict(zip(names, self.variables.pull(names), strict=True)) if names else 0

    def _do_to_the_end(self, job: messages.AnyJob, loaded: Any) -> object:
        """Do the only job of this rank, and wait for its threads: it ends as a script does.

        A failure is reported first: peers may wait for this rank. What is left to do then comes in `_leave`.
        """
        try:
            value = self._do(job, loaded)
        except SystemExit as leaving:
            if not leaving.code:
                self._wait_for_threads()
            raise
        self._wait_for_threads()
        return value

    def _wait_for_threads(self) -> None:
        self._waited = True
        try:
            script.wait_for_threads(self._reporting)
        except BaseException:
            # An interrupt. Its outcome ends the process.
            script.call_exit_functions(self._reporting)
            raise

    def _reporting(self, what: Callable[[], str]) -> AbstractContextManager[None]:
        """Return what says, after a moment, what the rank finishes until the block ends."""
        return self.link.sending_later(
            _MOMENT_SECONDS, lambda: messages.Finishing(rank=self.rank, what=failure.encodable(what()))
        )

    def _run_cell(self, job: messages.CellJob, captured: dict[str, Any]) -> object:
        if not self.orders.keep:
            self.variables.bring(captured)
        self._set_rank_names()
        self.titles[job.filename] = job.title
        result = shell.prepare().run(job)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            raise error
        return result.result

    def _set_rank_names(self) -> None:
        shell.namespace().update(
            rank=self.rank,
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            device=self.device,
        )

    def _returned(self, value: object, *, seen: bool = True, cell: messages.CellJob | None = None) -> None:
        self.phase = messages.Phase.VALUE
        used = None if self._internal else memory.used()
        if self.orders.keep:
            # Before the value, which ends the job: the notebook captures the next one by what it knows then.
            self._report_names()
        freed = self.link.times_freed
        text, html = shell.prepare().describe(value) if seen else ("", "")
        not_sent = ""
        if cell is None:
            outgoing = values.send(value, self._spill)
        else:
            outgoing, not_sent = values.send_or_stand_in(
                value, self._spill, shown=text, rank=self.rank, asked_for=cell.keeps_value
            )
        self._outgoing.enter_context(outgoing)
        if self.device.type != "cpu" and self.link.times_freed > freed:
            # The value waited for a collective that was then aborted, so its numbers are not the job's.
            raise KeyboardInterrupt
        if not self.orders.keep:
            # Once the value is packed: they close what it may be made of.
            self.link.resume_job()
            script.call_exit_functions(self._reporting)
        self.link.send(
            messages.Returned(
                rank=self.rank,
                value=outgoing.payload,
                time=time.time(),
                text=failure.encodable(text),
                html=failure.encodable(html),
                not_sent=failure.encodable(not_sent),
                offsets=stdio.output.end_job(keep=self.orders.keep),
                open=not self.orders.keep and process_group.has_open_operations(),
                peak_gpu_memory=memory.peak() if used is None else used.device_peak,
                memory=used,
                tallies=process_group.called() if self.orders.keep else (),
                steps=self.dead_variables.steps(),
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
        self.modules.explain(error)
        self.titles.update(self.modules.titles())
        record = failure.record(error, self.titles, phase=self.phase, exitcode=exitcode)
        if self.orders.keep:
            self.raised = error
            if not self._internal:
                shell.last_error = error
        else:
            failure.write_error_file(error)
        if self._unusable:
            self._notify(f"the GPU context is unusable: {self._unusable}"[:_ERROR_CHARACTERS])
        self._report_failure(record)
        self.link.send(messages.Colored(rank=self.rank, text=failure.shown(error)))
        if self._unusable:
            # It is started again alone, as one that was killed.
            self.link.close()
            os._exit(1)

    def _report_failure(self, record: messages.FailureRecord) -> None:
        ended = stdio.output.end_job(keep=self.orders.keep)
        used = memory.used()
        self.link.send(
            messages.Raised(
                rank=self.rank,
                failure=record,
                offsets=ended,
                peak_gpu_memory=used.device_peak,
                memory=used,
                tallies=process_group.called() if self.orders.keep else (),
                steps=self.dead_variables.steps(),
            )
        )

    def _report_names(self) -> None:
        """Report the variables, once per job: objects that were reported stay until the next job."""
        if self._names_reported:
            return
        self._names_reported = True
        self.modules.note_loaded()
        self._rebound, lost = self.variables.settle()
        if self._several:
            self.sketches.begin(self.variables.to_save(), time.monotonic() - self._began)
        self._send_names(lost, urgent=False)  # the end of the job follows

    def _send_names(self, lost: tuple[int, ...], *, urgent: bool) -> None:
        names = self.variables.names()
        sketches, digests = self.sketches.of(names) if self._several else ((), ())
        known = messages.Names(
            rank=self.rank, names=names, rebound=self._rebound, sketches=sketches, digests=digests
        )
        if known != self._last_names or lost:
            self._last_names = known
            self.link.send(msgspec.structs.replace(known, lost=lost), urgent=urgent)

    def _recover(self, order: messages.Recover) -> None:
        recovered = functools.partial(messages.Recovered, rank=self.rank, number=order.number)
        cut = stacks.cutting(order.fds)
        try:
            if order.reform:
                found = self.dead_variables.find(renumbered=self._renumbered)
                formed = process_group.form_again(order.number, self.device, cut)
                if not formed.in_place:
                    found = self._renew(found, order.number)
                dead = self.dead_variables.bury(found, lost=formed.lost if formed.in_place else None)
                why_not = formed.why_not[:_ERROR_CHARACTERS]
                stepped = self.dead_variables.names_of(formed.stepped)
                if self._several:
                    self.sketches.begin_again()
                    self._send_names((), urgent=False)
                answer = recovered(dead=dead, in_place=formed.in_place, why_not=why_not, stepped=stepped)
                self._renumbered = False
                if self.phase is messages.Phase.PROCESS_GROUP:
                    self._enter(messages.Phase.READY)
            else:
                process_group.check_context(self.device)
                answer = recovered(dead=self.dead_variables.stumbled_over(self.raised))
        except process_group.UnusableError as caught:
            answer = recovered(unusable=str(caught)[:_ERROR_CHARACTERS])
        except Exception as caught:  # noqa: BLE001 - whatever torch raises: the hub then restarts the group
            answer = recovered(error=f"{type(caught).__name__}: {caught}"[:_ERROR_CHARACTERS])
        self.link.send(answer)

    def _renew(self, found: Found, number: int) -> Found:
        """Have meshes and models go on with the new groups, on all ranks or on none; return what does not."""
        from nblaunch.rank import saving, sharded  # only where groups are lost

        meeting = saving.Meeting(f"renew {number}", _AGREE_SECONDS)
        try:
            with meeting.together():
                goes_on = sharded.renew_meshes(meeting.tell, joins=self._joins, renumbered=self._renumbered)
                left = [each for each in found if not goes_on(each[1]())]
                left = self.dead_variables.renew(left, meeting.tell)
                meeting.tell(None)
        except Exception as error:  # noqa: BLE001 - whatever torch raises costs these models, and not the variables
            if not isinstance(error, NblaunchError):  # else it is another rank's, or that is late
                self._notify(f"{_NOT_RENEWED}{type(error).__name__}: {error}"[:_ERROR_CHARACTERS])
            return found
        return left

    def _leave(self, exitcode: int, *, abort: bool) -> None:
        self.phase = messages.Phase.LEAVE
        try:
            stdio.output.begin_job()
            # A fork ends by os._exit; programs expect this all the same.
            if not self._waited:
                self._wait_for_threads()
            script.call_exit_functions(self._reporting)
            if exitcode and not self.orders.keep:
                self.link.send(
                    messages.Finishing(rank=self.rank, what="", offsets=stdio.output.end_job(keep=False))
                )
            shell.end()
            if exitcode == 0:
                # A rank that failed closes its connections by exiting: an orderly end could wait for peers.
                # So could that of a session's rank whose GPU waits for one: NCCL has no bound.
                open_now = self.orders.keep and process_group.uses_nccl() and not process_group.gpu_is_done()
                process_group.leave(abort=abort or open_now)
        finally:
            for stream in (sys.stdout, sys.stderr):
                # The job may have closed them, or put anything in their place.
                with contextlib.suppress(Exception):
                    stream.flush()
            self.link.close()
            self._outgoing.close()
