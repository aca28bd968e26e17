"""The IPython shell of a rank: cells, rich output, progress bars, introspection.

It is quiet, keeps no history, and runs each cell under the cell's own file name.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import importlib.abc
import importlib.machinery
import linecache
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.paths import get_ipython_dir
from traitlets.config import Config

from nblaunch import _notebook
from nblaunch.insight.comparing import Ask
from nblaunch.probes import diff
from nblaunch.protocol.messages import CellJob, Cleared, Displayed, FromRank
from nblaunch.rank import memory, stdio, values
from nblaunch.rank.stores import StoreNotes

_WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"


class _Publisher:
    """Sends messages for a rank; `send` is set once the rank is connected."""

    send: Callable[[FromRank], None] | None = None
    rank: int = 0


publisher = _Publisher()


class RankDisplayPublisher(DisplayPublisher):
    """Publishes to the notebook that started the run."""

    def publish(  # type: ignore[override]
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: object,
    ) -> None:
        if publisher.send is None:
            return
        if len(data) > 1:
            # A widget lives in this rank, where no front end finds it: its text is shown.
            data = {kind: content for kind, content in data.items() if kind != _WIDGET_TYPE}
        publisher.send(
            Displayed(
                rank=publisher.rank,
                data=_as_json(data),
                metadata=_as_json(metadata or {}),
                transient=_as_json(transient or {}),
                update=update,
                offsets=stdio.output.offsets(),
            )
        )

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's signature
        if publisher.send is not None:
            publisher.send(Cleared(rank=publisher.rank, wait=wait, offsets=stdio.output.offsets()))


def _as_json(value: Any) -> Any:
    match value:
        case None | bool() | float():
            return value
        case int():
            # MessagePack has 64 bits for an integer.
            return value if abs(value) < 1 << 63 else float(value)
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode("ascii")
        case dict():
            return {str(key): _as_json(item) for key, item in value.items()}
        case list() | tuple():
            return [_as_json(item) for item in value]
        case _:
            return repr(value)


# Progress bars in ranks are text: a widget's comm would lead nowhere. `tqdm.auto` gives a text bar here by
# itself, unless something has imported ipykernel's shell; `tqdm.notebook` never does. The notebook draws a
# rank's output as a terminal does, so a text bar is one live line there.

_NOTEBOOK = "tqdm.notebook"


class _TextBars(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a `tqdm.notebook` whose bars are text."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the import system's signature
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == _NOTEBOOK else None

    def exec_module(self, module: types.ModuleType) -> None:
        std: Any = importlib.import_module("tqdm.std")

        class TextBar(std.tqdm):  # type: ignore[misc]
            """A bar of `tqdm.notebook`, as text."""

            def __init__(self, *args: Any, display: bool = True, **keywords: Any) -> None:  # noqa: ARG002
                super().__init__(*args, **keywords)

        def trange(*args: Any, **keywords: Any) -> Any:
            return TextBar(range(*args), **keywords)

        TextBar.__module__, TextBar.__qualname__ = _NOTEBOOK, "tqdm_notebook"
        TextBar.__name__ = "tqdm_notebook"
        # `tqdm.autonotebook` reads the last two; with these values it does not warn.
        vars(module).update(
            tqdm=TextBar, tqdm_notebook=TextBar, trange=trange, tnrange=trange, IProgress=True, WARN_NOIPYW=""
        )


def install_progress_bars() -> None:
    if not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())


_VALUE_CHARACTERS = 20_000
_NO_MAGIC = (
    "{name} was used in a distributed cell, but this rank has no such magic: magics that the notebook "
    "defines or loads stay there. Define it in a cell that runs on the ranks, or %load_ext its extension "
    "there."
)


@contextlib.contextmanager
def _explaining(find: Callable[[str], object], magic: str, sign: str) -> Iterator[None]:
    """Within the block, explain why one of the notebook's magics is not here."""
    try:
        yield
    except UsageError as error:
        if find(magic) is None:
            raise UsageError(_NO_MAGIC.format(name=sign + magic)) from error
        raise


class QuietDisplayHook(DisplayHook):
    """Keeps the last expression's value and prints nothing: the notebook shows it."""

    def __call__(self, result: object = None) -> None:
        """Keep `result`, unless the cell ends with a semicolon."""
        if result is not None and not self.quiet():
            self.fill_exec_result(result)

    def quiet(self) -> bool:
        source = getattr(self.shell, "running_source", "")
        return ";" in source and bool(self.semicolon_at_end_of_expression(source))


class CellCompiler(CachingCompiler):
    """Compiles a cell under the name that it has in the notebook."""

    filename: str | None = None

    execution_count = 1

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        number = self.execution_count if self.filename else number
        return str(super().cache(transformed_code, number, raw_code))

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self.filename or str(super().get_code_name(raw_code, transformed_code, number))


# Types without HTML: calling all of IPython's formatters would be a tenth of a short job.
_PLAIN = (bool, int, float, complex, str, bytes)


