"""A node with another Python or torch is not let in: what travels would not mean the same there."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import nblaunch

ROOT = Path(__file__).parents[2]
SECONDS = 60
# The node program, but for what it says of itself.
PROGRAM = """
import os
from msgspec.structs import replace
from nblaunch.host import node_main as host
its = host.this_machine
python, torch = os.environ["CLAIMS"].split()
host.this_machine = lambda placement: replace(its(placement), python=python, torch=torch)
from nblaunch.host.node_main import live
"""
NODE = """
import sys
from nblaunch.host import join
join.LIVE = "claims:live"
sys.exit(join.join(sys.argv[1:]))
"""


def wait_for(path):
    while not os.path.exists(path):  # noqa: PTH110 - this runs in ranks
        time.sleep(0.02)
    return 7


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    """Give a place to meet, and a key for it."""
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    monkeypatch.setenv("NBLAUNCH_JOIN_KEY_FILE", str(key))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{trial.getsockname()[1]}"


def test_a_node_of_another_python_or_torch_is_refused_with_both_versions(endpoint, tmp_path, eventually):
    told: list[tuple[int, str]] = []
    done = tmp_path / "done"
    (tmp_path / "claims.py").write_text(PROGRAM)
    python, release = platform.python_version(), torch.__version__.partition("+")[0]
    minor = python.rpartition(".")[0]

    def is_open():
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", int(endpoint.rpartition(":")[2]))) == 0

    def try_both():
        try:
            eventually(is_open, "the rendezvous is open", SECONDS)
            for claims in (f"3.9.1 {release}", f"{python} 2.0.1"):
                words = ["--rdzv-endpoint", endpoint, "--rdzv-id", "versions", "-n", "2"]
                node = subprocess.run(
                    [sys.executable, "-c", NODE, *words],
                    cwd=tmp_path,
                    env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "CLAIMS": claims},
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
                told.append((node.returncode, node.stderr))
        finally:
            done.touch()

    visitor = threading.Thread(target=try_both)
    visitor.start()
    try:
        result = nblaunch.run(
            wait_for,
            args=(str(done),),
            nproc=1,
            nnodes="1:2",
            rdzv_endpoint=endpoint,
            rdzv_id="versions",
            rdzv_conf="last_call_timeout=1",
            timeout=2 * SECONDS,
        )
    finally:
        visitor.join(SECONDS)
    assert [status for status, _ in told] == [1, 1]
    for said, both in (
        (told[0][1], f"Python {minor}: the notebook's machine; 3.9: {platform.node()}."),
        (told[1][1], f"torch {release}: the notebook's machine; 2.0.1: {platform.node()}."),
    ):
        assert "does not let this node in" in said
        assert both in said
    assert (result.values, result.world_size) == ([7], 1)
