"""What a kernel sends to the page while a run goes on, and what stays in the notebook."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from nblaunch.view.summary import Header

HEADER = Header("cell", "gloo")


WIDGET = "application/vnd.jupyter.widget-view+json"


REPOSITORY = str(Path(__file__).parents[2])


RUN = """
import os, time
from nblaunch.protocol.messages import Payload, Printed, Returned, Started, Stream
from nblaunch.protocol.state import RunState, advance
from nblaunch.view.display import choose_view
from nblaunch.view.summary import Header

def run(seconds, mode="", ranks=2, pause=0.005):
    os.environ["NBLAUNCH_DISPLAY"] = mode
    view = choose_view(Header("cell", "gloo"))
    state = RunState.fresh(ranks)
    view.open(state)
    for rank in range(ranks):
        state = advance(state, Started(rank=rank, time=0.0))
    begin = time.monotonic()
    while True:
        for rank in range(ranks):
            text = f"{time.monotonic() - begin:.3f}\\n"
            state = advance(state, Printed(rank=rank, stream=Stream.STDOUT, text=text))
        view.draw(state)
        if time.monotonic() - begin >= seconds:
            break
        time.sleep(pause)
    for rank in range(ranks):
        state = advance(state, Printed(rank=rank, stream=Stream.STDOUT, text="the end\\n"))
        state = advance(state, Returned(rank=rank, value=Payload(sizes=()), time=1.0, text="3.0"))
    view.close(state)
    assert not view._broken

def comms():
    import comm
    return len(comm.get_comm_manager().comms)
"""


class Kernel:
    """A real ipykernel; `execute` returns what it says until it is idle again."""

    def __init__(self):
        self.manager = KernelManager()
        self.manager.start_kernel(env={**os.environ, "PYTHONPATH": REPOSITORY, "PYTEST_CURRENT_TEST": ""})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.execute(RUN)

    def execute(self, code, **options):
        identifier = self.client.execute(code, **options)
        messages: list[tuple[str, dict[str, Any]]] = []
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != identifier:
                continue
            kind, content = message["msg_type"], message["content"]
            assert kind != "error", "\n".join(content.get("traceback", ()))
            if kind == "status" and content["execution_state"] == "idle":
                return messages
            if kind not in ("status", "execute_input"):
                messages.append((kind, content))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    started = Kernel()
    yield started
    started.close()


def kinds(messages):
    return [kind for kind, _ in messages]


@pytest.mark.oldest
@pytest.mark.parametrize(("mode", "types"), [("html", {"text/html", "text/plain"}), ("text", {"text/plain"})])
@pytest.mark.parametrize("seconds", [0, 0.4])
def test_under_html_and_text_a_run_makes_exactly_one_display(kernel, mode, types, seconds):
    ((kind, content),) = kernel.execute(f"run({seconds}, {mode!r})")
    assert kind == "display_data"
    assert set(content["data"]) == types


@pytest.mark.oldest
def test_a_short_run_makes_exactly_one_display_and_no_widget(kernel):
    ((kind, content),) = kernel.execute("run(0)")
    assert kind == "display_data"
    assert set(content["data"]) == {"text/html", "text/plain"}
    assert "the end" in content["data"]["text/html"]


@pytest.mark.oldest
def test_a_long_run_shows_a_panel_and_leaves_static_html(kernel):
    # As programs that execute notebooks ask: they take updates of a display.
    messages = kernel.execute("run(2.0)", allow_stdin=False)
    ((shown),) = [content for kind, content in messages if kind == "display_data"]
    assert set(shown["data"]) == {WIDGET, "text/html", "text/plain"}
    ((updated),) = [content for kind, content in messages if kind == "update_display_data"]
    assert set(updated["data"]) == {"text/html", "text/plain"}
    assert updated["transient"] == shown["transient"]
    assert "the end" in updated["data"]["text/html"]
    last_of = {kind: index for index, kind in enumerate(kinds(messages))}
    # The last message empties what programs that run notebooks would save of the closed panel.
    assert last_of["update_display_data"] < last_of["comm_msg"] < last_of["comm_close"]


@pytest.mark.oldest
def test_a_panel_leaves_no_comm_open(kernel):
    messages = kernel.execute("run(0.4)")
    opened = {content["comm_id"] for kind, content in messages if kind == "comm_open"}
    closed = {content["comm_id"] for kind, content in messages if kind == "comm_close"}
    assert opened == closed
    assert opened
    assert kernel.execute("print(comms())") == [("stream", {"name": "stdout", "text": "0\n"})]


@pytest.mark.oldest
def test_a_panel_sends_one_message_a_tick_and_no_more_than_ten_a_second(kernel):
    messages = kernel.execute("run(1.0, ranks=64)")
    *updates, emptied = [content["data"] for kind, content in messages if kind == "comm_msg"]
    assert emptied["state"] == {"whole": {}, "delta": {}}
    deltas = [update for update in updates if "delta" in update["state"]]
    assert len(updates) - len(deltas) == 1, "nobody was heard, so everything is told once more"
    assert 3 <= len(deltas) <= 9
    assert all(set(delta["state"]) == {"delta"} for delta in deltas)
    assert all(delta["state"]["delta"]["log"]["rows"] for delta in deltas)
    assert all(delta["state"]["delta"]["parts"] == {} for delta in deltas), "more output is no other state"


@pytest.mark.oldest
def test_a_panel_that_is_asked_for_its_state_has_all_of_it(kernel):
    code = """
