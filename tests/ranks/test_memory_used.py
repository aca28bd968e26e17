"""What memory each rank used, now and at most, and what it held when it ran out of it."""

from __future__ import annotations

import os
import resource
import time

import psutil
import pytest

import nblaunch
from nblaunch.client.preparation import prepare_call
from nblaunch.client.result import describe
from nblaunch.client.run import SilentView, run_fresh
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import MemoryUse
from nblaunch.view import summary
from nblaunch.view.html import render_html

MEGABYTE = 1_000_000
LARGE = 200 * MEGABYTE


def allocate_and_free():
    import torch

    large = torch.ones(LARGE // 4)
    del large


def keep(name, size):
    import torch

    globals()[name] = torch.ones(size // 4)


def used(result):
    """Return what each rank had at the end, and at most."""
    found = []
    for each in result.ranks:
        assert isinstance(each.memory, MemoryUse)
        assert each.memory.host_now is not None
        assert each.memory.host_peak is not None
        found.append((each.memory.host_now, each.memory.host_peak))
    return found


# --- now and at most --------------------------------------------------------------------------------------


def test_what_a_rank_had_for_a_moment_is_in_its_peak_and_the_next_job_begins_a_new_one(place):
    with place(name="used") as session:
        held = session.run(allocate_and_free)
        assert all(peak - now > 0.95 * LARGE for now, peak in used(held))
        assert all(peak - now < LARGE // 4 for now, peak in used(session.run(int)))


def test_what_a_rank_keeps_is_in_what_it_has_now():
    with nblaunch.Session(2, name="kept") as session:
        before = used(session.run(int))
        session.cell("import torch\nif rank == 1:\n    kept = torch.ones(50_000_000)", namespace={})
        after = used(session.run(int))
        grown = [now - earlier for (now, _), (earlier, _) in zip(after, before, strict=True)]
        assert grown[0] < LARGE // 4
        assert grown[1] > 0.95 * LARGE


def test_what_ranks_share_with_the_fork_server_is_not_theirs():
    def resident():
        return psutil.Process().memory_info().rss

    result = nblaunch.run(resident, nproc=2)
    for (now, _), resident_now in zip(used(result), result.values, strict=True):
        # torch's own pages are over 100 MB.
        assert now < resident_now - 50 * MEGABYTE


@pytest.mark.parametrize("how", ["script", "restarted", "failed"])
def test_scripts_restarted_groups_and_ranks_that_failed_have_their_memory_in_the_result(how, tmp_path):
    if how == "script":
        script = tmp_path / "train.py"
        script.write_text("import torch\nlarge = torch.ones(50_000_000)\ndel large\n")
        result = nblaunch.run(str(script), nproc=1)
    else:
        marker = tmp_path / "marker"

        def job():
            allocate_and_free()
            if how == "failed" or not marker.exists():
                marker.touch()
                raise ValueError

        result = nblaunch.run(job, nproc=1, check=False, max_restarts=1 if how == "restarted" else 0)
        assert [len(each.ranks) for each in result.attempts] == [1] * len(result.attempts)
        assert used(result.attempts[0])[0][1] > LARGE
    assert result.ok is (how != "failed")
    assert used(result)[0][1] > LARGE


# --- what was held ----------------------------------------------------------------------------------------


def starve(room=256 << 20):
    """Leave this process little more memory than it has."""
    limit = psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_out_of_memory():
    import torch

    weights = torch.zeros(8 * MEGABYTE)
    model = torch.nn.Linear(1000, 2000)
    batches = [torch.zeros(MEGABYTE) for _ in range(4)]

    def train(rows):
        activations = {"hidden": torch.zeros(4 * MEGABYTE)}
        starve()
        while rows is not None:
            rows.append(bytearray(16 << 20))
        return activations

    train([])
    return weights, model, batches


@pytest.fixture(scope="module")
def starved():
    return nblaunch.run(run_out_of_memory, nproc=1, check=False)


def test_a_rank_that_runs_out_of_memory_says_what_held_it_by_variable_and_line(starved):
    root = starved.root_cause
    assert root.type == "builtins.MemoryError"
    by_name = {each.name: each for each in root.memory}
    rows, hidden = by_name["rows"], by_name["activations['hidden']"]
    assert (rows.what, rows.size) == ("bytearray", rows.count * (16 << 20))
    assert (hidden.what, hidden.size, hidden.count) == ("float32[4000000]", 16 * MEGABYTE, 1)
    assert f"{__file__}, line " in hidden.where
    assert (by_name["weights"].size, by_name["model.weight"].size) == (32 * MEGABYTE, 8 * MEGABYTE)
    assert (by_name["batches"].what, by_name["batches"].count) == ("float32[1000000]", 4)
    sizes = [each.size for each in root.memory]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= 10


def test_the_error_the_page_and_the_report_of_a_shortage_show_what_was_held(starved):
    text = describe(starved, starved.root_cause, LaunchOptions())
    assert "the most of what rank 0 held:" in text
    assert "activations['hidden']" in text
    page = render_html(starved.state, summary.Header("f"))
    assert "What it held" in page
    assert "activations[&#x27;hidden&#x27;]" in page
    held = starved.report().to_dict()["root_cause"]["held"]
    assert {"size": 16 * MEGABYTE, "what": "float32[4000000]", "count": 1}.items() <= next(
        each.items() for each in held if each["name"] == "activations['hidden']"
    )


def test_an_allocation_of_torchs_that_the_host_cannot_give_says_what_was_held():
    def ask():
        import torch

        mine = torch.zeros(MEGABYTE)
        return torch.empty(1 << 55), mine

    root = nblaunch.run(ask, nproc=1, check=False).root_cause
    assert "DefaultCPUAllocator" in root.message
    assert [(each.name, each.size) for each in root.memory][:1] == [("mine", 4 * MEGABYTE)]


def test_other_failures_hold_nothing():
    def fail():
        import torch

        mine = torch.zeros(MEGABYTE)
        raise ValueError(len(mine))

    assert nblaunch.run(fail, nproc=1, check=False).root_cause.memory == ()


def test_a_variable_that_cannot_be_looked_at_does_not_hide_the_failure():
    def job():
        class Hostile(dict):  # type: ignore[type-arg]
            def __iter__(self):
                raise SystemExit(9)

            def items(self):
                raise SystemExit(9)

            def __getattr__(self, name):
                raise SystemExit(9)

        hostile = Hostile(a=1)
        hostile["me"] = hostile
        raise MemoryError(len(hostile))

    root = nblaunch.run(job, nproc=1, check=False).root_cause
    assert (root.type, root.memory) == ("builtins.MemoryError", ())


def test_a_rank_that_was_killed_has_the_memory_that_was_measured_last(tmp_path):
    """Nothing can be asked of it any more."""
    seen = tmp_path / "seen"

    class UntilMeasured(SilentView):
        shows_usage = True

        def draw(self, state):
            usage = state.ranks[0].usage
            if usage is not None and (usage.memory_peak or 0) > LARGE > usage.memory:
                seen.touch()

    def job():
        allocate_and_free()
        deadline = time.monotonic() + 60
        while not seen.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)

    outcome = run_fresh(prepare_call(job, (), None, LaunchOptions(nproc_per_node=1)), UntilMeasured())
    ((now, peak),) = used(outcome.result)
    assert peak > LARGE > now
    assert "when rank 0 was last measured, it used " in str(outcome.error)
    assert "at most" in str(outcome.error)
    assert outcome.result.report().to_dict()["root_cause"]["memory"]["host_peak"] == peak
