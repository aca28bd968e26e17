"""Import statements: those that a notebook ran, those that a value needs, and how a script writes them."""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nblaunch.capture.parts import fact_of

LINE = 88
"""What formatters take for a line."""


@dataclass(frozen=True, slots=True)
class Import:
    """`import module as alias`, or with a name `from module import name as alias`."""

    module: str
    name: str = ""
    alias: str = ""

    @property
    def bound(self) -> str:
        return self.alias or self.name or self.module.partition(".")[0]

    def finds(self, value: object) -> bool:
        """Return whether it binds its variable to this object; imports nothing."""
        module = sys.modules.get(self.module)
        if module is None:
            return False
        if self.name:
            found = getattr(module, self.name, sys.modules.get(f"{self.module}.{self.name}"))
            return found is value
        return (module if self.alias else sys.modules.get(self.bound)) is value


def imports_in(node: ast.AST) -> list[Import]:
    match node:
        case ast.Import(names=names):
            return [Import(each.name, alias=each.asname or "") for each in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [Import(module, each.name, each.asname or "") for each in names]
    return []


def import_of(name: str, value: object, known: Iterable[Import]) -> Import | None:
    """Return the import that binds `name` to `value`: the last such of `known`, or a new one."""
    for each in reversed(list(known)):
        if each.bound == name and each.finds(value):
            # Of `import xml.etree` what is used of it decides: see `submodules`.
            return each if each.name or each.alias else Import(each.bound)
    if isinstance(value, types.ModuleType):
        found = Import(value.__name__, alias="" if value.__name__ == name else name)
        return found if found.finds(value) else None
    module, qualname = fact_of(value, "__module__"), fact_of(value, "__qualname__")
    if not isinstance(module, str) or not isinstance(qualname, str) or module == "__main__":
        return None
    if module == "builtins" and getattr(builtins, name, None) is value:
        return None
    found = Import(module, qualname, "" if qualname == name else name)
    return found if found.finds(value) else None


def submodules(chains: Iterable[str], namespace: dict[str, Any], known: Iterable[Import]) -> Iterator[Import]:
    """Yield `import package.module` for what attribute chains reach and `import package` may not load."""
    written = {each for each in known if not each.name and not each.alias and "." in each.module}
    for chain in sorted(chains):
        root, *attributes = chain.split(".")
        package = namespace.get(root)
        if not isinstance(package, types.ModuleType) or package.__name__ != root:
            continue
        in_stdlib = root in sys.stdlib_module_names and hasattr(package, "__path__")
        name = deepest = root
        for attribute in attributes:
            name = f"{name}.{attribute}"
            # `os.path` is a module by another name, which comes with `os`.
            if getattr(sys.modules.get(name), "__name__", None) != name:
                break
            if in_stdlib or Import(name) in written:
                deepest = name
        if deepest != root:
            yield Import(deepest)


def as_statements(imports: Iterable[Import]) -> str:
    """Return import statements in the usual order: the future, the standard library, everything else."""
    everything = set(imports)
    # `import os.path` binds `os` as well.
    covered = {each.bound for each in everything if "." in each.module and not each.name and not each.alias}
    everything -= {Import(package) for package in covered & sys.stdlib_module_names}
    statements: dict[Import | str, list[Import]] = {}
    for each in sorted(everything, key=_usual_place):
        # One statement for all names of a module, but for those with an alias.
        alone = each.alias or each.name in ("", "*")
        statements.setdefault(each if alone else each.module, []).append(each)
    blocks: list[list[str]] = [[], [], []]
    for bound in statements.values():
        root = bound[0].module.partition(".")[0]
        block = 0 if root == "__future__" else 1 if root in sys.stdlib_module_names else 2
        blocks[block].append(_statement(bound))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _usual_place(each: Import) -> tuple[object, ...]:
    """Order as isort does: modules first, then names: constants, classes, the rest."""
    name = each.name
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return bool(name), each.module.lower(), each.module, kind, name.lower(), name, each.alias


def _statement(bound: list[Import]) -> str:
    first = bound[0]
    alias = f" as {first.alias}" if first.alias else ""
    if not first.name:
        return f"import {first.module}{alias}"
    line = f"from {first.module} import {', '.join(each.name for each in bound)}{alias}"
    if len(line) <= LINE or len(bound) == 1:
        return line
    inner = "".join(f"    {each.name},\n" for each in bound)
    return f"from {first.module} import (\n{inner})"
