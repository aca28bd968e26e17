"""Whether a kept group is fit for the next job: evidence before health, decided by one pure function."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from nblaunch.group import fitness
from nblaunch.group.fitness import Tallies, unfit
from nblaunch.protocol.messages import Tally, Where

BACKENDS = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy", "gloo", "registered-by-a-test")
MEMBERS = range(3)
PAIR = Tally(group="7", title="mesh_dp", backend="nccl2", ranks=(0, 1), called=2, recorded=2)


def default(called: int | None, recorded: int | None, backend: str = "nccl2") -> Tally:
    return Tally("0", "default_pg", backend, tuple(MEMBERS), called, recorded)


def ranks(*tallies: Tally) -> dict[int, Where]:
    """Return the answers of three ranks that have read the same."""
    return {
        rank: Where(rank=rank, frames=(), pending=0, tallies=tuple(t for t in tallies if rank in t.ranks))
        for rank in MEMBERS
    }


def but(answers: dict[int, Where], rank: int, **changes: object) -> dict[int, Where]:
    return {**answers, rank: replace(answers[rank], **changes)}


SOUND = ranks(default(4, 4), PAIR)
ONE_MORE = but(SOUND, 1, tallies=(default(5, 5), PAIR))
MATCH = "collectives do not match: in the default group (nccl2) ranks 0,2 at #4, rank 1 at #5"

FIT = {
    "all that was called was read": SOUND,
    "nothing was called": ranks(default(0, 0)),
    "no group": ranks(),
    "two backends in one group": ranks(default(3, 3), default(9, 9, "gloo")),
    "a pipeline on gloo, whose sends its ranks count": but(
        ranks(default(7, 4, "gloo")), 1, tallies=(default(9, 4, "gloo"),)
    ),
    "a recorder that keeps the last ones only": ranks(default(10_000, 10_000)),
}
UNFIT = {
    "a rank did not answer": ({0: SOUND[0], 1: SOUND[1]}, "rank 2 did not say what was called"),
    "the recorder is empty": (
        but(SOUND, 2, tallies=(default(4, 0),)),
        "the flight recorder of rank 2 is empty after 4 calls in the default group (nccl2)",
    ),
    "empty on all ranks": (
        ranks(default(1, 0)),
        "the flight recorder of rank 0 is empty after 1 calls in the default group (nccl2)",
    ),
    "no recorder": (
        ranks(default(4, None, "mine")),
        "nothing records what the collectives of the default group (mine) did on rank 0",
    ),
    "no recorder, and nothing called": (
        ranks(default(0, None, "mine")),
        "nothing records what the collectives of the default group (mine) did on rank 0",
    ),
    "a backend that does not count": (
        ranks(default(None, 0, "mine")),
        "nothing records what the collectives of the default group (mine) did on rank 0",
    ),
    "reading failed on one rank": (
        but(SOUND, 1, pending=None),
        "the flight recorder of rank 1 does not answer",
    ),
    "a rank has done one more": (ONE_MORE, MATCH),
    "a rank has done one more in a group of two": (
        but(SOUND, 0, tallies=(default(4, 4), replace(PAIR, called=3, recorded=3))),
        "collectives do not match: in group mesh_dp (nccl2) rank 0 at #3, rank 1 at #2",
    ),
    "a rank has done one more, and the other backend of the group agrees": (
        but(ranks(default(4, 4), default(1, 1, "gloo")), 1, tallies=(default(5, 5), default(1, 1, "gloo"))),
        MATCH,
    ),
}
UNFIT_AFTER_A_FAILURE = {
    "an operation is open": (but(SOUND, 2, pending=1), "rank 2 has 1 operations open"),
    "a rank has no such group any more": (
        but(SOUND, 1, tallies=(default(4, 4),)),
        "rank 1 no longer has group mesh_dp (nccl2)",
    ),
    "a model is left in its backward": (
        but(SOUND, 1, in_backward=True),
        "a model was left within its backward pass, which the ranks forget together",
    ),
}


@pytest.mark.parametrize("succeeded", [True, False])
@pytest.mark.parametrize("case", FIT)
def test_a_group_is_fit_after(case, succeeded):
    assert unfit(FIT[case], MEMBERS, {}, succeeded=succeeded) == ""


@pytest.mark.parametrize("succeeded", [True, False])
@pytest.mark.parametrize("case", UNFIT)
def test_a_group_is_not_fit_where(case, succeeded):
    answers, why = UNFIT[case]
    assert unfit(answers, MEMBERS, {}, succeeded=succeeded) == why


@pytest.mark.parametrize("case", UNFIT_AFTER_A_FAILURE)
def test_after_a_job_that_failed_a_group_is_not_fit_where(case):
    answers, why = UNFIT_AFTER_A_FAILURE[case]
    assert unfit(answers, MEMBERS, {}, succeeded=False) == why
    assert unfit(answers, MEMBERS, {}, succeeded=True) == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_is_taken_at_its_name(backend):
    assert unfit(ranks(default(4, 4, backend)), MEMBERS, {}, succeeded=False) == ""
    for called, recorded in ((4, 0), (4, None), (0, None), (None, 4)):
        assert unfit(ranks(default(called, recorded, backend)), MEMBERS, {}, succeeded=False)


@pytest.mark.parametrize(
    ("called", "fit"),
    [
        ({}, True),
        ({rank: (default(2, None),) for rank in MEMBERS}, True),
        ({0: (default(1, None),)}, False),
        ({0: (default(2, None),), 1: (default(1, None),), 2: (default(1, None),)}, False),
        ({0: (PAIR,), 1: (PAIR,)}, True),
        ({0: (PAIR,), 1: (replace(PAIR, called=1),)}, False),
    ],
)
def test_a_failed_job_must_have_called_as_much_on_all_ranks(called, fit):
    """gloo records no sends: one that nobody received is seen in the numbers alone."""
    assert (unfit(SOUND, MEMBERS, called, succeeded=False) == "") is fit
    assert fitness.uneven(called, MEMBERS) is not fit
    assert unfit(SOUND, MEMBERS, called, succeeded=True) == "", "the recorders agree"


# --- each condition is there for a case -----------------------------------------------------------


DECIDING = ("uneven", "unfit", "_unread")
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Gt: ast.LtE, ast.Is: ast.IsNot, ast.In: ast.NotIn}


class Mutation(ast.NodeTransformer):
    """Leaves out one condition of the functions that decide, or turns it round: the one of this number."""

    def __init__(self, number: int) -> None:
        self.left, self.done = number, ""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = [
            self.visit(each) if getattr(each, "name", "") in DECIDING else each for each in node.body
        ]
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for other in changed(node):
            self.left -= 1
            if self.left == -1:
                self.done = ast.unparse(node)
                return other
        return node


def changed(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.If():
            yield ast.Pass()
        case ast.BoolOp(values=values):
            yield from values
        case ast.Compare(left=left, ops=[op], comparators=others):
            yield ast.Compare(left, [OPPOSITE[type(op)]()], others)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand


def mutations() -> Iterator[tuple[str, dict[str, object]]]:
    for number in range(1_000):
        mutation = Mutation(number)
        tree = ast.fix_missing_locations(mutation.visit(ast.parse(inspect.getsource(fitness))))
        if not mutation.done:
            return
        names: dict[str, object] = {"__name__": "mutated"}
        exec(compile(tree, "mutated", "exec"), names)  # noqa: S102 - a mutation of our own source
        yield mutation.done, names


def answers_of(names: Mapping[str, Any]) -> list[object]:
    """Return what the function answers to every case of this file."""
    cases = [*FIT.values(), *(each for each, _ in (UNFIT | UNFIT_AFTER_A_FAILURE).values())]
    jobs: tuple[Tallies, ...] = ({}, {0: (default(1, None),)}, {0: (PAIR,), 1: (PAIR,)})
    found: list[object] = []
    for answers, succeeded, called in itertools.product(cases, (True, False), jobs):
        try:
            found.append(names["unfit"](answers, MEMBERS, called, succeeded=succeeded))
        except Exception as error:  # noqa: BLE001 - a mutation may break anything
            found.append(type(error))
    return found


def test_each_condition_decides_some_case():
    made = list(mutations())
    right = answers_of(vars(fitness))
    assert [what for what, names in made if answers_of(names) == right] == []
    assert len(made) > 15
