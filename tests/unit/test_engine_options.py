"""Which nodes an engine is asked for, and what contradicts, is known before any process starts."""

from __future__ import annotations

import sys

import pytest

import nblaunch
from nblaunch._errors import OptionError
from nblaunch.nodes.engine import ENGINES, engine_of, nodes_of, refuse_contradictions, requested_nodes
from nblaunch.options.command_line import parse_line, torchrun_command
from nblaunch.options.launch import LaunchOptions

INSIDE = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
ON_A_NODE = {**INSIDE, "SLURMD_NODENAME": "hA"}
ALONE = {**ON_A_NODE, "SLURM_JOB_NUM_NODES": "1"}


@pytest.mark.parametrize(
    ("line", "environ", "said"),
    [
        ("--slurm '-p gpu'", {}, "--slurm was given, but no engine places nodes"),
        ("--here", {}, "--here was given, but no engine"),
        ("--node-python python3", {}, "--node-python was given, but no engine"),
        ("--node-timeout 3", {}, "--node-timeout was given, but no engine"),
        ("--sync-env", {}, "--sync-env was given, but no engine"),
        ("--on process --rdzv-endpoint h:1", {}, "--rdzv-endpoint and --on process"),
        ("--on process --rdzv-backend static", {}, "--rdzv-backend and --on process"),
        ("--on process --rdzv-id a", {}, "--rdzv-id and --on process"),
        ("--on process --master-addr h", {}, "--master-addr and --on process"),
        ("--on process --master-port 1", {}, "--master-port and --on process"),
        ("--on process --node-rank 1", {}, "--node-rank and --on process"),
        ("--on process --here --nnodes 2", {}, "--here was given, but all nodes"),
        ("--on process --slurm '-p gpu'", {}, "--slurm was given, but --on process places the nodes"),
        ("--on ssh=a,b --nnodes 3", {}, "--on names 2 hosts. Leave nnodes out"),
        ("--on ssh=a,b --nnodes 2 --here", {}, "--on names 2 hosts and this machine"),
        ("--queue-timeout 3", {}, "--queue-timeout was given, but no engine"),
        (
            "--on slurm --nnodes 3",
            INSIDE,
            "inside Slurm's job 17, which has 2 nodes. .* a new job, for example --slurm",
        ),
        ("--on slurm --here --nnodes 3", ON_A_NODE, "inside Slurm's job 17, which has 2 nodes"),
        ("--on slurm --here", ALONE, "inside Slurm's job 17, whose only node is this machine"),
        ("--on process --local-addr 0.0.0.0", {}, "--local-addr 0.0.0.0 is every address of this machine"),
        ("--on process --local-addr ::", {}, "--local-addr :: is every address of this machine"),
        ("--on process --local-addr 0", {}, "--local-addr 0 is every address of this machine"),
        ("--on join --node-python python3", {}, "--node-python was given, but nodes join"),
        ("--on join --sync-env", {}, "--sync-env was given, but nodes join"),
    ],
)
def test_what_contradicts_is_refused_by_name(line, environ, said):
    with pytest.raises(OptionError, match=said):
        refuse_contradictions(parse_line(line).options, environ)


@pytest.mark.parametrize(
    ("line", "environ", "nodes", "asked"),
    [
        ("--on process --nnodes 2", {}, (2, 2), (2, 2)),
        ("--on process --nnodes 1:3", {}, (1, 3), (1, 3)),
        ("--on join --nnodes 2 --here", {}, (2, 2), (1, 1)),
        ("--on ssh=a,b", {}, (2, 2), (2, 2)),
        ("--on ssh=a,b --nnodes 1:2", {}, (1, 2), (1, 2)),
        ("--on ssh=a,b --here", {}, (3, 3), (2, 2)),
        ("--on slurm", {}, (1, 1), (1, 1)),
        ("--on slurm --here", {}, (2, 2), (1, 1)),
        ("--on slurm --nnodes 1:2 --here --slurm '-p gpu'", {}, (1, 2), (1, 1)),
        ("--on slurm", INSIDE, (2, 2), (2, 2)),
        ("--on slurm --here", INSIDE, (3, 3), (2, 2)),
        ("--on slurm --here --nnodes 3", INSIDE, (3, 3), (2, 2)),
        ("--on slurm", ON_A_NODE, (2, 2), (2, 2)),
        ("--on slurm --here", ON_A_NODE, (2, 2), (1, 1)),
        ("--on slurm --here --nnodes 2", ON_A_NODE, (2, 2), (1, 1)),
        ("--on slurm --nnodes 3 --slurm '-t 30'", ALONE, (3, 3), (3, 3)),
        ("--on slurm --here --slurm '-t 30'", ALONE, (2, 2), (1, 1)),
        ("--on process --rdzv-conf join_timeout=5 --local-addr 10.0.0.1", {}, (1, 1), (1, 1)),
        ("--on ray --nnodes 2 --sync-env", {}, (2, 2), (2, 2)),
    ],
)
def test_how_many_nodes_there_are_and_for_how_many_the_engine_is_asked(line, environ, nodes, asked):
    options = parse_line(line).options
    refuse_contradictions(options, environ)
    assert nodes_of(options, environ) == nodes
    request = requested_nodes(options, environ, "/home/ann")
    assert (request.least, request.most, request.cwd, request.environ) == (*asked, "/home/ann", environ)


