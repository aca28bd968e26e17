"""A deadlock is named as a circle exactly where there is one, as a model that runs the programs knows."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from nblaunch.diagnose import hang
from nblaunch.group.locating import without_other_waits
from nblaunch.protocol.messages import DEFAULT_GROUP, STORE, Collective, Connection, FrameRecord, Where
from nblaunch.protocol.reports import HangReport
from nblaunch.rank import flight_recorder

PROGRAMS = 1_000

# --- the model: ranks that run programs, one step after the other ----------------------------------


@dataclass(frozen=True)
class Group:
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Together:
    """A collective. `needs` is the one rank that a member waits for; without it, for all."""

    group: int
    needs: int | None = None


@dataclass(frozen=True)
class Transfer:
    """A send or a receive, which ends when the other end is there; without `other`, it is from anyone."""

    way: str
    other: int | None
    group: int
    tag: int = 0


@dataclass(frozen=True)
class Away:
    """A rank that does not come to its next step while anybody looks: it computes, or is in C code."""

    silent: bool


Step = Together | Transfer | Away


@dataclass
class World:
    """Programs under way: `at` is each rank's step, `ended` its collectives of each group that have ended."""

    groups: list[Group]
    programs: list[list[Step]]
    at: list[int] = field(default_factory=list)
    ended: list[Counter[int]] = field(default_factory=list)
    genies: set[int] = field(default_factory=set)
    """Ranks that are taken to do whatever anybody waits for."""

    def __post_init__(self) -> None:
        self.at = [0] * len(self.programs)
        self.ended = [Counter() for _ in self.programs]

    def step(self, rank: int) -> Step | None:
        program = self.programs[rank]
        return program[self.at[rank]] if self.at[rank] < len(program) else None

    def begun(self, rank: int, group: int) -> int:
        step = self.step(rank)
        return self.ended[rank][group] + (isinstance(step, Together) and step.group == group)

    def lacks(self, rank: int) -> set[int]:
        """Return the ranks without which a rank's step does not end, as far as they are no genies."""
        step = self.step(rank)
        if isinstance(step, Together):
            number = self.begun(rank, step.group)
            members = self.groups[step.group].ranks if step.needs is None else (step.needs,)
            return {each for each in members if self.begun(each, step.group) < number} - self.genies
        if isinstance(step, Transfer):
            others = set(self.groups[step.group].ranks) - {rank} if step.other is None else {step.other}
            if step.other is None and self.genies:
                # One that has left does not send any more, so it is one of the others that has to.
                others -= {each for each in others if self.step(each) is None}
            ready = {each for each in others if each in self.genies or self.meets(rank, step, each)}
            return set() if ready else others
        return set()

    def meets(self, rank: int, step: Transfer, other: int) -> bool:
        theirs = self.step(other)
        return (
            isinstance(theirs, Transfer)
            and (theirs.group, theirs.tag) == (step.group, step.tag)
            and theirs.way != step.way
            and theirs.other in (rank, None)
            and step.other in (other, None)
        )

    def end(self, rank: int) -> None:
        step = self.step(rank)
        if isinstance(step, Together):
            self.ended[rank][step.group] += 1
        self.at[rank] += 1

    def run(self) -> None:
        """Let all go on until none can; a transfer ends on both sides at once."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.programs)):
                step = self.step(rank)
                if step is None or isinstance(step, Away) or self.lacks(rank):
                    continue
                moved = True
                if isinstance(step, Transfer):
                    everyone = range(len(self.programs))
                    other = next((each for each in everyone if self.meets(rank, step, each)), None)
                    if other is not None:
                        self.end(other)
                self.end(rank)

    def waiting(self) -> set[int]:
        return {rank for rank in range(len(self.programs)) if self.lacks(rank)}

    def deadlocked(self) -> dict[int, set[int]]:
        """Return who waits without end though all other ranks come to everything, and for whom."""
        world = World(self.groups, self.programs)
        world.at, world.ended = list(self.at), [Counter(each) for each in self.ended]
        while freed := set(range(len(self.programs))) - world.waiting() - world.genies:
            world.genies |= freed
        return {rank: world.lacks(rank) for rank in world.waiting()}

    def circle(self) -> set[int]:
        """Return the ranks that wait for themselves by way of others, and those in the same collective."""
        after = self.deadlocked()
        reached = {rank: set(others) for rank, others in after.items()}
        for _ in after:
            for others in reached.values():
                others.update(*(reached.get(each, ()) for each in tuple(others)))
        inside = {rank for rank, others in reached.items() if rank in others}
        same = {self.collective(rank) for rank in inside} - {None}
        return inside | {rank for rank in after if self.collective(rank) in same}

    def collective(self, rank: int) -> tuple[int, int] | None:
        """Return the group and the number of the collective that a rank is in."""
        step = self.step(rank)
        return (step.group, self.begun(rank, step.group)) if isinstance(step, Together) else None


# --- what the ranks of a model say -----------------------------------------------------------------


def answer(world: World, rank: int, backend: str, ahead: int) -> Where:
    """Return what a rank says; on a GPU it has queued up to `ahead` steps behind the one that it is in."""
    recent = []
    counts: Counter[int] = Counter()
    program = world.programs[rank]
    for place, each in enumerate(program[: world.at[rank] + 1 + (ahead if backend == "nccl" else 0)]):
        if isinstance(each, Away):
            break
        if isinstance(each, Together):
            counts[each.group] += 1
            recent.append(
                together(world, each, counts[each.group], backend, completed=place < world.at[rank])
            )
    step = world.step(rank)
    waits: tuple[Collective, ...] = ()
    if isinstance(step, Together) and world.lacks(rank):
        waits = (together(world, step, world.begun(rank, step.group), backend),)
    elif isinstance(step, Transfer):
        waits = (transfer(world, rank, step, backend),)
    frame = FrameRecord("Cell In[1]", world.at[rank] + 1, "<module>", "")
    last = {each.key: each for each in recent}
    return Where(
        rank=rank, frames=(frame,), collectives=tuple(last.values()), recent=tuple(recent), waits=waits
    )


def together(
    world: World, step: Together, number: int, backend: str, *, completed: bool = False
) -> Collective:
    group = world.groups[step.group]
    name = "all_reduce" if step.needs is None else "broadcast"
    return Collective(group.name, number, name, completed=completed, backend=backend, ranks=group.ranks)


def transfer(world: World, rank: int, step: Transfer, backend: str) -> Collective:
    group = world.groups[step.group]
    others = tuple(each for each in group.ranks if each != rank) if step.other is None else (step.other,)
    return Collective(
        group.name,
        world.at[rank],  # any number
        step.way,
        backend=backend,
        ranks=group.ranks,
        sends=others if step.way == "send" else (),
        receives=others if step.way == "recv" else (),
        tag=step.tag,
        from_any=step.other is None,
    )


def report_of(world: World, backend: str = "gloo", ahead: int = 0) -> HangReport:
    ranks = range(len(world.programs))
    finished = [rank for rank in ranks if world.step(rank) is None]
    silent = [rank for rank in ranks if world.step(rank) == Away(silent=True)]
    answers = {
        rank: answer(world, rank, backend, ahead) for rank in ranks if rank not in (*finished, *silent)
    }
    return hang.report(answers, silent=dict.fromkeys(silent, ""), finished=finished)


# --- programs --------------------------------------------------------------------------------------


def programs(chance: random.Random, *, rooted: bool) -> World:
    """Return programs that are in order, with up to four mistakes; `rooted`, with broadcasts among them."""
    size = chance.randint(2, 16)
    groups = [Group(DEFAULT_GROUP, tuple(range(size)))]
    small = chance.random() < 0.4  # then there may be several circles
    for number in range(1, 4 if small else chance.randint(2, 4)):
        picked = sorted(chance.sample(range(size), chance.randint(2, min(size, 4) if small else size)))
        groups.append(Group(chance.choice((str(number), f"mesh_{number}")), tuple(picked)))
    world: list[list[Step]] = [[] for _ in range(size)]
    for _ in range(16 if small else chance.randint(3, 12)):
        group = chance.randrange(small, len(groups))
        members = list(groups[group].ranks)
        if chance.random() < 0.3:
            sender, receiver = chance.sample(members, 2)
            tag = chance.choice((0, 0, 7))
            world[sender].append(Transfer("send", receiver, group, tag))
            anyone = chance.random() < 0.2
            world[receiver].append(Transfer("recv", None if anyone else sender, group, tag))
        else:
            needs = chance.choice(members) if rooted and chance.random() < 0.5 else None
            for rank in members:
                world[rank].append(Together(group, needs))
    for _ in range(6 if small else chance.choice((0, 1, 1, 2, 4))):
        mistake(chance, chance.choice(world))
    return World(groups, world)


def mistake(chance: random.Random, program: list[Step]) -> None:
    """Swap two steps, leave one out, end early, compute for long, or be in C code."""
    if len(program) < 2:
        return
    place, other = chance.sample(range(len(program)), 2)
    match chance.choice(("swap", "swap", "swap", "skip", "left", "away", "silent")):
        case "swap":
            program[place], program[other] = program[other], program[place]
        case "skip":
            del program[place]
        case "left":
            del program[place:]
        case what:
            program.insert(place, Away(silent=what == "silent"))


def named(report: HangReport) -> set[int]:
    return {rank for ranks in report.deadlocks for rank in ranks}


# --- the promises ----------------------------------------------------------------------------------


def test_the_circle_is_named_exactly_where_there_is_one():
    found: Counter[str] = Counter()
    for seed in range(PROGRAMS):
        chance = random.Random(seed)
        world = programs(chance, rooted=False)
        world.run()
        backend, ahead = chance.choice(("gloo", "nccl")), chance.randint(0, 4)
        report = report_of(world, backend, ahead)
        assert named(report) == world.circle(), seed
        lines = [each for each in report.findings if each.startswith("deadlock: ")]
        assert len(lines) == len(report.deadlocks), seed
        assert sum(map(len, report.deadlocks)) == len(named(report)), seed
        kind = "circle" if report.deadlocks else "waits" if world.waiting() else "ends"
        found[f"{kind} {backend}"] += 1
        found["several"] += len(report.deadlocks) > 1
        found["beside a circle"] += bool(report.deadlocks) and world.waiting() > world.circle()
    for kind, at_least in (("circle", 100), ("waits", 100), ("ends", 50)):
        assert min(found[f"{kind} {backend}"] for backend in ("gloo", "nccl")) > at_least, found
    assert found["several"] > 5, found
    assert found["beside a circle"] > 50, found


def test_where_the_awaited_rank_is_not_known_a_circle_is_named_only_if_it_is_one():
    """Each rank of a broadcast waits for one other, and nobody says for which."""
    found = 0
    for seed in range(PROGRAMS // 2):
        world = programs(random.Random(seed), rooted=True)
        world.run()
        report = report_of(world)
        assert named(report) <= world.deadlocked().keys(), seed
        found += bool(report.deadlocks)
    assert found > 50


# --- in words --------------------------------------------------------------------------------------

EVERYONE = tuple(range(64))


def waits(rank: int, *operations: Collective, line: int = 1, begun: tuple[Collective, ...] = ()) -> Where:
    frame = FrameRecord("Cell In[1]", line, "<module>", "")
    recent = (*begun, *(each for each in operations if not (each.peers or each.backend == STORE)))
    return Where(rank=rank, frames=(frame,), collectives=recent, recent=recent, waits=operations)


def of(
    group: str, sequence: int, operation: str, ranks: tuple[int, ...], backend: str = "gloo"
) -> Collective:
    return Collective(group, sequence, operation, backend=backend, ranks=ranks)


def receive(source: int, *, sequence: int = 0, tag: int = 0) -> Collective:
    return Collective(DEFAULT_GROUP, sequence, "recv", backend="gloo", receives=(source,), tag=tag)


def send(to: int, *, sequence: int = 0, tag: int = 0) -> Collective:
    return Collective(DEFAULT_GROUP, sequence, "send", backend="gloo", sends=(to,), tag=tag)


def findings(*answers: Where, **what: object) -> tuple[str, ...]:
    return hang.report({each.rank: each for each in answers}, **what).findings  # type: ignore[arg-type]


def test_two_groups_that_are_used_in_another_order_are_named_with_the_lines():
    shard, replicate = (
        of("mesh_shard", 11, "all_to_all", EVERYONE),
        of("mesh_replicate", 4, "all_reduce", EVERYONE),
    )
    late = (62, 63)
    told = findings(
        *(
            waits(rank, replicate, line=14) if rank in late else waits(rank, shard, line=9)
            for rank in EVERYONE
        )
    )
    assert "".join(told) == (
        "deadlock: ranks 0-61 are in all_to_all #11 of mesh_shard and wait for ranks 62-63; "
        "these are in all_reduce #4 of mesh_replicate and wait for ranks 0-61. "
        "Two groups are used in another order: rank 0 at cell line 9; rank 62 at cell line 14."
    )


def test_the_parts_of_a_mesh_are_one_part_of_the_circle():
    """Rows and columns of 2 x 2 ranks: ranks 0 and 3 begin with their rows, 1 and 2 with their columns."""
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    row = {rank: of("mesh_row", 1, "all_reduce", ranks) for ranks in rows for rank in ranks}
    column = {rank: of("mesh_column", 1, "all_reduce", ranks) for ranks in columns for rank in ranks}
    told = findings(*(waits(rank, (row if rank in (0, 3) else column)[rank]) for rank in range(4)))
    assert "".join(told) == (
        "deadlock: ranks 0,3 are in all_reduce #1 of mesh_row and wait for ranks 1-2; "
        "these are in all_reduce #1 of mesh_column and wait for ranks 0,3. "
        "Two groups are used in another order: rank 0 at cell line 1; rank 1 at cell line 1."
    )


def test_ranks_that_receive_from_each_other_are_a_circle_and_hosts_are_named():
    told = findings(waits(0, receive(1), line=3), waits(1, receive(0), line=5), hosts={0: "hA", 1: "hB"})
    assert "".join(told) == (
        "deadlock: rank 0 on hA, rank 1 on hB are in recv and wait for each other. "
        "Their calls: rank 0 on hA at cell line 3; rank 1 on hB at cell line 5."
    )


@pytest.mark.parametrize(
    ("one", "another", "circle"),
    [
        (send(1), receive(0), False),
        (send(1, tag=1), receive(0, tag=2), True),
        (send(1), send(0), True),
        (receive(1), receive(0), True),
        (
            Collective(DEFAULT_GROUP, 1, "batch_isend_irecv", sends=(1,), receives=(1,), backend="gloo"),
            send(0),
            False,
        ),
        (
            Collective(DEFAULT_GROUP, 1, "batch_isend_irecv", sends=(1,), receives=(1,), backend="gloo"),
            Collective(DEFAULT_GROUP, 2, "batch_isend_irecv", sends=(0,), receives=(0,), backend="gloo"),
            False,
        ),
        (receive(1), Collective("other", 0, "send", sends=(0,), backend="gloo"), True),
    ],
    ids=["pair", "tags", "sends", "receives", "one end of a batch", "batches", "groups"],
)
def test_two_transfers_are_a_circle_unless_they_are_the_ends_of_one(one, another, circle):
    assert bool(named(hang.report({0: waits(0, one), 1: waits(1, another)}))) is circle


def test_who_has_finished_sends_no_more_to_a_receive_from_anyone():
    anyone = Collective(DEFAULT_GROUP, 1, "recv", backend="gloo", receives=(1, 2), from_any=True)
    answers = {0: waits(0, anyone), 1: waits(1, receive(0))}
    assert named(hang.report(answers, finished=[2])) == {0, 1}
    assert named(hang.report(answers, silent={2: "stack"})) == set(), "it may send"
    assert named(hang.report({**answers, 2: waits(2)})) == set(), "it may send"


def entry(number: int, what: str, batch: int = 0, state: str = "scheduled") -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", DEFAULT_GROUP],
        "profiling_name": f"nccl:{what}",
        "is_p2p": "-" in what,
        "p2p_seq_id": batch,
        "collective_seq_id": 3,
        "state": state,
    }


def test_sends_and_receives_of_one_batch_are_one_operation():
    """torch marks the batch as ended, not its parts; ProcessGroupNCCL2 does not say what is one batch."""
    entries = [
        entry(0, "send 0->1", 1),
        entry(1, "recv 0<-2", 1),
        entry(2, "coalesced", 1, "completed"),
        entry(3, "send 0->2", 2),
        entry(4, "recv 0<-1", 2),
        entry(5, "coalesced", 2),
        entry(6, "all_reduce"),
        entry(7, "recv 0<-1", 3),
    ]
    members = {"0": (4, 5, 6)}
    found = [
        (each.operation, each.sends, each.receives)
        for each in flight_recorder.open_operations(entries, "nccl", members)
    ]
    assert found == [("send/recv", (6,), (5,)), ("all_reduce", (), ()), ("recv", (), (5,))]
    (first, _) = flight_recorder.open_operations(entries[3:5] + entries[6:], "nccl2", members)
    assert (first.sends, first.receives) == ((6,), (5, 5))


def test_of_several_operations_in_which_a_rank_may_wait_each_has_to_be_hopeless():
    left, right = of("left", 1, "all_reduce", (0, 1)), of("right", 1, "all_reduce", (0, 2))
    other = of("other", 1, "all_reduce", (0, 1, 2))
    one = waits(1, other)
    assert named(hang.report({0: waits(0, left, right), 1: one, 2: waits(2)})) == set()
    assert named(hang.report({0: waits(0, left, right), 1: one, 2: waits(2, other)})) == {0, 1, 2}
    assert named(hang.report({0: waits(0, left), 1: one, 2: waits(2)})) == {0, 1}


def test_a_gpu_is_in_the_first_operation_that_it_was_given():
    """Both ranks have queued both, in another order. gloo's would have ended."""
    for backend, circle in (("nccl", {0, 1}), ("gloo", set())):
        left, right = (of(name, 1, "all_reduce", (0, 1), backend) for name in ("left", "right"))
        both = {0: waits(0, left, begun=(right,)), 1: waits(1, right, begun=(left,))}
        assert named(hang.report(both)) == circle


