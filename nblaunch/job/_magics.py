"""The code inside magics and shell commands, once IPython's transformer made calls of them."""

from __future__ import annotations

import ast
import re
import string
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SHELL_NAME = re.compile(r"\$\{?([^\W\d]\w*)")


def ipython_call(node: ast.Call) -> tuple[str, list[str]] | None:
    """Return the method and the texts of a call that IPython's transformer wrote."""
    match node.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method):
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if len(texts) == len(node.args):
                return method, [text for text in texts if isinstance(text, str)]
    return None


def interpolated(text: str) -> list[str]:
    """Return the expressions that IPython puts the values of into `text`: `$name`, `{expression}`."""
    expressions = _SHELL_NAME.findall(text)
    # Braces that are no format (awk's, say) are left alone by IPython too.
    with suppress(ValueError):
        expressions += [field.strip() for _, field, _, _ in string.Formatter().parse(text) if field]
    return expressions


def parsed(code: str, transform: Callable[[str], str] = str) -> list[ast.stmt]:
    """Return the statements of `code`, or none where it is not Python."""
    with suppress(SyntaxError, ValueError):
        return ast.parse(transform(code)).body
    return []


def code_in(line: str) -> list[ast.stmt]:
    """Return the code that a magic's line ends with, after options such as `-n 10 -q`."""
    rest = line.strip()
    option = False
    while rest:
        word, _, after = rest.partition(" ")
        if not word.startswith("-"):
            code = parsed(rest)
            # What follows an option and is no start of code was the option's value.
            if code or not option:
                return code
        option = word.startswith("-")
        rest = after.strip()
    return []
