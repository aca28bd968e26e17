"""What every test stands on: a check that nothing is left behind, real kernels, scripts, terminal IPython.

All tests share one private temporary directory, and every process that they start inherits the variable
`MARK`. So whatever appears in that directory, and whoever carries that variable, comes from a test, also
when its parents are long gone.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import gc
import inspect
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import hypothesis
import psutil
import pytest
from gpus import gpu_kernel, gpu_session, shared_gpu_kernel, simulated, skip_without_gpus, visible
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_core.utils import run_sync
from patience import PATIENCE, eventually
from poked import NAME, Poke

__all__ = ["gpu_kernel", "gpu_session", "shared_gpu_kernel", "simulated", "visible"]
"""Fixtures that are defined elsewhere."""

hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=200, deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Ignored under nohup, or in the background of a shell: but tests send them, and libraries restore them.
for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "tests" / "unit"
QUICK_LANE = "not slow and not full"
"""The marks that pyproject.toml has pytest take."""
MARK = "NBLAUNCH_TESTS"
KERNEL_MARK = "NBLAUNCH_TEST_KERNEL"
KERNEL_ENVIRONMENT = {
    "NBLAUNCH_DISPLAY": "text",  # one display per run, the same everywhere
    "CUDA_VISIBLE_DEVICES": "",  # GPUs have tests of their own, in tests/gpu
    "PYTEST_CURRENT_TEST": "",  # a user's kernel, not one in which nbval compares a notebook
}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_KEEPER = "nblaunch.host.keeper"
_RUN_DIRECTORIES = ("group-", "logs-", "payload-")
_NOT_OURS = ("pytest-of-", "torchinductor_", "joblib_memmapping_folder_")
"""What pytest makes, torch once a user uses DDP on a CUDA build with Triton, and joblib while it runs."""
_CALLERS = ("PET_", "NBLAUNCH_", "TORCHELASTIC_", "PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")
"""Variables that would change what the tests, or a pytest that one of them starts, are about.

Compiled files are kept in any case: to compile all tests takes each process longer than to import them.
"""
_OTHER_PLACES = {"nodes", "notebook7"}
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@pytest.fixture(name="eventually", scope="session")
def eventually_fixture():
    """Give tests `eventually(condition, what, seconds)`."""
    return eventually


@pytest.fixture
def free(tmp_path):
    """Give a file that is not there yet; once it is, a cell that waits for it (`patience.waiting`) ends."""
    return tmp_path / "free"


# --- one place for all that tests make -------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give plain `pytest` a process more than there are cores, as tests wait half of the time.

    A file is run by one of them, as its tests share kernels and sessions. In order: by default the files with
    the fewest tests come last, which are those that start most.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    plain = whole and config.option.markexpr.strip() == QUICK_LANE
    chosen = getattr(config.option, "numprocesses", 0) is not None or config.option.usepdb
    if plain and not chosen and "PYTEST_XDIST_WORKER" not in os.environ:
        config.option.numprocesses = min(max(len(os.sched_getaffinity(0)) + 1, 2), 4)
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Have plain `pytest` read only files of which a test is its own: the others are as many again."""
    plain = config.option.markexpr.strip() == QUICK_LANE and config.args == config.getini("testpaths")
    if not plain or collection_path.suffix != ".py" or UNIT in collection_path.parents:
        return None
    return None if "pytest.mark.quick" in collection_path.read_text(encoding="utf-8") else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while all is imported, and none of it later: this would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure() -> None:
    """Give the session a temporary directory of its own (a short one: sockets live in it), and the mark."""
    private = Path(tempfile.mkdtemp(prefix="nbt-", dir="/tmp"))
    for name in [name for name in os.environ if name.startswith(_CALLERS)]:
        del os.environ[name]
    sys.dont_write_bytecode = False
    # Its own tests switch it on; elsewhere processes that nobody has asked for are in the way.
    os.environ["NBLAUNCH_STANDBY"] = "0"
    os.environ["TMPDIR"] = tempfile.tempdir = str(private)
    # The registry of sessions is in the last one, and not where the user's own sessions are.
    os.environ.pop("XDG_RUNTIME_DIR", None)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_STATE_HOME"):
        (private / name).mkdir()
        os.environ[name] = str(private / name)
    os.environ[MARK] = str(os.getpid())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to CI what is not in `tests/unit`, but for what is marked `quick`.

    What is marked `once` is left to the slow lane in all places but the first, and what is marked `slow_at`
    in those that are named.
    """
    for item in items:
        if UNIT not in item.path.parents and not item.get_closest_marker("quick"):
            item.add_marker("full")
        case, params = (item.callspec.id, item.callspec.params) if hasattr(item, "callspec") else ("", {})
        named = {case, *case.split("-"), *(each for each in params.values() if isinstance(each, str))}
        places = {each for mark in item.iter_markers("slow_at") for each in mark.args}
        if item.get_closest_marker("once"):
            places |= _OTHER_PLACES
        if not places.isdisjoint(named):
            item.add_marker("slow")


def pytest_unconfigure() -> None:
    """Remove the temporary directory."""
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are."""
    skip_without_gpus(item)


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note which tests fail: their results live on in the report."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