def test_a_circle_of_many_parts_is_told_in_few_words():
    groups = [of(f"g{rank}", 1, "all_reduce", (rank, (rank + 1) % 9)) for rank in range(9)]
    (told,) = findings(*(waits(rank, groups[rank]) for rank in range(9)))
    assert told.startswith("deadlock: rank 0 is in all_reduce #1 of g0 and waits for rank 1; rank 1 is in ")
    assert "; … 5 more …. 9 groups are used in another order: rank 0 at " in told
    assert len(told) < 500


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"finished": [1]}, "rank 0 is in all_reduce #5; rank 1 had finished"),
        ({"silent": {1: "stack"}}, "rank 0 is in all_reduce #5; rank 1 gave no answer"),
    ],
    ids=["left", "in C code"],
)
def test_a_rank_that_cannot_be_asked_is_named_as_what_it_is(what, told):
    everyone = of(DEFAULT_GROUP, 5, "all_reduce", (0, 1))
    assert findings(waits(0, everyone), **what) == (told,)


def test_a_rank_that_is_known_to_be_behind_is_the_one_that_is_named():
    """Whether the others have begun it too is not known."""
    last = of(DEFAULT_GROUP, 5, "all_reduce", (0, 1, 2))
    assert findings(
        waits(0, last), waits(1, begun=(of(DEFAULT_GROUP, 4, "all_reduce", (0, 1, 2)),)), finished=[2]
    ) == ("rank 0 is in all_reduce #5, which rank 1 has not started",)


