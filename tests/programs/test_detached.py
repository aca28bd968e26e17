"""The end of a detached session, and who may use it: by `stop`, by `--linger`, by nobody else."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from lanes import sampled
from patience import PATIENCE, waiting

import nblaunch
from nblaunch import _keeper, _registry
from nblaunch._registry import ProcessIdentity
from nblaunch.client import directory

pytestmark = pytest.mark.timeout(300)
GONE_SECONDS = 2.0
"""How soon after the end of a kernel nothing of its own may be alive."""
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def running(name: str) -> str:
    """Return the title of the job that a session runs."""
    return next((each.running for each in directory.sessions() if each.name == name), "")


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class Left:
    """What a session has, to be looked for after its end."""

    def __init__(self, name: str) -> None:
        self.entry = directory.detached()[name]
        keeper = psutil.Process(self.entry.keeper.pid)
        self.processes = [keeper, *keeper.children(recursive=True)]
        self.shared = {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108 - only looked at

    def found(self) -> list[str]:
        """Return one line for whatever there still is: processes, files and sockets, shared memory."""
        (listed,) = _registry.directories()
        return [
            *(f"process {each}" for each in self.processes if lives(each)),
            *([self.entry.root] if Path(self.entry.root).exists() else []),
            *(str(each) for each in listed.glob("*.json")),
            *(str(each) for each in listed.glob("*.lock")),
            *sorted({path.name for path in Path("/dev/shm").iterdir()} - self.shared),  # noqa: S108 - as above
        ]


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nblaunch", *words], capture_output=True, text=True, timeout=60, check=False
    )


# --- its end ---------------------------------------------------------------------------------------


def test_a_kernel_takes_its_own_session_along_and_leaves_the_detached_one(detached_kernels, eventually):
    """The two have a runtime each, also where the kernel has used its own before."""
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 1 --session own\n%distributed start -n 2 --detach --session train")
    kernel.ok("%%distributed --session own\nkept = 1")
    kernel.ok("%%distributed --session train\nkept = 2")
    own, train = sorted(directory.sessions(), key=lambda each: each.name)
    assert [(each.name, each.detached) for each in (own, train)] == [("own", False), ("train", True)]
    keeper = psutil.Process(own.pid).parent()
    bound = [keeper, *keeper.children(recursive=True)]
    assert len(bound) == 4
    left = Left("train")
    kernel.kill()
    eventually(lambda: not any(map(lives, bound)), "all of the bound session is gone", GONE_SECONDS)
    eventually(lambda: directory.sessions()[0].client is None, "the client has gone")
    assert all(map(lives, left.processes))
    (info,) = directory.sessions()
    assert (info.name, info.kernel) == ("train", kernel.pid)
    other = detached_kernels()
    other.ok("%distributed attach\n%distributed pull kept --session train")
    assert other.value("kept") == [2, 2]


def test_a_session_ends_once_nobody_has_used_it_for_its_linger_time(detached_kernels, eventually, free):
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train --linger 1s")
    left = Left("train")
    # Not while a client is there, nor while a job runs.
    time.sleep(1.5)
    kernel.submit(waiting(free))
    eventually(lambda: running("train"), "the job runs")
    kernel.kill()
    eventually(lambda: directory.sessions()[0].client is None, "the client has gone")
    time.sleep(1.5)
    (info,) = directory.sessions()
    assert (info.running, info.linger_left) == ("cell", None)
    assert len(left.processes) == 5
    free.touch()
    eventually(lambda: not left.found(), "nothing is left", 1 + PATIENCE)
    assert directory.sessions() == ()


@pytest.mark.slow
def test_a_client_that_comes_in_time_keeps_the_session(detached_kernels, eventually):
    one, two = detached_kernels(), detached_kernels()
    one.ok("%distributed start -n 2 --detach --session train --linger 20s")
    one.ok("%%distributed\nx = 3")
    time.sleep(0.5)
    killed = time.monotonic()
    one.kill()
    eventually(lambda: directory.sessions()[0].client is None, "the client has gone")
    (info,) = directory.sessions()
    # It counts from the moment at which the client has gone, not from its last job.
    assert 20 - (time.monotonic() - killed) <= (info.linger_left or 0) <= 20
    two.ok("%distributed attach")
    assert directory.sessions()[0].linger_left is None
    two.ok("%%distributed --out res\nx")
    assert two.value("res.values") == [3, 3]


def test_stop_from_a_shell_ends_all_and_a_waiting_client_is_told_at_once(detached_kernels, eventually, free):
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train")
    left = Left("train")
    cell = kernel.submit(waiting(free))
    eventually(lambda: running("train"), "the job runs")
    listed = cli("sessions")
    (line,) = [each for each in listed.stdout.splitlines() if each.startswith("train ")]
    assert "detached" in line
    assert "cell" in line
    assert f"kernel {kernel.pid}" in line
    stopped = cli("stop", "train")
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "session 'train' has ended\n", "")
    assert left.found() == []
    ran = cell.finish()
    assert ran.error.ename == "LaunchError"
    assert "session 'train' was stopped" in ran.error.evalue
    assert cli("sessions").stdout == "no session is open\n"
    again = cli("stop", "train")
    assert again.returncode == 1
    assert "there is none on this machine" in again.stderr


STOPS = {
    "by the notebook that has started it": "%distributed stop --session train",
    "by another notebook": "%distributed attach train\n%distributed stop --session train",
    "by Session.close()": "import nblaunch\nnblaunch.Session.attach('train').close()",
    "by a program that ends its with block": (
        "import nblaunch\nwith nblaunch.Session.attach('train') as session:\n    session.run(int)"
    ),
}


@pytest.mark.slow_at(
    "by another notebook",
    "by a program that ends its with block",
    "by the notebook that has started it",
)
@pytest.mark.parametrize("how", STOPS)
def test_nothing_is_left_of_a_session_that_is_stopped(detached_kernels, eventually, free, how):
    """Neither of what it has kept: a large value, and the file of an older job."""
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train")
    left = Left("train")
    cell = kernel.submit(f"{waiting(free)}\nbytes(10_000_000)")
    eventually(lambda: running("train"), "the job runs")
    free.touch()
    assert cell.finish().error is None
    for number in range(3):
        kernel.ok(f"%%distributed\n{number}")
    eventually(lambda: list(Path(left.entry.root).glob("job-*")), "the first job has a file")
    if "started" not in how:
        kernel.kill()
        eventually(lambda: directory.sessions()[0].client is None, "the client has gone")
        kernel = detached_kernels()
    kernel.ok(STOPS[how])
    assert left.found() == []
    assert directory.sessions() == ()


@pytest.mark.slow
def test_a_session_whose_runtime_does_not_answer_is_listed_and_can_be_stopped(detached_kernels, eventually):
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train")
    left = Left("train")
    os.kill(left.entry.runtime.pid, signal.SIGSTOP)
    (info,) = directory.sessions()
    assert "does not answer" in info.problem
    assert info.pid == left.entry.runtime.pid
    # `stop` first waits for an answer; this is what it does then.
    assert _keeper.stop(left.entry.keeper.pid, left.entry.keeper.start)
    eventually(lambda: directory.sessions() == () and not left.found(), "nothing is left")


# --- what is listed --------------------------------------------------------------------------------

BALLAST = """
%%distributed --session train --out res
import os
import psutil
ballast = bytearray(os.urandom(1) * 100_000_000)
os.getpid(), psutil.Process().memory_full_info().uss
"""


def test_a_session_is_listed_with_its_kernel_job_times_memory_and_devices(detached_kernels, eventually, free):
    kernel = detached_kernels(JPY_SESSION_NAME="/home/ann/train.ipynb")
    before = time.time()
    kernel.ok("%distributed start -n 2 --detach --session train --linger 30s")
    kernel.ok(BALLAST)
    ranks = kernel.value("res.values")
    given = time.time()
    kernel.submit(waiting(free).replace("%%distributed", "%%distributed --session train"))
    eventually(lambda: running("train"), "the job runs")
    (info,) = directory.sessions()
    after = time.time()
    entry = directory.detached()["train"]
    assert (info.name, info.detached, info.world_size, info.backend) == ("train", True, 2, "gloo")
    assert (info.kernel, info.notebook, info.client) == (kernel.pid, "/home/ann/train.ipynb", kernel.pid)
    assert info.pid == entry.runtime.pid
    assert info.devices == ("cpu",)
    assert info.running == "cell"
    assert before <= info.started <= given <= (info.running_since or 0) <= after
    own = sum(uss for _, uss in ranks)
    assert own >= 200e6
    listed = info.memory or 0
    assert own * 0.9 <= listed <= own * 1.1
    assert (info.linger_left, info.problem) == (None, "")
    # The same from a shell and from a notebook: another one's.
    (line,) = cli("sessions").stdout.splitlines()
    words = re.split(" {2,}", line)
    assert re.fullmatch(r"2 ranks \(gloo\), cpu, \d+ MB", words[2])
    assert abs(int(words[2].split()[-2]) - listed / 1e6) < own / 1e7
    in_notebook = re.split(" {2,}", detached_kernels().ok("%distributed sessions").result)
    since = time.strftime("since %b %d %H:%M", time.localtime(info.started))
    for each in (words, in_notebook):
        assert each[:2] == ["train", "detached"]
        assert re.fullmatch(r"runs cell for \d+ s", each[3])
        assert each[4] == f"{since}, train.ipynb"
    kernel.kill()
    free.touch()
    eventually(lambda: directory.sessions()[0].linger_left is not None, "nobody uses it")
    (idle,) = directory.sessions()
    assert (idle.running, idle.running_since, idle.client) == ("", None, None)
    assert 0 < (idle.linger_left or 0) <= 30


@pytest.mark.slow
def test_a_terminal_reads_what_runs_detached_when_it_loads_the_extension_and_attaches(
    detached_kernels, terminal
):
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train")
    kernel.ok("%%distributed --session train\nkept = rank + 5")
    kernel.kill()
    since = time.strftime("%b %d %H:%M", time.localtime(directory.detached()["train"].started))
    ran = terminal(
        [
            "%load_ext nblaunch",
            "%distributed attach train",
            "%%distributed --session train\nprint('on', rank, 'is', kept)",
        ]
    )
    first, second, *rest = ran.stdout.splitlines()
    assert first == f"detached session 'train' has been running since {since}: %distributed attach train"
    assert second.startswith("attached to session 'train': 2 ranks (gloo)")
    assert [line for line in rest if "is" in line.split()][:2] == [
        "[rank 0] on 0 is 5",
        "[rank 1] on 1 is 6",
    ]
    assert ran.returncode == 0
    # Where none runs, nothing is said.
    assert cli("stop", "train").returncode == 0
    assert terminal(["%load_ext nblaunch"]).stdout == ""


@pytest.mark.slow
def test_an_entry_of_a_pid_that_is_another_process_by_now_is_removed(detached_kernels, tmp_path):
    """Nothing is sent to that process, and what the dead runtime has left goes too."""
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train")
    entry = directory.detached()["train"]
    (listed,) = _registry.directories()
    root = tmp_path / "nblaunch-dead"
    root.mkdir(mode=0o700)
    keeper = ProcessIdentity(os.getpid(), ProcessIdentity.of(os.getpid()).start - 1)
    stale = msgspec.structs.replace(
        entry, name="dead", root=str(root), socket=str(root / "client"), keeper=keeper, runtime=keeper
    )
    (listed / stale.file).touch(0o600)
    (listed / stale.file).write_bytes(msgspec.json.encode(stale))
    (listed / f"dead@{stale.host.name}.lock").symlink_to(stale.file)
    shown = kernel.ok("%distributed sessions").result
    assert "train" in shown
    assert "dead" not in shown
    assert not root.exists()
    assert sorted(each.name for each in listed.glob("*.json")) == [entry.file]
    assert "the detached ones are 'train'" in kernel.fails("%distributed attach dead").evalue


@AS_ROOT
def test_another_user_can_neither_list_nor_connect_nor_read_nor_be_taken_for_the_owner(
    detached_kernels,
):
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train")
    entry = directory.detached()["train"]
    (listed,) = _registry.directories()
    root = Path(entry.root)
    assert [each.stat().st_mode & 0o777 for each in (listed, root)] == [0o700, 0o700]
    assert not any(each.stat().st_mode & 0o077 for each in root.iterdir() if each.is_socket())
    code = f"""
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
def refused(action, *arguments):
    try:
        action(*arguments)
    except PermissionError:
        return True
    return False