# --- nothing is left behind ------------------------------------------------------------------------


def processes(mark: str = MARK, value: str | None = None) -> dict[int, psutil.Process]:
    """Return every process but this one that carries `mark`, and all descendants of this one."""
    wanted = f"{mark}={os.environ[MARK] if value is None else value}".encode()
    found = {}
    if value is None:
        found = {each.pid: each for each in psutil.Process().children(recursive=True)}
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found[pid] = psutil.Process(pid)
    return found


def all_gone(what: str, mark: str = MARK, value: str | None = None) -> None:
    """Wait until no process carries `mark`; fail with those that do."""
    deadline = time.monotonic() + PATIENCE
    while found := processes(mark, value):
        if time.monotonic() > deadline:
            lines = "\n  ".join(describe(each) for each in found.values())
            pytest.fail(f"{what}, and yet these processes are alive:\n  {lines}", pytrace=False)
        time.sleep(0.01)


def command(process: psutil.Process) -> str:
    """Return a process's command line, empty if it is gone."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def describe(process: psutil.Process) -> str:
    """Return one line about a process."""
    try:
        return f"{process.pid} (child of {process.ppid()}, {process.status()}): {command(process)[:300]}"
    except psutil.Error:
        return f"{process.pid} (gone)"


def keepers_and_servers(found: Mapping[int, psutil.Process]) -> dict[int, psutil.Process]:
    """Return the keepers among processes, each with its first children: the fork server, and the runtime.

    All forks below a keeper have its command line, so a rank that was left behind is told by its place.
    """
    keepers = {}
    for pid, process in found.items():
        with contextlib.suppress(psutil.Error):
            if _KEEPER in command(process) and _KEEPER not in command(psutil.Process(process.ppid())):
                keepers[pid] = process
    allowed = dict(keepers)
    for keeper in keepers.values():
        with contextlib.suppress(psutil.Error):
            # The fork server, and the runtime or the node program.
            for child in sorted(keeper.children(), key=lambda each: each.create_time())[:2]:
                allowed[child.pid] = child
    return allowed


def shared_memory() -> set[str]:
    """Return what shared memory is there, by name."""
    with contextlib.suppress(OSError):
        return {path.name for path in SHARED_MEMORY.iterdir() if not path.name.startswith(_NOT_OURS)}
    return set()


def held_by_strangers(name: str) -> bool:
    """Return whether a process that is none of ours has an entry of /dev/shm open."""
    ours = {os.getpid(), *processes()}
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if pid not in ours and str(SHARED_MEMORY / name) in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


def open_files() -> dict[int, str]:
    """Return this process's descriptors and what they lead to."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(link.name)] = str(link.readlink())
    return found


