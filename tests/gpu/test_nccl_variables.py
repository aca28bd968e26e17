"""The table of NCCL's settings says what each form of NCCL asks the environment for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nblaunch.rank import environment, flight_recorder

pytestmark = pytest.mark.gpu

PAGE = Path(__file__).parents[2] / "notebooks" / "docs" / "cells.md"
ROW = re.compile(r"^\| (?P<names>`TORCH_[^|]+) \| (?P<legacy>[^|]+) \| (?P<newer>[^|]+) \|", re.MULTILINE)

GETENV = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

char *getenv(const char *name) {
  static char *(*real)(const char *);
  static int log = -1;
  if (!real) {
    real = dlsym(RTLD_NEXT, "getenv");
    log = open(real("GETENV_LOG"), O_WRONLY | O_APPEND);
  }
  if (!strncmp(name, "TORCH_", 6)) dprintf(log, "%s\n", name);
  return real(name);
}
"""

TIME_OUT = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist

device, log = torch.device("cuda", 0), Path(os.environ["GETENV_LOG"])
store = dist.HashStore()
dist.init_process_group(sys.argv[1], store=store, rank=0, world_size=1, device_id=device)
one = torch.ones(1, device=device)
dist.all_reduce(one)
torch.cuda.synchronize()
log.write_text(log.read_text() + "formed\\n")
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
torch.cuda._sleep(10**10)
dist.all_reduce(one)
ends = time.monotonic() + 30
while "TORCH_FR_DUMP_TEMP_FILE" not in log.read_text() and time.monotonic() < ends:
    time.sleep(0.05)
os._exit(0)
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Give `asked(backend)`: the variables that it has asked for until a collective has timed out."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    where = tmp_path_factory.mktemp("getenv")
    (where / "getenv.c").write_text(GETENV)
    library = where / "getenv.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, where / "getenv.c", "-ldl"], check=True)

    def asked(backend: str) -> set[str]:
        log = where / backend
        log.touch()
        settings = {
            "GETENV_LOG": str(log),
            "LD_PRELOAD": str(library),
            "TMPDIR": str(where),  # torch 2.8 leaves its templates in it
            "TORCH_FR_BUFFER_SIZE": "16",
            "TORCH_FR_DUMP_TEMP_FILE": str(where / "dump-"),
        }
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", TIME_OUT, backend],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "formed" in log.read_text(), ended.stderr
        return set(log.read_text().split())

    return asked


def heeds(cell: str) -> bool:
    """Whether a cell of the table says that this torch's backend asks for the variable."""
    if since := re.match(r"since torch (\d+)\.(\d+)", cell):
        return tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, since.groups()))
    assert cell.startswith(("yes", "no")), cell
    return cell.startswith("yes")


@pytest.mark.parametrize(("column", "backend"), [("legacy", "nccl-legacy"), ("newer", "nccl2")])
def test_the_table_of_nccls_settings_is_what_a_backend_asks_the_environment_for(asked, column, backend):
    if not dist.is_backend_available(backend):
        if column == "newer":
            pytest.skip(f"this torch has no {backend}")
        backend = "nccl"
    rows = list(ROW.finditer(PAGE.read_text()))
    said = {name: heeds(row[column]) for row in rows for name in re.findall(r"`(\w+)`", row["names"])}
    found = asked(backend)
    assert {name: name in found for name in said} == said
    ours = {*environment.for_rank((), keep=True), *flight_recorder.SIZE_VARIABLES}
    assert {name for name in ours if name.startswith("TORCH_")} <= said.keys()
