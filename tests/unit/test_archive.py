"""What is kept of a session's jobs, within small bounds."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import eventually

from nblaunch._cgroups import tightest_memory
from nblaunch._errors import NblaunchError
from nblaunch.capture import shared_memory
from nblaunch.capture.pickling import dumps
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages as wire
from nblaunch.protocol.client import ClientRecord, JobOrder
from nblaunch.protocol.messages import encode
from nblaunch.protocol.state import Message, RunState, advance, decode_state
from nblaunch.protocol.transcript import Text
from nblaunch.runtime.archive import Archive, Bounds, bounded, most_values
from nblaunch.runtime.jobs import RunningJob

KIB = 1024
LARGE = 300 * KIB
"""Bytes of a value that is in a memory file, not in the state."""
NOBODY = cast("Any", object())
CLIENT = ClientRecord(pid=1, node="here", name="a test")


@pytest.fixture
def archives(tmp_path):
    """Give `archives(keep=True, **bounds)`, closed at the end of the test."""
    made: list[Archive] = []

    def archive(*, keep=True, **bounds):
        made.append(Archive(tmp_path, keep=keep, bounds=Bounds(**bounds)))
        return made[-1]

    yield archive
    for each in made:
        each.close()
        each._disk.shutdown()  # it ends by itself; a test must not leave its thread


@pytest.fixture
def ended(tmp_path):
    """Give `ended(number, *messages, value=)`: a job of one rank that has ended."""

    def job(number, *messages, value=b""):
        dispatches = (((), wire.Dispatch(job=wire.FunctionJob(), payload=wire.Payload((0,), inline=b""))),)
        order = JobOrder(
            number=number,
            dispatches=dispatches,
            state=encode(RunState.fresh(1)),
            title=f"job {number}",
            options=LaunchOptions(),
        )
        running = RunningJob(order, NOBODY, CLIENT, lambda: tmp_path)
        running.leave(NOBODY)
        for message in messages:
            running.fold(message)
        with shared_memory.put(dumps(value), lambda: tmp_path) as sent:
            returned = wire.Returned(rank=0, value=sent.payload, text="", time=2.0)
            running.fold(cast("Message", running.take(returned)))
        running.finish(3.0)
        return running

    return job


def descriptors() -> set[str]:
    """Return those of memory files, in which large values are."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this listing
            if "memfd:" in str(path.readlink()):
                found.add(path.name)
    return found


def value_of(archive, number):
    past = archive.get(number)
    return decode_state(past.snapshot().state).ranks[0].value


def held(archive, number):
    payload = value_of(archive, number)
    return payload is not None and b"".join(shared_memory.get(payload, private=True))


def dropped(archive):
    return {record.number: record.dropped for record in archive.records}


# --- values ----------------------------------------------------------------------------------------


def test_values_beyond_the_bound_are_closed_oldest_first(archives, ended):
    archive = archives(values=2 * LARGE + 10 * KIB)
    before = descriptors()
    for number in range(1, 5):
        archive.add(ended(number, value=bytes([number]) * LARGE))
    assert len(descriptors() - before) == 2
    assert [bool(held(archive, number)) for number in (1, 2, 3, 4)] == [False, False, True, True]
    assert bytes([3]) * LARGE in held(archive, 3)
    why = "values dropped after 1 MiB of newer ones"
    assert dropped(archive) == {1: why, 2: why, 3: "", 4: ""}
    known = decode_state(archive.get(1).snapshot().state).ranks[0]
    assert (known.value, known.value_not_sent) == (None, "it was dropped after 1 MiB of newer ones")
    archive.close()
    assert descriptors() == before


def test_a_small_value_is_part_of_the_state_and_stays(archives, ended):
    archive = archives(values=0)
    for number in (1, 2):
        archive.add(ended(number, value=b"small"))
    assert b"small" in held(archive, 1)
    assert dropped(archive) == {1: "", 2: ""}


def test_the_last_value_stays_until_a_client_has_it(archives, ended):
    archive = archives(values=KIB)
    archive.add(ended(1, value=b"1" * LARGE))
    assert held(archive, 1)
    archive.taken(1)
    assert not held(archive, 1)
    archive.add(ended(2, value=b"2" * LARGE))
    archive.add(ended(3, value=b"3" * LARGE))
    assert [bool(held(archive, number)) for number in (2, 3)] == [False, True]


