"""The doctor names what would make runs fail here, says what to do, and cannot fail itself."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import nblaunch
from nblaunch import _notebook, _runtime_dir
from nblaunch.checks import gpu, notebook, resources
from nblaunch.checks import processes as checks
from nblaunch.checks.doctor import Check, examine
from nblaunch.checks.doctor import checks as all_checks
from nblaunch.checks.own_runtime import DoctorRuntime
from nblaunch.checks.report import DoctorReport, Level, ok, problem, warning
from nblaunch.client.local import local

BOUND = 5.0
MIB = 1 << 20
GIB = 1 << 30

CHECKS = all_checks(DoctorRuntime())


def only(findings):
    """Return the one finding of a check."""
    (finding,) = findings
    return finding


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError


# --- the whole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("x\ny"), SystemExit(3), KeyboardInterrupt(), UnprintableError()]
)
def test_it_never_raises_even_if_every_check_does(error):
    def fail():
        raise error

    report = examine([Check(each.name, fail) for each in CHECKS])
    assert [each.name for each in report.findings] == [each.name for each in CHECKS]
    for each in report.findings:
        assert each.level is Level.WARNING
        assert each.summary.startswith(f"could not be checked: {type(error).__name__}")
        assert "\n" not in each.summary


def test_it_never_raises_even_if_a_check_breaks_half_way():
    def half():
        yield ok("half", "one")
        raise ValueError

    assert only(examine([Check("half", half)]).findings).level is Level.WARNING


def test_checks_that_hang_cost_their_time_once_and_not_the_other_findings():
    free = threading.Event()

    def hang():
        free.wait()
        return []

    hanging = [Check(f"stuck {number}", hang, seconds=0.2, if_stuck="Wait.") for number in range(5)]
    try:
        report = examine([*hanging, Check("fine", lambda: [ok("fine", "so")])])
    finally:
        free.set()
        for thread in threading.enumerate():
            if thread.name.startswith("nblaunch-doctor"):
                thread.join()
    assert report.seconds < 1
    assert [each.level for each in report.findings] == [*[Level.WARNING] * 5, Level.OK]
    assert report.findings[0].summary == "no answer within 0.2 s; a thread goes on waiting for it"
    assert report.findings[0].advice == "Wait."


def test_a_process_that_may_start_no_thread_is_looked_at_all_the_same(monkeypatch):
    def refuse(_self):
        msg = "can't start new thread"
        raise RuntimeError(msg)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert only(examine([Check("fine", lambda: [ok("fine", "so")])]).findings).summary == "so"


def test_every_check_ends_before_the_whole_must():
    assert max(each.seconds for each in CHECKS) < BOUND
    assert len({each.name for each in CHECKS}) == len(CHECKS)


# --- GPUs, as `nvidia-smi` tells of them ----------------------------------------------------------------


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Give `nvidia_smi(gpus, processes=..., peers=..., header=..., code=...)`: a driver that answers so."""

    def install(gpus="", *, processes="", peers="", header="", code=0):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "nvidia-smi"
        answers = {"--query-gpu*": gpus, "--query-compute*": processes, "topo*": peers, "*": header}
        cases = "".join(f"{pattern}) cat <<END\n{text}\nEND\n;;\n" for pattern, text in answers.items())
        program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\nexit {code}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return program

    return install