print([
    refused(os.listdir, {str(listed)!r}),
    refused(open, {str(listed / entry.file)!r}),
    refused(os.listdir, {str(root)!r}),
    refused(socket.socket(socket.AF_UNIX).connect, {entry.socket!r}),
])
"""
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout == "[True, True, True, True]\n"
    # Directories and files may be opened by mistake: the runtime reads nothing of a stranger.
    opened = [Path(entry.socket), *Path(entry.socket).parents]
    modes = [(each, each.stat().st_mode & 0o7777) for each in opened[:-2]]
    code = f"""
import os, socket, sys
sys.path[:0] = {sys.path!r}
from nblaunch.protocol.client import Introduce
from nblaunch.protocol.framing import FrameKind, header
from nblaunch.protocol.messages import encode
os.setgroups([]); os.setgid(65534); os.setuid(65534)
body = encode(Introduce(token={entry.token!r}, version="0", pid=os.getpid(), node="", name="a stranger"))
client = socket.socket(socket.AF_UNIX)
client.connect({entry.socket!r})
try:
    client.sendall(header(FrameKind.STRUCT, 0, len(body)) + body)
    print(client.recv(100))
except ConnectionError:
    print(b"")
"""
    try:
        for each, mode in modes:
            each.chmod(mode | 0o777 if each == opened[0] else mode | 0o055)
        there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    finally:
        for each, mode in modes:
            each.chmod(mode)
    assert (there.stdout, there.stderr) == ("b''\n", "")
    assert "refused: a client of another user (uid 65534)" in (Path(entry.root) / "runtime.log").read_text()
    kernel.ok("%%distributed\n1")


OTHER_VERSION = """
import importlib.machinery, re, sys, time
sys.path[:0] = {path!r}
class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        source = re.sub("^{number} = .*", "{number} = 99", self.get_source(name), flags=re.M)
        return compile(source, self.path, "exec")
