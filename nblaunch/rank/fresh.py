"""`--start-method spawn`: a fork of the server that goes on as a new Python.

It stays the same process: its number, its log files, its session and "die with your parent" outlive exec.
What it loses is all that the server had loaded, which is what whoever asks for this wants.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any, NoReturn

_CODE = (
    "import json, os, sys; told = json.load(open(sys.argv[1])); os.unlink(sys.argv[1]); "
    "sys.path[:] = told['path']; from nblaunch.rank.main import resume; resume(told['orders'])"
)
_flags: Any = vars(util)["_args_from_interpreter_flags"]  # as multiprocessing does; the stubs leave it out


def begin_anew(orders: dict[str, Any], directory: str, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process's program by a new Python that calls `resume(orders)`.

    It starts under `environ`: some variables are read when a program or a library is loaded, and never again.
    """
    # In a file, since they hold what the rank proves itself with; whoever does not come to remove it leaves
    # it to the end of the group.
    told = Path(directory, f"orders-{os.getpid()}")
    told.touch(mode=0o600)
    told.write_text(json.dumps({"path": sys.path, "orders": orders}))
    python = os.fsdecode(spawn.get_executable() or sys.executable)
    os.execve(python, [python, *_flags(), "-c", _CODE, str(told)], environ)  # noqa: S606 - our own interpreter


def load_what_torchelastic_brings() -> None:
    """Import what a rank finds loaded when torchelastic has called it: its error files."""
    importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
