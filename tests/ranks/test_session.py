"""`nblaunch.Session`: ranks that stay, and keep their variables from one job to the next."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from lanes import sampled

import nblaunch
from nblaunch.capture.names import cell_names

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module", params=sampled([2, 4], ci=1), ids=["2 ranks", "4 ranks"])
def session(request, place):
    """Give one session to all tests that leave its ranks alive; each uses names of its own."""
    with place(request.param) as opened:
        warmed_up(opened)
        yield opened


@pytest.fixture(scope="module")
def pair(place):
    """Give a session of two ranks, where the number of ranks does not matter."""
    with place(2, name="pair") as opened:
        warmed_up(opened)
        yield opened


@pytest.fixture
def own(place):
    """Give a session that a test may break."""
    with place(2, name="own", grace=1) as opened:
        yield opened


def warmed_up(session: nblaunch.Session) -> None:
    """Have it open what it keeps open: the files that its ranks print to."""
    session.cell("import sys; print(); print(file=sys.stderr)")


def size(session: nblaunch.Session) -> int:
    return session.status().world_size


def notebook(source: str = "") -> dict[str, Any]:
    """Return the variables of a notebook that has run `source`."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)  # noqa: S102 - as a notebook does
    return namespace


# --- variables stay --------------------------------------------------------------------------------


def test_all_jobs_run_in_the_same_processes(session):
    pids = session.run(os.getpid).values
    assert session.cell("import os; os.getpid()").values == pids
    assert [each.pid for each in session.status().ranks] == pids
    assert [each.pid for each in session.run(os.getpid).ranks] == pids
    assert len({os.getpid(), *pids}) == size(session) + 1


def test_a_result_is_that_of_a_run(session):
    result = session.cell(
        "print('said', rank)\nfrom IPython.display import display\ndisplay('shown')\nrank * 2"
    )
    n = size(session)
    assert (result.ok, len(result), result.world_size, result.backend) == (True, n, n, "gloo")
    assert [each.stdout for each in result.ranks] == [f"said {rank}\n" for rank in range(n)]
    assert [each.displays[0].data["text/plain"] for each in result.ranks] == ["'shown'"] * n
    assert [each.exitcode for each in result.ranks] == [0] * n
    assert (result.warnings, result.failures, len(result.attempts)) == ((), (), 1)


def test_the_output_and_the_value_of_one_job_are_in_no_other_also_when_they_are_read_later(session):
    said = "print('job', {0}); import sys; print('error', {0}, file=sys.stderr); [{0}]"
    for number, result in enumerate([session.cell(said.format(number)) for number in range(5)]):
        assert {each.stdout for each in result.ranks} == {f"job {number}\n"}
        assert {each.stderr for each in result.ranks} == {f"error {number}\n"}
        assert result.values == [[number]] * size(session)


def test_what_a_function_sets_as_a_global_of_the_notebooks_stays(session):
    define = notebook("def set_it():\n    global made\n    made = 'by a function'\n")
    session.cell("set_it()", namespace=define)
    assert session.cell("made").values == ["by a function"] * size(session)


def test_the_lines_of_a_traceback_are_those_of_the_cell(pair):
    result = pair.cell("a = 1\n\nraise LookupError('here')", check=False)
    root = result.root_cause
    assert root is not None
    assert (root.frame.line, root.frame.filename) == (3, "session cell")
    assert "raise LookupError('here')" in root.traceback


def test_a_broken_cell_says_so_and_nothing_runs(pair):
    with pytest.raises(SyntaxError):
        pair.cell("broken = = 1")
    with pytest.raises(nblaunch.OptionError, match="not callable"):
        pair.run(7)


# --- the rank's variables and the notebook's -------------------------------------------------------


def test_a_variable_that_a_rank_has_bound_anew_is_its_own(session):
    there = {"counter": 10}
    session.cell("counter", namespace=there)
    session.cell("counter += 1 + rank", namespace=there)
    assert session.cell("counter", namespace={"counter": 99}).values == [11 + r for r in range(size(session))]


