"""A Ray driver for one allocation: a child process of the runtime, connected to the cluster.

It imports ray, and nothing of nblaunch, so the cluster's Python needs only ray. Its argument is the number of
a socket that carries lines of JSON. The runtime sends the request, and then the program to run on each node.
The driver sends each new report (`RayReport`). It ends with the socket; Ray takes back the nodes of a driver
that is gone, however it ended.

    main thread   connects, asks for a placement group, then looks at it and at the cluster
    reader        obeys the runtime
    watcher       waits for the ends of programs
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

_PLACE = "NBLAUNCH_NODE_PLACE"
_OF_WORKERS = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Variables that Ray sets for its own workers, besides those that begin with its name."""
_GUARD = """
import os, signal, sys
def die_with(parent, number):
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, number)
    if os.getppid() != parent:
        os._exit(1)
worker, *command = sys.argv[1:]
guard = os.getpid()
die_with(int(worker), signal.SIGKILL)
program = os.fork()
if not program:
    try:
        die_with(guard, signal.SIGTERM)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}".encode())
        os._exit(127)
code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
if code < 0:
    os.kill(guard, -code)
os._exit(abs(code))
"""
"""A process between an actor and its program. At its end the program gets SIGTERM, and can clean up.

Without it the program would be a child of a Ray worker, which kills its children when it ends.
"""
_PROGRAM_STEP = 0.05
_LAST_BYTES = 16 * 1024
_INLINE_BYTES = 64 * 1024

_CONNECT_SECONDS = 3.0
# For how many seconds a cluster reached by ray:// keeps the nodes of a driver that is cut off.
_GRACE = "5"
_POLL_SECONDS, _WATCH_SECONDS = 0.25, 0.25
_HELD_POLL_SECONDS = 1.0
_SILENT_SECONDS = 3.0
_NODES_NAMED = 4
_CLIENT = "ray://"
HINT = (
    "Start a cluster with `ray start --head` on this machine, set RAY_ADDRESS to one that it is part of, "
    "or name the head of another one: --on ray=ray://HOST:10001."
)
_REFUSED_HINT = (
    "The address does answer. If the cluster has a token, set RAY_AUTH_MODE=token here, and put the token "
    "into RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token."
)
_OPEN = (
    "Ray asks for no token: anyone who reaches {} can run programs on the nodes. Make a token with "
    "`ray get-auth-token --generate`, and start the cluster with RAY_AUTH_MODE=token."
)


def directory_for(wanted: str) -> str:
    """Return the wanted directory; if it is missing, the home directory or one for temporary files."""
    home = os.path.expanduser("~")  # noqa: PTH111 - never raises
    return next(filter(os.path.isdir, (wanted, home)), tempfile.gettempdir())


