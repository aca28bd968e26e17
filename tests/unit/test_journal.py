"""The messages of a job are on disk, in order and bounded; what is dropped is counted, and nobody waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import disks
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import eventually

from nblaunch._journal import Counts, Dropped, follow, read
from nblaunch.protocol.messages import (
    Cleared,
    Displayed,
    Exited,
    Logged,
    Noticed,
    Printed,
    Stream,
    decode_from_rank,
    encode,
)
from nblaunch.runtime import journal as journal_module
from nblaunch.runtime.journal import Journal, counts_of

KIB = 1024
MIB = 1024 * KIB


@pytest.fixture
def journals(tmp_path):
    """Give `journals(**bounds)`: journals of jobs that are written at once, closed at the end of the test."""
    made: list[Journal] = []

    def journal(directory=tmp_path, **bounds):
        made.append(Journal(directory, **{"after": 0.0, **bounds}))
        return made[-1]

    yield journal
    for each in made:
        each.close()


def output(number, size=100, rank=0):
    """Return one line of output, as long as asked, and how much it is."""
    line = f"{number:08}".ljust(size - 1, "x") + "\n"
    return line.encode(), Counts(rank, characters=size, lines=1)


def files(directory, job=1):
    return sorted(path.name for path in (directory / f"job-{job}").glob("*"))


def lost(dropped):
    """Return how many characters, lines and displays are dropped."""
    return tuple(sum(getattr(each, name) for each in dropped) for name in ("characters", "lines", "displays"))


def numbers(found):
    """Return the numbers of the output that was read, and that it is in order."""
    read_back = [int(raw[:8]) for raw in found.frames]
    assert read_back == sorted(read_back)
    return read_back


# --- what is written is read -----------------------------------------------------------------------


def test_what_is_written_is_read_in_order(journals, tmp_path):
    journal = journals()
    journal.begin(1, b"first state")
    messages: list[Any] = [
        Printed(rank=0, stream=Stream.STDOUT, text="a\n"),
        Noticed(text="slow"),
        Displayed(rank=1, data={"text/plain": "figure"}),
        Cleared(rank=1),
        Exited(rank=0, exitcode=0, time=1.0),
    ]
    for message in messages:
        journal.write(1, encode(message), counts_of(message))
    journal.close()
    found = read(tmp_path, 1)
    assert (found.state, found.record, found.dropped) == (b"first state", None, ())
    assert list(found.frames) == [encode(each) for each in messages]


def test_output_is_counted_and_everything_else_is_kept():
    printed = Printed(rank=3, stream=Stream.STDERR, text="one\ntwö")
    assert counts_of(printed) == Counts(3, characters=7, lines=1)
    assert counts_of(Displayed(rank=2, data={})) == Counts(2, displays=1)
    assert counts_of(Cleared(rank=1)) == Counts(1)
    two = bytes(16)
    logged = Logged(rank=1, names=("loss",), which=bytes(4), steps=two, times=two, values=two)
    assert counts_of(logged) == Counts(1, points=2)
    assert counts_of(Noticed(text="x")) is None
    assert counts_of(decode_from_rank(encode(Displayed(rank=2, data={})), "rank 2")) == Counts(2, displays=1)


def test_jobs_are_apart(journals, tmp_path):
    journal = journals()
    for job in (1, 2):
        journal.begin(job, b"")
    for job in (1, 2, 1):
        journal.write(job, b"of %d" % job, None)
    journal.write(3, b"of a job that was not begun", None)
    journal.close()
    assert [list(read(tmp_path, job).frames) for job in (1, 2, 3)] == [[b"of 1"] * 2, [b"of 2"], []]
    assert read(tmp_path, 3).state is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=60))
def test_any_messages_keep_their_order_across_segments(tmp_path_factory, messages):
    directory = tmp_path_factory.mktemp("journal")
    journal = Journal(directory, limit=100 * KIB, segment=512, after=0.0)
    journal.begin(1, b"")
    raws = []
    for number, (is_output, size) in enumerate(messages):
        raw, counts = output(number, 9 + size)
        raws.append(raw)
        journal.write(1, raw, counts if is_output else None)
    journal.close()
    assert list(read(directory, 1).frames) == raws


def test_a_job_may_have_256_mb_on_disk(tmp_path):
    """As the page of limits has it; what happens beyond that, other tests show with less."""
    journal = Journal(tmp_path)
    journal.begin(1, b"first")
    journal.close()
    assert journal._jobs[1]._limit == 256 * MIB
    limits = Path(__file__).parents[2] / "notebooks" / "docs" / "limits.md"
    assert "256 MB each" in limits.read_text()


def test_a_long_output_is_in_many_segments(journals, tmp_path):
    journal = journals(segment=4 * KIB)
    journal.begin(1, b"")
    for number in range(500):
        journal.write(1, *output(number))
    journal.close()
    segments = list((tmp_path / "job-1").glob("out-*"))
    assert len(segments) > 10
    assert max(path.stat().st_size for path in segments) <= 4 * KIB
    assert numbers(read(tmp_path, 1)) == list(range(500))


# --- the bound -------------------------------------------------------------------------------------


def test_what_ranks_log_is_bounded_as_their_output_is(journals, tmp_path):
    many = bytes(8 * KIB)
    raw = encode(Logged(rank=0, names=("loss",), which=bytes(2 * KIB), steps=many, times=many, values=many))
    journal = journals(limit=256 * KIB)
    journal.begin(1, b"first")
    for _ in range(100):
        journal.write(1, raw, counts_of(decode_from_rank(raw, "rank 0")))
    journal.close()
    left = len(list(read(tmp_path, 1).frames))
    assert 0 < left < 20
    assert sum(each.points for each in read(tmp_path, 1).dropped) == (100 - left) * KIB
    assert sum(path.stat().st_size for path in (tmp_path / "job-1").iterdir()) < 300 * KIB


@pytest.mark.parametrize("size", [64, 100, 3000])
def test_the_oldest_output_is_dropped_and_exactly_counted(journals, tmp_path, size):
    journal = journals(limit=64 * KIB, segment=8 * KIB)
    journal.begin(1, b"first")
    for number in range(5000):
        journal.write(1, *output(number, size, rank=number % 2))
        if number % 1000 == 0:
            journal.write(1, b"%08d kept" % number, None)
    journal.close()
    segments = list((tmp_path / "job-1").glob("out-*"))
    assert 48 * KIB <= sum(path.stat().st_size for path in segments) <= 64 * KIB
    found = read(tmp_path, 1)
    frames = list(found.frames)
    assert [raw for raw in frames if b"kept" in raw] == [
        b"%08d kept" % number for number in range(0, 5000, 1000)
    ]
    there = [int(raw[:8]) for raw in frames if b"kept" not in raw]
    assert there == list(range(5000 - len(there), 5000))
    for rank in (0, 1):
        gone = [number for number in range(5000 - len(there)) if number % 2 == rank]
        (dropped,) = [each for each in found.dropped if each.rank == rank]
        assert dropped == Dropped(
            rank=rank, characters=size * len(gone), lines=len(gone), why="limit of the journal"
        )
    assert found.state == b"first"


def test_a_message_that_is_larger_than_the_journal_is_dropped_alone(journals, tmp_path):
    journal = journals(limit=64 * KIB, segment=8 * KIB)
    journal.begin(1, b"")
    journal.write(1, *output(1))
    journal.write(1, *output(2, 100 * KIB))
    journal.write(1, *output(3, 20 * KIB))
    journal.write(1, bytes(100 * KIB), None)
    journal.close()
    found = read(tmp_path, 1)
    assert [len(raw) for raw in found.frames] == [100, 20 * KIB, 100 * KIB]
    assert lost(found.dropped) == (100 * KIB, 1, 0)


# --- time ------------------------------------------------------------------------------------------


def test_a_job_that_ends_young_makes_no_file(journals, tmp_path):
    journal = journals(after=60)
    journal.begin(1, b"first")
    journal.write(1, *output(1))
    journal.begin(2, b"")
    journal.write(2, bytes(2 << 20), None)  # too much to keep in memory until then
    eventually(lambda: files(tmp_path, 2) == ["keep", "out-0001"], "the second job is written")
    journal.forget(1)
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["job-2"]


def test_a_job_has_files_once_it_is_old_enough(journals, tmp_path):
    journal = journals(after=0.2)
    started = time.monotonic()
    journal.begin(1, b"first")
    journal.write(1, *output(1))
    while not (written := files(tmp_path)) and time.monotonic() < started + 10:
        time.sleep(0.005)
    assert time.monotonic() - started >= 0.2
    eventually(lambda: numbers(read(tmp_path, 1)) == [1], "what was printed before is written")
    assert written[0] == "keep"


def test_a_job_that_ends_young_and_is_not_forgotten_is_whole(journals, tmp_path):
    journal = journals(after=60)
    journal.begin(1, b"first")
    journal.write(1, *output(1))
    journal.end(1, b"last", b"record")
    journal.close()
    found = read(tmp_path, 1)
    assert (found.state, found.record, numbers(found)) == (b"last", b"record", [1])


@pytest.fixture
def stalled(monkeypatch):
    """Give an event: the disk takes nothing until it is set."""
    goes_on = threading.Event()
    append = journal_module._append

    def slow(path, frames):
        goes_on.wait(60)
        return append(path, frames)

    monkeypatch.setattr(journal_module, "_append", slow)
    yield goes_on
    goes_on.set()


def test_a_flood_neither_waits_for_a_slow_disk_nor_fills_memory(journals, tmp_path, stalled):
    journal = journals()
    journal.begin(1, b"")
    raw, counts = output(0, 1 << 20)
    slowest = 0.0
    for _ in range(100):
        started = time.perf_counter()
        journal.write(1, raw, counts)
        slowest = max(slowest, time.perf_counter() - started)
    journal.write(1, b"00000000 kept", None)
    assert slowest < 0.5
    assert sum(len(raw) for _, _, _, raw, *_ in journal._queue) <= 64 << 20
    dropped = lost(journal.dropped(1))[1]
    assert 36 <= dropped < 40
    stalled.set()
    journal.close()
    found = read(tmp_path, 1)
    assert found.dropped == (Dropped(rank=0, characters=dropped << 20, lines=dropped, why="disk too slow"),)
    assert len(numbers(found)) == 100 - dropped + 1


def test_small_messages_count_with_what_they_cost(journals, tmp_path, stalled):
    journal = journals()
    journal.begin(1, b"")
    for _ in range(300_000):
        journal.write(1, b"x", Counts(0, 1))
    assert len(journal._queue) <= 64 * MIB / 256
    assert lost(journal.dropped(1))[0] > 30_000
    stalled.set()
    journal.close()
    found = read(tmp_path, 1)
    assert lost(found.dropped)[0] + len(list(found.frames)) == 300_000


def test_a_journal_that_keeps_up_drops_nothing(journals, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_QUEUE_BYTES", 64 * KIB)
    journal = journals()
    journal.begin(1, b"")
    for number in range(5):
        journal.write(1, *output(number, 32 * KIB))
        eventually(lambda: numbers(read(tmp_path, 1))[-1:] == [number], "the output is written")  # noqa: B023
    assert journal.dropped(1) == ()


# --- a full disk -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """Give a file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    with disks.small_disk(place, "4m"):
        yield place


