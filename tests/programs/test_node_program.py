"""`python -m nblaunch join HOST:PORT`: the program against a notebook that a test plays, on real sockets."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import torch
import zmq

from nblaunch.capture import pickling, shared_memory
from nblaunch.host import wire
from nblaunch.host.link import encrypted
from nblaunch.host.rendezvous import host_store
from nblaunch.host.settings import ProcessSettings
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import (
    Aborted,
    CellJob,
    Dispatch,
    Entered,
    Exited,
    Hello,
    Interrupt,
    InterruptSeen,
    Leave,
    Payload,
    Phase,
    Preempt,
    Prepare,
    Raised,
    ReportWhere,
    Returned,
    Started,
    Stream,
    ToRank,
    Where,
    decode_from_rank,
    encode,
)

ROOT = Path(__file__).parents[2]
SECONDS = 40
"""What one step of a node may take: it imports torch first, on a machine that is busy."""

AHEAD = 1000.0
"""How far the notebook's clock is ahead of the node's, in a test of that."""

JOINED = "nblaunch join: 2 ranks of this machine take part, as hB\n"

M = TypeVar("M")


def cell(source: str, **captured: object) -> Dispatch:
    """Return a cell that ranks run; what it captures goes inside the message."""
    with shared_memory.put(pickling.dumps(captured), Path) as sent:
        assert sent.payload.inline is not None
        return Dispatch(job=CellJob(source, "cell-1", "Cell In[1]", keeps_value=True), payload=sent.payload)


def opened(notebook: Notebook, group: str, **changed: Any) -> wire.OpenGroup:
    plain = wire.OpenGroup(
        group=group,
        keep=False,
        options=LaunchOptions(grace=1.0, shutdown_timeout=5, monitor_interval=0.02),
        backend="gloo",
        env=(("OF_THE_RUN", group),),
        processes=ProcessSettings(),
        cwd=os.fsencode(notebook.directory),
    )
    return msgspec.structs.replace(plain, **changed)


def value_of(returned: Returned) -> Any:
    parts = shared_memory.get(returned.value, private=True)
    return pickling.loads(parts[0], parts[1:])


@dataclass
class Notebook:
    """The notebook's side of the wire, by hand."""

    directory: Path
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    nodes: list[subprocess.Popen[str]] = field(default_factory=list)
    said: list[tuple[Any, bytes]] = field(default_factory=list)
    """What has arrived and was not waited for, each with its bytes; messages of ranks one by one."""
    node: bytes = b""
    opened: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    """The groups that were opened, and those that have ended."""

    def __post_init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        encrypted(self.socket, self.key.encode(), "notebook")
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").removeprefix("tcp://")
        self.stores: list[Any] = []

    def start(self, *more: str, key: str | None = None, address: str = "") -> subprocess.Popen[str]:
        node = subprocess.Popen(
            [sys.executable, "-m", "nblaunch", "join", address or self.address, "-n", "2", *more],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.nodes.append(node)
        assert node.stdin is not None
        node.stdin.write(f"{self.key if key is None else key}\n")
        node.stdin.close()
        node.stdin = None
        return node

    def admit(self, **changed: Any) -> subprocess.Popen[str]:
        """Start a node and let it in."""
        node = self.start("--key-stdin")
        self.data = self.wait_for(wire.Arriving).data
        admitted = wire.Admitted(name="hB", silence=15.0, now=time.time())
        self.send(msgspec.structs.replace(admitted, **changed))
        return node

    def send(self, message: wire.ToNode, data: bytes | None = None) -> None:
        self.socket.send_multipart([self.node, wire.encode(message), *([] if data is None else [data])])

    def send_to_ranks(
        self, message: ToRank, group: str = "g", attempt: int = 0, ranks: tuple[int, ...] = (0, 1)
    ) -> None:
        self.send(wire.ForRanks(group=group, attempt=attempt, ranks=ranks, data=encode(message)))

    def open(self, group: str = "g", **changed: Any) -> None:
        """Have the node prepare a group."""
        self.opened.add(group)
        self.send(opened(self, group, **changed))
        assert self.wait_for(wire.AwaitingRendezvous, group=group).after == -1

    def leave(self, group: str = "g", ranks: tuple[int, ...] = (0, 1)) -> None:
        """Release the ranks, whose values are here."""
        self.send(wire.Release(group=group, attempt=0, succeeded=True, others=()))
        self.send_to_ranks(Leave(), group, ranks=ranks)

    def complete_rendezvous(
        self,
        group: str = "g",
        attempt: int = 0,
        *,
        backend: str | None = "gloo",
        device_type: str = "cpu",
        **changed: Any,
    ) -> None:
        """Have the node start its ranks as all of an attempt, and wait until these are ready."""
        self.stores.append(host_store("127.0.0.1", range(1)))
        complete_rendezvous = wire.CompleteRendezvous(
            group=group,
            attempt=attempt,
            node_rank=0,
            node_count=1,
            base_rank=0,
            world_size=2,
            store=("127.0.0.1", self.stores[-1].port),
        )
        self.send(msgspec.structs.replace(complete_rendezvous, **changed))
        self.workers = self.wait_for(wire.Workers, group=group, attempt=attempt).workers
        for _ in range(2):
            assert self.wait_for(Hello, attempt=attempt).node == "hB"
        prepare = Prepare(environ=(), cwd=b"", path=(), backend=backend, device_type=device_type)
        self.send_to_ranks(prepare, group, attempt, tuple(each.rank for each in self.workers))
        for _ in range(2):
            self.wait_for(Entered, phase=Phase.READY)

    def wait_for(self, kind: type[M], seconds: float = SECONDS, **fields: Any) -> M:
        """Return the first message of a kind, and with these fields, that was not returned before."""
        return self.wait_with_data(kind, seconds, **fields)[0]

    def wait_with_data(self, kind: type[M], seconds: float = SECONDS, **fields: Any) -> tuple[M, bytes]:
        deadline = time.monotonic() + seconds
        while True:
            for each in self.said:
                message = each[0]
                if isinstance(message, kind) and all(
                    getattr(message, name) == value for name, value in fields.items()
                ):
                    self.said.remove(each)
                    return message, each[1]
            left = max(deadline - time.monotonic(), 0)
            found = self.socket.poll(int(left * 1000))
            assert found, f"no {kind.__name__} with {fields} among {[each for each, _ in self.said]}"
            self.take()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            assert self.socket.poll(1000 * SECONDS), f"{what}: {self.opened} {self.closed}"
            self.take()

    def gone(self, rank: int) -> Exited:
        """Return the exit of a rank that was not returned before."""
        while True:
            for each in self.said:
                if isinstance(each[0], wire.Gone) and each[0].exited.rank == rank:
                    self.said.remove(each)
                    return each[0].exited
            assert self.socket.poll(1000 * SECONDS), f"rank {rank} is not gone"
            self.take()

    def take(self) -> None:
        self.node, first, *rest = self.socket.recv_multipart()
        message = wire.decode_from_node(first)
        if isinstance(message, wire.NodeEnded):
            self.closed.add(message.group)
        if isinstance(message, wire.RankMessages):
            self.said += [(decode_from_rank(each, "a rank"), b"") for each in message.data]
        else:
            self.said.append((message, rest[0] if rest else b""))

    def values(self, ranks: int = 2) -> list[Any]:
        found = [self.wait_for(Returned) for _ in range(ranks)]
        return [value_of(each) for each in sorted(found, key=lambda each: each.rank)]

    def finish(self, node: subprocess.Popen[str]) -> None:
        self.send(wire.Finish(succeeded=True))
        assert ended(node) == (0, JOINED)

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.stores.clear()


def ended(node: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status of a node that ends by itself, and what it printed."""
    said, _ = node.communicate(timeout=SECONDS)
    return node.returncode, said


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


@pytest.fixture(scope="module", autouse=True)
def torchs_store_was_used():
    """libuv keeps a pipe from the first store of a process on."""
    host_store("127.0.0.1", range(1))


@contextlib.contextmanager
def played(directory: Path) -> Iterator[Notebook]:
    made = Notebook(directory)
    try:
        yield made
    finally:
        made.close()
        for node in made.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(5)
            if node.poll() is None:
                node.kill()
            node.communicate()


@pytest.fixture
def notebook(tmp_path):
    """Play the notebook; nodes that are there at the end are ended."""
    with played(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def with_node(tmp_path_factory):
    """Play a notebook that has let a node in."""
    with played(tmp_path_factory.mktemp("notebook")) as made:
        node = made.admit()
        yield made
        made.finish(node)


@pytest.fixture
def shared(with_node):
    """Give the notebook and the node that the tests share; each has groups of its own, which end with it."""
    with_node.opened.clear()
    yield with_node
    for group in with_node.opened:
        with_node.send(wire.EndGroup(group=group))
    with_node.until(lambda: with_node.opened <= with_node.closed, "all groups have ended")
    with_node.closed.clear()
    with_node.said.clear()
    with_node.stores.clear()


def test_it_joins_with_the_key_of_its_standard_input_and_shows_it_nowhere(notebook):
    node = notebook.start("--key-stdin")
    arriving = notebook.wait_for(wire.Arriving)
    assert (arriving.name, arriving.nproc, arriving.address) == (platform.node(), 2, "127.0.0.1")
    assert (arriving.inventory.torch, arriving.inventory.backend) == (str(torch.__version__), "gloo")
    notebook.send(wire.Admitted(name="hB", silence=15.0, now=time.time()))
    notebook.open()
    notebook.complete_rendezvous()
    processes = family(node.pid)
    assert len(processes) >= 5  # itself, its keeper, the fork server, two ranks
    for each in processes:
        for file in ("cmdline", "environ"):
            assert notebook.key.encode() not in Path(f"/proc/{each.pid}/{file}").read_bytes()
    notebook.finish(node)
    assert [each for each in processes if each.is_running()] == []


def test_another_key_is_refused_and_none_is_an_error(notebook):
    stranger = notebook.start("--key-stdin", key=secrets.token_hex(32))
    without, short = notebook.start(), notebook.start("--key-stdin", key="short")
    status, said = ended(stranger)
    assert (status, "its key is wrong" in said) == (1, True), said
    status, said = ended(without)
    assert (status, "key is needed" in said) == (2, True)
    status, said = ended(short)
    assert (status, "5 characters" in said) == (2, True)
    assert notebook.socket.poll(0) == 0


def test_a_notebook_that_is_not_there_is_named(notebook):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    status, said = ended(notebook.start("--key-stdin", address=address))
    assert (status, f"nobody answers at {address}" in said, "refused" in said) == (3, True, True)


def test_a_node_that_is_not_let_in_gives_the_reason(notebook):
    node = notebook.start("--key-stdin")
    notebook.wait_for(wire.Arriving)
    notebook.send(wire.Refused("there are enough"))
    assert ended(node) == (1, "nblaunch join: the notebook does not let this node in: there are enough\n")


def test_a_group_runs_a_job_from_its_meeting_to_its_end(notebook):
    node = notebook.admit(now=time.time() + AHEAD)
    notebook.open()
    notebook.complete_rendezvous(backend=None, node_rank=1, node_count=2, base_rank=2, world_size=4)
    assert [(each.rank, each.local_rank) for each in notebook.workers] == [(2, 0), (3, 1)]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    source = f"""
import os
print("printed", flush=True)
[[int(os.environ[name]) for name in {names}], os.environ["OF_THE_RUN"], os.getcwd(), captured]
"""
    notebook.send_to_ranks(cell(source, captured="captured"), ranks=(2, 3))
    for _ in range(2):
        assert notebook.wait_for(Started).time == pytest.approx(time.time() + AHEAD, abs=AHEAD / 10)
    assert notebook.values() == [
        [[rank, rank - 2, 1, 4, 2, 2], "g", str(notebook.directory), "captured"] for rank in (2, 3)
    ]
    for rank in (2, 3):
        # Without waiting: what a rank has printed precedes its next message.
        text = b""
        while not text.endswith(b"\n"):  # print() may write a line and its end one after the other
            text += notebook.wait_with_data(wire.Wrote, 0, rank=rank, stream=Stream.STDOUT)[1]
        assert text == b"printed\n"
    notebook.leave(ranks=(2, 3))
    for rank in (2, 3):
        assert notebook.gone(rank).exitcode == 0
    assert notebook.wait_for(wire.NodeEnded, group="g").error == ""
    notebook.finish(node)


def test_ranks_on_gpus_let_go_of_nccl_before_the_first_is_ended(shared):
    """These have no GPU, and so nothing to let go of: they answer at once."""
    shared.open()
    shared.complete_rendezvous(device_type="cuda")
    shared.send(wire.Restart(group="g", attempt=0))
    kinds: list[type] = []
    while kinds.count(wire.Gone) < 2:
        assert shared.socket.poll(1000 * SECONDS), kinds
        shared.take()
        kinds = [type(each) for each, _ in shared.said if isinstance(each, Aborted | wire.Gone)]
    assert kinds == [Aborted, Aborted, wire.Gone, wire.Gone]
    shared.wait_for(wire.AwaitingRendezvous, after=0)


def test_a_payload_that_comes_in_pieces_and_values_that_leave_in_pieces(shared):
    shared.open()
    shared.complete_rendezvous()
    big = torch.arange(1_000_000)
    sizes, whole = packed(big=big)
    half = len(whole) // 2
    for offset, part in ((0, whole[:half]), (half, whole[half:])):
        shared.send(wire.Piece(group="g", number=7, offset=offset, total=len(whole)), part)
    ticket = Payload(sizes=sizes, path="parcel:7")
    shared.send_to_ranks(msgspec.structs.replace(cell("big * 2"), payload=ticket))
    for _ in range(2):
        returned = shared.wait_for(Returned)
        number = int(returned.value.path.partition(":")[2])
        home, total = bytearray(), 1
        while len(home) < total:
            piece, data = shared.wait_with_data(wire.Piece, number=number)
            assert (piece.group, piece.offset) == ("g", len(home))
            home, total = home + data, piece.total
        found = shared_memory.get(Payload(sizes=returned.value.sizes, inline=bytes(home)), private=True)
        assert torch.equal(pickling.loads(found[0], found[1:]), big * 2)


def test_ranks_are_replaced_when_the_notebook_says_so(shared):
    shared.open(keep=True)
    shared.complete_rendezvous()
    before = {each.pid for each in shared.workers}
    shared.send_to_ranks(cell("import time; time.sleep(1000)"))
    for _ in range(2):
        shared.wait_for(Started)
    shared.send(wire.Restart(group="g", attempt=0))
    for rank in (0, 1):
        assert shared.gone(rank).expected
    assert shared.wait_for(wire.AwaitingRendezvous).after == 0
    shared.send(wire.Restart(group="g", attempt=0))  # too late: there is nobody to end
    shared.complete_rendezvous(attempt=1)
    assert not before & {each.pid for each in shared.workers}
    shared.send_to_ranks(cell("1"), attempt=0)  # of the attempt before
    shared.send_to_ranks(cell("rank + 2"), attempt=1)
    assert shared.values() == [2, 3]


def test_a_rank_that_dies_is_reported_and_the_node_waits_for_the_next_attempt(shared):
    shared.open()
    shared.complete_rendezvous()
    os.kill(shared.workers[1].pid, signal.SIGKILL)
    gone = shared.gone(1)
    assert (gone.exitcode, gone.expected) == (-9, False)
    assert shared.gone(0).expected
    assert shared.wait_for(wire.AwaitingRendezvous).after == 0
    shared.send(wire.EndGroup(group="g"))
    assert shared.wait_for(wire.NodeEnded, group="g").error == ""


def test_one_node_serves_several_groups_at_a_time(shared):
    for group in ("a", "b"):
        shared.open(group, keep=group == "a")
        shared.complete_rendezvous(group)
        shared.send_to_ranks(cell("import os; os.environ['OF_THE_RUN']"), group)
        assert shared.values() == [group, group]
    shared.leave("b")
    shared.wait_for(wire.NodeEnded, group="b")
    shared.send_to_ranks(cell("rank"), "a")
    assert shared.values() == [0, 1]
    shared.open("c")
    shared.send(wire.EndGroup(group="c"))
    assert shared.wait_for(wire.NodeEnded, group="c").error == ""


def test_a_group_that_cannot_be_opened_is_refused_and_the_node_goes_on(shared):
    shared.send(opened(shared, "g", backend="cpu:gloo,cuda:nccl"))
    assert "GPU" in shared.wait_for(wire.NodeEnded, group="g").error
    shared.open("h")


def test_a_variable_that_has_no_effect_in_forks_is_named(shared):
    shared.opened.add("g")
    shared.send(opened(shared, "g", env=(("MALLOC_ARENA_MAX", "2"),)))
    assert "no effect in the ranks: MALLOC_ARENA_MAX" in shared.wait_for(wire.AwaitingRendezvous).error


def test_it_asks_to_leave_after_a_signal_and_ends_when_it_may(notebook):
    node = notebook.admit()
    notebook.open()
    notebook.complete_rendezvous()
    processes = family(node.pid)
    node.terminate()
    assert notebook.wait_for(wire.NodeEnding).words == "got SIGTERM"
    notebook.send_to_ranks(Preempt(seconds=5))
    notebook.wait_for(wire.Leaving)
    assert node.poll() is None
    notebook.send(wire.Finish(succeeded=False))
    status, said = ended(node)
    assert (status, "left after SIGTERM" in said) == (1, True)
    assert [each for each in processes if each.is_running()] == []


def test_a_warning_is_sent_on_and_ends_nothing(shared):
    shared.open()
    shared.complete_rendezvous()
    for _ in range(2):
        shared.nodes[0].send_signal(signal.SIGUSR1)
        notice = shared.wait_for(wire.NodeEnding)
        assert (notice.words, notice.seconds) == ("got SIGUSR1", 120)
    shared.send_to_ranks(cell("rank"))
    assert shared.values() == [0, 1]


def test_a_second_signal_ends_it_at_once(notebook):
    node = notebook.admit()
    notebook.open()
    notebook.complete_rendezvous()
    processes = family(node.pid)
    node.terminate()
    notebook.wait_for(wire.NodeEnding)
    node.send_signal(signal.SIGINT)
    assert ended(node)[0] == 1
    assert [each for each in processes if each.is_running()] == []


@contextlib.contextmanager
def pieces_to(notebook: Notebook, address: str, sizes: tuple[int, ...], whole: bytes) -> Iterator[Any]:
    """Yield what sends the next part of a payload to the node's socket for data."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as data:
        encrypted(data, notebook.key.encode(), "sender")
        data.connect(address)
        sent = 0

        def send(count: int) -> Payload:
            nonlocal sent
            piece = wire.Piece(group="g", number=7, offset=sent, total=len(whole))
            data.send_multipart([wire.encode(piece), whole[sent : sent + count]])
            sent += count
            taken = wire.decode_from_node(data.recv_multipart()[0])
            assert taken == wire.PieceTaken(group="g", number=7, offset=piece.offset)
            return Payload(sizes=sizes, path="parcel:7")

        yield send
        data.setsockopt(zmq.LINGER, 0)


def packed(**captured: object) -> tuple[tuple[int, ...], bytes]:
    with shared_memory.put(pickling.dumps(captured), Path) as sent:
        return sent.payload.sizes, bytes(shared_memory.joined(sent.payload, private=True))


def test_a_job_waits_for_its_payload_and_what_follows_waits_behind_it(shared):
    shared.open()
    shared.complete_rendezvous()
    big = torch.arange(100_000)
    sizes, whole = packed(big=big)
    with pieces_to(shared, shared.data, sizes, whole) as send:
        ticket = send(500_000)
        shared.send_to_ranks(msgspec.structs.replace(cell("int(big.sum())"), payload=ticket))
        shared.send_to_ranks(ReportWhere())
        for _ in range(2):
            shared.wait_for(Where)  # overtakes
        assert not [each for each, _ in shared.said if isinstance(each, Started)]
        send(len(whole) - 500_000)
    assert shared.values() == [int(big.sum())] * 2
    shared.send_to_ranks(cell("rank"))
    assert shared.values() == [0, 1]


def test_an_interrupt_ends_a_job_whose_payload_is_on_its_way(shared):
    shared.open()
    shared.complete_rendezvous()
    sizes, whole = packed(big=torch.arange(100_000))
    with pieces_to(shared, shared.data, sizes, whole) as send:
        ticket = send(500_000)
        shared.send_to_ranks(msgspec.structs.replace(cell("int(big.sum())"), payload=ticket))
        began = time.monotonic()
        shared.send_to_ranks(Interrupt(number=3))
        for rank in (0, 1):
            assert shared.wait_for(InterruptSeen, rank=rank).number == 3
            failure = shared.wait_for(Raised, rank=rank).failure
            assert isinstance(pickling.loads(memoryview(failure.exception)), KeyboardInterrupt)
        assert time.monotonic() - began < 0.2
        send(len(whole) - 500_000)  # nobody wants it any more
        shared.send_to_ranks(cell("rank"))
        assert shared.values() == [0, 1]


def test_ranks_are_measured_while_that_is_wanted(shared):
    shared.open()
    shared.complete_rendezvous()
    shared.send(wire.MeasureRanks(group="g", wanted=True))
    usages = shared.wait_for(wire.RanksMeasured, group="g", attempt=0).usages
    assert sorted(usages) == [0, 1]
    assert all(each.memory > 0 for each in usages.values())


def test_it_ends_with_its_connection(notebook):
    node = notebook.admit()
    notebook.open()
    notebook.complete_rendezvous()
    notebook.send_to_ranks(cell("import time; time.sleep(1000)"))
    notebook.wait_for(Started)
    processes = family(node.pid)
    notebook.close()
    status, said = ended(node)
    assert (status, "the notebook is gone" in said) == (1, True)
    assert [each for each in processes if each.is_running()] == []
