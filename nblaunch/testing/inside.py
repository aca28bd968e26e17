"""A test on a rank: its modules with pytest's rewritten asserts, the call, a failure as pytest draws it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOLD = "_nblaunch_told"
"""The attribute of an exception that has what pytest says about it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What pytest's process has that the tests of a module need on ranks."""

    files: Mapping[str, str]
    """The modules that pytest itself has imported, by name, and their files."""
    rewritten: frozenset[str]
    """Those whose asserts it has rewritten."""
    verbosity: int
    traceback: str
    """pytest's `--tb`."""
    show_locals: bool


@dataclass(frozen=True, slots=True)
class Target:
    """A test function."""

    module: str
    path: str
    qualname: tuple[str, ...]
    """The classes that it is in, and its own name."""
    nodeid: str
    state: Mapping[str, Any] | None
    """The attributes that fixtures have given the instance of its class; None for a plain function."""
    made_here: tuple[str, ...] = ()
    """Fixtures that each rank has one of its own of."""


@dataclass(frozen=True, slots=True)
class Told:
    """What pytest says about an exception, in the rank that raised it."""

    drawn: Any
    """As `ExceptionInfo.getrepr` returns it: texts."""
    path: str
    line: int
    """Where the test failed, counted from 1."""


class TestEndedError(Exception):
    """What a test raises that is no `Exception`, or cannot be pickled: `pytest.skip`, `sys.exit`, ..."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        """Return the reason."""
        return self.reason


@dataclass(slots=True)
class _Pytest:
    """pytest on this rank, without plugins, files of options, or a session."""

    surroundings: Surroundings
    config: Any
    rewriting: Any
    imported: dict[str, types.ModuleType] = field(default_factory=dict)


@functools.cache
def _known() -> list[_Pytest]:
    return []


def prepare(surroundings: Surroundings) -> None:
    """Make `import` rewrite asserts in the modules where pytest's own process has rewritten them."""
    if _known():
        return
    config = _bare_config(surroundings.verbosity)
    rewriting = config.pluginmanager.rewrite_hook
    _known()[:] = [_Pytest(surroundings, config, rewriting)]
    sys.meta_path.insert(0, _FinderOfTests(surroundings, rewriting))


def _bare_config(verbosity: int) -> Any:
    """Return a configuration of pytest with its defaults: comparisons are explained with one."""
    from _pytest.config import _prepareconfig

    lacking, before = "PYTEST_DISABLE_PLUGIN_AUTOLOAD", dict(os.environ)
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.pop("PYTEST_PLUGINS", None)
    os.environ[lacking] = "1"
    try:
        verbose = ["-v"] * verbosity + ["-q"] * -verbosity
        bare = ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-s"]
        return _prepareconfig([*bare, "--rootdir", str(Path.cwd()), *verbose])
    finally:
        os.environ.clear()
        os.environ.update(before)


class _FinderOfTests(importlib.abc.MetaPathFinder):
    """Finds the modules that pytest has imported in its own process, by their files."""

    def __init__(self, surroundings: Surroundings, rewriting: Any) -> None:
        self._files, self._rewritten = surroundings.files, surroundings.rewritten
        self._parents = {
            ".".join(parts[:end])
            for parts in (name.split(".") for name in self._files)
            for end in range(1, len(parts))
        }
        self._rewriting = rewriting

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where a module is, None for one that is none of these."""
        file = self._files.get(fullname)
        if file is not None and Path(file).is_file():
            package = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
            loader = self._rewriting if fullname in self._rewritten else None
            return importlib.util.spec_from_file_location(
                fullname, file, loader=loader, submodule_search_locations=package
            )
        if fullname not in self._parents:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        # With `--import-mode=importlib` a test's name may have parents that are nowhere on the path.
        return found or importlib.machinery.ModuleSpec(fullname, None, is_package=True)


def call(target: Target, /, **fixtures: Any) -> None:
    (pytest_here,) = _known()
    os.environ["PYTEST_CURRENT_TEST"] = f"{target.nodeid} (call)"
    try:
        with _made(target.made_here) as made, _explaining(pytest_here.config):
            _function(target)(**fixtures, **made)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        sent = _sendable(error)
        # It goes on without what pytest says where that cannot be made, or the exception takes no attribute.
        with contextlib.suppress(Exception):
            setattr(sent, TOLD, _told(error, target, pytest_here.surroundings))
        if sent is error:
            raise
        raise sent.with_traceback(error.__traceback__) from None


def _sendable(error: BaseException) -> BaseException:
    """Return the exception itself, or what stands for one that is no `Exception`."""
    import unittest

    import pytest

    kinds: dict[str, Any] = {
        "skip": (pytest.skip.Exception, unittest.SkipTest),
        "xfail": pytest.xfail.Exception,
        "fail": pytest.fail.Exception,
        "exit": pytest.exit.Exception,
        "SystemExit": SystemExit,
    }
    for kind, types_ in kinds.items():
        if isinstance(error, types_):
            return TestEndedError(kind, str(error))
    return error


def _function(target: Target) -> Callable[..., object]:
    owner: Any = importlib.import_module(target.module)
    for name in target.qualname[:-1]:
        owner = getattr(owner, name)
    if target.state is not None:
        owner = owner()
        vars(owner).update(target.state)
    function: Callable[..., object] = getattr(owner, target.qualname[-1])
    return function


@contextlib.contextmanager
def _made(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Make the fixtures that a rank has of its own, and undo them."""
    import pytest

    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(pytest.MonkeyPatch.context()) for name in names}


@contextlib.contextmanager
def _explaining(config: Any) -> Iterator[None]:
    """Have rewritten asserts explain comparisons, as pytest does around each test."""
    from _pytest.assertion import pytest_runtest_protocol

    item: Any = types.SimpleNamespace(ihook=config.hook, config=config)
    around: Generator[None, object, object] = pytest_runtest_protocol(item)
    next(around)
    try:
        yield
    finally:
        around.close()


def _told(error: BaseException, target: Target, surroundings: Surroundings) -> Told:
    import pytest

    found = pytest.ExceptionInfo.from_exception(error)
    style = surroundings.traceback
    whole = found.traceback
    # The frames above the test are ours.
    cut = whole.cut(path=target.path)
    place = next((each for each in reversed(cut) if str(each.path) == target.path), cut[-1])

    def kept(info: Any) -> Any:
        frames = cut.filter(info)
        if style == "auto" and len(frames) > 2:  # noqa: PLR2004 - all between the first and the last
            middle = (each.with_repr_style("short") for each in frames[1:-1])
            frames = type(frames)((frames[0], *middle, frames[-1]))
        return frames

    drawn = found.getrepr(
        showlocals=surroundings.show_locals,
        style="long" if style == "auto" else style,  # type: ignore[arg-type] # one of pytest's own
        tbfilter=kept,
        funcargs=False,
    )
    return Told(drawn, str(place.path), place.lineno + 1)
