"""An environment is made on a node once, whole or not at all; real uv, and wheels that are made here."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster
import msgspec
import psutil
import pytest
from hosts import hosts
from lanes import sampled
from patience import eventually
from wheels import add_wheel

from nblaunch.nodes.asking import Asking
from nblaunch.nodes.bootstrap import FAILED
from nblaunch.nodes.engine import NodeProgram, NodeRequest
from nblaunch.nodes.process import ProcessEngine
from nblaunch.nodes.sync_env import Wheels, made_before, name_of
from nblaunch.protocol.client import NodeEnvironment
from nblaunch.protocol.messages import EngineStatus

KEY = b"a-key-that-only-the-program-gets\n"
REPORT = "import sys, tiny; print(sys.prefix, tiny.VERSION, sys.stdin.read().strip(), *sys.argv[1:])"
SLOW = """#!/bin/sh
case " $* " in *" pip "*) : > {started}; sleep 60 & wait;; esac
exec {uv} "$@"
"""


@pytest.fixture(scope="module")
def uv():
    """Give the path of uv."""
    return cluster.own_uv()


class HostOfNodes:
    """A host on which environments are made: its cache, its programs, what this test has started there."""

    def __init__(self, directory: Path, uv: str) -> None:
        self.directory = directory
        self.cache, self.programs, self.wheels = (directory / each for each in ("cache", "bin", "wheels"))
        self.programs.mkdir()
        (self.programs / "uv").symlink_to(uv)
        # Where uv finds this version; most hosts have another one, which runs what is sent.
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (self.programs / name).symlink_to(os.path.realpath(sys.executable))
        add_wheel(self.wheels, "tiny", "1.0")
        self.environ = {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(directory)}
        self.environ |= {"XDG_CACHE_HOME": str(self.cache), "TMPDIR": os.environ["TMPDIR"]}
        self.environ |= {
            name: value for name, value in os.environ.items() if name.startswith("NBLAUNCH_TESTS")
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def wanted(self, *requirements: str, **more: Any) -> NodeEnvironment:
        sources = ("--no-index", f"--find-links {self.wheels}")
        fields = {"python": platform.python_version(), "platform": f"{sys.platform}-{platform.machine()}"}
        lines = requirements or ("tiny==1.0",)
        return NodeEnvironment(**{**fields, "requirements": lines, "sources": sources, **more})

    def path(self, wanted: NodeEnvironment) -> Path:
        return self.cache / "nblaunch" / "env" / name_of(wanted)

    def start(self, wanted: NodeEnvironment, python: str = sys.executable, **environ: str) -> Any:
        """Start a program in this environment, which reports."""
        program = made_before(NodeProgram(("-c", REPORT, "join"), KEY), wanted)
        started = subprocess.Popen(
            [python, *program.arguments],
            env={**self.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.append(started)

        def feed() -> None:
            with contextlib.suppress(BrokenPipeError), started.stdin as pipe:
                pipe.write(program.stdin)

        threading.Thread(target=feed, daemon=True).start()
        return started

    def run(self, wanted: NodeEnvironment, python: str = sys.executable, **environ: str) -> tuple[str, str]:
        """Run a program in this environment; return what it prints, and its errors."""
        started = self.start(wanted, python, **environ)
        return self.result(started)

    def result(self, started: Any) -> tuple[str, str]:
        printed, errors = started.stdout.read(), started.stderr.read()
        started.wait(60)
        return printed.decode(), errors.decode()

    def slow_uv(self, uv: str) -> Path:
        """Have a uv that never ends installing; return the file that is there once it has begun."""
        began = self.directory / "began"
        (self.programs / "uv").unlink()
        (self.programs / "uv").write_text(SLOW.format(started=began, uv=uv))
        (self.programs / "uv").chmod(0o755)
        return began

    def quick_uv(self, uv: str) -> None:
        (self.programs / "uv").unlink()
        (self.programs / "uv").symlink_to(uv)

    def left(self) -> list[str]:
        return sorted(each.name for each in (self.cache / "nblaunch" / "env").iterdir())

    def processes(self) -> list[psutil.Process]:
        """Return what runs with this host's cache."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if each.environ().get("XDG_CACHE_HOME") == str(self.cache) and each.status() != "zombie":
                    found.append(each)
        return found


