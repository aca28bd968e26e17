"""Programs on GPUs: scripts as under torchrun, exported cells, libraries with launchers of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

import nblaunch

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
weights, where = model.module.weight.detach().clone(), str(device)
dist.destroy_process_group()
"""


def needs(library):
    """Skip without a library; not imported here, since Lightning sets variables then."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.fixture
def kernel(gpu_kernel):
    return gpu_kernel


@pytest.mark.quick
def test_a_training_script_for_torchrun_runs_as_it_is(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    found = nblaunch.run(str(path), args=["0.1"], nproc=GPUS, pull=["weights", "losses", "where"])
    assert [each["where"] for each in found] == [f"cuda:{index}" for index in range(GPUS)]
    assert {str(each["weights"].device) for each in found} == {"cpu"}
    assert all(torch.equal(each["weights"], found[0]["weights"]) for each in found)
    assert all(each["losses"][-1] < each["losses"][0] for each in found)
    assert torch.cuda.is_initialized() is False


def test_an_exported_cell_gives_on_gpus_what_it_gave_in_the_notebook(kernel, visible, tmp_path):
    kernel.ok("scale = torch.arange(3.0)")
    cell = """
    import torch
    import torch.distributed as dist
    total = scale.to(device) * (rank + 1)
    dist.all_reduce(total)
    (total.tolist(), str(device), dist.get_backend(dist.group.WORLD))
    """
    path = tmp_path / "exported.py"
    kernel.ok(f"%%distributed -n {GPUS} --export {path} --out res\n{cell}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GPUS)]
    done = subprocess.run(
        [*torchrun, path.name],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank, value in enumerate(kernel.value("res.values")):
        shown = json.dumps(value).replace("[[", "([").replace('"', "'").rstrip("]") + ")"
        assert f"[rank {rank}] {shown}" in done.stdout


def test_accelerate_takes_the_gpu_of_each_rank():
    needs("accelerate")

    def train():
        import torch
        from accelerate import Accelerator
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)
        model = nn.Linear(1, 1)
        x = torch.arange(16.0)[:, None] / 16
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = accelerator.prepare(
            model, optimizer, DataLoader(TensorDataset(x, 3 * x), batch_size=2)
        )
        for given, wanted in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(given), wanted))
            optimizer.step()
        return str(accelerator.device), accelerator.unwrap_model(model).weight.detach()

    found = nblaunch.run(train, nproc=GPUS)
    assert [device for device, _ in found] == [f"cuda:{index}" for index in range(GPUS)]
    assert all(torch.equal(weight, found[0][1]) for _, weight in found)


def test_lightning_fabric_takes_the_gpu_of_each_rank():
    needs("lightning")

    def train():
        import torch
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cuda", devices=torch.cuda.device_count(), strategy="ddp")
        fabric.launch()
        torch.manual_seed(fabric.global_rank)
        line = torch.nn.Linear(2, 1)
        model, optimizer = fabric.setup(line, torch.optim.SGD(line.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(1, 2, device=fabric.device)).sum())
        optimizer.step()
        return str(fabric.device), line.weight.detach()

    found = nblaunch.run(train, nproc=GPUS)
    assert [device for device, _ in found] == [f"cuda:{index}" for index in range(GPUS)]
    assert all(torch.equal(weight, found[0][1]) for _, weight in found)