@pytest.mark.parametrize(
    "bind", ["same = 1", "same: int = 1", "(same, [other]) = 1, [2]", "import os as same", "def same(): pass"]
)
def test_a_variable_is_the_ranks_own_also_where_it_was_bound_to_the_very_same_object(pair, bind):
    pair.cell("globals().pop('same', None)")
    there = {"same": pair.cell(bind + "\n1").values[0] if bind.startswith(("same", "(")) else os}
    pair.cell("globals().pop('same', None)")
    pair.cell("same", namespace=there)
    pair.cell(bind)
    kept = pair.cell("repr(same)").values
    assert pair.cell("repr(same)", namespace={"same": 99}).values == kept
    assert "99" not in kept


def test_what_ranks_have_done_to_an_object_of_the_notebooks_is_kept(session):
    there = {"_model": [0]}
    for expected in ([0, 1], [0, 1, 1]):
        assert session.cell("_model.append(1); _model", namespace=there).values == [expected] * size(session)
    assert there == {"_model": [0]}


def test_a_variable_of_the_notebook_need_not_be_sendable_once_the_ranks_have_their_own(session):
    there = {"lock": threading.Lock()}
    with pytest.raises(nblaunch.CaptureError, match="lock"):
        session.cell("lock", namespace=there)
    session.cell("lock = 'no lock'")
    assert set(session.cell("lock", namespace=there).values) == {"no lock"}


def test_a_variable_that_the_rank_has_deleted_comes_from_the_notebook_at_once(session):
    """The next cell may be made before the ranks have had the time to say what they have."""
    for number in range(20):
        session.cell("fleeting = 'own'")
        session.cell("del fleeting")
        assert set(session.cell("fleeting", namespace={"fleeting": number}).values) == {number}
        session.cell("del fleeting")


FUNCTIONS = """
scale = 1
def inner():
    return scale
def outer():
    return inner()
class Model:
    def forward(self):
        return outer()
"""


def test_a_method_of_the_notebook_sees_the_global_of_a_global_function_that_was_bound_anew(session):
    there, use = notebook(FUNCTIONS), "Model().forward()"
    assert set(session.cell(use, namespace=there).values) == {1}
    there["scale"] = 2
    assert set(session.cell(use, namespace=there).values) == {2}
    assert set(session.cell("scale", namespace=there).values) == {2}
    exec("def inner(): return other * scale\nother = 5", there)  # noqa: S102 - as a notebook does
    assert set(session.cell(use, namespace=there).values) == {10}
    there["other"] = 7
    assert set(session.cell(use, namespace=there).values) == {14}


# --- some of the ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[0], [1, 0, 1], range(1, 2)])
def test_a_job_for_some_ranks_has_entries_for_those_alone(session, ranks):
    members = sorted(set(ranks))
    result = session.cell("took_part = rank\nprint('here')\nrank", ranks=ranks)
    assert result.values == members
    assert (len(result), list(result), result.ranks.keys(), result.ok) == (
        len(members),
        members,
        tuple(members),
        True,
    )
    assert [result[rank] for rank in members] == members
    assert result.world_size == size(session)
    for idle in set(range(size(session))) - set(members):
        with pytest.raises(KeyError, match=f"rank {idle} took no part"):
            result[idle]
        with pytest.raises(KeyError):
            result.ranks[idle]
    assert session.run(lambda: 1, ranks=ranks).ranks.keys() == tuple(members)


def test_the_others_are_idle_meanwhile(session, eventually, tmp_path):
    handle = session.submit(wait_for, (tmp_path / "go",), ranks=[1])
    eventually(lambda: session.status().ranks[1].state == "running", "rank 1 is at work")
    states = [each.state for each in session.status().ranks]
    assert states == ["idle", "running", *["idle"] * (size(session) - 2)]
    (tmp_path / "go").touch()
    assert handle.result(30).ranks.keys() == (1,)


