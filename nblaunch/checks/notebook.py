"""The doctor's checks of the front end and of versions: what can be shown, and what does not fit together."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from nblaunch import _notebook
from nblaunch._notebook import DISPLAY_MODES, DISPLAY_VARIABLE, TESTED_VARIABLE
from nblaunch.checks.report import Finding, ok, problem, warning
from nblaunch.options.table import nearest

_REQUIREMENT = re.compile(r"([\w.-]+?)\s*>=\s*([\d.]+)")
_MODULES = {"ipython": "IPython", "pyzmq": "zmq"}
_BUSY_SHELL = (7, 4)
"""The ipykernel that answers a widget on the shell that spoke last: the one that is busy with the cell."""


def front_end() -> Iterator[Finding]:
    name = "notebook"
    wanted = os.environ.get(DISPLAY_VARIABLE) or "auto"
    if wanted not in DISPLAY_MODES:
        guess = nearest(wanted, DISPLAY_MODES)
        yield problem(
            name,
            f"{DISPLAY_VARIABLE}={wanted!r}, but a run is shown as {', '.join(DISPLAY_MODES)}",
            f"Set it to {guess}." if guess is not None else "Set it to one of them, or unset it.",
        )
        return
    asked = f" ({DISPLAY_VARIABLE}={wanted})" if wanted != "auto" else ""
    shell = _notebook.shell()
    kernel = getattr(shell, "kernel", None)
    if shell is None:
        yield ok(name, f"plain Python: runs are shown, as text, with display=True{asked}")
    elif kernel is None:
        yield ok(name, f"IPython in a terminal: runs are shown as text{asked}")
    elif wanted in ("text", "html"):
        yield ok(name, f"runs are shown as {wanted}, once they have ended{asked}")
    elif wanted == "auto" and os.environ.get(TESTED_VARIABLE):
        yield ok(name, "pytest has started this kernel: runs are shown as html, once they have ended")
    elif getattr(kernel, "comm_manager", None) is None:
        yield warning(
            name,
            "this kernel has no widgets: runs are shown as HTML, once they have ended",
            "Use ipykernel for a panel that is live.",
        )
    else:
        yield _widgets(name)


def _widgets(name: str) -> Finding:
    versions = {each: _installed(each) for each in ("ipykernel", "ipywidgets", "anywidget")}
    missing = [each for each, version in versions.items() if version is None]
    if missing:
        advice = f"Install it and restart the kernel: pip install {' '.join(missing)}"
        return problem(name, f"the live panel needs {' and '.join(missing)}", advice)
    shown = ", ".join(f"{each} {version}" for each, version in versions.items())
    advice = (
        "If no panel appears, the environment of the Jupyter server (not this one) lacks jupyterlab_widgets; "
        f"{DISPLAY_VARIABLE}=html does without."
    )
    if numbers(versions["ipykernel"] or "")[:2] >= _BUSY_SHELL:
        advice += (
            " With this ipykernel a click in a widget waits for the end of the cell: to stop, interrupt."
        )
    return ok(name, f"a live panel: {shown}", advice)


def versions() -> Iterator[Finding]:
    name = "versions"
    python = f"Python {sys.version.split()[0]} on {sys.platform}"
    try:
        required = metadata.requires("nblaunch") or []
        own = metadata.version("nblaunch")
    except metadata.PackageNotFoundError:
        yield ok(name, f"{python}; nblaunch is not installed as a package, so what it needs is not known")
        return
    needed = [_REQUIREMENT.match(line) for line in required if "extra ==" not in line]
    floors = {"nblaunch": "0"} | {each[1]: each[2] for each in needed if each is not None}
    wrong = [finding for package, floor in floors.items() for finding in _compare(package, floor)]
    yield from wrong
    if not wrong:
        yield ok(name, f"nblaunch {own}, {python}; all that it needs is new enough")


def _compare(package: str, floor: str) -> Iterator[Finding]:
    name = "versions"
    installed = _installed(package)
    if installed is None:
        yield problem(name, f"{package} is not installed", f"pip install '{package}>={floor}'")
        return
    if numbers(installed) < numbers(floor):
        advice = f"pip install '{package}>={floor}', then restart the kernel."
        yield problem(
            name, f"{package} {installed} is installed, and nblaunch needs {floor} or later", advice
        )
    module = sys.modules.get(_MODULES.get(package, package))
    loaded = str(getattr(module, "__version__", installed))
    if numbers(loaded) != numbers(installed):
        yield warning(
            name,
            f"{package} {loaded} is loaded here, and {installed} is installed",
            "It was installed after it was loaded; ranks may get the other one. Restart the kernel.",
        )


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, without zeros at their end.

    >>> numbers("2.13.0+cpu"), numbers("8.0.0rc1"), numbers("")
    ((2, 13), (8,), ())
    """
    matched = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in matched[0].split(".")] if matched else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
