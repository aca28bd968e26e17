"""What places nodes, for real and private: sshd, Slurm and etcd from the system's packages, and Ray.

Each is a context manager that starts its daemons on free ports of one or more hosts, below a directory of its
own, and ends them by their own numbers. `HERE` are two hosts on the loopback address; a test that has network
namespaces gives those.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from lanes import left_out
from patience import eventually

_START_SECONDS = 20.0
_SBIN = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class Host:
    """A host on which daemons run: `enter` is the command before theirs."""

    name: str
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()

    def command(self, *words: str | Path) -> list[str]:
        """Return a command that runs there, under the host's name if we may give one."""
        named = (
            ("unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"', self.name) if os.geteuid() == 0 else ()
        )
        return [*self.enter, *named, *map(str, words)]


HERE = (Host("alpha"), Host("beta"))
RAY_HERE = (Host("alpha", "127.0.0.2"), Host("beta", "127.0.0.3"))
"""With addresses of their own: Ray takes 127.0.0.1 for no address of a node."""


def program(name: str, package: str) -> str:
    """Return the path of a program; leave the test out where it is missing."""
    return shutil.which(name, path=_SBIN) or left_out(f"{name} is missing: apt-get install {package}")


def plain_python() -> str:
    """Return the system's own Python, on which nothing of ours is installed."""
    found = [path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists()]
    return found[0] if found else left_out("no Python of the system's is here")


def own_uv() -> str:
    """Return the path of uv: that of these tests' environment, else one on the PATH."""
    beside = Path(sysconfig.get_path("scripts"), "uv")
    return str(beside) if beside.exists() else program("uv", "uv, or pip install uv")


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return ports that are free now, all different."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind((address, 0))
        return [each.getsockname()[1] for each in taken]


@contextlib.contextmanager
def daemons(directory: Path) -> Iterator[Daemons]:
    """Give what starts daemons, whose output is in `directory`; all are ended."""
    started = Daemons(directory)
    try:
        yield started
    finally:
        started.end()


class Daemons:
    """Daemons in the foreground, as children of this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Sequence[str | Path], environ: Mapping[str, str] | None = None
    ) -> None:
        """Start one."""
        with (self.directory / f"{name}.out").open("wb") as printed:
            self._running[name] = subprocess.Popen(
                [*map(str, command)],
                env={**os.environ, **(environ or {})},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill one, as a host that is lost loses it."""
        self._running[name].kill()
        self._running[name].wait()

    def words(self) -> str:
        """Return what they have printed, for a test that waits in vain."""
        return "\n".join(
            f"{name} ({each.poll()}): {(self.directory / f'{name}.out').read_text()[-1500:]}"
            for name, each in self._running.items()
        )

    def await_that(self, condition: Callable[[], object], what: str, seconds: float = _START_SECONDS) -> None:
        """Wait until a condition holds; say what the daemons have printed where it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.words()}"
            time.sleep(0.02)

    def end(self) -> None:
        """End them, the last one first."""
        for each in reversed(self._running.values()):
            each.terminate()
            try:
                each.wait(5)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def listens(address: str, port: int) -> bool:
    """Return whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


# --- ssh -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SshHosts:
    """Hosts that `command` reaches by their names."""

    hosts: tuple[Host, ...]
    command: str
    config: Path

    @property
    def environ(self) -> dict[str, str]:
        """What an engine needs to be told of them."""
        return {"NBLAUNCH_SSH": self.command}


@contextlib.contextmanager
def sshd(
    directory: Path, hosts: Sequence[Host] = HERE, temporary: Mapping[str, Path] | None = None
) -> Iterator[SshHosts]:
    """Run an sshd on each host, for this user alone; `temporary` are the hosts' directories for that."""
    server, keygen = program("sshd", "openssh-server"), program("ssh-keygen", "openssh-client")
    program("ssh", "openssh-client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    directory.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", directory / key], check=True)
    shutil.copy(directory / "user.pub", directory / "authorized")
    host_key = (directory / "host.pub").read_text()
    lines, known = [], []
    with daemons(directory) as started:
        for host in hosts:
            (port,) = free_ports(1)
            (directory / f"sshd-{host.name}.conf").write_text(
                f"Port {port}\nListenAddress {host.address}\nHostKey {directory}/host\n"
                f"AuthorizedKeysFile {directory}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
                "PasswordAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n"
                + (f"SetEnv TMPDIR={temporary[host.name]}\n" if temporary else "")
            )
            conf = directory / f"sshd-{host.name}.conf"
            started.start(f"sshd-{host.name}", host.command(server, "-D", "-e", "-f", conf))
            lines.append(f"Host {host.name}\n HostName {host.address}\n Port {port}\n")
            known.append(f"[{host.address}]:{port} {host_key}")
            started.await_that(partial(listens, host.address, port), "sshd listens")
        (directory / "known").write_text("".join(known))
        config = directory / "config"
        config.write_text(
            "".join(lines) + f"Host *\n IdentityFile {directory}/user\n IdentitiesOnly yes\n"
            f" UserKnownHostsFile {directory}/known\n StrictHostKeyChecking yes\n"
        )
        yield SshHosts(tuple(hosts), f"ssh -F {config}", config)


