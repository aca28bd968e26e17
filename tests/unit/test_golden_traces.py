"""What the machine of a group does, step by step and at which moment, where it is a promise to the user."""

from __future__ import annotations

import msgspec
import pytest
from test_lifecycle_machine import GONE, GRACE, PREPARE, Group, attempt, hello, raised, returned, where

from nblaunch.group import lifecycle as life
from nblaunch.group.ending import Ending
from nblaunch.group.lifecycle import Action, JobState, Stage, Trigger
from nblaunch.group.machine import LocateRanks, Order, Send
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.messages import Answer, Asked, Collective, Reached, Started, Where
from nblaunch.protocol.state import RunState

KEYBOARD = "builtins.KeyboardInterrupt"
STUCK = tuple(Collective("0", number, "all_reduce", completed=number < 2) for number in (1, 2))


class Traced(Group):  # type: ignore[misc]  # a class of another test
    """A group that notes what it does, and when: in seconds since the job began, on which ranks."""

    def __init__(
        self, *, persistent: bool, timeout: float | None = None, hang_after: float | None = None
    ) -> None:
        super().__init__(persistent=persistent)
        self.lines: list[str] = []
        self.began = self.now
        ending = Ending.begin(LaunchOptions(timeout=timeout, grace=GRACE, hang_after=hang_after), self.now)
        self.feed(life.JobSubmitted(PREPARE, JobState(RunState.fresh(2), ending=ending)))
        self.start(given=False).feed(*(Started(rank=rank, time=1.0) for rank in range(2)))

    def feed(self, *events: life.GroupEvent) -> list[Action]:
        actions: list[Action] = super().feed(*events)
        for each in actions:
            what = type(each.message).__name__ if isinstance(each, Send) else str(getattr(each, "name", each))
            line = f"{self.now - self.began:.1f} {what.partition('(')[0]}"
            if not self.lines or self.lines[-1] != line:
                self.lines.append(line)
        return actions

    def located(self, **more: tuple[Collective, ...]) -> None:
        self.feed(*(msgspec.structs.replace(where(rank, busy=True), **more) for rank in range(2)))

    def trace(self) -> str:
        lines, self.lines = self.lines, []
        return ", ".join(lines)

    @property
    def error(self) -> str:
        early = self.state.job.ending.early if self.state.job is not None else None
        return "" if early is None else early.message


BEGINS = "0.0 FORGET_VALUES, 0.0 Prepare, 0.0 SendJob"


@pytest.mark.parametrize("persistent", [False, True])
def test_a_job_that_ends_by_itself(persistent):
    group = Traced(persistent=persistent, timeout=60.0, hang_after=30.0)
    assert group.trace() == BEGINS
    group.feed(returned(0), returned(1))
    assert group.trace() == (
        "0.0 FINISH_JOB" if persistent else "0.0 ReleaseWorkers, 0.0 FINISH_JOB, 0.0 Leave"
    )
    assert group.error == ""


def test_an_interrupt_of_fresh_ranks_asks_where_they_are_and_the_second_skips_the_grace_period():
    group = Traced(persistent=False)
    group.feed(Trigger.INTERRUPT)
    group.located()
    assert group.trace() == f"{BEGINS}, 0.0 ReportWhere, 0.0 Interrupt"
    group.after(GRACE - 0.1)
    assert "SKIP_GRACE" not in group.trace()
    group.after(0.1)
    assert group.trace().endswith("5.0 SKIP_GRACE, 5.0 STOP_AGENT")
    group.feed(Trigger.DRAINED, Trigger.AGENT_ENDED)
    assert group.trace() == "5.0 CLOSE_GROUP, 5.0 FINISH_JOB"
    assert group.stage() is Stage.CLOSED
    assert group.error.startswith("the run was interrupted: [ranks 0-1] ")
    group = Traced(persistent=False)
    group.feed(Trigger.INTERRUPT, Trigger.INTERRUPT)
    group.located()
    assert group.trace() == f"{BEGINS}, 0.0 ReportWhere, 0.0 Interrupt, 0.0 SKIP_GRACE, 0.0 STOP_AGENT"
    group.after(GRACE + 29)
    assert Order.FINISH_JOB not in group.done, "the agent has the time to kill them"
    group.after(2)
    assert Order.FINISH_JOB in group.done, "one that cannot be moved does not hold the job"


def test_ranks_that_do_not_say_where_they_are_are_interrupted_once_their_stacks_are_read():
    group = Traced(persistent=True)
    group.feed(Trigger.INTERRUPT)
    group.after(0.4)
    assert group.trace() == f"{BEGINS}, 0.0 ReportWhere, 0.3 ReadStacks"
    group.feed(life.StacksRead({0: '  File "a.py", line 1', 1: ""}))
    assert group.trace() == "0.4 Interrupt"
    group.feed(raised(0, KEYBOARD), raised(1, KEYBOARD))
    group.feed(*(Where(rank=rank, frames=()) for rank in range(2)))
    group.after(0.1)
    assert group.error == "the run was interrupted: [ranks 0-1] gave no answer"


def test_the_second_interrupt_of_kept_ranks_replaces_them_unless_they_import():
    group = Traced(persistent=True)
    group.feed(Trigger.INTERRUPT)
    group.located()
    group.feed(Trigger.INTERRUPT)
    group.feed(*(msgspec.structs.replace(where(rank, busy=True), importing=True) for rank in range(2)))
    assert group.trace() == f"{BEGINS}, 0.0 ReportWhere, 0.0 Interrupt, 0.0 ReportWhere, 0.0 Interrupt"
    assert "lost" not in group.error
    group.feed(Trigger.INTERRUPT)
    assert group.trace() == "0.0 SKIP_GRACE, 0.0 RESTART_AGENT"
    assert group.error.endswith(
        "; it was interrupted again, so ranks 0-1 were replaced and their variables are lost"
    )
    assert group.stage() is Stage.REPLACING
    group.feed(life.AttemptStarting(attempt(1)))
    assert group.trace().endswith("0.0 FINISH_JOB")
    assert group.notices() == ("ranks 0-1 had not ended when the job was interrupted again", GONE)


