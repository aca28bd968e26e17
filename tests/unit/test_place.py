"""Where a run would be is decided by what the caller has sent, not by what this process has."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil
import pytest
from servers import NoServer

import nblaunch
from nblaunch._inherited import JOIN_KEY, decoded, encoded
from nblaunch.group.local_runtime import LocalRuntime
from nblaunch.options.launch import LaunchOptions
from nblaunch.protocol.client import Caller, DismissSession, OpenRanks, Placement
from nblaunch.protocol.messages import Prepare
from nblaunch.runtime.place import PlacedRanks, place
from nblaunch.runtime.requests import RequestHandler
from nblaunch.runtime.worker_groups import FreshRanks

FREE_PORT = "127.0.0.1:0"


@pytest.fixture
def local():
    runtime = LocalRuntime(NoServer())
    yield runtime
    runtime.close()


def asked(environ=None, *, path=(), backends=(), **options):
    environ = dict(os.environ) if environ is None else environ
    prepare = Prepare(environ=encoded(environ), cwd=b"", path=tuple(map(os.fsencode, path)))
    wanted = LaunchOptions(nproc_per_node=2, **options)
    return OpenRanks(session="run", options=wanted, prepare=prepare, backends=backends)


def added(request, local):
    """Return the names of the variables that the ranks get besides."""
    return decoded(place(request, local).prepare.environ).keys() - decoded(request.prepare.environ).keys()


def test_a_place_is_found_before_any_process_starts(local):
    placed = place(request := asked(), local)
    assert (placed.placement.nproc, placed.unheeded) == (2, "")
    assert placed.prepare.environ == request.prepare.environ


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "TORCH_DIST_USE_NCCL2"])
def test_variables_are_compared_with_those_of_the_fork_server(local, monkeypatch, name):
    before = {key: value for key, value in os.environ.items() if key != name}
    monkeypatch.setenv(name, "0")
    assert f"no effect in the ranks: {name}." in place(asked(before), local).unheeded
    assert place(asked({**before, name: "0"}), local).unheeded == ""
    assert place(asked(before, start_method="spawn"), local).unheeded == ""


def test_a_backend_that_only_the_caller_knows_is_one(local):
    with pytest.raises(nblaunch.OptionError, match="backend 'tin'"):
        place(asked(backend="tin"), local)
    assert place(asked(backend="tin", backends=("tin",)), local).placement.backend == "tin"
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(nblaunch.OptionError, match="0 GPUs are visible"):
        place(asked(no_gpu, backend="cuda:tin", backends=("tin",)), local)


def test_entry_points_are_found_where_the_caller_has_them(local, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "callers_specs.py").write_text(
        "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n"
        "class Specs(DefaultLogsSpecs): pass\n"
    )
    installed = tmp_path / "callers-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: callers\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[torchrun.logs_specs]\ncallers = callers_specs:Specs\n")
    with pytest.raises(nblaunch.OptionError, match="callers"):
        place(asked(logs_specs="callers"), local)
    before = [*sys.path]
    for _ in range(2):
        place(asked(logs_specs="callers", path=[sys.path[0], tmp_path, tmp_path]), local)
    assert sys.path == [*before, str(tmp_path)]


def test_what_contradicts_an_engine_is_refused_where_the_callers_environment_is_known(local):
    with pytest.raises(nblaunch.OptionError, match="--here was given, but no engine places nodes"):
        place(asked(here=True), local)
    inside = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(nblaunch.OptionError, match="Slurm's job 17"):
        place(asked(inside, on="slurm", nnodes="3"), local)


def test_a_place_on_nodes_is_provisional_and_needs_nothing_of_this_machine(local):
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    on_nodes = {"on": "process", "nnodes": "2:3"}
    placed = place(asked(no_gpu, **on_nodes), local)
    assert (placed.placement, placed.unheeded) == (Placement(4, "gloo", "cpu", 0), "")
    for backend in ("nccl", "cpu:gloo,cuda:nccl-legacy"):
        placed = place(asked(no_gpu, **on_nodes, backend=backend, numa_binding="node"), local)
        assert placed.placement.backend == backend
    with pytest.raises(nblaunch.OptionError, match="backend 'tin'"):
        place(asked(backend="tin", **on_nodes), local)
    with pytest.raises(nblaunch.OptionError, match="rdzv_conf has join_timeout='soon'"):
        place(asked(rdzv_conf="join_timeout=soon", **on_nodes), local)
    with pytest.raises(nblaunch.OptionError, match="no-such-python"):
        place(asked(node_python="/no-such-python", **on_nodes), local)


def test_the_network_of_the_nodes_is_added_where_the_caller_has_chosen_none(local):
    known = (
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family.name == "AF_INET" and not each.address.startswith("127.")
    )
    address = next(known, None)
    if address is None:
        pytest.skip("this machine has no network")
    of_nodes = {"rdzv_endpoint": FREE_PORT, "local_addr": address}
    assert added(asked(**of_nodes), local) == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    chosen = {**os.environ, "NCCL_SOCKET_IFNAME": "eth7"}
    assert added(asked(chosen, **of_nodes), local) == {"GLOO_SOCKET_IFNAME"}


def test_a_run_that_was_placed_waits_for_its_job_until_its_client_forgets_it(local):
    stranger: Any = None
    handler = RequestHandler(local, "token", stranger)
    there = PlacedRanks(Placement(2, "gloo", "cpu", 0), asked().prepare)
    handler._fresh = {name: FreshRanks(local, asked(), there, Caller()) for name in ("one", "another")}
    handler.note(DismissSession(session="one"))
    assert handler._fresh.keys() == {"another"}
    handler.close()


def test_the_key_of_a_rendezvous_is_not_among_the_variables():
    assert asked({JOIN_KEY: "k" * 40, "A": "b"}).prepare.environ == (b"A=b",)
