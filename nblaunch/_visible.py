"""Which GPUs a process sees: the variables that choose them, read as the drivers and torch read them.

torch's own functions read the environment of the process that they run in. Ranks may have another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
VARIABLES = (CUDA, HIP, ROCR)
_MIG = "MIG-"
_BY_NAME = ("GPU-", _MIG)


def chosen(environ: Mapping[str, str], *, hip: bool) -> str | None:
    """Return what chooses among the installed GPUs, None where nothing does; `hip`: torch's build is ROCm's.

    ROCm applies `ROCR_VISIBLE_DEVICES` first and `HIP_VISIBLE_DEVICES`, which goes before CUDA's name for it,
    to what is left.
    """
    if not hip:
        return environ.get(CUDA)
    if HIP in environ:
        return environ[HIP]
    return environ.get(ROCR, environ.get(CUDA))


def names(choice: str) -> list[str]:
    """Return the GPUs that a variable names, as far as the driver reads it.

    It stops at the first entry that is none. One that is named twice makes the whole choice void.

    >>> names("2,0"), names("0,-1,1"), names("0,0"), names("GPU-1a,GPU-2b"), names("")
    (['2', '0'], ['0'], [], ['GPU-1a', 'GPU-2b'], [])
    """
    found: list[str] = []
    prefix = next((each for each in _BY_NAME if choice.startswith(each)), None)
    for part in choice.split(","):
        if prefix is not None:
            name = part if part.startswith(prefix) else ""
        else:
            # As strtoul has it: `1gpu` is 1.
            number = re.match(r"\+?\d+", part.strip())
            name = str(int(number[0])) if number is not None else ""
        if name in found:
            return []
        if not name:
            break
        found.append(name)
    return found


def ordinals(choice: str, installed: int, uuids: Callable[[], Sequence[str]]) -> list[int]:
    """Return which of the installed GPUs a choice makes visible, in its order; MIG instances are not GPUs.

    >>> ordinals("1,0,7", 2, list), ordinals("GPU-b,GPU-a", 2, lambda: ["GPU-aa", "GPU-bb"])
    ([1, 0], [1, 0])
    """
    found: list[int] = []
    known: Sequence[str] | None = None
    for name in names(choice):
        if name.isdecimal():
            number = int(name)
        else:
            known = uuids() if known is None else known
            # ROCm's driver knows them without the prefix.
            matching = [
                index
                for index, uuid in enumerate(known)
                if uuid.startswith((name, name.removeprefix("GPU-")))
            ]
            number = matching[0] if len(matching) == 1 else installed
        if number >= installed:
            break
        if number in found:
            return []
        found.append(number)
    return found


def is_mig(choice: str) -> bool:
    """Return whether a choice names MIG instances, of which CUDA gives one to a process."""
    return choice.startswith(_MIG)


def one_alone(environ: Mapping[str, str], place: int, *, hip: bool) -> dict[str, str]:
    """Return the variables with which a process sees only the GPU that is number `place` under `environ`.

    Where a choice hides all GPUs, nothing changes.
    """
    # With ROCR's alone, HIP counts what that has left.
    choice = None if hip and HIP not in environ and ROCR in environ else chosen(environ, hip=hip)
    if choice is None:
        return {HIP if hip else CUDA: str(place)}
    if not choice.strip():
        return {}
    # What the driver would not read is left to it to refuse.
    named = names(choice) if place < len(names(choice)) else [part.strip() for part in choice.split(",")]
    return {name: named[place] for name in ((HIP, CUDA) if hip else (CUDA,)) if name in environ}
