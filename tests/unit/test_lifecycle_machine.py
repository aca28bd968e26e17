"""What becomes of a worker group and its jobs, decided without a process, a socket or a clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.group import lifecycle as life
from nblaunch.group.ending import Ending
from nblaunch.group.lifecycle import Action, GroupEvent, GroupState, JobState, Stage, Trigger, step
from nblaunch.group.machine import LocateRanks, Order, RestartAsked, Send
from nblaunch.group.recovery import APART, REFORMED, apart
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages as wire
from nblaunch.protocol.state import RunState, State, advance

GRACE = 5.0
PREPARE = wire.Prepare(environ=(), cwd=b"/", path=())
ON_GPUS = msgspec.structs.replace(PREPARE, device_type="cuda")
WAITING = wire.EngineStatus(engine="slurm", state=wire.EngineState.WAITING, id="3", words="PENDING", wanted=2)
GRANTED = msgspec.structs.replace(WAITING, state=wire.EngineState.RUNNING, hosts=("a", "b"), joined=2)
PEER_GONE = "Connection closed by peer [127.0.0.1]:1"
INTERRUPTED = "builtins.KeyboardInterrupt"
GONE = "the ranks were started anew: all of their variables are gone"


def hello(rank: int, *, attempt: int = 0) -> wire.Hello:
    return wire.Hello(
        rank=rank, token="", attempt=attempt, local_rank=rank, world_size=2, node="here", pid=rank + 10
    )


def ready(rank: int) -> wire.Entered:
    return wire.Entered(rank=rank, phase=wire.Phase.READY)


def returned(rank: int, *, left_open: bool = False) -> wire.Returned:
    return wire.Returned(rank=rank, value=wire.Payload(()), time=1.0, open=left_open)


def raised(rank: int, kind: str = "builtins.ValueError", message: str = "") -> wire.Raised:
    return wire.Raised(rank=rank, failure=wire.FailureRecord(type=kind, message=message))


def interrupted(*ranks: int) -> list[wire.Raised]:
    return [raised(rank, INTERRUPTED) for rank in ranks]


def recovered(*ranks: int, number: int = 1) -> list[wire.Recovered]:
    return [wire.Recovered(rank=rank, number=number) for rank in ranks]


def where(rank: int, *, inside: bool = False, busy: bool = False) -> wire.Where:
    pending = 1 if inside else 0
    frames = (wire.FrameRecord(filename="cell", line=1, function="", source=""),) if busy else ()
    return wire.Where(rank=rank, frames=frames, pending=pending, inside=inside)


def exited(rank: int, exitcode: int = -9, *, expected: bool = False) -> wire.Exited:
    return wire.Exited(rank=rank, exitcode=exitcode, time=1.0, expected=expected)


def attempt(number: int, size: int = 2) -> wire.AttemptStarted:
    return wire.AttemptStarted(
        number=number, world_size=size, time=1.0, reason="failure" if number else "started"
    )


def new_job(size: int = 2, *ranks: int, internal: bool = False, grace: float = GRACE) -> JobState:
    run = RunState.fresh(size, ranks) if ranks else RunState.fresh(size)
    return JobState(run, internal, ending=Ending(grace=grace))


class Group:
    """A machine that is fed by hand; each step is checked for what holds in every state."""

    def __init__(self, size: int = 2, *, persistent: bool = False, replaces: bool = False) -> None:
        self.size = size
        self.state = GroupState(persistent=persistent, replaces=replaces, members=RunState.fresh(size))
        self.now = 1000.0
        self.done: list[Action] = []
        self.open_jobs = 0
        self.stages: set[tuple[Stage, Stage]] = set()

    def feed(self, *events: GroupEvent) -> list[Action]:
        """Return what is to be done; explains exits, as a group does."""
        actions: list[Action] = []
        for event in events:
            before = self.state
            self.state, more = step(before, event, self.now)
            assert (self.state, more) == step(before, event, self.now), "the same every time"
            self.check(before, event, more)
            actions += (each for each in more if not isinstance(each, life.Publish))
            for each in more:
                if isinstance(each, life.Explain):
                    why = "" if each.exited.expected else "was killed by SIGKILL"
                    actions += self.feed(life.ExitExplained(msgspec.structs.replace(each.exited, reason=why)))
        self.done += actions
        return actions

    def after(self, seconds: float) -> list[Action]:
        """Let time pass, tick by tick."""
        actions, until = [], self.now + seconds
        while self.now < until:
            self.now = min(self.now + 0.05, until)
            actions += self.feed(Trigger.TICK)
        return actions

    def check(self, before: GroupState, event: GroupEvent, actions: tuple[Action, ...]) -> None:
        after = self.state
        self.stages.add((before.stage, after.stage))
        if isinstance(event, life.JobSubmitted):
            self.open_jobs = 1 if event.job is not None else 0
        for each in actions:
            if isinstance(each, Send | life.SendJob):
                assert each.rank not in after.exited, f"{each} to a rank that is gone"
            if each is Order.FINISH_JOB:
                self.open_jobs -= 1
                assert self.open_jobs == 0, "a job ends once"
                assert after.working is None
        if before.working is not None and not isinstance(event, life.JobSubmitted | life.AttemptStarting):
            for rank, known in before.working.run.ranks.items():
                if known.state is State.SUCCEEDED:
                    assert after.job is not None
                    assert after.job.run.ranks[rank].state is State.SUCCEEDED, "a value was lost"
                    assert after.job.run.ranks[rank].value is known.value

    # --- shorthands ------------------------------------------------------------------------------

    def submit(self, prepare: wire.Prepare = PREPARE, *, internal: bool = False) -> list[Action]:
        return self.feed(life.JobSubmitted(prepare, new_job(self.size, internal=internal)))

    def fork(self, number: int = 0) -> list[Action]:
        ranks = frozenset(range(self.size))
        starting = attempt(number, self.size)
        return self.feed(life.AttemptStarting(starting), life.WorkersForked(starting, ranks))

    def start(self, number: int = 0, *, given: bool = True, prepare: wire.Prepare = PREPARE) -> Group:
        """Let all ranks come into being, with a job."""
        if given:
            self.submit(prepare)
        self.fork(number)
        self.feed(*map(hello, range(self.size)), *map(ready, range(self.size)))
        if given:
            self.feed(*(wire.Started(rank=rank, time=1.0) for rank in range(self.size)))
        return self

    def interrupt(self) -> list[Action]:
        """Let the user interrupt the job; ranks that are asked where they are say so."""
        actions = self.feed(Trigger.INTERRUPT)
        return actions + self.feed(*map(where, sent(actions, wire.ReportWhere)))

    def states(self) -> list[State]:
        assert self.state.job is not None
        return [rank.state for rank in self.state.job.run.ranks.values()]

    def stage(self) -> Stage:
        return self.state.stage

    def notices(self) -> tuple[str, ...]:
        return self.state.job.run.notices if self.state.job is not None else ()


def sent(actions: list[Action], kind: type[wire.ToRank]) -> list[int]:
    return [each.rank for each in actions if isinstance(each, Send) and isinstance(each.message, kind)]


def messages(actions: list[Action], kind: type[wire.ToRank]) -> list[Any]:
    return [each.message for each in actions if isinstance(each, Send) and isinstance(each.message, kind)]


def dispatched(actions: list[Action]) -> list[int]:
    return [each.rank for each in actions if isinstance(each, life.SendJob)]


def reforms(actions: list[Action]) -> list[bool]:
    return [each.reform for each in messages(actions, wire.Recover)]


def finished(actions: list[Action]) -> bool:
    return any(each is Order.FINISH_JOB for each in actions)


# --- coming into being -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_job_is_dispatched_once_whatever_the_order_in_which_its_ranks_come_into_being(seed):
    group = Group()
    group.feed(life.AttemptStarting(attempt(0)))
    said: list[GroupEvent | wire.FromRank] = [
        *(each for rank in range(2) for each in (hello(rank), ready(rank))),
        life.WorkersForked(attempt(0), frozenset({0, 1})),
        life.JobSubmitted(PREPARE, new_job()),
    ]
    random.Random(seed).shuffle(said)
    actions = group.feed(*said)
    assert dispatched(actions) == [0, 1]
    assert set(sent(actions, wire.Prepare)) == {0, 1}
    assert group.stage() is Stage.RUNNING


def test_ranks_that_are_not_heard_of_within_a_minute_end_the_launch():
    group = Group()
    group.submit()
    group.fork()
    group.feed(hello(0))
    assert group.after(59) == []
    assert Order.STOP_AGENT in group.after(2)
    assert finished(group.feed(Trigger.AGENT_ENDED))
    assert group.state.launch_failure == (
        "connect",
        "phase 'connect' did not finish in 60 s: rank 1 did not come that far",
    )


def test_a_process_group_that_is_not_formed_within_two_minutes_ends_the_launch():
    group = Group()
    group.submit()
    group.fork()
    group.after(50)
    group.feed(hello(0), hello(1), ready(1))
    assert group.after(119) == []
    assert Order.STOP_AGENT in group.after(2)
    assert group.state.launch_failure is not None
    assert group.state.launch_failure[1].endswith("120 s: rank 0 did not come that far")


@pytest.mark.parametrize("late", [False, True])
def test_ranks_that_wait_for_their_first_job_have_no_limit(late):
    group = Group()
    group.feed(life.AttemptStarting(attempt(0)))
    forked, said = life.WorkersForked(attempt(0), frozenset({0, 1})), (hello(0), hello(1))
    group.feed(*((*said, forked) if late else (forked, *said)))
    assert group.state.quiet
    assert group.after(1000) == []
    group.submit()
    assert not group.state.quiet


def test_a_kept_rank_that_dies_before_it_is_ready_ends_the_group_and_a_fresh_one_does_not():
    for persistent in (True, False):
        group = Group(persistent=persistent)
        group.submit()
        group.fork()
        assert (Order.STOP_AGENT in group.feed(exited(1))) is persistent


# --- nodes that an engine places -------------------------------------------------------------------


def test_what_an_engine_says_is_the_jobs_and_that_of_each_later_one():
    group = Group(persistent=True)
    group.submit()
    group.feed(WAITING)
    assert group.state.at_work.engine == WAITING
    assert group.state.at_work.where == "waiting for slurm: job 3 PENDING, 0 of 2 nodes here"
    group.feed(GRANTED)
    group.start(given=False)
    group.feed(wire.Started(rank=0, time=1.0), wire.Started(rank=1, time=1.0), returned(0), returned(1))
    group.submit()
    assert group.state.engine == group.state.at_work.engine == GRANTED


def test_names_of_hosts_travel_once_however_many_nodes_arrive():
    count = 4096
    granted = msgspec.structs.replace(WAITING, hosts=tuple(f"gpu-node-{each:05}" for each in range(count)))
    group, size, told = Group(persistent=True), 0, RunState.fresh(2)
    group.submit()
    for joined in range(count + 1):
        said = msgspec.structs.replace(granted, joined=joined)
        group.state, actions = step(group.state, said, group.now)
        for each in actions:
            if isinstance(each, life.Publish):
                size += len(wire.encode(each.message))
                told = advance(told, each.message)
    print(f"{count} nodes arrive: a client is sent {size / 1e6:.2f} MB")
    assert size < 1_000_000
    assert told.engine == group.state.engine == msgspec.structs.replace(granted, joined=count)


def test_a_job_for_a_rank_that_no_attempt_has_any_more_ends():
    group = Group(persistent=True).start()
    group.feed(life.AttemptStarting(attempt(0, 2)))
    group.feed(life.JobSubmitted(PREPARE, new_job(2, 1)))
    assert group.state.working is not None
    assert finished(group.feed(life.AttemptStarting(attempt(1, 1))))


def test_ranks_get_the_backend_that_all_nodes_have():
    group = Group()
    group.submit(msgspec.structs.replace(PREPARE, backend="gloo"))
    group.feed(life.PrepareChanged("cpu:gloo,cuda:nccl", "cuda"))
    group.fork()
    (order,) = [each for each in group.feed(hello(0)) if isinstance(each, Send)]
    assert isinstance(order.message, wire.Prepare)
    assert (order.message.backend, order.message.device_type) == ("cpu:gloo,cuda:nccl", "cuda")


def test_ranks_without_a_process_group_get_none_whatever_the_nodes_have():
    group = Group()
    group.submit()
    group.feed(life.PrepareChanged("nccl", "cuda"))
    assert group.state.prepare == msgspec.structs.replace(PREPARE, device_type="cuda")
    script = Group()
    script.submit(msgspec.structs.replace(PREPARE, device_type=""))
    script.feed(life.PrepareChanged("nccl", "cuda"))
    assert script.state.prepare == msgspec.structs.replace(PREPARE, device_type="")


# --- the end of a job ------------------------------------------------------------------------------


def test_a_fresh_group_is_released_with_its_values_and_its_job_ends_at_once():
    group = Group().start()
    assert not finished(group.feed(returned(0)))
    actions = group.feed(returned(1))
    assert life.ReleaseWorkers(succeeded=True, others=frozenset()) in actions
    assert sent(actions, wire.Leave) == [0, 1]
    assert finished(actions)
    assert group.stage() is Stage.LEAVING


def test_after_a_failure_the_others_have_a_moment_to_say_what_happened_to_them():
    group = Group(3).start()
    assert group.feed(raised(1)) == []
    assert group.after(0.05) == []
    group.feed(raised(0))
    actions = group.after(0.06)
    assert actions == [life.ReleaseWorkers(succeeded=False, others=frozenset({2}))]
    assert sent(group.feed(life.RanksStopped(frozenset(range(3)))), wire.Leave) == [0, 1], (
        "only once nobody is at work"
    )
    assert finished(group.feed(Trigger.AGENT_ENDED))


def test_a_rank_that_has_failed_is_waited_for_as_long_as_it_works_or_until_an_interrupt():
    """It ends as a script does: with its threads, and its exit functions."""
    group = Group().start()
    group.feed(raised(0))
    group.after(0.2)
    group.feed(life.RanksStopped(frozenset(range(3))), wire.Finishing(rank=0, what="thread save"))
    assert not finished(group.after(100))
    assert Order.STOP_AGENT in group.interrupt()
    assert finished(group.feed(Trigger.AGENT_ENDED))


def test_a_fresh_group_that_starts_again_begins_its_job_again():
    group = Group().start()
    group.feed(returned(0), raised(1))
    group.after(0.2)
    group.feed(exited(1, 1), Trigger.DRAINED)
    assert Order.FORGET_VALUES in group.feed(life.AttemptStarting(attempt(1)))
    actions = group.feed(
        life.WorkersForked(attempt(1), frozenset({0, 1})), hello(0), hello(1), ready(0), ready(1)
    )
    assert dispatched(actions) == [0, 1]
    assert finished(group.feed(returned(0), returned(1)))
    assert len(group.state.job.run.attempts) == 2


def test_a_restart_is_not_begun_after_an_interrupt():
    group = Group().start()
    group.interrupt()
    group.feed(raised(0, INTERRUPTED))
    actions = group.feed(raised(1, INTERRUPTED))
    assert Order.STOP_AGENT in actions
    assert group.states() == [State.STOPPED, State.STOPPED], "an interrupted rank has not failed"


def test_a_collective_that_is_left_open_is_looked_at_before_the_ranks_leave():
    group = Group().start(prepare=ON_GPUS)
    group.feed(returned(0, left_open=True))
    assert sent(group.feed(returned(1)), wire.ReportWhere) == [0, 1]
    assert not finished(group.feed(where(0)))
    assert finished(group.feed(where(1)))


def test_ranks_that_do_not_answer_keep_no_value_waiting():
    group = Group().start(prepare=ON_GPUS)
    group.feed(returned(0, left_open=True), returned(1))
    assert not finished(group.after(1.9))
    assert finished(group.after(0.2))


def test_a_rank_that_exits_badly_after_its_value_was_here_is_a_warning():
    group = Group().start()
    group.feed(returned(0), returned(1))
    assert group.feed(exited(0, 3)) == [
        wire.Noticed(text="rank 0 ended with exit code 3 after its value was here")
    ]


def test_a_payload_is_kept_once_it_is_whole_on_every_rank():
    group = Group(persistent=True).start()
    assert group.feed(wire.Arrived(rank=0)) == []
    actions = group.feed(wire.Arrived(rank=1))
    assert actions == [Order.KEEP_PAYLOAD, Send(0, wire.Proceed()), Send(1, wire.Proceed())]
    assert group.feed(wire.Arrived(rank=1)) == []


def test_a_payload_that_one_rank_cannot_load_is_kept_on_none():
    group = Group(persistent=True).start()
    group.feed(wire.Arrived(rank=0), raised(1))
    assert group.feed(wire.Arrived(rank=1)) == []


def test_how_far_ranks_are_is_asked_of_those_at_work():
    group = Group().start()
    group.feed(returned(0))
    assert sent(group.feed(wire.Measured(usages={})), wire.ReportReached) == [1]


# --- interrupts ------------------------------------------------------------------------------------


def test_an_interrupt_before_anything_runs_has_nobody_to_wait_for():
    fresh, kept = Group(), Group(persistent=True)
    for group in (fresh, kept):
        group.submit()
        group.fork()
    assert Order.STOP_AGENT in fresh.interrupt()
    actions = kept.interrupt()
    assert finished(actions)
    assert Order.STOP_AGENT not in actions
    kept.feed(hello(0), hello(1), ready(0), ready(1))
    assert dispatched(kept.done) == []


def test_an_interrupt_of_idle_ranks_does_nothing():
    group = Group(persistent=True).start()
    group.feed(returned(0), returned(1))
    before = group.state
    assert group.feed(Trigger.INTERRUPT) == []
    assert group.state == before


def test_ranks_that_do_not_listen_are_replaced_after_the_grace_period():
    group = Group(persistent=True).start()
    group.interrupt()
    group.feed(raised(0, INTERRUPTED), wire.InterruptSeen(rank=1, number=1))
    assert sent(group.after(GRACE - 0.1), wire.Interrupt) == []
    (last,) = [
        each.message
        for each in group.after(0.2)
        if isinstance(each, Send) and isinstance(each.message, wire.Interrupt)
    ]
    assert last.last
    group.feed(wire.InterruptSeen(rank=1, number=last.number))
    assert Order.RESTART_AGENT not in group.after(1.9)
    assert Order.RESTART_AGENT in group.after(0.2)
    assert group.notices() == ("rank 1 went on after two interrupts, --grace 5 s apart",)


# --- recovery --------------------------------------------------------------------------------------


def interrupted_peer(group: Group) -> None:
    """Let rank 1 fail while rank 0 waits in a collective, until that is freed."""
    group.feed(raised(1))
    assert sent(group.after(0.2), wire.Interrupt) == [0]
    assert sent(group.after(0.3), wire.ReportWhere) == [0, 1]
    actions = group.feed(where(0, inside=True), where(1))
    assert sent(actions, wire.FreeCollective) == [0]
    assert sent(group.feed(raised(0, "torch.distributed.DistBackendError", PEER_GONE)), wire.ReportWhere) == [
        0,
        1,
    ]
    assert group.stage() is Stage.RECOVERING


def test_one_rank_raises_while_another_sits_in_all_reduce():
    group = Group(persistent=True).start()
    interrupted_peer(group)
    group.feed(where(0), where(1))
    assert sent(group.after(0.1), wire.Recover) == [0, 1]
    group.feed(wire.Recovered(rank=1, number=0))
    assert not finished(group.feed(wire.Recovered(rank=0, number=1))), "rank 1 answered an earlier order"
    assert finished(group.feed(wire.Recovered(rank=1, number=1)))
    assert group.states() == [State.STOPPED, State.FAILED]
    assert group.notices() == (REFORMED,)
    assert group.stage() is Stage.READY


def test_an_error_on_all_ranks_costs_nothing_and_no_group_is_formed_again():
    group = Group(persistent=True).start()
    group.feed(raised(0), raised(1), where(0), where(1))
    recover = [each.message for each in group.after(0.1) if isinstance(each, Send)]
    assert [each.reform for each in recover if isinstance(each, wire.Recover)] == [False, False]
    assert finished(group.feed(*recovered(0, 1)))
    assert group.notices() == ()


def called(number: int, recorded: int | None = None) -> wire.Tally:
    return wire.Tally("0", "default_pg", "nccl2", (0, 1), number, recorded)


def unlike(*, recorded: tuple[int, int]) -> Group:
    """Return a group whose ranks have returned, after two and one collectives by their own count."""
    group = Group(persistent=True).start()
    group.feed(*(msgspec.structs.replace(returned(rank), tallies=(called(2 - rank),)) for rank in (0, 1)))
    assert group.stage() is Stage.RECOVERING
    group.feed(
        *(
            msgspec.structs.replace(
                where(rank, inside=rank == 0), tallies=(called(2 - rank, recorded[rank]),)
            )
            for rank in (0, 1)
        )
    )
    return group


def test_a_job_that_succeeded_with_unlike_collectives_ends_once_the_group_is_formed_again():
    group = unlike(recorded=(2, 1))
    actions = group.after(0.1)
    assert reforms(actions) == [True, True]
    assert finished(group.feed(*recovered(0, 1)))
    assert group.states() == [State.SUCCEEDED] * 2
    assert group.notices() == (
        "collectives do not match: in the default group (nccl2) rank 0 at #2, rank 1 at #1",
        REFORMED,
    )


def test_unlike_numbers_cost_nothing_where_the_recorders_show_the_same_collectives():
    """gloo counts sends and receives."""
    group = unlike(recorded=(1, 1))
    assert reforms(group.after(0.1)) == [False, False]
    assert finished(group.feed(*recovered(0, 1)))
    assert (group.states(), group.notices()) == ([State.SUCCEEDED] * 2, ())


def test_like_numbers_after_success_ask_the_ranks_for_nothing():
    group = Group(persistent=True).start()
    even = [msgspec.structs.replace(returned(rank), tallies=(called(2),)) for rank in (0, 1)]
    actions = group.feed(*even)
    assert finished(actions)
    assert sent(actions, wire.ReportWhere) == []


def test_a_group_that_cannot_be_formed_again_is_replaced_at_once():
    group = Group(persistent=True).start()
    interrupted_peer(group)
    group.feed(where(0), where(1))
    group.after(0.1)
    assert Order.RESTART_AGENT in group.feed(wire.Recovered(rank=1, number=1, error="no route"))
    assert not finished(group.feed(wire.Recovered(rank=0, number=1))), "these ranks are being ended"
    assert finished(group.feed(life.AttemptStarting(attempt(1))))
    assert group.notices() == ("the process group could not be formed again on rank 1: no route", GONE)


def test_ranks_that_do_not_get_ready_are_replaced_once_they_are_seen_to_do_nothing():
    group = Group(persistent=True).start()
    group.feed(raised(0), raised(1), where(0), where(1))
    group.after(0.1)
    assert group.after(GRACE - 1) == []
    group.feed(wire.Recovered(rank=0, number=1))
    assert group.after(GRACE - 0.1) == [], "a busy machine is slow, not broken"
    assert sent(group.after(0.2), wire.ReportWhere) == [1]
    group.feed(where(1))
    actions = group.after(2 * GRACE)
    assert Order.RESTART_AGENT in actions
    assert group.notices() == (
        "ranks did not come back within the grace period",
        "rank 1 did not get ready for another job",
    )


def test_ranks_that_are_seen_to_be_at_it_have_a_minute():
    group = Group(persistent=True).start()
    group.feed(raised(0), raised(1), where(0), where(1))
    began, actions = group.now, list[Action]()
    while Order.RESTART_AGENT not in actions and group.now < began + 200:
        actions = group.after(0.5)
        for rank in sent(actions, wire.ReportWhere):
            group.feed(where(rank, busy=True))
    assert began + 60 <= group.now <= began + 75


def test_the_death_of_a_kept_rank_ends_the_job_with_the_next_attempt():
    group = Group(persistent=True).start()
    assert not finished(group.feed(exited(1))), "its last words may still arrive"
    assert group.states() == [State.RUNNING, State.RUNNING]
    group.after(0.06)
    assert group.states() == [State.RUNNING, State.FAILED]
    assert group.after(1.0) == [], "the agent ends the others"
    group.feed(exited(0, -15, expected=True), Trigger.DRAINED)
    assert finished(group.feed(life.AttemptStarting(attempt(1))))
    assert group.notices() == (GONE,)
    assert not group.feed(life.WorkersForked(attempt(1), frozenset({0, 1})), hello(0), hello(1))[2:]


def test_a_rank_whose_last_words_arrive_is_judged_by_them():
    group = Group(persistent=True).start()
    group.feed(exited(1), raised(1))
    group.after(0.2)
    failure = group.state.job.run.ranks[1].failure
    assert failure is not None
    assert failure.type == "builtins.ValueError"


def test_a_death_between_two_jobs_is_shown_with_the_next_that_the_user_sees():
    group = Group(persistent=True).start()
    group.feed(returned(0), returned(1), exited(1))
    group.feed(life.AttemptStarting(attempt(1)))
    group.submit(internal=True)
    assert group.notices() == ()
    group.submit()
    assert group.notices() == ("rank 1 was killed by SIGKILL", GONE)
    group.submit()
    assert group.notices() == ()


def test_notes_that_the_user_knows_are_not_shown():
    group = Group(persistent=True)
    group.feed(wire.Noticed(text="known"), Trigger.FORGET_NOTES, wire.Noticed(text="news"))
    group.submit()
    assert group.notices() == ("news",)


# --- several nodes, and GPUs -----------------------------------------------------------------------


def test_what_ranks_make_of_a_membership_change_is_no_failure():
    group = Group().start()
    group.feed(returned(0))
    assert group.feed(Trigger.MEMBERSHIP_CHANGING) == []
    group.feed(raised(1, "torch.distributed.DistBackendError", PEER_GONE))
    actions = group.feed(exited(1, -15), Trigger.DRAINED)
    assert {type(each) for each in actions} <= {life.Explain}, "the job is not over"
    assert group.states() == [State.SUCCEEDED, State.STOPPED]
    assert group.after(10) == []
    assert group.stage() is Stage.CHANGING
    group.feed(life.AttemptStarting(attempt(1, 3)))
    assert group.stage() is Stage.STARTING
    assert group.state.members.world_size == 3


@pytest.mark.parametrize("enough", [True, False])
def test_a_node_that_leaves_is_missed_only_if_the_others_are_too_few(enough):
    group = Group().start()
    actions = group.feed(life.NodeLeaving("b", asked=False, enough=enough))
    assert (Order.REJOIN_NODES in actions) is enough is group.state.changing
    group.feed(exited(1, expected=enough), Trigger.DRAINED)
    assert group.states()[1] is (State.STOPPED if enough else State.FAILED)


def test_a_node_that_ends_with_a_run_that_has_timed_out_is_not_missed():
    group = Group()
    limits = Ending.begin(LaunchOptions(timeout=1.0, grace=GRACE), group.now)
    group.feed(life.JobSubmitted(PREPARE, JobState(RunState.fresh(2), ending=limits)))
    group.start(given=False)
    assert sent(group.after(1.1), wire.ReportWhere) == [0, 1]
    assert Order.STOP_AGENT in group.feed(where(0), where(1))
    assert group.feed(life.NodeLeaving("b", asked=False, enough=True, ranks=frozenset({1}))) == []
    assert (group.stage(), group.notices()) == (Stage.RUNNING, ())


def test_a_node_that_ends_with_a_launch_that_was_given_up_is_not_missed():
    """Its end comes of the agent's, which is not a change of the membership."""
    group = Group()
    group.submit()
    group.fork()
    group.feed(hello(0))
    assert Order.STOP_AGENT in group.after(61)
    assert group.feed(life.NodeLeaving("b", asked=False, enough=True, ranks=frozenset({1}))) == []
    assert (group.state.changing, group.notices()) == (False, ())


