"""`import nblaunch` costs next to nothing, so a notebook may have it at its top."""

from __future__ import annotations

import json
import pickle
import resource
import statistics
import subprocess
import sys

import pytest

import nblaunch

HEAVY = {"IPython", "anywidget", "ipykernel", "ipywidgets", "numpy", "torch", "zmq"}
RUNTIME = (
    *("torch", "zmq", "nblaunch.host", "nblaunch.group", "nblaunch.nodes", "nblaunch.rank"),
    "nblaunch.runtime",
)
"""What runs in the runtime and in ranks, by the beginning of its modules' names."""
ROUNDS = 7


def fresh(code: str) -> str:
    """Run `code` in an interpreter of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def processor_seconds(code: str) -> float:
    """Return the processor time of a Python that runs `code`: other work on the machine hardly changes it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    fresh(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.quick
def test_import_loads_nothing_heavy():
    loaded = json.loads(
        fresh("import json, sys, nblaunch; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))")
    )
    assert HEAVY.isdisjoint(loaded)
    assert "nblaunch" in loaded


def test_import_takes_a_third_of_what_ipython_takes_which_every_notebook_has():
    took: dict[str, list[float]] = {"pass": [], "import nblaunch": [], "import IPython": []}
    for code in took:
        fresh(code)  # compiles the modules
    for _ in range(ROUNDS):
        for code, found in took.items():
            found.append(processor_seconds(code))
    bare, ours, ipythons = map(statistics.median, took.values())
    assert ours - bare < (ipythons - bare) / 3


def test_every_public_name_is_there_and_listed():
    names = json.loads(
        fresh(
            "import json, nblaunch\n"
            "missing = [name for name in nblaunch.__all__ if not hasattr(nblaunch, name)]\n"
            "unlisted = sorted(set(nblaunch.__all__) - set(dir(nblaunch)))\n"
            "print(json.dumps([missing, unlisted]))"
        )
    )
    assert names == [[], []]


def test_views_load_neither_ipython_nor_ipywidgets_before_they_are_needed():
    code = (
        "import sys, nblaunch.view.display, nblaunch.view.display\n"
        "print([name for name in ('IPython', 'ipywidgets', 'anywidget', 'torch') if name in sys.modules])"
    )
    assert fresh(code) == "[]\n"


@pytest.mark.quick
def test_importing_the_options_loads_neither_torch_nor_ipython():
    code = (
        "import sys, nblaunch.options.command_line\n"
        "print([name for name in ('torch', 'IPython') if name in sys.modules])"
    )
    assert fresh(code) == "[]\n"


def test_a_pickled_error_can_be_read_without_torch():
    """As by a tool that collects the errors of many notebooks."""
    with pytest.raises(nblaunch.RunFailedError) as caught:
        nblaunch.run(lambda: 1 / 0, nproc=1)
    data = pickle.dumps(caught.value)
    code = f"import pickle, sys; e = pickle.loads({data!r}); print(e.root_cause.type, 'torch' in sys.modules)"
    assert fresh(code) == "builtins.ZeroDivisionError False\n"


def test_counting_gpus_leaves_cuda_as_it_is():
    code = (
        "import torch\n"
        "from nblaunch.host.placement import place_ranks\n"
        "place_ranks('auto', 'auto', {})\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    assert fresh(code) == ""


def test_a_script_that_runs_ranks_imports_neither_their_code_nor_ipython():
    code = (
        "import sys, nblaunch\n"
        "nblaunch.run(abs, (1,), nproc=1)\n"
        "print([name for name in sys.modules if name.startswith(('nblaunch.rank', 'IPython', 'ipywidgets'))])"
    )
    assert fresh(code) == "[]\n"


NOTEBOOK = (
    "import sys\n"
    "from IPython.core.interactiveshell import InteractiveShell\n"
    "shell = InteractiveShell.instance()\n"
    "shell.run_line_magic('load_ext', 'nblaunch')\n"
)


def test_a_notebook_loads_neither_torch_nor_zmq_nor_what_runs_in_the_runtime():
    """A kernel has zmq of its own; this shell has none, so it would be ours."""
    code = (
        f"{NOTEBOOK}"
        "shell.run_cell_magic('distributed', '-n 2', 'rank + 3')\n"
        "print(shell.user_ns['_'].values)\n"
        f"print([name for name in sys.modules if name.startswith({RUNTIME!r})])"
    )
    assert fresh(code).endswith("[3, 4]\n[]\n")


@pytest.mark.quick
@pytest.mark.parametrize("module", ["nblaunch.client.run", "nblaunch.client.session", "nblaunch._api"])
def test_importing_a_client_loads_nothing_that_the_runtime_needs(module):
    code = f"import sys, {module}\nprint([name for name in sys.modules if name.startswith({RUNTIME!r})])"
    assert fresh(code) == "[]\n"


def test_a_notebook_with_cells_and_a_session_imports_nothing_of_the_ranks():
    code = (
        f"{NOTEBOOK}"
        "shell.run_cell_magic('distributed', '-n 1', 'x = 1')\n"
        "shell.run_line_magic('distributed', 'start -n 1')\n"
        "shell.run_cell_magic('distributed', '', 'x = 1')\n"
        "shell.run_line_magic('distributed', 'inspect x')\n"
        "shell.run_line_magic('distributed', 'stop')\n"
        "print([name for name in sys.modules if name.startswith('nblaunch.rank')])"
    )
    assert fresh(code).endswith("[]\n")


def test_a_packed_value_that_is_collected_in_a_cycle_prints_no_error():
    """From Python 3.13 on; before, with -X dev only."""
    code = (
        "import gc; from nblaunch.capture.pickling import dumps_home\n"
        "cycle = [dumps_home([1])]; cycle.append(cycle); del cycle; gc.collect()"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
