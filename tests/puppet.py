"""A runtime that does what a test asks of it: a line with an expression in, a line of JSON out.

It is the real process in its real place; only what it answers on its link is a test's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nblaunch.host.forkserver import RankProcess, Server


def live(*arguments):
    from nblaunch.runtime import runtime_main  # not where a rank imports this file

    runtime_main.serve = serve
    runtime_main.live(*arguments)


def serve(link: socket.socket, root: Path, server: Server) -> None:
    names = {
        "root": root,
        "server": server,
        "os": os,
        "signal": signal,
        "sys": sys,
        "fork": lambda: fork(root, server),
        "plain_fork": lambda: forked(server, time.sleep, 1000),
    }
    with link.makefile("rw") as lines:
        for line in lines:
            if line == "stop\n":
                return
            try:
                answer = eval(line, names)  # noqa: S307 - the test's own
            except Exception as error:  # noqa: BLE001 - for the test to look at
                answer = f"{type(error).__name__}: {error}"
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    signal.pause()


def fork(root: Path, server: Server) -> list[int]:
    """Return a rank's process id, and that of a process which it has left behind in a session of its own."""
    pid = forked(server, rank, os.fspath(root))
    return [pid, int(read(root / f"rank-{pid}")[0])]


def forked(server: Server, target: Callable[..., object], argument: object) -> int:
    process = RankProcess(target=target, args=(argument,))
    with server.forking():
        process.start()
    return process.pid or 0


def read(path: Path) -> list[str]:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_bytes()):
        assert time.monotonic() < deadline, path
        time.sleep(0.001)
    return path.read_text().splitlines()


def rank(root: str) -> None:
    """Be isolated as a rank is, and leave a child behind; note it, and what is loaded here."""
    from nblaunch.rank.isolate import isolate

    isolate()
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    # `Popen` returns in the middle of exec: for a moment it has no environment, by which tests find it.
    read(Path(f"/proc/{left.pid}/environ"))
    path = Path(root, f"rank-{os.getpid()}")
    path.with_suffix(".new").write_text("\n".join([str(left.pid), *sys.modules]))
    path.with_suffix(".new").rename(path)
    time.sleep(1000)
