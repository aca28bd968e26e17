"""Mutations of the package, chosen at random, and how many of them the tests catch.

    python tests/benchmarks/mutations.py map COVERAGE [TEST ...]    which test files run which lines
    python tests/benchmarks/mutations.py run COVERAGE [--count 200] [--seed 1] [--lane quick|ci]

`map` runs each test file by itself under coverage.py, in all of its processes, and adds what it finds to the
file COVERAGE; a file that is there already is left out. `run` changes one place of `nblaunch/` after the
other, runs the test files that reach its line, the quickest first, until one fails, and puts the place back:
one JSON line for each mutation, then the numbers. It changes this checkout, which must be clean, and takes
hours. A mutation is a comparison, a condition, a boolean, an operator or a number that is another one, a call
or an assignment that is left out, or a value that is not returned.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
LANES = {"quick": "not slow and not full", "ci": "not slow"}
SETTINGS = """
[run]
branch = false
source = {package}
parallel = true
data_file = {data}
patch = subprocess, fork, execv, _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""
COMPARED = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.BitOr: ("|", "&")}
SECONDS = 300
"""How long the tests of one file may take: a mutation may have them wait."""


@dataclass(frozen=True)
class Mutation:
    """A piece of a source file, from byte `start` to `end`, and what stands there instead."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str


class Places(ast.NodeVisitor):
    """Collects the mutations of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.found: list[Mutation] = []

    def _at(self, line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return self._starts[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _add(self, node: ast.expr | ast.stmt, kind: str, start: int, end: int, text: str) -> None:
        self.found.append(Mutation(self._path, node.lineno, kind, start, end, text))

    def _instead(self, node: ast.expr | ast.stmt, kind: str, text: str) -> None:
        self._add(node, kind, *self._span(node), text)

    def _between(self, kind: str, left: ast.expr, right: ast.expr, pair: tuple[str, str]) -> None:
        """Replace the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        words = pair[0].replace(" ", r"\s+")
        word = rf"\b{words}\b" if pair[0][0].isalpha() else re.escape(pair[0])
        found = re.search(word.encode(), self._source[start:end])
        if found:
            self._add(left, kind, start + found.start(), start + found.end(), pair[1])

    def visit_Compare(self, node: ast.Compare) -> None:
        self._between("comparison", node.left, node.comparators[0], COMPARED[type(node.ops[0])])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._between("boolean", node.values[0], node.values[1], pair)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        pair = OPERATORS.get(type(node.op))
        texts = any(isinstance(each, ast.JoinedStr) for each in (node.left, node.right))
        if pair is not None and not texts:
            self._between("operator", node.left, node.right, pair)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._instead(node, "constant", str(not node.value))
        elif isinstance(node.value, int | float):
            self._instead(node, "constant", f"({node.value!r} + 1)")

    def _condition(self, test: ast.expr) -> None:
        start, end = self._span(test)
        self._instead(test, "condition", f"(not ({self._source[start:end].decode()}))")

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._condition(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        # `while True` with its condition turned round would only leave the loop out, as another one does.
        if not isinstance(node.test, ast.Constant):
            self._condition(node.test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._instead(node, "call left out", "pass")
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets):
            self._instead(node, "assignment left out", "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._instead(node, "value not returned", "return None")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        # Annotations and decorators are no behaviour that a number or an operator would change.
        for each in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if each is not None:
                self.visit(each)


def mutations(checkout: Path) -> Iterator[Mutation]:
    """Yield every mutation of the package."""
    for path in sorted((checkout / "nblaunch").rglob("*.py")):
        source = path.read_bytes()
        places = Places(path.relative_to(checkout).as_posix(), source)
        places.visit(ast.parse(source))
        yield from places.found


def test_files() -> list[str]:
    """Return all test files that pytest runs by default or in CI."""
    kinds = ("unit", "ranks", "programs", "browser")
    return [
        path.relative_to(ROOT).as_posix()
        for kind in kinds
        for path in (ROOT / "tests" / kind).rglob("test_*.py")
    ]


def pytest(files: list[str], lane: str) -> int:
    """Run test files until a case fails; return pytest's exit status, 1 if they take too long."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        LANES[lane],
        *files,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=SECONDS * len(files),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode


def make_map(found: Path, files: list[str]) -> None:
    """Find out which test file runs which lines; written after each file."""
    known = json.loads(found.read_text()) if found.exists() else {}
    for file in files or test_files():
        if file in known:
            continue
        with tempfile.TemporaryDirectory() as directory:
            settings, data = Path(directory, "settings"), Path(directory, "data")
            settings.write_text(SETTINGS.format(package=ROOT / "nblaunch", data=data))
            began = time.monotonic()
            command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m"]
            lane = ["pytest", "-q", "-p", "no:cacheprovider", "-m", LANES["ci"], file]
            subprocess.run(
                [*command, *lane],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
                timeout=6 * SECONDS,
                check=False,
            )
            seconds = time.monotonic() - began
            collected = coverage.CoverageData(basename=str(data))
            for part in Path(directory).glob("data.*"):
                other = coverage.CoverageData(basename=str(part))
                other.read()
                collected.update(other)
            lines = {
                Path(each).relative_to(ROOT).as_posix(): sorted(collected.lines(each) or ())
                for each in collected.measured_files()
            }
        known[file] = {"seconds": round(seconds, 1), "lines": lines}
        found.write_text(json.dumps(known))
        print(f"{seconds:7.1f} s  {sum(map(len, lines.values())):6} lines  {file}", flush=True)


def run(found: Path, count: int, seed: int, lane: str) -> None:
    """Try `count` mutations; print each, and how many were caught."""
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "nblaunch"], cwd=ROOT, check=False).returncode:
        sys.exit("nblaunch/ has changes: commit them first")
    known = json.loads(found.read_text())
    places = list(mutations(ROOT))
    chosen = random.Random(seed).sample(places, count)
    caught = 0
    for each in chosen:
        reaching = [file for file, seen in known.items() if each.line in seen["lines"].get(each.path, ())]
        reaching.sort(key=lambda file: known[file]["seconds"])
        by = mutated(each, reaching, lane)
        caught += by != ""
        print(json.dumps({**asdict(each), "reached": len(reaching), "caught": by}), flush=True)
    print(f"{caught} of {count} mutations caught; {len(places)} places")


def mutated(mutation: Mutation, files: list[str], lane: str) -> str:
    """Return which test file fails with the mutation, "" if none does."""
    path = ROOT / mutation.path
    before = path.read_bytes()
    after = before[: mutation.start] + mutation.text.encode() + before[mutation.end :]
    compile(after, mutation.path, "exec")
    try:
        path.write_bytes(after)
        return next((file for file in files if pytest([file], lane) not in {0, 5}), "")
    finally:
        path.write_bytes(before)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    mapped = commands.add_parser("map")
    mapped.add_argument("coverage", type=Path)
    mapped.add_argument("tests", nargs="*")
    tried = commands.add_parser("run")
    tried.add_argument("coverage", type=Path)
    tried.add_argument("--count", type=int, default=200)
    tried.add_argument("--seed", type=int, default=1)
    tried.add_argument("--lane", choices=LANES, default="ci")
    given = parser.parse_args()
    if given.command == "map":
        make_map(given.coverage, given.tests)
    else:
        run(given.coverage, given.count, given.seed, given.lane)


if __name__ == "__main__":
    main()
