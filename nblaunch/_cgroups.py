"""What the control groups around this process allow: memory and processes, of both versions of cgroups.

Read where payloads are placed, by the diagnosis, by worker groups and by the doctor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60
"""What cgroups of version 1 write for "no limit" is a little less than 2**63."""
_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def directories(controller: str, *, root: Path = _ROOT, own: Path = _OWN) -> Iterator[Path]:
    """Yield the directories that limit this process: its own cgroup's and all above, of both versions.

    A container often sees its own cgroup at the top of the file system, under a path that only the host
    knows: directories that are not there are passed over.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = root
        elif controller in controllers.split(","):
            top = root / controller
        else:
            continue
        below = Path(path.lstrip("/"))
        for part in (below, *below.parents):
            if (top / part).is_dir():
                yield top / part


def tightest_memory(within: Iterable[Path] | None = None) -> tuple[int, int] | None:
    """Return the limit of the cgroup with the least left, and what is left of it, in bytes."""
    found: list[tuple[int, int]] = []
    for directory in directories("memory") if within is None else within:
        for limit_file, usage_file in _MEMORY:
            limit, used = number(directory / limit_file), number(directory / usage_file)
            if limit is not None and used is not None:
                # Pages of files that nobody uses count as used, and go when others need the memory.
                found.append((limit, min(max(limit - used + _reclaimable(directory), 0), limit)))
    return min(found, key=lambda each: each[1], default=None)


def tightest_tasks(within: Iterable[Path] | None = None) -> tuple[int, int] | None:
    """Return how many processes and threads the tightest cgroup has, and its limit."""
    found: list[tuple[int, int]] = []
    for directory in directories("pids") if within is None else within:
        limit, used = number(directory / "pids.max"), number(directory / "pids.current")
        if limit is not None and used is not None:
            found.append((used, limit))
    return min(found, key=lambda each: each[1] - each[0], default=None)


def oom_kills(within: Iterable[Path] | None = None) -> int | None:
    """Return how many processes the system has killed for memory in this cgroup, None if unknown."""
    for directory in directories("memory") if within is None else within:
        for name in ("memory.events", "memory.oom_control"):
            count = _table(directory / name).get("oom_kill")
            if count is not None:
                return count
    return None


def number(path: Path) -> int | None:
    """Return the number in a file, None for no file, no number (`max`) and what is no limit."""
    try:
        found = int(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found < _NO_LIMIT else None


def _reclaimable(directory: Path) -> int:
    counted = _table(directory / "memory.stat")
    return counted.get("total_inactive_file", counted.get("inactive_file", 0))


def _table(path: Path) -> dict[str, int]:
    counted: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            counted[key] = int(value)
    return counted
