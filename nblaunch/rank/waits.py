"""In which operation this rank waits for others, as its stack and the flight recorders have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import psutil
import torch

from nblaunch.protocol.messages import STORE, Collective
from nblaunch.rank import flight_recorder, process_group

_C10D = "/torch/distributed/distributed_c10d.py"
_BACKWARD = "/torch/autograd/graph.py"
_FORMING = "new_group"
_ENDS = {"send": "dst", "recv": "src"}
_ON_HOST = (flight_recorder.GLOO, STORE)


def waits(
    rank: int,
    stack: Sequence[tuple[FrameType, int]],
    under_way: tuple[Collective, ...],
    groups: process_group.Groups,
    *,
    inside: bool,
) -> tuple[Collective, ...]:
    """Return the operations in which the rank may wait: one where the main thread's stack says which.

    `stack` has the innermost frame first, `under_way` are the open operations, oldest first; `inside` says
    whether the main thread is in torch.distributed at all.
    """
    # A GPU takes them in turn, and the main thread runs ahead of it.
    on_gpu = tuple(each for each in under_way if each.backend not in _ON_HOST)[:1]
    call = next((frame for frame, _ in stack if _has_group(frame)), None)
    if call is not None:
        found = _operation(rank, call, under_way, groups)
        return (found,) if found is not None and found.backend in _ON_HOST else on_gpu
    return on_gpu or (under_way if inside or _in_backward(stack) else ())


def _has_group(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.endswith(_C10D) and (code.co_name == _FORMING or "group" in code.co_varnames)


def _in_backward(stack: Sequence[tuple[FrameType, int]]) -> bool:
    """Return whether the main thread sleeps in a backward pass: DDP ends its collectives there, in C++."""
    return (
        any(frame.f_code.co_filename.endswith(_BACKWARD) for frame, _ in stack[:1])
        and psutil.Process().status() == psutil.STATUS_SLEEPING
    )


def _operation(
    rank: int, call: FrameType, under_way: tuple[Collective, ...], groups: process_group.Groups
) -> Collective | None:
    """Return the operation of a call; None where nothing has begun, or where a GPU does it."""
    name, values = call.f_code.co_name, call.f_locals
    everyone: tuple[int, ...] = groups.ranks.get(groups.default, ())  # type: ignore[arg-type]
    if name == _FORMING:
        ranks = (values.get("ranks") if values.get("use_local_synchronization") else None) or everyone
        return Collective("", _switches(), name, backend=STORE, ranks=tuple(ranks))
    group: Any = values.get("group") or groups.default
    members = groups.ranks.get(group, ())
    title = flight_recorder.title(getattr(group, "group_name", ""), getattr(group, "group_desc", ""))
    if name not in _ENDS:
        begun = [each for each in under_way if (each.group, each.ranks) == (title, members)]
        return begun[-1] if begun else None
    tensor = values.get("tensor")
    if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
        return None
    # gloo's flight recorder has no sends and receives.
    end = _other_end(values, _ENDS[name], members)
    others = tuple(each for each in members if each != rank) if end is None else (end,)
    return Collective(
        group=title,
        sequence=_switches(),
        operation=name,
        backend=flight_recorder.GLOO,
        ranks=members,
        sends=others if name == "send" else (),
        receives=others if name == "recv" else (),
        tag=values.get("tag") or 0,
        from_any=end is None,
    )


def _other_end(values: Mapping[str, Any], name: str, members: tuple[int, ...]) -> int | None:
    """Return the rank to which or from which a call sends; None for a receive from anyone."""
    end, within = values.get(name), values.get(f"group_{name}")
    if end is None and isinstance(within, int) and within < len(members):
        return members[within]
    return end if isinstance(end, int) else None


def _switches() -> int:
    """Return how often the main thread has begun to wait: a number for each wait that has no other one."""
    return int(psutil.Process().num_ctx_switches().voluntary)
