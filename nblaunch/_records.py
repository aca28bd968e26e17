"""What messages are made of: phases, streams, payloads, frames, failures, scripts."""

from __future__ import annotations

import enum

import msgspec


class Phase(enum.StrEnum):
    """How far a rank has come; the names are those that error messages use."""

    FORK = "fork"
    CONNECT = "connect"
    PROCESS_GROUP = "process group"
    READY = "ready"
    JOB = "job"
    VALUE = "value transfer"
    LEAVE = "leave"


class Stream(enum.StrEnum):
    """A rank's standard streams."""

    STDOUT = "stdout"
    STDERR = "stderr"


class Offsets(msgspec.Struct, frozen=True):
    """How many bytes a rank had written to its two log files at some moment."""

    stdout: int = 0
    stderr: int = 0


class Payload(msgspec.Struct, frozen=True):
    """A pickle (protocol 5) and its large buffers.

    `sizes` are the byte lengths of the parts: the pickle stream first, then each out-of-band buffer.
    The parts lie one after the other, each start aligned to 64 bytes: in `inline`, in the memory
    file `fd` of process `pid`, or in the file `path`.
    """

    sizes: tuple[int, ...]
    inline: bytes | None = None
    pid: int = 0
    fd: int = -1
    path: str = ""


class FrameRecord(msgspec.Struct, frozen=True):
    """One frame of a traceback; `lines` are the user's own line numbers (the magic is line 1)."""

    filename: str
    line: int
    function: str
    source: str
    variables: dict[str, str] = {}


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """How the memory of a GPU was used when there was not enough of it; all in bytes.

    `asked` is what was to be allocated, `limit` what torch's allocator may have in this process at most. It
    had `allocated` of it in tensors, and `reserved` from the driver. `own` is what the driver counts as this
    process's, None if it does not name processes (in containers); `others` are those that it names, by pid.
    """

    device: str
    uuid: str
    asked: int
    free: int
    total: int
    allocated: int
    reserved: int
    limit: int | None = None
    own: int | None = None
    others: dict[int, int] = {}


class FailureRecord(msgspec.Struct, frozen=True):
    """Why a rank failed, as that rank saw it; `exception` is a pickle, or None.

    `traceback` is plain text, `shown` the same as IPython shows it, in colours. `memory` is there where a GPU
    had too little of it.
    """

    type: str
    message: str
    traceback: str = ""
    shown: str = ""
    frames: tuple[FrameRecord, ...] = ()
    exception: bytes | None = None
    exitcode: int = 1
    time: float = 0.0
    phase: Phase = Phase.JOB
    memory: DeviceMemory | None = None


class ScriptJob(msgspec.Struct, frozen=True, tag=True):
    """A script, run as `__main__`: what is at `path`, with `module` the module `name`.

    With `program` it is one that Python does not run. `file` holds the code and is called `title`, where that
    is known. The value are the globals named in `pull`, by name; without any it is the exit status.
    """

    name: str
    path: str = ""
    file: str = ""
    title: str = ""
    args: tuple[str, ...] = ()
    module: bool = False
    program: bool = False
    pull: tuple[str, ...] = ()