# --- kept ranks whose nodes are lost, or come ------------------------------------------------------


def loses(group: Group, *ranks: int) -> list[Action]:
    """Let a node be lost on which these ranks were."""
    exits = (exited(rank) for rank in ranks)
    return group.feed(life.NodeLeaving("hB", asked=False, enough=True, ranks=frozenset(ranks)), *exits)


def goes_on(group: Group, kept: dict[int, int], size: int, number: int = 1) -> list[Action]:
    """Let the next attempt begin, in which these ranks go on."""
    starting = attempt(number, size)
    return group.feed(life.AttemptStarting(starting, kept), life.WorkersForked(starting, frozenset()))


def joins(group: Group, *ranks: int, number: int = 1) -> list[Action]:
    """Let ranks form a group, those that have gone on and those that are new."""
    actions = group.feed(*(hello(rank, attempt=number) for rank in ranks))
    actions += group.feed(*map(where, ranks)) + group.after(0.1)
    made = group.state.recovery.number
    for rank in ranks:
        actions += group.feed(ready(rank), wire.Recovered(rank=rank, number=made))
    return actions


def idle(size: int = 2, *, replaces: bool = False) -> Group:
    """Return a kept group that has done a job."""
    group = Group(size, persistent=True, replaces=replaces).start()
    group.feed(*map(returned, range(size)))
    assert group.stage() is Stage.READY
    return group


