"""Whatever a rank raises is shown as its own code raised it, in full where that is possible."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from chaos import failing, must_work, on_ranks, soon
from lanes import sampled

from nblaunch._errors import MESSAGE_LIMIT
from nblaunch.rank import failure as failure_of_rank

MACHINERY = (
    "/nblaunch/",
    "torch/distributed/elastic",
    "torch/multiprocessing",
    "/multiprocessing/",
    "<string>",
)


def raised(action):
    """Run a job whose rank 1 raises; return its failure and the error."""
    failed = failing(on_ranks({1}, action, lambda: "kept"), 2)
    assert failed.root.rank == 1
    assert failed.result.ranks[1].failure is failed.root
    assert [word for word in MACHINERY if word in failed.root.traceback] == []
    assert [frame for frame in failed.root.frames if any(word in frame.filename for word in MACHINERY)] == []
    return failed.root, failed.error


def line_of(comment):
    """Return the number of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}")]
    return number


# --- groups and chains -----------------------------------------------------------------------------


EMPTY: dict[str, int] = {}


def fail_in_several_ways():
    errors = []
    for what in ("one", "two"):
        try:
            EMPTY[what]
        except KeyError as error:
            errors.append(error)
    raise ExceptionGroup("outer", [ValueError("three"), ExceptionGroup("inner", errors)])


def test_a_group_within_a_group_is_shown_whole():
    failure, error = raised(fail_in_several_ways)
    assert isinstance(error.__cause__, ExceptionGroup)
    inner = error.__cause__.exceptions[1]
    assert isinstance(inner, ExceptionGroup)
    assert [str(each) for each in inner.exceptions] == ["'one'", "'two'"]
    for text in ("ExceptionGroup: outer (2 sub-exceptions)", "ValueError: three", "KeyError: 'one'"):
        assert text in failure.traceback
    assert failure.traceback.count("EMPTY[what]") == 2
    assert failure.reason.startswith("ExceptionGroup: outer (2 sub-exceptions) (")


def fail_while_failing():
    try:
        try:
            int("the first")
        except ValueError as error:
            raise LookupError("the second") from error
    except LookupError:
        raise TypeError("the third")  # noqa: B904 - that it has a context is what is tested


def test_a_chain_of_exceptions_is_told_from_its_beginning():
    failure, error = raised(fail_while_failing)
    order = [
        failure.traceback.index(text)
        for text in (
            "ValueError: invalid literal",
            "was the direct cause of",
            "LookupError: the second",
            "During handling of the above exception",
            "TypeError: the third",
        )
    ]
    assert order == sorted(order)
    assert failure.traceback.count("in fail_while_failing") == 3
    cause = error.__cause__
    assert isinstance(cause, TypeError)
    assert failure.reason.startswith("TypeError: the third")


def go_deeper(depth):
    state = "x" * 10_000
    return go_deeper(depth + 1) + len(state)


def test_a_recursion_without_an_end_is_cut_in_its_middle():
    failure, error = raised(lambda: go_deeper(0))
    assert isinstance(error.__cause__, RecursionError)
    assert "Previous line repeated" in failure.traceback
    assert len(failure.frames) == 100
    depths = [int(frame.variables["depth"]) for frame in failure.frames if "depth" in frame.variables]
    assert depths[:10] == list(range(10))
    assert depths[-1] > 500
    assert len(pickle.dumps(failure.frames)) < 1 << 20


def test_a_syntax_error_of_code_that_the_job_compiles_shows_that_code():
    failure, _ = raised(lambda: exec(compile("x = 1\ny = = 2\n", "written.py", "exec")))  # noqa: S102
    assert failure.type == "builtins.SyntaxError"
    assert failure.message.startswith("invalid syntax")
    assert 'File "written.py", line 2' in failure.traceback
    assert "y = = 2" in failure.traceback
    assert failure.where.startswith(f"{__file__}, line ")


def test_code_without_a_file_is_named_as_python_names_it():
    failure, _ = raised(lambda: exec("def f():\n    raise ValueError('made up')\nf()"))  # noqa: S102
    assert failure.message == "made up"
    assert failure.traceback.rstrip().endswith("ValueError: made up")


# --- exceptions that misbehave ---------------------------------------------------------------------


class SpitefulError(Exception):
    """Raises wherever it is touched."""

    def __str__(self):
        raise RuntimeError("no text")

    def __repr__(self):
        raise RuntimeError("no repr")

    def __reduce__(self):
        raise RuntimeError("no pickle")


class Spite:
    def __repr__(self):
        raise RuntimeError("no repr")


class OwnBaseError(BaseException):
    """Not even an Exception."""


def be_spiteful():
    local, kept = Spite(), "kept"
    raise SpitefulError(local, kept)


