"""Nodes that meet at an etcd server: as at c10d's, and what strangers write there harms nobody."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import inspect
import json
import pickle
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_every_open_port
import test_nodes
import torch
from cluster import etcd
from lanes import slow
from test_nodes import ended, free_port, once, press_stop, who_am_i

import nblaunch
from nblaunch import LaunchError, OptionError
from nblaunch.host import rendezvous
from nblaunch.options.launch import LaunchOptions

BACKENDS = ("etcd-v2", "etcd")


@dataclass
class AtEtcd(test_nodes.RendezvousConfig):  # type: ignore[misc]
    """A place for nodes to meet that is a real etcd server."""

    backend: str = "etcd-v2"

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "rdzv_backend": self.backend}

    def join(self, *more: str, endpoint: bool = True, **environment: str):
        return super().join("--rdzv-backend", self.backend, *more, endpoint=endpoint, **environment)

    @property
    def client(self):
        """Return a client that needs no key: whoever reaches the server reads and writes there."""
        import etcd

        return etcd.Client("127.0.0.1", self.port)

    def published(self) -> dict[str, str]:
        """Return what the notebook has published, empty if nothing."""
        import etcd

        with contextlib.suppress(etcd.EtcdKeyNotFound):
            (found,) = self.client.read("/nblaunch").children
            return json.loads(found.value) if found.value else {}
        return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    if importlib.util.find_spec("etcd") is None:
        pytest.skip("python-etcd is missing: pip install 'nblaunch[etcd]'")
    with etcd(tmp_path_factory.mktemp("etcd") / "server") as endpoint:
        yield endpoint


@pytest.fixture
def meeting(request, server, tmp_path, monkeypatch):
    """Give a place to meet, by the backend of the test; nodes that are there at the end are ended."""
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    monkeypatch.setenv("NBLAUNCH_JOIN_KEY_FILE", str(key))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made = AtEtcd(tmp_path, port=int(server.rpartition(":")[2]), backend=getattr(request, "param", "etcd-v2"))
    yield made
    for node in made.nodes:
        if node.poll() is None:
            node.kill()
        node.communicate()


with_one = pytest.mark.parametrize("meeting", [BACKENDS[0], slow(BACKENDS[1])], indirect=True)
"""In CI with one backend, with both in the slow lane."""


def perform(body, **given: Any) -> None:
    """Run a test of the c10d rendezvous with the fixtures of this module."""
    body(**{name: given[name] for name in inspect.signature(body).parameters})


SLOW = (
    test_nodes.test_an_interrupt_reaches_every_rank_of_nodes_that_listen_and_show_their_key_nowhere,
    test_every_open_port.test_strangers_at_every_port_of_a_joined_run_change_nothing,
    test_nodes.test_all_nodes_start_again_when_a_rank_of_one_fails,
    test_nodes.test_ranks_of_a_node_that_is_killed_die_with_it_and_are_reported_as_lost,
)


@pytest.mark.parametrize(
    ("meeting", "body"),
    [
        (BACKENDS[0], test_nodes.test_two_nodes_are_one_run_whose_values_and_output_come_in_rank_order),
        slow((BACKENDS[1], test_nodes.test_two_nodes_are_one_run_whose_values_and_output_come_in_rank_order)),
        *map(slow, ((backend, body) for body in SLOW for backend in BACKENDS)),
    ],
    indirect=["meeting"],
)
def test_what_holds_for_c10d_holds_at_etcd(body, meeting, tmp_path, eventually):
    perform(body, meeting=meeting, tmp_path=tmp_path, eventually=eventually)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            test_nodes.test_a_late_joiner_and_a_leaver_change_the_world_and_are_no_failures,
            marks=pytest.mark.slow,
        ),
        slow(test_nodes.test_an_elastic_run_goes_on_without_a_node_that_is_killed),
    ],
)
def test_membership_changes_at_etcd_too(body, meeting, tmp_path, eventually):
    perform(body, meeting=meeting, tmp_path=tmp_path, eventually=eventually)


@with_one
def test_a_cell_that_is_run_again_meets_under_the_same_name(meeting, eventually):
    for _ in range(2):
        node = meeting.join()
        result = nblaunch.run(who_am_i, args=(torch.ones(1),), **meeting.options)
        assert len(result.values) == 4
        assert ended(node)[0] == 0
        eventually(lambda: not meeting.published(), "nothing of the run is left in etcd")


@with_one
def test_one_node_can_meet_at_etcd_alone(meeting):
    assert nblaunch.run(lambda: 7, **{**meeting.options, "nnodes": 1}).values == [7, 7]


@with_one
def test_a_wait_for_a_node_is_interrupted_at_once(meeting, eventually):
    with once(meeting.published, press_stop), pytest.raises(KeyboardInterrupt):
        nblaunch.run(who_am_i, args=(torch.ones(1),), **meeting.options)
    eventually(lambda: not meeting.published(), "nothing of the run is left in etcd")


@with_one
def test_nodes_that_do_not_come_in_time_are_a_launch_error_that_says_what_to_do(meeting):
    with pytest.raises(LaunchError, match="python -m nblaunch join") as failed:
        nblaunch.run(print, rdzv_conf="join_timeout=1", **meeting.options)
    assert failed.value.phase == "rendezvous"


# --- strangers -------------------------------------------------------------------------------------


def test_a_strangers_pickle_in_etcd_is_refused(meeting, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    def write():
        import base64

        state = base64.b64encode(b"\0" * 32 + pickle.dumps(Trap())).decode()
        meeting.client.write(f"/torch/elastic/rendezvous/{meeting.published()['name']}", state)

    with once(meeting.published, write), pytest.raises(LaunchError, match="refused") as failed:
        nblaunch.run(print, **meeting.options)
    assert failed.value.phase == "rendezvous"
    assert not (tmp_path / "sprung").exists()


def test_nodes_are_not_sent_elsewhere_by_a_stranger(meeting):
    where = rendezvous.config_of(
        LaunchOptions(rdzv_endpoint=meeting.endpoint, rdzv_backend="etcd-v2"), joining=True
    )
    assert where is not None
    path = rendezvous._EtcdEntry(where, meeting.name)._path
    meeting.client.write(path, json.dumps({"gate": "tcp://198.51.100.1:1", "name": "x", "code": "00"}))
    status, said = ended(meeting.join())
    meeting.client.delete(path)
    assert status == 1
    assert "is not signed with this node's key" in said


# --- what is refused before a process starts -------------------------------------------------------


def test_an_endpoint_without_etcd_is_refused():
    endpoint = f"127.0.0.1:{free_port()}"
    pytest.importorskip("etcd", reason="python-etcd is missing: pip install 'nblaunch[etcd]'")
    with pytest.raises(OptionError, match=f"{endpoint}, but no etcd server with the v2 API answers there"):
        nblaunch.run(print, nproc=2, nnodes=2, rdzv_backend="etcd-v2", rdzv_endpoint=endpoint)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_without_the_v2_api_is_named(backend):
    pytest.importorskip("etcd", reason="python-etcd is missing: pip install 'nblaunch[etcd]'")

    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as other:
        threading.Thread(target=other.serve_forever).start()
        endpoint = f"127.0.0.1:{other.server_port}"
        with pytest.raises(LaunchError, match="--enable-v2=true") as failed:
            nblaunch.run(print, nproc=1, rdzv_backend=backend, rdzv_endpoint=endpoint)
        other.shutdown()
    assert failed.value.phase == "rendezvous"


def config_of(**options: Any):
    return rendezvous.config_of(LaunchOptions(nnodes="2", rdzv_endpoint="127.0.0.1", **options))


@pytest.mark.quick
def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"pip install 'nblaunch\[etcd\]'"):
        config_of(rdzv_backend="etcd-v2")
    assert config_of() is not None, "c10d needs none"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("backend", "conf"),
    [("etcd-v2", "ssl_cert=a,ssl_cert_key=b,ca_cert=c"), ("etcd", "cert=a,key=b,cacert=c")],
)
def test_settings_of_the_connection_are_torchs(backend, conf, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    where = config_of(rdzv_backend=backend, rdzv_conf=f"protocol=https,{conf}")
    assert where is not None
    assert (where.port, dict(where.conf)["protocol"]) == (2379, "https")
    with pytest.raises(OptionError, match="'protocol'"):
        config_of(rdzv_conf="protocol=https")
    with pytest.raises(OptionError, match="must be http or https"):
        config_of(rdzv_backend=backend, rdzv_conf="protocol=ftp")
    with pytest.raises(OptionError, match="'colour'"):
        config_of(rdzv_backend=backend, rdzv_conf="colour=red")
