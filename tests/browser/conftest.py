"""One server, one browser, and one page for each front end."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from lanes import sampled

from .server import Server

if TYPE_CHECKING:  # tests import these, and are skipped where there is no Playwright
    from playwright.sync_api import Locator

    from .front import Front

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCREENSHOTS = HERE / "screenshots"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def pytest_collection_modifyitems(items):
    """Give the tests here more time: the first one of each front end waits for its page, too."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(300))


def missing(what: str) -> NoReturn:
    """Skip, or fail in CI: there nothing may be left out."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing, and CI runs the browser tests", pytrace=False)
    pytest.skip(f"{what} is missing (see notebooks/docs/testing.md)")


@pytest.fixture(scope="package")
def home(tmp_path_factory):
    """Give the directory of the server and of the browser."""
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="package")
def chromium():
    """Start headless Chromium."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        missing("Chromium")
    # Chromium makes a socket below it, whose path must not be longer than 107 characters.
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="c") as scratch:
        browser = playwright.chromium.launch(
            executable_path=path, args=FLAGS, env={**os.environ, "TMPDIR": scratch}
        )
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server(home, chromium, eventually):  # noqa: ARG001 - without a browser there is no need for one
    """Start a Jupyter server that serves both front ends."""
    started = Server(home / "server", {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})
    try:
        eventually(started.is_up, "the Jupyter server answers", 60)
        yield started
    finally:
        started.close()


@pytest.fixture(scope="package", params=sampled(["lab", "notebook7"]))
def page_of_front(request, chromium, server, gates):
    """Open a page of each front end, with a notebook and its kernel."""
    context = chromium.new_context(viewport={"width": 1200, "height": 1000})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    from .front import Front

    front = Front(request.param, context.new_page(), server, SCREENSHOTS)
    front.open_new(f"{request.param}.ipynb")
    assert front.run("%load_ext nblaunch", gates.waiting).inner_text() == ""
    yield front
    server.end_kernels()
    context.close()


@pytest.fixture
def front(page_of_front, request) -> Iterator[Front]:
    """Give a notebook in a front end; a picture of the page is kept when the test ends."""
    page_of_front.test = re.sub(r"[\W_]+", "-", request.node.originalname.removeprefix("test_"))
    page_of_front.problems.clear()
    yield page_of_front
    page_of_front.screenshot()
    if page_of_front.is_running():  # of a test that failed
        page_of_front.interrupt()
        page_of_front.finished()
    page_of_front.theme()
    page_of_front.size()
    assert page_of_front.problems == []


class Listener:
    """Where the ranks of a test wait until it lets them go on."""

    def __init__(self, folder: Path) -> None:
        """All gates are shut."""
        self._folder = folder
        self._names: set[str] = set()

    def wait(self, name: str = "end") -> str:
        """Return the line of a cell that waits at a gate."""
        self._names.add(name)
        return f"wait_for({name!r})"

    def open(self, name: str = "end") -> None:
        """Let the ranks go on."""
        (self._folder / name).touch()

    def open_all(self) -> None:
        """Let everybody go on, also those of a test that has failed."""
        for name in self._names:
            self.open(name)

    def shut_all(self) -> None:
        """Let nobody pass any more: the next test has gates of the same names."""
        for each in self._folder.iterdir():
            each.unlink()

    @property
    def waiting(self) -> str:
        """The function of the notebook that `wait` calls; it travels to the ranks with their cells."""
        return f"""
import time
from pathlib import Path

def wait_for(gate):
    while not Path({str(self._folder)!r}, gate).exists():
        time.sleep(0.01)
"""


@pytest.fixture(scope="package")
def gates(home):
    """Give the gates of all tests."""
    folder = home / "gates"
    folder.mkdir()
    return Listener(folder)


@pytest.fixture
def gate(front, gates):
    """Give the gates, shut; at the test's end nobody waits at one any more."""
    yield gates
    if front.is_running():
        front.screenshot("live")
    gates.open_all()
    front.finished()
    gates.shut_all()


@pytest.fixture(scope="package")
def axe_source():
    """Read axe-core's script, from where `AXE_CORE` says or from where npm installs it here."""
    path = Path(os.environ.get("AXE_CORE", HERE / "node_modules" / "axe-core" / "axe.min.js"))
    if not path.exists():
        missing("axe-core")
    return path.read_text(encoding="utf-8")


@pytest.fixture
def axe(front, axe_source):
    """Give `axe(locator)`: what is seriously wrong in that part of the page, one line for each element.

    `least` is how many elements have had their colours looked at: none that is scrolled out of sight.
    """
    front.page.evaluate(axe_source)

    def check(part: Locator, least: int = 10) -> list[str]:
        # The body of a page of JupyterLab has no height: axe takes it that nothing in it is to be seen.
        part.evaluate("() => { document.body.style.overflow = 'visible'; }")
        deadline = time.monotonic() + 60
        while True:
            part.scroll_into_view_if_needed()  # JupyterLab has scrolled since, to a cell that has grown
            found = part.evaluate("(element) => axe.run(element)")
            looked_at = {each["id"]: len(each["nodes"]) for each in found["passes"] + found["violations"]}
            if looked_at.get("color-contrast", 0) >= least or time.monotonic() > deadline:
                break
        assert looked_at.get("color-contrast", 0) >= least, f"most of it was not looked at: {looked_at}"
        return [
            f"{each['id']} ({each['impact']}): {node['html']}: {node['failureSummary']}"
            for each in found["violations"]
            if each["impact"] in {"serious", "critical"}
            for node in each["nodes"]
        ]

    return check


LOOKS = ("wide-light", "wide-dark", "narrow-light", "zoomed-dark")
CUT_OFF = """(part) => {
  const edge = part.getBoundingClientRect().right + 1;
  const scrolls = (element) => element !== part
    && (["auto", "scroll"].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  const isWide = (each) => each.getBoundingClientRect().right > edge
    || (each.matches("button") && each.scrollWidth > each.clientWidth + 1);
  return [...part.querySelectorAll(":not(svg *)")]
    .filter((each) => isWide(each) && !scrolls(each))
    .map((each) => each.outerHTML.slice(0, 120));
}"""


@pytest.fixture
def looks_well(front, axe):
    """Give `check(part, name)`: pictures of a part of the page, in which axe finds nothing serious.

    Of a `live` part nothing is cut off. A result may be wider than the page, which then scrolls.
    """

    def check(part: Locator, name: str, *, live: bool = False) -> None:
        from .front import DARK, LIGHT

        for look in LOOKS:
            size, shade = look.split("-")
            front.theme({"light": LIGHT, "dark": DARK}[shade])
            front.size(size)
            part.scroll_into_view_if_needed()
            front.screenshot(f"{name}-{look}")
            assert axe(part, 10 if size == "wide" else 3) == [], look
            assert not live or part.evaluate(CUT_OFF) == [], look
        front.size()
        front.theme()

    return check


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """Browsers start and end processes as they like: whether all are gone is looked at after all tests."""
