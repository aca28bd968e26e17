"""What ranks print stays in their log files; the result reads it when it is asked for."""

from __future__ import annotations

import gc
import pickle
import shutil

import psutil
import pytest

import nblaunch

LINE = "x" * 1023


def talk(count):
    import sys

    for _ in range(count):
        print(LINE)
    print("the last line", file=sys.stderr)


def memory():
    gc.collect()
    return psutil.Process().memory_info().rss >> 20


@pytest.mark.slow
def test_what_ranks_print_is_not_kept_in_memory():
    nblaunch.run(talk, (1,), nproc=2, display=False)
    before = memory()
    result = nblaunch.run(talk, (100_000,), nproc=2, display=False)
    assert memory() - before < 60
    assert [len(rank.stdout) for rank in result.ranks] == [102_400_000] * 2
    assert memory() - before < 60


@pytest.fixture(scope="module")
def result():
    return nblaunch.run(talk, (1000,), nproc=2, display=False)


def test_a_long_text_is_all_there(result):
    assert result.ranks[1].stdout == f"{LINE}\n" * 1000
    assert result.ranks[1].stderr == "the last line\n"


def test_one_ranks_result_keeps_its_text():
    result = nblaunch.run(talk, (1000,), nproc=2, display=False)
    rank = result.ranks[1]
    del result
    gc.collect()
    assert rank.stdout == f"{LINE}\n" * 1000


def test_a_pickled_result_holds_the_text(result):
    assert pickle.loads(pickle.dumps(result)).ranks[0].stdout == f"{LINE}\n" * 1000


def test_a_removed_directory_of_the_users_own_is_named(tmp_path):
    result = nblaunch.run(talk, (1000,), nproc=2, display=False, log_dir=str(tmp_path / "logs"))
    short = nblaunch.run(talk, (10,), nproc=2, display=False, log_dir=str(tmp_path / "logs"))
    shutil.rmtree(tmp_path / "logs")
    with pytest.raises(FileNotFoundError, match=r"1 MB.*has been removed"):
        _ = result.ranks[0].stdout
    assert short.ranks[0].stdout == f"{LINE}\n" * 10, "a short text is here"


def test_each_job_of_a_session_has_its_own_text(place):
    with place(2, display=False) as session:
        first, second = session.run(talk, (1000,)), session.run(talk, (500,))
    assert [len(each.ranks[0].stdout) for each in (first, second)] == [1_024_000, 512_000]
