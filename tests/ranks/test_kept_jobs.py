"""What a runtime keeps of a detached session's jobs, within which bounds, and what of all others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import few_kept
import pytest
from patience import eventually

import nblaunch
from nblaunch import NblaunchError
from nblaunch.client.local import Runtime, local
from nblaunch.protocol import client as wire
from nblaunch.protocol.state import decode_state
from nblaunch.runtime.connections import _BEHIND_SECONDS

RANKS = 2
MOST_JOBS = 50
IN_MEMORY = 3
MIB = 1 << 20
SIZE = 15 * MIB // 16
"""Two jobs of two ranks with values of this size stay within the bound of `few_kept`, and three do not."""


def printed(number):
    print("job", number)
    return number


def large(number, size):
    return bytes([number]) * size


def counting(start, go_on, until):
    """Print a number every few milliseconds, from the start until a file is there; touch `start` first."""
    rank = int(os.environ["RANK"])
    Path(f"{start}{rank}").touch()
    count = 0
    while not Path(go_on).exists() or count < until:
        print(f"line {count}")
        print(f"error {count}", file=sys.stderr)
        count += 1
        time.sleep(0.005)
    return count


def flood(megabytes, go_on):
    line = "x" * 1023
    for _ in range(megabytes * 1024):
        print(line)
    while not Path(go_on).exists():
        time.sleep(0.01)
    return "done"


def gated(begin, megabytes, go_on):
    """Print one line, and once `begin` is there a flood of numbered ones."""
    print(-1, flush=True)
    while not Path(begin).exists():
        time.sleep(0.01)
    for number in range(megabytes * 1024):
        print(number, "x" * 1018)
    while not Path(go_on).exists():
        time.sleep(0.01)


@pytest.fixture
def detached(place):
    """Give `detached(**options)`: detached sessions, which are closed at the end of the test."""
    opened: list[nblaunch.Session] = []

    def start(**options):
        opened.append(place(RANKS, name=f"kept-{len(opened)}", detach=True, **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def session(place):
    """Give the detached session that tests share which look at their own jobs alone."""
    with place(RANKS, name="shared", detach=True) as opened:
        opened.run(printed, (0,))  # it keeps files open, and a connection for what is asked meanwhile
        handle = opened.submit(time.sleep, (0.5,))
        eventually(lambda: len(opened.jobs) == 2, "the job has begun")
        handle.result()
        assert opened.jobs[0].result().values == [0, 0]
        yield opened


def asked(session, request):
    """Return the runtime's answer to a request about a session."""
    return session._live._runtime.ask(request)


def root_of(session) -> Path:
    return Path(session._live._runtime.root)


def files(root) -> list[str]:
    return sorted(path.name for path in root.glob("job-*"))


def running(name: str) -> str:
    """Return the title of the job that a session runs."""
    return next((each.running for each in nblaunch.sessions() if each.name == name), "")


def state_of(session, number):
    return decode_state(asked(session, wire.WatchJob(job=number)).state)


# --- which jobs, and where -------------------------------------------------------------------------


def test_the_last_fifty_jobs_are_kept_whatever_becomes_of_their_results(detached):
    session = detached()
    session.run(printed, (0,))
    first = session.jobs[-1]
    for number in range(1, MOST_JOBS + 10):
        session.run(printed, (number,))
    assert len(session.jobs) == MOST_JOBS
    oldest, *_, newest = session.jobs
    assert [job.result().values for job in (oldest, newest)] == [[10, 10], [59, 59]]
    assert oldest.result().ranks[1].stdout == "job 10\n"
    unknown = rf"^job {first.number} is not known here: .*\. Look in session\.jobs for those that a detached"
    with pytest.raises(NblaunchError, match=unknown):
        first.result()
    states = sorted(f"job-{job.number}" for job in session.jobs[:-IN_MEMORY])
    eventually(lambda: files(root_of(session)) == states, "older ones have one file, their last state")


