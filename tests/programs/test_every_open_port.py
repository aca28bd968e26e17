"""Strangers write to every port of a run over nodes: no pickle of theirs is loaded, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import store_stranger
import strangers
import torch
from hosts import Hosts, hosts
from patience import eventually
from strangers import Port, open_ports
from test_nodes import meeting, once  # noqa: F401 - a fixture

import nblaunch
from nblaunch import LaunchError

pytestmark = pytest.mark.timeout(300)

MB = 1 << 20


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@contextlib.contextmanager
def harassed(
    bomb: Path, ports: Iterable[Port], commands: Iterable[Callable[[list[str]], list[str]]]
) -> Iterator[None]:
    """Have a stranger in each of several networks write to ports, and hold connections to them.

    `commands` have a program run there.
    """
    places = sorted(map(str, ports))
    program = [sys.executable, strangers.__file__, str(bomb), *places]
    with contextlib.ExitStack() as ending:
        running = [
            ending.enter_context(
                subprocess.Popen(command(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for command in commands
        ]
        reached: set[str] = set()
        for each in running:
            assert each.stdout is not None
            reached |= set(json.loads(each.stdout.readline()))
        assert reached >= set(places)
        yield
        for each in running:
            each.communicate(timeout=20)
        assert [each.returncode for each in running] == [0] * len(running)


def reduces_until(begun: str, path: str) -> Callable[[], tuple[int, float]]:
    """Return a job that goes on until a file is there; it returns its world size, and what it summed up."""

    def job() -> tuple[int, float]:
        import os
        from pathlib import Path

        import torch
        from torch import distributed

        total, over = torch.zeros(1), torch.zeros(1)
        Path(f"{begun}{os.environ['RANK']}").touch()
        while not over.item():
            part = torch.ones(1)
            distributed.all_reduce(part)
            total += part
            over = torch.tensor([float(Path(path).exists())])
            distributed.all_reduce(over)
        return distributed.get_world_size(), float(total) % distributed.get_world_size()

    return job


# --- a session over hosts ----------------------------------------------------------------------------


@pytest.fixture(name="two")
def two_fixture() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def ours() -> set[int]:
    """Return this process, and all that it has started, on hosts too; a server of etcd is none of ours."""
    found = {os.getpid()}
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if each.name() != "etcd":
                found.add(each.pid)
    return found


def test_all_but_ranks_listen_on_the_ports_that_a_site_lets_through(two):
    """The listener and the store of the ranks here; on each node two, one of them for a moment."""
    options: dict[str, Any] = {"nproc": 1, "nnodes": 2, "on": "process", "grace": 1, "timeout": 100}
    options |= {"node_python": str(two.python()), "local_addr": two.address}
    with nblaunch.Session(**options, ports="30000-30001") as session:
        ranks = set(session.cell("import os; os.getpid()", namespace={}).values)
        found = open_ports(ours() - ranks)
        assert {each.number for each in found} <= {30000, 30001}
        addresses = {each.address for each in found}
        assert addresses == {two.address, *(each.address for each in two)}
        summed = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
        assert session.cell(summed, namespace={}).values == [2.0, 2.0]
        with pytest.raises(LaunchError, match=r"all ports from 30000 to 30001 are taken .*\(--ports\)"):
            nblaunch.Session(**options, ports="30000-30001")


@pytest.mark.slow
def test_strangers_at_every_port_of_a_session_over_hosts_change_nothing(two, tmp_path):
    bomb = tmp_path / "went-off"
    options: dict[str, Any] = {"nproc": 2, "nnodes": 2, "on": "process", "grace": 1, "timeout": 100}
    with nblaunch.Session(**options, node_python=str(two.python()), local_addr=two.address) as session:
        handle = session.submit(reduces_until(f"{tmp_path}/begun-", f"{tmp_path}/over"))
        eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 4, "the ranks are at work", 60)
        ports = open_ports(ours())
        assert [str(each) for each in ports if each.open_to_all] == []
        addresses = {two.address, *(each.address for each in two)}
        assert {each.address for each in ports} == addresses
        kept = [
            lambda program: program,
            *(lambda program, name=each.name: two.command(name, program) for each in two),
        ]
        with harassed(bomb, ports, kept):
            (tmp_path / "over").touch()
            assert list(handle.result(60).values) == [(4, 0.0)] * 4
            big = torch.arange(4 * MB)
            session.push({"big": big})
            assert session.cell("int(big[-1]) + rank", namespace={}).values == [
                4 * MB - 1 + rank for rank in range(4)
            ]
            assert torch.equal(session.pull("big")["big"][3], big)
            session.restart()
            summed = "import torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
            assert session.cell(f"import torch\n{summed}", namespace={}).values == [4.0] * 4
            assert [str(each) for each in open_ports(ours()) if each.open_to_all] == []
            # That its content is believed is the store's own nature; that it is loaded would be ours.
            place = "import os\n':'.join(map(os.environ.get, ['MASTER_ADDR', 'MASTER_PORT']))"
            (ranks_store,) = set(session.cell(place, namespace={}).values)
            overwritten = store_stranger.overwrite(
                bomb, [str(each) for each in open_ports(ours()) if each.address == two.address]
            )
            assert overwritten[ranks_store] > 0, overwritten
            assert session.cell(summed, namespace={}).values == [4.0] * 4
    assert not bomb.exists()


def test_who_writes_to_the_store_of_ranks_on_one_machine_has_nothing_unpickled_and_ends_no_group(tmp_path):
    """Another user of the machine can write there, as `.github/SECURITY.md` says: the store has no key."""
    bomb = tmp_path / "went-off"
    summed = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    place = "import os\n':'.join(map(os.environ.get, ['MASTER_ADDR', 'MASTER_PORT']))"
    with nblaunch.Session(nproc=2) as session:
        session.cell("kept = 7", namespace={})
        (ranks_store,) = set(session.cell(place, namespace={}).values)
        assert store_stranger.overwrite(bomb, [ranks_store])[ranks_store] > 0
        assert session.cell(summed, namespace={}).values == [2.0] * 2
        assert session.pull("kept") == {"kept": [7, 7]}
        # An attempt has a store of its own: what was written is not met again.
        session.restart()
        assert session.cell(summed, namespace={}).values == [2.0] * 2
    assert not bomb.exists()


# --- a run whose nodes meet at torch's own rendezvous --------------------------------------------------


@pytest.mark.slow
def test_strangers_at_every_port_of_a_joined_run_change_nothing(meeting, tmp_path):  # noqa: F811
    bomb = tmp_path / "went-off"

    def disturb() -> None:
        ports = open_ports(ours())
        wide.extend(str(each) for each in ports if each.open_to_all)
        with harassed(bomb, ports, [lambda program: program]):
            harassed_ports.extend(ports)
            (tmp_path / "over").touch()
            over.wait(60)

    wide: list[str] = []
    harassed_ports: list[Port] = []
    over = threading.Event()
    meeting.join()
    job = reduces_until(f"{tmp_path}/begun-", f"{tmp_path}/over")
    with once(lambda: len(list(tmp_path.glob("begun-*"))) == 4, disturb):
        try:
            result = nblaunch.run(job, **meeting.options)
        finally:
            over.set()
    assert list(result.values) == [(4, 0.0)] * 4
    # The ranks' store, the listener for nodes, and one of gloo's for each rank.
    assert len(harassed_ports) >= 2 + 4
    assert wide == []
    assert not bomb.exists()
