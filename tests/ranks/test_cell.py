"""`%%distributed` runs a notebook cell on N ranks, and behaves in the notebook as any other cell does."""

from __future__ import annotations

import re

import pytest
from lanes import sampled

pytestmark = pytest.mark.oldest

README_CELL = """
%%distributed -n 2 --out res
import torch.distributed as dist
t = torch.ones(1) * (rank + 1) * scale     # scale and torch come from the notebook
dist.all_reduce(t)
print("hello from", rank)
t.item()
"""

# --- values and output -----------------------------------------------------------------------------


def test_the_readme_cell_gives_one_value_per_rank_and_shows_what_each_printed(kernel):
    kernel.ok("import torch\nscale = 10")
    ran = kernel.ok(README_CELL)
    assert kernel.value("[res[0], res[1], res.values, len(res), res.ok]") == [30.0, 30.0, [30.0] * 2, 2, True]
    assert kernel.value("[each.stdout for each in res.ranks]") == ["hello from 0\n", "hello from 1\n"]
    assert ran.text.strip().splitlines() == [
        "[rank 0] hello from 0",
        "[rank 1] hello from 1",
        "ranks 0-1: 30.0",
    ]
    assert (ran.stderr, ran.result) == ("", None)


@pytest.mark.parametrize("world_size", sampled([4, 8]))
def test_n_ranks_give_n_values_in_rank_order(kernel, world_size):
    kernel.ok(f"""
    %%distributed -n {world_size} --out res
    import os, torch, torch.distributed as dist
    total = torch.tensor([rank])
    dist.all_reduce(total)
    rank, local_rank, world_size, str(device), total.item(), os.getpid()
    """)
    total = sum(range(world_size))
    expected = [[rank, rank, world_size, "cpu", total] for rank in range(world_size)]
    assert kernel.value("[value[:5] for value in res]") == expected
    pids = kernel.value("[value[5] for value in res]")
    assert len({*pids, kernel.pid}) == world_size + 1, "each rank is a process of its own"
    assert kernel.value("[each.pid for each in res.ranks]") == pids


def test_two_ranks_are_the_default_without_gpus(kernel):
    kernel.ok("%%distributed --out res\nworld_size")
    assert kernel.value("res.values") == [2, 2]


def test_a_result_can_be_used_in_the_next_cell(kernel):
    kernel.ok("%%distributed -n 2 --out res\nimport torch\ntorch.ones(2) * rank, [rank]")
    kernel.ok("%%distributed -n 2 --out res2\nres[rank][0].sum().item(), _[1][1], len(res), res.ok")
    assert kernel.value("res2.values") == [[0.0, [1], 2, True], [2.0, [1], 2, True]]
    kernel.fails("%%distributed -n 2 --out bad\nif rank: raise ValueError('x')\n7")
    kernel.ok("%%distributed -n 2 --out res3\nbad[0], bad.ok, repr(bad.failures[0].exception)")
    assert kernel.value("res3.values") == [[7, False, "ValueError('x')"]] * 2


def test_a_cell_that_closes_its_streams_ends_all_the_same(kernel):
    ran = kernel.ok("%%distributed -n 2 --out res\nimport sys\nsys.stdout.close()\nsys.stderr = None\nrank")
    assert kernel.value("[res.values, list(res.warnings)]") == [[0, 1], []]
    assert "warning" not in ran.text


def test_the_result_is_the_underscore_as_well(kernel):
    kernel.ok("%%distributed -n 2\nrank * 7")
    assert kernel.value("_.values") == [0, 7]


def test_a_semicolon_suppresses_the_value(kernel):
    ran = kernel.ok("%%distributed -n 2 --out res\nrank + 5;")
    assert kernel.value("res.values") == [None, None]
    assert "5" not in ran.text


def test_a_cell_that_is_nothing_but_its_magic_is_told_to_be_empty(kernel):
    """By IPython itself, in its usual words: the magic is never called."""
    assert "the cell body is empty" in kernel.run("%%distributed -n 2 --out res").stderr


@pytest.mark.parametrize("body", ["\n\n", "'''only a text''';"])
def test_a_cell_without_a_value_succeeds_with_none(cell_door, body):
    assert cell_door(body) == [None, None]


def test_display_in_a_rank_is_in_the_result_and_in_the_notebook(kernel):
    ran = kernel.ok("""
    %%distributed -n 2 --out res
    from IPython.display import HTML, Image, display
    print("before")
    display(HTML(f"<b>bold {rank}</b>"), {"text/plain": "raw", "image/png": b"\\x89PNG"}, raw=False)
    display({"image/png": b"\\x89PNG", "text/plain": "a picture"}, raw=True, metadata={"k": rank})
    print("after")
    """)
    html, _, picture = kernel.value("[each.data for each in res.ranks[1].displays]")
    assert html["text/html"] == "<b>bold 1</b>"
    assert picture == {"image/png": "iVBORw==", "text/plain": "a picture"}
    assert kernel.value("dict(res.ranks[1].displays[2].metadata)") == {"k": 1}
    lines = [line for line in ran.text.splitlines() if "rank" in line]
    texts = [line.partition("] ")[2] for line in lines]
    assert texts.index("before") < texts.index("a picture") < texts.index("after")


