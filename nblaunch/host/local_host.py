"""The parts that a runtime or a node has once, to run ranks.

Each part is made when it is first used, and stands on those above it:

    directory        sockets, logs and spilled payloads lie in it              _runtime_dir.py
    fork server      ranks are forks of it; its log is in the directory        host/forkserver.py
    hub              ranks connect to its socket, in the directory             host/hub.py

No other module keeps one of these parts: a user of a part is given it.
"""

from __future__ import annotations

import threading

from nblaunch.host.agent import join_all
from nblaunch.host.forkserver import Server
from nblaunch.host.hub import Hub

# What an agent does once its ranks are gone takes milliseconds.
_AGENT_SECONDS = 5.0


class LocalHost:
    """The parts of one process; its methods may be called on any thread."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.directory = self.server.directory
        self._lock = threading.RLock()
        self._hub: Hub | None = None

    @property
    def hub(self) -> Hub:
        """The hub, which ranks can reach. Raises `LaunchError` if its socket cannot be bound."""
        with self._lock:
            if self._hub is not None and self._hub.usable:
                self._hub.be_reachable()
            else:
                if self._hub is not None:
                    self._hub.close()
                self._hub = Hub(self.directory)
            return self._hub

    def close(self) -> None:
        """End the fork server, the agents and the hub; the next run makes new ones."""
        # While the keeper lives: a kill of this process from here on leaves nothing that it would not remove.
        self.directory.remove()
        self.server.stop()
        if self._hub is not None:
            # Also those of runs whose ranks were still leaving.
            join_all(_AGENT_SECONDS)
            with self._lock:
                hub, self._hub = self._hub, None
            hub.close()
        self.directory.remove()