@pytest.fixture
def host(tmp_path, uv) -> Iterator[HostOfNodes]:
    made = HostOfNodes(tmp_path, uv)
    yield made
    for each in made.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()
        for stream in (each.stdout, each.stderr):
            stream.close()
    for process in made.processes():
        process.kill()


def test_an_environment_is_made_once_and_the_program_runs_in_it(host):
    wanted = host.wanted()
    printed, errors = host.run(wanted)
    assert printed.split() == [str(host.path(wanted)), "1.0", KEY.decode().strip(), "join"]
    assert errors.splitlines() == ["nblaunch is installing 1 packages", "nblaunch is starting"]
    (host.programs / "uv").unlink()
    began = time.monotonic()
    again, errors = host.run(wanted)
    assert time.monotonic() - began < 2
    assert (again, errors) == (printed, "")
    root = host.path(wanted).parent
    assert root.stat().st_mode & 0o777 == 0o700
    assert host.left() == [name_of(wanted), f"{name_of(wanted)}.lock"]


def test_what_uv_leaves_in_its_temporary_directory_goes(host, uv):
    wrapped = host.programs / "uv"
    wrapped.unlink()
    wrapped.write_text(
        f'#!/bin/sh\necho "$TMPDIR" >> {host.directory}/seen\n: > "$TMPDIR/uv.lock"\nexec {uv} "$@"\n'
    )
    wrapped.chmod(0o755)
    host.run(host.wanted())
    seen = {Path(line) for line in (host.directory / "seen").read_text().split()}
    assert seen
    assert not any(each.exists() for each in seen)


def test_an_environment_whose_python_another_host_has_is_named(host):
    wanted = host.wanted()
    host.run(wanted)
    python = host.path(wanted) / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    printed, errors = host.run(wanted)
    assert printed == ""
    assert f"Remove {host.path(wanted)}, or set XDG_CACHE_HOME" in errors


def test_other_packages_have_an_environment_of_their_own(host):
    add_wheel(host.wheels, "tiny", "2.0")
    printed = [host.run(host.wanted(f"tiny=={version}"))[0].split()[:2] for version in ("1.0", "2.0")]
    assert [version for _, version in printed] == ["1.0", "2.0"]
    assert printed[0][0] != printed[1][0]


def test_a_wheel_that_is_sent_is_installed(host):
    add_wheel(host.directory / "elsewhere", "sent", "3.0")
    (file,) = (host.directory / "elsewhere").iterdir()
    wanted = host.wanted(files=((file.name, file.read_bytes()),))
    host.run(wanted)
    assert list(host.path(wanted).glob("lib/python*/site-packages/sent.py"))


def test_two_programs_of_a_host_make_it_once(host):
    wanted = host.wanted()
    both = [host.start(wanted) for _ in range(2)]
    printed, errors = zip(*[host.result(each) for each in both], strict=True)
    assert printed[0] == printed[1] != ""
    assert "".join(errors).count("installing") == 1


def test_who_waits_for_another_program_says_so(host, uv):
    began = host.slow_uv(uv)
    first = host.start(host.wanted())
    eventually(began.exists, "it installs")
    second = host.start(host.wanted())
    assert second.stderr.readline() == b"nblaunch is waiting until the packages are installed\n"
    host.quick_uv(uv)
    first.kill()
    assert host.result(second)[0].split()[1] == "1.0"


