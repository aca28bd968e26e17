"""`%%distributed`: parse the line, capture what the cell needs, run it, hand back the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.utils.text import DollarFormatter

from nblaunch._errors import OptionError
from nblaunch._option_line import split_words
from nblaunch._option_row import nearest
from nblaunch._options import LaunchOptions, options_help, parse_line
from nblaunch._protocol import CellJob
from nblaunch._results import RunResult
from nblaunch.diagnose.doctor import doctor
from nblaunch.job.capture import Captured, capture_cell
from nblaunch.magic.line import option_completions
from nblaunch.session import engine, notebook
from nblaunch.view.watch import watcher

COMMANDS: dict[str, Callable[[], object]] = {"doctor": doctor}
"""What `%distributed` can be followed by; the value is what the line shows."""


@magics_class
class DistributedMagics(Magics):
    """The magics of one shell."""

    shell: InteractiveShell

    # IPython would also look for `$result` among its own local variables.
    @no_var_expand
    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> object:
        """Run the cell on N torch ranks; without a cell, a command."""
        if cell is None:
            return command(self._expanded(line))
        self._run_cell(line, cell)
        return None

    def _run_cell(self, line: str, cell: str) -> None:
        parsed = parse_line(self._expanded(line))
        if parsed.help_wanted:
            print(options_help("%%distributed"))  # noqa: T201 - the user asked for it
            return
        options = parsed.options
        placement, environ = engine.place(options)
        filename, title = self._name(f"%%distributed {line}\n{cell}")
        captured = self._captured(cell, filename)
        number = self.shell.displayhook.prompt_count
        launch = engine.Launch(
            job=CellJob(source=cell, filename=filename, title=title, number=number),
            captured=captured,
            options=options,
            placement=placement,
            environ=environ,
            title="cell",
        )
        finished = engine.perform(launch, watcher("cell", placement.backend))
        if finished.result is not None:
            self._hand_over(finished.result, options)
        if finished.error is not None:
            raise finished.error

    def _expanded(self, line: str) -> str:
        try:
            expanded: str = DollarFormatter().vformat(line, args=[], kwargs=self.shell.user_ns)
        except Exception:  # noqa: BLE001 - as IPython does: what cannot be expanded stays as it is
            return line
        return expanded

    def _name(self, source: str) -> tuple[str, str]:
        """Register the cell under its name in the notebook, so that tracebacks show its lines."""
        number = self.shell.displayhook.prompt_count
        filename: str = self.shell.compile.cache(source, number, raw_code=source)
        return filename, notebook.title_of(filename)

    def _captured(self, cell: str, filename: str) -> Captured:
        transformed = "\n" + self.shell.transform_cell(cell)
        try:
            return capture_cell(transformed, self.shell.user_ns, self.shell.transform_cell)
        except SyntaxError as error:
            error.filename = filename
            raise error.with_traceback(None) from None

    def _hand_over(self, result: RunResult, options: LaunchOptions) -> None:
        """Make the result `_` and the variable of `--out`, whether the run succeeded or not."""
        if options.out is not None:
            self.shell.user_ns[options.out] = result
        self.shell.displayhook.update_user_ns(result)


def command(line: str) -> object:
    """Carry out the command of a line `%distributed ...`; raises `OptionError` for one there is not."""
    words = split_words(line)
    chosen = COMMANDS.get(words[0]) if words else None
    if chosen is not None and len(words) == 1:
        return chosen()
    asked = f"%distributed {line}".strip()
    if chosen is not None:
        msg = (
            f"{asked!r} was asked for, but {words[0]} takes nothing after it. Write %distributed {words[0]}."
        )
        raise OptionError(msg)
    guess = nearest(words[0], COMMANDS) if words else None
    what_to_do = (
        f"There are: {', '.join(COMMANDS)}. To run a cell on ranks, begin it with %%distributed."
        if guess is None
        else f"Did you mean %distributed {guess}?"
    )
    wrong = "there is no such command" if words else "it needs a command"
    msg = f"{asked!r} was asked for, but {wrong}. {what_to_do}"
    raise OptionError(msg)


def register(shell: InteractiveShell) -> None:
    """Register the magics with `shell`, with help and completion."""
    magics = DistributedMagics(shell)
    method: Any = DistributedMagics.distributed
    method.__doc__ = f"{options_help('%%distributed')}"
    shell.register_magics(magics)
    shell.set_hook(
        "complete_command",
        lambda _shell, event: option_completions(event.text_until_cursor),
        str_key="%%distributed",
    )
