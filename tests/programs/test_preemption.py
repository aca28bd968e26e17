"""Nodes that are taken back: what ranks save before, and how a run ends that is preempted.

The nodes are processes of this machine, and get the signals by which an engine says it.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import PATIENCE, eventually

import nblaunch
from nblaunch import LaunchError, NblaunchError, RunPreemptedError
from nblaunch._results import Handle

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("own_runtime")]

ON: dict[str, Any] = {"nproc": 1, "nnodes": 2, "on": "process", "timeout": 60, "grace": 5}
HOSTS = [f"{platform.node()}-{number}" for number in (1, 2)]
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent)]))


def node_of(pid: int) -> psutil.Process:
    """Return the node program that has started this rank."""
    (found,) = [each for each in psutil.Process(pid).parents() if "join" in each.cmdline()]
    return found


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def begun(directory: Path) -> list[int]:
    """Wait until both ranks are at work; return their process ids."""
    noted = [directory / f"pid-{rank}" for rank in range(2)]
    eventually(lambda: all(map(text, noted)), "the ranks are at work", 3 * PATIENCE)
    return [int(text(each)) for each in noted]


def trains(directory, ends_at_once=(), stuck=()):
    import os
    import time
    from pathlib import Path

    import torch
    from torch import distributed

    import nblaunch

    rank, begun = distributed.get_rank(), time.monotonic()

    def save(left):
        print(f"rank {rank} saves")
        Path(directory, f"saved-{rank}").write_text(f"{left}")

    nblaunch.on_preempt(save)
    Path(directory, f"pid-{rank}").write_text(str(os.getpid()))
    if rank in stuck:
        distributed.all_reduce(torch.ones(1))
    while rank not in ends_at_once and time.monotonic() < begun + 50:
        time.sleep(0.01)
    return rank


@pytest.fixture
def run() -> Iterator[Any]:
    """Give `run(fn, *args)`: the handle of a run on two nodes."""
    made = []

    def begin(*args: Any, **options: Any) -> Handle:
        fn, *rest = args
        made.append(Handle(lambda _: run_outcome(fn, tuple(rest), {**ON, **options})))
        return made[-1]

    yield begin
    for each in made:
        eventually(each.done, "the run has ended", 6 * PATIENCE)
    made.clear()


def run_outcome(fn: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    from nblaunch._results import Outcome

    return Outcome(nblaunch.run(fn, args, **options), None)


@pytest.fixture
def session() -> Iterator[nblaunch.Session]:
    with nblaunch.Session(**ON) as made:
        yield made


def cell(session: nblaunch.Session, source: str) -> list[Any]:
    return list(session.cell(source, namespace={}).values)


# --- a run ---------------------------------------------------------------------------------------------


def test_ranks_save_and_the_run_ends_as_preempted(run, tmp_path):
    """One is stuck in a collective, one computes; the engine says it to one node."""
    going_on = run(trains, str(tmp_path), (), (0,))
    pids = begun(tmp_path)
    node = node_of(pids[1])
    began = time.monotonic()
    node.send_signal(signal.SIGTERM)
    with pytest.raises(RunPreemptedError) as caught:
        going_on.result(PATIENCE)
    seconds = time.monotonic() - began
    print(f"preempted: {seconds:.2f} s from the signal to the end of the run")
    assert str(caught.value) == (
        f"the run was preempted: node {HOSTS[1]} got SIGTERM\nranks 0-1 of 2 ended because of that"
    )
    result = caught.value.result
    assert result is not None
    assert [each.stdout for each in result.ranks] == ["rank 0 saves\n", "rank 1 saves\n"]
    assert [str(each.state) for each in result.ranks] == ["STOPPED", "STOPPED"]
    assert (result.ok, result.failures, result.preempted) == (False, (), f"node {HOSTS[1]} got SIGTERM")
    assert str(result.state.summary) == "PREEMPTED"
    assert f"preempted: node {HOSTS[1]} got SIGTERM" in result.warnings
    assert repr(result) == "<RunResult of 2 ranks, preempted>"
    lefts = [float(text(tmp_path / f"saved-{rank}")) for rank in range(2)]
    assert all(20 < left <= 30 for left in lefts), lefts
    for pid in (*pids, node.pid):
        eventually(lambda pid=pid: not psutil.pid_exists(pid), f"{pid} is gone")


@pytest.mark.slow
def test_values_of_ranks_that_had_finished_are_kept(run, tmp_path):
    going_on = run(trains, str(tmp_path), (0,))
    pids = begun(tmp_path)
    time.sleep(0.3)  # the value of rank 0 is on its way
    node_of(pids[0]).send_signal(signal.SIGUSR1)
    with pytest.raises(RunPreemptedError, match="rank 1 of 2 ended because of that") as caught:
        going_on.result(PATIENCE)
    result = caught.value.result
    assert result is not None
    assert list(result.values) == [0, None]
    assert [str(each.state) for each in result.ranks] == ["SUCCEEDED", "STOPPED"]
    assert all(text(tmp_path / f"saved-{rank}") for rank in range(2)), "also where the value was there"
    assert [each.stdout for each in result.ranks] == ["rank 0 saves\n", "rank 1 saves\n"]


def saves_slowly_on_one(directory):
    import os
    import time
    from pathlib import Path

    import nblaunch

    rank = os.environ["RANK"]

    def save(left):  # noqa: ARG001 - as all have it
        time.sleep(1.5)
        Path(directory, f"saved-{rank}").write_text("all")

    if rank == "0":
        nblaunch.on_preempt(save)
    Path(directory, f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(50)


def test_a_rank_that_the_signal_ends_does_not_end_those_that_save(run, tmp_path):
    """Slurm sends it to all processes of a node; a rank with nothing to save does not heed it."""
    going_on = run(saves_slowly_on_one, str(tmp_path))
    pids = begun(tmp_path)
    node_of(pids[1]).send_signal(signal.SIGTERM)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    with pytest.raises(RunPreemptedError) as caught:
        going_on.result(PATIENCE)
    assert text(tmp_path / "saved-0") == "all"
    assert caught.value.result is not None
    assert [str(each.state) for each in caught.value.result.ranks] == ["STOPPED", "STOPPED"]


@pytest.mark.slow
def test_without_an_order_to_save_the_signal_ends_a_rank(run, tmp_path):
    """That of its agent, or of who wants to be rid of it."""
    going_on = run(saves_slowly_on_one, str(tmp_path))
    pids = begun(tmp_path)
    began = time.monotonic()
    os.kill(pids[0], signal.SIGTERM)
    with pytest.raises(nblaunch.RunFailedError, match=f"rank 0 on {HOSTS[0]} failed: was killed by SIGTERM"):
        going_on.result(PATIENCE)
    assert time.monotonic() - began < 10
    assert not text(tmp_path / "saved-0")


@pytest.mark.slow
def test_without_check_a_preempted_run_is_returned(run, tmp_path):
    going_on = run(trains, str(tmp_path), check=False)
    node_of(begun(tmp_path)[0]).send_signal(signal.SIGUSR1)
    result = going_on.result(PATIENCE)
    assert (result.ok, bool(result.preempted)) == (False, True)


# --- a session -----------------------------------------------------------------------------------------


REGISTER = """
import nblaunch, os
from pathlib import Path
count = 0
@nblaunch.on_preempt
def save(left):
    global count
    count += 1
    print(f"saved {count}")
    Path(%r, f"saved-{os.environ['RANK']}").write_text(f"{count}")