class RankShell(InteractiveShell):
    """An IPython without a terminal, history or prompt; magics, `!`, `await` and `display` work."""

    compiler_class = CellCompiler
    displayhook_class = QuietDisplayHook
    display_pub_class = RankDisplayPublisher
    running_source = ""
    lines_above = 0
    stores: StoreNotes | None = None

    def transform_cell(self, raw_cell: str) -> str:
        """Transform magics, and move the cell down to its lines below the magic's own line."""
        # Not by blank lines in the source: IPython strips these, and looks for `%%` in line 1.
        transformed = _notebook.transform_cell(self, raw_cell, super().transform_cell)
        if self.stores is not None:
            self.stores.see(transformed)
        return "\n" * self.lines_above + transformed

    def transform_ast(self, node: Any) -> Any:
        node = super().transform_ast(node)
        return node if self.stores is None else self.stores.add_to(node)

    def should_run_async(self, raw_cell: str, *, transformed_cell: Any = None, **keywords: Any) -> bool:
        """Return whether a cell awaits; without these words IPython need not compile it to know."""
        text = transformed_cell or "await"
        if "await" not in text and "async" not in text:
            return False
        keywords["transformed_cell"] = transformed_cell
        return bool(super().should_run_async(raw_cell, **keywords))

    def init_prompts(self) -> None:
        """Have no `sys.ps1`, by which programs detect a notebook: Lightning refuses to run ranks in one."""
        for name in ("ps1", "ps2", "ps3"):
            vars(sys).pop(name, None)

    def enable_gui(self, gui: str | None = None) -> None:
        """Start no event loop: `%matplotlib inline` asks for none, and a rank has no windows."""

    def ask_exit(self) -> None:
        """End the job: `exit` and `quit` are `sys.exit()` here."""
        raise SystemExit

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        with _explaining(self.find_line_magic, magic_name, "%"):
            return super().run_line_magic(magic_name, line, _stack_depth + 1)

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        with _explaining(self.find_cell_magic, magic_name, "%%"):
            return super().run_cell_magic(magic_name, line, cell)

    def showtraceback(self, *_: object, **__: object) -> None:
        """Print nothing: the failure goes to the notebook."""

    showsyntaxerror = showtraceback

    def run_cell(self, *args: Any, **keywords: Any) -> ExecutionResult:
        """Run a cell, also within a cell (`%rerun`): IPython would forget the outer one's value."""
        hook: Any = self.displayhook
        outer = hook.exec_result
        try:
            result: ExecutionResult = super().run_cell(*args, **keywords)
            return result
        finally:
            hook.exec_result = outer

    def run(self, job: CellJob) -> ExecutionResult:
        compiler = self.compile
        assert isinstance(compiler, CellCompiler)  # noqa: S101 - set by compiler_class
        compiler.filename, compiler.execution_count = job.filename, job.number
        compiler.flags |= job.flags
        self.running_source, self.lines_above = job.source, job.first_line - 1
        self.last_execution_result = None  # its value may take the memory that this cell needs
        try:
            return self.run_cell(job.source, store_history=False)
        finally:
            compiler.filename, self.lines_above = None, 0

    def colored_traceback(self, error: BaseException, first: types.TracebackType | None) -> str:
        formatter = self.SyntaxTB if isinstance(error, SyntaxError) else self.InteractiveTB
        lines = formatter.structured_traceback(type(error), error, first, tb_offset=0)
        return "\n".join(lines)

    def forget_error(self) -> None:
        self.last_execution_result = None
        self.InteractiveTB.tb = None
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)

    def describe(self, value: object) -> tuple[str, str]:
        """Return `value` as text and as HTML, as this shell would show it; empty if it cannot."""
        if value is None:
            return "", ""
        if isinstance(value, str | bytes | bytearray) and len(value) > _VALUE_CHARACTERS:
            return f"{value[:_VALUE_CHARACTERS]!r}… ({len(value)} in all)", ""
        try:
            formatter: Any = self.display_formatter
            if type(value) in _PLAIN:
                return formatter.formatters["text/plain"](value), ""
            with values.summarised(formatter.formatters["text/plain"].type_printers):
                data, _ = formatter.format(value, include={"text/plain", "text/html"})
        except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - a broken __repr__ must not cost the value
            return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>", ""
        text, html = data.get("text/plain"), data.get("text/html", "")
        if text is None:
            # IPython has swallowed the repr's exception, or the object has displayed itself.
            shows_itself = hasattr(type(value), "_ipython_display_")
            text = "" if shows_itself else f"<{type(value).__name__}, whose repr raised an exception>"
        if len(text) > _VALUE_CHARACTERS:
            text = f"{text[:_VALUE_CHARACTERS]}… ({len(text)} characters)"
        return text, html if len(html) <= 10 * _VALUE_CHARACTERS else ""


