"""`%%distributed`: parse the line, capture what the cell needs, run it, hand back the result."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, no_var_expand
from IPython.utils.text import DollarFormatter

from nblaunch import _notebook
from nblaunch._errors import OptionError
from nblaunch._help import FailureKind
from nblaunch._results import Handle, Perform
from nblaunch.capture.capture import RANK_NAMES, capture_cell
from nblaunch.capture.names import CellNames, cell_names
from nblaunch.client.knowledge import own_name_notice
from nblaunch.client.preparation import ClientJob, RankPayload, fresh_job, refuse_inside_rank
from nblaunch.client.run import run_fresh
from nblaunch.magic import auto, completion, export, sessions
from nblaunch.magic.commands import command, command_completions, perform_job, with_macros_kept
from nblaunch.options.command_line import option_completions, options_help, options_on_a_screen, parse_line
from nblaunch.options.launch import LaunchOptions, refuse_session_options
from nblaunch.protocol.messages import CellJob
from nblaunch.view.display import view_of


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
        # Called only below another magic: `auto` removes it from a cell's first line.
        with auto.suspended():
            self.shell.run_cell(cell).raise_error()

    def _run_cell(self, line: str, cell: str) -> Handle | None:
        parsed = parse_line(self._expanded(line))
        if parsed.help_wanted:
            print(options_help("%%distributed"))  # noqa: T201 - the user asked for it
            return None
        options = parsed.options
        refuse_session_options(options)
        refuse_inside_rank()
        inserted = auto.take_inserted()
        if inserted and not auto.is_the_users():
            auto.run_here(self.shell, cell)
            return None
        session = sessions.session_for(options)
        options = sessions.on_its_nodes(options)
        first_line = 1 if inserted else 2
        filename, title = self._name(cell if first_line == 1 else f"%%distributed {line}\n{cell}")
        number = self.shell.displayhook.prompt_count
        work = CellJob(
            source=cell,
            filename=filename,
            title=title,
            number=number,
            first_line=first_line,
            keeps_value=options.out is not None,
            flags=_notebook.future_flags(),
        )
        if session is None:
            job = _fresh_cell(options)
            placement, job.work = job.placement, work
            perform = self._prepare_fresh(work, job)
        else:
            placement = session.placement
            sessions.check_cell_options(session, options)
            perform = session.prepare_cell(
                work, self._names_in(work), self.shell.user_ns, ranks=options.ranks, options=options
            )
        ran = export.about_to_run(number, cell, options, placement, session)
        if options.export is not None:
            print(export.write([ran.cell], ran, options.export, self.shell.user_ns))  # noqa: T201 - asked for
        export.remember(ran)
        claim = session.claim if session is not None else lambda: None
        return perform_job(perform, options, self.shell, claim)

    def _prepare_fresh(self, work: CellJob, job: ClientJob) -> Perform:
        captured = capture_cell(self._names_in(work), self.shell.user_ns)
        reached = captured.used | captured.packed.carried.keys()
        job.payloads = (RankPayload(captured),)
        job.notices = tuple(map(own_name_notice, sorted(reached & RANK_NAMES & self.shell.user_ns.keys())))
        view = view_of("cell", job.backend, job.placement.note)
        return functools.partial(run_fresh, job, view)

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

    def _names_in(self, work: CellJob) -> CellNames:
        """Return the names that the cell uses; a `SyntaxError` in it names the cell's own line."""
        with auto.suspended():
            plain = _notebook.transform_cell(self.shell, work.source, self.shell.transform_cell)
            transformed = "\n" * (work.first_line - 1) + plain
            try:
                return cell_names(transformed, transform=self.shell.transform_cell)
            except SyntaxError as error:
                error.filename = work.filename
                raise error.with_traceback(None) from None


def _fresh_cell(options: LaunchOptions) -> ClientJob:
    """Return the job of a cell on fresh ranks. Raises `OptionError` for `--ranks`."""
    if options.ranks is not None:
        msg = "--ranks chooses ranks of a session, and no session runs this cell. Leave it out."
        raise OptionError(msg, kind=FailureKind.NO_SESSION)
    return fresh_job("cell", options)


def register(shell: InteractiveShell) -> None:
    """Register the magics with `shell`, with help and completion."""
    magics = DistributedMagics(shell)
    method: Any = DistributedMagics.distributed
    method.__doc__ = f"{options_on_a_screen('%%distributed')}"
    shell.register_magics(magics)
    shell.events.register("post_run_cell", _after_cell)
    auto.install(shell)
    completer: Any = shell.Completer
    completer.custom_matchers = [
        *(each for each in completer.custom_matchers if each.__name__ != "session_matcher"),
        context_matcher()(session_matcher),
    ]
    shell.set_hook(
        "complete_command",
        lambda _shell, event: option_completions(event.text_until_cursor, values=completion.choices()),
        str_key="%%distributed",
    )
    shell.set_hook(
        "complete_command",
        lambda _shell, event: command_completions(event.text_until_cursor),
        str_key="%distributed",
    )


def _after_cell(result: ExecutionResult) -> None:
    """Let the sessions know of a cell that has run; a callback of IPython's."""
    running, info = _notebook.shell(), result.info
    if running is None or info is None:
        return

    def bound() -> frozenset[str]:
        # What a cell binds on the ranks, it does not bind here.
        if not result.success or auto.ran_on_ranks() or _MAGIC.match(info.raw_cell):
            return frozenset()
        with auto.suspended():
            source = running.transform_cell(info.raw_cell)
            return cell_names(source, transform=running.transform_cell).bound

    with contextlib.suppress(SyntaxError):  # what a magic's text is, nobody has run
        sessions.note_cell(bound)


# Completion in the body of a `%%distributed` cell: names and attributes that live on rank 0.

_MAGIC = re.compile(r"\s*%%distributed\b([^\n]*)\n")


def session_matcher(context: CompletionContext) -> SimpleMatcherResult:
    try:
        return SimpleMatcherResult(completions=_completions(context))
    except Exception:  # noqa: BLE001 - the line is not finished, and cannot be parsed
        return SimpleMatcherResult(completions=[])


def _completions(context: CompletionContext) -> list[SimpleCompletion]:
    body = _MAGIC.match(context.full_text)
    if body is None and not auto.on():
        return []
    session = sessions.session_for(parse_line(body[1] if body is not None else "").options)
    if session is None:
        return []
    skipped = body.end() if body is not None else 0
    lines = context.full_text.split("\n")
    position = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
    length, texts = session.complete(context.full_text[skipped:], position - skipped)
    # IPython replaces its own token; ours may begin elsewhere.
    before = context.token[: max(len(context.token) - length, 0)]
    return [SimpleCompletion(before + text) for text in texts]
