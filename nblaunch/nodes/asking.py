"""Asks an engine for nodes, starts node programs, and watches them: one thread for each allocation."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable

from msgspec.structs import replace

from nblaunch._errors import NblaunchError
from nblaunch.nodes.bootstrap import LACKING
from nblaunch.nodes.engine import Allocation, Engine, NodeProgram, NodeRequest, ProgramStatus
from nblaunch.protocol.messages import EngineState, EngineStatus
from nblaunch.protocol.reports import awaited_nodes

_FIRST_STEP, _STEP = 0.1, 0.5
# How often the thread polls an engine: at first at a user's pace, later rarely, to spare the cluster.
_SOON_SECONDS, _LATER_STEP = 20.0, 2.0
# The end of a node shows at once as the end of its program. Only the time limit may change unseen.
_HELD_STEP, _LONG_STEP, _LONG_SECONDS = 5.0, 15.0, 660.0
_JITTER = 0.2
_NOTICE_SECONDS = 120.0
"""How long before the time limit ranks save; if less than twice this is left, after half of that."""
_QUEUED = (EngineState.ASKED, EngineState.WAITING)
_STOP_SECONDS = 0.5
_HOSTS_NAMED = 4
_LACKS = "waiting for packages that the notebook's machine fetches"
_NOT_THERE = "No module named nblaunch"


class Asking:
    """One request to an engine, until the nodes end."""

    def __init__(  # noqa: PLR0913 - who is asked for what, and who is told what of it
        self,
        engine: type[Engine],
        request: NodeRequest,
        program: Callable[[], NodeProgram],
        tell: Callable[[EngineStatus], None],
        ended: Callable[[str], None],
        *,
        prepare: Callable[[], None] = lambda: None,
        fetch: Callable[[], bool] | None = None,
        limit: Callable[[str, float], None] = lambda _why, _seconds: None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` gets each new report of the engine, `ended` the reason why no more nodes come.

        `limit` gets a text once the time limit is near, with the seconds left, and "" if it was extended.
        `notify` gets what the user has to do. `prepare` is called before the engine is asked, and `program`
        once the nodes are granted. `fetch` is called repeatedly once a host lacks packages: it returns
        whether `program` now brings them. All are called on the engine thread.
        """
        self._engine, self._request, self._program = engine, request, program
        self._tell, self._ended, self._limit, self._notify = tell, ended, limit, notify
        self._prepare, self._fetch = prepare, fetch
        self._not_fetched = ""
        """Why the packages cannot be fetched."""
        self._brought: set[int] = set()
        """The places of programs that were started with fetched packages."""
        self._status = EngineStatus(engine=engine.name, state=EngineState.ASKED, wanted=request.least)
        self._allocation: Allocation | None = None
        self._started = self._failed = False
        self._lock = threading.Lock()
        self._here: list[int] = []
        """The places of the nodes that have joined, in order of arrival; -1 for one without a number."""
        self._again: set[int] = set()
        """The places of lost nodes: a new program starts there once the old one has ended."""
        self._stopping = self._due_now = False
        self._wake = threading.Event()
        self._notice, self._near = 0.0, False
        """How many seconds before the time limit `limit` is called, and whether it was."""
        self._thread = threading.Thread(target=self._run, name="nblaunch-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def joined(self, place: int) -> None:
        """Record that the node of this place has joined: from now on the end of its program is no error."""
        with self._lock:
            self._here.append(place)
        self._wake.set()

    def again(self, place: int) -> None:
        """Have a new node program started in place of a lost one, if the engine can."""
        with self._lock:
            if place in self._here:
                self._here.remove(place)
            self._again.add(place)
        self._wake.set()

    def poll_soon(self) -> None:
        """Poll the engine at once: it may know about an event that has just happened."""
        self._due_now = True
        self._wake.set()

    def stop(self) -> None:
        """Withdraw the request or give the nodes back, and wait for it, at most 1 s; from any thread."""
        with self._lock:
            self._stopping = True
            allocation = self._allocation
        self._wake.set()
        if allocation is not None:
            allocation.cancel()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    @property
    def released(self) -> bool:
        """Whether the engine has all back, once this has been stopped; so it has what was never asked for."""
        with self._lock:
            allocation = self._allocation
        return not self._thread.is_alive() if allocation is None else allocation.released

    def _run(self) -> None:
        try:
            self._prepare()
            if not self._stopping:  # it may be, before it has begun
                self._poll_engine()
        except NblaunchError as error:
            self._end(str(error))
        except Exception as error:  # noqa: BLE001 - the group waits for a word, whatever happens here
            self._end(f"{self._engine.name}: {type(error).__name__}: {error}")
        if self._allocation is not None:
            self._allocation.cancel()
        self._report(replace(self._status, state=EngineState.ENDED))

    def _poll_engine(self) -> None:
        self._tell(self._status)
        allocation = self._engine.ask(self._request)
        with self._lock:
            self._allocation = allocation
        asked = due = time.monotonic()
        status, statuses = self._status, self._statuses(allocation)
        while not (self._stopping or self._failed):
            now = time.monotonic()
            if now >= due or self._due_now:
                self._due_now = False
                status = allocation.status()
                step = _step(status, now - asked)
                due = now + (min(step, _STEP) if self._engine.reports else step)
            before, statuses = statuses, self._statuses(allocation)
            if status.state is EngineState.GRANTED and (
                not self._started or self._free_again(statuses) or self._brings_packages(statuses)
            ):
                self._start(allocation, status)
                status, statuses = allocation.status(), self._statuses(allocation)
            if sum(each.running for each in before) > sum(each.running for each in statuses):
                status = allocation.status()  # the engine may have ended them
            self._judge(status, statuses)
            self._check_queue(time.monotonic() - asked)
            self._check_limit(status, time.time())
            self._wake.wait(min(_STEP, max(due - time.monotonic(), 0)))
            self._wake.clear()

    def _statuses(self, allocation: Allocation) -> tuple[ProgramStatus, ...]:
        """Return the state of each program; one that lacks packages waits for them."""
        return tuple(
            self._waiting(each) if each.exitcode == LACKING else each for each in allocation.statuses()
        )

    def _waiting(self, program: ProgramStatus) -> ProgramStatus:
        """Return the status of a program that lacks packages; if none can be brought, it has ended."""
        if self._fetch is not None and program.place not in self._brought:
            return ProgramStatus(program.host, program.place, running=True, words=_LACKS)
        words = self._not_fetched or program.words
        return ProgramStatus(program.host, program.place, running=False, exitcode=LACKING, words=words)

    def _brings_packages(self, statuses: tuple[ProgramStatus, ...]) -> bool:
        lacking = {each.place for each in statuses if each.running and each.words == _LACKS}
        if not lacking or self._fetch is None:
            return False
        try:
            brings = self._fetch()
        except (NblaunchError, OSError) as error:
            # The other nodes may do without these programs: `_judge` decides.
            self._fetch, self._not_fetched = None, str(error)
            return False
        if brings:
            self._brought |= lacking
        return brings

    def _free_again(self, statuses: tuple[ProgramStatus, ...]) -> bool:
        """Return whether a lost node can be replaced now; from then on, the replacement is awaited."""
        ended = {each.place for each in statuses if not each.running}
        with self._lock:
            free = self._again & ended
            self._again -= free
        return bool(free)

    def _start(self, allocation: Allocation, status: EngineStatus) -> None:
        self._report(self._counted(status))
        first, self._started = not self._started, True
        to_do = allocation.start(self._program())
        if first and to_do:
            self._notify(to_do)

    def _judge(self, status: EngineStatus, statuses: tuple[ProgramStatus, ...]) -> None:
        """Report what has changed; end if no more nodes can come."""
        with self._lock:
            here = {*self._here, *self._again}
        lost = [each for each in statuses if not each.running and each.place not in here]
        if status.state is EngineState.ENDED:
            self._report(status)
            self._end(_why_ended(status))
        elif (
            status.state is not EngineState.ENDING
            and lost
            and len(statuses) - len(lost) < self._request.least
        ):
            self._end(_why_lost(lost))
        else:
            # Enough nodes may still come: what the programs do is the reason for the wait.
            why = _why_lost(lost, words=False) if lost else _what_they_do(statuses, here)
            if why:
                status = replace(status, reason=why) if status.words or lost else replace(status, words=why)
            self._report(self._counted(status))

    def _check_queue(self, waited: float) -> None:
        """End a request that the engine has left in its queue for too long."""
        status, limit = self._status, self._request.longest_wait
        late = limit is not None and not self._started and waited > limit
        if late and status.state in _QUEUED and status.joined < status.wanted:
            self._end(
                f"the nodes were not granted within {limit:g} s (--queue-timeout), and the request is "
                f"withdrawn. It was {awaited_nodes(status)}. Wait longer, or ask for what is free sooner."
            )

    def _check_limit(self, status: EngineStatus, now: float) -> None:
        """Report once that the nodes' time limit is near, and once if it was extended."""
        if status.ends is None or self._failed:
            return
        left = status.ends - now
        self._notice = max(self._notice, min(_NOTICE_SECONDS, left / 2))
        if self._near != (left <= self._notice):
            self._near = not self._near
            job = f"{status.engine} job {status.id}" if status.id else status.engine
            self._limit(f"{job} is near its time limit" if self._near else "", max(left, 0.0))

    def _counted(self, status: EngineStatus) -> EngineStatus:
        with self._lock:
            joined, state = len(self._here), status.state
        if self._started and state.early:
            waiting = EngineState.STARTING if state is EngineState.GRANTED else state
            state = EngineState.RUNNING if joined >= self._request.least else waiting
        return replace(status, state=state, joined=joined, wanted=self._request.least)

    def _report(self, status: EngineStatus) -> None:
        if status != self._status:
            self._status = status
            self._tell(status)

    def _end(self, why: str) -> None:
        if not (self._stopping or self._failed):
            self._failed = True
            self._ended(why)


def _step(status: EngineStatus, waited: float) -> float:
    if status.state is EngineState.GRANTED:
        return _LONG_STEP if status.ends is None or status.ends - time.time() > _LONG_SECONDS else _HELD_STEP
    if status.state is EngineState.ENDING:
        return _FIRST_STEP  # the final state comes any moment
    step = _LATER_STEP if waited > _SOON_SECONDS else min(max(waited / 2, _FIRST_STEP), _STEP)
    return step * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret


def _why_ended(status: EngineStatus) -> str:
    """Describe an allocation that the engine took back, or does not grant.

    >>> _why_ended(EngineStatus(engine="slurm", state=EngineState.ENDED, id="17", words="CANCELLED"))
    'slurm job 17 has ended: CANCELLED'
    """
    what = f"{status.engine} job {status.id} has ended" if status.id else f"{status.engine} gives no nodes"
    words = ": ".join(filter(None, (status.words, status.reason)))
    return f"{what}: {words}" if words else what


def _what_they_do(statuses: Iterable[ProgramStatus], here: Container[int]) -> str:
    """Describe what the node programs do that have not joined yet.

    >>> _what_they_do([ProgramStatus("hA", 0, running=True), ProgramStatus("hB", 1, running=True,
    ... words="waiting")], ())
    'waiting on hB'
    """
    found: dict[str, list[str]] = {}
    for each in statuses:
        if each.running and each.words and each.place not in here:
            found.setdefault(each.words, []).append(each.host)
    return "; ".join(
        f"{words} on {', '.join(hosts) if len(hosts) <= _HOSTS_NAMED else f'{len(hosts)} hosts'}"
        for words, hosts in found.items()
    )


def _why_lost(lost: list[ProgramStatus], *, words: bool = True) -> str:
    """Describe node programs that ended before they joined: the first one, and how many more there are.

    >>> _why_lost([ProgramStatus("hB", 1, running=False, exitcode=-9)])
    'the node on hB ended before it joined, with SIGKILL'
    """
    first = lost[0]
    code = first.exitcode
    if code is not None and code < 0:
        how = f", with {_signal_name(-code)}"
    else:
        how = "" if code is None else f", with exit code {code}"
    others = "" if len(lost) == 1 else f"; so did {len(lost) - 1} more"
    text = f"the node on {first.host} ended before it joined{how}{others}"
    if not (words and first.words):
        return text
    hint = (
        "\nInstall nblaunch there, or give --sync-env or --node-python." if _NOT_THERE in first.words else ""
    )
    return f"{text}:\n{first.words}{hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