def test_an_error_on_some_ranks_is_theirs(session):
    result = session.cell("raise ValueError(rank)", ranks=[1], check=False)
    assert [failure.rank for failure in result.failures] == [1]
    assert str(result.root_cause.exception) == "1"
    with pytest.raises(ValueError, match="1"):
        result[1]
    with pytest.raises(KeyError):
        result[0]


def test_wrong_ranks_are_said_before_anything_runs(session):
    arguments: dict[str, tuple[Any, ...]] = {
        "run": (os.getpid,),
        "cell": ("ran = True",),
        "push": ({"ran": True},),
        "pull": ("ran",),
        "submit": (os.getpid,),
    }
    for ranks in ([9], [-1], [0, 4], []):
        for method, given in arguments.items():
            with pytest.raises(nblaunch.OptionError, match=r"session 'default'.* ranks 0 to"):
                getattr(session, method)(*given, ranks=ranks)
    assert set(session.cell("'ran' in globals()").values) == {False}


# --- push and pull ---------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def test_tensors_and_arrays_keep_their_dtype_and_strides_both_ways_and_can_be_written_to(pair):
    base = torch.arange(60_000).reshape(200, 300)
    sent: dict[str, Any] = {f"as_{str(dtype).removeprefix('torch.')}": base.to(dtype).T for dtype in DTYPES}
    sent |= {"sliced": base[::2, 1::3], "wide": base[:1].expand(5, 300), "array": base.numpy().T}
    sent |= {"big_endian": np.arange(10_000, dtype=">i4"), "scalar": np.array(5, dtype=np.int16)}
    sent |= {
        "structured": np.zeros(3, [("a", "i4"), ("b", "f8")]),
        "objects": np.array(["text", None], object),
    }
    pair.push(sent)
    told = pair.cell(f"[(str(it.dtype), tuple(it.shape)) for it in ({', '.join(sent)})]")
    assert told.values == [[(str(it.dtype), tuple(it.shape)) for it in sent.values()]] * 2
    back = pair.pull(*sent)
    for name, it in sent.items():
        for got in back[name]:
            assert (got.dtype, strides(got)) == (it.dtype, strides(it)), name
            assert (got == it).all(), name
    for name in sent.keys() - {"wide"}:
        back[name][0][...] = back[name][1].ravel()[0]


def strides(it: Any) -> tuple[int, ...]:
    return tuple(it.stride() if isinstance(it, torch.Tensor) else it.strides)


def test_names_pushed_together_go_on_sharing_what_they_share(pair):
    base = torch.zeros(10_000)
    linear, shared = torch.nn.Linear(4, 4), {"a": 1}
    tied = torch.nn.Linear(4, 4)
    tied.weight = linear.weight
    names = {"base": base, "view": base[5:], "linear": linear, "tied": tied, "one": shared, "two": [shared]}
    pair.push(names)
    pair.cell("base[5] = 7; one['a'] = 2")
    assert (
        pair.cell("view[0].item(), tied.weight is linear.weight, two[0]['a'], one is two[0]").values
        == [(7.0, True, 2, True)] * 2
    )
    assert (
        pair.cell("linear.weight.requires_grad, type(linear.weight).__name__").values
        == [(True, "Parameter")] * 2
    )
    # And on the way back, within one rank.
    back = pair.pull("base", "view")
    back["base"][1][5] = 9
    assert [view[0].item() for view in back["view"]] == [7.0, 9.0]
    assert base[5] == 0, "the notebook's own is untouched"


