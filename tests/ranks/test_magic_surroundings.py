"""What surrounds a cell: code that front ends run on their own, __future__ imports, the notebook's magics."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def session_kernel(module_kernel):
    """Start a session in the kernel that the tests here share."""
    module_kernel.ok("%distributed start -n 2")
    yield module_kernel
    module_kernel.ok("%distributed stop")


@pytest.fixture
def kernel(session_kernel):
    """Give the kernel with its session, and without variables."""
    yield session_kernel
    session_kernel.forget()


def ask(kernel, code, **how):
    """Run code as a front end does that wants no place in the history for it."""
    message = kernel.client.execute(code, **how)
    reply = kernel.client.get_shell_msg(timeout=30)
    while reply["parent_header"].get("msg_id") != message:
        reply = kernel.client.get_shell_msg(timeout=30)
    return reply["content"]


@pytest.mark.parametrize("how", [{"silent": True}, {"store_history": False}])
def test_under_auto_what_a_front_end_runs_on_its_own_stays_in_the_notebook(kernel, how):
    kernel.ok("%distributed auto on")
    try:
        assert ask(kernel, "hidden = 1", **how)["status"] == "ok"
        assert ask(kernel, "hidden / 0", **how)["ename"] == "ZeroDivisionError"
        kernel.ok("of_the_ranks = rank")
    finally:
        kernel.ok("%distributed auto off")
    assert kernel.ok("hidden, 'of_the_ranks' in globals()").result == "(1, False)"
    assert kernel.ok("%distributed pull of_the_ranks").error is None


def test_future_imports_of_the_notebook_hold_on_the_ranks(kernel):
    kernel.ok("from __future__ import annotations")
    for magic in ("%%distributed", "%%distributed --fresh -n 1"):
        cell = f"{magic}\ndef f(a: NoSuchName) -> NorThis: return a\nf(1)"
        assert kernel.run(cell).error is None


def test_a_magic_of_the_notebook_is_refused_by_name_and_with_what_to_do(kernel):
    kernel.ok("""
        from IPython.core.magic import register_line_magic
        @register_line_magic
        def mine(line):
            return line
    """)
    error = kernel.fails("%%distributed\n%mine 3")
    assert "%mine was used in a distributed cell, but this rank has no such magic" in error.evalue
    assert "%load_ext its extension there" in error.evalue
    cell_magic = "%%distributed\nget_ipython().run_cell_magic('nope', '', '1')"
    assert "%%nope was used" in kernel.fails(cell_magic).evalue
    own = """
        %%distributed
        from IPython.core.magic import register_line_magic
        @register_line_magic
        def mine(line):
            return int(line) + 1
    """
    kernel.ok(own)
    assert "ranks 0-1: 4" in kernel.ok("%%distributed\n%mine 3").text


def test_where_a_fresh_cell_runs_is_decided_once(kernel):
    kernel.ok("""
        from nblaunch.protocol.client import OpenRanks
        from nblaunch.client.local import Client
        counted, asked = [], Client.ask
        def count(client, request):
            counted.append(type(request))
            return asked(client, request)
        Client.ask = count
    """)
    try:
        kernel.ok("%%distributed --fresh -n 1\nrank")
        assert kernel.ok("counted == [OpenRanks]").result == "True"
        error = kernel.fails("%%distributed --fresh -n 1 --ranks 0\nrank")
        assert "--ranks" in error.evalue
    finally:
        kernel.ok("Client.ask = asked")


def test_the_panel_says_why_there_are_as_many_ranks_as_there_are(start_kernel):
    kernel = start_kernel(NBLAUNCH_DISPLAY="widget")
    pending = kernel.submit("%%distributed\nimport time\ntime.sleep(0.5)")
    said = [json.dumps(content) for kind, content in pending._messages(60) if kind.startswith("comm_")]
    assert any("no GPU is visible: 2 ranks on the CPU (set -n for another number)" in each for each in said)
    pending = kernel.submit("%%distributed -n 2\nimport time\ntime.sleep(0.5)")
    said = [json.dumps(content) for kind, content in pending._messages(60) if kind.startswith("comm_")]
    assert said
    assert not any("no GPU is visible" in each for each in said)
