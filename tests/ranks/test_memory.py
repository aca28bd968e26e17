"""Large values cross once: mapped by whoever reads them, private to whoever writes to them."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any

import disks
import numpy as np
import psutil
import pytest
import torch

import nblaunch
from nblaunch.capture import shared_memory
from nblaunch.capture.pickling import Packed

GIGABYTE = 1 << 30
LARGE = 4_000_000
"""So many floats are mapped; fewer are copied."""

MAPS = pathlib.Path("/proc/self/maps")


# --- one copy --------------------------------------------------------------------------------------


def read_all(tensor):
    """Read every page, wait for the others, and return (sum, this rank's private bytes)."""
    from torch import distributed

    total = int(tensor.view(torch.uint8)[::4096].sum())
    distributed.barrier()
    private = 0
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            private += int(line.split()[1]) * 1024
    distributed.barrier()
    return total, private


def write_to_own_part(tensor):
    from torch import distributed

    rank = distributed.get_rank()
    tensor[rank] = 100 + rank
    distributed.barrier()
    return tensor[:5].tolist()


@pytest.mark.skipif(
    psutil.virtual_memory().available < 3.5 * GIGABYTE,
    reason="needs 3.5 GB of free memory: 1 GB here, 1 GB shared",
)
def test_a_gigabyte_captured_by_four_ranks_exists_once_beyond_the_notebooks_own():
    tensor = torch.full((GIGABYTE // 4,), 0x01010101, dtype=torch.int32)

    def without():
        return read_all(torch.ones(4096, dtype=torch.int32))

    def captured():
        return (*read_all(tensor), write_to_own_part(tensor))

    baseline = nblaunch.run(without, nproc=4).values
    result = nblaunch.run(captured, nproc=4)
    assert [total for total, _, _ in result] == [GIGABYTE // 4096] * 4
    grown = sum(private for _, private, _ in result) - sum(private for _, private in baseline)
    assert grown < 0.1 * 4 * GIGABYTE
    untouched = 0x01010101
    for rank, (_, _, first_five) in enumerate(result):
        assert first_five == [100 + number if number == rank else untouched for number in range(5)]
    assert tensor[:5].tolist() == [untouched] * 5


def test_arguments_and_globals_of_a_function_cross_once_too():
    array = np.ones(16_000_000, dtype=np.uint8)

    def maps(first, *, second):
        same = np.shares_memory(first, second) and np.shares_memory(first, array)
        return same, MAPS.read_text().count("memfd:nblaunch")

    assert nblaunch.run(maps, args=(array,), kwargs={"second": array}, nproc=2).values == [
        (True, 1),
        (True, 1),
    ]


@pytest.mark.quick
def test_what_was_sent_and_what_came_back_is_freed_with_the_result():
    """At once: the collector may come late, and gigabytes hang on it."""

    def echo(tensor):
        return tensor * 2

    nblaunch.run(echo, args=(torch.ones(10),), nproc=2)
    gc.collect()
    gc.disable()
    try:
        result = nblaunch.run(echo, args=(torch.ones(LARGE),), nproc=2)
        assert memory_files() == 2
        first, second = result.values
        del result
        assert (first.sum().item(), second.sum().item()) == (2 * LARGE, 2 * LARGE)
        del first
        assert memory_files() == 1
        del second
        assert memory_files() == 0
    finally:
        gc.enable()


def memory_files() -> int:
    """Return how many payloads this process has mapped."""
    return len({line.split()[4] for line in MAPS.read_text().splitlines() if "memfd:nblaunch" in line})


# --- as they were ----------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("size", [100, 100_000, LARGE], ids=["inline", "copied", "mapped"])
def test_views_of_one_tensor_stay_views_of_one_tensor(call, size):
    whole = torch.zeros(size)
    there: dict[str, Any] = {"whole": whole, "part": whole[10:20], "list": [whole]}

    def aliased():
        there["part"].fill_(1)
        return there["whole"].sum().item(), there["list"][0] is there["whole"], there

    for total, same, back in call(aliased):
        assert (total, same) == (10.0, True)
        back["part"].fill_(2)
        assert back["whole"].sum().item() == 20
        assert back["list"][0] is back["whole"]
    assert not whole.any()


def test_ranks_values_share_no_memory_with_each_other(call):
    first, second = call(lambda: torch.zeros(LARGE))
    first.fill_(1)
    assert not second.any()


def test_large_bytes_cross_both_ways(call):
    data = bytearray(b"0123456789abcdef" * 1_000_000)
    for back in call(lambda: data):
        assert type(back) is bytearray
        assert back == data


# --- where memory has no room ----------------------------------------------------------------------

SMALL_SHM = """
    import json, os, shutil
    import torch
    import nblaunch

    tensor = torch.ones(75_000_000)

    def returned():
        return tensor + 1, tensor.sum().item()

    assert shutil.disk_usage("/dev/shm").total <= 64 << 20
    result = nblaunch.run(returned, nproc=2)
    print(json.dumps([[float(back.sum()), total] for back, total in result]))
"""


def in_a_namespace(mounts: str, path: pathlib.Path, **environment: str):
    """Run a script where file systems are mounted as `mounts` says, for it alone."""
    disks.need_mounts_of_its_own()
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", f'set -e; {mounts}; exec "$0" "$1"', sys.executable, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        cwd=path.parent,
    )


def test_300_mb_cross_both_ways_where_dev_shm_has_64(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(textwrap.dedent(SMALL_SHM))
    done = in_a_namespace("mount -t tmpfs -o size=64m tmpfs /dev/shm", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[150_000_000.0, 75_000_000.0]] * 2


NO_MEMORY_FILES = """
    import json, os, time
    del os.memfd_create
    import numpy
    import nblaunch
    from nblaunch.client.local import local

    array = numpy.ones(10_000_000)

    def on_disk():
        import os
        del os.memfd_create
        maps = open("/proc/self/maps").read()
        return array + 1, [word for word in maps.split() if "payload-" in word]

    def fails():
        import os
        del os.memfd_create
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        return array

    def payloads():
        files = [name for _, _, names in os.walk(local().directory.root()) for name in names]
        return [name for name in files if name.startswith("payload-")]

    result = nblaunch.run(on_disk, nproc=2)
    sums = [float(back.sum()) for back, _ in result]
    places = [len(maps) for _, maps in result]
    inside = all(path.startswith(str(local().directory.root())) for _, maps in result for path in maps)
    # Ranks that have succeeded leave, and take their files along, while the program goes on.
    deadline = time.monotonic() + 30
    while payloads() and time.monotonic() < deadline:
        time.sleep(0.01)
    left = payloads()
    result[0][0][:] = 5
    again = [float(back.sum()) for back, _ in result]
    nblaunch.run(fails, nproc=2, check=False)
    print(json.dumps([sums, places, inside, left, again, payloads()]))
"""


def test_without_memory_files_payloads_lie_in_the_runtime_directory_and_go_after_use(script):
    done = script(NO_MEMORY_FILES)
    assert (done.returncode, done.stderr) == (0, "")
    sums, places, inside, left, again, left_by_failure = json.loads(done.stdout)
    assert (sums, again) == ([20_000_000.0] * 2, [50_000_000.0, 20_000_000.0])
    assert places == [1, 1]
    assert inside
    assert (left, left_by_failure) == ([], [])


NO_ROOM = """
    import json, os
    import numpy
    import nblaunch

    array = numpy.ones(10_000_000)

    def made_there():
        import os
        del os.memfd_create
        return numpy.ones(10_000_000) if os.environ["RANK"] == "1" else "kept"

    result = nblaunch.run(made_there, nproc=2, check=False)
    del os.memfd_create
    try:
        nblaunch.run(lambda: array.sum(), nproc=2)
    except Exception as error:
        refused = [type(error).__name__, str(error)]
    failure = result.ranks[1].failure
    print(json.dumps([refused, result.values, failure.message, failure.phase]))
"""


def test_where_neither_has_room_the_error_says_how_much_was_needed_and_where(tmp_path):
    path = tmp_path / "no_room.py"
    path.write_text(textwrap.dedent(NO_ROOM))
    done = in_a_namespace("mount -t tmpfs -o size=16m tmpfs /mnt", path, TMPDIR="/mnt")
    assert (done.returncode, done.stderr) == (0, "")
    (kind, refused), values, message, phase = json.loads(done.stdout)
    assert kind == "NoRoomError"
    assert values == ["kept", None]
    assert phase == "value transfer"
    for text in (refused, message):
        assert "80 MB are to be sent" in text
        assert "the disk under /mnt/nblaunch-" in text
        assert "set TMPDIR" in text


FULL_DISK = """
    import gc, json, os, shutil, time
    import nblaunch

    def prints(fails=False):
        import subprocess, sys, threading
        from torch import distributed
        if os.environ["RANK"] == "1":
            for _ in range(50_000):
                print("x" * 1000)
        distributed.barrier()
        if os.environ["RANK"] == "0":
            sys.stdout.buffer.write(b"y" * 100_000)
            sys.stdout.buffer.flush()
            subprocess.run("yes | head -c 100000; yes | head -c 100000 >&2", shell=True, check=True)
            thread = threading.Thread(target=lambda: print("z" * 99_999))
            thread.start()
            thread.join()
        if fails:
            raise ValueError("its own")
        return "kept"

    def lengths(result):
        return [len(each.stdout) + len(each.stderr) for each in result.ranks]

    result = nblaunch.run(prints, nproc=2)
    whole = [result.values, lengths(result), result.warnings]
    del result
    try:
        nblaunch.run(prints, (True,), nproc=2)
    except nblaunch.RunFailedError as error:
        failed = [str(error), lengths(error.result)]
    while shutil.disk_usage("/mnt").free < 8 << 20:    # both logs go with their results
        gc.collect()
        time.sleep(0.01)
    again = nblaunch.run(print, ("room",), nproc=2)
    print(json.dumps([whole, failed, [again.ranks[0].stdout, again.warnings]]))
"""


def dropped(text: str) -> list[int]:
    """Return how many bytes of the two ranks a text says were dropped."""
    found = re.search(
        r"the disk that takes what ranks print is full \(TMPDIR, --log-dir\): "
        r"([\d,]+) bytes of rank 0, ([\d,]+) bytes of rank 1 were dropped$",
        text,
        flags=re.MULTILINE,
    )
    assert found is not None, text
    return [int(number.replace(",", "")) for number in found.groups()]


PRINTED = [400_000, 50_000 * 1001]


def test_what_a_full_disk_does_not_take_is_dropped_and_counted_and_the_run_goes_on(tmp_path):
    path = tmp_path / "full.py"
    path.write_text(textwrap.dedent(FULL_DISK))
    done = in_a_namespace("mount -t tmpfs -o size=16m tmpfs /mnt", path, TMPDIR="/mnt")
    assert (done.returncode, done.stderr) == (0, "")
    (values, lengths, (warning,)), (error, failed_lengths), again = json.loads(done.stdout)
    assert values == ["kept", "kept"]
    assert [sum(each) for each in zip(lengths, dropped(warning), strict=True)] == PRINTED
    assert error.startswith("ranks 0-1 of 2 failed: ValueError: its own")
    assert [sum(each) for each in zip(failed_lengths, dropped(error), strict=True)] == PRINTED
    assert again == ["room\n", []]


def test_a_disk_that_fills_up_while_a_payload_is_written_is_an_error_and_leaves_nothing(
    monkeypatch, tmp_path
):
    """The blocks are taken first, so that no reader of the mapping meets a SIGBUS."""
    monkeypatch.setattr(shared_memory, "_free_memory", lambda: 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    packed = Packed(memoryview(bytes(1_000_000)), ())
    with pytest.raises(shared_memory.NoRoomError, match="1 MB are to be sent"):
        shared_memory.put(packed, lambda: tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_short_sends_a_payload_to_the_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "_free_memory", lambda: 900_000)
    data = np.random.default_rng(0).bytes(1_000_000)
    with shared_memory.put(Packed(memoryview(data), (memoryview(b"abc"),)), lambda: tmp_path) as outgoing:
        (path,) = tmp_path.iterdir()
        assert path.stat().st_mode & 0o077 == 0
        first, second = shared_memory.get(outgoing.payload, private=True)
    assert list(tmp_path.iterdir()) == []
    assert (bytes(first), bytes(second)) == (data, b"abc")
    first[0] = first[0] ^ 1
    assert bytes(first) != data
