"""What a cell wants from the notebook is told from its source, and told right."""

from __future__ import annotations

import builtins
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from nblaunch.capture.names import cell_names

BUILTIN = frozenset(dir(builtins))


def wanted(source: str) -> tuple[str, str]:
    """Return the needed and the maybe names, builtins left out."""
    names = cell_names(textwrap.dedent(source), transform=TransformerManager().transform_cell)
    assert not names.needed & names.maybe
    return " ".join(sorted(names.needed - BUILTIN)), " ".join(sorted(names.maybe - BUILTIN))


def wanted_by_cell(cell: str) -> tuple[str, str]:
    """Return the same for a cell as it stands in the notebook."""
    return wanted(TransformerManager().transform_cell(textwrap.dedent(cell)))


WANTED: dict[str, list[tuple[str, ...]]] = {
    "a name loaded before it is defined is needed": [
        ("", ""),
        ("x", "x"),
        ("x = 1\nx", ""),
        ("x = x + 1", "x"),
        ("x += 1", "x"),
        ("x += 1\nx", "x"),
        ("x = y = z\nx, y", "z"),
        ("a, (b, *c) = d\na, b, c", "d"),
        ("x.y = 1", "x"),
        ("x[i] = v", "i v x"),
        ("x[i] += v", "i v x"),
        ("x = 1\ndel x", ""),
        ("x = 1\ndel x\nx", "x"),
        ("del x", "x"),
        ("del x[0], y.z", "x y"),
        ("x: int = y\nx", "y"),
        ("x.y: int", "x"),
        ("print(y := x, y)\ny", "x"),
        ("assert a, b", "a b"),
        ("f'{a} {b:{c}} {d!r}'", "a b c d"),
        ("a[b:c, ...]", "a b c"),
        ("f(*a, **b)", "a b f"),
        ("await a", "a"),
        ("not a if b else c", "a b c"),
        ("raise E from c", "E c"),
        ("global x\nx = 1\nx", ""),
        ("a < b < c", "a b c"),
    ],
    # `import a.b` makes `a`; a star import makes nothing that could be known.
    "an import defines its name": [
        ("import a\na", ""),
        ("import a.b.c\na", ""),
        ("import a.b as c\nc", ""),
        ("import a.b as c\na", "a"),
        ("from a import b\nb", ""),
        ("from a import b as c\nb, c", "b"),
        ("from a import *\nb", "b"),
        ("from . import a\na", ""),
    ],
    "a name defined on some branches is only maybe wanted": [
        ("if c: x = 1\nx", "c", "x"),
        ("if c: x = 1\nelse: x = 2\nx", "c", ""),
        ("if c: x\nelse: y", "c x y", ""),
        ("if a: x = 1\nelif b: x = 2\nelse: x = 3\nx", "a b", ""),
        ("if a: x = 1\nelif b: x = 2\nx", "a b", "x"),
        ("if c: x = 1\nelse: raise E\nx", "E c", ""),
        ("x = 1\nif c: del x\nx", "c", "x"),
        ("if True: x = 1\nx", "", ""),
        ("if 0: y\nelse: x = 1\nx", "", ""),
        ("y = (x := 1) if c else 2\nx", "c", "x"),
        ("y = (x := 1) if c else (x := 2)\nx", "c", ""),
        ("a and (x := b)\nx", "a b", "x"),
        ("(x := a) or b\nx", "a b", ""),
        ("if (x := a) and x.b: x", "a", ""),
        ("if c: x = 1\nx\nx = 2\nx", "c", "x"),
        ("x\nif c: x = 1\nx", "c x", ""),
    ],
    # A loop's names are only maybe defined after it, unless it can end in one way only.
    "a loop may not run": [
        ("for i in r: i", "r", ""),
        ("for i in r: pass\ni", "r", "i"),
        ("for i in r: x = i\nx", "r", "x"),
        ("for i in r: print(p); p = i", "p r", ""),
        ("for i in r: pass\nelse: x = 1\nx", "r", ""),
        ("for i in r:\n  break\nelse: x = 1\nx", "r", "x"),
        ("for i in r:\n  if c: continue\n  x = 1\n  x", "c r", ""),
        ("for i in r:\n  if c: x = 1; continue\n  else: break\nx", "c r", "x"),
        ("for a.b in r: pass", "a r", ""),
        ("for a, b in r: a, b", "r", ""),
        ("while c: x = 1\nx", "c", "x"),
        ("while True:\n  x = f()\n  if x: break\nx", "f", ""),
        ("while True:\n  with l: x = f()\n  if x: break\nx", "f l", ""),
        ("while 1: x = f()\ny", "f", ""),
        ("while (x := f()): pass\nx", "f", ""),
        ("async for i in r: i", "r", ""),
    ],
    "an exception may come from anywhere in its block": [
        ("try: import a\nexcept ImportError: a = None\na", "", ""),
        ("try: x = f()\nexcept E: pass\nx", "E f", "x"),
        ("try: x = f()\nexcept E: raise\nx", "E f", ""),
        ("try: x = f()\nexcept E: x", "E f", "x"),
        ("try: y\nexcept E: x", "E x y", ""),
        ("try: f()\nexcept E as e: e\ne", "E e f", ""),
        ("e = 1\ntry: f()\nexcept E as e: e\ne", "E f", "e"),
        ("try: pass\nexcept E: x = 1\nelse: x = 2\nx", "E", ""),
        ("try: x = f()\nfinally: x", "f", "x"),
        ("try: x = f()\nfinally: y = 1\nx, y", "f", ""),
        ("try: x = 1; raise E\nexcept E: x", "E", "x"),
        ("try:\n  try: x = 1; raise E\n  finally: pass\nexcept E: x", "E", "x"),
        ("try:\n  while True: x = f()\nexcept E: pass\nx", "E f", "x"),
        ("try: x = 1\nexcept* E as g: g\nx", "E", "x"),
        ("with a as b: b\nb", "a", ""),
        ("with a as b.c, d as (e, f): e, f", "a b d", ""),
        ("with a: x = 1\nx", "a", ""),
        ("with suppress(E): x = f()\nx", "E f suppress", "x"),
        ("with contextlib.suppress(E): x = f()\nx", "E contextlib f", "x"),
        ("with a:\n  x = 1\n  raise E\nx, y", "E a y", "x"),
        ("async with a as b: b", "a", ""),
        ("raise E\nx", "E", ""),
        ("raise E\ndef f(): x", "E", "x"),
        ("raise E\n(lambda: x)()", "E", "x"),
    ],
    # A match may match nothing, unless its last pattern matches anything.
    "patterns define what they capture": [
        ("match s:\n  case 1: x = 1\nx", "s", "x"),
        ("match s:\n  case 1: x = 1\n  case _: x = 2\nx", "s", ""),
        ("match s:\n  case 1: x = 1\n  case y: x = y\nx", "s", ""),
        ("match s:\n  case y if c: pass\n  case _: y", "c s", "y"),
        ("match s:\n  case C(a, b=d): a, d", "C s", ""),
        ("match s:\n  case m.V: pass\n  case [a, *b]: a, b", "m s", ""),
        ("match s:\n  case {'k': a, **b}: a, b\nb", "s", "b"),
        ("match s:\n  case 1 | 2 as a: a", "s", ""),
        ("match s:\n  case 1: raise E\n  case _: x = 1\nx", "E s", ""),
    ],
    # Only the first iterable is evaluated outside, and only `:=` gets out.
    "a comprehension keeps its variables": [
        ("[x for x in r]\nx", "r x", ""),
        ("[x for x in x]", "x", ""),
        ("[y for x in r for y in x if c(y)]", "c r", ""),
        ("{k: v for k, v in r}", "r", ""),
        ("{f(x) for x in r}", "f r", ""),
        ("sum(a * x for x in r)", "a r", ""),
        ("[(y := x) for x in r]\ny", "r", "y"),
        ("[y for x in r for y in y]", "r", ""),
        ("def f(): return [(y := x) for x in r], y\nf()", "r", ""),
        ("class A:\n  r = 1\n  s = [r for _ in r]", "r", ""),
        ("[lambda: x for x in r]", "r", ""),
        ("[x async for x in r]", "r", ""),
    ],
    # What runs later is followed where its name is loaded, with what is defined there.
    "a function wants its names when it is first used": [
        ("def f(): x", "", "x"),
        ("def f(): x\nf()", "x", ""),
        ("def f(): x\nx = 1\nf()", "", ""),
        ("def f(): x\nf()\nx = 1", "x", ""),
        ("def f(): x\nx = 1", "", ""),
        ("def f(): x\nif c: x = 1\nf()", "c", "x"),
        ("def f(): x\npass_on(f)\nx = 1", "pass_on x", ""),
        ("def f(): g()\ndef g(): x\nf()", "x", ""),
        ("def f(): g()\nf()\ndef g(): x", "g", "x"),
        ("def f(): g()\ndef g(): f(); x\nf()", "x", ""),
        ("def f(): f()\nf()", "", ""),
        ("async def f(): x\nawait f()", "x", ""),
        ("f = lambda: x\nx = 1\nf()", "", ""),
        ("f = lambda: x\nf()\nx = 1", "x", ""),
        ("f = g = lambda: x\ng", "x", ""),
        ("f = [lambda: x]\nx = 1", "x", ""),
        ("sorted(r, key=lambda each: each[x])", "r x", ""),
        ("(lambda a, *b, c, **d: (a, b, c, d, e))()", "e", ""),
        ("@d\ndef f(): x\nx = 1", "d x", ""),
        ("@d\ndef f(): g()\ndef g(): x\nf()", "d g x", ""),
        ("def f(a=b, *, c=d): a, c", "b d", ""),
        ("f = lambda a=b: a", "b", ""),
        ("def f(a, /, b, *c, d, **e): a, b, c, d, e\nf()", "", ""),
        ("def f():\n  x\n  x = 1\nf()", "", ""),
        ("def f():\n  global x\n  x = 1\nf()\nx", "", "x"),
        ("def f():\n  global x\n  x = 1\n  return\nf()\nx", "", "x"),
        ("def f():\n  global x\n  x = 1\nx", "x", ""),
        ("def f():\n  global x\n  x += 1\nf()", "x", ""),
        ("def f():\n  global x\n  x = 1\n  x\nf()", "", ""),
        ("x = 1\ndef f():\n  global x\n  del x\nf()\nx", "", "x"),
        ("def f():\n  x = 1\n  def g(): return x, y\n  return g\nf()", "y", ""),
        ("def f():\n  x = 1\n  def g():\n    nonlocal x\n    x += 1\n  g()\nf()", "", ""),
        ("def f():\n  global x\n  def g(): return x\n  x = 1\n  return g()\nf()", "", ""),
        ("def f():\n  def g(): y\n  x\nf()", "x", "y"),
        ("def f():\n  for i in r:\n    if i: return i\n    s = 1\n  s\nf()", "r", ""),
        ("def f():\n  x: T = 1\n  x\nf()", "", ""),
        ("def f():\n  import a\n  try: a\n  except E as e: e\nf()", "E", ""),
        ("def f():\n  global x\n  x = 1\nf()\ndel x\nf()\nx", "", "x"),
        ("def f():\n  global x\n  del x\nx = 1\nf()\nx = 1\nf()\nx", "", "x"),
        ("def f():\n  global g\n  def g(): y\nf()\ndel g\nf()\ng()", "y", "g"),
        ("def f():\n  x = 1\n  def g():\n    global x\n    return lambda: x\n  g()\nf()", "x", ""),
        ("def f():\n  [x for x in r]\n  x\nf()", "r x", ""),
        ("def f(): x\nf = 1\nf", "", "x"),
        ("def f(): x\ndef f(): y\nf", "y", "x"),
        ("if c:\n  def f(): x\nelse:\n  def f(): y\nf()", "c x y", ""),
        ("if c:\n  x = 1\n  f()\nelse: f()\ndef f(): x", "c f", "x"),
        ("def f(): x\nif c:\n  x = 1\n  f()\nelse: f()", "c x", ""),
        ("def f(): g\ndef h(): f\nh()", "g", ""),
        ("def f(): x\ng = f\nx = 1\ng()", "x", ""),
    ],
    # A method does not see the names of its class.
    "a class body runs at once and its methods with its name": [
        ("class A(B, metaclass=M): x = y", "B M y", ""),
        ("class A: x = 1; y = x", "", ""),
        ("class A: y = x; x = 1", "x", ""),
        ("class A: x = x", "x", ""),
        ("class A:\n  if c: x = 1\n  y = x", "c", "x"),
        ("class A: x = 1\nx", "x", ""),
        ("class A:\n  def m(self): x", "", "x"),
        ("class A:\n  def m(self): x\nA()", "x", ""),
        ("class A:\n  def m(self): x\nx = 1\nA()", "", ""),
        ("class A:\n  x = 1\n  def m(self): x\nA()", "x", ""),
        ("class A:\n  m = lambda self: x\nA()", "x", ""),
        ("class A:\n  def m(self): B()\nclass B:\n  def m(self): x\nA()", "x", ""),
        ("class A:\n  class B:\n    def m(self): x\nA", "x", ""),
        ("@d\nclass A:\n  def m(self): x\nx = 1\nA()", "d", ""),
        ("class A:\n  @d\n  def m(self): x\nx = 1\nA()", "d", ""),
        (
            "class A:\n  @property\n  def p(self): x\n  @p.setter\n  def p(self, v): y\nx = y = 1\nA()",
            "",
            "",
        ),
        ("class A:\n  @property\n  def p(self): x\n  @p.setter\n  def p(self, v): y\nA()", "x y", ""),
        ("class A:\n  def m(self, a=x): __class__\nA", "__class__ x", ""),
        ("def m(self): x\nclass A: m = m\nA()", "x", ""),
        ("def f():\n  x = 1\n  class A:\n    y = x\n    def m(self): x, z\n  return A\nf()", "z", ""),
        ("def f():\n  x = 1\n  class A:\n    x = x\nf()", "x", ""),
        ("class A:\n  x = 1\n  del x\n  y = x", "x", ""),
        ("class A:\n  global x\n  x = 1\nx", "", ""),
        ("class A:\n  def m(self): x\nclass B(A): pass\nx = 1\nB()", "", ""),
        ("class A:\n  def m(self): x\nclass B(A[int]): pass\nB()", "x", ""),
        ("class A:\n  def m(self): x\ndef f(a: A): pass\nx = 1\nA(), f()", "", ""),
        ("def f(): x\nclass A(f()): pass\nx = 1\nA()", "x", ""),
    ],
    # `%%timeit` and `%%prun` define nothing, a magic that is not known might.
    "a nested cell magic defines what its body defines": [
        ("get_ipython().run_cell_magic('time', '', 'y = x')\ny", "x", ""),
        ("get_ipython().run_cell_magic('capture', 'out', 'y = x')\ny, out", "x", ""),
        ("get_ipython().run_cell_magic('timeit', '', 'y = x')\ny", "x y", ""),
        ("get_ipython().run_cell_magic('other', '', 'y = x')\ny", "", "x y"),
        ("get_ipython().run_line_magic('time', f'{x}')", "get_ipython x", ""),
        ("get_ipython().ask(x)", "get_ipython x", ""),
    ],
}
"""A source, the names that it needs, and those that it may want."""


