"""Source text: where functions and classes of the notebook were defined, and cells as plain Python."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import logging
import re
import tokenize
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nblaunch._errors import NblaunchError
from nblaunch.capture.capture import cell_source
from nblaunch.capture.names import CellNames, cell_names, interpolated, ipython_call
from nblaunch.capture.parts import fact_of, functions_in
from nblaunch.export.imports import Import, imports_in
from nblaunch.export.literals import quoted

MADE_BY_CALLS = (
    *(types.FunctionType, type, functools.partial, typing.TypeVar, typing.ParamSpec, typing.NewType),
    *(types.GenericAlias, types.UnionType, logging.Logger, re.Pattern, functools.partialmethod),
)
"""What is made again rather than saved: kinds that hold no data of their own."""


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Chunk:
    """Statements on lines of their own, with the comments above them, and one empty line at most."""

    text: str
    nodes: tuple[ast.stmt, ...]

    @property
    def node(self) -> ast.stmt | None:
        return self.nodes[0] if len(self.nodes) == 1 else None

    @property
    def definition(self) -> Definition | None:
        return self.node if isinstance(self.node, Definition) else None


@dataclass(frozen=True, slots=True)
class BindingStatement:
    """The statement that binds a variable: its text, its cell and line, and the names that it uses."""

    text: str
    place: tuple[int, int]
    names: CellNames
    node: ast.stmt = field(compare=False)

    @classmethod
    def of(cls, chunk: Chunk, number: int) -> BindingStatement:
        node = chunk.nodes[0]
        return cls(chunk.text.strip("\n"), (number, node.lineno), cell_names(chunk.text), node)


class NotebookSource:
    """The cells that a notebook has run, as Python."""

    def __init__(self, cells: Mapping[int, str]) -> None:
        """Read `cells`: execution number -> source, IPython's syntax transformed."""
        self.imports: list[Import] = []
        self._numbers: dict[str, int] = {}
        self._bindings: dict[str, list[tuple[int, Chunk]]] = {}
        for number, text in sorted(cells.items()):
            for part in _with_bodies(text):
                self._numbers[part.strip("\n")] = number
                for chunk in chunks(part)[0]:
                    for node in chunk.nodes:
                        self.imports += [each for inner in _run(node) for each in imports_in(inner)]
                    for name in _stored(chunk):
                        self._bindings.setdefault(name, []).append((number, chunk))

    def _last(self, name: str) -> tuple[int, Chunk | None]:
        return self._bindings[name][-1] if name in self._bindings else (0, None)

    def place(self, name: str) -> tuple[int, int]:
        number, chunk = self._last(name)
        return number, chunk.nodes[0].lineno if chunk is not None else 0

    def is_newer(self, name: str, place: tuple[int, int]) -> bool:
        """Return whether the notebook has bound `name` to something else since it was at `place`."""
        if self.place(name) <= place:
            return False
        *_, (_, last) = self._bindings[name]
        before = [chunk for number, chunk in self._bindings[name] if (number, chunk.nodes[0].lineno) <= place]
        # The same cell, run again.
        return not before or before[-1].text.strip() != last.text.strip() or not _is_constant(last)

    def definition(self, name: str, value: object) -> BindingStatement | None:
        number, chunk = self._last(name)
        if chunk is not None and not chunk.definition and fact_of(value, "__wrapped__") is not None:
            return None  # `f = wrapped(f)`: the `def` alone is not all of it
        cells = {code: text for code in _codes(value) if (text := cell_source(code.co_filename)) is not None}
        found = {self._defined_at(name, code, text) for code, text in cells.items()}
        if isinstance(value, type) and (len(found) > 1 or None in found):
            return None  # a method was put into the class, or another one for it, after its definition
        for source in found - {None}:
            return source
        if chunk is None or chunk.definition is None:
            return None
        # A class without methods, or what a decorator made of a function, cannot be asked where it is from.
        is_class = isinstance(value, type) and value.__module__ == "__main__"
        return BindingStatement.of(chunk, number) if is_class or chunk.definition.decorator_list else None

    def _defined_at(self, name: str, code: types.CodeType, text: str) -> BindingStatement | None:
        with contextlib.suppress(SyntaxError, ValueError):
            for chunk in chunks(text)[0]:
                node = chunk.definition
                if node is None or node.name != name:
                    continue
                within = first_line(node) <= code.co_firstlineno <= (node.end_lineno or node.lineno)
                if within and (isinstance(node, ast.ClassDef) or code.co_name == name):
                    return BindingStatement.of(chunk, self._numbers.get(text.strip("\n"), 0))
        return None

    def statement(self, name: str, value: object, namespace: Mapping[str, object]) -> BindingStatement | None:
        """Return the assignment that made `value`, if running it again makes an equal one.

        That is so where it refers to nothing but functions, classes and modules.
        """
        number, chunk = self._last(name)
        if chunk is None or not isinstance(value, MADE_BY_CALLS):
            return None
        match chunk.node:
            case ast.Assign(targets=[ast.Name()], value=made) | ast.AnnAssign(target=ast.Name(), value=made):
                pass
            case _:
                return None
        names = cell_names(chunk.text)
        if any(self.is_newer(each, (number, chunk.nodes[0].lineno)) for each in names.needed):
            return None  # what it was made of has been defined again since
        used = [namespace[each] for each in names.needed & namespace.keys() if each != "__name__"]
        if name in names.needed or not all(
            isinstance(each, types.ModuleType) or callable(each) for each in used
        ):
            return None
        if isinstance(made, ast.Lambda) and fact_of(value, "__name__") != "<lambda>":
            return None
        return BindingStatement.of(chunk, number)


