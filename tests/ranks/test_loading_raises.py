"""An object that raises what is no `Exception` while it is loaded ends its run, and nothing else."""

from __future__ import annotations

import pytest

HOME = """
import os

class Homesick:
    '''Raises where it is loaded in another process than the one that made it.'''

    def __init__(self, kind):
        self.kind, self.home = kind, os.getpid()

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.getpid() != self.home:
            raise self.kind("no further")

class HomesickError(Exception):
    def __init__(self, kind, home=None):
        super().__init__("of its own")
        self.kind, self.home = kind, home or os.getpid()

    def __reduce__(self):
        return arrived, (self.kind, self.home)

def arrived(kind, home):
    if os.getpid() != home:
        raise kind("no further")
    return HomesickError(kind, home)

class NowhereError(Exception):
    def __reduce__(self):
        return refused, (KIND,)

def refused(kind):
    raise kind("nowhere")
"""
KINDS = pytest.mark.parametrize(
    "kind",
    [
        "KeyboardInterrupt",
        pytest.param("GeneratorExit", marks=pytest.mark.full),
        pytest.param("SystemExit", marks=pytest.mark.full),
        pytest.param("BaseException", marks=pytest.mark.full),
    ],
)
WORDS = "it raised {}('no further') while it was loaded (in {})"


@pytest.fixture(scope="module", params=["session", pytest.param("fresh", marks=pytest.mark.full)])
def ranks(request, module_kernel):
    """Give the kernel, whose cells run in a session or on fresh ranks."""
    if request.param == "session":
        module_kernel.ok("%distributed start -n 2")
    yield module_kernel
    if request.param == "session":
        module_kernel.ok("%distributed stop")


@pytest.fixture
def kernel(ranks, kind):
    """Give the kernel, and in a session a variable of each rank's, which every test must leave alone."""
    ranks.ok(f"{HOME}\nKIND, held = {kind}, [1]")
    ranks.ok("%%distributed -n 2\nown = rank + 10; held.append(rank)")
    yield ranks
    ranks.ok("%%distributed -n 2 --out res\nglobals().get('own', rank + 10), held[1:] in ([], [rank])")
    assert ranks.value("res.values") == [[10, True], [11, True]]
    ranks.forget()


@KINDS
def test_a_variable_that_a_rank_cannot_load_fails_the_cell(kernel, kind):
    kernel.ok(f"bad, good = Homesick({kind}), [2]")
    error = kernel.fails("%%distributed -n 2 --out res\nbad, good")
    assert error.ename == "RunFailedError"
    assert WORDS.format(kind, "__setstate__") in error.evalue
    assert kernel.value("res.root_cause.type") == "_pickle.UnpicklingError"
    kernel.ok("%%distributed -n 2 --out res\ngood")
    assert kernel.value("res.values") == [[2], [2]]


@KINDS
def test_a_value_that_the_notebook_cannot_load_fails_its_rank(kernel, kind):
    error = kernel.fails("%%distributed -n 2 --out res\nHomesick(KIND) if rank else 'well'")
    assert error.ename == "RunFailedError"
    assert "rank 1 returned a value that the notebook cannot unpickle" in error.evalue
    assert WORDS.format(kind, "__setstate__") in error.evalue
    assert kernel.value("[res[0], str(res.ranks[1].state)]") == ["well", "FAILED"]


@KINDS
@pytest.mark.parametrize("error", ["HomesickError(KIND)", "NowhereError('of its own')"])
def test_an_exception_that_cannot_be_loaded_fails_its_rank_with_its_text(kernel, kind, error):  # noqa: ARG001
    failed = kernel.fails(f"%%distributed -n 2 --out res\nif rank:\n    raise {error}")
    assert failed.ename == "RunFailedError"
    name = error.partition("(")[0]
    assert failed.evalue.startswith(f"rank 1 of 2 failed: {name}: of its own")
    assert kernel.value("res.root_cause.exception") is None


@KINDS
@pytest.mark.parametrize("ranks", ["session"], indirect=True)
def test_what_is_pushed_or_pulled_and_cannot_be_loaded_changes_nothing(kernel, kind):
    kernel.ok(f"bad = Homesick({kind})\nown = 'the notebook\\'s'")
    assert kernel.fails("%distributed push bad own").ename == "RunFailedError"
    kernel.ok("%%distributed\nof_ranks = Homesick(KIND); None")
    assert kernel.fails("%distributed pull of_ranks").ename == "RunFailedError"
    kernel.ok("%distributed pull own")
    assert kernel.value("own") == [10, 11]
