"""What leaves the notebook runs without it: cells become a script, torchrun gives what the cell gave."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from lanes import slow
from sources import end_of_torchrun

import nblaunch
from nblaunch.magic.commands import command_completions

pytest.importorskip("safetensors")

RANKS = 2


TORCH_ABORTS = "terminate called without an active exception"
"""How torch 2.13 ends about one gloo program in a hundred, any program, after its last line."""


def torchrun(path: Path, *, without: str = "nblaunch") -> list[list[str]]:
    """Run a script under real torchrun; return the values that each rank has printed, in order.

    As on a machine that does not have the package `without`.
    """
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    status, said, texts = -1, TORCH_ABORTS, list[str]()
    for _ in range(3):
        # What torchelastic leaves is gone with this directory; its name is short, as sockets are made in it.
        with tempfile.TemporaryDirectory(prefix="t-") as logs:
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",  # no hostname must be looked up
                "TMPDIR": logs,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": logs,
            }
            (Path(logs) / "sitecustomize.py").write_text(f"import sys\n\nsys.modules[{without!r}] = None\n")
            status, said = end_of_torchrun(
                [*run, "--log-dir", logs, "--redirects", "1", path.name], path.parent, environment
            )
            texts = [path.read_text() for path in sorted(Path(logs).glob("*/attempt_0/*/stdout.log"))]
        if status == 0 or TORCH_ABORTS not in said:
            break
    assert status == 0, said[-5000:]
    return printed(texts)


def run_script(path: Path) -> list[list[str]]:
    """Run a script as torchrun does, which takes three more interpreters; return what `torchrun` returns."""
    with contextlib.chdir(path.parent):
        result = nblaunch.run(path.name, nproc=RANKS, backend="gloo", env={"CUDA_VISIBLE_DEVICES": ""})
    return printed([rank.stdout for rank in result.ranks])


def printed(texts: list[str]) -> list[list[str]]:
    """Return the values that each rank has printed."""
    assert len(texts) == RANKS
    return [
        [line.removeprefix(f"[rank {rank}] ") for line in text.splitlines() if line.startswith("[rank ")]
        for rank, text in enumerate(texts)
    ]


def tidy_script(path: Path) -> str:
    """Return a script's text; it must read as one, and know nothing of nblaunch."""
    text = path.read_text(encoding="utf-8")
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("nblaunch" in ast.unparse(node) for node in imported)
    assert "get_ipython" not in text
    # Imports are in order and used, every name is known; how the user has written the cell is the user's.
    rules = "F401,F811,F821,I,E401,E402,E9,W291,W293,W391,E301,E302,E303,E305,D200,D209,D403,PLW0127"
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--preview", "--select", rules, str(path)]
    checked = subprocess.run(
        check, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""}
    )
    assert checked.returncode == 0, f"{checked.stdout}\n{text}"
    return text


@pytest.fixture
def there(kernel, tmp_path):
    """Give the directory that the notebook is in."""
    # torch.optim makes a directory for compiled code, in the temporary one unless it is told another.
    cache = f"os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path / 'compiled')!r}"
    kernel.ok(f"import os\nos.chdir({str(tmp_path)!r})\n{cache}\ndel os")
    yield tmp_path
    kernel.ok(f"import os\nos.chdir({str(Path.cwd())!r})\ndel os")


