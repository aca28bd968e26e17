"""Nodes of a real Ray cluster: what is said while it has no room, what ends them, and sessions."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster
import psutil
import pytest

import nblaunch
from nblaunch.nodes.asking import Asking
from nblaunch.nodes.engine import NodeProgram, NodeRequest
from nblaunch.nodes.ray import RayEngine
from nblaunch.protocol.messages import EngineState, EngineStatus
from nblaunch.protocol.reports import awaited_nodes

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SOON, NAMED, WITHDRAWN = 2.0, 5.0, 0.5
"""Seconds: until the reason for the wait is known, until an end is, and until a request is withdrawn."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[cluster.RayCluster]:
    with cluster.ray() as made:
        yield made


class Request:
    """A request for nodes that run `sleep`."""

    def __init__(self, environ: dict[str, str], **given) -> None:
        fields = {"least": 2, "most": 2, "nproc": 1, "name": f"nblaunch-{os.urandom(4).hex()}", "cwd": "/"}
        environ = {**os.environ, **environ}
        self.request = NodeRequest(**{**fields, "environ": environ, "python": sys.executable, **given})
        RayEngine.check(self.request)
        self.said: list[EngineStatus] = []
        self.ended: list[str] = []
        sleep = NodeProgram(("-c", "import time; time.sleep(1000)"), b"key\n")
        self.began = time.monotonic()
        self.asking = Asking(RayEngine, self.request, lambda: sleep, self.said.append, self.ended.append)
        self.asking.start()

    def until(self, condition: Callable[[EngineStatus], object], what: str, seconds: float) -> float:
        """Wait for a word of Ray's; return the seconds since the request."""
        cluster.eventually(
            lambda: any(condition(said) for said in self.said), f"{what}: {self.said} {self.ended}", seconds
        )
        return time.monotonic() - self.began

    def run(self) -> None:
        self.until(lambda said: said.state is EngineState.STARTING, "the nodes are granted", 20)
        for place in range(2):
            self.asking.joined(place)
        self.until(lambda said: said.state is EngineState.RUNNING, "the nodes run", 10)

    def await_end(self, seconds: float) -> str:
        cluster.eventually(lambda: self.ended, f"it is said why; said was {self.said}", seconds)
        return self.ended[0]


@pytest.fixture
def request_nodes(hosts) -> Iterator[Callable[..., Request]]:
    """Give `request_nodes(...)`, withdrawn at the end; Ray has nothing of it any more."""
    made: list[Request] = []

    def make(environ: dict[str, str] | None = None, **given) -> Request:
        made.append(Request(hosts.environ if environ is None else environ, **given))
        return made[-1]

    yield make
    for each in made:
        each.asking.stop()
    ours = {each.request.name for each in made}
    cluster.eventually(lambda: not (ours & {*hosts.groups} or hosts.actors), "nothing is left")
    hosts.forget_drivers()


@pytest.fixture
def full_cluster(hosts) -> Iterator[None]:
    """Have somebody else's placement group on all CPUs but one of each node."""
    hosts.other("hold", 1)
    yield
    hosts.other("remove", "others")
    cluster.eventually(lambda: not hosts.groups, "the others are gone")


