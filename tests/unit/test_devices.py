"""How many ranks a run gets, on which devices and with which backend; no GPU is needed to decide it."""

from __future__ import annotations

import ctypes
import os
import types

import pytest
import torch

from nblaunch import OptionError, _devices
from nblaunch.host import placement as counting
from nblaunch.host import placement as devices
from nblaunch.host.placement import place_ranks, visible_gpus


@pytest.fixture
def gpus(monkeypatch):
    """Give `gpus(number)`: from then on so many are visible."""

    def set_number(number):
        monkeypatch.setattr(devices, "visible_gpus", lambda _environ, **_: number)

    return set_number


def chosen(nproc, backend="auto"):
    placement = place_ranks(nproc, backend, {})
    return placement.nproc, placement.backend, placement.device_type, placement.accelerators


BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("visible", "nproc", "backend", "placed"),
    [
        (0, "auto", "auto", (2, "gloo", "cpu", 0)),
        (1, "auto", "auto", (1, BOTH, "cuda", 1)),
        (8, "auto", "auto", (8, BOTH, "cuda", 8)),
        (3, "gpu", "auto", (3, BOTH, "cuda", 3)),
        # A number is taken as it is, and uses GPUs where there are enough.
        (4, 1, "auto", (1, BOTH, "cuda", 4)),
        (4, 4, "auto", (4, BOTH, "cuda", 4)),
        (4, 5, "auto", (5, "gloo", "cpu", 0)),
        # So is a backend.
        (2, 2, "gloo", (2, "gloo", "cpu", 0)),
        (2, 8, "gloo", (8, "gloo", "cpu", 0)),
        (2, 1, "nccl", (1, "nccl", "cuda", 2)),
        (2, 2, "nccl", (2, "nccl", "cuda", 2)),
        (2, 2, BOTH, (2, BOTH, "cuda", 2)),
        # Ranks share GPUs where gloo is named for them.
        (2, 5, "cpu:gloo,cuda:gloo", (5, "cpu:gloo,cuda:gloo", "cuda", 2)),
        (2, 5, "cuda:gloo", (5, "cuda:gloo", "cuda", 2)),
    ],
)
def test_ranks_are_placed_by_their_number_the_gpus_and_the_backend(gpus, visible, nproc, backend, placed):
    gpus(visible)
    assert chosen(nproc, backend) == placed
    note = place_ranks(nproc, backend, {}).note
    assert ("no GPU is visible: 2 ranks on the CPU" in note) == (visible == 0)
    assert note == "" or nproc != "auto" or not visible


def test_cpu_means_a_rank_for_each_cpu_and_no_gpu(gpus):
    gpus(2)
    assert chosen("cpu") == (os.cpu_count(), "gloo", "cpu", 0)
    with pytest.raises(OptionError, match="with backend nccl"):
        place_ranks("cpu", "nccl", {}) if (os.cpu_count() or 1) > 2 else place_ranks(3, "nccl", {})


def test_gpu_without_one_is_refused_and_says_what_to_do(gpus):
    gpus(0)
    with pytest.raises(OptionError, match=r"nproc='gpu' .* no GPU is visible here\. Use nproc=2"):
        place_ranks("gpu", "auto", {})


@pytest.mark.parametrize(
    ("visible", "are"), [(0, "only 0 GPUs are"), (1, "only 1 GPU is"), (2, "only 2 GPUs are")]
)
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_more_nccl_ranks_than_gpus_are_refused_with_the_ways_out(gpus, visible, are, backend):
    gpus(visible)
    with pytest.raises(OptionError) as caught:
        place_ranks(4, backend, {})
    message = str(caught.value)
    assert "4 ranks with backend nccl" in message
    assert are in message
    assert "backend='gloo'" in message
    assert (f"Lower nproc to {visible}" if visible else "Lower nproc,") in message


