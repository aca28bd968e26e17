"""The messages between the runtime and its ranks: one typed struct per noun.

Every message is a frozen, tagged struct in MessagePack. Decoding never unpickles: pickles travel as opaque
bytes inside `Payload`, and are opened only after the hub has authenticated the sender (see
`nblaunch.host.hub`).
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

PROTOCOL_VERSION = 13
"""Raised with every change of a message: a node of another version is refused."""


class ProtocolError(Exception):
    """Bytes are not a message of this protocol; the text names the sender."""


# Parts of messages: phases, streams, payloads, frames, failures, scripts.


class Phase(enum.StrEnum):
    """How far a rank is; errors use these names."""

    ENGINE = "engine"
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


class Offsets(msgspec.Struct, frozen=True, gc=False):
    """How many bytes a rank had written to its two log files at some moment."""

    stdout: int = 0
    stderr: int = 0


class Payload(msgspec.Struct, frozen=True, gc=False):
    """A pickle (protocol 5) and its large buffers.

    `sizes` are the byte lengths of the parts: the pickle stream first, then each out-of-band buffer.
    The parts lie one after the other, each start aligned to 64 bytes: in `inline`, in the memory
    file `fd` of process `pid`, or in the file `path`. `inode` is the memory file's: a descriptor's number is
    used again once it is closed.
    """

    sizes: tuple[int, ...]
    inline: bytes | None = None
    pid: int = 0
    fd: int = -1
    inode: int = 0
    path: str = ""


class FrameRecord(msgspec.Struct, frozen=True):
    """One frame of a traceback: `line` of `filename`, with its text `source`, in `function`.

    Lines are the user's own (in a cell the magic is line 1). `variables` are the frame's, as short texts.
    """

    filename: str
    line: int
    function: str
    source: str
    variables: dict[str, str] = {}


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """How the memory of a GPU was used when there was not enough of it; all in bytes.

    `asked` is the size of the allocation that failed, `limit` the most that torch's allocator may have in
    this process. It had `allocated` of that in tensors, and `reserved` from the driver. `own` is what the
    driver attributes to this process, None if it does not name processes (in containers); `others` are those
    that it names, by pid.
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


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a rank held when it ran out of it: `count` tensors, arrays or byte strings that are alike.

    `size` are the bytes of all of them. `what` says what one of them is (`float32[4096, 4096] on cuda:0`),
    `name` is a variable that leads to it (`model.layers.0.weight`), `where` the place of that variable
    (`cell line 7 in train`), `made` the line that made it. What is not known is empty.
    """

    size: int
    what: str
    count: int = 1
    name: str = ""
    where: str = ""
    made: str = ""


class MemoryUse(msgspec.Struct, frozen=True, gc=False):
    """The memory that a rank used, in bytes: now is the end of its job, and the peak that of the job.

    `host_now` and `host_peak` are what belongs to the rank's process alone, as `Usage.memory`: what it shares
    with other ranks, and what its child processes have, does not count. The peak is Linux's own (`VmHWM` of
    proc(5), set back as each job begins), so no moment is missed; shared memory that was mapped only for a
    while counts in it. `device_now` and `device_peak` are what torch had allocated on its GPU, the fullest
    one if the rank has used several. None is what is not known: without CUDA, or of a rank that died and was
    not measured before.

    >>> result.ranks[0].memory.host_peak                                   # doctest: +SKIP
    1207959552
    """

    host_now: int | None = None
    host_peak: int | None = None
    device_now: int | None = None
    device_peak: int | None = None


class FailureRecord(msgspec.Struct, frozen=True):
    """Why a rank failed, as that rank saw it; `exception` is a pickle, or None.

    `traceback` is plain text, `colored` the same as IPython shows it, in colours. `memory` is set if a GPU
    had too little of it, `held` is what the rank held if it ran out of memory, the largest first.
    """

    type: str
    message: str
    traceback: str = ""
    colored: str = ""
    frames: tuple[FrameRecord, ...] = ()
    exception: bytes | None = None
    exitcode: int = 1
    time: float = 0.0
    phase: Phase = Phase.JOB
    memory: DeviceMemory | None = None
    held: tuple[HeldMemory, ...] = ()


class ScriptJob(msgspec.Struct, frozen=True, tag=True):
    """A script, run as `__main__`: the file or directory at `path`; with `module`, the module `name`.

    With `program` it is not a Python program. `file` holds the code, and `title` is its name, if known. The
    value is the globals named in `pull`, by name; without any it is the exit status.
    """

    name: str
    path: str = ""
    file: str = ""
    title: str = ""
    args: tuple[str, ...] = ()
    module: bool = False
    program: bool = False
    pull: tuple[str, ...] = ()


# The notebook's own modules, for ranks on other machines.


class CodeFile(msgspec.Struct, frozen=True):
    """A file below root number `root`, at the relative `path`; `digest` is of its content."""

    root: int
    path: str
    digest: bytes
    size: int


class CodeManifest(msgspec.Struct, frozen=True):
    """The files of the notebook's own that a job may import, sorted; `tree` is the digest of all this.

    `roots` are the directories in the caller's `sys.path` that have them.
    """

    tree: str
    roots: tuple[bytes, ...]
    files: tuple[CodeFile, ...]


class CodeTree(msgspec.Struct, frozen=True):
    """The files of a manifest on a machine: root n is `directory`/n, or without a directory `roots[n]`."""

    tree: str
    roots: tuple[bytes, ...]
    directory: bytes = b""


# How a rank starts, and where its stacks are if it cannot answer.


@dataclass(frozen=True, slots=True)
class Orders:
    """A rank's first arguments: the hub's address, and the token by which the hub authenticates the rank."""

    address: str
    group: str
    token: str
    attempt: int
    spill: str
    keep: bool = False
    """Whether the rank is a session's, and runs one job after the other."""
    fresh: tuple[bytes, ...] | None = None
    """The environment, `NAME=VALUE`, of a rank that is a new Python process; None for a fork."""
    virtual_local_rank: bool = False
    """Whether it sees one GPU only, as local rank 0."""
    numa_binding: str | None = None
    """How it is bound to the CPUs near its GPU."""


