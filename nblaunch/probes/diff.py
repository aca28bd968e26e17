"""A rank's answers when ranks are compared, and `nblaunch.diff`: a comparison over the process group.

What was read for the first answer is held until the last question, or until the next job.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from nblaunch._errors import NblaunchError
from nblaunch.insight.comparing import (
    ALL,
    Ask,
    ElementBytes,
    EntryPlace,
    EntryShown,
    Outline,
    Round,
    compare,
    size_of,
)
from nblaunch.insight.difference import Difference
from nblaunch.probes import surroundings
from nblaunch.probes.blocks import DIGEST, HashedTensor, digest, ranges, weights_on
from nblaunch.probes.contents import Contents

Find = Callable[[str], Any]
"""Returns the object of a name. Raises `LookupError` or `AttributeError` for one that is not there."""


class Holding:
    """What a rank has read for one comparison, and its answers."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._contents: list[Contents | None] = []
        self._hashes: dict[int, tuple[Any, HashedTensor]] = {}
        self._parts: dict[str, tuple[bytes, str]] = {}

    @torch.no_grad()
    def answer(self, ask: Ask) -> Any:
        return getattr(self, ask.what)(*ask.arguments)

    def outline(self, names: Sequence[str], env: bool) -> tuple[Outline, ...]:  # noqa: FBT001 - from afar
        """Return an outline of each object; with `env` of the surroundings, too."""
        return (*map(self._outline, names), *([self._surroundings()] if env else []))

    def ranges(
        self, place: int, domain: tuple[int, ...], start: int, stop: int, step: int
    ) -> tuple[bytes, ...]:
        """Return the digests of the entries from `start` to `stop`, `step` of them together."""
        return self._of(place).ranges(domain, start, stop, step)

    def entry(self, place: int, domain: tuple[int, ...], index: int) -> EntryShown | None:
        """Return an entry of a domain; None if there are fewer."""
        contents = self._of(place)
        entry = contents.entry(domain, index)
        return None if entry is None else contents.shown(domain, entry)

    def has(self, place: int, path: str) -> bool:
        return self._of(place).has(path)

    def blocks(self, entry: EntryPlace, start: int, stop: int, step: int) -> tuple[bytes, ...]:
        """Return the digests of a tensor's blocks from `start` to `stop`, `step` of them together."""
        return ranges(self._tensor(*entry).digests, start, stop, step)

    def pieces(self, entry: EntryPlace, blocks: Sequence[int]) -> tuple[tuple[bytes, ...], ...]:
        """Return for each of these blocks the digests of its pieces."""
        return self._tensor(*entry).pieces(blocks)

    def elements(self, entry: EntryPlace, pieces: Sequence[int]) -> tuple[ElementBytes, ...]:
        """Return the bytes of these pieces, which are counted from the start of the tensor."""
        return self._tensor(*entry).elements(pieces)

    def listing(self) -> dict[str, bytes]:
        """Return the digest of each part of the surroundings."""
        return {path: known for path, (known, _) in self._parts.items()}

    def shown(self, paths: Sequence[str]) -> dict[str, str]:
        """Return these parts of the surroundings as text, without secrets."""
        return {path: self._parts[path][1] for path in paths if path in self._parts}

    def end(self) -> None:
        weights_on.cache_clear()

    def _of(self, place: int) -> Contents:
        contents = self._contents[place]
        assert contents is not None  # noqa: S101 - asked of ranks that have it
        return contents

    def _tensor(self, place: int, domain: tuple[int, ...], index: int) -> HashedTensor:
        entry = self._of(place).entry(domain, index)
        assert entry is not None  # noqa: S101 - asked of entries that were shown
        assert entry.part.tensor is not None  # noqa: S101 - likewise
        return entry.part.tensor

    def _outline(self, name: str) -> Outline:
        try:
            obj = self._find(name)
        except (LookupError, AttributeError) as error:
            self._contents.append(None)
            words, near = (*error.args, "", "")[:2]
            return Outline(missing=str(words), near=str(near))
        contents = Contents(name, obj, self._hashes)
        self._contents.append(contents)
        return contents.outline()

    def _surroundings(self) -> Outline:
        self._parts = {name: (digest(content)[:8], shown) for name, content, shown in surroundings.parts()}
        known = digest(*(name.encode() + each for name, (each, _) in self._parts.items()))
        return Outline({ALL: (len(self._parts), known[:DIGEST])})


# --- through the hub: the questions of `Session.diff` -----------------------------------------------------

_held: dict[str, Holding] = {}
"""The one comparison that is under way, by its token."""