def temporary_files() -> set[Path]:
    """Return what is in the temporary directory, and what runs keep in the runtime directories there."""
    here = Path(tempfile.gettempdir())
    kept: set[Path] = set()
    for each in _RUN_DIRECTORIES:
        with contextlib.suppress(FileNotFoundError):  # one that a program of the test has just removed
            kept.update(here.glob(f"nblaunch-*/{each}*"))
    return kept | {path for path in here.iterdir() if not path.name.startswith(_NOT_OURS)}


def free_connections() -> int:
    """Return whether this process keeps a connection to its runtime for the next run, beside its link."""
    local = sys.modules.get("nblaunch.client.local")
    runtime = None if local is None else local.local().started
    return 0 if runtime is None or runtime.keeper.poll() is not None else min(len(runtime._free), 1)


def is_plain_file(target: str) -> bool:
    """Return whether a descriptor leads to a file on a disk, or in memory."""
    ours = target.removesuffix(" (deleted)").endswith(("/runtime.log", "/forkserver.log"))
    return (
        target.startswith("/") and not target.startswith("/dev/") and ".coverage" not in target and not ours
    )


def has_process_group() -> bool:
    """Return whether this process has a default process group; does not load torch."""
    torch_distributed = sys.modules.get("torch.distributed")
    return torch_distributed is not None and torch_distributed.is_initialized()


def start_method() -> str | None:
    """Return how multiprocessing starts processes, None where nobody has chosen."""
    return multiprocessing.get_start_method(allow_none=True)


@dataclass
class ThisProcess:
    """This process before a test; `found()` lists what the test has changed. Looks at no other process."""

    handlers: dict[signal.Signals, Any] = field(
        default_factory=lambda: {each: signal.getsignal(each) for each in signal.Signals}
    )
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: Path = field(default_factory=Path.cwd)
    threads: set[int | None] = field(default_factory=lambda: {each.ident for each in threading.enumerate()})
    process_group: bool = field(default_factory=has_process_group)
    start_method: str | None = field(default_factory=start_method)
    ours: ClassVar[set[str]] = {"PYTEST_CURRENT_TEST"}

    def found(self, *, logs: bool) -> list[str]:  # noqa: ARG002 - `Leftovers` looks at logs
        """Return one line for each difference."""
        return list(self._this_process())

    def _this_process(self) -> Iterator[str]:
        for each, handler in self.handlers.items():
            # pytest-timeout takes its own away when a test has failed.
            if signal.getsignal(each) != handler and getattr(handler, "__module__", "") != "pytest_timeout":
                yield f"the handler of {each.name} was {handler} and is {signal.getsignal(each)}"
        for name in sorted((self.environment.keys() | os.environ.keys()) - self.ours):
            if self.environment.get(name) != os.environ.get(name):
                yield f"${name} was {self.environment.get(name)!r} and is {os.environ.get(name)!r}"
        if Path.cwd() != self.directory:
            yield f"the working directory was {self.directory} and is {Path.cwd()}"
        for thread in threading.enumerate():
            if thread.ident not in self.threads:
                yield f"the thread {thread.name!r} runs on"
        if has_process_group() != self.process_group:
            yield f"a default process group was {self.process_group} and is {has_process_group()}"
        if start_method() != self.start_method:
            yield f"multiprocessing's start method was {self.start_method} and is {start_method()}"