def test_an_older_job_is_read_from_its_file_and_is_the_same(detached):
    session = detached()
    session.run(printed, (0,))
    job = session.jobs[-1]
    before = state_of(session, job.number)
    file = root_of(session) / f"job-{job.number}"
    for number in range(1, IN_MEMORY):
        session.run(printed, (number,))
    assert not file.exists()
    session.run(printed, (9,))
    eventually(file.exists, "the state is on disk")
    assert state_of(session, job.number) == before
    file.unlink()
    with pytest.raises(NblaunchError, match=r"its files are gone\. Run it again"):
        job.result()
    assert session.jobs[-1].result().values == [9, 9]


def test_a_job_is_kept_though_its_client_releases_it_while_it_runs(detached, tmp_path):
    session = detached()
    handle = session.submit(counting, (tmp_path / "begun-", tmp_path / "go", 5))
    eventually((tmp_path / "begun-1").exists, "the job runs")
    job = session.jobs[-1]
    session._live._runtime.note(wire.ReleaseJob(job=job.number, pid=os.getpid()))
    (tmp_path / "go").touch()
    handle.result()
    assert session.jobs[-1].result().ranks[0].stdout.startswith("line 0\nline 1\n")


# --- values ----------------------------------------------------------------------------------------


@pytest.fixture
def few_values(monkeypatch):
    """Have runtimes keep few bytes of values."""
    runtimes_that_live(few_kept.live, monkeypatch)


def runtimes_that_live(function, monkeypatch):
    monkeypatch.setattr("nblaunch.client.local.LIVE", f"{few_kept.__name__}:{function.__name__}")


def test_values_are_kept_newest_first_within_their_bound(detached, few_values):  # noqa: ARG001
    session = detached()
    for number in range(4):
        session.run(large, (number, SIZE))
    session.run(printed, (4,))
    dropped = "values dropped after 4 MiB of newer ones"
    assert [job.dropped for job in session.jobs] == [dropped, dropped, "", "", ""]
    for number in (2, 3):
        assert session.jobs[number].result().values == [large(number, SIZE)] * RANKS
    gone = session.jobs[1].result()
    assert gone.values == [None] * RANKS
    assert any("is only shown: it was dropped after 4 MiB" in warning for warning in gone.warnings)
    assert session.jobs[4].result().values == [4, 4], "a small value is part of the state"


def test_the_last_value_is_kept_for_its_client_however_large(detached, few_values):  # noqa: ARG001
    session = detached()
    assert session.run(large, (1, 3 * MIB)).values == [large(1, 3 * MIB)] * RANKS
    eventually(lambda: session.jobs[0].dropped != "", "it was taken, and is too large")


def numbers():
    import torch

    return torch.zeros(4 * MIB)


def test_what_a_client_writes_to_a_value_stays_with_it(session):
    value = session.run(numbers).values[0]
    value += 1
    assert session.jobs[-1].result().values[0].sum() == 0
    assert session.jobs[-1].result().values[0].sum() == 0, "the runtime has it still"


CLIENT = """
import os, sys, time
from pathlib import Path
import nblaunch

def flood(directory, megabytes):
    rank = os.environ["RANK"]
    Path(directory, "begun-" + rank).touch()
    while not Path(directory, "go").exists():
        time.sleep(0.01)
    for _ in range(megabytes << 10):
        print("x" * 1023)
    return "done"

if __name__ == "__main__":
    with nblaunch.Session(2, name="stopped", detach=True) as session:
        result = session.run(flood, (sys.argv[1], int(sys.argv[2])))
        print(result.values, [each.transcript.written >> 20 for each in result.state.ranks.values()])
"""


