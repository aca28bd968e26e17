"""The same program in plain IPython, on fresh ranks, cell by cell in a session, and as an exported script.

The programs are in `differential/*.txt`, as text: `=== TITLE` begins one, `--- notebook` and `--- ranks`
begin its cells. Plain IPython runs them all in one notebook, and what it gives is what the ranks must give:
values, text, displays and exceptions, of both kinds of cells. A rank cell says which notices it gets, by
default none: `--- ranks; cfg was changed`. `--- push cfg` is `%distributed push cfg`. Lines below a title say

* `@ci`, or `@ci session`: CI runs this program, or does so by this door;
* `@doors session cell`: it goes through these doors only. Where a notebook cell is between two rank cells,
  that is the session, and the others take neighbouring rank cells as one;
* `@refused TEXT`: it cannot be exported, and the error says so.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from lanes import needs, slow

PROGRAMS = Path(__file__).parent / "differential"
DOORS = ("session", "cell", "script")
LIBRARIES = {"accelerate", "attrs", "lightning", "matplotlib", "pandas", "pydantic", "rich", "safetensors"}
LIBRARIES |= {"sklearn", "tenacity", "torchmetrics", "transformers"}
"""What a program may use that nblaunch and torch do not bring along."""


@dataclass(frozen=True)
class Cell:
    """A cell of a program; `notices` are the beginnings of those that its ranks get."""

    kind: Literal["notebook", "ranks", "push"]
    source: str
    notices: tuple[str, ...] = ()

    @property
    def on_ranks(self) -> bool:
        """Whether ranks run it."""
        return self.kind == "ranks"

    def followed_by(self, other: Cell) -> Cell:
        """Return both as one cell."""
        return Cell(self.kind, f"{self.source}\n{other.source}", self.notices + other.notices)


@dataclass(frozen=True)
class Program:
    """A notebook, and where it runs."""

    title: str
    cells: tuple[Cell, ...]
    doors: tuple[str, ...] = DOORS
    ci: tuple[str, ...] = ()
    refused: str = ""

    def marked(self, door: str) -> Any:
        """Return the program as a case of a test, in the lane that runs it by this door."""
        case = pytest.param(self, id=self.title)
        return case if door in self.ci else slow(case)

    def through(self, door: str) -> Program | None:
        """Return the program as this door takes it, None if it does not."""
        if door not in self.doors:
            return None
        if door == "session":
            return self
        cells: list[Cell] = []
        for cell in self.cells:
            if cells and cell.on_ranks and cells[-1].on_ranks:
                cells[-1] = cells[-1].followed_by(cell)
            else:
                cells.append(cell)
        alone = sum(cell.on_ranks for cell in cells) == 1
        return dataclasses.replace(self, cells=tuple(cells)) if alone else None


@dataclass(frozen=True)
class Outcome:
    """What came of a cell: its value's `repr`, its texts, its displays, its exception's type and message."""

    value: str = "None"
    stdout: str = ""
    stderr: str = ""
    displays: tuple[str, ...] = ()
    error: tuple[str, str] | None = None


def parsed(topic: str, text: str) -> Iterator[Program]:
    """Read the programs of a file, whose topic is the first word of their titles."""
    for part in text.split("\n=== ")[1:]:
        head, *bodies = f"{part}\n".split("\n--- ")
        title, *lines = head.strip().split("\n")
        said = dict(line.removeprefix("@").partition(" ")[::2] for line in lines)
        cells = []
        for body in bodies:
            first, _, source = body.partition("\n")
            kind, *notices = first.split("; ")
            if kind.startswith("push "):
                kind, source = kind.split(" ", 1)
            assert kind in {"notebook", "ranks", "push"}, (title, first)
            cells.append(Cell(cast("Any", kind), source.strip("\n"), tuple(notices)))
        given = {each: tuple(said.get(each, "").split()) or DOORS for each in {"doors", "ci"} & said.keys()}
        yield Program(f"{topic}: {title}", tuple(cells), refused=said.get("refused", ""), **given)


def every_program() -> list[Program]:
    """Return the programs of all files; no two have one title."""
    found = [
        each for path in sorted(PROGRAMS.glob("*.txt")) for each in parsed(path.stem, f"\n{path.read_text()}")
    ]
    titles = [each.title for each in found]
    assert len(set(titles)) == len(titles), sorted({each for each in titles if titles.count(each) > 1})
    return found


ALL = every_program()


def cases(door: str) -> list[Any]:
    """Return the programs that go through a door, as it takes them, each in its lane."""
    return [each.marked(door) for each in filter(None, (each.through(door) for each in ALL))]


class Notebook:
    """A kernel in a directory of its own, which runs programs one after the other."""

    def __init__(self, kernel: Any, directory: Path) -> None:
        self.kernel = kernel
        self.directory = directory
        directory.mkdir()
        kernel.ok(f"import os\nos.chdir({str(directory)!r})")

    def run(self, program: Program) -> list[Outcome]:
        """Run all cells of a program; return what came of each."""
        needs(*sorted(LIBRARIES.intersection(re.findall(r"\w+", str(program.cells)))))
        self.bare()
        return [getattr(self, cell.kind)(cell) for cell in program.cells]

    def notebook(self, cell: Cell) -> Outcome:
        """Run a cell in the notebook."""
        ran = self.kernel.run(cell.source)
        last = "get_ipython().user_ns['_oh'].get(get_ipython().execution_count - 1)"
        return Outcome(
            self.kernel.value(f"__import__('builtins').repr({last})"),
            ran.stdout,
            ran.stderr,
            tuple(each["text/plain"] for each in ran.displays),
            ran.error and (ran.error.ename, ran.error.evalue),
        )

    ranks = notebook

    def push(self, cell: Cell) -> Outcome:  # noqa: ARG002 - there is one notebook, and no copy
        """Do nothing."""
        return Outcome()

    def bare(self) -> None:
        """Begin anew: no variables, no files."""
        self.kernel.forget()
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


_REPORT = """
def of(result):
    failure = result.root_cause
    ranks = [result.ranks[failure.rank]] if failure else list(result.ranks)
    error = failure and [failure.type.rpartition(".")[2], failure.message]
    texts = [[shown.data["text/plain"] for shown in rank.displays] for rank in ranks]
    said = [[repr(rank.value), rank.stdout, rank.stderr, shown, error] for rank, shown in zip(ranks, texts)]
    return [list(result.warnings), [rank.rank for rank in ranks], said]