def test_what_was_pushed_is_the_ranks_own(pair):
    pair.push({"given": [1]})
    assert pair.cell("given", namespace={"given": "the notebook's"}).values == [[1]] * 2
    pair.push({"given": [2]})
    assert pair.pull("given") == {"given": [[2], [2]]}
    pair.push({"given": "other"}, ranks=[1])
    assert pair.pull("given") == {"given": [[2], "other"]}
    assert pair.pull("given", ranks=[1]) == {"given": ["other"]}
    pair.push({})
    pair.cell("given.append(rank)", ranks=[0])
    assert pair.pull("given") == {"given": [[2, 0], "other"]}, "each rank has an object of its own"


def test_pull_gives_every_name_in_rank_order(session):
    session.cell("first, second = rank, -rank")
    ranks = list(range(size(session)))
    assert session.pull("second", "first") == {"second": [-r for r in ranks], "first": ranks}


def test_pull_names_what_is_missing_and_the_nearest_there_is(session):
    session.cell("learning_rate = 1")
    with pytest.raises(nblaunch.NblaunchError, match=r"'learnig_rate'.*Did you mean 'learning_rate'\?"):
        session.pull("learnig_rate")
    session.cell("only_here = 1", ranks=[1])
    with pytest.raises(nblaunch.NblaunchError, match=r"'only_here' is not defined.*\(rank"):
        session.pull("only_here")
    assert session.pull("only_here", ranks=[1]) == {"only_here": [1]}
    with pytest.raises(nblaunch.OptionError, match="no name"):
        session.pull()


def test_what_cannot_be_pulled_or_pushed_is_said_and_the_session_goes_on(session):
    session.cell("import threading; cannot = threading.Lock(); can = 1")
    with pytest.raises(nblaunch.RunFailedError, match="cannot be sent to the notebook"):
        session.pull("cannot")
    with pytest.raises(nblaunch.CaptureError, match=r"inside.deep"):
        session.push({"fine": 1, "inside": SimpleNamespace(deep=threading.Lock())})
    assert session.pull("can") == {"can": [1] * size(session)}


def test_a_name_that_cannot_be_pushed_is_said(pair):
    for name in ("not a name", "1x", "", "class", "rank", "device", "get_ipython"):
        with pytest.raises(nblaunch.OptionError, match="push: "):
            pair.push({"innocent": 1, name: 5})
    assert pair.cell("'innocent' in globals()").values == [False] * 2


def test_a_large_push_is_held_once_by_all_ranks(session, place, eventually):
    """In shared memory: what is a rank's own does not grow with it until the rank writes to it."""
    before = memory(session, eventually)
    session.push({"large": torch.ones(16 << 20)})  # 64 MB
    assert set(session.cell("large.sum().item()").values) == {float(16 << 20)}
    grown = [after - then for after, then in zip(memory(session, eventually), before, strict=True)]
    # What only one process of a machine has mapped counts as its own.
    mapped_alone = 64 << 20 if size(session) == place.nodes else 0
    assert max(grown) < mapped_alone + (32 << 20)
    session.cell("del large")


def memory(session: nblaunch.Session, eventually: Any) -> list[int]:
    """Return what belongs to each rank alone; a node that is busy may take longer than a status waits."""
    found: list[int | None] = [None]

    def measured() -> bool:
        found[:] = [each.memory for each in session.status().ranks]
        return None not in found

    eventually(measured, "all ranks are measured")
    return [each for each in found if each is not None]


# --- several sessions, and runs beside them --------------------------------------------------------


def test_two_sessions_at_once_have_nothing_to_do_with_each_other(session, pair):
    session.cell("whose = 'the first'")
    pair.cell("whose = 'the second'")
    assert set(session.pull("whose")["whose"]) == {"the first"}
    assert set(pair.pull("whose")["whose"]) == {"the second"}
    assert set(session.run(os.getpid).values).isdisjoint(pair.run(os.getpid).values)


@pytest.mark.full
def test_two_sessions_work_at_the_same_time(session, pair, tmp_path):
    """Each waits for the other."""
    first = session.submit(meet, (tmp_path / "a", tmp_path / "b"))
    second = pair.submit(meet, (tmp_path / "b", tmp_path / "a"))
    assert first.result(60).ok
    assert second.result(60).ok


