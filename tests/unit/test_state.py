"""What is known of a run is a fold: any messages, in any order, and what is final stays."""

from __future__ import annotations

import copy
import itertools
import typing

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lanes import examples

from nblaunch.diagnose.failures import blame, blames_a_peer, explain
from nblaunch.group.ending import Ending
from nblaunch.group.lifecycle import GroupState, JobState, _Step
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages as wire
from nblaunch.protocol.reports import HangReport, LocatedAll
from nblaunch.protocol.state import Message, RunState, State, advance
from nblaunch.protocol.transcript import (
    CHUNK_CHARACTERS,
    HEAD_CHARACTERS,
    MAXIMUM_DISPLAYS,
    TAIL_CHARACTERS,
    Display,
    Text,
    Transcript,
    cleared,
    displayed,
    printed,
)
from nblaunch.view.output import last_line

WORLD = 3

# --- any messages at all ---------------------------------------------------------------------------

RANKS = st.sampled_from([0, 0, 0, 0, 1, 1, 2, -1, WORLD + 1])
TIMES = st.floats(0, 100)
TEXTS = st.text(max_size=8)
EXITCODES = st.integers(-70, 300)
FAILURES = st.builds(
    wire.FailureRecord,
    type=st.sampled_from(["builtins.ValueError", "builtins.RuntimeError", "ProcessExited"]),
    message=st.sampled_from(["boom", "Connection closed by peer", ""]),
    exitcode=EXITCODES,
    time=TIMES,
    phase=st.sampled_from(wire.Phase),
)
PAYLOADS = st.builds(wire.Payload, sizes=st.just((1,)), inline=st.binary(max_size=2))
PLACES = st.builds(
    wire.RankPlace,
    local_rank=RANKS,
    node=TEXTS,
    device=TEXTS,
    pid=st.integers(1, 99),
    phase=st.sampled_from(wire.Phase),
)
REPORTS = st.builds(
    HangReport, groups=st.just(()), collectives=st.just({}), silent=st.dictionaries(RANKS, TEXTS, max_size=2)
)
ENGINE_SAYS = st.builds(
    wire.EngineStatus,
    engine=st.sampled_from(["slurm", "join"]),
    state=st.sampled_from(wire.EngineState),
    words=TEXTS,
    starts=st.none() | TIMES,
    hosts=st.lists(TEXTS, max_size=2).map(tuple),
    joined=st.integers(0, 2),
)
USAGES = st.builds(wire.Usage, cpu_percent=TIMES, memory=st.integers(0, 99))
STRATEGIES: dict[type, st.SearchStrategy[Message]] = {
    wire.Hello: st.builds(
        wire.Hello, rank=RANKS, token=TEXTS, attempt=st.integers(-1, 3), local_rank=RANKS, world_size=RANKS,
        node=TEXTS, pid=st.integers(1, 99),
    ),
    wire.Entered: st.builds(wire.Entered, rank=RANKS, phase=st.sampled_from(wire.Phase), device=TEXTS),
    wire.Started: st.builds(wire.Started, rank=RANKS, time=TIMES),
    wire.Displayed: st.builds(
        wire.Displayed, rank=RANKS, data=st.dictionaries(TEXTS, TEXTS, max_size=1), update=st.booleans(),
        transient=st.sampled_from([{}, {"display_id": "a"}, {"display_id": 7}]),
    ),
    wire.Cleared: st.builds(wire.Cleared, rank=RANKS, wait=st.booleans()),
    wire.Switched: st.builds(wire.Switched, rank=RANKS, moments=st.just((wire.Offsets(),))),
    wire.Logged: st.builds(
        wire.Logged, rank=RANKS, names=st.lists(TEXTS, max_size=2).map(tuple),
        which=st.sampled_from([b"", b"\0\0", b"\1\0"]), steps=st.binary(min_size=8, max_size=8),
        times=st.binary(min_size=8, max_size=8), values=st.binary(min_size=7, max_size=8),
    ),
    wire.Returned: st.builds(wire.Returned, rank=RANKS, value=PAYLOADS, time=TIMES, text=TEXTS),
    wire.Raised: st.builds(wire.Raised, rank=RANKS, failure=FAILURES),
    wire.Finishing: st.builds(
        wire.Finishing, rank=RANKS, what=TEXTS, offsets=st.sampled_from([None, wire.Offsets()])
    ),
    wire.Colored: st.builds(wire.Colored, rank=RANKS, text=TEXTS),
    wire.Where: st.builds(wire.Where, rank=RANKS, frames=st.just(())),
    wire.Aborted: st.builds(wire.Aborted, rank=RANKS),
    wire.Reached: st.builds(wire.Reached, rank=RANKS, collectives=st.integers(0, 99)),
    wire.Arrived: st.builds(wire.Arrived, rank=RANKS),
    wire.RankNotice: st.builds(wire.RankNotice, rank=RANKS, text=TEXTS),
    wire.Unwritten: st.builds(wire.Unwritten, rank=RANKS, size=st.integers(1, 99)),
    wire.Names: st.builds(wire.Names, rank=RANKS, names=st.just(("x",))),
    wire.Asked: st.builds(
        wire.Asked, rank=RANKS, number=st.integers(0, 3), prompt=TEXTS, password=st.booleans()
    ),
    wire.Recovered: st.builds(wire.Recovered, rank=RANKS, number=st.integers(0, 3), error=TEXTS),
    wire.InterruptSeen: st.builds(wire.InterruptSeen, rank=RANKS, number=st.integers(0, 3)),
    wire.Printed: st.builds(wire.Printed, rank=RANKS, stream=st.sampled_from(wire.Stream), text=TEXTS),
    wire.Exited: st.builds(
        wire.Exited, rank=RANKS, exitcode=EXITCODES, time=TIMES, expected=st.booleans(), reason=TEXTS,
    ),
    wire.AttemptStarted: st.builds(
        wire.AttemptStarted, number=st.integers(-1, 3), world_size=st.integers(-1, 5), time=TIMES,
        reason=TEXTS, pids=st.dictionaries(RANKS, st.integers(1, 99), max_size=2),
    ),
    wire.JobAssigned: st.builds(
        wire.JobAssigned, ranks=st.dictionaries(RANKS, PLACES, max_size=3), attempt=st.integers(-1, 3)
    ),
    wire.JobSent: st.builds(wire.JobSent, ranks=st.lists(RANKS, max_size=3).map(tuple)),
    LocatedAll: st.builds(LocatedAll, report=REPORTS),
    wire.EngineStatus: ENGINE_SAYS,
    wire.NodesJoined: st.builds(
        wire.NodesJoined, state=st.sampled_from(wire.EngineState), joined=st.integers(0, 2)
    ),
    wire.Measured: st.builds(wire.Measured, usages=st.dictionaries(RANKS, USAGES, max_size=3)),
    wire.Noticed: st.builds(wire.Noticed, text=TEXTS),
    wire.Waiting: st.builds(wire.Waiting, ranks=st.dictionaries(RANKS, TEXTS, max_size=3)),
    wire.Unreadable: st.builds(wire.Unreadable, rank=RANKS, failure=FAILURES),
    wire.Profiled: st.builds(wire.Profiled, rank=RANKS, data=PAYLOADS),
    wire.ClockAsked: st.builds(wire.ClockAsked, rank=RANKS, number=st.integers(0, 3)),
    wire.Illustrated: st.builds(wire.Illustrated, text=TEXTS, html=TEXTS),
    wire.RunEnded: st.builds(wire.RunEnded, time=TIMES, stopped=st.booleans()),
    wire.RunPreempted: st.builds(wire.RunPreempted, why=TEXTS),
    wire.Preempting: st.builds(wire.Preempting, rank=RANKS),
    wire.Preempted: st.builds(wire.Preempted, rank=RANKS),
}  # fmt: skip
MESSAGES = st.one_of(list(STRATEGIES.values()))
HISTORIES = st.lists(MESSAGES, max_size=40)