@dataclass
class Leftovers(ThisProcess):
    """This process, the processes below it and the file systems before a test.

    Listing all processes takes milliseconds, so it is done once before a test and once per check after it.
    """

    files: dict[int, str] = field(default_factory=open_files)
    free: int = field(default_factory=free_connections)
    others: Mapping[int, psutil.Process] = field(default_factory=processes)
    shared: set[str] = field(default_factory=shared_memory)
    temporary: set[Path] = field(default_factory=temporary_files)

    def __post_init__(self) -> None:
        self.servers = set(keepers_and_servers(self.others))

    def found(self, *, logs: bool) -> list[str]:
        """Return one line for each difference; `logs`: also results' private directories."""
        now = processes()
        allowed = keepers_and_servers(now)
        return [
            *self._this_process(),
            *self._descriptors(set(allowed)),
            *self._processes(now, allowed),
            *self._files(allowed, logs=logs),
        ]

    def _descriptors(self, servers: set[int]) -> Iterator[str]:
        files = open_files()
        new = {fd: target for fd, target in files.items() if self.files.get(fd) != target}
        yield from (f"descriptor {fd} is open: {to}" for fd, to in new.items() if is_plain_file(to))
        # The connections to a runtime come with the first run, and with its successors.
        first_use = servers != self.servers
        old = [target for target in self.files.values() if not target.startswith("/")]
        now = [target for target in files.values() if not target.startswith("/")]
        more = len(now) - len(old) - (free_connections() - self.free)
        if more > 0 and not first_use:
            yield f"{more} more sockets or pipes are open: {sorted(set(now) - set(old))}"

    def _processes(
        self, found: Mapping[int, psutil.Process], allowed: Mapping[int, psutil.Process]
    ) -> Iterator[str]:
        for pid, process in found.items():
            if pid not in self.others and pid not in allowed and process.is_running():
                yield f"the process {describe(process)} is alive"

    def _files(self, allowed: Mapping[int, psutil.Process], *, logs: bool) -> Iterator[str]:
        for name in sorted(shared_memory() - self.shared):
            if not held_by_strangers(name):
                yield f"{SHARED_MEMORY / name} is there"
        new = sorted(temporary_files() - self.temporary)
        commands = [command(each) for each in allowed.values()] if new else []
        for path in new:
            if path.name.startswith(_RUN_DIRECTORIES):
                if logs:
                    yield f"{path} is there, though no result needs it"
            elif not any(str(path) in each for each in commands):
                with contextlib.suppress(FileNotFoundError):  # it goes while this looks
                    found = path.rglob("*") if path.is_dir() else ()
                    inside = sorted(str(each.relative_to(path)) for each in found)
                    path.lstat()
                    yield f"{path} is there" + (f", with {inside[:10]}" if inside else "")


_USED = "gc, sys, threading, time"


def spare_modules() -> None:
    """Collect garbage, from now on without going through what has been imported; in kernels too.

    To go through all of torch takes a third of a second. What a run leaves must be collected, so nothing is
    exempted while one is under way.
    """
    gc.collect()
    if len(sys.modules) < getattr(sys, "modules_spared", 0) + 20:
        return
    sys.modules_spared = len(sys.modules)  # type: ignore[attr-defined]
    deadline = time.monotonic() + 1
    while any(each.name.startswith(("nblaunch-agent", "Rendezvous")) for each in threading.enumerate()):
        if time.monotonic() > deadline:
            return  # a session of the file's: its ranks stay until the last test
        time.sleep(0.01)
    gc.collect()
    gc.freeze()


def nothing_left(before: ThisProcess, *, logs: bool = True) -> None:
    """Wait until nothing of a test is left; fail with what there is."""
    deadline = time.monotonic() + PATIENCE
    collected = False
    while found := before.found(logs=logs):
        if not collected:
            # Results in a cycle (an error and its traceback) go when the collector comes.
            spare_modules()
            collected = True
        if time.monotonic() > deadline:
            pytest.fail("the test left this behind:\n  " + "\n  ".join(found), pytrace=False)
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request):
    """Compare this process, the processes below it and the file systems before and after each test.

    A module's tests on ranks share these: what is left is looked at when all have ended.
    """
    if request.node.get_closest_marker("distributed"):
        yield
        return
    before = Leftovers()
    yield
    nothing_left(before, logs=not request.node.stash.get(_failed, False))


@pytest.fixture(scope="session")
def leaves_nothing_after():
    """Give a context manager that makes the same check around a whole module."""

    @contextlib.contextmanager
    def checked() -> Iterator[None]:
        before = Leftovers()
        yield
        nothing_left(before)

    return checked