@pytest.mark.parametrize("what", WANTED)
def test_what_a_source_wants(what: str) -> None:
    for source, needed, *maybe in WANTED[what]:
        assert (source, *wanted(source)) == (source, needed, "".join(maybe))


@pytest.mark.parametrize(
    ("source", "needed", "annotations"),
    [
        ("x: T\nx", "x", "T"),
        ("x: T = 1\nx", "", "T"),
        ("a.b: T = c", "a c", "T"),
        ("f: T = lambda: x\nf", "x", "T"),
        ("def f(a: A, *b: B, **c: C) -> D: pass", "", "A B C D"),
    ],
)
def test_annotations_are_needed_unless_they_are_evaluated_later(
    source: str, needed: str, annotations: str
) -> None:
    """As they are from Python 3.14 on, or with the `__future__` import."""
    lazily = wanted(f"from __future__ import annotations\n{source}")
    assert lazily == (needed, annotations)
    if sys.version_info < (3, 14):
        assert wanted(source) == (" ".join(sorted(f"{needed} {annotations}".split())), "")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
@pytest.mark.parametrize(
    ("source", "needed", "maybe"),
    [
        ("def f[T](a: T) -> T: T\nf(1)", "", ""),
        ("def f[T: B](a: T) -> T: pass", "", "B"),
        ("class A[T](B[T]):\n  def m(self, a: T): x\nA()", "B x", ""),
        ("type X[T] = list[T] | Y\nX", "", "Y"),
        ("def f[T](a=T): pass", "T", ""),
    ],
)
def test_type_parameters_are_seen_inside_only(source: str, needed: str, maybe: str) -> None:
    """Their bounds, and the value of a `type` statement, are evaluated only when asked for."""
    assert wanted(source) == (needed, maybe)


