"""The messages between the runtime and its clients: kernels, scripts and command lines.

A client asks, and the runtime answers under the number of the request. Between answers the runtime sends
events: folded messages of the jobs that the client watches, exactly as ranks encoded them, and the structs
of `RuntimeEvent` below. Nothing here is pickled: what a rank's value or a notebook's variable holds is in
`Payload`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Never, TypeVar, get_args

import msgspec

from nblaunch import _errors
from nblaunch._help import FailureKind
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol import messages
from nblaunch.protocol.reports import HangReport

CLIENT_PROTOCOL = 10
"""Raised with every change of a message below: a client of another version is refused."""
PROTOCOL = CLIENT_PROTOCOL * 1000 + messages.PROTOCOL_VERSION
"""The version that a client and a runtime compare: clients get messages of ranks unchanged."""


# Parts of messages.


@dataclass(frozen=True, slots=True)
class Placement:
    """How many ranks, on what, with which backend."""

    nproc: int
    backend: str
    device_type: str
    accelerators: int
    note: str = ""
    """Why the ranks are there, for the panel of a run."""
    warning: str = ""
    """The same if it is hardly what was meant, for the result."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that ranks run for."""

    pid: int = 0
    name: str = ""
    """Its name in messages: "the notebook's kernel"."""


_FIELDS: dict[type, tuple[str, ...]] = {
    _errors.CaptureError: ("name", "path", "size"),
    _errors.LaunchError: ("phase",),
}
"""The fields of an error besides its text; a result is not sent with the error."""


