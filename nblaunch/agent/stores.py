"""The stores through which nodes find each other: hosted on one address, or reached."""

from __future__ import annotations

import json
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from nblaunch._errors import LaunchError
from nblaunch.agent.contract import Meeting

_STEP = 0.2
_STORE_SECONDS = 60.0
_JOIN_SECONDS = 600


def host_store(host: str, port: int) -> dist.TCPStore:
    """Host a store on a socket that is bound to `host` alone; torch's listens on all addresses.

    Raises `LaunchError` if the port is taken.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        msg = (
            f"the store of the rendezvous was to listen at {host}:{port}: {error.strerror}. Take "
            "another port."
        )
        raise LaunchError(msg, phase="rendezvous") from error
    bound = listener.getsockname()[1]
    return dist.TCPStore(
        host_name=host,
        port=bound,
        is_master=True,
        wait_for_workers=False,
        # The store owns the descriptor from here on.
        master_listen_fd=listener.detach(),
    )


def reach_store(meeting: Meeting) -> dist.TCPStore:
    """Connect to a store that another node hosts."""
    wait_for_port(meeting.host, meeting.port, _STORE_SECONDS, threading.Event())
    return dist.TCPStore(
        host_name=meeting.host,
        port=meeting.port,
        is_master=False,
        timeout=timedelta(seconds=_STORE_SECONDS),
    )


def wait_for_port(host: str, port: int, seconds: float, stopped: threading.Event) -> None:
    """Wait until somebody listens there. Raises `LaunchError` if nobody does in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=_STORE_SECONDS).close()
        except OSError as error:
            if time.monotonic() > deadline or stopped.is_set():
                msg = (
                    f"nobody answers at {host}:{port} ({error}), where the notebook hosts the rendezvous "
                    "while its cell runs. Run the cell, or correct --rdzv-endpoint."
                )
                raise LaunchError(msg, phase="rendezvous") from error
            stopped.wait(_STEP)
        else:
            return


def read_gate(meeting: Meeting, run_id: str, stopped: threading.Event) -> str:
    """Wait until the notebook has told where its nodes report to, and return that address."""
    seconds = float(dict(meeting.conf).get("join_timeout", _JOIN_SECONDS))
    deadline = time.monotonic() + seconds
    wait_for_port(meeting.host, meeting.port, seconds, stopped)
    store = reach_store(meeting)
    key = bulletin_key(run_id)
    while not store.check([key]):
        if time.monotonic() > deadline or stopped.is_set():
            msg = (
                f"there is a rendezvous at {meeting.host}:{meeting.port}, but no notebook has a run of the "
                f"name {run_id!r} there. Give --rdzv-id as the notebook has it."
            )
            raise LaunchError(msg, phase="rendezvous")
        stopped.wait(_STEP)
    try:
        told = json.loads(store.get(key))
        return str(told["gate"])
    except (ValueError, KeyError, TypeError) as error:
        msg = f"what the store at {meeting.host}:{meeting.port} says of the run is none of nblaunch's words"
        raise LaunchError(msg, phase="rendezvous") from error


def bulletin_key(run_id: str) -> str:
    """Return under which name the notebook tells where nodes report to."""
    return f"nblaunch/{run_id}/gate"