def test_idle_ranks_go_on_at_once_without_those_that_are_lost():
    group = idle()
    assert loses(group, 0) == [Order.REGROUP_NODES]
    assert group.after(1) == []
    assert goes_on(group, {0: 1}, 1) == []
    actions = joins(group, 0)
    assert sent(actions, wire.Prepare) == []
    (order,) = messages(actions, wire.Recover)
    assert order.reform
    assert group.stage() is Stage.READY
    group.size = 1
    assert life.SendJob(0) in group.submit()
    assert group.notices() == (
        "node hB was lost, with the variables of rank 0",
        "the group has 1 rank now; variables kept: rank 0; rank 0 formerly rank 1",
        REFORMED,
    )


def test_a_job_fails_with_the_ranks_that_are_lost_and_the_others_end_it_first():
    group = Group(3, persistent=True).start()
    group.feed(returned(0))
    assert loses(group, 2) == []
    actions = group.after(0.3)
    assert sent(actions, wire.Interrupt) == [1]
    assert sent(actions, wire.ReportWhere) == [], "nobody asks a rank that is lost"
    actions = group.feed(raised(1, INTERRUPTED))
    assert not finished(actions)
    actions = group.feed(where(0), where(1)) + group.after(0.1)
    assert reforms(actions) == [False, False]
    actions = group.feed(*recovered(0, 1))
    assert actions == [Order.FINISH_JOB, Order.REGROUP_NODES]
    assert group.states() == [State.SUCCEEDED, State.STOPPED, State.FAILED]
    goes_on(group, {0: 0, 1: 1}, 2)
    joins(group, 0, 1)
    assert group.stage() is Stage.READY


