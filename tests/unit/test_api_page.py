"""What the site's pages say of the code is so: the API page, the tables of those who come from elsewhere."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
from pathlib import Path

import nblaunch
from nblaunch.magic.commands import COMMANDS
from nblaunch.options.launch import OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "notebooks" / "docs"
API = (PAGES / "api.md").read_text()
COMING_FROM = (PAGES / "coming-from.md").read_text()
HOW_IT_WORKS = (PAGES / "how-it-works.md").read_text()


def documented() -> list[tuple[str, object]]:
    """Return what the API page has, by the names that it uses."""
    found = []
    for path in re.findall(r"^\.\. auto(?:class|exception|function):: (\S+)$", API, flags=re.MULTILINE):
        module, _, name = path.rpartition(".")
        found.append((path, getattr(importlib.import_module(module), name)))
    return found


CLASSES = [each for _, each in documented() if inspect.isclass(each)]


def of_class(cls: type) -> dict[str, object]:
    """Return a class's own public methods and properties."""
    return {
        name: member
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
    }


@functools.cache
def module_of(cls: type) -> ast.Module:
    return ast.parse(Path(inspect.getfile(cls)).read_text())


def described_fields(cls: type) -> set[str]:
    """Return the attributes that have a docstring of their own below them."""
    (found,) = (
        each
        for each in ast.walk(module_of(cls))
        if isinstance(each, ast.ClassDef) and each.name == cls.__name__
    )
    return {
        first.target.id
        for first, second in itertools.pairwise(found.body)
        if isinstance(first, ast.AnnAssign)
        and isinstance(first.target, ast.Name)
        and isinstance(second, ast.Expr)
    }


def test_the_api_page_has_every_public_name_and_no_other_of_the_package():
    names = [path.removeprefix("nblaunch.") for path, _ in documented() if path.count(".") == 1]
    assert sorted(names) == sorted(nblaunch.__all__)


def test_every_public_object_and_member_has_a_docstring():
    without = [path for path, each in documented() if not inspect.getdoc(each)]
    without += [
        f"{cls.__name__}.{name}"
        for cls in CLASSES
        for name, member in of_class(cls).items()
        if not inspect.getdoc(member)
    ]
    assert without == []


def test_every_field_is_named_in_its_classs_docstring_or_has_one_of_its_own():
    unnamed = {}
    for cls in CLASSES:
        fields = [name for name in inspect.get_annotations(cls) if not name.startswith("_")]
        known = {*re.findall(r"`(\w+)", cls.__doc__ or ""), *described_fields(cls)}
        if cls is not nblaunch.LaunchOptions:  # its fields are the options, which have a page
            unnamed |= {f"{cls.__name__}.{name}": name for name in fields if name not in known}
    assert unnamed == {}


def test_what_is_raised_is_said_of_all_that_raises_errors_of_ours():
    """A function that raises, by its own `raise`, says "raises" in its docstring."""
    silent = []
    functions = [(path, each) for path, each in documented() if inspect.isfunction(each)]
    functions += [
        (f"{cls.__name__}.{name}", member)
        for cls in CLASSES
        for name, member in of_class(cls).items()
        if inspect.isfunction(member)
    ]
    for name, function in functions:
        raises = re.search(r"^ +raise \w+Error|^ +raise \w+\(", inspect.getsource(function), re.MULTILINE)
        if raises and "raise" not in (inspect.getdoc(function) or "").lower():
            silent.append(name)
    assert silent == []


def test_the_api_page_has_every_command_of_the_magic():
    table = API.partition("`%distributed COMMAND`")[2].partition("(api-results)")[0]
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    commands = {word.split()[0] for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert commands == set(COMMANDS)


def test_those_who_come_from_torchrun_find_each_of_its_options():
    table = COMING_FROM.partition("(from-torchrun)=")[2].partition("(from-accelerate)=")[0]
    of_torchrun = [each.flags[0] for each in OPTIONS if each.torchrun in {"variable", "flag"}]
    spelled = {"--redirects": "-r", "--tee": "-t", "--module": "-m"}
    assert len(of_torchrun) > 25
    assert [flag for flag in of_torchrun if f"`{spelled.get(flag, flag)}`" not in table] == []


def test_each_spelling_of_others_that_an_error_translates_is_on_the_page():
    table = COMING_FROM.partition("(from-mpirun)=")[2]
    theirs = [text.split()[1] for each in OPTIONS for text in each.foreign]
    assert len(theirs) > 30
    assert [flag for flag in theirs if not re.search(rf"(?<![\w-]){flag}(?![\w-])", table)] == []


def test_each_promise_names_a_test_that_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", HOW_IT_WORKS)
    assert len(named) > 10
    assert [test for file, test in named if f"\ndef {test}(" not in (ROOT / file).read_text()] == []


def test_pictures_have_a_title_a_description_and_text_and_are_small():
    pictures = sorted((PAGES / "pictures").glob("*.svg"))
    shown = re.findall(r"```\{picture\} pictures/([\w-]+\.svg)", HOW_IT_WORKS)
    assert {each.name for each in pictures} >= set(shown)
    assert len(shown) >= 3
    for each in pictures:
        text = each.read_text()
        assert len(text) < 30_000, each.name
        assert re.search(r"<title id=.+</title>", text), each.name
        assert re.search(r"<desc id=.+</desc>", text), each.name
        assert "<text" in text, each.name
        assert re.findall(r'(?:fill|stroke)="(?!none|currentColor)[^"]*"', text) == [], "it follows the theme"
