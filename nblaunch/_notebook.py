"""The notebook that this process belongs to, if any; IPython is never imported here."""

from __future__ import annotations
import __future__

import functools
import importlib
import operator
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

DISPLAY_VARIABLE = "NBLAUNCH_DISPLAY"
DISPLAY_MODES = ("auto", "widget", "html", "text")
TESTED_VARIABLE = "PYTEST_CURRENT_TEST"
"""pytest sets it while it starts a kernel, as nbval does to compare a notebook with its saved outputs."""


def shell() -> Any | None:
    """Return the running IPython shell, or None in plain Python."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


# All signs that IPython's token transformers look for. They tokenize the cell, in Python.
_SIGNS = re.compile(r"\?|!(?!=)|=\s*%|^\s*[%/,;]", re.MULTILINE)
_TRANSFORMERS = "IPython.core.inputtransformer2"


def transform_cell(running: Any, source: str, transform: Callable[[str], str]) -> str:
    """Return what `transform`, the shell's own, makes of a cell; without its token transformers if it can be.

    A single line goes through all of it: it may be a call without brackets.
    """
    manager = running.input_transformer_manager
    all_known = all(each.__module__ == _TRANSFORMERS for each in manager.token_transformers)
    if _SIGNS.search(source) or not all_known or running.input_transformers_post:
        return transform(source)
    lines = (source if source.endswith("\n") else f"{source}\n").splitlines(keepends=True)
    for each in (*manager.cleanup_transforms, *manager.line_transforms):
        lines = each(lines)
    # What is behind a prompt was not at the start of a line.
    text = "".join(lines)
    return text if len(lines) > 1 and not _SIGNS.search(text) else transform(source)


def takes_updates() -> bool:
    """Return whether the front end is known to show an updated display in the place of the first one.

    Not every front end does: `jupyter console` ignores updates, VS Code, CoCalc and euporie did in some of
    their releases (`tests/programs/test_front_ends.py` has the sources). None says so. Two kinds that take
    updates can be told: JupyterLab and Notebook 7 name the deleted cells with each cell that they run, and
    programs that execute notebooks (nbclient, papermill) allow no input.
    """
    kernel = getattr(shell(), "kernel", None)
    if kernel is None:
        return True
    get_parent = getattr(kernel, "get_parent", None)
    parent = (get_parent() if get_parent is not None else None) or {}
    allows_input = parent.get("content", {}).get("allow_stdin", True)
    return "deletedCells" in parent.get("metadata", {}) or not allows_input


def namespace() -> dict[str, Any] | None:
    """Return the notebook's variables, or None in plain Python."""
    running = shell()
    return running.user_ns if running is not None else None


def ends_within(seconds: float) -> bool:
    """Return whether this kernel is shut down or restarted by then; it waits as long as it is not."""
    running = shell()
    if getattr(running, "kernel", None) is None:
        return False
    deadline = time.monotonic() + seconds
    # ipykernel sets it on another thread, also while a cell runs.
    while not getattr(running, "exit_now", False) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(getattr(running, "exit_now", False))


def title_of(filename: str) -> str:
    """Return the title of the cell compiled under this file name: `Cell In[3]`."""
    running = shell()
    described = running.compile.format_code_name(filename) if running is not None else None
    return " ".join(described) if described else filename


def inside_rank() -> int | None:
    """Return this process's rank if it is one, else None."""
    publisher = getattr(sys.modules.get("nblaunch.rank.shell"), "publisher", None)
    return publisher.rank if publisher is not None and publisher.send is not None else None


def ask_rank(module: str, question: str, *arguments: object, **keywords: object) -> object:
    """Call a function of a module of `nblaunch.rank` between two cells, such as `describe` of `shell`.

    The notebook has a rank call this, by name: it never imports `nblaunch.rank`. Some modules are loaded only
    for this.
    """
    return getattr(importlib.import_module(f"nblaunch.rank.{module}"), question)(*arguments, **keywords)


_FUTURE_FLAGS = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def future_flags() -> int:
    """Return the flags of `compile` that `from __future__ import` has switched on in this notebook."""
    running: Any = shell()
    return int(running.compile.flags) & _FUTURE_FLAGS if running is not None else 0


def path() -> str:
    """Return the path of the notebook that this kernel runs, empty where no front end has reported it."""
    known = (namespace() or {}).get("__vsc_ipynb_file__")  # VS Code's; Jupyter servers set the variable
    return known if isinstance(known, str) else os.environ.get("JPY_SESSION_NAME", "")
