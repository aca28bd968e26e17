"""How other machines come to join a run: the key, and the command that the user is told."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

from nblaunch import _join_key
from nblaunch.elastic.runtime_dir import RuntimeDirectory
from nblaunch.elastic.settings import AgentSettings
from nblaunch.protocol.messages import PROTOCOL_VERSION
from nblaunch.protocol.nodes import Joining


def versions() -> tuple[str, str]:
    """Return the Python minor and the torch that all nodes share: functions travel as bytecode."""
    # Without the part behind `+`: a machine with GPUs has another build of the same torch.
    return f"{sys.version_info.major}.{sys.version_info.minor}", torch.__version__.partition("+")[0]


def unfit(node: Joining) -> str:
    """Return why a node that asks to be let in cannot be; empty if it can."""
    if node.version != PROTOCOL_VERSION:
        return f"{node.name} has another version of nblaunch. Install the notebook's there."
    ours = versions()
    if (node.python, node.torch) == ours:
        return ""
    return (
        f"{node.name} has Python {node.python or '?'} and torch {node.torch or '?'}, the notebook has Python "
        f"{ours[0]} and torch {ours[1]}. Functions and tensors travel only where both are the same. Install "
        "the notebook's versions there."
    )


def with_key(settings: AgentSettings, directory: RuntimeDirectory) -> AgentSettings:
    """Give the nodes of a run the key by which they know each other; say how to join if it is a new one."""
    rdzv = settings.rdzv
    if rdzv is None:
        return settings
    key, made = _join_key.read_or_make(os.environ, directory.root)
    if made and rdzv.most > 1:
        static = " --rdzv-backend static --node-rank 1" if rdzv.backend == "static" else ""
        print(  # noqa: T201 - nobody else can say it, and the run waits
            f"To join from another terminal, or from a machine to which you copy the key file:\n"
            f"{_join_key.KEY_FILE}={made} python -m nblaunch join --rdzv-endpoint "
            f"{rdzv.host}:{rdzv.port} "
            f"--rdzv-id {settings.run_id}{static} -n {settings.nproc}",
            flush=True,
        )
    return replace(settings, rdzv=replace(rdzv, key=key))
