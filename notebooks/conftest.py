"""How notebooks are run as tests: the kernel shows static HTML, and no GPU changes what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

KERNEL_ENVIRONMENT = {
    "NBLAUNCH_DISPLAY": "html",  # one display per run, the one that a saved notebook holds
    "CUDA_VISIBLE_DEVICES": "",  # `device` is printed: the same everywhere
}


def pytest_collect_file(parent: pytest.Collector) -> None:
    """Have nbval compare pictures by their place alone, from whatever directory pytest is started."""
    parent.config.option.nbval_sanitize_with = str(Path(__file__).with_name("nbval.cfg"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Set the variables while a notebook's first cell is set up, which is when its kernel starts.

    Not at import: that would reach the tests of other folders too.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in KERNEL_ENVIRONMENT.items():
            environment.setenv(name, value)
        yield