# --- Slurm -----------------------------------------------------------------------------------------

_SLURM_CONF = """\
ClusterName=tests
SlurmctldHost={controller}({address})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldTimeout=30
SlurmdTimeout=20
InactiveLimit=0
KillWait=3
WaitTime=2
MinJobAge=60
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,bf_resolution=1,bf_continue
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A controller here, and a slurmd on each host."""

    hosts: tuple[Host, ...]
    conf: Path
    daemons: Daemons

    @property
    def environ(self) -> dict[str, str]:
        """What Slurm's programs need to find it."""
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *command: str, check: bool = True) -> str:
        """Run one of Slurm's programs; return what it prints."""
        environ = {**os.environ, **self.environ}
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=20)
        assert not check or ran.returncode == 0, (command, ran.stdout, ran.stderr)
        return ran.stdout + (ran.stderr if not check else "")

    def jobs(self, by: str = "%i") -> list[str]:
        """Return the jobs that wait or run, each with its state; `by` is squeue's word for the number."""
        return self.run("squeue", "-h", "-o", f"{by} %T").splitlines()

    def hold(self, *words: str) -> str:
        """Take an allocation with salloc; return its number."""
        printed = self.run("salloc", "--no-shell", *words, check=False)
        return printed.partition("Granted job allocation ")[2].split()[0]

    def all_idle(self) -> bool:
        """Return whether every host waits for work."""
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == str(len(self.hosts))


@contextlib.contextmanager
def slurm(
    directory: Path, hosts: Sequence[Host] = HERE, *, controller: str = "127.0.0.1", cpus: int = 4
) -> Iterator[SlurmCluster]:
    """Run Slurm on these hosts; the controller, at its address, is this machine."""
    munged, slurmctld = program("munged", "munge"), program("slurmctld", "slurmctld")
    slurmd, _ = program("slurmd", "slurmd"), program("srun", "slurm-client")
    if os.geteuid() != 0:
        left_out("slurmd runs as root")
    directory.mkdir(mode=0o755)
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    port, *ports = free_ports(1 + len(hosts))
    conf = directory / "slurm.conf"
    nodes = [
        f"NodeName={host.name} NodeHostname={host.name} NodeAddr={host.address} Port={its_port} CPUs={cpus} "
        "RealMemory=4000 State=UNKNOWN\n"
        for host, its_port in zip(hosts, ports, strict=True)
    ]
    names = ",".join(host.name for host in hosts)
    conf.write_text(
        _SLURM_CONF.format(
            controller=socket.gethostname(), address=controller, port=port, directory=directory
        )
        + "".join(nodes)
        + f"PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP\n"
    )
    environ = {"SLURM_CONF": str(conf)}
    with daemons(directory) as started:
        files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "m.log", "seed-file": "seed"}
        paths = [f"--{option}={directory / name}" for option, name in files.items()]
        started.start("munged", [munged, "--foreground", "--force", f"--key-file={key}", *paths])
        started.await_that((directory / "munge.socket").exists, "munged listens")
        started.start("slurmctld", [slurmctld, "-D", "-i"], environ)
        for host in hosts:
            (directory / f"spool-{host.name}").mkdir()
            started.start(f"slurmd-{host.name}", host.command(slurmd, "-D", "-N", host.name), environ)
        cluster = SlurmCluster(tuple(hosts), conf, started)
        started.await_that(cluster.all_idle, "all hosts are idle")
        try:
            yield cluster
        finally:
            cluster.run("scancel", "-Q", "-u", "root", check=False)
            eventually(lambda: not cluster.jobs(), "no job is left")


# --- etcd ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def etcd(directory: Path, address: str = "127.0.0.1") -> Iterator[str]:
    """Run an etcd with the API that torch speaks; give its endpoint, HOST:PORT."""
    server = program("etcd", "etcd-server")
    clients, peers = free_ports(2, address)
    url, peer_url = f"http://{address}:{clients}", f"http://{address}:{peers}"
    urls = {
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"default={peer_url}",
    }
    directory.mkdir(mode=0o700)
    with daemons(directory) as started:
        words = [f"--{name}={value}" for name, value in urls.items()]
        started.start("etcd", [server, "--enable-v2=true", f"--data-dir={directory / 'data'}", *words])
        started.await_that(lambda: listens(address, clients), "etcd listens")
        yield f"{address}:{clients}"


# --- Ray -------------------------------------------------------------------------------------------

