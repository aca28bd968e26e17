"""The caller's thread while a job runs: it folds what the runtime sends, draws, asks, and interrupts."""

from __future__ import annotations

import getpass
import threading
import time
from typing import cast

from nblaunch import _notebook
from nblaunch._errors import LaunchError
from nblaunch._help import FailureKind
from nblaunch.client.jobs import ClientJob
from nblaunch.client.line import deferring_interrupts, noting_interrupts
from nblaunch.protocol.client import InterruptJob, Reply
from nblaunch.protocol.framing import FrameKind
from nblaunch.protocol.messages import Answer, Asked
from nblaunch.protocol.state import Message, RankState, RunState, View
from nblaunch.protocol.transcript import Text

_DRAW_SECONDS = 0.1
# Between an interrupt of a kernel and the request to end it; that of a detached session's job waits as long.
_END_SECONDS = 0.5
_MOST_INTERRUPTS = 2


class StoppedWatchingError(Exception):
    """The user has stopped watching a job, which goes on."""

    def __init__(self) -> None:
        super().__init__("stopped watching; the job goes on")

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook; IPython's own protocol."""
        return [str(self)]


class SilentView:
    """Shows nothing."""

    shows_usage = False

    def open(self, state: RunState) -> None:
        """Show nothing."""

    def draw(self, state: RunState) -> None:
        """Show nothing."""

    def close(self, state: RunState) -> None:
        """Show nothing."""


# Questions of ranks (`input`, `getpass`, a debugger), one after the other in the notebook's own input field.

_DEBUGGERS = ("(Pdb)", "ipdb>")
_FIRST_LINES = 6
_MOST_LINES = 60


class Prompts:
    """Asks the user what a job's ranks ask, and sends the answers."""

    def __init__(self, job: ClientJob) -> None:
        self._job = job
        self._shown: dict[int, int] = {}

    def ask(self) -> bool:
        """Put the oldest question to the user; return whether there was one."""
        if not self._job.questions:
            return False
        asked = self._job.questions.popleft()
        try:
            answer = Answer(asked.number, text=self._typed(asked))
        except Exception as error:  # noqa: BLE001 - a front end without an input field, an end of file
            answer = Answer(asked.number, error=f"nobody could be asked: {error}")
        self._job.line.send(Reply(job=self._job.number, rank=asked.rank, answer=answer))
        return True

    def _typed(self, asked: Asked) -> str:
        if threading.current_thread() is not threading.main_thread():
            msg = "a run in the background cannot ask; run the cell without --background"
            raise EOFError(msg)
        known = self._job.state.ranks.get(asked.rank)
        if known is not None and asked.prompt.strip().startswith(_DEBUGGERS):
            self._show_news(known)
        prompt = f"[rank {asked.rank}] {asked.prompt}"
        return getpass.getpass(prompt) if asked.password else input(prompt)

    def _show_news(self, known: RankState) -> None:
        """Print what a debugger has printed since the last question: some views show it only at the end."""
        written = known.transcript.written
        before = self._shown.get(known.rank)
        self._shown[known.rank] = written
        text = "".join(entry.text for entry in known.transcript.entries if isinstance(entry, Text))
        lines = (text if before is None else text[max(len(text) - (written - before), 0) :]).splitlines()
        most = _FIRST_LINES if before is None else _MOST_LINES
        for line in lines[-most:]:
            print(f"[rank {known.rank}] {line}")  # noqa: T201 - the user is in a dialogue


def left_alone() -> LaunchError:
    """Return the error for a job that has not ended after two interrupts, at the third."""
    msg = (
        "The run was interrupted three times, and has not ended: its ranks or the runtime do not answer. "
        "They are left as they are; restart the kernel to end them."
    )
    return LaunchError(msg, phase="job", kind=FailureKind.HANG)


class JobWait:
    """Follows a job until it has ended, on the thread that is to show it.

    Stopping the notebook interrupts the job, and goes on following it; the second time its ranks are ended.
    """

    def __init__(self, job: ClientJob, view: View, cancelled: threading.Event | None = None) -> None:
        """Prepare the wait; setting `cancelled` interrupts the job, from any thread.

        While the job is only watched, an interrupt ends the wait alone.
        """
        self.interrupt: KeyboardInterrupt | None = None
        """The first interrupt."""
        self._job = job
        self._view = view
        self._cancelled = cancelled or threading.Event()
        self._raised = False
        """Whether an interrupt was raised on this thread since the last one that came here."""
        self._prompts = Prompts(job)
        self._interrupts = 0
        self._sent = 0
        self._draw_at = time.monotonic() + _DRAW_SECONDS

    def wait(self) -> None:
        """Return once the job has ended.

        Raises `LaunchError` if the runtime has, or at a third interrupt; `StoppedWatchingError` if the user
        only watched.
        """
        with noting_interrupts(self._note_raised):
            while self._job.end is None:
                try:
                    self.send_interrupts()
                    self._follow()
                except KeyboardInterrupt as interrupt:
                    self._raised = False
                    if self._job.watching():
                        raise StoppedWatchingError from interrupt
                    self.interrupted(interrupt)

    def _note_raised(self) -> None:
        # A signal handler must take no lock: the code that it interrupts may hold that.
        self._raised = True

    def interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """Note that the user has stopped the notebook; raises `LaunchError` the third time."""
        self.interrupt = self.interrupt or interrupt
        self._interrupts += 1
        if self._interrupts > _MOST_INTERRUPTS:
            # Those that were noted and not sent yet: once it answers again, the job is to end.
            for _ in range(_MOST_INTERRUPTS - self._sent):
                self._job.line.send(InterruptJob(job=self._job.number))
            raise left_alone() from interrupt

    def send_interrupts(self) -> None:
        """Send the job the interrupts that were noted."""
        # A front end that restarts or ends a kernel interrupts it just before: that is not meant for the job.
        if self._interrupts > self._sent == 0 and self._job.private and _notebook.ends_within(_END_SECONDS):
            raise StoppedWatchingError
        while self._sent < self._interrupts:
            self._job.line.send(InterruptJob(job=self._job.number))
            self._sent += 1

    def _follow(self) -> None:
        """Follow the job until it has ended, or is cancelled."""
        while self._job.end is None:
            self._take_all()
            self._draw()
            if self.interrupt is None:
                self._prompts.ask()
            if self._cancelled.is_set() or self._raised:
                self._cancelled.clear()
                raise KeyboardInterrupt

    def _take_all(self) -> None:
        """Fold all that is here; where nothing is, wait until the next drawing is due."""
        while self._job.end is None and self._job.line.poll(max(self._draw_at - time.monotonic(), 0.0)):
            # A message that was read and not folded would be lost.
            with deferring_interrupts():
                for _ in range(max(self._job.line.kept, 1)):
                    self._take()
            if time.monotonic() >= self._draw_at:
                return

    def _take(self) -> None:
        frame = self._job.line.next(0.0)
        if frame is None:
            return
        kind, number, content = frame
        if kind is FrameKind.EVENT:
            self._job.take(content)
            self._job.others(content)
        elif number == self._job.number:
            self._job.fold(cast("Message", content))

    def _draw(self) -> None:
        if time.monotonic() >= self._draw_at and self._job.end is None:
            self._view.draw(self._job.state)
            self._draw_at = time.monotonic() + _DRAW_SECONDS