def test_ranks_that_wait_for_lost_ones_to_form_a_group_are_freed_first():
    group = Group(3, persistent=True).start()
    group.feed(*(raised(rank) for rank in range(3)))
    group.feed(where(0, inside=True), where(1), where(2))
    assert reforms(group.after(0.1)) == [True] * 3
    assert sent(loses(group, 2), wire.ReportWhere) == [0, 1]
    actions = group.feed(where(0, inside=True), where(1)) + group.after(0.1)
    assert sent(actions, wire.FreeCollective) == [0, 1]
    assert reforms(actions) == [False, False]
    group.feed(wire.Recovered(rank=0, number=1, error="cut"), wire.Recovered(rank=0, number=2))
    assert group.feed(wire.Recovered(rank=1, number=2)) == [Order.FINISH_JOB, Order.REGROUP_NODES]
    goes_on(group, {0: 0, 1: 1}, 2)
    joins(group, 0, 1)
    assert group.stage() is Stage.READY


def test_ranks_that_do_not_come_back_are_replaced():
    group = idle()
    loses(group, 1)
    goes_on(group, {0: 0}, 1)
    assert Order.RESTART_AGENT in group.after(61)
    assert Order.STOP_AGENT not in group.done


def test_a_job_that_none_of_the_lost_ranks_has_is_done_first():
    group = idle()
    group.feed(life.JobSubmitted(PREPARE, new_job(2, 0)))
    assert loses(group, 1) == []
    assert group.after(5) == []
    assert group.feed(returned(0)) == [Order.FINISH_JOB, Order.REGROUP_NODES]