class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if name == "{module}":
            spec.loader = Loader(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder())
import nblaunch
nblaunch._version.__version__ = "9.9.9"
from nblaunch.client import directory
from nblaunch.client.local import local
entry = directory.detached()["train"]
try:
    nblaunch.Session.attach("train")
except nblaunch.NblaunchError as error:
    print(error)
try:
    local().attached(entry).welcome
except nblaunch.NblaunchError as error:
    print(error)
print(*nblaunch.sessions())
began = time.monotonic()
directory.stop("train")
print("waited" if time.monotonic() - began > 20 else "at once")
"""


@pytest.mark.parametrize(
    ("module", "number"),
    sampled(
        [("nblaunch.protocol.client", "CLIENT_PROTOCOL"), ("nblaunch.protocol.messages", "PROTOCOL_VERSION")],
        ci=1,
    ),
    ids=["of clients", "of ranks"],
)
def test_a_client_of_another_protocol_is_refused_and_can_stop_the_session(
    detached_kernels, tmp_path, module, number
):
    kernel = detached_kernels()
    kernel.ok("%distributed start -n 2 --detach --session train")
    left = Left("train")
    ours = nblaunch.__version__
    script = tmp_path / "other.py"
    script.write_text(OTHER_VERSION.format(path=sys.path, module=module, number=number))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    attach, connect, *listed, ended = ran.stdout.splitlines()
    assert attach == (
        f"session 'train' was started by nblaunch {ours}, and this is nblaunch 9.9.9. Use it with that "
        "version, or stop it: python -m nblaunch stop train."
    )
    assert f"A client with nblaunch 9.9.9 was refused by a runtime with nblaunch {ours}" in connect
    assert "train" in listed[-1]
    assert "does not answer" in listed[-1]
    assert ended == "at once"
    assert left.found() == []


STARTS = """
import nblaunch, time
nblaunch.Session(nproc=2, name="train", detach=True, linger="1m")
print("open", flush=True)
time.sleep(100)
"""
WHOLE_START = 4.0
"""About as long as a start takes, in seconds, on two cores."""


@pytest.mark.parametrize(
    ("moments", "seed"),
    [(2, 28), *(pytest.param(10, seed, marks=pytest.mark.slow) for seed in range(3))],
)
@pytest.mark.usefixtures("detached_kernels")
def test_a_start_that_was_killed_at_any_moment_leaves_a_whole_session_or_nothing_within_two_seconds(
    moments, seed, eventually
):
    """The first moment is when the fork server imports torch, which takes the longest."""
    chosen = random.Random(seed)
    for number in range(moments):
        starter = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
        process = psutil.Process(starter.pid)
        eventually(process.children, "the keeper is there", 60)
        below = process.children(recursive=True)
        moment = chosen.uniform(0, WHOLE_START) if number else 0.2
        time.sleep(moment)
        below += process.children(recursive=True)
        starter.kill()
        ended = time.monotonic()
        starter.communicate()
        while any(map(lives, below)) and not usable():
            took = time.monotonic() - ended
            assert took < GONE_SECONDS, f"killed {moment:.3f} s after its keeper began"
            time.sleep(0.01)


def usable() -> bool:
    """Whether the session is there, and is stopped now. One that is listed may be about to end."""
    if "train" not in directory.detached():
        return False
    try:
        session = nblaunch.Session.attach("train")
        assert session.cell("rank", namespace={}).values == [0, 1]
    except nblaunch.NblaunchError:
        return False
    session.close()
    return True
