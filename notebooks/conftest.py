"""How notebooks are run as tests: neither a GPU nor a session of the user's changes what is shown."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
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

CLUSTERS = ("clusters.ipynb",)
"""Notebooks that run beside a Slurm of two hosts."""

_sessions = pytest.StashKey[str]()
"""Where sessions are listed."""
_cluster = pytest.StashKey[tuple[contextlib.ExitStack, dict[str, str]]]()
"""What ends the cluster, and the variables by which it is found; for one of `CLUSTERS`, while it runs."""


def pytest_configure(config: pytest.Config) -> None:
    """Have detached sessions listed apart from those that the user has."""
    config.stash[_sessions] = tempfile.mkdtemp(prefix="nbt-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the list, and the cluster."""
    _end_cluster(config)
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
            item.add_marker(pytest.mark.skip(f"{', '.join(missing)} missing (see notebooks/docs/testing.md)"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Set the variables while a notebook's first cell is set up, which is when its kernel starts.

    Not at import: that would reach the tests of other folders too.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in KERNEL_ENVIRONMENT.items():
            environment.setenv(name, value)
        environment.setenv("XDG_STATE_HOME", item.config.stash[_sessions])
        if item.path.name in CLUSTERS:
            for name, value in _slurm(item.config).items():
                environment.setenv(name, value)
        yield


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster behind the last cell of a notebook that uses it."""
    if item.path.name in CLUSTERS and (nextitem is None or nextitem.path != item.path):
        _end_cluster(item.config)


def _end_cluster(config: pytest.Config) -> None:
    if _cluster in config.stash:
        config.stash[_cluster][0].close()
        del config.stash[_cluster]


def _slurm(config: pytest.Config) -> dict[str, str]:
    """Return how Slurm's programs find the cluster, which the first call starts; skip where it cannot be."""
    if _cluster not in config.stash:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        import cluster
        import hosts

        with contextlib.ExitStack() as stack:
            made = stack.enter_context(hosts.hosts(2))
            inside = [
                cluster.Host(
                    each.name, each.address, ("nsenter", f"--net={hosts.NAMESPACES / each.namespace}")
                )
                for each in made
            ]
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nbt-")), "slurm")
            running = stack.enter_context(cluster.slurm(directory, inside, controller=made.address))
            config.stash[_cluster] = stack.pop_all(), running.environ
    return config.stash[_cluster][1]