def test_a_job_that_was_captured_for_other_numbers_is_ended_and_reaches_no_rank():
    group = idle()
    loses(group, 0)
    assert group.submit() == []
    goes_on(group, {0: 1}, 1)
    assert Order.FINISH_JOB in group.done
    assert dispatched(joins(group, 0)) == []


def test_ranks_go_on_only_once_all_of_them_have_said_hello():
    group = idle(3)
    loses(group, 2)
    goes_on(group, {0: 0, 1: 1}, 2)
    assert loses(group, 1) == []
    assert group.feed(hello(0, attempt=1)) == [Order.REGROUP_NODES]


def test_a_node_that_is_lost_while_the_others_go_on_is_left_behind_too():
    group = idle(3)
    loses(group, 2)
    goes_on(group, {0: 0, 1: 1}, 2)
    group.feed(hello(0, attempt=1))
    assert loses(group, 1) == [Order.REGROUP_NODES]
    goes_on(group, {0: 0}, 1, 2)
    joins(group, 0, number=2)
    assert group.stage() is Stage.READY


def test_ranks_of_a_node_that_comes_form_a_group_with_those_that_are_there():
    group = idle()
    assert group.feed(Trigger.NODE_ARRIVED) == [Order.REGROUP_NODES]
    goes_on(group, {0: 0, 1: 1}, 3)
    starting = attempt(1, 3)
    group.feed(life.WorkersForked(starting, frozenset({2}), remote=True))
    actions = joins(group, 0, 1, 2)
    prepared = [each for each in actions if isinstance(each, Send) and isinstance(each.message, wire.Prepare)]
    assert prepared == [Send(2, msgspec.structs.replace(PREPARE, joins=True))]
    assert sent(actions, wire.Recover) == [0, 1, 2]
    assert group.stage() is Stage.READY
    group.size = 3
    group.submit()
    assert any("; new: rank 2" in each for each in group.notices())


def test_a_node_that_comes_during_a_job_waits_for_its_end():
    group = Group(persistent=True).start()
    assert group.feed(Trigger.NODE_ARRIVED) == []
    group.feed(returned(0))
    assert group.feed(returned(1)) == [Order.FINISH_JOB, Order.REGROUP_NODES]


def test_a_rank_that_dies_while_it_goes_on_does_not_end_the_session():
    group = idle(3)
    loses(group, 2)
    goes_on(group, {0: 0, 1: 1}, 2)
    group.size = 2
    group.submit()
    group.feed(exited(1))
    assert Order.STOP_AGENT not in group.after(5)
    assert GONE not in group.notices()
    assert not finished(group.feed(life.AttemptStarting(attempt(2))))
    assert group.notices()[-1] == GONE


# --- a rank that dies on this machine --------------------------------------------------------------


def is_replaced(group: Group, *dead: int, number: int = 1) -> list[Action]:
    """Let others start in place of these ranks."""
    starting = attempt(number, group.size)
    kept = {rank: rank for rank in range(group.size) if rank not in dead}
    group.feed(life.AttemptStarting(starting, kept))
    return group.feed(life.WorkersForked(starting, frozenset(dead)))


def test_an_idle_rank_that_dies_is_replaced_alone_and_all_form_their_group_again():
    group = idle(3, replaces=True)
    assert [each for each in group.feed(exited(1)) if isinstance(each, Order)] == [Order.REGROUP_NODES]
    assert is_replaced(group, 1) == []
    actions = joins(group, 0, 1, 2)
    prepared = [each for each in actions if isinstance(each, Send) and isinstance(each.message, wire.Prepare)]
    assert prepared == [Send(1, msgspec.structs.replace(PREPARE, joins=True))]
    assert [each.reform for each in messages(actions, wire.Recover)] == [True] * 3
    assert group.stage() is Stage.READY
    group.submit()
    assert group.notices() == ("rank 1 was killed by SIGKILL", REFORMED)


def test_a_job_that_waits_for_a_rank_to_be_replaced_reaches_none_it_was_captured_for_the_dead_one():
    group = idle(2, replaces=True)
    group.feed(exited(1))
    assert group.submit() == []
    is_replaced(group, 1)
    assert Order.FINISH_JOB in group.done
    assert dispatched(joins(group, 0, 1)) == []


def test_a_rank_that_dies_in_a_job_ends_it_and_is_replaced_once_the_others_are_idle():
    group = Group(3, persistent=True, replaces=True).start()
    assert Order.REGROUP_NODES not in group.feed(exited(2))
    group.after(0.1)
    assert group.states() == [State.RUNNING, State.RUNNING, State.FAILED]
    actions = group.after(0.3)
    assert sent(actions, wire.Interrupt) == [0, 1]
    group.feed(*interrupted(0, 1))
    group.feed(where(0), where(1))
    group.after(0.1)
    actions = group.feed(*recovered(0, 1))
    assert actions == [Order.FINISH_JOB, Order.REGROUP_NODES]
    assert group.notices() == ("rank 2 is started again; the other ranks keep their variables",)
    is_replaced(group, 2)
    joins(group, 0, 1, 2)
    assert group.stage() is Stage.READY


def test_a_rank_that_ends_again_before_it_is_ready_has_all_replaced():
    group = idle(3, replaces=True)
    group.feed(exited(1))
    is_replaced(group, 1)
    assert Order.RESTART_AGENT in group.feed(exited(1))
    assert group.state.replacing