def test_a_fresh_run_beside_a_session_has_fresh_ranks(session):
    session.cell("here_only = 1")
    fresh = nblaunch.run(lambda: ("here_only" in globals(), os.getpid()), nproc=2)
    assert [found for found, _ in fresh.values] == [False, False]
    assert {pid for _, pid in fresh.values}.isdisjoint(session.run(os.getpid).values)
    assert set(session.pull("here_only")["here_only"]) == {1}


# --- status, stacks, restart, close ----------------------------------------------------------------


def test_the_status_of_an_idle_session(session):
    status = session.status()
    assert (status.name, status.world_size, status.backend, status.attempt) == (
        "default",
        size(session),
        "gloo",
        0,
    )
    assert [(each.rank, each.state, each.device) for each in status.ranks] == [
        (rank, "idle", "cpu") for rank in range(size(session))
    ]
    assert all(each.memory > 0 for each in status.ranks)
    assert str(status).splitlines()[0] == f"session 'default': {size(session)} ranks, gloo"
    assert repr(session) == f"<Session 'default': {size(session)} ranks, gloo, open>"


def test_the_stacks_of_an_idle_session_say_so(session, place):
    n = size(session)
    assert str(session.stacks()) == f"[{place.named(*range(n), of=n)}] idle"


def test_status_and_stacks_while_ranks_hang(session, place, eventually):
    source = "import time, torch, torch.distributed as dist\nif rank:\n    dist.all_reduce(torch.ones(1))\n"
    handle = nblaunch_background(session, source + "else:\n    time.sleep(1000)")
    eventually(lambda: {each.state for each in session.status().ranks} == {"running"}, "all are at work")
    eventually(lambda: "all_reduce" in str(session.stacks()), "the others wait in all_reduce")
    text = str(session.stacks())
    assert f"[{place.named(0)}] at session cell, line 5: time.sleep(1000)" in text
    assert f"[{place.named(*range(1, size(session)), of=size(session))}" in text
    session.interrupt()
    with pytest.raises(KeyboardInterrupt):
        handle.result(30)
    assert str(session.stacks()).endswith("idle")


def nblaunch_background(session: nblaunch.Session, source: str) -> Any:
    """Run a cell on a thread; the Python API has that for functions only."""
    return nblaunch.Handle(lambda _: session._live.prepare_cell(*cell_job(source))(None))


def cell_job(source: str) -> tuple[Any, ...]:
    from nblaunch.protocol.messages import CellJob

    return CellJob(source, "<session cell>", "session cell", first_line=1), cell_names(source), {}


@pytest.mark.full
def test_a_restart_ends_a_job_that_is_running_and_gives_new_ranks_without_variables(
    own, tmp_path, eventually
):
    own.cell("old = 1")
    before = own.run(os.getpid).values
    handle = own.submit(wait_for, (tmp_path / "never",))
    eventually(lambda: {each.state for each in own.status().ranks} == {"running"}, "the ranks are at work")
    own.restart()
    with pytest.raises((nblaunch.RunFailedError, KeyboardInterrupt)):
        handle.result(30)
    result = own.cell("print('new'); 'old' in globals()")
    assert (result.values, result.warnings, result.ranks[0].stdout) == ([False, False], (), "new\n")
    assert set(own.run(os.getpid).values).isdisjoint(before)
    assert not any(map(psutil.pid_exists, before))
    assert own.status().attempt == 1
    # What the notebook had sent to the old ones is sent to these.
    assert own.cell("sent", namespace={"sent": 3}).values == [3, 3]
    own.restart()
    assert own.cell("sent", namespace={"sent": 3}).values == [3, 3]


