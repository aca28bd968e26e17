"""pytest's entry point: `@pytest.mark.distributed(nproc=2)` runs a test on ranks.

    @pytest.mark.distributed(nproc=2)
    def test_all_ranks_count():
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2

It costs a pytest without such tests nothing: what it needs is loaded for the first one.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nblaunch.testing.asked import DistributedMark
    from nblaunch.testing.outcomes import Conclusion

_ASKED: pytest.StashKey[DistributedMark] = pytest.StashKey()
_CONCLUSION: pytest.StashKey[Conclusion] = pytest.StashKey()
_TOOK = r" · (?:\d+ (?:min|h) )?[\d.]+ (?:s|min)(?=</div>)"
_NO_DEBUGGER = (
    "--pdb cannot enter a rank, so no debugger was started. Call the function in pytest's own process, or in "
    "a cell of a notebook under %%distributed, where breakpoint() works."
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "distributed(nproc='auto', *, timeout=300, **options): run the test on ranks of a session that the "
        "module's tests share; options are those of nblaunch.Session",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Have nbval compare outputs of cells without how long they took, which a saved notebook may have."""
    patterns = getattr(item.parent, "sanitize_patterns", None)  # of nbval's notebooks
    if patterns is not None:
        patterns[_TOOK] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("distributed")
    if mark is None:
        return
    from nblaunch._errors import OptionError
    from nblaunch.testing.asked import asked_by

    wrong = ""
    try:
        item.stash[_ASKED] = asked_by(item, mark)
    except OptionError as error:
        wrong = str(error)
    if wrong:
        pytest.fail(wrong, pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    asked = pyfuncitem.stash.get(_ASKED, None)
    if asked is None:
        return None
    from nblaunch.testing.module_sessions import run_test

    conclusion = run_test(pyfuncitem, asked)
    if conclusion is not None:
        pyfuncitem.stash[_CONCLUSION] = conclusion
        raise conclusion.error
    return True


# The outermost one: what others make of the exception (xfail, strict or not) is there already.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ranks' failure in place of a traceback of ours."""
    report = yield
    conclusion = item.stash.get(_CONCLUSION, None)
    if conclusion is None or call.when != "call" or call.excinfo is None:
        return report
    if call.excinfo.value is conclusion.error and not hasattr(report, "wasxfail"):
        report.longrepr = conclusion.longrepr
        if report.failed and item.config.getoption("usepdb", default=False):
            report.sections.append(("pdb", _NO_DEBUGGER))
            # Without an exception pytest starts no debugger: it would show frames of ours.
            call.excinfo = None
    del item.stash[_CONCLUSION]
    return report
