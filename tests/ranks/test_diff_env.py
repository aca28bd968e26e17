"""`session.diff(env=True)`: versions, variables, flags and seeds that differ between ranks."""

from __future__ import annotations

import pytest

import nblaunch


@pytest.fixture(scope="module")
def rows():
    """Give rank 1 surroundings of its own; return what was found, by name."""
    with nblaunch.Session(3) as session:
        session.cell(
            "import os, random, numpy, torch\n"
            "random.seed(1), numpy.random.seed(1), torch.manual_seed(5 + (rank == 1))\n"
            "os.environ['COLOUR'] = 'red' if rank == 1 else 'blue'\n"
            "os.environ['MY_API_KEY'] = f'hunter{rank}'\n"
            "os.environ['DATABASE'] = f'postgres://me:secret{rank}@host/db'\n"
            "if rank == 1:\n"
            "    os.environ['ALONE'] = '1'\n"
            "    torch.use_deterministic_algorithms(True)\n"
            "    torch.set_float32_matmul_precision('high')\n",
            namespace={},
        )
        found = session.diff(env=True)
        assert session.diff(env=True, ranks=[0]).equal
        return found


def test_variables_flags_and_seeds_that_differ_have_a_row_each(rows):
    assert {row.name for row in rows} == {
        "variable ALONE",
        "variable COLOUR",
        "variable DATABASE",
        "variable MY_API_KEY",
        "flag deterministic algorithms",
        "flag matmul precision",
        "seed torch.initial_seed()",
        "random state of torch (CPU)",
    }
    assert rows["variable COLOUR"].groups == ((0, 2), (1,))
    assert rows["variable COLOUR"].shown == ("blue", "red")
    assert rows["variable ALONE"].shown == ("is missing", "1")
    assert rows["seed torch.initial_seed()"].shown == ("5", "6")


def test_of_secrets_only_that_they_differ_is_shown(rows):
    assert not rows["variable MY_API_KEY"].equal
    for text in (str(rows), rows._repr_html_(), repr(rows.rows)):
        assert "hunter" not in text
        assert "secret0" not in text


def test_ranks_in_equal_surroundings_are_equal_and_the_magic_shows_it(kernel):
    kernel.ok("%distributed start -n 2")
    kernel.ok(
        "%%distributed\nimport random, numpy, torch\n"
        "random.seed(1); numpy.random.seed(1); torch.manual_seed(1)"
    )
    kernel.ok("found = get_ipython().run_line_magic('distributed', 'diff --env')")
    assert kernel.value("str(found)") == "environment: equal on ranks 0-1"
    kernel.ok("%%distributed\nrandom.seed(rank); numpy.random.seed(rank)")
    kernel.ok("found = get_ipython().run_line_magic('distributed', 'diff --env')")
    assert kernel.value("str(found)").splitlines() == [
        "environment: equal on ranks 0-1",
        "    note: each rank has its own random state of Python and random state of NumPy",
    ]
    kernel.ok("%distributed stop")
