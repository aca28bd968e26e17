"""The torchrun command that starts a script as `%%distributed` started a cell."""

from __future__ import annotations

import re
import shlex

from nblaunch.options.launch import OPTIONS, LaunchOptions
from nblaunch.options.table import Option

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


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
    rendezvous = [option for option in OPTIONS if option.scope == "rendezvous"]
    alone = options.standalone and not any(_chosen(options, option) for option in rendezvous)
    if alone:
        words.append("--standalone")
    known = options.nproc_per_node if options.nproc_per_node != "auto" else nproc or "auto"
    words += ["--nproc-per-node", str(known)]
    for option in OPTIONS:
        value = getattr(options, option.name)
        if option.torchrun not in ("variable", "flag") or option.name in ("nproc_per_node", "standalone"):
            continue
        met_elsewhere = option.name == "rdzv_backend" and not alone and value != "static"
        if not (_chosen(options, option) or met_elsewhere):
            continue
        if option.kind.switch:
            words.append(option.flags[0])
            continue
        for text in option.kind.texts(value):
            quoted = shlex.quote(text)
            words += [f"{option.flags[0]}={quoted}"] if text.startswith("-") else [option.flags[0], quoted]
    command = " ".join([*words, shlex.quote(script)])
    return "\n".join([*_what_it_has_not(options), command])


def _chosen(options: LaunchOptions, option: Option) -> bool:
    """Return whether the value is neither of the defaults."""
    return getattr(options, option.name) not in (option.default, option.torchrun_default)


def _variable(name: str, text: str) -> str:
    return f'{name}="${name}"' if _SECRET.search(name) else f"{name}={shlex.quote(text)}"


def _what_it_has_not(options: LaunchOptions) -> list[str]:
    missing = [option for option in OPTIONS if option.torchrun == "comment" and _chosen(options, option)]
    return [
        f"# torchrun has no {option.flags[0]} ({', '.join(option.kind.texts(getattr(options, option.name)))})"
        for option in missing
    ]
