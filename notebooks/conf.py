"""The documentation as a site: `sphinx-build -n -W --keep-going -b dirhtml notebooks build/site`.

Sphinx with MyST: the notebooks are pages as they are saved, and the API comes from the docstrings. The pages
are in `docs`. All of it is built offline.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nblaunch

project = "nblaunch"
author = "the nblaunch authors"
copyright = author  # noqa: A001 - Sphinx's name for it
release = version = nblaunch.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["conftest.py", "**/.ipynb_checkpoints"]

# --- pages ---
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests run the notebooks, and compare what is saved in them
nb_remove_code_outputs = False
suppress_warnings: list[str] = []

# --- the addresses that errors show: a page for each ---
sys.path.insert(0, str(Path(__file__).parent))
extensions += ["_addresses"]

# --- the API ---
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
add_module_names = False
default_role = "code"  # docstrings are written in Markdown: `name` is code

# --- as HTML ---
html_theme = "furo"
html_title = "nblaunch"
html_copy_source = False
html_show_sphinx = False