@pytest.fixture
def poke(monkeypatch):
    """Give `poke(code)`, which runs code in this process's runtime: one that is started for the test."""
    from nblaunch.client.local import local

    local().close()
    monkeypatch.setattr("nblaunch.client.local.LIVE", NAME)
    yield Poke()
    local().close()


@pytest.fixture(scope="module")
def own_runtime():
    """End this process's runtime behind a file: its fork server was started under the file's environment."""
    from nblaunch.client.local import local

    yield
    local().close()


@pytest.fixture(scope="session")
def leftovers():
    """Give the check itself, to be tested."""
    return Leftovers


@pytest.fixture
def unchanged_process(request):
    """Check this process alone: the handlers, the environment, the directory and the threads."""
    before = ThisProcess()
    yield
    nothing_left(before, logs=not request.node.stash.get(_failed, False))


@pytest.fixture(autouse=True, scope="session")
def ends_with_the_session():
    """At the very end end this process's runtime, and check that this ends all."""
    yield
    if "nblaunch.client.local" in sys.modules:
        from nblaunch.client.local import local

        local().close()
    all_gone("the tests are at their end")
    left = [path.name for path in Path(tempfile.gettempdir()).glob("nblaunch-*")]
    assert left == []


# --- kernels ---------------------------------------------------------------------------------------


def tidy(code: str) -> str:
    """Return a cell as it would stand in a notebook."""
    return textwrap.dedent(code).removeprefix("\n").removesuffix("\n")


@dataclass(frozen=True)
class KernelError:
    """The error of a cell, without colours; `traceback` is what the notebook shows."""

    ename: str
    evalue: str
    traceback: str


@dataclass
class Ran:
    """What came of one cell: output, displays (data by MIME type, updates applied), error, time."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    error: KernelError | None = None
    result: str | None = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Everything that the notebook shows, as text."""
        shown = [each.get("text/plain", "") for each in self.displays]
        return "\n".join([self.stdout, *shown])

    def __str__(self) -> str:
        error = self.error.traceback if self.error else "none"
        return f"stdout: {self.stdout}\nstderr: {self.stderr}\ndisplays: {self.text}\nerror: {error}"


# What is sent right after a failed cell must not be thrown away with what a notebook had queued behind it.
_ALONE = {"allow_stdin": False, "stop_on_error": False}


class Pending:
    """A cell that the kernel runs at this moment."""

    def __init__(self, kernel: Kernel, message: str) -> None:
        self._kernel = kernel
        self._message = message
        self._started = time.perf_counter()
        self._ran = Ran()
        self._ids: dict[str | None, int] = {}

    def finish(self, timeout: float = 60) -> Ran:
        """Wait for the cell's end and return what came of it; fail if it takes too long."""
        for kind, content in self._messages(timeout):
            self._take(kind, content)
        self._ran.seconds = time.perf_counter() - self._started
        return self._ran

    def shown(self, timeout: float = 60) -> Ran:
        """Wait until the notebook shows a display, or the cell has ended; return what there is."""
        for kind, content in self._messages(timeout):
            self._take(kind, content)
            if self._ran.displays:
                break
        return self._ran

    def _take(self, kind: str, content: Any) -> None:
        ran, ids = self._ran, self._ids
        match kind:
            case "stream" if content["name"] == "stdout":
                ran.stdout += content["text"]
            case "stream":
                ran.stderr += content["text"]
            case "execute_result":
                ran.result = content["data"].get("text/plain")
            case "display_data":
                ids[content.get("transient", {}).get("display_id")] = len(ran.displays)
                ran.displays.append(content["data"])
            case "update_display_data":
                ran.displays[ids[content["transient"]["display_id"]]] = content["data"]
            case "error":
                shown = _ANSI.sub("", "\n".join(content["traceback"]))
                ran.error = KernelError(content["ename"], _ANSI.sub("", content["evalue"]), shown)

    def _messages(self, timeout: float) -> Iterator[tuple[str, Any]]:
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = self._kernel.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                self._kernel.interrupt()
                pytest.fail(f"the cell did not end within {timeout:g} s")
            if message["parent_header"].get("msg_id") != self._message:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            yield kind, content


