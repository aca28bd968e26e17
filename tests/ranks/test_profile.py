"""`--profile` records every rank: who is slow in which step is named, and the trace opens in any viewer."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys

import pytest
from lanes import full

import nblaunch
from nblaunch import RunFailedError

pytestmark = pytest.mark.quick

RANKS, SLEEPER, STEPS = 8, 5, 10
ATTEMPTS = 25
"""Where other programs hold the cores for 5 ms, another rank is late: one run must have all steps."""


def train(steps=6, sleeper=1, *, counted=True, fails=None):
    import time

    import torch
    import torch.distributed as dist

    import nblaunch

    rank, gradients = dist.get_rank(), torch.ones(20_000)
    work = torch.ones(64, 64)
    for _ in range(steps):
        if counted:
            nblaunch.step()
        work @ work
        if rank == sleeper:
            time.sleep(0.005)
        dist.all_reduce(gradients)
    if fails == rank:
        raise ValueError(fails)
    return "nblaunch.probes.profiling" in sys.modules


@pytest.fixture(scope="module")
def session():
    with nblaunch.Session(2, profile=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def profile(session):
    return session.run(train).profile


def test_a_profile_has_a_row_for_each_step_and_rank(profile):
    assert [(row.step, row.rank) for row in profile.summary] == [(s, r) for s in range(6) for r in range(2)]
    assert profile.steps_by == "step"
    assert profile.headline == "profile: 2 ranks, 6 steps"
    for row in profile.summary:
        parts = row.compute + row.communication - row.overlap + row.waiting + row.idle
        assert parts == pytest.approx(row.seconds)
    # The sleep is neither work nor communication.
    assert all(row.idle > 0.0045 for row in profile.summary if row.rank == 1)


@pytest.mark.full
def test_collectives_of_all_ranks_are_matched_and_have_their_size(profile):
    (use,) = profile.collectives
    assert (use.operation, use.group, use.size, use.count) == ("all_reduce", "default_pg", 80_000, 6)
    assert 0 < use.bandwidth <= use.best * 1.001


@pytest.mark.full
def test_the_clocks_of_one_host_are_measured_and_agree(profile):
    assert set(profile.clock_error) == {0, 1}
    assert profile.clock_check.collectives == 6
    # No rank has left a collective before the other had come, by more than the clocks may be wrong.
    assert profile.clock_check.violation <= sum(profile.clock_error.values())


@pytest.mark.full
def test_the_trace_is_one_gzipped_file_of_chromes_format_in_which_ranks_are_named(profile, tmp_path):
    assert profile.path.name == "profile.json.gz"
    trace = json.loads(gzip.decompress(profile.save(tmp_path / "t.json.gz").read_bytes()))
    events = trace["traceEvents"]
    assert all({"ph", "name", "pid", "tid"} <= each.keys() for each in events if each["ph"] != "M")
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert sorted(names) == [0, 1]
    assert [names[rank].startswith(f"rank {rank} (") for rank in names] == [True, True]
    for rank in range(2):
        own = [each for each in events if each["pid"] == rank and each["ph"] == "X"]
        assert sum(each["name"] == "gloo:all_reduce" for each in own) == 6
        assert {f"step {number}" for number in range(6)} <= {each["name"] for each in own}
        # On one clock: each of rank 0's waits lies within the trace of rank 1.
        assert min(each["ts"] for each in own) > 0
    waits = [each for each in events if each.get("cat") == "wait" and each["name"] == "waits for rank 1"]
    assert len(waits) >= 3


@pytest.mark.full
def test_nothing_is_printed_by_the_profiler(session):
    assert [each.stderr for each in session.run(train).ranks] == ["", ""]


@pytest.mark.full
def test_steps_are_found_by_collectives_that_repeat(session):
    profile = session.run(train, (8,), {"counted": False}).profile
    assert (profile.steps_by, profile.steps) == ("collectives", tuple(range(8)))


@pytest.mark.full
def test_a_job_without_steps_is_one_and_says_so(session):
    profile = session.run(lambda: 1).profile
    assert (profile.steps_by, profile.steps) == ("job", (0,))
    assert "no steps were found: call nblaunch.step() at the beginning of each" in profile.warnings


@pytest.mark.full
@pytest.mark.parametrize(("counted", "by"), [(True, "step"), full((False, "collectives"))])
def test_some_steps_only(counted, by):
    result = nblaunch.run(train, (8,), {"counted": counted}, nproc=2, profile_steps="3:5")
    assert (result.profile.steps_by, result.profile.steps) == (by, (3, 4, 5))
    assert {row.step for row in result.profile.summary} == {3, 4, 5}


@pytest.mark.full
def test_a_rank_that_raised_has_a_profile_and_the_session_goes_on(session):
    with pytest.raises(RunFailedError) as caught:
        session.run(train, kwargs={"fails": 1})
    assert caught.value.root_cause.rank == 1
    assert 1 in caught.value.result.profile.ranks
    assert len(session.run(train).profile.steps) == 6


def test_without_the_option_nothing_is_loaded_and_there_is_no_profile():
    result = nblaunch.run(train, nproc=2)
    assert (result.profile, result.values) == (None, [False, False])
    assert "profile" not in repr(result.state.profile.text)


@pytest.mark.full
def test_a_cell_asks_for_it_by_itself():
    with nblaunch.Session(2) as quiet:
        options = nblaunch.LaunchOptions(nproc_per_node=2, profile=True)
        assert quiet.cell("1", namespace={}).profile is None
        from nblaunch.options.launch import within

        assert within(nblaunch.LaunchOptions(nproc_per_node=2), options).profile


@pytest.mark.full
def test_a_rank_that_is_killed_has_none_and_the_profile_says_so():
    def killed():
        import torch
        import torch.distributed as dist

        for _ in range(4):
            nblaunch.step()
            dist.all_reduce(torch.ones(8))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    result = nblaunch.run(killed, nproc=2, profile=True, check=False)
    assert result.profile.missing == (1,)
    assert "rank 1: no profile, because it ended before it could be sent" in result.profile.warnings
    assert result.profile.path.is_file()


@pytest.mark.full
def test_after_a_restart_it_is_the_last_attempts():
    def again():
        import torch
        import torch.distributed as dist

        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        for _ in range(3 if first else 5):
            nblaunch.step()
            dist.all_reduce(torch.ones(8))
        if first and dist.get_rank() == 1:
            raise ValueError

    result = nblaunch.run(again, nproc=2, profile=True, max_restarts=1)
    assert (len(result.attempts), len(result.profile.steps)) == (2, 5)


@pytest.mark.full
def test_groups_of_some_ranks_are_told_apart():
    def grouped():
        import torch
        import torch.distributed as dist

        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for _ in range(4):
            nblaunch.step()
            dist.all_reduce(torch.ones(8), group=groups[dist.get_rank() // 2])
            dist.all_reduce(torch.ones(1000), async_op=True).wait()

    uses = nblaunch.run(grouped, nproc=4, profile=True).profile.collectives
    assert sorted((use.size, use.count) for use in uses) == [(32, 4), (32, 4), (4000, 4)]
    assert len({use.group for use in uses}) == 3


@pytest.mark.full
def test_a_script_is_profiled_and_its_trace_lies_beside_its_logs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, nblaunch\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(4):\n"
        "    nblaunch.step()\n"
        "    dist.all_reduce(torch.ones(8))\n"
        "dist.destroy_process_group()\n"
    )
    result = nblaunch.run(str(script), nproc=2, profile=True, log_dir=tmp_path / "logs")
    assert len(result.profile.steps) == 4
    assert result.log_dir is not None
    assert (result.log_dir / "profile.json.gz").is_file()


@pytest.mark.slow
def test_more_collectives_than_the_recorder_keeps_are_all_there():
    def many():
        import torch
        import torch.distributed as dist

        for _ in range(50):
            nblaunch.step()
            for _ in range(40):
                dist.all_reduce(torch.ones(8))

    (use,) = nblaunch.run(many, nproc=2, profile=True).profile.collectives
    assert (use.count, use.group) == (2000, "default_pg")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sleep_of_5_ms_on_one_of_8_ranks_is_named_in_every_step():
    with nblaunch.Session(RANKS, profile=True) as eight:
        result = eight.run(train, (2,))  # what is loaded with the first step is no sleep
        named: dict[int, int] = {}
        for _ in range(ATTEMPTS):
            result = eight.run(train, (STEPS, SLEEPER))
            named = {step: each.rank for step, each in result.profile.straggler.items()}
            if named == dict.fromkeys(range(STEPS), SLEEPER):
                break
    assert named == dict.fromkeys(range(STEPS), SLEEPER)
    found = list(result.profile.straggler.values())
    assert all(each.operation.startswith("all_reduce ") for each in found)
    slept = [each.before.endswith("outside of operators") for each in found]
    assert sum(slept) > STEPS // 2, "what it did before is a sleep, unless it lost its core meanwhile"
