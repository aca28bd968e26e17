"""The layout is the architecture: a module imports only what stands below it in `LAYERS`."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nblaunch"

LAYERS = (
    *("data", "options", "protocol", "results", "capture", "rank", "elastic", "diagnose", "checks"),
    *("group", "nodes", "view", "export", "magic", "door"),
)
"""Lowest first. `data` is every top-level module but `_results` and the doors; the others are folders."""

DOORS = {"nblaunch", "nblaunch.__main__", "nblaunch._api", "nblaunch._demo"}
"""Where users come in; these may import anything, `nblaunch` itself only inside functions."""

THIRD_PARTY = {
    "data": {"msgspec"},
    "options": set(),
    "protocol": set(),
    "capture": {"cloudpickle", "numpy", "psutil", "safetensors", "torch"},
    "rank": {"IPython", "msgspec", "torch", "traitlets", "zmq"},
}
"""What the lowest layers may import from outside, over and above the layers below them."""

MOST_LINES = 60
"""Of a function; how many branches it may have is C901's, in pyproject.toml."""


@dataclass(frozen=True)
class Import:
    """One import statement: `importer` loads `imported` at `line`."""

    importer: str
    imported: str
    line: int
    lazy: bool
    only_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    if module in DOORS:
        return "door"
    name = module.split(".")[1]
    if name == "_results":
        return "results"
    return "data" if name.startswith("_") else name


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(path: Path) -> Iterator[Import]:
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, *, lazy: bool, only_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, lazy, only_types)
        elif isinstance(node, ast.ImportFrom):
            for name in imported_by(node, package):
                yield Import(module, name, node.lineno, lazy, only_types)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        only_types = only_types or is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy=lazy, only_types=only_types)

    yield from visit(ast.parse(path.read_text()), lazy=False, only_types=False)


def imported_by(node: ast.ImportFrom, package: str) -> Iterator[str]:
    """Return the modules; `from nblaunch import rank` and `from . import rank` name `nblaunch.rank`."""
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield inner if base.split(".")[0] == "nblaunch" and exists(inner) else base


def exists(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


MODULES = sorted(PACKAGE.rglob("*.py"))
IMPORTS = [each for path in MODULES for each in imports_of(path)]
OURS = [each for each in IMPORTS if each.imported.split(".")[0] == "nblaunch"]


def test_every_module_stands_in_a_layer():
    assert {layer_of(module_name(path)) for path in MODULES} <= set(LAYERS)


def test_no_module_imports_upwards():
    """Imports for annotations alone count too: a type is knowledge."""
    upwards = [
        str(each)
        for each in OURS
        if LAYERS.index(layer_of(each.imported)) > LAYERS.index(layer_of(each.importer))
        # Errors carry results, whose types only annotations name.
        and not (each.only_types and each.importer == "nblaunch._errors")
    ]
    assert upwards == []


def test_no_modules_import_one_another():
    """So every folder has an order, too, in which its modules can be read."""
    loads: dict[str, set[str]] = {}
    for each in OURS:
        if not each.only_types and each.imported not in {each.importer, "nblaunch"}:
            loads.setdefault(each.importer, set()).add(each.imported)
    graphlib.TopologicalSorter(loads).prepare()  # raises CycleError, which names the circle


def test_what_runs_in_a_rank_never_imports_what_runs_in_the_kernel():
    kernel = set(LAYERS[LAYERS.index("rank") + 1 :])
    below = [each for each in OURS if layer_of(each.importer) not in kernel]
    assert [str(each) for each in below if layer_of(each.imported) in kernel] == []


def test_the_lowest_layers_import_little_from_outside():
    allowed = {"nblaunch", *sys.stdlib_module_names}
    outside = []
    for layer, more in THIRD_PARTY.items():
        allowed |= more
        outside += [
            str(each)
            for each in IMPORTS
            if layer_of(each.importer) == layer and each.imported.split(".")[0] not in allowed
        ]
    assert outside == []


def test_only_the_view_draws_with_widgets():
    widgets = {"anywidget", "ipywidgets"}
    drawing = {each.importer for each in IMPORTS if each.imported.split(".")[0] in widgets}
    assert {layer_of(module) for module in drawing} <= {"view"}


def test_the_front_door_imports_upper_layers_only_when_they_are_used():
    eager = [
        str(each)
        for each in OURS
        if each.importer == "nblaunch"
        and not (each.lazy or each.only_types)
        and layer_of(each.imported) != "data"
    ]
    assert eager == []


def test_no_function_is_too_long_to_read():
    functions = {
        f"{module_name(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in functions.items() if lines > MOST_LINES} == {}


# --- The docstring of a package is its theory of operation, and the order in which to read its modules.

PACKAGES = {path.parent.name: path for path in PACKAGE.glob("*/__init__.py")}


def theory_of(package: str) -> str:
    return ast.get_docstring(ast.parse(PACKAGES[package].read_text())) or ""


def reading_order(package: str) -> list[str]:
    """Return the modules that the docstring lists, in its order."""
    _, _, listed = theory_of(package).partition("\nModules, each after those that it imports:\n")
    return re.findall(r"^ {4}(\w+) ", listed, flags=re.MULTILINE)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_says_in_ten_to_sixty_lines_how_it_works(package):
    assert 10 <= len(theory_of(package).splitlines()) <= 60


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_names_each_of_its_modules_once(package):
    modules = {path.stem for path in PACKAGES[package].parent.glob("*.py")} - {"__init__"}
    assert sorted(reading_order(package)) == sorted(modules)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_module_imports_only_those_that_its_package_names_before_it(package):
    place = {f"nblaunch.{package}.{module}": at for at, module in enumerate(reading_order(package))}
    too_early = [
        str(each)
        for each in OURS
        if not each.only_types
        and each.importer in place
        and place.get(each.imported, -1) > place[each.importer]
    ]
    assert too_early == []


def test_contributing_has_the_map_and_names_rooms_that_are_there():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    drawn = re.findall(r"^([a-z]+|_results)  +\S", text, flags=re.MULTILINE)
    assert [name.strip("_") for name in drawn] == [name for name in LAYERS if name not in {"data", "door"}]
    rooms = {name for name in re.findall(r"`(\w+/[\w.]+)`", text) if name.split("/")[0] in PACKAGES}
    assert len(rooms) > len(PACKAGES)
    assert [name for name in rooms if not (PACKAGE / name).is_file()] == []
    tests = re.findall(r"`((?:unit|ranks|programs)/\w+\.py)`", text)
    assert [name for name in tests if not (PACKAGE.parent / "tests" / name).is_file()] == []
