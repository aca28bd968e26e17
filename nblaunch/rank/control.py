"""The rank's control thread: it owns the socket to the hub, an inbox and an outbox.

It serves the hub while the main thread runs a job or is stuck in one: interrupts, stacks, sequence numbers,
aborts.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from nblaunch._waker import Waker
from nblaunch.probes.rank_metrics import Recorder
from nblaunch.protocol import messages
from nblaunch.rank import preempt, process_group
from nblaunch.rank.isolate import REAP_SECONDS, Reaper
from nblaunch.rank.stacks import RankInspector

_LINGER_MS = 2000
_BUNCH_MS = 20
# How long a message that is not urgent may wait for the next one: a shorter job sends all in one go.
_SOON_MS = 5
# How often to look whether the main thread is back from C code.
_ATTENTION_MS = 10
# How long an interrupt waits for the end of an import, and how often that is looked for. torch._dynamo takes
# three seconds on an idle machine; a module whose import trains a model must not hold an interrupt for ever.
_IMPORT_SECONDS = 30.0
_IMPORT_MS = 20
_MOMENTS = 200


class _ClockSample:
    """A sample of the hub's clock: asked by the main thread, done by the control thread."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.number = secrets.randbits(32)
        """Of the last question; answers to another sample have other numbers."""
        self.asked = 0
        self.wanted, self.complete = threading.Event(), threading.Event()
        self.found: list[tuple[int, int, int]] = []


