"""A node program that joins nothing: it reports to a test what it has got, and ends when that lets it go.

`fake_node.py HOST:PORT [--fails-at PLACE] [--key-stdin]`. Without the last word its key is in a file.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def main() -> None:
    place = os.environ.get("NBLAUNCH_NODE_PLACE") or os.environ.get("SLURM_NODEID") or "-1"
    if "--key-stdin" in sys.argv:
        key = sys.stdin.readline()
    else:
        key = Path(os.environ["NBLAUNCH_JOIN_KEY_FILE"]).read_text()
    if "--fails-at" in sys.argv and place == sys.argv[sys.argv.index("--fails-at") + 1]:
        sys.exit(f"no luck at {place}")
    host, _, port = sys.argv[1].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as notebook:
        notebook.settimeout(None)
        has = {"key": key, "place": int(place), "pid": os.getpid(), "host": socket.gethostname()}
        notebook.sendall(json.dumps(has | {"cwd": str(Path.cwd())}).encode() + b"\n")
        notebook.recv(1)  # until the test, or the notebook, is gone


if __name__ == "__main__":
    main()
