"""`%distributed export train.py`, `%%distributed --export train.py`: cells become a script for torchrun."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nblaunch import _notebook
from nblaunch._errors import NblaunchError, OptionError
from nblaunch._help import FailureKind
from nblaunch.client.session import LiveSession
from nblaunch.export.imports import imports_in
from nblaunch.export.writer import Cell, ExportedScript, Setting, bound_in, export, is_exported
from nblaunch.magic import auto
from nblaunch.options import kinds
from nblaunch.options.command_line import split_words, torchrun_command
from nblaunch.options.launch import LaunchOptions, within
from nblaunch.protocol.client import Placement

FLAGS = ("--cells", "--force")
_USAGE = "Write %distributed export [--cells 3-7] [--force] train.py."


@dataclass(frozen=True, slots=True)
class Ran:
    """A `%%distributed` cell as it was run."""

    number: int
    source: str
    options: LaunchOptions
    placement: Placement
    kept: tuple[weakref.ref[LiveSession], int] | None
    """The session that it ran in, and which attempt of it: its variables are there."""

    @property
    def cell(self) -> Cell:
        return Cell(self.source, _title(self.number))


_ran: dict[int, Ran] = {}
"""The `%%distributed` cells of this notebook, by number, the last one last."""


def about_to_run(
    number: int, source: str, options: LaunchOptions, placement: Placement, session: LiveSession | None
) -> Ran:
    kept = None
    if session is not None:
        kept = (weakref.ref(session), session.attempt)
        options = within(session.options, options)
    return Ran(number, source, options, placement, kept)


def remember(ran: Ran) -> None:
    _ran.pop(ran.number, None)
    _ran[ran.number] = ran


def export_cells(line: str, namespace: dict[str, Any]) -> str:
    """Run `%distributed export`; returns what the line shows."""
    numbers, path, force = _parsed(line)
    if not _ran:
        msg = f"{path} would hold the last %%distributed cell, but none has been run. Run one first."
        raise NblaunchError(msg)
    if numbers is None:
        last = next(reversed(_ran.values()))
        return write([last.cell], last, path, namespace, force=force)
    inputs = _inputs(namespace)
    cells = [_ran[number].cell if number in _ran else _plain_cell(number, inputs) for number in numbers]
    ran = [_ran[number] for number in numbers if number in _ran]
    if not ran:
        msg = f"--cells {_listed(numbers)}: none of these is a %%distributed cell. There are {_listed(_ran)}."
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    if len({each.placement.nproc for each in ran}) > 1:
        sizes = ", ".join(f"{_title(each.number)} on {each.placement.nproc}" for each in ran)
        msg = f"torchrun starts one number of ranks: {sizes} ranks. Export them into a file each."
        raise NblaunchError(msg)
    return write(cells, ran[-1], path, namespace, force=force)


def _parsed(line: str) -> tuple[tuple[int, ...] | None, str, bool]:
    """Return the cells' numbers, the file, and whether it may be overwritten."""
    numbers: tuple[int, ...] | None = None
    force = False
    files: list[str] = []
    words = split_words(line)
    while words:
        word, equals, text = words.pop(0).partition("=")
        if word == "--cells":
            text = text if equals else words.pop(0) if words else ""
            numbers = _numbers(text)
        elif word == "--force" and not equals:
            force = True
        elif word.startswith("-"):
            msg = f"%distributed export was given {word!r}, but there is no such option. {_USAGE}"
            raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
        else:
            files.append(word + equals + text)
    if len(files) != 1:
        what = f"{len(files)} files" if files else "no file"
        msg = f"%distributed export was given {what}, but it writes one. {_USAGE}"
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    return numbers, LaunchOptions(export=files[0]).export or files[0], force


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = kinds.ranks.check(kinds.ranks.parse(text))
    except ValueError:
        msg = (
            f"--cells {text!r} was asked for, but it takes numbers of cells, as in In[3]. "
            "Write --cells 3-7, or --cells 3,5,6."
        )
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS) from None
    assert isinstance(numbers, tuple)  # noqa: S101 - what this kind gives
    return numbers


