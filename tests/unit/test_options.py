"""What the options of a launch promise, through both doors: the line of a magic and keywords."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import pickle
import re
import shlex
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nblaunch._errors import OptionError
from nblaunch.magic.sessions import check_cell_options
from nblaunch.options.command_line import option_completions, options_help, options_on_a_screen, parse_line
from nblaunch.options.kinds import LONGEST_SECONDS, EnvironmentVariables
from nblaunch.options.launch import MOST_RANKS_PER_NODE, OPTIONS, LaunchOptions, within
from nblaunch.options.table import TITLES, Option, Scope, nearest

SWITCHES = ("fresh", "background", "detach", "profile", "here", "sync_env")
SWITCHES_OF_TORCHRUN = ("virtual_local_rank", "module", "no_python", "run_path")
# name: (text on a line or in a variable, the value it means, another text, its value)
SAMPLES: dict[str, tuple[str, object, str, object]] = {
    **dict.fromkeys(SWITCHES, ("true", True, "false", False)),
    **dict.fromkeys(SWITCHES_OF_TORCHRUN, ("1", True, "0", False)),
    "nproc_per_node": ("4", 4, "gpu", "gpu"),
    "backend": ("gloo", "gloo", "cpu:gloo,cuda:nccl-legacy", "cpu:gloo,cuda:nccl-legacy"),
    "init_process_group": ("true", False, "false", True),
    "out": ("results", "results", "other", "other"),
    "session": ("small", "small", "other", "other"),
    "export": ("train.py", "train.py", "runs/go.py", "runs/go.py"),
    "linger": ("8h", 28_800.0, "90", 90.0),
    "restore": ("job7", "job7", "8", "8"),
    "save_every": ("10m", 600.0, "90", 90.0),
    "drop": ("loss", ("loss",), "loss,model", ("loss", "model")),
    "ranks": ("0,2-4", (0, 2, 3, 4), "1", (1,)),
    "env": ("A=1", {"A": "1"}, "A=2", {"A": "2"}),
    "timeout": ("60", 60.0, "1.5", 1.5),
    "grace": ("0", 0.0, "2", 2.0),
    "hang_after": ("30", 30.0, "0.5", 0.5),
    "profile_steps": ("3:8", (3, 8), "0:0", (0, 0)),
    "watch": ("nan", ("nan",), "desync:warn,nan", ("nan", "desync:warn")),
    "max_restarts": ("3", 3, "0", 0),
    "monitor_interval": ("0.5", 0.5, "1", 1.0),
    "role": ("trainer", "trainer", "worker", "worker"),
    "log_dir": ("runs", "runs", "logs", "logs"),
    "metrics_file": ("m.jsonl", "m.jsonl", "runs/other.jsonl", "runs/other.jsonl"),
    "shutdown_timeout": ("30", 30, "1", 1),
    "standalone": ("0", False, "1", True),
    "nnodes": ("2", "2", "1:4", "1:4"),
    "rdzv_backend": ("static", "static", "etcd-v2", "etcd-v2"),
    "rdzv_endpoint": ("node0:29400", "node0:29400", "[::1]:0", "[::1]:0"),
    "rdzv_id": ("job7", "job7", "8", "8"),
    "rdzv_conf": ("join_timeout=60,read_timeout=7", "join_timeout=60,read_timeout=7", "a=b", "a=b"),
    "node_rank": ("1", 1, "0", 0),
    "master_addr": ("node0", "node0", "::1", "::1"),
    "master_port": ("29500", 29500, "0", 0),
    "ports": ("50000-50100", "50000-50100", "50000", "50000"),
    "local_addr": ("10.0.0.2", "10.0.0.2", "node-1.cluster", "node-1.cluster"),
    "on": ("slurm", "slurm", "ssh=h1,ann@h2:2222", "ssh=h1,ann@h2:2222"),
    "slurm": ("'-p gpu -t 30'", "-p gpu -t 30", "--exclusive", "--exclusive"),
    "node_python": ("/opt/py/bin/python", "/opt/py/bin/python", "python3", "python3"),
    "queue_timeout": ("8h", 28_800.0, "90", 90.0),
    "node_timeout": ("5", 5.0, "60", 60.0),
    "start_method": ("spawn", "spawn", "fork", "fork"),
    "numa_binding": ("node", "node", "core-complex", "core-complex"),
    "signals_to_handle": ("SIGTERM", "SIGTERM", "SIGTERM,SIGUSR1", "SIGTERM,SIGUSR1"),
    "event_log_handler": ("console", "console", "null", "null"),
    "redirects": ("3", "3", "0:1,1:2", "0:1,1:2"),
    "tee": ("1", "1", "1:3", "1:3"),
    "local_ranks_filter": ("0,2", (0, 2), "1", (1,)),
    "logs_specs": ("default", "default", "mine", "mine"),
    "duplicate_stdout_filters": ("loss", ("loss",), "loss,step", ("loss", "step")),
    "duplicate_stderr_filters": ("error", ("error",), "a,b", ("a", "b")),
    "log_line_prefix_template": ("${rank}:", "${rank}:", "[$role_name]", "[$role_name]"),
    "pull": ("loss", ("loss",), "loss,model", ("loss", "model")),
}

WRONG: dict[str, list[object]] = {
    **{name: [0, 1, "no", None] for name in (*SWITCHES, *SWITCHES_OF_TORCHRUN)},
    "init_process_group": [0, 1, "no", None],
    "standalone": [0, 1, "yes", None],
    "nproc_per_node": [0, -1, True, False, None, 2.0, "many", "2", "", math.nan, 4097, 10**5000],
    "backend": ["", "nc cl", "cpu:", ":gloo", "cpu:gloo,", "gloo,nccl", "cpu:gloo,cpu:nccl", 1, True, None],
    "out": ["", "a b", "1a", "class", "None", "a.b", 3, True],
    "session": ["", "a b", "1a", "class", 3, True],
    "export": ["", "train", "a\nb.py", ".py", "\0.py", 3, True, "~no such user/train.py"],
    "linger": [0, -1, True, None, "", "h", "8 weeks", "-1h", "0s", "1h30m", "60", math.inf, math.nan],
    "restore": ["", "a\nb", 3, True],
    "save_every": [0, -1, True, "", "m", "-1m", "0s", "60", math.inf, math.nan],
    "drop": ["", "a b", "1a", "class", "a,", "a.b", 3, None, [3], ["a b"], [[]]],
    "ranks": ["", "0,1", "a", "3-1", "0-99999999", 3, [-1], [True], [1.5], [], range(200_000)],
    "env": [None, "A=1", [("A", "1")], {"A": 1}, {"A": None}, {1: "1"}, {"": "1"}, {"A B": "1"}, {"A=B": "1"},
            {"A\0": "1"}, {"A": "\0"}, {"A": "\ud800"}],
    "timeout": [0, -1, math.nan, math.inf, -math.inf, True, "60", LONGEST_SECONDS * 2, 10**400, 1j, []],
    "grace": [-0.1, math.nan, math.inf, True, None, "5", 10**400],
    "hang_after": [0, -1, math.nan, True, "5"],
    "profile_steps": ["8:3", "3", "3:", (1,), (1, 2, 3), (-1, 2), (True, 2), 3],
    "watch": ["", "inf", "nan:stop", "nan,nan:warn", ("nan", 1), True, None],
    "max_restarts": [-1, 1.0, True, None, "1", 2**31, math.inf],
    "monitor_interval": [0, -1, math.nan, math.inf, True, None, "0.1"],
    "role": ["", "a\nb", "a\0", 3, None, b"rank"],
    "log_dir": ["", "a\0b", "\ud800", 3, True, b"runs", "x" * 300, "~no such user/runs"],
    "metrics_file": ["", "a\0b", "\ud800", 3, True, b"m", "/", "runs/", "~no such user/m.jsonl"],
    "shutdown_timeout": [0, -1, 1.5, True, None, "5", 2**31],
    "nnodes": [0, -1, True, None, "", "2:1", "0:1", "1:2:3", "a", 10**9, "1,2"],
    "rdzv_backend": ["", "a\nb", 3, None],
    "rdzv_endpoint": ["a b", ":1", "host:", "host:99999", "host:x", 3, None, "-host", "a:1:2"],
    "rdzv_id": ["", "a\nb", 3, True],
    "rdzv_conf": ["a", "a=", "=b", "a=1,", "a=1\n", 3, None],
    "node_rank": [-1, True, None, "1", 1.0],
    "master_addr": ["", "a b", "host:1", 3, True],
    "master_port": [-1, 65_536, "1", True, 1.0],
    "ports": ["", "0", "5-4", "1-65536", "a", "1-", "-1", 0, 65_536, True, (1, 2)],
    "local_addr": ["", "a b", "host:1", 3, True],
    "on": ["", "slrum", "slurm=x", "process=2", "join=", "ssh", "ssh=", "ssh=a,", "ssh=-oX", "ssh=a@-b",
           "ssh=a b", "ssh=a:99999", "ray=", "ray=h:1", "ray=ray://h", "ray=ray://h:99999", 3, True],
    "slurm": ["a\nb", "'a", 3, None],
    "node_python": ["", "-x", "a\nb", 3, True],
    "queue_timeout": [0, -1, math.nan, math.inf, True, "5 weeks"],
    "node_timeout": [0, -1, math.nan, math.inf, True, None, "5"],
    "start_method": ["", "Spawn", "thread", 3, None],
    "numa_binding": ["", "nodes", 3, True],
    "signals_to_handle": ["", "TERM", "SIGTERM,", "SIGTERM SIGINT", 15, None],
    "event_log_handler": ["", "a\nb", 3, None],
    "redirects": ["", "4", "0:4", "a", "0:1,0:2", "0:1,", -1, 4, True, None],
    "tee": ["", "4", "0:4", "a", "1:1,1:2", -1, True, None],
    "local_ranks_filter": ["", "a", [-1], 3, [], [True]],
    "logs_specs": ["", "a\nb", 3, True],
    "duplicate_stdout_filters": ["a", [""], [3], ["a,b"], None, 3],
    "duplicate_stderr_filters": ["a", [""], ["a\n"], ["a,b"], None, 3],
    "log_line_prefix_template": ["a\n", "\0", None, 3],
    "pull": ["", "a b", "1a", "class", "a,", "a.b", 3, None, [3], ["a b"], [[]]],
}  # fmt: skip

WITH_VARIABLE = [option for option in OPTIONS if option.variable]
OF_MAGIC = [option for option in OPTIONS if option.scope != "script"]
OF_RUN = [option for option in OPTIONS if option.scope not in {"notebook", "session"}]
OF_SESSION = [option for option in OPTIONS if option.scope == "session"]
OF_A_CELL = {
    *("out", "session", "fresh", "background", "export", "ranks", "timeout", "grace", "hang_after"),
    *("profile", "profile_steps", "watch", "metrics_file", "redirects", "tee", "local_ranks_filter"),
}
"""By name: an option that is fixed with the processes must not get into the table as one of these."""
OF_THE_GROUP = [option for option in OF_MAGIC if option.scope != "session" and option.name not in OF_A_CELL]
ALL_WRONG = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without the variables that whoever runs the tests may have set."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def _value(options: LaunchOptions, name: str) -> object:
    value: object = getattr(options, name)
    return value


def _id(argument: object) -> str:
    name = getattr(argument, "name", None)
    return name if isinstance(name, str) else type(argument).__name__


# The table


def test_nothing_given_means_the_documented_defaults():
    """The defaults themselves stand in the documentation, which `test_readme.py` compares."""
    for options in (LaunchOptions(), LaunchOptions.from_keywords(), parse_line("").options):
        assert all(_value(options, each.name) == each.default for each in OPTIONS)


def test_every_option_has_a_sample_and_a_wrong_value_in_these_tests():
    assert set(SAMPLES) == set(WRONG) == {option.name for option in OPTIONS}


def test_no_spelling_means_two_options():
    spellings = [spelling for option in OPTIONS for spelling in option.spellings]
    keywords = [keyword for option in OPTIONS for keyword in option.keywords]
    assert len(set(spellings)) == len(spellings)
    assert len(set(keywords)) == len(keywords)


ADDED = {
    **dict.fromkeys(("duplicate_stderr_filters", "duplicate_stdout_filters", "numa_binding"), (2, 13)),
    **dict.fromkeys(("shutdown_timeout", "signals_to_handle", "virtual_local_rank"), (2, 13)),
    "log_line_prefix_template": (2, 15),
}
"""Options that torchrun does not have in torch 2.8, with the first torch seen that has them."""


def test_torchruns_own_parser_has_no_option_that_is_not_here_spelled_alike():
    """An option that a newer torch adds fails this test."""
    run = pytest.importorskip("torch.distributed.run")
    ours = {option.name: option for option in OPTIONS}
    for action in run.get_args_parser()._actions:
        if action.dest in ("help", "print_completion", "training_script", "training_script_args"):
            continue  # of the command itself, which has no shell here; what is run: `%distributed run` has it
        assert action.dest in ours, f"torchrun has {action.option_strings}, and nblaunch does not"
        option = ours.pop(action.dest)
        assert option.flags[0] in action.option_strings
        assert set(action.option_strings) <= set(option.spellings)
        assert (option.variable is not None) == hasattr(action, "env") or type(action).__name__ in (
            "env",
            "check_env",
        )
        takes_no_value = action.nargs == 0
        assert option.kind.switch == takes_no_value
    installed = tuple(map(int, run.torch.__version__.split(".")[:2]))
    of_torchrun = {option.name for option in ours.values() if option.torchrun in ("variable", "flag")}
    assert of_torchrun <= {name for name, first in ADDED.items() if installed < first}


# Lines


@pytest.mark.parametrize("option", OPTIONS, ids=_id)
def test_every_spelling_takes_its_value_after_a_space_or_an_equals_sign(option):
    text, value, *_ = SAMPLES[option.name]
    for spelling in option.spellings:
        assert _value(parse_line(f"{spelling}={text}", script=True).options, option.name) == value
        if not option.kind.switch:
            assert _value(parse_line(f"{spelling} {text}", script=True).options, option.name) == value


@pytest.mark.parametrize(
    ("line", "value"),
    [
        *(
            (line, 2)
            for line in ("-n2", "-n 2", "-n=2", "--nproc 2", "--nproc-per-node=2", "--nproc_per_node 2")
        ),
        *((line, "gpu") for line in ("-ngpu", "-n gpu", "-n auto -n gpu")),
    ],
)
def test_the_number_of_ranks_is_written_as_with_torchrun_and_shorter(line, value):
    assert parse_line(line).options == LaunchOptions(nproc_per_node=value)


def test_switches_need_no_value():
    options = parse_line("--no-init --standalone").options
    assert (options.init_process_group, options.standalone) == (False, True)


@pytest.mark.parametrize("option", OPTIONS, ids=_id)
def test_of_an_option_given_twice_the_last_counts(option):
    first, _, last, value = SAMPLES[option.name]
    for early in option.spellings:
        for late in option.spellings:
            line = f"{early}={first} {late}={last}"
            assert _value(parse_line(line, script=True).options, option.name) == value


def test_environment_variables_add_up():
    options = parse_line("--env A=1 --env=B=x=y --env A=2 --env 'C=a b'").options
    assert dict(options.env) == {"A": "2", "B": "x=y", "C": "a b"}


def test_names_to_pull_add_up_each_once():
    assert parse_line("--pull a,b --pull=c --pull a", script=True).options.pull == ("a", "b", "c")
    assert LaunchOptions.from_keywords(script=True, pull="a,b").pull == ("a", "b")


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("--role 'a b'", "a b"),
        ('--role "a b"', "a b"),
        ("--role a\\ b", "a b"),
        ("--role a  # --role b", "a"),
        ("--role a #", "a"),
        ("--role a # don't", "a"),
        ("--role a#b", "a#b"),
        ("--role '#a'", "#a"),
        ("--role \\#a", "#a"),
        ("# --role a", "rank"),
        (" \t--role\ta\n", "a"),
        ("--role=-x", "-x"),
        ("--role=", None),
        ("--role 'a", None),
        ("--role a\\", None),
    ],
)
def test_a_line_is_split_as_a_shell_splits_it(line, role):
    if role is None:
        with pytest.raises(OptionError):
            parse_line(line)
    else:
        assert parse_line(line).options.role == role


@pytest.mark.parametrize("line", ["-h", "--help", "-n 2 --help", "-h --no-such-option", "--timeout x -h"])
def test_help_is_wanted_and_nothing_is_printed(line, capsys):
    parsed = parse_line(line)
    assert parsed.help_wanted
    assert parsed.options == LaunchOptions()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("line", ["4", "-n 2 4", "x", "-n 2 --timeout 3 -- x", "''", "-"])
def test_a_cell_magic_takes_no_words_besides_options(line):
    with pytest.raises(OptionError, match="only options can stand here"):
        parse_line(line)


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        ("", ()),
        ("-n 2 train.py --lr 0.1 -n 3", ("train.py", "--lr", "0.1", "-n", "3")),
        ("-n 2 -- --odd-name.py -h", ("--odd-name.py", "-h")),
        ("x y -n 2", ("x", "y", "-n", "2")),
        ("-n 2 'my file.py' # really", ("my file.py",)),
    ],
)
def test_where_words_are_taken_the_first_one_ends_the_options(line, rest):
    parsed = parse_line(line, positional=True)
    assert parsed.rest == rest
    assert not parsed.help_wanted
    assert parsed.options.nproc_per_node == (2 if line.startswith("-n 2") else "auto")


@pytest.mark.parametrize("line", ["--timeout", "--timeout --grace 3", "-n", "--env", "-n 2 --role -h"])
def test_an_option_without_its_value_says_what_the_value_is(line):
    with pytest.raises(OptionError, match="needs a value"):
        parse_line(line)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--bogus --timeout", "--bogus "),
        ("--timeout --bogus", "--timeout "),
        ("-np 4 --timeout", "-np "),
        ("-n 2 -5 --timeout", "-5 "),
        ("--timeout 3 --timeout -h", "--timeout "),
    ],
)
def test_of_several_mistakes_on_a_line_the_first_is_named(line, named):
    with pytest.raises(OptionError, match=f"^{named}was asked for, but "):
        parse_line(line)


def test_a_name_that_ipython_did_not_fill_in_is_explained():
    for text in ("$gpus", "{gpus}"):
        with pytest.raises(OptionError, match="every name on the line exists"):
            parse_line(f"-n {text}")


@given(line=st.text() | st.lists(st.sampled_from([
    *(spelling for option in OPTIONS for spelling in (*option.spellings, f"{option.flags[0]}=")),
    *(text for sample in SAMPLES.values() for text in (sample[0], sample[2])),
    "-h", "--", "-", "-1", "#", "'", '"', "\\", "\n", "=", "$x", "{x}", "-nx", "\0", "~", "\ud800",
])).map(" ".join), positional=st.booleans())  # fmt: skip
@example(line="-n" + "9" * 5000, positional=False)
@example(line="--timeout 1e999", positional=False)
@example(line="--log-dir " + "x" * 5000, positional=True)
def test_any_line_either_means_options_or_is_an_option_error(line, *, positional):
    with contextlib.suppress(OptionError):
        parsed = parse_line(line, positional=positional)
        assert isinstance(parsed.options, LaunchOptions)


# From options to a line and back

_numbers = st.floats(min_value=0, max_value=LONGEST_SECONDS, exclude_min=True)
_names = st.text("abcXYZ_-é$", min_size=1).filter(lambda name: name.strip())
_env_texts = st.text().filter(lambda text: "\0" not in text and text.isascii())
_words = st.text(min_size=1).filter(lambda text: text.isprintable() and "," not in text)
_kinds: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.sampled_from([value, other]) for name, (_, value, _, other) in SAMPLES.items()},
    "nproc_per_node": st.integers(1, MOST_RANKS_PER_NODE) | st.sampled_from(["auto", "cpu", "gpu"]),
    "out": st.none() | st.from_regex(r"[a-z_]+[0-9]", fullmatch=True),
    "export": st.none() | st.from_regex(r"[a-zé/ .]*[a-z]\.py", fullmatch=True),
    "linger": _numbers | st.integers(1, 100).map(lambda hours: 3600.0 * hours),
    "restore": st.none() | st.text(min_size=1).filter(str.isprintable),
    "save_every": st.none() | _numbers,
    "drop": st.lists(st.from_regex(r"[a-z_]+[0-9]", fullmatch=True), unique=True).map(tuple),
    "ranks": st.none() | st.sets(st.integers(0, 5000), min_size=1).map(lambda ranks: tuple(sorted(ranks))),
    "env": st.dictionaries(_names, _env_texts),
    "timeout": st.none() | _numbers,
    "grace": st.just(0.0) | _numbers,
    "profile_steps": st.none() | st.tuples(st.integers(0, 9), st.integers(9, 99)),
    "watch": st.sampled_from([(), ("nan",), ("nan:warn", "desync"), ("desync:warn",)]),
    "max_restarts": st.integers(0, 2**31 - 1),
    "role": st.text(min_size=1).filter(str.isprintable),
    "log_dir": st.none() | st.text("ab ./-#'\"$é", min_size=1, max_size=60),
    "metrics_file": st.none() | st.text("ab./-#'\"$é", min_size=1, max_size=60).map("{}m".format),
    "rdzv_conf": st.lists(st.from_regex(r"[a-z_]+=[a-z0-9=$']+", fullmatch=True)).map(",".join),
    "slurm": st.sampled_from(["", "-p gpu", "-p 'a b' -t 30"]),
    "node_python": st.none() | st.just("/opt/a b/python"),
    "duplicate_stdout_filters": st.lists(_words).map(tuple),
    "log_line_prefix_template": _words,
}


@given(st.fixed_dictionaries({}, optional=_kinds))
def test_options_written_as_a_line_are_read_back_the_same(values):
    options = LaunchOptions(**values)
    line = options.to_line()
    assert parse_line(line, script=True).options == options
    copied = pickle.loads(pickle.dumps(options))
    assert copied == options
    assert hash(copied) == hash(options)


@given(st.fixed_dictionaries({}, optional=_kinds))
def test_a_value_in_its_final_form_stays_as_it_is(values):
    once = LaunchOptions(**values)
    again = dataclasses.replace(once)
    assert again == once
    assert {option.name: type(_value(again, option.name)) for option in OPTIONS} == {
        option.name: type(_value(once, option.name)) for option in OPTIONS
    }


def test_a_line_holds_only_what_is_not_the_default_in_torchruns_spelling():
    assert LaunchOptions().to_line() == ""
    options = LaunchOptions(
        nproc_per_node=2,
        init_process_group=False,
        standalone=False,
        max_restarts=3,
        env={"A": "x y", "B": ""},
    )
    words = ["--nproc-per-node=2", "--no-init", "--env=A=x y", "--env=B=", "--max-restarts=3"]
    assert shlex.split(options.to_line()) == [*words, "--standalone=false"]


# Keywords


@pytest.mark.parametrize("option", [*OF_RUN, *OF_SESSION], ids=_id)
def test_every_keyword_takes_its_value(option):
    _, value, _, other = SAMPLES[option.name]
    for keyword in option.keywords:
        for each in (value, other):
            options = LaunchOptions.from_keywords(script=True, of_session=True, **{keyword: each})
            assert _value(options, option.name) == each


def test_nproc_and_nproc_per_node_together_are_refused():
    with pytest.raises(OptionError, match=r"nproc_per_node= and nproc= .* same option"):
        LaunchOptions.from_keywords(nproc=2, nproc_per_node=2)


def test_out_belongs_to_the_magic():
    assert parse_line("--out results").options.out == "results"
    with pytest.raises(OptionError, match=r"only a magic has this option \(--out\)"):
        LaunchOptions.from_keywords(out="results")


@pytest.mark.parametrize("name", ["module", "no_python", "run_path", "pull"])
def test_only_a_script_has_the_options_of_a_script(name, monkeypatch):
    with pytest.raises(OptionError, match=f"^{name}= was asked for, but only a script has this option"):
        LaunchOptions.from_keywords(**{name: True})
    with pytest.raises(OptionError, match="no such option"):
        parse_line(f"--{name}")
    monkeypatch.setenv(f"PET_{name.upper()}", "1")
    assert LaunchOptions.from_keywords() == parse_line("").options == LaunchOptions()


@pytest.mark.parametrize(
    ("text", "seconds", "line"),
    [
        ("90s", 90, "90s"),
        ("30m", 1800, "30m"),
        ("8h", 28800, "8h"),
        ("48H", 172_800, "2d"),
        (1.5, 1.5, "1.5"),
    ],
)
def test_a_duration_may_have_a_unit(text, seconds, line):
    options = LaunchOptions.from_keywords(of_session=True, linger=text)
    assert (options.linger, options.to_line()) == (seconds, f"--linger={line}")


SESSION: Any = SimpleNamespace(name="default", world_size=2, options=LaunchOptions(nproc_per_node=2))


@pytest.mark.parametrize("option", OF_THE_GROUP, ids=_id)
def test_what_is_decided_with_a_session_cannot_be_changed_by_a_cell(option):
    asked = parse_line(f"{option.flags[0]}={SAMPLES[option.name][0]}").options
    with pytest.raises(OptionError, match=rf"^{option.flags[0]} .* session 'default' .* --fresh"):
        check_cell_options(SESSION, asked)


@pytest.mark.parametrize("name", sorted(OF_A_CELL))
def test_what_belongs_to_a_job_each_cell_of_a_session_decides(name):
    option = next(each for each in OPTIONS if each.name == name)
    text, value, *_ = SAMPLES[name]
    asked = parse_line(f"{option.flags[0]}={text}").options
    check_cell_options(SESSION, asked)
    assert _value(within(SESSION.options, asked), name) == value


@pytest.mark.parametrize(("name", "value"), ALL_WRONG, ids=_id)
def test_a_wrong_value_is_refused_by_name_however_it_is_given(name, value):
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(OptionError, match=f"^{name}=.* was asked for, but ") as caught:
        LaunchOptions(**wrong)
    with pytest.raises(OptionError):
        dataclasses.replace(LaunchOptions(), **wrong)
    option = next(option for option in OPTIONS if option.name == name)
    if option.scope != "notebook":
        for keyword in option.keywords:
            with pytest.raises(OptionError, match=f"^{keyword}="):
                LaunchOptions.from_keywords(script=True, of_session=True, **{keyword: value})
    assert len(str(caught.value)) < 1000
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("-n 0", "-n 0 "),
        ("-n -1", "-n -1 "),
        ("-n0", "-n 0 "),
        ("--nproc_per_node=many", "--nproc_per_node many "),
        ("--timeout nan", "--timeout nan "),
        ("--timeout=-inf", "--timeout -inf "),
        ("--timeout 1e300", "--timeout 1e300 "),
        ("--backend 'nc cl'", "--backend 'nc cl' "),
        ("--max_restarts 1.5", "--max_restarts 1.5 "),
        ("--standalone=maybe", "--standalone maybe "),
        ("--out class", "--out class "),
        ("--env A", "--env A "),
        ("--timeout x --timeout 3", "--timeout x "),
    ],
)
def test_a_wrong_value_on_a_line_is_named_as_it_was_spelled(line, named):
    with pytest.raises(OptionError) as caught:
        parse_line(line)
    assert str(caught.value).startswith(f"{named}was asked for, but it takes ")


def test_an_error_says_what_was_asked_what_is_true_and_what_to_do():
    with pytest.raises(OptionError) as caught:
        LaunchOptions.from_keywords(nproc=0)
    assert str(caught.value) == (
        "nproc=0 was asked for, but it takes a whole number from 1 to 4096, auto, cpu or gpu. "
        "Give such a value, or leave it out (the default is auto)."
    )


def test_a_value_is_checked_once(monkeypatch):
    checked: list[str] = []
    check = Option.check

    def counted(self: Option, keyword: str, value: object) -> object:
        checked.append(keyword)
        return check(self, keyword, value)

    monkeypatch.setattr(Option, "check", counted)
    assert LaunchOptions.from_keywords(nproc=2, timeout=60) == parse_line("-n 2 --timeout 60").options
    assert checked == ["nproc", "timeout"]


def test_numbers_of_other_libraries_are_taken():
    numpy = pytest.importorskip("numpy")
    options = LaunchOptions.from_keywords(nproc=numpy.int64(2), timeout=numpy.float32(1.5))
    assert (type(options.nproc_per_node), type(options.timeout)) == (int, float)
    assert options == LaunchOptions(nproc_per_node=2, timeout=1.5)


def test_a_backend_is_kept_in_lower_case():
    assert LaunchOptions(backend="CPU:Gloo,cuda:NCCL").backend == "cpu:gloo,cuda:nccl"


# Environment variables for the ranks


@pytest.mark.parametrize(
    "name",
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
     "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_X"],
)  # fmt: skip
def test_what_torchelastic_sets_cannot_be_set(name):
    for ask in (lambda: LaunchOptions(env={name: "1"}), lambda: parse_line(f"--env {name}=1")):
        with pytest.raises(OptionError, match=f"torchelastic itself sets '{name}' in every rank"):
            ask()


def test_variables_that_only_look_like_torchelastics_can_be_set():
    env = {"MY_RANK": "1", "rank": "2", "OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert LaunchOptions(env=env).env == env


def test_the_environment_is_a_copy_that_nobody_can_change():
    given_env = {"A": "1"}
    options = LaunchOptions(env=given_env)
    given_env["A"] = "2"
    assert options.env == {"A": "1"}
    assert not hasattr(options.env, "__setitem__")
    assert len(options.env) == 1
    assert copy.deepcopy(options) == options
    assert LaunchOptions(env={"A": "1", "B": "2"}) == LaunchOptions(env={"B": "2", "A": "1"})


def test_values_of_the_environment_are_never_shown():
    secret = "hunter2"  # noqa: S105  a secret is what this is about
    options = LaunchOptions(env={"KEY": secret})
    assert secret not in repr(options)
    assert repr(EnvironmentVariables({"KEY": secret})) == "{'KEY': '…'}"
    for ask in (
        lambda: LaunchOptions(env={"KEY": secret, "": secret}),
        lambda: LaunchOptions.from_keywords(env=[("KEY", secret)]),
        lambda: parse_line(f"--env RANK={secret}"),
        lambda: parse_line(f"--env ={secret}"),
        lambda: parse_line(f"--env KEY={secret}'"),
    ):
        with pytest.raises(OptionError) as caught:
            ask()
        assert secret not in str(caught.value)


# Directories


def test_a_log_directory_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for occupied in (file, str(file), file / "below", tmp_path / "dangling"):
        with pytest.raises(OptionError, match="is there and is no directory"):
            LaunchOptions(log_dir=occupied)  # a path-like is taken as well
    assert LaunchOptions.from_keywords(log_dir=tmp_path).log_dir == str(tmp_path)
    assert LaunchOptions(log_dir=str(tmp_path / "new" / "one")).log_dir == str(tmp_path / "new" / "one")
    assert LaunchOptions(log_dir="deep/" * 500).log_dir == "deep/" * 500


def test_a_tilde_in_a_log_directory_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_line("--log-dir ~/runs").options.log_dir == str(tmp_path / "runs")
    assert LaunchOptions(log_dir="./~").log_dir == "./~"


# PET_ variables


@pytest.mark.parametrize("option", WITH_VARIABLE, ids=_id)
def test_an_explicit_option_beats_its_variable_which_beats_the_default(
    option,
    monkeypatch,
):
    text, value, explicit_text, explicit = SAMPLES[option.name]
    assert option.variable == f"PET_{option.name.upper()}"
    monkeypatch.setenv(option.variable, text)
    for options in (LaunchOptions.from_keywords(script=True), parse_line("", script=True).options):
        assert _value(options, option.name) == value
    line = f"{option.flags[0]}={explicit_text}"
    assert _value(parse_line(line, script=True).options, option.name) == explicit
    for keyword in option.keywords:
        given_here: dict[str, Any] = {keyword: explicit}
        assert _value(LaunchOptions.from_keywords(script=True, **given_here), option.name) == explicit
    assert _value(LaunchOptions(), option.name) == option.default


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PET_NPROC_PER_NODE", "0"),
        ("PET_NPROC_PER_NODE", ""),
        ("PET_MAX_RESTARTS", "-1"),
        ("PET_MONITOR_INTERVAL", "nan"),
        ("PET_ROLE", ""),
        ("PET_LOG_DIR", "/dev/null/x"),
        ("PET_SHUTDOWN_TIMEOUT", "1.5"),
        ("PET_STANDALONE", "maybe"),
    ],
)
def test_a_wrong_variable_is_named_unless_the_option_is_given(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    for ask in (LaunchOptions.from_keywords, lambda: parse_line("")):
        with pytest.raises(OptionError, match=f"^{variable}="):
            ask()
    name = variable.removeprefix("PET_").lower()
    parse_line(f"--{name}={SAMPLES[name][0]}", script=True)
    given_here: dict[str, Any] = {name: SAMPLES[name][1]}
    LaunchOptions.from_keywords(script=True, **given_here)


# Suggestions


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("--time-out 3", "--timeout"),
        ("--nprocs 2", "--nproc"),
        ("--nproc-per-nod 2", "--nproc-per-node"),
        ("--max_restart 2", "--max_restarts"),
        ("--max-restart=2", "--max-restarts"),
        ("--time 2", "--timeout"),
        ("--noinit", "--no-init"),
        ("--init-process-group=false", "--no-init"),
        ("-nproc 4", "--nproc"),
        ("--logdir x", "--log-dir"),
        ("--Timeout 3", "--timeout"),
        ("--envs A=1", "--env"),
        ("4", "-n 4"),
        ("timeout=3", "--timeout"),
        ("nproc=3", "--nproc"),
    ],
)
def test_an_unknown_option_names_the_nearest_one(line, right):
    with pytest.raises(OptionError) as caught:
        parse_line(line)
    assert str(caught.value).endswith(f"Did you mean {right}?")


@pytest.mark.parametrize(
    ("keyword", "right"),
    [
        ("timeot", "timeout="),
        ("time_out", "timeout="),
        ("nprocs", "nproc="),
        ("nproc_per_nod", "nproc_per_node="),
        ("n", "nproc="),
        ("no_init", "init_process_group="),
        ("max_restart", "max_restarts="),
        ("logdir", "log_dir="),
    ],
)
def test_an_unknown_keyword_names_the_nearest_one(keyword, right):
    with pytest.raises(OptionError) as caught:
        LaunchOptions.from_keywords(**{keyword: True})
    assert str(caught.value) == (
        f"{keyword}= was asked for, but there is no such option. Did you mean {right}?"
    )


def test_where_nothing_is_near_all_options_are_listed_once():
    with pytest.raises(OptionError) as on_line:
        parse_line("--xyzzy")
    with pytest.raises(OptionError) as in_python:
        LaunchOptions.from_keywords(xyzzy=1)
    assert str(on_line.value).endswith(f"There are: {', '.join(option.flags[0] for option in OF_MAGIC)}.")
    assert str(in_python.value).endswith(f"There are: {', '.join(f'{option.name}=' for option in OF_RUN)}.")


@given(st.data())
def test_one_slip_in_a_long_name_still_finds_it(data):
    flags = [spelling for option in OPTIONS for spelling in option.spellings if len(spelling) > 6]
    flag = data.draw(st.sampled_from(flags))
    place = data.draw(st.integers(2, len(flag) - 1))
    found = nearest(flag[:place] + flag[place + 1 :], flags)
    assert found is not None
    assert found.replace("_", "-") == flag.replace("_", "-")


# Documentation and completion


def test_the_help_names_every_option():
    text = options_help("%distributed run", script=True)
    for option in OPTIONS:
        assert option.help in text
        assert option.help in (LaunchOptions.__doc__ or "")
        assert "\n" not in option.help
    assert text.startswith("%distributed run [options] script [arguments]\n")
    assert "--run-path" not in options_help("%%distributed")


SCREEN = (40, 100)
"""Lines and characters of a notebook's pager, or a terminal that somebody has made larger."""