def test_an_exception_that_raises_when_it_is_printed_or_pickled_is_told_by_its_name():
    failure, error = raised(be_spiteful)
    assert failure.type.endswith("SpitefulError")
    assert failure.message == "<its text raised RuntimeError>"
    assert (failure.exception, error.__cause__) == (None, None)
    assert "SpitefulError" in failure.traceback
    assert "be_spiteful" in failure.traceback
    assert failure.frame is not None
    assert failure.frame.variables["kept"] == "'kept'"
    assert "Spite" in failure.frame.variables["local"]


def test_an_exception_outside_the_usual_tree_is_a_failure_like_any():
    def action():
        raise OwnBaseError("not an Exception")

    failure, error = raised(action)
    assert isinstance(error.__cause__, OwnBaseError)
    assert (failure.message, failure.exitcode) == ("not an Exception", 1)


def test_a_text_that_no_message_can_carry_is_escaped():
    def action():
        raise ValueError("half of \ud83d and \0")

    failure, _ = raised(action)
    assert failure.message == "half of \\ud83d and \0"
    assert "\\ud83d" in failure.traceback


# Four write 4 MB, and report within 0.1 s of the first, if nothing else runs.
@pytest.mark.parametrize("nproc", sampled([2, 4], ci=1))
def test_a_megabyte_of_text_from_each_rank_costs_neither_time_nor_memory(nproc):
    def action():
        raise ValueError("begin " + "x" * (1 << 20) + " end")

    failed = failing(on_ranks(range(nproc), action), nproc)
    assert len(failed.result.failures) == nproc
    for failure in failed.result.failures:
        for text in (failure.message, failure.traceback):
            assert len(text) < MESSAGE_LIMIT + 1000
            assert text.rstrip().endswith("x end")
        assert "\n" not in failure.reason
        assert len(failure.reason) < MESSAGE_LIMIT
        assert str(failure.exception).endswith("x end")
    assert len(str(failed.error)) < MESSAGE_LIMIT + 1000
    assert soon(failed.seconds, nproc, waited=3)
    must_work(nproc)


# --- the user's own frames, with their variables ---------------------------------------------------


def outer(count):
    names = ["first", "second"]
    return inner(names, count + 1)


def inner(names, count):
    text = "y" * (1 << 20)
    array = np.arange(1_000_000)
    tensor = torch.zeros(1000, 1000)
    nested = {"list": [[[["deep"]]]] * 1000, "text": text}
    itself: list[object] = []
    itself.append(itself)
    return names[count], array, tensor, nested, itself  # the failing line


def test_each_frame_has_its_variables_as_short_texts():
    failure, _ = raised(lambda: outer(4))
    assert [frame.function for frame in failure.frames][-2:] == ["outer", "inner"]
    above, frame = failure.frames[-2:]
    assert failure.frame == frame
    assert (frame.filename, frame.line) == (__file__, line_of("the failing line"))
    assert frame.source.endswith("# the failing line")
    assert above.variables == {"count": "4", "names": "['first', 'second']"}
    assert frame.variables["count"] == "5"
    assert set(frame.variables) == {"names", "count", "text", "array", "tensor", "nested", "itself"}
    assert frame.variables["text"].startswith("'yyyy")
    assert frame.variables["array"].startswith("array([")
    assert frame.variables["tensor"].startswith("tensor([[0.")
    assert max(len(text) for text in frame.variables.values()) < 1000


class SlowError(Exception):
    """Takes long to say what is wrong."""

    def __str__(self):
        time.sleep(0.2)
        return "slow"


def test_the_time_of_a_failure_is_when_it_was_raised_not_when_it_had_been_told():
    """Who failed first is the root cause, also if it has much to say."""
    before = time.time()
    record = failure_of_rank.record(SlowError(), {})
    assert record.message == "slow"
    assert record.time - before < 0.1


# --- in a cell -------------------------------------------------------------------------------------

CELL = """
%%distributed -n 2 --out res
from concurrent.futures import ThreadPoolExecutor
def divide(a, b):
    return a / b
if rank == 1:
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(divide, [1, 2], [1, 0]))
    except ZeroDivisionError as error:
        raise ExceptionGroup("two", [error, KeyError("other")]) from error
"""


def test_a_cell_shows_groups_chains_and_threads_in_its_own_lines(kernel):
    error = kernel.fails(CELL)
    assert error.evalue.startswith(
        "rank 1 of 2 failed: ExceptionGroup: two (2 sub-exceptions) (cell line 10)"
    )
    traceback = kernel.value("res.root_cause.traceback")
    assert traceback.count("line 4, in divide") == 2
    assert "ZeroDivisionError: division by zero" in traceback
    assert "KeyError: 'other'" in traceback
    for text in (traceback, error.traceback):
        assert [word for word in MACHINERY if word in text] == []


def test_a_syntax_error_within_exec_in_a_cell_names_both_places(kernel):
    error = kernel.fails("%%distributed -n 2 --out res\nif rank == 1:\n    exec('x = = 1')")
    assert "SyntaxError: invalid syntax" in error.evalue
    assert "cell line 3" in error.evalue
    assert "x = = 1" in kernel.value("res.root_cause.traceback")