@pytest.mark.parametrize(
    ("cell", "needed", "maybe"),
    [
        ("!ls $x ${y} {z + 1} $HOME", "", "HOME x y z"),
        ("!awk '{print $1}' $x", "", "x"),
        ("!echo { x }", "", "x"),
        ("!echo {broken", "", ""),
        ("!echo {{x}}", "", ""),
        ("x = 1\n!echo $x {x}", "", ""),
        ("out = !cat {path}\nout", "", "path"),
        ("for i in r:\n    !echo {i} {x}", "r", "x"),
        ("def f(a):\n    !echo {a} {x}\nf(1)", "", "x"),
        ("%timeit f(x)", "", "f x"),
        ("%timeit -n 10 -r 3 f(x)", "", "f x"),
        ("%timeit -n10 -q f(x)", "", "f x"),
        ("%timeit -n 10", "", ""),
        ("%time y = f(x)\ny", "", "f x"),
        ("%prun y = f(x)\ny", "", "f x y"),
        ("def f(): x\n%timeit f()", "", "x"),
        ("def f(): x\n%timeit f()\nf()", "x", ""),
        ("%cd {where}/$there", "", "there where"),
        ("%pip install nothing here", "", ""),
        ("x?", "", "x"),
        ("a = %who\na", "", ""),
        ("%%time\ny = f(x)", "f x", ""),
        ("%%time\n!ls $x\n%timeit y\nz", "z", "x y"),
        ("%%capture out --no-stderr\nx", "x", ""),
        ("%%timeit -n 3 y = x\nz = y", "x", ""),
        ("%%prun -l 3\nf(x)", "f x", ""),
        ("%%bash\necho $x {y}\n", "", ""),
        ("%%some_magic a\nb(c)", "", "a b c"),
        ("%%time\n%%capture\nx", "x", ""),
        ("%%time\nthis is no Python", "", ""),
    ],
)
def test_magics_and_shell_commands_are_read(cell: str, needed: str, maybe: str) -> None:
    """What IPython fills in is maybe wanted; the body of a `%%time` is code like any other."""
    assert wanted_by_cell(cell) == (needed, maybe)


