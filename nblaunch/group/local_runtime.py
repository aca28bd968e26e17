"""The groups of a runtime, the resources that belong to them, and the standby group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from nblaunch.group.group import WorkerGroup
from nblaunch.group.standby import Standby
from nblaunch.host.forkserver import Server
from nblaunch.host.local_host import LocalHost

_END_SECONDS = 30.0


class UsedByGroups(Protocol):
    """A resource of groups, closed after them."""

    def close(self) -> None:
        """End it, and wait for the end; a second call does nothing."""


class LocalRuntime(LocalHost):
    """The host that a runtime is, and its groups; its methods may be called on any thread."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._standby: Standby | None = None
        self._groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        self._leaving: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        self._held: weakref.WeakSet[UsedByGroups] = weakref.WeakSet()

    @property
    def standby(self) -> Standby:
        with self._lock:
            self._standby = self._standby or Standby()
            return self._standby

    def keep(self, group: WorkerGroup) -> None:
        """Remember a group, to end it if it is open when the process ends."""
        with self._lock:
            self._groups.add(group)

    def will_leave(self, group: WorkerGroup) -> None:
        """Remember a group whose ranks leave after one run."""
        with self._lock:
            self._leaving.add(group)

    def hold(self, used: UsedByGroups) -> None:
        """Keep a resource of groups, to close it after them when the process ends."""
        with self._lock:
            self._held.add(used)

    def wait_until_left(self, wanted: Callable[[WorkerGroup], bool]) -> None:
        """Wait until the ranks of earlier runs have exited, in the groups that are `wanted`."""
        for group in self._open(self._leaving):
            if wanted(group):
                group.closed.wait(_END_SECONDS)

    def _open(self, groups: weakref.WeakSet[WorkerGroup]) -> list[WorkerGroup]:
        with self._lock:
            return [group for group in groups if not group.closed.is_set()]

    def close(self) -> None:
        """End the standby group, all groups, the fork server and the hub; the next run makes new ones."""
        with self._lock:
            standby = self._standby
        if standby is not None:
            standby.close()
        groups = []
        for group in self._open(self._groups):
            # Fresh ranks that have done their job exit, at the latest with the fork server.
            fresh = not (group.settings.nodes or group.keep)
            if not (fresh and group.job is not None and group.job.ended.is_set()):
                groups.append(group)
        for group in groups:
            # Before the fork server: an agent whose ranks are lost would start others.
            group.stop()
        for group in groups:
            group.closed.wait(_END_SECONDS)
        self._close_held()
        super().close()

    def _close_held(self) -> None:
        with self._lock:
            threads = [threading.Thread(target=each.close) for each in self._held]
        for each in threads:
            each.start()
        for each in threads:
            each.join(_END_SECONDS)
