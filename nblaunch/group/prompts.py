"""Questions of ranks, put to the user: one after the other, in the notebook's own input field."""

from __future__ import annotations

import getpass
import threading
from collections.abc import Callable

from nblaunch.group.job import Job
from nblaunch.protocol.messages import Answer, Asked
from nblaunch.protocol.state import RankState
from nblaunch.protocol.transcript import Text

_DEBUGGERS = ("(Pdb)", "ipdb>")
_FIRST_LINES = 6
_MOST_LINES = 60


class Answers:
    """Asks what a job's ranks ask; `send(rank, answer)` reaches one rank."""

    def __init__(self, job: Job, send: Callable[[int, Answer], None]) -> None:
        """Nothing has been asked yet."""
        self._job = job
        self._send = send
        self._shown: dict[int, int] = {}

    def give(self) -> bool:
        """Put the oldest question to the user; return whether there was one."""
        if not self._job.questions:
            return False
        asked = self._job.questions.popleft()
        try:
            answer = Answer(asked.number, text=self._typed(asked))
        except Exception as error:  # noqa: BLE001 - a front end without an input field, an end of file
            answer = Answer(asked.number, error=f"nobody could be asked: {error}")
        self._send(asked.rank, answer)
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
        """Print what a debugger has said since the last question: some views show it only at the end."""
        written = known.transcript.written
        before = self._shown.get(known.rank)
        self._shown[known.rank] = written
        text = "".join(entry.text for entry in known.transcript.entries if isinstance(entry, Text))
        lines = (text if before is None else text[max(len(text) - (written - before), 0) :]).splitlines()
        most = _FIRST_LINES if before is None else _MOST_LINES
        for line in lines[-most:]:
            print(f"[rank {known.rank}] {line}")  # noqa: T201 - the user is in a dialogue
