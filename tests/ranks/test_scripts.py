"""A script on ranks: `nblaunch.run("train.py")` and `%distributed run train.py` are `torchrun train.py`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import zipfile
from typing import Any

import psutil
import pytest
from lanes import sampled
from sources import STARTER, STARTER_WITH_MAIN
from torch.distributed.elastic.utils import macros

import nblaunch
from nblaunch._results import RunResult
from nblaunch.protocol.state import State

FACTS = """
import json, os, sys
spec = __spec__
print(json.dumps({
    "name": __name__,
    "file": __file__,
    "spec": spec and [spec.name, spec.origin],
    "package": __package__,
    "argv": sys.argv,
    "path": sys.path[0],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "cwd": os.getcwd(),
}))
"""


@pytest.fixture
def write(tmp_path: pathlib.Path, monkeypatch):
    """Give `write(**{"pkg/train.py": source})`: files in the working directory of the test."""
    monkeypatch.chdir(tmp_path)

    def make(files: dict[str, str]) -> pathlib.Path:
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source).lstrip("\n"))
        return tmp_path

    return make


def outputs(result: RunResult) -> list[str]:
    return [rank.stdout for rank in result.ranks]


# --- as Python itself runs it ------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    "words",
    sampled(
        [
            ["train.py", "--lr", "1e-3", ""],
            ["app"],
            ["-m", "pkg"],
            ["app.zip", "a"],
            ["link.py"],
            ["./below/train.py", "-x"],
            ["below/../train.py"],
            ["./app/"],
            ["-m", "pkg.train", "--lr", "1"],
            ["-m", "plain.train"],
        ],
        3,
        ci=5,
    ),
    ids="-".join,
)
def test_a_script_finds_what_it_finds_when_python_runs_it(write, words):
    names = ["train.py", "below/train.py", "app/__main__.py", "plain/train.py"]
    names += ["pkg/train.py", "pkg/__main__.py"]
    where = write(dict.fromkeys(names, FACTS) | {"pkg/__init__.py": ""})
    (where / "link.py").symlink_to(where / "below" / "train.py")
    with zipfile.ZipFile(where / "app.zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    python = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    module = words[0] == "-m"
    name, *args = words[1:] if module else words
    result = nblaunch.run(name, args=args, module=module, nproc=2)
    assert result.values == [0, 0]
    expected = json.loads(python.stdout)
    assert [json.loads(text) for text in outputs(result)] == [expected] * 2


@pytest.mark.quick
@pytest.mark.parametrize("program", [STARTER, STARTER_WITH_MAIN], ids=["script", "main"])
def test_a_starter_program_runs_as_it_is(write, program):
    result = nblaunch.run(write({"train.py": program}) / "train.py", nproc=2)
    assert result.values == [0, 0]
    assert outputs(result) == [f"rank {rank} of 2\nsum 2\ndone\n" for rank in range(2)]


def test_a_script_has_no_process_group_unless_it_asks_for_one(write):
    write({"train.py": "import torch.distributed as dist\nthere = dist.is_initialized()"})
    assert nblaunch.run("train.py", pull="there", nproc=2).values == [{"there": False}] * 2
    asked = nblaunch.run("train.py", pull="there", init_process_group=True, nproc=2)
    assert asked.values == [{"there": True}] * 2


def test_modules_beside_a_script_are_found_before_those_of_the_working_directory(write):
    write(
        {
            "helper.py": "where = 'cwd'",
            "below/helper.py": "where = 'beside'",
            "below/train.py": "import helper; where = helper.where",
        }
    )
    assert nblaunch.run("below/train.py", pull="where", nproc=1).values == [{"where": "beside"}]


def test_the_local_rank_stands_in_arguments_as_with_torchrun(write):
    write({"train.py": "import sys; args = sys.argv[1:]"})
    args = ["--log=${local_rank}.log", "$HOME ${other} $$", "$local_rank"]
    result = nblaunch.run("train.py", args, pull="args", nproc=2)
    assert [value["args"] for value in result.values] == [macros.substitute(args, rank) for rank in "01"]
    assert result[1]["args"] == ["--log=1.log", "$HOME ${other} $", "1"]


def test_what_a_script_defines_can_be_pickled_and_reaches_its_worker_processes(write):
    write(
        {
            "train.py": """
        import argparse, pickle
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index * index

        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("--start")
            start = parser.parse_args().start
            data = pickle.loads(pickle.dumps(Squares()))
            loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=start)
            found = [batch.tolist() for batch in loader]
        """
        }
    )
    for start in ("fork", "spawn"):
        result = nblaunch.run("train.py", args=["--start", start], pull="found", nproc=1)
        assert result.values == [{"found": [[0, 1], [4, 9]]}]


def test_threads_and_exit_functions_are_part_of_a_script(write):
    write(
        {
            "train.py": """
        import atexit, threading, time
        from concurrent.futures import ThreadPoolExecutor
        atexit.register(print, "exit function")
        idle = ThreadPoolExecutor(1)
        idle.submit(print, "executor").result()
        def work():
            while threading.main_thread().is_alive() and not behind:
                time.sleep(0.01)
            print("thread")
        behind = []
        threading.Thread(target=work).start()
        threading.Timer(0.1, behind.append, [1]).start()
        print("last line")
        """
        }
    )
    result = nblaunch.run("train.py", nproc=1)
    assert outputs(result) == ["executor\nlast line\nthread\nexit function\n"]


# --- values and ends -----------------------------------------------------------------------------------


def test_globals_of_a_script_come_back_by_name(write):
    write(
        {
            "train.py": """
        import os, sys, torch
        class Point:
            x = int(os.environ["RANK"])
        model, losses, point = torch.ones(2) * Point.x, [0.5], Point()
        sys.exit(0)
        """
        }
    )
    result = nblaunch.run("train.py", pull=("model", "losses", "point"), nproc=2)
    assert [value["model"].tolist() for value in result.values] == [[0, 0], [1, 1]]
    assert [(value["losses"], value["point"].x) for value in result.values] == [([0.5], 0), ([0.5], 1)]
    with pytest.raises(nblaunch.RunFailedError, match=r"'modle' is not defined .* Did you mean 'model'"):
        nblaunch.run("train.py", pull=["modle"], nproc=1)


def test_a_global_that_cannot_be_sent_is_named(write):
    write({"train.py": "import threading\nloss, lock = 0.5, threading.Lock()"})
    with pytest.raises(nblaunch.RunFailedError, match=r"value\['lock'\], a _thread.lock, which cannot be"):
        nblaunch.run("train.py", pull="loss,lock", nproc=1)


@pytest.mark.parametrize("end", ["sys.exit()", "pass"])
def test_the_value_of_a_script_that_ends_well_is_0(write, end):
    write({"train.py": f"import sys\n{end}"})
    assert nblaunch.run("train.py", nproc=1).values == [0]


@pytest.mark.quick
def test_an_exit_status_is_the_failures_exit_code(write):
    write({"train.py": "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)"})
    result = nblaunch.run("train.py", nproc=2, check=False)
    assert (result.ranks[1].state, result.ranks[1].exitcode) == (State.FAILED, 3)
    (failure,) = result.failures
    assert failure.reason == "SystemExit: 3 (train.py, line 2)"


def test_a_failures_traceback_begins_at_the_scripts_own_line(write):
    write(
        {
            "train.py": """
        def step(batch):
            return 1 / batch

        step(0)
        """
        }
    )
    with pytest.raises(nblaunch.RunFailedError, match=r"line 2") as caught:
        nblaunch.run("train.py", nproc=2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    root = caught.value.root_cause
    assert root is not None
    assert [(frame.filename, frame.line, frame.function) for frame in root.frames] == [
        ("train.py", 4, "<module>"),
        ("train.py", 2, "step"),
    ]
    assert root.traceback.startswith(
        'Traceback (most recent call last):\n  File "train.py", line 4, in <module>'
    )
    assert root.frames[1].variables == {"batch": "0"}


@pytest.mark.parametrize("name", ["train.py", "pkg.train"])
def test_a_script_that_is_no_python_says_in_which_line(write, name):
    write({"train.py": "x = 1\nx = = 2", "pkg/train.py": "x = 1\nx = = 2"})
    module = name == "pkg.train"
    with pytest.raises(nblaunch.RunFailedError, match=r"SyntaxError.*train\.py, line 2\)\n    x = = 2"):
        nblaunch.run(name, module=module, nproc=2)


def test_torchelastics_record_is_of_use_around_a_main_function(write):
    write(
        {
            "train.py": """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise LookupError("no batch")

        if __name__ == "__main__":
            main()
        """
        }
    )
    result = nblaunch.run("train.py", log_dir="runs", nproc=1, check=False)
    (failure,) = result.failures
    assert failure.reason == "LookupError: no batch (train.py, line 5)"
    (error,) = pathlib.Path("runs").rglob("error.json")
    assert "no batch" in error.read_text()


def test_the_output_of_a_script_is_in_the_log_directory(write):
    where = write({"train.py": "import sys\nprint('said')\nprint('warned', file=sys.stderr)"})
    result = nblaunch.run("train.py", log_dir=where / "runs", nproc=1)
    assert result.log_dir is not None
    assert [path.read_text() for path in sorted(result.log_dir.rglob("std*.log"))] == ["warned\n", "said\n"]


# --- programs that Python does not run -------------------------------------------------------------------


@pytest.mark.quick
def test_any_program_runs_in_the_ranks_environment():
    script = "echo $RANK of $WORLD_SIZE, local ${LOCAL_RANK}, $EXTRA, $0; echo warned >&2"
    result = nblaunch.run(
        "sh", args=["-c", script, "${local_rank}"], no_python=True, env={"EXTRA": "more"}, nproc=2
    )
    assert result.values == [0, 0]
    assert outputs(result) == [f"{rank} of 2, local {rank}, more, {rank}\n" for rank in range(2)]
    assert [rank.stderr for rank in result.ranks] == ["warned\n"] * 2


def test_python_itself_can_be_the_program(write):
    # The one that destroys its group: torch 2.13 aborts one program in a hundred that ends without, with or
    # without nblaunch ("terminate called without an active exception").
    write({"train.py": STARTER_WITH_MAIN})
    result = nblaunch.run(sys.executable, args=["-u", "train.py"], no_python=True, nproc=2)
    assert outputs(result) == [f"rank {rank} of 2\nsum 2\ndone\n" for rank in range(2)]


def test_a_programs_end_is_told_as_a_ranks():
    with pytest.raises(nblaunch.RunFailedError, match=r"ended with exit code 3\n(.|\n)*no such dataset"):
        nblaunch.run("sh", args=["-c", "echo no such dataset; exit 3"], no_python=True, nproc=2)
    result = nblaunch.run(
        sys.executable,
        args=["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
        no_python=True,
        nproc=1,
        check=False,
    )
    (failure,) = result.failures
    assert (failure.exitcode, failure.signal, result.ranks[0].exitcode) == (-9, "SIGKILL", -9)
    assert failure.reason == "was killed by SIGKILL"


def test_a_program_is_asked_to_end_and_goes_with_its_children(write, eventually):
    where = write(
        {
            "program.sh": """
        trap 'echo asked > asked-$RANK; exit 0' TERM
        sleep 1000 &
        echo $! > child-$RANK
        [ $RANK = 1 ] && while [ ! -s child-0 ]; do sleep 0.01; done && exit 4
        wait
        """
        }
    )
    result = nblaunch.run("sh", args=["program.sh"], no_python=True, nproc=2, check=False)
    assert [rank.state for rank in result.ranks] == [State.STOPPED, State.FAILED]
    assert (where / "asked-0").read_text() == "asked\n"
    for rank in range(2):
        child = int((where / f"child-{rank}").read_text())
        eventually(lambda child=child: not psutil.pid_exists(child), "the program's child is gone")


def test_a_program_that_cannot_be_executed_says_so(write):
    where = write({"data": "no program"})
    (where / "data").chmod(0o700)
    with pytest.raises(nblaunch.RunFailedError, match="Exec format error"):
        nblaunch.run("./data", no_python=True, nproc=1)


# --- refused before anything starts ------------------------------------------------------------------------


REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "a slip": (["trian.py"], {}, "no such file. Did you mean 'train.py'"),
    "a slip below": (["pkg/trian.py"], {}, "Did you mean 'pkg/train.py'"),
    "without its ending": ([pathlib.Path("train")], {}, "Did you mean 'train.py'"),
    "nothing there": (["nowhere/x.py"], {}, "no directory .*nowhere"),
    "no name": ([""], {}, "no such file"),
    "a module's name": (["pkg.train"], {}, "It is the name of a module: give module=True"),
    "a directory": (["pkg"], {}, r"directory without a __main__\.py. It holds __init__.py, train.py"),
    "a notebook": (["book.ipynb"], {}, "it is a notebook. Give a script"),
    "an empty zip": (["empty.zip"], {}, r"zip without a __main__\.py"),
    "no module": (["pkg.trian"], {"module": True}, "Did you mean 'pkg.train'"),
    "no package": (["pgk.train"], {"module": True}, "none of that name"),
    "below a module": (["pkg.train.more"], {"module": True}, "none of that name"),
    "a package": (["pkg"], {"module": True}, "package without a __main__"),
    "a file as a module": (["train.py"], {"module": True}, "no name of a module"),
    "no program": (["no-such-program"], {"no_python": True}, "none on PATH"),
    "not executable": (["./train.py"], {"no_python": True}, r"not executable. .*chmod \+x"),
    "not on PATH": (["tool"], {"no_python": True}, "Write './tool'"),
    "a number": (["train.py", ["--lr", 1e-3]], {}, r"args\[1\]=0.001 .* Write '0.001'"),
    "one text": (["train.py", "--lr 1"], {}, "takes a list of texts"),
    "a null": (["train.py", ["a\0"]], {}, "null characters"),
    "kwargs": (["train.py", [], {"lr": 1}], {}, "takes texts only"),
    "contradiction": (["train.py"], {"no_python": True, "module": True}, "--no-python and --module"),
    "another": (["train.py"], {"no_python": True, "run_path": True}, "--no-python and --run-path"),
    "nothing to pull": (["train.py"], {"no_python": True, "pull": "x"}, "--no-python and --pull"),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_before_any_process_starts(write, monkeypatch, case):
    package = {"pkg/__init__.py": "raise SystemExit('imported')", "pkg/train.py": ""}
    where = write({"train.py": "", "book.ipynb": "{}", "tool": "", **package})
    (where / "tool").chmod(0o700)
    zipfile.ZipFile(where / "empty.zip", "w").close()
    arguments, options, said = REFUSED[case]
    monkeypatch.setattr("nblaunch._api.run_fresh", pytest.fail)
    with pytest.raises(nblaunch.OptionError, match=said):
        nblaunch.run(*arguments, nproc=2, **options)


def test_a_module_is_found_without_its_package_being_imported_here(write):
    write(
        {
            "outer/inner/__init__.py": "import os; open('imported', 'a').write('x')",
            "outer/inner/train.py": "done = True",
        }
    )
    result = nblaunch.run("outer.inner.train", module=True, pull="done", nproc=1)
    assert result.values == [{"done": True}]
    assert pathlib.Path("imported").read_text() == "x"
    assert not [name for name in sys.modules if name.startswith("outer")]


def test_run_path_changes_nothing(write):
    write({"train.py": FACTS})
    plain, inside = (nblaunch.run("train.py", run_path=each, nproc=1) for each in (False, True))
    assert outputs(plain) == outputs(inside)


def test_a_function_takes_none_of_a_scripts_options():
    with pytest.raises(nblaunch.OptionError, match="only a script has this option"):
        nblaunch.run(os.getpid, pull="x", nproc=2)


def test_a_session_says_why_it_runs_no_script_and_what_does(write):
    write({"train.py": "print(__name__)\nx = 7"})
    with nblaunch.Session(nproc=1) as session:
        with pytest.raises(nblaunch.OptionError, match=r"__main__ of its own process.*'%run train.py'"):
            session.run("train.py")  # type: ignore[arg-type]
        session.cell("%run train.py")
        assert session.pull("x") == {"x": [7]}


# --- in a notebook -----------------------------------------------------------------------------------------


@pytest.fixture
def notebook(kernel, write, tmp_path):
    """Give `notebook(files)`: the kernel, working where the files are."""

    def begin(files):
        write(files)
        kernel.ok(f"import os; os.chdir({str(tmp_path)!r})")
        return kernel

    yield begin
    kernel.ok("os.chdir('/')")


def test_a_line_runs_a_script_with_its_own_arguments(notebook):
    kernel = notebook({"train.py": "import sys\nprint(sys.argv)\nloss = 0.5"})
    kernel.ok("lr, n = 0.1, 2")
    ran = kernel.ok("%distributed run -n $n --out res --pull loss train.py --lr {lr} -n 3 ${local_rank}")
    for rank in range(2):
        assert f"['train.py', '--lr', '0.1', '-n', '3', '{rank}']" in ran.text
    assert kernel.value("res.values") == [{"loss": 0.5}] * 2
    assert kernel.value("_ is res") is True
    ran = kernel.ok("%distributed run -n 2 train.py")
    assert "ranks 0-1" in ran.text
    assert kernel.value("_.values") == [0, 0]


def test_a_line_runs_modules_and_programs(notebook):
    kernel = notebook({"pkg/train.py": "print('in', __name__, __spec__.name)"})
    assert "in __main__ pkg.train" in kernel.ok("%distributed run -n 2 -m pkg.train").text
    assert "hello" in kernel.ok("%distributed run -n 2 --no-python echo hello").text


def test_a_failure_is_shown_with_the_scripts_own_lines(notebook):
    kernel = notebook({"train.py": "def step():\n    raise LookupError('no batch')\n\nstep()"})
    error = kernel.fails("%distributed run -n 2 --out res train.py")
    assert error.ename == "RunFailedError"
    assert "of 2 failed: LookupError: no batch (train.py, line 2)" in error.evalue
    assert "raise LookupError('no batch')" in error.traceback
    assert "nblaunch/rank" not in error.traceback
    assert kernel.value("res.root_cause.reason") == "LookupError: no batch (train.py, line 2)"


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            {"train.py": "import os, time\nopen(f'at-{os.environ[\"RANK\"]}', 'w')\ntime.sleep(1000)"},
            "train.py",
        ),
        (
            {"stubborn.sh": "trap '' INT\nsleep 1000 &\ntouch at-$RANK\nwait\nwait"},
            "--grace 1 --no-python sh stubborn.sh",
        ),
        ({"polite.sh": "touch at-$RANK\nsleep 1000"}, "--grace 60 --no-python sh polite.sh"),
    ],
    ids=["script", "stubborn", "polite"],
)
def test_the_stop_button_ends_a_script(notebook, tmp_path, eventually, files, line):
    kernel = notebook(files)
    pending = kernel.submit(f"%distributed run -n 2 --out res {line}")
    eventually(lambda: all((tmp_path / f"at-{rank}").exists() for rank in range(2)), "both ranks run", 60)
    kernel.interrupt()
    ran = pending.finish()
    assert ran.error is not None
    assert ran.error.ename == "KeyboardInterrupt"
    assert kernel.value("[rank.state.name for rank in res.ranks]") == ["STOPPED"] * 2
    assert kernel.value("len(res.failures)") == 0


def test_a_script_in_the_background_gives_a_handle(notebook):
    kernel = notebook({"train.py": "x = 7"})
    kernel.ok("%distributed run -n 2 --background --out handle --pull x train.py")
    assert kernel.value("handle.result(60).values") == [{"x": 7}] * 2


def test_a_script_runs_beside_an_open_session(notebook):
    kernel = notebook({"train.py": "x = 7"})
    kernel.ok("%distributed start -n 1")
    kernel.ok("%distributed run -n 2 --out res train.py")
    assert kernel.value("res.values") == [0, 0]
    error = kernel.fails("%distributed run --session default train.py")
    assert "--session was given to %distributed run" in error.evalue
    kernel.ok("%distributed stop")


def test_a_line_that_names_no_script_says_what_to_write(notebook):
    kernel = notebook({"train.py": ""})
    assert "Write %distributed run train.py" in kernel.fails("%distributed run -n 2").evalue
    assert "Did you mean 'train.py'" in kernel.fails("%distributed run -n 2 tran.py").evalue
    assert "There are:" not in kernel.fails("%distributed run --pul x train.py").evalue


def test_help_and_completion_know_the_options_of_scripts_and_the_files(notebook):
    kernel = notebook({"train.py": "", "below/test.py": ""})
    shown = kernel.ok("%distributed run --help").stdout
    assert shown.startswith("%distributed run [options] script [arguments]\n")
    assert "--no-python" in shown
    assert kernel.complete("%distributed ru") == ["run"]
    assert kernel.complete("%distributed run tr") == ["train.py"]
    assert "below/test.py" in kernel.complete("%distributed run -n 2 below/t")
    assert "--pull" in kernel.complete("%distributed run --pu")
    assert "nccl" in kernel.complete("%distributed run --backend n")
    assert kernel.complete("%distributed run train.py --data be") == ["below/"]
