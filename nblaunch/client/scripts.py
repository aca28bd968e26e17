"""A script on N ranks: it is found, or refused, before any process starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pkgutil
import shutil
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TypeGuard

from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch.client.preparation import ClientJob, fresh_job
from nblaunch.options.kinds import brief
from nblaunch.options.launch import LaunchOptions
from nblaunch.options.table import nearest
from nblaunch.protocol.messages import ScriptJob

ScriptPath = str | os.PathLike[str]


def is_script(target: object) -> TypeGuard[ScriptPath]:
    return isinstance(target, str | os.PathLike) and not callable(target)


def prepare_script(
    script: ScriptPath, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: LaunchOptions
) -> ClientJob:
    """Place a run of `script`. Raises `OptionError` if it cannot be run."""
    name = _text(os.fspath(script), "the script")
    _check(options)
    if kwargs:
        msg = (
            f"kwargs={brief(dict(kwargs))}: script {name!r} takes texts only. "
            'Write them as it reads them: args=["--lr", "0.1"].'
        )
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    texts = _texts(args)
    job = fresh_job(name, options, script=True)
    path = file = title = ""
    if options.module:
        file = _module(name)
        title = _as_written(file)
    elif options.no_python:
        path = _program(name, {**os.environ, **options.env}.get("PATH"))
    else:
        path, inside = _file(name)
        file, title = os.path.join(path, inside), os.path.join(name, inside)  # noqa: PTH118 - as written
    job.work = ScriptJob(
        name=name,
        path=path,
        file=file.removesuffix(os.sep),
        title=title.removesuffix(os.sep),
        args=texts,
        module=options.module,
        program=options.no_python,
        pull=options.pull,
    )
    return job


def refuse_in_session(script: ScriptPath, session: str) -> OptionError:
    """Return the error for a script on a session's ranks."""
    name = os.fspath(script)
    return OptionError(
        f"session {session!r} cannot run {name!r}: a script is __main__ of its own process, and the ranks' "
        f"__main__ holds their variables. Use nblaunch.run({name!r}), which starts fresh ranks, or "
        f"session.cell('%run {name}').",
        kind=FailureKind.WRONG_ARGUMENTS,
    )


def _check(options: LaunchOptions) -> None:
    if not options.no_python:
        return
    for name, why in (
        ("module", "a module is run by Python"),
        ("run_path", "only Python runs a script inside the rank"),
        ("pull", "a program that Python does not run has no variables"),
    ):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            msg = f"--no-python and {flag}: {why}. Give one of them."
            raise OptionError(msg)


def _texts(args: Sequence[Any]) -> tuple[str, ...]:
    if isinstance(args, str | bytes):
        msg = (
            f"args={brief(args)}: a script takes a list of texts, one for each word. Write args=[...], or "
            "args=shlex.split(...)."
        )
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    found = []
    for place, word in enumerate(args):
        if not isinstance(word, str | os.PathLike):
            msg = f"args[{place}]={brief(word)} is no text, as scripts read it. Write {str(word)[:100]!r}."
            raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
        found.append(_text(os.fspath(word), f"args[{place}]"))
    return tuple(found)


def _text(text: str | bytes, what: str) -> str:
    """Return `text`, if a command line and a message can hold it."""
    with contextlib.suppress(UnicodeEncodeError):
        if isinstance(text, str) and b"\0" not in text.encode():
            return text
    msg = f"{what} is {brief(text)}. Give text that UTF-8 can encode, without null characters."
    raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)


# --- files ---------------------------------------------------------------------------------------------


def _file(name: str) -> tuple[str, str]:
    """Return the absolute path of a script that Python can run, and of a directory which file in it."""
    # As written, links and dots too: a program looks at its own path.
    written = os.path.join(Path.cwd(), os.path.expanduser(name))  # noqa: PTH111, PTH118 - as written
    path = Path(written)
    if not name or not path.exists():
        raise _missing(name, path, "file")
    runs = [path / f"__main__{suffix}" for suffix in (".py", ".pyc")]
    wrong = ""
    if path.is_dir() and not any(each.is_file() for each in runs):
        inside = sorted(each.name for each in path.glob("*.py"))
        listed = f" It holds {', '.join(inside[:5])}." if inside else ""
        wrong = f"it is a directory without a __main__.py.{listed} Give the path of a file."
    elif path.suffix == ".ipynb":
        wrong = "it is a notebook. Give a script: jupyter nbconvert --to script makes one of it."
    elif not os.access(path, os.R_OK):
        wrong = "you may not read it. Change its mode (chmod u+r)."
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if not {"__main__.py", "__main__.pyc"} & set(archive.namelist()):
                wrong = "it is a zip without a __main__.py. Add one."
    if wrong:
        msg = f"the script {name!r}: {wrong}"
        raise OptionError(msg, kind=FailureKind.SCRIPT_NOT_FOUND)
    return written, next((each.name for each in runs if each.is_file()), "")


def _as_written(file: str) -> str:
    """Return the path of a file as a user writes it."""
    below = os.path.relpath(file) if file else ""
    return file if below.startswith(os.pardir) else below


