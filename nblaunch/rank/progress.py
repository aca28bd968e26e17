"""Progress bars in ranks are text: a widget's comm would lead nowhere.

`tqdm.auto` gives a text bar here by itself, unless something has imported ipykernel's shell; `tqdm.notebook`
never does. A rank's output is drawn as a terminal draws it, so a text bar is one live line there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

_NOTEBOOK = "tqdm.notebook"


class _TextBars(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a `tqdm.notebook` whose bars are text."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the import system's signature
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to load `tqdm.notebook`; leave every other module to others."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == _NOTEBOOK else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill in the names of the real one that programs, and tqdm itself, import."""
        std: Any = importlib.import_module("tqdm.std")

        class TextBar(std.tqdm):  # type: ignore[misc]
            """A bar of `tqdm.notebook`, as text."""

            def __init__(self, *args: Any, display: bool = True, **keywords: Any) -> None:  # noqa: ARG002
                super().__init__(*args, **keywords)

        def trange(*args: Any, **keywords: Any) -> Any:
            return TextBar(range(*args), **keywords)

        TextBar.__module__, TextBar.__qualname__ = _NOTEBOOK, "tqdm_notebook"
        TextBar.__name__ = "tqdm_notebook"
        # `tqdm.autonotebook` asks for the last two; what they are here keeps it from warning.
        vars(module).update(
            tqdm=TextBar, tqdm_notebook=TextBar, trange=trange, tnrange=trange, IProgress=True, WARN_NOIPYW=""
        )


def install() -> None:
    """From now on `tqdm.notebook` gives text bars in this process and those that it forks."""
    if not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())
