"""The doctor names what would end a detached session together with the server, or at a logout."""

from __future__ import annotations

import pytest

from nblaunch.checks.detached import cgroup_ends, last_logout, logind_files, logind_settings, logout_kills
from nblaunch.checks.doctor import checks as all_checks
from nblaunch.checks.doctor import examine
from nblaunch.checks.report import Level

ID = "9bca8d63d5fa610783847915bcff0ecac1273e5b4bed3f6fa1b07350e0135961"
POD = "kubepods-burstable-pod90d81341_92de_11e7_8cf2_507b9d4141fa.slice"
OF_A_USER = "/user.slice/user-1000.slice"
LOGIN = f"0::{OF_A_USER}/session-3.scope\n"
OWN_SCOPE = f"0::{OF_A_USER}/user@1000.service/app.slice/run-r0c2.scope\n"
OWN_SERVICE = f"0::{OF_A_USER}/user@1000.service/app.slice/jupyter.service\n"

SLURM_1 = """\
11:perf_event:/
10:devices:/slurm/uid_2101171/job_280678/step_interactive/task_0
4:memory:/slurm/uid_2101171/job_280678/step_interactive/task_0
1:name=systemd:/system.slice/slurmd.service
"""
DOCKER_1 = f"""\
12:pids:/docker/{ID}
4:memory:/docker/{ID}
1:name=systemd:/docker/{ID}
0::/system.slice/containerd.service
"""
LOGIN_1 = """\
4:memory:/user.slice
2:cpu,cpuacct:/user.slice
1:name=systemd:/user.slice/user-1000.slice/session-3.scope
0::/user.slice/user-1000.slice/session-3.scope
"""

ENDS = {
    "0::/system.slice/slurmstepd.scope/job_1392969/step_0/user/task_0\n": "Slurm job 1392969",
    "0::/system.slice/gpu01_slurmstepd.scope/job_7/step_batch/user/task_special\n": "Slurm job 7",
    "0::/system.slice/slurmstepd.scope/job_42/step_extern/user\n": "Slurm job 42",
    SLURM_1: "Slurm job 280678",
    "8:memory:/pbs_jobs.service/jobid/2404743.opbs\n": "PBS job 2404743.opbs",
    DOCKER_1: "in a container",
    f"0::/system.slice/docker-{ID}.scope\n": "in a container",
    f"0::/kubepods.slice/kubepods-burstable.slice/{POD}/cri-containerd-{ID}.scope\n": "in a container",
    "11:cpu:/kubepods/besteffort/poddaa5c7ee-3484-4533-af39-3591564fd03e/aff3\n": "in a container",
    f"0::/machine.slice/libpod-{ID}.scope/container\n": "in a container",
    "0::/system.slice/jupyterhub.service\n": "jupyterhub.service",
    "0::/system.slice/jupyter-ann.service\n": "jupyter-ann.service",
    "1:name=systemd:/system.slice/jupyterhub.service\n0::/\n": "jupyterhub.service",
    OWN_SERVICE: "jupyter.service",
}
"""Control groups as recorded, and what a finding calls them."""

ENDS_WITH_NOTHING = [
    LOGIN,
    LOGIN_1,
    OWN_SCOPE,
    "0::/\n",
    "0::/init.scope\n",
    f"0::{OF_A_USER}/user@1000.service/init.scope\n",
    f"0::{OF_A_USER}/user@1000.service/app.slice/vte-spawn-0a1b.scope\n",
    "",
]


@pytest.mark.parametrize("cgroup", ENDS)
def test_a_job_a_container_or_a_service_is_named_with_what_to_do(cgroup):
    (found,) = cgroup_ends(cgroup, in_container=False)
    assert found.level is Level.WARNING
    assert found.summary.startswith(f"this process is {'' if 'container' in ENDS[cgroup] else 'part of '}")
    assert ENDS[cgroup] in found.summary
    assert found.summary.endswith("a detached session ends, too")
    assert found.advice


@pytest.mark.parametrize("cgroup", ENDS_WITH_NOTHING)
def test_nothing_is_said_of_a_control_group_that_goes_on(cgroup):
    assert list(cgroup_ends(cgroup, in_container=False)) == []


def test_the_doctor_of_a_notebook_in_kubernetes_says_so(own, monkeypatch):
    """All of it together: the check is one of the doctor's, and looks at this very process."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (check,) = (each for each in all_checks(own) if each.name == "detached")
    said = [each.summary for each in examine([check]).findings]
    assert any(each.endswith("when that is stopped, a detached session ends, too") for each in said)


def test_a_container_that_sees_no_path_of_its_own_is_known_by_its_marks():
    (found,) = cgroup_ends("0::/\n", in_container=True)
    assert "in a container" in found.summary


# --- logind ---------------------------------------------------------------------------------------------

SHIPPED = """\
#  Entries in this file show the compile time defaults. Local configuration should be created by either
#  modifying this file, or by creating drop-ins in the logind.conf.d/ subdirectory.

