"""`LaunchOptions`: every option of a launch is a field of it, and a row of the table.

To add an option add a field to `LaunchOptions`; nothing else has to change. `kinds` has what a value may
be, `table` what the columns mean. Names and meanings are torchrun's where torchrun has the option
(`torch.distributed.run.get_args_parser`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from nblaunch._errors import OptionError
from nblaunch.options import kinds
from nblaunch.options.table import Option, foreign_meaning, option, plain_help, unknown

MOST_RANKS_PER_NODE = 4096
"""More than any machine has CPUs or accelerators for; a larger number is a slip of the keyboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How to launch a group of ranks; every option under torchrun's name where torchrun has it.

    Made by `from_keywords` (what `run()` was given), by `parse_line` (what `%%distributed` was given), or
    directly; `dataclasses.replace` works too. Each way checks every value and raises `OptionError`. Only
    the first two read `PET_` variables: an explicit option beats the variable, which beats the default.

    Instances can be pickled, compared and hashed. `env` is kept as `EnvironmentVariables`, a mapping that
    nobody can change and whose `repr` leaves the values out.

    >>> LaunchOptions(timeout=60).timeout
    60.0
    """

    # A row of the table each: what the option takes and means, then its columns.
    # fmt: off
    nproc_per_node: int | Literal["auto", "cpu", "gpu"] = option(
        kinds.whole_number(1, MOST_RANKS_PER_NODE, "auto", "cpu", "gpu"),
        "Ranks on each node. auto: one for each accelerator, else 2; cpu, gpu: one for each.",
        *("-n", "--nproc"),
        default="auto", scope="node", torchrun="variable", torchrun_default=1, aliases=("nproc",), everyday=1,
        of_placed_nodes=True,
        foreign=(
            "mpirun -np", "mpiexec -ppn", "mpiexec --ppn", "mpirun -npernode", "mpirun --npernode",
            "srun --ntasks-per-node", "srun --ntasks", "accelerate --num-processes", "deepspeed --num-gpus",
        ),
    )
    backend: str = option(
        kinds.backend,
        "Backend of the default group. auto: gloo, and nccl (xccl) where every rank has a GPU.",
        default="auto", scope="group", torchrun="omitted",
    )
    init_process_group: bool = option(
        kinds.switch(given=False),
        "With --no-init (init_process_group=False), and scripts, ranks begin without a process group.",
        default=True, scope="group", torchrun="omitted", flag="--no-init",
    )
    out: str | None = option(
        kinds.python_name, "Variable of the notebook that gets the result, also when the run fails.",
        default=None, scope="notebook", torchrun="omitted", everyday=2,
    )
    session: str | None = option(
        kinds.python_name, "Session whose ranks run the cell. None: the open one.",
        default=None, scope="notebook", torchrun="omitted",
    )
    fresh: bool = option(
        kinds.switch(given=True), "Run the cell on fresh ranks, beside an open session.",
        default=False, scope="notebook", torchrun="omitted", everyday=6,
    )
    background: bool = option(
        kinds.switch(given=True), "Go on while the cell runs; its result is a handle.",
        default=False, scope="notebook", torchrun="omitted", everyday=4,
    )
    export: str | None = option(
        kinds.script_path, "Also write the cell as a script for torchrun, to this file.",
        default=None, scope="notebook", torchrun="omitted",
    )
    detach: bool = option(
        kinds.switch(given=True), "The session outlives the kernel; attach finds it.",
        default=False, scope="session", torchrun="omitted",
    )
    linger: float = option(
        kinds.duration(), "Longest time that a detached session is kept without a client or a running job.",
        default=14400.0, scope="session", torchrun="omitted",
    )
    ranks: tuple[int, ...] | None = option(
        kinds.ranks, "Ranks of a session that run the cell. None: all.",
        default=None, scope="notebook", torchrun="comment", everyday=5,
    )
    env: Mapping[str, str] = option(
        kinds.variables, "Environment variable for the ranks only; on a line, repeat it to set several.",
        default=kinds.EnvironmentVariables(), scope="group", torchrun="omitted", everyday=7,
        foreign=("mpirun -x", "mpiexec -genv", "mpiexec -env"),
    )
    timeout: float | None = option(
        kinds.seconds(), "Longest time the run may take. None: no limit.",
        default=None, scope="cell", torchrun="comment", everyday=3,
    )
    grace: float = option(
        kinds.seconds(or_zero=True), "Time for ranks to end by themselves after an interrupt or a timeout.",
        default=5.0, scope="cell", torchrun="comment",
    )
    hang_after: float | None = option(
        kinds.seconds(), "Report, without stopping, ranks that are silent this long inside one collective.",
        default=None, scope="cell", torchrun="comment",
    )
    profile: bool = option(
        kinds.switch(given=True), "Record what each rank does, and who waits for whom: `result.profile`.",
        default=False, scope="cell", torchrun="comment",
    )
    profile_steps: tuple[int, int] | None = option(
        kinds.steps, "Profile these steps only, both included. None, with --profile: all.",
        default=None, scope="cell", torchrun="comment",
    )
    watch: tuple[str, ...] = option(
        kinds.watched, "Stop the run at the first NaN (nan), or where ranks' collectives differ (desync).",
        default=(), scope="cell", torchrun="comment",
    )
    max_restarts: int = option(
        kinds.whole_number(0, kinds.LARGEST), "How often the whole group starts again after a rank failed.",
        default=0, scope="group", torchrun="variable",
    )
    monitor_interval: float = option(
        kinds.seconds(), "Time between two looks of the agent at its ranks.",
        default=0.02, scope="group", torchrun="variable", torchrun_default=0.1,
    )
    role: str = option(
        kinds.one_line, "Name of the ranks' role, as logs show it.",
        default="rank", scope="node", torchrun="variable", torchrun_default="default",
    )
    log_dir: str | None = option(
        kinds.directory, "Where runs keep their logs. None: in private, removed with the result.",
        default=None, scope="node", torchrun="variable",
        foreign=("mpirun --output-filename", "mpirun -output-filename", "srun --output", "srun -o"),
    )
    shutdown_timeout: int = option(
        kinds.whole_number(1, kinds.LARGEST, metavar="SECONDS"),
        "Whole seconds from SIGTERM to SIGKILL when the agent stops ranks.",
        default=5, scope="group", torchrun="variable", torchrun_default=None,
    )
    standalone: bool = option(
        kinds.switch(given=True), "Rendezvous on this machine only, on a free port.",
        default=True, scope="group", torchrun="variable", torchrun_default=False,
    )
    nnodes: str = option(
        kinds.nodes, "Nodes, or the least and the most: 1:2. --on places them, else others `join`.",
        default="1", scope="rendezvous", torchrun="variable",
        foreign=("srun -N", "srun --nodes", "accelerate --num-machines", "deepspeed --num-nodes"),
    )
    rdzv_backend: str = option(
        kinds.one_line, "Rendezvous of the nodes: c10d, static, or another one of torch's.",
        default="c10d", scope="rendezvous", torchrun="variable", torchrun_default="static",
    )
    rdzv_endpoint: str = option(
        kinds.endpoint, "Where the nodes meet. Empty: in private, on this machine.",
        default="", scope="rendezvous", torchrun="variable",
    )
    rdzv_id: str | None = option(
        kinds.one_line, "Name of the run at the rendezvous. None: a fresh one.",
        default=None, scope="rendezvous", torchrun="variable", torchrun_default="none",
    )
    rdzv_conf: str = option(
        kinds.settings, "More settings of the rendezvous backend.",
        default="", scope="rendezvous", torchrun="variable",
    )
    node_rank: int = option(
        kinds.whole_number(0, kinds.LARGEST), "This machine's number, for a static rendezvous.",
        default=0, scope="rendezvous", torchrun="variable", foreign=("accelerate --machine-rank",),
    )
    master_addr: str | None = option(
        kinds.host, "Host of node 0, for a static rendezvous. None: here.",
        default=None, scope="rendezvous", torchrun="variable", torchrun_default="127.0.0.1",
        foreign=("accelerate --main-process-ip",),
    )
    master_port: int | None = option(
        kinds.whole_number(0, kinds.LAST_PORT, metavar="PORT"),
        "Port on node 0, for a static rendezvous. None: a free one.",
        default=None, scope="rendezvous", torchrun="variable", foreign=("accelerate --main-process-port",),
    )
    local_addr: str | None = option(
        kinds.host, "Address of this machine, as the others reach it.",
        default=None, scope="rendezvous", torchrun="variable",
    )
    ports: str | None = option(
        kinds.ports,
        "Ports on which each machine listens for the others; torch's own are not among them. None: any.",
        default=None, scope="rendezvous", torchrun="comment", of_placed_nodes=True,
    )
    on: str | None = option(
        kinds.engine, "What places the nodes: process, join, ssh=HOST1,HOST2, slurm or ray. None: nothing.",
        default=None, scope="engine", torchrun="comment",
        foreign=(
            "mpirun -H ssh={}", "mpirun --host ssh={}", "mpiexec -hosts ssh={}",
            "mpirun --hostfile ssh=HOST1,HOST2", "mpirun -hostfile ssh=HOST1,HOST2",
            "mpiexec -f ssh=HOST1,HOST2", "mpirun --machinefile ssh=HOST1,HOST2",
        ),
    )
    slurm: str = option(
        kinds.shell_words, "Options of salloc for the nodes, as one text: '-p gpu --gpus-per-node=8 -t 30'.",
        default="", scope="engine", torchrun="comment",
        foreign=tuple(
            f"srun {flag} '{flag} {{}}' with --on slurm"
            for flag in (
                "-p", "--partition", "-A", "--account", "--gres", "--gpus-per-node", "-G", "--gpus",
                "-w", "--nodelist", "-C", "--constraint", "--qos", "-c", "--cpus-per-task", "--mem",
            )
        ),
    )
    here: bool = option(
        kinds.switch(given=True), "With --on, this machine is one of the nodes.",
        default=False, scope="engine", torchrun="comment",
    )
    node_python: str | None = option(
        kinds.remote_program, "Python of the nodes. None: where this one is; with --sync-env, python3.",
        default=None, scope="engine", torchrun="comment",
    )
    sync_env: bool = option(
        kinds.switch(given=True), "Nodes get this Python environment: uv installs its exact versions there.",
        default=False, scope="engine", torchrun="comment",
    )
    queue_timeout: float | None = option(
        kinds.duration(),
        "Longest wait until nodes are granted, which --timeout does not count. None: no limit.",
        default=None, scope="engine", torchrun="comment",
    )
    node_timeout: float = option(
        kinds.seconds(), "Silence after which a node is lost whose connection has not ended.",
        default=15.0, scope="engine", torchrun="comment",
    )
    start_method: Literal["forkserver", "spawn", "fork"] = option(
        kinds.choice("forkserver", "spawn", "fork"),
        "Fork a server that has torch loaded, or start a new Python (fork is refused).",
        default="forkserver", scope="node", torchrun="variable", torchrun_default="spawn",
    )
    numa_binding: str | None = option(
        kinds.choice("node", "socket", "exclusive", "core-complex"),
        "Bind each rank to the CPUs near its GPU. None: no binding.",
        default=None, scope="node", torchrun="flag",
        foreign=("mpirun --bind-to", "mpirun -bind-to", "srun --cpu-bind"),
    )
    virtual_local_rank: bool = option(
        kinds.switch(given=True), "Each rank sees one GPU only and is local rank 0 to itself.",
        default=False, scope="node", torchrun="variable",
    )
    signals_to_handle: str = option(
        kinds.signal_names,
        "Signals that end the ranks of a joined node; the notebook keeps its own handlers.",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", scope="node", torchrun="variable", of_placed_nodes=True,
    )
    event_log_handler: str = option(
        kinds.one_line, "torchelastic's handler that its events go to as well.",
        default="null", scope="node", torchrun="variable",
    )
    metrics_file: str | None = option(
        kinds.file_path, "File to which lines of JSON are appended: what ranks log, while they run.",
        default=None, scope="cell", torchrun="comment",
    )
    redirects: str = option(
        kinds.streams, "Streams that are only kept, not shown: 1 stdout, 2 stderr, 3 both.", "-r",
        default="0", scope="cell", torchrun="variable",
    )
    tee: str = option(
        kinds.streams, "Streams that are shown although --redirects has them.", "-t",
        default="0", scope="cell", torchrun="variable",
    )
    local_ranks_filter: tuple[int, ...] | None = option(
        kinds.ranks, "Local ranks whose output is shown. None: all.",
        default=None, scope="cell", torchrun="variable",
    )
    logs_specs: str | None = option(
        kinds.one_line, "Entry point in torchrun.logs_specs that says where logs are written.",
        default=None, scope="node", torchrun="flag",
    )
    duplicate_stdout_filters: tuple[str, ...] = option(
        kinds.texts, "Lines with one of these also go to filtered_stdout.log.",
        default=(), scope="node", torchrun="variable",
    )
    duplicate_stderr_filters: tuple[str, ...] = option(
        kinds.texts, "Lines with one of these also go to filtered_stderr.log.",
        default=(), scope="node", torchrun="variable",
    )
    log_line_prefix_template: str = option(
        kinds.line_prefix,
        "Begins each line there; torchrun's macros: ${role_name}, ${local_rank}, ${rank}, ${hostname}.",
        default="", scope="node", torchrun="variable",
    )
    module: bool = option(
        kinds.switch(given=True), "The script is the name of a module, as python -m takes it.", "-m",
        default=False, scope="script", torchrun="variable",
    )
    no_python: bool = option(
        kinds.switch(given=True), "The script is a program of its own, not run by Python.",
        default=False, scope="script", torchrun="variable",
    )
    run_path: bool = option(
        kinds.switch(given=True), "Run the script inside the rank, which every script is anyway.",
        default=False, scope="script", torchrun="variable",
    )
    pull: tuple[str, ...] = option(
        kinds.python_names, "Globals of the script that are its value, by name. None: the exit status is.",
        default=(), scope="script", torchrun="comment",
    )
    # fmt: on

    def __post_init__(self) -> None:
        """Check every value and bring it into its final form; raises `OptionError`."""
        for each in OPTIONS:
            value = getattr(self, each.name)
            # Most are: a cell's options are checked in the notebook and in the runtime.
            if value is not each.default:
                object.__setattr__(self, each.name, each.check(each.name, value))

    @classmethod
    def from_keywords(
        cls, *, script: bool = False, of_session: bool = False, **keywords: object
    ) -> LaunchOptions:
        """Return the options that `run()` or `Session` was given; `nproc` is `nproc_per_node`.

        With `script` there are also the options that only a script has, with `of_session` those of a session.

        >>> LaunchOptions.from_keywords(nproc=2).nproc_per_node
        2
        """
        values: dict[str, object] = {}
        refused = {"notebook": True, "session": not of_session, "script": not script}
        for keyword, value in keywords.items():
            found = _BY_KEYWORD.get(keyword)
            if found is None:
                written = f"{keyword}="
                foreign = foreign_meaning(written, None, _OF_RUN)
                raise unknown(written, _KEYWORD_MEANINGS, [f"{each.name}=" for each in _OF_RUN], foreign)
            if refused.get(found.scope):
                only = _ONLY[found.scope].format(keyword=keyword, flag=found.flags[0])
                message = f"{keyword}= was asked for, but only {only}"
                raise OptionError(message)
            if found.name in values:
                both = " and ".join(f"{known}=" for known in found.keywords if known in keywords)
                message = f"{both} were asked for, but they are the same option. Give one of them."
                raise OptionError(message)
            values[found.name] = found.check(keyword, value)
        return with_variables(values, script=script)

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the most nodes.

        >>> LaunchOptions(nnodes="1:2").nodes
        (1, 2)
        """
        return kinds.node_limits(self.nnodes)

    def shows(self, local_rank: int, stream: str) -> bool:
        """Whether a stream of a local rank is shown; all of it is kept in files, and in the result.

        >>> LaunchOptions(redirects="3", tee="0:1").shows(0, "stdout")
        True
        """
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            return False
        bit = {"stdout": 1, "stderr": 2}[stream]
        kept, shown = (kinds.streams_of(each, local_rank) & bit for each in (self.redirects, self.tee))
        return not kept or bool(shown)

    def to_line(self) -> str:
        """Return what to write after `%%distributed` for these options: those that are not the default.

        >>> LaunchOptions(max_restarts=3, role="my trainer").to_line()
        "--max-restarts=3 --role='my trainer'"
        """
        words = []
        for each in OPTIONS:
            value, flag = getattr(self, each.name), each.flags[0]
            if value != each.default:
                texts = each.kind.texts(value)
                bare = each.kind.switch and texts == ("true",)
                # With "=" because a text may begin with "-".
                words += [flag] if bare else [f"{flag}={shlex.quote(text)}" for text in texts]
        return " ".join(words)