def test_who_waits_for_the_other_end_of_a_transfer_is_told():
    assert findings(waits(0, receive(2)), waits(1), finished=[2]) == (
        "rank 0 is in recv and waits for rank 2; rank 2 had finished",
    )


def test_of_a_long_pipeline_the_first_that_waits_are_told_and_the_others_counted():
    told = findings(waits(7), *(waits(rank, receive(rank + 1)) for rank in range(7)))
    assert told == (
        "rank 6 is in recv and waits for rank 7",
        *(f"rank {rank} is in recv and waits for rank {rank + 1}" for rank in range(3)),
        "ranks 3-5 wait in other sends and receives",
    )


THOUSAND = tuple(range(1000))


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (of("left", 1, "all_reduce", THOUSAND), of("right", 1, "all_reduce", THOUSAND)),
        (of("", 1, "new_group", THOUSAND, STORE), of("", 2, "new_group", THOUSAND[:-1], STORE)),
        (of("", 1, "new_group", THOUSAND, STORE), of(DEFAULT_GROUP, 2, "barrier", THOUSAND)),
    ],
    ids=["groups", "forming", "forming and a barrier"],
)
def test_a_thousand_ranks_are_looked_at_in_no_time(one, another):
    answers = {rank: waits(rank, one if rank % 2 else another) for rank in THOUSAND}
    began = time.process_time()
    assert len(named(hang.report(answers))) == 1000
    assert time.process_time() - began < 2