def folded(messages, state=None):
    """Return every state on the way, the first one first."""
    state = RunState.fresh(WORLD) if state is None else state
    return list(itertools.accumulate(messages, advance, initial=state))


def look_at(state):
    """Ask a state everything that a view or a result asks."""
    return state.finished, state.failed, state.summary, state.attempts


def test_every_message_is_tried_here():
    assert set(STRATEGIES) == set(typing.get_args(Message))


@given(HISTORIES)
def test_any_messages_in_any_order_fold_without_an_exception(messages):
    for state in folded(messages):
        look_at(state)


ENDINGS = [wire.Returned, wire.Raised, wire.Exited, wire.RunEnded, wire.Started, wire.Hello, wire.Colored]


@given(st.lists(st.one_of([STRATEGIES[kind] for kind in ENDINGS]), min_size=10, max_size=40), HISTORIES)
def test_a_final_state_is_final_until_the_next_attempt(endings, messages):
    said = [*endings, *messages]
    for message, (before, after) in zip(said, itertools.pairwise(folded(said)), strict=True):
        if after.attempt.number != before.attempt.number:
            assert after.attempt.number > before.attempt.number
            continue
        if after.ranks.keys() != before.ranks.keys():  # nodes have met, or the job is given: no rank began
            assert {known.state for known in before.ranks.values()} <= {State.INIT}
            assert isinstance(message, wire.JobAssigned) or after.ranks.keys() > before.ranks.keys()
        for rank, known in before.ranks.items():
            if known.state.final:
                now = after.ranks[rank]
                if known.state is State.SUCCEEDED and now.state is State.FAILED:
                    continue  # its value cannot be unpickled
                assert now.state is known.state
                assert (now.value, now.ended, now.started) == (known.value, known.ended, known.started)
                assert (now.failure is None) == (known.failure is None)
                if now.failure is not None:
                    assert now.failure.message == known.failure.message
                assert known.exitcode in (None, now.exitcode)


