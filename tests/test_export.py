"""What leaves the notebook runs without it: cells become a script, torchrun gives what the cell gave."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")

RANKS = 2


def torchrun(path: Path, *options: str, env: dict[str, str] | None = None) -> str:
    """Run a script under real torchrun and return what its ranks printed."""
    logs = path.parent / "torchrun-logs"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")
    }
    # No hostname must be looked up; and what torchelastic leaves goes where the test's own files are.
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(path.parent), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*run, "--log-dir", str(logs), *options, path.name],
        cwd=path.parent,
        env=environment | (env or {}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    return ran.stdout


def values_printed(output: str) -> list[list[str]]:
    """Return the texts of each rank's values, in order."""
    found: list[list[str]] = [[] for _ in range(RANKS)]
    for line in output.splitlines():
        match = re.match(r"\[rank (\d+)\] (.*)", line)
        if match is not None:
            found[int(match[1])].append(match[2])
    return found


def tidy_script(path: Path) -> str:
    """Return a script's text; it must read as one, and know nothing of nblaunch."""
    text = path.read_text(encoding="utf-8")
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("nblaunch" in ast.unparse(node) for node in imported)
    assert "get_ipython" not in text
    # Imports are in order and used, every name is known; how the user has written the cell is the user's.
    rules = "F401,F811,F821,I,E401,E402,E9,W291,W293,W391,E301,E302,E303,E305,D200,D209,D403,PLW0127"
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--preview", "--select", rules, str(path)]
    checked = subprocess.run(check, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
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
    "arithmetic": ([], "x = 3\ny = x ** 2 + rank\ny, world_size, local_rank, str(device)"),
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
    "arrays and tensors": (
        [
            "import numpy as np\nimport torch",
            """
            torch.manual_seed(3)
            array = np.arange(3000).reshape(50, 60) * 0.5
            large = torch.randn(400, 300)
            weights = {"weight": torch.randn(20, 30), "bias": torch.arange(20), "a": torch.zeros(2, 2).bool()}
            small = torch.tensor([[1.5, 2.0], [0.1, -3.0]])
            few = np.array([1, 2, 3])
            part = large[3:5]
            """,
        ],
        """
        with torch.no_grad():
            part.zero_()   # a part of large: they share their memory
        out = large.double().sum() + rank
        checks = [array.sum(), out.item(), list(weights), weights["weight"].sum().item(), weights["a"].dtype]
        checks, small.tolist(), few.dtype, array.shape, array[1, 2:5].tolist()
        """,
    ),
    "settings and models": (
        [
            "from dataclasses import dataclass, field\nfrom pathlib import Path\nimport enum, torch\nfrom torch import nn",
            """
            class Mode(enum.Enum):
                TRAIN = 1
                TEST = 2

            @dataclass
            class Config:
                lr: float
                sizes: list[int] = field(default_factory=list)
                mode: Mode = Mode.TRAIN
                where: Path = Path("data")

            class Net(nn.Module):
                def __init__(self, config):
                    super().__init__()
                    self.config = config
                    self.layers = nn.ModuleList(nn.Linear(4, size) for size in config.sizes)

                def forward(self, x):
                    return sum(layer(x).sum() for layer in self.layers)
            """,
            """
            config = Config(1e-3, [2, 3], Mode.TEST)
            net = Net(config)
            optimizer = torch.optim.SGD(net.parameters(), lr=config.lr)
            """,
        ],
        """
        before = net(torch.ones(4))
        before.backward()
        optimizer.step()
        after = net(torch.ones(4))
        before.item(), after.item() != before.item(), config, isinstance(net.config, Config), net.config.mode is Mode.TEST
        """,
    ),
    "imports of all kinds": (
        [
            "import numpy as np, xml\nimport xml.etree.ElementTree\nfrom math import pi, floor as down",
            "import torch.nn.functional as F\nfrom collections import Counter, OrderedDict as Ordered\nimport os.path",
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
    "a DataLoader": (
        [
            "import torch\nfrom torch.utils.data import DataLoader, Dataset, DistributedSampler",
            """
            class Squares(Dataset):
                def __len__(self):
                    return 20

                def __getitem__(self, index):
                    return torch.tensor([index * index])
            """,
            "dataset = Squares()",
        ],
        """
        sampler = DistributedSampler(dataset, shuffle=False)
        loader = DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=1)
        [batch.flatten().tolist() for batch in loader]
        """,
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
    "await": (
        ["import asyncio", "async def later(value):\n    await asyncio.sleep(0)\n    return value"],
        "first = await later(rank)\nfirst, await later(1)",
    ),
    "IPython's own": (
        ["import time"],
        "%load_ext autoreload\n!echo from the shell > said-$$.txt\n%time x = 5\nif rank:\n    %time x += 1\nx",
    ),
}

@pytest.mark.parametrize("name", ROUND_TRIPS)
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
    assert values_printed(torchrun(there / "train.py")) == [[value] for value in expected], text


def tidy_lines(code: str) -> list[str]:
    """Return the lines of a cell without the margin of its first one; what is in a text keeps its place."""
    lines = code.strip("\n").rstrip(" ").split("\n")
    margin = len(lines[0]) - len(lines[0].lstrip())
    return [line[margin:] if not line[:margin].strip() else line for line in lines]