def test_an_interrupt_that_spares_the_ranks_is_repeated_and_never_costs_variables():
    group = Traced(persistent=True)
    for _ in range(3):
        group.feed(Trigger.INTERRUPT_SPARING)
        group.located()
        group.after(1.0)
    assert group.trace().count("Interrupt") == 3
    assert Order.RESTART_AGENT not in group.done


@pytest.mark.parametrize("trigger", [Trigger.INTERRUPT, Trigger.INTERRUPT_SPARING])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_interrupt_counts_also_where_the_job_ends_while_its_ranks_are_asked(persistent, trigger):
    group = Traced(persistent=persistent)
    group.feed(trigger, returned(0), returned(1))
    assert Order.FINISH_JOB in group.done
    assert group.error == "the run was interrupted: [ranks 0-1] had finished"


@pytest.mark.parametrize("persistent", [False, True])
def test_a_job_that_has_timed_out_is_ended_and_not_while_a_question_is_open(persistent):
    group = Traced(persistent=persistent, timeout=2.0)
    group.after(1.0)
    group.feed(Asked(rank=0, number=1, prompt="? "))
    group.after(60.0)
    assert group.trace() == BEGINS
    group.feed(life.Replied(0, Answer(1)))
    group.after(0.9)
    assert group.trace() == "61.0 Answer"
    group.after(0.2)
    group.located()
    told = "Interrupt" if persistent else "STOP_AGENT"
    assert group.trace() == f"62.0 ReportWhere, 62.1 {told}"
    assert group.error.startswith("the run was given 2 s and did not end in that time: [ranks 0-1] ")
    if persistent:
        group.feed(Trigger.INTERRUPT)
        assert group.trace() == "62.1 SKIP_GRACE, 62.1 RESTART_AGENT"


def test_kept_ranks_that_are_stopped_are_replaced_after_a_timeout_and_its_grace_period():
    group = Traced(persistent=True, timeout=1.0)
    stopped = "its process is stopped (SIGSTOP)"
    for _ in range(200):
        group.after(0.05)
        group.feed(life.StacksRead({0: stopped, 1: stopped}))
    assert Order.RESTART_AGENT in group.done
    assert "ranks 0-1 could not be interrupted: stopped by SIGSTOP" in group.notices()


def test_a_hang_is_looked_for_after_half_of_the_silence_and_told_after_all_of_it():
    group = Traced(persistent=True, hang_after=2.0)
    for _ in range(2):
        group.after(1.1)
        group.located(collectives=STUCK[-1:])
    assert group.trace() == f"{BEGINS}, 1.0 ReportWhere, 2.0 ReportWhere"
    (told,) = group.notices()
    assert told.startswith("nothing heard for 2 s\n")
    assert Order.FINISH_JOB not in group.done
    group.after(10.0)
    for _ in range(6):
        group.after(1.1)
        group.located(collectives=STUCK[-1:])
    assert len(group.notices()) == 1, "once"


def test_a_hang_is_found_also_while_ranks_are_measured():
    group = Traced(persistent=True, hang_after=2.0)
    measured = [Reached(rank=rank, collectives=7) for rank in range(2)]
    group.feed(*measured)
    for _ in range(2):
        group.after(0.6)
        group.feed(*measured)
        group.after(0.5)
        group.located(collectives=STUCK[-1:])
    (told,) = group.notices()
    assert told.startswith("nothing heard for 2 s\n")


def test_ranks_that_compute_in_silence_are_asked_now_and_then():
    group = Traced(persistent=True, hang_after=2.0)
    for _ in range(100):
        group.after(0.1)
        group.located()
    assert 8 <= group.trace().count("ReportWhere") <= 10
    assert group.notices() == ()


def test_a_job_that_an_interrupt_spares_times_out_all_the_same():
    group = Traced(persistent=True, timeout=3.0)
    group.feed(Trigger.INTERRUPT_SPARING)
    stopped = "its process is stopped (SIGSTOP)"
    for _ in range(200):
        group.after(0.05)
        group.feed(life.StacksRead({0: stopped, 1: stopped}))
    assert "ranks 0-1 could not be interrupted: stopped by SIGSTOP" in group.notices()


def test_who_looks_at_a_group_that_ends_has_an_answer_at_once():
    group = Traced(persistent=True)
    group.feed(LocateRanks(3, 1.0), Trigger.DRAINED, Trigger.AGENT_ENDED)
    assert group.trace().endswith("0.0 RanksLocated")


def test_no_stack_is_read_of_a_process_that_has_not_said_hello():
    """The signal for it would end a process that does not handle it yet."""
    group = Traced(persistent=True)
    group.feed(LocateRanks(3, 1.0))
    starting = msgspec.structs.replace(attempt(1), pids={0: 10, 1: 11})
    group.feed(life.AttemptStarting(starting), life.WorkersForked(starting, frozenset({0, 1})))
    group.feed(hello(0, attempt=1))
    group.after(1.1)
    reading = [each for each in group.done if isinstance(each, life.ReadStacks)]
    assert [each.ranks for each in reading] == [{0}]
