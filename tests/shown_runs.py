"""States of runs, to be drawn."""

from __future__ import annotations

from nblaunch.protocol.messages import AttemptStarted, Payload, Printed, Returned, Started, Stream
from nblaunch.protocol.state import Message, RunState, advance
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.summary import Header


def run_of(world_size, *messages: Message, ranks=None):
    """Return the state after every rank has started and these messages have come."""
    state = RunState.fresh(world_size, ranks)
    begun = [Started(rank=rank, time=1.0) for rank in (range(world_size) if ranks is None else ranks)]
    for message in (AttemptStarted(number=0, world_size=world_size, time=0.0), *begun, *messages):
        state = advance(state, message)
    return state


def out(rank, text, stream=Stream.STDOUT):
    return Printed(rank=rank, stream=stream, text=text)


def err(rank, text):
    return out(rank, text, Stream.STDERR)


def returned(rank, text="", html=""):
    return Returned(rank=rank, value=Payload(sizes=()), time=2.0, text=text, html=html)


def parts_of(state):
    """Return what the panel of a run has, in its parts."""
    drawing = Drawing(Header("cell", "gloo", node="notebook-host"), 0.0)
    drawing.changes(state, 0.0)
    return drawing.whole(0.0)["parts"]