def _is_constant(chunk: Chunk) -> bool:
    """Return whether a statement binds the same each time that it is run."""
    return bool(chunk.definition) or all(
        isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for node in chunk.nodes
    )


def _codes(value: object) -> Iterator[types.CodeType]:
    """Yield the code of a function of the notebook, also of a wrapped one, or of a class's methods."""
    functions = [value]
    if isinstance(value, type):
        members = vars(value).values() if value.__module__ == "__main__" else []
        functions = [function for each in members for function in functions_in(each)]
    for function in functions:
        seen, inner = {id(function)}, function
        while (wrapped := fact_of(inner, "__wrapped__")) is not None and id(wrapped) not in seen:
            seen.add(id(wrapped))
            inner = wrapped
        code = fact_of(inner, "__code__")
        if isinstance(code, types.CodeType):
            yield code


def _with_bodies(text: str) -> list[str]:
    """Return a cell and, where it is a magic around a cell, that one."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            match ipython_call(node.value):
                case "run_cell_magic", ["time" | "capture" | "local", _, inner]:
                    return _with_bodies(inner)
    return [text]


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run with `node`: not those inside of functions and classes."""
    yield node
    if not isinstance(node, Definition):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _run(child)


def _stored(chunk: Chunk) -> Iterator[str]:
    for node in chunk.nodes:
        if isinstance(node, Definition):
            yield node.name
        else:
            stored = (each for each in ast.walk(node) if isinstance(each, ast.Name))
            yield from (each.id for each in stored if isinstance(each.ctx, ast.Store))


# The text of cells on its way into a script: IPython's syntax, statements, comments, indentation.

# They set a notebook up, and mean nothing in a script.
_OF_THE_NOTEBOOK = frozenset(
    {"load_ext", "reload_ext", "autoreload", "matplotlib", "config", "distributed", "local", "precision"}
)
_NOTHING = "pass  #"
_SHORT = 40
_CLOCKS = frozenset({"time", "local"})
_WITHOUT_VALUE = frozenset(
    {"print", "pprint", "display", "barrier", "all_reduce", "broadcast", "all_gather", "reduce", "scatter"}
    | {"backward", "step", "zero_grad", "init_process_group", "destroy_process_group", "append", "extend"}
)
"""Calls at the end of a cell that have no value to be shown."""


