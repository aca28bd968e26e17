"""Which frames of a traceback are the user's, and what the reader calls their files."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Frames between the user's code and the process: ours, torchelastic's, IPython's, multiprocessing's.
_OURS = re.compile(
    r"(/nblaunch/((rank|capture|elastic|group)/|_waker\.py)|/torch/distributed/elastic/|/torch/multiprocessing/"
    r"|/IPython/core/(interactiveshell|async_helpers)\.py|/multiprocessing/(process|spawn|forkserver)\.py"
    r"|<frozen (runpy|importlib\._bootstrap(_external)?)>|/asyncio/(runners|base_events|events)\.py)"
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+.*:$", re.MULTILINE)
_FATAL_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


def is_ours(filename: str) -> bool:
    """Return whether a frame belongs to the machinery between the user's code and the process."""
    # "<string>" is the fork server's own command line.
    return filename == "<string>" or _OURS.search(filename.replace("\\", "/")) is not None


def readable_stacks(dump: str, titles: Mapping[str, str]) -> str:
    """Turn what faulthandler wrote into a traceback of the user's own frames, innermost last.

    `titles` maps file names of cells to what the reader calls them.

    >>> dump = '''Fatal Python error: Segmentation fault
    ...
    ... Current thread 0x00007f (most recent call first):
    ...   File "/x/cell.py", line 3 in <module>'''
    >>> print(readable_stacks(dump, {"/x/cell.py": "Cell In[2]"}))
    Fatal Python error: Segmentation fault
      Cell In[2], line 3, in <module>
    """
    error = next((line for line in dump.splitlines() if line.startswith("Fatal Python error")), "")
    _, _, current = dump.partition("Current thread")
    frames = _readable(current.partition("\n\n")[0], titles)
    return "\n".join([*([error] if error else []), *frames])


def readable_main_stack(dump: str, titles: Mapping[str, str]) -> str:
    """Return the main thread's frames of what faulthandler wrote on request, innermost last.

    >>> dump = '''Thread 0x00007e (most recent call first):
    ...   File "/lib/zmq/sugar/poll.py", line 106 in poll
    ...
    ... Current thread 0x00007f (most recent call first):
    ...   File "/x/cell.py", line 3 in <module>'''
    >>> print(readable_main_stack(dump, {"/x/cell.py": "Cell In[2]"}))
      Cell In[2], line 3, in <module>
    """
    # The newest thread comes first. Which one is the current one is chance: any may take the signal.
    return "\n".join(_readable(_THREAD.split(dump)[-1], titles))


def _readable(stack: str, titles: Mapping[str, str]) -> list[str]:
    frames = []
    for line in stack.splitlines():
        frame = _FATAL_FRAME.match(line)
        if frame is not None and not is_ours(frame["file"]):
            name = titles.get(frame["file"])
            place = name if name is not None else f'File "{frame["file"]}"'
            frames.append(f"  {place}, line {frame['line']}, in {frame['function']}")
    return frames[::-1]
