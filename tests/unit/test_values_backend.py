"""A backend that torch does not have is an option's mistake, told before anything starts."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

import nblaunch
from nblaunch.elastic import placement


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