def test_a_full_disk_keeps_the_newest_output_and_all_the_rest(journals, small_disk):
    journal = journals(small_disk, segment=MIB)
    journal.begin(1, b"first")
    for number in range(20_000):
        journal.write(1, *output(number, KIB))
        if number % 1000 == 0:
            journal.write(1, b"%08d kept" % number, None)
    journal.end(1, b"last", b"record")
    journal.close()
    found = read(small_disk, 1)
    frames = list(found.frames)
    there = [int(raw[:8]) for raw in frames if b"kept" not in raw]
    assert [int(raw[:8]) for raw in frames if b"kept" in raw] == list(range(0, 20_000, 1000))
    assert there == list(range(20_000 - len(there), 20_000))
    assert len(there) > 2000
    missing = 20_000 - len(there)
    assert found.dropped == (Dropped(rank=0, characters=missing * KIB, lines=missing, why="disk full"),)
    assert (found.state, found.record) == (b"last", b"record")


def test_a_disk_that_others_have_filled_is_tried_again(journals, small_disk, monkeypatch):
    monkeypatch.setattr(journal_module, "_RETRY_SECONDS", 0.2)
    journal = journals(small_disk)
    (small_disk / "other").write_bytes(bytes(4 * MIB - 16 * KIB))
    journal.begin(1, b"first")
    for number in range(1000):
        journal.write(1, *output(number, KIB))
    journal.write(1, b"00001000 kept", None)
    eventually(lambda: lost(journal.dropped(1))[1] >= 980, "output is dropped")
    (small_disk / "other").unlink()
    number = 1000

    def written_again():
        nonlocal number
        number += 1
        journal.write(1, *output(number, KIB))
        return numbers(read(small_disk, 1))[-1] > 1000

    eventually(written_again, "the journal writes again")
    journal.close()
    found = read(small_disk, 1)
    there = numbers(found)
    assert 1000 in there
    assert len(there) + lost(found.dropped)[1] == number + 1
    assert {each.why for each in found.dropped} == {"disk full"}


