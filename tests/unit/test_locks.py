"""Private directories: which are in use, and what becomes of one that a cleaner has removed."""

from __future__ import annotations

import os
import shutil

import pytest

from nblaunch import LaunchError, _locks
from nblaunch._runtime_dir import RuntimeDirectory


def test_a_directory_is_dead_once_who_held_it_has_let_go(tmp_path):
    assert not _locks.is_dead(os.fspath(tmp_path)), "nobody has held it"
    (fd,) = _locks.hold(os.fspath(tmp_path))
    assert not _locks.is_dead(os.fspath(tmp_path))
    os.close(fd)
    assert _locks.is_dead(os.fspath(tmp_path))


def test_another_machines_directory_is_left_alone(tmp_path, monkeypatch):
    """It may share the file system, and not its locks."""
    (fd,) = _locks.hold(os.fspath(tmp_path))
    os.close(fd)
    monkeypatch.setattr(_locks, "boot_id", lambda: "another start")
    assert not _locks.is_dead(os.fspath(tmp_path))


def test_a_directory_that_goes_as_it_is_locked_ends_nothing(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    write = os.write

    def cleaned(fd, data):
        shutil.rmtree(root)
        return write(fd, data)

    monkeypatch.setattr(os, "write", cleaned)
    (fd,) = _locks.hold(os.fspath(root))
    os.close(fd)


def test_a_directory_that_others_know_by_its_path_does_not_move(tmp_path):
    parent = tmp_path / "parent"
    root = parent / "root"
    root.mkdir(mode=0o700, parents=True)
    shared = RuntimeDirectory(root)
    assert shared.root() == root
    shutil.rmtree(parent)
    with pytest.raises(LaunchError, match="is gone, and cannot be made again"):
        shared.root()
    parent.mkdir()
    assert shared.root() == root