def test_a_dotted_chain_is_given_whole_where_it_starts_in_the_notebook() -> None:
    """So that the caller can find `xml.etree.ElementTree` among the imported modules."""
    names = cell_names("xml.etree.ElementTree.parse(a.b[0].c)\nimport os\nos.path\nf().g\nh.i = 1")
    assert names.dotted == {"xml.etree.ElementTree.parse", "a.b", "h.i"}
    assert cell_names("def f(x): return x.y, z.w").dotted == {"z.w"}


def test_a_cell_that_is_no_python_raises_its_own_error() -> None:
    with pytest.raises(SyntaxError) as ours:
        cell_names("x = = 1")
    with pytest.raises(SyntaxError) as pythons:
        compile("x = = 1", "<unknown>", "exec")
    assert (ours.value.lineno, ours.value.offset, ours.value.msg) == (
        pythons.value.lineno,
        pythons.value.offset,
        pythons.value.msg,
    )


def test_a_long_sum_is_no_deep_one() -> None:
    """Hundreds of terms are written by programs, and by people."""
    assert wanted(" + ".join(f"x{each}" for each in range(900)))[1] == ""


def test_a_cell_too_deep_to_follow_may_want_all_its_names() -> None:
    deep = "x"
    for each in range(60):
        deep = f"f{each}(g[{deep}])"
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len_of_stack() + 160)
    try:
        names = cell_names(deep)
    finally:
        sys.setrecursionlimit(limit)
    assert "x" in names.maybe
    assert not names.needed


