"""Nothing changes in the process that runs ranks, nothing is open to others, and nothing is left behind.

The programs here are real ones, each with a temporary directory of its own: what is in there in the end
was left behind. Every process below a program inherits a mark, so it is found wherever it went.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq
from lanes import sampled

MARK = "NBLAUNCH_TEST_PROGRAM"
GONE_SECONDS = 2.0
"""How soon after the end of a notebook's kernel nothing of ours may be alive or lie about."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = 30) -> None:
    """Look again and again, and often: some tests want to strike at the very moment."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(0.002)


def marked(mark: str) -> dict[int, str]:
    """Return pid and command line of every living process that carries a mark."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108 - only looked at


class World:
    """One program's temporary directory and mark."""

    def __init__(self, directory: Path) -> None:
        self.temporary = directory
        self.mark = uuid.uuid4().hex
        self.shared = shared_memory()
        self.environment = {MARK: self.mark, "TMPDIR": str(directory), "CUDA_VISIBLE_DEVICES": ""}

    def processes(self) -> dict[int, str]:
        return marked(self.mark)

    def below(self, pid: int) -> list[int]:
        """Return the direct children of a process."""
        with contextlib.suppress(psutil.Error):
            return [each.pid for each in psutil.Process(pid).children()]
        return []

    def keeper(self, pid: int) -> int | None:
        keepers = [
            each for each in self.below(pid) if "nblaunch.host.keeper" in self.processes().get(each, "")
        ]
        return keepers[0] if keepers else None

    def parts(self, pid: int) -> dict[str, int]:
        """Return those of keeper, fork server and runtime of process `pid` that are there."""
        keeper = self.keeper(pid)
        found = {} if keeper is None else {"keeper": keeper}
        for child in self.below(keeper or 0):
            # All three have one command line.
            with contextlib.suppress(OSError):
                log = Path(f"/proc/{child}/fd/1").readlink().name
                found["runtime" if log == "runtime.log" else "server"] = child
        return found

    def ranks(self, pid: int) -> list[int]:
        """Return the children of the fork server of process `pid`, once it has forked the runtime."""
        parts = self.parts(pid)
        return self.below(parts["server"]) if len(parts) == 3 else []

    def left(self) -> list[str]:
        """Return one line for whatever there still is."""
        return [
            *(f"process {pid}: {line[:200]}" for pid, line in self.processes().items()),
            *(f"file {top}/{name}" for top, _, files in os.walk(self.temporary) for name in files),
            *(f"directory {top}/{name}" for top, names, _ in os.walk(self.temporary) for name in names),
            *(f"shared memory {name}" for name in shared_memory() - self.shared),
        ]

    def must_be_clean(self, seconds: float = GONE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while left := self.left():
            if time.monotonic() > deadline:
                for pid in self.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                pytest.fail(
                    "left {:g} s after the end:\n  {}".format(seconds, "\n  ".join(left)), pytrace=False
                )
            time.sleep(0.005)


@pytest.fixture
def world():
    """Give a temporary directory that is empty, and short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="w-"))
    yield World(directory)
    shutil.rmtree(directory, ignore_errors=True)


class Program:
    """A plain `python script.py`."""

    def __init__(self, world: World, directory: Path, source: str, **environment: str) -> None:
        path = directory / "program.py"
        path.write_text(textwrap.dedent(source))
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            cwd=directory,
            env={**os.environ, **world.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the signal and wait for the end."""
        self.process.send_signal(number)
        self.finish()

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def program(world, tmp_path):
    """Give `program(source, **environment)`: starts a script and returns at once."""
    started: list[Program] = []

    def start(source: str, **environment: str) -> Program:
        started.append(Program(world, tmp_path, source, **environment))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def finished(program):
    """Give `finished(source)`: runs a script to its good end and returns what it printed as JSON."""

    def run(source: str, **environment: str):
        code, out, err = program(source, **environment).finish()
        assert (code, err) == (0, "")
        return json.loads(out.splitlines()[-1])

    return run


JOB = """
import nblaunch

def job():
    import os
    return int(os.environ["RANK"])
"""


# --- the process is as it was ----------------------------------------------------------------------

SETTLED = """
def settled():
    # Ranks that have succeeded leave while the program goes on.
    import psutil, time
    deadline = time.monotonic() + 30
    # The keeper, the fork server and the runtime stay.
    while len(psutil.Process().children(recursive=True)) > 3 and time.monotonic() < deadline:
        time.sleep(0.005)
"""

LOOK = (
    SETTLED
    + """
import json, logging, multiprocessing, os, signal, sys, threading, warnings

def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass
    return found

def look():
    settled()
    torch = sys.modules.get("torch")
    return {
        "handlers": {each.name: str(signal.getsignal(each)) for each in signal.Signals},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "environment": dict(os.environ),
        "default group": bool(torch and torch.distributed.is_initialized()),
        "cuda": bool(torch and torch.cuda.is_initialized()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": descriptors(),
        "umask": (umask := os.umask(0), os.umask(umask))[0],
        "directory": os.getcwd(),
        "path": sys.path,
        "arguments": sys.argv,
        "hooks": [str(each) for each in (sys.excepthook, sys.displayhook, threading.excepthook)],
        "streams": [id(each) for each in (sys.stdin, sys.stdout, sys.stderr)],
        "main": list(vars(sys.modules["__main__"]))[:5],
        "root handlers": [str(each) for each in logging.getLogger().handlers],
        "grouped": [os.getpgid(0), os.getsid(0)],
        "torch threads": torch.get_num_threads() if torch else None,
        "random": hash(tuple(torch.random.get_rng_state().tolist())) if torch else None,
    }
"""
)


def test_a_run_leaves_the_process_as_it_was(finished):
    first, second, third = finished(f"""
{LOOK}
import torch, torch.distributed
{JOB}
looks, kept = [look()], []
for attempt in range(2):
    # Kept, because the logs of one that is not are being removed for a moment more.
    kept.append(nblaunch.run(job, nproc=2))
    looks.append(look())
print(json.dumps(looks))
""")
    # The runtime lives as long as the process: two connections to it, and the logs of its last words.
    new = {fd: to for fd, to in second["descriptors"].items() if first["descriptors"].get(fd) != to}
    kinds = sorted("socket" if to.startswith("socket:") else Path(to).name for to in new.values())
    assert kinds == ["forkserver.log", "runtime.log", "socket", "socket"]
    for later in (second, third):
        for name in first.keys() - {"descriptors"}:
            assert later[name] == first[name], name
    assert third == second


@pytest.mark.slow
def test_the_users_own_forkserver_is_a_server_of_its_own(finished):
    servers, pools, values = finished(f"""
{JOB}
import json, multiprocessing, os
from multiprocessing import forkserver
if __name__ == "__main__":
    nblaunch.run(job, nproc=2)
    before = forkserver._forkserver._forkserver_pid
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        squares = pool.map(abs, [-1, -2])
    print(json.dumps([before, squares, nblaunch.run(job, nproc=2).values]))
""")
    assert (servers, pools, values) == (None, [1, 2], [0, 1])


# --- while a run is up -----------------------------------------------------------------------------

# Whoever starts the tests under nohup, or in the background, has children ignore these two.
HEARS = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

STUCK = """
import os, pathlib
os.umask(0)
import nblaunch

def job():
    import os, pathlib, time
    from torch import distributed
    pathlib.Path("at-" + os.environ["RANK"]).touch()
    if os.environ["RANK"] == "0":
        distributed.barrier()
    time.sleep(1000)

nblaunch.run(job, nproc=2)
"""


RECORDS_SECRETS = """
import os, secrets
make_secret = secrets.token_hex
def recorded(size=None):
    made = make_secret(size)
    with open(os.path.join(os.path.dirname(__file__), "secrets"), "a") as file:
        file.write(made + "\\n")
    return made
secrets.token_hex = recorded
"""


def stuck(directory: Path) -> bool:
    """Return whether both ranks have come to where they stay."""
    return all((directory / f"at-{rank}").exists() for rank in range(2))


class Running:
    """A script whose two ranks are stuck in a collective, under a umask that protects nothing."""

    def __init__(self, world: World, directory: Path, site: Path) -> None:
        self.world = world
        self.directory = directory
        self.secrets = site / "secrets"
        (site / "sitecustomize.py").write_text(RECORDS_SECRETS)
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        self.program = Program(world, directory, STUCK, PYTHONPATH=path)
        self.pid = self.program.pid

    def wait(self) -> None:
        wait_until(lambda: stuck(self.directory), "both ranks run their job")
        self.processes = set(self.world.processes())
        self.ranks = set(self.world.ranks(self.pid))
        self.parts = self.world.parts(self.pid)
        assert self.processes - self.ranks == {self.pid, *self.parts.values()}
        assert (len(self.parts), len(self.ranks)) == (3, 2)
        (self.private,) = self.world.temporary.iterdir()


@pytest.fixture(scope="module")
def the_running(tmp_path_factory):
    """Start one such script for all tests that only look at it."""
    temporary = Path(tempfile.mkdtemp(prefix="w-"))
    started = Running(World(temporary), tmp_path_factory.mktemp("running"), tmp_path_factory.mktemp("site"))
    try:
        started.wait()
        yield started
    finally:
        started.program.close()
        started.world.must_be_clean()
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture
def running(the_running):
    """Give the script; it must be undisturbed after each look."""
    yield the_running
    assert the_running.program.process.poll() is None
    assert set(the_running.world.processes()) == the_running.processes


def listening(pids: set[int]) -> list[tuple[int, str]]:
    """Return process and address of every socket that strangers could send something to."""
    return [
        (each.pid, each.laddr.ip)
        for each in psutil.net_connections(kind="inet")
        if each.pid in pids and each.laddr and (each.status == psutil.CONN_LISTEN or not each.raddr)
    ]


SOCKETS = ("hub", "client", "notes")


def unix_sockets(pids: set[int]) -> list[str]:
    """Return the names of the unix sockets that these processes hold; an abstract one begins with `@`."""
    inodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(path.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7] for line in lines if line[6] in inodes and len(line) > 7]