@given(HISTORIES, MESSAGES)
def test_the_state_before_a_message_is_left_alone(messages, message):
    before = folded(messages)[-1]
    copied = copy.deepcopy(before)
    advance(before, message)
    assert before == copied


@given(HISTORIES, MESSAGES)
def test_a_rank_that_takes_no_part_changes_nothing(messages, message):
    before = folded(messages)[-1]
    rank = getattr(message, "rank", None)
    if rank is not None and rank not in before.ranks:
        assert advance(before, message) is before


@given(HISTORIES, MESSAGES)
def test_a_message_of_one_rank_changes_that_rank_alone(messages, message):
    before = folded(messages)[-1]
    after = advance(before, message)
    rank = getattr(message, "rank", None)
    if rank is not None:
        others = set(before.ranks) - {rank}
        assert all(after.ranks[other] is before.ranks[other] for other in others)


@given(HISTORIES, st.booleans())
def test_when_the_run_has_ended_every_rank_is_in_a_final_state(messages, stopped):
    state = advance(folded(messages)[-1], wire.RunEnded(time=1.0, stopped=stopped))
    assert state.finished
    assert all(rank.state.final for rank in state.ranks.values())


@given(HISTORIES)
def test_no_attempt_is_lost_and_each_is_there_once(messages):
    state = folded(messages)[-1]
    numbers = [attempt.number for attempt in state.attempts]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == state.attempt.number


# --- the life of a rank ----------------------------------------------------------------------------


HELLO = wire.Hello(rank=0, token="", attempt=0, local_rank=0, world_size=1, node="n", pid=5)
STARTED = wire.Started(rank=0, time=1.0)
RETURNED = wire.Returned(rank=0, value=wire.Payload(sizes=()), time=2.0, text="7")
BOOM = wire.FailureRecord(type="builtins.ValueError", message="boom", exitcode=1, time=2.0)
RAISED = wire.Raised(rank=0, failure=BOOM)


def rank_after(*messages):
    return folded(messages, RunState.fresh(1))[-1].ranks[0]


@pytest.mark.parametrize(
    ("messages", "state"),
    [
        ([], State.INIT),
        ([wire.AttemptStarted(number=0, world_size=1, time=0.0)], State.STARTING),
        ([HELLO], State.STARTING),
        ([HELLO, wire.Entered(rank=0, phase=wire.Phase.READY)], State.STARTING),
        ([HELLO, STARTED], State.RUNNING),
        ([HELLO, STARTED, RETURNED], State.SUCCEEDED),
        ([HELLO, STARTED, RAISED], State.FAILED),
        ([HELLO, STARTED, wire.Exited(rank=0, exitcode=0, time=3.0)], State.FAILED),
        ([HELLO, STARTED, wire.Exited(rank=0, exitcode=-9, time=3.0)], State.FAILED),
        ([HELLO, STARTED, wire.Exited(rank=0, exitcode=-15, time=3.0, expected=True)], State.STOPPED),
        ([HELLO, STARTED, wire.RunEnded(time=3.0)], State.STOPPED),
        ([HELLO, STARTED, wire.RunEnded(time=3.0, stopped=False)], State.LOST),
        ([HELLO, STARTED, RETURNED, wire.Exited(rank=0, exitcode=0, time=3.0)], State.SUCCEEDED),
        ([HELLO, STARTED, RETURNED, wire.RunEnded(time=3.0, stopped=False)], State.SUCCEEDED),
        ([STARTED, HELLO], State.RUNNING),
        ([RETURNED, STARTED, HELLO], State.SUCCEEDED),
        ([HELLO, STARTED, RETURNED, wire.AttemptStarted(number=1, world_size=1, time=4.0)], State.STARTING),
        ([wire.AttemptStarted(number=1, world_size=1, time=4.0),
          wire.AttemptStarted(number=0, world_size=1, time=0.0), STARTED], State.RUNNING),
    ],
)  # fmt: skip
def test_a_rank_is_in_the_state_that_its_messages_say(messages, state):
    assert rank_after(*messages).state is state