def len_of_stack() -> int:
    frame = sys._getframe()  # the public ways to count frames take seconds
    depth = 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def test_functions_that_all_call_each_other_are_followed_in_no_time() -> None:
    """Each is followed once, not once for every way to it."""
    calls = "; ".join(f"f{each}(x{each})" for each in range(30))
    functions = "".join(f"def f{each}(a): {calls}; y{each} = 1\n" for each in range(30))
    needed, _ = wanted(functions + "f0()\n" * 50)
    assert needed.split() == sorted(f"x{each}" for each in range(30))


NAMES = ["a", "b", "c", "d"]


def expressions(leaf: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return expressions that evaluate all their parts, whatever these are."""
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds("[{}, {}]".format, inner, inner),
            st.builds("({},)".format, inner),
            st.builds("f'{{{}}}'".format, leaf),
            st.builds("({} == {})".format, inner, inner),
            st.builds("({} := {})".format, st.sampled_from(NAMES), inner),
            st.builds("[[each, {}] for each in [{}]]".format, leaf, leaf),
            st.builds("(lambda e={}: e)()".format, inner),
        ),
        max_leaves=4,
    )


EXPRESSIONS = expressions(st.sampled_from([*NAMES, "1", "None"]))
SIMPLE = st.one_of(
    EXPRESSIONS,
    st.builds("{} = {}".format, st.sampled_from(NAMES), EXPRESSIONS),
    st.builds("{} = {} = {}".format, st.sampled_from(NAMES), st.sampled_from(NAMES), EXPRESSIONS),
    st.builds("{}, {} = [1, {}]".format, st.sampled_from(NAMES), st.sampled_from(NAMES), EXPRESSIONS),
    st.builds("import sys as {}".format, st.sampled_from(NAMES)),
)
ANNOTATED = st.builds("{}: int = {}".format, st.sampled_from(NAMES), EXPRESSIONS)
STRAIGHT = st.lists(SIMPLE | ANNOTATED, min_size=1, max_size=8).map("\n".join)


def raises_name_error(program: str, names: frozenset[str]) -> bool:
    """Run `program` with `names` in its namespace; say whether it missed one."""
    namespace: dict[str, object] = dict.fromkeys(names, 0)
    namespace["choose"] = (False, True, True, False, True, False, False, True).__iter__().__next__
    code = compile(program, "<program>", "exec", dont_inherit=True)
    try:
        exec(code, namespace)  # noqa: S102  # running it is the proof
    except UnboundLocalError:
        return False  # a function's own variable, which no notebook could help with
    except NameError:
        return True
    except Exception:  # noqa: BLE001  # a random program may fail as it likes
        return False
    return False


@given(STRAIGHT)
def test_a_straight_program_runs_with_its_needed_names_and_not_without_any_of_them(program: str) -> None:
    """Neither too few names nor one too many."""
    names = cell_names(program)
    assert not names.maybe
    assert not raises_name_error(program, names.needed)
    for left_out in names.needed - BUILTIN:
        assert raises_name_error(program, names.needed - {left_out})


def indented(lines: str) -> str:
    """Return the block of a compound statement."""
    return textwrap.indent(lines, "    ")


def blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return compound statements; `choose()` says at run time which way they go."""
    body = st.lists(inner, min_size=1, max_size=3).map(lambda lines: indented("\n".join(lines)))
    name = st.sampled_from(NAMES)
    jumping = st.builds("{}\n    {}".format, body, st.sampled_from(["break", "continue", "pass"]))
    return st.one_of(
        st.builds("if choose():\n{}\nelse:\n{}".format, body, body),
        st.builds("if choose():\n{}".format, body),
        st.builds("for {} in [1] * choose():\n{}\nelse:\n{}".format, name, jumping, body),
        st.builds("while choose():\n{}".format, jumping),
        st.builds("while True:\n{}\n    if choose(): break".format, body),
        st.builds(
            "try:\n{}\n    1 / choose()\n{}\nexcept ZeroDivisionError as error:\n{}\nelse:\n{}".format,
            *[body] * 4,
        ),
        st.builds("try:\n{}\n    1 / choose()\nfinally:\n{}".format, body, body),
        st.builds("match choose():\n    case False: pass\n    case {}:\n{}".format, name, body.map(indented)),
        st.builds("def f({}):\n{}\n    return {}\nf(1)".format, name, body, name),
        st.builds("def {}():\n{}".format, name, body),
        st.builds("def f():\n    global {}\n{}".format, name, body),
        st.builds("class C:\n{}\n    def method(self):\n{}".format, body, body.map(indented)),
        st.just("C().method()"),
        st.just("f(*[1] * choose())"),
    )


PROGRAMS = st.lists(st.recursive(SIMPLE, blocks, max_leaves=8), min_size=1, max_size=6).map("\n".join)


@given(PROGRAMS)
def test_no_program_misses_a_name_that_it_was_given(program: str) -> None:
    """Whichever way the branches go, `needed` and `maybe` together are enough."""
    names = cell_names(program)
    given_names = (names.needed | names.maybe) - BUILTIN
    shadowing = frozenset({"f", "C"}) & given_names
    if raises_name_error(program, given_names - shadowing):
        # Then it called an `f` that is not there yet, and would have with all the names there are.
        assert raises_name_error(program, frozenset(NAMES) | given_names - shadowing)