def test_closing_ends_a_job_that_is_running_and_twice_does_nothing_more(place, tmp_path, eventually):
    session = place(2)
    pids = session.run(os.getpid).values
    handle = session.submit(wait_for, (tmp_path / "never",))
    eventually(
        lambda: {each.state for each in session.status().ranks} == {"running"}, "the ranks are at work"
    )
    session.close()
    with pytest.raises(KeyboardInterrupt):
        handle.result(10)
    assert not any(map(psutil.pid_exists, pids))
    session.close()
    assert repr(session).endswith("closed>")
    assert [each.state for each in session.status().ranks] == ["gone", "gone"]


def test_a_session_that_has_ended_says_so(place):
    ended = place(2, name="ended")
    ended.close()
    for use in (
        lambda: ended.run(os.getpid),
        lambda: ended.cell("1"),
        lambda: ended.push({"x": 1}),
        lambda: ended.pull("x"),
        ended.restart,
        ended.stacks,
        lambda: ended.submit(os.getpid).result(10),
    ):
        with pytest.raises(nblaunch.LaunchError, match="session 'ended' has ended"):
            use()
    ended.interrupt()


@pytest.mark.full
def test_a_with_statement_closes_the_session_whatever_happens(place):
    def use_it(pids):
        with place(2) as session:
            pids += session.run(os.getpid).values
            session.run(fail)

    pids: list[int] = []
    with pytest.raises(nblaunch.RunFailedError, match="LookupError"):
        use_it(pids)
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.full
def test_a_session_that_is_forgotten_leaves_nothing_behind(place, eventually):
    session = place(2)
    pids = session.run(os.getpid).values
    session.push({"something": [1]})
    del session
    gc.collect()
    eventually(lambda: not any(map(psutil.pid_exists, pids)), "the ranks have gone with the session")


def test_a_job_in_the_background_that_fails_keeps_nothing_that_it_was_given(session):
    argument = np.ones(1000)
    alive = weakref.ref(argument)
    gc.collect()
    gc.disable()
    try:
        handle = session.submit(divide_by_zero, (argument,))
        del argument
        with pytest.raises(nblaunch.RunFailedError):
            handle.result(30)
        assert alive() is None, "at once: the collector may come late"
    finally:
        gc.enable()


def divide_by_zero(array):
    return 1 / (array.size - 1000)


@pytest.mark.full
def test_a_program_that_forgets_its_session_ends(script, place):
    """With ranks at work, too."""
    program = script(f"""
        import time
        import nblaunch
        session = nblaunch.Session(**{place.options(2)})
        print(session.run(int).values)
        handle = session.submit(time.sleep, (1000,))
    """)
    assert (program.returncode, program.stdout, program.stderr) == (0, "[0, 0]\n", "")


# --- in the background -----------------------------------------------------------------------------


def wait_for(path):
    while not path.exists():
        time.sleep(0.005)
    return str(path)


def meet(mine, other):
    mine.touch()
    return wait_for(other)


def fail():
    raise LookupError("nothing there")


def test_a_job_in_the_background_and_its_handle(session, tmp_path):
    flag = tmp_path / "flag"
    handle = session.submit(wait_for, (flag,))
    assert handle.done() is False
    assert repr(handle) == "<Handle of a run that goes on>"
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    flag.touch()
    assert handle.result(30).values == [str(flag)] * size(session)
    assert handle.done() is True
    assert repr(handle) == f"<Handle: <RunResult of {size(session)} ranks, ok>>"
    assert handle.result() is handle.result()


def test_a_busy_session_refuses_another_job_from_the_very_beginning(session, tmp_path):
    """Not the one in the background, whose thread may begin later than the next job is given."""
    flag = tmp_path / "flag"
    for _ in range(10):
        flag.unlink(missing_ok=True)
        handle = session.submit(wait_for, (flag,))
        for use in (
            lambda: session.run(os.getpid),
            lambda: session.cell("1"),
            lambda: session.push({"x": 1}),
            lambda: session.pull("x"),
            lambda: session.submit(os.getpid),
        ):
            with pytest.raises(nblaunch.NblaunchError, match="at work on another one"):
                use()
        flag.touch()
        assert handle.result(30).ok
    assert session.run(lambda: 1).values == [1] * size(session)


