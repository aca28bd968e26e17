"""nblaunch beside other ways to have ranks in a notebook: fresh ranks, ranks that stay, a rank that fails.

    python -m venv peers && peers/bin/pip install . ipyparallel torchrunx nbdistributed accelerate
    peers/bin/python tests/benchmarks/bench_peers.py [--ways nblaunch,accelerate] [--parts fails]

Each way has a kernel of its own, and they take turns, so that a busy machine slows all of them alike. The
figures are seconds from request to idle, medians, for two ranks: an all_reduce on fresh ranks, a cell with
an all_reduce on ranks that stay, and a cell of which rank 1 raises while rank 0 waits for it. What is not
over after `--patience` seconds is given up. Ways that are not installed are left out. nblaunch has the next
cell's ranks ready, as it does unless told not to; `nblaunch-cold` is without (`NBLAUNCH_STANDBY=0`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[2]
MARK = "BENCH_PEERS"
END = 1500
"""Characters at the end of a failed cell, in which a reader looks for the reason."""
MISTAKE = "no data for this rank"
REDUCE = """
import torch, torch.distributed as dist
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
"""
FAIL = f"""
import torch, torch.distributed as dist
if dist.get_rank() == 1:
    raise ValueError({MISTAKE!r})
dist.all_reduce(torch.ones(1))
"""
FUNCTIONS = f"""
def with_group(body):
    import torch.distributed as dist
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    body()
    if own:
        dist.destroy_process_group()

def reduce():
    def body():
        {REDUCE.strip().replace(chr(10), chr(10) + " " * 8)}
        print(f"sum {{total.item()}}", flush=True)
    with_group(body)

def fail():
    def body():
        {FAIL.strip().replace(chr(10), chr(10) + " " * 8)}
    with_group(body)