@pytest.mark.slow_at("falls behind after the end")
@pytest.mark.parametrize("megabytes", [3, 12], ids=["falls behind after the end", "is behind at the end"])
def test_a_client_that_was_stopped_at_the_end_has_the_whole_result(tmp_path, megabytes):
    program = tmp_path / "client.py"
    program.write_text(CLIENT)
    words = [sys.executable, str(program), str(tmp_path), str(megabytes)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        eventually(lambda: all((tmp_path / f"begun-{rank}").exists() for rank in range(RANKS)), "it runs")
        client.send_signal(signal.SIGSTOP)
        try:
            (tmp_path / "go").touch()
            eventually(lambda: not running("stopped"), "the job has ended", seconds=60)
            # Nothing outside shows it: by now the runtime takes the client for one that does not read.
            time.sleep(_BEHIND_SECONDS + 0.5)
        finally:
            client.send_signal(signal.SIGCONT)
        assert client.communicate()[0] == f"{['done'] * RANKS} {[megabytes] * RANKS}\n"


def test_a_value_is_there_after_the_ranks_that_have_returned_it(detached):
    session = detached()
    before = [each.pid for each in session.status().ranks]
    session.run(large, (1, SIZE))
    session.run(printed, (2,))
    session.restart()
    assert {each.pid for each in session.status().ranks}.isdisjoint(before)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), "the old ranks are gone")
    first, second = session.jobs
    assert first.result().values == [large(1, SIZE)] * RANKS
    assert second.result().values == [2, 2]
    assert [each.stdout for each in second.result().ranks] == ["job 2\n"] * RANKS
    assert session.run(printed, (3,)).values == [3, 3]
    assert [job.result().values[0] for job in session.jobs[1:]] == [2, 3]


# --- files -----------------------------------------------------------------------------------------


def test_a_bound_session_leaves_no_file_for_those_who_come_later(tmp_path):
    with nblaunch.Session(RANKS, name="bound") as session:
        handle = session.submit(counting, (tmp_path / "begun-", tmp_path / "go", 5))
        eventually(lambda: "[rank 1] line 3\n" in logs("bound").stdout, "its output so far, from the start")
        (tmp_path / "go").touch()
        result = handle.result()
        for number in range(IN_MEMORY + 1):
            session.run(printed, (number,))
        assert files(root_of(session)) == []
        del result, handle


def test_fresh_ranks_leave_no_files(tmp_path):
    (tmp_path / "go").touch()
    nblaunch.run(counting, (tmp_path / "begun-", tmp_path / "go", 200), nproc=RANKS)
    assert list(local().runtime.root.glob("job-*")) == []


# --- log files -------------------------------------------------------------------------------------


@pytest.fixture
def small_logs(monkeypatch):
    """Have runtimes keep small log files, of few jobs."""
    runtimes_that_live(few_kept.with_small_logs, monkeypatch)


def log_files(session) -> list[Path]:
    return list(root_of(session).glob("logs-*/*/*/*/std*.log"))


def room(session) -> int:
    """Return how many bytes the log files of a session take on the disk."""
    found = 0
    for path in log_files(session):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_blocks * 512
    return found


def sizes(session) -> list[int]:
    return [path.stat().st_size for path in log_files(session) if path.name == "stdout.log"]


SLACK = 2 * MIB
"""A log file is cut in large steps, and some time after it was read."""


def test_the_private_log_of_a_job_that_prints_much_is_bounded_and_says_what_is_gone(
    detached,
    small_logs,  # noqa: ARG001
    tmp_path,
):
    session = detached()
    handle = session.submit(flood, (24, tmp_path / "go"))
    eventually(lambda: sizes(session) == [24 * MIB] * RANKS, "all is printed")
    eventually(
        lambda: room(session) < RANKS * (few_kept.LOG + SLACK), "the files of the job that runs are small"
    )
    (tmp_path / "go").touch()
    result = handle.result()
    assert result.values == ["done"] * RANKS
    for each in (*result.ranks, *session.jobs[0].result().ranks):
        first, *rest = each.stdout.splitlines(keepends=True)
        assert set(rest) == {"x" * 1023 + "\n"}
        assert few_kept.LOG - 1024 <= len("".join(rest)) < few_kept.LOG + SLACK
        assert first == f"[{24 * MIB - len(''.join(rest)):,} bytes before this are no longer kept]\n"


OF_EACH = 4


def test_in_a_directory_of_the_users_own_logs_are_complete(detached, small_logs, tmp_path):  # noqa: ARG001
    (tmp_path / "go").touch()
    session = detached(log_dir=str(tmp_path / "logs"))
    for _ in range(few_kept.JOBS + 2):
        result = session.run(flood, (OF_EACH, tmp_path / "go"))
        assert {len(each.stdout) for each in result.ranks} == {OF_EACH * MIB}
    files = list((tmp_path / "logs").glob("*/attempt_0/*/stdout.log"))
    assert [each.stat().st_size for each in files] == [(few_kept.JOBS + 2) * OF_EACH * MIB] * RANKS
    assert all(each.stat().st_blocks * 512 >= each.stat().st_size for each in files)


