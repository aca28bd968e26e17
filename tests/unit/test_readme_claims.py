"""What the README claims, sentence by sentence, and the test or the benchmark that shows it.

A sentence is removed from the README with its row, and a new one needs a row. Of a figure the row names the
benchmark that prints it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

BENCHMARK = "tests/benchmarks/bench_peers.py"
CLAIMS = {
    "Run a notebook cell, or a function, on N torch ranks, and get back N values or the one error that "
    "caused the others.": (
        "tests/ranks/test_cell.py::test_n_ranks_give_n_values_in_rank_order",
        "tests/ranks/test_run_function.py::test_the_result_is_a_sequence_of_values_in_rank_order",
        "tests/ranks/test_run_failures.py::test_ranks_that_wait_for_the_failed_one_are_consequences_or_stopped",
    ),
    "Afterwards `res.values` is `[30.0, 30.0]`.": (
        "tests/ranks/test_readme_cell.py::test_the_cell_shows_the_output_that_is_written_below_it",
    ),
    "`nblaunch.run(fn, nproc=2)` does the same with a function, also in a plain script.": (
        "tests/ranks/test_run_function.py::test_a_function_of_a_module_runs_on_every_rank",
        "tests/ranks/test_run_function.py::test_a_script_without_a_main_guard_runs_once_and_not_again_in_the_ranks",
    ),
    "After `%distributed start` the ranks keep their variables for the next cells, and with `--detach` they "
    "outlive the kernel.": (
        "tests/ranks/test_session_cells.py::test_variables_stay_from_cell_to_cell",
        "tests/programs/test_attach.py::test_what_the_page_shows_of_coming_back_is_what_is_shown",
    ),
    "A rank that dies is started again alone, and gets from the others what all ranks had alike.": (
        "tests/ranks/test_reborn.py::test_the_rank_that_was_killed_has_what_all_had_alike_and_nothing_else",
        "tests/ranks/test_reborn.py::test_one_other_rank_is_enough_for_what_was_compared_while_all_were_idle",
        (
            "tests/ranks/test_reborn.py::"
            "test_an_object_of_the_notebook_that_comes_from_another_rank_is_what_later_cells_lead_to"
        ),
    ),
    "`%distributed save` writes their variables to a directory, and `start --from` goes on with them on "
    "another day and another number of ranks.": (
        "tests/ranks/test_save.py::test_what_was_saved_goes_on_in_another_session_as_it_would_have",
        "tests/ranks/test_save.py::test_sharded_models_and_their_optimizers_come_back_on_any_number_of_ranks",
        "tests/ranks/test_save.py::test_the_magic_saves_and_starts",
    ),
    "A failed run raises the error of the rank that failed first, with the line of the cell.": (
        "tests/ranks/test_run_failures.py::test_the_error_names_the_rank_the_exception_and_the_users_own_line",
        "tests/ranks/test_chaos.py::test_a_rank_that_dies_while_the_others_sit_in_all_reduce",
        "tests/ranks/test_pages.py::test_the_examples_of_a_page_show_what_is_written_below_them",
    ),
    "With `--timeout`, or when you interrupt it, a run that hangs says which rank has not begun which "
    "collective.": (
        "tests/ranks/test_hang.py::test_a_cell_that_hangs_is_reported_in_lines_of_the_cell",
        "tests/ranks/test_interrupt.py::test_ranks_that_are_stuck_in_a_collective_are_freed_within_the_grace_period",
    ),
    "It needs Linux and Python 3.11 or later.": (
        "pyproject.toml",
        "tests/unit/test_versions.py::test_the_documents_have_the_oldest_and_the_newest_versions_in_one_table",
    ),
    "There is no release on PyPI yet: in a clone, run `pip install .`, or build a wheel with "
    "`pip wheel --no-deps -w dist .` and install that elsewhere.": (
        "CHANGELOG.md",
        ".ci/run",
        "tests/programs/test_distributions.py::test_the_wheel_is_the_package_alone_with_the_panels_files_and_the_types",
    ),
    "In a fresh clone, the demo on two ranks, and the tests:": (
        ".ci/run",
        "tests/programs/test_demo.py::test_the_demo_shows_a_row_per_rank_and_reaches_95_percent_with_equal_parameters",
    ),
    "| two ranks | fresh | kept | rank 1 raises, rank 0 waits for it in an `all_reduce` |": (BENCHMARK,),
    "| nblaunch | 0.09 s | 0.02 s | 0.2 s: rank 1's error, with its line in the cell |": (BENCHMARK,),
    "| accelerate | 0.17 s | | 4 s: the root cause is rank 0's lost connection |": (BENCHMARK,),
    "| torchrun | 6.3 s | | 7 s: rank 1's exit code, its error further up |": (BENCHMARK,),
    "| ipyparallel | 11 s | 0.02 s | 60 s: the error is shown, the cell still runs |": (BENCHMARK,),
    "| torchrunx | 6.3 s | | 60 s: no error, the cell still runs |": (BENCHMARK,),
    '| nbdistributed | | 0.13 s | 60 s: "Timeout waiting for responses", no error |': (BENCHMARK,),
    "These are medians of `tests/benchmarks/bench_peers.py` on two cores: an `all_reduce` from a "
    "notebook, on fresh and on kept ranks.": (BENCHMARK,),
    "The next cell's ranks are made ready ahead; without that (`NBLAUNCH_STANDBY=0`) nblaunch takes "
    "0.15 s for a fresh cell.": (
        BENCHMARK,
        "tests/ranks/test_standby.py::test_a_run_takes_the_group_that_waits_and_another_one_follows",
        "tests/ranks/test_standby.py::test_it_can_be_turned_off",
    ),
}
"""Each sentence, list item or row of a table, and where it is shown: a test, or a file that is run."""


def prose(text: str) -> str:
    """Return a README without its code, pictures, comments and headings."""
    for left_out in (r"^```.*?^```$", r"<picture>.*?</picture>", r"<!--.*?-->", r"^#.*?$", r"^\|[-|:]+\|$"):
        text = re.sub(left_out, "", text, flags=re.MULTILINE | re.DOTALL)
    return text


def sentences(text: str) -> list[str]:
    """Return what a text says: sentences, and whole rows of tables.

    >>> sentences("One. `two` is\\nlonger: it goes on.\\n\\n| a | b |\\n| 1. | 2 |")
    ['One.', '`two` is longer: it goes on.', '| a | b |', '| 1. | 2 |']
    """
    said = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\|)|\n(?=\* )", prose(text)):
        line = " ".join(paragraph.split())
        said += [line] if line.startswith("|") else re.split(r"(?<=[.:])\s+(?=[A-Z`%])", line)
    # What is nothing but links leads to other pages, and says nothing.
    return [each.removeprefix("* ") for each in said if each and not each.startswith("[")]


def is_there(place: str) -> bool:
    """Return whether a place (`tests/unit/test_x.py::test_y`, or a file) exists."""
    path, _, test = place.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    tree = ast.parse(file.read_text()) if test else ast.Module([], [])
    return not test or test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_sentence_of_the_readme_is_a_claim_with_its_evidence_and_the_other_way_round():
    said = sentences(README.read_text())
    assert [each for each in said if each not in CLAIMS] == [], "without evidence"
    assert [each for each in CLAIMS if each not in said] == [], "no longer said"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: " ".join(re.findall(r"\w+", claim)[:6]))
def test_what_shows_a_claim_is_there(claim):
    assert CLAIMS[claim]
    assert [place for place in CLAIMS[claim] if not is_there(place)] == []


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: " ".join(re.findall(r"\w+", claim)[:6]))
def test_a_claim_that_has_tests_has_one_in_the_quick_lane(claim):
    tests = [place for place in CLAIMS[claim] if "::" in place]
    assert not tests or ".ci/run" in CLAIMS[claim] or any(map(is_quick, tests))


def is_quick(place: str) -> bool:
    """Return whether a test is in `tests/unit`, or marked `quick` itself or by its file."""
    path, _, test = place.partition("::")
    if path.startswith("tests/unit/"):
        return True
    tree = ast.parse((ROOT / path).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    of_file = [node for node in tree.body if isinstance(node, ast.Assign)]
    marks = [ast.unparse(each) for each in (*functions[test].decorator_list, *of_file)]
    return any("pytest.mark.quick" in each for each in marks)