def _inputs(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return the cells that the notebook has run, by number, as they were written.

    `In` would be shorter, but a `%reset` empties it and keeps the numbers.
    """
    found = {name[2:]: text for name, text in namespace.items() if re.fullmatch(r"_i[1-9]\d*", name)}
    return {int(number): text for number, text in found.items() if isinstance(text, str)}


def _history(inputs: Mapping[int, str], transform: Callable[[str], str]) -> dict[int, str]:
    """Return what the notebook has run, as Python; a cell that cannot be transformed is left out."""
    found = {}
    for number, text in sorted(inputs.items()):
        with contextlib.suppress(Exception):  # whatever a transformer of the user's raises
            found[number] = transform(text)
    return found


def _plain_cell(number: int, inputs: Mapping[int, str]) -> Cell:
    if number not in inputs:
        msg = (
            f"--cells has {number}, but the notebook has run no {_title(number)}. The last one is "
            f"{_title(max(inputs, default=0))}."
        )
        raise OptionError(msg, kind=FailureKind.WRONG_ARGUMENTS)
    return Cell(inputs[number], _title(number), on_ranks=False)


def _title(number: int) -> str:
    return f"In[{number}]"


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def write(cells: list[Cell], last: Ran, path: str, namespace: dict[str, Any], *, force: bool = False) -> str:
    """Write the script of some cells; returns what the line shows. Raises `NblaunchError`."""
    target = Path(path)
    _check_free(target, force=force)
    shell = _notebook.shell()
    assert shell is not None  # noqa: S101 - a magic has one
    command_line = torchrun_command(last.options, path, last.placement.nproc)
    with auto.suspended():
        script = export(
            cells,
            namespace,
            _history(_inputs(namespace), shell.transform_cell),
            Setting(
                last.placement.backend if last.options.init_process_group else None,
                last.placement.device_type,
            ),
            command=command_line,
            directory=_data_directory(target).name,
            transform=shell.transform_cell,
            elsewhere=_only_on_ranks(cells, last, shell.transform_cell),
        )
    _save(script, target, force=force)
    return _report(script, target, command_line)


def _only_on_ranks(cells: list[Cell], last: Ran, transform: Callable[[str], str]) -> Mapping[str, int]:
    """Return the variables that earlier cells have made on the session's ranks, and the cells' numbers."""
    exported = {cell.title for cell in cells}
    found = {}
    for ran in _ran.values():
        same_ranks = ran.kept is not None and ran.kept == last.kept
        if same_ranks and ran.number <= last.number and ran.cell.title not in exported:
            found.update(dict.fromkeys(bound_in(ran.source, transform), ran.number))
    return found


def _data_directory(target: Path) -> Path:
    return target.with_name(f"{target.stem}_data")


def _check_free(target: Path, *, force: bool) -> None:
    if not target.parent.is_dir():
        msg = f"{target}: there is no directory {target.parent}. Make it first."
        raise NblaunchError(msg)
    if target.is_dir():
        msg = f"{target}: it is a directory. Give another name."
        raise NblaunchError(msg)
    if os.path.lexists(target) and not force and not is_exported(target):
        msg = (
            f"{target}: it is there, and was not written by an export. Give another "
            f"name, or overwrite it: %distributed export --force {shlex.quote(str(target))}"
        )
        raise NblaunchError(msg)


def _save(script: ExportedScript, target: Path, *, force: bool) -> None:
    """Write the files, the script last; only an export's own files are overwritten."""
    directory = _data_directory(target)
    paths = {load.file: directory / load.file for load in script.files}
    ours = target.exists() and is_exported(target)
    strange = [path for path in paths.values() if path.exists()]
    if paths and os.path.lexists(directory) and not directory.is_dir():
        strange = [directory]
    if strange and not (ours or force):
        msg = (
            f"{target} needs {strange[0]}, which is there already. Give another name, or overwrite it: "
            f"%distributed export --force {shlex.quote(str(target))}"
        )
        raise NblaunchError(msg)
    try:
        before = target.read_text(encoding="utf-8") if ours else ""
        if paths:
            directory.mkdir(exist_ok=True)
        for load in script.files:
            load.write(paths[load.file])
        partial = target.with_name(f"{target.name}.partial")
        partial.write_text(script.text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        why = error.strerror or str(error)
        msg = f"{target}: {why} ({error.filename}). Give another place."
        raise NblaunchError(msg) from error
    # What an earlier export had to save, and this one has not.
    for name in set(re.findall(r'/ "([^"/]+)"\)', before)) - paths.keys():
        (directory / name).unlink(missing_ok=True)


def _report(script: ExportedScript, target: Path, command_line: str) -> str:
    files = ", ".join(load.file for load in script.files)
    beside = f" with {files} in {_data_directory(target)}" if files else ""
    lines = [f"{target} is written{beside}. It runs with:", command_line]
    local = _local_modules(script.text)
    if local and target.parent.resolve() != Path.cwd():
        names = ", ".join(local)
        lines.insert(1, f"It imports {names} of the notebook's directory: set PYTHONPATH to {Path.cwd()}.")
    if script.left_out:
        names = ", ".join(script.left_out)
        lines.insert(1, f"Left out, since the cell may never use what cannot be saved: {names}.")
    return "\n".join(lines)


def _local_modules(text: str) -> list[str]:
    """Return the modules that a script imports from the notebook's directory."""
    here = Path.cwd()
    roots = {each.module.partition(".")[0] for node in ast.walk(ast.parse(text)) for each in imports_in(node)}
    places = {root: getattr(sys.modules.get(root), "__file__", None) for root in roots}
    files = {root: Path(place) for root, place in places.items() if place}
    return sorted(
        root for root, file in files.items() if file.parents[file.name == "__init__.py"].resolve() == here
    )