@pytest.mark.parametrize("how", sampled(["SIGTERM", "SIGKILL", "SIGINT", "SIGHUP", "hung up"], ci=2))
def test_an_installation_that_is_given_up_leaves_no_process_and_nothing_that_is_used(host, uv, how):
    began = host.slow_uv(uv)
    wanted = host.wanted()
    started = host.start(wanted)
    eventually(began.exists, "it installs")
    if how == "hung up":
        started.stdout.close()
        started.stderr.close()
    else:
        started.send_signal(signal.Signals[how])
    since = time.monotonic()
    started.wait(10)
    assert time.monotonic() - since < 1
    if how == "SIGKILL":  # of what uv has started nobody knows then
        eventually(lambda: all(each.name() == "sleep" for each in host.processes()), "uv has ended")
        for each in host.processes():
            each.kill()
    eventually(lambda: not host.processes(), "no process is left")
    assert not host.path(wanted).exists()
    if how != "SIGKILL":
        assert host.left() == [f"{name_of(wanted)}.lock"]
    host.quick_uv(uv)
    assert host.run(wanted)[0].split()[1] == "1.0"
    assert host.left() == [name_of(wanted), f"{name_of(wanted)}.lock"]


def test_a_signal_while_uv_is_being_started_leaves_no_process(host):
    uv = host.programs / "uv"
    uv.unlink()
    uv.write_text("#!/bin/sh\nsleep 60 & kill -TERM $PPID; wait\n")
    uv.chmod(0o755)
    for started in [host.start(host.wanted(f"tiny=={number}")) for number in range(5)]:
        assert started.wait(10) == 128 + signal.SIGTERM
    eventually(lambda: not host.processes(), "no process is left")


@pytest.mark.parametrize(
    ("requirements", "more", "said"),
    [
        (("tiny==1.0", "tiny2==4.2"), {}, "No index has tiny2"),
        (("tiny==9.9+cpu",), {}, "No index has tiny==9.9+cpu. Add the index that it came from"),
        (
            ("tiny==9.9",),
            {"sources": ("--no-index", "--find-links /nowhere/at/all")},
            "Only the notebook's machine has /nowhere/at/all.",
        ),
        ((), {"python": "3.99.1"}, "there is no environment of Python 3.99:"),
        ((), {"platform": "darwin-arm64"}, "the notebook's packages are for darwin-arm64, and this is "),
    ],
)
def test_what_cannot_be_made_is_named(host, requirements, more, said):
    started = host.start(host.wanted(*requirements, **more), UV_PYTHON_DOWNLOADS="never")
    printed, errors = host.result(started)
    assert (printed, started.returncode) == ("", FAILED)
    assert said in errors
    assert not [each for each in host.left() if not each.endswith(".lock")] if host.cache.exists() else True


def test_any_patch_version_of_the_notebooks_python_will_do(host):
    (host.programs / f"python{sys.version_info.major}.{sys.version_info.minor}").unlink()
    wanted = host.wanted(python=f"{sys.version_info.major}.{sys.version_info.minor}.99")
    assert host.run(wanted, UV_PYTHON_DOWNLOADS="never")[0].split()[1] == "1.0"