[Login]
#NAutoVTs=6
#ReserveVT=6
#KillUserProcesses={kill}
#KillOnlyUsers=
#KillExcludeUsers=root
#RemoveIPC=yes
"""


@pytest.mark.parametrize(
    ("main", "added", "kills"),
    [
        (SHIPPED.format(kill="no"), [], False),
        (SHIPPED.format(kill="yes"), [], True),
        (SHIPPED.format(kill="no"), ["[Login]\nKillUserProcesses=yes\n"], True),
        (SHIPPED.format(kill="no"), ["[Login]\nKillUserProcesses = True\n"], True),
        (SHIPPED.format(kill="yes"), ["[Login]\nKillUserProcesses=no\n"], False),
        ("[Login]\nKillUserProcesses=yes\n", ["[Login]\nKillUserProcesses=0\n"], False),
        ("[Login]\nKillUserProcesses=no\n", ["[Login]\n#KillUserProcesses=yes\n"], False),
        ("[Login]\nKillUserProcesses=1\nKillExcludeUsers=root ann\n", [], False),
        ("[Login]\nKillUserProcesses=1\nKillOnlyUsers=bob\n", [], False),
        ("[Login]\nKillUserProcesses=1\nKillOnlyUsers=ann bob\n", [], True),
        ("", [], False),
    ],
)
@pytest.mark.parametrize("cgroup", [LOGIN, LOGIN_1])
def test_a_login_session_that_logind_ends_with_its_processes_is_named(main, added, kills, cgroup):
    found = list(logout_kills(cgroup, logind_settings(main, added), "ann"))
    assert [each.name for each in found] == ["logout"] * kills
    assert all("KillUserProcesses=yes" in each.summary and "systemd-run" in each.advice for each in found)


@pytest.mark.parametrize("cgroup", [OWN_SCOPE, OWN_SERVICE, *ENDS])
def test_what_is_in_no_login_session_does_not_end_with_one(cgroup):
    assert list(logout_kills(cgroup, {"KillUserProcesses": "yes"}, "ann")) == []


def test_root_is_spared_unless_logind_is_set_to():
    kills = {"KillUserProcesses": "yes"}
    assert list(logout_kills(LOGIN, kills, "root")) == []
    assert len(list(logout_kills(LOGIN, {**kills, "KillExcludeUsers": ""}, "root"))) == 1


def test_logind_is_read_as_it_reads_its_files(tmp_path):
    """Files are sorted by name, whatever directory they are in; /etc hides others of the same name."""
    for path, text in {
        "usr/lib/systemd/logind.conf": "#KillUserProcesses=yes",
        "etc/systemd/logind.conf": "#KillUserProcesses=no",
        "usr/lib/systemd/logind.conf.d/10-a.conf": "hidden",
        "etc/systemd/logind.conf.d/10-a.conf": "first",
        "run/systemd/logind.conf.d/20-b.conf": "second",
        "usr/lib/systemd/logind.conf.d/30-c.conf": "third",
        "etc/systemd/logind.conf.d/40-d.off": "no such name",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert logind_files(tmp_path) == ("#KillUserProcesses=no", ["first", "second", "third"])
    assert logind_files(tmp_path / "elsewhere") == ("", [])


@pytest.mark.parametrize(
    ("cgroup", "directory", "words"),
    [
        (OWN_SCOPE, "/home/ann/nblaunch-x", "a detached session ends, with all units of yours"),
        (OWN_SERVICE, "/home/ann/nblaunch-x", "a detached session ends, with all units of yours"),
        (LOGIN, "/run/user/1000/nblaunch-x", "what a detached session needs in /run/user/1000 is removed"),
        (LOGIN, "/home/ann/nblaunch-x", None),
        ("0::/system.slice/jupyter-ann.service\n", "/home/ann/nblaunch-x", None),
    ],
)
def test_what_the_last_logout_takes_along_is_named_unless_the_user_lingers(cgroup, directory, words):
    assert list(last_logout(cgroup, directory, "ann", lingers=True)) == []
    found = [
        (each.level, each.summary, each.advice)
        for each in last_logout(cgroup, directory, "ann", lingers=False)
    ]
    says = f"ann does not linger: when you log out, {words}"
    assert found == [(Level.WARNING, says, "loginctl enable-linger")] * (words is not None)
