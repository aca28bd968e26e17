"""Who meets and when, decided without a node, a socket or a clock."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples

from nblaunch.group.lifecycle import ReleaseWorkers, Trigger
from nblaunch.group.machine import Order
from nblaunch.host.wire import (
    AdoptRanks,
    AwaitingRendezvous,
    CompleteRendezvous,
    EndGroup,
    Gone,
    NodeEnded,
    Release,
    Restart,
    ToNode,
    Workers,
)
from nblaunch.nodes.director import (
    AllStarted,
    AskForNodes,
    BeginAttempt,
    DirectorAction,
    DirectorEvent,
    DirectorStage,
    DirectorState,
    DropNode,
    EndAgent,
    EngineEnded,
    NodeCame,
    NodeLost,
    NodeOrder,
    NodeReported,
    NodesExpected,
    Ordered,
    step,
)
from nblaunch.protocol.messages import Exited

UNLIMITED = 2**31 - 1
GRACE = 2.0
KILLED = "is gone (killed, or out of reach)"


class Directed:
    """A machine that is fed by hand; each step is checked for what holds in every state."""

    def __init__(self, least: int = 2, most: int | None = None, **fields: Any) -> None:
        given = {
            "restarts_left": 0,
            "persistent": False,
            "group": "g",
            "store": ("10.0.0.1", 5),
            "grace": GRACE,
        }
        self.state = DirectorState(least=least, most=most or least, **{**given, **fields})
        self.now = 1000.0
        self.ends = 0
        self.done: list[DirectorAction] = []

    def feed(self, *events: DirectorEvent) -> list[DirectorAction]:
        actions: list[DirectorAction] = []
        for event in events:
            before = self.state
            self.state, more = step(before, event, self.now)
            assert (self.state, more) == step(before, event, self.now), "the same every time"
            self.check(before, event, more)
            actions += more
        self.done += actions
        return actions

    def check(self, before: DirectorState, event: DirectorEvent, actions: tuple[DirectorAction, ...]) -> None:
        orders = [each for each in actions if isinstance(each, NodeOrder)]
        begun = [each for each in actions if isinstance(each, BeginAttempt)]
        begun_orders = [each for each in orders if isinstance(each.message, CompleteRendezvous | AdoptRanks)]
        assert before.stage is not DirectorStage.ENDED or not actions
        assert self.state.attempt - before.attempt == len(begun) <= 1
        assert [each.node for each in begun_orders] == [node for each in begun for node in each.nodes]
        if begun:
            assert actions.index(begun[0]) < actions.index(begun_orders[0]), "the group knows of it first"
            assert before.least <= len(begun_orders) <= before.most
            self.check_ranks(before, begun[0], begun_orders)
        known = before.nodes.keys() - ({event.node} if isinstance(event, NodeLost) else set())
        assert {each.node for each in orders} <= known, "no order to a node that is lost"
        nodes = self.state.nodes
        for flag in ("waits", "started", "ended", "alive"):
            assert nodes.count(flag) == sum(getattr(each, flag) for each in nodes.values())
        if self.state.attempt >= 0:
            assert nodes.count("nodes", self.state.attempt) == len(self.state.taking_part)
        self.ends += sum(isinstance(each, EndAgent) for each in actions)
        assert self.ends == (self.state.stage is DirectorStage.ENDED)

    def check_ranks(self, before: DirectorState, begun: BeginAttempt, begun_orders: list[NodeOrder]) -> None:
        """Check that ranks are numbered without a gap, and that those that go on are there."""
        base, kept, replaced = 0, dict[int, int](), dict[int, int]()
        for rank, each in enumerate(begun_orders):
            order, nproc = each.message, self.state.nodes[each.node].nproc
            assert isinstance(order, CompleteRendezvous | AdoptRanks)
            assert (order.node_rank, order.base_rank, order.node_count) == (rank, base, len(begun_orders))
            if isinstance(order, AdoptRanks):
                node = before.nodes[each.node]
                assert node.started
                assert order.attempt == before.attempt == node.attempt
                assert order.number == begun.number
                for place in range(nproc):
                    (replaced if place in node.dead else kept)[base + place] = node.base + place
                assert order.replaced == tuple(rank for rank in replaced if rank >= base)
            else:
                assert order.attempt == begun.number
            base += nproc
        assert base == begun.world_size
        assert kept == (begun.kept or {})
        assert replaced == begun.replaced

    def after(self, seconds: float) -> list[DirectorAction]:
        self.now += seconds
        return self.feed(Trigger.TICK)

    # --- shorthands ------------------------------------------------------------------------------

    def come(self, *names: str, nproc: int = 2) -> list[DirectorAction]:
        """Let nodes come, whose agents wait at once; their places are in the order of their names."""
        events: list[DirectorEvent] = []
        for name in names:
            events += [NodeCame(name, nproc, ord(name[-1])), awaits_rendezvous(name, -1)]
        return self.feed(*events)

    def start(self, *names: str) -> Directed:
        """Have these nodes run."""
        self.feed(NodesExpected(len(names)))
        self.come(*names)
        self.feed(*(workers_started(name, self.state.attempt) for name in names))
        assert self.state.stage is DirectorStage.RUNNING
        return self

    def meet(self, *names: str) -> list[DirectorAction]:
        return self.feed(*(awaits_rendezvous(name, self.state.nodes[name].attempt) for name in names))

    def release(self, *, succeeded: bool, others: frozenset[int] = frozenset()) -> list[DirectorAction]:
        return self.feed(Ordered(self.state.attempt, ReleaseWorkers(succeeded, others)))


def awaits_rendezvous(node: str, after: int, error: str = "") -> NodeReported:
    return NodeReported(node, AwaitingRendezvous(group="g", after=after, error=error))


def workers_started(node: str, attempt: int) -> NodeReported:
    return NodeReported(node, Workers(group="g", attempt=attempt, workers=()))


def rank_gone(node: str, rank: int, *, expected: bool) -> NodeReported:
    exited = Exited(rank=rank, exitcode=1, time=0.0, expected=expected)
    return NodeReported(node, Gone(group="g", attempt=0, exited=exited))


def has_ended(node: str, error: str = "") -> NodeReported:
    return NodeReported(node, NodeEnded(group="g", error=error))


def sent(actions: list[DirectorAction], kind: type[ToNode]) -> list[str]:
    return [each.node for each in actions if isinstance(each, NodeOrder) and isinstance(each.message, kind)]


def begun(actions: list[DirectorAction]) -> list[tuple[int, int, str]]:
    return [(each.number, each.world_size, each.reason) for each in actions if isinstance(each, BeginAttempt)]


def ended(actions: list[DirectorAction]) -> list[str]:
    return [each.error for each in actions if isinstance(each, EndAgent)]


# --- an attempt begins, and ends -------------------------------------------------------------------


def test_ranks_are_in_the_order_of_places_whoever_comes_first():
    group = Directed()
    assert group.come("hB") == []
    actions = group.come("hA", nproc=3)
    assert actions[0] == BeginAttempt(0, 5, "started", ("hA", "hB"))
    meet = actions[2]
    assert isinstance(meet, NodeOrder)
    assert meet.node == "hB"
    assert meet.message == CompleteRendezvous(
        group="g",
        attempt=0,
        node_rank=1,
        node_count=2,
        base_rank=3,
        world_size=5,
        store=("10.0.0.1", 5),
    )


def test_nodes_without_a_place_come_in_the_order_of_arrival_behind_the_others():
    group = Directed(least=3)
    group.feed(NodeCame("x", 1, -1), NodeCame("y", 1, -1), NodeCame("z", 1, 0))
    actions = group.feed(awaits_rendezvous("y", -1), awaits_rendezvous("z", -1), awaits_rendezvous("x", -1))
    assert sent(actions, CompleteRendezvous) == ["z", "x", "y"]


def test_a_fresh_group_ends_once_its_ranks_have_succeeded():
    group = Directed()
    group.come("hA", "hB")
    assert group.feed(workers_started("hA", 0)) == []
    assert group.feed(workers_started("hB", 0)) == [AllStarted(0, 4)]
    assert sent(group.release(succeeded=True), Release) == ["hA", "hB"]
    assert group.feed(rank_gone("hA", 0, expected=False), has_ended("hA")) == []
    assert ended(group.feed(has_ended("hB"))) == [""]


def test_a_failure_begins_again_as_often_as_it_may():
    group = Directed(restarts_left=1).start("hA", "hB")
    actions = group.release(succeeded=False, others=frozenset({2, 3}))
    assert [each.message for each in actions if isinstance(each, NodeOrder)] == [
        Release(group="g", attempt=0, succeeded=False, others=(2, 3))
    ] * 2
    assert group.meet("hA") == []
    assert begun(group.meet("hB")) == [(1, 4, "failure")]
    group.feed(workers_started("hA", 1), workers_started("hB", 1))
    group.release(succeeded=False)
    assert sent(group.meet("hA", "hB"), EndGroup) == ["hA", "hB"]
    assert ended(group.feed(has_ended("hA"), has_ended("hB"))) == [""]


def test_what_is_ordered_while_ranks_are_started_reaches_them_then():
    """Until a node has its ranks, there is nothing that could be released or restarted."""
    for order, kind in (
        (Ordered(0, ReleaseWorkers(succeeded=False, others=frozenset())), Release),
        (Ordered(0, Order.RESTART_AGENT), Restart),
    ):
        group = Directed(restarts_left=1)
        group.come("hA", "hB")
        group.feed(workers_started("hA", 0))
        assert sent(group.feed(order), kind) == ["hA"]
        assert sent(group.feed(workers_started("hB", 0)), kind) == ["hB"]


def test_an_order_of_an_attempt_that_is_over_does_nothing():
    group = Directed(restarts_left=1).start("hA", "hB")
    group.release(succeeded=False)
    group.meet("hA", "hB")
    state = group.state
    for order in (
        Ordered(0, ReleaseWorkers(succeeded=True, others=frozenset())),
        Ordered(0, Order.RESTART_AGENT),
        Ordered(0, Order.REJOIN_NODES),
    ):
        assert group.feed(order) == []
    assert group.feed(awaits_rendezvous("hA", 0), workers_started("hA", 0)) == []
    assert group.state == state


def test_more_nodes_than_enough_are_awaited_for_a_moment():
    group = Directed(1, 3)
    group.feed(NodesExpected(2))
    assert group.come("hA") == []
    assert begun(group.come("hB")) == [(0, 4, "started")]
    group = Directed(1, 3)
    group.feed(NodesExpected(2))
    assert group.come("hA") == []
    assert group.after(1) == []
    assert begun(group.after(10)) == [(0, 2, "started")]


# --- kept ranks ------------------------------------------------------------------------------------


def dies(*ranks: tuple[str, int]) -> list[NodeReported]:
    return [rank_gone(node, rank, expected=False) for node, rank in ranks]


def test_a_kept_rank_that_has_died_is_replaced_on_its_node_once_the_group_says_so():
    group = Directed(persistent=True).start("hA", "hB")
    assert group.feed(*dies(("hB", 3))) == []
    assert group.after(10) == []
    group.feed(Ordered(0, Order.REGROUP_NODES))
    actions = group.after(0.1)
    assert actions[0] == BeginAttempt(1, 4, "membership", ("hA", "hB"), {0: 0, 1: 1, 2: 2}, {3: 3})
    orders = {each.node: each.message for each in actions if isinstance(each, NodeOrder)}
    assert [each.replaced for each in orders.values() if isinstance(each, AdoptRanks)] == [(), (3,)]
    assert group.feed(workers_started("hB", 1)) == [AllStarted(1, 4)]


def test_a_rank_that_dies_while_another_is_replaced_is_replaced_next():
    group = Directed(persistent=True).start("hA", "hB")
    group.feed(*dies(("hB", 3)), Ordered(0, Order.REGROUP_NODES))
    group.after(0.1)
    group.feed(*dies(("hA", 0)), Ordered(1, Order.REGROUP_NODES))
    assert group.after(0.1) == [], "one is still starting"
    group.feed(workers_started("hB", 1))
    assert begun(group.after(0.1)) == [(2, 4, "membership")]
    assert sent(group.done, Restart) == []


def test_all_ranks_of_a_node_are_replaced_beside_a_node_that_comes_and_one_that_is_lost():
    group = Directed(1, 3, persistent=True).start("hA", "hB")
    group.come("hC")
    group.feed(*dies(("hB", 2), ("hB", 3)), NodeLost("hA", KILLED), Ordered(0, Order.REGROUP_NODES))
    assert group.state.stage is DirectorStage.RUNNING
    assert begun(group.after(0.1)) == [], "no rank is left that goes on"
    assert sent(group.done, Restart) == ["hB"]
    group = Directed(1, 3, persistent=True).start("hA", "hB", "hC")
    group.feed(*dies(("hB", 2), ("hB", 3)), NodeLost("hA", KILLED), Ordered(0, Order.REGROUP_NODES))
    (first, *_) = group.after(0.1)
    assert first == BeginAttempt(1, 4, "membership", ("hB", "hC"), {2: 4, 3: 5}, {0: 2, 1: 3})


def test_no_rank_is_started_on_a_node_that_the_engine_is_about_to_end():
    group = Directed(1, 2, persistent=True).start("hA", "hB")
    group.feed(rank_gone("hB", 3, expected=True), Ordered(0, Order.REGROUP_NODES))
    assert begun(group.after(1) + group.after(1)) == []
    group.feed(NodeLost("hB", KILLED))
    assert begun(group.after(1)) == [(1, 2, "membership")]


def test_all_kept_ranks_are_started_anew_without_a_limit_once_all_have_died():
    group = Directed(persistent=True, restarts_left=UNLIMITED).start("hA", "hB")
    assert group.feed(*dies(("hB", 3), ("hB", 2), ("hA", 0))) == []
    assert group.after(1) == []
    assert group.feed(*dies(("hA", 1))) == []
    assert sent(group.after(0.1), Restart) == ["hA", "hB"]
    assert group.feed(rank_gone("hA", 0, expected=True)) == []
    assert begun(group.meet("hB", "hA")) == [(1, 4, "failure")]


# --- nodes are lost ----------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, 3])
def test_a_group_that_is_dismissed_while_nodes_are_awaited_ends_at_once(least):
    group = Directed(least, 3, persistent=True)
    group.feed(NodesExpected(3))
    group.come("hA")
    actions = group.feed(Ordered(-1, ReleaseWorkers(succeeded=True, others=frozenset())))
    assert sent(actions, EndGroup) == ["hA"]
    assert ended(group.feed(has_ended("hA"))) == [""]


def test_without_a_node_in_its_place_a_kept_group_ends_and_names_the_one_that_was_lost():
    group = Directed(persistent=True, restarts_left=UNLIMITED).start("hA", "hB")
    group.feed(NodeLost("hB", KILLED))
    assert sent(group.after(0.2), Restart) == ["hA"]
    assert sent(group.meet("hA"), EndGroup) == ["hA"]
    (error,) = ended(group.feed(has_ended("hA")))
    assert error == f"node hB was lost: it {KILLED}"


def test_a_node_comes_in_the_place_of_one_that_was_lost():
    group = Directed(persistent=True, restarts_left=UNLIMITED, replacements_left=1).start("hA", "hB")
    group.feed(NodeLost("hA", KILLED))
    group.after(0.2)
    assert group.meet("hB") == [AskForNodes(1)]
    assert begun(group.come("hC")) == [(1, 4, "failure")]
    group.feed(workers_started("hB", 1), workers_started("hC", 1), NodeLost("hC", KILLED))
    group.after(0.2)
    assert sent(group.meet("hB"), EndGroup) == ["hB"]


def test_a_node_that_does_not_come_in_time_is_waited_for_no_longer():
    group = Directed(persistent=True, restarts_left=9, replacements_left=1, join_timeout=60).start("hA", "hB")
    group.feed(NodeLost("hA", KILLED))
    group.after(0.2)
    group.meet("hB")
    assert group.after(59) == []
    assert sent(group.after(2), EndGroup) == ["hB"]
    (error,) = ended(group.feed(has_ended("hB")))
    assert error == f"node hA was lost: it {KILLED}, and no other node replaced it within 60 s"


def test_with_enough_nodes_kept_ranks_go_on_without_a_lost_node_and_no_restart_is_taken():
    group = Directed(1, 2, persistent=True, restarts_left=1).start("hA", "hB")
    assert group.feed(Ordered(0, Order.REGROUP_NODES), NodeLost("hA", KILLED)) == []
    actions = group.after(0.2)
    assert actions == [
        BeginAttempt(1, 2, "membership", ("hB",), {0: 2, 1: 3}),
        NodeOrder(
            "hB",
            AdoptRanks(group="g", attempt=0, number=1, node_rank=0, node_count=1, base_rank=0, world_size=2),
        ),
        AllStarted(1, 2),
    ]
    assert (group.state.stage, group.state.restarts_left) == (DirectorStage.RUNNING, 1)
    assert group.feed(awaits_rendezvous("hB", 0)) == [], "of the attempt before"
    assert sent(group.feed(*dies(("hB", 0), ("hB", 1))) + group.after(0.2), Restart) == ["hB"]
    assert begun(group.meet("hB")) == [(2, 2, "failure")]


def test_another_node_is_asked_for_while_the_others_go_on():
    group = Directed(1, 2, persistent=True, restarts_left=9, replacements_left=1, join_timeout=60)
    group.start("hA", "hB")
    assert group.feed(Ordered(0, Order.REGROUP_NODES), NodeLost("hB", KILLED)) == [AskForNodes(1)]
    assert sent(group.after(0.1), AdoptRanks) == ["hA"]
    group.feed(NodeLost("hA", KILLED))
    assert group.state.stage is DirectorStage.WAITING
    assert ended(group.after(61)) == [
        f"node hA was lost: it {KILLED}, and no other node replaced it within 60 s"
    ]


def test_nodes_that_are_lost_together_are_gone_together():
    group = Directed(1, 3, persistent=True).start("hA", "hB", "hC")
    group.feed(Ordered(0, Order.REGROUP_NODES), NodeLost("hA", KILLED))
    group.now += 0.02
    group.feed(Ordered(0, Order.REGROUP_NODES), NodeLost("hC", KILLED))
    assert sent(group.after(0.1), AdoptRanks) == ["hB"]
    assert [each.kept for each in group.done if isinstance(each, BeginAttempt)] == [None, {0: 2, 1: 3}]


def test_a_node_that_comes_late_joins_the_ranks_that_are_there_when_the_group_lets_it():
    group = Directed(1, 2, persistent=True).start("hA")
    assert group.come("hB") == [Trigger.NODE_ARRIVED]
    assert group.after(10) == []
    group.feed(Ordered(0, Order.REGROUP_NODES))
    actions = group.after(0.1)
    assert actions[0] == BeginAttempt(1, 4, "membership", ("hA", "hB"), {0: 0, 1: 1})
    assert (sent(actions, AdoptRanks), sent(actions, CompleteRendezvous)) == (["hA"], ["hB"])
    assert group.feed(workers_started("hB", 1)) == [AllStarted(1, 4)]


def test_a_node_that_came_while_others_met_is_known_once_they_have():
    group = Directed(1, 2, persistent=True)
    group.feed(NodesExpected(1))
    group.come("hA")
    assert group.come("hB") == []
    assert group.feed(workers_started("hA", 0)) == [AllStarted(0, 2), Trigger.NODE_ARRIVED]


def test_a_node_that_is_lost_before_its_ranks_have_joined_costs_the_others_nothing():
    group = Directed(1, 2, persistent=True).start("hA")
    group.come("hB")
    group.feed(Ordered(0, Order.REGROUP_NODES))
    group.after(0.1)
    group.feed(NodeLost("hB", KILLED))
    assert begun(group.after(0.1)) == [(2, 2, "membership")]
    assert sent(group.done, Restart) == []


def test_fresh_ranks_begin_again_without_a_lost_node_as_the_lifecycle_orders():
    group = Directed(1, 2).start("hA", "hB")
    assert group.feed(NodeLost("hB", KILLED)) == []
    assert sent(group.feed(Ordered(0, Order.REJOIN_NODES)), Restart) == ["hA"]
    assert begun(group.meet("hA")) == [(1, 2, "membership")]


def test_the_failure_of_fresh_ranks_on_a_lost_node_is_the_reason_for_the_end():
    group = Directed().start("hA", "hB")
    group.feed(NodeLost("hB", KILLED))
    group.release(succeeded=False, others=frozenset({0, 1}))
    group.meet("hA")
    assert ended(group.feed(has_ended("hA"))) == [""]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_node_that_is_lost_before_it_has_ranks_is_named(persistent):
    group = Directed(persistent=persistent, restarts_left=UNLIMITED if persistent else 0)
    group.come("hA", "hB")
    group.feed(workers_started("hA", 0))
    assert sent(group.feed(NodeLost("hB", KILLED)), Restart) == ["hA"]
    group.meet("hA")
    assert ended(group.feed(has_ended("hA"))) == [f"node hB was lost: it {KILLED}"]


def test_people_who_start_nodes_may_take_their_time_before_the_first_attempt():
    group = Directed(patient=True)
    group.come("hA")
    assert group.feed(NodeLost("hA", KILLED)) == []
    assert begun(group.come("hB", "hC")) == [(0, 4, "started")]


def test_an_engine_that_takes_its_nodes_back_is_the_reason_for_the_end():
    group = Directed().start("hA", "hB")
    assert sent(group.feed(EngineEnded("slurm job 17 was cancelled")), EndGroup) == ["hA", "hB"]
    group.feed(NodeLost("hA", KILLED))
    assert ended(group.feed(NodeLost("hB", KILLED))) == ["slurm job 17 was cancelled"]


def test_ranks_that_have_succeeded_leave_whatever_the_engine_does():
    group = Directed().start("hA", "hB")
    group.release(succeeded=True)
    assert group.feed(EngineEnded("gone")) == []
    assert ended(group.feed(has_ended("hA"), NodeLost("hB", KILLED))) == [""]


def test_a_node_that_does_not_end_a_group_is_given_up():
    group = Directed().start("hA", "hB")
    group.feed(Ordered(0, Order.STOP_AGENT), has_ended("hA"))
    assert group.after(GRACE + 4) == []
    assert group.after(2) == [DropNode("hB", "did not end a group in time"), EndAgent()]


def test_an_agent_that_ends_by_itself_ends_the_group_and_says_why():
    group = Directed().start("hA", "hB")
    assert sent(group.feed(has_ended("hB", "LaunchError: no fork server")), EndGroup) == ["hA"]
    assert ended(group.feed(has_ended("hA"))) == ["node hB ended its ranks: LaunchError: no fork server"]


# --- whatever happens --------------------------------------------------------------------------------

NAMES = ("hA", "hB", "hC", "hD")


@st.composite
def groups(draw: st.DrawFn) -> Directed:
    least = draw(st.integers(1, 3))
    persistent = draw(st.booleans())
    restarts = draw(st.integers(0, 2))
    return Directed(
        least,
        draw(st.integers(least, 3)),
        persistent=persistent,
        restarts_left=UNLIMITED if persistent else restarts,
        replacements_left=restarts,
        patient=draw(st.booleans()),
    )


ORDERS: tuple[Order | ReleaseWorkers, ...] = (
    *(Order.RESTART_AGENT, Order.REJOIN_NODES, Order.REGROUP_NODES, Order.STOP_AGENT),
    *(ReleaseWorkers(succeeded, frozenset()) for succeeded in (False, True)),
)


def any_event(draw: st.DrawFn, state: DirectorState) -> DirectorEvent:
    node = draw(st.sampled_from(NAMES))
    attempt = state.attempt - draw(st.sampled_from((0, 0, 0, 1)))
    events: list[DirectorEvent] = [
        NodeCame(f"{node}-{state.came}" if node in state.nodes else node, 2, ord(node[-1])),
        NodesExpected(draw(st.integers(0, 4))),
        NodeLost(node, KILLED),
        awaits_rendezvous(node, state.nodes[node].attempt if node in state.nodes else -1),
        workers_started(node, attempt),
        rank_gone(node, 0, expected=draw(st.booleans())),
        has_ended(node),
        *[Ordered(attempt, draw(st.sampled_from(ORDERS)))] * 3,
        EngineEnded("taken back"),
        Trigger.TICK,
    ]
    return draw(st.sampled_from(events))


@given(st.data(), groups())
@examples(300)
def test_whatever_comes_a_group_that_is_stopped_ends_once(data, group):
    for _ in range(data.draw(st.integers(0, 30))):
        group.now += data.draw(st.sampled_from((0.0, 0.05, 1.0, 10.0)))
        group.feed(any_event(data.draw, group.state))
    group.feed(Ordered(0, Order.STOP_AGENT))
    group.after(GRACE + 10)
    assert group.state.stage is DirectorStage.ENDED


class Obedient:
    """Nodes that do what they are ordered, sooner or later."""

    def __init__(self, group: Directed) -> None:
        self.group = group
        self.answers: dict[str, deque[DirectorEvent]] = {}
        self.attempts: dict[str, int] = {}

    def feed(self, *events: DirectorEvent) -> None:
        for each in self.group.feed(*events):
            if isinstance(each, NodeOrder) and each.node in self.answers:
                self.obey(each.node, each.message)
            elif isinstance(each, DropNode):
                self.answers.pop(each.node, None)

    def obey(self, node: str, order: ToNode) -> None:
        answers = self.answers[node]
        match order:
            case CompleteRendezvous(attempt=attempt):
                self.attempts[node] = attempt
                answers.append(workers_started(node, attempt))
            case AdoptRanks(attempt=attempt, number=number) if attempt == self.attempts[node]:
                self.attempts[node] = number
                if order.replaced:
                    answers.append(workers_started(node, number))
                # What it has said of the attempt before, the fleet takes as said of this one.
                self.answers[node] = deque(
                    awaits_rendezvous(node, number)
                    if isinstance(getattr(each, "message", None), AwaitingRendezvous)
                    else each
                    for each in answers
                )
            case Restart(attempt=attempt) if attempt == self.attempts[node]:
                answers.append(awaits_rendezvous(node, attempt))
            case Release(succeeded=False):
                answers.append(awaits_rendezvous(node, self.attempts[node]))
            case Release() | EndGroup():
                answers.append(has_ended(node))

    def answer(self, node: str) -> None:
        if self.answers[node]:
            self.feed(self.answers[node].popleft())

    def settle(self) -> None:
        """Let all answer, and all time pass that is awaited."""
        while True:
            waiting = [name for name, answers in self.answers.items() if answers]
            if waiting:
                self.answer(waiting[0])
            elif self.group.state.due < float("inf"):
                self.group.now = max(self.group.now, self.group.state.due)
                self.feed(Trigger.TICK)
            else:
                return


@given(st.data(), groups())
@examples(300)
def test_with_nodes_that_obey_a_group_never_gets_stuck(data, group):
    nodes = Obedient(group)
    names = iter(f"{name}{number}" for number in range(9) for name in NAMES)
    for _ in range(data.draw(st.integers(1, 25))):
        present, state = sorted(nodes.answers), group.state
        what = data.draw(st.sampled_from(("come", "answer", "answer", "answer", "lose", "die", "order")))
        if what == "come" and len(present) < 3:
            name = next(names)
            nodes.answers[name], nodes.attempts[name] = deque([awaits_rendezvous(name, -1)]), -1
            nodes.feed(NodeCame(name, 2, -1))
        elif what == "order":
            order = data.draw(
                st.sampled_from(
                    (
                        Ordered(state.attempt, Order.REJOIN_NODES),
                        Ordered(state.attempt, Order.REGROUP_NODES),
                        Ordered(state.attempt, Order.RESTART_AGENT),
                        Ordered(state.attempt, ReleaseWorkers(succeeded=False, others=frozenset())),
                        Ordered(state.attempt, ReleaseWorkers(succeeded=True, others=frozenset())),
                        Trigger.TICK,
                    )
                )
            )
            nodes.feed(order)
        elif present and what != "come":
            node = data.draw(st.sampled_from(present))
            if what == "answer":
                nodes.answer(node)
            elif what == "lose":
                del nodes.answers[node]
                if state.persistent and len(state.nodes) > state.least:
                    nodes.feed(Ordered(state.attempt, Order.REGROUP_NODES))  # as the lifecycle does
                nodes.feed(NodeLost(node, KILLED))
            elif state.nodes.get(node) is not None and state.nodes[node].started:
                base = state.nodes[node].base
                if not state.persistent:
                    nodes.answers[node].append(awaits_rendezvous(node, nodes.attempts[node]))
                nodes.feed(rank_gone(node, base + data.draw(st.integers(0, 1)), expected=False))
                # As the lifecycle does.
                order = ReleaseWorkers(succeeded=False, others=frozenset())
                nodes.feed(Ordered(state.attempt, Order.REGROUP_NODES if state.persistent else order))
    nodes.settle()
    state = group.state
    assert state.stage in (DirectorStage.WAITING, DirectorStage.RUNNING, DirectorStage.ENDED)
    if state.stage is DirectorStage.WAITING:
        assert sum(node.waits for node in state.nodes.values()) < state.least, (
            "enough wait, and nothing comes"
        )
    if state.stage is DirectorStage.RUNNING:
        assert len(state.taking_part) >= state.least or not state.persistent
        assert all(node.started for node in state.taking_part.values()) or not state.persistent


def test_a_node_among_4096_costs_little_more_than_one_among_256():
    def seconds(count: int) -> float:
        state = DirectorState(least=count, most=count, restarts_left=0, persistent=True, group="g")
        names = [f"n{number}" for number in range(count)]
        events: tuple[DirectorEvent, ...] = (
            *(NodeCame(name, 8, place) for place, name in enumerate(names)),
            NodesExpected(count),
            *(awaits_rendezvous(name, -1) for name in names),
            *(workers_started(name, 0) for name in names),
            Ordered(0, Order.STOP_AGENT),
            *(has_ended(name) for name in names),
        )
        began = time.thread_time()
        for event in events:
            state, _ = step(state, event, 0.0)
        assert state.stage is DirectorStage.ENDED
        return (time.thread_time() - began) / count

    few, many = (min(seconds(count) for _ in range(3)) for count in (256, 4096))
    print(f"{1e6 * few:.1f} us for each of 256 nodes, {1e6 * many:.1f} us for each of 4,096")
    # A step that went through all nodes would take 16 times as long.
    assert many <= 5 * few