class Link:
    """Carries messages both ways while the main thread works, or is stuck.

    Interrupts act at once; orders wait in `inbox` until the main thread takes them.
    """

    def __init__(self, address: str, group: str, inspector: RankInspector, *, keep: bool) -> None:
        """Carry messages to and from the hub at `address`, once `start` has connected to it.

        With `keep` an interrupt waits for an import: later jobs of this rank need the whole module.
        """
        self._address, self._group, self._keep = address, group, keep
        self._inspector, self._rank = inspector, inspector.rank
        self.inbox: queue.SimpleQueue[
            messages.Prepare
            | messages.Dispatch
            | messages.Recover
            | messages.Adopt
            | messages.Preempt
            | messages.Leave
        ] = queue.SimpleQueue()
        self.on_answer: Callable[[messages.Answer], None] | None = None
        """Takes answers to questions; called on the control thread."""
        self.proceed = threading.Event()
        """Set once the payload of the last job has arrived on every rank."""
        self.times_freed = 0
        """How often the control thread has ended collectives of the main thread."""
        self._clock = _ClockSample(0)
        """The sample of the hub's clock that is under way, or was the last."""
        self._working = self._finishing = self._interrupted = False
        self._attention = MainThread()
        self._unseen: int | None = None
        """The interrupt that the main thread has had no chance to handle yet."""
        self._put_off: messages.Interrupt | None = None
        """An interrupt that waits for the end of an import, until then at most (monotonic):"""
        self._put_off_until = 0.0
        self._save_until: float | None = None
        """Until when the main thread is to save, once it can (monotonic)."""
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._switches: list[messages.Offsets] = []
        self._waker = Waker()
        self._later: tuple[float, Callable[[], messages.FromRank]] | None = None
        """A message to send at that time (monotonic), unless it is dropped before."""
        self._closing = self._checks_soon = False
        self._reaper = Reaper()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._hello: messages.Hello
        self._socket: zmq.Socket[bytes]
        self.metrics = Recorder(self._log, self._waker.wake)
        """What the rank logs; sent by the control thread, while a job runs."""
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._serve, name="nblaunch-control", daemon=True)

    def start(self, hello: messages.Hello) -> None:
        self._connect(hello)
        self._thread.start()

    def _connect(self, hello: messages.Hello) -> None:
        """Connect as the rank that sends `Hello`: its socket is named after group, attempt and rank."""
        self._hello = hello
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{self._group}/{hello.attempt}/{hello.rank}".encode())
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        # A burst of displays waits here; it never blocks the job and is never dropped.
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(limit, 0)
        self._socket.connect(self._address)
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.send(messages.encode(hello))

    def _adopt(self, other: messages.Adopt) -> None:
        """Go on as another rank: send the rest as the present one, and send `Hello` again."""
        with self._lock:
            self._collect_switches()
            while self._outbox:
                self._socket.send(self._outbox.popleft())
            self._rank = self._inspector.rank = other.rank
        self._poller.unregister(self._socket)
        self._socket.close()
        self._connect(
            msgspec.structs.replace(
                self._hello, rank=other.rank, attempt=other.attempt, world_size=other.world_size
            )
        )

    def send(self, message: messages.FromRank, *, urgent: bool = True) -> None:
        """Send `message` after all earlier ones; from any thread, never blocks.

        A message that is not `urgent` may wait a few milliseconds for the next one.
        """
        with self._lock:
            self._collect_switches()
            self._outbox.append(messages.encode(message))
            urgent = urgent or not self._checks_soon
        if urgent:
            self._waker.wake()

    @contextlib.contextmanager
    def sending_later(self, seconds: float, make: Callable[[], messages.FromRank]) -> Iterator[None]:
        """Send the message that `make` returns, unless the block ends within `seconds`."""
        with self._lock:
            self._later = time.monotonic() + seconds, make
        self._waker.wake()
        try:
            yield
        finally:
            with self._lock:
                self._later = None

    def _send_later(self) -> None:
        with self._lock:
            if self._later is not None and time.monotonic() >= self._later[0]:
                self._outbox.append(messages.encode(self._later[1]()))
                self._later = None

    def _log(self, **columns: Any) -> None:
        self.send(messages.Logged(rank=self._rank, **columns), urgent=False)

    def switched(self, offsets: messages.Offsets) -> None:
        """Note that the rank has changed between stdout and stderr; sent in bunches, in order."""
        with self._lock:
            self._switches.append(offsets)
            first = len(self._switches) == 1
        if first:
            self._waker.wake()

    def _collect_switches(self) -> None:
        if self._switches:
            # Each moment costs the notebook. A rank that alternates without a pause keeps order by bunches.
            step = -(-len(self._switches) // _MOMENTS)
            moments = (*self._switches[:-1:step], self._switches[-1])
            self._switches = []
            self._outbox.append(messages.encode(messages.Switched(rank=self._rank, moments=moments)))

    def sample_clock(self, times: int, seconds: float) -> list[tuple[int, int, int]]:
        """Ask the hub so many times what time it is, one after the other; wait at most `seconds`.

        Returns for each answer: when it was asked for, the hub's time, when the answer was here; all in
        nanoseconds since the epoch.
        """
        self._clock = sample = _ClockSample(times)
        sample.wanted.set()
        self._waker.wake()
        sample.complete.wait(seconds)
        sample.left = 0
        return list(sample.found)

    def _ask_clock(self) -> None:
        sample = self._clock
        sample.wanted.clear()
        if sample.left <= 0:
            sample.complete.set()
            return
        sample.number += 1
        sample.asked = time.time_ns()
        self._socket.send(messages.encode(messages.ClockAsked(rank=self._rank, number=sample.number)))

    def _clock_answered(self, answer: messages.ClockAnswered) -> None:
        here, sample = time.time_ns(), self._clock
        if sample.left <= 0 or answer.number != sample.number:
            return
        sample.found.append((sample.asked, answer.time, here))
        sample.left -= 1
        self._ask_clock()

    def free(self, fds: tuple[int, ...]) -> None:
        """End the collective that the main thread is in: abort NCCL, or shut these connections."""
        process_group.note_cut()
        self._inspector.free(fds)

    def begin_job(self) -> None:
        """From here on an interrupt reaches the main thread; raise KeyboardInterrupt if one came already."""
        with self._lock:
            self._working = True
            interrupted = self._interrupted
        if interrupted:
            raise KeyboardInterrupt

    def finish_job(self) -> None:
        """From here on only the last interrupt reaches the main thread: the value is being packed."""
        with self._lock:
            self._working, self._finishing = False, True

    def resume_job(self) -> None:
        """From here on an interrupt reaches the main thread again: the value is packed."""
        with self._lock:
            self._working = True

    def end_job(self) -> None:
        """From here on an interrupt arrives too late and is ignored."""
        with self._lock:
            self._working = self._finishing = False

    def preemption(self) -> float | None:
        """Return until when the main thread is to save (monotonic), once for each order."""
        with self._lock:
            until, self._save_until = self._save_until, None
            return until

    def close(self) -> None:
        """Send the rest of the outbox, and end the control thread."""
        self._closing = True
        self._waker.wake()
        self._thread.join(_LINGER_MS / 1000)
        self._context.destroy(linger=_LINGER_MS)

    def _serve(self) -> None:
        self._poller.register(self._waker.fileno(), zmq.POLLIN)
        while True:
            ready = dict(self._poller.poll(self._patience()))
            self._reaper.reap(working=self._working)
            # A probe that breaks must not end the thread that carries the rank's messages.
            with contextlib.suppress(Exception):
                self.metrics.send_due()
            if not ready:
                with self._lock:
                    self._collect_switches()
                    self._checks_soon = False
            if self._waker.fileno() in ready:
                self._waker.clear()
            if self._put_off is not None:
                self._deliver(self._put_off)
            if self._unseen is not None and self._attention.came_back():
                self._seen(handled=True)
            self._send_later()
            while self._outbox:
                self._socket.send(self._outbox.popleft())
            if self._clock.wanted.is_set():
                self._ask_clock()
            if self._closing and not self._outbox:
                return
            if self._socket in ready:
                self._receive(messages.decode_to_rank(self._socket.recv(), "the hub"))

    def _patience(self) -> int | None:
        metrics, others = self.metrics.patience(), self._others_patience()
        return metrics if others is None else others if metrics is None else min(metrics, others)

    def _others_patience(self) -> int | None:
        if self._checks_soon:
            return _SOON_MS
        if self._unseen is not None:
            return _ATTENTION_MS
        if self._put_off is not None:
            return _IMPORT_MS
        if self._switches:
            return _BUNCH_MS
        if (later := self._later) is not None:
            return max(int((later[0] - time.monotonic()) * 1000) + 1, 0)
        # Also between two jobs, as long as there are processes that a cell has left in the background.
        idle = not self._working and self._reaper.has_nothing_to_do
        return None if idle else int(REAP_SECONDS * 1000)

    def _receive(self, message: messages.ToRank) -> None:
        match message:
            case messages.Interrupt():
                if self._put_off is None:
                    self._put_off_until = time.monotonic() + _IMPORT_SECONDS
                with self._lock:
                    # The main thread may not have taken the job from the inbox yet.
                    self._interrupted = True
                self._deliver(message)
            case messages.ReportWhere():
                # Without an answer the hub has faulthandler dump the stacks. A question must not end a rank.
                with contextlib.suppress(Exception):
                    self._socket.send(
                        messages.encode(self._inspector.where(idle=not (self._working or self._finishing)))
                    )
            case messages.ReportReached():
                # As above. The group may be ending at this very moment: then there is no answer.
                with contextlib.suppress(Exception):
                    begun = self._inspector.collectives()
                    if begun is not None:
                        self._socket.send(
                            messages.encode(messages.Reached(rank=self._rank, collectives=begun))
                        )
            case messages.Answer():
                if self.on_answer is not None:
                    self.on_answer(message)
            case messages.FreeCollective(fds=fds):
                self.times_freed += 1
                with contextlib.suppress(Exception):
                    self._inspector.free(fds)
            case messages.Abort():
                with contextlib.suppress(Exception):
                    self._inspector.abort(lambda: self.send(messages.Aborted(rank=self._rank)))
            case messages.Proceed():
                self.proceed.set()
            case messages.ClockAnswered():
                self._clock_answered(message)
            case _:
                self._take_order(message)

    def _take_order(
        self,
        message: messages.Prepare
        | messages.Dispatch
        | messages.Recover
        | messages.Adopt
        | messages.Preempt
        | messages.Leave,
    ) -> None:
        match message:
            case messages.Dispatch():
                self.proceed.clear()
                self._put_off = None  # it was for the job before
                self._reaper.reap(now=True)
                with self._lock:
                    self._interrupted, self._checks_soon = False, True
            case messages.Adopt():
                self._adopt(message)
            case messages.Preempt(seconds=seconds):
                preempt.ordered()
                with self._lock:
                    self._save_until = time.monotonic() + seconds
            case _:
                pass
        self.inbox.put(message)

    def _deliver(self, message: messages.Interrupt) -> None:
        """Interrupt the main thread, or put that off while it is importing."""
        with self._lock:
            reaches = self._working or (message.last and self._finishing)
            # Read before the signal is sent: afterwards the program may restore another handler.
            heeded = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
            # The look is the last step before the signal: what is between them, an import may begin in.
            if reaches and self._waits_for_import(message):
                self._unseen, self._put_off = None, message
                return
            if reaches:
                signal.pthread_kill(self._main, signal.SIGINT)
        self._unseen, self._put_off = message.number, None
        # A rank that ignores the signal has decided already; one that packs its value must not see it.
        if not (reaches and heeded and self._attention.expect()):
            self._seen(handled=reaches and heeded)

    def _waits_for_import(self, message: messages.Interrupt) -> bool:
        """Whether the interrupt has to wait: a module that is broken off leaves its half-made parts behind.

        Not where the node is about to be taken back: then there are no later jobs, and little time to save.
        """
        waits = self._keep and not message.at_once and self._save_until is None
        return waits and time.monotonic() < self._put_off_until and self._inspector.importing()

    def _seen(self, *, handled: bool) -> None:
        if self._unseen is not None:
            seen = messages.InterruptSeen(rank=self._rank, number=self._unseen, handled=handled)
            self._socket.send(messages.encode(seen))
            self._unseen = None


# How the control thread notices that the main thread has come back from C code to Python.
#
# A Python signal handler runs only between two bytecodes of the main thread, and it may be any: Python's own,
# asyncio's, the program's. So nothing here depends on the handler. CPython is asked to call a C function at
# the next such moment (`Py_AddPendingCall`; it does so after the handlers of pending signals), and that
# function posts a semaphore. No Python code runs in the main thread for this, so no KeyboardInterrupt can be
# lost in it.
#
# A signal that arrives right before a blocking call is noted by Python, but does not end that call, which
# began after it: `time.sleep(1000)` sleeps on. So the main thread is poked: another signal ends the call, and
# Python then runs the handlers of all signals that it has noted.

# `sem_t` is 32 bytes or fewer on every Linux.
_SEMAPHORE_BYTES = 64
_POKE_SIGNAL = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else None
_FIRST_POKE_SECONDS, _POKE_SECONDS = 0.1, 1.0


class MainThread:
    """The main thread of this process, as a control thread sees it."""

    def __init__(self) -> None:
        self._poke_at, self._pause = 0.0, _FIRST_POKE_SECONDS
        if _POKE_SIGNAL is not None:
            # Its arrival is all that matters.
            signal.signal(_POKE_SIGNAL, lambda *_: None)
        self._library: Any = None
        if sys.platform == "linux":
            self._library = ctypes.CDLL(None)
            self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
            self._library.sem_init(self._semaphore, 0, 0)
            self._post = ctypes.cast(self._library.sem_post, ctypes.c_void_p)

    def expect(self) -> bool:
        """Have `came_back` become true once the main thread runs Python code; return False if it cannot.

        Outside Linux there is no semaphore: the main thread is always taken to have come back.
        """
        if self._library is None:
            return False
        self._poke_at, self._pause = time.monotonic() + _FIRST_POKE_SECONDS, _FIRST_POKE_SECONDS
        # -1 where too many calls are pending already.
        return bool(ctypes.pythonapi.Py_AddPendingCall(self._post, self._semaphore) == 0)

    def came_back(self) -> bool:
        """Return whether the main thread has run Python code since it was last expected; true once."""
        came = False
        while self._library.sem_trywait(self._semaphore) == 0:
            came = True
        if not came and _POKE_SIGNAL is not None and time.monotonic() >= self._poke_at:
            self._pause = min(2 * self._pause, _POKE_SECONDS)
            self._poke_at = time.monotonic() + self._pause
            signal.pthread_kill(threading.main_thread().ident or 0, _POKE_SIGNAL)
        return came
