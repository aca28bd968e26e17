"""The torchrun command that starts a script as `%%distributed` started a cell."""

from __future__ import annotations

import re
import shlex

from nblaunch.options.launch import OPTIONS, LaunchOptions

TORCHRUNS_DEFAULTS: dict[str, object] = {
    "nproc_per_node": 1,
    "nnodes": "1",
    "rdzv_backend": "static",
    "monitor_interval": 0.1,
    "role": "default",
    "start_method": "spawn",
    "shutdown_timeout": None,
    "standalone": False,
    "master_addr": "127.0.0.1",
    "rdzv_id": "none",
}
"""torchrun's own defaults, where they are not ours; a test compares them with torchrun."""

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_RENDEZVOUS = (
    *("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("node_rank", "master_addr", "master_port", "local_addr"),
)
_OF_TORCHRUN = frozenset(
    option.name
    for option in OPTIONS
    if option.variable is not None or option.name in ("numa_binding", "logs_specs")
)
_OF_THE_NOTEBOOK = frozenset({"out", "session", "fresh", "background", "export", "env"})
"""What means nothing outside of a notebook, or is written in another way."""
_IN_THE_SCRIPT = frozenset({"backend", "init_process_group"})


def torchrun_command(options: LaunchOptions, script: str, nproc: int | str | None = None) -> str:
    """Return the command for `script`; `nproc` is how many ranks there were, where the options leave it open.

    Options that torchrun does not have stand in comment lines above it. A variable that looks like a
    secret is written as the shell's own: `HF_TOKEN="$HF_TOKEN"`.

    >>> print(torchrun_command(LaunchOptions(nproc_per_node=2, max_restarts=3, timeout=60), "train.py"))
    # torchrun has no --timeout (60.0)
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py
    """
    words = [_variable(name, text) for name, text in options.env.items()]
    words.append("torchrun")
    alone = options.standalone and all(not _chosen(options, name) for name in _RENDEZVOUS)
    if alone:
        words.append("--standalone")
    known = options.nproc_per_node if options.nproc_per_node != "auto" else nproc or "auto"
    words += ["--nproc-per-node", str(known)]
    for option in OPTIONS:
        value = getattr(options, option.name)
        if option.name not in _OF_TORCHRUN or option.name in ("nproc_per_node", "standalone"):
            continue
        met_elsewhere = option.name == "rdzv_backend" and not alone and value != "static"
        if not (_chosen(options, option.name) or met_elsewhere):
            continue
        if option.kind.switch:
            words.append(option.flags[0])
            continue
        for text in option.kind.texts(value):
            quoted = shlex.quote(text)
            words += [f"{option.flags[0]}={quoted}"] if text.startswith("-") else [option.flags[0], quoted]
    command = " ".join([*words, shlex.quote(script)])
    return "\n".join([*_what_it_has_not(options), command])


def _chosen(options: LaunchOptions, name: str) -> bool:
    """Return whether somebody wanted another value than either of the defaults."""
    option = next(each for each in OPTIONS if each.name == name)
    value = getattr(options, name)
    return value not in (option.default, TORCHRUNS_DEFAULTS.get(name, option.default))


def _variable(name: str, text: str) -> str:
    return f'{name}="${name}"' if _SECRET.search(name) else f"{name}={shlex.quote(text)}"


def _what_it_has_not(options: LaunchOptions) -> list[str]:
    missing = []
    for option in OPTIONS:
        value = getattr(options, option.name)
        if option.name in _OF_TORCHRUN | _OF_THE_NOTEBOOK | _IN_THE_SCRIPT or value == option.default:
            continue
        missing.append(f"# torchrun has no {option.flags[0]} ({', '.join(option.kind.texts(value))})")
    return missing
