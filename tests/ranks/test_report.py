"""`result.report()`: what a run was and how it ended, in one document for a program.

What it says of each planted fault is checked where the fault is (`chaos.failing`).
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path

import pytest
from chaos import MOST_TOKENS, wait_for_the_others

import nblaunch
from nblaunch.client.preparation import prepare_call
from nblaunch.client.run import SilentView, run_fresh
from nblaunch.options.launch import LaunchOptions

pytestmark = pytest.mark.quick

TOKEN = "tok_3fd1c9-secret"  # noqa: S105 - looks like one
SECRET = {"API_TOKEN": TOKEN, "FLAG": "1"}
HERE = Path(__file__)


def line_of(mark):
    """Return the line of this file that ends with a mark."""
    lines = HERE.read_text().splitlines()
    return 1 + next(number for number, text in enumerate(lines) if text.endswith(f"# {mark}"))


def fail_on_rank_1():
    import torch
    from torch import distributed

    print("same line on all ranks")
    print(f"rank {distributed.get_rank()} has {os.environ['API_TOKEN']}", file=sys.stderr)
    distributed.barrier()
    if distributed.get_rank() == 1:
        raise ValueError(f"bad token {os.environ['API_TOKEN']!r}")  # the fault
    distributed.all_reduce(torch.ones(1))


@pytest.fixture(scope="module")
def failed():
    result = nblaunch.run(fail_on_rank_1, nproc=4, env=SECRET, timeout=120, check=False)
    told = [(each.rank, each.reason, each.time) for each in result.failures]
    assert told, result
    assert told[0][0] == 1, told
    return result


# --- what it says -----------------------------------------------------------------------------------------


def test_the_report_of_a_failed_run_has_the_cause_its_consequences_and_what_the_run_was(failed):
    told = json.loads(str(failed.report()))
    assert (told["schema"], told["outcome"], told["world_size"], told["backend"]) == (1, "failed", 4, "gloo")
    root = told["root_cause"]
    assert (root["rank"], root["ranks"], root["type"]) == (1, "rank 1", "builtins.ValueError")
    assert (root["file"], root["line"], root["function"]) == (
        str(HERE),
        line_of("the fault"),
        "fail_on_rank_1",
    )
    assert root["source"].startswith("raise ValueError(")
    assert root["frames"][-1]["line"] == root["line"]
    assert (root["exitcode"], root["phase"]) == (1, "job")
    assert root["memory"]["host_peak"] >= root["memory"]["host_now"] > 0
    assert told["ended_because_of_it"] == "ranks 0,2-3"
    assert told["states"]["FAILED"]
    assert "--nproc-per-node=4" in told["options"]["line"]
    assert "--timeout=120.0" in told["options"]["line"]
    assert "API_TOKEN=…" in told["options"]["line"]
    assert (told["versions"]["nblaunch"], told["versions"]["python"]) == (
        nblaunch.__version__,
        ".".join(map(str, sys.version_info[:3])),
    )
    assert told["versions"]["torch"]
    (host,) = told["hosts"]
    assert (host["ranks"], host["devices"]) == ("ranks 0-3", {"cpu": "ranks 0-3"})
    (output,) = told["output"]
    assert output["ranks"] == "ranks 0-3"
    assert "same line on all ranks" in output["lines"]
    assert "[rank 2] rank 2 has [value of API_TOKEN]" in output["lines"]
    assert "left_out" not in told


@pytest.mark.full
def test_no_secret_of_the_environment_is_in_the_report_nor_in_its_pickle(failed):
    report = failed.report()
    assert TOKEN in failed.ranks[0].stderr, "the rank has printed it"
    assert TOKEN in failed.root_cause.message
    pickled = pickle.dumps(report)
    for text in (str(report), report.to_markdown(), str(report.to_dict()), repr(report)):
        assert TOKEN not in text
    assert TOKEN.encode() not in pickled
    assert report.to_dict()["root_cause"]["reason"].startswith("ValueError: bad token '[value of API_TOKEN]'")


@pytest.mark.full
def test_a_result_that_was_pickled_has_the_report_that_it_had(failed):
    again = pickle.loads(pickle.dumps(failed))
    assert again.report() == failed.report()
    assert TOKEN not in repr(vars(again)["_reporter"])


@pytest.mark.full
def test_the_report_as_markdown_is_what_a_notebook_shows(failed):
    report = failed.report()
    text = report.to_markdown()
    assert report._repr_markdown_() == text
    assert text.startswith("# failed: `fail_on_rank_1`\n")
    assert "**rank 1**: `ValueError: bad token" in text
    assert f"{HERE}, line {line_of('the fault')}, in fail_on_rank_1" in text
    assert "same line on all ranks" in text
    assert len(text) // 4 <= MOST_TOKENS


def test_a_run_that_has_succeeded_has_a_report_without_a_cause():
    told = nblaunch.run(int, nproc=2).report().to_dict()
    assert (told["outcome"], told["states"]) == ("succeeded", {"SUCCEEDED": "ranks 0-1"})
    assert {"root_cause", "consequences", "warnings", "hang", "left_out"}.isdisjoint(told)
    assert set(told["memory"]) == {"rank 0", "rank 1"}


# --- wherever a result comes from -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session():
    with nblaunch.Session(2, name="reported", env=SECRET) as opened:
        opened.cell("import os, time\nfrom torch import distributed", namespace={})
        yield opened


@pytest.mark.full
def test_a_cell_of_a_session_has_a_report_and_so_has_the_job_that_its_runtime_keeps(session):
    def rank_0_fails():
        import torch
        from torch import distributed

        if distributed.get_rank() == 0:
            raise LookupError(os.environ["API_TOKEN"])
        distributed.all_reduce(torch.ones(1))

    result = session.run(rank_0_fails, check=False)
    told = result.report().to_dict()
    assert (told["root_cause"]["rank"], told["outcome"]) == (0, "failed")
    kept = session.jobs[-1].result(check=False).report()
    assert kept.to_dict()["root_cause"] == told["root_cause"]
    assert TOKEN not in str(kept)
    told = session.cell("1 / (1 - rank)", namespace={}, check=False).report().to_dict()
    assert (told["root_cause"]["type"], told["root_cause"]["line"]) == ("builtins.ZeroDivisionError", 1)


@pytest.mark.full
def test_a_run_that_took_too_long_says_where_its_ranks_were():
    def hang():
        from torch import distributed

        if distributed.get_rank() == 0:
            time.sleep(1000)  # the sleep
        distributed.barrier()

    result = nblaunch.run(hang, nproc=2, timeout=1, grace=0.1, check=False)
    told = result.report().to_dict()
    assert told["outcome"] == "timeout"
    assert told["ended_by"].startswith("the run was given 1 s and did not end in that time")
    doing = {each["ranks"]: each for each in told["hang"]["places"]}
    assert doing["rank 0"]["frames"][-1]["line"] == line_of("the sleep")
    assert "rank 1" in doing
    assert "Where the ranks were" in result.report().to_markdown()


@pytest.mark.full
def test_an_interrupted_run_a_script_and_hidden_output_are_reported(tmp_path):
    begun, cancelled = tmp_path / "begun", threading.Event()

    class Stopping(SilentView):
        def draw(self, _state):
            if begun.exists():
                cancelled.set()

    def wait():
        begun.touch()
        time.sleep(1000)  # interrupted

    launch = prepare_call(wait, (), None, LaunchOptions(nproc_per_node=1))
    told = run_fresh(launch, Stopping(), cancelled).result.report().to_dict()
    assert told["outcome"] == "interrupted"
    assert told["ended_by"].startswith("the run was interrupted")
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('on stdout')\nprint('on stderr', file=sys.stderr)\nsys.exit(3)\n")
    told = nblaunch.run(str(script), nproc=1, redirects="3", check=False).report().to_dict()
    assert (told["root_cause"]["line"], told["root_cause"]["exitcode"]) == (4, 3)
    assert told["output"] == [{"ranks": "rank 0", "lines": ["on stdout", "on stderr"]}]
    assert "--redirects=3" in told["options"]["line"]


@pytest.mark.full
def test_each_attempt_and_why_it_ended_is_reported(tmp_path):
    marker = tmp_path / "marker"

    def job():
        if not marker.exists():
            marker.touch()
            raise ValueError("only once")
        return wait_for_the_others()

    told = nblaunch.run(job, nproc=1, max_restarts=2).report().to_dict()
    assert told["outcome"] == "succeeded"
    assert [(each["number"], each["reason"]) for each in told["attempts"]] == [(0, "started"), (1, "failure")]
    assert told["attempts"][0]["cause"].startswith("rank 0: ValueError: only once")


@pytest.mark.slow
def test_ranks_on_two_nodes_are_reported_with_their_hosts():
    told = nblaunch.run(fail_on_rank_1, nproc=1, nnodes=2, on="process", env=SECRET, check=False).report()
    document = told.to_dict()
    assert len(document["hosts"]) == 2
    assert document["root_cause"]["ranks"] == f"rank 1 on {document['root_cause']['host']}"
    assert document["root_cause"]["line"] == line_of("the fault")
    assert TOKEN not in str(told)


@pytest.mark.slow
def test_64_ranks_with_long_output_are_reported_in_4000_tokens():
    def job():
        rank = int(os.environ["RANK"])
        for number in range(200):
            print(f"rank {rank} step {number} loss {rank / (number + 1):.6f}")
        if rank == 5:
            raise ValueError("x" * 100_000)

    report = nblaunch.run(job, nproc=8, init_process_group=False, check=False).report()
    assert max(len(str(report)), len(report.to_markdown())) // 4 <= MOST_TOKENS
    told = report.to_dict()
    assert (told["root_cause"]["rank"], told["root_cause"]["function"]) == (5, "job")
    assert told["output"][0]["lines"][-1].endswith("step 199 loss 0.025000")
    assert told["left_out"]


@pytest.mark.full
@pytest.mark.slow
def test_a_report_is_made_without_torch_in_the_kernel(script):
    done = script(
        """
        import json, sys, nblaunch
        result = nblaunch.run(int, nproc=1)
        told = json.loads(str(result.report()))
        print(told["outcome"], "torch" in told["versions"], "torch" in sys.modules)
        """
    )
    assert done.stdout.split() == ["succeeded", "True", "False"], done.stderr


def log_what_is_not_finite():
    rank = int(os.environ["RANK"])
    nblaunch.log(loss=float("nan") if rank else 0.5, norm=float("-inf") if rank else 2.0)


def test_numbers_that_are_not_finite_are_texts_as_json_has_none():
    report = nblaunch.run(log_what_is_not_finite, nproc=2).report()

    def no_json(word):
        raise AssertionError(word)

    metrics = json.loads(report.to_json(), parse_constant=no_json)["metrics"]
    assert metrics == report.to_dict()["metrics"]
    assert metrics["loss"] == {"rank 0": 0.5, "rank 1": "NaN"}
    assert metrics["norm"] == {"rank 0": 2.0, "rank 1": "-Infinity"}
