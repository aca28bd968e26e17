"""Sessions in a notebook: `%distributed start`, and cells that run on ranks that stay."""

from __future__ import annotations

import json
import os
import queue
import re
import textwrap
import time
from typing import Any

import psutil
import pytest

from nblaunch.group import lifecycle

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def session_kernel(module_kernel, place):
    """Start one session, on whose ranks the tests of this module leave what they like."""
    module_kernel.ok(f"%distributed start {place.line(4)}")
    module_kernel.ok(
        "%%distributed\nimport sys; print(); print(file=sys.stderr)"
    )  # it keeps these files open
    yield module_kernel
    module_kernel.run("%distributed auto off")
    module_kernel.ok("%distributed stop")


@pytest.fixture
def kernel(session_kernel):
    """Give the kernel with its session; the notebook's own variables are forgotten."""
    yield session_kernel
    # What a test has left at work must not make all others fail.
    session_kernel.run("%distributed auto off")
    while background_threads(session_kernel):
        session_kernel.ok("%distributed interrupt")
    session_kernel.forget()


def background_threads(kernel: Any) -> Any:
    return kernel.value(
        "[each.name for each in __import__('threading').enumerate() if each.name == 'nblaunch-background']"
    )


# --- cells -----------------------------------------------------------------------------------------


def test_variables_stay_from_cell_to_cell(kernel):
    kernel.ok("%%distributed --out res\ncounter = rank\ncounter")
    assert kernel.value("res.values") == [0, 1, 2, 3]
    ran = kernel.ok("%%distributed --out res\ncounter += 10\nprint('now', counter)\ncounter")
    assert kernel.value("res.values") == [10, 11, 12, 13]
    assert ran.text.strip().splitlines()[:2] == ["[rank 0] now 10", "[rank 1] now 11"]
    assert kernel.value("_.values") == [10, 11, 12, 13]


def test_a_variable_and_a_function_of_the_notebook_are_those_of_now(kernel):
    kernel.ok("factor = 2\ndef scaled(x): return x * factor")
    kernel.ok("%%distributed --out res\nscaled(10), factor")
    assert kernel.value("res.values") == [[20, 2]] * 4
    kernel.ok("factor = 3")
    kernel.ok("%%distributed --out res\nscaled(10)")
    assert kernel.value("res.values") == [30] * 4
    kernel.ok("def scaled(x): return -x * factor")
    kernel.ok("%%distributed --out res\nscaled(10), factor")
    assert kernel.value("res.values") == [[-30, 3]] * 4
    kernel.ok("%%distributed\nfactor = rank  # from here on the ranks' own")
    kernel.ok("factor = 100")
    kernel.ok("%%distributed --out res\nscaled(1), factor")
    assert kernel.value("res.values") == [[-rank, rank] for rank in range(4)]


@pytest.mark.full
def test_a_subset_of_the_ranks(kernel):
    ran = kernel.ok("%%distributed --ranks 0,2-3 --out res\nprint('here')\nrank")
    assert kernel.value("[res.values, len(res), list(res.ranks.keys())]") == [[0, 2, 3], 3, [0, 2, 3]]
    assert "[ranks 0,2-3] here" in ran.text
    error = kernel.fails("res[1]")
    assert (error.ename, "rank 1 took no part" in error.evalue) == ("KeyError", True)


@pytest.mark.once
def test_a_wrong_option_is_said_before_anything_runs(kernel):
    for line, said in {
        "-n 8": "--nproc-per-node 8",
        "--ranks 4": "rank 4 of session 'default' was asked for, but it has ranks 0 to 3",
        "--backend nccl": "--backend nccl",
        "--fresh --session default": "--fresh and --session",
        "--fresh --ranks 0": "--ranks",
        "--session defualt": "Did you mean 'default'?",
    }.items():
        error = kernel.fails(f"%%distributed {line}\nran = True")
        assert error.ename in ("OptionError", "NblaunchError")
        assert said in error.evalue
    kernel.ok("%%distributed --out res\n'ran' in globals()")
    assert kernel.value("res.values") == [False] * 4


