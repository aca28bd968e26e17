"""What Ray is asked for, what is said of the wait, and what cannot be, without a cluster."""

from __future__ import annotations

import sys

import pytest

from nblaunch._errors import OptionError
from nblaunch.nodes.engine import NodeRequest
from nblaunch.nodes.ray import RayEngine, _address
from nblaunch.nodes.raydriver import bundle_for, reason_for


def request(argument: str = "", **environ: str) -> NodeRequest:
    return NodeRequest(
        least=1,
        most=1,
        nproc=1,
        name="nblaunch-1",
        argument=argument,
        environ=environ,
        cwd="/",
        python=sys.executable,
    )


def row(host: str, **total: float) -> dict[str, object]:
    return {"host": host, "total": total, "free": total}


BIG, SMALL, NONE = row("hA", CPU=8, GPU=4), row("hB", CPU=8, GPU=2), row("hC", CPU=2)


@pytest.mark.parametrize(
    ("nproc", "least", "bundle"),
    [
        (2, 2, {"CPU": 2, "GPU": 2}),
        (4, 2, {"CPU": 4}),
        (4, 1, {"CPU": 4, "GPU": 4}),
        (1, 3, {"CPU": 1}),
        ("gpu", 1, {"CPU": 4, "GPU": 4}),
        ("auto", 2, {"CPU": 2, "GPU": 2}),
        ("auto", 3, {"CPU": 1}),
        ("cpu", 2, {"CPU": 8}),
        ("cpu", 4, {"CPU": 2}),
    ],
)
def test_a_node_gives_a_cpu_for_each_rank_and_a_gpu_where_enough_nodes_have_as_many(nproc, least, bundle):
    assert bundle_for(nproc, [BIG, SMALL, NONE], least) == bundle


def test_a_cluster_without_nodes_is_asked_all_the_same():
    assert bundle_for("cpu", [], 1) == {"CPU": 1}


def test_the_reason_says_what_is_wanted_and_what_is_free():
    busy = {**BIG, "free": {"CPU": 0.5}}
    assert reason_for(1, {"CPU": 2, "GPU": 1}, [busy, NONE]) == (
        "waits for 1 x {CPU: 2, GPU: 1}; free: hA {CPU: 0.5, GPU: 0}, hC {CPU: 2, GPU: 0}"
    )
    assert reason_for(2, {"CPU": 4}, [BIG, NONE]).startswith(
        "waits for 2 x {CPU: 4}, which only 1 of 2 nodes can give; free: "
    )


def test_of_many_nodes_those_are_named_that_have_most():
    many = [row(f"h{number}", CPU=number) for number in range(9)]
    assert reason_for(1, {"CPU": 9}, many).endswith(
        "free: h5 {CPU: 5}, h6 {CPU: 6}, h7 {CPU: 7}, h8 {CPU: 8} and 5 more"
    )


@pytest.mark.parametrize(
    ("argument", "environ", "address"),
    [
        ("ray://h:10001", {"RAY_ADDRESS": "other:6379"}, "ray://h:10001"),
        ("", {"RAY_ADDRESS": "h:6379"}, "h:6379"),
        ("", {}, "auto"),
        ("", {"RAY_ADDRESS": "local"}, "auto"),  # which would start one
    ],
)
def test_a_cluster_that_runs_is_taken_and_none_is_started(argument, environ, address):
    assert _address(request(argument, **environ)) == address


def test_the_address_is_that_on_the_way_to_the_head(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379")
    here = RayEngine.address(request(RAY_TMPDIR=str(tmp_path)))
    assert here == RayEngine.address(request("ray://127.0.0.1:10001")) == RayEngine.address(request())


@pytest.mark.parametrize("missing", ["ray", "grpc"])
def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch, missing):
    for name in ("ray", "grpc"):  # found, but for one; nothing is loaded
        monkeypatch.setitem(sys.modules, name, None if name == missing else sys)
    with pytest.raises(OptionError, match=r"pip install 'nblaunch\[ray\]'"):
        RayEngine.check(request("ray://h:10001"))
