"""The registry lists what lives, removes what has ended here, and reads no file of another user."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from patience import eventually

from nblaunch import _registry
from nblaunch._errors import OptionError
from nblaunch._registry import Host, Owner, ProcessIdentity, RuntimeEntry, read_all, release_name, take_name

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
NOBODY = 65534
ENDED = ProcessIdentity(os.getpid(), 1)
"""This pid, of an earlier process."""


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Give the two directories, of which neither is there yet."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "run" / "nblaunch", tmp_path / "state" / "nblaunch"


held: list[int] = []


@pytest.fixture(autouse=True)
def let_go():
    """Close what holds entries."""
    yield
    while held:
        os.close(held.pop())


def write(entry):
    path, lock = _registry.write(entry)
    held.append(lock)
    return path


def entry_of(keeper=None, **fields):
    keeper = keeper or ProcessIdentity.of(os.getpid())
    known = {
        "name": "train",
        "socket": "/nowhere/nblaunch-x/client",
        "root": "/nowhere/nblaunch-x",
        "keeper": keeper,
        "runtime": keeper,
        "host": Host.here(),
        "version": "0.1.0",
        "protocol": 1,
        "token": "s3cret",
        "detached": True,
        "started": 1.0,
        "owner": Owner(4711, "ipykernel", "train.ipynb"),
        "held": True,
    }
    return RuntimeEntry(**{**known, **fields})


def test_a_name_whose_keeper_has_removed_the_file_alone_is_free(places):
    directory = places[0]
    dead, alive = entry_of(ENDED, name="dead"), entry_of(name="alive")
    for entry in (dead, alive):
        take_name(entry.name, entry)
    # The one that lives has not written its file yet.
    assert read_all() == []
    assert [each.name for each in directory.glob("*.lock")] == [f"alive@{Host.here().name}.lock"]


@pytest.fixture
def other():
    """Give a process that lives, and does nothing."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def entries():
    return [each.entry for each in read_all()]


# --- who lives -------------------------------------------------------------------------------------


def test_what_was_written_is_found_in_a_private_file():
    path = write(entry_of())
    assert [(each.entry, each.alive, each.elsewhere) for each in read_all()] == [(entry_of(), True, "")]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_pid_that_is_used_again_is_not_taken_for_the_keeper(other):
    keeper = ProcessIdentity.of(other.pid)
    path = write(entry_of(replace(keeper, start=keeper.start - 1)))
    assert entries() == []
    assert not path.exists()


def test_the_entry_of_a_keeper_that_has_ended_is_removed_before_its_parent_reaps_it(other):
    path = write(entry_of(ProcessIdentity.of(other.pid)))
    assert len(entries()) == 1
    other.kill()
    eventually(lambda: entries() == [], "the entry of a killed keeper is removed")
    assert not path.exists()
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(other.pid)


def test_a_stale_entry_takes_its_root_along(tmp_path):
    root = tmp_path / "nblaunch-abc"
    (root / "job-1").mkdir(parents=True)
    root.chmod(0o700)
    write(entry_of(ENDED, root=str(root)))
    assert entries() == []
    assert not root.exists()


@pytest.mark.parametrize("what", ["name", "mode", "link"])
def test_a_root_that_is_not_a_private_directory_of_ours_stays(tmp_path, what):
    root = tmp_path / ("data" if what == "name" else "nblaunch-abc")
    if what == "link":
        (tmp_path / "nblaunch-there").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "nblaunch-there")
    else:
        root.mkdir(mode=0o700)
        root.chmod(0o755 if what == "mode" else 0o700)
    write(entry_of(ENDED, root=str(root)))
    assert entries() == []
    assert root.exists()


def test_the_entry_of_another_host_is_listed_and_never_removed():
    path = write(entry_of(ENDED, host=replace(Host.here(), name="other-host", boot_id="x")))
    assert [(each.alive, each.elsewhere) for each in read_all()] == [(False, "other-host")]
    assert path.exists()


def test_the_entry_of_another_container_with_this_host_name_is_never_removed():
    path = write(entry_of(ENDED, host=replace(Host.here(), pid_namespace="pid:[1]")))
    assert [each.alive for each in read_all()] == [False]
    assert path.exists()


def test_the_entry_of_another_container_is_removed_once_nobody_holds_it_and_its_name_is_free():
    """As after a restart of the container: no process of it lives, and its namespace has gone."""
    ended = entry_of(ENDED, host=replace(Host.here(), pid_namespace="pid:[1]"))
    take_name("train", ended)
    path = write(ended)
    with pytest.raises(OptionError, match="belongs to a session"):
        take_name("train", entry_of())
    os.close(held.pop())
    take_name("train", entry_of())
    assert read_all() == []
    assert not path.exists()


def test_the_runtime_directory_of_another_user_is_not_used(places, monkeypatch):
    """As root with the environment of a user, which `sudo` has kept: it would lock that user out."""
    run = places[0].parent
    mine = Path.stat
    theirs = mine(run).st_uid + 1

    def stat(path, **options):
        found = mine(path, **options)
        return os.stat_result((*found[:4], theirs, *found[5:])) if path == run else found

    monkeypatch.setattr(Path, "stat", stat)
    assert _registry.directories() == places[1:]


