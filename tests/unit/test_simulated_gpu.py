"""The scripts of the simulated GPUs say why they cannot work; their settings are documented."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "simulated_gpu"
UNAVAILABLE = 69


@pytest.fixture
def without(tmp_path):
    """Give `without(programs, command)`: what a script says where these programs are not installed."""

    def run(missing, *command):
        found = tmp_path / "bin"
        found.mkdir()
        for name in {"bash", "dirname", "gcc", "nm", "uname"} - missing:
            (found / name).symlink_to(shutil.which(name) or "/nowhere")
        return subprocess.run(
            command,
            env={"PATH": str(found), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    return run


@pytest.mark.parametrize("missing", ["gcc", "nm"])
def test_build_says_in_one_line_which_program_is_missing(without, missing, tmp_path):
    done = without({missing}, HERE / "build")
    assert done.returncode == UNAVAILABLE
    assert done.stderr.count("\n") == 1
    assert f"{missing} is not installed" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_run_says_how_to_make_the_environment(without):
    done = without(set(), HERE / "run", "2", "true")
    assert done.returncode == UNAVAILABLE
    assert str(HERE / "build") in done.stderr


@pytest.mark.parametrize("variable", ["FAKE_GPUS", "FAKE_GPU_MEMORY", "FAKE_NCCL_ABORT_MS", "FAKE_DIR"])
def test_each_setting_is_documented_and_used(variable):
    assert variable in (HERE / "README.md").read_text()
    assert any(f'"{variable}"' in source.read_text() for source in HERE.glob("*.[ch]"))
