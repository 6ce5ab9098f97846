"""Interfaces, nodes that do not answer, and paths that a node does not see."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

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


@pytest.fixture
def never() -> Iterator[tuple[str, int]]:
    """Where nobody answers: a listener whose queue is full, so the kernel drops what knocks."""
    with socket.socket() as full, ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        yield full.getsockname()


def test_a_refused_connection_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket, never: tuple[str, int]
):
    """A raylet that ended is for Ray to say; what was never reached is not watched."""
    monkeypatch.setattr(node_watch, "ROUND_SECONDS", 0.0)
    watch = NodeWatch()
    watch.add({"here": listener.getsockname(), "never": never})
    for _ in range(5):
        assert watch.silent() == []
    assert not watch.gone("here") and not watch.gone("unknown")
    listener.close()
    for _ in range(5):
        assert watch.silent() == []
    assert watch.gone("here")


def test_what_is_gone_leads_nowhere_each_time_that_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket, never: tuple[str, int]
):
    """One connection request may be lost, and what fails on this machine says nothing of the node."""
    watch = NodeWatch()
    watch.add({"never": never, "here": listener.getsockname()})
    outcomes: list[OSError | None] = [TimeoutError(), OSError(errno.EHOSTUNREACH, "unreachable"), None]

    def lossy(*args: Any, **options: Any) -> socket.socket:
        if (error := outcomes.pop(0)) is not None:
            raise error
        return socket.socket()

    assert watch.gone("never", tries=2)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", lossy)
        assert not watch.gone("here", tries=3) and outcomes == []
        outcomes += [OSError(errno.EMFILE, "too many files")] * 3
        assert not watch.gone("here", tries=3)


def test_a_node_that_answered_and_stops_is_silent_after_three_rounds(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket, never: tuple[str, int]
):
    monkeypatch.setattr(node_watch, "ROUND_SECONDS", 0.0)
    watch = NodeWatch()
    watch.add({"node": listener.getsockname()})
    assert watch.silent() == watch.silent() == []
    watch._nodes["node"].endpoint = never
    # One round more: the attempt under way was made before.
    assert [watch.silent() for _ in range(5)] == [[], [], [], ["node"], ["node"]]


@pytest.mark.parametrize("error", [errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.EPERM])
def test_an_error_of_this_machine_says_nothing_of_a_node(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket, never: tuple[str, int], error: int
):
    """It is no answer of a node that was never reached, and no silence of one that was."""
    monkeypatch.setattr(node_watch, "ROUND_SECONDS", 0.0)
    watch = NodeWatch()
    watch.add({"here": listener.getsockname(), "never": never})
    assert watch.silent() == watch.silent() == []
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: error)
    assert [watch.silent() for _ in range(5)] == [[]] * 5
    assert watch._nodes["here"].answered and not watch._nodes["never"].answered


def test_a_path_that_a_node_does_not_see_is_named_at_the_start(cluster: Cluster, tmp_path):
    shared = {"model.path": str(tmp_path), "run.dir": str(tmp_path / "elsewhere")}
    with pytest.raises(ValueError, match=r"run\.dir: node \S+ \(rank 0 of pool 'blind'\) does not see .*elsewhere"):
        ResourcePool(cluster, name="blind", cpus_per_device=0.1, shared=shared)