ROUND_TRIPS: dict[str, tuple[list[str], str]] = {
    "a collective": (
        ["import torch\nscale = 10"],
        """
        import torch.distributed as dist
        t = torch.ones(1) * (rank + 1) * scale     # scale and torch come from the notebook
        dist.all_reduce(t)
        print("hello from", rank)
        t.item()
        """,
    ),
    "functions and classes of other cells": (
        [
            "import functools",
            """
            # Counts its calls.
            def counted(function):
                @functools.wraps(function)
                def inner(*args, **kwargs):
                    calls.append(function.__name__)
                    return function(*args, **kwargs)

                return inner
            """,
            "calls = []",
            """
            class Base:
                factor = 2

                @property
                def double(self):
                    return self.value * self.factor

                def __init__(self, value):
                    self.value = value
            """,
            """
            class Shifted(Base):
                shift = 100

                def __init__(self, value):
                    super().__init__(value + self.shift)

                def __repr__(self):
                    return f"Shifted({self.value})"


            @counted
            def make(value):
                return Shifted(value)
            """,
        ],
        "made = make(rank)\nmade, made.double, isinstance(made, Base), calls, make.__name__",
    ),
    "functions that use globals": (
        [
            "base = 5\nstep = {'size': 3, 'names': ['a', 'b']}",
            """
            def deep(n):
                return n * step["size"] + base


            def shallow(n):
                return deep(n) + where()


            def where():
                return rank * 1000 + counter


            def adder(amount):
                return lambda value: value + amount


            add_seven = adder(7)
            square = lambda value: value * value
            add_base = adder(base)
            """,
        ],
        """
        counter = 1
        def bump():
            global counter
            counter += 10
        bump()
        shallow(2), counter, square(add_seven(1)), add_base(0), step["names"]
        """,
    ),
    "imports of all kinds": (
        [
            "import numpy as np, xml\nimport xml.etree.ElementTree\nfrom math import pi, floor as down",
            "import torch.nn.functional as F, os.path",
            "from collections import Counter, OrderedDict as Ordered",
            """
            def circle(radius):
                counts = Counter("abca")
                tree = xml.etree.ElementTree.fromstring("<a><b/></a>")
                return down(pi * radius ** 2), counts["a"], len(tree), Ordered(x=1), os.path.basename("/a/b")

            def positive(value):
                import torch
                return F.relu(torch.tensor(float(value))).item() + np.floor(0.5)
            """,
        ],
        "from itertools import chain\ncircle(2), positive(-rank), positive(rank), list(chain([1], [2]))",
    ),
    "a training with DDP": (
        [
            "import torch\nfrom torch import nn\nimport torch.distributed as dist",
            "from torch.nn.parallel import DistributedDataParallel as DDP\nEPOCHS = 4\nlr = 0.05",
            """
            def make_model():
                torch.manual_seed(0)
                return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
            """,
        ],
        """
        model = DDP(make_model().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        torch.manual_seed(rank)
        features, targets = torch.randn(16, 3), torch.randn(16, 1)
        losses = []
        for epoch in range(EPOCHS):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features), targets)
            loss.backward()
            optimizer.step()
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(round(total.item(), 4))

        losses, losses[-1] < losses[0], round(sum(p.sum().item() for p in model.parameters()), 4)
        """,
    ),
    "texts, comments and signs": (
        ['letter = """Grüße,\n  "世界" 🎉\n\ttab \\ end"""\npoem = """one\n  two\nthree\n"""', "größe = 3"],
        '''
        # Ein Kommentar: ünïcödé.
        text = """first
            indented {curly}
        last"""
        zweimal = größe * 2  # am Ende

        # And one more.
        joined = (f"{größe}-"
                  "tail")
        (text, letter,
         poem, zweimal, joined,
         '"quoted"', b"\\x00")
        ''',
    ),
    "IPython's own": (
        ["import time"],
        "%load_ext autoreload\n!echo from a shell > said-$$.txt\n%time x = 5\nif rank:\n    %time x += 1\nx",
    ),
    "functions that have changed since": (
        [
            "LR = 0.1\nN = 2",
            """
            def scaled(x, lr=LR):
                return x * lr


            def stepped(x, *, lr=LR, times=1 << 2):
                return x * lr * times


            def seen(x, so_far=[]):
                so_far.append(x)
                return so_far


            def counts():
                counts.n += 1
                return counts.n


            def times(n):
                def around(function):
                    def inner(x):
                        return function(x) * n
                    return inner
                return around


            @times(N)
            def doubled(x):
                return x


            def make():
                n = 0

                def up():
                    nonlocal n
                    n += 1
                    return n
                return up, lambda: n


            up, now = make()
            unchanged = lambda x, lr=LR: x * lr
            """,
            "LR = 0.5\nN = 5\ncounts.n = 10\nseen(1), seen(2), up(), up()",
        ],
        "scaled(10), stepped(10), seen(3), counts(), doubled(2), (up(), now()), unchanged(10)",
    ),
    "decorators with a state": (
        [
            "made = 0",
            """
            def numbered(function):
                global made
                made += 1
                function.number = made
                return function


            class Counted:
                def __init__(self, function):
                    self.function = function
                    self.calls = 0

                def __call__(self, x):
                    self.calls += 1
                    return self.function(x), self.calls


            class Registry:
                def __init__(self):
                    self.names = []

                def __call__(self, cls):
                    self.names.append(cls.__name__)
                    cls.place = len(self.names)
                    return cls


            registry = Registry()
            """,
            "@numbered\ndef first(x):\n    return x\n\n\n@numbered\ndef second(x):\n    return x * 2",
            "@Counted\ndef tripled(x):\n    return x * 3\n\n\n@registry\nclass Net:\n    pass",
            "made += 5\ntripled(1), tripled(2)",
        ],
        """
        numbers = first.number, second.number, made, first(1) + second(2)
        numbers, tripled(10), tripled.calls, registry.names, Net.place
        """,
    ),
    "classes that have changed since": (
        [
            "import enum\nfrom dataclasses import dataclass, field\nfrom typing import NamedTuple\nSIZE = 4",
            """
            class Net:
                size = SIZE
                scale = 1
                made = 0
                options = {"lr": 1}

                def __init__(self):
                    type(self).made += 1

                def grown(self, by=SIZE):
                    return self.size + by

                class Inner:
                    size = SIZE


            class Old:
                def who(self):
                    return "the old one"


            class Child(Old):
                pass


            class Base:
                known = []

                def __init_subclass__(cls):
                    Base.known.append(cls.__name__)


            class Known(Base):
                pass


            @dataclass
            class Config:
                size: int = SIZE
                names: list = field(default_factory=list)


            class Mode(enum.Enum):
                SMALL = SIZE


            class Point(NamedTuple):
                x: int = SIZE
            """,
            """
            class Old:
                def who(self):
                    return "the new one"
            """,
            "SIZE = 8\nNet.scale = 3\nNet.options['lr'] = 2\nNet.later = {'a': 1}\nnets = [Net(), Net()]",
        ],
        """
        first = Net.size, SIZE, Net.scale, Net.made, Net.options, Net.later, Net().grown(), Net.Inner.size
        first, Child().who(), issubclass(Child, Old), Base.known, Config(), Mode.SMALL.value, Point()
        """,
    ),
    "arrays and tensors as they are": (
        [
            "import numpy as np\nimport torch",
            """
            class Signal(np.ndarray):
                rate = 1

            def frozen(array):
                array.flags.writeable = False
                return array

            people = np.array([("Ann", 32)], dtype=[("name", "U5"), ("age", "i4")])
            records, alone = people.view(np.recarray), people.copy().view(np.recarray)
            signal = np.arange(4.0).view(Signal)
            signal.rate = 44
            late = frozen(signal[2:])
            fixed = {"few": frozen(np.arange(3)), "many": frozen(np.arange(99)), "part": frozen(people[:1])}
            few, objects = frozen(np.arange(2)), np.array([{}, few_of := []], dtype=object)
            ordered = np.asfortranarray(np.ones((2, 3))), np.ones((30, 20), order="F")
            fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
            masked = np.ma.masked_less(np.array([1.0, -1.0]), 0)
            over_masked = masked.data
            turned, also = torch.arange(6).reshape(2, 3).t(), torch.ones(30, 20).t()
            facts = np.finfo(np.float32), np.iinfo("int8"), torch.finfo(torch.float16)
            """,
        ],
        """
        people["age"] += 1
        few_of.append(1)
        over_masked[0] = 5
        signal[3] = 7
        kinds = [type(each).__name__ for each in (records, alone, signal, late, masked)]
        values = records.age.tolist(), alone.name.tolist(), signal.rate, late.tolist(), masked.tolist()
        flags = [each.flags.writeable for each in (*fixed.values(), few, late, records)]
        orders = [each.flags.f_contiguous for each in (*ordered, fortran)], turned.stride(), also.stride()
        kinds, values, flags, objects[1], orders, facts[0].eps.item(), facts[1].max, facts[2].max
        """,
    ),
    "objects that answer to every name, and registries of metaclasses": (
        [
            """
            class EasyDict(dict):
                __getattr__ = dict.__getitem__

                def __call__(self):
                    return len(self)

            class Singleton(type):
                instances = {}

                def __call__(cls):
                    if cls not in Singleton.instances:
                        Singleton.instances[cls] = super().__call__()
                    return Singleton.instances[cls]

            class Settings(metaclass=Singleton):
                settings = EasyDict(a=1)

                def __init__(self):
                    self.values = {}
            """,
            "cfg = EasyDict(lr=0.1)\nSettings().values['a'] = 1",
        ],
        "cfg.lr, cfg(), Settings().values, Settings() is Settings(), Settings.settings.a",
    ),
    "names that only running the cell shows": (
        [],
        "exec('four = 4')\nx = four + rank  # noqa: F821\nx, 'x' in locals(), eval('x + 1')",
    ),
    "gradients and hooks": (
        [
            "import torch\nfrom functools import lru_cache",
            """
            net = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            steps = []
            optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            net(torch.ones(2)).backward()
            limited = torch.nn.Parameter(torch.ones(2))
            limited.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            made_by_call = lru_cache(maxsize=2)(lambda x: x + 1)
            """,
        ],
        """
        before = net.weight.detach().clone()
        optimizer.step()
        schedule.step()
        (limited * 100).sum().backward()
        (net.weight - before).tolist(), limited.grad.tolist(), made_by_call(1), steps, schedule.get_last_lr()
        """,
    ),
    "the notebook's own open": (
        ["from gzip import open", "def exit():\n    return 'mine'"],
        "open.__module__, exit()",
    ),
    "things without source": (
        [
            "operations = {'double': lambda value: 2 * value, 'sum': sum}",
            "exec('def made(value): return value + 1')",
            """
            import functools
            half = functools.partial(pow, 0.5)
            twice = operations["double"]
            def old():
                return "old"
            """,
            "before = old\ndef old():\n    return before() + 'er'",
            "def louder(function):\n    return lambda: function().upper()",
            "def word():\n    return 'word'",
            "word = louder(word)",
            "class Patched:\n    def go(self):\n        return 1",
            "Patched.go = lambda self: 2\npatched = Patched()",
        ],
        """
        total = operations["sum"]([1, 2])
        same = twice is operations["double"]
        operations["double"](rank), total, made(rank), half(2), same, old(), word(), patched.go()
        """,
    ),
}