os.getpid()
"""


def test_ranks_save_between_cells_and_in_one_and_the_session_goes_on_until_its_nodes_end(session, tmp_path):
    pids = cell(session, REGISTER % str(tmp_path))
    node_of(pids[0]).send_signal(signal.SIGUSR1)
    eventually(lambda: cell_count(tmp_path) == ["1", "1"], "both save between two cells")
    assert cell(session, "count") == [1, 1]
    stays = (
        "Path(%r, f'pid-{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\nimport time\ntime.sleep(50)"
    )
    going_on = Handle(lambda _: cell_outcome(session, stays % str(tmp_path)))
    begun(tmp_path)
    node_of(pids[0]).send_signal(signal.SIGUSR1)
    with pytest.raises(RunPreemptedError) as caught:
        going_on.result(PATIENCE)
    result = caught.value.result
    assert result is not None
    assert [each.stdout for each in result.ranks] == ["saved 2\n", "saved 2\n"]
    assert cell(session, "count") == [2, 2], "variables are there"
    node_of(pids[1]).send_signal(signal.SIGTERM)
    eventually(lambda: not session._live.open, "the session has ended")
    assert cell_count(tmp_path) == ["3", "3"]
    with pytest.raises(
        LaunchError, match=f"session 'default' has ended: node {HOSTS[1]} left. Start another"
    ):
        cell(session, "1")


def test_a_session_that_saves_by_itself_does_so_between_two_cells_and_not_in_the_middle_of_one(tmp_path):
    save = tmp_path / "save"
    with nblaunch.Session(**ON, restore=save, save_every=3600) as session:
        pids = cell(session, "import os, time; from pathlib import Path; a = 1; os.getpid()")
        stays = (
            "a = 'torn'; Path(%r, f'pid-{os.environ[\"RANK\"]}').write_text(str(os.getpid())); time.sleep(50)"
        )
        going_on = Handle(lambda _: cell_outcome(session, stays % str(tmp_path)))
        begun(tmp_path)
        node_of(pids[0]).send_signal(signal.SIGUSR1)
        with pytest.raises(RunPreemptedError):
            going_on.result(PATIENCE)
        assert cell(session, "a = 2") == [None, None]
        assert not save.exists()
        node_of(pids[1]).send_signal(signal.SIGTERM)
        eventually(lambda: not session._live.open, "the session has ended")
    with nblaunch.Session(nproc=2, restore=save) as session:
        assert cell(session, "a") == [2, 2]


def test_a_session_with_a_rank_that_was_started_again_saves_before_its_nodes_are_taken_back(tmp_path):
    save = tmp_path / "save"
    with nblaunch.Session(**ON | {"nproc": 2}, restore=save, save_every=3600) as session:
        pids = cell(session, "import os; a = 1; os.getpid()")
        attempt = session._live.attempt
        os.kill(pids[1], signal.SIGKILL)
        eventually(lambda: session._live.attempt > attempt, "the rank has been started again")
        assert cell(session, "a = 2; os.getpid()")[0] == pids[0]
        node_of(pids[0]).send_signal(signal.SIGTERM)
        eventually(lambda: not session._live.open, "the session has ended")
    with nblaunch.Session(nproc=4, restore=save) as session:
        assert cell(session, "a") == [2] * 4


WRITES_SLOWLY = """
import os, time
from nblaunch.rank import preempt
write, waits = os.pwrite, True
def pwrite(*args):
    global waits
    while waits and time.monotonic() > preempt._ordered + 10: time.sleep(0.01)
    time.sleep(1 if waits else 0)
    waits = False
    return write(*args)
