"""Ranks take CUDA_VISIBLE_DEVICES as it is when they start: set late, reordered, by UUID, empty."""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
SHOW = (
    "import os; (str(device), str(torch.cuda.get_device_properties(device).uuid), torch.cuda.device_count())"
)


@pytest.fixture
def kernel(gpu_kernel):
    return gpu_kernel


@pytest.fixture(autouse=True)
def sees_all_again(kernel, visible):
    """Undo what a test has chosen; whatever its ranks did, the kernel has not initialised CUDA."""
    yield
    assert kernel.value("torch.cuda.is_initialized()") is False
    kernel.ok(f"os.environ['CUDA_VISIBLE_DEVICES'] = {visible!r}")


@pytest.fixture(scope="module")
def uuids(shared_gpu_kernel):
    """Give the UUIDs of the GPUs, in the order in which the kernel sees them."""
    shared_gpu_kernel.ok(f"%%distributed --out res\nimport torch\n{SHOW}")
    return [value[1] for value in shared_gpu_kernel.value("res.values")]


def shown(kernel, option=""):
    """Return device, UUID and number of GPUs that each rank sees."""
    kernel.ok(f"%%distributed {option} --out res\n{SHOW}")
    return kernel.value("res.values")


def seen_as(uuids):
    """Return what ranks show that have these GPUs, one each."""
    return [[f"cuda:{index}", uuid, len(uuids)] for index, uuid in enumerate(uuids)]


def choose(kernel, chosen, *, late):
    """Choose GPUs in the notebook, long after `%load_ext nblaunch`, or by the options that this returns."""
    if not late:
        return f"--env CUDA_VISIBLE_DEVICES={chosen}"
    kernel.ok(f"os.environ['CUDA_VISIBLE_DEVICES'] = {json.dumps(chosen)}")
    return ""


WAYS = pytest.mark.parametrize("late", [True, False], ids=["late", "env"])


@pytest.mark.quick
@pytest.mark.gpu(2)
@WAYS
def test_one_gpu_that_is_chosen_gets_the_one_rank(kernel, visible, uuids, late):
    last = visible.split(",")[-1]
    assert shown(kernel, choose(kernel, last, late=late)) == seen_as(uuids[-1:])


@pytest.mark.gpu(2)
@WAYS
def test_gpus_in_another_order_are_the_ranks_in_that_order(kernel, visible, uuids, late):
    backwards = ",".join(reversed(visible.split(",")))
    assert shown(kernel, choose(kernel, backwards, late=late)) == seen_as(uuids[::-1])


@pytest.mark.gpu(2)
@WAYS
def test_gpus_are_chosen_by_uuid(kernel, uuids, late):
    chosen = ",".join(f"GPU-{uuid}" for uuid in uuids[::-1])
    assert shown(kernel, choose(kernel, chosen, late=late)) == seen_as(uuids[::-1])


@WAYS
def test_an_empty_choice_leaves_the_ranks_on_the_cpu(kernel, late):
    option = choose(kernel, "", late=late)
    kernel.ok(f"%%distributed -n 2 {option} --out res\n(str(device), torch.cuda.device_count())")
    assert kernel.value("res.values") == [["cpu", 0]] * 2
    assert kernel.value("res.backend") == "gloo"


def test_a_choice_for_one_run_is_not_one_for_the_next(kernel, visible, uuids):
    first = visible.split(",")[0]
    assert shown(kernel, f"--env CUDA_VISIBLE_DEVICES={first}") == seen_as(uuids[:1])
    assert shown(kernel) == seen_as(uuids)


@pytest.mark.gpu(2)
def test_a_session_takes_the_choice_of_the_moment_in_which_it_starts(kernel, visible, uuids):
    kernel.ok(f"os.environ['CUDA_VISIBLE_DEVICES'] = {visible.split(',')[-1]!r}")
    kernel.ok("%distributed start")
    kernel.ok(f"os.environ['CUDA_VISIBLE_DEVICES'] = {visible!r}")
    assert shown(kernel) == seen_as(uuids[-1:])
    kernel.ok("%distributed stop")


@pytest.mark.gpu(2)
def test_with_a_virtual_local_rank_each_rank_sees_its_own_gpu_only(kernel, uuids):
    body = (
        "import os; (str(device), str(torch.cuda.get_device_properties(0).uuid), torch.cuda.device_count())"
    )
    kernel.ok(f"%%distributed -n 2 --virtual-local-rank --out res\n{body}, os.environ['LOCAL_RANK']")
    assert kernel.value("res.values") == [[["cuda:0", uuid, 1], "0"] for uuid in uuids[:2]]


@pytest.mark.gpu(2)
def test_a_virtual_local_rank_goes_with_gpus_in_another_order_and_with_nccl(kernel, visible, uuids):
    backwards = ",".join(reversed(visible.split(",")[:2]))
    kernel.ok(
        f"""
        %%distributed -n 2 --virtual-local-rank --env CUDA_VISIBLE_DEVICES={backwards} --out res
        import torch.distributed as dist
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        (str(torch.cuda.get_device_properties(0).uuid), total.item())
        """
    )
    assert kernel.value("res.values") == [[uuid, 2.0] for uuid in uuids[1::-1]]
