"""How other machines come to join a run: the key, and the command that the user is told."""

from __future__ import annotations

import os
from dataclasses import replace

from nblaunch import _join_key
from nblaunch.agent import runtime
from nblaunch.agent.contract import AgentSettings


def with_key(settings: AgentSettings) -> AgentSettings:
    """Give the nodes of a run the key by which they know each other; say how to join if nobody has it yet."""
    meeting = settings.meeting
    if meeting is None:
        return settings
    key, made = _join_key.read_or_make(os.environ, runtime.root)
    if made and meeting.most > 1:
        static = " --rdzv-backend static --node-rank 1" if meeting.backend == "static" else ""
        print(  # noqa: T201 - nobody else can say it, and the run waits
            f"To join from another terminal, or from a machine to which you copy the key file:\n"
            f"{_join_key.KEY_FILE}={made} python -m nblaunch join --rdzv-endpoint "
            f"{meeting.host}:{meeting.port} "
            f"--rdzv-id {settings.run_id}{static} -n {settings.nproc}",
            flush=True,
        )
    return replace(settings, meeting=replace(meeting, key=key))
