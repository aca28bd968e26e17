"""What engines read and refuse, without a process."""

from __future__ import annotations

import os
import shlex
import socket
import stat
import sys
import time
from collections.abc import Callable

import pytest
from patience import eventually

from nblaunch._errors import OptionError
from nblaunch.host import join
from nblaunch.host.join import place_of
from nblaunch.nodes import process, slurm
from nblaunch.nodes.asking import _why_ended, _why_lost
from nblaunch.nodes.byhand import JoinEngine
from nblaunch.nodes.engine import NodeProgram, NodeRequest, ProgramStatus, own_address
from nblaunch.nodes.process import ProcessEngine, StartedProgram
from nblaunch.nodes.slurm import (
    QueuedJob,
    SlurmEngine,
    _environ,
    _salloc,
    ends_of_tasks,
    job_of,
    refused_word,
    words_of_task,
)
from nblaunch.nodes.ssh import SshAllocation, SshEngine
from nblaunch.protocol.messages import EngineState, EngineStatus

PRINTED = """\
0: one
1: Traceback
1: no luck
srun: error: beta: task 1: Exited with exit code 7
srun: error: alpha: tasks 0,2-3: Killed
slurmstepd-gamma: error: execve(): /nowhere: No such file or directory
srun: Force Terminated StepId=2.0
"""


def request(**given) -> NodeRequest:
    fields = {"least": 2, "most": 2, "nproc": 4, "name": "nblaunch-1", "environ": {}, "cwd": "/"}
    return NodeRequest(**{**fields, "python": sys.executable, **given})


@pytest.mark.parametrize(
    ("line", "job"),
    [
        (
            "3|PENDING|Resources|7|1795377199|N/A|\n",
            QueuedJob("3", "PENDING", "Resources", "7", 1795377199.0, None, ""),
        ),
        ("3|RUNNING|None|7|10|20|h[1-3]\n", QueuedJob("3", "RUNNING", "", "7", 10.0, 20.0, "h[1-3]")),
        ("3|RUNNING|None|7|10|NONE|hA", QueuedJob("3", "RUNNING", "", "7", 10.0, None, "hA")),
        ("slurm_load_jobs error", None),
        ("", None),
    ],
)
def test_a_line_of_squeue(line, job):
    assert job_of(line) == job


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", EngineState.WAITING),
        ("CONFIGURING", EngineState.WAITING),
        ("RUNNING", EngineState.GRANTED),
        ("COMPLETING", EngineState.ENDING),
        ("CANCELLED", EngineState.ENDED),
        ("PREEMPTED", EngineState.ENDED),
        ("NODE_FAIL", EngineState.ENDED),
    ],
)
def test_how_far_a_job_is(word, state):
    assert QueuedJob("1", word).engine_state is state


OURS = ["-N2", "-N 2", "-p gpu -n 4", "--nodes=2", "--ntasks 2", "--ntas=2", "-Hn2", "--ntasks-per-node=4"]
OURS += ["-J x", "--job-name=x", "-o f", "-e f", "--no-shell", "--wrap=true", "--out=f"]
OURS += ["-M x", "-Mx", "--clusters=x", "--clu x", "-Q", "-HQ", "-QH", "--quiet", "--qui"]


@pytest.mark.parametrize("line", OURS)
def test_words_that_are_nblaunchs_are_refused(line):
    words = tuple(line.split())
    assert refused_word(words)
    with pytest.raises(OptionError, match="--slurm has an option that nblaunch sets itself"):
        SlurmEngine.check(request(words=words))


@pytest.mark.parametrize(
    "words",
    [
        ("-p", "gpu"),
        ("--gpus-per-node=8", "-t", "30"),
        ("-A", "me"),
        ("--nodelist=a",),
        ("--exclusive",),
        ("--qos=q",),
        (),
    ],
)
def test_other_words_are_slurms(words):
    assert refused_word(words) == ""


@pytest.mark.parametrize("engine", [SshEngine, SlurmEngine])
def test_a_program_that_is_missing_is_named_with_what_installs_it(engine):
    with pytest.raises(
        OptionError, match=r"needs (ssh|salloc), which is not on the PATH.*apt-get install \w+"
    ):
        engine.check(request(argument="a", environ={"PATH": "/nowhere"}))


def test_a_machine_has_only_so_many_nodes():
    with pytest.raises(OptionError, match="nodes were asked for on this machine"):
        ProcessEngine.check(request(most=4 * (os.cpu_count() or 1) + 1))
    with pytest.raises(OptionError, match="--node-python names '/nowhere'"):
        ProcessEngine.check(request(most=1, python="/nowhere"))
    ProcessEngine.check(request(environ=os.environ))


