"""The panel shows the GPU that a rank is on, also where the driver knows its process by another number."""

from __future__ import annotations

import os

import pytest
import torch
from msgspec.structs import replace

import nblaunch
from nblaunch.client.preparation import prepare_of
from nblaunch.host.usage import GpuMeter, SeenGpus

GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(GPUS))
TURNED = ",".join(reversed(VISIBLE.split(",")))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices are here, and this needs two"),
]

HOLD = """
import torch
from msgspec.structs import replace
held = torch.empty((1 + rank) << 29, dtype=torch.uint8, device=device)
torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
"""


@pytest.mark.parametrize("virtual", [False, True])
def test_the_gpu_is_measured_that_a_ranks_environment_gives_it(virtual):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    environ = {"CUDA_VISIBLE_DEVICES": TURNED}
    with nblaunch.Session(nproc=2, env=environ, virtual_local_rank=virtual) as session:
        used = session.cell(HOLD, namespace={}).values
        ranks = session.status().ranks
        live = session._live
        prepare = replace(prepare_of(live.options), device_type="cuda", accelerators=2)
        gpus = GpuMeter(SeenGpus.by(prepare, alone=virtual))
        gpus._by_pid = {}  # what a driver says that knows none of these processes
        found = [gpus.usage(each.pid or 0, each.device, each.rank).memory or 0 for each in ranks]
        gpus.close()
    assert [each.device for each in ranks] == (["cuda:0"] * 2 if virtual else ["cuda:0", "cuda:1"])
    assert found == pytest.approx(used, rel=0.2)
    assert found[1] > found[0]
