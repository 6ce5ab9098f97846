"""Scatter, gather and placement as pure arithmetic."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.protocol import DataProto
from flowrl.single_controller import Worker, broadcast, register, split_over
from flowrl.single_controller.dispatch import Mesh, MeshPosition, balanced_rows, gather_order, neighbouring_rows
from flowrl.single_controller.failures import death_cause
from flowrl.single_controller.link import open_store
from flowrl.single_controller.placement import NodeResources, bundle_for, cpu_share, shortfall
from flowrl.single_controller.process import device_index

costs = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@given(costs, st.integers(1, 9), st.booleans())
def test_gather_undoes_scatter(cost, slices, balanced):
    """BAT-01: any number of rows over any number of slices, none dropped, none twice, input order restored."""
    plan = balanced_rows(cost, slices) if balanced else neighbouring_rows(len(cost), slices)
    assert len(plan) == slices
    laid = [row for rows in plan for row in rows]
    assert sorted(laid) == list(range(len(cost)))
    assert [laid[i] for i in gather_order(plan)] == list(range(len(cost)))


@given(costs, st.integers(1, 9))
def test_balanced_slices_are_close_and_repeatable(cost, slices):
    plan = balanced_rows(cost, slices)
    loads = [sum(cost[row] for row in rows) for rows in plan]
    # Greedy: no slice exceeds the mean by more than one row.
    assert max(loads) <= sum(cost) / slices + max(cost)
    assert plan == balanced_rows(cost, slices)


def test_equal_costs_are_spread_by_count():
    assert [len(rows) for rows in balanced_rows([0] * 6, 3)] == [2, 2, 2]


def test_mesh_needs_one_answer_per_slice():
    mesh = Mesh.of(
        "train", [MeshPosition(0, False), MeshPosition(1, True), MeshPosition(0, True), MeshPosition(1, False)]
    )
    assert (mesh.num_slices, mesh.ranks_of(0), mesh.answering_rank(0), mesh.answering_rank(1)) == (2, [0, 2], 2, 1)
    with pytest.raises(ValueError, match="slice 0 .* is answered by \\[\\]"):
        Mesh.of("train", [MeshPosition(0, False)])
    with pytest.raises(ValueError, match="data-parallel ranks \\[1\\]"):
        Mesh.of("train", [MeshPosition(1, True)])


def test_a_registered_method_says_what_it_returns():
    """API-02: errors at decoration, naming the method."""
    with pytest.raises(ValueError, match="guess needs a return annotation"):

        class NoAnnotation(Worker):
            @register(dispatch=broadcast)
            def guess(self, x):
                return x

    with pytest.raises(ValueError, match="must be annotated -> DataProto"):

        class SplitValue(Worker):
            @register(dispatch=split_over("world"))
            def guess(self, batch: DataProto) -> int:
                return 1


def nodes(*cpus: float, gpus: float = 0, busy: float = 0) -> list[NodeResources]:
    return [
        NodeResources(f"id{i}", f"10.0.0.{i}", {"CPU": c, "GPU": gpus}, {"CPU": max(0.0, c - busy), "GPU": gpus})
        for i, c in enumerate(cpus)
    ]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.integers(1, 40))
def test_any_number_of_cpu_devices_fits_down_to_a_tenth(cpus, devices):
    """RAY-04: a device takes its share of the CPUs, and all of them always fit."""
    share = cpu_share(cpus, devices)
    if share >= 0.1:
        assert shortfall("main", devices, {"CPU": share}, nodes(*cpus), free=False) is None
    assert share <= sum(cpus) / devices + 1e-9


def test_impossible_requests_show_the_arithmetic():
    """RAY-04: requested against available, per node, with the override to change."""
    assert bundle_for("cpu", 2, nodes(2), None) == {"CPU": 1.0} and bundle_for("cpu", 3, nodes(1), None) == {
        "CPU": 0.33
    }
    with pytest.raises(ValueError, match="cluster.devices=30 on 2 CPUs is 0.06 CPUs each.*at most 20"):
        bundle_for("cpu", 30, nodes(2), None)
    message = shortfall("main", 3, bundle_for("cuda", 3, nodes(8, 8, gpus=1), None), nodes(8, 8, gpus=1), free=False)
    for part in (
        "3 devices of (CPU 0.1, GPU 1)",
        "room for 2",
        "node 10.0.0.1: CPU 8 (8 free), GPU 1 (1 free)",
        "cluster.devices=2",
    ):
        assert part in message
    none = shortfall("main", 1, {"GPU": 1.0, "CPU": 0.1}, nodes(8), free=False)
    assert "no node has a GPU: use cluster.device=cpu" in none
    held = shortfall("main", 2, {"CPU": 1.0}, nodes(2, busy=2), free=True)
    assert "2 (0 free)" in held and "placement_timeout_seconds" in held


def test_assigned_gpu_is_found_among_the_visible_ones():
    assert device_index("1", None) == 1 and device_index("3", "2,3") == 1 and device_index("GPU-b", "GPU-a,GPU-b") == 1


@pytest.mark.parametrize(
    ("message", "tail", "kills", "words"),
    [
        ("Worker unexpectedly exits with a connection error code 2. End of file. OOM killer", [], 0, "SIGKILL"),
        (
            "Worker unexpectedly exits with a connection error code 2.",
            ["Fatal Python error: Segmentation fault"],
            0,
            "SIGSEGV",
        ),
        ("Worker unexpectedly exits with a connection error code 2.", [], 1, "out-of-memory killer"),
        (
            "Memory on the node was 9.6GB / 10GB (0.96), which exceeds the memory usage threshold of 0.95",
            [],
            0,
            "9.6GB / 10GB",
        ),
        ("Worker exits with an exit code 3.", [], 0, "exited with code 3"),
    ],
)
def test_the_cause_of_death_is_told_as_far_as_it_is_known(message, tail, kills, words):
    """RAY-01: signal, memory figures or exit code."""
    assert words in death_cause(message, tail, kills)


def test_three_groups_hold_three_ports_from_choice_to_end():
    """RAY-02: the system picks a port and it is bound at once, so there is no range to configure or to exhaust."""
    stores = [open_store("127.0.0.1", 1) for _ in range(3)]
    assert len({store.port for store in stores}) == 3
    for store in stores:
        with socket.socket() as late, pytest.raises(OSError, match="in use"):
            late.bind(("127.0.0.1", store.port))
