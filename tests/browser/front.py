"""A notebook in a browser, as a reader sees it: cells are run, what they show is looked at."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
import pytest

from .server import Server

if not os.environ.get("CI"):
    pytest.importorskip(
        "playwright", reason="Playwright for Python is missing (see notebooks/docs/testing.md)"
    )
from playwright.sync_api import Locator, Page, expect

__all__ = ["DARK", "LIGHT", "PATIENCE_WITH_PAGES", "SIZES", "Front", "Locator", "expect"]

PATIENCE = 30_000
"""Milliseconds that something which must happen may take; only a failure waits as long."""
PATIENCE_WITH_PAGES = 4 * PATIENCE
"""The same for a page and its kernel: tens of megabytes of scripts, on a machine that may be busy."""
expect.set_options(timeout=PATIENCE)
DARK, LIGHT = "JupyterLab Dark", "JupyterLab Light"
SIZES = {"wide": (1200, 1000), "narrow": (400, 1000), "zoomed": (600, 1000)}
"""The page in CSS pixels; zoomed to 200 %, a browser has half as many across the same window."""

_READY = """() => window.jupyterapp?.shell.currentWidget?.context?.isReady"""
_KERNEL_READY = """() => {
  const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
  return context?.isReady && context.session?.kernel?.status === 'idle';
}"""
_RUN = """(sources) => {
  const app = window.jupyterapp;
  const notebook = app.shell.currentWidget.content;
  const shared = notebook.model.sharedModel;
  const cells = sources.map((source) => ({ cell_type: 'code', source, metadata: { trusted: true } }));
  shared.transact(() => {
    shared.deleteCellRange(0, shared.cells.length);
    shared.insertCells(0, cells);
  });
  notebook.activeCellIndex = 0;
  app.commands.execute('notebook:run-all-cells');   // not awaited: the cell may block
}"""
_ADD = """(sources) => {
  const app = window.jupyterapp;
  const notebook = app.shell.currentWidget.content;
  const shared = notebook.model.sharedModel;
  const first = shared.cells.length;
  const cells = sources.map((source) => ({ cell_type: 'code', source, metadata: { trusted: true } }));
  shared.insertCells(first, cells);
  notebook.activeCellIndex = first;
  app.commands.execute('notebook:run-all-below');
}"""
_COMMAND = "([name, options]) => window.jupyterapp.commands.execute(name, options)"


class Front:
    """One page of JupyterLab or Notebook 7; its notebook and its kernel serve all tests of that front end."""

    def __init__(self, name: str, page: Page, server: Server, screenshots: Path) -> None:
        """Show nothing yet."""
        self.name = name
        self.page = page
        self.problems: list[str] = []
        """What the page itself complained about: errors that no script caught."""
        self._server = server
        self._screenshots = screenshots
        self.test = ""
        """What is tested now; pictures have its name."""
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", self._note)

    def _note(self, error: object) -> None:
        # anywidget says so, two seconds later, of any widget that was closed before the page had made it.
        if "[anywidget] Failed to initialize model" not in str(error):
            self.problems.append(str(error))

    # --- notebooks ---

    def open(self, path: str) -> None:
        """Open a notebook, with a fresh page."""
        if self.name == "lab":
            where = f"lab/tree/{quote(path)}?token={self._server.token}&reset"
        else:
            where = f"notebooks/{quote(path)}?token={self._server.token}"
        self.page.goto(f"{self._server.url}{where}", wait_until="commit")
        self.page.wait_for_function(_READY, timeout=PATIENCE_WITH_PAGES)

    def open_new(self, path: str = "live.ipynb") -> None:
        """Make an empty notebook, open it, and wait for its kernel."""
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        nbformat.write(nbformat.v4.new_notebook(metadata=kernel), self._server.files / path)
        self.open(path)
        self.has_kernel()

    def has_kernel(self) -> None:
        """Wait until the page is connected to a kernel that is idle."""
        self.page.wait_for_function(_KERNEL_READY, timeout=PATIENCE_WITH_PAGES)

    @contextmanager
    def reopened(self, path: str, detail: str) -> Iterator[Locator]:
        """Open a notebook in a page of its own, without a kernel; give the last cell's output.

        Its kernel must be one that nobody has: only then the page asks for one.
        """
        page = self.page.context.new_page()
        reader = Front(self.name, page, self._server, self._screenshots)
        reader.test = self.test
        try:
            reader.open(path)
            page.get_by_role("dialog").get_by_role("button", name="No Kernel").click()
            yield reader.outputs.last
            reader.screenshot(detail)
        finally:
            page.close()

    def command(self, name: str, **options: Any) -> None:
        """Do what an entry of the menu does."""
        self.page.evaluate(_COMMAND, [name, options])

    def save(self) -> Path:
        """Save the notebook; return its file."""
        self.command("docmanager:save")
        path = self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
        return self._server.files / str(path)

    def theme(self, name: str = LIGHT) -> None:
        """Choose a theme, and wait until the page has it."""
        self.command("apputils:change-theme", theme=name)
        light = "false" if name == DARK else "true"
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        # JupyterLab covers the page while it changes.
        expect(self.page.locator("#jupyterlab-splash")).to_have_count(0)

    def size(self, name: str = "wide") -> None:
        """Give the page one of the `SIZES`; a small one has no room for JupyterLab's list of files."""
        width, height = SIZES[name]
        self.page.set_viewport_size({"width": width, "height": height})
        if self.name == "lab":
            move = "expandLeft" if name == "wide" else "collapseLeft"
            self.page.evaluate(f"() => window.jupyterapp.shell.{move}()")

    # --- cells ---

    def start(self, *cells: str) -> Locator:
        """Make these the notebook's cells and begin to run them; return the last one's output."""
        self.page.evaluate(_RUN, [_tidy(each) for each in cells])
        return self.outputs.last

    def run(self, *cells: str) -> Locator:
        """Run these cells to their end; return the last one's output."""
        shown = self.start(*cells)
        self.finished()
        return shown

    def add(self, *cells: str) -> Locator:
        """Add these cells at the notebook's end and begin to run them; return the last one's output."""
        self.page.evaluate(_ADD, [_tidy(each) for each in cells])
        return self.outputs.last

    def restart_kernel(self) -> None:
        """Restart the kernel from the menu, and wait until the new one is there."""
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.get_by_role("menuitem", name=re.compile("^Restart Kernel…")).click()
        self.page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
        self.has_kernel()

    def finished(self, timeout: float = 60_000) -> None:
        """Wait until the last cell has run, whatever came of it."""
        prompt = self.page.locator(".jp-Cell .jp-InputPrompt").last
        expect(prompt).to_have_text(re.compile(r"\[\d+\]"), timeout=timeout)

    def is_running(self) -> bool:
        """Return whether the last cell still runs."""
        return "*" in (self.page.locator(".jp-Cell .jp-InputPrompt").last.text_content() or "")

    def interrupt(self) -> None:
        """Do what the notebook's stop button does."""
        self.command("notebook:interrupt-kernel")

    @property
    def outputs(self) -> Locator:
        """The outputs of all cells."""
        return self.page.locator(".jp-Cell-outputArea")

    @property
    def panel(self) -> Locator:
        """The live panel."""
        return self.page.locator(".nblaunch-panel").last

    @property
    def output(self) -> Locator:
        """The live panel's output of the ranks."""
        return self.panel.get_by_role("log", name="Output")

    # --- what is looked at afterwards ---

    def screenshot(self, detail: str = "") -> None:
        """Keep a picture of the page, under the test's name and `detail`."""
        self._screenshots.mkdir(exist_ok=True)
        name = "-".join(filter(None, [self.test, detail, self.name]))
        self.page.screenshot(path=self._screenshots / f"{name}.png")


def _tidy(code: str) -> str:
    return textwrap.dedent(code).strip("\n")