def test_what_an_engine_is_asked_for():
    options = parse_line("-n 8 --on ssh=a,b:2222 --node-python /opt/py").options
    request = requested_nodes(options, {}, "/")
    assert (request.nproc, request.argument, request.python) == (8, "a,b:2222", "/opt/py")
    assert request.name != requested_nodes(options, {}, "/").name, "a job is found by it"
    words = requested_nodes(parse_line("--on slurm --slurm \"-p 'a b' -t 30\"").options, {}, "/")
    assert (words.words, words.python) == (("-p", "a b", "-t", "30"), sys.executable)
    assert requested_nodes(parse_line("--on slurm --sync-env").options, {}, "/").python == "python3"


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_has_its_name(name):
    on = "ssh=a" if name == "ssh" else name
    assert engine_of(LaunchOptions(on=on)).name == name


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("slrum", "Did you mean slurm"),
        ("proces", "Did you mean process"),
        ("shh=a", "Did you mean ssh"),
        ("ssh", "Write ssh=HOST1,HOST2"),
        ("ssh=-oProxyCommand=x", "Write ssh=HOST1,HOST2"),
        ("kubernetes", "it takes process, join, ssh="),
    ],
)
def test_an_engine_that_there_is_not_is_refused_with_the_nearest(on, said):
    with pytest.raises(OptionError, match=said):
        LaunchOptions(on=on)


def test_a_run_that_stays_on_this_machine_has_no_engine():
    with pytest.raises(OptionError, match="standalone and on='slurm' were asked for"):
        parse_line("--standalone --on slurm")
    with pytest.raises(OptionError, match="standalone and on='slurm' were asked for"):
        nblaunch.run(print, standalone=True, on="slurm")


@pytest.mark.parametrize("words", ["-p gpu -t 30", "-t 30", "-n 4", "--exclusive", "-N1"])
def test_options_for_slurm_may_stand_behind_a_space(words):
    assert parse_line(f"--on slurm --slurm '{words}' -n 2").options.slurm == words
    assert parse_line(f"-n 2 --slurm='{words}'").options.slurm == words
    assert parse_line(f"train.py --slurm '{words}'", script=True).rest == ("train.py", "--slurm", words)


@pytest.mark.parametrize(
    "line", ["--slurm", "--slurm --on slurm", "--slurm -n 2", "--slurm -h", "--slurm --"]
)
def test_an_option_of_ours_is_no_value_of_slurms(line):
    with pytest.raises(OptionError, match="--slurm was asked for, but it needs a value"):
        parse_line(line)


def test_torchrun_knows_no_engine():
    options = parse_line("-n 2 --nnodes 2 --on slurm --slurm '-p gpu'").options
    comments = torchrun_command(options, "train.py").splitlines()[:-1]
    assert comments == ["# torchrun has no --on (slurm)", "# torchrun has no --slurm (-p gpu)", RENDEZVOUS]


RENDEZVOUS = "# on each of the nodes, with one of them as their rendezvous: --rdzv-endpoint HOST:PORT"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("--nnodes 2 --on slurm", "torchrun --nproc-per-node auto --nnodes 2 --rdzv-backend c10d train.py"),
        ("--on ssh=hA,hB", "torchrun --nproc-per-node auto --nnodes 2 --rdzv-backend c10d train.py"),
        ("--on ssh=hA --here", "torchrun --nproc-per-node auto --nnodes 2 --rdzv-backend c10d train.py"),
        ("-n 8 --on slurm", "torchrun --standalone --nproc-per-node 8 train.py"),
        ("--on slurm", "torchrun --standalone --nproc-per-node auto train.py"),
    ],
)
def test_torchruns_command_for_nodes_has_their_number_and_not_that_of_all_ranks(line, command):
    """How many ranks each node has is known only once it is there: that there were 4 says nothing of one."""
    *comments, last = torchrun_command(parse_line(line).options, "train.py", 4).splitlines()
    assert last == command
    assert (RENDEZVOUS in comments) == ("--standalone" not in last)
