"""Where a definition that a script makes again would not be what it is in the notebook by now.

A definition fixes more than code: defaults, bases, what a class body and a decorator were given. Run again,
its text takes these from the variables as they are today, without what has been changed since. So each part
is compared with what its expression gives now. What differs is set below the definition, a `Patch`. Where no
statement can do that, `NotRemadeError` is raised, and the object itself is saved.
"""

from __future__ import annotations

import abc
import ast
import enum
import functools
import types
from collections import ChainMap
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import MISSING, dataclass
from typing import Any

from nblaunch.capture.capture import cell_source
from nblaunch.capture.dataflow import FunctionNode, extends_property, scope_of
from nblaunch.capture.identity import has_identity
from nblaunch.capture.parts import class_attributes, closure_of, fact_of
from nblaunch.export.expressions import UNKNOWN, UnknownError, evaluate, evaluates_to, is_same
from nblaunch.export.literals import LiteralWriter, NoLiteralError
from nblaunch.export.source import MADE_BY_CALLS, BindingStatement, NotebookSource, first_line

_DATA = (int, float, bool, str, bytes, type(None), list, dict, set, tuple)
_WITHOUT_STATE = (type, types.ModuleType, types.BuiltinFunctionType)
_Bindings = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """What a script sets below a definition: `f.__defaults__` to a tuple, `Net.scale` to 3."""

    target: str
    value: Any
    certain: bool
    """Whether the definition alone gives something else, as far as can be told."""


class NotRemadeError(Exception):
    """A definition made again is something else."""

    def __init__(self, *, certain: bool) -> None:
        """`certain` is False where that cannot be told."""
        super().__init__(certain)
        self.certain = certain