class NodeSupervisor:
    """An actor on a node: runs the node program as a process."""

    def __init__(self) -> None:
        self._printed: Any = None

    async def run(self, order: Mapping[str, Any], place: int, stdin: bytes) -> tuple[int, str]:
        """Run a program to its end; return its exit status, and the end of its output.

        Its standard input is the key, followed by `stdin`.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not (name.startswith("RAY_") or name in _OF_WORKERS)
        }
        command = [order["python"] or sys.executable, *order["arguments"]]
        with tempfile.TemporaryFile() as self._printed:
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - it takes no time; what the user has asked for
                [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=self._printed,
                stderr=self._printed,
                env=kept | {_PLACE: str(place)},
                cwd=directory_for(order["cwd"]),
                start_new_session=True,
            )
            # A program may read it late, or never.
            feeding = threading.Thread(target=_feed, args=[process.stdin, order["key"], stdin], daemon=True)
            feeding.start()
            while process.poll() is None:  # noqa: ASYNC110 - nobody tells when it ends
                await asyncio.sleep(_PROGRAM_STEP)
            return process.returncode, await self.printed()

    async def printed(self) -> str:
        """Return the end of what the program has printed."""
        try:
            fd = self._printed.fileno()
        except (AttributeError, ValueError):  # the program has not started, or has ended
            return ""
        start = max(os.fstat(fd).st_size - _LAST_BYTES, 0)
        return os.pread(fd, _LAST_BYTES, start).decode(errors="replace")


def _feed(pipe: Any, key: str, stdin: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(key.encode() + b"\n" + stdin)


class RayDriver:
    """One allocation: a placement group, an actor on each of its nodes, and the programs of these."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lines = link, link.makefile()
        self._lock = threading.Lock()
        self._report: dict[str, Any] = {}
        self._request = json.loads(self._lines.readline())
        self._address: str = self._request["address"]
        self._ray: Any = None
        self._group: Any = None
        self._bundle: dict[str, float] = {}
        self._count = 0
        self._bundles: list[int] = []
        """Those of the group, by the place of their nodes."""
        self._hosts: list[str] = []
        self._actors: dict[int, Any] = {}
        self._running: dict[int, Any] = {}
        """By place, the Ray object that becomes ready when the program has ended."""
        self._ended: dict[int, tuple[int | None, str]] = {}
        self._doing: dict[int, str] = {}
        """By place, the last line of a program that says what it does before it joins."""
        self._starts = 0
        self._polled = 0.0

    # --- the main thread ---------------------------------------------------------------------------

    def serve(self) -> NoReturn:
        """Ask for nodes and watch them, until the runtime ends the driver."""
        threading.Thread(target=self._obey, name="reader", daemon=True).start()
        try:
            self._connect()
            self._ask()
            threading.Thread(target=self._watch, name="watcher", daemon=True).start()
            while self._poll():
                time.sleep(_HELD_POLL_SECONDS if self._hosts else _POLL_SECONDS)
        except Exception as error:  # noqa: BLE001 - Ray's words, whatever they are
            self._tell(state="ENDED", words=str(error).strip() or type(error).__name__, reason="")
        self._release()

    def _connect(self) -> None:
        here = "the cluster of this machine" if self._address == "auto" else self._address
        self._tell(state="WAITING", words=f"connecting to {here}")
        answers = _answers(self._address)
        ray = _loaded()
        try:
            ray.init(self._address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            msg = f"{error}\n{_REFUSED_HINT if answers else HINT}"
            raise ConnectionError(msg) from error
        self._ray = ray
        self._tell(id=ray.get_runtime_context().get_job_id())

    def _ask(self) -> None:
        from ray.util.placement_group import placement_group

        _, rows, token = self._answer()
        if not token:
            port = self._address.removeprefix(_CLIENT)
            if port == "auto":
                port = self._ray.get_runtime_context().gcs_address
            self._tell(warning=_OPEN.format(port))
        least, most = self._request["least"], self._request["most"]
        self._bundle = bundle_for(self._request["nproc"], rows, least)
        self._count = min(max(sum(_fits(self._bundle, row["free"]) for row in rows), least), most)
        self._group = placement_group(
            [self._bundle] * self._count, strategy="STRICT_SPREAD", name=self._request["name"]
        )

    def _answer(self) -> tuple[Mapping[str, Any], list[dict[str, Any]], bool]:
        """Return Ray's table of the group, what its nodes have, and whether it asks for a token."""
        if self._address.startswith(_CLIENT):
            asked = self._ray.remote(num_cpus=0)(cluster_state).remote(self._group)
            found: tuple[Mapping[str, Any], list[dict[str, Any]], bool] = self._ray.get(asked)
            return found
        return cluster_state(self._group)

    def _poll(self) -> bool:
        """Report the state of the placement group; return whether it exists."""
        table, rows, _ = self._answer()
        self._polled = time.monotonic()
        state: str = table.get("state", "REMOVED")
        if state == "CREATED":
            self._granted(table["bundles_to_node_id"], {row["id"]: row for row in rows})
        if state == "REMOVED":
            self._tell(state="ENDED", words=f"its placement group is {state}", reason="")
        elif self._hosts:
            # The bundle of a lost node waits for another node.
            self._tell(state="GRANTED", words=state, reason="", hosts=self._hosts)
        else:
            self._tell(state="WAITING", words=state, reason=reason_for(self._count, self._bundle, rows))
        return state != "REMOVED"

    def _granted(self, nodes: Mapping[int, str], rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each node its place, in the order of their names; a place that is lost gets the new node."""
        if any(node not in rows for node in nodes.values()):
            return  # a node has just been lost, or has just come
        if not self._bundles:
            self._bundles = sorted(
                nodes, key=lambda each: (rows[nodes[each]]["host"], rows[nodes[each]]["address"])
            )
        of_places = [rows[nodes[bundle]] for bundle in self._bundles]
        names = [row["host"] for row in of_places]
        self._hosts = names if len(set(names)) == len(names) else [row["address"] for row in of_places]

    # --- the watcher, the reader, and what both use ------------------------------------------------

    def _watch(self) -> None:
        """Report the ends of programs, and a head that does not answer."""
        while True:
            with self._lock:
                places = {ref: place for place, ref in self._running.items()}
            if places:
                done, _ = self._ray.wait(list(places), timeout=_WATCH_SECONDS)
                for ref in done:
                    self._end(places[ref], ref)
                self._listen()
            else:
                time.sleep(_WATCH_SECONDS)
            if self._polled and time.monotonic() > self._polled + _SILENT_SECONDS:
                self._tell(reason="the head of the cluster does not answer")

    def _listen(self) -> None:
        """Report what programs do before they join."""
        asked = {
            place: self._actors[place].printed.remote() for place in self._doing if place in self._actors
        }
        done, _ = (
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=1) if asked else ([], [])
        )
        for place, ref in asked.items():
            with contextlib.suppress(Exception):  # its actor's end is reported elsewhere
                line = self._ray.get(ref).rstrip().rpartition("\n")[2] if ref in done else ""
                if line.startswith(self._request["doing"]):
                    self._doing[place] = line
                elif line:
                    del self._doing[place]
        if asked:
            self._tell()

    def _end(self, place: int, ref: Any) -> None:
        try:
            end = self._ray.get(ref)
        except Exception as error:  # noqa: BLE001 - the actor's end, in Ray's words
            end = None, str(error)
            actor = self._actors.pop(place, None)
            with contextlib.suppress(Exception):  # the node may be out of reach, and come back
                self._ray.kill(actor)
        with self._lock:
            self._running.pop(place)
            self._doing.pop(place, None)
            self._ended[place] = end
        self._tell()

    def _obey(self) -> NoReturn:
        for line in self._lines:
            try:
                self._start(json.loads(line))
            except Exception as error:  # noqa: BLE001 - Ray's words, whatever they are
                self._tell(state="ENDED", words=str(error), reason="")
        self._release()

    def _start(self, order: dict[str, Any]) -> None:
        """Start a program on each node on which none runs."""
        with self._lock:
            free = [place for place in range(len(self._hosts)) if place not in self._running]
        stdin: Any = base64.b64decode(order.pop("stdin"))
        if len(stdin) > _INLINE_BYTES:  # once for all nodes; the key goes elsewhere
            stdin = self._ray.put(stdin)
        for place in free:
            if place not in self._actors:
                self._actors[place] = self._actor(self._bundles[place])
            ref = self._actors[place].run.remote(order, place, stdin)
            with self._lock:
                self._ended.pop(place, None)
                self._running[place] = ref
                if stdin:
                    self._doing[place] = ""
        self._starts += 1
        self._tell()

    def _actor(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, bundle)
        return (
            self._ray.remote(NodeSupervisor)
            .options(
                num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), scheduling_strategy=where
            )
            .remote()
        )

    def _tell(self, **news: Any) -> None:
        """Send a report; fields that are not given keep their values."""
        with self._lock:
            statuses = [
                {"host": host, "place": place, "running": True, "words": self._doing.get(place, "")}
                if place in self._running
                else {
                    "host": host,
                    "place": place,
                    "running": False,
                    "exitcode": self._ended[place][0],
                    "words": self._ended[place][1],
                }
                for place, host in enumerate(self._hosts)
                if place in self._running or place in self._ended
            ]
            report = {**self._report, **news, "statuses": statuses, "starts": self._starts}
            if report != self._report:
                self._report = report
                with contextlib.suppress(OSError):  # the runtime is gone
                    self._link.sendall(json.dumps(report).encode() + b"\n")

    def _release(self) -> NoReturn:
        """End: Ray ends the actors, with them the programs, and removes the group."""
        if self._ray is not None:
            with contextlib.suppress(Exception):
                self._ray.shutdown()
        os._exit(0)


def _answers(address: str) -> bool:
    """Return True if a process listens at the address, False if the address has no port.

    Raises `ConnectionError` if nobody listens, for which Ray would take half a minute.
    """
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if not (host and port.isdecimal()):
        return False  # `auto`, which Ray finds out
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        hint = "" if address.startswith(_CLIENT) else f"\n{HINT}"
        msg = f"nobody answers at {address}: {error.strerror or error}{hint}"
        raise ConnectionError(msg) from error
    return True


def _loaded() -> Any:
    """Load ray, configured to do nothing by itself."""
    os.environ |= {
        "RAY_CLIENT_RECONNECT_GRACE_PERIOD": os.environ.get("RAY_CLIENT_RECONNECT_GRACE_PERIOD", _GRACE),
        # A call after the end of the connection would start a new cluster.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        # Under `uv run`, ray would send the notebook's project to all nodes.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    # Hide this module from jsonschema, which ray loads: compiling its grammar takes a second.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import ray

    return ray


def cluster_state(group: Any) -> tuple[Mapping[str, Any], list[dict[str, Any]], bool]:
    """Return Ray's table of a placement group, its nodes' resources, and whether the cluster has a token.

    It runs in a process of the cluster: a driver that is none may have a token that nobody asks for.
    """
    import ray
    from ray.util.placement_group import placement_group_table

    free: Mapping[str, Mapping[str, float]] = {}
    with contextlib.suppress(ImportError):  # not a public API of Ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
    rows = [
        {
            "id": node["NodeID"],
            "host": node["NodeManagerHostname"],
            "address": node["NodeManagerAddress"],
            "total": node["Resources"],
            "free": free.get(node["NodeID"], node["Resources"]),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    raylet: Any = importlib.import_module("ray._raylet")  # nor is this
    modes = getattr(raylet, "AuthenticationMode", None)  # an older Ray has no tokens
    token = modes is not None and raylet.get_authentication_mode() != modes.DISABLED
    return placement_group_table(group) if group is not None else {}, rows, token


def bundle_for(nproc: int | str, rows: Iterable[Mapping[str, Any]], least: int) -> dict[str, float]:
    """Return the resources to ask of each node: a CPU per rank, and a GPU per rank if enough nodes have them.

    >>> rows = [{"total": {"CPU": 8, "GPU": 4}}, {"total": {"CPU": 8, "GPU": 2}}, {"total": {"CPU": 2}}]
    >>> bundle_for(2, rows, 2), bundle_for(4, rows, 2), bundle_for("gpu", rows, 2)
    ({'CPU': 2, 'GPU': 2}, {'CPU': 4}, {'CPU': 2, 'GPU': 2})
    """
    totals = [row["total"] for row in rows]
    gpus = sorted((total["GPU"] for total in totals if total.get("GPU")), reverse=True)
    # All GPUs of a node: as many as the best `least` nodes have at least.
    if isinstance(nproc, int):
        share = nproc
    elif nproc == "cpu":
        cpus = sorted((total["CPU"] for total in totals if total.get("CPU")), reverse=True)
        share = cpus[min(least, len(cpus)) - 1] if cpus else 1
    else:
        share = gpus[least - 1] if len(gpus) >= least else 1
    bundle: dict[str, float] = {"CPU": share}
    if nproc != "cpu" and sum(each >= share for each in gpus) >= least:
        bundle["GPU"] = share
    return bundle


def reason_for(count: int, bundle: Mapping[str, float], rows: list[dict[str, Any]]) -> str:
    """Describe what is waited for, and what there is.

    >>> rows = [{"host": "hA", "total": {"CPU": 2}, "free": {"CPU": 1}}, {"host": "hB", "total": {"CPU": 1}}]
    >>> rows[1]["free"] = rows[1]["total"]
    >>> reason_for(2, {"CPU": 2}, rows)
    'waits for 2 x {CPU: 2}, which only 1 of 2 nodes can give; free: hA {CPU: 1}, hB {CPU: 1}'
    """
    able = sum(_fits(bundle, row["total"]) for row in rows)
    lacking = f", which only {able} of {len(rows)} nodes can give" if able < count else ""
    most = sorted(rows, key=lambda row: ([-row["free"].get(name, 0) for name in bundle], row["host"]))[
        :_NODES_NAMED
    ]
    free = [
        f"{row['host']} {_shown({name: row['free'].get(name, 0) for name in bundle})}"
        for row in sorted(most, key=lambda row: str(row["host"]))
    ]
    others = f" and {len(rows) - len(most)} more" if len(rows) > len(most) else ""
    return f"waits for {count} x {_shown(bundle)}{lacking}; free: {', '.join(free)}{others}"


def _fits(bundle: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(there.get(name, 0) >= amount for name, amount in bundle.items())


def _shown(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"


if __name__ == "__main__":
    RayDriver(socket.socket(fileno=int(sys.argv[1]))).serve()
