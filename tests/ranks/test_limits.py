"""Descriptors, memory and processes run out: the run is refused by name, and everything else goes on."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path

import pytest

from nblaunch._errors import LaunchError
from nblaunch.host import descriptors

SETTING = """
import json, os, resource, signal, sys
import nblaunch

def limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

def hold(spare):
    # Take every descriptor but a few.
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for _ in range(spare):
        os.close(held.pop())
    return held

def outcome(call):
    try:
        return call()
    except nblaunch.LaunchError as error:
        return f"{error.phase}: {error}"

def one():
    return 1

def fork_server():
    (server,) = (each for each in runtime().parent().children() if each.pid != runtime().pid)
    return server

def runtime():
    import psutil
    from nblaunch.client.local import local
    return psutil.Process(local().runtime.welcome.pid)
"""


@pytest.fixture
def printed(script):
    """Give `printed(source)`: what a program with the definitions above prints, as JSON."""

    def run(source: str, **env: str):
        ended = script(SETTING + source, env=env)
        assert ended.returncode == 0, ended
        return json.loads(ended.stdout)

    return run


def test_the_soft_limit_of_the_kernel_is_raised_only_where_a_run_needs_more(printed):
    """At the limit libzmq aborts the process that accepts: that is the runtime, and the kernel's stays."""
    enough, values, raised = printed("""
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
limit(256, hard)
nblaunch.run(one, nproc=2)
enough = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
held = hold(spare=36)
values = nblaunch.run(one, nproc=12).values
print(json.dumps([enough, values, resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))
""")
    assert enough == 256
    assert values == [1] * 12
    assert raised == 256


def test_too_few_descriptors_refuse_the_run_with_both_numbers_and_harm_no_session(printed):
    """In the runtime, in the fork server, in the kernel with none at all, or with a limit lowered since."""
    found = printed("""
import psutil
from nblaunch.client.local import local

found = {}
with nblaunch.Session(nproc=2) as session:
    session.cell("trained = 123", namespace={})
    runtime().rlimit(psutil.RLIMIT_NOFILE, (104, 104))
    found["few"] = outcome(lambda: nblaunch.run(one, nproc=32).values)
    server = fork_server()
    before = server.rlimit(psutil.RLIMIT_NOFILE)
    server.rlimit(psutil.RLIMIT_NOFILE, (server.num_fds(), before[1]))
    found["server"] = outcome(lambda: nblaunch.run(one, nproc=2).values)
    server.rlimit(psutil.RLIMIT_NOFILE, before)
    found["kept"] = session.cell("trained", namespace={}).values
    found["again"] = nblaunch.run(one, nproc=2).values
limit(512, 512)
local().close()
held = hold(spare=0)
found["none, run"] = outcome(lambda: nblaunch.run(one, nproc=2).values)
found["none, session"] = outcome(lambda: nblaunch.Session(nproc=2))
for fd in held:
    os.close(fd)
found["at last"] = nblaunch.run(one, nproc=2).values
limit(24, 24)
found["lowered"] = outcome(lambda: nblaunch.run(one, nproc=2, timeout=20).values)
print(json.dumps(found))
""")
    few = re.match(r"(\w+): 32 ranks .* needs about (\d+) .* is (\d+)\.", found["few"])
    assert few is not None, found["few"]
    assert (few[1], int(few[3])) == ("fork", 104)
    assert int(few[2]) > 104
    assert "ulimit -n" in found["few"]
    assert "refused: EMFILE" in found["server"]
    assert found["kept"] == [123, 123]
    assert found["again"] == [1, 1]
    assert "EMFILE" in found["none, run"]
    assert "EMFILE" in found["none, session"]
    assert found["at last"] == [1, 1]
    assert re.match(r"fork: 2 ranks .* needs about \d+ of its own, .* is 24\.", found["lowered"])


FORK_FAILS = """
import os
fork, path = os.fork, {path!r}
def refused():
    # In the fork server only, and only while the file is there, which holds how many forks succeed.
    if os.path.exists(path) and b"nblaunch.host.keeper" in open("/proc/self/cmdline", "rb").read():
        left = os.path.getsize(path)
        if left == 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        os.truncate(path, left - 1)
    return fork()
os.fork = refused
"""


def test_a_fork_that_the_system_refuses_fails_that_run_alone(printed, tmp_path):
    """As with a limit on processes; those of its ranks that have been forked already are ended."""
    place, switch = tmp_path / "site", tmp_path / "switch"
    place.mkdir()
    (place / "sitecustomize.py").write_text(FORK_FAILS.format(path=str(switch)))
    refused, kept, children, again = printed(
        f"""
import psutil
from nblaunch.client.local import local
with nblaunch.Session(nproc=2) as session:
    session.cell("trained = 123", namespace={{}})
    server = fork_server()
    refused = []
    for allowed in (0, 1):
        with open({str(switch)!r}, "w") as file:
            file.write("x" * allowed)
        refused.append(outcome(lambda: nblaunch.run(one, nproc=3).values))
    os.unlink({str(switch)!r})
    kept = session.cell("trained", namespace={{}}).values
    children = len(server.children())
    again = nblaunch.run(one, nproc=2).values
print(json.dumps([refused, kept, children, again]))
""",
        PYTHONPATH=os.pathsep.join(
            [str(place), *filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())]
        ),
    )
    for each in refused:
        assert "fork: A rank was to be forked, and the system refused: EAGAIN" in each
    assert kept == [123, 123]
    assert children == 2
    assert again == [1, 1]


@pytest.mark.quick
def test_more_nodes_than_the_limit_on_open_files_allows_are_refused_by_both_numbers():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(LaunchError, match=rf"on 1000000 nodes, .* is {hard}\. ") as refused:
        descriptors.make_room_for_nodes(1_000_000, 8_000_000)
    assert refused.value.phase == "engine"
    descriptors.make_room_for_nodes(2, 16)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard), "what suffices stays as it is"