def test_values_have_a_share_of_the_memory():
    container = tightest_memory()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = machine if container is None else min(machine, container[0])
    assert most_values() == min(memory // 4, 4 << 30)


# --- jobs and states -------------------------------------------------------------------------------


def test_the_jobs_can_be_listed_while_another_one_ends(archives):
    """Clients are answered on other threads than that on which jobs end."""
    archive = archives()

    class Ending:
        def __init__(self, number):
            self.number = number

        @property
        def record(self):
            archive._jobs.setdefault(self.number + 1, Ending(self.number + 1))
            return self.number

        def close(self):
            pass

        remove = close

    archive._jobs[1] = Ending(1)
    assert archive.records == (1,)
    assert archive.records == (1, 2)


def test_jobs_beyond_the_bound_are_forgotten(archives, ended, tmp_path):
    archive = archives(jobs=2, in_memory=0)
    before = descriptors()
    for number in (1, 2, 3):
        archive.add(ended(number, value=b"v" * LARGE))
    assert [record.number for record in archive.records] == [2, 3]
    assert archive.get(1) is None
    assert len(descriptors() - before) == 2
    archive.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-2", "job-3"], "its file is gone"


def test_older_states_are_on_disk_alone_once_they_are_there(archives, ended, tmp_path):
    archive = archives(in_memory=1)
    archive.add(ended(1, wire.Printed(rank=0, stream=wire.Stream.STDOUT, text="first\n")))
    state = archive.get(1).snapshot().state
    assert archive.get(1).state is not None
    archive.add(ended(2))
    eventually(lambda: archive.get(1).state is None, "the state is on disk")
    assert archive.get(1).snapshot().state == state
    (tmp_path / "job-1").write_bytes(b"torn")
    with pytest.raises(NblaunchError, match=r"job 1 \(job 1\) was kept in .* files are gone"):
        archive.get(1).snapshot()


def test_a_state_that_cannot_be_written_stays_in_memory(archives, ended, tmp_path):
    (tmp_path / "job-1").mkdir()
    (tmp_path / "job-1" / "in the way").touch()
    archive = archives(in_memory=0)
    archive.add(ended(1, wire.Printed(rank=0, stream=wire.Stream.STDOUT, text="first\n")))
    archive.add(ended(2))
    archive.flush()
    known = decode_state(archive.get(1).snapshot().state).ranks[0]
    assert known.transcript.entries == (Text(wire.Stream.STDOUT, "first\n"),)


def test_of_a_job_that_is_not_kept_there_is_a_record(archives, ended, tmp_path):
    archive = archives(keep=False)
    archive.add(ended(1))
    assert [(record.number, record.state) for record in archive.records] == [(1, "SUCCEEDED")]
    assert archive.get(1) is None
    assert list(tmp_path.glob("job-*")) == []


# --- large states ----------------------------------------------------------------------------------


def figure(rank, number, size):
    return wire.Displayed(rank=rank, data={"text/plain": f"{number}", "image/png": "x" * size})


def numbers(state, rank):
    return [int(each.data["text/plain"]) for each in state.ranks[rank].transcript.displays]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9000)), max_size=60), st.integers(2000, 60_000))
def test_the_oldest_displays_of_a_large_state_are_dropped_and_counted(shown, limit):
    state = advance(RunState.fresh(2), wire.Started(rank=0, time=1.0))
    for number, (rank, size) in enumerate(shown):
        state = advance(state, figure(rank, number, size))
    left, count = bounded(state, limit)
    assert len(encode(left)) <= limit
    assert (count == 0) == (len(encode(state)) <= limit) == (left is state)
    for rank in (0, 1):
        before, after = numbers(state, rank), numbers(left, rank)
        assert after == before[len(before) - len(after) :]
        omitted = left.ranks[rank].transcript.omitted_displays
        assert omitted - state.ranks[rank].transcript.omitted_displays == len(before) - len(after)
    total = sum(len(numbers(each, 0)) + len(numbers(each, 1)) for each in (state, left))
    assert total == 2 * sum(len(numbers(left, rank)) for rank in (0, 1)) + count


def test_displays_of_earlier_attempts_go_first_and_no_text_goes():
    state = RunState.fresh(1)
    for attempt in (1, 2):
        state = advance(state, wire.Printed(rank=0, stream=wire.Stream.STDOUT, text="kept\n"))
        state = advance(state, figure(0, attempt, 5000))
        if attempt == 1:
            state = advance(
                state, wire.AttemptStarted(number=1, world_size=1, pids={}, reason="again", time=1.0)
            )
    left, count = bounded(state, len(encode(state)) - 10)
    assert count == 1
    assert [len(each.ranks[0].transcript.displays) for each in left.attempts] == [0, 1]
    texts = [each.ranks[0].transcript.entries[0] for each in left.attempts]
    assert texts == [Text(wire.Stream.STDOUT, "kept\n")] * 2


def test_dropped_displays_are_named_in_the_record(archives, ended):
    archive = archives(state=4 * KIB)
    archive.add(ended(1, *(figure(0, number, 2000) for number in range(5))))
    assert dropped(archive) == {1: "4 of the oldest displays"}
    assert numbers(decode_state(archive.get(1).snapshot().state), 0) == [4]
