"""axe-core finds nothing serious in pages of the site: light and dark, wide and narrow. Pictures are kept."""

from __future__ import annotations

import pytest
from documentation import SECONDS, build

from .conftest import SCREENSHOTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 120)]

PAGES = ("index", "docs/options/index", "docs/coming-from/index", "docs/how-it-works/index", "insight/index")
WIDE = 1000
LARGE = "docs/api/index"
"""Takes as long as all others together: each scheme once, each width once."""
CHECK = """async () => {
  const found = await axe.run(document, {preload: false, resultTypes: ["violations"]});
  const serious = found.violations.filter((each) => ["serious", "critical"].includes(each.impact));
  return {
    serious: serious.flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.html.slice(0, 200)}`)),
    rules: found.passes.map((each) => each.id),
  };
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory, chromium):  # noqa: ARG001 - without a browser there is no need for one
    return build(tmp_path_factory.mktemp("pages") / "site")


@pytest.mark.parametrize("width", [WIDE, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_is_wrong_with_a_page_and_it_fits_the_window(
    site, chromium, axe_source, scheme, width
):
    problems, wrong = [], {}
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on(
        "request", lambda request: problems.append(request.url) if "file:" not in request.url[:5] else None
    )
    for name in (*PAGES, LARGE) if (scheme == "light") == (width == WIDE) else PAGES:
        page.goto((site / f"{name}.html").as_uri())
        page.evaluate(axe_source)
        found = page.evaluate(CHECK)
        assert {"color-contrast", "document-title"} <= set(found["rules"]), "most of it was not looked at"
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (
            f"{name} is wider than the window"
        )
        if found["serious"]:
            wrong[name] = found["serious"]
        SCREENSHOTS.mkdir(exist_ok=True)
        words = name.removesuffix("/index").replace("/", "-")
        page.screenshot(path=SCREENSHOTS / f"site-{words}-{width}-{scheme}.png")
    context.close()
    assert (wrong, problems) == ({}, [])
