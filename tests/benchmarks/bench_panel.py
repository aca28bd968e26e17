"""What the live panel costs: the kernel's own thread, messages and bytes, while ranks print without a pause.

    python tests/benchmarks/bench_panel.py [--lines 1000] [--seconds 5]

The ranks are made up, the kernel, the panel and its messages are real. What counts is the share of one core
that drawing takes on the thread of the kernel, and how far the messages stay below what jupyter_server lets
through (1,000 messages and 1,000,000 bytes a second).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

SCENES = {
    "8 ranks": (8, "step {step}: rank {rank} has loss {loss:.4f} at learning rate 0.001"),
    "64 ranks": (64, "step {step}: rank {rank} has loss {loss:.4f} at learning rate 0.001"),
    "64 ranks, all alike": (64, "step {step} has loss {loss:.4f} at learning rate 0.001"),
    "64 progress bars": (64, None),
    "256 ranks": (256, "step {step}: rank {rank} has loss {loss:.4f} at learning rate 0.001"),
}

CODE = """
import json, time
from nblaunch.protocol.messages import Printed, Started, Stream
from nblaunch.protocol.state import RunState, advance
from nblaunch.view.display import choose_view
from nblaunch.view.summary import Header

def draw(ranks, line, lines, seconds):
    view = choose_view(Header("cell", "gloo", node="host"))
    state = RunState.fresh(ranks)
    view.open(state)
    for rank in range(ranks):
        state = advance(state, Started(rank=rank, time=0.0))
    step, busy, begun = 0, 0.0, time.monotonic()
    while (passed := time.monotonic() - begun) < seconds + 0.5:
        due = int(passed * lines) if line else int(passed * 10)
        for rank in range(ranks):
            if line:
                said = (line.format(step=at, rank=rank, loss=1 / (at + 1)) for at in range(step, due))
                text, stream = "".join(f"{each}\\n" for each in said), Stream.STDOUT
            else:
                text = "".join(f"\\r{at % 100:3}%|{'#' * (at % 20):20}| {at}/1000 [00:00<00:09, 9.97it/s]"
                               for at in range(step, due))
                stream = Stream.STDERR
            if text:
                state = advance(state, Printed(rank=rank, stream=stream, text=text))
        step = due
        # The first draw opens the panel; what is measured is what comes then, again and again.
        before, opened = time.thread_time(), view.view._panel is not None
        view.draw(state)
        if opened:  # as a page of JupyterLab that has answered: nothing is sent again
            view.view._panel._heard.append("page")
        busy += time.thread_time() - before if opened else 0.0
        time.sleep(0.1)
    print(json.dumps(busy / (time.monotonic() - begun)))
    view.view._panel.close()
"""


def measure(client: BlockingKernelClient, scene: tuple[int, str | None], options: argparse.Namespace) -> str:
    """Draw one scene; return its figures as a line."""
    ranks, line = scene
    request = client.execute(f"draw({ranks}, {line!r}, {options.lines}, {options.seconds})")
    share, messages, size = 0.0, 0, 0
    while True:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != request:
            continue
        content: dict[str, Any] = message["content"]
        if message["msg_type"] == "stream":
            share = float(json.loads(content["text"]))
        elif message["msg_type"] == "comm_msg":
            messages += 1
            size += len(json.dumps(content, ensure_ascii=False).encode())
        elif message["msg_type"] == "error":
            raise RuntimeError("\n".join(content["traceback"]))
        elif content.get("execution_state") == "idle":
            break
    seconds = options.seconds
    return f"{share:8.1%} {messages / seconds:9.1f} {size / seconds / 1000:9.0f}"


def main() -> None:
    """Print a line for each scene."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1000, help="lines a second of each rank")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each scene lasts")
    options = parser.parse_args()
    repository = str(Path(__file__).parents[2])
    manager = KernelManager()
    manager.start_kernel(env={**os.environ, "PYTHONPATH": repository}, extra_arguments=["--log-level=ERROR"])
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        client.execute_interactive(CODE, timeout=60)
        print(f"{options.lines} lines a second of each rank")
        print(f"  {'scene':24s}{'core':>8s} {'messages':>9s} {'kB':>9s}   a second")
        for name, scene in SCENES.items():
            print(f"  {name:24s}{measure(client, scene, options)}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main()
