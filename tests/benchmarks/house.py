"""What the package is made of, and what a cell goes through, counted.

    python tests/benchmarks/house.py [--journeys] [CHECKOUT]

Counts lines, files, classes and fields of a checkout, this one by default. With `--journeys` it runs a cell
of a session on one rank, one that is interrupted, and one that returns 64 MB, and counts for each in which
modules a function was called, in how many threads of all processes, and how often the next call of a
function of ours was in another thread than the one before: the least of `REPEATS` cells, as threads that
work side by side add to it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPEATS = 7
WORDS = ("Job", "Session", "Node", "Rank")
FIELDS = ("grace", "env", "backend")
DECIDING = ("elastic", "host", "group", "nodes", "runtime", "client")
"""The packages for which the redesign has a budget."""

NOTING = """
import mmap, os, sys, threading

shared = memoryview(mmap.mmap(os.open(os.environ["HOUSE_SHARED"], os.O_RDWR), 4096)).cast("Q")
package, found = os.environ["HOUSE_PACKAGE"], os.environ["HOUSE_FOUND"]
seen = {}

def note(frame, event, _):
    number = shared[0]
    if not number or event != "call" or not frame.f_code.co_filename.startswith(package):
        return
    thread = threading.get_native_id()
    if shared[1] != thread:
        shared[1] = thread
        shared[2] += 1
    key = os.getpid(), thread, frame.f_code.co_filename
    if seen.get(key) != number:
        seen[key] = number
        fd = os.open(found, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{number} {' '.join(map(str, key))}\\n".encode())
        os.close(fd)

sys.setprofile(note)
threading.setprofile(note)
"""
"""`sitecustomize.py` of every Python that is started: it notes calls while a cell has a number."""

CELLS = {
    "a cell": "rank + 1",
    "an interrupt": "import time; time.sleep(60)",
    "64 MB": "__import__('numpy').zeros(8 << 20)",
}

JOURNEYS = """
import mmap, os, signal, sys, threading, time
from IPython.core.interactiveshell import InteractiveShell

shared = memoryview(mmap.mmap(os.open(os.environ["HOUSE_SHARED"], os.O_RDWR), 4096)).cast("Q")
shell = InteractiveShell.instance()
for line in ("%load_ext nblaunch", "%distributed start -n 1"):
    shell.run_cell(line).raise_error()
number = 0
for cell in {cells!r}:
    for repeat in range({repeats} + 1):
        stops = "sleep" in cell
        number += 1
        if stops:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Timer(0.9, shared.__setitem__, (0, number)).start()
        if repeat and not stops:
            shared[2], shared[0] = 0, number
        result = shell.run_cell("%%distributed\\n" + cell)
        print(number, shared[2], file=sys.stderr)
        shared[0] = shared[2] = 0
        assert result.success is not stops, cell
        time.sleep(0.3)
shell.run_cell("%distributed stop").raise_error()
"""


def sources(checkout: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((checkout / "nblaunch").rglob("*.py")):
        yield path.relative_to(checkout / "nblaunch"), ast.parse(path.read_text())


def count(checkout: Path) -> None:
    """Print what a checkout is made of."""
    lines: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    named: collections.Counter[str] = collections.Counter()
    fields: collections.Counter[str] = collections.Counter()
    classes: list[tuple[int, str]] = []
    for path, tree in sources(checkout):
        package = path.parts[0] if len(path.parts) > 1 else "(top level)"
        lines[package] += len((checkout / "nblaunch" / path).read_text().splitlines())
        files[package] += 1
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            named.update(word for word in WORDS if word in node.name)
            fields.update(name for name in fields_of(node) if name in FIELDS)
            methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
            classes.append((methods, f"{path}:{node.name}"))
    for package in lines:
        print(f"{package:<12} {lines[package]:>6} lines {files[package]:>4} files")
    deciding = (sum(counted[each] for each in DECIDING) for counted in (lines, files))
    print("{}: {} lines, {} files".format(" + ".join(DECIDING), *deciding))
    print(f"Python: {lines.total()} lines, {files.total()} files")
    web = {
        each: len((checkout / "nblaunch" / "view" / each).read_text().splitlines())
        for each in ("panel.js", "panel.css")
    }
    print(", ".join(f"{name}: {each} lines" for name, each in web.items()))
    print("classes named:", ", ".join(f"{word} {named[word]}" for word in WORDS))
    print("fields named:", ", ".join(f"{name} {fields[name]}" for name in FIELDS))
    methods, largest = max(classes)
    print(f"largest class: {largest}, {methods} methods")


def fields_of(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def travel(checkout: Path) -> None:
    """Run the cells, and print what each went through."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        shared, found = directory / "shared", directory / "found"
        shared.write_bytes(bytes(mmap.PAGESIZE))
        found.touch()
        (directory / "sitecustomize.py").write_text(NOTING)
        environ = {
            **os.environ,
            "PYTHONPATH": f"{directory}{os.pathsep}{checkout}",
            "HOUSE_SHARED": str(shared),
            "HOUSE_FOUND": str(found),
            "HOUSE_PACKAGE": f"{checkout}{os.sep}nblaunch{os.sep}",
            "NBLAUNCH_DISPLAY": "text",
            "NBLAUNCH_STANDBY": "0",
        }
        program = JOURNEYS.format(cells=tuple(CELLS.values()), repeats=REPEATS)
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=environ,
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise SystemExit(ran.stdout + ran.stderr)
        counted = (line.split() for line in ran.stderr.splitlines() if line.count(" ") == 1)
        changes = {int(number): int(changed) for number, changed in counted}
        calls = [line.split() for line in found.read_text().splitlines()]
    for place, cell in enumerate(CELLS):
        repeated = range(place * (REPEATS + 1) + 2, (place + 1) * (REPEATS + 1) + 1)
        report(
            cell,
            [call for call in calls if int(call[0]) in repeated],
            min(changes[each] for each in repeated),
            checkout,
        )


PROCESSES = {"rank": "rank/main.py", "runtime": "runtime/requests.py", "kernel": "client/line.py"}
"""By what they alone run."""


def report(cell: str, calls: list[list[str]], changes: int, checkout: Path) -> None:
    modules: dict[str, set[str]] = collections.defaultdict(set)
    threads: dict[str, set[str]] = collections.defaultdict(set)
    for number, pid, thread, file in calls:
        modules[pid].add(str(Path(file).relative_to(checkout / "nblaunch")))
        threads[number].add(thread)
    all_modules, least = set().union(*modules.values()), min(map(len, threads.values()))
    print(f"{cell}: {len(all_modules)} modules, {least} threads, {changes} changes of thread")
    for process, own in PROCESSES.items():
        print(f"  {process}:", *(len(each) for each in modules.values() if own in each), "modules")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--journeys", action="store_true", help="also run the cells")
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parsed = parser.parse_args()
    count(parsed.checkout.resolve())
    if parsed.journeys:
        travel(parsed.checkout.resolve())
