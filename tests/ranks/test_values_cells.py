"""A cell's value that is not sent: shown by its repr, and a stand-in in the result that says why."""

from __future__ import annotations

import pickle

import pytest

import nblaunch
from nblaunch._results import NotSent, NotSentError

LOCK = "__import__('threading').Lock()"


@pytest.fixture(scope="module")
def session(tmp_path_factory, place):
    # DDP makes that directory, elsewhere if it may.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    with place(2, display=False, env=env) as session:
        session.cell(
            "import torch, torch.distributed as dist\nwide = torch.nn.Linear(3000, 3000)", namespace={}
        )
        yield session


def sent_bytes(result):
    return [sum(rank.value.sizes) for rank in result.state.ranks.values()]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("last", "named"),
    [
        ("(i for i in range(3))", "generator"),
        ("dist.all_reduce(torch.ones(1), async_op=True)", "Work"),
        ("__import__('socket').socket()", "socket.socket"),
        ("iter(torch.utils.data.DataLoader([1, 2]))", "DataLoaderIter"),
        ("{'fine': 1, 'deep': [0, {'lock': " + LOCK + "}]}", "value['deep'][1]['lock'], _thread.lock,"),
        ("[torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))]", "DistributedDataParallel"),
    ],
)
def test_a_cell_whose_last_expression_cannot_be_sent_succeeds(session, last, named):
    result = session.cell(f"import torch, torch.distributed as dist\ndone = rank + 1\n{last}", namespace={})
    assert result.ok
    (warning,) = result.warnings
    assert named in warning
    assert "ranks 0-1" in warning
    assert "cannot be sent" in warning
    assert [type(value) for value in result.values] == [NotSent] * 2
    assert session.pull("done") == {"done": [1, 2]}


def test_a_fresh_cell_shows_the_repr_and_warns(kernel):
    ran = kernel.ok(
        "%%distributed -n 2 --out res\nclass Held:\n    def __repr__(self): return f'Held({rank})'\n"
        f"    lock = None\nheld = Held()\nheld.lock = {LOCK}\nheld"
    )
    assert "rank 0: Held(0)" in ran.text
    assert "rank 1: Held(1)" in ran.text
    assert (
        "warning: the value of ranks 0-1 is only shown: value.lock, _thread.lock, cannot be sent" in ran.text
    )
    assert kernel.value("[repr(each) for each in res]") == ["Held(0)", "Held(1)"]
    error = kernel.fails("res[0].lock")
    assert error.ename == "NotSentError"
    assert "value.lock, _thread.lock, cannot be sent" in error.evalue
    assert kernel.ok("res[0]").result == "Held(0)"


def test_one_rank_alone_may_have_a_value_that_cannot_be_sent(session):
    result = session.cell(f"{LOCK} if rank == 1 else 'fine'", namespace={})
    assert result.ok
    assert result[0] == "fine"
    assert isinstance(result[1], NotSent)
    (warning,) = result.warnings
    assert "the value of rank 1 is only shown" in warning


@pytest.mark.parametrize(
    "last",
    ["wide.eval()", "torch.optim.Adam(wide.parameters())", "torch.utils.data.DataLoader(range(8))"],
)
def test_a_model_an_optimizer_and_a_loader_are_shown_and_not_sent(session, last):
    result = session.cell(last, namespace={})
    assert result.ok
    assert result.warnings == ()
    assert max(sent_bytes(result)) < 10_000
    shown = [rank.value_text for rank in result.state.ranks.values()]
    assert [repr(value) for value in result.values] == shown
    with pytest.raises(NotSentError, match=r"--out NAME.*pull"):
        result[0].parameters()


def test_with_out_a_model_is_sent(kernel):
    kernel.ok("%%distributed -n 2 --out res\nimport torch\ntorch.nn.Linear(2, 2).eval()")
    assert kernel.value("[type(each).__name__ for each in res]") == ["Linear", "Linear"]
    ran = kernel.ok("%%distributed -n 2\nimport torch\ntorch.nn.Linear(2, 2).eval()")
    assert "ranks 0-1: Linear(in_features=2, out_features=2, bias=True)" in ran.text
    assert "warning" not in ran.text
    assert kernel.value("[type(_[0]).__name__, repr(_[0])]")[0] == "NotSent"


