"""How notebooks are run as tests: no GPU changes what is shown."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNEL_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # `device` is printed: the same everywhere
}

LIBRARIES = {"integrations.ipynb": ("accelerate", "lightning")}
"""What a notebook needs that not everybody has who runs the tests."""


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
def pytest_runtest_setup() -> Iterator[None]:
    """Set the variables while a notebook's first cell is set up, which is when its kernel starts.

    Not at import: that would reach the tests of other folders too.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in KERNEL_ENVIRONMENT.items():
            environment.setenv(name, value)
        yield
