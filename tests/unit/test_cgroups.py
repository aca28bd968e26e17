"""What the cgroups around a process leave it: nested ones, both versions, page cache, and who asks."""

from __future__ import annotations

import itertools

import psutil
import pytest

from nblaunch import _cgroups
from nblaunch.capture import shared_memory
from nblaunch.diagnose import failures

GB = 1_000_000_000


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Give `machine(own, files)`: a cgroup file system, with 64 GB of memory available beside it."""
    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    place = itertools.count()

    def make(own: str, files: dict[str, object]):
        root, proc = tmp_path / f"cgroup-{next(place)}", tmp_path / "own"
        proc.write_text(own)
        root.mkdir()
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        real = directories
        monkeypatch.setattr(_cgroups, "directories", lambda which: real(which, root=root, own=proc))

    directories = _cgroups.directories
    return make


class Memory:
    available = 64 * GB
    total = 128 * GB
    percent = 50.0


def test_page_cache_that_can_be_had_counts_as_free(machine):
    machine(
        "0::/\n",
        {
            "memory.max": 8 * GB,
            "memory.current": 7_950_000_000,
            "memory.stat": "anon 1\ninactive_file 7900000000\nactive_file 5",
        },
    )
    assert shared_memory._free_memory() == 7_950_000_000


def test_the_tightest_of_nested_groups_counts(machine):
    machine(
        "0::/pod/box/job\n",
        {
            "memory.max": "max",
            "pod/memory.max": 4 * GB,
            "pod/memory.current": 3 * GB,
            "pod/box/memory.max": 16 * GB,
            "pod/box/memory.current": 2 * GB,
            "pod/box/job/memory.max": "max",
            "pod/box/job/memory.current": GB,
        },
    )
    assert shared_memory._free_memory() == GB
    assert "the container's limit is 4.0 GB" in failures.explain_exit(-9, "", {}).details


def test_the_same_in_version_1_where_parents_have_files_of_their_own(machine):
    machine(
        "5:memory:/pod/box\n1:cpu:/\n",
        {
            "memory/memory.limit_in_bytes": 9223372036854771712,
            "memory/memory.usage_in_bytes": 50 * GB,
            "memory/pod/memory.limit_in_bytes": 10 * GB,
            "memory/pod/memory.usage_in_bytes": 9 * GB,
            "memory/pod/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GB}",
            "memory/pod/box/memory.limit_in_bytes": 20 * GB,
            "memory/pod/box/memory.usage_in_bytes": GB,
        },
    )
    assert shared_memory._free_memory() == 3 * GB


def test_without_a_limit_the_machine_counts(machine):
    machine("0::/\n", {"memory.max": "max", "memory.current": GB})
    assert shared_memory._free_memory() == 64 * GB
    assert "limit" not in failures.explain_exit(-9, "", {}).details


@pytest.mark.parametrize(
    ("own", "name", "content"),
    [
        ("0::/pod\n", "pod/memory.events", "low 0\noom 2\noom_kill 2"),
        ("4:memory:/pod\n", "memory/pod/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2"),
    ],
)
def test_kills_for_memory_are_counted_in_both_versions(machine, own, name, content):
    machine(own, {name: content})
    assert _cgroups.oom_kills() == 2
    reason = failures.explain_exit(-9, "", {}, oom_before=1).reason
    assert "out of memory: the system counts a kill for it" in reason
