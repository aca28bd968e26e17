"""A process is named by its number and its start, whatever its program is called."""

from __future__ import annotations

import os
import shutil
import subprocess

import psutil
import pytest

from nblaunch._process_tree import start_ticks


def test_the_start_of_a_process_is_read_whatever_its_name(tmp_path):
    sleep = tmp_path / "a) S 1 (b"
    sleep.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([sleep, "1000"]) as process:
        try:
            seconds = psutil.boot_time() + start_ticks(process.pid) / os.sysconf("SC_CLK_TCK")
            assert seconds == pytest.approx(psutil.Process(process.pid).create_time(), abs=0.02)
        finally:
            process.kill()
    assert start_ticks(process.pid) == 0


def test_of_two_processes_the_later_one_has_the_later_start():
    assert 0 < start_ticks(os.getppid()) <= start_ticks(os.getpid())