IN_CI = {
    *(
        "a collective",
        "functions and classes of other cells",
        "arrays and tensors as they are",
        "IPython's own",
    ),
    *("functions that have changed since", "classes that have changed since", "gradients and hooks"),
    "decorators with a state",
    *("names that only running the cell shows", "things without source"),
}
"""CI also runs the programs of `tests/ranks/differential` as exported scripts."""

UNDER_TORCHRUN = ("a training with DDP", "gradients and hooks")
"""The others run as scripts of nblaunch: tests/programs/test_torchrun_parity.py compares the two."""


@pytest.mark.parametrize("name", [each if each in IN_CI else slow(each) for each in ROUND_TRIPS])
def test_a_script_gives_each_rank_the_value_that_the_cell_gave(kernel, there, name):
    notebook, cell = ROUND_TRIPS[name]
    for each in notebook:
        kernel.ok(each)
    body = "\n".join(tidy_lines(cell))
    kernel.ok(f"%%distributed -n {RANKS} --out res\n{body}")
    expected = kernel.value("[repr(value) for value in res]")
    shown = kernel.ok("%distributed export train.py")
    assert "torchrun --standalone --nproc-per-node 2 train.py" in shown.result
    text = tidy_script(there / "train.py")
    launch = torchrun if name in UNDER_TORCHRUN else run_script
    assert launch(there / "train.py") == [[value] for value in expected], text