def test_all_that_listens_is_loopback_or_a_socket_in_a_private_directory(running):
    addresses = listening(running.processes)
    assert addresses  # the store of the ranks' process group
    assert [(pid, ip) for pid, ip in addresses if not ipaddress.ip_address(ip).is_loopback] == []
    names = set(unix_sockets(running.processes))
    assert names == {f"{running.private}/{name}" for name in SOCKETS}
    assert stat.S_IMODE(running.private.stat().st_mode) == 0o700


def test_all_that_is_written_lies_in_the_private_directory(running):
    names = {path.name for path in running.directory.iterdir()}
    assert names == {"program.py", "at-0", "at-1"}
    assert shared_memory() - running.world.shared == set()
    assert [path for path in running.world.temporary.iterdir() if path != running.private] == []


def test_no_secret_is_on_a_command_line_or_in_an_environment(running):
    secrets = [line for line in running.secrets.read_text().split() if len(line) >= 32]
    assert secrets
    for pid in running.processes:
        for name in ("cmdline", "environ", "comm"):
            shown = Path(f"/proc/{pid}/{name}").read_text()
            assert [secret for secret in secrets if secret in shown] == []


def test_no_rank_shares_a_session_or_a_process_group(running):
    """So the stop button's SIGINT, which goes to a whole process group, reaches no rank by itself."""
    assert {(os.getpgid(rank), os.getsid(rank)) for rank in running.ranks} == {
        (rank, rank) for rank in running.ranks
    }
    for part in running.parts.values():
        assert os.getpgid(part) != os.getpgid(running.pid)


