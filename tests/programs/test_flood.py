"""Ranks that print as fast as they can: nothing is lost, and nobody is flooded."""

from __future__ import annotations

import collections
import json
import queue
import time

import pytest

MEGABYTE = 1_000_000
CELL = """\
%%distributed -n 2 --out res
for number in range(200_000):
    print(f"rank {rank}: step {number}, the loss is 0.{number:06}")
"""
EXPECTED = """\
def expected(rank):
    lines = (f"rank {rank}: step {number}, the loss is 0.{number:06}" for number in range(200_000))
    return "\\n".join(lines) + "\\n"
"""


class Wire:
    """What a kernel sends while a cell runs, by the second; and what a notebook would save of it."""

    def __init__(self):
        self.messages = collections.Counter()
        self.bytes = collections.Counter()
        self.saved = {}

    def take(self, message, now):
        size = len(json.dumps(message, default=repr))
        size += sum(len(buffer) for buffer in message.get("buffers", ()))
        self.messages[int(now)] += 1
        self.bytes[int(now)] += size
        content = message["content"]
        match message["msg_type"]:
            case "display_data" | "update_display_data":
                self.saved[content["transient"].get("display_id")] = content["data"]
            case "stream" | "execute_result":
                self.saved[len(self.saved)] = content

    @property
    def saved_bytes(self):
        return len(json.dumps(list(self.saved.values())))


def listen(kernel, code, seconds=100):
    """Run a cell and receive all that the kernel sends meanwhile, as jupyter_server does."""
    wire = Wire()
    began = time.monotonic()
    # Without input, as programs that execute notebooks: they take updates of a display.
    message_id = kernel.client.execute(code, allow_stdin=False)
    while True:
        try:
            message = kernel.client.get_iopub_msg(timeout=seconds)
        except queue.Empty:
            pytest.fail(f"nothing for {seconds} s")
        if message["parent_header"].get("msg_id") != message_id:
            continue
        wire.take(message, time.monotonic() - began)
        if message["msg_type"] == "error":
            pytest.fail("\n".join(message["content"]["traceback"]))
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return wire


def test_200_000_lines_of_each_rank_are_all_there_and_flood_neither_front_end_nor_notebook(start_kernel):
    kernel = start_kernel(NBLAUNCH_DISPLAY="widget")
    kernel.ok("%%distributed -n 2\npass")
    wire = listen(kernel, CELL)
    kernel.ok(EXPECTED)
    assert kernel.value("[res.ranks[rank].stdout == expected(rank) for rank in range(2)]") == [True, True]
    # jupyter_server drops what comes above 1,000 messages or 1 MB a second.
    assert max(wire.messages.values()) < 100
    assert max(wire.bytes.values()) < MEGABYTE
    assert wire.saved_bytes < MEGABYTE
    (saved,) = wire.saved.values()
    assert sorted(saved) == ["text/html", "text/plain"]
    for rank in range(2):
        assert f"lines left out, see result.ranks[{rank}].stdout" in saved["text/plain"]
        assert f"rank {rank}: step 0, the loss is 0.000000" in saved["text/plain"]
        assert f"rank {rank}: step 199999, the loss is 0.199999" in saved["text/plain"]
