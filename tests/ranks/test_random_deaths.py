"""Random notebooks one of whose ranks is killed: it has what all ranks had alike, and all else is named.

Beside the model of the ranks (`rank_model.py`), in which a rank that comes back is a copy of another one, of
the variables that have come. Of a cell that is cut off, the ranks that are left may have run any part.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import textwrap
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import looked
import pytest
from hypothesis import Phase, example, given, note, settings
from hypothesis import strategies as st
from lanes import slow
from patience import eventually
from rank_model import Rank
from test_random_notebooks import (
    IMPORTS,
    MADE,
    NAMES,
    Notebook,
    prepare,
    random_examples,
    steps,
)
from test_random_notebooks import (
    told as told_of,
)

KERNEL = """
from nblaunch.magic import sessions as _sessions
from nblaunch.protocol.variables import is_whole as _is_whole
live = _sessions.named(None)

def _sketched(names):
    known = live._names.values() if live.open else ()
    return len(known) == live.world_size and all(
        _is_whole(sketch) or digest
        for each in known
        for name, sketch, digest in zip(each.names, each.sketches, each.digests or [0] * len(each.names))
        if name in names
    )
"""
LOOK = """
gc.collect()
[
    globals().get("progress"),
    [name for name in {names} if name in globals()],
    looked.at(*(globals()[name] for name in {names} if name in globals())),
    [float(globals()[name].sum()) for name in {large} if name in globals()],
]
"""
DIES = "__import__('os').kill(__import__('os').getpid(), 9)"
NOW = "__import__('pathlib').Path({file!r}).write_text(str(__import__('time').monotonic()))"
SLEEPS = "__import__('time').sleep(60)"
SIZE = 4_000_000
ABOUT_RANKS = re.compile(
    r"rank \d (is started again; the other ranks keep their variables|is back: .*|was killed by SIGKILL .*)"
    "|process group re-formed; variables kept; groups you made yourself .* are gone"
)
# What a cell does to a variable of the ranks: {x} is its name, {n} a number.
STATEMENTS = (
    "{x} = [{n}]",
    "{x} = [{n}, [{n}]]",
    "{x} = {n} % 3",
    "{x} = {{'k': {n}}}",
    "{x} = torch.arange(4.) + {n}",
    "{x} = torch.arange(400.) + {n}",
    "{x} = torch.nn.Parameter(torch.ones(2))",
    "{x} = np.arange(4.) + {n}",
    "{x} = types.SimpleNamespace(k={n})",
    "exec({made!r})",
    "exec(looked.change_of({x!r}, globals().get({x!r}), {n}) or 'pass')",
    "exec(looked.change_of({x!r}, globals().get({x!r}), {n}) or 'pass')",
    "exec({grad!r} if isinstance(globals().get({x!r}), torch.nn.Parameter) else 'pass')",
    "globals().pop({x!r}, None);",
)
GRAD = "{x}.grad = torch.ones_like({x}) * {n}"
CLASS = textwrap.dedent(MADE["class"]).strip("\n")


@dataclass(frozen=True)
class Back:
    """The notice about a rank that is back: the names that came, and those that are gone."""

    came: set[str]
    gone: set[str]


def is_plain(value: Any) -> bool:
    """Return whether it is small, and of kinds of which every part is compared after each job."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return isinstance(value, int | None)


def notices(told: Sequence[str]) -> list[tuple[str, str]]:
    """Return what is said of variables, and not of ranks."""
    return sorted(told_of(each) for each in told if not ABOUT_RANKS.fullmatch(each))


def copy_of(source: Rank, names: set[str], number: int) -> Rank:
    """Return a rank that has got these variables from another one, and knows of them what that one knows."""
    made = Rank()
    exec(IMPORTS, made.variables)  # noqa: S102 - as the ranks did
    made.variables |= {"rank": number, "gc": source.variables["gc"]}
    made.variables.update({name: made.copied(source.variables[name]) for name in sorted(names)})
    copies, memory = made.copies, made._memory
    for name in names & source.came.keys():
        is_its = source.came[name] is source.variables[name]
        made.came[name] = made.variables[name] if is_its else object()
    made.bound = {name: value for name, value in source.bound.items() if name in names}
    made.anew = source.anew & names
    made.copies = {key: copies[id(copy)] for key, copy in source.copies.items() if id(copy) in copies}
    made.sent = {key: sent for key, sent in source.sent.items() if key in made.copies}
    made._memory = {
        key: (theirs, memory[own.data_ptr()][1])
        for key, (theirs, own) in source._memory.items()
        if own.data_ptr() in memory
    }
    made.forget()
    return made


