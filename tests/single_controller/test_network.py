"""Interfaces, nodes that do not answer, and paths that a node does not see."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from flowrl.single_controller import Cluster, ResourcePool, node_watch
from flowrl.single_controller.network import GlooInterface, interface_of, own_addresses
from flowrl.single_controller.node_watch import NodeWatch


def test_an_interface_is_found_by_its_address():
    own = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.2", "fe80::1%eth0"]}
    assert interface_of("10.0.0.2", own) == "eth0"
    assert interface_of("fe80::1", own) == "eth0"
    assert interface_of("192.0.2.7", own) is None
    assert interface_of("127.0.0.1", own_addresses()) == "lo"


def test_gloo_listens_on_loopback_until_ranks_of_other_nodes_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    others = (address for name, found in own_addresses().items() for address in found[:1] if name != "lo")
    own = next(others, "127.0.0.1")
    gloo = GlooInterface(own)
    gloo.choose("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    gloo.choose("192.0.2.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of(own, own_addresses())


def test_an_interface_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    GlooInterface("192.0.2.7").choose("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


def test_a_refused_connection_is_an_answer(monkeypatch: pytest.MonkeyPatch, listener: socket.socket):
    """A raylet that ended is for Ray to say; what was never reached is not watched."""
    monkeypatch.setattr(node_watch, "ROUND_SECONDS", 0.0)
    watch = NodeWatch()
    # 240.0.0.1 is reserved: no route leads there, or nobody answers.
    watch.add({"here": listener.getsockname(), "never": ("240.0.0.1", 9)})
    for _ in range(5):
        assert watch.silent() == []
    assert not watch.gone("here") and not watch.gone("unknown")
    listener.close()
    for _ in range(5):
        assert watch.silent() == []
    assert watch.gone("here")


def test_a_path_that_a_node_does_not_see_is_named_at_the_start(cluster: Cluster, tmp_path):
    shared = {"model.path": str(tmp_path), "run.dir": str(tmp_path / "elsewhere")}
    with pytest.raises(ValueError, match=r"run\.dir: node \S+ \(rank 0 of pool 'blind'\) does not see .*elsewhere"):
        ResourcePool(cluster, name="blind", cpus_per_device=0.1, shared=shared)