def test_ranks_that_form_the_same_group_do_not_wait_for_each_other():
    """Each has begun to wait at another time, and that is all that its number says."""
    forming = {rank: waits(rank, of("", rank, "new_group", (0, 1, 2), STORE)) for rank in (0, 1)}
    (told,) = findings(*forming.values(), waits(2))
    assert told == "ranks 0-1 are in new_group and wait for rank 2"
    assert findings(*forming.values(), silent={2: ""}) == (f"{told}; rank 2 gave no answer",)


@pytest.mark.parametrize(
    ("later", "arrived", "named_again"),
    [(7, 100, {0, 1}), (8, 100, set()), (7, 101, set())],
    ids=["as it was", "another wait", "data has come"],
)
def test_only_ranks_that_still_wait_where_nothing_has_come_are_a_circle(later, arrived, named_again):
    """`isend` leaves no record: a rank that receives may be about to get what another has sent."""

    def look(sequence: int, arrived: int) -> dict[int, Where]:
        found = {}
        ends = ("127.0.0.1", 1), ("127.0.0.1", 2)
        for rank, (here, there) in enumerate((ends, ends[::-1])):
            answer = waits(rank, receive(1 - rank, sequence=sequence))
            connections = (Connection(here, there, fd=5, bytes=arrived),)
            found[rank] = msgspec.structs.replace(answer, connections=connections)
        return found

    first = look(7, 100)
    assert named(hang.report(first)) == {0, 1}
    again = without_other_waits(first, look(later, arrived), (0, 1))
    assert named(hang.report(again)) == named_again
