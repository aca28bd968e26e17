"""What an expression of the notebook gives now, as far as that can be told without running anybody's code."""

from __future__ import annotations

import ast
import builtins
import enum
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

_ATOMS = (int, float, complex, bool, str, bytes, type(None), type(...), range)
_NUMBERS = (int, float, bool)
_MOST_BITS = 64
_MOST = 1 << _MOST_BITS
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
_PURE = (int, float, bool, str, range, abs, min, max, round)
_EMPTY = (list, dict, set, tuple)

UNKNOWN = object()
"""The value of a variable that cannot be told."""


class UnknownError(Exception):
    """Only running an expression would tell what it gives."""


def evaluates_to(node: ast.expr, value: Any, scope: Mapping[str, Any]) -> bool:
    """Return whether an expression makes `value`, or an equal one that nothing else refers to.

    Raises `UnknownError`.
    """
    match node:
        case ast.List(elts=parts):
            return type(value) is list and _all_evaluate_to(parts, value, scope)
        case ast.Tuple(elts=parts):
            return type(value) is tuple and _all_evaluate_to(parts, value, scope)
        case ast.Dict(keys=keys, values=parts):
            whole = type(value) is dict and _all_evaluate_to(keys, list(value), scope)
            return whole and _all_evaluate_to(parts, list(value.values()), scope)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if _resolve(name, scope) in _EMPTY:
            return type(value) is _resolve(name, scope) and not value
        case ast.Call(func=ast.Name(id=name), args=[], keywords=parts) if _resolve(name, scope) is dict:
            names = [part.arg for part in parts]
            whole = type(value) is dict and None not in names and names == list(value)
            return whole and _all_evaluate_to([part.value for part in parts], list(value.values()), scope)
    return is_same(evaluate(node, scope), value)


def _all_evaluate_to(nodes: list[Any], values: Any, scope: Mapping[str, Any]) -> bool:
    if any(node is None or isinstance(node, ast.Starred) for node in nodes):
        raise UnknownError
    return len(nodes) == len(values) and all(
        evaluates_to(node, value, scope) for node, value in zip(nodes, values, strict=True)
    )


def is_same(first: Any, second: Any) -> bool:
    """Return whether nobody could tell one from the other: one object, or equal values of a built-in type."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if type(first) is tuple:
        return len(first) == len(second) and all(map(is_same, first, second))
    # As text: -0.0 is not 0.0, and a NaN is a NaN.
    return type(first) in _ATOMS and repr(first) == repr(second)


def evaluate(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _resolve(name, scope)
        case ast.Tuple(elts=parts):
            return tuple(evaluate(part, scope) for part in parts)
        case ast.UnaryOp(op=kind, operand=operand):
            return _calculate(kind, evaluate(operand, scope))
        case ast.BinOp(left=left, op=kind, right=right):
            return _calculate(kind, evaluate(left, scope), evaluate(right, scope))
        case ast.Attribute(value=owner, attr=name):
            return _attribute(evaluate(owner, scope), name)
        case ast.Subscript(value=whole, slice=index):
            return _element(evaluate(whole, scope), evaluate(index, scope))
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if _resolve(name, scope) in _PURE:
            return _call(_resolve(name, scope), *(evaluate(part, scope) for part in parts))
    raise UnknownError


def _resolve(name: str, scope: Mapping[str, Any]) -> Any:
    value = scope.get(name, vars(builtins).get(name, UNKNOWN))
    if value is UNKNOWN:
        raise UnknownError
    return value


def _calculate(kind: ast.AST, *operands: Any) -> Any:
    grows = isinstance(kind, ast.Pow | ast.LShift)
    numbers = all(type(each) in _NUMBERS for each in operands)
    if type(kind) not in _OPERATORS or not numbers or (grows and abs(operands[-1]) > _MOST_BITS):
        raise UnknownError
    return _call(_OPERATORS[type(kind)], *operands)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of Python's own gives for values that are small, so that it takes no time."""
    numbers = [each for each in arguments if type(each) in _NUMBERS]
    if not all(type(each) in _ATOMS for each in arguments) or any(abs(each) > _MOST for each in numbers):
        raise UnknownError
    try:
        return function(*arguments)
    except (ArithmeticError, TypeError, ValueError):
        raise UnknownError from None


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, types.ModuleType) and name in vars(owner):
        return vars(owner)[name]
    if isinstance(owner, enum.EnumType) and name in owner.__members__:
        return owner.__members__[name]
    if type(owner) is type and name in vars(owner) and not hasattr(type(vars(owner)[name]), "__get__"):
        return vars(owner)[name]
    raise UnknownError


def _element(whole: Any, index: Any) -> Any:
    if type(whole) in (list, tuple, dict) and type(index) in _ATOMS:
        try:
            return whole[index]
        except (LookupError, TypeError):
            pass
    raise UnknownError
