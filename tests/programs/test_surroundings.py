"""What is around a program: an old Python, a strange or missing directory, no home, a cleaned one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lanes import left_out

ROOT = Path(__file__).parents[2]

SETTING = """
import json, os, resource, shutil, signal, sys
import nblaunch

def show(**found):
    print(json.dumps(found), flush=True)

def outcome(call):
    try:
        return call()
    except nblaunch.NblaunchError as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.fixture
def found(script):
    """Give `found(source)`: what a program shows with the definitions above."""

    def run(source: str, **env: str):
        ended = script(SETTING + source, env=env)
        assert ended.returncode == 0, ended
        return json.loads(ended.stdout)

    return run


@pytest.fixture
def temporary(tmp_path):
    """Give a temporary directory of a program's own, which is empty at the end."""
    made = tmp_path / "t"
    made.mkdir()
    yield made
    assert list(made.iterdir()) == []


def test_without_pidfd_and_memfd_runs_work_and_a_killed_kernel_leaves_nothing(
    temporary, tmp_path, eventually
):
    """As in a Python that was built on old headers."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import os\nfor name in ('pidfd_open', 'memfd_create'):\n    vars(os).pop(name, None)\n"
    )
    program = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SETTING
            + """
from nblaunch.client.local import local
with nblaunch.Session(nproc=2) as session:
    big = session.run(lambda data: data * 2, args=(bytes(2_000_000),)).values
    missing = [hasattr(os, "pidfd_open"), hasattr(os, "memfd_create")]
    show(missing=missing, lengths=[len(each) for each in big], keeper=local().runtime.keeper.pid)
    os.kill(os.getpid(), signal.SIGKILL)
""",
        ],
        env={**os.environ, "PYTHONPATH": f"{place}:{ROOT}", "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    printed = program.communicate(timeout=60)[0]
    assert program.returncode == -signal.SIGKILL
    shown = json.loads(printed)
    assert shown["missing"] == [False, False]
    assert shown["lengths"] == [4_000_000] * 2
    eventually(lambda: not psutil.pid_exists(shown["keeper"]), "the keeper is gone")
    eventually(lambda: not list(temporary.iterdir()), "the runtime directory is gone")


@pytest.mark.slow
def test_a_session_outlives_a_cleaned_temporary_directory(found, temporary):
    """Its socket goes, then all there is; a cleaner that goes by age does not come that far."""
    shown = found(
        """
from pathlib import Path
from nblaunch.host import keeper
from nblaunch.client.local import local
with nblaunch.Session(nproc=2) as session:
    session.cell("x = 1", namespace={})
    root = local().directory.root()
    old = 1_000_000_000
    for path in [root, *root.rglob("*")]:
        os.utime(path, (old, old))
    keeper.freshen(str(root))
    young = all(path.lstat().st_mtime > old for path in [root, *root.rglob("*")])
    for name in ("hub", "client", "notes"):
        os.unlink(root / name)
    fresh = nblaunch.run(lambda: 2, nproc=2).values
    first = session.cell("x", namespace={}).values
    shutil.rmtree(root)
    again = nblaunch.run(lambda: 3, nproc=2).values
    second = session.cell("x + 3", namespace={}).values
    session.restart()
    third = session.cell("5", namespace={}).values
    show(young=young, same=local().directory.root() == root, values=[fresh, first, again, second, third])
""",
        TMPDIR=str(temporary),
    )
    assert shown == {"young": True, "same": True, "values": [[2, 2], [1, 1], [3, 3], [4, 4], [5, 5]]}


def test_directories_umask_and_limits_are_those_of_the_notebook_at_that_moment(found):
    shown = found(
        """
def here():
    before = os.umask(0)
    os.umask(before)
    return [os.fsencode(os.getcwd()).hex(), before, resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        resource.getrlimit(resource.RLIMIT_CORE)[0]]

nblaunch.run(here, nproc=1)
strange = os.path.join(os.getcwdb(), b"jos\\xe9")
os.mkdir(strange)
with open(os.path.join(strange, b"helper.py"), "w") as file:
    file.write("def fails():\\n    raise ValueError('as it should')\\n")
with open(os.path.join(strange, b"script.py"), "w") as file:
    file.write("print('hello')\\n")
os.chdir(strange)
sys.path.insert(0, "")
os.umask(0o027)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 777), hard))
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
import helper
inside = nblaunch.run(here, nproc=2).values
failed = nblaunch.run(helper.fails, nproc=2, check=False)
scripted = outcome(lambda: nblaunch.run("script.py", nproc=2).ranks[0].stdout)
gone = os.path.join(os.getcwd(), "gone")
os.mkdir(gone)
os.chdir(gone)
os.rmdir(gone)
refused = outcome(lambda: nblaunch.run(here, nproc=1).values)
session = outcome(lambda: nblaunch.Session(nproc=1))
os.chdir("/")
show(strange=strange.hex(), inside=inside, failed=failed.root_cause.message, refused=refused, session=session,
    scripted=scripted, after=nblaunch.run(here, nproc=1).values[0][0])
"""
    )
    assert shown["inside"] == [[shown["strange"], 0o027, 777, 0]] * 2
    assert shown["failed"] == "as it should"
    assert shown["scripted"] == "hello\n"
    for each in (shown["refused"], shown["session"]):
        assert each.startswith(
            "LaunchError: Ranks begin in the working directory of this process, which is gone"
        )
        assert "os.chdir" in each
    assert bytes.fromhex(shown["after"]) == b"/"


def test_without_a_home_nothing_is_left_in_the_temporary_directory(found, temporary, monkeypatch):
    monkeypatch.delenv("IPYTHONDIR")
    shown = found(
        "show(values=nblaunch.run(lambda: 1, nproc=2).values)", TMPDIR=str(temporary), HOME="/proc/1/nohome"
    )
    assert shown == {"values": [1, 1]}


READ_ONLY = 'mount -t tmpfs -o ro none "$0" && cd "$0" && exec "$1" -c "$2"'


def test_a_read_only_working_directory_is_no_hindrance(tmp_path):
    """On a file system that is mounted read-only, in a mount namespace of its own."""
    there = tmp_path / "read-only"
    there.mkdir()
    program = SETTING + "show(values=nblaunch.run(os.getcwd, nproc=2).values)"
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", READ_ONLY, there, sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare:" in ended.stderr or "mount:" in ended.stderr:
        left_out(f"needs a mount namespace: {ended.stderr.strip()}")
    assert json.loads(ended.stdout) == {"values": [str(there)] * 2}, ended


def test_a_temporary_directory_that_is_not_utf8_is_passed_over(found, tmp_path):
    strange = tmp_path / os.fsdecode(b"jos\xe9")
    strange.mkdir()
    shown = found(
        """
from nblaunch.client.local import local
show(values=nblaunch.run(lambda: 1, nproc=2).values, root=str(local().directory.root()))
""",
        TMPDIR=str(strange),
        XDG_RUNTIME_DIR=str(tmp_path),
    )
    assert shown["values"] == [1, 1]
    assert Path(shown["root"]).parent in {tmp_path, Path("/tmp"), Path("/var/tmp")}  # noqa: S108