def test_push_and_pull(kernel):
    kernel.ok("import torch\nbase = torch.zeros(10_000)\nview = base[5:]")
    kernel.ok("%distributed push base view")
    kernel.ok("%%distributed --out res\nbase[5] = rank\nview[0].item()")
    assert kernel.value("res.values") == [0.0, 1.0, 2.0, 3.0]
    kernel.ok("%distributed pull base view --ranks 1,3")
    assert kernel.value("[[each[0].item() for each in view], len(base)]") == [[1.0, 3.0], 2]
    kernel.ok("%distributed pull rank")
    assert kernel.value("rank") == [0, 1, 2, 3]
    error = kernel.fails("%distributed pull bsae")
    assert "'bsae' is not defined" in error.evalue
    assert "Did you mean 'base'?" in error.evalue
    error = kernel.fails("%distributed push bsae")
    assert "Did you mean 'base'?" in error.evalue


def test_a_failed_cell_keeps_the_variables_and_stops_the_notebook(kernel):
    kernel.ok("%%distributed\nimport torch, torch.distributed as dist\nmodel = torch.ones(3) * rank")
    error = kernel.fails("%%distributed --out bad\nif rank == 2:\n    raise LookupError('x')\ndist.barrier()")
    assert re.match(r"rank 2 (of 4|on \S+) failed: LookupError: x \(cell line 3\)", error.evalue)
    assert "process group re-formed; variables kept" in kernel.value("bad.warnings[0]")
    kernel.ok("%%distributed --out res\ndist.all_reduce(model); model[0].item()")
    assert kernel.value("[res.values, list(res.warnings)]") == [[6.0] * 4, []]


def test_the_stop_button_keeps_the_variables(kernel, tmp_path, eventually):
    kernel.ok("%%distributed\nimport torch, torch.distributed as dist\nweights = torch.ones(2)\nstep = 0")
    pending = kernel.submit(f"""
        %%distributed --out res
        import pathlib
        while True:
            dist.all_reduce(torch.ones(2))
            weights += 1
            step += 1
            if step == 3:
                pathlib.Path({str(tmp_path)!r}, str(rank)).touch()
        """)
    eventually(lambda: len(list(tmp_path.iterdir())) == 4, "all ranks are at work", 60)
    kernel.interrupt()
    ran = pending.finish()
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    kernel.ok(
        "%%distributed --out res\nt = torch.ones(1); dist.all_reduce(t); t.item(), step >= 3, weights.shape"
    )
    assert kernel.value("[value[:2] for value in res]") == [[4.0, True]] * 4


# --- several sessions, and runs beside them --------------------------------------------------------


@pytest.mark.full
@pytest.mark.once
def test_sessions_by_name_and_fresh_ranks_beside_them(kernel, place):
    kernel.ok("%%distributed\nwhose = 'default'")
    started = kernel.ok(f"%distributed start {place.line(2)} --session other")
    assert "session 'other': 2 ranks (gloo)" in str(started.result)
    try:
        kernel.ok("%%distributed --session other\nwhose = 'other'")
        kernel.ok("%distributed pull whose --session other")
        assert kernel.value("whose") == ["other"] * 2
        # With several open, a line that names none means the default one.
        kernel.ok("%distributed pull whose")
        assert kernel.value("whose") == ["default"] * 4
        status = str(kernel.ok("%distributed status").result)
        assert "session 'default': 4 ranks" in status
        assert "session 'other': 2 ranks" in status
        assert status.count("idle") == 6
        error = kernel.fails("%distributed start -n 2 --session other")
        assert "there is one already, with 2 ranks" in error.evalue
        kernel.ok("%%distributed --fresh -n 3 --out res\n'whose' in globals(), world_size")
        fresh = 3 * place.nodes
        assert kernel.value("res.values") == [[False, fresh]] * fresh
    finally:
        kernel.ok("%distributed stop --session other")
    assert "session 'other' was asked for" in kernel.fails("%%distributed --session other\n1").evalue
    wait_until_fresh_ranks_have_left(kernel)


