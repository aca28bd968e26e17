"""On GPUs: each rank has its own, the notebook's CUDA state is left alone, whatever it was."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from nblaunch.host.usage import GpuMeter, SeenGpus

GPUS = torch.cuda.device_count()
DEVICES = [f"cuda:{index}" for index in range(GPUS)]

pytestmark = pytest.mark.gpu
not_shared = pytest.mark.skipif(
    os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0", reason="NCCL is told to share GPUs"
)


@pytest.fixture
def kernel(gpu_kernel):
    return gpu_kernel


@pytest.fixture(scope="module")
def module_used_kernel(kernels, visible):
    """Start a kernel that has initialised CUDA; the module's other one has not."""
    with contextlib.closing(kernels(CUDA_VISIBLE_DEVICES=visible)) as started:
        started.ok("import torch; torch.cuda.init()")
        yield started


@pytest.fixture
def used_kernel(module_used_kernel):
    """Give a kernel that has initialised CUDA, and holds memory there."""
    module_used_kernel.ok("import torch; mine = torch.arange(4.0, device='cuda')")
    assert module_used_kernel.value("torch.cuda.is_initialized()") is True
    yield module_used_kernel
    module_used_kernel.forget()


REDUCE = f"""
%%distributed -n {GPUS} --backend nccl --out res
import torch.distributed as dist
total = torch.ones(1, device=device) * (rank + 1)
dist.all_reduce(total)
dist.barrier()
total.item()
"""


def test_nccl_works_and_leaves_the_kernels_cuda_uninitialised(kernel):
    assert kernel.value("torch.cuda.is_initialized()") is False
    kernel.ok(REDUCE, timeout=120)
    assert kernel.value("res.values") == [GPUS * (GPUS + 1) / 2] * GPUS
    assert kernel.value("res.backend") == "nccl"
    assert kernel.value("torch.cuda.is_initialized()") is False


def test_a_script_finds_devices_that_nobody_has_touched(kernel, tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntouched = torch.cuda.is_initialized()")
    kernel.ok(f"%distributed run -n 2 --pull touched {tmp_path}/train.py", timeout=120)
    assert kernel.value("_.values") == [{"touched": False}] * 2


def test_one_rank_with_nccl_is_a_process_of_its_own(kernel):
    kernel.ok(
        """
        %%distributed -n 1 --backend nccl --out res
        import os
        import torch.distributed as dist
        total = torch.full((3,), 2.0, device=device)
        dist.all_reduce(total)
        (total.tolist(), str(total.device), dist.get_world_size(), os.getpid())
        """,
        timeout=120,
    )
    total, device, world_size, pid = kernel.value("res[0]")
    assert (total, device, world_size) == ([2.0] * 3, "cuda:0", 1)
    assert pid != kernel.pid


def test_a_kernel_that_has_initialised_cuda_runs_ranks_as_well(used_kernel):
    for _ in range(2):
        used_kernel.ok(REDUCE, timeout=120)
        assert used_kernel.value("res.values") == [GPUS * (GPUS + 1) / 2] * GPUS
    assert used_kernel.value("(mine + 1).tolist()") == [1.0, 2.0, 3.0, 4.0]
    assert used_kernel.value("str(mine.device)") == "cuda:0"


def test_without_options_there_is_a_rank_for_each_gpu(kernel):
    ran = kernel.ok(
        """
        %%distributed --out res
        (str(device), torch.cuda.current_device(), str(torch.ones(1, device="cuda").device))
        """,
        timeout=120,
    )
    assert kernel.value("res.values") == [[name, index, name] for index, name in enumerate(DEVICES)]
    assert kernel.value("res.devices") == {str(index): name for index, name in enumerate(DEVICES)}
    assert kernel.value("[each.device for each in res.ranks]") == DEVICES
    assert "nccl" in kernel.value("res.backend")
    shown = "".join(each.get("text/html", "") for each in ran.displays)
    assert [name for name in DEVICES if name not in shown] == []


def test_collectives_work_on_tensors_of_the_cpu_too(kernel):
    kernel.ok(
        """
        %%distributed --out res
        import torch.distributed as dist
        on_cpu, on_gpu = torch.ones(1), torch.ones(1, device=device)
        dist.all_reduce(on_cpu)
        dist.all_reduce(on_gpu)
        (on_cpu.item(), on_gpu.item())
        """,
        timeout=120,
    )
    assert kernel.value("res.values") == [[float(GPUS)] * 2] * GPUS


def test_a_captured_cuda_tensor_lands_on_the_ranks_own_gpu(used_kernel):
    used_kernel.ok(
        f"""
        %%distributed -n {GPUS} --out res
        before = mine.tolist()
        mine += rank + 1
        (str(mine.device), before, mine.tolist())
        """,
        timeout=120,
    )
    for rank, (device, before, after) in enumerate(used_kernel.value("res.values")):
        assert device == DEVICES[rank]
        assert before == [0.0, 1.0, 2.0, 3.0]
        assert after == [value + rank + 1 for value in before]
    assert used_kernel.value("mine.tolist()") == [0.0, 1.0, 2.0, 3.0]


def test_a_captured_model_lands_there_whole_and_its_aliases_stay_aliases(used_kernel):
    used_kernel.ok(
        "model = torch.nn.Linear(300, 300).cuda(); views = [model.weight.data, model.weight.data[5]]"
    )
    used_kernel.ok(
        f"""
        %%distributed -n {GPUS} --out res
        views[1].fill_(7)
        same = bool((views[0][5] == 7).all())
        devices = sorted({{str(parameter.device) for parameter in model.parameters()}})
        (same, devices, all(parameter.requires_grad for parameter in model.parameters()))
        """,
        timeout=120,
    )
    assert used_kernel.value("res.values") == [[True, [name], True] for name in DEVICES]


def test_captured_tensors_of_each_kind_land_there_as_they_are(used_kernel):
    used_kernel.ok(
        """
        whole = torch.arange(8.0, device="cuda")
        error = ValueError("it holds", whole[:2])
        given = {
            "none": torch.empty(0, 3, device="cuda"),
            "float8": whole.to(torch.float8_e4m3fn),
            "complex": whole.to(torch.complex64),
            "strided": whole.view(2, 4).t(),
            "leaf": torch.ones(2, device="cuda", requires_grad=True),
            "cpu": torch.ones(1),
        }
        """
    )
    used_kernel.ok(
        f"""
        %%distributed -n {GPUS} --out res
        import torch
        shapes = {{name: (str(each.device), tuple(each.shape), each.dtype, each.stride(), each.requires_grad)
                  for name, each in given.items()}}
        (shapes, given["float8"].float().tolist(), given["strided"][0].tolist(), str(error.args[1].device))
        """
    )
    float8, complex64 = "torch.float8_e4m3fn", "torch.complex64"
    for rank, (shapes, numbers, row, in_error) in enumerate(used_kernel.value("res.values")):
        own = DEVICES[rank]
        assert shapes == {
            "none": [own, [0, 3], "torch.float32", [3, 1], False],
            "float8": [own, [8], float8, [1], False],
            "complex": [own, [8], complex64, [1], False],
            "strided": [own, [4, 2], "torch.float32", [1, 4], False],
            "leaf": [own, [2], "torch.float32", [1], True],
            "cpu": ["cpu", [1], "torch.float32", [1], False],
        }
        assert (numbers, row) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [0.0, 4.0])
        assert in_error == own