@pytest.mark.parametrize(("how", "end"), sampled([("", ""), ("%matplotlib inline", "plt.show()")]))
def test_figures_of_a_rank_are_shown(kernel, how, end):
    pytest.importorskip("matplotlib")
    kernel.ok(f"""
    %%distributed -n 2 --out res
    {how}
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.plot([rank, 1]);
    {end}
    """)
    for rank in range(2):
        (figure,) = kernel.value(f"[each.data for each in res.ranks[{rank}].displays]")
        assert figure["image/png"].startswith("iVBORw0KGgo")


def test_both_streams_come_back_apart_and_in_order(kernel):
    ran = kernel.ok("""
    %%distributed -n 2 --out res
    import os, sys
    for turn in range(3):
        print("out", turn)
        os.write(1, b"from below\\n")
        print("err", turn, file=sys.stderr)
    """)
    assert kernel.value("res.ranks[1].stdout") == "".join(f"out {turn}\nfrom below\n" for turn in range(3))
    assert kernel.value("res.ranks[1].stderr") == "err 0\nerr 1\nerr 2\n"
    shown = [line.partition("] ")[2] for line in ran.text.splitlines() if line.startswith("[rank")]
    order = ["out 0;from below;err 0", "out 1;from below;err 1", "out 2;from below;err 2"]
    assert ";".join(shown).startswith(";".join(order))


# --- what works in a notebook cell works on a rank ---------------------------------------------------


@pytest.mark.slow_at("cell")
@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("import asyncio\nawait asyncio.sleep(0, rank + 1)", [1, 2]),
        ("lines = !echo hello $rank\nlines[0]", ["hello 0", "hello 1"]),
        ("%time x = rank * 2\nx", [0, 2]),
        ("get_ipython().run_cell('x = 3')\nx", [3, 3]),
        ("%env NBTEST_SET_BY_MAGIC=1\nimport os\nos.environ['NBTEST_SET_BY_MAGIC']", ["1", "1"]),
        ("def f(): return __name__\nf()", ["__main__", "__main__"]),
        ("def f(n): return n and n + f(n - 1)\nf(rank + 2)", [3, 6]),
        ("class C:\n    kind = rank\nC.kind", [0, 1]),
        ("global total\ntotal = rank\ntotal", [0, 1]),
        ("import inspect\ndef f():\n    return 1\ninspect.getsource(f)", ["def f():\n    return 1\n"] * 2),
        ("x = []\nfor x in [[1]]: x.append(rank)\nx", [[1, 0], [1, 1]]),
        ("%%time\nx = rank\nx", [0, 1]),
        ("%%capture out\nprint(rank)", [None, None]),
        ("from __future__ import annotations\ndef f(x: Nowhere): return 1\nf(2)", [1, 1]),
        ("x = rank\nexit()\nx = 5", [None, None]),
        ("quit", [None, None]),
    ],
    ids=[
        "await",
        "shell",
        "time",
        "ipython",
        "env",
        "name",
        "recursion",
        "class",
        "global",
        "source",
        "loop",
        "timed",
        "capture",
        "future",
        "exit",
        "quit",
    ],
)
def test_a_cell_on_a_rank_runs_in_ipython(cell_door, body, value):
    assert cell_door(body) == value


def test_the_extension_may_be_loaded_again(kernel):
    kernel.ok("%load_ext nblaunch\n%reload_ext nblaunch")
    kernel.ok("%%distributed -n 2 --out res\nrank")
    assert kernel.value("res.values") == [0, 1]


def test_time_and_capture_work_above(kernel):
    timed = kernel.ok("%%time\n%%distributed -n 2 --out res\nrank")
    assert kernel.value("res.values") == [0, 1]
    assert "Wall time" in timed.stdout
    captured = kernel.ok("%%capture shown\n%%distributed -n 2 --out res2\nprint('hidden')\nrank")
    assert (captured.text.strip(), captured.stdout) == ("", "")
    assert kernel.value("res2.values") == [0, 1]
    assert "hidden" in kernel.value("''.join(str(each.data) for each in shown.outputs)")


def test_it_can_be_called_while_an_event_loop_runs(kernel):
    kernel.ok("""
    import asyncio
    async def call():
        await asyncio.sleep(0)
        body = "import asyncio\\nawait asyncio.sleep(0, rank)"
        get_ipython().run_cell_magic("distributed", "-n 2 --out res", body)
        await asyncio.sleep(0)
        return "and goes on"
    told = await call()
    """)
    assert kernel.value("[told, res.values]") == ["and goes on", [0, 1]]


def test_names_and_expressions_in_the_line_expand_as_in_ipython(kernel):
    kernel.ok("ranks, parts, where = 3, ['a', 'b'], 'res'")
    kernel.ok("%%distributed -n $ranks --out {where + '_1'}\nworld_size")
    kernel.ok("%%distributed -n {len(parts)} --out $where\nworld_size")
    assert kernel.value("[res_1.values, res.values]") == [[3, 3, 3], [2, 2]]


