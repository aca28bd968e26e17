"""What becomes of a job's value: it is sent to the notebook, or only shown there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nblaunch._not_sent import NotSent
from nblaunch.job import payload, shared
from nblaunch.job.culprit import find_culprit

_SEARCH_SECONDS = 2.0
_INSTEAD = "Return plain data (numbers, tensors, a state_dict) instead"


class ValueNotSentError(TypeError):
    """The job succeeded, but its value cannot be pickled; says which part."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A value on its way, and why it is only a stand-in for the job's own."""

    outgoing: shared.Outgoing
    warning: str = ""


def send(value: object, spill: Callable[[], Path]) -> Sent:
    """Send a value. Raises `ValueNotSentError` if that cannot be."""
    try:
        return Sent(_put(value, spill))
    except (Exception, SystemExit) as error:
        msg = (
            f"the job returned a {_unsendable(value)}, which cannot be sent to the notebook: {_text(error)}. "
            f"{_INSTEAD}."
        )
        raise ValueNotSentError(msg) from error


def send_or_stand_in(
    value: object, spill: Callable[[], Path], *, shown: str, rank: int, asked_for: bool
) -> Sent:
    """Send the value of a cell, or what stands for it there: the cell has done its work.

    `shown` is the value's repr. A model, an optimizer or a data loader is sent only if it was `asked_for`:
    the last line of most cells that have one there is `model.eval()` or `model.to(device)`.
    """
    kind = _type_name(type(value))
    if not asked_for and _is_machinery(value):
        reason = (
            f"{kind} is shown and was not sent from rank {rank}: a cell sends a model, an optimizer or a "
            "data loader only with --out NAME. Run the cell with --out, or bind it to a name on the ranks of "
            "a session and pull that (%distributed pull NAME, session.pull('NAME'))."
        )
        return Sent(_put(NotSent(shown, kind, reason), spill))
    try:
        return Sent(_put(value, spill))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the objects raise
        why = _why(value, error)
        reason = f"{kind} is shown and was not sent from rank {rank}: {why}. {_INSTEAD}."
        return Sent(_put(NotSent(shown, kind, reason), spill), f"{why}. {_INSTEAD}.")


def _put(value: object, spill: Callable[[], Path]) -> shared.Outgoing:
    return shared.put(payload.dumps_home(value), spill)


def _is_machinery(value: object) -> bool:
    kinds: tuple[type, ...] = (torch.nn.Module, torch.optim.Optimizer)
    data = sys.modules.get("torch.utils.data")
    if data is not None:
        kinds = (*kinds, data.DataLoader)
    return isinstance(value, kinds)


def _why(value: object, error: BaseException) -> str:
    """Say which part of a value cannot be pickled, and why."""
    culprit = find_culprit({"value": value}, _refusal, seconds=_SEARCH_SECONDS)
    if culprit is None:
        return f"{_type_name(type(value))} cannot be sent: {_text(error)}"
    path = culprit.path.removeprefix("value")
    part = (
        f"value{path}, {culprit.type_name}, cannot be sent" if path else f"{culprit.type_name} cannot be sent"
    )
    return f"{part}: {culprit.reason}"


def _refusal(value: object) -> Exception | None:
    try:
        payload.dumps_home(value)
    except Exception as error:  # noqa: BLE001 - whatever the objects raise
        return error
    except SystemExit as error:
        return RuntimeError(_text(error))
    return None


def _unsendable(value: object) -> str:
    """Name the type of a value that cannot be pickled; of a dict, the first such entry and its key."""
    for key, each in value.items() if type(value) is dict else ():
        if _refusal(each) is not None:
            return f"{type(each).__module__}.{type(each).__qualname__} under {key!r:.100}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    """Return an exception in words; of one without a text, its type."""
    text = str(error)
    return f"SystemExit({text})" if isinstance(error, SystemExit) else text or type(error).__name__