def test_the_question_mark_fits_a_screen_and_names_every_option_by_use():
    text = options_on_a_screen("%%distributed")
    lines = text.splitlines()
    assert len(lines) <= SCREEN[0]
    assert max(map(len, lines)) <= SCREEN[1]
    assert set(re.findall(r"--[a-z-]+", text)) >= {each.flags[0] for each in OF_MAGIC if not each.everyday}
    daily = sorted((each for each in OPTIONS if each.everyday), key=lambda each: each.everyday)
    assert [each.everyday for each in daily] == list(range(1, len(daily) + 1))
    places = [text.index(f"{min(each.flags, key=len)}") for each in daily]
    assert places == sorted(places)
    assert daily[0].name == "nproc_per_node"


def test_the_long_help_has_the_groups_in_the_same_order():
    text = options_help("%%distributed")
    titles = [title for title in ("Every day", *TITLES.values()) if f"\n{title}:" in text]
    assert titles == [title for title in ("Every day", *TITLES.values()) if title != "Scripts"]
    assert [text.index(f"\n{title}:") for title in titles] == sorted(
        text.index(f"\n{title}:") for title in titles
    )
    assert set(TITLES) == set(get_args(Scope))


@pytest.mark.parametrize(
    ("line", "here"),
    [
        ("-np 4", "mpirun's; here it is -n 4."),
        ("-np4", "mpirun's; here it is -n 4."),
        ("-ppn 2", "mpiexec's; here it is -n 2."),
        ("--ntasks-per-node=2", "srun's; here it is -n 2."),
        ("-N 2", "srun's; here it is --nnodes 2."),
        ("-H a,b", "mpirun's; here it is --on ssh=a,b."),
        ("--hostfile hosts", "mpirun's; here it is --on ssh=HOST1,HOST2."),
        ("-p gpu", "srun's; here it is --slurm '-p gpu' with --on slurm."),
        ("--num_processes 3", "accelerate's; here it is -n 3."),
        ("-x HF_TOKEN=hidden", "mpirun's; here it is --env HF_TOKEN=…."),
        ("-np", "mpirun's; here it is -n N."),
        ("-np --timeout 3", "mpirun's; here it is -n N."),
    ],
)
def test_what_other_launchers_call_it_is_translated(line, here):
    with pytest.raises(OptionError) as refused:
        parse_line(line)
    assert str(refused.value).endswith(f"That is {here}")
    assert "hidden" not in str(refused.value)