def test_a_comment_may_end_the_line(kernel):
    kernel.ok("%%distributed -n 2 --out res   # two of them, -n 3 would be more\nworld_size")
    assert kernel.value("res.values") == [2, 2]


def test_help_shows_every_option_and_runs_nothing(kernel):
    ran = kernel.ok("%%distributed -h\nraise ValueError")
    assert {"--max-restarts", "--timeout", "--out", "--no-init"} <= set(re.findall(r"--[a-z-]+", ran.stdout))
    assert kernel.value("'_' in dir() and getattr(_, 'ranks', None)") in (None, False)


def test_the_question_mark_shows_the_options(kernel):
    message = kernel.client.inspect("%%distributed", reply=True, timeout=30)
    assert "--max-restarts" in message["content"]["data"]["text/plain"]


def test_the_tab_key_completes_options_and_in_the_cell_python(kernel):
    kernel.ok("some_long_name = 1")
    for text, offered in {
        "%%distributed --max": "--max-restarts",
        "%%distributed -n 2 --ti": "--timeout",
        "%%distributed --backend g": "gloo",
        "%%distributed -n 2\nsome_lo": "some_long_name",
    }.items():
        assert offered in kernel.complete(text)


# --- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--time-out 3", ["--time-out", "--timeout"]),
        ("-n 2 --backend nccl", ["nccl", "0 GPUs", "Lower nproc", "backend='gloo'"]),
        ("--log-dir /etc/passwd", ["/etc/passwd", "no directory"]),
    ],
)
def test_a_wrong_option_says_what_to_do_before_anything_starts(kernel, tmp_path, line, told):
    error = kernel.fails(f"%%distributed --log-dir {tmp_path / 'logs'} {line}\nrank")
    assert error.ename == "OptionError"
    assert [word for word in told if word not in error.evalue] == []
    assert not (tmp_path / "logs").exists(), "nothing was started"
    assert "/nblaunch/" not in error.traceback, "our frames are no news to the reader"


def test_of_an_option_given_twice_the_last_counts(kernel):
    kernel.ok("%%distributed -n 4 --out first -n 2 --out res\nworld_size")
    assert kernel.value("[res.values, 'first' in dir()]") == [[2, 2], False]


def test_torchruns_variables_are_options_too(kernel):
    kernel.ok("%env PET_NPROC_PER_NODE=3")
    kernel.ok("%%distributed --out res\nworld_size")
    kernel.ok("%%distributed --out res2 -n 2\nworld_size")
    kernel.ok("import os; del os.environ['PET_NPROC_PER_NODE']")
    assert kernel.value("[res.values, res2.values]") == [[3] * 3, [2] * 2]


def test_a_log_directory_keeps_each_ranks_streams(kernel, tmp_path):
    kernel.ok(f"""
    %%distributed -n 2 --out res --log-dir {tmp_path}
    import sys
    print("to stdout", rank)
    print("to stderr", rank, file=sys.stderr)
    """)
    kept = kernel.value("str(res.log_dir)")
    assert kept.startswith(f"{tmp_path}/")
    kernel.forget()
    for rank in range(2):
        (out,) = tmp_path.rglob(f"{rank}/stdout.log")
        (err,) = tmp_path.rglob(f"{rank}/stderr.log")
        assert str(out).startswith(kept)
        assert f"to stdout {rank}\n" in out.read_text()
        assert f"to stderr {rank}\n" in err.read_text()


# --- syntax errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "line", "shown"),
    [
        ("x = 1\ny = = 2", 3, "y = = 2"),
        ("x = (1,\n     2", 2, "x = (1,"),
        ("return 3", 2, "return 3"),
    ],
)
def test_a_syntax_error_shows_the_cells_own_line(kernel, body, line, shown):
    """The magic's own line is line 1."""
    error = kernel.fails(f"%%distributed -n 2\n{body}")
    assert "SyntaxError" in error.traceback or "IndentationError" in error.traceback
    *_, (where, source) = re.findall(r"Cell In\[\d+\], line (\d+)\n(.*)", error.traceback)
    assert (int(where), source.strip()) == (line, shown)


# --- the terminal ----------------------------------------------------------------------------------


def test_the_magic_works_in_terminal_ipython(terminal):
    done = terminal(
        [
            "%load_ext nblaunch",
            "scale = 10\ndef times(x): return x * scale",
            "%%distributed -n 2 --out res\nprint('hello from', rank)\ntimes(rank + 1)",
            "print('VALUES', res.values, _ is res)",
        ]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello from 0" in done.stdout
    assert "VALUES [10, 20] True" in done.stdout
    assert done.stderr == ""


def test_an_error_in_terminal_ipython_shows_the_cells_line_only(terminal):
    done = terminal(["%load_ext nblaunch", "%%distributed -n 2\nif rank == 1:\n    1 / 0", "1 + 1"])
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "1 / 0" in done.stdout
    assert re.search(r"line 3\b", done.stdout)
    assert re.search(r"nblaunch/(\w+/)?\w+\.py", done.stdout) is None