def test_logs_of_jobs_that_are_no_longer_kept_are_removed_while_the_session_lives(
    detached,
    small_logs,  # noqa: ARG001
    tmp_path,
):
    (tmp_path / "go").touch()
    session = detached()
    session.run(flood, (3, tmp_path / "go"))
    assert room(session) >= RANKS * 3 * MIB
    for number in range(few_kept.JOBS):
        session.run(printed, (number,))
    eventually(lambda: room(session) < RANKS * SLACK, "what the first one printed is gone")
    assert [each.result().ranks[1].stdout for each in session.jobs] == ["job 0\n", "job 1\n", "job 2\n"]

    # Other ranks have other files; those of the first ones are needed as long as one of their jobs is kept.
    session.restart()
    for number in range(few_kept.JOBS - 1):
        session.run(printed, (number,))
    assert session.jobs[0].result().ranks[0].stdout == "job 2\n"
    first = list(root_of(session).glob("logs-*/*/attempt_0/*/std*.log"))
    assert len(first) == 2 * RANKS
    session.run(printed, (2,))
    eventually(lambda: not any(each.exists() for each in first), "the files of the first ranks are gone")
    assert [each.result().ranks[1].stdout for each in session.jobs] == ["job 0\n", "job 1\n", "job 2\n"]


def test_logs_of_a_bound_session_go_with_the_results_that_refer_to_them(tmp_path):
    (tmp_path / "go").touch()
    with nblaunch.Session(RANKS, name="bound") as session:
        kept = session.run(printed, (1,))
        result = session.run(flood, (3, tmp_path / "go"))
        del result
        last = session.run(printed, (2,))
        assert room(session) >= RANKS * 3 * MIB, "an older one is needed"
        assert kept.ranks[0].stdout == "job 1\n"
        del kept
        eventually(lambda: room(session) < RANKS * SLACK, "all before the last one is gone")
        assert last.ranks[1].stdout == "job 2\n"


def test_results_of_a_session_without_output_are_released_together_and_those_with_it_at_once(monkeypatch):
    sent = []
    send = Runtime.send_notes

    def counted(runtime):
        sent.extend(runtime._notes)
        send(runtime)

    monkeypatch.setattr(Runtime, "send_notes", counted)
    with nblaunch.Session(RANKS, name="bound") as session:
        session.run(printed, (0,))  # with it goes that of the start
        begun = len(sent)
        for _ in range(8):
            session.run(os.getpid)
        assert len(sent) == begun
        session.run(os.getpid)
        assert len(sent) == begun + 9
        session.run(os.getpid)
        session.run(printed, (1,))
        assert len(sent) == begun + 11
        last = session.run(os.getpid)
        session.run(os.getpid)
        assert len(sent) == begun + 11
    assert len(sent) == begun + 12, "the session is closed"
    del last
    assert len(sent) == begun + 13


# --- logs ------------------------------------------------------------------------------------------


def logs(*words):
    """Return what `python -m nblaunch logs` does."""
    return subprocess.run(
        [sys.executable, "-m", "nblaunch", "logs", *words], capture_output=True, text=True, check=False
    )


@pytest.fixture
def following():
    """Give `following(name)`: `python -m nblaunch logs -f`, whose output is read line by line."""
    started: list[subprocess.Popen[str]] = []

    def follow(name):
        words = [sys.executable, "-m", "nblaunch", "logs", "-f", name]
        started.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
        )
        return started[-1]

    yield follow
    for each in started:
        each.kill()
        each.communicate()


