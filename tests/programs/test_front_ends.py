"""A front end that lacks something still shows how each run ended: once, and readable.

VS Code and Colab do not run here. What front ends are known to lack is taken away one by one from a front end
that is made of jupyter_client and a real kernel. The facts, and where they are from (read in November 2026):

* Comm targets. A front end that does not know a comm's target closes the comm, as the protocol asks
  (jupyter-client.readthedocs.io, "Messaging in Jupyter", opening a comm). Colab knew none at first
  (googlecolab/colabtools#6), and shows widgets of other packages only once a cell has called
  `output.enable_custom_widget_manager()` (colabtools#498); anywidget calls it (manzt/anywidget#52), and Colab
  then adds the manager's address to each display with a widget (colabtools,
  `google/colab/output/_widgets.py`).
* Widgets. VS Code loads ipywidgets' own scripts, from a CDN where it must, and shows an error instead of the
  next MIME type where that fails (microsoft/vscode-jupyter#8635, #17518; microsoft/vscode#110750).
* Updates of a display. VS Code ignored them (vscode-jupyter#2071), lost those of the same cell (#1710), took
  them for another display (#12755) and took only the first (#13105); all are closed. CoCalc lost them for a
  while (sagemathinc/cocalc#7164), euporie before 2.10.5 (joouha/euporie#165), nteract's new app until 2026
  (nteract/nteract#121); xeus-python does not send them (jupyter-xeus/xeus-python#20).
* Messages during a cell. ipykernel takes those of comms when the cell has ended (ipython/ipykernel#65,
  jupyter-widgets/ipywidgets#1349), unless the page sends them to a subshell: ipykernel 7 with JupyterLab 4.4.
  Colab's own packages ask for ipykernel 6.17.1 (colabtools, `setup.py`, read at a commit of early 2025).
* An interrupt. VS Code sends it as a message where the kernel asks for that (vscode-jupyter#3927); a second
  one may come late or not at all (#2158), and on Windows the first one too (#7867).
* Scripts and styles. GitHub drops `style` and `script` elements, `style`, `class` and `id` attributes
  (jupyter/nbviewer#450, karolzak/ipyplot#3), may drop `details` (volkamerlab/teachopencadd#189), and shows no
  notebook with the state of widgets that lacks a key (github/codespaces-jupyter#610). nbviewer drops nothing
  (nbviewer#613).
"""

from __future__ import annotations

import contextlib
import queue
import re
import time
from dataclasses import dataclass, field
from typing import Any

import nh3
import pytest
from lanes import sampled
from patience import PATIENCE, waiting
from test_saved_notebooks import GITHUB_ATTRIBUTES, GITHUB_TAGS, words

WIDGET = "application/vnd.jupyter.widget-view+json"
PATIENCE_WITH_A_CELL = 6 * PATIENCE

COMM_TARGETS = "comm targets"
ANSWERS = "answers to comms"
WIDGETS = "widgets"
UPDATES = "updates of a display"
HTML = "HTML"
SANITISED = "scripts and styles"

LACKING: dict[str, set[str]] = {
    "an older VS Code": {UPDATES},
    "a console": {UPDATES, WIDGETS, HTML, COMM_TARGETS},
    "comm targets": {COMM_TARGETS, WIDGETS},
    "widgets": {WIDGETS},
    "nothing": set(),
    "answers to comms": {ANSWERS, WIDGETS},
    "updates and widgets": {UPDATES, WIDGETS},
    "HTML": {WIDGETS, HTML},
    "scripts and styles": {WIDGETS, UPDATES, SANITISED},
}

SAYS = "print('the first line of', rank)\nprint('and another')\n"
SUCCEEDS = f"{SAYS}rank + 40"
FAILS = f"{SAYS}if rank == 1:\n    raise ValueError('no such thing')\n"
LINES = ["the first line of 0", "the first line of 1"]


@dataclass
class Output:
    """One output of a cell."""

    data: dict[str, Any]
    display_id: str | None = None


