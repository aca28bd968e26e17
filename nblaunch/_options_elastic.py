"""The part of the option table that is about torchelastic itself: nodes, processes, logs, scripts.

Meanings and names are torchrun's (`torch.distributed.run.get_args_parser`). `_options` has the rest of the
table and all that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nblaunch._option_kinds import one_line, rank_list, switch, whole_number
from nblaunch._option_kinds_elastic import (
    choice,
    endpoint,
    node_range,
    pairs,
    python_names,
    signal_names,
    streams,
    texts,
)
from nblaunch._option_row import row

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