class Kernel:
    """A real ipykernel, with `%load_ext nblaunch` done, driven as a notebook drives it."""

    FIRST_CELL = "%load_ext nblaunch"

    def __init__(self, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.log = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"{self.mark}.log"
        """What the kernel's process itself writes, to no cell."""
        self.manager = KernelManager()
        launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=launch, display_name="test", language="python")
        env = {**os.environ, **KERNEL_ENVIRONMENT, "PYTHONPATH": python_path(), KERNEL_MARK: self.mark}
        with self.log.open("w") as log:
            self.manager.start_kernel(env={**env, **environment}, stdout=log, stderr=log)
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
            self.ok(self.FIRST_CELL)
            # So that collecting what a test leaves in the kernel does not go through all of torch.
            self.ok("import gc; gc.freeze()")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        return int(cast("LocalProvisioner", self.manager.provisioner).pid or 0)

    def submit(self, code: str) -> Pending:
        """Begin to run a cell."""
        return Pending(self, self.client.execute(tidy(code), **_ALONE))

    def run(self, code: str, timeout: float = 60) -> Ran:
        """Run a cell to its end, whatever that is."""
        return self.submit(code).finish(timeout)

    def ok(self, code: str, timeout: float = 60) -> Ran:
        """Run a cell that must not fail."""
        ran = self.run(code, timeout)
        if ran.error is not None:
            pytest.fail(f"the cell failed:\n{ran.error.traceback}\n{ran.stderr}", pytrace=False)
        return ran

    def fails(self, code: str, timeout: float = 60) -> KernelError:
        """Run a cell that must fail; return its error."""
        ran = self.run(code, timeout)
        if ran.error is None:
            pytest.fail(f"the cell was to fail, and did not:\n{ran}", pytrace=False)
        return ran.error

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the kernel, carried as JSON (a tuple becomes a list)."""
        dumped = f"__import__('json').dumps({expression}, default=repr)"
        self.drain()
        message = self.client.execute("", silent=True, user_expressions={"it": dumped}, **_ALONE)
        deadline = time.monotonic() + 60
        while True:
            reply = self.client.get_shell_msg(timeout=deadline - time.monotonic())
            if reply["parent_header"].get("msg_id") == message:
                break
        answer = reply["content"]["user_expressions"]["it"]
        if answer["status"] != "ok":
            pytest.fail(f"{expression}: {answer['ename']}: {answer['evalue']}", pytrace=False)
        return json.loads(ast.literal_eval(answer["data"]["text/plain"]))

    def drain(self) -> None:
        """Throw away replies that nobody waited for."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.client.get_shell_msg(timeout=0)

    def interrupt(self) -> None:
        """Do what the stop button does."""
        self.manager.interrupt_kernel()

    def complete(self, code: str) -> list[str]:
        """Return what the Tab key offers at the end of `code`."""
        reply = self.client.complete(code, reply=True, timeout=30)
        return list(reply["content"]["matches"])

    def forget(self) -> None:
        """Delete the notebook's variables and results, as a fresh kernel has none."""
        self.ok(
            """
            import gc, sys
            for name in ("last_type", "last_value", "last_traceback", "last_exc"):
                if hasattr(sys, name):
                    delattr(sys, name)
            # IPython keeps the last traceback that it formatted, and with it whatever its frames held.
            get_ipython().InteractiveTB.tb = get_ipython().SyntaxTB.tb = None
            get_ipython().reset(new_session=False)
            """
        )
        self.ok(
            f"import {_USED}\n{inspect.getsource(spare_modules)}\nspare_modules()\ndel spare_modules, {_USED}"
        )

    def close(self) -> None:
        """Shut the kernel down, as the notebook does; nothing of it may be left."""
        self.client.stop_channels()
        if self.manager.has_kernel:  # else the test has done so
            self.manager.shutdown_kernel()
        self.manager.cleanup_resources()
        self.manager.context.destroy(linger=0)
        all_gone("a kernel was shut down", KERNEL_MARK, self.mark)

    def all_gone(self, what: str) -> None:
        """Wait until no process of this kernel's is alive, its own included."""
        all_gone(what, KERNEL_MARK, self.mark)

    def kill(self) -> None:
        """Kill the kernel, and nothing else, with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


class Attaching(Kernel):
    """One that uses the runtimes of others: its own starts with its first use, not with the extension."""

    FIRST_CELL = """
        from nblaunch.client import local
        runtime, local.Client.runtime = local.Client.runtime, None
        %load_ext nblaunch
        local.Client.runtime = runtime
        del local, runtime
    """


@pytest.fixture(scope="session")
def kernel_client():
    """Make what jupyter_client keeps in a process (an event loop), before any test looks for leftovers."""
    run_sync(asyncio.sleep)(0)


@pytest.fixture(scope="session")
def kernels(kernel_client):  # noqa: ARG001 - the order matters
    """Give the class itself, for a fixture that starts kernels of another kind."""
    return Kernel


@pytest.fixture(scope="module")
def module_kernel(kernel_client):  # noqa: ARG001 - the order matters
    """Start the kernel that the tests of one module share."""
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(module_kernel):
    """Give a kernel without variables; its process is shared by the module."""
    yield module_kernel
    module_kernel.forget()


@pytest.fixture
def start_kernel(kernel_client):  # noqa: ARG001 - the order matters
    """Give `start_kernel(**environment)`: kernels of the test's own, shut down at its end."""
    started: list[Kernel] = []

    def start(kind: type[Kernel] = Kernel, **environment: str) -> Kernel:
        started.append(kind(**environment))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def detached_kernels(start_kernel, tmp_path, monkeypatch):
    """Give `start_kernel`, for kernels that leave detached sessions; these are ended, and none is listed.

    They have a registry of their own: this process may have sessions that other tests share.
    """
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield functools.partial(start_kernel, Attaching)
    from nblaunch.client import directory

    for name in directory.detached():
        directory.stop(name)
    listed = Path(os.environ["XDG_STATE_HOME"]) / "nblaunch"
    eventually(lambda: not [*listed.glob("*.json"), *listed.glob("*.lock")], "no session is listed")