def test_a_keyword_of_another_launcher_is_translated():
    with pytest.raises(OptionError, match="That is accelerate's; here it is nproc="):
        LaunchOptions.from_keywords(num_processes=2)


def test_no_spelling_of_another_launcher_is_one_of_ours():
    """It would never be translated, or mean two things."""
    ours = {spelling for each in OPTIONS for spelling in each.spellings}
    foreign = [entry.split(" ")[1] for each in OPTIONS for entry in each.foreign]
    assert set(foreign) & ours == set()
    assert len(foreign) == len(set(foreign))


def _completions() -> Iterator[tuple[str, list[str]]]:
    everything = [option.flags[0] for option in OF_MAGIC]
    for prefix in ("", "%%distributed ", "%distributed "):
        yield prefix, everything
        yield f"{prefix}-n 2 ", everything
        yield f"{prefix}--ti", ["--timeout"]
        yield f"{prefix}-n 2 --max", ["--max-restarts"]
        yield f"{prefix}--max_", ["--max_restarts"]
        yield f"{prefix}--h", ["--hang-after", "--here", "--help"]
        yield f"{prefix}--backend ", ["auto", "gloo", "nccl"]
        yield f"{prefix}--backend n", ["nccl"]
        yield f"{prefix}--backend=g", ["gloo"]
        yield f"{prefix}-n ", ["auto", "cpu", "gpu"]
        yield f"{prefix}--role ", []
        yield f"{prefix}--role --t", []
        yield f"{prefix}--no-init --ti", ["--timeout"]
        yield f"{prefix}--xyzzy", []
        yield f"{prefix}--xyzzy=", []
        yield f"{prefix}-n 2 # --ti", []
    yield "%%distributed\n--ti", []


@pytest.mark.parametrize(("text", "completions"), list(_completions()))
def test_completion_offers_options_and_choices(text, completions):
    assert option_completions(text) == completions


@given(st.text())
def test_completion_never_raises(text):
    option_completions(text)
