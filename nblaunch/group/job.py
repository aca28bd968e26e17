"""One job of a worker group: its state, its values, its output, and its end.

Everything here runs on the hub's thread. `Job.state` is an immutable snapshot that any thread may read, and
`Job.ended` an event that any thread may wait for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from nblaunch._errors import RunPreemptedError
from nblaunch.capture import shared_memory
from nblaunch.capture.shared_memory import Outgoing
from nblaunch.diagnose.failures import value_lost
from nblaunch.group.lifecycle import JobState
from nblaunch.host.logs import LogTail
from nblaunch.host.settings import Worker
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages
from nblaunch.protocol.client import RankLogFiles
from nblaunch.protocol.state import Message, RankState, RunState, advance

# The log files of a group's ranks, attempt by attempt: new text, and which part of it is the job's.


class RankLogs:
    """The log files of all ranks of a group; used on the hub's thread only."""

    def __init__(self, private: Path | None = None) -> None:
        """Files below `private` are bounded, and removed when no job refers to them."""
        self._private = private
        self._attempt = 0
        self._files: dict[int, list[str]] = {}
        """The private files by attempt."""
        self.attempts: dict[int, dict[int, RankLogFiles]] = {}
        self._present: dict[int, RankLogFiles] = {}
        self._tails: dict[int, LogTail] = {}
        self._growing: dict[int, bool] = {}
        """The ranks whose files may have grown; True for ranks of this machine, which are always polled."""

    def begin_job(self, attempt: int) -> dict[int, dict[int, RankLogFiles]]:
        """Return the logs of a job that begins now, by attempt and rank; they are updated from now on."""
        self._present = {
            rank: replace(logs, started=messages.Offsets(), ended=None)
            for rank, logs in self._present.items()
        }
        # Nodes that have not started their ranks yet add the files later (`extend`).
        self.attempts = {attempt: self._present} if attempt in self.attempts else {}
        return self.attempts

    def begin(self, attempt: int) -> None:
        """Follow the files of an attempt, which has none yet."""
        self.close()
        self._attempt = attempt
        self._present = self.attempts[attempt] = {}

    def wrote(self, rank: int) -> None:
        """Poll the files of a rank on another node, which have grown."""
        if rank in self._tails:
            self._growing.setdefault(rank, False)

    def extend(self, workers: tuple[Worker, ...], *, brief: bool = False) -> None:
        """Follow the files of some of the attempt's processes.

        `brief` files are open only while they are read, and `wrote` reports their growth.
        """
        for worker in workers:
            self._present[worker.rank] = RankLogFiles(
                worker.rank, worker.local_rank, worker.stdout, worker.stderr
            )
            files = [worker.stdout, worker.stderr]
            private = self._private is not None and all(
                Path(each).is_relative_to(self._private) for each in files
            )
            if private:
                self._files.setdefault(self._attempt, []).extend(files)
            self._tails[worker.rank] = LogTail(
                worker.rank, worker.stdout, worker.stderr, bounded=private, brief=brief
            )
            if not brief:
                self._growing[worker.rank] = True

    def renumber(self, attempt: int, kept: Mapping[int, int]) -> None:
        """Follow the persistent ranks under their new numbers; `kept` maps these to the former ones."""
        tails, present = self._tails, self._present
        for rank in tails.keys() - set(kept.values()):
            tails[rank].close()
        self._tails = {
            rank: tails[before].renumbered(rank) for rank, before in kept.items() if before in tails
        }
        self._growing = {
            rank: self._growing[before] for rank, before in kept.items() if before in self._growing
        }
        self._present = self.attempts[attempt] = {
            rank: replace(present[before], rank=rank) for rank, before in kept.items() if before in present
        }
        # The files of the others go with the jobs that had them.
        files = self._files.pop(self._attempt, [])
        stay = {path for each in self._present.values() for path in (each.stdout, each.stderr)}
        for number, those in ((self._attempt, False), (attempt, True)):
            if some := [each for each in files if (each in stay) is those]:
                self._files[number] = some
        self._attempt = attempt

    def free_before(self, oldest: Mapping[int, Mapping[int, RankLogFiles]]) -> None:
        """Delete files, and free parts of files, that are older than the logs of the oldest job.

        Without logs there is no such job.
        """
        first = min(oldest, default=self._attempt)
        for attempt in [each for each in self._files if each < first]:
            for path in self._files.pop(attempt):
                with contextlib.suppress(OSError):
                    Path(path).unlink()
        if first == self._attempt and self._files:
            for rank, tail in self._tails.items():
                if not oldest:
                    tail.free(None)
                elif rank in oldest[first]:
                    tail.free(oldest[first][rank].started)

    def so_far(self, logs: Mapping[int, Mapping[int, RankLogFiles]]) -> dict[int, tuple[RankLogFiles, ...]]:
        """Return the logs of a job; those of ranks that go on end where they have been read."""
        return {
            attempt: tuple(
                replace(each, ended=self._tails[each.rank].printed)
                if attempt == self._attempt and each.ended is None and each.rank in self._tails
                else each
                for each in ranks.values()
            )
            for attempt, ranks in logs.items()
        }

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._tails, self._present, self._growing = {}, {}, {}

    def before(self, message: messages.FromRank) -> Iterator[messages.Printed]:
        """Yield the output that precedes `message`; keep the offsets where the rank's job begins and ends."""
        tail, known = self._tails.get(message.rank), self._present.get(message.rank)
        if tail is None or known is None:
            return
        match message:
            case messages.Started(offsets=offsets):
                # What a rank prints before its job (gloo's greeting) is not the job's output.
                tail.skip_to(offsets)
                self._present[message.rank] = replace(known, started=offsets)
            case messages.Switched(moments=moments):
                for offsets in moments:
                    yield from tail.up_to(offsets)
            case (
                messages.Displayed(offsets=offsets)
                | messages.Cleared(offsets=offsets)
                | messages.Asked(offsets=offsets)
            ):
                yield from tail.up_to(offsets)
            case (
                messages.Returned(offsets=offsets)
                | messages.Raised(offsets=offsets)
                | messages.Preempted(offsets=messages.Offsets() as offsets)
                | messages.Finishing(offsets=messages.Offsets() as offsets)
            ):
                self._present[message.rank] = replace(known, ended=offsets)
                yield from tail.up_to(offsets)
            case _:
                pass

    def news(self, ranks: Mapping[int, RankState]) -> Iterator[messages.Printed]:
        """Yield the new output of ranks whose job has begun."""
        for rank, always in list(self._growing.items()):
            known = ranks.get(rank)
            if known is not None and known.started is not None:
                tail = self._tails[rank]
                yield from tail.poll()
                if not always and tail.idle:
                    del self._growing[rank]

    def rest(self, rank: int) -> Iterator[messages.Printed]:
        tail = self._tails.get(rank)
        if tail is not None:
            yield from tail.rest()

    def rest_of_all(self) -> Iterator[messages.Printed]:
        for rank in self._tails:
            yield from self.rest(rank)