class Drift:
    """Compares what one statement of the notebook has made with what it would make now."""

    def __init__(self, made: BindingStatement, source: NotebookSource, namespace: dict[str, Any]) -> None:
        """`made` is the statement, `namespace` has the variables as they are now."""
        self._made = made
        self._source = source
        self._namespace = namespace
        self._checked: set[int] = set()

    def patches(self, name: str, value: Any) -> list[Patch]:
        """Return what `value`, called `name`, lacks when it is made again. Raises `NotRemadeError`."""
        node = self._made.node
        if isinstance(node, ast.ClassDef) and isinstance(value, type):
            return list(self._compare_class(name, value, node, self._namespace))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return list(self._compare_decorated(name, value, node, node.decorator_list, self._namespace))
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            return list(self._compare_assigned(name, value, node.value))
        return []

    def _is_newer(self, *nodes: ast.AST) -> bool:
        """Return whether what expressions refer to has been bound again since they ran."""
        names = {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}
        return any(self._source.is_newer(name, self._made.place) for name in names)

    def _differs(self, node: ast.expr, value: Any, scope: _Bindings) -> bool | None:
        """Return whether an expression gives something else than `value` now, None if that is unknown."""
        try:
            return not evaluates_to(node, value, scope)
        except UnknownError:
            if self._is_newer(node):
                return True
        kinds = (*MADE_BY_CALLS, types.ModuleType, types.BuiltinFunctionType)
        if isinstance(value, kinds) or _is_descriptor(value):
            return False
        return False if _reads_as(node, value) else None

    # Functions

    def _compare_function(
        self, target: str, function: types.FunctionType, node: FunctionNode, scope: _Bindings
    ) -> Iterator[Patch]:
        values, nodes = function.__defaults__ or (), node.args.defaults
        if len(values) != len(nodes):
            differ: set[bool | None] = {True}
        else:
            differ = {self._differs(each, value, scope) for each, value in zip(nodes, values, strict=True)}
        if differ - {False}:
            yield Patch(f"{target}.__defaults__", function.__defaults__, certain=True in differ)
        by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        keywords = {arg.arg: default for arg, default in by_name if default is not None}
        held = function.__kwdefaults__ or {}
        if held.keys() != keywords.keys():
            yield Patch(f"{target}.__kwdefaults__", function.__kwdefaults__, certain=True)
            keywords = {}
        for name, each in keywords.items():
            if (differs := self._differs(each, held[name], scope)) is not False:
                yield Patch(f'{target}.__kwdefaults__["{name}"]', held[name], certain=bool(differs))
        decorated = bool(getattr(node, "decorator_list", []))
        yield from _attributes(target, function, certain=not decorated)

    def _compare_decorated(
        self, target: str, value: Any, node: Any, decorators: list[ast.expr], scope: _Bindings
    ) -> Iterator[Patch]:
        """Compare what decorators have made of a definition, each layer down to the function itself."""
        if self._is_newer(*decorators):
            raise NotRemadeError(certain=True)
        while not _is_made_by(value, node):
            if type(value).__module__ == "__main__" and not isinstance(value, types.FunctionType):
                raise NotRemadeError(certain=True)  # an object, with a state of its own
            if isinstance(value, types.FunctionType):
                self._check_closure(value, node, decorators, scope)
            yield from _attributes(target, value, certain=False)
            inner = fact_of(value, "__wrapped__")
            if inner is None:
                return
            value, target = inner, f"{target}.__wrapped__"
        yield from self._compare_function(target, value, node, scope)

    def _check_closure(
        self, function: types.FunctionType, node: ast.AST, given: Iterable[ast.AST], scope: _Bindings
    ) -> None:
        """Raise `NotRemadeError` where a function holds what the call in `given` would not give it again."""
        if id(function) in self._checked:
            return
        self._checked.add(id(function))
        if not _is_from_cell(function):
            self._check_registered(function, node)
            return
        arguments = [each for root in given for each in _arguments(root)]
        for variable, value in closure_of(function).items():
            if isinstance(node, FunctionNode) and _is_made_by(value, node):
                # What `functools.wraps` leads to, statements can reach.
                reached = fact_of(function, "__wrapped__") is value
                if not reached and list(self._compare_function("", value, node, scope)):
                    raise NotRemadeError(certain=True)
            elif isinstance(value, types.FunctionType):
                self._check_closure(value, node, given, scope)
            elif not isinstance(value, _WITHOUT_STATE) and not fact_of(value, "__wrapped__"):
                self._check_variable(value, arguments, _assigned(function, variable), scope)

    def _check_registered(self, function: types.FunctionType, node: ast.AST) -> None:
        """Raise `NotRemadeError` where a library's wrapper was given more functions: `singledispatch`."""
        for value in closure_of(function).values():
            if isinstance(value, types.FunctionType) and not _is_from_cell(value):
                self._check_closure(value, node, (), {})
            for each in value.values() if type(value) is dict else ():
                ours = (
                    isinstance(each, types.FunctionType)
                    and cell_source(each.__code__.co_filename) is not None
                )
                if ours and not _is_made_by(each, node):
                    raise NotRemadeError(certain=True)

    def _check_variable(
        self, value: Any, arguments: list[ast.expr], assigned: list[ast.expr], scope: _Bindings
    ) -> None:
        if any(self._differs(each, value, scope) is False for each in arguments):
            return
        differ = {self._differs(each, value, scope) for each in assigned} or {None}
        if differ != {False}:
            raise NotRemadeError(certain=True in differ)

    def _compare_assigned(self, name: str, value: Any, node: ast.expr) -> Iterator[Patch]:
        """Compare what an assignment has made."""
        if isinstance(node, ast.Lambda) and isinstance(value, types.FunctionType):
            yield from self._compare_function(name, value, node, self._namespace)
        elif isinstance(value, types.FunctionType):
            yield from self._compare_decorated(name, value, node, [node], self._namespace)
        elif isinstance(value, functools.partial):
            held = [*value.args, *value.keywords.values()]
            if any(has_identity(each) and not callable(each) for each in held):
                raise NotRemadeError(certain=False)
        elif type(value) is type:
            public = {key: each for key, each in vars(value).items() if not key.startswith("_")}
            for key, each in public.items():
                if not _is_descriptor(each):
                    yield Patch(f"{name}.{key}", each, certain=False)

    # Classes

    def _compare_class(self, target: str, cls: type, node: ast.ClassDef, scope: _Bindings) -> Iterator[Patch]:
        if self._is_newer(*node.decorator_list, *(each.value for each in node.keywords)):
            raise NotRemadeError(certain=True)
        for each in node.bases:
            self._check_base(cls, each, scope)
        inner: ChainMap[str, Any] = ChainMap({}, scope)
        for statement in node.body:
            bound = scope_of(ast.Module([statement], [])).bound
            yield from self._compare_statement(target, cls, node, statement, inner)
            inner.update(dict.fromkeys(bound, UNKNOWN))
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as made)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as made)
                ):
                    inner[name] = self._made_anew(made, vars(cls).get(_mangled(cls, name)), inner)
        yield from _set_later(target, cls, node, {_mangled(cls, name) for name in inner.maps[0]})

    def _made_anew(self, node: ast.expr, held: Any, scope: _Bindings) -> Any:
        """Return what the rest of a class body finds where the script makes it."""
        return held if self._differs(node, held, scope) is False else _evaluate(node, scope)

    def _compare_statement(
        self, target: str, cls: type, node: ast.ClassDef, statement: ast.stmt, scope: _Bindings
    ) -> Iterator[Patch]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._compare_method(f"{target}.{statement.name}", cls, statement, scope)
            case ast.ClassDef(name=name):
                if isinstance(member := vars(cls).get(_mangled(cls, name)), type):
                    yield from self._compare_class(f"{target}.{name}", member, statement, scope)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr())
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr())
            ):
                plain = _is_plain(cls) and not node.decorator_list
                yield from self._compare_attribute(target, cls, name, statement, scope, plain=plain)
            case _:
                for name in sorted(scope_of(ast.Module([statement], [])).bound):
                    held = vars(cls).get(_mangled(cls, name), MISSING)
                    if held is not MISSING and not _is_descriptor(held):
                        yield Patch(f"{target}.{_mangled(cls, name)}", held, certain=False)

    def _check_base(self, cls: type, node: ast.expr, scope: _Bindings) -> None:
        base = _evaluate(node, scope)
        held = (*cls.__bases__, *vars(cls).get("__orig_bases__", ()))
        other = isinstance(base, type) and not any(base is each for each in held)
        if other or self._is_newer(node):
            raise NotRemadeError(certain=True)

    def _compare_attribute(  # noqa: PLR0913 - a class, one of its attributes, and where that is from
        self,
        target: str,
        cls: type,
        name: str,
        made: ast.Assign | ast.AnnAssign,
        scope: _Bindings,
        *,
        plain: bool,
    ) -> Iterator[Patch]:
        node: Any = made.value
        fixed = _fixed(cls, name, annotated=isinstance(made, ast.AnnAssign))
        if any(self._differs(node, each, scope) for each in fixed):
            raise NotRemadeError(certain=True)
        # Where a decorator or a metaclass takes an attribute, something else is in its place.
        is_taken = not plain or bool(fixed)
        held = vars(cls).get(_mangled(cls, name), MISSING)
        differs = self._differs(node, held, scope)
        if held is MISSING or _is_descriptor(held) or isinstance(held, cls):
            if self._is_newer(node) or (not is_taken and (differs or held is MISSING)):
                raise NotRemadeError(certain=True)
        elif differs or (differs is None and not any(is_same(held, each) for each in fixed)):
            yield Patch(f"{target}.{_mangled(cls, name)}", held, certain=bool(differs))

    def _compare_method(
        self, target: str, cls: type, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: _Bindings
    ) -> Iterator[Patch]:
        member = vars(cls).get(_mangled(cls, node.name))
        for kind, attribute, suffix in (
            (staticmethod, "__func__", ""),
            (classmethod, "__func__", ".__func__"),
            (property, "fget", ".fget"),
            (functools.cached_property, "func", ".func"),
        ):
            if isinstance(member, kind):
                member, target = getattr(member, attribute), target + suffix
        extends = any(extends_property(each, node.name) for each in node.decorator_list)
        if isinstance(member, types.FunctionType) and not extends:
            if node.decorator_list:
                yield from self._compare_decorated(target, member, node, node.decorator_list, scope)
            elif _is_made_by(member, node):
                yield from self._compare_function(target, member, node, scope)