os.pwrite = pwrite
a = 1
os.getpid()
"""


@pytest.mark.slow
def test_a_save_that_is_being_written_does_not_keep_ranks_from_saving_what_came_later(tmp_path):
    save = tmp_path / "save"
    with nblaunch.Session(**ON, restore=save, save_every=0.001) as session:
        pids = cell(session, WRITES_SLOWLY)
        cell(session, "a = 2")
        assert list(tmp_path.glob("save.partial-*"))
        node_of(pids[1]).send_signal(signal.SIGTERM)
        eventually(lambda: not session._live.open, "the session has ended")
    with nblaunch.Session(nproc=2, restore=save) as session:
        assert cell(session, "a") == [2, 2]


def cell_count(directory: Path) -> list[str]:
    return [text(directory / f"saved-{rank}") for rank in range(2)]


def cell_outcome(session: nblaunch.Session, source: str) -> Any:
    from nblaunch._results import Outcome

    return Outcome(session.cell(source, namespace={}), None)


@pytest.mark.slow
def test_a_rank_that_has_run_nothing_since_it_saved_does_not_save_again(session, tmp_path):
    pids = cell(session, REGISTER % str(tmp_path))
    saved = tmp_path / "saved-0"
    node_of(pids[0]).send_signal(signal.SIGUSR1)
    eventually(lambda: text(saved) == "1", "it saves")
    node_of(pids[0]).send_signal(signal.SIGTERM)
    eventually(lambda: not session._live.open, "the session has ended")
    assert text(saved) == "1"


SEVERAL = """
import nblaunch, os
from pathlib import Path
lines = []
def first(left): lines.append("first")
def fails(left): raise OSError("no room")
def last(left):
    lines.append("last")
    Path(%r, f"saved-{os.environ['RANK']}").write_text(" ".join(lines))
def gone(left): lines.append("gone")
for each in (gone, first, fails, last): nblaunch.on_preempt(each)
def first(left): lines.append("first again")
nblaunch.on_preempt(first)
nblaunch.on_preempt(gone, remove=True)
os.getpid()
"""


@pytest.mark.slow
def test_functions_are_called_in_their_order_and_one_that_fails_keeps_no_other(session, tmp_path):
    pids = cell(session, SEVERAL % str(tmp_path))
    node_of(pids[0]).send_signal(signal.SIGUSR1)
    eventually(lambda: cell_count(tmp_path) == ["first again last"] * 2, "both save")
    result = session.cell("1", namespace={})
    assert "rank 1 did not save all: fails raised OSError: no room" in result.warnings
    assert "OSError: no room" in result.ranks[1].stderr


def test_it_is_for_ranks():
    with pytest.raises(NblaunchError, match="in a process that is not a rank"):
        nblaunch.on_preempt(print)


@pytest.mark.slow
def test_it_takes_what_can_be_called(session):
    with pytest.raises(nblaunch.RunFailedError, match="on_preempt takes a function"):
        cell(session, "import nblaunch; nblaunch.on_preempt(7)")
