"""The runtime, the fork server and their keeper: what each of them knows, and who ends with whom."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest
from lanes import sampled

from nblaunch import _keeper
from nblaunch._process_tree import start_ticks
from nblaunch.client.line import ClientLine
from nblaunch.protocol.client import Introduce

TESTS = Path(__file__).parents[1]
MARK = "NBLAUNCH_TEST_RUNTIME"
GONE_SECONDS = 2.0
"""How soon after the end of the kernel nothing may be alive or lie about."""
PUPPET = "puppet:live"
STRAY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

OWNER = """
import os, socket, subprocess, sys
from pathlib import Path
from nblaunch._keeper import Boot
from nblaunch.client.local import LIVE
live, root, detached, theirs, ours = sys.argv[1:]
link = socket.socket(fileno=int(theirs))
booted = Boot(Path(root), link, live or LIVE, owner=0 if detached == "True" else os.getpid())
link.close()
print(booted.keeper.pid, flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""
"""Starts a runtime as a kernel does. It has both ends of the link, and evaluates what a test asks of it."""


class Tree:
    """A runtime, all processes around it, and the link to it."""

    def __init__(self, live: str, *, detached: bool, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.root = Path(tempfile.mkdtemp(prefix="nblaunch-"))
        self.link, theirs = socket.socketpair()
        self.link.settimeout(60)
        fds = theirs.fileno(), self.link.fileno()
        path = os.pathsep.join([environment.pop("PYTHONPATH", ""), str(TESTS.parent), str(TESTS)])
        self.owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, live, self.root, str(detached), *map(str, fds)],
            env={**os.environ, **environment, MARK: self.mark, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        theirs.close()
        self.lines = self.link.makefile("rw")
        self.keeper = int(self.owner.stdout.readline())
        self.ticks = start_ticks(self.keeper)

    def ask(self, expression: str):
        """Return what an expression is in the runtime."""
        self.lines.write(expression + "\n")
        self.lines.flush()
        return json.loads(self.lines.readline())

    def ask_owner(self, expression: str):
        """Return what an expression is in the process that has started the runtime."""
        self.owner.stdin.write(expression + "\n")
        self.owner.stdin.flush()
        return eval(self.owner.stdout.readline())  # noqa: S307 - the test's own

    @property
    def runtime(self):
        return self.ask("os.getpid()")

    @property
    def server(self):
        (server,) = {each.pid for each in psutil.Process(self.keeper).children()} - {self.runtime}
        return server

    def alive(self) -> set[int]:
        """Return every process that carries the mark but the owner."""
        wanted = f"{MARK}={self.mark}".encode()
        found = set()
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.add(pid)
        return found - {self.owner.pid}

    def gone(self) -> bool:
        return not self.alive() and not self.root.exists()

    def close(self) -> None:
        for pid in [*self.alive(), self.owner.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.owner.communicate()
        self.lines.close()
        self.link.close()
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture
def start():
    """Give `start(live, detached=, **environment)`: a runtime, of which nothing is left after the test."""
    started: list[Tree] = []

    def tree(live: str = PUPPET, *, detached: bool = False, **environment: str) -> Tree:
        started.append(Tree(live, detached=detached, **environment))
        return started[-1]

    yield tree
    for each in started:
        each.close()


# --- what each process is --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alive():
    """Give a runtime to all tests that end no process of it."""
    tree = Tree(PUPPET, detached=False)
    yield tree
    tree.close()


def test_the_runtime_is_the_keepers_child_and_has_no_shell_and_ranks_have_no_worker_group(alive):
    runtime, forked = alive.runtime, alive.ask("fork()")
    rank = forked[0]
    assert {each.pid for each in psutil.Process(alive.keeper).children()} == {runtime, alive.server}
    assert psutil.Process(rank).ppid() == alive.server
    assert psutil.Process(alive.server).num_threads() == 1
    loaded = alive.ask("sorted(sys.modules)")
    assert {"torch", "nblaunch.group.group"} <= set(loaded)
    assert {"IPython", "nblaunch.rank.shell"}.isdisjoint(loaded)
    in_rank = (alive.root / f"rank-{rank}").read_text().splitlines()
    assert {"torch", "nblaunch.rank.shell"} <= set(in_rank)
    assert [name for name in in_rank if name.startswith(("nblaunch.group", "nblaunch.runtime"))] == []
    # A copy of the link or of a socket pair elsewhere would hide the end of the process that has it.
    ends: dict[str, set[int]] = {}
    for pid in (alive.keeper, alive.server, runtime):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if (target := str(link.readlink())).startswith("socket:"):
                    ends.setdefault(target, set()).add(pid)
    # The link, both ends of the requests' pair and both of the orders'.
    assert sorted(map(len, ends.values())) == [1] * 5
    for pid in forked:
        os.kill(pid, signal.SIGKILL)


def test_stray_signals_end_nothing(alive, eventually):
    before = alive.keeper, alive.runtime, alive.server
    for pid in before:
        for number in STRAY:
            os.kill(pid, number)
    rank = alive.ask("plain_fork()")
    assert (alive.keeper, alive.runtime, alive.server) == before
    # What it forks is not deaf, isolated or not: a rank may be ended by SIGTERM.
    ours = {*STRAY, signal.SIGUSR1}
    eventually(lambda: not ours & ignored_by(rank), "these signals are the user's")
    os.kill(rank, signal.SIGKILL)


def ignored_by(pid: int) -> set[signal.Signals]:
    (mask,) = re.findall(r"^SigIgn:\s(\w+)", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    return {each for each in signal.valid_signals() if int(mask, 16) >> each - 1 & 1}


def test_the_log_of_a_runtime_is_bounded_and_says_how_much_it_has_left_out(alive):
    """Who is refused may come again for days."""
    logged = alive.ask(
        "[__import__('logging').getLogger('nblaunch').warning('refused: %06d', number)"
        " for number in range(30_000)] and 30_000"
    )
    text = (alive.root / "runtime.log").read_text()
    first, *lines = text.splitlines()
    assert len(text) < 300_000
    assert lines == [f"refused: {number:06}" for number in range(logged - len(lines), logged)]
    assert first == f"({(logged - len(lines)) * len(lines[0] + ' ')} bytes before this were left out)"


@pytest.mark.slow
def test_a_runtime_whose_owner_is_gone_before_it_opened_a_session_ends(start, eventually):
    """One that has a session goes on: test_attach.py kills its owner a hundred times."""
    tree = start(live="", detached=True)
    _ = line(tree.link).welcome
    tree.owner.kill()
    tree.lines.close()
    tree.link.close()
    eventually(tree.gone, "all is gone", GONE_SECONDS)


def line(connection: socket.socket, token: str = "") -> ClientLine:
    introduce = Introduce(token=token, version="0", pid=os.getpid(), node="here", name="a test")
    return ClientLine(connection, introduce, EOFError)


# --- who ends with whom ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_child_of_the_kernels_that_holds_the_link_keeps_nothing_alive(start, eventually):
    tree = start()
    tree.ask("fork()")
    child = tree.ask_owner("subprocess.Popen(['sleep', '1000'], close_fds=False).pid")
    try:
        held = {str(link.readlink()) for link in Path(f"/proc/{child}/fd").iterdir()}
        assert f"socket:[{os.fstat(tree.link.fileno()).st_ino}]" in held
        tree.owner.kill()
        eventually(lambda: tree.alive() == {child} and not tree.root.exists(), "all is gone", GONE_SECONDS)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_kernel_that_is_stopped_keeps_its_runtime(start):
    tree = start()
    runtime = tree.runtime
    tree.owner.send_signal(signal.SIGSTOP)
    # The keeper and the fork server do what they are for.
    first, _ = tree.ask("fork()")
    os.kill(tree.server, signal.SIGKILL)
    second, _ = tree.ask("fork()")
    assert first != second
    assert tree.runtime == runtime
    tree.owner.send_signal(signal.SIGCONT)
    assert tree.ask_owner("booted.keeper.poll()") is None


@pytest.mark.slow
def test_a_detached_runtime_outlives_its_kernel(start, eventually):
    tree = start(detached=True)
    before = tree.runtime, tree.server, *tree.ask("fork()")
    tree.owner.kill()
    tree.owner.wait()
    assert tree.ask("server.sweep()") is None
    assert set(before[:3]) < tree.alive()
    assert (tree.runtime, tree.server) == before[:2]
    assert tree.ask("fork()")
    assert _keeper.stop(tree.keeper, tree.ticks)
    eventually(tree.gone, "all is gone", GONE_SECONDS)


@pytest.mark.slow
def test_a_bound_runtime_is_detached_on_request(start, eventually):
    tree = start()
    runtime = tree.runtime
    tree.ask("server.detach()")
    tree.owner.kill()
    tree.owner.wait()
    assert tree.ask("fork()")
    assert tree.runtime == runtime
    tree.lines.write("stop\n")
    tree.lines.flush()
    eventually(tree.gone, "all is gone", GONE_SECONDS)


def test_a_runtime_that_ends_takes_all_along_and_its_entry(start, eventually, tmp_path):
    entry = tmp_path / "entry é.json"
    entry.touch()
    tree = start()
    tree.ask(f"server.named({str(entry)!r})")
    tree.ask("fork()")
    tree.lines.write("stop\n")
    tree.lines.flush()
    eventually(tree.gone, "all is gone", GONE_SECONDS)
    eventually(lambda: not entry.exists(), "the entry is gone")
    assert tree.ask_owner("booted.keeper.wait()") == 0
    assert tree.ask_owner("booted.last_words()") == "It printed nothing."


@pytest.mark.parametrize("number", sampled([signal.SIGSEGV, signal.SIGKILL], ci=1))
def test_a_runtime_that_is_killed_takes_all_along_and_leaves_its_last_words(start, eventually, number):
    tree = start()
    runtime, _ = tree.runtime, tree.ask("fork()")
    tree.ask("print('all is well', file=sys.stderr)")
    # Its end shows, although a child has a copy of all its sockets.
    tree.ask("os.fork() or signal.pause()")
    os.kill(runtime, number)
    eventually(tree.gone, "all is gone", GONE_SECONDS)
    assert tree.lines.readline() == ""
    words = tree.ask_owner("booted.last_words()")
    assert "all is well" in words
    assert ("Fatal Python error: Segmentation fault" in words) is (number == signal.SIGSEGV)


@pytest.mark.slow
def test_a_fork_server_that_is_killed_takes_its_ranks_along_and_the_runtime_starts_another(start, eventually):
    tree = start()
    runtime = tree.runtime
    servers, descriptors = {tree.server}, set()
    for _ in range(3):
        tree.ask("fork()")
        os.kill(tree.server, signal.SIGKILL)
        eventually(lambda: tree.alive() == {tree.keeper, runtime}, "the others are gone", GONE_SECONDS)
        tree.ask("server.ensure_running()")
        tree.ask("fork()")
        assert tree.server not in servers
        servers.add(tree.server)
        descriptors.add(len(list(Path(f"/proc/{tree.keeper}/fd").iterdir())))
    assert tree.runtime == runtime
    assert len(descriptors) == 1


NO_PIDFD = "import os\nvars(os).pop('pidfd_open', None)\n"


@pytest.mark.slow
def test_without_pidfd_the_same_is_true(start, eventually, tmp_path):
    """The system does not wake the keeper then: threads wait for the end of each process."""
    (tmp_path / "sitecustomize.py").write_text(NO_PIDFD)
    tree = start(PYTHONPATH=str(tmp_path))
    runtime = tree.runtime
    tree.ask("fork()")
    os.kill(tree.server, signal.SIGKILL)
    eventually(lambda: tree.alive() == {tree.keeper, runtime}, "the others are gone", GONE_SECONDS)
    # The second one has a copy of whatever the keeper has open.
    tree.ask("fork()")
    tree.owner.kill()
    eventually(tree.gone, "all is gone", GONE_SECONDS)


HASTY = "import nblaunch.host.keeper as keeper\nkeeper._FRESHEN_SECONDS = 0.2\n"


def test_the_files_are_kept_young_however_busy_the_keeper_is(start, eventually, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HASTY)
    tree = start(PYTHONPATH=str(tmp_path))
    assert tree.runtime
    os.utime(tree.root, (0, 0))

    def is_young() -> bool:
        os.kill(tree.keeper, signal.SIGCHLD)  # as each orphan does that ends
        return bool(tree.root.stat().st_mtime > 0)

    eventually(is_young, "they are touched", 10)


@pytest.mark.slow
def test_the_runtime_can_end_a_fork_server_that_does_not_answer(start):
    tree = start()
    tree.ask("fork()")
    stuck = tree.server
    os.kill(stuck, signal.SIGSTOP)
    tree.ask("server.stop()")
    assert tree.alive() == {tree.keeper, tree.runtime}
    tree.ask("fork()")
    assert tree.server != stuck


def test_commands_for_the_end_run_once_all_is_gone(start, eventually, tmp_path):
    """They give back what no process holds; those that have been taken back do not run."""
    kept, forgotten = (tmp_path / name for name in ("kept", "forgotten"))
    tree = start()
    tree.ask(f"server.at_end(['sh', '-c', 'kill -0 {tree.runtime} || touch {kept}']) and None")
    tree.ask(f"setattr(sys, 'forget', server.at_end(['touch', '{forgotten}']))")
    tree.ask("server.at_end(['/nowhere/program']) and None")
    tree.ask("sys.forget()")
    tree.owner.kill()
    eventually(lambda: not tree.alive(), "all are gone", GONE_SECONDS)
    assert (kept.exists(), forgotten.exists()) == (True, False)


@pytest.mark.slow
def test_a_slow_command_for_the_end_delays_nothing_and_ends(start, eventually, tmp_path):
    """What gives a job back may wait for a controller that does not answer at once."""
    answers, released = tmp_path / "answers", tmp_path / "given back"
    tree = start()
    wait = f"while ! test -e {answers}; do sleep 0.01; done; touch '{released}'"
    tree.ask(f"server.at_end(['sh', '-c', {wait!r}]) and None")
    tree.owner.kill()
    eventually(lambda: tree.keeper not in tree.alive(), "the keeper is gone", GONE_SECONDS + 2)
    assert not tree.root.exists()
    answers.touch()
    eventually(released.exists, "the command has ended", GONE_SECONDS)
    eventually(tree.gone, "nothing is left", GONE_SECONDS)


def test_a_command_for_the_end_that_never_ends_is_killed(tmp_path):
    begun = tmp_path / "begun"
    command = json.dumps(["sh", "-c", f"echo $$ >{begun}; exec sleep 1000"])
    code = "import sys; from nblaunch.host import keeper; keeper._COMMANDS_SECONDS = 1; "
    run = "keeper._await(keeper._run_apart([sys.argv[1].encode()]))"
    subprocess.run([sys.executable, "-c", code + run, command], check=True)
    assert not psutil.pid_exists(int(begun.read_text()))


@pytest.mark.parametrize("killed", sampled(["runtime", "keeper"], ci=1))
def test_a_variable_of_a_command_for_the_end_is_in_no_command_line(start, eventually, tmp_path, killed):
    """Every user of this machine can read these. A keeper that is killed leaves the command to a shell."""
    program, seen = tmp_path / "give-back", tmp_path / "seen"
    program.write_text(f'#!/bin/sh\nprintf "$TOKEN" >{seen}\n')
    program.chmod(0o755)
    tree = start()
    variables = f"TOKEN=s3cret=1', 'PATH={tmp_path}:{os.environ['PATH']}"
    tree.ask(f"server.at_end(['{variables}', 'give-back']) and None")
    lines: list[bytes] = []

    def waits() -> bool:
        lines[:] = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in tree.alive()]
        return any(b"give-back" in line for line in lines)

    eventually(waits, "a shell waits", GONE_SECONDS)  # a process has no command line in the middle of exec
    assert not any(b"s3cret" in line for line in lines)
    os.kill(getattr(tree, killed), signal.SIGKILL)
    eventually(lambda: seen.exists() and seen.read_text() == "s3cret=1", "the command has it", GONE_SECONDS)


@pytest.mark.slow
def test_the_keeper_takes_all_along_when_it_is_killed(start, eventually):
    tree = start()
    tree.ask("fork()")
    os.kill(tree.keeper, signal.SIGKILL)
    # What a rank has left behind in a session of its own is nobody's then, and lives on.
    eventually(lambda: len(tree.alive()) == 1, "the server, the runtime and the rank are gone", GONE_SECONDS)
    assert "sleep" in psutil.Process(tree.alive().pop()).cmdline()


@pytest.mark.parametrize("pidfd", sampled([True, False], ci=1))
def test_one_signal_to_the_keeper_ends_all(start, eventually, monkeypatch, pidfd):
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    tree = start()
    tree.ask("fork()")
    assert not _keeper.stop(tree.keeper, tree.ticks + 1)  # another process, with the same number
    os.kill(tree.runtime, signal.SIGSTOP)
    assert _keeper.stop(tree.keeper, tree.ticks)
    eventually(tree.gone, "all is gone", GONE_SECONDS)
    assert tree.ask_owner("booted.keeper.wait()") == 0
    assert not _keeper.stop(tree.keeper, tree.ticks)


REFUSED_ONCE = """
import os, sys
if "nblaunch.host.keeper" in str(sys.orig_argv):
    fork, keeper, forks = os.fork, os.getpid(), []
    def refuse():
        forks.append(os.getpid())
        if forks.count(keeper) == 2:
            raise BlockingIOError(11, os.strerror(11))
        return fork()
    os.fork = refuse
"""


@pytest.mark.slow
def test_a_fork_server_that_the_system_refuses_is_an_error_and_the_next_one_comes(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(REFUSED_ONCE)
    tree = start(PYTHONPATH=str(tmp_path))
    before = tree.runtime
    os.kill(tree.server, signal.SIGKILL)
    tree.ask("server.stop()")
    assert tree.ask("server.ensure_running()").startswith(
        "LaunchError: A rank was to be forked, and the system refused: EAGAIN"
    )
    assert tree.ask("fork()")
    assert tree.runtime == before


# --- a runtime that does not come ------------------------------------------------------------------

NO_FORK = """
import os, sys
if "nblaunch.host.keeper" in str(sys.orig_argv):
    fork, count = os.fork, 0
    def refuse():
        global count
        count += 1
        if count == {}:
            raise BlockingIOError(11, os.strerror(11))
        return fork()
    os.fork = refuse
"""


@pytest.mark.parametrize(
    ("what", "trouble"),
    sampled(
        [
            ("Resource temporarily unavailable", NO_FORK.format(2)),
            ("Resource temporarily unavailable", NO_FORK.format(1)),
            ("Resource temporarily unavailable", NO_FORK.format(3)),
            ("import of torch halted", "import sys; sys.modules['torch'] = None"),
            ("import of nblaunch.group halted", "import sys; sys.modules['nblaunch.group'] = None"),
        ],
        ci=1,
    ),
    ids=["no runtime", "no server", "no runtime, in the middle", "no torch", "no worker group"],
)
def test_a_runtime_that_cannot_start_says_why(start, eventually, tmp_path, what, trouble):
    (tmp_path / "sitecustomize.py").write_text(trouble)
    tree = start(PYTHONPATH=str(tmp_path))
    assert tree.lines.readline() == ""
    eventually(tree.gone, "all is gone", GONE_SECONDS)
    assert what in tree.ask_owner("booted.last_words()")