def tidy_lines(code: str) -> list[str]:
    """Return the lines of a cell without the margin of its first one; what is in a text keeps its place."""
    lines = code.strip("\n").rstrip(" ").split("\n")
    margin = len(lines[0]) - len(lines[0].lstrip())
    return [line[margin:] if not line[:margin].strip() else line for line in lines]


def test_what_shares_memory_in_the_notebook_shares_it_in_the_script(kernel, there):
    for each in (
        "import numpy as np\nimport torch",
        "whole = torch.zeros(4)\npart = whole[1:3]\nagain = whole",
        "X = np.arange(6.0)\ntrain, test = X[:4], X[4:]",
        "columns = np.ones((2, 3), order='F')\nfirst = columns[:, 0]",
        "array = np.arange(4.0)\ntensor = torch.from_numpy(array)",
        "ones = torch.ones(3000)\nview = ones.numpy()[5:]",
        "settings = {'lr': 1}\nholder = [lambda: settings, settings, array]",
        "np.zeros(4).tofile('mapped.bin')\nmapped = np.memmap('mapped.bin', mode='r+', dtype='float64')",
    ):
        kernel.ok(each)
    cell = """
part += 1
X += 10
first += 5
array[0] = 7
ones += 1
settings["lr"] = 2
mapped[0] = 3
mapped.flush()
on_disk = np.fromfile("mapped.bin").tolist()
arrays = train.tolist(), test.tolist(), columns.tolist(), float(view.sum()), on_disk
whole.tolist(), arrays, tensor.tolist(), holder[1], holder[0]() is settings, holder[2].tolist()
"""
    kernel.ok(f"%%distributed -n {RANKS}\n{cell}")
    kernel.ok("%distributed export train.py")
    expected = kernel.ok(cell).result
    printed_by_ranks = run_script(there / "train.py")
    assert [[ast.literal_eval(each) for each in rank] for rank in printed_by_ranks] == [
        [ast.literal_eval(expected)]
    ] * RANKS


