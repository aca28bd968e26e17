"""Runs that fail, one after the other, leave nothing in the notebook's process, nor in those beside it."""

from __future__ import annotations

import json

import pytest
from sources import must_not_grow, said_by

PROGRAM = """
    import gc, json, os, signal, sys, threading, time
    import psutil
    import nblaunch
    from nblaunch.client.local import local

    KINDS = 5

    def job(kind):
        from torch import distributed
        print("some words of output")
        if os.environ["RANK"] == "1":
            match kind:
                case 0:
                    raise ValueError("x" * 1000)
                case 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                case 2:
                    os._exit(0)
                case 3:
                    raise SystemExit(3)
        if kind != 3:
            distributed.barrier()
        if kind == 4:
            raise ExceptionGroup("several", [KeyError(1), TypeError(2)])
        return bytearray(100_000)

    def run(times):
        for number in range(times):
            result = nblaunch.run(job, args=(number % KINDS,), nproc=2, check=False)
            assert not result.ok
            assert number % KINDS == 4 or result.root_cause.rank == 1

    def processes():
        me = psutil.Process()
        (keeper,) = me.children()
        runtime = psutil.Process(local().runtime.welcome.pid)
        (server,) = {*keeper.children()} - {runtime}
        return {"kernel": me, "keeper": keeper, "server": server, "runtime": runtime}

    def counted():
        return {
            name: [each.num_threads(), each.num_fds(), len(each.children(recursive=True))]
            for name, each in processes().items()
        } | {"objects": len(gc.get_objects())}

    def memory():
        return {name: each.memory_full_info().uss for name, each in processes().items()}

    warm_up, runs, windows = map(int, sys.argv[1:])
    run(warm_up)
    gc.collect()
    before, used = counted(), [memory()]
    # The runtime's pool has a thread more once two requests have overlapped.
    allowed = before | {"runtime": [before["runtime"][0] + 2, *before["runtime"][1:]]}
    for _ in range(windows):
        run(runs)
        gc.collect()
        used.append(memory())
    def grown():
        now = counted()
        return [name for name in processes() if any(a > b for a, b in zip(now[name], allowed[name]))]

    # What ZMQ still has open of ranks that are gone, it closes in its own time.
    deadline = time.monotonic() + 10
    while grown() and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    print(json.dumps([before, counted(), used, grown()]))
"""


@pytest.mark.parametrize(
    ("warm_up", "runs", "windows"),
    [pytest.param(50, 100, 2, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["250 runs"],
)
def test_runs_that_fail_leak_no_thread_no_descriptor_and_no_memory(warm_up, runs, windows, tmp_path):
    before, after, used, grown = json.loads(said_by(PROGRAM, tmp_path, warm_up, runs, windows))
    # Objects: of each kind of failure the last result may live on, in a cycle or a cache.
    assert grown == [], (before, after)
    assert after["objects"] - before["objects"] < runs
    must_not_grow(used)
