"""A notebook that nbclient has executed passes `pytest --nbval` without any setting of the user's."""

from __future__ import annotations

import os
import subprocess
import sys

import nbformat
import pytest
from lanes import slow
from nbformat.v4 import new_code_cell, new_notebook

CELLS = (
    "%load_ext nblaunch",
    # Longer than what a panel waits for, and equal lines between others.
    """\
%%distributed -n 2
import sys, time
print("begin")
for step in range(4):
    time.sleep(0.3)
    print(f"rank {rank} at step {step}")
    print("step", step, "done", file=sys.stderr)
rank * 10""",
    """\
%%distributed -n 2
from IPython.display import HTML
import torch.distributed as dist
display(HTML(f"<b>{rank}</b>"))
total = torch.ones(1)
dist.all_reduce(total)
total""",
    "%distributed start -n 2",
    """\
%%distributed
kept = rank + 1
time.sleep(0.5)
kept""",
    "%distributed pull kept\nkept",
    "%distributed stop",
    "_.values if hasattr(_, 'values') else None",
)
IMPORTS = "import time\nimport torch"
FAILS = """\
%%distributed -n 2
time.sleep(0.5)
if rank == 1:
    raise ValueError("boom")
rank"""


def run(where, *arguments):
    """Run a Python module as a user's shell does: with nothing of these tests in the environment."""
    foreign = ("PYTEST_", "NBLAUNCH_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=where,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "NBLAUNCH_STANDBY": "0"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("times", [1, slow(5)])
def test_what_nbclient_saves_passes_strict_nbval(tmp_path, times):
    failing = new_code_cell(FAILS, metadata={"tags": ["raises-exception"]})
    first, *others = CELLS
    cells = [*map(new_code_cell, (first, IMPORTS, *others)), failing, new_code_cell("'the end'")]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    path = tmp_path / "notebook.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    run(tmp_path, "jupyter", "execute", "--inplace", path.name)
    saved = nbformat.read(path, as_version=4)
    ((shown,),) = [[each for each in cell.outputs if "data" in each] for cell in saved.cells[2:3]]
    assert set(shown["data"]) == {"text/html", "text/plain"}
    assert shown["data"]["text/plain"].startswith("[ranks 0-1] begin\n[rank 0] rank 0 at step 0\n")
    assert saved.cells[-2].outputs[-1].ename == "RunFailedError"
    for _ in range(times):
        assert f"{len(cells)} passed" in run(tmp_path, "pytest", "--nbval", "--nbval-current-env", path.name)


@pytest.mark.parametrize(("mode", "kinds"), [("auto", ["display_data"]), slow(("widget", None))])
def test_a_kernel_that_pytest_has_started_makes_one_display(start_kernel, mode, kinds):
    """What nbval sees of a run that is long enough for a panel; what the user has set still counts."""
    kernel = start_kernel(NBLAUNCH_DISPLAY=mode, PYTEST_CURRENT_TEST="notebook.ipynb::Cell 1 (setup)")
    pending = kernel.submit("%%distributed -n 1\nimport time\ntime.sleep(0.4)\nprint('done')")
    seen = [kind for kind, _ in pending._messages(60) if kind in {"display_data", "update_display_data"}]
    assert seen == (kinds or ["display_data", "update_display_data"])
