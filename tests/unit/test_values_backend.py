"""A backend that torch does not have is an option's mistake, told before anything starts."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
import torch.distributed

import nblaunch
from nblaunch.host import placement


@pytest.mark.parametrize("name", ["gloo", "cpu:gloo", "fake", "cpu:gloo,cuda:gloo"])
def test_torchs_own_are_taken(name):
    placement.check_backend(name, {})


def test_without_torch_its_own_names_are_known(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    placement.check_backend("cpu:gloo,cuda:nccl", {})
    placement.check_backend("mpi", {})
    with pytest.raises(nblaunch.OptionError):
        placement.check_backend("tin", {})


def test_where_a_package_adds_backends_any_name_may_be_one(monkeypatch):
    plugin = importlib.metadata.EntryPoint("tin", "tin:load", "torch.backends")
    found = importlib.metadata.entry_points

    def entry_points(**wanted):
        return [plugin] if wanted == {"group": "torch.backends"} else found(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    placement.check_backend("tin", {})
    with pytest.raises(nblaunch.OptionError):
        placement.check_backend("tin", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


@pytest.mark.parametrize("backend", ["gloo", "auto", "cpu:gloo"])
def test_installed_packages_are_looked_through_only_for_a_name_that_is_not_torchs(monkeypatch, backend):
    """There may be hundreds, on a slow disk, and a run waits for it."""

    def entry_points(**_):
        pytest.fail("looked through all packages")

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    placed = placement.place_ranks(2, backend, {"CUDA_VISIBLE_DEVICES": ""})
    placement.check_backend(placed.backend, {})


@pytest.mark.parametrize("built", [True, False])
def test_forms_of_nccl_that_torch_has_not_loaded_yet_are_known_where_it_has_nccl(monkeypatch, built):
    late, other = (
        importlib.metadata.EntryPoint(name, "torch.distributed:load", "torch.distributed.backends")
        for name in ("nccl-late", "tin-late")
    )
    found = importlib.metadata.entry_points

    def entry_points(**wanted):
        return [late, other] if wanted == {"group": late.group} else found(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: built)
    assert ("nccl-late" in placement.known_backends()) is built
    assert "tin-late" in placement.known_backends()


@pytest.mark.parametrize("name", ["ncclx", "mpich", "ucc_plus"])
def test_a_registered_backend_is_known_whatever_its_name_begins_with(monkeypatch, name):
    for theirs in ("nccl", "mpi", "ucc"):
        monkeypatch.setattr(torch.distributed, f"is_{theirs}_available", lambda: False)
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo", name])
    placement.check_backend(name, {})