def test_a_rank_that_cannot_be_started_again_has_all_replaced_with_its_reason():
    group = idle(3, replaces=True)
    group.feed(exited(1))
    is_replaced(group, 1)
    group.feed(hello(1, attempt=1))
    assert Order.RESTART_AGENT in group.feed(raised(1, message="no such directory"))
    group.feed(life.AttemptStarting(attempt(2, 3)))
    group.submit()
    assert "rank 1 could not be started again: no such directory" in group.notices()


def test_a_rank_that_waits_in_c_code_for_one_that_has_died_is_given_up_after_the_grace_period():
    group = Group(3, persistent=True, replaces=True).start()
    group.feed(exited(2))
    group.after(0.3)
    group.feed(raised(0, INTERRUPTED))
    assert Order.RESTART_AGENT not in group.after(GRACE - 0.5)
    assert Order.RESTART_AGENT in group.after(max(GRACE, 1.0) + 0.5)
    group.feed(exited(0, expected=True), exited(1, expected=True), life.AttemptStarting(attempt(1, 3)))
    assert group.states()[2] is State.FAILED
    assert group.notices()[-2:] == ("rank 1 did not come back, and may wait for a rank that is gone", GONE)


def test_one_of_the_others_that_dies_meanwhile_is_replaced_next():
    group = idle(3, replaces=True)
    group.feed(exited(1))
    is_replaced(group, 1)
    group.feed(hello(0, attempt=1), hello(1, attempt=1))
    group.feed(exited(2))
    assert Order.RESTART_AGENT not in group.done
    assert group.done.count(Order.REGROUP_NODES) == 2
    is_replaced(group, 2, number=2)
    joins(group, 0, 1, 2, number=2)
    assert group.stage() is Stage.READY


def test_without_a_rank_that_goes_on_torchelastic_starts_all_anew():
    group = Group(2, persistent=True, replaces=True).start()
    group.feed(exited(0), exited(1))
    group.after(0.1)
    assert not group.state.lost
    assert finished(group.feed(life.AttemptStarting(attempt(1))))
    assert group.notices()[-1] == GONE


# --- ranks that stop within a step ------------------------------------------------------------------


def steps(number: int, begun: int, ended: int | None = None, *, gone: bool = False) -> wire.StepsTaken:
    names = () if gone else (f"opt{number}",)
    return wire.StepsTaken(number, begun, begun if ended is None else ended, names, gone)


@pytest.mark.parametrize(
    ("taken", "told"),
    [
        ([(steps(0, 5),), (steps(0, 4),)], ["opt0: done on rank 0, not done on rank 1"]),
        ([(steps(0, 1),), ()], ["opt0: done on rank 0, not done on rank 1"]),
        ([(steps(0, 5, 4),), (steps(0, 5),)], ["opt0: done in part on rank 0, done on rank 1"]),
        ([(steps(0, 5, 4),)] * 2, ["opt0: done in part on ranks 0-1"]),
        ([(steps(0, 5),), (steps(0, 5),)], []),
        ([(steps(0, 5),), (steps(0, 3),)], []),  # each trains by itself
        ([(steps(0, 5, 4),)], []),  # of one rank
        ([(steps(0, 2, gone=True),), (steps(0, 1, gone=True),)], []),
        ([(steps(0, 2, gone=True),), (steps(0, 1),)], ["opt0: done on rank 0, not done on rank 1"]),
        # One rank no longer tells of the first.
        ([(steps(0, 1), steps(1, 1)), (steps(1, 1), steps(2, 3))], []),
        (
            [(steps(0, 5), steps(1, 5)), (steps(0, 5), steps(1, 4))],
            ["opt1: done on rank 0, not done on rank 1"],
        ),
    ],
)
def test_ranks_that_are_one_step_of_an_optimizer_apart_are_told_of(taken, told):
    words = [each.split(": ", 1) for each in told]
    assert list(apart(dict(enumerate(taken)))) == [APART.format(*each) for each in words]


# --- a rank that dies on a node that lives ----------------------------------------------------------


def test_ranks_that_are_lost_with_their_node_are_not_started_again():
    group = Group(3, persistent=True, replaces=True).start()
    loses(group, 2)
    assert not [each for each in group.notices() if "started again" in each]
    group.after(0.3)
    group.feed(raised(0, INTERRUPTED))
    assert Order.RESTART_AGENT not in group.after(GRACE + 5), "one that computes is waited for, as ever"
    group.feed(raised(1, INTERRUPTED), where(0), where(1))
    group.after(0.1)
    assert Order.REGROUP_NODES in group.feed(*recovered(0, 1))
    goes_on(group, {0: 0, 1: 1}, 2)
    joins(group, 0, 1)


def test_a_node_is_lost_while_a_rank_of_another_one_is_started_again():
    group = idle(3, replaces=True)
    group.feed(exited(1))
    is_replaced(group, 1)
    group.feed(hello(0, attempt=1), hello(1, attempt=1))
    assert loses(group, 2) == [Order.REGROUP_NODES]
    goes_on(group, {0: 0, 1: 1}, 2, 2)
    joins(group, 0, 1, number=2)
    assert group.stage() is Stage.READY
    assert Order.RESTART_AGENT not in group.done


def test_without_enough_nodes_no_rank_of_the_lost_one_is_said_to_be_started_again():
    group = Group(3, persistent=True, replaces=True).start()
    group.feed(life.NodeLeaving("hB", asked=False, enough=False, ranks=frozenset({2})), exited(2))
    group.after(0.1)
    assert not group.state.lost
    assert Order.REGROUP_NODES not in group.done
    assert group.notices() == ()
    assert finished(group.feed(life.AttemptStarting(attempt(1, 3))))
    assert group.notices()[-1] == GONE


def test_a_rank_that_dies_while_the_time_of_its_nodes_is_nearly_up_is_replaced_all_the_same():
    group = Group(2, persistent=True, replaces=True).start()
    group.feed(life.Preemption("its time is nearly up", 60.0))
    group.feed(exited(1))
    group.feed(raised(0, INTERRUPTED), wire.Preempted(rank=0))
    group.after(0.2)
    group.feed(where(0))
    group.after(0.1)
    actions = group.feed(wire.Recovered(rank=0, number=group.state.recovery.number))
    assert actions == [Order.FINISH_JOB, Order.REGROUP_NODES]


def test_ranks_that_are_not_ready_begin_again_without_those_that_are_lost():
    group = Group(persistent=True)
    group.submit()
    group.fork()
    assert loses(group, 1) == [Order.REJOIN_NODES]
    assert group.stage() is Stage.CHANGING


def test_ranks_that_are_not_ready_wait_for_a_node_in_place_of_one_that_was_lost():
    group = Group(persistent=True)
    group.submit()
    group.fork()
    group.feed(hello(0), hello(1))
    lost = life.NodeLeaving("hB", asked=False, enough=False, ranks=frozenset({1}))
    group.feed(lost, exited(1), Trigger.DRAINED)
    group.now += 600
    group.feed(Trigger.TICK)
    assert Order.STOP_AGENT not in group.done
    assert group.stage() is Stage.CHANGING
    group.start(1, given=False)
    assert group.stage() is Stage.RUNNING


# --- nodes that are taken back ---------------------------------------------------------------------

NEAR = life.Preemption("the limit is near", 100.0)