def test_the_hub_refuses_a_stranger_that_has_no_token(running):
    """Whoever can reach the socket may send what he wants: nothing is unpickled, nobody is disturbed."""
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.IDENTITY, b"00000000/0/0")
    try:
        stranger.connect(f"ipc://{running.private / 'hub'}")
        for message in (b"", b"\xff" * 100, b"cos\nsystem\n(S'touch owned'\ntR."):
            stranger.send(message)
        assert not stranger.poll(200)
    finally:
        context.destroy(linger=0)
    assert not (running.directory / "owned").exists()


# --- the end of a kernel, for whatever reason ------------------------------------------------------

PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
import nblaunch
def at(place):
    pathlib.Path(DIRECTORY, f"{place}-{os.environ['RANK']}").touch()
"""

PHASES = {
    "while its ranks start": """
def job():
    time.sleep(1000)
""",
    "while its ranks are stuck in a collective": """
def job():
    from torch import distributed
    at("reached")
    if os.environ["RANK"] == "0":
        distributed.barrier()
    time.sleep(1000)
""",
    "while its ranks have children": """
def job():
    from torch.utils.data import DataLoader
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loader = iter(DataLoader(list(range(1000)), num_workers=2))
    next(loader)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            at("reached")
            time.sleep(1000)
        os._exit(0)
    time.sleep(1000)
""",
    "while it receives large values": """
def job():
    import torch
    value = torch.ones(100_000_000)
    at("reached")
    return value, value + 1
