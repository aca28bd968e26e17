"""A runtime's entry in the registry, from its first session on: so other processes of the user find it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import msgspec

from nblaunch import _registry
from nblaunch._errors import NblaunchError, OptionError
from nblaunch._registry import Host, Owner, ProcessIdentity, RuntimeEntry
from nblaunch._version import __version__
from nblaunch.elastic.forkserver import Server
from nblaunch.protocol.client import PROTOCOL, ClientRecord


class Registration:
    """The entry, and the names of detached sessions; its methods may be called on any thread."""

    def __init__(self, root: Path, token: str, server: Server) -> None:
        """Nothing is written before the first session."""
        self._root = root
        self._token = token
        self._server = server
        self._lock = threading.Lock()
        self._entry: RuntimeEntry | None = None
        self._path = Path()
        self._held: int | None = None
        """Holds the lock on the file."""

    def add(self, session: str, owner: ClientRecord, *, detached: bool) -> None:
        """List a session. Raises `OptionError` if it is detached and another runtime has its name."""
        with self._lock:
            entry = self._entry or self._make(owner)
            if detached:
                entry = msgspec.structs.replace(entry, name=session, detached=True)
                _registry.take_name(session, entry)
            try:
                self._write(entry)
            except OptionError:
                if detached:
                    _registry.release_name(session, entry)
                    raise
                return  # its kernel does without
            self._entry = entry
            self._server.named(self._path)

    def _make(self, owner: ClientRecord) -> RuntimeEntry:
        return RuntimeEntry(
            name="",
            socket=str(self._root / "client"),
            root=str(self._root),
            keeper=ProcessIdentity.of(os.getppid()),
            runtime=ProcessIdentity.of(os.getpid()),
            host=Host.here(),
            version=__version__,
            protocol=PROTOCOL,
            token=self._token,
            detached=False,
            started=time.time(),
            owner=Owner(owner.pid, owner.name, owner.notebook),
        )

    def _write(self, entry: RuntimeEntry) -> None:
        before = self._held
        self._path, self._held = _registry.write(entry)
        if before is not None:
            os.close(before)

    def keep(self) -> None:
        """Write the entry again if it has gone: logind removes its directory at the last logout.

        Where that is not possible now (a home that is away, or full) the runtime goes on without.
        """
        with contextlib.suppress(OSError, NblaunchError), self._lock:
            if self._entry is not None and not self._path.exists():
                self._write(self._entry)
                self._server.named(self._path)

    def remove(self) -> None:
        """Remove the entry and the name, as far as that is possible."""
        with contextlib.suppress(OSError, NblaunchError), self._lock:
            entry, self._entry = self._entry, None
            if entry is not None:
                if entry.name:
                    _registry.release_name(entry.name, entry)
                self._path.unlink(missing_ok=True)