class ErrorRecord(msgspec.Struct, frozen=True):
    """An exception, as text: it is raised again on the other side, by its name.

    `type` is qualified; `fields` are the keyword arguments of an error of ours, besides its `kind`
    where that is not its class's.
    """

    type: str
    message: str
    fields: dict[str, Any] = {}
    kind: FailureKind | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        kind = type(error)
        fields = {name: getattr(error, name) for name in _FIELDS.get(kind, ())}
        own = vars(error).get("kind") if isinstance(error, _errors.NblaunchError) else None
        return cls(f"{kind.__module__}.{kind.__qualname__}", str(error), fields, own)

    def error(self) -> BaseException:
        """Return the exception; one that is neither ours nor made of a text becomes a `RuntimeError`.

        >>> ErrorRecord("builtins.ValueError", "no").error()
        ValueError('no')
        """
        module, _, name = self.type.rpartition(".")
        kind = getattr({_errors.__name__: _errors, "builtins": builtins}.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(TypeError):  # some of Python's take other arguments
                why = {} if self.kind is None else {"kind": self.kind}
                error = kind("", **self.fields, **why)
                error.args = (self.message,)
                if str(error) == self.message:
                    return error
        return RuntimeError(f"{name}: {self.message}")


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its client submits it.

    `number` is unique in the runtime: the client chooses it. `state` is the initial `RunState`, encoded.
    `dispatches` are the messages to ranks; that without ranks is for all that have none of their own.
    """

    number: int
    dispatches: tuple[tuple[tuple[int, ...], messages.Dispatch], ...]
    state: bytes
    title: str
    options: LaunchOptions
    internal: bool = False
    """Its result is never shown."""
    usage: bool = False
    """Whether ranks are measured while it runs."""
    code: messages.CodeManifest | None = None
    """The notebook's own modules, for ranks on other machines."""
    query: bool = False
    """It only queries a rank: a client that watches may submit it, and the jobs of others wait for it."""


class RankLogFiles(msgspec.Struct, frozen=True, gc=False):
    """The log files of one rank in one attempt, and which part of them its job wrote."""

    rank: int
    local_rank: int
    stdout: str
    stderr: str
    started: messages.Offsets = messages.Offsets()
    ended: messages.Offsets | None = None


class EarlyEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The early end of a job, by an interrupt or its timeout.

    `notices_from` is how many notices there were before.
    """

    timeout: bool
    message: str
    notices_from: int = 0


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, besides its `RunState`; `logs` are by attempt."""

    error: ErrorRecord | None = None
    launch_failure: tuple[str, str] | None = None
    interrupted: bool = False
    early: EarlyEnd | None = None
    logs: dict[int, tuple[RankLogFiles, ...]] = {}
    log_dir: str = ""
    """The directory of this run's logs, empty if none was made."""
    backend: str = ""
    """Of the ranks' default process group, "" where none was to be formed; final only now, with nodes."""


class ClientRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A client, for those who ask who it is."""

    pid: int
    node: str
    name: str
    notebook: str = ""
    since: float = 0.0


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a session, running or over; `state` is the summary in one word."""

    number: int
    title: str
    state: str
    started: float
    ended: float | None = None
    given_by: str = ""
    dropped: str = ""
    """The parts of it that are no longer kept, in words."""


class RankStatus(msgspec.Struct, frozen=True):
    """One rank of a session: its number `rank`, its process `pid`, and the `device` that it uses.

    `state` is `idle`, `running`, `starting` or `gone`. `memory` is private memory in bytes. `waiting`
    says what an interrupted rank still does, and for how long, or what it asks the user: the prompt is
    `asks`, None where it waits for no answer. `node` is the host that it runs on. `cpu` is in percent of one
    core; None where it is not measured: it is measured on nodes that an engine placed, and on this machine
    while the panel shows a job.

    >>> [each.state for each in session.status().ranks]                    # doctest: +SKIP
    ['idle', 'running']
    """

    rank: int
    state: str
    pid: int | None
    device: str
    memory: int | None
    waiting: str = ""
    node: str = ""
    cpu: float | None = None
    asks: str | None = None

    @property
    def words(self) -> str:
        """The state, and what the rank uses, in one line."""
        memory = f"{self.memory / 1e6:.0f} MB" if self.memory is not None else ""
        cpu = f"CPU {self.cpu:.0f} %" if self.cpu is not None else ""
        return ", ".join(filter(None, (self.state, self.device, memory, cpu, self.waiting)))


class SessionRecord(msgspec.Struct, frozen=True):
    """A session, as any client may see it; `name` is the user's, and `session` unique in the runtime."""

    name: str
    world_size: int = 0
    backend: str = ""
    attempt: int = 0
    ranks: tuple[RankStatus, ...] = ()
    engine: messages.EngineStatus | None = None
    detached: bool = False
    started: float = 0.0
    running: str = ""
    running_since: float | None = None
    client: int | None = None
    linger_left: float | None = None
    session: str = ""
    grace: float = 0.0
    """The grace period after an interrupt, in seconds."""


class Event(msgspec.Struct, frozen=True):
    """One event as torchelastic records it; `name` is such as `torchelastic.worker.status.SUCCEEDED`.

    `source` is `AGENT` or `WORKER`; `timestamp` is when it was recorded, in seconds since the epoch (torch
    leaves its own at 0); `metadata` says which rank, which role, which error; `json` is the text that
    torch's event handlers receive.
    """

    name: str
    source: str
    timestamp: float
    metadata: Mapping[str, Any]
    json: str

    @classmethod
    def parse(cls, text: str, timestamp: float) -> Event:
        """Return the event that torch has written as `text`.

        >>> Event.parse('{"name": "n", "source": "AGENT", "timestamp": 0, "metadata": {}}', 1.5).source
        'AGENT'
        """
        known = json.loads(text)
        return cls(known["name"], known["source"], timestamp, known["metadata"], text)

    @property
    def rank(self) -> int | None:
        """The rank that it concerns, None for the group."""
        number: int | None = self.metadata.get("global_rank")
        return number


class NodeEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's Python environment, to be made on nodes.

    `requirements` are exact, `sources` lines on where they come from: with passwords, if the caller's
    settings have them. `files` are wheels, by name. `uv` is the path of the caller's uv, empty without one.
    """

    python: str
    platform: str
    requirements: tuple[str, ...]
    sources: tuple[str, ...] = ()
    files: tuple[tuple[str, bytes], ...] = ()
    uv: bytes = b""


# Answers.


class AnswerToClient(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An answer of the runtime."""


class RuntimeWelcome(AnswerToClient, frozen=True):
    """The answer to `Introduce`; `client` is unique within the runtime."""

    client: int
    pid: int
    token: str = ""
    """For further connections of the runtime's owner; others know it from the registry."""


class RequestFailed(AnswerToClient, frozen=True):
    """The request cannot be carried out."""

    error: ErrorRecord


class Done(AnswerToClient, frozen=True):
    """It has been done."""


class Submitted(AnswerToClient, frozen=True):
    """The ranks have the job, or get it once they are ready."""


class Stale(AnswerToClient, frozen=True):
    """The session's ranks are those of another attempt."""


class Opened(AnswerToClient, frozen=True):
    """Where the ranks are, or will be; those of a session are being started. `unheeded` is a warning.

    Where an engine places nodes, `placement` is provisional: the least nodes, and the backend as asked.
    """

    placement: Placement
    unheeded: str = ""
    attempt: int = 0
    session: str = ""
    options: LaunchOptions | None = None
    """Of a session to which the client attaches; so is what follows."""
    names: tuple[messages.Names, ...] = ()
    """The variables that its ranks have."""
    reborn: dict[int, messages.LastKnown] = {}
    """Ranks that were started again, and have not got variables from others; with what they had."""
    held_by: ClientRecord | None = None
    """Another client, the owner: this one watches."""
    watches_only: str = ""
    """Why this client may not submit jobs, if it may not."""


class JobSnapshot(AnswerToClient, frozen=True):
    """The state of a job (encoded) and, once it has ended, its end."""

    job: JobRecord
    state: bytes
    options: LaunchOptions
    questions: tuple[messages.Asked, ...] = ()
    end: JobEnd | None = None
    logs: dict[int, tuple[RankLogFiles, ...]] = {}
    """Until its end: the log files by attempt; those of ranks that go on end where the state does."""


class StacksReport(AnswerToClient, frozen=True):
    """Where ranks are."""

    report: HangReport


class Sessions(AnswerToClient, frozen=True):
    """The sessions of this runtime."""

    sessions: tuple[SessionRecord, ...]


class JobList(AnswerToClient, frozen=True):
    """The jobs of a session."""

    jobs: tuple[JobRecord, ...]


class JobEvents(AnswerToClient, frozen=True):
    """torchelastic's events of a job."""

    events: tuple[Event, ...]


class LateWarnings(AnswerToClient, frozen=True):
    """Warnings since the end of a job; `complete` once its ranks are gone."""

    texts: tuple[str, ...]
    complete: bool = True


class Forked(AnswerToClient, frozen=True):
    """A process was forked, and has ended; `architectures` are the GPUs that its torch has code for."""

    architectures: tuple[str, ...] = ()


# Requests.


AnswerT = TypeVar("AnswerT", bound="AnswerToClient")
AnswerT_co = TypeVar("AnswerT_co", bound=AnswerToClient, covariant=True)


class Request(msgspec.Struct, Generic[AnswerT_co], frozen=True, tag=True, kw_only=True):
    """A request of a client, generic in its answer, which may also be `RequestFailed`."""


class _ByNumber(Request[AnswerT_co], frozen=True):
    job: int


class _ByKey(Request[AnswerT_co], frozen=True):
    session: str


class Introduce(Request[RuntimeWelcome], frozen=True):
    """The first request of every connection."""

    token: str
    version: str
    pid: int
    node: str
    name: str
    notebook: str = ""
    protocol: int = PROTOCOL
    python: str = ""
    torch: str = ""
    """Empty where it is not installed."""


class OpenRanks(Request[Opened], frozen=True):
    """Decide ranks, devices, backend and how processes start; answered before any of them is ready.

    Requests and events name the ranks by `session`, which is unique in the runtime. Those of a session are
    started at once; `name` is the user's, and two sessions may have the same. Without a name they are for one
    job, which starts them. `prepare` is what the caller's process knows: the runtime adds the devices.
    `backends` are those that torch knows in the caller's process, empty if torch is not loaded there.
    """

    session: str
    options: LaunchOptions
    prepare: messages.Prepare
    backends: tuple[str, ...] = ()
    name: str = ""
    detached: bool = False
    standby: bool = False
    """Whether the next ranks are prepared ahead."""
    untouched: bool = False
    """Whether ranks without a process group leave devices alone, as under torchrun."""
    join_key: str = ""
    environment: NodeEnvironment | None = None


class SubmitJob(Request[Submitted | Stale], frozen=True):
    """Submit a job to ranks; the answer is `Stale` if they are not those of `attempt`.

    Where the session has no owner, this client is it from now on.
    """

    session: str
    order: JobOrder
    attempt: int | None = None


class WatchJob(_ByNumber[JobSnapshot], frozen=True):
    """Send the job's state, then each message that changes it."""


class UnwatchJob(_ByNumber[Done], frozen=True):
    """Stop sending the job's messages."""


class InterruptJob(_ByNumber[Done], frozen=True):
    """Interrupt a job; the second time, end its ranks. One that was not submitted yet never begins."""


class InterruptSession(_ByKey[Done], frozen=True):
    """Interrupt the job of a session, once; refused while another client owns it."""


class RanksRevived(_ByKey[Done], frozen=True):
    """Ranks of a session that were started again have got the variables that others have for them."""

    ranks: tuple[int, ...]
    attempt: int


class Reply(_ByNumber[Done], frozen=True):
    """Answer a rank's question."""

    rank: int
    answer: messages.Answer


class CloseSession(_ByKey[Done], frozen=True):
    """End a session's ranks; answered once they have exited."""


class RestartSession(_ByKey[Done], frozen=True):
    """Replace a session's ranks; answered once the agent starts others.

    Refused while another client owns it.
    """


class StacksOf(_ByKey[StacksReport], frozen=True):
    """Ask where a session's ranks are, at most `seconds`."""

    seconds: float = 1.0


class DescribeSessions(Request[Sessions], frozen=True):
    """Describe the sessions, or one."""

    session: str = ""


class ListJobs(_ByKey[JobList], frozen=True):
    """List a session's jobs, the oldest first."""


class EventsOf(_ByNumber[JobEvents], frozen=True):
    """Return torchelastic's events of a job, once they are complete."""


class LateOf(_ByNumber[LateWarnings], frozen=True):
    """Return the warnings since the end of a job."""


class AttachSession(Request[Opened], frozen=True):
    """Follow a session, and own it unless another client does; with `take` in its place."""

    session: str = ""
    take: bool = False


class TryFork(Request[Forked], frozen=True):
    """Fork a process as a rank is forked, and wait for its end, at most `seconds`."""

    seconds: float
    architectures: bool = False
    """Whether it asks its torch what that has code for, which may ask the driver."""


class ListenAgain(Request[Done], frozen=True):
    """Bind the clients' sockets again, whose files are gone from the temporary directory."""


class Stop(Request[Done], frozen=True):
    """End the sessions, and the runtime."""


class Taken(Request[Never], frozen=True):
    """The values of this job are mapped: the runtime releases them. Never answered."""

    job: int


_OfJobs = SubmitJob | WatchJob | UnwatchJob | InterruptJob | Reply | EventsOf | LateOf
_OfSessions = (
    OpenRanks
    | CloseSession
    | RestartSession
    | InterruptSession
    | RanksRevived
    | StacksOf
    | DescribeSessions
    | ListJobs
    | AttachSession
)
ClientRequest = Introduce | _OfJobs | _OfSessions | TryFork | ListenAgain | Stop | Taken


# Notes: datagrams that finalizers send, never answered.


class _Note(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class ReleaseJob(_Note, frozen=True):
    """A result of this job is gone in process `pid`; after the last one private logs and events may go."""

    job: int
    pid: int


class DismissSession(_Note, frozen=True):
    """The session, or the run that was not begun, was forgotten: its ranks leave."""

    session: str


ClientNote = ReleaseJob | DismissSession


# Events; `Noticed` is text for the user of a run, which is printed: how other nodes join.


class _Unasked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class JobEnded(_Unasked, frozen=True):
    """A job that the client watches has ended: nothing more of it is folded."""

    job: int
    end: JobEnd


class JobRefreshed(_Unasked, frozen=True):
    """The present state of a job that the client watches: it was behind, and missed what was folded."""

    job: int
    state: bytes
    questions: tuple[messages.Asked, ...] = ()
    logs: dict[int, tuple[RankLogFiles, ...]] = {}


class PayloadKept(_Unasked, frozen=True):
    """The payload of a job has arrived on all its ranks, and they keep it."""

    job: int


class Question(_Unasked, frozen=True):
    """A rank asks the user something."""

    job: int
    asked: messages.Asked


class NamesChanged(_Unasked, frozen=True):
    """The variables of a session's rank have changed."""

    session: str
    names: messages.Names


class RanksReplaced(_Unasked, frozen=True):
    """A session has other ranks, of this attempt: they have been sent nothing."""

    session: str
    attempt: int
    world_size: int = 0
    backend: str = ""


class RanksRenumbered(_Unasked, frozen=True):
    """A session's ranks go on in another attempt: `kept` maps them to what they were, the others are new."""

    session: str
    attempt: int
    world_size: int
    kept: dict[int, int]
    reborn: dict[int, messages.LastKnown] = {}
    """Those of the others that were started again, and have not got variables from other ranks."""


class SessionEnded(_Unasked, frozen=True):
    """A session's ranks are gone; `why`, if that was not their own end."""

    session: str
    why: str = ""


class OwnerChanged(_Unasked, frozen=True):
    """The client `by` owns the session from now on, or None: the next that submits a job will."""

    session: str
    by: ClientRecord | None = None


RuntimeEvent = (
    JobEnded
    | JobRefreshed
    | PayloadKept
    | Question
    | NamesChanged
    | RanksReplaced
    | RanksRenumbered
    | SessionEnded
    | OwnerChanged
    | messages.Noticed
)


_request: msgspec.msgpack.Decoder[ClientRequest] = msgspec.msgpack.Decoder(ClientRequest)
_note: msgspec.msgpack.Decoder[ClientNote] = msgspec.msgpack.Decoder(ClientNote)
_event: msgspec.msgpack.Decoder[RuntimeEvent] = msgspec.msgpack.Decoder(RuntimeEvent)


def decode_request(data: bytes, sender: str) -> ClientRequest:
    return messages.decoded(_request, data, sender)


def decode_note(data: bytes, sender: str) -> ClientNote:
    return messages.decoded(_note, data, sender)


def decode_answer(data: bytes, request: type[Request[AnswerT]], sender: str) -> AnswerT | RequestFailed:
    answer: AnswerT | RequestFailed = messages.decoded(_answers_to(request), data, sender)
    return answer


@functools.cache
def _answers_to(request: type[Request[Any]]) -> msgspec.msgpack.Decoder[Any]:
    (base,) = vars(request)["__orig_bases__"]
    (answer,) = get_args(base)
    return msgspec.msgpack.Decoder(answer | RequestFailed)


def decode_event(data: bytes, sender: str) -> RuntimeEvent:
    return messages.decoded(_event, data, sender)
