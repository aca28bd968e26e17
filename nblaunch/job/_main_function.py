"""What of the cells stands at the top of a script, and what in its main function."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from nblaunch.job._cell_text import Chunk, chunks, indented, replaced, uses_await
from nblaunch.job._imports import Import, imports_in
from nblaunch.job._scopes import class_scope, module_scope
from nblaunch.job.names import cell_names

_REACH_ALL = frozenset({"globals", "exec", "eval"})
_BEFORE_IMPORTS = frozenset({"environ", "putenv", "path", "use", "install", "set_start_method"})
"""What a cell may do before an import for that import to see it."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(slots=True)
class Split:
    """The cells, taken apart."""

    imports: set[Import] = field(default_factory=set)
    definitions: list[str] = field(default_factory=list)
    body: str = ""
    shared: list[str] = field(default_factory=list)
    """Variables of the body that functions outside of it use."""
    waits: bool = False


def split(source: str, imports: set[Import], above: Iterable[str], used_above: Iterable[str]) -> Split:
    """Take cells apart.

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
            body += [Chunk(comments, ())] if (comments := _comments(chunk)) else []
            continue
        may_move = may_move and not any(_prepares(node) for node in chunk.nodes)
        body.append(chunk)
    body = _without_definitions(body, found, made, taken)
    found.body = "\n".join(chunk.text for chunk in _spaced(body)) + (f"\n{tail}" if tail else "")
    tree = ast.parse(found.body)
    at_top = {*above, *(each.bound for each in imports | found.imports)}
    outside = set(used_above).union(*(_names(text) for text in found.definitions))
    found.shared = sorted(_shared(tree, at_top | outside))
    found.body = _without_annotations(tree, found.body, set(found.shared))
    found.waits = uses_await(tree)
    return found


def _bound(node: ast.stmt) -> frozenset[str]:
    scope = module_scope([node])
    return scope.bound | scope.declared_global


def bound_in(source: str) -> frozenset[str]:
    """Return the variables that cells make."""
    return frozenset(name for node in ast.parse(source).body for name in _bound(node))


def _prepares(node: ast.stmt) -> bool:
    if isinstance(node, _Definition):
        return False
    return any(isinstance(each, ast.Attribute) and each.attr in _BEFORE_IMPORTS for each in ast.walk(node))


def _comments(chunk: Chunk) -> str:
    return "\n".join(line for line in chunk.text.split("\n") if line.lstrip().startswith("#"))


def _names(text: str) -> frozenset[str]:
    found = cell_names(text)
    return found.needed | found.maybe


def _without_definitions(
    body: list[Chunk], found: Split, made: Counter[str], elsewhere: set[str] | frozenset[str]
) -> list[Chunk]:
    """Move the functions and classes to the top that need nothing of the body."""
    moving = [
        chunk
        for chunk in body
        if isinstance(chunk.node, _Definition)
        and made[chunk.node.name] == 1
        and chunk.node.name not in elsewhere
    ]
    while True:
        stays = [chunk for chunk in body if chunk not in moving]
        of_the_body = frozenset[str]().union(*(_bound(node) for chunk in stays for node in chunk.nodes))
        kept = [chunk for chunk in moving if not _names(chunk.text) & of_the_body]
        if len(kept) == len(moving):
            found.definitions = [chunk.text.strip("\n") for chunk in moving]
            return stays
        moving = kept


def _spaced(body: list[Chunk]) -> list[Chunk]:
    """Return the chunks with an empty line around functions, as their cells had or should have had."""
    spaced = []
    for number, chunk in enumerate(body):
        near = isinstance(chunk.node, _Definition) or (
            number > 0 and isinstance(body[number - 1].node, _Definition)
        )
        gap = "\n" if near and number and not chunk.text.startswith("\n") else ""
        spaced.append(Chunk(gap + chunk.text, chunk.nodes))
    return spaced


def _shared(tree: ast.Module, outside: set[str]) -> set[str]:
    """Return the variables that must be the module's own, although the main function makes them."""
    bound = set(module_scope(tree.body).bound)
    if any(isinstance(node, ast.Name) and node.id in _REACH_ALL for node in ast.walk(tree)):
        return bound
    shared = bound & outside
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            shared |= bound & set(node.names)
        if isinstance(node, ast.ClassDef):
            # A class body finds what it also binds itself in the module only.
            shared |= bound & class_scope(node, module_scope([])).bound
    # Pickle finds a class under the module's names only.
    return shared | {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def _without_annotations(tree: ast.Module, source: str, shared: set[str]) -> str:
    """Return the body without the annotations of variables declared global, which Python refuses."""
    edits: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in shared:
            value = ast.get_source_segment(source, node.value) if node.value is not None else None
            edits.append((node, f"{node.target.id} = {value}" if value is not None else "pass"))
    return replaced(source, edits)


def written(name: str, found: Split, first: list[str], last: list[str]) -> str:
    """Return the main function: `first`, the body, `last`."""
    lines = [f"global {', '.join(found.shared)}"] if found.shared else []
    lines += first
    if lines and found.body.strip():
        lines.append("")
    lines += [found.body.strip("\n")] if found.body.strip() else []
    lines += ["", *last] if last else []
    text = "\n".join(lines)
    if not ast.parse(text).body:
        text += "\npass"
    return f"{'async ' if found.waits else ''}def {name}() -> None:\n{indented(text)}"
