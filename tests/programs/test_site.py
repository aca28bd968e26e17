"""The site: it is built without a warning, every link leads to a place, nothing comes from another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from documentation import SECONDS, build, command

ROOT = Path(__file__).parents[2]
HOSTS = {
    *(
        "colab.research.google.com",
        "docs.astral.sh",
        "docs.pytorch.org",
        "docs.ray.io",
        "download.pytorch.org",
    ),
    *("github.com", "huggingface.co", "jupyter.org", "jupyter-server.readthedocs.io", "keepachangelog.com"),
    "nblaunch.github.io",
    *("kaggle.com", "mybinder.org", "pypi.org", "pytorch.org", "semver.org", "slurm.schedmd.com"),
    *("ui.perfetto.dev", "www.kaggle.com", "www.sphinx-doc.org"),
}
"""Hosts that pages link to. Whether they answer is a slow lane, as it needs the network."""
pytestmark = pytest.mark.timeout(SECONDS + 20)
LOADS = {"audio", "embed", "iframe", "img", "input", "link", "object", "script", "source", "track", "video"}
"""Elements by which a page has something else loaded."""


class Page(HTMLParser):
    """What a page links to, what it loads, and the pictures in its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places = {""}
        self.unnamed: list[str] = []
        self.open_svg: str | None = None
        self.in_text = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        target = given.get("href") or given.get("src") or given.get("data")
        if (
            target is not None
            and tag in LOADS
            and given.get("rel") not in {"next", "prev", "index", "search"}
        ):
            self.loaded.append(target)
        elif target is not None:
            self.links.append(target)
        self.loaded += re.findall(r"url\(([^)]+)\)", given.get("style") or "")
        if tag == "article":
            self.in_text = True
        if tag == "img" and not given.get("alt"):
            self.unnamed.append(self.get_starttag_text() or "")
        if tag == "svg" and self.in_text and given.get("aria-hidden") != "true":
            named = given.get("aria-label") or given.get("aria-labelledby")
            self.open_svg = None if named else self.get_starttag_text()
        if tag == "title":
            self.open_svg = None

    def handle_endtag(self, tag):
        if tag == "svg" and self.open_svg is not None:
            self.unnamed.append(self.open_svg)
            self.open_svg = None
        if tag == "article":
            self.in_text = False


def sources() -> dict[Path, int]:
    files = (ROOT / "notebooks").rglob("*")
    return {each: each.stat().st_mtime_ns for each in files if "__pycache__" not in each.parts}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    before = sources()
    directory = tmp_path_factory.mktemp("site") / "site"
    build(directory)
    assert sources() == before, "a build writes nothing into the sources"
    return directory


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def leads_to(page: Page, target: str) -> tuple[Path, str]:
    parts = urlsplit(target)
    path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    return (path / "index.html" if path.is_dir() else path), unquote(parts.fragment)


def of_this_site(targets: list[str]) -> Iterator[str]:
    return (target for target in targets if not urlsplit(target).scheme and not target.startswith("//"))


def test_it_is_built_as_contributing_says_without_a_warning(site):
    assert {"-n", "-W", "--keep-going"} <= set(command())
    for name in ("index.html", "docs/api/index.html", "docs/coming-from/index.html", "quickstart/index.html"):
        assert (site / name).is_file()


def test_every_page_and_notebook_is_in_the_site(site, pages):
    for source in [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "notebooks" / "docs").glob("*.md")]:
        page = source.relative_to(ROOT / "notebooks").with_suffix("") / "index.html"
        assert site / page in pages, source.name


def test_every_link_within_the_site_leads_to_a_place_that_is_there(pages):
    broken = []
    for page in pages.values():
        for target in of_this_site(page.links):
            path, place = leads_to(page, target)
            if not path.is_file() or (path in pages and place not in pages[path].places):
                broken.append(f"{page.path.parent.name}: {target}")
    assert sum(len(page.links) for page in pages.values()) > 500
    assert broken == []


def test_nothing_is_loaded_from_another_host(site, pages):
    loaded = [target for page in pages.values() for target in page.loaded]
    assert [
        each for each in loaded if urlsplit(each).netloc or urlsplit(each).scheme not in {"", "data"}
    ] == []
    missing = [
        target
        for page in pages.values()
        for target in of_this_site(page.loaded)
        if not leads_to(page, target)[0].is_file()
    ]
    assert missing == []
    styles = "".join(each.read_text() for each in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)]+", styles) == []


def test_every_picture_has_words_for_those_who_do_not_see_it(pages):
    assert {path.parent.name: page.unnamed for path, page in pages.items() if page.unnamed} == {}


def test_links_to_other_hosts_are_https_and_to_hosts_that_are_known(pages):
    others = {target for page in pages.values() for target in page.links if urlsplit(target).scheme}
    assert others
    assert sorted(each for each in others if urlsplit(each).scheme not in {"https", "mailto"}) == []
    hosts = {urlsplit(each).hostname for each in others if urlsplit(each).scheme == "https"}
    assert sorted(str(host) for host in hosts - HOSTS) == [], "a new host goes into HOSTS, if it is meant"


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *sorted(str(each.relative_to(ROOT)) for each in (ROOT / ".github").rglob("*.md")),
    ],
)
def test_every_link_of_a_file_that_is_read_in_the_repository_leads_to_a_file(name):
    file = ROOT / name
    text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)(?: [^)]*)?\)", re.sub(r"`[^`\n]*`", "", text))
    targets += re.findall(r'(?:src|href|srcset)="([^"\s]+)', text)
    relative = [target for target in targets if not urlsplit(target).scheme and not target.startswith("#")]
    assert [each for each in relative if not (file.parent / urlsplit(each).path).exists()] == []
    assert [each for each in targets if urlsplit(each).scheme not in {"", "https", "mailto"}] == []
