"""What a process has once to run ranks; `local()` returns this process's.

Each part is made when it is first used, and stands on those above it:

    directory        sockets, logs and spilled payloads lie in it              elastic/runtime_dir.py
    fork server      ranks are forks of it; its log is in the directory        elastic/forkserver.py
    hub              ranks connect to its socket, in the directory             group/hub.py
    worker groups    their ranks are forked there, and connect to the hub      group/group.py
    standby group    the worker group that is ready before it is needed        group/standby.py

They end in the order that `LocalRuntime.close` has. No other module keeps one of these parts, or registers
anything for the end of the process or for its forks: a user of a part is given it, or asks `local`.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nblaunch.elastic.forkserver import Server
from nblaunch.elastic.runtime_dir import RuntimeDirectory, remove_tree

# The rest is imported on first use: the fork server starts while this process imports torch.
if TYPE_CHECKING:
    from nblaunch._results import EventLog
    from nblaunch.group.group import WorkerGroup
    from nblaunch.group.hub import Hub
    from nblaunch.group.standby import Standby

_END_SECONDS = 30.0
# What an agent does once its ranks are gone takes milliseconds.
_AGENT_SECONDS = 5.0


class LocalRuntime:
    """The runtime of one process; its methods may be called on any thread."""

    def __init__(self, parents: LocalRuntime | None = None) -> None:
        """In a fork, `parents` is the runtime of the parent process."""
        self.directory = RuntimeDirectory()
        self.server = Server(self.directory)
        self.last_events: EventLog | None = None
        """What torchelastic recorded in the user's last run."""
        self._lock = threading.RLock()
        self._hub: Hub | None = None
        self._standby: Standby | None = None
        self._groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        self._leaving: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        self._exiting = threading.Event()
        self._abandoned = False
        # Never collected: that would close the parent's sockets.
        self._parents = parents

    @property
    def hub(self) -> Hub:
        """The hub, which ranks can reach. Raises `LaunchError` if its socket cannot be bound."""
        from nblaunch.group.hub import Hub

        with self._lock:
            if self._hub is not None and self._hub.usable:
                self._hub.be_reachable()
            else:
                if self._hub is not None:
                    self._hub.close()
                self._hub = Hub(self.directory)
            return self._hub

    @property
    def standby(self) -> Standby:
        """What keeps the standby group."""
        from nblaunch.group.standby import Standby

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

    def wait_until_left(self, wanted: Callable[[WorkerGroup], bool]) -> None:
        """Wait until the ranks of earlier runs have exited, in the groups that are `wanted`."""
        for group in self._open(self._leaving):
            if wanted(group):
                group.closed.wait(_END_SECONDS)

    def _open(self, groups: weakref.WeakSet[WorkerGroup]) -> list[WorkerGroup]:
        with self._lock:
            return [group for group in groups if not group.closed.is_set()]

    def remove(self, path: Path) -> None:
        """Remove the files of a run. A fork of the process has a copy of every result: it removes nothing.

        A finalizer may call this on the main thread at any point of the user's own code, where an interrupt
        would be lost (Python ignores what a finalizer raises), or while this thread holds the lock. So the
        hub's thread removes them, if there is one.
        """
        hub = self._hub
        if self._abandoned:
            return
        if hub is not None and hub.usable:
            hub.call(functools.partial(remove_tree, path))
        else:
            remove_tree(path)

    def close(self) -> None:
        """End the standby group, all groups, the fork server and the hub; the next run makes new ones."""
        with self._lock:
            standby = self._standby
        if standby is not None:
            standby.close()
        groups = [group for group in self._open(self._groups) if not _leaves_by_itself(group)]
        for group in groups:
            # Before the fork server: an agent whose ranks are lost would start others.
            group.stop()
        for group in groups:
            group.closed.wait(_END_SECONDS)
        # While the keeper lives: a kill of this process from here on leaves nothing that it would not remove.
        self.directory.remove()
        self.server.stop()
        if self._hub is not None:
            from nblaunch.elastic.agent import join_all

            # Also those of runs whose ranks were still leaving.
            join_all(_AGENT_SECONDS)
            with self._lock:
                hub, self._hub = self._hub, None
            hub.close()
        self.directory.remove()

    def end(self) -> None:
        """Close at the end of the program."""
        self._exiting.set()
        self.close()

    def wait_if_ending(self) -> None:
        """Block a daemon thread whose run was ended by the program's end.

        No thread waits for it, and Python would print what it raises after the program's own last output.
        """
        if self._exiting.is_set() and threading.current_thread() is not threading.main_thread():
            threading.Event().wait()

    def abandon(self) -> None:
        """Leave everything to the parent: this process is a fork, and must neither use nor end it."""
        self._abandoned = True
        self.server.abandon()


def _leaves_by_itself(group: WorkerGroup) -> bool:
    """Whether these fresh ranks have done their job: they exit, at the latest with the fork server."""
    alone = group.settings.rdzv is None and not group.keep
    return alone and group.job is not None and group.job.ended.is_set()


_local = LocalRuntime()


def local() -> LocalRuntime:
    """Return the runtime of this process."""
    return _local


def _begin_in_child() -> None:
    # With locks of its own: a thread of the parent may have held one, and does not exist here to release it.
    global _local
    _local.abandon()
    _local = LocalRuntime(_local)


os.register_at_fork(after_in_child=_begin_in_child)
atexit.register(lambda: local().end())
