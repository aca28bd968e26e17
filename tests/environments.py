"""Environments without anything of this one, but for torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from cluster import own_uv

from nblaunch.client import packages

ROOT = Path(__file__).parents[1]


def run_uv(*arguments: str) -> None:
    done = subprocess.run([own_uv(), *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def make_environment(directory: Path, wanted: Iterable[str], *words: str, linked: Iterable[str] = ()) -> Path:
    """Make an environment with these requirements, torch and what is `linked`; return its Python.

    uv finds packages as pip does on this machine.
    """
    run_uv("venv", "-q", "-p", sys.executable, str(directory))
    python = directory / "bin" / "python"
    link(directory, ["torch", *linked])
    file = directory / "wanted.txt"
    file.write_text("\n".join([*packages._sources([], os.environ, str(ROOT)), *wanted]))
    install = ["pip", "install", "-q", "--python", str(python), "--index-strategy", "unsafe-best-match"]
    run_uv(*install, *words, "-r", str(file))
    return python


def link(directory: Path, names: Iterable[str]) -> None:
    """Link packages of this environment into another, with what they need: torch is large, compiled here."""
    site = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    found: dict[str, metadata.Distribution] = {}
    for name in names:
        _needed(name, found)
    for each in found.values():
        for top in {Path(str(path)).parts[0] for path in each.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(each.locate_file(top)))


def _needed(name: str, found: dict[str, metadata.Distribution]) -> None:
    if name in found:
        return
    try:
        found[name] = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return  # for another system, or an extra
    for each in found[name].requires or []:
        if "extra ==" not in each:
            _needed(re.split(r"[^\w.-]", each, maxsplit=1)[0], found)