"""


class Ranks(Notebook):
    """A kernel whose rank cells run on ranks."""

    line = ""

    def __init__(self, kernel: Any, directory: Path) -> None:
        super().__init__(kernel, directory)
        # In a module, where the notebook's variables shadow nothing.
        module = "__import__('sys').modules.setdefault('outcome', type(__import__('sys'))('outcome'))"
        kernel.ok(f"exec({_REPORT!r}, vars({module}))")

    def ranks(self, cell: Cell) -> Outcome:
        """Run a cell on ranks."""
        ran = self.kernel.run(f"%%distributed {self.line} --out came\n{cell.source}")
        if not self.kernel.value("'came' in get_ipython().user_ns"):
            return Outcome(error=("nothing has run", str(ran.error and ran.error.evalue)))
        came, notices = self.came()
        if len(notices) != len(cell.notices) or not all(map(str.startswith, sorted(notices), cell.notices)):
            return Outcome(error=("other notices", "\n".join(notices)))
        return came

    def came(self, read: Callable[..., list[Any]] = lambda _, said: said) -> tuple[Outcome, list[str]]:
        """Return what came of a run, which must be the same on all ranks, or on the one that has failed."""
        notices, numbers, said = self.kernel.value("__import__('sys').modules['outcome'].of(came)")
        self.kernel.ok("del came")
        each = [
            Outcome(value, stdout, stderr, tuple(displays), error and tuple(error))
            for value, stdout, stderr, displays, error in map(read, numbers, said)
        ]
        if any(other != each[0] for other in each):
            return Outcome(error=("ranks differ", repr(each))), notices
        return each[0], notices


class Session(Ranks):
    """The rank cells of a program run in a session, whose ranks have no variables when it begins."""

    def __init__(self, kernel: Any, directory: Path) -> None:
        super().__init__(kernel, directory)
        kernel.ok("%distributed start -n 2")
        kernel.ok("%%distributed\nkept_by_the_tests = {*globals(), 'kept_by_the_tests'}")

    def push(self, cell: Cell) -> Outcome:
        """Push variables to the ranks."""
        self.kernel.ok(f"%distributed push {cell.source}")
        return Outcome()

    def bare(self) -> None:
        """Begin anew, also on the ranks."""
        super().bare()
        self.kernel.ok("%%distributed\n[globals().pop(each) for each in {*globals()} - kept_by_the_tests];")


class Fresh(Ranks):
    """The rank cell of a program runs on ranks of its own, and then once more, as an exported script."""

    line = "-n 2"
    script: Outcome

    def ranks(self, cell: Cell) -> Outcome:
        """Run a cell on ranks, export it, and run the script."""
        outcome = super().ranks(cell)
        self.script = self.exported()
        return outcome

    def exported(self) -> Outcome:
        """Export the last cell, and run the script."""
        ran = self.kernel.run("%distributed export script.py")
        if ran.error is not None:
            return Outcome(error=("not exported", ran.error.evalue))
        self.kernel.ok("came = __import__('nblaunch').run('script.py', nproc=2, check=False, display=False)")
        return self.came(_without_number)[0]


def _without_number(rank: int, said: list[Any]) -> list[Any]:
    """Take the value from what a script's rank has printed: it is what the last line says."""
    _, stdout, *others = said
    before, mark, value = stdout.rpartition(f"[rank {rank}] ")
    return [value.removesuffix("\n"), before, *others] if mark else ["None", stdout, *others]


