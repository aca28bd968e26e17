"""What the doctor finds in processes that are limited, broken or front ends."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from lanes import slow

ROOT = Path(__file__).parents[2]


BOUND = 5.0


MIB = 1 << 20


GIB = 1 << 30


# A process that prints what the doctor finds in it.
DOCTOR = """
report = nblaunch.doctor()
print(json.dumps([[each.name, each.level, each.summary, each.advice] for each in report.findings]))
"""


# How long these take depends on what else the machine does: in time, or "no answer within ...".
TIMED = {"torch", "NCCL", "GPU", "fork server"}


def only(findings):
    """Return the one finding of a check."""
    (finding,) = findings
    return finding


def printed(process):
    """Return what the doctor found in another process: name, level, summary and advice of each."""
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def named(name, found):
    return only([level, summary, advice] for each, level, summary, advice in found if each == name)


def rows(text):
    """Return (level, name) of each line of a report, but for what depends on the process, and on its speed.

    Only a process that has a runtime describes one; without a GPU, the health of GPUs is mentioned only if
    torch takes long to load.
    """
    found = re.findall(r"^(ok|warning|problem) +(\S+(?: \S+)*?)  ", text, re.MULTILINE)
    return [each for each in found if each[1] not in {"runtime", "GPU health"}]


def test_the_three_doors_agree(kernel, terminal, tmp_path):
    function = rows(kernel.run("import nblaunch\nnblaunch.doctor()").result)
    magic = rows(kernel.ok("%distributed doctor").result)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = subprocess.run(
        [sys.executable, "-m", "nblaunch", "doctor"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert command.returncode == 0, command.stdout + command.stderr
    in_terminal = terminal(["%load_ext nblaunch", "%distributed doctor"])
    assert in_terminal.returncode == 0, in_terminal.stderr
    for door in (magic, rows(command.stdout), rows(in_terminal.stdout)):
        assert [name for _, name in door] == [name for _, name in function]
        assert [each for each in door if each[1] not in TIMED] == [
            each for each in function if each[1] not in TIMED
        ]


@pytest.mark.slow
def test_a_problem_is_the_exit_status_of_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "nblaunch", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NBLAUNCH_DISPLAY": "txt"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "problem  notebook" in done.stdout
    assert "-> Set it to text." in done.stdout


def test_a_command_that_is_not_there_names_the_nearest(kernel):
    error = kernel.fails("%distributed docter")
    assert error.ename == "OptionError"
    assert error.evalue.endswith("there is no such command. Did you mean %distributed doctor?")
    assert "begin it with %%distributed" in kernel.fails("%distributed -n 2").evalue
    assert "it needs a command. There are: start, stop, " in kernel.fails("%distributed").evalue
    assert kernel.fails("%distributed doctor now").evalue.endswith("Write %distributed doctor.")


def test_in_a_kernel_with_widgets_the_live_panel_and_its_versions_are_named(start_kernel):
    kernel = start_kernel(NBLAUNCH_DISPLAY="auto")
    shown = kernel.ok("%distributed doctor  # a comment").result
    assert f"a live panel: ipykernel {metadata.version('ipykernel')}" in shown
    assert "NBLAUNCH_DISPLAY=html" in shown


def test_cuda_is_not_asked_for_anything(script, nvidia_smi):
    nvidia_smi("0, GPU-a, NVIDIA H100, 81559, 80000")
    source = f"""
    import json, torch, nblaunch
    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA was asked")
    for name in ("_lazy_init", "init", "device_count", "is_available", "current_device", "mem_get_info"):
        setattr(torch.cuda, name, refuse)
    assert not torch.cuda.is_initialized()
    {"".join(f"{line}{chr(10)}    " for line in DOCTOR.splitlines())}
    assert not torch.cuda.is_initialized()
    """
    found = printed(script(source))
    assert not [each for each in found if "could not be checked" in each[2]]
    assert named("GPU 0", found)[1].startswith("NVIDIA H100, 78.1 GiB free of 79.6 GiB")


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


def test_a_torch_that_cannot_be_loaded_is_a_problem_not_an_error(script, tmp_path):
    broken = tmp_path / "broken"
    (broken / "torch").mkdir(parents=True)
    (broken / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open it')")
    path = os.pathsep.join([str(broken), str(ROOT)])
    found = printed(script(f"import json, nblaunch\n{DOCTOR}", env={"PYTHONPATH": path}))
    level, summary, advice = named("torch", found)
    assert level == "problem"
    assert summary == "cannot be imported: ImportError: libcudart.so.12: cannot open it"
    assert "pytorch.org" in advice
    level, summary, _ = named("fork server", found)
    assert level == "problem"
    assert summary == "no rank can be forked: ImportError: libcudart.so.12: cannot open it"


def test_memory_that_processes_may_not_open_is_a_problem(script):
    """As where /proc is mounted with hidepid, or in a sandbox: forced by taking the right away."""
    source = """
    import ctypes, json
    from nblaunch.checks import processes
    drop_from_bounding_set, set_dumpable, sys_ptrace = 24, 4, 19
    libc = ctypes.CDLL(None)
    libc.prctl(drop_from_bounding_set, sys_ptrace, 0, 0, 0)
    libc.prctl(set_dumpable, 0, 0, 0, 0)
    found = processes.hand_over()
    print(json.dumps([[each.name, each.level, each.summary, each.advice] for each in found]))
    """
    level, summary, advice = named("hand-over", printed(script(source)))
    assert level == "problem"
    assert "Permission denied" in summary
    assert "hidepid" in advice


def temporary(script, tmpdir):
    source = """
    import json
    from nblaunch.checks import resources, own_runtime
    own = own_runtime.DoctorRuntime()
    found = list(resources.temporary_directory(own))
    own.close()
    print(json.dumps([[each.name, each.level, each.summary, each.advice] for each in found]))
    """
    return named("temp dir", printed(script(source, env={"TMPDIR": str(tmpdir)})))


def test_a_tmpdir_too_long_for_a_unix_socket_is_named(script, tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    level, summary, advice = temporary(script, long)
    assert level == "warning"
    assert f"in place of TMPDIR={long}" in summary
    assert "too long for a unix socket" in advice


@pytest.mark.slow
def test_a_tmpdir_that_is_not_there_is_named(script, tmp_path):
    level, summary, _ = temporary(script, tmp_path / "gone")
    assert level == "warning"
    assert "in place of TMPDIR=" in summary


@pytest.mark.parametrize(("limit", "level"), [(50, "problem"), slow((900, "warning"))])
def test_a_low_limit_on_open_files_is_named(script, limit, level):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < limit:
        pytest.skip("the hard limit is lower")
    source = f"""
    import json, resource, sys
    from nblaunch.checks import resources
    resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
    found = resources.open_files()
    print(json.dumps([[each.name, each.level, each.summary, each.advice] for each in found]))
    """
    found = named("open files", printed(script(source)))
    assert found[0] == level, found


@pytest.mark.slow
def test_a_process_at_its_limit_of_files_is_looked_at_all_the_same(script):
    source = f"""
    import json, os, resource, nblaunch, torch, torch.distributed
    nblaunch.doctor
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        os.close(held.pop())
    {DOCTOR.strip().replace(chr(10), chr(10) + "    ")}
    """
    found = printed(script(source))
    assert len({each[0] for each in found}) == len(found)
    assert [each for each in found if each[1] == "problem"]


@pytest.mark.slow
def test_a_limited_address_space_is_named(script):
    source = """
    import json, resource
    from nblaunch.checks import resources
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, resource.getrlimit(resource.RLIMIT_AS)[1]))
    found = resources.memory()
    print(json.dumps([[each.name, each.level, each.summary, each.advice] for each in found]))
    """
    level, summary, _ = named("address space", printed(script(source)))
    assert (level, summary) == ("warning", "limited to 16.0 GiB for each process")
