"""What is wrong with a session, or with a cell in one, is said before any process starts."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

import nblaunch
from nblaunch._errors import OptionError
from nblaunch._results import SessionInfo, sessions_table
from nblaunch.client.local import Client
from nblaunch.magic import auto, commands, sessions
from nblaunch.options.command_line import parse_line
from nblaunch.options.launch import LaunchOptions, refuse_session_options, within
from nblaunch.protocol.client import RankStatus


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """Fail if anything is started."""

    def refused(*_: object, **__: object) -> None:
        pytest.fail("a process was to be started")

    monkeypatch.setattr(Client, "runtime", property(refused))


# --- Session(...) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"nproc": 0}, "nproc=0"),
        ({"time_out": 3}, "timeout="),
        ({"env": {"RANK": "1"}}, "RANK"),
        ({"ranks": (0,)}, "ranks="),
        ({"out": "x"}, "out="),
        ({"fresh": True}, "fresh="),
        ({"background": True}, "background="),
        ({"session": "a"}, "session="),
        ({"nproc": 2, "nproc_per_node": 2}, "same option"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_session_is_an_option_error(keywords, said):
    with pytest.raises(nblaunch.OptionError, match=said):
        nblaunch.Session(**keywords)


# --- a cell in a session ---------------------------------------------------------------------------


def opened(world_size: int = 2, **options: Any) -> Any:
    """Return what `check_cell_options` looks at."""
    return SimpleNamespace(
        name="default",
        world_size=world_size,
        options=LaunchOptions.from_keywords(nproc=world_size, **options),
    )


def test_a_cell_takes_from_its_session_what_it_does_not_ask_for_itself(monkeypatch):
    monkeypatch.setenv("PET_REDIRECTS", "2")
    session = LaunchOptions(nproc_per_node=4, timeout=60, grace=1, redirects="3")
    taken = within(session, parse_line("--grace 2 --out res --tee 1").options)
    assert taken == LaunchOptions(nproc_per_node=4, timeout=60, grace=2, redirects="3", tee="1", out="res")


def test_the_option_that_the_session_has_may_be_repeated():
    sessions.check_cell_options(opened(4, role="trainer"), parse_line("-n 4 --role trainer").options)


def test_a_variable_of_the_environment_is_no_wish_of_the_cells(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    sessions.check_cell_options(opened(2, max_restarts=0), parse_line("").options)
    with pytest.raises(nblaunch.OptionError, match="4 was asked for"):
        sessions.check_cell_options(opened(2, max_restarts=0), parse_line("-n 4").options)


# --- %distributed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "it needs a command"),
        ("strat -n 2", "Did you mean %distributed start?"),
        ("frobnicate", "There are: start, stop"),
        ("start -n 0", "-n 0"),
        ("start --nporc 2", "--nproc"),
        ("start --fresh", "--fresh"),
        ("start --background", "--background"),
        ("start --ranks 0", "--ranks"),
        ("start --out x", "--out"),
        ("start --session 'not a name'", "--session"),
        ("push", "no name"),
        ("pull", "no name"),
        ("pull --ranks 0", "no name"),
        ("pull x --ranks nobody", "--ranks"),
        ("status now", "'now'"),
        ("stop it", "'it'"),
        ("auto", "on or off"),
        ("doctor now", "doctor takes only --nccl"),
    ],
)
def test_a_wrong_command_says_what_is_right(line, said):
    with pytest.raises(nblaunch.OptionError) as caught:
        commands.command(line, {})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "stop",
        "restart",
        "stacks",
        "interrupt",
        "pull x",
        "inspect x",
        "stop --session a",
        "status --session a",
    ],
)
def test_without_a_session_a_command_says_how_to_start_one(line):
    name = line.partition("--session ")[2]
    with pytest.raises(nblaunch.NblaunchError) as caught:
        commands.command(line, {})
    assert "no session is open" in str(caught.value)
    assert f"%distributed start -n 2{' --session a' if name else ''}" in str(caught.value)


def test_the_status_of_no_session_is_no_error():
    assert str(commands.command("status", {})) == "no session is open; %distributed start -n 2 opens one"


def test_a_variable_that_the_notebook_lacks_cannot_be_pushed():
    with pytest.raises(nblaunch.NblaunchError, match=r"no variable 'lss' .* Did you mean 'loss'\?"):
        commands.command("push lss", {"loss": 1})


# --- what `%%local` and `auto` make of a cell ------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "runs"),
    [
        ("%%local\nx\n", "\nx\n"),
        ("%%local  \nx\n", "\nx\n"),
        ("%%local\n%%time\nx\n", "%%time\nx\n"),
        ("%%local\n\n%%time\nx\n", "%%time\nx\n"),
        ("x\n%%local\n", "x\n%%local\n"),
        ("%%localhost\nx\n", "%%localhost\nx\n"),
        ("", ""),
    ],
)
def test_local_is_taken_away_and_the_lines_keep_their_numbers(cell, runs):
    assert "".join(auto.without_local(cell.splitlines(keepends=True))) == runs


def test_without_a_session_no_cell_is_sent_to_ranks():
    assert auto.transform(["x\n"]) == ["x\n"]


@pytest.mark.parametrize(
    ("cell", "sent"),
    [
        ("x = 1\nx\n", True),
        ("# a comment first\nx\n", True),
        ("\n\nx\n", True),
        ("w = !ls\nw\n", True),
        ("%time x\n", False),
        ("%%bash\nls\n", False),
        ("!ls\n", False),
        ("?x\n", False),
        ("%%local\nx\n", False),
        ("%%distributed\nx\n", False),
        ("%distributed status\n%distributed stacks\n", False),
        ("\n", False),
    ],
)
def test_which_cells_auto_sends_to_the_ranks(cell, sent, monkeypatch):
    monkeypatch.setitem(sessions._sessions, "default", SimpleNamespace(open=True))
    lines = cell.splitlines(keepends=True)
    try:
        assert auto.transform(lines) == (["%%distributed\n", *lines] if sent else lines)
        assert auto.take_inserted() is sent
    finally:
        sessions._sessions.clear()


def test_only_a_session_can_be_detached():
    """A run ends with its job, a cell with its cell: nothing of them could be found later."""
    with pytest.raises(OptionError, match=r"only a session has this option.*Session\(detach=\.\.\.\)"):
        nblaunch.run(print, detach=True)
    with pytest.raises(OptionError, match="only a session has this option"):
        nblaunch.run("train.py", linger="8h")
    with pytest.raises(OptionError, match="--detach is for %distributed start"):
        refuse_session_options(parse_line("-n 2 --detach").options)
    with pytest.raises(OptionError, match="--linger is for %distributed start"):
        refuse_session_options(parse_line("--linger 8h").options)
    refuse_session_options(parse_line("-n 2").options)


def test_sessions_are_listed_in_columns():
    now = time.time()
    train = SessionInfo(
        name="train",
        detached=True,
        started=now,
        kernel=12345,
        pid=2,
        notebook="/home/ann/train.ipynb",
        world_size=2,
        backend="gloo",
        ranks=(RankStatus(0, "running", 1, "cpu", 231_000_000), RankStatus(1, "running", 2, "cpu", None)),
        running="cell",
        running_since=now - 12.2,
    )
    idle = SessionInfo(
        name="a",
        detached=False,
        started=now,
        kernel=7,
        pid=2,
        world_size=16,
        backend="nccl",
        linger_left=1300,
    )
    away = SessionInfo(name="b", detached=True, started=now, kernel=8, pid=2, problem="on node7")
    since = time.strftime("since %b %d %H:%M", time.localtime(now))
    lines = sessions_table([train, idle, away]).splitlines()
    assert [re.split(" {2,}", line) for line in lines] == [
        [
            "train",
            "detached",
            "2 ranks (gloo), cpu, 231 MB",
            "runs cell for 12 s",
            f"{since}, train.ipynb",
        ],
        ["a", "16 ranks (nccl)", "idle, ends in 22 min unless it is used", f"{since}, kernel 7"],
        ["b", "detached", "on node7", f"{since}, kernel 8"],
    ]
    assert len({line.index("since") for line in lines}) == 1
    assert str(idle) == f"a  16 ranks (nccl)  idle, ends in 22 min unless it is used  {since}, kernel 7"
    assert sessions_table([]) == ""
