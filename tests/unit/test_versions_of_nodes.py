"""What differs between machines: what is refused, what is warned of, and in which words."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.torch_version import TorchVersion

from nblaunch.host.node_main import this_machine
from nblaunch.host.wire import Arriving, Inventory, decode_from_node, encode
from nblaunch.nodes.versions import Differences, compare
from nblaunch.protocol.client import Placement

HERE = Inventory(
    python="3.11.2", torch="2.13.0+cpu", nblaunch="0.1.0", boot="a", backend="gloo", device_type="cpu"
)
NODE = Inventory(
    python="3.11.7",
    torch="2.13.0+cu130",
    nblaunch="0.1.0",
    boot="b",
    backend="cpu:gloo,cuda:nccl",
    device_type="cuda",
    nccl="2.27.3",
    cuda="13.0",
    driver="580.65",
    glibc="2.36",
    gpus=("NVIDIA H200", "NVIDIA H200"),
)


def but(machine: Inventory = NODE, **changes: object) -> Inventory:
    return msgspec.structs.replace(machine, **changes)


def test_machines_alike_run_together_without_a_word():
    """A notebook's machine needs no GPU, and patches of Python and the builds of its torch do not matter."""
    assert compare(HERE, {"hA": NODE, "hB": NODE}) == Differences()
    assert compare(HERE, {"hA": HERE}) == Differences()
    assert Differences().refusal == ""


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (but(python="3.12.1"), "Python 3.11: the notebook's machine, hA; 3.12: hB."),
        (but(torch="2.12.1+cu130"), "torch 2.13.0: the notebook's machine, hA; 2.12.1: hB."),
        (but(nccl="2.26.2"), "NCCL 2.27.3: hA; 2.26.2: hB."),
    ],
    ids=["python", "torch", "nccl"],
)
def test_what_matters_is_refused_with_value_and_host(other, line):
    found = compare(HERE, {"hA": NODE, "hB": other})
    assert found.refused == (line,)
    assert found.warned == ()
    assert line in found.refusal


@pytest.mark.parametrize(("backend", "refused"), [("gloo", False), ("cpu:gloo,cuda:nccl", True)])
def test_nccl_matters_where_the_run_uses_it(backend, refused):
    found = compare(HERE, {"hA": NODE, "hB": but(nccl="2.26.2")}, backend)
    assert bool(found.refused) is refused
    assert found.warned == ()


def test_a_node_must_have_the_notebooks_python_and_torch():
    found = compare(HERE, {"hA": but(python="3.12.1", torch="2.12.0")})
    assert found.refused == (
        "Python 3.11: the notebook's machine; 3.12: hA.",
        "torch 2.13.0: the notebook's machine; 2.12.0: hA.",
    )


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (but(nblaunch="0.2.0"), "nblaunch 0.1.0: the notebook's machine, hA; 0.2.0: hB."),
        (but(torch="2.13.0+cu126"), "torch 2.13.0+cu130: hA; 2.13.0+cu126: hB."),
        (but(nccl="2.27.5"), "NCCL 2.27.3: hA; 2.27.5: hB."),
        (but(cuda="12.6"), "CUDA 13.0: hA; 12.6: hB."),
        (but(driver="560.1"), "NVIDIA driver 580.65: hA; 560.1: hB."),
        (but(gpus=("NVIDIA A100",)), "GPUs NVIDIA H200: hA; NVIDIA A100: hB."),
        (but(glibc="2.31"), "glibc 2.36: hA; 2.31: hB."),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_the_rest_is_a_warning(other, line):
    assert compare(HERE, {"hA": NODE, "hB": other}) == Differences(warned=(line,))


def test_nccl_does_not_matter_where_one_node_has_no_gpu():
    without = but(nccl="2.26.2", backend="gloo", device_type="cpu", gpus=(), driver="")
    assert compare(HERE, {"hA": NODE, "hB": without}) == Differences()


def test_many_hosts_are_counted():
    nodes = {f"h{number}": but(glibc="2.31" if number == 5 else "2.36") for number in range(1024)}
    (line,) = compare(HERE, nodes).warned
    assert line == "glibc 2.36: h0, h1, h2, h3, h4, h6, h7, h8 and 1015 more; 2.31: h5."


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cu130"])
def test_a_node_joins_with_any_build_of_torch(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    its = this_machine(Placement(1, "gloo", "cpu", 0))
    hello = Arriving(name="hA", nproc=1, address="", data="", inventory=its)
    assert decode_from_node(encode(hello)) == hello
    here = but(python=its.python, torch="2.13.0+cpu")
    assert (its.torch, compare(here, {"hA": its}).refused) == (version, ())
