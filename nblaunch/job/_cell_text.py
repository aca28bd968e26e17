"""The text of cells on its way into a script: IPython's syntax, statements, comments, indentation."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nblaunch._errors import NblaunchError
from nblaunch.job._magics import interpolated, ipython_call

# They set a notebook up, and mean nothing in a script.
_OF_THE_NOTEBOOK = frozenset(
    {"load_ext", "reload_ext", "autoreload", "matplotlib", "config", "distributed", "local", "precision"}
)
_NOTHING = "pass  #"
_SHORT = 40
_CLOCKS = frozenset({"time", "local"})
_SAY_NOTHING = frozenset(
    {"print", "pprint", "display", "barrier", "all_reduce", "broadcast", "all_gather", "reduce", "scatter"}
    | {"backward", "step", "zero_grad", "init_process_group", "destroy_process_group", "append", "extend"}
)
"""Calls at the end of a cell that have no value to be shown."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Statements on lines of their own, with the comments above them, and one empty line at most."""

    text: str
    nodes: tuple[ast.stmt, ...]

    @property
    def node(self) -> ast.stmt | None:
        """The statement, where it is one."""
        return self.nodes[0] if len(self.nodes) == 1 else None


def plain(source: str, transform: Callable[[str], str], title: str) -> str:
    """Return a cell as Python: IPython's syntax becomes Python where it can.

    Raises `NblaunchError` that names the line where it cannot.
    """
    code = transform(source)
    tree = ast.parse(code)
    edits: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = ipython_call(node.value)
            text = _as_python(*call, transform, title) if call is not None else None
            if text is not None and text.startswith(_NOTHING) and node in tree.body:
                text = ""
            if text is not None:
                edits.append((node, text))
    edited = {id(child) for node, _ in edits for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "get_ipython" and id(node) not in edited:
            raise _refusal(source, node.lineno, title)
    return replaced(code, edits)


def _as_python(method: str, texts: list[str], transform: Callable[[str], str], title: str) -> str | None:
    match method, texts:
        case "system", [command] if not interpolated(command):
            return f"subprocess.run({_quoted(command)}, shell=True, check=False)"
        case "run_line_magic", ["time", statement]:
            return plain(statement, transform, title).strip()
        case "run_line_magic", [name, line] if name in _OF_THE_NOTEBOOK:
            return f"{_NOTHING} %{name} {line}".rstrip()
        case "run_cell_magic", [name, _, body] if name in _CLOCKS:
            return plain(body, transform, title).strip("\n")
    return None


def _quoted(text: str) -> str:
    return f'"{text}"' if text.isprintable() and '"' not in text and "\\" not in text else repr(text)


def _refusal(source: str, line: int, title: str) -> NblaunchError:
    lines = source.splitlines()
    shown = lines[line - 1].strip() if line <= len(lines) else "get_ipython()"
    msg = (
        f"{title} was to become a script, but its line {line} is IPython's own: {shown!r:.200}. Write it in "
        "Python (subprocess.run for a command), or move it to another cell."
    )
    return NblaunchError(msg)


def replaced(source: str, edits: Iterable[tuple[ast.AST, str]]) -> str:
    """Return `source` with the text of some nodes replaced."""
    lines = source.splitlines(keepends=True)
    for node, text in sorted(edits, key=lambda edit: _place(edit[0]), reverse=True):
        first, column, last, end = _extent(node)
        # ast counts columns in bytes.
        before = lines[first].encode()[:column].decode()
        after = lines[last].encode()[end:].decode()
        lines[first : last + 1] = (before + text + after).splitlines(keepends=True)
    return "".join(lines)


def _place(node: ast.AST) -> tuple[int, int]:
    return _extent(node)[:2]


def _extent(node: ast.AST) -> tuple[int, int, int, int]:
    assert isinstance(node, ast.stmt | ast.expr)  # noqa: S101 - the callers' nodes have places
    return node.lineno - 1, node.col_offset, (node.end_lineno or 1) - 1, node.end_col_offset or 0


def chunks(source: str) -> tuple[list[Chunk], str]:
    """Take a module apart; returns its chunks, and the comments after the last one."""
    lines = source.splitlines()
    found: list[Chunk] = []
    end = 0
    begin = 0
    for node in ast.parse(source).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
        last = node.end_lineno or node.lineno
        if found and first < end:
            nodes = (*found.pop().nodes, node)
        else:
            begin, nodes = end, (node,)
        end = max(end, last)
        text = "\n".join(lines[begin:end])
        gap = "\n" if not text.split("\n", 1)[0].strip() else ""
        found.append(Chunk(gap + text.strip("\n"), nodes))
    return found, "\n".join(lines[end:]).strip("\n")


def printing_its_value(source: str, name: str) -> str:
    """Return a cell that prints the value of its last expression; a long one goes by way of `name`."""
    body = ast.parse(source).body
    if not body or not isinstance(body[-1], ast.Expr):
        return source
    node = body[-1]
    if _says_nothing(node.value) or _ends_with_semicolon(source):
        return source
    first, column, last, end = _extent(node)
    lines = [line.encode() for line in source.splitlines()]
    text = b"\n".join([*lines[first:last], lines[last][:end]])[column:].decode()
    long = len(text) > _SHORT or isinstance(node.value, ast.Tuple)
    if long or any(character in text for character in "\"'\\{}\n:!=#") or text.startswith("("):
        return replaced(source, [(node, f'{name} = {text}\nprint(f"[rank {{rank}}] {{{name}!r}}")')])
    return replaced(source, [(node, f'print(f"[rank {{rank}}] {{{text}!r}}")')])


def _says_nothing(value: ast.expr) -> bool:
    if isinstance(value, ast.Await):
        value = value.value
    match value:
        case ast.Constant(value=None):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="subprocess"))):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _SAY_NOTHING
    return False


def _ends_with_semicolon(source: str) -> bool:
    """Say what IPython's display hook says: whether the last word before comments is a semicolon."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    tokens = [each for each in _tokens(source) if each.type not in skipped]
    return bool(tokens) and tokens[-1].string == ";"


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


def indented(source: str) -> str:
    """Indent by four spaces, save what stands inside of strings of several lines."""
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
    lines = source.splitlines()
    return "\n".join(
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(lines, start=1)
    )


def uses_await(tree: ast.Module) -> bool:
    """Return whether a cell waits outside of its functions, as IPython lets it."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
            return True
        if isinstance(node, ast.comprehension) and node.is_async:
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False
