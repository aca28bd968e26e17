"""Sessions and runs in the notebook's environment, which nodes make whose own Python has nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster
import psutil
import pytest
import torch
from patience import eventually

import nblaunch
from nblaunch.client.packages import environment_of
from nblaunch.client.preparation import prepare_call
from nblaunch.client.run import SilentView, run_fresh
from nblaunch.host.join import PLACE
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.state import RunState

pytestmark = pytest.mark.timeout(600)

ON: dict[str, Any] = {"nproc": 1, "nnodes": 2, "on": "process", "sync_env": True, "grace": 1}


@pytest.fixture(scope="module")
def uv():
    return cluster.own_uv()


@pytest.fixture
def python():
    """Give a Python on which there is no torch."""
    return cluster.plain_python()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Give the nodes' cache, which is empty; what uv has fetched before is in its own."""
    config = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    monkeypatch.setenv("UV_CACHE_DIR", os.environ.get("UV_CACHE_DIR", str(Path(config, "uv"))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)  # Python looks for modules where it is started, and nblaunch's are here
    return tmp_path / "cache"


def reporter() -> Callable[[], tuple[str, str, str, str, int]]:
    """Return a function that travels by value: its module is not on the nodes."""

    def where():
        import platform
        import sys

        import torch
        from torch import distributed

        import nblaunch

        total = torch.ones(1)
        distributed.all_reduce(total)
        return sys.prefix, platform.python_version(), torch.__version__, nblaunch.__file__, int(total)

    return where


where = reporter()


@pytest.mark.slow
def test_a_session_has_the_notebooks_environment_on_nodes_that_have_nothing(cache, python, uv):
    assert uv, "it is on the PATH, or sent"
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        with nblaunch.Session(**ON, node_python=python, timeout=60) as session:
            seconds.append(time.monotonic() - began)
            values = list(session.run(where).values)
            again = nblaunch.run(where, **ON, node_python=python).values
        (made,) = [each for each in (cache / "nblaunch" / "env").iterdir() if each.is_dir()]
        versions = (platform.python_version(), torch.__version__)
        assert [each[:3] for each in values] == [(str(made), *versions)] * 2
        assert all(each[3].startswith(str(made)) and each[4] == 2 for each in values)
        assert list(again) == values
    print(f"a session begins in {seconds[0]:.1f} s, and in {seconds[1]:.1f} s once its environment is there")
    assert seconds[1] < 30


def remote_python(directory: Path, python: str, programs: Path) -> str:
    """Return a Python that has this test's cache on a host, and these programs."""
    made = directory / "python3"
    variables = {name: os.environ[name] for name in ("XDG_CACHE_HOME", "UV_CACHE_DIR")}
    words = " ".join(f"{name}={value}" for name, value in variables.items())
    made.write_text(f'#!/bin/sh\nexec env {words} PATH="{programs}:$PATH" {python} "$@"\n')
    made.chmod(0o755)
    return str(made)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_what_uv_says_on_a_host_is_said_with_its_name_and_nothing_is_left_here(python, tmp_path, monkeypatch):
    """The node of this machine is loading torch at this moment."""
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nsleep 1; echo 'error: the disk is full' >&2; exit 2\n")
    uv.chmod(0o755)
    remote = remote_python(tmp_path, python, tmp_path)
    said = r"the node on alpha ended before(.|\n)*the disk is full"
    with cluster.sshd(tmp_path / "ssh", cluster.HERE[:1]) as hosts:
        monkeypatch.setenv("NBLAUNCH_SSH", hosts.command)
        with pytest.raises(nblaunch.LaunchError, match=said):
            nblaunch.run(where, nproc=1, on="ssh=alpha", here=True, sync_env=True, node_python=remote)


@pytest.mark.slow
def test_a_host_that_ssh_reaches_makes_it_and_the_machine_of_the_notebook_has_it(
    cache, python, uv, tmp_path, monkeypatch
):
    remote = remote_python(tmp_path, python, Path(uv).parent)
    with cluster.sshd(tmp_path / "ssh", cluster.HERE[:1]) as hosts:
        monkeypatch.setenv("NBLAUNCH_SSH", hosts.command)
        result = nblaunch.run(
            where, nproc=1, on="ssh=alpha", here=True, sync_env=True, node_python=remote, grace=1
        )
    (made,) = [each for each in (cache / "nblaunch" / "env").iterdir() if each.is_dir()]
    assert [each[0] for each in result.values] == [sys.prefix, str(made)]
    assert [each[2] for each in result.values] == [torch.__version__] * 2
    assert [each[4] for each in result.values] == [2, 2]


SLOW = """#!/bin/sh
case " $* " in *" pip "*) : > {began}; sleep 60 & wait;; esac
exec {uv} "$@"
"""


@pytest.mark.slow
def test_the_hosts_of_slurm_make_it(cache, python, tmp_path, monkeypatch):
    with cluster.slurm(tmp_path / "slurm") as hosts:
        monkeypatch.setenv("SLURM_CONF", hosts.environ["SLURM_CONF"])
        with nblaunch.Session(**ON | {"on": "slurm"}, node_python=python, timeout=60) as session:
            values = list(session.run(where).values)
            hosts_of_ranks = [each.node for each in session.run(where).ranks]
    (made,) = [each for each in (cache / "nblaunch" / "env").iterdir() if each.is_dir()]
    assert [each[0] for each in values] == [str(made)] * 2
    assert hosts_of_ranks == ["alpha", "beta"]


class WhileInstalling(SilentView):
    """Interrupts the run once the user reads that packages are installed."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.seen, self.at = "", 0.0

    def draw(self, state: RunState) -> None:
        if "installing" in state.where and not self.at:
            self.seen, self.at = state.where, time.monotonic()
            self.cancelled.set()


@pytest.mark.slow
def test_an_interrupt_while_packages_are_installed_leaves_nothing(cache, python, uv, tmp_path, monkeypatch):
    slow, began = tmp_path / "bin" / "uv", tmp_path / "began"
    slow.parent.mkdir()
    slow.write_text(SLOW.format(began=began, uv=uv))
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    launch = prepare_call(where, (), None, LaunchOptions.from_keywords(**ON, node_python=python))
    view = WhileInstalling()
    outcome = run_fresh(launch, view, view.cancelled)
    seconds = time.monotonic() - view.at
    print(f"interrupted after {seconds:.2f} s")
    count = len(environment_of(sys.path, str(tmp_path), os.environ).requirements) + 1
    host = platform.node()
    assert re.fullmatch(rf"waiting for process: .*installing {count} packages on {host}-[12].*", view.seen)
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert seconds < 1
    eventually(lambda: not with_cache(cache), f"no process is left: {with_cache(cache)}")
    assert {each.suffix for each in (cache / "nblaunch" / "env").iterdir()} == {".lock"}


def with_cache(cache: Path) -> list[str]:
    """Return what nodes with this cache run."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = each.environ()
            if environ.get("XDG_CACHE_HOME") == str(cache) and PLACE in environ and each.status() != "zombie":
                found.append(" ".join(each.cmdline())[:200])
    return found


def test_what_was_installed_from_this_machine_is_refused_before_anything_starts(tmp_path):
    add = tmp_path / "site-packages" / "mine-1.0.dist-info"
    add.mkdir(parents=True)
    (add / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (add / "direct_url.json").write_text(f'{{"url": "{tmp_path.as_uri()}", "dir_info": {{}}}}')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(add.parent))
        with pytest.raises(nblaunch.OptionError, match=f"files of this machine: mine .{tmp_path}"):
            nblaunch.run(print, **ON)