OPTIONS: tuple[Option, ...] = tuple(each.metadata["row"](name=each.name) for each in fields(LaunchOptions))
"""The table: one row for each field."""

_ONLY = {
    "notebook": "a magic has this option ({flag}). Leave it out; in Python assign what the call returns.",
    "session": "a session has this option. Leave it out, or use Session({keyword}=...).",
    "script": 'a script has this option. Leave it out, or give run() the path of a script: run("train.py").',
}
_BY_KEYWORD = {keyword: each for each in OPTIONS for keyword in each.keywords}
_OF_RUN = [each for each in OPTIONS if each.scope not in ("notebook", "session")]
_KEYWORD_MEANINGS = {
    f"{spelling.lstrip('-').replace('-', '_')}=": f"{each.keywords[-1]}="
    for each in _OF_RUN
    for spelling in each.spellings
} | {f"{keyword}=": f"{keyword}=" for each in _OF_RUN for keyword in each.keywords}
"""Spellings of keywords, also those of the flags, and the keyword that each stands for."""

# `help(nblaunch.LaunchOptions)` is where someone without the docs at hand looks.
LaunchOptions.__doc__ = f"{LaunchOptions.__doc__}\n{plain_help(OPTIONS)}\n"


def with_variables(values: Mapping[str, object], *, script: bool) -> LaunchOptions:
    """Return options from checked values and, for what is not among them, `PET_` variables."""
    found = {
        each.name: each.read(variable, os.environ[variable])
        for each in OPTIONS
        if each.name not in values and (variable := each.variable) is not None and variable in os.environ
        # A notebook that once was a job of torchrun's may have PET_MODULE in its environment.
        if script or each.scope != "script"
    }
    everything = {**found, **values}
    if everything.get("standalone") and everything.get("rdzv_endpoint"):
        message = (
            f"standalone and rdzv_endpoint={everything['rdzv_endpoint']!r} were asked for, but the first "
            "keeps the rendezvous private and the second opens it to others. Leave one of them out."
        )
        raise OptionError(message)
    if everything.get("standalone") and everything.get("on"):
        message = (
            f"standalone and on={everything['on']!r} were asked for, but the first keeps the run on this "
            "machine. Leave one of them out."
        )
        raise OptionError(message)
    return _of_checked(everything)