@pytest.mark.usefixtures("full_cluster")
@pytest.mark.parametrize("client", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_reason_for_the_wait_is_known_soon_and_a_request_is_withdrawn_at_once(
    hosts, request_nodes, client
):
    waiting = request_nodes(nproc=2, argument=hosts.client if client else "")
    seconds = waiting.until(lambda said: "free" in said.reason, "the reason", 10)
    said = waiting.said[-1]
    assert said.reason == "waits for 2 x {CPU: 2}; free: alpha {CPU: 1}, beta {CPU: 1}"
    assert awaited_nodes(said).startswith(f"waiting for ray: job {said.id} PENDING (waits for 2 x {{CPU: 2}}")
    print(f"the reason was known after {seconds:.2f} s")
    assert client or seconds <= SOON
    began = time.monotonic()
    waiting.asking.stop()
    assert time.monotonic() - began <= WITHDRAWN
    cluster.eventually(lambda: hosts.groups == ["others"], "it is withdrawn", 1)
    assert waiting.ended == []


@pytest.mark.slow
def test_what_no_node_can_give_is_said(request_nodes):
    waiting = request_nodes(nproc=64)
    waiting.until(lambda said: "which only 0 of 2 nodes can give" in said.reason, "the reason", 10)


@pytest.mark.slow
def test_a_range_takes_what_is_free(request_nodes):
    held = request_nodes(least=1, most=5)
    held.until(lambda said: said.state is EngineState.STARTING, "the nodes are granted", 20)
    assert held.said[-1].hosts == ("alpha", "beta")


@pytest.mark.slow
def test_a_group_that_is_removed_from_outside_is_named(hosts, request_nodes):
    held = request_nodes()
    held.run()
    number = held.said[-1].id
    hosts.other("remove", held.request.name)
    why = held.await_end(NAMED)
    assert why == f"ray job {number} has ended: its placement group is REMOVED"


@pytest.mark.slow
def test_a_driver_that_is_killed_is_named_and_leaves_nothing(hosts, request_nodes):
    held = request_nodes()
    held.run()
    (driver,) = [each for each in psutil.Process().children() if "raydriver.py" in " ".join(each.cmdline())]
    os.kill(driver.pid, signal.SIGKILL)
    assert "its driver has ended" in held.await_end(NAMED)
    cluster.eventually(lambda: not (hosts.groups or hosts.actors), "nothing is left", 3)


@pytest.mark.slow
def test_where_there_is_no_cluster_it_is_said_how_to_have_one(request_nodes, tmp_path):
    nobody = {"RAY_ADDRESS": f"127.0.0.2:{cluster.free_ports(1)[0]}", "RAY_TMPDIR": str(tmp_path)}
    why = request_nodes(nobody).await_end(20)
    assert why.startswith("ray gives no nodes: ")
    assert "ray start --head" in why


@pytest.mark.slow
def test_a_head_that_does_not_answer_is_named(request_nodes):
    (port,) = cluster.free_ports(1)
    address = f"ray://127.0.0.1:{port}"
    why = request_nodes(argument=address).await_end(NAMED)
    assert why == f"ray gives no nodes: nobody answers at {address}: Connection refused"


@pytest.mark.slow
def test_a_driver_that_ray_aborts_is_explained_by_rays_reason_without_frames(hosts, request_nodes):
    """As on a machine that is no part of the cluster: Ray finds no raylet's socket, and aborts in C++."""
    sockets = list(hosts.directory.rglob("sockets/raylet*"))
    for each in sockets:
        each.rename(each.with_name(f"away-{each.name}"))
    try:
        why = request_nodes().await_end(60)
    finally:
        for each in sockets:
            each.with_name(f"away-{each.name}").rename(each)
    assert "Failed to connect to socket at address" in why
    assert "ray start --head" in why
    assert not re.search(r"\+0x|StackTrace", why)


# A Python of the notebook's that is not the cluster's.
ANOTHER_PYTHON = """
import collections, sys
Version = collections.namedtuple("Version", "major minor micro releaselevel serial")
sys.version_info = Version(*sys.version_info[:2], 99, "final", 0)
"""


@pytest.mark.slow
def test_another_python_than_the_clusters_is_refused_in_rays_words(hosts, request_nodes, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_PYTHON)
    another = {**hosts.environ, "PYTHONPATH": str(tmp_path)}
    why = request_nodes(another).await_end(30)
    assert f"Python: {platform.python_version()}" in why
    assert f"Python: {sys.version_info.major}.{sys.version_info.minor}.99" in why


@pytest.mark.slow
def test_a_token_that_is_not_the_clusters_is_said_to_be_the_likely_cause(hosts, request_nodes, tmp_path):
    (tmp_path / "token").write_text(os.urandom(32).hex())
    another = {**hosts.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    assert "RAY_AUTH_MODE=token" in request_nodes(another).await_end(60)


@pytest.mark.slow
def test_a_cluster_that_asks_for_no_token_is_warned_of():
    with cluster.ray(cluster.RAY_HERE[:1], RAY_AUTH_MODE="disabled") as open_to_all:
        alone = {**open_to_all.environ, "RAY_AUTH_MODE": "disabled"}
        # A driver that is no node may have a token all the same.
        for environ, argument in ((alone, ""), (open_to_all.environ, open_to_all.client)):
            held = Request(environ, least=1, most=1, argument=argument)
            held.until(lambda said: said.warning, "it is warned of", 20)
            held.asking.stop()
            port = (argument or open_to_all.address).removeprefix("ray://")
            assert held.said[-1].warning.startswith(f"Ray asks for no token: anyone who reaches {port} can")


SUM = """
import os, platform, torch, torch.distributed as dist
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
platform.node(), int(total), os.getpid(), sorted(name for name in os.environ if name.startswith("RAY"))
"""


ON: dict[str, Any] = {"nnodes": 2, "on": "ray", "grace": 1, "timeout": 60}


@pytest.fixture
def ours(hosts, monkeypatch) -> Iterator[cluster.RayCluster]:
    """Give the cluster, which the environment names."""
    for name, value in {**hosts.environ, "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    yield hosts
    hosts.forget_drivers()


@pytest.mark.parametrize("client", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_session_is_on_the_nodes_of_a_cluster_and_leaves_nothing_there(ours, client):
    began = time.monotonic()
    on = f"ray={ours.client}" if client else "ray"
    with nblaunch.Session(2, **ON | {"on": on}) as session:
        started = time.monotonic()
        first = session.cell(SUM, namespace={})
        values = first.values
        assert not first.warnings, "the cluster has a token"
        print(f"started in {started - began:.2f} s, the first cell took {time.monotonic() - started:.2f} s")
        assert [value[:2] for value in values] == [("alpha", 10)] * 2 + [("beta", 10)] * 2
        assert [value[3] for value in values] == [[]] * 4
        session.push({"x": list(range(100_000))})
        assert list(session.cell("len(x)", namespace={}).values) == [100_000] * 4
        assert len(ours.groups) == 1
    for value in values:
        cluster.eventually(lambda pid=value[2]: not psutil.pid_exists(pid), "the ranks are gone", 5)
    cluster.eventually(lambda: not (ours.groups or ours.actors), "nothing is left", 3)


def prefix() -> Callable[[], str]:
    """Return a function that travels by value: its module is not on the nodes."""

    def where():
        import sys

        return sys.prefix

    return where


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_nodes_of_a_cluster_get_the_notebooks_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # Python looks for modules where it is started, and nblaunch's are here
    uv = os.environ.get("UV_CACHE_DIR", str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "uv")))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "UV_CACHE_DIR": os.path.expanduser(uv)}  # noqa: PTH111
    assert nblaunch.run(prefix(), nproc=1).values == [sys.prefix]  # its runtime outlives the cluster
    with cluster.ray(**cache, CUDA_VISIBLE_DEVICES="") as own:
        for name, value in own.environ.items():
            monkeypatch.setenv(name, value)
        result = nblaunch.run(prefix(), nproc=1, **ON, sync_env=True)
    (made,) = [each for each in (tmp_path / "cache/nblaunch/env").iterdir() if each.is_dir()]
    assert result.values == [str(made)] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("ours")
def test_the_doctor_looks_at_the_nodes_of_a_cluster():
    report = nblaunch.doctor(nproc=1, **ON)
    assert report.ok, report
    assert [each.name for each in report.findings] == ["alpha", "beta", "group"]


@pytest.mark.slow
def test_a_notebook_shows_nothing_of_rays_and_leaves_nothing_when_it_is_killed(ours, start_kernel):
    kernel = start_kernel(**ours.environ, CUDA_VISIBLE_DEVICES="")
    began = kernel.ok("%distributed start -n 1 --nnodes 2 --on ray")
    ran = kernel.ok("%%distributed\nimport os\nos.getpid()")
    shown = began.stdout + began.stderr + ran.stdout + ran.stderr
    print(shown)
    assert not re.search("INFO|WARNING|raylet|dashboard|session_", shown)
    kernel.kill()
    kernel.all_gone("the kernel was killed")
    cluster.eventually(lambda: not (ours.groups or ours.actors), "nothing is left", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("full_cluster")
def test_an_interrupt_withdraws_a_cell_that_waits(ours, start_kernel):
    kernel = start_kernel(**ours.environ, CUDA_VISIBLE_DEVICES="")
    pending = kernel.submit("%%distributed -n 2 --nnodes 2 --on ray\n1")
    cluster.eventually(lambda: len(ours.groups) > 1, "it waits", 20)
    began = time.monotonic()
    kernel.interrupt()
    cluster.eventually(lambda: ours.groups == ["others"], "it is withdrawn", 2)
    print(f"withdrawn {time.monotonic() - began:.2f} s after the interrupt")
    ran = pending.finish(10)
    assert ran.error.ename == "KeyboardInterrupt"
    assert "waiting for ray: " in ran.error.evalue


@pytest.mark.slow
def test_when_the_head_is_gone_it_is_named_and_no_program_is_left():
    """Ray's own processes give up after a while, and with them go programs that nobody asks for any more."""
    with cluster.ray(RAY_gcs_rpc_server_reconnect_timeout_s="4") as short:
        held = Request({**short.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "4"})
        try:
            held.run()
            cluster.eventually(lambda: len(sleeping()) == 2, "the programs run", 20)
            programs = sleeping()
            short.daemons.kill("ray-alpha")
            held.until(lambda said: "does not answer" in said.reason, "the head does not answer", NAMED)
            assert "ray job" in held.await_end(30)
            for each in programs:
                cluster.eventually(lambda gone=each: not gone.is_running(), "the programs are gone", 30)
        finally:
            held.asking.stop()


def sleeping() -> list[psutil.Process]:
    """Return the programs of requests."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if (each.info["cmdline"] or [""])[-1] == "import time; time.sleep(1000)"
    ]