def test_logs_show_a_job_that_runs_and_one_that_has_ended(session, tmp_path):
    session.run(printed, (7,))
    earlier = session.jobs[-1].number
    handle = session.submit(counting, (tmp_path / "begun-", tmp_path / "go", 200))
    eventually((tmp_path / "begun-1").exists, "the job runs")
    eventually(lambda: "[rank 1] line 3\n" in logs(session._live.name).stdout, "its output so far")
    (tmp_path / "go").touch()
    counts = handle.result().values
    whole = logs(session._live.name)
    for rank, count in enumerate(counts):
        lines = [line for line in whole.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines == [f"[rank {rank}] line {number}" for number in range(count)]
        errors = [line for line in whole.stderr.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert errors == [f"[rank {rank}] error {number}" for number in range(count)]
    first = logs(session._live.name, "--job", str(earlier))
    assert sorted(first.stdout.splitlines()) == ["[rank 0] job 7", "[rank 1] job 7"]
    for number in range(IN_MEMORY + 1):
        session.run(printed, (number,))
    eventually((root_of(session) / f"job-{earlier}").exists, "the first one is on disk alone")
    again = logs(session._live.name, "--job", str(earlier))
    assert sorted(again.stdout.splitlines()) == ["[rank 0] job 7", "[rank 1] job 7"]


def test_logs_follow_a_job_in_order_until_it_ends(session, following, tmp_path):
    handle = session.submit(counting, (tmp_path / "begun-", tmp_path / "go", 300))
    eventually((tmp_path / "begun-1").exists, "the job runs")
    follower = following(session._live.name)
    assert follower.stdout.readline().endswith("line 0\n")
    (tmp_path / "go").touch()
    rest, errors = follower.communicate()
    counts = handle.result().values
    assert follower.returncode == 0
    for rank, count in enumerate(counts):
        lines = [line for line in rest.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines[-1] == f"[rank {rank}] line {count - 1}"
        assert lines == [f"[rank {rank}] line {number}" for number in range(count - len(lines), count)]
        assert errors.count(f"[rank {rank}] error ") == count


@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, True])
def test_a_follower_that_does_not_read_for_a_while_misses_nothing(detached, following, ended, tmp_path):
    session = detached()
    handle = session.submit(gated, (tmp_path / "begin", 12, tmp_path / "go"))
    follower = following(session._live.name)
    lines = [follower.stdout.readline()]
    # Its pipe is full soon, then its socket, and then it is sent no more.
    (tmp_path / "begin").touch()
    eventually(lambda: min(sizes(session)) > 12 * MIB, "all is printed")
    time.sleep(_BEHIND_SECONDS + 0.5)
    if ended:
        (tmp_path / "go").touch()
        handle.result()
    reading = threading.Thread(target=lambda: lines.extend(follower.stdout))
    reading.start()
    (tmp_path / "go").touch()
    handle.result()
    reading.join()
    assert (follower.wait(), follower.stderr.read()) == (0, "")
    for rank in range(RANKS):
        numbers = [int(line.split()[2]) for line in lines if line.startswith(f"[rank {rank}] ")]
        assert numbers == list(range(-1, 12 * 1024))


def test_a_follower_is_interrupted_quietly_and_the_job_goes_on(session, following, tmp_path):
    handle = session.submit(counting, (tmp_path / "begun-", tmp_path / "go", 5))
    eventually((tmp_path / "begun-1").exists, "the job runs")
    follower = following(session._live.name)
    follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    _, errors = follower.communicate()
    assert follower.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors
    (tmp_path / "go").touch()
    assert min(handle.result().values) >= 5


def test_logs_of_a_bound_session_that_runs_a_young_job(following):
    with nblaunch.Session(RANKS, name="bound") as session:
        kept = session.run(printed, (3,))
        follower = following("bound")
        assert sorted(follower.communicate()[0].splitlines()) == ["[rank 0] job 3", "[rank 1] job 3"]
        del kept
        assert "is not known here" in logs("bound").stderr


def test_logs_of_what_is_not_there(detached):
    session = detached()
    assert "has run no job yet" in logs(session._live.name).stderr
    session.run(printed, (1,))
    wrong = logs(session._live.name, "--job", "1")
    assert wrong.returncode == 1
    assert f"session 'kept-0' has no job 1; it has {session.jobs[0].number}" in wrong.stderr
    missing = logs("nowhere")
    assert missing.returncode == 1
    assert missing.stderr.startswith("session 'nowhere' is not open on this machine")