@pytest.mark.parametrize("persistent", [False, True])
def test_all_ranks_save_and_the_job_that_waits_for_them_is_preempted(persistent):
    group = Group(persistent=persistent).start()
    actions = group.feed(NEAR)
    assert [sent(actions, wire.Preempt), sent(actions, wire.Interrupt)] == [[0, 1], [0, 1]]
    order = [type(each.message) for each in actions if isinstance(each, Send) and each.rank == 0]
    assert order == [wire.Preempt, wire.Interrupt], "an interrupt alone would end the job without saving"
    group.feed(wire.Preempting(rank=0), raised(0, INTERRUPTED), wire.Preempted(rank=0))
    group.feed(wire.Preempting(rank=1), wire.InterruptSeen(rank=1, number=1))
    assert sent(group.after(10 * GRACE), wire.Interrupt) == [], "who saves takes the time that there is"
    assert group.states() == [State.STOPPED, State.RUNNING]
    actions = group.feed(wire.Preempted(rank=1), raised(1, INTERRUPTED))
    assert group.states() == [State.STOPPED, State.STOPPED]
    if persistent:
        actions = group.feed(where(0), where(1), Trigger.TICK)
        group.feed(wire.Recovered(rank=0, number=1))
        assert finished(group.feed(wire.Recovered(rank=1, number=1)))
    else:
        assert Order.STOP_AGENT in actions, "also: no restart"
        assert finished(group.feed(Trigger.AGENT_ENDED))
    assert (group.state.job.run.preempted, group.state.job.run.summary) == (NEAR.why, State.PREEMPTED)
    assert not group.state.job.ending.interrupted, "no user has done it"


@pytest.mark.parametrize("persistent", [False, True])
def test_what_has_failed_first_is_no_reason_to_end_those_that_save(persistent):
    group = Group(persistent=persistent).start()
    group.feed(NEAR, wire.Preempted(rank=0), raised(0, "builtins.RuntimeError"), wire.Preempting(rank=1))
    assert group.after(2 * GRACE) == []
    assert group.stage() is Stage.INTERRUPTED


def test_a_job_waits_until_ranks_without_a_part_in_it_have_saved():
    group = Group(persistent=True).start(given=False)
    group.feed(life.JobSubmitted(PREPARE, new_job(2, 0)), wire.Started(rank=0, time=1.0))
    group.feed(NEAR, wire.Preempted(rank=0), raised(0, INTERRUPTED))
    assert group.stage() is Stage.INTERRUPTED
    group.feed(wire.Preempted(rank=1))
    assert group.stage() is Stage.RECOVERING


def test_values_that_come_all_the_same_are_a_success():
    group = Group().start()
    group.feed(NEAR, returned(0), returned(1), wire.Preempted(rank=0))
    assert group.stage() is Stage.INTERRUPTED, "a rank whose value is here may save, too"
    assert Order.STOP_AGENT in group.feed(wire.Preempted(rank=1))
    assert finished(group.feed(Trigger.AGENT_ENDED))
    assert group.state.job.run.summary is State.SUCCEEDED


def test_a_job_that_has_failed_before_has_failed():
    group = Group().start()
    group.feed(raised(0), NEAR)
    assert group.state.job.run.preempted == ""
    assert life.ReleaseWorkers(succeeded=False, others=frozenset({1})) in group.after(0.2)


@pytest.mark.parametrize(("late", "preempted"), [(1.0, True), (3.0, False)])
def test_a_rank_of_a_node_that_sigterm_has_ended_waits_for_the_notice_for_a_moment(late, preempted):
    group = Group().start()
    group.feed(life.WorkersForked(attempt(0), frozenset({0, 1}), remote=True))
    group.feed(exited(1, -15))
    group.after(late)
    assert group.states() == [State.RUNNING, State.RUNNING if preempted else State.FAILED]
    group.feed(NEAR, wire.Preempted(rank=0), raised(0, INTERRUPTED))
    group.after(3.0)
    assert bool(group.state.job.run.preempted) is preempted
    assert (group.states()[1] is State.STOPPED) is preempted


def test_a_job_that_is_given_after_the_notice_runs_in_the_time_that_is_left():
    group = Group(persistent=True).start(given=False)
    assert sent(group.feed(NEAR), wire.Preempt) == [0, 1]
    group.submit()
    group.feed(wire.Preempted(rank=0), wire.Preempted(rank=1), returned(0))
    assert finished(group.feed(returned(1)))


def test_ranks_that_go_with_their_nodes_while_they_save_have_not_failed():
    group = Group().start()
    group.feed(NEAR, wire.Preempting(rank=0))
    group.feed(exited(0), exited(1))
    group.after(0.1)
    assert group.states() == [State.STOPPED, State.STOPPED]


def test_nodes_that_were_taken_back_without_a_notice_preempt_the_job():
    group = Group().start()
    assert group.feed(life.Preemption("slurm job 7 has ended: time limit", None)) == []
    group.feed(exited(0), exited(1), Trigger.DRAINED)
    assert group.states() == [State.STOPPED, State.STOPPED]


def test_a_rank_that_goes_on_is_interrupted_once_more():
    """It cannot save before its job has ended."""
    group = Group().start()
    group.feed(NEAR, wire.InterruptSeen(rank=0, number=1), wire.Preempting(rank=1))
    assert sent(group.after(GRACE + 0.1), wire.Interrupt) == [0]
    assert Order.RESTART_AGENT not in group.after(2 * GRACE)


# --- whatever happens ------------------------------------------------------------------------------

RANKS = st.integers(0, 2)
"""One more than there are."""
SAID: list[Callable[[int], wire.FromRank]] = [
    hello,
    ready,
    lambda rank: wire.Started(rank=rank, time=1.0),
    returned,
    lambda rank: returned(rank, left_open=True),
    raised,
    lambda rank: raised(rank, INTERRUPTED),
    where,
    lambda rank: where(rank, inside=True),
    lambda rank: where(rank, busy=True),
    lambda rank: wire.Arrived(rank=rank),
    lambda rank: wire.Aborted(rank=rank),
    lambda rank: wire.InterruptSeen(rank=rank, number=1),
    lambda rank: wire.Preempting(rank=rank),
    lambda rank: wire.Preempted(rank=rank),
    lambda rank: wire.Recovered(rank=rank, number=1),
    lambda rank: wire.Recovered(rank=rank, number=1, error="broken"),
]
EVENTS = st.one_of(
    st.builds(lambda say, rank: say(rank), st.sampled_from(SAID), RANKS),
    st.builds(lambda rank, expected: exited(rank, expected=expected), RANKS, st.booleans()),
    st.builds(lambda number: life.AttemptStarting(attempt(number)), st.integers(0, 3)),
    st.builds(lambda number: life.WorkersForked(attempt(number), frozenset({0, 1})), st.integers(0, 3)),
    st.builds(
        life.JobSubmitted,
        st.just(PREPARE),
        st.sampled_from([None, new_job(), new_job(grace=1.0), new_job(internal=True)]),
    ),
    st.builds(
        life.NodeLeaving,
        st.just("b"),
        st.booleans(),
        st.booleans(),
        st.sampled_from([frozenset({0}), frozenset({1})]),
        st.sampled_from(["", "10.0.0.2"]),
    ),
    st.builds(
        lambda number, kept: life.AttemptStarting(attempt(number), kept),
        st.integers(0, 3),
        st.sampled_from([{0: 0}, {0: 1}, {0: 0, 1: 1}]),
    ),
    st.just(Trigger.NODE_ARRIVED),
    st.sampled_from(
        [
            Trigger.DRAINED,
            life.RanksStopped(frozenset({0})),
            Trigger.MEMBERSHIP_CHANGING,
            Trigger.HUB_LOST,
            wire.Noticed(text="a notice"),
            wire.Measured(usages={}),
            WAITING,
            GRANTED,
            life.PrepareChanged("nccl", "cuda"),
            life.Preemption("the limit is near", 120.0),
            life.Preemption("the nodes are gone", None),
            wire.Noticed(text="a note"),
            Trigger.FORGET_NOTES,
            Trigger.INTERRUPT,
            Trigger.INTERRUPT_SPARING,
            LocateRanks(1, 0.3),
            life.StacksRead({0: "a stack"}),
            RestartAsked("a restart"),
            Trigger.DISMISS,
            Trigger.AGENT_ENDED,
        ]
    ),
    st.just(Trigger.TICK),
)
HISTORIES = st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.05, 0.3, 2.0, 70.0])), max_size=60)


