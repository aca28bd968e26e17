"""Where the user's code is at this moment, as text: for a probe that is called by torch, deep below it."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType

import torch

from nblaunch.protocol.messages import FrameRecord
from nblaunch.protocol.reports import is_ours, nearest_frame, place

_TORCH = str(Path(torch.__file__).parent) + os.sep
_MOST_FRAMES = 4
_MOST_TEXTS = 4096
_USERS, _BELOW = False, None
_RUNS_JOBS = "/nblaunch/rank/main.py"
"""What runs the job: below it are IPython's kernel and torchelastic, twenty frames without the user's."""


class Sites:
    """Finds the user's frames. What it has found of a line of code it remembers: it is asked often."""

    def __init__(self, titles: Mapping[str, str]) -> None:
        """`titles` maps file names of cells to what the reader calls them; it may change later."""
        self._titles = titles
        self._main = threading.main_thread().ident or 0
        self._foreign: dict[CodeType, bool | None] = {}
        """Whether a function is ours or torch's, or below all of the user's."""
        self._texts: dict[tuple[tuple[CodeType, int], ...], str] = {}

    def frames(self) -> list[FrameType]:
        """Return the innermost frames that are neither ours nor torch's, the innermost first.

        A thread of autograd's has none: then those of the main thread, which waits for it.
        """
        here: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the public way goes through every frame
        found = self._users(here)
        if not found:
            found = self._users(sys._current_frames().get(self._main))  # noqa: SLF001 - as above
        return found

    def stack(self) -> str:
        """Return these frames, a line each, the innermost last."""
        frames = self.frames()
        key = tuple((frame.f_code, frame.f_lineno) for frame in frames)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) > _MOST_TEXTS:
                self._texts.clear()
            records = map(self._record, reversed(frames))
            text = "\n".join(f"{each.filename}, line {each.line}, in {each.function}" for each in records)
            self._texts[key] = text
        return text

    def place(self) -> str:
        """Return the user's own line in words: `cell line 9`; empty if there is none."""
        records = [self._record(frame) for frame in reversed(self.frames())]
        nearest = nearest_frame(records)
        return place(nearest) if nearest is not None else ""

    def _users(self, frame: FrameType | None) -> list[FrameType]:
        found: list[FrameType] = []
        foreign = self._foreign
        while frame is not None:
            code = frame.f_code
            try:
                whose = foreign[code]
            except KeyError:
                whose = foreign[code] = _whose(code.co_filename)
            if whose is _USERS:
                found.append(frame)
                if len(found) == _MOST_FRAMES:
                    break
            elif whose is _BELOW:
                break
            frame = frame.f_back
        return found

    def _record(self, frame: FrameType) -> FrameRecord:
        code = frame.f_code
        filename = self._titles.get(code.co_filename, code.co_filename)
        function = re.sub(r"^<(cell line: \d+|module)>.*", "<module>", code.co_name)
        return FrameRecord(filename=filename, line=frame.f_lineno, function=function, source="")


def variables(frames: list[FrameType]) -> Iterator[tuple[str, object]]:
    """Yield the variables of some frames by name, those of the innermost first, and then their globals."""
    for frame in frames:
        yield from list(frame.f_locals.items())
    for frame in frames:
        yield from list(frame.f_globals.items())


def _whose(filename: str) -> bool | None:
    if filename.endswith(_RUNS_JOBS):
        return _BELOW
    return is_ours(filename) or filename.startswith((_TORCH, "<frozen ", "<eval_with_key>"))
