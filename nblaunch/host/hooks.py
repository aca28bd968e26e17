"""What torchelastic offers beside the ranks themselves: events, expiration timers, layouts of log files.

An event is taken where torch hands it to a logger, and passed on to the user's handler.

torch's private names: `torch.distributed.elastic.events._events_loggers`, in which this run's stream stands
beside torch's loggers, under a name of its own; `torch.distributed.elastic.events.handlers._log_handlers`,
for the text of an error.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any, TextIO

import torch
from torch.distributed.elastic import events
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import tail_logfile
from torch.distributed.elastic.timer import FileTimerServer
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest

from nblaunch._errors import LaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch.protocol.client import Event

_log = logging.getLogger("nblaunch")
NOWHERE = "null"


def check_handler(name: str) -> None:
    try:
        handlers.get_logging_handler(name)
    except KeyError:
        registered: Any = handlers._log_handlers  # noqa: SLF001 - see above
        known = ", ".join(sorted(registered))
        msg = (
            f"event_log_handler={name!r} was asked for, but torchelastic has no such handler in the "
            f"runtime's process, where the notebook's own are not known. Give one of these: {known}."
        )
        raise OptionError(msg) from None


class EventStream:
    """Takes the place of the logger to which torchelastic gives the events of one run.

    `name` is the run's `event_log_handler`, `handler` the user's own. A logger would be shared by all runs,
    and could be silenced (`logging.disable`, `LOGLEVEL`).
    """

    def __init__(self, handler: str, record: Callable[[Event], None]) -> None:
        # Not the run's id, which the user may have chosen, for two runs at a time.
        self.name = f"nblaunch-{uuid.uuid4().hex}"
        self._handler = handler
        self._record = record

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        loggers: dict[str, Any] = vars(events)["_events_loggers"]
        loggers[self.name] = self
        try:
            yield
        finally:
            del loggers[self.name]

    def info(self, text: str) -> None:
        """Take an event; called by torch, on any of the agent's threads."""
        self._record(Event.parse(text, time.time()))
        if self._handler == NOWHERE:
            return
        try:
            events.record(events.Event.deserialize(text), self._handler)
        except Exception:  # noqa: BLE001 - logged
            # This is the user's own code, and must not end the run.
            _log.error("the event handler %r failed:\n%s", self._handler, traceback.format_exc())


# torch's file-based expiration timers, run so that they can end a rank and no other process.
#
# torchelastic's `FileTimerServer` sends the signal to its own process as well, to have the agent's supervisor
# start it again; here that process is the notebook. torch's private names: `FileTimerServer._reap_worker`,
# `._watchdog_loop`, `._stop_signaled`, `._file_path`, `._watchdog_thread`.


SWITCH = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"
_POLL_SECONDS = 0.1
_NOTHING = b'{"pid": 0, "scope_id": "", "expiration_time": -1, "signal": 0}\n'


class Watchdog(FileTimerServer):
    """A `FileTimerServer` that signals only processes that `is_rank` knows, and keeps why."""

    def __init__(
        self,
        path: str,
        run_id: str,
        thread_name: str,
        is_rank: Callable[[int], bool],
        log_event: Callable[[str, FileTimerRequest | None], None],
    ) -> None:
        self.reasons: dict[int, str] = {}
        """Process id -> why it was killed."""
        self._is_rank = is_rank
        self._thread_name = thread_name
        self._forward = log_event
        super().__init__(path, run_id, max_interval=_POLL_SECONDS, daemon=True, log_event=self._note)

    def _note(self, name: str, request: FileTimerRequest | None) -> None:
        if name == "timer expired" and request is not None and request.signal > 0:
            # Before the signal, whose effect the agent may see at once.
            self.reasons[request.worker_pid] = _why(request)
        self._forward(name, request)

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        # torch also names this very process, after a rank; and any process that can write to the pipe could
        # name any other.
        return self._is_rank(worker_pid) and bool(super()._reap_worker(worker_pid, signal))

    def _watchdog_loop(self) -> None:
        # The notebook does not show torchelastic's log records of threads with this name.
        threading.current_thread().name = self._thread_name
        super()._watchdog_loop()

    def stop(self) -> None:
        """End the thread, which waits for the pipe to be opened if no rank has ever done so."""
        self._stop_signaled = True
        with contextlib.suppress(OSError):
            pipe = os.open(self._file_path, os.O_RDWR | os.O_NONBLOCK)
            try:
                os.write(pipe, _NOTHING)
                if self._watchdog_thread is not None:
                    self._watchdog_thread.join(_POLL_SECONDS * 10)
            finally:
                os.close(pipe)
        super().stop()
        # The server is in a cycle with itself, and refers to the agent: free that without the collector.
        self._is_rank, self._forward = lambda _: False, lambda *_: None


def _why(request: FileTimerRequest) -> str:
    deadline = datetime.fromtimestamp(request.expiration_time).astimezone()
    return (
        f"was killed by {signal.Signals(request.signal).name}: scope {request.scope_id!r} was not left by "
        f"its deadline, {deadline:%H:%M:%S} (torch.distributed.elastic.timer.expires)"
    )


# The files that torchelastic writes ranks' output to, and those for lines that pass a filter.

_LOGS_SPECS = "torchrun.logs_specs"
"""The entry points among which torchrun looks for `--logs-specs`."""


