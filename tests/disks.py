"""Small file systems, for tests of what happens when a disk is full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lanes import left_out


def need_mounts_of_its_own() -> None:
    """Give up where no process can have mounts that it alone sees."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("mount") is None:
        left_out("mounting a file system for one process needs root, unshare and mount")
    possible = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True, text=True)
    if possible.returncode:
        left_out(f"this container may not mount anything: {possible.stderr.strip()}")


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Have a file system of so much room in an empty directory."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        left_out("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