_prepared: RankShell | None = None


def prepare(private: str | None = None) -> RankShell:
    """Make the shell once; done in the fork server, since it costs a rank 20 to 30 ms.

    Without a usable home directory IPython's own is a temporary one, in `private`.
    """
    global _prepared
    if _prepared is None:
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "neutral"
        main = types.ModuleType("__main__", doc="The notebook's namespace, on this rank.")
        sys.modules["__main__"] = main
        _prepared = RankShell.instance(
            config=config, user_module=main, ipython_dir=_ipython_directory(private)
        )
        # It empties the namespace. That comes after the program's own exit functions, and its threads.
        atexit.unregister(_prepared.atexit_operations)
        _warm_up(_prepared)
        install_progress_bars()
        # IPython's advice on sys.exit() is for a prompt.
        warnings.filterwarnings("ignore", message="To exit: use", category=UserWarning)
    return _prepared


def end() -> None:
    """Do what IPython does when Python ends: remove its temporary files, empty the namespace."""
    if _prepared is not None:
        _prepared.atexit_operations()


def _ipython_directory(private: str | None) -> str:
    usual, tempfile.tempdir = tempfile.tempdir, private or tempfile.tempdir
    try:
        return str(get_ipython_dir())
    finally:
        tempfile.tempdir = usual


def rehearse() -> None:
    """Run one cell, and show its value."""
    made = prepare()
    made.describe(made.run_cell("0", store_history=False).result)
    made.last_execution_result = None


def _warm_up(made: RankShell) -> None:
    """Run one cell, show its value, and format one traceback: what IPython makes for that, ranks share.

    A rank would take 15 ms for the first two. For the traceback's imports, 100 ms, a failed rank would keep
    its peers waiting.
    """
    rehearse()
    try:
        raise LookupError  # noqa: TRY301 - raised to be caught
    except LookupError as error:
        made.colored_traceback(error, error.__traceback__)


def remember_sources(sources: Mapping[str, tuple[str, str]]) -> None:
    names: dict[str, int] = prepare().compile._filename_map  # noqa: SLF001 - where IPython keeps "Cell In[3]"
    for filename, (title, source) in sources.items():
        number = title.removeprefix("Cell In[").removesuffix("]")
        if number.isdigit():
            names[filename] = int(number)
        lines = source.splitlines(keepends=True)
        # Without a modification time `linecache.checkcache` leaves the entry alone.
        linecache.cache[filename] = (len(source), None, lines, filename)


def sources_of(lines: Mapping[str, Collection[int]]) -> dict[str, tuple[str, str]]:
    """Return title and source of the cells among these files, with these lines alone."""
    names: dict[str, int] = prepare().compile._filename_map  # noqa: SLF001 - as above
    found = {}
    for file, kept in sorted(lines.items()):
        known: Any = linecache.cache.get(file)
        if known is not None and len(known) == _LINES and known[1] is None:  # no file's
            title = f"Cell In[{names[file]}]" if file in names else file
            # Others may have secrets.
            shown = (line if at in kept else "\n" for at, line in enumerate(known[2], 1))
            found[file] = title, "".join(shown)
    return found


_LINES = 4
"""So many parts has an entry of `linecache` whose lines are there."""


def namespace() -> dict[str, Any]:
    main: dict[str, Any] = sys.modules["__main__"].__dict__
    return main


# Questions of the notebook between two cells (`_notebook.ask_rank`): %debug, help, completion.

_MOST = 500


def answer_comparison(token: str, ask: Ask) -> Any:
    return diff.answer(token, ask, namespace())


last_error: BaseException | None = None
"""The exception of the last job that failed here."""


def free_gpu_memory() -> None:
    """Release the last exception if its frames may hold GPU memory, which the next job needs.

    On a rank without CUDA it stays until the next one, as in IPython.
    """
    global last_error
    if last_error is None or not memory.on_gpu():
        return
    error, last_error = last_error, None
    prepare().forget_error()
    memory.free_frames(error)


def debug() -> None:
    """Look at the frames of the last exception, as `%debug` does. Raises `LookupError` if there was none."""
    if last_error is None or last_error.__traceback__ is None:
        msg = "no job has failed on this rank since it was started"
        raise LookupError(msg)
    stdio.post_mortem(last_error.__traceback__)


def describe(name: str) -> str:
    """Return what `name?` shows here; empty if the name is not defined."""
    running: Any = prepare()
    found = running.object_inspect(name)
    return str(running.object_inspect_text(name)) if found["found"] else ""


def complete(code: str, position: int) -> tuple[int, list[str]]:
    """Return how many characters before `position` a completion replaces, and the completions."""
    completer: Any = prepare().Completer
    from IPython.core.completer import provisionalcompleter

    with provisionalcompleter():
        found = list(completer.completions(code, position))[:_MOST]
    if not found:
        return 0, []
    start = found[0].start
    return position - start, [each.text for each in found if each.start == start]
