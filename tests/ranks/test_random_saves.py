"""Random notebooks whose session is saved, goes on, and is loaded: what follows is the same both times."""

from __future__ import annotations

import shutil
import textwrap
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import full, slow
from test_random_notebooks import IMPORTS, MADE, NAMES, OF, Notebook, prepare, random_examples, steps

name = st.sampled_from(NAMES)
number = st.integers(0, 9)
MUTATE = f"""
import sys; sys.path.append({str(Path(__file__).parent)!r})
import test_random_notebooks as _steps
_found = globals().get({{name!r}})
exec(_steps.change_of({{name!r}}, _found, {{number}}) or 'None')
del _found, _steps, sys
"""
CALL = "gc.collect()\nlooked.called({name}) if callable(globals().get({name!r})) else None"
STEP = """
if isinstance(globals().get({name!r}), torch.optim.Optimizer):
    for _p in {name}.param_groups[0]['params']: _p.grad = torch.ones_like(_p)
    {name}.step()
"""
there = st.one_of(
    st.tuples(st.just(MUTATE), name, number),
    st.tuples(st.just(CALL), name, number),
    st.tuples(st.just(STEP), name, number),
    st.tuples(st.just("{name} = [{number}]"), name, number),
    st.tuples(st.just("if rank: {name} = [{number}]"), name, number),
    *(
        st.tuples(st.just(textwrap.dedent(each).strip("\n")), name, number)
        for each in (
            MADE["class of kinds"],
            MADE["counter"],
            MADE["network"],
            OF["view"][1],
            OF["in a list"][1],
        )
    ),
)
LOOK = "looked.at(*(globals()[_n] for _n in {names!r} if _n in globals()))"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [full(4), slow(1000)])
def test_a_random_notebook_goes_on_from_a_save_as_it_would_have(start_kernel, count, tmp_path, place):
    kernel = start_kernel()
    prepare(kernel, place.line())

    @random_examples(count)
    @given(st.lists(steps, min_size=1, max_size=12), st.lists(there, min_size=1, max_size=8))
    def random_notebooks(before, after):
        book = Notebook(kernel)
        book.follow(before)
        book.flush()
        names = list(book.names.values())
        having = [each for each in names if book.is_there(each)]
        if having:
            book.ask(f"%%distributed\n({', '.join(having)},);")
        save = tmp_path / uuid.uuid4().hex
        report = book.ask(f"report = %distributed save {save}", "report")
        assert "not saved" not in report
        sources = [
            template.format(name=book.named(one), x=book.named(one), o=book.named("a"), n=size, number=size)
            for template, one, size in after
        ]
        first = [went(book, each, names) for each in ["None", *sources]]
        book.ask("%distributed stop")
        loaded = book.ask(f"said = %distributed start {place.line()} --from {save}", "said")
        assert "could not be loaded" not in loaded
        book.ask(f"%%distributed\n{IMPORTS}\ngc.collect(); gc.freeze();")
        assert [went(book, each, names) for each in ["None", *sources]] == first
        shutil.rmtree(save)

    random_notebooks()
    kernel.ok("%distributed stop")


def went(book, source, names):
    """Run a cell on the ranks, whatever comes of it; return what they have then."""
    lines = textwrap.indent(source, "    ")
    raised = "NameError, TypeError, IndexError, AttributeError, RuntimeError"
    body = f"try:\n{lines}\nexcept ({raised}): pass"
    book.ask(f"%%distributed\n{body}")
    return book.ask(f"%%distributed --out res\ngc.collect()\n{LOOK.format(names=names)}", "list(res.values)")
