"""However a session over nodes ends, nothing of it is left: here, on any host, and at the engine.

The program of the session is one of its own, which may be killed. What is left on this machine, and on hosts
that share its temporary directory, is found by the check after each test.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cluster
import psutil
import pytest
from hosts import NAMESPACES, hosts
from lanes import slow
from patience import eventually
from strangers import open_ports

pytestmark = [pytest.mark.timeout(200)]

PROGRAM = """
import json, os, sys, time
import torch
import nblaunch

options, directory, end = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]

def work(big, directory, end):
    import os, subprocess, sys, time
    from pathlib import Path
    # Files of its own, and a process that would outlive it.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    Path(directory, f"begun-{os.environ['RANK']}").touch()
    if end == "failure" and os.environ["RANK"] == "1":
        raise LookupError("nothing there")
    if end != "success":
        time.sleep(1000)
    return float(big.sum())

try:
    with nblaunch.Session(**options) as session:
        session.push({"pushed": torch.ones(1_000_000)})
        print(session.run(work, (torch.ones(1_000_000), directory, end)).values, flush=True)
except KeyboardInterrupt:
    print("interrupted")
except nblaunch.RunFailedError as error:
    print(str(error).splitlines()[0])
"""


@dataclass
class Engine:
    """Where nodes are: the options of a session, and what there is of it at the engine and on hosts."""

    options: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)
    left: Callable[[], list[str]] = list
    """What is left that the check after each test does not see."""


@contextlib.contextmanager
def on_process(_: Path) -> Iterator[Engine]:
    yield Engine({"on": "process"})


@contextlib.contextmanager
def on_slurm(directory: Path) -> Iterator[Engine]:
    with cluster.slurm(directory / "slurm") as made:
        yield Engine({"on": "slurm"}, made.environ, made.jobs)


@contextlib.contextmanager
def on_ssh(directory: Path) -> Iterator[Engine]:
    """Hosts with networks and temporary directories of their own."""
    with hosts(2) as made, contextlib.ExitStack() as ending:
        there = [
            cluster.Host(each.name, each.address, ("nsenter", f"--net={NAMESPACES / each.namespace}"))
            for each in made
        ]
        private = {each.name: directory / each.name for each in there}
        for each in private.values():
            each.mkdir(mode=0o700)
        ssh = ending.enter_context(cluster.sshd(directory / "ssh", there, private))

        def left() -> list[str]:
            daemons = {pid for each in made for pid in made.processes(each.name) if _is_sshd(pid)}
            return [
                *(f"{each.name}: {pid}" for each in made for pid in set(made.processes(each.name)) - daemons),
                *(str(path) for each in private.values() for path in each.iterdir()),
            ]

        yield Engine({"on": f"ssh={','.join(ssh_host.name for ssh_host in there)}"}, ssh.environ, left)


def _is_sshd(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return " -D " in " ".join(psutil.Process(pid).cmdline())
    return True


ENGINES = {"process": on_process, "ssh": on_ssh, "slurm": on_slurm}


@pytest.fixture(name="engine", scope="module")
def engine_fixture(request, tmp_path_factory) -> Iterator[Engine]:
    with ENGINES[request.param](tmp_path_factory.mktemp("engine")) as made:
        yield made


def node_programs(pid: int) -> list[psutil.Process]:
    """Return the node programs that have joined a session of this process, or of one below it."""
    below = (each.pid for each in psutil.Process(pid).children(recursive=True))
    endpoints = set(map(str, open_ports(below)))
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = each.cmdline()
            if line[1:4] == ["-m", "nblaunch", "join"] and line[4] in endpoints:
                found.append(each)
    return found


SAID = {
    "success": "[1000000.0, 1000000.0]",
    "failure": "failed: LookupError: nothing there",
    "interrupt": "interrupted",
    "kernel killed": "",
    "node lost": "was lost",
}


# How nodes end is the same code for all engines. CI has the ends elsewhere, and here what is an engine's own.
IN_CI = {("ssh", "kernel killed"), ("slurm", "kernel killed")}
CASES = [each if each in IN_CI else slow(each) for each in itertools.product(ENGINES, SAID)]


@pytest.mark.parametrize(("engine", "end"), CASES, indirect=["engine"])
def test_nothing_is_left_on_any_host(engine, end, tmp_path):
    options = {"nproc": 1, "nnodes": 2, "grace": 1, "timeout": 100, **engine.options}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(options), str(tmp_path), end],
        env={**os.environ, **engine.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        try:
            eventually(
                lambda: len(list(tmp_path.glob("begun-*"))) == 2 or program.poll() is not None,
                "the ranks are at work",
                60,
            )
            assert end == "success" or bool(engine.left()) is (engine.left is not list)
            match end:
                case "interrupt":
                    program.send_signal(signal.SIGINT)
                case "kernel killed":
                    program.kill()
                case "node lost":
                    node_programs(program.pid)[-1].kill()
            said, _ = program.communicate(timeout=60)
        finally:
            program.kill()
    assert SAID[end] in said
    assert (program.returncode, "Traceback" in said) == (-9 if end == "kernel killed" else 0, False)
    eventually(lambda: engine.left() == [], "nothing is left")