def test_cancel_interrupts_a_job_and_costs_nothing(session, tmp_path, eventually):
    session.cell("precious = rank")
    handle = session.submit(wait_for, (tmp_path / "never",))
    eventually(lambda: {each.state for each in session.status().ranks} == {"running"}, "all are at work")
    handle.cancel()
    with pytest.raises(KeyboardInterrupt, match="the run was interrupted"):
        handle.result(30)
    assert session.pull("precious") == {"precious": list(range(size(session)))}
    handle.cancel()  # once more, when it is over
    assert session.run(lambda: 1).ok


@pytest.mark.full
def test_a_job_that_is_cancelled_at_once_ends_at_once(session):
    for _ in range(5):
        handle = session.submit(time.sleep, (1000,))
        handle.cancel()
        with pytest.raises(KeyboardInterrupt):
            handle.result(30)
    assert session.run(lambda: 1).ok


def test_a_job_that_fails_in_the_background_raises_when_it_is_asked_for(session):
    handle = session.submit(fail)
    with pytest.raises(nblaunch.RunFailedError, match="LookupError: nothing there") as caught:
        handle.result(30)
    assert caught.value.result is not None
    assert "RunFailedError" in repr(handle)


def test_what_cannot_be_sent_is_said_when_the_job_is_given(session):
    lock = threading.Lock()
    with pytest.raises(nblaunch.CaptureError):
        session.submit(fail, (lock,))
    assert session.run(lambda: 1).ok, "the session is not busy with it"


def test_a_handle_can_be_awaited_while_other_things_go_on(session, tmp_path):
    async def program() -> tuple[list[Any], bool]:
        handle = session.submit(wait_for, (tmp_path / "flag",))
        waiting = asyncio.ensure_future(awaited(handle))
        await asyncio.sleep(0)
        before = waiting.done()
        (tmp_path / "flag").touch()
        return (await waiting).values, before

    async def awaited(handle: Any) -> Any:
        return await handle

    assert asyncio.run(program()) == ([str(tmp_path / "flag")] * size(session), False)


# --- options ---------------------------------------------------------------------------------------


def test_the_options_and_the_directory_of_a_session_hold_for_all_of_its_jobs(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with place(2, env={"PROBE": "set"}, log_dir=tmp_path / "logs", init_process_group=False) as session:
        monkeypatch.undo()
        there = session.cell("import os; os.environ['PROBE'], os.getcwd()")
        assert there.values == [("set", str(tmp_path))] * 2
        result = session.cell("import torch.distributed as dist\nprint('said')\ndist.is_initialized()")
        assert result.values == [False, False]
        assert result.log_dir is not None
        assert tmp_path / "logs" in result.log_dir.parents
        assert session.run(lambda: 1).log_dir == result.log_dir
    assert any("said" in path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))


@pytest.mark.full
def test_a_timeout_is_that_of_each_job_and_costs_no_variable(place):
    with place(2, timeout=2) as session:
        session.cell("held = rank")
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(nblaunch.RunTimeoutError) as caught:
                session.cell("import time\ntime.sleep(1000)")
            assert time.monotonic() - started >= 2
            assert caught.value.hang_report is not None
            assert "time.sleep(1000)" in str(caught.value)
        assert session.pull("held") == {"held": [0, 1]}
        assert session.status().attempt == 0


@pytest.mark.full
def test_a_session_opened_and_closed_in_a_thread(place, eventually):
    values: list[Any] = []

    def work() -> None:
        with place(2) as session:
            values.extend(session.run(lambda: 1).values)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert values == [1, 1]
    eventually(lambda: not thread.is_alive(), "the thread has ended")