# --- plain Python and terminal IPython -------------------------------------------------------------

Program = subprocess.CompletedProcess[str]

_TERMINAL = """
import sys
from IPython.terminal.interactiveshell import TerminalInteractiveShell
shell = TerminalInteractiveShell.instance(colors="nocolor", simple_prompt=True)
shell.history_manager.enabled = False
failed = False
for cell in {cells!r}:
    result = shell.run_cell(cell, store_history=True)
    failed = failed or not result.success
sys.exit(1 if failed else 0)
"""


@pytest.fixture
def script(tmp_path):
    """Give `script(source, *args)`: a file run as a program of its own, as `python script.py` does."""

    def run(source: str, *args: str, env: Mapping[str, str] | None = None) -> Program:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(source))
        return subprocess.run(
            [sys.executable, str(path), *args],
            cwd=tmp_path,
            env={**os.environ, **KERNEL_ENVIRONMENT, "PYTHONPATH": python_path(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


@pytest.fixture
def own():
    """Give what checks of the doctor use that need a runtime or a private directory."""
    from nblaunch.checks.own_runtime import DoctorRuntime

    with contextlib.closing(DoctorRuntime()) as made:
        yield made


@pytest.fixture
def terminal(script):
    """Give `terminal(cells)`: the cells, run one after the other in terminal IPython."""

    def run(cells: Sequence[str], env: Mapping[str, str] | None = None) -> Program:
        program: Program = script(_TERMINAL.format(cells=[tidy(each) for each in cells]), env=env)
        return program

    return run


def python_path() -> str:
    """Return a PYTHONPATH on which programs in other directories find the nblaunch under test."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