def plain_python(source: str, transform: Callable[[str], str], title: str) -> str:
    """Return a cell as Python: IPython's syntax becomes Python where it can.

    Raises `NblaunchError` that names the line where it cannot.
    """
    code = transform(source)
    tree = ast.parse(code)
    edits: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = ipython_call(node.value)
            text = _as_python(*call, transform, title) if call is not None else None
            if text is not None:
                gone = text.startswith(_NOTHING) and node in tree.body
                edits.append((node, "" if gone else text))
    edited = {id(child) for node, _ in edits for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "get_ipython" and id(node) not in edited:
            raise _refusal(source, node.lineno, title)
    return replaced(code, edits)


def _as_python(method: str, texts: list[str], transform: Callable[[str], str], title: str) -> str | None:
    match method, texts:
        case "system", [command] if not interpolated(command):
            return f"subprocess.run({quoted(command)}, shell=True, check=False)"
        case "run_line_magic", ["time", statement]:
            return plain_python(statement, transform, title).strip()
        case "run_line_magic", [name, line] if name in _OF_THE_NOTEBOOK:
            return f"{_NOTHING} %{name} {line}".rstrip()
        case "run_cell_magic", [name, _, body] if name in _CLOCKS:
            return plain_python(body, transform, title).strip("\n")
    return None


def _refusal(source: str, line: int, title: str) -> NblaunchError:
    lines = source.splitlines()
    shown = lines[line - 1].strip() if line <= len(lines) else "get_ipython()"
    msg = (
        f"{title} was to become a script, but its line {line} is IPython's own: {shown!r:.200}. Write it in "
        "Python (subprocess.run for a command), or move it to another cell."
    )
    return NblaunchError(msg)


def replaced(source: str, edits: Iterable[tuple[ast.stmt, str]]) -> str:
    lines = source.splitlines(keepends=True)
    for node, text in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        # ast counts columns in bytes.
        before = lines[first].encode()[: node.col_offset].decode()
        after = lines[last].encode()[node.end_col_offset :].decode()
        lines[first : last + 1] = (before + text + after).splitlines(keepends=True)
    return "".join(lines)


def chunks(source: str) -> tuple[list[Chunk], str]:
    """Take a module apart; returns its chunks, and the comments after the last one."""
    lines = source.splitlines()
    found: list[Chunk] = []
    begin = end = 0
    for node in ast.parse(source).body:
        if found and first_line(node) <= end:
            nodes = (*found.pop().nodes, node)
        else:
            begin, nodes = end, (node,)
        end = max(end, node.end_lineno or node.lineno)
        text = "\n".join(lines[begin:end])
        gap = "\n" if not text.split("\n", 1)[0].strip() else ""
        found.append(Chunk(gap + text.strip("\n"), nodes))
    return found, "\n".join(lines[end:]).strip("\n")


def first_line(node: ast.stmt) -> int:
    """Return the line that a statement begins on, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def printing_its_value(source: str, name: str) -> str:
    """Return a cell that prints the value of its last expression; a long one is bound to `name` first."""
    body = ast.parse(source).body
    if not body or not isinstance(body[-1], ast.Expr):
        return source
    node = body[-1]
    if _has_no_value(node.value) or _ends_with_semicolon(source):
        return source
    text = ast.get_source_segment(source, node) or ""
    long = len(text) > _SHORT or isinstance(node.value, ast.Tuple)
    if long or any(character in text for character in "\"'\\{}\n:!=#") or text.startswith("("):
        return replaced(source, [(node, f'{name} = {text}\nprint(f"[rank {{rank}}] {{{name}!r}}")')])
    return replaced(source, [(node, f'print(f"[rank {{rank}}] {{{text}!r}}")')])


def _has_no_value(value: ast.expr) -> bool:
    if isinstance(value, ast.Await):
        value = value.value
    match value:
        case ast.Constant(value=None):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="subprocess"))):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _WITHOUT_VALUE
    return False


def _ends_with_semicolon(source: str) -> bool:
    """Return whether the last token before comments is a semicolon, as IPython's display hook does."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    tokens = [each for each in _tokens(source) if each.type not in skipped]
    return bool(tokens) and tokens[-1].string == ";"


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


def indented(source: str) -> str:
    """Indent by four spaces, except inside strings of several lines."""
    inside: set[int] = set()
    begun: list[int] = []
    for token in _tokens(source):
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_START"):
            begun.append(token.start[0])
        elif kind.endswith("STRING_END"):
            inside.update(range(begun.pop() + 1, token.end[0] + 1))
        elif kind == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    lines = enumerate(source.splitlines(), start=1)
    return "\n".join(
        f"    {line}" if number not in inside and line.strip() else line for number, line in lines
    )


def uses_await(tree: ast.Module) -> bool:
    """Return whether a cell uses `await` outside functions, as IPython allows."""
    with warnings.catch_warnings(action="ignore"):
        code = compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return bool(code.co_flags & inspect.CO_COROUTINE)