def test_push_and_pull_move_tensors_between_the_notebooks_gpu_and_the_ranks(used_kernel):
    used_kernel.ok("%distributed start")
    used_kernel.ok("%distributed push mine")
    used_kernel.ok("%%distributed --out res\nmine += rank\nstr(mine.device)")
    used_kernel.ok("before = mine.tolist()\n%distributed pull mine")
    assert used_kernel.value("res.values") == DEVICES
    assert used_kernel.value("before") == [0.0, 1.0, 2.0, 3.0]
    assert used_kernel.value("[each.tolist() for each in mine]") == [
        [number + float(rank) for number in range(4)] for rank in range(GPUS)
    ]
    assert used_kernel.value("{str(each.device) for each in mine}") == "{'cpu'}"
    used_kernel.ok("%distributed stop")


def test_with_gloo_a_captured_cuda_tensor_lands_on_the_cpu(used_kernel):
    used_kernel.ok(
        """
        %%distributed -n 2 --backend gloo --out res
        (str(device), str(mine.device), mine.tolist(), torch.cuda.is_initialized())
        """
    )
    assert used_kernel.value("res.values") == [["cpu", "cpu", [0.0, 1.0, 2.0, 3.0], False]] * 2


def test_values_on_a_gpu_arrive_on_the_cpu(kernel):
    kernel.ok(
        f"""
        %%distributed -n {GPUS} --out res
        model = torch.nn.Linear(500, 500).to(device)
        whole = torch.arange(5000.0, device=device)
        {{"model": model, "state": model.state_dict(), "tensor": whole, "part": whole[5:7], "rank": rank}}
        """,
        timeout=120,
    )
    kernel.ok(
        """
        devices = {str(each["tensor"].device) for each in res}
        devices |= {str(each.device) for value in res for each in value["model"].parameters()}
        devices |= {str(each.device) for value in res for each in value["state"].values()}
        for value in res:
            value["part"].fill_(-1)
        """
    )
    assert kernel.value("list(devices)") == ["cpu"]
    assert kernel.value("[each['tensor'][4:8].tolist() for each in res]") == [[4.0, -1.0, -1.0, 7.0]] * GPUS
    assert kernel.value("torch.cuda.is_initialized()") is False