def refuse_session_options(options: LaunchOptions) -> None:
    """Raise `OptionError` for an option that only a session has, on the line of a cell or a script."""
    for each in OPTIONS:
        if each.scope == "session" and getattr(options, each.name) != each.default:
            message = f"{each.flags[0]} is for %distributed start. Leave it out here."
            raise OptionError(message)


def within(session: LaunchOptions, cell: LaunchOptions) -> LaunchOptions:
    """Return the options of a cell in a session: its own where it may have its own and asks for it."""
    own = [
        each for each in OPTIONS if getattr(cell, each.name) != getattr(session, each.name) and each.per_cell
    ]
    if not own:
        return session
    # A `PET_` variable holds for fresh ranks; the cell itself has not asked for its value.
    unasked = LaunchOptions.from_keywords()
    values = {each.name: getattr(session, each.name) for each in OPTIONS}
    for each in own:
        value = getattr(cell, each.name)
        if value != getattr(unasked, each.name):
            values[each.name] = value
    return _of_checked(values)


def _of_checked(values: Mapping[str, object]) -> LaunchOptions:
    """Return options whose values need no second look; the others are the defaults."""
    made = object.__new__(LaunchOptions)
    for each in OPTIONS:
        object.__setattr__(made, each.name, values.get(each.name, each.default))
    return made