class Door:
    """A notebook that has run programs: what came of each."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self._known: dict[tuple[Cell, ...], tuple[list[Outcome], Outcome | None]] = {}

    def __call__(self, program: Program) -> tuple[list[Outcome], Outcome | None]:
        """Return what comes of the program's cells, and of the script."""
        if program.cells not in self._known:
            ran = self.notebook.run(program)
            self._known[program.cells] = ran, getattr(self.notebook, "script", None)
        return self._known[program.cells]


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_the_module(leaves_nothing_after):
    with leaves_nothing_after():
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """Check nothing after each of so many programs: what they leave is still there after the last."""


@pytest.fixture(scope="module")
def kernel_of(kernels, nothing_left_by_the_module, tmp_path_factory):  # noqa: ARG001 - the order matters
    """Give `kernel_of(kind, class)`: a door, closed behind the last test."""
    started = []

    def opened(kind: type[Notebook], kernel_class: Any = kernels) -> Door:
        started.append(kernel_class())
        return Door(kind(started[-1], tmp_path_factory.mktemp(kind.__name__) / "here"))

    yield opened
    for kernel in started:
        kernel.close()


@pytest.fixture(scope="module")
def plain(kernel_of, kernels):
    return kernel_of(Notebook, type("Plain", (kernels,), {"FIRST_CELL": ""}))


@pytest.fixture(scope="module")
def session(kernel_of):
    return kernel_of(Session)


@pytest.fixture(scope="module")
def fresh(kernel_of):
    return kernel_of(Fresh)


@pytest.mark.parametrize("program", cases("session"))
def test_a_session_gives_what_plain_ipython_gives(program, plain, session):
    compare(program, plain(program)[0], session(program)[0])


@pytest.mark.parametrize("program", cases("cell"))
def test_a_cell_on_fresh_ranks_gives_what_plain_ipython_gives(program, plain, fresh):
    compare(program, plain(program)[0], fresh(program)[0])


@pytest.mark.parametrize("program", cases("script"))
def test_an_exported_script_gives_what_plain_ipython_gives(program, plain, fresh):
    script = fresh(program)[1]
    if program.refused:
        assert script.error[0] == "not exported"
        assert program.refused in script.error[1]
        return
    number = next(number for number, cell in enumerate(program.cells) if cell.on_ranks)
    compare(
        dataclasses.replace(program, cells=program.cells[number : number + 1]),
        plain(program)[0][number:][:1],
        [script],
    )


def compare(program, expected, came):
    """Fail with the first cell of a program whose outcome is another."""
    for number, (cell, left, right) in enumerate(zip(program.cells, expected, came, strict=True)):
        if left != right:
            lines = [
                f"cell {number}, {cell.kind}:",
                cell.source,
                f"plain IPython: {left}",
                f"here:          {right}",
            ]
            pytest.fail("\n".join(lines), pytrace=False)