@dataclass
class FrontEnd:
    """A front end of a kernel, which lacks what `lacks` names; see `LACKING`."""

    kernel: Any
    lacks: set[str] = field(default_factory=set)
    allows_input: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    first_metadata: dict[str, Any] = field(default_factory=dict)
    """That of the first display."""
    error: str = ""
    opened: dict[str, bool] = field(default_factory=dict)
    """Whether a comm is still open, by its id, which is that of the widget."""

    def send(self, kind: str, content: dict[str, Any], channel: str = "shell_channel") -> str:
        client = self.kernel.client
        message = client.session.msg(kind, content, metadata=self.metadata)
        getattr(client, channel).send(message)
        return str(message["header"]["msg_id"])

    def start(self, code: str) -> str:
        """Begin to run a cell."""
        self.outputs, self.opened, self.error = [], {}, ""
        request = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        return self.send(
            "execute_request", {**request, "allow_stdin": self.allows_input, "stop_on_error": False}
        )

    def follow(self, cell: str, until: Any = lambda: False) -> bool:
        """Take messages until the cell has ended, which is returned, or until `until()`."""
        deadline = time.monotonic() + PATIENCE_WITH_A_CELL
        while not until():
            try:
                message = self.kernel.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                self.kernel.interrupt()
                pytest.fail(f"the cell did not end; it shows {self.reads()!r}")
            if message["parent_header"].get("msg_id") == cell:
                kind, content = message["msg_type"], message["content"]
                if kind == "status" and content["execution_state"] == "idle":
                    return True
                self.take(kind, content)
        return False

    def take(self, kind: str, content: dict[str, Any]) -> None:
        match kind:
            case "comm_open" if COMM_TARGETS in self.lacks:
                self.send("comm_close", {"comm_id": content["comm_id"], "data": {}})
            case "comm_open" if ANSWERS not in self.lacks:
                self.opened[content["comm_id"]] = True
                self.says_hello(content["comm_id"])
            case "error":
                self.error = content["ename"]
            case "comm_close":
                self.opened[content["comm_id"]] = False
            case "display_data":
                if not self.outputs:
                    self.first_metadata = content["metadata"]
                shown = content.get("transient", {}).get("display_id")
                self.outputs.append(Output(content["data"], shown))
            case "update_display_data" if UPDATES not in self.lacks:
                for each in self.outputs:
                    if each.display_id == content["transient"]["display_id"]:
                        each.data = content["data"]

    def says_hello(self, comm: str) -> None:
        """Send what the panel's script sends; it arrives when the cell has ended."""
        for word in ("hello page", "stop", "again"):
            data = {"method": "custom", "content": word}
            self.send("comm_msg", {"comm_id": comm, "data": data})

    def run(self, code: str) -> str:
        """Run a cell to its end; return what a reader then sees."""
        assert self.follow(self.start(code))
        return self.reads()

    def run_with_panel(self, body: str, gate: Any, line: str = "-n 2") -> str:
        """Run a cell that ends only after its panel was shown; return what a reader then sees."""
        gate.unlink(missing_ok=True)
        cell = self.start(waiting(gate, line).strip().removesuffix('"freed"') + body)
        assert not self.follow(cell, lambda: bool(self.outputs)), "the cell has ended without a panel"
        assert WIDGET in self.outputs[0].data
        gate.touch()
        assert self.follow(cell)
        return self.reads()

    def reads(self) -> str:
        """Return what a reader of the outputs sees, every run of white space as one blank."""
        return " ".join(" ".join(self.shown(each.data).split()) for each in self.outputs).strip()

    def shown(self, data: dict[str, Any]) -> str:
        if WIDGET in data and WIDGETS not in self.lacks:
            return "(a live panel)" if self.opened.get(data[WIDGET]["model_id"], False) else ""
        if HTML in self.lacks or "text/html" not in data:
            return str(data["text/plain"])
        html = data["text/html"]
        if SANITISED in self.lacks:
            kept = {"*": set(GITHUB_ATTRIBUTES.split())}
            # Without `details`: what it folds away is to be read, too.
            html = nh3.clean(html, tags=set(GITHUB_TAGS.split()) - {"details", "summary"}, attributes=kept)
        return str(words(html))


def once(state: str, expected: list[str], seen: str) -> None:
    """Check that a reader sees all of it, and only one result.

    The text form of a run that succeeded has no title, but a line for each value.
    """
    assert [each for each in expected if each not in seen] == []
    titles = rf"cell · 2 ranks · gloo: {state}|{state} · cell · 2 ranks · gloo|rank 0: 40"
    if state == "FAILED":
        titles = "(?i)root cause: rank 1: ValueError: no such thing"
    assert len(re.findall(titles, seen)) == 1, seen
    assert [seen.count(line) for line in LINES] == [1, 1], seen
    assert "live panel" not in seen


@pytest.fixture(scope="module")
def panel_kernel(kernels):
    """Start a kernel that opens a panel."""
    kernel = kernels(NBLAUNCH_DISPLAY="auto")
    yield kernel
    kernel.close()


@pytest.fixture
def front_end(panel_kernel):
    """Give a front end, which another test has not left a message to."""
    with contextlib.suppress(queue.Empty):
        while True:
            panel_kernel.client.get_iopub_msg(timeout=0)
    yield FrontEnd(panel_kernel)
    panel_kernel.forget()


@pytest.mark.parametrize("lacking", sampled(LACKING, ci=5))
def test_a_front_end_that_lacks_something_shows_once_how_a_run_ended(front_end, free, lacking):
    front_end.lacks = LACKING[lacking]
    succeeded = front_end.run_with_panel(SUCCEEDS, free)
    once("SUCCEEDED", [*LINES, "40", "41"], succeeded)
    failed = front_end.run_with_panel(FAILS, free)
    once("FAILED", LINES, failed)
    if UPDATES not in front_end.lacks:
        assert "running" not in (succeeded + failed).lower()