""",
}


class KernelHost:
    """A real ipykernel that runs a job."""

    def __init__(self, start_kernel, world: World, source: str) -> None:
        self.kernel = start_kernel(**world.environment)
        self.pid = self.kernel.pid
        if source:
            self.kernel.submit(source)

    def kill(self) -> None:
        self.kernel.kill()


@pytest.fixture(params=sampled(["kernel", "script"]))
def host(request, world, program, start_kernel):
    """Give `host(source)`: a script, or a notebook's kernel, that runs `source`."""

    def start(source: str):
        return program(source) if request.param == "script" else KernelHost(start_kernel, world, source)

    return start


@pytest.mark.slow_at(
    "script-while its ranks have children",
    "script-while it receives large values",
    "script-while its ranks are stuck in a collective",
    "script-while its ranks start",
    "kernel-while its ranks have children",
    "kernel-while its ranks start",
)
@pytest.mark.parametrize("phase", PHASES)
def test_kill_9_of_a_kernel_leaves_nothing(phase, host, world, tmp_path):
    started = host(
        f"DIRECTORY = {str(tmp_path)!r}\n{PRELUDE}\n{PHASES[phase]}\nresult = nblaunch.run(job, nproc=2)"
    )
    if "at(" in PHASES[phase]:
        wait_until(lambda: len(list(tmp_path.glob("reached-*"))) == 2, "both ranks have come there")
    else:
        wait_until(lambda: world.ranks(started.pid), "the first rank has been forked")
    started.kill()
    world.must_be_clean()


@pytest.mark.slow_at("script")
def test_kill_9_while_the_fork_server_starts_leaves_nothing(host, world):
    started = host("import time\nfrom nblaunch.client.local import local\nlocal().runtime\ntime.sleep(100)")
    wait_until(lambda: len(world.processes()) > 1, "the keeper has been started")
    started.kill()
    world.must_be_clean()


@pytest.mark.slow_at("SIGTERM", "SIGHUP")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda each: each.name)
def test_a_signal_that_ends_a_script_during_a_run_leaves_nothing(number, program, world, tmp_path):
    started = program(HEARS + STUCK)
    wait_until(lambda: stuck(tmp_path), "both ranks run their job")
    started.kill(number)
    assert started.process.returncode == -number
    world.must_be_clean()


ENDS = {
    "comes to its end": ("", 0),
    "calls sys.exit": ("import sys; sys.exit(3)", 3),
    "calls os._exit": ("import os; os._exit(3)", 3),
    "aborts": ("import os, signal; signal.raise_signal(signal.SIGABRT)", -signal.SIGABRT),
    "runs another program in its place": ("import os, sys; os.execv('/bin/true', ['true'])", 0),
    "ends while a daemon thread waits for a run": (
        """
def stuck():
    import os, pathlib, time
    pathlib.Path("at-" + os.environ["RANK"]).touch()
    time.sleep(1000)
import pathlib, threading, time
threading.Thread(target=nblaunch.run, args=(stuck,), kwargs={"nproc": 2}, daemon=True).start()
while not all(pathlib.Path(f"at-{rank}").exists() for rank in range(2)):
    time.sleep(0.01)
""",
        0,
    ),
}


@pytest.mark.slow_at(
    "aborts",
    "ends while a daemon thread waits for a run",
    "runs another program in its place",
    "comes to its end",
    "calls sys.exit",
)
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_script_that(end, program, world):
    statement, code = ENDS[end]
    ended = program(f"{JOB}\nkept = nblaunch.run(job, nproc=2)\n{statement}").finish()
    assert ended == (code, "", "")
    world.must_be_clean()


ENDS_WITH_A_SESSION = """
import atexit, sys, threading
import nblaunch

started, anew = [], threading.Event()
def hook(event, _):
    if event in ("subprocess.Popen", "tempfile.mkdtemp"):
        started.append(event)
        anew.set()
sys.addaudithook(hook)
atexit.register(lambda: print(started))
session = nblaunch.Session(2)
session.cell("here = rank")
atexit.register(anew.wait, 1)  # runs between what is registered before and after this line
nblaunch.doctor()
anew.clear()
started.clear()
"""


@pytest.mark.slow
def test_a_program_that_ends_with_a_session_starts_nothing_anew(program, world):
    """Whatever was imported first: an agent whose fork server ends before it would start others."""
    assert program(ENDS_WITH_A_SESSION).finish() == (0, "[]\n", "")
    world.must_be_clean()