DUMP_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Has faulthandler write the stacks to a file, without the GIL, for a rank that cannot answer."""


def dump_path(directory: str, rank: int) -> Path:
    """Return the file to which a rank's faulthandler writes on `DUMP_SIGNAL`."""
    return Path(directory) / f"stack-{rank}"


def fatal_path(directory: str, rank: int) -> Path:
    """Return the file to which a rank's faulthandler writes on a fatal signal, such as SIGSEGV."""
    return Path(directory) / f"fatal-{rank}"


# From a rank


class _OfRank(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """A message from one rank, or about it."""

    rank: int


class Hello(_OfRank, frozen=True):
    """The first message of a rank; the hub refuses any other before it."""

    token: str
    attempt: int
    local_rank: int
    world_size: int
    node: str
    pid: int
    version: int = PROTOCOL_VERSION


class Entered(_OfRank, frozen=True):
    """The rank has entered a phase."""

    phase: Phase
    device: str = ""


class Started(_OfRank, frozen=True):
    """The job begins; output from `offsets` on is this run's."""

    time: float
    offsets: Offsets = Offsets()
    late: bool = False
    """Whether its output begins with text that threads have printed since the last job."""


class Displayed(_OfRank, frozen=True):
    """`display(...)` in a rank; follows the text up to `offsets`."""

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    transient: dict[str, Any] = {}
    update: bool = False
    offsets: Offsets = Offsets()


class Cleared(_OfRank, frozen=True):
    """`clear_output(wait)` in a rank; follows the text up to `offsets`."""

    wait: bool = False
    offsets: Offsets = Offsets()


class Switched(_OfRank, frozen=True):
    """The rank changed between stdout and stderr: text written up to each moment precedes the next."""

    moments: tuple[Offsets, ...]


class Unwritten(_OfRank, frozen=True):
    """A full disk has not taken all that the rank printed: `size` bytes are dropped since the job began."""

    size: int


class Logged(_OfRank, frozen=True):
    """Numbers that the rank has logged, in columns: arrays of one length, little-endian.

    `which` are indexes into `names` (H), `steps` integers (q), `times` seconds since the epoch (d), `values`
    the numbers (d), NaN and infinities among them.
    """

    names: tuple[str, ...]
    which: bytes
    steps: bytes
    times: bytes
    values: bytes


class Tally(msgspec.Struct, frozen=True):
    """How many operations of one process group a rank has called, and what its flight recorder has of them.

    `group` is torch's own name, the same on all ranks; `title` is for the reader. `backend` calls itself so:
    nccl2 where the program asked for nccl. `called` is None where a backend does not count. `recorded` is the
    number of the last collective in that backend's recorder, None without a recorder.
    """

    group: str
    title: str
    backend: str
    ranks: tuple[int, ...]
    called: int | None
    recorded: int | None = None

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """Return a key that is the same on all ranks of the group."""
        return self.backend, self.group, self.ranks


class StepsTaken(msgspec.Struct, frozen=True):
    """How many steps an optimizer has begun and ended within a job.

    `names` are those of its variables and its models' variables; only the last few have them.
    """

    number: int
    """In the order of the first steps."""
    begun: int
    ended: int
    names: tuple[str, ...] = ()
    gone: bool = False
    """Whether nothing refers to it any more."""
    rates_before: tuple[float, ...] = ()
    """Its learning rates before its first step of the job."""
    rates: tuple[float, ...] = ()
    """Those that it has now."""


class Returned(_OfRank, frozen=True):
    """The job is done; `text` and `html` are the value as the rank's own shell shows it.

    With `not_sent`, the reason, `value` is only a stand-in for the job's own. `peak_gpu_memory` is the most
    bytes that torch had allocated on a GPU.
    """

    value: Payload
    time: float
    text: str = ""
    html: str = ""
    not_sent: str = ""
    offsets: Offsets = Offsets()
    open: bool = False
    """Whether NCCL has operations that have not ended."""
    peak_gpu_memory: int | None = None
    memory: MemoryUse | None = None
    tallies: tuple[Tally, ...] = ()
    """Of a session's rank: its calls within the job, for each group in which it called anything."""
    steps: tuple[StepsTaken, ...] = ()
    """Of a session's rank: those of its last optimizers, in the order of their first ones."""


class Raised(_OfRank, frozen=True):
    """The job raised, or its value could not be sent."""

    failure: FailureRecord
    offsets: Offsets = Offsets()
    peak_gpu_memory: int | None = None
    memory: MemoryUse | None = None
    tallies: tuple[Tally, ...] = ()
    """As in `Returned`."""
    steps: tuple[StepsTaken, ...] = ()
    """As in `Returned`."""


class Finishing(_OfRank, frozen=True):
    """The job is done, and the rank still works, as a script does at its end: in threads, in exit functions.

    After a failure, which is reported first, an empty `what` with `offsets` says that this is over.
    """

    what: str
    offsets: Offsets | None = None


class Colored(_OfRank, frozen=True):
    """The traceback of a rank that has `Raised`, as IPython shows it: it takes longer than the failure."""

    text: str


DEFAULT_GROUP = "default_pg"
"""torch's name of the default process group."""
STORE = "store"
"""The backend of what ranks do by way of their store: they form a group, which has no number."""


class Collective(msgspec.Struct, frozen=True):
    """A collective that a rank has begun, as torch's flight recorder has it; or another operation of ranks.

    It is the one of number `sequence` in the process group `group`, an `operation` on tensors of these
    `sizes` and `dtypes`; `completed`, if the recorder has seen its end. `backend` is that of the recorder,
    gloo or NCCL: within one group each counts by itself. `ranks` are the members of the group, empty if these
    are not known.
    """

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    completed: bool = False
    backend: str = ""
    ranks: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    """Of a send, or a batch of them: the ranks that receive. `sequence` then is another one for each call."""
    receives: tuple[int, ...] = ()
    """Of a receive, or a batch of them: the ranks that send."""
    tag: int = 0
    """Of a send or a receive: its tag."""
    from_any: bool = False
    """Whether it is a receive to which any one of these ranks may send."""

    @property
    def peers(self) -> frozenset[int]:
        """The ranks at the other ends of sends and receives; empty for a collective."""
        return frozenset((*self.sends, *self.receives))

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """Return a key of the group that is the same on all of its ranks."""
        return self.backend, self.group, () if self.group == DEFAULT_GROUP else self.ranks


class Connection(msgspec.Struct, frozen=True):
    """An open TCP connection of a rank, by its two ends; `fd` is the rank's own descriptor.

    `bytes` have arrived at one of the ends so far; 0 where the system does not say.
    """

    local: tuple[str, int]
    remote: tuple[str, int]
    fd: int
    bytes: int = 0


class Where(_OfRank, frozen=True):
    """Where a rank is: its main thread's stack (innermost frame last), its collectives, its connections.

    `collectives` are the last of each process group, `recent` these and earlier ones, oldest first.
    """

    frames: tuple[FrameRecord, ...]
    collectives: tuple[Collective, ...] = ()
    recent: tuple[Collective, ...] = ()
    connections: tuple[Connection, ...] = ()
    pending: int | None = None
    """How many operations of process groups are open on this rank; None if that is not known."""
    inside: bool = False
    """Whether the main thread is inside a call of torch.distributed."""
    nccl: bool = False
    """Whether the default group uses NCCL: operations run on the GPU, whatever the main thread does."""
    done: tuple[int, ...] = ()
    """The last completed operation of each NCCL group: it advances while the GPUs are at work."""
    importing: bool = False
    """Whether the main thread is inside an import."""
    tallies: tuple[Tally, ...] = ()
    """Of all groups, since each was formed."""
    broken: str = ""
    """CUDA's error, if a rank that has ended its job cannot use CUDA any more."""
    in_backward: bool = False
    """Whether a rank that has ended its job has left a model within its backward pass."""
    waits: tuple[Collective, ...] = ()
    """The operations in which the main thread or the GPU may be waiting; one where it is known which."""


class Names(_OfRank, frozen=True):
    """The variables of a session's rank, after a job that has changed them.

    `rebound` are those that came from the notebook and that the rank's own code has bound since. `lost` are
    keys of objects that came from the notebook and that the rank no longer has.
    """

    names: tuple[str, ...]
    rebound: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    sketches: tuple[int, ...] = ()
    """Those of the variables, in their order (`nblaunch.rank.sketches`); empty where there is one rank."""
    digests: tuple[int, ...] = ()
    """Of their pickles, in the same order; 0 where there is none."""


class LastKnown(msgspec.Struct, frozen=True):
    """The variables of a rank that has died, as all ranks had them before the job in which it did.

    `equal` were the same on all ranks, `alike` as far as was seen; the `others` were not, or it is not known.
    """

    equal: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    lacked: tuple[str, ...] = ()
    """Variables of other ranks that it did not have."""
    changed: tuple[str, ...] = ()
    """Of its variables, those that other ranks have changed in the job in which it died."""
    joins: bool = False
    """Whether the rank is new, on a node that has come: these are the variables of the others."""


class Revived(msgspec.Struct, frozen=True):
    """The variables that ranks that were started again have got from rank `source`.

    `keys` are those of the notebook's objects that came along; `anew` names what is no variable, and begins
    anew. The names that are `shown` are not imported ones.
    """

    lost: dict[str, str]
    source: int = 0
    names: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    keys: tuple[int, ...] = ()
    anew: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Of `shown`, those that have come as a job that was cut off had left them."""
    assumed: tuple[str, ...] = ()
    """Of `shown`, those that are the same on the other ranks, and had not been compared whole before."""
    gradients: bool = True
    """Whether gradients came along, which all ranks had alike."""

    def less(self, lost: Mapping[str, str], keys: Collection[int]) -> Revived:
        """Return what is left if one of these ranks has lost variables, and of the objects has only these."""
        kept = {
            field: tuple(name for name in getattr(self, field) if name not in lost)
            for field in ("names", "shown", "changed", "assumed")
        }
        there = tuple(key for key in self.keys if key in keys)
        return msgspec.structs.replace(self, lost={**self.lost, **lost}, keys=there, **kept)


class Arrived(_OfRank, frozen=True):
    """The rank has unpickled a job's payload, and waits for `Proceed`."""


class Aborted(_OfRank, frozen=True):
    """NCCL has aborted all operations of this rank, or there was none."""


class Reached(_OfRank, frozen=True):
    """The sequence number of the default process group: how many collectives the rank has begun in it."""

    collectives: int


class Asked(_OfRank, frozen=True):
    """The rank waits for a line from the user: `input()`, `getpass()`, a debugger's prompt."""

    number: int
    prompt: str
    password: bool = False
    offsets: Offsets = Offsets()


class RankNotice(_OfRank, frozen=True):
    """Notice from a probe; the run goes on: a NaN with `--watch nan:warn`."""

    text: str


class InterruptSeen(_OfRank, frozen=True):
    """The rank's main thread has run Python code since interrupt `number` reached it.

    Without `handled` the signal was not sent, or is ignored: it has no effect on the rank.
    """

    number: int
    handled: bool = True


class Preempting(_OfRank, frozen=True):
    """The rank's main thread has begun to save, after `Preempt`: it is no longer interrupted."""


class Preempted(_OfRank, frozen=True):
    """The rank has called what is to be called at `Preempt`; `failed` says what was raised, a line each.

    Output up to `offsets`, if given, is that of the job, which had ended on this rank.
    """

    failed: tuple[str, ...] = ()
    offsets: Offsets | None = None


class DeadVariable(msgspec.Struct, frozen=True):
    """A variable that belongs to a process group which is gone; `remedy` is the statement that revives it."""

    name: str
    remedy: str


class Recovered(_OfRank, frozen=True):
    """The rank is ready for another job: its default process group works, or `error` says why not.

    `dead` are variables that died with the old group; if none was formed, those because of which the last job
    may have failed.
    """

    number: int
    error: str = ""
    dead: tuple[DeadVariable, ...] = ()
    in_place: bool = False
    """Whether the groups were formed again behind the same objects, and all that refers to them goes on."""
    why_not: str = ""
    """Why forming them in place failed, if it was tried: new groups have taken their places."""
    unusable: str = ""
    """CUDA's error, if this process cannot use CUDA any more."""
    stepped: tuple[str, ...] = ()
    """Optimizers and models, by name, whose step the GPU ran behind a collective that was aborted."""


# About a rank, from the runtime itself


class Printed(_OfRank, frozen=True):
    """Text found in a rank's log file; `end` is the offset behind it."""

    stream: Stream
    text: str
    end: int = 0


class Exited(_OfRank, frozen=True):
    """The process is gone: negative exit codes are signals, as torchelastic has them."""

    exitcode: int
    time: float
    expected: bool = False
    reason: str = ""
    details: str = ""


class AttemptStarted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The agent has begun to start a worker group; `reason` is started, failure or membership.

    `backend` is that of the default process group, "" where none is formed, or where it was known before.
    """

    number: int
    world_size: int
    time: float
    reason: str = "started"
    pids: dict[int, int] = {}
    backend: str = ""


class RankPlace(msgspec.Struct, frozen=True, gc=False):
    """Where a rank runs, and how far it is."""

    local_rank: int = -1
    node: str = ""
    device: str = ""
    pid: int | None = None
    phase: Phase = Phase.FORK


class JobAssigned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The job has been assigned to a worker group in this attempt, to these `ranks` of it."""

    ranks: dict[int, RankPlace]
    attempt: int = 0


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The resources that a rank uses at some moment, measured by its machine.

    `cpu_percent` is of one core: 200 for two busy threads. `memory` are the bytes that belong to the
    rank's process alone, not those it shares with other ranks, `memory_peak` the most of them since its job
    began, None where the system does not tell. The GPU's are None where there is none, or none that can be
    asked; `gpu_percent` is that of the whole device, and so is `gpu_memory` where the driver does not tell
    processes apart (in containers).
    """

    cpu_percent: float
    memory: int
    gpu_memory: int | None = None
    gpu_percent: int | None = None
    memory_peak: int | None = None


class EngineState(enum.StrEnum):
    """How far an engine is with the nodes of a run."""

    ASKED = "ASKED"
    WAITING = "WAITING"
    GRANTED = "GRANTED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    ENDING = "ENDING"
    ENDED = "ENDED"

    @property
    def early(self) -> bool:
        """Whether nodes are still awaited."""
        return self not in _NODES_THERE


_NODES_THERE = (EngineState.RUNNING, EngineState.ENDING, EngineState.ENDED)


class EngineStatus(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The report of an `engine` about the nodes that it places; the last report counts.

    `state` is how far it is. `id` is its own name of the request (Slurm's number of the job), `hosts` are the
    hosts that it has granted. `words` and `reason` are the engine's own (`PENDING`, `Resources`), `place` is
    the request's place in the queue, in words. `starts` is when it expects to grant the nodes, `ends` when it
    takes them back. Of `wanted` nodes `joined` are here.
    """

    engine: str
    state: EngineState
    id: str = ""
    words: str = ""
    reason: str = ""
    place: str = ""
    starts: float | None = None
    ends: float | None = None
    hosts: tuple[str, ...] = ()
    joined: int = 0
    wanted: int = 0
    preempted: bool = False
    """Whether it takes the nodes back before the run ends: at a time limit, or for another job."""
    warning: str = ""
    """A warning about the engine itself, shown once."""


class NodesJoined(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """So many of the engine's nodes are here; all else is as reported last. Names of hosts travel once."""

    state: EngineState
    joined: int


class Measured(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The resources that ranks use now, by rank; ranks that were not measured are missing."""

    usages: dict[int, Usage]


class Noticed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A notice that does not end the run: ranks that hang, for example."""

    text: str


class Waiting(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The ranks that an ending job waits for, each with a line on where it is.

    `doing` is what all of them do when the job itself is over.
    """

    ranks: dict[int, str] = {}
    doing: str = ""


class Profiled(_OfRank, frozen=True):
    """The profile of a rank (`--profile`), in two parts, neither of them a pickle.

    The first is an `insight.profile.RankProfile` in MessagePack, the second its part of the trace. Comes
    before the rank's outcome.
    """

    data: Payload


class ClockAsked(_OfRank, frozen=True):
    """The rank asks what time it is where the hub is; answered at once with `ClockAnswered`."""

    number: int


class Illustrated(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A finished run's profile as its client shows it: a line of text, and HTML without scripts.

    A client folds it once it has the profiles of all ranks; it never travels.
    """

    text: str = ""
    html: str = ""


class Unreadable(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The value of a rank cannot be unpickled where it was asked for: the rank has failed after all."""

    rank: int
    failure: FailureRecord


class RunPreempted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The nodes are about to be taken back, and the ranks save; `why` is in words."""

    why: str


class RunEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The runtime no longer waits for ranks that have not ended: they are STOPPED, or else LOST."""

    time: float
    stopped: bool = True


class JobSent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The job has been sent to these ranks: one that dies at once may not live to report that it began."""

    ranks: tuple[int, ...]


_Progress = Hello | Entered | Started | Arrived | Finishing | Returned | Raised | Colored | Names
_Outputs = Displayed | Cleared | Switched | Unwritten | Asked | Logged | RankNotice
_Answers = Where | Reached | InterruptSeen | Recovered | Aborted | Preempting | Preempted
_Insights = Profiled | ClockAsked
FromRank = _Progress | _Outputs | _Answers | _Insights
_OfTheJob = AttemptStarted | JobAssigned | JobSent | RunPreempted | RunEnded
_OfAllRanks = _OfTheJob | EngineStatus | NodesJoined | Measured | Noticed | Waiting
AboutRank = Printed | Exited | Unreadable | Illustrated | _OfAllRanks


# To a rank


class Prepare(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Become a rank: the caller's environment, directory and path as they are now, and a process group.

    `environ` are `NAME=VALUE`. It and all paths are bytes, since they need not be text. `limits` are the
    name, soft and hard limit of resources.
    `backend` is what `init_process_group` takes, None for no process group. `accelerators` is how many
    devices of kind `device_type` the ranks of this node share.
    """

    environ: tuple[bytes, ...]
    cwd: bytes
    path: tuple[bytes, ...]
    argv: tuple[bytes, ...] = (b"",)
    umask: int | None = None
    limits: tuple[tuple[str, int, int], ...] = ()
    backend: str | None = None
    device_type: str = "cpu"
    accelerators: int = 0
    timeout: float | None = None
    """Seconds that a collective of the default group may take; None is torch's own limit."""
    joins: bool = False
    """Whether its process group is formed at a `Recover`, with ranks that have one already."""


class CellJob(msgspec.Struct, frozen=True, tag=True):
    """A notebook cell as the user wrote it, without the magic's own line, which is line 1.

    It is compiled under `filename`; `title` is its name for the reader: `Cell In[3]`. With `keeps_value` the
    caller has asked for the value (`--out`), whatever it is.
    """

    source: str
    filename: str
    title: str
    number: int = 0
    first_line: int = 2
    keeps_value: bool = False
    flags: int = 0
    """The flags of `from __future__ import` in the notebook, as `compile` takes them."""


class FunctionJob(msgspec.Struct, frozen=True, tag=True):
    """A call: the payload holds `(fn, args, kwargs)`."""

    name: str = ""


class PushJob(msgspec.Struct, frozen=True, tag=True):
    """Variables of the notebook become the rank's own; the payload holds them by name."""


class PullJob(msgspec.Struct, frozen=True, tag=True):
    """The value is a tuple of these variables of the rank."""

    names: tuple[str, ...]


AnyJob = CellJob | FunctionJob | ScriptJob | PushJob | PullJob


class Objects(msgspec.Struct, frozen=True):
    """Keys of the objects in a payload, as arrays of integers: `places` in the pickle (I), `keys` (Q).

    `gone` are keys (Q) that the notebook will not use again, and `names` the variables that it brings. With
    `wait` the rank answers with `Arrived`, and begins at `Proceed`: the payload is kept on every rank or on
    none.
    """

    wait: bool = False
    names: tuple[str, ...] = ()
    places: bytes = b""
    keys: bytes = b""
    gone: bytes = b""


class Insight(msgspec.Struct, frozen=True):
    """The insight options of a job: `--profile`, `--watch`.

    Of the steps from the first to the last of `profile_steps`, both included, if given.
    """

    profile: bool = False
    profile_steps: tuple[int, int] | None = None
    watch: tuple[str, ...] = ()
    job: str = ""
    """The same on all ranks of a job, and in no other job."""


class Dispatch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run this.

    `payload` holds the captured names of a cell, or the call of a function. `sources` maps file names that
    captured functions were compiled under to `(title, source)`; `imports` are modules the cell reaches
    through attributes (`import xml` does not load `xml.etree`). Only a session's ranks get `objects`.
    """

    job: AnyJob
    payload: Payload
    objects: Objects | None = None
    imports: tuple[str, ...] = ()
    sources: dict[str, tuple[str, str]] = {}
    internal: bool = False
    """Whether its output is not shown."""
    code: CodeTree | None = None
    """The notebook's own modules, where they are not at their own paths."""
    tenure: int = 0
    """How often the session's owner has changed: a rank forgets the objects of earlier owners."""
    query: bool = False
    """Whether it changes nothing of what the notebook knows of the rank."""
    insight: Insight = Insight()

    @property
    def titles(self) -> dict[str, str]:
        """The titles of the files that its code was compiled under, as the user knows them."""
        titles = {filename: title for filename, (title, _) in self.sources.items()}
        if isinstance(self.job, CellJob):
            titles[self.job.filename] = self.job.title
        elif isinstance(self.job, ScriptJob) and self.job.file:
            titles[self.job.file] = self.job.title
        return titles


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """The payload has arrived on every rank: keep it, and begin."""


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """Raise KeyboardInterrupt in the rank's main thread; answer with `InterruptSeen` once it can act on it.

    A session's rank that is importing ends that first, within a bound, unless this is `at_once`. The `last`
    one also reaches a rank that has done its job and is packing its value.
    """

    number: int = 0
    last: bool = False
    at_once: bool = False


class ReportWhere(msgspec.Struct, frozen=True, tag=True):
    """Answer with `Where`, from the control thread, whatever the main thread does."""


class ReportReached(msgspec.Struct, frozen=True, tag=True):
    """Answer with `Reached`, from the control thread."""


class FreeCollective(msgspec.Struct, frozen=True, tag=True):
    """End the collective in which the main thread is stuck: abort NCCL, then shut these connections."""

    fds: tuple[int, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Have NCCL abort all operations, and answer with `Aborted`: the ranks are about to be terminated."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The line that the user has typed; `error` is the reason if the notebook cannot ask."""

    number: int
    text: str = ""
    error: str = ""


class ClockAnswered(msgspec.Struct, frozen=True, tag=True):
    """The hub's clock when question `number` was there: nanoseconds since the epoch."""

    number: int
    time: int


class Recover(msgspec.Struct, frozen=True, tag=True):
    """Answer with `Recovered`; with `reform`, form the default process group again before.

    `fds` are connections to other ranks that belong to the old groups. A use of one of these groups must fail
    at once, and not wait for peers.
    """

    number: int
    reform: bool
    fds: tuple[int, ...] = ()


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Call what `on_preempt` has registered, in `seconds`; answer with `Preempting`, and then `Preempted`.

    The job at work is interrupted by another message, behind this one.
    """

    seconds: float


class Leave(msgspec.Struct, frozen=True, tag=True):
    """End the process with this exit code; with `abort`, without waiting for NCCL's open operations."""

    exitcode: int = 0
    abort: bool = False


class Adopt(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Go on with a new number in another attempt, with all variables: nodes have come or gone.

    Send `Hello` again; a `Recover` follows, at which the process group is formed. The local rank and the
    number of ranks on the node stay the same.
    """

    attempt: int
    rank: int
    world_size: int
    group_rank: int
    group_world_size: int

    @property
    def environ(self) -> dict[str, str]:
        """Return torchelastic's variables of the rank, as far as they change."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": str(self.group_rank),
            "GROUP_WORLD_SIZE": str(self.group_world_size),
        }


_Requests = ReportWhere | ReportReached | Interrupt | FreeCollective | Recover | Abort | Adopt | Preempt
ToRank = Prepare | Dispatch | Proceed | Answer | ClockAnswered | Leave | _Requests


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    msg = f"{type(value).__name__} is no part of a message"
    raise NotImplementedError(msg)


_M = TypeVar("_M")
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


# MessagePack never uses this byte: it begins a message that holds lone surrogates.
_ESCAPED = b"\xc1"
_ESCAPES = {code: 0x100000 + code for code in range(0xD800, 0xE000)}
_UNESCAPES = {escaped: code for code, escaped in _ESCAPES.items()}


def encode(message: msgspec.Struct) -> bytes:
    """Return `message` as MessagePack.

    Python represents file names that are not UTF-8 as text with lone surrogates, which UTF-8 cannot encode:
    these travel as characters of the private plane.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_plain)
        return _ESCAPED + _encoder.encode(_translated(plain, _ESCAPES))


def _translated(plain: Any, table: dict[int, int]) -> Any:
    match plain:
        case str():
            return plain.translate(table)
        case list() | tuple():
            return [_translated(each, table) for each in plain]
        case dict():
            return {_translated(key, table): _translated(each, table) for key, each in plain.items()}
    return plain


def decode_from_rank(data: bytes, sender: str) -> FromRank:
    return decoded(_from_rank, data, sender)


def decode_to_rank(data: bytes, sender: str) -> ToRank:
    return decoded(_to_rank, data, sender)


def decoded(decoder: msgspec.msgpack.Decoder[_M], data: bytes, sender: str) -> _M:
    """Return what `encode` has made `data` of; raise `ProtocolError` naming `sender` if it is not that."""
    try:
        if data.startswith(_ESCAPED):
            plain = msgspec.msgpack.decode(data[len(_ESCAPED) :])
            return msgspec.convert(_translated(plain, _UNESCAPES), decoder.type)
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what = f"{len(data)} bytes from {sender} are no message of nblaunch's protocol"
        msg = f"{what} and were refused: {error}"
        raise ProtocolError(msg) from error
