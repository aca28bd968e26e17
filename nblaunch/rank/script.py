"""A script in a rank: `__main__` of this very process, as `python train.py` and `python -m` have it.

A program that Python does not run is a child of the rank, with its environment, streams and end.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.util
import io
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from string import Template
from typing import Any

from nblaunch.protocol.messages import ScriptJob

_MOST_NAMED = 3
_NAMED_THREAD = re.compile(r"Thread-\d+ \((.+)\)")
"""The name that Python gives a thread without one: its function is what the user knows."""


class ProgramEndedError(Exception):
    """A program that Python does not run has failed; `exitcode` is negative for a signal."""

    def __init__(self, exitcode: int) -> None:
        super().__init__(exitcode)
        self.exitcode = exitcode


def run(job: ScriptJob) -> None:
    """Run a script to its end. Raises what it raises, `SystemExit` only with an exit status other than 0."""
    # torchelastic's macro (`torch.distributed.elastic.utils.macros`).
    args = [Template(arg).safe_substitute(local_rank=os.environ["LOCAL_RANK"]) for arg in job.args]
    if job.program:
        _run_program([job.path, *args])
        return
    # The script and the modules that it imports may have been written a moment ago.
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = [job.name, *args]
    try:
        code = _module(job.name, main) if job.module else _file(job.path, main)
        exec(code, main.__dict__)  # noqa: S102 - to run it is what was asked for
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


# What Python does after the last line of a script, here, while its output still belongs to the run. Within
# `telling(what)` the notebook is told what the rank does, if it takes longer than a moment.

Telling = Callable[[Callable[[], str]], contextlib.AbstractContextManager[None]]


def wait_for_threads(telling: Telling) -> None:
    """Wait for all threads but daemons; an interrupt ends the wait, as in Python."""
    # Private: with these, executors end their idle threads, which the loop below would join forever.
    for shut_down in reversed(tuple(getattr(threading, "_threading_atexits", ()))):
        with telling(_threads) if _awaited() else contextlib.nullcontext():
            shut_down()
    while threads := _awaited():
        with telling(_threads):
            threads[0].join()


def call_exit_functions(telling: Telling) -> None:
    """Call what is registered with `atexit`, once; an interrupt ends one of them, as in Python."""
    with telling(lambda: "exit functions"):
        atexit._run_exitfuncs()  # noqa: SLF001 - no public way


def leave_out_finalizers() -> None:
    """Have exit functions not call the finalizers that exist by now: they are no part of the program.

    torch's take back its operators one by one, for 30 ms.
    """
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined] # noqa: SLF001 - no public way
        each.atexit = False


def _awaited() -> list[threading.Thread]:
    main = threading.main_thread()
    return [each for each in threading.enumerate() if not each.daemon and each is not main]


def _threads() -> str:
    """Name the threads that Python waits for; empty if the last of them has just ended."""
    names = [_NAMED_THREAD.sub(r"\1", each.name) for each in _awaited()]
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"thread{'s' * (len(names) > 1)} {', '.join(names[:_MOST_NAMED])}{more}"


def _file(path: str, main: types.ModuleType) -> types.CodeType:
    """Return the code of a file, of a directory with a `__main__.py`, or of a zip file with one."""
    importer: Any = pkgutil.get_importer(path)
    if importer is not None:
        sys.path.insert(0, path)
        return _code(importer.find_spec("__main__"), path, main)
    sys.path.insert(0, str(Path(path).resolve().parent))
    _set_attributes(main, file=path, loader=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        compiled: types.CodeType | None = pkgutil.read_code(file)
    return compiled or compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _module(name: str, main: types.ModuleType) -> types.CodeType:
    sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = _code(spec, name, main)
    sys.argv[0] = str(main.__file__)
    return code


def _code(spec: ModuleSpec | None, name: str, main: types.ModuleType) -> types.CodeType:
    loader: Any = spec.loader if spec is not None else None
    code: types.CodeType | None = loader.get_code(spec.name) if spec is not None and loader else None
    if spec is None or code is None:
        msg = f"there is no Python code to run in {name!r}"
        raise ImportError(msg)
    _set_attributes(main, file=spec.origin, loader=loader, spec=spec)
    return code


def _set_attributes(
    main: types.ModuleType, *, file: str | None, loader: object, spec: ModuleSpec | None = None
) -> None:
    vars(main).update(
        __builtins__=builtins,
        __file__=file,
        __cached__=spec.cached if spec is not None else None,
        __loader__=loader,
        __package__=spec.parent if spec is not None else None,
        __spec__=spec,
    )


def _run_program(command: list[str]) -> None:
    """Run a program to its end. Raises `ProgramEndedError`, or `KeyboardInterrupt` after an interrupt.

    Signals of this process are forwarded to the program and its children, which have their own process group.
    """
    received: list[int] = []
    groups: list[int] = []

    def deliver(number: int) -> None:
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    def forward(number: int, _: object) -> None:
        received.append(number)
        deliver(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command, process_group=0, stdout=1, stderr=2)  # noqa: S603 - to run it is what was asked for
        groups.append(process.pid)
        for number in tuple(received):
            deliver(number)  # it came before the program was there
        exitcode = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGTERM in received:
        # The signal was for the rank, which has waited for the program only.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if exitcode and signal.SIGINT in received:
        raise KeyboardInterrupt
    if exitcode:
        raise ProgramEndedError(exitcode)
