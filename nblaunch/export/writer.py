"""From cells to a script, in which nothing of nblaunch is left.

Imports come first, then what the cells use (constants, functions, classes, what is loaded from files beside
the script), then a main function with the cells themselves. The script runs under torchrun, and prints the
value of each cell as `[rank 0] value`.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from nblaunch._errors import NblaunchError
from nblaunch.capture.capture import RANK_NAMES
from nblaunch.capture.dataflow import args_of, scope_of
from nblaunch.capture.names import cell_names
from nblaunch.export.collect import Collected, CollectedItem, Collector
from nblaunch.export.files import Load
from nblaunch.export.imports import Import, as_statements, imports_in
from nblaunch.export.source import (
    Chunk,
    Definition,
    NotebookSource,
    chunks,
    indented,
    plain_python,
    printing_its_value,
    replaced,
    uses_await,
)

MARKER = "exported from a notebook by nblaunch"
"""In the docstring of each script: a file that has it there may be overwritten."""

_RANK_NAMES = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
_REACH_ALL = frozenset({"globals", "locals", "vars", "dir", "exec", "eval"})
"""What reads or binds variables of a module that its text does not show."""
_BEFORE_IMPORTS = frozenset({"environ", "putenv", "path", "use", "install", "set_start_method"})
"""What a cell may do before an import for that import to see it."""


@dataclass(slots=True)
class Split:
    """The statements of cells, by where they go in the script."""

    imports: set[Import] = field(default_factory=set)
    definitions: list[str] = field(default_factory=list)
    body: str = ""
    shared: list[str] = field(default_factory=list)
    """Variables of the body that functions outside of it use."""
    by_name: frozenset[str] = frozenset()
    """What it calls that reads or binds variables by name: such a body runs in no function."""
    waits: bool = False


def split(source: str, imports: set[Import], above: Iterable[str], used_above: Iterable[str]) -> Split:
    """Split cells into what goes above the main function and what goes into it.

    `imports` are those that the script has already, `above` the other variables that it has before the main
    function, `used_above` what its functions use.
    """
    whole, tail = chunks(source)
    names = cell_names(source)
    made = Counter(name for chunk in whole for node in chunk.nodes for name in _bound(node))
    imported = Counter(each for chunk in whole if chunk.node is not None for each in imports_in(chunk.node))
    taken = {*names.needed, *names.maybe, *above, *(each.bound for each in imports)}
    found = Split()
    body: list[Chunk] = []
    may_move = True

    def moves(each: Import) -> bool:
        if each.name == "*" or each.module == "__future__":
            return True
        always_this = made[each.bound] == imported[each]
        return may_move and always_this and (each in imports or each.bound not in taken)

    for chunk in whole:
        here = imports_in(chunk.node) if chunk.node is not None else []
        if here and all(moves(each) for each in here):
            found.imports.update(here)
            comments = [line for line in chunk.text.split("\n") if line.lstrip().startswith("#")]
            body += [Chunk("\n".join(comments), ())] if comments else []
            continue
        may_move = may_move and not any(_prepares(node) for node in chunk.nodes)
        body.append(chunk)
    imported_names = {each.bound for each in imports | found.imports}
    body = _without_definitions(body, found, made, taken, imported_names)
    found.body = _spaced(body) + (f"\n{tail}" if tail else "")
    tree = ast.parse(found.body)
    at_top = {*above, *imported_names}
    outside = set(used_above).union(*(_names(text) for text in found.definitions))
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found.by_name = _REACH_ALL & (loaded | outside) - scope_of(tree).bound - at_top
    found.waits = uses_await(tree)
    if not found.by_name:
        found.shared = sorted(_shared(tree, at_top | outside))
        found.body = _without_annotations(tree, found.body, set(found.shared))
    return found


def _bound(node: ast.stmt) -> frozenset[str]:
    scope = scope_of(ast.Module([node], []))
    return scope.bound | scope.declared_global


def bound_in(source: str, transform: Callable[[str], str] = str) -> frozenset[str]:
    """Return the variables that a cell binds, as far as its text shows."""
    try:
        return frozenset(name for node in ast.parse(transform(source)).body for name in _bound(node))
    except SyntaxError:
        return frozenset()


def _prepares(node: ast.stmt) -> bool:
    if isinstance(node, Definition):
        return False
    return any(isinstance(each, ast.Attribute) and each.attr in _BEFORE_IMPORTS for each in ast.walk(node))


def _names(text: str) -> frozenset[str]:
    found = cell_names(text)
    return found.needed | found.maybe


def _without_definitions(
    body: list[Chunk], found: Split, made: Counter[str], elsewhere: set[str], imported: set[str]
) -> list[Chunk]:
    """Move the functions and classes to the top that need nothing of the body."""
    moving = []
    for chunk in body:
        node = chunk.definition
        if node is not None and made[node.name] == 1 and node.name not in elsewhere:
            # What else they are made of, the body may change before.
            made_of = cell_names(chunk.text).needed - imported - vars(builtins).keys()
            if made_of <= _mentioned(node):
                moving.append(chunk)
    while True:
        stays = [chunk for chunk in body if chunk not in moving]
        of_the_body = frozenset[str]().union(*(_bound(node) for chunk in stays for node in chunk.nodes))
        kept = [chunk for chunk in moving if not _names(chunk.text) & of_the_body]
        if len(kept) == len(moving):
            found.definitions = [chunk.text.strip("\n") for chunk in moving]
            return stays
        moving = kept


def _mentioned(node: Definition) -> set[str]:
    """Return the names that a definition only refers to: bases and annotations."""
    if isinstance(node, ast.ClassDef):
        roots: list[ast.expr | None] = [*node.bases]
    else:
        roots = [node.returns, *(each.annotation for each in args_of(node))]
    return {root.id for root in roots if isinstance(root, ast.Name)}


def _spaced(body: list[Chunk]) -> str:
    """Return the chunks with an empty line around functions, as their cells had or should have had."""
    parts = []
    for number, chunk in enumerate(body):
        near = number and (chunk.definition or body[number - 1].definition)
        parts.append("\n" + chunk.text if near and not chunk.text.startswith("\n") else chunk.text)
    return "\n".join(parts)


def _shared(tree: ast.Module, outside: set[str]) -> set[str]:
    """Return the variables that must be the module's own, although the main function makes them."""
    bound = set(scope_of(tree).bound)
    shared = bound & outside
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            shared |= bound & set(node.names)
        if isinstance(node, ast.ClassDef):
            # A class body finds what it also binds itself in the module only.
            shared |= bound & scope_of(node).bound
    # Pickle finds a class under the module's names only.
    return shared | {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def _without_annotations(tree: ast.Module, source: str, shared: set[str]) -> str:
    """Return the body without the annotations of variables declared global, which Python refuses."""
    edits: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in shared:
            value = ast.get_source_segment(source, node.value) if node.value is not None else None
            edits.append((node, f"{node.target.id} = {value}" if value is not None else "pass"))
    return replaced(source, edits)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell to export: its source without the magic's line, and its title: `In[3]`."""

    source: str
    title: str
    on_ranks: bool = True
    """Whether it was a `%%distributed` cell: its value is printed then."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rank provides to a cell. `backend` is None where no process group is formed."""

    backend: str | None
    device_type: str


@dataclass(frozen=True, slots=True)
class ExportedScript:
    """A script, the files that it loads, and variables that were left out because they may never be used."""

    text: str
    files: tuple[Load, ...]
    left_out: tuple[str, ...]


def export(  # noqa: PLR0913 - a notebook, and what is wanted of it
    cells: Sequence[Cell],
    namespace: dict[str, Any],
    history: Mapping[int, str],
    setting: Setting,
    *,
    command: str,
    directory: str,
    transform: Callable[[str], str] = str,
    elsewhere: Mapping[str, int] | None = None,
) -> ExportedScript:
    """Return the script of `cells`, which take what they need from `namespace`.

    `history` are the cells that the notebook has run, by number, in Python; `transform` is IPython's.
    `command` goes into the docstring, `directory` is where the files will be, seen from the script.
    `elsewhere` are variables that only ranks have, and the numbers of the cells that made them there.
    Raises `NblaunchError` for what cannot be written.
    """
    texts = [plain_python(cell.source, transform, cell.title).strip("\n") for cell in cells]
    used = {name for text in texts for name in _names(text) | bound_in(text)}
    value = _unused("value", used)
    texts = [
        printing_its_value(text, value) if cell.on_ranks else text
        for cell, text in zip(cells, texts, strict=True)
    ]
    source = "\n\n".join(text for text in texts if text) + "\n"
    names = cell_names(source)
    _refuse_rank_variables(names.needed, elsewhere or {}, cells)
    saved = _unused("DATA", used | namespace.keys())
    found = Collector(namespace, NotebookSource(history), device=setting.device_type != "cpu").collect(
        names, saved
    )
    if "subprocess.run(" in source:
        found.imports.add(Import("subprocess"))
    above = {name for item in found.items for name in item.names}
    of_ranks = found.names & RANK_NAMES
    used_above = found.names - names.needed - names.maybe
    functions = {name for item in found.items for name in item.needs | item.later}
    body = split(source, found.imports, above | of_ranks, used_above | functions)
    titles = ", ".join(cell.title for cell in cells)
    if body.waits and body.by_name:
        msg = (
            f"{titles} was to become a script, but uses `await`, which needs a function there, and "
            f"{', '.join(sorted(body.by_name))}, which would not see the variables of a function. Put what "
            "uses `await` into an `async def`, and call it with asyncio.run."
        )
        raise NblaunchError(msg)
    writer = _ScriptWriter(found, body, setting, used | found.names, of_ranks)
    text = writer.text(_docstring(titles, command), f'{saved} = Path(__file__).with_name("{directory}")')
    return ExportedScript(text, tuple(found.files), tuple(found.left_out))


def _unused(name: str, used: set[str]) -> str:
    while name in used:
        name += "_"
    return name


def _refuse_rank_variables(
    needed: frozenset[str], elsewhere: Mapping[str, int], cells: Sequence[Cell]
) -> None:
    lacking = sorted(name for name in needed & elsewhere.keys() if not hasattr(builtins, name))
    if lacking:
        made = ", ".join(f"{name} (made in In[{elsewhere[name]}])" for name in lacking)
        titles = [cell.title for cell in cells]
        numbers = {elsewhere[name] for name in lacking} | {int(title[3:-1]) for title in titles}
        msg = (
            f"{', '.join(titles)} was to become a script, but uses variables that live only on the ranks: "
            f"{made}. Export the cells that made them as well: --cells {','.join(map(str, sorted(numbers)))}"
        )
        raise NblaunchError(msg)


class _ScriptWriter:
    """Puts the parts of a script together."""

    def __init__(
        self, found: Collected, body: Split, setting: Setting, used: set[str], of_ranks: set[str]
    ) -> None:
        self._found, self._body, self._setting, self._used = found, body, setting, used
        self._imports = found.imports | body.imports
        self._of_ranks = of_ranks

    def text(self, docstring: str, saved: str) -> str:
        first, last = self._process_group()
        top = self._rank_variables()
        if self._found.files:
            self._imports.add(Import("pathlib", "Path"))
            top = [saved, *top]
        main = _unused("main", self._used)
        call = f"{main}()"
        if self._body.waits:
            self._imports.add(Import("asyncio"))
            call = f"asyncio.run({call})"
        constants, others = self._constants()
        blocks = [docstring, as_statements(self._imports), "\n".join(top), *constants]
        above = "\n\n".join(block for block in blocks if block)
        body = self._statements(first, last)
        if self._body.by_name:
            ends = [f'if __name__ == "__main__":\n{body}']
        else:
            kind = "async def" if self._body.waits else "def"
            ends = [f"{kind} {main}() -> None:\n{body}", f'if __name__ == "__main__":\n    {call}']
        below = [*others, *self._body.definitions, *ends]
        return above + "".join(f"\n\n\n{block}" for block in below) + "\n"

    def _constants(self) -> tuple[list[str], list[str]]:
        """Return what stands right below the imports, and what follows, in which functions come first."""
        loaded = {load.names[0] for load in self._found.files}
        first = list(takewhile(lambda item: not item.definition and not item.needs, self._found.items))
        short = "\n".join(item.text for item in first if item.names[0] not in loaded)
        long = [item.text for item in first if item.names[0] in loaded]
        return [short, *long], _grouped(self._found.items[len(first) :])

    def _rank_variables(self) -> list[str]:
        kind, wanted = self._setting.device_type, set(self._of_ranks)
        if kind != "cpu":
            wanted |= {"local_rank", "device"}
        lines = [f'{name} = int(os.environ["{key}"])' for name, key in _RANK_NAMES.items() if name in wanted]
        if lines:
            self._imports.add(Import("os"))
        if "device" in wanted:
            self._imports.add(Import("torch"))
            place = '"cpu"' if kind == "cpu" else f'"{kind}", local_rank'
            lines.append(f"device = torch.device({place})")
        return lines

    def _process_group(self) -> tuple[list[str], list[str]]:
        """Return what forms the default group, and what ends it; nothing that the cells do themselves."""
        kind, backend = self._setting.device_type, self._setting.backend
        on_gpu = [] if kind == "cpu" else [f"torch.{kind}.set_device(device)"]
        if backend is None:
            return on_gpu, []
        dist = Import("torch.distributed", alias="dist")
        prefix = "dist." if "dist" not in self._used or dist in self._imports else ""
        texts = [*(item.text for item in self._found.items), *self._body.definitions, self._body.body]
        first: list[str] = []
        last: list[str] = []
        if not any("init_process_group(" in text for text in texts):
            where = ", device_id=device" if on_gpu else ""
            first = [f'{prefix}init_process_group("{backend}"{where})']
        if not any("destroy_process_group(" in text for text in texts):
            # Without it a rank may be gone while another one still connects to it.
            last = [f"{prefix}barrier()", f"{prefix}destroy_process_group()"]
        if first or last:
            called = [line.partition("(")[0] for line in [*first, *last]]
            self._imports |= {dist} if prefix else {Import("torch.distributed", name) for name in called}
        return on_gpu + first, last

    def _statements(self, first: list[str], last: list[str]) -> str:
        """Return what the script runs: `first`, the cells, `last`."""
        body = self._body.body.strip("\n") if self._body.body.strip() else ""
        lines = [f"global {', '.join(self._body.shared)}"] if self._body.shared else []
        lines += first
        if lines and body:
            lines.append("")
        lines += [body] if body else []
        lines += ["", *last] if last else []
        text = "\n".join(lines)
        if not ast.parse(text).body:
            text += "\npass"
        return indented(text)


def _grouped(items: list[CollectedItem]) -> list[str]:
    """Return texts with functions and classes apart, and other statements in a row together."""
    blocks: list[str] = []
    before: CollectedItem | None = None
    for item in items:
        if before is None or before.definition or item.definition:
            blocks.append(item.text)
        else:
            blocks[-1] += ("\n\n" if item.text.startswith("#") else "\n") + item.text
        before = item
    return blocks


def _docstring(title: str, command: str) -> str:
    # Not indented: formatters take the margin of a docstring away.
    text = f"{title}, {MARKER}.\n\n{command}"
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{escaped}\n"""'


def is_exported(path: Path) -> bool:
    try:
        found = ast.get_docstring(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return False
    return found is not None and MARKER in found