def test_with_out_a_module_that_needs_its_process_group_is_shown(kernel, tmp_path):
    ran = kernel.ok(
        f"%%distributed -n 2 --out res --env TORCHINDUCTOR_CACHE_DIR={tmp_path}\nimport torch\n"
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))"
    )
    assert "DistributedDataParallel(" in ran.text
    assert kernel.value("[type(each).__name__ for each in res]") == ["NotSent"] * 2
    assert ".module" in kernel.fails("res[0].module").evalue


def test_a_model_in_a_tuple_and_one_that_is_pulled_are_sent(session):
    result = session.cell("small = torch.nn.Linear(2, 2)\nsmall, small.state_dict()", namespace={})
    assert [type(model).__name__ for model, _ in result] == ["Linear"] * 2
    assert [type(model).__name__ for model in session.pull("small")["small"]] == ["Linear"] * 2


def test_a_function_whose_value_cannot_be_sent_raises(session):
    def make():
        return (each for each in [])

    for run in (session.run, lambda fn: nblaunch.run(fn, nproc=2, display=False)):
        with pytest.raises(nblaunch.RunFailedError, match="returned a generator, which cannot be sent"):
            run(make)


def test_a_function_returns_a_model(session):
    def make():
        import torch

        return torch.nn.Linear(2, 2)

    assert type(session.run(make)[0]).__name__ == "Linear"


def test_a_view_sends_what_it_shows_both_ways(session):
    session.cell("big = torch.arange(3_000_000)", namespace={})
    result = session.cell("big[:3]", namespace={})
    assert max(sent_bytes(result)) < 1000
    assert result[1].tolist() == [0, 1, 2]
    result[1][0] = 7
    assert result[0].tolist() == [0, 1, 2]


def test_what_fresh_ranks_are_given_is_what_is_shown(kernel):
    kernel.ok("import torch\nbig = torch.arange(3_000_000)\nview, other = big[5:9], big[7:11]\ndel big")
    kernel.ok(
        "%%distributed -n 2 --out res\nview += 1\n"
        "view.tolist(), other.tolist(), view.untyped_storage().nbytes()"
    )
    assert kernel.value("res[1]") == [[6, 7, 8, 9], [8, 9, 9, 10], 88]


def test_clearing_out_lets_go_of_results(kernel):
    for _ in range(3):
        kernel.ok("%%distributed -n 2\nrank")
    kernel.ok("import gc, weakref\nkept = [weakref.ref(each) for each in Out.values()]")
    assert kernel.value("[each().ok for each in kept]") == [True] * 3
    kernel.ok("%reset -f out")
    assert kernel.value("[gc.collect() * 0, [each() for each in kept]]") == [0, [None] * 3]


# --- the stand-in ----------------------------------------------------------------------------------


@pytest.fixture
def stand_in():
    return NotSent("Net(\n  wide\n)", "__main__.Net", "why it is not here")


@pytest.mark.quick
@pytest.mark.parametrize(
    "use",
    [
        lambda it: it.shape,
        lambda it: it(1),
        lambda it: it[0],
        lambda it: it.__setitem__(0, 1),
        iter,
        next,
        len,
        bool,
        lambda it: it + 1,
        lambda it: 1 + it,
        lambda it: -it,
        lambda it: it @ it,
        lambda it: it < 1,
        lambda it: 1 in it,
        int,
        float,
        lambda it: setattr(it, "lr", 1),
        lambda it: it.__enter__(),
    ],
)
def test_using_it_raises_with_the_reason(stand_in, use):
    with pytest.raises(NotSentError, match="why it is not here"):
        use(stand_in)


@pytest.mark.quick
def test_it_looks_like_the_value(stand_in):
    from IPython.core.formatters import DisplayFormatter

    assert repr(stand_in) == str(stand_in) == f"{stand_in}" == "Net(\n  wide\n)"
    data, _ = DisplayFormatter().format(stand_in)
    assert data == {"text/plain": "Net(\n  wide\n)"}
    assert repr(NotSent("", "x.Net", "")) == "<x.Net>"


def test_it_is_itself_and_can_be_pickled(stand_in):
    other = pickle.loads(pickle.dumps(stand_in))
    assert other != stand_in
    assert len({stand_in, other}) == 2
    assert (repr(other), other.reason, other.type_name) == (
        repr(stand_in),
        "why it is not here",
        "__main__.Net",
    )
    assert not hasattr(stand_in, "shape")
    assert isinstance(NotSentError("x"), nblaunch.NblaunchError)