def wait_until_fresh_ranks_have_left(kernel: Any) -> None:
    deadline = time.monotonic() + 30
    threads = "[t.name for t in __import__('threading').enumerate() if t.name.startswith('nblaunch-agent')]"
    while len(kernel.value(threads)) > 1:
        assert time.monotonic() < deadline


@pytest.mark.full
@pytest.mark.once
def test_the_timeout_that_a_session_was_started_with_is_that_of_its_cells(kernel):
    kernel.ok("%distributed start -n 1 --session timed --timeout 1")
    try:
        body = "import time\ntime.sleep(2)"
        assert kernel.fails(f"%%distributed --session timed\n{body}").ename == "RunTimeoutError"
        kernel.ok(f"%%distributed --session timed --timeout 60\n{body}")
    finally:
        kernel.ok("%distributed stop --session timed")


STUBBORN = """
import time
if rank == 1:
    raise ValueError("a mistake")
while True:
    try:
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.full
@pytest.mark.once
def test_a_cell_of_a_session_has_the_grace_period_that_it_asks_for(kernel):
    kernel.ok("%distributed start -n 2 --session stubborn --grace 60")
    try:
        kernel.fails(f"%%distributed --session stubborn --grace 0.5 --out res{STUBBORN}")
        assert kernel.value("res.warnings[0]") == "rank 0 went on after two interrupts, --grace 0.5 s apart"
    finally:
        kernel.ok("%distributed stop --session stubborn")


@pytest.mark.full
@pytest.mark.once
def test_without_a_default_session_a_cell_says_which_ones_there_are(start_kernel, place):
    kernel = start_kernel()
    kernel.ok(f"%distributed start {place.line(2)} --session one")
    kernel.ok("%%distributed --out res\nrank")  # the only one there is
    kernel.ok(f"%distributed start {place.line(2)} --session two")
    assert "the open ones are 'one', 'two'" in kernel.fails("%%distributed\nrank").evalue
    kernel.ok("%%distributed --session two --out res\nrank")
    assert kernel.value("res.values") == [0, 1]


# --- status, stacks, inspection, completion, help --------------------------------------------------


def test_status_and_stacks_of_idle_ranks(kernel, eventually):
    lines = str(kernel.ok("%distributed status").result).splitlines()
    assert lines[0] == "session 'default': 4 ranks, gloo"
    of_ranks = [line for line in lines if line.startswith("  rank ")]
    assert len(of_ranks) == 4
    for rank, line in enumerate(of_ranks):
        assert re.match(rf"  rank {rank}( on \S+)?: idle, cpu", line)
    # They may compare their variables for a moment.
    eventually(
        lambda: re.fullmatch(r"\[ranks 0-.*\] idle", kernel.ok("%distributed stacks").result), "all are idle"
    )


@pytest.mark.full
@pytest.mark.once
def test_completion_of_what_lives_on_the_ranks(kernel):
    kernel.ok("%%distributed\nimport torch\nclass Net:\n    weight_decay = 1\nnetwork = Net()\n_hidden = 1")
    assert kernel.complete("%%distributed\nnetwo") == ["network"]
    assert kernel.complete("%%distributed --ranks 0\nx = network.wei") in (
        ["network.weight_decay"],
        ["weight_decay"],
    )
    assert any(
        each.endswith("Linear") for each in kernel.complete("%%distributed\nif rank:\n    torch.nn.Lin")
    )
    assert kernel.complete("netwo") == [], "the notebook itself has no such variable"
    assert kernel.complete("%%distributed --ti") == ["--timeout"]


@pytest.mark.full
def test_inspection_of_what_lives_on_a_rank(kernel):
    kernel.ok("%%distributed\ndef stated(x: int) -> str:\n    '''What it is for.'''\nonly = rank")
    shown = str(kernel.ok("%distributed inspect stated").result)
    assert "What it is for." in shown
    assert "stated(x: int)" in shown
    assert "1" in str(kernel.ok("%distributed inspect only --ranks 1").result)
    assert "'nothing' is not defined" in kernel.fails("%distributed inspect nothing").evalue


# --- in the background -----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.once
def test_a_cell_in_the_background_while_others_run(kernel, place, tmp_path):
    flag = tmp_path / "flag"
    began = kernel.ok(f"""
        %%distributed --background --out handle
        import pathlib, time
        while not pathlib.Path({str(flag)!r}).exists():
            time.sleep(0.01)
        rank * 10
        """)
    assert began.result == "<Handle of a run that goes on>"
    assert kernel.ok("1 + 1").result == "2"
    assert kernel.value("handle.done()") is False
    assert "rank" not in kernel.complete("%%distributed\nran"), "the ranks are at work: nothing is waited for"
    for busy in ("%%distributed\n1", "%distributed pull rank", "%%distributed --background\n1"):
        assert "at work on another one" in kernel.fails(busy).evalue
    kernel.ok(f"%%distributed --fresh -n {2 // place.nodes} --out res\nrank")
    assert kernel.value("res.values") == [0, 1]
    assert "running" in str(kernel.ok("%distributed status").result)
    assert "cell line " in str(kernel.ok("%distributed stacks").result)
    flag.touch()
    assert kernel.ok("(await handle).values").result == "[0, 10, 20, 30]"
    assert kernel.value("[handle.done(), handle.result().values]") == [True, [0, 10, 20, 30]]
    wait_until_fresh_ranks_have_left(kernel)


@pytest.mark.full
@pytest.mark.once
def test_what_a_background_cell_shows_is_shown_by_that_cell(kernel, tmp_path):
    """Not by the one that happens to run when it ends."""
    flag = tmp_path / "flag"
    source = f"""
        %%distributed --background --out handle
        import pathlib, time
        while not pathlib.Path({str(flag)!r}).exists():
            time.sleep(0.01)
        print("from the background")
        """
    client = kernel.client
    cell = client.execute(textwrap.dedent(source).strip("\n"), allow_stdin=False, stop_on_error=False)
    other = client.execute(
        f"import pathlib; pathlib.Path({str(flag)!r}).touch(); handle.result(60); 'it is over'",
        allow_stdin=False,
        stop_on_error=False,
    )
    shown: dict[str, list[str]] = {cell: [], other: []}
    over = False
    deadline = time.monotonic() + 60
    while not (over and "from the background" in json.dumps(shown)):
        try:
            message = client.get_iopub_msg(timeout=deadline - time.monotonic())
        except queue.Empty:
            pytest.fail(f"not shown: {shown}")
        parent = message["parent_header"].get("msg_id")
        if parent in shown and "data" in message["content"]:
            shown[parent].append(str(message["content"]["data"]))
        over = over or (parent == other and "it is over" in json.dumps(shown[other]))
    assert "from the background" in " ".join(shown[cell])
    assert "from the background" not in " ".join(shown[other])


def test_a_background_cell_can_be_stopped(kernel, eventually):
    kernel.ok("%%distributed\nprecious = rank")
    kernel.ok("%%distributed --background --out handle\nimport time; time.sleep(1000)")
    eventually(
        lambda: str(kernel.ok("%distributed status").result).count("running") == 4, "the ranks are at work"
    )
    kernel.ok("%distributed interrupt")
    for wait in ("handle.result(60)", "await handle"):
        error = kernel.fails(wait)
        assert (error.ename, "the run was interrupted" in error.evalue) == ("KeyboardInterrupt", True)
    assert kernel.ok("1 + 1").result == "2"
    kernel.ok("%distributed pull precious")
    assert kernel.value("precious") == [0, 1, 2, 3]
    assert background_threads(kernel) == []


@pytest.mark.full
@pytest.mark.once
def test_a_background_cell_that_fails(kernel):
    kernel.ok("%%distributed --background --out handle\n1 / 0")
    error = kernel.fails("handle.result(60)")
    assert error.ename == "RunFailedError"
    assert "ZeroDivisionError" in error.evalue
    assert kernel.fails("await handle").ename == "RunFailedError"


@pytest.mark.full
@pytest.mark.once
def test_a_broken_background_cell_says_so_at_once(kernel):
    kernel.ok("import threading\nlock = threading.Lock()")
    assert kernel.fails("%%distributed --background\nlock").ename == "CaptureError"
    assert kernel.fails("%%distributed --background\nx = = 1").ename == "SyntaxError"
    kernel.ok("%%distributed --out res\n1")
    assert kernel.value("res.values") == [1] * 4


@pytest.mark.full
@pytest.mark.once
def test_a_background_cell_on_fresh_ranks(kernel, place):
    kernel.ok(f"%%distributed --background --fresh -n {2 // place.nodes} --out handle\nrank")
    kernel.ok("%%distributed --out res\nrank")
    assert kernel.value("[res.values, handle.result(60).values]") == [[0, 1, 2, 3], [0, 1]]
    wait_until_fresh_ranks_have_left(kernel)


# --- auto ------------------------------------------------------------------------------------------


@pytest.fixture
def auto(kernel):
    """Give the kernel with `%distributed auto on`."""
    said = kernel.ok("%distributed auto on")
    assert "every cell runs on the 4 ranks of session 'default'" in str(said.result)
    yield kernel
    kernel.ok("%distributed auto off")


def reply_of(kernel: Any, code: str) -> str:
    """Return whether a cell counts as failed: what decides if "run all" goes on."""
    kernel.drain()
    message = kernel.client.execute(textwrap.dedent(code).strip("\n"), allow_stdin=False, stop_on_error=False)
    while True:
        reply = kernel.client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == message:
            return str(reply["content"]["status"])


@pytest.mark.full
@pytest.mark.once
def test_with_auto_every_cell_runs_on_the_ranks(auto):
    auto.ok("automatic = rank")
    assert "rank 3: 30" in auto.ok("automatic * 10").text
    assert "[ranks 0-3] said" in auto.ok("print('said')").text
    assert "[ranks 0-3] sh" in auto.ok("found = !echo sh\nprint(found[0])").text
    assert auto.value("'automatic' in globals()") is False
    assert "automatic" in auto.complete("automa")


@pytest.mark.full
@pytest.mark.once
def test_with_auto_magics_and_local_cells_stay_in_the_notebook(auto, place):
    assert auto.ok("%%local\nhere = 1\nhere").result == "1"
    assert auto.value("here") == 1
    assert auto.ok("%time 2 + 3").result == "5"
    assert auto.ok("%%time\nprint('in the notebook')").stdout.startswith("in the notebook")
    assert auto.ok("%timeit -n1 -r1 pass").stdout.count("per loop") == 1
    assert auto.ok("!echo shell").stdout.strip() == "shell"
    assert "4 ranks" in str(auto.ok("%distributed status").result)
    assert "ranks 0-1: 2" in auto.ok(f"%%distributed --fresh -n {2 // place.nodes}\nworld_size").text
    wait_until_fresh_ranks_have_left(auto)


@pytest.mark.full
@pytest.mark.once
def test_with_auto_the_lines_of_tracebacks_are_those_of_the_cell(auto):
    error = auto.fails("x = 1\n\n1 / 0")
    assert "cell line 3" in error.evalue
    assert "----> 3 1 / 0" in error.traceback
    error = auto.fails("%%local\nx = 1\n1 / 0")
    assert error.ename == "ZeroDivisionError"
    assert "----> 3 1 / 0" in error.traceback
    assert "----> 3 1 / 0" in auto.fails("%%distributed\nx = 1\n1 / 0").traceback


@pytest.mark.full
@pytest.mark.once
def test_a_local_cell_that_fails_stops_the_notebook_with_or_without_auto(kernel):
    assert reply_of(kernel, "%%local\n1 / 0") == "error"
    assert reply_of(kernel, "%%local\n1") == "ok"
    kernel.ok("%distributed auto on")
    assert reply_of(kernel, "%%local\n1 / 0") == "error"
    kernel.ok("%distributed auto off")
    assert kernel.ok("1 + 1").result == "2"


@pytest.mark.full
@pytest.mark.once
def test_auto_needs_a_session(start_kernel, place):
    kernel = start_kernel()
    assert "none is open" in kernel.fails("%distributed auto on").evalue
    kernel.ok(f"%distributed start {place.line(2)}")
    kernel.ok("%distributed auto on")
    kernel.ok("x = rank")
    kernel.ok("%distributed stop")
    assert kernel.ok("x = 5; x").result == "5", "without a session cells run in the notebook"


# --- ends ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.slow_at("nodes")
def test_restart_and_stop(start_kernel, place):
    kernel = start_kernel()
    kernel.ok(f"%distributed start {place.line(2)}")
    kernel.ok("%%distributed --out res\nimport os\nold = 1\nos.getpid()")
    before = kernel.value("res.values")
    assert kernel.ok("%distributed restart").result == "session 'default': 2 new ranks, without variables"
    ran = kernel.ok("%%distributed --out res\nprint('new'); 'old' in globals()")
    assert "[ranks 0-1] new" in ran.text
    assert kernel.value("[res.values, list(res.warnings)]") == [[False, False], []]
    assert kernel.ok("%distributed stop").result == "session 'default' has ended"
    assert not any(map(psutil.pid_exists, before))
    for after in ("stop", "restart", "stacks", "pull x"):
        assert "no session is open" in kernel.fails(f"%distributed {after}").evalue
    kernel.ok("%%distributed -n 3 --out res\nrank")  # on fresh ranks again
    assert kernel.value("res.values") == [0, 1, 2]
    kernel.ok("%distributed start -n 3")
    kernel.ok("%%distributed --out res\nworld_size")
    assert kernel.value("res.values") == [3] * 3


@pytest.mark.full
@pytest.mark.once
def test_a_rank_that_dies_is_told_with_what_is_lost_and_the_next_cell_works(start_kernel, place):
    kernel = start_kernel()
    kernel.ok(f"%distributed start {place.line(2)}")
    kernel.ok("%%distributed\nlost = 1")
    ran = kernel.run("%%distributed --out res\nimport os, time\nif rank: os._exit(3)\ntime.sleep(1000)")
    assert ran.error is not None
    assert re.match(r"rank 1 (of 2|on \S+) failed: ended with exit code 3", ran.error.evalue)
    told = lifecycle.STARTED_AGAIN.format(1)
    assert told in ran.text + ran.error.traceback
    assert kernel.value("list(res.warnings)") == [told]
    kernel.ok("%%distributed --out res\nprint('again'); 'lost' in globals()")
    assert kernel.value("[res.values, res.ranks[0].stdout]") == [[True, True], "again\n"]
    assert kernel.value("res.warnings[0]") == "rank 1 is back: lost from rank 0"


@pytest.mark.full
@pytest.mark.once
def test_a_kernel_killed_in_a_cell_of_a_session_leaves_nothing(start_kernel, place, tmp_path, eventually):
    """`close` looks for what is left."""
    kernel = start_kernel()
    kernel.ok(f"%distributed start {place.line(2)}")
    work = f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, str(rank)).touch()\ntime.sleep(1000)"
    kernel.submit(f"%%distributed\n{work}")
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, "the ranks are at work", 60)
    kernel.kill()
    kernel.all_gone("a kernel was killed")


@pytest.mark.full
@pytest.mark.once
def test_deleting_what_the_notebook_has_does_not_end_the_session(kernel):
    kernel.ok("%%distributed --out res\nstays = 1")
    kernel.forget()
    kernel.ok("%distributed pull stays")
    assert kernel.value("stays") == [1] * 4
    assert os.getpid() != kernel.pid