def test_a_rank_that_ends_without_a_value_has_failed_whatever_its_exit_code():
    failure = rank_after(HELLO, STARTED, wire.Exited(rank=0, exitcode=0, time=3.0)).failure
    assert failure.message == "ended with exit code 0 but returned no value (os._exit?)"
    assert failure.phase is wire.Phase.JOB
    killed = rank_after(HELLO, STARTED, wire.Exited(rank=0, exitcode=-9, time=3.0)).failure
    assert (killed.message, killed.exitcode, killed.time) == ("was killed by SIGKILL", -9, 3.0)


def test_a_reason_that_was_found_for_an_end_is_the_failures():
    exited = wire.Exited(rank=0, exitcode=-9, time=3.0, reason="ran out of memory", details="dmesg")
    failure = rank_after(HELLO, STARTED, exited).failure
    assert (failure.message, failure.traceback) == ("ran out of memory", "dmesg")


SAVES = wire.Finishing(rank=0, what="thread save")


@pytest.mark.parametrize(
    "messages",
    [
        [SAVES, RETURNED],
        [SAVES, RAISED],
        [RAISED, SAVES, wire.Finishing(rank=0, what="", offsets=wire.Offsets())],
        [RAISED, SAVES, wire.Exited(rank=0, exitcode=1, time=3.0)],
        [SAVES, wire.Exited(rank=0, exitcode=-15, time=3.0, expected=True)],
        [RAISED, SAVES, wire.RunEnded(time=3.0)],
    ],
    ids=["returned", "raised", "over", "gone", "stopped", "given up"],
)
def test_what_a_rank_finishes_is_known_until_it_has(messages):
    assert "thread save" in [each.ranks[0].finishing for each in folded([HELLO, STARTED, *messages])]
    assert rank_after(HELLO, STARTED, *messages).finishing == ""


def test_a_rank_that_breaks_after_its_value_was_here_is_a_warning():
    broken = rank_after(HELLO, STARTED, RETURNED, wire.Exited(rank=0, exitcode=-11, time=3.0))
    assert (broken.state, broken.exitcode) == (State.SUCCEEDED, -11)
    assert "SIGSEGV" in broken.warning
    assert rank_after(HELLO, STARTED, RETURNED, wire.Exited(rank=0, exitcode=0, time=3.0)).warning == ""
    expected = wire.Exited(rank=0, exitcode=-15, time=3.0, expected=True)
    assert rank_after(HELLO, STARTED, RETURNED, expected).warning == ""


def test_the_traceback_in_colours_joins_the_failure_that_came_before_it():
    shown = rank_after(HELLO, STARTED, RAISED, wire.Colored(rank=0, text="colours"))
    assert (shown.failure.colored, shown.failure.message) == ("colours", "boom")
    assert rank_after(HELLO, STARTED, wire.Colored(rank=0, text="colours")).failure is None


def test_a_rank_whose_value_cannot_be_unpickled_has_failed_after_all_and_no_other_has():
    unreadable = wire.Unreadable(rank=0, failure=BOOM)
    failed = rank_after(HELLO, STARTED, RETURNED, unreadable)
    assert (failed.state, failed.failure, failed.ended) == (State.FAILED, BOOM, 2.0)
    for messages in ([HELLO, STARTED], [HELLO, STARTED, wire.Exited(rank=0, exitcode=-9, time=3.0)]):
        assert rank_after(*messages, unreadable) == rank_after(*messages)


def test_output_is_taken_also_after_the_end():
    """It may be read from the log files after the rank's own last word."""
    rank = rank_after(STARTED, RETURNED, wire.Printed(rank=0, stream=wire.Stream.STDOUT, text="late"))
    assert rank.transcript.entries == (Text(wire.Stream.STDOUT, "late"),)


def test_a_new_attempt_begins_anew_and_keeps_the_old_one():
    state = folded([HELLO, STARTED, RAISED], RunState.fresh(1))[-1]
    state = advance(
        state, wire.AttemptStarted(number=1, world_size=2, time=5.0, reason="failure", pids={1: 9})
    )
    assert [rank.state for rank in state.ranks.values()] == [State.STARTING] * 2
    assert (state.world_size, state.ranks[1].pid, state.ranks[0].failure) == (2, 9, None)
    first, second = state.attempts
    assert (first.number, first.ended, first.ranks[0].failure) == (0, 5.0, BOOM)
    assert (second.number, second.reason, second.started) == (1, "failure", 5.0)