def test_on_a_disk_that_stays_full_new_output_takes_the_place_of_old(journals, small_disk, monkeypatch):
    monkeypatch.setattr(journal_module, "_RETRY_SECONDS", 0.2)
    journal = journals(small_disk)
    (small_disk / "other").write_bytes(bytes(3 * MIB))
    journal.begin(1, b"first")
    for number in range(2000):
        journal.write(1, *output(number, KIB))
    eventually(lambda: journal.dropped(1), "output is dropped")
    number = 1999

    def newest():
        nonlocal number
        number += 1
        journal.write(1, *output(number, KIB))
        return numbers(read(small_disk, 1))[:1] >= [2000]

    eventually(newest, "the new output is written in the place of the old")
    journal.close()
    found = read(small_disk, 1)
    assert len(numbers(found)) + lost(found.dropped)[1] == number + 1


LIMITED = """
import resource, sys
from pathlib import Path
from nblaunch._journal import Counts, read
from nblaunch.runtime.journal import Journal

journal = Journal(Path(sys.argv[1]), after=0.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
journal.begin(1, b"first")
for number in range(1000):
    journal.write(1, b"%08d" % number + bytes(1000), Counts(0, lines=1))
journal.write(1, b"00001000 kept", None)
journal.close()
found = read(Path(sys.argv[1]), 1)
there = [int(raw[:8]) for raw in found.frames]
(dropped,) = found.dropped
print(len(there), dropped.lines, dropped.why, there[-1], there == sorted(there))
"""


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(journal_module.__file__).parents[2])}
    command = [sys.executable, "-c", LIMITED, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    there, dropped, *rest = done.stdout.split()
    assert rest == ["disk", "full", "1000", "True"]
    assert int(there) + int(dropped) == 1001
    assert int(there) > 90


def test_a_directory_that_is_gone_ends_neither_the_thread_nor_the_caller(journals, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_RETRY_SECONDS", 0.1)
    journal = journals(tmp_path / "root")
    journal.begin(1, b"first")
    journal.write(1, *output(1))
    eventually(lambda: journal.dropped(1), "the output is dropped")
    (tmp_path / "root").mkdir()
    eventually(lambda: read(tmp_path / "root", 1).dropped, "the journal writes again")
    (dropped,) = read(tmp_path / "root", 1).dropped
    assert dropped == Dropped(rank=0, characters=100, lines=1, why="No such file or directory")


# --- killed in mid-frame ---------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [1, 19, 21, 100])
def test_a_frame_that_is_not_whole_ends_the_messages(journals, tmp_path, torn):
    journal = journals()
    journal.begin(1, b"first")
    for number in range(10):
        journal.write(1, *output(number))
    journal.close()
    segment = tmp_path / "job-1" / "out-0001"
    os.truncate(segment, segment.stat().st_size - torn)
    found = read(tmp_path, 1)
    assert (found.state, numbers(found)) == (b"first", list(range(9)))


def test_files_that_are_empty_or_torn_are_read_as_far_as_they_go(journals, tmp_path):
    journal = journals()
    journal.begin(1, b"first")
    journal.end(1, b"last", b"record")
    journal.close()
    for name in ("keep", "state"):
        path = tmp_path / "job-1" / name
        os.truncate(path, path.stat().st_size - 1)
    (tmp_path / "job-1" / "dropped").touch()
    found = read(tmp_path, 1)
    assert (found.state, list(found.frames), found.dropped, found.record) == (None, [], (), None)


# --- ended jobs ------------------------------------------------------------------------------------


def test_an_ended_job_has_its_last_state_and_the_last_three_have_their_messages(journals, tmp_path):
    journal = journals()
    for job in range(1, 6):
        journal.begin(job, b"first")
        journal.write(job, *output(job))
        journal.end(job, b"last %d" % job, b"record %d" % job)
        journal.write(job, b"too late", None)
    journal.close()
    for job in range(1, 6):
        found = read(tmp_path, job)
        assert (found.state, found.record) == (b"last %d" % job, b"record %d" % job)
        assert list(found.frames) == ([] if job < 3 else [output(job)[0]])
    assert files(tmp_path, 1) == ["state"]


def test_a_slow_reader_gets_all_of_a_job_whose_messages_are_removed_meanwhile(journals, tmp_path, eventually):
    journal = journals(segment=KIB)
    journal.begin(1, b"first")
    for number in range(100):
        journal.write(1, *output(number))
    journal.end(1, b"last", b"record")
    eventually((tmp_path / "job-1" / "state").exists, "it is on disk")
    found = read(tmp_path, 1)
    first = next(found.frames)
    for job in range(2, 6):
        journal.begin(job, b"first")
        journal.write(job, *output(job))
        journal.end(job, b"last", b"record")
    journal.close()
    assert files(tmp_path) == ["state"]
    assert [int(raw[:8]) for raw in (first, *found.frames)] == list(range(100))


def test_a_forgotten_job_has_nothing(journals, tmp_path):
    journal = journals()
    for job in (1, 2):
        journal.begin(job, b"")
        journal.write(job, *output(1))
    journal.end(1, b"", b"")
    eventually(
        lambda: read(tmp_path, 1).record is not None and numbers(read(tmp_path, 2)), "jobs are written"
    )
    for job in (1, 2, 3):
        journal.forget(job)
    journal.close()
    assert list(tmp_path.iterdir()) == []
    assert journal.dropped(1) == ()


def descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_a_closed_journal_has_no_thread_and_no_descriptor_and_takes_no_more(tmp_path):
    before = descriptors()
    journal = Journal(tmp_path, after=0.0)
    assert "nblaunch-journal" not in {each.name for each in threading.enumerate()}
    journal.begin(1, b"")
    assert "nblaunch-journal" in {each.name for each in threading.enumerate()}
    journal.write(1, *output(1))
    journal.close()
    assert "nblaunch-journal" not in {each.name for each in threading.enumerate()}
    assert descriptors() == before
    for call in (lambda: journal.write(1, *output(2)), lambda: journal.begin(2, b""), journal.close):
        call()
    assert numbers(read(tmp_path, 1)) == [1]
    assert "nblaunch-journal" not in {each.name for each in threading.enumerate()}


# --- following -------------------------------------------------------------------------------------


class Follower:
    """Follows a job on a thread of its own."""

    def __init__(self, directory):
        self.found = []
        self.lives = True
        self.thread = threading.Thread(target=self.run, args=(directory,), daemon=True)
        self.thread.start()

    def run(self, directory):
        for raw in follow(directory, 1, lambda: self.lives):
            self.found.append(raw)

    def join(self):
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_a_follower_gets_what_was_there_and_what_comes_until_the_end(journals, tmp_path):
    journal = journals(segment=KIB)
    follower = Follower(tmp_path)  # before the job has a file
    raws = []
    journal.begin(1, b"")
    for number in range(200):
        raw, counts = output(number)
        raws.append(raw)
        journal.write(1, raw, counts if number % 7 else None)
        if number % 50 == 0:
            eventually(lambda: follower.found == raws, "the follower has what is written")
    journal.end(1, b"", b"")
    follower.join()
    assert follower.found == raws


def test_a_follower_of_dropped_output_goes_on_behind_it(journals, tmp_path):
    journal = journals(limit=4 * KIB, segment=KIB)
    follower = Follower(tmp_path)
    journal.begin(1, b"")
    for number in range(3000):
        journal.write(1, *output(number))
    journal.write(1, b"00003000 kept", None)
    journal.end(1, b"", b"")
    follower.join()
    there = [int(raw[:8]) for raw in follower.found]
    assert there == sorted(set(there))
    assert there[-2:] == [2999, 3000]


@pytest.mark.parametrize("how", ["killed", "forgotten"])
def test_a_follower_ends_with_the_runtime_or_the_job(journals, tmp_path, how):
    journal = journals()
    journal.begin(1, b"")
    journal.write(1, *output(1))
    follower = Follower(tmp_path)
    eventually(lambda: follower.found, "the follower has a message")
    if how == "killed":
        follower.lives = False
    else:
        journal.forget(1)
    follower.join()
    assert follower.found == [output(1)[0]]
