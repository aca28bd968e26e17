"""What every engine does: one program on each host, its key on its standard input, and nothing is left.

The nodes are programs that join nothing (`tests/fake_node.py`); sshd, Slurm and Ray are real ones of this
machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cluster
import psutil
import pytest
from wheels import add_wheel

from nblaunch.nodes.asking import Asking
from nblaunch.nodes.engine import ENGINES, NodeProgram, NodeRequest, engine_of
from nblaunch.nodes.sync_env import made_before, name_of
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import NodeEnvironment
from nblaunch.protocol.messages import EngineState, EngineStatus
from nblaunch.protocol.reports import awaited_nodes

FAKE = str(Path(__file__).parents[1] / "fake_node.py")
KEY = "a-key-that-is-nowhere-but-where-it-belongs-" + os.urandom(4).hex()
GONE_SECONDS = 5.0


@dataclass
class Place:
    """An engine, and what it is told of its hosts."""

    name: str
    argument: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    slurm: cluster.SlurmCluster | None = None
    ray: cluster.RayCluster | None = None

    @property
    def patience(self) -> float:
        """Seconds until nodes are there: Ray starts a Python with all of itself for each step."""
        return 15 if self.ray is None else 40

    @property
    def engine(self):
        return engine_of(LaunchOptions(on="=".join(filter(None, (self.name, self.argument)))))

    def request(self, least: int = 2, most: int = 2, **more) -> NodeRequest:
        environ = {**os.environ, **self.environ}
        name = f"nblaunch-{os.urandom(4).hex()}"
        request = {"nproc": 1, "name": name, "argument": self.argument, "cwd": "/", "python": sys.executable}
        return NodeRequest(**{**request, "least": least, "most": most, "environ": environ, **more})


@pytest.fixture(scope="module")
def ssh_hosts(tmp_path_factory):
    with cluster.sshd(tmp_path_factory.mktemp("cluster") / "ssh") as hosts:
        yield hosts


@pytest.fixture(scope="module")
def slurm_hosts(tmp_path_factory):
    with cluster.slurm(tmp_path_factory.mktemp("cluster") / "slurm") as hosts:
        yield hosts


@pytest.fixture(scope="module")
def ray_hosts():
    with cluster.ray() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def kind(request) -> tuple[str, Any]:
    """Give the kind of the case's engine, and its hosts if it needs any."""
    hosts = request.param.partition("-")[0]
    return request.param, request.getfixturevalue(f"{hosts}_hosts") if hosts in (
        "ssh",
        "slurm",
        "ray",
    ) else None


@pytest.fixture
def place(kind) -> Iterator[Place]:
    """Give the engine of the case."""
    kind, hosts = kind
    if kind == "ssh":
        yield Place("ssh", ",".join(each.name for each in hosts.hosts), hosts.environ)
    elif kind.startswith("slurm"):
        cluster.eventually(hosts.all_idle, "the jobs of other tests are gone")
        inside = {}
        if kind == "slurm-inside":
            inside = {"SLURM_JOB_ID": hosts.hold("-N2", "--exclusive"), "SLURM_JOB_NUM_NODES": "2"}
            inside |= {"SLURM_NTASKS": "7", "SLURM_MEM_PER_NODE": "999999", "SLURM_CPU_BIND": "junk"}
        yield Place("slurm", environ={**hosts.environ, **inside}, slurm=hosts)
        if inside:
            assert len(hosts.jobs()) <= 1, "an allocation is its owner's"
            hosts.run("scancel", inside["SLURM_JOB_ID"])
    elif kind.startswith("ray"):
        yield Place("ray", hosts.client if kind == "ray-client" else "", hosts.environ, ray=hosts)
        hosts.forget_drivers()
    else:
        yield Place(kind)


def of_each(*, but: tuple[str, ...] = (), slow: tuple[str, ...] = ("ray", "ray-client")):
    """Parametrise a test over the engines, some of which are left to the slow lane."""
    every = ("process", "join", "ssh", "slurm", "slurm-inside", "ray", "ray-client")
    kinds = [
        pytest.param(each, marks=pytest.mark.slow) if each in slow else each
        for each in every
        if each not in but
    ]
    return pytest.mark.parametrize("kind", kinds, indirect=True)