def _missing(name: str, path: Path, kind: str) -> OptionError:
    """Return the error for a path that does not exist, with the nearest name that does."""
    there = path.parent if name else Path.cwd()
    what_to_do = f"Give the path of one; the working directory is {Path.cwd()}."
    if not there.is_dir():
        what_to_do = f"There is no directory {str(there)!r} either; the working directory is {Path.cwd()}."
    else:
        with contextlib.suppress(OSError):
            guess = nearest(path.name, sorted(each.name for each in there.iterdir())) if name else None
            if guess is not None:
                what_to_do = f"Did you mean {os.path.join(os.path.dirname(name), guess)!r}?"  # noqa: PTH118, PTH120 - as written
            elif _spec(name)[0] is not None:
                what_to_do = "It is the name of a module: give module=True (-m)."
    return OptionError(
        f"the script {name!r} was asked for, but there is no such {kind}. {what_to_do}",
        kind=FailureKind.SCRIPT_NOT_FOUND,
    )


def _program(name: str, search: str | None) -> str:
    """Return the path of a program, found as a shell finds it."""
    found = shutil.which(os.path.expanduser(name), path=search) if name else None  # noqa: PTH111 - "" is no "."
    if found is not None:
        return os.path.abspath(found)  # noqa: PTH100 - keeps links: programs look at their own name
    path = Path(os.path.abspath(Path(name).expanduser())) if name else Path()  # noqa: PTH100 - keeps links
    if name and path.is_file():
        executable = os.access(path, os.X_OK)
        wrong = "it is not on PATH" if executable else "it is not executable"
        what_to_do = f"Write './{name}'" if executable else f"Make it so (chmod +x {name})"
        msg = f"the program {name!r}: {wrong}. {what_to_do}."
        raise OptionError(msg, kind=FailureKind.SCRIPT_NOT_FOUND)
    if os.sep in name or not name:
        raise _missing(name, path, "program")
    guess = nearest(name, _programs(search))
    what_to_do = f"Did you mean {guess!r}?" if guess else "Install it, or give its path."
    msg = f"the program {name!r}: there is none on PATH. {what_to_do}"
    raise OptionError(msg, kind=FailureKind.SCRIPT_NOT_FOUND)


def _programs(search: str | None) -> set[str]:
    names: set[str] = set()
    for directory in (search or os.defpath).split(os.pathsep):
        with contextlib.suppress(OSError):
            names.update(each.name for each in Path(directory).iterdir())
    return names


# --- modules -------------------------------------------------------------------------------------------


def _module(name: str) -> str:
    """Return the file of a module, or of a package's `__main__`; empty where there is none.

    Raises `OptionError` for a module that is not there, or a package that has no `__main__`.
    """
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        msg = (
            f"{name!r} is no name of a module. Give a name such as pkg.train, or, for a file, leave "
            "module=True (-m) out."
        )
        raise OptionError(msg, kind=FailureKind.SCRIPT_NOT_FOUND)
    spec, near = _spec(name)
    if spec is None:
        guess = nearest(name.rpartition(".")[2], near)
        what_to_do = (
            f"Did you mean {'.'.join([*name.split('.')[:-1], guess])!r}?"
            if guess
            else f"Python looks in {Path.cwd()} first, then on sys.path."
        )
        msg = f"the module {name!r}: there is none of that name. {what_to_do}"
        raise OptionError(msg, kind=FailureKind.SCRIPT_NOT_FOUND)
    if spec.submodule_search_locations is not None:
        spec, _ = _spec(f"{name}.__main__")
    if spec is None:
        msg = f"the module {name!r} is a package without a __main__. Name one of its modules."
        raise OptionError(msg, kind=FailureKind.SCRIPT_NOT_FOUND)
    return spec.origin if spec.has_location and spec.origin else ""


def _spec(name: str) -> tuple[ModuleSpec | None, list[str]]:
    """Return how a module would be imported, and which others are beside it.

    Importing the packages around it runs the user's code in the notebook. So they are imported only if it is
    not found where it should lie: a package may decide where its modules are.
    """
    first, *others = name.split(".")
    spec: ModuleSpec | None = None
    with contextlib.suppress(Exception):  # a broken finder, or an invalid name
        spec = PathFinder.find_spec(first, _search_path()) or importlib.util.find_spec(first)
    beside = _names_in(_search_path()) if spec is None else []
    for part in others:
        if spec is None or spec.submodule_search_locations is None:
            return None, beside if spec is None else []
        locations = list(spec.submodule_search_locations)
        # Under its last name alone: a namespace package would ask for the imported package around it.
        spec, beside = PathFinder.find_spec(part, locations), _names_in(locations)
        if spec is None:
            break
    if spec is None and others:
        with contextlib.suppress(Exception):
            spec = importlib.util.find_spec(name)
    return spec, beside


def _search_path() -> list[str]:
    return [str(Path.cwd()), *sys.path]


def _names_in(locations: Iterable[str]) -> list[str]:
    return sorted({module.name for module in pkgutil.iter_modules(list(locations))})
