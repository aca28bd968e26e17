"""The next group of ranks is ready before it is asked for, and costs nothing while it waits."""

from __future__ import annotations

import os
import signal
import time

import poked
import psutil
import pytest
from lanes import slow

MEGABYTE = 1 << 20


class Watched:
    """A kernel with standby groups, and what its fork server has below it."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.poke = poked.of_kernel(kernel)

    def ranks(self):
        """Return the processes that the fork server has forked; the runtime has none."""
        found = []
        for keeper in psutil.Process(self.kernel.pid).children():
            for server in keeper.children():
                found += server.children()
        return found

    def run(self, line="-n 2", body="import os; os.getpid()"):
        """Run a cell; return its values."""
        self.kernel.ok(f"%%distributed {line} --out res\n{body}")
        return self.kernel.value("res.values")


@pytest.fixture
def watched(start_kernel):
    return Watched(start_kernel(NBLAUNCH_STANDBY="1"))


@pytest.fixture
def waiting(watched, eventually):
    """Give a function that runs a cell and waits for the group that follows; it returns those processes."""

    def run_and_wait(size=2, line=None):
        ran = set(watched.run(line or f"-n {size}"))

        def ready():
            pids = {each.pid for each in watched.ranks()}
            connected = watched.poke(
                "(lambda seat: seat is not None and seat.group.waiting)(local.standby._standby_group)"
            )
            return connected and len(pids) == size and not pids & ran

        eventually(ready, "a group is ready")
        return watched.ranks()

    return run_and_wait


@pytest.mark.quick
def test_a_run_takes_the_group_that_waits_and_another_one_follows(watched, waiting):
    first = {each.pid for each in waiting()}
    assert set(watched.run()) == first
    assert {each.pid for each in waiting()}.isdisjoint(first)


@pytest.mark.slow
def test_it_sees_the_notebook_as_it_is_when_it_is_used(watched, waiting, tmp_path):
    (tmp_path / "changed_meanwhile.py").write_text("VALUE = 'first'\n")
    watched.kernel.ok(f"import os, sys\nsys.path.insert(0, {str(tmp_path)!r})")
    body = "import os, changed_meanwhile as m\n(m.VALUE, os.environ.get('NEW'), os.getcwd(), os.getpid())"
    assert [value[:2] for value in watched.run(body=body)] == [["first", None]] * 2
    pids = {each.pid for each in waiting()}
    (tmp_path / "changed_meanwhile.py").write_text("VALUE = 'second'\n")
    watched.kernel.ok(f"os.environ['NEW'] = 'yes'\nos.chdir({str(tmp_path)!r})")
    values = watched.run("-n 2 --env OTHER=1", body=body)
    assert [value[:3] for value in values] == [["second", "yes", str(tmp_path)]] * 2
    assert {value[3] for value in values} == pids


def test_ranks_that_wait_do_what_a_job_does_first_and_read_no_environment(watched, waiting, eventually):
    ranks = waiting()
    # The last step of it.
    eventually(lambda: all(each.net_connections("tcp") for each in ranks), "they are connected to the store")
    watched.kernel.ok("import os\nos.environ['ATEN_CPU_CAPABILITY'] = 'default'")
    body = (
        "import os, torch\nfrom nblaunch.rank import memory\n"
        "(os.getpid(), memory._host._last_walk > 0, torch.backends.cpu.get_cpu_capability())"
    )
    # torch reads this when it first computes something, and never again.
    assert sorted(watched.run(body=body)) == [[pid, True, "DEFAULT"] for pid in sorted(p.pid for p in ranks)]


def test_a_group_of_another_shape_takes_its_place(watched, waiting):
    before = {each.pid for each in waiting(2)}
    assert set(watched.run("-n 3")).isdisjoint(before)
    after = waiting(3)
    assert len(after) == 3
    assert before.isdisjoint({each.pid for each in after})


@pytest.mark.slow
def test_what_runs_in_between_is_not_disturbed(watched, waiting):
    waiting()
    watched.kernel.ok("%distributed start -n 2\n")
    watched.kernel.ok("%%distributed --out res\nx = rank")
    watched.kernel.ok("%%distributed --fresh -n 2 --out res\nrank")
    watched.kernel.ok("%%distributed --out res\nx")
    assert watched.kernel.value("res.values") == [0, 1]
    watched.kernel.ok("%distributed stop")


@pytest.mark.slow_at("one rank")
@pytest.mark.parametrize("who", ["one rank", slow("all ranks"), "the fork server"])
def test_a_group_that_has_died_is_passed_over(watched, waiting, who):
    ranks = waiting()
    victims = {"one rank": ranks[:1], "all ranks": ranks, "the fork server": [ranks[0].parent()]}[who]
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    # A fork server takes a moment to go, and its ranks with it.
    psutil.wait_procs([*victims, *ranks] if who == "the fork server" else victims, timeout=10)
    assert watched.run(body="rank + 1") == [1, 2]


@pytest.mark.slow
def test_an_error_of_a_run_that_takes_it_is_told_as_ever(watched, waiting):
    waiting()
    error = watched.kernel.fails("%%distributed -n 2 --out res\nif rank == 1:\n    raise ValueError('mine')")
    assert error.evalue.startswith("rank 1 of 2 failed: ValueError: mine (cell line 3)")
    assert watched.run(body="rank") == [0, 1]


@pytest.mark.slow
def test_while_it_waits_it_takes_next_to_no_memory_and_no_time(waiting):
    ranks = waiting()
    for rank in ranks:
        assert rank.memory_full_info().uss < 15 * MEGABYTE
    before = [sum(each.cpu_times()[:2]) for each in ranks]
    time.sleep(1.0)  # it is what happens in this second that counts
    after = [sum(each.cpu_times()[:2]) for each in ranks]
    assert max(late - early for early, late in zip(before, after, strict=True)) < 0.05


def test_it_goes_when_nobody_uses_it(watched, waiting, eventually):
    waiting()
    watched.poke(
        "from nblaunch.group import standby\nstandby.STANDBY_SECONDS = 0.1\n"
        "with local.standby._lock:\n    local.standby._changed.notify_all()"
    )
    eventually(lambda: watched.ranks() == [], "the group has been dropped")
    assert watched.run(body="rank") == [0, 1]


@pytest.mark.slow
def test_it_goes_where_memory_is_short(watched, waiting, eventually):
    waiting()
    watched.poke(
        "from nblaunch.group import standby\nstandby._LEAST_FREE = 2.0\n"
        "with local.standby._lock:\n    local.standby._changed.notify_all()"
    )
    eventually(lambda: watched.ranks() == [], "the group has been dropped")


def test_it_can_be_turned_off(start_kernel, eventually):
    watched = Watched(start_kernel(NBLAUNCH_STANDBY="0"))
    watched.run()
    eventually(lambda: watched.ranks() == [], "the ranks have left")
    running = "[each.name for each in __import__('threading').enumerate() if 'standby' in each.name]"
    assert watched.poke(running) == watched.kernel.value(running) == []


@pytest.mark.slow
def test_a_script_prepares_nothing():
    """It may never run anything again; nothing is to be started only to be ended."""
    from nblaunch.client.preparation import standby_wanted

    assert os.environ["NBLAUNCH_STANDBY"] == "0"
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("NBLAUNCH_STANDBY")
        assert standby_wanted() is False
        environment.setenv("NBLAUNCH_STANDBY", "1")
        assert standby_wanted() is True