JUPYTERLAB = {"deletedCells": [], "recordTiming": False}


@pytest.mark.parametrize(
    ("allows_input", "metadata"), [(True, JUPYTERLAB), (False, {})], ids=["JupyterLab", "a program"]
)
def test_where_updates_are_known_to_arrive_the_result_takes_the_place_of_the_panel(
    front_end, free, allows_input, metadata
):
    front_end.allows_input, front_end.metadata = allows_input, metadata
    once("SUCCEEDED", [*LINES, "40", "41"], front_end.run_with_panel(SUCCEEDS, free))
    assert [set(each.data) for each in front_end.outputs] == [{"text/html", "text/plain"}]


def test_a_front_end_that_may_ignore_updates_has_one_output_that_is_not_empty(front_end, free):
    front_end.run_with_panel(SUCCEEDS, free)
    assert [bool(each.data["text/html"]) for each in front_end.outputs] == [False, True]


def test_a_job_in_the_background_ends_where_it_was_begun(front_end, free):
    cell = front_end.start(waiting(free, "-n 2 --background --out handle"))
    front_end.follow(cell)
    front_end.outputs.clear()
    free.touch()
    other = front_end.start("handle.result(timeout=60).values")
    assert front_end.follow(other)
    assert [each.data.get("text/html") for each in front_end.outputs] == []


def test_what_a_page_sends_during_a_cell_arrives_after_it_and_stops_no_other_cell(front_end, free):
    """ipykernel gives the panel its "stop" when the cell that it belongs to has ended."""
    once("SUCCEEDED", LINES, front_end.run_with_panel(SUCCEEDS, free))
    assert front_end.opened, "the page has sent nothing"
    once("SUCCEEDED", LINES, front_end.run_with_panel(SUCCEEDS, free))


def test_an_interrupt_that_is_a_message_ends_the_cell_and_a_late_one_does_no_harm(front_end, free):
    cell = front_end.start(waiting(free, "-n 2"))
    assert not front_end.follow(cell, lambda: bool(front_end.outputs))
    front_end.send("interrupt_request", {}, channel="control_channel")
    assert front_end.follow(cell)
    assert front_end.error == "KeyboardInterrupt"
    assert "STOPPED · cell · 2 ranks" in front_end.reads()
    front_end.send("interrupt_request", {}, channel="control_channel")
    once("SUCCEEDED", LINES, front_end.run_with_panel(SUCCEEDS, free))


WITHOUT_WIDGETS = """
import sys
hidden = {name: sys.modules.pop(name, None) for name in ("nblaunch.view.panel", "anywidget", "ipywidgets")}
sys.modules.update(dict.fromkeys(("anywidget", "ipywidgets")))  # importing them fails
"""
WITH_WIDGETS = "sys.modules.update((name, each) for name, each in hidden.items() if each is not None)"


def test_without_ipywidgets_in_the_kernel_a_run_is_shown_when_it_has_ended(front_end):
    front_end.run(WITHOUT_WIDGETS)
    try:
        # Longer than the time after which a panel would be opened.
        once(
            "SUCCEEDED",
            [*LINES, "40", "41"],
            front_end.run("%%distributed -n 2\nimport time\ntime.sleep(0.3)\n" + SUCCEEDS),
        )
        assert [set(each.data) for each in front_end.outputs] == [{"text/html", "text/plain"}]
    finally:
        front_end.run(WITH_WIDGETS)


COLAB = """
import sys, types
from IPython import get_ipython

url = "https://widgets.example/manager.min.js"
output = types.ModuleType("google.colab.output")
output._widgets = types.SimpleNamespace(_installed_url=None)

def add_manager(message):
    kind, content = "application/vnd.jupyter.widget-view+json", message["content"]
    if kind in content.get("data", {}):
        content.setdefault("metadata", {})[kind] = {"colab": {"custom_widget_manager": {"url": url}}}
    return message

def enable_custom_widget_manager():
    output._widgets._installed_url = url
    get_ipython().display_pub.register_hook(add_manager)

output.enable_custom_widget_manager = enable_custom_widget_manager
sys.modules["google.colab.output"] = output
"""
NO_COLAB = "get_ipython().display_pub.unregister_hook(add_manager); del sys.modules['google.colab.output']"


def test_colab_is_told_where_the_panels_script_comes_from(front_end, free):
    """What Colab's own package does to a display, in the same order; its renderer does not run here."""
    front_end.run(COLAB)
    try:
        once("SUCCEEDED", LINES, front_end.run_with_panel(SUCCEEDS, free))
        manager = {"custom_widget_manager": {"url": "https://widgets.example/manager.min.js"}}
        assert front_end.first_metadata == {WIDGET: {"colab": manager}}
    finally:
        front_end.run(NO_COLAB)
