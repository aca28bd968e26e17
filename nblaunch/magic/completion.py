"""Completions that depend on this notebook: open sessions, hosts of an allocation, variables."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from nblaunch import _notebook
from nblaunch.magic import sessions

_MOST_HOSTS = 4096
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_OF_IPYTHON = frozenset({"In", "Out", "exit", "quit", "get_ipython", "open"})


def choices() -> Mapping[str, Iterable[str]]:
    """Return the values of options that this notebook knows, by the name of the option."""
    return {"session": list(sessions.opened()), "on": [f"ssh={host}" for host in allocated_hosts(os.environ)]}


def allocated_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of the allocation that this process is in: of Slurm, PBS or LSF.

    >>> allocated_hosts({"SLURM_JOB_NODELIST": "node[08-10,12],login"})
    ['node08', 'node09', 'node10', 'node12', 'login']
    """
    found = [*_of_slurm(environ.get("SLURM_JOB_NODELIST", "")), *environ.get("LSB_HOSTS", "").split()]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if environ.get("PBS_NODEFILE"):
            found += Path(environ["PBS_NODEFILE"]).read_text().split()
    return list(dict.fromkeys(found[:_MOST_HOSTS]))


def _of_slurm(listed: str) -> Iterator[str]:
    """Return the hosts of a list as Slurm writes it, without asking Slurm, which may take its time."""
    for each in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        parts = re.split(r"\[([^\]]*)\]", each)
        # Text and brackets take turns.
        pieces = [[part] if place % 2 == 0 else _numbers(part) for place, part in enumerate(parts)]
        yield from itertools.islice(("".join(chosen) for chosen in itertools.product(*pieces)), _MOST_HOSTS)


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for each in ranges.split(","):
        both = _RANGE.fullmatch(each)
        if both is None:
            return []
        first, last = int(both[1]), int(both[2] or both[1])
        found += [
            str(number).zfill(len(both[1])) for number in range(first, min(last, first + _MOST_HOSTS) + 1)
        ]
    return found


def names_on_ranks(words: Sequence[str]) -> tuple[str, ...]:
    """Return the variables of rank 0 in the session that a line names, without asking the ranks."""
    opened = sessions.opened()
    named = next((after for word, after in itertools.pairwise(words) if word == "--session"), None)
    if named is None:
        named = sessions.DEFAULT if sessions.DEFAULT in opened or len(opened) != 1 else next(iter(opened))
    session = opened.get(named)
    return session.names() if session is not None else ()


def names_here() -> list[str]:
    names = _notebook.namespace() or {}
    return sorted(name for name in names if not name.startswith("_") and name not in _OF_IPYTHON)