from nblaunch.view.panel_parts import Drawing
from nblaunch.view.panel import Panel
drawing, state = Drawing(Header("cell", "gloo"), 0.0), RunState.fresh(2)
panel = Panel(drawing, lambda: 7.0)
panel.show(drawing.changes(state, 1.0))
for message in (Started(rank=1, time=0.0), Printed(rank=1, stream=Stream.STDOUT, text="hello")):
    state = advance(state, message)
panel.show(drawing.changes(state, 2.0))
whole, delta = panel.get_state()["whole"], panel.get_state()["delta"]
parts = whole["parts"]
print([key for key in parts if key[0] == "r" and key[1:].isdigit()], whole["age"])
print("RUNNING" in parts["head"], "RUNNING" in parts["r1"], "INIT" in parts["r0"])
rows = [row[2] for row in whole["log"]["rows"]]
print("r0" in delta["parts"], whole["sequence"] == delta["sequence"], rows)
panel.close()
"""
    said = [content["text"] for kind, content in kernel.execute(code) if kind == "stream"]
    assert "".join(said) == "['r0', 'r1'] 7.0\nTrue True True\nFalse True ['hello']\n"


@pytest.mark.oldest
def test_a_panel_that_cannot_be_made_costs_neither_the_run_nor_its_end(kernel):
    code = """
import nblaunch.view.panel as widget
kept, widget.Panel = widget.Panel, None
try:
    view = choose_view(Header("cell", "gloo"))
    state = RunState.fresh(1)
    view.open(state)
    time.sleep(0.2)
    view.draw(state)
    view.draw(state)
    view.close(advance(state, Returned(rank=0, value=Payload(sizes=()), time=1.0, text="3.0")))
finally:
    widget.Panel = kept
"""
    ((kind, content),) = kernel.execute(code)
    assert kind == "display_data"
    assert content["data"]["text/plain"] == "rank 0: 3.0"


@pytest.mark.oldest
def test_a_saved_notebook_holds_static_html_and_no_widget():
    saved = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(RUN + "\nrun(0.5)")])
    environment = {**os.environ, "PYTHONPATH": REPOSITORY}
    client = NotebookClient(saved, timeout=60, store_widget_state=False)
    asyncio.run(client.async_execute(env=environment))  # `execute` would leave its event loop open
    (output,) = saved.cells[0].outputs
    assert output["output_type"] == "display_data"
    assert set(output["data"]) == {"text/html", "text/plain"}
    assert "the end" in output["data"]["text/html"]
    assert "widgets" not in saved.metadata


@pytest.fixture
def page(kernel):
    """Give another client of the kernel; it connects when it is used."""
    client = BlockingKernelClient(connection_file=kernel.manager.connection_file)
    client.load_connection_file()
    yield client
    client.stop_channels()


def received(client, until):
    """Return what a client of the kernel receives, up to a message of type `until`."""
    messages: list[tuple[str, dict[str, Any]]] = []
    while not messages or messages[-1][0] != until:
        message = client.get_iopub_msg(timeout=60)
        messages.append((message["msg_type"], message["content"]))
    return messages


notices_pages = pytest.mark.skipif(
    int(version("ipykernel").split(".")[0]) < 7, reason="ipykernel 6 does not notice that a page has come"
)


@notices_pages
def test_a_page_that_connects_during_a_run_is_sent_the_panel_and_its_end(kernel, page):
    kernel.client.execute("run(2.5)")
    shown = received(kernel.client, "display_data")[-1][1]["data"][WIDGET]["model_id"]
    page.start_channels()
    messages = received(page, "comm_close")
    received(kernel.client, "comm_close")
    opened = [content for kind, content in messages if kind == "comm_open" and content["comm_id"] == shown]
    assert opened[0]["target_name"] == "jupyter.widget"
    assert {"r0", "r1"} <= opened[0]["data"]["state"]["whole"]["parts"].keys()
    ended = [content["data"]["state"] for kind, content in messages if kind == "comm_msg"][-1]
    assert "the end" in ended["final"]["text/html"]
    assert set(ended["final"]) == {"text/html", "text/plain"}
    assert kernel.execute("print(comms())") == [("stream", {"name": "stdout", "text": "0\n"})]


@notices_pages
def test_a_page_that_comes_after_the_end_finds_the_last_results_without_a_comm(kernel, page):
    ran = kernel.execute("for _ in range(10):\n    run(0.2)")
    # This client is not known to take updates of a display, so each result is a second display.
    displays = [content["data"] for kind, content in ran if kind == "display_data"]
    shown = [data[WIDGET]["model_id"] for data in displays if WIDGET in data]
    page.start_channels()
    about = {"comm_id": "control", "target_name": "jupyter.widget.control", "data": {}}
    for kind, content in (
        ("comm_open", about),
        ("comm_msg", {"comm_id": "control", "data": {"method": "request_states"}}),
        ("comm_close", {"comm_id": "control", "data": {}}),
    ):
        page.shell_channel.send(page.session.msg(kind, content, metadata={"version": "1.0.0"}))
    found = received(page, "comm_msg")[-1][1]["data"]
    assert found["method"] == "update_states"
    assert list(found["states"]) == shown[-8:], "of more runs than that it has been saved since"
    last = found["states"][shown[-1]]["state"]
    assert "the end" in last["final"]["text/html"]
    assert (last["whole"], last["delta"], "layout" in last) == ({}, {}, False)
    assert kernel.execute("print(comms())") == [("stream", {"name": "stdout", "text": "0\n"})]
