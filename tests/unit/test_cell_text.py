"""A cell's text on its way to a rank's Python: IPython's transformers, and notes of what it binds."""

import ast
import atexit
import builtins

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nblaunch import _notebook
from nblaunch.rank.stores import StoreNotes

CELLS = [
    "",
    "x = 1",
    "x = 1\ny = 2",
    "\n\n\nx = 1\ny = 2\n",
    "  x = 1\n  y = 2",
    ">>> a = 1\n>>> b = 2",
    "In [1]: 5\nIn [2]: 6",
    "In [1]: %time x = 1\n   ...: y = 2",
    ">>> %time x = 1\n>>> y = 2",
    ">>> ,f a b\n>>> x = 1",
    "a = %time 1\nb = 2",
    "a =%time 1\nb = 2",
    "a = \\\n  %time 1\nb = 2",
    "a = 3 % 2\nb = a != 1",
    "a = 3 %2\nb = (a\n  % 2)",
    "!ls\nx = 1",
    "x = !ls\ny = 1",
    "f?\n1",
    "?f\n1",
    "if True:\n    %time 3\nx = 1",
    "/f 1\n2",
    ",f 1 2\n2",
    ";f 1\n2",
    "s = '''\n%x\n? \n!'''\n1",
    "# why?\nx = 1",
    "f'{x!r}'\ny = 1",
    "a = 1\r\nb = 2",
    "%%time\nx = 1",
    "print 1\n2",
]


@pytest.fixture(scope="module")
def shell():
    made = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    atexit.unregister(made.atexit_operations)
    return made


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_becomes_what_ipython_makes_of_it(shell, cell):
    assert _notebook.transform_cell(shell, cell, shell.transform_cell) == shell.transform_cell(cell)


def test_plain_python_is_not_tokenized(shell, monkeypatch):
    manager = shell.input_transformer_manager
    monkeypatch.setattr(manager, "do_token_transforms", lambda _: pytest.fail("it was tokenized"))
    assert _notebook.transform_cell(shell, "x = 1\ny = x % 2", shell.transform_cell) == "x = 1\ny = x % 2\n"


def test_transformers_of_the_users_own_see_each_cell(shell, monkeypatch):
    def shout(lines):
        return [line.upper() for line in lines]

    for place in (shell.input_transformers_cleanup, shell.input_transformers_post):
        place.append(shout)
        try:
            assert _notebook.transform_cell(shell, "x = 1\ny = 2", shell.transform_cell) == "X = 1\nY = 2\n"
        finally:
            place.remove(shout)

    class Token:
        @staticmethod
        def find(_tokens):
            pytest.fail("it sees the tokens")

    monkeypatch.setattr(shell.input_transformer_manager, "token_transformers", [Token])
    with pytest.raises(pytest.fail.Exception, match="it sees the tokens"):
        _notebook.transform_cell(shell, "x = 1\ny = 2", shell.transform_cell)


def bound(source, *asked, texts=None):
    """Run a source, and return which of the names that were asked for it has noted."""
    notes = StoreNotes(lambda: asked)
    for text in (source,) if texts is None else texts:
        notes.see(text)
    try:
        exec(compile(notes.add_to(ast.parse(source)), "cell", "exec"), {})  # noqa: S102
        return notes.take()
    finally:
        delattr(builtins, "__bound__")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ready = True", {"ready"}),
        ("other = True", set()),
        ("if False:\n    ready = True", set()),
        ("for ready in ():\n    pass", set()),
        ("for ready in (1,):\n    pass", {"ready"}),
        ("print(ready := 1)", {"ready"}),
        ("[ready := each for each in (1, 2)]", {"ready"}),
        ("def f():\n    ready = 1\nf()", set()),
        ("import os as ready", {"ready"}),
        ("\U0001d42beady = 1", {"ready"}),
    ],
)
def test_what_a_cell_binds_is_noted(source, expected):
    assert bound(source, "ready", "unused") == expected


def test_a_tree_that_is_too_deep_to_visit_runs_all_the_same():
    source = "ready = 1\nif ready > 1:\n    pass\n" + "elif ready > 2:\n    pass\n" * 400
    assert bound(source, "ready") <= {"ready"}


def test_a_tree_is_noted_by_all_texts_that_were_seen():
    # `%%timeit` transforms its set-up after its statement, and parses both.
    assert bound("print(ready := 1)", "ready", texts=("print(ready := 1)", "pass")) == {"ready"}
