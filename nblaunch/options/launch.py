"""The part of the option table that is about torchelastic itself: nodes, processes, logs, scripts.

Meanings and names are torchrun's (`torch.distributed.run.get_args_parser`). `_options` has the rest of the
table and all that reads it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from nblaunch._errors import OptionError
from nblaunch.options.kinds import (
    Variables,
    backend_name,
    choice,
    directory,
    endpoint,
    node_limits,
    node_range,
    one_line,
    pairs,
    python_name,
    python_names,
    rank_list,
    script_path,
    seconds,
    signal_names,
    streams,
    switch,
    texts,
    variables,
    whole_number,
)
from nblaunch.options.line import scan
from nblaunch.options.table import Option, markdown_table, plain_help, row, unknown

_MOST = 2**31 - 1
_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Which machines take part, and how they find each other."""

    nnodes: str = field(
        default="1",
        metadata=row(node_range(), "Nodes, or the least and the most: 1:2. Others `join`.", pet=True),
    )
    rdzv_backend: str = field(
        default="c10d",
        metadata=row(
            one_line(), "Rendezvous of the nodes: c10d, static, or another one of torch's.", pet=True
        ),
    )
    rdzv_endpoint: str = field(
        default="",
        metadata=row(
            endpoint(port=True), "Where the nodes meet. Empty: in private, on this machine.", pet=True
        ),
    )
    rdzv_id: str | None = field(
        default=None,
        metadata=row(one_line(), "Name of the run at the rendezvous. None: a fresh one.", pet=True),
    )
    rdzv_conf: str = field(
        default="", metadata=row(pairs(), "More settings of the rendezvous backend.", pet=True)
    )
    node_rank: int = field(
        default=0,
        metadata=row(whole_number(0, _MOST), "This machine's number, for a static rendezvous.", pet=True),
    )
    master_addr: str | None = field(
        default=None,
        metadata=row(endpoint(port=False), "Host of node 0, for a static rendezvous. None: here.", pet=True),
    )
    master_port: int | None = field(
        default=None,
        metadata=row(
            whole_number(0, _LAST_PORT, metavar="PORT"),
            "Port on node 0, for a static rendezvous. None: a free one.",
            pet=True,
        ),
    )
    local_addr: str | None = field(
        default=None,
        metadata=row(endpoint(port=False), "Address of this machine, as the others reach it.", pet=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions(NodeOptions):
    """How the processes of the ranks are started and bound."""

    start_method: Literal["forkserver", "spawn", "fork"] = field(
        default="forkserver",
        metadata=row(
            choice("forkserver", "spawn", "fork"),
            "Fork a server that has torch loaded, or start a new Python (fork is refused).",
            pet=True,
        ),
    )
    numa_binding: str | None = field(
        default=None,
        metadata=row(
            choice("node", "socket", "exclusive", "core-complex"),
            "Bind each rank to the CPUs near its GPU. None: no binding.",
        ),
    )
    virtual_local_rank: bool = field(
        default=False,
        metadata=row(
            switch(given=True), "Each rank sees one GPU only and is local rank 0 to itself.", pet=True
        ),
    )
    signals_to_handle: str = field(
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metadata=row(
            signal_names(),
            "Signals that end the ranks of a joined node; the notebook keeps its own handlers.",
            pet=True,
        ),
    )
    event_log_handler: str = field(
        default="null",
        metadata=row(one_line(), "torchelastic's handler that its events go to as well.", pet=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions(ProcessOptions):
    """Where the ranks' output goes; all of it is always kept, in a file per attempt, rank and stream."""

    redirects: str = field(
        default="0",
        metadata=row(
            streams(), "Streams that are only kept, not shown: 1 stdout, 2 stderr, 3 both.", "-r", pet=True
        ),
    )
    tee: str = field(
        default="0",
        metadata=row(streams(), "Streams that are shown although --redirects has them.", "-t", pet=True),
    )
    local_ranks_filter: tuple[int, ...] | None = field(
        default=None,
        metadata=row(rank_list(), "Local ranks whose output is shown. None: all.", pet=True),
    )
    logs_specs: str | None = field(
        default=None,
        metadata=row(one_line(), "Entry point in torchrun.logs_specs that says where logs are written."),
    )
    duplicate_stdout_filters: tuple[str, ...] = field(
        default=(),
        metadata=row(texts(), "Lines with one of these also go to filtered_stdout.log.", pet=True),
    )
    duplicate_stderr_filters: tuple[str, ...] = field(
        default=(),
        metadata=row(texts(), "Lines with one of these also go to filtered_stderr.log.", pet=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions(LogOptions):
    """How a script is run; a cell or a function is none, and takes none of these."""

    module: bool = field(
        default=False,
        metadata=row(
            switch(given=True),
            "The script is the name of a module, as python -m takes it.",
            "-m",
            pet=True,
            doors=("script",),
        ),
    )
    no_python: bool = field(
        default=False,
        metadata=row(
            switch(given=True),
            "The script is a program of its own, not run by Python.",
            pet=True,
            doors=("script",),
        ),
    )
    run_path: bool = field(
        default=False,
        metadata=row(
            switch(given=True),
            "Run the script inside the rank, which every script is anyway.",
            pet=True,
            doors=("script",),
        ),
    )
    pull: tuple[str, ...] = field(
        default=(),
        metadata=row(
            python_names(),
            "Globals of the script that are its value, by name. None: the exit status is.",
            doors=("script",),
        ),
    )


# --- The options of a launch: one table that the magics, `run()`, `Session`, PET_ variables and docs share.
#
# To add an option add a field to `LaunchOptions`; nothing else in this file has to change. What a value may
# be is in `_option_kinds`, what a row of the table holds in `_option_row`, reading a line in `_option_line`.


MOST_RANKS_PER_NODE = 4096
"""More than any machine has CPUs or accelerators for; a larger number is a slip of the keyboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(ScriptOptions):
    """How to launch a group of ranks; every option under torchrun's name where torchrun has it.

    Made by `from_keywords` (what `run()` was given), by `parse_line` (what `%%distributed` was given), or
    directly; `dataclasses.replace` works too. Each way checks every value and raises `OptionError`. Only
    the first two read `PET_` variables: an explicit option beats the variable, which beats the default.

    Instances can be pickled, compared and hashed. `env` is kept as `Variables`, a mapping that nobody can
    change and whose `repr` leaves the values out.

    >>> LaunchOptions(timeout=60).timeout
    60.0
    """

    nproc_per_node: int | Literal["auto", "cpu", "gpu"] = field(
        default="auto",
        metadata=row(
            whole_number(1, MOST_RANKS_PER_NODE, "auto", "cpu", "gpu"),
            "Ranks on this machine. auto: one for each accelerator, else 2; cpu, gpu: one for each.",
            *("-n", "--nproc"),
            pet=True,
            aliases=("nproc",),
        ),
    )
    backend: str = field(
        default="auto",
        metadata=row(
            backend_name(),
            "Backend of the default group. auto: gloo, and nccl (xccl) where every rank has a GPU.",
        ),
    )
    init_process_group: bool = field(
        default=True,
        metadata=row(
            switch(given=False),
            "With --no-init (init_process_group=False), and scripts, ranks begin without a process group.",
            flag="--no-init",
        ),
    )
    out: str | None = field(
        default=None,
        metadata=row(
            python_name(),
            "Variable of the notebook that gets the result, also when the run fails.",
            doors=("magic",),
        ),
    )
    session: str | None = field(
        default=None,
        metadata=row(
            python_name(), "Session whose ranks run the cell. None: the open one.", doors=("magic",)
        ),
    )
    fresh: bool = field(
        default=False,
        metadata=row(
            switch(given=True), "Run the cell on fresh ranks, beside an open session.", doors=("magic",)
        ),
    )
    background: bool = field(
        default=False,
        metadata=row(
            switch(given=True), "Go on while the cell runs; its result is a handle.", doors=("magic",)
        ),
    )
    export: str | None = field(
        default=None,
        metadata=row(
            script_path(), "Also write the cell as a script for torchrun, to this file.", doors=("magic",)
        ),
    )
    ranks: tuple[int, ...] | None = field(
        default=None,
        metadata=row(rank_list(), "Ranks of a session that run the cell. None: all.", doors=("magic",)),
    )
    env: Mapping[str, str] = field(
        default=Variables(),
        metadata=row(
            variables(), "Environment variable for the ranks only; on a line, repeat it to set several."
        ),
    )
    timeout: float | None = field(
        default=None,
        metadata=row(seconds(), "Longest time the run may take. None: no limit."),
    )
    grace: float = field(
        default=5.0,
        metadata=row(
            seconds(or_zero=True), "Time for ranks to end by themselves after an interrupt or a timeout."
        ),
    )
    hang_after: float | None = field(
        default=None,
        metadata=row(
            seconds(), "Report, without stopping, ranks that are silent this long inside one collective."
        ),
    )
    max_restarts: int = field(
        default=0,
        metadata=row(
            whole_number(0, _MOST), "How often the whole group starts again after a rank failed.", pet=True
        ),
    )
    monitor_interval: float = field(
        default=0.02,
        metadata=row(seconds(), "Time between two looks of the agent at its ranks.", pet=True),
    )
    role: str = field(
        default="rank",
        metadata=row(one_line(), "Name of the ranks' role, as logs show it.", pet=True),
    )
    log_dir: str | None = field(
        default=None,
        metadata=row(
            directory(), "Where runs keep their logs. None: in private, removed with the result.", pet=True
        ),
    )
    shutdown_timeout: int = field(
        default=5,
        metadata=row(
            whole_number(1, _MOST, metavar="SECONDS"),
            "Whole seconds from SIGTERM to SIGKILL when the agent stops ranks.",
            pet=True,
        ),
    )
    standalone: bool = field(
        default=True,
        metadata=row(switch(given=True), "Rendezvous on this machine only, on a free port.", pet=True),
    )

    def __post_init__(self) -> None:
        """Check every value and bring it into its final form; raises `OptionError`."""
        for option in OPTIONS:
            object.__setattr__(self, option.name, option.check(option.name, getattr(self, option.name)))

    @classmethod
    def from_keywords(cls, *, script: bool = False, **keywords: object) -> LaunchOptions:
        """Return the options that `run()` or `Session` was given; `nproc` is `nproc_per_node`.

        With `script` there are also the options that only a script has.

        >>> LaunchOptions.from_keywords(nproc=2).nproc_per_node
        2
        """
        values: dict[str, object] = {}
        for keyword, value in keywords.items():
            option = _BY_KEYWORD.get(keyword)
            if option is None:
                written = f"{keyword}="
                raise unknown(written, _KEYWORD_MEANINGS, [f"{option.name}=" for option in _OF_RUN])
            if option.doors == ("magic",):
                message = (
                    f"{keyword}= was asked for, but only a magic has this option ({option.flags[0]}). "
                    "Leave it out; in Python assign what the call returns."
                )
                raise OptionError(message)
            if option.doors == ("script",) and not script:
                message = (
                    f"{keyword}= was asked for, but only a script has this option. Leave it out, or give "
                    'run() the path of a script: run("train.py").'
                )
                raise OptionError(message)
            if option.name in values:
                both = " and ".join(f"{known}=" for known in option.keywords if known in keywords)
                message = f"{both} were asked for, but they are the same option. Give one of them."
                raise OptionError(message)
            values[option.name] = option.check(keyword, value)
        return _with_variables(values, script=script)

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the most nodes.

        >>> LaunchOptions(nnodes="1:2").nodes
        (1, 2)
        """
        return node_limits(self.nnodes)

    def to_line(self) -> str:
        """Return what to write after `%%distributed` for these options: those that are not the default.

        >>> LaunchOptions(max_restarts=3, role="my trainer").to_line()
        "--max-restarts=3 --role='my trainer'"
        """
        changed = [option for option in OPTIONS if getattr(self, option.name) != option.default]
        return " ".join(word for option in changed for word in _words(option, getattr(self, option.name)))


OPTIONS: tuple[Option, ...] = tuple(
    each.metadata["option"](each.name, each.default)
    for each in sorted(fields(LaunchOptions), key=lambda each: each.name not in LaunchOptions.__annotations__)
)
"""The table: one row for each option, those that only torchelastic has after the others."""

_BY_KEYWORD = {keyword: option for option in OPTIONS for keyword in option.keywords}
_OF_RUN = [option for option in OPTIONS if {"run", "script"} & set(option.doors)]
_OF_SCRIPT = [option for option in OPTIONS if {"magic", "script"} & set(option.doors)]
_OF_MAGIC = [option for option in _OF_SCRIPT if "magic" in option.doors]
_KEYWORD_MEANINGS = {
    f"{spelling.lstrip('-').replace('-', '_')}=": f"{option.keywords[-1]}="
    for option in _OF_RUN
    for spelling in option.spellings
} | {f"{keyword}=": f"{keyword}=" for option in _OF_RUN for keyword in option.keywords}
"""What may be written as a keyword, also by someone who thinks of the flag, and the keyword it stands for."""

# `help(nblaunch.LaunchOptions)` is where someone without the docs at hand looks.
LaunchOptions.__doc__ = f"{LaunchOptions.__doc__}\n{plain_help(OPTIONS)}\n"


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """What the line of a magic asks for."""

    options: LaunchOptions
    rest: tuple[str, ...] = ()
    """The words from the first one on that is no option."""
    help_wanted: bool = False
    """`-h` or `--help` was given; then `options` are the defaults."""


def parse_line(line: str, *, positional: bool = False, script: bool = False) -> ParsedLine:
    """Return what a line such as `-n 2 --timeout 60  # a comment` asks for.

    Words that are no options are allowed with `positional` and with `script` only; the first one ends the
    options, as with torchrun. With `script` there are also the options that only a script has. Of an option
    given twice the last counts, `--env` and `--pull` add up. Raises `OptionError` for everything that is
    wrong with the line; never prints, never exits.

    >>> parse_line("-n 2 --log-dir runs").options.to_line()
    '--nproc-per-node=2 --log-dir=runs'
    """
    scanned = scan(line, _OF_SCRIPT if script else _OF_MAGIC, positional=positional or script)
    if scanned.help_wanted:
        return ParsedLine(LaunchOptions(), help_wanted=True)
    return ParsedLine(_with_variables(scanned.values(), script=script), scanned.rest)


def options_table() -> str:
    """Return the Markdown table of all options, for the README and the docs."""
    return markdown_table(OPTIONS)


def options_help(prog: str, *, script: bool = False) -> str:
    """Return the help text of a magic; `prog` is how it is written, such as `%%distributed`."""
    options = plain_help(_OF_SCRIPT if script else _OF_MAGIC)
    what = "[options] script [arguments]" if script else "[options]"
    return (
        f"{prog} {what}\n\n{options}\n  -h, --help\n      Show this text.\n\n"
        "Each option can be written with underscores too: --max_restarts. Of an option given twice the last\n"
        "counts; --env and --pull add up. An option on the line beats its environment variable."
    )


def _with_variables(values: Mapping[str, object], *, script: bool) -> LaunchOptions:
    """Return options from explicit values and, for what is not among them, `PET_` variables."""
    found = {
        option.name: option.read(option.variable, os.environ[option.variable])
        for option in OPTIONS
        if option.name not in values and option.variable is not None and option.variable in os.environ
        # A notebook that once was a job of torchrun's may have PET_MODULE in its environment.
        if script or option.doors != ("script",)
    }
    everything: dict[str, Any] = {**found, **values}
    if everything.get("standalone") and everything.get("rdzv_endpoint"):
        message = (
            f"standalone and rdzv_endpoint={everything['rdzv_endpoint']!r} were asked for, but the first "
            "keeps the rendezvous private and the second opens it to others. Leave one of them out."
        )
        raise OptionError(message)
    return LaunchOptions(**everything)


def _words(option: Option, value: object) -> list[str]:
    """Return the words that give an option this value on a line."""
    flag, texts = option.flags[0], option.kind.texts(value)
    if option.kind.switch and texts == ("true",):
        return [flag]
    # With "=" because a text may begin with "-".
    return [f"{flag}={shlex.quote(text)}" for text in texts]