def test_what_an_engine_said_last_is_kept_over_attempts():
    waiting = wire.EngineStatus(
        engine="slurm",
        state=wire.EngineState.WAITING,
        id="3",
        words="PENDING",
        reason="Resources",
        place="priority 7",
        joined=1,
        wanted=2,
    )
    state = advance(RunState.fresh(WORLD), waiting)
    assert state.where == "waiting for slurm: job 3 PENDING (Resources), priority 7, 1 of 2 nodes here"
    assert advance(state, waiting) is state
    state = advance(state, wire.AttemptStarted(number=1, world_size=WORLD, time=2.0))
    assert state.engine == waiting
    assert state.where == "ranks 0-2 phase 'fork'", "the ranks are there"
    here = msgspec.structs.replace(waiting, state=wire.EngineState.RUNNING, joined=2)
    assert advance(state, wire.NodesJoined(state=wire.EngineState.RUNNING, joined=2)).engine == here
    assert (
        advance(RunState.fresh(1), wire.NodesJoined(state=wire.EngineState.RUNNING, joined=2)).engine is None
    )
    assert advance(RunState.fresh(1), here).where == "rank 0 phase 'fork'"


def test_a_notice_that_is_told_again_stands_there_once_as_the_last():
    *_, state = folded([wire.Noticed(text=each) for each in ("formed again", "is back", "formed again")])
    assert state.notices == ("is back", "formed again")


def test_a_run_of_some_ranks_has_those_alone():
    state = RunState.fresh(8, (1, 5))
    assert list(state.ranks) == [1, 5]
    assert advance(state, STARTED) is state


@pytest.mark.parametrize(
    ("states", "summary"),
    [
        ("INIT INIT", "INIT"),
        ("INIT STARTING", "STARTING"),
        ("STARTING RUNNING", "RUNNING"),
        ("SUCCEEDED RUNNING", "RUNNING"),
        ("SUCCEEDED STARTING", "RUNNING"),
        ("SUCCEEDED SUCCEEDED", "SUCCEEDED"),
        ("FAILED RUNNING", "FAILED"),
        ("LOST SUCCEEDED", "FAILED"),
        ("STOPPED FAILED", "FAILED"),
        ("STOPPED SUCCEEDED", "STOPPED"),
    ],
)
def test_a_run_is_summed_up_in_one_word(states, summary):
    reach: dict[str, list[Message]] = {
        "INIT": [],
        "STARTING": [wire.Hello(rank=0, token="", attempt=0, local_rank=0, world_size=2, node="n", pid=5)],
        "RUNNING": [STARTED],
        "SUCCEEDED": [RETURNED],
        "FAILED": [RAISED],
        "STOPPED": [wire.Exited(rank=0, exitcode=-15, time=1.0, expected=True)],
        "LOST": [],
    }
    first, second = states.split()
    messages = [*reach[first], *(_for_rank_1(each) for each in reach[second])]
    state = folded(messages, RunState.fresh(2))[-1]
    if "LOST" in states:
        state = advance(state, wire.RunEnded(time=9.0, stopped=False))
    assert [str(rank.state) for rank in state.ranks.values()] == [first, second]
    assert state.summary == summary
    ended = state.finished and summary != "SUCCEEDED"
    assert advance(state, wire.RunPreempted(why="time limit")).summary == ("PREEMPTED" if ended else summary)


def _for_rank_1(message):
    return msgspec.structs.replace(message, rank=1)


# --- transcripts -----------------------------------------------------------------------------------


LIMIT = HEAD_CHARACTERS + TAIL_CHARACTERS + 2 * CHUNK_CHARACTERS
SIZES = st.sampled_from([1, 3, 80, 1000, 4095, 4096, 4097, 30_000, 70_000])
PIECES = st.lists(st.tuples(st.sampled_from(wire.Stream), SIZES), max_size=12)


def text_of(sizes):
    """Return pieces of text in which every place is different, with lines."""
    counter = itertools.count()
    for stream, size in sizes:
        text = ""
        while len(text) < size:
            text += f"{next(counter)}\n"
        yield stream, text[:size]


def put(pieces):
    transcript = Transcript()
    for stream, text in pieces:
        transcript = printed(transcript, stream, text)
    return transcript


def characters(entries):
    return [
        (entry.stream, character) for entry in entries if isinstance(entry, Text) for character in entry.text
    ]


