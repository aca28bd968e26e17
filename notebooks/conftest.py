"""How notebooks are run as tests: neither a GPU nor a session of the user's changes what is shown."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNEL_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # `device` is printed: the same everywhere
    "XDG_RUNTIME_DIR": "",
}

LIBRARIES = {"integrations.ipynb": ("accelerate", "lightning")}
"""What a notebook needs that not everybody has who runs the tests."""


_sessions = pytest.StashKey[str]()
"""Where sessions are listed."""


def pytest_configure(config: pytest.Config) -> None:
    """Have detached sessions listed apart from those that the user has."""
    config.stash[_sessions] = tempfile.mkdtemp(prefix="nbt-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the list."""
    shutil.rmtree(config.stash[_sessions], ignore_errors=True)


def pytest_collect_file(parent: pytest.Collector) -> None:
    """Have nbval compare pictures by their place alone, from whatever directory pytest is started."""
    parent.config.option.nbval_sanitize_with = str(Path(__file__).with_name("nbval.cfg"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip a notebook whose libraries are missing; in CI, where nothing may be, it fails."""
    if os.environ.get("CI"):
        return
    for item in items:
        needed = LIBRARIES.get(item.path.name, ())
        missing = [each for each in needed if importlib.util.find_spec(each) is None]
        if missing:
            item.add_marker(pytest.mark.skip(f"{', '.join(missing)} missing (see CONTRIBUTING.md)"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Set the variables while a notebook's first cell is set up, which is when its kernel starts.

    Not at import: that would reach the tests of other folders too.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in KERNEL_ENVIRONMENT.items():
            environment.setenv(name, value)
        environment.setenv("XDG_STATE_HOME", item.config.stash[_sessions])
        yield
