"""The documentation as a site: `sphinx-build -n -W --keep-going -b dirhtml notebooks build/site`.

Sphinx, because MyST-NB takes the notebooks as they are saved, with the outputs that the tests compare, and
because autodoc takes the API from the docstrings. PyTorch and Jupyter document themselves with it, too. It is
built offline, writes nothing into the sources, and its pages load nothing from another host.
"""

from __future__ import annotations

import html
import re
import sys
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.util.osutil import relative_uri

import nblaunch
from nblaunch.options.command_line import options_on_a_screen

if TYPE_CHECKING:
    from docutils.parsers.rst.states import Inliner
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.writers.html5 import HTML5Translator

project = "nblaunch"
author = "the nblaunch authors"
copyright = author  # noqa: A001 - Sphinx's name for it
release = version = nblaunch.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["conftest.py", "**/.ipynb_checkpoints"]

# --- pages ---
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests run the notebooks, and compare what is saved in them
nb_ipywidgets_js: dict[
    str, dict[str, str]
] = {}  # what is saved needs no widgets: else pages load them from a CDN
nb_merge_streams = True
nb_render_image_options = {"alt": "The figure that the cell above has drawn"}
# `%%distributed` is the first line of Python cells, and of examples in the pages.
highlight_language = "ipython3"

# --- the addresses that errors show: a page for each ---
sys.path.insert(0, str(Path(__file__).parent))
extensions += ["_addresses"]

# --- the API ---
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 100
add_module_names = False
default_role = "name"  # docstrings are written in Markdown: `name` is code

# --- as HTML ---
html_theme = "furo"
html_title = "nblaunch"
html_static_path = ["docs/site.css", "docs/site.js"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_math_renderer = "mathml"  # drawn by the browser itself: MathJax would come from another host
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-code-background": "#f4f5f7", "mystnb-source-bg-color": "#f4f5f7"}
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

# --- links to other hosts, which the linkcheck builder follows ---
linkcheck_ignore = [r"https://nblaunch\.github\.io/"]  # this site: tests/programs/test_site_addresses.py

_CONSTRUCTED = ("nblaunch.Session",)
"""Classes that callers make themselves; others are made for them, and their fields are listed below."""
_TYPE_VARIABLES = ("Saving",)
_FAILURES = "docs/failures"
_PARAMETERS = re.compile(r"<dl>\s*((?:<dd>(?:(?!<d[dlt]>).)*</dd>\s*)+)</dl>", re.DOTALL)
_PARAMETER, _LINE = re.compile(r"<dd>(.*?)</dd>\s*", re.DOTALL), r"<span>\1</span>"
"""Sphinx writes the parameters of a long signature as a list of definitions without terms."""
_FORMULA = re.compile(r"(?<=<div>)\$(?:\\displaystyle )?([^$<]+)\$(?=</div>)")
"""A display that is a formula, as `view.html` writes it."""


def name_role(
    _name: str,
    rawtext: str,
    text: str,
    _lineno: int,
    _inliner: Inliner,
    _options: dict[str, Any] | None = None,
    _content: list[str] | None = None,
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Make what stands in single backticks in a docstring code, and a link where it is a public name."""
    code = nodes.literal(rawtext, text)
    target = text.removeprefix("nblaunch.").removesuffix("()")
    public = target.partition(".")[0] in nblaunch.__all__
    if not public or (target == text and target[0].islower()):  # `step` alone may be a parameter
        return [code], []
    link = addnodes.pending_xref(
        rawtext, code, refdomain="py", reftype="obj", reftarget=f"nblaunch.{target}", refexplicit=False
    )
    return [link], []


class Picture(Directive):
    """A drawing in a file beside the page, put into the page: its `currentColor` follows the theme."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the file's text as HTML."""
        environment = self.state.document.settings.env
        relative, path = environment.relfn2path(self.arguments[0])
        environment.note_dependency(relative)
        text = f'<div class="drawing">{Path(path).read_text(encoding="utf-8")}</div>'
        return [nodes.raw("", text, format="html")]


class MagicHelp(Directive):
    """What `%%distributed?` shows."""

    def run(self) -> list[nodes.Node]:
        """Return the text as it is."""
        text = str(options_on_a_screen("%%distributed"))
        return [nodes.literal_block(text, text, language="text")]


def short_signature(
    _app: Sphinx, what: str, name: str, _object: object, _options: object, signature: str | None, returns: str
) -> tuple[str | None, str | None]:
    """Leave the constructor out of the signature of a class that callers do not make."""
    if signature and what in ("class", "exception") and name not in _CONSTRUCTED:
        return "", None
    return signature, returns


def without_options(
    _app: Sphinx, _what: str, name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Leave the list of options out of `LaunchOptions`, which is for `help()`: the options have a page."""
    if name == "nblaunch.LaunchOptions":
        lines[:] = cleandoc("\n".join(lines[: lines.index("Every day:")])).splitlines()


def resolved(
    _app: Sphinx, environment: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Node
) -> nodes.Node | None:
    """Link a type of ours by its public name; one of another library's is code without a link."""
    target: str = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not node.get("refexplicit", True):
        return content if node.get("refdomain") == "py" else None
    public = target.rpartition(".")[2]
    if public == "FailureKind":  # an enumeration of strings: the page has them all
        here, there = map(_app.builder.get_target_uri, (node["refdoc"], _FAILURES))
        return nodes.reference("", "", content, refuri=relative_uri(here, there), internal=True)
    if public in _TYPE_VARIABLES or not (target.startswith("nblaunch") or public in nblaunch.__all__):
        return content
    return environment.domains["py"].resolve_xref(
        environment, node["refdoc"], _app.builder, "obj", f"nblaunch.{public}", node, content
    )


def math(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def formulas(_app: Sphinx, doctree: nodes.document, _name: str) -> None:
    """Typeset the formulas in saved HTML, which a notebook's front end does."""
    for raw in doctree.findall(nodes.raw):
        text = _FORMULA.sub(lambda found: tex2mathml(html.unescape(found[1])), raw.astext())
        if text != raw.astext():
            raw.children = [nodes.Text(text)]


def accessible(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Repair what screen readers stumble over: headings without a level, lists without terms."""
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            text = context[part].replace('role="heading">', 'role="heading" aria-level="2">')
            context[part] = _PARAMETERS.sub(
                lambda found: f'<span class="sig-lines">{_PARAMETER.sub(_LINE, found[1])}</span>', text
            )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register what is above."""
    app.add_role("name", name_role)
    app.add_html_math_renderer("mathml", (math, None), (math, None))
    app.add_directive("magic-help", MagicHelp)
    app.add_directive("picture", Picture)
    app.connect("autodoc-process-signature", short_signature)
    app.connect("autodoc-process-docstring", without_options)
    app.connect("missing-reference", resolved)
    app.connect("doctree-resolved", formulas)
    app.connect("html-page-context", accessible, priority=900)  # after the theme's own
    return {"parallel_read_safe": True, "parallel_write_safe": True}