@contextlib.contextmanager
def index_of_this_machine(directory: Path) -> Iterator[str]:
    """Serve a directory of wheels on the loopback address; give its URL."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}/"
        finally:
            served.shutdown()
            thread.join()


def test_a_host_without_a_network_to_an_index_gets_the_wheels_from_the_notebooks_machine(host, tmp_path):
    began = tmp_path / "began"
    does = f"import tiny, time; open({str(began)!r}, 'x').close(); time.sleep(100)"
    program = NodeProgram(("-c", does), KEY)
    ended: list[str] = []
    with hosts(1) as made, index_of_this_machine(host.wheels) as url:
        script = tmp_path / "python-of-hA"
        script.write_text(
            f'#!/bin/sh\nexec {shlex.join(made.command("hA", [cluster.plain_python()]))} "$@"\n'
        )
        script.chmod(0o700)
        environ = {**host.environ, "UV_HTTP_RETRIES": "0", "UV_CACHE_DIR": str(tmp_path / "uv")}
        request = NodeRequest(
            least=1, most=1, nproc=1, name="nb", environ=environ, cwd="/", python=str(script)
        )
        wanted = host.wanted(sources=("--no-index", f"--find-links {url}"))
        private = tmp_path / "private"
        private.mkdir()
        wheels = Wheels(wanted, request, private)
        said: list[EngineStatus] = []
        asking = Asking(
            ProcessEngine,
            request,
            lambda: made_before(program, wanted, wheels.files()),
            said.append,
            ended.append,
            fetch=wheels.fetch,
        )
        asking.start()
        try:
            eventually(lambda: ended or began.exists(), "it runs", 60)
            assert ended == []
            assert any("packages that the notebook's machine fetches" in each.words for each in said)
        finally:
            asking.stop()
            wheels.end()
        assert list(private.iterdir()) == []
    assert list(host.path(wanted).glob("lib/python*/site-packages/tiny.py"))
    assert host.run(wanted)[0].split()[1] == "1.0", "the next one finds it, and is sent nothing"


def test_a_host_without_uv_gets_that_of_the_notebook_or_says_so(host, uv):
    (host.programs / "uv").unlink()
    _, errors = host.run(host.wanted(), cluster.plain_python())
    assert errors.startswith("there is no uv here. Run pip install uv with ")
    printed, errors = host.run(host.wanted(uv=os.fsencode(uv)), cluster.plain_python())
    assert (printed.split()[1], errors.splitlines()[0]) == ("1.0", "nblaunch is installing 1 packages")
    (kept,) = [each for each in host.left() if each.startswith("uv-")]
    assert (host.path(host.wanted()).parent / kept).read_bytes() == Path(uv).read_bytes()
    add_wheel(host.wheels, "tiny", "2.0")
    other = host.wanted("tiny==2.0", uv=os.fsencode(uv))
    assert host.run(other, cluster.plain_python())[0].split()[1] == "2.0", "with the one it has"


@pytest.mark.parametrize("cut", sampled(["the key", "uv", "the source", "the order"], ci=2))
def test_what_arrives_in_part_is_not_used(host, uv, cut):
    (host.programs / "uv").unlink()
    program = made_before(NodeProgram(("-c", REPORT), KEY), host.wanted(uv=os.fsencode(uv)))
    order = program.stdin.index(b'{"name":')
    sizes = {"the key": len(KEY), "the source": order // 2, "the order": order + 50, "uv": order + 100_000}
    ran = subprocess.run(
        [cluster.plain_python(), *program.arguments],
        env=host.environ,
        input=program.stdin[: sizes[cut]],
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (FAILED, b"nobody waits for it any more\n")
    assert not host.cache.exists() or host.left() == []


def test_a_copy_of_uv_that_nobody_completed_is_removed_later(host):
    root = host.path(host.wanted()).parent
    new, old = (root / f"uv-{name}.half-x" for name in ("new", "old"))
    for each in (new, old):
        each.mkdir(parents=True)
        (each / "uv").touch()
    os.utime(old, (0, 0))
    assert host.run(host.wanted())[0].split()[1] == "1.0"
    assert new.exists(), "another process may write it"
    assert not old.exists()


def test_no_command_line_and_no_environment_has_a_key_or_a_password(host, uv):
    began = host.slow_uv(uv)
    secret = "sesame" + os.urandom(4).hex()
    plain = host.wanted()
    host.start(msgspec.structs.replace(plain, sources=(f"--index-url https://ann:{secret}@127.0.0.1:9",)))
    eventually(began.exists, "it installs")
    files = [each for each in host.path(plain).parent.rglob("*") if each.is_file()]
    assert any(secret in each.read_text(errors="replace") for each in files), "it is where uv reads it"
    for name in ("cmdline", "environ"):
        for each in host.processes():
            text = Path(f"/proc/{each.pid}/{name}").read_bytes()
            assert secret.encode() not in text
            assert KEY.strip() not in text


OLD = Path.home() / ".pyenv" / "versions"


@pytest.mark.parametrize("minor", [6, 8, 9])
def test_an_older_python_makes_it_or_says_that_it_is_too_old(host, minor):
    found = next(iter(sorted(OLD.glob(f"3.{minor}.*/bin/python3"))), None) or shutil.which(f"python3.{minor}")
    if found is None:
        pytest.skip(f"Python 3.{minor} is not here")
    printed, errors = host.run(host.wanted(python=platform.python_version()), str(found))
    if minor < 8:
        assert errors.startswith("--sync-env needs Python 3.8 or newer on the node")
    else:
        assert printed.split()[1] == "1.0", errors
