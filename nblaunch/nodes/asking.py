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
from nblaunch.nodes.engine import Allocation, Engine, NodeFate, NodeProgram, Wish
from nblaunch.protocol.messages import EngineSaid, EngineState
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
        wish: Wish,
        program: Callable[[], NodeProgram],
        tell: Callable[[EngineSaid], None],
        ended: Callable[[str], None],
        *,
        prepare: Callable[[], None] = lambda: None,
        fetch: Callable[[], bool] | None = None,
        limit: Callable[[str, float], None] = lambda _why, _seconds: None,
        remark: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` gets each new report of the engine, `ended` the reason why no more nodes come.

        `limit` gets a text once the time limit is near, with the seconds left, and "" if it was extended.
        `remark` gets what the user has to do. `prepare` is called before the engine is asked, and `program`
        once the nodes are granted. `fetch` is called repeatedly once a host lacks packages: it returns
        whether `program` now brings them. All are called on the engine thread.
        """
        self._engine, self._wish, self._program = engine, wish, program
        self._tell, self._ended, self._limit, self._remark = tell, ended, limit, remark
        self._prepare, self._fetch = prepare, fetch
        self._not_fetched = ""
        """Why the packages cannot be fetched."""
        self._brought: set[int] = set()
        """The places of programs that were started with fetched packages."""
        self._said = EngineSaid(engine=engine.name, state=EngineState.ASKED, wanted=wish.least)
        self._allocation: Allocation | None = None
        self._started = self._failed = False
        self._lock = threading.Lock()
        self._here: list[int] = []
        """The places of the nodes that have joined, in order of arrival; -1 for one without a number."""
        self._again: set[int] = set()
        """The places of lost nodes: a new program starts there once the old one has ended."""
        self._stopping = self._looks = False
        self._wake = threading.Event()
        self._notice, self._near = 0.0, False
        """How many seconds before the time limit `limit` is called, and whether it was."""
        self._thread = threading.Thread(target=self._run, name="nblaunch-engine", daemon=True)

    def start(self) -> None:
        """Start the thread, and return at once."""
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

    def look(self) -> None:
        """Poll the engine at once: it may know about an event that has just happened."""
        self._looks = True
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
    def given_back(self) -> bool:
        """Whether the engine has all back, once this has been stopped; so it has what was never asked for."""
        with self._lock:
            allocation = self._allocation
        return not self._thread.is_alive() if allocation is None else allocation.given_back

    def _run(self) -> None:
        try:
            self._prepare()
            if not self._stopping:  # it may be, before it has begun
                self._look_after()
        except NblaunchError as error:
            self._end(str(error))
        except Exception as error:  # noqa: BLE001 - the group waits for a word, whatever happens here
            self._end(f"{self._engine.name}: {type(error).__name__}: {error}")
        if self._allocation is not None:
            self._allocation.cancel()
        self._say(replace(self._said, state=EngineState.ENDED))

    def _look_after(self) -> None:
        """Poll the engine and start node programs, until the allocation ends."""
        self._tell(self._said)
        allocation = self._engine.ask(self._wish)
        with self._lock:
            self._allocation = allocation
        asked = due = time.monotonic()
        said, fates = self._said, self._fates(allocation)
        while not (self._stopping or self._failed):
            now = time.monotonic()
            if now >= due or self._looks:
                self._looks = False
                said = allocation.status()
                step = _step(said, now - asked)
                due = now + (min(step, _STEP) if self._engine.reports else step)
            before, fates = fates, self._fates(allocation)
            if said.state is EngineState.GRANTED and (
                not self._started or self._free_again(fates) or self._brings_packages(fates)
            ):
                self._start(allocation, said)
                said, fates = allocation.status(), self._fates(allocation)
            if sum(each.running for each in before) > sum(each.running for each in fates):
                said = allocation.status()  # the engine may have ended them
            self._judge(said, fates)
            self._look_at_queue(time.monotonic() - asked)
            self._look_at_limit(said, time.time())
            self._wake.wait(min(_STEP, max(due - time.monotonic(), 0)))
            self._wake.clear()

    def _fates(self, allocation: Allocation) -> tuple[NodeFate, ...]:
        """Return the state of each program; one that lacks packages waits for them."""
        return tuple(self._waiting(each) if each.exitcode == LACKING else each for each in allocation.fates())

    def _waiting(self, fate: NodeFate) -> NodeFate:
        """Return the fate of a program that lacks packages; if none can be brought, it has ended."""
        if self._fetch is not None and fate.place not in self._brought:
            return NodeFate(fate.host, fate.place, running=True, words=_LACKS)
        words = self._not_fetched or fate.words
        return NodeFate(fate.host, fate.place, running=False, exitcode=LACKING, words=words)

    def _brings_packages(self, fates: tuple[NodeFate, ...]) -> bool:
        lacking = {each.place for each in fates if each.running and each.words == _LACKS}
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

    def _free_again(self, fates: tuple[NodeFate, ...]) -> bool:
        """Return whether a lost node can be replaced now; from then on, the replacement is awaited."""
        ended = {each.place for each in fates if not each.running}
        with self._lock:
            free = self._again & ended
            self._again -= free
        return bool(free)

    def _start(self, allocation: Allocation, said: EngineSaid) -> None:
        self._say(self._counted(said))
        first, self._started = not self._started, True
        to_do = allocation.start(self._program())
        if first and to_do:
            self._remark(to_do)

    def _judge(self, said: EngineSaid, fates: tuple[NodeFate, ...]) -> None:
        """Report what has changed; end if no more nodes can come."""
        with self._lock:
            here = {*self._here, *self._again}
        lost = [each for each in fates if not each.running and each.place not in here]
        if said.state is EngineState.ENDED:
            self._say(said)
            self._end(_why_ended(said))
        elif said.state is not EngineState.ENDING and lost and len(fates) - len(lost) < self._wish.least:
            self._end(_why_lost(lost))
        else:
            # Enough nodes may still come: what the programs do is the reason for the wait.
            why = _why_lost(lost, words=False) if lost else _what_they_do(fates, here)
            if why:
                said = replace(said, reason=why) if said.words or lost else replace(said, words=why)
            self._say(self._counted(said))

    def _look_at_queue(self, waited: float) -> None:
        """End a request that the engine has left in its queue for too long."""
        said, limit = self._said, self._wish.longest_wait
        late = limit is not None and not self._started and waited > limit
        if late and said.state in _QUEUED and said.joined < said.wanted:
            self._end(
                f"the nodes were not granted within {limit:g} s (--queue-timeout), and the request is "
                f"withdrawn. It was {awaited_nodes(said)}. Wait longer, or ask for what is free sooner."
            )

    def _look_at_limit(self, said: EngineSaid, now: float) -> None:
        """Report once that the nodes' time limit is near, and once if it was extended."""
        if said.ends is None or self._failed:
            return
        left = said.ends - now
        self._notice = max(self._notice, min(_NOTICE_SECONDS, left / 2))
        if self._near != (left <= self._notice):
            self._near = not self._near
            job = f"{said.engine} job {said.id}" if said.id else said.engine
            self._limit(f"{job} is near its time limit" if self._near else "", max(left, 0.0))

    def _counted(self, said: EngineSaid) -> EngineSaid:
        """Return the engine's report, completed by the number of nodes that have joined."""
        with self._lock:
            joined, state = len(self._here), said.state
        if self._started and state.early:
            waiting = EngineState.STARTING if state is EngineState.GRANTED else state
            state = EngineState.RUNNING if joined >= self._wish.least else waiting
        return replace(said, state=state, joined=joined, wanted=self._wish.least)

    def _say(self, said: EngineSaid) -> None:
        if said != self._said:
            self._said = said
            self._tell(said)

    def _end(self, why: str) -> None:
        if not (self._stopping or self._failed):
            self._failed = True
            self._ended(why)


def _step(said: EngineSaid, waited: float) -> float:
    """Return in how many seconds to poll the engine again."""
    if said.state is EngineState.GRANTED:
        return _LONG_STEP if said.ends is None or said.ends - time.time() > _LONG_SECONDS else _HELD_STEP
    if said.state is EngineState.ENDING:
        return _FIRST_STEP  # the final state comes any moment
    step = _LATER_STEP if waited > _SOON_SECONDS else min(max(waited / 2, _FIRST_STEP), _STEP)
    return step * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret


def _why_ended(said: EngineSaid) -> str:
    """Describe an allocation that the engine took back, or does not grant.

    >>> _why_ended(EngineSaid(engine="slurm", state=EngineState.ENDED, id="17", words="CANCELLED"))
    'slurm job 17 has ended: CANCELLED'
    """
    what = f"{said.engine} job {said.id} has ended" if said.id else f"{said.engine} gives no nodes"
    words = ": ".join(filter(None, (said.words, said.reason)))
    return f"{what}: {words}" if words else what


def _what_they_do(fates: Iterable[NodeFate], here: Container[int]) -> str:
    """Describe what the node programs do that have not joined yet.

    >>> _what_they_do([NodeFate("hA", 0, running=True), NodeFate("hB", 1, running=True, words="waiting")], ())
    'waiting on hB'
    """
    found: dict[str, list[str]] = {}
    for each in fates:
        if each.running and each.words and each.place not in here:
            found.setdefault(each.words, []).append(each.host)
    return "; ".join(
        f"{words} on {', '.join(hosts) if len(hosts) <= _HOSTS_NAMED else f'{len(hosts)} hosts'}"
        for words, hosts in found.items()
    )


def _why_lost(lost: list[NodeFate], *, words: bool = True) -> str:
    """Describe node programs that ended before they joined: the first one, and how many more there are.

    >>> _why_lost([NodeFate("hB", 1, running=False, exitcode=-9)])
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
