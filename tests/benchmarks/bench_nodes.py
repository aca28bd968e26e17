"""What a node costs, and a rank: a session over many nodes, its cells, and the runtime's memory.

    python tests/benchmarks/bench_nodes.py [--nodes 16,64,256,1024] [--ranks 1,8] [--repeats 5]

The nodes are played, by one process that answers as their ranks would: real messages on real sockets, with
CURVE, and no ranks. The session, its runtime and its client are real. All of them, and the nodes, share the
cores of this machine. At the end, the law that fits best: what does not grow, and what a node and a rank add.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import re
import select
import shlex
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import zmq

import nblaunch
from nblaunch.capture import pickling, shared_memory
from nblaunch.client.local import local
from nblaunch.host import wire
from nblaunch.host.descriptors import raise_soft_limit
from nblaunch.host.key import KEY_FILE
from nblaunch.host.link import encrypted
from nblaunch.host.settings import Worker
from nblaunch.protocol.messages import (
    Arrived,
    Dispatch,
    Entered,
    Exited,
    FromRank,
    Hello,
    Leave,
    Names,
    Payload,
    Phase,
    Prepare,
    Proceed,
    Returned,
    Started,
    ToRank,
    decode_to_rank,
    encode,
)

MEGABYTE = 1_000_000
_SECONDS = 120


# The nodes, in a process of their own.


class PlayedNode:
    """A node whose ranks do each job at once."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key: bytes, name: str) -> None:
        """Connect."""
        self.socket = context.socket(zmq.DEALER)
        encrypted(self.socket, key, "node")
        self.socket.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        self.socket.connect(f"tcp://{endpoint}")
        self.finished = False
        self._name = name
        self._rendezvous: wire.CompleteRendezvous | None = None
        self._ranks: range = range(0)
        self._names_known = False

    def send(self, message: wire.FromNode) -> None:
        """Send to the notebook."""
        self.socket.send(wire.encode(message))

    def arrive(self, nproc: int) -> None:
        """Ask to be let in."""
        self._nproc = nproc
        has = wire.Inventory(
            python=platform.python_version(),
            torch=str(torch.__version__),
            nblaunch=metadata.version("nblaunch"),
            boot=self._name,
            backend="gloo",
            device_type="cpu",
        )
        self.send(wire.Arriving(name=self._name, nproc=nproc, address="127.0.0.1", data="", inventory=has))

    def take_all(self, decoded: Callable[[bytes], ToRank]) -> None:
        """Take what has come, and answer."""
        # Its descriptor is readable again only after it has been seen to be empty.
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            first, *_ = self.socket.recv_multipart()
            self._obey(wire.decode_to_node(first), decoded)

    def _obey(self, message: wire.ToNode, decoded: Callable[[bytes], ToRank]) -> None:
        match message:
            case wire.OpenGroup(group=group):
                self.send(wire.AwaitingRendezvous(group=group))
            case wire.CompleteRendezvous():
                self._begin(message)
            case wire.ForRanks(data=data):
                self._do(decoded(data))
            case wire.EndGroup(group=group):
                self.send(wire.NodeEnded(group=group))
            case wire.Finish() | wire.Refused():
                self.finished = True
            case _:
                pass

    def _begin(self, rendezvous: wire.CompleteRendezvous) -> None:
        self._rendezvous, self._ranks = (
            rendezvous,
            range(rendezvous.base_rank, rendezvous.base_rank + self._nproc),
        )
        records = tuple(
            Worker(rank, rank - rendezvous.base_rank, 100_000 + rank - rendezvous.base_rank)
            for rank in self._ranks
        )
        self.send(wire.Workers(group=rendezvous.group, attempt=rendezvous.attempt, workers=records))
        self._say(
            lambda rank: Hello(
                rank=rank,
                token="",
                attempt=rendezvous.attempt,
                local_rank=rank - rendezvous.base_rank,
                world_size=rendezvous.world_size,
                node=self._name,
                pid=100_000 + rank - rendezvous.base_rank,
            )
        )

    def _say(self, *messages: Callable[[int], FromRank]) -> None:
        rendezvous = self._rendezvous
        assert rendezvous is not None
        data = tuple(encode(message(rank)) for rank in self._ranks for message in messages)
        self.send(wire.RankMessages(group=rendezvous.group, attempt=rendezvous.attempt, data=data))

    def _do(self, order: ToRank) -> None:
        now, rendezvous = time.time(), self._rendezvous
        assert rendezvous is not None
        match order:
            case Prepare():
                self._say(
                    lambda rank: Entered(rank=rank, phase=Phase.PROCESS_GROUP),
                    lambda rank: Entered(rank=rank, phase=Phase.READY, device="cpu"),
                )
            case Dispatch(objects=objects) if objects is not None and objects.wait:
                self._say(lambda rank: Started(rank=rank, time=now), lambda rank: Arrived(rank=rank))
            case Dispatch():
                self._say(lambda rank: Started(rank=rank, time=now), lambda rank: _returned(rank, now))
            case Proceed():
                self._say(*self._names(), lambda rank: _returned(rank, now))
            case Leave():
                for rank in self._ranks:
                    exited = Exited(rank=rank, exitcode=0, time=now, expected=True)
                    gone = wire.Gone(group=rendezvous.group, attempt=rendezvous.attempt, exited=exited)
                    self.send(gone)
                self.send(wire.NodeEnded(group=rendezvous.group))
            case _:
                pass

    def _names(self) -> tuple[Callable[[int], FromRank], ...]:
        """Return the report of variables that the first job of a rank makes."""
        known, self._names_known = self._names_known, True
        names = ("device", "local_rank", "rank", "world_size")
        return () if known else (lambda rank: Names(rank=rank, names=names),)