@given(PIECES)
@example([(wire.Stream.STDOUT, 200_000)])
@example([(wire.Stream.STDOUT, 1), (wire.Stream.STDERR, 1)] * 5000)
@settings(max_examples=max(5, settings.default.max_examples // 12))
def test_a_transcript_is_bounded_and_holds_the_head_and_the_tail_of_what_was_printed(sizes):
    pieces = list(text_of(sizes))
    transcript = put(pieces)
    whole = [(stream, character) for stream, text in pieces for character in text]
    head, tail = characters(transcript.head), characters(transcript.tail)
    assert len(head) + len(tail) <= LIMIT
    assert len(transcript.entries) <= LIMIT / 16
    assert head == whole[: len(head)]
    assert tail == whole[len(whole) - len(tail) :]
    assert transcript.omitted == len(whole) - len(head) - len(tail)
    between = whole[len(head) : len(whole) - len(tail)]
    assert transcript.omitted_lines == sum(character == "\n" for _, character in between)
    assert transcript.written == len(whole)


@given(PIECES, st.data())
@examples(40)
def test_what_is_kept_does_not_depend_on_the_pieces_in_which_it_came(sizes, data):
    pieces = list(text_of(sizes))
    cut = []
    for stream, text in pieces:
        places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        cut += [(stream, text[start:end]) for start, end in itertools.pairwise([0, *places, len(text)])]
    assert put(cut) == put(pieces)


def test_little_output_is_kept_whole():
    transcript = put(
        [
            (wire.Stream.STDOUT, "a"),
            (wire.Stream.STDERR, "b"),
            (wire.Stream.STDERR, "c"),
            (wire.Stream.STDOUT, ""),
        ]
    )
    assert transcript.entries == (Text(wire.Stream.STDOUT, "a"), Text(wire.Stream.STDERR, "bc"))
    assert transcript.omitted == 0


def test_displays_are_bounded_too_and_keep_their_place():
    transcript = put([(wire.Stream.STDOUT, "before")])
    for number in range(1000):
        transcript = displayed(transcript, wire.Displayed(rank=0, data={"n": number}))
    transcript = printed(transcript, wire.Stream.STDOUT, "after")
    numbers = [each.data["n"] for each in transcript.displays]
    assert len(numbers) + transcript.omitted_displays == 1000
    assert len(numbers) <= MAXIMUM_DISPLAYS + HEAD_CHARACTERS // 100
    assert numbers == sorted(numbers)
    assert numbers[-1] == 999
    assert transcript.entries[0] == Text(wire.Stream.STDOUT, "before")
    assert transcript.entries[-1] == Text(wire.Stream.STDOUT, "after")


def display(number, display_id=None, *, update=False):
    transient = {} if display_id is None else {"display_id": display_id}
    return wire.Displayed(rank=0, data={"n": number}, transient=transient, update=update)


def test_an_update_changes_the_display_of_its_id_in_its_place():
    transcript = Transcript()
    for message in (display(1, "a"), display(2), display(3, "a"), display(9, "a", update=True)):
        transcript = displayed(transcript, message)
    assert [each.data["n"] for each in transcript.displays] == [9, 2, 9]
    unknown = displayed(transcript, display(7, "b", update=True))
    assert unknown == transcript


def test_clearing_takes_effect_at_once_or_with_the_next_output():
    transcript = put([(wire.Stream.STDOUT, "old")])
    assert cleared(transcript, wait=False).entries == ()
    waiting = cleared(transcript, wait=True)
    assert waiting.entries == transcript.entries
    assert printed(waiting, wire.Stream.STDOUT, "new").entries == (Text(wire.Stream.STDOUT, "new"),)
    assert displayed(waiting, display(1)).entries == (Display({"n": 1}),)


@pytest.mark.parametrize(
    ("pieces", "last"),
    [
        ([], ""),
        (["one\ntwo\n"], "two"),
        (["one\ntwo"], "two"),
        (["one\n\n  \n"], "one"),
        (["10%\r20%\r30%"], "30%"),
        (["10%\r20%\r\n"], "20%"),
        (["".join(f"\r{step:3}%|{'#' * 20}|" for step in range(1_000))], f"999%|{'#' * 20}|"),
        (["lo", "ng li", "ne\n"], "long line"),
        (["x" * 10_000 + "\r\n"], "x" * 10_000),
        (["first\n" + "x" * 5000, "y\n"], "x" * 5000 + "y"),
    ],
)
def test_the_last_line_is_what_a_terminal_would_show_last(pieces, last):
    shown = last_line(put([(wire.Stream.STDOUT, text) for text in pieces]))
    # Of a long line only the end is drawn.
    assert shown == last or (shown.startswith("… x") and last.endswith(shown[2:]))


def test_a_last_line_that_was_read_whole_is_not_marked_as_cut():
    pieces = [(wire.Stream.STDERR, "before\n"), (wire.Stream.STDOUT, "x" * 1999 + "\n")]
    assert last_line(put(pieces)) == "x" * 1999


# --- the root cause --------------------------------------------------------------------------------

PEER_GONE = st.sampled_from(
    [
        (
            "builtins.RuntimeError",
            "[/x/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1",
        ),
        (
            "torch.distributed.DistBackendError",
            "NCCL error: remote process exited or there was a network error",
        ),
        ("torch.distributed.DistNetworkError", "Connection reset by peer"),
        ("torch.distributed.DistStoreError", "Socket Timeout"),
        ("builtins.RuntimeError", "Broken pipe"),
        ("builtins.RuntimeError", "Application timeout caused pair closure"),
    ]
)
OWN = st.sampled_from(
    [
        ("builtins.ValueError", "boom"),
        ("builtins.RuntimeError", "CUDA out of memory"),
        ("builtins.KeyError", "'connection closed by peer'"),
        ("builtins.ConnectionResetError", "the user's own server: Connection reset by peer"),
        ("ProcessExited", "was killed by SIGKILL"),
        ("builtins.AssertionError", ""),
    ]
)


def records(kinds):
    return st.builds(
        lambda kind, time: wire.FailureRecord(type=kind[0], message=kind[1], time=time),
        kinds,
        st.floats(0, 10),
    )


@given(st.dictionaries(st.integers(0, 20), records(OWN | PEER_GONE), min_size=1, max_size=8))
def test_every_failure_is_explained_once_and_causes_come_first_in_time(failures):
    explained = explain(failures)
    assert sorted(each.rank for each in explained) == sorted(failures)
    assert all(each.failure is failures[each.rank] for each in explained)
    causes = [each for each in explained if each.consequence_of is None]
    assert causes == list(explained[: len(causes)])
    assert len(causes) >= 1
    for group in (causes, explained[len(causes) :]):
        assert [each.failure.time for each in group] == sorted(each.failure.time for each in group)
    assert {each.consequence_of for each in explained[len(causes) :]} <= {causes[0].rank}


@given(
    st.dictionaries(st.integers(0, 9), records(OWN), min_size=1, max_size=3),
    st.dictionaries(st.integers(10, 20), records(PEER_GONE), min_size=1, max_size=5),
)
def test_a_rank_whose_peer_went_away_is_never_the_cause_whatever_the_clocks_say(own, consequences):
    explained = explain({**own, **consequences})
    first = min(own.items(), key=lambda item: (item[1].time, item[0]))[0]
    assert explained[0].rank == first
    assert {each.rank for each in explained if each.consequence_of is None} == set(own)
    assert {each.consequence_of for each in explained if each.rank in consequences} == {first}


@given(st.dictionaries(st.integers(0, 20), records(PEER_GONE), min_size=1, max_size=8))
def test_where_all_blame_a_peer_the_first_in_time_is_the_cause(failures):
    explained = explain(failures)
    assert explained[0].rank == min(failures.items(), key=lambda item: (item[1].time, item[0]))[0]
    assert {each.consequence_of for each in explained[1:]} <= {explained[0].rank}


def test_a_group_of_exceptions_is_a_consequence_if_each_of_them_blames_a_peer():
    def grouped(*errors):
        """Return what `traceback` writes for the group of a `TaskGroup`."""
        parts = "".join(f"  +-+---- {number} ----\n    | {each}\n" for number, each in enumerate(errors, 1))
        text = f"  | ExceptionGroup: unhandled errors in a TaskGroup\n{parts}    +-----\n"
        return wire.FailureRecord(type="builtins.ExceptionGroup", message="", traceback=text)

    closed = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:26003. Check the logs."
    assert blames_a_peer(grouped(closed))
    assert blames_a_peer(grouped(closed, closed))
    assert not blames_a_peer(grouped(closed, "ValueError: boom"))
    assert not blames_a_peer(grouped())


def test_a_rank_that_the_agent_stopped_is_a_consequence():
    stopped = wire.FailureRecord(
        type="ProcessExited", message="was killed by SIGTERM", exitcode=-15, time=1.0
    )
    killed = wire.FailureRecord(type="ProcessExited", message="was killed by SIGKILL", exitcode=-9, time=2.0)
    assert blames_a_peer(stopped)
    assert [(each.rank, each.consequence_of) for each in explain({0: stopped, 1: killed})] == [
        (1, None),
        (0, 1),
    ]


def test_no_failures_need_no_explanation():
    assert explain({}) == ()
    found = blame(RunState.fresh(2).ranks)
    assert (found.failures, found.causes, found.consequences, found.ended, found.root) == ((), (), (), (), "")


@given(HISTORIES)
def test_every_failed_rank_is_once_among_the_causes_or_the_consequences(messages):
    ranks = folded(messages)[-1].ranks
    found = blame(ranks)
    failed = [rank for rank, known in ranks.items() if known.failure is not None]
    alike = [*found.causes, *found.consequences]
    assert sorted(rank for each in alike for rank in each.ranks) == sorted(failed)
    assert {rank for each in found.causes for rank in each.ranks} == {
        each.rank for each in found.failures if each.consequence_of is None
    }
    assert bool(found.causes) == bool(failed)
    if found.causes:
        assert found.failures[0].rank in found.causes[0].ranks
    stopped = {rank for rank, known in ranks.items() if known.state is State.STOPPED}
    assert set(found.ended) == stopped | {rank for each in found.consequences for rank in each.ranks}
    for each in alike:
        assert each.failure is ranks[each.ranks[0]].failure
        assert each.line().startswith("consequence of rank") == (each in found.consequences)


def test_ranks_share_a_cause_wherever_their_files_are_and_a_consequence_whatever_the_port():
    def failing(rank, type_name, message, folder):
        frames = (wire.FrameRecord(f"/home/{folder}/train.py", 3, "step", ""),)
        failure = wire.FailureRecord(type=type_name, message=message, frames=frames, time=rank)
        return wire.Raised(rank=rank, failure=failure)

    closed = "Connection closed by peer [127.0.0.1]"
    state = folded(
        [
            failing(0, "builtins.ValueError", "boom\nand more", "a"),
            failing(1, "builtins.ValueError", "boom", "b"),
            failing(2, "builtins.RuntimeError", f"{closed}:40000", "c"),
            failing(3, "builtins.RuntimeError", f"{closed}:40001", "d"),
        ],
        RunState.fresh(4),
    )[-1]
    found = blame(state.ranks)
    assert [(each.ranks, each.line()) for each in (*found.causes, *found.consequences)] == [
        ((0, 1), "ValueError: boom (train.py, line 3)"),
        ((2, 3), f"consequence of ranks 0-1: RuntimeError: {closed} (train.py, line 3)"),
    ]
    assert (found.root, found.ended) == ("ranks 0-1", (2, 3))


# --- what ranks use --------------------------------------------------------------------------------


LITTLE = wire.Usage(cpu_percent=3.0, memory=1 << 20)
MUCH = wire.Usage(cpu_percent=100.0, memory=1 << 30, gpu_memory=1 << 33, gpu_percent=80)


def test_what_a_rank_uses_is_what_was_measured_last():
    states = folded([STARTED, wire.Measured(usages={0: LITTLE, 1: MUCH}), wire.Measured(usages={0: MUCH})])
    assert [[rank.usage for rank in state.ranks.values()] for state in states[2:]] == [
        [LITTLE, MUCH, None],
        [MUCH, MUCH, None],
    ]


def test_a_measurement_that_says_nothing_new_leaves_the_state_as_it_is():
    """A view draws, and a hang is noticed, by which states differ."""
    before, after = folded(
        [wire.Measured(usages={0: LITTLE}), wire.Measured(usages={0: LITTLE, WORLD + 1: MUCH})]
    )[1:]
    assert after is before


def test_a_rank_that_has_ended_is_not_measured_any_more_and_a_restarted_one_anew():
    ended = folded([wire.Measured(usages={0: LITTLE}), RETURNED, wire.Measured(usages={0: MUCH})])[-1]
    assert ended.ranks[0].usage == LITTLE
    again = advance(ended, wire.AttemptStarted(number=1, world_size=WORLD, time=3.0))
    assert again.ranks[0].usage is None


def test_what_a_full_disk_did_not_take_is_one_warning_that_names_the_ranks():
    messages = [
        wire.Unwritten(rank=0, size=5),
        wire.Unwritten(rank=2, size=7),
        wire.Unwritten(rank=2, size=1200),
    ]
    *_, state = folded(messages)
    where = "the disk that takes what ranks print is full (TMPDIR, --log-dir)"
    assert state.warnings == (f"{where}: 5 bytes of rank 0, 1,200 bytes of rank 2 were dropped",)
    ended = advance(state, RETURNED)
    assert advance(ended, wire.Unwritten(rank=0, size=9)) is ended, "what it prints then is not the job's"


@given(HISTORIES, MESSAGES)
def test_measuring_ranks_is_not_hearing_from_them_and_whatever_else_changes_a_state_is(messages, message):
    before = folded(messages)[-1]
    job = JobState(before, ending=Ending.begin(LaunchOptions(hang_after=1.0), 0.0))
    machine = _Step(GroupState(persistent=False, members=before, job=job), now=5.0)
    machine.fold_run(message)
    silent = machine.state.job.ending.hang.silent_since == 0.0
    if isinstance(message, wire.Measured | wire.EngineStatus | wire.NodesJoined):
        assert silent
    elif advance(before, message) != before:
        assert not silent
