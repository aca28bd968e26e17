"""Runs and sessions on hosts with networks of their own: payloads over slow links, hosts that cannot talk."""

from __future__ import annotations

import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from hosts import Hosts, hosts, need_hosts
from patience import eventually

import nblaunch
from nblaunch import LaunchError, RunFailedError

pytestmark = pytest.mark.timeout(300)

MB = 1 << 20
ONE, TWO = (f"{platform.node()}-{number}" for number in (1, 2))
"""What the engine calls hA and hB: for it they are processes of this machine."""


def on(made: Hosts, count: int = 0, **options: Any) -> dict[str, Any]:
    """Return the options of a run on the first of these hosts, a rank on each."""
    return {
        "nproc": 1,
        "nnodes": count or len(list(made)),
        "on": "process",
        "node_python": str(made.python()),
        "local_addr": made.address,
        "grace": 1,
        "timeout": 100,
        **options,
    }


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(name="two")
def two_fixture() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def sent_bytes(link: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def reporter() -> Callable[[torch.Tensor], tuple[str, int, float]]:
    """Return a function that travels by value: its module is not on these hosts."""

    def where(big):
        import platform

        import torch
        from torch import distributed

        total = torch.ones(1)
        distributed.all_reduce(total)
        return platform.node(), int(total), float(big.sum())

    return where


where = reporter()


def test_a_host_without_the_users_home_and_directory_runs_where_temporary_files_are(tmp_path, monkeypatch):
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    home.mkdir()
    (project / "mine.py").write_text("import os\ndef where(): return os.getcwd()\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    with hosts(1) as made:
        made.private("hA", tmp_path)
        with nblaunch.Session(**on(made)) as session:
            result = session.cell("import mine; mine.where()", namespace={})
    assert list(result.values) == [tempfile.gettempdir()]


def test_an_interrupt_overtakes_a_payload_and_the_next_cell_does_not_wait_for_it(two):
    two.shape("500mbit")
    with nblaunch.Session(**on(two)) as session:
        before = sent_bytes(two.bridge)
        big = torch.rand(64 * MB)  # 256 MB: 4 s
        handle = session.submit(where, (big,))
        eventually(lambda: sent_bytes(two.bridge) - before > 30 * MB, "the payload is on its way", 60)
        began = time.monotonic()
        session.interrupt()
        with pytest.raises(KeyboardInterrupt):
            handle.result(20)
        interrupted = time.monotonic() - began
        there = session.run(where, (torch.ones(MB),))
        assert list(there.values) == [("hA", 2, MB), ("hB", 2, MB)]
        assert [each.node for each in there.ranks] == [ONE, TWO]
        after = time.monotonic() - began
        sent = sent_bytes(two.bridge) - before
    print(f"interrupted after {interrupted:.3f} s, the next job's values after {after:.2f} s")
    assert sent < 200 * MB
    assert interrupted < 1


def waits_for_the_other():
    import time

    import torch
    from torch import distributed

    if distributed.get_rank() == 1:
        time.sleep(100)
    distributed.all_reduce(torch.ones(1))


def stuck() -> Callable[[], None]:
    """Return a function that travels by value."""
    return FunctionType(waits_for_the_other.__code__, {"__name__": "__main__"}, "waits_for_the_other")


def test_a_host_behind_a_link_that_goes_down_is_lost_and_the_others_keep_their_variables(two):
    with nblaunch.Session(**on(two, nnodes="1:2", node_timeout=2)) as session:
        (pid, _) = session.cell("import os\nmine = os.getpid()\nmine", namespace={}).values
        handle = session.submit(stuck())
        eventually(lambda: "all_reduce" in str(session.stacks()), "a rank waits for the other")
        began = time.monotonic()
        subprocess.run(["ip", "link", "set", two["hB"].outside, "down"], check=True)
        # To the rank that waits, nothing says that its peer is gone.
        with pytest.raises(RunFailedError, match=f"was lost with its node: {TWO}") as caught:
            handle.result(60)
        named = time.monotonic() - began
        assert caught.value.result is not None
        assert [each.state for each in caught.value.result.ranks] == ["STOPPED", "FAILED"]
        after = session.cell("mine", namespace={})
        print(f"link down -> the job ended {named:.2f} s, next values {time.monotonic() - began:.2f} s")
        assert list(after.values) == [pid]
        assert any("the group has 1 rank now" in each for each in after.warnings)
        assert list(session.run(where, (torch.ones(1),)).values) == [("hA", 1, 1.0)]
    assert named < 2 + 5


def test_hosts_that_cannot_talk_are_named_before_torch_waits_for_them(two):
    need_hosts("iptables")
    a, b = two["hA"].address, two["hB"].address
    two.run("hB", ["iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-s", a, "-j", "DROP"])
    with pytest.raises(LaunchError) as raised:
        nblaunch.run(where, args=(torch.ones(1),), **on(two))
    text = str(raised.value)
    assert f"{ONE} does not reach {TWO} at {b}, ports " in text
    assert f"{TWO} does reach {ONE}, so a firewall of {TWO} drops it" in text
    report = nblaunch.doctor(**on(two))
    assert [f"{ONE} does not reach {TWO} at {b}" in each.summary for each in report.problems] == [True]


@pytest.mark.slow
def test_the_doctor_looks_at_hosts_and_gives_them_back(two):
    report = nblaunch.doctor(**on(two))
    assert report.ok
    assert [each.name for each in report.findings] == [ONE, TWO, "group"]
    assert "2 ranks on 2 nodes over gloo" in report.findings[-1].summary


@pytest.mark.slow
def test_a_payload_that_cannot_go_on_ends_the_session_by_name(two):
    """The nodes are there, and reach the notebook: only what is between them has broken."""
    need_hosts("iptables")
    two.shape("500mbit")
    with nblaunch.Session(**on(two)) as session:
        before = sent_bytes(two["hB"].outside)
        handle = session.submit(where, (torch.rand(64 * MB),))
        eventually(lambda: sent_bytes(two["hB"].outside) - before > 20 * MB, "the payload goes on to hB", 60)
        rule = ["OUTPUT", "-p", "tcp", "-d", two["hB"].address, "-j", "REJECT", "--reject-with", "tcp-reset"]
        two.run("hA", ["iptables", "-I", *rule])
        began = time.monotonic()
        with pytest.raises(RunFailedError, match=f"a data connection from {ONE} ended"):
            handle.result(20)
        assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_push_to_four_hosts_takes_hardly_longer_than_to_one():
    with hosts(4, rate="1gbit") as made:
        seconds = {}
        for count in (1, 4):
            with nblaunch.Session(**on(made, count)) as session:
                big = torch.rand(64 * MB)
                times = []
                for _ in range(3):
                    began = time.monotonic()
                    session.push({"big": big})
                    times.append(time.monotonic() - began)
                    session.cell("del big", namespace={})
                seconds[count] = min(times)
    print(f"256 MB pushed to one host in {seconds[1]:.2f} s, to four in {seconds[4]:.2f} s")
    assert seconds[4] <= 1.4 * seconds[1]