def _returned(rank: int, now: float) -> Returned:
    return Returned(rank=rank, value=_value(rank), time=now, text=str(rank))


def _value(rank: int) -> Payload:
    return shared_memory.put(pickling.dumps(rank), Path).payload


def play(endpoint: str, nodes: int, nproc: int) -> None:
    """Play nodes until the notebook has finished with all of them, or is gone."""
    raise_soft_limit()
    key = Path(os.environ[KEY_FILE]).read_bytes().strip()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, nodes + 8)
    known: dict[bytes, ToRank] = {}

    def decoded(data: bytes) -> ToRank:
        # All nodes get the same: it takes each of them as long, on a core of its own.
        if data not in known:
            known.clear()
            known[data] = decode_to_rank(data, "the benchmark")
        return known[data]

    played = [PlayedNode(context, endpoint, key, f"n{number:04}") for number in range(nodes)]
    by_fd = {int(each.socket.get(zmq.FD)): each for each in played}
    ready = select.epoll()
    ready.register(sys.stdin.fileno(), select.EPOLLIN)
    for fd, node in by_fd.items():
        ready.register(fd, select.EPOLLIN)
        node.arrive(nproc)
        node.take_all(decoded)
    left = set(by_fd.values())
    while left:
        for fd, _ in ready.poll():
            if fd not in by_fd:
                return  # whoever measures has ended
            by_fd[fd].take_all(decoded)
            if by_fd[fd].finished:
                left.discard(by_fd[fd])
                ready.unregister(fd)
    context.destroy(linger=1000)


# The notebook.


class Joins(io.StringIO):
    """What a session prints: the command that joins is carried out, for all nodes together."""

    def __init__(self, nodes: int, nproc: int) -> None:
        """Nothing is printed yet."""
        super().__init__()
        self.nodes, self.nproc = nodes, nproc
        self.program: subprocess.Popen[bytes] | None = None

    def write(self, text: str) -> int:
        """Take more text."""
        found = re.search(rf"^{KEY_FILE}=(\S+) .* join (\S+)", text, flags=re.MULTILINE)
        if found is not None:
            key, endpoint = (shlex.split(each)[0] for each in found.groups())
            words = [sys.executable, __file__, "--play", endpoint, str(self.nodes), str(self.nproc)]
            self.program = subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, KEY_FILE: key})
        return super().write(text)

    def close(self) -> None:
        """End the nodes."""
        if self.program is not None:
            assert self.program.stdin is not None
            self.program.stdin.close()
            self.program.wait(_SECONDS)


def own_rank() -> int:
    """Return what the nodes play."""
    raise NotImplementedError


class Figures(NamedTuple):
    """Of a session on so many nodes."""

    start: float
    cell: float
    runtime: float
    client: float
    nodes: float
    megabytes: float
    close: float
    descriptors: int


