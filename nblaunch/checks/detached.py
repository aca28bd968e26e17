"""The doctor's checks of what would end a detached session together with this process, or at a logout.

The system ends whole control groups: those of a batch job, a container, a systemd service, and of a login
session where logind is configured to. A process that has a session of its own stays in its control group.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from nblaunch.checks.own_runtime import DoctorRuntime
from nblaunch.checks.report import Finding, warning

_NAME = "detached"
_BATCH = {
    "Slurm": re.compile(r"(?:/slurm|slurmstepd\.scope)(?:/.*)?/job_(\d+)"),
    "PBS": re.compile(r"/pbs_jobs\.service/job(?:id|s)/([^/]+)"),
}
_CONTAINER = re.compile(r"/kubepods|/ecs/|(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_CONTAINER_MARKS = "/.dockerenv", "/run/.containerenv"
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_USER_MANAGER = re.compile(r"/user@\d+\.service")
_LOGIN_SESSION = re.compile(r"/user-\d+\.slice/session-[^/]+\.scope")
_LOGIND = "usr/lib", "usr/local/lib", "run", "etc"
"""Where its configuration is, the least important first."""
_LINGERING = Path("/var/lib/systemd/linger")
_SETTING = re.compile(r"\s*([#;]?)\s*(\w+)\s*=\s*(.*?)\s*")
_TRUE = {"1", "yes", "y", "true", "t", "on"}
_OUTSIDE = "systemd-run --user --scope jupyter lab, after loginctl enable-linger"


def detached_sessions(own: DoctorRuntime) -> Iterator[Finding]:
    """Report what would end a detached session too early on this machine; nothing where nothing would."""
    try:
        cgroup = Path("/proc/self/cgroup").read_text()
    except OSError:
        return
    in_container = _IN_KUBERNETES in os.environ or any(Path(each).exists() for each in _CONTAINER_MARKS)
    user = psutil.Process().username()
    lingers = (_LINGERING / user).exists()
    yield from cgroup_ends(cgroup, in_container=in_container)
    yield from logout_kills(cgroup, logind_settings(*logind_files()), user)
    yield from last_logout(cgroup, str(own.directory.root()), user, lingers=lingers)


# --- the control group ------------------------------------------------------------------------------------


def cgroup_ends(cgroup: str, *, in_container: bool) -> Iterator[Finding]:
    """Report what ends this process's control group, by the text of `/proc/self/cgroup`.

    >>> [found] = cgroup_ends("0::/system.slice/jupyterhub.service", in_container=False)
    >>> found.summary
    'this process is part of jupyterhub.service: when that is stopped, a detached session ends, too'
    >>> list(cgroup_ends("0::/user.slice/user-1000.slice/session-3.scope", in_container=False))
    []
    """
    jobs = [(system, found[1]) for system, job in _BATCH.items() if (found := job.search(cgroup))]
    service = _service(cgroup)
    if jobs:
        system, number = jobs[0]
        yield warning(
            _NAME,
            f"this process is part of {system} job {number}: when that ends, a detached session ends, too",
            "Ask for as much time as the session needs, and save checkpoints.",
        )
    elif in_container or _CONTAINER.search(cgroup):
        yield warning(
            _NAME,
            "this process is in a container: when that is stopped, a detached session ends, too",
            "Restart kernels, not the server; keep the container from being culled; save checkpoints outside "
            "of it.",
        )
    elif service:
        yield warning(
            _NAME,
            f"this process is part of {service}: when that is stopped, a detached session ends, too",
            f"Set KillMode=process in that unit, or start Jupyter outside of a service: {_OUTSIDE}.",
        )


def _service(cgroup: str) -> str:
    """Return the service that this process is part of; the manager of a user's units is none."""
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "name=systemd" or (number == "0" and not controllers):
            units = [each for each in path.split("/") if each.endswith((".service", ".scope"))]
            if units and units[-1].endswith(".service") and not _USER_MANAGER.fullmatch(f"/{units[-1]}"):
                return units[-1]
    return ""


# --- logind -----------------------------------------------------------------------------------------------


def logind_files(root: Path = Path("/")) -> tuple[str, list[str]]:
    """Return the text of logind's configuration file, and those of the files that add to it, in order.

    A file in /etc takes the place of those of the same name in /run and /usr/lib.
    """
    main, added = "", {}
    for each in _LOGIND:
        directory = root / each / "systemd"
        with contextlib.suppress(OSError):
            main = (directory / "logind.conf").read_text(errors="replace")
        for path in directory.glob("logind.conf.d/*.conf"):
            with contextlib.suppress(OSError):
                added[path.name] = path.read_text(errors="replace")
    return main, [added[name] for name in sorted(added)]


def logind_settings(main: str, added: Iterable[str] = ()) -> dict[str, str]:
    r"""Return the settings in logind's configuration; the comments in the first file are the defaults.

    >>> logind_settings("[Login]\n#KillUserProcesses=no\n", ["[Login]\nKillUserProcesses=yes"])
    {'KillUserProcesses': 'yes'}
    """
    defaults: dict[str, str] = {}
    chosen: dict[str, str] = {}
    for text in (main, *added):
        for line in text.splitlines():
            found = _SETTING.fullmatch(line)
            if found is not None and not found[1]:
                chosen[found[2]] = found[3]
            elif found is not None and text is main:
                defaults[found[2]] = found[3]
    return defaults | chosen


def logout_kills(cgroup: str, settings: Mapping[str, str], user: str) -> Iterator[Finding]:
    only, spared = settings.get("KillOnlyUsers", "").split(), settings.get("KillExcludeUsers", "root").split()
    killed = user not in spared and (user in only or not only)
    if killed and settings.get("KillUserProcesses", "").lower() in _TRUE and _LOGIN_SESSION.search(cgroup):
        yield warning(
            "logout",
            "logind has KillUserProcesses=yes: a detached session ends when you log out",
            f"Start Jupyter outside of the login session: {_OUTSIDE}.",
        )


def last_logout(cgroup: str, directory: str, user: str, *, lingers: bool) -> Iterator[Finding]:
    """Report that the end of a user's last login ends a detached session, or removes its `directory`."""
    if lingers:
        return
    if _USER_MANAGER.search(cgroup):
        lost = "a detached session ends, with all units of yours"
    elif directory.startswith("/run/user/"):
        lost = f"what a detached session needs in {Path(*Path(directory).parts[:4])} is removed"
    else:
        return
    yield warning(
        "last logout", f"{user} does not linger: when you log out, {lost}", "loginctl enable-linger"
    )