class Deaths(Notebook):  # type: ignore[misc] # test modules are not typed for mypy
    """A notebook one of whose ranks is killed."""

    def __init__(self, kernel: Any, world_size: int, place: Path) -> None:
        super().__init__(kernel, world_size)
        self.ask(f"%%distributed\n{IMPORTS}")
        self.place = place
        self.seconds: list[float] = []
        self.sketched = False
        for number, rank in enumerate(self.ranks):
            rank.variables["rank"] = number

    # --- the ranks as they are ---

    def survivors(self, dead: int) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank != dead]

    def has(self, rank: Rank) -> dict[str, Any]:
        """Return the variables of a rank of the model."""
        return {name: rank.variables[name] for name in self.names.values() if rank.has(name)}

    def texts(self) -> list[dict[str, str]]:
        """Return each variable of each rank of the model, by itself."""
        return [{name: looked.at(value) for name, value in self.has(each).items()} for each in self.ranks]

    def pids(self) -> list[int]:
        def ready() -> bool:
            self.found = self.ask("", "[[each.pid, each.state] for each in live.status().ranks]")
            return all(state == "idle" for _, state in self.found)

        eventually(ready, "all ranks are idle")
        return [pid for pid, _ in self.found]

    def attempt(self) -> int:
        return int(self.ask("", "live.attempt if live.open else -1"))

    def started_again(self, before: int) -> None:
        eventually(lambda: self.attempt() > before, "the rank is started again")
        assert self.attempt() == before + 1

    def look_at_all(self, large: Sequence[str] = ()) -> tuple[list[Any], list[str]]:
        """Return what the ranks have, and what is told of them."""
        source = LOOK.format(names=list(self.names.values()), large=list(large))
        note(f"\n%%distributed\n{source}")
        found, warnings = self.ask(
            f"%%distributed --out res\n{source}", "[list(res.values), list(res.warnings)]"
        )
        note(f"# {warnings}")
        assert notices(warnings) == []
        return found, warnings

    # --- deaths ---

    def die_idle(self, dead: int, times: int, pause: int) -> None:
        """Kill a rank between two cells, at once or after all have been compared."""
        self.flush()
        dead %= len(self.ranks)
        before = self.texts()
        if pause:
            wanted = f"_sketched({list(self.names.values())})"
            eventually(lambda: self.ask("", wanted), "all variables are sketched")
        self.sketched = bool(pause)
        killed = 0.0
        for _ in range(times):
            pid, attempt = self.pids()[dead], self.attempt()
            killed = self.kill(dead, pid)
            self.started_again(attempt)
        found, warnings = self.look_at_all()
        self.seconds.append(time.monotonic() - killed)
        self.revive(dead, before, set(before[dead]), warnings)
        self.sketched = False
        self.compare(found)

    def kill(self, dead: int, pid: int) -> float:
        note(f"\n# rank {dead} is killed")
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def die_in_cell(
        self, dead: int, uses: tuple[str, ...], statements: tuple[Any, ...], at: int, how: str
    ) -> None:
        """Have a rank end in a cell, while the others go on, or wait for it."""
        self.flush()
        dead %= len(self.ranks)
        at %= len(statements) + 1
        before, attempt, pid = self.texts(), self.attempt(), self.pids()[dead]
        uses = tuple(name for name in uses if self.is_there(name))
        run = [self.statement(*each) for each in statements]
        first = self.first()
        numbered = [f"{each}\nprogress = {first + number}" for number, each in enumerate(run, 1)]
        numbered.insert(at, self.death(dead, how))
        source = "\n".join([*([f"({', '.join(uses)},)"] if uses else []), f"progress = {first}", *numbered])
        note(f"\n%%distributed\n{source}")
        request = self.kernel.client.execute(
            f"%%distributed --out res\n{source}", allow_stdin=False, stop_on_error=False
        )
        killed = 0.0
        if how == "outside":
            eventually(self.file.exists, "the rank is there")
            killed = self.kill(dead, pid)
        assert self.replied(request)["status"] == "error"
        if how != "outside":
            killed = float(self.file.read_text())
        *cause, told = self.ask("", "[res.root_cause.rank, res.root_cause.signal, list(res.warnings)]")
        note(f"# {told}")
        assert cause == [dead, "SIGKILL"]
        self.started_again(attempt)
        found, warnings = self.look_at_all()
        self.seconds.append(time.monotonic() - killed)
        assert notices(told) == self.bring(set(uses), range(len(self.ranks)))
        brought = self.has(self.ranks[dead]).keys() - before[dead].keys()
        for each in run[:at]:
            exec(each, self.ranks[dead].variables)  # noqa: S102 - as the rank did
        most = len(run) if how == "alone" else at
        for number in self.survivors(dead):
            self.went_on(self.ranks[number], run[:most], found[number], first)
        self.revive(dead, before, set(self.has(self.ranks[dead])), warnings, brought=brought)
        self.compare(found)

    def first(self) -> int:
        """Return a number for the first statement of a cell."""
        return 1000 * int(self.fresh())

    def statement(self, template: str, name: str, n: int, who: int | None) -> str:
        number = 10 * self.fresh() + n
        made, grad = (each.format(x=name, n=number) for each in (CLASS, GRAD))
        source = template.format(x=name, n=number, made=made, grad=grad)
        return source if who is None else f"if rank == {who % len(self.ranks)}: {source}"

    def death(self, dead: int, how: str) -> str:
        self.file = self.place / f"{dead} {self.fresh()} {time.monotonic_ns()}"
        dies = SLEEPS if how == "outside" else DIES
        others = "" if how == "alone" else "\nelse: torch.distributed.barrier()"
        return f"if rank == {dead}:\n    {NOW.format(file=str(self.file))}\n    {dies}{others}"

    def went_on(self, rank: Rank, run: list[str], found: Any, first: int) -> None:
        """Have a rank of the model run as much of a cell as the rank has."""
        progress, names, text, _ = found
        done = progress - first if progress is not None and first <= progress <= first + len(run) else 0
        for each in run[:done]:
            exec(each, rank.variables)  # noqa: S102 - as the rank did
        rank.forget()
        if done < len(run) and (list(self.has(rank)), looked.at(*self.has(rank).values())) != (names, text):
            # Interrupted behind the next statement, before it was noted.
            exec(run[done], rank.variables)  # noqa: S102 - as the rank did
            rank.forget()

    def die_travelling(self, dead: int, uses: tuple[str, ...], milliseconds: int) -> None:
        """Kill a rank while a large value is on its way, or a little later; below 0, before that."""
        self.flush()
        dead %= len(self.ranks)
        before, attempt, pid = self.texts(), self.attempt(), self.pids()[dead]
        uses = tuple(name for name in uses if self.is_there(name))
        first = self.first()
        large = f"large{first}"
        self.ask(f"{large} = np.full({SIZE}, {first}.)")
        source = f"({', '.join([large, *uses])})\nprogress = {first}"
        note(f"\n%%distributed\n{source}\n# after {milliseconds} ms:")
        killed = self.kill(dead, pid) if milliseconds < 0 else 0.0
        request = self.kernel.client.execute(
            f"%%distributed --out res\n{source}", allow_stdin=False, stop_on_error=False
        )
        if milliseconds >= 0:
            time.sleep(milliseconds / 1000)  # it is the moment that is random
            killed = self.kill(dead, pid)
        succeeded = self.replied(request)["status"] == "ok"
        told = self.ask("", "list(res.warnings)")
        note(f"# {'succeeded' if succeeded else 'failed'}: {told}")
        self.started_again(attempt)
        found, warnings = self.look_at_all([large])
        self.seconds.append(time.monotonic() - killed)
        is_back = any(" is back: " in each for each in told)
        if is_back:
            self.revive(dead, before, set(before[dead]), told)
            # The cell may use a variable that is gone there, and that the notebook has deleted.
            assert succeeded or not all(self.ranks[dead].has(each) or each in self.variables for each in uses)
        arrived = [found[rank][3] for rank in self.survivors(dead)]
        assert succeeded <= (arrived == [[float(first * SIZE)]] * len(arrived))
        assert arrived in ([[]] * len(arrived), [[float(first * SIZE)]] * len(arrived))
        assert found[dead][3] in ([], [float(first * SIZE)])
        if arrived[0]:
            assert notices(told) == self.bring(set(uses), range(len(self.ranks)))
        after = self.texts() if arrived[0] else before
        for rank in self.ranks:
            rank.forget()
        if not is_back:
            # It may have ended the cell, and told what it had then.
            had = before[dead].keys() | after[dead].keys()
            brought = after[dead].keys() - before[dead].keys()
            known = after if succeeded else before
            self.revive(dead, known, had, warnings, after=after, brought=brought)
        self.compare(found)
        self.ask(f"del {large}")
        self.ask(f"%%distributed\nglobals().pop({large!r}, None);")

    # --- what is there afterwards ---

    def revive(  # noqa: PLR0913 - what was there, and what was said
        self,
        dead: int,
        before: list[dict[str, str]],
        had: AbstractSet[str],
        warnings: Sequence[str],
        *,
        after: Sequence[dict[str, str]] = (),
        brought: AbstractSet[str] = frozenset(),
    ) -> None:
        """Have the model's rank get the variables that came; they are right, and all else is named.

        `had` are those that it may have had in the end, and `brought` those that came with the last cell.
        """
        (told,) = (each for each in warnings if each.startswith(f"rank {dead} is back: "))
        others = self.survivors(dead)
        first, *gone = told.removeprefix(f"rank {dead} is back: ").split("; ")
        assert first.endswith(f" from rank {others[0]}")
        came = set(re.split(r",? ", first)).intersection(self.names.values())
        named = [each.partition(" had no copy and ")[0] for each in gone if " had no copy and " in each]
        lost = {name for each in named for name in each.split(", ")}
        now = self.texts()
        for name in self.names.values():
            theirs = {now[rank].get(name) for rank in others}
            known = {each.get(name) for each in before}
            alike = len(known) == 1 or len({each.get(name) for each in after}) == 1
            plain = all(is_plain(self.ranks[rank].variables.get(name)) for rank in others)
            if name in came:
                assert name not in lost
                assert len(theirs) == 1, f"{name} has come, and the others have {theirs}"
                assert None not in theirs
                # By type and shape alone, two others that are alike are taken for the third.
                guessed = len(others) > 1 and not self.sketched and not plain
                assert alike or guessed, f"{name} has come, and it was {known}"
                assert name in before[dead] or (after and name in after[dead])
            else:
                # What others had before, and it had not, it may have bound in the cell in which it died.
                unknown = name not in before[dead].keys() | brought and known != {None}
                is_named = name in lost or name not in had or unknown or theirs == {None}
                assert is_named, f"{name} is gone, and not named"
                equal = len(theirs) == len(known) == 1 and None not in theirs | known
                assert not (plain and equal), f"{name} was the same everywhere, and is gone"
        self.ranks[dead] = copy_of(self.ranks[others[0]], came, dead)

    def compare(self, found: list[Any]) -> None:
        """Compare what all ranks have with the model's."""
        for rank, (_, names, text, _) in zip(self.ranks, found, strict=True):
            assert names == list(self.has(rank))
            assert text == looked.at(*self.has(rank).values())

    # --- further steps ---

    def apart(self, template: str, name: str, n: int, who: int | None) -> None:
        """Do something on one rank, or on all."""
        self.there(f"{self.statement(template, name, n, who)}\ngc.collect()\nNone", set())

    def look_at_them(self) -> None:
        self.look(tuple(self.names.values()))


