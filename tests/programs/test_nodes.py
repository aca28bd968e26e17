"""Several nodes: others join the run from processes of their own, as they would from other hosts."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

import nblaunch
from nblaunch import LaunchError, OptionError, RunFailedError
from nblaunch._keeper import RUNTIME_LOG
from nblaunch.client.local import local
from nblaunch.host import link
from nblaunch.host import wire as _node_protocol
from nblaunch.options.command_line import parse_line
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import ProtocolError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 60
"""What a run of two nodes may take: each imports torch first, on a machine that is busy."""


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@dataclass
class RendezvousConfig:
    """A place for nodes to meet, and a key; `join` starts a node, `options` are the notebook's."""

    directory: Path
    port: int = field(default_factory=free_port)
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    nodes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "nproc": 2,
            "nnodes": 2,
            "rdzv_endpoint": self.endpoint,
            "rdzv_id": self.name,
            "timeout": SECONDS,
        }

    def join(self, *more: str, endpoint: bool = True, **environment: str) -> subprocess.Popen[str]:
        where = ["--rdzv-endpoint", self.endpoint] if endpoint else []
        path = os.pathsep.join([str(ROOT), str(HERE)])
        node = subprocess.Popen(
            [sys.executable, "-m", "nblaunch", "join", *where, "--rdzv-id", self.name, "-n", "2", *more],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.nodes.append(node)
        return node


@pytest.fixture
def meeting(tmp_path, monkeypatch):
    """Give a place to meet; nodes that are there at the end are ended."""
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    monkeypatch.setenv("NBLAUNCH_JOIN_KEY_FILE", str(key))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made = RendezvousConfig(tmp_path)
    yield made
    for node in made.nodes:
        if node.poll() is None:
            node.kill()
        node.communicate()


def ended(node: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status of a node that ends by itself, and what it said."""
    said, _ = node.communicate(timeout=30)
    return node.returncode, said


def who_am_i(big):
    import os
    import sys

    import torch
    from torch import distributed

    total = torch.ones(1)
    distributed.all_reduce(total)
    print(f"out of {distributed.get_rank()}")
    print(f"err of {distributed.get_rank()}", file=sys.stderr)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    return (
        [int(os.environ[name]) for name in names],
        int(total),
        float(big.sum()),
        big * distributed.get_rank(),
    )


def test_two_nodes_are_one_run_whose_values_and_output_come_in_rank_order(meeting, tmp_path):
    node = meeting.join()
    big = torch.ones(5_000_000)  # several pieces on the wire, each way
    result = nblaunch.run(who_am_i, args=(big,), log_dir=str(tmp_path / "logs"), **meeting.options)
    assert [value[0] for value in result.values] == [
        [rank, rank % 2, rank // 2, 4, 2, 2] for rank in range(4)
    ]
    assert [value[1:3] for value in result.values] == [(4, 5_000_000.0)] * 4
    for rank, value in enumerate(result.values):
        assert torch.equal(value[3], big * rank)
    assert [each.stdout for each in result.ranks] == [f"out of {rank}\n" for rank in range(4)]
    assert [each.stderr for each in result.ranks] == [f"err of {rank}\n" for rank in range(4)]
    assert result.world_size == 4
    written = sorted(path.read_text() for path in result.log_dir.rglob("stdout.log"))
    assert written == [f"out of {rank}\n" for rank in range(4)]
    assert ended(node)[0] == 0


@pytest.mark.slow
def test_a_node_that_cannot_open_its_group_ends_with_the_reason_which_the_notebook_has_too(meeting):
    """Another node can take its place."""
    cannot = meeting.join("--log-dir", "/proc/logs")
    with once(lambda: cannot.poll() is not None, meeting.join):
        result = nblaunch.run(os.getpid, **meeting.options)
    (told,) = [each for each in result.warnings if "cannot take part" in each]
    assert "No such file or directory: '/proc/logs'" in told
    status, said = ended(cannot)
    assert (status, "No such file or directory: '/proc/logs'" in said) == (1, True), said


def waits_for_ever(directory):
    import os
    import time
    from pathlib import Path

    from torch import distributed

    Path(directory, f"at-work-{distributed.get_rank()}").write_text(str(os.getpid()))
    if distributed.get_rank() == 1:
        time.sleep(1000)
    distributed.barrier()


@contextlib.contextmanager
def once(condition, action):
    """Do something on another thread, once a condition is true."""

    def watch():
        deadline = time.monotonic() + SECONDS
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


def press_stop():
    os.kill(os.getpid(), signal.SIGINT)


def at_work(directory, *ranks):
    return lambda: all((directory / f"at-work-{rank}").exists() for rank in ranks)


def test_an_interrupt_reaches_every_rank_of_nodes_that_listen_and_show_their_key_nowhere(meeting, tmp_path):
    node = meeting.join()
    addresses: set[str] = set()
    lines: list[str] = []

    def look():
        here = psutil.Process()
        lines.extend(" ".join(each.cmdline()) for each in [here, *here.children(recursive=True)])
        addresses.update(listening_below(os.getpid()) | listening_below(node.pid))
        press_stop()

    with once(at_work(tmp_path, 0, 1, 2, 3), look), pytest.raises(KeyboardInterrupt) as interrupted:
        nblaunch.run(waits_for_ever, args=(str(tmp_path),), grace=10.0, **meeting.options)
    # In one place, or one of them a line further on its way into it.
    where = str(interrupted.value)
    stuck = set(re.findall(r"\d", " ".join(re.findall(r"\[ranks? ([\d,-]+)\] in barrier", where))))
    assert {"0", "3"} <= stuck
    assert "1" not in stuck
    assert {"127.0.0.1"} <= addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    key = Path(os.environ["NBLAUNCH_JOIN_KEY_FILE"]).read_text()
    assert any("nblaunch join" in line for line in lines)
    assert not any(key in line for line in lines)
    assert ended(node)[0] == 1


def test_an_interrupt_ends_a_run_that_waits_for_a_node(meeting):
    with once(opened(meeting), press_stop), pytest.raises(KeyboardInterrupt):
        nblaunch.run(who_am_i, args=(torch.ones(1),), **meeting.options)


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


@pytest.mark.slow
def test_ranks_of_a_node_that_is_killed_die_with_it_and_are_reported_as_lost(meeting, tmp_path, eventually):
    node = meeting.join()
    below: list[psutil.Process] = []

    def kill():
        below.extend(psutil.Process(node.pid).children(recursive=True))
        node.kill()

    with once(at_work(tmp_path, 0, 1, 2, 3), kill), pytest.raises(RunFailedError) as failed:
        nblaunch.run(waits_for_ever, args=(str(tmp_path),), **meeting.options)
    lost = [each.rank for each in failed.value.result.failures if "lost with its node" in each.message]
    # torch orders nodes of one machine by their process ids: which of them comes first is not said.
    pids = {rank: int((tmp_path / f"at-work-{rank}").read_text()) for rank in range(4)}
    assert lost == [rank for rank, pid in pids.items() if pid in {each.pid for each in below}]
    assert len(lost) == 2
    assert len(below) >= 4
    eventually(lambda: not [each for each in below if each.is_running()], "the ranks of the node are gone")


NOTEBOOK = """
import sys, time
from pathlib import Path
import nblaunch

def work(directory):
    import time
    from torch import distributed
    Path(directory, f"at-work-{distributed.get_rank()}").touch()
    time.sleep(1000)

nblaunch.run(work, args=(sys.argv[1],), nproc=2, nnodes=2, rdzv_endpoint=sys.argv[2], rdzv_id=sys.argv[3])
"""


def test_a_node_ends_with_the_notebook_that_is_killed(meeting, tmp_path, eventually):
    node = meeting.join()
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    words = [str(tmp_path / "notebook.py"), str(tmp_path), meeting.endpoint, meeting.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    notebook = subprocess.Popen([sys.executable, *words], env=environment)
    try:
        eventually(at_work(tmp_path, 0, 1, 2, 3), "all ranks are at work", SECONDS)
    finally:
        notebook.kill()
        notebook.wait()
    status, said = ended(node)
    assert status == 1
    assert "the notebook is gone" in said


def fails_once(directory):
    from pathlib import Path

    from torch import distributed

    mark = Path(directory, "failed")
    if distributed.get_rank() == 2 and not mark.exists():
        mark.touch()
        message = "the first time"
        raise RuntimeError(message)
    distributed.barrier()
    return distributed.get_world_size()


@pytest.mark.slow
def test_all_nodes_start_again_when_a_rank_of_one_fails(meeting, tmp_path):
    node = meeting.join()
    result = nblaunch.run(fails_once, args=(str(tmp_path),), max_restarts=1, **meeting.options)
    assert result.values == [4] * 4
    assert [(each.world_size, each.reason) for each in result.attempts] == [(4, "started"), (4, "failure")]
    assert [each.rank for each in result.attempts[0].failures if each.consequence_of is None] == [2]
    assert ended(node)[0] == 0


@pytest.mark.slow
def test_nodes_of_a_static_rendezvous_start_again_too(meeting, tmp_path):
    place = ("--master-addr", "127.0.0.1", "--master-port", str(meeting.port))
    node = meeting.join("--rdzv-backend", "static", *place, "--node-rank", "1", endpoint=False)
    options = {**meeting.options, "rdzv_backend": "static", "max_restarts": 1}
    result = nblaunch.run(fails_once, args=(str(tmp_path),), **options)
    assert result.values == [4] * 4
    assert [each.reason for each in result.attempts] == ["started", "failure"]
    assert ended(node)[0] == 0


def until_told(directory, most):
    import os
    import time
    from pathlib import Path

    from torch import distributed

    world, rank = distributed.get_world_size(), distributed.get_rank()
    Path(directory, f"world-{world}-{rank}").touch()
    while not Path(directory, "enough").exists():
        time.sleep(0.02)
    distributed.barrier()
    return world, int(os.environ["GROUP_WORLD_SIZE"]), most


def test_a_late_joiner_and_a_leaver_change_the_world_and_are_no_failures(meeting, tmp_path, eventually):
    options = {**meeting.options, "nnodes": "1:2", "rdzv_conf": "last_call_timeout=1", "timeout": 100}
    seen: list[subprocess.Popen[str]] = []

    def world(size):
        return lambda: all((tmp_path / f"world-{size}-{rank}").exists() for rank in range(size))

    def come_and_go():
        seen.append(meeting.join())
        eventually(world(4), "four ranks are at work", SECONDS)
        for mark in tmp_path.glob("world-*"):
            mark.unlink()
        seen[0].terminate()
        eventually(world(2), "two ranks are at work again", SECONDS)
        (tmp_path / "enough").touch()

    with once(world(2), come_and_go):
        result = nblaunch.run(until_told, args=(str(tmp_path), 2), **options)
    assert result.values == [(2, 1, 2)] * 2
    attempts = [(each.world_size, each.reason) for each in result.attempts]
    assert attempts == [(2, "started"), (4, "membership"), (2, "membership")]
    assert [each.failures for each in result.attempts] == [()] * 3
    status, said = ended(seen[0])
    assert status == 1
    assert "left after SIGTERM" in said


@pytest.mark.slow
def test_an_elastic_run_goes_on_without_a_node_that_is_killed(meeting, tmp_path, eventually):
    conf = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=2"
    options = {**meeting.options, "nnodes": "1:2", "rdzv_conf": conf, "timeout": 100}
    node = meeting.join()

    def kill():
        node.kill()
        eventually((tmp_path / "world-2-0").exists, "two ranks are at work", SECONDS)
        (tmp_path / "enough").touch()

    with once((tmp_path / "world-4-3").exists, kill):
        result = nblaunch.run(until_told, args=(str(tmp_path), 2), **options)
    assert result.values == [(2, 1, 2)] * 2
    assert [(each.world_size, each.reason) for each in result.attempts] == [(4, "started"), (2, "membership")]


def ranks_and_environment():
    import os

    return [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")], list(os.environ.values())


def test_a_static_rendezvous_has_two_nodes_too_and_the_key_does_not_reach_the_ranks(meeting, monkeypatch):
    key = Path(os.environ["NBLAUNCH_JOIN_KEY_FILE"]).read_text()
    monkeypatch.delenv("NBLAUNCH_JOIN_KEY_FILE")
    monkeypatch.setenv("NBLAUNCH_JOIN_KEY", key)
    node = meeting.join(
        *("--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(meeting.port)),
        *("--node-rank", "1"),
        endpoint=False,
    )
    result = nblaunch.run(
        ranks_and_environment,
        nproc=2,
        nnodes=2,
        rdzv_backend="static",
        master_addr="127.0.0.1",
        master_port=meeting.port,
        rdzv_id=meeting.name,
        timeout=SECONDS,
    )
    assert [places for places, _ in result.values] == [[rank, rank % 2, rank // 2] for rank in range(4)]
    assert not any(key in value for _, values in result.values for value in values)
    assert ended(node)[0] == 0


def test_one_node_can_host_a_rendezvous_at_an_endpoint(meeting):
    result = nblaunch.run(
        lambda: 7, nproc=2, rdzv_endpoint=meeting.endpoint, rdzv_id=meeting.name, timeout=SECONDS
    )
    assert result.values == [7, 7]


def opened(meeting):
    return lambda: is_open(meeting.port)


# --- strangers -------------------------------------------------------------------------------------


def listener_address(meeting):
    """Return the address of the listener, as a node finds it."""
    from nblaunch.host import rendezvous

    where = rendezvous.config_of(LaunchOptions(rdzv_endpoint=meeting.endpoint), joining=True)
    assert where is not None
    return rendezvous.read_listener(where, meeting.name, threading.Event())


def knock(address, **keys):
    """Send a hello that is none to the listener; return whether anybody answered."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    for name, value in keys.items():
        setattr(peer, name, value)
    peer.connect(address)
    peer.send_multipart([b"\x80\x04cos\nsystem\n.", b"x"])
    answered = peer.poll(500) != 0
    context.destroy(linger=0)
    return answered


def test_strangers_and_a_node_with_a_wrong_key_are_refused_and_the_run_is_unharmed(meeting, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    wrong.chmod(0o600)
    answered, addresses, told = [], [], []

    def disturb():
        address = listener_address(meeting)
        addresses.append(address)
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        for data in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096)):
            for door in (int(port), meeting.port):
                with socket.create_connection((host, door), timeout=5) as raw, contextlib.suppress(OSError):
                    raw.sendall(data)
                    raw.settimeout(0.3)
                    raw.recv(1000)
        answered.append(knock(address))  # without CURVE
        public, secret = zmq.curve_keypair()
        answered.append(
            knock(
                address,
                curve_publickey=public,
                curve_secretkey=secret,
                curve_serverkey=zmq.curve_keypair()[0],
            )
        )
        key = Path(os.environ["NBLAUNCH_JOIN_KEY_FILE"]).read_text().encode()
        with zmq.Context() as context, context.socket(zmq.DEALER) as unused:
            server = link.encrypted(unused, key, "node")
        # Knows the notebook's public key, and has a secret key of its own.
        answered.append(
            knock(address, curve_publickey=public, curve_secretkey=secret, curve_serverkey=server)
        )
        told.append(ended(meeting.join(NBLAUNCH_JOIN_KEY_FILE=str(wrong))))
        meeting.join()

    with once(opened(meeting), disturb):
        result = nblaunch.run(who_am_i, args=(torch.ones(1),), **meeting.options)
    assert len(result.values) == 4
    assert answered == [False, False, False]
    assert told[0][0] == 1
    assert "its key is wrong" in told[0][1]
    log = (local().directory.root() / RUNTIME_LOG).read_text()
    # An earlier test of this process may have had strangers, too.
    refusals = [line for line in log.splitlines() if "refused" in line and addresses[0] in line]
    assert len(refusals) == 1
    assert "join key" in refusals[0]


@pytest.mark.quick
def test_a_state_of_the_rendezvous_without_the_key_is_not_unpickled(tmp_path):
    import pickle

    from nblaunch.host import rendezvous

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    store = torch.distributed.HashStore()
    plain = C10dRendezvousBackend(store, "x")
    ours = rendezvous._SignedState(plain, b"k" * 32, threading.Event())
    assert ours.get_state() is None
    plain.set_state(b"\0" * 32 + pickle.dumps(Trap()))
    with pytest.raises(RendezvousStateError, match="refused"):
        ours.get_state()
    assert not (tmp_path / "sprung").exists()


@pytest.mark.quick
@given(st.binary())
def test_bytes_that_are_no_message_of_a_node_are_refused_by_name(data):
    for decode in (_node_protocol.decode_from_node, _node_protocol.decode_to_node):
        with contextlib.suppress(ProtocolError):
            assert decode(data) is not None


def test_a_key_file_is_found_from_the_callers_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBLAUNCH_JOIN_KEY_FILE", "made-here")
    assert nblaunch.run(lambda: 1, nproc=1, rdzv_endpoint="127.0.0.1:0").values == [1]
    assert (tmp_path / "made-here").stat().st_mode & 0o777 == 0o600
    (tmp_path / "made-here").write_text("too short")
    with pytest.raises(nblaunch.OptionError, match=f"{tmp_path}/made-here holds a key of 9 characters"):
        nblaunch.run(lambda: 1, nproc=1, rdzv_endpoint="127.0.0.1:0")


def listening_below(pid: int) -> set[str]:
    """Return the addresses at which a process and all below it listen."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    found.add(each.laddr.ip)
    return found


# --- in the notebook -------------------------------------------------------------------------------


def test_a_cell_runs_on_two_nodes_and_the_notebook_says_how_to_join(start_kernel, meeting, eventually):
    os.environ.pop("NBLAUNCH_JOIN_KEY_FILE")
    kernel = start_kernel()
    kernel.ok("import torch\nweights = torch.arange(1_000_000)")

    def keys() -> set[Path]:
        return set(Path(os.environ["TMPDIR"]).glob("nblaunch-*/join-key"))

    others = keys()  # of this process, where another test has opened a rendezvous
    cell = kernel.submit(
        f"""
        %%distributed --nnodes 2 --rdzv-endpoint {meeting.endpoint} --rdzv-id {meeting.name} -n 2 --out result
        print("rank", rank, "of", world_size)
        int(weights.sum()) + rank
        """
    )
    eventually(lambda: keys() - others, "the key is there", SECONDS)
    (key,) = keys() - others
    assert key.stat().st_mode & 0o777 == 0o600
    node = meeting.join(NBLAUNCH_JOIN_KEY_FILE=str(key))
    ran = cell.finish(SECONDS)
    assert ran.error is None, str(ran)
    assert f"NBLAUNCH_JOIN_KEY_FILE={key} python -m nblaunch join --rdzv-endpoint" in ran.stdout
    assert kernel.value("[v - result.values[0] for v in result.values]") == [0, 1, 2, 3]
    assert kernel.value("[each.stdout for each in result.ranks]") == [
        f"rank {rank} of 4\n" for rank in range(4)
    ]
    assert ended(node)[0] == 0


# --- options ---------------------------------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"nnodes": 2}, "no place to meet"),
    ({"node_rank": 1}, "numbers the nodes by itself"),
    ({"master_addr": "127.0.0.1"}, "finds the master by itself"),
    ({"rdzv_backend": "zookeeper"}, "zookeeper"),
    ({"rdzv_backend": "etcd-v2"}, "was given without the address of the etcd server"),
    (
        {"rdzv_backend": "static", "nnodes": "1:2", "rdzv_endpoint": "127.0.0.1:1"},
        "fixed number",
    ),
    (
        {"rdzv_backend": "static", "node_rank": 1, "rdzv_endpoint": "127.0.0.1:1"},
        "the notebook is node 0",
    ),
    (
        {"rdzv_backend": "static", "rdzv_endpoint": "127.0.0.1:1", "master_port": 2},
        "the same place",
    ),
    ({"nnodes": 2, "rdzv_endpoint": "127.0.0.1:0"}, "cannot know a port"),
    (
        {"rdzv_endpoint": "127.0.0.1", "rdzv_conf": "join_timeout=soon"},
        "join_timeout='soon'",
    ),
    ({"rdzv_endpoint": "127.0.0.1", "rdzv_conf": "colour=red"}, "'colour'"),
    ({"nnodes": 2, "rdzv_endpoint": "198.51.100.1:29400"}, "cannot listen there"),
]


@pytest.mark.quick
def test_what_contradicts_itself_is_refused_before_a_process_starts():
    for options, reason in CONTRADICTIONS:
        with pytest.raises(OptionError, match=reason):
            nblaunch.run(print, nproc=2, **options)


@pytest.mark.quick
def test_standalone_with_an_endpoint_is_refused():
    with pytest.raises(OptionError, match="keeps the rendezvous private"):
        parse_line("--standalone --rdzv-endpoint 127.0.0.1:29400")
    with pytest.raises(OptionError, match="keeps the rendezvous private"):
        nblaunch.run(print, standalone=True, rdzv_endpoint="127.0.0.1:29400")


def test_a_port_that_is_taken_is_refused(meeting):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", meeting.port))
        taken.listen()
        with pytest.raises(OptionError, match="Address already in use"):
            nblaunch.run(print, **meeting.options)


@pytest.mark.quick
def test_a_session_of_several_nodes_is_refused(meeting):
    with pytest.raises(OptionError, match="without an engine a session has one node"):
        nblaunch.Session(nproc=2, nnodes=2, rdzv_endpoint=meeting.endpoint)


def test_nodes_that_do_not_come_in_time_are_a_launch_error_that_says_what_to_do(meeting):
    with pytest.raises(LaunchError, match="python -m nblaunch join") as failed:
        nblaunch.run(print, rdzv_conf="join_timeout=1", **meeting.options)
    assert failed.value.phase == "rendezvous"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "No --rdzv-id"),
        pytest.param(["--rdzv-id", "x"], "Give the notebook's --rdzv-endpoint", marks=pytest.mark.full),
        (
            ["--rdzv-id", "x", "--rdzv-endpoint", "127.0.0.1:1", "--max-restarts", "3"],
            "for the notebook to say",
        ),
        pytest.param(
            ["--rdzv-id", "x", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-conf", "join_timeout=1"],
            "nobody answers",
            marks=pytest.mark.full,
        ),
        (["--no-such-option"], "--no-such-option"),
    ],
    ids=["no id", "no endpoint", "not a node's", "nobody there", "unknown"],
)
def test_a_node_says_why_it_does_not_join(words, reason, meeting, capfd):
    from nblaunch.__main__ import main

    assert meeting.name
    assert main(["join", *words]) != 0
    assert reason in capfd.readouterr().err


@pytest.mark.quick
def test_a_key_that_others_can_read_is_refused(meeting, capsys):
    from nblaunch.__main__ import main

    key = Path(os.environ["NBLAUNCH_JOIN_KEY_FILE"])
    key.chmod(0o644)
    assert main(["join", "--rdzv-id", "x", "--rdzv-endpoint", meeting.endpoint]) == 2
    assert "chmod 600" in capsys.readouterr().err


def says_how_it_was_started(directory):
    import os
    import sys
    from pathlib import Path

    import psutil

    Path(directory, f"{os.environ['RANK']}-was-here").touch()
    print("a step of", os.environ["RANK"])
    print("on stderr", file=sys.stderr)
    return os.environ["LOCAL_RANK"], "nblaunch.rank.main" in " ".join(psutil.Process().cmdline())


@pytest.mark.slow
def test_a_node_starts_its_processes_as_its_own_line_says(meeting, tmp_path):
    logs = tmp_path / "theirs"
    node = meeting.join(
        "--virtual-local-rank", "--start-method", "spawn", "--event-log-handler", "console",
        "--duplicate-stdout-filters", "step", "--log-dir", str(logs),
    )  # fmt: skip
    result = nblaunch.run(says_how_it_was_started, (str(tmp_path),), **meeting.options)
    here, there = [("0", False), ("1", False)], [("0", True), ("0", True)]
    assert result.values in (here + there, there + here)  # which comes first is torch's to say
    first = 2 if result.values[:2] == here else 0
    assert [each.local_rank for each in result.ranks] == [0, 1, 0, 1]
    status, said = ended(node)
    assert status == 0
    assert said.count('"torchelastic.worker.status.SUCCEEDED", "source": "WORKER"') == 2
    filtered = [sorted(path.read_text().splitlines()) for path in logs.rglob("filtered_stdout.log")]
    assert filtered == [[f"[rank{local_rank}]:a step of {first + local_rank}" for local_rank in (0, 1)]]


def test_a_node_with_an_option_that_cannot_be_says_so(meeting):
    status, said = ended(meeting.join("--start-method", "fork"))
    assert status == 2
    assert "start_method='fork' was asked for" in said