_RAY_MEMORY = 80_000_000
# In each of them jsonschema loads a module of this name, and compiles a grammar for a second, for nothing.
# And what serves ray:// looks for processes of its own that have ended every 30 s.
_IN_RAYS_PROCESSES = """
import sys, threading, time
NAME = "CHECK_PROCESS_INTERVAL_S"
def look_often():
    while not hasattr(proxier := sys.modules.get("ray.util.client.server.proxier"), NAME):
        time.sleep(0.005)
    setattr(proxier, NAME, 1)
if "--mode=proxy" in sys.orig_argv:
    threading.Thread(target=look_often, daemon=True).start()
raise ImportError
"""
_OTHER_DRIVER = """
import json, sys, ray
from ray._private import state
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.placement_group import remove_placement_group
def there():
    return {each["name"]: key for key, each in placement_group_table().items() if each["state"] != "REMOVED"}
def groups():
    return [*there()]
def actors():
    return sum(each["State"] != "DEAD" for each in state.actors().values())
def nodes():
    return sum(each["Alive"] for each in ray.nodes())
def hold(cpus):
    ray.get(placement_group([{"CPU": cpus}] * 2, "STRICT_SPREAD", name="others").ready())
def remove(name):
    remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(there()[name])))
ray.init(sys.argv[1], log_to_driver=False)
print("null", flush=True)
for line in sys.stdin:
    name, *words = json.loads(line)
    print(json.dumps(globals()[name](*words)), flush=True)
"""


class OtherDriver:
    """Somebody else's driver: what it sees of the cluster, and a placement group that it takes."""

    def __init__(self, address: str, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OTHER_DRIVER, address],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def begin(self) -> None:
        """Wait until it is connected."""
        self._answer()

    def __call__(self, *words: str | int) -> Any:
        """Call one of its functions."""
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """End it, and give back what it has."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        assert line, f"the other driver has ended: {self._process.communicate()[1]}"
        return json.loads(line)


@dataclass(frozen=True)
class RayCluster:
    """A head on the first host, and a raylet on each."""

    hosts: tuple[Host, ...]
    address: str
    client: str
    """For drivers that are no node: ray://HOST:PORT."""
    directory: Path
    daemons: Daemons
    other: OtherDriver

    @property
    def environ(self) -> dict[str, str]:
        """What a driver needs to find it, and no other one."""
        return {"RAY_ADDRESS": self.address, **_ray_environ(self.directory)}

    @property
    def groups(self) -> list[str]:
        """The names of the placement groups that wait or are there."""
        return list(self.other("groups"))

    def forget_drivers(self) -> None:
        """End the head's processes for drivers by ray://: each waits for half a minute for another one."""
        _kill_rays(self.directory, "--mode=specific-server")

    @property
    def actors(self) -> int:
        """How many actors live."""
        return int(self.other("actors"))


def _kill_rays(directory: Path, word: str = "") -> None:
    """Kill those processes of a cluster that have a word in their command lines."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if f"RAY_TMPDIR={directory}".encode() not in environ.split(b"\0"):
                continue
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def _ray_environ(directory: Path) -> dict[str, str]:
    return {
        "RAY_TMPDIR": str(directory),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(directory / "token"),
    }


@contextlib.contextmanager
def ray(hosts: Sequence[Host] = RAY_HERE, *, cpus: int = 2, **environ: str) -> Iterator[RayCluster]:
    """Run a Ray cluster. `environ` are variables of its processes."""
    program = Path(sys.executable).with_name("ray")
    if not program.exists():
        left_out("ray is missing: pip install 'nblaunch[ray]'")
    # Paths of its sockets are long, and those of pytest as well.
    with tempfile.TemporaryDirectory(prefix="nbr", dir="/tmp") as short, daemons(Path(short)) as started:
        port, client = free_ports(2, hosts[0].address)
        address = f"{hosts[0].address}:{port}"
        Path(short, "rfc3987_syntax.py").write_text(_IN_RAYS_PROCESSES)
        path = os.pathsep.join([short, *filter(None, [os.environ.get("PYTHONPATH")])])
        Path(short, "token").touch(mode=0o600)
        Path(short, "token").write_text(os.urandom(32).hex())
        quiet = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": "",
            "PYTHONPATH": path,
            **_ray_environ(Path(short)),
            # Workers are started when they are needed: these are many.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            **environ,
        }
        for number, host in enumerate(hosts):
            of_head = (
                "--head",
                f"--port={port}",
                f"--ray-client-server-port={client}",
                f"--temp-dir={short}/s",
                "--include-dashboard=false",
                "--no-monitor",
            )
            of_all = (
                *("--block", f"--node-ip-address={host.address}", f"--num-cpus={cpus}", "--num-gpus=0"),
                *(f"--object-store-memory={_RAY_MEMORY}", "--disable-usage-stats"),
                *("--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=false"),
            )
            words = of_all if number else (*of_head, *of_all)
            started.start(
                f"ray-{host.name}",
                host.command(program, "start", *words, *([f"--address={address}"] if number else [])),
                quiet,
            )
            if not number:
                started.await_that(partial(listens, host.address, port), "the head listens")
        printed = [Path(short, f"ray-{host.name}.out") for host in hosts]
        started.await_that(lambda: all("started" in each.read_text() for each in printed), "Ray runs", 60)
        other = OtherDriver(address, quiet)
        try:
            other.begin()
            started.await_that(lambda: other("nodes") == len(hosts), "all nodes are there")
            url = f"ray://{hosts[0].address}:{client}"
            yield RayCluster(tuple(hosts), address, url, Path(short), started, other)
        finally:
            other.end()
            started.end()
            _kill_rays(Path(short))  # what a raylet that is killed leaves