@not_shared
def test_more_nccl_ranks_than_gpus_are_refused_with_the_two_ways_out(kernel):
    error = kernel.fails(f"%%distributed -n {GPUS + 1} --backend nccl\nrank")
    assert error.ename == "OptionError"
    assert f"{GPUS + 1} ranks with backend nccl were asked for" in error.evalue
    assert f"Lower nproc to {GPUS}" in error.evalue
    assert "backend='gloo'" in error.evalue
    assert kernel.value("torch.cuda.is_initialized()") is False


def test_both_ways_out_work(kernel):
    kernel.ok(f"%%distributed -n {GPUS + 1} --backend gloo --out res\nstr(device)")
    assert kernel.value("res.values") == ["cpu"] * (GPUS + 1)
    kernel.ok(f"%%distributed -n {GPUS} --backend nccl --out res\nstr(device)", timeout=120)
    assert kernel.value("res.values") == DEVICES


@not_shared
def test_more_ranks_than_gpus_without_a_backend_run_on_the_cpu(kernel):
    kernel.ok(f"%%distributed -n {GPUS + 1} --out res\nstr(device)")
    assert kernel.value("res.values") == ["cpu"] * (GPUS + 1)
    assert kernel.value("res.backend") == "gloo"


def test_gpus_can_be_hidden_from_the_ranks(kernel):
    kernel.ok(
        "%%distributed -n 2 --env CUDA_VISIBLE_DEVICES= --out res\n(str(device), torch.cuda.device_count())"
    )
    assert kernel.value("res.values") == [["cpu", 0]] * 2


def test_ddp_trains_on_gpus_with_equal_parameters_in_the_end(kernel):
    kernel.ok(
        f"""
        %%distributed -n {GPUS} --out res
        from torch.nn.parallel import DistributedDataParallel
        model = DistributedDataParallel(torch.nn.Linear(10, 1).to(device), device_ids=[device.index])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.rand(8, 10, device=device)).sum().backward()
            optimizer.step()
        torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        """,
        timeout=120,
    )
    assert kernel.value("all(torch.equal(each, res[0]) for each in res)") is True


def test_random_numbers_of_a_gpu_differ_between_runs(kernel):
    drawn = []
    for _ in range(2):
        kernel.ok("%%distributed -n 1 --out res\ntorch.rand(4, device=device).tolist()", timeout=120)
        drawn.append(kernel.value("res[0]"))
    assert drawn[0] != drawn[1]


def test_after_a_device_side_assertion_the_next_cell_works(used_kernel):
    error = used_kernel.fails(
        """
        %%distributed -n 1
        values = torch.zeros(2, device=device)
        values[torch.tensor([5], device=device)]
        torch.cuda.synchronize()
        """,
        timeout=120,
    )
    assert error.ename == "RunFailedError"
    assert "device-side assert" in error.traceback
    used_kernel.ok("%%distributed -n 1 --out res\ntorch.ones(2, device=device).sum().item()", timeout=120)
    assert used_kernel.value("res.values") == [2.0]
    assert used_kernel.value("(mine + 1).tolist()") == [1.0, 2.0, 3.0, 4.0]


def test_a_function_on_gpus_from_a_plain_script(script, visible):
    done = script(
        f"""
        import nblaunch
        import torch

        captured = torch.ones(3, device="cuda")

        def job(given):
            import torch.distributed as dist
            device = torch.device("cuda", torch.cuda.current_device())
            total = captured + given
            dist.all_reduce(total)
            return str(captured.device) == str(given.device) == str(device), total

        result = nblaunch.run(job, args=(captured * 2,), nproc={GPUS}, backend="nccl")
        print([(same, str(total.device), total.tolist()) for same, total in result], result.devices)
        """,
        env={"CUDA_VISIBLE_DEVICES": visible},
    )
    assert done.returncode == 0, done.stderr
    expected = [(True, "cpu", [3.0 * GPUS] * 3)] * GPUS
    assert done.stdout == f"{expected} {dict(enumerate(DEVICES))}\n"


def test_a_large_tensor_on_a_gpu_is_shown_by_its_statistics(kernel):
    ran = kernel.ok(
        """
        %%distributed -n 1 --backend nccl --out res
        import torch
        torch.full((64, 64), 2.0, device=device)
        """,
        timeout=120,
    )
    assert "tensor(shape=(64, 64), dtype=float32, device=cuda, min=2, max=2, mean=2)" in ran.text


def test_what_a_process_holds_on_its_gpu_is_measured_without_cuda(used_kernel, visible):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    gpus = GpuMeter(SeenGpus({"CUDA_VISIBLE_DEVICES": visible}))
    used = gpus.usage(used_kernel.pid, "cuda:0")
    gpus.close()
    assert used.memory is not None
    assert used.memory > 0
    assert used.percent is None or 0 <= used.percent <= 100