# What is written


def exported(kernel, cell: str, *setup: str, line: str = "-n 2") -> str:
    """Run a cell, export it, and return the script."""
    for each in setup:
        kernel.ok(each)
    kernel.ok(f"%%distributed {line}\n{cell}")
    kernel.ok("%distributed export train.py")
    return str(kernel.value("__import__('pathlib').Path('train.py').read_text()"))


def test_the_page_about_cells_shows_the_script_of_the_readme_s_cell(kernel, there):
    root = Path(__file__).parents[2]
    page = (root / "notebooks" / "docs" / "cells.md").read_text()
    readme, blocks = (
        re.findall(r"^```python\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL)
        for text in ((root / "README.md").read_text(), page)
    )
    setup, cell = readme[:2]
    kernel.ok(setup)
    kernel.ok(cell)
    shown = kernel.ok("%distributed export train.py").result
    assert f"```text\n{shown}\n```" in page
    written = (there / "train.py").read_text()
    told = next(block for block in blocks if "exported from a notebook" in block)
    assert re.sub(r"In\[\d+\]", "In[2]", written) == f"{told}\n"


@pytest.mark.usefixtures("there")
def test_a_script_reads_as_if_somebody_had_written_it(kernel, tmp_path):
    text = exported(
        kernel,
        "t = torch.ones(1) * scale\ndist.all_reduce(t)\n# How much is it?\nt.item()",
        "import torch\nimport torch.distributed as dist\nscale = 10",
    )
    (number,) = re.findall(r"In\[(\d+)\]", text)
    assert (
        text
        == f'''"""In[{number}], exported from a notebook by nblaunch.

torchrun --standalone --nproc-per-node 2 train.py
"""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])

scale = 10


def main() -> None:
    dist.init_process_group("gloo")

    t = torch.ones(1) * scale
    dist.all_reduce(t)
    # How much is it?
    print(f"[rank {{rank}}] {{t.item()!r}}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
    )
    formatted = [sys.executable, "-m", "ruff", "format", "--isolated", "--check", str(tmp_path / "train.py")]
    assert subprocess.run(formatted, capture_output=True, check=False).returncode == 0


@pytest.mark.usefixtures("there")
def test_a_cell_that_forms_its_own_group_is_left_to_it(kernel):
    cell = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.get_rank()"
    text = exported(kernel, cell)
    assert text.count("init_process_group") == 1
    assert text.count("destroy_process_group()") == 1
    assert "process_group" not in exported(kernel, "rank", line="-n 2 --no-init")


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("end", ["x;", "x = 2"])
def test_what_shows_no_value_in_the_notebook_prints_none(kernel, end):
    assert "[rank" not in exported(kernel, f"x = 1\n{end}")


def test_a_cell_that_defines_main_keeps_it(kernel, there):
    text = exported(kernel, "def main():\n    return rank\n\nmain()")
    assert "def main():" in text
    assert "def main_() -> None:" in text
    assert run_script(there / "train.py") == [["0"], ["1"]]


def test_variables_that_functions_of_the_notebook_use_are_the_modules(kernel, there):
    text = exported(kernel, "total: int = 5 + rank\nshow()", "def show():\n    return total")
    assert "    global total\n" in text
    assert run_script(there / "train.py") == [["5"], ["6"]]


def test_an_environment_that_is_set_before_an_import_stays_before_it(kernel, there):
    (there / "reads_switch.py").write_text("import os\nswitch = os.environ.get('A_SWITCH')\n")
    kernel.ok(f"import sys\nsys.path.insert(0, {str(there)!r})")
    text = exported(
        kernel, "import os\nos.environ['A_SWITCH'] = 'on'\nimport reads_switch\nreads_switch.switch"
    )
    assert "    import reads_switch\n" in text
    assert run_script(there / "train.py") == [["'on'"]] * 2


def test_the_same_notebook_gives_the_same_bytes(kernel, there):
    setup = "import torch, numpy as np\nbig = torch.ones(5000)\narr = np.ones(5000)\n"
    setup += "word = {'c', 'a', 'b'}\nobj = [big]"
    first = exported(kernel, "big, arr, word, obj\n1", setup)
    files = {path.name: path.read_bytes() for path in (there / "train_data").iterdir()}
    assert set(files) == {"arr.npy", "objects.pt"}, "big and obj share memory"
    kernel.ok("%distributed export train.py")
    assert (there / "train.py").read_text() == first
    assert {path.name: path.read_bytes() for path in (there / "train_data").iterdir()} == files


def test_what_an_earlier_export_saved_goes_with_it(kernel, there):
    exported(kernel, "big.sum().item()", "import torch\nbig = torch.ones(5000)")
    assert [path.name for path in (there / "train_data").iterdir()] == ["big.safetensors"]
    (there / "train_data" / "mine.txt").touch()
    kernel.ok("big = 3")
    kernel.ok("%%distributed -n 2\nbig + rank")
    kernel.ok("%distributed export train.py")
    assert [path.name for path in (there / "train_data").iterdir()] == ["mine.txt"]


def test_a_file_that_is_not_an_exports_is_never_overwritten_unasked(kernel, there):
    mine = there / "train.py"
    mine.write_text("# exported from a notebook by nblaunch, I say\nprint('mine')\n")
    kernel.ok("import torch\nbig = torch.ones(5000)")
    kernel.ok("%%distributed -n 2\nbig.sum().item()")
    refused = kernel.fails("%distributed export train.py")
    assert (refused.ename, mine.read_text().splitlines()[1]) == ("NblaunchError", "print('mine')")
    assert "--force train.py" in refused.evalue
    kernel.ok("%distributed export --force train.py")
    assert mine.read_text().startswith('"""In[')
    (there / "other_data").mkdir()
    (there / "other_data" / "big.safetensors").write_text("mine")
    assert "other_data/big.safetensors" in kernel.fails("%distributed export other.py").evalue
    assert not (there / "other.py").exists()
    assert (there / "other_data" / "big.safetensors").read_text() == "mine"


def test_a_module_of_the_notebooks_directory_is_told_to_a_script_elsewhere(kernel, there):
    (there / "my_layers.py").write_text("depth = 3\n")
    (there / "runs").mkdir()
    kernel.ok(f"import sys\nsys.path.insert(0, {str(there)!r})\nimport my_layers")
    kernel.ok("%%distributed -n 2\nmy_layers.depth")
    assert "my_layers" not in kernel.ok("%distributed export train.py").result
    said = kernel.ok("%distributed export runs/train.py").result
    assert f"It imports my_layers of the notebook's directory: set PYTHONPATH to {there}." in said
    kernel.ok("sys.path.pop(0)")


# Errors


WRONG_LINES = {
    "": "was given no file, but it writes one",
    "a.py b.py": "was given 2 files, but it writes one",
    "train.txt": "'train.txt' was asked for, but it takes the path of a file whose name ends in .py",
    "--cells x train.py": "--cells 'x' was asked for, but it takes numbers of cells",
    "--cells 0-99999 train.py": "--cells has 0, but the notebook has run no In[0]",
    "--overwrite train.py": "was given '--overwrite', but there is no such option",
    "nowhere/train.py": "there is no directory nowhere",
    ".py": "takes the path of a file",
}


def test_a_wrong_line_says_what_is_wrong(kernel, there):
    kernel.ok("%%distributed -n 2\nrank")
    for line, message in WRONG_LINES.items():
        assert message in kernel.fails(f"%distributed export {line}").evalue
    assert list(there.glob("*.py")) == []


def test_without_a_distributed_cell_there_is_nothing_to_export(start_kernel):
    kernel = start_kernel()
    assert "none has been run" in kernel.fails("%distributed export train.py").evalue
    kernel.ok("%%distributed -n 2\nrank")
    number = kernel.value(
        "max(int(name[2:]) for name in globals() if name[2:].isdigit() and name[:2] == '_i')"
    )
    refused = kernel.fails(f"%distributed export --cells {number - 1} train.py").evalue
    assert f"There are {number}" in refused


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("line", ["files = !ls", "print(get_ipython())"])
def test_what_only_ipython_understands_is_refused_with_its_line(kernel, line):
    kernel.ok("word = 'x'")
    kernel.ok(f"%%distributed -n 2\nx = 1\n{line}\nrank;")
    refused = kernel.fails("%distributed export train.py")
    assert refused.ename == "NblaunchError"
    assert "its line 2 is IPython's own" in refused.evalue
    assert repr(line) in refused.evalue


def test_what_can_neither_be_written_nor_saved_is_named(kernel, there):
    kernel.ok("things = None")
    kernel.ok("%%distributed -n 2\nrank or things")
    kernel.ok("import threading\nthings = {'lock': [threading.Lock()]}")
    refused = kernel.fails("%distributed export train.py")
    assert refused.ename == "NblaunchError"
    assert refused.evalue.startswith("things['lock'][0]: ")
    assert "Make it in the cell" in refused.evalue
    kernel.ok("%%distributed -n 2\ndef never():\n    return things2\nrank")
    kernel.ok("things2 = things")
    assert (
        "Left out, since the cell may never use what cannot be saved: things2."
        in kernel.ok("%distributed export train.py").result
    )
    assert list(there.glob("train_data")) == []


@pytest.mark.usefixtures("there")
def test_a_definition_that_can_neither_be_made_nor_saved_as_it_is_is_refused_by_name(kernel):
    kernel.ok("import threading\n\nclass Net:\n    size = 1\n\nNet.lock = threading.Lock()")
    kernel.ok("%%distributed -n 2\n'Net' if rank < 0 else 1\ndef never():\n    return Net\nNone")
    assert "may never use what cannot be saved: Net.lock" in kernel.ok("%distributed export train.py").result
    kernel.ok("Net.lock = None")
    kernel.ok("%%distributed -n 2\nNet.size")
    kernel.ok("Net.lock = threading.Lock()")
    refused = kernel.fails("%distributed export --force train.py")
    assert refused.ename == "NblaunchError"
    assert refused.evalue.startswith("Net.lock: ")
    assert "lock" in refused.evalue
    kernel.ok("%%distributed -n 2\nimport asyncio\nawait asyncio.sleep(0)\nexec('x = 1')\nx")
    assert "uses `await`" in kernel.fails("%distributed export --force train.py").evalue


# Several cells, and sessions


def numbered(kernel, cell: str) -> int:
    """Run a cell and return its number."""
    kernel.ok(cell)
    return int(kernel.value("get_ipython().execution_count")) - 1


def test_a_range_of_cells_is_written_in_order_plain_ones_as_they_are(kernel, there):
    first = numbered(kernel, "import math\n%matplotlib inline\nstart = 2  # a beginning\nmath.pi")
    numbered(kernel, "%%distributed -n 2\nimport math\nup = start + rank\nup")
    numbered(kernel, "def later(n):\n    return math.floor(n) + start")
    last = numbered(kernel, "%%distributed -n 2 --max-restarts 1\nlater(1.5)")
    shown = kernel.ok(f"%distributed export --cells {first}-{last} train.py").result
    assert "torchrun --standalone --nproc-per-node 2 --max-restarts 1 train.py" in shown
    text = tidy_script(there / "train.py")
    assert "    start = 2  # a beginning\n" in text
    assert text.count("import math") == 1
    assert run_script(there / "train.py") == [["2", "3"], ["3", "3"]]


@pytest.mark.usefixtures("there")
def test_cells_on_different_numbers_of_ranks_are_no_one_script(kernel):
    first = numbered(kernel, "%%distributed -n 2\nrank")
    second = numbered(kernel, "%%distributed -n 1\nrank")
    refused = kernel.fails(f"%distributed export --cells {first},{second} train.py").evalue
    assert f"In[{first}] on 2, In[{second}] on 1 ranks" in refused


def test_variables_of_a_sessions_ranks_are_exported_with_the_cells_that_made_them(kernel, there):
    kernel.ok("%distributed start -n 2 --role trainer")
    try:
        kernel.ok("factor = 3")
        made = numbered(kernel, "%%distributed\nmodel = {'w': rank * factor}")
        used = numbered(kernel, "%%distributed --timeout 50\nmodel['w'] + 1")
        refused = kernel.fails("%distributed export train.py").evalue
        assert f"model (made in In[{made}])" in refused
        assert refused.endswith(f"--cells {made},{used}")
        shown = kernel.ok(f"%distributed export --cells {made},{used} train.py").result
        assert shown.splitlines()[-2:] == [
            "# torchrun has no --timeout (50.0)",
            "torchrun --standalone --nproc-per-node 2 --role trainer train.py",
        ]
        assert run_script(there / "train.py") == [["1"], ["4"]]
    finally:
        kernel.ok("%distributed stop")


@pytest.mark.slow
def test_terminal_ipython_exports_as_a_notebook_does(terminal, tmp_path):
    cells = [
        "%load_ext nblaunch",
        "x = = 1",
        "def three():\n    return 3",
        "%%distributed -n 2\nthree() + rank",
        "%distributed export train.py",
    ]
    ran = terminal(cells)
    assert "torchrun --standalone --nproc-per-node 2 train.py" in ran.stdout
    assert "def three():\n    return 3\n" in tidy_script(tmp_path / "train.py")


# The option


def test_the_option_writes_the_script_beside_running_the_cell(kernel, there):
    ran = kernel.ok("%%distributed -n 2 --export train.py --out res --env A_B='c d' --log-dir logs\nrank + 1")
    command = "A_B='c d' torchrun --standalone --nproc-per-node 2 --log-dir logs train.py"
    assert ran.stdout.splitlines()[:2] == ["train.py is written. It runs with:", command]
    assert kernel.value("res.values") == [1, 2]
    assert command in (there / "train.py").read_text()
    assert run_script(there / "train.py") == [["1"], ["2"]]


def test_a_script_that_cannot_be_written_is_said_before_the_cell_runs(kernel, there):
    (there / "train.py").write_text("mine")
    kernel.ok("res = None")
    assert "--force" in kernel.fails("%%distributed -n 2 --export train.py --out res\nrank").evalue
    assert kernel.value("res") is None


@pytest.mark.quick
def test_completion_offers_what_the_command_takes() -> None:
    assert command_completions("%distributed exp") == ["export"]
    assert command_completions("%distributed export --") == ["--cells", "--force"]


@pytest.mark.usefixtures("there")
def test_a_session_is_not_started_with_it(kernel):
    assert "is for a cell" in kernel.fails("%distributed start -n 2 --export train.py").evalue


def test_a_script_that_logs_counts_steps_and_compares_runs_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n\nimport torch\nimport torch.distributed as dist\n\nimport nblaunch\n\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "steps = [nblaunch.step() for _ in range(3)]\n"
        "nblaunch.log(loss=0.5)\n"
        "found = nblaunch.diff(torch.arange(4) + (rank == 1), 'x')\n"
        "print(f'[rank {rank}]', steps, str(found).splitlines()[0])\n"
        "dist.destroy_process_group()\n"
    )
    said = "[0, 1, 2] x: x[0]: values differ. ranks 0-1 differ"
    assert torchrun(script, without="") == [[said], [said]]