name = st.sampled_from(NAMES)
number = st.integers(0, 9)
rank = st.integers(0, 3)
who = st.one_of(st.none(), rank)
some = st.lists(name, max_size=3, unique=True).map(tuple)
statement = st.tuples(st.sampled_from(STATEMENTS), name, number, who)
deaths = st.one_of(
    st.tuples(st.just("die_idle"), rank, st.sampled_from([1, 1, 2]), st.integers(0, 1)),
    st.tuples(
        st.just("die_in_cell"),
        rank,
        some,
        st.lists(statement, max_size=4).map(tuple),
        number,
        st.sampled_from(["alone", "barrier", "outside"]),
    ),
    st.tuples(st.just("die_travelling"), rank, some, st.one_of(st.just(-1), st.integers(0, 150))),
)
more_steps = st.one_of(steps, statement.map(lambda each: ("apart", *each)))
notebooks = st.builds(
    lambda before, death, after, last: [("look_at_them",), *before, death, *after, *last],
    st.lists(more_steps, max_size=8),
    deaths,
    st.lists(more_steps, max_size=5),
    st.lists(deaths, max_size=1),
)


@pytest.fixture(params=[2, 4])
def world_size(request, module_kernel, place):
    """Start a session; its ranks at the end are others than at the start. Each node has as many."""
    ranks = request.param + request.param % place.nodes
    prepare(module_kernel, place.line(ranks))
    module_kernel.ok(KERNEL)
    yield ranks
    module_kernel.ok("%distributed stop\nimport gc; gc.unfreeze()")
    module_kernel.forget()
    # Hundreds of results went at once. What the system did not hold of their notes goes with the next.
    module_kernel.ok("from nblaunch.client.local import local")

    def all_sent():
        module_kernel.ok("local().runtime.send_notes()")
        return module_kernel.value("len(local().runtime._notes)") == 0

    eventually(all_sent, "the runtime knows which results are gone")