TAKES_LONG = """
def live(*arguments):
    from datetime import timedelta
    from torch import distributed
    from nblaunch.host import rendezvous
    from nblaunch.runtime import runtime_main

    shut_down = rendezvous.LoopbackRendezvous.shutdown

    def takes_long(self):
        try:
            distributed.HashStore().wait(["never"], timedelta(seconds=0.5))
        except Exception:
            return shut_down(self)

    rendezvous.LoopbackRendezvous.shutdown = takes_long
    runtime_main.live(*arguments)
"""
STILL_LEAVING = """
import nblaunch
from nblaunch.client import local
local.LIVE = "takes_long:live"
print(nblaunch.run(int, nproc=2).values)
"""


@pytest.mark.slow
def test_a_program_that_ends_while_its_agent_is_inside_torch_ends_well(program, world, tmp_path):
    """A thread that comes back from C++ to an interpreter that has ended takes the process along."""
    (tmp_path / "takes_long.py").write_text(TAKES_LONG)
    assert program(STILL_LEAVING).finish() == (0, "[0, 0]\n", "")
    world.must_be_clean()


BREAKS = """
def live(*arguments):
    import os
    from nblaunch.host.hub import Hub
    from nblaunch.runtime import runtime_main

    tick = Hub._tick

    def breaks(self, now):
        if os.path.exists(os.environ["BREAKS"]):
            raise OSError("no such luck")
        tick(self, now)

    Hub._tick = breaks
    runtime_main.live(*arguments)
"""
BROKEN = """
import json, os, time
import nblaunch
from nblaunch.client import local
local.LIVE = "breaks:live"

def job():
    import os, time
    open(os.environ["BREAKS"], "w").close()
    time.sleep(1000)

session = nblaunch.Session(nproc=1)
began = time.monotonic()
try:
    session.run(job)
except nblaunch.LaunchError as error:
    seconds = time.monotonic() - began
    os.unlink(os.environ["BREAKS"])
    print(json.dumps([str(error), seconds, nblaunch.run(int, nproc=2).values]))
"""


def test_a_runtime_whose_thread_breaks_ends_and_says_why(program, world, tmp_path):
    """It would answer nobody any more."""
    (tmp_path / "breaks.py").write_text(BREAKS)
    code, out, err = program(BROKEN, BREAKS=str(tmp_path / "broken")).finish()
    assert (code, err) == (0, "")
    error, seconds, values = json.loads(out)
    assert error.startswith("nblaunch's runtime has ended, and all ranks with it. Its last words:")
    assert "OSError: no such luck" in error
    assert (seconds < 2, values) == (True, [0, 0])
    world.must_be_clean()


def test_nothing_is_left_of_a_kernel_that_was_shut_down_or_restarted(start_kernel, world):
    run = f"{JOB}\nkept = nblaunch.run(job, nproc=2)"
    kernel = start_kernel(**world.environment)
    kernel.ok(run)
    (first,) = world.temporary.iterdir()
    old = kernel.pid
    # The log file that it was started with is closed.
    kernel.manager.restart_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(
        lambda: old not in world.processes() and not first.exists(), "all of the old kernel is gone", 5
    )
    kernel.client.wait_for_ready(timeout=60)
    kernel.ok(f"%load_ext nblaunch\n{run}")
    (second,) = world.temporary.iterdir()
    kernel.manager.restart_kernel(now=True)
    wait_until(lambda: not second.exists(), "all of the killed kernel is gone", GONE_SECONDS)
    kernel.client.wait_for_ready(timeout=60)
    kernel.ok(run)
    kernel.client.shutdown()
    wait_until(
        lambda: not psutil.pid_exists(kernel.pid) or kernel.manager.provisioner.process.poll() is not None,
        "the kernel ends",
    )
    world.must_be_clean()


# --- what a run itself leaves ----------------------------------------------------------------------


@pytest.mark.slow
def test_shared_memory_that_a_rank_made_goes_with_it(program, world):
    """The rank's own resource tracker sees to it, as in any Python."""
    code, _, err = program("""
import nblaunch
def job():
    from multiprocessing import shared_memory
    shared_memory.SharedMemory(create=True, size=1000)
    import os
    os._exit(0)
nblaunch.run(job, nproc=2, check=False)
""").finish()
    assert (code, err) == (0, "")
    world.must_be_clean()


# --- odd places ------------------------------------------------------------------------------------