@pytest.mark.parametrize(
    ("environ", "nproc", "most", "expected"),
    [
        ({}, 1, 2, [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]),
        ({}, "auto", 3, [{"CUDA_VISIBLE_DEVICES": str(place)} for place in range(3)]),
        ({"CUDA_VISIBLE_DEVICES": "5,3"}, 1, 2, [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "53"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1, 2, [{"CUDA_VISIBLE_DEVICES": f"MIG-{x}"} for x in "ab"]),
        ({}, 3, 2, [{}, {}]),
        ({}, "auto", 5, [{}]),
        ({}, 1, 1, [{}]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, 2, [{}, {}]),
    ],
    ids=["numbers", "one each", "chosen", "mig", "more ranks", "more nodes", "one node", "hidden"],
)
def test_nodes_of_this_machine_divide_its_gpus(monkeypatch, environ, nproc, most, expected):
    def visible(environ, *, each_alone):
        assert each_alone, "a process sees one MIG instance, and each node another one"
        chosen = environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        return len(chosen.split(",")) if chosen else 0

    monkeypatch.setattr(process, "visible_gpus", visible)
    allocation = process.ProcessAllocation(request(environ=environ, nproc=nproc, most=most), ["vm"] * most)
    assert [allocation.devices(place) for place in range(len(expected))] == expected


def test_what_salloc_is_asked_for():
    asked = ("salloc", "--no-shell", "-J", "nblaunch-1", "-N", "2")
    assert _salloc(request()) == (*asked, "-c", "4")
    assert _salloc(request(nproc="gpu", words=("-t", "3"))) == (*asked, "-t", "3")
    assert _salloc(request(words=("--cpus-per-gpu=3",))) == (*asked, "--cpus-per-gpu=3")
    assert _salloc(request(least=1))[5] == "1-2"


def test_slurm_sees_of_the_callers_job_only_the_number():
    of_step = {"SLURM_NTASKS": "2", "SLURM_MEM_PER_NODE": "3", "PMI_RANK": "0", "NBLAUNCH_NODE_PLACE": "4"}
    of_step["SALLOC_CLUSTERS"] = "y"
    kept = {"SLURM_CONF": "/c", "SLURM_CLUSTERS": "x", "SALLOC_PARTITION": "p", "HOME": "/h"}
    assert _environ(request(environ={**of_step, **kept})) == kept
    inside = {"SLURM_JOB_ID": "17", **kept}
    assert _environ(request(environ={**of_step, **inside})) == inside


def test_what_is_left_at_the_end_is_cancelled_by_name():
    environ = {"SLURM_CONF": "/c", "PATH": "/bin"}
    command = ("scancel", "-Q", "--name", "nblaunch-1", "-u", str(os.getuid()))
    assert SlurmEngine.at_end(request(environ=environ)) == ("SLURM_CONF=/c", "PATH=/bin", *command)
    assert SlurmEngine.at_end(request(environ={"SLURM_JOB_ID": "3"})) == (), "that job is another's"


@pytest.fixture
def programs(tmp_path) -> Callable[..., NodeRequest]:
    """Give `programs(name=script)`: a request whose programs these are, in `tmp_path`."""

    def make(**scripts: str) -> NodeRequest:
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
            (tmp_path / name).chmod(0o755)
        return request(environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    return make


def test_a_job_is_cancelled_again_until_slurm_has_done_it(programs):
    allocation = SlurmEngine.ask(programs(salloc="exec sleep 100", scancel="test -e asked || ! touch asked"))
    allocation.cancel()
    assert not allocation.released, "a controller that restarts refuses"
    eventually(lambda: allocation.released, "it is given back", 10)


def test_why_salloc_ends_is_known_with_its_end(programs, monkeypatch, tmp_path):
    """Here it prints that, and ends, while it is looked at."""

    class Ending(StartedProgram):
        @property
        def exitcode(self) -> int | None:
            (tmp_path / "go").touch()
            eventually(lambda: super(Ending, self).exitcode is not None, "it ends")
            return super().exitcode

    salloc = "while ! test -e go; do sleep 0.01; done; echo salloc: error: no luck; exit 1"
    monkeypatch.setattr("nblaunch.nodes.slurm.StartedProgram", Ending)
    allocation = SlurmEngine.ask(programs(salloc=salloc, scancel="exit 0"))
    assert allocation.status().words == "no luck"
    allocation.cancel()


def test_a_job_that_is_the_callers_needs_no_giving_back():
    assert SlurmEngine.ask(request(environ={"SLURM_JOB_ID": "3"})).released


def test_which_tasks_srun_says_have_ended():
    assert ends_of_tasks(PRINTED, ["alpha", "beta"]) == {0: -9, 1: 7, 2: -9, 3: -9}
    assert ends_of_tasks("srun: error: Node failure on beta", ["alpha", "beta"]) == {1: None}
    assert ends_of_tasks("0: srun: error: beta: task 1: Killed", ["alpha", "beta"]) == {}, (
        "a task's own words"
    )


def test_the_words_of_a_task():
    assert words_of_task(PRINTED, 1, "beta") == "Traceback\nno luck"
    assert words_of_task(PRINTED, 2, "gamma").startswith("slurmstepd-gamma: error: execve()")


def test_what_ssh_runs():
    hosts = request(
        argument="ann@a:2222,[fe80::1]", environ={"NBLAUNCH_SSH": "ssh -F 'my config'"}, python="/my py"
    )
    allocation = SshEngine.ask(hosts)
    assert isinstance(allocation, SshAllocation)
    first, second = (allocation.command(place, NodeProgram(("-m", "nblaunch"), b"")) for place in range(2))
    assert (first[:3], first[-4:-1]) == (("ssh", "-F", "my config"), ("-p", "2222", "ann@a"))
    assert first[-1] == "exec env NBLAUNCH_NODE_PLACE=0 '/my py' -m nblaunch"
    assert (second[-2], "-p" in second, "ControlMaster=no" in second) == ("fe80::1", False, True)


def test_the_key_of_nodes_by_hand_is_in_a_private_file_until_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    allocation = JoinEngine.ask(request(least=1))
    line = allocation.start(
        NodeProgram(("-m", "nblaunch", "join", "h:1", "-n", "4", "--key-stdin"), b"secret\n")
    )
    key = tmp_path / "nblaunch-1" / "join-key"
    assert line.splitlines()[1] == f"NBLAUNCH_JOIN_KEY_FILE={key} python -m nblaunch join h:1 -n 4"
    assert "each of the 1 to 2 nodes" in line
    assert (key.read_bytes(), stat.S_IMODE(key.stat().st_mode)) == (b"secret\n", 0o600)
    assert JoinEngine.at_end(request())[-1] == str(key.parent)
    allocation.cancel()
    assert not key.parent.exists()


def test_places_of_nodes():
    assert place_of({"NBLAUNCH_NODE_PLACE": "2", "SLURM_NODEID": "0"}) == 2
    assert place_of({"SLURM_NODEID": "1"}) == 1
    assert place_of({"SLURM_NODEID": "all"}) == place_of({}) == -1


def test_the_address_of_this_machine_is_another_ones_way_to_it():
    assert own_address(["a host\nthat is none", "."]) == own_address([])


def test_why_no_more_nodes_come():
    lost = [ProgramStatus("a", 0, running=False, exitcode=1, words="x: No module named nblaunch")]
    assert _why_lost(lost) == (
        "the node on a ended before it joined, with exit code 1:\nx: No module named nblaunch\n"
        "Install nblaunch there, or give --sync-env or --node-python."
    )
    more = [ProgramStatus("a", 0, running=False), ProgramStatus("b", 1, running=False, exitcode=-99)]
    assert _why_lost(more) == "the node on a ended before it joined; so did 1 more"
    assert _why_lost(more[1:]) == "the node on b ended before it joined, with signal 99"
    said = EngineStatus(
        engine="slurm", state=EngineState.ENDED, words="error: Invalid partition name specified"
    )
    assert _why_ended(said) == "slurm gives no nodes: error: Invalid partition name specified"


REFUSES_ONCE = 'test -e "$0" && touch "$1" || { touch "$0"; exit 1; }'


def test_a_node_gives_its_allocation_back_until_the_engine_takes_it(tmp_path, monkeypatch):
    """The controller may be starting again."""
    refused, released = tmp_path / "refused", tmp_path / "given-back"
    command = ["sh", "-c", REFUSES_ONCE, str(refused), str(released)]
    monkeypatch.setenv("NBLAUNCH_NODE_AT_END", shlex.join(command))
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setattr(join, "_TRY_AGAIN_SECONDS", 0.01)
    join._release(f"127.0.0.1:{nobodys_port()}")
    assert refused.exists()
    assert released.exists()


def test_a_node_without_the_engines_program_says_so(monkeypatch, capsys):
    monkeypatch.setenv("NBLAUNCH_NODE_AT_END", "/nowhere/scancel 7")
    monkeypatch.setenv("SLURM_NODEID", "0")
    join._release(f"127.0.0.1:{nobodys_port()}")
    assert "the allocation could not be given back: [Errno 2]" in capsys.readouterr().err


def nobodys_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_slow_sinfo_holds_up_nothing_for_long(tmp_path, monkeypatch):
    slow = tmp_path / "sinfo"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr(slurm, "_SINFO_SECONDS", 0.2)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    request = NodeRequest(least=1, most=1, nproc=1, name="n", environ=environ, cwd="/", python="python")
    began = time.monotonic()
    assert slurm.SlurmEngine.address(request)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("listens", [True, False], ids=["reachable", "gone"])
def test_a_node_gives_its_allocation_back_only_where_its_runtime_is_certainly_gone(
    listens, tmp_path, monkeypatch
):
    """A node alone may be cut off: the others then go on with the notebook."""
    released = tmp_path / "given-back"
    monkeypatch.setenv("NBLAUNCH_NODE_AT_END", shlex.join(["touch", str(released)]))
    monkeypatch.setenv("SLURM_NODEID", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        join._release(f"127.0.0.1:{port}")
    assert released.exists() is not listens
