"""`%%distributed`: parse the line, capture what the cell needs, run it, hand back the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, no_var_expand
from IPython.utils.text import DollarFormatter

from nblaunch import _notebook
from nblaunch._errors import OptionError
from nblaunch.capture.capture import RANK_NAMES, capture_cell
from nblaunch.elastic.placement import Placement
from nblaunch.group import launcher
from nblaunch.group.background import Handle
from nblaunch.group.knowledge import own_name_notice
from nblaunch.group.launcher import Launch, Outcome
from nblaunch.group.session import LiveSession
from nblaunch.magic import auto, export, sessions
from nblaunch.magic.commands import command, command_completions
from nblaunch.magic.completion import make_matcher
from nblaunch.magic.scripts import hand_over, with_macros_kept
from nblaunch.nodes.members import connect_peers
from nblaunch.options.launch import LaunchOptions
from nblaunch.options.line import option_completions, options_help, parse_line
from nblaunch.protocol.messages import CellJob
from nblaunch.view.display import watcher

T = TypeVar("T")
Performed = Callable[[threading.Event | None], Outcome]


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
            return command(self._expanded(with_macros_kept(line)), self.shell.user_ns)
        return self._run_cell(line, cell)

    @cell_magic
    def local(self, line: str, cell: str) -> None:  # noqa: ARG002 - a magic takes it
        """Run the cell in the notebook, also while `%distributed auto` is on."""
        # Only below another magic does it come this far; `auto` takes it away from a cell's first line.
        with auto.suspended():
            self.shell.run_cell(cell).raise_error()

    def _run_cell(self, line: str, cell: str) -> Handle | None:
        parsed = parse_line(self._expanded(line))
        if parsed.help_wanted:
            print(options_help("%%distributed"))  # noqa: T201 - the user asked for it
            return None
        options = parsed.options
        launcher.refuse_inside_rank()
        inserted = auto.take_inserted()
        if inserted and not auto.is_the_users():
            auto.run_here(self.shell, cell)
            return None
        session = sessions.chosen(options)
        first_line = 1 if inserted else 2
        filename, title = self._name(cell if first_line == 1 else f"%%distributed {line}\n{cell}")
        number = self.shell.displayhook.prompt_count
        job = CellJob(
            source=cell,
            filename=filename,
            title=title,
            number=number,
            first_line=first_line,
            keeps_value=options.out is not None,
            flags=_notebook.future_flags(),
        )
        if session is None:
            placement, environ = _place(options)
            perform = self._fresh(job, options, placement, environ)
        else:
            placement = session.placement
            perform = self._kept(job, options, session)
        ran = export.about_to_run(number, cell, options, placement, session)
        if options.export is not None:
            print(export.write([export.cell_of(ran)], ran, options.export, self.shell.user_ns))  # noqa: T201 - asked for
        export.remember(ran)
        if options.background:
            return self._in_background(perform, options, session)
        finished = perform(None)
        if finished.result is not None:
            hand_over(finished.result, options, self.shell)
        if finished.error is not None:
            raise finished.error
        return None

    def _fresh(
        self, job: CellJob, options: LaunchOptions, placement: Placement, environ: dict[str, str]
    ) -> Performed:
        """Prepare a run on fresh ranks: all that can be wrong with it is said before it begins."""
        captured = self._captured(
            job, lambda plain, transform: capture_cell(plain, self.shell.user_ns, transform)
        )
        reached = captured.used | captured.packed.carried.keys()
        noticed = tuple(map(own_name_notice, sorted(reached & RANK_NAMES & self.shell.user_ns.keys())))
        watch = watcher("cell", placement.backend if options.init_process_group else "", placement.note)

        def perform(cancelled: threading.Event | None) -> Outcome:
            launch = Launch(
                job=job,
                captured=captured,
                options=options,
                placement=placement,
                environ=environ,
                title="cell",
                cancelled=cancelled,
                notices=noticed,
            )
            return launcher.run_fresh(launch, watch, connect_peers)

        return perform

    def _kept(self, job: CellJob, options: LaunchOptions, session: LiveSession) -> Performed:
        """Prepare a run on a session's ranks."""
        sessions.check_cell_options(session, options)
        return self._captured(
            job,
            lambda plain, transform: session.prepared(
                job, plain, self.shell.user_ns, transform, ranks=options.ranks, options=options
            ),
        )

    def _in_background(
        self, perform: Performed, options: LaunchOptions, session: LiveSession | None
    ) -> Handle:
        handle = Handle(perform, claim=session.claim if session is not None else None)
        if options.out is not None:
            self.shell.user_ns[options.out] = handle
        return handle

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
        return filename, _notebook.title_of(filename)

    def _captured(self, job: CellJob, capture: Callable[[str, Callable[[str], str]], T]) -> T:
        """Capture what the cell uses; a cell that is no Python says so with its own line."""
        with auto.suspended():
            transformed = "\n" * (job.first_line - 1) + self.shell.transform_cell(job.source)
            try:
                return capture(transformed, self.shell.transform_cell)
            except SyntaxError as error:
                error.filename = job.filename
                raise error.with_traceback(None) from None


def _place(options: LaunchOptions) -> tuple[Placement, dict[str, str]]:
    """Decide where a cell on fresh ranks runs. Raises `OptionError` for an option that a session has."""
    if options.ranks is not None:
        msg = (
            "--ranks was asked for, but it chooses ranks of a session, and no session runs this cell. "
            "Leave it out."
        )
        raise OptionError(msg)
    return launcher.place_launch(options)


def register(shell: InteractiveShell) -> None:
    """Register the magics with `shell`, with help and completion."""
    magics = DistributedMagics(shell)
    method: Any = DistributedMagics.distributed
    method.__doc__ = f"{options_help('%%distributed')}"
    shell.register_magics(magics)
    shell.events.register("post_run_cell", sessions.sweep)
    auto.install(shell)
    completer: Any = shell.Completer
    completer.custom_matchers = [
        *(each for each in completer.custom_matchers if each.__name__ != "session_matcher"),
        make_matcher(),
    ]
    shell.set_hook(
        "complete_command",
        lambda _shell, event: option_completions(event.text_until_cursor),
        str_key="%%distributed",
    )
    shell.set_hook(
        "complete_command",
        lambda _shell, event: command_completions(event.text_until_cursor),
        str_key="%distributed",
    )
