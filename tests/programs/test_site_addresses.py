"""The site has a page at each address that an error shows; it leads to the section, without a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import lanes

from nblaunch._help import FailureKind

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CONF = """
import sys
sys.path.insert(0, {notebooks!r})
extensions = ["myst_nb", "_addresses"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
"""


class Page(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, markup):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def build(directory, page):
    """Build a site of one page and the addresses; return its directory, and what Sphinx said if it failed."""
    lanes.needs("sphinx", "myst_nb")
    source, out = directory / "source", directory / "site"
    (source / "docs").mkdir(parents=True)
    (source / "conf.py").write_text(CONF.format(notebooks=str(NOTEBOOKS)))
    (source / "index.md").write_text("# Site\n\n```{toctree}\ndocs/failures\n```\n")
    (source / "docs/failures.md").write_text(page)
    command = [sys.executable, "-m", "sphinx", "-Q", "-b", "dirhtml", str(source), str(out)]
    # Sphinx leaves a log of what it was stopped by in the temporary directory.
    environ = {**os.environ, "TMPDIR": str(directory)}
    built = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    return out, built.stderr if built.returncode else ""


def test_each_address_is_a_page_that_leads_to_its_section(tmp_path):
    out, said = build(tmp_path, (NOTEBOOKS / "docs/failures.md").read_text())
    assert said == ""
    anchors = {values.get("id") for _, values in Page((out / "docs/failures/index.html").read_text()).tags}
    assert {each.name for each in (out / "e").iterdir()} == set(FailureKind)
    for kind in FailureKind:
        at = out / "e" / kind / "index.html"
        page = Page(at.read_text())
        (target,) = (values["href"] for tag, values in page.tags if tag == "a")
        refresh = [values["content"] for tag, values in page.tags if values.get("http-equiv") == "refresh"]
        assert refresh == [f"0; url={target}"]
        place, _, anchor = str(target).partition("#")
        assert (at.parent / place / "index.html").resolve() == (out / "docs/failures/index.html").resolve()
        assert anchor == kind
        assert anchor in anchors
        assert "script" not in {tag for tag, _ in page.tags}


def test_a_site_that_lacks_a_section_is_not_built(tmp_path):
    page = re.sub(r"^\(killed\)=$", "", (NOTEBOOKS / "docs/failures.md").read_text(), flags=re.MULTILINE)
    out, said = build(tmp_path, page)
    assert "no section of the documentation has the name 'killed'" in said
    assert not (out / "e" / "killed").exists()