"""
ENGINES = """
import ipyparallel, socket
def engines():
    global cluster, view
    cluster = ipyparallel.Cluster(n=2)
    view = cluster.start_and_connect_sync()[:]
    view.block = True
    view.activate()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    def join(rank, port):
        import torch.distributed as dist
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    view.map_sync(join, range(2), [port] * 2)
"""
PARTS = ("fresh", "stays", "fails")
PRINT = "print(f'sum {total.item()}')"


@dataclass(frozen=True)
class Way:
    """The cells of one way; an empty one stands for what it does not have."""

    module: str
    setup: str
    fresh: str
    fails: str
    start: str = ""
    stays: str = ""
    environment: dict[str, str] = field(default_factory=dict)


WAYS = {
    "nblaunch": Way(
        "nblaunch",
        "%load_ext nblaunch",
        f"%%distributed -n 2 --fresh{REDUCE}{PRINT}",
        f"%%distributed -n 2 --fresh{FAIL}",
        "%distributed start -n 2",
        f"%%distributed{REDUCE}{PRINT}",
    ),
    "accelerate": Way(
        "accelerate",
        f"from accelerate import notebook_launcher\n{FUNCTIONS}",
        "notebook_launcher(reduce, num_processes=2)",
        "notebook_launcher(fail, num_processes=2)",
    ),
    "torchrun": Way(
        "torch",
        f"from pathlib import Path\n_ = Path('reduce.py').write_text({FUNCTIONS + 'reduce()'!r})\n"
        f"_ = Path('fail.py').write_text({FUNCTIONS + 'fail()'!r})",
        f"!{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 reduce.py",
        f"!{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 fail.py",
    ),
    "ipyparallel": Way(
        "ipyparallel",
        ENGINES,
        f"engines()\nview.execute({REDUCE + PRINT!r}, block=True).display_outputs()\n"
        "cluster.stop_cluster_sync()",
        f"%%px{FAIL}",
        "engines()",
        f"%%px{REDUCE}{PRINT}",
    ),
    "torchrunx": Way(
        "torchrunx",
        f"import torchrunx\n{FUNCTIONS}\n"
        "launcher = torchrunx.Launcher(hostnames=['localhost'], workers_per_host=2, backend='gloo')\n"
        "def value():\n    import torch, torch.distributed as dist\n"
        "    total = torch.ones(1) * (dist.get_rank() + 1)\n"
        "    dist.all_reduce(total)\n    return total.item()",
        "print('sum', launcher.run(value).rank(0))",
        "launcher.run(fail)",
    ),
    "nbdistributed": Way(
        "nbdistributed",
        "%load_ext nbdistributed",
        "",
        f"%%distributed{FAIL}",
        # A cell has 30 s: the ranks have imported torch before the first one.
        "%dist_init -n 2\nimport time\ntime.sleep(45)",
        f"%%distributed{REDUCE}{PRINT}",
    ),
}
WAYS["nblaunch-cold"] = replace(WAYS["nblaunch"], start="", stays="", environment={"NBLAUNCH_STANDBY": "0"})
"""By name. What nbdistributed leaves behind, and what it ends by name, stays in a PID namespace (root)."""


class Kernel:
    """A real kernel, in a session and a directory of its own."""

    def __init__(self, directory: str, name: str) -> None:
        """Start it."""
        self._name = name
        self._mark = uuid.uuid4().hex
        place = Path(directory) / name
        place.mkdir()
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        if name == "nbdistributed":
            command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
        self._manager = KernelManager(ip="127.0.0.1")
        self._manager._kernel_spec = KernelSpec(argv=command, display_name=name, language="python")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            MARK: self._mark,
            "TMPDIR": directory,  # others leave files there
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **WAYS[name].environment,
        }
        quiet = subprocess.DEVNULL
        self._manager.start_kernel(env=environment, cwd=str(place), stdout=quiet, stderr=quiet)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def run(self, code: str, patience: float) -> tuple[float | None, str]:
        """Return the seconds of a cell, or None where it is given up, and all that it shows."""
        began = time.perf_counter()
        request, shown = self._client.execute(code), ""
        while (left := began + patience - time.perf_counter()) > 0:
            try:
                message = self._client.get_iopub_msg(timeout=left)
            except queue.Empty:
                break
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            shown += content.get("text", "") + content.get("data", {}).get("text/plain", "")
            shown += "\n".join(content.get("traceback", ()))
            if content.get("execution_state") == "idle":
                return time.perf_counter() - began, shown
        return None, shown

    def must(self, code: str, shows: str = "", patience: float = 120) -> float:
        """Run a cell that has to succeed, and return its seconds."""
        seconds, shown = self.run(code, patience)
        if seconds is None or shows not in shown:
            message = f"{code[-200:]}\nshowed, after {seconds} s:\n{shown[-3000:]}"
            raise RuntimeError(message)
        if shows:
            print(f"{self._name}: {seconds:.3f} s", file=sys.stderr, flush=True)
        return seconds

    def close(self) -> None:
        """End the kernel, and all that it has started: who else leaves something, leaves it for ever."""
        self._client.stop_channels()
        trackers = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) != self._mark:
                    continue
                if "resource_tracker" in " ".join(process.cmdline()):
                    trackers.append(process)
                else:
                    process.kill()
        # Those of multiprocessing's remove the semaphores of who was killed, and end.
        for process in psutil.wait_procs(trackers, 10)[1]:
            process.kill()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


def measure(
    names: list[str], parts: list[str], repeats: int, patience: float
) -> dict[str, dict[str, float | None]]:
    """Return the seconds of each way: None where a cell was given up, nothing where there is no such cell."""
    figures: dict[str, dict[str, float | None]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as started:
        kernels = {name: Kernel(directory, name) for name in names}
        for name, kernel in kernels.items():
            started.callback(kernel.close)
            kernel.must(WAYS[name].setup)
        for part in (each for each in PARTS[:2] if each in parts):
            having = [name for name in names if getattr(WAYS[name], part)]
            for name in having:
                if part == "stays":
                    kernels[name].must(WAYS[name].start)
                kernels[name].must(getattr(WAYS[name], part), "sum 3.0")
            count = repeats if part == "fresh" else 4 * repeats
            rounds = [
                {name: kernels[name].must(getattr(WAYS[name], part), "sum 3.0") for name in having}
                for _ in range(count)
            ]
            for name in having:
                figures[name][part] = statistics.median(each[name] for each in rounds)
        for name in names if "fails" in parts else ():
            seconds, shown = kernels[name].run(WAYS[name].fails, patience)
            print(f"{name}: {seconds} s\n{shown[-1500:]}", file=sys.stderr, flush=True)
            figures[name]["fails"] = seconds
            figures[name]["named"] = float(MISTAKE in shown[-END:])
    return figures


def main() -> None:
    """Print a table of the ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=60)
    options = parser.parse_args()
    names = [each for each in options.ways.split(",") if importlib.util.find_spec(WAYS[each].module)]
    found = measure(names, options.parts.split(","), options.repeats, options.patience)
    print(f"two ranks, {os.cpu_count()} cores, medians of {options.repeats}: seconds")
    print(
        f"  {'':16s}{'fresh ranks':>12s}{'ranks that stay':>17s}{'a rank fails':>14s}  ends with the reason"
    )
    for name in names:
        cells = [found[name].get(part, "-") for part in PARTS]
        texts = [f"> {options.patience:.0f}" if each is None else each for each in cells]
        shown = [each if isinstance(each, str) else f"{each:.3f}" for each in texts]
        named = "yes" if found[name].get("named") else "no"
        print(f"  {name:16s}{shown[0]:>12s}{shown[1]:>17s}{shown[2]:>14s}  {named}")


if __name__ == "__main__":
    main()