def find_logs_specs(name: str | None) -> type[LogsSpecs]:
    """Return the class behind an entry point of the group, torch's own for None. Raises `OptionError`."""
    if name is None:
        return DefaultLogsSpecs
    known = metadata.entry_points(group=_LOGS_SPECS)
    if name not in known.names:
        there = f"there are: {', '.join(sorted(known.names))}" if known.names else "there is none"
        msg = (
            f"logs_specs={name!r} was asked for, but no installed package has an entry point of that name "
            f"in the group {_LOGS_SPECS}; {there}. Leave it out for torchrun's own layout."
        )
        raise OptionError(msg)
    try:
        found: type[LogsSpecs] = known[name].load()
    except Exception as error:
        msg = (
            f"logs_specs={name!r} was asked for, but it cannot be loaded: {type(error).__name__}: {error}. "
            "Mend the package that has it, or leave it out."
        )
        raise OptionError(msg) from error
    return found


def check_line_filters(filters: Sequence[str]) -> None:
    """Raise `OptionError` where this torch cannot filter lines."""
    if filters and "log_line_filter" not in inspect.signature(tail_logfile).parameters:
        msg = (
            "duplicate_stdout_filters= or duplicate_stderr_filters= was asked for, but torch "
            f"{torch.__version__} cannot filter lines of logs. Use a newer torch (2.13 can), or leave it out."
        )
        raise OptionError(msg, kind=FailureKind.TORCH_VERSION)


class KeptLogs(LogsSpecs):
    """A `LogsSpecs` in which every stream has a file, and that remembers the files."""

    def __init__(self, name: str | None, log_dir: str) -> None:
        """Make an object of the class behind `name`, as torchrun does. Raises `OptionError`."""
        super().__init__(log_dir)
        self._name = name
        try:
            self._chosen = find_logs_specs(name)(
                log_dir=log_dir, redirects=Std.ALL, tee=Std.NONE, local_ranks_filter=None
            )
        except (TypeError, ValueError) as error:
            msg = (
                f"logs_specs={name!r} was asked for, but it cannot be made: {type(error).__name__}: {error}. "
                "torchrun gives it log_dir, redirects, tee and local_ranks_filter, and so do we."
            )
            raise OptionError(msg) from error
        self._files: LogsDest | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self._chosen.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of an attempt. Raises `LaunchError` where a stream has none."""
        files = self._files = self._chosen.reify(envs)
        for stream, paths in (("stdout", files.stdouts), ("stderr", files.stderrs)):
            without = [rank for rank in envs if not paths.get(rank)]
            if without:
                msg = (
                    f"logs_specs={self._name!r} was asked for, but it names no file for {stream} of local "
                    f"rank {without[0]}, and what a rank prints is read from files. It is given "
                    "redirects=Std.ALL, and must follow it."
                )
                raise LaunchError(msg, phase="fork")
        return files

    def filtered(self, stream: str) -> str:
        """Return the file for lines of all ranks that pass a filter: `filtered_stdout.log` of the attempt."""
        files = self._files
        assert files is not None  # noqa: S101 - asked after the ranks have been started
        own: str = getattr(files, f"filtered_{stream}", "")
        return own or os.fspath(Path(files.stdouts[0]).parents[1] / f"filtered_{stream}.log")


class LogsOfOne(LogsSpecs):
    """The files of one process, which takes the place of another in a later attempt."""

    def __init__(self, stdout: str, stderr: str, attempt: int) -> None:
        """Lie beside the files of the process before, in a directory with the number of the attempt."""
        super().__init__()
        before = Path(stdout).parent
        self._directory = before.with_name(f"{before.name.partition('.')[0]}.{attempt}")
        self._names = Path(stdout).name, Path(stderr).name

    @property
    def root_log_dir(self) -> str:
        return os.fspath(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directory; return the files, of which torch keeps the one for an error."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        stdout, stderr, error = (os.fspath(self._directory / name) for name in (*self._names, "error.json"))
        envs[0]["TORCHELASTIC_ERROR_FILE"] = error
        return LogsDest(
            stdouts={0: stdout}, stderrs={0: stderr}, tee_stdouts={}, tee_stderrs={}, error_files={0: error}
        )


def line_prefixes(template: str, role: str, ranks: Mapping[int, int]) -> dict[int, str]:
    """Return what begins each line of a local rank, as torchrun has it; `ranks` are by local rank."""
    hostname = socket.gethostname()
    return {
        local_rank: Template(template or "[${role_name}${local_rank}]:").safe_substitute(
            role_name=role, local_rank=local_rank, rank=rank, hostname=hostname
        )
        for local_rank, rank in ranks.items()
    }


class FilteredLines:
    """Copies lines with certain words from the ranks' logs to a file, as torchrun's tee does.

    torch's own function runs on daemon threads: torch's thread pool would keep a notebook from ending while
    its ranks live.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what torch's own function is told
        self,
        stream: str,
        path: str,
        logs: Mapping[int, str],
        prefixes: Mapping[int, str],
        words: Sequence[str],
        thread: str,
    ) -> None:
        """Begin; `logs` are the files by local rank, and `prefixes` what begins their lines."""
        self.stream = stream
        """The attribute of torch's context that has the files."""
        self._file: TextIO = open(path, "w", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
        self._finished = threading.Event()
        self._prefixes, self._words, self._thread = prefixes, words, thread
        self._threads: list[threading.Thread] = []
        for local_rank, log in logs.items():
            self.follow(local_rank, log)

    def follow(self, local_rank: int, log: str) -> None:
        """Copy lines of one more file of a rank."""
        follow: Any = tail_logfile
        keywords = {
            "header": self._prefixes[local_rank],
            "file": log,
            "dst": self._file,
            "finished": self._finished,
            "interval_sec": _POLL_SECONDS,
            "log_line_filter": lambda line: any(word in line for word in self._words),
        }
        name = f"{self._thread}-filter-{local_rank}"
        self._threads.append(threading.Thread(target=follow, name=name, kwargs=keywords, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        self._finished.set()
        for each in self._threads:
            each.join()
        self._file.close()
