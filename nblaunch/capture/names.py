"""Which of the notebook's names a cell needs, found in its source alone.

The cell is followed statement by statement, as it would run: a name that is loaded before the cell has
certainly given it a value must come from the notebook. Code that runs later (functions, lambdas, methods) is
followed where its name is first loaded, with the names that are defined there.
"""

from __future__ import annotations

import ast
import re
import string
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nblaunch.capture.dataflow import (
    Body,
    ComprehensionNode,
    Flow,
    FlowVisitor,
    FunctionNode,
    LexicalScope,
    ScopeKind,
    Variable,
    are_annotations_lazy,
    args_of,
    defaults_of,
    extends_property,
    imported_name,
    scope_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_SHELL_NAME = re.compile(r"\$\{?([^\W\d]\w*)")


@dataclass(frozen=True, slots=True)
class CellNames:
    """The names that a cell needs from the notebook, whether or not they exist there.

    `needed` are loaded before the cell has certainly defined them. `maybe` might be: they are defined on some
    paths through the cell only, used in a function that the cell never uses, or in a magic's text. `dotted`
    holds the attribute chains that start at one of either (`xml.etree.ElementTree`): a part of a chain may be
    a submodule that must be imported. `bound` are those that the cell has certainly given a value by its end.
    """

    needed: frozenset[str]
    maybe: frozenset[str]
    dotted: frozenset[str]
    bound: frozenset[str] = frozenset()


def cell_names(source: str, *, transform: Callable[[str], str] = str) -> CellNames:
    r"""Return the names that `source` needs from the notebook.

    `source` is Python as IPython's transformer leaves it. `transform` is that transformer, for the
    body of a `%%time` below the first line, which is still in IPython's own syntax. Raises the
    SyntaxError of `source` unchanged.

    >>> names = cell_names("y = x + 1\nif y:\n    z = 1\nprint(y, z, os.path.sep)")
    >>> sorted(names.needed), sorted(names.maybe), sorted(names.dotted)
    (['os', 'print', 'x'], ['z'], ['os.path.sep'])
    """
    tree = ast.parse(source)
    analysis = _Analysis(transform, lazy_annotations=are_annotations_lazy(tree))
    try:
        analysis.follow(tree)
    except RecursionError:
        # Too deep to follow, though Python may well compile it: every name might be needed.
        loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return CellNames(frozenset(), frozenset(loaded), frozenset())
    return CellNames(
        needed=frozenset(analysis.needed),
        maybe=frozenset(analysis.maybe - analysis.needed),
        dotted=frozenset(analysis.dotted),
        bound=frozenset(analysis.bound),
    )


@dataclass(frozen=True, slots=True)
class _Followed:
    """One visit of a body, and its effect on the flow."""

    before: Flow
    after: Flow
    certain: bool


class _Analysis(FlowVisitor, ast.NodeVisitor):  # the second for ruff: a visitor may be called visit_Name
    """Follows a cell in the order in which it runs, and collects the names that it loads."""

    def __init__(self, transform: Callable[[str], str], *, lazy_annotations: bool) -> None:
        super().__init__()
        self.needed: set[str] = set()
        self.maybe: set[str] = set()
        self.dotted: set[str] = set()
        self.bound: set[str] = set()
        self._transform = transform
        self._lazy_annotations = lazy_annotations
        self._module = LexicalScope(ScopeKind.MODULE)
        self._scope = self._module
        self._scopes: dict[ast.AST, LexicalScope] = {}
        self._certain = True
        self._uses = True
        self._followed: dict[Body, list[_Followed]] = {}

    def follow(self, tree: ast.Module) -> None:
        """Follow the cell, then the functions that it never used."""
        self.visit_all(tree.body)
        if self.flow.dead:
            self.flow = Flow()
        self.bound = {variable.name for variable in self.flow.sure if variable.scope is self._module}
        with self._uncertainly():
            while unused := [body for body, times in self._followed.items() if not times]:
                for body in unused:
                    self._enter(body)

    # Loads and stores

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._load(node.id)
        elif isinstance(node.ctx, ast.Store):
            self.store(node.id)
        else:
            self._report(self._variable(node.id))
            self.forget(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        attributes = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            attributes.append(value.attr)
            value = value.value
        if not isinstance(value, ast.Name):
            self.visit(value)
        elif self._load(value.id):
            self.dotted.add(".".join([value.id, *reversed(attributes)]))

    def _variable(self, name: str) -> Variable:
        return Variable(self._scope.owner(name), name)

    def _load(self, name: str) -> bool:
        """Record that `name` is loaded here; return whether it may be the notebook's."""
        variable = self._variable(name)
        if variable.scope.kind is ScopeKind.CLASS and variable not in self.flow.sure:
            # A name that a class body has not defined yet is looked up in the module, past any function.
            with self._uncertainly(unless=variable not in self.flow.possible):
                return self._load_variable(Variable(self._module, name))
        return self._load_variable(variable)

    def _load_variable(self, variable: Variable) -> bool:
        reported = self._report(variable)
        if self._uses:
            for body in self.flow.bodies(variable):
                self._enter(body)
        return reported

    def _report(self, variable: Variable) -> bool:
        flow = self.flow
        if flow.dead or variable in flow.sure or variable.scope is not self._module:
            return False
        certain = self._certain and variable not in flow.possible
        (self.needed if certain else self.maybe).add(variable.name)
        return True

    def store(self, name: str, bodies: Iterable[Body] = ()) -> None:
        self.flow = self.flow.storing(self._variable(name), bodies)

    def forget(self, name: str) -> None:
        self.flow = self.flow.deleting(self._variable(name))

    # Order of evaluation, where it is not the order of the tree

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.value, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.value, [node.target])
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)
        if self._scope.kind is not ScopeKind.FUNCTION:
            self._visit_annotation(node.annotation)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._load(node.target.id)
        self.visit_all([node.value, node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit_all([node.value, node.target])

    def visit_BinOp(self, node: ast.BinOp) -> None:
        # A loop, as a sum of hundreds of terms is hundreds of levels deep.
        operands: list[ast.AST] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp):
            operands.append(left.right)
            left = left.left
        self.visit_all([left, *reversed(operands)])

    def _assign(self, value: ast.expr, targets: list[ast.expr]) -> None:
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if isinstance(value, ast.Lambda) and len(names) == len(targets):
            self.visit_all(defaults_of(value))
            body = self._body(value)
            for name in names:
                self.store(name, [body])
        else:
            self.visit_all([value, *targets])

    def _visit_annotation(self, annotation: ast.expr | None) -> None:
        if annotation is not None:
            with self._uncertainly(unless=not self._lazy_annotations), self._using(uses=False):
                self.visit(annotation)

    @contextmanager
    def _uncertainly(self, *, unless: bool = False) -> Iterator[None]:
        """Only `maybe` names come from this block."""
        outer, self._certain = self._certain, self._certain and unless
        yield
        self._certain = outer

    @contextmanager
    def _using(self, *, uses: bool) -> Iterator[None]:
        """Functions and classes named in this block may be called there, or are only mentioned."""
        outer, self._uses = self._uses, uses
        yield
        self._uses = outer

    # Imports

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                self.store(imported_name(alias))

    visit_ImportFrom = visit_Import  # noqa: N815  # the name is ast's

    # Code in scopes of its own

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        is_method = self._scope.kind is ScopeKind.CLASS
        decorators = [
            each for each in node.decorator_list if not (is_method and extends_property(each, node.name))
        ]
        self.visit_all([*decorators, *defaults_of(node)])
        with self._type_parameters(node):
            for annotation in [*(arg.annotation for arg in args_of(node)), node.returns]:
                self._visit_annotation(annotation)
            bodies = [self._body(node)]
        if is_method:
            # The getter lives on when `@size.setter` takes its name, so do the overloads.
            bodies += self.flow.bodies(self._variable(node.name))
        elif decorators:
            self._enter(bodies[0])
        self.store(node.name, bodies)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # the name is ast's

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_all(defaults_of(node))
        self._enter(self._body(node))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_all(node.decorator_list)
        with self._type_parameters(node):
            with self._using(uses=False):
                self.visit_all([*node.bases, *node.keywords])
            inherited = [body for base in node.bases for body in self._bodies_named_in(base)]
            scope = self._scope_of(node)
            with self._inside(scope):
                self.visit_all(node.body)
        methods = [body for variable, body in self.flow.functions if variable.scope is scope]
        self.flow = self.flow.leaving(scope)
        self.store(node.name, [*methods, *inherited])

    def _bodies_named_in(self, base: ast.expr) -> list[Body]:
        names = [node.id for node in ast.walk(base) if isinstance(node, ast.Name)]
        return [body for name in names for body in self.flow.bodies(self._variable(name))]

    def visit_ListComp(self, node: ComprehensionNode) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        before = self.flow
        with self._inside(self._scope_of(node)):
            self.visit_all([first.target, *first.ifs])
            for generator in others:
                self.visit_all([generator.iter, generator.target, *generator.ifs])
            self.visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self.flow |= before

    visit_SetComp = visit_ListComp  # noqa: N815  # the names are ast's
    visit_DictComp = visit_ListComp  # noqa: N815
    visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_TypeAlias(self, node: ast.AST) -> None:
        name, *_, value = ast.iter_child_nodes(node)
        with self._type_parameters(node), self._uncertainly():
            self.visit(value)
        self.visit(name)

    @contextmanager
    def _type_parameters(self, node: ast.AST) -> Iterator[None]:
        """Follow a block that sees the `[T]` of `node`; a bound of `T` is evaluated lazily."""
        parameters = getattr(node, "type_params", [])
        if not parameters:
            yield
            return
        names = frozenset(parameter.name for parameter in parameters)
        scope = LexicalScope(ScopeKind.FUNCTION, self._scope, names)
        with self._inside(self._scopes.setdefault(parameters[0], scope)):
            with self._uncertainly():
                self.visit_all(child for each in parameters for child in ast.iter_child_nodes(each))
            yield

    @contextmanager
    def _inside(self, scope: LexicalScope) -> Iterator[None]:
        outer, self._scope = self._scope, scope
        yield
        self._scope = outer

    def _scope_of(self, node: ast.AST) -> LexicalScope:
        if node not in self._scopes:
            self._scopes[node] = scope_of(node, self._scope)
        return self._scopes[node]

    def _body(self, node: FunctionNode) -> Body:
        body = Body(node, self._scope_of(node))
        self._followed.setdefault(body, [])
        return body

    def _enter(self, body: Body) -> None:
        """Follow `body`, which may be called here, unless an earlier visit covers this one."""
        before, times = self.flow, self._followed[body]
        if before.dead:
            return
        for time in times:
            if time.before.covers(before) and time.certain >= self._certain:
                self.flow = before.changed_as(time.before, time.after)
                return
        # Recorded first, so that a recursive call ends here.
        position = len(times)
        times.append(_Followed(before, before, self._certain))
        with self._inside(body.scope):
            self.visit_body(body.nodes)
        self.flow = before | self.flow.leaving(body.scope)
        times[position] = _Followed(before, self.flow, self._certain)

    # Calls that IPython has made of magics and shell commands

    def visit_Call(self, node: ast.Call) -> None:
        match ipython_call(node):
            case ("system" | "getoutput", [command]):
                self._interpolate(command)
            case ("run_line_magic", [name, line]):
                self._line_magic(name, line)
            case ("run_cell_magic", [name, line, cell]):
                self._cell_magic(name, line, cell)
            case _:
                with self._using(uses=True):
                    self.generic_visit(node)

    def _line_magic(self, name: str, line: str) -> None:
        before = self.flow
        self._interpolate(line)
        with self._uncertainly():
            self.visit_all(code_in(line))
        if name != "time":
            self.flow |= before

    def _cell_magic(self, name: str, line: str, cell: str) -> None:
        self._interpolate(line)
        before, code = self.flow, parsed(cell, self._transform)
        match name:
            case "time":
                self.visit_all(code)
            case "capture":
                self.visit_all(code)
                for captured in filter(str.isidentifier, line.split()):
                    self.store(captured)
            case "timeit" | "prun":
                self.visit_all([*code_in(line), *code])
                self.flow = before
            case _:
                with self._uncertainly():
                    self.visit_all([*code_in(line), *code])
                self.flow |= before

    def _interpolate(self, text: str) -> None:
        """Load the names that IPython puts into `text`: `$name` and `{expression}`."""
        with self._uncertainly():
            for expression in interpolated(text):
                self.visit_all(parsed(expression))


# The code inside magics and shell commands, of which IPython's transformer has made calls.


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
    # IPython ignores braces that are no format (awk's, for example), too.
    with suppress(ValueError):
        expressions += [field.strip() for _, field, _, _ in string.Formatter().parse(text) if field]
    return expressions


def parsed(code: str, transform: Callable[[str], str] = str) -> list[ast.stmt]:
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
            # A word behind an option that does not start code was the option's value.
            if code or not option:
                return code
        option = word.startswith("-")
        rest = after.strip()
    return []