def test_the_entry_of_an_earlier_boot_is_removed():
    path = write(entry_of(host=replace(Host.here(), boot_id="earlier")))
    assert entries() == []
    assert not path.exists()


def test_a_process_has_one_identity_whatever_its_name(tmp_path):
    """The name is a field of the line that is read, and may look like the fields behind it."""
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "60"])
    try:
        identity = ProcessIdentity.of(process.pid)
        assert identity.lives
        ticks = (identity.start - ProcessIdentity.of(os.getpid()).start) / os.sysconf("SC_CLK_TCK")
        assert 0 <= ticks < 3600
    finally:
        process.kill()
        process.wait()
    assert not identity.lives


# --- where entries are -----------------------------------------------------------------------------


def test_the_first_directory_is_written_and_both_are_read(places, monkeypatch, other):
    first, second = places
    assert write(entry_of()).parent == first
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert entries() == []
    assert write(entry_of(ProcessIdentity.of(other.pid), started=2.0)).parent == second
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(first.parent))
    assert [each.started for each in entries()] == [1.0, 2.0]


def test_without_xdg_variables_entries_are_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert write(entry_of()).parent == tmp_path / ".local" / "state" / "nblaunch"


def test_an_entry_is_written_again_after_a_logout_has_removed_the_directory(places):
    first, second = places
    path = write(entry_of())
    path.unlink()
    assert write(entry_of()) == path
    path.unlink()
    path.parent.rmdir()
    first.parent.rmdir()
    assert write(entry_of()).parent == second
    assert entries() == [entry_of()]


def test_an_entry_in_both_directories_is_listed_once(places, monkeypatch):
    write(entry_of())
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    write(entry_of())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places[0].parent))
    assert entries() == [entry_of()]


def test_a_place_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/state")
    with pytest.raises(OptionError, match=r"/proc/state/nblaunch \(No such file"):
        write(entry_of())
    assert entries() == []


# --- whose they are --------------------------------------------------------------------------------


def both_refuse(problem):
    for use in (read_all, lambda: write(entry_of()), lambda: take_name("train", entry_of())):
        with pytest.raises(OptionError, match=problem) as refused:
            use()
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_is_open_to_others_is_refused(places, mode):
    places[0].mkdir()
    places[0].chmod(mode)
    both_refuse(f"mode {mode:o}")


def test_a_link_in_the_place_of_the_directory_is_refused(places, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    places[0].symlink_to(tmp_path / "elsewhere")
    both_refuse("cannot be used as a directory")


def test_a_file_in_the_place_of_the_directory_is_refused(places):
    places[0].touch(mode=0o600)
    both_refuse("cannot be used as a directory")


@AS_ROOT
def test_another_users_directory_is_refused(places):
    places[0].mkdir(mode=0o700)
    os.chown(places[0], NOBODY, NOBODY)
    both_refuse(f"uid {NOBODY}")


@AS_ROOT
def test_another_users_file_is_passed_over():
    path = write(entry_of(ENDED))
    os.chown(path, NOBODY, NOBODY)
    assert entries() == []
    assert path.exists()


def test_a_file_that_others_can_read_is_passed_over():
    path = write(entry_of())
    path.chmod(0o640)
    assert entries() == []
    assert path.exists()


def test_a_link_to_an_entry_is_passed_over(tmp_path):
    path = write(entry_of())
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    assert entries() == []


def test_a_named_pipe_does_not_block_the_reader_and_a_directory_does_not_stop_it(places):
    write(entry_of())
    os.mkfifo(places[0] / "1-2.json", mode=0o600)
    (places[0] / "1-3.json").mkdir(mode=0o700)
    assert entries() == [entry_of()]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"name": 3}',
        b"null",
        msgspec.json.encode(entry_of(ProcessIdentity.of(os.getppid()))),  # which is that of another file
    ],
)
def test_a_file_that_is_no_entry_is_passed_over_and_stays(places, content):
    write(entry_of())
    path = places[0] / "1-2.json"
    path.touch(mode=0o600)
    path.write_bytes(content)
    assert entries() == [entry_of()]
    assert path.exists()


def test_the_token_is_in_the_file_and_in_no_text():
    path = write(entry_of())
    assert b"s3cret" in path.read_bytes()
    (found,) = read_all()
    assert found.entry.token == "s3cret"  # noqa: S105 - a test's
    assert "s3cret" not in f"{found!r} {found.entry} {found.entry!r} {[found]}"
    assert "train" in repr(found.entry)


# --- names -----------------------------------------------------------------------------------------


@pytest.fixture
def another(other):
    """Give the entry of another runtime that lives."""
    entry = entry_of(ProcessIdentity.of(other.pid))
    write(entry)
    return entry