def test_a_temporary_directory_too_long_for_a_socket_is_replaced_by_another_private_one(world, program):
    long = world.temporary / ("long" * 40)
    long.mkdir()
    runtime = world.temporary / "run"
    runtime.mkdir()
    code, out, err = program(
        f"{JOB}\nfrom nblaunch.client.local import local\nroot = local().directory.root\n"
        "print(nblaunch.run(job, nproc=2).values, root().parent, oct(root().stat().st_mode & 0o777))",
        TMPDIR=str(long),
        XDG_RUNTIME_DIR=str(runtime),
    ).finish()
    assert (code, out, err) == (0, f"[0, 1] {runtime} 0o700\n", "")
    assert (list(long.iterdir()), list(runtime.iterdir())) == ([], [])
    long.rmdir()
    runtime.rmdir()
    world.must_be_clean()


@pytest.mark.slow
def test_names_with_spaces_and_letters_of_any_language_are_fine(world, tmp_path):
    directory = tmp_path / "ein Ördner"
    directory.mkdir()
    temporary = world.temporary / "für jetzt"
    temporary.mkdir()
    started = Program(
        world, directory, f"{JOB}\nprint(nblaunch.run(job, nproc=2).values)", TMPDIR=str(temporary)
    )
    assert started.finish() == (0, "[0, 1]\n", "")
    assert list(temporary.iterdir()) == []


# --- a fork of the kernel --------------------------------------------------------------------------

FORK = """
{JOB}
import gc, json, os, sys
from nblaunch.client.local import local
kept = nblaunch.run(job, nproc=2)
def ours():
    return [local().runtime.keeper.pid, str(local().directory.root())]
before = ours()
outcome = []
for action in {ACTIONS}:
    child = os.fork()
    if child == 0:
        exec(action)
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    values = nblaunch.run(job, nproc=2).values
    outcome.append([status, ours() == before, kept.log_dir is not None, values])
print(json.dumps(outcome))
"""


@pytest.mark.slow
def test_a_fork_of_the_kernel_removes_nothing_of_its_parent(finished, world):
    actions = ["os._exit(0)", "pass", "del kept; gc.collect()", "del kept; gc.collect(); os._exit(0)"]
    outcome = finished(FORK.format(JOB=JOB, ACTIONS=actions), PYTHONWARNINGS="ignore")
    assert outcome == [[0, True, True, [0, 1]]] * 4
    world.must_be_clean()


@pytest.mark.slow
def test_a_fork_of_the_kernel_runs_ranks_with_things_of_its_own(finished, world):
    action = (
        "values = nblaunch.run(job, nproc=2).values\n"
        "sys.exit(0 if values == [0, 1] and all(a != b for a, b in zip(ours(), before)) else 5)"
    )
    assert finished(FORK.format(JOB=JOB, ACTIONS=[action]), PYTHONWARNINGS="ignore") == [
        [0, True, True, [0, 1]]
    ]
    world.must_be_clean()


@pytest.mark.slow
def test_a_fork_of_a_kernel_with_a_session_ends_at_once_and_takes_nothing_along(finished, world):
    seconds, status, values = finished(
        """
import json, os, sys, time
import nblaunch
session = nblaunch.Session(nproc=2)
session.push({"kept": 7})
began = time.monotonic()
child = os.fork()
if child == 0:
    sys.exit(0)
status = os.waitpid(child, 0)[1]
seconds = time.monotonic() - began
values = session.pull("kept")["kept"]
session.close()
print(json.dumps([seconds, status, values]))
""",
        PYTHONWARNINGS="ignore",
    )
    assert (status, values) == (0, [7, 7])
    assert seconds < 10
    world.must_be_clean()


@pytest.mark.slow
def test_a_fork_that_outlives_the_kernel_does_not_keep_anything_alive(program, world):
    """A daemon that the user forked holds the kernel's descriptors; the keeper must not wait for it."""
    started = program(f"""
{JOB}
import os, time
nblaunch.run(job, nproc=2)
if os.fork() == 0:
    os.closerange(0, 3)
    time.sleep(1000)
os._exit(0)
""")
    started.finish()
    wait_until(lambda: len(world.processes()) == 1, "only the user's own daemon is left", GONE_SECONDS)
    assert list(world.temporary.iterdir()) == []
    for pid in world.processes():
        os.kill(pid, signal.SIGKILL)


# --- helpers that die ------------------------------------------------------------------------------


UNLUCKY = """
import sys
if "nblaunch.host.keeper" in str(sys.orig_argv):
    sys.modules["torch"] = None
"""


def test_a_fork_server_that_cannot_start_says_why(program, world, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(UNLUCKY)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, _, err = program(f"{JOB}\nnblaunch.run(job, nproc=2)", PYTHONPATH=path).finish()
    assert code == 1
    assert "LaunchError" in err
    assert "import of torch halted" in err
    world.must_be_clean()