class Notebook:
    """The notebook's end: where node programs report, and what `Asking` says."""

    def __init__(self, place: Place, request: NodeRequest) -> None:
        self.place, self.request = place, request
        self.listening = socket.create_server((place.engine.address(request), 0))
        self.nodes: list[dict[str, Any]] = []
        self.said: list[tuple[float, EngineStatus]] = []
        self.ended: list[str] = []
        self.notices: list[str] = []
        self.words: tuple[str, ...] = ()
        self.environment: NodeEnvironment | None = None
        self.typed: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._answering = threading.Thread(target=self._answer, daemon=True)
        self._answering.start()
        self.began = time.monotonic()
        self.asking = Asking(
            place.engine, request, self.program, self.tell, self.ended.append, notify=self.notices.append
        )

    def program(self) -> NodeProgram:
        host, port = self.listening.getsockname()[:2]
        program = NodeProgram((FAKE, f"{host}:{port}", *self.words, "--key-stdin"), f"{KEY}\n".encode())
        return program if self.environment is None else made_before(program, self.environment)

    def tell(self, said: EngineStatus) -> None:
        self.said.append((time.monotonic() - self.began, said))

    def start(self, *words: str) -> Notebook:
        """Ask; people type what they are to."""
        self.words = words
        self.began = time.monotonic()
        self.asking.start()
        if self.place.name == "join":
            cluster.eventually(lambda: self.notices, "it is said what to type")
            line = self.notices[0].splitlines()[-1]
            environ = {**self.request.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            self.typed = [subprocess.Popen(["sh", "-c", f"exec env {line}"], env=environ) for _ in range(2)]
        return self

    def here(self, count: int = 2) -> list[dict[str, Any]]:
        """Wait until so many nodes have reported."""
        cluster.eventually(
            lambda: len(self.nodes) >= count or self.ended, "the nodes report", self.place.patience
        )
        assert not self.ended, self.ended
        return self.nodes

    def admit(self) -> None:
        for each in self.here():
            self.asking.joined(each["place"])
        self.await_state(EngineState.RUNNING)

    def await_state(self, state: EngineState, seconds: float = 10) -> EngineStatus:
        cluster.eventually(
            lambda: state in [said.state for _, said in self.said], f"{state}: {self.said}", seconds
        )
        return next(said for _, said in self.said if said.state is state)

    def await_end(self, seconds: float = 0) -> str:
        seconds = seconds or self.place.patience
        cluster.eventually(lambda: self.ended, f"it is said why; said was {self.said}", seconds)
        (why,) = self.ended
        return why

    def hang_up(self) -> None:
        """End all connections, as a runtime's end does."""
        with contextlib.suppress(OSError):  # it has been
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self._answering.join()
        for each in self._connections:
            each.close()
        for typed in self.typed:
            typed.wait(10)

    def close(self) -> None:
        """Give all back; nothing is left."""
        self.asking.stop()
        self.hang_up()
        for node in self.nodes:
            gone(node["pid"])

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                node, _ = self.listening.accept()
                self._connections.append(node)
                with node.makefile() as lines:
                    self.nodes.append(json.loads(lines.readline()))


@pytest.fixture
def notebook(place) -> Iterator[Callable[..., Notebook]]:
    """Give `notebook(least, most, ...)`; nothing of it is left."""
    made: list[Notebook] = []

    def make(**request) -> Notebook:
        made.append(Notebook(place, place.request(**request)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def gone(pid: int) -> None:
    cluster.eventually(lambda: not psutil.pid_exists(pid), f"process {pid} has ended", GONE_SECONDS)


def seconds_of(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def everywhere() -> Iterator[bytes]:
    """Yield the command line and the environment of every process."""
    for pid in psutil.pids():
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                yield Path(f"/proc/{pid}/{name}").read_bytes()


@of_each()
def test_a_program_runs_on_each_host_and_has_its_key_and_its_place(notebook, place):
    meeting = notebook().start()
    nodes = meeting.here()
    assert [each["key"] for each in nodes] == [f"{KEY}\n"] * 2
    places = [-1, -1] if place.name == "join" else [0, 1]
    assert sorted(each["place"] for each in nodes) == places
    assert not any(KEY.encode() in each for each in everywhere())
    if place.name in ("ssh", "slurm", "ray"):
        by_place = sorted((each["place"], each["host"]) for each in nodes)
        assert by_place == [(0, "alpha"), (1, "beta")], "the order in which they were given"


@pytest.mark.slow_at("ssh")
@of_each()
def test_what_is_said_before_while_and_after(notebook, place):
    meeting = notebook().start()
    meeting.here()
    waiting = EngineState.WAITING if place.name == "join" else EngineState.STARTING
    said = meeting.await_state(waiting)
    assert (said.engine, said.joined, said.wanted) == (place.name, 0, 2)
    assert len(said.hosts) == (0 if place.name == "join" else 2)
    meeting.asking.joined(meeting.nodes[0]["place"])
    meeting.asking.joined(meeting.nodes[1]["place"])
    assert meeting.await_state(EngineState.RUNNING).joined == 2
    assert seconds_of(meeting.asking.stop) < 1
    states = [said.state for _, said in meeting.said]
    assert (states[0], states[-1]) == (EngineState.ASKED, EngineState.ENDED)
    assert meeting.ended == [], "who has given them back knows"


@pytest.mark.slow_at("slurm-inside")
@of_each(but=("join",))
def test_a_program_that_fails_is_named_with_its_host_and_its_words(notebook):
    meeting = notebook().start("--fails-at", "1")
    why = meeting.await_end()
    host = meeting.said[-1][1].hosts[1]
    assert why == f"the node on {host} ended before it joined, with exit code 1:\nno luck at 1"


@pytest.mark.slow_at("slurm", "slurm-inside")
@of_each(but=("join", "process"))
def test_a_python_that_a_host_has_not_is_named(notebook):
    why = notebook(python="/nowhere/python", python_named=True).start().await_end()
    assert "/nowhere/python" in why
    assert re.match("the node on (alpha|beta) ended before it joined, with exit code ", why)


def test_what_is_advised_where_ssh_refuses_a_host_makes_it_work(ssh_hosts, tmp_path):
    ask = f"-o UserKnownHostsFile={tmp_path}/known -o StrictHostKeyChecking=ask"
    place = Place("ssh", "alpha", {"NBLAUNCH_SSH": f"{ssh_hosts.command} {ask}"})
    refused = Notebook(place, place.request(least=1, most=1))
    try:
        why = refused.start().await_end()
    finally:
        refused.close()
    assert "Host key verification failed" in why
    advice = why.rpartition("until it succeeds without asking anything: ")[2]
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal, os.fdopen(theirs, "wb") as end:
        # A session of its own takes it as its terminal, of which ssh asks.
        command = ["setsid", "--ctty", "--wait", "sh", "-c", advice]
        asking = subprocess.Popen(command, stdin=end, stdout=end, stderr=end)
        said = b""
        while b"yes/no" not in said:
            said += terminal.read(1024)
        terminal.write(b"yes\n")
        assert asking.wait(10) == 0, said
    accepted = Notebook(place, place.request(least=1, most=1))
    try:
        assert accepted.start().here(1)
    finally:
        accepted.close()


@pytest.mark.slow_at("ssh", "slurm", "slurm-inside")
@of_each(but=("join",))
def test_a_program_that_dies_before_it_has_joined_is_named(notebook, place):
    meeting = notebook().start()
    first, second = sorted(meeting.here(), key=lambda each: each["place"])
    meeting.asking.joined(first["place"])
    os.kill(second["pid"], signal.SIGKILL)
    why = meeting.await_end(2)
    assert f"the node on {meeting.said[-1][1].hosts[1]} ended before it joined" in why
    assert "killed there" in why if place.name == "ssh" else "SIGKILL" in why


@pytest.mark.slow_at("ssh", "slurm-inside")
@of_each(but=("join",))
def test_a_node_that_has_joined_may_end_and_another_one_takes_its_place(notebook):
    meeting = notebook().start()
    meeting.admit()
    (lost,) = [each for each in meeting.nodes if each["place"] == 1]
    os.kill(lost["pid"], signal.SIGKILL)
    gone(lost["pid"])
    meeting.asking.again(1)
    new = meeting.here(3)[2]
    assert (new["place"], new["host"], meeting.ended) == (1, lost["host"], [])


@pytest.mark.slow_at("ssh", "slurm", "slurm-inside")
@of_each(but=("join",))
def test_enough_hosts_are_enough(notebook):
    """One host of a range may fail: it is the reason for a wait, and no end."""
    meeting = notebook(least=1).start("--fails-at", "1")
    meeting.here(1)
    cluster.eventually(lambda: "ended before it joined" in meeting.said[-1][1].reason, "the reason is said")
    meeting.asking.joined(0)
    assert meeting.await_state(EngineState.RUNNING).joined == 1
    assert meeting.ended == []


@pytest.mark.slow_at("ssh", "slurm-inside")
@of_each()
def test_a_request_is_withdrawn_at_any_time_and_twice_is_once(place):
    for pause in (0.0, 0.1, 0.4):
        request = place.request()
        allocation = place.engine.ask(request)
        time.sleep(pause)
        allocation.status()
        assert seconds_of(allocation.cancel) <= 0.6
        assert seconds_of(allocation.cancel) <= 0.1
        assert allocation.status().state is EngineState.ENDED
        cluster.eventually(partial(is_withdrawn, place, request), "it is withdrawn", 3)


def is_withdrawn(place: Place, request: NodeRequest) -> bool:
    """Whether the cluster has nothing of what was asked for."""
    if place.ray is not None:
        return request.name not in place.ray.groups and place.ray.actors == 0
    return place.slurm is None or request.name not in place.slurm.run("squeue", "-h", "-o", "%j")


@pytest.mark.slow_at("join", "slurm-inside")
@of_each()
def test_nothing_is_left_of_nodes_that_are_given_back_while_they_run(notebook, place):
    meeting = notebook().start()
    meeting.admit()
    assert seconds_of(meeting.asking.stop) < 1
    meeting.hang_up()
    for each in meeting.nodes:
        gone(each["pid"])
    cluster.eventually(partial(is_withdrawn, place, meeting.request), "no job is left", 3)
    assert not list(Path(os.environ["TMPDIR"]).glob("nblaunch-????????/join-key"))


# --- with the notebook's environment -----------------------------------------------------------------

OF_THEIR_OWN = ("join", "ray-client")
"""Nodes that have an environment, and those of an engine that another case has."""
INSTALLED_ALIKE = ("ssh", "slurm", "slurm-inside", "ray", "ray-client")
"""What makes an environment is the same program for all engines: CI has each case of it with processes."""
PYTHON_OF_A_HOST = """#!/bin/sh
test -e {directory}/shared || own=${{NBLAUNCH_NODE_PLACE:-$SLURM_NODEID}}
export XDG_CACHE_HOME={directory}/cache-$own PATH={directory}:/usr/bin:/bin
exec {python} "$@"
"""
UV = """#!/bin/sh
test -e {directory}/slow && case " $* " in *" pip "*) sleep 60 & wait;; esac
exec {uv} "$@"
"""


class Environments:
    """Hosts with a cache each, and a uv that may be slow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.uv = cluster.own_uv()
        self.python = str(directory / "python3")
        for path, text in ((self.python, PYTHON_OF_A_HOST), (directory / "uv", UV)):
            Path(path).write_text(text.format(directory=directory, uv=self.uv, python=sys.executable))
            Path(path).chmod(0o755)
        add_wheel(directory / "wheels", "tiny", "1.0")

    def wanted(self, *requirements: str) -> NodeEnvironment:
        return NodeEnvironment(
            python=platform.python_version(),
            platform=f"{sys.platform}-{platform.machine()}",
            requirements=requirements or ("tiny==1.0",),
            sources=("--no-index", f"--find-links {self.directory / 'wheels'}"),
            uv=os.fsencode(self.uv),
        )

    def without_uv(self) -> None:
        """Have hosts without uv, whose own Python may be another one."""
        (self.directory / "uv").unlink()
        text = PYTHON_OF_A_HOST.format(directory=self.directory, python=cluster.plain_python())
        Path(self.python).write_text(text)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (self.directory / version).symlink_to(os.path.realpath(sys.executable))

    def made(self) -> list[str]:
        """Return the names of the environments that are there, or are being made."""
        return [each.name for each in self.directory.glob("cache-*/nblaunch/env/*") if each.suffix != ".lock"]

    def processes(self) -> list[str]:
        """Return the command lines of what runs with these caches."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if f"XDG_CACHE_HOME={self.directory}/".encode() in environ:
                    found.append(Path(f"/proc/{pid}/cmdline").read_text())
        return found


@pytest.fixture
def environments(tmp_path) -> Environments:
    return Environments(tmp_path)


@of_each(but=OF_THEIR_OWN, slow=("ssh", "slurm-inside", "ray", "ray-client"))
def test_a_program_runs_in_an_environment_that_is_made_on_its_host(notebook, environments):
    meeting = notebook(python=environments.python, python_named=True)
    meeting.environment = environments.wanted()
    nodes = meeting.start().here()
    assert [each["key"] for each in nodes] == [f"{KEY}\n"] * 2
    assert sorted(each["place"] for each in nodes) == [0, 1]
    assert environments.made() == [name_of(meeting.environment)] * 2
    running = [Path(f"/proc/{each['pid']}/cmdline").read_text() for each in nodes]
    assert all(name_of(meeting.environment) in each for each in running)


@pytest.mark.parametrize("homes", [1, pytest.param(2, marks=pytest.mark.slow)])
@of_each(but=OF_THEIR_OWN, slow=INSTALLED_ALIKE)
def test_hosts_without_uv_get_that_of_the_notebook(notebook, environments, homes):
    environments.without_uv()
    if homes == 1:  # all have the home directory, as on most clusters
        (environments.directory / "shared").touch()
    meeting = notebook(python=environments.python, python_named=True)
    meeting.environment = environments.wanted()
    assert [each["key"] for each in meeting.start().here()] == [f"{KEY}\n"] * 2
    kept = list(environments.directory.glob("cache-*/nblaunch/env/uv-*"))
    assert [each.stat().st_size for each in kept] == [Path(environments.uv).stat().st_size] * homes


@of_each(but=OF_THEIR_OWN, slow=INSTALLED_ALIKE)
def test_what_is_installed_is_said_and_withdrawn_with_the_request(notebook, environments):
    (environments.directory / "slow").touch()
    meeting = notebook(python=environments.python, python_named=True)
    meeting.environment = environments.wanted()
    meeting.start()
    hosts = "alpha, beta" if meeting.place.name != "process" else f"{platform.node()}-1, {platform.node()}-2"
    doing = f"installing 1 packages on {hosts}"
    cluster.eventually(lambda: any(doing in awaited_nodes(said) for _, said in meeting.said), doing)
    assert seconds_of(meeting.asking.stop) < 1
    cluster.eventually(lambda: not environments.processes(), "no process is left")
    assert not any(each == name_of(meeting.environment) for each in environments.made())
    assert meeting.ended == []


@of_each(but=OF_THEIR_OWN, slow=INSTALLED_ALIKE)
def test_a_package_that_no_index_has_is_named_with_the_host(notebook, environments):
    meeting = notebook(python=environments.python, python_named=True)
    meeting.environment = environments.wanted("tiny==1.0", "absent==2.0+cpu")
    why = meeting.start().await_end(15)
    assert re.match(r"the node on \S+ ended before it joined, with exit code 4", why)
    assert "No index has absent" in why


HOLD = """
import os, sys
from nblaunch.nodes.engine import NodeProgram, NodeRequest, engine_of
from nblaunch.options.launch import LaunchOptions
engine, request = engine_of(LaunchOptions(on={on!r})), NodeRequest(**{request!r})
if engine.at_end(request):
    local.server.at_end(engine.at_end(request))
allocation = engine.ask(request)
"""


@pytest.mark.slow_at("slurm-inside")
@of_each()
def test_a_runtime_that_is_killed_leaves_nothing(place, poke):
    """The keeper gives back what no process of ours holds."""
    notebook = Notebook(place, request := place.request())
    fields = {name: getattr(request, name) for name in request.__dataclass_fields__}
    poke(HOLD.format(on="=".join(filter(None, (place.name, place.argument))), request=fields))
    states = EngineState.GRANTED.value, EngineState.ENDED.value
    cluster.eventually(
        lambda: poke("allocation.status().state.value") in states, "they are granted", place.patience
    )
    assert poke("allocation.status().state.value") == "GRANTED", poke("allocation.status().words")
    program = notebook.program()
    poke(f"allocation.start(NodeProgram({program.arguments!r}, {program.stdin!r}))")
    if place.name == "join":
        assert list(Path(os.environ["TMPDIR"]).glob(f"{request.name}/join-key"))
    else:
        notebook.here()
    with contextlib.suppress(json.JSONDecodeError, OSError):
        poke("os.kill(os.getpid(), 9)")
    # A cluster that is reached by ray:// waits for a driver that is cut off.
    seconds = 8 if place.ray is not None and place.argument else 3
    cluster.eventually(partial(is_withdrawn, place, request), "no job is left", seconds)
    cluster.eventually(lambda: not Path(os.environ["TMPDIR"], request.name).exists(), "no key is left")
    notebook.close()


def test_each_engine_passes():
    """One that nobody has put into this suite is new."""
    assert set(ENGINES) == {"process", "join", "ssh", "slurm", "ray"}