def _reads_as(node: ast.expr, value: Any) -> bool:
    """Return whether an expression is how a script would write `value`."""
    try:
        text = LiteralWriter().assignment("value", value)
    except (NoLiteralError, RecursionError):
        return False
    return ast.dump(ast.parse(text)) == ast.dump(ast.parse(f"value = {ast.unparse(node)}"))


def _evaluate(node: ast.expr, scope: _Bindings) -> Any:
    try:
        return evaluate(node, scope)
    except UnknownError:
        return UNKNOWN


def _is_made_by(value: Any, node: ast.AST) -> bool:
    """Return whether a value is the function that a statement has made, and nothing around it."""
    if not isinstance(value, types.FunctionType) or not isinstance(node, FunctionNode):
        return False
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    code = value.__code__
    first = node.lineno if isinstance(node, ast.Lambda) else first_line(node)
    return code.co_name == name and first <= code.co_firstlineno <= (node.end_lineno or node.lineno)


def _is_from_cell(value: Any) -> bool:
    """Return whether a value is a function that a cell of the notebook has defined."""
    return isinstance(value, types.FunctionType) and cell_source(value.__code__.co_filename) is not None


def _is_descriptor(value: Any) -> bool:
    return hasattr(type(value), "__get__")


def _attributes(target: str, function: Any, *, certain: bool) -> Iterator[Patch]:
    """Yield the attributes of a function; where `certain`, it had none when it was made."""
    if not isinstance(function, types.FunctionType | type(functools.cache(id))):
        return  # what a library makes of a function has attributes of its own
    ours = _is_from_cell(function)
    for name, value in vars(function).items():
        if certain and not name.isidentifier():
            raise NotRemadeError(certain=True)
        is_theirs = _is_dunder(name) or (name.startswith("_") and not ours)
        if not is_theirs and (certain or type(value) in _DATA):
            yield Patch(f"{target}.{name}", value, certain=certain)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _arguments(node: ast.AST) -> Iterator[ast.expr]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            yield from each.args
            yield from (keyword.value for keyword in each.keywords)


