"""A rank's environment is torchrun's: one program under both, in the attempt that fails and in the next."""

from __future__ import annotations

import inspect
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nblaunch

# The whole of a rank's own variables, and not only those that somebody has thought of.
SEEN = r"(TORCHELASTIC_|TORCH_NCCL_|GROUP_|ROLE_|MASTER_|LOCAL_)|(RANK|WORLD_SIZE|OMP_NUM_THREADS|PET_RANK)$"


def look(directory, wanted, fail_first):
    """Write down what this rank sees; be the program that both launchers run."""
    import json
    import os
    import re
    import sys
    from pathlib import Path

    seen = {name: value for name, value in os.environ.items() if re.match(wanted, name)}
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    Path(directory, f"{attempt}-{rank}.json").write_text(json.dumps(seen))
    if fail_first and attempt == "0" and rank == "0":
        sys.exit(3)


FORMS = {
    "MASTER_PORT": r"\d{4,5}",
    "TORCHELASTIC_RUN_ID": r"[0-9a-f-]{12,36}",
    "TORCHELASTIC_ERROR_FILE": r"/.*/[0-9a-f-]{12,36}_\w{8}/attempt_(\d)/(\d)/error\.json",
}
"""What must differ from run to run, and the form that it has."""


def torchrun(directory: Path, *options: str, fail_first: bool = False) -> dict[str, dict[str, str]]:
    """Return what each rank of each attempt sees when everybody's launcher runs the program."""
    program, out = directory / "program.py", directory / "torchrun"
    out.mkdir()
    program.write_text(f"{inspect.getsource(look)}\nlook({str(out)!r}, {SEEN!r}, {fail_first})\n")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *options,
         "--log-dir", str(directory / "logs"), str(program)],
        capture_output=True, check=True, timeout=90,
    )  # fmt: skip
    return written(out)


def here(directory: Path, *, fail_first: bool = False, **options: Any) -> dict[str, dict[str, str]]:
    """Return what each rank of each attempt sees here."""
    out = directory / "nblaunch"
    out.mkdir()
    nblaunch.run(look, (str(out), SEEN, fail_first), **options)
    return written(out)


def written(directory: Path) -> dict[str, dict[str, str]]:
    """Return what the ranks have written down."""
    return {path.stem: json.loads(path.read_text()) for path in directory.iterdir()}


def without_what_must_differ(name: str, variables: dict[str, str]) -> dict[str, str]:
    """Check the form of what differs between any two runs; return the rest."""
    attempt, rank = name.split("-")
    for each, form in FORMS.items():
        assert re.fullmatch(form, variables[each]), (each, variables[each])
    error_file = re.fullmatch(FORMS["TORCHELASTIC_ERROR_FILE"], variables["TORCHELASTIC_ERROR_FILE"])
    assert error_file is not None
    assert error_file.groups() == (attempt, rank)
    # Here it is always the address: a host's file may say anything of "localhost".
    assert socket.gethostbyname(variables["MASTER_ADDR"]) == "127.0.0.1"
    return {each: value for each, value in variables.items() if each not in {*FORMS, "MASTER_ADDR"}}


def test_a_rank_sees_what_it_sees_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ["--nproc-per-node", "3", "--role", "worker", "--max-restarts", "1"]
    theirs = torchrun(tmp_path, *options, fail_first=True)
    ours = here(tmp_path, nproc=3, role="worker", max_restarts=1, fail_first=True)
    both = theirs.keys() & ours.keys()
    assert both >= {"0-0", "1-0", "1-1", "1-2"}  # of the first attempt, others may be ended before they look
    for name in both:
        assert set(ours[name]) == set(theirs[name])
        assert without_what_must_differ(name, ours[name]) == without_what_must_differ(name, theirs[name])


@pytest.mark.slow
def test_a_rank_that_is_alone_may_use_all_cores_as_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in torchrun(tmp_path, "--nproc-per-node", "1")["0-0"]
    assert "OMP_NUM_THREADS" not in here(tmp_path, nproc=1)["0-0"]

    def threads():
        import torch

        return torch.get_num_threads()

    alone = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    assert nblaunch.run(threads, nproc=1).values == [int(alone.stdout)]