@given(HISTORIES, st.booleans(), st.booleans())
def test_two_interrupts_end_every_job_whatever_has_happened_before(history, persistent, begun):
    group = Group(persistent=persistent)
    if begun:
        group.start()
    for event, seconds in history:
        group.now += seconds
        group.feed(event)
    if group.state.working is None:
        group.submit()
    group.feed(Trigger.INTERRUPT, Trigger.INTERRUPT)
    group.after(12.0)  # no rank answers, and no stack is read
    if Order.STOP_AGENT in group.done:
        group.feed(Trigger.DRAINED, Trigger.AGENT_ENDED)
    elif Order.RESTART_AGENT in group.done:
        group.feed(Trigger.DRAINED, life.AttemptStarting(attempt(group.state.attempt + 1)))
    assert group.state.working is None
    assert group.open_jobs == 0


class World:
    """An agent and ranks that do what they are asked, in any order, and sometimes fail or do not answer."""

    def __init__(self, group: Group, chance: random.Random) -> None:
        self.group, self.chance = group, chance
        self.attempt = 0
        self.coming: list[GroupEvent | wire.FromRank] = []
        self.sitting: set[int] = set()
        self.gone: set[int] = set()
        self.ending = False
        self.mishaps = 4
        self.begin()

    def mishap(self) -> bool:
        """Whether something goes wrong now; not for ever."""
        happens = self.mishaps > 0 and self.chance.random() < 0.2
        self.mishaps -= happens
        return happens

    def begin(self) -> None:
        self.ending, self.sitting, self.gone, self.coming = False, set(), set(), []
        self.perform(self.group.fork(self.attempt))
        self.coming += [hello(rank, attempt=self.attempt) for rank in range(self.group.size)]

    def end_ranks(self, *, over: bool) -> None:
        """End all ranks; `over` says whether the agent ends, too."""
        if self.ending:
            return
        self.ending = True
        for rank in set(range(self.group.size)) - self.gone:
            self.exit(rank, -15, expected=True)
        self.perform(self.group.feed(Trigger.DRAINED))
        if over:
            self.perform(self.group.feed(Trigger.AGENT_ENDED))
        else:
            self.attempt += 1
            self.begin()

    def exit(self, rank: int, exitcode: int, *, expected: bool) -> None:
        self.gone.add(rank)
        self.perform(self.group.feed(exited(rank, exitcode, expected=expected)))

    def die(self, rank: int) -> None:
        """A process dies: the agent ends the others of a kept group, and starts it again."""
        if not self.ending and rank not in self.gone:
            self.exit(rank, -9, expected=False)
            self.end_ranks(over=not self.group.state.persistent)

    def work(self, rank: int) -> None:
        """Do a job: return, raise, or sit in a collective until that is freed."""
        self.coming.append(wire.Started(rank=rank, time=1.0))
        self.coming.append(wire.Arrived(rank=rank))
        what = self.chance.choice(["return", "return", "raise", "sit", "loop"])
        if what == "sit":
            self.sitting.add(rank)
        elif what != "loop":
            tallies = (called(self.chance.randrange(2)),)
            self.coming.append(
                msgspec.structs.replace(returned(rank) if what == "return" else raised(rank), tallies=tallies)
            )

    def told(self, rank: int, message: wire.ToRank) -> None:
        if rank in self.gone or self.group.state.closed:
            return
        if self.mishap():
            if self.chance.random() < 0.5:
                self.die(rank)
            return
        match message:
            case wire.Prepare():
                self.coming.append(ready(rank))
            case wire.ReportWhere():
                self.coming.append(where(rank, inside=rank in self.sitting))
            case wire.Interrupt(number=number) if rank not in self.sitting:
                self.coming.append(wire.InterruptSeen(rank=rank, number=number))
                self.coming.append(raised(rank, INTERRUPTED))
            case wire.FreeCollective():
                self.sitting.discard(rank)
                self.coming.append(raised(rank, "torch.distributed.DistBackendError", PEER_GONE))
            case wire.Recover(number=number):
                self.coming.append(wire.Recovered(rank=rank, number=number))
            case wire.Preempt():
                self.coming += [wire.Preempting(rank=rank), wire.Preempted(rank=rank)]
            case _:
                pass

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(rank, message):
                    self.told(rank, message)
                case life.SendJob(rank) if rank not in self.gone:
                    self.work(rank)
                case Order.STOP_AGENT | life.ReleaseWorkers():
                    self.end_ranks(over=True)
                case Order.RESTART_AGENT:
                    self.end_ranks(over=False)
                case _:
                    pass

    def go_on(self) -> None:
        """Let one of the messages under way arrive, or twice, or time pass."""
        if self.coming and self.chance.random() < 0.8:
            message = self.coming.pop(self.chance.randrange(len(self.coming)))
            if isinstance(message, wire.Started | wire.Arrived) or not self.mishap():
                self.perform(self.group.feed(*[message] * self.chance.choice([1, 1, 1, 2])))
            else:
                self.die(message.rank)
        else:
            self.group.now += self.chance.choice([0.05, 0.3])
            self.perform(self.group.feed(Trigger.TICK))


LEADS_TO = {
    Stage.STARTING: {Stage.RUNNING, Stage.INTERRUPTED, Stage.LEAVING},
    Stage.READY: {Stage.RUNNING},
    Stage.RUNNING: {Stage.READY, Stage.INTERRUPTED, Stage.RECOVERING, Stage.LEAVING, Stage.REPLACING},
    Stage.INTERRUPTED: {Stage.RECOVERING, Stage.LEAVING, Stage.REPLACING},
    Stage.RECOVERING: {Stage.READY, Stage.REPLACING, Stage.RUNNING, Stage.INTERRUPTED},
}
"""Each also to STARTING, when torchelastic starts others, and to CLOSED."""


@given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 3))
def test_a_job_ends_once_its_ranks_do_what_they_are_asked(chance, persistent, size):
    group = Group(size, persistent=persistent)
    group.submit()
    world, began = World(group, chance), group.now
    steps: list[tuple[float, GroupEvent]] = [(100, Trigger.INTERRUPT), (300, Trigger.INTERRUPT)]
    if chance.random() < 0.5:
        steps.insert(0, (chance.choice([0.1, 1, 10]), life.Preemption("the limit is near", 100.0)))
    while group.state.working is not None and group.now < began + 500:
        world.go_on()
        if steps and group.now > began + steps[0][0]:
            world.perform(group.feed(steps.pop(0)[1]))
    assert group.state.working is None, group.state
    assert group.open_jobs == 0
    led = {
        (before, after)
        for before, after in group.stages
        if after not in {before, Stage.STARTING, Stage.CLOSED, *LEADS_TO.get(before, ())}
    }
    assert led == set()


def test_ranks_that_are_being_replaced_are_ended_by_the_agent_when_their_session_is_closed():
    """New ones would never hear that they may leave, and the session would wait for them."""
    ready = Group(persistent=True).start()
    assert Order.STOP_AGENT not in ready.feed(Trigger.DISMISS)
    replaced = Group(persistent=True).start()
    replaced.feed(exited(1))
    assert Order.STOP_AGENT in replaced.feed(Trigger.DISMISS)
    replaced.feed(life.AttemptStarting(attempt(1)))
    assert replaced.state.stage is Stage.STARTING
    assert Order.STOP_AGENT in replaced.feed(Trigger.DISMISS)