# What all ranks have alike and what they have not, and a death of each kind, of the first rank and another.
OF_EACH_KIND: tuple[list[tuple[Any, ...]], ...] = (
    [
        ("look_at_them",),
        ("make", "a", "class", "b"),
        ("apart", "{x} = torch.arange(4.) + {n}", "c", 5, 0),
        ("make_of", "d", "in a list", "e"),
        ("die_idle", 1, 2, 1),
        ("change", "e", 3),
        ("mutate", "b", 6, None),
    ],
    [
        ("look_at_them",),
        ("apart", "globals().pop({x!r}, None);", "b", 0, 1),
        (
            "die_in_cell",
            1,
            ("a", "b"),
            (("{x} = [{n}]", "a", 1, None), ("{x} = {n} % 3", "c", 2, 0)),
            2,
            "alone",
        ),
        ("die_in_cell", 0, ("d",), (("{x} = {{'k': {n}}}", "d", 4, None),), 1, "barrier"),
    ],
    [
        ("look_at_them",),
        ("apart", "{x} = torch.arange(4.) + {n}", "c", 5, 0),
        ("die_travelling", 1, ("b", "a", "d"), -1),
        ("change", "c", 3),
        ("die_in_cell", 2, ("c", "e"), (("{x} = np.arange(4.) + {n}", "e", 3, 1),), 1, "outside"),
    ],
    # Another name of an object that the ranks have, which comes again: to one of them for the first time.
    [
        ("look_at_them",),
        ("make_of", "c", "alias", "a"),
        ("drop", "c"),
        ("die_idle", 0, 1, 0),
        ("change", "a", 0),
    ],
    # A cell drops an object that it has changed, and is cut off: it comes again, to all ranks.
    [
        ("look_at_them",),
        ("make", "a", "list", "a"),
        (
            "die_in_cell",
            0,
            ("c", "a", "b"),
            (
                ("exec(looked.change_of({x!r}, globals().get({x!r}), {n}) or 'pass')", "a", 0, None),
                ("globals().pop({x!r}, None);", "a", 0, None),
            ),
            2,
            "outside",
        ),
    ],
    # A class leads to a list that the notebook has changed since: it comes again, to the rank that is back.
    [
        ("look_at_them",),
        ("drop", "a"),
        ("change", "d", 0),
        ("make_of", "a", "in a class", "d"),
        ("die_in_cell", 1, ("c", "a", "d"), (("{x} = {n} % 3", "c", 5, 1),), 2, "outside"),
    ],
)


@pytest.mark.parametrize("world_size", [3], indirect=True)
def test_after_a_death_of_each_kind_the_rank_has_what_all_had_alike(module_kernel, world_size, tmp_path):
    @settings(phases=[Phase.explicit], deadline=None)
    @given(notebooks)
    def these_notebooks(notebook):
        book = Deaths(module_kernel, world_size, tmp_path)
        book.follow(notebook)
        book.look_at_them()

    for each in OF_EACH_KIND:
        these_notebooks = example(each)(these_notebooks)
    these_notebooks()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [slow(4), slow(300)])
def test_a_rank_that_is_killed_has_what_all_had_alike_and_all_else_is_named(
    module_kernel, world_size, count, tmp_path, record_property
):
    seconds = []

    @random_examples(count)
    @given(notebooks)
    def random_notebooks(notebook):
        book = Deaths(module_kernel, world_size, tmp_path)
        book.follow(notebook)
        book.look_at_them()
        seconds.extend(book.seconds)

    try:
        random_notebooks()
    finally:
        record_property("deaths", len(seconds))
        record_property("median seconds", statistics.median(seconds or [0]))
