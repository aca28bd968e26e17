"""New lines as they come, for a terminal: each with its rank, each once."""

from __future__ import annotations

from collections.abc import Iterator

from nblaunch._protocol import Stream
from nblaunch._reports import HangReport
from nblaunch._state import RunState
from nblaunch._transcript import Display, Text, Transcript
from nblaunch.view.outcome import attempt_lines, hang_lines
from nblaunch.view.output import display_text
from nblaunch.view.terminal import plain
from nblaunch.view.text import prefixed

_PENDING_CHARACTERS = 16 * 1024


class LiveLines:
    """Reads a run's state again and again, and yields what it has not yielded yet."""

    def __init__(self) -> None:
        """Begin at the beginning."""
        self._attempt = 0
        self._attempts_told = 0
        self._hang: HangReport | None = None
        self._read: dict[int, int] = {}
        self._pending: dict[tuple[int, Stream], str] = {}

    def take(self, state: RunState) -> Iterator[str]:
        """Yield the whole lines that are new, in rank order."""
        if state.attempt.number != self._attempt:
            yield from self.rest()
            self._attempt, self._read = state.attempt.number, {}
            yield from attempt_lines(state)[self._attempts_told :]
            self._attempts_told = len(attempt_lines(state))
        for rank, known in sorted(state.ranks.items()):
            yield from self._take_rank(rank, known.transcript)
        if state.hang is not self._hang:
            self._hang = state.hang
            yield from hang_lines(state)

    def rest(self) -> Iterator[str]:
        """Yield the lines that have not ended yet."""
        for (rank, _), text in sorted(self._pending.items()):
            if text.strip():
                yield prefixed((rank,), plain(text))
        self._pending = {}

    def _take_rank(self, rank: int, transcript: Transcript) -> Iterator[str]:
        new = transcript.written - self._read.get(rank, 0)
        self._read[rank] = transcript.written
        entries: list[Text | Display] = []
        for entry in reversed(transcript.entries if new > 0 else ()):
            if new <= 0:
                break
            if isinstance(entry, Text):
                entries.append(Text(entry.stream, entry.text[-new:]))
                new -= len(entry.text)
            else:
                entries.append(entry)
                new -= 1
        if new > 0 and transcript.omitted:
            yield prefixed((rank,), f"… {new} characters left out, see result.ranks[{rank}].stdout …")
        for entry in reversed(entries):
            if isinstance(entry, Display):
                yield prefixed((rank,), display_text(entry))
            else:
                yield from self._whole_lines(rank, entry)

    def _whole_lines(self, rank: int, entry: Text) -> Iterator[str]:
        key = (rank, entry.stream)
        whole, newline, rest = (self._pending.get(key, "") + entry.text).rpartition("\n")
        if len(rest) > _PENDING_CHARACTERS:
            # A progress bar that has drawn itself often: what it has drawn over is not needed.
            rest = rest[max(rest.rfind("\r", 0, len(rest) - 1), 0) :]
        self._pending[key] = rest
        if newline:
            yield prefixed((rank,), plain(whole))