def answer(token: str, ask: Ask, variables: Mapping[str, Any]) -> Any:
    """Answer a question of the comparison `token`. Raises `LookupError` if another one has begun since."""
    if ask.what == "outline":
        _held.clear()
        _held[token] = Holding(lambda name: find_in(variables, name))
    holding = _held.get(token)
    if holding is None:
        if ask.what == "end":
            return None
        msg = "the ranks have had another job while they were compared. Compare again."
        raise LookupError(msg)
    if ask.what == "end":
        _held.clear()
    return holding.answer(ask)


def end_job() -> None:
    """Let go of what an interrupted comparison has read: another job begins."""
    _held.clear()


def find_in(variables: Mapping[str, Any], name: str) -> Any:
    """Return a variable, or an attribute of one: `model.head.weight`.

    Raises `LookupError` or `AttributeError` with what is missing, and the nearest name that there is.
    """
    first, *attributes = name.split(".")
    if first not in variables:
        names = [each for each in variables if not each.startswith("_")]
        near = difflib.get_close_matches(first, names, n=1)
        msg = f"name {first!r} is not defined"
        raise LookupError(msg, *near)
    found = variables[first]
    for place, attribute in enumerate(attributes):
        path = ".".join([first, *attributes[:place]])
        if (
            isinstance(found, torch.nn.ModuleList | torch.nn.Sequential | list | tuple)
            and attribute.isdigit()
        ):
            if int(attribute) >= len(found):
                msg = f"{path} has {len(found)} parts, and no {attribute}"
                raise LookupError(msg)
            found = found[int(attribute)]
            continue
        try:
            found = getattr(found, attribute)
        except AttributeError:
            near = difflib.get_close_matches(attribute, dir(found), n=1)
            msg = f"{path} has no attribute {attribute!r}"
            raise AttributeError(msg, *near) from None
    return found


# --- over the process group: `nblaunch.diff` ----------------------------------------------------------------


def diff(obj: Any, name: str, group: Any = None) -> Difference:
    """Compare an object of all ranks of a process group, each of which calls this."""
    if not dist.is_available() or not dist.is_initialized():
        msg = (
            "nblaunch.diff needs a process group, over which ranks compare, and there is none (--no-init, or "
            "a script before init_process_group). Form one, or use a session: %distributed diff NAME, "
            "session.diff('NAME')."
        )
        raise NblaunchError(msg)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    first, here = ranks[0], dist.get_rank()
    holding = Holding(lambda _: obj)
    rounds = compare(ranks, (name,)) if here == first else None
    answers: Mapping[int, Any] | None = None
    moved = 0
    while True:
        upcoming: Any = None if rounds is None else _next_round(rounds, answers, moved)
        order = [upcoming]
        dist.broadcast_object_list(order, src=first, group=group)
        match order[0]:
            case Round(ranks=asked, ask=ask):
                found = _answer(holding, ask) if here in asked else None
                answers = _gathered(found, asked, ranks, group)
                moved += sum(map(size_of, answers.values()))
            case Difference() as report:
                return report
            case problem:
                msg = f"nblaunch.diff: {problem}"
                raise NblaunchError(msg)


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    why: str


def _answer(holding: Holding, ask: Ask) -> Any:
    """Answer, or say why not: a rank that raised alone would leave the others waiting."""
    try:
        return holding.answer(ask)
    except Exception as error:  # noqa: BLE001 - goes to all ranks, which raise it
        return _NoAnswer(f"{type(error).__name__}: {error}")


def _gathered(found: Any, asked: Sequence[int], ranks: Sequence[int], group: Any) -> dict[int, Any]:
    """Bring the answers to the first rank of the group; the others get none."""
    first, here = ranks[0], dist.get_rank()
    if len(asked) == len(ranks):
        everything: list[Any] | None = [None] * len(ranks) if here == first else None
        dist.gather_object(found, everything, dst=first, group=group)
        return {} if everything is None else dict(zip(ranks, everything, strict=True))
    # From each alone: a gather pads the answers of all ranks to the largest one.
    if here != first:
        if here in asked:
            dist.send_object_list([found], dst=first, group=group)
        return {}
    answers = {first: found} if first in asked else {}
    for rank in asked:
        if rank != first:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=rank, group=group)
            answers[rank] = received[0]
    return answers


def _next_round(rounds: Any, answers: Mapping[int, Any] | None, moved: int) -> Any:
    """Return the next question, the report, or what went wrong."""
    for rank, each in (answers or {}).items():
        if isinstance(each, _NoAnswer):
            return f"rank {rank}: {each.why}"
    try:
        return next(rounds) if answers is None else rounds.send(answers)
    except StopIteration as end:
        return replace(end.value, moved=moved)
    except LookupError as error:
        return str(error)