def _assigned(function: types.FunctionType, variable: str) -> list[ast.expr]:
    """Return what the functions around `function` assign to a variable, defaults of parameters included."""
    code = function.__code__
    found: list[ast.expr] = []
    for outer in ast.walk(ast.parse(cell_source(code.co_filename) or "")):
        if not isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not outer.lineno <= code.co_firstlineno <= (outer.end_lineno or outer.lineno):
            continue
        positional = [*outer.args.posonlyargs, *outer.args.args]
        defaults = dict(zip(reversed(positional), reversed(outer.args.defaults), strict=False))
        defaults |= dict(zip(outer.args.kwonlyargs, filter(None, outer.args.kw_defaults), strict=False))
        found += [default for arg, default in defaults.items() if arg.arg == variable]
        for each in ast.walk(outer):
            match each:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as made)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as made)
                ) if name == variable:
                    found.append(made)
    return found


def _is_plain(cls: type) -> bool:
    """Return whether nothing but the class body decides which attributes a class has."""
    return type(cls) in (type, abc.ABCMeta)


def _mangled(cls: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name


def _fixed(cls: type, name: str, *, annotated: bool) -> list[Any]:
    """Return what became of an attribute when the class was made: a field's default, a member's value."""
    found = []
    field = vars(cls).get("__dataclass_fields__", {}).get(name) if annotated else None
    if field is not None and field.default is not MISSING:
        found.append(field.default)
    defaults = vars(cls).get("_field_defaults", {})
    if annotated and name in defaults:
        found.append(defaults[name])
    if isinstance(cls, enum.EnumType) and "__new__" not in vars(cls) and name in cls.__members__:
        found.append(cls.__members__[name]._value_)
    return found


def _set_later(target: str, cls: type, node: ast.ClassDef, bound: set[str]) -> Iterator[Patch]:
    """Yield the attributes that were set on a class, and are not in its body."""
    hooks = any("__init_subclass__" in vars(each) for each in cls.__mro__[1:-1])
    for name, value in class_attributes(cls) if _is_plain(cls) else ():
        ours = name in bound or _is_dunder(name)
        if ours or (name.startswith("_") and issubclass(cls, tuple)):
            continue
        if isinstance(value, types.FunctionType | type) or not _is_descriptor(value):
            yield Patch(f"{target}.{name}", value, certain=not (hooks or node.decorator_list))
