"""What a rank's environment says of its GPU holds: nothing has asked CUDA before the rank has it."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
import torch
from older_torch import needs_binding

GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(GPUS))
TURNED = ",".join(reversed(VISIBLE.split(",")))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices are here, and this needs two"),
]

NODE_OF_EVERY_GPU = """
    # The driver's files say on which NUMA node a GPU is. A simulated GPU has none: then it is node 0.
    import importlib.abc, importlib.machinery, sys

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "torch.numa.binding":
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module
            def exec_module(module):
                execute(module)
                ask = module.torch.cuda.get_device_properties
                for kind in ("gpu", "device"):  # torch 2.13, 2.15
                    node = lambda **index: 0 * len(ask(*index.values()).name)
                    setattr(module, f"_get_numa_node_index_for_{kind}_index", node)
            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def shared_kernel(kernels, tmp_path_factory):
    """Start a kernel that sees the GPUs, on a machine that knows on which NUMA node they are."""
    environment = {"CUDA_VISIBLE_DEVICES": VISIBLE, "NBLAUNCH_DISPLAY": "text"}
    if not any(Path("/proc/driver").glob("nvidia/gpus/*")):
        directory = tmp_path_factory.mktemp("site")
        (directory / "sitecustomize.py").write_text(textwrap.dedent(NODE_OF_EVERY_GPU))
        environment["PYTHONPATH"] = os.pathsep.join([str(directory), str(Path(__file__).parents[2])])
    kernel = kernels(**environment)
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(shared_kernel):
    """Give that kernel, without variables."""
    shared_kernel.ok("import os, torch")
    yield shared_kernel
    shared_kernel.forget()


WHERE = """
%%distributed -n 2 {options} --out res
import os, torch.distributed as dist
total = torch.ones(1, device=device)
dist.all_reduce(total)
(str(torch.cuda.get_device_properties(device).uuid), total.item(), len(os.sched_getaffinity(0)))
"""


def gpus_of_ranks(kernel, options: str) -> list[str]:
    """Run two ranks; return the UUID of the GPU of each."""
    kernel.ok(WHERE.format(options=options), timeout=120)
    values = kernel.value("res.values")
    assert [total for _, total, _ in values] == [2.0, 2.0]
    return [uuid for uuid, _, _ in values]


@needs_binding
def test_a_rank_that_is_bound_to_cpus_has_the_gpu_that_its_environment_names(kernel):
    turned = f"--env CUDA_VISIBLE_DEVICES={TURNED}"
    free = gpus_of_ranks(kernel, turned)
    assert free != gpus_of_ranks(kernel, "")
    assert gpus_of_ranks(kernel, f"{turned} --numa-binding node") == free
    assert gpus_of_ranks(kernel, f"{turned} --numa-binding node --virtual-local-rank") == free


@needs_binding
def test_bound_ranks_of_one_node_share_its_cpus_out_where_they_are_to_have_their_own(kernel):
    allowed = len(os.sched_getaffinity(0))
    if allowed < 2:
        pytest.skip("one CPU cannot be shared out")
    two = ",".join(VISIBLE.split(",")[:2])
    gpus_of_ranks(kernel, f"--env CUDA_VISIBLE_DEVICES={two} --numa-binding exclusive")
    assert max(kernel.value("[cpus for _, _, cpus in res.values]")) < allowed


ALLOCATOR = """
%%distributed -n 2 {options} --out res
(torch.cuda.get_allocator_backend(), torch.cuda.device_count())
"""
ASYNC = "backend:cudaMallocAsync"


def test_an_allocator_that_is_chosen_too_late_for_forks_is_that_of_the_ranks(kernel):
    kernel.ok(ALLOCATOR.format(options=f"--env PYTORCH_CUDA_ALLOC_CONF={ASYNC}"), timeout=120)
    assert kernel.value("res.values") == [["cudaMallocAsync", GPUS]] * 2
    kernel.ok(f"os.environ['PYTORCH_CUDA_ALLOC_CONF'] = {ASYNC!r}")
    try:
        kernel.ok(ALLOCATOR.format(options=""), timeout=120)
    finally:
        kernel.ok("del os.environ['PYTORCH_CUDA_ALLOC_CONF']")
    assert kernel.value("res.values") == [["cudaMallocAsync", GPUS]] * 2


def test_other_settings_of_the_allocator_reach_forks(kernel):
    kernel.ok(
        """
        %%distributed -n 1 --env PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 --out res
        import os
        torch.ones(1, device=device)
        (torch.cuda.memory_snapshot() != [], torch.cuda.get_allocator_backend(), os.getppid())
        """
    )
    kernel.ok("%%distributed -n 1 --out plain\nimport os\nos.getppid()")
    assert kernel.value("res[0]") == [True, "native", kernel.value("plain[0]")]


def test_ranks_have_cuda_although_the_profilers_daemon_is_asked_for(start_kernel):
    kernel = start_kernel(CUDA_VISIBLE_DEVICES=VISIBLE, KINETO_USE_DAEMON="1")
    kernel.ok(
        f"""
        %%distributed -n 2 --env CUDA_VISIBLE_DEVICES={TURNED} --out res
        import os, torch
        there = torch.ones(1, device=device).item()
        (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["KINETO_USE_DAEMON"], there)
        """,
        timeout=120,
    )
    assert kernel.value("res.values") == [[TURNED, "1", 1.0]] * 2
