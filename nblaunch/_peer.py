"""Who is at the other end of a unix socket. Standard library only."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import NamedTuple

_UCRED = struct.Struct("3i")
# macOS: `struct xucred` begins with its version and the user; a process id has an option of its own.
_SOL_LOCAL, _LOCAL_PEERCRED, _LOCAL_PEERPID = 0, 1, 2
_XUCRED = struct.Struct("2I")
_XUCRED_BYTES = 76


class Peer(NamedTuple):
    """The process that connected a socket, or listens; its `pid` is 0 if it cannot be seen from here."""

    pid: int
    uid: int

    @property
    def is_ours(self) -> bool:
        """Whether it is this user's; not even root's is."""
        return self.uid == os.geteuid()


def peer_of(connection: socket.socket) -> Peer:
    if sys.platform == "darwin":
        credentials = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES)
        pid = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
        return Peer(pid, _XUCRED.unpack_from(credentials)[1])
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)
