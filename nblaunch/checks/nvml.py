"""What NVML and the kernel's log report about the GPUs here, as JSON; a program, run in a process of its own.

So no driver library is loaded into the notebook, and a driver that hangs can be abandoned. It needs the
standard library alone. It leaves out what NVML does not support, and what this user may not read.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_NVLINKS = 36
_UNCORRECTED, _VOLATILE = 1, 0
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_P2P_NVLINK, _P2P_OK = 2, 0
_LOG = "/dev/kmsg"
_LOG_RECORD = 8192
_LOG_SECONDS = 1.0
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


class _Field(ctypes.Structure):
    """nvmlFieldValue_t, of which the value is taken for an unsigned int."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    )


class Nvml:
    """NVML's functions; a call returns None where there is no answer."""

    def __init__(self, library: Any) -> None:
        """Initialise it. Raises `OSError` if that fails."""
        self._library = library
        if library.nvmlInit_v2() != 0:
            msg = "NVML cannot be initialised"
            raise OSError(msg)

    def does(self, function: str, *arguments: Any) -> bool:
        """Call a function; return whether NVML has it, and it worked."""
        call = getattr(self._library, function, None)
        return call is not None and call(*arguments) == 0

    def numbers(self, function: str, *arguments: Any, kinds: tuple[Any, ...]) -> list[int] | None:
        """Call a function that writes numbers of these kinds."""
        found = [kind() for kind in kinds]
        done = self.does(function, *arguments, *map(ctypes.byref, found))
        return [int(each.value) for each in found] if done else None

    def number(self, function: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        found = self.numbers(function, *arguments, kinds=(kind,))
        return None if found is None else found[0]

    def text(self, function: str, handle: ctypes.c_void_p) -> str | None:
        written = ctypes.create_string_buffer(_NAME_BYTES)
        done = self.does(function, handle, written, ctypes.c_uint(_NAME_BYTES))
        return written.value.decode("utf-8", "replace") if done else None

    def handles(self) -> Iterator[ctypes.c_void_p]:
        for index in range(self.number("nvmlDeviceGetCount_v2") or 0):
            handle = ctypes.c_void_p()
            if self.does("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)):
                yield handle

    def field(self, handle: ctypes.c_void_p, field: int) -> int | None:
        asked = _Field(field=field)
        done = self.does("nvmlDeviceGetFieldValues", handle, 1, ctypes.byref(asked))
        return int(asked.value) & 0xFFFFFFFF if done and asked.status == 0 else None


def read_state(nvml: Nvml) -> dict[str, Any]:
    """Return what is known of each GPU, and how many pairs of them NVLink joins."""
    handles = list(nvml.handles())
    joined = [
        nvml.number("nvmlDeviceGetP2PStatus", one, other, _P2P_NVLINK, kind=ctypes.c_int)
        for one, other in itertools.combinations(handles, 2)
    ]
    known = [status == _P2P_OK for status in joined if status is not None]
    return {"gpus": [_gpu(nvml, handle) for handle in handles], "joined": sum(known), "pairs": len(known)}


def _gpu(nvml: Nvml, handle: ctypes.c_void_p) -> dict[str, Any]:
    uint, ull = ctypes.c_uint, ctypes.c_ulonglong
    asked = (nvml.number("nvmlDeviceGetNvLinkState", handle, uint(link)) for link in range(_NVLINKS))
    answers = {
        "name": nvml.text("nvmlDeviceGetName", handle),
        "uuid": nvml.text("nvmlDeviceGetUUID", handle),
        "compute_mode": nvml.number("nvmlDeviceGetComputeMode", handle),
        "persistence": nvml.number("nvmlDeviceGetPersistenceMode", handle),
        "uncorrected": nvml.number("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE, kind=ull),
        "pages_pending": nvml.number("nvmlDeviceGetRetiredPagesPendingStatus", handle),
        "rows": nvml.numbers("nvmlDeviceGetRemappedRows", handle, kinds=(uint,) * 4),
        "capability": nvml.numbers("nvmlDeviceGetCudaComputeCapability", handle, kinds=(ctypes.c_int,) * 2),
        "recovery": nvml.field(handle, _RECOVERY_ACTION),
        # Of each NVLink, whether it is up.
        "links": [state for state in asked if state is not None] or None,
    }
    return {name: answer for name, answer in answers.items() if answer is not None}


def xids(text: str) -> list[tuple[str, int]]:
    """Return the errors that the driver has written to the kernel's log: bus address and number.

    >>> xids("6,9,1,-;NVRM: Xid (PCI:0000:0f:00): 79, pid=17, GPU has fallen off the bus.")
    [('0000:0f:00', 79)]
    """
    return [(address, int(number)) for address, number in _XID.findall(text)]


def kernel_log(path: str = _LOG) -> str:
    """Return what the kernel's log holds, or nothing where this user may not read it."""
    parts = []
    deadline = time.monotonic() + _LOG_SECONDS
    with contextlib.suppress(OSError):  # refused, or at its end
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(BrokenPipeError):  # records were lost; the next ones are there
                    record = os.read(log, _LOG_RECORD)
                    if not record:
                        break
                    parts.append(record)
        finally:
            os.close(log)
    return b"".join(parts).decode("utf-8", "replace")


def main() -> None:
    """Print what is known; nothing where there is no NVML."""
    try:
        nvml = Nvml(ctypes.CDLL(_LIBRARY))
    except (OSError, AttributeError):
        return
    found = read_state(nvml)
    found["xids"] = xids(kernel_log())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