@pytest.fixture
def made_for_cuda(monkeypatch):
    """Let this torch pass for one that was made for CUDA."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


TWO = "0, GPU-a, NVIDIA L4, 23034, 22000\n1, GPU-b, NVIDIA L4, 23034, 22000"
T4 = "0, GPU-a, Tesla T4, 15360, 15000"
PEERS = " \tGPU0\tGPU1\t\n GPU0\tX\t{0}\t\n GPU1\t{0}\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok"


@pytest.mark.usefixtures("made_for_cuda")
def test_gpus_are_listed_with_their_free_memory_and_peers(nvidia_smi):
    nvidia_smi(TWO, peers=PEERS.format("OK"), header="Driver Version: 560.1  CUDA Version: 12.6")
    assert list(gpu.gpus()) == [
        ok("GPU 0", "NVIDIA L4, 21.5 GiB free of 22.5 GiB, nothing held by this kernel"),
        ok("GPU 1", "NVIDIA L4, 21.5 GiB free of 22.5 GiB, nothing held by this kernel"),
        ok("peer-to-peer", "1 of 1 pairs of GPUs can read each other's memory"),
    ]


@pytest.mark.parametrize(
    ("answers", "level", "words"),
    [
        ({"gpus": TWO, "peers": PEERS.format("CNS")}, "warning", "each other's memory: 0-1 -> "),
        (
            {"gpus": T4, "header": "| Driver Version: 470.1  CUDA Version: 11.4 |"},
            *("problem", "the driver knows CUDA up to 11.4; torch was made for CUDA 12.6 -> "),
        ),
        ({"gpus": "0, GPU-a, NVIDIA A100, [N/A], [N/A]"}, "ok", "does not tell its memory"),
        ({"gpus": "Driver/library version mismatch", "code": 18}, "problem", "library version mismatch"),
        ({"gpus": "No devices were found", "code": 6}, "ok", "none: ranks run on the CPU"),
    ],
    ids=["peers", "driver", "memory", "failure", "none"],
)
@pytest.mark.usefixtures("made_for_cuda")
def test_what_is_wrong_with_gpus_is_told_in_the_drivers_words(nvidia_smi, answers, level, words):
    nvidia_smi(**answers)
    found = [f"{each.level}: {each.summary} -> {each.advice}" for each in gpu.gpus()]
    assert any(each.startswith(level) and words in each for each in found), found


@pytest.mark.usefixtures("made_for_cuda")
def test_what_this_very_kernel_holds_on_a_gpu_is_told_from_what_others_hold(nvidia_smi):
    # The shell's $PPID is this process, as a real driver's list has it.
    nvidia_smi(
        "0, GPU-a, NVIDIA L4, 23034, 13000\n1, GPU-b, NVIDIA L4, 23034, 1000",
        processes="GPU-a, $PPID, 9000\nGPU-a, 1, 400\nGPU-b, 1, 22000",
    )
    mine, theirs, _ = gpu.gpus()
    assert mine.level is Level.WARNING
    assert "8.8 GiB held by this kernel" in mine.summary
    assert "torch.cuda.empty_cache()" in mine.advice
    assert theirs.level is Level.WARNING
    assert "nothing held by this kernel" in theirs.summary
    assert "Other processes" in theirs.advice


@pytest.mark.usefixtures("made_for_cuda")
def test_where_the_driver_names_no_processes_torch_tells_what_it_holds(nvidia_smi, monkeypatch):
    """As in a container, whose process ids the driver does not know."""
    import torch

    nvidia_smi("0, GPU-a, NVIDIA L4, 23034, 13000")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 9 * GIB)
    assert "9.0 GiB held by this kernel" in only(gpu.gpus()).summary
    assert "which ranks do not mind" in only(checks.build()).summary


def test_gpus_that_this_torch_cannot_use_are_named(nvidia_smi, monkeypatch):
    import torch

    nvidia_smi("0, GPU-a, Tesla T4, 15360, 15000")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "made for the CPU" in next(iter(gpu.gpus())).summary
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = next(iter(gpu.gpus()))
    assert found.level is Level.WARNING
    assert "hidden by CUDA_VISIBLE_DEVICES=''" in found.summary


def test_a_driver_that_hangs_is_a_warning_in_time_and_its_process_is_killed(nvidia_smi):
    nvidia_smi().write_text("#!/bin/sh\nexec sleep 60\n")
    started = time.monotonic()
    found = only(gpu.gpus())
    assert time.monotonic() - started < BOUND
    assert found.level is Level.WARNING
    assert found.summary == "nvidia-smi gave no answer within 3.5 s"


# --- torch and versions ---------------------------------------------------------------------------------


def test_what_is_too_old_or_not_installed_is_a_problem(monkeypatch):
    needed = ["msgspec>=99.0", "no-such-package>=1.2", "pytest>=99; extra == 'test'"]
    monkeypatch.setattr(metadata, "requires", lambda _: needed)
    old, missing = notebook.versions()
    assert old.level is missing.level is Level.PROBLEM
    assert old.summary.startswith("msgspec ")
    assert old.summary.endswith("is installed, and nblaunch needs 99.0 or later")
    assert missing.advice == "pip install 'no-such-package>=1.2'"


# --- one check each -------------------------------------------------------------------------------------


def raising(error):
    def fail(*_):
        raise error

    return fail


def disk(total, free):
    state = SimpleNamespace(f_bavail=free // 4096, f_blocks=total // 4096, f_frsize=4096)
    return lambda m: m.setattr(os, "statvfs", lambda _: state)


def nccl(**variables):
    def change(m):
        m.setattr("torch.distributed.is_nccl_available", lambda: True)
        m.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
        for name, value in variables.items():
            m.setenv(name, value)

    return change


def threads(value):
    def change(m):
        m.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        m.setenv("OMP_NUM_THREADS", value) if value else m.delenv("OMP_NUM_THREADS", raising=False)

    return change


def no_address(m):
    m.setattr(socket, "gethostname", lambda: "box")
    m.setattr(socket, "getaddrinfo", raising(socket.gaierror(socket.EAI_NONAME, "not known")))


def without_ipywidgets(m):
    m.setattr(_notebook, "shell", lambda: SimpleNamespace(kernel=SimpleNamespace(comm_manager=object())))
    m.delenv("NBLAUNCH_DISPLAY", raising=False)
    m.delenv("PYTEST_CURRENT_TEST")
    m.setattr(notebook, "_installed", lambda name: None if name == "ipywidgets" else "7.4.0")


SHM = resources.shared_memory
# What is changed; the check, the level and words of its one finding.
FOUND = {
    "no gloo": (
        lambda m: m.setattr("torch.distributed.is_gloo_available", lambda: False),
        *(checks.build, "problem", "Ranks on the CPU need gloo"),
    ),
    "no torch.distributed": (
        lambda m: m.setattr("torch.distributed.is_available", lambda: False),
        *(checks.build, "problem", "without torch.distributed"),
    ),
    "NCCL": (nccl(), checks.nccl, "ok", "2.27.3 -> "),
    "slow NCCL": (nccl(NCCL_P2P_DISABLE="1"), checks.nccl, "warning", "2.27.3, NCCL_P2P_DISABLE=1 -> "),
    "installed after it was loaded": (
        lambda m: m.setattr("zmq.__version__", "1.0"),
        *(notebook.versions, "warning", "pyzmq 1.0 is loaded here, and "),
    ),
    "no package": (
        lambda m: m.setattr(metadata, "requires", raising(metadata.PackageNotFoundError())),
        *(notebook.versions, "ok", "not installed as a package"),
    ),
    "no memory files": (
        lambda m: m.delattr(os, "memfd_create"),
        *(checks.hand_over, "warning", "below TMPDIR"),
    ),
    "no pidfd": (
        lambda m: m.delattr(os, "pidfd_open"),
        *(checks.process_control, "ok", "no pidfd_open"),
    ),
    "no prctl": (
        lambda m: m.setattr(checks, "_CHILD", checks._CHILD.replace("36, 1", "-1, 1")),
        *(checks.process_control, "warning", "prctl refuses: subreaper -> "),
    ),
    "a rank": (lambda m: m.setenv("RANK", "0"), checks.this_process, "warning", "(RANK)"),
    "no address": (no_address, checks.hostname, "warning", "`127.0.1.1 box`"),
    "no loopback": (
        lambda m: m.setattr(checks, "_LOOPBACK", "192.0.2.1"),  # reserved for documentation: nobody's
        *(checks.loopback, "problem", "192.0.2.1 cannot be connected to"),
    ),
    "shared memory": (disk(8 * GIB, 8 * GIB), SHM, "ok", "8.0 GiB free"),
    "small shared memory": (disk(64 * MIB, 64 * MIB), SHM, "warning", "--shm-size=8g"),
    "full small shared memory": (disk(64 * MIB, 1 * MIB), SHM, "problem", "--shm-size=8g"),
    "full shared memory": (disk(8 * GIB, 100 * MIB), SHM, "warning", "Remove what dead processes"),
    "no shared memory": (
        lambda m: m.setattr(resources, "_SHARED", "/dev/no-such-directory"),
        *(SHM, "problem", "not there"),
    ),
    "threads unset": (threads(""), resources.threads, "ok", "on 1 of 8 CPUs"),
    "threads": (threads("4"), resources.threads, "ok", "OMP_NUM_THREADS=4"),
    "threads by level": (threads("4,2"), resources.threads, "ok", "OMP_NUM_THREADS=4,2"),
    "too many threads": (threads("5"), resources.threads, "warning", "more threads than there are CPUs"),
    "an unknown display": (
        lambda m: m.setenv("NBLAUNCH_DISPLAY", "widgets"),
        *(notebook.front_end, "problem", " -> Set it to widget."),
    ),
    "no display": (
        lambda m: m.setenv("NBLAUNCH_DISPLAY", "?"),
        *(notebook.front_end, "problem", " -> Set it to one of them"),
    ),
    "no ipywidgets": (without_ipywidgets, notebook.front_end, "problem", "pip install ipywidgets"),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_would_go_wrong_is_named_with_what_to_do(monkeypatch, case):
    change, check, level, words = FOUND[case]
    change(monkeypatch)
    found = only(check())
    assert found.level == level
    assert words in f"{found.summary} -> {found.advice}"


# --- network --------------------------------------------------------------------------------------------


@pytest.mark.full  # it starts a runtime
def test_a_resolver_that_hangs_does_not_hang_the_doctor(monkeypatch):
    asked, free = threading.Event(), threading.Event()

    def hang(*_):
        asked.set()
        free.wait()
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        report = nblaunch.doctor()
    finally:
        free.set()
    assert asked.is_set()
    assert report.seconds < BOUND
    found = only(each for each in report.findings if each.name == "hostname")
    assert found.level is Level.WARNING
    assert found.summary == "no answer within 2 s; a thread goes on waiting for it"
    assert "/etc/hosts" in found.advice


# --- disks and memory -----------------------------------------------------------------------------------


def test_a_full_disk_is_a_problem_before_a_run_finds_out(monkeypatch, own):
    for free, level in ((1 * MIB, Level.PROBLEM), (500 * MIB, Level.WARNING), (50 * GIB, Level.OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert only(resources.temporary_directory(own)).level is level


def test_no_place_for_a_runtime_directory_is_a_problem(monkeypatch, own):
    gone = Path(tempfile.gettempdir()) / "gone"  # a short path, as a socket needs
    monkeypatch.setattr(_runtime_dir, "_candidates", lambda: [str(gone)])
    found = only(resources.temporary_directory(own))
    assert found.level is Level.PROBLEM
    assert "No such file or directory" in found.summary


def test_a_disk_that_refuses_sockets_is_a_problem(monkeypatch, own, tmp_path):
    monkeypatch.setattr(own.directory, "root", lambda: tmp_path / ("y" * 120))
    (tmp_path / ("y" * 120)).mkdir()
    found = only(resources.temporary_directory(own))
    assert found.level is Level.PROBLEM
    assert "unix socket" in found.summary


def test_directories_of_dead_kernels_are_named_and_those_of_living_ones_are_not(own):
    ours = [local().directory.root(), own.directory.root()]
    dead = Path(tempfile.mkdtemp(prefix=_runtime_dir.PREFIX))
    bound = Path(tempfile.mkdtemp(prefix=_runtime_dir.PREFIX))
    young = Path(tempfile.mkdtemp(prefix=_runtime_dir.PREFIX))
    others = Path(tempfile.mkdtemp(prefix=_runtime_dir.PREFIX))
    others.chmod(0o755)
    an_hour_ago = time.time() - 3600
    try:
        with socket.socket(socket.AF_UNIX) as hub:
            hub.bind(str(bound / "hub"))
            for each in (dead, bound, others, *ours):
                os.utime(each, (an_hour_ago, an_hour_ago))
            found = only(resources.leftovers(own))
    finally:
        for each in (dead, bound, young, others):
            shutil.rmtree(each)
    assert found.level is Level.WARNING
    assert found.summary == f"1 directory of dead kernels: {dead}"
    assert only(resources.leftovers(own)).level is Level.OK


def cgroup(tmp_path, own, **files):
    """Make the files of a cgroup file system; `_` in a name is a `.` in the file's."""
    root, proc = tmp_path / "cgroup", tmp_path / "own"
    proc.write_text(own)
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("memory_", "memory.").replace("pids_", "pids.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    real = resources.cgroups
    return lambda controller: list(real(controller, root=root, own=proc))


def test_a_container_that_sees_its_cgroup_at_the_top_is_found_in_version_1(monkeypatch, tmp_path):
    found = cgroup(
        tmp_path,
        "4:memory:/docker/0123\n1:cpu,cpuacct:/docker/0123\n0::/\n",
        memory__memory_limit_in_bytes=GIB,
        memory__memory_usage_in_bytes=900 * MIB,
    )
    monkeypatch.setattr(resources, "cgroups", found)
    assert resources.container_memory() == (GIB, 124 * MIB)
    report = only(resources.memory())
    assert report.level is Level.PROBLEM
    assert "the container may use 1.0 GiB, of which 124 MiB are left" in report.summary
    assert "--memory" in report.advice


@pytest.mark.parametrize(("limit", "level"), [(105, "problem"), (200, "warning"), (9999, "ok")])
def test_the_containers_limit_on_processes_is_named(monkeypatch, tmp_path, limit, level):
    found = cgroup(tmp_path, "0::/\n", pids_max=limit, pids_current=80)
    monkeypatch.setattr(resources, "cgroups", found)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    report = only(resources.processes())
    assert report.level == level
    assert f"80 of {limit} processes and threads in use by the container" in report.summary


def test_the_users_limit_on_processes_is_named_unless_it_is_root(monkeypatch):
    monkeypatch.setattr(resources, "cgroups", lambda _: [])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    report = only(resources.processes())
    assert report.level is Level.PROBLEM
    assert "ulimit -u" in report.advice
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert only(resources.processes()).level is Level.OK


# --- the notebook ---------------------------------------------------------------------------------------


def test_each_front_end_is_told_what_it_will_show(monkeypatch):
    def found(shell, mode=""):
        monkeypatch.setenv("NBLAUNCH_DISPLAY", mode)
        monkeypatch.setattr(_notebook, "shell", lambda: shell)
        return only(notebook.front_end())

    kernel = SimpleNamespace(kernel=SimpleNamespace(comm_manager=object()))
    assert found(kernel).summary.startswith("pytest has started this kernel: runs are shown as html")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert found(None).summary.startswith("plain Python")
    assert found(SimpleNamespace()).summary.startswith("IPython in a terminal")
    assert found(kernel).summary.startswith("a live panel: ipykernel ")
    assert found(kernel, "html").summary.endswith("(NBLAUNCH_DISPLAY=html)")
    assert found(SimpleNamespace(kernel=object())).level is Level.WARNING


@pytest.mark.parametrize(
    ("version", "told"), [("7.4.0", True), ("8.0", True), ("7.3.1", False), ("6.29", False)]
)
def test_clicks_that_wait_for_the_cell_are_told_of(monkeypatch, version, told):
    monkeypatch.setattr(notebook, "_installed", lambda _: version)
    assert ("a click in a widget waits" in notebook._widgets("notebook").advice) is told


# --- the report -----------------------------------------------------------------------------------------

REPORT = DoctorReport(
    (
        ok("torch", "2.13.0"),
        warning("shared", "64 MiB free of 64 MiB", "Start it with <more> & --shm-size."),
        problem("network", "no\n  loopback", "Bring up lo."),
    ),
    seconds=0.5,
)


def test_a_report_is_a_line_for_each_finding_in_columns():
    assert str(REPORT).splitlines() == [
        "nblaunch doctor: 1 problem, 1 warning",
        "ok       torch    2.13.0",
        "warning  shared   64 MiB free of 64 MiB",
        "                  -> Start it with <more> & --shm-size.",
        "problem  network  no loopback",
        "                  -> Bring up lo.",
    ]
    assert repr(REPORT) == str(REPORT)


def test_a_report_is_ok_if_there_are_only_warnings():
    assert not REPORT.ok
    assert [each.name for each in REPORT.problems] == ["network"]
    assert [each.name for each in REPORT.warnings] == ["shared"]
    assert DoctorReport(REPORT.findings[:2]).ok
    assert DoctorReport(()).ok


def test_a_report_in_a_notebook_is_a_table_without_script_or_style_sheet():
    page = REPORT._repr_html_()
    assert page.count("<tr>") == 3
    assert "&lt;more&gt; &amp; --shm-size" in page
    assert not re.search(r"<script|<style|on\w+=|class=", page)
    for word in ("ok", "warning", "problem"):
        assert f">{word}</span>" in page


def test_a_finding_is_one_line_of_bounded_length():
    finding = problem("torch", "x\n" * 10_000)
    assert "\n" not in finding.summary
    assert len(finding.summary) == 300
