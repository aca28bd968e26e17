"""What ranks log, as messages, and the state that is folded of them."""

from __future__ import annotations

from nblaunch.protocol.messages import Logged
from nblaunch.protocol.metrics import packed
from nblaunch.protocol.state import Message, RunState, advance


def batch(rank: int, *points: tuple[str, int, float]) -> Logged:
    """Return a message of points, each (name, step, value)."""
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, *_ in points))}
    return Logged(
        rank=rank,
        names=tuple(places),
        which=packed("H", [places[name] for name, *_ in points]),
        steps=packed("q", [step for _, step, _ in points]),
        times=packed("d", [100.0 + step for _, step, _ in points]),
        values=packed("d", [value for *_, value in points]),
    )


def folded(*batches: Message, world: int = 4) -> RunState:
    """Return the state of a run of so many ranks after these messages."""
    state = RunState.fresh(world)
    for each in batches:
        state = advance(state, each)
    return state