@contextlib.contextmanager
def session_on(nodes: int, nproc: int) -> Iterator[tuple[nblaunch.Session, Joins]]:
    """Open a session on played nodes."""
    joins = Joins(nodes, nproc)
    try:
        with contextlib.redirect_stdout(joins):
            session = nblaunch.Session(
                nproc=nproc, nnodes=nodes, on="join", local_addr="127.0.0.1", display=False
            )
        try:
            yield session, joins
        finally:
            session.close()
    finally:
        joins.close()


def measure(nodes: int, nproc: int, repeats: int, pause: float = 0.0) -> Figures:
    """Open a session, give it jobs, and close it."""
    began = time.perf_counter()
    with session_on(nodes, nproc) as (session, joins):
        start = time.perf_counter() - began
        assert joins.program is not None
        runtime, played = psutil.Process(local().runtime.welcome.pid), psutil.Process(joins.program.pid)
        if pause:
            print(f"runtime {runtime.pid}, nodes {played.pid}, client {os.getpid()}", flush=True)
            time.sleep(pause)
        processes = (runtime, psutil.Process(), played)
        taken, used = [], []
        for _ in range(repeats + 1):
            before = [_cpu(each) for each in processes]
            at = time.perf_counter()
            result = session.run(own_rank)
            taken.append(time.perf_counter() - at)
            used.append([_cpu(each) - was for each, was in zip(processes, before, strict=True)])
            assert result.values == list(range(nodes * nproc))
        megabytes = runtime.memory_info().rss / MEGABYTE
        descriptors = runtime.num_fds()
        closing = time.perf_counter()
    close = time.perf_counter() - closing
    # The next session has a runtime of its own.
    local().close()
    cpu = [statistics.median(each) for each in zip(*used[1:], strict=True)]
    return Figures(start, statistics.median(taken[1:]), cpu[0], cpu[1], cpu[2], megabytes, close, descriptors)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def law(found: dict[tuple[int, int], Figures], of: Callable[[Figures], float]) -> tuple[float, ...]:
    """Return what fits best: a constant, and what a node and a rank add."""
    sizes = torch.tensor([[1.0, nodes, nodes * nproc] for nodes, nproc in found], dtype=torch.float64)
    figures = torch.tensor([[of(each)] for each in found.values()], dtype=torch.float64)
    # In proportion: the small ones count as much as the large.
    weight = 1 / figures.clamp(min=1e-9)
    return tuple(torch.linalg.lstsq(sizes * weight, figures * weight).solution.flatten().tolist())


def line(name: str, figure: float) -> None:
    """Print one figure."""
    print(f"  {name:48s}{figure:10.3f}", flush=True)


def show(nodes: int, nproc: int, found: Figures) -> None:
    """Print the figures of one session."""
    size = f"{nodes} nodes x {nproc}"
    line(f"{size}: start, s", found.start)
    line(f"{size}: cell, ms", 1000 * found.cell)
    line(f"{size}: cell, CPU ms of the runtime", 1000 * found.runtime)
    line(f"{size}: cell, CPU ms of the client", 1000 * found.client)
    line(f"{size}: cell, CPU ms of the played nodes", 1000 * found.nodes)
    line(f"{size}: close, s", found.close)
    line(f"{size}: MB of the runtime", found.megabytes)
    line(f"{size}: descriptors of the runtime", found.descriptors)


def main() -> None:
    """Print the figures of all sizes, and the law."""
    if sys.argv[1:2] == ["--play"]:
        play(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="16,64,256,1024")
    parser.add_argument("--ranks", default="1,8", help="on each node")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before the cells, for a profiler")
    options = parser.parse_args()
    print(f"nodes, played, {os.cpu_count()} cores for all")
    found: dict[tuple[int, int], Figures] = {}
    for nodes in map(int, options.nodes.split(",")):
        for nproc in map(int, options.ranks.split(",")):
            found[nodes, nproc] = measure(nodes, nproc, options.repeats, options.pause)
            show(nodes, nproc, found[nodes, nproc])
    if len(found) > 3:
        laws = {
            "cell, ms": law(found, lambda each: 1000 * each.cell),
            "runtime, MB": law(found, lambda each: each.megabytes),
            "start, ms": law(found, lambda each: 1000 * each.start),
        }
        for name, (always, node, rank) in laws.items():
            print(f"  {name} = {always:.2f} + {node:.4f} x nodes + {rank:.4f} x ranks")


if __name__ == "__main__":
    main()
