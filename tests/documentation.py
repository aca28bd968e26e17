"""Builds the site, by the command that CONTRIBUTING.md has for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 280
"""Of a build, which takes 10 s of a processor that others use, too."""


def command() -> list[str]:
    """Return the command, without its output directory."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (line,) = re.findall(r"`\.venv/bin/(sphinx-build .* dirhtml notebooks) build/site`", text)
    return shlex.split(line)


def build(directory: Path) -> Path:
    """Build the site into a directory; fail with what Sphinx says where it is no clean build."""
    program, *arguments = command()
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments, str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return directory
