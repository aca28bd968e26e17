"""A session keeps what its ranks have: a mistake, an interrupt or a timeout ends no rank that is merely busy.

`held(path)` in a rank is a C call that ends when a file is there, and that no signal ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import eventually
from sources import INTERRUPTER, said_by

import nblaunch

GRACE = 0.5
GONE = "the ranks were started anew: all of their variables are gone"
SETUP = """
import ctypes, pathlib, signal, threading, time, torch, torch.distributed as dist

trained = [rank]
mine = dist.new_group([0, 1])

def held(path):
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    def release():
        while not pathlib.Path(path).exists():
            time.sleep(0.01)
        libc.pthread_mutex_unlock(mutex)
    threading.Thread(target=release, daemon=True).start()
    pathlib.Path(f"{path}-{dist.get_rank()}").touch()
    libc.pthread_mutex_lock(mutex)

def touch(path):
    pathlib.Path(f"{path}-{dist.get_rank()}").touch()

def reduced(group=None):
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    return t.item()
"""


def opened(place: Any, **options: Any) -> nblaunch.Session:
    session: nblaunch.Session = place(2, **{"grace": GRACE, **options})
    session.cell(SETUP, namespace={})
    return session


@pytest.fixture(scope="module")
def session(place: Any) -> Iterator[nblaunch.Session]:
    """Give one session to all tests that cost no variable."""
    with opened(place) as made:
        yield made


@pytest.fixture
def own_session(place: Any) -> Iterator[Callable[..., nblaunch.Session]]:
    """Give `own_session(**options)`: sessions of the test's own."""
    made: list[nblaunch.Session] = []

    def make(**options: Any) -> nblaunch.Session:
        made.append(opened(place, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Give the path of the file that ends `held`."""
    return tmp_path / "release"


def cell(session: nblaunch.Session, source: str, path: Path) -> nblaunch.RunResult:
    return session.cell(source, namespace={"path": str(path)}, check=False)


def pressed(session: nblaunch.Session, source: str, path: Path, *, times: int = 1) -> KeyboardInterrupt:
    """Run a cell and interrupt it once each rank has touched its file; again once that is waited for."""
    main = threading.main_thread().ident or 0

    def press() -> None:
        eventually(lambda: len(list(path.parent.glob(f"{path.name}-?"))) == 2, "the ranks are at work", 30)
        signal.pthread_kill(main, signal.SIGINT)
        for _ in range(times - 1):
            eventually(lambda: "interrupted" in str(session.status()), "the ranks are waited for")
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        cell(session, source, path)
    thread.join()
    return caught.value


def release_after(session: nblaunch.Session, path: Path, said: list[str], *, seconds: float = 1) -> Any:
    """End the C call once the session says that it has waited for longer than `seconds`."""

    def watch() -> None:
        def waited() -> bool:
            text = str(session.status())
            if "interrupted" in text:
                said.append(text)
            return any(f"interrupted {second} s ago" in text for second in range(int(seconds), 10))

        try:
            eventually(waited, "the session says that it waits", 30)
        finally:
            path.touch()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def nothing_is_lost(session: nblaunch.Session) -> None:
    result = session.cell("trained, reduced(), reduced(mine)")
    assert result.values == [([0], 2.0, 2.0), ([1], 2.0, 2.0)]
    assert result.warnings == ()
    assert session.status().attempt == 0


# --- ranks in C code -------------------------------------------------------------------------------


def test_a_mistake_on_one_rank_waits_for_the_c_call_of_another(session, release):
    said: list[str] = []
    watch = release_after(session, release, said)
    result = cell(session, "if rank == 1: undefined_name\nelse: held(path)", release)
    watch.join()
    assert result.root_cause.reason.startswith("NameError: name 'undefined_name' is not defined")
    assert [str(each.state) for each in result.ranks] == ["STOPPED", "FAILED"]
    assert result.warnings == ()
    line = next(line for line in said[-1].splitlines() if "rank 0" in line)
    assert "s ago, still at session cell, line " in line
    assert "interrupted" not in str(session.status())
    nothing_is_lost(session)


@pytest.mark.quick
def test_an_interrupt_waits_for_c_calls_and_forms_no_group_again(session, place, release):
    said: list[str] = []
    watch = release_after(session, release, said)
    error = pressed(session, "held(path)", release)
    watch.join()
    assert str(error).startswith(f"the run was interrupted: [{place.named(0, 1)}] at session cell, line ")
    nothing_is_lost(session)


@pytest.mark.slow
def test_a_timeout_waits_for_c_calls_too(own_session, place, release):
    session = own_session(timeout=0.5)
    watch = release_after(session, release, [])
    with pytest.raises(
        nblaunch.RunTimeoutError, match=rf"given 0.5 s .*{place.named(0, 1)}. at session cell"
    ):
        session.cell("held(path)", namespace={"path": str(release)})
    watch.join()
    nothing_is_lost(session)


def test_a_c_call_that_holds_the_interpreter_is_waited_for(session, release):
    said: list[str] = []

    def watch() -> None:
        while "interrupted" not in (text := str(session.status())) and not ended.wait(0.01):
            pass
        said.append(text)

    ended = threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    # About as long on any machine: a call of 0.1 s, as many times as it takes for 3 s.
    source = """
if rank == 0: raise ValueError("a mistake")
began = time.perf_counter(); sum(range(2_000_000)); seconds = time.perf_counter() - began
sum(range(int(2_000_000 * 4 / seconds)))
"""
    result = cell(session, source, release)
    ended.set()
    watching.join()
    assert result.root_cause.rank == 0
    assert "still in C code that holds its interpreter, at session cell, line " in said[0]
    nothing_is_lost(session)


def test_a_rank_in_a_collective_is_freed_while_another_is_in_c_code(session, release):
    session.cell("freed = 0.0")
    watch = release_after(session, release, [])
    source = """
if rank == 0:
    held(path)
touch(path)
began = time.monotonic()
try:
    reduced()
finally:
    freed = time.monotonic() - began
"""
    error = pressed(session, source.replace("if rank == 0:", "if rank == 0:\n    touch(path)"), release)
    watch.join()
    assert session.pull("freed")["freed"][1] < 1.5, "it did not wait for the C call"
    assert error.__notes__[-1].endswith(": mine (mine = dist.new_group(ranks=[0, 1]))")
    result = session.cell("mine = dist.new_group([0, 1])")
    assert result.warnings == ()
    nothing_is_lost(session)


# --- ranks that import -----------------------------------------------------------------------------


@pytest.fixture
def package(release: Path) -> str:
    """Give the name of a package whose import goes on until `release` is there, and works only as a whole."""
    name = f"package_{os.urandom(4).hex()}"
    directory = release.parent / name
    directory.mkdir()
    (directory / "__init__.py").write_text(f"import {name}.first, {name}.second")
    (directory / "first.py").write_text(f"import {name}\n{name}.parts = ['first']")
    (directory / "second.py").write_text(
        f"""
import os, pathlib, time, {name}
pathlib.Path(f"{release}-{{os.environ['RANK']}}").touch()
while not os.access({str(release)!r}, os.F_OK): time.sleep(0.01)  # one line, no frame of Python's own
{name}.parts.append("second")
"""
    )
    return name


def finding_packages(session: nblaunch.Session, release: Path) -> nblaunch.Session:
    session.cell(f"import sys; sys.path.insert(0, {str(release.parent)!r})")
    return session


def is_whole(session: nblaunch.Session, package: str) -> None:
    assert session.cell(f"import {package}; {package}.parts").values == [["first", "second"]] * 2


def test_an_interrupt_waits_for_the_end_of_an_import(session, place, release, package):
    finding_packages(session, release)
    said: list[str] = []
    watch = release_after(session, release, said, seconds=0)
    source = f"import {package}\nimported = True\nwhile True: time.sleep(0.01)"
    error = pressed(session, source, release)
    watch.join()
    assert str(error).startswith(f"the run was interrupted: [{place.named(0, 1)}] importing at ")
    assert f"s ago, still importing at {release.parent / package}/second.py, line " in said[-1]
    assert session.pull("imported")["imported"] == [True, True]
    is_whole(session, package)
    nothing_is_lost(session)


def test_a_second_interrupt_breaks_an_import_off_and_costs_no_variable(session, release, package):
    finding_packages(session, release)
    error = pressed(session, f"import {package}", release, times=2)
    assert "lost" not in str(error)
    assert not release.exists()
    nothing_is_lost(session)


@pytest.mark.slow
def test_an_import_without_an_end_is_broken_off_by_the_first_interrupt(own_session, release, package):
    session = finding_packages(own_session(), release)
    session.cell("from nblaunch.rank import control; control._IMPORT_SECONDS = 0.5")
    pressed(session, f"import {package}", release)
    assert not release.exists()
    nothing_is_lost(session)


def test_an_interrupt_of_fresh_ranks_waits_for_no_import(release, package):
    """Nothing uses their modules later."""

    def job(directory: str, package: str, released: str) -> None:
        import sys

        sys.path.insert(0, directory)
        try:
            importlib.import_module(package)
        except KeyboardInterrupt:
            Path(f"{released}-broken-off-{os.environ['RANK']}").touch()
            raise

    main = threading.main_thread().ident or 0

    def press() -> None:
        eventually(lambda: len(list(release.parent.glob("release-?"))) == 2, "the ranks import", 30)
        signal.pthread_kill(main, signal.SIGINT)
        broken_off = release.parent.glob
        try:
            eventually(lambda: len(list(broken_off("release-broken-off-?"))) == 2, "the imports have ended")
        finally:
            release.touch()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        nblaunch.run(job, args=(str(release.parent), package, str(release)), nproc=2, grace=60)
    thread.join()
    assert len(list(release.parent.glob("release-broken-off-?"))) == 2


# --- ranks that see the interrupt ------------------------------------------------------------------

SAVE = """
saved = 0
touch(path)
try:
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    time.sleep(0.6 * (rank + 1))  # the checkpoint; one rank is later than the other
    saved = reduced() + reduced(mine)
"""


def test_ranks_that_save_what_they_have_may_do_so_with_collectives(own_session, release):
    session = own_session(grace=60)
    began = time.monotonic()
    pressed(session, SAVE, release)
    assert time.monotonic() - began < 30
    assert session.pull("saved")["saved"] == [4.0, 4.0]
    nothing_is_lost(session)


def test_a_handler_of_the_programs_own_may_finish_the_step(own_session, release):
    """Also with collectives, which the ranks are in when they are interrupted and afterwards."""
    session = own_session(grace=60)
    source = """
stop = []
before = signal.signal(signal.SIGINT, lambda *_: stop.append(True))
try:
    touch(path)
    steps, stopping = 0, torch.zeros(1)
    while not stopping.item():
        time.sleep(0.05)
        stopping = torch.tensor([float(len(stop))])
        dist.all_reduce(stopping)
        steps += 1
    time.sleep(0.6)
    last = reduced()
finally:
    signal.signal(signal.SIGINT, before)
"""
    main = threading.main_thread().ident or 0

    def press() -> None:
        eventually(lambda: len(list(release.parent.glob("release-?"))) == 2, "the ranks are at work", 30)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    result = None
    with contextlib.suppress(KeyboardInterrupt):
        result = cell(session, source, release)
    thread.join()
    assert result is None or result.ok
    assert session.pull("last")["last"] == [2.0, 2.0]
    nothing_is_lost(session)


def test_a_fresh_run_may_save_with_collectives_as_well(tmp_path):
    def train(folder: str) -> str:
        import torch
        from torch import distributed

        own = Path(folder) / str(distributed.get_rank())
        own.with_suffix(".started").touch()
        try:
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            time.sleep(0.6)
            total = torch.ones(1)
            distributed.all_reduce(total)
            own.with_suffix(".saved").write_text(str(total.item()))
            return "saved"

    main = threading.main_thread().ident or 0

    def press() -> None:
        eventually(lambda: len(list(tmp_path.glob("*.started"))) == 2, "the ranks are at work", 30)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        nblaunch.run(train, args=(str(tmp_path),), nproc=2, grace=60)
    assert time.monotonic() - began < 40
    thread.join()
    assert sorted(each.read_text() for each in tmp_path.glob("*.saved")) == ["2.0", "2.0"]


def test_a_rank_that_catches_the_interrupt_and_hangs_in_a_collective_is_freed_after_the_grace_period(
    session, release
):
    source = """
touch(path)
try:
    time.sleep(1000)
except KeyboardInterrupt:
    if rank == 0:
        reduced()  # rank 1 does not come
"""
    began = time.monotonic()
    pressed(session, source, release)
    assert GRACE <= time.monotonic() - began < 20
    session.cell("mine = dist.new_group([0, 1])")
    nothing_is_lost(session)


def test_a_value_that_is_being_packed_can_be_interrupted_after_the_grace_period(session, release):
    source = """
class Slow:
    def __reduce__(self):
        touch(path)
        time.sleep(1000)
Slow()
"""
    pressed(session, source, release)
    session.cell("del Slow")
    nothing_is_lost(session)


# --- what is lost is named -------------------------------------------------------------------------

STUBBORN = """
if rank == 1:
    raise ValueError("a mistake")
while True:
    try:
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
"""


def test_a_rank_that_goes_on_after_the_grace_period_is_replaced_and_that_is_said(own_session, release):
    session = own_session()
    result = cell(session, STUBBORN, release)
    assert result.root_cause.message == "a mistake"
    reason, gone = result.warnings
    assert reason == "rank 0 went on after two interrupts, --grace 0.5 s apart"
    assert gone == GONE
    after = session.cell("'trained' in globals()")
    assert (after.values, after.warnings) == ([False, False], ())


def test_a_second_interrupt_ends_ranks_in_c_code_and_says_what_is_lost(own_session, release):
    session = own_session(grace=60)
    error = pressed(session, "held(path)", release, times=2)
    assert str(error).endswith(
        "it was interrupted again, so ranks 0-1 were replaced and their variables are lost"
    )
    assert error.__notes__ == ["ranks 0-1 had not ended when the job was interrupted again", GONE]
    assert session.cell("'trained' in globals()").values == [False, False]
    assert session.status().attempt == 1


@pytest.mark.slow
def test_a_background_job_that_is_cancelled_twice_is_ended_too(own_session, release):
    session = own_session(grace=60)
    session.push({"path": str(release)})

    def busy() -> None:
        __import__("__main__").held(__import__("__main__").path)

    handle = session.submit(busy)
    eventually(lambda: len(list(release.parent.glob("release-?"))) == 2, "the ranks are at work", 30)
    handle.cancel()
    eventually(lambda: "interrupted" in str(session.status()), "the ranks are waited for")
    assert not handle.done()
    handle.cancel()
    with pytest.raises(KeyboardInterrupt, match="their variables are lost"):
        handle.result(30)
    assert session.cell("'trained' in globals()").values == [False, False]


def test_a_stopped_rank_is_waited_for_until_it_goes_on(session, release):
    pid = session.run(os.getpid).values[1]
    said: list[str] = []

    def go_on() -> None:
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "rank 1 is stopped", 30)
        try:
            eventually(lambda: "interrupted 1 s ago" in str(session.status()), "rank 1 is waited for", 30)
            said.append(str(session.status()))
        finally:
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    source = """
import os
if rank == 0:
    raise ValueError("a mistake")
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)  # the interrupt comes just before it
"""
    result = cell(session, source, release)
    thread.join()
    assert (result.root_cause.rank, result.warnings) == (0, ())
    assert "but its process is stopped (SIGSTOP); kill -CONT would let it go on" in said[0]
    nothing_is_lost(session)


# --- an interrupt of the notebook's own code -------------------------------------------------------

SUBMIT = (
    INTERRUPTER
    + """
session = nblaunch.Session(**json.loads(sys.argv[2]), grace=2)
def submit(interrupt=None):
    return traced(lambda: session.submit(int), interrupt)
submit().result(30)
counted = Interrupt(-1, sys.argv[1])
submit(counted).result(30)
assert counted.lines, "no such file, or it does nothing here"
for at in range(1, counted.lines + 1):
    interrupt = Interrupt(at, sys.argv[1])
    try:
        submit(interrupt).result(30)
    except KeyboardInterrupt:
        pass
    deadline = time.monotonic() + 10
    while session._live.busy:
        assert time.monotonic() < deadline, ("busy for good", interrupt.where)
        time.sleep(0.01)
    assert session.run(int).values == [0, 0], interrupt.where
session.close()
print("done")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["/nblaunch/_results.py", "/nblaunch/_api.py"])
def test_an_interrupt_while_a_job_is_submitted_leaves_no_session_busy(file, tmp_path, place):
    assert said_by(SUBMIT, tmp_path, file, json.dumps(place.options(2))) == "done\n"
