"""A state, and each message that has changed it since: together these are the present state of a job."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from shown_runs import run_of
from test_lifecycle_machine import EVENTS, GONE, PREPARE, RANKS, Group, World, attempt, exited, raised
from test_state import folded

from nblaunch.group import lifecycle as life
from nblaunch.group.job import Job
from nblaunch.group.lifecycle import Action, GroupEvent, GroupState, JobState, Publish, Trigger
from nblaunch.group.machine import RestartAsked
from nblaunch.protocol import messages as wire
from nblaunch.protocol.messages import encode
from nblaunch.protocol.reports import HangReport, LocatedAll
from nblaunch.protocol.state import RunState, advance, decode_folded, decode_state

ANY_TEXT = st.text(st.characters(), max_size=40)
"""Also lone surrogates, as in file names that are not UTF-8."""


class Followed(Group):  # type: ignore[misc]  # a class of another test
    """A group whose job is folded a second time, from bytes."""

    def __init__(self, size: int = 2, *, persistent: bool = False) -> None:
        super().__init__(size, persistent=persistent)
        self.there = RunState.fresh(size)
        self.published = 0

    def check(self, before: GroupState, event: GroupEvent, actions: tuple[Action, ...]) -> None:
        super().check(before, event, actions)
        if isinstance(event, life.JobSubmitted) and event.job is not None:
            self.there = decode_state(encode(event.job.run))
        published = [isinstance(each, Publish) for each in actions]
        assert published == sorted(published, reverse=True), "others may feed what is folded later"
        for each in actions:
            if isinstance(each, Publish):
                after = advance(self.there, decode_folded(wire.encode(each.message)))
                assert after is not self.there, "published, and changes nothing"
                self.there = after
                self.published += 1
        if self.state.job is not None:
            assert self.there == self.state.job.run
            assert decode_state(encode(self.there)) == self.there


SEEN = st.one_of(
    st.builds(wire.Printed, rank=RANKS, stream=st.sampled_from(wire.Stream), text=ANY_TEXT),
    st.builds(wire.Displayed, rank=RANKS, data=st.just({"image/png": "aGk="})),
)


@given(
    st.lists(st.tuples(EVENTS | SEEN, st.sampled_from([0.0, 0.05, 0.3, 2.0])), max_size=60),
    st.booleans(),
    st.booleans(),
)
def test_both_folds_are_equal_whatever_happens_to_a_group(history, persistent, begun):
    group = Followed(persistent=persistent)
    if begun:
        group.start()
    for event, seconds in history:
        group.now += seconds
        group.feed(event)


@given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 3))
def test_both_folds_are_equal_from_the_first_fork_to_the_end(chance, persistent, size):
    group = Followed(size, persistent=persistent)
    group.submit()
    world, began = World(group, chance), group.now
    while group.state.working is not None and group.now < began + 300:
        world.go_on()
        if group.now > began + 100:
            world.perform(group.feed(Trigger.INTERRUPT))
    assert group.published > size


def test_a_job_that_is_given_to_ranks_which_run_already_is_followed_from_there():
    group = Followed(persistent=True).start(1, given=False)
    group.feed(wire.Noticed(text="known before"), life.JobSubmitted(PREPARE))
    group.submit()
    assert group.there.attempt.number == 1
    assert [rank.pid for rank in group.there.ranks.values()] == [10, 11]
    assert group.there.notices == (GONE, "known before")


def test_what_is_of_interest_to_the_group_only_is_not_published():
    group = Followed(persistent=True).start()
    before = group.published
    group.feed(wire.Arrived(rank=0), wire.InterruptSeen(rank=0, number=1), wire.Where(rank=0, frames=()))
    assert group.published == before


def test_an_exit_that_is_explained_comes_after_what_was_folded_before():
    """The group feeds the explanation while it performs the actions of the step that has asked for it."""
    group = Followed(persistent=True).start()
    group.feed(exited(1), raised(0), RestartAsked("a restart"))
    group.now += 1
    group.feed(Trigger.TICK)
    assert group.there.failed


# --- a job that no group runs ------------------------------------------------------------------------


@pytest.fixture
def job():
    return Job(
        {None: wire.Dispatch(job=wire.FunctionJob(), payload=wire.Payload(()))}, JobState(RunState.fresh(2))
    )


REPORT = HangReport(groups=(), collectives={}, silent={0: "stack"}, finished=(1,))


@pytest.mark.parametrize("doing", ["", "re-forming"])
def test_a_job_is_followed_to_its_end(job, doing):
    frames: list[bytes] = []
    job.fold(wire.Noticed(text="before anyone follows it"))
    there = decode_state(encode(job.state))
    job.listeners.append(lambda _, raw: frames.append(raw))
    job.fold(wire.Waiting(doing=doing))
    job.fold(LocatedAll(report=REPORT))
    job.finish(5.0)
    messages = [decode_folded(each) for each in frames]
    ends = [wire.Waiting(), wire.RunEnded(time=5.0)] if doing else [wire.RunEnded(time=5.0)]
    assert messages[-len(ends) :] == ends
    assert folded(messages, there)[-1] == job.state
    assert job.state.hang == REPORT


def test_the_last_messages_are_published_before_the_job_has_ended(job):
    seen: list[bool] = []
    job.listeners.append(lambda *_: seen.append(job.ended.is_set()))
    job.finish(5.0)
    assert seen == [False]
    assert job.ended.is_set()


def test_every_listener_gets_the_same_bytes(job):
    first, second = list[bytes](), list[bytes]()
    job.listeners += [lambda _, raw: first.append(raw), lambda _, raw: second.append(raw)]
    job.fold(wire.Noticed(text="once"))
    assert len(first) == 1
    assert first[0] is second[0]


def test_nothing_is_encoded_for_nobody(job):
    """A notice that cannot be encoded is folded all the same."""
    unsendable = wire.Noticed(text=object())  # type: ignore[arg-type]
    job.fold(unsendable)
    job.listeners.append(lambda *_: None)
    with pytest.raises(NotImplementedError):
        job.fold(unsendable)


# --- whole states ------------------------------------------------------------------------------------


def run_that_says(text):
    """Return a run in which everything that ranks can say is `text`."""
    frame = wire.FrameRecord(text, 3, text, text, {text: text})
    failure = wire.FailureRecord(
        type=text, message=text, traceback=text, colored=text, frames=(frame,), time=5.0, phase=wire.Phase.JOB
    )
    return run_of(
        3,
        wire.Noticed(text=text),
        *(wire.Entered(rank=rank, phase=wire.Phase.READY, device=text) for rank in range(3)),
        *(wire.Started(rank=rank, time=1.0) for rank in range(3)),
        *(wire.Printed(rank=rank, stream=stream, text=text) for rank, stream in enumerate(wire.Stream)),
        wire.Displayed(rank=0, data={"text/plain": text, text: text}, metadata={text: text}),
        wire.Displayed(rank=0, data={"image/png": text, "text/latex": text}),
        wire.Returned(rank=0, value=wire.Payload(sizes=()), time=2.0, text=text),
        *(wire.Raised(rank=rank, failure=failure) for rank in (1, 2)),
    )


@given(ANY_TEXT)
@example("\udcff")
def test_a_state_arrives_whatever_ranks_have_said(text):
    state = run_that_says(text)
    later = advance(state, attempt(1, 3))
    for each in (state, later, advance(later, LocatedAll(report=REPORT))):
        assert decode_state(encode(each)) == each


def test_a_long_output_with_displays_arrives_in_its_order():
    state, chance = RunState.fresh(1), random.Random(1)
    for number in range(600):
        message = wire.Printed(rank=0, stream=chance.choice(list(wire.Stream)), text=f"{number} " * 100)
        state = advance(
            state, message if chance.random() < 0.6 else wire.Displayed(rank=0, data={"n": number})
        )
    assert state.ranks[0].transcript.omitted
    assert decode_state(encode(state)) == state


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", b"\x80", encode(RunState.fresh(1))[:-1]])
def test_bytes_that_are_no_state_and_no_message_are_refused(data):
    with pytest.raises(wire.ProtocolError, match=f"^{len(data)} bytes from nblaunch's runtime process"):
        decode_state(data)
    with pytest.raises(wire.ProtocolError, match="refused"):
        decode_folded(data)


def test_what_is_sent_to_ranks_is_no_message_that_is_folded():
    with pytest.raises(wire.ProtocolError, match="Prepare"):
        decode_folded(wire.encode(PREPARE))