def test_the_count_follows_what_the_ranks_will_see(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = [
        visible_gpus(environ)
        for environ in (
            {},
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            {"CUDA_VISIBLE_DEVICES": "3"},
            {"CUDA_VISIBLE_DEVICES": ""},
            {"CUDA_VISIBLE_DEVICES": "-1"},
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"},
            {"CUDA_VISIBLE_DEVICES": "0,9,1"},
            {"CUDA_VISIBLE_DEVICES": "1,1"},
        )
    ]
    assert seen == [4, 2, 1, 0, 0, 4, 1, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == 4


def test_of_mig_instances_a_process_has_one_and_virtual_local_ranks_have_one_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}
    assert visible_gpus(environ) == 1
    assert place_ranks("auto", "auto", environ).nproc == 1
    placement = place_ranks("auto", "auto", environ, virtual_local_rank=True)
    assert (placement.nproc, placement.device_type, placement.accelerators) == (2, "cuda", 2)


@pytest.mark.parametrize(
    ("instances", "environ", "seen"),
    [
        ([None, None], {}, 2),
        ([7, None], {}, 1),
        ([7, 7], {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ([0, None, None], {}, 2),
        ([None, 3, None], {"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ([0, 0], {}, 0),
    ],
)
def test_cards_in_mig_mode_count_as_cuda_enumerates_them(monkeypatch, instances, environ, seen):
    """One instance and nothing else where there is one; a card without instances is not there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(instances))
    monkeypatch.setattr(counting, "_mig_instances", lambda: instances)
    assert visible_gpus(environ) == seen


def test_on_rocm_its_own_variables_are_counted(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert visible_gpus({"HIP_VISIBLE_DEVICES": "0,2"}) == 2
    assert visible_gpus({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1,2"}) == 1
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}) == 1


@pytest.mark.parametrize(
    ("environ", "place", "hip", "expected"),
    [
        ({}, 1, False, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, 1, False, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1, False, {"CUDA_VISIBLE_DEVICES": "MIG-b"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, False, {}),
        ({}, 1, True, {"HIP_VISIBLE_DEVICES": "1"}),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, 1, True, {"HIP_VISIBLE_DEVICES": "0"}),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 0, True, {"CUDA_VISIBLE_DEVICES": "2"}),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, 1, True, {"HIP_VISIBLE_DEVICES": "1"}),
    ],
)
def test_a_virtual_local_rank_sees_the_gpu_of_its_place(environ, place, hip, expected):
    assert _devices.some_alone(environ, [place], hip=hip) == expected


@pytest.mark.parametrize(
    ("environ", "count", "expected"),
    [
        ({}, 2, ("GPU-a", "GPU-b")),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 2, ("3", "GPU-b")),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 1, ("GPU-b",)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, 1, ("GPU-b",)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-x,MIG-y"}, 1, ("MIG-x",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, ()),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 2, ()),
        ({}, 0, ()),
    ],
)
def test_the_gpus_of_a_nodes_ranks_are_named_as_on_the_whole_machine(monkeypatch, environ, count, expected):
    monkeypatch.setattr(devices, "_installed_here", lambda: 4)
    monkeypatch.setattr(devices, "_uuids", lambda: ("GPU-a", "GPU-b"))
    assert devices.own_gpus(count, environ) == expected


def test_more_ranks_than_gpus_go_to_the_cpu_with_a_warning(gpus):
    gpus(1)
    placement = place_ranks(2, "auto", {})
    assert placement.device_type == "cpu"
    assert placement.warning == placement.note
    assert "2 ranks were asked for and 1 GPU is visible: all ranks are on the CPU" in placement.warning
    assert place_ranks(1, "auto", {}).warning == place_ranks("cpu", "auto", {}).warning == ""
    for backend in ("gloo", "cpu:gloo,cuda:gloo"):  # that is what was asked for
        assert place_ranks(2, backend, {}).warning == ""
    gpus(0)
    assert place_ranks(2, "auto", {}).warning == ""


@pytest.mark.parametrize("nproc", [2, 5])
def test_ranks_share_gpus_where_nccl_has_been_told_so(gpus, nproc):
    gpus(1)
    for backend in ("auto", "nccl", "cpu:gloo,cuda:nccl"):
        placement = place_ranks(nproc, backend, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
        assert (placement.nproc, placement.device_type, placement.accelerators) == (nproc, "cuda", 1)
        assert placement.note == f"{nproc} ranks share 1 GPU"
        crowded = "5 ranks share 1 GPU. NCCL promises 2 on each, and more may hang: set NCCL_MAX_CTAS"
        assert placement.warning.startswith(crowded) if nproc == 5 else placement.warning == ""
    assert place_ranks(nproc, "auto", {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}).device_type == "cpu"


def test_each_form_of_nccl_takes_one_rank_for_each_gpu(gpus, monkeypatch):
    monkeypatch.setattr(devices, "_TORCHS_BACKENDS", ("gloo", "nccl", "nccl2", "nccl-legacy"))
    gpus(1)
    for name in ("nccl", "nccl2", "nccl-legacy"):
        with pytest.raises(OptionError, match="needs one for each rank"):
            place_ranks(2, f"cpu:gloo,cuda:{name}", {})
        assert place_ranks(2, f"cuda:{name}", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}).accelerators == 1
    gpus(0)
    with pytest.raises(OptionError, match="only 0 GPUs are visible"):
        place_ranks(2, "cpu:gloo,cuda:gloo", {})


@pytest.fixture
def accelerator(monkeypatch):
    """Give `accelerator(kind, number)`: from then on torch has so many devices of another kind."""

    def set_kind(kind, number):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        module = types.SimpleNamespace(device_count=lambda: number)
        monkeypatch.setattr(torch, "get_device_module", lambda _kind: module)

    return set_kind


def test_auto_takes_the_accelerator_that_torch_has_and_its_backend(accelerator):
    accelerator("xpu", 3)
    assert chosen("auto") == (3, "cpu:gloo,xpu:xccl", "xpu", 3)
    assert chosen(2) == (2, "cpu:gloo,xpu:xccl", "xpu", 3)
    assert chosen(2, "xccl") == (2, "xccl", "xpu", 3)
    assert chosen(4)[2:] == ("cpu", 0)
    assert chosen("gpu") == (3, "cpu:gloo,xpu:xccl", "xpu", 3)


def test_an_accelerator_without_a_backend_leaves_ranks_on_the_cpu(accelerator):
    accelerator("mps", 1)
    assert chosen("auto") == (2, "gloo", "cpu", 0)
    assert "torch has no backend for mps: 2 ranks on the CPU" in place_ranks("auto", "auto", {}).note
    with pytest.raises(OptionError, match="no GPU is visible"):
        place_ranks("gpu", "auto", {})


def of_torch_2_13(*, gpu_index, numa_options):
    return {gpu_index, numa_options}


def of_torch_2_15(*, device_index, numa_options):
    return {device_index, numa_options}


@pytest.mark.parametrize("cpus_of", [of_torch_2_13, of_torch_2_15])
def test_torch_is_asked_for_the_cpus_near_a_gpu_by_its_own_names(monkeypatch, cpus_of):
    binding = types.SimpleNamespace(
        _get_logical_cpus_to_bind_to=cpus_of,
        NumaOptions=lambda affinity_mode: affinity_mode,
        AffinityMode=len,
    )
    monkeypatch.setattr(_devices, "_binding", lambda: binding)
    assert _devices.cpus_near(3, "node") == {3, len("node")}


def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(monkeypatch):
    def tell(number):
        number._obj.value = 23007

    loaded = types.SimpleNamespace(ncclGetVersion=tell)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: loaded)  # noqa: ARG005 - as ctypes has them
    assert _devices.nccl_version() == (2, 30, 7)


def test_where_nccl_is_a_part_of_torch_it_is_torch_that_tells_its_version(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert _devices.nccl_version() == (2, 27, 3)