def test_a_name_that_is_taken_is_refused_by_its_kernel(another):
    take_name("train", another)
    with pytest.raises(
        OptionError, match=r"'train' .* ipykernel \(process 4711, notebook train.ipynb, host "
    ):
        take_name("train", entry_of())
    take_name("train", another)  # still its own
    take_name("other", entry_of())


def test_a_released_name_is_free_and_only_its_owner_releases_it(another):
    take_name("train", another)
    release_name("train", entry_of())
    with pytest.raises(OptionError):
        take_name("train", entry_of())
    release_name("train", another)
    take_name("train", entry_of())


@pytest.mark.parametrize("listed", [True, False])
def test_the_name_of_a_runtime_that_has_ended_is_free(listed):
    ended = entry_of(ENDED)
    if listed:
        write(ended)
    take_name("train", ended)
    take_name("train", entry_of())
    with pytest.raises(OptionError):
        take_name("train", entry_of(ProcessIdentity(os.getppid(), ProcessIdentity.of(os.getppid()).start)))


def test_a_name_is_held_by_a_runtime_whose_entry_was_removed(other):
    take_name("train", entry_of(ProcessIdentity.of(other.pid)))
    with pytest.raises(OptionError, match=f"process {other.pid}"):
        take_name("train", entry_of())


def test_a_name_that_is_taken_in_either_directory_is_taken_in_both(places, monkeypatch, another):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    take_name("train", another)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places[0].parent))
    with pytest.raises(OptionError):
        take_name("train", entry_of())
    release_name("train", another)
    assert not list(places[0].glob("*.lock"))  # what had been taken there was given back
    take_name("train", entry_of())


def test_a_name_on_another_host_is_another_name(other):
    """They may share a home directory."""
    there = entry_of(ProcessIdentity.of(other.pid), host=Host("other-host"))
    take_name("train", there)
    take_name("train", entry_of())


def test_the_names_of_a_stale_entry_go_with_it(places):
    write(entry_of(ENDED))
    take_name("train", entry_of(ENDED))
    assert len(list(places[0].glob("*.lock"))) == 1
    read_all()
    assert list(places[0].glob("*.lock")) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a\0", "a\n", "x" * 41, "a b"])
def test_what_cannot_be_a_name_is_refused(name):
    with pytest.raises(OptionError, match="cannot be the name"):
        take_name(name, entry_of())


def test_of_two_that_find_the_name_of_an_ended_runtime_one_gets_it(another, monkeypatch):
    take_name("train", entry_of(ENDED))
    check, refused = _registry._check_has_ended, []

    def second():
        with pytest.raises(OptionError):
            take_name("train", another)
        refused.append(True)

    thread = threading.Thread(target=second)

    def with_another_meanwhile(name, file):
        check(name, file)
        if thread.ident is None:
            thread.start()
            thread.join(0.3)

    monkeypatch.setattr(_registry, "_check_has_ended", with_another_meanwhile)
    take_name("train", entry_of())
    thread.join()
    assert refused == [True]


# --- at the same time ------------------------------------------------------------------------------

RACE = """
import os, sys
from msgspec.structs import replace
from nblaunch import _registry
from nblaunch._errors import OptionError
from nblaunch._registry import Host, Owner, ProcessIdentity, RuntimeEntry

me = ProcessIdentity.of(os.getpid())
entry = RuntimeEntry(name="", socket="", root="", keeper=me, runtime=me, host=Host.here(), version="",
                     protocol=1, token="t" * 2000, detached=True, started=0.0, owner=Owner(os.getpid()))
ended = replace(me, start=1)
_registry.write(entry)
print(me.pid, flush=True)
everybody = {int(pid) for pid in sys.stdin.readline().split()}
for turn in range(100):
    held = _registry.write(replace(entry, started=float(turn)))
    _registry.write(replace(entry, keeper=ended))
    found = {each.entry.keeper: each.entry for each in _registry.read_all()}
    assert found[me].started == turn, found
    assert everybody <= {keeper.pid for keeper in found}, "an entry was not whole"
    assert ended not in found
taken = []
for number in range(50):
    try:
        _registry.take_name(f"name{number}", entry)
    except OptionError:
        continue
    taken.append(number)
print(*taken, flush=True)
sys.stdin.readline()
"""


def test_processes_that_write_and_read_at_the_same_time_see_whole_entries_and_one_gets_each_name():
    for number in range(50):
        take_name(f"name{number}", entry_of(ENDED))  # which all of them may take over
    environment = {**os.environ, "PYTHONPATH": str(Path(_registry.__file__).parents[1])}
    command = [sys.executable, "-c", RACE]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe) for _ in range(4)
    ]
    try:
        pids = [each.stdout.readline().strip() for each in processes]
        for each in processes:
            each.stdin.write(" ".join(pids) + "\n")
            each.stdin.flush()
        taken = [each.stdout.readline().split() for each in processes]
    finally:
        for each in processes:
            each.communicate("end\n")
    assert [each.returncode for each in processes] == [0] * 4
    assert sorted(int(number) for numbers in taken for number in numbers) == list(range(50))
    assert entries() == []