# The job.


class Job:
    """A job that has been submitted to a group, or is about to be; the runtime's is `RunningJob`."""

    def __init__(
        self,
        dispatches: Mapping[int | None, messages.Dispatch],
        known: JobState,
        *,
        options: LaunchOptions | None = None,
        directory: Callable[[], Path] = Path,
    ) -> None:
        """`dispatches` are the messages to the ranks; that of None is for all that have none of their own.

        `directory` names where values are held if not in memory.
        """
        self.known = known
        """All that its group knows of it: a snapshot."""
        self.options = options or LaunchOptions()
        self.dispatch = dispatches[None]
        self._dispatches = dispatches
        self._directory = directory
        self._values: dict[tuple[int, str], Outgoing] = {}
        """Values and profiles of ranks."""
        self.logs: Mapping[int, Mapping[int, RankLogFiles]] = {}
        """The log files, by attempt and rank."""
        self.error: BaseException | None = None
        self.late: list[str] = []
        """Warnings since the end of the job."""
        self.listeners: list[Callable[[Message, bytes], None]] = []
        """Called with each message that has changed the state, and with its bytes."""
        self.ended = threading.Event()

    def asked(self, message: messages.Asked) -> None:
        """Take a rank's question to the user."""

    def payload_kept(self) -> None:
        """Know that the payload is whole on every rank, before any of them begins."""

    @property
    def state(self) -> RunState:
        return self.known.run

    def dispatch_to(self, rank: int) -> messages.Dispatch:
        return self._dispatches.get(rank, self.dispatch)

    def take(
        self, message: messages.Returned | messages.Profiled
    ) -> messages.Returned | messages.Profiled | messages.Raised | None:
        """Open a value or a profile while its rank still holds it; return the message to fold.

        The message refers to the held payload. It is None after the end of the job, and for a profile that
        cannot be opened.
        """
        part = "value" if isinstance(message, messages.Returned) else "data"
        sent: messages.Payload = getattr(message, part)
        if self.ended.is_set():
            return None
        if part == "value" and sent.inline is not None and not self._values:
            return message  # there is no payload to hold
        try:
            held = shared_memory.hold(sent, self._directory)
        except (FileNotFoundError, ProcessLookupError):
            return None  # the process is gone: its exit says so, and came first
        except Exception as error:  # noqa: BLE001 - no descriptor or memory left: the rank waits for an answer
            if not isinstance(message, messages.Returned):
                return None
            failure = value_lost(error, time.time())
            return messages.Raised(rank=message.rank, failure=failure, offsets=message.offsets)
        if (before := self._values.pop((message.rank, part), None)) is not None:
            before.close()
        self._values[message.rank, part] = held
        return message if held.payload is sent else replace(message, **{part: held.payload})

    def taken_values(self) -> dict[tuple[int, str], Outgoing]:
        """Return the values and profiles by rank: the caller closes them."""
        values, self._values = self._values, {}
        return values

    def release_values(self) -> None:
        """Close the values: those who wanted them have mapped them."""
        for each in self.taken_values().values():
            each.close()

    def shows(self, printed: messages.Printed) -> bool:
        # As the agent counts: a virtual local rank is always 0.
        known = self.logs.get(self.state.attempt.number, {}).get(printed.rank)
        rank = self.state.ranks.get(printed.rank)
        if rank is None:
            return False  # it takes no part
        local_rank = known.local_rank if known is not None else rank.local_rank
        return self.options.shows(local_rank, printed.stream)

    def fold(self, message: Message) -> None:
        """Fold a message into a job that no group runs: the machine of its group does that otherwise."""
        after = advance(self.state, message)
        if after is not self.state:
            self.known = replace(self.known, run=after)
            if self.listeners:
                self.publish(message, messages.encode(message))

    def publish(self, message: Message, raw: bytes) -> None:
        for listener in self.listeners:
            listener(message, raw)

    def finish(self, when: float, error: BaseException | None = None) -> None:
        """End the job as it is now: its result can be made."""
        self.error = error
        if self.state.doing:
            self.fold(messages.Waiting())
        if not self.state.finished:
            stopped = self.error is None or isinstance(self.error, RunPreemptedError)
            self.fold(messages.RunEnded(time=when, stopped=stopped))
        self.ended.set()
